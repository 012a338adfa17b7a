"""Where candidates come from and how many there are, by the acceptance and the costs that serving itself measures."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from osd_hf.acceptance import UNTIMED
from osd_hf.decoding import vocabulary
from osd_hf.decoding.forward import DraftForward
from osd_hf.decoding.text import Guess
from osd_hf.errors import UnsupportedModelError
from osd_hf.models import unwrap, vocab_size_of
from osd_hf.speedup import ForwardSeconds, expected_block_efficiency
from osd_hf.utils.kernels import fast_kernels, unpack

if TYPE_CHECKING:
    from osd_hf.decoding.generator import LeanDrafting

COSTS_KNOWN = 4  # rounds of either kind
MEMORY = 128  # observations after which an old one counts a third
FEW = MEMORY / 4  # observations of a line that they may all be given up after
RIDGE = 0.25  # variance of candidates at which their slope is half the prior one
PRIOR_SLOPE = 0.02  # what one more candidate adds to a round, over a plain one, until rounds of several were seen
PROMPT = 64  # tokens that the draft is fed at once, from which on it reads a prompt
FED = 2  # tokens that a round's first forward of the draft is fed where it drafted in the round before
SPIKE = 8.0  # times as long as usual
FAR = 3.0  # times what was expected, from which on a round says little, or what was expected was wrong
NEAR = 2.0  # times the quickest of the first few rounds, of which nothing is expected yet, that one counts for at most
LEAST_ROUND = 0.7  # of a plain round that one with candidates takes at least
RETRY = 32  # rounds after which past text is proposed although it looks too dear
LEAST_TOKENS = 0.25  # that it has to be expected to bring then
LEVEL_MEMORY = 16  # rounds in which a machine that slows down, or a context that grows, is followed
# Confidences between two edges share one estimate of acceptance.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
PRIOR_ALPHA, PRIOR_WEIGHT = 0.6, 4.0
MOST_OF_A_REQUEST = 16  # examined tokens of it that count
PROBE_SHARE = 0.015  # of the time of plain decoding may be lost in finding out whether speculation has begun to pay
SURE = 20  # examined tokens of a domain below which its alpha is not trusted, and drafting goes on to learn it
TEXT_MEMORY = 256  # guesses of one situation after which an old one counts a third


@dataclass(frozen=True)
class RoundTime:
    """
    What a round took, or several did on average: `candidates` that the target verified, `forwards` of the draft,
    seconds of the first of these, to which `fed` tokens were fed, and of the others together, and of the whole round:
    `None` where it also read a prompt, which says nothing about others.
    """

    candidates: int = 0
    forwards: int = 0
    fed: int = 0
    first_seconds: float = 0.0
    next_seconds: float = 0.0
    seconds: float | None = None
    rounds: int = 1

    @property
    def draft_seconds(self) -> float:
        return self.first_seconds + self.next_seconds


class Average:
    """Mean of recent values: the older one is, the less it counts; `memory` values later, a third."""

    def __init__(self, mean: float = 0.0, weight: float = 0.0, memory: int = MEMORY) -> None:
        self.mean, self.weight, self.memory = mean, weight, memory

    def add(self, value: float, count: int = 1) -> None:
        fresh = min(count, self.memory)
        self.fade(fresh)
        self.weight += fresh
        self.mean += (value - self.mean) * fresh / self.weight

    def fade(self, count: int = 1) -> None:
        """Forget as much as that many new values would make forgotten."""
        self.weight *= (1 - 1 / self.memory) ** count


class Cost(Average):
    """Mean of recent times, of which some are of a machine that did something else: it compiled, perhaps, the first
    time."""

    def add(self, value: float, count: int = 1) -> None:
        if self.weight and value * SPIKE < self.mean:
            self.mean = self.weight = 0.0
        super().add(min(value, SPIKE * self.mean) if self.weight else value, count)


class Rate:
    """Tokens in a time, over recent rounds."""

    def __init__(self, memory: int = MEMORY) -> None:
        self.tokens = self.time = self.weight = 0.0
        self._keep = 1 - 1 / memory

    def add(self, tokens: float, time: float, count: int = 1) -> None:
        keep = self._keep**count
        self.tokens, self.time = self.tokens * keep + tokens, self.time * keep + time
        self.weight = self.weight * keep + count


class Line:
    """Straight line through recent values over k; its slope is never negative. While it rests on few values, it begins
    anew where another one is far below it: the machine did something else meanwhile."""

    def __init__(self) -> None:
        self.weight = self._k = self._kk = self._y = self._ky = 0.0

    def add(self, k: int, value: float, least: float = 0.0) -> None:
        """A value; one below `least` tells that the machine is faster, not that the line was wrong."""
        if 0 < self.weight <= FEW and least <= value:
            base, slope = self.fit(0.0)
            if value * FAR < base + slope * k:
                weight = self.weight = min(self.weight + 1, COSTS_KNOWN)  # what is known stays known
                self._k, self._kk, self._y, self._ky = weight * k, weight * k * k, weight * value, weight * k * value
                return
        fade = 1 - 1 / MEMORY
        self.weight = self.weight * fade + 1
        self._k, self._kk = self._k * fade + k, self._kk * fade + k * k
        self._y, self._ky = self._y * fade + value, self._ky * fade + k * value

    def doubt(self) -> None:
        """Let what was seen count no more than a few values do."""
        share = min((COSTS_KNOWN + 1) / self.weight, 1.0) if self.weight else 1.0
        self.weight, self._k, self._kk, self._y, self._ky = (
            share * x for x in (self.weight, self._k, self._kk, self._y, self._ky)
        )

    def fit(self, prior_slope: float) -> tuple[float, float]:
        """Its value at k = 0, and its slope. Where all rounds drafted nearly as many tokens, noise would decide on the
        slope, and the prior one stands in."""
        mean_k, mean_y = self._k / self.weight, self._y / self.weight
        variance = self._kk / self.weight - mean_k**2
        covariance = self._ky / self.weight - mean_k * mean_y
        slope = (covariance + RIDGE * prior_slope) / (variance + RIDGE)
        slope = min(max(slope, 0.0), mean_y / (mean_k + 1))
        return mean_y - slope * mean_k, slope


class Costs:
    """The costs of a plain round, of the target's part in one with candidates, by their number, and of the draft's
    forwards, each over a common level in seconds. The level follows the machine, and contexts that grow, by every
    round whatever it held; so costs that were seen at different times can be compared."""

    def __init__(self) -> None:
        self.level = 1.0
        self.plain = Cost()
        # Rounds without the draft and rounds with it have a line each: a draft may take the caches from the target.
        self.verify, self.verify_drafted = Line(), Line()
        # Forwards of the draft: the first of a round, the first after rounds without it, and each other one.
        self.first, self.catching_up, self.next = Cost(), Cost(), Cost()
        self.reading = Cost()  # a prompt's token, by the draft
        self._quickest = math.inf  # of the target's part in the first rounds with candidates
        self._since_text = 0  # rounds since one of past text alone

    @property
    def are_known(self) -> bool:
        return min(self.plain.weight, self.verified) >= COSTS_KNOWN

    @property
    def verified(self) -> float:
        """Rounds with candidates that were measured, old ones counted in part."""
        return self.verify.weight + self.verify_drafted.weight

    @property
    def draft(self) -> float:
        """To draft one token, over the level."""
        return self.next.mean if self.next.weight else self.first.mean

    def drafting(self, fed: int) -> float:
        """The first forward of a round, over the level, to which so many tokens are fed."""
        usual, catching_up = self.first, self.catching_up
        if (fed > FED and catching_up.weight) or not usual.weight:
            return catching_up.mean
        return usual.mean

    def verifying(self, drafted: bool = False) -> tuple[float, float]:
        """The target's part in a round, over the level, in which the draft was called or not: without a candidate,
        were it not a plain one, and what each candidate adds."""
        line = self.verify_drafted if drafted else self.verify
        if line.weight < COSTS_KNOWN:
            line = max(self.verify, self.verify_drafted, key=lambda line: line.weight)
        return line.fit(PRIOR_SLOPE * (self.plain.mean or 1.0))

    def line(self) -> tuple[float, float]:
        """A round whose candidates are all drafted, over the level: what it takes with no token, and what each token
        adds. The first one finds the draft's weights gone from the caches."""
        base, slope = self.verifying(drafted=True)
        return max(base + self.drafting(1) - self.draft, 0.0), slope + self.draft

    def round(self, candidates: float, forwards: float | None = None, fed: int = 1) -> float:
        """A whole round, over the level, in which the draft was called so often; once for each candidate unless that
        is said."""
        forwards = candidates if forwards is None else forwards
        if not candidates and not forwards:
            return self.plain.mean
        base, slope = self.verifying(forwards > 0)
        drafting = self.drafting(fed) + (forwards - 1) * self.draft if forwards else 0.0
        return base + slope * candidates + drafting

    def retry_text(self, tokens: float, rate: float, rows: int = 1) -> bool:
        """Whether a round of so many rows is to be of past text alone, of which so many tokens are expected, although
        tokens come at a better `rate` otherwise, by what is known: that was perhaps measured beside another program,
        and is not measured again while text looks too dear. What is known counts little then."""
        pays = tokens >= LEAST_TOKENS * rows and rows + tokens > rate * self.plain.mean
        if not pays or self._since_text < RETRY:
            return False
        self._since_text = 0
        self.verify.doubt()
        return True

    def add(self, time: RoundTime) -> float:
        """Take in what rounds took; returns the seconds of each that count: less of one that was far above
        expectation, and none where they are not known."""
        unit, excess = self.level, 1.0
        if time.forwards and time.fed > PROMPT and self.are_known:
            self.reading.add(time.first_seconds / time.fed / unit)
        if time.seconds is None:
            return 0.0
        self._since_text = 0 if time.candidates and not time.forwards else self._since_text + time.rounds
        if self.are_known and (self.first.weight or not time.forwards):
            # A round far above expectation is a machine that was busy elsewhere, and counts as less.
            expected = self.level * self.round(time.candidates, time.forwards, time.fed)
            excess = max(time.seconds / (FAR * expected), 1.0)
            # Costs are taken over the level of before, and averaged as it is: otherwise noise drives both apart.
            unit *= excess
            self.level *= 1 + min(time.rounds / LEVEL_MEMORY, 1.0) * (time.seconds / excess / expected - 1)
        if time.forwards:
            (self.first if time.fed <= FED else self.catching_up).add(time.first_seconds / unit)
            if time.forwards > 1:
                self.next.add(time.next_seconds / (time.forwards - 1) / unit)
        if time.candidates:
            line = self.verify_drafted if time.forwards else self.verify
            verifying = (time.seconds - time.draft_seconds) / unit
            if self.verified < COSTS_KNOWN and verifying > 0:
                self._quickest = min(self._quickest, verifying)
                verifying = min(verifying, NEAR * self._quickest)
            line.add(time.candidates, verifying, LEAST_ROUND * self.plain.mean)
        elif not time.forwards:
            self.plain.add(time.seconds / unit, time.rounds)
        return time.seconds / excess


