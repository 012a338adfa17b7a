"""A smaller model made of some layers of a large one, as a draft begins."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationMixin
from transformers.initialization import no_init_weights

from osd_hf.errors import ConfigError, UnsupportedModelError, first_line, is_out_of_memory
from osd_hf.models import evaluating, is_peft, merged, uncompiled, unwrap, vocab_size_of

__all__ = ["cut", "depth", "has_attention", "outer_layers"]

# Kinds of layers that tokens can be taken back from.
KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "conv"}
PROBED = 8  # tokens that what was cut is compared on
TOLERANCE, QUANTIZED_TOLERANCE = 0.02, 0.2  # of the largest logit; weights that were quantized are rounded otherwise


def depth(model: Any, side: str = "decoder") -> int:
    """How many layers the `"decoder"` or the `"encoder"` of a model has; raises UnsupportedModelError where they
    cannot be told apart."""
    return len(_stack(unwrap(model), side))


def cut(target: Any, layers: Sequence[int], encoder_layers: Sequence[int] | None = None) -> Any:
    """
    A model of the target's own kind that has some of its layers; embeddings, norms and the head are copied.

    Args:
        target (`PreTrainedModel` or `PeftModel`):
            Left as it is; adapters are merged into the copy, and quantized layers dequantized, where transformers can.
        layers (`Sequence[int]`): Numbers of the layers, in ascending order; those of the decoder.
        encoder_layers (`Sequence[int]`, *optional*): Of an encoder-decoder, those of its encoder; all by default.

    Returns:
        `PreTrainedModel`: in evaluation mode, on the target's device and in its dtype. Of a target that sees images as
        well, the part for text alone.

    Raises:
        ConfigError: numbers that are no layers of the target.
        UnsupportedModelError: the target cannot be cut up.
    """
    inner = unwrap(target)
    _check_kind(inner)
    chosen = {"decoder": _checked(layers, depth(inner), "layers")}
    if inner.config.is_encoder_decoder:
        count = depth(inner, "encoder")
        chosen["encoder"] = _checked(
            range(count) if encoder_layers is None else encoder_layers, count, "encoder_layers"
        )
    elif encoder_layers is not None:
        raise ConfigError(f"`encoder_layers` are for encoder-decoders; {type(inner).__name__} has no encoder.")
    kind = type(inner).__name__
    if not has_attention(inner, chosen["decoder"]):
        raise UnsupportedModelError(
            f"The layers {list(chosen['decoder'])} of {kind} have no attention, so that the tokens of a draft could "
            "not be taken back. Choose at least one that has."
        )
    with torch.inference_mode(False), torch.no_grad():
        try:
            source = _part(target, chosen)
            draft = _rebuilt(inner, source, chosen)
            error = _error(inner, draft, chosen)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as failure:
            if isinstance(failure, UnsupportedModelError) or is_out_of_memory(failure):
                raise
            raise UnsupportedModelError(f"{kind} cannot be cut up: {first_line(failure)}.") from failure
    bound = QUANTIZED_TOLERANCE if getattr(inner, "is_quantized", False) else TOLERANCE
    if not error <= bound:
        raise UnsupportedModelError(
            f"{kind} cannot be cut up: its layers {list(chosen['decoder'])} alone, as a model of their own, differ by "
            f"{error:.2g} of the largest logit from what they do in it."
        )
    return draft


def has_attention(model: Any, layers: Sequence[int]) -> bool:
    """Whether one of these layers, of the decoder, attends to earlier tokens: others alone have no cache."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return not kinds or any("attention" in kinds[i] for i in layers)


