"""Record the answers that pass the proxy: a process reads them, and a thread writes them to a store."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any

from osd_hf.engines.collect import CollectionReport
from osd_hf.engines.completions import WARPERS, ResponseReader
from osd_hf.errors import DataError, StoreError, first_line
from osd_hf.proxy.extra_fields import event_data
from osd_hf.proxy.upstream import Upstream
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace

__all__ = ["ProxyCounts", "Recorder", "Recording"]

FLUSH_SECONDS = 5.0  # without an answer, after which the store is flushed
RETRY_SECONDS = 30.0  # between two attempts to write a store
MAX_WAITING_ANSWERS = 256
MAX_WAITING_BYTES = 256 << 20
NICENESS = 10  # of the process that reads answers
# Settings of a request that `ResponseReader` reads.
KEPT_SETTINGS = (
    "temperature", "max_tokens", "max_completion_tokens", "stop", "prompt", "truncate_prompt_tokens",
    *(name for name, _, _ in WARPERS),
)  # fmt: skip

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


class Recording:
    """
    An answer while it passes the proxy.

    Args:
        request (`Mapping[str, Any]`): The client's request, of which only some settings are kept.
        domain (`str`, *optional*): Label of the request.
        upstream (`Upstream`, *optional*): Engine that got extra fields, and learns whether the answer could be read.

    Attributes:
        pieces (`list[bytes]`): The body, or the data of each event of a stream.
    """

    def __init__(self, request: Mapping[str, Any], domain: str | None, upstream: Upstream | None = None) -> None:
        self.request = {name: request[name] for name in ("model", *KEPT_SETTINGS) if name in request}
        if isinstance(self.request.get("prompt"), str):
            del self.request["prompt"]
        self.domain = domain
        self.upstream = upstream
        self.pieces: list[bytes] = []
        self.is_stream = False

    def add(self, piece: bytes, *, is_event: bool = False) -> None:
        """Add the body, or an event of a stream."""
        data = event_data(piece) if is_event else piece
        if data is not None:
            self.pieces.append(data)
            self.is_stream = is_event

    @property
    def num_bytes(self) -> int:
        """Size of the answer so far."""
        return sum(map(len, self.pieces))


def read_answer(
    reader: ResponseReader, pieces: list[bytes], is_stream: bool, request: Mapping[str, Any], domain: str | None
) -> list[Trace]:
    """Return the traces of a recorded answer; raises DataError."""
    return reader.traces(response_of_stream(pieces) if is_stream else _parse(pieces), request, domain=domain)


def _parse(pieces: list[bytes]) -> Mapping[str, Any]:
    try:
        found = json.loads(b"".join(pieces))
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


# --- writing --------------------------------------------------------------------------------------------------------


class Recorder:
    """
    Reads answers in a process, because that would delay the events of other answers, and stores them in a thread.

    Failures are counted, logged once, and never raised.

    Args:
        reader (`ResponseReader`): Turns responses into traces.
        store (`CorrectionStore`): Where the traces go.
        counts (`ProxyCounts`): Counts the results.
        in_process (`bool`, *optional*, defaults to `True`): Whether a separate process reads the answers.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`): Returns the time in seconds.
    """

    def __init__(
        self,
        reader: ResponseReader,
        store: CorrectionStore,
        counts: ProxyCounts,
        *,
        in_process: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_logprobs = reader.num_logprobs
        self.counts = counts
        self._reader = reader
        self._store = store
        self._in_process = in_process
        self._pool: ProcessPoolExecutor | None = None
        self._clock = clock
        self._queue: queue.Queue[Recording | None] = queue.Queue(MAX_WAITING_ANSWERS)
        self._bytes_put = 0  # by the event loop
        self._bytes_done = 0  # by the thread
        self._is_failing = False  # the last write failed
        self._retry_at = -float("inf")
        self._has_unflushed = False
        self._has_warned = False  # of an internal error
        self._thread = threading.Thread(target=self._run, name="osd_hf-recorder", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether an answer would be recorded now."""
        is_paused = self._is_failing and self._clock() < self._retry_at
        return not (is_paused or self._queue.full() or self._bytes_put - self._bytes_done >= MAX_WAITING_BYTES)

    def put(self, recording: Recording) -> None:
        """Store a complete answer soon, or drop it if too many wait."""
        size = recording.num_bytes
        if self._queue.full() or self._bytes_put - self._bytes_done + size > MAX_WAITING_BYTES:
            self.counts.drop()
            return
        self._bytes_put += size
        self._queue.put(recording)

    def wait(self) -> None:
        """Wait until all answers that were put have been stored or dropped."""
        self._queue.join()

    def close(self) -> None:
        """Store all waiting answers, flush the store, and end the process."""
        if self._thread.is_alive():
            self._queue.put(None)
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
                if self._pool is not None:
                    self._pool.shutdown()
                return
            try:
                self._write(recording)
            except Exception as error:  # noqa: BLE001  # an internal error must not cost an answer
                self.counts.leave_out("it cannot be read because of an internal error")
                if not self._has_warned:
                    logger.warning("An answer cannot be collected: %s. Clients are served all the same.", error)
                self._has_warned = True
            finally:
                self._bytes_done += recording.num_bytes
                self._queue.task_done()

    def _write(self, recording: Recording) -> None:
        if self._is_failing and not self._flush():
            self.counts.drop()
            return
        upstream = recording.upstream
        try:
            traces = self._read(recording)
        except DataError as error:
            self.counts.leave_out(str(error))
            if upstream is not None:
                upstream.answer_was_unreadable(str(error))
            return
        if upstream is not None:
            upstream.answer_was_read()
        self._has_unflushed = True
        for trace in traces:
            try:
                self._store.append(trace)
            except StoreError as error:  # the store keeps the trace in memory and writes it later
                self._fail(error)
        self.counts.collected += len(traces)
        self.counts.tokens += sum(map(len, traces))

    def _read(self, recording: Recording) -> list[Trace]:
        answer = (self._reader, recording.pieces, recording.is_stream, recording.request, recording.domain)
        if not self._in_process:
            return read_answer(*answer)
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_start_worker)
        try:
            return self._pool.submit(read_answer, *answer).result()
        except BrokenProcessPool:
            self._pool = None  # the next answer starts another process
            raise

    def _flush(self) -> bool:
        """Flush the store unless that has just failed; returns whether everything is written."""
        if self._is_failing and self._clock() < self._retry_at:
            return False
        try:
            if self._has_unflushed:
                self._store.flush()
        except Exception as error:  # noqa: BLE001  # the thread continues after any failure
            self._fail(error)
            return False
        self._has_unflushed = False
        self._is_failing = False
        return True

    def _fail(self, error: Exception) -> None:
        if not self._is_failing:
            logger.warning("Answers cannot be stored now, and are dropped: %s.", first_line(error))
        self._is_failing = True
        self._retry_at = self._clock() + RETRY_SECONDS


def _start_worker() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the proxy ends this process
        signal.signal(number, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    threading.Thread(target=_end_with_parent, name="osd_hf-end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
