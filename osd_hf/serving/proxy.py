"""A reverse proxy in front of OpenAI-compatible engines, which collects what a draft can be taught from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any

import httpx2

from osd_hf.engine.completions import message_of, parse_address
from osd_hf.errors import ConfigError, first_line
from osd_hf.serving.adding import READ, Shape, asking, edited, edited_event, gives_all, reason_against
from osd_hf.serving.events import EventSplitter, data_span
from osd_hf.serving.keeping import Asking, Keeper, ProxyCounts, Recording

__all__ = ["METRICS_PATH", "Engine", "Proxy"]

METRICS_PATH = "/osd-hf/metrics"  # as `/metrics` is the engine's
DOMAIN_HEADER, COLLECT_HEADER = b"x-osd-domain", b"x-osd-collect"
MOST_DOMAIN = 64  # characters of a label
# Headers that are about one connection; a server writes the date itself, and a body that was read has been asked for.
OF_CONNECTION = {
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect",
}  # fmt: skip
CONNECT_SECONDS = 10.0  # an answer may take as long as the client waits
KEEP_ALIVE_SECONDS = (
    2.0  # less than the 5 of engines behind uvicorn, which would close a connection just as it is used
)
FIRST_REST, LONGEST_REST = 1.0, 30.0  # seconds in which an engine that failed is tried last
REFUSED = (400, 422, 500, 501)  # with which an engine may answer what was added to a request

logger = logging.getLogger(__name__)
Message = MutableMapping[str, Any]
Headers = list[tuple[bytes, bytes]]


class _ClientLeftError(Exception):
    """The client has closed its connection."""


class _TooLargeError(Exception):
    """The body of a request is larger than allowed."""


class _NoEngineError(Exception):
    """No engine has answered."""


# --- engines --------------------------------------------------------------------------------------------------------


class Engine:
    """
    An engine behind the proxy.

    Args:
        url (`str`): Such as `http://localhost:8000`, with or without `/v1`.
        transport (`httpx2.AsyncBaseTransport`, *optional*): Sends requests to it; HTTP by default.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`): Seconds.

    Raises:
        ServerError: the URL is no address.
        ConfigError: it holds a password, where clients' own keys are passed on.
    """

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
        self._url, self._clock = httpx2.URL(self.name), clock
        self._prefix = self._url.raw_path.rstrip(b"/")
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_SECONDS)
        self._transport = transport or httpx2.AsyncHTTPTransport(limits=limits)
        self.asking = Asking(self.name, clock)
        self.shapes: dict[tuple[str, bool], Shape] = {}  # by path and whether the answer is a stream
        self.busy = 0  # requests under way
        self._rests_until, self._rest = -float("inf"), 0.0

    async def send(
        self, method: str, target: bytes, headers: Headers, content: bytes | AsyncIterable[bytes]
    ) -> httpx2.Response:
        """Its response, whose body is still to be read; raises `httpx2.TransportError`."""
        timeout = {"connect": CONNECT_SECONDS, "read": None, "write": None, "pool": None}
        request = httpx2.Request(
            method, self._url.copy_with(raw_path=self._prefix + target), headers=headers, content=content,
            extensions={"timeout": timeout},
        )  # fmt: skip
        return await self._transport.handle_async_request(request)

    def failed(self, error: Exception) -> None:
        """Try others first for a while."""
        if not self._rest:
            why = first_line(error) if isinstance(error, httpx2.ConnectError) else type(error).__name__
            logger.warning("%s does not answer: %s.", self.name, why)
        self._rest = min(max(2 * self._rest, FIRST_REST), LONGEST_REST)
        self._rests_until = self._clock() + self._rest
        self.shapes.clear()  # it may come back as another version

    @property
    def is_resting(self) -> bool:
        """Whether it has failed just now."""
        return self._clock() < self._rests_until

    def answered(self) -> None:
        """Say that it is there."""
        self._rest, self._rests_until = 0.0, -float("inf")

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


# --- one request ----------------------------------------------------------------------------------------------------


class _Body:
    """The body of a client's request, as it comes."""

    def __init__(self, receive: Callable[[], Awaitable[Message]], most: int) -> None:
        self._receive, self._most = receive, most
        self.has_begun, self._ended = False, asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.has_begun, size = True, 0
        while not self._ended.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeftError
            piece = message.get("body", b"")
            if not message.get("more_body", False):
                self._ended.set()
            size += len(piece)
            if size > self._most:
                raise _TooLargeError
            if piece:
                yield piece

    async def whole(self) -> bytes:
        """All of it."""
        return b"".join([piece async for piece in self])

    async def client_left(self) -> None:
        """Wait until the client closes its connection."""
        await self._ended.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


@dataclass
class _Request:
    """
    A client's request.

    Attributes:
        method (`str`), path (`str`), target (`bytes`), domain (`str`, *optional*): What is asked for, and its label.
        headers (`Headers`): Those that are for the engine.
        content (`bytes` or `_Body`): Its body: as it comes, or whole where it is small enough to be sent twice.
        parsed (`Mapping`, *optional*): The same, where the answer is to be collected.
    """

    method: str
    path: str
    target: bytes
    domain: str | None
    headers: Headers
    content: bytes | _Body
    parsed: Mapping[str, Any] | None = None


@dataclass
class _Exchange:
    """
    What is done with an answer while it passes.

    Attributes:
        content (`bytes` or `_Body`): What the engine is sent.
        asked (`Shape`, *optional*): How the engine writes what it is not asked for, where that was asked for.
        noted (`Shape`, *optional*): What is found out about that by an answer that nothing was asked for beside.
        recording (`Recording`, *optional*): What is kept of it.
        kind (`tuple[str, bool]`): Its path, and whether it is asked for as a stream.
        has_ended (`bool`): Whether a choice has said why it ended.
    """

    content: bytes | _Body
    asked: Shape | None = None
    noted: Shape | None = None
    recording: Recording | None = None
    kind: tuple[str, bool] = ("", False)
    has_ended: bool = False

    @property
    def is_read(self) -> bool:
        """Whether the answer is looked at."""
        return self.noted is not None or self.recording is not None

    def passed(self, piece: bytes, *, is_event: bool) -> bytes:
        """What the client gets of an event, or of a whole body."""
        passed, edit = piece, self.noted.note if self.noted else self.asked.restored if self.asked else None
        try:
            if edit is not None:
                if is_event:
                    passed, values = edited_event(piece, edit, is_asked=self.asked is not None)
                else:
                    passed, values = edited(piece, edit)
                choices = values.get("choices") or ()
                self.has_ended |= any(choice.get("finish_reason") is not None for choice in choices)
            if self.recording is not None and (span := data_span(piece) if is_event else (0, len(piece))):
                self.recording.add(piece[slice(*span)], is_event=is_event)
        except Exception:  # noqa: BLE001  # what is no answer as we know them is passed on as it is
            self.noted = None
        return passed

    def end(self, engine: Engine) -> None:
        """Say that all of the answer has passed."""
        if self.noted is not None and self.has_ended:
            engine.shapes[self.kind] = self.noted
        if self.recording is not None:
            self.recording.end()

    def close(self) -> None:
        """Forget what was kept of an answer that has not ended."""
        if self.recording is not None and not self.recording.has_ended:
            self.recording.forget()


# --- the proxy ------------------------------------------------------------------------------------------------------


class Proxy:
    """
    An ASGI application that passes requests on to engines, and their answers back, byte for byte.

    Args:
        engines (`Sequence[Engine]`): The least busy one answers, and another one where that cannot be reached.
        counts (`ProxyCounts`): Counts what it does.
        keeper (`Keeper`, *optional*): Takes what is collected; nothing is without one.
        routes (`Mapping[str, Engine]`, *optional*): The engine of requests with a label.
        share (`float`, *optional*, defaults to 1.0): Share of the requests that are collected.
        domain (`str`, *optional*): Label of requests that do not say one.
        max_body_bytes (`int`, *optional*, defaults to 64 MiB): Requests with a larger body are refused.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        counts: ProxyCounts,
        keeper: Keeper | None = None,
        *,
        routes: Mapping[str, Engine] | None = None,
        share: float = 1.0,
        domain: str | None = None,
        max_body_bytes: int = 64 << 20,
    ) -> None:
        self.engines, self.counts, self.keeper, self.routes = list(engines), counts, keeper, dict(routes or {})
        self.share, self.domain, self.max_body_bytes = share, domain, max_body_bytes
        self._credit, self._turn = 0.0, 0

    def app(self, routes: Iterable[Any] = ()) -> Any:
        """
        The Starlette application, with some routes (`starlette.routing.Route`) of its own before those of the engines.

        Raises:
            ConfigError: the extra `serve` is not installed.
        """
        try:
            from starlette.applications import Starlette
            from starlette.routing import Route
        except ImportError as error:
            raise ConfigError('The proxy needs starlette: pip install "osd-hf[serve]".') from error

        @contextlib.asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[None]:
            yield
            for engine in (*self.engines, *self.routes.values()):
                await engine.close()

        return Starlette(routes=[*routes, Route("/{path:path}", self)], lifespan=lifespan)

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Answer a request, until its client leaves."""
        self.counts.requests += 1
        body = _Body(receive, self.max_body_bytes)
        tasks = answer, left = [
            asyncio.ensure_future(t) for t in (self._answer(scope, body, send), body.client_left())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()
            left.cancel()
            await asyncio.wait((answer, left))
        if not answer.cancelled():
            answer.result()

    async def _answer(self, scope: Message, body: _Body, send: Any) -> None:
        try:
            request = await self._request(scope, body)
            engine, response, exchange = await self._asked(request)
            try:
                await self._pass_on(engine, response, exchange, send)
            finally:
                engine.busy -= 1
                exchange.close()
                await response.aclose()
        except _ClientLeftError:
            pass
        except _TooLargeError:
            await _refuse(send, 413, f"The body of the request has more than {self.max_body_bytes} bytes.")
        except _NoEngineError:
            await _refuse(send, 502, "The engine cannot be reached.")

    async def _request(self, scope: Message, body: _Body) -> _Request:
        headers = dict(scope["headers"])
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size) > self.max_body_bytes:
            raise _TooLargeError
        query, label = scope["query_string"], headers.get(DOMAIN_HEADER, b"").decode("latin-1")
        request = _Request(
            scope["method"], scope["path"], scope["raw_path"] + (b"?" + query if query else b""),
            label if label.isprintable() and 0 < len(label) <= MOST_DOMAIN else self.domain,
            _end_to_end(scope["headers"], but=(b"host", b"content-length", DOMAIN_HEADER, COLLECT_HEADER)), body,
        )  # fmt: skip
        if request.method == "POST" and request.path in READ:
            request.content = await body.whole()
            began = time.perf_counter()
            request.parsed = self._parsed(request.content, headers)
            self.counts.seconds_added += time.perf_counter() - began
        elif b"content-length" in headers:  # of a body that is not held here
            request.headers.append((b"content-length", size))
        elif b"transfer-encoding" not in headers:
            request.content = await body.whole()
        return request

    def _parsed(self, content: bytes, headers: Mapping[bytes, bytes]) -> Mapping[str, Any] | None:
        """The request, where its answer is to be collected."""
        if self.keeper is None:
            return None
        if headers.get(COLLECT_HEADER, b"").lower() in (b"false", b"0", b"no"):
            self.counts.leave_out("its client does not want it collected")
            return None
        self._credit = min(self._credit + self.share, 1.0)
        if self._credit < 1 or not self.keeper.is_taking:
            return None
        try:
            parsed = json.loads(content.decode())
            reason = reason_against(parsed)
        except Exception:  # noqa: BLE001  # what it says is for the engine to judge
            return None
        if reason is not None:
            self.counts.leave_out(reason)
            return None
        self._credit -= 1
        return parsed  # type: ignore[no-any-return]

    async def _asked(self, request: _Request) -> tuple[Engine, httpx2.Response, _Exchange]:
        """The response of an engine, which is busy with it, and what is done with that."""
        engines = self._in_turn(request.domain)
        was_sent = False
        for number, engine in enumerate([*engines, engines[0]]):
            if number == len(engines) and not was_sent:  # a second time only where it closed an old connection
                break
            self.counts.retries += number > 0
            engine.busy += 1
            try:
                response, exchange = await self._sent(engine, request)
            except httpx2.TransportError as error:
                engine.busy -= 1
                self.counts.engine_errors += 1
                engine.failed(error)
                is_unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
                has_gone = isinstance(request.content, _Body) and request.content.has_begun
                if has_gone or (was_sent and not is_unsent):
                    break
                was_sent = was_sent or not is_unsent
            except BaseException:
                engine.busy -= 1
                raise
            else:
                engine.answered()
                self.counts.engine_errors += response.status_code >= 500
                return engine, response, exchange
        raise _NoEngineError

    def _in_turn(self, domain: str | None) -> list[Engine]:
        """The engines that may answer, the best choice first."""
        found = [self.routes[domain]] if domain in self.routes else self.engines
        self._turn += 1
        turned = [found[(self._turn + i) % len(found)] for i in range(len(found))]
        return sorted(turned, key=lambda engine: (engine.is_resting, engine.busy))

    async def _sent(self, engine: Engine, request: _Request) -> tuple[httpx2.Response, _Exchange]:
        exchange = self._exchange(engine, request)
        headers = request.headers
        if exchange.is_read:  # in words that can be read
            headers = [(n, v) for n, v in headers if n != b"accept-encoding"] + [(b"accept-encoding", b"identity")]
        response = await engine.send(request.method, request.target, headers, exchange.content)
        if exchange.asked is None or response.status_code not in REFUSED:
            return response, exchange
        exchange.close()
        await response.aread()
        again = await engine.send(request.method, request.target, request.headers, request.content)
        self.counts.retries += 1
        if again.status_code < 400:
            assert self.keeper is not None
            why = f"it refuses what was asked for beside requests ({message_of(response)[:200]}); let it give"
            engine.asking.refused(f"{why} {self.keeper.num_logprobs} log-probs (vLLM: --max-logprobs), or keep fewer")
        return again, _Exchange(request.content)

    def _exchange(self, engine: Engine, request: _Request) -> _Exchange:
        exchange = _Exchange(request.content)
        if request.parsed is None or self.keeper is None or isinstance(request.content, _Body):
            return exchange
        if not gives_all(request.parsed):
            exchange.kind = (request.path, bool(request.parsed.get("stream")))
            shape = engine.shapes.get(exchange.kind)
            if shape is None:  # the first answer of a kind is passed on as it is, to see what it looks like
                exchange.noted = Shape()
                return exchange
            if not engine.asking.is_on:
                return exchange
            exchange.asked = shape
            exchange.content = asking(
                request.content, request.parsed, is_chat=READ[request.path], num_logprobs=self.keeper.num_logprobs
            )
        exchange.recording = Recording(self.keeper, request.parsed, request.domain, engine.asking)
        return exchange

    async def _pass_on(self, engine: Engine, response: httpx2.Response, exchange: _Exchange, send: Any) -> None:
        headers = _end_to_end(response.headers.raw, but=(b"date",))
        is_read = exchange.is_read and response.status_code == 200
        is_begun = False
        try:
            if not is_read:
                pieces: AsyncIterator[bytes] = response.aiter_raw()
            elif "text/event-stream" in response.headers.get("content-type", ""):
                headers = [(n, v) for n, v in headers if n not in (b"content-length", b"content-encoding")]
                pieces = self._events(response, exchange)
            else:
                text = self._passed(exchange, [await response.aread()], is_event=False)
                headers = [(n, str(len(text)).encode() if n == b"content-length" else v)
                           for n, v in headers if n != b"content-encoding"]  # fmt: skip
                pieces = _once(text)
            is_begun = True
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            async for piece in pieces:
                self.counts.bytes += len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except httpx2.TransportError as error:
            self.counts.engine_errors += 1
            engine.failed(error)
            if is_begun:  # the server breaks the connection off, as the engine did
                return
            raise _NoEngineError from error
        if is_read:
            exchange.end(engine)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, response: httpx2.Response, exchange: _Exchange) -> AsyncIterator[bytes]:
        splitter = EventSplitter()
        async for piece in response.aiter_bytes():
            if passed := self._passed(exchange, splitter.feed(piece), is_event=True):
                yield passed
        if passed := self._passed(exchange, [splitter.rest], is_event=True):
            yield passed

    def _passed(self, exchange: _Exchange, pieces: Sequence[bytes], *, is_event: bool) -> bytes:
        began = time.perf_counter()
        passed = b"".join([exchange.passed(piece, is_event=is_event) for piece in pieces])
        self.counts.seconds_added += time.perf_counter() - began
        return passed


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], *, but: Sequence[bytes]) -> Headers:
    """Headers that are passed on: those about one connection are not, nor some others."""
    given = [(name.lower(), name, value) for name, value in headers]
    named = {word.strip().lower() for name, _, value in given if name == b"connection" for word in value.split(b",")}
    return [(name, value) for lower, name, value in given if lower not in OF_CONNECTION | named | {*but}]


async def _once(text: bytes) -> AsyncIterator[bytes]:
    yield text


async def _refuse(send: Any, status: int, message: str) -> None:
    """Answer as OpenAI's API tells of errors, and take no more of the request."""
    kind = "invalid_request_error" if status < 500 else "bad_gateway"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
               (b"connection", b"close")]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
