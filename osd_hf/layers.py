"""Make drafts and draft heads from layers of a target."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_layers import MtpModel
from transformers.utils import cached_file

from osd_hf.decoding.forward import layers_with_state
from osd_hf.draft_head import DraftHead, DraftHeadConfig, sample_ids, state_scale
from osd_hf.errors import ConfigError, UnsupportedModelError, first_line, is_out_of_memory
from osd_hf.learning.weights import copy_with, shared_ends
from osd_hf.models import SHARED_SETTING, check_pair, is_peft, merged, uncompiled, unwrap, vocab_size_of
from osd_hf.trace import bare_trace
from osd_hf.utils.report import make_folder
from osd_hf.vocabulary import VOCABULARY_SETTING

logger = logging.getLogger(__name__)

SAMPLE_TOKENS = 64  # of which the size of states is estimated


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


def own_head(target: PreTrainedModel) -> DraftHead:
    """Return a head of the target's built-in layer for multi-token prediction, or a new one.
    Raises UnsupportedModelError if there is none and no layer can be copied."""
    return built_in_head(target) or new_head(target)


def new_head(target: PreTrainedModel) -> DraftHead:
    """Return a head that starts as the target's first layer that has attention.
    Raises UnsupportedModelError if no layer can be copied."""
    head: DraftHead = DraftHead.from_draft(copy_layers(target, [first_layer(target)]), unwrap(target))
    return head


def first_layer(target: PreTrainedModel) -> int:
    """Return the number of the first layer with attention; raises UnsupportedModelError if none can be copied."""
    inner = unwrap(target)
    usable = [i for i in layers_without_state(inner) if has_attention(inner, [i])]
    if not usable:
        raise UnsupportedModelError(
            f"No layer of {type(inner).__name__} can be copied into a draft head. Pass a draft."
        )
    return usable[0]


def built_in_head(target: PreTrainedModel) -> DraftHead | None:
    """Return a head of the target's first built-in layer for multi-token prediction, which drafts all tokens of a
    round; `None` if the checkpoint has none. A layer that cannot be used is logged."""
    inner = unwrap(target)
    text = inner.config.get_text_config(decoder=True)
    if not getattr(text, "num_mtp_layers", None) or not inner.config.name_or_path:
        return None
    try:
        with torch.inference_mode(False):
            found = MtpModel.from_pretrained(inner, device_map={"": inner.device})
            head: DraftHead = _head_of_mtp(found, inner).bind(inner).eval()
            return head
    except (OSError, ValueError, RuntimeError, LookupError, AttributeError, TypeError, UnsupportedModelError) as error:
        if is_out_of_memory(error):
            raise
        name, why = type(inner).__name__, first_line(error)
        logger.warning("The layers for multi-token prediction of %s are not used: %s.", name, why)
        return None


def _head_of_mtp(built_in: Any, target: PreTrainedModel) -> DraftHead:
    layer, text = built_in.layers[0], copy.deepcopy(built_in.config)
    if getattr(text, "logits_mup_width_multiplier", None) is not None:
        raise UnsupportedModelError("their logits are scaled in an unknown way")
    settings = _config_with(text, [0])
    text = type(text).from_dict(settings)
    text._attn_implementation = target.config.get_text_config(decoder=True)._attn_implementation
    with torch.device("meta"):
        head = DraftHead(DraftHeadConfig(text, [-1], text.hidden_size, has_input_norms=True))
    projection = _embedding_first(layer.eh_proj.weight.detach(), text)
    head.input_proj = nn.Linear(projection.shape[1], projection.shape[0], bias=False, device="meta")
    head.input_proj.weight = nn.Parameter(projection.clone())
    head.embed_norm, head.hidden_norm = layer.enorm, layer.hnorm
    head.model.layers[0] = layer.mtp_block
    head.model.norm = layer.post_norm if layer.use_post_norm else getattr(built_in, "shared_post_norm", nn.Identity())
    if getattr(head.model, "rotary_emb", None) is not None:
        head.model.rotary_emb = copy.deepcopy(target.get_decoder().rotary_emb)
    head.set_input_embeddings(_sharing(target.get_input_embeddings()))
    head.set_output_embeddings(_sharing(target.get_output_embeddings()))
    if any(weight.is_meta for weight in (*head.parameters(), *head.buffers())):
        raise UnsupportedModelError("the decoder has other weights than its layers")
    head.generation_config = copy.deepcopy(target.generation_config)
    return head


def _embedding_first(projection: Tensor, config: Any) -> Tensor:
    """Exchange the halves of a projection if the checkpoint has the one of the state first, or back."""
    is_second = getattr(config, "mtp_hidden_states_first", False)
    return torch.cat([*reversed(projection.chunk(2, -1))], -1) if is_second else projection


def save_built_in(head: DraftHead, target: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    """Save a checkpoint of the target whose built-in layer has the weights of a head of [`built_in_head`], as
    transformers (`use_mtp`) and vLLM (`"method": "mtp"`) load it. The target's own files are links, or copies where
    there are no links; new are `mtp.safetensors` and the index. Raises UnsupportedModelError if the target's files are
    not in a folder or in the cache, and ConfigError for another kind of head or a folder that is not empty."""
    inner, place = unwrap(target), Path(folder)
    if not head.config.has_input_norms:
        raise ConfigError("Only a head of the target's built-in layers can be saved in the target's checkpoint.")
    source = Path(inner.config.name_or_path)
    if not source.is_dir():
        revision = getattr(inner.config, "_commit_hash", None)
        source = Path(str(cached_file(str(source), "config.json", revision=revision))).parent
    if place.exists() and any(place.iterdir()):
        raise ConfigError(f"{place} is not empty. Choose another folder.")
    number = inner.config.get_text_config(decoder=True).num_hidden_layers
    place_of = f"model.layers.{number}."
    block = {place_of + name: weight for name, weight in head.model.layers[0].state_dict().items()}
    weights = revert_weight_conversion(inner, block)
    norms = {"enorm": head.embed_norm, "hnorm": head.hidden_norm, "shared_head.norm": head.model.norm}
    weights |= {f"{place_of}{name}.weight": norm.weight.detach() for name, norm in norms.items()}
    weights[f"{place_of}eh_proj.weight"] = _embedding_first(head.input_proj.weight.detach(), head.config.text_config)
    files = sorted(source.glob("*.safetensors"))
    weight_map = {name: file.name for file in files for name in _names_in(file)}
    if not files or not set(weights) <= set(weight_map):
        unknown = sorted(set(weights) - set(weight_map))[:3]
        raise UnsupportedModelError(f"The checkpoint in {source} has no layers with these names: {unknown}.")
    make_folder(place)
    for file in [file for file in source.iterdir() if file.is_file() and not file.name.endswith(".index.json")]:
        try:
            os.symlink(file.resolve(), place / file.name)
        except OSError:
            shutil.copy(file, place / file.name)
    save_file(
        {name: w.detach().cpu().contiguous() for name, w in weights.items()},
        place / "mtp.safetensors",
        {"format": "pt"},
    )
    index = {"metadata": {}, "weight_map": weight_map | dict.fromkeys(weights, "mtp.safetensors")}
    if (single := place / "model.safetensors").exists():  # would be read without the index
        single.rename(place / "model-00001-of-00002.safetensors")
        names = {"model.safetensors": "model-00001-of-00002.safetensors"}
        index["weight_map"] = {name: names.get(file, file) for name, file in index["weight_map"].items()}
    (place / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _names_in(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _sharing(module: nn.Module) -> nn.Module:
    """Return a copy of a module with frozen parameters in the same memory."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()}
    return copy.deepcopy(module, memo)


