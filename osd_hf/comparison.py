"""Drafts compared on the same requests: in all and by domain, with an interval for what one gains over the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from osd_hf.metrics import AcceptanceStats, alpha_gain_interval


@dataclass(frozen=True, eq=False)
class Comparison:
    """
    What drafts scored on the same requests.

    Args:
        domains (`Sequence[str | None]`): Label of each request, in order.
        sides (`Mapping[str, Sequence[AcceptanceStats]]`):
            Name of a draft -> its stats of each request. The first draft is the one before, the second the one after.
    """

    domains: Sequence[str | None]
    sides: Mapping[str, Sequence[AcceptanceStats]]

    @property
    def names(self) -> list[str | None]:
        """The domains, in the order of their first requests."""
        return list(dict.fromkeys(self.domains))

    def of(self, domain: str | None) -> Comparison:
        """The requests of a domain alone."""
        return self._chosen(i for i, label in enumerate(self.domains) if label == domain)

    def last_fifth(self) -> Comparison:
        """The last fifth of the requests alone."""
        return self._chosen(range(round(len(self.domains) * 0.8), len(self.domains)))

    def parts(self) -> dict[str, Comparison]:
        """Each domain by its name, where there are several of them, and `"all"`."""
        names = self.names if len(self.names) > 1 else []
        return {**{str(name): self.of(name) for name in names}, "all": self}

    @cached_property
    def totals(self) -> dict[str, AcceptanceStats]:
        """What each draft scored on all requests."""
        return {name: sum(stats, AcceptanceStats()) for name, stats in self.sides.items()}

    def alphas(self) -> dict[str, float | None]:
        """Alpha of each draft; `None` where nothing was examined."""
        return {name: stats.alpha if stats.examined else None for name, stats in self.totals.items()}

    @property
    def gain(self) -> float:
        """Alpha after minus alpha before; `nan` where one of them is undefined."""
        before, after, *_ = self.totals.values()
        return after.alpha - before.alpha

    @cached_property
    def gain_interval(self) -> tuple[float, float]:
        """The 95% interval of the gain, paired by requests; `(nan, nan)` where it is undefined."""
        before, after, *_ = self.totals.values()
        return alpha_gain_interval(before, after)

    def bars(self, labels: Mapping[str, str]) -> dict[str, dict[str, tuple[float, tuple[float, float]]]]:
        """Alpha and its interval by the name of the part and the label of the draft, as plots take them."""
        return {
            name: {
                label: (part.totals[side].alpha, part.totals[side].alpha_interval) for side, label in labels.items()
            }
            for name, part in self.parts().items()
        }

    def to_dict(self) -> dict[str, Any]:
        """`requests`, the figures of each draft, `gain` and `gain_interval`, with `None` for what is undefined; ready
        for JSON."""
        return {
            "requests": len(self.domains),
            **{name: figures_of(stats) for name, stats in self.totals.items()},
            "gain": None if math.isnan(self.gain) else self.gain,
            "gain_interval": None if math.isnan(self.gain_interval[0]) else list(self.gain_interval),
        }

    def _chosen(self, places: Iterable[int]) -> Comparison:
        chosen = list(places)
        sides = {name: [stats[i] for i in chosen] for name, stats in self.sides.items()}
        return Comparison([self.domains[i] for i in chosen], sides)


def figures_of(stats: AcceptanceStats) -> dict[str, Any]:
    """Counts and figures without those of each request; ready for JSON."""
    return {name: value for name, value in stats.to_dict().items() if name != "requests"}
