"""How much learning is worth now: all of it while acceptance rises and that pays, little once it does not."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osd_hf.acceptance import AcceptanceStats

__all__ = ["MIN_EFFORT", "Effort"]

MIN_EFFORT = 1 / 16  # share of the updates that are done once learning no longer pays

WINDOW = 128  # requests of which the mean is compared with that of as many before; half of it at first, if timed
STRIDE = 64  # requests between two decisions
RECENT = 12  # requests by which a change of traffic shows
FELL = 3.0  # standard errors
WORSE = 4.0  # standard errors below the draft as it was
SURELY = 2.0  # standard errors of what is saved, or could be
HOPELESS = 0.25  # of what learning takes, that it has to save at best
SOON = 16  # requests after which it may be seen that no draft could save enough
TOO_DEAR = 0.5  # of what learning takes, that a draft which is nearly always right has to save
CHEAP = 0.03  # of what serving takes, that learning may take at its least


def _rise(values: NDArray[np.float64]) -> tuple[float, float]:
    """By how much the mean of the second half is above that of the first, and the standard error of that."""
    older, newer = np.split(values, 2)
    return float(newer.mean() - older.mean()), math.sqrt((older.var() + newer.var()) / len(newer))


def _surely(values: NDArray[np.float64]) -> float:
    """What their mean is at least, but for chance."""
    return float(values.mean() - SURELY * values.std() / math.sqrt(len(values)))


class Effort:
    """
    Share of the configured updates that are done, between `least` and `most`. What learning has gained is known by
    request: how much better the learned draft is on it than the draft as it was. The share is doubled where the mean
    of the newest requests is above that of those before by a standard error, and what that saves over as many requests
    again as there were, less two standard errors, is more than what learning took meanwhile, both in seconds; it is
    halved where it is not, and the least is done at once where even at best it saves next to nothing, as where past
    text proposes all. Nor is more done, from a few requests on, where a draft that is nearly always right would save
    too little over as many requests again, as in large batches or beside past text, until one would surely save what
    it takes at each request. Where the gain falls, or the draft as it was is the better one, traffic has changed, and
    the most is done again.

    At its least, an update goes on only after the requests since have paid for what it took, 3% of their seconds each,
    where it is known what serving takes. Comparing both drafts is not waited for: it tells when traffic changes.

    Args:
        least (`float`): Above 0 and at most 1.
        most (`float`, *optional*, defaults to 1): At least 1; more than all: updates come sooner than configured.
    """

    def __init__(self, least: float, most: float = 1.0) -> None:
        self.least, self.most = least, most
        self.share = most
        # Oldest first; by request: alpha gained, seconds saved, and those that a draft which is nearly always right
        # would save, `nan` where rounds are not timed.
        self._gains: deque[tuple[float, float, float]] = deque(maxlen=2 * WINDOW)
        self._undecided = 0  # requests
        self._cost = 0.0  # seconds of learning since the last decision
        self._requests = 0  # since traffic was another
        self._owed: float | None = None  # seconds of learning, at its least, that requests have not paid for yet
        self._price: float | None = None  # of a request at more effort, where that was too dear for any draft

    def add(
        self, original: AcceptanceStats, learned: AcceptanceStats, saved_seconds: float | None = None,
        stands_for: int = 1, could_save: float | None = None,
    ) -> None:  # fmt: skip
        """Take in what the draft as it was and the learned one make of a request, and the seconds that the learned one
        saved and one that is nearly always right would, where they are known; the request stands for so many."""
        if original.examined == 0 or learned.examined == 0:
            return
        seconds = (math.nan if value is None else value for value in (saved_seconds, could_save))
        self._gains.append((learned.alpha - original.alpha, *seconds))  # type: ignore[arg-type]
        self._undecided += 1
        self._requests += stands_for
        gains, saved, could = np.array(self._gains).T
        recent, before = gains[-RECENT:], gains[:-RECENT]
        if self.share < self.most and len(before) > RECENT:
            error = math.sqrt(before.var() / RECENT + before.var() / len(before))
            if recent.mean() < -WORSE * before.std() / math.sqrt(RECENT) or (
                recent.mean() < before[-WINDOW:].mean() - FELL * error
            ):
                self.renew()
                return
        most_saved = self._requests * could[-self._undecided :].mean()
        if self.share > self.least and self._undecided >= SOON and most_saved < TOO_DEAR * self._cost:
            self._price = self._cost / self._undecided
            self.share, self._undecided, self._cost = self.least, 0, 0.0
            return
        newest = (could[-SOON:], could[-self._undecided :])
        if self._price is not None and self._undecided >= SOON and max(map(_surely, newest)) > self._price:
            self.renew()  # past text proposed what it does not any more
            return
        known = WINDOW if np.isfinite(saved).all() else 2 * WINDOW  # where nothing has a price, there is time to look
        if len(gains) < known or self._undecided < STRIDE:
            return
        half = len(gains) // 2
        rise, error = _rise(gains[-2 * half :])
        if rise < -FELL * error:  # slowly, but it falls
            self.renew()
            return
        cost = self._cost / self._undecided * half
        saved_more, error_of_it = _rise(saved[-2 * half :])
        saves, at_best = (self._requests * (saved_more + side * SURELY * error_of_it) for side in (-1, 1))
        factor = 2.0 if rise > error and not saves < cost else 0.5  # `nan` tells nothing
        if at_best < HOPELESS * cost:
            factor = 0.0
        self.share = min(max(self.share * factor, self.least), self.most)
        self._undecided, self._cost = 0, 0.0

    def took(self, seconds: float, *, compared: bool = False) -> None:
        """Learning took so long, or only to see what both drafts make of requests."""
        self._cost += seconds
        if self._owed is not None and self.share == self.least < self.most and not compared:
            self._owed += seconds

    def served(self, seconds: float | None) -> None:
        """Serving a request took so long, where that is known."""
        if seconds is None:
            return
        pays = CHEAP * seconds
        self._owed = max((self._owed or 0.0) - pays, -pays)  # what it does not pay for now is not saved up

    @property
    def is_cheap(self) -> bool:
        """Whether learning may go on, by what it took and what serving has taken since."""
        owed = self._owed
        return self.share > self.least or owed is None or owed <= 0

    def renew(self) -> None:
        """Begin again with the most, from what comes from now on."""
        self.share, self._undecided, self._cost, self._requests = self.most, 0, 0.0, 0
        self._owed = self._price = None
        self._gains.clear()

    def state_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        gains = [[None if math.isnan(value) else value for value in row] for row in self._gains]
        return {
            "share": self.share, "gains": gains, "undecided": self._undecided, "cost": self._cost,
            "requests": self._requests, "owed": self._owed, "price": self._price,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.share = min(max(float(state["share"]), self.least), self.most)
        self._undecided, self._cost = int(state["undecided"]), float(state["cost"])
        self._requests, self._owed = int(state["requests"]), state.get("owed")
        self._price = state.get("price")
        self._gains.clear()
        for row in state["gains"]:  # those of before have two values
            gain, saved, could = (math.nan if value is None else float(value) for value in (*row, None)[:3])
            self._gains.append((gain, saved, could))
