"""Linear layers on CPUs by oneDNN with pre-packed weights, where oneDNN is faster than MKL, torch's default."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch.nn.functional import linear as torch_linear

from osd_hf.utils.context import neutral_context

MIN_SPEEDUP = 1.2
MAX_PACKED_BYTES, MAX_PACKED_SHARE = 2 << 30, 0.25  # the share is of the available memory

_lock = threading.RLock()
_num_blocks = Counter[torch.nn.Linear]()  # `fast_kernels` blocks that use a layer
_packed_weights: dict[int, _PackedWeight] = {}  # by `id`


@functools.cache
@neutral_context()
@torch.inference_mode()
def min_side() -> int | None:
    """Return the rows and columns of fp32 weights from which on this CPU multiplies them faster by oneDNN than MKL."""
    pack: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)  # builds without oneDNN have none
    for side, larger in ((1024, None), (256, 512)) if pack else ():  # large weights also pay if they are not packed
        weights = torch.ones(1 << 23, dtype=torch.float32).view(-1, side, side)  # 32 MiB, so that no cache holds them
        kept = {torch_linear: weights, _multiply: [pack(w, 4) for w in weights] if side == 256 else weights}
        seconds = {torch_linear: math.inf, _multiply: math.inf}
        for kernel in list(seconds) * 5:
            started = time.perf_counter()
            for weight in kept[kernel]:
                kernel(weights[0, :4], weight)
            seconds[kernel] = min(seconds[kernel], time.perf_counter() - started)
        if seconds[_multiply] * MIN_SPEEDUP >= seconds[torch_linear]:
            return larger
    return 256 if pack else None


def _multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    known = _packed_weights.get(id(weight))
    packed = known.packed if known is not None and known.is_of(weight) else weight
    num_rows = states.numel() // states.shape[-1]
    # oneDNN keeps half a megabyte for each number of rows, so larger numbers are rounded up.
    missing = -num_rows % min(1 << max(num_rows.bit_length() - 4, 0), 64)
    if not missing:
        return _multiply(states, packed, bias)
    rows = torch.nn.functional.pad(states.reshape(-1, states.shape[-1]), (0, 0, 0, missing))
    return _multiply(rows, packed, bias)[:num_rows].view(*states.shape[:-1], len(weight))


# torch.compile accepts oneDNN's own operator only for constant weights.
_library = torch.library.Library("osd_hf", "DEF")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor states, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("linear", _product, "CPU")  # type: ignore[no-untyped-call]
_library.impl("linear", lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)), "Meta")  # type: ignore[no-untyped-call]


class OneDnnLinear(torch.nn.Linear):
    """Linear layer that computes by oneDNN unless gradients are needed. Copies of it are `torch.nn.Linear`."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        is_supported = states.dtype == torch.float32 and states.numel() and _is_supported(self.weight)
        if not is_supported or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return torch_linear(states, self.weight, self.bias)
        compute = torch.ops.osd_hf.linear.default if torch.compiler.is_compiling() else _product
        return compute(states, self.weight, self.bias)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (torch.nn.Linear,), *super().__reduce_ex__(protocol)[2:]


def _is_supported(weight: torch.Tensor) -> bool:
    is_dense = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.is_contiguous()
    return is_dense and weight.dtype == torch.float32 and weight.device.type == "cpu"


class _PackedWeight:
    """Weight in the order in which oneDNN reads it, and one value of each row, as torch does not count all changes."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), 4)
        self._weight = weakref.ref(weight, functools.partial(_packed_weights.pop, id(weight)))
        self._state = weight._version, weight.data_ptr()
        rows, columns = torch.arange(len(weight), device="cpu"), weight.shape[1]
        self._places = rows * columns + rows * 31 % columns
        self._values = weight.detach().view(-1)[self._places]

    def is_of(self, weight: torch.Tensor) -> bool:
        return self._weight() is weight and self._state == (weight._version, weight.data_ptr())

    def is_unchanged(self, weight: torch.Tensor) -> bool:
        return self.is_of(weight) and torch.equal(weight.detach().view(-1)[self._places], self._values)


@contextlib.contextmanager
def fast_kernels(*models: torch.nn.Module | None, is_request: bool = False) -> Iterator[None]:
    """Compute linear layers by oneDNN inside the block if that is faster, in requests with packed weights."""
    with _lock:
        layers = list(dict.fromkeys(layer for model in models if model is not None for layer in _layers(model)))
        _num_blocks.update(layers)
        for layer in layers:
            layer.__class__ = OneDnnLinear
            known = _packed_weights.get(id(layer.weight))
            if known is not None and not known.is_unchanged(layer.weight):
                del _packed_weights[id(layer.weight)]
        if is_request:
            weights = [layer.weight for layer in layers]
            unpacked = [w for w in weights if id(w) not in _packed_weights and not w.is_inference()]
            limit = min(MAX_PACKED_BYTES, MAX_PACKED_SHARE * psutil.virtual_memory().available)
            with contextlib.suppress(RuntimeError):  # out of memory
                if sum(weight.nbytes for weight in unpacked) <= limit:
                    _packed_weights.update((id(weight), _PackedWeight(weight)) for weight in unpacked)
    try:
        yield
    finally:
        with _lock:
            for layer in layers:
                _num_blocks[layer] -= 1
                if not _num_blocks[layer]:
                    del _num_blocks[layer]
                    layer.__class__ = torch.nn.Linear if type(layer) is OneDnnLinear else type(layer)


def _layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    smallest = min_side() if torch.backends.mkldnn.enabled else None
    modules = list(model.modules()) if smallest else []
    if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in modules):
        return []  # the owner has compiled the model, which changed layers would compile again
    plain = [m for m in modules if type(m) is torch.nn.Linear or (type(m) is OneDnnLinear and m in _num_blocks)]
    return [m for m in plain if _is_supported(m.weight) and min(m.weight.shape) >= (smallest or 0)]


def unpack(*models: torch.nn.Module) -> None:
    for weight in (weight for model in models for weight in model.parameters()):
        _packed_weights.pop(id(weight), None)
