"""
Which learning rule serves acceptance best: the experiment behind the defaults of `OnlineConfig`.

    OSD_HF_DATA=... python recipes/online_rules.py                       # all rules, 4 data sets, seed 0
    OSD_HF_DATA=... python recipes/online_rules.py --rules default adamw --datasets gsm8k
    OSD_HF_DATA=... python recipes/online_rules.py --requests 16 --rules default --datasets gsm8k     # smoke

Each rule changes the default in the fields it names. Simulated by replay over recorded target traces, one pass from a
fresh draft, acceptance over the last 20% against the static draft on the same requests; the learner's seconds per
request beside it. Rows are added to the report, so that a part can be run again.
"""

from __future__ import annotations

import json
import os
from typing import Any

from common import RESULTS, TEMPLATES, K, drawing, last_share, load_pair, make_parser, pooled, recorded, write_report
from lab_online import run_rule

from osd_hf import OnlineConfig
from osd_hf.replay import replay_each

RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "adamw": {"optimizer": "adamw"},
    "adamw, rate x2": {"optimizer": "adamw", "learning_rate": 2e-3},
    "adamw, last weights": {"optimizer": "adamw", "weight_average": 0.0},
    "rate / 2": {"learning_rate": 5e-4},
    "rate x2": {"learning_rate": 2e-3},
    "rate x4": {"learning_rate": 4e-3},
    "last weights": {"weight_average": 0.0},
    "average 0.95": {"weight_average": 0.95},
    "2 steps": {"steps_per_update": 2},
    "4 steps": {"steps_per_update": 4},
    "4 steps of 16 requests": {"steps_per_update": 4, "batch_size": 16, "replay_fraction": 0.5},
    "no replay": {"batch_size": 8, "replay_fraction": 0.0},
    "corrections": {"learn_from": "corrections"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "jsd": {"divergence": "jsd"},
    "total_variation": {"divergence": "total_variation"},
    "neg_log_overlap": {"divergence": "neg_log_overlap"},
    "hard_label": {"divergence": "hard_label"},
    "interval 32, 32 steps": {"update_interval": 32, "steps_per_update": 32},
}


def plot(rows: list[dict[str, Any]], report: str) -> None:
    names = list(dict.fromkeys(r["dataset"] for r in rows))
    with drawing(report, 1, len(names), figsize=(4.2 * len(names), 4.2)) as (_, axes):
        for axis, name in zip(axes[0], names, strict=True):
            for r in (r for r in rows if r["dataset"] == name):
                point, is_default = (r["learner_seconds_per_request"] * 1e3, r["gain"]), r["rule"] == "default"
                axis.scatter(*point, color="C3" if is_default else "C0", s=60 if is_default else 18)
                axis.annotate(r["rule"], point, fontsize=6, xytext=(3, 2), textcoords="offset points")
            axis.set(title=name, xlabel="learner ms per request", xscale="log")
            axis.grid(alpha=0.3)
        axes[0, 0].set_ylabel("gain in acceptance, last 20% of requests")


def main() -> None:
    parser = make_parser(__doc__, "online_rules")
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--datasets", nargs="+", default=list(TEMPLATES))
    parser.add_argument("--requests", type=int, default=600)
    args = parser.parse_args()
    pair = load_pair()
    report = RESULTS / f"{args.name}.json"
    rows = json.loads(report.read_text())["rows"] if report.is_file() else []
    for name in args.datasets:
        traces = recorded(name, args.seed, args.requests, args.traces, pair)
        static = last_share(replay_each(pair.draft, traces, K)).alpha
        for rule in args.rules:
            config = OnlineConfig(**{"gate": False, "seed": args.seed, **RULES[rule]})
            run, seconds = run_rule(pair.draft, traces, config, f"{name} {rule}")
            row = {
                "rule": rule,
                "dataset": name,
                "changes": RULES[rule],
                "static": static,
                "alpha": last_share(run.stats).alpha,
                "gain": last_share(run.stats).alpha - static,
                "gain_all": pooled(run.stats) - static,
                "learner_seconds_per_request": seconds,
            }
            rows = [r for r in rows if (r["rule"], r["dataset"]) != (rule, name)] + [row]
            print(f"{name:24s} {rule:24s} gain {row['gain']:+.3f}  {seconds * 1e3:6.0f} ms/request", flush=True)
            facts = {
                "seed": args.seed,
                "requests": args.requests,
                "mixed_precision": os.environ.get("ACCELERATE_MIXED_PRECISION", "no"),
            }
            write_report(args.name, {"config": OnlineConfig().to_dict(), "rows": rows}, **facts)
    plot(rows, args.name)


if __name__ == "__main__":
    main()
