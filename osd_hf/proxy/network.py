"""How the proxy reaches an engine: HTTP/1.1 as h11 reads and writes it, over connections of asyncio's."""

from __future__ import annotations

import asyncio
import collections
import functools
import select
from collections.abc import AsyncIterable, AsyncIterator, Callable
from socket import SOCK_STREAM
from typing import Any

import h11
import httpx2

from osd_hf.errors import ConfigError

__all__ = ["EndedError", "Headers", "StaleError", "Transport"]

SECOND_ADDRESS_SECONDS = 0.25  # after which another address of a host is tried beside the first one (RFC 8305)
MOST_WAITING = 256 << 10  # bytes that have come and are not yet taken, beyond which no more are read
MOST_HEAD = 100 << 10  # bytes of a status line and its headers
EMPTY = ("POST", "PUT", "PATCH")  # methods that say so where there is no body (RFC 9110, 8.6)

Headers = list[tuple[bytes, bytes]]


class EndedError(httpx2.ReadError):
    """A connection has ended before its answer has."""


class StaleError(EndedError):
    """A connection has ended that an engine had answered on before, and no byte of an answer has come."""


class Transport:
    """
    Sends requests to one address. It does what `httpx2.AsyncHTTPTransport` does, whose layers take several times as
    long for each request and each piece of an answer: time that a first token waits.

    Args:
        url (`httpx2.URL`): Its scheme, host and port count.
        connect_seconds (`float`): What connecting may take.
        keep_alive_seconds (`float`): How long a connection is kept on which nothing is asked.

    Raises:
        ConfigError: the extra `serve` is not installed.
    """

    def __init__(self, url: httpx2.URL, connect_seconds: float, keep_alive_seconds: float) -> None:
        try:
            from aiohappyeyeballs import start_connection
        except ImportError as error:
            raise ConfigError('The proxy needs aiohappyeyeballs: pip install "osd-hf[serve]".') from error
        self._start_connection = start_connection
        self._host, self._port, self._netloc = url.raw_host.decode("ascii"), url.port, url.netloc
        self._context = None
        if url.scheme == "https":
            self._context = httpx2.create_ssl_context()
            self._context.set_alpn_protocols(["http/1.1"])
        self._connect_seconds, self._keep_alive_seconds = connect_seconds, keep_alive_seconds
        self._idle = list[_Connection]()  # the last one that was used is used next
        self._is_closed = False

    async def send(
        self, method: str, target: bytes, headers: Headers, content: bytes | AsyncIterable[bytes]
    ) -> httpx2.Response:
        """
        The response to a request, whose body is still to be read. What comes in pieces is sent as it comes: of the
        length that its headers tell, or in chunks.

        Raises:
            httpx2.TransportError: there is none; a [`StaleError`] where the connection was at fault.
        """
        while self._idle and not self._idle[-1].is_quiet():
            self._idle[-1].close()
        connection = self._idle.pop() if self._idle else None
        is_new = connection is None
        connection = connection or await self._connected()
        try:
            connection.wake()
            await connection.send(method, target, self._framed(method, headers, content), content)
            head = await connection.head()
        except BaseException as error:
            connection.close()
            if not (is_new or connection.has_answered) and isinstance(error, EndedError):
                raise StaleError(str(error)) from error
            raise
        body = _Body(connection, self._keep)
        return httpx2.Response(head.status_code, headers=head.headers.raw_items(), stream=body)

    async def aclose(self) -> None:
        """Close the connections on which nothing is asked, and others as soon as that holds for them."""
        self._is_closed = True
        for connection in [*self._idle]:
            connection.close()

    def _framed(self, method: str, headers: Headers, content: bytes | AsyncIterable[bytes]) -> Headers:
        framed = [(b"host", self._netloc), *headers]
        if not isinstance(content, bytes):
            if all(name.lower() != b"content-length" for name, _ in headers):
                framed.append((b"transfer-encoding", b"chunked"))
        elif content or method in EMPTY:
            framed.append((b"content-length", b"%d" % len(content)))
        return framed

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                port = self._port or (80 if self._context is None else 443)
                found = await loop.getaddrinfo(self._host, port, type=SOCK_STREAM)
                made = await self._start_connection(found, happy_eyeballs_delay=SECOND_ADDRESS_SECONDS)
                name = None if self._context is None else self._host
                _, connection = await loop.create_connection(
                    _Connection, sock=made, ssl=self._context, server_hostname=name
                )
        except TimeoutError as error:
            raise httpx2.ConnectTimeout(f"no connection within {self._connect_seconds:g} s") from error
        except (OSError, RuntimeError, UnicodeError) as error:  # the second is uvloop's
            raise httpx2.ConnectError(str(error)) from error
        return connection

    def _keep(self, connection: _Connection) -> None:
        """Keep a connection for the next request."""
        if self._is_closed:
            connection.close()
            return
        self._idle.append(connection)
        connection.rest(self._keep_alive_seconds, functools.partial(self._idle.remove, connection))


