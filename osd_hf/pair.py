"""A target, a draft and their tokenizer: how they are loaded and unwrapped, and whether they fit together."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
)

from osd_hf.bundled import load_bundled
from osd_hf.errors import ConfigError, UnsupportedModelError, VocabularyMismatchError, first_line

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


def vocab_size_of(model: Any) -> int:
    """Width of the logits of a model, or of one with this configuration."""
    return int(getattr(model, "config", model).get_text_config().vocab_size)


def eos_ids(config: Any) -> tuple[int, ...]:
    """Ids that end an answer, by a configuration or a mapping that names one, several or none."""
    eos = config.get("eos_token_id") if isinstance(config, Mapping) else getattr(config, "eos_token_id", None)
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def until_end(answer: NDArray[np.int32], config: Any) -> NDArray[np.int32]:
    """An answer up to and with its first token that ends one, by a generation config."""
    found = np.flatnonzero(np.isin(answer, eos_ids(config)))
    return answer[: found[0] + 1] if len(found) else answer


def set_fixed_k(generation_config: Any, k: int | None = None) -> None:
    """Let a draft's generation config draft the same number of tokens each round, however sure of them it is: `k`, or
    what it has set. Changed in place."""
    if k is not None:
        generation_config.num_assistant_tokens = k
    generation_config.num_assistant_tokens_schedule = "constant"
    generation_config.assistant_confidence_threshold = 0.0


@contextlib.contextmanager
def fixed_k(draft: Any, k: int | None = None) -> Iterator[None]:
    """[`set_fixed_k`] for a block: the draft has a generation config of its own inside, and then the old one again."""
    model = unwrap(draft)
    before, model.generation_config = model.generation_config, copy.deepcopy(model.generation_config)
    set_fixed_k(model.generation_config, k)
    try:
        yield
    finally:
        model.generation_config = before


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model is in evaluation mode inside the block, and then in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _loaded(auto: Any, source: str, **kwargs: Any) -> Any:
    try:
        return auto.from_pretrained(source, **kwargs)
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedModelError(f"The model {source!r} cannot be loaded: {first_line(error)}.") from error


def load_config(source: str) -> Any:
    """The configuration of a model; raises UnsupportedModelError where there is none."""
    return _loaded(AutoConfig, source)


def load_model(source: str, *, dtype: str = "auto", device: str | None = None) -> Any:
    """A model in evaluation mode, by its Hub id or folder; `dtype="auto"` is the checkpoint's own, and without a
    device it goes to CUDA where there is one. Raises UnsupportedModelError where it cannot be loaded, ConfigError
    where there is no such device."""
    auto = AutoModelForSeq2SeqLM if load_config(source).is_encoder_decoder else AutoModelForCausalLM
    model = _loaded(auto, source, dtype=dtype)
    return placed(model, device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


class Pair(NamedTuple):
    """Models that serve together: one that answers, a smaller one that drafts, with the same vocabulary size, and the
    tokenizer of both."""

    target: Any
    draft: Any
    tokenizer: Any


def load_pair(
    target: str | None = None, draft: str | None = None, *, dtype: str = "auto", device: str | None = None
) -> Pair:
    """
    The models of these names, as [`load_model`] loads them, or the bundled pair (fp32, on the CPU unless a device is
    named) where neither is given.

    Raises:
        ConfigError: one of the two is missing, or there is no such device.
        UnsupportedModelError: a model or the tokenizer cannot be loaded.
        VocabularyMismatchError: the vocabularies differ in more than padding.
    """
    if (target is None) != (draft is None):
        raise ConfigError("A pair is two models: name a target and a draft, or neither for the bundled pair.")
    if target is None or draft is None:
        large, small, tokenizer = load_bundled()
        return Pair(placed(large, device or "cpu"), placed(small, device or "cpu"), tokenizer)
    large, small = (load_model(name, dtype=dtype, device=device) for name in (target, draft))
    tokenizer = load_tokenizer(target)
    return Pair(large, of_one_size(small, large), tokenizer)


def load_eos_ids(source: str) -> tuple[int, ...]:
    """Ids that end an answer, by a model's generation config, or by its configuration where it has none."""
    try:
        return eos_ids(GenerationConfig.from_pretrained(source))
    except (OSError, ValueError):
        return eos_ids(load_config(source))


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
    """Tokens that a prompt may have beside the answer, or as the source of an encoder-decoder, whose answer has
    positions of its own; `None` where nothing bounds it. Raises ConfigError where there is no room for a prompt, or
    for the answer."""
    texts = [config.get_text_config() for config in (target_config, draft_config)]
    sizes = [getattr(text, "max_position_embeddings", None) for text in texts]
    positions = min((int(size) for size in sizes if size is not None), default=None)
    if positions is None:
        return None
    if target_config.is_encoder_decoder:
        if max_new_tokens > positions:
            raise ConfigError(f"{max_new_tokens} new tokens do not fit: the models have {positions} positions.")
        return positions
    if max_new_tokens >= positions:
        raise ConfigError(
            f"{max_new_tokens} new tokens leave no room for a prompt: the models have {positions} positions."
        )
    return positions - max_new_tokens


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
    """Refuse pairs of unwrapped models that assisted generation cannot run, or that could not learn; raises
    UnsupportedModelError or VocabularyMismatchError."""
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
    size, draft_size = vocab_size_of(target), vocab_size_of(draft)
    if size != draft_size:
        raise VocabularyMismatchError(
            f"The target has {size} tokens, the draft {draft_size}. If they share one tokenizer and differ only in "
            "padding, use `draft = align_vocab(draft, target, tokenizer)`; otherwise choose a draft of the target's "
            "family."
        )


def check_tokenizers(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Refuse tokenizers whose vocabularies differ; raises VocabularyMismatchError."""
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
    """The tokenizer given, or the target's, or the draft's; raises VocabularyMismatchError where one differs."""
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
        draft (`PreTrainedModel`): Left as it is.
        target (`PreTrainedModel`): Has the size.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer of both. Without it, the tokenizers are loaded from where the models came from and compared.

    Returns:
        `PreTrainedModel`: in evaluation mode, same dtype and device; new rows are the mean of the old ones, and never
        drawn by a target that knows no such token.

    Raises:
        VocabularyMismatchError: the tokenizers differ, cannot be found, or use ids beyond the smaller vocabulary.
    """
    size, old_size = vocab_size_of(target), vocab_size_of(draft)
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
    """The draft itself where its vocabulary has the target's size, otherwise what [`align_vocab`] makes of it."""
    return draft if vocab_size_of(draft) == vocab_size_of(target) else align_vocab(draft, target)
