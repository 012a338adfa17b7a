"""Publishing drafts: what is written, pushed to a Hub of one's own, and read back by transformers alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from fake_hub import COMMIT, TOKEN, FakeHub, fake_hub
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.bundled import bundled_prompts, load_bundled
from osd_hf.cli.main import main
from osd_hf.errors import ConfigError, HubError, OSDError
from osd_hf.evaluation.compare import evaluate
from osd_hf.hub import DraftFacts, EvaluationSet, draft_card, export_to_vllm, facts_of, hub_id, push_folder, save_draft
from osd_hf.models import load_model
from osd_hf.prompts import Prompt, encode_turn

# Of huggingface_hub, which hands the bytes of a file to httpx2.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

FACTS = DraftFacts(
    target="somebody/target", target_revision="abc123", target_version="0f" * 8, base_model="somebody/draft",
    domains=("finance",), training={"requests": 40}, command="osd-hf run --pair bundled", license="apache-2.0",
)  # fmt: skip


@pytest.fixture(scope="module")
def learned() -> Any:
    """The bundled target and draft, the draft after some finance, their tokenizer."""
    target, draft, tokenizer = load_bundled()
    config = OnlineConfig(update_strategy="manual", gate=False, weight_average=0.0, steps_per_update=16)
    assistant = OnlineAssistant(target, draft, tokenizer, config)
    for example in bundled_prompts("finance", 8):
        ids = torch.tensor([encode_turn(tokenizer, example.prompt)])
        assistant.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32)
    assistant.update()
    return target, draft, assistant.draft, tokenizer


@pytest.fixture(scope="module")
def published(learned: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft's repo, evaluated, as a folder."""
    target, before, after, tokenizer = learned
    folder = tmp_path_factory.mktemp("published") / "draft"
    prompts = [Prompt(i, e.prompt, "finance") for i, e in enumerate(bundled_prompts("finance", 12, seed=7))]
    dataset = EvaluationSet("generated finance", tuple(prompts), max_new_tokens=32)
    evaluation = evaluate(target, before, after, tokenizer, dataset, num_assistant_tokens=4)
    save_draft(folder, after, tokenizer, repo_id="me/draft", facts=FACTS, evaluation=evaluation)
    return folder


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def here(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The Hub of this process."""
    constants = {"ENDPOINT": hub.address, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True,
                 "HF_TOKEN_PATH": str(tmp_path / "no token"),
                 "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}"}  # fmt: skip
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # it keeps the first address that it was asked for
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return hub


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the Hub's client would have waited before each of its retries, in seconds: it waits for nothing."""
    waits: list[float] = []
    clock = SimpleNamespace(**{**vars(time), "sleep": waits.append})
    monkeypatch.setattr("huggingface_hub.utils._http.time", clock)
    return waits


def in_fresh_process(hub: FakeHub, folder: Path, code: str) -> str:
    """What a new interpreter, for which this Hub is the Hub, prints."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment = {
        **kept, "HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pushed(folder: Path) -> str:
    """The address that a push returns, or the error that it raises."""
    try:
        return push_folder(folder, "me/draft")
    except OSDError as error:
        return f"{type(error).__name__} {error}"


# --- what is written ------------------------------------------------------------------------------------------------


def test_a_saved_draft_is_an_ordinary_model_folder(published: Path, learned: Any) -> None:
    _, _, after, tokenizer = learned
    again = AutoModelForCausalLM.from_pretrained(published)
    ids = torch.tensor([encode_turn(AutoTokenizer.from_pretrained(published), "What is 5% of $40?")])
    assert ids.tolist() == [encode_turn(tokenizer, "What is 5% of $40?")]
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, after(ids).logits)
    drafting = GenerationConfig.from_pretrained(published)
    assert drafting.num_assistant_tokens == 4
    assert drafting.num_assistant_tokens_schedule == "constant"
    assert drafting.assistant_confidence_threshold == 0
    assert after.generation_config.num_assistant_tokens == 5  # as it was
    rows = [json.loads(line) for line in (published / "evaluation/prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert set(rows[0]) == {"prompt", "domain"}


def test_the_card_says_what_was_measured(published: Path) -> None:
    card = ModelCard.load(published / "README.md")
    results = json.loads((published / "evaluation/results.json").read_text())
    assert card.data.base_model == "somebody/draft"
    assert card.data.base_model_relation == "finetune"
    assert card.data.library_name == "transformers"
    assert card.data.target_model == "somebody/target"
    assert card.data.target_revision == "abc123"
    assert card.data.target_version == json.loads((published / "config.json").read_text())["osd_hf_target"] == "0f" * 8
    assert {"assistant-model", "speculative-decoding", "draft-model", "distillation"} <= set(card.data.tags)
    assert "target_model:somebody/target" in card.data.tags
    metrics = {r.metric_type: r for r in card.data.eval_results}
    assert metrics["acceptance_rate"].metric_value == pytest.approx(results["after"]["alpha"], abs=1e-4)
    interval = pytest.approx(results["after"]["alpha_interval"], abs=1e-4)
    assert metrics["acceptance_rate"].metric_args == {"num_assistant_tokens": 4, "interval": interval}
    for side in ("before", "after"):
        low, high = results[side]["alpha_interval"]
        assert f"{results[side]['alpha']:.3f} [{low:.3f}, {high:.3f}]" in card.text
    said = ("2310.07177", "vllm serve somebody/target", "osd-hf run --pair bundled", "- requests: 40", "finance",
            "pip install torch", "## Limitations", "What it may have memorized", ".to(device)")  # fmt: skip
    for words in said:
        assert words in card.text
    assert results["after"]["alpha"] > results["before"]["alpha"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
# peft before 0.21 says so of a base without a name.
@pytest.mark.filterwarnings("ignore:Could not find a config file in  - will assume:UserWarning")
def test_an_adapter_is_published_alone(tmp_path: Path) -> None:
    _, draft = models.pair()
    adapted = get_peft_model(draft, LoraConfig(r=2, target_modules=["q_proj"]))
    facts = DraftFacts(base_model="somebody/draft", is_adapter=True)
    save_draft(tmp_path, adapted, repo_id="me/adapter", facts=facts, num_assistant_tokens=3)
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists()
    assert GenerationConfig.from_pretrained(tmp_path).num_assistant_tokens == 3
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.base_model_relation, card.data.library_name) == ("adapter", "peft")
    assert "PeftModel.from_pretrained" in card.text
    assert "vllm serve" not in card.text


def test_a_card_without_figures_claims_none() -> None:
    card = draft_card("me/draft", DraftFacts())
    assert "Not measured by `osd-hf push`." in card.text
    assert card.data.eval_results is None
    assert card.data.base_model is None


def test_folders_of_this_machine_are_no_ids(tmp_path: Path) -> None:
    assert hub_id("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    for name in (None, "", str(tmp_path), "gpt2/with/more", "spa ce/name"):
        assert hub_id(name) is None


def test_the_card_names_the_commit_of_the_target(
    here: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    target, draft = models.pair(num_hidden_layers=1)
    target.save_pretrained(tmp_path / "target")
    here.repos["model", "them/large"] = {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()}
    said = f"[them/large](https://huggingface.co/them/large) at revision `{COMMIT}`"
    assert said in draft_card("me/draft", facts_of(load_model("them/large"), draft)).text
    assert facts_of(load_model(str(tmp_path / "target")), draft).target_revision is None


# --- pushed and read back -------------------------------------------------------------------------------------------


def test_a_pushed_draft_is_read_back_by_transformers_alone(
    here: FakeHub, published: Path, learned: Any, tmp_path: Path
) -> None:
    target, _, _, tokenizer = learned
    assert pushed(published) == f"{here.address}/me/draft"
    repo = here.repos["model", "me/draft"]
    assert set(repo) >= {
        "model.safetensors", "config.json", "generation_config.json", "README.md", "tokenizer.json",
        "evaluation/prompts.jsonl", "evaluation/results.json",
    }  # fmt: skip
    assert set(here.cards) == {repo["README.md"].decode()}  # as the Hub validates it
    # The card's own snippets, in an interpreter that has never heard of osd_hf.
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    snippets = re.findall(r"```python\n(.*?)```", repo["README.md"].decode(), re.DOTALL)
    code = "\n".join(snippets).replace('"somebody/target"', repr(str(tmp_path / "target")))
    code = "import gc, sys\ngc.disable()\nsys.modules['osd_hf'] = None\n" + code  # imports alone are no garbage
    said = in_fresh_process(here, tmp_path, code).splitlines()
    alpha = float(said[-1].split()[1])
    low, high = json.loads(repo["evaluation/results.json"])["after"]["alpha_interval"]
    assert low <= alpha <= high


@pytest.mark.parametrize(
    ("refuse", "said"),
    [
        ({"/api/repos/create": 401}, "HubError 'me/draft' was not pushed: .*401"),
        ({"/commit/main": 403}, "HubError 'me/draft' was not pushed: .*403"),
        ({"/upload/": "drop"}, "HubError 'me/draft' was not pushed: "),
        ("no token", "ConfigError There is no token to push with"),
        ("offline", "HubError 'me/draft' was not pushed: .*HF_HUB_OFFLINE"),
    ],
)
def test_a_push_that_fails_says_why_and_keeps_the_folder(
    here: FakeHub, published: Path, refuse: Any, said: str, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    if refuse == "no token":
        monkeypatch.setenv("HF_TOKEN", "")
    elif refuse == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        here.refuse = refuse
    before = {p: p.stat().st_mtime_ns for p in published.rglob("*")}
    told = pushed(published)
    assert re.match(said, told)
    assert TOKEN not in told
    assert {p: p.stat().st_mtime_ns for p in published.rglob("*")} == before
    assert not here.repos.get(("model", "me/draft"))  # nothing half
    assert bool(waits) == ("/upload/" in refuse)  # only a line that drops is tried again


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small").mkdir()
    (tmp_path / "small/config.json").write_text("{}")
    return tmp_path / "small"


def test_a_new_repo_is_private_unless_asked_otherwise_and_stays_so(here: FakeHub, small: Path) -> None:
    for number, (private, is_public) in enumerate(((None, False), (True, False), (False, True))):
        assert push_folder(small, f"me/{number}", private=private) == f"{here.address}/me/{number}"
        assert (("model", f"me/{number}") in here.public) == is_public
        assert "config.json" in here.repos["model", f"me/{number}"]
    for private in (None, True, False):
        push_folder(small, "me/0", private=private)
    assert here.public == {("model", "me/2")}


@pytest.mark.parametrize("more", [{}, {"private": True}])
def test_nothing_goes_to_a_public_repo_unless_it_is_asked_for(here: FakeHub, small: Path, more: Any) -> None:
    here.repos["model", "me/draft"] = {"other.txt": b"stays"}
    here.public.add(("model", "me/draft"))
    with pytest.raises(ConfigError) as refused:
        push_folder(small, "me/draft", **more)
    for words in ("'me/draft' is open to everybody", "`private=False`", "--public"):
        assert words in str(refused.value)
    assert here.repos["model", "me/draft"] == {"other.txt": b"stays"}
    assert not [path for _, path in here.asked if "upload" in path or "commit" in path]
    push_folder(small, "me/draft", private=False)
    assert set(here.repos["model", "me/draft"]) == {"other.txt", "config.json"}
    assert ("model", "me/draft") in here.public  # as it was


def test_where_nobody_can_tell_who_reads_it_nothing_is_pushed(here: FakeHub, small: Path) -> None:
    here.refuse = {"^/api/models/me/draft$": 403}
    with pytest.raises(HubError):
        push_folder(small, "me/draft")
    assert here.repos["model", "me/draft"] == {}


@pytest.mark.parametrize(
    "command",
    [
        ["push", "me/draft", "--draft", "nowhere", "--pair", "bundled"],
        ["learn", "--repo-id", "me/draft", "--store", "nowhere", "--output-dir", "versions"],
    ],
)
def test_a_command_that_would_push_in_public_ends_before_its_work(
    here: FakeHub, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    here.repos["model", "me/draft"] = {}
    here.public.add(("model", "me/draft"))
    assert main(command) == 2
    assert "'me/draft' is open to everybody" in capsys.readouterr().err
    assert not (tmp_path / "versions").exists()
    assert {method for method, _ in here.asked} == {"GET"}


@pytest.mark.parametrize("name", ["draft", " ", "me/dra ft", "me/a/b", "/draft"])
def test_a_name_that_is_none_is_refused_before_anything_is_asked(name: str, published: Path) -> None:
    with pytest.raises(ConfigError, match="A repo is named as user/name|is no name of a repo"):
        push_folder(published, name, token=TOKEN)


def test_an_assistant_pushes_its_draft_and_nothing_of_a_request(here: FakeHub) -> None:
    target, draft = models.pair()
    with OnlineAssistant(
        target, draft, config=OnlineConfig(update_strategy="interval", num_assistant_tokens=3)
    ) as assistant:
        ids = models.prompt(6)
        assistant.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
        assert assistant.push_to_hub("me/draft").endswith("/me/draft")
        assert not here.public
        assistant.push_to_hub("me/open", private=False)
    assert here.public == {("model", "me/open")}
    repo = here.repos["model", "me/draft"]
    assert set(repo) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert json.loads(repo["generation_config.json"])["num_assistant_tokens"] == 3
    assert "- requests served: 1" in repo["README.md"].decode()


def test_a_trainer_pushes_to_a_private_repo_alone(here: FakeHub, tmp_path: Path) -> None:
    from osd_hf import DistillConfig, distill

    def settings(**more: Any) -> Any:
        shape = {"max_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        return DistillConfig(str(tmp_path / "out"), push_to_hub=True, hub_model_id="me/draft", **shape, **more)

    assert settings().hub_private_repo is True
    assert settings(hub_private_repo=None).hub_private_repo is True
    assert settings(hub_private_repo=False).hub_private_repo is False
    target, draft = models.pair()
    here.repos["model", "me/draft"] = {"other.txt": b"stays"}
    here.public.add(("model", "me/draft"))
    rows = [{"prompt": [3, 4, 5], "completion": [6, 7]}] * 4
    with pytest.raises(ConfigError, match="'me/draft' is open to everybody"):
        distill(target=target, draft=draft, dataset=rows, tokenizer=models.tokenizer(), config=settings())
    assert here.repos["model", "me/draft"] == {"other.txt": b"stays"}


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_a_token_stays_out_of_what_a_trainer_writes_and_pushes(architecture: str, tmp_path: Path) -> None:
    from osd_hf import DistillConfig, distill

    target, draft = models.pair(architecture)
    config = DistillConfig(
        str(tmp_path / "out"), max_steps=1, save_steps=1, save_strategy="steps", hub_token="hf_QZX", use_cpu=True,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"prompt": [3, 4, 5], "completion": [6, 7]}] * 4
    distill(target=target, draft=draft, dataset=rows, tokenizer=models.tokenizer(), config=config)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert "training_args.bin" in {path.name for path in files}
    assert [path.name for path in files if b"QZX" in path.read_bytes()] == []
    assert config.hub_token == "hf_QZX"


def test_an_exported_draft_has_the_targets_vocabulary_and_the_drafts_logits(tmp_path: Path) -> None:
    target = models.build("llama", vocab_size=models.VOCAB + 8)
    draft = models.build("llama", seed=1)
    tokenizer = models.tokenizer()
    command = export_to_vllm(
        tmp_path / "out", draft, target, tokenizer, num_assistant_tokens=3, target_name="me/target"
    )
    assert command[:4] == ["vllm", "serve", "me/target", "--speculative-config"]
    assert json.loads(command[4]) == {
        "method": "draft_model", "model": str(tmp_path / "out"), "num_speculative_tokens": 3,
    }  # fmt: skip
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.vocab_size == models.VOCAB + 8
    ids = models.prompt(9)
    with torch.inference_mode():
        wanted, found = (models.double(model)(ids).logits[..., : models.VOCAB] for model in (draft, again))
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ConfigError, match="is not empty"):
        export_to_vllm(tmp_path / "out", draft, target, tokenizer)
    with pytest.raises(ConfigError, match="decoder-only"):
        export_to_vllm(tmp_path / "t5", models.build("t5"), models.build("t5"), tokenizer)
    assert not (tmp_path / "t5").exists()
