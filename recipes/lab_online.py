"""Measure online learning on real text by replay of recorded traces: the default rule, the paper's rule, and the
offline ceiling.

    OSD_HF_DATA=... python recipes/lab_online.py                       # 4 data sets x 600 requests x 3 seeds
    OSD_HF_DATA=... python recipes/lab_online.py --live 50             # and a live run of the first 50 requests
    OSD_HF_DATA=... python recipes/lab_online.py --drafts cut head three eagle3      # other drafts of the same target
    OSD_HF_DATA=... python recipes/lab_online.py --requests 16 --seeds 0 --datasets gsm8k --epochs 1   # smoke

Each run is one pass over the requests of one data set from the original draft. Acceptance is measured over the last
20% of the requests and compared with the original draft on the same requests.

`--drafts` are, by the default rule alone: `lab`, the draft of the pair; `cut`, the target's first layer; `head`, a
draft head that starts as that layer; `three`, one that reads three states; `eagle3`, one in EAGLE-3's layout. A head
learns twice: with as many steps as the others, and with as many as take the time of the cut draft's. Finished runs are
kept in `--runs`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    DRAFTS,
    MAX_NEW_TOKENS,
    TEMPLATES,
    K,
    draft_of,
    equal_counts,
    gain,
    kept,
    last_share,
    load_pair,
    make_parser,
    prompts,
    recorded,
    run_facts,
    served_live,
    simulated,
    write_report,
)
from tqdm import tqdm

from osd_hf import AcceptanceStats, OnlineConfig, Trace, replay, simulate
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.learner import Learner
from osd_hf.learning.updater import Updater
from osd_hf.learning.weights import shared_ends
from osd_hf.replay import redraft, replay_each

PAPER_RATES = (1e-4, 3e-4, 1e-3)


def repeated(trace: Trace, n: int = 4) -> np.ndarray:
    """Return a mask of shape `(completion,)` of tokens that complete an n-gram seen before in the answer."""
    seen: set[tuple[int, ...]] = set()
    mask = np.zeros(len(trace), dtype=bool)
    ids = trace.completion_ids.tolist()
    for end in range(n, len(ids) + 1):
        gram = tuple(ids[end - n : end])
        mask[end - 1] = gram in seen
        seen.add(gram)
    return mask


def alpha_without_repeats(served: Sequence[Trace]) -> float:
    """Return alpha over examined positions that are no repetition."""
    examined = accepted = 0
    for trace in served:
        fresh, start = ~repeated(trace), 0
        for r in trace.rounds:
            examined += int(fresh[start : start + r.num_examined].sum())
            accepted += int(fresh[start : start + r.num_accepted].sum())
            start += r.num_emitted
    return accepted / max(examined, 1)


def ceiling(
    draft: Any, traces: list[Trace], held_out: list[Trace], epochs: int, rates: tuple[float, ...]
) -> dict[str, Any]:
    """Return the best held-out alpha of the draft after many epochs over the traces, by rate and epoch."""
    best: dict[str, Any] = {"alpha": 0.0}
    for rate in rates:
        config = OnlineConfig(learning_rate=rate, batch_size=16, replay_fraction=1.0, weight_average=0.99)
        learner, copied = Updater(draft, config), copy.deepcopy(draft)
        learner.buffer.extend(traces)
        per_epoch = max(len(traces) // config.batch_size, 1)
        for epoch in tqdm(range(1, epochs + 1), desc=f"ceiling {traces[0].domain} lr {rate:g}", leave=False):
            learner.update(per_epoch)
            if epoch % 5 == 0 or epoch == epochs:
                learner.copy_to(copied)
                alpha = replay(copied, held_out, K).alpha
                if alpha > best["alpha"]:
                    best = {"alpha": alpha, "epoch": epoch, "learning_rate": rate}
    return best


def run_rule(draft: Any, traces: list[Trace], config: OnlineConfig, name: str) -> tuple[Any, float]:
    """Simulate one rule over the traces; return the report and the learner's seconds per request."""
    report = simulated(draft, traces, config, bar=name)
    return report, sum(u.seconds for u in report.updates) / len(traces)


def last_fifth(report: Any, static: list[AcceptanceStats]) -> dict[str, Any]:
    after = last_share(report.stats)
    return {"alpha": after.alpha, **gain(last_share(static), after)}


def live(pair: Any, name: str, n: int, seed: int, recorded_run: Any) -> dict[str, Any]:
    """Serve the first `n` requests; compare the counts with simulations on the captured and on the recorded traces."""
    asked, config = prompts(name, pair.tokenizer, 600, seed)[:n], OnlineConfig(num_assistant_tokens=K, seed=seed)
    identical, counts, captured = served_live(pair, asked, config, MAX_NEW_TOKENS, bar=f"live {name}")
    return {
        "requests": n,
        "token_identical": identical,
        "equal_counts_by_replay_of_captured": equal_counts(counts, simulate(pair.draft, captured, config).stats),
        "equal_counts_by_replay_of_recorded": equal_counts(counts, recorded_run.stats),
    }


def by_depth(traces: Sequence[Trace]) -> list[float]:
    """Return the acceptance of each place of a round."""
    rounds = [r for trace in traces for r in trace.rounds]
    examined = [sum(r.num_examined > i for r in rounds) for i in range(K)]
    accepted = [sum(r.num_accepted > i for r in rounds) for i in range(K)]
    return [a / max(e, 1) for a, e in zip(accepted, examined, strict=True)]


