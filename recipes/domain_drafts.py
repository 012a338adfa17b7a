"""Compare one shared draft with LoRA adapters and full copies per domain on mixed traffic.

    OSD_HF_DATA=... python recipes/domain_drafts.py                                  # 2,000 requests, five ways
    OSD_HF_DATA=... python recipes/domain_drafts.py --ways shared lora-labels        # a part; finished ways are kept
    OSD_HF_DATA=... python recipes/domain_drafts.py --requests 64 --live 4           # smoke

Four data sets mixed at random, by replay of the target's greedy answers, k = 5:

static        the original draft
shared        one draft learns from all requests
lora-labels   a LoRA adapter per data set, by label
lora-topics   a LoRA adapter per topic, from the prompts only (`TopicRouter`)
full-labels   a full copy per data set, by label

The report has alpha by data set over the last fifth of the requests with its interval and gain, bytes on disk, and
update time. Then each way serves `--live` other prompts; answers are compared with the target's and counts with those
by replay.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    MAX_NEW_TOKENS,
    TEMPLATES,
    K,
    drawing,
    gain,
    kept,
    load_pair,
    lora,
    make_parser,
    plot_ways,
    pooled,
    recorded,
    requests_stats,
    run_facts,
    simulated,
    write_report,
)
from tqdm import tqdm

from osd_hf import AcceptanceStats, CorrectionStore, LabelRouter, OnlineAssistant, OnlineConfig, TopicRouter, Trace
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.replay import replay_each
from osd_hf.simulate import SimulationReport

WAYS = ("shared", "lora-labels", "lora-topics", "full-labels")


def setting(way: str, target: Any, args: argparse.Namespace) -> tuple[Any, Any, OnlineConfig]:
    """Return the router, the adapter configuration, and the settings of a way."""
    config = OnlineConfig(seed=args.seed)
    if way == "shared":
        return None, None, config
    router = TopicRouter(target) if way == "lora-topics" else LabelRouter()
    if way == "full-labels":
        return router, None, config
    config = OnlineConfig(seed=args.seed, learning_rate=args.lora_rate)
    return router, lora(args.rank, head=args.head), config


def size_of(drafts: DomainDrafts) -> dict[str, float]:
    """Return the bytes of what was learned: of all drafts, and of one domain."""
    weights = [drafts.serving(domain).weights for domain in drafts.domains]
    sizes = [sum(tensor.nbytes for tensor in learned.values()) for learned in weights if learned]
    return {"drafts": len(sizes), "bytes": sum(sizes), "bytes_per_draft": sum(sizes) / max(len(sizes), 1)}


def served_live(
    way: str, pair: Any, report: SimulationReport, router: Any, later: list[Trace], args: argparse.Namespace
) -> dict[str, Any]:
    """Serve prompts that nothing was learned from with the learned drafts."""
    _, adapters, config = setting(way, pair.target, args)
    config = replace(config, update_strategy="manual")
    assistant = OnlineAssistant(*pair, config, router=router, peft_config=adapters, store=CorrectionStore())
    assistant.drafts.load_state_dict(report.learner.drafts.state_dict())
    identical = 0
    for trace in tqdm(later, desc=f"{way} live"):
        ids = torch.from_numpy(trace.prompt_ids.astype(np.int64))[None]
        output = assistant.generate(
            ids, attention_mask=torch.ones_like(ids), domain=None if way == "lora-topics" else trace.domain,
            do_sample=False, max_new_tokens=MAX_NEW_TOKENS,
        )  # fmt: skip
        identical += output[0, ids.shape[1] :].tolist() == trace.completion_ids.tolist()
    live = list(assistant.store)
    expected = [replay_each(assistant.serving_draft(t.domain), [t], K)[0] for t in live]
    return {
        "requests": len(later), "identical": identical,
        "equal_counts": sum(
            counts(e) == counts(AcceptanceStats.from_trace(t)) for e, t in zip(expected, live, strict=True)
        ),
        "alpha": assistant.stats.alpha, "static": pooled(replay_each(pair.draft, later, K)),
        "requests_by_draft": dict(Counter(str(t.domain) for t in live)),
    }  # fmt: skip


def counts(stats: AcceptanceStats) -> tuple[float, ...]:
    return stats.examined, stats.accepted, stats.emitted, stats.target_forwards


def by_domain(stream: list[Trace], stats: list[AcceptanceStats], static: list[AcceptanceStats]) -> dict[str, Any]:
    """Return the alpha of each data set over the last fifth, with interval and gain."""
    start, found = round(len(stream) * 0.8), {}
    for name in TEMPLATES:
        places = [i for i in range(start, len(stream)) if stream[i].domain == name]
        ours, theirs = (sum((s[i] for i in places), AcceptanceStats()) for s in (stats, static))
        found[name] = {
            "requests": len(places), "alpha": ours.alpha, "interval": list(ours.alpha_interval), **gain(theirs, ours),
        }  # fmt: skip
    return found


def run(way: str, pair: Any, stream: list[Trace], later: list[Trace], static: Any, args: Any) -> dict[str, Any]:
    """Return the results of one way."""
    started, cpu = time.time(), time.process_time()
    router, adapters, config = setting(way, pair.target, args)
    # A label would be taken for the domain.
    asked = [replace(trace, domain=None) for trace in stream] if way == "lora-topics" else stream
    report = simulated(pair.draft, asked, config, router=router, peft_config=adapters, bar=way)
    found = by_domain(stream, list(report.stats), static)
    seconds = [u.seconds for u in report.updates]
    return {
        "way": way, "by_domain": found, "mean": float(np.mean([d["alpha"] for d in found.values()])),
        "mean_gain": float(np.mean([d["gain"] for d in found.values()])),
        "disk": size_of(report.learner.drafts), "updates": len(seconds), "update_seconds": float(np.mean(seconds)),
        "decisions": dict(Counter(d.outcome for d in report.decisions)),
        "requests_by_draft": dict(Counter(str(t.domain) for t in report.traces)),
        "requests_stats": requests_stats(report),
        "processor_minutes": round((time.process_time() - cpu) / 60, 1),
        "live": served_live(way, pair, report, router, later, args) if later else None,
        **run_facts(started),
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    cells = "  ".join(
        f"{name} {d['alpha']:.3f} [{d['interval'][0]:.3f}, {d['interval'][1]:.3f}] {d['gain']:+.3f}"
        for name, d in row["by_domain"].items()
    )
    disk = row["disk"]
    print(
        f"{row['way']:12s} mean {row['mean']:.3f}  {cells}  {disk['bytes_per_draft'] / 1e6:.2f} MB a draft "
        f"x {disk['drafts']}  {row['update_seconds']:.2f} s an update  {row['decisions']}  live {row['live']}",
        flush=True,
    )


def main() -> None:
    parser = make_parser(__doc__, "domain_drafts")
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument("--requests", type=int, default=2000, help="of the stream, a quarter of each data set")
    parser.add_argument("--recorded", type=int, default=600, help="requests recorded of each data set")
    parser.add_argument("--live", type=int, default=25, help="prompts of each data set served live at the end")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--lora-rate", type=float, default=4e-3, help="learning rate of the adapters")
    parser.add_argument("--head", action=argparse.BooleanOptionalAction, default=True, help="adapt the output head")
    parser.add_argument("--window", type=int, default=128, help="requests pooled in a point of the plot")
    parser.add_argument("--runs", type=Path, default=Path("runs/domain_drafts"), help="where finished ways are kept")
    args = parser.parse_args()
    pair, started, each = load_pair(), time.time(), args.requests // len(TEMPLATES)
    if each + args.live > args.recorded:
        parser.error(f"{each} + {args.live} requests of a data set are more than the {args.recorded} recorded.")
    traces = {name: recorded(name, args.seed, args.recorded, args.traces, pair) for name in TEMPLATES}
    stream = [trace for those in traces.values() for trace in those[:each]]
    random.Random(args.seed).shuffle(stream)
    later = [trace for those in traces.values() for trace in those[each : each + args.live]]
    static = replay_each(pair.draft, stream, K)
    still = {"way": "static", "by_domain": by_domain(stream, static, static)}
    print("static", {name: round(d["alpha"], 3) for name, d in still["by_domain"].items()}, flush=True)
    rows = []
    for way in args.ways or WAYS:
        adapters = f"-r{args.rank}-{args.lora_rate:g}{'-head' if args.head else ''}" if way.startswith("lora") else ""
        path = args.runs / f"{way}-{args.requests}{adapters}-{args.seed}.json"
        rows.append(kept(path, lambda way=way: run(way, pair, stream, later, static, args)))
        show(rows[-1])
    if args.ways:
        return  # the report is of all of them
    with drawing(args.name, figsize=(9, 4)) as (_, axes):
        plot_ways(axes[0, 0], rows, static, args.window)
        axes[0, 0].set(
            xlabel="request", ylabel=f"alpha, {args.window} requests", title="four data sets mixed at random"
        )
    rows = [{key: value for key, value in row.items() if key != "requests_stats"} for row in rows]
    settings = {"rank": args.rank, "lora_rate": args.lora_rate, "head": args.head}
    facts = {"seed": args.seed, "requests": args.requests, **run_facts(started)}
    write_report(args.name, {"settings": settings, "static": still, "rows": rows}, **facts)


if __name__ == "__main__":
    main()
