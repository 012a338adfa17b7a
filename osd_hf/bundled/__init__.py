"""A small target, a weaker draft, their tokenizer, and prompts of four domains, so that everything runs offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from osd_hf.bundled.example import Example
from osd_hf.bundled.prompts import DOMAINS, bundled_prompts, check_answer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["DOMAINS", "Example", "bundled_prompts", "check_answer", "load_bundled"]

_FOLDER = Path(__file__).parent


def load_bundled() -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
    """The bundled target, draft and tokenizer, read from the installed package: fp32, on CPU, in eval mode.

    Prompts go through the tokenizer's chat template as one user turn.

    Returns:
        `tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]`: target, draft, tokenizer.
    """
    # Here and not at the top: the prompts and checkers of this package are used without torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, draft = (
        AutoModelForCausalLM.from_pretrained(_FOLDER / name, dtype=torch.float32, local_files_only=True)
        for name in ("target", "draft")
    )
    return target, draft, AutoTokenizer.from_pretrained(_FOLDER / "target", local_files_only=True)
