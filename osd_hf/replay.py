"""The replay simulator: what any draft would have scored on recorded traces, without the target."""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from osd_hf.acceptance import AcceptanceStats
from osd_hf.errors import (
    ConfigError,
    DataError,
    UnsupportedModelError,
    VocabularyMismatchError,
    first_line,
    is_out_of_memory,
)
from osd_hf.logits_processors import Processors
from osd_hf.models import eos_ids, evaluating, uncompiled, unwrap, vocab_size_of
from osd_hf.trace import DraftRound, Trace, bare_trace
from osd_hf.utils.context import neutral_context
from osd_hf.utils.kernels import fast_kernels
from osd_hf.utils.yielding import computing, give_way

logger = logging.getLogger(__name__)

# Elements of the logits that exist at once: 40 MiB in float32. glibc keeps blocks of up to 32 MiB in a heap, which
# they scatter: a step that holds 0.4 GB then took 8.5 GB of resident memory.
CHUNK_LOGITS = 10 << 20
MAX_LOGITS = 1 << 26  # elements of one batch's logits: 256 MiB in float32
MAX_TOKENS = 1 << 16  # of one batch, prompts included

_PLAIN_HEADS: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def replay(
    draft: Any, traces: Iterable[Trace], num_assistant_tokens: int = 5, *, batch_size: int = 32
) -> AcceptanceStats:
    """
    Acceptance that a draft would have had on recorded traces: one teacher-forced pass over each, no target.

    For greedy traces this is exact: examined, accepted and emitted tokens, target forwards and accepted lengths equal
    those of a live run at this k with threshold 0 and a constant schedule. (`drafted` is exact but for rounds in which
    a live draft would have ended itself after its rejected token.) For sampled traces the counts are expectations
    along the recorded answer, each position accepted with the overlap sum_x min(p, q) of the processed distributions
    (arXiv 2211.17192); what lies in the tail of a stored row is taken as spread evenly.

    Args:
        draft (`PreTrainedModel`): Any draft with the target's vocabulary; not changed.
        traces (`Iterable[Trace]`): Of one kind of model; recordings of the target alone will do.
        num_assistant_tokens (`int`, *optional*, defaults to 5): k, tokens drafted per round.
        batch_size (`int`, *optional*, defaults to 32): Traces per forward at most.

    Returns:
        `AcceptanceStats`, its requests in the order of the traces.

    Raises:
        ConfigError: k below 1.
        DataError: a trace whose rows are another target's than its answer.
        VocabularyMismatchError: a trace of another vocabulary than the draft's.
    """
    each = replay_each(draft, list(traces), num_assistant_tokens, batch_size=batch_size)
    return sum(each, AcceptanceStats())


@neutral_context()
@torch.inference_mode()
def replay_each(
    draft: Any, traces: Sequence[Trace], num_assistant_tokens: int = 5, *, batch_size: int = 32
) -> list[AcceptanceStats]:
    """Like [`replay`], but one `AcceptanceStats` per trace."""
    _check(draft, traces, num_assistant_tokens)
    stats = [AcceptanceStats()] * len(traces)
    greedy = [i for i, trace in enumerate(traces) if not trace.is_sampled]
    redrafted = redraft(draft, [traces[i] for i in greedy], num_assistant_tokens, batch_size=batch_size)
    for i, trace in zip(greedy, redrafted, strict=True):
        stats[i] = AcceptanceStats.from_rounds(trace.rounds)
    sampled = [i for i, trace in enumerate(traces) if trace.is_sampled]
    accepted: list[NDArray[Any]] = []
    for i, first, rows in raw_rows(draft, [traces[i] for i in sampled], batch_size):
        trace = traces[sampled[i]]
        if first == 0:
            processors, accepted = Processors(draft, trace), []
        accepted.append(processors.acceptance(rows, first))
        if first + len(rows) == len(trace):
            stats[sampled[i]] = _expected(trace, np.concatenate(accepted), num_assistant_tokens)
    return stats


