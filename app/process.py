"""Bounds for what strangers can make the process print, and for the memory that it keeps."""

from __future__ import annotations

import ctypes
import logging
import sys
import traceback
from types import SimpleNamespace

from gradio import queueing, routes

from osd_hf_app.visitors import Rate

__all__ = ["bound_console", "bound_heap"]

FAILURES = (30, 60.0)  # told in so many seconds
# Parameters of glibc's `mallopt`, as malloc.h numbers them.
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
MAPPED_BYTES = 2**20
ARENAS = 2
LOGGERS = ("uvicorn.error", "asyncio", "osd_hf_app.service", "osd_hf_app.page")


def bound_console() -> None:
    """Print no more failures than a few a minute, as a console is often a file: a server prints each with all its
    lines, and so does gradio for events that fail by what was sent."""
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


def bound_heap() -> bool:
    """
    Have what was freed go back to the system, where the C library is glibc's; before there are threads. By itself it
    keeps for each of many threads what that thread freed, and once blocks as large as a draft's weights were freed it
    puts all later ones of that size among the small ones, where they leave holes.

    Returns:
        `bool`: whether it could be set.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return all([mallopt(M_ARENA_MAX, ARENAS), mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)])