class Acceptance:
    """What is known of one domain, and what was spent to know it. Requests differ more than the tokens of one do, so
    alpha is an average over requests, to which a long one adds little more than a short one."""

    def __init__(self) -> None:
        self.alpha = Average(PRIOR_ALPHA, PRIOR_WEIGHT)
        middles = [(low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)]
        self._by_confidence = [Average(middle, PRIOR_WEIGHT) for middle in middles]
        self._next_by_confidence = [Average() for _ in middles]
        self.emitted, self.drafted = Average(), Average()  # of rounds that drafted, without past text
        self.by_situation: dict[tuple[int, int, int], Average] = {}  # how often guesses of past text were right
        # How often the better of draft and guess was right, by what the guess was thought to be worth.
        self._better_of_both = [Average((1 + (i + 0.5) / 10) / 2, PRIOR_WEIGHT, TEXT_MEMORY) for i in range(10)]
        self.text_gain = Average(1.0, PRIOR_WEIGHT)  # tokens that past text was expected to bring a round
        self.follow = Average(1.0, PRIOR_WEIGHT)  # guesses accepted behind the first one that was
        # Tokens that the draft is expected to bring a round beyond past text, and rounds of a request.
        self.draft_gain, self.length = Average(1.0, PRIOR_WEIGHT), Average(32.0, PRIOR_WEIGHT)
        self.rate = Rate()
        self.rounds = self.requests = 0
        self.plain_seconds = 0.0
        self.probe_seconds = 0.0  # lost by drafting where it does not pay

    def chances(self, confidence: float, alpha: float) -> tuple[float, float]:
        """Probability that a token of this confidence is accepted in a request with this `alpha`, and the probability
        that the next one is once it was."""
        i = bisect_left(EDGES, confidence)
        after = self._next_by_confidence[i]
        # Little was seen after some tokens: to that extent, the next one is taken for any.
        usual = (after.mean * after.weight + self.alpha.mean * PRIOR_WEIGHT) / (after.weight + PRIOR_WEIGHT)
        return self._by_confidence[i].mean, min(usual * alpha / max(self.alpha.mean, 1e-6), 1.0)

    def guessed(self, guess: Guess) -> Average:
        """How often guesses of this situation are right."""
        situation = guess.situation
        known = self.by_situation.get(situation)
        if known is None:
            _, length, agreement = situation
            likely = min(0.3 + 0.09 * length, 0.9) * (0.35, 1.0, 0.75, 1.05)[agreement]
            known = self.by_situation[situation] = Average(likely, PRIOR_WEIGHT, TEXT_MEMORY)
        return known

    def with_draft(self, chance: float) -> Average:
        """How often the better of draft and guess is right, where the guess alone is with this chance."""
        return self._better_of_both[min(int(chance * 10), 9)]

    def ended(self, accepted: int, examined: int) -> None:
        """A request has ended, of whose drafted tokens so many were accepted and examined."""
        if examined:
            self.alpha.add(accepted / examined, min(examined, MOST_OF_A_REQUEST))

    def judged(self, confidence: float, before: float | None, is_accepted: bool) -> None:
        """Take in what became of a drafted token, behind another one of that confidence, or behind none."""
        self._by_confidence[bisect_left(EDGES, confidence)].add(is_accepted)
        if before is not None:
            self._next_by_confidence[bisect_left(EDGES, before)].add(is_accepted)

    def fade(self, share: float) -> None:
        """Let what was seen so far count this share of what it counts, but no less than a prior does."""
        known = (*self._by_confidence, *self._next_by_confidence)
        for average in (self.alpha, self.emitted, self.drafted, *known):
            average.weight = min(average.weight, max(average.weight * share, PRIOR_WEIGHT))

    def begin_round(self) -> int:
        """The number of the round that begins, from 1 on."""
        self.rounds += 1
        return self.rounds

    def spend(self, *, plain_seconds: float = 0.0, probe_seconds: float = 0.0) -> None:
        """Time went by in plain rounds, or was lost by drafting where it does not pay."""
        self.plain_seconds += plain_seconds
        self.probe_seconds = max(self.probe_seconds + probe_seconds, 0.0)

    def drafts_to_learn(self, examined: float, to_lose_seconds: float = 0.0) -> bool:
        """Whether to draft although, going by so many examined tokens, it does not seem to pay, and may lose so much
        time."""
        may_lose = PROBE_SHARE * self.plain_seconds - self.probe_seconds
        return examined < SURE or may_lose >= to_lose_seconds


