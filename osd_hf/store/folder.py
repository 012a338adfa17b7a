"""The folder of a store on disk: one subfolder of Parquet shards per writer. Other processes can follow it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from osd_hf.errors import StoreError
from osd_hf.store.arrow import OPTIONAL_COLUMNS, PARQUET, SCHEMA, table_to_traces, traces_to_table
from osd_hf.trace import Trace
from osd_hf.utils.disk import FileLock, is_open_to_others, make_private_folder, sync_folder, wait_for_lock, write_whole

__all__ = ["Folder", "Shard", "StoreFollower", "list_shards", "open_store", "read_from", "store_errors"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A leading dot hides the marker, locks, and unfinished files from `datasets.load_dataset`.
MARKER_NAME = ".osd_hf_store.json"
MARKER = {"format": "osd_hf correction store", "version": 1}
LOCK_NAME = ".lock"
# Only files and folders with these names are deleted.
WRITER = re.compile(r"\d{8}T\d{6}-\d+-[0-9a-f]{8}")
SHARD = re.compile(r"shard-\d{6,}\.parquet")
UNFINISHED = re.compile(r"\.shard-\d{6,}-[0-9a-f]+\.tmp")
GROUP_BYTES = 1 << 20  # array data in one row group, the unit that `sample` reads and caches
CACHED_GROUPS = 64
MAX_ATTEMPTS = 5  # to read a shard, before a follower skips it


@contextlib.contextmanager
def store_errors(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {action} {path}: {error.strerror or error}") from error


class Shard:
    """The facts about a finished shard that are kept in memory, in the order of its rows."""

    def __init__(self, path: str, file: Any) -> None:
        columns = file.read(["created_at_seconds", "domain"], use_threads=False).to_pydict()
        group_sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        folder, name = os.path.split(path)
        self.path = path
        self.nbytes = os.path.getsize(path)
        # The clock of the writer may have been wrong.
        self.times = np.minimum(np.array(columns["created_at_seconds"], np.float64), os.path.getmtime(path))
        self.domains: list[str | None] = [domain and sys.intern(domain) for domain in columns["domain"]]
        self.group_starts = np.cumsum([0, *group_sizes[:-1]])
        self.oldest = float(self.times.min(initial=math.inf))
        # Other files are never deleted.
        self.is_written_here = bool(SHARD.fullmatch(name) and WRITER.fullmatch(os.path.basename(folder)))

    def __len__(self) -> int:
        return len(self.times)


def list_shards(store: Path) -> list[str]:
    """Return the paths of the finished shards of all writers, sorted by writer and number."""
    paths: list[str] = []
    with store_errors("list the store", store):
        for writer in sorted(entry.path for entry in os.scandir(store) if entry.is_dir()):
            with contextlib.suppress(FileNotFoundError):  # deleted by another writer
                names = sorted(n for n in os.listdir(writer) if n.endswith(".parquet") and not n.startswith("."))
                paths += [os.path.join(writer, name) for name in names]
    return paths


def read_from(path: str, extract: Callable[[Any], T]) -> T | None:
    """Return the result of `extract` on a shard's file, or `None` if the shard is deleted."""
    try:
        with open(path, "rb") as raw, pq.ParquetFile(raw, page_checksum_verification=True) as file:
            if missing := [name for name in SCHEMA.names if name not in (*file.schema_arrow.names, *OPTIONAL_COLUMNS)]:
                raise StoreError(f"{path} is not a shard of this store: it lacks {', '.join(missing)}")
            return extract(file)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException) as error:
        raise StoreError(
            f"the shard {path} cannot be read: {error}. Move it out of the store to continue without it"
        ) from error


def open_store(path: Path) -> None:
    """Turn a new or empty folder into a store; raises StoreError for a folder that is not a store."""
    marker = path / MARKER_NAME
    with store_errors("open the store", path):
        if path.exists() and not path.is_dir():
            raise StoreError(f"{path} is a file; a store is a folder: give the path of a new or empty one")
        make_private_folder(path)
        if not marker.exists():
            found = sorted(p.name for p in path.iterdir() if not p.name.startswith(MARKER_NAME[:-5]))
            if found and not marker.exists():  # checked again, as another process may have created the store
                shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
                raise StoreError(
                    f"{path} is not a store of this package: it contains {shown} and no {MARKER_NAME}. Give the path "
                    "of a new or empty folder, or of an existing store"
                )
            if not found:
                write_whole(marker, json.dumps(MARKER).encode())
        text = marker.read_bytes()
    try:
        content = json.loads(text)
    except ValueError as error:
        raise StoreError(
            f"{marker} cannot be read: {error}. If the folder is a store, restore the file as {json.dumps(MARKER)}"
        ) from error
    if content != MARKER:
        raise StoreError(f"{marker} is not the marker of a store that this package reads: {str(content)[:80]}")


