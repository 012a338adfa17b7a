"""Make copies of a model for captured forwards, with compiled layers and attention that does not copy keys."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "osd_hf_grouped"  # the name of `grouped_attention` in configurations


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    Attend as transformers' `sdpa` does. The query heads of a group are rows of one product with their keys, so that
    the keys of a long cache are not copied for each of them. That suits few tokens.

    `query` is `(rows, heads, tokens, size)`, `key` and `value` are `(rows, key heads, width, size)`, and
    `attention_mask` is `(rows or 1, 1, tokens, width)`. Returns `(rows, tokens, heads, size)`.
    """
    rows, heads, tokens, size = query.shape
    num_keys = key.shape[1]
    is_usual = attention_mask is not None and attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1
    if num_keys == heads or not is_usual or dropout or any(kwargs.get(name) is not None for name in UNUSUAL):
        usual: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return usual
    assert attention_mask is not None
    groups = heads // num_keys
    queries = query.reshape(rows * num_keys, groups * tokens, size)
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):  # rounded scores would be less exact
        scores = torch.bmm(queries, keys.mT, out_dtype=torch.float32)
    else:
        scores = torch.bmm(queries, keys.mT)
    scores = scores * (size**-0.5 if scaling is None else scaling)
    hidden = ~attention_mask[:, :, None]
    scores = scores.view(rows, num_keys, groups, tokens, -1).masked_fill(hidden, torch.finfo(scores.dtype).min)
    shares = scores.softmax(-1).to(value.dtype).view(*queries.shape[:2], -1)
    attended = torch.bmm(shares, values).view(rows, heads, tokens, values.shape[-1])
    return attended.transpose(1, 2).contiguous(), None


UNUSUAL = ("position_bias", "cache", "softcap", "s_aux")  # arguments that only `sdpa` knows or refuses
AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class LayerCode:
    """Compile the forward of each class of layers once. `options` are those of `torch.compile`."""

    def __init__(self, **options: Any) -> None:
        self._options, self._compiled = options, dict[type, Callable[..., Any]]()

    def of(self, layer: nn.Module) -> Callable[..., Any]:
        """Return a function of such a layer and its arguments, for any number of tokens and size of the cache."""
        if type(layer) not in self._compiled:
            # The compiler limits the versions of a code object.
            own = types.FunctionType(_forward_of_class.__code__.replace(), globals())
            self._compiled[type(layer)] = torch.compile(own, dynamic=True, fullgraph=True, **self._options)
        return self._compiled[type(layer)]


def _forward_of_class(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def fast_copy(model: PreTrainedModel, code: LayerCode | None) -> PreTrainedModel:
    """
    Return a copy of a model whose modules share all parameters and buffers with it, also those that replace them.

    `sdpa` attention becomes [`grouped_attention`]. With `code`, repeated layers are compiled. The copy takes caches of
    [`~osd_hf.decoding.forward.RaggedLayer`].
    """
    modules, configs = dict[int, Any](), dict[int, Any]()

    def config_of(config: Any) -> Any:
        if id(config) not in configs:
            configs[id(config)] = copied = copy.copy(config)
            if getattr(config, "_attn_implementation_internal", None) == "sdpa":
                copied._attn_implementation_internal = GROUPED
        return configs[id(config)]

    def copy_of(module: Any) -> Any:
        if id(module) not in modules:
            modules[id(module)] = copied = copy.copy(module)
            children = {name: None if child is None else copy_of(child) for name, child in module._modules.items()}
            vars(copied)["_modules"] = children
            if "config" in vars(module):
                vars(copied)["config"] = config_of(module.config)
        return modules[id(module)]

    copied: PreTrainedModel = copy_of(model)
    if code is not None:
        for layers in [module for module in copied.modules() if isinstance(module, nn.ModuleList)]:
            _compile_layers(layers, code)
    return copied


class _OneLayer:
    """A cache as a layer sees it, which is the same for all layers, so that they share their code."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.layer.update(key_states, value_states)
        return found


def _with_index(layer: nn.Module) -> list[nn.Module]:
    return [module for module in layer.modules() if isinstance(vars(module).get("layer_idx"), int)]


def _compile_layers(layers: nn.ModuleList, code: LayerCode) -> None:
    """Compile layers if each uses one layer of the cache."""
    indices: list[set[int]] = [{vars(m)["layer_idx"] for m in _with_index(layer)} for layer in layers]
    if any(len(found) != 1 for found in indices):
        return
    for layer, (index,) in zip(layers, indices, strict=True):
        for module in _with_index(layer):
            vars(module)["layer_idx"] = 0

        vars(layer)["forward"] = functools.partial(_run_layer, code.of(layer), layer, index)


def _run_layer(run: Callable[..., Any], layer: nn.Module, index: int, *args: Any, **kwargs: Any) -> Any:
    def seen(value: Any) -> Any:
        return _OneLayer(value.layers[index]) if isinstance(value, Cache) else value

    return run(layer, *map(seen, args), **{name: seen(value) for name, value in kwargs.items()})
