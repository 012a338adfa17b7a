"""Load a target and its draft, a model or a draft head, by name."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.utils import find_adapter_config_file

from osd_hf.bundled import load_bundled
from osd_hf.draft_head import load_head
from osd_hf.errors import ConfigError
from osd_hf.head_checkpoints import HEAD_TYPE, is_eagle3, read_config
from osd_hf.models import (
    TOKENIZERS,
    align_vocab,
    common_tokenizer,
    hub_arguments,
    input_device,
    load_model,
    load_tokenizer,
    merged,
    placed,
    unwrap,
    with_tokenizer,
)

# Arguments of `from_pretrained` for the target only: a draft learns, unquantized and on one device.
TARGET_ARGUMENTS = "device_map max_memory offload_buffers offload_folder quantization quantization_config".split()
BUNDLED_ARGUMENTS = (("dtype", "auto"), ("dtype", "float32"))  # true of the bundled pair


class Pair(NamedTuple):
    """A target, a draft with the same vocabulary size, and the tokenizer of both."""

    target: Any
    draft: Any
    tokenizer: Any


def load_pair(
    target: str | None = None,
    draft: str | None = None,
    *,
    device: str | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    **model_kwargs: Any,
) -> Pair:
    """Load a target and a draft by name with [`load_model`], or the bundled pair (fp32, by default on the CPU). A
    target alone has the draft `None`. `revision` is for the target, `draft_revision` for the draft. Raises ConfigError
    if only the draft is named or the bundled pair does not take an argument, UnsupportedModelError, and
    VocabularyMismatchError."""
    if target is None and draft is not None:
        raise ConfigError("A draft needs its target: name both, or neither for the bundled pair.")
    if target is None:
        arguments = {**model_kwargs, "revision": revision, "draft_revision": draft_revision}
        if given := [name for name, value in arguments.items() if value and (name, value) not in BUNDLED_ARGUMENTS]:
            raise ConfigError(f"The bundled pair is loaded as it is; `{given[0]}` needs a target and a draft by name.")
        large, small, tokenizer = load_bundled()
        return Pair(placed(large, device or "cpu"), placed(small, device or "cpu"), tokenizer)
    model_kwargs["device"] = device
    target_kwargs = model_kwargs if revision is None else {**model_kwargs, "revision": revision}
    draft_kwargs = model_kwargs if draft_revision is None else {**model_kwargs, "revision": draft_revision}
    large = load_model(target, **target_kwargs)
    tokenizer = TOKENIZERS[large] = load_tokenizer(target, **target_kwargs)
    if draft is None:
        return Pair(large, None, tokenizer)
    small = load_draft_for(large, draft, draft_kwargs)
    common_tokenizer(tokenizer, None, small)
    return Pair(large, align_vocab(small, large), tokenizer)


def load_named(target: Any, draft: Any, **model_kwargs: Any) -> tuple[Any, Any]:
    """Load those of two models that are given by Hub id or folder, with their tokenizers. Raises
    UnsupportedModelError, and ConfigError for an argument of `from_pretrained` that no model takes."""
    is_named = [isinstance(model, str | os.PathLike) for model in (target, draft)]
    for name in model_kwargs:
        if not any(is_named) or (name in TARGET_ARGUMENTS and not is_named[0]):
            raise ConfigError(
                f"`{name}` is for a model that is given by its id or path. Leave it out, or name the model."
            )
    if is_named[0]:
        target = with_tokenizer(load_model(os.fspath(target), **model_kwargs), model_kwargs)
    if is_named[1]:
        draft = load_draft_for(target, os.fspath(draft), model_kwargs)
    return target, draft


def load_draft_for(target: Any, source: str, model_kwargs: Mapping[str, Any]) -> Any:
    """Load a draft or a draft head of a target with [`load_model`], without `TARGET_ARGUMENTS`, by default on the
    target's device."""
    draft_kwargs = {name: value for name, value in model_kwargs.items() if name not in TARGET_ARGUMENTS}
    if draft_kwargs.get("device") is None and hasattr(unwrap(target), "device"):
        draft_kwargs["device"] = str(input_device(unwrap(target)))
    if is_head(source, **draft_kwargs):
        return _load_head_of(target, source, draft_kwargs)
    return with_tokenizer(load_model(source, **draft_kwargs), draft_kwargs)


def load_draft(source: str, target: Any = None, **model_kwargs: Any) -> PreTrainedModel:
    """Load a draft with [`load_model`] and remember its tokenizer for [`find_tokenizer`]. If the source is a LoRA
    adapter, load its base model and merge the adapter into it, which needs PEFT. A draft head needs its target."""
    if is_head(source, **model_kwargs):
        return _load_head_of(target, source, model_kwargs)
    location = _location(model_kwargs)
    adapter_file = None
    with contextlib.suppress(OSError):  # `load_model` raises a clearer error
        adapter_file = find_adapter_config_file(source, **location)
    if adapter_file is None:
        return with_tokenizer(load_model(source, **model_kwargs), model_kwargs)
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"{source!r} is an adapter, which needs PEFT: pip install 'osd-hf[distill]'.")
    base_kwargs = {name: value for name, value in model_kwargs.items() if name not in ("revision", "subfolder")}
    base = load_model(json.loads(Path(adapter_file).read_text())["base_model_name_or_path"], **base_kwargs)
    draft = merged(importlib.import_module("peft").PeftModel.from_pretrained(base, source, **location))
    unwrap(draft).config._commit_hash = None  # it is that of the base model
    return with_tokenizer(draft, base_kwargs)


def is_head(source: str | os.PathLike[str], **model_kwargs: Any) -> bool:
    """Whether a folder or a Hub repository has a draft head."""
    saved = read_config(source, **_location(model_kwargs))
    return saved.get("model_type") == HEAD_TYPE or is_eagle3(saved)


def _load_head_of(target: Any, source: str, model_kwargs: Mapping[str, Any]) -> PreTrainedModel:
    if not isinstance(unwrap(target), PreTrainedModel):
        raise ConfigError(f"{source!r} is a draft head, which reads the states of its target. Name the target.")
    placement = {name: model_kwargs.get(name) for name in ("dtype", "device")}
    return load_head(source, target, **_location(model_kwargs), **placement)


def _location(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that locate files which have no code."""
    return {name: value for name, value in hub_arguments(model_kwargs).items() if name != "trust_remote_code"}
