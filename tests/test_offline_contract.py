"""What offline distillation assumes of trl's and transformers' trainers; a test here fails first when they move."""

from __future__ import annotations

import copy
import inspect
from dataclasses import fields
from typing import Any

import datasets
import models
import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.models.utils import unwrap_model_for_generation

from osd_hf.distillation import trainer as offline


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_classes_stand_to_each_other_as_assumed() -> None:
    # `training_step` of the class behind `GKDTrainer` is called past it.
    assert GKDTrainer.__mro__[1] is SFTTrainer
    assert issubclass(SFTTrainer, Trainer)
    assert issubclass(Seq2SeqTrainer, Trainer)
    assert issubclass(GKDConfig, SFTConfig)
    assert issubclass(SFTConfig, TrainingArguments)
    assert issubclass(Seq2SeqTrainingArguments, TrainingArguments)


def test_methods_that_are_overridden_or_called_take_what_is_assumed() -> None:
    assert parameters(Trainer.get_batch_samples) == ["self", "epoch_iterator", "num_batches", "device"]
    assert parameters(Trainer._get_num_items_in_batch) == ["self", "batch_samples", "device"]
    for kind in (GKDTrainer, Seq2SeqTrainer):
        assert parameters(kind.compute_loss) == ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]
        assert parameters(kind.evaluate)[:4] == ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"]
    assert "gradient_checkpointing_kwargs" in parameters(unwrap_model_for_generation)
    assert Trainer.loss_is_scaled_for_ga is None


def test_settings_that_are_read_or_refused_exist() -> None:
    names = {f.name for f in fields(GKDConfig)}
    read = {
        "lmbda", "beta", "temperature", "max_new_tokens", "disable_dropout", "metric_for_best_model", "max_length",
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "bf16", "average_tokens_across_devices",
        "eval_on_start", "resume_from_checkpoint", "push_to_hub", "dataloader_pin_memory",
    }  # fmt: skip
    assert read | set(offline._WITHOUT_MEANING) <= names
    # And none of TRL's own that is neither read nor refused.
    own = names - {f.name for f in fields(TrainingArguments)}
    elsewhere = {"activation_offloading", "trust_remote_code"}
    assert own <= read | set(offline._WITHOUT_MEANING) | elsewhere


def trainer(folder: Any, teacher: Any, draft: Any, **settings: Any) -> Any:
    config = offline.DistillConfig(
        output_dir=str(folder), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    return GKDTrainer(
        model=draft, teacher_model=teacher, args=config, data_collator=lambda rows: {"rows": rows},
        train_dataset=datasets.Dataset.from_dict({"row": [0, 1]}), processing_class=models.tokenizer(), **settings,
    )  # fmt: skip


def test_gkd_takes_a_module_with_a_configuration_for_a_target(tmp_path: Any) -> None:
    draft = models.build()
    stand_in = offline.NoTarget(draft.config)
    made = trainer(tmp_path, stand_in, draft)
    assert made.teacher_model is stand_in
    with pytest.raises(ValueError, match="vocab_size"):
        trainer(tmp_path, offline.NoTarget(models.build(vocab_size=48).config), draft)


def test_gkd_hands_batches_on_as_the_collator_made_them(tmp_path: Any) -> None:
    draft = models.build()
    made = trainer(tmp_path, models.build(), draft)
    rows = [row["row"] for batch in made.get_train_dataloader() for row in batch["rows"]]
    assert sorted(rows) == [0, 1]


def test_the_trainer_counts_labels_of_both_kinds_alike(tmp_path: Any) -> None:
    made = trainer(tmp_path, models.build(), models.build())
    made.model_accepts_loss_kwargs = True
    labels = torch.tensor([[-100, 5, 6, -100], [-100, 7, -100, -100]])
    for shifts in (True, False):
        made._loss_shifts_labels = shifts
        count = made._get_num_items_in_batch([{"labels": labels}, {"labels": labels}], torch.device("cpu"))
        assert int(count) == 6


def test_a_head_of_trl_s_leaves_the_plain_forward_as_it_was(tmp_path: Any) -> None:
    draft = models.build()
    plain = copy.deepcopy(draft)
    trainer(tmp_path, models.build(), draft)
    ids = models.prompt()
    assert torch.equal(draft(ids).logits, plain(ids).logits)
    assert "logits_to_keep" in parameters(draft.forward)
    assert "forward" in vars(draft)  # which is why what was learned goes into a fresh copy
