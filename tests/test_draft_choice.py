"""Which draft serves: the learned one, or the draft as it was."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch

from osd_hf import AcceptanceStats, DraftRound, OnlineAssistant, OnlineConfig, Trace
from osd_hf.decoding.draft_length import RoundTime
from osd_hf.learning.draft_choice import REMEMBERED, Choice
from osd_hf.learning.effort import Effort
from osd_hf.learning.learner import Learner
from osd_hf.learning.lesson import Lesson
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


@pytest.mark.parametrize(("from_text", "share"), [((), 1.0), ((0, 1), 0.5), ((0, 1, 2, 3), 0.0)])
def test_learning_saves_as_much_as_the_draft_gave(from_text: tuple[int, ...], share: float) -> None:
    config = replace(CONFIG, num_assistant_tokens="auto")
    with OnlineAssistant(*models.pair(num_hidden_layers=1), config=config) as assistant:
        costs, learner = assistant.drafts.pacer.costs, assistant._learner
        for _ in range(20):
            costs.add(RoundTime(seconds=1.0))
            for k in (1, 4):
                costs.add(RoundTime(k, k, 1, 0.1, 0.1 * (k - 1), 1.0 + 0.1 * k))
        text = np.isin(np.arange(4), from_text)
        rounds = (DraftRound(np.ones(4, np.int32), 4, 5, from_text=text if from_text else None),)
        trace = replace(bare_trace([1], [1] * 5, models.VOCAB), rounds=rounds)
        original, learned = (
            AcceptanceStats.from_counts(drafted=10, examined=10, accepted=n, emitted=10, target_forwards=5)
            for n in (2, 8)
        )
        before, after = (learner.drafts.pacer.token_seconds(alpha) for alpha in (0.2, 0.8))
        assert before is not None and after is not None and before > after
        assert learner._saved_by(trace, original, learned) == pytest.approx(5 * (before - after) * share)


def accepted_of(number: int, of: int = 20) -> Trace:
    """A request of which so many drafted tokens were accepted, each round one."""
    one = np.ones(1, np.int32)
    rounds = [DraftRound(one, 1, 1)] * number + [DraftRound(2 * one, 0, 1)] * (of - number)
    return replace(bare_trace([1, 2], [1] * of, models.VOCAB), rounds=tuple(rounds))


def of_text() -> Trace:
    """A request all of whose tokens but one past text proposed."""
    one = np.ones(1, np.int32)
    rounds = [DraftRound(one, 1, 1, from_text=np.ones(1, bool))] * 8 + [DraftRound(one, 1, 1)]
    return replace(bare_trace([1, 2], [1] * 9, models.VOCAB), rounds=tuple(rounds))


def test_while_little_is_learned_one_request_in_a_few_is_compared() -> None:
    lesson = Lesson(config=OnlineConfig())
    lesson.effort.share = 0.1
    compared = []
    for i in range(40):
        lesson.observe(accepted_of(15 + i % 3))
        if not lesson.may_wait():
            compared.append((i, *lesson.take_arrived()))
    assert [i for i, *_ in compared] == list(range(3, 40, 4))
    assert {(len(traces), stands_for) for _, traces, stands_for in compared} == {(1, 4)}


def compared_of(lesson: Lesson, requests: int, trace: Callable[[int], Trace]) -> list[tuple[int, int]]:
    """Which requests are compared, and how many each stands for."""
    compared = []
    for i in range(requests):
        lesson.observe(trace(i))
        if not lesson.may_wait():
            traces, stands_for = lesson.take_arrived()
            assert len(traces) == 1
            compared.append((i, stands_for))
    return compared


def test_where_the_draft_is_not_used_fewer_are_compared_until_it_is() -> None:
    lesson = Lesson(config=OnlineConfig())
    lesson.effort.share = 0.1
    compared = compared_of(lesson, 400, lambda _: of_text())
    numbers = [stands_for for _, stands_for in compared]
    assert numbers == sorted(numbers) and set(numbers) == {4, 8, 16}
    assert sum(numbers) == compared[-1][0] + 1  # each request is stood for once
    assert all(stands_for == 16 for i, stands_for in compared if i > 144)
    waiting = [of_text() for _ in range(10)] + [accepted_of(16)]
    lesson.take_arrived()
    for trace in waiting:
        lesson.observe(trace)
    assert not lesson.may_wait()
    assert lesson.take_arrived() == (waiting[-1:], 11)
    assert {stands_for for _, stands_for in compared_of(lesson, 40, lambda _: accepted_of(16))} == {4}


def test_short_answers_of_the_draft_are_compared_as_often_as_long_ones() -> None:
    lesson = Lesson(config=OnlineConfig())
    lesson.effort.share = 0.1
    assert {stands_for for _, stands_for in compared_of(lesson, 400, lambda i: accepted_of(1 + i % 2, of=3))} == {4}


def test_of_those_that_waited_when_one_is_odd_the_newest_few_are_compared() -> None:
    lesson = Lesson(config=OnlineConfig())
    lesson.effort.share = 0.1
    compared_of(lesson, 40, lambda i: accepted_of(15 + i % 3))
    compared_of(lesson, 400, lambda _: of_text())
    lesson.take_arrived()
    waiting = [of_text() for _ in range(10)] + [accepted_of(4)]
    for trace in waiting:
        lesson.observe(trace)
    assert not lesson.may_wait()
    assert lesson.take_arrived() == (waiting[-4:], 1)


def test_all_are_compared_from_one_on_that_is_accepted_much_less() -> None:
    lesson = Lesson(config=OnlineConfig())
    lesson.effort.share = 0.1
    for i in range(40):
        lesson.observe(accepted_of(15 + i % 3))
        if not lesson.may_wait():
            lesson.take_arrived()
    lesson.observe(accepted_of(16))
    assert lesson.may_wait()
    lesson.observe(accepted_of(4))
    assert not lesson.may_wait()
    traces, stands_for = lesson.take_arrived()
    assert (len(traces), stands_for) == (2, 1)
    for _ in range(11):
        lesson.observe(accepted_of(16))
        assert not lesson.may_wait()
        assert len(lesson.take_arrived()[0]) == 1
    lesson.observe(accepted_of(16))
    assert lesson.may_wait()


@pytest.mark.parametrize("serves", ["all effort", "the draft as it was"])
def test_all_are_compared_while_much_is_learned_and_while_the_draft_as_it_was_serves(serves: str) -> None:
    lesson = Lesson(config=OnlineConfig())
    if serves == "the draft as it was":
        lesson.effort.share = 0.1
        lesson.choice.add(request(), of(10), of(5))
    for _ in range(10):
        lesson.observe(accepted_of(16))
        assert not lesson.may_wait()
        assert len(lesson.take_arrived()[0]) == 1


def test_a_request_that_stands_for_several_saves_for_as_many() -> None:
    def decided(stands_for: int) -> float:
        effort = Effort(0.01)
        for i in range(2 * 64):
            effort.took(1.0)
            gain = i // 64
            effort.add(of(5 + i % 2), of(6 + 4 * gain + i % 2), 0.2 * gain, stands_for)
        return effort.share

    assert decided(1) < decided(4) == 1.0


def test_the_least_is_done_at_once_where_nothing_is_saved() -> None:
    def decided(saved: float) -> float:
        effort = Effort(0.01)
        for i in range(2 * 64):
            effort.took(1.0)
            effort.add(of(5 + i % 2), of(8 + 4 * (i // 64) + i % 2), saved * (i // 64))
        return effort.share

    assert decided(0.0) == 0.01
    assert decided(0.4) == 0.5  # not quite as much as it takes
    assert decided(2.0) == 1.0
