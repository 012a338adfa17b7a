"""What comes in at all: whose address, from which page, to what, how much, and how often."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from osd_hf_app.mail import FULL
from osd_hf_app.visitors import Rate, Shares, visitor_at

__all__ = ["Door", "is_loopback"]

API = "/gradio_api/"
MAX_BODY_BYTES = 512 * 1024  # a prompt of 20,000 characters, however they are escaped, and the settings around it
BODY_SECONDS = 30.0  # until all of a body is there
OPEN = 200  # requests of strangers at once, those that are streamed to included
CALLS = (120, 2.0)  # events and other requests that cost work, of strangers, in so many seconds
FILES = (1200, 2.0)  # parts of the page; a page that is loaded asks for a hundred

# What the page and its programs need; all else that gradio offers (uploads, files, proxies, monitoring, tools that
# edit the app) is closed, whatever a later gradio adds to it.
POSTED = {"queue/join", "call", "run", "api", "cancel", "reset"}
READ = {
    "queue/data", "queue/status", "call", "heartbeat", "info", "openapi.json", "startup-events", "app_id", "user",
    "token", "login_check", "theme.css",
}  # fmt: skip
PAGES = {"", "config", "theme.css", "favicon.ico", "robots.txt", "manifest.json", "pwa_icon"}
FOLDERS = ("assets", "static", "svelte")
LOGIN = {"login", "logout"}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of this machine for itself, by its look."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Door:
    """
    An ASGI middleware in front of gradio's app.

    Args:
        app (`Callable`):
            What it stands before.
        is_public (`bool`):
            Whether strangers come: each of them then has a share of all requests, and any page may call.
        has_login (`bool`, *optional*, defaults to `False`):
            Whether all have to log in. Without it, and unless strangers come, only names of this machine for itself
            are answered to: under another one a page of elsewhere would pass for ours.
        has_room (`Callable[[str], bool]`, *optional*):
            Whether the queue would take one more event of a visitor: one that it would not is refused before anything
            is made of it.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        *,
        is_public: bool,
        has_login: bool = False,
        has_room: Callable[[str], bool] | None = None,
    ) -> None:
        self._app = app
        self._has_room = has_room
        self._is_public, self._has_login = is_public, has_login
        self._open = Shares(OPEN)
        self._calls, self._files = Rate(*CALLS), Rate(*FILES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # gradio has no use for others
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._refused(scope, headers)
        if refused is not None:
            await _answer(send, *refused)
            return
        if not self._is_public:
            await self._let_in(scope, headers, receive, send)
            return
        visitor = visitor_at(scope["client"][0] if scope.get("client") else None)
        is_file = scope["method"] in ("GET", "HEAD") and scope["path"].strip("/").split("/")[0] in FOLDERS
        if not (self._files if is_file else self._calls).take(visitor) or not self._open.take(visitor):
            await _answer(send, 429, "Too many requests from your address. Try again in a few seconds.")
            return
        try:
            if self._has_room is not None and _is_event(scope) and not self._has_room(visitor):
                await _answer(send, 503, FULL)
            else:
                await self._let_in(scope, headers, receive, send)
        finally:
            self._open.give(visitor)

    def _refused(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        """Why it is not for us, if it is not."""
        netloc = headers.get("host", "").lower()
        if not (self._is_public or self._has_login) and not is_loopback(_name(netloc)):
            return 403, (
                f"This app serves its own machine alone, and was called {netloc[:100]!r}. Open it as localhost; to "
                "let others in, start it with --public, or with --login."
            )
        is_read = scope["method"] in ("GET", "HEAD", "OPTIONS")
        if not (self._is_public or _is_of_no_other_site(scope, headers, netloc)):
            return 403, "A page of another site has no access to this app."
        if not self._is_known(scope["path"], is_read):
            return 404, "There is nothing at this address."
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return 413, f"At most {MAX_BODY_BYTES:,} bytes are taken at once."
        return None

    def _is_known(self, path: str, is_read: bool) -> bool:
        if path.startswith(API):
            parts = path.removeprefix(API).strip("/").split("/")
            known = READ if is_read else POSTED
            return parts[0] in known or "/".join(parts[:2]) in known
        first = path.strip("/").split("/")[0]
        if first in LOGIN:
            return self._has_login
        return is_read and (path.strip("/") in PAGES or first in FOLDERS or first == "pwa_icon")

    async def _let_in(self, scope: Scope, headers: dict[str, str], receive: Receive, send: Send) -> None:
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(receive)
        except TimeoutError:
            await _answer(send, 408, "The request took too long.")
            return
        if body is None:
            await _answer(send, 413, f"At most {MAX_BODY_BYTES:,} bytes are taken at once.")
            return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, again, send)


def _is_event(scope: Scope) -> bool:
    """Whether it is something that the queue would have to take."""
    parts = scope["path"].removeprefix(API).strip("/").split("/")
    return scope["method"] == "POST" and (parts[:2] == ["queue", "join"] or parts[0] == "call")


async def _body(receive: Receive) -> bytes | None:
    """All of it; `None` where it is too much."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":  # gone: what there is is no whole request, and is refused as such
            return b"".join(parts)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _is_of_no_other_site(scope: Scope, headers: dict[str, str], netloc: str) -> bool:
    """
    Whether no page of another site has sent this. Reads count as well: gradio lets any page read what it is answered,
    the key of whoever is logged in included.
    """
    if scope["method"] == "OPTIONS":  # asked by pages of other sites alone; refused, they cannot set a header
        return False
    site = headers.get("sec-fetch-site")
    if site is not None:  # no page can set it, and it holds whatever a proxy has made of the host
        is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        return site in ("none", "same-origin") or (is_link and scope["path"].strip("/") in PAGES)
    origin = headers.get("origin")  # older browsers, and names that are neither https nor of this machine
    return origin is None or origin.lower().partition("://")[2] in {
        netloc, headers.get("x-forwarded-host", netloc).lower()
    }  # fmt: skip


def _name(netloc: str) -> str:
    """A host without its port."""
    try:
        return urlsplit("//" + netloc).hostname or ""
    except ValueError:
        return ""


async def _answer(send: Send, status: int, text: str) -> None:
    body = json.dumps({"detail": text, "error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status in (408, 413):
        headers.append((b"connection", b"close"))  # what is still on its way is not waited for
    if status in (429, 503):
        headers.append((b"retry-after", b"2"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
