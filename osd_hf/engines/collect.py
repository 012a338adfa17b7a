"""Collecting from a serving engine: what it answers, asked or read from its log, ends as traces in a store."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from osd_hf.engines.completions import CompletionClient, RequestRefusedError, ResponseReader, unwrapped
from osd_hf.errors import DataError, ServerError, without_credentials
from osd_hf.prompts import Prompt
from osd_hf.store.folder import store_errors
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace
from osd_hf.utils.disk import FileLock, hold_lock, write_whole

__all__ = ["CollectionReport", "LogReader", "collect", "collect_log"]

MOST_FAILURES = 8  # requests in a row that may fail before it is for a reason of all
MOST_REASONS = 256  # counted apart, as servers may say something else each time
STOP_SECONDS = 0.2  # within which a collection notices that it is told to stop
GRACE_SECONDS = 5.0  # for requests under way when a collection ends early
HEAD_BYTES = 1024  # of a log, by which it is known again
LOG_BYTES = 1 << 20  # read at once
LINE_BYTES = 1 << 27  # of one line: an answer of a hundred thousand tokens with twenty log-probs each

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class CollectionReport:
    """What came of a collection; prompts that had no answer when it ended are `unanswered`."""

    requests: int = 0  # traces kept
    tokens: int = 0  # that these emitted
    skipped: Counter[str] = field(default_factory=Counter)  # by reason, as it was said first
    unanswered: int = 0
    seconds: float = 0.0
    _reasons: dict[str, str] = field(default_factory=dict, repr=False)  # without numbers -> as it was said first

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


# --- from a server --------------------------------------------------------------------------------------------------


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
    Send prompts with their token ids to a server, `concurrency` at once, and keep the answers. A prompt that is
    refused, or has an answer that cannot be learned from, is left out and counted; where eight in a row are, or all,
    the collection ends with the reason.

    Args:
        report (`CollectionReport`, *optional*): Counts, seen by the caller when an error ends the collection.
        on_request (`Callable[[Trace], object]`, *optional*): Called for each trace kept.
        stop (`threading.Event`, *optional*):
            Ends the collection when it is set; answers that come within seconds are kept.
        max_new_tokens (`int`), settings (`Any`): Passed on to [`~CompletionClient.complete`].

    Raises:
        ServerError: the server went away, or refused. What was answered is in the store.
        DataError: answers without token ids or log-probs.
        StoreError: the store cannot be written.
    """
    report = report or CollectionReport()
    waiting, answers = deque(prompts), set[Future[list[Trace]]]()
    failures: list[RequestRefusedError | DataError] = []  # since the last answer that was kept
    started = time.perf_counter()

    def ask(prompt: Prompt, ids: list[int]) -> list[Trace]:
        request, response = client.complete(
            ids, max_new_tokens=max_new_tokens, num_logprobs=reader.num_logprobs, **settings
        )
        return reader.traces(response, request, domain=prompt.domain)

    def keep(done: set[Future[list[Trace]]]) -> ServerError | DataError | None:
        """Keep what was answered; returns what should end the collection."""
        fatal: ServerError | DataError | None = None
        for future in done:
            answers.remove(future)
            try:
                traces = future.result()
            except (RequestRefusedError, DataError) as error:
                report.skip(str(error))
                failures.append(error)
                if len(failures) >= MOST_FAILURES:
                    fatal = error
            except ServerError as error:
                report.unanswered += 1
                fatal = error
            else:
                failures.clear()
                report.keep(store, traces, on_request)
        return fatal

    try:
        try:
            while not (stop is not None and stop.is_set()):
                while waiting and len(answers) < concurrency:
                    answers.add(_begun(ask, *waiting.popleft()))
                if not answers:
                    break
                fatal = keep(wait(answers, timeout=STOP_SECONDS, return_when=FIRST_COMPLETED).done)
                if fatal is not None:
                    raise fatal
        finally:  # of requests under way, those that are answered soon
            keep(wait(answers, timeout=GRACE_SECONDS).done)
            report.unanswered += len(waiting) + len(answers)
        if failures and not report.requests:
            raise failures[-1]
    finally:
        report.seconds += time.perf_counter() - started
        store.flush()
    return report


