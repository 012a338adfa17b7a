"""Following stores that others write: each request of a finished shard is taken once, shard by shard."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from osd_hf.errors import StoreError
from osd_hf.records import Trace
from osd_hf.shards import Folder, list_shards, read_from
from osd_hf.tables import SCHEMA, table_to_traces

__all__ = ["StoreFollower"]

logger = logging.getLogger(__name__)


class StoreFollower:
    """
    New requests of stores that other processes append to.

    Args:
        paths (`Sequence[Path]`):
            Folders of the stores; made where they are missing.

    Raises:
        StoreError: a path is no store.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(dict.fromkeys(path.expanduser().absolute() for path in paths))
        for path in self.paths:
            Folder(path)
        # Writer -> number of the shard that is to be read next, and rows of it that were taken.
        self._taken: dict[str, tuple[int, int]] = {}
        self._open: tuple[str, list[Trace]] = ("", [])

    def take(self, limit: int) -> list[Trace]:
        """
        The next requests, those of each writer in their order; none where nothing new has come. A shard that cannot be
        read is left out, and the log says so: others come behind it.
        """
        taken: list[Trace] = []
        for writer, number, path in self._unread():
            traces = self._load(path)
            first = self._taken.get(writer, (number, 0))[1] if self._next(writer) == number else 0
            part = traces[first : first + limit - len(taken)]
            taken += part
            is_done = first + len(part) >= len(traces)
            self._taken[writer] = (number + 1, 0) if is_done else (number, first + len(part))
            if len(taken) == limit:
                break
        return taken

    def _next(self, writer: str) -> int:
        return self._taken.get(writer, (0, 0))[0]

    def _unread(self) -> list[tuple[str, int, str]]:
        """Writer, number and path of each shard that is not read to its end, in the order of reading."""
        found = []
        for store_number, store in enumerate(self.paths):
            for path in list_shards(store):
                file = Path(path)
                writer, number = f"{store_number}/{file.parent.name}", re.search(r"(\d+)\.parquet$", file.name)
                if number is not None and int(number[1]) >= self._next(writer):
                    found.append((writer, int(number[1]), path))
        return sorted(found, key=lambda shard: shard[1:2] + shard[:1])

    def _load(self, path: str) -> list[Trace]:
        if self._open[0] != path:
            try:
                table = read_from(path, lambda file: file.read(SCHEMA.names, use_threads=False).cast(SCHEMA))
            except StoreError as error:
                logger.warning("Left out: %s.", error)
                table = None
            self._open = (path, [] if table is None else table_to_traces(table))
        return self._open[1]

    def state_dict(self) -> dict[str, list[int]]:
        """What has been taken, ready for JSON."""
        return {writer: list(place) for writer, place in self._taken.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Go on behind what was taken, of the same stores in the same order."""
        self._taken = {str(writer): (int(place[0]), int(place[1])) for writer, place in state.items()}
