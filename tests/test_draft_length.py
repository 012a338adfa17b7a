"""How many tokens to draft, on a made-up machine: what each forward takes and what is accepted is given."""

import itertools
import math
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osd_hf.decoding.draft_length import DRAFT, FixedPace, Pace, Pacer, RoundTime
from osd_hf.decoding.text import Guess
from osd_hf.speedup import expected_block_efficiency

TARGET = 1.0  # seconds of a forward
GUESS = Guess(7, 0, 3, 1, 1)
PER_TOKEN = 0.02  # seconds that one more token in it takes
SURE, UNSURE = 0.95, 0.15  # chances of tokens, where confidence tells


class World:
    """
    A machine, a target and a draft. A token is accepted with probability `alpha`; where confidence tells, `alpha` is
    the mean of two kinds of tokens, and the draft knows which kind a token is; elsewhere what it says means nothing.
    """

    def __init__(self, alpha: float, draft: float, *, tells: bool = False, spikes: float = 0.0, seed: int = 0) -> None:
        self.alpha = alpha
        self.draft = draft
        self.tells = tells
        self.spikes = spikes
        self.slow = 1.0
        self.random = random.Random(seed)
        self.emitted = 0
        self.seconds = 0.0

    def _takes(self, seconds: float) -> float:
        taken = self.slow * seconds * self.random.uniform(0.9, 1.1)
        if self.random.random() < self.spikes:
            taken *= 50
        else:
            self.seconds += taken  # a spike is nobody's fault
        return taken

    def _token(self) -> tuple[float, bool]:
        """What the draft says of a token, and whether the target will accept it."""
        if not self.tells:
            return self.random.random(), self.random.random() < self.alpha
        share = (self.alpha - UNSURE) / (SURE - UNSURE)
        chance = SURE if self.random.random() < share else UNSURE
        return chance, self.random.random() < chance

    def serve(self, pace: Pace, requests: int = 1, length: int = 100) -> None:
        for _ in range(requests):
            self._request(pace, length)

    def _request(self, pace: Pace, length: int) -> None:
        self.emitted += length
        if pace.is_plain():
            times = [self._takes(TARGET) for _ in range(length)]
            pace.timed(RoundTime(seconds=sum(times) / length, rounds=length))
            pace.ended()
            return
        left, before = length, None
        while left > 0:
            if before is not None:
                pace.timed(before)
            pace.begin()
            tokens: list[tuple[float, bool]] = []
            times: list[float] = []
            while len(tokens) < left - 1 and pace.next(()) == DRAFT:
                tokens.append(self._token())
                times.append(self._takes(self.draft))
                pace.drafted(1, tokens[-1][0])
            verifying = self._takes(TARGET + PER_TOKEN * len(tokens))
            accepted = sum(1 for _ in itertools.takewhile(lambda token: token[1], tokens))
            # The first round reads the prompt.
            seconds = None if before is None else sum(times) + verifying
            before = RoundTime(len(tokens), len(times), sum(times), seconds)
            pace.judged(accepted, [1] * (accepted + 1))
            left -= accepted + 1
        if before is not None:
            pace.timed(before)
        pace.ended()

    def rate_of(self, serve: Any) -> float:
        """Tokens a second while `serve` runs."""
        emitted, seconds = self.emitted, self.seconds
        serve()
        return (self.emitted - emitted) / (self.seconds - seconds)