@neutral_context()
@torch.inference_mode()
def redraft(
    draft: Any, traces: Sequence[Trace], num_assistant_tokens: int = 5, *, batch_size: int = 32
) -> list[Trace]:
    """The greedy traces as a live run with this draft would have captured them: with its rounds in place of the
    recorded ones, drafted tokens that no forward has seen being -1. Takes the arguments of [`replay`]."""
    _check(draft, traces, num_assistant_tokens)
    drafted: list[Trace] = list(traces)
    predicted: list[NDArray[Any]] = []
    for i, first, rows in raw_rows(draft, traces, batch_size):
        trace = traces[i]
        if first == 0:
            processors, predicted = Processors(draft, trace), []
        if processors.processors:
            parts = [processors(rows[part], first + part.start).argmax(-1) for part in processors.groups(len(rows))]
        else:
            parts = [rows.argmax(-1)]
        predicted.append(torch.cat(parts).cpu().numpy())
        if first + len(rows) == len(trace):
            drafted[i] = replace(trace, rounds=tuple(_rounds(trace, np.concatenate(predicted), num_assistant_tokens)))
    return drafted


def _check(draft: Any, traces: Sequence[Trace], k: int) -> None:
    if k < 1:
        raise ConfigError(f"`num_assistant_tokens` must be at least 1, got {k}.")
    size = vocab_size_of(draft)
    for trace in traces:
        if trace.is_rescored:
            raise DataError(
                "A trace has rows of another target than its answer (see `rescore`), so that acceptance on it means "
                "nothing. Leave it out."
            )
        if trace.vocab_size != size:
            raise VocabularyMismatchError(
                f"A trace has a vocabulary of {trace.vocab_size} tokens, the draft {size}. Replay a draft of the "
                "target's vocabulary (see `align_vocab`)."
            )


