"""Collecting from a serving engine: what it answers, asked or read from its log, ends as traces in a store."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from osd_hf.completion_client import CompletionClient, RequestRefusedError
from osd_hf.completions import ResponseReader, unwrapped
from osd_hf.errors import DataError, ServerError
from osd_hf.masking import without_credentials
from osd_hf.prompts import Prompt
from osd_hf.records import Trace
from osd_hf.request_log import LogReader
from osd_hf.store import CorrectionStore

__all__ = ["CollectionReport", "collect", "collect_log"]

MOST_FAILURES = 8  # requests in a row that may fail before it is for a reason of all
STOP_SECONDS = 0.2  # within which a collection heeds who stops it
MOST_REASONS = 256  # counted apart, as servers may say something else each time
GRACE_SECONDS = 5.0  # for requests under way when a collection ends early


@dataclass
class CollectionReport:
    """
    What came of a collection.

    Args:
        requests (`int`), tokens (`int`):
            Traces kept, and their emitted tokens.
        skipped (`Counter[str]`):
            What was left out, by reason; reasons that differ in numbers alone are one, as it was said first.
        unanswered (`int`):
            Prompts that had no answer when the collection ended.
        seconds (`float`):
            From the first to the last.
    """

    requests: int = 0
    tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    seconds: float = 0.0
    _reasons: dict[str, str] = field(default_factory=dict, repr=False)

    def keep(
        self, store: CorrectionStore, traces: Sequence[Trace], on_request: Callable[[Trace], object] | None
    ) -> None:
        """Append traces, count them, and tell of each."""
        for trace in traces:
            store.append(trace)
            self.requests += 1
            self.tokens += len(trace)
            if on_request is not None:
                on_request(trace)

    def skip(self, reason: str) -> None:
        """Count what is left out."""
        reason = without_credentials(reason)
        kind = re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", reason)
        if kind not in self._reasons and len(self._reasons) >= MOST_REASONS:
            kind = reason = "other reasons"
        self.skipped[self._reasons.setdefault(kind, reason)] += 1


def collect(
    prompts: Sequence[tuple[Prompt, list[int]]],
    client: CompletionClient,
    reader: ResponseReader,
    store: CorrectionStore,
    *,
    max_new_tokens: int,
    concurrency: int = 4,
    report: CollectionReport | None = None,
    on_request: Callable[[Trace], object] | None = None,
    stop: threading.Event | None = None,
    **settings: Any,
) -> CollectionReport:
    """
    Send prompts to a server and keep the answers. A prompt that is refused, or has an answer that cannot be learned
    from, is left out and counted; where eight in a row are, or all, the collection ends with the reason.

    Args:
        prompts (`Sequence[tuple[Prompt, list[int]]]`):
            With their token ids.
        client (`CompletionClient`), reader (`ResponseReader`), store (`CorrectionStore`):
            Who is asked, how answers are read, where they go.
        max_new_tokens (`int`):
            Bound of an answer.
        concurrency (`int`, *optional*, defaults to 4):
            Requests at once.
        report (`CollectionReport`, *optional*):
            Counts, seen by the caller when an error ends the collection.
        on_request (`Callable[[Trace], object]`, *optional*):
            Called for each one kept.
        stop (`threading.Event`, *optional*):
            Ends the collection when it is set; answers that come within seconds are kept.
        settings (`Any`):
            As of [`~CompletionClient.complete`].

    Raises:
        ServerError: the server went away, or refused. What was answered is in the store.
        DataError: answers without token ids or log-probs.
        StoreError: the store cannot be written.
    """
    report = report or CollectionReport()
    work, asked = _Collection(reader, store, report, on_request), 0
    started, waiting = time.perf_counter(), iter(prompts)

    def ask(ids: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        return client.complete(ids, max_new_tokens=max_new_tokens, num_logprobs=reader.num_logprobs, **settings)

    try:
        try:
            while not (stop is not None and stop.is_set()):
                while len(work.answers) < concurrency and (following := next(waiting, None)) is not None:
                    work.answers[_begun(ask, following[1])] = following[0]
                    asked += 1
                if not work.answers:
                    break
                work.keep_done(wait(work.answers, timeout=STOP_SECONDS, return_when=FIRST_COMPLETED).done)
        finally:  # of requests under way, those that are answered soon
            wait(work.answers, timeout=GRACE_SECONDS)
            work.keep_done([future for future in work.answers if future.done()], is_over=True)
            report.unanswered += len(prompts) - asked + len(work.answers)
        if work.failure is not None and not report.requests:
            raise work.failure
    finally:
        report.seconds += time.perf_counter() - started
        store.flush()
    return report


def _begun(call: Callable[[list[int]], Any], ids: list[int]) -> Future[Any]:
    """A call by a thread that does not hold up the end of the program, as those of an executor do."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(ids))
        except BaseException as error:  # noqa: BLE001  # whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, name="osd_hf-collect", daemon=True).start()
    return future


