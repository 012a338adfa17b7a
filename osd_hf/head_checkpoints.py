"""The checkpoint formats of EAGLE-3 heads: the `speculators` package's, which vLLM serves, and SpecForge's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import cached_file

from osd_hf.errors import UnsupportedModelError, first_line

HEAD_TYPE = "osd_hf_head"  # `model_type` of a [`DraftHead`]
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEXES = tuple(f"{name}.index.json" for name in WEIGHTS)
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Names of weights in checkpoints, and ours. SpecForge has `midlayer` in place of `layers.0`.
THEIR_NAMES = (("fc.", "state_proj."), ("input_norm.", "state_norm."), ("fc_norm.", "state_norms."),
               ("layers.0.", "model.layers.0."), ("midlayer.", "model.layers.0."),
               ("embed_tokens.", "model.embed_tokens."))  # fmt: skip


def read_config(source: str | os.PathLike[str], **location: Any) -> dict[str, Any]:
    """Return the `config.json` of a folder or a Hub repository; empty if there is none. `location` are arguments of
    `from_pretrained` that locate files."""
    try:
        path = cached_file(os.fspath(source), "config.json", **location)
        found: dict[str, Any] = json.loads(Path(str(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever loads the model reports it
        return {}
    return found


def is_eagle3(saved: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of an EAGLE-3 head."""
    names = [str(name).lower() for name in saved.get("architectures") or ()]
    return saved.get("speculators_model_type") == "eagle3" or any("eagle3" in name for name in names)


def head_settings(saved: Mapping[str, Any], target: PreTrainedConfig) -> dict[str, Any]:
    """Return the arguments of [`DraftHeadConfig`] for the `config.json` of an EAGLE-3 checkpoint. `target` is the
    configuration of the target's decoder."""
    is_flat = "transformer_layer_config" not in saved
    layer = dict(saved if is_flat else saved["transformer_layer_config"])
    own = [key for key in layer if key.startswith(("eagle", "speculators")) or key in NORMS or key == "auto_map"]
    for key in [*own, "architectures", "draft_vocab_size", "target_hidden_size"] if is_flat else []:
        layer.pop(key, None)
    text = AutoConfig.for_model(layer.pop("model_type", "llama"), **layer)
    if text.num_hidden_layers != 1:
        raise UnsupportedModelError(f"EAGLE-3 heads have one layer, got one with {text.num_hidden_layers}.")
    rows = saved.get("draft_vocab_size") or text.vocab_size
    text.vocab_size = target.vocab_size
    options = {**saved, **(saved.get("eagle_config") or {})}
    count, name = target.num_hidden_layers, "eagle_aux_hidden_state_layer_ids"
    layers = saved.get(name) or [2, count // 2, count - 3]
    if nested := (saved.get("eagle_config") or {}).get(name):  # SpecForge numbers layers, by their outputs
        layers = [i + 1 for i in nested]
    return {
        "text_config": text, "layout": "eagle3", "state_layers": layers, "draft_vocab_size": rows,
        "state_size": options.get("target_hidden_size") or target.hidden_size,
        **{name: bool(options.get(name, False)) for name in NORMS},
    }  # fmt: skip


def speculators_config(config: Any, target_name: str | None, architectures: list[str], k: int) -> dict[str, Any]:
    """Return the `config.json` of an EAGLE-3 head, given its [`DraftHeadConfig`] and where its target comes from."""
    text = config.text_config
    method = {"proposal_type": "greedy", "speculative_tokens": k, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "transformer_layer_config": text.to_dict(),
        "draft_vocab_size": config.draft_vocab_size or text.vocab_size,
        "target_hidden_size": config.state_size,
        "eagle_aux_hidden_state_layer_ids": config.state_layers,
        **{name: getattr(config, name) for name in NORMS},
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"name_or_path": target_name, "architectures": architectures},
        },
    }  # fmt: skip


def num_assistant_tokens(saved: Mapping[str, Any]) -> int | None:
    """Return the number of drafted tokens that a checkpoint names."""
    methods = (saved.get("speculators_config") or {}).get("proposal_methods") or [{}]
    found: int | None = methods[0].get("speculative_tokens")
    return found


def our_name(name: str) -> str | None:
    """Return our name of a weight in a checkpoint; `None` for those of the target."""
    if name.startswith("verifier_"):
        return None
    return next((ours + name[len(theirs) :] for theirs, ours in THEIR_NAMES if name.startswith(theirs)), name)


def their_name(name: str) -> str:
    """Return the name of one of our weights in a checkpoint."""
    return next((theirs + name[len(ours) :] for theirs, ours in THEIR_NAMES if name.startswith(ours)), name)


def read_weights(source: str | os.PathLike[str], **location: Any) -> dict[str, Tensor]:
    """Return the weights of a folder or a Hub repository, in one file or several; raises UnsupportedModelError."""
    source = os.fspath(source)
    try:
        for name in (*WEIGHTS, *INDEXES):
            path = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **location)
            if path is None:
                continue
            names = [name]
            if name in INDEXES:
                names = sorted(set(json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"].values()))
            return {key: w for part in names for key, w in _read(str(cached_file(source, part, **location))).items()}
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"The head {source!r} cannot be loaded: {first_line(error)}.") from error
    raise UnsupportedModelError(f"The head {source!r} has no weights: none of {', '.join((*WEIGHTS, *INDEXES))}.")


def _read(path: str) -> dict[str, Tensor]:
    if path.endswith(".safetensors"):
        return load_file(path)
    found: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return found
