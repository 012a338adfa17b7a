"""
Decide how a request is answered: it is refused, answered by the target alone, or decoded with candidates.

Speculation is exact if a forward over several tokens equals single-token forwards. Known causes of differences are
read from the configuration and the adapters at each request. Others are found by a probe, once for each model and kind
of request: the target decodes a few tokens alone, then verifies right and wrong candidates, and both must produce the
same logits. Another probe shows whether the rows of a batch can continue independently.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.stopping_criteria import MaxLengthCriteria

from osd_hf.config import OnlineConfig
from osd_hf.decoding.forward import (
    LOOP_ARGUMENTS,
    MASKED_ATTENTION,
    STATE_KINDS,
    Ragged,
    TargetForward,
    layers_with_state,
    read_padded,
)
from osd_hf.errors import UnsupportedGenerationError, first_line
from osd_hf.logits_processors import ReplayedProcessor
from osd_hf.models import (
    FULL,
    SLIDING,
    config_value,
    evaluating,
    has_soft_prompt,
    num_positions,
    unwrap,
    vocab_size_of,
)
from osd_hf.utils.context import neutral_context

logger = logging.getLogger(__name__)

# Caches from which tokens can be removed. "hybrid" is a dynamic cache in old generation configs, such as Gemma's.
CROPPED_CACHES = (None, "dynamic", "dynamic_full", "offloaded", "hybrid")
# Fields of a generation config that are served, or do nothing to an assisted answer.
SERVED = frozenset({
    "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "cache_config", "compile_config", "continuous_batching_config", "decoder_start_token_id", "disable_compile",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "eos_token_id", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "is_assistant", "length_penalty", "low_memory", "max_cache_len", "max_length",
    "max_matching_ngram_size", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups",
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "pad_token_id",
    "prefill_chunk_size", "remove_invalid_values", "renormalize_logits", "repetition_penalty",
    "return_dict_in_generate", "sequence_bias", "stop_strings", "suppress_tokens", "target_lookbehind", "temperature",
    "token_healing", "top_h", "top_k", "top_p", "transformers_version", "typical_p", "watermarking_config",
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
    (
        "use_mtp",
        (None, False),
        "transformers drafts with the target's built-in layers, and nothing learns. An "
        "`OnlineAssistant(target)` lets them learn",
    ),
    ("speculation_type", (None,), "no draft of this kind can learn. `capture_traces` counts its tokens"),
    ("penalty_alpha", (None, 0, 0.0), "contrastive search verifies no draft"),
    ("dola_layers", (None,), "DoLa verifies no draft"),
    ("constraints", (None,), "constrained beams verify no draft"),
    ("force_words_ids", (None,), "constrained beams verify no draft"),
)
# Those of candidates that transformers makes, which are counted where nothing is served.
WATCHED = ("use_mtp", "speculation_type")
# Fields under which the target answers without speculation: name, values under which it does nothing, reason.
UNDRAFTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("guidance_scale", (None, 1, 1.0), "guidance keeps a state that target and draft would share"),
    ("use_cache", (True,), "drafts need the key-value cache"),
    ("cache_implementation", CROPPED_CACHES, "tokens cannot be taken back from such a cache"),
)
# Arguments of `OnlineAssistant.generate` that are refused: name, reason and what to do.
REFUSED_ARGUMENTS = (
    ("assistant_model", "`assistant.generate` brings its own draft. Leave it out, or call `target.generate` inside "
     "`with assistant.attached():`"),
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
_KNOWN = SERVED | {name for name, _, _ in (*REFUSED, *UNDRAFTED)}
# Arguments of the assisted loop that the plain one does not know.
ASSISTED_ONLY = ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer")
# Arguments of the loop that any request for text may have.
COMMON_ARGUMENTS = {
    *LOOP_ARGUMENTS, "attention_mask", "decoder_attention_mask", "position_ids", "cache_position", "past_key_values",
    "use_cache", "logits_to_keep", "encoder_outputs",
}  # fmt: skip
SOFT_PROMPT = "PEFT puts a soft prompt before the tokens (prompt, prefix, or P-tuning)"

_logged: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # messages by model


# --- settings and inputs --------------------------------------------------------------------------------------------


def check_generation(*sources: Any, but: Sequence[str] = ()) -> None:
    """Raise UnsupportedGenerationError for modes of `generate` that are lossy, or have no draft to teach, except
    fields in `but`. `sources` are those of [`setting`]."""
    given = functools.partial(setting, sources)
    for name, harmless, reason in REFUSED:
        value = given(name)
        if name not in but and not any(value is ok or value == ok for ok in harmless):
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
    fields, defaults = vars(GenerationConfig()), GenerationConfig._get_default_generation_params()
    for name in fields.keys() - _KNOWN:  # of a newer transformers
        is_set = getattr(config, name, None) not in (None, fields[name], defaults.get(name))
        if is_set and not name.startswith("_"):
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


def needed_tokenizer(tokenizer: Any, *sources: Any) -> dict[str, Any]:
    """Return the argument `tokenizer` of `generate` if a setting needs one; raises UnsupportedGenerationError if there
    is none. The keywords' own comes first."""
    name = next((name for name in _NEEDS_TOKENIZER if setting(sources, name) not in (None, False)), None)
    if name is None:
        return {}
    given = sources[0].get("tokenizer")
    tokenizer = tokenizer if given is None else given
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


