"""Collect a serving engine's answers into a store: settings of `osd-hf learn` and `osd-hf proxy`."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedConfig

from osd_hf.bundled import load_bundled
from osd_hf.cli import FAILED, INTERRUPTED
from osd_hf.cli.settings import PromptSettings, Reporting, Versions, flag, read_key, stop_on_signal
from osd_hf.engines.collect import CollectionReport, LogReader, collect, collect_log
from osd_hf.engines.completions import CompletionClient, ResponseReader, environment_key, parse_address
from osd_hf.errors import ConfigError, DataError, ServerError, StoreError
from osd_hf.models import eos_ids, load_config, load_eos_ids, load_tokenizer, prompt_room
from osd_hf.prompts import EncodedPrompts
from osd_hf.store.store import CorrectionStore
from osd_hf.utils.report import provenance


@dataclass(frozen=True, kw_only=True)
class StoreSettings(Versions, Reporting):
    """A store of an engine's answers, and the target that the engine serves."""

    _argument_group_name: ClassVar[str] = "store"

    target: str | None = flag("model that the engine serves, for its tokenizer and vocabulary; by default the bundled "
                              "one", None, metavar="ID|PATH")  # fmt: skip
    target_version: str | None = flag(
        "name of the target's weights; by default the model's name in the responses", None, metavar="NAME"
    )
    flush_every: int = flag("maximum requests per file of the store", 16, metavar="N")
    max_bytes: int | None = flag("maximum size of the store; the oldest requests are deleted", None, metavar="N")
    max_age_days: float | None = flag("days after which requests are deleted", None, metavar="DAYS")

    def check_store(self) -> None:
        """Raise ConfigError for values that are too small or do not go together."""
        self.check_counts("flush_every", "max_bytes")
        if self.target is None:
            self.check_unused("the bundled target is used", "revision", "trust_remote_code")

    def read_target(self, num_logprobs: int) -> tuple[PreTrainedConfig, ResponseReader]:
        """Return the target's configuration and the reader of its answers."""
        if self.target:
            config, ends = load_config(self.target, **self.fetching), load_eos_ids(self.target, **self.fetching)
        else:
            target = load_bundled()[0]
            config, ends = target.config, eos_ids(target.generation_config)
        size = int(config.get_text_config().vocab_size)
        return config, ResponseReader(size, min(num_logprobs, size), ends, self.target_version)

    def open_store(self, folder: Path) -> CorrectionStore:
        """Open the store for writing; raises StoreError."""
        return CorrectionStore(
            folder, max_bytes=self.max_bytes, flush_every=self.flush_every,
            max_age_seconds=None if self.max_age_days is None else self.max_age_days * 86400,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CollectSettings(PromptSettings):
    """How to collect answers before learning: by asking an engine, or from a request log."""

    _argument_group_name: ClassVar[str] = "collection"

    url: str | None = flag(
        "first ask this OpenAI-compatible server, such as http://localhost:8000, and store its answers", None
    )
    log: Path | None = flag(
        "first store the answers of a log: JSON lines of responses or {request, response}", None, metavar="FILE"
    )
    collect_only: bool = flag("end when the answers are stored", False)
    follow: bool = flag("wait for more lines of the log until interrupted, with --collect-only", False)
    model: str | None = flag("name of the served model; by default the only one", None, metavar="NAME")
    api_key: str | None = flag("key of the server; other users of this machine can see it", None)
    api_key_file: Path | None = flag("file with the key", None, metavar="FILE")
    api_key_env: str | None = flag(
        "environment variable with the key; by default OSD_HF_API_KEY", None, metavar="NAME"
    )
    allow_plain_http: bool = flag("send a key to another machine over plain HTTP", False)
    concurrency: int = flag("requests at once", 4, metavar="N")
    patience_seconds: float = flag("seconds to retry a server that is away or too busy", 30.0, metavar="S")
    max_new_tokens: int = flag("maximum tokens of an answer", 128, metavar="N")
    temperature: float = flag("temperature of sampling; 0 = greedy", 0.0, metavar="X")
    top_p: float | None = flag("probability mass to sample from, with --temperature", None, metavar="X")
    top_k: int | None = flag("number of tokens to sample from, with --temperature", None, metavar="N")
    resume: bool = flag("leave out prompts whose answers are stored already", False)

    def check(self) -> None:
        """Raise ConfigError for values that are too small or do not go together."""
        self.check_exclusive("url", "log")
        self.check_exclusive("api_key", "api_key_file", "api_key_env")
        shared = {"url", "log", "domain", "num_requests"}
        of_server = {f.name for f in fields(self)} - shared - {"collect_only", "follow"}
        if self.url is None:
            reason = "only --url and --log collect" if self.log is None else "a log has its own requests"
            self.check_unused(reason, *sorted(of_server))
        if self.log is None:
            self.check_unused("it is for --log", "follow")
            if self.url is None:
                self.check_unused("only --url and --log collect", "collect_only")
        elif self.num_requests is not None and self.collect_only:
            raise ConfigError("--num-requests would change nothing: a log is read to its end.")
        if self.follow and not self.collect_only:
            raise ConfigError("--follow needs --collect-only: learn from the store by a second command.")
        if self.url is None and len(self.domain or ()) > 1:
            raise ConfigError("Give --domain once.")
        self.check_counts("concurrency", "max_new_tokens", "num_requests")
        self.check_not_negative("patience_seconds", "temperature")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise ConfigError("--top-p and --top-k need a --temperature.")

    def key(self) -> str | None:
        """Return the key that is sent to the server; raises ConfigError if it is missing."""
        if self.api_key_file is not None:
            if key := read_key(self.api_key_file):
                return key
            raise ConfigError(f"The file {self.api_key_file} holds no key.")
        if self.api_key_env is not None:
            if os.environ.get(self.api_key_env):
                return os.environ[self.api_key_env]
            raise ConfigError(f"--api-key-env names {self.api_key_env}, which is not set in the environment.")
        address, user, password = parse_address(str(self.url))
        if self.api_key or user or password:
            return self.api_key or None
        found = os.environ.get("OSD_HF_API_KEY") or environment_key(str(self.url))
        if found is None and os.environ.get("OPENAI_API_KEY"):
            print(
                f"osd-hf: OPENAI_API_KEY is not sent to {address.host}, which may be another server's; to send it: "
                "--api-key-env OPENAI_API_KEY",
                file=sys.stderr,
            )
        return found

    def client(self, key: str | None) -> CompletionClient:
        """Connect to the server; raises as [`CompletionClient`] does."""
        return CompletionClient(
            str(self.url), self.model, api_key=key, allow_plain_http=self.allow_plain_http,
            patience_seconds=self.patience_seconds,
        )  # fmt: skip


def run_collection(
    settings: CollectSettings, kept: StoreSettings, folder: Path, *, num_logprobs: int, seed: int, poll_seconds: float
) -> int:
    """
    Collect into a store until everything is there, and report.

    Args:
        settings (`CollectSettings`), kept (`StoreSettings`): What to collect, and how to store it.
        folder (`Path`): The store.
        num_logprobs (`int`), seed (`int`): Log-probs per position; seed of sampling.
        poll_seconds (`float`): Seconds between two looks at a log.

    Returns:
        `int`: The exit code.
    """
    key = None if settings.url is None else settings.key()
    config, reader = kept.read_target(num_logprobs)
    encoded = None if settings.url is None else _encode(settings, kept, folder, config, seed)
    store, report = kept.open_store(folder), CollectionReport()
    log = None if settings.log is None else LogReader(settings.log, LogReader.position_in(folder, settings.log))
    failed: StoreError | ServerError | DataError | None = None
    try:
        with store:
            if encoded is not None:
                _collect_answers(settings, key, encoded, reader, store, report, seed)
            if log is not None:
                _collect_log(settings, log, reader, store, report, poll_seconds)
    except (StoreError, ServerError, DataError) as error:  # the report comes first
        failed = error
    _report(kept, report, folder, store.written_nbytes, writes_json=settings.collect_only)
    if failed is not None:
        print(f"osd-hf: error: {failed}", file=sys.stderr)
    elif report.unanswered:
        print(f"osd-hf: interrupted: go on with --resume, {report.unanswered} prompts are left", file=sys.stderr)
        return INTERRUPTED
    return FAILED if failed is not None or (report.skipped and not report.requests) else 0


def _report(kept: StoreSettings, report: CollectionReport, folder: Path, written: int, *, writes_json: bool) -> None:
    per_token = written / report.tokens if report.tokens else None
    shown = "" if per_token is None else f" ({per_token:.1f} per token)"
    kept.say(
        f"{report.requests} requests with {report.tokens} tokens in {folder}, {written:,} bytes written{shown}, "
        f"{report.seconds:.1f} s"
    )
    for reason, count in report.skipped.most_common():
        kept.say(f"left out {count}: {reason}")
    if writes_json:
        kept.write_json({
            "provenance": provenance(), "requests": report.requests, "tokens": report.tokens, "bytes": written,
            "bytes_per_token": per_token, "seconds": report.seconds, "skipped": dict(report.skipped),
        })  # fmt: skip


def _encode(
    settings: CollectSettings, kept: StoreSettings, folder: Path, config: PreTrainedConfig, seed: int
) -> EncodedPrompts:
    tokenizer = load_tokenizer(kept.target, **kept.fetching) if kept.target else load_bundled()[2]
    room = prompt_room(config, config, settings.max_new_tokens)
    encoded = settings.encode_prompts(tokenizer, room, limit=settings.num_requests, seed=seed)
    if not settings.resume or not folder.exists():
        return encoded
    known = {trace.prompt_ids.tobytes() for trace in CorrectionStore(folder)}
    rest = [(p, ids) for p, ids in encoded.prompts if np.array(ids, np.int32).tobytes() not in known]
    return replace(encoded, prompts=tuple(rest))


def _collect_answers(
    settings: CollectSettings, key: str | None, encoded: EncodedPrompts, reader: ResponseReader,
    store: CorrectionStore, report: CollectionReport, seed: int,
) -> None:  # fmt: skip
    given: dict[str, Any] = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k")}
    sampling = {name: value for name, value in given.items() if value is not None}
    if settings.temperature:
        sampling["seed"] = seed
    bar = tqdm(total=len(encoded.prompts), desc="collecting", unit="request", dynamic_ncols=True)
    with settings.client(key) as client, stop_on_signal() as stop, bar:
        collect(
            encoded.prompts, client, reader, store, max_new_tokens=settings.max_new_tokens, report=report, stop=stop,
            concurrency=settings.concurrency, on_request=lambda _: bar.update(), **sampling,
        )  # fmt: skip


def _collect_log(
    settings: CollectSettings, log: LogReader, reader: ResponseReader, store: CorrectionStore,
    report: CollectionReport, poll_seconds: float,
) -> None:  # fmt: skip
    domain = settings.domain[0] if settings.domain else None
    with contextlib.closing(log), stop_on_signal() as stop, tqdm(desc="collecting", unit="request") as bar:
        while True:
            collect_log(log, reader, store, domain=domain, report=report, on_request=lambda _: bar.update(), stop=stop)
            if not settings.follow or stop.wait(poll_seconds):
                break
        if log.has_rest:
            print("osd-hf: the last line is incomplete; it is read when it is whole", file=sys.stderr)
