"""Collecting from an engine and from its log: what was answered is kept, once, whatever goes wrong meanwhile."""

from __future__ import annotations

import base64
import contextlib
import errno
import gc
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import numpy as np
import pytest
from fake_engine import FakeEngine, completion, fake_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_pair import save_pair
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import LONG

from osd_hf import CorrectionStore, Trace
from osd_hf.cli import learn as learn_command
from osd_hf.cli.main import main
from osd_hf.decoding.record import record_traces
from osd_hf.engines import completions as module
from osd_hf.engines.collect import CollectionReport, LogReader, collect, collect_log
from osd_hf.engines.completions import CompletionClient, ResponseReader
from osd_hf.errors import ConfigError, ServerError, StoreError
from osd_hf.prompts import Prompt, encode_turn
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
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))


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


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_after(calls: int, real: Callable[..., Any]) -> Callable[..., Any]:
    left = [calls]

    def fail(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        return real(*args, **kwargs) if left[0] >= 0 else full()

    return fail


def unfinished(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.name.endswith(".tmp")]


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


@pytest.mark.parametrize("place", ["write_whole", "replace", "fsync"])
def test_a_full_disk_leaves_what_was_written(
    place: str, client: CompletionClient, prompts: Any, recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    store = CorrectionStore(path, flush_every=2)
    home: Any = shards if place == "write_whole" else os
    calls = 5 if place == "fsync" else 2  # the writer's folder, and two for each shard: itself, and the folder again
    with monkeypatch.context() as patch:
        patch.setattr(home, place, full_after(calls, getattr(home, place)))
        with pytest.raises(StoreError, match="No space left"):
            collected(client, prompts, store)
        assert unfinished(path) == []
        assert_recorded(CorrectionStore(path), recorded, 4)
        with pytest.raises(StoreError, match="No space left"):
            store.close()
    store.close()  # what was answered is not lost where there is room again
    assert_recorded(CorrectionStore(path), recorded, len(CorrectionStore(path)))
    assert len(CorrectionStore(path)) > 4


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
        ({"OPENAI_API_KEY": "theirs", "OPENAI_BASE_URL": "https://api.example/v1"}, [], None),
        ({"OPENAI_API_KEY": "theirs", "OPENAI_BASE_URL": "{url}"}, [], "theirs"),
        ({"OPENAI_API_KEY": "theirs", "OPENAI_BASE_URL": "{url}/v1/"}, [], "theirs"),
        ({"OPENAI_API_KEY": "theirs"}, ["--api-key-env", "OPENAI_API_KEY"], "theirs"),
        ({"OPENAI_API_KEY": "theirs", "OSD_HF_API_KEY": "ours"}, [], "ours"),
        ({"OPENAI_API_KEY": "theirs", "OSD_HF_API_KEY": "ours"}, ["--api-key", "mine"], "mine"),
        ({"OSD_HF_API_KEY": "ours"}, ["--api-key-file", "{file}"], "of-a-file"),
        ({}, [], None),
    ],
)  # fmt: skip
def test_the_key_of_the_environment_goes_where_it_belongs_or_is_asked_for(
    run: Any, engine: FakeEngine, rows: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str],
    flags: list[str], sent: str | None, tmp_path: Path, capsys: Any,
) -> None:  # fmt: skip
    (tmp_path / "key").write_text("of-a-file\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(url=engine.address))
    flags = [flag.format(file=tmp_path / "key") for flag in flags]
    asked = ["--url", engine.address, "--prompts", rows, "--column", "question", "--num-requests", 1]
    assert run(*asked, *flags) == 0
    assert set(engine.keys) == {None if sent is None else f"Bearer {sent}"}
    assert len(engine.asked) == 1
    is_told = "OPENAI_API_KEY is not sent to 127.0.0.1" in capsys.readouterr().err
    assert is_told == (sent is None and "OPENAI_API_KEY" in environment)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key-file", "nowhere"], "The key cannot be read from nowhere: No such file"),
        (["--api-key-file", "empty"], "empty holds no key"),
        (["--api-key-env", "NOT_THERE"], "--api-key-env names NOT_THERE, which is not set"),
    ],
)
def test_a_key_that_is_not_there_is_asked_for_before_anything_is_sent(
    run: Any, engine: FakeEngine, rows: Path, flags: list[str], message: str, capsys: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n")
    try:
        code = run("--url", engine.address, "--prompts", rows, "--column", "question", *flags)
    except SystemExit as stopped:  # of argparse
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert engine.keys == []


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
        ([], "--collect-only would change nothing without --url or --log"),
        (["--url", "http://x", "--log", "x"], "exclude each other"),
        (["--log", "x", "--prompts", "y"], "--prompts would change nothing without --url"),
        (["--url", "http://x", "--follow"], "--follow would change nothing without --log"),
        (["--log", "nowhere.jsonl"], "The log nowhere.jsonl cannot be read: No such file"),
        (["--url", "http://x", "--concurrency", "0"], "--concurrency must be at least 1, got 0"),
        (["--url", "http://x", "--temperature", "-1"], "--temperature must be at least 0"),
        (["--url", "http://x", "--top-p", "0.9"], "--top-p would change nothing without --temperature"),
        (["--log", "x", "--json", "missing/report.json"], "The report cannot be written"),
        (["--log", "{log}", "--domain", "a", "--domain", "b"], "--domain"),
    ],
)  # fmt: skip
def test_bad_flags_are_refused(
    run: Any, flags: list[str], message: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").write_text("")
    assert run(*[flag.format(log=tmp_path / "log") for flag in flags]) == 2
    assert message in capsys.readouterr().err


# --- a log that grows -----------------------------------------------------------------------------------------------


OPENED: list[LogReader] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """What a test has opened is closed behind it."""
    yield
    while OPENED:
        OPENED.pop().close()


def opened(log: Path, place: Path | None = None) -> LogReader:
    """A new reader, when the one before it has ended."""
    while OPENED:
        OPENED.pop().close()
    OPENED.append(LogReader(log, place))
    return OPENED[-1]


def read(log: LogReader) -> list[str]:
    return [line.decode() for line in log.lines()]


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.touch()
    return path


def test_another_file_of_that_name_is_read_from_its_start(log: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    append(log, "one\ntwo\n")
    reader = opened(log, place)
    read(reader)
    reader.commit()
    log.rename(tmp_path / "old")
    log.write_text("another\nand longer than the first one\n")
    assert read(opened(log, place)) == ["another", "and longer than the first one"]
    log.write_text("one\n")  # of the same head, but shorter than what was read
    assert read(opened(log, place)) == ["one"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks")
def test_two_readers_do_not_share_a_place(log: Path, tmp_path: Path) -> None:
    first = opened(log, tmp_path / "place")
    with pytest.raises(ConfigError, match="Another collector reads"):
        LogReader(log, tmp_path / "place")
    LogReader(log).close()
    first.close()
    opened(log, tmp_path / "place")


@given(st.data())
@settings(max_examples=80)
def test_each_line_comes_once_however_a_log_is_written(data: st.DataObject) -> None:
    lines = data.draw(st.lists(st.text("ab{}", max_size=6), max_size=12))
    rest, written = "".join(f"{line}\n" for line in lines), ""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        log, place = Path(folder) / "log", Path(folder) / "place"
        log.touch()
        reader, rotated = opened(log, place), 0
        was_rotated = False  # since it was read last: what lies there is known to a reader only while it runs
        while rest:
            what = data.draw(st.sampled_from(["append", "append", "poll", "again", "rotate"]))
            if what == "append":
                size = data.draw(st.integers(1, len(rest)))
                append(log, rest[:size])
                written, rest = written + rest[:size], rest[size:]
            elif what == "rotate" and not was_rotated and written.endswith("\n"):
                rotated, was_rotated = rotated + 1, True
                log.rename(Path(folder) / f"log.{rotated}")
                log.touch()
            elif what == "poll" or (what == "again" and was_rotated):
                found += read(reader) + read(reader)  # a new file is begun at the second look
                was_rotated = False
                assert found == written.split("\n")[:-1]
            elif what == "again":
                if data.draw(st.booleans()):
                    found += read(reader)
                reader.commit()
                reader.close()
                reader = opened(log, place)
        found += read(reader) + read(reader)
        reader.close()
        OPENED.clear()
    assert found == lines


# --- what a log holds -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(target: Any, prompts: Any) -> list[str]:
    """A line per prompt, in three forms."""
    found = []
    for number, (_, ids) in enumerate(prompts):
        asked = {
            "prompt": ids, "max_tokens": LENGTH, "temperature": 0, "logprobs": KEPT, "return_token_ids": True,
        }  # fmt: skip
        response = completion(target, asked)
        forms: list[Any] = [
            response, {"request": asked, "response": response},
            {"custom_id": "1", "response": {"status_code": 200, "body": response}, "error": None},
        ]  # fmt: skip
        found.append(json.dumps(forms[number % 3]) + "\n")
    return found


def test_a_log_is_what_a_recording_keeps(lines: Sequence[str], log: Path, recorded: Any) -> None:
    store, reader, seen = CorrectionStore(), opened(log), []
    append(log, "".join(lines[:4]))
    report = collect_log(reader, READER, store, domain="logged", on_request=seen.append)
    append(log, "".join(lines[4:]))
    assert collect_log(reader, READER, store, domain="logged", report=report, on_request=seen.append) is report
    assert_recorded(store, recorded)
    assert (report.requests, report.tokens) == (9, sum(map(len, store)))
    assert len(seen) == 9
    assert not report.skipped
    assert {trace.domain for trace in store} == {"logged"}


def test_lines_of_no_use_are_counted_by_reason(lines: Sequence[str], log: Path, recorded: Any) -> None:
    torn = [lines[0][:40] + "\n", lines[0][100:], "\x00\x00\n", '{"choices": [{"logprobs": {"content": [5]}}]}\n']
    others = ["5\n", "[]\n", "null\n"]
    append(log, "".join([*torn, "\n", lines[0], *others, "  \n", '{"a": 1}\n', lines[1].replace("token_id:", "")]))
    store = CorrectionStore()
    report = collect_log(opened(log), READER, store)
    assert_recorded(store, recorded, 1)
    assert report.skipped == {
        "a line is cut off, or no JSON": 3,
        "it is a piece of a stream, or was cut off; log complete responses": 1,
        "a line is no JSON object": 3,
        "there is no response with `choices`": 1,
        "the log-probs name tokens by their text; ask with `return_tokens_as_token_ids=true`": 1,
    }


def test_a_line_at_which_it_was_interrupted_is_read_again(
    lines: Sequence[str], log: Path, recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, "".join(lines))
    store, calls, real = CorrectionStore(), [0], ResponseReader.traces

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(ResponseReader, "traces", interrupt)
    with pytest.raises(KeyboardInterrupt):
        collect_log(opened(log, tmp_path / "place"), READER, store)
    assert len(store) == 3
    collect_log(opened(log, tmp_path / "place"), READER, store)
    assert_recorded(store, recorded)


# --- the command, from a log ----------------------------------------------------------------------------------------


def test_the_command_keeps_each_line_once(
    run: Any, lines: Sequence[str], log: Path, recorded: Any, tmp_path: Path, capsys: Any
) -> None:
    append(log, "".join(lines[:5]) + lines[5][:20])
    assert run("--log", log, "--domain", "logged") == 0
    assert_recorded(CorrectionStore(tmp_path / "store"), recorded, 5)
    assert "the last line is incomplete" in capsys.readouterr().err
    assert run("--log", log) == 0
    assert "0 requests with 0 tokens" in capsys.readouterr().out
    append(log, lines[5][20:] + "".join(lines[6:]))
    assert run("--log", log) == 0
    store = CorrectionStore(tmp_path / "store")
    assert_recorded(store, recorded)
    assert [trace.domain for trace in store].count("logged") == 5
    assert run("--log", log, store=tmp_path / "another") == 0  # which has read nothing yet
    assert_recorded(CorrectionStore(tmp_path / "another"), recorded)


def test_a_log_of_nothing_but_useless_lines_fails(run: Any, lines: Sequence[str], log: Path, capsys: Any) -> None:
    append(log, "torn\n[]\ntorn\n")
    assert run("--log", log) == 1
    said = capsys.readouterr().out
    assert "left out 2: a line is cut off" in said
    assert "left out 1: a line is no JSON object" in said
    append(log, lines[0] + "torn\n")
    assert run("--log", log) == 0


def test_a_log_is_followed_until_told_to_stop(
    run: Any, lines: Sequence[str], log: Path, recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming, waited = list(lines), []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            if not coming:
                return True
            if len(coming) == 5:
                log.rename(log.with_suffix(".old"))
            append(log, coming.pop(0))
            return False

    monkeypatch.setattr(learn_command, "stop_on_signal", lambda: contextlib.nullcontext(Stop()))
    assert run("--log", log, "--follow", "--poll-seconds", 0.25) == 0
    assert waited == [0.25] * 10
    assert_recorded(CorrectionStore(tmp_path / "store"), recorded)


def test_lines_that_a_full_disk_did_not_take_are_read_again(
    run: Any, lines: Sequence[str], log: Path, recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, "".join(lines))
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_whole", full_after(3, shards.write_whole))  # the marker is one
        assert run("--log", log, "--flush-every", 2) == 1
        gc.collect()  # the store tries once more to write its tail
        assert_recorded(CorrectionStore(tmp_path / "store"), recorded, 4)
    assert unfinished(tmp_path / "store") == []
    assert run("--log", log, "--flush-every", 2) == 0
    assert_recorded(CorrectionStore(tmp_path / "store"), recorded)


def test_answers_are_collected_and_then_learned_by_one_command(
    pair: Path, lines: Sequence[str], log: Path, tmp_path: Path
) -> None:
    append(log, "".join(lines))
    store, report = tmp_path / "store", tmp_path / "report.json"
    flags = ["--store", store, "--log", log, "--target", pair / "target", "--draft", pair / "draft", "--json", report]
    more = ["--num-logprobs", KEPT, "--output-dir", tmp_path / "versions", "--once", "--steps-per-update", 1]
    assert main(["learn", *map(str, [*flags, *more])]) == 0
    assert json.loads(report.read_text())["requests"] == len(CorrectionStore(store)) == len(lines)


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
        ("http://me:my QZX@a.example/v1/", None, r"//\*\*\*@a\.example/v1"),
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