def check_request(
    target: Any, config: OnlineConfig, inputs: Any, kwargs: dict[str, Any], num_assistant_tokens: Any
) -> None:
    """Refuse what an assistant's `generate` cannot be called with, before it does anything: arguments, settings,
    prompts that are no tensors or token ids of a wrong shape, and a number of assistant tokens that `config` could not
    have. Raises UnsupportedGenerationError or ConfigError."""
    for name, reason in REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedGenerationError(f"`{name}` cannot be used here: {reason}.")
    is_zero = type(num_assistant_tokens) is int and num_assistant_tokens == 0
    if num_assistant_tokens is not None and not is_zero:
        replace(config, num_assistant_tokens=num_assistant_tokens)  # checks the value
    main = target.main_input_name
    for name, value in {"inputs": inputs, **{name: kwargs.get(name) for name in (*_TENSORS, main)}}.items():
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


# --- where several tokens are verified exactly -----------------------------------------------------------------------

PROBE_CANDIDATES = 5  # of a round, of which the last one is wrong
PROBE_TOKENS = 7  # new tokens of a probe: two rounds, of which the first rejects a candidate
PROBE_PROMPT_TOKENS = 16  # of the request's own prompt
# Sequence lengths beyond these are not probed, as reading them takes too long on a CPU: the first is for lengths at
# which models of transformers are known to be exact, the second for others, beyond which there is no speculation.
MAX_PROBED_LENGTH, MAX_UNKNOWN_LENGTH = 128, 600
BATCH_PROBE = (12, 3, 3)  # tokens of the two rows of the probe, and those after them
TRAINING_ATTRIBUTES = ("gradient_checkpointing", "layerdrop")  # of modules: no cache, or layers dropped at random
WITHOUT_CACHE = "it trains with gradient checkpointing or without some layers"
# Relative difference of logits, root mean square, that rounding may cause. In half precision a router may send a token
# to another expert, so that single positions differ by more: for experts the median over the positions is compared.
MAX_DIFFERENCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.06}
MAX_TF32_DIFFERENCE, MAX_ROUGH_DIFFERENCE = 0.01, 0.1
# Settings of a configuration that are lengths at which a model's behavior may change: positions; windows, with the
# function by which models of transformers mask them; and others, by their names. A window that is left to the cache
# shows more keys to a call of several tokens than to single ones.
POSITION_FIELDS = ("original_max_position_embeddings", "max_position_embeddings", "max_target_positions")
WINDOW_MASKS = {
    "sliding_window": "create_sliding_window_causal_mask", "attention_chunk_size": "create_chunked_causal_mask",
}  # fmt: skip
OTHER_LENGTH = re.compile(r"window(_size)?$|_chunk_size$|^chunk_size$")