@dataclass
class _Collection:
    """Requests under way, and what becomes of their answers."""

    reader: ResponseReader
    store: CorrectionStore
    report: CollectionReport
    on_request: Callable[[Trace], object] | None
    answers: dict[Future[Any], Prompt] = field(default_factory=dict)
    failures: int = 0  # in a row
    failure: ServerError | DataError | None = None

    def keep_done(self, done: Iterable[Future[Any]], *, is_over: bool = False) -> None:
        """Keep what was answered; raises what ends the collection behind it, unless it is over anyway."""
        fatal: ServerError | DataError | None = None
        for future in list(done):
            prompt = self.answers.pop(future)
            try:
                request, response = future.result()
                traces = self.reader.traces(response, request, domain=prompt.domain)
            except (RequestRefusedError, DataError) as error:
                self.failure, self.failures = error, self.failures + 1
                self.report.skip(str(error))
                if self.failures >= MOST_FAILURES:
                    fatal = error
                continue
            except ServerError as error:
                fatal = error
                self.report.unanswered += 1
                continue
            self.failures = 0
            self.report.keep(self.store, traces, self.on_request)
        if fatal is not None and not is_over:
            raise fatal


def collect_log(
    log: LogReader,
    reader: ResponseReader,
    store: CorrectionStore,
    *,
    domain: str | None = None,
    report: CollectionReport | None = None,
    on_request: Callable[[Trace], object] | None = None,
    stop: threading.Event | None = None,
) -> CollectionReport:
    """
    Keep the answers that a log has gained. Lines that hold none, or cannot be learned from, are counted by reason.

    Args:
        log (`LogReader`):
            What is read; each line as of [`~osd_hf.completions.unwrapped`].
        reader (`ResponseReader`), store (`CorrectionStore`), report (`CollectionReport`, *optional*), `on_request`,
        `stop`:
            As of [`collect`].
        domain (`str`, *optional*):
            Label of all.

    Raises:
        StoreError: the store cannot be written; the lines since the last flush are read again the next time.
    """
    report = report or CollectionReport()
    started, kept, too_long = time.perf_counter(), 0, log.too_long
    try:
        for line in log.lines():
            traces = _traces_of(line, reader, domain, report) if line.strip() else []
            report.keep(store, traces, on_request)
            kept += len(traces)
            log.accept()
            if kept >= store.flush_every:
                store.flush()
                log.commit()
                kept = 0
            if stop is not None and stop.is_set():
                break
    finally:
        report.seconds += time.perf_counter() - started
        for _ in range(log.too_long - too_long):
            report.skip("a line is too long")
        store.flush()
        log.commit()
    return report


def _traces_of(line: bytes, reader: ResponseReader, domain: str | None, report: CollectionReport) -> list[Trace]:
    """The answers of a line of a log; a line without any is counted."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        report.skip("a line is cut off, or no JSON")
        return []
    try:
        if not isinstance(parsed, dict):
            raise DataError("a line is no JSON object")
        request, response = unwrapped(parsed)
        return reader.traces(response, request, domain=domain)
    except DataError as error:
        report.skip(str(error))
        return []
