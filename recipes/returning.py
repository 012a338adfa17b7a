"""
A domain that comes back: gsm8k, spider, finance and gsm8k again, each for `--visit` requests, by replay.

    OSD_HF_DATA=... python recipes/returning.py
    OSD_HF_DATA=... python recipes/returning.py --ways replay lora-labels      # a part; finished ways are kept
    OSD_HF_DATA=... python recipes/returning.py --visit 16 --first 8           # smoke

replay         one shared draft, with replay
no-replay      one shared draft that learns from the newest requests alone
lora-labels    a LoRA adapter per data set, by label
full-labels    a full copy per data set, by label

Where gsm8k had been is its alpha over the last fifth of its first visit; where it comes back, its alpha over the
first `--first` requests of its second. Both also as gain over the static draft on the same requests, which cancels how
hard they are.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from common import (
    K,
    drawing,
    kept,
    last_share,
    load_pair,
    lora,
    make_parser,
    plot_ways,
    recorded,
    requests_stats,
    run_facts,
    simulated,
    write_report,
)

from osd_hf import AcceptanceStats, LabelRouter, OnlineConfig, Trace
from osd_hf.replay import replay_each

VISITS = ("gsm8k", "spider", "finance_alpaca", "gsm8k")
WAYS = ("replay", "no-replay", "lora-labels", "full-labels")


def setting(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `simulate` for a way."""
    if way == "replay":
        return {"config": OnlineConfig(seed=args.seed)}
    if way == "no-replay":
        return {"config": OnlineConfig(seed=args.seed, replay_fraction=0.0, batch_size=8)}
    if way == "full-labels":
        return {"config": OnlineConfig(seed=args.seed), "router": LabelRouter()}
    config = OnlineConfig(seed=args.seed, learning_rate=args.lora_rate)
    return {"config": config, "router": LabelRouter(), "peft_config": lora(args.rank)}


def run(
    way: str, draft: Any, stream: list[Trace], static: list[AcceptanceStats], args: argparse.Namespace
) -> dict[str, Any]:
    """The results of one way."""
    started = time.time()
    report = simulated(draft, stream, **setting(way, args), bar=way)
    before, after = slice(0, args.visit), slice(3 * args.visit, 3 * args.visit + args.first)
    had, still = last_share(report.stats[before]), last_share(static[before])
    now, then = (sum(stats[after], AcceptanceStats()) for stats in (report.stats, tuple(static)))
    return {
        "way": way, "had_been": had.alpha, "comes_back_at": now.alpha, "ratio": now.alpha / had.alpha,
        "interval": list(now.alpha_interval), "gain_had_been": had.alpha - still.alpha,
        "gain_comes_back_at": now.alpha - then.alpha,
        "ends_at": last_share(report.stats[3 * args.visit :]).alpha,
        "requests_stats": requests_stats(report), **run_facts(started),
    }  # fmt: skip


def plot(name: str, rows: list[dict[str, Any]], static: list[AcceptanceStats], visit: int, window: int) -> None:
    with drawing(name, figsize=(9, 4)) as (_, axes):
        axis = axes[0, 0]
        plot_ways(axis, rows, static, window)
        for i, visited in enumerate(VISITS):
            axis.axvline(i * visit + 0.5, color="0.6", linewidth=1)
            axis.annotate(visited, (i * visit + 1, 1.01), xycoords=("data", "axes fraction"), fontsize=8)
        axis.set(xlabel="request", ylabel=f"alpha, last {window} requests")


def main() -> None:
    parser = make_parser(__doc__, "returning")
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument("--visit", type=int, default=400, help="requests of a visit")
    parser.add_argument("--first", type=int, default=50, help="requests that a return is judged by")
    parser.add_argument("--recorded", type=int, default=600, help="requests recorded of each data set")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--lora-rate", type=float, default=4e-3, help="learning rate of the adapters")
    parser.add_argument("--window", type=int, default=48, help="requests pooled in a point of the plot")
    parser.add_argument("--runs", type=Path, default=Path("runs/returning"), help="where finished ways are kept")
    args = parser.parse_args()
    pair, started, n = load_pair(), time.time(), args.recorded
    first = {name: recorded(name, args.seed, n, args.traces, pair)[: args.visit] for name in VISITS[:3]}
    again = recorded(VISITS[3], args.seed, n + args.visit, args.traces, pair, start=n)
    stream = [trace for those in (*first.values(), again) for trace in those]
    static = replay_each(pair.draft, stream, K)
    rows = []
    for way in args.ways or WAYS:
        path = args.runs / f"{way}-{args.visit}-{args.seed}.json"
        rows.append(kept(path, lambda way=way: run(way, pair.draft, stream, static, args)))
        r = rows[-1]
        print(
            f"{way:12s} had been {r['had_been']:.3f}, comes back at {r['comes_back_at']:.3f} "
            f"[{r['interval'][0]:.3f}, {r['interval'][1]:.3f}], {r['ratio']:.2f} of it; gain over static "
            f"{r['gain_had_been']:+.3f}, {r['gain_comes_back_at']:+.3f}; ends at {r['ends_at']:.3f}",
            flush=True,
        )
    if args.ways:
        return  # the report is of all of them
    plot(args.name, rows, static, args.visit, args.window)
    rows = [{key: value for key, value in row.items() if key != "requests_stats"} for row in rows]
    facts = {"seed": args.seed, "visit": args.visit, **run_facts(started)}
    write_report(args.name, {"rank": args.rank, "lora_rate": args.lora_rate, "rows": rows}, **facts)


if __name__ == "__main__":
    main()