class TextWorld:
    """A machine, a target, and past text, which has a guess at nine tokens of ten that is right with probability
    `right`; rounds of a `spell` take some times as long, as where another program uses the cores."""

    def __init__(
        self, right: float, spell: range = range(0), times: float = 1.0, per_token: float = 0.03, draft: float = 0.0
    ) -> None:
        self.right, self.spell, self.times, self.per_token, self.draft = right, spell, times, per_token, draft
        self.random = random.Random(0)
        self.rounds = self.proposed = 0

    def _takes(self, seconds: float) -> float:
        return seconds * self.random.uniform(0.95, 1.05)

    def serve(self, pacer: Pacer, length: int = 60) -> float:
        """Seconds of a request, were the machine not busy."""
        pace = pacer.pace(sources="both" if self.draft else "text")
        if pace.is_plain():
            times = [self._takes(TARGET) for _ in range(length)]
            pace.timed(RoundTime(seconds=sum(times) / length, rounds=length))
            pace.ended()
            return sum(times)
        left, before, total = length, None, 0.0
        while left > 0:
            if before is not None:
                pace.timed(before)
            pace.begin()
            tokens, times = list[bool](), list[float]()
            follows = self.random.random() < self.right  # whether the guess at the round's first token is right
            while len(tokens) < left - 1:
                has_guess = self.random.random() < 0.9
                source = pace.next([GUESS] if has_guess else [], self.draft > 0)
                if source is None:
                    break
                is_guess = source != DRAFT
                if not is_guess:
                    times.append(self._takes(self.draft))
                    pace.drafted(GUESS.token + 1, 0.5)
                likely = self.random.random() < (self.right if is_guess else 0.5)
                tokens.append(follows if is_guess and not tokens else likely)
                self.proposed += is_guess
            verifying = self._takes(TARGET + self.per_token * len(tokens))
            accepted = sum(1 for _ in itertools.takewhile(bool, tokens))
            total, self.rounds = total + sum(times) + verifying, self.rounds + 1
            slow = self.times if self.rounds in self.spell else 1.0
            times = [slow * taken for taken in times]
            seconds = None if before is None else sum(times) + slow * verifying
            before = RoundTime(len(tokens), len(times), sum(times), seconds)
            emitted = GUESS.token if follows and not tokens else GUESS.token + 1  # in a plain round what text had said
            pace.judged(accepted, [GUESS.token] * accepted + [emitted])
            left -= accepted + 1
        assert before is not None
        pace.timed(before)
        pace.ended()
        return total

    def later_rate(self, pacer: Pacer | None = None, requests: int = 60) -> float:
        """Tokens a second of the last third of some requests, of which the first have the spell."""
        pacer = pacer or Pacer()
        seconds = [self.serve(pacer) for _ in range(requests)]
        return 60 * (requests // 3) / sum(seconds[-(requests // 3) :])


def rate(alpha: float, draft: float, k: int) -> float:
    """Tokens a second by the cost model."""
    return expected_block_efficiency(alpha, k) / (TARGET + k * (PER_TOKEN + draft))


def best_fixed(alpha: float, draft: float) -> int:
    return max(range(33), key=lambda k: rate(alpha, draft, k))


def settled(world: World, requests: int = 20) -> Pacer:
    pacer = Pacer()
    for _ in range(requests):
        world.serve(pacer.pace())
    return pacer


# --- finding k ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [0.05, 0.15, 0.4])
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7, 0.85])
def test_the_plan_is_the_best_fixed_k(alpha: float, draft: float) -> None:
    world = World(alpha, draft)
    pacer = settled(world)
    best = best_fixed(alpha, draft)
    found = []
    for _ in range(20):
        world.serve(pacer.pace())
        found.append(pacer.plan().k)
    middle = sorted(found)[len(found) // 2]
    print(f"alpha {alpha}, c {draft}: best {best}, found {sorted(found)}, {pacer.plan()}")
    assert abs(middle - best) <= 1
    assert rate(alpha, draft, middle) > 0.98 * rate(alpha, draft, best)


@pytest.mark.parametrize(("alpha", "draft"), [(0.6, 0.1), (0.75, 0.1), (0.75, 0.25)])
def test_where_confidence_tells_rounds_end_by_it(alpha: float, draft: float) -> None:
    world = World(alpha, draft, tells=True)
    pacer = settled(world, 40)
    measured = world.rate_of(lambda: [world.serve(pacer.pace()) for _ in range(60)])
    fixed = {}
    for k in range(1, 13):
        other = World(alpha, draft, tells=True, seed=k)
        fixed[k] = other.rate_of(lambda other=other, k=k: other.serve(FixedPace(k), 60))
    best = max(fixed.values())
    print(f"alpha {alpha}, c {draft}: {measured / best:.3f} of the best fixed k, {pacer.plan()}")
    assert measured > 1.02 * best


def test_a_machine_that_slows_down_changes_nothing() -> None:
    world = World(0.75, 0.15)
    pacer = settled(world)
    before = pacer.plan()
    world.slow = 3.0
    for _ in range(30):
        world.serve(pacer.pace())
    after = pacer.plan()
    assert abs(after.k - before.k) <= 1
    assert after.speculates
    assert after.draft_seconds == pytest.approx(3 * world.draft, rel=0.25)
    assert after.plain_seconds == pytest.approx(3 * TARGET, rel=0.25)


def test_costs_are_followed() -> None:
    world = World(0.75, 0.05)
    pacer = settled(world)
    cheap = pacer.plan()
    world.draft = 0.6
    for _ in range(60):
        world.serve(pacer.pace())
    dear = pacer.plan()
    assert cheap.k - dear.k >= 3
    assert abs(dear.k - best_fixed(0.75, 0.6)) <= 1


@pytest.mark.parametrize("alpha", [0.5, 0.85])
def test_a_busy_machine_does_not_spoil_the_costs(alpha: float) -> None:
    world = World(alpha, 0.15, spikes=0.003)
    pacer = settled(world, 40)
    plan = pacer.plan()
    print(plan)
    assert rate(alpha, 0.15, plan.k) > 0.95 * rate(alpha, 0.15, best_fixed(alpha, 0.15))
    assert plan.draft_seconds == pytest.approx(0.15, rel=0.3)
    assert plan.plain_seconds == pytest.approx(TARGET, rel=0.3)


@cache
def usual_rate(right: float, draft: float) -> float:
    """Tokens a second without a spell."""
    return TextWorld(right, draft=draft).later_rate()


@pytest.mark.parametrize("draft", [0.0, 0.2])
@pytest.mark.parametrize("right", [0.5, 0.8])
@pytest.mark.parametrize(("rounds", "times"), [(1, 10.0), (1, 30.0), (5, 30.0), (20, 2.5), (20, 30.0)])
def test_past_text_is_not_given_up_for_a_busy_spell(right: float, rounds: int, times: float, draft: float) -> None:
    usual = usual_rate(right, draft)
    assert usual > 1.4 / TARGET
    found = {
        first: TextWorld(right, range(first, first + rounds), times, draft=draft).later_rate() / usual
        for first in range(2, 40, 5)
    }
    print(f"of the usual rate, at worst: {sorted(found.values())[:3]}, by its first round: {found}")
    assert sorted(found.values())[1] > 0.85  # one may be out of luck
    assert min(found.values()) > 0.6


def test_what_is_dear_is_given_up_though_it_is_tried_again() -> None:
    world, pacer = TextWorld(0.3, per_token=0.9), Pacer()
    world.later_rate(pacer, 120)
    proposed = world.proposed
    found = world.later_rate(pacer, 120)
    print(f"{found:.3f} of the target alone, {world.proposed - proposed} tokens proposed in 120 requests")
    assert found * TARGET > 0.97
    assert 0 < world.proposed - proposed < 120


# --- when speculation loses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [20, 100])
@pytest.mark.parametrize(("alpha", "draft"), [(0.0, 0.1), (0.05, 0.3), (0.3, 0.9), (0.9, 3.0)])
def test_a_draft_that_does_not_pay_costs_little(alpha: float, draft: float, length: int) -> None:
    world = World(alpha, draft)
    pacer = settled(world)
    assert not pacer.plan().speculates
    assert pacer.plan().k == 0
    measured = world.rate_of(lambda: [world.serve(pacer.pace(), length=length) for _ in range(400)])
    print(f"alpha {alpha}, c {draft}: {measured * TARGET:.4f} of the target alone")
    assert measured * TARGET > 0.97
    assert not pacer.plan().speculates


@pytest.mark.parametrize("length", [20, 100])
def test_speculation_comes_back_once_it_pays(length: int) -> None:
    world = World(0.05, 0.2)
    pacer = settled(world)
    for _ in range(50):
        world.serve(pacer.pace(), length=length)
    assert not pacer.plan().speculates
    world.alpha = 0.85
    requests = 0
    while not pacer.plan().speculates and requests * length < 40_000:
        pacer.draft_changed()
        world.serve(pacer.pace(), length=length)
        requests += 1
    print(f"after {requests * length} tokens")
    assert pacer.plan().speculates
    for _ in range(4000 // length):
        world.serve(pacer.pace(), length=length)
    assert pacer.plan().alpha == pytest.approx(0.85, abs=0.1)
    assert rate(0.85, 0.2, pacer.plan().k) > 0.95 * rate(0.85, 0.2, best_fixed(0.85, 0.2))


# --- what is known --------------------------------------------------------------------------------------------------


def test_costs_are_measured_in_the_first_rounds() -> None:
    world = World(0.7, 0.2)
    pacer = Pacer()
    plan = pacer.plan()
    assert plan.speculates
    assert plan.draft_seconds is plan.plain_seconds is None
    pace = pacer.pace()
    assert not pace.is_plain()
    world.serve(pace, length=60)
    plan = pacer.plan()
    assert plan.draft_seconds == pytest.approx(0.2, rel=0.2)
    assert plan.plain_seconds == pytest.approx(TARGET, rel=0.2)


def test_domains_share_costs_and_nothing_else() -> None:
    pacer = Pacer()
    easy, hard = World(0.9, 0.2), World(0.0, 0.2)
    for _ in range(20):
        easy.serve(pacer.pace("easy"))
        hard.serve(pacer.pace("hard"))
    assert pacer.plan("easy").speculates
    assert pacer.plan("easy").alpha > 0.8
    assert not pacer.plan("hard").speculates
    assert pacer.plan("hard").alpha < 0.2
    other = pacer.plan("other")
    assert other.examined < 10
    assert 0.4 < other.alpha < 0.8
    assert other.draft_seconds == pacer.plan("easy").draft_seconds == pytest.approx(0.2, rel=0.2)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0, 1), max_size=32),
            st.integers(0, 32),
            st.floats(1e-6, 10),
            st.one_of(st.none(), st.floats(1e-6, 100)),
        ),
        max_size=60,
    )
)
def test_whatever_it_is_told_a_plan_comes_out(rounds: list[tuple[list[float], int, float, float | None]]) -> None:
    pacer = Pacer()
    pace = pacer.pace()
    for confidences, right, drafting, verifying in rounds:
        assert isinstance(pace.is_plain(), bool)
        pace.begin()
        drafted = 0
        for confidence in confidences:
            if pace.next(()) != DRAFT:
                break
            drafted += 1
            pace.drafted(1, confidence)
        accepted = min(right, drafted)
        pace.judged(accepted, [1] * (accepted + 1))
        drafting *= drafted > 0
        pace.timed(RoundTime(drafted, drafted, drafting, None if verifying is None else drafting + verifying))
        plan = pacer.plan()
        assert 0 <= plan.alpha <= 1
        assert 0 <= plan.k <= 32
        assert plan.speculates == (plan.k > 0)
        assert all(math.isfinite(x) for x in plan.to_dict().values() if isinstance(x, float))
        assert plan.speedup >= 1.0


