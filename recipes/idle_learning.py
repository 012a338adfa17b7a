"""
Learning in spare time, live: Poisson arrivals at a share of what the machine can serve, learning on and off in
alternating blocks.

    OSD_HF_DATA=... python recipes/idle_learning.py                              # 30% and 60% load, 192 requests each
    OSD_HF_DATA=... python recipes/idle_learning.py --loads 0.6 --requests 16 --block 4      # smoke

One server, first come first served. Of each request: service time, from the call to the answer; delay, from the call
to the target's first forward, which is what a request may have to wait for the learner; alpha, and what the static
draft would have had, by replay. Of each load: the ratio of service times on and off at the median and the 95th
percentile with bootstrap intervals over requests, the share of the idle time that learning used, and alpha gained over
the static draft per minute. Requests in off blocks are captured, not learned from; drafts stay as they are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import MAX_NEW_TOKENS, K, drawing, load_pair, make_parser, pooled, prompts, run_facts, write_report
from numpy.typing import NDArray
from tqdm import tqdm

from osd_hf import AcceptanceStats, CorrectionStore, OnlineAssistant, OnlineConfig
from osd_hf.replay import replay_each

Seconds = NDArray[np.float64]


class FirstForward:
    """When the target was run first after a request had come."""

    def __init__(self, target: Any) -> None:
        self.at: float | None = None
        self._forward: Callable[..., Any] = target.forward
        target.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.at is None:
            self.at = time.perf_counter()
        return self._forward(*args, **kwargs)


def serve(assistant: OnlineAssistant, watch: FirstForward, ids: list[int]) -> tuple[float, float]:
    """Service time and delay of one request, seconds."""
    prompt = torch.tensor([ids])
    watch.at, began = None, time.perf_counter()
    assistant.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    assert watch.at is not None
    return time.perf_counter() - began, watch.at - began


def ratio(on: Seconds, off: Seconds, percentile: float) -> list[float]:
    """On over off at a percentile, with its 95% bootstrap interval."""
    rng = np.random.default_rng(0)
    resampled = [
        np.percentile(rng.choice(on, len(on)), percentile) / np.percentile(rng.choice(off, len(off)), percentile)
        for _ in range(2000)
    ]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return [float(np.percentile(on, percentile) / np.percentile(off, percentile)), float(low), float(high)]


def run(load: float, pair: Any, watch: FirstForward, asked: list[list[int]], args: Any) -> dict[str, Any]:
    target, draft, tokenizer = pair
    rng, store = random.Random(args.seed), CorrectionStore()
    config = OnlineConfig(
        num_assistant_tokens=5, update_strategy="idle", micro_step_seconds=args.micro_step, seed=args.seed
    )
    rows, idle = [], {True: 0.0, False: 0.0}
    with OnlineAssistant(target, draft, tokenizer, config, store=store) as assistant:
        assistant.pause()
        alone = float(np.mean([serve(assistant, watch, ids)[0] for ids in asked[: args.block]]))
        arrival = free = time.perf_counter()
        minutes = 0.0
        for i, ids in enumerate(tqdm(asked[args.block :], desc=f"load {load:g}")):
            learns = i // args.block % 2 == 0
            (assistant.resume if learns else assistant.pause)()
            arrival += rng.expovariate(load / alone)
            time.sleep(max(arrival - time.perf_counter(), 0.0))
            idle[learns] += max(time.perf_counter() - free, 0.0)
            service, delay = serve(assistant, watch, ids)
            minutes += (time.perf_counter() - free) / 60 * learns
            free = time.perf_counter()
            rows.append((learns, service, delay))
        assistant.pause()
        spent = assistant.learning_seconds
    traces = list(store)[args.block :]
    stats = [AcceptanceStats.from_trace(t) for t in traces]
    static = replay_each(draft, traces, K)
    on, off = (np.array([r[1] for r in rows if r[0] is learns]) for learns in (True, False))
    waits = {learns: 1e3 * np.array([r[2] for r in rows if r[0] is learns]) for learns in (True, False)}
    last = slice(round(len(stats) * 0.75), None)
    gain = pooled(stats[last]) - pooled(static[last])
    return {
        "load": load, "service_ms_alone": 1e3 * alone, "requests": len(rows),
        "service_p50": ratio(on, off, 50), "service_p95": ratio(on, off, 95),
        "delay_ms": {
            name: {f"p{p}": float(np.percentile(waits[learns], p)) for p in (50, 95, 100)}
            for name, learns in (("on", True), ("off", False))
        },
        "idle_seconds_on": idle[True], "learning_seconds": spent, "idle_share_used": spent / max(idle[True], 1e-9),
        "gain_last_quarter": gain, "minutes_on": minutes, "gain_per_minute": gain / minutes,
        "promoted": sum(d.outcome == "promoted" for d in assistant.decisions),
        "services": [[int(r[0]), r[1], r[2]] for r in rows],
    }  # fmt: skip


def plot(name: str, rows: list[dict[str, Any]]) -> None:
    with drawing(name, 1, len(rows), figsize=(4.5 * len(rows), 3.6)) as (_, axes):
        for axis, row in zip(axes[0], rows, strict=True):
            for learns, label in ((1, "learning"), (0, "paused")):
                seconds = sorted(s for on, s, _ in row["services"] if on == learns)
                axis.plot(seconds, np.linspace(0, 1, len(seconds)), label=label)
            axis.set(xlabel="service time, s", ylabel="share of requests", title=f"load {row['load']:g}")
            axis.legend()
            axis.grid(alpha=0.3)


def main() -> None:
    parser = make_parser(__doc__, "idle_learning", traces=False)
    parser.add_argument("--dataset", default="finance_alpaca")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6])
    parser.add_argument("--requests", type=int, default=192, help="of a load")
    parser.add_argument("--block", type=int, default=16, help="requests between switching learning on and off")
    parser.add_argument("--micro-step", type=float, default=0.02, help="seconds")
    args = parser.parse_args()
    pair, started = load_pair(), time.time()
    watch = FirstForward(pair[0])
    asked = prompts(args.dataset, pair[2], args.requests + args.block, args.seed)
    rows = []
    for load in args.loads:
        rows.append(run(load, pair, watch, asked, args))
        r = rows[-1]
        print(
            f"load {load:g}: service on / off p50 {r['service_p50'][0]:.3f} [{r['service_p50'][1]:.3f}, "
            f"{r['service_p50'][2]:.3f}], p95 {r['service_p95'][0]:.3f} [{r['service_p95'][1]:.3f}, "
            f"{r['service_p95'][2]:.3f}]; delay ms {r['delay_ms']}; idle time used {r['idle_share_used']:.2f}; gain "
            f"{r['gain_last_quarter']:+.3f} over static in the last quarter, {r['gain_per_minute']:+.3f} a minute; "
            f"{r['promoted']} versions promoted",
            flush=True,
        )
    plot(args.name, rows)
    write_report(args.name, {"rows": rows}, seed=args.seed, requests=args.requests, **run_facts(started))


if __name__ == "__main__":
    main()
