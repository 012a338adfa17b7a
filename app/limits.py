"""Limits of what Gradio keeps in memory, of the log, and of the heap. Only this module uses Gradio's internals."""

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

from osd_hf_app.sharing import RateLimit, may_take, visitor_id

MAX_EVENTS = 150  # waiting or running events of untrusted visitors
MAX_UNREAD = 512  # messages to all pages
MAX_UNREAD_OF_PAGE = 64  # messages to one page; a page that reads has hardly any
MIN_UNREAD = 4  # messages to one page that are always allowed
UNREAD_SECONDS = 45.0  # after which unread messages are deleted
MAX_NAME_CHARACTERS = 64  # of a page session
QUEUE_FULL = "Too many requests at the moment. Try again in a few seconds."

FAILURE_RATE = (30, 60.0)  # logged failures, and seconds
LOGGERS = ("uvicorn.error", "asyncio", "osd_hf_app.service", "osd_hf_app.page")
# Parameters of glibc's `mallopt`, as numbered in malloc.h.
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
MMAP_THRESHOLD_BYTES = 2**20
MAX_ARENAS = 2


class _Events(dict[str, Any]):
    """The events of a queue by their ids, counted by visitor."""

    def __init__(self) -> None:
        self.held: Counter[str | None] = Counter()

    def __setitem__(self, event_id: str, event: Any) -> None:
        super().__setitem__(event_id, event)
        self.held[_visitor(event.request)] += 1

    def pop(self, event_id: str, default: Any = None) -> Any:
        event = super().pop(event_id, default)
        if event is not default:
            self.held -= Counter([_visitor(event.request)])
        return event

    __delitem__ = pop


def _visitor(request: Any) -> str:
    return visitor_id(request.client.host if request.client else None)


def limit_queue(page: gr.Blocks, clock: Callable[[], float] = time.monotonic) -> Callable[[str], bool]:
    """Limit the events of each visitor in the queue of a page, and the unread messages.

    Call it before the launch. The queue's own statistics are disabled, because they are not shown. Returns a function
    that tells whether another event of a visitor would be accepted.
    """
    queue = page._queue
    push, send_message = queue.push, queue.send_message
    events = queue.event_ids_to_events = _Events()
    last_read: dict[str, float] = {}  # by page session
    visitors: dict[str, str] = {}  # by page session

    def unread(session: str) -> int:
        messages = queue.pending_messages_per_session.get(session)
        return 0 if messages is None else messages.qsize()

    def delete_unread() -> None:
        for session in list(last_read):
            is_awaited = any(i in events for i in queue.pending_event_ids_session.get(session, ()))
            if clock() - last_read[session] > UNREAD_SECONDS and not is_awaited:
                queue.pending_messages_per_session.pop(session, None)
                queue.pending_event_ids_session.pop(session, None)
                del last_read[session], visitors[session]

    def reads(visitor: str) -> bool:
        """Return whether a visitor has at most a fair share of all unread messages."""
        held: Counter[str | None] = Counter()
        for session, owner in visitors.items():
            held[owner] += unread(session)
        return may_take(held, visitor, MAX_UNREAD)

    def has_room(visitor: str) -> bool:
        delete_unread()
        return may_take(events.held, visitor, MAX_EVENTS) and reads(visitor)

    async def limited_push(body: Any, request: Any, username: str | None) -> Any:
        visitor = _visitor(request)
        if len(body.session_hash or "") > MAX_NAME_CHARACTERS or not has_room(visitor):
            return False, QUEUE_FULL, "queue_full"
        result = await push(body=body, request=request, username=username)
        if result[0]:
            last_read[body.session_hash] = clock()
            visitors[body.session_hash] = visitor
        return result

    def limited_send(event: Any, event_message: Any) -> None:
        session, count = event.session_hash, unread(event.session_hash)
        is_gone = session not in queue.pending_messages_per_session or count >= MAX_UNREAD_OF_PAGE
        if is_gone or (count >= MIN_UNREAD and not reads(visitors.get(session, ""))):
            event.alive = False  # Gradio's mark for closed pages
            return
        if session in last_read and not count:
            last_read[session] = clock()
        send_message(event, event_message)

    queue.push = limited_push
    queue.send_message = limited_send
    queue.compute_analytics_summary = lambda records: {}
    queue.ANALYTICS_MAX_EVENTS = 1
    return has_room


class _SmallState(SessionState):
    """The state of a page without a copy of all components, which only deep links need."""

    def __init__(self, blocks: Any) -> None:
        super().__init__(SimpleNamespace(default_config=blocks.default_config, blocks=()))

    def __setitem__(self, key: int, value: Any) -> None:
        super().__setitem__(key, value)
        self.config_values.clear()

    def _update_config(self, key: int) -> None:
        pass

    def _update_value_in_config(self, key: int, value: Any) -> None:
        pass


class SmallStates(StateHolder):
    """The states of all pages. Gradio keeps one for every session name in a request."""

    def __getitem__(self, session_id: str) -> SessionState:
        if len(session_id) > MAX_NAME_CHARACTERS:
            return _SmallState(self.blocks)
        if session_id not in self.session_data:
            self.session_data[session_id] = _SmallState(self.blocks)
        return super().__getitem__(session_id)


def limit_states(page: gr.Blocks) -> None:
    """Keep the states of a launched page small."""
    states = SmallStates()
    states.set_blocks(page)
    page.app.state_holder = states


def limit_log() -> None:
    """Log a few failures per minute only, because visitors can cause any number of them."""
    rate = RateLimit(*FAILURE_RATE)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(lambda record: rate.allow(None))

    def print_exc() -> None:
        if rate.allow(None):
            traceback.print_exc()

    for module in (queueing, routes):
        module.traceback = SimpleNamespace(print_exc=print_exc)


def limit_heap() -> bool:
    """Return freed memory to the system; return whether glibc accepted the settings.

    Call it before threads start. By default, glibc keeps what each thread has freed. After it has freed a block as
    large as a draft's weights, it also allocates later ones among small blocks, where they leave holes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return all([mallopt(M_ARENA_MAX, MAX_ARENAS), mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)])
