"""The command `osd-hf env`: what a report of a bug needs to say of the machine and of what is installed."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

import torch

from osd_hf.cli.flags import Reporting
from osd_hf.utils.report import installed, provenance

PACKAGES = "osd_hf torch transformers peft trl accelerate gradio datasets huggingface_hub bitsandbytes torchao".split()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class EnvSettings(Reporting):
    """The flags of `osd-hf env`."""


def env_command(settings: EnvSettings) -> int:
    """Say what is here; returns the exit code."""
    origin = provenance()
    told, kind = os.environ.get("OMP_NUM_THREADS", "not set"), torch.accelerator.current_accelerator()
    accelerators = [f"{kind}:{number}" for number in range(torch.accelerator.device_count())]
    facts: dict[str, Any] = {
        **{f"{name} version": installed(name) or "not installed" for name in PACKAGES},
        "commit": origin["commit"] or "not of a checkout",
        "Python version": platform.python_version(),
        "platform": platform.platform(),
        "processor": f"{origin['processor']}, {origin['cpu_count']} cores",
        "threads of torch": f"{torch.get_num_threads()} (OMP_NUM_THREADS: {told})",
        "accelerators": ", ".join(map(_accelerator, accelerators)) or "none",
        "CUDA or ROCm of torch": torch.version.cuda or getattr(torch.version, "hip", None) or "none",
        **{f"dtypes on {device}": ", ".join(_dtypes(device)) for device in ("cpu", *accelerators)},
    }
    settings.say("Copy this into a report, and add the command, what came of it, and what you expected:\n")
    for name, value in facts.items():
        settings.say(f"- {name}: {value}")
    settings.write_json(facts)
    return 0


def _accelerator(device: str) -> str:
    """Its name and memory, as far as torch knows them."""
    properties_of = getattr(torch.get_device_module(device), "get_device_properties", None)
    if properties_of is None:  # as of Apple's
        return device
    properties = properties_of(device)
    return f"{properties.name} ({properties.total_memory / (1 << 30):.0f} GiB)"


def _dtypes(device: str) -> list[str]:
    """Those that matrices are multiplied in there."""
    return [str(dtype).removeprefix("torch.") for dtype in DTYPES if _multiplies(device, dtype)]


def _multiplies(device: str, dtype: torch.dtype) -> bool:
    try:
        ones = torch.ones(2, 2, device=device, dtype=dtype)
        return bool((ones @ ones).sum() == 8)
    except (RuntimeError, TypeError):  # the latter for a dtype that a device lacks
        return False
