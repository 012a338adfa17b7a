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
from collections.abc import Callable, Iterator, Mapping
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
# Told by their identity, and not looked into.
NAMED = (
    types.ModuleType, types.CodeType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.UnionType,
    types.GenericAlias, typing.TypeVar, enum.Enum, logging.Logger, PreTrainedTokenizerBase, np.ufunc,
    type(np.where),
)  # fmt: skip
PLAIN = (list, dict, set, tuple, frozenset)
MARSHALED = (int, str, float, bool, type(None), bytes, complex)
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


def _wrapped(wrapper: Any) -> dict[str, Any]:
    # What a cache of a pure function keeps is what it would compute again.
    inner = wrapper.fget if isinstance(wrapper, property) else getattr(wrapper, "__func__", None)
    return {"__wrapped__": inner or getattr(wrapper, "func", None) or getattr(wrapper, "__wrapped__", None)}


# Things of the standard library, and what they are made of.
PARTS: tuple[tuple[Any, Callable[[Any], dict[str, Any]]], ...] = (
    (types.MethodType, lambda m: {"__func__": m.__func__, "__self__": m.__self__}),
    (functools.partial, lambda p: {"func": p.func, "args": p.args, "keywords": p.keywords, "__dict__": p.__dict__}),
    ((operator.itemgetter, operator.attrgetter, operator.methodcaller), lambda g: {"arguments": g.__reduce__()[1]}),
    ((staticmethod, classmethod, property, functools.cached_property, functools._lru_cache_wrapper), _wrapped),
    (weakref.ReferenceType, lambda r: {"": r()}),
    (types.MappingProxyType, lambda view: {"": dict(view)}),
)
MANAGED_DICT = 1 << 4  # Py_TPFLAGS_MANAGED_DICT: the pointer lies outside of the object's own size
POINTER = tuple.__itemsize__

Path = tuple[Any, str] | None


class CannotLookThrough(Exception):
    """Something that is reached may change without being seen to: a lock, a generator, an object of a C++ library."""


def look_through(*roots: Any) -> Snapshot:
    """All that functions, closures, attributes, containers and the globals they name can reach from `roots`; raises
    CannotLookThrough, which says what was met, and where."""
    return Snapshot(roots)


