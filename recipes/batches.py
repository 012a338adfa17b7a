"""Compare drafting for batches with the target's own batches and with single rows.

    OSD_HF_DATA=... python recipes/batches.py                                             # gsm8k and finance
    OSD_HF_DATA=... python recipes/batches.py --learn 0                                   # the original draft
    OSD_HF_DATA=... python recipes/batches.py --requests 4 --sizes 1 2 --learn 4 --datasets gsm8k \
        --max-new-tokens 8                                                                # smoke

The same prompts are answered greedily in batches by `target.generate`, by an assistant that chooses the draft length,
by one that drafts k tokens, and row by row by an assistant, in changing order. Ratios of seconds have a 95% bootstrap
interval over batches. The draft has learned from other requests. Nothing is compiled.

The numbers for an H100 with an 8B target and a 0.6B draft are a model, not a measurement: bf16 weights are read once
per forward, and keys and values of `--context` tokens per row once, at 3.35 TB/s; arithmetic runs at 400 TFLOP/s;
kernel launches and sampling take no time. Acceptance is that of the lab pair.
"""

from __future__ import annotations

import time
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
    load_pair,
    make_parser,
    prompts,
    recorded,
    run_facts,
    simulated,
    write_report,
)
from tqdm import tqdm

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig
from osd_hf.speedup import expected_block_efficiency

