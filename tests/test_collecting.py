"""Collecting from an engine and from its log: what was answered is kept, once, whatever goes wrong meanwhile."""

from __future__ import annotations

import base64
import json
import logging
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import numpy as np
import pytest
from fake_engine import FakeEngine, fake_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import LONG, full

from osd_hf import CorrectionStore, Trace
from osd_hf.cli.main import main
from osd_hf.engines import completions as module
from osd_hf.engines.completions import CollectionReport, CompletionClient, ResponseReader, collect
from osd_hf.errors import ConfigError, ServerError, StoreError
from osd_hf.prompts import Prompt, encode_turn
from osd_hf.recording import record_traces
from osd_hf.store import folder as shards

KEPT, LENGTH, VOCAB = 8, 6, 300
READER = ResponseReader(VOCAB, KEPT)
QUESTIONS = [f"what is {i} + {i}?" for i in range(9)]


@pytest.fixture(autouse=True)
def by_ourselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, no key of this machine, and pauses that nobody notices."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "OPENAI_API_KEY",
                 "OPENAI_BASE_URL", "OSD_HF_API_KEY"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "MIN_PAUSE_SECONDS", 1e-3)
    monkeypatch.setattr(module, "MAX_PAUSE_SECONDS", 2e-3)


@pytest.fixture(scope="module")
def target(pair: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(pair / "target").eval()


@pytest.fixture(scope="module")
def prompts(pair: Path) -> list[tuple[Prompt, list[int]]]:
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    return [(Prompt(i, text, "sums"), encode_turn(tokenizer, text)) for i, text in enumerate(QUESTIONS)]


@pytest.fixture(scope="module")
def recorded(target: Any, prompts: Any) -> dict[tuple[int, ...], Trace]:
    """By prompt."""
    traces = record_traces(target, [ids for _, ids in prompts], max_new_tokens=LENGTH, num_logprobs=KEPT)
    return by_prompt(traces)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": text}) + "\n" for text in QUESTIONS))
    return path


@pytest.fixture
def engine(target: Any) -> Iterator[FakeEngine]:
    with fake_engine(target) as engine:
        yield engine


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[CompletionClient]:
    with CompletionClient(engine.address, patience_seconds=0) as client:
        yield client


def by_prompt(traces: Any) -> dict[tuple[int, ...], Trace]:
    found = list(traces)
    named = {tuple(trace.prompt_ids.tolist()): trace for trace in found}
    assert len(named) == len(found)  # none twice
    return named


def assert_recorded(traces: Any, recorded: dict[tuple[int, ...], Trace], count: int = len(QUESTIONS)) -> None:
    found = by_prompt(traces)
    assert len(found) == count
    for prompt, ours in found.items():
        theirs = recorded[prompt]
        assert ours.completion_ids.tolist() == theirs.completion_ids.tolist()
        assert ours.top_ids.tolist() == theirs.top_ids.tolist()
        np.testing.assert_allclose(ours.top_logits, theirs.top_logits, rtol=2e-3, atol=1e-5)
        np.testing.assert_allclose(ours.tail_logprob, theirs.tail_logprob, atol=1e-3)


def collected(client: CompletionClient, prompts: Any, store: CorrectionStore, **more: Any) -> CollectionReport:
    return collect(prompts, client, READER, store, **{"max_new_tokens": LENGTH, "concurrency": 1, **more})


# --- from a server --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 3, 20])
def test_what_is_collected_is_what_a_recording_keeps(
    engine: FakeEngine, client: CompletionClient, prompts: Any, recorded: Any, concurrency: int
) -> None:
    store, seen = CorrectionStore(), []
    report = collected(client, prompts, store, concurrency=concurrency, on_request=seen.append)
    assert_recorded(store, recorded)
    assert {trace.domain for trace in store} == {"sums"}
    assert (report.requests, report.tokens) == (9, sum(map(len, store)))
    assert len(seen) == 9
    assert not report.skipped
    assert [body["prompt"] for body in engine.asked] == [ids for _, ids in prompts] or concurrency > 1
    assert {body["model"] for body in engine.asked} == {"tiny"}
    fixed = {"temperature": 0, "repetition_penalty": 1.0, "logprobs": KEPT, "max_tokens": LENGTH}
    assert all(fixed.items() <= body.items() for body in engine.asked)


def test_sampling_is_asked_for_and_noted(engine: FakeEngine, client: CompletionClient, prompts: Any) -> None:
    store = CorrectionStore()
    collected(client, prompts[:2], store, temperature=0.8, top_p=0.9, top_k=7, seed=3)
    asked = {name: engine.asked[0][name] for name in ("temperature", "top_p", "top_k", "seed")}
    assert asked == {"temperature": 0.8, "top_p": 0.9, "top_k": 7, "seed": 3}
    assert all(trace.is_sampled and trace.sampling["top_k"] == 7 for trace in store)


def test_of_several_models_one_is_named(engine: FakeEngine) -> None:
    engine.names = ["one", "two"]
    with pytest.raises(ServerError, match="serves one, two. Name the model to ask"):
        CompletionClient(engine.address)
    with CompletionClient(engine.address, "two") as client:
        assert client.model == "two"
    engine.names = []
    with pytest.raises(ServerError, match="serves none"):
        CompletionClient(engine.address)


def test_who_is_busy_is_asked_again(
    engine: FakeEngine, prompts: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CompletionClient(engine.address, patience_seconds=LONG) as client:
        engine.busy = 4
        store = CorrectionStore()
        collected(client, prompts[:2], store)
        assert_recorded(store, recorded, 2)
        assert len(engine.asked) == 2 + 4
        engine.busy = 1 << 30
        client.patience_seconds = 0.01
        with pytest.raises(ServerError, match=r"status 503: The engine is starting. Gave up after 0.01 s."):
            collected(client, prompts[2:], store)
        assert len(store) == 2


def test_too_many_log_probs_are_refused_with_a_hint(
    engine: FakeEngine, client: CompletionClient, prompts: Any
) -> None:
    engine.most_logprobs = KEPT - 1
    client.patience_seconds = 10 * LONG  # for which a refusal is not repeated
    with pytest.raises(
        ServerError, match=r"status 400: Requested sample logprobs of 8, .* allowed: 7. Keep fewer .*--max-logprobs"
    ):
        collected(client, prompts, CorrectionStore())
    asked = [tuple(body["prompt"]) for body in engine.asked]
    assert len(asked) == len(set(asked)) == 8  # none twice; so many refusals in a row are for a reason of all


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("with_logprobs", False, "there are no log-probs; ask for `logprobs="),
        ("most_logprobs", 2, "answered /completions with status 400: Requested sample logprobs of "),
    ],
)
def test_one_bad_answer_is_left_out_and_counted(
    engine: FakeEngine, client: CompletionClient, prompts: Any, recorded: Any, name: str, value: Any, reason: str
) -> None:
    usual = getattr(engine, name)
    engine.on_request = lambda body: setattr(engine, name, value if body["prompt"] == prompts[3][1] else usual)
    store = CorrectionStore()
    report = collected(client, prompts, store)
    assert_recorded(store, recorded, 8)
    assert report.requests == 8
    ((found, count),) = report.skipped.items()
    assert reason in found
    assert count == 1


