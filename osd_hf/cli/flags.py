"""How commands are set: dataclasses whose fields are flags, those that several commands share, and reports."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import random
import signal
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, StoreError
from osd_hf.pair import Quantization
from osd_hf.prompts import EncodedPrompts, Prompt, PromptSource, encode_prompts, read_prompts
from osd_hf.store.store import CorrectionStore
from osd_hf.utils.report import json_text, write_report

BUNDLED_REQUESTS = 200
THREADS = "of torch, at least 1; by default OMP_NUM_THREADS, or one, unless all cores are clearly faster"

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
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


def part(*, group: str = "", metavar: str, **defaults: Any) -> Any:
    """A field that holds another dataclass of settings, whose fields become flags as well: those with a `help` in
    their metadata. What is not given is one of `defaults` or left to that class, and `none` stands for `None`."""
    return field(metadata={"group": group, "rivals": "", "metavar": metavar, "defaults": defaults})


def option(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add the flags of a [`Settings`] class; inherited ones last. The parser knows no defaults: what is not given is
    left to the class."""
    titles = dict.fromkeys(outer.metadata["group"] for outer, _ in _fields(kind))
    first = [title for title in ("models", "prompts") if title in titles]
    groups = {
        title: parser.add_argument_group(title) if title else parser for title in dict.fromkeys([*first, *titles])
    }
    rivals: dict[str, Any] = {"": None}
    for outer, hint in _fields(kind):
        group, metadata = groups[outer.metadata["group"]], outer.metadata
        if metadata["rivals"] not in rivals:
            rivals[metadata["rivals"]] = group.add_mutually_exclusive_group()
        add = functools.partial((rivals[metadata["rivals"]] or group).add_argument, default=argparse.SUPPRESS)
        if is_dataclass(hint):
            for f, its_hint in _fields(hint):
                shown = metadata["defaults"].get(f.name, f.default)
                dest, help = f"{outer.name}.{f.name}", f.metadata["help"] + _default(shown)
                add(option(f.name), dest=dest, help=help, **_of_type(its_hint, metadata["metavar"]))
        else:
            help = metadata["help"] + (
                "" if outer.default is None or outer.default is False else _default(outer.default)
            )
            name = outer.name if metadata["positional"] else option(outer.name)
            add(name, help=help, **_of_type(hint) | metadata["how"])


def _fields(kind: Any) -> list[tuple[Field[Any], Any]]:
    """The fields of a class that are flags and then those of its bases, each with its type."""
    hints, known = typing.get_type_hints(kind), {f.name: f for f in fields(kind)}
    names = dict.fromkeys(name for cls in kind.__mro__ for name in cls.__dict__.get("__annotations__", ()))
    return [(known[name], hints[name]) for name in names if name in known and known[name].metadata]


def _default(value: Any) -> str:
    """What the help says of it."""
    shown = {"None": "none", "True": "yes", "False": "no"}.get(str(value), value)
    return "" if value is MISSING else f" (default: {shown})"


