"""Sampled answers in a store, and drafts that are saved without the ends of their target."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from osd_hf import CorrectionStore, bundled
from osd_hf.distillation.answers import is_held_out, sample_answers, sampling_of, split_answers
from osd_hf.errors import UnsupportedModelError
from osd_hf.layers import copy_layers, load_layers
from osd_hf.learning.weights import ends_of
from osd_hf.vocabulary import usual_tokens

HOW = {"max_new_tokens": 8, "batch_size": 16, "sampling": {"temperature": 0.7}, "show_progress": False}


def test_answers_are_counted_continued_and_stored_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = models.build()
    prompts = [[5 + i % 20, 6 + i // 20, 7] for i in range(80)]

    def sampled(tokens: int, **changes: Any) -> Any:
        with CorrectionStore(tmp_path) as store:
            return sample_answers(target, prompts, store, num_tokens=tokens, **{**HOW, **changes})

    def stored() -> list[Any]:
        with CorrectionStore(tmp_path) as store:
            return [(t.prompt_ids.tobytes(), t.is_sampled, t.completion_ids.tobytes()) for t in store]

    first = sampled(200)
    assert 200 <= first["tokens"] < 200 + 16 * 8
    before = stored()
    second = sampled(1200)
    after = stored()
    assert second["tokens"] >= 1200 and set(before) < set(after) and len(set(after)) == len(after)
    with CorrectionStore(tmp_path) as store:
        training, held_out = split_answers(store)
    assert second == {**second, "tokens": sum(map(len, training)), "answers": len(training)}
    assert not {t.prompt_ids.tobytes() for t in training} & {t.prompt_ids.tobytes() for t in held_out}
    assert len(held_out) == 2 * sum(map(is_held_out, prompts)) == 2 * sum(t.is_sampled for t in held_out) > 0
    # No prompt is answered three times before all others are answered twice.
    times = [sum(t.prompt_ids.tolist() == prompt for t in training) for prompt in prompts if not is_held_out(prompt)]
    assert max(times) - min(times) <= 1
    # The same answers again: it ends, and says so.
    last = sampled(10**6, sampling={"top_k": 1})
    assert last["tokens"] < 10**6 and last["duplicates"] and "repeat themselves" in caplog.text
    warned = [m for m in caplog.messages if "sampled otherwise" in m]  # by the last run alone
    assert len(warned) == 1 and warned[0].endswith("answers in the store were sampled otherwise than by {'top_k': 1}.")


def test_sampling_is_the_targets_own_unless_changed() -> None:
    target = models.build()
    assert sampling_of(target) == {}
    target.generation_config.update(temperature=0.2, top_p=0.8, top_k=50)
    assert sampling_of(target, temperature=0.7, top_k=0) == {"temperature": 0.7, "top_p": 0.8}


def test_layers_are_saved_without_the_ends_that_the_target_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "recipes"))
    target = models.build()
    draft = copy_layers(target, [0])
    with torch.no_grad():
        draft.model.norm.weight.mul_(2)
    draft.generation_config.num_assistant_tokens = 3
    importlib.import_module("smollm2_draft").save_layers(draft, tmp_path)
    loaded = load_layers(target, tmp_path)
    assert all(own is not theirs and own.data_ptr() == theirs.data_ptr()
               for (_, own), (_, theirs) in zip(ends_of(loaded), ends_of(target), strict=True))  # fmt: skip
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(loaded(ids).logits, draft(ids).logits, rtol=0.05, atol=0.05)
    assert loaded.generation_config.num_assistant_tokens == 3
    size = sum(p.numel() for n, p in draft.named_parameters() if "embed" not in n and "lm_head" not in n)
    assert (tmp_path / "model.safetensors").stat().st_size < 2 * size + 4000
    with pytest.raises(UnsupportedModelError, match="of another target"):
        load_layers(models.build(hidden_size=target.config.hidden_size * 2), tmp_path)


def test_the_bundled_draft_of_smollm2_is_small_and_shares_its_targets_ends() -> None:
    folder = Path(bundled.__file__).with_name("smollm2_draft")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 16e6
    config = LlamaConfig.from_pretrained(folder)
    assert config.num_hidden_layers == json.loads((folder / "metrics.json").read_text())["num_layers"]
    config.num_hidden_layers += 1
    target = LlamaForCausalLM(config)  # of its shape
    draft = load_layers(target, folder)
    assert draft.model.embed_tokens.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    assert not torch.equal(draft.model.norm.weight, target.model.norm.weight)
    assert usual_tokens(draft)