# --- a fixed number -------------------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.floats(0, 1, exclude_min=True))
def test_a_threshold_ends_a_draft_behind_a_token_below_it(confidence: float, threshold: float) -> None:
    pace = FixedPace(3, threshold)
    assert pace.reads_confidence
    pace.begin()
    assert pace.next(()) == DRAFT
    pace.drafted(1, confidence)
    assert (pace.next(()) == DRAFT) == (confidence >= threshold)


# --- what once went wrong -------------------------------------------------------------------------------------------


def test_a_hard_request_is_drafted_less_than_its_domain() -> None:
    world = World(0.85, 0.15)
    pacer = settled(world)
    world.alpha = 0.0
    pace = pacer.pace()
    drafted = 0
    for number in range(40):
        count = 0
        pace.begin()
        while pace.next(()) == DRAFT:
            count += 1
            pace.drafted(1, 0.5)
        pace.judged(0, [1])
        pace.timed(RoundTime(count, count, 0.15 * count, 0.15 * count + 1.0 + 0.02 * count))
        drafted += count if number >= 20 else 0
    assert pacer.plan().k >= 4
    assert drafted < 2 * 20


def test_a_token_takes_what_the_best_way_to_it_takes() -> None:
    pacer = Pacer()
    assert pacer.token_seconds(0.5) is None
    assert pacer.could_save(30, 0.5, None) is pacer.could_save(30, 0.5, 4) is None
    for _ in range(40):
        for k in (1, 2, 4, 8):  # 10 ms a plain round, 12 and 1 a drafted token otherwise
            pacer.costs.add(RoundTime(seconds=0.010))
            pacer.costs.add(RoundTime(k, k, 0.001 * k, 0.012 + 0.001 * k))
    plain = pacer.token_seconds(0.0)
    assert plain == pytest.approx(0.010, rel=0.05)
    assert pacer.token_seconds(0.1) == plain  # drafting would lose
    found = [pacer.token_seconds(alpha) for alpha in (0.5, 0.7, 0.9)]
    assert pacer.could_save(30, 0.5, None) == pytest.approx(30 * (found[0] - found[2]))  # type: ignore[operator]
    assert pacer.could_save(30, 0.95, None) == 0
    rounds = [30 / expected_block_efficiency(alpha, 4) for alpha in (0.5, 0.9)]
    assert pacer.could_save(30, 0.5, 4) == pytest.approx(0.016 * (rounds[0] - rounds[1]), rel=0.05)
    best = [min((0.012 + 0.001 * k) / expected_block_efficiency(a, k) for k in range(1, 33)) for a in (0.5, 0.7, 0.9)]
    assert found == pytest.approx(best, rel=0.05)


def test_a_token_of_a_batch_takes_its_share_of_the_round() -> None:
    pacer = Pacer()
    costs = pacer.of_batches(8)
    for _ in range(40):
        for k in (1, 2, 4, 8):  # 24 ms a plain round of eight rows
            pacer.took(RoundTime(seconds=0.024), 8, costs, 8)
            pacer.took(RoundTime(k, k, 0.001 * k, 0.030 + 0.001 * k), 16, costs, 8)
    assert pacer.token_seconds(0.0) == pytest.approx(0.003, rel=0.05)
    assert pacer.round_seconds(4) == pytest.approx(0.034 / 8, rel=0.05)
