"""The learner: takes served requests in, teaches each draft from its own, and lets through the gate what serves."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
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
        with self._lock:
            pending = [lesson.pending.popleft() for _ in range(len(lesson.pending))]
        for trace in pending:
            updater.observe(trace)
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
        return replace(report, version=self.drafts.serving_version(domain), decision=decision)

    def _serve(self, lesson: Lesson, version: int, snapshot: Snapshot) -> None:
        self.drafts.promote(lesson.domain, version, snapshot)
        with self._lock:
            lesson.gate.served.clear()
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
        with self._lock:
            held_back = list(lesson.gate.held_back)
        scores = lesson.serving_scores
        unknown = [t for t in held_back if t not in scores or scores[t][0] != serving]
        with self.drafts.lease(domain) as draft:
            found = yield from self._scored(draft.model, unknown)
        scores.update({t: (serving, s) for t, s in zip(unknown, found, strict=True)})
        for gone in scores.keys() - set(held_back):
            del scores[gone]
        before = [scores[t][1] for t in held_back]
        after = yield from self._scored(self.drafts.tried(snapshot), held_back)
        return lesson.gate.judge(version, serving, domain, held_back, before, after)

    def _watch(self, lesson: Lesson) -> Generator[None, None, None]:
        """Whether the version that serves is accepted as well, on what it has served, as the one before it and as the
        draft before it learned anything."""
        domain, version = lesson.domain, self.drafts.serving_version(lesson.domain)
        previous = self.drafts.previous(domain)
        if not self.config.gate or version == 0:
            return
        with self._lock:
            served = [lesson.gate.served.popleft() for _ in range(len(lesson.gate.served))]
        # A fixed number of drafted tokens makes what happened and what is replayed the same kind of figure.
        if isinstance(self.config.num_assistant_tokens, int) and not any(
            t.is_sampled or t.sampling.get("processors") or "num_assistant_tokens" in t.sampling for t in served
        ):
            now = [AcceptanceStats.from_trace(t) for t in served]
        else:
            with self.drafts.lease(domain) as draft:
                now = yield from self._scored(draft.model, served)
        as_it_was = yield from self._scored(self.drafts.tried(self.drafts.original(domain)), served)
        before = as_it_was
        if previous is not None and previous[0] != 0:
            before = yield from self._scored(self.drafts.tried(previous[1]), served)
        lesson.compared = [*lesson.compared, *zip(before, as_it_was, now, strict=True)][-WATCHED:]
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
            lesson.compared.clear()
            lesson.serving_scores.clear()
            self._decided(decision)

    def _scored(self, draft: Any, traces: Sequence[Trace]) -> Generator[None, None, list[AcceptanceStats]]:
        k = self.config.num_assistant_tokens
        scores: list[AcceptanceStats] = []
        for first in range(0, len(traces), self._scored_at_once):
            part = traces[first : first + self._scored_at_once]
            scores += replay_each(draft, part, k if isinstance(k, int) else FALLBACK_K)
            yield
        return scores

    # --- keeping ----------------------------------------------------------------------------------------------------

    def lesson_states(self) -> list[dict[str, Any]]:
        """Of each draft that learns or is about to: its requests by what they are for, counts, and its learner's
        state (`None` before its first update)."""
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
            updater.buffer.restore(state["traces"]["replayed"], state["seen"])
            updater.new.clear()
            updater.new.extend(state["traces"]["waiting"])
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
