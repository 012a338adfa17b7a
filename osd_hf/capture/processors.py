"""A logits processor with a memory, served exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor


class ReplayedProcessor(LogitsProcessor):
    """
    Serves a logits processor that remembers the tokens it has seen, such as the matcher of a grammar: before each call
    it is brought to where the sequence stands. Draft and target ask it in turns, also about tokens that are rejected
    later. Every request begins with a fresh one.

    ```python
    grammar = ReplayedProcessor(lambda: xgrammar.contrib.hf.LogitsProcessor(compiled))
    assistant.generate(**inputs, logits_processor=[grammar])
    ```

    What the processor remembers must follow from the tokens alone: calls that are repeated get another row of scores.

    Args:
        make (`Callable[[], LogitsProcessor]`):
            Makes a processor as it is when an answer begins: its first call is about the prompt, each later one about
            a token more.
        take_back (`Callable[[LogitsProcessor, int], object]`, *optional*):
            Makes a processor forget as many of its last calls, the very first excepted. Without it another one is made
            and called again for each token of the answer so far, which takes the longer the longer the answer.
    """

    def __init__(
        self, make: Callable[[], Callable[..., torch.Tensor]], take_back: Callable[[Any, int], object] | None = None
    ) -> None:
        self.make = make
        self.take_back = take_back
        self._starts_at: int | None = None  # tokens of the prompt, where a request says so
        self._processor: Callable[..., torch.Tensor] | None = None
        self._first = 0  # tokens at the first call of the processor
        self._seen = torch.zeros(1, 0, dtype=torch.long)  # what its last call was about

    def begin(self, prompt_tokens: int) -> ReplayedProcessor:
        """The same for one request, which nothing outside of it shares."""
        own = ReplayedProcessor(self.make, self.take_back)
        own._starts_at = prompt_tokens
        return own

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length, seen = input_ids.shape[1], self._seen
        common = _common(input_ids, seen)
        first = self._first if self._starts_at is None else min(self._starts_at, length)
        if self._starts_at is None and (common < first or length > seen.shape[1] + 1):
            first = length  # outside of an assisted request: another prompt
        known = min(common, length - 1)  # calls about more than these tokens are to be forgotten
        processor, self._processor = self._processor, None  # after an error its state is anybody's guess
        excess = seen.shape[1] - known
        if processor is not None and first == self._first and known >= first and (not excess or self.take_back):
            if excess and self.take_back is not None:
                self.take_back(processor, excess)
        else:
            processor, known = self.make(), first - 1
        for end in range(known + 1, length):
            processor(input_ids[:, :end], scores.clone())
        processed = processor(input_ids, scores)
        self._processor, self._first, self._seen = processor, first, input_ids.clone()
        return processed


def _common(a: torch.Tensor, b: torch.Tensor) -> int:
    """Number of tokens with which both begin."""
    length = min(a.shape[1], b.shape[1])
    if length == 0 or a.shape[0] != b.shape[0]:
        return 0
    same = (a[:, :length] == b[:, :length].to(a.device)).all(0)
    return length if bool(same.all()) else int(same.int().argmin())
