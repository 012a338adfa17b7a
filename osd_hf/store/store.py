"""The store of traces: in memory, or in a folder of Parquet shards that several processes write and read."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from osd_hf.errors import ConfigError, DataError, StoreError
from osd_hf.store.folder import Folder, Row, traces_to_table
from osd_hf.trace import Trace, misshapen

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

FLUSH_BYTES = 32 << 20
CREATION_TIME = attrgetter("created_at_seconds")


class CorrectionStore:
    """
    Stored traces, oldest first by `created_at_seconds`, limited by bytes and age. Safe to use from several threads.

    With a path, each process that appends writes Parquet shards into its own folder below the path, and every process
    reads all finished shards. `datasets.load_dataset("parquet", data_files=f"{path}/*/*.parquet")` reads them, too. A
    killed process loses at most its tail, the traces that are not written yet. The tail is written when it is long or
    large, on `flush` and `close`, and at the end of the program (a child of `multiprocessing` must close the store).

    Args:
        path (`str` or `os.PathLike`, *optional*): Folder of the store. Without one, the store is in memory.
        max_bytes (`int`, *optional*):
            Maximum size: bytes of arrays in memory, or sizes of the shards of all writers. Beyond it, the oldest
            traces or shards are deleted. The tails of other processes are not counted.
        max_age_seconds (`float`, *optional*):
            Older traces are not read, and each `append` and `flush` deletes them. A shard spans at most an eighth of
            this age and is deleted with its oldest trace. Creation times in the future are replaced.
        flush_every (`int`, defaults to 256): Maximum number of traces in a shard.
        clock (`Callable[[], float]`, *optional*, defaults to `time.time`): Returns the Unix time in seconds.

    Raises:
        ConfigError: A limit is not positive.
        StoreError: The path is not a store or cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | None = None,
        max_age_seconds: float | None = None,
        flush_every: int = 256,
        clock: Callable[[], float] = time.time,
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
        self._lock = threading.RLock()
        self._tail: list[Trace] = []
        self._tail_nbytes = 0
        self._closed = False
        self._age = math.inf if max_age_seconds is None else max_age_seconds
        self._folder = None if self.path is None else Folder(self.path)
        _live_stores.add(self)

    def append(self, trace: Trace) -> None:
        """Store one trace. Raises DataError if its arrays do not fit together or a field cannot be stored, and
        StoreError if the store is closed or could not be written. In the latter case the trace is kept, and a later
        flush writes it."""
        # One invalid trace in the tail would break every flush.
        if (problem := misshapen(trace)) is not None:
            raise DataError(problem)
        if trace.created_at_seconds > self.clock() + self._age / 8:
            trace = replace(trace, created_at_seconds=self.clock())
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            try:
                if self._folder is not None:
                    self._folder.start_writing()
                    # A shard is limited in bytes and in the time that it spans.
                    limit = FLUSH_BYTES if self.max_bytes is None else min(FLUSH_BYTES, self.max_bytes // 8)
                    times = [t.created_at_seconds for t in (*self._tail[:1], *self._tail[-1:], trace)]
                    is_long = max(times) - min(times) > self._age / 8
                    if self._tail and (is_long or self._tail_nbytes + trace.nbytes > limit):
                        self.flush()
            finally:  # after a failure, too
                insort(self._tail, trace, key=CREATION_TIME)
                self._tail_nbytes += trace.nbytes
                self._enforce_limits()
            if self._folder is not None and len(self._tail) >= self.flush_every:
                self.flush()

    def flush(self) -> None:
        """Write the tail as one shard, and delete what exceeds the limits. A store in memory only applies its limits.
        Raises StoreError if the shard could not be written. A later flush writes the tail."""
        with self._lock:
            if self._folder is not None:
                if self._tail:
                    self._folder.write(self._tail)
                    self._tail, self._tail_nbytes = [], 0
                self._folder.refresh()
            self._enforce_limits()

    def _enforce_limits(self) -> None:
        cutoff = self.clock() - self._age
        self._drop(bisect_left(self._tail, cutoff, key=CREATION_TIME))
        max_bytes = math.inf if self.max_bytes is None else self.max_bytes
        if self._folder is not None:
            for shard in sorted(self._folder.shards.values(), key=lambda s: s.oldest):
                if self.nbytes <= max_bytes and shard.oldest >= cutoff:
                    break
                self._folder.delete(shard)
        while self._tail and self.nbytes > max_bytes:
            self._drop(1)
            if not self._tail:
                logger.warning("max_bytes=%d is too small for a single trace", max_bytes)

    def _drop(self, count: int) -> None:
        self._tail_nbytes -= sum(t.nbytes for t in self._tail[:count])
        del self._tail[:count]

    @property
    def nbytes(self) -> int:
        """Bytes of all known shards and of the arrays in memory."""
        with self._lock:
            return self._tail_nbytes + (0 if self._folder is None else self._folder.nbytes)

    def _entries(self) -> list[Row | Trace]:
        """Return the traces of this moment in memory and on disk, oldest first."""
        entries: list[Row | Trace] = []
        with self._lock:
            if self._folder is not None:
                self._folder.refresh()
                entries += [row for shard in self._folder.shards.values() for row in shard.rows]
            entries += self._tail
            entries.sort(key=CREATION_TIME)
            return entries[bisect_left(entries, self.clock() - self._age, key=CREATION_TIME) :]

    def _load(self, entries: Iterable[Row | Trace]) -> Iterator[Trace]:
        """Yield the traces of entries that are not deleted."""
        for entry in entries:
            trace = entry if isinstance(entry, Trace) else cast(Folder, self._folder).read(entry)
            if trace is not None:
                yield trace

    def __len__(self) -> int:
        return len(self._entries())

    def __iter__(self) -> Iterator[Trace]:
        """Iterate over the traces of this moment. Traces that are deleted during the iteration are skipped."""
        return self._load(self._entries())

    def sample(
        self,
        n: int,
        *,
        rng: np.random.Generator | int | None = None,
        domain: str | None = None,
        newest: int | None = None,
    ) -> list[Trace]:
        """
        Draw different traces with equal probability.

        Args:
            n (`int`): Number of traces; fewer are returned if fewer exist.
            rng (`np.random.Generator` or `int`, *optional*): Source of randomness.
            domain (`str`, *optional*): Draw from this domain only.
            newest (`int`, *optional*): Draw from this number of newest traces only, counted within the domain.

        Raises:
            ConfigError: `n` or `newest` is negative.
        """
        for name, value in {"n": n, "newest": newest}.items():
            if value is not None and value < 0:
                raise ConfigError(f"{name} must not be negative, got {value}")
        entries = [entry for entry in self._entries() if domain in (None, entry.domain)]
        if newest is not None:
            entries = entries[max(0, len(entries) - newest) :]
        order = np.random.default_rng(rng).permutation(len(entries)).tolist()
        return list(islice(self._load(entries[i] for i in order), n))

    def to_dataset(self) -> datasets.Dataset:
        """Return all traces as a `datasets.Dataset` in memory, one row per trace, with the columns of the shards. Use
        `datasets.load_dataset` for a store that is larger than the memory."""
        import datasets

        return datasets.Dataset(traces_to_table(list(self)))

    def close(self) -> None:
        """Write the tail. Afterwards nothing can be appended, and reading still works."""
        with self._lock:
            if self._tail and not self._closed:
                self.flush()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        """Let another process open the folder again."""
        if self.path is None:
            raise TypeError("a store in memory cannot be pickled")
        names = ("max_bytes", "max_age_seconds", "flush_every", "clock")
        return partial(CorrectionStore, self.path, **{name: getattr(self, name) for name in names}), ()

    def __del__(self) -> None:
        if hasattr(self, "_folder"):
            _close_quietly(self)


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


def _begin_in_child() -> None:
    """Leave the tails, and locks that other threads may hold, to the parent of a forked process."""
    for store in list(_live_stores):
        store._lock = threading.RLock()
        if store._folder is not None:
            store._tail, store._tail_nbytes = [], 0
            store._folder.own = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
