"""Who comes, and how much of what is scarce one of them gets."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import Counter
from collections.abc import Callable

__all__ = ["Rate", "Shares", "visitor_at"]


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


class Shares:
    """
    Places of which each visitor may hold as many as are still free.

    One who takes all there are to be had leaves half to the others, two leave a third, and so on; where all come
    from one address, as through a proxy, there is still half of everything for them.

    Args:
        capacity (`int`):
            All places.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    def is_open_to(self, visitor: str | None) -> bool:
        """Whether there is a place; `None` is somebody who is trusted, and bound by the capacity alone."""
        free = self.capacity - self.held.total()
        return free > 0 if visitor is None else self.held[visitor] < free

    def take(self, visitor: str | None) -> bool:
        """Take a place, if there is one."""
        with self._lock:
            if not self.is_open_to(visitor):
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
    Shares of what may happen in a span of time.

    Args:
        capacity (`int`):
            How often, by all visitors.
        seconds (`float`):
            The span.
        clock (`Callable[[], float]`, *optional*):
            Seconds that only grow.
    """

    def __init__(self, capacity: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity, self.seconds = capacity, seconds
        self._clock = clock
        self._began = clock()
        self._shares = Shares(capacity)
        self._lock = threading.Lock()

    def take(self, visitor: str | None) -> bool:
        """Whether it may happen once more now."""
        with self._lock:
            if self._clock() - self._began >= self.seconds:
                self._began, self._shares = self._clock(), Shares(self.capacity)
            return self._shares.take(visitor)