def outer_layers(size: int, count: int) -> tuple[int, ...]:
    """The layers that a draft of a size begins as: the first half of them and the last, which knows the head."""
    return (*range(size - size // 2), *range(count - size // 2, count))


def _check_kind(model: Any) -> None:
    """Refuse what is known not to be made of layers that stand for themselves; raises UnsupportedModelError."""
    kind = type(model).__name__
    if not isinstance(model, GenerationMixin) or not model.can_generate():
        raise UnsupportedModelError(f"A draft is cut from a transformers model that can `generate`, got {kind}.")
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) | set(getattr(config, "layers_block_type", None) or ())
    if getattr(model, "_is_stateful", False) or not kinds <= KINDS:
        raise UnsupportedModelError(
            f"{kind} has recurrent layers, whose state cannot be rolled back when a drafted token is rejected: no "
            "draft is cut from it."
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModelError(
            f"Layers of {kind} share keys and values with earlier ones, so they cannot be cut apart. Use a smaller "
            "model of its family as the draft."
        )
    if any(tensor.device.type == "meta" for tensor in model.parameters()):
        raise UnsupportedModelError(
            f"Weights of the target ({kind}) are offloaded, so no layers can be copied. Load it whole to make a draft."
        )


def _checked(layers: Sequence[int], count: int, name: str) -> tuple[int, ...]:
    chosen = tuple(layers)
    if not chosen or sorted(set(chosen)) != list(chosen) or not 0 <= chosen[0] <= chosen[-1] < count:
        raise ConfigError(f"`{name}` must be ascending numbers from 0 to {count - 1}, got {list(chosen)}.")
    return chosen


def _stack(model: Any, side: str) -> torch.nn.ModuleList:
    """The layers of one side of a model."""
    config = model.config if model.config.is_encoder_decoder else model.config.get_text_config(decoder=True)
    settings = _side(config.to_dict(), side)
    count = settings.get(_count_field(config, settings, side))
    root = model.get_encoder() if side == "encoder" else model.get_decoder()
    found: dict[str, torch.nn.ModuleList] = {}
    for name, module in root.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and not is_inside:
            found[name] = module
    if len(found) != 1:
        raise UnsupportedModelError(
            f"The layers of {type(model).__name__} are not found: there are {len(found)} lists of its {count} layers."
        )
    return next(iter(found.values()))


def _part(target: Any, chosen: dict[str, tuple[int, ...]]) -> Any:
    """A copy of the target that has the chosen layers alone, adapters merged and weights dequantized."""
    inner, memo = unwrap(target), dict[int, Any]()
    for side, layers in chosen.items():
        stack = _stack(inner, side)
        # Found in the memo, the list is not copied whole: the others of a large target would not fit beside it.
        memo[id(stack)] = torch.nn.ModuleList(copy.deepcopy(stack[i], memo) for i in layers)
    source = merged(copy.deepcopy(uncompiled(target), memo))
    if is_peft(source):
        raise UnsupportedModelError(
            f"The adapter of the target ({type(inner).__name__}) cannot be merged into its layers. Cut the draft from "
            "the model below it."
        )
    source = unwrap(source)
    if not getattr(source, "is_quantized", False):
        return source
    try:
        return source.dequantize()
    except (NotImplementedError, ValueError, ImportError) as error:
        raise UnsupportedModelError(
            f"The target ({type(inner).__name__}) is quantized in a way that transformers cannot undo: "
            f"{first_line(error)}. Make the draft from the model without quantization; it drafts for both."
        ) from error


def _rebuilt(inner: Any, source: Any, chosen: dict[str, tuple[int, ...]]) -> Any:
    """The part as a model that its configuration describes: what it will be once saved and loaded."""
    whole = inner.config
    text = whole if whole.is_encoder_decoder else whole.get_text_config(decoder=True)
    kind = type(inner) if text is whole else MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    config = type(text).from_dict(_settings(text, chosen))
    how = {"dtype": source.dtype, "attn_implementation": text._attn_implementation}
    with no_init_weights():
        draft = kind._from_config(config, **how)
    draft.tie_weights()
    if text is whole:
        draft.load_state_dict(source.state_dict())
    else:
        draft.get_decoder().load_state_dict(source.get_decoder().state_dict())
        draft.get_output_embeddings().load_state_dict(source.get_output_embeddings().state_dict())
    draft.generation_config = copy.deepcopy(inner.generation_config)
    return draft.to(inner.device).eval()


def _side(settings: dict[str, Any], side: str) -> dict[str, Any]:
    """The fields of one side, where each has a configuration of its own; otherwise all."""
    own: Any = settings.get(side)
    return own if isinstance(own, dict) else settings


def _count_field(config: Any, settings: dict[str, Any], side: str) -> str:
    """The field that says how many layers a side has."""
    names = (f"{side}_layers", f"num_{side}_layers") if config.is_encoder_decoder else ()
    general = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return next((name for name in names if name in settings), general)


def _settings(config: Any, chosen: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The fields of a configuration, with the chosen layers alone."""
    settings: dict[str, Any] = config.to_dict()
    settings.pop("quantization_config", None)
    for side, layers in chosen.items():
        own = _side(settings, side)
        name = _count_field(config, own, side)
        count, own[name] = own[name], len(layers)
        for field, value in own.items():  # kinds of layers, and the like
            if "layer" in field and isinstance(value, list | tuple) and len(value) == count:
                own[field] = [value[i] for i in layers]
        # Families of experts say so by number which layers have none.
        if own.get("mlp_only_layers") is not None:
            step = own.get("decoder_sparse_step") or 1
            dense = [i in own["mlp_only_layers"] or (i + 1) % step != 0 for i in layers]
            own |= {"mlp_only_layers": [j for j, is_dense in enumerate(dense) if is_dense], "decoder_sparse_step": 1}
        if own.get("moe_layers") is not None:
            own["moe_layers"] = [j for j, i in enumerate(layers) if i in own["moe_layers"]]
        if own.get("first_k_dense_replace") is not None:
            own["first_k_dense_replace"] = sum(i < own["first_k_dense_replace"] for i in layers)
    return settings


def _error(inner: Any, draft: Any, chosen: dict[str, tuple[int, ...]]) -> float:
    """By how much the logits of the draft differ from those of the target without its other layers, over the largest
    one."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size_of(draft), (1, PROBED), generator=generator, device="cpu").to(inner.device)
    inputs = {"input_ids": ids, "use_cache": False}
    if inner.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with evaluating(inner), _without(inner, chosen):
        wanted = inner(**inputs).logits.float()
    found = draft(**inputs).logits.float()
    return float((wanted - found).abs().max() / wanted.abs().max())


@contextmanager
def _without(model: Any, chosen: dict[str, tuple[int, ...]]) -> Iterator[None]:
    """The other layers hand on what they get."""

    def hand_on(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        return (states, *output[1:]) if isinstance(output, tuple) else states

    with ExitStack() as hooks:
        for side, layers in chosen.items():
            for i, layer in enumerate(_stack(model, side)):
                if i not in layers:
                    hooks.enter_context(layer.register_forward_hook(hand_on, with_kwargs=True))
        yield
