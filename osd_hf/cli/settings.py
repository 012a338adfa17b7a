"""Parse the flags of commands into dataclasses, and define the settings that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import importlib.util
import itertools
import json
import math
import random
import signal
import sys
import threading
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from transformers import HfArgumentParser, PreTrainedTokenizerBase

from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf.config import OnlineConfig
from osd_hf.distillation.answers import sample_answers, sampling_of, split_answers
from osd_hf.errors import ConfigError, StoreError, first_line, nearest
from osd_hf.hub import EvaluationSet, hub_id
from osd_hf.layers import own_head
from osd_hf.loading import Pair, load_pair
from osd_hf.models import Quantization, load_model, load_tokenizer
from osd_hf.prompts import EncodedPrompts, Prompt, PromptSource, encode_prompts, read_prompts
from osd_hf.store.store import CorrectionStore
from osd_hf.utils.report import json_text, read_config, write_report

NUM_BUNDLED_REQUESTS = 200
THREADS = "number of torch threads; by default OMP_NUM_THREADS, or the faster of one and all cores"
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


# --- parsing --------------------------------------------------------------------------------------------------------


CHECKS = ("minimum", "needs", "excludes")  # metadata of a field that [`CommandParser.check_flags`] reads


def flag(help: str, default: Any = MISSING, **how: Any) -> Any:
    """
    Return a dataclass field with the arguments of its flag, which is required without a default. `how` has arguments
    of `add_argument`, and:

    - `positional`: whether the flag is a positional argument.
    - `minimum`: the smallest value.
    - `needs`: flags without which this one has no effect: one of `"a b"`, both of `"a, b"`. Names that a command does
      not have are ignored.
    - `excludes`: flags that have no effect if this one is set.
    """
    return field(default=default, metadata={"help": help, **how})


def option(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Show each flag by its name with hyphens, and its default unless that says nothing."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [text for text in action.option_strings if "_" not in text]
        return super()._format_action_invocation(shown)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or isinstance(action.default, list)
        return action.help if silent or action.required else super()._get_help_string(action)


class CommandParser(HfArgumentParser):
    """Parse a command line into dataclasses. Beyond `HfArgumentParser`: positional arguments, `none` for optional
    numbers, repeated flags, groups by the class that declares a field, a `--config` file, and hints for typing errors.
    Fields named in `without` have no meaning in the command, and get no flag."""

    def __init__(self, dataclass_types: Sequence[type], without: Collection[str] = (), **kwargs: Any) -> None:
        self.without = without
        self.rules: dict[str, Mapping[str, Any]] = {}  # metadata of each field with a flag
        super().__init__(dataclass_types, formatter_class=HelpFormatter, allow_abbrev=False, **kwargs)
        help = "YAML or JSON file with defaults of these flags by their names"
        self.add_argument("--config", type=Path, metavar="FILE", help=help)

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        hints, groups = typing.get_type_hints(dtype), dict[str, Any]()
        for known in fields(dtype):
            shared = any(action.dest == known.name for action in self._actions)  # by two settings classes
            if shared or known.name in self.without or not known.metadata.get("help"):
                continue
            owner = next(kind for kind in dtype.__mro__ if known.name in kind.__dict__.get("__annotations__", ()))
            title = (owner if issubclass(dtype, Settings) else dtype).__name__
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            self.rules[known.name] = known.metadata
            resolved = copy.copy(known)  # the parser writes to it
            resolved.type = hints[known.name]
            self._parse_dataclass_field(groups[title], resolved)

    @staticmethod
    def _parse_dataclass_field(parser: Any, field: Field[Any]) -> None:
        how = {name: value for name, value in field.metadata.items() if name not in CHECKS}
        kinds = typing.get_args(field.type)
        plain = [kind for kind in kinds if kind is not types.NoneType]
        is_optional = len(plain) == 1 and len(kinds) == 2
        kind = plain[0] if is_optional else field.type
        is_list = typing.get_origin(kind) is list
        metavars: dict[Any, str] = {int: "N", float: "X", Path: "DIR"}
        shown = metavars.get(typing.get_args(kind)[0] if is_list else kind)
        if shown is not None and not how.get("choices"):
            how.setdefault("metavar", shown)
        if how.pop("positional", False):
            default = None if field.default is MISSING else field.default
            parser.add_argument(field.name, type=Path if field.type is Path else str, default=default, **how)
        elif _is_mixed(field):
            word = {} if bool not in kinds else {"nargs": "?", "const": True}
            names = dict.fromkeys([f"--{field.name}", option(field.name)])
            parser.add_argument(*names, type=_read_value, default=field.default, **word, **how)
        else:
            field.metadata = types.MappingProxyType({"action": "extend", **how} if is_list else how)
            HfArgumentParser._parse_dataclass_field(parser, field)
            if parser._actions[-1].option_strings[0] == f"--no_{field.name}":
                parser._actions[-1].help = f"disable {option(field.name)}"

    def parse_settings(self, arguments: Sequence[str]) -> tuple[Any, ...]:
        """Return an instance of each settings class; raises ConfigError, and exits for invalid usage."""
        values = self.read(arguments)
        self.check_flags(values)
        settings = self.make_settings(values)
        for one in settings:
            if isinstance(one, Settings):
                one.check()
            elif isinstance(one, OnlineConfig) and one.unused:
                names = " and ".join(map(option, one.unused))
                raise ConfigError(f"{names} would change nothing with this --num-assistant-tokens, and --candidates.")
        return settings

    def read(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the value of each field from the command line and the `--config` file, without checks."""
        given, rest = self.parse_known_intermixed_args(self.with_file(arguments))
        if rest:
            name = rest[0].partition("=")[0]  # the value may be a secret
            known = [text for action in self._actions for text in action.option_strings]
            self.error(f"unrecognized arguments: {name}.{nearest(name, known)}")
        values: dict[str, Any] = vars(given)
        return values

    def make_settings(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return an instance of each settings class with its values; raises ConfigError."""
        try:
            return tuple(
                kind(**{f.name: values[f.name] for f in fields(kind) if f.init and f.name in values})
                for kind in self.dataclass_types
            )
        except (ValueError, TypeError) as error:  # of transformers' training arguments
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"The settings do not go together: {first_line(error)}.") from error

    def check_flags(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError for a value below its minimum, and for a flag that has no effect with the others. Those of
        learning are only named."""
        given = {name for name, value in values.items() if value != self.get_default(name)}
        for name, model in (("revision", "target"), ("draft_revision", "draft")):
            if values.get(name) and values.get(model) and Path(values[model]).exists():
                raise ConfigError(f"{option(name)} is for a model on the Hub, and {values[model]} is local.")
        for name, rules in self.rules.items():
            value, minimum = values[name], rules.get("minimum")
            for number in value if isinstance(value, list) else [value]:
                if minimum is not None and number is not None and not minimum <= number < math.inf:
                    raise ConfigError(f"{option(name)} must be at least {minimum}, got {number}.")
            for group in rules.get("needs", "").split(","):
                needed = [other for other in group.split() if other in values]
                if name in given and needed and not any(values[other] for other in needed):
                    raise ConfigError(f"{option(name)} would change nothing without {self._shown(needed)}.")
            excluded = [other for other in rules.get("excludes", "").split() if other in given]
            if value and excluded:
                shown = self._shown([name, excluded[0]], " and ")
                raise ConfigError(f"{shown} exclude each other: give one of them.")
        idle = [option(name) for name, rules in self.rules.items() if rules.get("learns") and name in given]
        if idle and not values.get("learn", True):  # a baseline may have the flags of the run that learns
            print(f"osd-hf: warning: {', '.join(idle)} would change nothing without --learn", file=sys.stderr)

    def _shown(self, names: Sequence[str], word: str = " or ") -> str:
        rules = [(name, self.rules[name]) for name in names]
        return word.join(how["metavar"] if how.get("positional") else option(name) for name, how in rules)

    def with_file(self, arguments: Sequence[str]) -> list[str]:
        """Return what the `--config` file sets, as arguments, and then the arguments."""
        file = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        file.add_argument("--config", type=Path)
        path = file.parse_known_args(arguments)[0].config
        return [*self._of_file(path, arguments), *arguments]

    def _of_file(self, path: Path | None, arguments: Sequence[str]) -> Iterator[str]:
        """Yield what a file sets as arguments, without the flags that the command line sets."""
        given = {argument.partition("=")[0] for argument in arguments}
        actions = {action.dest: action for action in reversed(self._actions) if action.option_strings}
        overridden = {action.dest for action in self._actions if given & set(action.option_strings)}
        for written, value in read_config(path).items() if path is not None else ():
            name = written.replace("-", "_")
            if name not in actions or name == "config":
                raise ConfigError(f"The file {path} sets `{written}`, which is no flag.{nearest(name, actions)}")
            values = value if isinstance(value, list) else [value]
            # YAML reads a plain `no` as false, which is a choice of some flags.
            words = {None: "none", False: "no" if "no" in (actions[name].choices or ()) else "false", True: "true"}
            if name in overridden or (value is None and actions[name].default is None):
                continue
            for one in values:
                plain = one is None or isinstance(one, bool)
                text = words[one] if plain else json.dumps(one) if isinstance(one, dict) else str(one)
                yield f"{actions[name].option_strings[-1]}={text}"


def _is_mixed(field: Field[Any]) -> bool:
    """Return whether a field takes a number, or a word such as `auto` or `none`."""
    kinds = typing.get_args(field.type)
    if str in kinds or len(kinds) < 2 or typing.get_origin(field.type) in (list, Literal):
        return False
    if len(kinds) == 2 and types.NoneType in kinds:  # `none` is a word only if it is not the default
        return field.default is not None and field.default is not MISSING
    return any(typing.get_origin(kind) is Literal for kind in kinds)


def _read_value(text: str) -> Any:
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text  # the settings class checks which words are allowed


# --- shared settings ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a command, one field per flag."""

    def check(self) -> None:
        """Raise ConfigError for flags that do not go together, beyond [`CommandParser.check_flags`]."""

    def check_together(self, one: str, other: str) -> None:
        """Raise ConfigError if only one of two flags is set."""
        if bool(getattr(self, one)) != bool(getattr(self, other)):
            raise ConfigError(f"{option(one)} and {option(other)} go together: set both, or neither.")


@dataclass(frozen=True, kw_only=True)
class Reporting(Settings):
    """Settings of a command that can write its report as JSON."""

    json: str | None = flag("also write the report to this file; - is the standard output", None, metavar="PATH")

    def __post_init__(self) -> None:
        path = self.json
        if path not in (None, "-") and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise ConfigError(f"The report cannot be written to {path}: name a file in a folder that exists.")

    def say(self, text: str) -> None:
        """Print for people. The standard output is kept free if the JSON report goes there."""
        print(text, file=sys.stderr if self.json == "-" else sys.stdout, flush=True)

    def write_json(self, report: dict[str, Any]) -> None:
        """Write the report if `--json` asks for it."""
        if self.json == "-":
            print(json_text(report, indent=1))
        elif self.json is not None:
            write_report(Path(self.json), report)


PLACEMENT = ("dtype", "device", "attn_implementation", "device_map", "quantization")
PAIRS = "a pair by name: bundled, or smollm2 = SmolLM2-135M-Instruct and its draft (a download of 93 MB)"
OF_TARGET = "target models compare repo_id export"  # one of which names a target, maybe by a model card
NOT_OF_PAIRS = "models target draft revision draft_revision dtype attn_implementation device_map quantization"


@dataclass(frozen=True, kw_only=True)
class PairSettings(Settings):
    """The models, and how they are loaded."""

    pair: Literal["bundled", "smollm2"] | None = flag(PAIRS, None, excludes=NOT_OF_PAIRS)
    target: str | None = flag("Hub id or folder of the target", None, metavar="ID|PATH")
    draft: str | None = flag("Hub id or folder of the draft", None, metavar="ID|PATH")
    revision: str | None = flag("revision of the target on the Hub", None, needs=OF_TARGET)
    draft_revision: str | None = flag("revision of the draft on the Hub", None, needs="draft models compare")
    trust_remote_code: bool = flag("run code from the model repositories", False, needs="target draft models compare")
    dtype: Dtype = flag("dtype of weights; auto = the checkpoint's; only float32 is exact", "auto", needs=OF_TARGET)
    device: str | None = flag("device of the models, such as cpu or cuda:0; by default CUDA if there is one", None)
    attn_implementation: str | None = flag("attention kernels, such as sdpa or eager", None, metavar="NAME")
    device_map: str | None = flag("device map of the target, such as auto", None, metavar="MAP", needs=OF_TARGET)
    quantization: Quantization | None = flag("quantize the target by bitsandbytes or torchao", None, needs=OF_TARGET)

    @property
    def fetching(self) -> dict[str, Any]:
        """Arguments of [`~osd_hf.models.load_config`] and [`~osd_hf.models.load_tokenizer`] for the target."""
        return {"trust_remote_code": self.trust_remote_code, "revision": self.revision or "main"}

    @property
    def draft_fetching(self) -> dict[str, Any]:
        """The same for the draft."""
        return {"trust_remote_code": self.trust_remote_code, "revision": self.draft_revision or "main"}

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of [`~osd_hf.loading.load_pair`]."""
        names = ("revision", "draft_revision", "trust_remote_code", *PLACEMENT)
        return {name: getattr(self, name) for name in names}

    @property
    def draft_loading(self) -> dict[str, Any]:
        """Arguments of [`~osd_hf.models.load_model`] for the draft."""
        names = ("dtype", "device", "attn_implementation")
        return {name: getattr(self, name) for name in names} | self.draft_fetching

    def load_pair(self, **changes: Any) -> Pair:
        """Load the models, by default the bundled ones; raises the errors of [`~osd_hf.loading.load_pair`]."""
        if self.pair == "smollm2":
            return Pair(*importlib.import_module("osd_hf_app.pair").smollm2_pair(self.device or "cpu"))
        if self.pair:
            return load_pair(device=self.device)
        return load_pair(self.target, self.draft, **self.loading | changes)

    def load_target(self) -> tuple[Any, Any]:
        """Load the target and its tokenizer; raises UnsupportedModelError."""
        if self.target is None:
            target, _, tokenizer = self.load_pair()
            return target, tokenizer
        loading = {name: getattr(self, name) for name in PLACEMENT} | self.fetching
        return load_model(self.target, **loading), load_tokenizer(self.target, **self.fetching)


@dataclass(frozen=True, kw_only=True)
class ServedPairSettings(PairSettings):
    """The models of a command that serves, which may be a target with a draft head of its own."""

    own_head: bool = flag(
        "draft with a new head of the target in place of a draft, as a --target without a --draft does", False,
        excludes="draft models compare",
    )  # fmt: skip

    def load_pair(self, **changes: Any) -> Pair:
        """Load the models as [`PairSettings.load_pair`] does."""
        pair = super().load_pair(**changes)
        needs_head = self.own_head or pair.draft is None
        return pair._replace(draft=own_head(pair.target)) if needs_head else pair


SOURCES = "prompts eval_prompts"
NAME, CONFIG = (["--dataset_name", "--dataset-name"], ["--dataset_config", "--dataset-config"])  # TRL's names


@dataclass(frozen=True, kw_only=True)
class TemplateSettings(Settings):
    """Arguments of the chat template."""

    chat_template_kwargs: str | None = flag("arguments of the chat template", None, needs="url", metavar="JSON")

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """The arguments as a mapping; raises ConfigError."""
        text, value = self.chat_template_kwargs, None
        with contextlib.suppress(ValueError):
            value = None if text is None else json.loads(text)
        if text is not None and not isinstance(value, dict):
            raise ConfigError(f"--chat-template-kwargs must be a JSON object, got {text!r}.")
        return value


@dataclass(frozen=True, kw_only=True)
class RowSettings(TemplateSettings):
    """How rows of a file or data set become prompts."""

    split: str = flag("split of a data set", "train", needs=SOURCES)
    subset: str | None = flag("configuration of a data set", None, needs=SOURCES, metavar="NAME", aliases=CONFIG)
    column: str | None = flag("column of the prompt, if the format is not detected", None, needs=SOURCES)
    template: str | None = flag("text with columns, such as '{db} {question}'", None, needs=SOURCES, metavar="FORMAT")
    domain_column: str | None = flag("column of each prompt's label", None, needs="prompts", metavar="COLUMN")
    chat_template: bool = flag("put prompts into the tokenizer's chat template, if there is one", True, needs="url")

    @property
    def chat(self) -> dict[str, Any]:
        """Arguments of [`~osd_hf.prompts.encode_prompts`] and `encode_turn`; raises ConfigError."""
        return {"chat_template": self.chat_template, "chat_template_kwargs": self.template_kwargs}

    def source(self, location: str, **more: Any) -> PromptSource:
        """Return the source of prompts in a file or data set; `more` takes precedence. Raises ConfigError."""
        own = {"split", "subset"} - more.keys()
        if Path(location).is_file() and any(getattr(self, name) != getattr(type(self), name) for name in own):
            raise ConfigError(f"{location} is a file, which has neither --split nor --subset.")
        names = ("column", "template", "domain_column", "split", "subset")
        return PromptSource(location, **{name: getattr(self, name) for name in names} | more)

    def evaluation_set(self, location: str | None, num_requests: int, max_new_tokens: int) -> EvaluationSet:
        """Return the prompts that drafts are evaluated on, bundled ones by default; raises ConfigError, DataError."""
        if location is None:
            return EvaluationSet.bundled(num_requests, max_new_tokens=max_new_tokens)
        source = self.source(location)
        prompts = tuple(itertools.islice(read_prompts(source), num_requests))
        dataset_id = hub_id(location)
        parts = [dataset_id or Path(location).name, self.subset, self.split if dataset_id else None]
        name = ", ".join(part for part in parts if part)
        return EvaluationSet(name, prompts, max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class PromptSettings(RowSettings):
    """Prompts to serve. Without `--prompts`, prompts of the bundled domains."""

    prompts: str | None = flag("Hub id, folder or file of prompts", None, needs="url", metavar="ID|FILE", aliases=NAME)
    domain: list[str] | None = flag("label of all prompts; of bundled ones, the domains", None, metavar="NAME")
    num_requests: int | None = flag("first N prompts; by default all, or 200 bundled ones", None, minimum=1)

    def encode_prompts(
        self, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int | None, *, seed: int = 0
    ) -> EncodedPrompts:
        """Encode the prompts in order, bundled ones shuffled by the seed; logs and raises as
        [`~osd_hf.prompts.encode_prompts`]."""
        how: dict[str, Any] = {"limit": self.num_requests, "max_prompt_tokens": max_prompt_tokens, **self.chat}
        return encode_prompts(self._read_prompts(seed), tokenizer, **how)

    def _read_prompts(self, seed: int) -> Iterator[Prompt]:
        if self.prompts is not None:
            if self.domain is not None and len(self.domain) > 1:
                raise ConfigError("--domain takes several labels only for bundled prompts; see --domain-column.")
            label = self.domain[0] if self.domain else None
            return read_prompts(self.source(self.prompts, domain=label))
        if unknown := set(self.domain or ()) - set(DOMAINS):
            raise ConfigError(f"--domain must be one of {', '.join(DOMAINS)}, got {', '.join(sorted(unknown))}.")
        count, domains = self.num_requests or NUM_BUNDLED_REQUESTS, self.domain or DOMAINS
        share = -(-count // len(domains))
        mixed = [(d, e.prompt) for d in domains for e in bundled_prompts(d, share, seed=seed)]
        random.Random(seed).shuffle(mixed)
        return (Prompt(i, text, domain) for i, (domain, text) in enumerate(mixed[:count]))


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(PairSettings, Reporting):
    """The models of a command that trains a draft, and how its target answers prompts for a long training."""

    answers: Path | None = flag("folder of sampled answers to train on for long", None, excludes="store")
    answer_tokens: int = flag("tokens of answers in all", 1_000_000, minimum=1, needs="answers")
    answer_batch_size: int = flag("prompts answered together", 32, minimum=1, needs="answers")
    answer_temperature: float | None = flag("of the answers; by default the target's", None, needs="answers")
    answer_top_p: float | None = flag("of the answers; by default the target's", None, needs="answers")
    answer_top_k: int | None = flag("of the answers; by default the target's", None, needs="answers")

    def sample_answers(self, target: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Any:
        """Complete the folder of answers; return those to train on and held-out ones."""
        require_extra("distill", "trl", "peft")
        sampling = sampling_of(
            target, temperature=self.answer_temperature, top_p=self.answer_top_p, top_k=self.answer_top_k
        )
        with CorrectionStore(self.answers) as store:
            counts = sample_answers(
                target, prompts, store, num_tokens=self.answer_tokens, max_new_tokens=max_new_tokens,
                sampling=sampling, batch_size=self.answer_batch_size, seed=seed,
            )  # fmt: skip
            print(", ".join(f"{count} {name}" for name, count in counts.items()), file=sys.stderr)
            return split_answers(store)


# --- learning settings ----------------------------------------------------------------------------------------------


PAPER = "learn by the rule of arXiv 2310.07177, which other flags change"
NOTHING_SERVED = "candidates text_scope compile_draft compile_target update_strategy device_map quantization".split()
OF_SERVING = "num_assistant_tokens candidates text_scope compile_draft compile_target seed".split()


def learning_parser(kind: type, arguments: Sequence[str], *, k: int | None = None, **how: Any) -> CommandParser:
    """Return the parser of a command whose draft learns, with `k` as the default number of drafted tokens. Defaults
    come from the paper's rule if `--paper` is given."""
    parser = CommandParser([kind, OnlineConfig], **how)
    learned = {f.name for f in fields(OnlineConfig)} - {*OF_SERVING}
    parser.rules |= {name: {"learns": True} for name in learned & parser.rules.keys()}
    if {"--paper", "--paper=true"} & {word.lower() for word in parser.with_file(arguments)}:
        parser.set_defaults(**OnlineConfig.paper().to_dict())
    elif k is not None:
        parser.set_defaults(num_assistant_tokens=k)
    return parser


def require_extra(extra: str, *modules: str) -> None:
    """Raise ConfigError if a module of an optional part is not installed."""
    if any(importlib.util.find_spec(name) is None for name in modules):
        raise ConfigError(f'This command needs an extra. Install it: pip install "osd-hf[{extra}]"')


def lora_config(rank: int | None) -> Any:
    """Return the PEFT configuration of adapters of this rank on all linear layers, or `None` without a rank."""
    from peft import LoraConfig

    return None if rank is None else LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def open_recorded(folder: str | Path) -> CorrectionStore:
    """Open a store of captured requests; raises StoreError if there is none."""
    if not Path(folder).is_dir():
        raise StoreError(f"There is no store at {folder}. `osd-hf run --store DIR` writes one.")
    return CorrectionStore(folder)


def read_key(path: Path) -> str:
    """Return the key in a file; raises ConfigError."""
    try:
        return path.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"The key cannot be read from {path}: {reason}.") from None


@contextlib.contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Provide an event that the first SIGINT or SIGTERM sets. A second SIGINT interrupts."""
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
