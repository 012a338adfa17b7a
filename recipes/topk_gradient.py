"""
How much of the learning signal survives when only the target's top K logits are kept, and what keeping them costs.

    export OSD_HF_DATA=<folder with data/ and lab/>
    python recipes/topk_gradient.py --json topk_gradient.json
    python recipes/topk_gradient.py --prompts 1 --max-new-tokens 8   # smoke test

The target answers prompts of four data sets greedily; target and draft then run over prompt and answer. At each answer
position the gradient of the loss with respect to the draft's logits is taken twice: from the whole row in single
precision, and from what a trace keeps of it (K logits in half precision, their ids, the tail's mass). Reported is the
cosine between the two, median and 5th percentile over all positions. Takes a minute on one core.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from common import MAX_NEW_TOKENS, TEMPLATES, load_pair, prompts

from osd_hf import Trace
from osd_hf.losses import DIVERGENCES, divergence_loss
from osd_hf.trace import ids_dtype
from osd_hf.utils.report import provenance

KEPT = (8, 16, 64)
VOCABULARIES = (4_096, 151_936)


@torch.inference_mode()
def answer_rows(target, draft, prompt_ids, max_new_tokens):
    """Logits of both models, `(answer, vocabulary)`, at the positions that predict the target's greedy answer."""
    ids = target.generate(prompt_ids, max_new_tokens=max_new_tokens, do_sample=False)
    answer = slice(prompt_ids.shape[1] - 1, ids.shape[1] - 1)
    return target(ids).logits[0, answer], draft(ids).logits[0, answer]


def kept_rows(rows, k):
    """What `divergence_loss` gets of the target's rows after they were stored in a trace."""
    top, ids = rows.topk(k, dim=-1)
    logprobs = rows.double().log_softmax(-1)
    tail = logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1).float()
    trace = Trace(
        prompt_ids=np.zeros(0, np.int32),
        completion_ids=np.zeros(len(rows), np.int32),
        rounds=(),
        top_logits=(top - top[:, :1]).numpy().astype(np.float16),
        top_ids=ids.numpy().astype(ids_dtype(rows.shape[1])),
        tail_logprob=tail.numpy(),
        vocab_size=rows.shape[1],
    )
    return {"top_ids": ids, "top_logprobs": torch.from_numpy(trace.kept_logprobs()), "tail_logprob": tail}


def gradient(draft_rows, divergence, **stored):
    logits = draft_rows.double().requires_grad_()
    (grad,) = torch.autograd.grad(divergence_loss(logits, divergence=divergence, **stored), logits)
    return grad


def bytes_per_position(k, vocab_size):
    """Half-precision logits, ids, and the tail in single precision."""
    return k * (2 + np.dtype(ids_dtype(vocab_size)).itemsize) + 4


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--prompts", type=int, default=10, help="prompts per data set, drawn without replacement")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")
    args = parser.parse_args()

    target, draft, tokenizer = load_pair()
    cosines = {name: {k: [] for k in KEPT} for name in DIVERGENCES}
    kept_mass = {k: [] for k in KEPT}
    for data_set in TEMPLATES:
        for prompt in prompts(data_set, tokenizer, args.prompts, args.seed):
            ids = torch.tensor([prompt])
            p_rows, q_rows = (rows.clone() for rows in answer_rows(target, draft, ids, args.max_new_tokens))
            stored = {k: kept_rows(p_rows, k) for k in KEPT}
            logprobs = p_rows.double().log_softmax(-1)
            whole = {
                "top_ids": None,
                "top_logprobs": logprobs,
                "tail_logprob": torch.full((len(logprobs),), -torch.inf),
            }
            for k in KEPT:
                kept_mass[k] += (1 - stored[k]["tail_logprob"].exp()).tolist()
            for name in DIVERGENCES:
                dense = gradient(q_rows, name, **whole)
                for k in KEPT:
                    cosines[name][k] += torch.cosine_similarity(gradient(q_rows, name, **stored[k]), dense).tolist()

    positions = len(kept_mass[KEPT[0]])
    summary = {
        name: {k: np.quantile(values, [0.5, 0.05]).tolist() for k, values in per_k.items()}
        for name, per_k in {**cosines, "kept mass": kept_mass}.items()
    }
    sizes = {v: {"dense": 2 * v} | {k: bytes_per_position(k, v) for k in KEPT} for v in VOCABULARIES}
    print(f"{positions} positions of {args.prompts} answers per data set; cosine to the dense gradient, median (5%)\n")
    print(f"{'':<18}" + "".join(f"{f'K = {k}':>18}" for k in KEPT))
    for name, per_k in summary.items():
        print(f"{name:<18}" + "".join(f"{f'{median:.4f} ({p5:.4f})':>18}" for median, p5 in per_k.values()))
    for vocab_size, row in sizes.items():
        text = "".join(f"{f'{row[k]} ({row[k] / 2 / vocab_size:.2%})':>18}" for k in KEPT)
        print(f"{f'bytes at {vocab_size:,}':<18}{text}   of {row['dense']:,} (dense, half precision)")
    if args.json:
        report = {
            "provenance": provenance(device="cpu", seed=args.seed),
            "prompts_per_data_set": args.prompts,
            "max_new_tokens": args.max_new_tokens,
            "positions": positions,
            "kept_mass_median_p5": summary.pop("kept mass"),
            "cosine_to_dense_median_p5": summary,
            "bytes_per_position": sizes,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