def of_kind(kind: str, steps: int, traces: list[Trace], pair: Any, seed: int) -> dict[str, Any]:
    """Return the result of one pass of a draft that learns with so many steps per update."""
    draft, split = draft_of(kind, pair), round(len(traces) * 0.8)
    static = replay_each(draft, traces, K)
    config = OnlineConfig(gate=False, seed=seed, steps_per_update=steps, compile_draft=False)
    # What a draft shares with its target does not learn, as in an `OnlineAssistant`.
    learner = Learner(DomainDrafts(draft, config, shared=shared_ends(draft, pair.target)))
    with tqdm(total=len(traces), desc=f"{traces[0].domain} seed {seed} {kind} {steps}", leave=False) as bar:
        report = simulate(draft, traces, learner=learner, on_request=lambda *_: bar.update())
    seconds, stats = sum(u.seconds for u in report.updates) / len(traces), last_share(report.stats)
    return {
        "draft": kind, "steps_per_update": steps, "static": last_share(static).alpha, **last_fifth(report, static),
        "tokens_per_forward": stats.block_efficiency, "by_depth": by_depth(report.traces[split:]),
        "learner_seconds_per_request": seconds,
    }  # fmt: skip


def compare_drafts(args: Any, pair: Any, started: float) -> None:
    """Run all kinds of drafts over all data sets and seeds, and write a report."""
    rows, steps = [], OnlineConfig().steps_per_update
    for seed in args.seeds:
        for name in args.datasets:
            traces = recorded(name, seed, args.requests, args.traces, pair)
            seconds = None
            for kind in args.drafts:
                is_head, tried = kind not in ("lab", "cut"), [steps]
                for number in tried:
                    place = args.runs / f"{name}-{seed}-{args.requests}-{kind}-{number}.json"
                    row = kept(place, partial(of_kind, kind, number, traces, pair, seed))
                    rows.append({"dataset": name, "seed": seed, **row})
                    own = row["learner_seconds_per_request"]
                    seconds = own if kind == "cut" else seconds
                    if is_head and number == steps and seconds is not None:
                        tried.append(args.head_steps or min(max(round(steps * seconds / own), 1), steps - 1))
                    print(
                        f"{name:24s} seed {seed} {kind:7s} {number} steps  static {row['static']:.3f}  learned "
                        f"{row['alpha']:.3f} ({row['tokens_per_forward']:.2f})  {own * 1e3:.0f} ms/request",
                        flush=True,
                    )
    facts = {"seeds": args.seeds, "requests": args.requests, **run_facts(started)}
    write_report(args.name, {"config": OnlineConfig().to_dict(), "rows": rows}, **facts)


def main() -> None:
    parser = make_parser(__doc__, "lab_online", seed=False)
    parser.add_argument("--datasets", nargs="+", default=list(TEMPLATES))
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=20, help="of the offline ceiling; 0 = leave it out")
    parser.add_argument("--rates", type=float, nargs="*", default=PAPER_RATES, help="of the paper's rule")
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, help="kinds of drafts to compare")
    parser.add_argument(
        "--head-steps", type=int, help="of a head in the same time; by default from the measured times"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/lab_online"), help="where finished runs are kept")
    parser.add_argument("--live", type=int, default=0, help="requests served live, first seed")
    args = parser.parse_args()
    pair = load_pair()
    draft, rows, started = pair.draft, [], time.time()
    if args.drafts:
        compare_drafts(args, pair, started)
        return
    for seed in args.seeds:
        for name in args.datasets:
            traces = recorded(name, seed, args.requests, args.traces, pair)
            static = replay_each(draft, traces, K)
            split = round(len(traces) * 0.8)
            row: dict[str, Any] = {"dataset": name, "seed": seed, "static": last_share(static).alpha}
            report, seconds = run_rule(
                draft, traces, OnlineConfig(gate=False, seed=seed), f"{name} seed {seed} default"
            )
            row["default"] = {**last_fifth(report, static), "learner_seconds_per_request": seconds}
            for rate in args.rates:
                rule = OnlineConfig.paper(learning_rate=rate, seed=seed)
                paper, seconds = run_rule(draft, traces, rule, f"{name} paper {rate:g}")
                row[f"paper {rate:g}"] = {**last_fifth(paper, static), "learner_seconds_per_request": seconds}
            best_paper = max((row[f"paper {rate:g}"]["gain"] for rate in args.rates), default=float("nan"))
            if args.rates:
                row["gain_over_best_paper"] = row["default"]["gain"] / (best_paper or float("nan"))
            held_out = traces[split:]
            row["repeated_4gram_share"] = float(np.mean(np.concatenate([repeated(t) for t in traces])))
            row["static_without_repeats"] = alpha_without_repeats(redraft(draft, held_out, K))
            row["learned_without_repeats"] = alpha_without_repeats(report.traces[split:])
            if args.epochs and seed == args.seeds[0]:
                row["ceiling"] = ceiling(draft, traces[:split], held_out, args.epochs, (1e-3,))
            if args.live and seed == args.seeds[0]:
                row["live"] = live(pair, name, args.live, seed, report)
            rows.append(row)
            d, top = row["default"], row.get("ceiling", {}).get("alpha", float("nan"))
            print(
                f"{name:24s} seed {seed}  static {row['static']:.3f}  learned {d['alpha']:.3f}  gain {d['gain']:+.3f} "
                f"[{d['gain_interval'][0]:+.3f}, {d['gain_interval'][1]:+.3f}]  paper's best {best_paper:+.3f}  "
                f"x{row.get('gain_over_best_paper', float('nan')):.2f}  ceiling {top:.3f}  "
                f"{d['learner_seconds_per_request'] * 1e3:.0f} ms/request",
                flush=True,
            )
    facts = {"seeds": args.seeds, "requests": args.requests, **run_facts(started)}
    write_report(args.name, {"config": OnlineConfig().to_dict(), "rows": rows}, **facts)


if __name__ == "__main__":
    main()
