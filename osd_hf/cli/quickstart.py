"""The command `osd-hf quickstart`: the main job on the bundled pair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from osd_hf.bench.quickstart import QuickstartSizes, quickstart
from osd_hf.cli.flags import FAILED, Reporting, flag, part
from osd_hf.errors import ConfigError
from osd_hf.pair import load_pair


@dataclass(frozen=True, kw_only=True)
class QuickstartSettings(Reporting):
    """The flags of `osd-hf quickstart`."""

    sizes: QuickstartSizes = part(metavar="N")
    seed: int = flag("of the prompts and of learning", 0)
    threads: int | None = flag("of torch, at least 1; measured by default", metavar="N")
    target: str | None = flag("another target for the same prompts", metavar="ID|PATH")
    draft: str | None = flag("another draft for the same prompts", metavar="ID|PATH")
    output_dir: Path = flag("overwritten", Path("osd_hf_quickstart"))


def quickstart_command(settings: QuickstartSettings) -> int:
    """Serve, learn and measure; returns the exit code."""
    if (settings.target is None) != (settings.draft is None):
        raise ConfigError("Give both --target and --draft, or none for the bundled pair.")
    pair = load_pair(settings.target, settings.draft, dtype="float32", device="cpu")
    report = quickstart(
        pair, settings.sizes, seed=settings.seed, threads=settings.threads, output_dir=settings.output_dir,
        write=lambda line: print(line, file=settings.out, flush=True),
    )  # fmt: skip
    settings.write_json(report)
    return FAILED if report["outputs"]["differing"] else 0
