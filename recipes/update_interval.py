"""
How often to update: after every 1, 2, 4 ... 128 requests, with steps per update scaled so that there is one step a
request; traffic of one data set, and traffic that changes between four.

    OSD_HF_DATA=... python recipes/update_interval.py                                       # 2 x 8 x 256 requests
    OSD_HF_DATA=... python recipes/update_interval.py --requests 16 --recorded 20 --segment 4 --intervals 1 4   # smoke

All intervals take equally many steps of equally large batches. What differs is when requests are learned from, and
what a batch is made of: 8 of its 32 requests are new ones, drawn anew at each step. Up to 8 new requests are all in
every step of their update: once at interval 1, 8 times at interval 8; below 8, more replayed ones fill the batch. Of
more than 8, each step draws 8, so that each is drawn 8 times on average; few are never drawn while new (3 in 10,000 at
interval 128), and all are in the replay buffer afterwards. The first update has nothing to replay: its batches are up
to 32 new requests.

Where learning and serving share a core, an update's length is the pause that a request may meet. Seconds are processor
seconds.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
from common import (
    DATASETS,
    K,
    drawing,
    last_share,
    load_pair,
    make_parser,
    pooled,
    processor_timed,
    recorded,
    rotate,
    run_facts,
    simulated,
    write_report,
)

from osd_hf import AcceptanceStats, OnlineConfig, Trace
from osd_hf.acceptance import alpha_gain_interval
from osd_hf.learning.updater import Updater
from osd_hf.replay import replay_each

INTERVALS = (1, 2, 4, 8, 16, 32, 64, 128)
KEYS = ("alpha", "static", "low", "high")


def draws(config: OnlineConfig) -> dict[str, float]:
    """How a request is learned from while it is new, once the buffer has filled a batch: mean number of steps that it
    is in, and the probability that it is in none."""
    new = min(config.update_interval, config.batch_size - round(config.batch_size * config.replay_fraction))
    share = new / config.update_interval
    return {
        "new_in_a_batch": new,
        "steps_as_new": share * config.steps_per_update,
        "never_as_new": (1 - share) ** config.steps_per_update,
    }


def publish_seconds(draft: Any, repeats: int = 20) -> float:
    """Median time of casting the learned weights into the serving draft."""
    updater, serving, seconds = Updater(draft, OnlineConfig()), copy.deepcopy(draft), []
    for _ in range(repeats):
        started = time.perf_counter()
        updater.copy_to(serving)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


def run(draft: Any, stream: list[Trace], static: list[AcceptanceStats], config: OnlineConfig, name: str) -> Any:
    """One row of the report."""
    report = simulated(draft, stream, learner=processor_timed(draft, config), bar=name)
    stats, updates = report.stats, report.updates
    return {
        "interval": config.update_interval, **draws(config),
        "whole_run": gain(sum(static, AcceptanceStats()), sum(stats, AcceptanceStats())),
        "last_fifth": gain(last_share(static), last_share(stats)),
        "updates": len(updates), "steps": sum(u.steps for u in updates),
        "learner_seconds_per_request": sum(u.seconds for u in updates) / len(stream),
        "longest_update_seconds": max((u.seconds for u in updates), default=0.0),
    }  # fmt: skip


def gain(static: AcceptanceStats, learned: AcceptanceStats) -> dict[str, float]:
    low, high = alpha_gain_interval(static, learned)
    return {
        "alpha": learned.alpha, "static": static.alpha, "gain": learned.alpha - static.alpha, "low": low, "high": high
    }  # fmt: skip


def plot(name: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Gain over the static draft by interval, a panel for each traffic."""
    with drawing(name, 1, len(rows), figsize=(11, 4.2), sharey=True) as (_, axes):
        for axis, (traffic, those) in zip(axes[0], rows.items(), strict=True):
            intervals = [r["interval"] for r in those]
            for number, part in enumerate(("whole_run", "last_fifth")):
                alpha, static, low, high = (np.array([r[part][key] for r in those]) for key in KEYS)
                label = part.replace("_", " ")
                axis.fill_between(intervals, static + low, static + high, color=f"C{number}", alpha=0.15, linewidth=0)
                axis.plot(intervals, alpha, "o-", color=f"C{number}", label=f"learning, {label}")
                axis.plot(intervals, static, "--", color=f"C{number}", label=f"static, {label}")
            axis.set(
                xscale="log", xlabel="requests between updates (one step a request)", ylabel="alpha", title=traffic
            )
            axis.set_xticks(intervals, intervals)
            axis.minorticks_off()
            axis.tick_params(labelleft=True)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)


def main() -> None:
    parser = make_parser(__doc__, "update_interval")
    parser.add_argument("--intervals", type=int, nargs="+", default=INTERVALS)
    parser.add_argument("--requests", type=int, default=256, help="of each run")
    parser.add_argument("--segment", type=int, default=50, help="requests between switches of changing traffic")
    parser.add_argument("--recorded", type=int, default=600, help="requests recorded of each data set")
    args = parser.parse_args()
    if args.requests > args.recorded:
        parser.error(f"--requests {args.requests} are more than the {args.recorded} recorded ones of a data set.")
    pair, started = load_pair(), time.time()
    traces = {name: recorded(name, args.seed, args.recorded, args.traces, pair) for name in DATASETS}
    streams = {
        f"{DATASETS[0]} only": traces[DATASETS[0]][: args.requests],
        f"four data sets, switched every {args.segment}": rotate(traces, args.segment, args.requests),
    }
    publish, rows = publish_seconds(pair.draft), {}
    for traffic, stream in streams.items():
        static = replay_each(pair.draft, stream, K)
        print(f"{traffic}: {len(stream)} requests, static {pooled(static):.3f}", flush=True)
        rows[traffic] = []
        for interval in args.intervals:
            config = OnlineConfig(update_interval=interval, steps_per_update=interval, gate=False, seed=args.seed)
            row = run(pair.draft, stream, static, config, f"every {interval}")
            rows[traffic].append(row)
            whole, end = row["whole_run"], row["last_fifth"]
            print(
                f"  every {interval:3d}  alpha {whole['alpha']:.3f}, gain {whole['gain']:+.3f} "
                f"[{whole['low']:+.3f}, {whole['high']:+.3f}]  last fifth {end['alpha']:.3f}, gain {end['gain']:+.3f} "
                f"[{end['low']:+.3f}, {end['high']:+.3f}]  {row['learner_seconds_per_request'] * 1e3:.0f} ms/request  "
                f"{row['updates']} versions  longest update {row['longest_update_seconds']:.1f} s",
                flush=True,
            )
    plot(args.name, rows)
    facts = {"seed": args.seed, "requests": args.requests, "segment": args.segment, **run_facts(started)}
    write_report(args.name, {"publish_seconds": publish, "rows": rows}, **facts)


if __name__ == "__main__":
    main()
