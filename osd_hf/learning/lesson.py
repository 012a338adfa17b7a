"""The requests of one draft: those that it learns from, and those that the gate judges its versions by."""

from __future__ import annotations

import itertools
import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from osd_hf.config import OnlineConfig
from osd_hf.errors import StateError
from osd_hf.learning.faults import SetAside
from osd_hf.metrics import AcceptanceStats
from osd_hf.trace import Trace
from osd_hf.utils.disk import in_child, renewing

__all__ = ["GateDecision", "Lesson", "ReplayBuffer", "judge", "paired_gain", "regressed"]

HOLD_BACK_EVERY = 4  # requests, of which one is held back
HELD_BACK = 16  # newest held-back requests that a version is tried on
WATCHED = 64  # newest served requests that a promotion is judged by afterwards
MOST_DOMAINS = 1024  # with a sample of their own; labels may be anybody's
LEAST_HELD_BACK = 4  # below this, no version is promoted
DROPPED_IN_A_ROW = 8  # before learning starts again: the first steps on few requests often make a draft worse
FELL = 3.0  # standard errors below zero from which a fall is one, not noise
LEAST_SERVED = 8  # below this, no version is rolled back
ROLL_BACK = 4.5  # standard errors, of many requests: it is asked again and again, and must not happen by chance


class ReplayBuffer:
    """
    Requests learned from, a reservoir (Vitter's algorithm R) per domain: each keeps a uniform sample of all requests
    that its domain has had, however long ago; domains beyond the first 1024 share one. When all of them together are
    over the capacity, a random one of the largest is dropped: a domain that went away is still there when it comes
    back.
    """

    def __init__(self, capacity: int, rng: np.random.Generator) -> None:
        self.capacity = capacity
        self.rng = rng
        self.seen: dict[str | None, int] = {}
        self._kept: dict[str | None, list[Trace]] = {}

    def append(self, trace: Trace) -> None:
        """Take in a request; one of the largest domain may have to go for it, or it itself."""
        domain = self._domain(trace)
        kept = self._kept.setdefault(domain, [])
        self.seen[domain] = self.seen.get(domain, 0) + 1
        if len(self) < self.capacity:
            kept.append(trace)
            return
        largest = max(self._kept.values(), key=len)
        # Only where it stays smaller: by turns the largest, domains would let in whatever comes, and forget.
        if len(kept) + 1 < len(largest):
            kept.append(trace)
            largest.pop(int(self.rng.integers(len(largest))))
        else:
            place = int(self.rng.integers(self.seen[domain]))
            if place < len(kept):
                kept[place] = trace

    def _domain(self, trace: Trace) -> str | None:
        """Whose sample a request belongs to; labels beyond the most share that of requests without one."""
        return trace.domain if trace.domain in self.seen or len(self.seen) < MOST_DOMAINS else None

    def extend(self, traces: Iterable[Trace]) -> None:
        """Take in several, in order."""
        for trace in traces:
            self.append(trace)

    def sample(self, n: int) -> list[Trace]:
        """`n` different requests, at most those there are; each as likely as any other."""
        everything = list(self)
        n = min(n, len(everything))
        return [everything[i] for i in self.rng.choice(len(everything), n, replace=False)] if n else []

    def restore(self, traces: Iterable[Trace], seen: Iterable[tuple[str | None, int]]) -> None:
        """Hold what was saved: the requests, and how many each domain had had."""
        self.seen = {domain: int(count) for domain, count in seen}
        self._kept = {domain: [] for domain in self.seen}
        for trace in traces:
            self._kept.setdefault(self._domain(trace), []).append(trace)
        while len(self) > self.capacity:  # from a larger buffer
            largest = max(self._kept.values(), key=len)
            largest.pop(int(self.rng.integers(len(largest))))

    def discard(self, traces: Container[Trace]) -> None:
        """Let go of requests that are among these."""
        for kept in self._kept.values():
            kept[:] = [trace for trace in kept if trace not in traces]

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def __iter__(self) -> Iterator[Trace]:
        return (trace for kept in self._kept.values() for trace in kept)


