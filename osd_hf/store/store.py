"""Keeps traces: in memory, or in a folder of Parquet shards that many processes write and read at once."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from osd_hf.errors import ConfigError, DataError, StoreError
from osd_hf.store.arrow import SCHEMA, table_to_traces, traces_to_table
from osd_hf.store.folder import Folder, Shard
from osd_hf.trace import Trace, misshapen
from osd_hf.utils.disk import in_child

if TYPE_CHECKING:
    import datasets

__all__ = ["CorrectionStore", "table_to_traces", "traces_to_table"]

logger = logging.getLogger(__name__)

FLUSH_BYTES = 32 << 20
CREATED = attrgetter("created_at_seconds")  # by which traces are ordered
HOLD_SECONDS = 3600.0  # for which a clock that leapt must go on before anything is deleted by it


def _steady_seconds() -> float:
    """Seconds that nobody sets, those in which the machine sleeps included where the system counts them."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class _Calendar:
    """
    The time by which traces may be deleted. A wall clock may be set wrong for a while, and what was deleted by it does
    not come back. So a leap of more than `most` seconds of the wall clock against a steady one counts only when the
    wall clock has gone on from there for `hold` seconds; until then time goes on by the steady one.
    """

    def __init__(self, clock: Callable[[], float], steady: Callable[[], float], most: float, hold: float) -> None:
        self.clock, self.steady, self.most, self.hold = clock, steady, most, hold
        self._ahead = clock() - steady()  # of the wall clock, as it is believed
        self._leapt: tuple[float, float] | None = None  # how far it is ahead since a leap, and when that was seen

    def doubt(self, last: float) -> None:
        """Take what the wall clock says now for a leap from the last time that is known for certain."""
        self._leapt = (self._ahead, self.steady())
        self._ahead = last - self.steady()
        self.now()

    def now(self) -> float:
        at, wall = self.steady(), self.clock()
        ahead = wall - at
        if abs(ahead - self._ahead) > self.most:
            if self._leapt is None or abs(ahead - self._leapt[0]) > self.most:
                self._leapt = (ahead, at)
                logger.warning(
                    "The clock leapt by %.0f s; for %.0f s nothing is deleted by it.", ahead - self._ahead, self.hold
                )
            if at - self._leapt[1] < self.hold:
                return min(wall, self._ahead + at)
        self._ahead, self._leapt = ahead, None
        return wall


class _Snapshot:
    """Where the traces lay at one moment, oldest first, without those from before `cutoff`."""

    def __init__(self, folder: Folder | None, tail: list[Trace], cutoff: float) -> None:
        self.folder = folder
        self.shards = [] if folder is None else list(folder.shards.values())
        self.tail = tail.copy()
        self.starts = np.cumsum([0, *(len(s) for s in self.shards)])
        tail_times = np.array([t.created_at_seconds for t in tail], np.float64)
        times = np.concatenate([*(s.times for s in self.shards), tail_times])
        order = np.argsort(times, kind="stable")
        is_old = times[order] < cutoff
        self.order: NDArray[np.int64] = order[~is_old]

    def of_domain(self, domain: str) -> NDArray[np.int64]:
        domains = [d for s in self.shards for d in s.domains] + [t.domain for t in self.tail]
        return self.order[[domains[i] == domain for i in self.order.tolist()]]

    def load(self, index: int) -> Trace | None:
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        row = index - int(self.starts[part])
        if part == len(self.shards):
            return self.tail[row]
        assert self.folder is not None
        return self.folder.read(self.shards[part], row)


