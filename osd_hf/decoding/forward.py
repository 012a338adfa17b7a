"""Verify the candidates of one row by the target, eagerly, with any cache that can remove tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)

from osd_hf.utils.context import to_device

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


class TargetForward:
    """Verify the candidates of one row, as transformers' assisted loop does, with any cache that it can crop. `kwargs`
    are the arguments of the loop. The cache holds `num_cached` tokens of the prompt already."""

    def __init__(
        self, model: PreTrainedModel, input_ids: Tensor, kwargs: dict[str, Any], num_cached: int | None = None
    ) -> None:
        self.model, self.ids = model, input_ids
        self.kwargs = forward_arguments(kwargs)
        self.outputs: Any = None
        self._num_cached, self._count = num_cached or 0, 0
        self._is_plain_cache: bool | None = None
        self._usual = self._usual_inputs(int(kwargs["generation_config"].max_length))
        self.kwargs["past_key_values"].activate_past_recording()

    @property
    def cache(self) -> Any:
        """The cache that `generate` returns."""
        return self.kwargs["past_key_values"]

    def _usual_inputs(self, max_length: int) -> dict[str, Any] | None:
        """Return the inputs of all forwards after the first one, with the mask and positions of the longest sequence,
        if the model prepares them as usual. That takes less time than preparing each."""
        own = (type(self.model).prepare_inputs_for_generation, type(self.model)._update_model_kwargs_for_generation)
        usual = GenerationMixin.prepare_inputs_for_generation, GenerationMixin._update_model_kwargs_for_generation
        inputs = {name: value for name, value in self.kwargs.items() if value is not None}
        moving = {name: inputs.pop(name) for name in ("attention_mask", "position_ids") if name in inputs}
        if (
            own != usual
            or "prepare_inputs_for_generation" in vars(self.model)  # PEFT replaces it
            or self.model.is_remote_code()
            or self.model.config.is_encoder_decoder
            or type(inputs.pop("past_key_values")) is not DynamicCache
            or not inputs.keys() <= USUAL_ARGUMENTS
            or any(value.shape != self.ids.shape for value in moving.values())
        ):
            return None
        more = torch.ones(1, max_length - self.ids.shape[1], dtype=torch.long, device=self.ids.device)
        for name, value in moving.items():
            following = more if name == "attention_mask" else more.cumsum(1) + value[:, -1:]
            inputs[name] = torch.cat([value, following.to(value)], 1)
        return inputs

    def verify(self, tokens: Tensor, is_proposed: Tensor) -> Tensor:
        """Return the logits at each candidate and behind the last one, `(1, k + 1, vocab)`."""
        self._count = count = tokens.shape[1]
        ids, is_first = torch.cat([self.ids, tokens], 1), self.outputs is None
        inputs = self._inputs(ids, count + 1) if is_first or self._usual is None else self._next_inputs(ids, count + 1)
        self.outputs = self.model(**inputs, return_dict=True)
        return self.outputs.logits[:, -count - 1 :]  # type: ignore[no-any-return]

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
            inputs["logits_to_keep"] = count
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
        tokens = to_device(emitted, self.ids.device)
        count = tokens.shape[1]
        cache = self.outputs.past_key_values
        if cache is not self.cache:
            cache.activate_past_recording()
        if self._is_plain_cache is None:
            self._is_plain_cache = all(type(layer) is DynamicLayer for layer in getattr(cache, "layers", (None,)))
        rejected = self._count + 1 - count
        if rejected or not self._is_plain_cache:  # sliding windows need this call after every round
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
        """Do nothing: the request ends with its only row."""
