"""A draft with a tokenizer of its own: what it has read of a request, and what it says, in the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer

from osd_hf.drafting.forward import DraftForward
from osd_hf.trace import num_accepted
from osd_hf.translation import Reading, Translation, whole_text

LONG_WORD = 4  # tokens of the target in a word that is not whole yet, before its first is taken as it is
MOST_AHEAD = 8  # tokens that the draft says for one of the target's


class TranslatedDraft:
    """
    The draft of one request. It reads the text as its own tokenizer cuts it, and says what is likeliest next, which is
    cut by the target's tokenizer: a token of the target is proposed once the word that it is in is whole, as its
    tokens would be others otherwise. Where the text so far ends within a word, or a character, the draft's tokens of
    it are chosen anew among those that begin alike.

    Args:
        translation (`Translation`): Between both.
        forward (`DraftForward`): The draft, eager, perhaps with the beginning of what it is to read.
        reading (`Reading`, *optional*): The prompt. With `None`, which cannot be spelled, nothing is ever said.
        max_positions (`int`, *optional*): Of the draft.
    """

    def __init__(
        self, translation: Translation, forward: DraftForward, reading: Reading | None, max_positions: int | None
    ) -> None:
        self.translation, self.forward, self.reading = translation, forward, reading
        self.max_positions = max_positions
        self.fed: list[int] = [] if reading is None else reading.ids[: forward.length]
        self._floor = forward.length  # windows know nothing of what was taken back to before it
        self._begin(0, None)

    @property
    def missing(self) -> int:
        """Tokens of what is to be read that have not been."""
        return 0 if self.reading is None else len(self.reading.ids) - self.forward.length

    def settle(self, emitted: Sequence[int]) -> None:
        """The round has ended, and has emitted these tokens of the target."""
        if self.reading is not None:
            self.reading = self.translation.read(emitted, self.reading)
        self._begin(0, None)
        if self.reading is not None and self.fed:
            self._take_back(self.reading.ids, self.reading.num_open + 1)

    def next(self, proposed: Sequence[int], *, reads_confidence: bool) -> tuple[int, float] | None:
        """The target's next token behind the round's proposed ones, by what the draft says, and its probability, if
        that is read, otherwise 1; `None` where it says nothing more."""
        pieces = [self.translation.piece(token) for token in proposed[self._behind :]]
        start, ahead = sum(map(len, pieces)), b"".join(pieces)
        if self._line is None or not all(pieces) or not self._said.startswith(ahead):
            reading = None if self.reading is None else self.translation.read(proposed, self.reading)
            self._begin(len(proposed), reading)
            start = 0
        while True:
            found = self._settled(start)
            if found is not None or self._has_ended:
                return found
            self._say(reads_confidence)

    def _begin(self, behind: int, reading: Reading | None) -> None:
        """Say something new behind so many proposed tokens, which are part of what is read."""
        self._behind, self._from = behind, reading
        self._said, self._ends = b"", list[tuple[int, float]]()  # bytes; by token where they end, and how likely
        self._line: list[int] | None = None if reading is None else list(reading.ids)
        self._prefix = b""  # what the next token has to begin with
        self._row: torch.Tensor | None = None
        self._mark: int | None = None  # the special token of the target that the draft has ended with
        self._has_ended = reading is None or not reading.ids

    def _settled(self, start: int) -> tuple[int, float] | None:
        """The target's token that begins at this byte of what was said, where it is not to change any more."""
        said, ends = self._said[start:], [end - start for end, _ in self._ends]
        is_long = sum(end > 0 for end in ends) >= MOST_AHEAD
        encode, before = self.translation.ours.encode, b"" if self._from is None else self._from.tail
        text = before + self._said
        whole = encode(text[: whole_text(text)])
        encoded = whole and whole.behind(len(before) + start)
        if encoded is None:  # what is before was cut otherwise
            encoded = encode(said[: whole_text(said)])
        if encoded is None or not any(encoded.lengths[:1]):
            mark, self._mark = (self._mark, None) if self._has_ended and not said else (None, self._mark)
            self._has_ended = self._has_ended or is_long
            return None if mark is None else (mark, 1.0)
        is_whole = encoded.words[0] != encoded.words[-1] or len(encoded.ids) > LONG_WORD
        if not (is_whole or is_long or self._has_ended):
            return None
        begun = zip([-start, *ends], self._ends, strict=False)
        within = [p for begin, (_, p) in begun if 0 <= begin < encoded.lengths[0]]
        return encoded.ids[0], float(np.prod(within))

    # --- the draft --------------------------------------------------------------------------------------------------

    def _say(self, reads_confidence: bool) -> None:
        """One more token of the draft."""
        assert self._line is not None
        if self.max_positions is not None and len(self._line) > self.max_positions:
            self._has_ended = True
            return
        row = self._next_row()
        if self._prefix:
            found = self._likeliest(row, self._prefix)
            if found is None:
                self._has_ended = True
                return
        else:
            found = row.argmax()
        probability = float(row.softmax(-1, dtype=torch.float32)[found]) if reads_confidence else 1.0
        self._take(int(found), probability)

    def _likeliest(self, row: torch.Tensor, prefix: bytes) -> torch.Tensor | None:
        """The likeliest token that begins with these bytes, or is a beginning of them; `None` where there is none."""
        theirs = self.translation.theirs
        allowed = torch.from_numpy(np.concatenate([theirs.starting_with(prefix), theirs.within(prefix)]))
        return allowed[row[allowed.to(row.device)].argmax().cpu()] if len(allowed) else None

    def _take(self, token: int, probability: float) -> None:
        """The draft has said a token."""
        assert self._line is not None
        theirs = self.translation.theirs
        piece = b"" if token in theirs.special else theirs.pieces[token]
        if not piece:
            self._has_ended, self._mark = True, self.translation.marks_back.get(token)
            return
        self._line.append(token)
        rest = piece[len(self._prefix) :]
        self._prefix = self._prefix[len(piece) :]
        self._said += rest
        self._ends.append((len(self._said), probability))

    def _next_row(self) -> torch.Tensor:
        """The draft's logits, `(vocab,)`, behind what it has said. As it begins, the tokens of a word that is not
        whole yet are chosen anew from where another one is likelier."""
        assert self._line is not None
        if self._row is not None:
            self._row = self._feed(self._line, 1)[-1]
            return self._row
        reading, line, pieces = self._from, self._line, self.translation.theirs.pieces
        assert reading is not None
        count = reading.num_open
        rows = self._feed(line, count + 1)
        self._row, self._prefix = rows[-1], reading.cut
        for place in range(len(line) - count, len(line)):
            prefix = b"".join(pieces[token] for token in line[place:]) + reading.cut
            found = self._likeliest(rows[place - len(line) - 1], prefix)
            if found is not None and int(found) != line[place]:
                self._line, self._prefix = line[:place], prefix
                self._take(int(found), 1.0)
                self._row = self._feed(self._line, 1)[-1]
                break
        return self._row

    def _feed(self, ids: list[int], rows: int) -> torch.Tensor:
        """The draft's logits behind the last tokens of these, `(rows, vocab)`."""
        self._take_back(ids, rows)
        new = ids[self.forward.length :]
        with torch.inference_mode():
            logits = self.forward.feed(torch.tensor([new], device=self.forward.device), rows)
        self.fed = list(ids)
        return logits

    def _take_back(self, ids: list[int], rows: int) -> None:
        """Let the draft's cache hold nothing but the beginning of these tokens, without the last ones, which are fed
        for their logits."""
        length = max(min(num_accepted(self.fed, ids), len(ids) - rows), 0)
        layers = getattr(self.forward.cache, "layers", ())
        if length < self._floor and any(type(layer) is not DynamicLayer for layer in layers):
            self.forward.begin()
            length = 0
        elif length < self.forward.length:
            self.forward.crop(length)
            self._floor = length
        self.fed = self.fed[:length]
