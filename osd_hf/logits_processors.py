"""Logits processors at many positions: of recorded requests, of batches, and of requests with a memory."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.generation import logits_process as known

from osd_hf.losses import overlap
from osd_hf.models import unwrap
from osd_hf.trace import Trace
from osd_hf.utils.context import to_device

logger = logging.getLogger(__name__)
_warn_once = lru_cache(256)(logger.warning)

ROOM_TOKENS = 256  # that a buffer grows by
TOP_P_TOKENS = 256  # the most likely ones, which usually decide what top-p keeps
TOP_P_MARGIN = 1e-4  # of probability, which is larger than the rounding of sums
TIED_TOKENS = 14  # beyond those of top-k, which also keeps tokens that are tied with the last one

# Processors that a CUDA graph may contain: their operations depend neither on values nor on the ids.
CAPTURABLE = (
    known.TemperatureLogitsWarper, known.TopKLogitsWarper, known.TopPLogitsWarper, known.MinPLogitsWarper,
    known.TypicalLogitsWarper, known.EpsilonLogitsWarper, known.LogitNormalization,
)  # fmt: skip
# Processors that treat tokens by their logits alone; a token at `-inf` changes nothing. The last two validate values.
IMPARTIAL = (*CAPTURABLE, known.TopHLogitsWarper, known.EtaLogitsWarper)
# Processors that do not depend on the ids.
WITHOUT_CONTEXT = (*IMPARTIAL, known.InfNanRemoveLogitsProcessor, known.SuppressTokensLogitsProcessor)
# The lengths at which processors change anything.
ACTIVE_LENGTHS: dict[type, Callable[[Any], range]] = {
    known.MinLengthLogitsProcessor: lambda p: range(p.min_length),
    known.MinNewTokensLengthLogitsProcessor: lambda p: range(p.prompt_length_to_skip + p.min_new_tokens),
    known.SuppressTokensAtBeginLogitsProcessor: lambda p: range(p.begin_index, p.begin_index + 1),
    known.ForcedBOSTokenLogitsProcessor: lambda p: range(1, 2),
    known.ForcedEOSTokenLogitsProcessor: lambda p: range(p.max_length - 1, p.max_length),
    known.ExponentialDecayLengthPenalty: lambda p: range(p.regulation_start + 1, sys.maxsize),
}


def is_capturable(processors: Iterable[Any]) -> bool:
    """Return whether a CUDA graph may contain all of these processors."""
    return all(type(processor) in CAPTURABLE for processor in processors)


def sample(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw the token of each row, `(rows,)`, int64, by inverting the distribution function at `noise`, `(rows,)`,
    uniform in [0, 1). A CUDA graph may contain it. `probs`, `(rows, vocab)`, need not sum to 1, and tokens with
    probability 0 are never drawn, unless a row has no others: its token is 0."""
    # In parallel sums, rounding may raise the value at a token with probability 0: such tokens are left out.
    cumulative = probs.double().cumsum(-1).masked_fill_(probs == 0, 0.0)
    return (cumulative > noise.double()[:, None] * cumulative.amax(-1, keepdim=True)).byte().argmax(-1)


def _top_p(processor: Any, logits: Tensor) -> Tensor:
    """Apply top-p to logits, `(positions, vocab)`. On CPUs, where sorting a large vocabulary takes milliseconds, the
    most likely tokens decide; positions where they do not, or where rounding matters, are sorted."""
    is_small = logits.shape[-1] < 8 * TOP_P_TOKENS or processor.min_tokens_to_keep > TOP_P_TOKENS
    if logits.device.type != "cpu" or is_small:
        return processor(None, logits)  # type: ignore[no-any-return]
    probs = logits.softmax(-1)
    top = probs.topk(TOP_P_TOKENS, -1).values
    likelier = top.cumsum(-1) - top  # mass of the tokens before
    is_kept = likelier < processor.top_p
    is_kept[:, : processor.min_tokens_to_keep] = True
    last = is_kept.sum(-1, keepdim=True) - 1
    lowest, next_one = top.gather(-1, last), top.gather(-1, (last + 1).clamp(max=TOP_P_TOKENS - 1))
    is_sure = (lowest > next_one)[:, 0] & ((likelier - processor.top_p).abs().amin(-1) > TOP_P_MARGIN)
    processed = logits.masked_fill(probs < lowest, processor.filter_value)
    if not bool(is_sure.all()):
        processed[~is_sure] = processor(None, logits[~is_sure])
    return processed


# --- of a recorded request ------------------------------------------------------------------------------------------


