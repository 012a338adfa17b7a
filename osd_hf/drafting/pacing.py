"""Where candidates come from and how many there are, by the acceptance and the costs that serving itself measures."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Protocol

from osd_hf.acceptance import UNTIMED
from osd_hf.drafting.costs import MEMORY, PROMPT, Acceptance, Average, Costs, Rate, RoundTime
from osd_hf.drafting.text import Guess
from osd_hf.speedup import expected_block_efficiency

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
