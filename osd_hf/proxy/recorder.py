"""What a proxy keeps of the answers that pass it: read and stored by a process of its own, dropped, or left out."""

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from osd_hf.engines.collect import CollectionReport
from osd_hf.engines.completions import WARPERS, ResponseReader
from osd_hf.errors import DataError, StoreError, first_line
from osd_hf.proxy.events import assembled
from osd_hf.store.store import CorrectionStore

__all__ = ["Asking", "Keeper", "ProxyCounts", "Reading", "ReadingProcess", "Recording"]

FLUSH_SECONDS = 5.0  # without an answer, after which what was kept is written
CLOSE_SECONDS = 1.0  # after which a thread that takes nothing is looked at again
RETRY_SECONDS = 30.0  # between two attempts at a store that cannot be written
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 3600.0  # seconds in which an engine is not asked
MOST_UNREADABLE = 8  # answers in a row that may be for a reason of all
MOST_WAITING = 256  # answers
# What the reader looks at in a request whose answer the target alone has shaped.
READ_OF = (
    "temperature", "max_tokens", "max_completion_tokens", "stop", "prompt", "truncate_prompt_tokens",
    *(name for name, _, _ in WARPERS),
)  # fmt: skip
MOST_BYTES = 256 << 20  # of answers under way, and of those that wait
MOST_AT_LEISURE = 16  # answers that wait while others are read when a processor is idle, and only then
NICENESS = 10  # of the process that reads where more wait

UNREADABLE = "An answer cannot be collected"
UNWRITABLE = "Answers cannot be stored now, and are dropped"

logger = logging.getLogger(__name__)


class ProxyCounts:
    """
    What a proxy has done.

    Attributes:
        requests (`int`), bytes (`int`): Requests of clients, and bytes of the answers given to them.
        collected (`int`), tokens (`int`): Answers that were kept to learn from, and their tokens.
        dropped (`int`): Answers that were not kept as too many waited, or as the store cannot be written.
        engine_errors (`int`): Requests that an engine has answered with a status from 500 on, or not at all.
        retries (`int`): Requests that were sent again, to another engine or without what was added.
        seconds_added (`float`): Time to read requests, and to take out of answers what was asked for.
    """

    def __init__(self) -> None:
        self.requests = self.bytes = self.collected = self.tokens = self.dropped = 0
        self.engine_errors = self.retries = 0
        self.seconds_added = 0.0
        self._report, self._lock = CollectionReport(), threading.Lock()

    def leave_out(self, reason: str) -> None:
        """Count an answer that cannot be learned from; from any thread."""
        with self._lock:
            self._report.skip(reason)

    def drop(self) -> None:
        """Count an answer that could have been kept; from any thread."""
        with self._lock:
            self.dropped += 1

    def to_dict(self) -> dict[str, float | Mapping[str, float]]:
        """The counts by their names; `left_out` by reason."""
        names = ("requests", "bytes", "collected", "tokens", "dropped", "engine_errors", "retries", "seconds_added")
        with self._lock:
            return {name: getattr(self, name) for name in names} | {"left_out": dict(self._report.skipped)}


