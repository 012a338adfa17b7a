"""Run the eager forwards of a round, of the draft and of the target, over one row or several independent ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)

from osd_hf.decoding.draft_length import MAX_K

AHEAD = 256  # tokens of an answer in a request's first cache; longer answers move to larger caches
# A mask hides the unused end of a cache; attention by lengths would see it.
MASKED_ATTENTION = ("sdpa", "eager", None)
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers in configurations
GROWTH = 1.5  # of a full cache


# --- one row ---------------------------------------------------------------------------------------------------------


class DraftForward:
    """Run a draft over one row. `source` are further arguments of each forward, such as an encoder's outputs."""

    def __init__(
        self, draft: PreTrainedModel, source: dict[str, Any] | None = None, cache: Cache | None = None
    ) -> None:
        self.draft = draft
        self.device = draft.device  # looked up once: a model searches its parameters for it
        self.length = 0  # tokens in the cache
        self._ids_name = "decoder_input_ids" if draft.config.is_encoder_decoder else "input_ids"
        self._settings = {"use_cache": True, "return_dict": True, **(source or {})}
        if draft._supports_logits_to_keep():
            self._settings["logits_to_keep"] = 1
        if cache is None:
            config = draft.config.get_text_config(decoder=True)
            cache = DynamicCache(config=config)
            if draft.config.is_encoder_decoder:
                cache = EncoderDecoderCache(cache, DynamicCache(config=config))
        self._use(cache)

    def _use(self, cache: Any) -> None:
        self.cache = self._settings["past_key_values"] = cache
        cache.activate_past_recording()

    def feed(self, ids: Tensor) -> Tensor:
        """Append tokens, `(1, tokens)`; return the raw logits after the last one, `(1, vocab)`."""
        logits: Tensor = self.draft(**{self._ids_name: ids}, **self._settings).logits[:, -1]
        self.length += ids.shape[1]
        return logits

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. Called every round: sliding windows keep removable tokens until then."""
        self.cache.crop(length - self.length)
        self.length = length

    def read(self, texts: Sequence[Sequence[int]], room: int) -> Tensor:
        """Feed the tokens that were not read yet, and return the logits after the last one, `(rows, vocab)`. At most
        `room` candidates follow."""
        return self.feed(torch.tensor([texts[0][self.length :]], device=self.device))

    def keep(self, row: int, length: int) -> None:
        """Keep the first `length` tokens of a row, and at most those that were read."""
        if self.length:  # sliding windows need this call after every round
            self.crop(min(self.length, length))

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""

    def close(self) -> None:
        """End the request."""


# Arguments of transformers' loop that the model's forward does not take.
LOOP_ARGUMENTS = (
    "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer", "inputs_tensor",
    "assistant_model", "assistant_tokenizer", "tokenizer",
)  # fmt: skip


def forward_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the loop without those that the forward does not take."""
    return {name: value for name, value in kwargs.items() if name not in LOOP_ARGUMENTS}


