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
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

__all__ = [
    "CannotLookThrough",
    "Held",
    "MAX_CLONED",
    "MISSING",
    "OF_CLASSES",
    "Snapshot",
    "bind_again",
    "fill_again",
    "look_through",
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


MAX_OBJECTS = 200_000

# Their functions and classes are not looked into: what they keep between calls is nobody's answer.
_TRUSTED = sys.stdlib_module_names | {"numpy", "osd_hf", "tokenizers", "torch", "transformers"}

_VALUES = (
    type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, slice, torch.dtype,
    torch.device, torch.Size, torch.layout, torch.memory_format, np.dtype, np.generic, re.Pattern, datetime.date,
    datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction, uuid.UUID,
    pathlib.PurePath,
)  # fmt: skip
_NAMED = (
    types.ModuleType, types.CodeType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.UnionType,
    types.GenericAlias, typing.TypeVar, enum.Enum, logging.Logger, PreTrainedTokenizerBase, np.ufunc,
    type(np.where),
)  # fmt: skip
_GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
_PLAIN = (list, dict, set, tuple, frozenset)
_MARSHALED = (int, str, float, bool, type(None), bytes, complex)
# What Python classes may be built on, with nothing hidden beside their attributes; the nearest one counts.
_BASES = (
    list, dict, set, tuple, frozenset, collections.deque, collections.OrderedDict, collections.defaultdict, int, str,
    float, bytes, object,
)  # fmt: skip
_MANAGED_DICT = 1 << 4  # Py_TPFLAGS_MANAGED_DICT: the pointer lies outside of the object's own size
_POINTER = tuple.__itemsize__

Path = tuple[Any, str] | None


class CannotLookThrough(Exception):
    """Something that is reached may change without being seen to: a lock, a generator, an object of a C++ library."""


class Snapshot:
    """
    What was found, in the order in which it was found.

    Two of them are equal where nothing has changed in between; things made anew with the same contents are the same.
    """

    def __init__(self) -> None:
        self.trail: list[Any] = []
        self.keep: list[Any] = []  # an id says something only as long as its object lives
        self.undo: list[Callable[[], object]] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self.trail == other.trail

    __hash__ = None  # type: ignore[assignment]

    def put_back(self) -> None:
        """Undo what has changed since."""
        for undo in self.undo:
            undo()


def look_through(*roots: Any) -> Snapshot:
    """
    All that functions, closures, attributes, containers and the globals they name can reach from `roots`.

    Raises:
        CannotLookThrough: says what was met, and where.
    """
    return _Walk().through(roots)


class _Walk:
    def __init__(self) -> None:
        self.found = Snapshot()
        self.numbers: dict[int, int] = {}
        self.todo: list[tuple[Any, Path]] = []

    def through(self, roots: tuple[Any, ...]) -> Snapshot:
        self.todo = [(root, None) for root in reversed(roots)]
        while self.todo:
            thing, path = self.todo.pop()
            if len(self.numbers) > MAX_OBJECTS:
                raise CannotLookThrough(f"more than {MAX_OBJECTS} objects")
            self.visit(thing, path)
        return self.found

    def note(self, *facts: Any) -> None:
        self.found.trail.extend(facts)

    def on_undo(self, undo: Callable[[], object]) -> None:
        self.found.undo.append(undo)

    def then(self, path: Path, *named: tuple[str, Any]) -> None:
        for name, value in reversed(named):
            self.note(name)
            self.todo.append((value, (path, name)))

    def by_identity(self, thing: Any) -> None:
        self.note(id(thing))
        self.found.keep.append(thing)

    def visit(self, thing: Any, path: Path) -> None:
        kind = type(thing)
        if kind in (int, str, bool, float, type(None)):
            return self.note(kind, thing)
        if isinstance(thing, _VALUES) and not isinstance(thing, enum.Enum) and _is_trusted(kind):
            return self.note(kind, repr(thing))
        number = self.numbers.get(id(thing))
        if number is not None:
            return self.note("again", number)
        self.numbers[id(thing)] = len(self.numbers)
        self.found.keep.append(thing)
        if isinstance(thing, type):
            self.note(id(thing))
            return self.visit_class(thing, path)
        if isinstance(thing, _NAMED) or (
            kind.__module__.split(".")[0] == "tokenizers" and kind.__name__ != "DecodeStream"
        ):
            return self.by_identity(thing)
        self.note(id(kind))
        if kind in _PLAIN:
            # Data of plain types alone is written down at once, the largest tables too.
            with contextlib.suppress(ValueError):
                written = marshal.dumps(thing, 2)
                if _is_plain(thing):
                    self.note(written)
                    return self.on_undo(functools.partial(mend_plain, thing, written))
        for types_, visit in self.KINDS:
            if isinstance(thing, types_):
                return visit(self, thing, path)
        return self.visit_instance(thing, path)

    # --- functions --------------------------------------------------------------------------------------------------

    def visit_function(self, function: types.FunctionType, path: Path) -> None:
        path = (path, f"{function.__qualname__}()")
        defaults, keyword_defaults = function.__defaults__, function.__kwdefaults__
        code, scope = function.__code__, function.__globals__
        self.note(id(code), *(number for number in code.co_consts if type(number) is int))

        def undo() -> None:
            function.__defaults__, function.__kwdefaults__, function.__code__ = defaults, keyword_defaults, code

        self.on_undo(undo)
        if str(scope.get("__name__", "")).split(".")[0] not in _TRUSTED:
            names = _globals_of(code)
            known = {name: scope[name] for name in names if name in scope}
            self.on_undo(functools.partial(bind_again, scope, known, names))
            self.then(path, *known.items())
            self.visit_modules(code, known, path)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        attributes = function.__dict__
        self.then(path, ("defaults", defaults), ("keyword defaults", keyword_defaults), *cells)
        if attributes:
            self.then(path, ("attributes", attributes))

    def visit_modules(self, code: types.CodeType, known: dict[str, Any], path: Path) -> None:
        """What a function may reach through modules: `state.calls`, imported outside of it or inside."""
        codes = list(_codes(code))
        names = tuple(dict.fromkeys(name for part in codes for name in part.co_names))
        imported = [name for part in codes for name in _imported(part)]
        todo = [m for m in (*known.values(), *map(sys.modules.get, imported)) if isinstance(m, types.ModuleType)]
        seen: set[str] = set()
        while todo:
            module = todo.pop()
            if module.__name__ in seen or module.__name__.split(".")[0] in _TRUSTED:
                continue
            seen.add(module.__name__)
            scope = vars(module)
            found = {name: scope[name] for name in names if name in scope}
            todo += [value for value in found.values() if isinstance(value, types.ModuleType)]
            self.on_undo(functools.partial(bind_again, scope, found, tuple(found)))
            self.then((path, module.__name__), *((f".{name}", value) for name, value in found.items()))

    def visit_cell(self, cell: types.CellType, path: Path) -> None:
        try:
            contents = cell.cell_contents
        except ValueError:  # not bound yet

            def undo() -> None:
                with contextlib.suppress(ValueError):
                    del cell.cell_contents

            return self.on_undo(undo)
        self.on_undo(lambda: setattr(cell, "cell_contents", contents))
        self.todo.append((contents, path))
        return None

    def visit_builtin(self, function: Any, path: Path) -> None:
        self.note(function.__name__)
        owner = function.__self__
        if owner is not None and not isinstance(owner, types.ModuleType):
            self.then(path, (function.__name__, owner))

    def visit_method(self, method: Any, path: Path) -> None:
        self.then(path, ("__func__", method.__func__), ("__self__", method.__self__))

    def visit_partial(self, partial: functools.partial[Any], path: Path) -> None:
        parts = (("func", partial.func), ("args", partial.args), ("keywords", partial.keywords))
        self.then(path, *parts, ("__dict__", partial.__dict__))

    def visit_getter(self, getter: Any, path: Path) -> None:
        self.then(path, ("arguments", getter.__reduce__()[1]))

    def visit_wrapper(self, wrapper: Any, path: Path) -> None:
        inner = wrapper.fget if isinstance(wrapper, property) else getattr(wrapper, "__func__", None)
        # What a cache of a pure function keeps is what it would compute again.
        inner = inner or getattr(wrapper, "func", None) or getattr(wrapper, "__wrapped__", None)
        self.then(path, ("__wrapped__", inner))

    # --- containers -------------------------------------------------------------------------------------------------

    def visit_sequence(self, thing: Any, path: Path) -> None:
        items = list(thing) if type(thing) in (list, tuple, set, frozenset) else list(_base_of(thing).__iter__(thing))
        self.note(len(items))
        if not isinstance(thing, tuple | frozenset):

            def undo() -> None:
                now = list(_base_of(thing).__iter__(thing))
                if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
                    thing.clear()
                    (thing.update if isinstance(thing, set) else thing.extend)(items)

            self.on_undo(undo)
        self.then(path, *((f"[{i}]", item) for i, item in enumerate(items)))
        if type(thing) not in _PLAIN and type(thing) is not collections.deque:
            self.visit_instance(thing, path)

    def visit_dict(self, thing: Any, path: Path) -> None:
        items = dict(dict.items(thing))
        self.note(len(items))
        self.on_undo(functools.partial(fill_again, thing, items))
        for i, key in enumerate(items):
            if type(key) is not str:
                self.then(path, (f"key {i}", key))
        self.then(
            path, *((f"[{k!r}]" if type(k) in (str, int) else f"[{i}]", v) for i, (k, v) in enumerate(items.items()))
        )
        if isinstance(thing, collections.defaultdict):
            self.then(path, ("default_factory", thing.default_factory))
        if type(thing) not in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
            self.visit_instance(thing, path)

    def visit_view(self, thing: Any, path: Path) -> None:
        self.todo.append((dict(thing), path))

    def visit_bytearray(self, thing: bytearray, path: Path) -> None:
        saved = bytes(thing)
        self.note(saved)
        self.on_undo(lambda: thing.__setitem__(slice(None), saved))

    def visit_tensor(self, tensor: torch.Tensor, path: Path) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise self.opaque(tensor, path)
        held = Held(tensor)
        self.note(held)
        self.on_undo(held.put_back)
        attributes = getattr(tensor, "__dict__", None)
        if attributes:
            self.then(path, ("__dict__", attributes))

    def visit_array(self, array: np.ndarray[Any, Any], path: Path) -> None:
        self.note(array.shape, array.dtype.str)
        if array.dtype.hasobject:
            return self.then(path, *((f"[{i}]", item) for i, item in enumerate(array.ravel().tolist())))
        self.note(zlib.crc32(np.ascontiguousarray(array).data))
        if array.flags.writeable and array.size <= MAX_CLONED:
            saved = array.copy()
            self.on_undo(lambda: np.copyto(array, saved))
        return None

    def visit_random(self, rng: Any, path: Path) -> None:
        if isinstance(rng, torch.Generator):
            state = rng.get_state()
            self.note(bytes(state.cpu().numpy()))
            self.on_undo(lambda: rng.set_state(state))
        elif isinstance(rng, random.Random):
            if type(rng) is not random.Random:
                raise self.opaque(rng, path)
            own = rng.getstate()
            self.note(own)
            self.on_undo(lambda: rng.setstate(own))
        else:
            bits = rng.bit_generator if isinstance(rng, np.random.Generator) else rng._bit_generator
            before = bits.state
            self.note(repr(before))
            self.on_undo(lambda: setattr(bits, "state", before))

    def visit_reference(self, reference: Any, path: Path) -> None:
        self.todo.append((reference(), path))

    # --- instances and classes --------------------------------------------------------------------------------------

    def visit_instance(self, thing: Any, path: Path) -> None:
        kind = type(thing)
        slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]
        if _hides_state(kind, len(slots)):
            raise self.opaque(thing, path)
        if isinstance(thing, int | float | str | bytes):
            self.note(_base_of(thing).__repr__(thing))
        attributes = getattr(thing, "__dict__", None) if kind.__dictoffset__ else None
        if attributes:
            self.on_undo(functools.partial(fill_again, attributes, dict(attributes)))
            self.note(len(attributes))
            self.then(path, *((f".{name}", value) for name, value in attributes.items()))
        elif attributes is not None:
            self.on_undo(attributes.clear)
            self.note(0)
        for name in slots:
            value = getattr(thing, name, MISSING)
            self.on_undo(functools.partial(set_slot, thing, name, value))
            if value is not MISSING:
                self.then(path, (f".{name}", value))
        self.todo.append((kind, path))

    def visit_class(self, kind: type, path: Path) -> None:
        for cls in kind.__mro__:
            if _is_trusted(cls) or (cls is not kind and id(cls) in self.numbers):
                continue
            self.numbers.setdefault(id(cls), len(self.numbers))
            own = {name: value for name, value in vars(cls).items() if name not in OF_CLASSES}
            self.on_undo(functools.partial(set_class, cls, own))
            self.then((path, cls.__name__), *((f".{name}", value) for name, value in own.items()))

    def opaque(self, thing: Any, path: Path) -> CannotLookThrough:
        names: list[str] = []
        while path is not None:
            path, name = path
            names.append(name)
        kind = type(thing)
        return CannotLookThrough(f"{kind.__module__}.{kind.__qualname__} at `{' '.join(reversed(names)) or 'itself'}`")

    KINDS: tuple[tuple[Any, Callable[..., None]], ...] = (
        (types.FunctionType, visit_function),
        (types.CellType, visit_cell),
        (types.MethodType, visit_method),
        ((types.BuiltinFunctionType, types.MethodWrapperType), visit_builtin),
        (functools.partial, visit_partial),
        (_GETTERS, visit_getter),
        (
            (staticmethod, classmethod, property, functools.cached_property, functools._lru_cache_wrapper),
            visit_wrapper,
        ),
        (torch.Tensor, visit_tensor),
        (np.ndarray, visit_array),
        ((torch.Generator, random.Random, np.random.Generator, np.random.RandomState), visit_random),
        (weakref.ReferenceType, visit_reference),
        (types.MappingProxyType, visit_view),
        (bytearray, visit_bytearray),
        (dict, visit_dict),
        ((list, tuple, set, frozenset, collections.deque), visit_sequence),
    )


