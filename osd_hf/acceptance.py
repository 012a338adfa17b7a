"""Acceptance counts of drafts, their confidence intervals, and comparisons of drafts on the same requests."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osd_hf.trace import DraftRound, Trace
from osd_hf.utils.report import FROZEN, LEARNING, new_curve_figure, pooled, rolling_window

MAX_REQUESTS = 1024  # newest requests with individual counts
MAX_DOMAINS = 1024  # domains with counts of their own, as labels may come from strangers
UNTIMED = (0.0, 0.0, 0.0, 0.0)
DRAFTS = ("learned", "original")  # that are replayed over time
REPLAYED_REQUESTS = 50  # newest compared requests, over which the replay of both drafts is shown
NORMAL_QUANTILE = 1.959964  # of a 95% interval, in standard errors

_TEXT_COUNTS = ("text_drafted", "text_examined", "text_accepted")
_COUNTS = ("drafted", "examined", "accepted", "emitted", "target_forwards", *_TEXT_COUNTS)


@dataclass(frozen=True, eq=False, repr=False)
class AcceptanceStats:
    """
    Counts of assisted requests. `a + b` and `sum(...)` combine requests; `AcceptanceStats()` has none. Counts of real
    runs are `int`; the expected counts of a sampled replay are `float`.

    Args:
        drafted (`float`, defaults to 0): Tokens that the draft proposed.
        examined (`float`, defaults to 0): Accepted tokens and the first rejected token of each round.
        accepted (`float`, defaults to 0): Drafted tokens that the target accepted.
        emitted (`float`, defaults to 0): Tokens of the answers, including corrections and bonus tokens.
        target_forwards (`float`, defaults to 0): Forwards of the target, one per round.
        accepted_length_histogram (`Mapping[int, float]`, *optional*):
            Number of accepted tokens -> number of rounds that accepted this number, of rounds with candidates.
        requests (`np.ndarray` of shape `(requests, 4)`, *optional*):
            `examined`, `accepted`, `target_forwards`, and `emitted` of each of the newest 1,024 requests in order. The
            last two columns are 0 where they are not given.
        num_requests (`int`, *optional*): Number of all requests, by default the number of rows in `requests`.
        text_drafted, text_examined, text_accepted (`float`, default to 0):
            The same counts for candidates copied from earlier text, which the counts of the draft do not include.
        timed (`tuple[float, ...]` of length 4, *optional*):
            Tokens and seconds of answers, estimated seconds of the target alone for them (0 if unknown), and seconds
            of learning. Comparison with `==` ignores them.
        curves (`Mapping[str, np.ndarray]`, *optional*):
            Of [`OnlineAssistant.stats`], ignored by `==`. Rows of `"speedup"`: number of the request, its seconds, and
            those of the target alone. Rows of `"learned"` and `"original"`, the replay of both drafts at a fixed k:
            number of the request, and the columns of `requests`.
    """

    drafted: float = 0
    examined: float = 0
    accepted: float = 0
    emitted: float = 0
    target_forwards: float = 0
    accepted_length_histogram: Mapping[int, float] = field(default_factory=dict)
    requests: NDArray[Any] = field(default_factory=lambda: np.zeros((0, 4), dtype=np.int64))
    num_requests: int = -1
    text_drafted: float = 0
    text_examined: float = 0
    text_accepted: float = 0
    timed: tuple[float, ...] = UNTIMED
    curves: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Copies protect the counts from later changes of the arguments.
        rows = np.array(self.requests)
        rows = np.pad(rows, ((0, 0), (0, 4 - rows.shape[1])))
        values = {
            "accepted_length_histogram": dict(sorted((int(k), n) for k, n in self.accepted_length_histogram.items())),
            "requests": rows[-MAX_REQUESTS:],
            "num_requests": len(rows) if self.num_requests < 0 else self.num_requests,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self.requests.setflags(write=False)

    @classmethod
    def from_counts(cls, *, examined: float, accepted: float, **counts: Any) -> AcceptanceStats:
        """Return the stats of one request from the arguments of the class except `requests`."""
        requests = np.array([[examined, accepted, counts.get("target_forwards", 0), counts.get("emitted", 0)]])
        return cls(examined=examined, accepted=accepted, requests=requests, **counts)

    @classmethod
    def from_rounds(cls, rounds: Sequence[DraftRound]) -> AcceptanceStats:
        """Return the stats of one request from its rounds."""
        counts = [(r.num_drafted, r.num_examined, r.num_accepted, r.num_emitted, *r.text_counts) for r in rounds]
        drafted, examined, accepted, emitted, *text = map(sum, zip(*counts, strict=True)) if counts else [0] * 7
        return cls.from_counts(
            drafted=drafted - text[0],
            examined=examined - text[1],
            accepted=accepted - text[2],
            emitted=emitted,
            target_forwards=len(rounds),
            **dict(zip(_TEXT_COUNTS, text, strict=True)),
            accepted_length_histogram=Counter(row[2] for row in counts if row[0]),
        )

    @classmethod
    def from_trace(cls, trace: Trace) -> AcceptanceStats:
        """Return the stats of one request from its trace. A trace of the target alone has one forward per token."""
        if trace.rounds:
            return cls.from_rounds(trace.rounds)
        return cls.from_counts(drafted=0, examined=0, accepted=0, emitted=len(trace), target_forwards=len(trace))

    @property
    def alpha(self) -> float:
        """Acceptance rate, accepted / examined; `nan` if no token was examined."""
        return self.accepted / self.examined if self.examined else math.nan

    @property
    def text_alpha(self) -> float:
        """Acceptance rate of candidates from earlier text; `nan` if none was examined."""
        return self.text_accepted / self.text_examined if self.text_examined else math.nan

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per target forward; `nan` without forwards."""
        return self.emitted / self.target_forwards if self.target_forwards else math.nan

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of answers, including prompts and drafting, without learning. `None` without timed
        answers, which only [`OnlineAssistant.stats`] has."""
        tokens, seconds, *_ = self.timed
        return tokens / seconds if seconds else None

    @property
    def speedup(self) -> float | None:
        """Estimated speed-up over the target alone, without learning; `benchmark` measures it. The target alone is
        assumed to read prompts in the same time, and to take as long for a token as the fastest of its loops that was
        measured at similar lengths: rounds without candidates, or transformers' own. `None` without such rounds."""
        _, seconds, alone, _ = self.timed
        return alone / seconds if alone else None

    @property
    def speedup_with_learning(self) -> float | None:
        """Estimated speed-up over the target alone, where the time of learning counts; `None` as `speedup`."""
        _, seconds, alone, learning = self.timed
        return alone / (seconds + learning) if alone else None

    @property
    def alpha_interval(self) -> tuple[float, float]:
        """95% interval of alpha by the standard error of a ratio over requests, because tokens of one answer are not
        independent. `(nan, nan)` for fewer than two requests or if no token was examined."""
        n = self.num_requests
        if n < 2 or not self.examined:
            return math.nan, math.nan
        examined, accepted = self.requests.T[:2]
        variance = ((accepted - self.alpha * examined) ** 2).mean() * n / (n - 1)
        return _interval(self.alpha, math.sqrt(n * variance) / self.examined, n, minimum=0.0)

    def __add__(self, other: object) -> AcceptanceStats:
        if not isinstance(other, AcceptanceStats):
            return NotImplemented
        counts = {name: getattr(self, name) + getattr(other, name) for name in (*_COUNTS, "num_requests")}
        histogram = Counter[int](self.accepted_length_histogram)
        histogram.update(other.accepted_length_histogram)
        return AcceptanceStats(
            **counts,
            accepted_length_histogram=histogram,
            requests=np.concatenate([self.requests, other.requests])[-MAX_REQUESTS:],
            timed=tuple(a + b for a, b in zip(self.timed, other.timed, strict=True)),
        )

    def __radd__(self, other: object) -> AcceptanceStats:
        return self if other == 0 else NotImplemented  # sum() begins with 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AcceptanceStats):
            return NotImplemented
        return self._counts() == other._counts() and np.array_equal(self.requests, other.requests)

    def __repr__(self) -> str:
        parts = [f"{self.block_efficiency:.2f} tokens per target forward"] if self.num_requests else []
        if self.speedup is not None:
            parts.append(f"{self.speedup:.2f} times the speed of the target alone")
            parts.append(f"{self.speedup_with_learning:.2f} with the time of learning")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens per second")
        replayed = self.replayed()
        if not replayed and self.examined:  # served acceptance falls where text proposes the easy tokens
            low, high = self.alpha_interval
            parts.append(f"acceptance {self.alpha:.3f}" + ("" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]"))
        if self.text_accepted:
            parts.append(f"{self.accepted:.0f} tokens from the draft and {self.text_accepted:.0f} from earlier text")
        parts.append(f"{self.num_requests} request{'' if self.num_requests == 1 else 's'}")
        for name, rates in replayed.items():
            count = min(len(self.curves[name]), REPLAYED_REQUESTS)
            parts.append(f"the {name} draft alone, replayed on {count} requests: ")
            parts[-1] += f"{rates['block_efficiency']:.2f} tokens per target forward (acceptance {rates['alpha']:.3f})"
        return ", ".join(parts)

    def replayed(self, window: int = REPLAYED_REQUESTS) -> dict[str, dict[str, float]]:
        """Return tokens per target forward (`block_efficiency`) and `alpha` of the learned and the original draft, by
        replay of the last `window` compared requests at a fixed k; empty before a version was compared."""
        rows = {name: self.curves[name][-window:].sum(0) for name in DRAFTS if len(self.curves.get(name, ()))}
        return {
            name: {"block_efficiency": float(row[4] / row[3]), "alpha": float(row[2] / row[1])}
            for name, row in rows.items()
            if row[1] and row[3]
        }

    def plot(self, window: int | None = None) -> Any:
        """Plot tokens per target forward over the newest 1,024 requests as a `matplotlib.figure.Figure`, for
        [`OnlineAssistant.stats`] next to the replay of the learned and the original draft, and below it the speed-up
        over the target alone. Each point pools `window` requests."""
        window = window or rolling_window(len(self.requests))
        speed = self.curves.get("speedup", np.zeros((0, 3)))
        is_timed = bool(speed[:, 2:].any())
        figure, (axes, *lower) = new_curve_figure(7.0, 4.6 if is_timed else 2.8, window, rows=1 + is_timed)
        numbers = range(self.num_requests - len(self.requests) + 1, self.num_requests + 1)
        axes.plot(numbers, pooled(self.requests[:, 2:], window), color=LEARNING, lw=2, label="served")
        for name, color in zip(DRAFTS, (LEARNING, FROZEN), strict=True):
            if len(rows := self.curves.get(name, np.zeros((0, 5)))):
                curve = pooled(rows[:, 3:], window)
                style = {"ls": "--", "lw": 1.4, "marker": "." if len(rows) < 3 else None}
                axes.plot(rows[:, 0], curve, color=color, label=f"{name} draft alone, replayed", **style)
                axes.legend(frameon=False, fontsize=8)
        for axes in lower:
            axes.plot(speed[:, 0], pooled(speed[:, 1:], window), color=LEARNING, lw=2)
            axes.axhline(1, color="black", lw=1)
            axes.set_ylabel("speed-up")
        return figure

    def _counts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_COUNTS, "accepted_length_histogram", "num_requests")}

    def to_dict(self) -> dict[str, Any]:
        """Return the counts, the requests, and the rates (`None` if undefined), ready for JSON and [`from_dict`]."""
        histogram = {str(k): n for k, n in self.accepted_length_histogram.items()}
        rates = {name: getattr(self, name) for name in ("alpha", "text_alpha", "block_efficiency")}
        data = self._counts() | {"accepted_length_histogram": histogram, "requests": self.requests.tolist()}
        data |= {name: None if math.isnan(rate) else rate for name, rate in rates.items()}
        data["alpha_interval"] = None if math.isnan(self.alpha_interval[0]) else list(self.alpha_interval)
        if any(self.timed):
            names = ("tokens_per_second", "speedup", "speedup_with_learning")
            data |= {name: getattr(self, name) for name in names}
        return data | ({"replayed": replayed} if (replayed := self.replayed()) else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AcceptanceStats:
        """Return the stats from the result of [`to_dict`]."""
        names = (*_COUNTS, "accepted_length_histogram", "num_requests")
        requests = np.array(data["requests"] or np.zeros((0, 4), dtype=np.int64))
        return cls(**{name: data[name] for name in names}, requests=requests)


def paired_gain(before: Sequence[AcceptanceStats], after: Sequence[AcceptanceStats]) -> tuple[float, float]:
    """Return the gain in alpha from `before` to `after`, of the same requests in the same order, and its standard
    error (linearized ratio estimator): `nan` if no token was examined, and infinite for fewer than two requests."""
    if not before:
        return math.nan, math.nan
    sides = [np.concatenate([s.requests for s in stats]).astype(float) for stats in (before, after)]
    n = len(sides[0])
    if any(side[:, 0].sum() == 0 for side in sides):
        return math.nan, math.nan
    alphas = [side[:, 1].sum() / side[:, 0].sum() for side in sides]
    gain = float(alphas[1] - alphas[0])
    if n < 2:
        return gain, math.inf
    influence = [(side[:, 1] - a * side[:, 0]) / side[:, 0].mean() for side, a in zip(sides, alphas, strict=True)]
    return gain, float(np.std(influence[1] - influence[0], ddof=1) / math.sqrt(n))


def alpha_gain_interval(before: Sequence[AcceptanceStats], after: Sequence[AcceptanceStats]) -> tuple[float, float]:
    """Return the 95% interval of [`paired_gain`]; `(nan, nan)` if it is undefined."""
    gain, error = paired_gain(before, after)
    return _interval(gain, error, sum(len(stats.requests) for stats in before), minimum=-1.0)


def student_quantile(z: float, n: int) -> float:
    """Return the quantile of Student's distribution for `n` requests that corresponds to the normal quantile `z`, by
    Wallace's approximation."""
    freedom = n - 1
    scaled = z * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(scaled * scaled / freedom))


