"""The paper's experiments run two steps each from local files in the Hub data sets' columns; the streams and the flat
recipe run their smallest form."""

from __future__ import annotations

import importlib
import json
import random
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from saved_pair import save_pair
from transformers import AutoTokenizer, DistilBertConfig, DistilBertForSequenceClassification

from osd_hf import AcceptanceStats, Trace, capture_traces

RECIPES = Path(__file__).parent.parent / "recipes"
TURNS = [f"what is {i} and {i + 1}?" for i in range(12)]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "That is all."}]


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
    "starcode": lambda t: {
        "max_stars_repo_path": "a.rs", "max_stars_repo_name": "a/b", "max_stars_count": 3, "id": "1", "content": t,
    },
    "arena": lambda t: {
        "question_id": t, "model_a": "a", "model_b": "b", "winner": "tie", "judge": "me", "conversation_a": said(t),
        "conversation_b": said(t), "turn": 1, "anony": True, "language": "English", "tstamp": 1.0,
    },
    "cnn_dailymail": lambda t: {"article": t, "highlights": "All.", "id": "1"},
    "xsum": lambda t: {"document": t, "summary": "All.", "id": "1"},
}  # fmt: skip
CAUSAL_ONLY = ("piqa", "starcode", "arena")
MODES = ("online", "offline")
# Each experiment with each kind of pair and in each mode, and each kind in each mode: an experiment has prompts of its
# own, and all of them learn and are measured by the same code.
CASES = [(name, "causal", mode) for name in CAUSAL_ONLY for mode in MODES] + [
    (name, arch, MODES[(place + (arch == "t5")) % 2])
    for place, name in enumerate(name for name in ROWS if name not in CAUSAL_ONLY)
    for arch in ("causal", "t5")
]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where reports go; recipes can be imported."""
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module("common"), "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny pairs of both kinds in folders, with one tokenizer."""
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
    """Run a recipe two steps; its report."""
    recipe: Any = importlib.import_module(name)
    argv = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--max-steps", "2",
            "--requests", "10", "--max-new-tokens", "4", "--data", write_rows(Path("rows.jsonl"), rows),
            "--name", "smoke", *flags]  # fmt: skip
    if name == "arena":
        recipe.main(argv)
    else:
        recipe.main(recipe.EXPERIMENT, recipe.__doc__, argv)
    report: dict[str, Any] = json.loads(Path("results/smoke.json").read_text())
    return report


