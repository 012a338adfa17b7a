"""Attention on CPUs over a few tokens, without copies of the keys and values that heads share."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["fold", "this_thread"]

MOST_FOLDED = 64  # tokens whose attention reads keys and values where they are, once for all heads that share them

_asked = ALL_ATTENTION_FUNCTIONS["sdpa"]
_SDPA = getattr(_asked, "own", _asked)  # a copy of this module may have been first
# `blocks`: the layers of each `fast_kernels` that this thread is inside; `left`: products that wait to be taken.
this_thread = threading.local()


class _Folded:
    """transformers' own attention. Over several tokens with a mask it copies keys and values for all heads that share
    them, at each layer; a few tokens are laid side by side with the heads instead, which changes nothing else."""

    def __init__(self) -> None:
        self.own = self.over = _SDPA

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if torch.compiler.is_compiling():
            return self.own(module, query, key, value, attention_mask, **kwargs)
        groups, (rows, heads, tokens, _) = getattr(module, "num_key_value_groups", 1), query.shape
        if (
            not getattr(this_thread, "blocks", ())
            or groups == 1
            or not 1 < tokens <= MOST_FOLDED
            or attention_mask is None
            or attention_mask.ndim != 4
            or attention_mask.shape[1] not in (1, heads)
            or attention_mask.shape[2] != tokens
            or query.device.type != "cpu"
            or torch.is_grad_enabled()
            or kwargs.get("position_bias") is not None
            or kwargs.get("cache") is not None
            or kwargs.get("softcap") is not None
            or heads != groups * key.shape[1]
        ):
            return self.over(module, query, key, value, attention_mask, **kwargs)
        shared = key.shape[1]
        if attention_mask.shape[1] == 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
        else:
            attention_mask = attention_mask.reshape(len(attention_mask), shared, groups * tokens, -1)
        output = torch.nn.functional.scaled_dot_product_attention(
            query.reshape(rows, shared, groups * tokens, -1), key, value, attn_mask=attention_mask,
            dropout_p=kwargs.get("dropout", 0.0), scale=kwargs.get("scaling"),
        )  # fmt: skip
        return output.reshape(rows, heads, tokens, -1).transpose(1, 2).contiguous(), None


_folded = _Folded()


def fold() -> None:
    """Have transformers ask `_folded`. A copy of this module, as drafts carry one, that is asked now is asked by it in
    turn; what others have put there stays."""
    asked = below = ALL_ATTENTION_FUNCTIONS["sdpa"]
    while below is not _folded and hasattr(below, "over"):
        below = below.over
    if below is _SDPA:
        _folded.over = asked
        ALL_ATTENTION_FUNCTIONS.register("sdpa", _folded)
