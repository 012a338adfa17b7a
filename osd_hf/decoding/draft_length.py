"""
Choose how many tokens a round drafts, and from which source: the draft model or past text.

A round that drafts k tokens takes `R(k)` seconds, and at acceptance rate alpha it emits `E(alpha, k)` tokens
(arXiv 2211.17192). The best k has the highest rate `E(alpha, k) / R(k)`. Both are measured while requests are served.
Within a round, another candidate is worth its time if it is expected to bring more tokens than the same time brings
elsewhere.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from osd_hf.acceptance import UNTIMED
from osd_hf.decoding import vocabulary
from osd_hf.decoding.forward import DraftForward
from osd_hf.decoding.text import Guess
from osd_hf.errors import UnsupportedModelError
from osd_hf.models import unwrap, vocab_size_of
from osd_hf.speedup import ForwardSeconds, expected_block_efficiency
from osd_hf.utils.kernels import fast_kernels, unpack

DRAFT: Final = "draft"
MAX_K = 32
MAX_DOMAINS = 1024  # the oldest are forgotten
READS_PROMPT_TOKENS = 64  # a draft forward over more tokens reads a prompt: the round is not timed

# Averages: observations after which an old one counts a third.
MEMORY = 128
TEXT_MEMORY = 256
REQUEST_MEMORY = 32
LEVEL_MEMORY = 16

# Costs.
WARM_UP_TOKENS = (4, 1, 7, 2)  # drafted in turn until costs are known: a slope needs several numbers
MIN_KNOWN_ROUNDS = 4  # with and without candidates, from which costs are known
MAX_SPIKE = 8.0  # times the average that one time counts at most
MAX_EXCESS = 3.0  # times the expected time of a round; a longer one was delayed by something else
PRIOR_SLOPE = 0.02  # cost of another candidate relative to a plain round, until it is measured
RIDGE = 0.25  # variance of candidates at which the measured slope and the prior one count equally

# Acceptance.
PRIOR_ALPHA, PRIOR_WEIGHT = 0.6, 4.0
CONFIDENCE_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
MAX_REQUEST_WEIGHT = 16  # examined tokens of a request that count in its domain's alpha
MIN_EXAMINED_TOKENS = 20  # of a domain, below which drafting continues to measure alpha
OWN_HALF_WEIGHT = 8  # examined tokens of a request at which its own alpha counts as much as its domain's

# Decisions.
MIN_SPEEDUP = 1.03  # the plain loop is faster than a plain round, and a draft also reads the prompt
MIN_SPEEDUP_PER_DOUBLING = 0.04  # a batch ends with its slowest row
MIN_TEXT_TOKENS = 0.05  # tokens per round that past text must bring to be looked up at all
REFRESH_EVERY = 100  # rounds; one is plain, to measure its cost
EXPLORE_EVERY = 32  # rounds; one tries a candidate that does not seem worth it
TEXT_PROBE_EVERY = 15  # requests; one looks up past text where it did not help
PROBE_SHARE = 0.015  # of plain decoding time that may be lost to find out whether drafting pays by now
PROBE_ROUNDS = 4  # time of plain rounds, in rounds, to save up before a request probes


@dataclass(frozen=True)
class RoundTime:
    """Describe a round, or the average of several."""

    candidates: int = 0
    forwards: int = 0  # of the draft
    draft_seconds: float = 0.0  # of all these forwards
    seconds: float | None = None  # of the round; `None` if it also read a prompt
    rounds: int = 1

    @property
    def is_plain(self) -> bool:
        return self.candidates == 0 and self.forwards == 0


# --- costs ----------------------------------------------------------------------------------------------------------


class Average:
    """Mean of recent values. Older values count less; after `memory` more values, a third."""

    def __init__(self, mean: float = 0.0, weight: float = 0.0, memory: int = MEMORY) -> None:
        self.mean = mean
        self.weight = weight
        self.memory = memory

    def add(self, value: float, count: int = 1) -> None:
        count = min(count, self.memory)
        self.fade(count)
        self.weight += count
        self.mean += (value - self.mean) * count / self.weight

    def fade(self, count: int = 1) -> None:
        """Forget as much as `count` new values would."""
        self.weight *= (1 - 1 / self.memory) ** count


class Cost(Average):
    """Mean of recent times. Outliers are cut off, and a slow start is forgotten: the first time, much is compiled."""

    def add(self, value: float, count: int = 1) -> None:
        if self.weight and value * MAX_SPIKE < self.mean:
            self.mean = self.weight = 0.0
        super().add(min(value, MAX_SPIKE * self.mean) if self.weight else value, count)


class Line:
    """Straight line through recent costs over the number of candidates, with a slope of at least 0."""

    def __init__(self) -> None:
        self.weight = self._x = self._xx = self._y = self._xy = 0.0

    def add(self, x: int, y: float) -> None:
        keep = 1 - 1 / MEMORY
        if 0 < self.weight <= MEMORY / 4:
            base, slope = self.fit(0.0)
            if y * MAX_EXCESS < base + slope * x:  # the first rounds were delayed by something else
                keep = 0.0
        self.weight = self.weight * keep + 1
        self._x, self._xx = self._x * keep + x, self._xx * keep + x * x
        self._y, self._xy = self._y * keep + y, self._xy * keep + x * y

    def doubt(self) -> None:
        """Reduce the weight of what was measured: it may have been delayed by something else."""
        share = min((MIN_KNOWN_ROUNDS + 1) / self.weight, 1.0) if self.weight else 1.0
        self.weight *= share
        self._x, self._xx, self._y, self._xy = share * self._x, share * self._xx, share * self._y, share * self._xy

    def fit(self, prior_slope: float) -> tuple[float, float]:
        """Return the value at 0, and the slope."""
        mean_x, mean_y = self._x / self.weight, self._y / self.weight
        variance = self._xx / self.weight - mean_x**2
        covariance = self._xy / self.weight - mean_x * mean_y
        slope = (covariance + RIDGE * prior_slope) / (variance + RIDGE)
        slope = min(max(slope, 0.0), mean_y / (mean_x + 1))
        return mean_y - slope * mean_x, slope


class Costs:
    """Costs of rounds, in units of `level` seconds. The level follows the speed of the machine and the length of
    contexts, by every round of any kind. So costs that were measured at different times can be compared."""

    def __init__(self) -> None:
        self.level = 1.0
        self.plain = Cost()
        self.draft = Cost()  # one forward of the draft
        self.verify = Line()  # a round with candidates, without the draft

    @property
    def are_known(self) -> bool:
        return min(self.plain.weight, self.verify.weight) >= MIN_KNOWN_ROUNDS

    def verifying(self) -> tuple[float, float]:
        """Return the cost of a round with candidates as if there were none, and what each candidate adds."""
        return self.verify.fit(PRIOR_SLOPE * (self.plain.mean or 1.0))

    def round(self, candidates: float, forwards: float) -> float:
        """Return the cost of a round with these numbers of candidates and draft forwards."""
        if not candidates and not forwards:
            return self.plain.mean
        base, slope = self.verifying()
        return base + slope * candidates + self.draft.mean * forwards

    def add(self, time: RoundTime) -> float:
        """Take in a round; return its seconds without a delay by something else, and 0 if it was not timed."""
        if time.seconds is None:
            return 0.0
        unit, excess = self.level, 1.0
        if self.are_known and (self.draft.weight or not time.forwards):
            expected = self.level * self.round(time.candidates, time.forwards)
            excess = max(time.seconds / (MAX_EXCESS * expected), 1.0)
            # Costs are divided by the level before this round, or else noise drives both apart.
            unit *= excess
            self.level *= 1 + min(time.rounds / LEVEL_MEMORY, 1.0) * (time.seconds / excess / expected - 1)
        if time.forwards:
            self.draft.add(time.draft_seconds / time.forwards / unit)
        if time.candidates:
            self.verify.add(time.candidates, (time.seconds - time.draft_seconds) / unit)
        elif not time.forwards:
            self.plain.add(time.seconds / unit, time.rounds)
        return time.seconds / excess


class Rate:
    """Tokens over time in recent rounds."""

    def __init__(self) -> None:
        self.tokens = self.time = self.weight = 0.0

    def add(self, tokens: float, time: float, count: int = 1) -> None:
        keep = (1 - 1 / MEMORY) ** count
        self.tokens = self.tokens * keep + tokens
        self.time = self.time * keep + time
        self.weight = self.weight * keep + count

    def per_time(self, default: float) -> float:
        """Return tokens over time; the default until enough rounds were seen."""
        return self.tokens / self.time if self.weight > MEMORY / 4 and self.time else default


def best_rate(costs: Costs, alpha: float) -> tuple[float, int]:
    """Return the highest expected token rate at this acceptance, and the k that reaches it."""
    base, slope = costs.verifying()
    best, best_k, tokens = 0.0, 0, 1.0
    for k in range(1, MAX_K + 1):
        tokens += min(alpha, 1.0) ** k
        rate = tokens / (base + k * (slope + costs.draft.mean))
        if rate <= best:  # the rate rises, and then falls
            break
        best, best_k = rate, k
    return best, best_k


def min_speedup(rows: int) -> float:
    """Return the expected speed-up from which rounds of a batch have candidates."""
    return MIN_SPEEDUP + MIN_SPEEDUP_PER_DOUBLING * math.log2(max(rows, 1))


def _row_bucket(rows: int) -> int:
    """Return the power of two under which the costs of batches are kept."""
    return 1 << (rows - 1).bit_length()


# --- acceptance -----------------------------------------------------------------------------------------------------


class Acceptance:
    """What is known of one domain: acceptance of the draft and of past text, the token rate, and time spent on
    probes."""

    def __init__(self) -> None:
        self.alpha = Average(PRIOR_ALPHA, PRIOR_WEIGHT)  # over requests: they differ more than tokens of one do
        edges = (0.0, *CONFIDENCE_EDGES, 1.0)
        middles = [(low + high) / 2 for low, high in zip(edges[:-1], edges[1:], strict=True)]
        self._by_confidence = [Average(middle, PRIOR_WEIGHT) for middle in middles]
        self._next_by_confidence = [Average() for _ in middles]
        self._by_situation: dict[tuple[int, int, int], Average] = {}  # of past text
        self.text_tokens = Average(1.0, PRIOR_WEIGHT)  # that past text was expected to bring per round
        self.text_follows = Average(1.0, PRIOR_WEIGHT)  # guesses accepted after the first accepted one
        self.rate = Rate()
        self.rounds = 0
        self.requests = 0
        self.plain_seconds = 0.0
        self.probe_seconds = 0.0  # lost by drafting where it does not pay

    def chances(self, confidence: float, alpha: float) -> tuple[float, float]:
        """Return the probability that a token of this confidence is accepted in a request with this alpha, and then
        that the next token is."""
        bucket = bisect_left(CONFIDENCE_EDGES, confidence)
        after = self._next_by_confidence[bucket]
        usual = (after.mean * after.weight + self.alpha.mean * PRIOR_WEIGHT) / (after.weight + PRIOR_WEIGHT)
        return self._by_confidence[bucket].mean, min(usual * alpha / max(self.alpha.mean, 1e-6), 1.0)

    def guessed(self, guess: Guess) -> Average:
        """Return how often guesses of past text in this situation are right."""
        situation = guess.situation
        if situation not in self._by_situation:
            _, length, agreement = situation
            likely = min(0.3 + 0.09 * length, 0.9) * (0.35, 1.0, 0.75, 1.05)[agreement]
            self._by_situation[situation] = Average(likely, PRIOR_WEIGHT, TEXT_MEMORY)
        return self._by_situation[situation]

    def judged(self, confidence: float, confidence_before: float | None, is_accepted: bool) -> None:
        """Take in a drafted token that was examined, and the confidence of the drafted token before it, if any."""
        self._by_confidence[bisect_left(CONFIDENCE_EDGES, confidence)].add(is_accepted)
        if confidence_before is not None:
            self._next_by_confidence[bisect_left(CONFIDENCE_EDGES, confidence_before)].add(is_accepted)

    def ended(self, accepted: int, examined: int) -> None:
        """Take in the drafted tokens of a request."""
        if examined:
            self.alpha.add(accepted / examined, min(examined, MAX_REQUEST_WEIGHT))

    def fade(self, share: float) -> None:
        """Reduce the weight of what is known of the draft, but not below that of a prior."""
        for average in (self.alpha, *self._by_confidence, *self._next_by_confidence):
            average.weight = min(average.weight, max(average.weight * share, PRIOR_WEIGHT))

    def spend(self, *, plain_seconds: float = 0.0, probe_seconds: float = 0.0) -> None:
        """Count the time of plain rounds, and the time lost by drafting where it does not pay."""
        self.plain_seconds += plain_seconds
        self.probe_seconds = max(self.probe_seconds + probe_seconds, 0.0)

    def probes(self, examined: float, seconds: float = 0.0) -> bool:
        """Whether to draft although it does not seem to pay, and may cost these seconds."""
        return examined < MIN_EXAMINED_TOKENS or PROBE_SHARE * self.plain_seconds - self.probe_seconds >= seconds


@dataclass(frozen=True)
class DraftingPlan:
    """State how `num_assistant_tokens="auto"` drafts now, and why. Times are `None` until they are measured."""

    speculates: bool  # if not, the target decodes alone, and a few rounds draft now and then to find out
    k: int  # with the largest expected speed-up; rounds end earlier or later by the draft's confidence
    alpha: float  # acceptance rate of the domain; recent requests count most
    speedup: float  # expected, over plain decoding in the same loop
    draft_seconds: float | None  # of a drafted token
    plain_seconds: float | None  # of a round without candidates
    examined: float  # tokens that alpha rests on; old ones count in part
    vocab_size: int | None = None  # of the draft vocabulary; `None` means all tokens

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, ready for JSON."""
        return asdict(self)