MAX_K = 32
WARM_UP = (4, 1, 7, 2)  # tokens drafted in turn until costs are known: slopes need several
MOST_DOMAINS = 1024  # the oldest are forgotten
REFRESH = 100  # speculating rounds between two plain ones, which time the target alone
PROBE_BURST = 4  # plain rounds whose time must have been saved up before a request probes
OWN_MEMORY = 32  # examined tokens of one request that its own acceptance rests on
OWN_COUNTS_HALF = 8  # examined tokens of a request after which they weigh as much as those of its domain
LEAST_SPEEDUP = 1.03  # rounds do not show that the draft reads the prompt as well, nor that the plain loop is quicker
RAGGED = 0.04  # more than that for each doubling of a batch's rows, as it ends with the slowest one
EXPLORE = 32  # rounds between two that draft one token more than is worth it
WORTH = 0.05  # tokens a round that past text has to bring where the target would decode alone otherwise
# An accepted token lets others follow: what a candidate is worth, over itself alone; and what one that is right is
# worth, where it takes the place of another.
FOLLOWS, INSTEAD = 1.0, 1.5
AGREED = 0.3  # of the doubt about a drafted token goes where past text says the same
TEXT_PROBE = 15  # requests of which one looks past text up where it brings nothing
DRAFT_PROBE = 15  # and one drafts, although it would not be worth reading the prompt
NEARLY_ALWAYS = 0.9  # acceptance that no draft goes far beyond
OWN_ROUNDS = 8  # of a request after which its own rate weighs as much as that of its domain

DRAFT: Final = "draft"


class Pace(Protocol):
    """What decides, candidate by candidate, where those of one request's rounds come from, and how many there are."""

    reads_confidence: bool
    reads_text: bool

    def is_plain(self) -> bool:
        """Whether no round of the request is to have candidates; asked once, as it begins."""
        return False

    def begin(self, missing: int) -> None:
        """A round begins; the draft has not been fed so many tokens yet."""

    def next(self, guesses: Sequence[Guess], may_draft: bool = True) -> Guess | Literal["draft"] | None:
        """Where the next candidate is to come from, with what past text says of it: one of the guesses, or the draft
        if it may; `None` where the round has enough of them."""

    def instead(self, likeliest: int, confidence: float) -> Guess | None:
        """What takes the place of a token of the draft's, where the draft finds this one the likeliest and gives it
        this probability; nothing is drawn from the draft then."""
        return None

    def drafted(self, token: int, confidence: float) -> None:
        """The draft has proposed a token, which it gives this probability."""
        return

    def judged(self, accepted: int, emitted: Sequence[int]) -> None:
        """The target has verified the round's candidates: how many were accepted, and the tokens that the round
        emitted."""
        return

    def timed(self, time: RoundTime) -> None:
        """Rounds have ended."""
        return

    def ended(self) -> None:
        """The request has ended, well or not."""
        return


