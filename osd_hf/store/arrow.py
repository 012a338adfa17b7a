"""Traces as Arrow tables and back: the columns of a store's shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from osd_hf.errors import StoreError
from osd_hf.trace import DraftRound, Trace, ids_dtype

__all__ = [
    "DICTIONARY_COLUMNS",
    "SCHEMA",
    "SPLIT_COLUMNS",
    "readable_traces",
    "split_by_bytes",
    "table_to_traces",
    "traces_to_table",
]

TABLE_BYTES = 1 << 30  # of array data in one record batch, whose list offsets are 32 bits wide


def _list_of(kind: Any) -> Any:
    return pa.list_(pa.field("element", kind))


# Token ids are 32 bits wide for every vocabulary, so that all shards have one schema: behind dictionary encoding and
# zstd they take no more room than 16 bits would.
SCHEMA = pa.schema(
    [
        ("prompt_ids", _list_of(pa.int32())),
        ("completion_ids", _list_of(pa.int32())),
        ("decoder_prompt_ids", _list_of(pa.int32())),
        ("drafted_ids", _list_of(_list_of(pa.int32()))),
        ("num_accepted", _list_of(pa.int32())),
        ("num_emitted", _list_of(pa.int32())),
        ("p", _list_of(_list_of(pa.float32()))),
        ("q", _list_of(_list_of(pa.float32()))),
        ("top_logits", _list_of(_list_of(pa.float16()))),
        ("top_ids", _list_of(_list_of(pa.int32()))),
        ("tail_logprob", _list_of(pa.float32())),
        ("vocab_size", pa.int32()),
        ("domain", pa.string()),
        ("draft_version", pa.int32()),
        ("sampling", pa.string()),
        ("created_at_seconds", pa.float64()),
    ]
)
DICTIONARY_COLUMNS = [
    "prompt_ids.list.element",
    "completion_ids.list.element",
    "decoder_prompt_ids.list.element",
    "drafted_ids.list.element.list.element",
    "num_accepted.list.element",
    "num_emitted.list.element",
    "top_ids.list.element.list.element",
    "vocab_size",
    "domain",
    "draft_version",
    "sampling",
]
SPLIT_COLUMNS = [
    "p.list.element.list.element",
    "q.list.element.list.element",
    "top_logits.list.element.list.element",
    "tail_logprob.list.element",
]


def traces_to_table(traces: Sequence[Trace]) -> pa.Table:
    """
    One row per trace. Every array keeps its exact bits; `sampling` becomes JSON.

    Args:
        traces (`Sequence[Trace]`):
            Any number of traces, of any vocabularies.

    Returns:
        `pyarrow.Table`: the columns of a store's shards.
    """
    batches = [_traces_to_batch(part) for part in split_by_bytes(traces, TABLE_BYTES)]
    return pa.Table.from_batches(batches, schema=SCHEMA)


def table_to_traces(table: pa.Table) -> list[Trace]:
    """
    The inverse of [`traces_to_table`]. The arrays are copies, so that no trace holds on to the table. `top_ids` comes
    back in the smallest type that holds the vocabulary.

    Args:
        table (`pyarrow.Table`):
            A table with the columns of a store's shards, in any order.

    Raises:
        [`StoreError`]: a column is missing or has another type, or a row holds no trace.
    """
    try:
        return [trace for batch in _columns_of_traces(table).to_batches() for trace in _batch_to_traces(batch)]
    except StoreError:
        raise
    except _ODD as error:
        raise StoreError(f"the table holds no traces: {error}") from error


def readable_traces(table: pa.Table) -> list[Trace | None]:
    """As of [`table_to_traces`], with `None` for each row that holds no trace: they cost nothing but themselves."""
    traces: list[Trace | None] = []
    for batch in _columns_of_traces(table).to_batches():
        try:
            traces += _batch_to_traces(batch)
        except _ODD:
            traces += [_row_to_trace(batch, i) for i in range(batch.num_rows)]
    return traces


def _columns_of_traces(table: pa.Table) -> pa.Table:
    if missing := [name for name in SCHEMA.names if name not in table.column_names]:
        raise StoreError(f"the table holds no traces: it lacks {', '.join(missing)}; it has {table.column_names}")
    try:
        table = table.select(SCHEMA.names)
        return table if table.schema.equals(SCHEMA) else table.cast(SCHEMA)
    except pa.ArrowException as error:
        raise StoreError(f"the table holds no traces: {error}") from error


_ODD = (StoreError, ValueError, TypeError, IndexError, OverflowError, RecursionError, pa.ArrowException)


def _row_to_trace(batch: Any, row: int) -> Trace | None:
    try:
        return _batch_to_traces(batch.take(pa.array([row])))[0]  # alone: what is odd in others is not with it
    except _ODD:
        return None


def split_by_bytes(traces: Sequence[Trace], limit: int) -> Iterator[Sequence[Trace]]:
    start = size = 0
    for i, trace in enumerate(traces):
        if i > start and size + trace.nbytes > limit:
            yield traces[start:i]
            start, size = i, 0
        size += trace.nbytes
    if start < len(traces):
        yield traces[start:]


def _concatenate(arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype, casting="same_kind") if arrays else np.empty(0, dtype)


# Arrays are made from buffers and back: `pyarrow.array` and `to_numpy` import pandas, which takes half a second, and
# fails at the end of a program.


def _array(values: NDArray[Any]) -> Any:
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _view(values: Any) -> NDArray[Any]:
    if values.null_count:
        raise StoreError("the table holds no traces: a null stands where a number should")
    dtype, buffer = np.dtype(values.type.to_pandas_dtype()), values.buffers()[1]
    if not len(values):
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(values), values.offset * dtype.itemsize)


def _validity(missing: Sequence[bool]) -> Any:
    return pa.py_buffer(np.packbits(~np.asarray(missing, bool), bitorder="little")) if any(missing) else None


def _offsets(lengths: Sequence[int] | NDArray[np.int64]) -> Any:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    assert offsets[-1] < 1 << 31
    return pa.py_buffer(offsets.astype(np.int32))


def _nest(lengths: Sequence[int] | NDArray[np.int64], values: Any, missing: Sequence[bool] = ()) -> Any:
    """An Arrow list array: element `i` takes the next `lengths[i]` values, and is null where `missing[i]`."""
    buffers = [_validity(missing), _offsets(lengths)]
    return pa.Array.from_buffers(_list_of(values.type), len(lengths), buffers, children=[values])


def _texts(texts: Sequence[str | None]) -> Any:
    encoded = [b"" if text is None else text.encode() for text in texts]
    buffers = [_validity([text is None for text in texts]), _offsets([len(e) for e in encoded])]
    return pa.Array.from_buffers(pa.string(), len(texts), [*buffers, pa.py_buffer(b"".join(encoded))])


def _vectors(arrays: Sequence[NDArray[Any] | None], dtype: DTypeLike) -> Any:
    flat = _concatenate([a for a in arrays if a is not None], dtype)
    return _nest([0 if a is None else len(a) for a in arrays], _array(flat), [a is None for a in arrays])


def _matrices(arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> Any:
    flat = _concatenate([a.reshape(-1) for a in arrays], dtype)
    widths = np.repeat([a.shape[1] for a in arrays], [a.shape[0] for a in arrays])
    return _nest([a.shape[0] for a in arrays], _nest(widths, _array(flat)))


def _probabilities(rounds: Sequence[DraftRound], name: str, round_counts: Sequence[int]) -> Any:
    """A trace of which no round has probabilities has null instead of a list of nulls."""
    arrays: list[NDArray[np.float32] | None] = [getattr(r, name) for r in rounds]
    bounds = [0, *np.cumsum(round_counts)]
    missing = [all(a is None for a in arrays[start:stop]) for start, stop in pairwise(bounds)]
    kept = [
        a
        for start, stop, gone in zip(bounds, bounds[1:], missing, strict=False)
        if not gone
        for a in arrays[start:stop]
    ]
    lengths = [0 if gone else count for count, gone in zip(round_counts, missing, strict=True)]
    return _nest(lengths, _vectors(kept, np.float32), missing)


def _traces_to_batch(traces: Sequence[Trace]) -> Any:
    rounds = [r for t in traces for r in t.rounds]
    counts = [len(t.rounds) for t in traces]
    columns = [
        _vectors([t.prompt_ids for t in traces], np.int32),
        _vectors([t.completion_ids for t in traces], np.int32),
        _vectors([t.decoder_prompt_ids for t in traces], np.int32),
        _nest(counts, _vectors([r.drafted_ids for r in rounds], np.int32)),
        _nest(counts, _array(np.array([r.num_accepted for r in rounds], np.int32))),
        _nest(counts, _array(np.array([r.num_emitted for r in rounds], np.int32))),
        _probabilities(rounds, "p", counts),
        _probabilities(rounds, "q", counts),
        _matrices([t.top_logits for t in traces], np.float16),
        _matrices([t.top_ids for t in traces], np.int32),
        _vectors([t.tail_logprob for t in traces], np.float32),
        _array(np.array([t.vocab_size for t in traces], np.int32)),
        _texts([t.domain for t in traces]),
        _array(np.array([t.draft_version for t in traces], np.int32)),
        _texts([json.dumps(_plain(t.sampling)) for t in traces]),
        _array(np.array([t.created_at_seconds for t in traces], np.float64)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _plain(value: Any) -> Any:
    """What JSON can hold of a value. Dicts with other keys than strings become pairs, as `sequence_bias` may."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "tolist") and not isinstance(value, type):  # numpy and torch
        return _plain(value.tolist())
    return str(value)


