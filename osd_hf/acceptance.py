"""Acceptance counts of drafts, their confidence intervals, and comparisons of drafts on the same requests."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osd_hf.errors import ConfigError
from osd_hf.trace import DraftRound, Trace
from osd_hf.utils.plots import alpha_figure

MOST_REQUESTS = 1024  # whose counts are kept one by one
MOST_DOMAINS = 1024  # counted apart; labels may be anybody's
UNTIMED = (0.0, 0.0, 0.0, 0.0)
NORMAL = 1.959964  # standard errors on both sides of 95%

_COUNTS = ("drafted", "examined", "accepted", "emitted", "target_forwards")
_TEXT_COUNTS = ("text_drafted", "text_examined", "text_accepted")


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, np.generic) else number


@dataclass(frozen=True, eq=False, repr=False)
class AcceptanceStats:
    """
    Counts of assisted requests. `a + b` and `sum(...)` join the requests of several; `AcceptanceStats()` has none.
    Counts of real runs are `int`; the expectations of a sampled replay are `float`.

    Args:
        drafted (`int` or `float`, *optional*, defaults to 0): Tokens that the draft proposed.
        examined (`int` or `float`, *optional*, defaults to 0):
            Those that the target decided on: the accepted ones of each round, and the rejected one if there was one.
        accepted (`int` or `float`, *optional*, defaults to 0): Those that the target accepted.
        emitted (`int` or `float`, *optional*, defaults to 0):
            Tokens of the answers, corrections and bonus tokens included.
        target_forwards (`int` or `float`, *optional*, defaults to 0): Forward passes of the target: one a round.
        accepted_length_histogram (`Mapping[int, int | float]`, *optional*):
            Accepted tokens of a round -> number of rounds, over the rounds that proposed at least one token.
        requests (`np.ndarray` of shape `(requests, 2)`, *optional*):
            `examined` and `accepted` of each request, in order; of a sum, those of the newest 1,024.
        num_requests (`int`, *optional*): All requests; as many as there are in `requests` by default.
        squares (`tuple[float, ...]` of length 3, *optional*):
            Over all requests, the sums of `examined` squared, of `examined` times `accepted`, and of `accepted`
            squared; those of `requests` by default.
        text_drafted, text_examined, text_accepted (`int` or `float`, *optional*, default to 0):
            The same counts of tokens that past text proposed, which are not among the draft's.
        timed (`tuple[float, ...]` of length 4, *optional*):
            Of rounds that were timed: tokens emitted and seconds; and of those among them since the target's cost of
            a token was known: seconds, and what the target alone would have taken. Two stats that differ in nothing
            else are equal.
    """

    drafted: float = 0
    examined: float = 0
    accepted: float = 0
    emitted: float = 0
    target_forwards: float = 0
    accepted_length_histogram: Mapping[int, float] = field(default_factory=dict)
    requests: NDArray[Any] = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    num_requests: int = -1
    squares: tuple[float, ...] = ()
    text_drafted: float = 0
    text_examined: float = 0
    text_accepted: float = 0
    timed: tuple[float, ...] = UNTIMED

    def __post_init__(self) -> None:
        # Own copies: nobody's later change to what was passed reaches these counts. Plain numbers go into JSON.
        own: dict[str, Any] = {name: _plain(getattr(self, name)) for name in (*_COUNTS, *_TEXT_COUNTS)}
        histogram = sorted((int(k), _plain(n)) for k, n in self.accepted_length_histogram.items())
        rows = np.array(self.requests)
        examined, accepted = rows.T
        products = examined * examined, examined * accepted, accepted * accepted
        own |= {
            "accepted_length_histogram": dict(histogram),
            "requests": rows[-MOST_REQUESTS:],
            "num_requests": len(rows) if self.num_requests < 0 else self.num_requests,
            "squares": tuple(map(_plain, self.squares or [product.sum() for product in products])),
        }
        own["requests"].setflags(write=False)
        for name, value in own.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_counts(cls, *, examined: float, accepted: float, **counts: Any) -> AcceptanceStats:
        """The stats of one request; takes the arguments of the class, all but `requests`, by keyword."""
        requests = np.array([[examined, accepted]])
        return cls(examined=examined, accepted=accepted, requests=requests, **counts)

    @classmethod
    def from_rounds(cls, rounds: Sequence[DraftRound]) -> AcceptanceStats:
        """The stats of one request, from its rounds."""
        of_text = [sum(counts) for counts in zip(*(r.text_counts for r in rounds), strict=True)] or [0, 0, 0]
        of_both = [sum(getattr(r, f"num_{name}") for r in rounds) for name in _COUNTS[:3]]
        drafted, examined, accepted = (both - text for both, text in zip(of_both, of_text, strict=True))
        return cls.from_counts(
            drafted=drafted,
            examined=examined,
            accepted=accepted,
            emitted=sum(r.num_emitted for r in rounds),
            target_forwards=len(rounds),
            **dict(zip(_TEXT_COUNTS, of_text, strict=True)),
            accepted_length_histogram=Counter(r.num_accepted for r in rounds if r.num_drafted),
        )

    @classmethod
    def from_trace(cls, trace: Trace) -> AcceptanceStats:
        """The stats of one request, from its trace; a recording of the target alone took one forward a token."""
        if trace.rounds:
            return cls.from_rounds(trace.rounds)
        return cls.from_counts(drafted=0, examined=0, accepted=0, emitted=len(trace), target_forwards=len(trace))

    @property
    def alpha(self) -> float:
        """Acceptance rate, accepted / examined; `nan` while nothing was examined."""
        return self.accepted / self.examined if self.examined else math.nan

    acceptance_rate = alpha

    @property
    def text_alpha(self) -> float:
        """Acceptance rate of what past text proposed; `nan` while nothing of it was examined."""
        return self.text_accepted / self.text_examined if self.text_examined else math.nan

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per target forward; `nan` before the first."""
        return self.emitted / self.target_forwards if self.target_forwards else math.nan

    @property
    def tokens_per_second(self) -> float | None:
        """
        Tokens emitted in a second of decoding. [`OnlineAssistant.stats`] knows it, by the wall time of its rounds,
        drafting included; reading prompts, learning between requests, and rounds of stock drafting are not timed.
        `None` before the first timed round.
        """
        tokens, seconds, *_ = self.timed
        return tokens / seconds if seconds else None

    @property
    def speedup(self) -> float | None:
        """
        Times as fast as the target alone: what it would have taken for the tokens of the timed rounds, over what they
        took. A token of the target alone is taken to cost what rounds without a draft cost lately, on this machine and
        at such contexts: `num_assistant_tokens="auto"` has some now and then, a fixed k at the end of answers that
        fill their length. Of a round over three times as long as expected, as on a machine that is busy elsewhere,
        that much counts. An estimate while serving; `benchmark` measures it. `None` before such a round.
        """
        *_, seconds, alone = self.timed
        return alone / seconds if seconds else None

    @property
    def alpha_interval(self) -> tuple[float, float]:
        """95% interval of alpha, by the standard error of a ratio over requests, as tokens of one answer are not
        independent. `(nan, nan)` for fewer than two requests or if nothing was examined."""
        n, (examined, both, accepted) = self.num_requests, self.squares
        if n < 2 or not self.examined:
            return math.nan, math.nan
        squared = max(accepted - 2 * self.alpha * both + self.alpha**2 * examined, 0.0)  # of each one's residual
        error = math.sqrt(squared * n / (n - 1)) / self.examined
        return _interval(self.alpha, error, n, 0.0)

    def __add__(self, other: object) -> AcceptanceStats:
        if not isinstance(other, AcceptanceStats):
            return NotImplemented
        counts = {name: getattr(self, name) + getattr(other, name) for name in (*_COUNTS, *_TEXT_COUNTS)}
        histogram = Counter[int](self.accepted_length_histogram)
        histogram.update(other.accepted_length_histogram)
        return AcceptanceStats(
            **counts,
            accepted_length_histogram=histogram,
            requests=np.concatenate([self.requests, other.requests])[-MOST_REQUESTS:],
            num_requests=self.num_requests + other.num_requests,
            squares=tuple(ours + theirs for ours, theirs in zip(self.squares, other.squares, strict=True)),
            timed=tuple(ours + theirs for ours, theirs in zip(self.timed, other.timed, strict=True)),
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
        text = f", past text {self.text_alpha:.3f}" if self.text_examined else ""
        tokens = f"{self.block_efficiency:.2f} tokens per target forward"
        rate = "" if self.tokens_per_second is None else f", {self.tokens_per_second:.1f} tokens per second"
        speedup = "" if self.speedup is None else f" ({self.speedup:.2f} times the target alone)"
        return f"alpha {self.alpha:.3f}{interval}{text}, {tokens}{rate}{speedup}, {requests}"

    def plot(self, window: int | None = None) -> Any:
        """
        A `matplotlib.figure.Figure` of alpha over the newest 1,024 requests: notebooks show it, `savefig` writes it.

        Args:
            window (`int`, *optional*): Requests that a point pools; a number that suits their number by default.
        """
        return alpha_figure(self.requests, window, last=self.num_requests)

    def _counts(self) -> dict[str, Any]:
        more = ("accepted_length_histogram", "num_requests")
        return {name: getattr(self, name) for name in (*_COUNTS, *_TEXT_COUNTS, *more)}

    def to_dict(self, *, derived: bool = True) -> dict[str, Any]:
        """A form that `json.dumps` takes, for reports and for `from_dict`: the counts, the requests, and, unless
        `derived` is `False`, what follows from them (`alpha`, `alpha_interval`, `block_efficiency`; where rounds were
        timed, `tokens_per_second`, `speedup`; `None` where undefined)."""
        histogram = {str(k): n for k, n in self.accepted_length_histogram.items()}
        found = self._counts() | {"accepted_length_histogram": histogram, "requests": self.requests.tolist()}
        found["squares"] = list(self.squares)
        if derived:
            found["alpha"] = self.alpha if self.examined else None
            found["alpha_interval"] = None if math.isnan(self.alpha_interval[0]) else list(self.alpha_interval)
            found["text_alpha"] = self.text_alpha if self.text_examined else None
            found["block_efficiency"] = self.block_efficiency if self.target_forwards else None
            if any(self.timed):
                found |= {"tokens_per_second": self.tokens_per_second, "speedup": self.speedup}
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AcceptanceStats:
        """The stats that `to_dict` was called on."""
        requests = np.array(data["requests"] or np.zeros((0, 2), dtype=np.int64))
        texts = {name: data.get(name, 0) for name in _TEXT_COUNTS}
        return cls(
            **{name: data[name] for name in (*_COUNTS, "accepted_length_histogram")}, requests=requests, **texts,
            num_requests=data.get("num_requests", -1), squares=tuple(data.get("squares", ())),
        )  # fmt: skip


def alpha_gain_interval(before: AcceptanceStats, after: AcceptanceStats) -> tuple[float, float]:
    """
    95% interval of `after.alpha - before.alpha`, paired by request, which cancels how hard the requests are. Of more
    than 1,024 requests, how much they differ is known from the newest.

    Args:
        before (`AcceptanceStats`): For instance the static draft.
        after (`AcceptanceStats`): Another draft on the same requests, in the same order.

    Raises:
        ConfigError: the numbers of requests differ.
    """
    n = before.num_requests
    if n != after.num_requests:
        raise ConfigError(
            "the two stats must be of the same requests in the same order, "
            f"got {before.num_requests} and {after.num_requests} requests"
        )
    if not before.examined or not after.examined:
        return math.nan, math.nan
    _, error = paired_gain([before], [after])
    return _interval(after.alpha - before.alpha, error * math.sqrt(len(before.requests) / n), n, -1.0)


def paired_gain(before: Sequence[AcceptanceStats], after: Sequence[AcceptanceStats]) -> tuple[float, float]:
    """
    Alpha gained from `before` to `after`, and its standard error: both of the same requests in the same order, so that
    how hard they are cancels (linearized ratio estimator). `nan` where nothing was examined; the error is infinite for
    fewer than two requests.
    """
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


def student(z: float, n: int) -> float:
    """Standard errors that are as rare over `n` requests as `z` are over many, as few requests give an error that is
    often too small: Student's quantile, by Wallace's approximation."""
    freedom = n - 1
    scaled = z * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(scaled * scaled / freedom))


