"""What lies inside a wrapped model: compiled, or with a PEFT adapter around it."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["is_peft", "merged", "ties_embeddings", "uncompiled", "untie", "unwrap"]

MOST_WRAPPERS = 16  # one inside the other; what makes up every attribute that it is asked for has no end


def uncompiled(model: Any) -> Any:
    """The model that `torch.compile` has wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def is_peft(model: Any) -> bool:
    """Whether it is a `PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def unwrap(model: Any) -> Any:
    """The transformers model whose `generate` runs in the end: inside a compiled model, inside a `PeftModel`."""
    for _ in range(MOST_WRAPPERS):
        inner = uncompiled(model)
        inner = inner.get_base_model() if is_peft(inner) else inner
        if inner is model:
            break
        model = inner
    return model


def merged(model: Any) -> Any:
    """A copy of a `PeftModel` as an ordinary model, its adapter merged into the weights; the model itself where there
    is none, or one that cannot be merged (soft prompts)."""
    if not is_peft(model) or not hasattr(model.base_model, "merge_and_unload"):
        return model
    return copy.deepcopy(model).merge_and_unload()


def ties_embeddings(model: Any) -> bool:
    """Whether input embeddings and output head are one tensor."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def untie(model: Any) -> None:
    """Give a model with tied embeddings an output head of its own, in place. An adapter on one of the two, merged into
    a tensor that is both, would change the other as well."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
