"""The folder of a store on disk: one subfolder of Parquet shards per writer, which other processes can follow."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from osd_hf.errors import StoreError
from osd_hf.trace import DraftRound, Trace, ids_dtype
from osd_hf.utils.disk import make_private_folder, write_whole
from osd_hf.utils.report import plain

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A leading dot hides the marker and unfinished files from `datasets.load_dataset`.
MARKER_NAME = ".osd_hf_store.json"
MARKER = {"format": "osd_hf correction store", "version": 1}
# Only files and folders with these names are deleted.
WRITER = re.compile(r"\d{8}T\d{6}-\d+-[0-9a-f]{8}")
SHARD = re.compile(r"shard-\d{6,}\.parquet")
UNFINISHED = re.compile(r"\.shard-\d{6,}-[0-9a-f]+\.tmp")
UNFINISHED_SECONDS = 3600.0  # after which an unfinished file is one of a killed process
GROUP_BYTES = 1 << 20  # array data in one row group, the unit that `sample` reads and caches
CACHED_GROUPS = 64
# Token ids have 32 bits, so that all shards have the same schema.
SCHEMA = pa.schema(
    [
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("decoder_prompt_ids", pa.list_(pa.int32())),
        ("drafted_ids", pa.list_(pa.list_(pa.int32()))),
        ("num_accepted", pa.list_(pa.int32())),
        ("num_emitted", pa.list_(pa.int32())),
        ("p", pa.list_(pa.list_(pa.float32()))),
        ("q", pa.list_(pa.list_(pa.float32()))),
        ("from_text", pa.list_(pa.list_(pa.uint8()))),
        ("top_logits", pa.list_(pa.list_(pa.float16()))),
        ("top_ids", pa.list_(pa.list_(pa.int32()))),
        ("tail_logprob", pa.list_(pa.float32())),
        ("vocab_size", pa.int32()),
        ("domain", pa.string()),
        ("draft_version", pa.int32()),
        ("sampling", pa.string()),
        ("created_at_seconds", pa.float64()),
        ("target", pa.string()),
    ]
)
SCALARS = ("vocab_size", "domain", "draft_version", "created_at_seconds", "target")
PARQUET = {
    "compression": "zstd",
    "use_dictionary": False,
    "use_byte_stream_split": ["top_logits.list.element.list.element"],
    "write_statistics": False,
    "write_page_checksum": True,
}


@contextlib.contextmanager
def store_errors(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {action} {path}: {error.strerror or error}") from error


class Row(NamedTuple):
    """The facts about a trace in a shard that are kept in memory, and its place."""

    created_at_seconds: float
    domain: str | None
    path: str
    group: int
    number: int


class Shard:
    """A finished shard and its rows."""

    def __init__(self, path: str, file: Any) -> None:
        columns = file.read(["created_at_seconds", "domain"], use_threads=False).to_pydict().values()
        groups = range(file.num_row_groups)
        places = [(group, i) for group in groups for i in range(file.metadata.row_group(group).num_rows)]
        folder, name = os.path.split(path)
        written_at = os.path.getmtime(path)  # the clock of the writer may have been wrong
        facts = zip(*columns, places, strict=True)
        self.path = path
        self.nbytes = os.path.getsize(path)
        self.rows = [Row(min(time or 0.0, written_at), domain, path, *place) for time, domain, place in facts]
        self.oldest = min((row.created_at_seconds for row in self.rows), default=math.inf)
        # Other files are never deleted.
        self.is_written_here = bool(SHARD.fullmatch(name) and WRITER.fullmatch(os.path.basename(folder)))


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
            if missing := [name for name in SCHEMA.names if name not in file.schema_arrow.names]:
                raise StoreError(f"{path} is not a shard of this store: it lacks {', '.join(missing)}")
            return extract(file)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException) as error:
        hint = "Move it out of the store to continue without it"
        raise StoreError(f"the shard {path} cannot be read: {error}. {hint}") from error


def open_store(path: Path) -> None:
    """Turn a new or empty folder into a store; raises StoreError for a folder that is not a store."""
    marker = path / MARKER_NAME
    with store_errors("open the store", path):
        make_private_folder(path)
        # Listed before the marker is read, as another process may create the store now.
        found = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
        if not marker.exists():
            if found:
                hint = "Give the path of a new or empty folder, or of an existing store"
                what = f"it contains {found[0]} and no {MARKER_NAME}"
                raise StoreError(f"{path} is not a store of this package: {what}. {hint}")
            write_whole(marker, json.dumps(MARKER).encode())
        text = marker.read_bytes()
    with contextlib.suppress(ValueError):
        if json.loads(text) == MARKER:
            return
    raise StoreError(f"{marker} is not the marker of a store that this package reads: {str(text)[:80]}")


class Folder:
    """Shards of all writers of one store. Only `read` may be called without a lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards: dict[str, Shard] = {}  # sorted by writer and number
        self.own: Path | None = None
        self.own_count = 0

        @lru_cache(CACHED_GROUPS)
        def read_group(path: str, group: int) -> list[Trace] | None:
            return read_from(path, lambda file: table_to_traces(file.read_row_group(group, use_threads=False)))

        self.read_group = read_group
        open_store(path)
        self.refresh()

    @property
    def nbytes(self) -> int:
        """Bytes of the shards that stores have written."""
        return sum(shard.nbytes for shard in self.shards.values() if shard.is_written_here)

    def refresh(self) -> None:
        """Find the shards that other writers have added and deleted."""
        known = self.shards
        found = {path: known.get(path) or read_from(path, partial(Shard, path)) for path in list_shards(self.path)}
        self.shards = {path: shard for path, shard in found.items() if shard is not None}

    def read(self, row: Row) -> Trace | None:
        """Return one trace, or `None` if its shard is deleted."""
        traces = self.read_group(row.path, row.group)
        return None if traces is None else traces[row.number]

    def start_writing(self) -> None:
        """Create a folder for this process, and delete what killed writers have left."""
        if self.own is not None and self.own.exists():  # an old empty folder may be deleted by other writers
            return
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        own = self.path / f"{stamp}-{os.getpid()}-{secrets.token_hex(4)}"
        with store_errors("write to the store", self.path):
            for writer in self.path.iterdir():
                if WRITER.fullmatch(writer.name):
                    _clean_up(writer)
            make_private_folder(own)
        self.own, self.own_count = own, 0
        traces_to_table([])  # pyarrow imports pandas at the first conversion, which fails while Python exits

    def write(self, traces: Sequence[Trace]) -> None:
        """Write a shard."""
        self.start_writing()
        assert self.own is not None
        sink = pa.BufferOutputStream()
        group_size = max(1, GROUP_BYTES * len(traces) // sum(trace.nbytes for trace in traces))
        pq.write_table(traces_to_table(traces), sink, row_group_size=group_size, **PARQUET)
        path = self.own / f"shard-{self.own_count + 1:06d}.parquet"
        with store_errors("write", path):
            write_whole(path, sink.getvalue())
        self.own_count += 1
        # From memory: reading a file starts a thread of pyarrow, and a program that ends just then may crash.
        self.shards[str(path)] = Shard(str(path), pq.ParquetFile(pa.BufferReader(sink.getvalue())))

    def delete(self, shard: Shard) -> None:
        """Delete a shard, unless it was not written by a store."""
        if shard.is_written_here:
            with store_errors("delete", Path(shard.path)):
                Path(shard.path).unlink(missing_ok=True)
            self.shards.pop(shard.path, None)


def _clean_up(writer: Path) -> None:
    """Delete old unfinished files of a writer, and its folder if it is old and empty."""
    oldest = time.time() - UNFINISHED_SECONDS
    with contextlib.suppress(OSError):  # not empty, or another user's
        is_old = writer.stat().st_mtime < oldest
        for file in writer.iterdir():
            if UNFINISHED.fullmatch(file.name) and file.stat().st_mtime < oldest:
                file.unlink()
        if is_old:
            writer.rmdir()


class StoreFollower:
    """Reader of new requests in stores that other processes append to. Each request of a finished shard is taken once.
    Missing stores are created. Raises StoreError if a path is not a store."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(dict.fromkeys(path.expanduser().absolute() for path in paths))
        for path in self.paths:
            open_store(path)
        self.left_out: Counter[str] = Counter()  # number of skipped shards by reason
        # Writer -> number of the shard to read next, and number of its rows that were taken. Names of writers are
        # unique across stores.
        self._taken: dict[str, tuple[int, int]] = {}
        self._loaded: tuple[str, list[Trace]] = ("", [])

    def take(self, limit: int) -> list[Trace]:
        """Return up to `limit` new requests, those of each writer in order. A shard that cannot be read is skipped and
        logged. Raises StoreError if a store cannot be listed."""
        taken: list[Trace] = []
        for number, writer, path in self._unread():
            if len(taken) >= limit:
                break
            traces = self._load(path)
            begin, first = self._taken.get(writer, (number, 0))
            first = first if begin == number else 0
            end = min(first + limit - len(taken), len(traces))
            taken += traces[first:end]
            self._taken[writer] = (number + 1, 0) if end == len(traces) else (number, end)
        return taken

    def _unread(self) -> list[tuple[int, str, str]]:
        """Return number, writer, and path of the shards that are not completely taken, in reading order."""
        paths = [Path(path) for store in self.paths for path in list_shards(store)]
        numbered = [(re.search(r"(\d+)\.parquet$", path.name), path.parent.name, str(path)) for path in paths]
        shards = [(int(number[1]), writer, path) for number, writer, path in numbered if number is not None]
        return sorted(shard for shard in shards if shard[0] >= self._taken.get(shard[1], (0, 0))[0])

    def _load(self, path: str) -> list[Trace]:
        if self._loaded[0] != path:
            try:
                table = read_from(path, lambda file: file.read(SCHEMA.names, use_threads=False))
                self._loaded = (path, [] if table is None else table_to_traces(table))
            except StoreError as error:
                logger.warning("Skipped: %s.", error)
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


def traces_to_table(traces: Sequence[Trace]) -> pa.Table:
    """Return a table with one row per trace. Arrays keep their exact bits, and `sampling` becomes JSON."""
    return pa.Table.from_pylist([_trace_to_row(trace) for trace in traces], SCHEMA)


def table_to_traces(table: pa.Table) -> list[Trace]:
    """Return the traces of a table; raises StoreError for a table of something else."""
    if missing := [name for name in SCHEMA.names if name not in table.column_names]:
        raise StoreError(f"the table is not a table of traces: it lacks {', '.join(missing)}")
    try:
        columns = table.select(SCHEMA.names).cast(SCHEMA).columns
        return [_row_to_trace(dict(zip(SCHEMA.names, row, strict=True))) for row in zip(*columns, strict=True)]
    except (ValueError, TypeError, AttributeError, RecursionError, pa.ArrowException) as error:
        raise StoreError(f"the table is not a table of traces: {error}") from error


def _trace_to_row(trace: Trace) -> dict[str, Any]:
    rounds = trace.rounds
    return {
        "prompt_ids": _int32(trace.prompt_ids),
        "completion_ids": _int32(trace.completion_ids),
        "decoder_prompt_ids": None if trace.decoder_prompt_ids is None else _int32(trace.decoder_prompt_ids),
        "drafted_ids": [_int32(r.drafted_ids) for r in rounds],
        "num_accepted": [r.num_accepted for r in rounds],
        "num_emitted": [r.num_emitted for r in rounds],
        "p": _optional([r.p for r in rounds]),
        "q": _optional([r.q for r in rounds]),
        "from_text": _optional([None if r.from_text is None else r.from_text.view(np.uint8) for r in rounds]),
        "top_logits": list(trace.top_logits),
        "top_ids": list(_int32(trace.top_ids)),
        "tail_logprob": trace.tail_logprob,
        "sampling": json.dumps(plain(trace.sampling)),
        **{name: getattr(trace, name) for name in SCALARS},
    }


def _int32(ids: NDArray[Any]) -> NDArray[np.int32]:
    return ids.astype(np.int32, casting="same_kind", copy=False)  # pyarrow converts arrays of the exact type fast


def _optional(arrays: list[NDArray[Any] | None]) -> list[NDArray[Any] | None] | None:
    """Return an optional field of the rounds; `None` if no round has it."""
    return None if all(array is None for array in arrays) else arrays


def _row_to_trace(row: dict[str, Any]) -> Trace:
    """Return the trace of a row of Arrow scalars."""
    sampling = json.loads(row["sampling"].as_py())
    if not isinstance(sampling, dict):
        raise TypeError("sampling is not an object")
    scalars = {name: row[name].as_py() for name in SCALARS}
    if None in (scalars["draft_version"], scalars["created_at_seconds"]):
        raise TypeError("the draft version or the time is missing")
    return Trace(
        prompt_ids=_array(row["prompt_ids"].values),
        completion_ids=_array(row["completion_ids"].values),
        rounds=tuple(_rounds(row)),
        top_logits=_matrix(row["top_logits"].values),
        top_ids=_matrix(row["top_ids"].values).astype(ids_dtype(scalars["vocab_size"]), copy=False),
        tail_logprob=_array(row["tail_logprob"].values),
        decoder_prompt_ids=_array_or_none(row["decoder_prompt_ids"].values),
        sampling=sampling,
        **scalars,
    )


def _rounds(row: dict[str, Any]) -> Iterator[DraftRound]:
    accepted, emitted = (_array(row[name].values).tolist() for name in ("num_accepted", "num_emitted"))
    p, q, text = (row[name].values for name in ("p", "q", "from_text"))
    for j, drafted in enumerate(row["drafted_ids"].values):
        round_p, round_q, from_text = (None if c is None else _array_or_none(c[j].values) for c in (p, q, text))
        from_text = None if from_text is None else from_text.astype(bool)
        yield DraftRound(_array(drafted.values), accepted[j], emitted[j], round_p, round_q, from_text)


def _array(values: Any) -> NDArray[Any]:
    return np.array(values.to_numpy())  # a copy does not keep the other rows in memory; raises for nulls


def _array_or_none(values: Any) -> NDArray[Any] | None:
    return None if values is None else _array(values)


def _matrix(rows: Any) -> NDArray[Any]:
    widths = set(rows.value_lengths().to_pylist()) or {0}
    if len(widths) > 1:
        raise ValueError("the rows of logits differ in length")
    return _array(rows.flatten()).reshape(len(rows), widths.pop())
