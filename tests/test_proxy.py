"""A proxy in front of engines: clients notice nothing of it, and what they were answered is there to learn from."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import ModuleProcess
from saved_pair import save_pair
from table_engine import GROUP, VOCAB, FakeVLLM, Wire, served
from waiting import Clock

from osd_hf import CorrectionStore, Trace
from osd_hf.cli.main import main
from osd_hf.cli.proxy import LearnProcess
from osd_hf.engines.completions import ResponseReader
from osd_hf.errors import StoreError
from osd_hf.proxy import app as proxy_app
from osd_hf.proxy import recorder
from osd_hf.proxy.app import METRICS_PATH, Proxy, Upstream
from osd_hf.proxy.recorder import ProxyCounts, Recorder, Recording, remove_fields, split_events

KEPT = 8
READER = ResponseReader(VOCAB, KEPT)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COMMON = {"model": "table", "max_tokens": 12, "temperature": 0}
ASKS = {
    CHAT: COMMON | {"messages": [{"role": "user", "content": "Was ist größer?\u2028"}]},
    COMPLETIONS: COMMON | {"prompt": "One, two"},
}
Answered = tuple[int, list[tuple[str, str]], bytes]


@dataclasses.dataclass
class Front:
    """A proxy with what is behind it."""

    proxy: Proxy
    app: Any
    counts: ProxyCounts
    recorder: Recorder
    store: CorrectionStore
    clock: Clock
    left_out: Callable[[], dict[str, int]]

    def settle(self) -> None:
        """Wait until all answers that have passed are dealt with."""
        self.recorder.wait()

    def kept(self) -> list[Trace]:
        """What has been collected, in the order of the answers."""
        self.recorder.wait()
        self.store.flush()
        return list(CorrectionStore(self.store.path))


@contextlib.contextmanager
def before(*engines: Any, path: Path, routes: Any = None, **settings: Any) -> Iterator[Front]:
    """A proxy before engines in this process, or before transports."""
    clock, counts = Clock(), ProxyCounts()
    upstreams = [
        Upstream(f"http://engine{i}", Wire(engine) if callable(engine) else engine, clock)
        for i, engine in enumerate(engines)
    ]
    by_label = {name: Upstream(f"http://{name}", Wire(engine), clock) for name, engine in (routes or {}).items()}
    with CorrectionStore(path / "store") as store:
        made = Recorder(READER, store, counts, in_process=False, clock=clock)
        proxy = Proxy(upstreams, counts, made, routes=by_label, **settings)
        try:
            yield Front(proxy, proxy.app(), counts, made, store, clock, lambda: counts.to_dict()["left_out"])
        finally:
            made.close()


class Failing(httpx2.AsyncBaseTransport):
    """Fails so many times, on new connections or on ones that were kept; then an engine answers."""

    def __init__(self, error: httpx2.TransportError, engine: Any = None, times: int = 1 << 30, is_new: bool = True):
        self.error, self.engine, self.left, self.is_new, self.asked = error, engine, times, is_new, 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.asked += 1
        if self.asked > self.left:
            return await Wire(self.engine).handle_async_request(request)
        if self.is_new:
            await request.extensions["trace"]("connection.connect_tcp.started", {})
        raise self.error


def dead() -> Failing:
    """Nobody is there."""
    return Failing(httpx2.ConnectError("connection refused"))


async def ask(
    app: Any, path: str, body: Any = None, *, method: str = "POST", headers: Any = (), **extensions: bytes
) -> Answered:
    """Status, headers and bytes of an answer."""
    content = body if isinstance(body, bytes) or body is None else json.dumps(body, ensure_ascii=False).encode()
    async with httpx2.AsyncClient(transport=Wire(app), base_url="http://front") as client:
        answer = await client.request(
            method, path, content=content, extensions=extensions,
            headers=[("content-type", "application/json"), *dict(headers).items()] if isinstance(headers, dict)
            else [("content-type", "application/json"), *headers],
        )  # fmt: skip
        return answer.status_code, answer.headers.multi_items(), await answer.aread()


def asks(app: Any, requests: Sequence[tuple[Any, ...]], **how: Any) -> list[Answered]:
    async def all_of_them() -> list[Answered]:
        return [await ask(app, *request, **how) for request in requests]

    return asyncio.run(all_of_them())


# --- bytes ----------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampled": {"temperature": 1.5, "seed": 3, "top_p": 1.0, "logprobs": None},
    "stop": {"stop": ["e", "n"]},
    "two choices": {"n": 2, "temperature": 1},
    "usage": {"stream_options": {"include_usage": True}},
    "tools": {"tools": []},
}
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "own logprobs": {CHAT: {"logprobs": True, "top_logprobs": 2}, COMPLETIONS: {"logprobs": 2}},
    "own ids": {CHAT: {"return_token_ids": True}, COMPLETIONS: {"return_token_ids": True}},
    "penalty": {CHAT: {"presence_penalty": 1}, COMPLETIONS: {"presence_penalty": 1}},
    "own of all": {
        CHAT: {"logprobs": True, "top_logprobs": 9, "return_token_ids": True, "return_tokens_as_token_ids": True},
        COMPLETIONS: {"logprobs": 9, "return_token_ids": True, "return_tokens_as_token_ids": True},
    },
}
WRONG: dict[str, Any] = {"temperature": {"temperature": -1}, "no prompt": {"messages": None, "prompt": None},
                         "model": {"model": "another"}}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_clients_get_the_bytes_of_a_direct_call(path: str, stream: bool, tmp_path: Path) -> None:
    engine = FakeVLLM()
    engine.most_logprobs = 9

    async def compare() -> None:
        for is_parsing in (False, True):
            engine.is_parsing = is_parsing
            for name, body in _bodies(path, stream):
                direct = await ask(engine, path, body)
                assert await ask(front.app, path, body) == direct, (is_parsing, name)
                assert (engine.asked[-1] != body) == (name in {*VARIANTS, "model"}), (is_parsing, name)

    with before(engine, path=tmp_path) as front:
        asyncio.run(compare())
        kept = front.kept()
    assert len(kept) == 2 * (len(VARIANTS) + 1) and front.counts.collected == len(kept)
    assert front.counts.retries == 2 * 2 and front.counts.dropped == 0


def _bodies(path: str, stream: bool) -> Iterator[tuple[str, bytes]]:
    base = ASKS[path] | ({"stream": True} if stream else {})
    given = VARIANTS | {name: by_path[path] for name, by_path in OWN.items()} | WRONG
    for name, more in given.items():
        body = {k: v for k, v in (base | more).items() if v is not None or k == "logprobs"}
        yield name, json.dumps(body, ensure_ascii=name == "stop").encode()
    yield "malformed", b'{"model": "table", "prompt": '
    yield "no object", b'["model", "prompt"]'


@pytest.mark.parametrize("text", [
    b"", b"[1]", b"{", b'{"choices": [1]}', b'{"choices": 3}', b'{"a":  1, "choices": [{"logprobs": null}]}', b"\xff",
])  # fmt: skip
def test_other_bodies_stay_unchanged(text: bytes) -> None:
    assert remove_fields(text) == text


def test_removing_fields_keeps_the_other_values() -> None:
    text = '{"é":"\\ud800","choices":[{"text":"\u2028","logprobs":{"a":1}},{"x":1e-7}],"prompt_token_ids":[1]}'
    removed = json.loads(remove_fields(text.encode()))
    expected = json.loads(text)
    expected["choices"][0]["logprobs"] = expected["prompt_token_ids"] = None
    assert removed == expected


@given(st.lists(st.sampled_from([b"data: {}", b"\n", b"\r\n", b"\r", b": note", b"\n\n", b"x"])), st.data())
def test_a_stream_of_events_is_cut_behind_blank_lines_and_nowhere_else(
    parts: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    rest, events = b"", list[bytes]()
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        *whole, rest = split_events(rest + stream[begin:end])
        events += whole
    assert b"".join(events) + rest == stream
    assert all(event.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) for event in events)
    assert all(event[:-1].count(b"\n\n") == 0 for event in [*events, rest + b"."])
    assert split_events(b"a\r\nb\r\n\r\nc\n\nd\r\re\r\n") == [b"a\r\nb\r\n\r\n", b"c\n\n", b"d\r\r", b"e\r\n"]


# --- what is collected ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_store_holds_what_direct_answers_hold(path: str, tmp_path: Path) -> None:
    engine = FakeVLLM()
    bodies = [ASKS[path] | {"seed": seed, "temperature": seed % 2, "max_tokens": 5 + seed} for seed in range(6)]
    with before(engine, path=tmp_path, domain="talk") as front:
        asks(front.app, [(path, body | ({"stream": True} if i % 2 else {})) for i, body in enumerate(bodies)])
        kept = front.kept()
    more = json.loads(engine.asked[-1])
    asked = {name: more[name] for name in more if name.startswith(("return", "logprobs", "top_logprobs"))}
    answers = asks(engine, [(path, body | asked) for body in bodies])
    direct = [
        trace
        for body, (_, _, answer) in zip(bodies, answers, strict=True)
        for trace in READER.traces(json.loads(answer), body, domain="talk")
    ]
    assert len(kept) == len(direct) == len(bodies)
    for one, other in zip(kept, direct, strict=True):
        for name in (f.name for f in dataclasses.fields(Trace)):
            np.testing.assert_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_a_share_is_collected_and_who_opts_out_is_not(tmp_path: Path) -> None:
    engine = FakeVLLM()
    request = (CHAT, ASKS[CHAT])
    with before(engine, path=tmp_path, share=0.25) as front:
        asks(front.app, [request] * 8)
        assert [len(json.loads(body)) > len(ASKS[CHAT]) for body in engine.asked] == 2 * [False, False, False, True]
        for said in (["False"], ["false", "true"], ["yes, no"], [""]):
            asks(front.app, [request] * 2, headers=[("x-osd-collect", value) for value in said])
        assert not any(len(json.loads(body)) > len(ASKS[CHAT]) for body in engine.asked[8:])
        assert len(front.kept()) == 2 and front.left_out() == {"its client does not want it collected": 8}
    assert not any(name.startswith(b"x-osd") for headers in engine.headers for name in headers)


def test_a_label_chooses_the_engine_and_goes_into_the_trace(tmp_path: Path) -> None:
    general, sums = FakeVLLM(), FakeVLLM()
    with before(general, path=tmp_path, routes={"sums": sums}) as front:
        for label in ("sums", "letters", "x" * 65):
            asks(front.app, [(COMPLETIONS, ASKS[COMPLETIONS])] * 2, headers={"x-osd-domain": label})
        domains = [trace.domain for trace in front.kept()]
    assert (len(sums.asked), len(general.asked)) == (2, 4)
    assert Counter(domains) == {"sums": 2, "letters": 2, None: 2}


@pytest.mark.parametrize("request_", [
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    {"messages": [], "response_format": {"type": "json_object"}}, {"prompt_embeds": "AA=="},
])  # fmt: skip
def test_an_engine_is_not_asked_for_what_cannot_be_learned_from(request_: dict[str, Any], tmp_path: Path) -> None:
    engine = FakeVLLM()
    with before(engine, path=tmp_path) as front:
        asks(front.app, [(CHAT, ASKS[CHAT]), (CHAT, ASKS[CHAT] | request_)])
        assert json.loads(engine.asked[-1]) == ASKS[CHAT] | request_
        assert len(front.kept()) == 1 and sum(front.left_out().values()) == 1


def test_keys_reach_the_engine_and_neither_the_store_nor_the_log(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    engine, key = FakeVLLM(), "sk-abcdefghijklmnopqrstuvwxyz"
    with before(engine, dead(), path=tmp_path) as front:
        for path in (CHAT, COMPLETIONS, f"{COMPLETIONS}?api_key={key}"):
            asks(front.app, [(path, ASKS[path.partition("?")[0]])] * 3, headers={"Authorization": f"Bearer {key}"})
        assert front.kept()
    assert all(headers[b"authorization"] == f"Bearer {key}".encode() for headers in engine.headers)
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert written and key.encode() not in written
    told = [record.getMessage() for record in caplog.records if record.name != "httpx2"]  # that is the client's own
    assert told and not any(key in text for text in told)


# --- what passes through --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH", "POST"])
def test_everything_else_passes_through(method: str, tmp_path: Path) -> None:
    engine = FakeVLLM()
    body = None if method in ("GET", "HEAD", "OPTIONS") else b"\x00\xffany" * 9
    headers = {"x-mine": "a b", "accept-encoding": "br", "x-osd-domain": "d", "keep-alive": "5", "connection": "x-hop",
               "x-hop": "1"}  # fmt: skip
    with before(engine, path=tmp_path) as front:
        path = "/echo/a%2Fb%20c;d?q=1&q=%C3%A9"
        status, answered, told = asks(front.app, [(path, body)], method=method, headers=headers)[0]
        direct = asks(engine, [("/echo", body)], method=method)[0]
        assert (status, answered) == (
            203,
            [(n, v) if n != "content-length" else (n, str(len(told))) for n, v in direct[1]],
        )
        found = json.loads(told)
        assert (found["method"], found["path"], found["query"]) == (method, "/echo/a%2Fb%20c;d", "q=1&q=%C3%A9")
        assert found["bytes"] == len(body or b"")
        names = [name for name, _ in found["headers"]]
        assert ["x-mine", "a b"] in found["headers"] and ["accept-encoding", "br"] in found["headers"]
        assert ["host", "engine0"] in found["headers"] and names.count("host") == 1
        assert not {"x-osd-domain", "keep-alive", "x-hop", "connection"} & {*names}
        assert asks(front.app, [("/v1/models",), ("/health",), ("/none",)], method="GET") == asks(
            engine, [("/v1/models",), ("/health",), ("/none",)], method="GET"
        )


@pytest.mark.parametrize("target", [
    "/collective_rpc", "/collective_rpc/", "//sleep?level=1", "/v1/../wake_up", "/%63ollective_rpc", "/a/%2e%2e/pause",
    "/base/start_draft_weight_update", "/x%2Freset_prefix_cache", "/%2573leep", "/is_sleeping%23",
])  # fmt: skip
def test_development_endpoints_are_closed(target: str, tmp_path: Path) -> None:
    with before(FakeVLLM(), path=tmp_path) as front:
        status, _, told = asyncio.run(ask(front.app, "/x", b"{}", target=target.encode()))
        assert status == 404 and "--allow-development" in json.loads(told)["error"]["message"]
        front.proxy.allow_development = True
        assert asyncio.run(ask(front.app, "/x", b"{}", target=target.encode()))[2] == b'{"detail":"Not Found"}'


def test_large_bodies_pass_and_too_large_ones_are_refused(tmp_path: Path) -> None:
    engine = FakeVLLM()
    text = ASKS[COMPLETIONS] | {"user": "a" * (10 << 20)}

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(12):
            yield b"x" * (1 << 20)

    async def streamed(path: str) -> httpx2.Response:
        async with httpx2.AsyncClient(transport=Wire(front.app), base_url="http://front") as client:
            return await client.post(path, content=pieces())

    with before(engine, path=tmp_path, max_body_bytes=11 << 20) as front:
        assert asks(front.app, [(COMPLETIONS, text)]) == asks(engine, [(COMPLETIONS, text)])
        asked = len(engine.asked)
        for path in ("/echo", COMPLETIONS):
            told = asyncio.run(streamed(path))
            assert told.status_code == 413 and told.json()["error"]["message"].endswith(f"{11 << 20} bytes.")
            assert asks(front.app, [(path, b"x" * (12 << 20))])[0][0] == 413
        assert len(engine.asked) == asked
        front.proxy.max_body_bytes = 12 << 20
        assert asyncio.run(streamed("/echo")).json()["bytes"] == 12 << 20
        assert len(front.kept()) == 1


def test_metrics_are_beside_those_of_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from osd_hf.server.metrics import metrics_route, proxy_metrics

    with before(FakeVLLM(), path=tmp_path) as front:
        app = front.proxy.app([metrics_route(lambda: proxy_metrics(front.counts.to_dict()), path=METRICS_PATH)])
        asks(app, [(CHAT, ASKS[CHAT])] * 3)
        (status, _, text), (engines_own, *_) = asks(app, [(METRICS_PATH,), ("/metrics",)], method="GET")
        assert (status, engines_own) == (200, 404) and b"osd_hf_proxy_requests_total 3.0" in text


# --- what fails -----------------------------------------------------------------------------------------------------


def _as_direct(front: Front, engine: FakeVLLM, times: int = 3) -> None:
    for path, body in ASKS.items():
        for more in ({}, {"stream": True}):
            assert asks(front.app, [(path, body | more)] * times) == asks(engine, [(path, body | more)] * times)


def test_a_reader_that_fails_costs_no_answer(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ResponseReader, "traces", fails)
    engine = FakeVLLM()
    with before(engine, path=tmp_path) as front:
        _as_direct(front, engine)
        assert front.kept() == []
    assert front.left_out() == {"it cannot be read because of an internal error": 12}
    assert [r.getMessage() for r in caplog.records] == [
        "An answer cannot be collected: a bug. Clients are served all the same."
    ]


def test_a_full_disk_costs_no_answer_and_what_was_kept_is_written_later(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    engine, is_full, request = FakeVLLM(), [True], (COMPLETIONS, ASKS[COMPLETIONS])
    write = CorrectionStore.flush

    def flush(store: CorrectionStore) -> None:
        if is_full[0]:
            raise StoreError("cannot write: no space left on the device")
        write(store)

    monkeypatch.setattr(CorrectionStore, "flush", flush)
    with before(engine, path=tmp_path) as front:
        front.store.flush_every = 1
        asks(front.app, [request])
        front.settle()
        _as_direct(front, engine)  # in the pause, nobody is asked for more
        assert not any(b"return_token_ids" in body for body in engine.asked[1:])
        front.clock.now = recorder.RETRY_SECONDS
        asks(front.app, [request])
        front.settle()
        assert (front.counts.collected, front.counts.dropped) == (1, 1)
        is_full[0], front.clock.now = False, 2 * recorder.RETRY_SECONDS
        asks(front.app, [request] * 2)
        assert len(front.kept()) == 3
    assert len(caplog.records) == 1 and "no space left" in caplog.text


def test_answers_that_are_too_large_together_are_dropped(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(recorder, "MAX_WAITING_BYTES", 2000)
    engine = FakeVLLM()
    with before(engine, path=tmp_path) as front:
        _as_direct(front, engine, times=1)
        assert front.kept() == [] and front.counts.dropped == 4


def test_an_engine_that_refuses_what_is_added_is_asked_without_and_left_alone_for_a_while(
    tmp_path: Path, caplog: Any
) -> None:
    engine = FakeVLLM()
    engine.most_logprobs = KEPT - 1
    with before(engine, path=tmp_path) as front:
        pause = recorder.PAUSE_SECONDS
        for now, refusals in ((0.0, 1), (pause / 2, 0), (pause, 1)):
            front.clock.now, earlier = now, len(engine.asked)
            _as_direct(front, engine)
            assert len(engine.asked) - earlier == 24 + refusals
        engine.most_logprobs, front.clock.now = KEPT, 2e6
        _as_direct(front, engine)
        assert len(front.kept()) == 12
    assert front.counts.retries == len(caplog.records) == 2 and "max allowed: " not in caplog.text
    assert f"Requested sample logprobs of {KEPT}" in caplog.text and "--max-logprobs" in caplog.text


def test_a_client_that_leaves_is_left_by_the_engine_at_once(tmp_path: Path) -> None:
    engine = FakeVLLM()

    async def leave(path: str) -> None:
        client = httpx2.AsyncClient(transport=Wire(front.app), base_url="http://front")
        body = ASKS[path] | {"stream": True, "max_tokens": 100 * GROUP}
        async with client, client.stream("POST", path, json=body) as answer:
            await anext(answer.aiter_raw())
        await engine.left.wait()

    with before(engine, path=tmp_path) as front:
        for path in ASKS:
            engine.left, engine.sent = asyncio.Event(), 0
            asyncio.run(leave(path))
            assert engine.sent < 20 and b"return_token_ids" in engine.asked[-1]
        assert front.proxy.upstreams[0].open_requests == 0 and front.kept() == []


def test_another_engine_answers_where_one_is_dead(tmp_path: Path, caplog: Any) -> None:
    alive, gone = FakeVLLM(), dead()
    with before(gone, alive, path=tmp_path) as front:
        _as_direct(front, alive)
        assert gone.asked == 1 and front.counts.retries == front.counts.engine_errors == 1  # then it is tried last
        front.clock.now = proxy_app.AVOID_SECONDS
        _as_direct(front, alive)
        assert gone.asked == 2 and len(caplog.records) == 1
        assert asks(front.app, [("/echo", b"x" * 9)])[0][0] == 203
        front.proxy.upstreams.pop()
        for path, body in ASKS.items():
            status, _, told = asks(front.app, [(path, body)])[0]
            assert status == 502 and json.loads(told)["error"].keys() == {"message", "type", "param", "code"}


def test_an_answer_that_breaks_off_breaks_off_for_the_client(tmp_path: Path) -> None:
    class Breaks(FakeVLLM):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            with contextlib.suppress(ZeroDivisionError):
                await super().__call__(scope, receive, send)

    async def break_at(number: int) -> None:
        if number == 2:
            raise ZeroDivisionError

    engine = Breaks()
    with before(engine, path=tmp_path) as front:
        engine.before_piece = break_at
        with pytest.raises(httpx2.RemoteProtocolError):
            asks(front.app, [(CHAT, ASKS[CHAT] | {"stream": True})])
        assert front.kept() == [] and front.counts.engine_errors == 1


@pytest.mark.parametrize(("is_new", "times", "status"), [(True, 1, 502), (False, 1, 200), (False, 2, 502)])
def test_a_request_is_repeated_once_if_a_kept_connection_was_lost(
    is_new: bool, times: int, status: int, tmp_path: Path
) -> None:
    lost = httpx2.RemoteProtocolError("Server disconnected without sending a response.")
    engines = [Failing(lost, FakeVLLM(), times, is_new) for _ in range(2)]
    with before(*engines, path=tmp_path) as front:
        assert asks(front.app, [(CHAT, ASKS[CHAT])])[0][0] == status
        assert front.counts.engine_errors == (status == 502) and front.counts.retries == 0
        assert sum(engine.asked for engine in engines) == (1 if is_new else 2)


def test_a_connection_that_an_engine_closes_costs_no_answer(tmp_path: Path) -> None:
    """An engine that closes each connection without notice when a second request comes on it."""

    serving: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async def compare() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        front.proxy.upstreams += [Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")]
        assert [(await ask(front.app, "/x", b"{}"))[2] for _ in range(4)] == [b"ok"] * 4
        await front.proxy.upstreams[0].close()
        server.close()
        await asyncio.gather(*serving)

    with before(path=tmp_path) as front:
        asyncio.run(compare())


def test_a_process_that_reads_is_started_anew_when_it_dies(tmp_path: Path) -> None:
    counts, store = ProxyCounts(), CorrectionStore(tmp_path / "store")
    made = Recorder(READER, store, counts)
    (answer,) = asks(FakeVLLM(), [(CHAT, ASKS[CHAT] | OWN["own of all"][CHAT])])

    def keep() -> None:
        recording = Recording(ASKS[CHAT], None, "http://engine")
        recording.add(answer[2])
        made.put(recording)
        made.wait()

    keep()
    assert counts.collected == 1
    (child,) = (c for c in multiprocessing.active_children() if c.name.startswith("Spawn"))
    child.kill()
    child.join()
    while counts.collected < 2:  # what comes before the death is noticed is lost
        keep()
    made.close()
    assert len(CorrectionStore(tmp_path / "store")) == 1  # of the second process


def test_little_of_a_request_is_kept() -> None:
    recording = Recording(ASKS[CHAT] | {"top_p": 0.5, "user": "x"}, None, "http://engine")
    assert recording.request == COMMON | {"top_p": 0.5}


# --- the command ----------------------------------------------------------------------------------------------------


def test_a_learner_is_started_again_and_ends_with_the_proxy(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd_hf.cli.proxy.RESTART_SECONDS", 0.01)
    monkeypatch.setattr("osd_hf.cli.proxy.POLL_SECONDS", 0.01)
    started: queue.Queue[Any] = queue.Queue()

    class Process:
        def __init__(self, command: Sequence[str]) -> None:
            self.command, self.code = command, None
            started.put(self)

        def poll(self) -> int | None:
            return self.code

        def wait(self, timeout: float) -> int | None:
            return self.code

        def terminate(self) -> None:
            self.code = -15

    learner = LearnProcess(["learn", "x"], start=Process)
    for _ in range(3):
        process = started.get()
        assert process.command == ["learn", "x"]
        process.code = 1
    last = started.get()
    learner.stop()
    assert last.code == -15 and started.empty() and len(caplog.records) == 3


@pytest.mark.parametrize(("flags", "said"), [
    (["--share", "0"], "--share must be above 0"),
    (["--learn"], "--output-dir"),
    (["--learn", "--output-dir", "o", "--draft", "d"], "--draft and --target go together"),
    (["--route", "sums"], "--route must be DOMAIN=URL, got sums"),
    (["--url", "http://me:secret@host"], "is given with a user"),
])  # fmt: skip
def test_what_cannot_be_is_refused(flags: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["proxy", "--url", "http://localhost:1", "--store", str(tmp_path / "s"), "--port", "0", *flags]) != 0
    told = capsys.readouterr().err
    assert said in told and "secret" not in told and not (tmp_path / "s").exists()


@contextlib.contextmanager
def running(address: str, folder: Path) -> Iterator[tuple[ModuleProcess, str]]:
    """A proxy before an engine in a process of its own, and its address."""
    pair = save_pair(folder / "pair")
    for path in (pair / "target").glob("tokenizer*"):
        path.unlink()  # the proxy reads no text
    flags = ["--url", address, "--store", str(folder / "store"), "--target", str(pair / "target"), "--port", "0",
             "--share", "1", "--num-logprobs", str(KEPT)]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = ModuleProcess(
            [sys.executable, "-m", "osd_hf.cli.main", "proxy", *flags], stdout=subprocess.PIPE, stderr=log, text=True,
            env=dict(os.environ),
        )  # fmt: skip
        try:
            yield process, process.stdout.readline().split()[0]
        finally:
            process.terminate()


def test_a_proxy_that_is_killed_leaves_no_process_and_loses_no_answer(tmp_path: Path) -> None:
    with served(FakeVLLM()) as address, running(address, tmp_path) as (process, front):
        httpx2.post(front + CHAT, json=ASKS[CHAT])
        while "collected_total 1.0" not in httpx2.get(front + METRICS_PATH).text:  # another process reads
            pass
        process.kill()
        assert process.stdout.read() == ""  # by both processes, to their end
        process.communicate()
    assert len(CorrectionStore(tmp_path / "store")) == 1


def test_a_signal_lets_answers_end_and_writes_what_was_collected(tmp_path: Path) -> None:
    engine, go_on, body = FakeVLLM(), threading.Event(), ASKS[CHAT] | {"stream": True}

    async def hold(number: int) -> None:
        await asyncio.to_thread(go_on.wait)

    with served(engine) as address:
        with running(address, tmp_path) as (process, front):
            assert httpx2.post(front + CHAT, json=body).content == httpx2.post(address + CHAT, json=body).content
            engine.before_piece = hold
            try:
                with httpx2.stream("POST", front + CHAT, json=body) as answer:
                    process.terminate()
                    assert "stopping" in process.stdout.readline()
                    with pytest.raises(httpx2.ConnectError):
                        httpx2.get(front + "/health")
                    go_on.set()
                    text = answer.read()
                process.communicate()
            finally:
                go_on.set()
        assert text == httpx2.post(address + CHAT, json=body).content
        assert process.poll() == 0, (tmp_path / "log").read_text()
    assert len(CorrectionStore(tmp_path / "store")) == 2
    assert (tmp_path / "log").read_text() == ""
