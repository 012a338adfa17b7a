"""How a proxy sends requests on: over real connections, as httpx2's own transport does, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import pytest
from table_engine import FakeVLLM, served

from osd_hf import ConfigError
from osd_hf.serving.transport import MOST_IN_ONE, AiohttpTransport
from osd_hf.serving.upstream import Engine, StaleError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Long: " + b"v" * 20_000 + b"\r\n\r\nok"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(FakeVLLM()) as address:
        yield address


async def in_pieces() -> AsyncIterator[bytes]:
    for size in (3, 70_000, 1):
        yield b"\x00\xff" * size


@contextlib.asynccontextmanager
async def listening(
    answer: Callable[[int], bytes | None], *, closes: bool = False
) -> AsyncIterator[tuple[str, list[bytes]]]:
    """The address of a server, and the heads it is sent: its n-th request (of all connections) is answered by what is
    given for it; its connection is closed where that is nothing, or after each answer."""
    heads, writers = list[bytes](), list[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                sizes = [line[16:] for line in heads[-1].lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(sizes[0]) if sizes else 0)
                told = answer(len(heads))
                writer.write(told or b"")
                if closes or told is None:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def told(transport: httpx2.AsyncBaseTransport, request: httpx2.Request) -> tuple[Any, ...]:
    """All that is told of an answer, but for its date."""
    response = await transport.handle_async_request(request)
    headers = [(n, v) for n, v in response.headers.raw if n.lower() != b"date"]
    pieces = b"".join([piece async for piece in response.aiter_raw()])
    await response.aclose()
    return response.status_code, headers, pieces


REQUESTS: dict[str, dict[str, Any]] = {
    "no body": {"method": "GET"},
    "delete": {"method": "DELETE"},
    "no body where one is expected": {"method": "POST"},
    "body": {"method": "POST", "content": b"\x00\xff12345"},
    "large body": {"method": "POST", "content": b"\x00\xff" * 2_000_000},
    "pieces": {"method": "POST", "content": in_pieces},
    "pieces of a size": {"method": "POST", "content": in_pieces, "headers": [("content-length", "140008")]},
    "headers": {"method": "POST", "content": b"{}", "headers": [
        ("x-one", "1"), ("x-one", "2"), ("cookie", 'a=b; c="d'), ("accept-encoding", "br"), ("authorization", "k"),
        ("content-type", "text/plain"), ("user-agent", "u"), ("content-encoding", "gzip"),
    ]},
    "stream": {"method": "POST", "path": "/v1/completions", "content":
               b'{"model": "table", "prompt": "One", "max_tokens": 5, "temperature": 0, "stream": true}'},
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_and_answers_are_those_of_httpx2(name: str, address: str) -> None:
    how = dict(REQUESTS[name])
    path = how.pop("path", "/echo/a%2Fb%20;d?q=%C3%A9&q")

    async def both() -> list[Any]:
        found = []
        for transport in (AiohttpTransport(2.0), httpx2.AsyncHTTPTransport()):
            async with transport:
                for _ in range(2):  # the second on the connection of the first
                    content = how.get("content")
                    sent = how | {"content": content() if callable(content) else content}
                    request = httpx2.Request(url=address, extensions={"target": path.encode()}, **sent)
                    found.append(await told(transport, request))
        return found

    found = asyncio.run(both())
    assert found[0][0] < 300 and [one == found[0] for one in found] == [True] * 4


def test_heads_pass_whatever_their_bytes_and_their_length() -> None:
    async def heads_of() -> list[bytes]:
        async with listening(lambda number: OK) as (url, heads), AiohttpTransport(2.0) as transport:
            for value in (b"a", b"gr\xf6\xdfer", b"l" * 30_000):
                request = httpx2.Request("POST", url, headers=[(b"x-mine", value)])
                assert (await told(transport, request))[2] == b"ok"
        return heads

    plain, latin, long = asyncio.run(heads_of())
    assert b"x-mine: a\r\n" in plain and b"x-mine: gr\xf6\xdfer\r\n" in latin and b"l" * 30_000 in long
    assert sorted(plain.replace(b"a\r\n", b"gr\xf6\xdfer\r\n").lower().split(b"\r\n")) == sorted(
        latin.lower().split(b"\r\n")
    )


def test_answers_are_neither_decoded_nor_followed() -> None:
    moved = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"
    packed = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b"

    async def found() -> tuple[Any, ...]:
        async with listening({1: moved, 2: packed}.__getitem__) as (url, heads), AiohttpTransport(2.0) as transport:
            return *[await told(transport, httpx2.Request("POST", url)) for _ in range(2)], len(heads)

    (status, headers, _), (_, _, body), asked = asyncio.run(found())
    assert (status, (b"Location", b"/x") in headers, body, asked) == (307, True, b"\x1f\x8b", 2)


@pytest.mark.parametrize("size", [2, MOST_IN_ONE + 1])
def test_a_connection_closed_before_the_answer_is_stale_only_if_it_was_used_before(size: int) -> None:
    async def sent() -> None:
        async with listening({1: OK, 2: None, 3: None, 4: OK}.__getitem__) as (url, heads):
            engine = Engine(url)
            for outcome in (None, StaleError, httpx2.TransportError, None):
                if outcome is None:
                    response = await engine.send("POST", b"/x", [], b"b" * size)
                    assert await response.aread() == b"ok"
                    await response.aclose()
                else:
                    with pytest.raises(outcome) as caught:
                        await engine.send("POST", b"/x", [], b"b" * size)
                    assert isinstance(caught.value, StaleError) == (outcome is StaleError)
            assert len(heads) == 4  # nothing was sent twice
            await engine.close()

    asyncio.run(sent())


def test_errors_are_those_of_httpx2_and_of_the_body() -> None:
    class OwnError(Exception):
        pass

    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise OwnError

    async def tried(transport: httpx2.AsyncBaseTransport, url: str, content: Any = None) -> type[Exception] | None:
        try:
            await told(transport, httpx2.Request("POST", url, content=content))
        except (httpx2.TransportError, OwnError) as error:
            return type(error)
        return None

    async def errors() -> None:
        head = b"HTTP/1.1 200 OK\r\n%s\r\n\r\n5\r\nshort\r\n"
        for answer in (head % b"Content-Length: 99", head % b"Transfer-Encoding: chunked", b"no HTTP\r\n\r\n"):
            for transport in (AiohttpTransport(2.0), httpx2.AsyncHTTPTransport()):
                async with listening(lambda number, answer=answer: answer, closes=True) as (url, _), transport:
                    assert await tried(transport, url) is httpx2.RemoteProtocolError
        for transport in (AiohttpTransport(2.0), httpx2.AsyncHTTPTransport()):
            async with transport:
                async with listening(lambda number: OK) as (url, _):
                    assert await tried(transport, url, broken()) is OwnError
                assert await tried(transport, url) is httpx2.ConnectError

    asyncio.run(errors())


def test_without_aiohttp_it_is_said_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ConfigError, match=r"osd-hf\[serve\]"):
        Engine("http://localhost:1")
