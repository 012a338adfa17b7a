"""Compare offline distillation by sample source and divergence with online learning on the same prompts.

    OSD_HF_DATA=... python recipes/lab_offline.py                              # the table, the best elsewhere, 3 seeds
    OSD_HF_DATA=... python recipes/lab_offline.py --sources teacher --parts table    # a part; finished runs are kept
    OSD_HF_DATA=... python recipes/lab_offline.py --requests 16 --held-out 8 --datasets gsm8k --sources teacher \
        --divergences forward_kl --max-new-tokens 16 --seeds 0                 # smoke

table    each sample source with each divergence on the first data set; held-out alpha before, halfway, and after
rates    teacher samples and forward KL at several learning rates; the draft's samples at several temperatures
best     the two best of the table on the other data sets, and the best with more seeds
online   one pass of the online learner over the same prompts, with the same held-out requests

The target's samples are its greedy answers; samples of the draft use `--temperature`. Two
epochs over the prompts. Acceptance is measured by replay of the target's greedy answers to held-out prompts, k = 5.
Finished runs are kept in `--runs`, so that a killed table can continue and parts can run in parallel.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from common import (
    MAX_NEW_TOKENS,
    TEMPLATES,
    K,
    drawing,
    gain,
    kept,
    load_pair,
    make_parser,
    recorded,
    simulated,
    write_report,
)

from osd_hf import AcceptanceStats, DistillConfig, OnlineConfig, distill, replay
from osd_hf.distillation.data import SAMPLE_SOURCES

RUN = ("dataset", "source", "divergence", "rate", "temperature", "seed")


def lab_folder(args: argparse.Namespace) -> Path:
    """Return the folder of the runs with these settings."""
    sizes = (args.requests, args.held_out, args.epochs, args.batch_size, args.max_new_tokens)
    return Path(args.runs, "-".join(f"{size:g}" for size in sizes) + ("-bf16" if args.bf16 else ""))


class Lab:
    """The pair, the training prompts of each data set, and the answers to held-out ones."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.pair = args, load_pair()

    def answered(self, name: str) -> list[Any]:
        return recorded(name, 0, self.args.requests, self.args.traces, self.pair)

    def held_out(self, name: str) -> list[Any]:
        total = self.args.requests + self.args.held_out
        return recorded(name, 0, total, self.args.traces, self.pair, start=self.args.requests)

    def gained(self, after: AcceptanceStats, name: str) -> dict[str, Any]:
        before = replay(self.pair.draft, self.held_out(name), K)
        interval = list(after.alpha_interval)
        return {"static": before.alpha, "alpha": after.alpha, "interval": interval, **gain(before, after)}

    def offline(self, **run: Any) -> dict[str, Any]:
        """Run `distill` once."""
        path = lab_folder(self.args) / ("-".join(str(run[key]) for key in RUN) + ".json")
        return kept(path, lambda: shown(self.distilled(path.with_suffix(""), run)))

    def online(self, name: str, seed: int) -> dict[str, Any]:
        """Run one pass of the online learner over the same prompts in order."""
        return kept(lab_folder(self.args) / f"{name}-online-{seed}.json", lambda: shown(self.served(name, seed)))

    def distilled(self, folder: Path, run: dict[str, Any]) -> dict[str, Any]:
        args = self.args
        half = max(math.ceil(args.requests / args.batch_size) * args.epochs // 2, 1)
        config = DistillConfig(
            output_dir=str(folder), sample_source=run["source"], divergence=run["divergence"],
            learning_rate=run["rate"], temperature=run["temperature"], seed=run["seed"], lr_scheduler_type="cosine",
            warmup_steps=0.03, num_train_epochs=args.epochs, per_device_train_batch_size=args.batch_size,
            max_new_tokens=args.max_new_tokens, num_assistant_tokens=K, bf16=args.bf16,
            use_cpu=not torch.cuda.is_available(), save_strategy="no",
            eval_strategy="steps", eval_steps=half, report_to="none", logging_steps=10,
        )  # fmt: skip
        rows = [
            {"prompt": trace.prompt_ids.tolist(), "completion": trace.completion_ids.tolist()}
            for trace in self.answered(run["dataset"])
        ]
        held_out, began = self.held_out(run["dataset"]), time.perf_counter()
        result = distill(dataset=rows, eval_dataset=held_out, config=config, **self.pair._asdict())
        return {
            **run, **self.gained(replay(result.draft, held_out, K), run["dataset"]), "alpha_by_step": result.alpha,
            "steps": result.state.global_step, "seconds": time.perf_counter() - began,
        }  # fmt: skip

    def served(self, name: str, seed: int) -> dict[str, Any]:
        traces, began = self.answered(name), time.perf_counter()
        report = simulated(self.pair.draft, traces, OnlineConfig(gate=False, seed=seed), bar=f"online {name}")
        return {
            "dataset": name, "source": "online", "seed": seed,
            **self.gained(replay(report.draft, self.held_out(name), K), name),
            "steps": sum(u.steps for u in report.updates), "seconds": time.perf_counter() - began,
        }  # fmt: skip


def shown(run: dict[str, Any]) -> dict[str, Any]:
    name = " ".join(f"{run[key]}" for key in RUN if key in run)
    print(
        f"{name}: alpha {run['static']:.3f} to {run['alpha']:.3f} [{run['interval'][0]:.3f}, "
        f"{run['interval'][1]:.3f}], {run['steps']} steps, {run['seconds']:.0f} s",
        flush=True,
    )
    return run


def table(lab: Lab, args: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        lab.offline(
            dataset=args.datasets[0], source=source, divergence=divergence, rate=args.rate,
            temperature=args.temperature, seed=args.seeds[0],
        )
        for divergence in args.divergences
        for source in args.sources
    ]  # fmt: skip


def rates(lab: Lab, args: argparse.Namespace) -> list[dict[str, Any]]:
    base = {"dataset": args.datasets[0], "divergence": "forward_kl", "seed": args.seeds[0]}
    teacher = base | {"source": "teacher", "temperature": args.temperature}
    student = base | {"source": "student", "rate": args.rate}
    runs = [lab.offline(**teacher, rate=rate) for rate in args.rates]
    return runs + [lab.offline(**student, temperature=temperature) for temperature in args.temperatures]


def best(lab: Lab, args: argparse.Namespace) -> list[dict[str, Any]]:
    ranked = sorted(table(lab, args), key=lambda run: -run["alpha"])[:2]
    chosen = [{key: run[key] for key in RUN} for run in ranked]
    elsewhere = [run | {"dataset": name} for name in args.datasets[1:] for run in chosen]
    again = [chosen[0] | {"seed": seed, "dataset": name} for seed in args.seeds[1:] for name in args.datasets]
    return [lab.offline(**run) for run in [*elsewhere, *again]]


def online(lab: Lab, args: argparse.Namespace) -> list[dict[str, Any]]:
    return [lab.online(name, args.seeds[0]) for name in args.datasets]


def plot(name: str, runs: list[dict[str, Any]], learner: list[dict[str, Any]]) -> None:
    """Plot the table as bars, with the original draft and the online learner as lines."""
    with drawing(name, figsize=(8, 4)) as (figure, axes):
        axis = axes[0, 0]
        sources = list(dict.fromkeys(run["source"] for run in runs))
        divergences = list(dict.fromkeys(run["divergence"] for run in runs))
        width = 0.8 / len(divergences)
        for number, divergence in enumerate(divergences):
            those = [run for run in runs if run["divergence"] == divergence]
            places = [sources.index(run["source"]) + (number - (len(divergences) - 1) / 2) * width for run in those]
            spread = [[abs(run["interval"][side] - run["alpha"]) for run in those] for side in (0, 1)]
            axis.bar(places, [run["alpha"] for run in those], 0.9 * width, yerr=spread, capsize=2, label=divergence)
        axis.axhline(runs[0]["static"], color="0.4", linestyle="--", label="static draft")
        for run in [run for run in learner if run["dataset"] == runs[0]["dataset"]][:1]:
            axis.axhline(run["alpha"], color="black", label="online learner, one pass")
        axis.set_xticks(range(len(sources)), sources)
        low = min(run["interval"][0] for run in runs)
        axis.set(
            ylabel="held-out alpha", ylim=(max(low - 0.05, 0), None), title=f"{runs[0]['dataset']}, whose samples"
        )
        figure.legend(fontsize=8, ncols=5, loc="outside lower center")
        axis.grid(axis="y", alpha=0.3)


def main() -> None:
    parser = make_parser(__doc__, "lab_offline", seed=False)
    parser.add_argument("--parts", nargs="+", choices=("table", "rates", "best", "online"))
    parser.add_argument("--datasets", nargs="+", default=list(TEMPLATES))
    parser.add_argument("--sources", nargs="+", default=list(SAMPLE_SOURCES))
    parser.add_argument("--divergences", nargs="+", default=["forward_kl", "reverse_kl", "jsd"])
    parser.add_argument("--requests", type=int, default=600, help="prompts learned from")
    parser.add_argument("--held-out", type=int, default=120)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of the table")
    parser.add_argument("--rates", type=float, nargs="*", default=[2e-5, 1e-3, 3e-3], help="of the part rates")
    parser.add_argument("--temperature", type=float, default=1.0, help="of what the draft samples, or both")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0], help="of the part rates")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--runs", type=Path, default=Path("runs/lab_offline"), help="where finished runs are kept")
    args = parser.parse_args()
    lab, parts = Lab(args), {"table": table, "rates": rates, "best": best, "online": online}
    found = {name: part(lab, args) for name, part in parts.items() if not args.parts or name in args.parts}
    if args.parts:
        return  # the report is of all of it
    facts = {"mixed_precision": os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), "threads": torch.get_num_threads()}
    settings = {
        key: getattr(args, key) for key in ("requests", "held_out", "epochs", "batch_size", "max_new_tokens", "bf16")
    }
    write_report(args.name, {"settings": settings, **found}, **facts)
    plot(args.name, found["table"], found["online"])


if __name__ == "__main__":
    main()