class FixedPace(Pace):
    """The same number of tokens, k, each round, all of them the draft's; drafting ends after a token that the draft
    finds less probable than the threshold."""

    reads_text = False

    def __init__(self, k: int, threshold: float = 0.0, pacer: Pacer | None = None) -> None:
        self.k, self.threshold = k, threshold
        self.reads_confidence = threshold > 0
        self._pacer = pacer  # is told what rounds take
        self._left, self._confidence, self._emitted = 0, 1.0, 0

    def begin(self, missing: int) -> None:
        self._left, self._confidence = self.k, 1.0

    def next(self, guesses: Sequence[Guess], may_draft: bool = True) -> Guess | Literal["draft"] | None:
        self._left -= 1
        return DRAFT if may_draft and self._left >= 0 and self._confidence >= self.threshold else None

    def drafted(self, token: int, confidence: float) -> None:
        self._confidence = confidence

    def judged(self, accepted: int, emitted: Sequence[int]) -> None:
        self._emitted = len(emitted)

    def timed(self, time: RoundTime) -> None:
        if self._pacer is not None:
            with self._pacer.lock:
                self._pacer.took(time, self._emitted)


# --- what is decided from it ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftingPlan:
    """
    How `num_assistant_tokens="auto"` drafts now, and what it decides that from.

    Args:
        speculates (`bool`):
            Whether drafting pays; if not, the target decodes alone, and now and then a few rounds draft to find out.
        k (`int`):
            Tokens a round with the largest expected speed-up, at this alpha and these costs; 0 is plain decoding. A
            round ends earlier or later than k by the draft's confidence in its tokens.
        alpha (`float`): Running acceptance rate of the domain, over requests; recent ones count most.
        speedup (`float`): Expected, over plain decoding in the same loop.
        draft_seconds (`float`, *optional*): To draft one token; `None` until it was measured, as the other costs.
        plain_seconds (`float`, *optional*): A round without a draft: one token.
        verify_seconds (`float`, *optional*): A round with the best k of at least 1, less the drafting.
        per_token_seconds (`float`, *optional*):
            What one more drafted token adds to a round: drafting and verifying it.
        examined (`float`): Tokens that alpha rests on, old ones counted in part.
        vocab_size (`int`, *optional*): Tokens that the draft chooses among; `None`: all.
    """

    speculates: bool
    k: int
    alpha: float
    speedup: float
    draft_seconds: float | None
    plain_seconds: float | None
    verify_seconds: float | None
    per_token_seconds: float | None
    examined: float
    vocab_size: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Field by field, ready for JSON."""
        return asdict(self)


def least_speedup(rows: int) -> float:
    """Times as fast as without candidates that rounds of so many rows have to seem."""
    return LEAST_SPEEDUP + RAGGED * math.log2(max(rows, 1))


def _bucket(rows: int) -> int:
    """The power of two that so many rows come to."""
    return 1 << (rows - 1).bit_length()


def best_rate(costs: Costs, alpha: float) -> tuple[float, int]:
    """The most tokens in the time of the level that rounds bring which draft, and the number that they draft then."""
    base, per_token = costs.line()
    found, best, tokens = 0.0, 0, 1.0
    for k in range(1, MAX_K + 1):
        tokens += min(alpha, 1.0) ** k  # as `expected_block_efficiency`
        rate = tokens / (base + k * per_token)
        if rate <= found:  # it rises, and then falls
            break
        found, best = rate, k
    return found, best


class Pacer:
    """
    Measures acceptance, by domain and request, and costs, over all requests, and decides from them.

    A round that drafts k tokens takes `R(k)`, a line, and a plain one `R(0)`. At acceptance alpha it emits
    `E(alpha, k)` tokens (arXiv 2211.17192), so tokens come at the rate `E(alpha, k) / R(k)`; the plan is the k with
    the best rate. Within a round more is known: how sure the draft is of its tokens, how often tokens that it was as
    sure of were accepted, and how often the ones after such tokens were. One more token is worth drafting while the
    chance that it and all before it are accepted is above `rate * (R(k + 1) - R(k))`, the tokens that the same time
    brings elsewhere.

    Seconds are wall time. It may be used from several threads: `lock` is held wherever what it knows is used.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.costs = Costs()
        self.timed: tuple[float, ...] = UNTIMED  # as in `AcceptanceStats`
        self._served = Rate()  # seconds of recent rounds, wherever their candidates came from
        self._of_batches: dict[int, Costs] = {}  # by the power of two that their rows come to
        self._emitted = Counter[int]()  # tokens, by the same; 0: by requests alone
        self._domains: dict[Any, Acceptance] = {}

    def took(
        self, time: RoundTime, emitted: int, costs: Costs | None = None, rows: int = 1, *, is_usual: bool = True
    ) -> None:
        """Take in what rounds of so many rows took, which have these `costs`, and have emitted so many tokens, the
        lock being held. What is not usual says nothing of others."""
        costs = costs or self.costs
        counted = time.rounds * (costs.add(time) if is_usual else time.seconds or 0.0)
        if time.seconds is None:
            return
        self._emitted[0 if costs is self.costs else _bucket(rows)] += emitted
        self._served.add(emitted, counted, time.rounds)
        is_plain = time.candidates == 0 and time.forwards == 0
        alone = counted if is_plain else costs.level * costs.plain.mean * emitted / rows
        compared = (counted, alone) if costs.plain.weight else (0.0, 0.0)
        self.timed = tuple(map(sum, zip(self.timed, (emitted, time.rounds * time.seconds, *compared), strict=True)))

    def reset_timed(self) -> None:
        """Count tokens and seconds from zero again; what is known of costs stays."""
        with self.lock:
            self.timed = UNTIMED

    def pace(self, domain: Any = None, sources: str = "both", *, may_repeat: bool = True) -> AutoPace:
        """For one request of this domain, with candidates from `sources`, and without `may_repeat` not from text."""
        with self.lock:
            return AutoPace(self, self.acceptance(domain), sources, may_repeat)

    def acceptance(self, domain: Any) -> Acceptance:
        """What is known of a domain, the lock being held."""
        if domain not in self._domains and len(self._domains) >= MOST_DOMAINS:
            del self._domains[next(iter(self._domains))]
        return self._domains.setdefault(domain, Acceptance())

    def of_batches(self, rows: int) -> Costs:
        """What rounds of so many rows take, the lock being held."""
        return self._of_batches.setdefault(_bucket(rows), Costs())

    def _usual(self) -> tuple[int, Costs]:
        """In how many rows at once most tokens come, and what their rounds take, the lock being held."""
        rows = max(self._emitted, key=self._emitted.__getitem__, default=0)
        return (rows, self._of_batches[rows]) if rows else (1, self.costs)

    def plan(self, domain: Any = None) -> DraftingPlan:
        """What a request of this domain would be served by now."""
        with self.lock:
            return self.plan_for(self._domains.get(domain) or Acceptance())

    def round_seconds(self, k: int) -> float | None:
        """What a round that drafts k tokens takes, a row's share of one of a batch; `None` until one was measured."""
        with self.lock:
            rows, costs = self._usual()
            return costs.level * costs.round(k) / rows if costs.verified else None

    def token_seconds(self, alpha: float) -> float | None:
        """What a token takes at this acceptance with the best number of drafted tokens, which may be none, where
        several come at once its share; `None` until that was measured."""
        with self.lock:
            rows, costs = self._usual()
            if not costs.are_known:
                return None
            return costs.level / max(1 / costs.plain.mean, best_rate(costs, alpha)[0]) / rows

    def could_save(self, tokens: int, alpha: float, k: int | None) -> float | None:
        """Seconds that so many tokens take longer at this acceptance, or as they are served where past text makes that
        quicker, than with a draft that is nearly always right: k drafted a round, or as many as are best; `None` until
        that was measured."""
        if k is None:
            before, after = (self.token_seconds(each) for each in (alpha, NEARLY_ALWAYS))
            with self.lock:
                served = self._served
                if before is not None and served.weight > MEMORY / 4 and served.tokens:
                    before = min(before, served.time / served.tokens)
        else:
            seconds = self.round_seconds(k)
            before, after = (
                None if seconds is None else seconds / expected_block_efficiency(each, k)
                for each in (alpha, NEARLY_ALWAYS)
            )
        return None if before is None or after is None else tokens * max(before - after, 0.0)

    def draft_changed(self, domain: Any = ...) -> None:
        """A new version serves all domains, or one (sampled requests of a domain are one apart, see
        [`~LeanDrafting.pace`]): what was known of the old one's acceptance counts half."""
        with self.lock:
            for key, known in self._domains.items():
                if domain is ... or key[0] == domain:
                    known.fade(0.5)

    def plan_for(self, domain: Acceptance, own: Average | None = None, rows: int = 0) -> DraftingPlan:
        """For a domain, or for a request of it, or a batch of so many rows, that has an acceptance of its own."""
        costs = self.of_batches(rows) if rows else self.costs
        alpha, examined = domain.alpha.mean, domain.alpha.weight
        if own is not None:
            alpha = (alpha * OWN_COUNTS_HALF + own.mean * own.weight) / (OWN_COUNTS_HALF + own.weight)
            examined += own.weight
        if not costs.are_known:
            return DraftingPlan(True, WARM_UP[0], alpha, 1.0, None, None, None, None, examined)
        draft, plain = costs.draft, costs.plain.mean
        base, per_token = costs.line()
        best, k = best_rate(costs, alpha)
        if domain.drafted.weight > MEMORY / 4 and not rows:
            # What rounds that ended by confidence reached: more than k tokens each time could.
            reached = domain.emitted.mean / (base + domain.drafted.mean * per_token)
            best *= max(reached / best_rate(costs, domain.alpha.mean)[0], 1.0)
        speculates = best * plain > least_speedup(rows)
        return DraftingPlan(
            speculates=speculates,
            k=k if speculates else 0,
            alpha=alpha,
            speedup=max(best * plain, 1.0),
            draft_seconds=costs.level * draft,
            plain_seconds=costs.level * plain,
            verify_seconds=costs.level * max(base + k * (per_token - draft), 0.0),
            per_token_seconds=costs.level * per_token,
            examined=examined,
        )


