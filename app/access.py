"""Limits of requests: by address, origin, path, size, and rate; and of Gradio's queue and log, by its internals."""

from __future__ import annotations

import ipaddress
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
from gradio import queueing, routes
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osd_hf_app.sharing import Quota, RateLimit, may_take, visitor_id

API = "/gradio_api/"
MAX_BODY_BYTES = 512 * 1024  # a prompt of 20,000 escaped characters and the settings
TOO_OFTEN = 429, "Too many requests from your address. Try again in a few seconds."
TOO_LARGE = 413, f"A request may have at most {MAX_BODY_BYTES:,} bytes."
MAX_OPEN = 200  # open requests of untrusted visitors, including streams
CALL_RATE = (120, 2.0)  # requests of untrusted visitors, except for static files, and seconds

# What the page and programs need. All other paths of Gradio (uploads, files, proxies, monitoring, app editing) are
# closed, including those of later versions.
READ_METHODS = ("GET", "HEAD", "OPTIONS")
API_WRITES = set("queue/join call run api cancel reset".split())
API_READS = set("queue/data queue/status call heartbeat info openapi.json startup-events app_id theme.css".split())
PAGES = {"", *"config theme.css favicon.ico robots.txt manifest.json pwa_icon".split()}
STATIC_FOLDERS = ("assets", "static", "svelte")

MAX_EVENTS = 150  # waiting or running events of untrusted visitors
MAX_UNREAD = 512  # messages to all pages
MAX_UNREAD_OF_PAGE = 64  # messages to one page; a page that reads has hardly any
MIN_UNREAD = 4  # messages to one page that are always allowed
UNREAD_SECONDS = 45.0  # after which unread messages are deleted
MAX_NAME_CHARACTERS = 64  # of a page session
QUEUE_FULL = "Too many requests at the moment. Try again in a few seconds."

FAILURE_RATE = (30, 60.0)  # logged failures, and seconds
LOGGERS = ("uvicorn.error", "asyncio", "osd_hf_app.sessions")


def is_loopback(netloc: str) -> bool:
    """Return whether a name or an address, with or without a port, means this machine."""
    try:
        host = urlsplit(f"//{netloc}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AccessMiddleware:
    """An ASGI middleware in front of Gradio's app. With `is_public`, requests of untrusted visitors are limited for
    each, and other sites may call. Otherwise, unless there is a login, only requests to names of this machine are
    accepted: a page of another site could point its own name to this machine."""

    def __init__(self, app: ASGIApp, *, is_public: bool, has_login: bool = False) -> None:
        self._app = app
        self._is_public = is_public
        self._has_login = has_login
        self.open_requests = Quota(MAX_OPEN)
        self._calls = RateLimit(*CALL_RATE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # Gradio uses no others
            await send({"type": "websocket.close", "code": 1008})
            return
        received_bytes = 0

        async def limited_receive() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > MAX_BODY_BYTES:
                raise HTTPException(*TOO_LARGE)
            return message

        refusal = self._refusal(scope)
        visitor = visitor_id(scope["client"][0] if scope.get("client") else None)
        if refusal is None and self._is_public:
            is_file = scope["path"].strip("/").split("/")[0] in STATIC_FOLDERS
            if not (is_file or self._calls.acquire(visitor)) or not self.open_requests.acquire(visitor):
                refusal = TOO_OFTEN
        if refusal is not None:
            status, text = refusal
            response = JSONResponse({"detail": text, "error": text}, status, {"connection": "close"})
            await response(scope, receive, send)
            return
        try:
            await self._app(scope, limited_receive, send)
        finally:
            if self._is_public:
                self.open_requests.release(visitor)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the reason if a request is refused."""
        headers = Headers(scope=scope)
        netloc = headers.get("host", "").lower()
        if not (self._is_public or self._has_login or is_loopback(netloc)):
            return 403, (
                f"This app only serves its own machine, and was called as {netloc[:100]!r}. Open it as localhost, or "
                "start it with --login or --public."
            )
        if not (self._is_public or _is_same_site(scope, headers, netloc)):
            return 403, "Pages of other sites may not use this app."
        is_login = self._has_login and scope["path"].strip("/") in ("login", "logout")
        if not (is_login or _is_open_path(scope["path"], scope["method"] in READ_METHODS)):
            return 404, "Not found."
        length = headers.get("content-length", "0")
        return None if length.isdecimal() and int(length) <= MAX_BODY_BYTES else TOO_LARGE


def _is_open_path(path: str, is_read: bool) -> bool:
    if path.startswith(API):
        parts = path.removeprefix(API).strip("/").split("/")
        known = API_READS if is_read else API_WRITES
        return parts[0] in known or "/".join(parts[:2]) in known
    return is_read and (path.strip("/") in PAGES or path.strip("/").split("/")[0] in (*STATIC_FOLDERS, "pwa_icon"))


def _is_same_site(scope: Scope, headers: Headers, netloc: str) -> bool:
    """Return whether no page of another site sent this request. Reads count as well: Gradio lets pages of any site
    read its responses."""
    if scope["method"] == "OPTIONS":  # only pages of other sites ask; without permission, they cannot set headers
        return False
    site = headers.get("sec-fetch-site")
    if site is not None:  # pages cannot set it
        is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        return site in ("none", "same-origin") or (is_link and scope["path"].strip("/") in PAGES)
    origin = headers.get("origin")  # for older browsers
    return origin is None or origin.lower().partition("://")[2] == netloc


def _visitor(request: Any) -> str:
    return visitor_id(request.client and request.client.host)


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
