"""How visitors share what is scarce: limits by address, shares of places, rates, and fair turns at the models."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

MARGIN_SECONDS = 0.03  # a running visitor gives way to a waiting one that has had this much less work
PAUSE_SECONDS = 0.03  # the most work by which a visitor that comes back is ahead of the others
MAX_BEGUN = 3  # answers under way at once: each holds its caches
LOOK_SECONDS = 0.25  # between two checks whether a waiting visitor is still there
MAX_VISITORS = 256  # whose work is remembered


def visitor_at(host: str | None) -> str:
    """The name of a stranger in all limits: the address, or for IPv6 its network of 64 bits, as whoever has one of its
    addresses has all of them. Names of chats and sessions are invented by strangers and stand for nobody."""
    try:
        address = ipaddress.ip_address((host or "").split("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
        address = address.ipv4_mapped
    return str(address)


def is_fair(held: Counter[str | None], visitor: str | None, capacity: int) -> bool:
    """Whether a visitor may hold one more place: as many as are still free, and the first one until twice the capacity
    is taken; one visitor alone leaves half of it. `None` is a trusted visitor, whom the capacity alone bounds."""
    total = held.total()
    if visitor is None or held[visitor]:
        return total < capacity if visitor is None else held[visitor] < capacity - total
    return total < 2 * capacity


class Shares:
    """A number of places that visitors share, as [`is_fair`] says."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    def take(self, visitor: str | None) -> bool:
        """Take a place; returns whether there was one for this visitor."""
        with self._lock:
            if not is_fair(self.held, visitor, self.capacity):
                return False
            self.held[visitor] += 1
            return True

    def give(self, visitor: str | None) -> None:
        """Give a place back."""
        with self._lock:
            self.held[visitor] -= 1
            if self.held[visitor] <= 0:
                del self.held[visitor]


