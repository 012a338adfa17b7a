"""Decide which draft serves and how much learning is worth: the gate, the choice of the draft, and the effort."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from osd_hf.acceptance import AcceptanceStats, paired_gain, student_quantile
from osd_hf.trace import Trace

MIN_HELD_BACK = 4  # held-back requests below which no version is promoted
MAX_DROPPED_IN_A_ROW = 8  # then learning restarts; the first steps on few requests often make a draft worse
DROP_ERRORS = 3.0  # standard errors of a fall in acceptance that drops a version
MIN_SERVED = 8  # served requests below which no version is rolled back
ROLL_BACK_ERRORS = 4.5  # the test is repeated often, so chance must be excluded

CHOICE_MEMORY = 64  # requests
CHOICE_HALF_LIFE = 1.5  # requests; a change of traffic has to show at once

MIN_EFFORT = 1 / 16  # share of the updates that are done once learning no longer pays
GAIN_WINDOW = 128  # newest requests, compared with as many before them
DECISION_INTERVAL = 64  # requests between two changes of the effort
RECENT_REQUESTS = 12  # a change of traffic shows in these
GAIN_FALL_ERRORS = 3.0  # standard errors of a fall of the gain
WORSE_ERRORS = 4.0  # standard errors of a learned draft that is worse than the original one
SAVING_ERRORS = 2.0  # standard errors of saved seconds
MIN_SAVING = 0.25  # of the cost of learning; below it, even the optimistic estimate is hopeless
FIRST_REQUESTS = 8  # compared requests from which on learning may be hopeless
UNLEARNED_REQUESTS = 24  # after which learning may be hopeless although no version has served
PROMISED_GAINS = 3.0  # times the gain so far that learning is expected to reach early on
MAX_IDLE_LEARNING = 0.02  # of the time of answers, for learning that does not promise to pay


# --- the gate -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GateDecision:
    """
    Record the decision about one version of a draft.

    Args:
        outcome (`str`):
            `"promoted"`: the version serves. `"kept back"`: not shown to be as good. `"dropped"`: shown to be worse,
            or not finite. `"rolled back"`: it had served, and an earlier version serves again.
        version (`int`): The version that was judged.
        serving (`int`): The version that serves from now on; 0 is the original draft.
        domain (`str`, *optional*): Domain of the draft; `None` if all share one.
        reason (`str`): The reason in words.
        requests (`int`): Held-back (for a rollback: served) requests that were compared.
        alpha_before (`float`, *optional*), alpha_after (`float`, *optional*):
            Acceptance on them of the version that served (for a rollback: the earlier one), and of `version`.
        standard_error (`float`, *optional*): Standard error of the difference, paired by request.
    """

    outcome: Literal["promoted", "kept back", "dropped", "rolled back"]
    version: int
    serving: int
    domain: str | None
    reason: str
    requests: int = 0
    alpha_before: float | None = None
    alpha_after: float | None = None
    standard_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return asdict(self)


def judge(
    version: int,
    serving: int,
    domain: str | None,
    held_back: Sequence[Trace],
    before: Sequence[AcceptanceStats],
    after: Sequence[AcceptanceStats],
) -> GateDecision:
    """Decide whether a version may replace the serving one, from the replay of both (`after`, `before`) on the
    held-back requests. The gain in acceptance over all requests must be at least half its standard error. For each
    label with enough requests, acceptance must not fall by more than two standard errors."""
    requests = len(held_back)
    if requests < MIN_HELD_BACK:
        reason = f"{requests} held-back requests are too few to judge by; {MIN_HELD_BACK} are needed"
        return GateDecision("kept back", version, serving, domain, reason, requests)
    gain, error = paired_gain(before, after)
    figures = _figures(before, after, error)

    def decide(outcome: Literal["promoted", "kept back", "dropped"], reason: str) -> GateDecision:
        now = version if outcome == "promoted" else serving
        return GateDecision(outcome, version, now, domain, reason, requests, *figures)

    if math.isnan(gain):
        return decide("kept back", "nothing was drafted for the held-back requests")
    if gain + DROP_ERRORS * error < 0:
        return decide("dropped", f"acceptance falls by {-gain:.3f}, more than {DROP_ERRORS:g} standard errors")
    if gain < 0.5 * error:
        return decide("kept back", f"a gain of {gain:+.3f} with a standard error of {error:.3f} is not enough")
    for label in dict.fromkeys(trace.domain for trace in held_back):
        places = [i for i, trace in enumerate(held_back) if trace.domain == label]
        label_gain, label_error = paired_gain([before[i] for i in places], [after[i] for i in places])
        if len(places) >= MIN_HELD_BACK and label_gain + 2 * label_error < 0:
            return decide("kept back", f"acceptance falls by {-label_gain:.3f} for {label!r}")
    return decide("promoted", f"acceptance changes by {gain:+.3f}, standard error {error:.3f}")


def regressed(
    version: int,
    previous: int,
    domain: str | None,
    before: Sequence[AcceptanceStats],
    after: Sequence[AcceptanceStats],
) -> GateDecision | None:
    """Decide whether the serving version is rolled back to `previous` (0: the original draft); `None` if it stays.
    `before` is the replay of the previous version on the requests served since the promotion, `after` what the serving
    version reached on the same requests, so that harder traffic does not look like a fall."""
    if len(after) < MIN_SERVED:
        return None
    gain, error = paired_gain(before, after)
    limit = student_quantile(ROLL_BACK_ERRORS, len(after))
    if math.isnan(gain) or gain + limit * error >= 0:
        return None
    reason = (
        f"served acceptance is {-gain:.3f} below that of version {previous}, more than {limit:.1f} standard errors"
    )
    return GateDecision("rolled back", version, previous, domain, reason, len(after), *_figures(before, after, error))


def _figures(
    before: Sequence[AcceptanceStats], after: Sequence[AcceptanceStats], error: float
) -> tuple[float | None, float | None, float | None]:
    """Return both alphas and the error; `None` for values that are not finite."""
    alphas = (sum(stats, AcceptanceStats()).alpha for stats in (before, after))
    first, second, third = (float(x) if math.isfinite(x) else None for x in (*alphas, error))
    return first, second, third


# --- the draft of the next request ----------------------------------------------------------------------------------


class DraftChoice:
    """Choose between the learned and the original draft for the next request, by their acceptance on the newest
    requests. New traffic may differ from what was learned; then the original draft is better until enough of it has
    been learned. The caller holds the lock."""

    def __init__(self) -> None:
        # Of the original and the learned draft, by request, oldest first.
        self.scores: deque[tuple[AcceptanceStats, AcceptanceStats]] = deque(maxlen=CHOICE_MEMORY)
        self.is_original = False  # whether the original draft serves the next request

    def add(self, original: AcceptanceStats, learned: AcceptanceStats) -> None:
        """Add the scores of both drafts on a request."""
        self.scores.append((original, learned))
        self._choose()

    def alphas(self) -> tuple[float, float] | None:
        """Return the recent acceptance of the original and the learned draft; the weight of a request halves every
        `CHOICE_HALF_LIFE` requests. `None` if no token was examined."""
        pairs = [[(stats.accepted, stats.examined) for stats in pair] for pair in self.scores]
        counts = np.array(pairs).reshape(-1, 2, 2)
        weights = 0.5 ** (np.arange(len(counts))[::-1] / CHOICE_HALF_LIFE)
        accepted, examined = np.tensordot(weights, counts, 1).T
        return None if not examined.all() else (float(accepted[0] / examined[0]), float(accepted[1] / examined[1]))

    def _choose(self) -> None:
        """Prefer the learned draft if nothing is known."""
        alphas = self.alphas()
        self.is_original = alphas is not None and alphas[0] > alphas[1]

    def state_dict(self) -> list[list[dict[str, Any]]]:
        """Return the scores, ready for JSON."""
        return [[stats.to_dict() for stats in pair] for pair in self.scores]

    def load_state_dict(self, state: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Load saved scores."""
        self.scores.clear()
        for original, learned in state:
            self.scores.append((AcceptanceStats.from_dict(original), AcceptanceStats.from_dict(learned)))
        self._choose()

    def clear(self) -> None:
        """Forget all scores."""
        self.scores.clear()
        self._choose()


