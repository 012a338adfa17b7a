"""Replay: compute the acceptance that any draft would have had on recorded traces, without the target."""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from osd_hf.acceptance import AcceptanceStats
from osd_hf.draft_head import DraftHead
from osd_hf.errors import ConfigError, DataError, UnsupportedModelError, VocabularyMismatchError, is_out_of_memory
from osd_hf.logits_processors import Processors
from osd_hf.models import eos_ids, evaluating, output_head, uncompiled, unwrap, vocab_size_of
from osd_hf.trace import DraftRound, Trace, bare_trace
from osd_hf.utils.context import neutral_context
from osd_hf.utils.kernels import fast_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Elements of the logits that exist at the same time: 40 MiB in float32. glibc keeps blocks of up to 32 MiB in its heap
# and fragments it.
CHUNK_LOGITS = 10 << 20
MAX_LOGITS = 1 << 26  # elements of the logits of a batch: 256 MiB in float32
MAX_TOKENS = 1 << 16  # of a batch, including prompts
GROUP_LOGITS = 1 << 20  # elements processed together: larger temporaries take longer to allocate than to compute

_has_plain_head: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def replay(draft: PreTrainedModel, traces: Iterable[Trace], num_assistant_tokens: int = 5) -> AcceptanceStats:
    """
    Return the acceptance that a draft would have had on recorded traces, by one teacher-forced forward over each.

    Replay of greedy traces is exact: examined, accepted, and emitted tokens, target forwards, and accepted lengths
    equal those of a live run with this k, threshold 0, and a constant schedule. (`drafted` differs in rounds in which
    a live draft proposes EOS after its rejected token.) The counts of sampled traces are expected values along the
    recorded answer. Each position is accepted with probability sum_x min(p, q) of the processed distributions (arXiv
    2211.17192), where the tail of a stored row is assumed to be uniform.

    Args:
        draft (`PreTrainedModel`): Any draft with the vocabulary of the target. It is not changed.
        traces (`Iterable[Trace]`): Traces of one kind of model, also of the target alone.
        num_assistant_tokens (`int`, *optional*, defaults to 5): k, the tokens drafted per round.

    Returns:
        `AcceptanceStats`, with the requests in the order of the traces.

    Raises:
        ConfigError: k is below 1.
        VocabularyMismatchError: A trace has another vocabulary than the draft.
    """
    return sum(replay_each(draft, list(traces), num_assistant_tokens), AcceptanceStats())


def replay_each(draft: PreTrainedModel, traces: Sequence[Trace], k: int = 5) -> list[AcceptanceStats]:
    """Compute [`replay`] for each trace."""
    return [
        _expected_stats(t, s, k) if t.is_sampled else AcceptanceStats.from_rounds(rounds_of(t, s, k))
        for t, s in zip(traces, _scores(draft, traces, k), strict=True)
    ]


def redraft(draft: PreTrainedModel, traces: Sequence[Trace], k: int = 5) -> list[Trace]:
    """Return greedy traces with the rounds of a live run with this draft. Tokens drafted after the end of an answer
    are -1. Takes the arguments of [`replay`]; raises DataError for sampled traces."""
    if any(trace.is_sampled for trace in traces):
        raise DataError("The rounds of sampled traces cannot be computed for another draft. Leave them out.")
    return [
        replace(trace, rounds=tuple(rounds_of(trace, predicted, k)))
        for trace, predicted in zip(traces, _scores(draft, traces, k), strict=True)
    ]


@neutral_context()
@torch.inference_mode()
def _scores(draft: PreTrainedModel, traces: Sequence[Trace], k: int) -> list[NDArray[Any]]:
    """Return what the draft predicts at each position of a greedy trace, and the expected acceptance at each position
    of a sampled trace: `(depths, completion)`. A model predicts the same at each place of a round (one depth). A head
    does not; its row `d` has the positions as the token `d` of a round, -1 where no round can reach them."""
    if k < 1:
        raise ConfigError(f"`num_assistant_tokens` must be at least 1, got {k}.")
    depths = k if isinstance(unwrap(draft), DraftHead) else 1
    scores: list[NDArray[Any]] = [np.full((depths, len(t)), -1, float if t.is_sampled else np.int64) for t in traces]
    for i, first, rows, depth in raw_rows(draft, traces, depths=depths):
        if first == depth:
            processors = Processors(draft, traces[i])
        if traces[i].is_sampled:
            found = processors.acceptance(rows, first)
        else:
            found = processors(rows, first).argmax(-1).cpu().numpy()
        scores[i][depth, first : first + len(found)] = found
    return scores


