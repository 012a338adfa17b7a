import importlib
from collections import Counter
from dataclasses import replace
from typing import Any

import models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import StoppingCriteria

from osd_hf import AcceptanceStats, Trace, capture_traces, replay
from osd_hf.errors import ConfigError, VocabularyMismatchError
from osd_hf.recording import record_traces
from osd_hf.replay import redraft, replay_each, rounds_of
from osd_hf.trace import bare_trace


def live(target: Any, draft: Any, prompts: list[torch.Tensor], **settings: Any) -> list[Trace]:
    traces: list[Trace] = []
    with capture_traces(target, traces.append, num_logprobs=settings.pop("num_logprobs", 64)):
        for ids in prompts:
            kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20, **settings}
            target.generate(ids, assistant_model=draft, **kwargs)
    return traces


def counts(stats: AcceptanceStats) -> dict[str, Any]:
    """All but `drafted`: behind a rejected token a live draft may end itself, which nobody sees afterwards."""
    kept = ("examined", "accepted", "emitted", "target_forwards", "accepted_length_histogram")
    return {name: getattr(stats, name) for name in kept} | {"requests": stats.requests.tolist()}


def total(traces: list[Trace]) -> AcceptanceStats:
    return sum(map(AcceptanceStats.from_trace, traces), AcceptanceStats())


@pytest.mark.parametrize(
    ("architecture", "k"),
    [*((architecture, 5) for architecture in models.ARCHITECTURES), ("llama", 1), ("t5", 7)],
)
def test_replay_counts_what_a_live_run_counts(architecture: str, k: int) -> None:
    target, draft = models.pair(architecture, noise=0.12, k=k, **models.SHALLOW[architecture])
    prompts = models.prompts(2)
    cut = live(target, draft, prompts)
    ends = [int(t.completion_ids[10]) for t in cut]
    ended = live(target, draft, prompts, eos_token_id=ends)
    penalized = live(target, draft, prompts, repetition_penalty=1.3, max_new_tokens=9 + k)
    for traces in (cut, ended, penalized):
        assert counts(replay(draft, traces, k)) == counts(total(traces))
    assert any(len(t) < 20 for t in ended)
    assert replay(draft, cut, k) == total(cut)  # nothing ends early, so `drafted` agrees as well


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_replay_of_target_only_recordings_counts_what_a_live_run_counts(architecture: str) -> None:
    target, draft = models.pair(architecture, noise=0.12, **models.SHALLOW[architecture])
    prompts = models.prompts(4)
    recorded = list(record_traces(target, [p[0].tolist() for p in prompts], max_new_tokens=20, batch_size=3))
    other = models.draft_of(target, noise=0.2, seed=5)
    for tried in (draft, other):
        assert counts(replay(tried, recorded)) == counts(total(live(target, tried, prompts)))


@pytest.mark.parametrize(
    "settings", [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"forced_eos_token_id": 3}]
)
def test_redrafted_rounds_are_the_live_ones(settings: dict[str, Any]) -> None:
    target, draft = models.pair("qwen3", noise=0.12, num_hidden_layers=1)
    other = models.draft_of(target, noise=0.2, seed=5)
    prompts = models.prompts(2)
    eos = int(live(target, draft, prompts[:1])[0].completion_ids[7])
    traces = live(target, draft, prompts, eos_token_id=eos, **settings)
    for ours, theirs in zip(
        redraft(other, traces), live(target, other, prompts, eos_token_id=eos, **settings), strict=True
    ):
        assert [(r.num_accepted, r.num_emitted) for r in ours.rounds] == [
            (r.num_accepted, r.num_emitted) for r in theirs.rounds
        ]
        assert ours.correction_mask.tolist() == theirs.correction_mask.tolist()
        for mine, live_round in zip(ours.rounds, theirs.rounds, strict=True):
            examined = slice(0, mine.num_examined)
            assert mine.drafted_ids[examined].tolist() == live_round.drafted_ids[examined].tolist()


def test_a_draft_ends_with_the_token_that_meets_a_criterion() -> None:
    class After(StoppingCriteria):  # type: ignore[misc]
        is_stateless = True

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] >= 6 + 8])

    target = models.build()
    assistant = models.assistant_of(target, target)
    _, trace = models.answered(assistant, models.prompt(), stopping_criteria=[After()])
    assert len(trace) == 8
    assert counts(replay(target, [trace])) == counts(assistant.stats) == counts(total([trace]))
    assert assistant.stats.alpha == 1.0


def reference(
    predicted: list[int], emitted: list[int], eos: set[int], limit_tokens: int, k: int
) -> list[tuple[int, ...]]:
    """The loop of transformers, token by token: `(drafted, accepted, emitted)` of each round. A draft's prediction
    behind its first wrong token is not known, and not needed."""
    rounds = []
    start = 0
    while start < len(emitted):
        room = min(k, limit_tokens - start - 1)
        drafted: list[int] = []
        while len(drafted) < room and start + len(drafted) < len(emitted):
            drafted.append(predicted[start + len(drafted)])
            if drafted[-1] in eos or drafted[-1] != emitted[start + len(drafted) - 1]:
                break
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == emitted[start + accepted]:
            accepted += 1
        new = emitted[start : start + accepted + 1]
        for i, token in enumerate(new):
            if token in eos:
                new = new[: i + 1]
                break
        rounds.append((accepted, len(new), int(accepted < len(new) and accepted < len(drafted))))
        start += len(new)
    return rounds


