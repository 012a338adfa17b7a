"""Decide which draft serves and how much learning is worth: the gate, the choice of the draft, and the effort."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from osd_hf.acceptance import AcceptanceStats, paired_gain, student_quantile
from osd_hf.trace import Trace

MIN_HELD_BACK = 4  # held-back requests below which no version is promoted
MAX_DROPPED_IN_A_ROW = 8  # then learning restarts; the first steps on few requests often make a draft worse
PROMOTE_ERRORS = 1.0  # standard errors of a gain that promotes a version, or more where requests are few
DROP_ERRORS = 3.0  # standard errors of a fall in acceptance that drops a version
MIN_SERVED = 8  # served requests below which no version is rolled back
ROLL_BACK_ERRORS = 4.5  # the test is repeated often, so chance must be excluded

CHOICE_MEMORY = 64  # requests
CHOICE_HALF_LIFE = 1.5  # requests; a change of traffic has to show at once

MIN_EFFORT = 1 / 32  # share of the updates that are done once learning no longer pays
GAIN_EFFORT = 4  # times as many where replay shows a gain
OPEN_EFFORT = 2  # times as many where it shows neither a gain nor a loss
GAIN_ERRORS = 2.0  # standard errors of a gain or a loss
FULL_UPDATES = 2  # before the first decision
OPEN_UPDATES = 5  # judged ones, until which no gain may show: traffic of one kind is learned slowly at first
RISE_UPDATES = 8  # over which the rise of acceptance is measured
PRIOR_RISE = 0.15  # of the acceptance, until then
EXPECTED_RISES = 2  # times that the rise is expected again
REPAY_REQUESTS = 768  # that must save the cost of these updates
GAIN_WINDOW = 128  # newest served requests
RECENT_REQUESTS = 12  # a change of traffic shows in these
GAIN_FALL_ERRORS = 3.0  # standard errors of a fall of the gain


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
    held-back requests. The gain in acceptance over all requests must be at least `PROMOTE_ERRORS`. For each
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
    if gain < student_quantile(PROMOTE_ERRORS, requests) * error:
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
        alphas = self.alphas()
        self.is_original = alphas is not None and alphas[0] > alphas[1]  # if nothing is known, the learned draft

    def alphas(self) -> tuple[float, float] | None:
        """Return the recent acceptance of the original and the learned draft; the weight of a request halves every
        `CHOICE_HALF_LIFE` requests. `None` if no token was examined."""
        pairs = [[(stats.accepted, stats.examined) for stats in pair] for pair in self.scores]
        counts = np.array(pairs).reshape(-1, 2, 2)
        weights = 0.5 ** (np.arange(len(counts))[::-1] / CHOICE_HALF_LIFE)
        accepted, examined = np.tensordot(weights, counts, 1).T
        return None if not examined.all() else (float(accepted[0] / examined[0]), float(accepted[1] / examined[1]))

    def state_dict(self) -> list[list[dict[str, Any]]]:
        """Return the scores, ready for JSON."""
        return [[stats.to_dict() for stats in pair] for pair in self.scores]

    def load_state_dict(self, state: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Load saved scores."""
        self.clear()
        for original, learned in state:
            self.add(AcceptanceStats.from_dict(original), AcceptanceStats.from_dict(learned))

    def clear(self) -> None:
        """Forget all scores."""
        self.scores.clear()
        self.is_original = False


# --- the effort -----------------------------------------------------------------------------------------------------


