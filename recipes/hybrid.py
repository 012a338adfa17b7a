"""Measure speculation for targets with recurrent layers, on a quiet machine.

    python recipes/hybrid.py cost                        # a target with the shape of Qwen3.5-0.8B; 2 minutes
    python recipes/hybrid.py train                       # a hybrid target on the data sets; 10 minutes
    python recipes/hybrid.py serve                       # the target alone against an assistant that learns; 4 minutes
    python recipes/hybrid.py train serve --max-steps 2   # a smoke test

`cost` alternates forwards and reports a round by three ways to take states back: (a) keep the state after each
verified token and select one, (b) read accepted tokens again with the next candidates, as the loop does, and
recomputation of the accepted tokens at once. For (a), the delta rule of the model is replaced by one that keeps its
states, in this process only: transformers does not expose them.
"""

from __future__ import annotations

import copy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import data_folder, load_pair, make_parser, prompts, rows, run_facts, write_report
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5

from osd_hf import OnlineAssistant, OnlineConfig, make_draft
from osd_hf.decoding.forward import MAX_LAG
from osd_hf.learning.updater import make_optimizers

SHAPE = {  # of Qwen3.5-0.8B
    "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
SMALL = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "tie_word_embeddings": True,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
}  # fmt: skip
K, CONTEXT, TIMES = 4, 256, 15
RATE = 6e-3  # of Muon
DATA = ("alpaca", "gsm8k", "finance_alpaca")