# --- the effort -----------------------------------------------------------------------------------------------------


class Effort:
    """
    Adapt the share of the configured updates that are done, between `least` and 1.

    The gain of learning on a request is the acceptance of the learned draft minus that of the original one. The share

    - doubles if the mean gain of the newest requests exceeds that of the requests before by a standard error, and
      the saved seconds (minus two standard errors, over the same number of further requests) exceed the seconds spent
      on learning; it halves otherwise, and drops to `least` if even the optimistic estimate of the savings is small;
    - returns to 1 if the gain falls or the original draft becomes better: then the traffic has changed.

    From `FIRST_REQUESTS` compared requests on, learning gets `MAX_IDLE_LEARNING` of the time of answers while even
    `PROMISED_GAINS` times the gain would save less than `MIN_SAVING` of its cost by the measured costs of rounds.
    """

    def __init__(self, least: float = MIN_EFFORT) -> None:
        self.least = least
        self._share, self._limit = 1.0, 1.0
        # By request, oldest first: alpha gained, and seconds saved (NaN if rounds are not timed).
        self._gains: deque[tuple[float, float]] = deque(maxlen=2 * GAIN_WINDOW)
        self._undecided = 0  # requests since the last decision
        self._cost = 0.0  # seconds of learning since the last decision
        self._requests = 0  # since the last change of traffic
        # Newest scores of both drafts, and tokens that text did not propose; seconds and requests of full effort.
        self._scores: deque[tuple[AcceptanceStats, AcceptanceStats, float]] = deque(maxlen=2 * DECISION_INTERVAL)
        self._full = [0.0, 0]

    @property
    def share(self) -> float:
        """The share of the configured updates that are done."""
        return self._share if self.least == 1 else min(self._share, self._limit)

    @share.setter
    def share(self, share: float) -> None:
        self._share, self._limit = share, 1.0

    def add(
        self,
        original: AcceptanceStats,
        learned: AcceptanceStats,
        saved_seconds: float | None = None,
        num_requests: int = 1,
        tokens: float = 0.0,
        token_seconds: Callable[[float], float | None] | None = None,
    ) -> None:
        """Add one comparison, which stands for `num_requests` requests, with the scores of both drafts, the seconds
        that the learned one saved, if known, and the tokens that did not come from text; and adapt the share.
        `token_seconds` returns the time of a token at an acceptance, `None` if unknown."""
        if self.share == 1:
            self._full[1] += num_requests
        if original.examined == 0 or learned.examined == 0:
            return
        if learned is not original or self._full[1] > UNLEARNED_REQUESTS:  # before, no version has served
            self._scores.append((original, learned, tokens))
        if token_seconds is not None and len(self._scores) >= FIRST_REQUESTS:
            self._limit = self._limited(token_seconds)
        saved_seconds = math.nan if saved_seconds is None else saved_seconds
        self._gains.append((learned.alpha - original.alpha, saved_seconds))
        self._undecided += 1
        self._requests += num_requests
        gains, saved = np.array(self._gains).T
        if self._has_fallen(gains):
            self.restart()
        else:
            self._adapt(gains, saved)

    def _limited(self, token_seconds: Callable[[float], float | None]) -> float:
        """Return the share of learning that takes `MAX_IDLE_LEARNING` of the time of answers, or 1 if it promises to
        pay."""
        of_original, of_learned, tokens = zip(*self._scores, strict=True)
        before, now = (sum(stats, AcceptanceStats()).alpha for stats in (of_original, of_learned))
        promised = min(before + PROMISED_GAINS * max(now - before, 0.0), 1.0)
        seconds = [token_seconds(alpha) for alpha in (before, promised)]
        cost = self._full[0] / max(self._full[1], 1)
        if None in seconds or not cost:
            return 1.0
        answer, answer_then = (float(np.mean(tokens)) * float(each or 0.0) for each in seconds)
        is_hopeless = answer - answer_then < MIN_SAVING * cost
        return min(MAX_IDLE_LEARNING * answer / cost, 1.0) if is_hopeless else 1.0

    def _has_fallen(self, gains: NDArray[np.float64]) -> bool:
        """Whether the newest gains are below zero, or below the ones before."""
        recent, before = gains[-RECENT_REQUESTS:], gains[:-RECENT_REQUESTS]
        if self._share == 1 or len(before) <= RECENT_REQUESTS:
            return False
        error = math.sqrt(before.var() / RECENT_REQUESTS + before.var() / len(before))
        is_worse = recent.mean() < -WORSE_ERRORS * before.std() / math.sqrt(RECENT_REQUESTS)
        return bool(is_worse or recent.mean() < before[-GAIN_WINDOW:].mean() - GAIN_FALL_ERRORS * error)

    def _adapt(self, gains: NDArray[np.float64], saved: NDArray[np.float64]) -> None:
        """Double or halve the share by the rise of the gain and its cost."""
        needed = GAIN_WINDOW if np.isfinite(saved).all() else 2 * GAIN_WINDOW
        if len(gains) < needed or self._undecided < DECISION_INTERVAL:
            return
        half = len(gains) // 2
        rise, error = _rise(gains[-2 * half :])
        if rise < -GAIN_FALL_ERRORS * error:
            self.restart()
            return
        cost = self._cost / self._undecided * half
        saved_rise, saved_error = _rise(saved[-2 * half :])
        low = self._requests * (saved_rise - SAVING_ERRORS * saved_error)
        high = self._requests * (saved_rise + SAVING_ERRORS * saved_error)
        if high < MIN_SAVING * cost:
            self._decide(self.least)
        else:  # comparisons with NaN are false: untimed savings do not count
            self._decide(self._share * (2.0 if rise > error and not low < cost else 0.5))

    def _decide(self, share: float) -> None:
        self._share = min(max(share, self.least), 1.0)
        self._undecided = 0
        self._cost = 0.0

    def spent(self, seconds: float) -> None:
        """Add seconds of learning."""
        self._cost += seconds
        self._full[0] += seconds * (self.share == 1)

    def restart(self) -> None:
        """Restart with all updates, and forget all gains."""
        self._decide(1.0)
        self._requests, self._limit, self._full = 0, 1.0, [0.0, 0]
        self._gains.clear()
        self._scores.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "share": self._share,
            "limit": self._limit,
            "full": list(self._full),
            "scores": [[a.to_dict(), b.to_dict(), tokens] for a, b, tokens in self._scores],
            "gains": [list(row) for row in self._gains],
            "undecided": self._undecided,
            "cost": self._cost,
            "requests": self._requests,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""
        self._share = min(max(float(state["share"]), self.least), 1.0)
        self._limit, self._full = float(state["limit"]), list(state["full"])
        self._scores.clear()
        for original, learned, tokens in state["scores"]:
            stats = AcceptanceStats.from_dict(original), AcceptanceStats.from_dict(learned)
            self._scores.append((*stats, float(tokens)))
        self._undecided = int(state["undecided"])
        self._cost = float(state["cost"])
        self._requests = int(state["requests"])
        self._gains.clear()
        self._gains.extend((gain, saved) for gain, saved in state["gains"])


def _rise(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean of the second half minus that of the first, and its standard error."""
    older, newer = np.split(values, 2)
    return float(newer.mean() - older.mean()), math.sqrt((older.var() + newer.var()) / len(newer))
