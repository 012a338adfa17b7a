"""
Sampled traffic, live: acceptance of the static draft and of one that learns while it serves, and speed.

    OSD_HF_DATA=... python recipes/sampled.py                                         # four data sets, two settings
    OSD_HF_DATA=... python recipes/sampled.py --requests 4 --datasets gsm8k --max-new-tokens 8    # smoke

An assistant at its default settings answers each request, sampled, and learns; over the last fifth the target alone
answers as well, in turns. Of these answers, with 95% intervals: the acceptance to be expected of the draft that serves
and of the draft as it was, both by replay at k = 5; the time a token of the target alone over the assistant's, what it
learned meanwhile included. Of all answers: tokens of the draft and of past text that were accepted, beside the sum of
min(1, p / q) of those examined, and what the gate decided.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from typing import Any

import common
import numpy as np
import torch
from common import DATASETS, K, gain, last_share, load_pair, make_parser, prompts, write_report
from tqdm import tqdm

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig, Trace
from osd_hf.evaluation.benchmark import median_ratio
from osd_hf.replay import replay_each

SETTINGS: dict[str, dict[str, Any]] = {
    "T = 1": {"temperature": 1.0, "top_k": 0},
    "T = 0.7, p = 0.9": {"temperature": 0.7, "top_p": 0.9, "top_k": 0},
}


def expected(trace: Trace) -> float:
    """Draft tokens that the target was to accept, of those that it examined: each with min(1, p / q)."""
    pairs = [(r.p, r.q) for r in trace.rounds if r.p is not None and r.q is not None]
    return float(sum(np.minimum(1.0, p / q).sum() for p, q in pairs))


def served(pair: Any, questions: list[list[int]], settings: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """One stream of requests."""
    traces, learned, ratios = list[Trace](), list[AcceptanceStats](), list[float]()
    last = len(questions) * 4 // 5
    with OnlineAssistant(*pair, OnlineConfig()) as assistant:
        ways = {
            "alone": pair.target.generate,
            "assistant": functools.partial(assistant.generate, on_trace=traces.append),
        }
        for number, question in enumerate(tqdm(questions, leave=False)):
            ids, given = common.greedy(question, max_new_tokens)
            seconds = {}
            for way in sorted(ways, reverse=bool(number % 2)) if number >= last else ["assistant"]:
                torch.manual_seed(number)
                started = time.perf_counter()
                output = ways[way](ids, **given | {"do_sample": True, **settings})
                seconds[way] = (time.perf_counter() - started) / (output.shape[1] - ids.shape[1])
            if number >= last:
                ratios.append(seconds["alone"] / seconds["assistant"])
                learned += replay_each(assistant.serving_draft(), traces[-1:], K)
        decisions = Counter(decision.outcome for decision in assistant.decisions)
        counted, learning = assistant.stats, assistant.learning_seconds
    before, after = last_share(replay_each(pair.draft, traces[last:], K), 1), last_share(learned, 1)
    return {
        "requests": len(traces), "judged": len(learned),
        "alpha": {way: {"alpha": stats.alpha, "interval": list(stats.alpha_interval)}
                  for way, stats in {"static": before, "learned": after}.items()},
        **gain(before, after),
        "accepted": counted.accepted + counted.text_accepted, "expected": sum(map(expected, traces)),
        "examined": counted.examined + counted.text_examined, "text_examined": counted.text_examined,
        "decisions": dict(decisions), "learning_seconds": learning,
        "times_as_fast": median_ratio(ratios),
    }  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__, "sampled", traces=False)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS))
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--max-new-tokens", type=int, default=common.MAX_NEW_TOKENS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started, report = time.time(), dict[str, Any]()
    for name in args.datasets:
        for title, settings in SETTINGS.items():
            pair = load_pair()
            questions = prompts(name, pair.tokenizer, args.requests, args.seed)
            report.setdefault(name, {})[title] = found = served(pair, questions, settings, args.max_new_tokens)
            print(f"{name}, {title}: {found}")
        write_report(args.name, report, **common.run_facts(started))


if __name__ == "__main__":
    main()
