"""The door: which requests come in, by their address, page, path, size and rate."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osd_hf_app.bounds import FULL
from osd_hf_app.sharing import Rate, Shares, visitor_at

API = "/gradio_api/"
MAX_BODY_BYTES = 512 * 1024  # a prompt of 20,000 characters, however they are escaped, and the settings around it
TOO_OFTEN = 429, "Too many requests from your address. Try again in a few seconds."
TOO_LARGE = 413, f"At most {MAX_BODY_BYTES:,} bytes are taken at once."
BODY_SECONDS = 30.0  # until all of a body is there
OPEN = 200  # requests of strangers at once, those that are streamed to included
CALLS = (120, 2.0)  # events and other requests that cost work, of strangers, in so many seconds
FILES = (1200, 2.0)  # parts of the page; a page that is loaded asks for a hundred

# What the page and its programs need; all else that gradio offers (uploads, files, proxies, monitoring, tools that
# edit the app) is closed, whatever a later gradio adds to it.
READS = ("GET", "HEAD", "OPTIONS")
POSTED = set("queue/join call run api cancel reset".split())
READ = set(
    "queue/data queue/status call heartbeat info openapi.json startup-events app_id user token login_check "
    "theme.css".split()
)
PAGES = {"", *"config theme.css favicon.ico robots.txt manifest.json pwa_icon".split()}
FOLDERS = ("assets", "static", "svelte")


def is_loopback(host: str) -> bool:
    """Whether a name or an address looks like that of this machine for itself."""
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
            are answered to: under another name a page of another site would pass for ours.
        has_room (`Callable[[str], bool]`, *optional*):
            Whether the queue would take one more event of a visitor. If not, it is refused before its body is read;
            the queue looks again when it takes the event, as others come while a body is on its way.
    """

    def __init__(self, app: ASGIApp, *, is_public: bool, has_login: bool = False,
                 has_room: Callable[[str], bool] | None = None) -> None:  # fmt: skip
        self._app, self._has_room = app, has_room
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
        headers = dict(Headers(scope=scope).items())
        refused = self._refused(scope, headers)
        if refused is not None:
            await _answer(*refused)(scope, receive, send)
            return
        if not self._is_public:
            await self._let_in(scope, receive, send)
            return
        visitor = visitor_at(scope["client"][0] if scope.get("client") else None)
        is_file = scope["method"] in ("GET", "HEAD") and scope["path"].strip("/").split("/")[0] in FOLDERS
        if not (self._files if is_file else self._calls).take(visitor) or not self._open.take(visitor):
            await _answer(*TOO_OFTEN)(scope, receive, send)
            return
        try:
            if self._has_room is not None and _is_event(scope) and not self._has_room(visitor):
                await _answer(503, FULL)(scope, receive, send)
            else:
                await self._let_in(scope, receive, send)
        finally:
            self._open.give(visitor)

    def _refused(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        """Why a request is refused, if it is."""
        netloc = headers.get("host", "").lower()
        if not (self._is_public or self._has_login) and not is_loopback(_name(netloc)):
            return 403, (
                f"This app serves its own machine alone, and was called {netloc[:100]!r}. Open it as localhost; to "
                "let others in, start it with --public, or with --login."
            )
        if not (self._is_public or _is_of_no_other_site(scope, headers, netloc)):
            return 403, "A page of another site has no access to this app."
        if not self._is_known(scope["path"], scope["method"] in READS):
            return 404, "There is nothing at this address."
        length = headers.get("content-length", "0")
        return None if length.isdecimal() and int(length) <= MAX_BODY_BYTES else TOO_LARGE

    def _is_known(self, path: str, is_read: bool) -> bool:
        if path.startswith(API):
            parts = path.removeprefix(API).strip("/").split("/")
            known = READ if is_read else POSTED
            return parts[0] in known or "/".join(parts[:2]) in known
        first = path.strip("/").split("/")[0]
        if first in ("login", "logout"):
            return self._has_login
        return is_read and (path.strip("/") in PAGES or first in FOLDERS or first == "pwa_icon")

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in READS:
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(receive)
        except TimeoutError:
            await _answer(408, "The request took too long.")(scope, receive, send)
            return
        if body is None:
            await _answer(*TOO_LARGE)(scope, receive, send)
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
    """The whole body; `None` where it is too large."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":  # gone: a part is no whole request, and is refused as such
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _is_of_no_other_site(scope: Scope, headers: dict[str, str], netloc: str) -> bool:
    """Whether no page of another site has sent this. Reads count as well: gradio lets any page read what it is
    answered, the key of whoever is logged in included."""
    if scope["method"] == "OPTIONS":  # asked by pages of other sites alone; refused, they cannot set a header
        return False
    site = headers.get("sec-fetch-site")
    if site is not None:  # no page can set it, and no proxy changes it with the host
        is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        return site in ("none", "same-origin") or (is_link and scope["path"].strip("/") in PAGES)
    origin = headers.get("origin")  # older browsers, and names that are neither https nor of this machine
    ours = (netloc, headers.get("x-forwarded-host", netloc).lower())
    return origin is None or origin.lower().partition("://")[2] in ours


def _name(netloc: str) -> str:
    """A host without its port."""
    try:
        return urlsplit("//" + netloc).hostname or ""
    except ValueError:
        return ""


def _answer(status: int, text: str) -> JSONResponse:
    headers = {}
    if status in (408, 413):
        headers["connection"] = "close"  # what is still on its way is not waited for
    if status in (429, 503):
        headers["retry-after"] = "2"
    return JSONResponse({"detail": text, "error": text}, status, headers)