@dataclass
class _Candidate:
    """A token that was proposed, and the estimates that its fate adds to."""

    confidence: float | None = None  # of the draft, if it is the draft's
    guessed: Average | None = None  # of its situation, if past text has it
    better: Average | None = None  # of draft and past text together, where both were asked


class AutoPace:
    """
    One request's [`Pace`] under a [`Pacer`], from `sources`: `"both"`, `"draft"` or `"text"`.

    A candidate costs time and may bring tokens; what time is worth is the rate at which tokens come otherwise.
    """

    reads_confidence = True

    def __init__(self, pacer: Pacer, domain: Acceptance, sources: str = "both", may_repeat: bool = True) -> None:
        self._pacer, self._domain = pacer, domain
        self.reads_text, self._drafts = may_repeat and sources != "draft", sources != "text"
        domain.requests += 1
        self._own, self._own_rate = Average(memory=OWN_MEMORY), Rate()
        self._plan = pacer.plan_for(domain)
        self._accepted = self._examined = self._emitted = self._rounds = 0
        self._start(0)

    def _start(self, most_drafted: int, most_guessed: int = 0) -> None:
        """The state of a round that may have so many candidates."""
        self._left, self._most_guessed = most_drafted, most_guessed
        self._candidates: list[_Candidate] = []
        self._forwards = 0
        self._chance = 1.0  # that all candidates so far are accepted
        self._likely = self._plan.alpha  # that a token drafted next is, then
        self._guess: tuple[Guess, Average] | None = None  # what past text says of the next token
        self._seen: tuple[Guess, Average] | None = None  # what it said of the first one
        self._explores = False

    def is_plain(self) -> bool:
        with self._pacer.lock:
            plan, domain = self._plan, self._domain
            looks_up = domain.text_gain.mean > WORTH or domain.requests % TEXT_PROBE == 0
            # The target's own loop is a little faster than the assisted one: few requests probe, and each for long.
            to_lose = PROBE_BURST * (plan.plain_seconds or 0.0)
            drafts = self._drafts and (plan.speculates or domain.drafts_to_learn(plan.examined, to_lose))
            return not (drafts or (self.reads_text and looks_up))

    def begin(self, missing: int) -> None:
        pacer, domain, costs = self._pacer, self._domain, self._pacer.costs
        with pacer.lock:
            plan = self._plan = pacer.plan_for(domain, self._own)
            self._is_timed = plan.plain_seconds is not None
            if not self._is_timed:
                needed = WARM_UP[round(costs.verified) % len(WARM_UP)] if costs.verified <= costs.plain.weight else 0
                self._start(*((needed, 0) if self._drafts else (0, needed)))
                return
            number = domain.begin_round()
            self._rounds += 1
            refreshes = plan.speculates and number % REFRESH == 0
            drafts = self._drafts and (plan.speculates or domain.drafts_to_learn(plan.examined))
            looks_up = self.reads_text and not refreshes
            self._start(MAX_K if drafts and not refreshes else 0, MAX_K if looks_up else 0)
            self._explores = number % EXPLORE == 0
            # What the target's part of a round takes more than a plain round, and what each candidate adds to it.
            base, self._slope = costs.verifying()
            self._more = max(base - costs.plain.mean, 0.0)
            first = costs.drafting(missing) + max(costs.verifying(drafted=True)[0] - base, 0.0)
            self._draft_costs = first, costs.draft
            # Tokens that the level's time brings elsewhere in such a request.
            rate, own, alone = domain.rate, self._own_rate, 1 / costs.plain.mean
            usual = rate.tokens / rate.time if rate.weight > MEMORY / 4 else plan.speedup * alone
            prior = OWN_ROUNDS * (rate.time / rate.weight if rate.weight else costs.plain.mean)
            self._rate = max((own.tokens + prior * usual) / (own.time + prior), alone)
            self._reading = 0.0  # what the draft has to make up for in this request before it proposes anything
            if missing > PROMPT and self.reads_text and domain.requests % DRAFT_PROBE:
                self._reading = self._rate * costs.reading.mean * missing

    def next(self, guesses: Sequence[Guess], may_draft: bool = True) -> Guess | Literal["draft"] | None:
        domain = self._domain
        with self._pacer.lock:
            known = ((guess, domain.guessed(guess)) for guess in guesses)
            self._guess = max(known, key=lambda one: one[1].mean, default=None)
            count, may_draft = len(self._candidates), may_draft and self._left > 0
            if count == 0:
                self._seen = self._guess
                if may_draft and self._is_timed and self.reads_text and not self._draft_gains():
                    may_draft, self._left = False, 0
            if self._guess is not None and (
                count >= self._most_guessed or (count == 0 and self._is_timed and not self._text_gains())
            ):
                if count < self._most_guessed and self._retries_text():
                    self._left = 0
                    return self._taken(self._guess[1].mean)
                self._guess = None
            if may_draft and (not self._is_timed or (count == 0 and self._guess is None)):  # as planned
                return DRAFT
            if not self._is_timed:
                return self._guess and self._taken(self._guess[1].mean)
            if count >= MAX_K:
                return None
            guess, chance = (None, 0.0) if self._guess is None else (self._guess[0], self._guess[1].mean)
            drafting = self._rate * self._draft_costs[self._forwards > 0]
            verifying = self._rate * self._slope
            if guess is not None:
                better = domain.with_draft(chance).mean - chance
                if may_draft and self._chance * INSTEAD * better > drafting:
                    return DRAFT
                return self._taken(chance) if self._chance * chance * FOLLOWS > verifying else None
            if not may_draft:
                return None
            if self._chance * self._likely * FOLLOWS > drafting + verifying:
                return DRAFT
            # What is never drafted is never judged: now and then it is.
            explores, self._explores = self._explores, False
            return DRAFT if explores else None

    def _text_gains(self) -> bool:
        """Whether the guess at the first token, and what may follow it, is worth a round with candidates."""
        assert self._guess is not None
        domain, chance = self._domain, self._guess[1].mean
        length = 1 + domain.follow.mean
        gain = chance * length - self._rate * (self._more + self._slope * length)
        domain.text_gain.add(max(gain, 0.0))
        return gain > 0

    def _retries_text(self) -> bool:
        """Whether to propose the guess at the first token although it is not worth it."""
        assert self._guess is not None
        tokens = self._guess[1].mean * (1 + self._domain.follow.mean)
        return self._rounds > 1 and self._pacer.costs.retry_text(tokens, self._rate)  # the first one is not timed

    def _draft_gains(self) -> bool:
        """Whether what the draft adds to past text is worth that it reads the prompt, if it has not yet."""
        domain, drafting = self._domain, self._rate * self._draft_costs[0]
        if self._guess is None:
            gain = self._likely - drafting
        else:
            chance = self._guess[1].mean
            gain = INSTEAD * (domain.with_draft(chance).mean - chance) - drafting
        domain.draft_gain.add(max(gain, 0.0))
        rounds_left = max(domain.length.mean - self._rounds, 1.0)
        return domain.draft_gain.mean * rounds_left > self._reading

    def _taken(self, chance: float) -> Guess:
        assert self._guess is not None
        guess, known = self._guess
        self._proposed(_Candidate(guessed=known), chance, self._plan.alpha)
        return guess

    def _proposed(self, candidate: _Candidate, chance: float, next_chance: float) -> None:
        self._candidates.append(candidate)
        self._chance *= chance
        self._likely = next_chance

    def instead(self, likeliest: int, confidence: float) -> Guess | None:
        with self._pacer.lock:
            self._forwards += 1
            if self._guess is None or not self._is_timed:
                return None
            guess, known = self._guess
            accepted, _ = self._domain.chances(confidence, self._plan.alpha)
            if guess.token == likeliest or known.mean <= accepted:
                return None
            better = self._domain.with_draft(known.mean)
            self._proposed(_Candidate(guessed=known, better=better), known.mean, self._plan.alpha)
            return guess

    def drafted(self, token: int, confidence: float) -> None:
        with self._pacer.lock:
            self._left -= 1
            accepted, next_accepted = self._domain.chances(confidence, self._plan.alpha)
            candidate = _Candidate(confidence)
            if self._guess is not None:
                guess, known = self._guess
                candidate.better = self._domain.with_draft(known.mean)
                accepted += AGREED * (1 - accepted) * (guess.token == token)
            self._proposed(candidate, accepted, next_accepted)

    def judged(self, accepted: int, emitted: Sequence[int]) -> None:
        with self._pacer.lock:
            domain, candidates = self._domain, self._candidates
            self._emitted = len(emitted)
            examined = candidates[: min(accepted + 1, len(emitted))]
            hits = examined_drafts = 0
            for i, candidate in enumerate(examined):
                is_right = i < accepted
                if candidate.better is not None:
                    candidate.better.add(is_right)
                if candidate.confidence is None:
                    assert candidate.guessed is not None
                    candidate.guessed.add(is_right)
                else:
                    before = candidates[i - 1].confidence if i else None
                    domain.judged(candidate.confidence, before, is_right)
                    examined_drafts += 1
                    hits += is_right
            self._learn_from_text(accepted, emitted)
            if candidates and all(candidate.confidence is not None for candidate in candidates):
                domain.emitted.add(len(emitted))
                domain.drafted.add(len(candidates))
            if examined_drafts:
                self._own.add(hits / examined_drafts, examined_drafts)
                self._accepted += hits
                self._examined += examined_drafts
            else:
                # What the text was like is forgotten while nothing is drafted: it may have changed.
                self._own.fade()

    def _learn_from_text(self, accepted: int, emitted: Sequence[int]) -> None:
        is_guess = [candidate.confidence is None for candidate in self._candidates[:accepted]]
        if is_guess and is_guess[0]:
            self._domain.follow.add((*is_guess, False).index(False) - 1)
        # A guess that was not proposed shows as well whether it would have been right.
        if self._seen is not None and emitted and not (self._candidates and self._candidates[0].confidence is None):
            guess, known = self._seen
            known.add(guess.token == emitted[0])
        elif self._seen is None and self.reads_text and emitted:
            self._domain.text_gain.add(0.0)

    def timed(self, time: RoundTime) -> None:
        domain, costs = self._domain, self._pacer.costs
        with self._pacer.lock:
            is_plain = time.candidates == 0 and time.forwards == 0
            emitted = time.rounds if is_plain else self._emitted
            self._pacer.took(time, emitted)
            if time.seconds is not None:
                for rate in (domain.rate, self._own_rate):
                    rate.add(emitted, time.rounds * time.seconds / costs.level, time.rounds)
            if time.forwards == 0:
                domain.spend(plain_seconds=(time.seconds or 0.0) * time.rounds)
            elif not self._plan.speculates:
                # Only the drafting is known to be on top in a round that also read the prompt.
                plain = costs.level * costs.plain.mean
                lost = time.draft_seconds if time.seconds is None else time.seconds - self._emitted * plain
                domain.spend(probe_seconds=lost)

    def ended(self) -> None:
        with self._pacer.lock:
            self._domain.ended(self._accepted, self._examined)
            if self._rounds:
                self._domain.length.add(self._rounds)


