"""What forwards of a target and of drafts take, timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from osd_hf.drafting import vocabulary
from osd_hf.drafting.forward import DraftForward
from osd_hf.errors import UnsupportedModelError
from osd_hf.models import unwrap, vocab_size_of
from osd_hf.speedup import ForwardSeconds
from osd_hf.utils.kernels import fast_kernels, unpack

__all__ = ["measured_costs"]

K = 5  # tokens of a round
LEAST_TURNS, MOST_TURNS, TIMED_SECONDS = 4, 64, 0.5


@torch.inference_mode()
def measured_costs(
    target: Any, drafts: Sequence[Any], prompt_ids: Sequence[int] | NDArray[np.int32], clock: Callable[[], float]
) -> list[ForwardSeconds]:
    """What forwards of the target and of each draft take, in turns, on the clock given. Of a large vocabulary a draft
    has a head of some thousand tokens, as it has where it serves traffic."""
    models = [unwrap(target), *map(_restricted, drafts)]
    prompt = torch.from_numpy(np.asarray(prompt_ids, np.int64))[None].to(models[0].device)
    with fast_kernels(*models, is_request=True):  # the second time weights are packed, as they are where they serve
        ends = [_Forward(model, prompt, clock) for model in models]
    turns, started = 0, clock()
    with fast_kernels(*models, is_request=True):
        while turns < LEAST_TURNS or (turns < MOST_TURNS and clock() - started < TIMED_SECONDS):
            for end in ends:
                end.feed(1)
            ends[0].feed(1 + K)
            turns += 1
    unpack(*models)
    read, one, several = (ends[0].least[n] for n in (0, 1, 1 + K))
    return [ForwardSeconds(one, max(several - one, 0.0) / K, end.least[1], read, end.least[0]) for end in ends[1:]]


def _restricted(draft: Any) -> Any:
    """As it drafts once the tokens are known that traffic uses."""
    if vocab_size_of(draft) < vocabulary.LEAST_VOCABULARY:
        return draft
    try:
        return vocabulary.RestrictedDraft(draft, np.arange(vocabulary.SIZES[1])).model
    except UnsupportedModelError:
        return draft


class _Forward:
    """A model that has read a prompt, and the least seconds of its forwards by the number of tokens; 0: the prompt."""

    def __init__(self, model: Any, prompt: torch.Tensor, clock: Callable[[], float]) -> None:
        self.clock, self.least = clock, dict[int, float]()
        for _ in range(2):  # the first time, much is set up
            started = clock()
            source: dict[str, Any] = {}
            if model.config.is_encoder_decoder:
                mask = torch.ones_like(prompt)
                source = {"attention_mask": mask, "encoder_outputs": model.get_encoder()(prompt, attention_mask=mask)}
                self.forward = DraftForward(model, source)
                self.forward.feed(prompt[:, :1])
            else:
                self.forward = DraftForward(model)
                self.forward.feed(prompt)
            self._took(0, started)
        self.ids = prompt[:, :1]

    def feed(self, tokens: int) -> None:
        """Time a forward over so many tokens, and take them back."""
        length, started = self.forward.length, self.clock()
        self.forward.feed(self.ids.expand(1, tokens))
        self._took(tokens, started)
        self.forward.crop(length)

    def _took(self, tokens: int, started: float) -> None:
        self.least[tokens] = min(self.clock() - started, self.least.get(tokens, np.inf))
