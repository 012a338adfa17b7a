"""The command `osd-hf compare`: drafts for one target side by side, and whether they are worth it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from osd_hf.cli.arguments import flag, in_groups
from osd_hf.cli.flags import DraftRevision, Evaluated, Reporting, TargetLoading, shown_name
from osd_hf.errors import ConfigError
from osd_hf.evaluation.compare import DraftComparison, compare
from osd_hf.evaluation.display import figure, plot_speedups, stats_interval, text_table
from osd_hf.models import input_device, load_draft, load_model, load_tokenizer
from osd_hf.utils.report import make_folder, write_report

(_models,) = in_groups("models")


@dataclass(frozen=True, kw_only=True)
class CompareSettings(DraftRevision, TargetLoading, Evaluated, Reporting):
    """The flags of `osd-hf compare`."""

    target: str = _models("Hub id or folder of the model that answers", positional=True, metavar="TARGET")
    draft: list[str] = _models("Hub id or folder of a draft with its tokenizer, or of a LoRA adapter on one; repeat "
                               "for several", positional=True, metavar="DRAFT")  # fmt: skip
    num_assistant_tokens: int = flag("tokens drafted per round (k) at which acceptance is told", 5, metavar="N")
    output_dir: Path | None = flag("folder of report and plot, which are overwritten", metavar="DIR")

    def check(self) -> None:
        """Raises ConfigError for what is too small, and for what has no meaning."""
        self.check_counts("num_requests", "max_new_tokens", "num_assistant_tokens")
        if twice := {name for name in self.draft if self.draft.count(name) > 1}:
            raise ConfigError(f"A draft is compared once: {', '.join(sorted(twice))} is named twice.")

    @property
    def names(self) -> dict[str, str]:
        """What reports call each draft -> how it was named."""
        shown = {shown_name(source): source for source in self.draft}
        return shown if len(shown) == len(self.draft) else {source: source for source in self.draft}


def compare_command(settings: CompareSettings) -> int:
    """Compare and report; returns the exit code."""
    settings.check()
    dataset, folder = settings.evaluation_set(), settings.output_dir
    if folder is not None:
        make_folder(folder)
    target = load_model(settings.target, **settings.target_loading)
    tokenizer = load_tokenizer(settings.target, **settings.fetching)
    how = settings.draft_loading | {"device": settings.device or str(input_device(target))}
    drafts = {name: load_draft(source, **how) for name, source in settings.names.items()}
    found = compare(
        target, drafts, tokenizer, dataset, num_assistant_tokens=settings.num_assistant_tokens, show_progress=True
    )
    settings.say(found.summary())
    settings.say("\n" + _tables(found))
    report = found.to_dict()
    if folder is not None:
        bars = {dataset.name: {name: (worth.speedup, worth.interval, None) for name, worth in found.worth.items()}}
        plot_speedups(folder / "speedups.png", bars, title="Expected by acceptance and measured costs")
        write_report(folder / "report.json", report)
        settings.say(f"\nWrote report.json and speedups.png to {folder}.")
    settings.write_json(report)
    return 0


def _tables(found: DraftComparison) -> str:
    rows = []
    for name, worth in found.worth.items():
        stats, cost = found.scores.totals[name], found.costs[name]
        low, high = worth.interval
        rows.append([
            name, f"{figure(stats.alpha)} {stats_interval(stats)}", figure(stats.block_efficiency, 2),
            figure(cost.draft / cost.target), figure(cost.c), str(worth.num_assistant_tokens),
            f"{worth.speedup:.2f} [{low:.2f}, {high:.2f}]", worth.answer,
        ])  # fmt: skip
    k = found.num_assistant_tokens
    header = ["draft", f"alpha (k={k}) [95%]", f"tokens/forward (k={k})", "c", "c + check", "best k",
              "expected speed-up", "worth it"]  # fmt: skip
    lines = [text_table(header, rows)]
    gains = [
        [f"{best} over {other}", f"{pair.gain:+.3f} [{pair.gain_interval[0]:+.3f}, {pair.gain_interval[1]:+.3f}]"]
        for best, other, pair in found.gains()
    ]
    if gains:
        lines.append("\n" + text_table(["accepted more, on the same prompts", "alpha [95%]"], gains))
    prompts = f"{len(found.dataset.prompts)} prompts of {found.dataset.name}"
    lines.append(
        f"\n{prompts}, greedy answers of {found.new_tokens:.0f} tokens on average.\nc: time of a draft's forward over "
        "the target's; c + check: with what the target takes for one token more,\nthe alpha from which on it pays."
    )
    return "\n".join(lines)
