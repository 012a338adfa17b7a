"""What an object can reach that a call may change: looked through, compared, and put back."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime
import decimal
import dis
import enum
import fractions
import functools
import logging
import marshal
import operator
import pathlib
import random
import re
import sys
import types
import typing
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

MAX_OBJECTS = 200_000
MAX_CLONED = 1 << 18  # elements; of larger tensors torch's own counter of changes is read, and they are not put back
MISSING = object()

# Their functions and classes are not looked into: what they keep between calls is nobody's answer.
TRUSTED = sys.stdlib_module_names | {"numpy", "osd_hf", "tokenizers", "torch", "transformers"}
# Told by their values.
VALUES = (
    type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, slice, torch.dtype,
    torch.device, torch.Size, torch.layout, torch.memory_format, np.dtype, np.generic, re.Pattern, datetime.date,
    datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction, uuid.UUID,
    pathlib.PurePath,
)  # fmt: skip
# Told by their identity and, but for classes, not looked into.
NAMED = (
    type, types.ModuleType, types.CodeType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.UnionType,
    types.GenericAlias, typing.TypeVar, enum.Enum, logging.Logger, PreTrainedTokenizerBase, np.ufunc,
    type(np.where),
)  # fmt: skip
PLAIN = frozenset((list, dict, set, tuple, frozenset))
MARSHALED = frozenset((int, str, float, bool, type(None), bytes, complex))
# What Python classes may be built on, with nothing hidden beside their attributes; the nearest one counts.
BASES = (
    list, dict, set, tuple, frozenset, collections.deque, collections.OrderedDict, collections.defaultdict, int, str,
    float, bytes, object,
)  # fmt: skip
# What no call changes of a class.
OF_CLASSES = frozenset({
    "__dict__", "__weakref__", "__doc__", "__module__", "__slots__", "__annotations__", "__abstractmethods__",
    "__parameters__", "__orig_bases__", "__match_args__", "__dataclass_fields__", "__dataclass_params__", "_abc_impl",
    "__static_attributes__", "__firstlineno__", "__qualname__",
    # Not called while tokens are generated.
    "__init__", "__new__", "__init_subclass__", "__repr__", "__reduce__", "__reduce_ex__", "__getstate__",
    "__setstate__", "__copy__", "__deepcopy__",
})  # fmt: skip
# Told by a state that is read and written as a whole.
STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    bytearray: (bytes, lambda array, state: array.__setitem__(slice(None), state)),
    random.Random: (random.Random.getstate, random.Random.setstate),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    np.random.Generator: (lambda r: r.bit_generator.state, lambda r, state: setattr(r.bit_generator, "state", state)),
    np.random.RandomState: (lambda r: r.get_state(legacy=False), np.random.RandomState.set_state),
}
# Told by a few attributes. What a cache of a pure function keeps is what it would compute again.
ATTRIBUTES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (types.MethodType, ("__func__", "__self__")),
    ((types.BuiltinFunctionType, types.MethodWrapperType), ("__name__", "__self__")),
    (functools.partial, ("func", "args", "keywords", "__dict__")),
    ((staticmethod, classmethod), ("__func__",)),
    (property, ("fget",)),
    (functools.cached_property, ("func",)),
    (functools._lru_cache_wrapper, ("__wrapped__",)),
)
MANAGED_DICT = 1 << 4  # Py_TPFLAGS_MANAGED_DICT: the pointer lies outside of the object's own size
POINTER = tuple.__itemsize__

Parts = Iterable[tuple[str, Any]]


class CannotLookThrough(Exception):
    """Something that is reached may change without being seen to: a lock, a generator, an object of a C++ library."""


class Reachable:
    """
    All that functions, closures, attributes, containers and the globals they name can reach from an object, in the
    order in which it was found. Two of them are equal where nothing has changed in between; things made anew with the
    same contents are the same. With `keep` it can be put back. Raises CannotLookThrough, which says what was met, and
    where.
    """

    def __init__(self, root: Any, *, keep: bool = False) -> None:
        self.keep = keep
        self.trail: list[Any] = []
        self._undo: list[Callable[[], object]] = []
        self._met: dict[int, tuple[int, Any]] = {}  # by ids, which say something only as long as their objects live
        todo: list[tuple[Any, Any]] = [(root, None)]  # with their paths: the last name, and the path before it
        while todo:
            thing, path = todo.pop()
            try:
                parts = list(self._parts(thing))
            except CannotLookThrough:
                names: list[str] = []
                while path is not None:
                    name, path = path
                    names[:0] = [name] if name else []
                kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
                raise CannotLookThrough(f"{kind} at `{' '.join(names) or 'itself'}`") from None
            if len(self._met) > MAX_OBJECTS:
                raise CannotLookThrough(f"more than {MAX_OBJECTS} objects")
            self.trail += (name for name, _ in parts)
            todo += ((part, (name, path)) for name, part in reversed(parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reachable) and self.trail == other.trail

    __hash__ = None  # type: ignore[assignment]

    def put_back(self) -> None:
        """Undo what has changed since."""
        for undo in self._undo:
            undo()

    def _on_undo(self, undo: Callable[..., object], *args: Any) -> None:
        if self.keep:
            self._undo.append(functools.partial(undo, *args))

    def _kept(self, owner: Any, put: Any, drop: Any, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What is read now, by name, and will be again."""
        saved = read()
        self._on_undo(lambda: _restore(owner, put, drop, read(), saved))
        return saved

    def _kept_names(self, scope: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        """What these names stand for in a module, and will again."""
        return self._kept(
            scope, operator.setitem, operator.delitem, lambda: {name: scope[name] for name in names if name in scope}
        )

    def _parts(self, thing: Any) -> Parts:
        """Note what a thing is, and how it is put back; returns what it is made of."""
        kind = type(thing)
        if isinstance(thing, VALUES) and not isinstance(thing, enum.Enum) and _is_trusted(kind.__module__):
            self.trail += (kind, thing if kind in (int, str, bool, float, type(None)) else repr(thing))
            return ()
        if id(thing) in self._met:
            self.trail += ("again", self._met[id(thing)][0])
            return ()
        self._met[id(thing)] = len(self._met), thing
        of_tokenizers = kind.__module__.split(".")[0] == "tokenizers" and kind.__name__ != "DecodeStream"
        is_named = isinstance(thing, NAMED) or of_tokenizers
        self.trail.append(id(thing if is_named else kind))
        if is_named:
            return self._parts_of_class(thing) if isinstance(thing, type) else ()
        if kind in PLAIN:
            # Data of plain types alone is written down at once, the largest tables too.
            with contextlib.suppress(ValueError):
                written = marshal.dumps(thing, 2)
                containers = _plain_containers(thing)
                if containers is not None:
                    self.trail.append(written)
                    for container in containers if self.keep else ():
                        self._on_undo(_fill_again, container, _contents(container))
                    return ()
        if kind in STATES:
            read, write = STATES[kind]
            state = read(thing)
            self._on_undo(write, thing, state)
            return [("state", state)]
        for kinds, names in ATTRIBUTES:
            if isinstance(thing, kinds):
                return [(name, getattr(thing, name)) for name in names]
        for kinds, parts in self._KINDS:
            if isinstance(thing, kinds):
                return parts(self, thing)
        return self._parts_of_instance(thing)

    def _parts_of_function(self, function: types.FunctionType) -> Parts:
        code, scope = function.__code__, function.__globals__
        own = ("__code__", "__defaults__", "__kwdefaults__")
        self.trail += (number for number in code.co_consts if type(number) is int)
        kept = self._kept(function, setattr, delattr, lambda: {name: getattr(function, name) for name in own})
        parts: list[tuple[str, Any]] = [*kept.items()]
        if not _is_trusted(scope.get("__name__", "")):
            names, attributes, imported = _names_in(code)
            known = self._kept_names(scope, names)
            modules = [*known.values(), *map(sys.modules.get, imported)]
            parts += (*known.items(), *self._parts_of_modules(modules, attributes))
        parts += zip(code.co_freevars, function.__closure__ or (), strict=True)
        parts += [("__dict__", function.__dict__)] if function.__dict__ else []
        return [(f"{function.__qualname__}() {name}", part) for name, part in parts]

    def _parts_of_modules(self, modules: list[Any], names: tuple[str, ...]) -> Parts:
        """What a function may reach through those of these that are modules: `state.calls`."""
        seen: set[str] = set()
        while modules:
            module = modules.pop()
            if not isinstance(module, types.ModuleType) or module.__name__ in seen or _is_trusted(module.__name__):
                continue
            seen.add(module.__name__)
            for name, value in self._kept_names(vars(module), names).items():
                yield f"{module.__name__} .{name}", value
                modules.append(value)

    def _parts_of_cell(self, cell: types.CellType) -> Parts:
        def read() -> dict[str, Any]:
            try:
                return {"cell_contents": cell.cell_contents}
            except ValueError:  # not bound yet
                return {}

        return [("", contents) for contents in self._kept(cell, setattr, delattr, read).values()]

    def _parts_of_sequence(self, thing: Any) -> Parts:
        items = _contents(thing)
        self.trail.append(len(items))
        if not isinstance(thing, tuple | frozenset):
            self._on_undo(_fill_again, thing, items)
        yield from ((f"[{i}]", item) for i, item in enumerate(items))
        if type(thing) not in PLAIN and type(thing) is not collections.deque:
            yield from self._parts_of_instance(thing)

    def _parts_of_dict(self, thing: Any) -> Parts:
        items = _contents(thing)
        self.trail.append(len(items))
        self._on_undo(_fill_again, thing, items)
        for i, (key, value) in enumerate(items.items()):
            if type(key) is not str:
                yield f"key {i}", key
            yield f"[{key!r}]" if type(key) in (str, int) else f"[{i}]", value
        if isinstance(thing, collections.defaultdict):
            yield "default_factory", thing.default_factory
        if type(thing) not in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
            yield from self._parts_of_instance(thing)

    def _parts_of_tensor(self, tensor: torch.Tensor) -> Parts:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise CannotLookThrough
        held = _Held(tensor)
        self.trail.append(held)
        self._on_undo(held.put_back)
        attributes = getattr(tensor, "__dict__", None)
        return [("__dict__", attributes)] if attributes else []

    def _parts_of_array(self, array: np.ndarray[Any, Any]) -> Parts:
        self.trail += (array.shape, array.dtype.str)
        if array.dtype.hasobject:
            return [(f"[{i}]", item) for i, item in enumerate(array.ravel().tolist())]
        self.trail.append(zlib.crc32(np.ascontiguousarray(array).data))
        if array.flags.writeable and array.size <= MAX_CLONED:
            self._on_undo(np.copyto, array, array.copy())
        return []

    def _parts_of_instance(self, thing: Any) -> Parts:
        kind = type(thing)
        slots: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]
        if _hides_state(kind, len(slots)):
            raise CannotLookThrough
        if isinstance(thing, int | float | str | bytes):
            self.trail.append(_base_of(thing).__repr__(thing))
        attributes = getattr(thing, "__dict__", None) if kind.__dictoffset__ else None
        if attributes is not None:
            saved = _contents(attributes)
            self.trail.append(len(saved))
            self._on_undo(_fill_again, attributes, saved)
            yield from ((f".{name}", value) for name, value in saved.items())
        slotted = self._kept(
            thing, object.__setattr__, object.__delattr__,
            lambda: {name: getattr(thing, name) for name in slots if hasattr(thing, name)},
        )  # fmt: skip
        yield from ((f".{name}", value) for name, value in slotted.items())
        yield "", kind

    def _parts_of_class(self, cls: type) -> Parts:
        if not _is_trusted(cls.__module__):
            own = self._kept(
                cls, type.__setattr__, type.__delattr__,
                lambda: {name: value for name, value in vars(cls).items() if name not in OF_CLASSES},
            )  # fmt: skip
            yield from ((f"{cls.__name__} .{name}", value) for name, value in own.items())
            yield from (("", base) for base in cls.__bases__)

    _KINDS: tuple[tuple[Any, Callable[[Any, Any], Parts]], ...] = (
        (types.FunctionType, _parts_of_function),
        ((operator.itemgetter, operator.attrgetter, operator.methodcaller),
         lambda _, getter: [("arguments", getter.__reduce__()[1])]),
        (weakref.ReferenceType, lambda _, reference: [("", reference())]),
        (types.MappingProxyType, lambda _, view: [("", dict(view))]),
        (types.CellType, _parts_of_cell),
        (torch.Tensor, _parts_of_tensor),
        (np.ndarray, _parts_of_array),
        (dict, _parts_of_dict),
        ((list, tuple, set, frozenset, collections.deque), _parts_of_sequence),
    )  # fmt: skip


