"""The memory of a draft that learns: held and planned."""

import gc
import json
from pathlib import Path
from typing import Any

import held
import models
import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.bundled import load_bundled
from osd_hf.cli.main import main
from osd_hf.layers import copy_layers
from osd_hf.learning import learner as module
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.updater import Float32Muon as Muon
from osd_hf.learning.weights import adapted, fp32_copy, load_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it

CONFIG = OnlineConfig(
    update_strategy="manual", steps_per_update=1, batch_size=4, num_logprobs=8, num_assistant_tokens=5
)
WIDE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "vocab_size": 128}


def learned(draft: Any, target: Any, peft_config: Any, patch: pytest.MonkeyPatch) -> tuple[Any, dict[str, int]]:
    """An assistant that has served three versions of its own, and what it held: between updates, in a step and while
    a version was tried."""
    most: dict[str, int] = {}

    def watched(when: str, work: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            most[when] = max(most.get(when, 0), held.held_bytes() - before)
            return work(*args, **kwargs)

        return run

    def promoted(version: int, serving: int, domain: Any, *_: Any) -> GateDecision:
        return GateDecision("promoted", version, version, domain, "for the test")

    patch.setattr(module, "judge", promoted)
    patch.setattr(module, "replay_each", watched("trial", module.replay_each))
    patch.setattr(Muon, "step", watched("step", Muon.step))
    gc.collect()
    before = most["start"] = held.held_bytes()
    assistant = OnlineAssistant(target, draft, None, CONFIG, peft_config=peft_config)
    for version in (1, 2, 3):  # the third step comes while there is one that serves and one before it
        for ids in models.prompts(5):
            assistant.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert assistant.update().version == version
    gc.collect()
    most["between"] = held.held_bytes() - before
    return assistant, most


KINDS = {
    "lora": LoraConfig(r=2, target_modules="all-linear"),
    "dora": LoraConfig(r=2, target_modules=["q_proj", "lm_head"], use_dora=True),
    "biases": LoraConfig(r=2, target_modules=["q_proj"], bias="all"),
    "whole modules": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "some tokens": LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 4]),
    "decomposed": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="olora"),
    "loha": LoHaConfig(r=2, target_modules=["q_proj"]),
    "ia3": IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_merged_as_peft_does_and_the_base_stays(kind: str, dtype: torch.dtype) -> None:
    _, draft = models.pair(num_hidden_layers=1, attention_bias=kind == "biases")
    drafts = DomainDrafts(draft.to(dtype), CONFIG, peft_config=KINDS[kind], per_domain=False)
    drafts.updater(None)
    version, snapshot = drafts.candidate(None)
    moved = {name: weight + 0.3 * torch.randn_like(weight) for name, weight in snapshot.items()}
    whole = load_adapter(adapted(fp32_copy(draft), KINDS[kind], CONFIG.seed), moved).merge_and_unload()
    drafts.promote(None, version, moved)
    tried = drafts.trial_model(moved)
    for name, expected in whole.named_parameters():
        assert torch.equal(drafts.model(None).get_parameter(name), expected.to(dtype))
        assert torch.equal(tried.get_parameter(name), expected.to(dtype))
    assert all(torch.equal(p, drafts.base.get_parameter(name)) for name, p in draft.named_parameters())


# Named as the assistant holds them between requests; caches and rows of requests are not there, or no tensors.
HELD = ("draft: as it was", "draft: serving", "draft: version before", "learner: master", "learner: average",
        "learner: optimizer")  # fmt: skip
CUT = {"num_hidden_layers": 2}  # the draft is made from the target
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("architecture", "dtype", "rank", "changes"),
    [
        ("llama", torch.float32, None, WIDE),
        ("qwen3", torch.bfloat16, 2, WIDE | TIED),
        ("t5", torch.float32, None, {"d_model": 96, "d_ff": 256, "vocab_size": 128}),
        ("llama", torch.float32, None, WIDE | CUT),
        ("qwen3", torch.bfloat16, None, WIDE | TIED | CUT),
    ],
)
def test_a_plan_is_what_is_held(
    architecture: str, dtype: torch.dtype, rank: int | None, changes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models.pair(architecture, **changes)
    if changes.items() >= CUT.items():
        draft = copy_layers(target.to(dtype), (0,))
    peft_config = None if rank is None else LoraConfig(r=rank, target_modules="all-linear")
    assistant, most = learned(draft.to(dtype), target, peft_config, monkeypatch)
    with assistant:
        before = most["between"] + most["start"]
        plan = assistant.memory_plan(prompt_tokens=8, new_tokens=6)
        gc.collect()
        assert held.held_bytes() <= before  # nothing was loaded
    parts = {part.name: part.bytes for part in plan.parts}
    between = sum(parts[name] for name in HELD)
    assert between == pytest.approx(most["between"], rel=0.15)
    assert between + parts["learner: gradients"] == pytest.approx(most["step"], rel=0.15)
    assert between + parts["gate: version tried"] == pytest.approx(most["trial"], rel=0.15)
    assert parts["target: weights"] == sum(t.nbytes for t in (*target.parameters(), *target.buffers()))
    assert plan.draft_parameters == sum(p.numel() for p in draft.parameters())


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """A pair without weights."""
    for name, model in zip(("target", "draft"), models.pair(), strict=True):
        model.config.save_pretrained(tmp_path / name)
    return [str(tmp_path / "target"), str(tmp_path / "draft")]


def test_the_command_reads_configurations_alone(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt-tokens", "8", "--max-new-tokens", "8", "--device-memory", "100MB"]
    assert main(["env", *folders, *sizes, "--optimizer", "adamw", "--json", "-"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    parts = {part["name"]: part["bytes"] for part in report["parts"]}
    assert parts["learner: optimizer"] == 8 * report["draft_parameters"]
    assert report["peak_bytes"] > report["always_bytes"] > sum(parts[name] for name in HELD)
    assert report["fits"] == (report["peak_bytes"] <= 100e6)
    assert "draft: version before" in printed.err and "in 100MB: " in printed.err
    assert main(["env", *folders, *sizes, "--lora-rank", "2", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["learned_parameters"] < report["draft_parameters"] / 4
    assert main(["env", "--pair", "bundled", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["draft_parameters"] == load_bundled()[1].num_parameters()


def test_a_target_may_be_quantized_as_it_is_loaded(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    weights = []
    for bits in ([], ["--target-bits", "8"], ["--target-bits", "4"]):
        assert main(["env", *folders, *bits, "--json", "-"]) == 0
        parts = {part["name"]: part["bytes"] for part in json.loads(capsys.readouterr().out)["parts"]}
        weights.append(parts["target: weights"])
        assert parts["learner: gradients"]  # of the draft, whose weights stay as they are
    target = models.pair()[0]
    linear = sum(m.weight.numel() for m in target.model.modules() if isinstance(m, torch.nn.Linear))
    assert weights[0] - weights[1] == 3 * linear
    assert weights[1] - weights[2] == pytest.approx(linear * (8 - 4.5) / 8, abs=1)
