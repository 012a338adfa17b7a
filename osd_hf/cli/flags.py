"""Settings that several commands share, what is read and reported by them, and how a long command stops."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import random
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from osd_hf.bundled import DOMAINS, bundled_prompts, load_bundled
from osd_hf.cli.arguments import flag, in_groups, option, part
from osd_hf.config import OnlineConfig
from osd_hf.engines.completions import CompletionClient, ResponseReader, environment_key, parse_address
from osd_hf.errors import ConfigError, StoreError
from osd_hf.hub.cards import EvaluationSet, hub_id
from osd_hf.models import Quantization, eos_ids, load_config, load_eos_ids
from osd_hf.prompts import EncodedPrompts, Prompt, PromptSource, encode_prompts, read_prompts
from osd_hf.store.store import CorrectionStore
from osd_hf.utils.report import json_text, write_report

BUNDLED_REQUESTS = 200
THREADS = "threads of torch; by default OMP_NUM_THREADS, or one, unless all cores are clearly faster"

CHAT_TEMPLATE = "put prompts into the tokenizer's chat template, where it has one; plain text otherwise"
CHAT_TEMPLATE_KWARGS = "settings that the chat template reads, such as '{\"enable_thinking\": false}'"

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


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

    def changed(self, *names: str) -> list[str]:
        """The flags, among these fields, that have not their defaults."""
        known = {f.name: f.default for f in fields(self)}
        return [option(name) for name in names if name in known and getattr(self, name) != known[name]]

    def check_together(self, one: str, other: str) -> None:
        """Raises ConfigError where one of two flags is given alone."""
        if bool(getattr(self, one)) != bool(getattr(self, other)):
            raise ConfigError(f"--{one} and --{other} go together: name both, or neither for the bundled pair.")


@dataclass(frozen=True, kw_only=True)
class Reporting(Settings):
    """Settings of a command that can report to machines as well; raises ConfigError where the report could not be
    written at the end of a long command."""

    json: str | None = flag("also write the report there, for machines; - is the standard output", metavar="PATH")

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
class RemoteCode(Settings):
    """Whose code may run. What says which version of a model is meant is found where a command has it."""

    trust_remote_code: bool = _models(
        "run code that lies beside the weights, of models that transformers lacks", False
    )

    @property
    def fetching(self) -> dict[str, Any]:
        """Arguments of [`~osd_hf.models.load_config`] and [`~osd_hf.models.load_tokenizer`] for the target."""
        return self._fetching("revision")

    @property
    def draft_fetching(self) -> dict[str, Any]:
        """The same for the draft."""
        return self._fetching("draft_revision")

    def _fetching(self, name: str) -> dict[str, Any]:
        version = getattr(self, name, None)
        return {"trust_remote_code": self.trust_remote_code} | ({} if version is None else {"revision": version})


@dataclass(frozen=True, kw_only=True)
class TargetRevision(RemoteCode):
    """Which target of the Hub is meant."""

    revision: str | None = _models("branch, tag or commit of the target on the Hub", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class DraftRevision(RemoteCode):
    """Which draft of the Hub is meant."""

    draft_revision: str | None = _models("branch, tag or commit of the draft on the Hub", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class Loading(RemoteCode):
    """How and where models that are named are loaded."""

    dtype: Dtype = _models(
        "dtype of the weights: auto is each checkpoint's own; only float32 is exact to the token", "auto"
    )
    device: str | None = _models("where models run, such as cpu or cuda:0; by default CUDA where there is one, and "
                                 "the CPU for the bundled pair")  # fmt: skip
    attn_implementation: str | None = _models("attention kernels, such as sdpa, eager or flash_attention_2; "
                                              "transformers' choice by default", metavar="NAME")  # fmt: skip

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of [`~osd_hf.models.load_pair`]."""
        names = ("device_map", "quantization", "revision", "draft_revision")
        return self._placing | {name: getattr(self, name, None) for name in names}

    @property
    def target_loading(self) -> dict[str, Any]:
        """Arguments of [`~osd_hf.models.load_model`] for the target."""
        names = ("device_map", "quantization")
        return self._placing | self.fetching | {name: getattr(self, name, None) for name in names}

    @property
    def draft_loading(self) -> dict[str, Any]:
        """The same for the draft."""
        return self._placing | self.draft_fetching

    @property
    def _placing(self) -> dict[str, Any]:
        names = ("dtype", "device", "attn_implementation", "trust_remote_code")
        return {name: getattr(self, name) for name in names}

    def check_one_place(self) -> None:
        """Raises ConfigError where a command that loads one kind of model is told two places for it."""
        if getattr(self, "device_map", None) is not None and self.device is not None:
            raise ConfigError("--device-map takes the place of --device: give one of them.")