class Processors:
    """The logits processors of a recorded request, made again by a model from the request's settings."""

    def __init__(self, model: PreTrainedModel, trace: Trace) -> None:
        self.model = model
        self.trace = trace
        start = trace.prompt_ids if trace.decoder_prompt_ids is None else trace.decoder_prompt_ids
        self.start = len(start)
        self.ids = torch.from_numpy(np.concatenate([start, trace.completion_ids]).astype(np.int64))
        self.processors = _rebuilt(model, trace, len(start)) if trace.sampling.get("processors") else []

    def __call__(self, rows: Tensor, first: int = 0) -> Tensor:
        """Process raw rows, `(positions, vocab)`, from position `first` of the answer on. Called in order. Processors
        from top-k on get the tokens that it keeps and a few more, if only logits count for them."""
        cut = next((i for i, p in enumerate(self.processors) if type(p) is known.TopKLogitsWarper), None)
        if cut is None or not all(type(p) in IMPARTIAL for p in self.processors[cut:]):
            return self._processed(self.processors, rows, first)
        rows = self._processed(self.processors[:cut], rows, first)
        k = min(self.processors[cut].top_k, rows.shape[1])
        values, ids = rows.topk(min(k + TIED_TOKENS, rows.shape[1]))
        if not bool((values[:, -1] < values[:, k - 1]).all()):  # more tokens are tied, or a row has NaN
            return self._processed(self.processors[cut:], rows, first)
        kept = self._processed(self.processors[cut:], values, first)
        return torch.full_like(rows, -torch.inf).scatter_(-1, ids, kept)

    def _processed(self, processors: Sequence[Any], rows: Tensor, first: int) -> Tensor:
        at = RowProcessors(processors, self.ids[None].to(rows.device), pad_id=0)
        return at(rows.float(), [0] * len(rows), range(self.start + first, self.start + first + len(rows)))

    def acceptance(self, rows: Tensor, first: int) -> NDArray[np.float64]:
        """Return the expected acceptance at positions of a sampled request, `(positions,)`, from the draft's raw
        rows: the overlap of both processed distributions."""
        target = Processors(self.model, self.trace)
        q = self(rows, first)
        p = target(_dense_rows(self.trace, slice(first, first + len(q))).to(q.device), first)
        found = overlap(p.log_softmax(-1), q.log_softmax(-1))
        return np.asarray(found.clamp(0, 1).double().cpu().numpy())


def _dense_rows(trace: Trace, where: slice) -> Tensor:
    """Return log-probs of the target over the full vocabulary, with the tail spread evenly."""
    kept = torch.from_numpy(trace.kept_logprobs(where))
    if trace.top_ids.shape[1] == 0:
        return kept
    others = max(trace.vocab_size - trace.num_kept, 1)
    tail = torch.from_numpy(trace.tail_logprob[where].astype(np.float32)) - math.log(others)
    rows = tail[:, None].expand(-1, trace.vocab_size).clone()
    return rows.scatter_(1, torch.from_numpy(trace.top_ids[where].astype(np.int64)), kept)


def _rebuilt(model: PreTrainedModel, trace: Trace, prompt_tokens: int) -> Sequence[Any]:
    """Return the processors that a model makes of a request's settings."""
    recorded = list(trace.sampling["processors"])
    config = GenerationConfig(**{k: v for k, v in trace.sampling.items() if k not in ("processors", "max_new_tokens")})
    if "max_new_tokens" in trace.sampling:
        config.max_length = prompt_tokens + int(trace.sampling["max_new_tokens"])
    if trace.decoder_prompt_ids is not None:
        config.decoder_start_token_id = int(trace.decoder_prompt_ids[0])
    # The processors of encoder ids use the prompt of a decoder-only model, too.
    encoder_ids = torch.from_numpy(trace.prompt_ids.astype(np.int64))[None].to(model.device)
    source = getattr(unwrap(model), "source", None)  # of a draft head, which cannot generate itself
    maker: Any = model if source is None else source.target
    maker._prepare_special_tokens(config, True, device=model.device)
    processors: Sequence[Any] = maker._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt_tokens,
        encoder_input_ids=encoder_ids,
        device=model.device,
        model_kwargs={},
    )
    rebuilt = [type(p).__name__ for p in processors]
    if rebuilt != recorded:
        message = "Traces were made with logits processors %s, their settings rebuild %s: replay is approximate."
        _warn_once(message, str(recorded), str(rebuilt))
    return processors


# --- of a batch -----------------------------------------------------------------------------------------------------