def _is_tokenizer(kind: type) -> bool:
    return str(kind.__module__).split(".")[0] == "tokenizers" and kind.__name__ != "DecodeStream"


def _is_trusted(kind: type) -> bool:
    return str(kind.__module__).split(".")[0] in _TRUSTED


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


def _is_plain(thing: Any) -> bool:
    """Whether marshal brings it back as it was: arrays, for one, it takes for bytes. Nothing in it contains itself, or
    it could not have been written."""
    todo = [thing]
    while todo:
        one = todo.pop()
        kind = type(one)
        if kind is dict:
            todo += [*one, *one.values()]
        elif kind in _PLAIN:
            todo += one
        elif kind not in _MARSHALED:
            return False
    return True


@functools.lru_cache(1024)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function names, and the functions that are made in it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    own = {i.argval for i in dis.get_instructions(code) if i.opname.endswith(("_GLOBAL", "_NAME"))}
    return tuple(sorted(own.union(*map(_globals_of, inner))))


def _base_of(thing: Any) -> Any:
    return next(base for base in _BASES if isinstance(thing, base))


def _hides_state(kind: type, num_slots: int) -> bool:
    """Whether instances are larger than their attributes explain, as CPython asks before it pickles one."""
    bases = [base for base in _BASES if issubclass(kind, base)]
    base = max(bases, key=lambda base: len(base.__mro__))
    allowed = base.__basicsize__ + _POINTER * num_slots
    if kind.__dictoffset__ and not base.__dictoffset__ and not kind.__flags__ & _MANAGED_DICT:
        allowed += _POINTER
    if kind.__weakrefoffset__ > 0 and not base.__weakrefoffset__:
        allowed += _POINTER
    return kind.__basicsize__ > allowed