class Snapshot:
    """What was found, in the order in which it was found. Two of them are equal where nothing has changed in between;
    things made anew with the same contents are the same."""

    def __init__(self, roots: tuple[Any, ...]) -> None:
        self.trail: list[Any] = []
        self._keep: list[Any] = []  # an id says something only as long as its object lives
        self._undo: list[Callable[[], object]] = []
        self._numbers: dict[int, int] = {}  # of the objects met, by their ids
        self._todo: list[tuple[Any, Path]] = [(root, None) for root in reversed(roots)]
        while self._todo:
            thing, path = self._todo.pop()
            if len(self._numbers) > MAX_OBJECTS:
                raise CannotLookThrough(f"more than {MAX_OBJECTS} objects")
            self._visit(thing, path)
        self._numbers.clear()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self.trail == other.trail

    __hash__ = None  # type: ignore[assignment]

    def put_back(self) -> None:
        """Undo what has changed since."""
        for undo in self._undo:
            undo()

    def _note(self, *facts: Any) -> None:
        self.trail.extend(facts)

    def _on_undo(self, undo: Callable[..., object], *args: Any) -> None:
        self._undo.append(functools.partial(undo, *args))

    def _then(self, path: Path, *named: tuple[str, Any]) -> None:
        for name, value in reversed(named):
            self._note(name)
            self._todo.append((value, (path, name)))

    def _visit(self, thing: Any, path: Path) -> None:
        kind = type(thing)
        if kind in (int, str, bool, float, type(None)):
            return self._note(kind, thing)
        if isinstance(thing, VALUES) and not isinstance(thing, enum.Enum) and _is_trusted(kind):
            return self._note(kind, repr(thing))
        number = self._numbers.get(id(thing))
        if number is not None:
            return self._note("again", number)
        self._numbers[id(thing)] = len(self._numbers)
        self._keep.append(thing)
        if isinstance(thing, type):
            self._note(id(thing))
            return self._visit_class(thing, path)
        of_tokenizers = kind.__module__.split(".")[0] == "tokenizers" and kind.__name__ != "DecodeStream"
        if isinstance(thing, NAMED) or of_tokenizers:
            return self._note(id(thing))
        self._note(id(kind))
        if kind in PLAIN:
            # Data of plain types alone is written down at once, the largest tables too.
            with contextlib.suppress(ValueError):
                written = marshal.dumps(thing, 2)
                if _is_plain(thing):
                    self._note(written)
                    return self._on_undo(_mend_plain, thing, written)
        for kinds, parts in PARTS:
            if isinstance(thing, kinds):
                return self._then(path, *parts(thing).items())
        for kinds, visit in self._KINDS:
            if isinstance(thing, kinds):
                return visit(self, thing, path)
        return self._visit_instance(thing, path)

    def _opaque(self, thing: Any, path: Path) -> CannotLookThrough:
        names: list[str] = []
        while path is not None:
            path, name = path
            names += [name] if name else []
        kind = type(thing)
        return CannotLookThrough(f"{kind.__module__}.{kind.__qualname__} at `{' '.join(reversed(names)) or 'itself'}`")

    def _visit_function(self, function: types.FunctionType, path: Path) -> None:
        path = (path, f"{function.__qualname__}()")
        defaults, keyword_defaults = function.__defaults__, function.__kwdefaults__
        code, scope = function.__code__, function.__globals__
        self._note(id(code), *(number for number in code.co_consts if type(number) is int))

        def undo() -> None:
            function.__defaults__, function.__kwdefaults__, function.__code__ = defaults, keyword_defaults, code

        self._on_undo(undo)
        if str(scope.get("__name__", "")).split(".")[0] not in TRUSTED:
            known = self._keep_names(scope, _globals_of(code))
            self._then(path, *known.items())
            self._visit_modules(code, known, path)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        self._then(path, ("defaults", defaults), ("keyword defaults", keyword_defaults), *cells)
        if function.__dict__:
            self._then(path, ("attributes", function.__dict__))

    def _keep_names(self, scope: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        """What these names stand for in a module, and will again."""
        known = {name: scope[name] for name in names if name in scope}

        def undo() -> None:
            now = {name: scope[name] for name in names if name in scope}
            _restore(now, known, scope.__setitem__, scope.__delitem__)

        self._on_undo(undo)
        return known

    def _visit_modules(self, code: types.CodeType, known: dict[str, Any], path: Path) -> None:
        """What a function may reach through modules: `state.calls`, imported outside of it or inside."""
        codes = list(_codes(code))
        names = tuple(dict.fromkeys(name for part in codes for name in part.co_names))
        imported = [name for part in codes for name in _imported(part)]
        todo = [m for m in (*known.values(), *map(sys.modules.get, imported)) if isinstance(m, types.ModuleType)]
        seen: set[str] = set()
        while todo:
            module = todo.pop()
            if module.__name__ in seen or module.__name__.split(".")[0] in TRUSTED:
                continue
            seen.add(module.__name__)
            scope = vars(module)
            found = self._keep_names(scope, tuple(name for name in names if name in scope))
            todo += [value for value in found.values() if isinstance(value, types.ModuleType)]
            self._then((path, module.__name__), *((f".{name}", value) for name, value in found.items()))

    def _visit_cell(self, cell: types.CellType, path: Path) -> None:
        with contextlib.suppress(ValueError):  # not bound yet
            contents = cell.cell_contents
            self._on_undo(setattr, cell, "cell_contents", contents)
            self._todo.append((contents, path))
            return

        def undo() -> None:
            with contextlib.suppress(ValueError):
                del cell.cell_contents

        self._on_undo(undo)

    def _visit_builtin(self, function: Any, path: Path) -> None:
        self._note(function.__name__)
        owner = function.__self__
        if owner is not None and not isinstance(owner, types.ModuleType):
            self._then(path, (function.__name__, owner))

    def _visit_sequence(self, thing: Any, path: Path) -> None:
        base = _base_of(thing)
        items = list(base.__iter__(thing))
        self._note(len(items))
        if not isinstance(thing, tuple | frozenset):

            def undo() -> None:
                now = list(base.__iter__(thing))
                if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
                    thing.clear()
                    (thing.update if isinstance(thing, set) else thing.extend)(items)

            self._on_undo(undo)
        self._then(path, *((f"[{i}]", item) for i, item in enumerate(items)))
        if type(thing) not in PLAIN and type(thing) is not collections.deque:
            self._visit_instance(thing, path)

    def _visit_dict(self, thing: Any, path: Path) -> None:
        items = dict(dict.items(thing))
        self._note(len(items))
        self._on_undo(_fill_again, thing, items)
        for i, key in enumerate(items):
            if type(key) is not str:
                self._then(path, (f"key {i}", key))
        names = [f"[{key!r}]" if type(key) in (str, int) else f"[{i}]" for i, key in enumerate(items)]
        self._then(path, *zip(names, items.values(), strict=True))
        if isinstance(thing, collections.defaultdict):
            self._then(path, ("default_factory", thing.default_factory))
        if type(thing) not in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
            self._visit_instance(thing, path)

    def _visit_bytearray(self, thing: bytearray, path: Path) -> None:
        saved = bytes(thing)
        self._note(saved)
        self._on_undo(thing.__setitem__, slice(None), saved)

    def _visit_tensor(self, tensor: torch.Tensor, path: Path) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise self._opaque(tensor, path)
        held = _Held(tensor)
        self._note(held)
        self._on_undo(held.put_back)
        attributes = getattr(tensor, "__dict__", None)
        if attributes:
            self._then(path, ("__dict__", attributes))

    def _visit_array(self, array: np.ndarray[Any, Any], path: Path) -> None:
        self._note(array.shape, array.dtype.str)
        if array.dtype.hasobject:
            return self._then(path, *((f"[{i}]", item) for i, item in enumerate(array.ravel().tolist())))
        self._note(zlib.crc32(np.ascontiguousarray(array).data))
        if array.flags.writeable and array.size <= MAX_CLONED:
            self._on_undo(np.copyto, array, array.copy())
        return None

    def _visit_random(self, rng: Any, path: Path) -> None:
        state: Any
        if isinstance(rng, torch.Generator):
            state = rng.get_state()
            self._note(bytes(state.cpu().numpy()))
            self._on_undo(rng.set_state, state)
        elif type(rng) is random.Random:
            state = rng.getstate()
            self._note(state)
            self._on_undo(rng.setstate, state)
        elif isinstance(rng, random.Random):
            raise self._opaque(rng, path)
        else:
            bits = rng.bit_generator if isinstance(rng, np.random.Generator) else rng._bit_generator
            state = bits.state
            self._note(repr(state))
            self._on_undo(setattr, bits, "state", state)

    def _visit_instance(self, thing: Any, path: Path) -> None:
        kind = type(thing)
        slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]
        if _hides_state(kind, len(slots)):
            raise self._opaque(thing, path)
        if isinstance(thing, int | float | str | bytes):
            self._note(_base_of(thing).__repr__(thing))
        attributes = getattr(thing, "__dict__", None) if kind.__dictoffset__ else None
        if attributes is not None:
            self._on_undo(_fill_again, attributes, dict(attributes))
            self._note(len(attributes))
            self._then(path, *((f".{name}", value) for name, value in attributes.items()))

        if slots:
            before = _slotted(thing, slots)
            put, drop = functools.partial(object.__setattr__, thing), functools.partial(object.__delattr__, thing)
            self._on_undo(lambda: _restore(_slotted(thing, slots), before, put, drop))
            for name, value in before.items():
                self._then(path, (f".{name}", value))
        self._todo.append((kind, path))

    def _visit_class(self, kind: type, path: Path) -> None:
        for cls in kind.__mro__:
            if _is_trusted(cls) or (cls is not kind and id(cls) in self._numbers):
                continue
            self._numbers.setdefault(id(cls), len(self._numbers))
            before = _own(cls)
            put, drop = functools.partial(type.__setattr__, cls), functools.partial(type.__delattr__, cls)
            self._on_undo(lambda cls, *rest: _restore(_own(cls), *rest), cls, before, put, drop)
            self._then((path, cls.__name__), *((f".{name}", value) for name, value in before.items()))

    _KINDS: tuple[tuple[Any, Callable[..., None]], ...] = (
        (types.FunctionType, _visit_function),
        (types.CellType, _visit_cell),
        ((types.BuiltinFunctionType, types.MethodWrapperType), _visit_builtin),
        (torch.Tensor, _visit_tensor),
        (np.ndarray, _visit_array),
        ((torch.Generator, random.Random, np.random.Generator, np.random.RandomState), _visit_random),
        (bytearray, _visit_bytearray),
        (dict, _visit_dict),
        ((list, tuple, set, frozenset, collections.deque), _visit_sequence),
    )


