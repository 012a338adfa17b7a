"""Check the settings and inputs of a request: refused, answered by the target alone, or decoded with a draft."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
)

from osd_hf.config import OnlineConfig
from osd_hf.errors import UnsupportedGenerationError, first_line
from osd_hf.logits_processors import ReplayedProcessor
from osd_hf.models import has_soft_prompt, unwrap

logger = logging.getLogger(__name__)

# Caches from which tokens can be removed. "hybrid" is a dynamic cache in old generation configs, such as Gemma's.
CROPPED_CACHES = (None, "dynamic", "dynamic_full", "offloaded", "hybrid")
# Fields of a generation config that are served, and those that do nothing to an assisted answer.
SERVED = frozenset({
    "assistant_confidence_threshold", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "decoder_start_token_id", "do_sample", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "eos_token_id", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "pad_token_id", "remove_invalid_values",
    "renormalize_logits", "repetition_penalty", "return_dict_in_generate", "sequence_bias", "stop_strings",
    "suppress_tokens", "temperature", "token_healing", "top_h", "top_k", "top_p", "typical_p", "watermarking_config",
})  # fmt: skip
IRRELEVANT = frozenset({
    "assistant_lookbehind", "cache_config", "compile_config", "continuous_batching_config",
    "disable_compile", "diversity_penalty", "early_stopping", "is_assistant", "length_penalty", "low_memory",
    "max_cache_len", "max_matching_ngram_size", "num_beam_groups", "prefill_chunk_size", "target_lookbehind",
    "transformers_version",
})  # fmt: skip
# Logits processors of transformers with results that depend on their arguments only.
STATELESS = frozenset({
    "EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "EpsilonLogitsWarper",
    "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper",
    "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper", "WatermarkLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
})  # fmt: skip
# Fields of a generation config that are refused: name, values under which it does nothing, reason.
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("num_beams", (None, 1), "beams verify no draft; use greedy decoding or sampling"),
    ("num_return_sequences", (None, 1), "a draft serves one answer per prompt; repeat the prompt instead"),
    ("assistant_ensemble_weight", (None,), "it trades the target's distribution for acceptance, so it is lossy"),
    ("prompt_lookup_num_tokens", (None,), "prompt lookup has no draft model that could learn"),
    ("assistant_early_exit", (None,), "early exit drafts with the target itself, there is no draft to teach"),
    ("use_mtp", (None, False), "multi-token prediction drafts with the target's own heads"),
    ("speculation_type", (None,), "block drafting has no ordinary assistant model to teach"),
    ("penalty_alpha", (None, 0, 0.0), "contrastive search verifies no draft"),
    ("dola_layers", (None,), "DoLa verifies no draft"),
    ("constraints", (None,), "constrained beams verify no draft"),
    ("force_words_ids", (None,), "constrained beams verify no draft"),
)
# Fields under which the target answers without speculation: name, values under which it does nothing, reason.
UNDRAFTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("guidance_scale", (None, 1, 1.0), "guidance keeps a state that target and draft would share"),
    ("use_cache", (True,), "drafts need the key-value cache"),
    ("cache_implementation", CROPPED_CACHES, "tokens cannot be taken back from such a cache"),
)
# Arguments of `OnlineAssistant.generate` that are refused: name, reason and what to do.
REFUSED_ARGUMENTS = (
    ("assistant_model", "the assistant brings its own draft. Leave it out, or call `target.generate` inside `with "
     "assistant.attached():`"),
    ("custom_generate", "it replaces assisted decoding, so no draft is used. Leave it out"),
    ("assistant_tokenizer", "the draft has the target's tokenizer. Leave it out"),
)  # fmt: skip
# Arguments under which `target.generate` answers without the assistant: name, reason.
ALONE_ARGUMENTS = (
    ("inputs_embeds", "the draft reads token ids, and `inputs_embeds` was given"),
    ("encoder_outputs", "the draft reads the source with its own encoder, and `encoder_outputs` was given"),
)
# Arguments that must be tensors, with the model's `main_input_name`.
_TENSORS = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
_NEEDS_TOKENIZER = ("stop_strings", "token_healing")
# If another field of a newer transformers is set, the target answers without speculation.
_KNOWN = SERVED | IRRELEVANT | {name for name, _, _ in (*REFUSED, *UNDRAFTED)}
# Arguments of the assisted loop that the plain one does not know.
ASSISTED_ONLY = ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer")
# Arguments of the loop for any request of token ids.
KNOWN_ARGUMENTS = {
    "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "logits_processor",
    "stopping_criteria", "generation_config", "synced_gpus", "streamer", "inputs_tensor", "assistant_model",
    "assistant_tokenizer", "tokenizer",
}  # fmt: skip
# Arguments of the loop that any request for text may have.
COMMON_ARGUMENTS = KNOWN_ARGUMENTS | {"encoder_outputs", "decoder_attention_mask", "cache_position"}
SOFT_PROMPT = "PEFT puts a soft prompt before the tokens (prompt, prefix, or P-tuning)"

_logged: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # messages by model


# --- settings and inputs --------------------------------------------------------------------------------------------


@functools.lru_cache(2)
def _unknown_settings(init: Any) -> dict[str, tuple[Any, ...]]:
    """Return the settings of a newer transformers, and the values under which each does nothing. `init` identifies the
    version."""
    fields, defaults = vars(GenerationConfig()), GenerationConfig._get_default_generation_params()
    unknown = [name for name in fields if name not in _KNOWN and not name.startswith("_")]
    return {name: (None, fields[name], defaults.get(name)) for name in unknown}


def check_generation(*sources: Any) -> None:
    """Raise UnsupportedGenerationError for modes of `generate` that are lossy, or have no draft to teach. `sources`
    are those of [`setting`]."""
    given = functools.partial(setting, sources)
    for name, harmless, reason in REFUSED:
        value = given(name)
        if not any(value is ok or value == ok for ok in harmless):
            raise UnsupportedGenerationError(
                f"`{name}={value!r}` cannot be used here: {reason}. Leave it out, or pass `{name}={harmless[-1]!r}` "
                "where a generation config sets it."
            )
    if given("cache_implementation") == "paged":
        raise UnsupportedGenerationError(
            "`cache_implementation='paged'` cannot be used here: continuous batching takes no draft. Leave it out."
        )


def undrafted(model: PreTrainedModel, config: Any, processors: Iterable[Any]) -> str | None:
    """Return why the target answers a request without a draft; `None` if a draft can help."""
    for name, harmless, reason in UNDRAFTED:
        value = getattr(config, name)
        if not any(value is ok or value == ok for ok in harmless):
            return f"`{name}` is set, and {reason}"
    for name, values in _unknown_settings(GenerationConfig.__init__).items():
        if getattr(config, name, None) not in values:
            return f"`{name}` is set, which this version of osd_hf does not know"
    if isinstance(config.watermarking_config, SynthIDTextWatermarkingConfig):
        return "`watermarking_config` is SynthID's, which keeps state that target and draft would share"
    text = model.config.get_text_config(decoder=True)
    attention = getattr(text, "_attn_implementation", "eager")
    if config.return_dict_in_generate and config.output_attentions:
        if attention != "eager":
            return f"`output_attentions` is set, and {attention} attention returns none"
        if getattr(text, "sliding_window", None):
            return "`output_attentions` is set, and a sliding window has other keys behind candidates"
    if unknown := next((p for p in processors if not is_stateless(p)), None):
        function = asked_function(unknown)
        name = getattr(function, "__name__", type(function).__name__)
        return (
            f"the logits processor `{name}` may keep state between calls, and it would also be called on candidates "
            "that are rejected. If its result depends only on its arguments, set `is_stateless = True` on it, or pass "
            "it as an `osd_hf.ReplayedProcessor`"
        )
    return None


def not_watched(why: str) -> UnsupportedGenerationError:
    """Return the error of a request that cannot be captured, for a reason of [`undrafted`]."""
    return UnsupportedGenerationError(
        f"This request cannot be assisted: {why}. Otherwise leave it out, or call `generate` without "
        "`assistant_model`."
    )


def needed_tokenizer(tokenizer: Any, *sources: Any) -> dict[str, Any]:
    """Return the argument `tokenizer` of `generate` if a setting needs one; raises UnsupportedGenerationError if there
    is none. The keywords' own comes first."""
    keywords = sources[0]
    name = next((name for name in _NEEDS_TOKENIZER if setting(sources, name) not in (None, False)), None)
    if name is None:
        return {}
    if keywords.get("tokenizer") is not None:
        tokenizer = keywords["tokenizer"]
    if tokenizer is None:
        raise UnsupportedGenerationError(
            f"`{name}={setting(sources, name)!r}` needs a tokenizer, and none was found where the models came from. "
            "Pass `tokenizer=`, the target's, here or to `OnlineAssistant`."
        )
    return {"tokenizer": tokenizer}


