"""The gate, the choice of the draft, and the effort of learning."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osd_hf.acceptance import AcceptanceStats, paired_gain
from osd_hf.assistant import OnlineAssistant
from osd_hf.config import OnlineConfig
from osd_hf.learning import gate as module
from osd_hf.learning.gate import (
    FULL_UPDATES,
    GAIN_EFFORT,
    MIN_HELD_BACK,
    MIN_SERVED,
    OPEN_EFFORT,
    OPEN_UPDATES,
    RECENT_REQUESTS,
    RISE_UPDATES,
    DraftChoice,
    Effort,
    judge,
    regressed,
)
from osd_hf.learning.learner import Learner
from osd_hf.learning.requests import HOLD_BACK_EVERY, NUM_HELD_BACK, NUM_WATCHED, DraftRequests, ReadableTraces
from osd_hf.speedup import expected_block_efficiency
from osd_hf.trace import DraftRound, Trace, bare_trace


def request(domain: str | None = None) -> Trace:
    return replace(bare_trace((), (), vocab_size=4), domain=domain)


def counted(examined: int, accepted: int) -> AcceptanceStats:
    return AcceptanceStats.from_counts(
        drafted=examined, examined=examined, accepted=accepted, emitted=examined + 1, target_forwards=1
    )


def each(counts: Sequence[Any]) -> list[AcceptanceStats]:
    return [counted(int(examined), int(accepted)) for examined, accepted in counts]


def rounds(matches: Sequence[bool], k: int = 5) -> tuple[int, int]:
    """Examined and accepted tokens of an answer, of which a draft would get these positions right."""
    examined = accepted = start = 0
    while start < len(matches):
        limit, length = min(k, len(matches) - start - 1), 0
        while length < limit and matches[start + length]:
            length += 1
        accepted += length
        examined += length + (length < limit)
        start += length + 1
    return examined, accepted


def stream(
    rng: np.random.Generator, requests: int, *, likeness: float = 0.8, fall: float = 0.0
) -> tuple[list[AcceptanceStats], list[AcceptanceStats]]:
    """Requests as two versions of a draft would serve them: some are hard, answers are long or short, and at a share
    of the positions (`likeness`) both versions predict the same. The second accepts less often by about `fall`."""
    sides: tuple[list[Any], list[Any]] = ([], [])
    for _ in range(requests):
        length, alpha = int(rng.integers(8, 64)), rng.beta(6, 4)
        before = rng.random(length) < alpha
        after = np.where(rng.random(length) < likeness, before, rng.random(length) < alpha)
        after &= rng.random(length) >= fall / 0.6
        for side, matches in zip(sides, (before, after), strict=True):
            side.append(rounds(matches.tolist()))
    return each(sides[0]), each(sides[1])


@pytest.mark.parametrize("likeness", [0.0, 0.9])
def test_the_error_of_a_gain_is_that_of_a_bootstrap_over_requests(likeness: float) -> None:
    rng = np.random.default_rng(3)
    before, after = stream(rng, 60, likeness=likeness)
    gain, error = paired_gain(before, after)
    counts = [np.concatenate([s.requests for s in side]) for side in (before, after)]
    drawn = rng.integers(60, size=(4000, 60))
    alphas = [c[drawn, 1].sum(1) / c[drawn, 0].sum(1) for c in counts]
    assert gain == pytest.approx(sum(after, AcceptanceStats()).alpha - sum(before, AcceptanceStats()).alpha)
    assert error == pytest.approx(float(np.std(alphas[1] - alphas[0])), rel=0.1)


@given(st.integers(0, 300))
def test_no_request_is_lost_or_learned_from_twice(number: int) -> None:
    lesson, requests = DraftRequests(ReadableTraces(models.VOCAB, models.VOCAB)), [request() for _ in range(number)]
    learned = [out for trace in requests if (out := lesson.hold_back(trace)) is not None]
    assert sorted(map(id, [*learned, *lesson.held_back])) == sorted(map(id, requests))
    whole = DraftRequests(ReadableTraces(models.VOCAB, models.VOCAB))
    kept = [trace for trace in requests if whole.hold_back(trace) is not trace]
    assert list(lesson.held_back) == kept[-NUM_HELD_BACK:]  # the newest
    assert [trace for trace in learned if trace in set(kept)] == kept[:-NUM_HELD_BACK]
    for block in range(number // HOLD_BACK_EVERY):
        four = requests[block * HOLD_BACK_EVERY : (block + 1) * HOLD_BACK_EVERY]
        assert sum(trace in set(kept) for trace in four) == 1
    others = set(requests) - set(kept)
    assert [trace for trace in learned if trace in others] == [trace for trace in requests if trace in others]


# --- who may serve --------------------------------------------------------------------------------------------------


def judged(before: Sequence[Any], after: Sequence[Any], labels: Sequence[str | None] | None = None) -> Any:
    held_back = [request(label) for label in (labels or [None] * len(before))]
    return judge(7, 3, "d", held_back, each(before), each(after))


ALIKE = [(40, 20), (30, 18), (50, 20), (20, 12), (44, 22), (36, 12), (40, 30), (25, 10)]


def moved(counts: Sequence[tuple[int, int]], by: Sequence[int]) -> list[tuple[int, int]]:
    return [(examined, accepted + by[i % len(by)]) for i, (examined, accepted) in enumerate(counts)]


@pytest.mark.parametrize(
    ("by", "outcome"),
    [
        ([0], "promoted"),  # as good
        ([3, 4], "promoted"),
        ([3, -1], "promoted"),
        ([1, -1], "kept back"),  # within the noise
        ([-2, 1], "kept back"),
        ([-5, -6], "dropped"),
    ],
)
def test_what_becomes_of_a_version(by: list[int], outcome: str) -> None:
    after = moved(ALIKE, by)
    decision = judged(ALIKE, after)
    assert decision.outcome == outcome
    assert (decision.version, decision.serving) == (7, 7 if outcome == "promoted" else 3)
    assert (decision.domain, decision.requests) == ("d", len(ALIKE))
    assert decision.alpha_before == pytest.approx(sum(a for _, a in ALIKE) / sum(e for e, _ in ALIKE))
    assert decision.alpha_after == pytest.approx(sum(a for _, a in after) / sum(e for e, _ in after))
    assert decision.standard_error == pytest.approx(paired_gain(each(ALIKE), each(after))[1])
    assert json.loads(json.dumps(decision.to_dict()))["reason"] == decision.reason


@pytest.mark.parametrize("number", range(MIN_HELD_BACK))
def test_few_held_back_requests_promote_nothing(number: int) -> None:
    decision = judged(ALIKE[:number], moved(ALIKE[:number], [9]))
    assert (decision.outcome, decision.serving, decision.requests) == ("kept back", 3, number)
    assert str(MIN_HELD_BACK) in decision.reason


def test_where_nothing_was_drafted_nothing_is_promoted() -> None:
    decision = judged([(0, 0)] * 6, [(0, 0)] * 6)
    assert (decision.outcome, decision.alpha_before, decision.standard_error) == ("kept back", None, None)


def test_a_gain_in_all_is_not_paid_for_by_one_label() -> None:
    better, worse = moved(ALIKE, [8, 9]), moved(ALIKE, [-4, -5])
    labels = ["gains"] * 8 + ["loses"] * 8
    decision = judged(ALIKE * 2, better + worse, labels)
    assert decision.outcome == "kept back"
    assert "'loses'" in decision.reason
    assert judged(ALIKE * 2, better + worse).outcome == "promoted"  # without labels nobody would know
    few = judged([*ALIKE, *ALIKE[:3]], [*better, *worse[:3]], labels[: 8 + 3])
    assert few.outcome == "promoted"  # of a label with fewer requests than are judged by


# --- who has to go --------------------------------------------------------------------------------------------------


def rolled_back_after(
    before: Sequence[AcceptanceStats], after: Sequence[AcceptanceStats], *, promoted_every: int | None = None
) -> int | None:
    """Requests until a rollback, asked as a learner asks: every 8 requests, over the newest since a promotion."""
    since = 0
    for seen in range(8, len(before) + 1, 8):
        start = max(since, seen - NUM_WATCHED)
        if regressed(5, 4, None, before[start:seen], after[start:seen]) is not None:
            return seen
        if promoted_every is not None and seen % promoted_every == 0:
            since = seen
    return None


@pytest.mark.parametrize("likeness", [0.0, 0.8, 0.97])
def test_versions_as_good_as_each_other_are_never_rolled_back(likeness: float) -> None:
    for seed in range(12):
        before, after = stream(np.random.default_rng(seed), 1000, likeness=likeness)
        for promoted_every in (8, 16, None):
            assert rolled_back_after(before, after, promoted_every=promoted_every) is None, (seed, promoted_every)


def test_a_real_fall_is_rolled_back_soon() -> None:
    took = []
    for seed in range(100):
        before, after = stream(np.random.default_rng(seed), 64, fall=0.1)
        took.append(rolled_back_after(before, after) or 999)
    assert np.mean(np.array(took) <= 40) >= 0.97
    assert np.median(took) <= 24


def test_harder_traffic_is_no_fall() -> None:
    easy, _ = stream(np.random.default_rng(0), 24, likeness=1.0)
    hard = each([(s.examined, s.accepted // 2) for s in easy])
    assert regressed(5, 4, None, easy + hard, easy + hard) is None
    assert regressed(5, 4, None, easy, hard) is not None


def test_a_rollback_tells_what_it_rests_on() -> None:
    before, after = each(ALIKE * 3), each(moved(ALIKE * 3, [-6, -7]))
    decision = regressed(5, 4, "d", before, after)
    assert decision is not None
    assert (decision.outcome, decision.version, decision.serving, decision.domain) == ("rolled back", 5, 4, "d")
    assert decision.requests == len(before)
    assert decision.alpha_before == pytest.approx(sum(before, AcceptanceStats()).alpha)
    assert decision.alpha_after == pytest.approx(sum(after, AcceptanceStats()).alpha)
    json.dumps(decision.to_dict())


@pytest.mark.parametrize("number", range(MIN_SERVED))
def test_few_served_requests_roll_nothing_back(number: int) -> None:
    assert regressed(5, 4, None, each([(9, 9)] * number), each([(9, 0)] * number)) is None


def test_a_better_version_or_none_at_all_is_left_alone() -> None:
    assert regressed(5, 4, None, each(ALIKE * 2), each(moved(ALIKE * 2, [5]))) is None
    assert regressed(5, 4, None, each([(0, 0)] * 20), each([(0, 0)] * 20)) is None


def test_the_evidence_is_bounded() -> None:
    lesson = DraftRequests(ReadableTraces(models.VOCAB, models.VOCAB))
    lesson.arrived.extend(request() for _ in range(3 * NUM_WATCHED))
    for _ in range(40 * NUM_HELD_BACK):
        lesson.hold_back(request())
    assert (len(lesson.arrived), len(lesson.held_back)) == (NUM_WATCHED, NUM_HELD_BACK)
    assert module.DROP_ERRORS < module.ROLL_BACK_ERRORS


# --- the draft of the next request -----------------------------------------------------------------------------------


CONFIG = OnlineConfig(
    update_interval=4, steps_per_update=2, batch_size=4, learning_rate=3e-3, update_strategy="interval"
)


def scored(accepted: int, examined: int = 20) -> AcceptanceStats:
    return AcceptanceStats.from_counts(
        drafted=examined, examined=examined, accepted=accepted, emitted=examined, target_forwards=5
    )


def test_two_bad_requests_of_other_traffic_change_the_choice_and_two_good_ones_change_it_back() -> None:
    choice = DraftChoice()
    assert not choice.is_original  # nothing is known
    for _ in range(30):
        choice.add(scored(8), scored(14))
    assert not choice.is_original
    for _ in range(2):
        choice.add(scored(10), scored(1))
    assert choice.is_original
    choice.add(scored(10), scored(15))
    choice.add(scored(10), scored(15))
    assert not choice.is_original


def served_version(assistant: OnlineAssistant, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
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
        served_version(assistant, prompts[0])
        assert assistant.wait_until_idle(60)
        spoil(assistant)
        bad, versions = assistant.version, []
        for ids in prompts[1:3]:
            output, version = served_version(assistant, ids)
            assert torch.equal(output, target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12))
            versions.append(version)
            assert assistant.wait_until_idle(60)
        assert versions == [bad, 0]
        assert assistant.drafts.requests[None].choice.is_original


def test_what_is_known_of_both_outlives_a_session(tmp_path: Path) -> None:
    target, draft = models.pair(noise=0.1)
    prompts = models.prompts(8)
    with OnlineAssistant(target, draft, config=CONFIG) as assistant:
        served_version(assistant, prompts[0])
        spoil(assistant)
        served_version(assistant, prompts[1])
        assistant.drafts.requests[None].effort.share = 0.25
        known = assistant.drafts.requests[None].choice.alphas()
        assistant.save_state(tmp_path)
    with OnlineAssistant(target, draft, config=CONFIG) as resumed:
        resumed.load_state(tmp_path)
        assert resumed.drafts.requests[None].choice.alphas() == known
        assert resumed.effort == 0.25
        assert served_version(resumed, prompts[2])[1] == 0


def test_without_a_gate_every_request_is_served_by_the_newest_version() -> None:
    target, draft = models.pair(noise=0.1)
    with OnlineAssistant(target, draft, config=replace(CONFIG, gate=False)) as assistant:
        prompts = models.prompts(6)
        served_version(assistant, prompts[0])
        spoil(assistant)
        assert [served_version(assistant, ids)[1] for ids in prompts[1:3]] == [assistant.version] * 2


def test_an_answer_carries_its_share_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []
    step: Callable[[Learner], Any] = Learner.step

    def counted(self: Learner) -> Any:
        before = self.seconds
        report = step(self)
        parts[-1] += self.seconds > before
        return report

    monkeypatch.setattr(Learner, "step", counted)
    target, draft = models.pair(noise=0.2)
    config = OnlineConfig(update_interval=4, steps_per_update=6, batch_size=4, learning_rate=3e-3)
    versions = []
    with OnlineAssistant(target, draft, config=config) as assistant:
        assistant.drafts.set_pace(min_effort=1.0)
        for ids in models.prompts(36):
            parts.append(0)
            versions.append(served_version(assistant, ids)[1])
    assert len(assistant.decisions) == 8
    # One update after the other: none waits until the next is due, and no answer does much more than another.
    assert parts[:3] == [0, 0, 0]
    assert min(parts[3:35]) > 0
    later = parts[11:35]
    assert max(later) <= 2.25 * sum(later) / len(later)


def accepted_of(number: int, of: int = 20) -> Trace:
    """A request of which so many drafted tokens were accepted, each round one."""
    one = np.ones(1, np.int32)
    rounds = [DraftRound(one, 1, 1)] * number + [DraftRound(2 * one, 0, 1)] * (of - number)
    return replace(bare_trace([1, 2], [1] * of, models.VOCAB), rounds=tuple(rounds))


def test_while_little_is_learned_one_request_in_a_few_is_compared() -> None:
    lesson = DraftRequests(ReadableTraces(models.VOCAB, models.VOCAB), config=OnlineConfig())
    lesson.effort.share = 0.1
    compared = []
    for i in range(40):
        lesson.observe(accepted_of(15 + i % 3))
        if not lesson.may_wait():
            compared.append((i, *lesson.take_arrived()))
    assert [i for i, *_ in compared] == list(range(3, 40, 4))
    assert {(len(traces), stands_for) for _, traces, stands_for in compared} == {(1, 4)}


# --- the effort ------------------------------------------------------------------------------------------------------


@functools.cache
def of(alpha: float, examined: int = 100) -> AcceptanceStats:
    return scored(round(alpha * examined), examined)


def seconds_at(c: float) -> Callable[[float], float]:
    """The seconds of a token, in those of a target forward, by the best k; a drafted token takes `c`."""
    return lambda alpha: min((1 + c * k) / expected_block_efficiency(alpha, k) for k in range(9))


def after_update(effort: Effort, original: float, gain: float, *, c: float = 0.22, cost: float = 0.0) -> float:
    """The share after an update that took `cost`, in target forwards; held-back requests have this gain, on average,
    and 80 tokens."""
    effort.spent(cost)
    pairs = [(of(original + d), of(original + d + gain + d / 2)) for d in (-0.18, 0.0, 0.0, 0.18)] * 4
    before, after = zip(*pairs, strict=True)
    effort.judged(before, after, seconds_at(c), 80)
    return effort.share


# Gains of the lab draft on 200 sampled requests of gsm8k, from the first version that was judged.
NARROW = (-0.03, -0.02, -0.01, 0.01, 0.03, 0.04, 0.05, 0.05, 0.07, 0.07, 0.08, 0.09, 0.11, 0.12, 0.12, 0.13, 0.14)
CHATS = (-0.02, -0.01, 0.0, 0.0, 0.01, 0.01, 0.01, 0.02, 0.02, 0.02)
# An update of eight requests that takes as long as 80 or 160 forwards: 12% and 25% of the time of plain answers.
UPDATE, LARGE_UPDATE = 80.0, 160.0


@pytest.mark.parametrize("original", [0.35, 0.43, 0.55])
def test_narrow_traffic_is_learned_although_the_first_versions_are_worse(original: float) -> None:
    effort = Effort()
    assert [after_update(effort, original, gain, cost=UPDATE) for gain in NARROW] == [1.0] * len(NARROW)


def test_learning_stops_where_no_likely_acceptance_repays_it() -> None:
    effort = Effort()  # everyday chats with a weak draft
    shares = [after_update(effort, 0.19, gain, cost=LARGE_UPDATE) for gain in CHATS]
    reduced = OPEN_EFFORT * effort.least  # nothing is shown: the gains are smaller than their errors
    assert shares == [1.0] * (OPEN_UPDATES - 1) + [reduced] * (len(CHATS) - OPEN_UPDATES + 1)
    assert after_update(effort, 0.19, -0.15, cost=LARGE_UPDATE) == effort.least
    assert after_update(effort, 0.19, 0.1, c=1.0, cost=LARGE_UPDATE) == GAIN_EFFORT * effort.least
    assert after_update(Effort(), 0.19, 0.0, cost=LARGE_UPDATE / 10) == 1  # a cheap learner may try
    slow = Effort()  # a draft as slow as its target never saves anything
    assert [after_update(slow, 0.6, 0.0, c=1.0) for _ in range(FULL_UPDATES)][-1] < 1
    assert after_update(Effort(1.0), 0.19, 0.0, cost=LARGE_UPDATE) == 1  # asked for


# Gains of the bundled draft of SmolLM2 on sampled requests, as replay showed them after each update.
FINANCE = (-0.004, -0.001, -0.003, 0.019, 0.022, 0.03, 0.04, 0.05, 0.05, 0.06, 0.07, 0.08)
KNOWN_CHATS = (-0.002, -0.04, -0.05, -0.04, -0.04, -0.04, -0.04)


def test_what_is_learned_slowly_goes_on_and_what_is_lost_stops() -> None:
    effort = Effort()
    assert [after_update(effort, 0.32, gain, cost=UPDATE, c=0.14) for gain in FINANCE] == [1.0] * len(FINANCE)
    effort = Effort()
    shares = [after_update(effort, 0.3, gain, cost=UPDATE, c=0.14) for gain in KNOWN_CHATS]
    assert shares == [1.0] * (FULL_UPDATES - 1) + [effort.least] * (len(KNOWN_CHATS) - FULL_UPDATES + 1)


def test_versions_that_change_nothing_are_no_loss() -> None:
    effort, scores = Effort(), [of(0.3)] * 8
    for _ in range(OPEN_UPDATES - 1):
        effort.spent(UPDATE)
        effort.judged(scores, scores, seconds_at(0.14), 80)
        assert effort.share == 1
    effort.spent(10 * UPDATE)
    effort.judged(scores, scores, seconds_at(0.14), 80)
    assert effort.share == OPEN_EFFORT * effort.least


def test_learning_stops_once_acceptance_rises_no_more_and_goes_on_when_it_does() -> None:
    effort = Effort()
    shares = [after_update(effort, 0.43, 0.02, cost=UPDATE) for _ in range(2 * RISE_UPDATES)]
    assert shares == [1.0] * RISE_UPDATES + [OPEN_EFFORT * effort.least] * RISE_UPDATES
    assert [after_update(effort, 0.43, gain, cost=UPDATE) for gain in (0.03, 0.06, 0.09)][-1] == 1


def test_what_is_not_timed_or_free_goes_on() -> None:
    effort = Effort()
    effort.spent(1e9)
    effort.judged([of(0.2)] * 8, [of(0.2)] * 8, lambda alpha: None, 80)
    assert effort.share == 1  # nobody knows
    assert after_update(effort, 0.5, 0.0) == 1  # idle time costs nothing
    effort.spent(1e9)
    effort.judged([of(0.2)] * (MIN_HELD_BACK - 1), [of(0.2)] * (MIN_HELD_BACK - 1), seconds_at(0.3), 80)
    assert effort.share == 1  # too few to judge by


def test_learning_begins_anew_when_traffic_changes() -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, 200)
    for fallen in (-0.2, 0.1):  # worse than the original draft; or of less use than before
        effort = Effort()
        for _ in range(OPEN_UPDATES):
            after_update(effort, 0.19, 0.0, cost=LARGE_UPDATE)
        for gain in 0.3 + noise:
            effort.served(of(0.3), of(0.3 + float(gain)))
        assert effort.share < 1
        for gain in fallen + noise[:RECENT_REQUESTS]:
            effort.served(of(0.3), of(0.3 + float(gain)))
        assert effort.share == 1


def test_a_saved_effort_goes_on() -> None:
    one, other = Effort(), Effort()
    for gain in NARROW[:9]:
        after_update(one, 0.43, gain, cost=UPDATE)
        one.served(of(0.4), of(0.45))
    one.spent(5.0)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for effort in (one, other):
        after_update(effort, 0.43, 0.05, cost=UPDATE)
    assert one.state_dict() == other.state_dict()


def test_an_assistant_updates_less_often_by_its_effort() -> None:
    target, draft = models.pair(noise=0.2)
    config = OnlineConfig(
        update_strategy="interval", update_interval=2, steps_per_update=1, batch_size=2, learning_rate=3e-3
    )
    with OnlineAssistant(target, draft, config=config) as assistant:
        assert assistant.effort == 1
        assistant.drafts.requests[None].effort.share = 0.25
        assert assistant.effort == 0.25
        for ids in models.prompts(16):
            assistant.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        assert len(assistant.decisions) == 2