class Lesson:
    """
    All requests of one draft, that of a domain or (`None`) the shared one. Each is in one place: it is held back to
    judge versions by until a newer one takes its place, then it is pending, then it has been learned from and may be
    replayed. Requests may arrive in any thread, inside the `lock`; one thread learns.
    """

    def __init__(self, domain: str | None = None, config: OnlineConfig | None = None) -> None:
        self.domain = domain
        self.config = config or OnlineConfig()
        self.lock = threading.Lock()
        in_child(self, renewing(lock=threading.Lock))
        self.observed = 0  # requests
        self.requests_waiting = 0  # that have arrived since an update began
        # Oldest first; those that the update under way learns from are among them. Updates may never come.
        self.pending: deque[Trace] = deque(maxlen=self.config.buffer_size)
        self.buffer = ReplayBuffer(self.config.buffer_size, np.random.default_rng(self.config.seed))
        self.set_aside = SetAside()
        self.looked_at: set[Trace] = set()  # held back or pending; what is at fault in them is known
        self.held_back: deque[Trace] = deque()
        self.served: deque[Trace] = deque(maxlen=WATCHED)  # by the version that serves, since somebody looked
        self.dropped = 0  # versions in a row
        # What the version of that number makes of held-back requests; what the version before it, the draft as it was,
        # and it itself made of those that it has served.
        self.scores: dict[Trace, tuple[int, AcceptanceStats]] = {}
        self.compared: deque[tuple[AcceptanceStats, AcceptanceStats, AcceptanceStats]] = deque(maxlen=WATCHED)

    def observe(self, trace: Trace, *, is_served: bool) -> None:
        """Take in a request, inside the lock; `is_served`: by the version that serves now."""
        self.requests_waiting += 1
        to_learn = self.hold_back(trace) if self.config.gate else trace
        if to_learn is not None:
            self.pending.append(to_learn)
        if self.config.gate and is_served:
            self.served.append(trace)

    def hold_back(self, trace: Trace) -> Trace | None:
        """Take in a request; returns the one to learn from in its place: itself, an older one, or none yet."""
        block, place = divmod(self.observed, HOLD_BACK_EVERY)
        self.observed += 1
        # One of each four, not always the same one: traffic may come in turns.
        if place != zlib.crc32(block.to_bytes(8, "little")) % HOLD_BACK_EVERY:
            return trace
        self.held_back.append(trace)
        return self.held_back.popleft() if len(self.held_back) > HELD_BACK else None

    def begin_update(self) -> list[Trace]:
        """The requests that an update begins with; it is due again after an interval, also where it fails."""
        with self.lock:
            self.requests_waiting = 0
            return list(self.pending)

    def still_pending(self, traces: Sequence[Trace]) -> list[Trace]:
        """Those that have not been let go meanwhile."""
        with self.lock:
            there = set(self.pending)
        return [trace for trace in traces if trace in there]

    def end_update(self, learned: Sequence[Trace]) -> None:
        """Requests that were pending have been learned from."""
        learned = self.still_pending(learned)
        with self.lock:
            for trace in learned:
                self.pending.remove(trace)
        self.buffer.extend(learned)

    def sound(self, traces: Iterable[Trace], accepts: Callable[[Trace], object]) -> Generator[None, None, list[Trace]]:
        """Those of the lesson's traces that `accepts` does not set aside; the others are let go. Yields after each
        that is looked at for the first time: all of its rows, which never change, are read then."""
        with self.lock:
            found = list(traces)
        for trace in found:
            if trace not in self.looked_at:
                accepts(trace)
                self.looked_at.add(trace)
                yield
        sound = [trace for trace in found if trace not in self.set_aside]
        if len(sound) < len(found):
            self.forget_set_aside()
        with self.lock:
            self.looked_at.intersection_update({*self.held_back, *self.pending})
        return sound

    def forget_set_aside(self) -> None:
        """Let go of requests that were set aside meanwhile."""
        with self.lock:
            for kept in (self.pending, self.held_back, self.served):
                for trace in [trace for trace in kept if trace in self.set_aside]:
                    kept.remove(trace)
        self.buffer.discard(self.set_aside)

    def take_served(self) -> list[Trace]:
        """What has been served since the last call."""
        with self.lock:
            served = list(self.served)
            self.served.clear()
            return served

    def begin_watching(self, version: int) -> None:
        """Another version serves: only what it has served itself, since a moment ago, says something about it."""
        with self.lock:
            kept = [trace for trace in self.served if trace.draft_version == version]
            self.served.clear()
            self.served.extend(kept)
        self.compared.clear()
        self.scores.clear()

    def check_width(self, traces: Sequence[Trace]) -> None:
        """Refuse traces that do not keep as many entries per row as those already there; raises StateError."""
        known = itertools.chain(itertools.islice(self.pending, 1), itertools.islice(self.buffer, 1))
        widths = {t.top_ids.shape[1] for t in (*traces, *known) if len(t) and t.num_kept}
        if len(widths) > 1:
            raise StateError(
                f"Traces keep {' and '.join(str(w or 'all') for w in sorted(widths))} entries per position; a learner "
                "takes one width. Use the `num_logprobs` that they were captured with."
            )

    def state_dict(self) -> dict[str, Any]:
        """Counts and requests by what they are for; all is ready for JSON but the traces."""
        with self.lock:
            traces = {"held_back": list(self.held_back), "pending": list(self.pending), "replayed": list(self.buffer)}
            return {
                "domain": self.domain,
                "requests_waiting": self.requests_waiting,
                "observed": self.observed,
                "dropped": self.dropped,
                "seen": list(self.buffer.seen.items()),
                "traces": traces,
                "set_aside": self.set_aside.state_dict(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold the saved requests and counts in place of what is there; what is set aside stays so."""
        traces = state["traces"]
        self.buffer.restore(traces["replayed"], state["seen"])
        with self.lock:
            self.requests_waiting, self.observed = int(state["requests_waiting"]), int(state["observed"])
            self.dropped = int(state["dropped"])
            self.served.clear()
            for kept, saved in ((self.pending, traces["pending"]), (self.held_back, traces["held_back"])):
                kept.clear()
                kept.extend(saved)
        self.looked_at.clear()
        self.compared.clear()
        self.scores.clear()


# --- the gate -------------------------------------------------------------------------------------------------------


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


def judge(
    version: int, serving: int, domain: str | None,
    held_back: Sequence[Trace], before: Sequence[AcceptanceStats], after: Sequence[AcceptanceStats],
) -> GateDecision:  # fmt: skip
    """
    Whether a version may serve in place of the one that does, by what each was replayed to make of the held-back
    requests, `before` and `after`.

    It may where its acceptance does not fall, in all and in each label among the requests: in all, the gain has to
    make up for half its own standard error; in a label with requests enough, a fall must not be beyond two. As
    learning goes on meanwhile, what is kept back once costs little.
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
    limit = _student(ROLL_BACK, len(after))
    if math.isnan(gain) or gain + limit * error >= 0:
        return None
    reason = (
        f"served acceptance is {-gain:.3f} below that of version {previous}, more than {limit:.1f} standard errors"
    )
    figures = _figures(before, after, error)
    return GateDecision("rolled back", version, previous, domain, reason, len(after), *figures)


def _student(z: float, n: int) -> float:
    """Standard errors that are as rare over `n` requests as `z` are over many, as few requests give an error that is
    often too small: Student's quantile, by Wallace's approximation."""
    freedom = n - 1
    scaled = z * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(scaled * scaled / freedom))


def _figures(
    before: Sequence[AcceptanceStats], after: Sequence[AcceptanceStats], error: float
) -> tuple[float | None, float | None, float | None]:
    """Both sides' alphas and the error, `None` for what is no number."""
    alphas = (sum(stats, AcceptanceStats()).alpha for stats in (before, after))
    first, second, third = (float(x) if math.isfinite(x) else None for x in (*alphas, error))
    return first, second, third
