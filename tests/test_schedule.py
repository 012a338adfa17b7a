"""Learning between requests: parts of learning and requests never overlap."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from waiting import LONG

from osd_hf import OnlineConfig
from osd_hf.live_learning import LiveLearning, Traffic

# --- steps between requests -----------------------------------------------------------------------------------------


class Steps:
    """A learner that a test holds up: each step says that it has begun, and ends when it may."""

    traffic: Traffic
    drafts = None
    config = OnlineConfig(update_strategy="idle")

    def __init__(self) -> None:
        self.left = 0
        self.done = 0
        self.overlapped = 0
        self.began = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.running = 0
        self.working_domain: str | None = None
        self.unreported: list[Any] = []
        self.raises: Exception | None = None

    def has_work(self) -> bool:
        return self.left > 0

    def give(self, steps: int) -> None:
        with self.traffic.changed:
            self.left += steps
            self.traffic.changed.notify_all()

    def step(self) -> None:
        self.overlapped += self.running  # requests at work
        self.left -= 1
        self.began.release()
        assert self.may_end.acquire(timeout=LONG)
        self.overlapped += self.running
        self.done += 1
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error

    def request(self, inside: Callable[[], object] = lambda: None) -> None:
        with self.traffic.request():
            self.running += 1
            try:
                inside()
            finally:
                self.running -= 1


@contextmanager
def working(*, free: bool = False) -> Iterator[tuple[Steps, LiveLearning]]:
    steps = Steps()
    if free:
        steps.may_end.release(10_000)
    worker = LiveLearning(steps)  # type: ignore[arg-type]
    steps.traffic = worker.traffic
    try:
        yield steps, worker
    finally:
        steps.may_end.release(10_000)
        worker.stop()


def arrivals(traffic: Traffic) -> threading.Event:
    """Set when the next request has come as far as to wait for a step."""
    arrived, wait_for = threading.Event(), traffic.changed.wait_for

    def watched(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if timeout is None:
            arrived.set()
        return wait_for(predicate, timeout)

    traffic.changed.wait_for = watched  # type: ignore[method-assign]
    return arrived


def started(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> None:
    thread.join(LONG)
    assert not thread.is_alive()


def alive(worker: LiveLearning) -> bool:
    return worker._idle_thread is not None and worker._idle_thread.is_alive()


def all_done(steps: Steps, number: int) -> bool:
    changed = steps.traffic.changed
    with changed:
        return changed.wait_for(lambda: steps.done == number and not steps.traffic.is_stepping, LONG)


def test_a_request_waits_for_the_step_under_way_and_for_no_other() -> None:
    with working() as (steps, _):
        steps.give(3)
        assert steps.began.acquire(timeout=LONG)
        inside, may_leave = threading.Event(), threading.Event()

        def stay() -> None:
            inside.set()
            assert may_leave.wait(LONG)

        arrived = arrivals(steps.traffic)
        thread = started(lambda: steps.request(stay))
        assert arrived.wait(LONG)
        with steps.traffic.changed:  # it has let go of the lock, and waits
            assert steps.traffic.requests == 1
        assert not inside.is_set()
        steps.may_end.release()
        assert inside.wait(LONG)
        assert steps.done == 1
        steps.may_end.release(2)
        assert not steps.began.acquire(blocking=False)  # there is more to do, and the request is running
        may_leave.set()
        assert all_done(steps, 3)
        ended(thread)
        assert steps.overlapped == 0


def test_requests_and_steps_never_overlap() -> None:
    with working(free=True) as (steps, _):
        lock = threading.Lock()

        def serve() -> None:
            for _ in range(60):
                with steps.traffic.request():
                    with lock:
                        steps.running += 1
                    assert not steps.traffic.is_stepping
                    with lock:
                        steps.running -= 1
                    steps.give(1)

        threads = [started(serve) for _ in range(3)]
        for thread in threads:
            ended(thread)
        assert all_done(steps, 180)
        assert steps.overlapped == 0
