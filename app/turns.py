"""Who uses the models: one request at a time, first come first served."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator

__all__ = ["Turns"]


class Turns:
    """A lock that is fair, as Python's is not: someone who sends many prompts lets others in between."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[threading.Event] = deque()

    def __len__(self) -> int:
        """Those who wait, and the one whose turn it is."""
        return len(self._line)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Entered around a use of the models; waits until all who came before have ended."""
        mine = threading.Event()
        with self._lock:
            self._line.append(mine)
            if len(self._line) == 1:
                mine.set()
        mine.wait()
        try:
            yield
        finally:
            with self._lock:
                self._line.popleft()
                if self._line:
                    self._line[0].set()
