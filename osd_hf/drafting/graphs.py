"""A draft whose kernels are captured as CUDA graphs: what an eager forward computes, without starting each of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from osd_hf.config import OnlineConfig
from osd_hf.drafting.forward import CompiledDraft, CroppableCache, compiles_draft

Replay = Callable[[torch.Tensor], torch.Tensor]
Step = Callable[[Any, torch.Tensor, CroppableCache], torch.Tensor]

OFTEN = 3  # forwards of several tokens that are eager before so many are captured, which takes as long as some of them
MOST_FAILURES = 3  # captures in turn that fail before all is eager: what other threads do may break one


class _Place:
    """What the graphs of a device share: the stream that they are captured in, as libraries keep memory for each; the
    memory that they compute in, which is never given back, as those libraries go on using it; and a lock, as one of
    them is captured, or runs, at a time."""

    def __init__(self, device: Any) -> None:
        self.device, self.lock = device, threading.Lock()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.first = self.capture(lambda: torch.zeros(1, device=device))  # memory without a graph would be given back

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        # The outer stream is the one to go on with, which a capture that fails does not see to. Other threads may
        # learn, and take memory, meanwhile.
        try:
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(now),
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                result = run()
        except RuntimeError as error:  # of the end of a capture that was broken before
            raise error.__context__ or error from None
        return graph, result

    def replay(
        self, graph: torch.cuda.CUDAGraph, result: torch.Tensor, read: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        """What a graph that reads from `read` computes of what is given, after those before it, in whatever stream
        these ran."""
        now = torch.cuda.current_stream(self.device)
        with self.lock:
            self.done.wait(now)
            read.copy_(given)
            graph.replay()
            found = result.clone()
            self.done.record(now)
        return found


_places: dict[Any, _Place] = {}
_making = threading.Lock()


def capture(run: Callable[[torch.Tensor], torch.Tensor], example: torch.Tensor) -> Replay:
    """Capture the kernels that a function of a tensor such as `example` starts, which do not run meanwhile; returns
    what runs them on another one and gives a result of its own each time. Other tensors are read where they lay."""
    device, read = example.device, example.clone()
    with _making:
        if device not in _places:
            _places[device] = _Place(device)
        place = _places[device]
    with place.lock:
        graph, result = place.capture(lambda: run(read))
    return lambda given: place.replay(graph, result, read, given)


@dataclass
class _OfCache:
    """Graphs over a cache by their number of tokens; eager forwards of so many tokens."""

    graphs: dict[int, Replay] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)


class CapturedStep:
    """
    A forward of few tokens over static caches. The first ones of a model over a cache and for a number of tokens are
    eager, then its kernels are captured, in a tenth of a second, and those after it are graphs. One thread calls it at
    a time.

    Args:
        step (`Callable[[Any, torch.Tensor, CroppableCache], torch.Tensor]`): The forward.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graphs: WeakKeyDictionary[Any, WeakKeyDictionary[CroppableCache, _OfCache]] = WeakKeyDictionary()
        self._addresses: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()  # of a model's weights
        self._failures = 0

    def begins(self, model: Any) -> None:
        """A request begins: graphs that read where the model's weights no longer lie are let go."""
        if model in self._graphs and self._addresses[model] != addresses(model):
            del self._graphs[model]

    def __call__(self, model: Any, ids: torch.Tensor, cache: CroppableCache) -> torch.Tensor:
        if model not in self._graphs:
            self._graphs[model], self._addresses[model] = WeakKeyDictionary(), addresses(model)
        known, count = self._graphs[model].setdefault(cache, _OfCache()), ids.shape[1]
        if count in known.graphs:
            return known.graphs[count](ids)
        logits = self._step(model, ids, cache)  # before: libraries choose their kernels in it
        known.calls[count] += 1
        if count == 1 or known.calls[count] >= OFTEN:
            try:
                known.graphs[count] = capture(lambda read: self._step(model, read, cache), ids)
                self._failures = 0
            except RuntimeError:
                self._failures += 1
                if self._failures == MOST_FAILURES:
                    raise
        return logits


def addresses(model: Any) -> tuple[int, ...]:
    """Where the weights of a model lie."""
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))


class CapturedDraft(CompiledDraft):
    """A draft and its copies as [`CompiledDraft`] has them, with graphs of the eager forward's kernels in place of
    compiled code: hardly anything is to be waited for, and a token takes longer."""

    doing, done = "capturing", "captured"
    counts = (1,)  # other numbers of tokens are captured where they come often

    def traced(self, options: dict[str, Any]) -> Any:
        return CapturedStep(self.step)

    def lease(self, model: Any, tokens: int) -> Any:
        leased = super().lease(model, tokens)
        if leased is not None:
            with leased[0].running:
                if isinstance(leased[0].step, CapturedStep):
                    leased[0].step.begins(model)
        return leased


def static_draft(base: Any, config: OnlineConfig) -> CompiledDraft | None:
    """The forward of a draft and its copies over static caches, as `compile_draft` asks for it; `None` where they are
    eager."""
    if not compiles_draft(config, base.device.type):
        return None
    is_captured = config.compile_draft == "auto" and base.device.type == "cuda"
    made = (CapturedDraft if is_captured else CompiledDraft)(base)
    return made if made.can_be_compiled else None
