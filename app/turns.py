"""Who uses the models: one request at a time, first come first served."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

__all__ = ["Turns"]


class Turns:
    """A lock that is fair, as Python's is not: someone who sends many prompts lets others in between."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[tuple[threading.Event, Callable[[int], object]]] = deque()

    def __len__(self) -> int:
        """Those who wait, and the one whose turn it is."""
        return len(self._line)

    @contextlib.contextmanager
    def turn(self, moved: Callable[[int], object] = lambda before: None) -> Iterator[None]:
        """
        Entered around a use of the models; waits until all who came before have ended.

        Args:
            moved (`Callable[[int], object]`, *optional*):
                Told how many are before this one, at once and whenever that changes; quick, and never raises.
        """
        mine = threading.Event()
        with self._lock:
            moved(len(self._line))
            self._line.append((mine, moved))
            if len(self._line) == 1:
                mine.set()
        mine.wait()
        try:
            yield
        finally:
            with self._lock:
                self._line.popleft()
                for before, (_, told) in enumerate(self._line):
                    told(before)
                if self._line:
                    self._line[0][0].set()
