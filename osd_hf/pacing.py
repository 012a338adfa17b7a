"""How many tokens to draft: fixed, or from the acceptance and the costs that serving itself measures."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from osd_hf.cost import expected_block_efficiency

__all__ = ["AutoPace", "DraftingPlan", "FixedPace", "Pace", "Pacer"]

MAX_K = 32
# Until costs are known, rounds draft these numbers of tokens in turn, so that both slopes can be read off.
WARM_UP = (4, 0, 1, 7, 0, 2)
COSTS_KNOWN = 4  # rounds of either kind
MEMORY = 128  # observations after which an old one counts a third
REPLAN = 16  # rounds between two looks at the costs
REFRESH = 100  # speculating rounds between two plain ones, which time the target alone
PROBE_SHARE = 0.015  # of the time of plain decoding may be lost in finding out whether speculation has begun to pay
SURE = 20  # examined tokens of a domain below which its alpha is not trusted, and drafting goes on to learn it
EXPLORE = 32  # rounds between two that draft one token more than is worth it
LEVEL_MEMORY = 16  # rounds in which a machine that slows down, or a context that grows, is followed
# Confidences between two edges share one estimate of acceptance.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
PRIOR_ALPHA, PRIOR_WEIGHT = 0.6, 4.0


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
        alpha (`float`):
            Running acceptance rate of the domain; recent tokens count most.
        speedup (`float`):
            Expected, over plain decoding in the same loop.
        draft_seconds (`float`, *optional*):
            To draft one token; `None` until it was measured, as the other costs.
        plain_seconds (`float`, *optional*):
            A round without a draft: one token.
        verify_seconds (`float`, *optional*):
            A round with k drafted tokens, less the drafting.
        per_token_seconds (`float`, *optional*):
            What one more drafted token adds to a round: drafting and verifying it.
        examined (`float`):
            Tokens that alpha rests on, old ones counted in part.
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

    def to_dict(self) -> dict[str, Any]:
        """Field by field, ready for JSON."""
        return asdict(self)


class Pace(Protocol):
    """What decides how many tokens one request drafts, round by round."""

    reads_confidence: bool

    def tokens(self) -> int:
        """Most tokens to draft in the round that begins; 0 is plain decoding."""

    def goes_on(self, confidence: float) -> bool:
        """Whether to draft one more, behind a token that the draft gave this probability."""

    def judged(self, confidences: Sequence[float], accepted: int, emitted: int) -> None:
        """The target has verified the round's draft: the probabilities of its tokens, if they are read, how many were
        accepted, and how many tokens the round emitted."""

    def timed(self, drafted: int, draft_seconds: float, round_seconds: float | None, *, rounds: int = 1) -> None:
        """Rounds have ended: the mean time of drafting in one, and of the whole; `None` where it also read a prompt or
        caught up with one, which says nothing about others."""

    def is_plain(self) -> bool:
        """Asked once, as the request begins: whether no round of it is to draft."""


class FixedPace:
    """
    The same number of tokens each round.

    Args:
        k (`int`):
            Tokens a round.
        threshold (`float`, defaults to 0):
            Drafting ends behind a token that the draft gives less probability than this.
    """

    def __init__(self, k: int, threshold: float = 0.0) -> None:
        self.k = k
        self.threshold = threshold
        self.reads_confidence = threshold > 0

    def tokens(self) -> int:
        return self.k

    def goes_on(self, confidence: float) -> bool:
        return confidence >= self.threshold

    def judged(self, confidences: Sequence[float], accepted: int, emitted: int) -> None:
        pass

    def timed(self, drafted: int, draft_seconds: float, round_seconds: float | None, *, rounds: int = 1) -> None:
        pass

    def is_plain(self) -> bool:
        return False


class Pacer:
    """
    Measures acceptance, by domain, and costs, over all requests, and decides from them.

    A round that drafts k tokens takes `R(k) = verify(k) + k draft`, a plain one `R(0)`. At acceptance alpha it emits
    `E(alpha, k)` tokens (arXiv 2211.17192), so tokens come at the rate `E(alpha, k) / R(k)`; the plan is the k with
    the best rate. Within a round more is known: how sure the draft is of its tokens, how often tokens that it was as
    sure of were accepted, and how often the ones behind such tokens were. One more token is worth drafting while the
    chance that it and all before it are accepted is above `rate * (R(k + 1) - R(k))`, the tokens that the same time
    brings elsewhere.

    Seconds are wall time; it may be used from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._costs = _Costs()
        self._domains: dict[Any, _Acceptance] = {}
        self._warmed_up = 0

    def pace(self, domain: Any = None) -> AutoPace:
        """For one request of this domain."""
        with self._lock:
            if domain not in self._domains:
                self._domains[domain] = _Acceptance()
            return AutoPace(self, self._domains[domain])

    def plan(self, domain: Any = None) -> DraftingPlan:
        """What a request of this domain would be served by now."""
        with self._lock:
            return self._plan(self._domains.get(domain) or _Acceptance())

    def draft_changed(self) -> None:
        """A new version serves: what was known of the old one's acceptance counts half."""
        with self._lock:
            for acceptance in self._domains.values():
                acceptance.fade(0.5)

    def _plan(self, seen: _Acceptance) -> DraftingPlan:
        alpha, costs = seen.alpha.mean, self._costs
        if not costs.are_known:
            return DraftingPlan(True, WARM_UP[0], alpha, 1.0, None, None, None, None, seen.alpha.weight)
        rates = [expected_block_efficiency(alpha, k) / costs.round(k) for k in range(MAX_K + 1)]
        best = max(rates)
        if seen.drafted.weight > MEMORY / 4:
            # What the rounds that ended by confidence reached: more than k tokens each time could.
            best = max(best, seen.emitted.mean / costs.round(seen.drafted.mean))
        speculates = best > rates[0]
        k = max(rates.index(max(rates)), 1) if speculates else 0
        return DraftingPlan(
            speculates=speculates,
            k=k,
            alpha=alpha,
            speedup=best / rates[0],
            draft_seconds=costs.level * costs.draft.mean,
            plain_seconds=costs.level * costs.plain.mean,
            verify_seconds=costs.level * costs.verify.at(max(k, 1)),
            per_token_seconds=costs.level * (costs.draft.mean + costs.verify.slope),
            examined=seen.alpha.weight,
        )

    def is_plain(self, seen: _Acceptance) -> bool:
        with self._lock:
            if not self._costs.are_known:
                return False
            seen.plan = self._plan(seen)
            return not seen.plan.speculates and not seen.drafts_to_learn

    def begin(self, seen: _Acceptance) -> tuple[int, bool]:
        """Most tokens of a domain's next round, and whether it drafts as many whatever their confidence."""
        with self._lock:
            if not self._costs.are_known:
                self._warmed_up += 1
                return WARM_UP[(self._warmed_up - 1) % len(WARM_UP)], True
            if seen.plan is None or seen.rounds % REPLAN == 0:
                seen.plan = self._plan(seen)
            seen.rounds += 1
            drafts = seen.rounds % REFRESH != 0 if seen.plan.speculates else seen.drafts_to_learn
            return (MAX_K if drafts else 0), False

    def judged(self, seen: _Acceptance, confidences: Sequence[float], accepted: int, emitted: int) -> None:
        with self._lock:
            seen.judged(confidences, accepted, emitted)

    def timed(
        self, seen: _Acceptance, drafted: int, draft_seconds: float, round_seconds: float | None, rounds: int
    ) -> None:
        with self._lock:
            costs = self._costs
            if round_seconds is not None:
                costs.add(drafted, draft_seconds, round_seconds, rounds)
            if drafted == 0:
                seen.plain_seconds += (round_seconds or 0.0) * rounds
            elif seen.plan is not None and not seen.plan.speculates:
                # Of a round that also read the prompt, only the drafting is known to be on top.
                plain = costs.level * costs.plain.mean
                lost = draft_seconds if round_seconds is None else round_seconds - seen.last_emitted * plain
                seen.probe_seconds = max(seen.probe_seconds + lost, 0.0)


