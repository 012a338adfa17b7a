"""How well a draft is accepted: counts that add up, and intervals that respect that requests differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osd_hf.errors import ConfigError
from osd_hf.records import DraftRound, Trace

__all__ = ["AcceptanceStats", "alpha_gain_interval"]

NUM_RESAMPLES = 2000

_COUNTS = ("drafted", "examined", "accepted", "emitted", "target_forwards")


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, np.generic) else number


@dataclass(frozen=True, eq=False, repr=False)
class AcceptanceStats:
    """
    Counts of assisted requests. `a + b` and `sum(...)` join the requests of several; `AcceptanceStats()` has none.
    Counts of real runs are `int`; the expectations of a sampled replay are `float`.

    Args:
        drafted (`int` or `float`, *optional*, defaults to 0):
            Tokens that the draft proposed.
        examined (`int` or `float`, *optional*, defaults to 0):
            Those that the target decided on: of each round the accepted ones and the rejected one, if there was one.
        accepted (`int` or `float`, *optional*, defaults to 0):
            Those that the target accepted.
        emitted (`int` or `float`, *optional*, defaults to 0):
            Tokens of the answers, corrections and bonus tokens included.
        target_forwards (`int` or `float`, *optional*, defaults to 0):
            Forward passes of the target: one a round.
        accepted_length_histogram (`Mapping[int, int | float]`, *optional*):
            Accepted tokens of a round -> number of rounds, over the rounds that drafted at least one token.
        requests (`np.ndarray` of shape `(requests, 2)`, *optional*):
            `examined` and `accepted` of each request, in order.
    """

    drafted: float = 0
    examined: float = 0
    accepted: float = 0
    emitted: float = 0
    target_forwards: float = 0
    accepted_length_histogram: Mapping[int, float] = field(default_factory=dict)
    requests: NDArray[Any] = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))

    def __post_init__(self) -> None:
        # Own copies, so that nobody's later change to what was passed reaches these counts; plain numbers for JSON.
        for name in _COUNTS:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        histogram = dict(sorted((int(k), _plain(n)) for k, n in self.accepted_length_histogram.items()))
        requests = np.array(self.requests)
        requests.setflags(write=False)
        object.__setattr__(self, "accepted_length_histogram", histogram)
        object.__setattr__(self, "requests", requests)

    @classmethod
    def from_counts(
        cls,
        *,
        drafted: float,
        examined: float,
        accepted: float,
        emitted: float,
        target_forwards: float,
        accepted_length_histogram: Mapping[int, float] | None = None,
    ) -> AcceptanceStats:
        """The stats of one request; arguments as of the class."""
        histogram = accepted_length_histogram or {}
        pair = np.array([[examined, accepted]])
        return cls(drafted, examined, accepted, emitted, target_forwards, histogram, pair)

    @classmethod
    def from_rounds(cls, rounds: Sequence[DraftRound]) -> AcceptanceStats:
        """The stats of one request, from its rounds."""
        return cls.from_counts(
            drafted=sum(r.num_drafted for r in rounds),
            examined=sum(r.num_examined for r in rounds),
            accepted=sum(r.num_accepted for r in rounds),
            emitted=sum(r.num_emitted for r in rounds),
            target_forwards=len(rounds),
            accepted_length_histogram=Counter(r.num_accepted for r in rounds if r.num_drafted),
        )

    @classmethod
    def from_trace(cls, trace: Trace) -> AcceptanceStats:
        """The stats of one request, from its trace; a recording of the target alone took one forward a token."""
        if trace.rounds:
            return cls.from_rounds(trace.rounds)
        return cls.from_counts(drafted=0, examined=0, accepted=0, emitted=len(trace), target_forwards=len(trace))

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @property
    def alpha(self) -> float:
        """Acceptance rate, accepted / examined; `nan` while nothing was examined."""
        return self.accepted / self.examined if self.examined else math.nan

    @property
    def acceptance_rate(self) -> float:
        """Another name of `alpha`."""
        return self.alpha

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per target forward; `nan` before the first."""
        return self.emitted / self.target_forwards if self.target_forwards else math.nan

    @cached_property
    def alpha_interval(self) -> tuple[float, float]:
        """
        95% interval of alpha: percentile bootstrap over requests, as tokens of one answer are not independent; the
        same at each call. `(nan, nan)` for fewer than two requests or if nothing was examined.
        """
        examined, accepted = _resample(self.requests)
        return _interval(accepted, examined)

    def __add__(self, other: object) -> AcceptanceStats:
        if not isinstance(other, AcceptanceStats):
            return NotImplemented
        histogram = dict(self.accepted_length_histogram)
        for length, rounds in other.accepted_length_histogram.items():
            histogram[length] = histogram.get(length, 0) + rounds
        return AcceptanceStats(
            **{name: getattr(self, name) + getattr(other, name) for name in _COUNTS},
            accepted_length_histogram=histogram,
            requests=np.concatenate([self.requests, other.requests]),
        )

    def __radd__(self, other: object) -> AcceptanceStats:
        return self if other == 0 else NotImplemented  # sum() begins with 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AcceptanceStats):
            return NotImplemented
        return self._counts() == other._counts() and np.array_equal(self.requests, other.requests)

    def __repr__(self) -> str:
        low, high = self.alpha_interval
        interval = "" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]"
        requests = f"{self.num_requests} request{'' if self.num_requests == 1 else 's'}"
        return f"alpha {self.alpha:.3f}{interval}, {self.block_efficiency:.2f} tokens per target forward, {requests}"

    def _counts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_COUNTS, "accepted_length_histogram")}

    def to_dict(self, *, derived: bool = True) -> dict[str, Any]:
        """
        A form that `json.dumps` takes, for reports and for `from_dict`: the counts, the requests, and, unless
        `derived` is `False`, what follows from them (`alpha`, `alpha_interval`, `block_efficiency`; `None` where
        undefined), of which the interval takes a while for many requests.
        """
        counted = self._counts() | {
            "accepted_length_histogram": {str(k): n for k, n in self.accepted_length_histogram.items()},
            "requests": self.requests.tolist(),
        }
        if not derived:
            return counted
        undefined = math.isnan(self.alpha_interval[0])
        return counted | {
            "alpha": self.alpha if self.examined else None,
            "alpha_interval": None if undefined else list(self.alpha_interval),
            "block_efficiency": self.block_efficiency if self.target_forwards else None,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AcceptanceStats:
        """The stats that `to_dict` was called on."""
        return cls(
            **{name: data[name] for name in _COUNTS},
            accepted_length_histogram=data["accepted_length_histogram"],
            requests=np.array(data["requests"] or np.zeros((0, 2), dtype=np.int64)),
        )


def alpha_gain_interval(before: AcceptanceStats, after: AcceptanceStats) -> tuple[float, float]:
    """
    95% interval of `after.alpha - before.alpha`: paired percentile bootstrap, each resample drawing the same requests
    on both sides, which cancels how hard the requests are.

    Args:
        before (`AcceptanceStats`): For instance the static draft.
        after (`AcceptanceStats`): Another draft on the same requests, in the same order.

    Raises:
        ConfigError: the numbers of requests differ.
    """
    if before.num_requests != after.num_requests:
        raise ConfigError(
            "the two stats must be of the same requests in the same order, "
            f"got {before.num_requests} and {after.num_requests} requests"
        )
    examined_before, accepted_before, examined_after, accepted_after = _resample(
        np.concatenate([before.requests, after.requests], axis=1)
    )
    return _interval(
        accepted_after * examined_before - accepted_before * examined_after, examined_after * examined_before
    )


def _resample(requests: NDArray[Any]) -> NDArray[Any]:
    """Sums of each column of `(requests, columns)` over bootstrap resamples: `(columns, resamples)`."""
    n, columns = requests.shape
    if n < 2:
        return np.zeros((columns, 0))
    rng = np.random.default_rng(0)
    block = max(1, 2**20 // n)  # resamples at once, so that memory stays bounded
    sizes = [min(block, NUM_RESAMPLES - start) for start in range(0, NUM_RESAMPLES, block)]
    return np.concatenate([requests[rng.integers(n, size=(size, n))].sum(axis=1) for size in sizes]).T


def _interval(numerator: NDArray[Any], denominator: NDArray[Any]) -> tuple[float, float]:
    """2.5% and 97.5% quantiles of the ratio over the resamples in which it is defined."""
    defined = denominator > 0
    if not defined.any():
        return math.nan, math.nan
    low, high = np.quantile(numerator[defined] / denominator[defined], [0.025, 0.975])
    return float(low), float(high)