@pytest.mark.parametrize(("name", "arch", "mode"), CASES)
def test_an_experiment_takes_two_steps(
    name: str, arch: str, mode: str, results: Path, pairs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--labels", "English"] if name == "arena" else ["--arch", arch]
    report = run(name, pairs[arch], [ROWS[name](turn) for turn in TURNS], "--mode", mode, "--epochs", "3", *flags)
    (row,) = report["rows"]
    assert row["steps"] == 2
    assert row["requests"] == 10
    assert len(row["before"]["requests"]) == len(row["after"]["requests"]) == 2
    assert row["before"]["emitted"] == row["after"]["emitted"]
    assert row["gain"] == row["after"]["alpha"] - row["before"]["alpha"]
    assert report["settings"]["arch"] == arch
    assert (
        f"{arch}, {mode}, 10 requests, 2 steps: before alpha {row['before']['alpha']:.3f} [" in capsys.readouterr().out
    )
    assert report["settings"]["target"] == "target"  # and no folder of this machine


def test_a_learning_draft_is_measured_against_the_one_as_it_came(results: Path, pairs: dict[str, Path]) -> None:
    (row,) = run(
        "gsm8k", pairs["causal"], [ROWS["gsm8k"]("what is it?") for _ in range(40)],
        "--requests", "40", "--max-steps", "20", "--learning-rate", "0.01", "--max-new-tokens", "16",
    )["rows"]  # fmt: skip
    assert row["steps"] == 20
    assert row["after"]["alpha"] > row["before"]["alpha"]


@pytest.mark.parametrize("name", ROWS)
def test_a_prompt_is_made_of_the_columns_of_the_hub(name: str, results: Path, pairs: dict[str, Path]) -> None:
    from experiment import load_pair, prompts

    experiment = importlib.import_module(name).EXPERIMENT
    folder = pairs["causal"]
    args = Namespace(
        target=str(folder / "target"), draft=str(folder / "draft"), arch="causal", template=experiment.template,
        requests=5, max_new_tokens=6,
    )  # fmt: skip
    pair = load_pair(args)
    (ids,) = prompts(experiment, args, pair, [ROWS[name]("How many?" + "x" * (300 if name == "starcode" else 0))])
    text = pair[2].decode(ids)
    if name == "starcode":
        assert text == "How many?" + "x" * 191  # 200 tokens of one byte each, and no chat template
    else:
        assert text.startswith("<s>[user]")
        assert text.endswith("How many?[answer]")


def test_a_template_from_the_shell_may_break_lines(results: Path, pairs: dict[str, Path]) -> None:
    from experiment import Experiment, load_pair, prompts

    target, draft = (str(pairs["causal"] / name) for name in ("target", "draft"))
    args = Namespace(
        target=target, draft=draft, arch="causal", template=r"db: {db_id}\n{question}", requests=5, max_new_tokens=6
    )
    pair = load_pair(args)
    rows = [ROWS["spider"]("How many?"), ROWS["spider"]("x" * 300), ROWS["spider"]("Which?")]
    texts = [pair[2].decode(ids) for ids in prompts(Experiment("any", "any", "train", "any"), args, pair, rows)]
    # What is longer than the models' 256 positions is left out.
    assert texts == ["<s>[user]db: zoo\nHow many?[answer]", "<s>[user]db: zoo\nWhich?[answer]"]


def test_where_the_rows_are_on_the_hub(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import experiment

    asked: list[dict[str, Any]] = []

    class Rows(list[Any]):
        def shuffle(self, **kwargs: Any) -> Rows:
            return self

    monkeypatch.setattr(experiment, "load_dataset", lambda **kwargs: asked.append(kwargs) or Rows())
    for name in ROWS:
        list(experiment.read_rows(importlib.import_module(name).EXPERIMENT, Namespace(data=None, seed=0)))
    assert [(a["path"], a["name"], a["data_dir"], a["revision"]) for a in asked] == [
        ("openai/gsm8k", "main", None, None),
        ("xlangai/spider", None, None, None),
        ("gbharti/finance-alpaca", None, None, None),
        ("code-search-net/code_search_net", "python", None, None),
        ("ybisk/piqa", None, None, "refs/convert/parquet"),
        ("bigcode/starcoderdata", None, "rust", None),
        ("lmsys/chatbot_arena_conversations", None, None, None),
        ("abisee/cnn_dailymail", "3.0.0", None, None),
        ("EdinburghNLP/xsum", None, None, None),
    ]
    assert all(a["split"] == "train" and a["streaming"] for a in asked)


def test_the_arena_takes_the_topics_of_english_turns(results: Path, pairs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "classifier"
    shape = {"dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 1}
    classifier = DistilBertConfig(vocab_size=300, num_labels=1, pad_token_id=0, id2label={0: "Food"}, **shape)
    DistilBertForSequenceClassification(classifier).save_pretrained(folder)
    AutoTokenizer.from_pretrained(pairs["causal"] / "target", model_max_length=64).save_pretrained(folder)
    rows = [ROWS["arena"](turn) for turn in TURNS]
    rows += [{**row, "language": "German"} for row in rows]
    report = run("arena", pairs["causal"], rows, "--by", "topic", "--labels", "Food", "Travel",
                 "--classifier", str(folder), "--requests", "20")  # fmt: skip
    assert [(row["label"], row["requests"]) for row in report["rows"]] == [("Food", len(TURNS))]


def test_the_arena_begins_anew_with_each_language(results: Path, pairs: dict[str, Path]) -> None:
    rows = [{**ROWS["arena"](turn), "language": name} for turn in TURNS for name in ("English", "German", "Russian")]
    flags = ["--labels", "German", "Russian", "--learning-rate", "0.01"]
    first, second = run("arena", pairs["causal"], rows, *flags)["rows"]
    assert (first["label"], second["label"]) == ("German", "Russian")
    alone = run("arena", pairs["causal"], rows, "--labels", "Russian", "--learning-rate", "0.01")["rows"][0]
    assert alone["after"] == second["after"]


def test_a_template_that_does_not_fit_says_which_columns_there_are(results: Path, pairs: dict[str, Path]) -> None:
    with pytest.raises(SystemExit, match="does not fit a row .*with the columns question, answer"):
        run("gsm8k", pairs["causal"], [ROWS["gsm8k"]("1?")], "--template", "{goal}")


@pytest.mark.parametrize("name", CAUSAL_ONLY)
def test_what_the_paper_has_for_decoder_only_pairs_refuses_the_other_kind(
    name: str, results: Path, pairs: dict[str, Path]
) -> None:
    with pytest.raises(SystemExit):
        run(name, pairs["t5"], [], "--arch", "t5")


def test_a_pair_of_the_other_kind_is_refused(results: Path, pairs: dict[str, Path]) -> None:
    with pytest.raises(SystemExit, match="--arch causal does not fit"):
        run("gsm8k", pairs["t5"], [])


# --- streams --------------------------------------------------------------------------------------------------------


def trace(domain: str, number: int = 0) -> Trace:
    return Trace(
        prompt_ids=np.array([number], np.int32), completion_ids=np.zeros(2, np.int32), rounds=(),
        top_logits=np.zeros((2, 1), np.float16), top_ids=np.zeros((2, 1), np.uint16),
        tail_logprob=np.zeros(2, np.float32), vocab_size=8, domain=domain,
    )  # fmt: skip


def stats(alpha: float) -> AcceptanceStats:
    return AcceptanceStats.from_counts(
        drafted=100, examined=100, accepted=round(100 * alpha), emitted=100, target_forwards=20
    )


def test_the_streams_run_their_smallest_form(
    results: Path, pairs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import common
    import streams

    folder = tmp_path / "lab_folder"
    (folder / "data").mkdir(parents=True)
    (folder / "lab").symlink_to(pairs["causal"])
    for name in common.TEMPLATES:
        write_rows(folder / f"data/{name}.jsonl", [ROWS[name](turn) for turn in TURNS])
    monkeypatch.setenv("OSD_HF_DATA", str(folder))
    monkeypatch.setattr(common, "MAX_NEW_TOKENS", 8)
    monkeypatch.setattr(sys, "argv", ["streams.py", "--requests", "10", "--window", "8", "--seeds", "0", "1"])
    streams.main()
    report = json.loads((results / "streams.json").read_text())["streams"]
    by_turns = dict.fromkeys(("every_10", "every_50", "every_200"), 10)
    requests = {kind: found["requests"] for kind, found in report.items()}
    assert requests == {"sharp": 40, "smooth": 15, "two_mix": 20, **by_turns}
    assert [[s["request"] for s in seed] for seed in report["sharp"]["switches"]] == [[10, 20, 30]] * 2
    assert all(len(found["worst_window"]["by_seed"]) == 2 for found in report.values())
    assert all((results / f"streams_{kind}.png").stat().st_size > 10_000 for kind in report)


def test_a_smooth_stream_shifts_from_one_data_set_to_another(results: Path) -> None:
    import streams

    names = streams.DATASETS["smooth"]
    stream = streams.smooth({n: [trace(n, i) for i in range(200)] for n in names}, random.Random(0))
    shares = [[sum(t.domain == n for t in part) / 60 for n in names] for part in (stream[:60], stream[-60:])]
    assert len(stream) == 300
    assert shares[0][0] < 0.3 < 0.5 < shares[0][1]
    assert shares[1][1] < 0.3 < 0.5 < shares[1][0]
    assert len({(t.domain, int(t.prompt_ids[0])) for t in stream}) == 300  # no request comes twice


def test_of_two_mixed_data_sets_one_is_learned_from_at_a_time(results: Path) -> None:
    import streams

    names = streams.DATASETS["two_mix"]
    stream = streams.two_mix({n: [trace(n, i) for i in range(50)] for n in names}, random.Random(0))
    learned = [[t.domain for t in half if t.num_kept] for half in (stream[:50], stream[50:])]
    assert {*learned[0]} == {names[0]}
    assert {*learned[1]} == {names[1]}
    assert all(len({t.domain for t in half}) == 2 for half in (stream[:50], stream[50:]))


def test_requests_until_ninety_percent_of_a_loss_is_won_back(results: Path) -> None:
    import streams

    stream = [trace("a")] * 40 + [trace("b")] * 60
    static = [stats(0.4)] * 40 + [stats(0.5)] * 60
    # At the switch from 0.4 above the static draft to 0.0; from the 21st request on it is 0.3 above.
    learned = [stats(0.8)] * 40 + [stats(0.5)] * 20 + [stats(0.8)] * 40
    (switch,) = streams.recoveries(stream, learned, static, window=10, interval=8)
    assert (switch["alpha_before"], switch["alpha_after"], switch["alpha_level"]) == (0.8, 0.5, 0.8)
    assert switch["loss"] == pytest.approx(0.3)
    # Of a window of 10 requests 9 must be good again.
    assert switch["requests_to_recover"] == 29
    assert streams.recoveries(stream, static, static, window=10, interval=8)[0]["requests_to_recover"] is None


# --- the flat recipe ------------------------------------------------------------------------------------------------


def test_the_flat_recipe_is_lossless_and_counts_as_transformers_does(results: Path) -> None:
    import flat

    target, draft = models.pair(noise=0.3)
    for prompt in models.prompts(6):
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


def test_the_flat_recipe_stops_where_the_target_does(results: Path) -> None:
    import flat

    target, draft = models.pair()
    prompt = models.prompt()
    free = target.generate(prompt, max_new_tokens=20, do_sample=False)
    eos = int(free[0, prompt.shape[1] + 7])
    alone = target.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=eos)
    assert torch.equal(flat.answer(target, draft, prompt, 5, 20, {eos})[0], alone)


def test_the_flat_recipe_learns_what_it_was_corrected_in(results: Path) -> None:
    import flat

    target, draft = models.pair(noise=0.5)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    answered = [flat.answer(target, draft, prompt, 5, 12, set())[:2] for prompt in models.prompts(4)]

    def right() -> float:
        """Share of the corrected positions at which the draft would now say what the target said."""
        said = [int(draft(ids).logits[0, at - 1].argmax()) == int(ids[0, at]) for ids, cs in answered for at, _ in cs]
        return sum(said) / len(said)

    assert right() == 0
    for _ in range(40):
        flat.learn(draft, optimizer, answered)
    assert right() > 0.9


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
