"""Run a draft head over the rows of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from osd_hf.decoding.forward import AHEAD, Ragged, RaggedLayer, usual_tensors
from osd_hf.draft_head import FIRST_ROUND_TOKENS, DraftHead
from osd_hf.utils.context import to_device


class _HeadLayer(RaggedLayer):
    """Keys and values of a layer of a head, which is not loaded from another cache."""

    def __init__(self, ragged: Ragged) -> None:
        super().__init__(ragged.place)
        self._ragged = ragged

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            with usual_tensors():
                self.lazy_initialization(key_states, value_states)
                rows, size = self._ragged.capacity, self._ragged.size
                new = (x.new_zeros(rows, x.shape[1], size, x.shape[3]) for x in (key_states, value_states))
                self.keys, self.values = new
        return super().update(key_states, value_states, *args, **kwargs)


class HeadForward:
    """Run a draft head over rows, each with its own length. The methods are those of
    [`~osd_hf.decoding.sources.DraftForward`]. `states` are the lists to which the loop appends the target's states of
    each row, in the order of the rows. Sequences have at most `most` tokens."""

    captures = False  # no graph drafts several tokens
    length = 0  # of a timed round

    def __init__(self, head: DraftHead, states: Sequence[list[Tensor]], most: int) -> None:
        self.head, self.device = head, head.device
        self._states = list(states)
        self._first = head.first
        self._read = [self._first] * len(self._states)  # tokens of each row that were read with the target's states
        self._ends: list[int] = []  # of each row in the cache, without the candidates of the round
        self._fed = 0  # candidates of the round that were fed
        self._last: Any = None  # state behind the newest token of each row, `(rows, 1, hidden)`
        self._ragged = Ragged(head, len(self._states), min(most, AHEAD))
        layers = range(head.config.get_text_config(decoder=True).num_hidden_layers)
        self._ragged.cache.layers = [_HeadLayer(self._ragged) for _ in layers]

    @property
    def keeps(self) -> bool:
        """Whether what is read stays. The first round knows no states of the target, and the prompt is read again."""
        return all(self._states)

    def read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Read the tokens behind which the target has new states, and return the logits after the last one,
        `(rows, vocab)`. In the first round, zeros take the place of states."""
        keeps, width, self._fed = self.keeps, self.head.state_width, 0
        texts = texts if keeps else [text[-FIRST_ROUND_TOKENS:] for text in texts]
        known = [len(text) for text in texts]
        begins = [min(read, n - 1) for read, n in zip(self._read, known, strict=True)]
        parts = []
        for read, n, held in zip(begins, known, self._states, strict=True):
            whole = torch.cat(held) if keeps else torch.zeros(n, width, dtype=self.head.dtype, device=self.device)
            held[:] = [whole] if keeps else []
            zero = whole.new_zeros(1 if read == 0 else 0, width)  # there is no token before the first one
            parts.append(torch.cat([zero, whole[max(read - 1, 0) : n - 1]]))
        count = max(map(len, parts))
        # Columns behind the end of a shorter row are overwritten before they are seen.
        states = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, count - len(part))) for part in parts])
        pairs = zip(begins, texts, strict=True)
        ids = to_device([[*t[r:], *[0] * (count - len(t) + r)] for r, t in pairs], self.device)
        at = to_device([len(part) - 1 for part in parts], self.device)
        starts = [max(read - self._first, 0) for read in begins]
        self._ends = [start + len(part) for start, part in zip(starts, parts, strict=True)]
        last = to_device(self._ends, self.device)[:, None] - 1
        logits = self._ragged.feed(ids, starts, last, states=self.head.reduced(states), at=at)
        self._last = self._ragged.outputs.hidden_states[0]
        self._read = known if keeps else self._read
        return logits[:, -1]

    def feed(self, ids: Tensor) -> Tensor:
        """Append a candidate to each row, `(rows, 1)`, and return the logits after it."""
        starts = [end + self._fed for end in self._ends]
        logits = self._ragged.feed(ids, starts, states=self._last)
        self._last = self._ragged.outputs.hidden_states[0]
        self._fed += 1
        return logits[:, -1]

    def crop(self, length: int) -> None:
        """Remove the candidates of the round."""
        self._fed = 0

    def keep(self, row: int, length: int) -> None:
        """Keep the first `length` tokens of a row. Drafted ones are read again with the target's states."""

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        for held in list[list[Any]]((self._read, self._states)):
            last = held.pop()
            if row < len(held):
                held[row] = last
        if self._read:
            with usual_tensors():
                self._ragged.leave(row)

    def close(self) -> None:
        """End the request."""
