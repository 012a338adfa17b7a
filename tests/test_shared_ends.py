"""Drafts cut from a target share its embeddings and output head, which do not learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from osd_hf import OnlineAssistant, OnlineConfig, vocabulary
from osd_hf.layers import copy_layers
from osd_hf.learning.weights import ends_of

CONFIG = OnlineConfig(update_strategy="manual", steps_per_update=2, num_assistant_tokens=3, gate=False)
DEEP: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "qwen3": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "gemma3": {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "t5": {"num_layers": 3, "num_decoder_layers": 3},
}


def addresses(model: Any) -> list[int]:
    return [weight.data_ptr() for _, weight in ends_of(model)]


def serve(assistant: OnlineAssistant, number: int = 6) -> None:
    for ids in models.prompts(number):
        assistant.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("architecture", DEEP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_and_head_are_the_targets_and_only_layers_learn(architecture: str, dtype: torch.dtype) -> None:
    target = models.build(architecture, **DEEP[architecture]).to(dtype)
    before = {name: p.clone() for name, p in target.named_parameters()}
    draft = copy_layers(target, (0, 2))
    frozen = {name for name, _ in ends_of(draft)}
    with OnlineAssistant(target, draft, config=CONFIG) as assistant:
        serve(assistant)
        assert assistant.update().version == 1
        drafts, serving = assistant.drafts, assistant.draft
        assert addresses(draft) == addresses(target) == addresses(serving) == addresses(drafts.base)
        assert addresses(drafts.trial_model(drafts.serving(None).weights)) == addresses(target)
        assert frozen == {name for name, p in serving.named_parameters() if not p.requires_grad}
        assert all(p.requires_grad for p in target.parameters())
        assert all(torch.equal(p, before[name]) for name, p in target.named_parameters())
        others = {name: p for name, p in draft.named_parameters() if name not in frozen}
        assert drafts.serving(None).weights.keys() == others.keys()
        assert any(not torch.equal(p, others[name]) for name, p in serving.named_parameters() if name in others)
        updater = drafts.updater(None)
        assert updater.averaged.keys() == updater.parameters.keys() == others.keys()
        learned = sum(p.numel() for p in others.values())
        state = [t for o in updater.optimizers for s in o.state.values() for t in s.values()]
        assert sum(t.numel() for t in state if torch.is_tensor(t) and t.ndim) <= 2 * learned
        own = [p for p in updater.master.parameters() if p.data_ptr() not in addresses(target)]
        assert sum(p.numel() for p in own) == learned
        assert all(p.dtype == torch.float32 for p in own)


def test_half_precision_ends_are_read_as_in_fp32() -> None:
    target = models.build(**DEEP["llama"]).bfloat16()
    losses, draft = [], copy_layers(target, (0,))
    for is_shared in (True, False):
        draft.config.osd_hf_shares_ends = is_shared
        assistant = OnlineAssistant(target, draft, config=CONFIG)
        assert bool(assistant.drafts.shared) == is_shared
        serve(assistant)
        losses.append(assistant.update(1).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "t5"])
def test_a_saved_draft_is_complete_and_shares_again_with_its_target(architecture: str, tmp_path: Path) -> None:
    target, ids = models.build(architecture, **DEEP[architecture]), models.prompt()
    with OnlineAssistant(target, copy_layers(target, (0,)), config=CONFIG) as assistant:
        serve(assistant)
        assistant.update()
        assistant.save_pretrained(tmp_path)
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if target.config.is_encoder_decoder else {})
        expected = assistant.draft(**inputs).logits
    auto = AutoModelForSeq2SeqLM if target.config.is_encoder_decoder else AutoModelForCausalLM
    draft, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(draft(**inputs).logits, expected)
    assert set(addresses(draft)).isdisjoint(addresses(target))
    again = OnlineAssistant(target, draft, config=CONFIG)
    assert addresses(again.draft) == addresses(target)
    with torch.no_grad():
        target.get_input_embeddings().weight[5, 3] += 1  # of another target
    other = OnlineAssistant(target, draft, config=CONFIG)
    assert other.draft.get_input_embeddings().weight.data_ptr() not in addresses(target)
    assert ends_of(draft)[0][0] in other.drafts.updater(None).averaged


def test_a_draft_that_was_not_cut_from_the_target_learns_all_weights() -> None:
    target = models.build()
    assistant = OnlineAssistant(target, models.draft_of(target, noise=0), config=CONFIG)
    assert assistant.drafts.updater(None).averaged.keys() == dict(target.named_parameters()).keys()
    assert set(addresses(assistant.draft)).isdisjoint(addresses(target))


def test_the_draft_follows_changes_of_the_targets_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MIN_VOCAB_SIZE": 1, "SIZES": (16,)}.items():
        monkeypatch.setattr(vocabulary, name, value)
    target = models.build(**DEEP["llama"])
    config = OnlineConfig(update_strategy="manual", candidates="draft", gate=False, steps_per_update=1)
    assistant = OnlineAssistant(target, copy_layers(target, (0,)), config=config)
    serve(assistant)
    assistant.update()
    optimizer = torch.optim.SGD(target.parameters(), 0.5)
    ids = models.prompt()
    target(ids, labels=ids).loss.backward()
    before = assistant.drafting.model()[0].get_output_embeddings().weight.clone()
    optimizer.step()
    model, token_ids = assistant.drafting.model()
    head = model.get_output_embeddings().weight
    assert torch.equal(head, target.lm_head.weight[token_ids])
    assert not torch.equal(head, before)
    assert addresses(assistant.draft) == addresses(target)
    assert addresses(assistant.drafts.updater(None).master) == addresses(target)
    serve(assistant)
    assert assistant.update().steps == 1
