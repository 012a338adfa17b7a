"""How many tokens to draft, on a made-up machine: what each forward takes and what is accepted is given."""

import itertools
import random
from typing import Any

import pytest

from osd_hf.decoding.draft_length import DRAFT, FixedPace, Pace, Pacer, RoundTime
from osd_hf.speedup import expected_block_efficiency

TARGET = 1.0  # seconds of a forward
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
    assert measured > 1.02 * best


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
    assert rate(alpha, 0.15, plan.k) > 0.95 * rate(alpha, 0.15, best_fixed(alpha, 0.15))
    assert plan.draft_seconds == pytest.approx(0.15, rel=0.3)
    assert plan.plain_seconds == pytest.approx(TARGET, rel=0.3)


# --- when speculation loses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [20, 100])
@pytest.mark.parametrize(("alpha", "draft"), [(0.0, 0.1), (0.05, 0.3), (0.3, 0.9), (0.9, 3.0)])
def test_a_draft_that_does_not_pay_costs_little(alpha: float, draft: float, length: int) -> None:
    world = World(alpha, draft)
    pacer = settled(world)
    assert not pacer.plan().speculates
    assert pacer.plan().k == 0
    measured = world.rate_of(lambda: [world.serve(pacer.pace(), length=length) for _ in range(400)])
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


# --- what once went wrong -------------------------------------------------------------------------------------------


def test_a_token_takes_what_the_best_way_to_it_takes() -> None:
    pacer = Pacer()
    assert pacer.token_seconds(0.5) is None
    for _ in range(40):
        for k in (1, 2, 4, 8):  # 10 ms a plain round, 12 and 1 a drafted token otherwise
            pacer.costs.add(RoundTime(seconds=0.010))
            pacer.costs.add(RoundTime(k, k, 0.001 * k, 0.012 + 0.001 * k))
    plain = pacer.token_seconds(0.0)
    assert plain == pytest.approx(0.010, rel=0.05)
    assert pacer.token_seconds(0.1) == plain  # drafting would lose
    found = [pacer.token_seconds(alpha) for alpha in (0.5, 0.7, 0.9)]
    best = [min((0.012 + 0.001 * k) / expected_block_efficiency(a, k) for k in range(1, 33)) for a in (0.5, 0.7, 0.9)]
    assert found == pytest.approx(best, rel=0.05)
