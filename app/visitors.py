"""Who comes, and how much of what is scarce one of them gets."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import Counter
from collections.abc import Callable

__all__ = ["Rate", "Shares", "is_fair", "visitor_at"]


def visitor_at(host: str | None) -> str:
    """
    What stands for a stranger in all limits: the address. The names of chats and sessions are the stranger's to
    invent. Of IPv6 it is the network of 64 bits, as whoever has one address has all of them.
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


def is_fair(held: Counter[str | None], visitor: str | None, capacity: int) -> bool:
    """
    Whether a visitor may hold one more: as many as are still free, and the first one until twice all places are taken.

    One who takes all there are to be had leaves half of them; where all come from one address, as through a proxy,
    that half is theirs. `None` is somebody who is trusted, and bound by the capacity alone.
    """
    total = held.total()
    if visitor is None or held[visitor]:
        return total < capacity if visitor is None else held[visitor] < capacity - total
    return total < 2 * capacity


class Shares:
    """
    Places that visitors share.

    Args:
        capacity (`int`):
            All places.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    def take(self, visitor: str | None) -> bool:
        """Take a place, if there is one for this visitor."""
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
    """
    How often something may happen in a span of time: by any visitor what is left of all if as many come as in the span
    before, and one more.

    Args:
        capacity (`int`):
            How often, by all visitors; twice as often where many come at once.
        seconds (`float`):
            The span.
        clock (`Callable[[], float]`, *optional*):
            Seconds that only grow.
    """

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
