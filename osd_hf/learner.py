"""The learner: takes served requests in, teaches each draft from its own, and lets through the gate what serves."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate import Accelerator

from osd_hf.config import OnlineConfig
from osd_hf.copies import FALLBACK_K
from osd_hf.drafts import DomainDrafts
from osd_hf.errors import StateError
from osd_hf.forks import in_child, renewing
from osd_hf.gate import DROPPED_IN_A_ROW, WATCHED, Gate, GateDecision
from osd_hf.metrics import AcceptanceStats
from osd_hf.records import Trace
from osd_hf.replay import replay_each
from osd_hf.schedule import DutyCycle
from osd_hf.snapshots import Snapshot, is_finite
from osd_hf.updater import Updater, UpdateReport, finish

__all__ = ["Learner", "Lesson"]

logger = logging.getLogger(__name__)

MOST_DECISIONS = 4096
Work = Generator[None, None, UpdateReport]


@dataclass
class Lesson:
    """What one draft has before it: requests not taken in yet, requests to be judged by, and how many are waiting."""

    domain: str | None
    gate: Gate = field(default_factory=Gate)
    pending: deque[Trace] = field(default_factory=deque)
    requests_waiting: int = 0
    # What the version that serves makes of held-back requests; what the one before it, the draft as it was, and it
    # itself made of those that it has served.
    serving_scores: dict[Trace, tuple[int, AcceptanceStats]] = field(default_factory=dict)
    compared: list[tuple[AcceptanceStats, AcceptanceStats, AcceptanceStats]] = field(default_factory=list)
    looked_at: set[Trace] = field(default_factory=set)  # held-back requests: what is at fault in them is known


class Learner:
    """
    Teaches the drafts of a [`DomainDrafts`]. Requests may come in from any thread; one thread at a time may work.

    Args:
        drafts (`DomainDrafts`):
            That serve and learn.
        config (`OnlineConfig`):
            The rule.
        accelerator (`Accelerator`, *optional*):
            Runs backward and step.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`):
            In seconds, for the duty cycle.
    """

    def __init__(
        self,
        drafts: DomainDrafts,
        config: OnlineConfig,
        accelerator: Accelerator | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.drafts = drafts
        self.config = config
        self.accelerator = accelerator or Accelerator(device_placement=False)
        self.duty_cycle = DutyCycle(config.max_duty_cycle, clock)
        self.decisions: deque[GateDecision] = deque(maxlen=MOST_DECISIONS)
        self.is_paused = False
        self.lessons: dict[str | None, Lesson] = {}
        self._lock = threading.Lock()
        in_child(self, renewing(_lock=threading.Lock))
        self._work: tuple[str | None, Work] | None = None
        self._spent = 0.0
        self.seconds = 0.0  # of work, over all updates
        self._scored_at_once = 1 if config.update_strategy == "idle" else 32
        if not drafts.per_domain:
            self.lessons[None] = Lesson(None)
            self.updater(None)

    def updater(self, domain: str | None) -> Updater:
        """What steps for a domain's draft."""
        return self.drafts.updater(domain, self.accelerator)

    @property
    def set_aside(self) -> Counter[str]:
        """Requests that made learning fail and are not learned from any more, over all drafts, by reason."""
        return sum((self.updater(domain).set_aside.counts.copy() for domain in self.drafts.learning), Counter())

    # --- requests ---------------------------------------------------------------------------------------------------

    def observe(self, domain: str | None, trace: Trace) -> None:
        """Take in one served request of the draft of a domain."""
        if not (len(trace) and trace.num_kept and self.drafts.admit(domain)):
            return
        key = self.drafts.key(domain)
        with self._lock:
            lesson = self.lessons.setdefault(key, Lesson(key))
            lesson.requests_waiting += 1
            to_learn = lesson.gate.hold_back(trace) if self.config.gate else trace
            if to_learn is not None:
                lesson.pending.append(to_learn)
            if len(lesson.pending) > self.config.buffer_size:  # updates come by hand, or learning is paused
                lesson.pending.popleft()
            if self.config.gate and trace.draft_version == self.drafts.serving_version(key):
                lesson.gate.served.append(trace)

    def due(self) -> Lesson | None:
        """Whose update should begin now; `None` while learning rests, is paused, or waits for requests."""
        return None if self.duty_cycle.rest_seconds() > 0 else self._due()

    def _due(self) -> Lesson | None:
        if self.is_paused or self.config.update_strategy == "manual":
            return None
        with self._lock:
            most = max(self.lessons.values(), key=lambda lesson: lesson.requests_waiting, default=None)
            return most if most is not None and most.requests_waiting >= self.config.update_interval else None

    def fullest(self) -> str | None:
        """The domain whose draft has the most requests waiting; `None` where all share one, or none has any."""
        with self._lock:
            most = max(self.lessons.values(), key=lambda lesson: lesson.requests_waiting, default=None)
            return None if most is None else most.domain

    def has_work(self) -> bool:
        """Whether there is a micro-step to take, now or behind the rest that learning has to take."""
        return not self.is_paused and (self._work is not None or self._due() is not None)

    # --- work -------------------------------------------------------------------------------------------------------

    def step(self) -> UpdateReport | None:
        """One micro-step of the update under way, or of the one that is due; its report where that was the last."""
        if self._work is None:
            lesson = self.due()
            if lesson is None:
                return None
            self._work, self._spent = (lesson.domain, self._update(lesson.domain, None)), 0.0
        domain, work = self._work
        started = time.perf_counter()
        try:
            next(work)
        except StopIteration as done:
            self._work = None
            report: UpdateReport = done.value
            return replace(report, seconds=self._spent + time.perf_counter() - started)
        except BaseException:
            self._work = None
            raise
        finally:
            self.seconds += time.perf_counter() - started
        self._spent += time.perf_counter() - started
        self._pace(domain)
        return None

    def update(self, domain: str | None = None, steps: int | None = None) -> UpdateReport:
        """One update of a draft, at once; that of an update under way comes first."""
        self.finish()
        started = time.perf_counter()
        try:
            report = finish(self._update(domain, steps))
            return replace(report, seconds=time.perf_counter() - started)
        finally:
            self.seconds += time.perf_counter() - started
            self.duty_cycle.worked(time.perf_counter() - started)

    def finish(self) -> None:
        """End the update under way, if there is one."""
        if self._work is not None:
            (_, work), self._work = self._work, None
            finish(work)

    def abandon(self) -> None:
        """Give the update under way up; what it was learning from stays."""
        if self._work is not None:
            (_, work), self._work = self._work, None
            work.close()

    def start_over(self) -> None:
        """Learn on from the versions that serve; what the learners themselves hold is not to be trusted."""
        self._work = None
        for domain in self.drafts.learning:
            self.updater(domain).restart(self.drafts.serving_snapshot(domain))

    def _pace(self, domain: str | None) -> None:
        """Cut backward passes into parts that take about as long as an arriving request may wait."""
        updater, limit = self.updater(domain), self.config.micro_step_seconds
        seconds, updater.backward_seconds = updater.backward_seconds, None
        if seconds is None:
            return
        if seconds > limit:
            updater.micro_batch = max(updater.micro_batch // 2, 1)
        elif seconds < limit / 3:
            updater.micro_batch = min(updater.micro_batch + 1, self.config.batch_size)

    def _update(self, domain: str | None, steps: int | None) -> Work:
        with self._lock:
            lesson = self.lessons.setdefault(domain, Lesson(domain))
            lesson.requests_waiting = 0  # what fails is tried again after an interval, not at every request
        updater = self.updater(domain)
        for _ in range(len(lesson.pending)):  # those that arrive meanwhile are for the next update
            with self._lock:
                trace = lesson.pending.popleft() if lesson.pending else None
            if trace is not None:
                updater.observe(trace)
                yield
        yield from self._watch(lesson)
        report = yield from updater.micro_steps(steps)
        report = replace(report, domain=domain, version=self.drafts.serving_version(domain))
        if not report.steps and not report.dropped_steps:
            return report
        if report.steps:
            version, snapshot = self.drafts.candidate(domain)
            decision = yield from self._judge(lesson, version, snapshot)
        else:  # no version has come of it
            version, snapshot = self.drafts.version + 1, updater.snapshot()
            serving = self.drafts.serving_version(domain)
            reason = f"none of {report.dropped_steps} steps had a finite loss and gradient"
            decision = GateDecision("dropped", version, serving, domain, reason)
        gate = lesson.gate
        gate.dropped = gate.dropped + 1 if decision.outcome == "dropped" else 0
        if decision.outcome == "promoted":
            self._serve(lesson, version, snapshot)
        elif gate.dropped >= DROPPED_IN_A_ROW or not is_finite(snapshot):
            gate.dropped = 0
            updater.restart(self.drafts.serving_snapshot(domain))
        self._decided(decision)
        set_aside = dict(Counter(report.set_aside) + Counter(updater.set_aside.take_new()))
        version = self.drafts.serving_version(domain)
        return replace(report, version=version, decision=decision, set_aside=set_aside)

    def _serve(self, lesson: Lesson, version: int, snapshot: Snapshot) -> None:
        self.drafts.promote(lesson.domain, version, snapshot)
        self._begin_watching(lesson, version)

    def _begin_watching(self, lesson: Lesson, version: int) -> None:
        """Another version serves: only what it has served itself, since a moment ago, says something about it."""
        served = lesson.gate.served
        with self._lock:
            kept = [trace for trace in served if trace.draft_version == version]
            served.clear()
            served.extend(kept)
        lesson.compared.clear()
        lesson.serving_scores.clear()

    def _decided(self, decision: GateDecision) -> None:
        self.decisions.append(decision)
        level = logging.WARNING if decision.outcome == "rolled back" else logging.INFO
        whose = "" if decision.domain is None else f" of {decision.domain!r}"
        logger.log(level, "Draft version %d%s %s: %s.", decision.version, whose, decision.outcome, decision.reason)

    def _judge(self, lesson: Lesson, version: int, snapshot: Snapshot) -> Generator[None, None, GateDecision]:
        serving, domain = self.drafts.serving_version(lesson.domain), lesson.domain
        if not is_finite(snapshot):
            return GateDecision("dropped", version, serving, domain, "its weights are not finite")
        if not self.config.gate:
            return GateDecision("promoted", version, version, domain, "there is no gate")
        held_back = yield from self._accepted(lesson, lesson.gate.held_back)
        scores = lesson.serving_scores
        unknown = [t for t in held_back if t not in scores or scores[t][0] != serving]
        with self.drafts.lease(domain) as draft:
            found = yield from self._scored(lesson, draft.model, unknown)
        scores.update({t: (serving, s) for t, s in zip(unknown, found, strict=True) if s is not None})
        for gone in scores.keys() - set(held_back):
            del scores[gone]
        after = yield from self._scored(lesson, self.drafts.tried(snapshot), [t for t in held_back if t in scores])
        held_back = [t for t in held_back if t in scores]
        judged = [(t, scores[t][1], a) for t, a in zip(held_back, after, strict=True) if a is not None]
        yield from self._accepted(lesson, lesson.gate.held_back)
        sides: Any = zip(*judged, strict=True) if judged else ((), (), ())
        return lesson.gate.judge(version, serving, domain, *(list(side) for side in sides))

    def _accepted(self, lesson: Lesson, traces: Sequence[Trace]) -> Generator[None, None, list[Trace]]:
        """The traces that can be learned from; the others are let go, wherever the lesson has them. Yields after each
        that is looked at for the first time: all of its rows are read then, and they never change."""
        updater, gate = self.updater(lesson.domain), lesson.gate
        with self._lock:
            found = list(traces)
        for trace in found:
            if trace not in lesson.looked_at:
                updater.accepts(trace)
                lesson.looked_at.add(trace)
                yield
        with self._lock:
            lesson.looked_at.intersection_update(gate.held_back)
        accepted = [trace for trace in found if trace not in updater.set_aside]
        if len(accepted) < len(found):
            with self._lock:
                for kept in (gate.held_back, gate.served, lesson.pending):
                    for trace in [trace for trace in kept if trace in updater.set_aside]:
                        kept.remove(trace)
            updater.forget_set_aside()
        return accepted

    def _watch(self, lesson: Lesson) -> Generator[None, None, None]:
        """Whether the version that serves is accepted as well, on what it has served, as the one before it and as the
        draft before it learned anything."""
        domain, version = lesson.domain, self.drafts.serving_version(lesson.domain)
        previous = self.drafts.previous(domain)
        if not self.config.gate or version == 0:
            return
        with self._lock:  # what arrives from now on is for the next time
            served = list(lesson.gate.served)
            lesson.gate.served.clear()
        served = yield from self._accepted(lesson, served)
        # A fixed number of drafted tokens makes what happened and what is replayed the same kind of figure.
        if isinstance(self.config.num_assistant_tokens, int) and not any(
            t.is_sampled or t.sampling.get("processors") or "num_assistant_tokens" in t.sampling for t in served
        ):
            now: list[AcceptanceStats | None] = [AcceptanceStats.from_trace(t) for t in served]
        else:
            with self.drafts.lease(domain) as draft:
                now = yield from self._scored(lesson, draft.model, served)
        as_it_was = yield from self._scored(lesson, self.drafts.tried(self.drafts.original(domain)), served)
        before = as_it_was
        if previous is not None and previous[0] != 0:
            before = yield from self._scored(lesson, self.drafts.tried(previous[1]), served)
        compared = [
            (b, o, n) for b, o, n in zip(before, as_it_was, now, strict=True) if b is not None and o is not None
            and n is not None
        ]  # fmt: skip
        lesson.compared = [*lesson.compared, *compared][-WATCHED:]
        sides = [[row[side] for row in lesson.compared] for side in range(3)]
        decision = None
        if previous is not None:
            decision = lesson.gate.regressed(version, previous[0], domain, sides[0], sides[2])
        # Traffic of another kind: what was learned is worse there than nothing.
        to_original = lesson.gate.regressed(version, 0, domain, sides[1], sides[2])
        if to_original is not None and (decision is None or _mean(sides[1]) > _mean(sides[0])):
            decision = to_original
        if decision is not None:
            self.updater(domain).restart(self.drafts.roll_back(domain, decision.serving))
            self._begin_watching(lesson, decision.serving)
            self._decided(decision)

    def _scored(
        self, lesson: Lesson, draft: Any, traces: Sequence[Trace]
    ) -> Generator[None, None, list[AcceptanceStats | None]]:
        """What a draft makes of each trace; `None` of one that cannot be replayed and was set aside."""
        updater, k = self.updater(lesson.domain), self.config.num_assistant_tokens
        scores: list[AcceptanceStats | None] = []
        for first in range(0, len(traces), self._scored_at_once):
            part = traces[first : first + self._scored_at_once]
            scores += yield from updater.set_aside.isolate(
                lambda those: replay_each(draft, those, k if isinstance(k, int) else FALLBACK_K),
                part, updater.readable,
            )  # fmt: skip
            yield
        if None in scores:
            updater.forget_set_aside()
        return scores

    # --- keeping ----------------------------------------------------------------------------------------------------

    def lesson_states(self) -> list[dict[str, Any]]:
        """One state for each draft that learns or is about to: its requests by what they are for, counts, and the
        state of its learner (`None` before its first update)."""
        with self._lock:
            lessons = list(self.lessons.values())
        states = []
        for lesson in lessons:
            updater = self.updater(lesson.domain) if lesson.domain in self.drafts.learning else None
            with self._lock:
                traces = {"held_back": list(lesson.gate.held_back), "pending": list(lesson.pending)}
                if updater is not None:
                    traces |= {"waiting": updater.waiting(), "replayed": list(updater.buffer)}
                states.append(
                    {
                        "domain": lesson.domain,
                        "requests_waiting": lesson.requests_waiting,
                        "observed": lesson.gate.observed,
                        "dropped": lesson.gate.dropped,
                        "seen": [] if updater is None else list(updater.buffer.seen.items()),
                        "traces": traces,
                        "updater": None if updater is None else updater.state_dict(),
                        "set_aside": None if updater is None else updater.set_aside.state_dict(),
                    }
                )
        return states

    def load_states(self, drafts: dict[str, Any], states: Sequence[dict[str, Any]]) -> None:
        """Go on from what was saved; raises StateError, with nothing changed, where it belongs to another draft."""
        if any(state["domain"] is None for state in states) == self.drafts.per_domain:
            saved = "one shared draft" if self.drafts.per_domain else "drafts per domain"
            raise StateError(f"The session is one of {saved}. Load it with a router, or without, as it was saved.")
        for trace in (t for state in states for traces in state["traces"].values() for t in traces):
            self._check_width(trace)
        before, admitted = self.drafts.learning, self.drafts.domains
        learners = [(state, self.updater(state["domain"])) for state in states if state["updater"] is not None]
        try:
            for state, updater in learners:
                updater.check_state(state["updater"])
                updater.check_traces([t for traces in state["traces"].values() for t in traces])
            self.drafts.load_state_dict(drafts)
        except StateError:
            self.drafts.forget(self.drafts.learning - before, admitted)
            raise
        self.abandon()
        self.drafts.forget(before - {state["domain"] for state, _ in learners}, self.drafts.domains)
        for state, updater in learners:
            updater.load_state_dict(state["updater"])
            updater.set_aside.load_state_dict(state.get("set_aside"))
            kept = {group: [t for t in traces if updater.accepts(t)] for group, traces in state["traces"].items()}
            state["traces"] = kept
            updater.buffer.restore(kept["replayed"], state["seen"])
            updater.new.clear()
            updater.new.extend(kept["waiting"])
        with self._lock:
            self.lessons = {state["domain"]: self._lesson(state) for state in states}

    def _check_width(self, trace: Trace) -> None:
        """Refuse a saved trace that those to come could not be learned from together with."""
        kept = self.config.num_logprobs
        coming = 0 if kept is None or kept >= trace.vocab_size else kept
        if len(trace) and trace.num_kept and trace.top_ids.shape[1] != coming:
            raise StateError(
                f"The requests of the session keep {trace.top_ids.shape[1] or 'all'} entries per position, this "
                f"assistant {coming or 'all'}. Set the `num_logprobs` that they were captured with."
            )

    @staticmethod
    def _lesson(state: dict[str, Any]) -> Lesson:
        lesson = Lesson(state["domain"], requests_waiting=int(state["requests_waiting"]))
        lesson.gate.observed = int(state["observed"])
        lesson.gate.dropped = int(state["dropped"])
        lesson.gate.held_back.extend(state["traces"]["held_back"])
        lesson.pending.extend(state["traces"]["pending"])
        return lesson


def _mean(stats: Sequence[AcceptanceStats]) -> float:
    return sum(stats, AcceptanceStats()).alpha
