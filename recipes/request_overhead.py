"""
What a request costs beside the forwards of both models, on the working tree and on another checkout in turns.

    git worktree add ../before HEAD~1
    python recipes/request_overhead.py --against ../before

The bundled pair drafts 5 tokens a round; requests are captured, and nothing is learned. One process on each checkout
answers the same prompts, in an order that changes from prompt to prompt. Compared are the seconds of each request that
are in no forward: the median of their ratios, and its 95% interval.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOMAINS = ("sql", "math", "python", "finance")


def work(num_prompts: int, max_new_tokens: int) -> None:
    """Answer the prompt of each number that comes in; write the seconds outside of forwards."""
    import torch

    from osd_hf import OnlineAssistant, OnlineConfig
    from osd_hf.bundled import bundled_prompts, load_bundled

    torch.set_num_threads(1)
    target, draft, tokenizer = load_bundled()
    config = OnlineConfig(num_assistant_tokens=5, update_strategy="manual")
    assistant = OnlineAssistant(target, draft, tokenizer, config)
    inside, begun = [0.0], [0.0]

    def begin(*_: Any) -> None:
        begun[0] = time.perf_counter()

    def end(*_: Any) -> None:
        inside[0] += time.perf_counter() - begun[0]

    for model in (target, assistant.draft):
        model.register_forward_pre_hook(begin)
        model.register_forward_hook(end)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": example.prompt}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        for domain in DOMAINS
        for example in bundled_prompts(domain, num_prompts // len(DOMAINS), seed=1)
    ]
    print("ready", flush=True)
    for line in sys.stdin:
        number, do_sample = json.loads(line)
        torch.manual_seed(number)
        inside[0], started = 0.0, time.perf_counter()
        output = assistant.generate(**prompts[number], max_new_tokens=max_new_tokens, do_sample=do_sample)
        seconds = time.perf_counter() - started - inside[0]
        print(json.dumps([seconds, output[0].tolist()]), flush=True)


def begin_on(checkout: Path, arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--work", *arguments]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        sys.exit(f"{checkout} does not answer")
    return process


def ask(process: subprocess.Popen[str], number: int, do_sample: bool) -> Any:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([number, do_sample]) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.prompts, args.max_new_tokens)
        return
    if args.against is None or not (args.against / "osd_hf").is_dir():
        sys.exit("--against names another checkout of the project")
    import numpy as np
    from common import write_report
    from tqdm import tqdm

    arguments = ["--prompts", str(args.prompts), "--max-new-tokens", str(args.max_new_tokens)]
    sides = [begin_on(args.against, arguments), begin_on(HERE.parent, arguments)]
    report = {}
    for do_sample in (False, True):
        seconds: list[list[float]] = [[], []]
        turns = [(r, n) for r in range(args.repeats + 1) for n in range(args.prompts)]
        for repeat, number in tqdm(turns, desc="sampled" if do_sample else "greedy"):
            answers: list[Any] = [None, None]
            for side in (0, 1) if (repeat + number) % 2 else (1, 0):
                answers[side] = ask(sides[side], number, do_sample)
            if answers[0][1] != answers[1][1]:
                sys.exit(f"prompt {number} has another answer there")
            if repeat:  # the first round warms up
                for side in (0, 1):
                    seconds[side].append(answers[side][0])
        before, after = map(np.asarray, seconds)
        drawn = np.random.default_rng(0).integers(len(before), size=(2000, len(before)))
        medians = np.median((after / before)[drawn], axis=1)
        report["sampled" if do_sample else "greedy"] = {
            "milliseconds_before": float(np.median(before)) * 1e3,
            "milliseconds_after": float(np.median(after)) * 1e3,
            "ratio": float(np.median(after / before)),
            "ratio_interval": np.quantile(medians, (0.025, 0.975)).tolist(),
        }
    for kind, row in report.items():
        low, high = row["ratio_interval"]
        print(
            f"{kind:8} {row['milliseconds_before']:.2f} ms before, {row['milliseconds_after']:.2f} ms after, "
            f"ratio {row['ratio']:.3f} [{low:.3f}, {high:.3f}]"
        )
    write_report("request_overhead", report)


if __name__ == "__main__":
    main()
