"""
The paper's streams of requests, by replay over recorded target traces: acceptance while the traffic changes, of the
learning draft against the static one, with a plot of each.

    OSD_HF_DATA=... python recipes/streams.py                                  # all three, 600 requests a data set
    OSD_HF_DATA=... python recipes/streams.py --stream sharp --paper-rule
    OSD_HF_DATA=... python recipes/streams.py --requests 16 --window 8         # smoke

sharp     gsm8k, spider, finance, code, one after the other; how many requests it takes to win back 90% of what each
          switch costs
smooth    spider grows from a tenth to eight tenths of the traffic, gsm8k shrinks the other way, finance keeps a tenth
two_mix   gsm8k and finance mixed; only requests of gsm8k are learned from at first, only those of finance in the
          second half

What a switch costs, and what is won back, is measured as gain over the static draft on the same requests, which
cancels how hard they are: from the first 8 requests, served before anything was learned from the new data set, to the
level of the last fifth of its segment. Gains are pooled over a window, as in the plot, whose lag is counted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import common
import numpy as np
from common import K, drawing, last_share, load_pair, make_parser, pooled, recorded, simulated, write_report

from osd_hf import AcceptanceStats, OnlineConfig, Trace
from osd_hf.bench.display import rolling_alpha
from osd_hf.replay import replay_each
from osd_hf.utils.report import provenance

DATASETS = {
    "sharp": common.DATASETS,
    "smooth": ("spider", "gsm8k", "finance_alpaca"),
    "two_mix": ("gsm8k", "finance_alpaca"),
}
Stats = Sequence[AcceptanceStats]


def sharp(traces: dict[str, list[Trace]], rng: random.Random) -> list[Trace]:
    return [trace for name in traces for trace in traces[name]]


def smooth(traces: dict[str, list[Trace]], rng: random.Random) -> list[Trace]:
    left = [list(reversed(t)) for t in traces.values()]
    # None of the three data sets serves more than about half of the traffic.
    total, stream = len(left[0]) * 3 // 2, []
    for i in range(total):
        shares = (0.1 + 0.7 * i / total, 0.8 - 0.7 * i / total, 0.1)
        chosen = rng.choices(left, [share * bool(traces) for share, traces in zip(shares, left, strict=True)])[0]
        stream.append(chosen.pop())
    return stream


def two_mix(traces: dict[str, list[Trace]], rng: random.Random) -> list[Trace]:
    stream = sharp(traces, rng)
    rng.shuffle(stream)
    first, second = traces
    return [
        trace if trace.domain == (first if i < len(stream) // 2 else second) else not_learned(trace)
        for i, trace in enumerate(stream)
    ]


def not_learned(trace: Trace) -> Trace:
    """The trace as it is captured with `learn=False`: without the target's rows."""
    nothing = np.zeros((len(trace), 0))
    return replace(
        trace, top_logits=nothing.astype(trace.top_logits.dtype), top_ids=nothing.astype(trace.top_ids.dtype)
    )


def recoveries(stream: list[Trace], learned: Stats, static: Stats, window: int, interval: int) -> list[dict[str, Any]]:
    """For each switch: alpha around it, what it cost, and the requests until 90% of that was won back; `None` where
    nothing was lost, or not enough won back."""
    found, start = [], 0
    for domain, group in groupby(stream, key=lambda trace: str(trace.domain)):
        segment = slice(start, start + len(list(group)))
        before, start = slice(max(start - window, 0), start), segment.stop
        if before.stop == 0:
            continue
        after = slice(segment.start, segment.start + interval)
        served, still = learned[segment], static[segment]
        level = last_share([*served]).alpha - last_share([*still]).alpha
        low = pooled(learned[after]) - pooled(static[after])
        gain = rolling_alpha(served, window) - rolling_alpha(still, window)
        recovered = np.flatnonzero(gain[interval:] >= level - 0.1 * (level - low)) if level > low else []
        found.append(
            {
                "to": domain, "request": segment.start, "alpha_before": pooled(learned[before]),
                "alpha_after": pooled(learned[after]), "alpha_level": last_share([*served]).alpha, "loss": level - low,
                "requests_to_recover": int(recovered[0]) + interval + 1 if len(recovered) else None,
            }
        )  # fmt: skip
    return found


def recovery(stream: list[Trace], learned: Stats, static: Stats, window: int) -> dict[str, Any]:
    """For the data set that is served throughout and learned from only in the second half: what that had cost it, and
    the requests of the stream until 90% was won back."""
    half, name = len(stream) // 2, str(list(dict.fromkeys(t.domain for t in stream if t.num_kept))[-1])
    places = np.array([i for i, trace in enumerate(stream) if trace.domain == name])
    served, still = [learned[i] for i in places], [static[i] for i in places]
    gain = rolling_alpha(served, window) - rolling_alpha(still, window)
    later = np.flatnonzero(places >= half)
    low, level = float(gain[later[0]]), last_share(served).alpha - last_share(still).alpha
    recovered = later[gain[later] >= level - 0.1 * (level - low)]
    return {
        "to": name, "request": half, "alpha_before": pooled(served[: later[0]][-window:]),
        "alpha_level": last_share(served).alpha, "loss": level - low,
        "requests_to_recover": int(places[recovered[0]]) - half + 1 if len(recovered) else None,
    }  # fmt: skip


