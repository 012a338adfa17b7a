"""A middleware that decides which HTTP requests are accepted, by address, origin, path, size, and rate."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osd_hf_app.sharing import Quota, RateLimit, visitor_id

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


def is_loopback(netloc: str) -> bool:
    """Return whether a name or an address, with or without a port, means this machine."""
    try:
        host = urlsplit(f"//{netloc}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AccessMiddleware:
    """An ASGI middleware in front of Gradio's app.

    With `is_public`, requests of untrusted visitors are limited for each, and other sites may call. Otherwise, unless
    there is a login, only requests to names of this machine are accepted: a page of another site could point its own
    name to this machine.
    """

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
    """Return whether no page of another site sent this request.

    Reads count as well: Gradio lets pages of any site read its responses.
    """
    if scope["method"] == "OPTIONS":  # only pages of other sites ask; without permission, they cannot set headers
        return False
    site = headers.get("sec-fetch-site")
    if site is not None:  # pages cannot set it
        is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        return site in ("none", "same-origin") or (is_link and scope["path"].strip("/") in PAGES)
    origin = headers.get("origin")  # for older browsers
    return origin is None or origin.lower().partition("://")[2] == netloc
