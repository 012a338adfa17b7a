"""How commands are set: flags made from a dataclass of settings, exit codes, reports, and being told to stop."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import signal
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from osd_hf.errors import ConfigError
from osd_hf.utils.report import json_text

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

Kind = TypeVar("Kind")


# --- flags from settings --------------------------------------------------------------------------------------------


def flag(
    help: str, default: Any = None, *, group: str = "", rivals: str = "", positional: bool = False, **how: Any
) -> Any:
    """
    A field of a command's settings, from whose name and type [`add_flags`] makes the flag.

    Args:
        help (`str`), default (`Any`, *optional*), group (`str`, *optional*):
            What the help says, the value where the flag is not given, and the title that it stands under.
        rivals (`str`, *optional*): Flags with the same `rivals` exclude each other.
        positional (`bool`, *optional*, defaults to `False`): Whether it is an argument without a name.
        how (`Any`): More arguments of `ArgumentParser.add_argument`, such as `metavar` and `required`.
    """
    metadata = {"help": help, "group": group, "rivals": rivals, "positional": positional, "how": how}
    return field(metadata=metadata) if positional or how.get("required") else field(default=default, metadata=metadata)


def in_groups(*titles: str) -> list[Callable[..., Any]]:
    """[`flag`] for each of these groups of the help."""
    return [functools.partial(flag, group=title) for title in titles]


def part(*, group: str = "", metavar: str) -> Any:
    """A field that holds another dataclass of settings, whose fields become flags as well: those with a `help` in
    their metadata. What is not given is left to that class, and `none` stands for `None`."""
    return field(metadata={"group": group, "rivals": "", "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a command was told, a field for each flag."""

    def check_counts(self, *names: str) -> None:
        """Raises ConfigError for a flag that is given and below 1."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")

    def check_not_negative(self, *names: str) -> None:
        """Raises ConfigError for a flag that is negative, or no finite number."""
        for name in names:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}.")

    def check_together(self, one: str, other: str) -> None:
        """Raises ConfigError where one of two flags is given alone."""
        if bool(getattr(self, one)) != bool(getattr(self, other)):
            raise ConfigError(f"--{one} and --{other} go together: name both, or neither for the bundled pair.")


@dataclass(frozen=True, kw_only=True)
class Reporting(Settings):
    """Settings of a command that can report to machines as well."""

    json: str | None = flag("also write the report there; - is the standard output", metavar="PATH")

    @property
    def out(self) -> Any:
        """The stream that people read, which is not the one of the machine's JSON."""
        return sys.stderr if self.json == "-" else sys.stdout

    def check_json(self) -> None:
        """Raises ConfigError where the report could not be written at the end of a long command."""
        path = self.json
        if path not in (None, "-") and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise ConfigError(f"The report cannot be written to {path}: name a file in a folder that exists.")

    def write_json(self, report: dict[str, Any]) -> None:
        """Write the report to where it is asked for; raises ConfigError where that cannot be done."""
        if self.json is None:
            return
        text = json_text(report, indent=1)
        if self.json == "-":
            print(text)
            return
        try:
            Path(self.json).write_text(text + "\n")
        except OSError as error:
            raise ConfigError(f"The report cannot be written to {self.json}: {error}.") from error


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add the flags of a [`Settings`] class, whose fields are made by [`flag`] and [`part`]; inherited ones last."""
    titles = dict.fromkeys(outer.metadata["group"] for outer, _ in _fields(kind))
    first = [title for title in ("models", "prompts") if title in titles]
    groups = {
        title: parser.add_argument_group(title) if title else parser for title in dict.fromkeys([*first, *titles])
    }
    rivals: dict[str, Any] = {"": None}
    for outer, hint in _fields(kind):
        group = groups[outer.metadata["group"]]
        if outer.metadata["rivals"] not in rivals:
            rivals[outer.metadata["rivals"]] = group.add_mutually_exclusive_group()
        group = rivals[outer.metadata["rivals"]] or group
        for f, its_hint in _fields(hint) if is_dataclass(hint) else [(outer, hint)]:
            how = _of_flag(f, its_hint) if f is outer else _of_setting(f, its_hint, outer)
            group.add_argument(f.name if f.metadata.get("positional") else "--" + f.name.replace("_", "-"), **how)


def _fields(kind: Any) -> list[tuple[Field[Any], Any]]:
    """The fields of a class and then those of its bases, each with its type."""
    hints, known = typing.get_type_hints(kind), {f.name: f for f in fields(kind)}
    names = dict.fromkeys(name for cls in kind.__mro__ for name in cls.__dict__.get("__annotations__", ()))
    return [(known[name], hints[name]) for name in names if name in known]


def _of_flag(f: Field[Any], hint: Any) -> dict[str, Any]:
    """The arguments of `add_argument` for a field made by [`flag`]."""
    default = {} if f.default is MISSING else {"default": f.default}
    how = {"help": f.metadata["help"], **default, **f.metadata["how"]}
    if isinstance(hint, types.UnionType):  # with None, for a flag that is not given
        hint = typing.get_args(hint)[0]
    if hint is bool:
        return how | {"action": "store_true"}
    if typing.get_origin(hint) is list:
        return how | {"action": "append", "type": typing.get_args(hint)[0]}
    return how | ({"choices": typing.get_args(hint)} if typing.get_origin(hint) is Literal else {"type": hint})


def _of_setting(f: Field[Any], hint: Any, outer: Field[Any]) -> dict[str, Any]:
    """The arguments of `add_argument` for a field of a configuration that users of the library set as well."""
    default = {"None": "none", "True": "yes", "False": "no"}.get(str(f.default), f.default)
    how = {
        "dest": f"{outer.name}.{f.name}", "default": argparse.SUPPRESS,
        "help": f"{f.metadata['help']} (default: {default})",
    }  # fmt: skip
    if hint is bool:
        return how | {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is Literal:
        return how | {"choices": typing.get_args(hint)}
    kind = _optional_number if types.NoneType in typing.get_args(hint) else hint
    return how | {"type": kind, "metavar": outer.metadata["metavar"]}


def _optional_number(text: str) -> int | str | None:
    try:
        return None if text.lower() == "none" else int(text)
    except ValueError:
        return text  # for settings that are a number or a word; the configuration says what it takes


def settings_from(kind: type[Kind], args: argparse.Namespace) -> Kind:
    """The settings that [`add_flags`] has added the flags of; raises what the classes of the settings raise."""
    given, values = vars(args), dict[str, Any]()
    for outer, hint in _fields(kind):
        values[outer.name] = given.get(outer.name)
        if is_dataclass(hint):
            prefix = f"{outer.name}."
            own = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
            make: Any = getattr(hint, "paper", hint) if given.get("paper") else hint
            values[outer.name] = make(**own)
    return kind(**values)


# --- long runs ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second SIGINT interrupts."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def stopped(number: int, _: Any) -> None:
        stop.set()
        print("osd-hf: stopping", file=sys.stderr)
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, stopped)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
