"""Measure acceptance against the cost of learning, by rule, on recorded traffic.

    OSD_HF_DATA=... python recipes/frontier.py                                   # all rules, 4 data sets, seed 0
    OSD_HF_DATA=... python recipes/frontier.py --rules default "rule alone" --seeds 0 1 2
    OSD_HF_DATA=... python recipes/frontier.py --requests 16 --rules default --datasets gsm8k     # smoke

A rule changes some fields of the default. Most rules run complete updates without the gate, so that each version
serves; `rule alone` is the default in this form. Each run is one pass over recorded traces from the original draft.
The report has alpha over the last fifth and over the first 40 requests, compared with the original draft, and the
learner's processor seconds and FLOPs per request: 6 per parameter and token with a gradient, 2 without. Rows are added
to an existing report.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import (
    RESULTS,
    TEMPLATES,
    K,
    drawing,
    gain,
    last_share,
    load_pair,
    make_parser,
    processor_timed,
    recorded,
    simulated,
    write_report,
)

from osd_hf import AcceptanceStats, OnlineConfig, Trace
from osd_hf.replay import replay_each

# Whole updates, every version of which serves: what a rule makes of the requests, without what guards it.
RULE: dict[str, Any] = {"update_strategy": "interval", "gate": False}
RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "rule alone": RULE,
    "steps / 2": {**RULE, "steps_per_update": 5},
    "steps x2": {**RULE, "steps_per_update": 18},
    "half replayed": {**RULE, "replay_fraction": 0.5},
    "nothing replayed": {**RULE, "replay_fraction": 0.0},
    "rate / 2": {**RULE, "learning_rate": 1.5e-3},
    "rate x2": {**RULE, "learning_rate": 6e-3},
    "adamw": {**RULE, "optimizer": "adamw"},
    "adamw, rate / 3": {**RULE, "optimizer": "adamw", "learning_rate": 1e-3},
    "average 0.95": {**RULE, "weight_average": 0.95},
    "last weights": {**RULE, "weight_average": 0.0},
    "jsd": {**RULE, "divergence": "jsd"},
    "corrections only": {**RULE, "learn_from": "corrections"},
}


@dataclass
class Work:
    """FLOPs of forwards and backwards of a draft."""

    flops: float = 0.0


@contextlib.contextmanager
def counted(draft: Any) -> Iterator[Work]:
    """Count the tokens of all models of the draft's class inside the block."""
    work, kind = Work(), type(draft)
    forward = kind.forward
    tied = draft.get_input_embeddings().weight is draft.get_output_embeddings().weight
    lookups = 0 if tied else draft.get_input_embeddings().weight.numel()
    parameters = draft.num_parameters() - lookups

    def seen(self: Any, input_ids: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        tokens = 0 if input_ids is None else input_ids.numel()
        work.flops += (6 if torch.is_grad_enabled() else 2) * parameters * tokens
        return forward(self, input_ids, *args, **kwargs)

    kind.forward = seen
    try:
        yield work
    finally:
        kind.forward = forward


def measured(draft: Any, traces: Sequence[Trace], config: OnlineConfig, name: str) -> dict[str, Any]:
    """Run one rule on one stream."""
    static = replay_each(draft, traces, K)
    learner = processor_timed(draft, config)
    with counted(draft) as work:
        run = simulated(draft, traces, learner=learner, bar=name)
    serving = 2 * draft.num_parameters() * sum(len(t.prompt_ids) + len(t) for t in traces)  # the simulation's own
    first = slice(0, min(40, len(traces)))
    early = [sum(side[first], AcceptanceStats()) for side in (static, run.stats)]
    return {
        "alpha": last_share(run.stats).alpha, "static": last_share(static).alpha,
        **gain(last_share(static), last_share(run.stats)),
        "first": {"alpha": early[1].alpha, **gain(*early)},
        "learner_seconds_per_request": learner.seconds / len(traces),
        "learner_gflops_per_request": max(work.flops - serving, 0) / 1e9 / len(traces),
        "updates": len(run.updates),
        "effort": [round(lesson.effort.share, 4) for lesson in learner.drafts.requests.values()],
    }  # fmt: skip


def plot(rows: list[dict[str, Any]], report: str) -> None:
    names = list(dict.fromkeys(r["dataset"] for r in rows))
    with drawing(report, 1, len(names), figsize=(4.2 * len(names), 4.2)) as (_, axes):
        for axis, name in zip(axes[0], names, strict=True):
            for r in (r for r in rows if r["dataset"] == name):
                point = r["learner_seconds_per_request"] * 1e3, r["alpha"]
                color = {"default": "C3", "rule alone": "C1"}.get(r["rule"], "C0")
                axis.scatter(*point, color=color, s=60 if color != "C0" else 18)
                axis.annotate(r["rule"], point, fontsize=6, xytext=(3, 2), textcoords="offset points")
            axis.set(title=name, xlabel="learner, processor ms a request", xscale="log")
            axis.grid(alpha=0.3)
        axes[0, 0].set_ylabel("alpha, last fifth of the requests")


def main() -> None:
    parser = make_parser(__doc__, "frontier", seed=False)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--datasets", nargs="+", default=list(TEMPLATES))
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    pair = load_pair()
    torch.set_num_threads(1)  # processor seconds of one thread are no matter of what else runs
    report = RESULTS / f"{args.name}.json"
    rows = json.loads(report.read_text())["rows"] if report.is_file() else []
    for seed in args.seeds:
        for name in args.datasets:
            traces = recorded(name, seed, args.requests, args.traces, pair)
            for rule in args.rules:
                config = OnlineConfig(**{"seed": seed, **RULES[rule]})
                row = {"rule": rule, "dataset": name, "seed": seed, "changes": RULES[rule]}
                row |= measured(pair.draft, traces, config, f"{name} {rule}")
                key = (rule, name, seed)
                rows = [r for r in rows if (r["rule"], r["dataset"], r["seed"]) != key] + [row]
                print(
                    f"{name:24s} seed {seed} {rule:18s} alpha {row['alpha']:.3f} (static {row['static']:.3f}), first "
                    f"40 {row['first']['gain']:+.3f}; {row['learner_seconds_per_request'] * 1e3:5.0f} ms, "
                    f"{row['learner_gflops_per_request']:6.2f} GFLOP a request",
                    flush=True,
                )
                facts = {"seeds": args.seeds, "requests": args.requests}
                write_report(args.name, {"config": OnlineConfig().to_dict(), "rows": rows}, **facts)
    plot(rows, args.name)


if __name__ == "__main__":
    main()
