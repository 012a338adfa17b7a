"""How many tokens to draft, from the acceptance and the costs that serving itself measures."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from osd_hf.metrics import expected_block_efficiency
from osd_hf.utils.disk import in_child, renewing

COSTS_KNOWN = 4  # rounds of either kind
MEMORY = 128  # observations after which an old one counts a third
RIDGE = 0.25  # variance of drafted tokens at which their slope is half the prior one
LEVEL_MEMORY = 16  # rounds in which a machine that slows down, or a context that grows, is followed
# Confidences between two edges share one estimate of acceptance.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
PRIOR_ALPHA, PRIOR_WEIGHT = 0.6, 4.0
MOST_OF_A_REQUEST = 16  # examined tokens of it that count
MAX_K = 32
WARM_UP = (4, 1, 7, 2)  # tokens drafted in turn until costs are known: slopes need several
MOST_DOMAINS = 1024  # the oldest are forgotten
REFRESH = 100  # speculating rounds between two plain ones, which time the target alone
PROBE_SHARE = 0.015  # of the time of plain decoding may be lost in finding out whether speculation has begun to pay
PROBE_BURST = 4  # plain rounds whose time must have been saved up before a request probes
SURE = 20  # examined tokens of a domain below which its alpha is not trusted, and drafting goes on to learn it
OWN_MEMORY = 32  # examined tokens of one request that its own acceptance rests on
OWN_COUNTS_HALF = 8  # examined tokens of a request after which they weigh as much as those of its domain
LEAST_SPEEDUP = 1.03  # rounds do not show that the draft reads the prompt as well, nor that the plain loop is quicker
EXPLORE = 32  # rounds between two that draft one token more than is worth it


class Pace(Protocol):
    """What decides how many tokens one request drafts, round by round."""

    reads_confidence: bool

    def is_plain(self) -> bool:
        """Whether no round of the request is to draft; asked once, as it begins."""
        return False

    def tokens(self) -> int:
        """Most tokens to draft in the round that begins; 0 is plain decoding."""

    def goes_on(self, confidence: float) -> bool:
        """Whether to draft one more, after a token that the draft gave this probability."""

    def judged(self, confidences: Sequence[float], accepted: int, emitted: int) -> None:
        """The target has verified the round's draft: the probabilities of its tokens, if they are read, how many were
        accepted, and how many tokens the round emitted."""
        return

    def timed(self, drafted: int, draft_seconds: float, round_seconds: float | None, *, rounds: int = 1) -> None:
        """Rounds have ended: the mean time of drafting in one, and of the whole; `None` where it also read a prompt or
        caught up with one, which says nothing about others."""
        return

    def ended(self) -> None:
        """The request has ended, well or not."""
        return


class FixedPace(Pace):
    """The same number of tokens, k, each round; drafting ends after a token that the draft finds less probable than
    the threshold."""

    def __init__(self, k: int, threshold: float = 0.0, pacer: Pacer | None = None) -> None:
        self.k, self.threshold = k, threshold
        self.reads_confidence = threshold > 0
        self._pacer = pacer  # is told what rounds take

    def tokens(self) -> int:
        return self.k

    def goes_on(self, confidence: float) -> bool:
        return confidence >= self.threshold

    def timed(self, drafted: int, draft_seconds: float, round_seconds: float | None, *, rounds: int = 1) -> None:
        if self._pacer is not None and round_seconds is not None:
            with self._pacer.lock:
                self._pacer.costs.add(drafted, draft_seconds, round_seconds, rounds)


# --- what is measured -----------------------------------------------------------------------------------------------


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


class Line:
    """Straight line through recent values over k; its slope is never negative."""

    def __init__(self) -> None:
        self.weight = self._k = self._kk = self._y = self._ky = 0.0

    def add(self, k: int, value: float) -> None:
        fade = 1 - 1 / MEMORY
        self.weight = self.weight * fade + 1
        self._k, self._kk = self._k * fade + k, self._kk * fade + k * k
        self._y, self._ky = self._y * fade + value, self._ky * fade + k * value

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
    """The costs of a plain round, of one that drafts k tokens, and of the drafting in it by token, each over a common
    level in seconds. The level follows the machine, and contexts that grow, by every round whatever it drafted; so
    costs that were seen at different times can be compared."""

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
    """What is known of one domain, and what was spent to know it. Requests differ more than the tokens of one do, so
    alpha is an average over requests, to which a long one adds little more than a short one."""

    def __init__(self) -> None:
        self.alpha = Average(PRIOR_ALPHA, PRIOR_WEIGHT)
        middles = [(low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)]
        self._by_confidence = [Average(middle, PRIOR_WEIGHT) for middle in middles]
        self._next_by_confidence = [Average() for _ in middles]
        self.emitted, self.drafted = Average(), Average()  # of rounds that drafted
        self.rounds = 0
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

    def begin_round(self) -> int:
        """The number of the round that begins, from 1 on."""
        self.rounds += 1
        return self.rounds

    def spend(self, *, plain_seconds: float = 0.0, probe_seconds: float = 0.0) -> None:
        """Time went by in plain rounds, or was lost by drafting where it does not pay."""
        self.plain_seconds += plain_seconds
        self.probe_seconds = max(self.probe_seconds + probe_seconds, 0.0)

    def drafts_to_learn(self, plan: DraftingPlan, to_lose_seconds: float = 0.0) -> bool:
        """Whether to draft although it does not seem to pay, and may lose so much time."""
        may_lose = PROBE_SHARE * self.plain_seconds - self.probe_seconds
        return plan.examined < SURE or may_lose >= to_lose_seconds


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


def _best_rate(costs: Costs, alpha: float) -> tuple[float, int]:
    """The most tokens in the time of the level that rounds bring which draft, and the number that they draft then."""
    base, per_token = costs.line()
    found, best = 0.0, 0
    for k in range(1, MAX_K + 1):
        rate = expected_block_efficiency(min(alpha, 1.0), k) / (base + k * per_token)
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
        in_child(self, renewing(lock=threading.Lock))
        self.costs = Costs()
        self._domains: dict[Any, Acceptance] = {}

    def pace(self, domain: Any = None) -> AutoPace:
        """For one request of this domain."""
        with self.lock:
            if domain not in self._domains and len(self._domains) >= MOST_DOMAINS:
                del self._domains[next(iter(self._domains))]
            return AutoPace(self, self._domains.setdefault(domain, Acceptance()))

    def plan(self, domain: Any = None) -> DraftingPlan:
        """What a request of this domain would be served by now."""
        with self.lock:
            return self.plan_for(self._domains.get(domain) or Acceptance())

    def round_seconds(self, k: int) -> float | None:
        """What a round that drafts k tokens takes; `None` until one was measured."""
        with self.lock:
            return self.costs.level * self.costs.round(k) if self.costs.drafting.weight else None

    def token_seconds(self, alpha: float) -> float | None:
        """What a token takes at this acceptance with the best number of drafted tokens, which may be none; `None`
        until that was measured."""
        with self.lock:
            costs = self.costs
            if not costs.are_known:
                return None
            return costs.level / max(1 / costs.plain.mean, _best_rate(costs, alpha)[0])

    def draft_changed(self, domain: Any = ...) -> None:
        """A new version serves all domains, or one (sampled requests of a domain are one apart, see
        [`~LeanDrafting.pace`]): what was known of the old one's acceptance counts half."""
        with self.lock:
            for key, known in self._domains.items():
                if domain is ... or key[0] == domain:
                    known.fade(0.5)

    def plan_for(self, domain: Acceptance, own: Average | None = None) -> DraftingPlan:
        """For a domain, or for a request of it that has an acceptance of its own."""
        costs = self.costs
        alpha, examined = domain.alpha.mean, domain.alpha.weight
        if own is not None:
            alpha = (alpha * OWN_COUNTS_HALF + own.mean * own.weight) / (OWN_COUNTS_HALF + own.weight)
            examined += own.weight
        if not costs.are_known:
            return DraftingPlan(True, WARM_UP[0], alpha, 1.0, None, None, None, None, examined)
        draft, plain = costs.draft.mean, costs.plain.mean
        base, per_token = costs.line()
        best, k = _best_rate(costs, alpha)
        if domain.drafted.weight > MEMORY / 4:
            # What rounds that ended by confidence reached: more than k tokens each time could.
            reached = domain.emitted.mean / (base + domain.drafted.mean * per_token)
            best *= max(reached / _best_rate(costs, domain.alpha.mean)[0], 1.0)
        speculates = best * plain > LEAST_SPEEDUP
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


