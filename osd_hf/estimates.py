"""Running estimates of what serving measures: costs of rounds, and acceptance."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["MEMORY", "Acceptance", "Costs"]

COSTS_KNOWN = 4  # rounds of either kind
MEMORY = 128  # observations after which an old one counts a third
RIDGE = 0.25  # variance of drafted tokens at which their slope is half the prior one
LEVEL_MEMORY = 16  # rounds in which a machine that slows down, or a context that grows, is followed
# Confidences between two edges share one estimate of acceptance.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
PRIOR_ALPHA, PRIOR_WEIGHT = 0.6, 4.0
MOST_OF_A_REQUEST = 16  # examined tokens of it that count


class Average:
    """Mean of recent values: the older one is, the less it counts; `memory` values later, a third."""

    def __init__(self, mean: float = 0.0, weight: float = 0.0, memory: int = MEMORY) -> None:
        self.mean = mean
        self.weight = weight
        self.memory = memory

    def add(self, value: float, count: int = 1) -> None:
        fresh = min(count, self.memory)
        self.fade(fresh)
        self.weight += fresh
        self.mean += (value - self.mean) * fresh / self.weight

    def fade(self, count: int = 1) -> None:
        """So many values went by unseen."""
        self.weight *= (1 - 1 / self.memory) ** count


class Line:
    """Straight line through recent values over k; its slope is never negative."""

    def __init__(self) -> None:
        self.weight = self._k = self._kk = self._y = self._ky = 0.0

    def add(self, k: int, value: float) -> None:
        fade = 1 - 1 / MEMORY
        self.weight = self.weight * fade + 1
        self._k = self._k * fade + k
        self._kk = self._kk * fade + k * k
        self._y = self._y * fade + value
        self._ky = self._ky * fade + k * value

    def fit(self, prior_slope: float) -> tuple[float, float]:
        """What it is at k = 0, and its slope: where all rounds drafted nearly as many tokens, noise has the slope,
        and the prior one stands in."""
        mean_k, mean_y = self._k / self.weight, self._y / self.weight
        variance = self._kk / self.weight - mean_k**2
        covariance = self._ky / self.weight - mean_k * mean_y
        slope = (covariance + RIDGE * prior_slope) / (variance + RIDGE)
        slope = min(max(slope, 0.0), mean_y / (mean_k + 1))
        return mean_y - slope * mean_k, slope


class Costs:
    """
    Of a plain round, of one that drafts k tokens, and of the drafting in it by token, each over a common level in
    seconds. The level follows the machine, and contexts that grow, by every round whatever it drafted; so costs that
    were seen at different times can be compared.
    """

    def __init__(self) -> None:
        self.level = 1.0
        self.draft, self.plain, self.drafting = Average(), Average(), Line()

    @property
    def are_known(self) -> bool:
        return min(self.plain.weight, self.drafting.weight) >= COSTS_KNOWN

    def line(self) -> tuple[float, float]:
        """A round that drafts, over the level: what it takes with no token, and what each token adds. That is less
        than a token's share of the drafting: the first one finds the draft's weights gone from the caches."""
        return self.drafting.fit(self.draft.mean)

    def round(self, drafted: float) -> float:
        """A whole round, over the level."""
        if not drafted:
            return self.plain.mean
        base, slope = self.line()
        return base + slope * drafted

    def add(self, drafted: int, draft_seconds: float, round_seconds: float, rounds: int) -> None:
        """Rounds that took so long on average."""
        unit = self.level
        if self.are_known:
            # A round far above expectation is a machine that was busy elsewhere, and counts as less.
            expected = self.level * self.round(drafted)
            excess = max(round_seconds / (3 * expected), 1.0)
            # Costs are taken over the level of before, and averaged as it is: otherwise noise drives both apart.
            unit *= excess
            self.level *= 1 + min(rounds / LEVEL_MEMORY, 1.0) * (round_seconds / excess / expected - 1)
        if drafted:
            self.draft.add(draft_seconds / drafted / unit)
            self.drafting.add(drafted, round_seconds / unit)
        else:
            self.plain.add(round_seconds / unit, rounds)


class Acceptance:
    """
    What is known of one domain. Requests differ more than the tokens of one do, so alpha is an average over requests,
    to which a long one adds little more than a short one.
    """

    def __init__(self) -> None:
        self.alpha = Average(PRIOR_ALPHA, PRIOR_WEIGHT)
        middles = [(low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)]
        self._by_confidence = [Average(middle, PRIOR_WEIGHT) for middle in middles]
        self._next_by_confidence = [Average() for _ in middles]
        self.emitted, self.drafted = Average(), Average()  # of rounds that drafted

    def chances(self, confidence: float, alpha: float) -> tuple[float, float]:
        """Probability that a token of this confidence is accepted in a request with this `alpha`, and the probability
        that the next one is once it was."""
        i = bisect_left(EDGES, confidence)
        behind = self._next_by_confidence[i]
        # Little was seen behind some tokens: as far, the next one is taken for any.
        usual = (behind.mean * behind.weight + self.alpha.mean * PRIOR_WEIGHT) / (behind.weight + PRIOR_WEIGHT)
        return self._by_confidence[i].mean, min(usual * alpha / max(self.alpha.mean, 1e-6), 1.0)

    def ended(self, accepted: int, examined: int) -> None:
        """A request has ended, of whose drafted tokens so many were accepted and examined."""
        if examined:
            self.alpha.add(accepted / examined, min(examined, MOST_OF_A_REQUEST))

    def judged(self, confidences: Sequence[float], accepted: int, emitted: int) -> int:
        """Take in a round: the probabilities of its drafted tokens, how many of them were accepted, and how many
        tokens it emitted. Returns the number of drafted tokens that were examined."""
        if not confidences:
            return 0
        examined = min(accepted + 1, len(confidences), emitted)
        for i in range(examined):
            hit = float(i < accepted)
            self._by_confidence[bisect_left(EDGES, confidences[i])].add(hit)
            if i > 0:
                self._next_by_confidence[bisect_left(EDGES, confidences[i - 1])].add(hit)
        self.emitted.add(emitted)
        self.drafted.add(len(confidences))
        return examined

    def fade(self, share: float) -> None:
        """Let what was seen so far count this share of what it counts, but no less than a prior does."""
        known = (*self._by_confidence, *self._next_by_confidence)
        for average in (self.alpha, self.emitted, self.drafted, *known):
            average.weight = min(average.weight, max(average.weight * share, PRIOR_WEIGHT))
