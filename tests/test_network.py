"""HTTP between the proxy and an engine: sockets as they come, and what an engine may do to them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from osd_hf.proxy import network
from osd_hf.proxy.network import StaleError, Transport

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CERTIFICATE = Path(__file__).with_name("localhost.pem")  # of nobody, with its key
Talk = Callable[["Engine", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Engine:
    """A server that does on each connection what it is told; `asked` are the requests that came, by connection."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.asked = list[list[bytes]]()
        self.writers = list[asyncio.StreamWriter]()
        self.ended: asyncio.Queue[int] = asyncio.Queue()  # numbers of connections that clients have closed

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.asked)
        self.asked.append([])
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self.talk(self, reader, writer)
            if await reader.read() == b"":
                self.ended.put_nowait(number)
        if self.ended.empty():
            self.ended.put_nowait(number)
        writer.close()

    async def head(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked[-1].append(head)
        return head


@contextlib.asynccontextmanager
async def before(
    talk: Talk, *, host: str = "127.0.0.1", context: ssl.SSLContext | None = None, keep: float = 60.0, name: str = ""
) -> AsyncIterator[tuple[Transport, Engine]]:
    """A transport to an engine."""
    engine = Engine(talk)
    server = await asyncio.start_server(engine, host, 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    shown = name or (f"[{host}]" if ":" in host else host)
    transport = Transport(httpx2.URL(f"http{'s' if context else ''}://{shown}:{port}"), 5.0, keep)
    try:
        yield transport, engine
    finally:
        await transport.aclose()
        server.close()
        for writer in engine.writers:
            writer.transport.abort()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: Any) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    def run(work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(asyncio.wait_for(work, 60))

    return run


async def get(
    transport: Transport, target: bytes = b"/a", method: str = "GET", content: Any = b"", headers: Any = ()
) -> tuple[int, bytes]:
    response = await transport.send(method, target, [*headers], content)
    try:
        return response.status_code, await response.aread()
    finally:
        await response.aclose()


async def twice(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await engine.head(reader)
        writer.write(OK)


async def once(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await engine.head(reader)
    writer.write(OK)


async def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a process that dies, when all that was written has arrived."""
    await writer.drain()
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0)


# --- requests -------------------------------------------------------------------------------------------------------


def test_a_connection_is_used_again_until_it_has_rested_too_long(run: Any) -> None:
    async def work() -> None:
        async with before(twice) as (transport, engine):
            for _ in range(3):
                assert await get(transport) == (200, b"ok")
            assert [len(heads) for heads in engine.asked] == [3]
            await asyncio.gather(*(get(transport) for _ in range(3)))  # one at a time on each
            assert len(engine.asked) == 3
        async with before(twice, keep=0.0) as (transport, engine):
            await get(transport)
            assert await engine.ended.get() == 0
            assert await get(transport) == (200, b"ok") and len(engine.asked) == 2

    run(work())


def test_a_request_is_sent_as_it_is(run: Any) -> None:
    async def pieces(*texts: bytes) -> AsyncIterator[bytes]:
        for text in texts:
            await asyncio.sleep(0)
            yield text

    async def work() -> None:
        async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                head = await engine.head(reader)
                if b"transfer-encoding" in head:
                    engine.asked[-1][-1] += await reader.readuntil(b"0\r\n\r\n")
                elif b"content-length: " in head:
                    engine.asked[-1][-1] += await reader.readexactly(
                        int(head.split(b"content-length: ")[1].split(b"\r")[0])
                    )
                writer.write(OK)

        async with before(talk, name="localhost") as (transport, engine):
            host = b"host: " + transport._netloc
            await get(transport, b"/a//b?c=%2F", "POST", b"text", [(b"X-One", b"1"), (b"X-One", b"2")])
            await get(transport, b"/", "POST", b"")
            await get(transport, b"/", "GET", b"")
            await get(transport, b"/", "PUT", pieces(b"ab", b"", b"c"))
            await get(transport, b"/", "PUT", pieces(b"ab", b"c"), [(b"content-length", b"3")])
            assert engine.asked == [[
                b"POST /a//b?c=%2F HTTP/1.1\r\n" + host + b"\r\nX-One: 1\r\nX-One: 2\r\ncontent-length: 4\r\n\r\ntext",
                b"POST / HTTP/1.1\r\n" + host + b"\r\ncontent-length: 0\r\n\r\n",
                b"GET / HTTP/1.1\r\n" + host + b"\r\n\r\n",
                b"PUT / HTTP/1.1\r\n" + host + b"\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
                b"PUT / HTTP/1.1\r\n" + host + b"\r\ncontent-length: 3\r\n\r\nabc",
            ]]  # fmt: skip
            with pytest.raises(httpx2.LocalProtocolError):
                await get(transport, headers=[(b"x", b"a\r\nb: c")])
            assert len(engine.asked[0]) == 5

    run(work())


def test_a_body_of_any_size_arrives_beside_an_answer_that_begins_before(run: Any) -> None:
    size, sent = 30 << 20, 0

    async def large() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(30):
            sent += 1
            yield b"x" * (1 << 20)

    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        assert sent < 20  # the rest waits
        await reader.readexactly(size)
        writer.write(b"1\r\nb\r\n0\r\n\r\n")
        await once(engine, reader, writer)

    async def work() -> None:
        async with before(talk) as (transport, engine):
            length = [(b"content-length", b"%d" % size)]
            assert await get(transport, b"/", "POST", large(), length) == (200, b"ab")
            assert await get(transport) == (200, b"ok") and len(engine.asked) == 1

    run(work())


def test_a_client_that_leaves_while_it_uploads_ends_the_connection(run: Any) -> None:
    class Left(Exception):
        pass

    async def leaves() -> AsyncIterator[bytes]:
        yield b"begun"
        raise Left

    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.head(reader)

    async def work() -> None:
        async with before(talk) as (transport, engine):
            with pytest.raises(Left):
                await get(transport, b"/", "POST", leaves(), [(b"content-length", b"9")])
            assert await engine.ended.get() == 0
            request = asyncio.ensure_future(get(transport))
            while len(engine.asked) < 2 or not engine.asked[1]:
                await asyncio.sleep(0)
            request.cancel()
            assert await engine.ended.get() == 1

    run(work())


def test_an_engine_may_refuse_what_it_has_not_read(run: Any) -> None:
    async def large() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * (1 << 20)

    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.head(reader)
        writer.write(b"HTTP/1.1 413 Too Large\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno")
        await writer.drain()
        writer.close()

    async def work() -> None:
        async with before(talk) as (transport, _):
            try:
                answered = await get(transport, b"/", "POST", large(), [(b"content-length", b"%d" % (200 << 20))])
            except (httpx2.ReadError, httpx2.RemoteProtocolError):
                answered = None  # where the network forgets what came before the end
            assert answered in (None, (413, b"no"))

    run(work())


def test_an_engine_may_answer_the_head_alone(run: Any) -> None:
    async def later() -> AsyncIterator[bytes]:
        await asked.wait()
        yield b"body"

    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await engine.head(reader)
            asked.set()
            await reader.readexactly(4)
            writer.write(OK)

    async def work() -> None:
        nonlocal asked
        asked = asyncio.Event()
        async with before(talk) as (transport, _):
            assert await get(transport, b"/", "PUT", later(), [(b"content-length", b"4")]) == (200, b"ok")

    asked: asyncio.Event
    run(work())


@pytest.mark.parametrize("has_more", [True, False])
def test_a_connection_that_is_reset_while_a_body_comes_is_told(run: Any, has_more: bool) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        begun.set()
        await until(lambda: connections[0]._error)
        if has_more:
            yield b"b"

    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.head(reader)
        await begun.wait()
        await reset(writer)

    class Seen(network._Connection):
        def __init__(self) -> None:
            super().__init__()
            connections.append(self)

    async def work() -> None:
        nonlocal begun
        begun = asyncio.Event()
        async with before(talk) as (transport, _):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(network, "_Connection", Seen)
                with pytest.raises(httpx2.ReadError) as raised:
                    await get(transport, b"/", "PUT", slow())
            assert not isinstance(raised.value, StaleError)

    connections = list[Any]()
    begun: asyncio.Event
    run(work())


# --- answers --------------------------------------------------------------------------------------------------------

ANSWERS = {
    b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc": (b"abc", True),
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n2;x=y\r\nbc\r\n0\r\nt: u\r\n\r\n": (b"abc", True),
    b"HTTP/1.1 200 OK\r\n\r\nabc": (b"abc", False),  # until its end
    b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nabc": (b"abc", False),
    b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nConnection: close\r\n\r\nabc": (b"abc", False),
    b"HTTP/1.1 204 No Content\r\n\r\n": (b"", True),
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\na: b\r\n\r\n" + OK: (b"ok", True),
    b"HTTP/1.1 200 OK\r\n" + b"".join(b"h%d: v\r\n" % i for i in range(130)) + OK[17:]: (b"ok", True),
    OK + b"more": (b"ok", False),
    OK + OK: (b"ok", False),
}  # fmt: skip


@pytest.mark.parametrize("text", ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_is_read_however_it_is_written_and_cut(run: Any, text: bytes) -> None:
    body, is_kept = ANSWERS[text]

    async def work() -> None:
        @given(st.sets(st.integers(1, len(text) - 1), max_size=6))
        def cut(places: set[int]) -> None:
            bounds = [0, *sorted(places), len(text)]
            connection = network._Connection()
            connection.connection_made(Quiet())
            connection._http.send(network.h11.Request(method="GET", target="/", headers=[("host", "a")]))
            connection._http.send(network.h11.EndOfMessage())
            for begin, end in zip(bounds, bounds[1:], strict=False):
                connection.data_received(text[begin:end])
            if not any(word in text for word in (b"content-length", b"chunked", b"204")):
                connection.eof_received()
            loop = asyncio.new_event_loop()
            try:
                assert loop.run_until_complete(read(connection)) == body
            finally:
                loop.close()
            assert connection.is_ready() == is_kept

        await asyncio.to_thread(cut)

    async def read(connection: Any) -> bytes:
        await connection.head()
        pieces = []
        while (piece := await connection.piece()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    run(work())


class Quiet:
    """A transport that does nothing."""

    def get_extra_info(self, name: str) -> None: ...


def test_an_answer_to_head_has_no_body(run: Any) -> None:
    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n")
        await once(engine, reader, writer)

    async def work() -> None:
        async with before(talk) as (transport, engine):
            assert await get(transport, b"/", "HEAD") == (200, b"")
            assert await get(transport) == (200, b"ok") and len(engine.asked) == 1

    run(work())


def test_an_engine_that_begins_to_speak_otherwise_is_left(run: Any) -> None:
    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.head(reader)
        writer.write(b"HTTP/1.1 101 Switching\r\nupgrade: other\r\nconnection: upgrade\r\n\r\n")

    async def work() -> None:
        async with before(talk) as (transport, engine):
            with pytest.raises(httpx2.RemoteProtocolError):
                await get(transport, headers=[(b"upgrade", b"other"), (b"connection", b"upgrade")])
            assert await engine.ended.get() == 0

    run(work())


@pytest.mark.parametrize("unasked", [OK, b"x", b""], ids=["answer", "byte", "end"])
def test_what_comes_unasked_is_nobodys_answer(run: Any, unasked: bytes) -> None:
    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await once(engine, reader, writer)
        await go_on.wait()
        if unasked:
            writer.write(unasked)
        else:
            writer.write_eof()
        go_on.clear()

    async def work() -> None:
        nonlocal go_on
        go_on = asyncio.Event()
        async with before(talk) as (transport, engine):
            await get(transport)
            go_on.set()
            assert await engine.ended.get() == 0  # closed as it comes
            assert await get(transport) == (200, b"ok") and len(engine.asked) == 2

    go_on: asyncio.Event
    run(work())


@pytest.mark.parametrize("unasked", [b"HTTP/1.1 408 Late\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", b""])
def test_what_came_unasked_while_others_had_their_turn_is_nobodys_answer(run: Any, unasked: bytes) -> None:
    def serve(listening: socket.socket) -> None:
        first, _ = listening.accept()
        with first:
            first.recv(1 << 16)
            first.sendall(OK)
            go_on.wait(60)
            first.sendall(unasked)
        has_ended.set()
        second, _ = listening.accept()
        with second:
            second.recv(1 << 16)
            second.sendall(OK)

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = threading.Thread(target=serve, args=(listening,), daemon=True)
            server.start()
            transport = Transport(httpx2.URL(f"http://127.0.0.1:{listening.getsockname()[1]}"), 5.0, 60.0)
            await get(transport)
            go_on.set()
            has_ended.wait(60)  # so that the event loop does not see it
            assert await get(transport, b"/", "PUT") == (200, b"ok")
            await transport.aclose()
            server.join(60)

    go_on, has_ended = threading.Event(), threading.Event()
    run(work())


def test_a_closed_transport_keeps_no_connection(run: Any) -> None:
    async def work() -> None:
        async with before(twice) as (transport, engine):
            response = await transport.send("GET", b"/", [], b"")
            await transport.aclose()
            assert await response.aread() == b"ok"
            assert await engine.ended.get() == 0

    run(work())


def test_what_came_before_a_break_is_given_first(run: Any) -> None:
    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await go_on.wait()
        writer.write(b"3\r\nabc\r\n")
        await until(lambda: connection._waiting)
        await reset(writer)

    async def work() -> None:
        nonlocal go_on, connection
        go_on = asyncio.Event()
        async with before(talk) as (transport, _):
            response = await transport.send("GET", b"/", [], b"")
            connection = response.stream._connection
            go_on.set()
            await until(lambda: connection._error)
            pieces = response.aiter_raw()
            assert await anext(pieces) == b"abc"
            with pytest.raises(httpx2.ReadError):
                await anext(pieces)
            await response.aclose()

    go_on: asyncio.Event
    connection: Any
    run(work())


@pytest.mark.parametrize(("length", "kind"), [(11, httpx2.ReadError), (0, StaleError)])
def test_an_old_connection_that_is_reset_within_an_answer_is_not_stale(
    run: Any, length: int, kind: type[Exception]
) -> None:
    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await once(engine, reader, writer)
        await engine.head(reader)
        writer.write(b"HTTP/1.1 20"[:length])
        await until(lambda: connection.has_answered or not length)
        await reset(writer)

    async def work() -> None:
        nonlocal connection
        async with before(talk) as (transport, _):
            await get(transport)
            connection = transport._idle[0]
            with pytest.raises(kind) as raised:
                await get(transport)
            assert isinstance(raised.value, StaleError) == (length == 0)

    connection: Any
    run(work())


def test_a_body_that_is_not_taken_is_not_read(run: Any) -> None:
    sent = 0

    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await engine.head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(b"x" * (1 << 20))
            if not halted.is_set():
                sent += 1
            await writer.drain()

    async def work() -> None:
        nonlocal halted
        halted = asyncio.Event()
        async with before(talk) as (transport, engine):
            response = await transport.send("GET", b"/", [], b"")
            connection = response.stream._connection  # type: ignore[union-attr]
            before_that = -1
            while sent != before_that or connection._size <= network.MOST_WAITING:  # until nothing moves
                before_that = sent
                for _ in range(100):
                    await asyncio.sleep(0)  # lets all that is ready happen
            assert sent < 40 and connection._size < network.MOST_WAITING + (1 << 20)
            halted.set()
            assert len(await response.aread()) == 64 << 20
            await response.aclose()

    halted: asyncio.Event
    run(work())


def test_an_answer_that_is_left_ends_the_connection(run: Any) -> None:
    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")

    async def work() -> None:
        async with before(talk) as (transport, engine):
            response = await transport.send("GET", b"/", [], b"")
            assert await anext(response.aiter_raw()) == b"a"
            await response.aclose()
            assert await engine.ended.get() == 0

    run(work())


# --- connections ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before_end", "kind"),
    [(b"", StaleError), (b"HTTP/1.1 20", httpx2.RemoteProtocolError), (b"what?\r\n\r\n", httpx2.RemoteProtocolError),
     (b"HTTP/1.1 200 OK\r\nh: " + b"x" * 110_000, httpx2.RemoteProtocolError)],
    ids=["nothing", "half", "no http", "long head"],
)  # fmt: skip
def test_only_an_old_connection_that_ends_without_a_byte_is_stale(
    run: Any, before_end: bytes, kind: type[Exception]
) -> None:
    async def talk(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(engine.asked) == 1:
            await once(engine, reader, writer)
        await engine.head(reader)
        writer.write(before_end)
        await writer.drain()
        writer.close()

    async def work() -> None:
        async with before(talk) as (transport, engine):
            await get(transport)
            with pytest.raises(kind):
                await get(transport)
            assert len(engine.asked) == 1
            with pytest.raises(httpx2.TransportError) as raised:  # a new connection
                await get(transport)
            assert not isinstance(raised.value, StaleError) and len(engine.asked) == 2

    run(work())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_kinds_of_addresses_are_reached(run: Any, host: str) -> None:
    async def work() -> None:
        async with before(once, host=host) as (transport, engine):
            assert await get(transport) == (200, b"ok")
            shown = f"[{host}]" if ":" in host else host
            assert f"host: {shown}:{transport._port}".encode() in engine.asked[0][0]

    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no such addresses")
    run(work())


def test_another_address_of_a_host_is_tried(run: Any, monkeypatch: Any) -> None:
    async def work() -> None:
        async with before(once) as (transport, _):
            loop, real = asyncio.get_running_loop(), transport._port
            with socket.create_server(("127.0.0.1", 0)) as closed:
                dead = closed.getsockname()[1]

            class Loop:
                async def getaddrinfo(self, *asked: Any, **how: Any) -> Any:
                    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
                    return [(*kind, ("127.0.0.1", dead)), (*kind, ("127.0.0.1", real))]

                def __getattr__(self, name: str) -> Any:
                    return getattr(loop, name)

            monkeypatch.setattr(network.asyncio, "get_running_loop", Loop)
            try:
                made = await transport._connected()
            finally:
                monkeypatch.undo()
            made.close()

    run(work())


def test_why_no_connection_is_made_is_told(run: Any) -> None:
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        with pytest.raises(httpx2.ConnectError):
            await get(Transport(httpx2.URL(f"http://127.0.0.1:{port}"), 5.0, 1.0))
        with pytest.raises(httpx2.ConnectError):
            await get(Transport(httpx2.URL(f"http://{'x' * 64}.invalid"), 5.0, 1.0))
        with pytest.raises(httpx2.ConnectTimeout, match="within 0 s"):
            await get(Transport(httpx2.URL(f"http://127.0.0.1:{port}"), 0.0, 1.0))

    run(work())


def test_an_engine_behind_tls_is_reached_where_its_certificate_is_trusted(run: Any, monkeypatch: Any) -> None:
    async def work() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(CERTIFICATE)
        async with before(twice, context=context, name="localhost") as (transport, engine):
            for _ in range(2):
                assert await get(transport, b"/", "POST", b"x" * 0) == (200, b"ok")
            assert len(engine.asked) == 1
            monkeypatch.delenv("SSL_CERT_FILE")
            stranger = Transport(httpx2.URL(f"https://localhost:{transport._port}"), 5.0, 1.0)
            with pytest.raises(httpx2.ConnectError, match="certificate"):
                await get(stranger)

    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    run(work())
