"""How requests are sent to an engine: by aiohttp, whose parser is compiled, with httpx2's requests and responses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2

from osd_hf.errors import ConfigError

__all__ = ["AiohttpTransport"]

# What aiohttp would add to a request that does not have it.
ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
MOST_IN_ONE = 64 << 10  # bytes of a body that are sent with the head of the request
MOST_HEADER = 100 << 10  # bytes of a line of the head of an answer, as httpx2 takes of all of them


class AiohttpTransport(httpx2.AsyncBaseTransport):
    """
    Sends requests as they are, and gives answers as they come: nothing is added, followed, decoded or remembered. What
    an engine is asked to generate goes by aiohttp, by which an event passes in half the time; all other methods than
    POST, of which aiohttp sends some again by itself, and heads that are not ASCII, which it writes as UTF-8, go by
    httpx2's own transport. Of the extensions of a request `target`, `trace` (of connecting) and the `connect` timeout
    are heeded.

    Args:
        keepalive_expiry (`float`): Seconds after which an idle connection is used no more.

    Raises:
        ConfigError: aiohttp is not installed.
    """

    def __init__(self, keepalive_expiry: float) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise ConfigError('The proxy needs aiohttp: pip install "osd-hf[serve]".') from error
        self._aiohttp, self._keepalive_expiry = aiohttp, keepalive_expiry
        self._session: aiohttp.ClientSession | None = None
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=keepalive_expiry)
        self._other = httpx2.AsyncHTTPTransport(limits=limits)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The response, whose body is still to be read; raises `httpx2.TransportError`."""
        target = request.extensions.get("target", request.url.raw_path)
        head = (target, *(text for pair in request.headers.raw for text in pair))
        if request.method != "POST" or not all(text.isascii() for text in head):
            return await self._other.handle_async_request(request)
        from yarl import URL

        url = URL.build(
            scheme=request.url.scheme, host=request.url.host, port=request.url.port, path=target.decode(), encoded=True
        )
        chunked = b"transfer-encoding"  # which aiohttp says itself
        headers = [(n.decode(), v.decode()) for n, v in request.headers.raw if n.lower() != chunked]
        body = _Body(request)
        timeout = request.extensions.get("timeout", {}).get("connect")
        with self._errors(body):
            response = await self._begun().request(
                request.method, url, headers=headers, data=body.data, allow_redirects=False,
                timeout=self._aiohttp.ClientTimeout(sock_connect=timeout),
                trace_request_ctx=request.extensions.get("trace"),
            )  # fmt: skip
        answered = _Answered(response, self._errors(body))
        return httpx2.Response(response.status, headers=list(response.raw_headers), stream=answered)

    def _begun(self) -> Any:
        """The session, which needs a running loop to begin."""
        if self._session is None:
            aiohttp, tracing = self._aiohttp, self._aiohttp.TraceConfig()
            tracing.on_connection_create_start.append(_connecting)
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=self._keepalive_expiry, ssl=httpx2.create_ssl_context()
            )
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False,
                skip_auto_headers=ADDED, max_line_size=MOST_HEADER, max_field_size=MOST_HEADER,
                trace_configs=[tracing],
            )  # fmt: skip
        return self._session

    @contextlib.contextmanager
    def _errors(self, body: _Body) -> Iterator[None]:
        """Raises aiohttp's errors as those of httpx2, and what the body of the request has raised as that."""
        aiohttp = self._aiohttp
        try:
            yield
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if body.error is not None:
                raise body.error from None
            kind: type[httpx2.TransportError] = httpx2.RemoteProtocolError
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                kind = httpx2.ConnectTimeout
            elif isinstance(error, aiohttp.ClientConnectorError):
                kind = httpx2.ConnectError
            elif isinstance(error, OSError):
                kind = httpx2.ReadError
            raise kind(str(error)) from error

    async def aclose(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
        await self._other.aclose()


async def _connecting(session: Any, context: Any, params: Any) -> None:
    if context.trace_request_ctx is not None:
        await context.trace_request_ctx("connection.connect_tcp.started", {})


class _Body:
    """
    The body of a request, as aiohttp takes it.

    Attributes:
        data (`bytes` or `AsyncIterator[bytes]`, *optional*): Whole, sent with the head at once, or piece by piece.
        error (`Exception`, *optional*): What a piece of it has raised, in place of which aiohttp tells of its own.
    """

    def __init__(self, request: httpx2.Request) -> None:
        self.error: Exception | None = None
        self._stream = request.stream
        self.data: bytes | AsyncIterator[bytes] | None = self._pieces()
        if isinstance(self._stream, httpx2.ByteStream) and len(request.content) <= MOST_IN_ONE:
            self.data = request.content or None

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._stream:  # type: ignore[union-attr]
                yield piece
        except Exception as error:
            self.error = error
            raise


class _Answered(httpx2.AsyncByteStream):
    """The body of an answer."""

    def __init__(self, response: Any, errors: Any) -> None:
        self._response, self._errors = response, errors

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._errors:
            async for piece in self._response.content.iter_any():
                yield piece

    async def aclose(self) -> None:
        self._response.close()  # which does nothing where all has been read
