"""Connect serving and learning: lease drafts to requests, take in their traces, and schedule the learner."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel

from osd_hf.acceptance import AcceptanceStats, Tally
from osd_hf.decoding.checks import log_once
from osd_hf.decoding.record import Binding, Lease
from osd_hf.decoding.static import StaticForward
from osd_hf.decoding.text import EARLIER_TEXT_BYTES, EarlierText
from osd_hf.errors import ConfigError, LearnerError
from osd_hf.learning import session
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.learner import Learner
from osd_hf.learning.updater import UpdateReport, log_update
from osd_hf.router import RoutedPrompt, Router
from osd_hf.store.store import CorrectionStore
from osd_hf.target_version import look_closely, target_changed, target_version
from osd_hf.trace import Trace

logger = logging.getLogger(__name__)

FAILURES_BEFORE_PAUSE = 3  # in a row, of learning for one draft
MAX_DOUBLINGS = 3  # of the pause, which is two update intervals long at first
AUTOSAVE_PATIENCE_SECONDS = 5.0  # to wait for another process that saves to the folder; nothing is learned then
# Work that must not affect answers, as phrases that begin a sentence.
ROUTING, TAKING_IN, LOGGING = "Routing a request", "Taking in a request", "Logging a request"
SAVING, TRACKING, REPORTING = "Saving the session", "Tracking", "`on_update`"
UNDRAFTED = "Pass `assistant_model=assistant.draft` to the call, or to `pipeline`."
OTHER_DRAFT = (
    "A request drafts with another model than the assistant's, which never learns. Pass "
    "`assistant_model=assistant.draft`."
)
UNLOADED = "The session in %s is not loaded, and the next save replaces it. Call `load_state` first."
UNROUTED = "%d requests came without a domain, and only drafts of domains learn. Pass `domain=`, or another router."
TIMED_REQUESTS, ROUTED_REQUESTS = 16, 32  # after which slow drafts, and drafts without a domain, are reported


class Failures:
    """Log failures that do not affect answers, once per kind of error, and keep them until the same work succeeds."""

    def __init__(self) -> None:
        # By work, newest last: the last error, and the failures in a row.
        self._failures: dict[str, tuple[Exception, int]] = {}
        self._logged: set[tuple[str, type]] = set()

    @property
    def standing(self) -> list[Exception]:
        """The last error of each work that has not succeeded since, newest last."""
        return [error for error, _ in self._failures.values()]

    def add(self, work: str, error: Exception) -> int:
        """Record an error of some work; returns the number of failures in a row."""
        is_new = (work, type(error)) not in self._logged
        self._logged.add((work, type(error)))
        logger.log(
            logging.WARNING if is_new else logging.INFO,
            "%s failed (%r). Serving is not affected. `learning_error` keeps the error until the work succeeds.",
            work,
            error,
            exc_info=error if is_new else None,
        )
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)  # the frames may hold memory of a GPU
            cause = cause.__cause__
        in_a_row = 1 + (self._failures.pop(work)[1] if work in self._failures else 0)
        self._failures[work] = error, in_a_row
        return in_a_row

    def clear(self, work: str) -> None:
        """Record a success."""
        self._failures.pop(work, None)

    def restart_counts(self) -> None:
        """Count failures in a row from zero, and log them again."""
        self._failures = {work: (error, 0) for work, (error, _) in self._failures.items()}
        self._logged.clear()

    @contextlib.contextmanager
    def kept(self, work: str) -> Iterator[None]:
        """Record errors raised inside instead of raising them."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no failure may affect an answer
            self.add(work, error)
        else:
            self.clear(work)


