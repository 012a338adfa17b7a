"""Following stores that others write: each request of a finished shard is taken once, shard by shard."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from osd_hf.errors import StoreError
from osd_hf.records import Trace
from osd_hf.shards import list_shards, open_store, read_table
from osd_hf.tables import readable_traces

__all__ = ["StoreFollower"]

logger = logging.getLogger(__name__)

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