class _Body(httpx2.AsyncByteStream):
    """The body of a response, in the pieces in which it comes."""

    def __init__(self, connection: _Connection, keep: Callable[[_Connection], None]) -> None:
        self._connection, self._keep, self._is_open = connection, keep, True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._connection.piece()) is not None:
            yield piece
        if self._is_open and self._connection.is_ready():
            self._keep(self._connection)
            self._is_open = False

    async def aclose(self) -> None:
        if self._is_open:
            self._connection.close()
            self._is_open = False


class _Connection(asyncio.Protocol):
    """
    A connection, on which one request is answered after another.

    Attributes:
        has_answered (`bool`): Whether anything has come since the last request.
    """

    def __init__(self) -> None:
        self.has_answered = False
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_HEAD)
        self._waiting, self._size = collections.deque[bytes](), 0
        self._has_news, self._is_writable = asyncio.Event(), asyncio.Event()
        self._has_ended = False
        self._error: Exception | None = None
        self._transport: Any = None
        self._rest: asyncio.TimerHandle | None = None  # while nothing is asked
        self._on_close: Callable[[], None] | None = None

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._is_writable.set()

    def data_received(self, data: bytes) -> None:
        self.has_answered = True
        if self._rest is not None:  # what nobody has asked for is nobody's answer
            self.close()
        self._waiting.append(data)
        self._size += len(data)
        if self._size > MOST_WAITING:
            self._transport.pause_reading()
        self._has_news.set()

    def eof_received(self) -> bool:
        self._has_ended = True
        if self._rest is not None:
            self.close()
        self._has_news.set()
        return self._transport.get_extra_info("sslcontext") is None  # a request may still go on

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended, self._error = True, exc
        if self._rest is not None:
            self.close()
        self._has_news.set()
        self._is_writable.set()

    def pause_writing(self) -> None:
        self._is_writable.clear()

    def resume_writing(self) -> None:
        self._is_writable.set()

    # a request and its answer

    async def send(self, method: str, target: bytes, headers: Headers, content: bytes | AsyncIterable[bytes]) -> None:
        """Send a request, until the connection ends: an engine may answer before it has read all."""
        try:
            head = self._http.send(h11.Request(method=method, target=target, headers=headers))
            if isinstance(content, bytes):
                self._write(head, self._http.send(h11.Data(data=content)), self._http.send(h11.EndOfMessage()))
                return
            self._write(head)  # which an engine may answer alone
            async for piece in content:
                self._write(self._http.send(h11.Data(data=piece)))
                await self._is_writable.wait()
                if self._transport.is_closing():
                    return
            self._write(self._http.send(h11.EndOfMessage()))
        except h11.LocalProtocolError as error:
            raise httpx2.LocalProtocolError(str(error)) from error

    def _write(self, *texts: bytes | None) -> None:
        given = [text for text in texts if text]
        if not given or self._transport.is_closing():  # uvloop refuses to write then
            return
        if len(given) == 1:  # what is written in lines does not hold up its writer in Python 3.12.1 (CVE-2024-12254)
            self._transport.write(given[0])
        else:
            self._transport.writelines(given)

    async def head(self) -> Any:
        """The head of the answer, an `h11.Response`."""
        while isinstance(event := await self._event(), h11.InformationalResponse):  # such as 100 Continue
            pass
        if not isinstance(event, h11.Response):
            raise httpx2.RemoteProtocolError("it has begun to speak another protocol")
        return event

    async def piece(self) -> bytes | None:
        """The next piece of the answer's body; `None` where it has ended."""
        event = await self._event()
        return bytes(event.data) if isinstance(event, h11.Data) else None

    async def _event(self) -> Any:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._received())
        except h11.RemoteProtocolError as error:
            raise httpx2.RemoteProtocolError(str(error)) from error
        return event

    async def _received(self) -> bytes:
        """What has come; nothing where the connection has ended as it should."""
        while not self._waiting and not self._has_ended:
            self._has_news.clear()
            await self._has_news.wait()
        if not self._waiting:
            if self._error is not None or not self.has_answered:
                raise EndedError(str(self._error or "it has ended without an answer")) from self._error
            return b""
        data = self._waiting.popleft()
        self._size -= len(data)
        if self._size <= MOST_WAITING < self._size + len(data):
            self._transport.resume_reading()
        return data

    # between requests

    def is_ready(self) -> bool:
        """Whether the connection can be used again."""
        is_over = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if not is_over or self._has_ended or self._waiting or self._http.trailing_data[0]:
            return False
        self._http.start_next_cycle()
        return True

    def is_quiet(self) -> bool:
        """Whether nothing has happened that the event loop has not told of yet."""
        if self._transport.is_closing():
            return False
        if not hasattr(select, "poll"):  # on Windows
            return True
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def rest(self, seconds: float, on_close: Callable[[], None]) -> None:
        """Wait for the next request, and close after some seconds without one, or where anything else happens."""
        self._rest, self._on_close = asyncio.get_running_loop().call_later(seconds, self.close), on_close

    def wake(self) -> None:
        """Begin with a request."""
        self._end_rest()
        self.has_answered = False

    def close(self) -> None:
        """End it at once."""
        on_close = self._on_close
        self._end_rest()
        self._transport.abort()
        if on_close is not None:
            on_close()

    def _end_rest(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
        self._rest = self._on_close = None
