"""What strangers can make the app print is bounded: a console is often a file."""

from __future__ import annotations

import logging
import traceback
from types import SimpleNamespace

from gradio import queueing, routes

from osd_hf_app.visitors import Rate

__all__ = ["bound_console"]

FAILURES = (30, 60.0)  # told in so many seconds
LOGGERS = ("uvicorn.error", "asyncio", "osd_hf_app.service", "osd_hf_app.page")


def bound_console() -> None:
    """Print no more failures than a few a minute: a server prints each with all its lines, and so does gradio for
    events that fail by what was sent."""
    rate = Rate(*FAILURES)

    def is_told(record: logging.LogRecord) -> bool:
        return rate.take(None)

    for name in LOGGERS:
        logging.getLogger(name).addFilter(is_told)

    def print_exc() -> None:
        if rate.take(None):
            traceback.print_exc()

    for module in (queueing, routes):
        module.traceback = SimpleNamespace(print_exc=print_exc)  # type: ignore[attr-defined]