# --- what is found --------------------------------------------------------------------------------------------------


def _is_trusted(module: object) -> bool:
    return str(module).split(".")[0] in TRUSTED


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(1024)
def _names_in(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """What a function names, with the functions that are made in it: globals; globals and attributes; and the modules
    that it imports itself, with those that they lie in."""
    codes = list(_codes(code))
    steps = [step for part in codes for step in dis.get_instructions(part)]
    names = {step.argval for step in steps if step.opname.endswith(("_GLOBAL", "_NAME"))}
    paths = [str(step.argval).split(".") for step in steps if step.opname == "IMPORT_NAME"]
    modules = [".".join(parts[:end]) for parts in paths for end in range(1, len(parts) + 1)]
    return tuple(sorted(names)), tuple(dict.fromkeys(name for part in codes for name in part.co_names)), tuple(modules)


def _plain_containers(thing: Any) -> list[Any] | None:
    """The containers in plain data that can be changed; `None` where something is not plain: marshal takes arrays for
    bytes. Nothing contains itself, or it could not have been written."""
    todo: list[Any] = [thing]
    found: list[Any] = []
    while todo:
        one = todo.pop()
        kind = type(one)
        if kind in PLAIN:
            todo += (*one, *one.values()) if kind is dict else one
            found += () if kind in (tuple, frozenset) else (one,)
        elif kind not in MARSHALED:
            return None
    return found


def _contents(container: Any) -> Any:
    """What lies in it, past any methods of its own: a dict or a list."""
    if isinstance(container, dict):
        return dict(dict.items(container))
    return list(_base_of(container).__iter__(container))


def _base_of(thing: Any) -> Any:
    return next(base for base in BASES if isinstance(thing, base))


def _hides_state(kind: type, num_slots: int) -> bool:
    """Whether instances are larger than their attributes explain, as CPython asks before it pickles one."""
    base = max((base for base in BASES if issubclass(kind, base)), key=lambda base: len(base.__mro__))
    allowed = base.__basicsize__ + POINTER * num_slots
    if kind.__dictoffset__ and not base.__dictoffset__ and not kind.__flags__ & MANAGED_DICT:
        allowed += POINTER
    if kind.__weakrefoffset__ > 0 and not base.__weakrefoffset__:
        allowed += POINTER
    return kind.__basicsize__ > allowed


class _Held:
    """A tensor as it is now."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version
        small = self.version is None or tensor.numel() <= MAX_CLONED
        self.bits = _bits(tensor).clone() if small else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Held):
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


# --- how it is put back ---------------------------------------------------------------------------------------------


def _restore(owner: Any, put: Any, drop: Any, now: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Put back what has changed alone, one by one: another thread may be reading the rest."""
    for name in now.keys() - saved.keys():
        drop(owner, name)
    for name, value in saved.items():
        if now.get(name, MISSING) is not value:
            put(owner, name, value)


def _fill_again(thing: Any, saved: Any) -> None:
    """Put back what lies in a container, in place: others may hold it as well."""
    now = _contents(thing)
    if isinstance(thing, dict) and [key for key in now if key in saved] == list(saved):
        _restore(thing, operator.setitem, operator.delitem, now, saved)
    elif isinstance(thing, dict) or len(now) != len(saved) or not all(map(operator.is_, now, saved)):
        thing.clear()
        (thing.extend if hasattr(thing, "extend") else thing.update)(saved)
