"""Prints what a step of distillation adds to the largest resident memory of the process, in bytes.

Vocabulary 150,000, 8 requests of 512 tokens, bodies of one small layer.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import models
import numpy as np
import torch

from osd_hf.distillation.trainer import DistillConfig, distill

VOCAB, BATCH, TOKENS = 150_000, 8, 512


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rows(number: int, tokens: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{"prompt": [5], "completion": rng.integers(3, VOCAB, tokens - 1).tolist()} for _ in range(number)]


def step(pair: Any, dataset: Any, folder: str) -> None:
    config = DistillConfig(
        output_dir=folder, per_device_train_batch_size=BATCH, max_steps=1, save_strategy="no", use_cpu=True,
        disable_tqdm=True, report_to="none", divergence="jsd",
    )  # fmt: skip
    distill(target=pair[0], draft=pair[1], dataset=dataset, config=config, tokenizer=models.tokenizer())


if __name__ == "__main__":
    torch.set_num_threads(1)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "max_position_embeddings": TOKENS}
    pair = tuple(models.build(seed=seed, vocab_size=VOCAB, **small) for seed in (0, 1))
    step(pair, rows(1, 8), sys.argv[1])  # what imports, weights and the optimizer take is no matter of the batch
    before = peak_bytes()
    step(pair, rows(BATCH, TOKENS), sys.argv[1])
    print(peak_bytes() - before)
