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
MAX_CREDIT_SECONDS = 0.03  # the most by which a returning visitor is ahead of the others
MAX_STARTED = 3  # answers in progress at the same time: each holds its caches
LOOK_SECONDS = 0.25  # between two checks whether a waiting visitor has left
MAX_VISITORS = 256  # remembered visitors


def visitor_id(host: str | None) -> str:
    """Return the id of a visitor in all limits: the IPv4 address, or the /64 network of an IPv6 address.

    One visitor usually owns all IPv6 addresses of such a network. Names of chats and page sessions do not count,
    because visitors choose them.
    """
    try:
        address = ipaddress.ip_address((host or "").split("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
        address = address.ipv4_mapped
    return str(address)


def may_take(held: Counter[str | None], visitor: str | None, capacity: int) -> bool:
    """Return whether a visitor may take another place.

    A visitor may hold no more places than are free, so a single visitor leaves half of them. A first place is
    available until twice the capacity is taken. `None` is a trusted visitor, limited by the capacity only.
    """
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
            if not may_take(self.held, visitor, self.capacity):
                return False
            self.held[visitor] += 1
            return True

    def release(self, visitor: str | None) -> None:
        """Give a place back."""
        with self._lock:
            self.held[visitor] -= 1
            if self.held[visitor] <= 0:
                del self.held[visitor]


class RateLimit:
    """Allow `capacity` actions per period of `seconds`.

    Each visitor gets an equal part, calculated for the visitors of the previous period and an additional one. If many
    come together, at most twice the capacity is allowed.
    """

    def __init__(self, capacity: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.seconds = seconds
        self._clock = clock
        self._period_start = clock()
        self._used: Counter[str | None] = Counter()
        self._visitors = 1
        self._lock = threading.Lock()

    def allow(self, visitor: str | None) -> bool:
        """Count one action; return whether it is allowed now."""
        with self._lock:
            now = self._clock()
            if now - self._period_start >= self.seconds:
                is_recent = now - self._period_start < 2 * self.seconds
                self._visitors = max(1, len(self._used)) if is_recent else 1
                self._period_start = now
                self._used = Counter()
            share = self.capacity if visitor is None else max(1, self.capacity // (self._visitors + 1))
            if self._used[visitor] >= share or self._used.total() >= 2 * self.capacity:
                return False
            self._used[visitor] += 1
            return True


@dataclass(eq=False)
class Slot:
    """One request in a [`FairQueue`]."""

    queue: FairQueue
    visitor: str | None
    on_position: Callable[[int], object]
    is_alone: bool
    has_started: bool = False
    counted_until: float = 0.0  # work of the running thread at the last count
    position: int | None = None
    waited_seconds: float = 0.0

    def yield_to_others(self) -> None:
        """Wait if another visitor should run first. Call it often while the slot runs."""
        before = time.perf_counter()
        self.queue.reschedule(self)
        self.waited_seconds += time.perf_counter() - before


class FairQueue:
    """
    Give visitors equal shares of the models, even within an answer. One slot runs at a time.

    The visitor with the least used time runs first. Time used while no other visitor waits is free. Equal visitors,
    and trusted ones (`None`), run in the order of arrival. This is start-time fair queueing (Goyal, Vin and Cheng,
    SIGCOMM 1996).

    Args:
        work (`Callable[[], float]`, *optional*, defaults to `time.thread_time`):
            Returns the seconds that the calling thread has worked. Time lost to other processes does not count.
    """

    def __init__(self, work: Callable[[], float] = time.thread_time) -> None:
        self.max_started = MAX_STARTED  # answers in progress; each visitor has a share of them
        self._work = work
        self._changed = threading.Condition()
        self._slots: list[Slot] = []  # in the order of arrival; includes the running one
        self._running: Slot | None = None
        self._floor = 0.0  # time that each waiting visitor is considered to have used
        self._used: dict[str, float] = {}  # seconds of each waiting or recent visitor

    def __len__(self) -> int:
        """Return the number of slots that wait or run."""
        return len(self._slots)

    @contextlib.contextmanager
    def slot(
        self,
        on_position: Callable[[int], object] = lambda position: None,
        *,
        visitor: str | None = None,
        is_gone: Callable[[], bool] = lambda: False,
        alone: bool = False,
    ) -> Iterator[Slot | None]:
        """
        Wait for the models and hold them inside the `with` block. Yields `None` if the visitor has left.

        Args:
            on_position (`Callable[[int], object]`, *optional*):
                Called with the number of slots ahead, on arrival and after each change. Must be quick and not raise.
            visitor (`str`, *optional*): The visitor to charge.
            is_gone (`Callable[[], bool]`, *optional*): Returns whether the visitor has left; called while waiting.
            alone (`bool`, *optional*, defaults to `False`): Wait for started answers, and let no later one start.
        """
        slot = Slot(self, visitor, on_position, alone)
        with self._changed:
            if visitor is not None:
                # New visitors start at the floor and not at zero, because addresses are cheap.
                used = self._used.get(visitor, self._floor)
                self._used[visitor] = max(used, self._floor - MAX_CREDIT_SECONDS)
            self._slots.append(slot)
            self._report_positions()
            while not (runs := self._try_to_run(slot)) and not is_gone():
                self._changed.wait(LOOK_SECONDS)
            if not runs:
                self._remove(slot)
        if not runs:
            yield None
            return
        try:
            yield slot
        finally:
            with self._changed:
                self._count(slot)
                self._running = None
                self._remove(slot)

    def reschedule(self, slot: Slot) -> None:
        """Let a visitor who has used less time run first, and wait until the slot may run again."""
        with self._changed:
            self._count(slot)
            best = self._best([other for other in self._slots if other is not slot])
            if best is not None and self._used_by(best) + MARGIN_SECONDS < self._used_by(slot):
                self._running = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._try_to_run(slot))

    def _try_to_run(self, slot: Slot) -> bool:
        if self._running is not None or self._best(self._slots) is not slot:
            return False
        self._running = slot
        slot.has_started = True
        slot.counted_until = self._work()
        self._report_positions()
        return True

    def _remove(self, slot: Slot) -> None:
        self._slots.remove(slot)
        self._report_positions()
        self._changed.notify_all()

    def _best(self, slots: list[Slot]) -> Slot | None:
        """Return which of these slots should run next; `None` if none of them may run."""
        started = [slot for slot in self._slots if slot.has_started]
        for i, slot in enumerate(slots):
            if slot.is_alone:  # slots that arrived later may only continue
                slots = slots[: i + 1] + [other for other in slots[i + 1 :] if other.has_started]
                break
        held = Counter(slot.visitor for slot in started)
        is_full = len(started) >= self.max_started

        def may_run(slot: Slot) -> bool:
            return slot.has_started or (not is_full and may_take(held, slot.visitor, self.max_started))

        ready = [slot for slot in slots if may_run(slot)]
        if others := [slot for slot in ready if not slot.is_alone]:
            return min(others, key=self._used_by)
        return next((slot for slot in ready if all(other is slot for other in started)), None)

    def _report_positions(self) -> None:
        for position, slot in enumerate(sorted(self._slots, key=self._order)):
            if slot.position != position:
                slot.position = position
                slot.on_position(position)

    def _order(self, slot: Slot) -> tuple[bool, float]:
        return slot is not self._running, self._used_by(slot)

    def _used_by(self, slot: Slot) -> float:
        return -math.inf if slot.visitor is None else self._used[slot.visitor]

    def _count(self, slot: Slot) -> None:
        """Add the work of a running slot since the last count, and raise the floor.

        The floor is the least used time of the visitors who have started. If it depended on those who may not start
        yet, a stream of new visitors would always run before the others.
        """
        work = self._work()
        if slot.visitor is not None:
            self._used[slot.visitor] += work - slot.counted_until
        slot.counted_until = work
        started = [self._used_by(slot) for slot in self._slots if slot.has_started and slot.visitor is not None]
        self._floor = max(self._floor, min(started, default=0.0))
        waiting = {slot.visitor for slot in self._slots}
        if len(self._used) > max(MAX_VISITORS, len(waiting)):
            del self._used[min(self._used.keys() - waiting, key=self._used.__getitem__)]
