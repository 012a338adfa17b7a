"""Run forwards over caches of a fixed size: captured as CUDA graphs of fast copies on GPUs, compiled elsewhere."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from osd_hf.config import OnlineConfig
from osd_hf.decoding.checks import batch_hindrance, difference, log_once, unsupported
from osd_hf.decoding.forward import AHEAD, Ragged, read_padded, usual_tensors
from osd_hf.draft_head import joined
from osd_hf.errors import UnsupportedModelError, first_line
from osd_hf.models import modules_of, vocab_size_of
from osd_hf.utils.context import to_device
from osd_hf.utils.kernels import fast_kernels

logger = logging.getLogger(__name__)

SMALLEST_SIZE = 256  # tokens of a cache; each power of two above is captured or compiled once
LARGEST_COMPILED_SIZE = 8192  # longer sequences are eager: each size takes a minute to compile
MAX_STATIC_TOKENS = 33  # of a row in one forward
MAX_STATIC_ROWS = 32
COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, MAX_STATIC_TOKENS)  # tokens of captured forwards; others are padded
PREPARED_COUNTS = (1, 2, 3, 4, 5, 6, 8)
CHECKED_PROMPT_TOKENS = 4  # before the tokens on which a compiled forward is compared with the eager one
MAX_CAPTURE_FAILURES = 3  # in a row: other threads may break a capture
MAX_CODES = 64  # versions of a compiled layer: numbers of tokens and rows, kinds of layers
OUTPUT_HOOKS = "transformers.utils.output_capturing"
MAX_GRAPHS = 64  # of one cache and model; the oldest are dropped

Tensors = tuple[Tensor, ...]


def compiles_draft(config: OnlineConfig, device_type: str) -> bool:
    """Whether a draft on a device of this type, such as `"cuda"`, is compiled or captured."""
    return device_type not in ("cpu", "meta") if config.compile_draft == "auto" else config.compile_draft


def static_draft(base: PreTrainedModel, config: OnlineConfig) -> StaticForward | None:
    """Return the static forward of a draft and its copies; `None` if they are eager."""
    made = StaticForward(base, "draft") if compiles_draft(config, base.device.type) else None
    return made if made is not None and made.is_possible else None


def static_target(
    target: PreTrainedModel, config: OnlineConfig, state_layers: Sequence[int] = ()
) -> StaticForward | None:
    """Return the static forward of a target, which also returns the hidden states that a draft head reads; `None` if
    it is eager. `"auto"` captures on CUDA devices."""
    auto, is_cuda = config.compile_target == "auto", target.device.type == "cuda"
    is_static = is_cuda if auto else config.compile_target
    made = StaticForward(target, "target", state_layers=state_layers) if is_static else None
    return made if made is not None and (made.is_possible or not auto) else None


def static_size(tokens: int) -> int:
    """Return the size of the cache for this number of tokens."""
    return max(SMALLEST_SIZE, 1 << (tokens - 1).bit_length())


class StaticCache(Ragged):
    """A cache of a fixed size that requests use in turn, with the graphs over it by model."""

    def __init__(self, model: PreTrainedModel, rows: int, size: int) -> None:
        super().__init__(model, rows, size)
        self.graphs: WeakKeyDictionary[Any, tuple[Any, dict[Any, Replay]]] = WeakKeyDictionary()
        self.key: Any = None  # of caches that can stand in for this one
        self.state_layers: list[int] = []  # hidden states that forwards return
        self.states: Tensor | None = None  # of the last forward, `(rows, tokens, width)`, in half precision
        self.steps: Any = None  # the compiled forwards for one token, and for several


class StaticForward:
    """
    Run few tokens of a model, or its copies, over caches of a fixed size.

    On CUDA devices a forward is captured as a graph, for each copy of the model, cache, and number of tokens. Its
    layers are compiled before, where that is possible ([`fast_copy`]). The first replay of a target's graph is
    compared with the eager forward. Weights that change in place keep the graphs; other changes of
    the model drop them. Elsewhere forwards are compiled, for each size. What cannot be captured or compiled runs
    eagerly, and the log says why, once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        role: str,
        *,
        is_captured: bool | None = None,
        code: LayerCode | None = None,
        state_layers: Sequence[int] = (),
    ) -> None:
        self.role, self._state_layers = role, list(state_layers)
        self.is_captured = model.device.type == "cuda" if is_captured is None else is_captured
        self._free: dict[tuple[Any, ...], list[StaticCache]] = {}
        self._steps: dict[tuple[Any, ...], Any] = {}  # compiled; `None` if compiling failed or is under way
        self._signatures: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        # What graphs are captured from: copies with compiled layers, or else without.
        code = LAYER_CODE if code is None and model.device.type == "cuda" else code
        self._codes: list[LayerCode | None] = [None] if code is None else [code, None]
        self._copies: WeakKeyDictionary[Any, tuple[Any, PreTrainedModel]] = WeakKeyDictionary()
        self._failures = 0
        self._lock, self._running = threading.Lock(), threading.Lock()
        why = "its weights are offloaded" if model.device.type == "meta" else unsupported(model)
        devices = set((getattr(model, "hf_device_map", None) or {}).values())
        why = "its layers are on several devices" if why is None and len(devices) > 1 else why
        self.is_possible = why is None
        if why:
            self._warn(why)

    @property
    def is_eager(self) -> bool:
        """Whether some requests run eagerly."""
        return not self.is_possible or None in self._steps.values()

    def _warn(self, why: str) -> None:
        done = "captured" if self.is_captured else "compiled"
        logger.warning("The %s is not %s and runs eagerly: %s.", self.role, done, why)

    def _warn_failed(self, error: Exception) -> None:
        cause = getattr(error, "inner_exception", error)  # of the compiler
        doing = "capturing" if self.is_captured else "compiling"
        self._warn(f"{doing} failed with {type(cause).__name__}: {first_line(cause)}")

    # --- caches -----------------------------------------------------------------------------------------------------

    def lease(self, model: PreTrainedModel, rows: int, begins: int, ends: int) -> StaticCache | None:
        """Return a cache for so many rows with these sequence lengths; `None` if the model runs eagerly. The first
        request waits for the compiler; others run eagerly until then."""
        tokens = min(begins + AHEAD, ends) + MAX_STATIC_TOKENS
        rows = 1 << (rows - 1).bit_length()
        if not self.is_possible or rows > (MAX_STATIC_ROWS if self.is_captured else 1):
            return None
        if torch.is_autocast_enabled(model.device.type) or model.training:  # code has one dtype
            return None
        try:
            if why := batch_hindrance(model):
                self.is_possible = False
                self._warn(why)
                return None
            return self._lease(model, rows, static_size(tokens))
        except torch.OutOfMemoryError as error:
            self._warn(f"no cache of {static_size(tokens)} tokens could be made: {first_line(error)}")
            return None

    def _lease(self, model: PreTrainedModel, rows: int, size: int) -> StaticCache | None:
        head = getattr(model.get_output_embeddings(), "out_features", 0)
        attention = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
        key = rows, size, model.dtype, model.device, attention
        if self.is_captured:
            self._signatures[model] = signature = _signature(model)
            if signature is None:
                what = f"The {self.role} is not captured and runs eagerly"
                log_once(model, f"{what}: it has hooks, which a graph would not call.")
                return None
        with self._lock:
            free = self._free.setdefault(key, [])
            is_new = not self.is_captured and (*key, head) not in self._steps
            if is_new:
                self._steps[*key, head] = None
            cache = free.pop() if free else None
        with usual_tensors():
            cache = cache or StaticCache(model, rows, size)
            cache.model, cache.rows, cache.key, cache.state_layers = model, rows, key, self._state_layers
            if is_new:
                self._steps[*key, head] = self._compile(cache)
        if self.is_captured:
            return cache
        cache.steps = self._steps[*key, head]
        return None if cache.steps is None else cache

    def release(self, cache: StaticCache) -> None:
        """Take a cache back."""
        with self._lock:
            free = self._free.setdefault(cache.key, [])
            if all(other is not cache for other in free):  # an interrupt may have left it here already
                free.append(cache)
                cache.model = None  # which need not live as long

    def larger(self, cache: StaticCache, tokens: int) -> StaticCache | None:
        """Exchange a cache for one that holds more tokens; `None` if the model continues eagerly."""
        new = self.lease(cache.model, cache.capacity, tokens, tokens)
        if new is None:
            return None
        try:
            with usual_tensors():
                new.load(cache.cache, [0] * cache.capacity)
        except torch.OutOfMemoryError as error:
            self._warn(f"no cache of {new.size} tokens could be made: {first_line(error)}")
            return None
        new.rows = cache.rows
        self.release(cache)
        return new

    def prepare(self, model: PreTrainedModel, tokens: int) -> None:
        """Capture or compile for one row with sequences of at most `tokens` tokens."""
        size = SMALLEST_SIZE
        while size < 2 * tokens:
            with fast_kernels(model):  # as requests are served
                cache = self.lease(model, 1, size - MAX_STATIC_TOKENS, size - MAX_STATIC_TOKENS)
                if cache is None:
                    return
                _load_token(cache)
                for count in PREPARED_COUNTS if self.is_captured else ():
                    self.step(cache, torch.zeros(1, count, dtype=torch.long, device=model.device), [1])
            self.release(cache)
            size *= 2

    # --- forwards ---------------------------------------------------------------------------------------------------

    def step(self, cache: StaticCache, ids: Tensor, starts: Sequence[int], last: Tensor | None = None) -> Tensor:
        """Return the logits after tokens, `(rows, tokens, vocab)`, as [`~Ragged.feed`] does."""
        rows, count = ids.shape
        least = next(n for n in COUNTS if n >= count) if self.is_captured else max(count, 1 + (self.role == "target"))
        with usual_tensors():
            at = to_device([*starts, *[0] * (cache.capacity - rows)], ids.device)[:, None]
            last = at + (count - 1) if last is None else _padded(last, cache.capacity, 1)
            given = _padded(ids, cache.capacity, least)
            if self.is_captured:
                found = self.run(cache, ("step", least), functools.partial(_step, cache), (given, at, last))
            else:
                found = self._compiled_step(cache, given, at, last)
        cache.states = found[1][:rows, :count] if cache.state_layers else None
        return found[0][:rows, :count]

    def run(self, cache: StaticCache, key: Any, run: Callable[..., Tensors], inputs: Tensors) -> Tensors:
        """Run a function of a model and tensors over a cache by its graph; at first eagerly, and capture it then."""
        model = cache.model
        if model not in cache.graphs or cache.graphs[model][0] != self._signatures[model]:
            cache.graphs[model] = self._signatures[model], {}
        graphs = cache.graphs[model][1]
        if key in graphs:
            return graphs[key](*inputs)
        with usual_tensors():
            expected = run(model, *inputs)
            for code in tuple(self._codes):
                error = self._capture(model, code, graphs, key, run, inputs, expected)
                if error is None:
                    break
                self._drop(code, error)
        return expected

    def _drop(self, code: LayerCode | None, error: Exception) -> None:
        """Capture no more from copies with this code. Threads may find out at the same time."""
        with self._lock:
            if code not in self._codes:
                return
            self._codes.remove(code)
            self._failures = 0
            if not self._codes:
                self.is_possible = False
        if code is not None:
            logger.warning("The layers of the %s are not compiled: %s", self.role, first_line(error))
        if not self._codes:
            self._warn_failed(error)

    def _capture(
        self,
        model: PreTrainedModel,
        code: LayerCode | None,
        graphs: dict[Any, Replay],
        key: Any,
        run: Any,
        inputs: Tensors,
        expected: Tensors,
    ) -> Exception | None:
        """Capture a function; return why this cannot be done from such copies of the model."""
        is_ready = False
        try:
            kind = self._signatures[model], code
            known, fast = self._copies.get(model, (None, None))
            if fast is None or known != kind:
                fast = fast_copy(model, code)
                self._copies[model] = kind, fast
            with torch._dynamo.config.patch(recompile_limit=MAX_CODES):
                run(fast, *inputs)  # compilers and libraries choose their kernels here
            is_ready = True
            replay = capture(functools.partial(run, fast), inputs)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises: the eager forward does the same
            self._failures += is_ready
            return error if not is_ready or self._failures == MAX_CAPTURE_FAILURES else None
        self._failures = 0
        if self.role == "target" and (why := difference(model, list(replay(*inputs)[0]), list(expected[0]))):
            return UnsupportedModelError(f"captured, {why}")
        while len(graphs) >= MAX_GRAPHS:
            del graphs[next(iter(graphs))]
        graphs[key] = replay
        return None

    # --- compiled forwards ------------------------------------------------------------------------------------------

    def _compiled_step(self, cache: StaticCache, ids: Tensor, starts: Tensor, last: Tensor) -> Tensors:
        # No views, nor tensors of inference mode.
        ids, starts, last = (each.clone(memory_format=torch.contiguous_format) for each in (ids, starts, last))
        with self._running, contextlib.nullcontext() if self.role == "draft" else _guarding_hooks():
            if self.role == "target":
                torch._dynamo.maybe_mark_dynamic(ids, 1)
            try:
                found: Tensors = cache.steps[ids.shape[1] > 1](cache, cache.model, ids, starts, last)
            except Exception as error:
                if cache.steps is EAGER_STEPS:
                    raise
                cache.steps = EAGER_STEPS
                with self._lock:
                    self._steps = dict.fromkeys(self._steps)
                self._warn_failed(error)
                found = _step(cache, cache.model, ids, starts, last)
        return found

    def _compile(self, cache: StaticCache) -> Any:
        """Compile the forward for one token of a draft, and for any number of several; return both, or `None`."""
        if cache.size > LARGEST_COMPILED_SIZE:
            self._warn(f"a sequence is longer than {LARGEST_COMPILED_SIZE} tokens, the largest static cache")
            return None
        model, started = cache.model, time.perf_counter()
        what = f"the {self.role}'s forward for up to {cache.size} tokens"
        logger.info("Compiling %s.", what)
        options: dict[str, Any] = {"freezing": False}  # weights change
        mark_dynamic, counts = torch._dynamo.maybe_mark_dynamic, (3, 3, 3, 3)
        if self.role == "draft":  # of which only weights change, so that its code is not checked at each call
            options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
            mark_dynamic, counts = torch._dynamo.mark_dynamic, (1, 3, 3, 3)
        try:
            # The compiler caches by code object, and each size needs its own code.
            own = [types.FunctionType(_step.__code__.replace(), globals()) for _ in range(2)]
            steps = tuple(torch.compile(each, fullgraph=True, options=options) for each in own)
            _load_token(cache)
            token = torch.ones(1, 1, dtype=torch.long, device=model.device)
            _step(cache, model, token, token, token)  # transformers adds its hooks for hidden states
            with _guarding_hooks():
                for count in counts:
                    ids = token.repeat(1, count)
                    if count > 1:
                        mark_dynamic(ids, 1)
                    steps[count > 1](cache, model, ids, token, token + (count - 1))
                if self.role == "target":
                    _check(steps[1], cache)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises: the eager forward does the same
            self._warn_failed(error)
            return None
        logger.info("Compiled %s in %.1f s.", what, time.perf_counter() - started)
        return steps


