"""Where and how a learner computes: its device, its precision, and an attention that this precision has."""

from __future__ import annotations

from typing import Any

import torch

from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, first_line
from osd_hf.models import unwrap

__all__ = ["is_half_only", "learner_device", "learns_in_bf16", "with_own_attention"]

HALF = (torch.bfloat16, torch.float16)


def learner_device(config: OnlineConfig) -> torch.device | None:
    """The device of the configuration's `learner_device`, `None` for the one that the draft serves on; raises
    ConfigError where there is no such device here."""
    if config.learner_device is None:
        return None
    device = torch.device(config.learner_device)
    try:
        torch.zeros(1, device=device).item()  # nothing can be read on the meta device
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ConfigError(
            f"`learner_device` must be a device of this machine, got {config.learner_device!r}: {first_line(error)}. "
            'Name another one, such as "cpu", or None for the one that the draft serves on.'
        ) from error
    return device


def learns_in_bf16(dtype: torch.dtype, device: torch.device) -> bool:
    """
    Whether steps compute in bf16, by autocast, on a master that is in fp32 all the same.

    Args:
        dtype (`torch.dtype`): Of the draft that serves.
        device (`torch.device`): That the learner is on.
    """
    if dtype not in HALF or device.type == "cpu":
        return False
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def is_half_only(attention: str | None) -> bool:
    """Whether an attention implementation of transformers is a kernel for half precision alone: FlashAttention in any
    form, or one from the Hub."""
    return attention is not None and ("flash" in attention or "/" in attention)


def with_own_attention(master: Any) -> Any:
    """The fp32 model itself, whose attention is transformers' own from now on where it was a kernel for half precision
    alone."""
    inner = unwrap(master)
    if is_half_only(getattr(inner.config, "_attn_implementation", None)):
        try:
            inner.set_attn_implementation("sdpa")
        except (ValueError, ImportError):  # not of every model
            inner.set_attn_implementation("eager")
    return master