class Pacer:
    """
    Measure acceptance by domain, and costs, over all requests of a draft, and plan from them.

    Threads share a pacer: `lock` is held wherever its data are used. Seconds are wall time.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.costs = Costs()
        self.timed: tuple[float, ...] = UNTIMED  # as in `AcceptanceStats`
        self._batch_costs: dict[int, Costs] = {}  # by `_row_bucket`
        self._latest = (1, self.costs)  # rows and costs of the last round
        self._domains: dict[Any, Acceptance] = {}

    def took(self, time: RoundTime, emitted: int, costs: Costs | None = None, rows: int = 1) -> None:
        """Take in rounds and the number of tokens that they emitted. The lock is held."""
        costs = costs or self.costs
        seconds = time.rounds * costs.add(time)
        if time.seconds is None:
            return
        self._latest = rows, costs
        alone = seconds if time.is_plain else costs.level * costs.plain.mean * emitted / rows
        compared = (seconds, alone) if costs.plain.weight else (0.0, 0.0)
        new = (emitted, time.rounds * time.seconds, *compared)
        self.timed = tuple(old + more for old, more in zip(self.timed, new, strict=True))

    def reset_timed(self) -> None:
        """Count tokens and seconds from zero again. Measured costs are kept."""
        with self.lock:
            self.timed = UNTIMED

    def pace(self, domain: Any = None, sources: str = "both", *, may_repeat: bool = True) -> AutoPace:
        """Return the pace of one request. Without `may_repeat`, past text is not used."""
        with self.lock:
            return AutoPace(self, self.acceptance(domain), sources, may_repeat)

    def acceptance(self, domain: Any) -> Acceptance:
        """Return what is known of a domain. The lock is held."""
        if domain not in self._domains and len(self._domains) >= MAX_DOMAINS:
            del self._domains[next(iter(self._domains))]
        return self._domains.setdefault(domain, Acceptance())

    def of_batches(self, rows: int) -> Costs:
        """Return the costs of rounds with this number of rows. The lock is held."""
        return self._batch_costs.setdefault(_row_bucket(rows), Costs())

    def plan(self, domain: Any = None) -> DraftingPlan:
        """Return how a request of this domain would be drafted for now."""
        with self.lock:
            return self.plan_for(self._domains.get(domain) or Acceptance())

    def plan_for(self, domain: Acceptance, own: Average | None = None, rows: int = 0) -> DraftingPlan:
        """Return the plan of a domain, of a request with an acceptance of its `own`, or of a batch. The lock is
        held."""
        costs = self.of_batches(rows) if rows else self.costs
        alpha, examined = domain.alpha.mean, domain.alpha.weight
        if own is not None:
            alpha = (alpha * OWN_HALF_WEIGHT + own.mean * own.weight) / (OWN_HALF_WEIGHT + own.weight)
            examined += own.weight
        if not costs.are_known:
            return DraftingPlan(True, WARM_UP_TOKENS[0], alpha, 1.0, None, None, examined)
        plain = costs.plain.mean
        best, k = best_rate(costs, alpha)
        speculates = best * plain > min_speedup(rows)
        return DraftingPlan(
            speculates=speculates,
            k=k if speculates else 0,
            alpha=alpha,
            speedup=max(best * plain, 1.0),
            draft_seconds=costs.level * costs.draft.mean,
            plain_seconds=costs.level * plain,
            examined=examined,
        )

    def round_seconds(self, k: int) -> float | None:
        """Return the time of a round that drafts k tokens, per row of a batch; `None` until it is measured."""
        with self.lock:
            rows, costs = self._latest
            return costs.level * costs.round(k, k) / rows if costs.verify.weight else None

    def token_seconds(self, alpha: float) -> float | None:
        """Return the time of a token at this acceptance with the best k, per row of a batch; `None` until it is
        measured."""
        with self.lock:
            rows, costs = self._latest
            if not costs.are_known:
                return None
            return costs.level / max(1 / costs.plain.mean, best_rate(costs, alpha)[0]) / rows

    def draft_changed(self, domain: Any = ...) -> None:
        """Halve the weight of what is known of the draft's acceptance, for one domain or all: a new version serves.
        Keys of domains are those of [`~LeanDrafting.pace`]."""
        with self.lock:
            for key, known in self._domains.items():
                if domain is ... or key[0] == domain:
                    known.fade(0.5)


# --- one request ----------------------------------------------------------------------------------------------------


class Pace(Protocol):
    """Choose the source of each candidate of a request, and the number of candidates per round."""

    reads_confidence: bool
    reads_text: bool

    def is_plain(self) -> bool:
        """Whether no round of the request will have candidates. Called once, as the request begins."""
        return False

    def begin(self) -> None:
        """Begin a round."""

    def next(self, guesses: Sequence[Guess], may_draft: bool = True) -> Guess | Literal["draft"] | None:
        """Return the source of the next candidate: one of the guesses of past text, or the draft if it may; `None`
        ends the round."""

    def drafted(self, token: int, confidence: float) -> None:
        """Take in a token that the draft proposed with this probability."""
        return

    def judged(self, accepted: int, emitted: Sequence[int]) -> None:
        """Take in how many candidates the target accepted, and the tokens that the round emitted."""
        return

    def timed(self, time: RoundTime) -> None:
        """Take in the time of rounds."""
        return

    def ended(self) -> None:
        """End the request, successful or not."""
        return


class FixedPace(Pace):
    """Draft k tokens per round. Drafting ends after a token with a probability below the threshold."""

    reads_text = False

    def __init__(self, k: int, threshold: float = 0.0, pacer: Pacer | None = None) -> None:
        self.k = k
        self.threshold = threshold
        self.reads_confidence = threshold > 0
        self._pacer = pacer
        self._left = 0
        self._confidence = 1.0
        self._emitted = 0

    def begin(self) -> None:
        self._left = self.k
        self._confidence = 1.0

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


class _Candidate(NamedTuple):
    """A proposed token: the confidence of the draft, or the average of the situation in past text."""

    confidence: float | None = None
    guessed: Average | None = None


class AutoPace(Pace):
    """Choose by measured acceptance and costs, from `sources`: `"both"`, `"draft"`, or `"text"`."""

    reads_confidence = True

    def __init__(self, pacer: Pacer, domain: Acceptance, sources: str = "both", may_repeat: bool = True) -> None:
        self._pacer = pacer
        self._domain = domain
        self.reads_text = may_repeat and sources != "draft"
        self._drafts = sources != "text"
        domain.requests += 1
        self._own = Average(memory=REQUEST_MEMORY)  # acceptance of this request
        self._plan = pacer.plan_for(domain)
        self._accepted = self._examined = self._emitted = 0
        self._begin_round(0, 0)

    def _begin_round(self, max_drafted: int, max_guessed: int) -> None:
        self._max_drafted = max_drafted
        self._max_guessed = max_guessed
        self._candidates: list[_Candidate] = []
        self._chance = 1.0  # that all candidates so far are accepted
        self._likely = self._plan.alpha  # that the next drafted token is accepted then
        self._first_guess: tuple[Guess, Average] | None = None
        self._explores = False

    def is_plain(self) -> bool:
        with self._pacer.lock:
            plan, domain = self._plan, self._domain
            looks_up = domain.text_tokens.mean > MIN_TEXT_TOKENS or domain.requests % TEXT_PROBE_EVERY == 0
            # The plain loop is slightly faster than the assisted one: few requests probe, and each for long.
            seconds = PROBE_ROUNDS * (plan.plain_seconds or 0.0)
            drafts = self._drafts and (plan.speculates or domain.probes(plan.examined, seconds))
            return not (drafts or (self.reads_text and looks_up))

    def begin(self) -> None:
        pacer, domain, costs = self._pacer, self._domain, self._pacer.costs
        with pacer.lock:
            plan = self._plan = pacer.plan_for(domain, self._own)
            if not costs.are_known:
                warm_up = WARM_UP_TOKENS[round(costs.verify.weight) % len(WARM_UP_TOKENS)]
                k = warm_up if costs.verify.weight <= costs.plain.weight else 0
                self._begin_round(*((k, 0) if self._drafts else (0, k)))
                return
            domain.rounds += 1
            refreshes = plan.speculates and domain.rounds % REFRESH_EVERY == 0
            drafts = self._drafts and not refreshes and (plan.speculates or domain.probes(plan.examined))
            looks_up = self.reads_text and not refreshes
            self._begin_round(MAX_K if drafts else 0, MAX_K if looks_up else 0)
            self._explores = domain.rounds % EXPLORE_EVERY == 0
            base, slope = costs.verifying()
            rate = max(domain.rate.per_time(plan.speedup / costs.plain.mean), 1 / costs.plain.mean)
            # Tokens that the same time brings elsewhere: of a first candidate, of each candidate, of a draft forward.
            self._first_price = rate * max(base - costs.plain.mean, 0.0)
            self._verify_price = rate * slope
            self._draft_price = rate * costs.draft.mean

    def next(self, guesses: Sequence[Guess], may_draft: bool = True) -> Guess | Literal["draft"] | None:
        with self._pacer.lock:
            known = [(guess, self._domain.guessed(guess)) for guess in guesses]
            best = max(known, key=lambda one: one[1].mean, default=None)
            count = len(self._candidates)
            if count == 0:
                self._first_guess = best
            may_draft = may_draft and count < self._max_drafted
            if count >= self._max_guessed:
                best = None
            if not self._pacer.costs.are_known or self._plan.plain_seconds is None:
                return DRAFT if may_draft else self._take(best)
            draft_gain = self._chance * self._likely - self._draft_price - self._verify_price if may_draft else 0.0
            text_gain = 0.0 if best is None else self._chance * best[1].mean - self._verify_price
            if count == 0:  # the plan says whether a first token is drafted
                if best is not None and not self._text_pays(best[1].mean):
                    best = None
                return DRAFT if may_draft and (best is None or draft_gain > text_gain) else self._take(best)
            if best is not None and text_gain > max(draft_gain, 0.0):
                return self._take(best)
            if draft_gain > 0:
                return DRAFT
            # What is never drafted is never judged.
            explores, self._explores = self._explores, False
            return DRAFT if may_draft and explores else None

    def _text_pays(self, chance: float) -> bool:
        """Whether a round with this guess, and those that may follow it, is worth its time."""
        length = 1 + self._domain.text_follows.mean
        gain = chance * length - self._first_price - self._verify_price * length
        self._domain.text_tokens.add(max(gain, 0.0))
        if gain <= 0 and self._explores and not self._max_drafted:
            self._pacer.costs.verify.doubt()
            return True
        return gain > 0

    def _take(self, best: tuple[Guess, Average] | None) -> Guess | None:
        if best is None:
            return None
        guess, known = best
        self._candidates.append(_Candidate(guessed=known))
        self._chance *= known.mean
        self._likely = self._plan.alpha
        return guess

    def drafted(self, token: int, confidence: float) -> None:
        with self._pacer.lock:
            chance, self._likely = self._domain.chances(confidence, self._plan.alpha)
            self._candidates.append(_Candidate(confidence))
            self._chance *= chance

    def judged(self, accepted: int, emitted: Sequence[int]) -> None:
        with self._pacer.lock:
            domain, candidates = self._domain, self._candidates
            self._emitted = len(emitted)
            hits = examined_drafts = 0
            confidence_before: float | None = None
            for i, (confidence, guessed) in enumerate(candidates[: min(accepted + 1, len(emitted))]):
                is_accepted = i < accepted
                if guessed is not None:
                    guessed.add(is_accepted)
                elif confidence is not None:
                    domain.judged(confidence, confidence_before, is_accepted)
                    examined_drafts += 1
                    hits += is_accepted
                confidence_before = confidence
            self._judge_text(accepted, emitted)
            if examined_drafts:
                self._own.add(hits / examined_drafts, examined_drafts)
                self._accepted += hits
                self._examined += examined_drafts
            else:
                self._own.fade()  # while nothing is drafted, the text may change

    def _judge_text(self, accepted: int, emitted: Sequence[int]) -> None:
        is_guess = [candidate.guessed is not None for candidate in self._candidates]
        if accepted and is_guess[0]:
            self._domain.text_follows.add((*is_guess[:accepted], False).index(False) - 1)
        # A guess that was not proposed also shows whether it would have been right.
        if self._first_guess is not None and emitted and not (is_guess and is_guess[0]):
            guess, known = self._first_guess
            known.add(guess.token == emitted[0])
        elif self._first_guess is None and self.reads_text and emitted:
            self._domain.text_tokens.add(0.0)

    def timed(self, time: RoundTime) -> None:
        domain, costs = self._domain, self._pacer.costs
        with self._pacer.lock:
            emitted = time.rounds if time.is_plain else self._emitted
            self._pacer.took(time, emitted)
            if time.seconds is not None:
                domain.rate.add(emitted, time.rounds * time.seconds / costs.level, time.rounds)
            if time.forwards == 0:
                domain.spend(plain_seconds=(time.seconds or 0.0) * time.rounds)
            elif not self._plan.speculates:
                domain.spend(probe_seconds=_lost_seconds(time, self._emitted, costs))

    def ended(self) -> None:
        with self._pacer.lock:
            self._domain.ended(self._accepted, self._examined)


def _lost_seconds(time: RoundTime, emitted: float, costs: Costs) -> float:
    """Return the time that a round took longer than plain rounds for the same tokens. Of a round that also read the
    prompt, the drafting is known to be extra."""
    return time.draft_seconds if time.seconds is None else time.seconds - emitted * costs.level * costs.plain.mean


# --- batches --------------------------------------------------------------------------------------------------------


class BatchRound(NamedTuple):
    """At most k candidates for each row of a round: from past text for the rows `texts`, and from the draft for the
    other rows if it `drafts`."""

    k: int
    texts: frozenset[int] = frozenset()
    drafts: bool = True


class BatchPace:
    """Choose the number of candidates of each row in the rounds of one batch. With many rows, the target computes
    instead of loading weights, and candidates cost more; as rows end, they may pay again."""

    def __init__(
        self,
        pacer: Pacer,
        domain: Any,
        rows: int,
        *,
        fixed: FixedPace | None = None,
        sources: str = "both",
        may_repeat: bool = True,
    ) -> None:
        self._pacer = pacer
        self._fixed = fixed
        self.threshold = 0.0 if fixed is None else fixed.threshold
        self._rows = rows
        self._drafts = sources != "text"
        self._own = Average(memory=REQUEST_MEMORY)
        with pacer.lock:
            known = self._domain = pacer.acceptance(domain)
            known.requests += 1
            looks_up = known.text_tokens.mean > MIN_TEXT_TOKENS or known.requests % TEXT_PROBE_EVERY == 0
            self._costs = pacer.of_batches(rows)
            self._plan = pacer.plan_for(known, None, rows)
            # The drafts read the prompts to find out: few batches probe, and each for long.
            self._probes = known.probes(self._plan.examined, PROBE_ROUNDS * (self._plan.plain_seconds or 0.0))
        self.reads_text = fixed is None and sources != "draft" and may_repeat and looks_up

    @property
    def is_plain(self) -> bool:
        """Whether no round will have candidates."""
        return self._fixed is not None and self._fixed.k == 0

    def begin(self, rows: int, texts: Mapping[int, Sequence[float]]) -> BatchRound:
        """Begin a round. For some of them, past text proposes tokens: `texts` has the probability of
        each that it and all before it are accepted."""
        pacer, domain = self._pacer, self._domain
        with pacer.lock:
            costs = self._costs = pacer.of_batches(rows)
            self._rows = rows
            if self._fixed is not None:
                return BatchRound(self._fixed.k)
            plan = self._plan = pacer.plan_for(domain, self._own, rows)
            domain.rounds += costs.are_known
            if costs.plain.weight < MIN_KNOWN_ROUNDS or (costs.are_known and domain.rounds % REFRESH_EVERY == 0):
                return BatchRound(0)
            if not costs.are_known:
                k = WARM_UP_TOKENS[round(costs.verify.weight) % len(WARM_UP_TOKENS)]
                return BatchRound(k, frozenset(() if self._drafts else texts), self._drafts)
            k = 0
            if self._drafts and plan.speculates:
                k = plan.k
            elif self._drafts and self._probes and domain.probes(plan.examined):
                k = best_rate(costs, plan.alpha)[1]
            return self._with_text(k, plan.alpha, texts) if self.reads_text else BatchRound(k)

    def _with_text(self, k: int, alpha: float, texts: Mapping[int, Sequence[float]]) -> BatchRound:
        """Return the best of three: k tokens of the draft, with past text for the rows where it is likelier; past text
        alone; a plain round."""
        costs, rows = self._costs, self._rows
        drafted = expected_block_efficiency(alpha, k) - 1 if k else 0.0
        text_rate, text_k = 0.0, 0
        for n in range(1, max(map(len, texts.values()), default=0) + 1):
            rate = (rows + sum(sum(chances[:n]) for chances in texts.values())) / costs.round(n, 0)
            text_rate, text_k = max((text_rate, text_k), (rate, n))
        self._domain.text_tokens.add(max(text_rate * costs.plain.mean / rows - 1, 0.0))
        better = frozenset(row for row, chances in texts.items() if sum(chances[:k]) > drafted)
        gained = (rows - len(better)) * drafted + sum(sum(texts[row][:k]) for row in better)
        other_rate = (rows + gained) / costs.round(k, k) if k else min_speedup(rows) * rows / costs.plain.mean
        explores = bool(texts) and not k and self._domain.rounds % EXPLORE_EVERY == 0
        if explores:
            costs.verify.doubt()
        if text_rate > other_rate or explores:
            return BatchRound(text_k, frozenset(texts), False)
        return BatchRound(k, better if k else frozenset())

    def likeliest(self, guesses: Sequence[Guess]) -> tuple[Guess, float]:
        """Return the guess that is right most often, and how often."""
        with self._pacer.lock:
            chances = [(self._domain.guessed(guess).mean, guess) for guess in guesses]
        chance, guess = max(chances, key=lambda one: one[0])
        return guess, chance

    def guessed(self, guess: Guess, is_right: bool) -> None:
        """Take in whether past text was right."""
        with self._pacer.lock:
            self._domain.guessed(guess).add(is_right)

    def judged(self, accepted: int, examined: int) -> None:
        """Take in the draft's candidates of one row in a round."""
        if examined:
            with self._pacer.lock:
                self._own.add(accepted / examined, examined)

    def timed(self, time: RoundTime, emitted: int) -> None:
        """Take in the time of rounds."""
        domain, costs = self._domain, self._costs
        with self._pacer.lock:
            self._pacer.took(time, emitted, costs, self._rows)
            if self._fixed is None and time.forwards == 0:
                domain.spend(plain_seconds=(time.seconds or 0.0) * time.rounds)
            elif self._fixed is None and not self._plan.speculates:
                domain.spend(probe_seconds=_lost_seconds(time, emitted / self._rows, costs))

    def ended(self, accepted: int, examined: int) -> None:
        """Take in the drafted tokens of a row that has ended."""
        with self._pacer.lock:
            self._domain.ended(accepted, examined)


