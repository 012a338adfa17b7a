"""What offline distillation assumes of trl and of transformers' trainer; a test here fails first when they move."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from transformers import Trainer, TrainingArguments
from trl import SFTConfig
from trl.experimental.gkd import GKDConfig
from trl.models import unwrap_model_for_generation

from osd_hf.distillation import trainer as offline


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
