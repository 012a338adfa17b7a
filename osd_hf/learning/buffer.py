"""What replay draws from: a fair sample of each domain's requests, bounded in all."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

import numpy as np

from osd_hf.trace import Trace

__all__ = ["ReplayBuffer"]

MOST_DOMAINS = 1024  # with a sample of their own; labels may be anybody's


class ReplayBuffer:
    """
    Requests learned from, a reservoir (Vitter's algorithm R) per domain: each keeps a uniform sample of all requests
    that its domain has had, however long ago; domains beyond the first 1024 share one. When all of them together are
    over the capacity, the largest gives way, so that a domain that went away is still there when it comes back.

    Args:
        capacity (`int`):
            Most requests kept, over all domains.
        rng (`np.random.Generator`):
            Decides who gives way.
    """

    def __init__(self, capacity: int, rng: np.random.Generator) -> None:
        self.capacity = capacity
        self.rng = rng
        self.seen: dict[str | None, int] = {}
        self._kept: dict[str | None, list[Trace]] = {}

    def append(self, trace: Trace) -> None:
        """Take one request in; one of the largest domain may have to go for it, or it itself."""
        domain = self._domain(trace)
        kept = self._kept.setdefault(domain, [])
        self.seen[domain] = self.seen.get(domain, 0) + 1
        if len(self) < self.capacity:
            kept.append(trace)
            return
        largest = max(self._kept.values(), key=len)
        # Only where it stays smaller: by turns the largest, domains would let in whatever comes, and forget.
        if len(kept) + 1 < len(largest):
            kept.append(trace)
            largest.pop(int(self.rng.integers(len(largest))))
        else:
            place = int(self.rng.integers(self.seen[domain]))
            if place < len(kept):
                kept[place] = trace

    def _domain(self, trace: Trace) -> str | None:
        """Whose sample a request belongs to: with labels beyond the most there may be, that of those without one."""
        return trace.domain if trace.domain in self.seen or len(self.seen) < MOST_DOMAINS else None

    def extend(self, traces: Iterable[Trace]) -> None:
        """Take several in, in order."""
        for trace in traces:
            self.append(trace)

    def sample(self, n: int) -> list[Trace]:
        """`n` different requests, at most those there are; each as likely as any other."""
        everything = list(self)
        n = min(n, len(everything))
        return [everything[i] for i in self.rng.choice(len(everything), n, replace=False)] if n else []

    def restore(self, traces: Iterable[Trace], seen: Iterable[tuple[str | None, int]]) -> None:
        """Hold what was saved: the requests, and of each domain how many it had had."""
        self.seen = {domain: int(count) for domain, count in seen}
        self._kept = {domain: [] for domain in self.seen}
        for trace in traces:
            self._kept.setdefault(self._domain(trace), []).append(trace)
        while len(self) > self.capacity:  # of a larger buffer
            largest = max(self._kept.values(), key=len)
            largest.pop(int(self.rng.integers(len(largest))))

    def discard(self, traces: Container[Trace]) -> None:
        """Let go of requests that are among these."""
        for kept in self._kept.values():
            kept[:] = [trace for trace in kept if trace not in traces]

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.seen.clear()

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def __iter__(self) -> Iterator[Trace]:
        return (trace for kept in self._kept.values() for trace in kept)