def _guarding_hooks() -> Any:
    """Compile again where a model has other hooks: they change what a target's forward does."""
    return torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, automatic_dynamic_shapes=False)


def _step(cache: StaticCache, model: PreTrainedModel, ids: Tensor, starts: Tensor, last: Tensor) -> Tensors:
    """Return the logits and, if a head reads them, hidden states."""
    if not cache.state_layers:
        return (cache.forward(model, ids, starts, last, cache.size),)
    outputs = cache.run(model, ids, starts, last, cache.size, output_hidden_states=cache.state_layers)
    return outputs.logits, joined(outputs.hidden_states, cache.state_layers)


EAGER_STEPS = (_step, _step)


def _padded(values: Tensor, rows: int, columns: int) -> Tensor:
    """Return values, `(rows, columns)`, with zeros at the end of both dimensions."""
    return torch.nn.functional.pad(values, (0, columns - values.shape[1], 0, rows - len(values)))


def _load_token(cache: StaticCache) -> None:
    """Put a token into an empty cache, which allocates its layers."""
    model = cache.model
    prompt = DynamicCache(config=model.config.get_text_config(decoder=True))
    read_padded(model, torch.zeros(1, 1, dtype=torch.long, device=model.device), [0], prompt)
    cache.load(prompt, [0])


