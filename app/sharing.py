"""Share scarce resources among visitors: visitor ids, quotas, rate limits, and a fair queue for the models."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MARGIN_SECONDS = 0.03  # a running answer yields to a visitor who has used this much less time
LOOK_SECONDS = 0.25  # between two checks whether a waiting visitor has left


def visitor_id(host: str | None) -> str:
    """Return the id of a visitor in all limits: the IPv4 address, or the /64 network of an IPv6 address. One visitor
    usually owns all IPv6 addresses of such a network. Names of chats and page sessions do not count, because visitors
    choose them."""
    try:
        address = ipaddress.ip_address((host or "").split("%")[0])
    except ValueError:
        return "unknown"
    address = getattr(address, "ipv4_mapped", None) or address
    return str(address if address.version == 4 else ipaddress.ip_network((address, 64), strict=False))


def may_take(held: Counter[str | None], visitor: str | None, capacity: int) -> bool:
    """Return whether a visitor may take another place. A visitor may hold no more places than are free, so a single
    visitor leaves half of them. A first place is available until twice the capacity is taken. `None` is a trusted
    visitor, limited by the capacity only."""
    total = held.total()
    if visitor is None:
        return total < capacity
    if held[visitor]:
        return held[visitor] < capacity - total
    return total < 2 * capacity


class Quota:
    """Count the places that each visitor holds, under the rule of [`may_take`]."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    def acquire(self, visitor: str | None) -> bool:
        """Take a place for a visitor; return whether one was available."""
        with self._lock:
            if is_free := may_take(self.held, visitor, self.capacity):
                self.held[visitor] += 1
            return is_free

    def release(self, visitor: str | None) -> None:
        """Give a place back."""
        with self._lock:
            self.held -= Counter([visitor])


class RateLimit(Quota):
    """A quota of actions per period of `seconds`."""

    def __init__(self, capacity: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(capacity)
        self._seconds = seconds
        self._clock = clock
        self._period_start = clock()

    def acquire(self, visitor: str | None) -> bool:
        """Count one action; return whether it is allowed now."""
        if self._clock() - self._period_start >= self._seconds:
            self._period_start = self._clock()
            self.held = Counter()
        return super().acquire(visitor)


@dataclass(eq=False)
class Slot:
    """One request in a [`FairQueue`]."""

    visitor: str | None
    has_started: bool = False
    counted_until: float = 0.0  # work of the running thread at the last count
    waited_seconds: float = 0.0  # since the start, for other visitors


class FairQueue:
    """Give visitors equal shares of the models, even within an answer. One slot runs at a time. The visitor with the
    least used time runs first. Time used while no other visitor waits is free. Equal visitors, and trusted ones
    (`None`), run in the order of arrival. This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). At
    most `max_started` slots have started. `work` returns the seconds that the calling thread has worked."""

    def __init__(self, max_started: int, work: Callable[[], float] = time.thread_time) -> None:
        self.max_started = max_started
        self._work = work
        self._changed = threading.Condition()
        self._slots: list[Slot] = []  # in the order of arrival; includes the running one
        self._running: Slot | None = None
        self._floor = 0.0  # least used time of the visitors who have started; new visitors begin there
        self._used: dict[str, float] = {}  # seconds of each visitor who waits or is above the floor

    @contextlib.contextmanager
    def slot(
        self, keep_waiting: Callable[[int], bool] = lambda position: True, *, visitor: str | None = None
    ) -> Iterator[Slot | None]:
        """Wait for the models and hold them inside the `with` block. Yields `None` if the visitor has left.
        `keep_waiting` is called with the number of slots ahead, again and again, until it returns `False`."""
        slot = Slot(visitor)
        with self._changed:
            if visitor is not None:
                self._used[visitor] = max(self._used.get(visitor, 0.0), self._floor)
            self._slots.append(slot)
            while not (runs := self._try_to_run(slot)) and keep_waiting(self._position(slot)):
                self._changed.wait(LOOK_SECONDS)
        try:
            yield slot if runs else None
        finally:
            with self._changed:
                if runs:
                    self._count(slot)
                    self._running = None
                self._slots.remove(slot)
                waiting = {other.visitor for other in self._slots}
                self._used = {who: used for who, used in self._used.items() if who in waiting or used > self._floor}
                self._changed.notify_all()

    def yield_to_others(self, slot: Slot) -> None:
        """Let a visitor who has used less time run first. Call it often while a slot runs."""
        with self._changed:
            self._count(slot)
            best = self._best([other for other in self._slots if other is not slot])
            if best is None or self._used_by(best) + MARGIN_SECONDS >= self._used_by(slot):
                return
            started = time.perf_counter()
            self._running = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._try_to_run(slot))
            slot.waited_seconds += time.perf_counter() - started

    def _try_to_run(self, slot: Slot) -> bool:
        if self._running is not None or self._best(self._slots) is not slot:
            return False
        self._running = slot
        slot.has_started = True
        slot.counted_until = self._work()
        return True

    def _best(self, slots: list[Slot]) -> Slot | None:
        """Return which of these slots should run next; `None` if none of them may run."""
        held = Counter(slot.visitor for slot in self._slots if slot.has_started)

        def may_run(slot: Slot) -> bool:
            is_full = held.total() >= self.max_started
            return slot.has_started or (not is_full and may_take(held, slot.visitor, self.max_started))

        return min(filter(may_run, slots), key=self._used_by, default=None)

    def _position(self, slot: Slot) -> int:
        order = sorted(self._slots, key=lambda other: (other is not self._running, self._used_by(other)))
        return order.index(slot)

    def _used_by(self, slot: Slot) -> float:
        return -math.inf if slot.visitor is None else self._used[slot.visitor]

    def _count(self, slot: Slot) -> None:
        """Add the work of a running slot since the last count, and raise the floor."""
        work = self._work()
        if slot.visitor is not None:
            self._used[slot.visitor] += work - slot.counted_until
        slot.counted_until = work
        # Those who may not start yet do not count, or a stream of new visitors would always run before the others.
        started = [self._used_by(slot) for slot in self._slots if slot.has_started and slot.visitor is not None]
        self._floor = max(self._floor, min(started, default=0.0))
