"""Conversion of traces to Arrow tables with the columns of a shard, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from osd_hf.errors import StoreError
from osd_hf.trace import DraftRound, Trace, ids_dtype
from osd_hf.utils.report import plain

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
