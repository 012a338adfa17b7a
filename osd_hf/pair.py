"""A target, a draft and their tokenizer: how they are loaded and unwrapped, and whether they fit together."""

from __future__ import annotations

import copy
import logging
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
)

from osd_hf.bundled import load_bundled
from osd_hf.errors import ConfigError, UnsupportedModelError, VocabularyMismatchError, without_credentials

__all__ = [
    "NO_WARPING",
    "Pair",
    "align_vocab",
    "check_draft",
    "check_pair",
    "check_tokenizers",
    "common_tokenizer",
    "eos_ids",
    "find_tokenizer",
    "first_line",
    "is_peft",
    "load_config",
    "load_eos_ids",
    "load_model",
    "load_pair",
    "load_tokenizer",
    "merged",
    "num_cached",
    "of_one_size",
    "placed",
    "prompt_ids",
    "prompt_room",
    "request_settings",
    "sampling_settings",
    "ties_embeddings",
    "uncompiled",
    "untie",
    "unwrap",
    "without_padding",
]

MOST_WRAPPERS = 16  # one inside the other; what makes up every attribute that it is asked for has no end


def uncompiled(model: Any) -> Any:
    """The model that `torch.compile` has wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def is_peft(model: Any) -> bool:
    """Whether it is a `PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def unwrap(model: Any) -> Any:
    """The transformers model whose `generate` runs in the end: inside a compiled model, inside a `PeftModel`."""
    for _ in range(MOST_WRAPPERS):
        inner = uncompiled(model)
        inner = inner.get_base_model() if is_peft(inner) else inner
        if inner is model:
            break
        model = inner
    return model


def merged(model: Any) -> Any:
    """A copy of a `PeftModel` as an ordinary model, its adapter merged into the weights; the model itself where there
    is none, or one that cannot be merged (soft prompts)."""
    if not is_peft(model) or not hasattr(model.base_model, "merge_and_unload"):
        return model
    return copy.deepcopy(model).merge_and_unload()


def ties_embeddings(model: Any) -> bool:
    """Whether input embeddings and output head are one tensor."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def untie(model: Any) -> None:
    """Give a model with tied embeddings an output head of its own, in place. An adapter on one of the two, merged into
    a tensor that is both, would change the other as well."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def load_config(source: str) -> Any:
    """The configuration of a model; raises UnsupportedModelError where there is none."""
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedModelError(f"The model {source!r} cannot be loaded: {first_line(error)}.") from error


def load_model(source: str, *, dtype: str = "auto", device: str | None = None) -> Any:
    """
    A model in evaluation mode.

    Args:
        source (`str`):
            Hub id or folder.
        dtype (`str`, *optional*, defaults to `"auto"`):
            `"auto"` is the checkpoint's own.
        device (`str`, *optional*):
            CUDA where there is one by default.

    Raises:
        UnsupportedModelError: it cannot be loaded.
    """
    auto = AutoModelForSeq2SeqLM if load_config(source).is_encoder_decoder else AutoModelForCausalLM
    try:
        model = auto.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedModelError(f"The model {source!r} cannot be loaded: {first_line(error)}.") from error
    return placed(model, device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


class Pair(NamedTuple):
    """
    Models that serve together.

    Args:
        target (`PreTrainedModel`):
            The model that answers.
        draft (`PreTrainedModel`):
            The smaller model that drafts, with the target's vocabulary size.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer of both.
    """

    target: Any
    draft: Any
    tokenizer: Any


def load_pair(
    target: str | None = None, draft: str | None = None, *, dtype: str = "auto", device: str | None = None
) -> Pair:
    """
    The models of these names, or the bundled pair (fp32, on the CPU unless a device is named) where neither is given.

    Args:
        target (`str`, *optional*), draft (`str`, *optional*):
            Hub ids or folders; both or neither.
        dtype (`str`, *optional*, defaults to `"auto"`), device (`str`, *optional*):
            As for [`load_model`].

    Raises:
        ConfigError: one of the two is missing, or there is no such device.
        UnsupportedModelError: a model or the tokenizer cannot be loaded.
        VocabularyMismatchError: the vocabularies differ in more than padding.
    """
    if (target is None) != (draft is None):
        raise ConfigError("A pair is two models: name a target and a draft, or neither for the bundled pair.")
    if target is None or draft is None:
        bundled = Pair(*load_bundled())
        return Pair(placed(bundled.target, device or "cpu"), placed(bundled.draft, device or "cpu"), bundled.tokenizer)
    models = [load_model(name, dtype=dtype, device=device) for name in (target, draft)]
    tokenizer = load_tokenizer(target)
    return Pair(models[0], of_one_size(models[1], models[0]), tokenizer)


def load_eos_ids(source: str) -> tuple[int, ...]:
    """Ids that end an answer, of a model's generation config, or of its configuration where it has none."""
    try:
        config = GenerationConfig.from_pretrained(source)
    except (OSError, ValueError):
        config = load_config(source)
    return eos_ids(config)


def eos_ids(config: Any) -> tuple[int, ...]:
    """Ids that end an answer, of a configuration that names one, several or none."""
    eos = getattr(config, "eos_token_id", None)
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def placed(model: Any, device: str) -> Any:
    """The model, moved to a device; raises ConfigError where there is no such device."""
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"The device {device!r} cannot be used: {first_line(error)}.") from error


def load_tokenizer(source: str) -> Any:
    """The tokenizer that lies beside a model; raises UnsupportedModelError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UnsupportedModelError(f"{source!r} has no tokenizer that loads: {first_line(error)}.") from error


def prompt_room(target_config: Any, draft_config: Any, max_new_tokens: int) -> int | None:
    """
    Tokens that a prompt may have beside the answer, or as the source of an encoder-decoder, whose answer has positions
    of its own; `None` where nothing bounds it.

    Raises:
        ConfigError: there is no room for a prompt, or for the answer.
    """
    configs = [config.get_text_config() for config in (target_config, draft_config)]
    sizes = [getattr(config, "max_position_embeddings", None) for config in configs]
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    positions = int(min(known))
    room = positions - max_new_tokens
    if target_config.is_encoder_decoder:
        if room < 0:
            raise ConfigError(f"{max_new_tokens} new tokens do not fit: the models have {positions} positions.")
        return positions
    if room < 1:
        raise ConfigError(
            f"{max_new_tokens} new tokens leave no room for a prompt: the models have {positions} positions."
        )
    return room


def first_line(error: BaseException) -> str:
    """What an error says, cut to one line without its full stop, and without passwords and keys."""
    lines = (line.strip() for line in without_credentials(str(error)).splitlines())
    return next((line.rstrip(".") for line in lines if line), type(error).__name__)


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


def check_draft(draft: Any) -> None:
    """Refuse what is no ordinary assistant model; raises UnsupportedModelError."""
    if not callable(getattr(draft, "generate", None)) or not hasattr(draft, "generation_config"):
        raise UnsupportedModelError(
            f"The draft must be a transformers model that can `generate`, got {type(draft).__name__}."
        )
    if getattr(draft, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{type(draft).__name__} is stateful: its state cannot be rolled back when a drafted token is rejected. "
            "Use an attention model as the draft."
        )


def check_pair(target: Any, draft: Any) -> None:
    """
    Refuse pairs that assisted generation cannot run, or that could not learn.

    Args:
        target (`PreTrainedModel`), draft (`PreTrainedModel`):
            Unwrapped models.

    Raises:
        UnsupportedModelError, VocabularyMismatchError
    """
    if not isinstance(target, GenerationMixin) or not target.can_generate():
        raise UnsupportedModelError(
            f"The target must be a transformers model that can `generate`, got {type(target).__name__}. Load it with "
            "a class that has a language modeling head, such as `AutoModelForCausalLM`."
        )
    if getattr(target, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{type(target).__name__} is stateful and cannot be assisted: its state cannot be rolled back when a "
            "drafted token is rejected. Use an attention model as the target."
        )
    check_draft(draft)
    if target.config.is_encoder_decoder != draft.config.is_encoder_decoder:
        kinds = ["encoder-decoder" if m.config.is_encoder_decoder else "decoder-only" for m in (target, draft)]
        raise UnsupportedModelError(
            f"Target ({kinds[0]}) and draft ({kinds[1]}) must be of one kind: a draft is taught on the target's input."
        )
    sizes = [int(m.config.get_text_config().vocab_size) for m in (target, draft)]
    if sizes[0] != sizes[1]:
        raise VocabularyMismatchError(
            f"The target has {sizes[0]} tokens, the draft {sizes[1]}. If they share one tokenizer and differ only in "
            "padding, use `draft = align_vocab(draft, target, tokenizer)`; otherwise choose a draft of the target's "
            "family."
        )


def check_tokenizers(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Refuse tokenizers that give different ids to one text; raises VocabularyMismatchError."""
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if ours == theirs:
        return
    differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
    shown = ", ".join(f"{t!r} ({ours.get(t)} / {theirs.get(t)})" for t in differing[:3])
    raise VocabularyMismatchError(
        f"The tokenizers of target and draft differ in {len(differing)} tokens, such as {shown}. A draft can only "
        "learn token distributions of its own tokenizer; choose a draft of the target's family."
    )


def find_tokenizer(model: Any) -> Any:
    """The tokenizer that lies where a model came from, in a folder or the local cache; `None` if there is none."""
    source = model.config.name_or_path
    if not source:
        return None
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError):
        return None


def common_tokenizer(given: Any, target: Any, draft: Any) -> Any:
    """The tokenizer given, else the target's, else the draft's; raises VocabularyMismatchError where one differs."""
    found = [given, *(find_tokenizer(model) for model in (target, draft) if model is not None)]
    known = [tokenizer for tokenizer in found if tokenizer is not None]
    for other in known[1:]:
        check_tokenizers(known[0], other)
    return known[0] if known else None


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