def _read_group(path: str, group: int) -> list[Trace] | None:
    return read_from(path, lambda file: table_to_traces(file.read_row_group(group, use_threads=False)))


class Folder:
    """Shards of all writers of one store. Only `read` may be called without a lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards: dict[str, Shard] = {}  # sorted by writer and number
        self.own: Path | None = None
        self.own_count = 0
        self.written_nbytes = 0
        self.lock: FileLock | None = None
        self.read_group = lru_cache(CACHED_GROUPS)(_read_group)
        open_store(path)
        self.refresh()
        self._warn_about_readers()

    @property
    def nbytes(self) -> int:
        """Bytes of the shards that stores have written."""
        return sum(shard.nbytes for shard in self.shards.values() if shard.is_written_here)

    @property
    def oldest(self) -> float:
        """Time of the oldest trace."""
        return min((shard.oldest for shard in self.shards.values()), default=math.inf)

    def _warn_about_readers(self) -> None:
        """Warn if other users of this machine can read the store, for example after it was copied."""
        folders = {os.path.dirname(path) for path in self.shards}
        with contextlib.suppress(OSError):
            if is_open_to_others(self.path) and any(is_open_to_others(Path(folder)) for folder in folders):
                logger.warning(
                    "Other users of this machine may read the requests in %s. If they should not: chmod -R go= %s",
                    self.path, self.path,
                )  # fmt: skip

    def refresh(self) -> None:
        """Find the shards that other writers have added and deleted."""
        known = self.shards
        found = {path: known.get(path) or read_from(path, partial(Shard, path)) for path in list_shards(self.path)}
        self.shards = {path: shard for path, shard in found.items() if shard is not None}

    def read(self, shard: Shard, row: int) -> Trace | None:
        """Return one trace, or `None` if its shard is deleted."""
        group = int(np.searchsorted(shard.group_starts, row, side="right")) - 1
        traces = self.read_group(shard.path, group)
        return None if traces is None else traces[row - int(shard.group_starts[group])]

    def start_writing(self) -> None:
        """Create a folder for this process, and clean up after dead writers."""
        if self.own is not None:
            return
        with store_errors("write to the store", self.path):
            self._sweep()
            stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
            own = self.path / f"{stamp}-{os.getpid()}-{secrets.token_hex(4)}"
            own.mkdir(0o700)
            sync_folder(self.path)
            self.lock = wait_for_lock(own / LOCK_NAME, 1.0)
            self.own = own
        traces_to_table([])  # pyarrow imports pandas at the first conversion, which fails while Python exits

    def write(self, traces: Sequence[Trace]) -> None:
        """Write a shard, which the next `refresh` finds."""
        self.start_writing()
        assert self.own is not None
        sink = pa.BufferOutputStream()
        group_size = max(1, GROUP_BYTES * len(traces) // sum(trace.nbytes for trace in traces))
        pq.write_table(traces_to_table(traces), sink, row_group_size=group_size, **PARQUET)
        data = sink.getvalue()
        path = self.own / f"shard-{self.own_count + 1:06d}.parquet"
        with store_errors("write", path):
            write_whole(path, data)
        self.own_count += 1
        self.written_nbytes += data.size

    def delete(self, shard: Shard) -> None:
        """Delete a shard, unless it was not written by a store."""
        if not shard.is_written_here:
            return
        path = Path(shard.path)
        with store_errors("delete", path):
            path.unlink(missing_ok=True)
        self.shards.pop(shard.path, None)

    def stop_writing(self) -> None:
        if self.lock is not None:
            self.lock.release()
        self.own = self.lock = None
        self.own_count = 0

    def _sweep(self) -> None:
        """Delete unfinished files of dead writers, which hold no lock, and their folders if no shard is left."""
        for writer in [p for p in self.path.iterdir() if WRITER.fullmatch(p.name) and (p / LOCK_NAME).exists()]:
            with contextlib.suppress(OSError):  # locked, or owned by another user
                lock = wait_for_lock(writer / LOCK_NAME, 0.0)
                try:
                    if lock.is_locked:
                        _clean_up(writer)
                finally:
                    lock.release()


def _clean_up(writer: Path) -> None:
    for file in writer.iterdir():
        if UNFINISHED.fullmatch(file.name):
            file.unlink()
    if {path.name for path in writer.iterdir()} == {LOCK_NAME}:
        (writer / LOCK_NAME).unlink()
        writer.rmdir()


def _origins(file: Any) -> list[dict[str, Any]]:
    """Return the target, domain, vocabulary, and time of each request, if the shard has them."""
    names = ["target", "domain", "vocab_size", "created_at_seconds"]
    return file.read(names, use_threads=False).to_pylist() if "target" in file.schema_arrow.names else []


class StoreFollower:
    """
    Reader of new requests in stores that other processes append to. Each request of a finished shard is taken once.
    Missing stores are created. Raises StoreError if a path is not a store.

    Attributes:
        is_waiting (`bool`): Whether a shard could not be read, and is tried again later.
        left_out (`Counter[str]`): Number of skipped shards by reason.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(dict.fromkeys(path.expanduser().absolute() for path in paths))
        for path in self.paths:
            open_store(path)
        self.is_waiting = False
        self.left_out: Counter[str] = Counter()
        # Writer -> number of the shard to read next, and number of its rows that were taken. Names of writers are
        # unique across stores.
        self._taken: dict[str, tuple[int, int]] = {}
        self._unread: list[tuple[int, str, str]] = []  # number, writer, and path of each shard in reading order
        self._failed: Counter[str] = Counter()  # attempts by path; "" means the list of shards
        self._loaded: tuple[str, list[Trace]] = ("", [])

    def take(self, limit: int) -> list[Trace]:
        """Return up to `limit` new requests, those of each writer in order. A shard that cannot be read after several
        attempts is skipped and logged. Raises StoreError if a store cannot be listed after several attempts."""
        if not self._unread:
            self._unread = self._list_unread()
        taken: list[Trace] = []
        while self._unread and len(taken) < limit:
            number, writer, path = self._unread[0]
            traces = self._load(path)
            if traces is None:  # tried again at the next call; later shards of this writer wait for it
                self._unread = [shard for shard in self._unread if shard[1] != writer]
                continue
            begin, first = self._taken.get(writer, (number, 0))
            first = first if begin == number else 0
            part = traces[first : first + limit - len(taken)]
            taken += part
            is_finished = first + len(part) >= len(traces)
            self._taken[writer] = (number + 1, 0) if is_finished else (number, first + len(part))
            if is_finished:
                del self._unread[0]
        return taken

    def targets(self, domain: str | None = None, vocab_size: int | None = None) -> dict[str, float]:
        """Return the target versions of the stored requests (of one domain and one vocabulary, if given) with the Unix
        time of the newest request of each."""
        newest: dict[str, float] = {}
        for path in (path for store in self.paths for path in list_shards(store)):
            with contextlib.suppress(StoreError):  # `take` reports it
                for row in read_from(path, _origins) or ():
                    is_selected = domain in (None, row["domain"]) and vocab_size in (None, row["vocab_size"])
                    if is_selected and (version := row["target"]) is not None:
                        newest[version] = max(newest.get(version, -math.inf), row["created_at_seconds"])
        return newest

    def _list_unread(self) -> list[tuple[int, str, str]]:
        """Return the shards that are not completely read; none if a store is temporarily unavailable."""
        try:
            paths = [Path(path) for store in self.paths for path in list_shards(store)]
        except StoreError as error:
            self._failed[""] += 1
            if self._failed[""] == MAX_ATTEMPTS:
                raise
            logger.warning("Trying again: %s.", error)
            self.is_waiting = True
            return []
        self._failed[""] = 0
        self.is_waiting = False
        numbered = [(re.search(r"(\d+)\.parquet$", path.name), path.parent.name, str(path)) for path in paths]
        shards = [(int(number[1]), writer, path) for number, writer, path in numbered if number is not None]
        return sorted(shard for shard in shards if shard[0] >= self._taken.get(shard[1], (0, 0))[0])

    def _load(self, path: str) -> list[Trace] | None:
        """Return the requests of a shard, or `None` if it should be tried again."""
        if self._loaded[0] == path:
            return self._loaded[1]
        try:
            table = read_from(path, lambda file: file.read(SCHEMA.names, use_threads=False))
            self._loaded = (path, [] if table is None else table_to_traces(table))
        except (StoreError, ValueError, TypeError, MemoryError, pa.ArrowException) as error:
            self._failed[path] += 1
            if self._failed[path] < MAX_ATTEMPTS:
                self.is_waiting = True
                return None
            logger.warning("Skipped: %s.", error)
            del self._failed[path]
            self.left_out["of shards that cannot be read, counted by shard"] += 1
            self._loaded = (path, [])
        return self._loaded[1]

    def state_dict(self) -> dict[str, list[int]]:
        """Return what was taken, ready for JSON."""
        return {writer: list(place) for writer, place in self._taken.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[int]], left_out: Mapping[str, int] | None = None) -> None:
        """Continue after the requests that were taken and skipped."""
        self._taken = {str(writer): (int(place[0]), int(place[1])) for writer, place in state.items()}
        self.left_out.update(left_out)
        self._unread.clear()