class AutoPace:
    """One request's pace under a [`Pacer`]."""

    reads_confidence = True

    def __init__(self, pacer: Pacer, seen: _Acceptance) -> None:
        self._pacer = pacer
        self._seen = seen
        self._whatever = self._explores = False
        self._chance = 1.0

    def is_plain(self) -> bool:
        return self._pacer.is_plain(self._seen)

    def tokens(self) -> int:
        self._chance = 1.0
        tokens, self._whatever = self._pacer.begin(self._seen)
        self._explores = self._seen.rounds % EXPLORE == 0
        return tokens

    def goes_on(self, confidence: float) -> bool:
        plan = self._seen.plan
        if self._whatever or plan is None or plan.per_token_seconds is None or plan.plain_seconds is None:
            return True
        accepted, next_accepted = self._seen.chances(confidence)
        self._chance *= accepted
        if self._chance * next_accepted > plan.speedup * plan.per_token_seconds / plan.plain_seconds:
            return True
        # What is never drafted is never judged: now and then it is.
        explores, self._explores = self._explores, False
        return explores

    def judged(self, confidences: Sequence[float], accepted: int, emitted: int) -> None:
        self._pacer.judged(self._seen, confidences, accepted, emitted)

    def timed(self, drafted: int, draft_seconds: float, round_seconds: float | None, *, rounds: int = 1) -> None:
        self._pacer.timed(self._seen, drafted, draft_seconds, round_seconds, rounds)


