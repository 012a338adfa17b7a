"""Collect answers of an engine, by asking it or from its log, as traces in a store."""

from __future__ import annotations

import contextlib
import hashlib
import io
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

from filelock import FileLock

from osd_hf.engines.completions import CompletionClient, RequestRefusedError, ResponseReader, unwrap_line
from osd_hf.errors import DataError, ServerError, without_credentials
from osd_hf.prompts import Prompt
from osd_hf.store.folder import store_errors
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace
from osd_hf.utils.disk import hold_lock, write_whole

MAX_FAILURES = 8  # requests that fail in a row before the collection ends
MAX_REASONS = 256  # counted separately, because servers may give a different reason each time
POLL_SECONDS = 0.2  # between two checks of `stop`
GRACE_SECONDS = 5.0  # for requests under way when a collection ends early
HEAD_BYTES = 1024  # of a log, to recognize it

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class CollectionReport:
    """The result of a collection: stored traces and their tokens, and answers that cannot be learned from."""

    requests: int = 0
    tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    unanswered: int = 0  # prompts without an answer when the collection ended
    seconds: float = 0.0
    _reasons: dict[str, str] = field(default_factory=dict, repr=False)  # reason without numbers -> first such reason

    def keep(
        self, store: CorrectionStore, traces: Sequence[Trace], on_request: Callable[[Trace], object] | None
    ) -> None:
        """Append traces to a store, and count them."""
        for trace in traces:
            store.append(trace)
            self.requests += 1
            self.tokens += len(trace)
            if on_request is not None:
                on_request(trace)

    def skip(self, reason: str) -> None:
        """Count an answer that cannot be learned from."""
        reason = without_credentials(reason)
        kind = re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", reason)
        if kind not in self._reasons and len(self._reasons) >= MAX_REASONS:
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
    Send prompts to a server, `concurrency` at a time, and store the answers.

    A prompt with an answer that is refused or cannot be learned from is counted and left out. The collection ends with
    the reason if that happens eight times in a row, or to all prompts, and when `stop` is set.

    Args:
        prompts (`Sequence[tuple[Prompt, list[int]]]`): Prompts with their token ids.
        report (`CollectionReport`, *optional*): Filled with counts, also if an error ends the collection.
        on_request (`Callable[[Trace], object]`, *optional*): Called for each stored trace.
        max_new_tokens (`int`), settings (`Any`): Passed to [`~CompletionClient.complete`].

    Raises:
        ServerError, DataError, StoreError: the server, its answers, or the store fail. Earlier answers are stored.
    """
    report = report or CollectionReport()
    waiting, running = deque(prompts), set[Future[list[Trace]]]()
    failures: list[RequestRefusedError | DataError] = []  # since the last stored answer
    start = time.perf_counter()

    def ask(prompt: Prompt, ids: list[int]) -> list[Trace]:
        num_logprobs = reader.num_logprobs
        request, response = client.complete(ids, max_new_tokens=max_new_tokens, num_logprobs=num_logprobs, **settings)
        return reader.traces(response, request, domain=prompt.domain)

    def keep(done: set[Future[list[Trace]]]) -> ServerError | DataError | None:
        """Store answers; returns the error that should end the collection."""
        fatal: ServerError | DataError | None = None
        for future in done:
            running.remove(future)
            try:
                traces = future.result()
            except (RequestRefusedError, DataError) as error:
                report.skip(str(error))
                failures.append(error)
                if len(failures) >= MAX_FAILURES:
                    fatal = error
            except ServerError as error:
                report.unanswered += 1
                fatal = error
            else:
                failures.clear()
                report.keep(store, traces, on_request)
        return fatal

    fatal: ServerError | DataError | None = None
    try:
        while fatal is None and not (stop is not None and stop.is_set()):
            while waiting and len(running) < concurrency:
                running.add(_run_in_daemon(ask, *waiting.popleft()))
            if not running:
                break
            fatal = keep(wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED).done)
        keep(wait(running, timeout=GRACE_SECONDS).done)
    finally:
        report.unanswered += len(waiting) + len(running)
        report.seconds += time.perf_counter() - start
        store.flush()
    if failures and not report.requests:
        fatal = fatal or failures[-1]
    if fatal is not None:
        raise fatal
    return report


def _run_in_daemon(call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Run a call in a thread that, unlike those of an executor, does not delay the end of the program."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001  # raised where the result is read
            future.set_exception(error)

    threading.Thread(target=run, name="osd_hf-collect", daemon=True).start()
    return future


# --- from a log -----------------------------------------------------------------------------------------------------


class LogReader:
    """
    Reads the new lines of a growing log.

    A line without its end is read when it is complete. After a rotation, the old file is read to its end first.

    Args:
        path (`Path`): A file of JSON lines.
        position_file (`Path`, *optional*): Keeps how far the log was read, so that another run continues there.

    Raises:
        DataError: the log cannot be read.
        ConfigError: another process uses the same `position_file`.
    """

    def __init__(self, path: Path, position_file: Path | None = None) -> None:
        self.path = path
        self.position_file = position_file
        self._offset = 0  # the end of the last processed line
        self._head = b""  # the first bytes before it, to recognize the file
        self._rest = b""  # the line without an end
        self._has_seen_rotation = False
        self._lock: FileLock | None = None
        try:
            self._file = path.open("rb", buffering=0)  # a buffer would hide that the log was truncated
        except OSError as error:
            raise DataError(f"The log {path} cannot be read: {error.strerror}.") from error
        try:
            self._resume()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def position_in(store: Path, path: Path) -> Path:
        """Return the `position_file` of a log that is read into a store."""
        name = hashlib.sha256(os.fsencode(path.expanduser().absolute())).hexdigest()[:16]
        return store / f".osd_hf_store.log-{name}.json"

    @property
    def has_rest(self) -> bool:
        """Whether the log ends with a line without its end."""
        return bool(self._rest.strip())

    def lines(self) -> Iterator[bytes]:
        """Yield the new lines, without their ends. A line counts as processed when the next one is taken."""
        yield from self._whole_lines()
        if not self._is_rotated():
            return
        if not self._has_seen_rotation:  # a program may still write to the old file until the next call
            self._has_seen_rotation = True
            return
        if self.has_rest:
            yield self._rest
        try:
            file = self.path.open("rb", buffering=0)
        except OSError:
            return
        self._file.close()
        self._file = file
        self._offset = 0
        self._head = b""
        self._has_seen_rotation = False
        yield from self._whole_lines()

    def commit(self) -> None:
        """Write the position after the last processed line; raises StoreError."""
        if self.position_file is None:
            return
        digest = hashlib.sha256(self._head).hexdigest()
        position = {"head_bytes": len(self._head), "head_sha256": digest, "offset": self._offset}
        with store_errors("write", self.position_file):
            write_whole(self.position_file, json.dumps(position).encode())

    def close(self) -> None:
        """Close the log, and release the lock."""
        self._file.close()
        if self._lock is not None:
            self._lock.release()

    def _resume(self) -> None:
        if self.position_file is None:
            return
        self._lock = hold_lock(
            self.position_file.with_suffix(".lock"),
            f"Another collector reads {self.path} into this store, or its file system has no locks. Stop it, or take "
            "another store.",
        )
        try:
            position = json.loads(self.position_file.read_text())
            offset = int(position["offset"])
            head = self._file.read(int(position["head_bytes"]))
            digest = str(position["head_sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # reading a line twice is better than losing one
        if hashlib.sha256(head).hexdigest() == digest and offset <= os.fstat(self._file.fileno()).st_size:
            self._head = head
            self._offset = offset
        else:
            logger.warning(
                "%s is another file than the one that was read before: it is read from its start, and what the other "
                "gained after byte %d is not read.",
                self.path,
                offset,
            )

    def _whole_lines(self) -> Iterator[bytes]:
        self._file.seek(0)
        is_same = self._file.read(len(self._head)) == self._head
        if not is_same or os.fstat(self._file.fileno()).st_size < self._offset:  # the log was truncated
            self._offset = 0
            self._head = b""
        self._file.seek(self._offset)
        buffer = io.BufferedReader(self._file)
        try:
            while (line := buffer.readline()).endswith(b"\n"):
                yield line[:-1]
                self._offset += len(line)
                self._head += line[: HEAD_BYTES - len(self._head)]
            self._rest = line
        finally:
            with contextlib.suppress(ValueError):  # the log was closed
                buffer.detach()

    def _is_rotated(self) -> bool:
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except OSError:
            return False  # the new file does not exist yet


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
    """Store the new answers of a log with the label `domain`; see [`collect`] for the other arguments."""
    report = report or CollectionReport()
    start, num_unflushed = time.perf_counter(), 0
    try:
        for line in log.lines():
            if num_unflushed >= store.flush_every:
                store.flush()
                log.commit()
                num_unflushed = 0
            if stop is not None and stop.is_set():
                break
            try:
                traces = _traces_of_line(line, reader, domain) if line.strip() else []
            except DataError as error:
                report.skip(str(error))
            else:
                report.keep(store, traces, on_request)
                num_unflushed += len(traces)
    finally:
        report.seconds += time.perf_counter() - start
        store.flush()
        log.commit()
    return report


def _traces_of_line(line: bytes, reader: ResponseReader, domain: str | None) -> list[Trace]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError("a line is cut off, or no JSON") from error
    if not isinstance(parsed, dict):
        raise DataError("a line is no JSON object")
    request, response = unwrap_line(parsed)
    return reader.traces(response, request, domain=domain)
