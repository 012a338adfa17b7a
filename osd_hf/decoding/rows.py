"""Run draft and target over several independent rows, or over one by static forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from osd_hf.decoding.draft_length import MAX_K
from osd_hf.decoding.forward import (
    AHEAD,
    MAX_LAG,
    Ragged,
    RecurrentStates,
    forward_arguments,
    read_padded,
    usual_tensors,
)
from osd_hf.decoding.static import MAX_STATIC_TOKENS, StaticForward
from osd_hf.draft_head import joined
from osd_hf.utils.context import to_device

DRAFTED_AT_ONCE = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, MAX_K)  # tokens of a graph; other numbers are rounded up


class _RaggedForward:
    """The forwards of one model over rows: static where there is a static cache that holds them, or else eager."""

    def __init__(
        self, model: PreTrainedModel, static: StaticForward | None, rows: int, begins: int, ends: int
    ) -> None:
        self.model, self.static = model, static
        self.cache = static.lease(model, rows, begins, ends) if static is not None else None
        self.ragged: Ragged | None = self.cache
        self.is_loaded = False
        self._was_static = False  # the last forward

    def load(self, cache: DynamicCache, padding: Sequence[int], more: int) -> None:
        """Take over the content of a cache with padded rows, to which so many tokens will be added."""
        held = cache.get_seq_length()
        with usual_tensors():
            try:
                if self.cache is not None and held <= self.cache.size:
                    self.cache.load(cache, padding)
            except torch.OutOfMemoryError:
                self.cache = self.ragged = None  # not used again
            if self.ragged is None or held > self.ragged.size or self.cache is None:
                self.close()  # a cache that is too small
                self.ragged = Ragged(self.model, len(padding), held + min(more + MAX_K, AHEAD))
                self.ragged.load(cache, padding)
        self.is_loaded = True

    def feed(self, ids: Tensor, starts: Sequence[int], last: Tensor | None = None, **settings: Any) -> Tensor:
        """Return the logits after tokens, as [`~Ragged.feed`] does."""
        assert self.ragged is not None
        self._was_static = self.static is not None and self.has_room(starts, ids.shape[1])
        if self._was_static and self.static is not None and self.cache is not None:
            return self.static.step(self.cache, ids, starts, last)
        return self.ragged.feed(ids, starts, last, **settings)

    def states(self, layers: Sequence[int]) -> Tensor:
        """Return the hidden states of the last forward, `(rows, tokens, width)`, in half precision."""
        assert self.ragged is not None
        if self._was_static and self.cache is not None and self.cache.states is not None:
            return self.cache.states.clone()  # a graph overwrites them
        return joined(self.ragged.outputs.hidden_states, layers)

    def has_room(self, starts: Sequence[int], count: int) -> bool:
        """Whether a static forward can read so many tokens. A full cache is exchanged for a larger one."""
        if self.static is None or self.cache is None or not self.static.is_possible:
            return False
        if max(starts) + max(count, MAX_STATIC_TOKENS) > self.cache.size:
            larger = self.static.larger(self.cache, max(starts) + count)
            self.cache = larger
            if larger is None:  # the old cache grows, and is not used again
                return False
            self.ragged = larger
        return count <= MAX_STATIC_TOKENS

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        if self.ragged is not None and self.is_loaded:
            with usual_tensors():
                self.ragged.leave(row)

    def close(self) -> None:
        """End the request."""
        if self.static is not None and self.cache is not None:
            self.static.release(self.cache)
            self.cache = None


class BatchDraftForward:
    """Run a draft over rows, each with its own length. The methods are those of
    [`~osd_hf.decoding.sources.DraftForward`]. For the draft, [`~osd_hf.decoding.checks.batch_hindrance`] returns
    `None`. Sequences have at most `most` tokens."""

    keeps = True  # what was read

    def __init__(
        self,
        draft: PreTrainedModel,
        texts: Sequence[Sequence[int]],
        most: int,
        max_positions: int | None,
        static: StaticForward | None = None,
    ) -> None:
        self.draft, self.device = draft, draft.device
        self._limit, self._most = max_positions, most
        self._settings = {"logits_to_keep": 1} if draft._supports_logits_to_keep() else {}
        self._forward = _RaggedForward(draft, static, len(texts), max(map(len, texts)), most)
        self._read = [0] * len(texts)  # tokens of each row in the cache
        self._known: list[int] = []  # tokens of each row before this round
        self._fed = 0  # candidates of the round that were fed

    @property
    def is_static(self) -> bool:
        """Whether forwards are static."""
        return self._forward.cache is not None

    @property
    def captures(self) -> bool:
        """Whether [`~BatchDraftForward.draft_tokens`] can be used."""
        return (
            self._forward.cache is not None and self._forward.static is not None and self._forward.static.is_captured
        )

    def read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Feed the tokens that were not read yet, and return the logits after the last one, `(rows, vocab)`."""
        self._known, self._fed = [len(text) for text in texts], 0
        count = self._unread(texts)
        if not self._forward.is_loaded or count > min(self._known):
            logits = self._prefill(texts)
        else:  # rows that have read more get some tokens again, at the same positions
            ids = to_device([list(text[-count:]) for text in texts], self.device)
            logits = self._feed(ids, [known - count for known in self._known])
        self._read = list(self._known)
        return logits

    def _unread(self, texts: Sequence[Sequence[int]]) -> int:
        return max(1, *(len(text) - read for text, read in zip(texts, self._read, strict=True)))

    def _prefill(self, texts: Sequence[Sequence[int]]) -> Tensor:
        width = max(self._known)
        padding = [width - known for known in self._known]
        ids = to_device([[0] * pad + list(text) for pad, text in zip(padding, texts, strict=True)], self.device)
        cache = DynamicCache(config=self.draft.config.get_text_config(decoder=True))
        logits = read_padded(self.draft, ids, padding, cache, self._limit, **self._settings)
        self._forward.load(cache, padding, self._most - width)
        return logits[:, -1]

    def feed(self, ids: Tensor) -> Tensor:
        """Append a candidate to each row, `(rows, 1)`, and return the logits after it."""
        logits = self._feed(ids, [known + self._fed for known in self._known])
        self._fed += 1
        self._read = [known + self._fed for known in self._known]
        return logits

    def _feed(self, ids: Tensor, starts: Sequence[int]) -> Tensor:
        last = None
        if self._limit is not None and max(starts) + ids.shape[1] > self._limit:
            last = torch.full_like(ids[:, :1], self._limit - 1)
        return self._forward.feed(ids, starts, last, **self._settings)[:, -1]

    def draft_tokens(
        self, texts: Sequence[Sequence[int]], k: int, key: Any, choose: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...] | None:
        """
        Draft k tokens for each row in one graph; return `None` if there is no room.

        `choose` takes raw logits, `(rows, vocab)`, and uniform noise, `(rows,)`. It returns the tokens, `(rows,)`, and
        other tensors of the rows, and is captured once for each `key`. Each returned tensor has the dimension of the
        k tokens behind that of the rows.
        """
        if min(map(len, texts)) < 2:
            return None
        if not self._forward.is_loaded or self._unread(texts) > 2:
            self.read(texts)  # the last two tokens are read again
        self._known = [len(text) for text in texts]
        least = next(n for n in DRAFTED_AT_ONCE if n >= k)
        starts = [known - 2 for known in self._known]
        if not self._forward.has_room(starts, 2 + least):
            return None
        cache, static, limit = self._forward.cache, self._forward.static, self._limit
        assert cache is not None and static is not None

        def run(model: PreTrainedModel, ids: Tensor, starts: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
            found, length = [], 2
            for j in range(least):
                last = starts + (length - 1) if limit is None else (starts + (length - 1)).clamp(max=limit - 1)
                logits = cache.forward(model, ids, starts, last, cache.size, **self._settings)[:, -1]
                found.append(choose(logits, noise[:, j]))
                ids, starts, length = found[-1][0][:, None], starts + length, 1
            return tuple(torch.stack(parts, 1) for parts in zip(*found, strict=True))

        missing = cache.capacity - len(texts)
        ids = to_device([list(text[-2:]) for text in texts] + [[0, 0]] * missing, self.device)
        at = to_device([*starts, *[0] * missing], self.device)[:, None]
        noise = torch.rand(cache.capacity, least, dtype=torch.float32, device=self.device)
        found = static.run(cache, ("draft", least, key), run, (ids, at, noise))
        self._read = [known + k - 1 for known in self._known]
        return tuple(part[: len(texts), :k] for part in found)

    def keep(self, row: int, length: int) -> None:
        """Keep the first `length` tokens of a row, and at most those that were read."""
        self._read[row] = min(self._read[row], length)

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        last = self._read.pop()
        if row < len(self._read):
            self._read[row] = last
        if self._read:
            self._forward.leave(row)

    def close(self) -> None:
        """End the request."""
        self._forward.close()


class BatchTargetForward:
    """Verify the candidates of rows, which continue independently. `kwargs` are the arguments of the loop, `texts` the
    prompts without padding. For the model, [`~osd_hf.decoding.checks.batch_hindrance`] returns `None`."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        kwargs: dict[str, Any],
        texts: Sequence[Sequence[int]],
        max_new_tokens: int,
        static: StaticForward | None = None,
        state_layers: Sequence[int] = (),
    ) -> None:
        self.model, self.input_ids, self.kwargs = model, input_ids, forward_arguments(kwargs)
        self._state_layers = list(state_layers)
        self._hidden: Any = None  # `(rows, tokens, width)` of the last forward
        # Of each row: the place of the first token that had no states before, and that of the newest known token.
        self._places: list[tuple[int, int]] = []
        self._states_settings = {"output_hidden_states": self._state_layers} if state_layers else {}
        self._padding = [input_ids.shape[1] - len(text) for text in texts]
        self._known = [len(text) for text in texts]
        self._unread = [list(text[-1:]) for text in texts]  # known tokens behind the position of each row's states
        self._num_read = 1  # tokens that the last forward read of each row
        self.reread = 0  # most known tokens that the last forwards read again
        self._states: RecurrentStates | None = None
        self._max_new_tokens, longest = max_new_tokens, max(self._known)
        self._kept = 0  # tokens of the first row in the cache
        self._forward = _RaggedForward(model, static, len(texts), longest, longest + max_new_tokens)

    @property
    def is_static(self) -> bool:
        """Whether forwards are static."""
        return self._forward.cache is not None

    @property
    def cache(self) -> Any:
        """The cache that `generate` returns, with the content of the only row."""
        return self.kwargs["past_key_values"]

    def verify(self, tokens: Tensor, is_proposed: Tensor) -> Tensor:
        """Return the logits at each candidate and behind the last one, `(rows, k + 1, vocab)`."""
        if not self._forward.is_loaded:
            return self._prefill(tokens)[:, -tokens.shape[1] - 1 :]
        k, most = tokens.shape[1], max(map(len, self._unread))
        self.reread = most - 1
        while most > 1 and (not k or most + k > MAX_LAG):
            self._catch_up()
            most = max(map(len, self._unread))
        if self._states is not None:
            self._states.save()
        self._num_read = most + k
        # Tokens, columns, and their numbers are copied together.
        pairs = zip(self._unread, self._known, strict=True)
        facts = [[*row, *[0] * (most + k - len(row)), known - len(row), len(row)] for row, known in pairs]
        copied = to_device(facts, tokens.device)
        at, count = copied[:, -2:-1], copied[:, -1:]
        places = count + torch.arange(k + 1, device=tokens.device)
        ids = copied[:, :-2].scatter(1, places[:, :-1], tokens)
        last = at + count - 1 + is_proposed.sum(1, keepdim=True)
        logits = self._forward.feed(ids, [fact[-2] for fact in facts], last, **self._states_settings)
        self._take_states([(len(row) - 1, len(row) - 1) for row in self._unread])
        return logits if most == 1 else logits.gather(1, (places - 1)[..., None].expand(-1, -1, logits.shape[2]))

    def _take_states(self, places: list[tuple[int, int]], hidden_states: Any = None) -> None:
        if self._state_layers:
            if hidden_states is None:
                self._hidden = self._forward.states(self._state_layers)
            else:
                self._hidden = joined(hidden_states, self._state_layers)
            self._places = places

    def states(self, row: int, count: int) -> Tensor:
        """Return the states of a row's tokens as [`~osd_hf.decoding.forward.TargetForward.states`] does."""
        first, newest = self._places[row]
        states: Tensor = self._hidden[row, first : newest + count]
        return states

    def _catch_up(self) -> None:
        """Let rows read the known tokens behind the positions of their states, except for the newest: as many as the
        row with the fewest has. Rows without any stay where they are."""
        assert self._states is not None
        count = min(len(row) - 1 for row in self._unread if len(row) > 1)
        starts = [known - len(row) for known, row in zip(self._known, self._unread, strict=True)]
        ids = to_device([(row + [0] * count)[:count] for row in self._unread], self.input_ids.device)
        self._states.save()
        self._forward.feed(ids, starts, to_device(self._known, ids.device)[:, None] - 1)
        self._states.settle([len(row) > count for row in self._unread])
        self._unread = [row[count:] or row for row in self._unread]

    def _prefill(self, tokens: Tensor) -> Tensor:
        """Read the prompts and the first candidates by a forward such as that of transformers' loop."""
        kwargs, count = dict(self.kwargs), tokens.shape[1]
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is not None:
            kwargs["attention_mask"] = torch.cat([mask, torch.ones_like(tokens, dtype=mask.dtype)], 1)
        if positions is not None:
            following = positions[:, -1:] + 1 + torch.arange(count, device=positions.device)
            kwargs["position_ids"] = torch.cat([positions, following], 1)
        kwargs["past_key_values"].activate_past_recording()
        inputs = self.model.prepare_inputs_for_generation(
            torch.cat([self.input_ids, tokens], 1), next_sequence_length=None, is_first_iteration=True, **kwargs
        )
        inputs["past_key_values"] = kwargs["past_key_values"]  # Phi-3 drops an empty one behind a length
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count + 1
        outputs = self.model(**inputs, **self._states_settings, return_dict=True)
        newest = self.input_ids.shape[1] - 1
        self._take_states([(padding, newest) for padding in self._padding], outputs.hidden_states)
        logits: Tensor = outputs.logits
        self._forward.load(self.cache, self._padding, self._max_new_tokens)
        if self._forward.ragged is not None:
            self._states = RecurrentStates.of(self._forward.ragged.cache)
        for layer in self.cache.layers:
            layer.reset()  # its memory is not needed meanwhile
        return logits

    def keep(self, emitted: Sequence[Sequence[int]]) -> None:
        """Keep the emitted tokens of each row. Rejected candidates are overwritten by the next round."""
        self._known = [known + len(tokens) for known, tokens in zip(self._known, emitted, strict=True)]
        self._kept = self._known[0] - 1
        pairs, states = list(zip(self._unread, emitted, strict=True)), self._states
        keeps = [states is None or len(row) + len(tokens) - 1 == self._num_read for row, tokens in pairs]
        self._unread = [
            list(tokens[-1:]) if is_kept else [*row, *tokens]
            for (row, tokens), is_kept in zip(pairs, keeps, strict=True)
        ]
        if states is not None:
            states.settle(keeps)

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        if self._states is not None:
            self._states.leave(row)
        for state in list[list[Any]]((self._known, self._unread)):
            last = state.pop()
            if row < len(state):
                state[row] = last
        if self._known:  # the last row stays for `close`
            self._forward.leave(row)

    def close(self) -> None:
        """End the request. The cache that was given gets the content of a single row back."""
        try:
            if len(self._padding) == 1 and self._forward.is_loaded and self._forward.ragged is not None:
                for layer, ours in zip(self.cache.layers, self._forward.ragged.cache.layers, strict=True):
                    layer.update(*(x[:, :, : self._kept].clone() for x in (ours.keys, ours.values)))
                self.cache.crop(0)  # sliding windows drop what they do not need
        finally:
            self._forward.close()
