"""Who uses the models: one at a time, in equal shares for all who wait, and first of all who comes back to them."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from osd_hf_app.visitors import is_fair

__all__ = ["Turn", "Turns"]

MARGIN_SECONDS = 0.03  # of work by which one who runs gives way to one who waits
PAUSE_SECONDS = 0.03  # of work that one who has had less than a share of it is ahead by on coming back, at most
MAX_BEGUN = 3  # answers at once that have begun: each holds its caches
LOOK_SECONDS = 0.25  # between two looks whether one who waits is still there
MAX_VISITORS = 256  # whose work is remembered


@dataclass(eq=False)
class _Place:
    visitor: str | None
    moved: Callable[[int], object]
    is_alone: bool
    has_turn: threading.Event = field(default_factory=threading.Event)
    has_begun: bool = False
    since: float = 0.0  # work of its thread when it was counted last
    told: int | None = None


class Turns:
    """
    A line in which visitors have equal shares of the models, in the middle of an answer too: whoever had least work
    done goes first. Work that is done while nobody else waits counts against nobody. Among equals, and those of whom
    nobody keeps an account (`None`), it is first come, first served.

    It is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996).

    Args:
        work (`Callable[[], float]`, *optional*):
            Seconds that the thread that calls has worked: nobody pays for the time that others take from them. On a
            device that the thread sleeps for, that is less than the device has worked.

    Attributes:
        max_begun (`int`):
            So many answers may have begun at once, of which each visitor has a share (`is_fair`).
    """

    def __init__(self, work: Callable[[], float] = time.thread_time) -> None:
        self.max_begun = MAX_BEGUN
        self._work = work
        self._lock = threading.Lock()
        self._line: deque[_Place] = deque()  # in the order of arrival, whoever has the turn among them
        self._running: _Place | None = None
        self._least = 0.0  # work that has been done for each of those who wait
        self._done: dict[str, float] = {}  # work, of those who wait or are not long gone

    def __len__(self) -> int:
        """Those who wait, and those who have begun."""
        return len(self._line)

    @contextlib.contextmanager
    def turn(
        self,
        moved: Callable[[int], object] = lambda before: None,
        *,
        visitor: str | None = None,
        is_gone: Callable[[], bool] | None = None,
        alone: bool = False,
    ) -> Iterator[Turn | None]:
        """
        Entered around a use of the models; waits until it is this one's turn. What is entered is `None` where the one
        who waited has gone.

        Args:
            moved (`Callable[[int], object]`, *optional*):
                Told how many are before this one, at once and whenever that changes; quick, and never raises.
            visitor (`str`, *optional*):
                On whose account the time goes.
            is_gone (`Callable[[], bool]`, *optional*):
                Looked at while waiting: whether nobody wants this turn any more.
            alone (`bool`, *optional*, defaults to `False`):
                Whether no answer may be in the middle meanwhile: those that have begun are ended first.
        """
        place = _Place(visitor, moved, alone)
        with self._lock:
            if visitor is not None:
                # Whoever is new comes before those who have more done, and not before whoever has least: addresses
                # are cheap.
                done = self._done.get(visitor, self._least)
                self._done[visitor] = max(done, self._least - PAUSE_SECONDS)
            self._line.append(place)
            self._go_on()
        while not place.has_turn.wait(None if is_gone is None else LOOK_SECONDS):
            with self._lock:
                if place.has_turn.is_set():
                    break
                assert is_gone is not None
                if is_gone():
                    self._line.remove(place)
                    self._go_on()
                    break
        if not place.has_turn.is_set():
            yield None
            return
        try:
            place.since = self._work()
            yield Turn(self, place)
        finally:
            with self._lock:
                self._count(place)
                self._line.remove(place)
                self._advance()
                self._running = None
                self._go_on()

    def _give_way(self, place: _Place) -> None:
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
        """Let the next one in, if nobody is, and tell all how many are before them."""
        if self._running is None and self._line:
            best = self._best(list(self._line))
            assert best is not None
            self._let(best)
        self._tell()

    def _let(self, place: _Place) -> None:
        self._running = place
        place.has_begun = True
        place.has_turn.set()

    def _best(self, places: list[_Place]) -> _Place | None:
        """Who is next of these, if one of them may be; `None` otherwise."""
        begun = [place for place in self._line if place.has_begun]
        for i, place in enumerate(places):
            if place.is_alone:  # whoever comes later waits, so that those who have begun come to an end
                places = places[: i + 1] + [other for other in places[i + 1 :] if other.has_begun]
                break
        held = Counter(place.visitor for place in begun)
        places = [
            place
            for place in places
            if place.has_begun or (len(begun) < self.max_begun and is_fair(held, place.visitor, self.max_begun))
        ]
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

    def _of(self, place: _Place) -> float:
        """Work that has been done for the visitor."""
        return -math.inf if place.visitor is None else self._done[place.visitor]

    def _count(self, place: _Place) -> None:
        """Add what the thread that calls, whose turn it is, has worked since the last count."""
        work = self._work()
        if place.visitor is not None:
            self._done[place.visitor] += work - place.since
        place.since = work

    def _advance(self) -> None:
        """Bring the least forward. Those who may not begin yet do not hold it back: otherwise whoever came anew, again
        and again, would be before those who have begun."""
        waiting = {place.visitor for place in self._line if place.visitor is not None}
        begun = {place.visitor for place in self._line if place.has_begun and place.visitor is not None}
        all_done = max(self._done.values(), default=0.0)
        self._least = max(self._least, min((self._done[visitor] for visitor in begun or waiting), default=all_done))
        if len(self._done) > max(MAX_VISITORS, len(waiting)):
            self._done.pop(min(self._done.keys() - waiting, key=self._done.__getitem__))


class Turn:
    """One's turn, while one has it."""

    def __init__(self, turns: Turns, place: _Place) -> None:
        self._turns, self._place = turns, place
        self.waited_seconds = 0.0

    def give_way(self) -> None:
        """Called again and again meanwhile: waits, where somebody else should go first."""
        before = time.perf_counter()
        self._turns._give_way(self._place)
        self.waited_seconds += time.perf_counter() - before
