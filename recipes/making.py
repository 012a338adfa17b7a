"""
A draft for any target: what a piece of it learns beside a model of the same shape from scratch, and which piece.

    OSD_HF_DATA=... python recipes/making.py                       # lab pair: which layers, and what they are worth
    OSD_HF_DATA=... python recipes/making.py --parts targets --targets lab= smollm2=DIR t5=runs/t5_pair/target gemma3=
    OSD_HF_DATA=... python recipes/making.py --parts targets --dataset everyday --targets lab= smollm2=DIR
    OSD_HF_DATA=... python recipes/making.py --steps 400           # bounded by steps: machines do not matter
    OSD_HF_DATA=... python recipes/making.py --requests 24 --steps 4 --parts targets pieces ways     # smoke

targets  `taught_draft` on each target: which piece was chosen, its acceptance on held-out requests before and after,
         bytes, time; and a model of the same shape with random weights, taught on the same requests for as long.
         `lab=` is the lab's, `gemma3=` and `t5=`, without a folder, are tiny ones with random weights, for their shape
         alone; `curve` is held-out acceptance after so many seconds
pieces   which layers, and how many: held-out acceptance after the same steps, cost, expected speed
ways     what learns: everything, or all but embeddings and head; over all tokens, or some drawn ones
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from common import (
    MAX_NEW_TOKENS,
    K,
    data_folder,
    gain,
    make_parser,
    processor_seconds,
    recorded,
    recording,
    report_parts,
)
from common import rows as rows_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from osd_hf import AcceptanceStats, CorrectionStore, OnlineConfig, Trace
from osd_hf.cutting import cut, depth
from osd_hf.decoding.draft_length import measured_costs
from osd_hf.decoding.hook import record_traces
from osd_hf.errors import UnsupportedModelError
from osd_hf.evaluation.display import figure, text_table
from osd_hf.making import Course, MakingConfig, Piece, outer_layers, split, taught_draft, teach
from osd_hf.models import load_model, load_tokenizer
from osd_hf.prompts import encode_turn
from osd_hf_app.smollm2 import everyday_prompts

TINY: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma3": (AutoModelForCausalLM, {
        "model_type": "gemma3_text", "vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
        "sliding_window": 32,
    }),
    "t5": (AutoModelForSeq2SeqLM, {
        "model_type": "t5", "vocab_size": 4096, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 8,
        "num_decoder_layers": 8, "num_heads": 4, "decoder_start_token_id": 0,
    }),
}  # fmt: skip
EVERYDAY = "everyday"  # questions of everyday life, which no data set has
T5_PROMPT = "SQL: db: {db_id}\n{question}"  # what `t5_pair.py` trains on
WAYS: dict[str, dict[str, Any]] = {
    "layers alone, over all tokens": {},
    "embeddings and head too, over all tokens": {"is_frozen": False},
    "layers alone, over 512 drawn tokens": {"drawn": 512},
    "embeddings and head too, over 512 drawn tokens": {"is_frozen": False, "drawn": 512},
}


# --- targets and their answers --------------------------------------------------------------------------------------


def load(name: str, folder: str) -> tuple[Any, Any]:
    """A target and its tokenizer; those with random weights have none."""
    if name == "lab":
        folder = folder or str(data_folder() / "lab/target")
    if folder:
        return load_model(folder, dtype="float32", device="cpu"), load_tokenizer(folder)
    torch.manual_seed(0)
    kind, settings = TINY[name]
    return kind.from_config(AutoConfig.for_model(**settings)).eval(), None


def answers(name: str, target: Any, tokenizer: Any, args: argparse.Namespace) -> list[Trace]:
    """Recorded once, and kept."""
    if tokenizer is not None and args.dataset == EVERYDAY:
        asked = [encode_turn(tokenizer, prompt) for prompt in everyday_prompts(args.seed)[: args.requests]]
        return recording(args.traces / f"{name}-{EVERYDAY}-n{args.requests}", target, asked, EVERYDAY)
    if tokenizer is not None and not target.config.is_encoder_decoder:
        return recorded(args.dataset, args.seed, args.requests, args.traces / name, (target, None, tokenizer))
    store = CorrectionStore(args.traces / name / f"n{args.requests}")
    if len(store) == 0:
        generator = torch.Generator().manual_seed(args.seed)
        asked = [torch.randint(3, 4096, (8,), generator=generator).tolist() for _ in range(args.requests)]
        if tokenizer is not None:
            rows = rows_of("spider")[-args.requests :]
            asked = [tokenizer(T5_PROMPT.format(**row))["input_ids"] for row in rows]
        for trace in list(record_traces(target, asked, max_new_tokens=MAX_NEW_TOKENS)):
            store.append(trace)
        store.flush()
    return list(store)


def rule(args: argparse.Namespace, requests: Sequence[Trace]) -> OnlineConfig:
    return OnlineConfig(
        num_assistant_tokens=K, gate=False, update_strategy="manual", buffer_size=len(requests), seed=args.seed
    )


def taught(
    piece: Piece, traces: Sequence[Trace], args: argparse.Namespace, seconds: float, steps: int | None
) -> float:
    """Teach a piece on the requests that a made draft learns from; returns the processor seconds."""
    learned, held_out = split(traces, args.seed)

    def teaching() -> None:
        piece.begin(learned, held_out, rule(args, learned))
        teach(piece, held_out, Course(seconds, time.perf_counter, False), seconds, steps)

    return processor_seconds(teaching)


def shown(stats: AcceptanceStats) -> dict[str, Any]:
    return {"alpha": stats.alpha, "alpha_interval": list(stats.alpha_interval)}


# --- parts ----------------------------------------------------------------------------------------------------------


def targets(args: argparse.Namespace) -> dict[str, Any]:
    """A made draft of each target, and one from scratch."""
    found = {}
    for name, folder in (named.split("=", 1) for named in args.targets):
        target, tokenizer = load(name, folder)
        traces = answers(name, target, tokenizer, args)
        layers = None if args.layers is None else tuple(args.layers)
        config = MakingConfig(layers=layers, max_seconds=args.seconds, max_steps=args.steps, seed=args.seed)
        begun = time.process_time()
        try:
            made = taught_draft(target, tokenizer, config, traces=traces)
        except UnsupportedModelError as error:
            found[name] = {"refused": str(error)}
            continue
        spent = time.process_time() - begun
        torch.manual_seed(args.seed)
        scratch = Piece(type(made.draft)(made.draft.config).eval(), made.layers, made.encoder_layers, is_frozen=False)
        taught(scratch, traces, args, made.seconds, None if args.steps is None else made.steps)
        found[name] = {
            **made.to_dict(), "processor_seconds": spent, "bytes": sum(p.nbytes for p in made.draft.parameters()),
            "target_bytes": sum(p.nbytes for p in target.parameters()), "layers_of_target": depth(target),
            "scratch": shown(scratch.stats) | {"steps": scratch.steps, "curve": scratch.curve},
            **gain(scratch.stats, made.after),
        }  # fmt: skip
        print(f"{name}: {found[name]}")
    return found


def pieces(args: argparse.Namespace) -> dict[str, Any]:
    """Which layers of the lab target."""
    target, tokenizer = load("lab", "")
    traces, count = answers("lab", target, tokenizer, args), depth(target)
    found, rows = {}, []
    for size in args.sizes:
        for layers in {tuple(range(size)), outer_layers(size, count), tuple(range(count - size, count))}:
            piece = Piece(cut(target, layers), layers, None)
            (piece.costs,) = measured_costs(target, [piece.draft], traces[0].prompt_ids, time.process_time)
            seconds = taught(piece, traces, args, args.seconds, args.steps)
            k, speedup = piece.costs.best_k(piece.stats.alpha, MAX_NEW_TOKENS)
            found[piece.name] = {
                "before": shown(piece.before), "after": shown(piece.stats), "c": piece.costs.c, "k": k,
                "speedup": speedup, "steps": piece.steps, "processor_seconds": seconds,
            }  # fmt: skip
            cells = [piece.before.alpha, piece.stats.alpha, piece.costs.c, speedup]
            rows.append([piece.name, *map(figure, cells), figure(seconds, 0)])
    print(text_table(["piece", "alpha before", "after", "cost", "expected", "processor s"], sorted(rows)))
    return found


def ways(args: argparse.Namespace) -> dict[str, Any]:
    """What of the lab target's first and last layer learns."""
    target, tokenizer = load("lab", "")
    traces, found, rows = answers("lab", target, tokenizer, args), {}, []
    for name, way in WAYS.items():
        piece = Piece(cut(target, (0, 7)), (0, 7), None, **way)
        seconds = taught(piece, traces, args, args.seconds, args.steps)
        found[name] = {"after": shown(piece.stats), "steps": piece.steps, "processor_seconds": seconds}
        rows.append([name, figure(piece.stats.alpha), str(piece.steps), figure(seconds, 0)])
    print(text_table(["what learns", "alpha", "steps", "processor s"], rows))
    return found


def main() -> None:
    parser = make_parser(__doc__, "making")
    parser.add_argument("--parts", nargs="+", default=["targets", "pieces", "ways"])
    parser.add_argument("--targets", nargs="+", default=["lab="], metavar="NAME=DIR", help="of the part `targets`")
    parser.add_argument("--dataset", default="gsm8k")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--layers", type=int, nargs="+", help="of the drafts of `targets`, chosen by measurement otherwise"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=300.0, help="for each draft")
    parser.add_argument("--steps", type=int, help="for each draft, at most")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report_parts(args, lambda part: globals()[part](args), seed=args.seed)


if __name__ == "__main__":
    main()