class _Lists:
    """NumPy views into an Arrow list array: element `i` is `values[offsets[i]:offsets[i + 1]]`."""

    def __init__(self, column: Any) -> None:
        self.offsets: list[int] = _view(column.offsets).tolist()
        self.present: list[bool] | None = column.is_valid().to_pylist() if column.null_count else None
        self.values: Any = column.values
        if not pa.types.is_list(self.values.type):
            self.values = _view(self.values)

    def bounds(self, i: int) -> tuple[int, int]:
        return self.offsets[i], self.offsets[i + 1]

    def array(self, i: int) -> NDArray[Any]:
        start, stop = self.bounds(i)
        return np.array(self.values[start:stop])

    def array_or_none(self, i: int) -> NDArray[Any] | None:
        return self.array(i) if self.has(i) else None

    def has(self, i: int) -> bool:
        return self.present is None or self.present[i]


def _batch_to_traces(batch: Any) -> list[Trace]:
    lists = {
        name: _Lists(batch.column(name)) for name in SCHEMA.names if pa.types.is_list(batch.schema.field(name).type)
    }
    inner = {name: _Lists(lists[name].values) for name in ("drafted_ids", "p", "q", "top_logits", "top_ids")}
    plain = {name: batch.column(name).to_pylist() for name in SCHEMA.names if name not in lists}

    def matrix(name: str, i: int) -> NDArray[Any]:
        start, stop = lists[name].bounds(i)
        first, last = inner[name].offsets[start], inner[name].offsets[stop]
        width = (last - first) // (stop - start) if stop > start else 0
        if inner[name].offsets[start : stop + 1] != [first + row * width for row in range(stop - start + 1)]:
            raise ValueError(f"rows of {name} differ in length")
        return np.array(inner[name].values[first:last]).reshape(stop - start, width)

    def sampling(i: int) -> dict[str, Any]:
        settings = json.loads(plain["sampling"][i])
        if not isinstance(settings, dict):
            raise TypeError("sampling is no object")
        return settings

    for name in plain.keys() - {"domain"}:
        if None in plain[name]:
            raise TypeError(f"{name} is missing")

    def rounds(i: int) -> Iterator[DraftRound]:
        start, stop = lists["drafted_ids"].bounds(i)
        accepted, emitted = (lists[name].array(i).tolist() for name in ("num_accepted", "num_emitted"))
        for j in range(stop - start):
            p, q = (
                inner[name].array_or_none(lists[name].offsets[i] + j) if lists[name].has(i) else None
                for name in ("p", "q")
            )
            yield DraftRound(inner["drafted_ids"].array(start + j), accepted[j], emitted[j], p, q)

    return [
        Trace(
            prompt_ids=lists["prompt_ids"].array(i),
            completion_ids=lists["completion_ids"].array(i),
            rounds=tuple(rounds(i)),
            top_logits=matrix("top_logits", i),
            top_ids=matrix("top_ids", i).astype(ids_dtype(plain["vocab_size"][i]), copy=False),
            tail_logprob=lists["tail_logprob"].array(i),
            vocab_size=plain["vocab_size"][i],
            decoder_prompt_ids=lists["decoder_prompt_ids"].array_or_none(i),
            domain=plain["domain"][i],
            draft_version=plain["draft_version"][i],
            sampling=sampling(i),
            created_at_seconds=plain["created_at_seconds"][i],
        )
        for i in range(batch.num_rows)
    ]