def test_a_full_disk_ends_a_collection_and_loses_no_answer(
    client: CompletionClient, prompts: Any, recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CorrectionStore(tmp_path / "store", flush_every=4)
    collected(client, prompts[:2], store)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_whole", full)
        with pytest.raises(StoreError, match="No space left"):
            collected(client, prompts[2:], store)
        assert_recorded(CorrectionStore(store.path), recorded, 2)
    store.close()  # what was answered is written where there is room again
    assert_recorded(CorrectionStore(store.path), recorded, 6)


# --- the command, from a server -------------------------------------------------------------------------------------


@pytest.fixture
def run(pair: Path, tmp_path: Path) -> Callable[..., int]:
    def run(*flags: Any, store: Any = tmp_path / "store") -> int:
        shape = ["--num-logprobs", KEPT, "--target", pair / "target"]
        shape += ["--max-new-tokens", LENGTH] if "--url" in flags else []
        return main(list(map(str, ["learn", "--collect-only", "--store", store, *shape, *flags])))

    return run


def test_the_command_collects(
    run: Any, engine: FakeEngine, rows: Path, recorded: Any, tmp_path: Path, capsys: Any
) -> None:
    report = tmp_path / "report.json"
    flags = ["--url", engine.address, "--prompts", rows, "--column", "question", "--domain", "sums"]
    assert run(*flags, "--json", report, "--api-key", "secret") == 0
    store = CorrectionStore(tmp_path / "store")
    assert_recorded(store, recorded)
    assert {trace.domain for trace in store} == {"sums"}
    assert {tuple(trace.sampling["eos_token_id"]) for trace in store} == {(2,)}
    assert set(engine.keys) == {"Bearer secret"}
    found = json.loads(report.read_text())
    size = sum(len(trace) for trace in store)
    assert (found["requests"], found["tokens"], found["skipped"]) == (9, size, {})
    written = sum(p.stat().st_size for p in (tmp_path / "store").glob("*/*.parquet"))
    assert (found["bytes"], found["bytes_per_token"]) == (written, written / size)
    assert f"9 requests with {size} tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "flags", "sent"),
    [
        ({"OPENAI_API_KEY": "theirs"}, [], None),
        ({"OPENAI_API_KEY": "theirs", "OSD_HF_API_KEY": "ours"}, [], "ours"),
        ({"OPENAI_API_KEY": "theirs", "OSD_HF_API_KEY": "ours"}, ["--api-key", "mine"], "mine"),
        ({"OSD_HF_API_KEY": "ours"}, ["--api-key-file", "{file}"], "of-a-file"),
        ({}, [], None),
    ],
)  # fmt: skip
def test_the_key_of_the_environment_goes_where_it_belongs_or_is_asked_for(
    run: Any, engine: FakeEngine, rows: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str],
    flags: list[str], sent: str | None, tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "key").write_text("of-a-file\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    flags = [flag.format(file=tmp_path / "key") for flag in flags]
    asked = ["--url", engine.address, "--prompts", rows, "--column", "question", "--num-requests", 1]
    assert run(*asked, *flags) == 0
    assert set(engine.keys) == {None if sent is None else f"Bearer {sent}"}
    assert len(engine.asked) == 1


def test_after_a_server_went_away_only_the_rest_is_asked(
    run: Any, engine: FakeEngine, rows: Path, prompts: Any, recorded: Any, tmp_path: Path, capsys: Any
) -> None:
    flags = ["--url", engine.address, "--prompts", rows, "--column", "question", "--patience-seconds", 0]
    engine.gone_after = 4
    assert run(*flags, "--concurrency", 1) == 1
    said = capsys.readouterr()
    assert "osd-hf: error: " in said.err
    assert "cannot be reached" in said.err
    assert "4 requests with" in said.out
    assert_recorded(CorrectionStore(tmp_path / "store"), recorded, 4)
    engine.gone_after = None
    engine.asked.clear()
    assert run(*flags, "--resume") == 0
    assert sorted(body["prompt"] for body in engine.asked) == sorted(ids for _, ids in prompts[4:])
    assert_recorded(CorrectionStore(tmp_path / "store"), recorded)
    engine.asked.clear()
    assert run(*flags, "--resume") == 0
    assert engine.asked == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--collect-only would change nothing without --url"),
        (["--url", "http://x", "--concurrency", "0"], "--concurrency must be at least 1, got 0"),
        (["--url", "http://x", "--temperature", "-1"], "--temperature must be at least 0"),
        (["--url", "http://x", "--top-p", "0.9"], "--top-p would change nothing without --temperature"),
        (["--url", "http://x", "--prompts", "y", "--json", "missing/report.json"], "The report cannot be written"),
        (["--url", "{engine}", "--prompts", "y", "--api-key-file", "nowhere"], "cannot be read from nowhere: No such"),
        (["--url", "{engine}", "--prompts", "y", "--api-key-file", "empty"], "empty holds no key"),
    ],
)
def test_bad_flags_are_refused(
    run: Any, engine: FakeEngine, flags: list[str], message: str, capsys: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n")
    assert run(*(flag.format(engine=engine.address) for flag in flags)) == 2
    assert message in capsys.readouterr().err
    assert engine.keys == []


def test_answers_are_collected_and_then_learned_by_one_command(
    pair: Path, engine: FakeEngine, rows: Path, tmp_path: Path
) -> None:
    store, report = tmp_path / "store", tmp_path / "report.json"
    flags = ["--store", store, "--url", engine.address, "--prompts", rows, "--column", "question"]
    flags += ["--target", pair / "target", "--draft", pair / "draft", "--num-logprobs", KEPT, "--json", report]
    more = ["--max-new-tokens", LENGTH, "--output-dir", tmp_path / "versions", "--once", "--steps-per-update", 1]
    assert main(["learn", *map(str, [*flags, *more])]) == 0
    assert json.loads(report.read_text())["requests"] == len(CorrectionStore(store)) == len(QUESTIONS)


def test_a_key_is_sent_without_its_line_end_and_never_shown(engine: FakeEngine) -> None:
    with CompletionClient(engine.address, api_key="sk-secret\n", patience_seconds=0) as client:
        client.complete([1, 2], max_new_tokens=2, num_logprobs=KEPT)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        for url, key in (
            (engine.address, "sk-\nsecret"),
            (f"http://me:secret@127.0.0.1:{taken.getsockname()[1]}", None),
        ):
            with pytest.raises(ServerError) as failed:
                CompletionClient(url, api_key=key, patience_seconds=0)
            assert "secret" not in str(failed.value)


# --- who asks, and who may know it ----------------------------------------------------------------------------------


class Answering(httpx2.BaseTransport):
    """Answers for any host, and keeps what it was sent."""

    def __init__(self, status: int = 200, headers: Any = None, text: str = '{"data": [{"id": "tiny"}]}') -> None:
        self.status, self.headers, self.text = status, headers, text
        self.sent: list[httpx2.Request] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.sent.append(request)
        return httpx2.Response(self.status, headers=self.headers, text=self.text)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> Answering:
    """No host is asked: every one of them answers here."""
    answering, real = Answering(), httpx2.Client
    monkeypatch.setattr(module.httpx2, "Client", lambda **kwargs: real(**{**kwargs, "transport": answering}))
    return answering


@pytest.mark.parametrize("address", ["http://10.0.0.7:8000", "http://gpu.example", "HTTP://localhost.example:80"])
@pytest.mark.parametrize("who", ["key", "password"])
def test_a_key_goes_over_plain_http_to_this_machine_alone(anywhere: Answering, address: str, who: str) -> None:
    url = address.replace("://", "://me:QZX@") if who == "password" else address
    key = "QZX-secret" if who == "key" else None
    with pytest.raises(ConfigError, match="plain HTTP.*allow_plain_http.*--allow-plain-http") as failed:
        CompletionClient(url, api_key=key)
    assert "QZX" not in str(failed.value)
    assert anywhere.sent == []
    with CompletionClient(url, api_key=key, allow_plain_http=True):
        assert "Authorization" in anywhere.sent[0].headers
    with CompletionClient(address):  # without a key anything goes
        assert "Authorization" not in anywhere.sent[1].headers
    for safe in ("http://localhost:8000", "http://127.8.9.10", "http://[::1]:8000", "https://a.example"):
        with CompletionClient(safe, api_key="QZX"):
            assert anywhere.sent[-1].headers["Authorization"] == "Bearer QZX"


@pytest.mark.parametrize("location", ["https://elsewhere.example/v1/models", "http://a.example/v1/models", "/v2"])
def test_no_redirect_is_followed(anywhere: Answering, location: str) -> None:
    anywhere.status, anywhere.headers, anywhere.text = 307, {"Location": location}, ""
    with pytest.raises(ServerError, match="status 307.*points to another address"):
        CompletionClient("https://a.example", api_key="QZX", patience_seconds=0)
    assert [request.url.host for request in anywhere.sent] == ["a.example"]


@pytest.mark.parametrize("address", ["http://localhost:8000", "http://127.0.0.1:8000", "http://[::1]:8000"])
def test_what_is_for_this_machine_goes_through_no_proxy(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://proxy.example:3128")
    for url, is_direct in ((address, True), ("https://a.example", False)):
        with CompletionClient(url, "tiny", api_key="QZX") as client:
            transport = client._http._transport_for_url(httpx2.URL(client.url))
            assert (transport is client._http._transport) == is_direct


@pytest.mark.parametrize(
    "address",
    [
        "http://me:QZX/QZX@127.0.0.1:1", "http://me:QZX#QZX@127.0.0.1:1", "http://me:QZX?QZX@127.0.0.1:1",
        "http://127.0.0.1:1/v1?api_key=QZX", "http://127.0.0.1:1/v1#QZX", "me:QZX@127.0.0.1:1", "ftp://me:QZX@127.0.0.1",
        "http:me:QZX@127.0.0.1", "http://QZX/x@127.0.0.1:1/v1", "http://me:my QZX@127.0.0.1:x", "host:80?key=QZX",
        "host:80#QZX", "host?key=QZX&next=http://other",
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_taken_is_refused_without_its_secrets(anywhere: Answering, address: str) -> None:
    with pytest.raises(ServerError, match="is no address") as failed:
        CompletionClient(address, patience_seconds=0)
    shown = "".join(traceback.format_exception(failed.value))
    assert "QZX" not in shown.replace(repr(address), "")  # the line of this test
    assert anywhere.sent == []


@pytest.mark.parametrize(
    ("address", "key", "said"),
    [
        ("http://me:my QZX@a.example/v1/", None, r"would go to http://a\.example/v1 over plain"),
        ("https://me:QZX@a.example", "QZX", "both a key and a password"),
    ],
)
def test_a_refusal_shows_no_password(anywhere: Answering, address: str, key: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as failed:
        CompletionClient(address, "tiny", api_key=key)
    assert "QZX" not in str(failed.value)
    assert anywhere.sent == []


QUOTED = st.text(st.characters(codec="utf-8", exclude_characters="/?#\\[]", exclude_categories=["C", "Z"]), min_size=1)


@given(user=QUOTED.filter(lambda text: ":" not in text), password=QUOTED)
@settings(max_examples=40)
def test_user_and_password_are_sent_and_said_to_nobody_else(user: str, password: str) -> None:
    """Whatever their characters; quoted or not, as far as an address can hold them."""
    answering, real = Answering(text="no QZX" + password), httpx2.Client
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.httpx2, "Client", lambda **kwargs: real(**{**kwargs, "transport": answering}))
        address = f"http://{quote(user, safe='')}QZX:QZX{quote(password, safe='')}@127.0.0.1:1/v1"
        with pytest.raises(ServerError) as failed:
            CompletionClient(address, patience_seconds=0)
    said = base64.b64decode(answering.sent[0].headers["Authorization"].removeprefix("Basic "))
    assert said.decode() == f"{user}QZX:QZX{password}"
    assert "QZX" + password not in str(failed.value)
    assert "127.0.0.1:1" in str(failed.value)


def test_nothing_that_is_logged_says_who_asks(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    port = engine.address.rpartition(":")[2]
    with caplog.at_level(logging.DEBUG):
        with CompletionClient(f"http://me%40home:QZX%40p@127.0.0.1:{port}", patience_seconds=0) as client:
            client.complete([1, 2], max_new_tokens=2, num_logprobs=KEPT)
            assert "QZX" not in f"{client!r} {client.url} {vars(client)}"
        with CompletionClient(engine.address, api_key="QZX-key", patience_seconds=0) as client:
            assert "QZX" not in f"{client!r} {client.url} {vars(client)}"
        engine.instead = b"Incorrect key provided: QZX-key"
        with (
            CompletionClient(engine.address, api_key="QZX-key", patience_seconds=0) as client,
            pytest.raises(ServerError, match=r"Incorrect key provided: \*\*\*") as failed,
        ):
            client.complete([1], max_new_tokens=1, num_logprobs=KEPT)
    assert "HTTP Request: POST http://127.0.0.1" in caplog.text  # by the library
    assert "QZX" not in caplog.text
    assert "QZX" not in str(failed.value)
    assert engine.keys[0] == "Basic " + base64.b64encode(b"me@home:QZX@p").decode()


def test_a_reason_to_leave_out_shows_no_key() -> None:
    report = CollectionReport()
    report.skip("http://me:QZX@host/v1?key=QZX answered Bearer QZX0123456789")
    assert "QZX" not in str(report)
