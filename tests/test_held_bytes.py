"""What a draft that learns takes in memory, by its parameters."""

from typing import Any

import held
import models
import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig

from osd_hf import DomainDrafts, GateDecision, OnlineAssistant, OnlineConfig
from osd_hf.learning import learner as module
from osd_hf.learning import optimizer
from osd_hf.learning.optimizer import Muon
from osd_hf.learning.weights import adapted, in_fp32, load_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it

CONFIG = OnlineConfig(
    update_strategy="manual", steps_per_update=1, batch_size=4, num_logprobs=8, num_assistant_tokens=5
)
WIDE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "vocab_size": 128}
LORA = LoraConfig(r=1, target_modules=["q_proj"])


def learned(draft: Any, target: Any, peft_config: Any, patch: pytest.MonkeyPatch) -> tuple[Any, dict[str, int]]:
    """An assistant that has served two versions of its own, and what it held: between updates, in a step and while
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
    before = held.held_bytes()
    assistant = OnlineAssistant(target, draft, None, CONFIG, peft_config=peft_config)
    for version in (1, 2):
        for ids in models.prompts(5):
            assistant.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert assistant.update().version == version
    most["between"] = held.held_bytes() - before
    return assistant, most


@pytest.mark.parametrize(
    ("dtype", "peft_config", "between", "step", "trial"),
    [
        # base, serving, previous; master, average; Muon's momentum or, for embeddings and head, AdamW's two
        (torch.bfloat16, None, 3 * 2 + 2 * 4 + 4, 4, 2),
        (torch.float32, None, 3 * 4 + 2 * 4 + 4, 4, 4),
        # base, serving; master, which in fp32 lies where the base does
        (torch.bfloat16, LORA, 2 * 2 + 4, 0, 2),
        (torch.float32, LORA, 2 * 4, 0, 4),
    ],
)
def test_each_parameter_takes_so_many_bytes(
    dtype: torch.dtype, peft_config: Any, between: int, step: int, trial: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models.pair(**WIDE)
    draft = draft.to(dtype)
    count = sum(p.numel() for p in draft.parameters())
    tables = 2 * draft.get_input_embeddings().weight.numel()
    assistant, most = learned(draft, target, peft_config, monkeypatch)
    with assistant:
        expected = count * between + (0 if peft_config else tables * 4)
        slack = 0.04 * expected  # adapters, norms, buffers, rows of requests
        assert expected <= most["between"] <= expected + slack
        assert most["step"] <= expected + step * count + slack
        assert most["trial"] <= expected + trial * count + slack
        if peft_config is None and dtype == torch.bfloat16:
            assert most["between"] / count < 20
        if peft_config is not None:
            assert most["between"] / count < 9


def test_what_serves_is_the_version_and_what_served_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models.pair()
    assistant, _ = learned(draft, target, None, monkeypatch)
    with assistant:
        drafts, serving = assistant.drafts, dict(assistant.draft.named_parameters())
        version = drafts.serving_snapshot(None)
        assert all(serving[name].data_ptr() == weight.data_ptr() for name, weight in version.items())
        number, earlier = drafts.previous(None) or (0, {})
        kept = {name: weight.clone() for name, weight in earlier.items()}
        tried = dict(drafts.tried(earlier).named_parameters())
        assert all(torch.equal(tried[name], weight) for name, weight in kept.items())
        assert not any(torch.equal(p, serving[name]) for name, p in tried.items() if p.ndim > 1)
        drafts.roll_back(None, number)
        assert assistant.draft.state_dict().keys() == draft.state_dict().keys()
        assert all(torch.equal(p, kept[name]) for name, p in assistant.draft.named_parameters())
        assert all(torch.equal(p, drafts.base.get_parameter(name)) for name, p in draft.named_parameters())


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
    whole = load_adapter(adapted(in_fp32(draft), KINDS[kind], "default", CONFIG.seed), moved).merge_and_unload()
    drafts.promote(None, version, moved)
    tried = drafts.tried(moved)
    for name, expected in whole.named_parameters():
        assert torch.equal(drafts.model(None).get_parameter(name), expected.to(dtype))
        assert torch.equal(tried.get_parameter(name), expected.to(dtype))
    assert all(torch.equal(p, drafts.base.get_parameter(name)) for name, p in draft.named_parameters())


def test_matrices_iterated_in_parts_step_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = [torch.nn.Parameter(torch.randn(6, 8)) for _ in range(5)]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in matrices]
    for p, twin in zip(matrices, twins, strict=True):
        p.grad = torch.randn_like(p)
        twin.grad = p.grad.clone()
    Muon(matrices, 0.1).step()
    sizes: list[int] = []
    orthogonal = optimizer.orthogonal
    monkeypatch.setattr(optimizer, "orthogonal", lambda x: sizes.append(len(x)) or orthogonal(x))
    monkeypatch.setattr(optimizer, "AT_ONCE", 2 * 6 * 8)
    Muon(twins, 0.1).step()
    assert sizes == [2, 2, 1]
    for p, twin in zip(matrices, twins, strict=True):
        torch.testing.assert_close(p, twin, rtol=0, atol=models.rounding(8, 8, 8))
