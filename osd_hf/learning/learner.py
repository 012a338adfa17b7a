"""The learner: takes served requests in, teaches each draft from its own, and lets through the gate what serves."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any

from accelerate import Accelerator

from osd_hf.acceptance import AcceptanceStats
from osd_hf.config import OnlineConfig
from osd_hf.errors import StateError
from osd_hf.learning.activations import layers_of
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.faults import Parts
from osd_hf.learning.gate import DROPPED_IN_A_ROW, LEAST_HELD_BACK, GateDecision, judge, regressed
from osd_hf.learning.lesson import HELD_BACK, Lesson
from osd_hf.learning.updater import BACKWARD, Updater, UpdateReport, finish, make_accelerator
from osd_hf.learning.weights import FALLBACK_K, Snapshot, is_finite
from osd_hf.replay import replay_each
from osd_hf.trace import Trace
from osd_hf.utils.yielding import PIECE, between, gives_way
from osd_hf.utils.yielding import clock as turn_clock

__all__ = ["DutyCycle", "Learner"]

logger = logging.getLogger(__name__)

MOST_DECISIONS = 4096
SCORED_AT_ONCE = {"idle": 1, "spread": 4, "interval": 32, "manual": 32}  # requests that are replayed
REPLAY = 0.04  # of an optimizer step, about, that a request's replay is
LEAST_SHARE = 0.2  # optimizer steps: an answer takes at least so much of an update under way
Work = Parts[UpdateReport | None]


class DutyCycle:
    """Rests after work, to keep learning within its share of the time, above 0 and at most 1."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = share
        self.clock = clock
        self._rests_until = -float("inf")

    def worked(self, seconds: float) -> None:
        """Work has just ended that took so long."""
        self._rests_until = max(self._rests_until, self.clock()) + seconds * (1 / self.share - 1)

    def rest_seconds(self) -> float:
        """Until work may go on; 0 where it may now."""
        return max(self._rests_until - self.clock(), 0.0)