@given(
    st.lists(st.tuples(st.integers(3, 6), st.integers(3, 6)), min_size=1, max_size=30),
    st.sampled_from(["cut", "eos", "bounded later"]),
    st.integers(1, 7),
)
def test_rounds_are_those_of_the_loop(tokens: list[tuple[int, int]], ending: str, k: int) -> None:
    predicted, emitted = (list(side) for side in zip(*tokens, strict=True))
    eos: set[int] = set()
    limit = len(emitted)
    if ending != "cut":
        eos = {2}
        emitted[-1] = 2
        if predicted[-1] == 6:
            predicted[-1] = 2
        limit += 3 if ending == "bounded later" else 0
    sampling = {"max_new_tokens": limit, "eos_token_id": list(eos) or None}
    trace = replace(bare_trace([0], emitted, 8), sampling=sampling)
    rounds = rounds_of(trace, np.array([predicted]), k)
    ours = [(r.num_accepted, r.num_emitted, r.num_examined - r.num_accepted) for r in rounds]
    assert ours == reference(predicted, emitted, eos, limit, k)
    assert sum(r.num_emitted for r in rounds) == len(emitted)


def test_expected_counts_are_those_of_many_live_runs() -> None:
    target, draft = models.bigram(0), models.bigram(1)
    models.fixed_k(draft, 3)
    settings = {"do_sample": True, "top_k": 0, "temperature": 1.4, "num_logprobs": None, "max_new_tokens": 60}
    traces = live(target, draft, [torch.tensor([[i % 5]]) for i in range(30)], **settings)
    measured, expected = total(traces), replay(draft, traces, 3)
    low, high = measured.alpha_interval
    print(f"live {measured}; expected {expected.alpha:.3f}, {expected.block_efficiency:.3f}")
    assert low < expected.alpha < high
    assert expected.block_efficiency == pytest.approx(measured.block_efficiency, rel=0.05)
    assert expected.emitted == measured.emitted
    assert expected.drafted == pytest.approx(measured.drafted, rel=0.05)
    shares = [Counter(s.accepted_length_histogram) for s in (measured, expected)]
    for length in range(4):
        ours, theirs = (s[length] / sum(s.values()) for s in shares)
        assert ours == pytest.approx(theirs, abs=0.05)


def test_the_target_as_its_own_draft_is_expected_to_be_accepted() -> None:
    target = models.build(vocab_size=80)
    draft = models.fixed_k(models.draft_of(target, noise=0.0))
    traces = live(target, draft, models.prompts(3), do_sample=True, temperature=0.7)
    assert replay(target, traces).alpha == pytest.approx(1.0, abs=2e-3)
    assert total(traces).alpha == 1.0


def test_greedy_and_sampled_traces_keep_their_order() -> None:
    target, draft = models.pair()
    greedy = live(target, draft, models.prompts(2))
    sampled = live(target, draft, models.prompts(2), do_sample=True)
    mixed = [greedy[0], sampled[0], greedy[1], sampled[1]]
    each = replay_each(draft, mixed)
    assert [each[0], each[2]] == [AcceptanceStats.from_trace(t) for t in greedy]
    assert isinstance(each[1].accepted, float)
    assert sum(each, AcceptanceStats()) == replay(draft, iter(mixed))


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_batches_and_parts_of_the_logits_do_not_change_the_counts(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models.pair(architecture, noise=0.12, **models.SHALLOW[architecture])
    traces = [t for n in (6, 15) for t in live(target, draft, models.prompts(2), max_new_tokens=n)]
    traces += live(target, draft, models.prompts(1), max_new_tokens=12, repetition_penalty=1.3)
    traces += live(target, draft, models.prompts(1), max_new_tokens=12, do_sample=True, top_p=0.9)
    *greedy, sampled = replay_each(draft, traces)
    for name, most in {
        "MAX_TOKENS": 1,
        "CHUNK_LOGITS": 4 * models.VOCAB,
        "GROUP_LOGITS": 3 * models.VOCAB,
        "MAX_LOGITS": 25 * models.VOCAB,
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(importlib.import_module("osd_hf.replay"), name, most)
            *others, other = replay_each(draft, traces)
        assert others == greedy
        assert other.accepted == pytest.approx(sampled.accepted, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}, {"do_sample": True, "top_k": 5, "top_p": 0.9}])
def test_no_logits_of_a_whole_request_exist(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models.pair(vocab_size=4096)
    traces = live(target, draft, models.prompts(2, 4096), max_new_tokens=24, **settings)
    monkeypatch.setattr(importlib.import_module("osd_hf.replay"), "CHUNK_LOGITS", 6 * 4096)
    monkeypatch.setattr(importlib.import_module("osd_hf.replay"), "GROUP_LOGITS", 3 * 4096)
    replay(draft, traces)
    with models.Largest() as largest:
        replay(draft, traces)
    assert largest.elements == 6 * 4096  # a part; of 24 positions


def test_what_cannot_be_replayed_is_refused() -> None:
    target, draft = models.pair()
    traces = live(target, draft, [models.prompt()])
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        replay(draft, traces, 0)
    with pytest.raises(VocabularyMismatchError, match="align_vocab"):
        replay(models.build(vocab_size=70), traces)


def test_processors_that_cannot_be_rebuilt_are_named(caplog: pytest.LogCaptureFixture) -> None:
    target, draft = models.pair()
    (trace,) = live(target, draft, [models.prompt()])
    foreign = replace(trace, sampling={**trace.sampling, "processors": ["Mine"]})
    replay(draft, [foreign])
    assert "Mine" in caplog.text
    assert "approximate" in caplog.text
