"""A reverse proxy in front of OpenAI-compatible engines, which collects what a draft can be taught from."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import posixpath
import re
import time
import urllib.parse
from collections.abc import (
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

from osd_hf.errors import ConfigError
from osd_hf.proxy.events import EventSplitter, data_span
from osd_hf.proxy.extra_fields import READ, Shape, asking, edited, edited_event, gives_all, reason_against
from osd_hf.proxy.network import Headers, StaleError
from osd_hf.proxy.recorder import Keeper, ProxyCounts, Recording
from osd_hf.proxy.upstream import Engine, Kind, reason_of

__all__ = ["METRICS_PATH", "Proxy"]

METRICS_PATH = "/osd-hf/metrics"  # as `/metrics` is the engine's
# What vLLM opens with VLLM_SERVER_DEV_MODE=1: whoever reaches it rules the engine.
DEVELOPMENT = {
    "collective_rpc", "server_info", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "sleep", "wake_up",
    "is_sleeping", "release_kv_cache_memory", "pause", "resume", "is_paused", "abort_requests", "get_world_size",
    "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update", "update_weights",
    "start_draft_weight_update", "finish_weight_update", "update_weight_version", "weight_info", "weight_checker",
}  # fmt: skip
DOMAIN_HEADER, COLLECT_HEADER = b"x-osd-domain", b"x-osd-collect"
YES = (b"true", b"1", b"yes")
MOST_DOMAIN = 64  # characters of a label
# Headers that are about one connection; a server writes the date itself, and a body that was read has been asked for.
OF_CONNECTION = {
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect",
}  # fmt: skip
UNWELL = (502, 503, 504)  # with which an engine, or what stands before it, says that it cannot answer
SAFE = ("GET", "HEAD", "OPTIONS")  # methods that may be sent twice
MOST_ANSWER = 32 << 20  # bytes of an answer that is no stream: with 64 log-probs a token some 4000 of a chat
MOST_AT_ONCE = 256 << 10  # bytes of an answer that are edited without letting others have their turn
REFUSED = (400, 422, 500, 501)  # with which an engine may answer what was added to a request

Message = MutableMapping[str, Any]


class _ClientLeftError(Exception):
    """The client has closed its connection."""


class _TooLargeError(Exception):
    """The body of a request is larger than allowed."""


class _NoEngineError(Exception):
    """No engine has answered."""


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
        kind (`Kind`): Its path and model, and whether it is a stream.
        has_ended (`bool`): Whether a choice has said why it ended.
    """

    content: bytes | _Body
    asked: Shape | None = None
    noted: Shape | None = None
    recording: Recording | None = None
    kind: Kind = ("", "", False)
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
        except Exception:  # noqa: BLE001  # what is no answer as we know them is passed on as it is
            self.noted = None
        return passed

    def record(self, piece: bytes, *, is_event: bool) -> None:
        """Keep what is kept of an event, or of a whole body."""
        if self.recording is None:
            return
        if not is_event and len(piece) > MOST_ANSWER:
            self.recording.drop()
        elif span := data_span(piece) if is_event else (0, len(piece)):
            self.recording.add(piece[slice(*span)], is_event=is_event)

    def end(self, engine: Engine) -> None:
        """Say that all of the answer has passed."""
        if self.noted is not None and self.has_ended:
            engine.saw(self.kind, self.noted)
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
        allow_development (`bool`, *optional*, defaults to `False`): Pass on what is for vLLM's development endpoints.
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
        allow_development: bool = False,
    ) -> None:
        self.engines, self.counts, self.keeper, self.routes = list(engines), counts, keeper, dict(routes or {})
        self.share, self.domain, self.max_body_bytes = share, domain, max_body_bytes
        self.allow_development = allow_development
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
        answering = asyncio.current_task()
        assert answering is not None
        has_left = False

        async def end_with_client() -> None:
            nonlocal has_left
            await body.client_left()
            has_left = answering.cancel()

        watch = asyncio.ensure_future(end_with_client())  # which begins when this task waits
        try:
            await self._answer(scope, body, send)
        except asyncio.CancelledError:
            if not has_left or answering.uncancel():
                raise
        finally:
            watch.cancel()

    async def _answer(self, scope: Message, body: _Body, send: Any) -> None:
        if not self.allow_development and _is_development(scope["path"]):
            await _refuse(send, 404, "The proxy passes this on only if it runs with --allow-development.")
            return
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
            request.parsed = self._parsed(request, [v for n, v in scope["headers"] if n == COLLECT_HEADER])
            self.counts.seconds_added += time.perf_counter() - began
        elif b"content-length" in headers and b"transfer-encoding" not in headers:  # of a body that is not held here
            request.headers.append((b"content-length", size))
        elif b"transfer-encoding" not in headers:
            request.content = await body.whole()
        return request

    def _parsed(self, request: _Request, wanted: Sequence[bytes]) -> Mapping[str, Any] | None:
        """The request, where its answer is to be collected; `wanted` is what its headers say of that."""
        if self.keeper is None or isinstance(request.content, _Body):
            return None
        if any(value.strip().lower() not in YES for value in wanted):  # all that is no clear yes
            self.counts.leave_out("its client does not want it collected")
            return None
        self._credit = min(self._credit + self.share, 1.0)
        if self._credit < 1 or not self.keeper.is_taking:
            return None
        try:
            parsed = json.loads(request.content.decode())
            reason = reason_against(parsed, is_chat=READ[request.path], num_logprobs=self.keeper.num_logprobs)
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
                engine.failed(reason_of(error))
                is_unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
                has_gone = isinstance(request.content, _Body) and request.content.has_begun
                is_stale = isinstance(error, StaleError) and (request.method in SAFE or request.path in READ)
                if has_gone or not (is_unsent or (is_stale and not was_sent)):
                    break
                was_sent = was_sent or not is_unsent
            except BaseException:
                engine.busy -= 1
                raise
            else:
                if response.status_code in UNWELL:
                    engine.failed(f"status {response.status_code}")
                else:
                    engine.answered()
                self.counts.engine_errors += response.status_code >= 500
                request.content = exchange.content = b""  # which are sent, and no longer counted
                request.parsed = None
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
        try:
            response = await engine.send(request.method, request.target, headers, exchange.content)
        except BaseException:
            exchange.close()
            raise
        if exchange.asked is None or response.status_code not in REFUSED:
            return response, exchange
        exchange.close()
        try:
            await response.aread()
        finally:
            await response.aclose()
        again = await engine.send(request.method, request.target, request.headers, request.content)
        self.counts.retries += 1
        if again.status_code < 400:
            assert self.keeper is not None
            why = f"it refuses what was asked for beside requests ({_said(response)}); let it give"
            engine.asking.refused(f"{why} {self.keeper.num_logprobs} log-probs (vLLM: --max-logprobs), or keep fewer")
        return again, _Exchange(request.content)

    def _exchange(self, engine: Engine, request: _Request) -> _Exchange:
        exchange = _Exchange(request.content)
        if request.parsed is None or self.keeper is None or isinstance(request.content, _Body):
            return exchange
        parsed, shape = request.parsed, None
        how: dict[str, Any] = {"is_chat": READ[request.path], "num_logprobs": self.keeper.num_logprobs}
        if not gives_all(parsed, **how):
            exchange.kind = (request.path, str(parsed.get("model"))[:200], bool(parsed.get("stream")))
            shape = engine.shape(exchange.kind)
            if shape is None:  # the first answer of a kind is passed on as it is, to see what it looks like
                exchange.noted = Shape()
                return exchange
            if not engine.asking.is_on:
                return exchange
        asked = None if shape is None else engine.asking
        recording = Recording(self.keeper, parsed, request.domain, asked, nbytes=len(request.content))
        if recording.is_open:
            exchange.recording, exchange.asked = recording, shape
            if shape is not None:
                exchange.content = asking(request.content, parsed, **how)
        return exchange

    async def _pass_on(self, engine: Engine, response: httpx2.Response, exchange: _Exchange, send: Any) -> None:
        headers = _end_to_end(response.headers.raw, but=(b"date",))
        is_read = exchange.is_read and response.status_code == 200
        is_begun = False
        try:
            if not is_read:
                pieces: AsyncIterator[bytes] = response.aiter_raw()
            elif self._is_stream(engine, response, exchange):
                headers = [(n, v) for n, v in headers if n.lower() not in (b"content-length", b"content-encoding")]
                pieces = self._events(response, exchange)
            else:
                text = await self._whole(exchange, await response.aread())
                headers = [(n, str(len(text)).encode() if n.lower() == b"content-length" else v)
                           for n, v in headers if n.lower() != b"content-encoding"]  # fmt: skip
                pieces = _once(text)
            is_begun = True
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            async for piece in pieces:
                self.counts.bytes += len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except httpx2.TransportError as error:
            self.counts.engine_errors += 1
            engine.failed(reason_of(error))
            if is_begun:  # the server breaks the connection off, as the engine did
                return
            raise _NoEngineError from error
        if is_read:
            exchange.end(engine)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _is_stream(self, engine: Engine, response: httpx2.Response, exchange: _Exchange) -> bool:
        """Whether an answer is a stream, and so of another kind than it was asked for as, maybe."""
        is_stream = "text/event-stream" in response.headers.get("content-type", "").lower()
        exchange.kind = (*exchange.kind[:2], is_stream)
        if exchange.asked is not None:
            exchange.asked = engine.shapes.get(exchange.kind, (exchange.asked,))[0]
        return is_stream

    async def _whole(self, exchange: _Exchange, body: bytes) -> bytes:
        exchange.record(body, is_event=False)
        if len(body) <= MOST_AT_ONCE:
            return self._passed(exchange, [body], is_event=False)
        return await asyncio.to_thread(self._passed, exchange, [body], is_event=False)

    async def _events(self, response: httpx2.Response, exchange: _Exchange) -> AsyncIterator[bytes]:
        splitter = EventSplitter()
        async for piece in response.aiter_bytes():
            events = splitter.feed(piece)
            if passed := self._passed(exchange, events, is_event=True):
                yield passed
            for event in events:  # after its client has it
                exchange.record(event, is_event=True)
        if passed := self._passed(exchange, [splitter.rest], is_event=True):
            yield passed
        exchange.record(splitter.rest, is_event=True)

    def _passed(self, exchange: _Exchange, pieces: Sequence[bytes], *, is_event: bool) -> bytes:
        began = time.perf_counter()
        passed = b"".join([exchange.passed(piece, is_event=is_event) for piece in pieces])
        self.counts.seconds_added += time.perf_counter() - began
        return passed


