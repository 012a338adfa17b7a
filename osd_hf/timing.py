"""Measure the time of forwards of a target and of drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from osd_hf.decoding import vocabulary
from osd_hf.decoding.sources import DraftForward
from osd_hf.errors import UnsupportedModelError
from osd_hf.models import unwrap, vocab_size_of
from osd_hf.speedup import ForwardSeconds
from osd_hf.utils.kernels import fast_kernels, unpack

TIMED_K = 5
MIN_TURNS, MAX_TURNS = 4, 64
TIMED_SECONDS = 0.5


@torch.inference_mode()
def measured_costs(
    target: PreTrainedModel,
    drafts: Sequence[PreTrainedModel],
    prompt_ids: Sequence[int] | NDArray[np.int32],
    clock: Callable[[], float],
) -> list[ForwardSeconds]:
    """Time forwards of the target and of each draft, in turns. A draft with a large vocabulary has a head of some
    thousand tokens, as when it serves."""
    models = [unwrap(target), *map(_with_serving_vocabulary, drafts)]
    prompt = torch.from_numpy(np.asarray(prompt_ids, np.int64))[None].to(models[0].device)
    with fast_kernels(*models, is_request=True):  # weights are packed in the second block, as when they serve
        timed = [_TimedModel(model, prompt, clock) for model in models]
    turns, started = 0, clock()
    with fast_kernels(*models, is_request=True):
        while turns < MIN_TURNS or (turns < MAX_TURNS and clock() - started < TIMED_SECONDS):
            for model in timed:
                model.time_forward(1)
            timed[0].time_forward(1 + TIMED_K)
            turns += 1
    unpack(*models)
    one, several = timed[0].seconds[1], timed[0].seconds[1 + TIMED_K]
    more = max(several - one, 0.0) / TIMED_K
    return [
        ForwardSeconds(one, more, model.seconds[1], timed[0].prompt_seconds, model.prompt_seconds)
        for model in timed[1:]
    ]


def _with_serving_vocabulary(draft: PreTrainedModel) -> PreTrainedModel:
    if vocab_size_of(draft) < vocabulary.MIN_VOCAB_SIZE:
        return draft
    try:
        restricted: PreTrainedModel = vocabulary.RestrictedDraft(draft, np.arange(vocabulary.SIZES[1])).model
        return restricted
    except UnsupportedModelError:
        return draft


class _TimedModel:
    """A model that has read a prompt. `seconds` has the minimum time of its forwards by their number of tokens."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[int, float] = {}
        self.prompt_seconds = math.inf
        self.token = prompt[:, :1]
        for _ in range(2):  # the first time, much is set up
            started = clock()
            if model.config.is_encoder_decoder:
                mask = torch.ones_like(prompt)
                outputs = model.get_encoder()(prompt, attention_mask=mask)
                self.forward = DraftForward(model, {"attention_mask": mask, "encoder_outputs": outputs})
                self.forward.feed(self.token)
            else:
                self.forward = DraftForward(model)
                self.forward.feed(prompt)
            self.prompt_seconds = min(self.prompt_seconds, clock() - started)

    def time_forward(self, tokens: int) -> None:
        """Time a forward over new tokens, and remove them."""
        length, started = self.forward.length, self.clock()
        self.forward.feed(self.token.expand(1, tokens))
        self.seconds[tokens] = min(self.clock() - started, self.seconds.get(tokens, math.inf))
        self.forward.crop(length)