def _check(step: Any, cache: StaticCache) -> None:
    """Raise UnsupportedModelError if a compiled forward over several tokens differs from eager ones over one."""
    model, count, begins = cache.model, 3, CHECKED_PROMPT_TOKENS
    ids = torch.arange(1, begins + count + 1, device=model.device)[None] % vocab_size_of(model)
    prompt, behind, eager = ids[:, :-count], ids[0, -count:].clone()[None], []
    for ours in (True, False):
        read = DynamicCache(config=model.config.get_text_config(decoder=True))
        read_padded(model, prompt, [0], read)
        cache.load(read, [0])
        at = torch.tensor([[begins]], device=model.device)
        if ours:
            torch._dynamo.maybe_mark_dynamic(behind, 1)
            compiled = step(cache, model, behind, at, at + count - 1)[0][0]
        else:
            eager = [_step(cache, model, behind[:, i : i + 1], at + i, at + i)[0][0, 0] for i in range(count)]
    if why := difference(model, list(compiled), eager):
        raise UnsupportedModelError(f"compiled, {why}")


# --- captured graphs ------------------------------------------------------------------------------------------------

Replay = Callable[..., Tensors]


def _signature(model: PreTrainedModel) -> tuple[Any, ...] | None:
    """Return what a graph of a model depends on besides the values of its tensors: where they are, and the state of
    PEFT's adapters. `None` if the model has hooks or replaced forwards: they may do anything at each call."""
    parts: list[Any] = []
    for module in modules_of(model):
        state = vars(module)
        tensors = (*state["_parameters"].values(), *state["_buffers"].values())
        parts += [tensor.data_ptr() for tensor in tensors if tensor is not None]
        hooks = [*state["_forward_hooks"].values(), *state["_forward_pre_hooks"].values()]
        # Transformers' own hooks only return hidden states where they are asked for.
        if any(getattr(hook, "__module__", "") != OUTPUT_HOOKS for hook in hooks) or "forward" in state:
            return None
        if "_active_adapter" in state:
            names = ("_active_adapter", "_disable_adapters", "scaling", "merged_adapters")
            parts.append(tuple(repr(state.get(name)) for name in names))
    return tuple(parts)


