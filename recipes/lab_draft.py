"""Train the lab draft for long on the target's sampled answers, as published drafts are trained, and measure it.

    OSD_HF_DATA=... python recipes/lab_draft.py                                      # about an hour and a half
    OSD_HF_DATA=... python recipes/lab_draft.py --tokens 100 --seconds 1 --held-out 2    # smoke

The target answers all prompts of four data sets but the held-out ones (temperature 0.7, top-p 0.9) until there are
`--tokens`. The draft learns from these answers for `--seconds`, by forward KL with Muon and a falling rate. Acceptance
(k = 5) is measured on greedy answers to the held-out prompts, which are those of `lab_online.py`, before and after.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from common import (
    MAX_NEW_TOKENS,
    SAMPLING,
    TEMPLATES,
    K,
    gain,
    load_pair,
    make_parser,
    prompts,
    recorded,
    write_report,
)
from transformers import TrainerCallback

from osd_hf import CorrectionStore, DistillConfig, distill, replay
from osd_hf.distillation.answers import sample_answers, split_answers

REQUESTS = 600  # of each data set, the last of which are held out


class Stopwatch(TrainerCallback):
    """Let the learning rate fall with the time, and stop when it is over; pauses of the process are not counted."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begun = seconds, time.process_time()

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        share = min((time.process_time() - self.begun) / self.seconds, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = max(1 - share, 0.0) * group.setdefault("highest", group["lr"])
        control.should_training_stop = share >= 1


def main() -> None:
    parser = make_parser(__doc__, "lab_draft")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="distinct tokens of the answers")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of training, in processor time")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate of Muon")
    parser.add_argument("--held-out", type=int, default=120, help="answers of each data set that are replayed")
    parser.add_argument("--answers", type=Path, default=Path("runs/lab_answers"))
    args = parser.parse_args()
    pair, store = load_pair(), CorrectionStore(args.answers)
    first = REQUESTS - args.held_out
    held_out = {name: recorded(name, 0, REQUESTS, args.traces, pair, start=first) for name in TEMPLATES}
    known = {tuple(trace.prompt_ids.tolist()) for part in held_out.values() for trace in part}
    asked = [ids for name in TEMPLATES for ids in prompts(name, pair.tokenizer, 10**6, args.seed)]
    asked = [ids for ids in asked if tuple(ids) not in known]
    begun = time.perf_counter()
    sample_answers(
        pair.target, asked, store, num_tokens=args.tokens, max_new_tokens=MAX_NEW_TOKENS, sampling=SAMPLING,
        batch_size=64, seed=args.seed,
    )  # fmt: skip
    answering = time.perf_counter() - begun
    training, _ = split_answers(store)
    config = DistillConfig(
        output_dir=f"{args.answers}-training", num_train_epochs=10**6, learning_rate=args.rate, optimizer="muon",
        lr_scheduler_type="constant", per_device_train_batch_size=16, eval_strategy="no", save_strategy="no",
        logging_steps=100, report_to="none", seed=args.seed, use_cpu=True,
    )  # fmt: skip
    result = distill(
        dataset=training, config=config, target=None, draft=pair.draft, tokenizer=pair.tokenizer,
        callbacks=[Stopwatch(args.seconds)],
    )  # fmt: skip
    rows = {}
    for name, part in held_out.items():
        before, after = (replay(draft, part, K) for draft in (pair.draft, result.draft))
        rows[name] = {"before": before.alpha, "after": after.alpha, **gain(before, after),
                      "tokens_per_forward": [before.block_efficiency, after.block_efficiency]}  # fmt: skip
        print(f"{name}: {before.alpha:.3f} to {after.alpha:.3f}", flush=True)
    total = sum(map(len, training))
    report = {"distinct_tokens": total, "answers": len(training), "steps": result.state.global_step,
              "epochs": result.state.epoch, "answering_seconds": answering, "rows": rows}  # fmt: skip
    write_report(args.name, report, seed=args.seed, training_seconds=args.seconds)


if __name__ == "__main__":
    main()
