"""
Fast-changing traffic: four data sets, switched every 10, 50 or 200 requests; one draft learns from all of them. The
default rule against the same steps without replay, and the static draft.

    OSD_HF_DATA=... python recipes/changing_traffic.py                                       # 3 paces x 800 requests
    OSD_HF_DATA=... python recipes/changing_traffic.py --requests 32 --recorded 20 --segments 4 8     # smoke

Each pace serves the same requests in another order, so that the static draft's acceptance is the same in all of them.
The gain over it is also given by place in a segment, on the second half of the stream (where every data set was seen
before, but at the slowest pace): it shows whether what was learned of a data set is there at once when it comes back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from common import RESULTS, last_share, load_pair, recorded, rotate, run_facts, write_report
from streams import pooled
from tqdm import tqdm

from osd_hf import AcceptanceStats, OnlineConfig, simulate
from osd_hf.bench.display import rolling_alpha
from osd_hf.metrics import alpha_gain_interval
from osd_hf.replay import replay_each

matplotlib.use("Agg")
import matplotlib.pyplot as plt

K = 5
DATASETS = ("gsm8k", "spider", "finance_alpaca", "code_search_net_python")
RULES: dict[str, dict[str, Any]] = {"with replay": {}, "without replay": {"replay_fraction": 0.0, "batch_size": 8}}
PARTS = 5  # of a segment
Stats = Sequence[AcceptanceStats]


def by_position(stats: Stats, segment: int) -> list[float]:
    """Alpha in equal parts of a segment, pooled over the segments in the second half of the stream (at the slowest
    pace those that begin there)."""
    half = len(stats) // 2
    bounds = np.linspace(0, segment, min(PARTS, segment) + 1).round().astype(int)
    return [
        pooled([s for i, s in enumerate(stats) if i >= half and start <= i % segment < end])
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]


def plot(path: Path, rows: list[dict[str, Any]], curves: dict[tuple[str, int], Any], window: int) -> None:
    """Rolling gain over the stream, a panel for each pace; the mean gain by pace; the gain by position."""
    segments = sorted({row["segment"] for row in rows})
    figure, axes = plt.subplots(2, max(len(segments), 2), figsize=(14, 7), layout="constrained", squeeze=False)
    for axis, segment in zip(axes[0], segments, strict=False):
        for number, rule in enumerate(RULES):
            axis.plot(np.arange(1, len(curves[rule, segment]) + 1), curves[rule, segment], f"C{number}", label=rule)
        if segment >= 50:
            for start in range(0, len(curves[rule, segment]), segment):
                axis.axvline(start + 0.5, color="0.8", linewidth=0.8, zorder=0)
        axis.axhline(0, color="0.5", linewidth=0.8)
        axis.set(title=f"a switch every {segment} requests", xlabel="request", ylabel=f"gain, last {window} requests")
        if axis is not axes[0][0]:
            axis.sharey(axes[0][0])
        axis.legend(fontsize=8)
    for number, rule in enumerate(RULES):
        those = [row for row in rows if row["rule"] == rule]
        gains, low, high = (np.array([r[key] for r in those]) for key in ("gain", "gain_low", "gain_high"))
        axes[1][0].errorbar(
            [r["segment"] for r in those], gains, (gains - low, high - gains), fmt="o-", color=f"C{number}",
            capsize=3, label=rule,
        )  # fmt: skip
        for row, style in zip(those, ("-", "--", ":", "-."), strict=False):
            gain = np.subtract(row["alpha_by_position"], row["static_by_position"])
            places = (np.arange(len(gain)) + 0.5) / len(gain)
            label = f"{rule}, every {row['segment']}"
            axes[1][1].plot(places, gain, f"C{number}{style}", marker="o", markersize=3, label=label)
    axes[1][0].set(xscale="log", xlabel="requests between switches", ylabel="gain over the static draft, whole stream")
    axes[1][0].set_xticks(segments, segments)
    axes[1][0].minorticks_off()
    axes[1][1].set(xlabel="place in the segment (0 to 1), second half of the stream", ylabel="gain")
    for axis in axes[1][:2]:
        axis.legend(fontsize=8)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    for axis in (*axes[1][2:], *axes[0][len(segments) :]):
        axis.set_axis_off()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, nargs="+", default=[10, 50, 200], help="requests between switches")
    parser.add_argument("--requests", type=int, default=800, help="of a stream; a whole number of turns of all paces")
    parser.add_argument("--recorded", type=int, default=600, help="requests recorded of each data set")
    parser.add_argument("--window", type=int, default=64, help="requests pooled in a point")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", type=Path, default=Path("traces"), help="where recorded traces are kept")
    parser.add_argument("--name", default="changing_traffic", help="of the report and the plot")
    args = parser.parse_args()
    if any(args.requests % (segment * len(DATASETS)) for segment in args.segments):
        parser.error(f"--requests {args.requests} must be a multiple of {len(DATASETS)} times each of --segments.")
    if args.requests > len(DATASETS) * args.recorded:
        parser.error(f"--requests {args.requests} are more than the {len(DATASETS)} x {args.recorded} recorded ones.")
    pair, started = load_pair(), time.time()
    traces = {name: recorded(name, args.seed, args.recorded, args.traces, pair) for name in DATASETS}
    rows, curves = [], {}
    for segment in args.segments:
        stream = rotate(traces, segment, args.requests)
        static = replay_each(pair[1], stream, K)
        for rule, changes in RULES.items():
            with tqdm(total=len(stream), desc=f"every {segment}, {rule}", leave=False) as bar:
                config = OnlineConfig(gate=False, seed=args.seed, **changes)
                report = simulate(pair[1], stream, config, on_request=lambda i, s, bar=bar: bar.update())
            before, after = sum(static, AcceptanceStats()), sum(report.stats, AcceptanceStats())
            low, high = alpha_gain_interval(before, after)
            rows.append(
                {
                    "segment": segment, "rule": rule, "alpha": after.alpha, "static": before.alpha,
                    "gain": after.alpha - before.alpha, "gain_low": low, "gain_high": high,
                    "last_fifth": last_share(report.stats).alpha, "static_last_fifth": last_share(static).alpha,
                    "alpha_by_position": by_position(report.stats, segment),
                    "static_by_position": by_position(static, segment),
                    "alpha_by_dataset": {
                        name: pooled([s for s, t in zip(report.stats, stream, strict=True) if t.domain == name])
                        for name in DATASETS
                    },
                }
            )  # fmt: skip
            curves[rule, segment] = rolling_alpha(report.stats, args.window) - rolling_alpha(static, args.window)
            row = rows[-1]
            gain = np.subtract(row["alpha_by_position"], row["static_by_position"])
            print(
                f"every {segment:3d}  {rule:14s}  alpha {row['alpha']:.3f}  static {row['static']:.3f}  gain "
                f"{row['gain']:+.3f} [{low:+.3f}, {high:+.3f}]  last fifth {row['last_fifth']:.3f}  by position "
                f"{' '.join(f'{g:+.3f}' for g in gain)}",
                flush=True,
            )
    RESULTS.mkdir(parents=True, exist_ok=True)
    plot(RESULTS / f"{args.name}.png", rows, curves, args.window)
    facts = {
        "seed": args.seed, "requests": args.requests, **run_facts(started),
    }  # fmt: skip
    write_report(args.name, {"config": OnlineConfig(gate=False, seed=args.seed).to_dict(), "rows": rows}, **facts)


if __name__ == "__main__":
    main()
