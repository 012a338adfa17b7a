"""Following stores that others write: each request of a finished shard is taken once, shard by shard."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from osd_hf.errors import DataError, StoreError
from osd_hf.store.arrow import readable_traces
from osd_hf.store.folder import list_shards, open_store, read_table, store_errors
from osd_hf.trace import Trace
from osd_hf.utils.disk import FileLock, hold_lock, write_whole

__all__ = ["LogReader", "StoreFollower"]

logger = logging.getLogger(__name__)

HEAD_BYTES = 1024  # of a log, by which it is known again
LOG_BYTES = 1 << 20  # read at once
LINE_BYTES = 1 << 27  # of one line: an answer of a hundred thousand tokens with twenty log-probs each


class LogReader:
    """
    New whole lines of a growing log. A line without its end is left until it has one, and what has come of it is not
    read again until then; one longer than 128 MiB is passed over, so that no line takes more memory than that. A log
    that was rotated away is read to its end before the new one is begun.

    Args:
        path (`Path`):
            Of JSON lines.
        place (`Path`, *optional*):
            File that keeps how far the log has been read, so that another run goes on there.

    Raises:
        DataError: there is no such file, or it cannot be read.
        ConfigError: another process reads it for the same `place`.

    Attributes:
        has_rest (`bool`):
            Whether there was a line without its end behind the last whole one.
        too_long (`int`):
            Lines passed over because they are too long.
    """

    def __init__(self, path: Path, place: Path | None = None) -> None:
        self.path, self.place = path, place
        self.has_rest, self.too_long = False, 0
        # Of the line that comes next: where it starts and how far its end has been searched for; whether it is passed
        # over, and whether there is something in it.
        self.offset = self._end = self._start = self._searched = 0
        self._is_inside = self._has_text = False
        self._head = b""
        self._was_seen_rotated = False
        self._lock: FileLock | None = None
        try:
            self._file = path.open("rb")
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

    def _resume(self) -> None:
        if self.place is None:
            return
        self._lock = hold_lock(
            self.place.with_suffix(".lock"),
            f"Another collector reads {self.path} into this store, or its file system has no locks. Stop it, or take "
            "another store.",
        )
        if not self.place.exists():
            return
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
                "gained behind byte %d is not read.", self.path, offset,
            )  # fmt: skip

    def lines(self) -> Iterator[bytes]:
        """The lines that have come, without their ends."""
        yield from self._whole_lines()
        if not self._is_rotated():
            return
        if not self._was_seen_rotated:  # who writes may hold the old one for a while: it is read once more later
            self._was_seen_rotated = True
            return
        yield from self._whole_lines()
        if self.has_rest:  # nobody writes its end any more
            self._file.seek(self.offset)
            self._end = self.offset
            yield self._file.read(self._searched - self.offset)
        try:
            file = self.path.open("rb")
        except OSError:  # gone again, or not to be read yet
            return
        self._file.close()
        self._file, self._head, self._was_seen_rotated = file, b"", False
        self._begin(0)
        yield from self._whole_lines()

    def _whole_lines(self) -> Iterator[bytes]:
        size = os.fstat(self._file.fileno()).st_size
        self._file.seek(0)
        if size < self.offset or self._file.read(len(self._head)) != self._head:
            self._begin(0)  # it was emptied in place, and may have grown since
        elif self._start != self.offset or size < self._searched:
            self._begin(self.offset, is_inside=self._is_inside)
        while True:
            self._file.seek(self._searched)
            at = self._searched
            *ended, rest = self._file.read(LOG_BYTES).split(b"\n")
            for piece in ended:
                line = self._line(at, piece)
                at += len(piece) + 1
                self._start = self._searched = self._end = at
                self._is_inside = self._has_text = False
                if line is not None:
                    yield line
                self.offset = self._end
            if not rest and not ended:
                break
            self._searched = at + len(rest)
            self._has_text = self._has_text or bool(rest.strip())
            if self._is_inside or self._is_too_long(self._searched):
                self.offset = self._end = self._start = self._searched
                self._is_inside = True
        self.has_rest = self._has_text and not self._is_inside
        self._head = self._read_head()

    def _begin(self, offset: int, *, is_inside: bool = False) -> None:
        """Go on at a line's start, or inside a line that is passed over."""
        self.offset = self._end = self._start = self._searched = offset
        self._is_inside, self._has_text = is_inside, False

    def _line(self, at: int, piece: bytes) -> bytes | None:
        """The line that ends with this piece, which stands at a place of the file; `None` of one too long."""
        if self._is_inside or self._is_too_long(at + len(piece)):
            return None
        if self._start == at:
            return piece
        self._file.seek(self._start)
        return self._file.read(at - self._start) + piece

    def _is_too_long(self, end: int) -> bool:
        if end - self._start <= LINE_BYTES:
            return False
        self.too_long += 1
        logger.warning("Left out: a line of %s longer than %d bytes.", self.path, LINE_BYTES)
        return True

    def _is_rotated(self) -> bool:
        """Whether another file has the name now."""
        try:
            now = self.path.stat()
        except OSError:
            return False  # until the new one is there
        mine = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (mine.st_dev, mine.st_ino)

    def accept(self) -> None:
        """The line that came last is dealt with; by itself that is so when the next one is asked for."""
        self.offset = self._end

    def _read_head(self) -> bytes:
        """The first bytes of what has been read."""
        here = self._file.tell()
        self._file.seek(0)
        head = self._file.read(min(HEAD_BYTES, self.offset))
        self._file.seek(here)
        return head

    def commit(self) -> None:
        """Keep how far it has been read, without the line that came last if it is not accepted; raises StoreError
        where it cannot be written."""
        if self.place is None:
            return
        head = self._read_head()
        kept = {
            "head_bytes": len(head), "head_sha256": hashlib.sha256(head).hexdigest(), "offset": self.offset,
            "is_inside": self._is_inside and self.offset == self._start,
        }  # fmt: skip
        with store_errors("write", self.place):
            write_whole(self.place, json.dumps(kept).encode())

    def close(self) -> None:
        """Let the file go."""
        self._file.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


