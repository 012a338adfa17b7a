"""What offline distillation assumes of trl and of transformers' trainer; a test here fails first when they move."""

from __future__ import annotations

import copy
import inspect
from dataclasses import fields
from typing import Any

import models
import torch
from transformers import Trainer, TrainingArguments
from trl import SFTConfig
from trl.experimental.gkd import GKDConfig
from trl.models import unwrap_model_for_generation

from osd_hf.distillation import trainer as offline
from osd_hf.trace import bare_trace


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_classes_stand_to_each_other_as_assumed() -> None:
    assert offline.DistillTrainer.__mro__[1] is Trainer
    assert issubclass(GKDConfig, SFTConfig)
    assert issubclass(SFTConfig, TrainingArguments)


def test_methods_that_are_overridden_or_called_take_what_is_assumed() -> None:
    assert parameters(Trainer.get_batch_samples) == ["self", "epoch_iterator", "num_batches", "device"]
    assert parameters(Trainer._get_num_items_in_batch) == ["self", "batch_samples", "device"]
    assert parameters(Trainer.compute_loss) == ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]
    assert parameters(Trainer.evaluate) == ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"]
    assert "gradient_checkpointing_kwargs" in parameters(unwrap_model_for_generation)
    assert Trainer.loss_is_scaled_for_ga is None


def test_settings_that_are_read_or_refused_exist() -> None:
    names = {f.name for f in fields(GKDConfig)}
    read = {
        "lmbda", "beta", "temperature", "max_new_tokens", "disable_dropout", "metric_for_best_model", "max_length",
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "bf16", "average_tokens_across_devices",
        "eval_on_start", "resume_from_checkpoint", "push_to_hub", "dataloader_pin_memory", "remove_unused_columns",
    }  # fmt: skip
    assert read | set(offline._WITHOUT_MEANING) <= names
    # And none of TRL's own that is neither read nor refused.
    own = names - {f.name for f in fields(TrainingArguments)}
    assert own <= read | set(offline._WITHOUT_MEANING) | {"trust_remote_code"}


def trainer(folder: Any, target: Any, draft: Any) -> Any:
    config = offline.DistillConfig(
        output_dir=str(folder), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    config.remove_unused_columns = False
    rows = [bare_trace([5, 6], [7], models.VOCAB)] * 2
    return offline.DistillTrainer(target, draft, offline.Data(rows, target, None), config, models.tokenizer())


def test_the_trainer_hands_batches_on_as_the_collator_made_them(tmp_path: Any) -> None:
    made = trainer(tmp_path, models.build(), models.build())
    rows = [row for batch in made.get_train_dataloader() for row in batch["rows"]]
    assert sorted(rows) == [0, 1]


def test_the_trainer_counts_labels_of_both_kinds_alike(tmp_path: Any) -> None:
    made = trainer(tmp_path, models.build(), models.build())
    assert made.model_accepts_loss_kwargs
    labels = torch.tensor([[-100, 5, 6, -100], [-100, 7, -100, -100]])
    for shifts in (True, False):
        made._loss_shifts_labels = shifts
        count = made._get_num_items_in_batch([{"labels": labels}, {"labels": labels}], torch.device("cpu"))
        assert int(count) == 6


def test_the_trainer_leaves_the_plain_forward_as_it_was(tmp_path: Any) -> None:
    draft = models.build()
    plain = copy.deepcopy(draft)
    learner = trainer(tmp_path, models.build(), draft).model
    ids = models.prompt()
    assert torch.equal(learner(ids).logits, plain(ids).logits)
    assert torch.equal(draft(ids).logits, plain(ids).logits)
    assert "logits_to_keep" in parameters(learner.forward)
    assert "forward" in vars(learner)  # which is why what was learned goes into a fresh copy
