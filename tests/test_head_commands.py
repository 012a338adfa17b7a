"""Draft heads in the commands: made, served, distilled, learned from a store, measured, pushed and exported."""

import json
import shlex
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file
from saved_pair import save_pair
from test_commands import settings_of
from transformers import AutoModelForCausalLM

from osd_hf import CorrectionStore, DistillConfig, distill, replay
from osd_hf.cli.main import main
from osd_hf.draft_head import DraftHead, load_head
from osd_hf.errors import StateError
from osd_hf.hub import export_to_vllm
from osd_hf.layers import new_eagle3_head, new_head
from osd_hf.recording import record_traces

DEVICE = ["--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, `eagle3` and `mtp` heads of it, a store of its answers, and prompts."""
    folder = save_pair(tmp_path_factory.mktemp("pair"), layers=4)
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    new_eagle3_head(target).save_pretrained(folder / "eagle3")
    new_head(target).save_pretrained(folder / "mtp")
    asked = [[1, *torch.randint(3, 250, (6,)).tolist()] for _ in range(12)]
    with CorrectionStore(folder / "store") as store:
        for trace in record_traces(target, asked, max_new_tokens=8, num_logprobs=8):
            store.append(trace)
    rows = "".join(json.dumps({"question": f"what is {i}?"}) + "\n" for i in range(12))
    (folder / "rows.jsonl").write_text(rows)
    return folder


def loaded(pair: Path, head: Path) -> Any:
    target = AutoModelForCausalLM.from_pretrained(pair / "target")
    return target, load_head(head, target)


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_a_head_is_made_and_served(pair: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd_hf.distillation.make_draft.REACHABLE_ALPHA", 1.0)  # of so small a target
    monkeypatch.setattr("osd_hf.distillation.make_draft._worthwhile", lambda trials, *_: trials)
    how = [*DEVICE, "--max-new-tokens", "6", "--prompts", str(pair / "rows.jsonl"), "--column", "question"]
    made = ["--kind", kind, "--max-steps", "3", "--json", str(tmp_path / "made.json")]
    assert main(["draft", str(pair / "target"), str(tmp_path / "head"), *how, *made]) == 0
    assert json.loads((tmp_path / "made.json").read_text())["kind"] == kind
    target, head = loaded(pair, tmp_path / "head")
    assert head.config.layout == kind
    report = tmp_path / "run.json"
    places = ["--target", str(pair / "target"), "--draft", str(tmp_path / "head")]
    flags = [*how[:-4], "--prompts", str(pair / "rows.jsonl"), "--column", "question", "--json", str(report)]
    flags += ["--output-dir", str(tmp_path / "run")]
    assert main(["run", *places, *flags]) == 0
    assert json.loads(report.read_text())


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_a_head_is_distilled(pair: Path, kind: str, tmp_path: Path) -> None:
    flags = ["--target", pair / "target", "--draft", pair / kind, "--store", pair / "store", "--output-dir", tmp_path]
    steps = ["--max-steps", "3", "--per-device-train-batch-size", "4", "--use-cpu", "--learning-rate", "1e-2"]
    assert main(["distill", *map(str, flags), *DEVICE, *steps, "--num-held-out", "3"]) == 0
    _, head = loaded(pair, tmp_path / "draft")
    _, before = loaded(pair, pair / kind)
    assert head.config.layout == kind
    changed = [n for n, p in head.named_parameters() if not torch.equal(p, dict(before.named_parameters())[n])]
    assert any("q_proj" in name for name in changed)
    assert not any("embed_tokens" in name for name in changed)


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_training_of_a_head_goes_on_from_a_checkpoint(kind: str, is_tied: bool, tmp_path: Path) -> None:
    target = models.build("llama", tie_word_embeddings=is_tied, num_hidden_layers=4)
    head = new_head(target) if kind == "mtp" else new_eagle3_head(target)
    asked = [[1, *torch.randint(3, 60, (6,)).tolist()] for _ in range(16)]
    traces = list(record_traces(target, asked, max_new_tokens=8))
    tokenizer = models.tokenizer()

    def trained(folder: Path, steps: int, **more: Any) -> Any:
        config = DistillConfig(
            output_dir=str(folder), max_steps=steps, save_strategy="steps", save_steps=2, learning_rate=1e-2,
            lr_scheduler_type="constant", per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True,
            eval_strategy="no", **more,
        )  # fmt: skip
        return distill(target=None, draft=head, dataset=traces, tokenizer=tokenizer, config=config).draft

    whole = trained(tmp_path / "whole", 4).state_dict()
    trained(tmp_path / "part", 2)
    resumed = trained(tmp_path / "part", 4, resume_from_checkpoint="true").state_dict()
    assert all(torch.allclose(weight, resumed[name], atol=1e-6) for name, weight in whole.items())
    start = head.state_dict()
    assert not torch.equal(
        start["model.layers.0.self_attn.q_proj.weight"], resumed["model.layers.0.self_attn.q_proj.weight"]
    )
    assert torch.equal(start["model.embed_tokens.weight"], resumed["model.embed_tokens.weight"])


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_versions_of_a_head_are_published(pair: Path, kind: str, tmp_path: Path) -> None:
    flags = ["--store", pair / "store", "--output-dir", tmp_path / "out", "--target", pair / "target"]
    learning = ["--num-logprobs", "8", "--update-interval", "4", "--steps-per-update", "2", "--no-gate"]
    places = [*map(str, [*flags, "--draft", pair / kind]), *DEVICE]
    assert main(["learn", *places, *learning, "--once", "--publish-seconds", "0"]) == 0
    target, head = loaded(pair, tmp_path / "out/latest")
    assert head.config.layout == kind
    _, before = loaded(pair, pair / kind)
    traces = list(CorrectionStore(pair / "store"))
    assert replay(head, traces, 3).examined and target is not None
    assert any(not torch.equal(p, dict(before.named_parameters())[n]) for n, p in head.named_parameters())
    names = load_file(next((tmp_path / "out/latest").glob("*.safetensors")))
    assert kind == "mtp" or not any("embed_tokens" in name for name in names)


def test_heads_and_drafts_are_compared(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = ["--compare", *(str(pair / name) for name in ("draft", "mtp", "eagle3"))]
    prompts = ["--prompts", str(pair / "rows.jsonl"), "--column", "question", "--num-requests", "6"]
    assert main(["bench", "--target", str(pair / "target"), *drafts, *prompts, *DEVICE, "--max-new-tokens", "6"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("mtp", "eagle3"))
    stored = ["bench", *drafts, "--store", str(pair / "store"), *DEVICE]
    assert main(stored) == 2
    assert "Name the target" in capsys.readouterr().err
    assert main([*stored, "--target", str(pair / "target")]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("mtp", "eagle3"))


def test_a_head_is_exported_for_vllm(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--target", str(pair / "target"), "--draft", str(pair / "eagle3"), *DEVICE]
    assert main(["push", "--export", str(tmp_path / "engine"), *places, "--num-assistant-tokens", "3"]) == 0
    command = shlex.split(capsys.readouterr().out)
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": str(tmp_path / "engine"), "num_speculative_tokens": 3}
    saved = json.loads((tmp_path / "engine/config.json").read_text())
    assert saved["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert saved["speculators_config"]["verifier"]["name_or_path"] == str(pair / "target")
    places[3] = str(pair / "mtp")
    assert main(["push", "--export", str(tmp_path / "other"), *places]) == 2
    assert "EAGLE-3's layout" in capsys.readouterr().err


def test_a_head_is_pushed_with_its_figures(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--target", str(pair / "target"), "--draft", str(pair / "eagle3"), "--before", str(pair / "draft")]
    prompts = ["--prompts", str(pair / "rows.jsonl"), "--column", "question", "--num-requests", "6"]
    flags = [*DEVICE, "--max-new-tokens", "6", "--timed-requests", "2", "--dry-run", "--output-dir", str(tmp_path)]
    assert main(["push", "me/head", *places, *prompts, *flags]) == 0
    target, head = loaded(pair, tmp_path)
    assert isinstance(head, DraftHead) and target is not None
    card = (tmp_path / "README.md").read_text()
    assert "OnlineAssistant(" in card and '"method": "eagle3"' in card
    assert "assistant_model" not in card and "draft_model" not in card.replace("draft-model", "")
    assert "alpha after" in capsys.readouterr().out


def test_an_export_with_other_weights_is_noticed(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = loaded(pair, pair / "eagle3")
    _, other = loaded(pair, pair / "eagle3")
    other.norm.weight.data.add_(1)
    monkeypatch.setattr("osd_hf.hub.load_head", lambda *_, **__: other)
    with pytest.raises(StateError, match=r"norm\.weight"):
        export_to_vllm(tmp_path / "new", head, target, None)


def test_a_target_alone_is_served_with_a_head_of_its_own(pair: Path, tmp_path: Path) -> None:
    how = [*DEVICE, "--max-new-tokens", "6", "--prompts", str(pair / "rows.jsonl"), "--column", "question"]
    places = ["--target", str(pair / "target"), "--output-dir", str(tmp_path), "--update-interval", "4", "--no-gate"]
    assert main(["run", *places, *how]) == 0
    target, head = loaded(pair, tmp_path / "draft")
    start = new_head(target).state_dict()
    assert any(not torch.equal(weight, start[name]) for name, weight in head.state_dict().items())
    assert main(["run", *places, *how, "--resume"]) == 0
    settings = settings_of("serve", "--target", str(pair / "target"), *DEVICE)[0]
    assert isinstance(settings.load_pair().draft, DraftHead)


def test_the_bundled_target_gets_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--learn-requests", "2", "--later-requests", "2", "--timed-requests", "1", "--max-new-tokens", "8"]
    report, places = tmp_path / "report.json", ["--output-dir", str(tmp_path), "--no-compile-target", "--threads", "1"]
    assert main(["quickstart", "--own-head", *sizes, *places]) == 0
    found = json.loads(report.read_text())
    assert found["outputs"]["differing"] == 0
    head = settings_of("app", "--pair", "bundled", "--own-head")[0].load_pair().draft
    assert isinstance(head, DraftHead)
    capsys.readouterr()
    assert main(["serve", "--own-head", "--target", "t", "--draft", "d"]) == 2
    assert "--own-head and --draft" in capsys.readouterr().err
