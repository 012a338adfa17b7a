"""Compile forwards over a static cache, or capture them as CUDA graphs."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from osd_hf.config import OnlineConfig
from osd_hf.decoding.checks import KNOWN_ARGUMENTS
from osd_hf.decoding.exactness import difference
from osd_hf.decoding.forward import AHEAD, MASKED_ATTENTION, DraftForward, TargetForward
from osd_hf.errors import UnsupportedModelError, first_line
from osd_hf.models import num_positions, vocab_size_of
from osd_hf.utils.kernels import fast_kernels

logger = logging.getLogger(__name__)

# Tokens of static caches. Each power of two in between is compiled once; longer sequences are eager.
SMALLEST_STATIC_CACHE, LARGEST_STATIC_CACHE = 256, 8192
MAX_COMPILED_TOKENS = 32  # per call of a compiled draft
CHECKED_PROMPT_TOKENS = 4  # before the tokens that a compiled forward is compared on with the eager one
MIN_EAGER_FORWARDS = 3  # of a number of tokens, before it is captured
MAX_CAPTURE_FAILURES = 3  # in a row, before the draft runs eagerly: other threads may break a capture

# Checking at each call whether compiled code still fits takes a fifth of a small model's forward.
UNGUARDED = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}


class CroppableCache(StaticCache):
    """A static cache that can remove its last tokens: they are masked, and overwritten by the next ones."""

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens; their number is given as a negative number."""
        lengths = [layer.cumulative_length for layer in self.layers if layer.is_initialized]
        if tokens_to_remove and lengths:
            with torch.inference_mode(lengths[0].is_inference()):
                torch._foreach_add_(lengths, tokens_to_remove)  # one kernel for all layers

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens, also after a failed forward."""
        with torch.inference_mode(self.layers[0].cumulative_length.is_inference()):
            for layer in self.layers:
                if layer.is_initialized:
                    layer.cumulative_length.fill_(length)


def static_size(tokens: int) -> int:
    """Return the size of the static cache for this number of tokens."""
    return max(SMALLEST_STATIC_CACHE, 1 << (tokens - 1).bit_length())


def _first_tokens(begins: int, ends: int) -> int:
    """Return the tokens that the first cache of a sequence with these lengths must hold."""
    tokens = min(begins + AHEAD, ends)
    return min(tokens, LARGEST_STATIC_CACHE) if begins < LARGEST_STATIC_CACHE else tokens


def compiles_draft(config: OnlineConfig, device_type: str) -> bool:
    """Whether a draft on a device of this type, such as `"cuda"`, is compiled or captured."""
    return device_type not in ("cpu", "meta") if config.compile_draft == "auto" else config.compile_draft


def compile_hindrance(config: PreTrainedConfig, role: str = "model") -> str | None:
    """Return why a model cannot be compiled over a static cache; `None` if it can."""
    if config.is_encoder_decoder:
        return "an encoder-decoder cannot remove tokens from a static cache"
    text = config.get_text_config(decoder=True)
    attention = getattr(text, "_attn_implementation", None)
    if attention not in MASKED_ATTENTION:
        return f"its attention, {attention}, may see the unused end of a static cache"
    try:
        layers = StaticCache(config=text, max_cache_len=8).layers
    except Exception as error:  # noqa: BLE001 - configurations of any kind
        return f"no static cache can be made for it: {first_line(error)}"
    if any(getattr(layer, "is_sliding", True) for layer in layers):  # recurrent layers have no such attribute
        return f"a {role} with sliding windows or recurrent layers cannot remove tokens from a static cache"
    return None


# --- compiled forwards ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Compiled:
    """A compiled forward over caches of one size."""

    step: Any
    several: Any  # for several tokens, if that is another function
    size: int
    free: list[CroppableCache]
    running: threading.Lock = field(default_factory=threading.Lock)


class CompiledForward:
    """
    Compile a forward of few tokens over static caches, which requests use in turn.

    The forward is that of `model` and its copies. Their weights, dtype, and device may change between requests. What
    cannot be compiled runs eagerly, and the log says why, once. On CUDA, compiled code is captured as graphs, for each
    copy, cache, thread, and number of tokens.
    """

    role = "draft"
    doing, done = "compiling", "compiled"
    counts: tuple[int, ...] = (1, 3)  # tokens to compile for: one, and any number of several
    mark_dynamic = staticmethod(torch._dynamo.mark_dynamic)

    def __init__(self, model: PreTrainedModel) -> None:
        # By size of the cache and of the output head; `None` if compiling failed or is under way.
        self._compiled: dict[tuple[int, int], _Compiled | None] = {}
        self._free: dict[int, list[CroppableCache]] = {}  # by size; shared by heads of all sizes
        self._placement: tuple[Any, ...] = ()
        self._lock = threading.Lock()
        why = (
            "its weights are offloaded" if model.device.type == "meta" else compile_hindrance(model.config, self.role)
        )
        self.can_be_compiled = why is None
        if why:
            self._warn(why)

    @property
    def is_eager(self) -> bool:
        """Whether some requests run eagerly."""
        return not self.can_be_compiled or None in self._compiled.values()

    def _warn(self, why: str) -> None:
        logger.warning("The %s is not %s and runs eagerly: %s.", self.role, self.done, why)

    def _warn_failed(self, error: Exception) -> None:
        cause = getattr(error, "inner_exception", error)  # of the compiler
        self._warn(f"{self.doing} failed with {type(cause).__name__}: {first_line(cause)}")

    def give_up(self, compiled: _Compiled, error: Exception) -> None:
        """Run eagerly from now on, because compiled code has failed. Called while no other request runs it."""
        compiled.step = compiled.several = self.step
        with self._lock:
            for key, known in self._compiled.items():
                if known is compiled:
                    self._compiled[key] = None
        self._warn_failed(error)

    @staticmethod
    def step(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> Any:
        """The function to compile."""
        return model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True).logits[:, -1]

    def own_step(self) -> Any:
        """Return a copy of the function. The compiler caches by code object, and each size needs its own code."""
        return types.FunctionType(self.step.__code__.replace(), globals())

    def compile_step(self, options: dict[str, Any]) -> Any:
        """Return the function, which is compiled at its first call. Only its weights may change later."""
        return torch.compile(self.own_step(), fullgraph=True, options=options | UNGUARDED)

    def warm_up(self, step: Any, model: PreTrainedModel, ids: torch.Tensor, cache: CroppableCache) -> None:
        for _ in range(3):
            step(model, ids, cache)

    def mode(self) -> AbstractContextManager[Any]:
        """Return the context in which caches are created and changed."""
        return torch.inference_mode()

    def lease(self, model: PreTrainedModel, tokens: int) -> tuple[_Compiled, CroppableCache] | None:
        """Return the compiled forward for at most `tokens` tokens, and an empty cache; `None` if the model runs
        eagerly. The first request waits for the compiler; others run eagerly until then."""
        size = static_size(tokens)
        if not self.can_be_compiled or torch.is_autocast_enabled(model.device.type):  # code has one dtype
            return None
        key = size, getattr(model.get_output_embeddings(), "out_features", 0)
        with self._lock:
            if self._placement != (model.dtype, model.device):
                self._compiled, self._free, self._placement = {}, {}, (model.dtype, model.device)
            known, free, is_new = self._compiled, self._free.setdefault(size, []), key not in self._compiled
            if is_new:
                known[key] = None
        with self.mode():
            if is_new:
                known[key] = self._compile(model, size, free)
            compiled = known[key]
            if compiled is None:
                return None
            cache = self._cache(model, size, free)
            cache.reset()
        return compiled, cache

    def _cache(self, model: PreTrainedModel, size: int, free: list[CroppableCache]) -> CroppableCache:
        with self._lock:
            return free.pop() if free else self.new_cache(model, size)

    def new_cache(self, model: PreTrainedModel, size: int) -> CroppableCache:
        return CroppableCache(config=model.config.get_text_config(decoder=True), max_cache_len=size)

    def first_lease(self, model: PreTrainedModel, begins: int, ends: int) -> tuple[_Compiled, CroppableCache] | None:
        """Return a lease for a sequence with these lengths."""
        return self.lease(model, _first_tokens(begins, ends))

    def larger(
        self, model: PreTrainedModel, compiled: _Compiled, cache: CroppableCache, tokens: int
    ) -> tuple[_Compiled | None, Any]:
        """Exchange a lease for one with more tokens, and move the cache's content. If the model continues eagerly, the
        result is `None` and a dynamic cache."""
        try:
            leased = self.lease(model, tokens)
        except Exception as error:  # noqa: BLE001 - such as too little memory
            self._warn(f"no cache of {tokens} tokens could be made: {first_line(error)}")
            leased = None
        larger = DynamicCache(config=model.config.get_text_config(decoder=True)) if leased is None else leased[1]
        with self.mode():
            for new, old in zip(larger.layers, cache.layers, strict=True):
                end = int(old.cumulative_length) if old.is_initialized else 0
                if end:
                    new.update(old.keys[:, :, :end].clone(), old.values[:, :, :end].clone())
        compiled.free.append(cache)
        return (None, larger) if leased is None else leased

    def prepare(self, model: PreTrainedModel, tokens: int) -> None:
        """Compile for sequences of at most `tokens` tokens."""
        size = SMALLEST_STATIC_CACHE
        while size < 2 * tokens and size <= LARGEST_STATIC_CACHE:
            with fast_kernels(model):  # as requests are served
                leased = self.lease(model, size)
            if leased is not None:
                leased[0].free.append(leased[1])
            size *= 2

    def _compile(self, model: PreTrainedModel, size: int, free: list[CroppableCache]) -> _Compiled | None:
        if size > LARGEST_STATIC_CACHE:
            self._warn(f"a sequence is longer than {LARGEST_STATIC_CACHE} tokens, the largest static cache")
            return None
        options: dict[str, Any] = {"freezing": False}  # weights change
        if model.device.type == "cuda":
            # Launching the kernels of a small model takes longer than running them.
            options["triton.cudagraphs"] = True
        started = time.perf_counter()
        what = f"the {self.role}'s forward for up to {size} tokens"
        logger.info("%s %s.", self.doing.capitalize(), what)
        try:
            cache, steps = self._cache(model, size, free), []
            cache.reset()
            token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            model(input_ids=token, past_key_values=cache, use_cache=True)
            # Each size has its own code, although there are several.
            with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
                for count in self.counts:
                    ids = token.repeat(1, count)
                    if count > 1:
                        self.mark_dynamic(ids, 1)
                    steps.append(self.compile_step(options))
                    self.warm_up(steps[-1], model, ids, cache)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises: the eager forward does the same
            self._warn_failed(error)
            return None
        logger.info("%s %s in %.1f s.", self.done.capitalize(), what, time.perf_counter() - started)
        free.append(cache)
        return _Compiled(steps[0], steps[-1], size, free)


# --- the draft ------------------------------------------------------------------------------------------------------


class CompiledDraft(CompiledForward):
    """Compile a draft and its copies for a single token, and for several: those that it missed while past text
    proposed."""

    def forward(self, draft: PreTrainedModel, begins: int, ends: int) -> DraftForward:
        """Return the forward of one request with these sequence lengths."""
        leased = self.first_lease(draft, begins, ends)
        return DraftForward(draft) if leased is None else StaticForward(self, draft, *leased)


class StaticForward(DraftForward):
    """Run few tokens by the compiled forward and a prompt by the eager one, over one static cache. A full cache is
    exchanged for a larger one; beyond the largest, all is eager."""

    def __init__(
        self, owner: CompiledDraft, draft: PreTrainedModel, compiled: _Compiled, cache: CroppableCache
    ) -> None:
        super().__init__(draft, cache=cache)
        self._owner = owner
        self._compiled: _Compiled | None = compiled

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        count = ids.shape[1]
        if self._compiled is not None and self.length + count > self._compiled.size:
            self._compiled, cache = self._owner.larger(self.draft, self._compiled, self.cache, self.length + count)
            self._use(cache)
        if self._compiled is None or self.length == 0 or count > MAX_COMPILED_TOKENS:
            return super().feed(ids)
        with self._compiled.running:
            step = self._compiled.step if count == 1 else self._compiled.several
            fed = ids.clone()  # a tensor of inference mode
            try:
                logits: torch.Tensor = step(self.draft, fed, self.cache)
            except Exception as error:  # such as a failed capture
                if step is self._owner.step:
                    raise
                self._owner.give_up(self._compiled, error)
                self.cache.cut(self.length)
                logits = self._owner.step(self.draft, fed, self.cache)
            self.length += count
            return logits.clone()  # a captured graph writes the next logits to the same place

    def close(self) -> None:
        if self._compiled is not None:
            self._compiled.free.append(self.cache)


# --- the target -----------------------------------------------------------------------------------------------------


class CompiledTarget(CompiledForward):
    """Compile the target for at least two tokens. The target is the user's, and may change between requests: each call
    checks whether compiled code still fits, and compiles again if not."""

    role = "target"
    counts = (3,)
    mark_dynamic = staticmethod(torch._dynamo.maybe_mark_dynamic)  # compiled again where a number is fixed

    @staticmethod
    def step(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> Any:
        return model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True).logits

    def compile_step(self, options: dict[str, Any]) -> Any:
        return torch.compile(self.own_step(), fullgraph=True, options=options)

    def warm_up(self, step: Any, model: PreTrainedModel, ids: torch.Tensor, cache: CroppableCache) -> None:
        super().warm_up(step, model, ids, cache)
        self._check(step, model, cache)

    def _check(self, step: Any, model: PreTrainedModel, cache: CroppableCache) -> None:
        """Raise UnsupportedModelError if the compiled forward over several tokens differs from eager forwards over
        one."""
        count, eager = self.counts[0], DynamicCache(config=model.config.get_text_config(decoder=True))
        ids = torch.arange(1, CHECKED_PROMPT_TOKENS + count + 1, device=model.device)[None] % vocab_size_of(model)
        prompt, behind = ids[:, :-count], ids[0, -count:].clone()[None]  # not a view of the sequence
        self.mark_dynamic(behind, 1)
        cache.reset()
        for used in (cache, eager):
            self.step(model, prompt, used)
        compiled_logits = step(model, behind, cache)[0]
        eager_logits = torch.cat([self.step(model, behind[:, i : i + 1], eager)[0] for i in range(count)])
        if why := difference(model, list(compiled_logits), list(eager_logits)):
            raise UnsupportedModelError(f"compiled, {why}")

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        # The loop writes into the logits, so they are no tensors of inference mode. Hooks change what a forward does.
        check_hooks = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
        with check_hooks, torch.inference_mode(False), torch.no_grad():
            yield

    def forward(
        self, model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict[str, Any], max_length: int, limit: float
    ) -> CompiledTargetForward | None:
        """Return the forwards of a request with these arguments of the loop, or `None` if they must be eager. No
        forward reads more than `limit` tokens."""
        config, cache = kwargs["generation_config"], kwargs.get("past_key_values")
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if cache is None or type(cache) is not DynamicCache or cache.get_seq_length() > 0 or model.training:
            return None
        has_other_arguments = any(kwargs[name] is not None for name in kwargs.keys() - KNOWN_ARGUMENTS)
        if has_other_arguments or config.output_attentions or config.output_hidden_states:
            return None
        if mask is not None and not mask.all():
            return None
        if positions is not None and not torch.equal(positions[0], torch.arange(len(positions[0])).to(positions)):
            return None
        # A single token is fed with another one.
        leased = self.first_lease(model, input_ids.shape[1], max_length + 1)
        return None if leased is None else CompiledTargetForward(self, model, input_ids, kwargs, *leased, limit)


class CompiledTargetForward(TargetForward):
    """Verify candidates by the compiled target. The prompt is read eagerly. Then the content of the cache moves to a
    static cache, to larger ones as the sequence grows, and back at the end."""

    def __init__(
        self,
        owner: CompiledTarget,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        kwargs: dict[str, Any],
        compiled: _Compiled,
        cache: CroppableCache,
        limit: float,
    ) -> None:
        super().__init__(model, input_ids, kwargs)
        self._owner = owner
        self._compiled: _Compiled | None = compiled  # `None`: the request continues eagerly
        self._cache = cache
        self._given: DynamicCache = kwargs["past_key_values"]
        self._has_moved = False
        self._limit = min(num_positions(model.config) or math.inf, limit)

    @property
    def cache(self) -> Any:
        return self._given  # gets its content back at the end

    def forward(self, ids: torch.Tensor, count: int, *, is_first: bool) -> Any:
        if is_first or not self._holds(ids.shape[1] + 1):
            return super().forward(ids, count, is_first=is_first)
        assert self._compiled is not None
        with self._owner.mode(), self._compiled.running:
            new = ids[0, -count:].repeat(2 if count == 1 else 1)[None]  # not a view of the sequence
            torch._dynamo.maybe_mark_dynamic(new, 1)
            if count == 1 and ids.shape[1] == self._limit:  # there is no position for a second token
                logits = self._owner.step(self.model, ids[:, -1:], self._cache)
            else:
                logits = self._compiled_logits(self._compiled, new, ids.shape[1] - count)
                if count == 1:
                    self._cache.crop(-1)
            return CausalLMOutputWithPast(logits=logits[:, :count].clone(), past_key_values=self._cache)

    def _holds(self, tokens: int) -> bool:
        """Move the content of the cache to a static cache for this many tokens. Return whether there is one."""
        layers = self._given.layers
        if not self._has_moved and (
            len(layers) != len(self._cache.layers) or any(type(layer) is not DynamicLayer for layer in layers)
        ):
            return False
        if self._compiled is not None and tokens > self._compiled.size:
            self._compiled, cache = self._owner.larger(self.model, self._compiled, self._cache, tokens)
            if self._compiled is None and self._has_moved:
                self._move_back(cache)
            elif self._compiled is not None:
                self._cache = cache
        if self._compiled is not None and not self._has_moved:
            self._has_moved = True
            with self._owner.mode():
                for static, dynamic in zip(self._cache.layers, layers, strict=True):
                    static.update(dynamic.keys, dynamic.values)
                    dynamic.keys, dynamic.values = dynamic.keys[:, :, :0].clone(), dynamic.values[:, :, :0].clone()
        return self._compiled is not None

    def _compiled_logits(self, compiled: _Compiled, ids: torch.Tensor, begins: int) -> torch.Tensor:
        step = compiled.step
        try:
            logits: torch.Tensor = step(self.model, ids, self._cache)
        except Exception as error:  # the target has changed, or a capture has failed
            if step is self._owner.step:
                raise
            self._owner.give_up(compiled, error)
            self._cache.cut(begins)
            logits = self._owner.step(self.model, ids, self._cache)
        return logits

    def _move_back(self, cache: Any) -> None:
        end = int(cache.get_seq_length())
        for static, dynamic in zip(cache.layers, self._given.layers, strict=True):
            dynamic.keys, dynamic.values = (x[:, :, :end].clone() for x in (static.keys, static.values))
        self.kwargs["past_key_values"] = self._given

    def close(self) -> None:
        if self._compiled is not None:
            if self._has_moved:
                self._move_back(self._cache)
            self._compiled.free.append(self._cache)


# --- captured graphs ------------------------------------------------------------------------------------------------

Step = Callable[[PreTrainedModel, torch.Tensor, CroppableCache], torch.Tensor]
Replay = Callable[[torch.Tensor], torch.Tensor]


class _GraphDevice:
    """What the graphs of a device share: a stream and memory, which libraries keep for each stream, and a lock, as one
    graph is captured or runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.first = self.capture(lambda: torch.zeros(1, device=device))  # keeps the memory

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        # A failed capture leaves the thread on the capture stream. Other threads may learn at the same time.
        try:
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(now),
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                result = run()
        except RuntimeError as error:
            raise error.__context__ or error from None
        return graph, result

    def replay(
        self, graph: torch.cuda.CUDAGraph, result: torch.Tensor, read: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        """Run a graph that reads from `read` on the given tensor, after earlier graphs of any stream."""
        now = torch.cuda.current_stream(self.device)
        with self.lock:
            self.done.wait(now)
            read.copy_(given)
            graph.replay()
            found = result.clone()
            self.done.record(now)
        return found


_graph_devices: dict[torch.device, _GraphDevice] = {}
_graph_devices_lock = threading.Lock()


def capture(run: Callable[[torch.Tensor], torch.Tensor], example: torch.Tensor) -> Replay:
    """Capture the kernels of a function of a tensor like `example`; return a function that runs them on another one.
    Other tensors are read from where they were."""
    device, read = example.device, example.clone()
    with _graph_devices_lock:
        if device not in _graph_devices:
            _graph_devices[device] = _GraphDevice(device)
        shared = _graph_devices[device]
    with shared.lock:
        graph, result = shared.capture(lambda: run(read))
    return lambda given: shared.replay(graph, result, read, given)


@dataclass
class _CacheGraphs:
    """Graphs over one cache, and eager forwards, by the number of tokens."""

    graphs: dict[int, Replay] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)