class Rate:
    """How often something may happen in a span of `seconds`: `capacity` times, shared by as many visitors as came in
    the span before and one more; at most twice as often where many come at once."""

    def __init__(self, capacity: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity, self.seconds = capacity, seconds
        self._clock = clock
        self._began = clock()
        self._taken: Counter[str | None] = Counter()
        self._visitors = 1
        self._lock = threading.Lock()

    def take(self, visitor: str | None) -> bool:
        """Whether it may happen once more now."""
        with self._lock:
            now = self._clock()
            if now - self._began >= self.seconds:
                self._visitors = max(1, len(self._taken)) if now - self._began < 2 * self.seconds else 1
                self._began, self._taken = now, Counter()
            share = self.capacity if visitor is None else max(1, self.capacity // (self._visitors + 1))
            if self._taken[visitor] >= share or self._taken.total() >= 2 * self.capacity:
                return False
            self._taken[visitor] += 1
            return True


@dataclass(eq=False)
class Turn:
    """A place in the line, and the turn itself while it is held."""

    visitor: str | None
    moved: Callable[[int], object]
    is_alone: bool
    turns: Turns | None = None
    has_turn: threading.Event = field(default_factory=threading.Event)
    has_begun: bool = False
    since: float = 0.0  # work of its thread at the last count
    told: int | None = None
    waited_seconds: float = 0.0

    def give_way(self) -> None:
        """Wait where another visitor should go first; called again and again by whoever has the turn."""
        assert self.turns is not None
        before = time.perf_counter()
        self.turns.give_way(self)
        self.waited_seconds += time.perf_counter() - before


class Turns:
    """
    A line in which visitors have equal shares of the models, also in the middle of an answer: whoever has had least
    work done goes first. Work that is done while nobody else waits counts against nobody. Among equals, and among
    trusted visitors (`None`), who have no account, it is first come, first served.

    This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). `work` returns the seconds that the calling
    thread has worked: nobody pays for time that others take from them. On a device that the thread sleeps for, that is
    less than the device has worked.
    """

    def __init__(self, work: Callable[[], float] = time.thread_time) -> None:
        self.max_begun = MAX_BEGUN  # answers that may have begun at once; each visitor has a share of them
        self._work = work
        self._lock = threading.Lock()
        self._line: deque[Turn] = deque()  # in the order of arrival, whoever has the turn among them
        self._running: Turn | None = None
        self._least = 0.0  # work that has been done for each of those who wait
        self._done: dict[str, float] = {}  # work, of those who wait or were here lately

    def __len__(self) -> int:
        """Visits that wait or have begun."""
        return len(self._line)

    @contextlib.contextmanager
    def turn(self, moved: Callable[[int], object] = lambda before: None, *, visitor: str | None = None,
             is_gone: Callable[[], bool] | None = None, alone: bool = False) -> Iterator[Turn | None]:  # fmt: skip
        """
        Wait for a turn and hold it inside the `with` block; yields `None` where the visitor has gone meanwhile.

        Args:
            moved (`Callable[[int], object]`, *optional*):
                Called with the number of visits before this one, at once and whenever it changes; quick, never raises.
            visitor (`str`, *optional*):
                On whose account the work goes.
            is_gone (`Callable[[], bool]`, *optional*):
                Asked now and then while waiting: whether nobody wants this turn any more.
            alone (`bool`, *optional*, defaults to `False`):
                Whether answers that have begun must end first, and no other may begin before this turn.
        """
        place = Turn(visitor, moved, alone, self)
        with self._lock:
            if visitor is not None:
                # A new visitor comes before those who have had more work, and not before whoever has had least:
                # addresses are cheap.
                done = self._done.get(visitor, self._least)
                self._done[visitor] = max(done, self._least - PAUSE_SECONDS)
            self._line.append(place)
            self._go_on()
        while not place.has_turn.wait(None if is_gone is None else LOOK_SECONDS):
            with self._lock:
                if not place.has_turn.is_set() and is_gone is not None and is_gone():
                    self._line.remove(place)
                    self._go_on()
                    break
        if not place.has_turn.is_set():
            yield None
            return
        try:
            place.since = self._work()
            yield place
        finally:
            with self._lock:
                self._count(place)
                self._line.remove(place)
                self._advance()
                self._running = None
                self._go_on()

    def give_way(self, place: Turn) -> None:
        """Let another visitor go first who has had less work done, and wait for the next turn."""
        with self._lock:
            self._count(place)
            self._advance()
            best = self._best([other for other in self._line if other is not place])
            if best is None or self._of(best) + MARGIN_SECONDS >= self._of(place):
                return
            place.has_turn.clear()
            self._let(best)
            self._tell()
        place.has_turn.wait()
        place.since = self._work()

    def _go_on(self) -> None:
        """Let the next visit begin, if none is running, and tell all how many are before them."""
        if self._running is None and self._line:
            best = self._best(list(self._line))
            assert best is not None
            self._let(best)
        self._tell()

    def _let(self, place: Turn) -> None:
        self._running = place
        place.has_begun = True
        place.has_turn.set()

    def _best(self, places: list[Turn]) -> Turn | None:
        """Which of these places is next, if one of them may run; `None` otherwise."""
        begun = [place for place in self._line if place.has_begun]
        for i, place in enumerate(places):
            if place.is_alone:  # later visits wait until those that have begun are at their end
                places = places[: i + 1] + [other for other in places[i + 1 :] if other.has_begun]
                break
        held = Counter(place.visitor for place in begun)
        may_begin = len(begun) < self.max_begun
        places = [p for p in places if p.has_begun or (may_begin and is_fair(held, p.visitor, self.max_begun))]
        others = [place for place in places if not place.is_alone]
        if others:
            return min(others, key=self._of)
        return next((place for place in places if all(other is place for other in begun)), None)

    def _tell(self) -> None:
        waiting = [place for place in self._line if place is not self._running]
        waiting.sort(key=self._of)
        for before, place in enumerate(waiting if self._running is None else [self._running, *waiting]):
            if place.told != before:
                place.told = before
                place.moved(before)

    def _of(self, place: Turn) -> float:
        """Work that has been done for the visitor."""
        return -math.inf if place.visitor is None else self._done[place.visitor]

    def _count(self, place: Turn) -> None:
        """Add the work of the calling thread, whose turn it is, since the last count."""
        work = self._work()
        if place.visitor is not None:
            self._done[place.visitor] += work - place.since
        place.since = work

    def _advance(self) -> None:
        """Bring the least forward. Visitors who may not begin yet do not hold it back: otherwise whoever came anew,
        again and again, would go before those who have begun."""
        waiting = {place.visitor for place in self._line if place.visitor is not None}
        begun = {place.visitor for place in self._line if place.has_begun and place.visitor is not None}
        all_done = max(self._done.values(), default=0.0)
        self._least = max(self._least, min((self._done[visitor] for visitor in begun or waiting), default=all_done))
        if len(self._done) > max(MAX_VISITORS, len(waiting)):
            self._done.pop(min(self._done.keys() - waiting, key=self._done.__getitem__))
