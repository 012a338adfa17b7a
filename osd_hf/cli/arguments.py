"""How a command line becomes the settings of a command: flags from the fields of a dataclass, a file, old names."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from osd_hf.errors import ConfigError, nearest
from osd_hf.utils.report import read_config

Kind = TypeVar("Kind")

# Flags that had another name, by command; the old ones are read for one release.
RENAMED = {
    "app": {"--state": "--state-dir"},
    "bench": {"--k": "--num-assistant-tokens", "--requests": "--num-requests", "--compile": "--compile-draft"},
    "export": {"--k": "--num-assistant-tokens"},
    "plan": {"--new-tokens": "--max-new-tokens"},
    "push": {"--k": "--num-assistant-tokens", "--requests": "--num-requests", "--local-dir": "--output-dir"},
    "replay": {"--limit": "--num-requests"},
    "serve": {"--session": "--state-dir"},
}
# Flags that are gone, with why; they and their values are passed over for as long.
GONE = {"export": {"--to": "the folder is the same for every engine"}}


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
        positional (`bool`, *optional*, defaults to `False`): Whether it is required, and may be given without a name.
        how (`Any`): More arguments of `ArgumentParser.add_argument`, such as `metavar`, and `required`.
    """
    required = positional or how.pop("required", False)
    metadata = {"help": help, "group": group, "rivals": rivals, "positional": positional, "how": how}
    metadata["required"] = required
    return field(metadata=metadata) if required else field(default=default, metadata=metadata)


def in_groups(*titles: str) -> list[Callable[..., Any]]:
    """[`flag`] for each of these groups of the help."""
    return [functools.partial(flag, group=title) for title in titles]


def part(
    *, group: str = "", metavar: str, without: Mapping[str, str] | None = None, helps: Mapping[str, str] | None = None,
    **defaults: Any,
) -> Any:  # fmt: skip
    """A field that holds another dataclass of settings, whose fields become flags as well: those with a `help` in
    their metadata, but for those `without` a meaning to the command, each with the reason. What is not given is one of
    `defaults` or left to that class, and `none` stands for `None`; `helps` go before the texts of that class."""
    return field(metadata={
        "group": group, "rivals": "", "metavar": metavar, "defaults": defaults, "without": without or {},
        "helps": helps or {}, "positional": False, "required": False,
    })  # fmt: skip


def option(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, kind: type) -> dict[str, argparse.Action]:
    """Add the flags of a settings class, inherited ones last, and return them by their names in a file. The parser
    knows no defaults, and requires none: what is not given is left to the class."""
    titles = dict.fromkeys(outer.metadata["group"] for outer, _ in _fields(kind))
    first = [title for title in ("models", "prompts") if title in titles]
    groups = {
        title: parser.add_argument_group(title) if title else parser for title in dict.fromkeys([*first, *titles])
    }
    rivals: dict[str, Any] = {"": None}
    actions: dict[str, argparse.Action] = {}
    for outer, hint in _fields(kind):
        group, metadata = groups[outer.metadata["group"]], outer.metadata
        if metadata["rivals"] not in rivals:
            rivals[metadata["rivals"]] = group.add_mutually_exclusive_group()
        add = functools.partial((rivals[metadata["rivals"]] or group).add_argument, default=argparse.SUPPRESS)
        if is_dataclass(hint):
            for f, its_hint in _of_part(outer, hint):
                shown = metadata["defaults"].get(f.name, f.default)
                dest, help = f"{outer.name}.{f.name}", metadata["helps"].get(f.name, f.metadata["help"])
                how = _of_type(its_hint, metadata["metavar"])
                actions[f.name] = add(option(f.name), dest=dest, help=sentence(help + _default(shown)), **how)
        else:
            help = metadata["help"] + (
                "" if outer.default is None or outer.default is False else _default(outer.default)
            )
            help += " (needs no name)" if metadata["positional"] else " (required)" if metadata["required"] else ""
            actions[outer.name] = add(option(outer.name), help=sentence(help), **_of_type(hint) | metadata["how"])
    return actions


def sentence(help: str) -> str:
    """A help text as people read it."""
    return f"{help[0].upper()}{help[1:]}."


_hints = functools.cache(typing.get_type_hints)


def _fields(kind: Any) -> list[tuple[Field[Any], Any]]:
    """The fields of a class that are flags and then those of its bases, each with its type."""
    hints, known = _hints(kind), {f.name: f for f in fields(kind)}
    names = dict.fromkeys(name for cls in kind.__mro__ for name in cls.__dict__.get("__annotations__", ()))
    return [(known[name], hints[name]) for name in names if name in known and known[name].metadata]