class TargetForward:
    """Verify the candidates of one row, as transformers' assisted loop does, with any cache that it can crop. `kwargs`
    are the arguments of the loop. The cache holds `num_cached` tokens of the prompt already."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        kwargs: dict[str, Any],
        num_cached: int | None = None,
    ) -> None:
        self.model, self.ids = model, input_ids
        self.kwargs = forward_arguments(kwargs)
        self.outputs: Any = None
        self._num_cached, self._count = num_cached or 0, 0
        self.kwargs["past_key_values"].activate_past_recording()

    @property
    def cache(self) -> Any:
        """The cache that `generate` returns."""
        return self.kwargs["past_key_values"]

    def verify(self, tokens: Tensor, is_proposed: Tensor) -> Tensor:
        """Return the logits at each candidate and behind the last one, `(1, k + 1, vocab)`."""
        self._count = count = tokens.shape[1]
        ids = torch.cat([self.ids, tokens], dim=1)
        self.outputs = self.forward(ids, count + 1, is_first=self.outputs is None)
        return self.outputs.logits[:, -count - 1 :]  # type: ignore[no-any-return]

    def forward(self, ids: Tensor, count: int, *, is_first: bool) -> Any:
        """Return the model's outputs for the last `count` tokens of a sequence, `(1, tokens)`; at first, for all."""
        is_encoder_decoder = self.model.config.is_encoder_decoder
        kwargs = _prepare_attention_mask(copy.copy(self.kwargs), ids.shape[1], is_encoder_decoder)
        kwargs = _prepare_token_type_ids(kwargs, ids.shape[1])
        if (positions := kwargs.get("position_ids")) is not None and count > 1:
            kwargs = _prepare_position_ids(kwargs, positions.shape[-1] + count - 1, is_encoder_decoder)
        new_tokens = count
        if is_first:
            # A cache of an earlier turn holds a part of the prompt.
            new_tokens = ids.shape[1] - self._num_cached if self._num_cached else None  # type: ignore[assignment]
        inputs = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=new_tokens, is_first_iteration=is_first, **kwargs
        )
        if is_first and not self._num_cached:
            inputs["past_key_values"] = self.cache  # Phi-3 drops an empty one behind a length
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count
        return self.model(**inputs, return_dict=True)

    def keep(self, emitted: Sequence[Sequence[int]]) -> None:
        """Keep the emitted tokens of the row, and remove the rejected candidates from the cache."""
        tokens = torch.tensor(emitted, device=self.ids.device)
        count = tokens.shape[1]
        self.outputs.past_key_values.activate_past_recording()  # also where the model has made a new cache
        self.outputs.past_key_values.crop(-(self._count + 1 - count))
        self.kwargs = self.model._update_model_kwargs_for_generation(
            self.outputs, self.kwargs, is_encoder_decoder=self.model.config.is_encoder_decoder, num_new_tokens=count
        )
        self.ids = torch.cat([self.ids, tokens], dim=1)

    def leave(self, row: int) -> None:
        """Do nothing: the request ends with its only row."""

    def close(self) -> None:
        """End the request."""


# --- several rows ----------------------------------------------------------------------------------------------------


@dataclass
class _Place:
    """Where the tokens of a forward are written: rows, `(rows, 1)`, and columns, `(rows, tokens)`. The first `width`
    columns are read."""

    rows: Tensor
    columns: Tensor
    width: int


class _RaggedLayer(DynamicLayer):
    """Keys and values of one layer, each at the column of its position in its row."""

    keys: Tensor
    values: Tensor
    place: _Place

    def take_over(self, layer: DynamicLayer, padding: Sequence[int], size: int) -> None:
        """Move the content of a layer, without the padding of each row, to `size` columns."""
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = (_resized(part, size, padding) for part in (layer.keys, layer.values))
        layer.reset()

    def make_room(self, columns: int, rows: int) -> None:
        held = self.keys.shape[2]
        if columns > held:
            size = grown(held, columns)
            self.keys, self.values = (_resized(part[:rows], size) for part in (self.keys, self.values))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        place, device = self.place, self.keys.device
        rows, columns = place.rows.to(device), place.columns.to(device)
        self.keys[rows, :, columns] = key_states.transpose(1, 2).to(self.keys)  # autocast may use another dtype
        self.values[rows, :, columns] = value_states.transpose(1, 2).to(self.values)
        held = len(rows)
        return self.keys[:held, :, : place.width], self.values[:held, :, : place.width]

    def get_seq_length(self) -> int:
        return self.place.width - self.place.columns.shape[1]


def first_columns(tokens: int, max_new_tokens: int) -> int:
    """Return the columns of a new cache."""
    return tokens + min(max_new_tokens + MAX_K, AHEAD)


def grown(held: int, columns: int) -> int:
    """Return the columns of a cache that had `held`, and needs more."""
    return max(columns + AHEAD, int(GROWTH * held))


def _resized(states: Tensor, size: int, padding: Sequence[int] = ()) -> Tensor:
    """Copy states without the padding of each row to `size` columns. Unused columns are masked, but must be finite."""
    larger, held = states.new_zeros(*states.shape[:2], size, states.shape[3]), states.shape[2]
    for row, pad in enumerate(padding or [0] * len(states)):
        larger[row, :, : held - pad] = states[row, :, pad:]
    return larger