class CorrectionStore:
    """
    Traces, oldest first by `created_at_seconds`, bounded by bytes and by age. Safe to use from several threads.

    With a path, each process that appends writes Parquet shards into its own folder below the path, and every process
    sees all finished shards; `datasets.load_dataset("parquet", data_files=f"{path}/*/*.parquet")` reads them without
    this package. A shard appears whole or not at all: a killed process loses at most its unflushed tail. The tail is
    flushed when it is long or large, on `close`, and at the end of the program (a child of `multiprocessing` ends
    without that, so it must close the store). After a fork the tail and the folder stay with the parent. An unpickled
    store is another writer of the same folder.

    Args:
        path (`str` or `os.PathLike`, *optional*):
            Folder of the store, made where it is missing. In memory without one.
        max_bytes (`int`, *optional*):
            Most bytes kept: array bytes in memory, and the sizes of all writers' files. Over it, the oldest traces
            go; on disk, the oldest shards of any writer. Other processes' unflushed tails are not counted.
        max_age_seconds (`float`, *optional*):
            Traces created longer ago are not read, and each `append` or `flush` deletes them. A shard is deleted with
            its oldest trace, and spans at most an eighth of this age. A time that lies in the future is not believed:
            that of the append, or of the shard's file, counts. Nor is a clock that leaps by more than an eighth of the
            age, against a clock that nobody sets or, on opening, against the newest shard: for an hour (or the age,
            if shorter) it deletes nothing that would still be kept without the leap. A pause that long looks like a
            leap: a process that ends sooner than an hour after opening deletes by the newest shard's time, until the
            next opening.
        flush_every (`int`, defaults to 256): Traces in a shard, at most.
        clock (`Callable[[], float]`, *optional*, defaults to `time.time`): Now, in Unix seconds.
        steady (`Callable[[], float]`, *optional*):
            Seconds of a clock that nobody sets, by which leaps are told; by default the system's where `clock` is, and
            otherwise `clock`.

    Raises:
        [`ConfigError`]: a limit that is not positive.
        [`StoreError`]: the path is no store, or one that cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | None = None,
        max_age_seconds: float | None = None,
        flush_every: int = 256,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] | None = None,
    ) -> None:
        limits = {"max_bytes": max_bytes, "max_age_seconds": max_age_seconds, "flush_every": flush_every}
        for name, value in limits.items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive, got {value}")
        self.path = None if path is None else Path(path).expanduser().absolute()
        self.max_bytes = max_bytes
        self.max_age_seconds = max_age_seconds
        self.flush_every = flush_every
        self.clock = clock
        self.steady = steady or (_steady_seconds if clock is time.time else clock)
        self._open()

    def _open(self) -> None:
        self._lock = threading.RLock()
        self._tail: list[Trace] = []
        self._tail_nbytes = 0
        self._closed = False
        self._folder = None if self.path is None else Folder(self.path)
        self._age = math.inf if self.max_age_seconds is None else self.max_age_seconds
        self._calendar = _Calendar(self.clock, self.steady, self._age / 8, min(HOLD_SECONDS, self._age))
        if self._folder is not None and self.max_age_seconds is not None and self.steady is not self.clock:
            # What was written just now may have been written by the clock that is in doubt.
            before = self.clock() - self._calendar.hold
            written = [at for shard in self._folder.shards.values() if (at := _written_at(shard)) <= before]
            if written:
                self._calendar.doubt(max(written))
        in_child(self, CorrectionStore._leave_to_parent)
        _live_stores.add(self)

    def append(self, trace: Trace) -> None:
        """
        Keep one trace.

        Raises:
            DataError: the trace's arrays do not fit together, or it has no finite time.
            StoreError: the store is closed, or could not be written. In the latter case the trace is kept, and
                written by a later flush.
        """
        # One bad trace in the tail would spoil every flush, so it is refused before it gets there.
        if (wrong := misshapen(trace)) is not None:
            raise DataError(wrong)
        if not math.isfinite(trace.created_at_seconds):
            raise DataError(f"created_at_seconds must be finite, got {trace.created_at_seconds}")
        for what, name in (("domain", trace.domain), ("target", trace.target)):
            try:
                (name or "").encode()
            except UnicodeEncodeError as error:
                raise DataError(f"the {what} {name!r} is no valid Unicode") from error
        if trace.created_at_seconds > self.clock() + self._age / 8:
            trace = replace(trace, created_at_seconds=self.clock())
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            try:
                if self._folder is not None:
                    self._folder.start_writing()
                    if self._tail and self._tail_is_long(trace):
                        self.flush()
            finally:
                insort(self._tail, trace, key=CREATED)
                self._tail_nbytes += trace.nbytes
                self._enforce()
            if self._folder is not None and len(self._tail) >= self.flush_every:
                self.flush()

    def _tail_is_long(self, trace: Trace) -> bool:
        """Whether the tail should be flushed before `trace` joins it."""
        limit = FLUSH_BYTES if self.max_bytes is None else min(FLUSH_BYTES, self.max_bytes // 8)
        if self._tail_nbytes + trace.nbytes > limit or len(self._tail) >= self.flush_every:
            return True
        first, last = self._tail[0].created_at_seconds, self._tail[-1].created_at_seconds
        span = max(last, trace.created_at_seconds) - min(first, trace.created_at_seconds)
        return span > self._age / 8

    def flush(self) -> None:
        """
        Write the tail as one shard, and delete what is over the limits. In memory there is nothing to write.

        Raises:
            [`StoreError`]: it could not be written. Nothing is lost: the tail stays for a later flush.
        """
        with self._lock:
            if self._folder is not None:
                if self._tail:
                    self._folder.write(self._tail)
                    self._tail, self._tail_nbytes = [], 0
                self._folder.refresh()
                now, cutoff = self.clock(), self._calendar.now() - self._age
                from_the_future = [s for s in self._folder.shards.values() if s.oldest > now]
                for shard in [s for s in from_the_future if _written_at(s) < cutoff]:
                    self._folder.delete(shard)
            self._enforce()

    def _enforce(self) -> None:
        """Delete what is over the limits."""
        cutoff = self._calendar.now() - self._age
        self._drop(bisect_left(self._tail, cutoff, key=CREATED))
        if self._folder is not None and self._folder.oldest < cutoff:
            for shard in [s for s in self._folder.shards.values() if s.oldest < cutoff]:
                self._folder.delete(shard)
        if self.max_bytes is None or self.nbytes <= self.max_bytes:
            return
        if self._folder is not None:
            self._folder.refresh()  # other writers may have made room
            for shard in sorted(self._folder.shards.values(), key=lambda s: s.oldest):
                if self.nbytes <= self.max_bytes:
                    return
                self._folder.delete(shard)
        over, dropped = self.nbytes - self.max_bytes, 0
        while over > 0 and dropped < len(self._tail):
            over -= self._tail[dropped].nbytes
            dropped += 1
        self._drop(dropped)
        if not self._tail:
            logger.warning("max_bytes=%d has no room for a single trace", self.max_bytes)

    def _drop(self, count: int) -> None:
        self._tail_nbytes -= sum(t.nbytes for t in self._tail[:count])
        del self._tail[:count]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards known here, and of the arrays in memory."""
        with self._lock:
            return self._tail_nbytes + (0 if self._folder is None else self._folder.nbytes)

    @property
    def written_nbytes(self) -> int:
        """Bytes of the shards that this process has written, whether they are still there or not."""
        with self._lock:
            return 0 if self._folder is None else self._folder.written_nbytes

    def _snapshot(self) -> _Snapshot:
        with self._lock:
            if self._folder is not None:
                self._folder.refresh()
            return _Snapshot(self._folder, self._tail, self.clock() - self._age)

    def __len__(self) -> int:
        return len(self._snapshot().order)

    def __iter__(self) -> Iterator[Trace]:
        """The traces of this moment; what is deleted meanwhile is left out."""
        snapshot = self._snapshot()
        return (t for i in snapshot.order.tolist() if (t := snapshot.load(i)) is not None)

    def sample(
        self,
        n: int,
        *,
        rng: np.random.Generator | int | None = None,
        domain: str | None = None,
        newest: int | None = None,
    ) -> list[Trace]:
        """
        Different traces, drawn evenly.

        Args:
            n (`int`): How many; fewer come back where fewer exist.
            rng (`np.random.Generator` or `int`, *optional*): Where the randomness comes from.
            domain (`str`, *optional*), newest (`int`, *optional*):
                Draw from this domain only, and from so many of the newest traces only, counted within the domain.

        Raises:
            [`ConfigError`]: `n` or `newest` is negative.
        """
        for name, value in {"n": n, "newest": newest}.items():
            if value is not None and value < 0:
                raise ConfigError(f"{name} must not be negative, got {value}")
        snapshot = self._snapshot()
        candidates = snapshot.order if domain is None else snapshot.of_domain(domain)
        if newest is not None:
            candidates = candidates[max(0, len(candidates) - newest) :]
        drawn: list[Trace] = []
        for index in np.random.default_rng(rng).permutation(candidates).tolist():
            if len(drawn) == n:
                break
            if (trace := snapshot.load(index)) is not None:
                drawn.append(trace)
        return drawn

    def to_dataset(self) -> datasets.Dataset:
        """
        All traces as a `datasets.Dataset` in memory, one row per trace, with the columns of the shards. A store larger
        than memory is better read with `datasets.load_dataset`.
        """
        import datasets

        tables, traces = [SCHEMA.empty_table()], iter(self)
        while part := list(islice(traces, self.flush_every)):
            tables.append(traces_to_table(part))
        return datasets.Dataset(pa.concat_tables(tables))

    def close(self) -> None:
        """Flush; nothing can be appended afterwards. Reading goes on. Closing twice does nothing."""
        with self._lock:
            if self._tail and not self._closed:
                self.flush()
            self._closed = True
            if self._folder is not None:
                self._folder.stop_writing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_folder"):
            _close_quietly(self)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if not name.startswith("_")}
        with self._lock:
            return state if self._folder is not None else {**state, "_tail": self._tail.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tail = state.pop("_tail", [])
        self.__dict__.update(state)
        self._open()
        self._tail, self._tail_nbytes = tail, sum(t.nbytes for t in tail)

    def _leave_to_parent(self) -> None:
        """In a forked child: the tail is the parent's to write, and a lock may have been held by a thread there."""
        self._lock = threading.RLock()
        if self._folder is not None:
            self._tail, self._tail_nbytes = [], 0
            self._folder.forget_cache()
            self._folder.stop_writing()


def _written_at(shard: Shard) -> float:
    """When a shard's file was written; -inf where it is gone."""
    try:
        return os.stat(shard.path).st_mtime
    except OSError:
        return -math.inf


_live_stores: weakref.WeakSet[CorrectionStore] = weakref.WeakSet()


def _close_quietly(store: CorrectionStore) -> None:
    try:
        store.close()
    except StoreError as error:
        logger.warning("%d traces were lost: %s", len(store._tail), error)


@atexit.register
def _close_all() -> None:
    for store in list(_live_stores):
        _close_quietly(store)