class Effort:
    """
    Decide whether learning goes on in full, or only a `least` share of the updates is done.

    The gain is the acceptance of the learner's newest version minus that of the original draft, by replay on
    held-back requests. Its rise over the last `RISE_UPDATES` updates is expected to go on for `EXPECTED_RISES` times
    as many; for updates that are missing at first, `PRIOR_RISE` is expected, and before `OPEN_UPDATES` the acceptance
    may double unless replay shows a loss. Learning goes on if what the cost model expects the risen acceptance to save
    repays the seconds of these updates within `REPAY_REQUESTS` requests.
    Otherwise the least share of the updates is done, `OPEN_EFFORT` times as many where replay shows no loss, and
    `GAIN_EFFORT` times as many where it shows a gain; each of them decides again. A fall of the gain on served
    requests shows that the traffic has changed: then learning begins anew.
    """

    def __init__(self, least: float = MIN_EFFORT) -> None:
        self.least = least
        self.share = 1.0
        self._gains: deque[float] = deque(maxlen=RISE_UPDATES + 1)  # by update, oldest first; at least 0
        self._served: deque[float] = deque(maxlen=GAIN_WINDOW)  # by served request, oldest first
        self._updates = 0
        self._cost = 0.0  # seconds of learning since the last update

    def judged(
        self,
        original: Sequence[AcceptanceStats],
        newest: Sequence[AcceptanceStats],
        token_seconds: Callable[[float], float | None],
        tokens: float,
    ) -> None:
        """Take in the replay of the original draft and the newest version on held-back requests after an update, and
        set the share. `token_seconds` is the cost of a token at an acceptance, if known; `tokens` are those of a
        request that past text does not bring."""
        cost, self._cost = self._cost, 0.0
        self._updates += 1
        gain, error = paired_gain(original, newest)
        if len(original) < MIN_HELD_BACK or math.isnan(gain):
            return
        self._gains.append(max(gain, 0.0))
        alpha = sum(original, AcceptanceStats()).alpha
        if len(self._gains) > RISE_UPDATES:
            rise = self._gains[-1] - self._gains[0]
        else:
            rise = (1 - len(self._gains) / RISE_UPDATES) * PRIOR_RISE * alpha + gain
        alpha += self._gains[-1]
        margin = GAIN_ERRORS * error
        if len(self._gains) < OPEN_UPDATES and gain >= -margin:
            rise = max(rise, alpha / EXPECTED_RISES)  # not known yet
        now, later = (token_seconds(min(a, 1.0)) for a in (alpha, alpha + EXPECTED_RISES * max(rise, 0.0)))
        if now is None or later is None:  # nobody waits for learning where no request is timed
            return
        repays = REPAY_REQUESTS * tokens * (now - later) > EXPECTED_RISES * RISE_UPDATES * cost
        if repays or self._updates < FULL_UPDATES:
            self.share = 1.0
        else:
            times = GAIN_EFFORT if gain > margin else OPEN_EFFORT if gain >= -margin else 1
            self.share = min(self.least * times, 1.0)

    def served(self, original: AcceptanceStats, learned: AcceptanceStats) -> None:
        """Take in the replay of both drafts on a served request, and restart if the traffic has changed."""
        if original.examined == 0 or learned.examined == 0:
            return
        self._served.append(learned.alpha - original.alpha)
        gains = np.array(self._served)
        recent, before = gains[-RECENT_REQUESTS:], gains[:-RECENT_REQUESTS]
        if self.share < 1 and len(before) > RECENT_REQUESTS:
            error = before.std() * math.sqrt(1 / len(recent) + 1 / len(before))
            if recent.mean() < before.mean() - GAIN_FALL_ERRORS * error:
                self.restart()

    def spent(self, seconds: float) -> None:
        """Add seconds of learning."""
        self._cost += seconds

    def restart(self) -> None:
        """Learn in full, and forget all gains."""
        self.share = 1.0
        self._updates = 0
        self._cost = 0.0
        self._gains.clear()
        self._served.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        gains, served = [*self._gains], [*self._served]
        return {"share": self.share, "updates": self._updates, "gains": gains, "served": served, "cost": self._cost}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""
        self.restart()
        self.share = min(max(float(state["share"]), self.least), 1.0)
        self._updates = int(state["updates"])
        self._cost = float(state["cost"])
        self._gains.extend(state["gains"])
        self._served.extend(state["served"])
