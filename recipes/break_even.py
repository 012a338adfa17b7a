"""
After how many requests learning has paid for itself: what the learned draft saves against the static one, less what
learning costs, by load, and where learning stops after so many requests.

    OSD_HF_DATA=... python recipes/break_even.py                                            # 4 x 600 requests
    OSD_HF_DATA=... python recipes/break_even.py --requests 20 --stops 8 --datasets gsm8k   # smoke

One simulated run per data set; the drafts that it had after each of `--stops` requests are replayed on the rest. What
is saved is rounds (a round = k forwards of the draft and one of the target), counted in three ways:

seconds        measured ones of the lab pair: a round's by flags, learning's processor seconds by this run
lab FLOPs      2 a parameter and token forward, 6 learning (prompts and replayed requests included); a round verifies
               k + 1 tokens
7B FLOPs       the same for a 7B target with a 160M draft, *as if* their acceptance had the lab pair's curves

FLOPs are no time: decoding one request at a time is bound by memory, learning in batches by compute, so that on an
accelerator a saved FLOP of decoding is worth many FLOPs of learning. Prefill is the same on both sides and left out.

At load rho with the static draft the machine idles (1 - rho) / rho of each request's service. Learning in that time is
free; only what does not fit into the idle time of the update's own requests is paid. Where the balance ends below
zero, the break-even is extrapolated at the mean slope of the last fifth and marked by ~.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import (
    TEMPLATES,
    K,
    drawing,
    last_share,
    load_pair,
    make_parser,
    processor_timed,
    recorded,
    run_facts,
    simulated,
    write_report,
)
from numpy.typing import NDArray

from osd_hf import AcceptanceStats, OnlineConfig, Trace
from osd_hf.replay import replay_each

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """Rounds of each request with the static draft and, by the request after which learning stopped, with the learned
    one; of each update the seconds and the tokens forwarded."""

    static: list[AcceptanceStats]
    learned: dict[int, list[AcceptanceStats]]
    seconds: Array
    tokens: Array


@dataclass(frozen=True)
class Account:
    """What a round and each update cost, in one unit."""

    round: float
    updates: Array


def run(draft: Any, traces: list[Trace], stops: list[int], config: OnlineConfig, name: str) -> Run:
    learner = processor_timed(draft, config)
    stats: list[AcceptanceStats] = []
    updates, learned = [], {}
    for stop in stops:
        report = simulated(draft, traces[len(stats) : stop], learner=learner, bar=f"{name} until {stop}")
        stats, updates = stats + list(report.stats), updates + list(report.updates)
        learned[stop] = stats + replay_each(report.draft, traces[stop:], K)
    # The report counts answer positions; prompts are forwarded with them.
    answers, prompts = sum(len(t) for t in traces), sum(len(t.prompt_ids) for t in traces)
    tokens = np.array([u.positions for u in updates]) * (1 + prompts / answers)
    return Run(replay_each(draft, traces, K), learned, np.array([u.seconds for u in updates]), tokens)


def accounts(found: Run, args: argparse.Namespace, sizes: dict[str, tuple[float, float]]) -> dict[str, Account]:
    """Costs of the lab pair in seconds, and of each pair (parameters of target and draft) in FLOPs."""
    those = {"seconds": Account(args.round_ms / 1e3, found.seconds)}
    for name, (target, draft) in sizes.items():
        those[name] = Account(2 * ((K + 1) * target + K * draft), 6 * draft * found.tokens)
    return those


def rounds(stats: list[AcceptanceStats]) -> Array:
    return np.array([s.target_forwards for s in stats], dtype=float)


def balance(found: Run, account: Account, stop: int, load: float, interval: int) -> Array:
    """What was saved less what was paid, after each request."""
    static, learned = rounds(found.static) * account.round, rounds(found.learned[stop]) * account.round
    idle = static * (1 - load) / load
    paid = np.zeros(len(static))
    for i in range(stop // interval):
        those = slice(i * interval, (i + 1) * interval)
        paid[those.stop - 1] = max(account.updates[i] - idle[those].sum(), 0.0)
    return np.cumsum(static - learned - paid)


def break_even(net: Array) -> tuple[float, bool]:
    """The number of requests after which the balance stays at least zero (infinite: never), and whether it had to be
    extrapolated."""
    if net[-1] >= 0:
        below = np.flatnonzero(net < 0)
        return (float(below[-1] + 2) if len(below) else 0.0), False
    start = round(len(net) * 0.8)
    slope = (net[-1] - net[start - 1]) / (len(net) - start)
    return (len(net) - net[-1] / slope if slope > 0 else math.inf), True


def shown(requests: float, extrapolated: bool) -> str:
    if math.isinf(requests):
        return "never"
    return f"~{requests:,.0f}" if extrapolated else "at once" if requests == 0 else f"{requests:.0f}"


def matrix_parameters(model: Any) -> int:
    """Parameters that a token is multiplied with: looking up an embedding costs nothing, a tied head does."""
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return model.num_parameters() - (0 if tied else model.get_input_embeddings().weight.numel())


def plot(name: str, mean_net: dict[tuple[str, float, int], Array], last: int) -> None:
    """Mean balance of the data sets: loads across, ways of counting down, a line for each stop."""
    ways, loads, stops = (list(dict.fromkeys(key[i] for key in mean_net)) for i in range(3))
    size = (3.4 * len(loads), 2.9 * len(ways))
    with drawing(name, len(ways), len(loads), figsize=size, sharex=True, dpi=120) as (_, axes):
        for (row, way), (column, load) in itertools.product(enumerate(ways), enumerate(loads)):
            axis = axes[row, column]
            for number, stop in enumerate(stops):
                label = "learns throughout" if stop == last else f"learns from the first {stop}"
                axis.plot(np.arange(1, last + 1), mean_net[way, load, stop], color=f"C{number}", label=label)
            axis.axhline(0, color="0.4", linewidth=0.8)
            axis.grid(alpha=0.3)
        for axis, load in zip(axes[0], loads, strict=True):
            axis.set_title(f"load {load:g}")
        for axis in axes[-1]:
            axis.set_xlabel("request")
        for axis, way in zip(axes[:, 0], ways, strict=True):
            axis.set_ylabel(f"balance in {way},\nserved requests' worth")
        axes[0, 0].legend(fontsize=8)


def main() -> None:
    parser = make_parser(__doc__, "break_even")
    parser.add_argument("--datasets", nargs="+", default=list(TEMPLATES))
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--stops", type=int, nargs="*", default=[64, 128, 256], help="learn from the first N only")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9, 1.0])
    parser.add_argument("--token-ms", type=float, default=3.0, help="of the target alone")
    parser.add_argument("--round-ms", type=float, default=8.8, help="of a round at k = 5, lean drafting")
    parser.add_argument("--target-parameters", type=float, default=7e9, help="of the pair that is not there")
    parser.add_argument("--draft-parameters", type=float, default=160e6)
    args = parser.parse_args()
    config = OnlineConfig(gate=False, seed=args.seed)
    every = config.update_interval
    if any(not 0 < stop < args.requests or stop % every for stop in args.stops):
        parser.error(f"--stops must be below --requests and multiples of {every}.")
    pair, started = load_pair(), time.time()
    other = f"{args.target_parameters / 1e9:g}B FLOPs"
    sizes = {
        "lab FLOPs": (float(matrix_parameters(pair[0])), float(matrix_parameters(pair[1]))),
        other: (args.target_parameters, args.draft_parameters),
    }
    stops = [*sorted(args.stops), args.requests]
    rows: list[dict[str, Any]] = []
    nets: dict[tuple[str, float, int], list[Array]] = {}
    for name in args.datasets:
        traces = recorded(name, args.seed, args.requests, args.traces, pair)
        found = run(pair[1], traces, stops, config, name)
        alone = args.token_ms / 1e3 * float(np.mean([len(t) for t in traces]))
        static, learner = args.round_ms / 1e3 * rounds(found.static).mean(), found.seconds.sum() / len(traces)
        frozen = {stop: last_share(stats) for stop, stats in found.learned.items()}
        print(
            f"\n{name}: {len(traces)} requests; seconds a request: target alone {alone:.3f}, static draft "
            f"{static:.3f}, learning {learner:.3f}; last fifth's alpha: static {last_share(found.static).alpha:.3f}, "
            + ", ".join(f"{s.alpha:.3f} learned from {stop}" for stop, s in frozen.items()),
            flush=True,
        )
        for way, account in accounts(found, args, sizes).items():
            for stop in stops:
                cells = {}
                for load in args.loads:
                    net = balance(found, account, stop, load, every)
                    unit = rounds(found.static).mean() * account.round
                    nets.setdefault((way, load, stop), []).append(net / unit)
                    cells[load] = (*break_even(net), net[-1] / unit)
                end = last_share(found.static).target_forwards - frozen[stop].target_forwards
                rows.append(
                    {
                        "dataset": name, "way": way, "learns_from": stop, "round": account.round,
                        "update": float(account.updates.mean()), "alpha_last_fifth": frozen[stop].alpha,
                        "static_last_fifth": last_share(found.static).alpha,
                        "saved_per_request_last_fifth": end / frozen[stop].num_requests * account.round,
                        "learning_per_request": float(account.updates[: stop // every].sum()) / stop,
                        "loads": [
                            {
                                "load": load, "requests": None if math.isinf(n) else n, "extrapolated": guessed,
                                "net_in_served_requests": end_net,
                            }
                            for load, (n, guessed, end_net) in cells.items()
                        ],
                    }
                )  # fmt: skip
                print(
                    f"  {way:10s} learns from {stop:3d}: a request at the end saves "
                    f"{rows[-1]['saved_per_request_last_fifth']:.3g}, learning costs "
                    f"{rows[-1]['learning_per_request']:.3g} each; paid after "
                    + "  ".join(f"{shown(n, guessed)} ({load:g})" for load, (n, guessed, _) in cells.items()),
                    flush=True,
                )
        rows[-1]["seconds_per_request"] = {"target_alone": alone, "static": static, "learning": learner}
    plot(args.name, {key: np.mean(n, axis=0) for key, n in nets.items()}, args.requests)
    report = {
        "config": config.to_dict(), "k": K, "token_ms": args.token_ms, "round_ms": args.round_ms,
        "parameters": {way: {"target": t, "draft": d} for way, (t, d) in sizes.items()}, "rows": rows,
    }  # fmt: skip
    write_report(args.name, report, seed=args.seed, requests=args.requests, **run_facts(started))


if __name__ == "__main__":
    main()
