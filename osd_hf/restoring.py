"""Functions, classes, containers and tensors get back what they held."""

from __future__ import annotations

import contextlib
import marshal
from typing import Any

import torch

__all__ = [
    "MAX_CLONED",
    "MISSING",
    "OF_CLASSES",
    "Held",
    "bind_again",
    "fill_again",
    "mend_plain",
    "set_class",
    "set_slot",
]

MAX_CLONED = 1 << 18  # elements; of larger tensors torch's own counter of changes is read, and they are not put back
MISSING = object()
PLAIN = (list, dict, set, tuple, frozenset)
# What no call changes of a class.
OF_CLASSES = frozenset({
    "__dict__", "__weakref__", "__doc__", "__module__", "__slots__", "__annotations__", "__abstractmethods__",
    "__parameters__", "__orig_bases__", "__match_args__", "__dataclass_fields__", "__dataclass_params__", "_abc_impl",
    "__static_attributes__", "__firstlineno__", "__qualname__",
    # Not called while tokens are generated.
    "__init__", "__new__", "__init_subclass__", "__repr__", "__reduce__", "__reduce_ex__", "__getstate__",
    "__setstate__", "__copy__", "__deepcopy__",
})  # fmt: skip


class Held:
    """A tensor as it is now."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version
        small = self.version is None or tensor.numel() <= MAX_CLONED
        self.bits = _bits(tensor).clone() if small else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held):
            return NotImplemented
        a, b = self.tensor, other.tensor
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return False
        if self.bits is not None and other.bits is not None:
            return torch.equal(self.bits, other.bits)
        if a is b:
            return self.version == other.version
        return (a._version, b._version) == (self.version, other.version) and torch.equal(_bits(a), _bits(b))

    __hash__ = None  # type: ignore[assignment]

    def put_back(self) -> None:
        if self.bits is not None and not torch.equal(self.bits, _bits(self.tensor)):
            saved = self.bits.view(self.tensor.dtype).reshape(self.tensor.shape)
            with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
                self.tensor.copy_(saved)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def bind_again(scope: dict[str, Any], known: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if name in known:
            if scope.get(name, MISSING) is not known[name]:
                scope[name] = known[name]
        else:
            scope.pop(name, None)


def fill_again(thing: Any, saved: dict[Any, Any]) -> None:
    now = dict(dict.items(thing))
    if [key for key in now if key in saved] != list(saved):
        thing.clear()
        thing.update(saved)
        return
    for key in now.keys() - saved.keys():  # one by one: another thread may be reading the others
        del thing[key]
    for key, value in saved.items():
        if now[key] is not value:
            thing[key] = value


def set_slot(thing: Any, name: str, value: Any) -> None:
    if getattr(thing, name, MISSING) is value:
        return
    if value is MISSING:
        object.__delattr__(thing, name)
    else:
        object.__setattr__(thing, name, value)


def set_class(cls: type, own: dict[str, Any]) -> None:
    now = {name: value for name, value in vars(cls).items() if name not in OF_CLASSES}
    for name in now.keys() - own.keys():
        type.__delattr__(cls, name)
    for name, value in own.items():
        if now.get(name, MISSING) is not value:
            type.__setattr__(cls, name, value)


def mend_plain(thing: Any, written: bytes) -> None:
    with contextlib.suppress(ValueError):
        if marshal.dumps(thing, 2) == written:
            return
    _mend(thing, marshal.loads(written))


def _mend(now: Any, saved: Any) -> Any:
    """Give a plain container its contents back, in place, as others may hold what lies in it."""
    if type(now) is not type(saved) or not isinstance(now, PLAIN):
        return saved
    if isinstance(now, set):
        now.clear()
        now.update(saved)
    elif isinstance(now, list):
        now[:] = [_mend(*pair) for pair in zip(now, saved, strict=False)] + saved[len(now) :]
    elif isinstance(now, dict):
        contents = {key: _mend(now.get(key), value) for key, value in saved.items()}
        now.clear()
        now.update(contents)
    elif isinstance(now, tuple) and len(now) == len(saved):
        for pair in zip(now, saved, strict=True):
            _mend(*pair)
        return now
    return now if not isinstance(now, tuple | frozenset) else saved