@dataclass(frozen=True, kw_only=True)
class TargetLoading(Loading, TargetRevision):
    """How a target that is named is loaded, and its draft."""

    device_map: str | None = _models("where the parts of the target go, such as auto, which spreads it over all "
                                     "devices; --device is the draft's then", metavar="MAP")  # fmt: skip
    quantization: Quantization | None = _models("how the target's weights are quantized: 4bit and 8bit need "
                                                "bitsandbytes, int8 needs torchao")  # fmt: skip


SERVER = "from a server"
(_server,) = in_groups(SERVER)


@dataclass(frozen=True, kw_only=True)
class Server(Settings):
    """How a serving engine is asked."""

    url: str | None = _server("address of an OpenAI-compatible server, such as http://localhost:8000")
    model: str | None = _server("name of the model that it serves; its only one by default", metavar="NAME")
    api_key: str | None = _server("key of the server; other users of this machine can see it, so the next two are "
                                  "better; by default the environment's OSD_HF_API_KEY, or its OPENAI_API_KEY where "
                                  "the URL is OpenAI's or that of OPENAI_BASE_URL", rivals="key")  # fmt: skip
    api_key_file: Path | None = _server("file that holds the key", rivals="key", metavar="FILE")
    api_key_env: str | None = _server("variable of the environment that holds the key", rivals="key", metavar="NAME")
    allow_plain_http: bool = _server("send a key to another machine over plain HTTP, too", False)
    concurrency: int = _server("requests at once", 4, metavar="N")
    patience_seconds: float = _server("how many seconds to try a server that is away or too busy", 30.0, metavar="S")

    def key(self) -> str | None:
        """What is sent to the server; raises ConfigError where it is not there."""
        if self.api_key_file is not None:
            try:
                key = self.api_key_file.expanduser().read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "it is no text"
                raise ConfigError(f"The key cannot be read from {self.api_key_file}: {why}.") from None
            if not key:
                raise ConfigError(f"The file {self.api_key_file} holds no key.")
            return key
        if self.api_key_env is not None:
            if not os.environ.get(self.api_key_env):
                raise ConfigError(f"--api-key-env names {self.api_key_env}, which is not set in the environment.")
            return os.environ[self.api_key_env]
        address, user, password = parse_address(str(self.url))
        if self.api_key or user or password:
            return self.api_key or None
        found = os.environ.get("OSD_HF_API_KEY") or environment_key(str(self.url))
        if found is None and os.environ.get("OPENAI_API_KEY"):
            print(
                f"osd-hf: OPENAI_API_KEY is not sent to {address.host}, which it may not belong to; if it does: "
                "--api-key-env OPENAI_API_KEY",
                file=sys.stderr,
            )
        return found

    def client(self, key: str | None) -> CompletionClient:
        """What asks the server with this key; raises as [`CompletionClient`] does."""
        return CompletionClient(
            str(self.url), self.model, api_key=key, allow_plain_http=self.allow_plain_http,
            patience_seconds=self.patience_seconds,
        )  # fmt: skip


# Settings of [`OnlineConfig`] that change nothing in a command, and why.
NOTHING_DRAFTED = dict.fromkeys(
    ("candidates", "text_scope", "compile_draft", "compile_target"),
    "requests that were answered before are scored here, and nothing is drafted",
)
OF_AUTO = (
    "candidates",
    "text_scope",
)  # read where k is chosen by acceptance


