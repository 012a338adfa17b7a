"""What a trace keeps of a request's arguments: the prompt's token ids, and the settings that shape the answer."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import LogitsProcessorList

__all__ = ["NO_WARPING", "num_cached", "prompt_ids", "request_settings", "sampling_settings", "without_padding"]

logger = logging.getLogger(__name__)

# `None` would be filled up with defaults, top_k = 50 among them.
NO_WARPING = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
}  # fmt: skip
# What of a generation config shapes the distribution or bounds the answer: kept with a trace, so that a replay can
# process a draft's logits as the live request did.
SAMPLING_FIELDS = (
    "do_sample", *NO_WARPING, "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "min_length", "min_new_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits", "eos_token_id",
)  # fmt: skip


def num_cached(model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> int | None:
    """Tokens of the prompt that lie in a cache of an earlier turn; `None` where the cache holds tokens that the prompt
    does not repeat, which `generate` tells by a mask longer than the prompt."""
    cache = kwargs.get("past_key_values")
    cached = 0 if cache is None else int(cache.get_seq_length())
    if cached == 0:
        return 0
    mask = kwargs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    length = getattr(kwargs["generation_config"], "_mask_length", None) if mask is None else mask.shape[1]
    repeated = length in (None, input_ids.shape[1]) and cached < input_ids.shape[1]
    return cached if repeated else None


def without_padding(ids: torch.Tensor, mask: Any) -> torch.Tensor:
    """The tokens of `ids`, of shape `(1, tokens)`, that a mask of the same shape does not hide; all without one."""
    row = ids[0]
    return row[mask[0].bool()] if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else row


def prompt_ids(
    model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any], *, prefix_unseen: bool
) -> tuple[Any, Any] | None:
    """Prompt ids without padding and, for an encoder-decoder, the decoder's prompt; `None` where the request also
    hangs on something other than token ids, so that no draft could be taught from its trace."""
    is_encoder_decoder = model.config.is_encoder_decoder
    source = kwargs.get("inputs_tensor") if is_encoder_decoder else input_ids
    foreign = [
        name
        for name, value in kwargs.items()
        if name != "inputs_tensor" and isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 2
    ]
    is_empty = source is None or source.is_floating_point() or source.shape[1] == 0
    # Where the encoder's outputs were given, ids below 0 stand in for the source.
    if source is None or is_empty or foreign or prefix_unseen or (is_encoder_decoder and bool((source < 0).any())):
        logger.warning(
            "A request is not captured: its prompt is not made of token ids alone (%s).",
            ", ".join(foreign) or ("part of it lies only in the cache" if prefix_unseen else "embeddings or features"),
        )
        return None
    if not is_encoder_decoder:
        source, decoder_ids = input_ids, None
    else:
        decoder_ids = input_ids[0].to(torch.int32).cpu().numpy()
    return without_padding(source, kwargs.get("attention_mask")).to(torch.int32).cpu().numpy(), decoder_ids


def sampling_settings(generation_config: Any) -> dict[str, Any]:
    """Those settings of `SAMPLING_FIELDS` that do something, ready for JSON."""
    settings: dict[str, Any] = {}
    for name in SAMPLING_FIELDS:
        value = getattr(generation_config, name, None)
        is_id = name.endswith("_token_id")  # of which 0 is one like any other
        neutral = value is None or value is False or (not is_id and value in (0, 1.0) and not isinstance(value, bool))
        if not neutral and (generation_config.do_sample or name not in NO_WARPING):
            # Biases are keyed by tuples of ids, which JSON has not; transformers takes pairs as well.
            settings[name] = [[list(k), v] for k, v in value.items()] if isinstance(value, dict) else value
    return settings


def request_settings(generation_config: Any, prompt_tokens: int, processors: LogitsProcessorList) -> dict[str, Any]:
    return {
        **sampling_settings(generation_config),
        "max_new_tokens": int(generation_config.max_length) - prompt_tokens,
        "processors": [type(p).__name__ for p in processors],
    }
