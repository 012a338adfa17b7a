"""Who uses the models: one at a time, and first of all who used them least of late."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["Turn", "Turns"]

MEMORY_SECONDS = 30.0  # within which use is forgotten, to a third
MARGIN_SECONDS = 0.15  # of use by which one who runs gives way to one who waits
MAX_BEGUN = 3  # answers at once that have begun: each holds its caches
LOOK_SECONDS = 0.25  # between two looks whether one who waits is still there
MAX_VISITORS = 256  # whose use is remembered


@dataclass(eq=False)
class _Place:
    visitor: str | None
    moved: Callable[[int], object]
    is_alone: bool
    has_turn: threading.Event = field(default_factory=threading.Event)
    has_begun: bool = False
    told: int | None = None


class Turns:
    """
    A line in which a visitor who used the models a lot lets others pass, in the middle of an answer too. Among equals,
    and those of whom nobody keeps an account (`None`), it is first come, first served.

    Args:
        clock (`Callable[[], float]`, *optional*):
            Seconds that only grow.

    Attributes:
        max_begun (`int`):
            So many answers may have begun at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_begun = MAX_BEGUN
        self._clock = clock
        self._lock = threading.Lock()
        self._line: deque[_Place] = deque()  # in the order of arrival, whoever has the turn among them
        self._running: _Place | None = None
        self._since = clock()
        self._used: dict[str, tuple[float, float]] = {}  # seconds, and when they were counted

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
            if visitor is not None and visitor not in self._used:
                # Whoever is new comes before those who used more, and not before whoever used least: addresses are
                # cheap.
                self._used[visitor] = (min(map(self._use, self._used), default=0.0), self._clock())
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
            yield Turn(self, place)
        finally:
            with self._lock:
                self._count()
                self._line.remove(place)
                self._running = None
                self._go_on()

    def _give_way(self, place: _Place) -> None:
        with self._lock:
            if len(self._line) == 1:
                return
            self._count()
            best = self._best([other for other in self._line if other is not place])
            if best is None or self._use(best.visitor) + MARGIN_SECONDS >= self._use(place.visitor):
                return
            place.has_turn.clear()
            self._let(best)
            self._tell()
        place.has_turn.wait()

    def _go_on(self) -> None:
        """Let the next one in, if nobody is, and tell all how many are before them."""
        if self._running is None and self._line:
            best = self._best(list(self._line))
            assert best is not None
            self._let(best)
        self._tell()

    def _let(self, place: _Place) -> None:
        self._running, self._since = place, self._clock()
        place.has_begun = True
        place.has_turn.set()

    def _best(self, places: list[_Place]) -> _Place | None:
        """Who is next of these, if one of them may be; `None` otherwise."""
        begun = [place for place in self._line if place.has_begun]
        for i, place in enumerate(places):
            if place.is_alone:  # whoever comes later waits, so that those who have begun come to an end
                places = places[: i + 1] + [other for other in places[i + 1 :] if other.has_begun]
                break
        if len(begun) >= self.max_begun:
            places = [place for place in places if place.has_begun]
        others = [place for place in places if not place.is_alone]
        if others:
            return min(others, key=lambda place: self._use(place.visitor))
        return next((place for place in places if all(other is place for other in begun)), None)

    def _tell(self) -> None:
        waiting = [place for place in self._line if place is not self._running]
        waiting.sort(key=lambda place: self._use(place.visitor))
        for before, place in enumerate(waiting if self._running is None else [self._running, *waiting]):
            if place.told != before:
                place.told = before
                place.moved(before)

    def _use(self, visitor: str | None) -> float:
        """Seconds of late."""
        seconds, when = self._used.get(visitor, (0.0, 0.0)) if visitor is not None else (0.0, 0.0)
        return seconds * math.exp((when - self._clock()) / MEMORY_SECONDS) if seconds else 0.0

    def _count(self) -> None:
        """Put the time since the last count on the account of the one whose turn it is."""
        now, place = self._clock(), self._running
        if place is not None and place.visitor is not None:
            self._used[place.visitor] = (self._use(place.visitor) + now - self._since, now)
            if len(self._used) > MAX_VISITORS:
                self._used.pop(min(self._used, key=self._use))
        self._since = now


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
