"""A reverse proxy in front of OpenAI-compatible engines that records answers to learn from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import posixpath
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, cast

import httpx2

from osd_hf.engines.completions import error_message, parse_address
from osd_hf.errors import ConfigError, first_line
from osd_hf.proxy.recorder import (
    COMPLETION_PATHS,
    ProxyCounts,
    Recorder,
    Recording,
    add_fields,
    reason_not_to_record,
    remove_fields,
    remove_fields_of_event,
    split_events,
)

METRICS_PATH = "/osd-hf/metrics"  # `/metrics` is the engine's
# Endpoints that vLLM opens with VLLM_SERVER_DEV_MODE=1. Who reaches them controls the engine.
DEVELOPMENT_ENDPOINTS = {
    "collective_rpc", "server_info", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "sleep", "wake_up",
    "is_sleeping", "release_kv_cache_memory", "pause", "resume", "is_paused", "abort_requests", "get_world_size",
    "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update", "update_weights",
    "start_draft_weight_update", "finish_weight_update", "update_weight_version", "weight_info", "weight_checker",
}  # fmt: skip
DOMAIN_HEADER, COLLECT_HEADER = b"x-osd-domain", b"x-osd-collect"
YES = (b"true", b"1", b"yes")
MAX_DOMAIN_CHARACTERS = 64
# Headers of one connection. The body was read, so `expect` has been answered.
HOP_HEADERS = {
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect",
}  # fmt: skip
UNAVAILABLE = (502, 503, 504)  # statuses of an engine, or of a server in front of it, that cannot answer now
REFUSED = (400, 422, 500, 501)  # statuses with which an engine may refuse the added fields
NOT_CONNECTED = (httpx2.ConnectError, httpx2.ConnectTimeout)
CONNECTION_LOST = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)
# An answer may take as long as its client waits, so only connecting has a timeout.
TIMEOUT = {"connect": 10.0, "read": None, "write": None, "pool": None}
KEEP_ALIVE_SECONDS = 2.0  # less than the 5 s of engines behind uvicorn
AVOID_SECONDS = 5.0  # after a failure

logger = logging.getLogger(__name__)
Headers = list[tuple[bytes, bytes]]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class Upstream:
    """An engine behind the proxy, at an address such as `http://localhost:8000`, with or without `/v1`. Raises
    ServerError if the URL is not an address, and ConfigError if it contains a user: the proxy passes on the keys of
    its clients."""

    def __init__(
        self,
        url: str,
        transport: httpx2.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        address, user, password = parse_address(url)
        self.name = str(address).rstrip("/").removesuffix("/v1")
        if user or password:
            raise ConfigError(f"{self.name} is given with a user; the proxy passes on the keys of its clients alone.")
        self.open_requests = 0  # that the engine is answering
        self._url = httpx2.URL(self.name)
        self._prefix = self._url.raw_path.rstrip(b"/")
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_SECONDS)
        self._transport = transport or httpx2.AsyncHTTPTransport(limits=limits)
        self._clock = clock
        self._is_failing = False
        self._avoid_until = -float("inf")

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes) -> httpx2.Response:
        """Send a request and return the response with an unread body; raises httpx2.TransportError. An engine may
        close a connection that was kept alive while a request is sent on it. Then the request is sent again on a new
        connection."""
        is_new_connection = False

        async def trace(event: str, info: object) -> None:
            nonlocal is_new_connection
            is_new_connection = is_new_connection or event.startswith("connection.connect_tcp")

        # The target is the path and query exactly as sent.
        extensions = {"target": self._prefix + target, "timeout": TIMEOUT, "trace": trace}
        request = httpx2.Request(method, self._url, headers=headers, content=body, extensions=extensions)
        try:
            return await self._transport.handle_async_request(request)
        except CONNECTION_LOST:
            if is_new_connection:
                raise
            return await self._transport.handle_async_request(request)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    @property
    def is_avoided(self) -> bool:
        """Whether other engines are tried first because this one failed recently."""
        return self._clock() < self._avoid_until

    def failed(self, reason: str) -> None:
        """Avoid the engine for some seconds."""
        if not self._is_failing:
            logger.warning("%s does not answer: %s.", self.name, reason)
        self._is_failing = True
        self._avoid_until = self._clock() + AVOID_SECONDS

    def answered(self) -> None:
        """Use the engine like others again."""
        self._is_failing = False
        self._avoid_until = -float("inf")


@dataclass
class _Request:
    """A client's request: the headers are those for the engine, and `parsed` is set if the answer is recorded."""

    method: str
    path: str
    target: bytes
    domain: str | None
    headers: Headers
    body: bytes
    parsed: Mapping[str, Any] | None = None


