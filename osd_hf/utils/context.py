"""Settings of the calling thread that recording, replay, and learning must not depend on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["default_device", "neutral_context"]


@contextmanager
def neutral_context() -> Iterator[None]:
    """
    Compute without the caller's autocast, and create tensors on the CPU by default.

    Entered around our own computations, never around the target's forward, its processors, or its criteria. The grad
    mode and the inference mode stay as they are. The default dtype is shared by all threads and is not changed: code
    inside names the dtype of each tensor that it creates.
    """
    accelerator = torch.accelerator.current_accelerator()
    device_types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    with ExitStack() as stack:
        for device_type in device_types:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(default_device(torch.device("cpu")))
        yield


def default_device(device: torch.device) -> AbstractContextManager[Any]:
    """Create tensors on this device where the caller has set another default device than this one and the CPU."""
    return nullcontext() if torch.get_default_device() in (device, torch.device("cpu")) else device
