"""Train the draft of SmolLM2-135M-Instruct that the package has.

    OSD_HF_DATA=... python recipes/smollm2_draft.py                                    # an hour on two cores
    OSD_HF_DATA=... python recipes/smollm2_draft.py --layers 0 29 --out runs/two       # another draft, to compare
    OSD_HF_DATA=... python recipes/smollm2_draft.py --states -1 --out runs/head        # a draft head

The prompts are everyday questions: `alpaca` without its last 400 rows, the goals of PIQA, and the prompts of
`app/everyday.json`. Their sampled answers (temperature 0.7, top-p 0.9) are kept in `--answers` with the 64 most likely
tokens of the target at each position. Answers in `OSD_HF_DATA/smollm2_answers` are scored and used first; further ones
are sampled until there are `--tokens`. A draft with the chosen layers of the target learns by forward KL with Muon.
Acceptance (k = 5) is measured along the way on answers to other prompts, sampled (the last 400 rows of `alpaca`,
MT-Bench) and greedy (four data sets), which `--held-out` keeps.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import torch
from common import K, kept_answers, make_parser, write_report
from safetensors.torch import save_file
from transformers import TrainerCallback

from osd_hf import CorrectionStore, DistillConfig, DraftHead, Trace, distill, draft_head, replay
from osd_hf.acceptance import figures_of
from osd_hf.distillation.answers import sample_answers
from osd_hf.layers import copy_layers
from osd_hf.learning.weights import ends_of
from osd_hf.models import set_fixed_k
from osd_hf.prompts import encode_turn
from osd_hf.recording import scored
from osd_hf.trace import bare_trace
from osd_hf.vocabulary import write_usual_tokens
from osd_hf_app.pair import everyday_prompts, smollm2

KEPT_STATES = 4 << 30  # bytes
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS, SCORED_TOGETHER = 250, 128, 64
MEASURED_AT = (1e4, 1e5, 3e5, 6e5, 1e6, 2e6, 3e6, 1e7)  # trained tokens, counting each epoch


def training_prompts() -> dict[tuple[str, Any], str]:
    """Return the prompts by their source and row."""
    chats = common.alpaca_prompts()[: -common.HELD_OUT_ROWS]
    found: dict[tuple[str, Any], str] = {("alpaca", i): text for i, text in enumerate(chats)}
    found |= {("piqa", i): row["goal"] for i, row in enumerate(common.rows("piqa"))}
    return found | {("everyday", text): text for text in everyday_prompts()}


def given_answers(tokenizer: Any, prompts: dict[tuple[str, Any], str], vocab_size: int) -> Iterator[Trace]:
    """Yield the answers that come with the data sets."""
    file = common.data_folder() / "smollm2_answers/answers.jsonl.gz"
    if not file.is_file():
        return
    sampling = {"do_sample": True, **common.SAMPLING, "max_new_tokens": MAX_NEW_TOKENS, "eos_token_id": 2}
    with gzip.open(file, "rt") as lines:
        for row in map(json.loads, lines):
            text = prompts[row["source"], row["prompt"] if row["source"] == "everyday" else row["row"]]
            trace = bare_trace(encode_turn(tokenizer, text), row["answer_ids"], vocab_size, None)
            yield replace(trace, sampling=sampling, domain=row["source"])


class Measured(TrainerCallback):
    """Measure the draft on held-out answers after certain numbers of tokens."""

    def __init__(self, held_out: dict[str, list[Trace]], tokens_of_a_step: float, place: Path) -> None:
        self.held_out, self.tokens, self.place = held_out, tokens_of_a_step, place
        self.marks = {max(round(mark / tokens_of_a_step), 1) for mark in MEASURED_AT}

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_evaluate = state.global_step in self.marks or state.global_step == state.max_steps

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        found = {"step": state.global_step, "tokens": round(state.global_step * self.tokens)}
        line = json.dumps(found | {name: figures_of(replay(model, part, K)) for name, part in self.held_out.items()})
        print(line, flush=True)
        with self.place.open("a") as file:
            file.write(line + "\n")


def save_layers(draft: Any, folder: Path) -> None:
    """Save a draft that was cut from its target without embeddings and head, in bfloat16, for `load_layers`."""
    ends = {id(weight) for _, weight in ends_of(draft)}
    own = {name: p.detach().to(torch.bfloat16) for name, p in draft.named_parameters() if id(p) not in ends}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(own, folder / "model.safetensors")
    draft.config.save_pretrained(folder)
    draft.generation_config.save_pretrained(folder)


def main() -> None:
    parser = make_parser(__doc__, "smollm2_draft", traces=False)
    parser.add_argument("--layers", type=int, nargs="+", default=[0], help="layers of the target to copy")
    parser.add_argument("--states", type=int, nargs="+", help="states of the target that a draft head reads")
    parser.add_argument("--tokens", type=int, default=0, help="sample answers until there are so many tokens")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=1e-2, help="highest learning rate of Muon")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; twice as fast if the CPU has it")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--answers", type=Path, default=Path("runs/smollm2_answers"))
    parser.add_argument("--held-out", type=Path, default=Path("runs/smollm2_held_out"))
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2_draft"), help="where checkpoints are kept")
    parser.add_argument("--out", type=Path, default=Path("osd_hf/bundled/smollm2_draft"))
    args = parser.parse_args()
    target, tokenizer = smollm2()
    store, prompts = CorrectionStore(args.answers), training_prompts()
    if len(store) == 0:
        given = given_answers(tokenizer, prompts, target.config.vocab_size)
        while batch := list(itertools.islice(given, SCORED_TOGETHER)):
            for trace in scored(target, batch, [64] * len(batch), 16):
                store.append(trace)
            print(f"scored {len(store)} given answers", flush=True)
    asked = [ids for text in prompts.values() if len(ids := encode_turn(tokenizer, text)) <= MAX_PROMPT_TOKENS]
    sample_answers(
        target, asked, store, num_tokens=args.tokens, max_new_tokens=MAX_NEW_TOKENS, sampling=common.SAMPLING,
        batch_size=48, seed=args.seed,
    )  # fmt: skip
    training = list(store)
    total = sum(map(len, training))
    held_out = kept_answers(args.held_out, target, tokenizer)
    draft = copy_layers(target, args.layers)
    if args.states:
        draft = DraftHead.from_draft(draft, target, args.states)
        draft_head.MAX_KEPT_BYTES = KEPT_STATES  # computed once
    steps = math.ceil(len(training) / args.batch_size)
    args.runs.mkdir(parents=True, exist_ok=True)
    result = distill(
        target=None, draft=draft, dataset=training, eval_dataset=held_out["alpaca, sampled"][:8], tokenizer=tokenizer,
        callbacks=[Measured(held_out, total / steps, args.runs / "measured.jsonl")],
        config=DistillConfig(
            output_dir=str(args.runs), num_train_epochs=args.epochs, learning_rate=args.rate, optimizer="muon",
            freeze_embeddings=True, lr_scheduler_type="cosine", warmup_steps=0.02,
            per_device_train_batch_size=args.batch_size, eval_strategy="steps", eval_steps=10**6,
            save_strategy="epoch", save_total_limit=2, logging_steps=10, report_to="none", seed=args.seed,
            use_cpu=target.device.type == "cpu", bf16=args.bf16,
            resume_from_checkpoint="true" if any(args.runs.glob("checkpoint-*/trainer_state.json")) else None,
        ),
    )  # fmt: skip
    made = result.draft
    write_usual_tokens(made, training)
    set_fixed_k(made.generation_config, 3)
    if args.states:
        made.save_pretrained(args.out)
    else:
        save_layers(made, args.out)
    lines = (args.runs / "measured.jsonl").read_text().splitlines()
    report = {
        "layers": args.layers, "states": args.states, "answers": len(training), "distinct_tokens": total,
        "epochs": args.epochs, "rate": args.rate, "batch_size": args.batch_size, "steps": result.state.global_step,
        "seconds": result.log_history[-1].get("train_runtime"), "curve": [json.loads(line) for line in lines],
        "bytes": (args.out / "model.safetensors").stat().st_size,
    }  # fmt: skip
    write_report(args.name, report, seed=args.seed)


if __name__ == "__main__":
    main()
