"""What an assistant has served, counted by domain."""

from __future__ import annotations

import threading
from typing import Any

from osd_hf.forks import in_child, renewing
from osd_hf.metrics import AcceptanceStats

__all__ = ["Tally"]


class Tally:
    """Acceptance of the requests served, by the domain of the request; may be used from several threads."""

    def __init__(self) -> None:
        self.requests = 0
        self._by_domain: dict[str | None, AcceptanceStats] = {}
        self._recent = AcceptanceStats()
        self._lock = threading.Lock()
        in_child(self, renewing(_lock=threading.Lock))

    def add(self, domain: str | None, stats: AcceptanceStats) -> None:
        """Count one request."""
        with self._lock:
            self.requests += 1
            self._by_domain[domain] = self._by_domain.get(domain, AcceptanceStats()) + stats
            self._recent = self._recent + stats

    def by_domain(self) -> dict[str | None, AcceptanceStats]:
        """Since the last reset."""
        with self._lock:
            return dict(self._by_domain)

    def total(self) -> AcceptanceStats:
        """Of all domains, since the last reset."""
        return sum(self.by_domain().values(), AcceptanceStats())

    def take_recent(self) -> tuple[int, AcceptanceStats]:
        """The number of all requests, and the stats of those since the last call."""
        with self._lock:
            recent, self._recent = self._recent, AcceptanceStats()
            return self.requests, recent

    def reset(self) -> None:
        """Count stats from zero again; the number of requests goes on."""
        with self._lock:
            self._by_domain.clear()
            self._recent = AcceptanceStats()

    def state(self) -> dict[str, Any]:
        """Ready for JSON."""
        with self._lock:
            requests, stats = self.requests, dict(self._by_domain)
        return {"requests": requests, "stats": [[domain, s.to_dict(derived=False)] for domain, s in stats.items()]}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        with self._lock:
            self.requests = int(state["requests"])
            self._by_domain = {domain: AcceptanceStats.from_dict(stats) for domain, stats in state["stats"]}
            self._recent = AcceptanceStats()
