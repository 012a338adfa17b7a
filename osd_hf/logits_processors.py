"""The logits processors of a recorded request over many positions at once, and what is accepted under them."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as known

from osd_hf.losses import overlap
from osd_hf.trace import Trace

logger = logging.getLogger(__name__)

GROUP = 1 << 20  # elements worked on at once: larger temporaries take longer to be mapped into memory than to compute
WIDTHS = (64, 2048)  # likeliest tokens among which a cut is looked for, before a whole row is sorted
ROOM = 256  # tokens that memory is taken for at once
MARGIN = 1e-6  # of probability: what is cut so close to the bound is decided by transformers' own rounding

IMPARTIAL = (
    known.TemperatureLogitsWarper, known.TopKLogitsWarper, known.TopPLogitsWarper, known.TopHLogitsWarper,
    known.MinPLogitsWarper, known.TypicalLogitsWarper, known.EpsilonLogitsWarper, known.EtaLogitsWarper,
    known.LogitNormalization,
)  # fmt: skip
"""Processors that treat each row by itself, and its tokens by their logits alone: one at `-inf` changes nothing."""
ROW_WISE = (
    *IMPARTIAL, known.InfNanRemoveLogitsProcessor, known.SuppressTokensLogitsProcessor,
    known.EncoderRepetitionPenaltyLogitsProcessor,
)  # fmt: skip
"""Processors that treat each row by itself, whatever the ids are."""
CONTEXTUAL = (
    known.NoRepeatNGramLogitsProcessor, known.EncoderNoRepeatNGramLogitsProcessor, known.SequenceBiasLogitsProcessor,
    known.NoBadWordsLogitsProcessor,
)  # fmt: skip
"""Processors that compare what the ids end with: ids outside of the vocabulary, on their left, change nothing."""
CHANGES: dict[type, Callable[[Any], Sequence[int]]] = {
    known.MinLengthLogitsProcessor: lambda p: [p.min_length],
    known.MinNewTokensLengthLogitsProcessor: lambda p: [p.prompt_length_to_skip + p.min_new_tokens],
    known.ForcedBOSTokenLogitsProcessor: lambda p: [1, 2],
    known.ForcedEOSTokenLogitsProcessor: lambda p: [p.max_length - 1, p.max_length],
    known.SuppressTokensAtBeginLogitsProcessor: lambda p: [p.begin_index, p.begin_index + 1],
}
"""Processors that go by the number of ids alone: at which numbers they begin to do something else."""
CUTS = (known.TopKLogitsWarper, known.TopPLogitsWarper, known.MinPLogitsWarper)


def _penalizes_all(processor: Any) -> bool:
    """Whether it is a repetition penalty on all ids."""
    return type(processor) is known.RepetitionPenaltyLogitsProcessor and processor.prompt_ignore_length is None


def _is_of_a_set(processor: Any) -> bool:
    """Whether it asks which ids there are alone, so that more of one that is there change nothing."""
    single = type(processor) is known.NoRepeatNGramLogitsProcessor and processor.ngram_size == 1
    return single or _penalizes_all(processor)


@dataclass(frozen=True, eq=False)
class Outcomes:
    """
    Processed rows, by what can be drawn.

    Args:
        ids (`torch.Tensor` of shape `(rows, C)`, int64): Distinct tokens.
        logprobs (`torch.Tensor` of shape `(rows, C)`, float32): Their log-probs, `-inf` for what is cut.
        rest (`torch.Tensor` of shape `(rows,)`, float32): The log-prob of each other token.
        is_whole (`torch.Tensor` of shape `(rows,)`, bool): Rows of which `whole` has all log-probs instead.
        whole (`torch.Tensor` of shape `(whole rows, vocab)`, float32): Those rows.
    """

    ids: Tensor
    logprobs: Tensor
    rest: Tensor
    is_whole: Tensor
    whole: Tensor

    def dense(self, where: Tensor) -> Tensor:
        """Log-probs over the vocabulary of some rows, by a mask."""
        is_whole = self.is_whole[where]
        whole = self.whole[where[self.is_whole]]
        if bool(is_whole.all()):
            return whole
        rows = self.rest[where][:, None].expand(-1, self.whole.shape[1]).clone()
        rows.scatter_(1, self.ids[where], self.logprobs[where])
        rows[is_whole] = whole
        return rows

    def overlap(self, other: Outcomes) -> Tensor:
        """`sum min(p, q)` of each row, float32 of shape `(rows,)`; the other's rows, by the same processors, are whole
        where these have a `rest`."""
        odd = self.is_whole | other.is_whole
        found = odd.new_zeros(len(odd), dtype=torch.float32)
        if not bool(odd.all()):
            same = other.ids[~odd][:, :, None] == self.ids[~odd][:, None]
            p = torch.where(same, self.logprobs[~odd][:, None], -torch.inf).amax(-1)
            found[~odd] = overlap(p, other.logprobs[~odd])
        for few, whole in ((self, other), (other, self)):
            # Where one side can draw few tokens, what the other makes of these is enough.
            some = odd & ~few.is_whole & (few.rest == -torch.inf)
            if bool(some.any()):
                found[some] = overlap(few.logprobs[some], whole.whole[some[whole.is_whole]].gather(1, few.ids[some]))
                odd &= ~some
        if bool(odd.any()):
            found[odd] = overlap(self.dense(odd), other.dense(odd))
        return found


class Processors:
    """
    The logits processors of a recorded request.

    Args:
        model (`PreTrainedModel`): Rebuilds them from the request's settings.
        trace (`Trace`): The request.
    """

    def __init__(self, model: Any, trace: Trace) -> None:
        self.model, self.trace = model, trace
        start = trace.prompt_ids if trace.decoder_prompt_ids is None else trace.decoder_prompt_ids
        self.start = len(start)
        self.ids = torch.from_numpy(np.concatenate([start, trace.completion_ids]).astype(np.int64))
        self.processors = _rebuilt(model, trace, len(start)) if trace.sampling.get("processors") else []
        first = next((i for i, p in enumerate(self.processors) if type(p) in CUTS), len(self.processors))
        if not all(_is_sparse(p) for p in self.processors[first:]):
            first = len(self.processors)
        self.before, self.cuts = self.processors[:first], self.processors[first:]

    def groups(self, count: int) -> Iterator[slice]:
        """So many positions, in parts that are worked on at once."""
        size = max(1, GROUP // (self.trace.vocab_size + 4 * len(self.ids)))
        return (slice(first, min(first + size, count)) for first in range(0, count, size))

    def __call__(self, rows: Tensor, first: int = 0) -> Tensor:
        """Raw rows, `(positions, vocab)` from position `first` of the answer on, after the processors: float32 of the
        same shape. Positions have to come in their order."""
        return self._processed(self.processors, rows, first)

    def _processed(self, processors: Sequence[Any], rows: Tensor, first: int) -> Tensor:
        rows = rows.float()
        ids = self.ids.to(rows.device)
        length, count = self.start + first, len(rows)
        for processor in processors:
            if type(processor) in CONTEXTUAL or _is_of_a_set(processor):
                width = length + count - 1  # the longest context; what is put before the others does nothing
                before = ids[:1] if _is_of_a_set(processor) else ids.new_tensor([rows.shape[1]])
                contexts = torch.cat([before.expand(count - 1), ids[:width]]).unfold(0, width, 1)
                rows = processor(contexts, rows)
                continue
            if type(processor) in ROW_WISE:
                changes: Sequence[int] = ()
            elif type(processor) in CHANGES:
                changes = CHANGES[type(processor)](processor)
            else:
                changes = range(length + 1, length + count)
            ends = [length, *sorted(n for n in changes if length < n < length + count), length + count]
            parts = zip(ends[:-1], ends[1:], strict=True)
            done = [processor(ids[None, :begin], rows[begin - length : end - length]) for begin, end in parts]
            rows = torch.cat(done) if len(done) > 1 else done[0]
        return rows

    def acceptance(self, rows: Tensor, first: int) -> NDArray[np.float64]:
        """The expected acceptance at positions of a sampled request from the draft's raw rows, `(positions, vocab)`:
        the overlap with the target's, processed both; float64 of shape `(positions,)`."""
        found = []
        for part in self.groups(len(rows)):
            at = slice(first + part.start, first + part.stop)
            found.append(self._target.outcomes(at, rows.device).overlap(self.outcomes(rows[part], at.start)))
        return np.asarray(torch.cat(found).clamp(0, 1).double().cpu().numpy())

    def outcomes(self, rows: Tensor, first: int) -> Outcomes:
        """[`Outcomes`] of raw rows, `(positions, vocab)`: of the likeliest tokens, where nothing else is left."""
        rows = self._processed(self.before, rows, first)
        rest = torch.full_like(rows[:, 0], -torch.inf)
        if not self.cuts:
            none = rows[:, :0]
            return Outcomes(none.long(), none, rest, torch.ones_like(rest, dtype=torch.bool), rows.log_softmax(-1))
        ids, logprobs, exact = self._among_likeliest(rows, WIDTHS[0])
        whole = rows[~exact]
        if len(whole):
            wide_ids, wide, sure = self._among_likeliest(whole, WIDTHS[1])
            unsure = whole[~sure]
            for processor in self.cuts if len(unsure) else ():
                unsure = processor(None, unsure)
            whole = torch.full_like(whole, -torch.inf).scatter_(1, wide_ids, wide)
            whole[~sure] = unsure.log_softmax(-1)
        return Outcomes(ids, logprobs, rest, ~exact, whole)

    def _among_likeliest(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and log-probs of the likeliest tokens after the cuts, and whether these are right."""
        needed = [p.top_k + 1 for p in self.cuts if isinstance(p, known.TopKLogitsWarper)]
        width = min(max(width, *needed, 0), rows.shape[1])
        values, ids = rows.topk(width)
        largest = values[:, :1]
        below = values[:, -1:] - largest if width < rows.shape[1] else torch.full_like(largest, -torch.inf)
        # Only the mass that a nucleus is a share of takes a pass over the whole row.
        is_share = isinstance(self.cuts[0], known.TopPLogitsWarper)
        mass = (rows - largest).exp_().sum(-1, keepdim=True) if is_share else torch.ones_like(largest)
        return ids, *_cut(self.cuts, values - largest, mass, below)

    @cached_property
    def _target(self) -> _TargetRows:
        return _TargetRows(Processors(self.model, self.trace))


def _rebuilt(model: Any, trace: Trace, prompt_tokens: int) -> Sequence[Any]:
    """The processors that a model makes of a request's settings."""
    recorded = list(trace.sampling["processors"])
    config = GenerationConfig(**{k: v for k, v in trace.sampling.items() if k not in ("processors", "max_new_tokens")})
    if "max_new_tokens" in trace.sampling:
        config.max_length = prompt_tokens + int(trace.sampling["max_new_tokens"])
    if trace.decoder_prompt_ids is not None:
        config.decoder_start_token_id = int(trace.decoder_prompt_ids[0])
    # Of a decoder-only model, too, the processors of the encoder's ids go by the prompt.
    encoder_ids = torch.from_numpy(trace.prompt_ids.astype(np.int64))[None].to(model.device)
    model._prepare_special_tokens(config, True, device=model.device)
    processors: Sequence[Any] = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=prompt_tokens, encoder_input_ids=encoder_ids,
        device=model.device, model_kwargs={},
    )  # fmt: skip
    rebuilt = [type(p).__name__ for p in processors]
    if rebuilt != recorded:
        _warn_inexact(tuple(recorded), tuple(rebuilt))
    return processors


