"""
Whether an assistant is as quick and as small after twenty thousand requests as after one thousand: live, with a
greedy request after the other, learning by default, sessions saved, a store beside it.

    python recipes/long_run.py                       # 20,000 requests; half an hour
    python recipes/long_run.py --requests 60 --marks 20 40 60

The pair is tiny, with random weights, and prompts are random tokens, half of them among those that came before. At
each mark: the process's memory, and the processor time of a request (median of the last hundred), of `repr(stats)`,
of `stats.alpha_interval` and of a save of the session.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from common import drawing, make_parser, processor_seconds, run_facts, write_report
from tqdm import tqdm

from osd_hf import CorrectionStore, OnlineAssistant, OnlineConfig
from osd_hf.evaluation.controlled import random_pair

MEASURED = 100  # requests before a mark whose time is taken


def served(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The figures at each mark."""
    target, draft = random_pair("tiny-target", "tiny-draft", seed=args.seed)
    store = CorrectionStore(folder / "store", max_bytes=1 << 26)
    config = OnlineConfig(seed=args.seed)
    draw, process = random.Random(args.seed), psutil.Process()
    earlier: list[list[int]] = []
    found: list[dict[str, Any]] = []
    seconds: list[float] = []
    with OnlineAssistant(target, draft, config=config, store=store) as assistant:
        for number in tqdm(range(1, max(args.marks) + 1), desc="requests"):
            if earlier and draw.random() < 0.5:
                ids = draw.choice(earlier)
            else:
                ids = [draw.randrange(3, 512) for _ in range(draw.randrange(8, 33))]
                earlier = [*earlier[-999:], ids]
            prompt = torch.tensor([ids])
            settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 16, "do_sample": False}
            seconds.append(processor_seconds(lambda p=prompt, s=settings: assistant.generate(p, **s)))
            if number not in args.marks:
                continue
            if assistant.learning_error is not None:
                raise assistant.learning_error
            stats = assistant.stats
            row = {
                "requests": number,
                "resident_mb": process.memory_info().rss / 2**20,
                "request_ms": 1e3 * statistics.median(seconds[-MEASURED:]),
                "request_ms_mean": 1e3 * statistics.mean(seconds[-10 * MEASURED :]),
                "repr_ms": 1e3 * processor_seconds(lambda s=stats: repr(s)),
                "interval_ms": 1e3 * processor_seconds(lambda s=stats: s.alpha_interval),
                "save_ms": 1e3 * processor_seconds(lambda: assistant.save_state(folder / "session")),
                "session_mb": sum(f.stat().st_size for f in (folder / "session").rglob("*") if f.is_file()) / 2**20,
                "version": assistant.version,
                "alpha": stats.alpha,
            }
            found.append(row)
            print(row)
    return found


def main() -> None:
    parser = make_parser(__doc__, "long_run", traces=False)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--marks", type=int, nargs="+", default=[1000, 2000, 5000, 10_000, 15_000, 20_000])
    args = parser.parse_args()
    args.marks = [mark for mark in args.marks if mark <= args.requests]
    torch.set_num_threads(1)
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        found = served(args, Path(folder))
    write_report(args.name, {"marks": found}, **run_facts(started))
    with drawing(args.name, columns=3, figsize=(12, 3.5)) as (_, axes):
        for axis, name in zip(axes[0], ("resident_mb", "request_ms", "save_ms"), strict=True):
            axis.plot([row["requests"] for row in found], [row[name] for row in found], marker="o")
            axis.set_xlabel("requests")
            axis.set_title(name)
            axis.set_ylim(bottom=0)


if __name__ == "__main__":
    main()