# --- what is found --------------------------------------------------------------------------------------------------


def _is_trusted(kind: type) -> bool:
    return str(kind.__module__).split(".")[0] in TRUSTED


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(1024)
def _imported(code: types.CodeType) -> tuple[str, ...]:
    """Modules that a function imports itself, and those that they lie in."""
    paths = [str(step.argval).split(".") for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]
    return tuple(".".join(parts[:end]) for parts in paths for end in range(1, len(parts) + 1))


@functools.lru_cache(1024)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function names, and the functions that are made in it."""
    steps = (step for part in _codes(code) for step in dis.get_instructions(part))
    return tuple(sorted({step.argval for step in steps if step.opname.endswith(("_GLOBAL", "_NAME"))}))


def _is_plain(thing: Any) -> bool:
    """Whether marshal brings it back as it was: arrays, for one, it takes for bytes. Nothing in it contains itself, or
    it could not have been written."""
    todo = [thing]
    while todo:
        one = todo.pop()
        kind = type(one)
        if kind is dict:
            todo += [*one, *one.values()]
        elif kind in PLAIN:
            todo += one
        elif kind not in MARSHALED:
            return False
    return True


def _own(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if name not in OF_CLASSES}


def _slotted(thing: Any, slots: list[str]) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in slots if hasattr(thing, name)}


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


def _restore(
    now: Mapping[Any, Any], saved: Mapping[Any, Any], put: Callable[[Any, Any], object], drop: Callable[[Any], object]
) -> None:
    """Put back what has changed alone, one by one: another thread may be reading the rest."""
    for name in now.keys() - saved.keys():
        drop(name)
    for name, value in saved.items():
        if now.get(name, MISSING) is not value:
            put(name, value)


def _fill_again(thing: Any, saved: dict[Any, Any]) -> None:
    now = dict(dict.items(thing))
    if [key for key in now if key in saved] == list(saved):
        _restore(now, saved, thing.__setitem__, thing.__delitem__)
    else:  # others come first
        thing.clear()
        thing.update(saved)


def _mend_plain(thing: Any, written: bytes) -> None:
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
    else:
        return saved
    return now