@lru_cache(256)
def _warn_inexact(recorded: tuple[str, ...], rebuilt: tuple[str, ...]) -> None:
    """Warn once per process that these processors cannot be rebuilt: each replay of each such trace meets them."""
    logger.warning(
        "Traces were made with logits processors %s, of which their settings rebuild %s: replay is approximate, and "
        "so is the gate.", list(recorded), list(rebuilt),
    )  # fmt: skip


def _is_sparse(processor: Any) -> bool:
    """Whether [`_cut`] can stand in for it."""
    usual = getattr(processor, "min_tokens_to_keep", 1) == 1 and getattr(processor, "filter_value", None) == -math.inf
    return type(processor) is known.TemperatureLogitsWarper or (type(processor) in CUTS and usual)


def _cut(processors: Sequence[Any], values: Tensor, mass: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    """
    Log-probs after cuts, the first of which is a cut, by the likeliest tokens alone.

    Args:
        processors: Each [`_is_sparse`].
        values (`torch.Tensor` of shape `(rows, C)`): Logits of the likeliest tokens, descending, the first of them 0.
        mass (`torch.Tensor` of shape `(rows, 1)`): The sum of the exponentials of all logits of a row.
        below (`torch.Tensor` of shape `(rows, 1)`): What no other token's logit exceeds.

    Returns:
        Log-probs, `(rows, C)`, and a mask, `(rows,)`, of the rows in which they are surely those of transformers: no
        other token is left, and no tie or rounding decides what is.
    """
    exact = torch.ones_like(mass, dtype=torch.bool)
    for processor in processors:
        is_all = below == -torch.inf
        if isinstance(processor, known.TemperatureLogitsWarper):
            values = values / processor.temperature
            kept = values > -torch.inf
        elif isinstance(processor, known.TopKLogitsWarper):
            least = values[:, min(processor.top_k, values.shape[1]) - 1, None]
            kept = values >= least
            exact &= is_all | ((least > below) & (processor.top_k <= values.shape[1]))
        elif isinstance(processor, known.TopPLogitsWarper):
            shares = values.double().exp() / mass
            above = shares.cumsum(-1) - shares
            kept = above < processor.top_p
            kept[:, 0] = True
            splits = kept[:, :-1] & ~kept[:, 1:] & (values[:, :-1] == values[:, 1:])
            close = (above[:, 1:] - processor.top_p).abs() < MARGIN
            least = values.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
            exact &= (is_all | (~kept[:, -1:] & (least > below))) & ~(splits | close).any(-1, keepdim=True)
        else:
            bound = math.log(processor.min_p) if processor.min_p > 0 else -math.inf
            kept = values >= bound
            close = (values - bound).abs() < 10 * MARGIN
            exact &= (is_all | (below < bound - 10 * MARGIN)) & ~close.any(-1, keepdim=True)
        values = values.masked_fill(~kept, -torch.inf)
        mass, below = values.exp().sum(-1, keepdim=True), torch.full_like(below, -torch.inf)
    return (values - mass.log()).float(), exact[:, 0]


# --- the target's side ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Stored:
    """What the target's rows of a trace come to, processed: arrays of [`Outcomes`], but for those that are `unstored`,
    as they leave more than the kept tokens to be drawn from, unevenly."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    rest: NDArray[np.float32]
    unstored: NDArray[np.bool_]


# A trace's rows are the same for every draft. They go with the trace, or give way to those of later ones.
_STORED: WeakKeyDictionary[Trace, _Stored] = WeakKeyDictionary()
MOST_STORED = 256
_storing = threading.RLock()  # a trace that is dropped meanwhile may be one of these


class _TargetRows:
    """The target's processed rows of a trace, what was cut from the stored ones taken as spread evenly."""

    def __init__(self, processors: Processors) -> None:
        self.processors, self.trace = processors, processors.trace
        stored = _STORED.get(self.trace)
        self.stored = self._computed() if stored is None else stored
        with _storing:
            _STORED[self.trace] = self.stored
            while len(_STORED) > MOST_STORED:
                _STORED.pop(next(iter(_STORED)))

    def outcomes(self, where: slice, device: Any) -> Outcomes:
        """At some positions, on a device."""
        stored = self.stored
        odd = stored.unstored[where]
        whole = [self._whole(where.start + int(i), device) for i in np.flatnonzero(odd)]
        none = torch.empty(0, self.trace.vocab_size, dtype=torch.float32, device=device)
        arrays = (stored.ids[where].astype(np.int64), stored.logprobs[where], stored.rest[where], odd)
        ids, logprobs, rest, is_whole = (torch.from_numpy(a).to(device) for a in arrays)
        return Outcomes(ids, logprobs, rest, is_whole, torch.cat(whole) if whole else none)

    def _whole(self, position: int, device: Any) -> Tensor:
        row = _dense_rows(self.trace, slice(position, position + 1)).to(device)
        outcomes = self.processors.outcomes(row, position)
        return outcomes.dense(torch.ones_like(outcomes.is_whole))

    def _computed(self) -> _Stored:
        ids, logprobs, rest, exact = self._by_kept()
        width = logprobs.shape[1]
        for i in np.flatnonzero(~exact):
            top, at = self._whole(int(i), self.processors.model.device)[0].topk(min(width + 1, self.trace.vocab_size))
            if len(top) <= width or top[-1] == -torch.inf:
                ids[i, : len(top)], logprobs[i, : len(top)] = at[:width].cpu(), top[:width].cpu()
                exact[i] = True
        used = np.flatnonzero(np.isfinite(logprobs[exact]).any(0))
        width = int(used[-1]) + 1 if len(used) else 0
        return _Stored(ids[:, :width].astype(np.int32), logprobs[:, :width].copy(), rest, ~exact)

    def _by_kept(self) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
        """Ids, log-probs and rest by the kept tokens and the tail alone, and the rows in which they are right."""
        trace, processors = self.trace, self.processors
        count = len(trace)
        rest = np.full(count, -np.inf, np.float32)
        simple = all(_penalizes_all(p) or type(p) is known.TemperatureLogitsWarper for p in processors.before)
        if trace.top_ids.shape[1] == 0 or not simple:
            shape = (count, WIDTHS[0])
            empty = np.full(shape, -np.inf, np.float32)
            return np.zeros(shape, np.int64), empty, rest, np.zeros(count, bool)
        values = torch.from_numpy(trace.kept_logprobs())
        ids = torch.from_numpy(trace.top_ids.astype(np.int64))
        tail = torch.from_numpy(_each_of_tail(trace))[:, None].repeat(1, 2)  # tokens as they were, and those penalized
        num_cut = trace.vocab_size - trace.num_kept
        counts = torch.tensor([num_cut, 0], dtype=torch.float32, device="cpu").repeat(count, 1)
        for processor in processors.before:
            if type(processor) is known.TemperatureLogitsWarper:
                values, tail = values / processor.temperature, tail / processor.temperature
                continue
            seen, distinct = _seen(processors.ids.numpy(), ids.numpy(), processors.start)
            values = torch.where(seen, _penalized(values, processor.penalty), values)
            tail[:, 1] = _penalized(tail[:, 1], processor.penalty)
            counts[:, 1] = distinct - seen.sum(-1)
            counts[:, 0] -= counts[:, 1]
        values, order = values.sort(dim=-1, descending=True)
        ids, largest = ids.gather(-1, order), values[:, :1]
        values, tail = values - largest, tail - largest
        mass = values.exp().sum(-1, keepdim=True) + (counts * tail.exp()).sum(-1, keepdim=True)
        below = torch.where(counts > 0, tail, -torch.inf).amax(-1, keepdim=True)
        if processors.cuts:
            logprobs, exact = _cut(processors.cuts, values, mass, below)
        else:
            logprobs, rest = values - mass.log(), (tail[:, :1] - mass.log())[:, 0].numpy()
            exact = (counts[:, 1] == 0) | (tail[:, 1] == -torch.inf)
        return ids.numpy(), logprobs.numpy(), rest, exact.numpy()


def _each_of_tail(trace: Trace) -> NDArray[np.float32]:
    """The log-prob of each token that was cut from a trace's rows, `(completion,)`."""
    others = max(trace.vocab_size - trace.num_kept, 1)
    return trace.tail_logprob.astype(np.float32) - np.float32(math.log(others))


def _dense_rows(trace: Trace, where: slice) -> Tensor:
    """Log-probs of the target over the whole vocabulary at some positions, the tail spread evenly."""
    kept = torch.from_numpy(trace.kept_logprobs(where))
    if trace.top_ids.shape[1] == 0:
        return kept
    rows = torch.from_numpy(_each_of_tail(trace)[where])[:, None].expand(-1, trace.vocab_size).clone()
    return rows.scatter_(1, torch.from_numpy(trace.top_ids[where].astype(np.int64)), kept)


def _seen(sequence: NDArray[Any], ids: NDArray[Any], start: int) -> tuple[Tensor, Tensor]:
    """Which ids, `(completion, K)`, stand in the sequence before each position of the answer, which begins at `start`;
    and how many distinct ones do, `(completion,)`."""
    distinct, first = np.unique(sequence, return_index=True)
    lengths = start + np.arange(len(ids))
    place = np.searchsorted(distinct, ids).clip(max=len(distinct) - 1)
    seen = (distinct[place] == ids) & (first[place] < lengths[:, None])
    return torch.from_numpy(seen), torch.from_numpy(np.searchsorted(np.sort(first), lengths))


def _penalized(values: Tensor, penalty: float) -> Tensor:
    return torch.where(values < 0, values * penalty, values / penalty)


# --- of a batch -----------------------------------------------------------------------------------------------------

# They go by the row's tokens alone, whichever row it is; those of an encoder go by the row.
_OF_ANY_ROW = tuple(
    cls for cls in (*ROW_WISE, *CONTEXTUAL, known.RepetitionPenaltyLogitsProcessor) if "Encoder" not in cls.__name__
)


class RowProcessors:
    """
    The processors of a batch, at positions that differ from row to row. Each is called as the target's own loop calls
    it, about all rows of the batch at one length; of rows that are not as long yet, or have ended before, as if they
    had ended. Those that treat rows alike are called for all positions at once.

    Args:
        processors (`LogitsProcessorList`): The target's.
        input_ids (`torch.Tensor` of shape `(rows, prompt)`, int64): The prompts, padding included.
        pad_id (`int`): What rows that have ended go on with.
    """

    def __init__(self, processors: LogitsProcessorList, input_ids: Tensor, pad_id: int) -> None:
        self.processors, self.pad_id = list(processors), pad_id
        self.tokens = input_ids.long()
        self.lengths = [input_ids.shape[1]] * input_ids.shape[0]

    def __bool__(self) -> bool:
        return bool(self.processors)

    def _make_room(self, width: int) -> None:
        if width > self.tokens.shape[1]:
            room = self.tokens.new_full((len(self.tokens), width - self.tokens.shape[1] + ROOM), self.pad_id)
            self.tokens = torch.cat([self.tokens, room], dim=1)

    def write(self, rows: Sequence[int], starts: Sequence[int], tokens: Tensor) -> None:
        """Put tokens, `(rows, tokens)`, into these rows, from these lengths on."""
        if not self.processors or not tokens.shape[1]:
            return
        self._make_room(max(starts) + tokens.shape[1])
        device = self.tokens.device
        columns = torch.tensor(starts, device=device)[:, None] + torch.arange(tokens.shape[1], device=device)
        self.tokens[torch.tensor(rows, device=device)[:, None], columns] = tokens.to(device)

    def __call__(self, logits: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Logits of the next token of rows at these lengths, float32, `(positions, vocab)`, which may be written into,
        after the processors."""
        if not self.processors:
            return logits
        width = max(lengths)
        self._make_room(width)
        tokens, at = self.tokens.to(logits.device), torch.tensor(rows, device=logits.device)
        places = torch.arange(width, device=logits.device) - width + at.new_tensor(lengths)[:, None]
        for processor in self.processors:
            if type(processor) in _OF_ANY_ROW and _is_of_all_ids(processor):
                # Shorter rows are filled up on their left by their first token once more, or by one that is none.
                ids = tokens[at[:, None], places.clamp(min=0)]
                if type(processor) in CONTEXTUAL:
                    ids = ids.masked_fill(places < 0, logits.shape[-1])
                logits = processor(ids, logits)
                continue
            for length in sorted(set(lengths)):
                here = [i for i, each in enumerate(lengths) if each == length]
                logits[here] = self._at(processor, logits[here], [rows[i] for i in here], length, tokens)
        return logits

    def _at(self, processor: Any, logits: Tensor, rows: list[int], length: int, tokens: Tensor) -> Tensor:
        """The same for one processor and rows of one length."""
        held = torch.tensor([length if i in rows else n for i, n in enumerate(self.lengths)], device=tokens.device)
        columns = torch.arange(length, device=tokens.device)
        ids = tokens[:, :length].where(columns < held[:, None], self.pad_id)
        scores = logits.new_zeros(len(ids), logits.shape[-1])
        scores[rows] = logits
        processed: Tensor = processor(ids, scores)
        return processed[rows]


def _is_of_all_ids(processor: Any) -> bool:
    """Whether more of the first token change nothing, where it goes by which tokens there are."""
    return getattr(processor, "prompt_ignore_length", None) is None


# --- with a memory --------------------------------------------------------------------------------------------------


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