class Traffic:
    """Let one thread at a time learn or save, and let either requests run, any number of them, or one part of idle
    learning."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._learning = threading.Lock()  # held by the thread that learns or saves
        self._requests = 0
        self.is_stepping = False  # whether the idle thread learns

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Wait for the part of idle learning in progress, and let no other begin while a request runs inside."""
        with self.changed:
            self._requests += 1
        try:
            with self.changed:
                self.changed.wait_for(lambda: not self.is_stepping)
            yield
        finally:
            with self.changed:
                self._requests -= 1
                self.changed.notify_all()

    @contextlib.contextmanager
    def alone(self, *, wait: bool = True) -> Iterator[bool]:
        """Let no other thread learn or save inside. Without `wait`, yields `False` if another thread does. A thread
        that waits goes before idle learning, as a request does."""
        with self.request() if wait else contextlib.nullcontext():
            is_alone = self._learning.acquire(blocking=wait)
            try:
                yield is_alone
            finally:
                if is_alone:
                    self._learning.release()

    @property
    def is_idle(self) -> bool:
        """Whether no request runs, and no thread learns, saves, or waits to."""
        return not self._requests

    def wake(self) -> None:
        """Let the idle thread look for work."""
        with self.changed:
            self.changed.notify_all()


class LiveLearning:
    """Serve the requests of an assistant, count them, and run its learner in one thread at a time. A request ends by
    putting its traces on a queue. Then its thread takes them from the queue, counts them and, with `"spread"` and
    `"interval"`, learns. With `"idle"`, a thread learns in parts while no request runs. An error of learning never
    affects an answer: `failures` keeps it until the same work succeeds. After three failures in a row, learning for a
    draft pauses. The session is saved to `autosave` in a thread after every 8 updates. Of `on_update`, only a weak
    reference is kept."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafts: DomainDrafts,
        router: Router | None,
        tokenizer: Any,
        autosave: Path | None,
        static: StaticForward | None,
        accelerator: Accelerator,
        on_update: Callable[[GateDecision], object] | None,
    ) -> None:
        self.target = target
        self.drafts = drafts
        self.config = drafts.config
        self.learner = Learner(drafts)
        self.learned_before = 0.0  # seconds of learning before the last reset of the statistics
        self.router = router
        self.tokenizer = tokenizer
        self.autosave = autosave
        self._replaces = autosave is not None and session.has_session(autosave)  # a session that was not loaded
        self.static = static
        self.accelerator = accelerator  # its trackers log the updates
        self._on_update = (lambda: None) if on_update is None else weakref.ref(on_update)
        self.traffic = Traffic()
        # Requests that wait to be counted and learned from: the traces, whether to learn, the store, and the owner.
        self._finished: deque[tuple[Iterable[Trace], bool, CorrectionStore | None, str | None]] = deque()
        self.tally = Tally()
        self._unrouted = 0  # requests without a domain, before the first domain has a draft
        self.earlier = EarlierText(self.config.text_scope, EARLIER_TEXT_BYTES)
        self.reads_text = self.config.reads_text
        self.failures = Failures()
        self._raised: list[Exception] = []  # by `close`
        self.is_closed = False
        self._is_stopped = False
        self._unsaved_updates = 0
        self.save_thread: threading.Thread | None = None  # of the last autosave
        # Held while a request is counted and added, and while counts and requests are read together or loaded.
        self._taking_in = threading.Lock()
        self._reporting = threading.Lock()  # held by the thread that calls `on_update`
        self._idle_thread: threading.Thread | None = None
        if self.config.update_strategy == "idle":
            self._idle_thread = threading.Thread(target=self._learn_between, name="osd_hf-learner", daemon=True)
            self._idle_thread.start()

    # --- requests ---------------------------------------------------------------------------------------------------

    def binding(
        self,
        domain: str | None,
        learn: bool,
        store: CorrectionStore | None,
        *,
        owner: str | None = None,
        is_begun: bool = False,
        k: int | str | None = None,
        seen: list[Trace] | None = None,
    ) -> Binding:
        """Return what captures and serves requests; arguments as for [`~OnlineAssistant.generate`]. With `is_begun`,
        the caller has entered `traffic.request()` and calls [`take_in_finished`] after it. The traces are added to
        `seen`."""

        def finish(traces: Iterable[Trace]) -> None:
            if seen is not None:
                seen.extend(traces)
            self._finished.append((traces if seen is None else tuple(seen), learn, store, owner))
            if not is_begun:
                self.take_in_finished()

        @contextlib.contextmanager
        def serve(assistant_model: Any, prompt: Any) -> Iterator[Lease]:
            label = domain
            with contextlib.nullcontext() if is_begun else self.traffic.request():
                if label is None and self.router is not None and prompt is not None:  # `None` if not token ids
                    with self.failures.kept(ROUTING):  # after an error, the base draft serves
                        label = self.router.route(RoutedPrompt(prompt, self.tokenizer, learn=learn))
                if assistant_model not in self.drafts.models:  # serves itself
                    log_once(self.target, OTHER_DRAFT)
                    yield Lease(domain=label)
                    return
                earlier = self.earlier.of(owner, label) if self.reads_text else ()
                with self.drafts.lease(label, original=None) as draft:
                    yield Lease(draft.version, label, draft.model, draft.drafting, earlier)

        return Binding(
            finish,
            serve,
            owner=self,
            num_logprobs=self.config.num_logprobs if learn or seen is not None else 0,
            num_assistant_tokens=k,
            static=self.static,
            undrafted=None if is_begun else UNDRAFTED,
        )

    def take_in_finished(self) -> None:
        """Count the requests of the queue, log them, and learn from them."""
        while self._finished:
            began, learned = time.perf_counter(), self.learner.seconds
            with contextlib.suppress(IndexError):  # another thread was faster
                traces, learn, store, owner = self._finished.popleft()
                for trace in tuple(traces):  # all are made before anything is learned, and release the requests
                    self._take_in(trace, learn, store, owner)
            self.drafts.pacer.answered(0, 0.0, time.perf_counter() - began - (self.learner.seconds - learned))

    def _take_in(self, trace: Trace, learn: bool, store: CorrectionStore | None, owner: str | None) -> None:
        if self.is_closed:
            return
        if learn and self._replaces:
            self._replaces = False
            logger.warning(UNLOADED, self.autosave)
        # Requests of a target that changed while it answered have no rows.
        if learn and store is not None and (trace.num_kept or not len(trace)):
            with self.failures.kept(LOGGING):
                store.append(trace)
        with self.failures.kept(TAKING_IN):
            with self._taking_in:
                self.tally.add(trace.domain, AcceptanceStats.from_trace(trace), self.drafts.pacer.timed)
                self.learner.observe(trace.domain, trace, learn=learn)
            if self.tally.requests == TIMED_REQUESTS:
                self._warn_of_slow_draft()
            if learn and self.drafts.per_domain and not self.drafts.domains:
                self._unrouted += 1
                if self._unrouted == ROUTED_REQUESTS:
                    logger.warning(UNROUTED, ROUTED_REQUESTS)
            if learn and self.reads_text:
                self.earlier.add(owner, trace.domain, trace.prompt_ids.tolist(), trace.completion_ids.tolist())
        if learn and self.config.update_strategy == "idle":
            self.traffic.wake()
        elif learn:
            self._learn(self.learner.after_answer)
            self._report_decisions()

    def _warn_of_slow_draft(self) -> None:
        plan = self.drafts.pacer.plan()
        seconds, of_target = plan.draft_seconds or 0.0, plan.plain_seconds or math.inf
        if seconds >= of_target:
            text = "A token takes the draft %.1f ms and the target %.1f ms. Choose a smaller draft; see `make_draft`."
            logger.warning(text, 1e3 * seconds, 1e3 * of_target)

    # --- learning ---------------------------------------------------------------------------------------------------

    def _learn(self, work: Callable[[], UpdateReport | None]) -> None:
        """Run the learner unless another thread does: no answer waits for that, and due work stays due."""
        try:
            with self.traffic.alone(wait=False) as is_alone:
                if not is_alone:
                    return
                if self.learner.begins():
                    self.learner.set_target_version(look_closely(self.target))
                report = work()
                if report is not None:
                    self._finish_update(report)
        except Exception as error:  # noqa: BLE001 - no failure may affect an answer
            self._record_failure(error, self.learner.working_domain)

    def _report_decisions(self) -> None:
        """Call `on_update` with new decisions, unless a thread does so already: it takes the new ones as well."""
        on_update = self._on_update()
        while on_update is not None and self.learner.unreported and self._reporting.acquire(blocking=False):
            try:
                with contextlib.suppress(IndexError):  # another thread was faster
                    decision = self.learner.unreported.popleft()
                    with self.failures.kept(REPORTING):
                        on_update(decision)
            finally:
                self._reporting.release()

    def _record_failure(self, error: Exception, domain: str | None) -> None:
        """Record a failure of learning for a draft, and pause learning after several in a row."""
        work = _learning(domain)
        in_a_row = self.failures.add(work, error)
        if in_a_row < FAILURES_BEFORE_PAUSE:
            return
        num_requests = self.config.update_interval << min(in_a_row - FAILURES_BEFORE_PAUSE + 1, MAX_DOUBLINGS)
        self.learner.rest(domain, num_requests)
        if in_a_row == FAILURES_BEFORE_PAUSE:  # the warning came with the first failure
            logger.info("%s pauses for %d requests, or until `update()` or `resume()`.", work, num_requests)

    def update(self, steps: int | None, domain: str | None) -> UpdateReport:
        """Run one update now; see [`~OnlineAssistant.update`]."""
        try:
            with self.traffic.alone():
                return self._update(steps, domain)
        finally:
            self._report_decisions()

    def _update(self, steps: int | None, domain: str | None) -> UpdateReport:
        version = look_closely(self.target)
        if version is None and not self.drafts.per_domain:
            version = target_version(self.target)
        self.learner.set_target_version(version)
        key = self.learner.fullest() if domain is None else self.drafts.key(domain)
        if self.drafts.per_domain and (key is None or self.drafts.requests[key].is_unconfirmed):
            raise LearnerError(
                f"No draft of {'any domain' if domain is None else repr(domain)} could learn yet. Serve a request of "
                "it first. After a session was loaded, too, a request must show that the target is the same."
            )
        try:
            report = self.learner.update(key, steps)
        except ConfigError:
            raise
        except Exception as error:
            self._record_failure(error, self.learner.working_domain)
            raise LearnerError(
                f"The update failed ({error!r}). The draft serves as before, and no request is lost. Fix the cause, "
                "then call again."
            ) from error
        if not report.steps and report.decision is None:
            logger.warning("The update changed nothing: there was nothing to learn from. Serve requests before it.")
        return self._finish_update(report)

    def pause(self, is_paused: bool) -> None:
        """Pause or resume learning. Resuming also ends pauses after failures, unless learning was paused."""
        if not (is_paused or self.learner.is_paused):
            self.failures.restart_counts()
            for domain in list(self.drafts.requests):
                self.learner.rest(domain, 0)
        self.learner.is_paused = is_paused
        self.traffic.wake()

    # --- learning between requests ----------------------------------------------------------------------------------

    def wait_until_idle(self, timeout: float | None) -> bool:
        """Wait until the idle thread, if there is one, has no work; returns whether it has none."""
        self.traffic.wake()
        with self.traffic.changed:
            return self._idle_thread is None or self.traffic.changed.wait_for(
                lambda: self._is_stopped or not (self.traffic.is_stepping or self.learner.has_work()), timeout
            )

    def stop(self) -> None:
        """End the idle thread after its current part of work, and wait for a save in progress."""
        self._is_stopped = True
        self.traffic.wake()
        for thread in (self._idle_thread, self.save_thread):
            if thread is not None and thread is not threading.current_thread():
                thread.join()

    def _learn_between(self) -> None:
        """Learn in parts until stopped, while there is work, no request, and nobody else who learns or saves."""
        traffic = self.traffic
        while True:
            with traffic.changed:
                traffic.changed.wait_for(lambda: self._is_stopped or (traffic.is_idle and self.learner.has_work()))
                if self._is_stopped:
                    return
                traffic.is_stepping = True
            try:
                self._learn(self.learner.step)
            finally:
                with traffic.changed:
                    traffic.is_stepping = False
                    traffic.changed.notify_all()
            self._report_decisions()

    # --- saved state ------------------------------------------------------------------------------------------------

    def _finish_update(self, report: UpdateReport) -> UpdateReport:
        """Log a finished update, and save the session if that is due."""
        decision = report.decision
        if decision is not None and decision.outcome == "dropped" and not decision.requests:
            self._record_failure(FloatingPointError(decision.reason), report.domain)
        elif report.steps:
            self.failures.clear(_learning(report.domain))
            self.learner.rest(report.domain, 0)
        with self.failures.kept(TRACKING):
            log_update(self.accelerator, report, *self.tally.take_recent())
        self._unsaved_updates += 1
        is_due = self.autosave is not None and self._unsaved_updates >= session.UPDATES_BETWEEN_SAVES
        if is_due and (self.save_thread is None or not self.save_thread.is_alive()):
            self._unsaved_updates = 0
            # No answer waits for the disk.
            self.save_thread = threading.Thread(target=self._autosave, args=(self.autosave,), name="osd_hf-autosave")
            self.save_thread.start()
        return report

    def _autosave(self, folder: Path) -> None:
        with self.failures.kept(SAVING):
            self.save(folder, AUTOSAVE_PATIENCE_SECONDS)

    def save(self, directory: Path, patience_seconds: float = session.PATIENCE_SECONDS) -> None:
        """Save the session; raises StateError if it cannot be written."""
        with self.traffic.alone():
            with self._taking_in:  # a request is in both or in neither
                counts, learner = self.tally.state(), self.learner.state_dict()
            facts = {**counts, "config": self.config.to_dict()}
            router = None if self.router is None else self.router.state_dict()
            session.save_session(directory, learner, facts, router, patience_seconds=patience_seconds)
        self._replaces &= not _same(directory, self.autosave)

    def load(self, directory: Path) -> None:
        """Load a saved session; raises StateError, with nothing changed, if that fails."""
        with self.traffic.alone(), self._taking_in:
            facts = session.load_session(directory, self.learner, self.router)
            self._replaces &= not _same(directory, self.autosave)
            self.reset_stats()
            self.learner.observed = self.tally.load(facts)
            version = target_version(self.target)
            if not self.drafts.per_domain:
                self.learner.set_target_version(version)
            # With drafts per domain, the next request of each domain shows whether the target is another one.
            for requests in self.drafts.requests.values():
                requests.is_unconfirmed = requests.target not in (None, version)

    def reset_stats(self) -> None:
        """Count from zero again. Nothing learned is lost."""
        self.tally.reset()
        self.drafts.pacer.reset_timed()
        self.learner.observed = 0
        self.learner.replayed.clear()
        self.learned_before = self.learner.seconds

    def target_changed(self) -> None:
        """Remove all requests, as the caller says that the target is another one now."""
        with self.traffic.alone():
            self.learner.remove_requests(target_changed(self.target))

    def close(self, store: CorrectionStore | None) -> None:
        """Stop learning, report decisions, save the session, flush the store and end tracking. Raises LearnerError
        for errors that stand and that no earlier call has raised."""
        self.is_closed = True
        self.stop()
        self._report_decisions()
        if self._on_update() is not None and not self.learner.decisions:
            logger.warning("`on_update` was never called: %d requests, and no update.", self.tally.requests)
        if self._replaces:
            logger.warning("The session in %s stays as it is: it was not loaded, nor anything learned.", self.autosave)
        elif self.autosave is not None:
            with self.failures.kept(SAVING):
                self.save(self.autosave)
        if store is not None:
            if not self.tally.requests:
                logger.warning("Nothing was stored: no request was seen. See `generate` and `attached`.")
            with self.failures.kept(LOGGING):
                store.flush()
        if self.accelerator.trackers:  # ending also ends the process group, which may be a trainer's
            with self.failures.kept(TRACKING):
                self.accelerator.end_training()
        standing, raised = self.failures.standing, self._raised
        self._raised = standing
        if new := [error for error in standing if error not in raised]:
            raise LearnerError(
                f"The assistant is closed, but something had failed ({'; '.join(map(repr, new))}). All requests were "
                "answered. Fix the cause; `close()` again saves what could not be saved."
            ) from new[-1]


def _same(folder: Path, other: Path | None) -> bool:
    return other is not None and folder.resolve() == other.resolve()


def _learning(domain: str | None) -> str:
    return "Learning" if domain is None else f"Learning for {domain!r}"
