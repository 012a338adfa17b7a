"""Origins of emitted tokens, against what the rounds of a live request say and what the draft itself computes."""

from __future__ import annotations

import dataclasses

import models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osd_hf import DraftRound, OnlineAssistant, OnlineConfig, Trace, capture_traces
from osd_hf.errors import VocabularyMismatchError
from osd_hf.replay import emitted_tokens
from osd_hf.trace import bare_trace


def served(architecture: str = "llama", **settings: object) -> tuple[Trace, object]:
    """The trace of one request, and the draft that served it."""
    target, draft = models.pair(architecture)
    assistant = OnlineAssistant(target, draft, config=OnlineConfig(num_assistant_tokens=5, update_strategy="manual"))
    ids, traces = models.prompt(6), []
    torch.manual_seed(0)
    with capture_traces(target, traces.append):
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False, **settings}
        assistant.generate(ids, **settings)
    return traces[0], assistant.draft


def made(rounds: list[tuple[int, int, int]]) -> Trace:
    """A trace of rounds that drafted, accepted and emitted so many tokens; what was drafted wrong is 60."""
    total = sum(emitted for _, _, emitted in rounds)
    completion = np.arange(total, dtype=np.int32)
    built, start = [], 0
    for drafted, accepted, emitted in rounds:
        ids = np.full(drafted, 60, dtype=np.int32)
        ids[:accepted] = completion[start : start + accepted]
        built.append(DraftRound(ids, accepted, emitted))
        start += emitted
    return dataclasses.replace(bare_trace([1], completion, models.VOCAB), rounds=tuple(built))


def test_each_kind_of_round() -> None:
    trace = made([(3, 3, 4), (3, 1, 2), (0, 0, 1), (3, 2, 2), (3, 0, 1)])
    origins = [token.origin for token in emitted_tokens(trace)]
    assert origins == [
        "accepted", "accepted", "accepted", "bonus",
        "accepted", "corrected",
        "plain",
        "accepted", "accepted",  # cut at EOS behind what was accepted
        "corrected",
    ]  # fmt: skip
    assert [t.drafted_id for t in emitted_tokens(trace)] == [None] * 5 + [60] + [None] * 3 + [60]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_origins_count_as_the_rounds_do(shapes: list[tuple[int, int]]) -> None:
    rounds = [(drafted, min(accepted, drafted), min(accepted, drafted) + 1) for drafted, accepted in shapes]
    trace = made(rounds)
    tokens = emitted_tokens(trace)
    assert [token.id for token in tokens] == trace.completion_ids.tolist()
    assert sum(t.origin == "accepted" for t in tokens) == sum(r.num_accepted for r in trace.rounds)
    assert [t.origin == "corrected" for t in tokens] == trace.correction_mask.tolist()


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_a_greedy_correction_has_the_drafts_own_probability(architecture: str) -> None:
    trace, draft = served(architecture)
    tokens = emitted_tokens(trace, draft)
    corrected = [at for at, token in enumerate(tokens) if token.origin == "corrected"]
    assert corrected
    for at in corrected:
        if trace.is_encoder_decoder:
            source = torch.from_numpy(trace.prompt_ids.astype(np.int64))[None]
            so_far = np.concatenate([trace.decoder_prompt_ids, trace.completion_ids[:at]]).astype(np.int64)
            row = draft(input_ids=source, decoder_input_ids=torch.from_numpy(so_far)[None]).logits[0, -1]
        else:
            so_far = np.concatenate([trace.prompt_ids, trace.completion_ids[:at]]).astype(np.int64)
            row = draft(torch.from_numpy(so_far)[None]).logits[0, -1]
        probs = row.float().softmax(-1)
        assert tokens[at].drafted_id == int(probs.argmax())
        assert tokens[at].drafted_prob == pytest.approx(float(probs.max()), rel=1e-4)
    assert all(t.drafted_prob is None for t in tokens if t.origin != "corrected")
    assert all(t.drafted_prob is None for t in emitted_tokens(trace))  # without the draft


def test_a_sampled_correction_has_the_recorded_probability_and_needs_no_draft() -> None:
    trace, draft = served(do_sample=True, temperature=1.3)
    tokens = emitted_tokens(trace)
    corrected = [token for token in tokens if token.origin == "corrected"]
    recorded = [float(r.q[r.num_accepted]) for r in trace.rounds if r.has_correction]
    assert corrected
    assert [t.drafted_prob for t in corrected] == recorded
    unrecorded = tuple(dataclasses.replace(r, p=None, q=None) for r in trace.rounds)
    computed = emitted_tokens(dataclasses.replace(trace, rounds=unrecorded), draft)
    assert [t.drafted_prob for t in computed if t.drafted_prob is not None] == pytest.approx(recorded, rel=1e-3)


def test_another_vocabulary_is_refused() -> None:
    trace, _ = served()
    with pytest.raises(VocabularyMismatchError, match="vocabulary of 64 tokens, the draft 70"):
        emitted_tokens(trace, models.build("llama", vocab_size=70))