class AutoPace(Pace):
    """One request's [`Pace`] under a [`Pacer`]."""

    reads_confidence = True

    def __init__(self, pacer: Pacer, domain: Acceptance) -> None:
        self._pacer, self._domain = pacer, domain
        self._own = Average(memory=OWN_MEMORY)
        self._plan = pacer.plan_for(domain)
        self._explores, self._chance = False, 1.0
        self._emitted = self._accepted = self._examined = 0

    def is_plain(self) -> bool:
        with self._pacer.lock:
            plan = self._plan
            # The target's own loop is a little faster than the assisted one: few requests probe, and each for long.
            to_lose = PROBE_BURST * (plan.plain_seconds or 0.0)
            return not plan.speculates and not self._domain.drafts_to_learn(plan, to_lose)

    def tokens(self) -> int:
        pacer, domain = self._pacer, self._domain
        with pacer.lock:
            self._chance = 1.0
            self._plan = pacer.plan_for(domain, self._own)
            if self._plan.plain_seconds is None:
                timed = pacer.costs.drafting.weight
                return 0 if timed > pacer.costs.plain.weight else WARM_UP[round(timed) % len(WARM_UP)]
            number = domain.begin_round()
            self._explores = number % EXPLORE == 0
            if self._plan.speculates:
                return MAX_K if number % REFRESH else 0
            return MAX_K if domain.drafts_to_learn(self._plan) else 0

    def goes_on(self, confidence: float) -> bool:
        plan = self._plan
        if plan.per_token_seconds is None or plan.plain_seconds is None:
            return True
        accepted, next_accepted = self._domain.chances(confidence, plan.alpha)
        self._chance *= accepted
        if self._chance * next_accepted > plan.speedup * plan.per_token_seconds / plan.plain_seconds:
            return True
        # What is never drafted is never judged: now and then it is.
        explores, self._explores = self._explores, False
        return explores

    def judged(self, confidences: Sequence[float], accepted: int, emitted: int) -> None:
        self._emitted = emitted
        with self._pacer.lock:
            examined = self._domain.judged(confidences, accepted, emitted)
            if examined:
                self._own.add(min(accepted, examined) / examined, examined)
                self._accepted += min(accepted, examined)
                self._examined += examined
            else:
                # What the text was like is forgotten while nothing is drafted: it may have changed.
                self._own.fade()

    def timed(self, drafted: int, draft_seconds: float, round_seconds: float | None, *, rounds: int = 1) -> None:
        domain, costs = self._domain, self._pacer.costs
        with self._pacer.lock:
            if round_seconds is not None:
                costs.add(drafted, draft_seconds, round_seconds, rounds)
            if drafted == 0:
                domain.spend(plain_seconds=(round_seconds or 0.0) * rounds)
            elif not self._plan.speculates:
                # Only the drafting is known to be on top in a round that also read the prompt.
                plain = costs.level * costs.plain.mean
                lost = draft_seconds if round_seconds is None else round_seconds - self._emitted * plain
                domain.spend(probe_seconds=lost)

    def ended(self) -> None:
        with self._pacer.lock:
            self._domain.ended(self._accepted, self._examined)
