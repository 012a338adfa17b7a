"""The recipe that checks an engine: the right draft is healthy, and every other one is found."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_counters import CountingEngine, counting_engine
from saved_pair import save_pair
from transformers import AutoModelForCausalLM, AutoTokenizer

from osd_hf import CorrectionStore
from osd_hf.decoding.record import record_traces
from osd_hf.prompts import encode_turn

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
doctor: Any = importlib.import_module("doctor")
K, REQUESTS, NEW_TOKENS = 3, 16, 12
NOISES = {"v000001": 0.05, "v000002": 0.03, "v000003": 0.015}
Run = Callable[..., tuple[int, dict[str, Any], str]]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, three versions of a draft, and prompts."""
    folder = save_pair(tmp_path_factory.mktemp("doctor"))
    target = load(folder / "target")
    for number, (name, noise) in enumerate(NOISES.items(), 1):
        draft = copy.deepcopy(target)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter += noise * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        draft.save_pretrained(folder / "versions" / name)
        (folder / "versions" / name / "version.json").write_text(json.dumps({"version": number}))
    (folder / "versions" / "latest").symlink_to("v000003")
    lines = [json.dumps({"text": f"what is {i}?"}) for i in range(2 * REQUESTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def drafts(saved: Path) -> dict[str, Any]:
    return {name: load(saved / "versions" / name) for name in NOISES}


@pytest.fixture(scope="module")
def serving(saved: Path) -> Iterator[CountingEngine]:
    with counting_engine(load(saved / "target"), k=K) as engine:
        yield engine


@pytest.fixture
def engine(serving: CountingEngine, drafts: dict[str, Any]) -> CountingEngine:
    serving.set(drafts["v000003"])
    return serving


@pytest.fixture
def run(saved: Path, engine: CountingEngine, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the recipe; returns the exit code, findings by what they are about, and the printed text."""

    def run(*more: str, draft: str = "versions/latest") -> tuple[int, dict[str, Any], str]:
        prompts = [] if "--store" in more else ["--prompts", str(saved / "prompts.jsonl"), "--column", "text"]
        arguments = [
            "doctor", "--url", engine.address, "--target", str(saved / "target"), "--draft", str(saved / draft),
            "--num-requests", str(REQUESTS), "--concurrency", "2", "--max-new-tokens",
            str(NEW_TOKENS), "--json", str(tmp_path / "report.json"), *prompts, *more,
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", arguments)
        code = doctor.main()
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["verdict"] == ("healthy", "ill", "unknown")[code]
        found = {finding["about"]: finding for finding in report["findings"] if finding["state"] != "note"}
        return code, found, capsys.readouterr().out

    return run


def test_the_right_draft_is_healthy(run: Run, engine: CountingEngine) -> None:
    code, found, said = run()
    assert code == 0
    figures = found["draft"]["figures"]
    assert figures["rounds"] == figures["rounds_counted"] == engine.counts["drafts_total"] > 40
    assert figures["equal_windows"] == figures["windows"] == REQUESTS // 2
    assert abs(figures["alpha_counted"] - figures["alpha_draft"]) < 0.02
    assert "v000003 has" in said


def test_a_wrong_draft_is_named_and_none_is_noticed(run: Run, engine: CountingEngine, drafts: dict[str, Any]) -> None:
    engine.set(drafts["v000001"])
    code, found, said = run()
    assert code == 1
    assert "stale weights; v000001 fits" in said
    assert found["draft"]["figures"]["best_version"] == "v000001"
    engine.set(None)
    assert run()[0] == 1
    engine.set(drafts["v000003"])
    engine.is_idle = True
    code, found, _ = run()
    assert code == 1
    assert "drafted nothing for" in found["draft"]["text"]


# --- the target -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_changed", [False, True])
def test_answers_are_compared_with_those_of_the_store(
    run: Run, saved: Path, drafts: dict[str, Any], tmp_path: Path, is_changed: bool
) -> None:
    target = drafts["v000002"] if is_changed else load(saved / "target")
    tokenizer = AutoTokenizer.from_pretrained(saved / "target")
    prompts = [encode_turn(tokenizer, f"what is {i}?") for i in range(REQUESTS)]
    with CorrectionStore(tmp_path / "store") as store:
        for trace in record_traces(target, prompts, max_new_tokens=8, num_logprobs=8):
            store.append(trace)
    code, found, _ = run("--store", str(tmp_path / "store"))
    assert code == is_changed
    assert found["target"]["state"] == ("ill" if is_changed else "healthy")
    assert found["draft"]["state"] == "healthy"  # whose rounds follow from the answers of now
    assert found["target"]["figures"]["differing"] == 0 or is_changed