def by_part(stream: list[Trace], learned: Stats, static: Stats, parts: int) -> list[dict[str, Any]]:
    """Alpha of each data set in equal parts of the stream."""
    bounds = np.linspace(0, len(stream), parts + 1).round().astype(int)
    rows = []
    for part, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False), start=1):
        for domain in dict.fromkeys(str(trace.domain) for trace in stream):
            those = [i for i in range(start, end) if stream[i].domain == domain]
            if not those:
                continue
            rows.append(
                {
                    "part": f"{part}/{parts}", "dataset": domain, "requests": len(those),
                    "alpha": pooled([learned[i] for i in those]), "static": pooled([static[i] for i in those]),
                }
            )  # fmt: skip
    return rows


def plot(name: str, kind: str, stream: list[Trace], learned: Stats, static: Stats, window: int) -> None:
    """Rolling alpha over the requests: one pair of lines, or where two are mixed, one for each data set."""
    domains = [str(trace.domain) for trace in stream]
    lines = {"": range(len(stream))}
    if kind == "two_mix":
        lines = {name: [i for i, d in enumerate(domains) if d == name] for name in dict.fromkeys(domains)}
    with drawing(f"{name}_{kind}", figsize=(9, 4)) as (_, axes):
        axis = axes[0, 0]
        for number, (domain, places) in enumerate(lines.items()):
            for label, stats, style in (("learning", learned, "-"), ("static", static, "--")):
                alpha = rolling_alpha([stats[i] for i in places], window)
                axis.plot([i + 1 for i in places], alpha, style, color=f"C{number}", label=f"{label} {domain}".strip())
        notes = {}
        if kind == "sharp":
            notes = {i: name for i, name in enumerate(domains) if i == 0 or name != domains[i - 1]}
        elif kind == "two_mix":
            notes = {i * len(stream) // 2: f"learns from {name}" for i, name in enumerate(DATASETS[kind])}
        for start, note in notes.items():
            axis.axvline(start + 0.5, color="0.6", linewidth=1)
            axis.annotate(note, (start + 1, 1.01), xycoords=("data", "axes fraction"), fontsize=8)
        axis.set_title(f"{kind} stream", loc="left", pad=18)
        axis.set(xlabel="request", ylabel=f"alpha, last {window} requests")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)


def earlier(name: str) -> dict[str, Any]:
    """The streams of an earlier report; those run now take their places."""
    path = common.RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())["streams"]) if path.exists() else {}


def main() -> None:
    parser = make_parser(__doc__, "streams")
    parser.add_argument("--stream", nargs="+", choices=tuple(DATASETS), default=list(DATASETS))
    parser.add_argument("--requests", type=int, default=600, help="of each data set")
    parser.add_argument("--window", type=int, default=32, help="requests pooled in a point")
    parser.add_argument("--paper-rule", action="store_true", help="the paper's update in place of ours")
    args = parser.parse_args()
    pair = load_pair()
    config = (OnlineConfig.paper if args.paper_rule else OnlineConfig)(gate=False, seed=args.seed)
    make = {"sharp": sharp, "smooth": smooth, "two_mix": two_mix}
    report: dict[str, Any] = {"window": args.window, "streams": earlier(args.name)}
    for kind in args.stream:
        traces = {name: recorded(name, args.seed, args.requests, args.traces, pair) for name in DATASETS[kind]}
        stream = make[kind](traces, random.Random(args.seed))
        static = replay_each(pair.draft, stream, K)
        learned = simulated(pair.draft, stream, config, bar=kind).stats
        found: dict[str, Any] = {
            "config": config.to_dict(), "requests": len(stream), "alpha": pooled(learned), "static": pooled(static),
            "parts": by_part(stream, learned, static, 2 if kind == "two_mix" else 4),
        }  # fmt: skip
        print(f"\n{kind}: {len(stream)} requests, alpha {found['alpha']:.3f}, static {found['static']:.3f}")
        if kind == "sharp":
            found["switches"] = recoveries(stream, learned, static, args.window, config.update_interval)
        else:
            for p in found["parts"]:
                print(f"  {p['part']} {p['dataset']:24s} alpha {p['alpha']:.3f}, static {p['static']:.3f}")
        if kind == "two_mix":
            found["switches"] = [recovery(stream, learned, static, args.window)]
        for s in found.get("switches", ()):
            back = f"after {s['requests_to_recover']} requests" if s["requests_to_recover"] else "not"
            print(
                f"  to {s['to']:24s} alpha {s['alpha_before']:.3f} before, {s['alpha_level']:.3f} at the end; 90% of "
                f"the loss of {s['loss']:.3f} won back: {back}"
            )
        found["provenance"] = provenance(seed=args.seed, requests=args.requests)
        report["streams"][kind] = found
        plot(args.name, kind, stream, learned, static, args.window)
    write_report(args.name, report, seed=args.seed, requests=args.requests)


if __name__ == "__main__":
    main()
