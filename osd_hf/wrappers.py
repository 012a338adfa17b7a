"""What lies inside a wrapped model: compiled, or with a PEFT adapter around it."""

from __future__ import annotations

from typing import Any

__all__ = ["is_peft", "uncompiled", "unwrap"]


def uncompiled(model: Any) -> Any:
    """The model that `torch.compile` has wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def is_peft(model: Any) -> bool:
    """Whether it is a `PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def unwrap(model: Any) -> Any:
    """The transformers model whose `generate` runs in the end: inside a compiled model, inside a `PeftModel`."""
    while True:
        inner = uncompiled(model)
        inner = inner.get_base_model() if is_peft(inner) else inner
        if inner is model:
            return model
        model = inner
