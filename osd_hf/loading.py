"""Models and tokenizers by Hub id or folder, with one clear line where one cannot be had."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from osd_hf.errors import ConfigError, UnsupportedModelError
from osd_hf.masking import without_credentials

__all__ = [
    "eos_ids",
    "first_line",
    "load_config",
    "load_eos_ids",
    "load_model",
    "load_tokenizer",
    "placed",
    "prompt_room",
]


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
