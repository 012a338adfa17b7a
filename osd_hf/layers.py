"""Make models of a target's kind from some of its layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from osd_hf.decoding.forward import layers_with_state
from osd_hf.draft_head import DraftHead
from osd_hf.errors import UnsupportedModelError, first_line, is_out_of_memory
from osd_hf.learning.weights import SHARED_SETTING, copy_with, shared_ends
from osd_hf.models import check_pair, is_peft, merged, uncompiled, unwrap
from osd_hf.vocabulary import VOCABULARY_SETTING


def num_layers_of(model: PreTrainedModel) -> int:
    """Return the number of decoder layers."""
    return len(_layer_list(unwrap(model)))


def outer_layers(size: int, count: int) -> tuple[int, ...]:
    """Choose `size` of `count` layers: half of them from the beginning, half from the end."""
    return (*range(size - size // 2), *range(count - size // 2, count))


def has_attention(model: PreTrainedModel, layers: Sequence[int]) -> bool:
    """Return whether one of these decoder layers has attention. Without it there is no cache to crop."""
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return not types or any("attention" in types[i] for i in layers)


def layers_without_state(model: PreTrainedModel) -> list[int]:
    """Return the decoder layers that can be copied: of a model with recurrent layers, those with attention alone."""
    recurrent = layers_with_state(model) if getattr(model, "_is_stateful", False) else set[int]()
    return [i for i in range(num_layers_of(model)) if i not in recurrent]


def copy_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a model of the target's kind with some of its decoder layers, in ascending order, and its embeddings,
    norms and output head, in evaluation mode. All encoder layers are copied. Of a multimodal target only the text part
    is copied. Embeddings and head share the target's memory if they can. The target is not changed: adapters are
    merged and layers dequantized in the copy. Raises UnsupportedModelError if the layers cannot be copied."""
    inner = unwrap(target)
    check_pair(inner, inner)
    if not set(layers) <= set(layers_without_state(inner)):
        raise UnsupportedModelError(
            f"These layers of {type(inner).__name__} cannot be copied: some are recurrent. Copy layers with attention "
            "alone, or pass a draft with the target's tokenizer."
        )
    layer_list, memo = _layer_list(inner), dict[int, Any]()
    with torch.inference_mode(False), torch.no_grad():
        try:
            # deepcopy takes the short list from the memo and does not copy the other layers of a large target.
            memo[id(layer_list)] = torch.nn.ModuleList(copy.deepcopy(layer_list[i], memo) for i in layers)
            source = merged(copy.deepcopy(uncompiled(target), memo))
            if is_peft(source):
                raise UnsupportedModelError("the adapter cannot be merged; use the model without it")
            source = unwrap(source)
            source = source.dequantize() if getattr(source, "is_quantized", False) else source
            draft = _rebuild(inner, source, layers)
            setattr(draft.config, SHARED_SETTING, True)
            return copy_with(draft, shared_ends(draft, inner))
        except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise UnsupportedModelError(
                f"Layers of {type(inner).__name__} cannot be copied: {first_line(error)}."
            ) from error


def new_head(target: PreTrainedModel) -> DraftHead:
    """Return a head that starts as the target's first layer that has attention.
    Raises UnsupportedModelError if no layer can be copied."""
    inner = unwrap(target)
    usable = [i for i in layers_without_state(inner) if has_attention(inner, [i])]
    if not usable:
        raise UnsupportedModelError(
            f"No layer of {type(inner).__name__} can be copied into a draft head. Pass a draft."
        )
    head: DraftHead = DraftHead.from_draft(copy_layers(target, usable[:1]), inner)
    return head


def load_layers(target: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Load a draft saved without its target's embeddings and head; raises UnsupportedModelError for another target."""
    config = type(target.config).from_pretrained(folder)
    if any(getattr(config, name) != getattr(target.config, name) for name in ("vocab_size", "hidden_size")):
        raise UnsupportedModelError(f"The draft in {folder} is of another target.")
    draft = copy_layers(target, layers_without_state(target)[: config.num_hidden_layers])
    draft.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    setattr(draft.config, VOCABULARY_SETTING, getattr(config, VOCABULARY_SETTING, None))
    draft.generation_config = GenerationConfig.from_pretrained(folder)
    return draft


def _layer_list(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Find the decoder layers; raises UnsupportedModelError."""
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.ModuleList):
            return module
    raise UnsupportedModelError(f"The layers of {type(model).__name__} are not found.")


def _rebuild(inner: PreTrainedModel, source: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Build the model from its new configuration, as it will be after saving and loading."""
    config = inner.config
    text = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    is_text_model = text is config
    model_class = type(inner) if is_text_model else MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    new_config = type(text).from_dict(_config_with(text, layers))
    with no_init_weights():
        draft = model_class._from_config(new_config, dtype=source.dtype, attn_implementation=text._attn_implementation)
    draft.tie_weights()
    if is_text_model:
        draft.load_state_dict(source.state_dict())
    else:
        draft.get_decoder().load_state_dict(source.get_decoder().state_dict())
        draft.get_output_embeddings().load_state_dict(source.get_output_embeddings().state_dict())
    draft.generation_config = copy.deepcopy(inner.generation_config)
    return draft.to(inner.device).eval()


def _config_with(config: Any, layers: Sequence[int]) -> dict[str, Any]:
    """Return the settings of a configuration with only the chosen layers."""
    settings: dict[str, Any] = config.to_dict()
    settings.pop("quantization_config", None)
    own = settings.get("decoder")  # a configuration of its own
    own = own if isinstance(own, dict) else settings
    names = ("decoder_layers", "num_decoder_layers") if config.is_encoder_decoder else ()
    general = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    name = next((name for name in names if name in own), general)
    count, own[name] = own[name], len(layers)
    for key, value in own.items():  # lists with one entry per layer, such as `layer_types`
        if "layer" in key and isinstance(value, list | tuple) and len(value) == count:
            own[key] = [value[i] for i in layers]
    # Mixture-of-experts models name the layers without experts by number.
    if own.get("mlp_only_layers") is not None:
        step = own.get("decoder_sparse_step") or 1
        dense = [i in own["mlp_only_layers"] or (i + 1) % step != 0 for i in layers]
        own |= {"mlp_only_layers": [j for j, is_dense in enumerate(dense) if is_dense], "decoder_sparse_step": 1}
    for name in ("moe_layers", "attn_layer_indices"):
        if own.get(name) is not None:
            own[name] = [j for j, i in enumerate(layers) if i in own[name]]
    if own.get("first_k_dense_replace") is not None:
        own["first_k_dense_replace"] = sum(i < own["first_k_dense_replace"] for i in layers)
    return settings