# --- of batches ----


class BatchRound(NamedTuple):
    """What a round of a batch proposes: at most k tokens for each row, those of past text for these rows and, if it
    `drafts`, the draft's for the others."""

    k: int
    texts: frozenset[int] = frozenset()
    drafts: bool = True


class BatchPace:
    """
    How many tokens the rounds of one batch propose for each row: as many as `fixed` does, or as pay best, by what is
    known of the domain's acceptance and by what rounds of so many rows take. A round of a batch is worth it for fewer
    rows and not for many, where the target computes instead of reading its weights; as rows end, it may be again. From
    `sources` as [`AutoPace`].
    """

    def __init__(
        self, drafting: LeanDrafting, domain: str | None, rows: int, *, do_sample: bool, may_repeat: bool = True
    ) -> None:
        pacer, is_auto = drafting.pacer, drafting.num_assistant_tokens == "auto"
        self._pacer = pacer
        pace = None if is_auto else drafting.pace(domain, do_sample=do_sample)
        self._fixed = pace if isinstance(pace, FixedPace) else None
        self.threshold = 0.0 if self._fixed is None else self._fixed.threshold
        with pacer.lock:
            known = self._domain = pacer.acceptance((domain, do_sample))
            known.requests += 1
            looks_up = known.text_gain.mean > WORTH or known.requests % TEXT_PROBE == 0
            self._costs, plan = pacer.of_batches(rows), pacer.plan_for(known, None, rows)
            # The draft reads the prompts for it: few batches find out, and each for long.
            self._probes = known.drafts_to_learn(plan.examined, PROBE_BURST * (plan.plain_seconds or 0.0))
        self._plan, self._rows = plan, rows
        self.reads_text = is_auto and drafting.sources != "draft" and may_repeat and looks_up
        self._drafts = drafting.sources != "text"
        self._own = Average(memory=OWN_MEMORY)
        self._is_steady = False  # after a round without the draft, whose weights have left the processor's caches

    @property
    def is_plain(self) -> bool:
        """Whether no round is to propose anything: then the target's own loop answers, and draws what it draws."""
        return self._fixed is not None and self._fixed.k == 0

    def begin(self, rows: int, texts: Mapping[int, Sequence[float]]) -> BatchRound:
        """A round of so many rows begins. For some, past text proposes tokens: how likely it is that each of these and
        all before it are right."""
        pacer, domain = self._pacer, self._domain
        with pacer.lock:
            costs = self._costs = pacer.of_batches(rows)
            self._rows = rows
            if self._fixed is not None:
                return BatchRound(self._fixed.k)
            plan = self._plan = pacer.plan_for(domain, self._own, rows)
            if costs.plain.weight < COSTS_KNOWN or (costs.are_known and domain.begin_round() % REFRESH < 2):
                return BatchRound(0)  # several in a row, of which the first is not timed
            if not costs.are_known:
                needed = WARM_UP[round(costs.verified) % len(WARM_UP)]
                return BatchRound(needed, frozenset(() if self._drafts else texts), self._drafts)
            k = 0
            if self._drafts and plan.speculates:
                k = plan.k
            elif self._drafts and self._probes and domain.drafts_to_learn(plan.examined):
                k = best_rate(costs, plan.alpha)[1]
            return self._with_text(k, plan.alpha, texts) if self.reads_text else BatchRound(k)

    def _with_text(self, k: int, alpha: float, texts: Mapping[int, Sequence[float]]) -> BatchRound:
        """The better of k tokens of the draft, or of past text where it has as likely ones, and of past text alone."""
        costs, rows, domain = self._costs, self._rows, self._domain
        drafted = expected_block_efficiency(alpha, k) - 1 if k else 0.0
        alone, columns = 0.0, 0
        for n in range(1, max(map(len, texts.values()), default=0) + 1):
            rate = (rows + sum(sum(chances[:n]) for chances in texts.values())) / costs.round(n, 0)
            alone, columns = max((alone, columns), (rate, n))
        domain.text_gain.add(max(alone * costs.plain.mean / rows - 1, 0.0))
        better = frozenset(row for row, chances in texts.items() if sum(chances[:k]) > drafted)
        gained = (rows - len(better)) * drafted + sum(sum(texts[row][:k]) for row in better)
        other = (rows + gained) / costs.round(k) if k else least_speedup(rows) * rows / costs.plain.mean
        is_text = alone > other or costs.retry_text(sum(sum(c[:1]) for c in texts.values()), other, rows)
        return BatchRound(columns, frozenset(texts), False) if is_text else BatchRound(k, better if k else frozenset())

    def likeliest(self, guesses: Sequence[Guess]) -> tuple[Guess, float]:
        """The guess that is right most often, and how often."""
        with self._pacer.lock:
            means = [self._domain.guessed(guess).mean for guess in guesses]
        best = max(range(len(guesses)), key=lambda i: means[i])
        return guesses[best], means[best]

    def guessed(self, guess: Guess, is_right: bool) -> None:
        """Past text was right, or not."""
        with self._pacer.lock:
            self._domain.guessed(guess).add(is_right)

    def judged(self, accepted: int, examined: int) -> None:
        """So many of the draft's candidates for a row were accepted and examined in a round."""
        if examined:
            with self._pacer.lock:
                self._own.add(accepted / examined, examined)

    def timed(self, time: RoundTime, emitted: int) -> None:
        """Rounds have ended, which have emitted so many tokens."""
        domain, is_plain = self._domain, time.candidates == 0 and time.forwards == 0
        with self._pacer.lock:
            is_usual, self._is_steady = self._is_steady or not is_plain or time.rounds > 1, is_plain
            self._pacer.took(time, emitted, self._costs, self._rows, is_usual=is_usual)
            if self._fixed is None and time.forwards == 0:
                domain.spend(plain_seconds=(time.seconds or 0.0) * time.rounds)
            elif self._fixed is None and not self._plan.speculates:
                plain = self._costs.level * self._costs.plain.mean
                lost = time.draft_seconds if time.seconds is None else time.seconds - emitted / self._rows * plain
                domain.spend(probe_seconds=lost)

    def ended(self, accepted: int, examined: int) -> None:
        """A row has ended, of whose drafted tokens so many were accepted and examined."""
        with self._pacer.lock:
            self._domain.ended(accepted, examined)