def _begun(call: Callable[..., T], *arguments: Any) -> Future[T]:
    """A call by a thread that does not hold up the end of the program, as those of an executor do."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001  # whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, name="osd_hf-collect", daemon=True).start()
    return future


# --- from a log -----------------------------------------------------------------------------------------------------


class LogReader:
    """
    New whole lines of a growing log. A line without its end is left until it has one; a line longer than 128 MiB is
    passed over, so no line takes more memory than that. A log that was rotated away is read to its end before the new
    one is begun.

    Args:
        path (`Path`): A file of JSON lines.
        place (`Path`, *optional*): File that keeps how far the log has been read, so that another run goes on there.

    Raises:
        DataError: there is no such file, or it cannot be read.
        ConfigError: another process reads it for the same `place`.

    Attributes:
        has_rest (`bool`): Whether there was a line without its end after the last whole one.
        too_long (`int`): Lines passed over because they are too long.
    """

    def __init__(self, path: Path, place: Path | None = None) -> None:
        self.path, self.place = path, place
        self.has_rest, self.too_long = False, 0
        self._head = b""
        self._was_seen_rotated = False
        self._lock: FileLock | None = None
        self._begin(0)
        try:
            self._file = path.open("rb", buffering=0)  # a buffer would not see that the log was emptied in place
        except OSError as error:
            raise DataError(f"The log {path} cannot be read: {error.strerror}.") from error
        try:
            self._resume()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def place_in(store: Path, path: Path) -> Path:
        """Where a store keeps how far a log has been read into it."""
        name = hashlib.sha256(os.fsencode(path.expanduser().absolute())).hexdigest()[:16]
        return store / f".osd_hf_store.log-{name}.json"

    def _begin(self, offset: int, *, is_inside: bool = False) -> None:
        """Go on at a line's start, or inside a line that is passed over."""
        # What is dealt with ends at `offset`, and what has been read at `_read`.
        self.offset = self._read = offset
        self._rest, self._is_inside = bytearray(), is_inside  # of the line that has begun

    def _resume(self) -> None:
        if self.place is None:
            return
        self._lock = hold_lock(
            self.place.with_suffix(".lock"),
            f"Another collector reads {self.path} into this store, or its file system has no locks. Stop it, or take "
            "another store.",
        )
        try:
            kept = json.loads(self.place.read_text())
            length, digest, offset = int(kept["head_bytes"]), str(kept["head_sha256"]), int(kept["offset"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # read from the start rather than lose a line
        if length < 0 or offset < 0:
            return
        head = self._file.read(length)
        if hashlib.sha256(head).hexdigest() == digest and offset <= os.fstat(self._file.fileno()).st_size:
            self._head = head
            self._begin(offset, is_inside=kept.get("is_inside") is True)
        else:
            logger.warning(
                "%s is another file than the one that was read before: it is read from its start, and what the other "
                "gained after byte %d is not read.", self.path, offset,
            )  # fmt: skip

    def lines(self) -> Iterator[bytes]:
        """The lines that have come, without their ends."""
        yield from self._whole_lines()
        if not self._is_rotated():
            return
        if not self._was_seen_rotated:  # its writer may still hold the old one: that is read once more later
            self._was_seen_rotated = True
            return
        yield from self._whole_lines()
        if self.has_rest:  # nobody writes its end any more
            yield bytes(self._rest)
        try:
            file = self.path.open("rb", buffering=0)
        except OSError:  # gone again, or not to be read yet
            return
        self._file.close()
        self._file, self._head, self._was_seen_rotated = file, b"", False
        self._begin(0)
        yield from self._whole_lines()

    def _whole_lines(self) -> Iterator[bytes]:
        size, begun = os.fstat(self._file.fileno()).st_size, bytes(self._rest[:HEAD_BYTES])
        is_accepted = self._read == self.offset + len(self._rest)
        if size < self.offset or self._bytes_at(0, len(self._head)) != self._head:
            self._begin(0)  # it was emptied in place, and may have grown since
        elif not is_accepted or size < self._read or self._bytes_at(self.offset, len(begun)) != begun:
            self._begin(self.offset, is_inside=self._is_inside)
        while True:
            *ended, rest = self._bytes_at(self._read, LOG_BYTES).split(b"\n")
            for piece in ended:
                self._grow(piece)
                line = None if self._is_inside else bytes(self._rest)
                self._rest, self._is_inside = bytearray(), False
                self._read += 1
                if line is not None:
                    yield line
                self.accept()
            if not rest and not ended:
                break
            self._grow(rest)
            self.accept()
        self.has_rest = bool(self._rest) and not self._rest.isspace()
        self._head = self._bytes_at(0, min(HEAD_BYTES, self.offset))

    def _grow(self, piece: bytes) -> None:
        """Add a piece to the line that has begun, unless that is, or becomes, too long."""
        self._read += len(piece)
        if not self._is_inside:
            self._rest += piece
            self._is_inside = len(self._rest) > LINE_BYTES
            if self._is_inside:
                self.too_long += 1
                logger.warning("Left out: a line of %s longer than %d bytes.", self.path, LINE_BYTES)
                self._rest.clear()

    def _bytes_at(self, place: int, size: int) -> bytes:
        self._file.seek(place)
        return self._file.read(size)

    def _is_rotated(self) -> bool:
        """Whether another file has the name now."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except OSError:
            return False  # until the new one is there

    def accept(self) -> None:
        """Take the line that came last for dealt with, as happens by itself when the next one is asked for."""
        self.offset = self._read - len(self._rest)

    def commit(self) -> None:
        """Write how far the log has been read, without the line that came last if that is not accepted; raises
        StoreError where it cannot be written."""
        if self.place is None:
            return
        head = self._bytes_at(0, min(HEAD_BYTES, self.offset))
        kept = {
            "head_bytes": len(head), "head_sha256": hashlib.sha256(head).hexdigest(), "offset": self.offset,
            "is_inside": self._is_inside,
        }  # fmt: skip
        with store_errors("write", self.place):
            write_whole(self.place, json.dumps(kept).encode())

    def close(self) -> None:
        """Close the log, and let others read it for the same place."""
        self._file.close()
        if self._lock is not None:
            self._lock.release()


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
    Keep the answers that a log has gained, all under one label. Lines that hold none, or cannot be learned from, are
    counted by reason. What else is passed means the same as for [`collect`].

    Raises:
        StoreError: the store cannot be written; the lines since the last flush are read again the next time.
    """
    report = report or CollectionReport()
    started, kept, too_long = time.perf_counter(), 0, log.too_long
    try:
        for line in log.lines():
            try:
                traces = _traces_of(line, reader, domain) if line.strip() else []
            except DataError as error:
                report.skip(str(error))
            else:
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


def _traces_of(line: bytes, reader: ResponseReader, domain: str | None) -> list[Trace]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError("a line is cut off, or no JSON") from error
    if not isinstance(parsed, dict):
        raise DataError("a line is no JSON object")
    request, response = unwrapped(parsed)
    return reader.traces(response, request, domain=domain)
