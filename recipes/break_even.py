"""Measure when learning has paid: live, at full load, with everything included.

    OSD_HF_DATA=... python recipes/break_even.py                                           # 5 x 600 requests
    OSD_HF_DATA=... python recipes/break_even.py --requests 2000 --datasets spider finance_alpaca
    OSD_HF_DATA=... python recipes/break_even.py --rules default "not learning"
    OSD_HF_DATA=... python recipes/break_even.py --drafts cut head --rules default "not learning" text    # draft heads
    OSD_HF_DATA=... python recipes/break_even.py --requests 12 --datasets gsm8k --no-compile              # smoke

Everyday chats (`alpaca`) are sampled with temperature 0.7 and top-p 0.9; other data sets are answered greedily. Each
prompt is answered by `target.generate` and by an assistant of each rule, in changing order. Sampled answers differ in
length, so the time of serving one is scaled to the tokens of the target's answer. The time of an assistant includes
learning after the answer. Draft and target are compiled before the first request. The report has, for each assistant,
the requests after which its total stays below the target's, the ratio of the totals (with an interval over blocks of
50 requests) and of the last fifth, the share of learning, latencies, and how many greedy answers equal the target's or
differ at a tie. `--drafts` are the draft of the pair or, of the target's first layer, those of `lab_online.py`.

The same run is also evaluated in a model (not a measurement) of an 8B target with a 0.6B draft on one H100, k = 5:
bf16 weights are read once per forward at 3.35 TB/s, arithmetic runs at 400 TFLOP/s, and a learning step reads and
writes 32 bytes per parameter. Acceptance and learned positions are those of the lab pair.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from common import (
    DRAFTS,
    MAX_NEW_TOKENS,
    SAMPLING,
    TEMPLATES,
    K,
    draft_of,
    drawing,
    greedy,
    last_share,
    load_pair,
    make_parser,
    parting,
    prompts,
    run_facts,
    write_report,
)
from numpy.typing import NDArray
from tqdm import tqdm

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig, Trace, simulate
from osd_hf.evaluation.benchmark import compare_outputs
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.learner import Learner
from osd_hf.learning.weights import shared_ends
from osd_hf.loading import Pair
from osd_hf.replay import replay_each
from osd_hf.speedup import expected_block_efficiency

RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "draft alone": {"candidates": "draft"},
    "not learning": {"update_strategy": "manual"},
    "text": {"candidates": "text", "update_strategy": "manual"},
}
CHATS = "alpaca"
BLOCK = 50  # requests resampled together
BANDWIDTH, FLOPS, TARGET, DRAFT = 3.35e12, 4e14, 8e9, 0.6e9  # bytes/s and FLOP/s of the model, parameters
Array = NDArray[np.float64]


class Served:
    """Requests of one assistant: seconds, learning seconds, effort, traces, and answers."""

    def __init__(self, pair: Pair, kind: str, rule: str, seed: int, compiled: bool) -> None:
        config = OnlineConfig(
            num_assistant_tokens="auto", compile_draft=compiled, compile_target=compiled, seed=seed, **RULES[rule]
        )
        self.draft = draft_of(kind, pair)
        self.assistant = OnlineAssistant(pair.target, self.draft, pair.tokenizer, config)
        self.kind, self.rule, self.name = kind, rule, rule if kind == "lab" else f"{kind}, {rule}"
        self.seconds: list[float] = []
        self.learning: list[float] = []
        self.effort: list[float] = []
        self.traces: list[Trace] = []
        self.outcomes = Counter[str]()
        self.parted: list[dict[str, Any]] = []

    def answer(self, ids: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
        before, started = self.assistant.learning_seconds, time.perf_counter()
        answer = self.assistant.generate(ids, on_trace=self.traces.append, **settings)
        self.seconds.append(time.perf_counter() - started)
        self.learning.append(self.assistant.learning_seconds - before)
        self.effort.append(self.assistant.effort)
        return answer

    def scale_last(self, factor: float) -> None:
        """Scale the time of serving the last request, without learning."""
        self.seconds[-1] = (self.seconds[-1] - self.learning[-1]) * factor + self.learning[-1]


def paid_after(alone: Array, served: Array) -> int | None:
    """Return the requests after which the total stays below the target's, or `None`."""
    behind = np.flatnonzero(np.cumsum(alone - served) < 0)
    if len(behind) == 0:
        return 0
    return None if behind[-1] == len(alone) - 1 else int(behind[-1]) + 2