def model_of(shape: dict[str, Any], **changes: Any) -> Any:
    """Build a model with random weights in float32."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **{**shape, **changes})).eval()


def keeping_rule(kept: list[torch.Tensor]) -> Any:
    """Return a delta rule that reads token by token and keeps each state."""

    def rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> Any:
        outputs, state, moving = [], given.pop("initial_state"), {n: given.pop(n) for n in ("g", "beta")}
        for i in range(query.shape[1]):
            at = [x[:, i : i + 1] for x in (query, key, value)]
            one = {n: x[:, i : i + 1] for n, x in moving.items()}
            step = modeling_qwen3_5.torch_recurrent_gated_delta_rule
            output, state = step(*at, **one, initial_state=state, **given)
            outputs.append(output)
            kept.append(state)
        return torch.cat(outputs, 1), state

    return rule


def states_of(cache: DynamicCache) -> list[torch.Tensor]:
    """Return the states of the recurrent layers."""
    kinds = [getattr(x, kind, {}) for x in cache.layers for kind in ("conv_states", "recurrent_states")]
    return [state for states in kinds for state in states.values() if state is not None]


@torch.no_grad()
def cost(shape: dict[str, Any], times: int) -> dict[str, Any]:
    """Return the seconds of forwards and of rounds."""
    model = model_of(shape)
    full = DynamicCache(config=model.config)
    ids = torch.randint(3, 1000, (1, CONTEXT + 64))
    model(input_ids=ids[:, :CONTEXT], past_key_values=full, logits_to_keep=1)
    accepted, lag = K // 2 + 1, MAX_LAG // 2
    ways = {"one token": (1, 1), "verify": (K + 1, K + 1), "verify with lag": (lag + K + 1, K + 1),
            "catch up": (MAX_LAG - K, 1), "recompute": (accepted, 1),
            "verify, states kept": (K + 1, K + 1)}  # fmt: skip
    usual, found = modeling_qwen3_5.torch_chunk_gated_delta_rule, {way: list[float]() for way in (*ways, "snapshot")}
    for _ in range(times + 2):
        for way, (count, num_logits) in ways.items():
            cache, kept = copy.deepcopy(full), list[torch.Tensor]()
            modeling_qwen3_5.torch_chunk_gated_delta_rule = keeping_rule(kept) if "kept" in way else usual
            began = time.perf_counter()
            here = ids[:, CONTEXT : CONTEXT + count]
            model(input_ids=here, past_key_values=cache, logits_to_keep=num_logits)
            found[way].append(time.perf_counter() - began)
        began = time.perf_counter()
        saved = [state.clone() for state in states_of(full)]
        found["snapshot"].append(time.perf_counter() - began)
    modeling_qwen3_5.torch_chunk_gated_delta_rule = usual
    seconds = {way: statistics.median(each[2:]) for way, each in found.items()}
    snapshot = sum(state.nbytes for state in saved)
    rounds = {
        "(a)": seconds["verify, states kept"],
        "(b)": seconds["verify with lag"] + seconds["snapshot"] + seconds["catch up"] * accepted / (MAX_LAG - K),
        "recomputation": seconds["verify"] + seconds["snapshot"] + seconds["recompute"],
    }
    spread = {way: (min(each[2:]), max(each[2:])) for way, each in found.items()}
    bytes_kept = {"snapshot (b)": snapshot, "states kept (a)": snapshot * (K + 1)}
    return {"seconds": seconds, "spread": spread, "round": rounds, "bytes": bytes_kept, "accepted": accepted - 1}


def train(folder: Path, seconds: float, max_steps: int | None) -> dict[str, Any]:
    """Train a hybrid target on prompts and answers of the data sets, and save it."""
    pair = load_pair()
    tokenizer = pair.tokenizer
    model, texts = model_of(SMALL, vocab_size=pair.target.config.vocab_size).train(), list[int]()
    for name in DATA:
        for row in rows(name):
            fields = [str(value) for value in row.values() if value]
            turns = [{"role": "user", "content": "\n".join(fields[:-1])}, {"role": "assistant", "content": fields[-1]}]
            texts += tokenizer.apply_chat_template(turns)["input_ids"]
    tokens = torch.tensor(texts)
    optimizers = make_optimizers(model, dict(model.named_parameters()), OnlineConfig(learning_rate=RATE))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    began, step, losses = time.time(), 0, list[float]()
    while (share := (time.time() - began) / seconds) < 1 and step != max_steps:
        starts = torch.randint(0, len(tokens) - 257, (8,)).tolist()
        batch = torch.stack([tokens[at : at + 256] for at in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 20) * max(1 - share, 0.02)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        step += 1
        if step % 20 == 0:
            print(f"step {step}: loss {statistics.mean(losses[-20:]):.3f}, {share:.0%}", flush=True)
    model.generation_config = copy.deepcopy(pair.target.generation_config)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"steps": step, "loss": statistics.mean(losses[-50:]), "tokens": len(tokens)}


def serve(folder: Path, count: int, new_tokens: int, max_steps: int | None) -> dict[str, Any]:
    """Answer requests by the target alone and by an assistant, alternately."""
    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_pair().tokenizer
    asked = prompts("finance_alpaca", tokenizer, count + 48, 0)
    settings = {"max_seconds": 120.0, "max_steps": max_steps, "max_new_tokens": 64, "show_progress": False}
    draft = make_draft(target, tokenizer, prompts=asked[count:], num_layers=1, **settings)
    seconds, tokens, different = {"alone": 0.0, "assistant": 0.0}, 0, 0
    with OnlineAssistant(copy.deepcopy(target), draft, tokenizer) as assistant:
        for number, ids in enumerate(asked[:count]):
            given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
            given |= {"do_sample": False, "max_new_tokens": new_tokens}
            ways, answers = {"alone": target.generate, "assistant": assistant.generate}, dict[str, Any]()
            for way in list(ways)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                answers[way] = ways[way](**given).tolist()
                seconds[way] += time.perf_counter() - began
            different += answers["alone"] != answers["assistant"]
            tokens += len(answers["alone"][0]) - len(ids)
        stats, learning = assistant.stats, assistant.learning_seconds
    rates = {way: tokens / each for way, each in seconds.items()}
    return {"tokens_per_second": rates, "speedup_with_learning": rates["assistant"] / rates["alone"],
            "learning_seconds": learning, "different": different, "alpha": stats.alpha, "requests": count}  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__, "hybrid", seed=False, traces=False)
    parser.add_argument("what", nargs="+", choices=("cost", "train", "serve"))
    parser.add_argument("--folder", type=Path, default=Path("hybrid_target"), help="of the trained target")
    parser.add_argument("--seconds", type=float, default=600.0, help="of training")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-steps", type=int, help="for a smoke test")
    args = parser.parse_args()
    data_folder()
    started, report, is_short = time.time(), dict[str, Any](), args.max_steps is not None
    if "cost" in args.what:
        report["cost"] = cost(SHAPE if not is_short else {**SMALL, "vocab_size": 1024}, 1 if is_short else TIMES)
    if "train" in args.what:
        report["train"] = train(args.folder, args.seconds, args.max_steps)
    if "serve" in args.what:
        report["serve"] = serve(args.folder, 4 if is_short else args.requests, 64, args.max_steps)
    print(report)
    write_report(args.name, report, **run_facts(started))


if __name__ == "__main__":
    main()
