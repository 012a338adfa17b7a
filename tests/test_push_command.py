"""The commands that carry a draft out: what they write, what they print, and what they refuse."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from osd_hf.bundled import load_bundled
from osd_hf.cli.main import main
from osd_hf.errors import ConfigError
from osd_hf.hub import DraftFacts, draft_card


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that differs from the bundled one, in a folder."""
    _, draft, tokenizer = load_bundled()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("draft")
    draft.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_push_writes_the_measured_repo_and_pushes_nothing_when_it_is_dry(
    learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = tmp_path / "repo"
    places = ["me/draft", "--pair", "bundled", "--draft", str(learned), "--output-dir", str(repo)]
    sizes = "--num-requests 4 --timed-requests 1 --max-new-tokens 12 --num-assistant-tokens 3 --domain finance"
    assert main(["push", *places, "--dry-run", "--json", "-", *sizes.split()]) == 0
    out = capsys.readouterr()
    report = json.loads(out.out)
    assert report["url"] is None
    assert "nothing pushed" in out.err
    card = ModelCard.load(repo / "README.md")
    card.data.to_dict()
    assert "finance" in card.text
    alpha = next(r for r in card.data.eval_results if r.metric_type == "acceptance_rate").metric_value
    assert f"alpha after: {alpha:.3f}" in out.err
    draft = AutoModelForCausalLM.from_pretrained(repo)
    assert draft.generation_config.num_assistant_tokens == 3
    prompts = (repo / "evaluation/prompts.jsonl").read_text().splitlines()
    assert len(prompts) == 4
    assert (repo / "evaluation/alpha.png").stat().st_size > 1000


def test_a_folder_that_is_not_empty_is_not_written_to(
    learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept").write_text("mine")
    places = ["--draft", str(learned), "--output-dir", str(tmp_path)]
    assert main(["push", "me/draft", "--pair", "bundled", *places, "--dry-run"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["push", "me/draft", "--pair", "bundled", "--draft", "nowhere"], "'nowhere' cannot be loaded"),
        (["push", "me/draft", "--draft", "d", "--dry-run"], "--output-dir"),
        (["push", "me/draft", "--draft", "d"], "No card in a folder d names the target: set --target, or"),
        (["push", "--export", "new", "--draft", "."], "No card in a folder . names the target"),
        (["push", "me/draft", "--draft", "d", "--target", "t"], "Name it with --before"),
        (["push", "me/draft", "--draft", "d", "--target", "t", "--before", "t"], "t is the target itself"),
        (
            ["push", "me/draft", "--draft", "d", "--pair", "bundled", "--before", "b"],
            "--pair and --before exclude each other",
        ),
        (["push", "me/draft", "--draft", "d", "--private", "--public"], "exclude each other"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_draft_is_measured_beside_what_its_card_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def load_pair(*names: object, **how: object) -> None:
        asked.append((*names, how["revision"], how["draft_revision"]))
        raise ConfigError("enough")

    monkeypatch.setattr("osd_hf.cli.push.load_pair", load_pair)
    card = draft_card("me/draft", DraftFacts(target="them/large", target_revision="c0ffee", base_model="them/small"))
    card.save(tmp_path / "README.md")
    arguments = ["push", "me/draft", "--draft", str(tmp_path), "--output-dir", str(tmp_path / "out"), "--dry-run"]
    for more in ([], ["--revision", "v1", "--before-revision", "v0"], ["--target", "one", "--before", "two"]):
        assert main([*arguments, *more]) == 2
    assert asked == [
        ("them/large", "them/small", "c0ffee", None), ("them/large", "them/small", "v1", "v0"),
        ("one", "two", None, None),
    ]  # fmt: skip
    draft_card("me/draft", DraftFacts(target="them/large", base_model="them/large")).save(tmp_path / "README.md")
    for more in ([], ["--target", "a/copy"]):  # as `osd-hf draft` writes it
        assert main([*arguments, *more]) == 2
        said = "them/large is the target itself. Name it with --before"
        assert said in capsys.readouterr().err


def test_export_writes_the_folder_and_prints_the_command_that_serves_it(
    learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "engine"
    places = ["--export", str(folder), "--draft", str(learned)]
    assert main(["push", *places, "--pair", "bundled", "--num-assistant-tokens", "4"]) == 0
    command = shlex.split(capsys.readouterr().out)
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert config == {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4}
    exported, source = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, learned))
    assert all(torch.equal(weight, source[name]) for name, weight in exported.items())
    assert AutoTokenizer.from_pretrained(folder).chat_template


@pytest.mark.parametrize(("flags", "private"), [([], None), (["--private"], True), (["--public"], False)])
def test_the_push_is_private_unless_it_is_asked_to_be_public(
    learned: Path, flags: list[str], private: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[bool | None] = []

    def push_folder(folder: Path, repo_id: str, **kwargs: object) -> str:
        asked.append(kwargs["private"])  # type: ignore[arg-type]
        return "https://hub/me/draft"

    def check_push(repo_id: str, token: str | None, private: bool | None) -> str:
        asked.append(private)
        return "hf_fake"

    monkeypatch.setenv("HF_TOKEN", "hf_fake")
    monkeypatch.setattr("osd_hf.cli.push.push_folder", push_folder)
    monkeypatch.setattr("osd_hf.cli.push.check_push", check_push)
    sizes = ["--num-requests", "2", "--timed-requests", "0", "--max-new-tokens", "4", "--num-assistant-tokens", "2"]
    assert main(["push", "me/draft", "--pair", "bundled", "--draft", str(learned), *sizes, *flags]) == 0
    assert asked == [private, private]  # before the work, and at its end
    assert "pushed to https://hub/me/draft" in capsys.readouterr().out
