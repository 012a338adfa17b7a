"""Drafts for serving engines: a folder with the target's vocabulary, checked after writing, and how to serve it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from osd_hf.errors import ConfigError, StateError
from osd_hf.hub.push import save_draft
from osd_hf.pair import align_vocab, load_model, merged
from osd_hf.utils.report import make_folder

__all__ = ["check_written", "export_to_vllm"]

TOLERANCE, HALF_TOLERANCE = 1e-4, 5e-2  # of log-probs; half precisions round in other places


def export_to_vllm(
    directory: str | os.PathLike[str],
    draft: Any,
    target: Any,
    tokenizer: Any,
    *,
    num_assistant_tokens: int = 5,
    target_name: str | None = None,
) -> list[str]:
    """
    Write a draft as vLLM's `draft_model` method takes it: merged weights, the target's vocabulary size and tokenizer.
    SGLang takes the same folder; llama.cpp converts it.

    Args:
        directory (`str` or `Path`):
            A new or empty folder.
        draft (`PreTrainedModel` or `PeftModel`), target (`PreTrainedModel`):
            Decoder-only models; left as they are.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer of both.
        num_assistant_tokens (`int`, *optional*, defaults to 5):
            k.
        target_name (`str`, *optional*):
            How the command names the target; where it came from by default.

    Returns:
        `list[str]`: the command that serves the pair.

    Raises:
        ConfigError: a folder that is not empty or cannot be written, a k below 1, an encoder-decoder.
        VocabularyMismatchError: the vocabularies differ in more than padding.
        StateError: what was written does not load, or has other logits than the draft.
    """
    folder = Path(directory)
    if num_assistant_tokens < 1:
        raise ConfigError(f"`num_assistant_tokens` must be at least 1, got {num_assistant_tokens}.")
    if draft.config.is_encoder_decoder:
        raise ConfigError("vLLM drafts with decoder-only models, got an encoder-decoder. Serve it with transformers.")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty. Choose another folder.")
    make_folder(folder)
    draft = merged(draft)
    exported = align_vocab(draft, target, tokenizer)
    save_draft(folder, exported, tokenizer, num_assistant_tokens=num_assistant_tokens, repo_id=folder.name)
    check_written(folder, exported, draft)
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": num_assistant_tokens}
    name = target_name or target.config.name_or_path
    return ["vllm", "serve", name, "--speculative-config", json.dumps(config)]


@torch.inference_mode()
def check_written(folder: Path, exported: Any, draft: Any) -> None:
    """Raises StateError where the model in a folder does not have the log-probs of the draft that it was made of."""
    again = load_model(str(folder), dtype="auto", device=str(exported.device))
    rows = min(int(m.config.get_text_config().vocab_size) for m in (exported, draft))
    size = min(32, int(getattr(exported.config.get_text_config(), "max_position_embeddings", 32)))
    ids = torch.randint(rows, (1, size), generator=torch.Generator().manual_seed(0)).to(exported.device)
    wanted, found = (m.eval()(ids).logits.float()[..., :rows].log_softmax(-1) for m in (draft, again))
    error = float((wanted - found).abs().max())
    tolerance = TOLERANCE if again.dtype == torch.float32 else HALF_TOLERANCE
    if not error <= tolerance:
        raise StateError(
            f"What was written to {folder} differs from the draft by {error:.2g} in log-probabilities (at most "
            f"{tolerance:g} is expected). Do not serve it; export again, in float32."
        )
