"""The experiments of the paper run two steps each on local files; the flat recipe is lossless and learns."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from saved_pair import save_pair
from transformers import AutoTokenizer

from osd_hf import AcceptanceStats, Trace, capture_traces

RECIPES = Path(__file__).parent.parent / "recipes"
TURNS = [f"what is {i} and {i + 1}?" for i in range(12)]


# Rows in the columns of the Hub, and what of a row the prompt holds.
ROWS: dict[str, Any] = {
    "gsm8k": lambda t: {"question": t, "answer": "#### 1"},
    "spider": lambda t: {
        "db_id": "zoo", "query": "SELECT 1", "question": t, "query_toks": ["SELECT", "1"],
        "query_toks_no_value": ["select", "value"], "question_toks": ["what"],
    },
    "finance_alpaca": lambda t: {"instruction": t, "input": "", "output": "Money.", "text": ""},
    "code_search_net_python": lambda t: {
        "repository_name": "a/b", "func_path_in_repository": "b.py", "func_name": "f",
        "whole_func_string": "def f(): 1", "language": "python", "func_code_string": "def f(): 1",
        "func_code_tokens": ["def"], "func_documentation_string": t, "func_documentation_tokens": ["what"],
        "split_name": "train", "func_code_url": "",
    },
    "piqa": lambda t: {"goal": t, "sol1": "push", "sol2": "pull", "label": 1},
    "cnn_dailymail": lambda t: {"article": t, "highlights": "All.", "id": "1"},
    "xsum": lambda t: {"document": t, "summary": "All.", "id": "1"},
}  # fmt: skip
CASES = [("piqa", "causal", "online"), ("xsum", "t5", "online"), ("spider", "t5", "offline")]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of the reports and make recipes importable."""
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module("common"), "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tiny pairs of both kinds in folders, with one tokenizer."""
    causal = save_pair(tmp_path_factory.mktemp("causal"))
    t5 = tmp_path_factory.mktemp("t5")
    target = models.build("t5", vocab_size=300)
    for name, model in (("target", target), ("draft", models.draft_of(target))):
        model.save_pretrained(t5 / name)
        AutoTokenizer.from_pretrained(causal / "target").save_pretrained(t5 / name)
    return {"causal": causal, "t5": t5}


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(name: str, folder: Path, rows: list[Any], *flags: str) -> dict[str, Any]:
    """Run the recipe two steps; return its report."""
    recipe: Any = importlib.import_module("paper")
    recipe.main([
        name, "--target", str(folder / "target"), "--draft", str(folder / "draft"), "--max-steps", "2",
        "--requests", "10", "--max-new-tokens", "4", "--data", write_rows(Path("rows.jsonl"), rows), "--name", "smoke",
        *flags,
    ])  # fmt: skip
    report: dict[str, Any] = json.loads(Path("results/smoke.json").read_text())
    return report


@pytest.mark.parametrize(("name", "arch", "mode"), CASES)
def test_an_experiment_takes_two_steps(
    name: str, arch: str, mode: str, results: Path, pairs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROWS[name](turn) for turn in TURNS]
    report = run(name, pairs[arch], rows, "--mode", mode, "--epochs", "3", "--arch", arch)
    (row,) = report["rows"]
    assert row["steps"] == 2
    assert row["requests"] == 10
    assert len(row["before"]["requests"]) == len(row["after"]["requests"]) == 2
    assert row["before"]["emitted"] == row["after"]["emitted"]
    assert row["gain"] == row["after"]["alpha"] - row["before"]["alpha"]
    assert report["settings"]["arch"] == arch
    assert (
        f"{arch}, {mode}, 10 requests, 2 steps: before {row['before']['block_efficiency']:.2f} tokens per target"
        in capsys.readouterr().out
    )
    assert report["settings"]["target"] == "target"  # and no folder of this machine


@pytest.mark.parametrize("name", ROWS)
def test_a_prompt_is_made_of_the_columns_of_the_hub(name: str, results: Path, pairs: dict[str, Path]) -> None:
    paper: Any = importlib.import_module("paper")
    folder = pairs["causal"]
    models_of = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--arch", "causal"]
    args = paper.parse_arguments([name, *models_of, "--requests", "5", "--max-new-tokens", "6"])
    pair = paper.load_pair(args)
    (ids,) = paper.prompts(args, pair, [ROWS[name]("How many?")])
    text = pair[2].decode(ids)
    assert text.startswith("<s>[user]")
    assert text.endswith("How many?[answer]")


def test_the_flat_recipe_is_lossless_and_counts_as_transformers_does(results: Path) -> None:
    import flat

    target, draft = models.pair(noise=0.3)
    for prompt in models.prompts(3):
        traces: list[Trace] = []
        with capture_traces(target, traces.append):
            assisted = target.generate(prompt, assistant_model=draft, max_new_tokens=20, do_sample=False)
        ids, corrections, examined, accepted = flat.answer(target, draft, prompt, 5, 20, set())
        counts = AcceptanceStats.from_trace(traces[0])
        assert torch.equal(ids, assisted)
        assert (examined, accepted) == (counts.examined, counts.accepted)
        at = prompt.shape[1] + np.flatnonzero(traces[0].correction_mask)
        assert [position for position, _ in corrections] == at.tolist()
        torch.testing.assert_close(
            torch.stack([row for _, row in corrections]), target(ids).logits[0, at - 1], atol=1e-4, rtol=1e-4
        )


def test_the_flat_recipe_runs_its_smallest_form(
    results: Path, pairs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import flat

    folder = pairs["causal"]
    path = write_rows(Path("rows.jsonl"), [ROWS["gsm8k"](turn) for turn in TURNS])
    flags = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--prompts", path]
    monkeypatch.setattr(
        sys, "argv", ["flat.py", *flags, "--column", "question", "--requests", "9", "--max-new-tokens", "6"]
    )
    flat.main()
    assert "request 9: alpha 0." in capsys.readouterr().out