def learning(*, k: str | None = None, **without: str) -> Any:
    """The field of a command for how a draft learns, but for the settings `without` a meaning there, each with the
    reason; and with what the help says of k where it is fixed unless told otherwise, as it is for what is compared."""
    fixed: dict[str, Any] = {} if k is None else {"num_assistant_tokens": 5}
    return part(group="learning", metavar="X", without=without, helps={} if k is None else {"num_assistant_tokens": k},
                **fixed)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Learning(Settings):
    """How a draft learns."""

    paper: bool = _learning("learn by the rule of arXiv 2310.07177, which other flags change", False)
    config: OnlineConfig = learning()

    def fixed_k(self, *, takes_auto: bool = False) -> int:
        """Tokens drafted per round in what is compared; raises ConfigError where the configuration leaves it open."""
        k = self.config.num_assistant_tokens
        if k is None or (k == "auto" and not takes_auto):
            shown = "none" if k is None else k
            raise ConfigError(f"--num-assistant-tokens must not be {shown}: what is compared needs one k throughout.")
        return self.config.compared_k or 0

    def check_changed(self, names: Iterable[str], why: str) -> None:
        """Raises ConfigError where one of these settings of the configuration has not its default, and why it
        cannot."""
        plain = OnlineConfig()
        changed = [option(name) for name in names if getattr(self.config, name) != getattr(plain, name)]
        if changed:
            raise ConfigError(f"{' and '.join(changed)} would change nothing: {why}.")

    def check_auto(self) -> None:
        """Raises ConfigError for flags that a fixed k leaves without a meaning."""
        if self.config.num_assistant_tokens != "auto":
            self.check_changed(OF_AUTO, "they are for --num-assistant-tokens auto")


@dataclass(frozen=True, kw_only=True)
class Rows(Settings):
    """How a row of a file or data set becomes a prompt."""

    split: str = _prompts("part of a data set", "train")
    subset: str | None = _prompts("configuration of a data set", metavar="NAME")
    column: str | None = _prompts("column of the prompt, a user's turn")
    prompt_template: str | None = _prompts("format string in place of a column, such as 'db: {db_id}\\n{question}'",
                                           metavar="FORMAT")  # fmt: skip

    def source(self, location: str, *, default_column: str | None = None, **more: Any) -> PromptSource:
        """Prompts of a file or data set; `more` goes before the flags. Raises ConfigError."""
        if Path(location).is_file() and (given := self.changed("subset", *({"split"} - more.keys()))):
            raise ConfigError(f"{' and '.join(given)}: {location} is a file, which has neither.")
        column = self.column or (None if self.prompt_template else default_column)
        kept = {"column": column, "template": self.prompt_template, "split": self.split, "subset": self.subset}
        return PromptSource(location, **{**kept, **more})

    def check_rows(self, *more: str) -> None:
        """Raises ConfigError for flags that say how prompts are read, where none are named."""
        if given := self.changed("split", "subset", "column", "prompt_template", "domain_column", *more):
            raise ConfigError(f"{' and '.join(given)} would change nothing without --prompts.")


@dataclass(frozen=True, kw_only=True)
class Evaluated(Rows):
    """Prompts that drafts are judged by."""

    prompts: str | None = _prompts("Hub data set id, or a json, jsonl or parquet file; generated ones by default",
                                   metavar="ID|FILE")  # fmt: skip
    split: str = _prompts("part of a data set", "test")
    column: str | None = _prompts("column of the prompt, a user's turn; prompt by default")
    domain_column: str | None = _prompts("column of the label", metavar="COLUMN")
    num_requests: int = _prompts("prompts that drafts are judged by, the first ones", 64, metavar="N")
    max_new_tokens: int = _prompts("most tokens of an answer", 96, metavar="N")

    def evaluation_set(self) -> EvaluationSet:
        """What drafts are judged by; raises DataError where it cannot be read."""
        if self.prompts is None:
            self.check_rows()
            return EvaluationSet.bundled(self.num_requests, max_new_tokens=self.max_new_tokens)
        source = self.source(self.prompts, default_column="prompt", domain_column=self.domain_column)
        prompts = tuple(itertools.islice(read_prompts(source), self.num_requests))
        dataset_id = hub_id(self.prompts)
        subset = "" if self.subset is None else f", {self.subset}"
        split = f", {self.split}" if dataset_id else ""
        name = f"{dataset_id or Path(self.prompts).name}{subset}{split}"
        return EvaluationSet(name, prompts, self.max_new_tokens, dataset_id)


