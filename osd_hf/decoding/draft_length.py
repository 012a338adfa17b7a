"""
Choose how many tokens a round drafts, and from which source: the draft model or past text.

A round that drafts k tokens takes `R(k)` seconds, and at acceptance rate alpha it emits `E(alpha, k)` tokens
(arXiv 2211.17192). The best k has the highest rate `E(alpha, k) / R(k)`. Both are measured while requests are served.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from osd_hf.decoding.text import Guess
from osd_hf.speedup import expected_block_efficiency

MAX_K = 32
MAX_DOMAINS = 1024  # the oldest are forgotten

# Averages: observations after which an old one counts a third.
MEMORY = 128
TEXT_MEMORY = 256
REQUEST_MEMORY = 32
LEVEL_MEMORY = 16

# Costs.
WARM_UP_TOKENS = (4, 1, 7, 2)  # drafted in turn until costs are known: a slope needs several numbers
MIN_KNOWN_ROUNDS = 4  # with and without candidates, from which costs are known
MAX_EXCESS = 3.0  # times the expected time of a round; a longer one was delayed by something else
PRIOR_SLOPE = 0.02  # cost of another candidate relative to a plain round, until it is measured
RIDGE = 0.25  # variance of candidates at which the measured slope and the prior one count equally

# Acceptance.
PRIOR_ALPHA, PRIOR_WEIGHT = 0.6, 4.0
MAX_REQUEST_WEIGHT = 16  # examined tokens of a request that count in its domain's alpha
MIN_EXAMINED_TOKENS = 20  # of a domain, below which drafting continues to measure alpha
CHANGED_WEIGHT = 10.0  # maximum weight of what is known of a draft when a new version serves
OWN_HALF_WEIGHT = 8  # examined tokens of a request at which its own alpha counts as much as its domain's

# Decisions.
MIN_SPEEDUP = 1.03  # transformers' plain loop is faster than a plain round, and drafting also reads the prompt
MIN_SPEEDUP_PER_DOUBLING = 0.04  # a batch ends with its slowest row
MIN_TEXT_TOKENS = 0.05  # tokens per round that past text must bring to be looked up at all
TRY_DRAFT_EVERY, TRY_TEXT_EVERY = 5, 15  # requests; one tries what does not seem to help
TRY_ROUNDS = 3  # of a request that tries drafting
REFRESH_EVERY, REFRESH_ROUNDS = 300, 3  # rounds; how many of them are plain, to measure their cost


class RoundTime(NamedTuple):
    """Describe a round, or the average of several."""

    candidates: int = 0
    forwards: int = 0  # of the draft
    draft_seconds: float = 0.0  # of all these forwards
    seconds: float | None = None  # of the round; `None` if it also read a prompt
    rounds: int = 1
    rereads: bool = False  # a plain round that reads known tokens again, behind a rejection

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


class Line:
    """Straight line through recent costs over the number of candidates, with a slope of at least 0."""

    def __init__(self) -> None:
        self._averages = [Average() for _ in range(4)]  # of x, y, x * x, and x * y

    @property
    def weight(self) -> float:
        return self._averages[0].weight

    def add(self, x: int, y: float) -> None:
        base, slope = self.fit(0.0)
        for average, value in zip(self._averages, (x, y, x * x, x * y), strict=True):
            if y * MAX_EXCESS < base + slope * x:  # the first rounds were delayed by something else
                average.weight = 0.0
            average.add(value)

    def fit(self, prior_slope: float) -> tuple[float, float]:
        """Return the value at 0, and the slope."""
        x, y, xx, xy = (average.mean for average in self._averages)
        slope = (xy - x * y + RIDGE * prior_slope) / (xx - x * x + RIDGE)
        slope = min(max(slope, 0.0), y / (x + 1))
        return y - slope * x, slope


class Costs:
    """Costs of rounds, in units of `level` seconds. The level follows the speed of the machine and the length of
    contexts, by every round of any kind. So costs that were measured at different times can be compared."""

    def __init__(self) -> None:
        self.level = 1.0
        self.plain = Average()
        self.alone = Average()  # a token of transformers' own loop
        self.draft = Average()  # one forward of the draft
        self.verify = Line()  # a round with candidates, without the draft

    @property
    def are_known(self) -> bool:
        return min(self.plain.weight, self.verify.weight) >= MIN_KNOWN_ROUNDS

    @property
    def token(self) -> float:
        """Cost of a token of the target alone by the fastest loop that was measured; `inf` before."""
        return min((cost.mean for cost in (self.plain, self.alone) if cost.weight), default=math.inf)

    def verifying(self) -> tuple[float, float]:
        """Return the intercept and the slope of the cost of a round over its candidates, without the draft."""
        return self.verify.fit(PRIOR_SLOPE * (self.plain.mean or 1.0))

    def round(self, candidates: float, forwards: float) -> float:
        """Return the cost of a round with these numbers of candidates and draft forwards."""
        if not candidates and not forwards:
            return self.plain.mean
        base, slope = self.verifying()
        return base + slope * candidates + self.draft.mean * forwards

    def best(self, alpha: float) -> tuple[float, int]:
        """Return the highest expected token rate at this acceptance, and the k that reaches it."""
        base, slope = self.verifying()
        best, best_k, tokens = 0.0, 0, 1.0
        for k in range(1, MAX_K + 1):
            tokens += min(alpha, 1.0) ** k
            rate = tokens / (base + k * (slope + self.draft.mean))
            if rate <= best:  # the rate rises, and then falls
                break
            best, best_k = rate, k
        return best, best_k

    def add(self, time: RoundTime) -> None:
        """Take in a round, without a delay by something else."""
        if time.seconds is None:
            return
        if time.rounds > 1:
            _add_cost(self.alone, time.seconds / self.level, time.rounds)
        unit = self.level
        if self.are_known and (self.draft.weight or not time.forwards):
            expected = self.level * self.round(time.candidates, time.forwards)
            excess = max(time.seconds / (MAX_EXCESS * expected), 1.0)
            # Costs are divided by the old level: the new one would feed the noise of this round back.
            unit *= excess
            self.level *= 1 + min(time.rounds / LEVEL_MEMORY, 1.0) * (time.seconds / excess / expected - 1)
        if time.forwards:
            _add_cost(self.draft, time.draft_seconds / time.forwards / unit)
        if time.candidates:
            self.verify.add(time.candidates, (time.seconds - time.draft_seconds) / unit)
        elif not time.forwards:
            _add_cost(self.plain, time.seconds / unit, time.rounds)


def _add_cost(average: Average, value: float, count: int = 1) -> None:
    if value * MAX_EXCESS < average.mean:  # the first times, much was set up
        average.weight = 0.0
    average.add(value, count)


PERFECT = Average(1.0, 1e9)  # acceptance

# --- acceptance -----------------------------------------------------------------------------------------------------


class Acceptance:
    """What is known of one domain: acceptance of the draft and of past text."""

    def __init__(self) -> None:
        self.alpha = Average(PRIOR_ALPHA, PRIOR_WEIGHT)  # over requests: they differ more than tokens of one do
        self._by_situation: dict[tuple[int, int, int], Average] = {}  # of past text
        self.text_tokens = Average(1.0, PRIOR_WEIGHT)  # that past text was expected to bring per round
        self.rounds = 0
        self.requests = 0
        self.has_paid = False  # whether drafting did in the last round

    def guessed(self, guess: Guess) -> Average:
        """Return how often guesses of past text in this situation are right."""
        situation = guess.situation
        if situation not in self._by_situation:
            _, length, agreement = situation
            likely = min(0.3 + 0.09 * length, 0.9) * (0.35, 1.0, 0.75, 1.05)[agreement]
            self._by_situation[situation] = Average(likely, PRIOR_WEIGHT, TEXT_MEMORY)
        return self._by_situation[situation]


@dataclass(frozen=True)
class DraftingPlan:
    """State how `num_assistant_tokens="auto"` drafts now, and why. Times are `None` until they are measured."""

    speculates: bool  # if not, the target decodes alone, and a few rounds draft now and then to find out
    k: int  # with the largest expected speed-up
    alpha: float  # acceptance rate of the domain; recent requests count most
    speedup: float  # expected, over plain decoding in the same loop
    draft_seconds: float | None  # of a drafted token
    plain_seconds: float | None  # of a round without candidates
    examined: float  # tokens that alpha rests on; old ones count in part
    vocab_size: int | None = None  # of the draft vocabulary; `None` means all tokens


class Pacer:
    """Measure acceptance by domain, and costs, over all requests of a draft, and plan from them. Threads share a
    pacer: `lock` is held wherever its data are used. Seconds are wall time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._answered, self._saved_seconds = (0.0, 0.0), 0.0
        self._costs: dict[int, Costs] = {}  # by the number of rows, rounded up to a power of two
        self._latest = (1, Costs())  # rows and costs of the last round
        self._rereading_seconds = 0.0  # of plain rounds since the last one with candidates, beyond a usual one's
        self._domains: dict[Any, Acceptance] = {}

    def took(self, time: RoundTime, emitted: int, costs: Costs, rows: int) -> None:
        """Take in rounds and the number of tokens that they emitted. The lock is held."""
        if time.rereads:
            if time.seconds is not None and costs.token < math.inf:
                self._rereading_seconds += max(time.seconds - costs.level * costs.token, 0.0)
            return
        if time.candidates and time.seconds is not None:  # part of the cost of speculation
            time = time._replace(seconds=time.seconds + self._rereading_seconds)
            self._rereading_seconds = 0.0
        costs.add(time)
        # Where a round also read a prompt, the target alone would have read it as well, and emitted a token.
        seconds, tokens = time.draft_seconds, emitted / rows - 1
        if time.seconds is not None:
            seconds, tokens = time.rounds * time.seconds, emitted / rows
            self._latest = rows, costs
        elif time.candidates and costs.are_known:
            seconds += costs.level * max(costs.round(time.candidates, 0) - costs.token, 0.0)
        if not time.is_plain and costs.token < math.inf:
            self._saved_seconds += tokens * costs.level * costs.token - seconds

    def answered(self, tokens: int, seconds: float, recording_seconds: float = 0.0) -> None:
        """Take in the tokens and the time of a call, and the time of recording it, which the target alone saves."""
        with self.lock:
            self._answered = self._answered[0] + tokens, self._answered[1] + seconds + recording_seconds
            self._saved_seconds -= recording_seconds

    @property
    def timed(self) -> tuple[float, float, float]:
        """Tokens and seconds of all calls, and the estimated seconds of the target alone, 0 if unknown."""
        with self.lock:
            tokens, seconds = self._answered
            is_known = self._latest[1].token < math.inf
            return tokens, seconds, seconds + self._saved_seconds if is_known else 0.0

    def reset_timed(self) -> None:
        """Count tokens and seconds from zero again. Measured costs are kept."""
        with self.lock:
            self._answered, self._saved_seconds = (0.0, 0.0), 0.0

    def acceptance(self, domain: Any) -> Acceptance:
        """Return what is known of a domain. The lock is held."""
        if domain not in self._domains and len(self._domains) >= MAX_DOMAINS:
            del self._domains[next(iter(self._domains))]
        return self._domains.setdefault(domain, Acceptance())

    def costs_of(self, rows: int) -> Costs:
        """Return the costs of rounds of a number of rows. The lock is held."""
        return self._costs.setdefault(1 << (rows - 1).bit_length(), Costs())

    def plan(self, domain: Any = None) -> DraftingPlan:
        """Return how a request of this domain would be drafted for now."""
        with self.lock:
            return self.plan_for(self._domains.get(domain) or Acceptance())

    def plan_for(self, domain: Acceptance, own: Average | None = None, rows: int = 1) -> DraftingPlan:
        """Return the plan of a domain, of a request with an acceptance of its `own`, or of a batch. A call speculates
        if that is faster than the fastest way to run the target alone; within a request, than a plain round. The lock
        is held."""
        costs = self.costs_of(rows)
        alpha, examined = domain.alpha.mean, domain.alpha.weight
        if own is not None:
            alpha = (alpha * OWN_HALF_WEIGHT + own.mean * own.weight) / (OWN_HALF_WEIGHT + own.weight)
            examined += own.weight
        if not costs.are_known:
            return DraftingPlan(True, WARM_UP_TOKENS[0], alpha, 1.0, None, None, examined)
        plain, (rate, k) = costs.plain.mean, costs.best(alpha)
        speculates = rate * (costs.token if own is None else plain) > _min_speedup(rows)
        return DraftingPlan(
            speculates=speculates,
            k=k if speculates else 0,
            alpha=alpha,
            speedup=max(rate * plain, 1.0),
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
        """Return the time of a token at this acceptance with the best k, per row of a batch, or of the target alone if
        it is faster; `None` until it is measured."""
        with self.lock:
            rows, costs = self._latest
            if not costs.are_known:
                return None
            return costs.level / max(1 / costs.token, costs.best(alpha)[0]) / rows

    def draft_changed(self, domain: Any = ...) -> None:
        """Reduce the weight of what is known of the draft's acceptance, for one domain or all: a new version serves.
        Keys of domains are those of [`~osd_hf.decoding.sources.Drafting.length`]."""
        with self.lock:
            for key, known in self._domains.items():
                if domain is ... or key[0] == domain:
                    known.alpha.weight = min(known.alpha.weight, CHANGED_WEIGHT)


def _min_speedup(rows: int) -> float:
    """Return the expected speed-up from which rounds of a batch have candidates."""
    return MIN_SPEEDUP + MIN_SPEEDUP_PER_DOUBLING * math.log2(rows)


# --- one call -------------------------------------------------------------------------------------------------------


class RoundPlan(NamedTuple):
    """The candidates of one round."""

    k: int  # maximum number of candidates of a row
    text_rows: frozenset[int] = frozenset()  # rows whose candidates come from past text
    drafts: bool = True  # whether the draft proposes for the other rows
    threshold: float = 0.0  # a drafted token that the draft gives a smaller probability is the row's last candidate


class DraftLength:
    """
    Choose the number and the source of the candidates of one call, round by round.

    With a fixed k, each round drafts k tokens; below `threshold`, the draft's confidence ends a round. Otherwise three
    kinds of rounds are compared: plain ones, past text, and the draft, with past text for the rows where it is
    likelier. With many rows, the target computes instead of loading weights, and candidates cost more; as rows end,
    they may pay again. `domain` is the call's key in the pacer.
    """

    def __init__(
        self,
        pacer: Pacer,
        domain: Any = None,
        rows: int = 1,
        *,
        fixed_k: int | None = None,
        threshold: float = 0.0,
        sources: str = "both",
        reads_text: bool = True,
    ) -> None:
        self._pacer = pacer
        self._fixed_k = fixed_k
        self._threshold = threshold
        self._rows = rows
        self._drafts = sources != "text"
        self._own, self._was_plain = Average(memory=REQUEST_MEMORY), False
        with pacer.lock:
            known = self._domain = pacer.acceptance(domain)
            known.requests += 1
            self._looks_up = known.text_tokens.mean > MIN_TEXT_TOKENS or known.requests % TRY_TEXT_EVERY == 0
            self._costs = pacer.costs_of(rows)
            self._plan = pacer.plan_for(known, None, rows)
            # Rounds that may draft although it does not seem to pay. In large batches, even a perfect draft may not.
            tries = known.has_paid or known.alpha.weight < MIN_EXAMINED_TOKENS or known.requests % TRY_DRAFT_EVERY == 0
            tries = tries and (rows == 1 or pacer.plan_for(known, PERFECT, rows).speculates)
            self._tries_left = TRY_ROUNDS if tries else 0
        self.reads_text = fixed_k is None and sources != "draft" and reads_text and (rows == 1 or self._looks_up)

    @property
    def is_plain(self) -> bool:
        """Whether no round will have candidates."""
        if self._fixed_k is not None:
            return self._fixed_k == 0
        drafts = self._drafts and (self._plan.speculates or self._tries_left > 0)
        return not drafts and not (self.reads_text and self._looks_up)

    def begin(self, rows: int, texts: Mapping[int, Sequence[float]]) -> RoundPlan:
        """Begin a round of `rows` rows. For some of them, past text proposes tokens: `texts` has the probability of
        each that it and all before it are accepted."""
        pacer, domain = self._pacer, self._domain
        with pacer.lock:
            costs = self._costs = pacer.costs_of(rows)
            self._rows = rows
            if self._fixed_k is not None:
                return RoundPlan(self._fixed_k, threshold=self._threshold)
            plan = pacer.plan_for(domain, self._own, rows)
            if not costs.are_known:
                if costs.plain.weight < min(costs.verify.weight, MIN_KNOWN_ROUNDS):
                    return RoundPlan(0)
                k = WARM_UP_TOKENS[round(costs.verify.weight) % len(WARM_UP_TOKENS)]
                return RoundPlan(k, frozenset(() if self._drafts else texts), self._drafts)
            domain.rounds += 1
            domain.has_paid = plan.speculates
            if plan.speculates and domain.rounds % REFRESH_EVERY < REFRESH_ROUNDS:
                return RoundPlan(0)
            k = plan.k if self._drafts else 0
            if self._drafts and not k and self._tries_left:
                self._tries_left -= 1
                k = costs.best(plan.alpha)[1]
            return self._with_text(k, plan, texts) if self.reads_text else RoundPlan(k)

    def _with_text(self, k: int, plan: DraftingPlan, texts: Mapping[int, Sequence[float]]) -> RoundPlan:
        """Return the best of three: k tokens of the draft, with past text for the rows where it is likelier; past text
        alone; a plain round."""
        costs, rows = self._costs, self._rows
        text_rate, text_k = 0.0, 0
        for n in range(1, max(map(len, texts.values()), default=0) + 1):
            rate = (rows + sum(sum(chances[:n]) for chances in texts.values())) / costs.round(n, 0)
            text_rate, text_k = max((text_rate, text_k), (rate, n))
        self._domain.text_tokens.add(max(text_rate * costs.plain.mean / rows - 1, 0.0))
        if not k:
            is_worth_it = text_rate * costs.plain.mean > _min_speedup(rows) * rows
            return RoundPlan(text_k, frozenset(texts), False) if is_worth_it else RoundPlan(0)
        drafted = expected_block_efficiency(plan.alpha, k) - 1
        better = frozenset(row for row, chances in texts.items() if sum(chances[:k]) > drafted)
        gained = (rows - len(better)) * drafted + sum(sum(texts[row][:k]) for row in better)
        if text_rate > (rows + gained) / costs.round(k, k):
            return RoundPlan(text_k, frozenset(texts), False)
        return RoundPlan(k, better)

    def stop_drafting(self) -> None:
        """Do not plan with the draft any more, because it has failed."""
        self._drafts = False

    def likeliest(self, guesses: Sequence[Guess]) -> tuple[Guess, float]:
        """Return the guess that is right most often, and how often."""
        with self._pacer.lock:
            chances = [(self._domain.guessed(guess).mean, guess) for guess in guesses]
        chance, guess = max(chances, key=lambda one: one[0])
        return guess, chance

    def took(
        self,
        time: RoundTime,
        emitted: int,
        judged: Sequence[tuple[int, int]] = (),
        guessed: Sequence[tuple[Guess, bool]] = (),
    ) -> None:
        """Take in rounds: their time and number of emitted tokens. `judged` has, for each row with drafted candidates,
        how many were accepted and examined; `guessed` whether past text was right."""
        domain = self._domain
        # Behind drafting, caches are cold: such a plain round takes longer than those of the target alone.
        is_cold, self._was_plain = not self._was_plain and self._costs.are_known and time.rounds == 1, time.is_plain
        with self._pacer.lock:
            for guess, is_right in guessed:
                domain.guessed(guess).add(is_right)
            for accepted, examined in judged:
                if examined:
                    self._own.add(accepted / examined, examined)
                else:
                    self._own.fade()  # acceptance may change while nothing is drafted
            cold = time._replace(seconds=None) if time.is_plain and is_cold and not time.rereads else time
            self._pacer.took(cold, emitted, self._costs, self._rows)

    def ended(self, accepted: int, examined: int) -> None:
        """Take in the drafted tokens of a row that has ended."""
        with self._pacer.lock:
            if examined:
                self._domain.alpha.add(accepted / examined, min(examined, MAX_REQUEST_WEIGHT))
