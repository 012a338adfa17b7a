"""How much learning is worth now: all of it while acceptance rises, little once it stands."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from osd_hf.metrics import AcceptanceStats

__all__ = ["Effort"]

WINDOW = 128  # requests of which the mean is compared with that of as many before
STRIDE = 64  # requests between two decisions
RECENT = 12  # requests by which a change of traffic shows
FELL = 3.0  # standard errors
WORSE = 4.0  # standard errors below the draft as it was


class Effort:
    """
    Share of the configured updates that are done, between `least` and `most`. What learning has gained is known by
    request: how much better the learned draft is on it than the draft as it was. Where the mean of the newest requests
    is no longer above that of those before, by a standard error, the share is halved; where it is, it is doubled.
    Where the gain falls, or the draft as it was is the better one, traffic has changed, and the most is done again.

    Args:
        least (`float`): Above 0 and at most 1.
        most (`float`, *optional*, defaults to 1): At least 1; more than all: updates come sooner than configured.
    """

    def __init__(self, least: float, most: float = 1.0) -> None:
        self.least, self.most = least, most
        self.share = most
        self._gains: deque[float] = deque(maxlen=2 * WINDOW)  # oldest first
        self._undecided = 0  # requests

    def add(self, original: AcceptanceStats, learned: AcceptanceStats) -> None:
        """Take in what the draft as it was and the learned one make of a request."""
        if original.examined == 0 or learned.examined == 0:
            return
        self._gains.append(learned.alpha - original.alpha)
        self._undecided += 1
        gains = np.array(self._gains)
        recent, before = gains[-RECENT:], gains[:-RECENT]
        if self.share < self.most and len(before) > RECENT:
            error = math.sqrt(before.var() / RECENT + before.var() / len(before))
            if recent.mean() < -WORSE * before.std() / math.sqrt(RECENT) or (
                recent.mean() < before[-WINDOW:].mean() - FELL * error
            ):
                self.renew()
                return
        if len(gains) == 2 * WINDOW and self._undecided >= STRIDE:
            self._undecided = 0
            older, newer = gains[:WINDOW], gains[WINDOW:]
            error = math.sqrt((older.var() + newer.var()) / WINDOW)
            rise = newer.mean() - older.mean()
            if rise < -FELL * error:  # slowly, but it falls
                self.renew()
                return
            factor = 2.0 if rise > error else 0.5
            self.share = min(max(self.share * factor, self.least), self.most)

    def renew(self) -> None:
        """Begin again with the most, from what comes from now on."""
        self.share, self._undecided = self.most, 0
        self._gains.clear()

    def state_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"share": self.share, "gains": list(self._gains), "undecided": self._undecided}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.share = min(max(float(state["share"]), self.least), self.most)
        self._undecided = int(state["undecided"])
        self._gains.clear()
        self._gains.extend(map(float, state["gains"]))
