from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from osd_hf import DraftRound, Trace
from osd_hf.trace import bare_trace


def drafted(number: int) -> Any:
    return np.arange(number, dtype=np.int32)


def trace(rounds: list[DraftRound], **changes: Any) -> Trace:
    completion = np.zeros(sum(r.num_emitted for r in rounds))
    return replace(bare_trace([0, 0, 0], completion, 64), rounds=tuple(rounds), **changes)


@pytest.mark.parametrize(
    ("round_", "examined", "corrected"),
    [
        (DraftRound(drafted(5), 2, 3), 3, True),
        (DraftRound(drafted(5), 0, 1), 1, True),
        (DraftRound(drafted(5), 5, 6), 5, False),  # a bonus token is no correction
        (DraftRound(drafted(5), 2, 2), 2, False),  # cut behind an accepted token
        (DraftRound(drafted(2), 2, 2), 2, False),
        (DraftRound(drafted(0), 0, 1), 0, False),  # the round only decoded
    ],
)
def test_what_a_round_examined(round_: DraftRound, examined: int, corrected: bool) -> None:
    assert round_.num_examined == examined
    assert round_.has_correction is corrected
    assert round_.num_drafted == len(round_.drafted_ids)


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 8)), elements=st.floats(-30, 0, width=32)),
    st.floats(-50, -1e-6),
)
def test_kept_log_probs_and_the_tail_sum_to_one(logits: Any, tail: float) -> None:
    logits = (logits - logits.max(axis=1, keepdims=True)).astype(np.float16)
    length, kept = logits.shape
    row = trace(
        [DraftRound(drafted(0), 0, length)],
        top_logits=logits,
        top_ids=np.zeros((length, kept), np.uint16),
        tail_logprob=np.full(length, tail, np.float32),
    )
    mass = np.exp(row.kept_logprobs().astype(np.float64)).sum(axis=1) + np.exp(tail)
    np.testing.assert_allclose(mass, 1.0, atol=1e-5)


def test_whole_rows_sum_to_one() -> None:
    row = trace(
        [DraftRound(drafted(0), 0, 1)],
        top_logits=np.array([[0, -1, -np.inf, -2]], np.float16),
        top_ids=np.zeros((1, 0), np.uint16),
        tail_logprob=np.full(1, -np.inf, np.float32),
    )
    kept = row.kept_logprobs()
    assert kept[0, 2] == -np.inf
    np.testing.assert_allclose(np.exp(kept).sum(), 1.0, atol=1e-6)