class _Average:
    """Of recent values."""

    def __init__(self, mean: float = 0.0, weight: float = 0.0) -> None:
        self.mean = mean
        self.weight = weight

    def add(self, value: float, count: int = 1) -> None:
        fresh = min(count, MEMORY)
        self.weight = self.weight * (1 - 1 / MEMORY) ** fresh + fresh
        self.mean += (value - self.mean) * fresh / self.weight


class _Line:
    """Of recent values over k; it does not fall."""

    def __init__(self) -> None:
        self.weight = self._k = self._kk = self._y = self._ky = 0.0

    def add(self, k: int, value: float) -> None:
        fade = 1 - 1 / MEMORY
        self.weight = self.weight * fade + 1
        self._k = self._k * fade + k
        self._kk = self._kk * fade + k * k
        self._y = self._y * fade + value
        self._ky = self._ky * fade + k * value

    @property
    def slope(self) -> float:
        mean_k, mean_y = self._k / self.weight, self._y / self.weight
        variance = self._kk / self.weight - mean_k**2
        covariance = self._ky / self.weight - mean_k * mean_y
        # Where all rounds drafted nearly as many tokens, noise has the slope; it fades to none.
        return min(max(covariance / (variance + 0.25), 0.0), mean_y / (mean_k + 1))

    def at(self, k: float) -> float:
        return self._y / self.weight + self.slope * (k - self._k / self.weight)


class _Costs:
    """
    Of drafting a token, of a plain round, and of verifying k tokens, each over a common level in seconds. The level
    follows the machine, and contexts that grow, by every round whatever it drafted; so costs that were seen at
    different times can be compared.
    """

    def __init__(self) -> None:
        self.level = 1.0
        self.draft, self.plain, self.verify = _Average(), _Average(), _Line()

    @property
    def are_known(self) -> bool:
        return min(self.plain.weight, self.verify.weight) >= COSTS_KNOWN

    def round(self, drafted: float) -> float:
        """A whole round, over the level."""
        return self.verify.at(drafted) + drafted * self.draft.mean if drafted else self.plain.mean

    def add(self, drafted: int, draft_seconds: float, round_seconds: float, rounds: int) -> None:
        """Rounds that took so long on average."""
        excess = 1.0
        if self.are_known:
            # A round far above expectation is a machine that was busy elsewhere, and counts as less.
            expected = self.level * self.round(drafted)
            excess = max(round_seconds / (3 * expected), 1.0)
            self.level *= (round_seconds / excess / expected) ** min(rounds / LEVEL_MEMORY, 1.0)
        unit = self.level * excess
        if drafted:
            self.draft.add(draft_seconds / drafted / unit)
            self.verify.add(drafted, (round_seconds - draft_seconds) / unit)
        else:
            self.plain.add(round_seconds / unit, rounds)


class _Acceptance:
    """What is known of one domain."""

    def __init__(self) -> None:
        self.alpha = _Average(PRIOR_ALPHA, PRIOR_WEIGHT)
        middles = [(low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)]
        self._by_confidence = [_Average(middle, PRIOR_WEIGHT) for middle in middles]
        self._next_by_confidence = [_Average() for _ in middles]
        self.emitted, self.drafted = _Average(), _Average()  # of rounds that drafted
        self.last_emitted = 0
        self.plan: DraftingPlan | None = None
        self.rounds = 0
        self.plain_seconds = 0.0
        self.probe_seconds = 0.0

    @property
    def drafts_to_learn(self) -> bool:
        """Whether to draft although it does not seem to pay."""
        return self.alpha.weight < SURE or self.probe_seconds <= PROBE_SHARE * self.plain_seconds

    def chances(self, confidence: float) -> tuple[float, float]:
        """Of a token of this confidence to be accepted, and of the one behind it once it is."""
        i = bisect_left(EDGES, confidence)
        behind = self._next_by_confidence[i]
        # Little was seen behind some tokens: as far, the next one is taken for any.
        total = behind.weight + PRIOR_WEIGHT
        return self._by_confidence[i].mean, (behind.mean * behind.weight + self.alpha.mean * PRIOR_WEIGHT) / total

    def judged(self, confidences: Sequence[float], accepted: int, emitted: int) -> None:
        if not confidences:
            return
        for i in range(min(accepted + 1, len(confidences), emitted)):
            hit = float(i < accepted)
            self.alpha.add(hit)
            self._by_confidence[bisect_left(EDGES, confidences[i])].add(hit)
            if i > 0:
                self._next_by_confidence[bisect_left(EDGES, confidences[i - 1])].add(hit)
        self.last_emitted = emitted
        self.emitted.add(emitted)
        self.drafted.add(len(confidences))

    def fade(self, share: float) -> None:
        known = (*self._by_confidence, *self._next_by_confidence)
        for average in (self.alpha, self.emitted, self.drafted, *known):
            average.weight *= share
