"""A middleware that decides which HTTP requests are accepted, by address, origin, path, size, and rate."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osd_hf_app.limits import QUEUE_FULL
from osd_hf_app.sharing import Quota, RateLimit, visitor_id

API = "/gradio_api/"
MAX_BODY_BYTES = 512 * 1024  # a prompt of 20,000 escaped characters and the settings
TOO_OFTEN = 429, "Too many requests from your address. Try again in a few seconds."
TOO_LARGE = 413, f"A request may have at most {MAX_BODY_BYTES:,} bytes."
BODY_SECONDS = 30.0  # until the body must be complete
MAX_OPEN = 200  # open requests of untrusted visitors, including streams
CALL_RATE = (120, 2.0)  # requests of untrusted visitors that cost work, and seconds
FILE_RATE = (1200, 2.0)  # the same for static files; a page loads about a hundred

# What the page and programs need. All other paths of Gradio (uploads, files, proxies, monitoring, app editing) are
# closed, including those of later versions.
READ_METHODS = ("GET", "HEAD", "OPTIONS")
API_WRITES = set("queue/join call run api cancel reset".split())
API_READS = set(
    "queue/data queue/status call heartbeat info openapi.json startup-events app_id user token login_check "
    "theme.css".split()
)
PAGES = {"", *"config theme.css favicon.ico robots.txt manifest.json pwa_icon".split()}
STATIC_FOLDERS = ("assets", "static", "svelte")


def is_loopback(host: str) -> bool:
    """Return whether a name or an address means this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class AccessMiddleware:
    """
    An ASGI middleware in front of Gradio's app.

    Args:
        app (`ASGIApp`): The app to protect.
        is_public (`bool`): Serve untrusted visitors: requests are limited for each, and other sites may call.
        has_login (`bool`, *optional*, defaults to `False`):
            All visitors must log in. Otherwise, unless public, only requests to names of this machine are accepted:
            a page of another site could point its own name to this machine.
        has_room (`Callable[[str], bool]`, *optional*):
            Returns whether the queue accepts another event of a visitor. If not, its body is not read.
    """

    def __init__(
        self, app: ASGIApp, *, is_public: bool, has_login: bool = False, has_room: Callable[[str], bool] | None = None
    ) -> None:
        self._app = app
        self._has_room = has_room
        self._is_public = is_public
        self._has_login = has_login
        self.open_requests = Quota(MAX_OPEN)
        self._calls = RateLimit(*CALL_RATE)
        self._files = RateLimit(*FILE_RATE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # Gradio uses no others
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = dict(Headers(scope=scope).items())
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _response(*refusal)(scope, receive, send)
            return
        if not self._is_public:
            await self._forward(scope, receive, send)
            return
        visitor = visitor_id(scope["client"][0] if scope.get("client") else None)
        is_file = scope["method"] in ("GET", "HEAD") and scope["path"].strip("/").split("/")[0] in STATIC_FOLDERS
        rate = self._files if is_file else self._calls
        if not rate.allow(visitor) or not self.open_requests.acquire(visitor):
            await _response(*TOO_OFTEN)(scope, receive, send)
            return
        try:
            if self._has_room is not None and _is_event(scope) and not self._has_room(visitor):
                await _response(503, QUEUE_FULL)(scope, receive, send)
            else:
                await self._forward(scope, receive, send)
        finally:
            self.open_requests.release(visitor)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        """Return the status and the reason if a request is refused."""
        netloc = headers.get("host", "").lower()
        if not (self._is_public or self._has_login) and not is_loopback(_hostname(netloc)):
            return 403, (
                f"This app only serves its own machine, and was called as {netloc[:100]!r}. Open it as localhost, or "
                "start it with --public or --login."
            )
        if not (self._is_public or _is_same_site(scope, headers, netloc)):
            return 403, "Pages of other sites may not use this app."
        if not self._is_open_path(scope["path"], scope["method"] in READ_METHODS):
            return 404, "Not found."
        length = headers.get("content-length", "0")
        return None if length.isdecimal() and int(length) <= MAX_BODY_BYTES else TOO_LARGE

    def _is_open_path(self, path: str, is_read: bool) -> bool:
        if path.startswith(API):
            parts = path.removeprefix(API).strip("/").split("/")
            known = API_READS if is_read else API_WRITES
            return parts[0] in known or "/".join(parts[:2]) in known
        first = path.strip("/").split("/")[0]
        if first in ("login", "logout"):
            return self._has_login
        return is_read and (path.strip("/") in PAGES or first in STATIC_FOLDERS or first == "pwa_icon")

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in READ_METHODS:
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read_body(receive)
        except TimeoutError:
            await _response(408, "The request took too long.")(scope, receive, send)
            return
        if body is None:
            await _response(*TOO_LARGE)(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)


def _is_event(scope: Scope) -> bool:
    """Return whether a request adds an event to the queue."""
    parts = scope["path"].removeprefix(API).strip("/").split("/")
    return scope["method"] == "POST" and (parts[:2] == ["queue", "join"] or parts[0] == "call")


async def _read_body(receive: Receive) -> bytes | None:
    """Return the complete body, or `None` if it is too large."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":  # disconnected; Gradio refuses the incomplete body
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _is_same_site(scope: Scope, headers: dict[str, str], netloc: str) -> bool:
    """Return whether no page of another site sent this request.

    Reads count as well: Gradio lets pages of any site read its responses, including the key of a logged-in user.
    """
    if scope["method"] == "OPTIONS":  # only pages of other sites ask; without permission, they cannot set headers
        return False
    site = headers.get("sec-fetch-site")
    if site is not None:  # pages cannot set it, and proxies do not change it
        is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        return site in ("none", "same-origin") or (is_link and scope["path"].strip("/") in PAGES)
    origin = headers.get("origin")  # for older browsers, and for names that are neither https nor local
    own_names = (netloc, headers.get("x-forwarded-host", netloc).lower())
    return origin is None or origin.lower().partition("://")[2] in own_names


def _hostname(netloc: str) -> str:
    try:
        return urlsplit("//" + netloc).hostname or ""
    except ValueError:
        return ""


def _response(status: int, text: str) -> JSONResponse:
    headers = {}
    if status in (408, 413):
        headers["connection"] = "close"  # do not wait for the remaining body
    if status in (429, 503):
        headers["retry-after"] = "2"
    return JSONResponse({"detail": text, "error": text}, status, headers)
