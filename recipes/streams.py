"""
The paper's streams of requests, by replay over recorded target traces: acceptance while the traffic changes, of the
learning draft against the static one, with a plot of each.

    OSD_HF_DATA=... python recipes/streams.py                                  # all, 600 requests a data set, 3 seeds
    OSD_HF_DATA=... python recipes/streams.py --stream sharp --rule before --name streams_before
    OSD_HF_DATA=... python recipes/streams.py --requests 16 --seeds 0 --window 8                # smoke

sharp     gsm8k, spider, finance, code, one after the other; how many requests it takes to win back 90% of what each
          switch costs
smooth    spider grows from a tenth to eight tenths of the traffic, gsm8k shrinks the other way, finance keeps a tenth
two_mix   gsm8k and finance mixed; only requests of gsm8k are learned from at first, only those of finance in the
          second half
every_10, every_50, every_200   the four data sets by turns, switched every so many requests; 800 in all

Simulated as it is served by default: with the gate, and with the choice between the learned draft and the draft as it
was. What a switch costs, and what is won back, is measured as gain over the static draft on the same requests, which
cancels how hard they are: from the first 8 requests, served before anything was learned from the new data set, to the
level of the last fifth of its segment. Gains are pooled over a window, as in the plot, whose lag is counted.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import common
import numpy as np
from common import (
    EARLIER_RULE,
    K,
    drawing,
    kept,
    kept_stats,
    last_share,
    load_pair,
    make_parser,
    pooled,
    recorded,
    requests_stats,
    rotate,
    simulated,
    write_report,
)

from osd_hf import AcceptanceStats, OnlineConfig, Trace
from osd_hf.evaluation.display import rolling_alpha
from osd_hf.replay import replay_each
from osd_hf.utils.report import provenance

DATASETS = {
    "sharp": common.DATASETS,
    "smooth": ("spider", "gsm8k", "finance_alpaca"),
    "two_mix": ("gsm8k", "finance_alpaca"),
    **dict.fromkeys(("every_10", "every_50", "every_200"), common.DATASETS),
}
# The rule before, each version of which served; and what is the paper's.
RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "before": {**EARLIER_RULE, "gate": False},
    "paper": OnlineConfig.paper().to_dict(),
}
WINDOW = 20  # requests in a row over which learning should not be worse than not learning
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


def every(segment: int) -> Callable[[dict[str, list[Trace]], random.Random], list[Trace]]:
    """The data sets by turns, for so many requests each; of few recorded ones, the first alone perhaps."""

    def turns(traces: dict[str, list[Trace]], rng: random.Random) -> list[Trace]:
        recorded = len(next(iter(traces.values())))
        return rotate(traces, segment, recorded // 200 * 200 * 4 // 3 or recorded)

    return turns


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


def worst_window(pairs: Sequence[tuple[Stats, Stats]]) -> dict[str, Any]:
    """Where learning was furthest below the static draft, over any `WINDOW` requests in a row: of the mean of the
    seeds, and of each."""
    size = min(WINDOW, len(pairs[0][1]))
    gains = np.array([rolling_alpha(learned, size) - rolling_alpha(static, size) for learned, static in pairs])
    gains = gains[:, size - 1 :]
    mean = gains.mean(0)
    return {"gain": float(mean.min()), "ends_at": int(mean.argmin()) + size, "by_seed": gains.min(1).tolist()}


def plot(name: str, kind: str, stream: list[Trace], pairs: Sequence[tuple[Stats, Stats]], window: int) -> None:
    """Rolling alpha over the requests, mean of the seeds: one pair of lines, or where two are mixed, one for each
    data set of the first seed."""
    domains = [str(trace.domain) for trace in stream]
    lines = {"": range(len(stream))}
    if kind == "two_mix":
        pairs, places_of = pairs[:1], dict.fromkeys(domains)
        lines = {name: [i for i, d in enumerate(domains) if d == name] for name in places_of}
    with drawing(f"{name}_{kind}", figsize=(9, 4)) as (_, axes):
        axis = axes[0, 0]
        for number, (domain, places) in enumerate(lines.items()):
            for side, (label, style) in enumerate((("learning", "-"), ("static", "--"))):
                alpha = np.mean([rolling_alpha([pair[side][i] for i in places], window) for pair in pairs], axis=0)
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


MAKE = {
    "sharp": sharp, "smooth": smooth, "two_mix": two_mix, "every_10": every(10), "every_50": every(50),
    "every_200": every(200),
}  # fmt: skip


def earlier(name: str) -> dict[str, Any]:
    """The streams of an earlier report; those run now take their places."""
    path = common.RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())["streams"]) if path.exists() else {}


def main() -> None:
    parser = make_parser(__doc__, "streams", seed=False)
    parser.add_argument("--stream", nargs="+", choices=tuple(DATASETS), default=list(DATASETS))
    parser.add_argument("--requests", type=int, default=600, help="of each data set")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--window", type=int, default=32, help="requests pooled in a point")
    parser.add_argument("--rule", choices=list(RULES), default="default")
    args = parser.parse_args()
    pair, rule = load_pair(), RULES[args.rule]
    report: dict[str, Any] = {"window": args.window, "streams": earlier(args.name)}
    for kind in args.stream:
        pairs: list[tuple[Stats, Stats]] = []
        switches, streams = [], []
        for seed in args.seeds:
            traces = {name: recorded(name, seed, args.requests, args.traces, pair) for name in DATASETS[kind]}
            stream = MAKE[kind](traces, random.Random(seed))
            static, config = replay_each(pair.draft, stream, K), OnlineConfig(**{**rule, "seed": seed})
            known = zlib.crc32(json.dumps([config.to_dict(), args.requests]).encode())

            title = f"{kind} seed {seed}"

            def run(stream: list[Trace] = stream, config: OnlineConfig = config, bar: str = title) -> dict[str, Any]:
                return {"counts": requests_stats(simulated(pair.draft, stream, config, bar=bar))}

            file = args.traces / "streams" / f"{kind}-seed{seed}-{args.rule}-{known:08x}.json"
            pairs.append((kept_stats(kept(file, run)["counts"]), static))
            streams.append(stream)
            if kind == "sharp":
                switches.append(recoveries(stream, *pairs[-1], args.window, config.update_interval))
            elif kind == "two_mix":
                switches.append([recovery(stream, *pairs[-1], args.window)])
        found = report["streams"][kind] = {
            "config": config.to_dict(), "seeds": args.seeds, "requests": len(stream),
            "alpha": float(np.mean([pooled(learned) for learned, _ in pairs])),
            "static": float(np.mean([pooled(static) for _, static in pairs])),
            "first_40": float(np.mean([pooled(one[:40]) - pooled(still[:40]) for one, still in pairs])),
            "worst_window": worst_window(pairs), "switches": switches,
            "parts": [by_part(s, *p, 2 if kind == "two_mix" else 4) for s, p in zip(streams, pairs, strict=True)],
            "provenance": provenance(seeds=args.seeds, requests=args.requests),
        }  # fmt: skip
        worst = found["worst_window"]
        print(
            f"\n{kind}: {len(stream)} requests, {len(pairs)} seeds, alpha {found['alpha']:.3f}, static "
            f"{found['static']:.3f}; first 40 {found['first_40']:+.3f}; the worst {WINDOW} requests "
            f"{worst['gain']:+.3f}, up to request {worst['ends_at']} (by seed "
            f"{' '.join(f'{g:+.3f}' for g in worst['by_seed'])})",
            flush=True,
        )
        for those in zip(*switches, strict=True):
            back = [s["requests_to_recover"] for s in those]
            low, level, loss = (np.mean([s[key] for s in those]) for key in ("alpha_before", "alpha_level", "loss"))
            print(
                f"  to {those[0]['to']:24s} alpha {low:.3f} before, {level:.3f} at the end; 90% of the loss of "
                f"{loss:.3f} won back after {', '.join('-' if n is None else str(n) for n in back)} requests"
            )
        plot(args.name, kind, streams[0], pairs, args.window)
        write_report(args.name, report, seeds=args.seeds, requests=args.requests)


if __name__ == "__main__":
    main()