# --- forwards that are timed ----

__all__ = ["measured_costs"]

K = 5  # tokens of a round
LEAST_TURNS, MOST_TURNS, TIMED_SECONDS = 4, 64, 0.5


@torch.inference_mode()
def measured_costs(
    target: Any, drafts: Sequence[Any], prompt_ids: Sequence[int] | NDArray[np.int32], clock: Callable[[], float]
) -> list[ForwardSeconds]:
    """What forwards of the target and of each draft take, in turns, on the clock given. Of a large vocabulary a draft
    has a head of some thousand tokens, as it has where it serves traffic."""
    models = [unwrap(target), *map(_restricted, drafts)]
    prompt = torch.from_numpy(np.asarray(prompt_ids, np.int64))[None].to(models[0].device)
    with fast_kernels(*models, is_request=True):  # the second time weights are packed, as they are where they serve
        ends = [_Forward(model, prompt, clock) for model in models]
    turns, started = 0, clock()
    with fast_kernels(*models, is_request=True):
        while turns < LEAST_TURNS or (turns < MOST_TURNS and clock() - started < TIMED_SECONDS):
            for end in ends:
                end.feed(1)
            ends[0].feed(1 + K)
            turns += 1
    unpack(*models)
    read, one, several = (ends[0].least[n] for n in (0, 1, 1 + K))
    return [ForwardSeconds(one, max(several - one, 0.0) / K, end.least[1], read, end.least[0]) for end in ends[1:]]


