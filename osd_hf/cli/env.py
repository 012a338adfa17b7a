"""The command `osd-hf env`: versions and hardware for a bug report, or the memory that models need."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate.utils import convert_file_size_to_int

from osd_hf.cli.settings import (
    PAPER,
    PLACEMENT,
    CommandParser,
    Dtype,
    PairSettings,
    Reporting,
    flag,
    learning_parser,
    lora_config,
)
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError
from osd_hf.evaluation.display import text_table
from osd_hf.memory_plan import memory_plan
from osd_hf.models import load_config
from osd_hf.utils.report import installed, provenance

PACKAGES = "osd_hf torch transformers peft trl accelerate gradio datasets huggingface_hub bitsandbytes torchao".split()
PLANNED = "models pair"  # one of which a memory plan needs
PLACES = ("device", "learner", "host")
QUANTIZATIONS: dict[int, dict[str, bool]] = {4: {"load_in_4bit": True}, 8: {"load_in_8bit": True}}
# Fields of the configuration that have an effect on the memory.
HAVE_EFFECT = set("num_assistant_tokens candidates num_logprobs batch_size buffer_size learner_device".split())
HAVE_EFFECT |= {"optimizer", "weight_average", "gate"}


@dataclass(frozen=True, kw_only=True)
class EnvSettings(PairSettings, Reporting):
    """Flags of `osd-hf env`."""

    models: Sequence[str] = flag("models of a memory plan", (), positional=True, nargs="*", metavar="MODEL")
    target_dtype: Dtype = flag("dtype of the target; auto = the configuration's", "auto", needs=PLANNED)
    draft_dtype: Dtype = flag("dtype of the draft; auto = the configuration's", "auto", needs=PLANNED)
    target_bits: int | None = flag("quantize the target", None, needs=PLANNED, choices=sorted(QUANTIZATIONS))
    lora_rank: int | None = flag("train adapters of this rank only", None, minimum=1, needs=PLANNED)
    device_memory: str | None = flag("memory of the device, such as 24GB", None, needs=PLANNED, metavar="SIZE")
    prompt_tokens: int = flag("tokens of a prompt", 512, minimum=1, needs=PLANNED)
    max_new_tokens: int = flag("maximum tokens of an answer", 256, minimum=1, needs=PLANNED)
    rows: int = flag("prompts per request", 1, minimum=1, needs=PLANNED)
    paper: bool = flag(PAPER, False, needs=PLANNED)


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command."""
    without = {field.name for field in fields(OnlineConfig)} - HAVE_EFFECT
    return learning_parser(EnvSettings, arguments, without={*without, *PLACEMENT, "target", "draft"}, **how)


def env_command(settings: EnvSettings, config: OnlineConfig) -> int:
    """Show the environment, or the memory plan of the named models; returns the exit code."""
    if settings.models or settings.pair:
        return _plan(settings, config)
    if config != OnlineConfig():
        raise ConfigError("Settings of learning are for the memory plan of two MODELs: name them, or a --pair.")
    origin = provenance()
    set_threads, kind = os.environ.get("OMP_NUM_THREADS", "not set"), torch.accelerator.current_accelerator()
    accelerators = [f"{kind}:{number}" for number in range(torch.accelerator.device_count())]
    facts: dict[str, Any] = {
        **{f"{name} version": installed(name) or "not installed" for name in PACKAGES},
        "commit": origin["commit"] or "not a checkout",
        "Python version": platform.python_version(),
        "platform": platform.platform(),
        "processor": f"{origin['processor']}, {origin['cpu_count']} cores",
        "threads of torch": f"{torch.get_num_threads()} (OMP_NUM_THREADS: {set_threads})",
        "accelerators": ", ".join(map(_accelerator, accelerators)) or "none",
        "CUDA or ROCm of torch": torch.version.cuda or getattr(torch.version, "hip", None) or "none",
    }
    settings.say("Copy this into a report, with the command, its output, and what you expected:\n")
    for name, value in facts.items():
        settings.say(f"- {name}: {value}")
    settings.write_json(facts)
    return 0


def _accelerator(device: str) -> str:
    """Return the name and memory of a device, as far as torch knows them."""
    properties_of = getattr(torch.get_device_module(device), "get_device_properties", None)
    if properties_of is None:  # Apple's devices
        return device
    properties = properties_of(device)
    return f"{properties.name} ({properties.total_memory / (1 << 30):.0f} GiB)"


def _plan(settings: EnvSettings, config: OnlineConfig) -> int:
    """Show the memory plan of a pair."""
    names, device_bytes = settings.models, None
    if settings.device_memory is not None:
        try:
            device_bytes = int(convert_file_size_to_int(settings.device_memory))
        except ValueError as error:
            raise ConfigError(f"--device-memory must be a size such as 24GB, got {settings.device_memory}.") from error
    if settings.pair:
        target, draft = (model.config for model in settings.load_pair()[:2])
    elif len(names) == 2:
        target = load_config(names[0], **settings.fetching)
        draft = load_config(names[1], **settings.draft_fetching)
    else:
        raise ConfigError(f"Name two models, the target and the draft, got {len(names)}.")
    if settings.target_bits is not None:
        if getattr(target, "quantization_config", None) is not None:
            raise ConfigError("--target-bits is for a target that is not quantized; this one is.")
        target.quantization_config = QUANTIZATIONS[settings.target_bits]
    plan = memory_plan(
        target,
        draft,
        config,
        peft_config=lora_config(settings.lora_rank),
        target_dtype=settings.target_dtype,
        draft_dtype=settings.draft_dtype,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.max_new_tokens,
        rows=settings.rows,
    )
    rows = [
        [part.name, part.when, part.place, f"{part.bytes / 1e9:.3f}", f"{part.bytes / plan.draft_parameters:.2f}"]
        for part in sorted(plan.parts, key=lambda part: PLACES.index(part.place))
    ]
    most = {place: plan.most_bytes(place) for place in PLACES}
    rows += [["at most", "", place, f"{count / 1e9:.3f}", ""] for place, count in most.items() if count]
    settings.say(text_table(["purpose", "when", "where", "GB", "bytes per draft parameter"], rows, left=3))
    report = {"provenance": provenance(), "settings": config.to_dict(), "target_bits": settings.target_bits}
    report |= plan.to_dict()
    if device_bytes is not None:
        report["fits"] = plan.peak_bytes <= device_bytes
        verdict = "fits" if report["fits"] else "does not fit: try --lora-rank 16, --batch-size 1, or --target-bits 4"
        settings.say(f"\n{plan.peak_bytes / 1e9:.1f} GB in {settings.device_memory}: {verdict}.")
    settings.say(
        f"\n{plan.learned_parameters:,} of {plan.draft_parameters:,} parameters of the draft learn, from up to "
        f"{plan.learn_tokens:,} tokens at once."
    )
    settings.write_json(report)
    return 0