@dataclass(frozen=True)
class Limits:
    """State how many candidates the forwards of a target may verify with exact results."""

    reason: str = ""  # for the log
    max_tokens: float = math.inf  # of one forward, including the last known token; 1 means no speculation
    max_length: float = math.inf  # of the sequence, up to which forwards may cover several tokens
    min_prompt: float = math.inf  # tokens; requests with a longer prompt are exact at every length
    with_prompt: bool = True  # whether the forward that reads the prompt may verify candidates
    last_token: int | None = None  # a token after which no candidate may follow in the same forward

    def max_candidates(self, length: int, prompt_tokens: int) -> float:
        """Return how many candidates may follow a sequence of this length with `prompt_tokens` in its prompt."""
        if length == prompt_tokens and not self.with_prompt:
            return 0
        new_tokens = length if length == prompt_tokens else 1
        found = self.max_tokens - new_tokens
        if prompt_tokens <= self.min_prompt:
            found = min(found, self.max_length - length)
        return max(found, 0)

    def allow_any(self, prompt_tokens: int, max_length: int) -> bool:
        """Whether a request whose forwards read at most `max_length` tokens has no limits behind its prompt. The last
        token of an answer is not read."""
        is_short = max_length <= self.max_length or prompt_tokens > self.min_prompt
        return is_short and self.max_tokens == math.inf and self.last_token is None

    def forbid(self, prompt_tokens: int) -> bool:
        """Whether a request can have no candidates at all."""
        return self.max_tokens < 2 or (prompt_tokens <= self.min_prompt and prompt_tokens >= self.max_length)

    def combined(self, other: Limits) -> Limits:
        """Return the stricter of both in every respect. Where one forbids speculation, its reason is enough."""
        decisive = [limits for limits in (self, other) if limits.max_tokens < 2] or [self, other]
        # Beyond the longer of these prompts, neither maximum length applies.
        prompts = [limits.min_prompt for limits in (self, other) if limits.max_length < math.inf]
        return Limits(
            "; ".join(limits.reason for limits in decisive if limits.reason),
            min(self.max_tokens, other.max_tokens),
            min(self.max_length, other.max_length),
            max(prompts, default=math.inf),
            self.with_prompt and other.with_prompt,
            other.last_token if self.last_token is None else self.last_token,
        )


UNLIMITED = Limits()


# --- known causes ---------------------------------------------------------------------------------------------------


def known_limits(model: PreTrainedModel) -> Limits:
    """Return the limits of a target by the known causes alone."""
    return functools.reduce(Limits.combined, _known_causes(model), UNLIMITED)