def _interval(value: float, error: float, n: int, least: float) -> tuple[float, float]:
    """95% interval of a value from `least` to 1, by its standard error over `n` requests; `nan` where it has none."""
    if n < 2 or math.isnan(error):
        return math.nan, math.nan
    width = student(NORMAL, n) * error
    return max(value - width, least), min(value + width, 1.0)


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
        before, after, *_ = self.sides.values()
        gain, error = paired_gain(before, after) if self.domains else (math.nan, math.nan)
        return _interval(gain, error, len(self.domains), -1.0)

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
    return {name: value for name, value in stats.to_dict().items() if name not in ("requests", "squares")}


class Tally:
    """Acceptance of the requests served, by the domain of the request; may be used from several threads. Domains
    beyond the first 1,024 are counted as requests without one."""

    def __init__(self) -> None:
        self.requests = 0
        self._by_domain: dict[str | None, AcceptanceStats] = {}
        self._recent = AcceptanceStats()
        self._lock = threading.Lock()

    def add(self, domain: str | None, stats: AcceptanceStats) -> None:
        """Count one request."""
        with self._lock:
            self.requests += 1
            domain = domain if domain in self._by_domain or len(self._by_domain) < MOST_DOMAINS else None
            self._by_domain[domain] = self._by_domain.get(domain, AcceptanceStats()) + stats
            self._recent = self._recent + stats

    def by_domain(self) -> dict[str | None, AcceptanceStats]:
        """Since the last reset."""
        with self._lock:
            return dict(self._by_domain)

    def total(self) -> AcceptanceStats:
        """All domains together, since the last reset."""
        return sum(self.by_domain().values(), AcceptanceStats())

    def take_recent(self) -> tuple[int, AcceptanceStats]:
        """The number of all requests, and the stats of those since the last call."""
        with self._lock:
            recent, self._recent = self._recent, AcceptanceStats()
            return self.requests, recent

    def reset(self) -> None:
        """Count stats from zero again; the number of requests goes on."""
        with self._lock:
            self._by_domain.clear()
            self._recent = AcceptanceStats()

    def state(self) -> dict[str, Any]:
        """Ready for JSON."""
        with self._lock:
            requests, stats = self.requests, dict(self._by_domain)
        return {"requests": requests, "stats": [[domain, s.to_dict(derived=False)] for domain, s in stats.items()]}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        with self._lock:
            self.requests = int(state["requests"])
            self._by_domain = {domain: AcceptanceStats.from_dict(stats) for domain, stats in state["stats"]}
            self._recent = AcceptanceStats()
