"""What of a draft learns, and by which steps."""

from __future__ import annotations

from typing import Any

import torch

from osd_hf.config import OnlineConfig
from osd_hf.errors import UnsupportedModelError
from osd_hf.wrappers import is_peft

__all__ = ["optimizers", "trainable_parameters"]


def trainable_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that learn, by name: the adapters of a model that has some, otherwise all; raises
    UnsupportedModelError where there is none."""
    # Adapters, of a `PeftModel` or added by transformers, have frozen the rest, and are saved without it.
    if not is_peft(model) and not getattr(model, "_hf_peft_config_loaded", False):
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise UnsupportedModelError(
            f"The draft ({type(model).__name__}) has no parameter that could learn. Load its adapter with "
            "`is_trainable=True`, or use a draft in full or half precision."
        )
    return found


def optimizers(
    model: Any, parameters: dict[str, torch.nn.Parameter], config: OnlineConfig
) -> list[torch.optim.Optimizer]:
    """Muon (arXiv 2502.16982) is for matrices that map hidden states; embeddings and vectors go to AdamW."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    if head is not None:
        embeddings.add(id(head.weight))
    matrices = [p for p in parameters.values() if p.ndim == 2 and id(p) not in embeddings]
    if config.optimizer == "adamw" or not matrices:
        return [torch.optim.AdamW(parameters.values(), lr=config.learning_rate, weight_decay=0.0)]
    hidden = {id(p) for p in matrices}
    rest = [p for p in parameters.values() if id(p) not in hidden]
    muon = torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, *([torch.optim.AdamW(rest, lr=config.learning_rate, weight_decay=0.0)] if rest else [])]
