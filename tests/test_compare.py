"""Drafts for one target side by side: their figures, what is said of them, and what is refused."""

from __future__ import annotations

import copy
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

from osd_hf import AcceptanceStats, ConfigError, VocabularyMismatchError, compare, record_traces, replay
from osd_hf.acceptance import Comparison, alpha_gain_interval
from osd_hf.cli.main import main
from osd_hf.errors import HubError
from osd_hf.evaluation.compare import DraftComparison
from osd_hf.hub.cards import EvaluationSet
from osd_hf.hub.discovery import ROW
from osd_hf.pair import load_draft
from osd_hf.prompts import Prompt, encode_turn
from osd_hf.speedup import ForwardSeconds, alpha_from_block_efficiency, expected_block_efficiency

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft reads it
TEXTS = [f"question {i}" for i in range(6)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft, an adapter on the draft, the draft with two tokens exchanged in its tokenizer and in its
    weights, and one with a tokenizer that does not tell the bytes of its tokens."""
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
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft")
    with torch.no_grad():
        for end in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            end.weight[[one, other]] = end.weight[[other, one]]
    for name, changes in (
        ("foreign", {}),
        ("untold", {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}),
    ):
        shutil.copytree(folder / "draft", folder / name)
        draft.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer | changes))
    return folder


def test_all_drafts_are_scored_on_one_answer_of_the_target_a_prompt(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, tokenizer = (
        AutoModelForCausalLM.from_pretrained(pair / "target"),
        AutoTokenizer.from_pretrained(pair / "target"),
    )
    drafts = {name: load_draft(str(pair / name)) for name in ("draft", "adapter", "target", "foreign")}
    drafts["foreign"] = copy.deepcopy(drafts["foreign"])  # of which it is not known where it came from
    drafts["foreign"].config.name_or_path = ""
    own = {"foreign": AutoTokenizer.from_pretrained(pair / "foreign")}
    asked: list[int] = []
    seconds = 0.0

    def timed(model: Any, token: float, more: float) -> None:
        def take(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            nonlocal seconds
            seconds += token + (kwargs["input_ids"].shape[1] - 1) * more

        model.register_forward_pre_hook(take, with_kwargs=True)

    for name, token in (("draft", 0.25), ("adapter", 0.5), ("target", 2.0), ("foreign", 0.25)):
        timed(drafts[name], token, 0.0)
    timed(target, 1.0, 0.0625)
    generate = target.generate
    monkeypatch.setattr(target, "generate", lambda **how: asked.append(len(how["input_ids"])) or generate(**how))
    found = compare(
        target, drafts, tokenizer, TEXTS, assistant_tokenizer=own, num_assistant_tokens=4, clock=lambda: seconds
    )
    assert asked == [6]
    traces = list(record_traces(target, [encode_turn(tokenizer, text) for text in TEXTS], max_new_tokens=128))
    for name, draft in drafts.items():
        draft = drafts["draft"] if name == "foreign" else draft  # which says the same
        assert found.scores.totals[name] == replay(draft, traces, 4)
    assert 0 < found.scores.totals["adapter"].alpha != found.scores.totals["draft"].alpha
    report = json.loads(json.dumps(found.to_dict()))
    # What the foreign one says for a token of the target is more than one of its own: the word has to be whole.
    costs = {name: d["c"] for name, d in report["drafts"].items()}
    assert costs.pop("foreign") > 0.25
    assert costs == {"draft": 0.25, "adapter": 0.5, "target": 2.0}
    assert found.worth["foreign"].speedup < found.worth["draft"].speedup
    assert [d["has_own_tokenizer"] for name, d in report["drafts"].items() if d["has_own_tokenizer"]] == [True]
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
    assert len(pairs) == 6
    totals = found.scores.totals
    over = pairs["target", "draft"]
    assert over["gain"] == 1.0 - totals["draft"].alpha
    assert tuple(over["gain_interval"]) == pytest.approx(alpha_gain_interval(totals["draft"], totals["target"]))


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
    assert "compiled, as it drafts on this device by default, it takes less time" in refused_there.summary()
    nothing = [AcceptanceStats.from_counts(drafted=0, examined=0, accepted=0, emitted=1, target_forwards=1)] * 2
    assert compared({"none": cheap}, none=nothing).worth["none"].answer == "not sure"


def test_a_row_of_a_leaderboard_has_its_columns() -> None:
    costs = {name: ForwardSeconds(1.0, 0.0, 0.125) for name in ("one", "two")}
    found = compared(costs, one=stats(7, 8), two=stats(3, 4))
    rows = found.rows()
    assert all(set(row) == set(ROW.names) for row in rows)
    best = next(row for row in rows if row["draft"] == "one")
    assert (best["target"], best["target_version"], best["draft_revision"]) == ("large", "0f", "c0ffee")
    assert (best["alpha"], best["alpha_low"]) == (0.75, found.scores.totals["one"].alpha_interval[0])
    assert best["expected_speedup_high"] == found.worth["one"].interval[1]
    assert (
        best["prompts_digest"] != compared(costs, one=stats(7, 8, 7), two=stats(3, 4, 3)).rows()[0]["prompts_digest"]
    )


def test_the_command_compares_folders_and_adapters(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed: list[Any] = []
    monkeypatch.setenv("HF_TOKEN", "hf_fake")
    monkeypatch.setattr("osd_hf.drafting.timing.TIMED_SECONDS", 0.0)
    monkeypatch.setattr("osd_hf.cli.compare.push_rows", lambda *args, **how: pushed.append(args) or "the board")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text, "kind": text[-1]}) + "\n" for text in TEXTS))
    drafts = [str(pair / name) for name in ("draft", "adapter", "nested/draft")]
    given = ["--prompts", str(prompts), "--column", "text", "--num-requests", "4", "--max-new-tokens", "6"]
    folder = tmp_path / "out"
    more = ["--domain-column", "kind", "--output-dir", str(folder), "--leaderboard", "me/board"]
    assert main(["compare", str(pair / "target"), *drafts, *given, *more]) == 0
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
    ((rows, place),) = pushed
    assert (len(rows), place) == (3, "me/board")
    assert all(math.isfinite(row["expected_speedup"]) for row in rows)

    def refuse(*args: Any, **how: Any) -> str:
        raise HubError("The Hub refused it.")

    monkeypatch.setattr("osd_hf.cli.compare.push_rows", refuse)
    more = ["--leaderboard", "me/board", "--json", str(tmp_path / "kept.json")]
    assert main(["compare", str(pair / "target"), drafts[0], str(pair / "foreign"), *given, *more]) == 1
    assert "With a tokenizer of its own, and all in the target's tokens: foreign.\n" in capsys.readouterr().out
    kept = json.loads((tmp_path / "kept.json").read_text())["drafts"]
    assert kept["draft"]["alpha"] == kept["foreign"]["alpha"] > 0  # the same draft by other ids


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["{pair}/untold"], "untold' cannot be compared. A tokenizer with the decoder WordPiece does not tell"),
        (["{pair}/draft", "{pair}/draft"], "is named twice"),
        (["{pair}/draft", "--column", "c"], "--column would change nothing without --prompts"),
        (["{pair}/draft", "--token", "t"], "--token would change nothing without --leaderboard"),
        (["{pair}/draft", "--leaderboard", "board"], "A repo is named as user/name, got 'board'"),
        (["{pair}/nowhere"], "nowhere' cannot be loaded"),
        (["{pair}/draft", "--num-requests", "1"], "at least two prompts"),
    ],
)
def test_what_cannot_be_compared_is_said(
    pair: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--max-new-tokens", "4"] + ["--num-requests", "2"] * ("--num-requests" not in more)
    assert main(["compare", str(pair / "target"), *(part.format(pair=pair) for part in more), *sizes]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_comparison_needs_a_draft_whose_tokens_can_be_told(pair: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair / "target")
    with pytest.raises(ConfigError, match="There is no draft to compare"):
        compare(target, {}, None, TEXTS)
    drafts, tokenizer = {"theirs": load_draft(str(pair / "untold"))}, AutoTokenizer.from_pretrained(pair / "target")
    with pytest.raises(VocabularyMismatchError, match="The draft 'theirs' cannot be compared"):
        compare(target, drafts, tokenizer, TEXTS)
    with pytest.raises(ConfigError, match=r"`assistant_tokenizer` names \['their'\], which are no drafts"):
        compare(target, drafts, tokenizer, TEXTS, assistant_tokenizer={"their": tokenizer})
