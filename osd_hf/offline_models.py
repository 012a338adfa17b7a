"""What a run begins and ends with: its settings and checkpoint, the copy that is trained, what is set on models."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from osd_hf.errors import ConfigError, StateError, UnsupportedModelError
from osd_hf.optimizers import trainable_parameters
from osd_hf.wrappers import is_peft, merged, unwrap

__all__ = [
    "NoTarget",
    "as_it_was",
    "check_adapters",
    "check_types",
    "last_checkpoint",
    "learner_of",
    "let_run",
    "trained_draft",
    "without_dropout",
]


def check_adapters(draft: Any, peft_config: Any) -> None:
    """Refuse adapters that could not be merged at the end; raises ConfigError or UnsupportedModelError."""
    if peft_config is not None:
        from peft import PEFT_TYPE_TO_TUNER_MAPPING

        if is_peft(draft):
            raise ConfigError(
                "The draft is a `PeftModel`, and `peft_config` was given as well. Leave `peft_config` out, or merge "
                "the draft's adapter first (`draft.merge_and_unload()`)."
            )
        if not hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(peft_config.peft_type), "merge_and_unload"):
            raise ConfigError(
                f"`peft_config` is a {type(peft_config).__name__}, which cannot be merged into the draft's weights. "
                "Use one that can, such as `LoraConfig`."
            )
    elif is_peft(draft) and not hasattr(draft.base_model, "merge_and_unload"):
        raise UnsupportedModelError(
            f"The draft's adapter ({type(draft.active_peft_config).__name__}) cannot be merged into its weights. Use "
            "one that can, such as LoRA."
        )


def learner_of(draft: Any, peft_config: Any) -> Any:
    """A copy of the draft to train, in fp32 unless `peft_config` adds adapters that are; in evaluation mode, from
    which the trainer takes it. Raises UnsupportedModelError where nothing could learn."""
    learner = copy.deepcopy(draft).eval()
    if peft_config is None:
        learner = learner.float()
        trainable_parameters(learner)
    return learner


def trained_draft(trainer: Any, draft: Any) -> Any:
    """A copy of the draft with what was learned; trainers leave much on the model that they train."""
    learner = trainer.accelerator.unwrap_model(trainer.model)
    if is_peft(learner):
        for model in (learner, unwrap(learner)):
            vars(model).pop("forward", None)
        learned = merged(learner).state_dict()
    else:
        learned = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    trained = merged(draft) if is_peft(draft) else copy.deepcopy(draft)
    if learned:  # shards are gathered in the main process only
        trained.load_state_dict(learned)
    return trained.eval()


class NoTarget(torch.nn.Module):
    """Stands where GKD wants a target, of which it looks at the vocabulary."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def let_run(model: Any) -> None:
    """Let `model(run=f)` give `f()`: what wraps a model for several processes sees only what its forward does."""
    inner = model.forward

    @functools.wraps(inner)  # `generate` reads the signature
    def forward(*args: Any, run: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) if run is None else run()

    model.forward = forward


def without_dropout(model: Any) -> None:
    """Also where a model keeps the probability as a number and not as a module, which trl passes over."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@contextmanager
def as_it_was(target: Any) -> Iterator[None]:
    """What preparing a target for several processes and precisions sets on the model itself is taken back."""
    if target is None:
        yield
        return
    was_training, before = target.training, dict(vars(target))
    target.eval()
    try:
        yield
    finally:
        for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
            vars(target).pop(name, None)
            if name in before:
                vars(target)[name] = before[name]
        target.train(was_training)


def check_types(config: Any) -> None:
    """Refuse anything but a number where a field takes nothing else; raises ConfigError. The trainers do not ask, and
    fail on what a file or a flag says much later."""
    for f in fields(config):
        value = getattr(config, f.name)
        words = set(re.findall(r"\w+", f.type.__name__ if isinstance(f.type, type) else str(f.type)))
        if value == f.default or not words & {"int", "float"} or words & {"str", "bool", "list", "dict"}:
            continue
        kind, rule = (Real, "a number") if "float" in words else (Integral, "an integer")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"`{f.name}` must be {rule}, got {value!r}.")


def last_checkpoint(config: Any) -> str | None:
    """Where to go on. The trainer's state is written last, so that a checkpoint without it was cut off; raises
    StateError where there is none."""
    given = config.resume_from_checkpoint
    if given is not True:
        return given or None
    found = [path.parent for path in Path(config.output_dir).glob("checkpoint-*/trainer_state.json")]
    whole = [path for path in found if re.fullmatch(r"checkpoint-\d+", path.name)]  # not a copy by another name
    if not whole:
        raise StateError(f"There is no checkpoint in {config.output_dir} to resume from. Leave it out to begin anew.")
    return str(max(whole, key=lambda path: int(path.name.removeprefix("checkpoint-"))))
