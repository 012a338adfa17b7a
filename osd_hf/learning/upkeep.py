"""Learning beside serving: behind answers or between them, one thread at a time, saved now and then."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from osd_hf.errors import LearnerError
from osd_hf.learning.learner import Learner
from osd_hf.learning.schedule import IdleWorker, Traffic
from osd_hf.learning.updater import UpdateReport
from osd_hf.utils.disk import in_child

__all__ = ["Upkeep"]

logger = logging.getLogger(__name__)


class Upkeep:
    """
    Runs a learner for an assistant, and keeps what goes wrong until the next call.

    A forked child serves, and learns by itself from its own requests, from where its parent stood; its idle thread
    begins with its first request. It saves nothing by itself: the folder stays with the parent.

    Args:
        learner (`Learner`):
            Its configuration says when it learns.
        updated (`Callable[[UpdateReport], None]`):
            A method; told of each update. Held weakly.
        save (`Callable[[], None]`, *optional*):
            A method that saves the session, called after every `autosave_interval` updates by a thread of its own.
            Held weakly.
    """

    def __init__(
        self,
        learner: Learner,
        updated: Callable[[UpdateReport], None],
        save: Callable[[], None] | None = None,
    ) -> None:
        self.learner = learner
        self.config = learner.config
        self.traffic = Traffic()
        self.failure: Exception | None = None
        self.saving: threading.Thread | None = None
        self._updated = weakref.WeakMethod(updated)
        self._save = None if save is None else weakref.WeakMethod(save)
        self._unsaved = 0
        self._learning = threading.Lock()
        self._is_torn = False
        self._own = threading.local()
        self._worker: IdleWorker | None = None
        if self.config.update_strategy == "idle":
            self._worker = IdleWorker(self.traffic, self._has_work, self._step, self.failed, learner.duty_cycle)
            self._worker.start()
        in_child(self, Upkeep._begin_in_child)

    def _begin_in_child(self) -> None:
        # A thread that is not here may have been in the middle of a step; what it left is not learned on from.
        self._is_torn = self._is_torn or self._learning.locked()
        self._learning = threading.Lock()
        self._save = self.saving = None

    # --- requests ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Entered around the use of a draft."""
        self.raise_failure()
        with self.traffic.request():
            self._own.depth = getattr(self._own, "depth", 0) + 1
            try:
                yield
            finally:
                self._own.depth -= 1

    def served(self) -> None:
        """A request has ended and been taken in; learns, where that is due and nobody else does."""
        if self._worker is not None:
            self._wake()  # a request inside `attached` has ended before it is taken in
            return
        # While another thread learns, this one's answer does not wait for it; the update stays due.
        if self.learner.due():
            with self._turn() as is_mine:
                # One: others' requests may make more due meanwhile, after their answers.
                lesson = self.learner.due() if is_mine else None
                if lesson is not None:
                    self._report(self.learner.update(lesson.domain))

    def failed(self, error: Exception) -> None:
        """Keep an error for the next call."""
        self.failure = error

    def raise_failure(self) -> None:
        """Raise, once, what went wrong behind an earlier answer; as LearnerError."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise LearnerError(
                f"Learning failed after an earlier answer ({failure!r}); that answer was delivered, and serving goes "
                "on. Call again to be served; mend the cause to learn on."
            ) from failure

    # --- learning ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else learns or saves inside; after it the idle thread goes on."""
        try:
            with self._learning:
                self._mend()
                yield
        finally:
            self._wake()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Whether nobody else learns or saves; then nobody does inside."""
        lock = self._learning
        if not lock.acquire(blocking=False):
            yield False
            return
        try:
            self._mend()
            yield True
        finally:
            lock.release()

    def _mend(self) -> None:
        """In a forked child: begin anew from what serves, where the parent was learning at the fork."""
        if self._is_torn:
            self.learner.start_over()
            self._is_torn = False

    def update(self, domain: str | None, steps: int | None) -> UpdateReport:
        """One update of a draft, at once; inside [`~Upkeep.alone`]."""
        return self._report(self.learner.update(domain, steps))

    def check_outside(self) -> None:
        """Refuse to go on in the middle of a request of this thread; raises LearnerError."""
        if getattr(self._own, "depth", 0):
            raise LearnerError(
                "The draft cannot learn while this thread is in the middle of a request (a streamer, a logits "
                "processor or a stopping criterion?). Call again when the request has ended."
            )

    def pause(self) -> None:
        """Begin no update, and take no further step of one under way."""
        self.learner.is_paused = True
        self._wake()

    def resume(self) -> None:
        """Learn again."""
        self.learner.is_paused = False
        self._wake()

    def wait_until_idle(self, timeout: float | None) -> bool:
        """Wait until the idle thread has nothing to do; returns whether it has not."""
        worker = self._worker
        if worker is not None:
            worker.start()
        with self.traffic.changed:
            return worker is None or self.traffic.changed.wait_for(
                lambda: not worker.is_alive or not (self.traffic.is_stepping or self.learner.has_work()), timeout
            )

    def stop(self) -> None:
        """End the idle thread, and wait for a save under way."""
        if self._worker is not None:
            self._worker.stop()
        if self.saving is not None and self.saving is not threading.current_thread():
            self.saving.join()

    def _wake(self) -> None:
        if self._worker is not None:
            self._worker.start()
        with self.traffic.changed:
            self.traffic.changed.notify_all()

    def _has_work(self) -> bool:
        return self.learner.has_work() and not self._learning.locked()

    def _step(self) -> None:
        """A micro-step of the idle thread; none while another thread learns or saves."""
        with self._turn() as is_mine:
            report = self.learner.step() if is_mine else None
            if report is not None:
                self._report(report)

    def _report(self, report: UpdateReport) -> UpdateReport:
        updated = self._updated()
        if updated is not None:
            updated(report)
        self._unsaved += 1
        due = self._save is not None and self._unsaved >= self.config.autosave_interval
        if due and (self.saving is None or not self.saving.is_alive()):
            self._unsaved = 0
            # Beside serving: no answer waits for the disk.
            self.saving = threading.Thread(target=self._save_beside, name="osd_hf-autosave")
            self.saving.start()
        return report

    def _save_beside(self) -> None:
        save: Any = None if self._save is None else self._save()
        try:
            if save is not None:
                save()
        except Exception as error:
            logger.exception("Saving the session failed; the error is raised by the next call.")
            self.failed(error)
