"""A draft whose kernels are captured as CUDA graphs: what an eager forward computes, without starting each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from osd_hf.config import OnlineConfig
from osd_hf.drafting.forward import CompiledDraft, CroppableCache, compiles_draft

Run = Callable[[], torch.Tensor]

_capturing = threading.Lock()
_streams: dict[Any, Any] = {}  # by device; libraries keep memory for each stream that they ever computed in


def capture(run: Run, device: Any, pool: Any) -> Run:
    """Capture the kernels that a function starts, which do not run meanwhile; returns what runs them, each time on the
    tensors, and into the result, that the function had then. What it needs in between is taken from `pool`, which
    graphs share that never run at once."""
    graph = torch.cuda.CUDAGraph()
    with _capturing, torch.cuda.device(device):
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Other threads may learn, and take memory, meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=_streams[device], capture_error_mode="thread_local"):
            result = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


class CapturedStep:
    """
    A forward of few tokens over static caches. The first one of a model over a cache and for a number of tokens is
    eager, and its kernels are captured then, in some hundredths of a second; those after it are graphs. It is called
    by one thread at a time, and its result is overwritten by the next call.

    Args:
        step (`Callable[[Any, torch.Tensor, CroppableCache], torch.Tensor]`): The forward.
    """

    def __init__(self, step: Callable[[Any, torch.Tensor, CroppableCache], torch.Tensor]) -> None:
        self._step = step
        self._graphs: WeakKeyDictionary[Any, _Graphs] = WeakKeyDictionary()  # of each model
        self._pool: Any = None

    def begins(self, model: Any) -> None:
        """A request begins: graphs that read where the model's weights no longer lie are let go."""
        if model in self._graphs and self._graphs[model].places != places(model):
            del self._graphs[model]

    def __call__(self, model: Any, ids: torch.Tensor, cache: CroppableCache) -> torch.Tensor:
        if model not in self._graphs:
            self._graphs[model] = _Graphs(places(model), WeakKeyDictionary())
        graphs, count = self._graphs[model].by_cache.setdefault(cache, {}), ids.shape[1]
        if count in graphs:
            read, replay = graphs[count]
            read.copy_(ids)
            return replay()
        logits = self._step(model, ids, cache)  # before: libraries choose their kernels in it
        if self._pool is None and model.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        read = ids.clone()
        graphs[count] = read, capture(lambda: self._step(model, read, cache), model.device, self._pool)
        return logits


class _Graphs(NamedTuple):
    """Where a model's weights lie; by cache and number of tokens, the tokens that a graph reads, and what runs it."""

    places: tuple[int, ...]
    by_cache: WeakKeyDictionary[CroppableCache, dict[int, tuple[torch.Tensor, Run]]]


def places(model: Any) -> tuple[int, ...]:
    """Where the weights of a model lie."""
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))


class CapturedDraft(CompiledDraft):
    """A draft and its copies as [`CompiledDraft`] has them, with graphs of the eager forward's kernels in place of
    compiled code: nothing is to be waited for, and a token takes longer."""

    doing, done = "capturing", "captured"
    counts = (1,)  # any number of tokens is captured when it comes

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
