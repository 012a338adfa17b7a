"""Conversion of traces to Arrow tables with the columns of a shard, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from osd_hf.errors import StoreError
from osd_hf.trace import DraftRound, Trace, ids_dtype
from osd_hf.utils.report import plain

__all__ = ["SCHEMA", "split_by_bytes", "table_to_traces", "traces_to_table"]

TABLE_BYTES = 1 << 30  # array data in a record batch: list offsets have 32 bits


def _list_of(kind: Any) -> Any:
    return pa.list_(pa.field("element", kind))


# Token ids have 32 bits, so that all shards have the same schema. Dictionary encoding and zstd compress them.
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
        ("from_text", _list_of(_list_of(pa.uint8()))),
        ("top_logits", _list_of(_list_of(pa.float16()))),
        ("top_ids", _list_of(_list_of(pa.int32()))),
        ("tail_logprob", _list_of(pa.float32())),
        ("vocab_size", pa.int32()),
        ("domain", pa.string()),
        ("draft_version", pa.int32()),
        ("sampling", pa.string()),
        ("created_at_seconds", pa.float64()),
        ("target", pa.string()),
    ]
)

OPTIONAL_COLUMNS = ("from_text", "target")


def _leaf(field: Any) -> tuple[str, Any]:
    """Return the Parquet name and type of the innermost values of a column."""
    name, kind = field.name, field.type
    while pa.types.is_list(kind):
        name, kind = f"{name}.list.element", kind.value_type
    return name, kind


PARQUET = {
    "compression": "zstd", "write_statistics": False, "write_page_checksum": True,
    "use_dictionary": [name for name, kind in map(_leaf, SCHEMA) if not pa.types.is_floating(kind)],
    "use_byte_stream_split": [name for name, kind in map(_leaf, SCHEMA) if kind in (pa.float16(), pa.float32())],
}  # fmt: skip
_CONVERSION_ERRORS = (ValueError, TypeError, IndexError, OverflowError, RecursionError, pa.ArrowException)


def traces_to_table(traces: Sequence[Trace]) -> pa.Table:
    """Return a table with one row per trace. Arrays keep their exact bits, and `sampling` becomes JSON. Vocabularies
    may differ."""
    batches = [_traces_to_batch(part) for part in split_by_bytes(traces, TABLE_BYTES)]
    return pa.Table.from_batches(batches, schema=SCHEMA)


def table_to_traces(table: pa.Table) -> list[Trace]:
    """
    Return the traces of a table, the inverse of [`traces_to_table`]. Columns may have any order. Arrays are copied.
    `top_ids` has the smallest type that holds the vocabulary.

    Raises:
        StoreError: A column is missing or has another type, or a row is not a trace.
    """
    try:
        return [trace for batch in _columns_of_traces(table).to_batches() for trace in _batch_to_traces(batch)]
    except _CONVERSION_ERRORS as error:
        raise StoreError(f"the table is not a table of traces: {error}") from error


def _columns_of_traces(table: pa.Table) -> pa.Table:
    for field in (SCHEMA.field(name) for name in OPTIONAL_COLUMNS if name not in table.column_names):
        table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    if missing := [name for name in SCHEMA.names if name not in table.column_names]:
        raise StoreError(f"the table is not a table of traces: it lacks {', '.join(missing)}")
    try:
        table = table.select(SCHEMA.names)
        return table if table.schema.equals(SCHEMA) else table.cast(SCHEMA)
    except pa.ArrowException as error:
        raise StoreError(f"the table is not a table of traces: {error}") from error


def split_by_bytes(traces: Sequence[Trace], limit: int) -> Iterator[Sequence[Trace]]:
    start = size = 0
    for i, trace in enumerate(traces):
        if i > start and size + trace.nbytes > limit:
            yield traces[start:i]
            start, size = i, 0
        size += trace.nbytes
    if start < len(traces):
        yield traces[start:]


# `pyarrow.array` and `to_numpy` are avoided because they import pandas, which is slow and fails while Python exits.


def _array(values: Sequence[Any] | NDArray[Any], dtype: DTypeLike) -> Any:
    found = np.asarray(values, dtype)
    return pa.Array.from_buffers(pa.from_numpy_dtype(found.dtype), len(found), [None, pa.py_buffer(found)])


def _view(values: Any) -> NDArray[Any]:
    if values.null_count:
        raise StoreError("the table is not a table of traces: a null in place of a number")
    dtype, buffer = np.dtype(values.type.to_pandas_dtype()), values.buffers()[1]
    if not len(values):
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(values), values.offset * dtype.itemsize)


def _buffers(lengths: Sequence[int] | NDArray[np.int64], missing: Sequence[bool]) -> list[Any]:
    """Return the validity and offset buffers of an Arrow array."""
    present = pa.py_buffer(np.packbits(~np.asarray(missing, bool), bitorder="little")) if any(missing) else None
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    assert offsets[-1] < 1 << 31
    return [present, pa.py_buffer(offsets.astype(np.int32))]


def _nest(lengths: Sequence[int] | NDArray[np.int64], values: Any, missing: Sequence[bool] = ()) -> Any:
    """Return an Arrow list array. Element `i` has the next `lengths[i]` values, or is null if `missing[i]`."""
    return pa.Array.from_buffers(_list_of(values.type), len(lengths), _buffers(lengths, missing), children=[values])


def _texts(texts: Sequence[str | None]) -> Any:
    encoded = [b"" if text is None else text.encode() for text in texts]
    buffers = _buffers([len(e) for e in encoded], [text is None for text in texts])
    return pa.Array.from_buffers(pa.string(), len(texts), [*buffers, pa.py_buffer(b"".join(encoded))])


def _flat(arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> Any:
    return _array(np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind"), dtype)


def _vectors(arrays: Sequence[NDArray[Any] | None], dtype: DTypeLike) -> Any:
    values = _flat([a for a in arrays if a is not None], dtype)
    return _nest([0 if a is None else len(a) for a in arrays], values, [a is None for a in arrays])


def _matrices(arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> Any:
    widths = np.repeat([a.shape[1] for a in arrays], [a.shape[0] for a in arrays])
    return _nest([a.shape[0] for a in arrays], _nest(widths, _flat([a.reshape(-1) for a in arrays], dtype)))


def _by_round(traces: Sequence[Trace], name: str, dtype: DTypeLike) -> Any:
    """Return an optional field of the rounds. Traces without it in any round have null instead of a list of nulls."""
    each = [[getattr(r, name) for r in t.rounds] for t in traces]
    missing = [all(a is None for a in arrays) for arrays in each]
    kept = [[] if gone else arrays for arrays, gone in zip(each, missing, strict=True)]
    flat = _vectors([a for arrays in kept for a in arrays], dtype)
    return _nest([len(arrays) for arrays in kept], flat, missing)


def _traces_to_batch(traces: Sequence[Trace]) -> Any:
    rounds = [r for t in traces for r in t.rounds]
    counts = [len(t.rounds) for t in traces]
    columns = [
        _vectors([t.prompt_ids for t in traces], np.int32),
        _vectors([t.completion_ids for t in traces], np.int32),
        _vectors([t.decoder_prompt_ids for t in traces], np.int32),
        _nest(counts, _vectors([r.drafted_ids for r in rounds], np.int32)),
        _nest(counts, _array([r.num_accepted for r in rounds], np.int32)),
        _nest(counts, _array([r.num_emitted for r in rounds], np.int32)),
        _by_round(traces, "p", np.float32),
        _by_round(traces, "q", np.float32),
        _by_round(traces, "from_text", np.uint8),
        _matrices([t.top_logits for t in traces], np.float16),
        _matrices([t.top_ids for t in traces], np.int32),
        _vectors([t.tail_logprob for t in traces], np.float32),
        _array([t.vocab_size for t in traces], np.int32),
        _texts([t.domain for t in traces]),
        _array([t.draft_version for t in traces], np.int32),
        _texts([json.dumps(plain(t.sampling)) for t in traces]),
        _array([t.created_at_seconds for t in traces], np.float64),
        _texts([t.target for t in traces]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class _Lists:
    """NumPy views of an Arrow list array. Element `i` is `values[offsets[i]:offsets[i + 1]]`."""

    def __init__(self, column: Any) -> None:
        self.offsets: list[int] = _view(column.offsets).tolist()
        self.present: list[bool] | None = column.is_valid().to_pylist() if column.null_count else None
        values = column.values
        self.values: Any = _Lists(values) if pa.types.is_list(values.type) else _view(values)

    def has(self, i: int) -> bool:
        return self.present is None or self.present[i]

    def array(self, i: int) -> NDArray[Any]:
        return np.array(self.values[self.offsets[i] : self.offsets[i + 1]])

    def array_or_none(self, i: int) -> NDArray[Any] | None:
        return self.array(i) if self.has(i) else None


def _batch_to_traces(batch: Any) -> list[Trace]:
    columns: dict[str, Any] = {}
    for name in SCHEMA.names:
        column = batch.column(name)
        columns[name] = _Lists(column) if pa.types.is_list(column.type) else column.to_pylist()
        if isinstance(columns[name], list) and name not in ("domain", "target") and None in columns[name]:
            raise TypeError(f"{name} is missing")

    def matrix(name: str, i: int) -> NDArray[Any]:
        lists = columns[name]
        bounds = lists.values.offsets[lists.offsets[i] : lists.offsets[i + 1] + 1]
        rows = len(bounds) - 1
        width = (bounds[-1] - bounds[0]) // rows if rows else 0
        if bounds != [bounds[0] + row * width for row in range(rows + 1)]:
            raise ValueError(f"rows of {name} differ in length")
        return np.array(lists.values.values[bounds[0] : bounds[-1]]).reshape(rows, width)

    def rounds(i: int) -> Iterator[DraftRound]:
        drafted = columns["drafted_ids"]
        accepted, emitted = (columns[name].array(i).tolist() for name in ("num_accepted", "num_emitted"))
        for j in range(drafted.offsets[i + 1] - drafted.offsets[i]):
            p, q, text = (
                c.values.array_or_none(c.offsets[i] + j) if c.has(i) else None
                for c in (columns[name] for name in ("p", "q", "from_text"))
            )
            from_text = None if text is None else text.astype(bool)
            ids = drafted.values.array(drafted.offsets[i] + j)
            yield DraftRound(ids, accepted[j], emitted[j], p, q, from_text)

    def sampling(i: int) -> dict[str, Any]:
        settings = json.loads(columns["sampling"][i])
        if not isinstance(settings, dict):
            raise TypeError("sampling is not an object")
        return settings

    return [
        Trace(
            prompt_ids=columns["prompt_ids"].array(i),
            completion_ids=columns["completion_ids"].array(i),
            rounds=tuple(rounds(i)),
            top_logits=matrix("top_logits", i),
            top_ids=matrix("top_ids", i).astype(ids_dtype(columns["vocab_size"][i]), copy=False),
            tail_logprob=columns["tail_logprob"].array(i),
            vocab_size=columns["vocab_size"][i],
            decoder_prompt_ids=columns["decoder_prompt_ids"].array_or_none(i),
            domain=columns["domain"][i],
            draft_version=columns["draft_version"][i],
            sampling=sampling(i),
            created_at_seconds=columns["created_at_seconds"][i],
            target=columns["target"][i],
        )
        for i in range(batch.num_rows)
    ]
