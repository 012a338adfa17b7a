"""Record the answers that pass the proxy: a separate process reads them and writes them to a store."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any

from osd_hf.engines.collect import CollectionReport
from osd_hf.engines.completions import WARPERS, ResponseReader
from osd_hf.errors import DataError, StoreError, first_line
from osd_hf.proxy.upstream import Upstream
from osd_hf.store.store import CorrectionStore

__all__ = ["AnswerWriter", "AnswerWriterProcess", "ProxyCounts", "RecordedAnswer", "Recorder", "Recording"]

FLUSH_SECONDS = 5.0  # without an answer, after which the store is flushed
CLOSE_SECONDS = 1.0
RETRY_SECONDS = 30.0  # between two attempts to write a store
MAX_WAITING_ANSWERS = 256
MAX_WAITING_BYTES = 256 << 20  # of answers under way and of answers that wait
NICENESS = 10  # of the process that reads answers
# Settings of a request that `ResponseReader` reads.
KEPT_SETTINGS = (
    "temperature", "max_tokens", "max_completion_tokens", "stop", "prompt", "truncate_prompt_tokens",
    *(name for name, _, _ in WARPERS),
)  # fmt: skip
UNREADABLE = "An answer cannot be collected"
UNWRITABLE = "Answers cannot be stored now, and are dropped"

logger = logging.getLogger(__name__)


@dataclass
class ProxyCounts:
    """
    Counts of a proxy.

    Attributes:
        requests (`int`), bytes (`int`): Requests of clients, and bytes of the answers that they got.
        collected (`int`), tokens (`int`): Recorded answers and their tokens.
        dropped (`int`): Answers that were not recorded because too many waited, or because the store failed.
        engine_errors (`int`): Requests without a response, or with a status from 500 on.
        retries (`int`): Requests that were sent again, to another engine or without the added fields.
        seconds_added (`float`): Time to read requests and to remove fields from responses.
    """

    requests: int = 0
    bytes: int = 0
    collected: int = 0
    tokens: int = 0
    dropped: int = 0
    engine_errors: int = 0
    retries: int = 0
    seconds_added: float = 0.0

    def __post_init__(self) -> None:
        self._report = CollectionReport()
        self._lock = threading.Lock()

    def leave_out(self, reason: str) -> None:
        """Count an answer that cannot be learned from; may be called from any thread."""
        with self._lock:
            self._report.skip(reason)

    def drop(self) -> None:
        """Count an answer that was dropped; may be called from any thread."""
        with self._lock:
            self.dropped += 1

    def to_dict(self) -> dict[str, float | Mapping[str, float]]:
        """Return the counts by name, with `left_out` by reason."""
        with self._lock:
            return {**asdict(self), "left_out": dict(self._report.skipped)}


# --- an answer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedAnswer:
    """
    A complete answer.

    Args:
        pieces (`Sequence[bytes]`): The body in pieces, or the data of each event of a stream.
        is_stream (`bool`): Whether the answer was a stream.
        request (`Mapping[str, Any]`): Settings of the request.
        domain (`str`, *optional*): Label of the request.
    """

    pieces: Sequence[bytes]
    is_stream: bool
    request: Mapping[str, Any]
    domain: str | None

    def response(self) -> Mapping[str, Any]:
        """Return the response in the form that [`ResponseReader`] takes; raises DataError."""
        if self.is_stream:
            return response_of_stream(self.pieces)
        try:
            found = json.loads(b"".join(self.pieces))
        except (ValueError, RecursionError) as error:
            raise DataError("an answer is no JSON") from error
        if not isinstance(found, dict) or not isinstance(found.get("choices"), list):
            raise DataError("there is no response with `choices`")
        return found


def response_of_stream(data: Iterable[bytes]) -> dict[str, Any]:
    """
    Build the response that a stream of events amounts to: ids, log-probs and reasons of each choice, without text.

    Raises:
        DataError: an event has an unexpected form.
    """
    response, choices = dict[str, Any](), dict[int, dict[str, Any]]()
    try:
        for text in data:
            if text == b"[DONE]":
                continue
            chunk = json.loads(text)
            for name in ("created", "model", "prompt_token_ids"):
                if chunk.get(name) is not None:
                    response.setdefault(name, chunk[name])
            for piece in chunk.get("choices") or ():
                choice = choices.setdefault(piece["index"], {"token_ids": [], "logprobs": {}})
                for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
                    if piece.get(name) is not None:
                        choice[name] = piece[name]
                choice["token_ids"] += piece.get("token_ids") or []
                for name, values in (piece.get("logprobs") or {}).items():
                    choice["logprobs"].setdefault(name, []).extend(values or [])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError("the stream has other kinds of events than expected") from error
    return response | {"choices": [choices[index] for index in sorted(choices)]}


class Recording:
    """
    An answer while it passes the proxy.

    Args:
        recorder (`Recorder`): Takes the complete answer.
        request (`Mapping[str, Any]`): The client's request, of which only some settings are kept.
        domain (`str`, *optional*): Label of the request.
        upstream (`Upstream`, *optional*): Engine that got extra fields, and learns whether the answer could be read.
        num_bytes (`int`, *optional*, defaults to 0): Size of the request.

    Attributes:
        is_open (`bool`): Whether the answer is recorded. It is not if there is no memory for it.
        has_ended (`bool`): Whether the answer is complete and was handed to the recorder.
    """

    def __init__(
        self,
        recorder: Recorder,
        request: Mapping[str, Any],
        domain: str | None,
        upstream: Upstream | None = None,
        *,
        num_bytes: int = 0,
    ) -> None:
        self.upstream = upstream
        self.has_ended = False
        self.is_open = recorder.reserve(num_bytes)
        self._recorder = recorder
        self._num_bytes = num_bytes
        self._pieces: list[bytes] = []
        self._is_stream = False
        self._domain = domain
        self._request = {"model": request.get("model")}
        self._request |= {name: request[name] for name in KEPT_SETTINGS if name in request}
        if isinstance(self._request.get("prompt"), str):
            del self._request["prompt"]
        if not self.is_open:
            recorder.counts.drop()

    def add(self, piece: bytes, *, is_event: bool = False) -> None:
        """Add a piece of the answer, or drop the answer if there is no memory for it."""
        if self.is_open and not self._recorder.reserve(len(piece)):
            self.drop()
        if self.is_open:
            self._pieces.append(piece)
            self._num_bytes += len(piece)
            self._is_stream = self._is_stream or is_event

    def end(self) -> None:
        """Hand the complete answer to the recorder."""
        self.has_ended = True
        if self.is_open:
            self._recorder.put(self)

    def drop(self) -> None:
        """Release the answer and count it as dropped, unless it was released before."""
        if self.is_open:
            self._recorder.counts.drop()
        self.release()

    def release(self) -> None:
        """Release the memory; a second call does nothing."""
        if self.is_open:
            self._recorder.reserve(-self._num_bytes)
        self.is_open = False
        self._pieces = []

    @property
    def answer(self) -> RecordedAnswer:
        """The answer so far."""
        return RecordedAnswer(self._pieces, self._is_stream, self._request, self._domain)


# --- writing --------------------------------------------------------------------------------------------------------


class AnswerWriter:
    """
    Reads answers and appends them to a store.

    Args:
        reader (`ResponseReader`): Turns responses into traces.
        store (`CorrectionStore`): Where the traces go.
    """

    def __init__(self, reader: ResponseReader, store: CorrectionStore) -> None:
        self.num_logprobs = reader.num_logprobs
        self._reader = reader
        self._store = store

    def write(self, answer: RecordedAnswer) -> tuple[list[int], StoreError | None]:
        """
        Append the traces of an answer.

        Returns:
            `tuple`: The number of tokens of each choice, and the error if the store took the traces but could not
            write to the disk.

        Raises:
            DataError: the answer cannot be read.
        """
        traces = self._reader.traces(answer.response(), answer.request, domain=answer.domain)
        failure = None
        for trace in traces:
            try:
                self._store.append(trace)
            except StoreError as error:
                failure = error
        return [len(trace) for trace in traces], failure

    def flush(self) -> None:
        """Write what was appended; raises StoreError."""
        self._store.flush()

    def close(self) -> None:
        """Write what was appended, and close the store; raises StoreError."""
        self._store.close()


class AnswerWriterProcess:
    """
    An [`AnswerWriter`] in a separate process, because reading an answer would delay the events of other answers.

    If that process dies, what it had not written is lost, and the next call starts another one. If this process dies,
    the other one writes what it has and ends.

    Args:
        reader (`ResponseReader`), store (`CorrectionStore`):
            As for [`AnswerWriter`]; the process is another writer of the store's folder.

    Raises:
        StoreError: no process can be started.
    """

    def __init__(self, reader: ResponseReader, store: CorrectionStore) -> None:
        self.num_logprobs = reader.num_logprobs
        self._arguments = (reader, store)
        self._pool: ProcessPoolExecutor | None = None
        self.flush()  # waits until the process has started

    def write(self, answer: RecordedAnswer) -> tuple[list[int], StoreError | None]:
        """Do as [`AnswerWriter.write`]; also raises StoreError if the process has died."""
        result: tuple[list[int], StoreError | None] = self._call(AnswerWriter.write, answer)
        return result

    def flush(self) -> None:
        """Do as [`AnswerWriter.flush`]."""
        self._call(AnswerWriter.flush)

    def close(self) -> None:
        """Do as [`AnswerWriter.close`], and end the process."""
        if self._pool is None:
            return
        try:
            self._call(AnswerWriter.close)
        finally:
            self._end_pool(wait=True)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(1, context, initializer=_start_worker, initargs=self._arguments)
            return self._pool.submit(_call_in_worker, method, *args).result()
        except (BrokenProcessPool, OSError) as error:
            self._end_pool(wait=False)
            raise StoreError("the process that reads answers has ended, or cannot be started") from error

    def _end_pool(self, *, wait: bool) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=wait)


_worker: AnswerWriter | None = None  # set only in the process that reads answers


def _start_worker(reader: ResponseReader, store: CorrectionStore) -> None:
    global _worker
    for number in (signal.SIGINT, signal.SIGTERM):  # the other process ends this one
        signal.signal(number, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    _worker = AnswerWriter(reader, store)
    threading.Thread(target=_end_with_parent, args=(_worker,), name="osd_hf-end-with-parent", daemon=True).start()


def _end_with_parent(writer: AnswerWriter) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    try:
        writer.close()
    finally:
        os._exit(1)


def _call_in_worker(method: Callable[..., Any], *args: Any) -> Any:
    assert _worker is not None
    return method(_worker, *args)


class Recorder:
    """
    Has answers written one after the other by a thread.

    Failures are counted and never raised. Each kind of failure is logged once until it works again.

    Args:
        writer (`AnswerWriter` or `AnswerWriterProcess`): Reads and stores the answers.
        counts (`ProxyCounts`): Counts the results.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`): Returns the time in seconds.
    """

    def __init__(
        self,
        writer: AnswerWriter | AnswerWriterProcess,
        counts: ProxyCounts,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_logprobs = writer.num_logprobs
        self.counts = counts
        self._writer = writer
        self._clock = clock
        self._queue: queue.Queue[Recording | None] = queue.Queue(MAX_WAITING_ANSWERS)
        self._reserved_bytes = 0
        self._lock = threading.Lock()
        self._is_failing = False  # the last write failed
        self._retry_at = -float("inf")
        self._has_unflushed = False
        self._warned: set[str] = set()  # kinds of failures
        self._thread = threading.Thread(target=self._run, name="osd_hf-recorder", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether an answer would be recorded now."""
        is_paused = self._is_failing and self._clock() < self._retry_at
        return not (is_paused or self._queue.full() or self._reserved_bytes >= MAX_WAITING_BYTES)

    def reserve(self, num_bytes: int) -> bool:
        """Reserve memory for answers, or release it if the number is negative; returns whether it was available."""
        with self._lock:
            is_available = num_bytes <= 0 or self._reserved_bytes + num_bytes <= MAX_WAITING_BYTES
            self._reserved_bytes += num_bytes if is_available else 0
        return is_available

    def put(self, recording: Recording) -> None:
        """Write a complete answer soon, or drop it if too many wait."""
        try:
            self._queue.put_nowait(recording)
        except queue.Full:
            recording.drop()

    def wait(self) -> None:
        """Wait until all answers that were put have been written or dropped."""
        self._queue.join()

    def close(self) -> None:
        """Write all waiting answers, and flush the store."""
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=CLOSE_SECONDS)
                break
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                recording = self._queue.get(timeout=FLUSH_SECONDS)
            except queue.Empty:
                self._flush()
                continue
            if recording is None:
                self._retry_at = -float("inf")
                self._flush()
                return
            try:
                self._write(recording)
            except Exception as error:  # noqa: BLE001  # an internal error must not cost an answer
                self.counts.leave_out("it cannot be read because of an internal error")
                self._warn(UNREADABLE, error)
            finally:
                recording.release()
                self._queue.task_done()

    def _write(self, recording: Recording) -> None:
        if self._is_failing and not self._flush():
            recording.drop()
            return
        upstream = recording.upstream
        try:
            tokens, failure = self._writer.write(recording.answer)
        except DataError as error:
            self.counts.leave_out(str(error))
            if upstream is not None:
                upstream.answer_was_unreadable(str(error))
            return
        except StoreError as error:  # nothing was stored
            self._fail(error)
            recording.drop()
            return
        if upstream is not None:
            upstream.answer_was_read()
        self._has_unflushed = True
        if failure is not None:  # the store keeps the answer in memory and writes it later
            self._fail(failure)
        self.counts.collected += len(tokens)
        self.counts.tokens += sum(tokens)
        self._warned.discard(UNREADABLE)

    def _flush(self) -> bool:
        """Flush the store unless that has just failed; returns whether everything is written."""
        if self._is_failing and self._clock() < self._retry_at:
            return False
        try:
            if self._has_unflushed:
                self._writer.flush()
        except Exception as error:  # noqa: BLE001  # the thread continues after any failure
            self._fail(error)
            return False
        self._has_unflushed = False
        self._is_failing = False
        self._warned.discard(UNWRITABLE)
        return True

    def _fail(self, error: Exception) -> None:
        self._is_failing = True
        self._retry_at = self._clock() + RETRY_SECONDS
        self._warn(UNWRITABLE, error)

    def _warn(self, kind: str, error: Exception) -> None:
        if kind not in self._warned:
            logger.warning("%s: %s. Clients are served all the same.", kind, first_line(error))
        self._warned.add(kind)
