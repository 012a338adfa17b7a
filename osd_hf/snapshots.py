"""Learned weights by themselves: taken out of a model, looked at, written into another."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from osd_hf.wrappers import is_peft

__all__ = ["Snapshot", "adapter_state", "is_finite", "learning_context", "write_snapshot"]

Snapshot = dict[str, torch.Tensor]  # learned weights by name; of an adapter, by the names in its file


@contextmanager
def learning_context() -> Iterator[None]:
    """Gradients on, whatever mode the caller is in: answers are often made under `no_grad` or `inference_mode`."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def is_finite(snapshot: Snapshot) -> bool:
    """Whether all weights are numbers."""
    return all(bool(torch.isfinite(weight).all()) for weight in snapshot.values())


def adapter_state(model: Any, adapter: str) -> Snapshot:
    """Weights of an adapter of a `PeftModel`, by the names of its file; without those of embeddings below it, which
    PEFT would add and which it has not changed."""
    from peft import get_peft_model_state_dict

    state: Snapshot = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return state


def write_snapshot(snapshot: Snapshot, draft: Any, template: Any = None) -> None:
    """
    Write learned weights into a draft, in place, cast to its dtype.

    Args:
        snapshot (`dict[str, torch.Tensor]`):
            As [`Updater.snapshot`] gives it.
        draft (`PreTrainedModel`):
            A copy of the draft that was learned from; of one with adapters, with them merged or as it was.
        template (`PeftModel`, *optional*):
            Where the weights are an adapter's: one with that adapter, unmerged.
    """
    with learning_context(), torch.no_grad():
        if template is None:
            served = dict(draft.named_parameters())
            for name, learned in snapshot.items():
                served[name].copy_(learned)
            return
        from peft import set_peft_model_state_dict

        adapted = copy.deepcopy(template)
        set_peft_model_state_dict(adapted, snapshot, adapter_name=str(adapted.active_adapter))
        draft.load_state_dict((adapted if is_peft(draft) else adapted.merge_and_unload()).state_dict())
