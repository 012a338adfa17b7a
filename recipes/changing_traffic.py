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

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import (
    DATASETS,
    REPLAY_RULES,
    K,
    drawing,
    gain,
    last_share,
    load_pair,
    make_parser,
    pooled,
    recorded,
    rotate,
    run_facts,
    simulated,
    write_report,
)

from osd_hf import AcceptanceStats, OnlineConfig
from osd_hf.evaluation.display import rolling_alpha
from osd_hf.replay import replay_each

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


def plot(name: str, rows: list[dict[str, Any]], curves: dict[tuple[str, int], Any], window: int) -> None:
    """Rolling gain over the stream, a panel for each pace; the mean gain by pace; the gain by position."""
    segments = sorted({row["segment"] for row in rows})
    with drawing(name, 2, max(len(segments), 2), figsize=(14, 7), dpi=120) as (_, axes):
        for axis, segment in zip(axes[0], segments, strict=False):
            for number, rule in enumerate(REPLAY_RULES):
                curve = curves[rule, segment]
                axis.plot(np.arange(1, len(curve) + 1), curve, f"C{number}", label=rule)
            if segment >= 50:
                for start in range(0, len(curve), segment):
                    axis.axvline(start + 0.5, color="0.8", linewidth=0.8, zorder=0)
            axis.axhline(0, color="0.5", linewidth=0.8)
            axis.set(
                title=f"a switch every {segment} requests", xlabel="request", ylabel=f"gain, last {window} requests"
            )
            if axis is not axes[0][0]:
                axis.sharey(axes[0][0])
            axis.legend(fontsize=8)
        for number, rule in enumerate(REPLAY_RULES):
            those = [row for row in rows if row["rule"] == rule]
            gains, low, high = (np.array([r[key] for r in those]) for key in ("gain", "gain_low", "gain_high"))
            axes[1][0].errorbar(
                [r["segment"] for r in those], gains, (gains - low, high - gains), fmt="o-", color=f"C{number}",
                capsize=3, label=rule,
            )  # fmt: skip
            for row, style in zip(those, ("-", "--", ":", "-."), strict=False):
                rise = np.subtract(row["alpha_by_position"], row["static_by_position"])
                places = (np.arange(len(rise)) + 0.5) / len(rise)
                label = f"{rule}, every {row['segment']}"
                axes[1][1].plot(places, rise, f"C{number}{style}", marker="o", markersize=3, label=label)
        axes[1][0].set(
            xscale="log", xlabel="requests between switches", ylabel="gain over the static draft, whole stream"
        )
        axes[1][0].set_xticks(segments, segments)
        axes[1][0].minorticks_off()
        axes[1][1].set(xlabel="place in the segment (0 to 1), second half of the stream", ylabel="gain")
        for axis in axes[1][:2]:
            axis.legend(fontsize=8)
        for axis in axes.flat:
            axis.grid(alpha=0.3)
        for axis in (*axes[1][2:], *axes[0][len(segments) :]):
            axis.set_axis_off()


def main() -> None:
    parser = make_parser(__doc__, "changing_traffic")
    parser.add_argument("--segments", type=int, nargs="+", default=[10, 50, 200], help="requests between switches")
    parser.add_argument("--requests", type=int, default=800, help="of a stream; a whole number of turns of all paces")
    parser.add_argument("--recorded", type=int, default=600, help="requests recorded of each data set")
    parser.add_argument("--window", type=int, default=64, help="requests pooled in a point")
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
        static = replay_each(pair.draft, stream, K)
        for rule, changes in REPLAY_RULES.items():
            config = OnlineConfig(gate=False, seed=args.seed, **changes)
            report = simulated(pair.draft, stream, config, bar=f"every {segment}, {rule}")
            before, after = sum(static, AcceptanceStats()), sum(report.stats, AcceptanceStats())
            low, high = gain(before, after)["gain_interval"]
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
            places = np.subtract(row["alpha_by_position"], row["static_by_position"])
            print(
                f"every {segment:3d}  {rule:14s}  alpha {row['alpha']:.3f}  static {row['static']:.3f}  gain "
                f"{row['gain']:+.3f} [{low:+.3f}, {high:+.3f}]  last fifth {row['last_fifth']:.3f}  by position "
                f"{' '.join(f'{g:+.3f}' for g in places)}",
                flush=True,
            )
    plot(args.name, rows, curves, args.window)
    facts = {"seed": args.seed, "requests": args.requests, **run_facts(started)}
    write_report(args.name, {"config": OnlineConfig(gate=False, seed=args.seed).to_dict(), "rows": rows}, **facts)


if __name__ == "__main__":
    main()
