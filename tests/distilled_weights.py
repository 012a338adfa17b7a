"""Distills a tiny pair, in one process or in several, and saves what was learned."""

from __future__ import annotations

from typing import Any

import models
import torch

from osd_hf.distillation.trainer import DistillConfig, distill


def distilled(architecture: str, source: str, batch_size: int, folder: str) -> Any:
    target, draft = models.pair(architecture, noise=0.5)
    target.generation_config.eos_token_id = list(range(3, 14))  # answers of different lengths
    return distill(
        target=target,
        draft=draft,
        dataset=[{"prompt": ids[0].tolist()} for ids in models.prompts(24)],
        config=DistillConfig(
            output_dir=folder, sample_source=source, per_device_train_batch_size=batch_size, max_steps=5,
            max_new_tokens=6, save_strategy="no", use_cpu=True, disable_tqdm=True, report_to="none", logging_steps=1,
            learning_rate=0.05, optim="sgd", max_grad_norm=0,  # under which the size of a gradient matters
        ),
        eval_dataset=[{"prompt": ids[0].tolist()} for ids in models.prompts(4)],
        tokenizer=models.tokenizer(),
    )  # fmt: skip


def save_distilled(architecture: str, source: str, batch_size: int, folder: str) -> None:
    """What each of several processes does."""
    result = distilled(architecture, source, batch_size, folder)
    if result.state.is_world_process_zero:
        epoch = next(entry["epoch"] for entry in result.log_history if "loss" in entry)
        found = {"weights": result.draft.state_dict(), "alpha": result.alpha, "epoch": epoch}
        torch.save(found, f"{folder}/result.pt")
