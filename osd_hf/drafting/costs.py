"""What rounds take, and how often candidates are accepted: measured while they are served."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from osd_hf.drafting.text import Guess

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
