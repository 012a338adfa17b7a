"""The requests of one draft: those that it learns from, and those that its versions are judged by."""

from __future__ import annotations

import itertools
import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from osd_hf.acceptance import AcceptanceStats
from osd_hf.config import OnlineConfig
from osd_hf.decoding.vocabulary import TrafficVocabulary
from osd_hf.errors import StateError
from osd_hf.learning.draft_choice import Choice
from osd_hf.learning.effort import MIN_EFFORT, Effort
from osd_hf.learning.faults import Parts, SetAside
from osd_hf.trace import Trace
from osd_hf.utils.disk import in_child, renewing

__all__ = ["Lesson", "ReplayBuffer"]

logger = logging.getLogger(__name__)

HOLD_BACK_EVERY = 4  # requests, of which one is held back
HELD_BACK = 16  # newest held-back requests that a version is tried on
WATCHED = 64  # newest requests that a promotion is judged by afterwards
SPARSE = (4, 8, 16)  # requests of which one is compared while effort is below its most; more, while no draft is used
UNUSED = 64  # requests with hardly a token of the draft, after which it is one of the next so many
ODD = 2.0  # standard deviations below what the newest requests were accepted: it and the next few are compared then
NEXT_FEW = 12
LIVE = 32  # requests that this is known from
FEWEST = 8  # examined tokens of one that says something
MOST_DOMAINS = 1024  # with a sample of their own; labels may be anybody's


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

    def clear(self) -> None:
        """Let go of all."""
        self.seen.clear()
        self._kept.clear()

    def __len__(self) -> int:
        return sum(map(len, list(self._kept.values())))

    def __iter__(self) -> Iterator[Trace]:
        return (trace for kept in self._kept.values() for trace in kept)


