"""
What a draft's repo carries for `custom_generate`, beside this package's own lean path and transformers' stock one.

    OSD_HF_DATA=... python recipes/carried.py                       # the lab pair, three minutes on two cores
    OSD_HF_DATA=... python recipes/carried.py --pair smollm2        # SmolLM2-135M-Instruct and its made draft, ten
    OSD_HF_DATA=... python recipes/carried.py --requests 2 --datasets gsm8k --max-new-tokens 8 --threads 1      # smoke

The draft (the lab's, or the one that `smollm2.py` makes and keeps below `--traces`) is saved with `custom_generate`
and called from its folder, by transformers alone. Every prompt is answered greedily in turns, in an order that is
drawn for each: by the package (`"auto"`, text of the request alone, no capture, nothing learned); by the file, through
`custom_generate` and as the function that `load_custom_generate` returns, loaded once; by stock assisted generation
with five tokens a round; by the target alone. The first prompts of each data set warm up. Compared are the seconds of
each answer, by the median of their ratios with its 95% interval, and whether answers are the same.
"""

from __future__ import annotations

import argparse
import functools
import random
import tempfile
import time
from collections import defaultdict
from typing import Any

import common
import smollm2
import torch
from common import DATASETS, load_pair, make_parser, prompts, write_report
from tqdm import tqdm

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.evaluation.benchmark import median_ratio
from osd_hf.hub.push import save_draft
from osd_hf.hub.standalone import standalone
from osd_hf.models import set_fixed_k
from osd_hf_app.smollm2 import MAKE_SECONDS

WARM_UP = 4  # prompts of each data set that do not count
CONFIG = OnlineConfig(update_strategy="manual", text_scope="request", draft_vocabulary="full")
# Ratios of seconds: what is divided by what.
COMPARED = {
    "file over package": ("loaded once", "package"),
    "file by name over package": ("file", "package"),
    "stock over file by name": ("stock", "file"),
    "alone over file by name": ("alone", "file"),
}


def compared(pair: Any, questions: list[list[int]], max_new_tokens: int, folder: str) -> dict[str, Any]:
    """The seconds of each way to answer these prompts, compared."""
    target, draft = pair.target, pair.draft
    how = {"custom_generate": folder, "trust_remote_code": True}
    with OnlineAssistant(*pair, CONFIG) as assistant:
        carried = target.load_custom_generate(folder, trust_remote_code=True)
        ways = {
            "package": functools.partial(assistant.generate, learn=False),
            "file": functools.partial(target.generate, **how),
            "loaded once": functools.partial(carried, target, assistant_model=draft),
            "stock": functools.partial(target.generate, assistant_model=draft),
            "alone": target.generate,
        }
        seconds, same = defaultdict[str, list[float]](list), defaultdict[str, int](int)
        for number, question in enumerate(tqdm(questions, leave=False)):
            ids, given = common.greedy(question, max_new_tokens)
            answers, order = {}, random.Random(number).sample(list(ways), len(ways))  # none always behind another
            for way in order:
                started = time.perf_counter()
                answers[way] = ways[way](inputs=ids, **given).tolist()
                if number >= min(WARM_UP, len(questions) - 1):
                    seconds[way].append(time.perf_counter() - started)
            for way in ways:
                same[way] += answers[way] == answers["alone"]
    started = time.perf_counter()
    target.load_custom_generate(folder, trust_remote_code=True)
    return {
        "requests": len(seconds["alone"]),
        "seconds": {way: sum(spent) for way, spent in seconds.items()},
        "same_as_alone": {way: same[way] for way in ways if way != "alone"},
        "seconds_to_load": time.perf_counter() - started,
        **{name: median_ratio(a / b for a, b in zip(seconds[one], seconds[other], strict=True))
           for name, (one, other) in COMPARED.items()},
    }  # fmt: skip


def made_pair(args: argparse.Namespace) -> Any:
    """SmolLM2-135M-Instruct, and the draft that is made of its layers once."""
    how = {"target": None, "layers": None, "make_steps": None, "max_new_tokens": common.MAX_NEW_TOKENS}
    pair, _ = smollm2.made(argparse.Namespace(**vars(args) | how))
    set_fixed_k(pair.draft.generation_config, common.K)
    return pair


def main() -> None:
    parser = make_parser(__doc__, "carried")
    parser.add_argument("--pair", choices=["lab", "smollm2"], default="lab")
    parser.add_argument("--make-seconds", type=float, default=MAKE_SECONDS, help="for the draft of SmolLM2")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS)[:2])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=common.MAX_NEW_TOKENS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started, pair = time.time(), load_pair() if args.pair == "lab" else made_pair(args)
    report: dict[str, Any] = {"pair": args.pair, "lines": len(standalone("me/draft").splitlines())}
    with tempfile.TemporaryDirectory() as folder:
        save_draft(folder, pair.draft, pair.tokenizer, custom_generate=True)
        for name in args.datasets:
            questions = prompts(name, pair.tokenizer, args.requests, args.seed)
            report[name] = found = compared(pair, questions, args.max_new_tokens, folder)
            print(f"{name}: {found}", flush=True)
            write_report(args.name, report, **common.run_facts(started))


if __name__ == "__main__":
    main()
