"""An answer while it grows: the tokens of each round, their text, and how it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

INCOMPLETE = "\ufffd"  # what an unfinished character decodes to
MOST_PENDING = 4  # tokens of one character, which has four bytes at most


class Rounds(BaseStreamer):
    """Hands on the tokens of each round as the loop emits them, and tells when the last one has been."""

    def __init__(self, take: Callable[[list[int]], object], ended: Callable[[], object] = lambda: None) -> None:
        self._take, self._ended = take, ended
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._take(value.reshape(-1).tolist())

    def end(self) -> None:
        self._ended()


class Stop(StoppingCriteria):
    """Ends an answer that nobody waits for any more."""

    is_stateless = True  # a stop that comes while the criterion is checked would pass for its memory

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._stop.is_set(), device=input_ids.device)


class Pieces:
    """Decodes an answer token by token, without special tokens; the pieces joined are the text of the whole. A token
    that ends in the middle of a character shows nothing, and the one that completes it shows the whole character. What
    no character can come of any more is shown a few tokens later."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Decoding begins at a token that was shown already: what a token looks like depends on the one before it.
        self._begin = self._shown = 0
        self.texts: list[str] = []

    def push(self, ids: Iterable[int]) -> None:
        """The next tokens of the answer."""
        for token in ids:
            self._ids.append(token)
            before = self._decode(self._ids[self._begin : self._shown])
            now = self._decode(self._ids[self._begin :])
            # Decoding does not begin at a token that shows nothing, such as a special one.
            end = len(self._ids)
            if now == before or now.endswith(INCOMPLETE):
                end = max(end - MOST_PENDING, self._shown)
                settled = self._decode(self._ids[self._begin : end])
                # It stays so where it is followed by more: a character that it ends in the middle of is none then.
                if not (len(before) < len(settled) < len(now) and now.startswith(settled)):
                    self.texts.append("")
                    continue
                now = settled
            self.texts.append(now[len(before) :])
            self._begin, self._shown = self._shown, end

    @property
    def unfinished(self) -> str:
        """What the answer shows besides the pieces if it ends here, in the middle of a character."""
        before = self._decode(self._ids[self._begin : self._shown])
        return self._decode(self._ids[self._begin :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def text_of(tokenizer: Any, ids: Iterable[int]) -> str:
    """The text of one token, or a few, by themselves; special tokens by their names."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