class CapturedStep:
    """A forward of few tokens over static caches that captures itself: for each model, cache, and number of tokens,
    the first calls are eager. One thread calls it at a time."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graphs: WeakKeyDictionary[Any, WeakKeyDictionary[CroppableCache, _CacheGraphs]] = WeakKeyDictionary()
        self._addresses: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()  # of a model's weights
        self._failures = 0

    def begin_request(self, model: PreTrainedModel) -> None:
        """Drop graphs that read weights from where they no longer are."""
        if model in self._graphs and self._addresses[model] != _addresses(model):
            del self._graphs[model]

    def __call__(self, model: PreTrainedModel, ids: torch.Tensor, cache: CroppableCache) -> torch.Tensor:
        if model not in self._graphs:
            self._graphs[model], self._addresses[model] = WeakKeyDictionary(), _addresses(model)
        known, count = self._graphs[model].setdefault(cache, _CacheGraphs()), ids.shape[1]
        if count in known.graphs:
            return known.graphs[count](ids)
        logits = self._step(model, ids, cache)  # libraries choose their kernels here
        known.calls[count] += 1
        if count == 1 or known.calls[count] >= MIN_EAGER_FORWARDS:
            try:
                known.graphs[count] = capture(lambda read: self._step(model, read, cache), ids)
                self._failures = 0
            except RuntimeError:
                self._failures += 1
                if self._failures == MAX_CAPTURE_FAILURES:
                    raise
        return logits


def _addresses(model: PreTrainedModel) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))


class CapturedDraft(CompiledDraft):
    """Capture the eager forward of a draft and its copies. That takes less time than compiling, and a token takes
    more."""

    doing, done = "capturing", "captured"
    counts = (1,)  # other numbers are captured if they occur often

    def compile_step(self, options: dict[str, Any]) -> Any:
        return CapturedStep(self.step)

    def lease(self, model: PreTrainedModel, tokens: int) -> tuple[_Compiled, CroppableCache] | None:
        leased = super().lease(model, tokens)
        if leased is not None:
            with leased[0].running:
                if isinstance(leased[0].step, CapturedStep):
                    leased[0].step.begin_request(model)
        return leased


def static_draft(base: PreTrainedModel, config: OnlineConfig) -> CompiledDraft | None:
    """Return the compiled or captured forward of a draft and its copies; `None` if they are eager."""
    if not compiles_draft(config, base.device.type):
        return None
    is_captured = config.compile_draft == "auto" and base.device.type == "cuda"
    made = (CapturedDraft if is_captured else CompiledDraft)(base)
    return made if made.can_be_compiled else None