def answered_alone(target: Any, kwargs: dict[str, Any]) -> str | None:
    """Return why `target.generate` answers a request without any part of the assistant; `None` if it does not."""
    if has_soft_prompt(target):
        return SOFT_PROMPT
    kind: Any = type(unwrap(target))
    if not _decodes_by_itself(kind):
        return "its own `generate` decodes by another model"
    return next((reason for name, reason in ALONE_ARGUMENTS if kwargs.get(name) is not None), None)


@functools.cache
def _decodes_by_itself(kind: Any) -> bool:
    """Whether a class uses `GenerationMixin.generate` of the same object. Some models call `generate` of a part, such
    as the language model behind an image encoder."""
    owner = next(cls for cls in kind.__mro__ if "generate" in vars(cls))
    if owner is GenerationMixin:
        return True
    try:
        return re.search(r"(super\(.*\)|GenerationMixin)\.generate\(", inspect.getsource(owner)) is not None
    except (OSError, TypeError):  # no source file
        return True


def _check_inputs(target: Any, inputs: Any, kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedGenerationError for prompts that are no tensors, or token ids of a wrong shape."""
    main = target.main_input_name
    given = {"inputs": inputs, **{name: kwargs.get(name) for name in (*_TENSORS, main)}}
    for name, value in given.items():
        if value is None or isinstance(value, Mapping):
            continue
        if not isinstance(value, torch.Tensor):
            raise UnsupportedGenerationError(
                f"`{name}` must be a tensor, got {type(value).__name__}. For text, call the tokenizer with "
                f"`return_tensors='pt'`; for numbers, pass `torch.as_tensor({name})`."
            )
        names = kwargs.get("adapter_names")
        if names is not None and name in ("inputs", "input_ids", main) and len(names) != len(value):
            raise UnsupportedGenerationError(
                f"`adapter_names` must name an adapter for each of the {len(value)} prompts, got {len(names)} names. "
                'Use "__base__" for the model without an adapter.'
            )
        is_prompt = name == "input_ids" or (name == "inputs" and main == "input_ids")
        if is_prompt and (value.ndim != 2 or not len(value) or value.is_floating_point()):
            raise UnsupportedGenerationError(
                f"`{name}` must be token ids of shape (prompts, prompt tokens), got {value.dtype} of shape "
                f"{tuple(value.shape)}. One prompt has the shape (1, tokens); embeddings go to `inputs_embeds`."
            )


def check_request(
    target: Any, config: OnlineConfig, inputs: Any, kwargs: dict[str, Any], num_assistant_tokens: Any
) -> None:
    """Refuse what an assistant's `generate` cannot be called with, before it does anything: arguments, settings, the
    shape of the prompt, and a number of assistant tokens that `config` could not have. Raises
    UnsupportedGenerationError or ConfigError."""
    for name, reason in REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedGenerationError(f"`{name}` cannot be used here: {reason}.")
    is_zero = type(num_assistant_tokens) is int and num_assistant_tokens == 0
    if num_assistant_tokens is not None and not is_zero:
        replace(config, num_assistant_tokens=num_assistant_tokens)  # checks the value
    _check_inputs(target, inputs, kwargs)
    check_generation(kwargs, kwargs.get("generation_config"), target.generation_config)


def setting(sources: tuple[Any, ...], name: str) -> Any:
    """Return a setting as `generate` resolves it: from the first of the sources, keywords (a dict) or generation
    configs, that has it. `None` counts as a keyword only."""
    for source in sources:
        if isinstance(source, dict):
            if name in source:
                return source[name]
        elif (value := getattr(source, name, None)) is not None:
            return value
    return None


def is_stateless(thing: Any) -> bool:
    """Whether the result of a logits processor depends only on its arguments: it is one of transformers' own, says so
    itself, or is replayed."""
    if type(thing) is ReplayedProcessor or getattr(asked_function(thing), "is_stateless", None) is True:
        return True
    return type(thing).__module__.split(".")[0] == "transformers" and type(thing).__name__ in STATELESS


def asked_function(thing: Any) -> Any:
    """Return the function of `prefix_allowed_tokens_fn` that a processor calls; other processors themselves."""
    return thing._prefix_allowed_tokens_fn if type(thing) is PrefixConstrainedLogitsProcessor else thing


# --- arguments of the loop -------------------------------------------------------------------------------------------


def given_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the loop's arguments that bring more than token ids, such as the features of images. `generate` passes
    empty ones to multimodal models that are asked about text."""
    return {
        name: value
        for name, value in kwargs.items()
        if name not in COMMON_ARGUMENTS and value is not None and not (isinstance(value, dict | list) and not value)
    }


def foreign_arguments(kwargs: dict[str, Any]) -> list[str]:
    """Return the names of the loop's arguments that make the prompt consist of more than tokens: neither switches nor
    numbers for each token."""
    return [
        name
        for name, value in given_arguments(kwargs).items()
        if not isinstance(value, bool | int | str)
        and not (isinstance(value, torch.Tensor) and not value.is_floating_point())
    ]


def of_row(arguments: dict[str, Any], row: int, rows: int) -> dict[str, Any]:
    """Return the arguments of the loop as they would be for one row of a batch."""
    is_of_rows = {
        n for n, value in arguments.items() if isinstance(value, torch.Tensor) and value.shape[:1] == (rows,)
    }
    return {name: value[row : row + 1] if name in is_of_rows else value for name, value in arguments.items()}


# --- messages --------------------------------------------------------------------------------------------------------


def log_once(model: PreTrainedModel, message: str) -> None:
    """Log a message about a model, unless it was logged for this model before."""
    logged = _logged.setdefault(model, set())
    if message not in logged:
        logged.add(message)
        logger.warning("%s", message)


def log_failed_draft(draft: Any, error: Exception) -> None:
    """Log that a draft has failed, once for each draft and cause."""
    log_once(draft, f"The draft failed; the answer continues without it: {first_line(error)}.")