ATTEMPTS = 5  # at a shard that cannot be read before it is left out


class StoreFollower:
    """
    New requests of stores that other processes append to.

    Args:
        paths (`Sequence[Path]`):
            Folders of the stores; made where they are missing.

    Raises:
        StoreError: a path is no store.

    Attributes:
        is_waiting (`bool`):
            Whether a shard could not be read just now, and is tried again later.
        left_out (`Counter[str]`):
            Shards and requests that cannot be read, by reason.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(dict.fromkeys(path.expanduser().absolute() for path in paths))
        for path in self.paths:
            open_store(path)
        # Writer -> number of the shard that is to be read next, and rows of it that were taken. No two writers of any
        # stores have one name.
        self._taken: dict[str, tuple[int, int]] = {}
        self._unread: list[tuple[int, str, str]] = []
        self._failed: Counter[str] = Counter()
        self.is_waiting = False
        self.left_out: Counter[str] = Counter()
        self._open: tuple[str, list[Trace | None]] = ("", [])

    def take(self, limit: int) -> list[Trace]:
        """
        The next requests, those of each writer in their order; none where nothing new has come. A shard that again
        and again cannot be read is left out, and the log says so: others come behind it.

        Raises:
            StoreError: a store cannot be listed, again and again.
        """
        if not self._unread:
            self._unread = self._listed()
        taken: list[Trace] = []
        while self._unread and len(taken) < limit:
            number, writer, path = self._unread[0]
            traces = self._load(path)
            if traces is None:  # it is tried again at the next look, and what its writer has behind it comes after it
                self._unread = [shard for shard in self._unread if shard[1] != writer]
                continue
            begin, first = self._taken.get(writer, (number, 0))
            first = first if begin == number else 0
            part = traces[first : first + limit - len(taken)]
            readable = [trace for trace in part if trace is not None]
            taken += readable
            if len(readable) < len(part):
                self.left_out["that cannot be read"] += len(part) - len(readable)
                logger.warning("Left out: %d requests of %s that cannot be read.", len(part) - len(readable), path)
            is_done = first + len(part) >= len(traces)
            self._taken[writer] = (number + 1, 0) if is_done else (number, first + len(part))
            if is_done:
                del self._unread[0]
        return taken

    def _listed(self) -> list[tuple[int, str, str]]:
        """Number, writer and path of each shard that is not read to its end, in the order of reading; nothing where a
        store is away for a moment."""
        try:
            found = self._found()
        except StoreError as error:
            self._failed[""] += 1
            if self._failed[""] == ATTEMPTS:
                raise
            logger.warning("Tried again: %s.", error)
            self.is_waiting = True
            return []
        self._failed[""], self.is_waiting = 0, False
        return sorted(found)

    def _found(self) -> list[tuple[int, str, str]]:
        found = []
        for store in self.paths:
            for path in list_shards(store):
                file = Path(path)
                writer, number = file.parent.name, re.search(r"(\d+)\.parquet$", file.name)
                if number is not None and int(number[1]) >= self._taken.get(writer, (0, 0))[0]:
                    found.append((int(number[1]), writer, path))
        return found

    def _load(self, path: str) -> list[Trace | None] | None:
        """The requests of a shard, `None` for one that cannot be read; `None` where it should be tried again."""
        if self._open[0] == path:
            return self._open[1]
        try:
            table = read_table(path)
            self._open = (path, [] if table is None else readable_traces(table))
        except (StoreError, ValueError, TypeError, MemoryError, pa.ArrowException) as error:
            self._failed[path] += 1
            if self._failed[path] < ATTEMPTS:
                self.is_waiting = True
                return None
            logger.warning("Left out: %s.", error)
            del self._failed[path]
            self.left_out["of shards that cannot be read, counted by shard"] += 1
            self._open = (path, [])
        return self._open[1]

    def state_dict(self) -> dict[str, list[int]]:
        """What has been taken, ready for JSON."""
        return {writer: list(place) for writer, place in self._taken.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Go on behind what was taken."""
        self._taken = {str(writer): (int(place[0]), int(place[1])) for writer, place in state.items()}
        self._unread.clear()
