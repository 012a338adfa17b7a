"""
An evaluation harness: lm-evaluation-harness answers a task with the target alone and inside `assistant.attached()`.

    pip install lm_eval            # among none of the extras: it brings scikit-learn, nltk, sacrebleu and a dozen more
    OSD_HF_DATA=... python recipes/harness.py
    OSD_HF_DATA=... python recipes/harness.py --requests 2 --sizes 1 2 --max-new-tokens 8         # smoke

Questions of gsm8k are a `generate_until` task of the harness's own `hf` model, in left-padded batches with its own
stopping criteria, greedy. The harness is as it came; all that is added is the draft, to each `generate` of the target.
Counted are token ids of answers that are identical, forwards of the target, and what the task says of both runs. The
draft learns from the answers meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from common import MAX_NEW_TOKENS, K, data_folder, load_pair, make_parser, rows, run_facts, write_report
from datasets import Dataset

from osd_hf import OnlineAssistant, OnlineConfig

try:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
except ImportError:
    sys.exit("lm-evaluation-harness is not there: pip install lm_eval.")

NAME = "local_gsm8k"


def number(text: str) -> str:
    """The last number of a text."""
    return ([""] + re.findall(r"-?\d+", text.replace(",", "")))[-1]


def task(asked: list[dict[str, Any]], max_new_tokens: int) -> ConfigurableTask:
    """Questions whose answers are right if their last number is."""
    return ConfigurableTask(config={
        "task": NAME, "custom_dataset": lambda **_: {"test": Dataset.from_list(asked)}, "test_split": "test",
        "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}", "output_type": "generate_until",
        "process_results": lambda row, said: {"right": float(number(said[0]) == number(row["answer"]))},
        "metric_list": [{"metric": "right", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {"until": ["\n\n", "Question:"], "max_gen_toks": max_new_tokens, "do_sample": False},
    })  # fmt: skip


@contextlib.contextmanager
def watched(target: Any, **more: Any) -> Iterator[dict[str, Any]]:
    """Pass more on to each `generate` of the target; what it answers, and its forwards."""
    seen: dict[str, Any] = {"forwards": 0, "answers": []}
    generate = target.generate

    @functools.wraps(generate)
    def passed_on(**given: Any) -> torch.Tensor:
        answers: torch.Tensor = generate(**given, **more)
        seen["answers"] += answers[:, given["input_ids"].shape[1] :].tolist()
        return answers

    def count(*_: Any) -> None:
        seen["forwards"] += 1

    handle, target.generate = target.register_forward_pre_hook(count), passed_on
    try:
        yield seen
    finally:
        handle.remove()
        del target.generate


def compared(pair: Any, asked: list[dict[str, Any]], size: int, args: Any) -> dict[str, Any]:
    """The task by the target alone, and with a draft that learns."""
    harness = HFLM(pretrained=pair.target, tokenizer=pair.tokenizer, batch_size=size)
    config = OnlineConfig(num_assistant_tokens=args.k, seed=args.seed)

    def score() -> float:
        found = evaluate(harness, {NAME: task(asked, args.max_new_tokens)}, apply_chat_template=True)
        return float(found["results"][NAME]["right,none"])

    with watched(pair.target) as alone:
        theirs = score()
    with OnlineAssistant(*pair, config) as assistant:
        with assistant.attached(domain=NAME), watched(pair.target, assistant_model=assistant.draft) as drafted:
            ours = score()
        alpha, versions = assistant.stats.alpha, assistant.version
    identical = sum(a == b for a, b in zip(alone["answers"], drafted["answers"], strict=True))
    row = {"rows": size, "answers": len(asked), "identical": identical, "scores": [theirs, ours], "alpha": alpha,
           "versions": versions, "forwards_alone": alone["forwards"], "forwards": drafted["forwards"]}  # fmt: skip
    print(f"batches of {size}: {identical} of {len(asked)} identical, {row['forwards']} forwards instead of "
          f"{row['forwards_alone']}, alpha {alpha:.3f}, scores {theirs:.3f} and {ours:.3f}", flush=True)  # fmt: skip
    return row


def main() -> None:
    parser = make_parser(__doc__, "harness", traces=False)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--k", type=int, default=K)
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    args = parser.parse_args()
    data_folder()
    pair, started, asked = load_pair(), time.time(), rows("gsm8k")[: args.requests]
    found = [compared(pair, asked, size, args) for size in args.sizes]
    write_report(args.name, {"measured": found}, seed=args.seed, requests=len(asked), **run_facts(started))


if __name__ == "__main__":
    main()