class Ragged:
    """Run the forwards of a model over rows of different lengths. Each token is written at the column of its position,
    so a round overwrites what was rejected, and rows go on independently without moving anything."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, padding: Sequence[int], size: int = 0) -> None:
        self.model = model
        self.rows = len(padding)
        self._device = None if model.device.type == "meta" else model.device  # offloaded weights have no device
        size = max(size, cache.get_seq_length())
        layers = [_RaggedLayer() for _ in cache.layers]
        for new, old in zip(layers, cache.layers, strict=True):
            new.take_over(old, padding, size)
        self.cache = DynamicCache()
        self.cache.layers = layers
        config = model.config.get_text_config(decoder=True)
        self._is_additive = config._attn_implementation == "eager"
        self._window = getattr(config, "sliding_window", None)
        self._has_kinds = getattr(config, "layer_types", None) is not None
        self._kinds = set(config.layer_types if self._has_kinds else [SLIDING] if self._window else ())

    def feed(self, ids: Tensor, starts: Sequence[int], last: Tensor | None = None, **settings: Any) -> Tensor:
        """Return the logits after tokens, `(rows, tokens, vocab)`."""
        device, count, width = self._device or ids.device, ids.shape[1], max(starts) + ids.shape[1]
        ids, last = ids.to(device), None if last is None else last.to(device)
        columns = torch.tensor(starts, device=device)[:, None] + torch.arange(count, device=device)
        place = _Place(torch.arange(self.rows, device=device)[:, None], columns, width)
        for layer in self.cache.layers:
            layer.make_room(width, self.rows)
            layer.place = place
        logits: Tensor = self.model(
            input_ids=ids,
            attention_mask=self._mask(columns, width),
            position_ids=columns if last is None else columns.minimum(last),
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            **settings,
        ).logits
        return logits

    def _mask(self, columns: Tensor, width: int) -> Any:
        """Return the mask in the form that the model takes: a token sees its row up to itself, or a window of it."""
        at, columns = torch.arange(width, device=columns.device), columns[:, None, :, None]
        masks = {FULL: at <= columns}
        if SLIDING in self._kinds:
            masks[SLIDING] = masks[FULL] & (at > columns - int(self._window or 0))
        if self._is_additive:
            dtype = self.model.dtype
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
    positions = torch.arange(ids.shape[1], device=ids.device) - torch.tensor(padding, device=ids.device)[:, None]
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


class BatchDraftForward:
    """Run a draft over several rows, each with its own length. The methods are those of [`DraftForward`]. For the
    draft, [`~osd_hf.decoding.exactness.batch_hindrance`] returns `None`."""

    def __init__(self, draft: PreTrainedModel, rows: int, max_positions: int | None) -> None:
        self.draft, self.device = draft, draft.device
        self._limit = max_positions
        self._settings = {"logits_to_keep": 1} if draft._supports_logits_to_keep() else {}
        self._ragged: Ragged | None = None
        self._read = [0] * rows  # tokens of each row in the cache
        self._known: list[int] = []  # tokens of each row before this round
        self._fed = 0  # candidates of the round that were fed

    def read(self, texts: Sequence[Sequence[int]], room: int) -> Tensor:
        self._known, self._fed = [len(text) for text in texts], 0
        count = max(len(text) - read for text, read in zip(texts, self._read, strict=True))
        if self._ragged is None or count > min(self._known):
            logits = self._prefill(texts, room)
        else:  # rows that have read more get their last tokens again, at the same positions
            ids = torch.tensor([list(text[-count:]) for text in texts], device=self.device)
            logits = self._feed(ids, [known - count for known in self._known])
        self._read = list(self._known)
        return logits

    def _prefill(self, texts: Sequence[Sequence[int]], room: int) -> Tensor:
        width = max(self._known)
        padding = [width - known for known in self._known]
        ids = torch.tensor(
            [[0] * pad + list(text) for pad, text in zip(padding, texts, strict=True)], device=self.device
        )
        cache = DynamicCache(config=self.draft.config.get_text_config(decoder=True))
        logits = read_padded(self.draft, ids, padding, cache, self._limit, **self._settings)
        self._ragged = Ragged(self.draft, cache, padding, first_columns(width, room))
        return logits[:, -1]

    def feed(self, ids: Tensor) -> Tensor:
        logits = self._feed(ids, [known + self._fed for known in self._known])
        self._fed += 1
        self._read = [known + self._fed for known in self._known]
        return logits

    def _feed(self, ids: Tensor, starts: Sequence[int]) -> Tensor:
        assert self._ragged is not None
        last = None
        if self._limit is not None and max(starts) + ids.shape[1] > self._limit:
            last = torch.full_like(ids[:, :1], self._limit - 1)
        return self._ragged.feed(ids, starts, last, **self._settings)[:, -1]

    def keep(self, row: int, length: int) -> None:
        self._read[row] = min(self._read[row], length)

    def leave(self, row: int) -> None:
        last = self._read.pop()
        if row < len(self._read):
            self._read[row] = last
        if self._ragged is not None:
            with torch.inference_mode():
                self._ragged.leave(row)


class BatchTargetForward:
    """Verify the candidates of several rows, which continue independently. `kwargs` are the arguments of the loop,
    `texts` the prompts without padding. For the model, [`~osd_hf.decoding.exactness.batch_hindrance`] returns
    `None`."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        kwargs: dict[str, Any],
        texts: Sequence[Sequence[int]],
        max_new_tokens: int,
    ) -> None:
        self.model, self.input_ids, self.kwargs = model, input_ids, forward_arguments(kwargs)
        self._padding = [input_ids.shape[1] - len(text) for text in texts]
        self._known, self._newest = [len(text) for text in texts], [text[-1] for text in texts]
        self._max_new_tokens = max_new_tokens
        self._ragged: Ragged | None = None

    def verify(self, tokens: Tensor, is_proposed: Tensor) -> Tensor:
        """Return the logits at each candidate and behind the last one, `(rows, k + 1, vocab)`."""
        if self._ragged is None:
            return self._prefill(tokens)[:, -tokens.shape[1] - 1 :]
        newest = torch.tensor(self._newest, device=tokens.device)[:, None]
        starts = [known - 1 for known in self._known]
        last = torch.tensor(starts, device=tokens.device)[:, None] + is_proposed.sum(1, keepdim=True)
        return self._ragged.feed(torch.cat([newest, tokens], 1), starts, last)

    def _prefill(self, tokens: Tensor) -> Tensor:
        """Read the prompts and the first candidates by a forward such as that of transformers' loop."""
        kwargs, count = dict(self.kwargs), tokens.shape[1]
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is not None:
            kwargs["attention_mask"] = torch.cat([mask, torch.ones_like(tokens, dtype=mask.dtype)], 1)
        if positions is not None:
            following = positions[:, -1:] + 1 + torch.arange(count, device=positions.device)
            kwargs["position_ids"] = torch.cat([positions, following], 1)
        kwargs["past_key_values"].activate_past_recording()
        inputs = self.model.prepare_inputs_for_generation(
            torch.cat([self.input_ids, tokens], 1), next_sequence_length=None, is_first_iteration=True, **kwargs
        )
        inputs["past_key_values"] = kwargs["past_key_values"]  # Phi-3 drops an empty one behind a length
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count + 1
        logits: Tensor = self.model(**inputs, return_dict=True).logits
        columns = first_columns(self.input_ids.shape[1], self._max_new_tokens)
        self._ragged = Ragged(self.model, kwargs["past_key_values"], self._padding, columns)
        return logits

    def keep(self, emitted: Sequence[Sequence[int]]) -> None:
        """Keep the emitted tokens of each row. Rejected candidates are overwritten by the next round."""
        self._known = [known + len(tokens) for known, tokens in zip(self._known, emitted, strict=True)]
        self._newest = [tokens[-1] for tokens in emitted]

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        assert self._ragged is not None
        for state in (self._known, self._newest):
            last = state.pop()
            if row < len(state):
                state[row] = last
        self._ragged.leave(row)