def _of_type(hint: Any, metavar: str | None = None) -> dict[str, Any]:
    """The arguments of `add_argument` for the type of a field made by [`flag`] or, with a `metavar`, of a setting that
    users of the library set as well."""
    args = typing.get_args(hint)
    if hint is bool or bool in args:  # of both and a word, which no flag says, the word is the default
        return {"action": "store_true" if metavar is None else argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is Literal:
        return {"choices": args}
    if metavar is not None:
        return {"type": _optional_number if types.NoneType in args else hint, "metavar": metavar}
    if types.NoneType in args:  # for a flag that is not given
        return _of_type(args[0])
    return {"action": "append", "type": args[0]} if typing.get_origin(hint) is list else {"type": hint}


def _optional_number(text: str) -> float | str | None:
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return None if text.lower() == "none" else number(text)
    return text  # for settings that are a number or a word; the configuration says what it takes


def settings_from(kind: type[Kind], args: argparse.Namespace) -> Kind:
    """The settings that [`add_flags`] has added the flags of; raises what the classes of the settings raise."""
    given, values = vars(args), dict[str, Any]()
    for outer, hint in _fields(kind):
        if is_dataclass(hint):
            prefix = f"{outer.name}."
            own = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
            make: Any = getattr(hint, "paper", hint) if given.get("paper") else hint
            values[outer.name] = make(**outer.metadata["defaults"] | own)
        elif outer.name in given:
            values[outer.name] = given[outer.name]
    return kind(**values)


# --- settings that several commands share ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a command was told, a field for each flag."""

    def check_counts(self, *names: str, least: int = 1) -> None:
        """Raises ConfigError for a flag that is given and too small."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{option(name)} must be at least {least}, got {value}.")

    def check_not_negative(self, *names: str) -> None:
        """Raises ConfigError for a flag that is negative, or no finite number."""
        for name in names:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{option(name)} must not be negative, got {getattr(self, name)}.")

    def check_together(self, one: str, other: str) -> None:
        """Raises ConfigError where one of two flags is given alone."""
        if bool(getattr(self, one)) != bool(getattr(self, other)):
            raise ConfigError(f"--{one} and --{other} go together: name both, or neither for the bundled pair.")


@dataclass(frozen=True, kw_only=True)
class Reporting(Settings):
    """Settings of a command that can report to machines as well; raises ConfigError where the report could not be
    written at the end of a long command."""

    json: str | None = flag("also write the report there; - is the standard output", metavar="PATH")

    def __post_init__(self) -> None:
        path = self.json
        if path not in (None, "-") and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise ConfigError(f"The report cannot be written to {path}: name a file in a folder that exists.")

    def say(self, text: str) -> None:
        """Print for people, not where the machine's JSON goes."""
        print(text, file=sys.stderr if self.json == "-" else sys.stdout, flush=True)

    def write_json(self, report: dict[str, Any]) -> None:
        """Write the report to where it is asked for; raises ConfigError where that cannot be done."""
        if self.json == "-":
            print(json_text(report, indent=1))
        elif self.json is not None:
            try:
                write_report(Path(self.json), report)
            except OSError as error:
                raise ConfigError(f"The report cannot be written to {self.json}: {error}.") from error


_models, _learning, _prompts = in_groups("models", "learning", "prompts")


@dataclass(frozen=True, kw_only=True)
class Placement(Settings):
    """How and where models are loaded."""

    dtype: Dtype = _models("auto is each checkpoint's own; only float32 is exact to the token", "auto")
    device: str | None = _models("such as cpu or cuda:0; by default CUDA where there is one, and the CPU for the "
                                 "bundled pair")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Loading(Placement):
    """How models that are named are loaded."""

    attn_implementation: str | None = _models("such as sdpa, eager or flash_attention_2; transformers' choice by "
                                              "default", metavar="NAME")  # fmt: skip

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of [`~osd_hf.pair.load_model`] and, with a target, [`~osd_hf.pair.load_pair`]."""
        names = ("dtype", "device", "attn_implementation", "device_map", "quantization")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


@dataclass(frozen=True, kw_only=True)
class TargetLoading(Loading):
    """How a target that is named is loaded, and its draft."""

    device_map: str | None = _models("of the target, such as auto, which spreads it over all devices; --device is the "
                                     "draft's then", metavar="MAP")  # fmt: skip
    quantization: Quantization | None = _models("of the target's weights: 4bit and 8bit need bitsandbytes, int8 needs "
                                                "torchao")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Learning(Settings):
    """How a draft learns."""

    paper: bool = _learning("the rule of arXiv 2310.07177; other flags change it", False)
    # These commands compare drafts, and figures that are compared need one k.
    config: OnlineConfig = part(group="learning", metavar="X", num_assistant_tokens=5)

    def fixed_k(self) -> int:
        """Tokens drafted per round in what is compared; raises ConfigError where the configuration leaves it open."""
        k = self.config.compared_k
        if k is None:
            raise ConfigError("--num-assistant-tokens must not be none: what is compared needs one k throughout.")
        return k


@dataclass(frozen=True, kw_only=True)
class Rows(Settings):
    """How a row of a file or data set becomes a prompt."""

    split: str = _prompts("of a Hub data set", "train")
    subset: str | None = _prompts("configuration of a Hub data set")
    column: str | None = _prompts("column of the prompt, a user's turn")
    prompt_template: str | None = _prompts("instead of a column: a format string, such as 'db: {db_id}\\n{question}'",
                                           metavar="FORMAT")  # fmt: skip

    def source(self, location: str, *, default_column: str | None = None, **more: Any) -> PromptSource:
        """Prompts of a file or data set; `more` goes before the flags. Raises ConfigError."""
        column = self.column or (None if self.prompt_template else default_column)
        kept = {"column": column, "template": self.prompt_template, "split": self.split, "subset": self.subset}
        return PromptSource(location, **{**kept, **more})


@dataclass(frozen=True, kw_only=True)
class Prompts(Rows):
    """Prompts that are served: those of the bundled domains where no others are named."""

    prompts: str | None = _prompts("Hub data set id, or a json, jsonl or parquet file", metavar="ID|FILE")
    no_chat_template: bool = _prompts("plain text, also where the tokenizer has a chat template", False)
    domain: list[str] | None = _prompts("label of all prompts; of bundled ones, domains to serve (repeat for several)",
                                        metavar="NAME")  # fmt: skip
    domain_column: str | None = _prompts("column of the label", metavar="COLUMN")
    num_requests: int | None = _prompts(f"all by default; {BUNDLED_REQUESTS} of the bundled ones", metavar="N")

    def read_prompts(self, seed: int) -> Iterator[Prompt]:
        """The prompts in their order, mixed by the seed where they are bundled; raises ConfigError and DataError."""
        if self.prompts is not None:
            if self.domain is not None and len(self.domain) > 1:
                raise ConfigError("--domain can be given several times only for bundled prompts; see --domain-column.")
            label = self.domain[0] if self.domain else None
            return read_prompts(self.source(self.prompts, domain=label, domain_column=self.domain_column))
        if unknown := set(self.domain or ()) - set(DOMAINS):
            raise ConfigError(f"--domain must be one of {', '.join(DOMAINS)}, got {', '.join(sorted(unknown))}.")
        count, domains = self.num_requests or BUNDLED_REQUESTS, self.domain or DOMAINS
        share = -(-count // len(domains))
        mixed = [(d, e.prompt) for d in domains for e in bundled_prompts(d, share, seed=seed)]
        random.Random(seed).shuffle(mixed)
        return (Prompt(i, text, domain) for i, (domain, text) in enumerate(mixed[:count]))


def adapters(rank: int | None) -> Any:
    """A configuration of PEFT for adapters of this rank on all linear layers; `None` without one."""
    from peft import LoraConfig

    return None if rank is None else LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def recorded(folder: str) -> CorrectionStore:
    """A store of captured requests; raises StoreError where there is none."""
    if not Path(folder).is_dir():
        raise StoreError(f"There is no store at {folder}. `osd-hf run --store DIR` writes one.")
    return CorrectionStore(folder)


def encode(
    prompts: Iterable[Prompt], tokenizer: Any, room: int | None, new_tokens: int, *, limit: int | None,
    chat_template: bool,
) -> EncodedPrompts:  # fmt: skip
    """[`~osd_hf.prompts.encode_prompts`], which says what is left out, as it has no text or more tokens than there is
    room for beside an answer."""
    encoded = encode_prompts(prompts, tokenizer, limit=limit, max_prompt_tokens=room, chat_template=chat_template)
    if encoded.skipped_empty or encoded.skipped_long:
        print(
            f"osd-hf: warning: skipped {encoded.skipped_empty} prompts without text and {encoded.skipped_long} that "
            f"leave no room for {new_tokens} new tokens.",
            file=sys.stderr,
        )
    return encoded


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