class RowProcessors:
    """Apply the processors of a batch at positions that differ from row to row. Each processor is called as in the
    target's own loop, for all rows of the batch at one length, where rows that are shorter or have ended are padded
    with `pad_id`. Repetition penalties and those that do not depend on the ids are called for all positions together.
    All tensors are on the device of `input_ids`, which the calling thread does not wait for."""

    def __init__(self, processors: Sequence[Any], input_ids: Tensor, pad_id: int) -> None:
        self.processors = list(processors)
        self.pad_id = pad_id
        self.tokens = input_ids.long()
        self.lengths = [input_ids.shape[1]] * input_ids.shape[0]

    def __bool__(self) -> bool:
        return bool(self.processors)

    def _make_room(self, width: int) -> None:
        if width > self.tokens.shape[1]:
            room = self.tokens.new_full((len(self.tokens), width - self.tokens.shape[1] + ROOM_TOKENS), self.pad_id)
            self.tokens = torch.cat([self.tokens, room], dim=1)

    def write(self, rows: Sequence[int], starts: Sequence[int], tokens: Tensor) -> None:
        """Write tokens, `(rows, tokens)`, into these rows, from these lengths on."""
        if not self.processors or not tokens.shape[1]:
            return
        width, tokens = tokens.shape[1], tokens.to(self.tokens.device)
        self._make_room(max(starts) + width)
        if len(rows) == 1:
            self.tokens[rows[0], starts[0] : starts[0] + width] = tokens[0]
            return
        at = to_device([rows, starts], tokens.device)[..., None]
        self.tokens[at[0], at[1] + torch.arange(width, device=tokens.device)] = tokens

    def __call__(self, logits: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Process logits, `(positions, vocab)`, of the next token of rows at these lengths, and may overwrite them."""
        self._make_room(max(lengths, default=0))
        for processor in self.processors:
            active = ACTIVE_LENGTHS.get(type(processor))
            if type(processor) is known.TopPLogitsWarper:
                logits = _top_p(processor, logits)
            elif type(processor) in WITHOUT_CONTEXT:
                logits = processor(self.tokens, logits)
            elif type(processor) is known.RepetitionPenaltyLogitsProcessor and (
                processor.prompt_ignore_length is None  # else, a repeated last token may change the result
            ):
                # The ids of positions, `(positions, longest)`; behind its length, each repeats its last token.
                at = to_device([rows, [length - 1 for length in lengths]], self.tokens.device)[..., None]
                columns = torch.arange(max(lengths), device=at.device)
                logits = processor(self.tokens[at[0], columns.minimum(at[1])], logits)
            elif active is None or any(length in active(processor) for length in lengths):
                logits = self._by_length(processor, logits, rows, lengths)
        return logits

    def _by_length(self, processor: Any, logits: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        for length in sorted(set(lengths)):
            here = [i for i, each in enumerate(lengths) if each == length]
            those = [rows[i] for i in here]
            held = [length if i in those else n for i, n in enumerate(self.lengths)]
            at = to_device([here, those], logits.device)
            columns = torch.arange(length, device=logits.device)
            ids = self.tokens[:, :length].where(columns < to_device(held, logits.device)[:, None], self.pad_id)
            scores = logits.new_zeros(len(ids), logits.shape[-1])
            scores[at[1]] = logits[at[0]]
            logits[at[0]] = processor(ids, scores).to(scores)[at[1]]
        return logits


# --- of a request with a memory -------------------------------------------------------------------------------------


class ReplayedProcessor(LogitsProcessor):
    """
    Serve a logits processor that remembers the tokens it has seen, such as the matcher of a grammar. Before each call
    the processor is brought to the current sequence: draft and target call it in turns, and some of the tokens are
    rejected later. Every request begins with a new processor. The memory must depend on the tokens alone.

    ```python
    grammar = ReplayedProcessor(lambda: xgrammar.contrib.hf.LogitsProcessor(compiled))
    assistant.generate(**inputs, logits_processor=[grammar])
    ```

    Args:
        make (`Callable[[], LogitsProcessor]`):
            Makes a processor for a new answer. It is first called for the prompt, then for another token each time.
        take_back (`Callable[[LogitsProcessor, int], object]`, *optional*):
            Undoes the last calls of a processor, except the first. Without it, a new processor is made and called
            again for each token of the answer so far, which is slower for long answers.
    """

    def __init__(
        self, make: Callable[[], Callable[..., Tensor]], take_back: Callable[[Any, int], object] | None = None
    ) -> None:
        self.make = make
        self.take_back = take_back
        self._starts_at: int | None = None  # prompt tokens, in an assisted request
        self._processor: Callable[..., Tensor] | None = None
        self._first = 0  # tokens at the first call of the processor
        self._seen = torch.zeros(1, 0, dtype=torch.long)  # tokens at its last call

    def begin(self, prompt_tokens: int) -> ReplayedProcessor:
        """Return a copy for one request."""
        own = ReplayedProcessor(self.make, self.take_back)
        own._starts_at = prompt_tokens
        return own

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length, seen = input_ids.shape[1], self._seen
        shared = min(length, seen.shape[1]) if len(input_ids) == len(seen) else 0  # tokens
        same = (input_ids[:, :shared] == seen[: len(input_ids), :shared].to(input_ids.device)).all(0)
        common = int(same.cumprod(0).sum())  # tokens with which both begin
        first = self._first if self._starts_at is None else min(self._starts_at, length)
        if self._starts_at is None and (common < first or length > seen.shape[1] + 1):
            first = length  # outside of an assisted request: another prompt
        known = min(common, length - 1)  # calls for more tokens than these are undone
        processor, self._processor = self._processor, None  # not used again after an error
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
