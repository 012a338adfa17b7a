"""The gate: which versions of a draft may serve, and whether one that serves has to go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from osd_hf.acceptance import AcceptanceStats, paired_gain, student_quantile
from osd_hf.trace import Trace

__all__ = ["GateDecision", "judge", "regressed"]

LEAST_HELD_BACK = 4  # below this, no version is promoted
DROPPED_IN_A_ROW = 8  # before learning starts again: the first steps on few requests often make a draft worse
FELL = 3.0  # standard errors below zero from which a fall is one, not noise
LEAST_SERVED = 8  # below this, no version is rolled back
ROLL_BACK = 4.5  # standard errors, of many requests: it is asked again and again, and must not happen by chance


@dataclass(frozen=True)
class GateDecision:
    """
    What became of one version of a draft, and why.

    Args:
        outcome (`str`):
            `"promoted"`; `"kept back"` (not shown to be as good); `"dropped"` (shown to be worse, or not finite);
            `"rolled back"` (it had served; the version before it, or 0, the draft as it was, serves again). Learning
            goes on from what was not promoted; it starts again from what serves after a rollback, after weights that
            are not finite, and after eight versions in a row that were dropped.
        version (`int`): The version that was decided about.
        serving (`int`): Version that serves from now on.
        domain (`str`, *optional*): Whose draft; `None` where all share one.
        reason (`str`): In words.
        requests (`int`): Held-back or, for a rollback, served requests that it rests on.
        alpha_before (`float`, *optional*), alpha_after (`float`, *optional*):
            Acceptance on them of the version that served, and of `version`; for a rollback, of the version before it,
            and of `version`.
        standard_error (`float`, *optional*): The standard error of their difference, paired by request.
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
        """Field by field, ready for JSON."""
        return asdict(self)


def judge(
    version: int, serving: int, domain: str | None,
    held_back: Sequence[Trace], before: Sequence[AcceptanceStats], after: Sequence[AcceptanceStats],
) -> GateDecision:  # fmt: skip
    """
    Whether a version may serve in place of the one that does, by what each was replayed to make of the held-back
    requests, `before` and `after`.

    Over all requests, its gain in acceptance has to be at least half the standard error of that gain; among those of a
    label, where there are enough, acceptance must not fall by more than two. Learning goes on meanwhile, so that what
    is kept back once costs little.
    """
    requests = len(held_back)
    if requests < LEAST_HELD_BACK:
        reason = f"{requests} held-back requests are too few to judge by; {LEAST_HELD_BACK} are needed"
        return GateDecision("kept back", version, serving, domain, reason, requests)
    gain, error = paired_gain(before, after)
    figures = _figures(before, after, error)

    def decide(outcome: Literal["promoted", "kept back", "dropped"], reason: str) -> GateDecision:
        now = version if outcome == "promoted" else serving
        return GateDecision(outcome, version, now, domain, reason, requests, *figures)

    if math.isnan(gain):
        return decide("kept back", "nothing was drafted for the held-back requests")
    if gain + FELL * error < 0:
        return decide("dropped", f"acceptance falls by {-gain:.3f}, more than {FELL:g} standard errors")
    if gain < 0.5 * error:
        return decide("kept back", f"a gain of {gain:+.3f} with a standard error of {error:.3f} is not enough")
    for label in dict.fromkeys(trace.domain for trace in held_back):
        those = [i for i, trace in enumerate(held_back) if trace.domain == label]
        own, own_error = paired_gain([before[i] for i in those], [after[i] for i in those])
        if len(those) >= LEAST_HELD_BACK and own + 2 * own_error < 0:
            return decide("kept back", f"acceptance falls by {-own:.3f} for {label!r}")
    return decide("promoted", f"acceptance changes by {gain:+.3f}, standard error {error:.3f}")


def regressed(
    version: int, previous: int, domain: str | None,
    before: Sequence[AcceptanceStats], after: Sequence[AcceptanceStats],
) -> GateDecision | None:  # fmt: skip
    """
    Whether the version that serves has to go, for `previous` to serve in its place: the one before it, or 0, the draft
    as it was; `None` where it may stay. The sides are what the other would have scored, by replay, on the requests
    served since the promotion, and what happened: the same requests, so that harder traffic is no fall.
    """
    if len(after) < LEAST_SERVED:
        return None
    gain, error = paired_gain(before, after)
    limit = student_quantile(ROLL_BACK, len(after))
    if math.isnan(gain) or gain + limit * error >= 0:
        return None
    reason = (
        f"served acceptance is {-gain:.3f} below that of version {previous}, more than {limit:.1f} standard errors"
    )
    figures = _figures(before, after, error)
    return GateDecision("rolled back", version, previous, domain, reason, len(after), *figures)


def _figures(
    before: Sequence[AcceptanceStats], after: Sequence[AcceptanceStats], error: float
) -> tuple[float | None, float | None, float | None]:
    """Both sides' alphas and the error, `None` for what is no number."""
    alphas = (sum(stats, AcceptanceStats()).alpha for stats in (before, after))
    first, second, third = (float(x) if math.isfinite(x) else None for x in (*alphas, error))
    return first, second, third