def _interval(value: float, error: float, n: int, *, minimum: float) -> tuple[float, float]:
    """Return the 95% interval of a value between `minimum` and 1 with a standard error over `n` requests."""
    if n < 2 or math.isnan(error):
        return math.nan, math.nan
    width = student_quantile(NORMAL_QUANTILE, n) * error
    return max(value - width, minimum), min(value + width, 1.0)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Acceptance of several drafts on the same requests."""

    domains: Sequence[str | None]  # of each request, in order
    sides: Mapping[str, Sequence[AcceptanceStats]]  # of each draft; the first is the baseline of the second

    def last_fifth(self) -> Comparison:
        """Return the comparison on the last fifth of the requests."""
        return self._select(range(round(len(self.domains) * 0.8), len(self.domains)))

    def parts(self) -> dict[str, Comparison]:
        """Return the comparison of each domain, if there are several, and of `"all"` requests."""
        places: dict[str, list[int]] = defaultdict(list)
        for i, domain in enumerate(self.domains):
            places[str(domain)].append(i)
        return {**{name: self._select(indices) for name, indices in places.items() if len(places) > 1}, "all": self}

    @cached_property
    def totals(self) -> dict[str, AcceptanceStats]:
        """Stats of each draft on all requests."""
        return {name: sum(stats, AcceptanceStats()) for name, stats in self.sides.items()}

    def alphas(self) -> dict[str, float | None]:
        """Return alpha of each draft; `None` if no token was examined."""
        return {name: stats.alpha if stats.examined else None for name, stats in self.totals.items()}

    @property
    def gain(self) -> float:
        """Alpha of the second draft minus alpha of the first; `nan` if one is undefined."""
        before, after, *_ = self.totals.values()
        return after.alpha - before.alpha

    @cached_property
    def gain_interval(self) -> tuple[float, float]:
        """95% interval of the gain, paired by requests; `(nan, nan)` if it is undefined."""
        before, after, *_ = self.sides.values()
        return alpha_gain_interval(before, after)

    def to_dict(self) -> dict[str, Any]:
        """Return the stats of each draft and the gain, ready for JSON."""
        return {
            "requests": len(self.domains),
            **{name: figures_of(stats) for name, stats in self.totals.items()},
            "gain": None if math.isnan(self.gain) else self.gain,
            "gain_interval": None if math.isnan(self.gain_interval[0]) else list(self.gain_interval),
        }

    def _select(self, indices: Sequence[int]) -> Comparison:
        sides = {name: [stats[i] for i in indices] for name, stats in self.sides.items()}
        return Comparison([self.domains[i] for i in indices], sides)


def figures_of(stats: AcceptanceStats) -> dict[str, Any]:
    """Return counts and rates without the counts of each request, ready for JSON."""
    return {name: value for name, value in stats.to_dict().items() if name != "requests"}


class Tally:
    """Acceptance of served requests by domain. Domains after the first 1,024 count as requests without a domain.
    Thread-safe."""

    def __init__(self) -> None:
        self.requests = 0
        self._by_domain: dict[str | None, AcceptanceStats] = {}
        self._recent = AcceptanceStats()
        self._timed: deque[tuple[float, ...]] = deque([(0, 0.0, 0.0)], MAX_REQUESTS)
        self._lock = threading.Lock()

    def add(self, domain: str | None, stats: AcceptanceStats, timed: Sequence[float] = UNTIMED) -> None:
        """Add one request. `timed` are tokens and seconds of all answers so far, and seconds of the target alone."""
        with self._lock:
            self.requests += 1
            self._timed.append((self._timed[-1][0] + 1, *timed[1:3]))
            domain = domain if domain in self._by_domain or len(self._by_domain) < MAX_DOMAINS else None
            self._by_domain[domain] = self._by_domain.get(domain, AcceptanceStats()) + stats
            self._recent = self._recent + stats

    def by_domain(self) -> dict[str | None, AcceptanceStats]:
        """Return the stats by domain since the last reset."""
        with self._lock:
            return dict(self._by_domain)

    def total(self) -> AcceptanceStats:
        """Return the stats of all domains since the last reset."""
        return sum(self.by_domain().values(), AcceptanceStats())

    def speeds(self) -> NDArray[np.float64]:
        """Return rows of the number of a request, its seconds, and those of the target alone, where they are known."""
        with self._lock:
            rows = np.array(self._timed, dtype=np.float64)
        is_known = (rows[1:, 2] > 0) & ((rows[:-1, 2] > 0) | (rows[:-1, 1] == 0))
        speeds: NDArray[np.float64] = np.column_stack([rows[1:, :1], np.diff(rows[:, 1:], axis=0)])[is_known]
        return speeds

    def take_recent(self) -> tuple[int, AcceptanceStats]:
        """Return the number of all requests, and the stats since the last call."""
        with self._lock:
            recent, self._recent = self._recent, AcceptanceStats()
            return self.requests, recent

    def reset(self) -> None:
        """Clear the stats. The number of requests is kept."""
        with self._lock:
            self._by_domain.clear()
            self._recent = AcceptanceStats()
            self._timed = deque([(0, 0.0, 0.0)], MAX_REQUESTS)

    def state(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        with self._lock:
            requests, stats = self.requests, dict(self._by_domain)
        return {"requests": requests, "stats": [[domain, s.to_dict()] for domain, s in stats.items()]}

    def load(self, state: dict[str, Any]) -> int:
        """Continue from a state; returns its number of requests since the last reset."""
        with self._lock:
            self.requests = int(state["requests"])
            self._by_domain = {domain: AcceptanceStats.from_dict(stats) for domain, stats in state["stats"]}
            self._recent = AcceptanceStats()
            counted = sum(stats.num_requests for stats in self._by_domain.values())
            self._timed = deque([(counted, 0.0, 0.0)], MAX_REQUESTS)
            return counted