async def _read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """Return the body, or a part of it with more than `max_bytes`; `None` if the client leaves."""
    body, has_more = bytearray(), True
    while has_more and len(body) <= max_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    return bytes(body)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(eq=False)
class Proxy:
    """An ASGI application that passes requests to engines, and their answers back. The least busy engine that can be
    reached answers; `routes` are engines for requests with a label. A `share` of the requests get a recorded answer.
    `domain` is the label of requests without one. Larger bodies than `max_body_bytes` are refused. With
    `allow_development`, requests to development endpoints are passed on."""

    upstreams: list[Upstream]
    counts: ProxyCounts
    recorder: Recorder
    _: KW_ONLY
    routes: dict[str, Upstream] = field(default_factory=dict)
    share: float = 1.0
    domain: str | None = None
    max_body_bytes: int = 64 << 20
    allow_development: bool = False
    _share_credit: float = field(default=0.0, init=False)  # grows by `share` with each request; recording one costs 1

    def app(self, routes: Iterable[Any] = ()) -> Any:
        """Return the Starlette application, with `routes` of the proxy itself."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        @contextlib.asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[None]:
            yield
            for upstream in (*self.upstreams, *self.routes.values()):
                await upstream.close()

        return Starlette(routes=[*routes, Route("/{path:path}", self)], lifespan=lifespan)

    async def __call__(self, scope: Message, receive: Receive, send: Any) -> None:
        """Answer a request, and stop when its client leaves."""
        self.counts.requests += 1
        if not self.allow_development and _is_development_endpoint(scope["path"]):
            await _refuse(send, 404, "The proxy passes this on only if it runs with --allow-development.")
            return
        body = await _read_body(receive, self.max_body_bytes)
        if body is None:
            return
        if len(body) > self.max_body_bytes:
            await _refuse(send, 413, f"The body of the request has more than {self.max_body_bytes} bytes.")
            return
        answering = asyncio.ensure_future(self._answer(self._read_request(scope, body), send))
        leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.wait((answering, leaving))  # until the engine's connection is closed

    def _read_request(self, scope: Message, body: bytes) -> _Request:
        query, label = scope["query_string"], dict(scope["headers"]).get(DOMAIN_HEADER, b"").decode("latin-1")
        not_passed = (b"host", b"content-length", DOMAIN_HEADER, COLLECT_HEADER)
        request = _Request(
            method=scope["method"],
            path=scope["path"],
            target=scope["raw_path"] + (b"?" + query if query else b""),
            domain=label if label.isprintable() and 0 < len(label) <= MAX_DOMAIN_CHARACTERS else self.domain,
            headers=_end_to_end(scope["headers"], without=not_passed),
            body=body,
        )
        if request.method == "POST" and request.path in COMPLETION_PATHS:
            request.parsed = self._parse_to_record(request, [v for n, v in scope["headers"] if n == COLLECT_HEADER])
        return request

    def _parse_to_record(self, request: _Request, collect_headers: Sequence[bytes]) -> Mapping[str, Any] | None:
        """Return the JSON of a request if its answer is to be recorded."""
        if any(value.strip().lower() not in YES for value in collect_headers):  # anything but a clear yes
            self.counts.leave_out("its client does not want it collected")
            return None
        self._share_credit = min(self._share_credit + self.share, 1.0)
        if self._share_credit < 1 or not self.recorder.is_ready:
            return None
        try:
            parsed: Mapping[str, Any] = json.loads(request.body.decode())
            reason = reason_not_to_record(parsed)
        except (ValueError, TypeError, AttributeError, RecursionError):  # the engine judges malformed requests
            return None
        if reason is not None:
            self.counts.leave_out(reason)
            return None
        self._share_credit -= 1
        return parsed

    async def _answer(self, request: _Request, send: Any) -> None:
        """Pass on the answer of the first engine that can be reached."""
        for number, upstream in enumerate(self._by_preference(request.domain)):
            self.counts.retries += number > 0
            upstream.open_requests += 1
            try:
                response, recording = await self._send(upstream, request)
                try:
                    await self._pass_on(upstream, response, recording, send)
                finally:
                    await response.aclose()
                return
            except httpx2.TransportError as error:
                self._count_failure(upstream, error)
                if not isinstance(error, NOT_CONNECTED):  # the engine may have got the request
                    break
            finally:
                upstream.open_requests -= 1
        await _refuse(send, 502, "The engine cannot be reached.")

    def _by_preference(self, domain: str | None) -> list[Upstream]:
        """Return the engines that may answer, the best one first; equally busy ones take turns."""
        found = [self.routes[domain]] if domain in self.routes else self.upstreams
        first = self.counts.requests % len(found)
        return sorted(found[first:] + found[:first], key=lambda each: (each.is_avoided, each.open_requests))

    def _count_failure(self, upstream: Upstream, error: httpx2.TransportError) -> None:
        self.counts.engine_errors += 1
        is_plain = isinstance(error, httpx2.ConnectError)  # its text holds no request
        upstream.failed(first_line(error) if is_plain else type(error).__name__)

    async def _send(self, upstream: Upstream, request: _Request) -> tuple[httpx2.Response, Recording | None]:
        """Send a request, and again without the added fields if the engine refuses it."""
        recording, body, headers = None, request.body, request.headers
        if request.parsed is not None and self.recorder.can_record(upstream.name):
            recording = Recording(request.parsed, request.domain, upstream.name)
            is_chat = COMPLETION_PATHS[request.path]
            body = add_fields(body, request.parsed, is_chat=is_chat, num_logprobs=self.recorder.num_logprobs)
            # A compressed answer could not be read.
            headers = [(n, v) for n, v in headers if n != b"accept-encoding"] + [(b"accept-encoding", b"identity")]
        response = await upstream.send(request.method, request.target, headers, body)
        if recording is not None and response.status_code in REFUSED:
            try:
                await response.aread()
            finally:
                await response.aclose()
            # The rest of the message may quote the client's text.
            reason = f"it refuses the added fields ({error_message(response)[:60]}); let it give more log-probs"
            response = await upstream.send(request.method, request.target, request.headers, request.body)
            recording = None
            self.counts.retries += 1
            if response.status_code < 400:
                self.recorder.pause(upstream.name, f"{reason} (vLLM: --max-logprobs), or keep fewer")
        if response.status_code in UNAVAILABLE:
            upstream.failed(f"status {response.status_code}")
        else:
            upstream.answered()
        self.counts.engine_errors += response.status_code >= 500
        return response, recording

    async def _pass_on(
        self, upstream: Upstream, response: httpx2.Response, recording: Recording | None, send: Any
    ) -> None:
        headers = _end_to_end(response.headers.raw, without=(b"date",))  # the server writes the date itself
        if response.status_code != 200:
            recording = None
        if recording is None:
            pieces: AsyncIterator[bytes] = response.aiter_raw()
        else:
            headers = [(n, v) for n, v in headers if n.lower() not in (b"content-length", b"content-encoding")]
            if "text/event-stream" in response.headers.get("content-type", "").lower():
                pieces = _events(response, recording)
            else:
                body = await response.aread()
                recording.add(body)
                body = remove_fields(body)
                headers.append((b"content-length", b"%d" % len(body)))
                pieces = httpx2.ByteStream(body).__aiter__()
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        try:
            async for piece in pieces:
                self.counts.bytes += len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except httpx2.TransportError as error:
            self._count_failure(upstream, error)
            return  # the server breaks the connection, as the engine did
        if recording is not None:
            self.recorder.put(recording)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(response: httpx2.Response, recording: Recording) -> AsyncIterator[bytes]:
    """Yield the events of a stream as the client gets them, and record each one after that."""
    rest = b""
    async for piece in response.aiter_bytes():
        *events, rest = split_events(rest + piece)
        for event in events:
            if shown := remove_fields_of_event(event):
                yield shown
            recording.add(event, is_event=True)
    if rest:
        yield remove_fields_of_event(rest)
        recording.add(rest, is_event=True)


def _is_development_endpoint(path: str) -> bool:
    """Return whether a path names a development endpoint, with any prefix and spelling."""
    for _ in range(3):  # an engine unquotes once; a server in front of it may do so as well
        path = urllib.parse.unquote(path)
    path = posixpath.normpath(re.split("[?#;]", path.replace("\\", "/"))[0])
    return posixpath.basename(path).strip().lower() in DEVELOPMENT_ENDPOINTS


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], *, without: Sequence[bytes]) -> Headers:
    """Return the headers that are passed on."""
    lowered = [(name.lower(), name, value) for name, value in headers]
    listed = {
        word.strip().lower() for name, _, value in lowered if name == b"connection" for word in value.split(b",")
    }
    return [(name, value) for lower, name, value in lowered if lower not in HOP_HEADERS | listed | {*without}]


async def _refuse(send: Any, status: int, message: str) -> None:
    """Answer with an error of OpenAI's API, and close the connection."""
    from starlette.responses import JSONResponse

    kind = "invalid_request_error" if status < 500 else "bad_gateway"
    error = {"message": message, "type": kind, "param": None, "code": status}
    await JSONResponse({"error": error}, status, {"connection": "close"})({"type": "http"}, cast(Any, None), send)