def ratio(alone: Array, served: Array, seed: int) -> list[float]:
    """Return the ratio of the totals and its 95% interval over blocks of requests."""
    size = min(BLOCK, max(len(alone) // 4, 1))
    blocks = [slice(i, i + size) for i in range(0, len(alone) - size + 1, size)]
    sums = np.array([[alone[b].sum(), served[b].sum()] for b in blocks])
    drawn = sums[np.random.default_rng(seed).integers(len(sums), size=(2000, len(sums)))].sum(1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    return [float(alone.sum() / served.sum()), float(low), float(high)]


def accelerator(traces: Sequence[Trace], static: Sequence[float], learned: Sequence[float], tokens: Array) -> Any:
    """Return the seconds of each request in the model: target alone, served, and learning."""
    read = {size: size * 2 / BANDWIDTH for size in (TARGET, DRAFT)}

    def forward(size: float, fed: float) -> float:
        return max(read[size], 2 * size * fed / FLOPS)

    answers = np.array([len(t) for t in traces])
    prefill = np.array([forward(TARGET, len(t.prompt_ids)) for t in traces])
    drafted = np.array([forward(DRAFT, len(t.prompt_ids)) for t in traces])
    alone = prefill + answers * forward(TARGET, 1)
    a_round = forward(TARGET, K + 1) + K * forward(DRAFT, 1)

    def served(alphas: Sequence[float]) -> Array:
        return prefill + drafted + answers / np.array([expected_block_efficiency(a, K) for a in alphas]) * a_round

    steps = tokens / 480
    learning = 6 * DRAFT * tokens * 1.6 / FLOPS + steps * 32 * DRAFT / BANDWIDTH  # prompts are forwarded, too
    # By the draft as it was and, at the gate, by versions on held-back requests: some five replays a request.
    compared = np.array([5 * forward(DRAFT, len(t) + len(t.prompt_ids)) for t in traces])
    return alone, served(static), served(learned) + learning + compared


def account(alone: Array, served: Array, seed: int) -> dict[str, Any]:
    fifth = slice(round(len(alone) * 0.8), None)
    return {
        "paid_after": paid_after(alone, served),
        "times_alone": ratio(alone, served, seed),
        "times_alone_last_fifth": float(alone[fifth].sum() / served[fifth].sum()),
    }


def report_on(
    found: Served, alone: Array, target: Any, static: Sequence[AcceptanceStats], name: str, seed: int
) -> dict[str, Any]:
    seconds, learning = np.array(found.seconds), np.array(found.learning)
    fifth = slice(round(len(alone) * 0.8), None)
    # At k = 5, as one learns and serves there: `"auto"` drafts what is easy on this machine.
    fixed = OnlineConfig(seed=seed, **RULES[found.rule])
    shared = shared_ends(found.draft, target)  # does not learn, as in an `OnlineAssistant`
    learner = Learner(DomainDrafts(found.draft, fixed, per_domain=False, shared=shared))

    def as_served(i: int, _: AcceptanceStats) -> None:  # no time is known there that effort could go by
        learner.drafts.requests[None].effort.share = found.effort[i]

    traces = [replace(trace, draft_version=0) for trace in found.traces]
    run = simulate(found.draft, traces, fixed, learner=learner, on_request=as_served)
    stats = list(run.stats)
    alphas = [[s.alpha if s.examined else 0.0 for s in side] for side in (static, stats)]
    positions = sum(update.positions for update in run.updates)
    share = np.array(found.effort) / np.sum(found.effort)
    model = accelerator(found.traces, *alphas, positions * share)
    p50, p99 = np.percentile(seconds, [50, 99])
    ends, served = last_share(stats), last_share([AcceptanceStats.from_trace(trace) for trace in found.traces])
    row = {
        "dataset": name, "draft": found.kind, "rule": found.rule, "seed": seed, "requests": len(alone),
        "alone_seconds": float(alone.mean()), "served_seconds": float((seconds - learning).mean()),
        "learning_seconds": float(learning.mean()),
        **account(alone, seconds, seed),
        "after": {n: account(alone[:n], seconds[:n], seed) for n in (250, 600, 1000) if n < len(alone)},
        "learning_share_last_fifth": float(learning[fifth].sum() / (seconds - learning)[fifth].sum()),
        "saved_seconds": found.assistant.saved_seconds,
        "tokens_per_forward": served.block_efficiency,
        "alpha": ends.alpha if ends.examined else None, "static": last_share([*static]).alpha,
        "alpha_all": sum(stats, AcceptanceStats()).alpha, "effort": found.effort[::BLOCK],
        "p50": float(p50), "p99": float(p99), "outputs": dict(found.outcomes), "parted": found.parted,
        "model": {
            **account(model[0], model[2], seed), "static_times_alone": float(model[0].sum() / model[1].sum()),
        },
        "curve": np.cumsum(alone - seconds).round(3).tolist(),
    }  # fmt: skip
    times, low, high = row["times_alone"]
    paid = {way: "not" if (n := part["paid_after"]) is None else f"{n}" for way, part in
            (("here", row), ("model", row["model"]))}  # fmt: skip
    print(
        f"{name} {found.name} seed {seed}: {len(alone)} requests, alpha {row['static']:.3f} > "
        f"{row['alpha'] or 0:.3f}; a request alone {row['alone_seconds']:.3f} s, served {row['served_seconds']:.3f}, "
        f"learning {row['learning_seconds']:.3f}; {times:.3f} [{low:.3f}, {high:.3f}] times alone, last fifth "
        f"{row['times_alone_last_fifth']:.3f} (learning {row['learning_share_last_fifth']:.1%} of serving); paid "
        f"after {paid['here']}; p50 {p50:.3f}, p99 {p99:.3f} s; {dict(found.outcomes)}; H100 model "
        f"{row['model']['times_alone'][0]:.2f}, last fifth {row['model']['times_alone_last_fifth']:.2f}, static "
        f"{row['model']['static_times_alone']:.2f}, paid after {paid['model']}",
        flush=True,
    )
    return row


def main() -> None:
    parser = make_parser(__doc__, "break_even", traces=False)
    parser.add_argument("--datasets", nargs="+", default=[CHATS, *TEMPLATES])
    parser.add_argument("--requests", type=int, default=600, help="of each data set; at most 400 chats")
    parser.add_argument("--rules", nargs="+", default=["default"], choices=list(RULES))
    parser.add_argument("--drafts", nargs="+", default=["lab"], choices=DRAFTS, help="kinds of drafts to compare")
    parser.add_argument("--no-compile", action="store_true", help="draft and verify eagerly")
    args = parser.parse_args()
    pair, started, rows, starts = load_pair(), time.time(), [], {}
    for name in args.datasets:
        asked = prompts(name, pair.tokenizer, args.requests, args.seed)
        # Text alone needs no draft: once.
        kinds = [
            (kind, rule) for kind in args.drafts for rule in args.rules if rule != "text" or kind == args.drafts[0]
        ]
        ways = [Served(pair, kind, rule, args.seed, not args.no_compile) for kind, rule in kinds]
        for way in ways:  # what only a first request pays, of both sizes of caches
            begun = time.perf_counter()
            for length in (20, 200):
                ids, settings = greedy(range(100, 100 + length), MAX_NEW_TOKENS)
                pair.target.generate(ids, **settings)
                way.assistant.generate(ids, learn=False, **settings)
            starts[f"{name} {way.name}"] = time.perf_counter() - begun
            way.assistant.reset_stats()
        alone: list[float] = []
        for i, prompt in enumerate(tqdm(asked, desc=name, leave=False)):
            ids, settings = greedy(prompt, MAX_NEW_TOKENS)
            if name == CHATS:
                settings |= {"do_sample": True, "top_k": 0, **SAMPLING}
            answers: dict[int, torch.Tensor] = {}
            for place in np.roll(np.arange(-1, len(ways)), i).tolist():
                torch.manual_seed(i)
                if place < 0:
                    begun = time.perf_counter()
                    answers[place] = pair.target.generate(ids, **settings)
                    alone.append(time.perf_counter() - begun)
                else:
                    answers[place] = ways[place].answer(ids, settings)
            for place, way in enumerate(ways):
                if name == CHATS:
                    way.scale_last((answers[-1].shape[1] - len(prompt)) / (answers[place].shape[1] - len(prompt)))
                    continue
                both = [answers[which][0, len(prompt) :].tolist() for which in (-1, place)]
                outcome = compare_outputs(pair.target, prompt, *both)
                way.outcomes[outcome] += 1
                if outcome != "identical":
                    way.parted.append({"request": i, "outcome": outcome, **parting(pair.target, prompt, *both)})
        originals = {way.kind: way.draft for way in ways}  # all of a kind are the same
        static = {kind: replay_each(draft, ways[0].traces, K) for kind, draft in originals.items()}
        rows += [report_on(way, np.array(alone), pair.target, static[way.kind], name, args.seed) for way in ways]
        for way in ways:
            way.assistant.close()
        report = {"config": OnlineConfig().to_dict(), "start_seconds": starts, "rows": rows}
        write_report(args.name, report, seed=args.seed, requests=args.requests, **run_facts(started))
    with drawing(args.name, figsize=(8, 4.5)) as (_, axes):
        for row in rows:
            axes[0, 0].plot(row["curve"], label=f"{row['dataset']}, {row['draft']}, {row['rule']}")
        axes[0, 0].axhline(0, color="0.5", linewidth=0.8)
        axes[0, 0].set(xlabel="request", ylabel="seconds ahead of the target alone, learning counted")
        axes[0, 0].legend(fontsize=8)
        axes[0, 0].grid(alpha=0.3)


if __name__ == "__main__":
    main()
