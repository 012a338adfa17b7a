"""The app as strangers reach it: who is one, what comes in, what is kept for them, and all of it under a load."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import httpx
import pytest
import uvicorn
from app_server import app_server
from gradio import queueing, routes
from processes import ModuleProcess
from saved_pair import save_pair
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from waiting import LONG

from osd_hf.cli.app import AppSettings, make_parser
from osd_hf.errors import ConfigError
from osd_hf.loading import load_pair
from osd_hf_app import access as access_module
from osd_hf_app import launch as launch_module
from osd_hf_app.access import (
    API,
    CALL_RATE,
    FAILURE_RATE,
    LOGGERS,
    MAX_BODY_BYTES,
    MAX_EVENTS,
    MAX_NAME_CHARACTERS,
    MAX_UNREAD,
    MAX_UNREAD_OF_PAGE,
    UNREAD_SECONDS,
    AccessMiddleware,
    limit_log,
    limit_queue,
)
from osd_hf_app.launch import exposure
from osd_hf_app.page import build
from osd_hf_app.pair import ServedPair
from osd_hf_app.service import Service

# --- who is a stranger ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "environment", "share", "reason"),
    [
        *[(host, {}, False, None) for host in ("127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]")],
        *[(host, {}, False, host) for host in ("0.0.0.0", "::", "192.0.2.1", "no-such-name.invalid")],
        ("127.0.0.1", {}, True, "--share"),
        ("127.0.0.1", {"SPACE_ID": "a/b"}, False, "a Space"),
        ("127.0.0.1", {"GRADIO_ROOT_PATH": "/app"}, False, "a proxy"),
    ],
)
def test_whatever_lets_others_in_makes_the_page_public(
    host: str, environment: dict[str, str], share: bool, reason: str | None
) -> None:
    found = exposure(host, environment, share=share)
    assert found is None if reason is None else reason in (found or "")


def parsed(*flags: str) -> AppSettings:
    (settings,) = make_parser(flags).parse_settings(flags)
    assert isinstance(settings, AppSettings)
    return settings


class Launched(Exception):
    """Instead of serving."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the app would be served with."""
    found: dict[str, Any] = {}

    def serve(service: Any, host: str, port: int | None, **settings: Any) -> None:
        found.update(settings, host=host, is_public=service.is_public)
        raise Launched

    def made(pair: Any, **settings: Any) -> Any:
        return SimpleNamespace(
            demonstrate=lambda: None, is_public=settings["is_public"], sessions=SimpleNamespace(close=lambda: None)
        )

    for name, value in (("serve", serve), ("Service", made), ("ServedPair", lambda *_, **__: None),
                        ("limit_log", lambda: None)):  # fmt: skip
        monkeypatch.setattr(launch_module, name, value)
    for name in ("GRADIO_SERVER_NAME", "GRADIO_ROOT_PATH", "SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRADIO_RUN_HISTORY", "True")
    return found