class Learner:
    """
    Teaches the drafts of a [`DomainDrafts`]. Requests may come in from any thread; one thread at a time may work.

    Args:
        drafts (`DomainDrafts`): The drafts that serve and learn.
        config (`OnlineConfig`): How to learn.
        accelerator (`Accelerator`, *optional*): Its trackers are told of updates.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`): In seconds, for the duty cycle.
        timer (`Callable[[], float]`, *optional*, defaults to `osd_hf.utils.yielding.clock`):
            In seconds, for what work took; `time.process_time` leaves out what else ran on the machine.
        chooses (`bool`, *optional*, defaults to `True`):
            With a gate, let each request be served by the learned draft or by the draft as it was, whichever was
            better on the last few; `False` where something else serves.
    """

    def __init__(
        self, drafts: DomainDrafts, config: OnlineConfig, accelerator: Accelerator | None = None, *,
        clock: Callable[[], float] = time.monotonic, timer: Callable[[], float] = turn_clock,
        chooses: bool = True,
    ) -> None:  # fmt: skip
        self.drafts, self.config, self._timer = drafts, config, timer
        self.chooses = config.gate and chooses
        self.accelerator = accelerator or make_accelerator(None, config)
        self.duty_cycle = DutyCycle(1.0, clock)
        self.decisions: deque[GateDecision] = deque(maxlen=MOST_DECISIONS)  # oldest first
        self.untold: deque[GateDecision] = deque(maxlen=MOST_DECISIONS)  # to whoever wants to hear of each
        self.is_paused = False
        self.whose: str | None = None  # the domain whose draft the last work was for
        self.seconds = 0.0  # of work, over all updates
        self._saved = 0.0  # seconds that the draft as it was would have needed more
        self._work: tuple[str | None, Work] | None = None
        self._spent = 0.0
        # The progress of the update under way, in optimizer steps: how much is done, and how much is due by now.
        self._done = self._fallen_due = 0.0
        self._whole = config.steps_per_update + 2 * HELD_BACK * REPLAY * config.gate
        self._scored_at_once = SCORED_AT_ONCE[config.update_strategy]
        self._k = config.compared_k or FALLBACK_K
        # Answers wait a second for a part: a replay by a smaller draft takes less, and a copy to stop in some of it.
        self._is_large = sum(p.numel() for p in drafts.base.parameters()) > PIECE
        if not drafts.per_domain:
            self.updater(None)

    def updater(self, domain: str | None) -> Updater:
        """What steps for a domain's draft."""
        return self.drafts.updater(domain)

    @property
    def lessons(self) -> dict[str | None, Lesson]:
        """The requests of each draft, by domain."""
        return self.drafts.lessons

    @property
    def set_aside(self) -> Counter[str]:
        """Requests that made learning fail and are not learned from any more, over all drafts, by reason."""
        return sum((lesson.set_aside.counts.copy() for lesson in self.lessons.values()), Counter())

    # --- requests ---------------------------------------------------------------------------------------------------

    def prefers_original(self, domain: str | None) -> bool:
        """Whether a request of this domain is better served by the draft as it was, going by the last few."""
        lesson = self.lessons.get(self.drafts.key(domain))
        if lesson is None or not self.chooses:
            return False
        with lesson.lock:
            return lesson.choice.is_original()

    def compared(self) -> tuple[AcceptanceStats, AcceptanceStats]:
        """What the drafts as they were and the learned ones make of the last few requests, by replay."""
        before, now = AcceptanceStats(), AcceptanceStats()
        for lesson in list(self.lessons.values()):
            with lesson.lock:
                original, learned = lesson.choice.totals()
            before, now = before + original, now + learned
        return before, now

    @property
    def saved_seconds(self) -> float | None:
        """What serving with the learned drafts has saved, by what the draft as it was makes of the same requests;
        `None` until a round was timed."""
        return None if self.drafts.pacer.round_seconds(self._k) is None else self._saved

    def _saved_by(self, trace: Trace, original: AcceptanceStats, learned: AcceptanceStats) -> float | None:
        """Seconds that one request would have taken longer with the draft as it was: the rounds that it would have
        needed more or, where their number of tokens follows acceptance, what both need for a token; for as many tokens
        as came from the draft, not from past text."""
        pacer, served = self.drafts.pacer, AcceptanceStats.from_trace(trace)
        if not served.drafted or original.examined == 0 or learned.examined == 0:
            return 0.0
        if self.config.num_assistant_tokens == "auto":
            before, after = (pacer.token_seconds(stats.alpha) for stats in (original, learned))
            share = served.accepted / max(served.accepted + served.text_accepted, 1)
            return None if before is None or after is None else len(trace) * (before - after) * share
        seconds = pacer.round_seconds(self._k)
        more = original.target_forwards / learned.target_forwards - 1
        return None if seconds is None else more * len(trace.rounds) * seconds

    def _could_save(self, trace: Trace, original: AcceptanceStats) -> float | None:
        """Seconds that one request would have taken longer with the draft as it was, or with past text, than with a
        draft that is nearly always right and no past text."""
        k = None if self.config.num_assistant_tokens == "auto" else self._k
        return self.drafts.pacer.could_save(len(trace), original.alpha, k) if original.examined else None

    def observe(self, domain: str | None, trace: Trace, seconds: float | None = None) -> None:
        """Take in one served request of the draft of a domain, and the seconds that it took where they are known."""
        if len(trace) and trace.num_kept and self.drafts.admit(domain):
            lesson = self.lessons[self.drafts.key(domain)]
            with lesson.lock:
                is_other = lesson.observe(trace)
                lesson.effort.served(seconds)
            if is_other:
                self.drafts.model_changed(lesson.domain)

    def meet(self, target: str | None) -> None:
        """This version of the target answers from now on, all requests of any draft."""
        for lesson in self.lessons.values():
            with lesson.lock:
                is_other = lesson.meet(target)
            if is_other:
                self.drafts.model_changed(lesson.domain)

    def renew(self, target: str | None) -> None:
        """The target is another one now, of this version where it can be told: nothing from before is learned from any
        more."""
        self.abandon()
        for lesson in self.lessons.values():
            with lesson.lock:
                lesson.renew(target)
            self.drafts.model_changed(lesson.domain)

    def due(self) -> Lesson | None:
        """Whose update should begin now; `None` while learning rests, is paused, or waits for requests or to be asked
        for."""
        must_wait = self.config.update_strategy == "manual" or self.duty_cycle.rest_seconds() > 0
        return None if must_wait else self._due()

    def _due(self) -> Lesson | None:
        if self.is_paused:
            return None
        return self._fullest([lesson for lesson in list(self.lessons.values()) if lesson.is_due])

    def _with_arrived(self) -> Lesson | None:
        """Whose requests the idle thread has not compared yet."""
        is_idle = self.config.gate and self.config.update_strategy == "idle" and not self.is_paused
        lessons = list(self.lessons.values()) if is_idle else ()
        return next((lesson for lesson in lessons if lesson.arrived and lesson.may_learn), None)

    def fullest(self) -> str | None:
        """The domain whose draft has the most requests waiting, by its effort; `None` where all share one, or there is
        none that can learn."""
        fullest = self._fullest([lesson for lesson in self.lessons.values() if not lesson.is_unconfirmed])
        return None if fullest is None else fullest.domain

    @staticmethod
    def _fullest(lessons: Sequence[Lesson]) -> Lesson | None:
        return max(lessons, key=lambda lesson: lesson.requests_waiting * lesson.effort.share, default=None)

    def begins(self) -> bool:
        """Whether the next micro-step is the first of an update."""
        return self._work is None and self.due() is not None

    def has_work(self) -> bool:
        """Whether there is a micro-step to take, now or after the rest that learning has to take."""
        return not self.is_paused and (
            self._work is not None or self._due() is not None or self._with_arrived() is not None
        )

    def pause(self, is_paused: bool) -> None:
        """Begin no update, and take no further step of one under way; with `False`: learn again."""
        self.is_paused = is_paused

    def rest(self, domain: str | None, requests: int) -> None:
        """Learn nothing for a draft until so many more requests of it have come, unless [`~Learner.update`] is called;
        0: learn again."""
        if (lesson := self.lessons.get(domain)) is not None:
            with lesson.lock:
                lesson.rest = requests

    # --- work -------------------------------------------------------------------------------------------------------

    def step(self) -> UpdateReport | None:
        """One micro-step of the work under way, or of comparing what has arrived, or of the update that is due; the
        report of an update where that was the last."""
        if self._work is None:
            if (lesson := self._with_arrived()) is not None:
                self._work = lesson.domain, self._follow(lesson)
            elif (lesson := self.due()) is not None:
                self._work = lesson.domain, self._update(lesson.domain, None)
                self._done = self._fallen_due = 0.0
            else:
                return None
            self._spent = 0.0
        domain, work = self._work
        self.whose = domain
        started = self._timer()
        try:
            self._done += next(work) or 0.0
        except StopIteration as done:
            self._work = None
            report: UpdateReport | None = done.value
            if report is None:
                return None
            return replace(report, seconds=self._spent + self._timer() - started)
        except BaseException:
            self._work = None
            raise
        finally:
            self._took(domain, started)
        self._spent += self._timer() - started
        if self.config.update_strategy == "idle":
            self.updater(domain).pace()
        return None

    def after_answer(self) -> UpdateReport | None:
        """Take the work that falls to an answer: what both drafts make of it, and its share of an update or, unless
        updates are spread, the whole of one that is due; none where updates are asked for. Returns the report of an
        update that has ended."""
        return finish(self.share())

    def share(self) -> Work:
        """[`~Learner.after_answer`] in parts; whoever stops in between leaves the rest to the next answer."""
        spent = 0.0
        try:
            for lesson in list(self.lessons.values()) if self.config.gate and not self.is_paused else ():
                if not lesson.may_learn:
                    continue
                self.whose, started = lesson.domain, self._timer()
                try:
                    finish(self._follow(lesson))
                finally:
                    spent += self._took(lesson.domain, started, compared=True)
                yield None
            if self.config.update_strategy == "spread":
                return (yield from self._advance())
            due = self.due()
            return None if due is None else self.update(due.domain)
        finally:  # not before, or learning would always have to rest from the comparing
            self.duty_cycle.worked(spent)

    def _advance(self) -> Work:
        """Take an answer's share of an update, in whole micro-steps. All requests between two updates have the same
        share. Returns the report if the update has ended."""
        if self.is_paused or self.duty_cycle.rest_seconds() > 0:
            return None
        if self._due() is None and (self._work is None or not self.lessons[self._work[0]].effort.is_cheap):
            return None  # another draft does not wait until this one's requests have paid
        started, report = self._timer(), None
        try:
            if self._work is None:
                report = self.step()  # begins
            if self._work is not None:  # traffic may have changed since then
                share = self._whole / self.lessons[self._work[0]].update_interval
                self._fallen_due += max(share, LEAST_SHARE)
            while self._work is not None and self._is_behind():
                yield None
                report = self.step()
        finally:
            self.duty_cycle.worked(self._timer() - started)
        return report

    def _is_behind(self) -> bool:
        """Whether the next part of the update under way is due. The last request takes all that is left."""
        is_last = self._fallen_due > self._whole - 1e-6
        return is_last or self._fallen_due - self._done > BACKWARD / 2

    def update(self, domain: str | None = None, steps: int | None = None) -> UpdateReport:
        """One update of a draft, at once; that of an update under way comes first."""
        started = self._timer()
        try:
            if self._work is not None:
                (self.whose, work), self._work = self._work, None
                finish(work)
            self.whose = domain
            report = finish(self._update(domain, steps))
            return replace(report, seconds=self._timer() - started)
        finally:
            self.duty_cycle.worked(self._took(domain, started))

    def _took(self, domain: str | None, started: float, *, compared: bool = False) -> float:
        """Work for a draft has ended, or paused, that began then; the seconds of it."""
        seconds = self._timer() - started
        self.seconds += seconds
        has_price = self.config.gate and self.config.update_strategy != "idle"  # time that nobody needs is free
        if has_price and (lesson := self.lessons.get(domain)) is not None:
            with lesson.lock:
                lesson.effort.took(seconds, compared=compared)
        return seconds

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

    def _update(self, domain: str | None, steps: int | None) -> Parts[UpdateReport]:
        lesson = self.lessons[domain]
        newest = lesson.begin_update()  # those that arrive meanwhile are for the next update
        updater = self.updater(domain)
        newest = yield from lesson.sound(newest, updater.accepts)
        target = lesson.target
        lesson.check_width(newest)
        yield from self._watch(lesson)
        try:
            report = yield from updater.micro_steps(steps, newest)
        finally:
            if updater.is_torn:
                updater.restart(self.drafts.serving_snapshot(domain))
        report = replace(report, domain=domain, version=self.drafts.serving_version(domain))
        if not report.steps and not report.dropped_steps:
            return report
        if report.steps:
            version, snapshot = self.drafts.candidate(domain)
            decision, tried = yield from self._judge(lesson, version, snapshot)
        else:  # no version has come of it
            version, snapshot = self.drafts.version + 1, updater.snapshot()
            reason = f"none of {report.dropped_steps} steps had a finite loss and gradient"
            decision, tried = GateDecision("dropped", version, report.version, domain, reason), {}
        lesson.dropped = lesson.dropped + 1 if decision.outcome == "dropped" else 0
        if decision.outcome == "promoted":
            self.drafts.promote(domain, version, snapshot, target)
            lesson.begin_watching(version, tried)
        elif lesson.dropped >= DROPPED_IN_A_ROW or not is_finite(snapshot):
            lesson.dropped = 0
            updater.restart(self.drafts.serving_snapshot(domain))
        self._decided(decision)
        set_aside = dict(Counter(report.set_aside) + Counter(updater.set_aside.take_new()))
        version = self.drafts.serving_version(domain)
        return replace(report, version=version, decision=decision, set_aside=set_aside)

    def _decided(self, decision: GateDecision) -> None:
        self.decisions.append(decision)
        self.untold.append(decision)
        level = logging.WARNING if decision.outcome == "rolled back" else logging.INFO
        whose = "" if decision.domain is None else f" of {decision.domain!r}"
        logger.log(level, "Draft version %d%s %s: %s.", decision.version, whose, decision.outcome, decision.reason)

    def _judge(
        self, lesson: Lesson, version: int, snapshot: Snapshot
    ) -> Parts[tuple[GateDecision, dict[Trace, AcceptanceStats]]]:
        """Whether a version may serve, by what it and the one that serves make of the requests held back; and what it
        makes of each of them."""
        domain, updater, scores = lesson.domain, self.updater(lesson.domain), lesson.scores
        serving = self.drafts.serving_version(domain)
        if not is_finite(snapshot):
            return GateDecision("dropped", version, serving, domain, "its weights are not finite"), {}
        if not self.config.gate:
            return GateDecision("promoted", version, version, domain, "there is no gate"), {}
        held_back = yield from lesson.sound(lesson.held_back, updater.accepts)
        newest = [trace for trace in held_back if trace.target not in lesson.earlier]
        held_back = newest if len(newest) >= LEAST_HELD_BACK else held_back
        unknown = [t for t in held_back if t not in scores or scores[t][0] != serving]
        with self.drafts.lease(domain) as draft:
            found = yield from self._scored(lesson, draft.model, unknown)
        scores.update({t: (serving, s) for t, s in zip(unknown, found, strict=True) if s is not None})
        for gone in scores.keys() - set(held_back):
            del scores[gone]
        held_back = [t for t in held_back if t in scores]
        found = yield from self._scored(lesson, snapshot, held_back)
        after = {t: s for t, s in zip(held_back, found, strict=True) if s is not None}
        yield from lesson.sound(lesson.held_back, updater.accepts)
        # Another target may answer by now.
        after = {t: s for t, s in after.items() if t in scores and lesson.is_current(t)}
        before = [scores[t][1] for t in after]
        if serving == 0:
            with lesson.lock:  # the first version: nothing has been compared yet
                for trace, original in zip(after, before, strict=True):
                    lesson.choice.add(trace, original, original)
        return judge(version, serving, domain, list(after), before, list(after.values())), after

    def _follow(self, lesson: Lesson) -> Parts[None]:
        """Compare what has arrived and, after as many requests as lie between two updates at full effort, watch: also
        where updates are rare."""
        if lesson.may_wait():
            yield from lesson.sound(lesson.arrived, self.updater(lesson.domain).accepts)
            return
        yield from self._compare(lesson)
        if len(lesson.unwatched) >= self.config.update_interval:
            yield from self._watch(lesson)

    def _compare(self, lesson: Lesson) -> Parts[None]:
        """Score the requests that have arrived by the draft as it was and by the one that serves, for the choice
        between the two."""
        domain, version = lesson.domain, self.drafts.serving_version(lesson.domain)
        arrived, stands_for = lesson.take_arrived()
        if version == 0:
            with lesson.lock:
                for trace in arrived:  # both drafts are one
                    stats = AcceptanceStats.from_trace(trace)
                    lesson.effort.add(stats, stats, 0.0, stands_for, self._could_save(trace, stats))
            return
        if not arrived:
            return
        arrived = yield from lesson.sound(arrived, self.updater(domain).accepts)
        with self.drafts.lease(domain, original=True) as draft:
            originals = yield from self._scored(lesson, draft.model, arrived)
        unknown = [t for t in arrived if t.draft_version != version or not self._is_counted(t)]
        with self.drafts.lease(domain) as draft:
            replayed = yield from self._scored(lesson, draft.model, unknown)
        found = dict(zip(unknown, replayed, strict=True))
        for trace, original in zip(arrived, originals, strict=True):
            learned = found[trace] if trace in found else AcceptanceStats.from_trace(trace)
            if original is not None and learned is not None:
                saved = self._saved_by(trace, original, learned)
                if trace.draft_version == version:
                    self._saved += (saved or 0.0) * stands_for
                lesson.compare(trace, original, learned, saved, stands_for, self._could_save(trace, original))

    def _is_counted(self, trace: Trace) -> bool:
        """Whether what happened is what replay would find: of a greedy request, with a fixed number of drafted
        tokens."""
        is_plain = not (trace.is_sampled or trace.sampling.get("processors"))
        is_usual = "num_assistant_tokens" not in trace.sampling
        return is_plain and is_usual and self._k == self.config.num_assistant_tokens

    def _watch(self, lesson: Lesson) -> Parts[None]:
        """Let an earlier version serve again where the one that serves is accepted less, on what it has served."""
        domain, version = lesson.domain, self.drafts.serving_version(lesson.domain)
        if not self.config.gate or version == 0:
            return
        yield from self._compare(lesson)
        watched = [t for t in lesson.take_unwatched() if lesson.choice.of(t) is not None]
        previous, weights = self.drafts.previous(domain) or (0, {})
        before: list[AcceptanceStats | None] = [None] * len(watched)
        if previous != 0:
            before = yield from self._scored(lesson, weights, watched)
        for trace, earlier in zip(watched, before, strict=True):
            pair = lesson.choice.of(trace)
            if pair is not None and (earlier is not None or previous == 0):
                lesson.compared.append((earlier or pair[0], *pair))
        lesson.forget_older()
        sides = [[row[side] for row in lesson.compared] for side in range(3)]
        # In traffic of another kind, what was learned is worse than nothing.
        falls = [
            regressed(version, previous, domain, sides[0], sides[2]),
            regressed(version, 0, domain, sides[1], sides[2]),
        ]
        decision = max(filter(None, falls), key=lambda fall: fall.alpha_before or 0.0, default=None)
        if decision is not None:
            self.go_back(decision)

    def go_back(self, decision: GateDecision, weights: Snapshot | None = None) -> None:
        """Let the version that a rollback names serve, the one before it, 0, or one of the weights that are given, and
        learn on from it."""
        domain, lesson = decision.domain, self.lessons[decision.domain]
        under_way = self._work is not None and self._work[0] == domain and self._work[1]
        if under_way and getgeneratorstate(under_way) != GEN_RUNNING:
            self.abandon()  # it would go on from what is given up
        self.updater(domain).restart(self.drafts.roll_back(domain, decision.serving, weights))
        lesson.begin_watching(decision.serving, {})
        with lesson.lock:
            lesson.choice.clear()
            lesson.effort.renew()
        self._decided(decision)

    def _scored(self, lesson: Lesson, draft: Any, traces: Sequence[Trace]) -> Parts[list[AcceptanceStats | None]]:
        """What a draft, or a version's weights, make of each trace; `None` for one that cannot be replayed and was set
        aside."""
        updater = self.updater(lesson.domain)
        scores: list[AcceptanceStats | None] = []
        try:
            for first in range(0, len(traces), self._scored_at_once):
                scores += yield from lesson.set_aside.isolate(
                    lambda those: self._replayed(draft, those),
                    traces[first : first + self._scored_at_once],
                    updater.readable,
                )
                yield REPLAY * len(traces[first : first + self._scored_at_once])
        finally:
            self.drafts.end_trial()
        if None in scores:
            lesson.forget_set_aside()
        return scores

    def _replayed(self, draft: Any, traces: Sequence[Trace]) -> list[AcceptanceStats]:
        # One that serves gets no hooks. Asked for each time: between two parts another version may have been tried.
        stops = gives_way() and (self.config.update_strategy == "idle" or self._is_large)
        model = self.drafts.tried(draft) if isinstance(draft, dict) or stops else draft
        with between(layers_of(model) if stops else ()):
            return replay_each(model, traces, self._k)

    # --- keeping ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The drafts and, for each, its requests, counts and learner's state (`None` before its first update)."""
        learning = self.drafts.learning
        lessons = [
            {**lesson.state_dict(), "updater": self.updater(domain).state_dict() if domain in learning else None}
            for domain, lesson in self.lessons.items()
        ]
        return {"drafts": self.drafts.state_dict(), "lessons": lessons}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was saved; raises StateError, with nothing changed, where it belongs to another draft."""
        lessons = state["lessons"]
        if any(saved["domain"] is None for saved in lessons) == self.drafts.per_domain:
            kind = "one shared draft" if self.drafts.per_domain else "drafts per domain"
            raise StateError(f"The session is one of {kind}. Load it with a router, or without, as it was saved.")
        for trace in (t for saved in lessons for traces in saved["traces"].values() for t in traces):
            self._check_width(trace)
        before, admitted = self.drafts.learning, self.drafts.domains
        updaters = {s["domain"]: self.updater(s["domain"]) for s in lessons if s["updater"] is not None}
        try:
            for saved in lessons:
                if saved["updater"] is not None:
                    updaters[saved["domain"]].check_state(saved["updater"])
            self.drafts.load_state_dict(state["drafts"], updaters)
        except StateError:
            self.drafts.forget(self.drafts.learning - before, admitted)
            raise
        self.abandon()
        for saved in lessons:
            lesson, traces = self.lessons[saved["domain"]], saved["traces"]
            if (updater := updaters.get(saved["domain"])) is not None:
                updater.load_state_dict(saved["updater"])
                lesson.set_aside.load_state_dict(saved["set_aside"])
                traces = {group: [t for t in those if updater.accepts(t)] for group, those in traces.items()}
            lesson.load_state_dict({**saved, "traces": traces})

    def take_decisions(self) -> list[GateDecision]:
        """The decisions since the last call, which are not kept any more."""
        taken, self.decisions = list(self.decisions), deque(maxlen=MOST_DECISIONS)
        return taken

    def load_decisions(self, saved: Iterable[dict[str, Any]]) -> None:
        """Take decisions of a saved session for those of this one."""
        self.decisions = deque((GateDecision(**decision) for decision in saved), MOST_DECISIONS)

    def _check_width(self, trace: Trace) -> None:
        """Refuse a saved trace that those to come could not be learned from together with."""
        kept = self.config.num_logprobs
        coming = 0 if kept is None or kept >= trace.vocab_size else kept
        if len(trace) and trace.num_kept and trace.top_ids.shape[1] != coming:
            raise StateError(
                f"The requests of the session keep {trace.top_ids.shape[1] or 'all'} entries per position, this "
                f"assistant {coming or 'all'}. Set the `num_logprobs` that they were captured with."
            )
