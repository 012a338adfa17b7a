"""Compare the time of a request outside the forwards of both models with that of another checkout.

    git worktree add ../before HEAD~1
    python recipes/request_overhead.py --against ../before

The pair (`--pair bundled` or `smollm2`) drafts 5 tokens per round. Requests are captured, and nothing is learned. One
process per checkout answers the same prompts in changing order. The report has the median ratio of the seconds outside
the forwards, and of all seconds, with 95% intervals. With `--first 10`, ten more processes per checkout answer one
prompt each, to compare the first request of a process.
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


def work(num_prompts: int, max_new_tokens: int, pair: str) -> None:
    """Answer the prompt of each number on the input; print the seconds outside of forwards, and all seconds."""
    import torch

    from osd_hf import OnlineAssistant, OnlineConfig
    from osd_hf.bundled import bundled_prompts, load_bundled

    torch.set_num_threads(1)
    if pair == "smollm2":
        from osd_hf.distillation.make_draft import copy_layers
        from osd_hf_app.smollm2 import smollm2

        target, tokenizer = smollm2()
        draft = copy_layers(target, [0])
    else:
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
        whole = time.perf_counter() - started
        print(json.dumps([whole - inside[0], output[0].tolist(), whole]), flush=True)


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


def compared(before: list[float], after: list[float]) -> dict[str, Any]:
    """Return medians of alternating measurements and of their ratios."""
    import numpy as np

    ratios = np.asarray(after) / np.asarray(before)
    drawn = np.random.default_rng(0).integers(len(ratios), size=(2000, len(ratios)))
    return {
        "milliseconds_before": float(np.median(before)) * 1e3,
        "milliseconds_after": float(np.median(after)) * 1e3,
        "ratio": float(np.median(ratios)),
        "ratio_interval": np.quantile(np.median(ratios[drawn], axis=1), (0.025, 0.975)).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pair", default="bundled", choices=["bundled", "smollm2"])
    parser.add_argument("--first", type=int, default=0, metavar="N", help="processes that answer their first request")
    args = parser.parse_args()
    if args.work:
        work(args.prompts, args.max_new_tokens, args.pair)
        return
    if args.against is None or not (args.against / "osd_hf").is_dir():
        sys.exit("--against names another checkout of the project")
    from common import write_report
    from tqdm import tqdm

    arguments = ["--prompts", str(args.prompts), "--max-new-tokens", str(args.max_new_tokens), "--pair", args.pair]
    checkouts, report = (args.against, HERE.parent), dict[str, Any]()
    if args.first:
        first: list[list[float]] = [[], []]
        for turn in tqdm(range(args.first), desc="first requests"):
            for side in (0, 1) if turn % 2 else (1, 0):
                with begin_on(checkouts[side], arguments) as process:
                    first[side].append(ask(process, turn % args.prompts, False)[2])
        report["first request"] = compared(*first)
    sides = [begin_on(checkout, arguments) for checkout in checkouts]
    for do_sample in (False, True):
        seconds: list[list[float]] = [[], []]
        whole: list[list[float]] = [[], []]
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
                    whole[side].append(answers[side][2])
        kind = "sampled" if do_sample else "greedy"
        report |= {f"{kind}, outside of forwards": compared(*seconds), f"{kind}, whole": compared(*whole)}
    for kind, row in report.items():
        low, high = row["ratio_interval"]
        print(
            f"{kind:30} {row['milliseconds_before']:.2f} ms before, {row['milliseconds_after']:.2f} ms after, "
            f"ratio {row['ratio']:.3f} [{low:.3f}, {high:.3f}]"
        )
    write_report("request_overhead" + ("" if args.pair == "bundled" else f"_{args.pair}"), report)


if __name__ == "__main__":
    main()
