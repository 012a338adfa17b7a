"""
What capture costs: stock assisted `generate` with and without `capture_traces`, request by request in alternation.

    OSD_HF_DATA=... python recipes/capture_overhead.py --requests 80
    OSD_HF_DATA=... python recipes/capture_overhead.py --requests 2 --max-new-tokens 8 --name smoke      # smoke

Each request is answered both ways, the order alternating; the ratio of the two times is taken per request, its median
and mean with 95% bootstrap intervals over requests.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from common import MAX_NEW_TOKENS, TEMPLATES, load_pair, make_parser, prompts, write_report
from tqdm import tqdm

from osd_hf import CorrectionStore, capture_traces


def main() -> None:
    parser = make_parser(__doc__, "capture_overhead", traces=False)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=3, help="answers each way; the quickest counts")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--num-logprobs", type=int, default=64)
    args = parser.parse_args()
    target, draft, tokenizer = load_pair()
    per_set = -(-args.requests // len(TEMPLATES))
    questions = [p for name in TEMPLATES for p in prompts(name, tokenizer, per_set, args.seed)][: args.requests]
    store = CorrectionStore()

    def answer(prompt: list[int]) -> float:
        ids = torch.tensor([prompt])
        started = time.perf_counter()
        target.generate(ids, assistant_model=draft, max_new_tokens=args.max_new_tokens, do_sample=False)
        return time.perf_counter() - started

    def captured(prompt: list[int]) -> float:
        with capture_traces(target, store.append, num_logprobs=args.num_logprobs):
            return answer(prompt)

    for prompt in questions[:3]:
        answer(prompt), captured(prompt)
    plain, watched = [], []
    for i, prompt in enumerate(tqdm(questions, desc="with and without capture")):
        times: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(args.repeats):
            for capture in ((False, True), (True, False))[(i + repeat) % 2]:
                times[capture].append(captured(prompt) if capture else answer(prompt))
        plain.append(min(times[False]))
        watched.append(min(times[True]))
    ratios = np.array(watched) / np.array(plain)
    draws = np.random.default_rng(0).integers(len(ratios), size=(5000, len(ratios)))
    intervals = {
        "median": [float(x) for x in np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])],
        "mean": [float(x) for x in np.percentile(ratios[draws].mean(axis=1), [2.5, 97.5])],
    }
    print(f"{len(ratios)} requests, time with capture / without:")
    for name, value in (("median", np.median(ratios)), ("mean", ratios.mean())):
        print(f"  {name:6s} {value:.4f}  [{intervals[name][0]:.4f}, {intervals[name][1]:.4f}]")
    report = {
        "requests": len(ratios),
        "ratio_median": float(np.median(ratios)),
        "ratio_mean": float(ratios.mean()),
        "intervals": intervals,
        "seconds_without": plain,
        "seconds_with": watched,
    }
    write_report(args.name, report, seed=args.seed, threads=torch.get_num_threads(), repeats=args.repeats)


if __name__ == "__main__":
    main()