def raw_rows(draft: Any, traces: Sequence[Trace], batch_size: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Raw rows of the draft, `(positions, vocab)`, in parts of at most `CHUNK_LOGITS` elements where its head can be
    called by itself: the index of the trace, the position of the first row, and the rows, each trace's in order."""
    with evaluating(draft):
        for batch in batches(traces, vocab_size_of(draft), batch_size):
            chosen = [traces[i] for i in batch]
            lengths = [len(trace) for trace in chosen]
            size = max(1, CHUNK_LOGITS // chosen[0].vocab_size)
            if len(batch) * max(lengths) > size and has_plain_head(draft):
                inputs, head = torch.split(completion_states(draft, chosen), lengths), output_head(draft)
            else:
                logits = completion_logits(draft, chosen)
                inputs, head = tuple(row[:length] for row, length in zip(logits, lengths, strict=True)), None
            for i, rows in zip(batch, inputs, strict=True):
                for first in range(0, len(rows), size):
                    give_way()
                    part = rows[first : first + size]
                    yield i, first, part if head is None else head(part)


def _limit(trace: Trace, position: int, k: int) -> int:
    """Tokens that the loop lets a draft propose at a position: the last one of a bounded answer is the target's own;
    a draft ends with the token that meets another stopping criterion than EOS."""
    remaining = len(trace) - position
    budget = int(trace.sampling.get("max_new_tokens", len(trace) + k)) - position - 1
    if len(trace) and int(trace.completion_ids[-1]) not in eos_ids(trace.sampling):
        budget = min(budget, remaining)
    return max(min(k, budget), 0)


def _rounds(trace: Trace, predicted: NDArray[Any], k: int) -> list[DraftRound]:
    """The rounds of a draft that predicts these tokens, one at each position."""
    # Position of the first mismatch from each position on.
    wrong = np.append(np.flatnonzero(predicted != trace.completion_ids), len(trace))
    next_wrong = wrong[np.searchsorted(wrong, np.arange(len(trace)))]
    eos = eos_ids(trace.sampling)
    rounds = []
    start = 0
    while start < len(trace):
        limit = _limit(trace, start, k)
        accepted = min(int(next_wrong[start]) - start, limit)
        emitted = min(accepted + 1, len(trace) - start)
        ended = accepted < limit and accepted < emitted and int(predicted[start + accepted]) in eos
        drafted = predicted[start : start + (accepted + 1 if ended else limit)].astype(np.int32)
        if start + accepted < len(trace) and len(drafted) < limit and not ended:
            # Drafted beyond the end of the answer: tokens unknown, their number is not.
            drafted = np.append(drafted, np.full(limit - len(drafted), -1, dtype=np.int32))
        rounds.append(DraftRound(drafted, accepted, emitted))
        start += emitted
    return rounds


def _expected(trace: Trace, acceptance: NDArray[np.float64], k: int) -> AcceptanceStats:
    """Expected counts, where each position is accepted with its probability."""
    begins = np.zeros(len(trace) + 1)  # the probability that a round begins at each position of the recorded answer
    begins[0] = 1.0
    drafted = examined = accepted = forwards = 0.0
    histogram: Counter[int] = Counter()
    for start in range(len(trace)):
        reach = float(begins[start])
        limit = _limit(trace, start, k)
        forwards += reach
        drafted += reach * limit
        length = 0
        while length < limit and start + length < len(trace):
            accept = float(acceptance[start + length])
            examined += reach
            accepted += reach * accept
            histogram[length] += reach * (1 - accept)  # type: ignore[assignment]
            begins[start + length + 1] += reach * (1 - accept)
            reach *= accept
            length += 1
        if limit:
            histogram[length] += reach  # type: ignore[assignment]
        begins[min(start + length + 1, len(trace))] += reach
    return AcceptanceStats.from_counts(
        drafted=drafted, examined=examined, accepted=accepted, emitted=len(trace), target_forwards=forwards,
        accepted_length_histogram=histogram,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """
    One token of an answer.

    Args:
        id (`int`): The token.
        origin (`str`):
            `"accepted"`: drafted, and verified by the target; `"corrected"`: the target's, in place of what the draft
            had said; `"bonus"`: the target's, after a draft that was accepted whole; `"plain"`: the target's, in a
            round that drafted nothing.
        source (`str`):
            Who proposed it, or what was said in its place: `"draft"`, or `"text"`, past text; of others `"target"`.
        drafted_id (`int`, *optional*): What the draft had said in place of a corrected token.
        drafted_prob (`float`, *optional*):
            The probability that the draft gave to what it had said, processed as the request's; where it is known.
    """

    id: int
    origin: Literal["accepted", "corrected", "bonus", "plain"]
    drafted_id: int | None = None
    drafted_prob: float | None = None
    source: Literal["draft", "text", "target"] = "target"


@neutral_context()
def emitted_tokens(trace: Trace, draft: Any = None) -> list[EmittedToken]:
    """
    The tokens of a request's answer, each with its origin.

    Args:
        trace (`Trace`): An assisted request.
        draft (`PreTrainedModel`, *optional*):
            What drafted it, for the probabilities of what was corrected: one teacher-forced pass, if there is
            something corrected. Sampled traces have them recorded, and need no draft.

    Returns:
        `list[EmittedToken]`: as long as the completion; tokens of a recording of the target alone are `"plain"`.

    Raises:
        VocabularyMismatchError: the draft has another vocabulary than the trace.
    """
    tokens = [EmittedToken(int(token), "plain") for token in trace.completion_ids]
    unknown: list[int] = []  # positions of corrected tokens
    start = 0
    for r in trace.rounds:
        for i, at in enumerate(range(start, start + r.num_emitted)):
            is_text = r.from_text is not None and i < r.num_drafted and bool(r.from_text[i])
            source: Literal["draft", "text"] = "text" if is_text else "draft"
            if i < r.num_accepted:
                tokens[at] = replace(tokens[at], origin="accepted", source=source)
            elif r.has_correction:
                tokens[at] = replace(tokens[at], origin="corrected", source=source)
                if not is_text:  # what past text said is not kept
                    said = None if r.q is None else float(r.q[i])
                    tokens[at] = replace(tokens[at], drafted_id=int(r.drafted_ids[i]), drafted_prob=said)
                    if said is None:
                        unknown.append(at)
            elif r.num_drafted:
                tokens[at] = replace(tokens[at], origin="bonus")
        start += r.num_emitted
    if unknown and draft is not None:
        if vocab_size_of(draft) != trace.vocab_size:
            raise VocabularyMismatchError(
                f"The trace has a vocabulary of {trace.vocab_size} tokens, the draft {vocab_size_of(draft)}. Pass the "
                "one that drafted it."
            )
        processors = Processors(draft, trace)
        with torch.inference_mode():
            for _, first, rows in raw_rows(draft, [trace], 1):
                for part in processors.groups(len(rows)):
                    start = first + part.start
                    probabilities = processors(rows[part], start).softmax(-1)
                    for at in (at for at in unknown if start <= at < start + len(probabilities)):
                        said = float(probabilities[at - start, tokens[at].drafted_id])
                        tokens[at] = replace(tokens[at], drafted_prob=said)
    return tokens


# --- one teacher-forced pass over traces ----------------------------------------------------------------------------


def batches(
    traces: Sequence[Trace], vocab_size: int, batch_size: int = 32,
    fits: Callable[[int, int], bool] = lambda rows, tokens: rows * tokens <= MAX_TOKENS,
) -> Iterator[list[int]]:  # fmt: skip
    """Indices of the traces in batches of similar length, each within `MAX_LOGITS`, of rows and tokens that `fits`
    finds to have room; by default within `MAX_TOKENS`."""
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
    """Rows of token ids as one batch, padded with zeros on one side: ids and mask, int64, `(rows, longest row)`."""
    ids = [torch.from_numpy(np.array(row, dtype=np.int64)) for row in rows]
    both = (ids, [torch.ones_like(row) for row in ids])
    padded_ids, mask = (pad_sequence(part, batch_first=True, padding_side=side).to(device) for part in both)
    return padded_ids, mask


def completion_mask(traces: Sequence[Trace], device: Any = None) -> torch.Tensor:
    """Bool of shape `(traces, longest completion)`: where a trace has a token."""
    lengths = torch.tensor([len(t) for t in traces], device=device)
    return torch.arange(int(lengths.max()), device=device)[None] < lengths[:, None]


def completion_logits(model: Any, traces: Sequence[Trace]) -> torch.Tensor:
    """
    Raw logits with which a model predicts each completion token given everything before it, in the mode (training,
    gradients) that the caller wants. Prompts are padded on the left and completions on the right, so that the
    positions wanted are the same columns in every row and the head runs over no prompt position.

    Args:
        model (`PreTrainedModel`): Decoder-only or encoder-decoder.
        traces (`Sequence[Trace]`): Requests of one kind of model.

    Returns:
        `torch.Tensor` of shape `(traces, longest completion, vocab)`, the model's dtype; columns past a trace's end
        mean nothing.
    """
    device = model.device
    width = max(len(t) for t in traces)
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
        # The last token predicts nothing that is asked for.
        inputs["input_ids"] = torch.cat([prompt_ids, answer_ids[:, :-1]], dim=1)
        inputs["attention_mask"] = mask = torch.cat([prompt_mask, answer_mask[:, :-1]], dim=1)
        accepted = inspect.signature(unwrap(model).forward).parameters  # a `PeftModel` hides what it passes on
        if "position_ids" in accepted:
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        if "logits_to_keep" in accepted:
            inputs["logits_to_keep"] = width
    # Where gradients are kept, parts may be computed again, outside.
    with contextlib.nullcontext() if torch.is_grad_enabled() else fast_kernels(model), computing():
        logits: torch.Tensor = model(**inputs).logits
    return logits[:, logits.shape[1] - width :]


# --- heads called by themselves --------------------------------------------------------------------------------------


def completion_states(model: Any, traces: Sequence[Trace]) -> torch.Tensor:
    """
    The inputs of the output head where [`completion_logits`] has its outputs, in the mode (training, gradients) that
    the caller wants.

    Args:
        model (`PreTrainedModel`): Decoder-only or encoder-decoder.
        traces (`Sequence[Trace]`): Requests of one kind of model.

    Returns:
        `torch.Tensor` of shape `(positions, hidden)`, the completions one after the other.

    Raises:
        UnsupportedModelError: the model has no output embeddings.
    """
    head = unwrap(model).get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} has no output embeddings; distillation needs a language modeling head."
        )
    seen: list[torch.Tensor] = []
    this = threading.local()  # the hook stays behind in a child that another thread forks, where idents come again
    this.is_asked = True

    def stand_aside(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        if not getattr(this, "is_asked", False):
            return None
        seen.append(args[0])
        # No position, so that whatever the model does to logits costs nothing.
        return (args[0][..., :0, :],)

    handle = head.register_forward_pre_hook(stand_aside)
    try:
        completion_logits(uncompiled(model), traces)
    finally:
        handle.remove()
    if len(seen) > 1:  # decoder prompts of several lengths are run one by one
        return torch.cat([states[0, -len(t) :] for states, t in zip(seen, traces, strict=True)])
    mask = completion_mask(traces, seen[0].device)
    return seen[0][:, -mask.shape[1] :][mask]


def output_head(model: Any, ids: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Logits of states, of all tokens or those with these ids: the output head, and what some families do to its
    output."""
    inner = unwrap(model)
    config = inner.config.get_text_config(decoder=True)
    head, cap = inner.get_output_embeddings(), getattr(config, "final_logit_softcapping", None)
    bias = getattr(inner, "final_logits_bias", None)
    scales = [getattr(config, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scales.append(1 / divisor)
    scale = next((scale for scale in scales if scale is not None), 1)

    if ids is not None:
        bias = None if bias is None else bias[..., ids]
        weights = head.weight[ids], None if head.bias is None else head.bias[ids]

    def logits_of(states: torch.Tensor) -> torch.Tensor:
        with computing(), fast_kernels(head):
            logits: torch.Tensor = head(states) if ids is None else torch.nn.functional.linear(states, *weights)
        if scale != 1:
            logits = logits * scale
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits if bias is None else logits + bias.to(logits.device)

    return logits_of


@neutral_context()
def check_head(model: Any) -> None:
    """Refuse a model whose logits are not what its head computes from its inputs; raises UnsupportedModelError."""
    start = np.zeros(1, np.int32) if model.config.is_encoder_decoder else None
    probe = bare_trace([0, 0], [0, 0, 0], vocab_size_of(model), start)
    with torch.no_grad():
        logits = completion_logits(model, [probe])[0].float()
        ours = output_head(model)(completion_states(model, [probe])).float()
    if not (logits - ours).abs().max() <= 0.02 * logits.abs().max():
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} changes its logits behind its output head in a way that is not known "
            "here, so that they cannot be computed in parts."
        )


def has_plain_head(model: Any) -> bool:
    """Whether logits are what the head computes from its inputs, so that they need not all exist at once."""
    inner = unwrap(model)
    if inner not in _PLAIN_HEADS:
        try:
            check_head(model)
            _PLAIN_HEADS[inner] = True
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # Whatever a model fails with: it is asked for whole rows then.
            if not isinstance(error, UnsupportedModelError):
                logger.info("The draft's head cannot be called by itself: %s", first_line(error))
            _PLAIN_HEADS[inner] = False
    return _PLAIN_HEADS[inner]
