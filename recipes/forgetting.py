"""
What a learning draft forgets: four data sets come one after the other, twice; after each visit the draft is replayed
on held-out requests of all four. With replay of old requests (the default rule) and without.

    OSD_HF_DATA=... python recipes/forgetting.py                                          # 2 rounds x 4 x 152 requests
    OSD_HF_DATA=... python recipes/forgetting.py --requests 20 --visit 8 --held-out 4     # smoke

What is forgotten of a data set is the acceptance on its held-out requests at the end of its first visit less that just
before its second one, three data sets later. Without replay, a step's batch is the 8 newest requests; with it, these
and 24 replayed ones. The second round's requests are new ones. Before its first visit, a data set's row shows what is
lost of what the draft came with, of which there is nothing to replay.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from common import (
    DATASETS,
    REPLAY_RULES,
    K,
    drawing,
    gain,
    load_pair,
    make_parser,
    recorded,
    run_facts,
    simulated,
    write_report,
)
from matplotlib.patches import Rectangle

from osd_hf import AcceptanceStats, OnlineConfig, Trace, replay

ROUNDS = 2


def run(
    draft: Any, visits: list[list[Trace]], held_out: dict[str, list[Trace]], config: OnlineConfig, name: str
) -> tuple[list[dict[str, AcceptanceStats]], list[AcceptanceStats]]:
    """Stats of the held-out requests of each data set, at the start and after each visit; stats of each visit as it
    was served."""
    held, served, learner = [measure(draft, held_out)], [], None
    for visit in visits:
        report = simulated(draft, visit, config, learner=learner, bar=f"{name}: {visit[0].domain}")
        learner = report.learner
        held.append(measure(report.draft, held_out))
        served.append(sum(report.stats, AcceptanceStats()))
    return held, served


def measure(draft: Any, held_out: dict[str, list[Trace]]) -> dict[str, AcceptanceStats]:
    return {name: replay(draft, traces, K) for name, traces in held_out.items()}


def summary(held: list[dict[str, AcceptanceStats]]) -> list[dict[str, Any]]:
    """A row for each data set: alpha at the ends of its visits and just before the second, and what was forgotten."""
    rows = []
    for i, name in enumerate(DATASETS):
        static, first, before = held[0][name], held[i + 1][name], held[i + len(DATASETS)][name]
        second, end = held[i + len(DATASETS) + 1][name], held[-1][name]
        rows.append(
            {
                "dataset": name, "static": static.alpha, "end_of_first_visit": first.alpha,
                "before_second_visit": before.alpha, "end_of_second_visit": second.alpha, "end": end.alpha,
                "forgotten": first.alpha - before.alpha, "forgotten_interval": gain(before, first)["gain_interval"],
                "forgotten_after_second_visit": second.alpha - end.alpha,
            }
        )  # fmt: skip
    return rows


def plot(name: str, matrices: dict[str, Any]) -> None:
    """Data set x time, a panel for each rule; a frame marks the data set that was just learned from."""
    low, high = min(m.min() for m in matrices.values()), max(m.max() for m in matrices.values())
    times = ["start", *(f"{name.split('_')[0]}\nround {r + 1}" for r in range(ROUNDS) for name in DATASETS)]
    with drawing(name, 1, len(matrices), figsize=(15, 3.6), sharey=True) as (figure, axes):
        for axis, (rule, matrix) in zip(axes[0], matrices.items(), strict=True):
            image = axis.imshow(matrix.T, vmin=low, vmax=high, cmap="viridis", aspect="auto")
            for when, row in enumerate(matrix):
                for where, alpha in enumerate(row):
                    dark = alpha < (low + high) / 2
                    axis.text(when, where, f"{alpha:.2f}", ha="center", va="center", color="w" if dark else "k")
                if when:
                    learned = (when - 1) % len(DATASETS)
                    axis.add_patch(Rectangle((when - 0.48, learned - 0.47), 0.96, 0.94, fill=False, ec="r", lw=2))
            axis.set_xticks(range(len(times)), times, fontsize=8)
            axis.set_yticks(range(len(DATASETS)), [name.split("_")[0] for name in DATASETS])
            axis.set(title=rule, xlabel="after a visit to")
        figure.colorbar(image, ax=axes, label="alpha, held-out requests")


def main() -> None:
    parser = make_parser(__doc__, "forgetting")
    parser.add_argument("--requests", type=int, default=600, help="recorded of each data set")
    parser.add_argument("--visit", type=int, default=152, help="requests of a visit; a multiple of the interval")
    parser.add_argument("--held-out", type=int, default=60, help="of each data set, its last ones")
    args = parser.parse_args()
    if ROUNDS * args.visit + args.held_out > args.requests:
        parser.error(f"{ROUNDS} visits of {args.visit} and {args.held_out} held out need more than {args.requests}.")
    pair, started = load_pair(), time.time()
    traces = {name: recorded(name, args.seed, args.requests, args.traces, pair) for name in DATASETS}
    held_out = {name: those[-args.held_out :] for name, those in traces.items()}
    visits = [traces[name][r * args.visit : (r + 1) * args.visit] for r in range(ROUNDS) for name in DATASETS]
    rules, matrices = {}, {}
    for rule, changes in REPLAY_RULES.items():
        config = OnlineConfig(gate=False, seed=args.seed, **changes)
        held, served = run(pair.draft, visits, held_out, config, rule)
        rows, matrices[rule] = summary(held), np.array([[held_at[d].alpha for d in DATASETS] for held_at in held])
        rules[rule] = {
            "config": config.to_dict(), "rows": rows, "datasets": DATASETS, "held_out_alpha": matrices[rule].tolist(),
            "served_alpha": [s.alpha for s in served], "mean_served": sum(served, AcceptanceStats()).alpha,
            "mean_forgotten": float(np.mean([r["forgotten"] for r in rows])),
            "mean_at_end": float(matrices[rule][-1].mean()),
        }  # fmt: skip
        found = rules[rule]
        print(
            f"\n{rule}: forgotten {found['mean_forgotten']:.3f}, at the end {found['mean_at_end']:.3f}, served "
            f"{found['mean_served']:.3f}",
            flush=True,
        )
        for r in rows:
            low, high = r["forgotten_interval"]
            print(
                f"  {r['dataset']:24s} static {r['static']:.3f}  first visit {r['end_of_first_visit']:.3f}  before "
                f"second {r['before_second_visit']:.3f}  second {r['end_of_second_visit']:.3f}  end {r['end']:.3f}  "
                f"forgotten {r['forgotten']:+.3f} [{low:+.3f}, {high:+.3f}]",
                flush=True,
            )
    plot(args.name, matrices)
    facts = {"seed": args.seed, "visit": args.visit, "held_out": args.held_out, **run_facts(started)}
    write_report(args.name, {"rules": rules}, **facts)


if __name__ == "__main__":
    main()
