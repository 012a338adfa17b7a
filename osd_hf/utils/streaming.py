"""Streaming of an answer: the tokens of each round, their text, and the end of the answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

INCOMPLETE = "\ufffd"  # decoded from an incomplete character


class Rounds(BaseStreamer):
    """Calls a function with the tokens of each round, and another one after the last round."""

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
    """Ends an answer when an event is set."""

    is_stateless = True  # does not depend on previous calls

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._stop.is_set(), device=input_ids.device)


class Pieces:
    """Decodes an answer token by token, without special tokens. The joined pieces are the text of the answer. The
    token that completes a character has all of it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Decoding begins one token earlier, because the text of a token depends on the previous token.
        self._begin = self._shown = 0
        self.texts: list[str] = []

    def push(self, ids: Iterable[int]) -> None:
        """Add the next tokens of the answer."""
        for token in ids:
            self._ids.append(token)
            before = self._decode(self._ids[self._begin : self._shown])
            now = self._decode(self._ids[self._begin :])
            # Decoding does not begin at a token without text, such as a special token.
            if now == before or now.endswith(INCOMPLETE):
                self.texts.append("")
                continue
            self.texts.append(now[len(before) :])
            self._begin, self._shown = self._shown, len(self._ids)

    @property
    def unfinished(self) -> str:
        """Text after the pieces if the answer ends here, within a character."""
        before = self._decode(self._ids[self._begin : self._shown])
        return self._decode(self._ids[self._begin :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def text_of(tokenizer: Any, ids: Iterable[int]) -> str:
    """Return the text of some tokens, including special tokens."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