@dataclass(frozen=True, kw_only=True)
class Prompts(Rows):
    """Prompts that are served: those of the bundled domains where no others are named."""

    prompts: str | None = _prompts("Hub id or folder of a data set, or a json, jsonl or parquet file",
                                   metavar="ID|FILE")  # fmt: skip
    chat_template: bool = _prompts(CHAT_TEMPLATE, True)
    chat_template_kwargs: dict[str, Any] | None = _prompts(CHAT_TEMPLATE_KWARGS, metavar="JSON")
    domain: list[str] | None = _prompts("label of all prompts; of bundled ones, domains to serve (repeat for several)",
                                        metavar="NAME")  # fmt: skip
    domain_column: str | None = _prompts("column of each prompt's label", metavar="COLUMN")
    num_requests: int | None = _prompts(
        f"first N prompts; by default all, or {BUNDLED_REQUESTS} bundled ones", metavar="N"
    )

    def encode_prompts(self, tokenizer: Any, room: int | None, *, limit: int | None, seed: int = 0) -> EncodedPrompts:
        """Return the prompts of at most `room` tokens, encoded; the log lists those that are left out. Raises as
        [`~osd_hf.prompts.encode_prompts`] does."""
        return encode_prompts(
            self.read_prompts(seed), tokenizer, limit=limit, max_prompt_tokens=room, chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )  # fmt: skip

    def read_prompts(self, seed: int) -> Iterator[Prompt]:
        """The prompts in their order, mixed by the seed where they are bundled; raises ConfigError and DataError."""
        if self.prompts is not None:
            if self.domain is not None and len(self.domain) > 1:
                raise ConfigError("--domain can be given several times only for bundled prompts; see --domain-column.")
            label = self.domain[0] if self.domain else None
            return read_prompts(self.source(self.prompts, domain=label, domain_column=self.domain_column))
        self.check_rows()
        if unknown := set(self.domain or ()) - set(DOMAINS):
            raise ConfigError(f"--domain must be one of {', '.join(DOMAINS)}, got {', '.join(sorted(unknown))}.")
        count, domains = self.num_requests or BUNDLED_REQUESTS, self.domain or DOMAINS
        share = -(-count // len(domains))
        mixed = [(d, e.prompt) for d in domains for e in bundled_prompts(d, share, seed=seed)]
        random.Random(seed).shuffle(mixed)
        return (Prompt(i, text, domain) for i, (domain, text) in enumerate(mixed[:count]))


def shown_name(source: str) -> str:
    """What a report calls a model that is named so: nobody else knows the folders of this machine."""
    return Path(source).name if Path(source).is_absolute() else source


def adapters(rank: int | None) -> Any:
    """A configuration of PEFT for adapters of this rank on all linear layers; `None` without one."""
    from peft import LoraConfig

    return None if rank is None else LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def recorded(folder: str) -> CorrectionStore:
    """A store of captured requests; raises StoreError where there is none."""
    if not Path(folder).is_dir():
        raise StoreError(f"There is no store at {folder}. `osd-hf run --store DIR` writes one.")
    return CorrectionStore(folder)


_store = functools.partial(flag, group="store")


@dataclass(frozen=True, kw_only=True)
class Collecting(TargetRevision, Reporting):
    """Settings of a command that keeps what an engine answers."""

    store: Path = flag("where the requests are kept", required=True, metavar="DIR")
    target: str | None = flag("model that the server serves, for its tokenizer and vocabulary (no weights are "
                              "loaded); the bundled one by default", metavar="ID|PATH")  # fmt: skip
    target_version: str | None = flag("name of the weights that answer, where the model's name in the responses, the "
                                      "default, stays while they change", metavar="NAME")  # fmt: skip
    num_logprobs: int = flag("log-probs kept per position", 64, metavar="K")
    flush_every: int = _store("most requests of a file", 16, metavar="N")
    max_bytes: int | None = _store("most bytes that are kept; the oldest requests go", metavar="N")
    max_age_days: float | None = _store("days after which requests go", metavar="DAYS")

    def check_collecting(self) -> None:
        """Raises ConfigError for what is too small, and for what does not go together."""
        self.check_counts("num_logprobs", "flush_every", "max_bytes")
        if self.target is None and (given := self.changed("revision", "trust_remote_code")):
            raise ConfigError(f"{given[0]} is for --target; the bundled one is as it is.")

    def read_target(self) -> tuple[Any, ResponseReader]:
        """Configuration of the target, and what reads its answers."""
        if self.target:
            config, ends = load_config(self.target, **self.fetching), load_eos_ids(self.target, **self.fetching)
        else:
            target = load_bundled()[0]
            config, ends = target.config, eos_ids(target.generation_config)
        size = int(config.get_text_config().vocab_size)
        return config, ResponseReader(size, min(self.num_logprobs, size), ends, self.target_version)

    def open_store(self) -> CorrectionStore:
        """The store; raises StoreError."""
        return CorrectionStore(
            self.store.expanduser(), max_bytes=self.max_bytes, flush_every=self.flush_every,
            max_age_seconds=None if self.max_age_days is None else self.max_age_days * 86400,
        )  # fmt: skip


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