def _of_part(outer: Field[Any], hint: Any) -> list[tuple[Field[Any], Any]]:
    return [(f, its_hint) for f, its_hint in _fields(hint) if f.name not in outer.metadata["without"]]


def _default(value: Any) -> str:
    """What the help says of it."""
    shown = {"None": "none", "True": "yes", "False": "no"}.get(str(value), value)
    return "" if value is MISSING else f" (default: {shown})"


def _of_type(hint: Any, metavar: str | None = None) -> dict[str, Any]:
    """The arguments of `add_argument` for the type of a field made by [`flag`] or, with a `metavar`, of a setting that
    users of the library set as well."""
    args = typing.get_args(hint)
    if hint is bool or bool in args:  # of both and a word, which no flag says, the word is the default
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is Literal:
        return {"choices": args}
    if metavar is not None:
        return {"type": _optional_number if types.NoneType in args else hint, "metavar": metavar}
    if types.NoneType in args:  # for a flag that is not given
        return _of_type(args[0])
    if typing.get_origin(hint) is dict:
        return {"type": json_object}
    # One value each time that it is given.
    return {"action": "extend", "nargs": 1, "type": args[0]} if typing.get_origin(hint) is list else {"type": hint}


def json_object(text: str) -> dict[str, Any]:
    """Read the value of a flag that takes a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it must be a JSON object, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"it must be a JSON object, got {text!r}")
    return value


def _optional_number(text: str) -> float | str | None:
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return None if text.lower() == "none" else number(text)
    return text  # for settings that are a number or a word; the configuration says what it takes


# --- what is given --------------------------------------------------------------------------------------------------


def read_arguments(kind: type[Kind], arguments: Sequence[str], *, prog: str, **how: Any) -> Kind:
    """
    The settings that these arguments name, and those of the file of `--config` besides; flags go before the file.
    Wrong usage exits with 2, as `argparse` does.

    Args:
        kind (`type`): The dataclass of the settings.
        arguments (`Sequence[str]`), prog (`str`): What follows the command, as [`spelled`], and `osd-hf COMMAND`.
        how (`Any`): Arguments of the parser.

    Raises:
        ConfigError: the file cannot be read, or sets what is no flag; and what the classes of the settings raise.
    """
    parser = argparse.ArgumentParser(prog=prog, usage=_usage(kind), exit_on_error=False, allow_abbrev=False, **how)
    parser.add_argument(
        "--config", dest="config file", type=Path, default=argparse.SUPPRESS, metavar="FILE",
        help="YAML or JSON with defaults of these flags by their names; flags go before.",
    )  # fmt: skip
    actions = add_flags(parser, kind)
    outer = [f for f, _ in _fields(kind)]
    try:
        parsed, rest = parser.parse_known_args(arguments)
        given = vars(parsed)
        of_file = _of_file(parser, given.pop("config file"), actions) if "config file" in given else {}
        _take_positionals(kind, given, of_file, rest, actions)
        rivals = {f.metadata["rivals"] for f in outer if f.name in given and f.metadata["rivals"]}
        beaten = {f.name for f in outer if f.metadata["rivals"] in rivals}
        given = {name: value for name, value in of_file.items() if name not in beaten} | given
    except argparse.ArgumentError as error:
        parser.error(str(error))
    if missing := [_shown(f) for f in outer if f.metadata["required"] and f.name not in given]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    return settings_from(kind, given)


def _usage(kind: type) -> str:
    needed = [f for f, _ in _fields(kind) if f.metadata["required"]]
    named = [f"{_shown(f)} {f.metadata['how'].get('metavar', '')}" for f in needed if not f.metadata["positional"]]
    lists = {name for name, hint in _hints(kind).items() if typing.get_origin(hint) is list}
    unnamed = [_shown(f) + " ..." * (f.name in lists) for f in _positionals(kind)]
    return " ".join(["%(prog)s [-h]", *named, "[--NAME VALUE ...]", *unnamed])


def _positionals(kind: type) -> list[Field[Any]]:
    return [f for f, _ in _fields(kind) if f.metadata["positional"]]


def _shown(f: Field[Any]) -> str:
    return str(f.metadata["how"]["metavar"]) if f.metadata["positional"] else option(f.name)


def _take_positionals(
    kind: type, given: dict[str, Any], of_file: Mapping[str, Any], rest: Sequence[str],
    actions: Mapping[str, argparse.Action],
) -> None:  # fmt: skip
    """Take what has no name for the positional fields, first for those that a file does not set; raises ArgumentError
    for what is left then."""
    free = [f for f in _positionals(kind) if f.name not in given]
    unset = [f for f in free if f.name not in of_file]
    free = unset if len(rest) <= len(unset) else free
    for argument in rest:
        if argument.startswith("-") and argument != "-":
            told = argument.split("=")[0]  # its value may be a secret
            name = told.lstrip("-").replace("-", "_")
            for outer, _ in _fields(kind):
                if name in outer.metadata.get("without", ()):
                    raise argparse.ArgumentError(None, f"{option(name)}: {outer.metadata['without'][name]}")
            known = [text for action in actions.values() for text in action.option_strings]
            meant = nearest(option(name), ["--config", "--help", *known])
            raise argparse.ArgumentError(None, f"unrecognized arguments: {told}.{meant}")
        if not free:
            raise argparse.ArgumentError(None, f"unrecognized arguments: {argument}")
        made: Any = actions[free[0].name].type
        if actions[free[0].name].nargs == 1:  # a list, which takes all that follow
            given.setdefault(free[0].name, []).append(made(argument))
        else:
            given[free.pop(0).name] = made(argument)


def settings_from(kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """The settings that [`add_flags`] has added the flags of; raises what the classes of the settings raise."""
    values = dict[str, Any]()
    for outer, hint in _fields(kind):
        if is_dataclass(hint):
            prefix = f"{outer.name}."
            own = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
            make: Any = getattr(hint, "paper", hint) if given.get("paper") else hint
            values[outer.name] = make(**outer.metadata["defaults"] | own)
        elif outer.name in given:
            values[outer.name] = given[outer.name]
    return kind(**values)


def spelled(command: str, arguments: Sequence[str]) -> list[str]:
    """The arguments of a command with hyphens in the names of flags, with new names for old ones, and without flags
    that are gone; lines on the standard error tell of both."""
    gone, renamed, found, result = GONE.get(command, {}), RENAMED.get(command, {}), dict[str, str](), list[str]()
    given = iter(arguments)
    for argument in given:
        name, equals, value = argument.partition("=")
        if re.fullmatch(r"--[A-Za-z][\w-]*", name):
            name = name.replace("_", "-")
            if name in gone:
                print(f"osd-hf: notice: {name} is gone: {gone[name]}; the next release refuses it", file=sys.stderr)
                if not equals:
                    next(given, None)  # its value
                continue
            if name in renamed:
                found[name] = renamed[name]
                name = renamed[name]
        result.append(name + equals + value)
    if found:
        shown = ", ".join(f"{old} is now {new}" for old, new in found.items())
        print(f"osd-hf: notice: {shown}; the next release knows the new name alone", file=sys.stderr)
    return result


# --- a file of settings ---------------------------------------------------------------------------------------------


def _of_file(parser: argparse.ArgumentParser, path: Path, actions: Mapping[str, argparse.Action]) -> dict[str, Any]:
    """What a file sets, read as the flags are; raises ConfigError."""
    arguments: list[str] = []
    for name, value in read_config(path).items():
        if (action := actions.get(name.replace("-", "_"))) is None:
            meant = nearest(name.replace("-", "_"), actions)
            raise ConfigError(f"The configuration {path} sets `{name}`, which is no flag of {parser.prog}.{meant}")
        if isinstance(value, dict) and action.type is not json_object:
            raise ConfigError(f"The configuration {path} sets `{name}` to a mapping; one value or a list is needed.")
        arguments += _as_given(action, value)
    try:
        return vars(parser.parse_args(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(f"The configuration {path} cannot be taken: {error}.") from error


def _as_given(action: argparse.Action, value: Any) -> list[str]:
    """A value as it is given on the command line."""
    name = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction) and isinstance(value, bool):
        return [name if value else f"--no-{name.removeprefix('--')}"]
    if value is None:
        return [f"{name}=none"] if action.type is _optional_number else []
    if action.type is json_object:
        return [f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    values = value if isinstance(value, list) else [value]
    texts = [{True: "yes", False: "no"}[one] if isinstance(one, bool) else str(one) for one in values]
    if action.nargs == 1:  # of a flag that is given several times
        return [f"{name}={text}" for text in texts]
    return [f"{name}={','.join(texts)}"]
