"""Limits of Gradio's queue and of the log. Only this module uses Gradio's internals."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gradio as gr
from gradio import queueing, routes

from osd_hf_app.sharing import RateLimit, may_take, visitor_id

MAX_EVENTS = 150  # waiting or running events of untrusted visitors
MAX_UNREAD = 512  # messages to all pages
MAX_UNREAD_OF_PAGE = 64  # messages to one page; a page that reads has hardly any
MIN_UNREAD = 4  # messages to one page that are always allowed
UNREAD_SECONDS = 45.0  # after which unread messages are deleted
MAX_NAME_CHARACTERS = 64  # of a page session
QUEUE_FULL = "Too many requests at the moment. Try again in a few seconds."

FAILURE_RATE = (30, 60.0)  # logged failures, and seconds
LOGGERS = ("uvicorn.error", "asyncio", "osd_hf_app.sessions")


def _visitor(request: Any) -> str:
    return visitor_id(request.client.host if request.client else None)


def limit_queue(page: gr.Blocks, clock: Callable[[], float] = time.monotonic) -> None:
    """Limit the events of each visitor in the queue of a page, and the unread messages. Call it before the launch."""
    queue = page._queue
    push, send_message = queue.push, queue.send_message
    last_read: dict[str, float] = {}  # by page session
    visitors: dict[str, str] = {}  # by page session

    def unread(session: str) -> int:
        messages = queue.pending_messages_per_session.get(session)
        return 0 if messages is None else messages.qsize()

    def delete_unread() -> None:
        for session in list(last_read):
            is_awaited = any(i in queue.event_ids_to_events for i in queue.pending_event_ids_session.get(session, ()))
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

    async def limited_push(body: Any, request: Any, username: str | None) -> Any:
        delete_unread()
        visitor = _visitor(request)
        events = Counter[str | None](_visitor(event.request) for event in queue.event_ids_to_events.values())
        has_place = may_take(events, visitor, MAX_EVENTS) and reads(visitor)
        if not has_place or len(body.session_hash or "") > MAX_NAME_CHARACTERS:
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

    queue.push = limited_push  # type: ignore[method-assign]
    queue.send_message = limited_send  # type: ignore[method-assign]


def limit_log() -> None:
    """Log a few failures per minute only, because visitors can cause any number of them."""
    rate = RateLimit(*FAILURE_RATE)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(lambda record: rate.acquire(None))

    def print_exc() -> None:
        if rate.acquire(None):
            traceback.print_exc()

    for module in (queueing, routes):
        module.traceback = SimpleNamespace(print_exc=print_exc)