# --- measured forwards ----------------------------------------------------------------------------------------------

TIMED_K = 5
MIN_TURNS, MAX_TURNS = 4, 64
TIMED_SECONDS = 0.5


@torch.inference_mode()
def measured_costs(
    target: PreTrainedModel,
    drafts: Sequence[PreTrainedModel],
    prompt_ids: Sequence[int] | NDArray[np.int32],
    clock: Callable[[], float],
) -> list[ForwardSeconds]:
    """Time forwards of the target and of each draft, in turns. A draft with a large vocabulary has a head of some
    thousand tokens, as when it serves."""
    models = [unwrap(target), *map(_with_serving_vocabulary, drafts)]
    prompt = torch.from_numpy(np.asarray(prompt_ids, np.int64))[None].to(models[0].device)
    with fast_kernels(*models, is_request=True):  # weights are packed in the second block, as when they serve
        timed = [_TimedModel(model, prompt, clock) for model in models]
    turns, started = 0, clock()
    with fast_kernels(*models, is_request=True):
        while turns < MIN_TURNS or (turns < MAX_TURNS and clock() - started < TIMED_SECONDS):
            for model in timed:
                model.time_forward(1)
            timed[0].time_forward(1 + TIMED_K)
            turns += 1
    unpack(*models)
    one, several = timed[0].seconds[1], timed[0].seconds[1 + TIMED_K]
    more = max(several - one, 0.0) / TIMED_K
    return [
        ForwardSeconds(one, more, model.seconds[1], timed[0].prompt_seconds, model.prompt_seconds)
        for model in timed[1:]
    ]


