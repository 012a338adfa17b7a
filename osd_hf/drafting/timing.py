"""What forwards of a target and of drafts take, timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from osd_hf.drafting import vocabulary
from osd_hf.drafting.forward import DraftForward
from osd_hf.drafting.translated import TranslatedDraft
from osd_hf.errors import UnsupportedModelError
from osd_hf.pair import unwrap, vocab_size_of
from osd_hf.speedup import ForwardSeconds
from osd_hf.trace import num_accepted
from osd_hf.translation import Translation
from osd_hf.utils.kernels import fast_kernels, unpack

__all__ = ["measured_costs"]

K = 5  # tokens of a round
LEAST_TURNS, MOST_TURNS, TIMED_SECONDS = 4, 64, 0.5
MOST_ROUNDS = 16  # that are timed of a draft with a tokenizer of its own


@torch.inference_mode()
def measured_costs(
    target: Any, drafts: Sequence[Any], prompt_ids: Sequence[int] | NDArray[np.int32], clock: Callable[[], float], *,
    translations: Sequence[Translation | None] | None = None, answer: Sequence[int] = (),
) -> list[ForwardSeconds]:  # fmt: skip
    """What forwards of the target and of each draft take, in turns, on the clock given. Of a large vocabulary a draft
    has a head of some thousand tokens, as it has where it serves traffic. One with a translation drafts, in rounds of
    `K` tokens, what the target answers to the prompt."""
    translations = translations or [None] * len(drafts)
    models = [unwrap(target)]
    models += [_restricted(d) if made is None else d for d, made in zip(drafts, translations, strict=True)]
    prompt = torch.from_numpy(np.asarray(prompt_ids, np.int64))[None].to(models[0].device)
    with fast_kernels(*models, is_request=True):  # the second time weights are packed, as they are where they serve
        ends = [
            _Forward(model, prompt, clock) if made is None else _Rounds(model, prompt, clock, made, answer)
            for model, made in zip(models, [None, *translations], strict=True)
        ]
    turns, started = 0, clock()
    with fast_kernels(*models, is_request=True):
        while turns < LEAST_TURNS or (turns < MOST_TURNS and clock() - started < TIMED_SECONDS):
            for end in ends:
                end.feed(1)
            ends[0].feed(1 + K)
            turns += 1
    unpack(*models)
    read, one, several = (ends[0].least[n] for n in (0, 1, 1 + K))
    return [ForwardSeconds(one, max(several - one, 0.0) / K, end.token, read, end.least[0]) for end in ends[1:]]


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

    @property
    def token(self) -> float:
        """Seconds of a drafted token."""
        return self.least[1]

    def feed(self, tokens: int) -> None:
        """Time a forward over so many tokens, and take them back."""
        length, started = self.forward.length, self.clock()
        self.forward.feed(self.ids.expand(1, tokens))
        self._took(tokens, started)
        self.forward.crop(length)

    def _took(self, tokens: int, started: float) -> None:
        self.least[tokens] = min(self.clock() - started, self.least.get(tokens, np.inf))


class _Rounds(_Forward):
    """A draft with a tokenizer of its own that has read a prompt, and the least seconds of each of the first rounds of
    an answer, which are the same each time it begins again; in `least`, -1 is the first of them."""

    def __init__(
        self, model: Any, prompt: torch.Tensor, clock: Callable[[], float], translation: Translation,
        answer: Sequence[int],
    ) -> None:  # fmt: skip
        self.limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        reading = translation.read(prompt[0].tolist())
        if reading is None or not 0 < len(reading.ids) <= (self.limit or len(reading.ids)):
            reading = None  # nothing is ever said then
        self.prompt = prompt.new_tensor([[0] if reading is None else reading.ids])
        super().__init__(model, self.prompt, clock)
        self.translation, self.reading, self.answer = translation, reading, [int(token) for token in answer]
        self.said = dict[int, int]()  # tokens of the target, by the number of the round
        self._begin()

    @property
    def token(self) -> float:
        """Seconds of a token of the target, all that is said for it and reading what was answered included."""
        return sum(self.least[-1 - number] for number in self.said) / max(sum(self.said.values()), 1)

    def feed(self, tokens: int) -> None:
        """Time the next round, whatever the number of tokens."""
        if self.round == MOST_ROUNDS or self.at >= len(self.answer):
            self._begin()
        proposed, started = list[int](), self.clock()
        while len(proposed) < K and (found := self.draft.next(proposed, reads_confidence=False)) is not None:
            proposed.append(found[0])
        emitted = self.answer[self.at :][: num_accepted(proposed, self.answer[self.at :]) + 1]
        self.draft.settle(emitted)
        self._took(-1 - self.round, started)
        self.said[self.round] = len(proposed)
        self.at += len(emitted)
        self.round += 1

    def _begin(self) -> None:
        """The answer begins again."""
        self.at = self.round = 0
        self.forward.begin()
        self.forward.feed(self.prompt)
        self.draft = TranslatedDraft(self.translation, self.forward, self.reading, self.limit)