def _restricted(draft: Any) -> Any:
    """As it drafts once the tokens are known that traffic uses."""
    if vocab_size_of(draft) < vocabulary.LEAST_VOCABULARY:
        return draft
    try:
        return vocabulary.RestrictedDraft(draft, np.arange(vocabulary.SIZES[1])).model
    except UnsupportedModelError:
        return draft


class _Forward:
    """A model that has read a prompt, and the least seconds of its forwards by the number of tokens; 0: the prompt."""

    def __init__(self, model: Any, prompt: torch.Tensor, clock: Callable[[], float]) -> None:
        self.clock, self.least = clock, dict[int, float]()
        for _ in range(2):  # the first time, much is set up
            started = clock()
            source: dict[str, Any] = {}
            if model.config.is_encoder_decoder:
                mask = torch.ones_like(prompt)
                source = {"attention_mask": mask, "encoder_outputs": model.get_encoder()(prompt, attention_mask=mask)}
                self.forward = DraftForward(model, source)
                self.forward.feed(prompt[:, :1])
            else:
                self.forward = DraftForward(model)
                self.forward.feed(prompt)
            self._took(0, started)
        self.ids = prompt[:, :1]

    def feed(self, tokens: int) -> None:
        """Time a forward over so many tokens, and take them back."""
        length, started = self.forward.length, self.clock()
        self.forward.feed(self.ids.expand(1, tokens))
        self._took(tokens, started)
        self.forward.crop(length)

    def _took(self, tokens: int, started: float) -> None:
        self.least[tokens] = min(self.clock() - started, self.least.get(tokens, np.inf))
