"""Kernels on CPUs: products of linear layers by the ones that are fastest here."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from osd_hf.utils.attention import fold, this_thread
from osd_hf.utils.context import neutral_context

__all__ = [
    "baddbmm", "bf16_is_faster", "fast_kernels", "is_linear", "leave_others", "linear_of", "onednn_is_faster",
    "packed_bytes", "unpack", "with_fast_products",
]  # fmt: skip

# Below, calling the other kernel takes longer than it saves: weights of a layer, and multiplications of a product.
LEAST_WEIGHTS, LEAST_PRODUCTS = 1 << 17, 1 << 23
FASTER = 1.2  # that oneDNN has to be
WIDTH, TOKENS, LAYERS, REPEATS = 1024, 4, 8, 2  # of the products that are timed, 32 MiB: weights are never in a cache
PACKED_FOR = 4  # tokens; the order of a packed weight suits others as well
MOST_PACKED = 0.25  # of the memory that is available
# Layers of a module that get the same states, one right after the other.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
MOST_UNTAKEN = 8  # products for siblings that nobody took, until no more are made
UNPADDED_ROWS, PADDED_SIZES = 16, 8  # up to so many rows nothing is padded; sizes between a power of two and the next
LARGEST_STEP = 64  # rows between two sizes
HALF_FASTER = 1.3  # that products in bfloat16 have to be, as what they multiply is cast
HALF_WIDTH, HALF_ROWS, HALF_REPEATS = 512, 64, 8  # of the product that is timed in both precisions
CGROUP = Path("/sys/fs/cgroup")  # where Linux says what a container may take

_used = Counter[torch.nn.Linear]()  # in how many blocks a layer is exchanged
_exchanging = threading.RLock()


def leave_others() -> None:
    """In a forked child: it has the blocks of the thread that forked alone, and nobody holds a lock there."""
    global _exchanging
    _exchanging = threading.RLock()
    ours = Counter(layer for layers in getattr(this_thread, "blocks", ()) for layer in layers)
    for layer in list(_used):
        if layer in ours:
            _used[layer] = ours[layer]
        else:
            del _used[layer]
            _exchange([layer], torch.nn.Linear)


if hasattr(os, "register_at_fork"):
    # A fork does not wait for the lock: a layer is counted from before it is exchanged until it is so no more.
    os.register_at_fork(after_in_child=leave_others)


# --- products -------------------------------------------------------------------------------------------------------
#
# torch multiplies fp32 matrices on CPUs by MKL, which on some processors, AMD's above all, takes two to four times as
# long as oneDNN for a few rows. The compiler of torch calls oneDNN by the same function as this module. Both round as
# fp32 does, in different orders.


def _onednn(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(states, weight, bias, "none", [], "")
    return product


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Rows with as many rows of zeros as make one of a few sizes: oneDNN makes a kernel of its own for each size that
    it meets, in about a millisecond, and keeps a thousand of them, half a megabyte each."""
    count = len(rows)
    step = min((1 << (count - 1).bit_length()) // (2 * PADDED_SIZES), LARGEST_STEP)
    missing = -count % step if count > UNPADDED_ROWS else 0
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _by_rows(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, width: int) -> torch.Tensor:
    """The product of states of any shape with a weight, packed or not, of so many outputs."""
    product = _onednn(_padded(states.reshape(-1, states.shape[-1])), weight, bias)
    return product.resize_(*states.shape[:-1], width)  # no view: a model that learns could not write into it


def _served(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product without gradients, with the weight as it was packed, if it was and has not been written to."""
    known = _packs.get(id(weight))
    taken = weight if known is None or not known.is_of(weight) else known.packed(weight)
    return _unlearned(states, taken, bias, len(weight))


def _unlearned(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, width: int) -> torch.Tensor:
    """[`_by_rows`], for few rows at once: what comes of them may be a view, as nobody learns from it."""
    are_few = states.numel() <= UNPADDED_ROWS * states.shape[-1]
    return _onednn(states, weight, bias) if are_few else _by_rows(states, weight, bias, width)


def _served_with_siblings(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same; together with those of the next layers, where these are known to get the same states."""
    known = _packs.get(id(weight))
    siblings = None if known is None or not known.is_of(weight) else known.siblings
    products = None
    # Torch counts no writes to states of inference mode.
    if siblings is not None and not (torch.is_grad_enabled() or states.is_inference()):
        products = siblings.products(states, weight)
    if products is None:
        return _served(states, weight, bias)
    this_thread.left = siblings, states, states._version, products
    return _with_bias(products.pop(0)[1], bias)


def _left(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The product, if it was computed together with the last one of this thread; otherwise nothing of that is kept."""
    left: tuple[_Siblings, torch.Tensor, int, _Products] = this_thread.left
    siblings, known, count, products = left
    pack = _packs.get(id(weight))
    if (
        known is not states
        or products[0][0]() is not weight
        or count != states._version
        or pack is None
        or pack.siblings is not siblings
        or not pack.is_of(weight)
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
    ):
        this_thread.left = None
        return None
    product = products.pop(0)[1]
    if not products:
        this_thread.left, siblings.untaken = None, 0
    return _with_bias(product, bias)


def _with_bias(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product.add_(bias)


# The compiler has oneDNN's product for constant weights alone; it takes one by another name as it is.
_library = torch.library.Library("osd_hf", "DEF")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor states, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("linear", _served, "CPU")  # type: ignore[no-untyped-call]
_library.impl("linear", lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)), "Meta")  # type: ignore[no-untyped-call]


def _compiled_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.osd_hf.linear.default(states, weight, bias)
    return product


def _has_onednn() -> bool:
    has_it = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(torch.backends.mkldnn.enabled and has_it) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_is_faster() -> bool:
    """Whether this CPU multiplies a few rows with fp32 weights faster by oneDNN than by what torch takes: timed at
    the first call, which takes some milliseconds. It is taken to be so for many rows as well. Not where
    `torch.backends.mkldnn` is disabled."""
    try:
        return _has_onednn() and _timed()
    except RuntimeError:  # a product failed, or there was no memory: no answer is lost by it
        return False


@functools.cache
@neutral_context()
def _timed(timer: Callable[[], float] = time.perf_counter) -> bool:
    states = torch.ones(TOKENS, WIDTH, dtype=torch.float32)
    weights = torch.ones(LAYERS, WIDTH, WIDTH, dtype=torch.float32)
    order = (*weights[-2:], *[*weights] * REPEATS)  # the first two warm up
    calls = [[functools.partial(kernel, states, w) for w in order] for kernel in (torch.nn.functional.linear, _onednn)]
    theirs, ours = _least_seconds(calls, 2, timer)
    return ours * FASTER < theirs


def _least_seconds(
    calls: Sequence[Sequence[Callable[[], Any]]], warm_up: int, timer: Callable[[], float]
) -> list[float]:
    """The least that a call of each took, made in turns; the first ones warm up."""
    seconds: list[list[float]] = [[] for _ in calls]
    with torch.inference_mode():
        for turn in zip(*calls, strict=True):
            for call, taken in zip(turn, seconds, strict=True):
                started = timer()
                call()
                taken.append(timer() - started)
    return [min(taken[warm_up:]) for taken in seconds]


def bf16_is_faster() -> bool:
    """Whether this CPU multiplies matrices clearly faster in bfloat16 than in float32 by the kernel that is faster
    there: timed at the first call, which takes some milliseconds. Not where `torch.backends.mkldnn` is disabled."""
    try:
        return _has_onednn() and _half_timed()
    except RuntimeError:
        return False


@functools.cache
@neutral_context()
def _half_timed(timer: Callable[[], float] = time.perf_counter) -> bool:
    states = torch.ones(HALF_ROWS, HALF_WIDTH, dtype=torch.float32)
    weight = torch.ones(HALF_WIDTH, HALF_WIDTH, dtype=torch.float32)
    calls = [
        functools.partial(_onednn if onednn_is_faster() else torch.nn.functional.linear, states, weight),
        functools.partial(torch.nn.functional.linear, states.bfloat16(), weight.bfloat16()),
    ]
    full, half = _least_seconds([[call] * (1 + HALF_REPEATS) for call in calls], 1, timer)
    return half * HALF_FASTER < full


def baddbmm(
    added: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> torch.Tensor:
    """`beta * added + alpha * first @ second` of matrices `(n, rows, columns)`, without gradients, by oneDNN where
    that is faster; without `added`, `first @ second`."""
    (n, rows, inner), columns = first.shape, second.shape[-1]
    if not _is_plain(first) or rows * inner * columns < LEAST_PRODUCTS or not onednn_is_faster():
        if added is None:
            return torch.bmm(first, second)
        return torch.baddbmm(added, first, second, beta=beta, alpha=alpha)
    if n == 1:  # large ones come one by one: no second copy
        product = _onednn(first[0], second[0].t())[None]
    else:
        product = first.new_empty(n, rows, columns)
        for i in range(n):
            product[i] = _onednn(first[i], second[i].t())
    return product if added is None else product.mul_(alpha).add_(added, alpha=beta)


def _is_plain(weight: Any) -> bool:
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.layout == torch.strided
    return plain and weight.dtype == torch.float32 and weight.device.type == "cpu"


def _fits(weight: Any) -> bool:
    return _is_plain(weight) and weight.numel() >= LEAST_WEIGHTS


class _Product(torch.autograd.Function):
    """A product that gradients go back through by the same kernel."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(states, weight)
        return _by_rows(states, weight, bias, len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        rows = _padded(grad.reshape(-1, grad.shape[-1]))
        of_states = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            count = states.numel() // states.shape[-1]
            of_states = _onednn(rows, weight.t())[:count].view_as(states)
        if ctx.needs_input_grad[1]:
            read = _padded(states.reshape(-1, states.shape[-1]))
            # oneDNN takes the second as it lies, and copies the first: the smaller one.
            is_wide = rows.shape[-1] > read.shape[-1]
            of_weight = _onednn(read.t(), rows.t()).t() if is_wide else _onednn(rows.t(), read.t())
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_states, of_weight, of_bias


def _linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    is_compiled = torch.compiler.is_compiling()
    if not is_compiled and getattr(this_thread, "left", None) is not None:
        product = _left(states, weight, bias)
        if product is not None:
            return product
    if (
        # Asked first: most products of a small model are. What is compiled should do for any number of rows.
        (
            weight.numel() < LEAST_WEIGHTS
            and (
                is_compiled
                or (
                    states.numel() * weight.shape[0] < LEAST_PRODUCTS
                    and (id(weight) not in _packs or torch.is_grad_enabled() or states.is_inference())
                )
            )
        )
        or not _is_plain(weight)
        or states.dtype != torch.float32
        or not states.numel()
        or torch.is_autocast_enabled("cpu")
    ):
        return torch.nn.functional.linear(states, weight, bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (states, weight, bias)):
        learned: torch.Tensor = _Product.apply(states, weight, bias)  # type: ignore[no-untyped-call]
        return learned
    return (_compiled_linear if is_compiled else _served_with_siblings)(states, weight, bias)


class Linear(torch.nn.Linear):
    """A layer of a model inside `fast_kernels`. Copies of it, also on disk, are ordinary ones."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _linear(input, self.weight, self.bias)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What any module does that nobody listens to, at once: asking takes as long as a small product."""
        own: Any = self._parameters
        if (
            kwargs
            or len(args) != 1
            or type(self) is not Linear
            or len(own) != 2
            or "forward" in self.__dict__
            or self._forward_pre_hooks
            or self._forward_hooks
            or self._backward_pre_hooks
            or self._backward_hooks
            or _global_forward_pre_hooks
            or _global_forward_hooks
            or _global_backward_pre_hooks
            or _global_backward_hooks
        ):
            this_thread.left = None  # whoever listens may write into the states
            return torch.nn.Module.__call__(self, *args, **kwargs)  # another thread may have changed the class back
        return _linear(args[0], own["weight"], own["bias"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (torch.nn.Linear,), *super().__reduce_ex__(protocol)[2:]


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer and nothing more, such as one with an adapter."""
    return type(module) in (torch.nn.Linear, Linear)


def linear_of(module: Any) -> Callable[..., torch.Tensor]:
    """The function, of states, weight and bias, that a linear layer computes by."""
    return _linear if type(module) is Linear else torch.nn.functional.linear


def with_fast_products(model: Any) -> Any:
    """The model itself, of our own, whose linear layers compute by oneDNN from now on where that is faster."""
    if onednn_is_faster():
        _exchange([layer for layer in _layers(model) if _is_plain(layer.weight)], Linear)
    return model


def _layers(model: Any) -> list[torch.nn.Linear]:
    """Layers that may be exchanged, or are, for a while; of a compiled model none, as it would be compiled anew."""
    modules = list(model.modules())
    if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in modules):
        return []
    return [m for m in modules if m in _used or type(m) is torch.nn.Linear]


def _exchange(layers: list[torch.nn.Linear], kind: type[torch.nn.Linear]) -> None:
    for layer in layers:
        layer.__class__ = kind


# --- packed weights -------------------------------------------------------------------------------------------------
#
# With a weight in the order that oneDNN computes in, a product of several rows takes as long as one of a single row: a
# round of drafting is hardly longer than a token. Packing takes as long as some ten products, and a copy takes the
# memory of the weight. The numbers of a weight that is packed by itself are the same to the last bit; several that are
# packed as one may be rounded otherwise.


class _Pack:
    """A weight in the order of oneDNN's kernels, and by what it is known that the weight is still the same. One that
    has `siblings` is packed with them and, where it is asked for by itself, for the next request: packing takes a
    while, and rounds are timed."""

    def __init__(self, weight: torch.Tensor, siblings: _Siblings | None = None) -> None:
        self._weight = ref(weight, functools.partial(_forget, id(weight)))
        self._version, self._address = weight._version, weight.data_ptr()
        rows, columns = weight.shape
        # A value of each row: what writes past torch's own count of changes writes rows, at the least.
        places = torch.arange(rows, device="cpu")
        self._places = places * columns + places * 31 % columns
        self._values, self.siblings = self._sampled(weight), siblings
        self._packed: torch.Tensor | None = None if siblings else _reordered(weight)
        self._is_wanted = False

    def packed(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight by itself, as it was packed, or as it is."""
        self._is_wanted = self._packed is None
        return weight if self._packed is None else self._packed

    def pack_if_wanted(self, weight: torch.Tensor) -> None:
        """Pack the weight by itself, if it was asked for and there is memory."""
        if self._is_wanted and self._packed is None and weight.nbytes <= MOST_PACKED * _available():
            with contextlib.suppress(RuntimeError, MemoryError):  # no answer is lost by it
                self._packed = _reordered(weight)
        self._is_wanted = False

    def _sampled(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().view(-1)[self._places]

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether it is the weight's, and nobody has written to that by torch's own count."""
        is_where_it_was = self._weight() is weight and self._address == weight.data_ptr()
        return is_where_it_was and not weight.is_inference() and self._version == weight._version  # none counts there

    def is_same(self, weight: torch.Tensor) -> bool:
        """Whether the weight has still its values, as far as a look at each row tells."""
        return self.is_of(weight) and torch.equal(self._sampled(weight), self._values)


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), PACKED_FOR)
    return packed


class _Siblings:
    """Weights that the same states are multiplied with, one right after the other: packed as one, as a call for each
    takes about as long as the product of a small weight."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = [ref(weight) for weight in weights]
        self._sizes = [len(weight) for weight in weights]
        self._packed: torch.Tensor | None = _reordered(torch.cat([weight.detach() for weight in weights]))
        self.untaken = 0  # times in a row that not all products were taken

    def products(self, states: torch.Tensor, first: torch.Tensor) -> _Products | None:
        """Each weight and the product with it; `None` where `first` is not the first weight, or too many of the others
        were in vain. Whoever takes one looks whether its weight is still the same."""
        packed = self._packed  # another thread may give it up meanwhile
        if packed is None or self._weights[0]() is not first:
            return None
        if self.untaken >= MOST_UNTAKEN:
            self._packed = None
            return None
        self.untaken += 1
        product = _unlearned(states, packed, None, sum(self._sizes))
        ends = itertools.accumulate(self._sizes)
        parts = [product[..., end - size : end] for size, end in zip(self._sizes, ends, strict=True)]
        return [(weight, part.contiguous()) for weight, part in zip(self._weights, parts, strict=True)]


_Products = list[tuple[ref[torch.Tensor], torch.Tensor]]
_packs: dict[int, _Pack] = {}  # by the `id` of the weight
_stood: WeakKeyDictionary[Any, list[tuple[int, int, int]]] = WeakKeyDictionary()  # weights at the last request
_refused: WeakSet[Any] = WeakSet()  # models that there was no memory for in the end


def _forget(key: int, _: object = None) -> None:
    _packs.pop(key, None)


def _available() -> int:
    """Bytes of memory that are left to this machine, and to the container that this runs in."""
    try:
        import psutil

        left = int(psutil.virtual_memory().available)
    except (ImportError, OSError):  # by whom takes this module without its package, or where nothing tells
        return 0
    with contextlib.suppress(OSError, ValueError, KeyError):  # where there is no limit, or none to be read
        most, taken = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        left = min(left, most - taken + int(parts["inactive_file"]))  # files that were read, which make room
    return left


@torch.no_grad()
def _look_at(model: Any, layers: list[torch.nn.Linear], *, is_request: bool) -> None:
    """Let go of the packed weights of a model that are no longer the same. For a request, pack what is the same as at
    the model's last one, as far as there is memory: what is trained between requests never is."""
    found = {id(layer.weight): layer.weight for layer in layers}
    able = {key for key, w in found.items() if _is_plain(w) and w.is_contiguous() and not w.is_inference()}
    groups = [[layer.weight for layer in group] for group in _siblings(model, set(layers))]
    together = [group for group in groups if all(id(weight) in able for weight in group)]
    of_group = {id(weight): group for group in together for weight in group}
    weights = [w for key, w in found.items() if key in able and (_fits(w) or key in of_group)]
    same = {id(weight) for weight in weights if id(weight) in _packs and _packs[id(weight)].is_same(weight)}
    same = {key for key in same if all(id(weight) in same for weight in of_group.get(key, ()))}
    stale = [key for key in found if key in _packs and key not in same]
    for key in stale:
        _forget(key)
    if not is_request or model in _refused:
        return
    for weight in weights:
        if id(weight) in _packs:
            _packs[id(weight)].pack_if_wanted(weight)
    now = [(id(weight), weight._version, weight.data_ptr()) for weight in weights]
    before, _stood[model] = _stood.get(model), now
    missing = [weight for weight in weights if id(weight) not in _packs]
    if not missing or stale or before != now or sum(w.nbytes for w in missing) > MOST_PACKED * _available():
        return
    try:
        for group in together:
            if not any(id(weight) in _packs for weight in group):
                siblings = _Siblings(group)
                _packs.update((id(weight), _Pack(weight, siblings)) for weight in group)
        for weight in missing:
            if id(weight) not in _packs:
                _packs[id(weight)] = _Pack(weight)
    except (RuntimeError, MemoryError):  # no answer is lost by it
        _refused.add(model)
        for weight in missing:
            _forget(id(weight))


def _siblings(model: Any, layers: Container[torch.nn.Linear]) -> list[list[torch.nn.Linear]]:
    """Layers of a model, among these, that are packed together. Decoders with an encoder are left out: layers of these
    names get other states there."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return []
    groups = [
        [module._modules[name] for name in names]
        for module in model.modules()
        for names in SIBLINGS
        if all(module._modules.get(name) in layers for name in names)
    ]
    return [
        group
        for group in groups
        if len({id(layer.weight) for layer in group}) == len(group)
        and len({(layer.in_features, layer.weight.dtype) for layer in group}) == 1
        and sum(layer.weight.numel() for layer in group) >= LEAST_WEIGHTS
    ]


def packed_bytes(model: Any) -> int:
    """Bytes that the packed weights of a model on a CPU take where it serves requests and there is memory for them;
    the model may be without weights, on the meta device."""
    if not onednn_is_faster():
        return 0
    layers = [m for m in model.modules() if is_linear(m) and m.weight.dtype == torch.float32]
    found = [m for m in layers if m.weight.numel() >= LEAST_WEIGHTS]
    found += itertools.chain(*_siblings(model, set(layers)))
    weights = {id(m.weight): m.weight.nbytes for m in found}
    size = sum(weights.values())
    return size if size <= MOST_PACKED * _available() else 0


def unpack(*models: Any) -> None:
    """Let go of the packed weights of models; they are packed again where these serve requests."""
    with _exchanging:
        for model in models:
            _stood.pop(model, None)
            _refused.discard(model)
            for weight in model.parameters():  # of layers that are not exchanged any more, too
                _forget(id(weight))


# --- inside a block --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fast_kernels(*models: Any, is_request: bool = False) -> Iterator[None]:
    """Let forwards of models on CPUs, inside the block and in this thread, compute by the kernels that are fastest.
    The models are as they were afterwards; other threads that use them meanwhile share the products. From the second
    request (`is_request`) with the same weights on these are packed, as long as they are the same."""
    found = [model for model in models if _is_on_cpu(model)]
    if not found:
        yield
        return
    fold()
    layers: list[torch.nn.Linear] = []
    this_thread.blocks, this_thread.left = [*getattr(this_thread, "blocks", ()), layers], None
    try:
        if onednn_is_faster():
            with _exchanging:
                by_model = {model: _layers(model) for model in found}
                layers += {layer: None for theirs in by_model.values() for layer in theirs}
                _used.update(layers)
                _exchange(layers, Linear)
                for model, theirs in by_model.items():
                    _look_at(model, theirs, is_request=is_request)
        yield
    finally:
        this_thread.left = None
        this_thread.blocks = [block for block in getattr(this_thread, "blocks", ()) if block is not layers]
        with _exchanging:
            _used.subtract(layers)
            last = [layer for layer in layers if _used[layer] <= 0]
            # Others may have made it something else meanwhile.
            _exchange([layer for layer in last if type(layer) is Linear], torch.nn.Linear)
            for layer in last:
                del _used[layer]


def _is_on_cpu(model: Any) -> bool:
    first = None if model is None else next(model.parameters(), None)
    return first is not None and first.device.type == "cpu"