def test_a_variable_that_opens_the_address_opens_no_owners_page(
    launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")
    monkeypatch.setenv("GRADIO_SHARE", "true")
    monkeypatch.setenv("GRADIO_ALLOWED_PATHS", "/")
    with pytest.raises(Launched):
        launch_module.launch(parsed())
    assert (launched["host"], launched["is_public"], launched["share"]) == ("0.0.0.0", True, False)
    told = capsys.readouterr().out
    assert "public mode (other machines can reach the address 0.0.0.0): visitors cannot save" in told
    assert "ignored: GRADIO_ALLOWED_PATHS, GRADIO_RUN_HISTORY, GRADIO_SHARE" in told
    monkeypatch.delenv("GRADIO_SERVER_NAME")
    with pytest.raises(Launched):
        launch_module.launch(parsed())
    assert (launched["host"], launched["is_public"]) == ("127.0.0.1", False)
    assert "public mode" not in capsys.readouterr().out


def test_a_stranger_cannot_invent_an_address_unless_a_proxy_is_named(
    launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(*flags: str, **environment: str) -> str:
        """The address of one who comes from this machine and says that it is another."""
        found: list[str] = []

        async def note(scope: Any, receive: Any, send: Any) -> None:
            found.append(scope["client"][0])

        with monkeypatch.context() as patch:
            patch.setenv("FORWARDED_ALLOW_IPS", "")  # undone at the end
            patch.delenv("FORWARDED_ALLOW_IPS")
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(Launched):
                launch_module.launch(parsed(*flags))
            config = uvicorn.Config(note)  # as gradio makes one
        config.load()
        scope: Any = {"type": "http", "client": ("127.0.0.1", 1), "headers": [(b"x-forwarded-for", b"192.0.2.7")]}
        asyncio.run(config.loaded_app(scope, None, None))  # type: ignore[arg-type]
        return found[0]

    assert seen("--public") == "127.0.0.1"
    assert seen(GRADIO_ROOT_PATH="/app") == "127.0.0.1"
    assert seen("--public", FORWARDED_ALLOW_IPS="127.0.0.1") == "192.0.2.7"
    assert seen("--share") == "192.0.2.7"
    assert seen(SPACE_ID="a/b") == "192.0.2.7"


# --- the middleware -------------------------------------------------------------------------------------------------


def opened(
    access: AccessMiddleware,
    path: str,
    method: str = "GET",
    body: Any = b"",
    *,
    visitor: str = "192.0.2.1",
    **headers: str,
) -> int:
    """Return the status of a response; 200 comes from the app behind the middleware."""

    async def call() -> int:
        transport = httpx.ASGITransport(app=access, client=(visitor, 1))  # type: ignore[arg-type]
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:7860") as client:
            return (await client.request(method, path, content=body, headers=sent)).status_code

    return asyncio.run(call())


async def read(scope: Any, receive: Any, send: Any) -> None:
    await Request(scope, receive).body()
    await Response()(scope, receive, send)


welcome = ExceptionMiddleware(read)


JOIN = API + "queue/join"


@pytest.mark.parametrize("host", ["localhost:7860", "127.0.0.1:7860", "[::1]:7860", "LOCALHOST"])
def test_a_page_of_this_machine_comes_in(host: str) -> None:
    access = AccessMiddleware(welcome, is_public=False)
    assert opened(access, "/", host=host) == 200
    assert opened(access, JOIN, "POST", b"{}", host=host, origin=f"http://{host}") == 200
    assert opened(access, JOIN, "POST", b"{}", host=host) == 200  # a program


@pytest.mark.parametrize(
    "headers",
    [
        *[{"host": host} for host in ("evil.example:7860", "localhost.evil.example", "10.0.0.1", "", "[::")],
        *[{"origin": origin} for origin in ("http://evil.example", "null", "http://localhost:3000")],
        *[{"sec_fetch_site": site} for site in ("cross-site", "same-site")],
        {"origin": "https://evil.example", "x_forwarded_host": "evil.example"},
    ],
)
def test_pages_of_other_sites_and_names_that_point_here_do_not(headers: dict[str, str]) -> None:
    access = AccessMiddleware(welcome, is_public=False)
    assert opened(access, JOIN, "POST", b"{}", **headers) == 403
    for path in ("/", "/config", API + "call/chat"):
        assert opened(access, path, **headers) == 403
        assert opened(access, path, "OPTIONS", **headers) == 403


def test_a_link_of_another_site_opens_the_page_and_reads_nothing_else() -> None:
    access, link = AccessMiddleware(welcome, is_public=False), {"sec_fetch_site": "cross-site"}
    assert opened(access, "/", sec_fetch_mode="navigate", **link) == 200
    assert opened(access, "/config", sec_fetch_mode="cors", **link) == 403
    assert opened(access, API + "info", sec_fetch_mode="navigate", **link) == 403


def test_a_public_page_may_be_called_from_any_site() -> None:
    access = AccessMiddleware(welcome, is_public=True)
    assert opened(access, API + "call/chat", "OPTIONS", origin="https://a.example") == 200


@pytest.mark.parametrize("is_public", [False, True])
def test_what_the_page_does_not_need_is_closed(is_public: bool) -> None:
    access = AccessMiddleware(welcome, is_public=is_public)
    assert opened(access, "/login", "POST", b"{}") == 404
    reads = "file=/etc/passwd file/etc/passwd proxy=http://a/b runs upload_progress deep_link dev/reload ../login"
    for path in [*reads.split(), "profiling/traces", "../monitoring"]:
        assert opened(access, API + path) == 404, path
    writes = "upload component_server process_recording vibe-edit/ run-history/connect stream/x new-in-gradio-7 .."
    for path in writes.split():
        assert opened(access, API + path, "POST") == 404, path


@pytest.mark.parametrize("is_public", [False, True])
def test_a_body_is_bounded_whether_its_length_is_told_or_not(is_public: bool) -> None:
    access = AccessMiddleware(welcome, is_public=is_public)

    async def parts() -> Any:
        for _ in range(MAX_BODY_BYTES // 1000 + 1):
            yield b"x" * 1000

    assert opened(access, JOIN, "POST", b"x" * MAX_BODY_BYTES) == 200
    assert opened(access, JOIN, "POST", b"x" * (MAX_BODY_BYTES + 1)) == 413
    assert opened(access, JOIN, "POST", parts()) == 413


def test_one_address_that_hurries_leaves_others_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "CALL_RATE", (CALL_RATE[0], 3600.0))  # the period does not end
    access = AccessMiddleware(welcome, is_public=True)
    statuses = [opened(access, JOIN, "POST", b"{}", visitor="192.0.2.1") for _ in range(CALL_RATE[0] // 2 + 5)]
    assert statuses.count(200) == CALL_RATE[0] // 2
    assert opened(access, JOIN, "POST", b"{}", visitor="192.0.2.2") == 200
    assert not access.open_requests.held


# --- the queue of gradio --------------------------------------------------------------------------------------------


@pytest.fixture
def page() -> Iterator[gr.Blocks]:
    async def build() -> gr.Blocks:  # in a thread without a loop gradio makes some, and leaves them open
        with gr.Blocks(analytics_enabled=False) as made:
            gr.Button().click(lambda: None, None, None)
        return made.queue()

    made = asyncio.run(build())
    yield made
    made.close()


def joined(page: gr.Blocks, name: str, visitor: str) -> Any:
    request = SimpleNamespace(client=SimpleNamespace(host=visitor))
    body = SimpleNamespace(fn_index=0, session_hash=name, event_id=None, data=[], batched=False)
    push = page._queue.push(body=body, request=request, username=None)  # type: ignore[arg-type]
    return asyncio.run(push)


def test_a_visitors_events_are_bounded(page: gr.Blocks) -> None:
    limit_queue(page)
    told = [joined(page, "mine", "192.0.2.1") for _ in range(MAX_EVENTS)]
    assert [success for success, _, _ in told].count(True) == MAX_EVENTS // 2
    assert told[-1][2] == "queue_full"
    assert not joined(page, "x" * (MAX_NAME_CHARACTERS + 1), "192.0.2.2")[0]
    assert joined(page, "other", "192.0.2.2")[0]


def test_unread_messages_are_bounded_and_deleted(page: gr.Blocks) -> None:
    now = [0.0]
    limit_queue(page, clock=lambda: now[0])
    queue = page._queue
    event = queue.event_ids_to_events[joined(page, "mine", "192.0.2.1")[1]]
    messages = queue.pending_messages_per_session["mine"]
    for _ in range(10 * MAX_UNREAD_OF_PAGE):  # a page that reads gets all
        while not messages.empty():
            messages.get_nowait()
        queue.send_message(event, queueing.ProcessStartsMessage())
    assert event.alive
    for i in range(3000):
        success, event_id, _ = joined(page, f"page {i}", "192.0.2.1")
        if not success:
            break
        event = queue.event_ids_to_events.pop(event_id)
        queue.event_queue_per_concurrency_id[event.concurrency_id].queue.clear()
        for _ in range(2 * MAX_UNREAD_OF_PAGE):
            queue.send_message(event, queueing.ProcessStartsMessage())
        assert not event.alive  # as if its page was closed
    assert not success
    assert sum(messages.qsize() for messages in queue.pending_messages_per_session.values()) <= MAX_UNREAD
    assert joined(page, "reads", "192.0.2.2")[0]
    now[0] = UNREAD_SECONDS + 1
    assert joined(page, "reads", "192.0.2.1")[0]
    assert set(queue.pending_messages_per_session) == {"mine", "reads"}  # events of both are still waiting


def test_no_more_failures_are_printed_than_a_few(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for module in (queueing, routes):
        monkeypatch.setattr(module, "traceback", module.traceback)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    filters = [list(logger.filters) for logger in loggers]
    try:
        limit_log()
        for _ in range(3 * FAILURE_RATE[0]):
            try:
                raise KeyError("x")
            except KeyError:
                queueing.traceback.print_exc()
            loggers[2].error("failed")
    finally:
        for logger, before in zip(loggers, filters, strict=True):
            logger.filters = before
    assert capsys.readouterr().err.count("KeyError: ") + caplog.text.count("failed") == FAILURE_RATE[0]


# --- all of it ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ServedPair:
    folder = save_pair(tmp_path_factory.mktemp("pair"))
    names = str(folder / "target"), str(folder / "draft")
    return ServedPair(load_pair(*names), *names)


def test_a_public_page_refuses_all_that_is_the_owners_to_whoever_calls_it(tmp_path: Path) -> None:
    with app_server(tmp_path, "--public") as address, httpx.Client(base_url=address, timeout=60) as client:
        config = client.get("/config").json()
        events = {d["api_name"]: d["id"] for d in config["dependencies"]}
        hidden = [c for c in config["components"] if c["props"].get("elem_id") == "keep"]
        assert [c["props"]["visible"] for c in hidden] == [False]
        for name, data in (("reset", [None]), ("save", [None]), ("push", [None, "sql", "a/b", True])):
            body = {"data": data, "fn_index": events[name], "session_hash": name}
            assert client.post(f"{API}run/predict", json=body).status_code == 404  # by the queue alone
            assert client.post(JOIN, json=body).status_code == 200
            told = client.get(f"{API}queue/data", params={"session_hash": name}).text
            assert "Not available in public mode." in told
        assert client.post(f"{API}upload", files={"files": ("a", b"x")}).status_code == 404
        assert client.post(JOIN, content=b"x" * (MAX_BODY_BYTES + 1)).status_code == 413
        # What stands for a visitor is the address, not what they call themselves.
        asked = {"data": ["What is 3 + 4?", "math", 8], "session_hash": "mine"}
        assert client.post(f"{API}call/chat", json=asked).status_code == 200
        assert "process_completed" in client.get(f"{API}queue/data", params={"session_hash": "mine"}).text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_login_keeps_the_owners_controls_for_those_with_the_password(
    launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from gradio_client import Client

    monkeypatch.delenv("OSD_HF_APP_PASSWORD", raising=False)
    with pytest.raises(Launched):
        launch_module.launch(parsed("--host", "0.0.0.0", "--login"))
    assert launched["is_public"] is False
    user, password = launched["login"]
    assert len(password) >= 16
    assert f"log in as {user} with the password {password}" in capsys.readouterr().out
    with pytest.raises(ConfigError):
        parsed("--login", "--public")
    monkeypatch.setenv("OSD_HF_APP_PASSWORD", "swordfish")
    with app_server(tmp_path, "--login") as address:
        with httpx.Client(base_url=address, headers={"host": "app.example"}, timeout=60) as client:
            named = {"username": "owner", "password": "swordfish"}
            assert client.get("/config").status_code == 401
            assert client.post(JOIN, json={}).status_code == 401
            assert client.post("/login", data={**named, "password": "shark"}).status_code == 400
            assert client.post("/login", data=named).status_code == 200
            assert client.get("/config", headers={"sec-fetch-site": "same-origin"}).status_code == 200
            evil = {"origin": "https://evil.example"}
            for method, path in (("GET", "/config"), ("GET", "/logout"), ("OPTIONS", JOIN), ("POST", JOIN)):
                assert client.request(method, path, headers=evil).status_code == 403
        program = Client(address, auth=("owner", "swordfish"), verbose=False)
        assert program.predict(api_name="/statistics")["requests"] == 0


def test_an_answer_stops_when_the_program_that_asked_for_it_has_gone(
    pair: ServedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(pair, config={"update_strategy": "manual"}, is_public=True, threads=1)
    answers, ask = [], service.ask

    def asked(*args: Any, **kwargs: Any) -> Any:
        answers.append((args[0], ask(*args, **kwargs)))
        return answers[-1][1]

    monkeypatch.setattr(service, "ask", asked)

    async def built() -> gr.Blocks:
        return build(service)

    page = asyncio.run(built())
    try:
        chat = next(fn.fn for fn in page.fns.values() if fn.api_name == "chat")
        request = SimpleNamespace(client=SimpleNamespace(host="192.0.2.1"), session_hash="mine")
        with service.queue.slot():
            told = chat("one", "sql", 100, request=request)
            assert next(told)["text"] == ""
            told.close()  # as gradio does when nobody reads any more
            session, answer = answers[0]
            with session.changed:
                assert session.changed.wait_for(lambda: session.job is None, LONG)
            assert answer.stop.is_set()
        assert answer.text == ""
    finally:
        page.close()
        service.sessions.close()


def test_the_load_script_finds_no_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "recipes"))
    recipe = importlib.import_module("app_strangers")
    monkeypatch.setattr(importlib.import_module("common"), "RESULTS", tmp_path)
    monkeypatch.setattr(recipe, "subprocess", SimpleNamespace(PIPE=subprocess.PIPE, Popen=ModuleProcess))
    monkeypatch.setattr(recipe, "MIN_ANSWERS", 1)
    monkeypatch.setattr(sys, "argv", ["app_strangers.py", "--seconds", "1", "--clients", "3", "--rest", "0.1"])
    assert recipe.main() == 0, capsys.readouterr().out
    report = json.loads((tmp_path / "app_strangers.json").read_text())
    assert report["marks_of_others_received"] == 0
    assert report["app_survived"]
    assert report["first_token_seconds"]["beside"]["answers"] > 0