BANDWIDTH, FLOPS = 3.35e12, 4e14  # bytes/s and FLOP/s of the model
# Parameters, and bytes of keys and values a token: Qwen3-8B and Qwen3-0.6B.
TARGET, DRAFT = (8.2e9, 36 * 8 * 128 * 4), (0.6e9, 28 * 8 * 128 * 4)
WAYS = ("alone", "auto", "fixed", "one by one")


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return prompts with padding on the left."""
    ids, mask = torch.zeros(2, len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, -len(row) :], mask[i, -len(row) :] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def ratio(ours: list[float], theirs: list[float], seed: int) -> list[float]:
    """Return the speed ratio and its 95% interval over batches."""
    both = np.array([ours, theirs])
    drawn = both[:, np.random.default_rng(seed).integers(len(ours), size=(2000, len(ours)))].sum(-1)
    low, high = np.percentile(drawn[1] / drawn[0], [2.5, 97.5])
    return [float(both[1].sum() / both[0].sum()), float(low), float(high)]


def served(pair: Any, draft: Any, asked: list[list[int]], size: int, args: Any) -> dict[str, Any]:
    """Answer all prompts in batches of this size in each way."""
    config = OnlineConfig(update_strategy="manual", candidates="draft", seed=args.seed)
    configs = {"auto": config, "fixed": replace(config, num_assistant_tokens=args.k), "one by one": config}
    assistants = {way: OnlineAssistant(pair.target, draft, pair.tokenizer, each) for way, each in configs.items()}
    settings = {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    batches = [asked[i : i + size] for i in range(0, len(asked) - size + 1, size)]
    identical = tokens = 0

    def answer(way: str, rows: list[list[int]]) -> list[torch.Tensor]:
        if way == "one by one":
            return [assistants[way].generate(**padded([row]), learn=False, **settings)[0] for row in rows]
        if way == "alone":
            return list(pair.target.generate(**padded(rows), **settings))
        return list(assistants[way].generate(**padded(rows), learn=False, **settings))

    for way in WAYS:  # warm-up
        for _ in range(2):
            answer(way, batches[0])
    for assistant in assistants.values():
        assistant.reset_stats()
    for i, rows in enumerate(tqdm(batches, desc=f"B = {size}", leave=False)):
        answers = {}
        for way in np.roll(WAYS, i).tolist():
            began = time.perf_counter()
            answers[way] = answer(way, rows)
            seconds[way].append(time.perf_counter() - began)
        identical += sum(map(torch.equal, answers["fixed"], answers["alone"]))
        tokens += sum(len(a) - len(padded(rows)["input_ids"][0]) for a in answers["alone"])
    stats: dict[str, AcceptanceStats] = {way: assistant.stats for way, assistant in assistants.items()}
    row = {
        "rows": size, "batches": len(batches), "identical": identical, "answers": len(batches) * size,
        "tokens_per_second": {way: tokens / sum(each) for way, each in seconds.items()},
        "times_alone": {way: ratio(seconds[way], seconds["alone"], args.seed) for way in WAYS[1:]},
        "times_one_by_one": ratio(seconds["auto"], seconds["one by one"], args.seed),
        "alpha": stats["fixed"].alpha, "tokens_per_round": {way: s.block_efficiency for way, s in stats.items()},
        "drafted_per_round": {way: s.drafted / max(s.target_forwards, 1) for way, s in stats.items()},
    }  # fmt: skip
    told = ", ".join(f"{way} {row['times_alone'][way][0]:.2f}" for way in WAYS[1:])
    print(f"B = {size}: times batches of the target alone: {told}; alpha {row['alpha']:.3f}, {identical} of "
          f"{row['answers']} identical", flush=True)  # fmt: skip
    for assistant in assistants.values():
        assistant.close()
    return row


# --- a model of an accelerator --------------------------------------------------------------------------------------


def model(alpha: float, context: int) -> list[dict[str, Any]]:
    """Return the roofline model of an H100 for the best k and for k = 4."""

    def forward(part: tuple[float, int], rows: int, fed: int) -> float:
        weights, kept = part
        return max((2 * weights + rows * context * kept) / BANDWIDTH, 2 * weights * rows * fed / FLOPS)

    found = []
    for rows in (1, 2, 4, 8, 16, 32, 64):
        alone, drafted = forward(TARGET, rows, 1), forward(DRAFT, rows, 1)
        times = {
            k: alone * expected_block_efficiency(alpha, k) / (forward(TARGET, rows, k + 1) + k * drafted)
            for k in range(1, 17)
        }
        best = max(times, key=lambda k: times[k])
        found.append({"rows": rows, "k": best, "times_alone": times[best], "times_alone_at_4": times[4]})
    return found


def main() -> None:
    parser = make_parser(__doc__, "batches")
    parser.add_argument("--datasets", nargs="+", default=["gsm8k", "finance_alpaca"], choices=list(TEMPLATES))
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--learn", type=int, default=480, help="requests that the draft learns from before")
    parser.add_argument("--k", type=int, default=K)
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--context", type=int, default=1024, help="tokens per row in the model of an H100")
    args = parser.parse_args()
    pair, started, report = load_pair(), time.time(), dict[str, Any]()
    for name in args.datasets:
        draft, total = pair.draft, args.learn + args.requests
        if args.learn:
            traces = recorded(name, args.seed, total, Path(args.traces), tuple(pair))[: args.learn]
            draft = simulated(draft, traces, OnlineConfig(seed=args.seed), bar=f"the draft learns {name}").draft
        asked = prompts(name, pair.tokenizer, total, args.seed)[args.learn :]
        print(f"\n{name}", flush=True)
        rows = [served(pair, draft, asked, size, args) for size in args.sizes]
        report[name] = {"measured": rows, "model": model(rows[-1]["alpha"], args.context)}
        write_report(args.name, report, seed=args.seed, requests=args.requests, **run_facts(started))
    with drawing(args.name, 1, len(report), figsize=(5 * len(report), 4)) as (_, axes):
        for axis, (name, part) in zip(axes[0], report.items(), strict=True):
            for way in WAYS[1:]:
                points = [(row["rows"], row["times_alone"][way][0]) for row in part["measured"]]
                axis.plot(*zip(*points, strict=True), marker="o", label=way)
            points = [(row["rows"], row["times_alone"]) for row in part["model"]]
            axis.plot(*zip(*points, strict=True), color="0.5", linestyle="--", label="model of an H100, 8B and 0.6B")
            axis.axhline(1, color="0.5", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set(title=name, xlabel="rows", ylabel="times batches of the target alone")
            axis.legend(fontsize=8)
            axis.grid(alpha=0.3)


if __name__ == "__main__":
    main()
