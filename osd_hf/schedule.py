"""When updates run: after every so many requests, or only when asked."""

from __future__ import annotations

from osd_hf.config import OnlineConfig

__all__ = ["UpdateSchedule"]


class UpdateSchedule:
    """
    Counts learned-from requests and says when an update is due.

    Args:
        config (`OnlineConfig`):
            Gives `update_strategy` and `update_interval`.
    """

    def __init__(self, config: OnlineConfig) -> None:
        self.interval = config.update_interval if config.update_strategy == "interval" else None
        self.requests_waiting = 0

    def request_ended(self) -> bool:
        """Count one request; whether an update is due now."""
        self.requests_waiting += 1
        return self.interval is not None and self.requests_waiting >= self.interval

    def updated(self) -> None:
        """An update has run; counting starts again."""
        self.requests_waiting = 0