def _with_serving_vocabulary(draft: PreTrainedModel) -> PreTrainedModel:
    if vocab_size_of(draft) < vocabulary.MIN_VOCAB_SIZE:
        return draft
    try:
        restricted: PreTrainedModel = vocabulary.RestrictedDraft(draft, np.arange(vocabulary.SIZES[1])).model
        return restricted
    except UnsupportedModelError:
        return draft


class _TimedModel:
    """A model that has read a prompt. `seconds` has the minimum time of its forwards by their number of tokens."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[int, float] = {}
        self.prompt_seconds = math.inf
        self.token = prompt[:, :1]
        for _ in range(2):  # the first time, much is set up
            started = clock()
            if model.config.is_encoder_decoder:
                mask = torch.ones_like(prompt)
                outputs = model.get_encoder()(prompt, attention_mask=mask)
                self.forward = DraftForward(model, {"attention_mask": mask, "encoder_outputs": outputs})
                self.forward.feed(self.token)
            else:
                self.forward = DraftForward(model)
                self.forward.feed(prompt)
            self.prompt_seconds = min(self.prompt_seconds, clock() - started)

    def time_forward(self, tokens: int) -> None:
        """Time a forward over new tokens, and remove them."""
        length, started = self.forward.length, self.clock()
        self.forward.feed(self.token.expand(1, tokens))
        self.seconds[tokens] = min(self.clock() - started, self.seconds.get(tokens, math.inf))
        self.forward.crop(length)
