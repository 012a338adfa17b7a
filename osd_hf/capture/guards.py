"""What cannot be kept lossless, or cannot teach a draft, is refused here, before any work is done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import GenerationConfig

from osd_hf.config import OnlineConfig
from osd_hf.errors import (
    ConfigError,
    UnsupportedGenerationError,
)

__all__ = ["check_drafted_by_us", "check_generation", "check_inputs", "check_k"]

# Setting of `generate`, the values under which it does nothing, why it is refused.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("num_beams", (None, 1), "beams verify no draft; use greedy decoding or sampling"),
    ("num_return_sequences", (None, 1), "assisted generation answers one sequence; call once per answer"),
    ("assistant_ensemble_weight", (None,), "it trades the target's distribution for acceptance, so it is lossy"),
    ("prompt_lookup_num_tokens", (None,), "prompt lookup has no draft model that could learn"),
    ("assistant_early_exit", (None,), "early exit drafts with the target itself, there is no draft to teach"),
    ("use_mtp", (None, False), "multi-token prediction drafts with the target's own heads"),
    ("speculation_type", (None,), "block drafting has no ordinary assistant model to teach"),
    ("guidance_scale", (None, 1, 1.0), "guidance keeps state that target and draft would share"),
    ("penalty_alpha", (None, 0, 0.0), "contrastive search verifies no draft"),
    ("dola_layers", (None,), "DoLa verifies no draft"),
    ("constraints", (None,), "constrained beams verify no draft"),
    ("force_words_ids", (None,), "constrained beams verify no draft"),
    ("use_cache", (None, True), "assisted generation needs the key-value cache"),
)
# Settings that are served, and those that do nothing to an assisted answer. A field in none of these lists, as a newer
# transformers may bring, is refused where it is set: what it does is not known here.
_SERVED = frozenset({
    "assistant_confidence_threshold", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "decoder_start_token_id", "do_sample", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "eos_token_id", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "pad_token_id", "remove_invalid_values",
    "renormalize_logits", "repetition_penalty", "return_dict_in_generate", "sequence_bias", "stop_strings",
    "suppress_tokens", "temperature", "top_h", "top_k", "top_p", "typical_p", "watermarking_config",
})  # fmt: skip
_IRRELEVANT = frozenset({
    "assistant_lookbehind", "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
    "disable_compile", "diversity_penalty", "early_stopping", "is_assistant", "length_penalty", "low_memory",
    "max_cache_len", "max_matching_ngram_size", "num_beam_groups", "prefill_chunk_size", "target_lookbehind",
    "token_healing", "transformers_version",
})  # fmt: skip
_CROPPED_CACHES = (None, "dynamic", "dynamic_full", "offloaded")


_KNOWN = _SERVED | _IRRELEVANT | {name for name, _, _ in _REFUSED}


def check_generation(*sources: Any, assistant_tokenizer: Any = None) -> None:
    """
    Refuse modes of `generate` that are lossy, or have no draft to teach.

    Args:
        sources (`Any`):
            Where settings are looked up, first come first served: dicts or generation configs; `None` is passed over.
        assistant_tokenizer (`Any`, *optional*):
            Given where the draft has a tokenizer of its own.

    Raises:
        UnsupportedGenerationError: names the setting, its value and the reason.
    """

    def setting(name: str) -> Any:
        for source in sources:
            value = source.get(name) if isinstance(source, dict) else getattr(source, name, None)
            if value is not None:
                return value
        return None

    for name, harmless, reason in _REFUSED:
        value = setting(name)
        if not any(value is ok or value == ok for ok in harmless):
            raise UnsupportedGenerationError(f"`{name}={value!r}` cannot be used here: {reason}. Leave it out.")
    defaults = GenerationConfig._get_default_generation_params()
    for name, default in vars(GenerationConfig()).items():
        if name in _KNOWN or name.startswith("_"):
            continue
        value = setting(name)
        if value is not None and value not in (default, defaults.get(name)):
            raise UnsupportedGenerationError(
                f"`{name}={value!r}` cannot be used here: this version of osd_hf does not know the setting of a newer "
                "transformers, so it cannot tell whether assisted answers would be the target's own. "
                "Leave it out, or use a newer osd_hf."
            )
    cache = setting("cache_implementation")
    if cache not in _CROPPED_CACHES:
        raise UnsupportedGenerationError(
            f"`cache_implementation={cache!r}` cannot be used here: assisted generation needs a dynamic cache, which "
            "can be cropped. Leave it out."
        )
    watermark = setting("watermarking_config")
    if type(watermark).__name__ == "SynthIDTextWatermarkingConfig":
        raise UnsupportedGenerationError(
            "`watermarking_config` with SynthID keeps state that target and draft would share. Leave it out, or use "
            "`WatermarkingConfig`, which is stateless."
        )
    if assistant_tokenizer is not None:
        raise UnsupportedGenerationError(
            "`assistant_tokenizer` was given: a draft with a tokenizer of its own cannot learn from the target's "
            "token distributions. Use a draft with the target's tokenizer."
        )


def check_drafted_by_us(generate_kwargs: dict[str, Any]) -> None:
    """Refuse arguments that would bring another draft than the assistant's."""
    if generate_kwargs.pop("assistant_model", None) is not None:
        raise UnsupportedGenerationError(
            "`assistant_model` was given, but the assistant brings its own draft. Leave it out, or call "
            "`target.generate` inside `with assistant.attached():`."
        )
    if generate_kwargs.get("custom_generate") is not None:
        raise UnsupportedGenerationError(
            "`custom_generate` replaces assisted decoding, so no draft is used. Leave it out."
        )


def check_k(config: OnlineConfig, num_assistant_tokens: Any) -> None:
    """Refuse a k of one request that its configuration could not have; raises ConfigError."""
    if num_assistant_tokens is None:
        return
    if config.drafting != "lean":
        raise ConfigError(
            f'`num_assistant_tokens={num_assistant_tokens!r}` of one request needs `drafting="lean"`, got '
            f'"{config.drafting}". Set it in the configuration.'
        )
    replace(config, num_assistant_tokens=num_assistant_tokens)


def check_inputs(inputs: Any, kwargs: dict[str, Any]) -> None:
    """Refuse several prompts at once, and prompts of embeddings; raises UnsupportedGenerationError."""
    if kwargs.get("inputs_embeds") is not None:
        raise UnsupportedGenerationError(
            "`inputs_embeds` cannot be used here: the draft reads token ids. Pass `input_ids` instead."
        )
    if kwargs.get("encoder_outputs") is not None:
        raise UnsupportedGenerationError(
            "`encoder_outputs` cannot be used here: the draft reads the source with an encoder of its own. Pass "
            "`input_ids` instead."
        )
    for name, value in (("inputs", inputs), ("input_ids", kwargs.get("input_ids"))):
        shape = getattr(value, "shape", None)
        if value is not None and (shape is None or len(shape) != 2):
            raise UnsupportedGenerationError(
                f"`{name}` must be a tensor of shape (1, prompt tokens), got "
                f"{type(value).__name__ if shape is None else tuple(shape)}. For text, call the tokenizer with "
                "`return_tensors='pt'` first."
            )
        if shape is not None and shape[0] != 1:
            raise UnsupportedGenerationError(
                f"`{name}` holds {shape[0]} prompts: assisted generation serves one at a time. Call `generate` once "
                "per prompt."
            )
