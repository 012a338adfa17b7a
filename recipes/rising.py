"""
The picture of the README: acceptance and tokens per second, request by request, while the draft learns.

    python recipes/rising.py                                # bundled pair, finance: two minutes
    OSD_HF_DATA=... python recipes/rising.py --pair smollm2 --requests 96    # SmolLM2-135M-Instruct on gsm8k: an hour
    python recipes/rising.py --requests 8                   # smoke

Each prompt is answered greedily by the target alone and by the assistant with its defaults, in turns that change from
request to request. Acceptance is that of the learned draft and of the draft as it was, at k = 5, by replay on the same
answers, each scored before it is learned from. Tokens per second are those of answers; what learning takes after them
is left out and reported beside. They are wall time: let nothing else run on the machine.
"""

from __future__ import annotations

import time
from typing import Any

import common
import numpy as np
import torch
from common import K, drawing, greedy, make_parser, prompts, run_facts, write_report
from tqdm import tqdm

from osd_hf import OnlineAssistant, Trace
from osd_hf.bundled import bundled_prompts, load_bundled
from osd_hf.evaluation.display import FROZEN, LEARNING
from osd_hf.prompts import encode_turn
from osd_hf.replay import replay_each
from osd_hf_app.smollm2 import smollm2_pair


def served(pair: Any, asked: list[list[int]], limit: int) -> dict[str, Any]:
    """The figures of each request."""
    found: dict[str, list[Any]] = {name: [] for name in ("alone", "ours", "static", "learned")}
    identical = 0
    with OnlineAssistant(*pair) as assistant:
        for number, prompt in enumerate(tqdm(asked, desc="serve")):
            traces: list[Trace] = []
            draft = assistant.draft  # that serves this request

            def answered(ids: Any, traces: list[Trace] = traces, **how: Any) -> Any:
                return assistant.generate(ids, on_trace=traces.append, **how)

            ways = {"alone": pair[0].generate, "ours": answered}
            answers = {}
            ids, settings = greedy(prompt, limit)
            for way in sorted(ways, reverse=bool(number % 2)):
                before = time.perf_counter() - assistant.learning_seconds
                answers[way] = ways[way](ids, **settings)[0, ids.shape[1] :]
                seconds = time.perf_counter() - assistant.learning_seconds - before
                found[way].append(len(answers[way]) / seconds)
            identical += int(torch.equal(answers["alone"], answers["ours"]))
            for name, model in (("static", pair[1]), ("learned", draft)):
                (stats,) = replay_each(model, traces, K)
                found[name].append((float(stats.accepted), float(stats.examined)))
        learning = assistant.learning_seconds
    return {**found, "identical": identical, "learning_seconds": learning}


def rolling(values: list[Any], window: int) -> Any:
    """Over the last `window` requests: the median of numbers, the pooled share of pairs."""
    last = [np.array(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
    return [np.median(part) if part.ndim == 1 else part[:, 0].sum() / max(part[:, 1].sum(), 1) for part in last]


def main() -> None:
    parser = make_parser(__doc__, "rising", traces=False)
    parser.add_argument("--pair", choices=("bundled", "smollm2"), default="bundled")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--max-new-tokens", type=int, default=common.MAX_NEW_TOKENS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started = time.time()
    if args.pair == "bundled":
        pair = load_bundled()
        asked = [encode_turn(pair[2], e.prompt) for e in bundled_prompts("finance", args.requests)]
    else:
        pair = smollm2_pair()
        asked = prompts("gsm8k", pair[2], args.requests, args.seed)
    found = served(pair, asked, args.max_new_tokens)
    write_report(args.name, {"pair": args.pair, **found}, seed=args.seed, **run_facts(started))
    window = max(4, len(asked) // 8)
    with drawing(args.name, columns=2, figsize=(10, 3.4)) as (_, axes):
        panels = (
            ("acceptance of the draft (alpha, k = 5)", {"static": "as it was", "learned": "learning"}),
            ("tokens per second", {"alone": "target alone", "ours": "with the learning draft"}),
        )
        for panel, (title, lines) in zip(axes[0], panels, strict=True):
            for (name, label), color in zip(lines.items(), (FROZEN, LEARNING), strict=True):
                panel.plot(range(1, len(asked) + 1), rolling(found[name], window), color=color, label=label)
            panel.set_title(title, loc="left", fontsize=10)
            panel.set_xlabel(f"request (last {window} pooled)")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
            panel.legend(loc="lower right")
    print(f"{found['identical']} of {len(asked)} answers are the target's own; learning took "
          f"{found['learning_seconds']:.1f} s.")  # fmt: skip


if __name__ == "__main__":
    main()
