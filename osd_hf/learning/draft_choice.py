"""Which draft serves a request, the learned one or the draft as it was: the one that was better on the last few."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from osd_hf.acceptance import AcceptanceStats
from osd_hf.trace import Trace

__all__ = ["Choice"]

REMEMBERED = 64  # requests
HALF_LIFE = 1.5  # requests after which one counts half: a change of traffic has to show at once


class Choice:
    """
    What the learned draft and the draft as it was make of the same requests, oldest first, and which of the two the
    next request is served by. New traffic may be nothing like what was learned from; the draft as it was is the better
    one then, until enough of it has been learned. Not locked: its owner is.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[object, tuple[AcceptanceStats, AcceptanceStats]] = OrderedDict()

    def add(self, trace: Trace, original: AcceptanceStats, learned: AcceptanceStats) -> None:
        """Take in a request and what both drafts make of it."""
        self._known[trace] = original, learned
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def promoted(self, trace: Trace, learned: AcceptanceStats) -> None:
        """What another version, which serves from now on, makes of a request."""
        if trace in self._known:
            self._known[trace] = self._known[trace][0], learned

    def of(self, trace: Trace) -> tuple[AcceptanceStats, AcceptanceStats] | None:
        """What the draft as it was and the learned one make of a request; `None` if it is not known any more."""
        return self._known.get(trace)

    def totals(self) -> tuple[AcceptanceStats, AcceptanceStats]:
        """What the draft as it was and the learned one make of all requests that are remembered."""
        sides = [[pair[side] for pair in self._known.values()] for side in range(2)]
        return sum(sides[0], AcceptanceStats()), sum(sides[1], AcceptanceStats())

    def alphas(self) -> tuple[float, float] | None:
        """Acceptance of the draft as it was and of the learned one on the last few requests, each of which counts half
        as much as one `HALF_LIFE` later; `None` where nothing was examined."""
        weights = [0.5 ** (age / HALF_LIFE) for age in reversed(range(len(self._known)))]
        alphas = []
        for side in range(2):
            counted = [(pair[side], weight) for pair, weight in zip(self._known.values(), weights, strict=True)]
            examined = sum(weight * stats.examined for stats, weight in counted)
            if examined == 0:
                return None
            alphas.append(sum(weight * stats.accepted for stats, weight in counted) / examined)
        return alphas[0], alphas[1]

    def is_original(self) -> bool:
        """Whether the draft as it was serves the next request; where nothing is known, the learned one does."""
        alphas = self.alphas()
        return alphas is not None and alphas[0] > alphas[1]

    def state_dict(self, places: Mapping[Any, int]) -> list[dict[str, Any]]:
        """What both made of each request, with its place among those that are saved, ready for JSON."""
        names = ("original", "learned")
        return [
            {"place": places.get(trace), **{n: s.to_dict(derived=False) for n, s in zip(names, pair, strict=True)}}
            for trace, pair in self._known.items()
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], saved: Sequence[Trace]) -> None:
        """Go on from a saved state; requests that were not saved themselves are known no more."""
        self._known.clear()
        for row in state:
            trace: object = object() if row["place"] is None else saved[row["place"]]
            original, learned = (AcceptanceStats.from_dict(row[name]) for name in ("original", "learned"))
            self._known[trace] = original, learned

    def clear(self) -> None:
        """Forget all of it: the drafts are others now."""
        self._known.clear()
