"""When learning runs: never more than its share of the time and, idle, only between requests."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from osd_hf.utils.disk import in_child

__all__ = ["DutyCycle", "IdleWorker", "Traffic"]

logger = logging.getLogger(__name__)


class DutyCycle:
    """
    Rest behind work, so that learning takes no more than its share of the time.

    Args:
        share (`float`):
            Above 0, at most 1: no rest.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`):
            In seconds.
    """

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


class Traffic:
    """Who has the machine: requests, any number at once, or one micro-step of learning. A forked child counts its own
    requests alone."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.requests = 0
        self.is_stepping = False
        self._own = threading.local()
        in_child(self, Traffic._forget_other_threads)

    def _forget_other_threads(self) -> None:
        self.changed = threading.Condition()
        self.requests = getattr(self._own, "requests", 0)
        self.is_stepping = False

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Entered around a request, at its arrival: waits for the end of the micro-step under way, if there is one; no
        other begins before the request has ended."""
        with self.changed:
            self.requests += 1
            self._own.requests = getattr(self._own, "requests", 0) + 1
        try:
            with self.changed:
                self.changed.wait_for(lambda: not self.is_stepping)
            yield
        finally:
            with self.changed:
                self.requests -= 1
                self._own.requests -= 1
                self.changed.notify_all()


class IdleWorker:
    """
    A thread that learns while no request is running.

    Args:
        traffic (`Traffic`):
            Of the requests.
        has_work (`Callable[[], bool]`):
            Asked while no request runs; quick, and never raises.
        step (`Callable[[], None]`):
            One micro-step. What it raises goes to `failed`, and the thread goes on.
        failed (`Callable[[Exception], None]`):
            Told of a failure.
        duty_cycle (`DutyCycle`):
            The share of the time that steps may take.
    """

    def __init__(
        self,
        traffic: Traffic,
        has_work: Callable[[], bool],
        step: Callable[[], None],
        failed: Callable[[Exception], None],
        duty_cycle: DutyCycle,
    ) -> None:
        self.traffic = traffic
        self.has_work = has_work
        self.step = step
        self.failed = failed
        self.duty_cycle = duty_cycle
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, where the thread is not there yet: at first, or in a forked child, which has none."""
        with self.traffic.changed:
            if not self._stopped and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._run, name="osd_hf-learner", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread, after the micro-step under way."""
        with self.traffic.changed:
            self._stopped = True
            self.traffic.changed.notify_all()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._stopped

    def _run(self) -> None:
        traffic = self.traffic
        while True:
            with traffic.changed:
                while not self._stopped and (traffic.requests or not self._may_work()):
                    rest = self.duty_cycle.rest_seconds()
                    traffic.changed.wait(rest if rest > 0 else None)
                if self._stopped:
                    return
                traffic.is_stepping = True
            started = time.perf_counter()
            try:
                self.step()
            except Exception as error:
                logger.exception("Learning failed between requests; the error is raised by the next call.")
                self.failed(error)
            finally:
                self.duty_cycle.worked(time.perf_counter() - started)
                with traffic.changed:
                    traffic.is_stepping = False
                    traffic.changed.notify_all()

    def _may_work(self) -> bool:
        return self.duty_cycle.rest_seconds() == 0 and self.has_work()
