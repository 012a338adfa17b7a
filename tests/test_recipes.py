"""Recipes run their smallest form on a tiny pair."""

import importlib
import json
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import completion
from processes import ModuleProcess, run_python
from saved_pair import save_pair
from table_engine import FakeVLLM, served
from test_experiments import ROWS
from transformers import AutoModelForCausalLM

from osd_hf import CorrectionStore

RECIPES = Path(__file__).parent.parent / "recipes"
ON_LAB = ["--requests", "10", "--seeds", "0", "--datasets", "gsm8k", "--rates", "1e-3", "--epochs", "1", "--live", "2"]
SMOKES = {
    "chats": [
        *("--target", "{data}/lab/target", "--draft", "{data}/lab/draft", "--requests", "2", "--held-out", "2"),
        *("--timed", "1", "--kinds", "mixed", "--max-new-tokens", "3"),
    ],
    "break_even": ["--requests", "9", "--datasets", "spider", "--no-compile"],
    "batches": [*("--requests", "2", "--sizes", "2", "--learn", "0", "--datasets", "gsm8k", "--max-new-tokens", "4")],
    "rollouts": [
        *("--pair", "lab", "--steps", "2", "--prompts", "2", "--generations", "2", "--dataset", "4", "--asked", "2"),
        *("--max-new-tokens", "4", "--ways", "all", "--threads", "1"),
    ],
    "proxy_cost": ["--url", "{engine}", "--smoke"],
    "exactness_survey": [*("--only", "Qwen2ForCausalLM default", "LoRA, mixed", "(mamba)", "--ways", "k = 3")],
    "random_settings": ["--examples", "2"],
    "lab_draft": [*("--tokens", "300", "--seconds", "0.1", "--held-out", "2", "--traces", "{traces}")],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny pair and questions in place of the lab pair and its data sets."""
    folder = tmp_path_factory.mktemp("folder")
    save_pair(folder / "lab", vocab_size=4096, layers=8)
    (folder / "data").mkdir()
    for name in ("gsm8k", "spider", "finance_alpaca", "code_search_net_python"):
        row = ROWS[name]
        rows = [json.dumps(row(f"what is {i} and {i + 1}?")) for i in range(640 if name == "finance_alpaca" else 40)]
        (folder / f"data/{name}.jsonl").write_text("\n".join(rows))
    chats = [{"instruction": f"what is {i}?", "input": "" if i % 2 else f"{i}", "turns": [f"{i}?"]} for i in range(9)]
    for name in ("alpaca", "mt_bench"):
        (folder / f"data/{name}.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """Yield the address of an engine that behaves like vLLM."""
    with served(FakeVLLM()) as address:
        yield address


def run(name: str, flags: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a recipe; return its report."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setattr(sys, "argv", [str(RECIPES / f"{name}.py"), *flags])
    common = importlib.import_module("common")
    monkeypatch.setattr(common, "RESULTS", folder / "results")
    monkeypatch.setattr(common, "MAX_NEW_TOKENS", 16)
    logger = logging.getLogger("osd_hf")
    level = logger.level
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit:
        pass
    finally:
        logger.setLevel(level)
    report = json.loads((folder / f"results/{name}.json").read_text())
    assert report["provenance"]["command"].startswith(f"{name}.py")
    assert report.keys() >= {"defaults"}
    return report


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # trl reads it
@pytest.mark.parametrize("name", SMOKES)
def test_a_recipe_runs_its_smallest_form(
    name: str, folder: Path, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSD_HF_DATA", str(folder))
    flags = [flag.format(data=folder, traces=folder / "traces", engine=engine) for flag in SMOKES[name]]
    report = run(name, flags, tmp_path, monkeypatch)
    if name == "rollouts":
        [row] = report["live"]["compared"]
        assert [way["greedy_identical"] for way in row["ways"].values()] == [True, True]
    if name == "exactness_survey":
        counts = report["summary"]
        assert counts == {"ropes": {"same": 1}, "adapters": {"refused": 1}, "models": {"refused": 1}}
    if name == "random_settings":
        assert (report["examples"], report["failures"]) == (2, [])


def test_a_recipe_serves_the_lab_pair_exactly(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run("lab_online", ON_LAB, tmp_path, monkeypatch)
    live = report["rows"][0]["live"]
    assert live["token_identical"] == live["equal_counts_by_replay_of_captured"] == live["requests"] == 2


@pytest.mark.slow
def test_the_accelerator_recipe_runs_with_tiny_shapes_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = run("accelerator", ["--smoke"], tmp_path, monkeypatch)["parts"]
    names = ("exactness", "costs", "memory", "speed", "latency", "stretched", "batches")
    assert {name: part["holds"] for name, part in parts.items()} == dict.fromkeys(names, True)
    assert "all held" in capsys.readouterr().out
    assert parts["exactness"]["float32"]["identical"] == 5
    assert parts["stretched"]["models"]["equal_most_likely_tokens"] == 1
    monkeypatch.setattr("osd_hf.memory_plan.MemoryPlan.bytes", lambda *_: 1 / 0)
    parts = run("accelerator", ["--smoke", "--parts", "memory", "costs"], tmp_path, monkeypatch)["parts"]
    assert "ZeroDivisionError" in parts["memory"]["failed_with"]
    assert [part["holds"] for part in parts.values()] == [False, True]


def run_with_forks(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the smallest form of a recipe whose processes are forks; return its report."""
    monkeypatch.syspath_prepend(str(RECIPES))
    recipe = importlib.import_module(name)
    monkeypatch.setattr(importlib.import_module("common"), "RESULTS", folder)
    monkeypatch.setattr(recipe, "subprocess", SimpleNamespace(PIPE=subprocess.PIPE, Popen=ModuleProcess))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--smoke"])
    assert not recipe.main()
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.slow
def test_servers_under_load_answer_as_the_target_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_with_forks("serve_load", tmp_path, monkeypatch)
    assert (report["holds"], report["failed"]) == (True, {})
    assert report["heard"] == {"own": 34, "sampled": 4, "left": 2}


@pytest.mark.slow
def test_a_proxy_answers_through_faults(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSD_HF_DATA", str(folder))
    report = run_with_forks("proxy_chaos", tmp_path, monkeypatch)
    assert (report["exit_code"], report["kept"]) == (0, report["kept_as_said"])
    seen = {what for row in report["table"] for when in ("during", "after") for what in row[when]}
    assert not any("altered" in what or "not as direct" in what for what in seen)
    *faults, end = report["table"]
    assert all(row["after"].get("whole and its own") for row in faults) and end["during"]["whole and its own"]
    as_long_as_answers = {"slow_client", "clients_leave", "large_bodies"}
    assert as_long_as_answers <= {row["fault"] for row in faults}
    assert all(row["during"].get("whole and its own") for row in faults if row["fault"] in as_long_as_answers)


def test_the_answers_of_a_log_are_stored_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = AutoModelForCausalLM.from_pretrained(folder / "lab/target").eval()
    asked = {"max_tokens": 6, "temperature": 0, "logprobs": 8, "return_token_ids": True}
    requests = [asked | {"prompt": [3, 4, number]} for number in range(4)]
    answers = [completion(target, request) for request in requests]
    batch_line = {"custom_id": "a", "response": {"status_code": 200, "body": answers[2]}, "error": None}
    failed_line = {"custom_id": "b", "response": {"status_code": 500, "body": {"error": "x"}}}
    lines = [
        answers[0], {"request": requests[1], "response": answers[1]}, batch_line, failed_line, 5, {"a": 1},
        {"request": {"custom_id": "a", "body": requests[3]}, "response": answers[3]},
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    log, store = tmp_path / "log.jsonl", tmp_path / "store"
    flags = [log, "--target", folder / "lab/target", "--store", store, "--num-logprobs", 8, "--domain", "sums"]
    monkeypatch.setattr(sys, "argv", ["collect_log.py", *map(str, flags)])
    for length, said in ((len(text) - 99, "3 answers stored"), (len(text), "1 answers stored")):
        log.write_text(text[:length])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(RECIPES / "collect_log.py"), run_name="__main__")
        assert ended.value.code == 0
        assert said in (shown := capsys.readouterr().out)
    assert "left out 3: it is in the store already" in shown
    assert "left out 1: the server answered with status 500" in shown
    wanted = [tuple(answer["choices"][0]["token_ids"]) for answer in answers]
    stored = [tuple(trace.completion_ids.tolist()) for trace in CorrectionStore(store)]
    assert sorted(stored) == sorted(wanted)
    assert {trace.domain for trace in CorrectionStore(store)} == {"sums"}


def test_a_recipe_without_its_data_says_what_to_set() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OSD_HF_DATA"}
    done = run_python(RECIPES / "lab_online.py", environment=environment)
    assert done.returncode == 1
    assert "Set OSD_HF_DATA" in done.stderr
