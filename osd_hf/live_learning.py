"""Serving with learning beside it: who has the machine, what requests draft with, when they are learned from."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from osd_hf.acceptance import AcceptanceStats, Tally
from osd_hf.decoding.forward import CompiledTarget
from osd_hf.decoding.request import Binding, Lease
from osd_hf.decoding.text import EARLIER_TEXT_BYTES, EarlierText
from osd_hf.errors import ConfigError, LearnerError
from osd_hf.learning import session
from osd_hf.learning.faults import Failures
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.learner import Learner
from osd_hf.learning.session import FolderBusyError, load_session, save_session
from osd_hf.learning.updater import UpdateReport, log_update
from osd_hf.router import RoutedPrompt, Router
from osd_hf.store.store import CorrectionStore
from osd_hf.target_version import look_closely, target_changed, target_version
from osd_hf.trace import Trace
from osd_hf.utils.disk import in_child
from osd_hf.utils.threads import release_team
from osd_hf.utils.yielding import clock, give_way, giving_way

__all__ = ["Traffic", "LiveLearning"]

logger = logging.getLogger(__name__)

PAUSES_AFTER = 3  # failures in a row of learning for one draft; before that it is tried again when it is due
MOST_DOUBLED = 3  # times that the pause doubles: it is two update intervals long, then 4, then 8
LEAST_SHARE_SECONDS = 1.0  # that an answer may wait for a part of an update, if the answer itself took less
LOGGING, SAVING, TRACKING = "Logging a request", "Saving the session", "Tracking"
TELLING, STARTING = "`on_update`", "Starting to learn"
AUTOSAVE_PATIENCE_SECONDS = 5.0  # with another process that saves to the folder: learning waits meanwhile


class Traffic:
    """Who has the machine: requests, any number at once, or one micro-step of learning."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.requests = 0
        self.is_stepping = False
        self.gives_way = False  # in the middle of a step: requests need not wait for its end
        self._own = threading.local()
        in_child(self, Traffic._forget_other_threads)

    def _forget_other_threads(self) -> None:
        self.changed = threading.Condition()
        self.requests = self.own_requests
        self.is_stepping = self.gives_way = False

    @property
    def own_requests(self) -> int:
        """Requests that this thread is in the middle of."""
        return getattr(self._own, "requests", 0)

    @property
    def own_seconds(self) -> float:
        """Since the last request of this thread began, after its wait for a micro-step."""
        now = time.perf_counter()
        return now - float(getattr(self._own, "began", now))

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Entered around a request, at its arrival: waits until the micro-step under way ends or gives way; no other
        begins, and this one does not go on, before the request has ended."""
        with self.changed:
            self.requests += 1
            self._own.requests = self.own_requests + 1
        try:
            with self.changed:
                self.changed.wait_for(lambda: self.gives_way or not self.is_stepping)
            self._own.began = time.perf_counter()
            yield
        finally:
            try:
                release_team()
            finally:
                with self.changed:
                    self.requests -= 1
                    self._own.requests -= 1
                    self.changed.notify_all()


class LiveLearning:
    """
    Serves the requests of an assistant, counts them, and lets its learner learn from them, one thread at a time: after
    answers or, with the strategy `"idle"`, in a thread that steps while no request is running, and lets those that
    arrive in the middle of a step go first. With `"spread"` it is a thread, too, that learns after an answer, which
    waits for it: for a part that takes longer than an answer may wait only so long, and so do the next ones, until it
    is done.

    What goes wrong beside an answer is kept in `failures` until the same work succeeds, and costs no request anything.
    Where learning for a draft fails three times in a row it pauses, and is tried again after two update intervals,
    then four, then each eight: by requests, not by time, so that failing takes a small share of any traffic.

    A forked child serves, and learns by itself from its own requests, from where its parent stood; its idle thread
    begins with its first request. It saves nothing by itself: the folder stays with the parent.

    A router, with the tokenizer, says which domain a request without a label belongs to. The session is saved to the
    folder `autosave` after every 8 updates, by a thread of its own. `compiled` verifies candidates,
    where the target's own forward does not. The weights of the `target` are looked at before each update: requests say
    what torch has counted of their changes alone. `on_update`, which is kept by whoever has made it, is told of each
    decision of the gate, in order and one at a time, with nothing held that it may need.
    """

    def __init__(
        self, learner: Learner, router: Router | None = None, tokenizer: Any = None, autosave: Path | None = None,
        compiled: CompiledTarget | None = None, target: Any = None,
        on_update: Callable[[GateDecision], object] | None = None,
    ) -> None:  # fmt: skip
        self.target = target
        self._listener: Callable[[], Callable[[GateDecision], object] | None]
        self._listener = (lambda: None) if on_update is None else weakref.ref(on_update)
        self.learner, self.drafts, self.config = learner, learner.drafts, learner.config
        self.router, self.tokenizer, self.autosave, self.compiled = router, tokenizer, autosave, compiled
        self.traffic, self.tally = Traffic(), Tally()
        self.earlier = EarlierText(self.config.text_scope, EARLIER_TEXT_BYTES)
        self.failures, self._raised = Failures(), list[Exception]()
        self.saving: threading.Thread | None = None  # the last autosave
        self.is_closed = self._is_stopped = self._is_torn = False
        self._unsaved = 0  # updates
        self._hurrying = 0  # threads that wait for the learner
        self._idle: threading.Thread | None = None
        # After an answer: who learns, until when the answer waits, and how long for one part.
        self._sharing: threading.Thread | None = None
        self._until = self._share_seconds = 0.0
        # A part of this update or of the one before has taken longer: answers wait so long for all parts together.
        self._is_timed = self._had_long_part = False
        self._renew_locks()
        in_child(self, LiveLearning._begin_in_child)
        release_team()  # of the thread that has loaded the models, and may not be the one that serves
        self._wake()

    def _renew_locks(self) -> None:
        self._learning = threading.Lock()  # held by who learns or saves
        # Held while a request is counted and taken in, and while counts and lessons are read together or loaded.
        self._taking_in = threading.Lock()
        self._telling = threading.Lock()  # held by who calls `on_update`

    def _begin_in_child(self) -> None:
        if torch.get_num_threads() > 1:  # those of a team that the parent could not end are not here to be waited for
            torch.set_num_threads(1)
        # A thread that is not here may have been in the middle of a step; what it left is not learned on from.
        self._is_torn = self._is_torn or self._learning.locked()
        self._renew_locks()
        self._hurrying = 0
        self.autosave = self.saving = self._sharing = None

    # --- requests ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Entered around a request, at its arrival."""
        with self.traffic.request():
            yield

    def binding(
        self, domain: str | None, learn: bool, store: CorrectionStore | None, *, owner: str | None = None,
        is_begun: bool = False, k: int | str | None = None, seen: list[Trace] | None = None,
    ) -> Binding:  # fmt: skip
        """Listens to requests of this label, of which `seen` gets the traces; `is_begun`: to the one in
        [`~LiveLearning.request`]."""
        return Binding(
            functools.partial(self.take_in, learn=learn, store=store, owner=owner, seen=seen),
            functools.partial(self.lease, domain, learn, owner, is_begun),
            owner=self,
            num_logprobs=self.config.num_logprobs if learn or seen is not None else 0,
            num_assistant_tokens=k,
            compiled=self.compiled,
        )

    @contextlib.contextmanager
    def lease(
        self, domain: str | None, learn: bool, owner: str | None, is_begun: bool, assistant_model: Any, prompt: Any
    ) -> Iterator[Lease]:
        """The draft of a request of this label, with this prompt (`None`: not of token ids alone); another assistant
        model than ours serves by itself. A request that `is_begun` is in [`~LiveLearning.request`] already."""
        with contextlib.nullcontext() if is_begun else self.request():
            if domain is None and self.router is not None and prompt is not None:
                domain = self._routed(self.router, RoutedPrompt(prompt, self.tokenizer, learn=learn))
            with self.drafts.lease(domain, original=self.learner.prefers_original(domain)) as draft:
                if self.drafts.owns(assistant_model):
                    yield Lease(draft.version, domain, draft.model, draft.drafting, self.earlier.of(owner, domain))
                else:
                    yield Lease(domain=domain)

    def _routed(self, router: Router, prompt: RoutedPrompt) -> str | None:
        """The router's choice; where it fails the base draft serves."""
        with self.failures.kept("Routing a request"):
            return router.route(prompt)
        return None

    def take_in(
        self, traces: Sequence[Trace], *, learn: bool, store: CorrectionStore | None, owner: str | None,
        seen: list[Trace] | None,
    ) -> None:  # fmt: skip
        """Count a request that has ended, or those of a batch, and, with `learn`, log them and learn where that is
        due. What fails costs no answer, and keeps nothing else from being done."""
        if seen is not None:
            seen += traces
        if self.is_closed:  # a request that outlives it is answered, and that is all
            return
        # The answers of a batch wait together: for a share of an update each, and as long in all as one answer may.
        own = self.traffic.own_seconds
        seconds = max(own, LEAST_SHARE_SECONDS) / len(traces)
        for trace in traces:
            if learn and store is not None and (trace.num_kept or not len(trace)):  # rows of two targets are not kept
                with self.failures.kept(LOGGING):
                    store.append(trace)
            with self.failures.kept("Taking in a request"):
                with self._taking_in:
                    self.tally.add(trace.domain, AcceptanceStats.from_trace(trace))
                    if learn:
                        self.learner.observe(trace.domain, trace, own / len(traces))
                if learn and self.config.reads_text:
                    self.earlier.add(owner, trace.domain, trace.prompt_ids.tolist(), trace.completion_ids.tolist())
            if learn and self.config.update_strategy == "idle":
                self._wake()  # a request inside `attached` has ended before it is taken in
            elif learn:
                if self.config.update_strategy == "spread":
                    self._share(seconds)
                else:
                    self._learn(self.learner.after_answer)
                self._tell()

    # --- learning ---------------------------------------------------------------------------------------------------

    def _learn(self, work: Callable[[], UpdateReport | None]) -> None:
        """Let the learner work, unless somebody else does: no answer waits for that, and what is due stays due."""
        try:
            with self.alone(wait=False) as is_mine:
                if is_mine and self.target is not None and self.learner.begins():
                    # Only what no request can tell: the target may be another one for a moment, between requests.
                    self.learner.meet(look_closely(self.target))
                report = work() if is_mine else None
                if report is not None:
                    self._report(report)
        except Exception as error:  # noqa: BLE001 - whatever a learner fails with
            self._failed(error, self.learner.whose)

    def _tell(self) -> None:
        """Tell whoever listens of the decisions since the last call. Where somebody does already, another thread or,
        further out, this one, it is left to them, and nobody waits for a listener."""
        listener, telling = self._listener(), self._telling  # of this process
        while listener is not None and self.learner.untold and telling.acquire(blocking=False):
            try:
                with contextlib.suppress(IndexError):  # another thread was quicker
                    decision = self.learner.untold.popleft()
                    with self.failures.kept(TELLING):
                        listener(decision)
            finally:
                telling.release()

    def _failed(self, error: Exception, domain: str | None) -> None:
        """Learning for the draft of a domain has failed; it pauses where it does so again and again."""
        in_a_row = self.failures.add(_learning(domain), error)
        if in_a_row < PAUSES_AFTER:
            return
        rest = self.config.update_interval << min(in_a_row - PAUSES_AFTER + 1, MOST_DOUBLED)
        self.learner.rest(domain, rest)
        if in_a_row == PAUSES_AFTER:
            logger.info(  # the warning was that it failed, at the first time
                "%s pauses: it has failed %d times in a row, the last time with %r. Requests are served and kept as "
                "before. It is tried again after %d requests, then more seldom, or at once by `update()` or "
                "`resume()`; mend the cause (see the traceback above), or close the assistant to end learning.",
                _learning(domain), in_a_row, error, rest,
            )  # fmt: skip

    def update(self, steps: int | None, domain: str | None) -> UpdateReport:
        """One update of a domain's draft, at once; by default that with the most requests waiting. Raises LearnerError
        in the middle of a request of this thread, where no draft has anything to learn from, or from what it has
        failed with."""
        if self.traffic.own_requests:
            raise LearnerError(
                "The draft cannot learn while this thread is in the middle of a request (a streamer, a logits "
                "processor or a stopping criterion?). Call again when the request has ended."
            )
        try:
            return self._updated(steps, domain)
        finally:
            self._tell()

    def _updated(self, steps: int | None, domain: str | None) -> UpdateReport:
        with self.alone():
            if self.target is not None:
                self._look_at_target()
            key = self.learner.fullest() if domain is None else self.drafts.key(domain)
            if self.drafts.per_domain and (key is None or self.learner.lessons[key].is_unconfirmed):
                raise LearnerError(
                    f"No draft of {'any domain' if domain is None else repr(domain)} could learn yet. Serve a request "
                    "of it first; after a session was loaded, too, as it tells whether the target is the same still."
                )
            try:
                report = self.learner.update(key, steps)
            except ConfigError:
                raise
            except Exception as error:
                self._failed(error, self.learner.whose)
                raise LearnerError(
                    f"The update failed ({error!r}). The draft serves as before, and its requests are there to be "
                    "learned from; mend the cause, then call again."
                ) from error
            return self._report(report)

    @contextlib.contextmanager
    def alone(self, *, wait: bool = True) -> Iterator[bool]:
        """Nobody else learns or saves inside. Without `wait` it yields `False`, at once, where somebody does."""
        lock = self._learning  # of this process
        is_mine = lock.acquire(blocking=False)
        if wait and not is_mine:
            self._hurry(1)
            try:
                is_mine = lock.acquire()
            finally:
                self._hurry(-1)
        try:
            if is_mine and self._is_torn:  # in a forked child, whose parent was learning
                self.learner.start_over()
                self._is_torn = False
            yield is_mine
        finally:
            try:
                release_team()
            finally:
                if is_mine:
                    lock.release()
            self._wake()

    def _hurry(self, threads: int) -> None:
        """So many more threads wait for the learner: a step that is under way gives way to no request meanwhile, which
        might wait for one of them."""
        with self.traffic.changed:
            self._hurrying += threads
            self.traffic.changed.notify_all()

    def pause(self, is_paused: bool) -> None:
        """Begin no update, and take no further step of one under way; with `False`: learn again or, where that was
        not so, try at once what pauses as it has failed. Whoever holds learning up now and then resumes it, too, and
        says nothing about a failure."""
        if not (is_paused or self.learner.is_paused):
            self.failures.count_anew()
            for domain in list(self.learner.lessons):
                self.learner.rest(domain, 0)
        self.learner.pause(is_paused)
        self._wake()

    # --- learning after answers -------------------------------------------------------------------------------------

    def _share(self, seconds: float) -> None:
        """Let an answer wait while the learner takes its share of an update, or goes on with one that an earlier
        answer has waited long enough for: so long for each part or, after one that took longer, for all."""
        traffic = self.traffic
        release_team()
        with traffic.changed:
            is_begun, now = self._sharing is not None, time.perf_counter()
            if self._is_stopped or (is_begun and (self.learner.is_paused or now < self._until)):
                return  # nobody is to learn, or another answer waits for it
            self._share_seconds, self._until, traffic.gives_way = seconds, now + seconds, False
            if not is_begun:
                with self.failures.kept(STARTING):
                    thread = threading.Thread(target=self._take_share, name="osd_hf-learner", daemon=True)
                    thread.start()
                    self._sharing = thread
            learning = self._sharing
            traffic.changed.notify_all()
            while self._sharing is learning is not None and not traffic.gives_way:
                if (left := self._until - time.perf_counter()) <= 0:
                    return  # it stops where it next can
                traffic.changed.wait(left)

    def _take_share(self) -> None:
        try:
            with giving_way(self._give_way):
                self._learn(self._in_time)
        finally:
            with self.traffic.changed:
                self._sharing, self.traffic.gives_way = None, False
                self.traffic.changed.notify_all()

    def _in_time(self) -> UpdateReport | None:
        """The share of an answer, part by part, until somebody else needs the learner."""
        work, began = self.learner.share(), clock()
        report: UpdateReport | None = None
        is_done = False
        while True:
            try:
                next(work)
            except StopIteration as done:
                report, is_done = done.value, True
            if (ended := clock()) - began >= self._share_seconds:
                self._is_timed = self._had_long_part = True
            if is_done:
                if report is not None:  # of a whole update: for the next one, only what was long in this one counts
                    self._is_timed, self._had_long_part = self._had_long_part, False
                return report
            began, now = ended, time.perf_counter()
            if not self._is_timed and now < self._until:
                self._until = now + self._share_seconds
            give_way()
            if self._hurrying or self._is_stopped or self.learner.is_paused:
                work.close()
                return None

    # --- learning between requests ----------------------------------------------------------------------------------

    def wait_until_idle(self, timeout: float | None) -> bool:
        """Wait until the idle thread, where there is one, has nothing to do; returns whether it has not."""
        self._wake()
        with self.traffic.changed:
            return self._idle is None or self.traffic.changed.wait_for(
                lambda: self._is_stopped or not (self.traffic.is_stepping or self.learner.has_work()), timeout
            )

    def stop(self) -> None:
        """End the thread that learns after the micro-step under way, which gives way to no request any more, and wait
        for a save under way."""
        with self.traffic.changed:
            self._is_stopped = True
            self.traffic.changed.notify_all()
        for thread in (self._idle, self._sharing, self.saving):
            if thread is not None and thread is not threading.current_thread():
                thread.join()

    def _wake(self) -> None:
        """Let the idle thread look for work. It begins where it is not there yet: at first, or in a forked child."""
        with self.traffic.changed:
            is_there = self._idle is not None and self._idle.is_alive()
            if self.config.update_strategy == "idle" and not (self._is_stopped or is_there):
                with self.failures.kept(STARTING):
                    idle = threading.Thread(target=self._learn_between, name="osd_hf-learner", daemon=True)
                    idle.start()
                    self._idle = idle
            self.traffic.changed.notify_all()

    def _learn_between(self) -> None:
        with giving_way(self._give_way):
            while self._may_go_on():
                started = clock()
                try:
                    self._learn(self.learner.step)
                finally:
                    self.learner.duty_cycle.worked(clock() - started)
                    with self.traffic.changed:
                        self.traffic.is_stepping = self.traffic.gives_way = False
                        self.traffic.changed.notify_all()
                self._tell()

    def _may_go_on(self) -> bool:
        """Wait until there is a step to take; `False` where there will be none."""
        traffic, duty_cycle = self.traffic, self.learner.duty_cycle
        with traffic.changed:
            while not self._is_stopped and (traffic.requests or not self._may_step()):
                rest = duty_cycle.rest_seconds()
                traffic.changed.wait(rest if rest > 0 else None)
            traffic.is_stepping = not self._is_stopped
            return traffic.is_stepping

    def _give_way(self) -> None:
        """Let requests that have arrived in the middle of a step go first, and go on when they have ended, or when an
        answer waits again; beside them where somebody waits for the step itself. Nothing is held that a request
        needs."""
        traffic = self.traffic
        if not self._must_wait():
            return
        if not (self._hurrying or self._is_stopped):
            release_team()
        with traffic.changed:
            traffic.gives_way = True
            traffic.changed.notify_all()
            traffic.changed.wait_for(lambda: not self._must_wait() or self._hurrying or self._is_stopped)
            traffic.gives_way = self._must_wait()

    def _must_wait(self) -> bool:
        if self.config.update_strategy == "idle":
            return self.traffic.requests > 0
        return time.perf_counter() >= self._until

    def _may_step(self) -> bool:
        is_resting = self.learner.duty_cycle.rest_seconds() > 0
        return not is_resting and self.learner.has_work() and not self._learning.locked()

    # --- keeping ----------------------------------------------------------------------------------------------------

    def _report(self, report: UpdateReport) -> UpdateReport:
        """Take in that an update has ended: tell the trackers of it, and save the session where that is due."""
        decision = report.decision
        if decision is not None and decision.outcome == "dropped" and not decision.requests:  # before it was tried
            self._failed(FloatingPointError(decision.reason), report.domain)
        elif report.steps:
            self.failures.clear(_learning(report.domain))
            self.learner.rest(report.domain, 0)
        with self.failures.kept(TRACKING):
            log_update(self.learner.accelerator, report, *self.tally.take_recent())
        self._unsaved += 1
        due = self.autosave is not None and self._unsaved >= session.UPDATES_BETWEEN_SAVES
        if due and (self.saving is None or not self.saving.is_alive()):
            self._unsaved = 0
            # Beside serving: no answer waits for the disk.
            saving = threading.Thread(target=self._save_beside, args=(self.autosave,), name="osd_hf-autosave")
            with self.failures.kept(SAVING):
                saving.start()
                self.saving = saving
        return report

    def _save_beside(self, folder: Path) -> None:
        with self.failures.kept(SAVING):
            try:
                self.save(folder, AUTOSAVE_PATIENCE_SECONDS)
            except FolderBusyError as error:
                logger.warning("%s Nothing is lost: the next autosave tries again.", error)

    def save(self, directory: Path, patience_seconds: float | None = None) -> None:
        """Save the session; raises StateError where it cannot be written."""
        with self.alone():
            with self._taking_in:  # requests go on: each is in both or in neither
                counts, learner = self.tally.state(), self.learner.state_dict()
            decisions = [decision.to_dict() for decision in self.learner.decisions]
            facts = {**counts, "config": self.config.to_dict(), "decisions": decisions}
            router = None if self.router is None else self.router.state_dict()
            save_session(directory, learner, facts, router, patience_seconds=patience_seconds)

    def load(self, directory: Path) -> None:
        """Go on with a saved session; raises StateError, with nothing changed, where that cannot be."""
        with self.alone(), self._taking_in:
            facts = load_session(directory, self.learner, self.router)
            self.learner.load_decisions(facts["decisions"])
            self.tally.load(facts)
            if self.target is not None:
                self._meet_loaded(target_version(self.target))

    def _meet_loaded(self, version: str | None) -> None:
        """Set aside what was loaded of another version of the target. Domains may have adapters of one target that
        take turns: the next request of each tells, and nothing is learned before."""
        if not self.drafts.per_domain:
            self.learner.meet(version)
        for lesson in self.learner.lessons.values():
            if lesson.target not in (None, version):
                lesson.is_unconfirmed = True

    def _look_at_target(self) -> None:
        """Set aside what is of another version of the target than the one that there is now."""
        version = look_closely(self.target)
        if version is None and not self.drafts.per_domain:
            version = target_version(self.target)
        self.learner.meet(version)

    def target_changed(self) -> None:
        """Set aside the requests so far, as the target is another one now."""
        with self.alone():
            self.learner.renew(target_changed(self.target))

    def close(self, store: CorrectionStore | None) -> None:
        """Take nothing in any more, end the thread that learns, tell of what it has decided, save the session where it
        is saved by itself, flush the store and end tracking; then raise LearnerError from what has failed and not
        succeeded since, unless an earlier call has."""
        self.is_closed = True
        self.stop()
        self._tell()
        if self.autosave is not None:
            with self.failures.kept(SAVING):
                self.save(self.autosave)
        if store is not None:
            with self.failures.kept(LOGGING):
                store.flush()
        if self.learner.accelerator.trackers:  # it ends the process group, too, which may be a trainer's
            with self.failures.kept(TRACKING):
                self.learner.accelerator.end_training()
        standing, raised = self.failures.standing, self._raised
        self._raised = standing
        if new := [error for error in standing if error not in raised]:
            raise LearnerError(
                f"The assistant is closed, but something had failed ({'; '.join(map(repr, new))}). All requests were "
                "answered. Mend the cause; `close()` again saves what could not be saved."
            ) from new[-1]


def _learning(domain: str | None) -> str:
    return "Learning" if domain is None else f"Learning for {domain!r}"
