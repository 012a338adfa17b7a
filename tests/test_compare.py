"""Drafts for one target side by side: their figures, what is said of them, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from saved_pair import save_pair
from transformers import AutoModelForCausalLM, AutoTokenizer

from osd_hf import AcceptanceStats, compare, replay
from osd_hf.acceptance import Comparison, alpha_gain_interval
from osd_hf.cli.main import main
from osd_hf.errors import ConfigError, VocabularyMismatchError
from osd_hf.evaluation.compare import DraftComparison
from osd_hf.hub import EvaluationSet
from osd_hf.loading import load_draft
from osd_hf.prompts import Prompt, encode_turn
from osd_hf.recording import record_traces
from osd_hf.speedup import ForwardSeconds, alpha_from_block_efficiency, expected_block_efficiency

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft reads it
TEXTS = [f"question {i}" for i in range(6)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft, an adapter on the draft, and a draft whose tokenizer differs in two tokens."""
    folder = save_pair(tmp_path_factory.mktemp("pair"), vocab_size=259)  # each id is a token
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft")
    torch.manual_seed(1)
    adapted = get_peft_model(draft, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    (folder / "nested").mkdir()
    shutil.copytree(folder / "draft", folder / "nested" / "draft")
    tokenizer = json.loads((folder / "draft/tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = vocab["a"], vocab["b"]
    vocab["a"], vocab["b"] = other, one
    shutil.copytree(folder / "draft", folder / "foreign")
    (folder / "foreign" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_all_drafts_are_scored_on_one_answer_of_the_target_a_prompt(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, tokenizer = (
        AutoModelForCausalLM.from_pretrained(pair / "target"),
        AutoTokenizer.from_pretrained(pair / "target"),
    )
    drafts = {name: load_draft(str(pair / name)) for name in ("draft", "adapter", "target")}
    asked: list[int] = []
    seconds = 0.0

    def timed(model: Any, token: float, more: float) -> None:
        def take(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            nonlocal seconds
            seconds += token + (kwargs["input_ids"].shape[1] - 1) * more

        model.register_forward_pre_hook(take, with_kwargs=True)

    for name, token in (("draft", 0.25), ("adapter", 0.5), ("target", 2.0)):
        timed(drafts[name], token, 0.0)
    timed(target, 1.0, 0.0625)
    generate = target.generate
    monkeypatch.setattr(target, "generate", lambda **how: asked.append(len(how["input_ids"])) or generate(**how))
    found = compare(target, drafts, tokenizer, TEXTS, num_assistant_tokens=4, clock=lambda: seconds)
    assert asked == [6]
    traces = list(record_traces(target, [encode_turn(tokenizer, text) for text in TEXTS], max_new_tokens=128))
    for name, draft in drafts.items():
        assert found.scores.totals[name] == replay(draft, traces, 4)
    assert 0 < found.scores.totals["adapter"].alpha != found.scores.totals["draft"].alpha
    report = json.loads(json.dumps(found.to_dict()))
    costs = {name: d["c"] for name, d in report["drafts"].items()}
    assert costs == {"draft": 0.25, "adapter": 0.5, "target": 2.0}
    assert report["drafts"]["draft"]["c_with_verification"] == 0.3125
    answer = report["answer_tokens"]
    stats = found.scores.totals["draft"]
    alpha = alpha_from_block_efficiency(stats.block_efficiency, 4)
    assert expected_block_efficiency(alpha, 4) == pytest.approx(stats.block_efficiency, rel=1e-4)
    assert abs(alpha - stats.alpha) > 1e-3  # rejections come together
    k, speedup = found.costs["draft"].best_k(alpha, answer)
    assert found.worth["draft"][:2] == (k, speedup)
    low, high = found.worth["draft"].interval
    assert low < speedup < high
    # Always right, and dear: tokens of a round cost more than they save.
    assert report["drafts"]["target"]["alpha"] == 1.0
    assert (found.worth["target"].answer, next(reversed(report["drafts"]))) == ("no", "target")
    pairs = {(g["draft"], g["over"]): g for g in report["gains"]}
    assert len(pairs) == 3
    totals = found.scores.totals
    over = pairs["target", "draft"]
    assert over["gain"] == 1.0 - totals["draft"].alpha
    assert tuple(over["gain_interval"]) == pytest.approx(alpha_gain_interval([totals["draft"]], [totals["target"]]))


def stats(*accepted: int) -> list[AcceptanceStats]:
    """Of requests with ten examined tokens each, and as many emitted as follow by the cost model."""
    alpha = sum(accepted) / len(accepted) / 10
    counts = {"drafted": 10, "examined": 10, "emitted": expected_block_efficiency(alpha, 5), "target_forwards": 1}
    return [AcceptanceStats.from_counts(accepted=a, **counts) for a in accepted]


def compared(costs: dict[str, ForwardSeconds], **sides: list[AcceptanceStats]) -> DraftComparison:
    prompts = tuple(Prompt(i, f"{i}") for i in range(len(next(iter(sides.values())))))
    known = {"name": "large", "revision": None, "version": "0f"}
    models = {name: {"name": name, "revision": "c0ffee", "version": None} for name in sides}
    scores = Comparison([None] * len(prompts), sides)
    return DraftComparison(EvaluationSet("sums", prompts, 32), 5, scores, costs, 100.0, known, models, {"torch": "2"})


def test_two_lines_say_whether_the_best_draft_is_worth_it_and_why() -> None:
    cheap, dear = ForwardSeconds(1.0, 0.0, 0.125), ForwardSeconds(1.0, 0.25, 0.5)
    good, bad = stats(7, 8, 7, 8), stats(3, 3, 2, 4)
    first, second = compared({"bad": cheap, "good": cheap}, bad=bad, good=good).summary().split("\n")
    assert first.startswith("Worth it? Yes, good is: expected 2.03 [")
    assert "times as fast as large alone, drafting 4 tokens a round." in first
    assert second.startswith("Why? The target accepts 75% (") and "drafting pays from about 12% on" in second
    refused = compared({"bad": dear}, bad=bad).summary()
    assert refused.startswith("Worth it? No, bad is not: expected 0.") and "drafting 1 token a round" in refused
    unsure = compared({"bad": ForwardSeconds(1.0, 0.0, 0.3)}, bad=bad)
    low, high = unsure.worth["bad"].interval
    assert low < 1 < high
    assert unsure.summary().startswith("Worth it? Not sure of bad: ") and "more prompts would tell" in unsure.summary()
    refused_there = compared({"bad": dear}, bad=bad)
    refused_there.facts["compiles_drafts"] = True
    assert "compiled, which is the default on this device, a draft takes less time" in refused_there.summary()
    nothing = [AcceptanceStats.from_counts(drafted=0, examined=0, accepted=0, emitted=1, target_forwards=1)] * 2
    assert compared({"none": cheap}, none=nothing).worth["none"].answer == "not sure"


def test_the_command_compares_folders_and_adapters(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("osd_hf.recording.TIMED_SECONDS", 0.0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text, "kind": text[-1]}) + "\n" for text in TEXTS))
    drafts = [str(pair / name) for name in ("draft", "adapter", "nested/draft")]
    given = ["--prompts", str(prompts), "--column", "text", "--num-requests", "4", "--max-new-tokens", "6"]
    folder = tmp_path / "out"
    more = ["--domain-column", "kind", "--output-dir", str(folder)]
    assert main(["bench", "--target", str(pair / "target"), "--compare", *drafts, *given, *more]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("Worth it? ") and out[1].startswith("Why? ")
    report = json.loads((folder / "report.json").read_text())
    assert list(report["drafts"]) != drafts and set(report["drafts"]) == set(drafts)  # two of them are called draft
    assert (report["num_prompts"], report["prompts"], report["target"]["name"]) == (4, "prompts.jsonl", "target")
    first, nested = (report["drafts"][name] for name in (drafts[0], drafts[2]))
    assert first["version"] == nested["version"] != report["drafts"][drafts[1]]["version"]
    assert first["alpha"] == nested["alpha"] and set(first["by_domain"]) == set("0123")
    gain = next(g for g in report["gains"] if {g["draft"], g["over"]} == {drafts[0], drafts[2]})
    assert (gain["gain"], gain["gain_interval"]) == (0.0, [0.0, 0.0])
    assert (folder / "speedups.png").read_bytes().startswith(b"\x89PNG")
    assert all(math.isfinite(draft["expected_speedup"]) for draft in report["drafts"].values())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["{pair}/foreign"], "foreign' cannot be compared. The tokenizers of target and draft differ in 2 tokens"),
        (["{pair}/draft", "--column", "c"], "--column would change nothing without --prompts"),
        (["{pair}/nowhere"], "nowhere' cannot be loaded"),
        (["{pair}/draft", "--num-requests", "1"], "at least two prompts"),
    ],
)
def test_what_cannot_be_compared_is_said(
    pair: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--max-new-tokens", "4"] + ["--num-requests", "2"] * ("--num-requests" not in more)
    given = [part.format(pair=pair) for part in more]
    assert main(["bench", "--target", str(pair / "target"), "--compare", *given, *sizes]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_comparison_needs_drafts_with_the_tokenizer_of_the_target(pair: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair / "target")
    with pytest.raises(ConfigError, match="There is no draft to compare"):
        compare(target, {}, None, TEXTS)
    drafts, tokenizer = {"theirs": load_draft(str(pair / "foreign"))}, AutoTokenizer.from_pretrained(pair / "target")
    with pytest.raises(VocabularyMismatchError, match="The draft 'theirs' cannot be compared"):
        compare(target, drafts, tokenizer, TEXTS)