def new_eagle3_head(target: PreTrainedModel, token_ids: Tensor | None = None) -> DraftHead:
    """Return a head in EAGLE-3's layout, with the target's embeddings, final norm and rows of its output head. Its
    attention reads the embedding as the target's first layer does, and its state is the last of the three, made
    smaller, so that it begins much like that layer. `token_ids` are the tokens that it can draft, int64, `(tokens,)`,
    in ascending order; by default all. Weights that do not fit are random. Raises UnsupportedModelError for a target
    without a plain output head."""
    inner = unwrap(target)
    cut = copy_layers(target, [first_layer(target)])
    text, head_weight = cut.config, getattr(inner.get_output_embeddings(), "weight", None)
    if head_weight is None or not hasattr(cut.get_decoder(), "norm"):
        raise UnsupportedModelError(f"{type(inner).__name__} has no output head or final norm for an EAGLE-3 head.")
    # Engines know two kinds of layers.
    kind = "qwen3" if text.model_type in ("qwen3", "qwen3_moe") else "llama"
    names = """vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act
        max_position_embeddings rms_norm_eps rope_parameters attention_bias mlp_bias""".split()
    settings = {name: value for name in names if (value := getattr(text, name, None)) is not None}
    layer_config = AutoConfig.for_model(kind, num_hidden_layers=1, tie_word_embeddings=False, **settings)
    layer_config.dtype = inner.dtype
    count = inner.config.get_text_config(decoder=True).num_hidden_layers
    states = sorted({min(2, count - 1), count // 2, max(count - 3, 0)})
    states = states if len(states) == 3 else list(range(max(count - 3, 0), count))
    rows = None if token_ids is None else len(token_ids)
    config = DraftHeadConfig(layer_config, states, text.hidden_size, "eagle3", draft_vocab_size=rows)
    with torch.inference_mode(False), torch.no_grad():
        head = DraftHead(config).to(inner.device, inner.dtype)
        mine, theirs = head.model.layers[0], cut.get_decoder().layers[0]
        width = text.hidden_size
        weights = dict(theirs.named_parameters())
        for name, parameter in mine.named_parameters():
            given = weights.get(name)
            if given is not None and given.shape == parameter.shape:
                parameter.copy_(given)
            elif given is not None and given.ndim == 2 and parameter.shape == (len(given), 2 * width):
                parameter.zero_()[:, :width] = given
        head.norm.weight.copy_(cut.get_decoder().norm.weight)
        head.lm_head.weight.copy_(head_weight if token_ids is None else head_weight[token_ids])
        head.set_input_embeddings(_sharing(inner.get_input_embeddings()))
        if token_ids is not None and head.d2t is not None:
            head.d2t.copy_(token_ids - torch.arange(len(token_ids)).to(token_ids))
            head.t2d[token_ids] = True
    head.generation_config = copy.deepcopy(inner.generation_config)
    found: DraftHead = head.bind(inner).eval()
    assert found.source is not None
    probe = sample_ids(inner, SAMPLE_TOKENS)
    last = found.source.of([bare_trace(probe[:1], probe[1:], vocab_size_of(inner), None)])[0][:, -width:].float()
    usual = float(last.square().mean(-1).sqrt().median())  # the first tokens often have much larger states
    factor = state_scale(inner) / usual if usual > 0 else 1.0
    with torch.inference_mode(False), torch.no_grad():
        found.state_proj.weight.zero_()[:, -width:] = factor * torch.eye(width).to(found.state_proj.weight)
    return found


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
