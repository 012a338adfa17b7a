"""Run the forwards of a round over several independent rows, or over one row by static forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from osd_hf.utils.context import to_device

AHEAD = 256  # tokens of an answer in a request's first cache; longer answers move to larger caches
GROWTH = 1.5  # of a full cache
# A mask hides the unused end of a cache; attention by lengths would see it.
MASKED_ATTENTION = ("sdpa", "eager", None)
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers in configurations


class _Place:
    """Where the tokens of a forward are written: rows, `(rows, 1)`, and columns, `(rows, tokens)`. The first `width`
    columns are read."""

    rows: Tensor
    columns: Tensor
    width = 0


class RaggedLayer(DynamicLayer):
    """Keys and values of one layer, `(rows, heads, size, head size)`, each at the column of its position."""

    keys: Tensor
    values: Tensor

    def __init__(self, place: _Place) -> None:
        super().__init__()
        self.place = place

    def load(self, layer: Any, padding: Sequence[int], rows: int, size: int) -> None:
        """Copy the content of another layer, without the padding of each row."""
        if not self.is_initialized:
            self.lazy_initialization(layer.keys, layer.values)
            self.keys, self.values = (x.new_zeros(rows, x.shape[1], size, x.shape[3]) for x in _states(layer))
        for mine, theirs in zip(_states(self), _states(layer), strict=True):
            for row, pad in enumerate(padding):
                mine[row, :, : theirs.shape[2] - pad] = theirs[row, :, pad:]

    def resize(self, rows: int, size: int) -> None:
        """Move the content of the first rows to larger tensors."""
        resized = []
        for old in _states(self):
            new = old.new_zeros(
                rows, old.shape[1], size, old.shape[3]
            )  # unused columns are masked, but must be finite
            new[:, :, : old.shape[2]] = old[:rows]
            resized.append(new)
        self.keys, self.values = resized

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, columns = self.place.rows.to(self.keys.device), self.place.columns.to(self.keys.device)
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            new = new.to(kept.dtype)  # autocast may use another dtype
            if len(kept) == 1:
                kept.index_copy_(2, columns[0], new)
            else:
                kept[rows, :, columns] = new.transpose(1, 2)
        held, width = len(rows), self.place.width
        return self.keys[:held, :, :width], self.values[:held, :, :width]

    def get_seq_length(self) -> int:
        return self.place.width - self.place.columns.shape[1]


def _states(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values


class Ragged:
    """
    Rows of different lengths in one cache. Each token is written at the column of its position, so a round overwrites
    what was rejected, and rows go on independently without moving anything.

    The cache is loaded with the prompts. Later it grows, unless static forwards need a fixed `size`.
    """

    def __init__(self, model: PreTrainedModel, rows: int, size: int) -> None:
        self.model, self.rows, self.size = model, rows, size
        self.capacity = rows
        self.device = None if model.device.type == "meta" else model.device  # offloaded weights have no device
        self.place = _Place()
        self.cache = DynamicCache()
        config = model.config.get_text_config(decoder=True)
        self._is_additive = config._attn_implementation == "eager"
        self._window = getattr(config, "sliding_window", None)
        self._has_kinds = getattr(config, "layer_types", None) is not None
        self._kinds = set(config.layer_types if self._has_kinds else [SLIDING] if self._window else ())

    def load(self, cache: DynamicCache, padding: Sequence[int]) -> None:
        """Copy the content of a cache with padded rows."""
        self.rows = len(padding)
        self.cache.layers = self.cache.layers or [RaggedLayer(self.place) for _ in cache.layers]
        self.size = max(self.size, cache.get_seq_length())
        for new, old in zip(self.cache.layers, cache.layers, strict=True):
            new.load(old, padding, self.capacity, self.size)

    def feed(self, ids: Tensor, starts: Sequence[int], last: Tensor | None = None, **settings: Any) -> Tensor:
        """Return the logits after tokens, `(rows, tokens, vocab)`, which begin at these columns. Positions are at most
        `last`, `(rows, 1)`."""
        device, width = self.device or ids.device, max(starts) + ids.shape[1]
        if width > self.size:
            self.size, self.capacity = max(width + AHEAD, int(GROWTH * self.size)), self.rows
            for layer in self.cache.layers:
                layer.resize(self.rows, self.size)
        last = None if last is None else last.to(device)
        return self.forward(self.model, ids.to(device), to_device(starts, device)[:, None], last, width, **settings)

    def forward(
        self, model: PreTrainedModel, ids: Tensor, starts: Tensor, last: Tensor | None, width: int, **settings: Any
    ) -> Tensor:
        """Return the logits of tokens, from `starts` on, `(rows, 1)`, on the device. The first `width` columns are
        read."""
        columns = starts + torch.arange(ids.shape[1], device=ids.device)
        self.place.rows = torch.arange(len(ids), device=ids.device)[:, None]
        self.place.columns = columns
        self.place.width = width
        logits: Tensor = model(
            input_ids=ids,
            attention_mask=self._mask(model, columns, width),
            position_ids=columns if last is None else columns.minimum(last),
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            **settings,
        ).logits
        return logits

    def _mask(self, model: PreTrainedModel, columns: Tensor, width: int) -> Any:
        """Return the mask in the form that the model takes: a token sees its row up to itself, or a window of it."""
        at, columns = torch.arange(width, device=columns.device), columns[:, None, :, None]
        masks = {FULL: at <= columns}
        if SLIDING in self._kinds:
            masks[SLIDING] = masks[FULL] & (at > columns - int(self._window or 0))
        if self._is_additive:
            dtype = model.dtype
            lowest, zero = torch.finfo(dtype).min, torch.zeros((), dtype=dtype, device=columns.device)
            masks = {kind: zero.where(mask, lowest) for kind, mask in masks.items()}
        if SLIDING not in self._kinds:
            return masks[FULL]
        return {kind: masks[kind] for kind in self._kinds} if self._has_kinds else masks[SLIDING]

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.rows -= 1
        for layer in self.cache.layers if row < self.rows else ():
            for states in (layer.keys, layer.values):
                states[row] = states[self.rows]


def read_padded(
    model: PreTrainedModel,
    ids: Tensor,
    padding: Sequence[int],
    cache: DynamicCache,
    max_positions: int | None = None,
    **settings: Any,
) -> Tensor:
    """Read rows, `(rows, tokens)`, that begin with padding, into a cache; return their logits. Those of rows with more
    than `max_positions` mean nothing."""
    cache.activate_past_recording()
    positions = torch.arange(ids.shape[1], device=ids.device) - to_device(padding, ids.device)[:, None]
    last = None if max_positions is None else max_positions - 1
    logits: Tensor = model(
        input_ids=ids,
        attention_mask=(positions >= 0).long(),
        position_ids=positions.clamp(min=0, max=last),
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
        **settings,
    ).logits
    return logits
