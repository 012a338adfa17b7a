"""The command `osd-hf plan`: what a pair that learns will take, before anything is loaded."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

from osd_hf.cli.arguments import flag, in_groups
from osd_hf.cli.flags import DraftRevision, Dtype, Learning, Reporting, TargetRevision, adapters, learning
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError
from osd_hf.evaluation.display import text_table
from osd_hf.memory_plan import MemoryPlan, memory_plan
from osd_hf.models import load_config
from osd_hf.utils.report import provenance

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip
PLACES = ("device", "learner", "host")
RANK = 16  # of the adapters that are tried where the whole draft does not fit

QUANTIZATIONS = {
    4: {"load_in_4bit": True},
    8: {"load_in_8bit": True},
}  # fmt: skip

NO_BYTES = dict.fromkeys(
    ("text_scope", "compile_target", "divergence", "learn_from", "replay_fraction", "learning_rate", "seed"),
    "it changes neither the memory that is planned nor the time",
)  # fmt: skip

_models, _requests = in_groups("models", "requests")


@dataclass(frozen=True, kw_only=True)
class PlanSettings(TargetRevision, DraftRevision, Learning, Reporting):
    """The flags of `osd-hf plan`."""

    target: str = _models("Hub id or folder of the model that answers; its configuration alone is read",
                          required=True, metavar="ID|PATH")  # fmt: skip
    draft: str = _models("Hub id or folder of the model that drafts and learns, likewise", required=True,
                         metavar="ID|PATH")  # fmt: skip
    target_dtype: Dtype = _models("dtype of the target: auto is the configuration's own", "auto")
    target_bits: int | None = _models("bits of the target's weights where it is quantized as it is loaded, by "
                                      "bitsandbytes", choices=sorted(QUANTIZATIONS))  # fmt: skip
    draft_dtype: Dtype = _models("dtype of the draft: auto is the configuration's own", "auto")
    lora_rank: int | None = _models("learn adapters of this rank on all linear layers", metavar="R")
    device_memory: str | None = flag("memory of the device, such as 24GB or 80GiB, to say what fits", metavar="SIZE")
    prompt_tokens: int = _requests("tokens of a prompt", 512, metavar="N")
    max_new_tokens: int = _requests("most tokens of an answer", 256, metavar="N")
    rows: int = _requests("prompts answered at once", 1, metavar="N")
    config: OnlineConfig = learning(**NO_BYTES)

    @property
    def device_bytes(self) -> int | None:
        """The memory of the device; raises ConfigError where it is no size."""
        if self.device_memory is None:
            return None
        found = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", self.device_memory.strip().lower())
        try:
            return int(float(found[1]) * UNITS[found[2].upper()]) if found else int("")
        except (ValueError, KeyError):
            raise ConfigError(
                f"--device-memory must be a size such as 24GB or 80GiB, got {self.device_memory!r}."
            ) from None


def plan_command(settings: PlanSettings) -> int:
    """Plan and report; returns the exit code."""
    settings.check_counts("lora_rank", "prompt_tokens", "max_new_tokens", "rows")
    settings.check_auto()
    room = settings.device_bytes
    configs = (
        load_config(settings.target, **settings.fetching), load_config(settings.draft, **settings.draft_fetching)
    )  # fmt: skip
    if settings.target_bits is not None:
        if getattr(configs[0], "quantization_config", None) is not None:
            raise ConfigError(f"--target-bits is for targets that are not quantized yet; {settings.target} is.")
        configs[0].quantization_config = QUANTIZATIONS[settings.target_bits]
    plan = _planned(settings, configs, settings.lora_rank, settings.config)
    report: dict[str, Any] = {
        "provenance": provenance(),
        "settings": settings.config.to_dict(),
        "target_bits": settings.target_bits,
        **plan.to_dict(),
    }
    rows = [
        [part.name, part.when, part.place, _gigabytes(part.bytes), f"{part.bytes / plan.draft_parameters:.2f}"]
        for part in sorted(plan.parts, key=lambda part: PLACES.index(part.place))
    ]
    most = {place: plan.most_bytes(place) for place in PLACES}
    rows += [["at most", "", place, _gigabytes(count), ""] for place, count in most.items() if count]
    settings.say(text_table(["what", "when", "where", "GB", "bytes a draft parameter"], rows, left=3))
    if room is not None:
        ranks = [None, RANK] if settings.lora_rank is None else [settings.lora_rank]
        one = replace(settings.config, batch_size=1)
        ways = {
            "as set": settings.config, "batch_size 1": one,
        }  # fmt: skip
        report["choices"], lines = [], []
        for rank, way in itertools.product(ranks, ways):
            peak = _planned(settings, configs, rank, ways[way]).peak_bytes
            report["choices"].append({"lora_rank": rank, "settings": way, "peak_bytes": peak, "fits": peak <= room})
            what = "the whole draft" if rank is None else f"adapters of rank {rank}"
            lines.append([what, way, _gigabytes(peak), "fits" if peak <= room else "does not fit"])
        header = ["what learns", "settings", "GB at most", f"in {settings.device_memory}"]
        settings.say("\n" + text_table(header, lines))
    settings.say(
        f"\n{plan.learned_parameters:,} of {plan.draft_parameters:,} parameters of the draft learn, from up to "
        f"{plan.learn_tokens:,} tokens at once."
    )
    if plan.learning_share:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in plan.learning_share.items())
        settings.say(
            f"Share of the time that learning takes at full effort, by a model of operations and bandwidth: {shares}."
        )
    settings.write_json(report)
    return 0


def _planned(settings: PlanSettings, configs: tuple[Any, Any], rank: int | None, config: OnlineConfig) -> MemoryPlan:
    return memory_plan(
        *configs, config, peft_config=adapters(rank),
        target_dtype=settings.target_dtype, draft_dtype=settings.draft_dtype, prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.max_new_tokens, rows=settings.rows,
    )  # fmt: skip


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3f}"
