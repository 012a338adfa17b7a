"""The command `osd-hf collect`: what an engine answers, kept for a draft to learn from."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from osd_hf.bundled import load_bundled
from osd_hf.cli import FAILED, INTERRUPTED
from osd_hf.cli.arguments import in_groups, option
from osd_hf.cli.flags import SERVER, Collecting, Prompts, Server, stopping
from osd_hf.engines.collect import CollectionReport, LogReader, collect, collect_log
from osd_hf.engines.completions import ResponseReader
from osd_hf.errors import ConfigError, DataError, ServerError, StoreError
from osd_hf.models import load_tokenizer, prompt_room
from osd_hf.prompts import EncodedPrompts
from osd_hf.store.store import CorrectionStore
from osd_hf.utils.report import provenance

LOG = "from a request log"

_answers, _log = in_groups("answers", LOG)


@dataclass(frozen=True, kw_only=True)
class CollectSettings(Server, Prompts, Collecting):
    """The flags of `osd-hf collect`."""

    max_new_tokens: int = _answers("most tokens of an answer", 128, metavar="N")
    temperature: float = _answers("temperature of sampling; 0 is greedy", 0.0, metavar="X")
    top_p: float | None = _answers("share of the probability that is sampled from, with a --temperature", metavar="X")
    top_k: int | None = _answers("likeliest tokens that are sampled from, with a --temperature", metavar="N")
    seed: int | None = _answers("seed of sampling, sent with each request", metavar="N")
    resume: bool = _answers("go on where a collection ended: leave out prompts that the store has already", False)
    log: Path | None = _log("file of JSON lines, each a response, {request, response}, or of an OpenAI batch output; "
                            "lines read before into this store are left out", metavar="FILE")  # fmt: skip
    follow: bool = _log("wait for more lines, until interrupted", False)
    poll_seconds: float = _log("seconds between two looks at it, with --follow", 5.0, metavar="S")

    def check(self) -> None:
        """Raises ConfigError for what is too small, and for what does not go together."""
        if (self.url is None) == (self.log is None):
            raise ConfigError("One of --url and --log says where requests come from.")
        if self.log is not None:
            of_server = [f for f in fields(self) if f.metadata["group"] in (SERVER, "prompts", "answers")]
            asked = [f.name for f in of_server if f.name != "domain" and getattr(self, f.name) != f.default]
            if asked:
                raise ConfigError(f"{' and '.join(map(option, asked))} are for --url; a log has its own.")
            if self.domain is not None and len(self.domain) > 1:
                raise ConfigError("A log has one label: give --domain once.")
        if self.follow and self.log is None:
            raise ConfigError("--follow is for --log.")
        self.check_collecting()
        self.check_counts("concurrency", "max_new_tokens", "num_requests")
        self.check_not_negative("patience_seconds", "poll_seconds", "temperature")
        if self.changed("poll_seconds") and not self.follow:
            raise ConfigError("--poll-seconds is for --follow.")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise ConfigError("--top-p and --top-k need a --temperature.")
        if self.url is not None:
            self.check_together("target", "prompts")


def collect_command(settings: CollectSettings) -> int:
    """Collect until all is there; returns the exit code."""
    settings.check()
    key = None if settings.url is None else settings.key()
    settings = replace(settings, store=settings.store.expanduser())
    config, reader = settings.read_target()
    encoded = None if settings.url is None else _encoded(settings, config)
    store = settings.open_store()
    log = None
    if settings.log is not None:
        log = LogReader(settings.log, LogReader.position_in(settings.store, settings.log))
    report = CollectionReport()
    failed: StoreError | ServerError | DataError | None = None
    try:
        with store:
            if encoded is not None:
                _from_server(settings, key, encoded, reader, store, report)
            if log is not None:
                _from_log(settings, log, reader, store, report)
    except (StoreError, ServerError, DataError) as error:  # what was collected is reported all the same
        failed = error
    _report(settings, report, store.written_nbytes)
    if failed is not None:
        print(f"osd-hf: error: {failed}", file=sys.stderr)
    elif report.unanswered:
        print(f"osd-hf: interrupted: go on with --resume, {report.unanswered} prompts are left", file=sys.stderr)
        return INTERRUPTED
    return FAILED if failed is not None or (report.skipped and not report.requests) else 0


def _report(settings: CollectSettings, report: CollectionReport, written: int) -> None:
    per_token = written / report.tokens if report.tokens else None
    shown = "" if per_token is None else f" ({per_token:.1f} a token)"
    settings.say(
        f"{report.requests} requests with {report.tokens} tokens in {settings.store}, {written:,} bytes written{shown}"
        f", {report.seconds:.1f} s"
    )
    for reason, count in report.skipped.most_common():
        settings.say(f"left out {count}: {reason}")
    settings.write_json({
        "provenance": provenance(), "requests": report.requests, "tokens": report.tokens, "bytes": written,
        "bytes_per_token": per_token, "seconds": report.seconds, "skipped": dict(report.skipped),
    })  # fmt: skip


def _encoded(settings: CollectSettings, config: Any) -> EncodedPrompts:
    tokenizer = load_tokenizer(settings.target, **settings.fetching) if settings.target else load_bundled()[2]
    room = prompt_room(config, config, settings.max_new_tokens)
    encoded = settings.encode_prompts(tokenizer, room, limit=settings.num_requests, seed=settings.seed or 0)
    if not settings.resume or not settings.store.exists():
        return encoded
    known = {trace.prompt_ids.tobytes() for trace in CorrectionStore(settings.store)}
    rest = [(p, ids) for p, ids in encoded.prompts if np.array(ids, np.int32).tobytes() not in known]
    return replace(encoded, prompts=tuple(rest))


def _from_server(
    settings: CollectSettings, key: str | None, encoded: EncodedPrompts, reader: ResponseReader,
    store: CorrectionStore, report: CollectionReport,
) -> None:  # fmt: skip
    given = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "seed")}
    sampling = {name: value for name, value in given.items() if value is not None}
    bar = tqdm(total=len(encoded.prompts), desc="collecting", unit="request", dynamic_ncols=True)
    with settings.client(key) as client, stopping() as stop, bar:
        collect(
            encoded.prompts, client, reader, store, max_new_tokens=settings.max_new_tokens, report=report, stop=stop,
            concurrency=settings.concurrency, on_request=lambda _: bar.update(), **sampling,
        )  # fmt: skip


def _from_log(
    settings: CollectSettings, log: LogReader, reader: ResponseReader, store: CorrectionStore, report: CollectionReport
) -> None:
    domain = settings.domain[0] if settings.domain else None
    with contextlib.closing(log), stopping() as stop, tqdm(desc="collecting", unit="request") as bar:
        while True:
            collect_log(log, reader, store, domain=domain, report=report, on_request=lambda _: bar.update(), stop=stop)
            if not settings.follow or stop.wait(settings.poll_seconds):
                break
        if log.has_rest:
            print("osd-hf: the last line has no end yet; it is read when it has one", file=sys.stderr)
