"""Verify the candidates of one row with any cache that can remove tokens, and read rows of a ragged cache."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)

from osd_hf.draft_head import joined
from osd_hf.models import model_masks
from osd_hf.utils.context import to_device

AHEAD = 256  # tokens of an answer in a request's first cache; longer answers move to larger caches
GROWTH = 1.5  # of a full cache
MAX_LAG = 24  # tokens that a forward may read again and verify, where recurrent states were rolled back
# A mask hides the unused end of a cache; attention by lengths would see it.
MASKED_ATTENTION = ("sdpa", "eager", None)
# Kinds of layers with states in configurations.
STATE_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# Arguments of transformers' loop that the model's forward does not take.
LOOP_ARGUMENTS = (
    "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer", "inputs_tensor",
    "assistant_model", "assistant_tokenizer", "tokenizer",
)  # fmt: skip
# Other arguments of the loop under which forwards after the first one differ in their ids, mask, and positions alone.
USUAL_ARGUMENTS = {"use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"}


def forward_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the loop without those that the forward does not take."""
    return {name: value for name, value in kwargs.items() if name not in LOOP_ARGUMENTS}


def asking_for_states(kwargs: dict[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of the loop with a request for hidden states, unless the caller asks for all of them."""
    return kwargs if kwargs.get("output_hidden_states") else {**kwargs, "output_hidden_states": list(layers)}


def layers_with_state(model: PreTrainedModel) -> set[int]:
    """Return the numbers of the layers with recurrent or convolutional states."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return {i for i, kind in enumerate(kinds) if kind in STATE_KINDS}


class RecurrentStates:
    """
    Take rows of the recurrent and convolutional states of a cache back to where the states were saved. There are no
    states for the positions between, so tokens that were accepted behind that position are read again.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._saved: list[Tensor] = []
        self.settle([True])

    @classmethod
    def of(cls, cache: Any) -> RecurrentStates | None:
        """Return the states of a cache that was filled; `None` if all its layers can be cropped."""
        layers = [x for x in getattr(cache, "layers", ()) if isinstance(x, LinearAttentionCacheLayerMixin)]
        return None if all(layer.is_croppable for layer in layers) else cls(cache)

    def _states(self) -> Iterator[tuple[dict[int, Tensor], int, Tensor, int]]:
        """Yield each state with its place and the size of its last dimension between forwards."""
        for layer in self._cache.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                for states in (layer.conv_states, layer.recurrent_states):
                    for i, state in states.items():
                        if state is not None:
                            is_conv = states is layer.conv_states
                            yield states, i, state, int(layer.conv_kernel_size[i]) if is_conv else state.shape[-1]

    def save(self) -> None:
        """Copy the states."""
        self._saved = [state.clone() for _, _, state, _ in self._states()]

    def settle(self, keeps: Sequence[bool]) -> None:
        """Keep the tokens that a row has read since the states were saved, or take the row back to that position."""
        for n, (states, i, state, width) in enumerate(self._states()):
            if state.shape[-1] != width:  # layers keep the inputs of convolutions; those of short prompts are few
                state = torch.nn.functional.pad(state, (width - state.shape[-1], 0))
            if not all(keeps):
                is_kept = to_device(keeps, state.device, torch.bool).view(-1, *[1] * (state.ndim - 1))
                state = state.where(is_kept, self._saved[n])
            states[i] = state

    def crop(self, count: int) -> None:
        """Keep all tokens of the only row (0), or remove those since the states were saved, `-count` tokens. Attention
        layers are cropped as well, so that a model reads the same tokens in all layers."""
        self.settle([count == 0])
        for layer in self._cache.layers:
            if not isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.crop(count)
            elif isinstance(layer, DynamicSlidingWindowLayer):
                DynamicSlidingWindowLayer.crop(layer, count)
            elif isinstance(layer, DynamicLayer):
                DynamicLayer.crop(layer, count)

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        for states, i, state, _ in self._states():
            state[row] = state[-1]
            states[i] = state[:-1]


def usual_inputs(model: PreTrainedModel, input_ids: Tensor, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the inputs of all forwards of a request after the first one, with the mask and positions of the longest
    sequence, if the model prepares them as usual. That takes less time than preparing each."""
    names = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
    has_own = any(getattr(type(model), name) is not getattr(GenerationMixin, name) for name in names)
    inputs = {name: value for name, value in forward_arguments(kwargs).items() if value is not None}
    moving = {name: inputs.pop(name) for name in ("attention_mask", "position_ids") if name in inputs}
    if (
        (has_own and not hasattr(model.config, "num_logits_to_keep"))  # what the methods of some models set
        or "prepare_inputs_for_generation" in vars(model)  # PEFT replaces it
        or model.is_remote_code()
        or model.config.is_encoder_decoder
        or type(inputs.pop("past_key_values")) is not DynamicCache
        or not inputs.keys() <= USUAL_ARGUMENTS
        or any(value.shape != input_ids.shape for value in moving.values())
    ):
        return None
    added = int(kwargs["generation_config"].max_length) - input_ids.shape[1]
    more = torch.ones(1, added, dtype=torch.long, device=input_ids.device)
    for name, value in moving.items():
        following = more if name == "attention_mask" else more.cumsum(1) + value[:, -1:]
        inputs[name] = torch.cat([value, following.to(value)], 1)
    return inputs


class TargetForward:
    """Verify the candidates of one row, as transformers' assisted loop does, with any cache that it can crop. `kwargs`
    are the arguments of the loop. The cache holds `num_cached` tokens of the prompt already. `state_layers` are the
    hidden states that a draft head reads."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        kwargs: dict[str, Any],
        num_cached: int | None = None,
        state_layers: Sequence[int] = (),
    ) -> None:
        self.model, self.ids = model, input_ids
        if state_layers:
            kwargs = asking_for_states(kwargs, state_layers)
        self._state_layers, self._padding = state_layers, 0  # before the prompt
        if isinstance(mask := kwargs.get("attention_mask"), Tensor) and mask.shape == input_ids.shape:
            self._padding = int((mask[0] == 0).sum())
        self.kwargs = forward_arguments(kwargs)
        self.outputs: Any = None
        self._num_cached, self._count = num_cached or 0, 0
        self.reread = 0  # known tokens that the last forwards read again
        self._states: RecurrentStates | None = None
        self._lag = 0  # known tokens behind the position of recurrent states, without the newest
        self._returns_cache = bool(kwargs["generation_config"].return_dict_in_generate)
        self._is_plain_cache: bool | None = None
        self._usual = usual_inputs(model, input_ids, kwargs)
        self.kwargs["past_key_values"].activate_past_recording()

    @property
    def cache(self) -> Any:
        """The cache that `generate` returns."""
        return self.kwargs["past_key_values"]

    def verify(self, tokens: Tensor, is_proposed: Tensor) -> Tensor:
        """Return the logits at each candidate and behind the last one, `(1, k + 1, vocab)`."""
        self._count = count = tokens.shape[1]
        self.reread = self._lag
        if count and self._lag + count > MAX_LAG:
            self._catch_up()
        if count and self._states is not None:
            self._states.save()
        ids, is_first = torch.cat([self.ids, tokens], 1), self.outputs is None
        is_prepared = is_first or self._usual is None
        inputs = self._inputs(ids, count + 1) if is_prepared else self._next_inputs(ids, self._lag + count + 1)
        self.outputs = self.model(**inputs, return_dict=True)
        if is_first:
            self._states = RecurrentStates.of(self.outputs.past_key_values)
            if self._states is not None and self._usual is None:
                raise NotImplementedError("its recurrent states are rolled back only where it prepares usual inputs")
        return self.outputs.logits[:, -count - 1 :]  # type: ignore[no-any-return]

    def states(self, row: int, count: int) -> Tensor:
        """Return the states of tokens that were known before the last forward and had none yet, and of its candidates:
        of as many as were emitted, `count`. They are in half precision, `(tokens, width)`."""
        states = joined(self.outputs.hidden_states, self._state_layers)[0]
        first = self._padding if len(states) > self._lag + self._count + 1 else len(states) - self._count - 1
        return states[first : len(states) - self._count - 1 + count]

    def _catch_up(self) -> None:
        """Read the known tokens behind the position of recurrent states, except for the newest."""
        if self._states is not None and self._lag:
            self.model(**self._next_inputs(self.ids[:, :-1], self._lag), return_dict=True)
            self._states.crop(0)
            self._lag = 0

    def _next_inputs(self, ids: Tensor, count: int) -> dict[str, Any]:
        """Return the usual inputs for the last `count` tokens of a sequence, `(1, tokens)`."""
        assert self._usual is not None
        end, inputs = ids.shape[1], {**self._usual, "input_ids": ids[:, -count:].clone()}
        inputs["past_key_values"] = self.cache
        if "attention_mask" in inputs:
            inputs["attention_mask"] = inputs["attention_mask"][:, :end]
        if "position_ids" in inputs:
            inputs["position_ids"] = inputs["position_ids"][:, end - count : end]
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = self._count + 1
        return inputs

    def _inputs(self, ids: Tensor, count: int) -> dict[str, Any]:
        """Let the model prepare the inputs for the last `count` tokens of a sequence; at first, for all."""
        is_encoder_decoder, is_first = self.model.config.is_encoder_decoder, self.outputs is None
        kwargs = _prepare_attention_mask(copy.copy(self.kwargs), ids.shape[1], is_encoder_decoder)
        kwargs = _prepare_token_type_ids(kwargs, ids.shape[1])
        if (positions := kwargs.get("position_ids")) is not None and count > 1:
            kwargs = _prepare_position_ids(kwargs, positions.shape[-1] + count - 1, is_encoder_decoder)
        new_tokens = count
        if is_first:
            # A cache of an earlier turn holds a part of the prompt.
            new_tokens = ids.shape[1] - self._num_cached if self._num_cached else None  # type: ignore[assignment]
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=new_tokens, is_first_iteration=is_first, **kwargs
        )
        if is_first and not self._num_cached:
            inputs["past_key_values"] = self.cache  # Phi-3 drops an empty one behind a length
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count
        return inputs

    def keep(self, emitted: Sequence[Sequence[int]]) -> None:
        """Keep the emitted tokens of the row, and remove the rejected candidates from the cache."""
        tokens = torch.tensor(emitted, device=self.ids.device)
        count = tokens.shape[1]
        cache = self.outputs.past_key_values
        if cache is not self.cache:
            cache.activate_past_recording()
        if self._is_plain_cache is None:
            self._is_plain_cache = all(type(layer) is DynamicLayer for layer in getattr(cache, "layers", (None,)))
        rejected = self._count + 1 - count
        if self._states is not None:
            self._states.crop(-(self._lag + self._count + 1) if rejected else 0)
            self._lag = self._lag + count if rejected else 0
        elif rejected or not self._is_plain_cache:  # sliding windows need this call after every round
            cache.crop(-rejected)
        if self._usual is None or cache is not self.cache:
            self._usual = None
            self.kwargs = self.model._update_model_kwargs_for_generation(
                self.outputs,
                self.kwargs,
                is_encoder_decoder=self.model.config.is_encoder_decoder,
                num_new_tokens=count,
            )
        self.ids = torch.cat([self.ids, tokens], 1)

    def leave(self, row: int) -> None:
        """End the request with its only row. A cache that is returned gets all tokens but the newest."""
        if self._returns_cache:
            self._catch_up()


# --- rows of different lengths ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def usual_tensors() -> Iterator[None]:
    """Create and change tensors of caches as usual ones, not as those of inference mode, without gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


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
        if getattr(layer, "keys", None) is None:  # it has no attention
            return
        if not self.is_initialized:
            self.lazy_initialization(layer.keys, layer.values)
            self.keys, self.values = (x.new_zeros(rows, x.shape[1], size, x.shape[3]) for x in _states(layer))
        for mine, theirs in zip(_states(self), _states(layer), strict=True):
            for row, pad in enumerate(padding):
                mine[row, :, : theirs.shape[2] - pad] = theirs[row, :, pad:]

    def resize(self, rows: int, size: int) -> None:
        """Move the content of the first rows to larger tensors."""
        resized = []
        for old in _states(self) if self.is_initialized else ():
            new = old.new_zeros(
                rows, old.shape[1], size, old.shape[3]
            )  # unused columns are masked, but must be finite
            new[:, :, : old.shape[2]] = old[:rows]
            resized.append(new)
        if resized:
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


class RaggedStateLayer(RaggedLayer, LinearAttentionAndFullAttentionLayer):
    """Recurrent and convolutional states of a layer, which may have attention as well. [`RecurrentStates`] takes them
    back."""

    is_croppable = False  # convolutional states have no columns

    def load(self, layer: Any, padding: Sequence[int], rows: int, size: int) -> None:
        for name in vars(LinearAttentionLayer()):
            setattr(self, name, copy.deepcopy(getattr(layer, name)))
        super().load(layer, padding, rows, size)


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
        self.outputs: Any = None  # of the last eager forward

    def load(self, cache: DynamicCache, padding: Sequence[int]) -> None:
        """Copy the content of a cache with padded rows."""
        self.rows = len(padding)
        if not self.cache.layers:
            has_state = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers]
            self.cache.layers = [(RaggedStateLayer if state else RaggedLayer)(self.place) for state in has_state]
        for new, old in zip(self.cache.layers, cache.layers, strict=True):
            new.load(old, padding, self.capacity, self.size)

    def feed(self, ids: Tensor, starts: Sequence[int], last: Tensor | None = None, **settings: Any) -> Tensor:
        """Return the logits after tokens, `(rows, tokens, vocab)`, which begin at these columns. Positions are at most
        `last`, `(rows, 1)`."""
        device, width = self.device or ids.device, max(starts) + ids.shape[1]
        if width > self.size:
            self.size, self.capacity = max(width + AHEAD, int(GROWTH * self.size)), self.rows
            with usual_tensors():
                for layer in self.cache.layers:
                    layer.resize(self.rows, self.size)
        last = None if last is None else last.to(device)
        self.outputs = self.run(
            self.model, ids.to(device), to_device(starts, device)[:, None], last, width, **settings
        )
        logits: Tensor = self.outputs.logits
        return logits

    def forward(
        self, model: PreTrainedModel, ids: Tensor, starts: Tensor, last: Tensor | None, width: int, **settings: Any
    ) -> Tensor:
        """Return the logits of [`~Ragged.run`]."""
        logits: Tensor = self.run(model, ids, starts, last, width, **settings).logits
        return logits

    def run(
        self, model: PreTrainedModel, ids: Tensor, starts: Tensor, last: Tensor | None, width: int, **settings: Any
    ) -> Any:
        """Return the outputs of tokens, from `starts` on, `(rows, 1)`, on the device. The first `width` columns are
        read."""
        columns = starts + torch.arange(ids.shape[1], device=ids.device)
        self.place.rows = torch.arange(len(ids), device=ids.device)[:, None]
        self.place.columns = columns
        self.place.width = width
        # A token sees its row up to itself, or a window of it.
        distance = columns[:, None, :, None] - torch.arange(width, device=columns.device)
        return model(
            input_ids=ids,
            attention_mask=model_masks(model, distance >= 0, distance),
            position_ids=columns if last is None else columns.minimum(last),
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            **settings,
        )

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.rows -= 1
        for layer in self.cache.layers if row < self.rows else ():
            for states in _states(layer) if layer.is_initialized else ():
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
