"""How many tokens to draft: fixed, or from the acceptance and the costs that serving itself measures."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from osd_hf.cost import expected_block_efficiency
from osd_hf.estimates import MEMORY, Acceptance, Costs

__all__ = ["AutoPace", "DraftingPlan", "FixedPace", "Pace", "Pacer"]

MAX_K = 32
# Until costs are known, rounds draft these numbers of tokens in turn, so that both slopes can be read off.
WARM_UP = (4, 0, 1, 7, 0, 2)
REPLAN = 16  # rounds between two looks at the costs
REFRESH = 100  # speculating rounds between two plain ones, which time the target alone
PROBE_SHARE = 0.015  # of the time of plain decoding may be lost in finding out whether speculation has begun to pay
PROBE_BURST = 4  # plain rounds whose time must have been saved up before a request probes
SURE = 20  # examined tokens of a domain below which its alpha is not trusted, and drafting goes on to learn it
EXPLORE = 32  # rounds between two that draft one token more than is worth it


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
        self._costs = Costs()
        self._domains: dict[Any, _Domain] = {}
        self._warmed_up = 0

    def pace(self, domain: Any = None) -> AutoPace:
        """For one request of this domain."""
        with self._lock:
            return AutoPace(self, self._domains.setdefault(domain, _Domain()))

    def plan(self, domain: Any = None) -> DraftingPlan:
        """What a request of this domain would be served by now."""
        with self._lock:
            return self._plan(self._domains.get(domain) or _Domain())

    def draft_changed(self) -> None:
        """A new version serves: what was known of the old one's acceptance counts half."""
        with self._lock:
            for domain in self._domains.values():
                domain.seen.fade(0.5)

    def _plan(self, domain: _Domain) -> DraftingPlan:
        seen, costs = domain.seen, self._costs
        alpha = seen.alpha.mean
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

    def _is_plain(self, domain: _Domain) -> bool:
        with self._lock:
            if not self._costs.are_known:
                return False
            domain.plan = self._plan(domain)
            # The target's own loop is a little faster than the assisted one: few requests probe, and each for long.
            burst = PROBE_BURST * self._costs.level * self._costs.plain.mean
            return not domain.plan.speculates and not domain.drafts_to_learn(burst)

    def _begin(self, domain: _Domain) -> tuple[int, bool]:
        """Most tokens of the next round, and whether it drafts as many whatever their confidence."""
        with self._lock:
            if not self._costs.are_known:
                self._warmed_up += 1
                return WARM_UP[(self._warmed_up - 1) % len(WARM_UP)], True
            if domain.plan is None or domain.rounds % REPLAN == 0:
                domain.plan = self._plan(domain)
            domain.rounds += 1
            drafts = domain.rounds % REFRESH != 0 if domain.plan.speculates else domain.drafts_to_learn()
            return (MAX_K if drafts else 0), False

    def _judged(self, domain: _Domain, confidences: Sequence[float], accepted: int, emitted: int) -> None:
        with self._lock:
            domain.seen.judged(confidences, accepted, emitted)

    def _timed(
        self, domain: _Domain, drafted: int, draft_seconds: float, round_seconds: float | None, rounds: int
    ) -> None:
        with self._lock:
            costs = self._costs
            if round_seconds is not None:
                costs.add(drafted, draft_seconds, round_seconds, rounds)
            if drafted == 0:
                domain.plain_seconds += (round_seconds or 0.0) * rounds
            elif domain.plan is not None and not domain.plan.speculates:
                # Of a round that also read the prompt, only the drafting is known to be on top.
                plain = costs.level * costs.plain.mean
                lost = draft_seconds if round_seconds is None else round_seconds - domain.seen.last_emitted * plain
                domain.probe_seconds = max(domain.probe_seconds + lost, 0.0)


class _Domain:
    """What is known and planned of one domain."""

    def __init__(self) -> None:
        self.seen = Acceptance()
        self.plan: DraftingPlan | None = None
        self.rounds = 0
        self.plain_seconds = 0.0
        self.probe_seconds = 0.0  # lost by drafting where it does not pay

    def drafts_to_learn(self, to_lose_seconds: float = 0.0) -> bool:
        """Whether to draft although it does not seem to pay, and may lose so much time."""
        may_lose = PROBE_SHARE * self.plain_seconds - self.probe_seconds
        return self.seen.alpha.weight < SURE or may_lose >= to_lose_seconds


class AutoPace:
    """One request's pace under a [`Pacer`]."""

    reads_confidence = True

    def __init__(self, pacer: Pacer, domain: _Domain) -> None:
        self._pacer = pacer
        self._domain = domain
        self._whatever = self._explores = False
        self._chance = 1.0

    def is_plain(self) -> bool:
        return self._pacer._is_plain(self._domain)

    def tokens(self) -> int:
        self._chance = 1.0
        tokens, self._whatever = self._pacer._begin(self._domain)
        self._explores = self._domain.rounds % EXPLORE == 0
        return tokens

    def goes_on(self, confidence: float) -> bool:
        plan = self._domain.plan
        if self._whatever or plan is None or plan.per_token_seconds is None or plan.plain_seconds is None:
            return True
        accepted, next_accepted = self._domain.seen.chances(confidence)
        self._chance *= accepted
        if self._chance * next_accepted > plan.speedup * plan.per_token_seconds / plan.plain_seconds:
            return True
        # What is never drafted is never judged: now and then it is.
        explores, self._explores = self._explores, False
        return explores

    def judged(self, confidences: Sequence[float], accepted: int, emitted: int) -> None:
        self._pacer._judged(self._domain, confidences, accepted, emitted)

    def timed(self, drafted: int, draft_seconds: float, round_seconds: float | None, *, rounds: int = 1) -> None:
        self._pacer._timed(self._domain, drafted, draft_seconds, round_seconds, rounds)
