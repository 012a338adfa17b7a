"""Giving a draft the target's vocabulary size, where the two differ in padding only."""

from __future__ import annotations

import copy
from typing import Any

from osd_hf.errors import VocabularyMismatchError
from osd_hf.guards import check_tokenizers, find_tokenizer

__all__ = ["align_vocab", "of_one_size"]


def align_vocab(draft: Any, target: Any, tokenizer: Any = None) -> Any:
    """
    A copy of the draft with the target's vocabulary size. Families often pad their embeddings to different sizes
    (Qwen2.5-0.5B has 151,936 rows, 7B 152,064); the padding rows belong to no token, and assisted generation, TRL and
    vLLM refuse such a pair until the sizes agree.

    Args:
        draft (`PreTrainedModel`):
            Left as it is.
        target (`PreTrainedModel`):
            Gives the size.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer of both. Without it, the tokenizers are loaded from where the models came from and compared.

    Returns:
        `PreTrainedModel`: in evaluation mode, same dtype and device; new rows are the mean of the old ones, and never
        drawn by a target that knows no such token.

    Raises:
        VocabularyMismatchError: the tokenizers differ, cannot be found, or use ids beyond the smaller vocabulary.
    """
    size = int(target.config.get_text_config().vocab_size)
    old_size = int(draft.config.get_text_config().vocab_size)
    if tokenizer is None:
        tokenizer, draft_tokenizer = find_tokenizer(target), find_tokenizer(draft)
        if tokenizer is None or draft_tokenizer is None:
            raise VocabularyMismatchError(
                f"No tokenizers were found where the models came from ({target.config.name_or_path!r}, "
                f"{draft.config.name_or_path!r}), so it cannot be checked that they share one. Pass `tokenizer=`, the "
                "tokenizer of both."
            )
        check_tokenizers(tokenizer, draft_tokenizer)
    highest = max(tokenizer.get_vocab().values())
    if highest >= min(size, old_size):
        raise VocabularyMismatchError(
            f"The tokenizer uses ids up to {highest}, but the target has {size} rows and the draft {old_size}: they "
            "differ in more than padding. Choose a draft of the target's family."
        )
    aligned = copy.deepcopy(draft)
    if size != old_size:
        aligned.resize_token_embeddings(size, mean_resizing=size > old_size)
    return aligned.eval()


def of_one_size(draft: Any, target: Any) -> Any:
    """The draft itself where its vocabulary has the target's size, otherwise as of [`align_vocab`]."""
    sizes = {int(model.config.get_text_config().vocab_size) for model in (draft, target)}
    return draft if len(sizes) == 1 else align_vocab(draft, target)
