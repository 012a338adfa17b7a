"""Run forwards over caches of a fixed size: captured as CUDA graphs on GPUs, compiled elsewhere."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from osd_hf.config import OnlineConfig
from osd_hf.decoding.checks import batch_hindrance, difference, log_once, unsupported
from osd_hf.decoding.fast_copy import LayerCode, fast_copy
from osd_hf.decoding.forward import AHEAD, Ragged, read_padded, usual_tensors
from osd_hf.errors import UnsupportedModelError, first_line
from osd_hf.models import vocab_size_of
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
MAX_GRAPHS = 64  # of one cache and model; the oldest are dropped

LAYER_CODE = LayerCode()  # models of one architecture share compiled layers
Tensors = tuple[Tensor, ...]


def compiles_draft(config: OnlineConfig, device_type: str) -> bool:
    """Whether a draft on a device of this type, such as `"cuda"`, is compiled or captured."""
    return device_type not in ("cpu", "meta") if config.compile_draft == "auto" else config.compile_draft


def static_draft(base: PreTrainedModel, config: OnlineConfig) -> StaticForward | None:
    """Return the static forward of a draft and its copies; `None` if they are eager."""
    made = StaticForward(base, "draft") if compiles_draft(config, base.device.type) else None
    return made if made is not None and made.is_possible else None


def static_target(target: PreTrainedModel, config: OnlineConfig) -> StaticForward | None:
    """Return the static forward of a target; `None` if it is eager. `"auto"` captures on CUDA devices."""
    auto, is_cuda = config.compile_target == "auto", target.device.type == "cuda"
    made = StaticForward(target, "target") if (is_cuda if auto else config.compile_target) else None
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
        self.step: Any = None  # the compiled forward
        self.is_checked = False  # whether the compiled forward is known to fit the model in this request

    def graphs_of(self, model: PreTrainedModel, signature: Any) -> dict[Any, Replay]:
        """Return the graphs of a model; those of another signature are dropped."""
        if model not in self.graphs or self.graphs[model][0] != signature:
            self.graphs[model] = signature, {}
        return self.graphs[model][1]


class StaticForward:
    """
    Run few tokens of a model, or its copies, over caches of a fixed size.

    On CUDA devices a forward is captured as a graph, for each copy of the model, cache, and number of tokens. Its
    layers are compiled before, where that is possible ([`~osd_hf.decoding.fast_copy.fast_copy`]). The first replay of
    a target's graph is compared with the eager forward. Weights that change in place keep the graphs; other changes of
    the model drop them. Elsewhere forwards are compiled, for each size. What cannot be captured or compiled runs
    eagerly, and the log says why, once.
    """

    def __init__(
        self, model: PreTrainedModel, role: str, *, is_captured: bool | None = None, code: LayerCode | None = None
    ) -> None:
        self.role = role
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
            cache.model, cache.rows, cache.key = model, rows, key
            if is_new:
                self._steps[*key, head] = self._compile(cache)
        if self.is_captured:
            return cache
        cache.step, cache.is_checked = self._steps[*key, head], self.role == "draft"
        return None if cache.step is None else cache

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
                logits = self.run(cache, ("step", least), functools.partial(_step_of, cache), (given, at, last))[0]
            else:
                logits = self._compiled_step(cache, given, at, last)
        return logits[:rows, :count]

    def run(self, cache: StaticCache, key: Any, run: Callable[..., Tensors], inputs: Tensors) -> Tensors:
        """Run a function of a model and tensors over a cache by its graph; at first eagerly, and capture it then."""
        model = cache.model
        graphs = cache.graphs_of(model, self._signatures[model])
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
            fast = self._copy(model, code)
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

    def _copy(self, model: PreTrainedModel, code: LayerCode | None) -> PreTrainedModel:
        kind = self._signatures[model], code
        known, copied = self._copies.get(model, (None, None))
        if copied is None or known != kind:
            copied = fast_copy(model, code)
            self._copies[model] = kind, copied
        return copied

    # --- compiled forwards ------------------------------------------------------------------------------------------

    def _compiled_step(self, cache: StaticCache, ids: Tensor, starts: Tensor, last: Tensor) -> Tensor:
        # No views, nor tensors of inference mode.
        ids, starts, last = (each.clone(memory_format=torch.contiguous_format) for each in (ids, starts, last))
        with self._running, contextlib.nullcontext() if cache.is_checked else self._checking():
            if ids.shape[1] > 1 and not cache.is_checked:
                torch._dynamo.maybe_mark_dynamic(ids, 1)
            try:
                logits: Tensor = cache.step(cache.model, cache, ids, starts, last)
            except Exception as error:
                if cache.step is _step:
                    raise
                cache.step = _step
                with self._lock:
                    self._steps = dict.fromkeys(self._steps)
                self._warn_failed(error)
                logits = _step(cache.model, cache, ids, starts, last)
        return logits

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        # Hooks change what a target's forward does.
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, automatic_dynamic_shapes=False):
            yield

    def _compile(self, cache: StaticCache) -> Any:
        """Compile the forward for one token, and for any number of several; return it, or `None`."""
        if cache.size > LARGEST_COMPILED_SIZE:
            self._warn(f"a sequence is longer than {LARGEST_COMPILED_SIZE} tokens, the largest static cache")
            return None
        model, started = cache.model, time.perf_counter()
        what = f"the {self.role}'s forward for up to {cache.size} tokens"
        logger.info("Compiling %s.", what)
        options: dict[str, Any] = {"freezing": False}  # weights change
        num_versions, is_draft = 0, self.role == "draft"  # of the checked code

        def count(guards: Sequence[Any]) -> list[bool]:
            nonlocal num_versions
            num_versions += 1
            return [True] * len(guards)

        def compiled(guard_filter: Any) -> Any:
            # The compiler caches by code object, and each size needs its own code.
            own = types.FunctionType(_step.__code__.replace(), globals())
            return torch.compile(own, fullgraph=True, options=options | {"guard_filter_fn": guard_filter})

        # Of a draft, only weights change. A target is the user's: the first round of each request checks whether
        # the code still fits, and compiles again if not. Then it is not known which code fits, so checks go on.
        unchecked = torch.compiler.skip_all_guards_unsafe
        steps: dict[str, Any] = {}

        def step(model: PreTrainedModel, cache: StaticCache, ids: Tensor, *where: Tensor) -> Any:
            if cache.is_checked:
                return steps["one" if is_draft and ids.shape[1] == 1 else "several"](model, cache, ids, *where)
            logits = steps["checked"](model, cache, ids, *where)
            cache.is_checked = num_versions == 1
            return logits

        try:
            for name, guard_filter in {"one": unchecked, "several": unchecked, "checked": count}.items():
                steps[name] = compiled(guard_filter)
            _load_token(cache)
            cache.is_checked = is_draft
            token = torch.ones(1, 1, dtype=torch.long, device=model.device)
            with self._checking():
                for number in (1, 3, 3, 3) if is_draft else (3, 3, 3, 3):
                    ids = token.repeat(1, number)
                    if number > 1:
                        mark = torch._dynamo.maybe_mark_dynamic if not cache.is_checked else torch._dynamo.mark_dynamic
                        mark(ids, 1)
                    step(model, cache, ids, token, token + (number - 1))
                if not is_draft:
                    cache.is_checked = False
                    _check(step, cache)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises: the eager forward does the same
            self._warn_failed(error)
            return None
        logger.info("Compiled %s in %.1f s.", what, time.perf_counter() - started)
        return step


def _step(model: PreTrainedModel, cache: StaticCache, ids: Tensor, starts: Tensor, last: Tensor) -> Any:
    return cache.forward(model, ids, starts, last, cache.size)


def _step_of(cache: StaticCache, model: PreTrainedModel, ids: Tensor, starts: Tensor, last: Tensor) -> Tensors:
    return (_step(model, cache, ids, starts, last),)


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
            compiled = step(model, cache, behind, at, at + count - 1)[0]
        else:
            eager = [_step(model, cache, behind[:, i : i + 1], at + i, at + i)[0, 0] for i in range(count)]
    if why := difference(model, list(compiled), eager):
        raise UnsupportedModelError(f"compiled, {why}")


# --- captured graphs ------------------------------------------------------------------------------------------------

Replay = Callable[..., Tensors]


def _signature(model: PreTrainedModel) -> tuple[Any, ...] | None:
    """Return what a graph of a model depends on besides the values of its tensors: where they are, and the state of
    PEFT's adapters. `None` if the model has hooks or replaced forwards: they may do anything at each call."""
    parts: list[Any] = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    for module in model.modules():
        state = vars(module)
        if state["_forward_hooks"] or state["_forward_pre_hooks"] or "forward" in state:
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
