"""Bounds for what gradio keeps (the one place that knows its insides), what the process prints, and its memory."""

from __future__ import annotations

import ctypes
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gradio as gr
from gradio import queueing, routes
from gradio.state_holder import SessionState, StateHolder

from osd_hf_app.sharing import Rate, is_fair, visitor_at

MAX_EVENTS = 150  # of strangers at once: those that wait, and those that are being worked on
MAX_UNREAD = 512  # messages to strangers
FEW = 4  # messages that may be unread without more ado
MAX_UNREAD_OF_ONE = 64  # messages to one page; one that reads has hardly any
UNREAD_SECONDS = 45.0  # after which what nobody asked for is thrown away
MAX_NAME = 64  # characters of a page's name for itself
FULL = "Too many requests at the moment. Try again in a few seconds."

FAILURES = (30, 60.0)  # told in so many seconds
LOGGERS = ("uvicorn.error", "asyncio", "osd_hf_app.service", "osd_hf_app.page")
# Parameters of glibc's `mallopt`, as malloc.h numbers them.
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
MAPPED_BYTES = 2**20
ARENAS = 2


class _Events(dict[str, Any]):
    """The events of a queue by their ids. Each is counted once, when it is taken."""

    def __init__(self) -> None:
        self.held: Counter[str | None] = Counter()  # by visitor

    def __setitem__(self, event_id: str, event: Any) -> None:
        super().__setitem__(event_id, event)
        self.held[_sender(event.request)] += 1

    def pop(self, event_id: str, default: Any = None) -> Any:
        event = super().pop(event_id, default)
        if event is not default:
            self.held -= Counter([_sender(event.request)])
        return event

    __delitem__ = pop


def _sender(request: Any) -> str:
    return visitor_at(request.client.host if request.client else None)


def bound_queue(page: gr.Blocks, clock: Callable[[], float] = time.monotonic) -> Callable[[str], bool]:
    """Let a page's queue, made and not launched, hold no more than its share for any visitor, and nothing for long
    that nobody reads. Its statistics, which it makes a table of after each event, are switched off: nobody sees them.
    Returns a function that tells whether one more event of a visitor would be taken."""
    queue = page._queue
    push, send_message = queue.push, queue.send_message
    events = queue.event_ids_to_events = _Events()
    touched: dict[str, float] = {}  # by the name of a page's session
    whose: dict[str, str] = {}

    def sweep() -> None:
        for name in list(touched):
            is_awaited = any(i in events for i in queue.pending_event_ids_session.get(name, ()))
            if clock() - touched[name] > UNREAD_SECONDS and not is_awaited:
                queue.pending_messages_per_session.pop(name, None)
                queue.pending_event_ids_session.pop(name, None)
                del touched[name], whose[name]

    def is_read(visitor: str) -> bool:
        """Whether a visitor takes what is sent, or leaves no more than a share unread."""
        unread: Counter[str | None] = Counter()
        for name, owner in whose.items():
            messages = queue.pending_messages_per_session.get(name)
            unread[owner] += 0 if messages is None else messages.qsize()
        return is_fair(unread, visitor, MAX_UNREAD)

    def has_room(visitor: str) -> bool:
        sweep()
        return is_fair(events.held, visitor, MAX_EVENTS) and is_read(visitor)

    async def pushed(body: Any, request: Any, username: str | None) -> Any:
        visitor = _sender(request)
        if len(body.session_hash or "") > MAX_NAME or not has_room(visitor):
            return False, FULL, "queue_full"
        told = await push(body=body, request=request, username=username)
        if told[0]:
            touched[body.session_hash], whose[body.session_hash] = clock(), visitor
        return told

    def sent(event: Any, event_message: Any) -> None:
        messages = queue.pending_messages_per_session.get(event.session_hash)
        unread = 0 if messages is None else messages.qsize()
        owner = whose.get(event.session_hash, "")
        if messages is None or unread >= MAX_UNREAD_OF_ONE or (unread >= FEW and not is_read(owner)):
            event.alive = False  # as gradio marks those whose page has gone
            return
        if event.session_hash in touched and not unread:
            touched[event.session_hash] = clock()
        send_message(event, event_message)

    queue.push, queue.send_message = pushed, sent  # type: ignore[method-assign]
    queue.compute_analytics_summary = lambda records: {}  # type: ignore[method-assign]
    queue.ANALYTICS_MAX_EVENTS = 1
    return has_room


class _State(SessionState):
    """What gradio remembers of a page, without the copy of all components and what they show: that is for links to a
    page as it was, which the app does not offer."""

    def __init__(self, blocks: Any) -> None:
        super().__init__(SimpleNamespace(default_config=blocks.default_config, blocks=()))

    def __setitem__(self, key: int, value: Any) -> None:
        super().__setitem__(key, value)
        self.config_values.clear()

    def _update_config(self, key: int) -> None:
        pass

    def _update_value_in_config(self, key: int, value: Any) -> None:
        pass


class _States(StateHolder):
    """The states of pages; gradio makes and keeps one for every name that anything is asked in."""

    def __getitem__(self, session_id: str) -> SessionState:
        if len(session_id) > MAX_NAME:
            return _State(self.blocks)
        if session_id not in self.session_data:
            self.session_data[session_id] = _State(self.blocks)
        return super().__getitem__(session_id)


def bound_states(page: gr.Blocks) -> None:
    """Keep the states of a launched page small, and their making quick."""
    states = _States()
    states.set_blocks(page)
    page.app.state_holder = states


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
    """Have freed memory go back to the system; returns whether that could be set, which only glibc can, and before
    there are threads. It would keep what each thread has freed, and once blocks as large as a draft's weights were
    freed it would put later ones of that size among the small ones, where they leave holes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return all([mallopt(M_ARENA_MAX, ARENAS), mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)])
