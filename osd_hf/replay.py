"""The replay simulator: what any draft would have scored on recorded traces, without the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from osd_hf.errors import ConfigError, VocabularyMismatchError
from osd_hf.forcing import batches, completion_logits, process_rows
from osd_hf.losses import overlap
from osd_hf.metrics import AcceptanceStats
from osd_hf.records import DraftRound, Trace

__all__ = ["redraft", "replay", "replay_each"]


def replay(
    draft: Any, traces: Iterable[Trace], num_assistant_tokens: int = 5, *, batch_size: int = 32
) -> AcceptanceStats:
    """
    Acceptance that a draft would have had on recorded traces: one teacher-forced pass over each, no target.

    For greedy traces this is exact: examined, accepted and emitted tokens, target forwards and accepted lengths equal
    those of a live run at this k with threshold 0 and a constant schedule. (`drafted` is exact but for rounds in which
    a live draft would have ended itself behind its rejected token.) For sampled traces the counts are expectations
    along the recorded answer, each position accepted with the overlap sum_x min(p, q) of the processed distributions
    (arXiv 2211.17192); what lies in the tail of a stored row is taken as spread evenly.

    Args:
        draft (`PreTrainedModel`):
            Any draft with the target's vocabulary; not changed.
        traces (`Iterable[Trace]`):
            Of one kind of model; recordings of the target alone will do.
        num_assistant_tokens (`int`, *optional*, defaults to 5):
            k, tokens drafted per round.
        batch_size (`int`, *optional*, defaults to 32):
            Traces per forward at most.

    Returns:
        `AcceptanceStats`, its requests in the order of the traces.

    Raises:
        ConfigError: k below 1.
        VocabularyMismatchError: a trace of another vocabulary than the draft's.
    """
    return sum(replay_each(draft, list(traces), num_assistant_tokens, batch_size=batch_size), AcceptanceStats())


def replay_each(
    draft: Any, traces: Sequence[Trace], num_assistant_tokens: int = 5, *, batch_size: int = 32
) -> list[AcceptanceStats]:
    """As [`replay`], one `AcceptanceStats` per trace."""
    _check(draft, traces, num_assistant_tokens)
    stats = [AcceptanceStats()] * len(traces)
    greedy = [i for i, trace in enumerate(traces) if not trace.is_sampled]
    for i, trace in zip(
        greedy, redraft(draft, [traces[i] for i in greedy], num_assistant_tokens, batch_size=batch_size), strict=True
    ):
        stats[i] = AcceptanceStats.from_rounds(trace.rounds)
    sampled = [i for i, trace in enumerate(traces) if trace.is_sampled]
    for batch, logits in _forward(draft, [traces[i] for i in sampled], batch_size):
        for row, i in enumerate(batch):
            trace = traces[sampled[i]]
            acceptance = _acceptance(draft, trace, logits[row, : len(trace)])
            stats[sampled[i]] = _expected(trace, acceptance, num_assistant_tokens)
    return stats


def redraft(
    draft: Any, traces: Sequence[Trace], num_assistant_tokens: int = 5, *, batch_size: int = 32
) -> list[Trace]:
    """
    The greedy traces as a live run with this draft would have captured them: with its rounds in place of the recorded
    ones.

    Args:
        draft (`PreTrainedModel`):
            Any draft with the target's vocabulary; not changed.
        traces (`Sequence[Trace]`):
            Greedy requests; recordings of the target alone will do.
        num_assistant_tokens (`int`, *optional*, defaults to 5):
            k, tokens drafted per round.
        batch_size (`int`, *optional*, defaults to 32):
            Traces per forward at most.

    Returns:
        `list[Trace]`: in the order of `traces`; drafted tokens that no forward has seen are -1.
    """
    _check(draft, traces, num_assistant_tokens)
    drafted: list[Trace] = list(traces)
    for batch, logits in _forward(draft, traces, batch_size):
        argmax = logits.argmax(-1).cpu().numpy()
        for row, i in enumerate(batch):
            predicted = _predicted(draft, traces[i], logits[row], argmax[row])
            drafted[i] = replace(traces[i], rounds=tuple(_rounds(traces[i], predicted, num_assistant_tokens)))
    return drafted


def _check(draft: Any, traces: Sequence[Trace], k: int) -> None:
    if k < 1:
        raise ConfigError(f"`num_assistant_tokens` must be at least 1, got {k}.")
    size = int(draft.config.get_text_config().vocab_size)
    for trace in traces:
        if trace.vocab_size != size:
            raise VocabularyMismatchError(
                f"A trace has a vocabulary of {trace.vocab_size} tokens, the draft {size}. Replay a draft of the "
                "target's vocabulary (see `align_vocab`)."
            )


def _forward(draft: Any, traces: Sequence[Trace], batch_size: int) -> Iterable[tuple[list[int], torch.Tensor]]:
    was_training = draft.training
    draft.eval()
    try:
        size = int(draft.config.get_text_config().vocab_size)
        for batch in batches(traces, size, batch_size):
            with torch.inference_mode():
                logits = completion_logits(draft, [traces[i] for i in batch])
            yield batch, logits
    finally:
        draft.train(was_training)


def _predicted(draft: Any, trace: Trace, logits: torch.Tensor, argmax: NDArray[Any]) -> NDArray[Any]:
    if not trace.sampling.get("processors"):
        return argmax[: len(trace)]
    return np.asarray(process_rows(draft, trace, logits[: len(trace)]).argmax(-1).cpu().numpy())


def _limit(trace: Trace, position: int, k: int) -> int:
    """Tokens that the loop lets a draft propose at a position: the last one of a bounded answer is the target's own;
    a draft ends with the token that meets another stopping criterion than EOS."""
    remaining = len(trace) - position
    budget = int(trace.sampling.get("max_new_tokens", len(trace) + k)) - position - 1
    if len(trace) and int(trace.completion_ids[-1]) not in _eos_ids(trace):
        budget = min(budget, remaining)
    return max(min(k, budget), 0)


def _eos_ids(trace: Trace) -> tuple[int, ...]:
    eos = trace.sampling.get("eos_token_id")
    return () if eos is None else (int(eos),) if isinstance(eos, int) else tuple(int(e) for e in eos)


def _rounds(trace: Trace, predicted: NDArray[Any], k: int) -> list[DraftRound]:
    matches = predicted == trace.completion_ids
    # Position of the next mismatch at or behind each position.
    wrong = np.append(np.flatnonzero(~matches), len(trace))
    next_wrong = wrong[np.searchsorted(wrong, np.arange(len(trace)))]
    eos = _eos_ids(trace)
    rounds = []
    start = 0
    while start < len(trace):
        limit = _limit(trace, start, k)
        accepted = min(int(next_wrong[start]) - start, limit)
        emitted = min(accepted + 1, len(trace) - start)
        ended = accepted < limit and accepted < emitted and int(predicted[start + accepted]) in eos
        drafted = predicted[start : start + (accepted + 1 if ended else limit)].astype(np.int32)
        if start + accepted < len(trace) and len(drafted) < limit and not ended:
            # Drafted behind the end of the answer: tokens unknown, their number is not.
            drafted = np.append(drafted, np.full(limit - len(drafted), -1, dtype=np.int32))
        rounds.append(DraftRound(drafted, accepted, emitted))
        start += emitted
    return rounds


def _acceptance(draft: Any, trace: Trace, draft_logits: torch.Tensor) -> NDArray[np.float64]:
    """Expected acceptance of each position, float64 of shape `(completion,)`."""
    p = process_rows(draft, trace, _dense_rows(trace, draft_logits.device)).log_softmax(-1)
    q = process_rows(draft, trace, draft_logits).log_softmax(-1)
    return np.asarray(overlap(p, q).clamp(0, 1).double().cpu().numpy())


def _dense_rows(trace: Trace, device: Any) -> torch.Tensor:
    kept = torch.from_numpy(trace.kept_logprobs()).to(device)
    if trace.top_ids.shape[1] == 0:
        return kept
    others = max(trace.vocab_size - trace.num_kept, 1)
    tail = torch.from_numpy(trace.tail_logprob.astype(np.float32)).to(device) - float(np.log(others))
    rows = tail[:, None].expand(-1, trace.vocab_size).clone()
    return rows.scatter_(1, torch.from_numpy(trace.top_ids.astype(np.int64)).to(device), kept)


def _expected(trace: Trace, acceptance: NDArray[np.float64], k: int) -> AcceptanceStats:
    """Expected counts: `begins[t]` is the probability that a round begins at position t of the recorded answer."""
    begins = np.zeros(len(trace) + 1)
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
        drafted=drafted,
        examined=examined,
        accepted=accepted,
        emitted=len(trace),
        target_forwards=forwards,
        accepted_length_histogram=histogram,
    )