@functools.lru_cache(256)
def _is_development(path: str) -> bool:
    """Whether a path, below whatever prefix and however it is written, is that of a development endpoint."""
    for _ in range(3):  # an engine unquotes once; so may what stands before it
        path = urllib.parse.unquote(path)
    path = posixpath.normpath(re.split("[?#;]", path.replace("\\", "/"))[0])
    return posixpath.basename(path).strip().lower() in DEVELOPMENT


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], *, but: Sequence[bytes]) -> Headers:
    """Headers that are passed on: those about one connection are not, nor some others."""
    given = [(name.lower(), name, value) for name, value in headers]
    named = {word.strip().lower() for name, _, value in given if name == b"connection" for word in value.split(b",")}
    return [(name, value) for lower, name, value in given if lower not in OF_CONNECTION | named | {*but}]


async def _once(text: bytes) -> AsyncIterator[bytes]:
    """A body in one piece."""
    yield text


def _said(response: httpx2.Response) -> str:
    """The beginning of what an engine says of an error; the rest may be the client's own text."""
    try:
        return " ".join(str(response.json()["error"]["message"]).split())[:60]
    except (ValueError, LookupError, TypeError):
        return f"status {response.status_code}"


async def _refuse(send: Any, status: int, message: str) -> None:
    """Answer as OpenAI's API tells of errors, and take no more of the request."""
    kind = "invalid_request_error" if status < 500 else "bad_gateway"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
               (b"connection", b"close")]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