class Lesson:
    """
    All requests of one draft, that of a domain or (`None`) the shared one. Each is in one place: it is held back to
    judge versions by until a newer one takes its place, then it is pending, then it has been learned from and may be
    replayed. All are of one version of the target: where another one answers, those of the one before are set aside,
    as are the comparisons of drafts that rest on them. With a `target_lag`, those of so many versions before it stay,
    and nothing begins anew. Requests may arrive in any thread, inside the `lock`; one thread learns.
    """

    def __init__(
        self, domain: str | None = None, config: OnlineConfig | None = None, *, target_lag: int = 0,
        min_effort: float = MIN_EFFORT,
    ) -> None:  # fmt: skip
        self.domain = domain
        self.config = config or OnlineConfig()
        self.target_lag = target_lag
        self.lock = threading.Lock()
        in_child(self, renewing(lock=threading.Lock))
        self.target: str | None = None  # its version; `None` where no request has said it
        self.earlier: tuple[str, ...] = ()  # versions before it, newest first, that are learned from still
        self.older = 0  # requests that were set aside as they are another version's
        self._is_stale = self._is_late = False  # all, or some, that the learning thread alone may touch is too old
        self.observed = 0  # requests
        self.requests_waiting = 0  # that have arrived since an update began
        self.rest = 0  # requests that have to arrive before anything is learned, after failures in a row
        self.is_unconfirmed = False  # loaded, perhaps of another version of the target: its next request tells
        # Oldest first; those that the update under way learns from are among them. Updates may never come.
        self.pending: deque[Trace] = deque(maxlen=self.config.buffer_size)
        self.buffer = ReplayBuffer(self.config.buffer_size, np.random.default_rng(self.config.seed))
        self.set_aside = SetAside()
        self.looked_at: set[Trace] = set()  # held back or pending; what is at fault in them is known
        self.held_back: deque[Trace] = deque()
        self.arrived: deque[Trace] = deque(maxlen=WATCHED)  # not yet compared by both drafts
        self.unwatched: deque[Trace] = deque(maxlen=WATCHED)  # compared since somebody looked
        self._live: deque[float] = deque(maxlen=LIVE)  # what was accepted of the draft's tokens, by request
        self._to_compare = 0  # requests that are all compared, as one was accepted much less
        self._unused = 0  # requests since the last one that says something
        self.vocabulary = TrafficVocabulary()  # among which the draft is to choose
        self._counts = self.config.num_assistant_tokens == "auto"
        self.choice = Choice()
        self.effort = Effort(min_effort)
        self.dropped = 0  # versions in a row
        # What the version of that number makes of held-back requests; what the version before it, the draft as it was,
        # and it itself made of those that it has served.
        self.scores: dict[Trace, tuple[int, AcceptanceStats]] = {}
        self.compared: deque[tuple[AcceptanceStats, AcceptanceStats, AcceptanceStats]] = deque(maxlen=WATCHED)

    def observe(self, trace: Trace) -> bool:
        """Take in a request, inside the lock; returns whether it is the first of another version of the target."""
        is_other = self.meet(trace.target)
        self.is_unconfirmed = False
        self.rest = max(self.rest - 1, 0)
        if not self.is_current(trace):
            self.older += 1
            return is_other
        self.requests_waiting += 1
        if trace.is_rescored:  # which says nothing of any draft
            self.pending.append(trace)
            return is_other
        if self._counts:
            self.vocabulary.add(trace)
        to_learn = self.hold_back(trace) if self.config.gate else trace
        if to_learn is not None:
            self.pending.append(to_learn)
        if self.config.gate:
            self.arrived.append(trace)
            served, known = AcceptanceStats.from_trace(trace), np.array(self._live)
            self._to_compare = max(self._to_compare - 1, 0)
            is_unused = served.examined < FEWEST and served.text_accepted >= served.examined
            self._unused = self._unused + 1 if is_unused else 0
            if served.examined >= FEWEST:
                if len(known) >= LIVE / 2 and served.alpha < known.mean() - ODD * known.std():
                    self._to_compare = NEXT_FEW
                self._live.append(served.alpha)
        return is_other

    def meet(self, target: str | None) -> bool:
        """Take in, inside the lock, which version of the target answers from now on; returns whether the lesson begins
        anew with it. What was learned stays: the target is much the same, as a rule."""
        if target is None or target == self.target:
            return False
        if self.target is None:  # requests that do not say are taken for those of the first that does
            self.target = target
            return False
        if not self.target_lag:
            self.renew(target)
            return True
        known = (self.target, *(version for version in self.earlier if version != target))
        self.target, self.earlier, self._is_late = target, known[: self.target_lag], True
        for kept in (self.pending, self.held_back, self.arrived, self.unwatched):
            current = [trace for trace in kept if self.is_current(trace)]
            self.older += len(kept) - len(current)
            kept.clear()
            kept.extend(current)
        return False

    def renew(self, target: str | None) -> None:
        """Set aside, inside the lock, what there is, as the target is another one now: of this version, or (`None`) of
        one that cannot be told."""
        before, self.target, self.earlier = self.target, target, ()
        those = len(self.pending) + len(self.held_back) + len(self.buffer)
        logger.log(
            logging.INFO if self.older else logging.WARNING,
            "Set aside %d requests of an older target%s: it was %s, and is %s now. What the draft has learned stays, "
            "and it learns from new requests.",
            those, "" if self.domain is None else f" of {self.domain!r}", before or "unknown", target or "unknown",
        )  # fmt: skip
        self.older += max(those, 1)
        for kept in (self.pending, self.held_back, self.arrived, self.unwatched, self._live):
            kept.clear()
        self._to_compare = 0
        self.choice.clear()
        self.effort.renew()
        self._is_stale, self.is_unconfirmed = True, False

    def is_current(self, trace: Trace) -> bool:
        """Whether a request is of the version of the target that answers now, or of one that is learned from still;
        one that does not say is taken to be, as long as there was no other one."""
        return trace.target in (self.target, *self.earlier) or (trace.target is None and not self.older)

    def forget_older(self) -> None:
        """Let go of what is of a version of the target that is too old; called by the thread that learns."""
        with self.lock:
            if self._is_stale:
                self.buffer.clear()
                self.compared.clear()
                self.scores.clear()
            elif self._is_late:
                self.buffer.discard({trace for trace in self.buffer if not self.is_current(trace)})
            self._is_stale = self._is_late = False

    def may_wait(self) -> bool:
        """Whether what has arrived need not be compared yet: while little is learned, and nothing is odd, one request
        in a few tells enough."""
        with self.lock:
            return self._is_sparse() and len(self.arrived) < self._stride

    def _is_sparse(self) -> bool:
        if self._to_compare or self.config.update_strategy == "idle":  # whose time is free
            return False
        return self.effort.share < self.effort.most and not self.choice.is_original()

    @property
    def _stride(self) -> int:
        """Requests of which one is compared: fewer where past text proposes all, and either draft would do."""
        return SPARSE[min(self._unused // UNUSED, len(SPARSE) - 1)]

    def hold_back(self, trace: Trace) -> Trace | None:
        """Take in a request; returns the one to learn from in its place: itself, an older one, or none yet."""
        block, place = divmod(self.observed, HOLD_BACK_EVERY)
        self.observed += 1
        # One of each four, not always the same one: traffic may come in turns.
        if place != zlib.crc32(block.to_bytes(8, "little")) % HOLD_BACK_EVERY:
            return trace
        self.held_back.append(trace)
        return self.held_back.popleft() if len(self.held_back) > HELD_BACK else None

    @property
    def update_interval(self) -> int:
        """Requests between two updates, at the present effort."""
        return max(round(self.config.update_interval / self.effort.share), 1)

    @property
    def may_learn(self) -> bool:
        """Whether anything may be learned now by itself."""
        return not (self.rest or self.is_unconfirmed)

    @property
    def is_due(self) -> bool:
        """Whether enough requests have come for an update, and have paid for the one before."""
        return self.may_learn and self.requests_waiting >= self.update_interval and self.effort.is_cheap

    def begin_update(self) -> list[Trace]:
        """The requests that an update begins with; it is due again after an interval, also where it fails."""
        with self.lock:
            self.requests_waiting = 0
            return list(self.pending)

    def still_good(self, traces: Iterable[Trace]) -> list[Trace]:
        """Those that have not been set aside meanwhile; called by the thread that learns."""
        self.forget_older()
        return [trace for trace in traces if self.is_current(trace) and trace not in self.set_aside]

    def end_update(self, learned: Sequence[Trace]) -> None:
        """Requests that were pending, until newer ones took their place perhaps, have been learned from."""
        with self.lock:
            for trace in learned:
                if trace in self.pending:
                    self.pending.remove(trace)
        self.buffer.extend(self.still_good(learned))

    def sound(self, traces: Iterable[Trace], accepts: Callable[[Trace], object]) -> Parts[list[Trace]]:
        """Those of the lesson's traces that `accepts` does not set aside; the others are let go. Yields after each
        that is looked at for the first time: all of its rows, which never change, are read then."""
        with self.lock:
            found = list(traces)
        for trace in found:
            if trace not in self.looked_at:
                accepts(trace)
                self.looked_at.add(trace)
                yield None
        sound = self.still_good(found)
        if len(sound) < len(found):
            self.forget_set_aside()
        with self.lock:
            self.looked_at.intersection_update({*self.held_back, *self.pending})
        return sound

    def forget_set_aside(self) -> None:
        """Let go of requests that were set aside meanwhile."""
        with self.lock:
            for kept in (self.pending, self.held_back, self.arrived, self.unwatched):
                for trace in [trace for trace in kept if trace in self.set_aside]:
                    kept.remove(trace)
        self.buffer.discard(self.set_aside)

    def take_arrived(self) -> tuple[list[Trace], int]:
        """What of that which has arrived since the last call is to be compared, and how many requests each of it
        stands for: where one in a few is enough the newest, and where one was odd the newest few."""
        self.forget_older()
        arrived = self._take(self.arrived)
        with self.lock:
            if self._is_sparse():
                return arrived[-1:], len(arrived)
            return arrived[-SPARSE[0] :] if self._to_compare else arrived, 1

    def take_unwatched(self) -> list[Trace]:
        """What has been compared since the last call."""
        return self._take(self.unwatched)

    def _take(self, traces: deque[Trace]) -> list[Trace]:
        with self.lock:
            taken = list(traces)
            traces.clear()
            return taken

    def compare(
        self, trace: Trace, original: AcceptanceStats, learned: AcceptanceStats, saved_seconds: float | None,
        stands_for: int = 1, could_save: float | None = None,
    ) -> None:  # fmt: skip
        """Take in what the draft as it was and the learned one make of a request that has arrived, and the seconds
        that the learned one has saved, and the best one could, where they are known; it stands for so many."""
        with self.lock:
            if self.is_current(trace):
                self.choice.add(trace, original, learned)
                self.effort.add(original, learned, saved_seconds, stands_for, could_save)
                self.unwatched.append(trace)

    def begin_watching(self, version: int, tried: Mapping[Trace, AcceptanceStats]) -> None:
        """Another version serves: only requests that it has not learned from say something about it, those that it was
        `tried` on and those that it has served, since a moment ago perhaps."""
        with self.lock:
            for trace, stats in tried.items():
                self.choice.promoted(trace, stats)
            self.unwatched.clear()
            kept = [trace for trace in self.arrived if trace.draft_version == version]
            self.arrived.clear()
            self.arrived.extend(kept)
        self.compared.clear()
        self.scores.clear()

    def check_width(self, traces: Sequence[Trace]) -> None:
        """Refuse traces that do not keep as many entries per row as those already there; raises StateError."""
        with self.lock:
            known = [*itertools.islice(self.pending, 1), *itertools.islice(self.buffer, 1)]
        widths = {t.top_ids.shape[1] for t in (*traces, *known) if len(t) and t.num_kept}
        if len(widths) > 1:
            raise StateError(
                f"Traces keep {' and '.join(str(w or 'all') for w in sorted(widths))} entries per position; a learner "
                "takes one width. Use the `num_logprobs` that they were captured with."
            )

    def state_dict(self) -> dict[str, Any]:
        """Counts and requests by what they are for; all is ready for JSON but the traces."""
        self.forget_older()
        with self.lock:
            places = {trace: i for i, trace in enumerate(self.held_back)}
            traces = {"held_back": list(self.held_back), "pending": list(self.pending), "replayed": list(self.buffer)}
            return {
                "domain": self.domain,
                "target": [self.target, *self.earlier, self.older],
                "requests_waiting": self.requests_waiting,
                "observed": self.observed,
                "dropped": self.dropped,
                "choice": self.choice.state_dict(places),
                "effort": self.effort.state_dict(),
                "seen": list(self.buffer.seen.items()),
                "traces": traces,
                "set_aside": self.set_aside.state_dict(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold the saved requests and counts in place of what is there; what is set aside stays so."""
        traces = state["traces"]
        self.buffer.restore(traces["replayed"], state["seen"])
        with self.lock:
            # Sessions from before say nothing of it.
            self.target, *earlier, self.older = state.get("target", (None, 0))
            self.earlier = tuple(earlier[: self.target_lag])
            self._is_stale, self._is_late, self.is_unconfirmed = False, True, False
            self.requests_waiting, self.observed = int(state["requests_waiting"]), int(state["observed"])
            self.dropped = int(state["dropped"])
            self.effort.renew()
            if self.config.gate:  # without one, nothing says that less would do
                self.effort.load_state_dict(state["effort"])
            self.choice.load_state_dict(state["choice"], traces["held_back"])
            known = [trace for those in traces.values() for trace in those] if self._counts else []
            self.vocabulary.restore(sorted(known, key=lambda trace: trace.created_at_seconds))
            self.arrived.clear()
            self.unwatched.clear()
            for kept, saved in ((self.pending, traces["pending"]), (self.held_back, traces["held_back"])):
                kept.clear()
                kept.extend(saved)
        self.looked_at.clear()
        self.compared.clear()
        self.scores.clear()
