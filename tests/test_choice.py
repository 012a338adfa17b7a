"""Which draft serves: the learned one, or the draft as it was."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig, Trace
from osd_hf.learning.choice import REMEMBERED, Choice
from osd_hf.learning.learner import Learner
from osd_hf.trace import bare_trace

CONFIG = OnlineConfig(
    update_interval=4, steps_per_update=2, batch_size=4, learning_rate=3e-3, update_strategy="interval"
)


def request() -> Trace:
    return bare_trace([1, 2], [3, 4], models.VOCAB)


def of(accepted: int, examined: int = 20) -> AcceptanceStats:
    return AcceptanceStats.from_counts(
        drafted=examined, examined=examined, accepted=accepted, emitted=examined, target_forwards=5
    )


def test_the_learned_draft_serves_where_nothing_is_known() -> None:
    assert not Choice().is_original()


def test_two_bad_requests_of_other_traffic_change_the_choice_and_two_good_ones_change_it_back() -> None:
    choice = Choice()
    for _ in range(30):
        choice.add(request(), of(8), of(14))
    assert not choice.is_original()
    for _ in range(2):
        choice.add(request(), of(10), of(1))
    assert choice.is_original()
    choice.add(request(), of(10), of(15))
    choice.add(request(), of(10), of(15))
    assert not choice.is_original()


def test_a_new_version_is_known_by_what_it_was_tried_on() -> None:
    choice, tried = Choice(), [request() for _ in range(4)]
    for trace in tried:
        choice.add(trace, of(10), of(4))
    assert choice.is_original()
    for trace in tried:
        choice.promoted(trace, of(12))
    choice.promoted(request(), of(0))  # one that nobody remembers
    assert not choice.is_original()
    assert choice.alphas() == pytest.approx((0.5, 0.6))


def test_what_is_remembered_is_bounded() -> None:
    choice = Choice()
    traces = [request() for _ in range(REMEMBERED + 3)]
    for trace in traces:
        choice.add(trace, of(1), of(2))
    assert [choice.of(trace) is None for trace in traces].count(True) == 3


def served_by(assistant: OnlineAssistant, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    seen: list[Trace] = []
    output = assistant.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, on_trace=seen.append
    )
    return output, seen[0].draft_version


def spoil(assistant: OnlineAssistant) -> None:
    """Let weights serve that no gate has seen."""
    drafts = assistant.drafts
    number, weights = drafts.candidate(None)
    noise = {name: weight + 0.5 * torch.randn_like(weight) for name, weight in weights.items()}
    drafts.promote(None, number, noise)


@pytest.mark.parametrize("strategy", ["spread", "interval", "idle", "manual"])
def test_after_one_answer_a_draft_that_does_badly_is_not_asked_again(strategy: str) -> None:
    target, draft = models.pair(noise=0.1)
    with OnlineAssistant(target, draft, config=replace(CONFIG, update_strategy=strategy)) as assistant:
        prompts = models.prompts(8)
        served_by(assistant, prompts[0])
        spoil(assistant)
        bad, versions = assistant.version, []
        for ids in prompts[1:3]:
            output, version = served_by(assistant, ids)
            assert torch.equal(output, target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12))
            versions.append(version)
            assert assistant.wait_until_idle(60)
        assert versions == [bad, 0]
        assert assistant._learner.prefers_original(None)


def test_what_is_known_of_both_outlives_a_session(tmp_path: Path) -> None:
    target, draft = models.pair(noise=0.1)
    prompts = models.prompts(8)
    with OnlineAssistant(target, draft, config=CONFIG) as assistant:
        served_by(assistant, prompts[0])
        spoil(assistant)
        served_by(assistant, prompts[1])
        assistant._learner.lessons[None].effort.share = 0.25
        known = assistant._learner.lessons[None].choice.alphas()
        assistant.save_state(tmp_path)
    with OnlineAssistant(target, draft, config=CONFIG) as resumed:
        resumed.load_state(tmp_path)
        assert resumed._learner.lessons[None].choice.alphas() == known
        assert resumed.effort == 0.25
        assert served_by(resumed, prompts[2])[1] == 0


def test_without_a_gate_every_request_is_served_by_the_newest_version() -> None:
    target, draft = models.pair(noise=0.1)
    with OnlineAssistant(target, draft, config=replace(CONFIG, gate=False)) as assistant:
        prompts = models.prompts(6)
        served_by(assistant, prompts[0])
        spoil(assistant)
        assert [served_by(assistant, ids)[1] for ids in prompts[1:3]] == [assistant.version] * 2


def test_the_draft_as_it_was_keeps_its_weights_whatever_is_learned() -> None:
    target, draft = models.pair(noise=0.2)
    before = {name: p.clone() for name, p in draft.named_parameters()}
    with OnlineAssistant(target, draft, config=replace(CONFIG, gate=False)) as assistant:
        for ids in models.prompts(8):
            served_by(assistant, ids)
        assert assistant.version == 2
        with assistant.drafts.lease(original=True) as base, assistant.drafts.lease() as learned:
            assert (base.version, learned.version) == (0, 2)
            assert all(torch.equal(p, before[name]) for name, p in base.model.named_parameters())
            assert not all(torch.equal(p, before[name]) for name, p in learned.model.named_parameters())


def test_an_answer_carries_its_share_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []
    step: Callable[[Learner], Any] = Learner.step

    def counted(self: Learner) -> Any:
        parts[-1] += 1
        return step(self)

    monkeypatch.setattr(Learner, "step", counted)
    target, draft = models.pair(noise=0.2)
    config = OnlineConfig(update_interval=4, steps_per_update=6, batch_size=4, learning_rate=3e-3)
    versions = []
    with OnlineAssistant(target, draft, config=config) as assistant:
        for ids in models.prompts(36):
            parts.append(0)
            versions.append(served_by(assistant, ids)[1])
    assert len(assistant.decisions) == 8
    # One update after the other: none waits until the next is due, and no answer does much more than another.
    assert parts[:3] == [0, 0, 0]
    assert min(parts[3:35]) > 0
    later = parts[11:35]
    assert max(later) <= 2 * sum(later) / len(later)


def test_what_was_saved_is_rounds_that_the_draft_as_it_was_would_have_needed() -> None:
    target, draft = models.pair(noise=0.3)
    with OnlineAssistant(target, draft, config=replace(CONFIG, num_assistant_tokens=3)) as assistant:
        assert assistant.saved_seconds is None
        for ids in models.prompts(5):
            served_by(assistant, ids)
        assert assistant.saved_seconds == 0.0
        number, _ = assistant.drafts.candidate(None)
        perfect = {name: p.detach().clone() for name, p in target.named_parameters()}
        assistant.drafts.promote(None, number, perfect)
        ids = models.prompts(6)[5]
        served_by(assistant, ids)
        original, learned = list(assistant._learner.lessons[None].choice._known.values())[-1]
        seconds = assistant.drafts.pacer.round_seconds(3)
        assert seconds is not None and learned.target_forwards < original.target_forwards
        saved = (original.target_forwards - learned.target_forwards) * seconds
        assert assistant.saved_seconds == pytest.approx(saved)