def _known_causes(model: PreTrainedModel) -> Iterator[Limits]:
    """Yield the limits by each known reason why a forward over several tokens may differ from single-token forwards.
    docs/models.md describes them."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict) and "rope_type" in kind]
    for kind in ropes:  # one for each kind of layer
        is_dynamic, name = "dynamic" in str(kind["rope_type"]), "original_max_position_embeddings"
        if not is_dynamic and kind["rope_type"] != "longrope":
            continue
        longest = int(config.max_position_embeddings)
        lengths = [int(length) for length in (kind.get(name), config_value(config, name)) if length] or [longest]
        if is_dynamic:
            # Calls that end before the length also reset what a longer request has left behind.
            first = min(longest, *lengths)
            reason = f"its rotary frequencies follow the longest position of a call beyond {first} "
            reason += "tokens (dynamic RoPE)"
            yield Limits(reason, max_length=first - 1)
        else:
            reason = f"its rotary frequencies are others for sequences beyond {min(lengths)} tokens (longrope)"
            yield Limits(reason, max_length=min(lengths), min_prompt=max(lengths))
    positions = None if ropes or config_value(config, "alibi") else num_positions(config)
    if positions is not None:
        yield Limits(f"it has {positions} positions", max_length=positions)
    capacity, share = (getattr(config, name, None) for name in ("expert_capacity", "moe_eval_capacity_token_fraction"))
    if share is not None and share < 1:  # of the tokens of a call, in place of a number
        yield Limits("its experts take a limited share of the tokens of a call", max_tokens=1)
    elif share is None and capacity is not None:
        yield Limits(f"each of its experts takes at most {capacity} tokens of a call", max_tokens=int(capacity))
    if (length := getattr(config, "keep_window_size", None)) is not None:
        reason = f"its attention keeps the {length} best keys, and ties depend on the call"
        yield Limits(reason, max_length=int(length))
    skips_padding, has_own_cache = _code_of(model)
    pad = config_value(config, "pad_token_id") if skips_padding else None
    if pad is not None:
        yield Limits("its positions do not count padding tokens, which an answer may hold", last_token=int(pad))
    has_states = bool(layers_with_state(model))
    if has_states or getattr(model, "_is_stateful", False):
        if not has_states or "past_key_values" not in inspect.signature(model.forward).parameters:
            yield Limits("its recurrent states are not in a cache from which they can be taken back", max_tokens=1)
        yield Limits(with_prompt=False)  # states are saved behind the prompt
        if any((getattr(m, "time_step_limit", None) or (0.0,))[0] for m in model.modules()):
            yield Limits("its recurrent layers limit time steps only in forwards over several tokens", max_tokens=1)
    if has_own_cache:
        yield Limits("it keeps keys in a cache of its own", max_tokens=1)
    if offsets := [offset for offset in adapter_arguments(model).get("alora_offsets", ()) if offset is not None]:
        # PEFT applies the adapter to the last tokens of every call.
        reason = f"its adapter (aLoRA) is applied to the last {min(offsets)} tokens of a call"
        yield Limits(reason, max_tokens=min(offsets), with_prompt=False)
    if has_soft_prompt(getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)):
        yield Limits(SOFT_PROMPT, max_tokens=1)
    if _trains_without_cache(model):
        yield Limits(WITHOUT_CACHE, max_tokens=1)


def _module_of(layer: Any) -> Any:
    """Return the Python module in which the class of a layer is defined."""
    return sys.modules.get(type(layer).__module__)


_code_by_model: WeakKeyDictionary[Any, tuple[bool, bool]] = WeakKeyDictionary()


def _code_of(model: PreTrainedModel) -> tuple[bool, bool]:
    """Return whether the modules in which the classes of a model's layers are defined have positions that do not count
    padding tokens, and whether they have classes of caches or of their layers."""
    if model not in _code_by_model:
        layers = list(model.modules())
        modules, name = set(map(_module_of, layers)) - {None}, "create_position_ids_from_input_ids"
        made = (value for module in modules for value in vars(module).values() if isinstance(value, type))
        _code_by_model[model] = (
            any(hasattr(x, name) for x in (*layers, *modules)),
            any(issubclass(c, Cache | CacheLayerMixin) and sys.modules.get(c.__module__) in modules for c in made),
        )
    return _code_by_model[model]


ADAPTER_ARGUMENTS = {"adapter_names", "alora_offsets"}


def _adapter_layer(model: PreTrainedModel) -> Any:
    """Return the first layer of the model that has a PEFT adapter; `None` if there is none."""
    if not (hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)):  # set by both libraries
        return None
    return next((module for module in model.modules() if hasattr(module, "adapter_layer_names")), None)


def adapter_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """Return what PEFT passes to the layers of adapters in this call of `generate`, such as an adapter for each row of
    the batch (`adapter_names`, aLoRA)."""
    hooks = getattr(_adapter_layer(model), "_forward_pre_hooks", {})
    given = {name: value for hook in hooks.values() for name, value in getattr(hook, "keywords", {}).items()}
    return {name: value for name, value in given.items() if name in ADAPTER_ARGUMENTS and value is not None}


def drop_adapter_hooks(model: PreTrainedModel) -> None:
    """Remove what PEFT leaves on its layers when a call of `generate` fails, and what would make every later call
    fail."""
    for module in model.modules() if _adapter_layer(model) is not None else ():
        for key, hook in list(module._forward_pre_hooks.items()):
            if ADAPTER_ARGUMENTS & getattr(hook, "keywords", {}).keys():
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


# --- all causes -----------------------------------------------------------------------------------------------------


# What probes found, by model: limits by the kind of request.
_probed: WeakKeyDictionary[Any, dict[Any, Limits]] = WeakKeyDictionary()


def limits_of(model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Limits:
    """Return the limits of a request, from the arguments of the loop. The first request of its kind is preceded by a
    probe of some ten forwards with its first row."""
    prompt_tokens = input_ids.shape[1]
    limits = known_limits(model)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == input_ids.shape:  # padding takes no position
        limits = replace(limits, min_prompt=limits.min_prompt + int((mask == 0).sum(-1).max()))
    if foreign_arguments(kwargs):
        # The forward that reads the prompt replaces tokens by features, and would count candidates among them.
        limits = replace(limits, with_prompt=False)
    if not limits.forbid(prompt_tokens) and limits.max_tokens > PROBE_CANDIDATES and not kwargs.get("synced_gpus"):
        # What a probe's result depends on: how the model computes, and which arguments its forward gets.
        kind = (
            model.config.get_text_config(decoder=True)._attn_implementation, model.dtype, model.device, model.training,
            torch.is_autocast_enabled(input_ids.device.type), frozenset(given_arguments(kwargs)),
            tuple(getattr(_adapter_layer(model), "active_adapters", ())),
        )  # fmt: skip
        known = _probed.setdefault(model, {})
        found, is_final = (known[kind], True) if kind in known else _probe(model, input_ids, kwargs, limits)
        if is_final:  # a probe that fails says nothing about the next request: it may be for want of memory
            known[kind] = found
        limits = limits.combined(found)
    return limits


# --- the probe ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _probe(
    model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict[str, Any], limits: Limits
) -> tuple[Limits, bool]:
    """Compare assisted with plain decoding at each length where the model may change. Return the limits, and whether
    they hold for later requests of the kind."""
    is_text, is_tried = not (model.config.is_encoder_decoder or foreign_arguments(kwargs)), False
    try:
        with evaluating(model):  # with dropout, no two forwards are equal
            for prompt, arguments in _probe_prompts(model, input_ids, kwargs, limits, is_text=is_text):
                is_tried = True
                why = _difference(model, prompt, arguments, with_prompt=limits.with_prompt)
                if why is not None:
                    where = f"tried with a prompt of {prompt.shape[1]} tokens"
                    return Limits(f"a forward over several tokens is not exact: {why} ({where})", max_tokens=1), True
    except Exception as error:  # the target alone has failed
        logger.debug("A probe failed.", exc_info=True)
        return Limits(f"a short trial failed: {first_line(error)}", max_tokens=1), False
    limits = UNLIMITED
    for name, (length, is_known) in _changing_lengths(model).items():  # those that no probe reaches
        if not (is_known or (is_text and length + 2 * PROBE_TOKENS <= MAX_UNKNOWN_LENGTH)):
            reason = f"it is not known to be exact beyond {length} tokens (`{name}` in its configuration)"
            limits = limits.combined(Limits(reason, max_length=length))
    return limits, is_tried


def _changing_lengths(model: PreTrainedModel) -> dict[str, tuple[int, bool]]:
    """Return the lengths, in tokens, at which a model may change, by the name that its configuration gives them, and
    for each whether the model is known to be exact there."""
    config, found = model.config.get_text_config(decoder=True), dict[str, tuple[int, bool]]()
    modules = set(map(_module_of, model.modules()))
    for name in (*POSITION_FIELDS, *WINDOW_MASKS, *filter(OTHER_LENGTH.search, vars(config))):
        length = config_value(config, name)
        if type(length) is int and length > 0 and name not in found:
            is_masked = name in WINDOW_MASKS and any(hasattr(module, WINDOW_MASKS[name]) for module in modules)
            is_masked = is_masked and not model.config.is_encoder_decoder
            found[name] = length, name in POSITION_FIELDS or is_masked
    return found


def _probe_prompts(
    model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict[str, Any], limits: Limits, *, is_text: bool
) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Yield prompts, `(1, tokens)`, and the arguments of the loop for each: of a request for text the end of its own
    prompt and, at the lengths where the model may change, prompts of its tokens in another order; of others the whole
    request."""
    arguments = {name: value for name, value in kwargs.items() if value is not None}
    if not is_text:
        cache = arguments.get("past_key_values")
        if cache is None or int(cache.get_seq_length()) == 0:
            yield input_ids[:1].long(), of_row(arguments, 0, len(input_ids))
        return
    row, mask = input_ids[0], arguments.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == input_ids.shape:
        row = row[mask[0].bool()]
    row = row[-PROBE_PROMPT_TOKENS:].long()
    if not len(row):
        return
    prompts = [row[None]]
    positions = num_positions(model.config) or math.inf
    for changing, is_known in _changing_lengths(model).values():
        # One probe crosses the length, the other one begins behind it.
        longest = min(positions, limits.max_length, MAX_PROBED_LENGTH if is_known else MAX_UNKNOWN_LENGTH)
        for length in (changing - PROBE_TOKENS // 2, changing + PROBE_TOKENS // 2):
            if 0 < length <= longest - PROBE_TOKENS:
                places = torch.arange(length, device=row.device)
                prompts.append(row[(places * places * 7 + places) % len(row)][None])
    for prompt in prompts:
        given, count = given_arguments(kwargs), prompt.shape[1]
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[1] == input_ids.shape[1]:
                # Numbers for each token are those of the last tokens, repeated.
                given[name] = value[:1].repeat(1, -(-count // value.shape[1]))[:, -count:]
        yield prompt, text_arguments(model, torch.ones_like(prompt), arguments["generation_config"]) | given


def text_arguments(model: PreTrainedModel, mask: torch.Tensor, generation_config: Any) -> dict[str, Any]:
    """Return what `generate` passes to its loop for prompts with this attention mask, int64, `(rows, tokens)`."""
    config = model.config.get_text_config(decoder=True)
    given = {
        "attention_mask": None if bool(mask.all()) else mask,
        "use_cache": True,
        "past_key_values": DynamicCache(config=config),
        "generation_config": generation_config,
    }
    if "position_ids" in inspect.signature(model.forward).parameters:
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return given


def _difference(
    model: PreTrainedModel, prompt: torch.Tensor, arguments: dict[str, Any], *, with_prompt: bool
) -> str | None:
    """Return how forwards over candidates, right ones and a wrong one, differ from plain decoding behind a prompt;
    `None` if they do not."""
    end = prompt.shape[1] + PROBE_TOKENS
    alone = plain_answer(model, prompt, arguments, PROBE_TOKENS)
    answer, expected, found = alone.sequences[:, prompt.shape[1] :], alone.logits, list[torch.Tensor]()
    try:
        target = TargetForward(model, prompt, _probe_settings(arguments, end))
        while len(found) < len(expected):
            known = len(found)
            candidates = answer[:, known : min(known + PROBE_CANDIDATES, answer.shape[1] - 1)].clone()
            candidates[:, PROBE_CANDIDATES - 1 :] += 1
            candidates %= vocab_size_of(model)
            if not known and not with_prompt:
                candidates = candidates[:, :0]
            right = min(candidates.shape[1], PROBE_CANDIDATES - 1)
            logits = target.verify(candidates, candidates > -1)
            found += logits[:, : right + 1].to(torch.float32).unbind(1)
            target.keep(answer[:, known : known + right + 1].tolist())
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - of models of any kind
        return f"verifying candidates fails: {first_line(error)}"
    return difference(model, found, expected)


def plain_answer(model: PreTrainedModel, prompt: torch.Tensor, arguments: dict[str, Any], new_tokens: int) -> Any:
    """Let the target decode `new_tokens` tokens greedily by its own loop; return their `sequences` and `logits`."""
    return model._sample(prompt, **_probe_settings(arguments, prompt.shape[1] + new_tokens))


def _probe_settings(arguments: dict[str, Any], length: int) -> dict[str, Any]:
    """Return the loop's arguments for a greedy answer that ends at this length."""
    config = copy.copy(arguments["generation_config"])
    config.max_length, config.do_sample = length, False
    config._eos_token_tensor = config._pad_token_tensor = None
    config.return_dict_in_generate = config.output_logits = True
    config.output_scores = config.output_attentions = config.output_hidden_states = False
    kept = {name: value for name, value in arguments.items() if name not in ASSISTED_ONLY and name != "streamer"}
    return kept | {
        "past_key_values": copy.deepcopy(arguments["past_key_values"]),
        "generation_config": config,
        "logits_processor": LogitsProcessorList(),
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(length)]),
    }


def difference(model: PreTrainedModel, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> str | None:
    """Return by how much logits of the same positions, each `(rows, vocab)`, differ; `None` if rounding in the model's
    dtype explains it."""
    found = list[float]()
    for a, b in zip(ours, theirs, strict=True):
        where = b.isfinite()
        expected = b[where].double()
        if len(expected):
            spread = (expected - expected.mean()).square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
            found.append(float((a[where].double() - expected).square().mean().sqrt() / spread))
    if not all(map(math.isfinite, found)):
        return "its logits are not finite"
    # accelerate's autocast may be around the forward of a trained model; quantized layers may round activations.
    device_type = theirs[0].device.type
    is_cast = torch.is_autocast_enabled(device_type) or "_original_forward" in vars(model)
    is_tf32 = device_type == "cuda" and torch.backends.cuda.matmul.allow_tf32 and model.dtype == torch.float32
    limit = MAX_TF32_DIFFERENCE if is_tf32 else MAX_DIFFERENCE.get(model.dtype, MAX_ROUGH_DIFFERENCE)
    limit = MAX_ROUGH_DIFFERENCE if is_cast or getattr(model, "is_quantized", False) else limit
    has_experts = any("expert" in name for name in vars(model.config.get_text_config(decoder=True)))
    is_rough = limit >= MAX_DIFFERENCE[torch.float16] and has_experts
    largest = sorted(found)[len(found) // 2] if found and is_rough else max(found, default=0.0)
    return None if largest <= limit else f"its logits differ by {largest:.1%}"


# --- rows that continue independently --------------------------------------------------------------------------------

_batch_hindrances: WeakKeyDictionary[Any, tuple[object, str | None]] = WeakKeyDictionary()


def batch_hindrance(model: PreTrainedModel) -> str | None:
    """Return why rows of a batch cannot go on independently in this model; `None` if they can. The first call probes
    the model with two short rows, which must get the logits that they get alone."""
    config = vars(model.config.get_text_config(decoder=True))  # kind of attention, windows, positions
    trains = _trains_without_cache(model)
    state = trains, model.dtype, model.device, repr(config)
    known_state, why = _batch_hindrances.get(model, (None, None))
    if known_state != state:
        try:
            why = WITHOUT_CACHE if trains else unsupported(model, allows_states=True)
            with evaluating(model):  # with dropout, no two forwards are equal
                why = why or ("its logits depend on where the tokens of a row are" if _rows_differ(model) else None)
        except Exception as error:  # noqa: BLE001 - models of any kind; tried again for the next batch
            return f"its forward fails: {first_line(error)}"
        _batch_hindrances[model] = state, why
    return why


def _trains_without_cache(model: PreTrainedModel) -> bool:
    return model.training and any(getattr(m, name, 0) for m in model.modules() for name in TRAINING_ATTRIBUTES)


def unsupported(model: PreTrainedModel, *, allows_states: bool = False) -> str | None:
    """Return why, by its configuration, rows of a model cannot go on independently; `None` if they can. Only eager
    forwards allow recurrent states."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "an encoder-decoder's positions are those of the batch, not of the row"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no positions"
    if (attention := getattr(config, "_attn_implementation", None)) not in MASKED_ATTENTION:
        return f"its attention, {attention}, takes no mask for each row"
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    is_known = kinds <= {FULL, SLIDING, "global"} and getattr(config, "attention_chunk_size", None) is None
    # A layer of the kind `hybrid_sliding` has a window, for which there is no mask.
    has_known_states = allows_states and kinds <= {FULL, SLIDING, *STATE_KINDS} - {"hybrid_sliding"}
    if not (has_known_states or (is_known and layers <= {DynamicLayer, DynamicSlidingWindowLayer})):
        return "it has layers other than full attention and sliding windows"
    return None


@neutral_context()
@torch.no_grad()  # in inference mode, what a model caches in its first forward could not be trained with
def _rows_differ(model: PreTrainedModel) -> bool:
    """Whether two rows of different lengths get other logits than by the model's own loop, as a batch or alone."""
    long, short, count = BATCH_PROBE
    device = model.device if model.device.type != "meta" else torch.device("cpu")
    ids = torch.arange(1, long + 1, device=device) ** 2 * 7 % vocab_size_of(model)
    prompts = torch.stack([ids, torch.cat([ids[: long - short], ids.flip(0)[:short]])])
    mask = torch.ones_like(prompts)
    mask[1, : long - short] = 0
    batch = plain_answer(model, prompts, text_arguments(model, mask, model.generation_config), count + 1)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    read_padded(model, prompts, [0, long - short], cache)
    behind = batch.sequences[:, long : long + count]
    ragged = Ragged(model, 2, long + count)
    ragged.load(cache, [0, long - short])
    found_batch = ragged.feed(behind, [long, short]).float()
    alone = model(input_ids=torch.cat([prompts[1:, -short:], behind[1:]], 1)).logits[:, -count:].float()
    pairs = ((list(found_batch.unbind(1)), batch.logits[1:]), (list(found_batch[1]), list(alone[0])))
    return any(difference(model, found, expected) is not None for found, expected in pairs)