class Asking:
    """
    Whether an engine is asked for more than its clients ask for: not for a while, twice as long each time, where it
    refuses that or gives what cannot be read.

    Args:
        name (`str`): Of the engine, for the log.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`): Seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._until, self._pause, self._unreadable, self._has_told = -float("inf"), FIRST_PAUSE, 0, False

    @property
    def is_on(self) -> bool:
        """Whether it is asked now."""
        return self._clock() >= self._until

    def refused(self, why: str) -> None:
        """Ask no more for a while; the first time since an answer was read, the log says why."""
        if not self.is_on:  # by another request that was under way
            return
        self._until, self._pause = self._clock() + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        if not self._has_told:
            logger.warning("Nothing is collected from %s for a while, then it is asked again: %s.", self._name, why)
        self._has_told = True

    def was_read(self, failed: str | None = None) -> None:
        """Say that an answer could be read, or why it could not."""
        self._unreadable = 0 if failed is None else self._unreadable + 1
        if failed is None:
            self._pause, self._has_told = FIRST_PAUSE, False
        elif self._unreadable >= MOST_UNREADABLE:
            self._unreadable = 0
            self.refused(failed)


class Recording:
    """
    An answer while it passes: its body, or the data of its events.

    Args:
        keeper (`Keeper`): What it is for.
        request (`Mapping[str, Any]`), domain (`str`, *optional*): The client's request, of which little is kept, and
            its label.
        asking (`Asking`, *optional*): Told whether it can be read, where more was asked for than the client did.
        nbytes (`int`, *optional*, defaults to 0): Size of the request.

    Attributes:
        is_open (`bool`): Whether it is kept, for which there must be room.
        has_ended (`bool`): Whether it is whole, and the keeper's.
    """

    def __init__(
        self,
        keeper: Keeper,
        request: Mapping[str, Any],
        domain: str | None,
        asking: Asking | None = None,
        *,
        nbytes: int = 0,
    ) -> None:
        self.request = {"model": request.get("model")} | {name: request[name] for name in READ_OF if name in request}
        if isinstance(self.request.get("prompt"), str):
            del self.request["prompt"]
        self.domain, self.asking = domain, asking
        self._keeper, self._pieces, self._nbytes = keeper, list[bytes](), nbytes
        self._is_stream, self.has_ended, self.is_open = False, False, keeper.hold(nbytes)
        if not self.is_open:
            keeper.counts.drop()

    def add(self, piece: bytes, *, is_event: bool = False) -> None:
        """Take a piece of the answer; where all answers together are too large, this one is dropped."""
        if self.is_open and not self._keeper.hold(len(piece)):
            self.drop()
        if self.is_open:
            self._pieces.append(piece)
            self._nbytes += len(piece)
            self._is_stream = self._is_stream or is_event

    def end(self) -> None:
        """Hand over the whole answer."""
        self.has_ended = True
        if self.is_open:
            self._keeper.put(self)

    def drop(self) -> None:
        """Forget the answer, and count it, unless it was forgotten before."""
        if self.is_open:
            self._keeper.counts.drop()
        self.forget()

    def forget(self) -> None:
        """Give back what it holds; doing so twice does nothing."""
        if self.is_open:
            self._keeper.hold(-self._nbytes)
        self.is_open, self._pieces = False, []

    @property
    def answer(self) -> Answer:
        """What is to be read of it."""
        return Answer(self._pieces, self._is_stream, self.request, self.domain)


# --- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """
    A whole answer, as it came.

    Attributes:
        pieces (`Sequence[bytes]`), is_stream (`bool`): Its body, or the data of the events of a stream.
        request (`Mapping[str, Any]`), domain (`str`, *optional*): What it answers, and its label.
    """

    pieces: Sequence[bytes]
    is_stream: bool
    request: Mapping[str, Any]
    domain: str | None

    def response(self) -> Mapping[str, Any]:
        """It as [`ResponseReader`] takes it; raises DataError."""
        if self.is_stream:
            return assembled(self.pieces)
        try:
            found = json.loads(b"".join(self.pieces))
        except (ValueError, RecursionError) as error:
            raise DataError("an answer is no JSON") from error
        if not isinstance(found, dict) or not isinstance(found.get("choices"), list):
            raise DataError("there is no response with `choices`")
        return found


class Reading:
    """
    Reads answers and appends them to a store.

    Args:
        reader (`ResponseReader`), store (`CorrectionStore`): How answers are read, and where they go.
    """

    def __init__(self, reader: ResponseReader, store: CorrectionStore) -> None:
        self.num_logprobs, self._reader, self._store = reader.num_logprobs, reader, store

    def keep(self, answer: Answer, *, is_urgent: bool = False) -> tuple[list[int], StoreError | None]:
        """Read and append an answer, at once in any case: the tokens of each of its choices, and why the store, which
        has them then, could not be written; raises DataError."""
        traces, failed = self._reader.traces(answer.response(), answer.request, domain=answer.domain), None
        for trace in traces:
            try:
                self._store.append(trace)
            except StoreError as error:
                failed = error
        return [len(trace) for trace in traces], failed

    def flush(self) -> None:
        """Write what was appended; raises StoreError."""
        self._store.flush()

    def close(self) -> None:
        """Write what was appended, and close the store; raises StoreError."""
        self._store.close()


class ReadingProcess:
    """
    A [`Reading`] in a process of its own, as reading takes a processor for some ms an answer, which in this process no
    event of another answer could use. Where the system can do so (Linux), it reads what is not urgent when a processor
    is idle, and makes way at once. Where that process dies, what it had not written is lost, and the next call starts
    another one. When this process dies, the other one writes what it has and ends.

    Args:
        reader (`ResponseReader`), store (`CorrectionStore`): As of a [`Reading`]; the process writes to the store's
            folder as another writer.

    Raises:
        StoreError: no process can be started.
    """

    def __init__(self, reader: ResponseReader, store: CorrectionStore) -> None:
        self.num_logprobs = reader.num_logprobs
        self._of = (reader, store)
        self._pool: ProcessPoolExecutor | None = None
        self.flush()  # of nothing yet: it waits until the process is there

    def keep(self, answer: Answer, *, is_urgent: bool = False) -> tuple[list[int], StoreError | None]:
        """As [`Reading.keep`]; raises StoreError too, where the process has died."""
        method = Reading.keep if is_urgent else _keep_at_leisure
        found: tuple[list[int], StoreError | None] = self._call(method, answer)
        return found

    def flush(self) -> None:
        """As [`Reading.flush`]."""
        self._call(Reading.flush)

    def close(self) -> None:
        """As [`Reading.close`], and end the process."""
        if self._pool is not None:
            try:
                self._call(Reading.close)
            finally:
                pool, self._pool = self._pool, None
                if pool is not None:
                    pool.shutdown()

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            if self._pool is None:
                spawned = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(1, spawned, initializer=_begin, initargs=self._of)
            return self._pool.submit(_do, method, *args).result()
        except (BrokenProcessPool, OSError) as error:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.shutdown(wait=False)
            raise StoreError("the process that reads answers has ended, or cannot be started") from error


# Set in the process that reads, and nowhere else.
_reading: Reading | None = None
_leisure: ThreadPoolExecutor | None = None


def _begin(reader: ResponseReader, store: CorrectionStore) -> None:
    """Make ready for [`_do`], in a new process."""
    global _reading, _leisure
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends when it is told to by the other process
        signal.signal(number, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    _reading = Reading(reader, store)
    _leisure = ThreadPoolExecutor(1, "osd_hf-leisure", initializer=_make_way)
    threading.Thread(target=_end_with_parent, args=(_reading,), name="osd_hf-end-with-parent", daemon=True).start()


def _make_way() -> None:
    """Let this thread run when a processor has nothing else to do."""
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _end_with_parent(reading: Reading) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    try:
        reading.close()
    finally:
        os._exit(1)


def _do(method: Callable[..., Any], *args: Any) -> Any:
    assert _reading is not None
    return method(_reading, *args)


def _keep_at_leisure(reading: Reading, answer: Answer) -> tuple[list[int], StoreError | None]:
    assert _leisure is not None
    return _leisure.submit(reading.keep, answer).result()


# --- keeping --------------------------------------------------------------------------------------------------------


class Keeper:
    """
    Has answers read and stored, one after the other, by a thread of its own. It raises nothing: what fails is counted,
    and each kind of it said once in the log, until it works again.

    Args:
        reading (`ReadingProcess` or `Reading`): Reads and stores them.
        counts (`ProxyCounts`): Counts what becomes of them.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`): Seconds.
    """

    def __init__(
        self,
        reading: Reading | ReadingProcess,
        counts: ProxyCounts,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_logprobs, self.counts = reading.num_logprobs, counts
        self._reading, self._clock = reading, clock
        self._queue: queue.Queue[Recording | None] = queue.Queue(MOST_WAITING)
        self._held, self._lock = 0, threading.Lock()
        self._failed_until = -float("inf")
        self._is_failing = self._is_dirty = self._is_closing = False
        self._told = set[str]()  # kinds of failure
        self._thread = threading.Thread(target=self._run, name="osd_hf-proxy-keeper", daemon=True)
        self._thread.start()

    @property
    def is_taking(self) -> bool:
        """Whether an answer would be kept now."""
        is_resting = self._is_failing and self._clock() < self._failed_until
        return not (is_resting or self._queue.full() or self._held >= MOST_BYTES)

    def hold(self, nbytes: int) -> bool:
        """Take or, where negative, give back memory for answers; whether there is as much."""
        with self._lock:
            has_room = nbytes <= 0 or self._held + nbytes <= MOST_BYTES
            self._held += nbytes if has_room else 0
        return has_room

    def put(self, recording: Recording) -> None:
        """Read and store a whole answer soon; where too many wait, it is dropped."""
        try:
            self._queue.put_nowait(recording)
        except queue.Full:
            recording.drop()

    def close(self) -> None:
        """Store what waits, and write it."""
        self._is_closing = True
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
                self._failed_until = -float("inf")  # once more
                self._flush()
                return
            try:
                self._keep(recording)
            except Exception as error:  # noqa: BLE001  # a failure of ours costs nobody an answer
                self.counts.leave_out("it cannot be read, for a reason of ours")
                self._tell(UNREADABLE, error)
            finally:
                recording.forget()
                self._queue.task_done()

    def _keep(self, recording: Recording) -> None:
        if self._is_failing and not self._flush():
            recording.drop()
            return
        try:
            is_urgent = self._is_closing or self._queue.qsize() > MOST_AT_LEISURE
            tokens, failed = self._reading.keep(recording.answer, is_urgent=is_urgent)
        except DataError as error:
            self.counts.leave_out(str(error))
            if recording.asking is not None:
                recording.asking.was_read(failed=str(error))
            return
        except StoreError as error:  # nothing of it is stored
            self._fail(error)
            recording.drop()
            return
        if recording.asking is not None:
            recording.asking.was_read()
        self._is_dirty = True
        if failed is not None:  # the store has the answer, and writes it later
            self._fail(failed)
        self.counts.collected += len(tokens)
        self.counts.tokens += sum(tokens)
        self._told.discard(UNREADABLE)

    def _flush(self) -> bool:
        """Write what was kept, unless that has just failed; whether nothing is left to write."""
        if self._is_failing and self._clock() < self._failed_until:
            return False
        try:
            if self._is_dirty:
                self._reading.flush()
        except Exception as error:  # noqa: BLE001  # of whatever kind, the thread lives on
            self._fail(error)
            return False
        self._is_dirty = self._is_failing = False
        self._told.discard(UNWRITABLE)
        return True

    def _fail(self, error: Exception) -> None:
        self._is_failing, self._failed_until = True, self._clock() + RETRY_SECONDS
        self._tell(UNWRITABLE, error)

    def _tell(self, what: str, error: Exception) -> None:
        if what not in self._told:
            logger.warning("%s: %s. Clients are served all the same.", what, first_line(error))
        self._told.add(what)
