import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osd_hf.acceptance import AcceptanceStats, paired_gain
from osd_hf.learning import gate as module
from osd_hf.learning.gate import LEAST_HELD_BACK, LEAST_SERVED, judge, regressed
from osd_hf.learning.lesson import HELD_BACK, HOLD_BACK_EVERY, WATCHED, Lesson
from osd_hf.trace import Trace


def request(domain: str | None = None) -> Trace:
    nothing = np.zeros((0, 1), np.float16), np.zeros((0, 1), np.uint16), np.zeros(0, np.float32)
    ids = np.zeros(0, np.int32)
    return Trace(ids, ids, (), *nothing, vocab_size=4, domain=domain)


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


# --- a gain and its error -------------------------------------------------------------------------------------------


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


def test_the_error_is_that_of_repeated_streams() -> None:
    rng = np.random.default_rng(4)
    found = np.array([paired_gain(*stream(rng, 32)) for _ in range(300)])
    assert found[:, 1].mean() == pytest.approx(found[:, 0].std(), rel=0.1)
    assert abs(found[:, 0].mean()) < 3 * found[:, 0].std() / math.sqrt(300)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=20))
def test_turned_round_a_gain_is_a_loss(pairs: list[tuple[int, int]]) -> None:
    before = each([(30, min(a, 30)) for a, _ in pairs])
    after = each([(30, min(b, 30)) for _, b in pairs])
    gain, error = paired_gain(before, after)
    back, same = paired_gain(after, before)
    assert (gain, error) == (pytest.approx(-back), pytest.approx(same))
    assert paired_gain(before, before)[0] == 0
    assert error == math.inf if len(pairs) == 1 else error >= 0


def test_hard_and_easy_requests_cancel() -> None:
    before = each([(20, 2), (20, 18), (20, 5), (20, 15)])
    after = each([(20, 3), (20, 19), (20, 6), (20, 16)])
    assert paired_gain(before, after) == (pytest.approx(0.05), pytest.approx(0, abs=1e-12))


def test_where_nothing_was_examined_there_is_no_gain() -> None:
    nothing = each([(0, 0)] * 3)
    for sides in ((nothing, each([(5, 3)] * 3)), (each([(5, 3)] * 3), nothing)):
        assert all(map(math.isnan, paired_gain(*sides)))


def test_traffic_in_turns_is_held_back_from_every_domain() -> None:
    lesson = Lesson()
    for i in range(4 * HOLD_BACK_EVERY * HELD_BACK):
        lesson.hold_back(request(domain="abcd"[i % 4]))
    assert {trace.domain for trace in lesson.held_back} == set("abcd")


# --- requests held back ---------------------------------------------------------------------------------------------


@given(st.integers(0, 300))
def test_no_request_is_lost_or_learned_from_twice(number: int) -> None:
    lesson, requests = Lesson(), [request() for _ in range(number)]
    learned = [out for trace in requests if (out := lesson.hold_back(trace)) is not None]
    assert sorted(map(id, [*learned, *lesson.held_back])) == sorted(map(id, requests))
    whole = Lesson()
    kept = [trace for trace in requests if whole.hold_back(trace) is not trace]
    assert list(lesson.held_back) == kept[-HELD_BACK:]  # the newest
    assert [trace for trace in learned if trace in set(kept)] == kept[:-HELD_BACK]
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


@pytest.mark.parametrize("number", range(LEAST_HELD_BACK))
def test_few_held_back_requests_promote_nothing(number: int) -> None:
    decision = judged(ALIKE[:number], moved(ALIKE[:number], [9]))
    assert (decision.outcome, decision.serving, decision.requests) == ("kept back", 3, number)
    assert str(LEAST_HELD_BACK) in decision.reason


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
        start = max(since, seen - WATCHED)
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


@pytest.mark.parametrize("number", range(LEAST_SERVED))
def test_few_served_requests_roll_nothing_back(number: int) -> None:
    assert regressed(5, 4, None, each([(9, 9)] * number), each([(9, 0)] * number)) is None


def test_a_better_version_or_none_at_all_is_left_alone() -> None:
    assert regressed(5, 4, None, each(ALIKE * 2), each(moved(ALIKE * 2, [5]))) is None
    assert regressed(5, 4, None, each([(0, 0)] * 20), each([(0, 0)] * 20)) is None


def test_the_evidence_is_bounded() -> None:
    lesson = Lesson()
    lesson.arrived.extend(request() for _ in range(3 * WATCHED))
    for _ in range(40 * HELD_BACK):
        lesson.hold_back(request())
    assert (len(lesson.arrived), len(lesson.held_back)) == (WATCHED, HELD_BACK)
    assert module.FELL < module.ROLL_BACK
