"""What training sets on models, and takes back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["NoTarget", "as_it_was", "let_run", "without_dropout"]


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