class _GraphDevice:
    """What the graphs of a device share: a stream and memory, which libraries keep for each stream, and a lock, as one
    graph is captured or runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.first = self.capture(lambda: (torch.zeros(1, device=device),))  # keeps the memory

    def capture(self, run: Callable[[], Tensors]) -> tuple[torch.cuda.CUDAGraph, Tensors]:
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

    def replay(self, graph: torch.cuda.CUDAGraph, result: Tensors, read: Tensors, given: Tensors) -> Tensors:
        """Run a graph that reads from `read` on the given tensors, after earlier graphs of any stream."""
        now = torch.cuda.current_stream(self.device)
        with self.lock:
            self.done.wait(now)
            for place, value in zip(read, given, strict=True):
                place.copy_(value)
            graph.replay()
            found = tuple(each.clone() for each in result)  # the next replay writes to the same place
            self.done.record(now)
        return found


_graph_devices: dict[torch.device, _GraphDevice] = {}
_graph_devices_lock = threading.Lock()


def capture(run: Callable[..., Tensors], inputs: Tensors) -> Replay:
    """Capture the kernels of a function of tensors; return a function that runs them on others of the same shapes.
    Tensors that are no inputs are read from where they were."""
    device, read = inputs[0].device, tuple(each.clone() for each in inputs)
    with _graph_devices_lock:
        if device not in _graph_devices:
            _graph_devices[device] = _GraphDevice(device)
        shared = _graph_devices[device]
    with shared.lock:
        graph, result = shared.capture(lambda: run(*read))
    return lambda *given: shared.replay(graph, result, read, given)


# --- fast copies ----------------------------------------------------------------------------------------------------

GROUPED = "osd_hf_grouped"  # the name of `grouped_attention` in configurations
UNUSUAL = ("position_bias", "cache", "softcap", "s_aux")  # arguments that only `sdpa` knows or refuses


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    Attend as transformers' `sdpa` does. The query heads of a group are rows of one product with their keys, so that
    the keys of a long cache are not copied for each of them. That suits few tokens.

    `query` is `(rows, heads, tokens, size)`, `key` and `value` are `(rows, key heads, width, size)`, and
    `attention_mask` is `(rows or 1, 1, tokens, width)`. Returns `(rows, tokens, heads, size)`.
    """
    rows, heads, tokens, size = query.shape
    num_keys = key.shape[1]
    is_usual = attention_mask is not None and attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1
    if num_keys == heads or not is_usual or dropout or any(kwargs.get(name) is not None for name in UNUSUAL):
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    assert attention_mask is not None
    groups = heads // num_keys
    queries = query.reshape(rows * num_keys, groups * tokens, size)
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):  # rounded scores would be less exact
        scores = torch.bmm(queries, keys.mT, out_dtype=torch.float32)
    else:
        scores = torch.bmm(queries, keys.mT)
    scores = scores * (size**-0.5 if scaling is None else scaling)
    hidden = ~attention_mask[:, :, None]
    scores = scores.view(rows, num_keys, groups, tokens, -1).masked_fill(hidden, torch.finfo(scores.dtype).min)
    shares = scores.softmax(-1).to(value.dtype).view(*queries.shape[:2], -1)
    attended = torch.bmm(shares, values).view(rows, heads, tokens, values.shape[-1])
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class LayerCode:
    """Compile the forward of each class of layers once. `options` are those of `torch.compile`."""

    def __init__(self, **options: Any) -> None:
        self._options, self._compiled = options, dict[type, Callable[..., Any]]()

    def of(self, layer: nn.Module) -> Callable[..., Any]:
        """Return a function of such a layer and its arguments, for any number of tokens and size of the cache."""
        if type(layer) not in self._compiled:
            # The compiler limits the versions of a code object.
            own = types.FunctionType(_forward_of_class.__code__.replace(), globals())
            self._compiled[type(layer)] = torch.compile(own, dynamic=True, fullgraph=True, **self._options)
        return self._compiled[type(layer)]


