"""The command `osd-hf replay`: what drafts would have scored on recorded requests, as they are and learning."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from osd_hf.acceptance import AcceptanceStats, Comparison, figures_of
from osd_hf.cli.arguments import flag
from osd_hf.cli.flags import (
    NOTHING_DRAFTED,
    DraftRevision,
    Learning,
    Loading,
    Reporting,
    learning,
    recorded,
    shown_name,
)
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, DataError
from osd_hf.evaluation import display
from osd_hf.evaluation.display import comparison_row, figure, text_table
from osd_hf.models import load_draft
from osd_hf.replay import replay_each
from osd_hf.simulate import simulate
from osd_hf.speedup import expected_speedup
from osd_hf.trace import Trace
from osd_hf.utils.report import make_folder, provenance

BATCH = 64  # requests between two steps of the progress bar


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(DraftRevision, Loading, Learning, Reporting):
    """The flags of `osd-hf replay`."""

    store: str = flag("folder of captured requests", required=True, metavar="DIR")
    draft: list[str] = flag("draft to score (repeat for several)", required=True, metavar="ID|PATH")
    domain: str | None = flag("requests of this domain only", metavar="NAME")
    num_requests: int | None = flag("the newest N requests only", metavar="N")
    cost: float | None = flag("time of a draft's forward over the target's, for the expected speed-up", metavar="C")
    learn: bool = flag("let each draft learn from the requests, in their order", False)
    output_dir: Path = flag(
        "folder of plots, with --learn; they are overwritten", Path("osd_hf_replay"), metavar="DIR"
    )
    device_map: str | None = flag("where the parts of a draft go, in place of --device, such as auto", group="models",
                                  metavar="MAP")  # fmt: skip
    config: OnlineConfig = learning(
        k="tokens drafted per round (k)", **NOTHING_DRAFTED,
        num_logprobs="a store has the entries that were recorded",
    )  # fmt: skip

    def check(self) -> None:
        """Raises ConfigError for what is too small, and for what changes nothing."""
        self.check_counts("num_requests")
        self.check_one_place()
        if not self.learn:
            if self.changed("paper", "output_dir"):
                raise ConfigError(f"{self.changed('paper', 'output_dir')[0]} would change nothing without --learn.")
            others = [f.name for f in fields(OnlineConfig) if f.name != "num_assistant_tokens"]
            self.check_changed(others, "no draft learns without --learn")


def replay_command(settings: ReplaySettings) -> int:
    """Score each draft; returns the exit code."""
    settings.check()
    k, cost = settings.fixed_k(), settings.cost
    if cost is not None:
        expected_speedup(0.5, 1, cost)  # says what is wrong with it before any work
    traces = _recorded(settings)
    if settings.learn:
        make_folder(settings.output_dir)
    report: dict[str, Any] = {"provenance": provenance(), "num_assistant_tokens": k, "drafts": []}
    rows: list[list[str]] = []
    learned_rows: list[list[str]] = []
    for number, source in enumerate(settings.draft):
        draft, name = load_draft(source, device_map=settings.device_map, **settings.draft_loading), shown_name(source)
        entry, compared = _scored(settings, draft, traces, settings.output_dir / f"alpha-{number}.png")
        report["drafts"].append({"draft": name, **entry})
        for title, part in compared.parts().items():
            rows.append([name, title, *_static_cells(part.totals["static"], k, cost)])
        if settings.learn:
            for title, part in compared.last_fifth().parts().items():
                learned_rows.append([name, *comparison_row(title, part)])
    header = ["draft", "requests of", "n", "alpha", "95% interval", f"tokens/forward (k={k})"]
    settings.say(text_table(header + ["expected speed-up"] * (cost is not None), rows, left=2))
    if settings.learn:
        header = ["draft", "requests of", "n", "static", "learned", "gain [95%]"]
        settings.say("\nLearning from the requests in their order; alpha over the last 20%:\n")
        settings.say(text_table(header, learned_rows, left=2))
        settings.say(f"\nWrote the plots to {settings.output_dir}.")
    settings.write_json(report)
    return 0


def _recorded(settings: ReplaySettings) -> list[Trace]:
    newest: deque[Trace] = deque(maxlen=settings.num_requests)  # the others do not stay in memory
    domains = set()
    for trace in recorded(settings.store):
        domains.add(str(trace.domain))
        if settings.learn and (trace.is_sampled or not trace.num_kept):
            continue
        if settings.domain in (None, trace.domain):
            newest.append(trace)
    if not newest:
        wanted = " of greedy requests with target rows" if settings.learn else ""
        known = ", ".join(sorted(domains)) or "none"
        raise DataError(f"The store {settings.store} has no recordings{wanted} to replay; its domains: {known}.")
    return list(newest)


def _scored(
    settings: ReplaySettings, draft: Any, traces: list[Trace], plot: Path
) -> tuple[dict[str, Any], Comparison]:
    """What a draft scores as it is, and where it learns from the requests, how that went."""
    domains = [trace.domain for trace in traces]
    static: list[AcceptanceStats] = []
    for first in display.progress(range(0, len(traces), BATCH), "replaying", "batch"):
        static += replay_each(draft, traces[first : first + BATCH], settings.fixed_k())
    compared = Comparison(domains, {"static": static})
    report: dict[str, Any] = {"static": _by_name(compared, "static")}
    if settings.learn:
        with display.alpha_bar(len(traces), "learning") as advance:
            run = simulate(draft, traces, settings.config, on_request=lambda i, stats: advance(stats, static[i]))
        compared = Comparison(domains, {"static": static, "learned": run.stats})
        display.plot_alpha(plot, compared, title="Replay in time order: learning, and frozen")
        report |= {
            "learned": _by_name(compared, "learned"),
            "last_fifth": {side: _by_name(compared.last_fifth(), side) for side in compared.sides},
            "updates": [update.to_dict() for update in run.updates],
            "config": settings.config.to_dict(),
        }
    return report, compared


def _by_name(compared: Comparison, side: str) -> dict[str, Any]:
    return {name: figures_of(part.totals[side]) for name, part in compared.parts().items()}


def _static_cells(stats: AcceptanceStats, k: int, cost: float | None) -> list[str]:
    alpha = 0.0 if math.isnan(stats.alpha) else stats.alpha
    speedup = [] if cost is None else [f"{expected_speedup(alpha, k, cost):.2f}x"]
    efficiency = figure(stats.block_efficiency, 2)
    return [str(stats.num_requests), figure(stats.alpha), display.stats_interval(stats), efficiency, *speedup]
