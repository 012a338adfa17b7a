"""Measure what draft heads cost next to a draft of one layer: a drafted token, reading the target's states, memory per
position, and a training step; for an 8B target by arithmetic.

    OSD_HF_DATA=... python recipes/head_costs.py

Seconds are the minimum of several turns, on an otherwise idle machine. A training step has 16 requests of gsm8k, cut
to the positions of a step. The costs for a GPU are what its memory bandwidth allows.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from common import K, load_pair, make_parser, one_layer_draft, recorded, run_facts, write_report
from transformers import LlamaConfig, LlamaForCausalLM

from osd_hf import DraftHead, OnlineConfig
from osd_hf.decoding.head import HeadForward
from osd_hf.learning.updater import Updater
from osd_hf.learning.weights import shared_ends
from osd_hf.recording import GPU_BANDWIDTH, measured_costs
from osd_hf.vocabulary import SIZES
from osd_hf_app.pair import smollm2

KINDS = ("cut", "head", "three states", "eagle3")
ACCEPTED = 3  # tokens whose states are read in a round
REPEATS = 60
BIG: dict[str, Any] = {  # Llama 3.1 8B
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def state_seconds(head: Any, tokens: int) -> float:
    """Return the seconds of reading the target's states of so many tokens, beyond those of a drafted token."""
    texts = [list(range(3, 131))]
    best = {"read": float("inf"), "feed": float("inf")}
    with torch.inference_mode():
        held = [torch.zeros(len(texts[0]) - 1, head.state_width, dtype=torch.float16)]
        forward = HeadForward(head, [held], 1024)
        forward.read(texts)
        for _ in range(REPEATS):
            texts[0] += [5] * tokens
            held.append(torch.zeros(tokens, head.state_width, dtype=torch.float16))
            started = time.perf_counter()
            forward.read(texts)
            read = time.perf_counter()
            forward.feed(torch.tensor([[5]]))
            best["read"] = min(best["read"], read - started)
            best["feed"] = min(best["feed"], time.perf_counter() - read)
    return best["read"] - best["feed"]


def step_seconds(draft: Any, target: Any, traces: list[Any]) -> float:
    """Return the seconds of a training step at the defaults."""
    config = OnlineConfig(gate=False)
    updater = Updater(draft, config, frozen=shared_ends(draft, target))
    updater.buffer.extend(traces)
    updater.update(1)  # the states of the target are computed here; a live request has them
    return min(updater.update(3).seconds / 3 for _ in range(3))


def measured(target: Any, traces: list[Any]) -> dict[str, Any]:
    """Return the costs of all kinds, in tokens of the target alone and in seconds."""
    drafts = {kind: one_layer_draft(kind, target) for kind in KINDS}
    costs = dict(
        zip(drafts, measured_costs(target, list(drafts.values()), range(3, 131), time.perf_counter), strict=True)
    )
    found = {}
    for name, draft in drafts.items():
        one = costs[name].target
        heads = isinstance(draft, DraftHead)
        found[name] = {
            "target_token_seconds": one,
            "drafted_token": costs[name].draft / one,
            "states_per_round": state_seconds(draft, ACCEPTED) / one if heads else 0.0,
            "bytes_per_position": 2 * draft.state_width if heads else 0,
            "step_seconds": step_seconds(draft, target, traces),
        }
        print(f"{type(target).__name__} {target.config.hidden_size}, {name}: {found[name]}", flush=True)
    return found


def planned(gpu: str) -> dict[str, Any]:
    """Return the costs of one-layer drafts of an 8B target in bfloat16 on a GPU, by arithmetic: the bytes that a
    captured forward reads, and 0.1 ms for each layer and the output head. A head adds its projection of embedding and
    state."""
    with torch.device("meta"):
        target = LlamaForCausalLM(LlamaConfig(**BIG))
    width, layer = BIG["hidden_size"], sum(p.numel() for p in target.model.layers[0].parameters())
    rows, one_layer = SIZES[1], 1e-4 * 2

    def seconds(parameters: int, fixed: float) -> float:
        return fixed + 2 * parameters / (0.9 * GPU_BANDWIDTH[gpu])

    depth = BIG["num_hidden_layers"]
    one = seconds(depth * layer + BIG["vocab_size"] * width, 1e-4 * (1 + depth))
    fusion = {"cut": 0, "head": 2 * width**2, "three states": 2 * width**2, "eagle3": width * (width + width // 2)}
    bytes_read = {"cut": 0, "head": 2 * width, "three states": 6 * width, "eagle3": 6 * width}
    return {
        "gpu": gpu,
        "target_token_seconds": one,
        "rows_of_the_output_head": rows,
        "drafted_token": {n: seconds(layer + rows * width + more, one_layer) / one for n, more in fusion.items()},
        "bytes_per_position": bytes_read,
    }


def main() -> None:
    parser = make_parser(__doc__, "head_costs")
    parser.add_argument("--gpu", default="h200")
    args, started = parser.parse_args(), time.time()
    lab = load_pair()
    traces = recorded("gsm8k", 0, 48, args.traces, lab)
    found: dict[str, Any] = {"lab": measured(lab.target, traces)}
    target, tokenizer = smollm2()
    pair = (target, None, tokenizer)
    found["smollm2"] = measured(target, recorded("gsm8k", 1, 48, args.traces / "smollm2", pair))
    found["8B"] = planned(args.gpu)
    print(found["8B"])
    write_report(args.name, {"k": K, "costs": found}, **run_facts(started))


if __name__ == "__main__":
    main()