LAYER_CODE = LayerCode()  # models of one architecture share compiled layers


def _forward_of_class(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def fast_copy(model: PreTrainedModel, code: LayerCode | None) -> PreTrainedModel:
    """
    Return a copy of a model whose modules share all parameters and buffers with it, also those that replace them.

    `sdpa` attention becomes [`grouped_attention`]. With `code`, repeated layers are compiled. The copy takes caches of
    [`~osd_hf.decoding.forward.RaggedLayer`].
    """
    modules, configs = dict[int, Any](), dict[int, Any]()

    def config_of(config: Any) -> Any:
        if id(config) not in configs:
            configs[id(config)] = copied = copy.copy(config)
            if getattr(config, "_attn_implementation_internal", None) == "sdpa":
                copied._attn_implementation_internal = GROUPED
        return configs[id(config)]

    def copy_of(module: Any) -> Any:
        if id(module) not in modules:
            modules[id(module)] = copied = copy.copy(module)
            children = {name: None if child is None else copy_of(child) for name, child in module._modules.items()}
            vars(copied)["_modules"] = children
            if "config" in vars(module):
                vars(copied)["config"] = config_of(module.config)
        return modules[id(module)]

    copied: PreTrainedModel = copy_of(model)
    if code is not None:
        for layers in [module for module in copied.modules() if isinstance(module, nn.ModuleList)]:
            _compile_layers(layers, code)
    return copied


class _OneLayer:
    """A cache as a layer sees it, which is the same for all layers, so that they share their code."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.layer.update(key_states, value_states)  # type: ignore[no-any-return]


def _with_index(layer: nn.Module) -> list[nn.Module]:
    return [module for module in layer.modules() if isinstance(vars(module).get("layer_idx"), int)]


def _compile_layers(layers: nn.ModuleList, code: LayerCode) -> None:
    """Compile layers if each uses one layer of the cache."""
    indices: list[set[int]] = [{vars(m)["layer_idx"] for m in _with_index(layer)} for layer in layers]
    if any(len(found) != 1 for found in indices):
        return
    for layer, (index,) in zip(layers, indices, strict=True):
        for module in _with_index(layer):
            vars(module)["layer_idx"] = 0
        vars(layer)["forward"] = functools.partial(_run_layer, code.of(layer), layer, index)


def _run_layer(run: Callable[..., Any], layer: nn.Module, index: int, *args: Any, **kwargs: Any) -> Any:
    def seen(value: Any) -> Any:
        return _OneLayer(value.layers[index]) if isinstance(value, Cache) else value

    return run(layer, *map(seen, args), **{name: seen(value) for name, value in kwargs.items()})