def raw_rows(
    draft: PreTrainedModel, traces: Sequence[Trace], batch_size: int = 32, *, depths: int = 1
) -> Iterator[tuple[int, int, torch.Tensor, int]]:
    """Yield the raw logits of the draft in parts of at most `GROUP_LOGITS` elements: index of the trace, position of
    the first row, rows `(positions, vocab)`, and how many tokens of its round were drafted before (below `depths`).
    The output head computes at most `CHUNK_LOGITS` elements together if it can be called alone. Raises
    VocabularyMismatchError."""
    vocab_size = vocab_size_of(draft)
    if other := next((trace.vocab_size for trace in traces if trace.vocab_size != vocab_size), None):
        raise VocabularyMismatchError(
            f"A trace has a vocabulary of {other} tokens, the draft {vocab_size}. Replay a draft with the vocabulary "
            "of the target (see `align_vocab`)."
        )
    with evaluating(draft):
        for batch in batches(traces, vocab_size, batch_size):
            chosen = [traces[i] for i in batch]
            lengths = [len(trace) for trace in chosen]
            size, group_size = (max(1, limit // chosen[0].vocab_size) for limit in (CHUNK_LOGITS, GROUP_LOGITS))
            if depths > 1 or (len(batch) * max(lengths) > size and has_plain_head(draft)):
                all_states, head = [states for states, _ in draft_states(draft, chosen, depths)], output_head(draft)
                inputs = [torch.split(s, [max(n - d, 0) for n in lengths]) for d, s in enumerate(all_states)]
            else:
                logits = completion_logits(draft, chosen)
                inputs, head = [tuple(row[:length] for row, length in zip(logits, lengths, strict=True))], None
            for depth, i, rows in (
                (d, *pair) for d, part in enumerate(inputs) for pair in zip(batch, part, strict=True)
            ):
                for first in range(0, len(rows), size):
                    part = rows[first : first + size]
                    for group in torch.split(part if head is None else head(part), group_size):
                        yield i, depth + first, group, depth
                        first += len(group)


def _max_drafted(trace: Trace, position: int, k: int) -> int:
    """Return how many tokens a draft may propose at a position. The target emits the last token of an answer with a
    maximum length. A draft ends with the token that meets a stopping criterion other than EOS."""
    remaining = len(trace) - position
    budget = int(trace.sampling.get("max_new_tokens", len(trace) + k)) - position - 1
    if len(trace) and int(trace.completion_ids[-1]) not in eos_ids(trace.sampling):
        budget = min(budget, remaining)
    return max(min(k, budget), 0)


def rounds_of(trace: Trace, predicted: NDArray[Any], k: int) -> list[DraftRound]:
    """Return the rounds of a draft that predicts `predicted[d, t]` at position `t` of a greedy answer as the token `d`
    of a round (the last row holds for further ones)."""
    eos = eos_ids(trace.sampling)
    rounds = []
    start = 0
    while start < len(trace):
        limit = _max_drafted(trace, start, k)
        at = np.arange(start, min(start + limit, len(trace)))
        guesses = predicted[np.minimum(at - start, len(predicted) - 1), at]
        accepted = int((guesses == trace.completion_ids[at]).cumprod().sum())
        emitted = min(accepted + 1, len(trace) - start)
        has_ended = accepted < limit and accepted < emitted and int(guesses[accepted]) in eos
        drafted = guesses[: accepted + 1 if has_ended else limit].astype(np.int32)
        if start + accepted < len(trace) and len(drafted) < limit and not has_ended:
            # Only the number of tokens drafted after the end of the answer is known.
            drafted = np.append(drafted, np.full(limit - len(drafted), -1, dtype=np.int32))
        rounds.append(DraftRound(drafted, accepted, emitted))
        start += emitted
    return rounds


def _expected_stats(trace: Trace, acceptance: NDArray[np.float64], k: int) -> AcceptanceStats:
    """Return the expected counts if each position is accepted with its probability; arguments as in [`rounds_of`]."""
    begins = np.zeros(len(trace) + 1)  # probability that a round begins at each position of the recorded answer
    begins[0] = 1.0
    drafted = examined = accepted = forwards = 0.0
    histogram: dict[int, float] = defaultdict(float)
    for start in range(len(trace)):
        reach = float(begins[start])
        limit = _max_drafted(trace, start, k)
        forwards += reach
        drafted += reach * limit
        length = 0
        while length < limit and start + length < len(trace):
            accept = float(acceptance[min(length, len(acceptance) - 1), start + length])
            examined += reach
            accepted += reach * accept
            histogram[length] += reach * (1 - accept)
            begins[start + length + 1] += reach * (1 - accept)
            reach *= accept
            length += 1
        if limit:
            histogram[length] += reach
        begins[min(start + length + 1, len(trace))] += reach
    return AcceptanceStats.from_counts(
        drafted=drafted, examined=examined, accepted=accepted, emitted=len(trace), target_forwards=forwards,
        accepted_length_histogram=histogram,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """One token of an answer: `"accepted"`, or the target's own, which is `"corrected"` in place of a rejected token,
    `"bonus"` after a completely accepted draft, and `"plain"` in a round without candidates."""

    id: int
    origin: Literal["accepted", "corrected", "bonus", "plain"] = "plain"
    drafted_id: int | None = None  # the rejected token of a correction, if the draft proposed it
    drafted_prob: float | None = None  # its processed probability under the draft, if it is known
    source: Literal["draft", "text", "target"] = "target"  # what proposed the accepted or rejected token


@neutral_context()
def emitted_tokens(trace: Trace, draft: PreTrainedModel | None = None) -> list[EmittedToken]:
    """Return the tokens of an answer with their origins; `"plain"` ones for the target alone. One teacher-forced
    forward of the `draft` computes the probabilities of rejected tokens, which sampled traces contain already."""
    ids = iter(trace.completion_ids.tolist())
    tokens: list[EmittedToken] = []
    for r in trace.rounds:
        is_text = np.zeros(r.num_drafted, bool) if r.from_text is None else r.from_text
        for copied in is_text[: r.num_accepted]:
            tokens.append(EmittedToken(next(ids), "accepted", source="text" if copied else "draft"))
        if r.has_correction and is_text[r.num_accepted]:  # rejected tokens of earlier text are not stored
            tokens.append(EmittedToken(next(ids), "corrected", source="text"))
        elif r.has_correction:
            rejected = int(r.drafted_ids[r.num_accepted])
            probability = None if r.q is None else float(r.q[r.num_accepted])
            tokens.append(EmittedToken(next(ids), "corrected", rejected, probability, "draft"))
        elif r.num_emitted > r.num_accepted:
            tokens.append(EmittedToken(next(ids), "bonus" if r.num_drafted else "plain"))
    tokens += map(EmittedToken, ids)
    unknown = [i for i, t in enumerate(tokens) if t.drafted_id is not None and t.drafted_prob is None]
    if unknown and draft is not None:
        processors = Processors(draft, trace)
        with torch.inference_mode():
            for _, first, raw, _ in raw_rows(draft, [trace]):
                rows = processors(raw, first)
                for i in (i for i in unknown if first <= i < first + len(rows)):
                    probability = float(rows[i - first].softmax(-1)[tokens[i].drafted_id])
                    tokens[i] = replace(tokens[i], drafted_prob=probability)
    return tokens


# --- teacher-forced forwards over traces ----------------------------------------------------------------------------


def batches(
    traces: Sequence[Trace], vocab_size: int, batch_size: int = 32,
    fits: Callable[[int, int], bool] = lambda rows, tokens: rows * tokens <= MAX_TOKENS,
) -> Iterator[list[int]]:  # fmt: skip
    """Yield the indices of the traces in batches of similar length. Each batch has at most `MAX_LOGITS` elements of
    logits, and `fits(rows, tokens per row)`, by default at most `MAX_TOKENS` tokens."""
    order = sorted(range(len(traces)), key=lambda i: (len(traces[i]), len(traces[i].prompt_ids)))
    batch: list[int] = []
    prompt = 0
    for i in order:
        rows, prompt = len(batch) + 1, max(prompt, len(traces[i].prompt_ids))
        full = rows * len(traces[i]) * vocab_size > MAX_LOGITS or not fits(rows, prompt + len(traces[i]))
        if batch and (rows > batch_size or full):
            yield batch
            batch, prompt = [], len(traces[i].prompt_ids)
        batch.append(i)
    if batch:
        yield batch


def padded(rows: Sequence[Any], side: Literal["left", "right"], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of token ids, padded with zeros on one side, and their mask: int64, `(rows, longest row)`."""
    ids = [torch.from_numpy(np.array(row, dtype=np.int64)) for row in rows]
    both = (ids, [torch.ones_like(row) for row in ids])
    padded_ids, mask = (pad_sequence(part, batch_first=True, padding_side=side).to(device) for part in both)
    return padded_ids, mask


def completion_mask(traces: Sequence[Trace], device: Any = None) -> torch.Tensor:
    """Return the bool mask `(traces, longest completion)` of positions at which a trace has a token."""
    lengths = torch.tensor([len(t) for t in traces], device=device)
    return torch.arange(int(lengths.max()), device=device)[None] < lengths[:, None]


def completion_logits(model: PreTrainedModel, traces: Sequence[Trace]) -> torch.Tensor:
    """Compute the raw logits of each completion token given all previous tokens: `(traces, longest completion, vocab)`
    in the dtype of the model. Columns after the end of a trace are undefined. Prompts are padded on the left and
    completions on the right, so that the positions are the same columns in every row."""
    device = model.device
    width = max(len(t) for t in traces)
    if isinstance(unwrap(model), DraftHead):
        parts = torch.split(output_head(model)(unwrap(model).unrolled(traces, 1)[0][0]), [len(t) for t in traces])
        return pad_sequence(list(parts), batch_first=True)
    inputs: dict[str, Any] = {"use_cache": False}
    if traces[0].is_encoder_decoder:
        starts = [t.decoder_prompt_ids for t in traces if t.decoder_prompt_ids is not None]
        if len({len(start) for start in starts}) != 1:
            rows = [completion_logits(model, [t]) for t in traces]
            return torch.cat([torch.nn.functional.pad(r, (0, 0, 0, width - r.shape[1])) for r in rows])
        inputs["input_ids"], inputs["attention_mask"] = padded([t.prompt_ids for t in traces], "right", device)
        answers = [np.concatenate([start, t.completion_ids]) for start, t in zip(starts, traces, strict=True)]
        ids, mask = padded(answers, "right", device)
        inputs |= {"decoder_input_ids": ids[:, :-1], "decoder_attention_mask": mask[:, :-1]}
    else:
        prompt_ids, prompt_mask = padded([t.prompt_ids for t in traces], "left", device)
        answer_ids, answer_mask = padded([t.completion_ids for t in traces], "right", device)
        inputs["input_ids"] = torch.cat([prompt_ids, answer_ids[:, :-1]], dim=1)
        inputs["attention_mask"] = mask = torch.cat([prompt_mask, answer_mask[:, :-1]], dim=1)
        accepted = inspect.signature(unwrap(model).forward).parameters  # `PeftModel.forward` does not name them
        if "position_ids" in accepted:
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        if "logits_to_keep" in accepted:
            inputs["logits_to_keep"] = width
    with fast_kernels(None if torch.is_grad_enabled() else model):
        logits: torch.Tensor = model(**inputs).logits
    return logits[:, logits.shape[1] - width :]


# --- output heads without their models ------------------------------------------------------------------------------


def completion_states(model: PreTrainedModel, traces: Sequence[Trace]) -> torch.Tensor:
    """Compute the inputs of the output head at the positions of [`completion_logits`]: `(positions, hidden)`, one
    completion after the other. Raises UnsupportedModelError if the model has no output embeddings."""
    if isinstance(unwrap(model), DraftHead):
        return draft_states(model, traces, 1)[0][0]
    head = unwrap(model).get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} has no output embeddings; distillation needs a language modeling head."
        )
    seen: list[torch.Tensor] = []
    thread = threading.get_ident()

    def take_states(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        if threading.get_ident() != thread:  # another thread serves with this model
            return None
        seen.append(args[0])
        return (args[0][..., :0, :],)  # the head computes no position

    handle = head.register_forward_pre_hook(take_states)
    try:
        completion_logits(uncompiled(model), traces)
    finally:
        handle.remove()
    if len(seen) > 1:  # traces with decoder prompts of several lengths are computed one by one
        return torch.cat([states[0, -len(t) :] for states, t in zip(seen, traces, strict=True)])
    mask = completion_mask(traces, seen[0].device)
    return seen[0][:, -mask.shape[1] :][mask]


def draft_states(
    draft: PreTrainedModel, traces: Sequence[Trace], depths: int
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the inputs of the output head, `(positions, hidden)`, and their places among the completion positions of
    all traces, int64, `(positions,)`; `None` for all. A head has others for each token of a round."""
    if isinstance(inner := unwrap(draft), DraftHead):
        return list(inner.unrolled(traces, depths))
    return [(completion_states(draft, traces), None)]


@neutral_context()
def check_head(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if [`output_head`] does not compute the logits of the model."""
    start = np.zeros(1, np.int32) if model.config.is_encoder_decoder else None
    probe = bare_trace([0, 0], [0, 0, 0], vocab_size_of(model), start)
    with torch.no_grad():
        expected = completion_logits(model, [probe])[0].float()
        computed = output_head(model)(completion_states(model, [probe])).float()
    if not (expected - computed).abs().max() <= 0.02 * expected.abs().max():
        name = type(unwrap(model)).__name__
        raise UnsupportedModelError(f"{name} changes its logits after the output head in an unknown way.")


def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether logits can be computed in parts, by [`output_head`]."""
    inner = unwrap(model)
    if isinstance(inner, DraftHead):
        return True
    if inner not in _has_plain_head:
        try:
            check_head(model)
            _has_plain_head[inner] = True
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _has_plain_head[inner] = False
    return _has_plain_head[inner]
