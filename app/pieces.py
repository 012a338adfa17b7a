"""Text of single tokens, so that each can be shown in its own color."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Pieces", "text_of"]

INCOMPLETE = "\ufffd"  # what an unfinished character decodes to


class Pieces:
    """
    Decodes an answer token by token; the pieces joined are the text of the whole.

    A token that ends in the middle of a character shows nothing, and the one that completes it the whole character.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Special tokens are left out.
    """

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
            # A token that shows nothing, such as a special one, is none to begin at.
            if now == before or now.endswith(INCOMPLETE):
                self.texts.append("")
                continue
            self.texts.append(now[len(before) :])
            self._begin, self._shown = self._shown, len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def text_of(tokenizer: Any, ids: Iterable[int]) -> str:
    """The text of one token, or a few, by themselves; special tokens by their names."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
