"""The loss of learning, live and offline: output heads and divergence over some positions at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from osd_hf.errors import UnsupportedModelError
from osd_hf.losses import outcome_logprobs
from osd_hf.pair import unwrap, vocab_size_of
from osd_hf.replay import completion_logits, completion_mask
from osd_hf.trace import Trace, bare_trace

__all__ = ["Rows", "check_head", "divergence_sum", "stored_rows", "target_rows"]

# Elements of the logits that exist at once: 40 MiB in float32. glibc keeps blocks of up to 32 MiB in a heap, which
# they scatter: a step that holds 0.4 GB then took 8.5 GB of resident memory.
CHUNK_LOGITS = 10 << 20

Rows = Callable[[slice], tuple[Tensor | None, Tensor]]
"""Returns, for the positions in a slice, the ids of the kept tokens (`None` for whole rows) and the target's
log-probs, tail last: what `outcome_logprobs` takes and returns."""


def divergence_sum(
    draft: Any, traces: Sequence[Trace], rows: Rows, divergence: Callable[[Tensor, Tensor], Tensor],
    where: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """
    Sum of a divergence over all completion positions of a batch.

    The bodies run over the whole batch, the heads over chunks of positions, whose logits are computed again in the
    backward instead of being kept.

    Args:
        draft (`PreTrainedModel` or `PeftModel`): The model whose parameters get gradients.
        traces (`Sequence[Trace]`): The batch.
        rows (`Rows`): The target's rows at the positions, in the order of the traces.
        divergence (`Callable`): A value of `osd_hf.losses.DIVERGENCES`.
        where (`torch.Tensor` of shape `(positions,)`, bool, *optional*):
            The positions that count, for which alone there are `rows`; all by default.

    Returns:
        Scalar `torch.Tensor`, float32, in nats.
    """
    states, head = _completion_states(draft, traces), _head(draft)
    states = states if where is None else states[where.to(states.device)]
    size = max(1, CHUNK_LOGITS // traces[0].vocab_size)

    def part(chunk: Tensor, first: int) -> Tensor:
        top_ids, p = rows(slice(first, first + len(chunk)))
        q = outcome_logprobs(head(chunk), None if top_ids is None else top_ids.to(chunk.device))
        return divergence(p.to(q), q).sum()

    if len(states) <= size:
        return part(states, 0)
    parts = [
        checkpoint(part, states[first : first + size], first, use_reentrant=False)
        for first in range(0, len(states), size)
    ]
    return torch.stack(parts).sum()


@torch.no_grad()
def target_rows(target: Any, traces: Sequence[Trace]) -> Rows:
    """The target's rows on the traces' tokens, its head computed when a chunk is asked for."""
    states, head = _completion_states(target, traces), _head(target)

    def rows(where: slice) -> tuple[None, Tensor]:
        with torch.no_grad():
            return None, outcome_logprobs(head(states[where]), None)

    return rows


def stored_rows(traces: Sequence[Trace], where: Tensor | None = None) -> Rows:
    """The rows that the traces have kept, all of one width; those at the positions that count, by default all."""

    def stacked(arrays: Sequence[Any], dtype: Any) -> Tensor:
        rows = torch.from_numpy(np.concatenate(arrays).astype(dtype))
        return rows if where is None else rows[where]

    is_whole = traces[0].top_ids.shape[1] == 0
    top_ids = None if is_whole else stacked([t.top_ids for t in traces], np.int64)
    kept = stacked([t.kept_logprobs() for t in traces], np.float32)
    p = torch.cat([kept, stacked([t.tail_logprob for t in traces], np.float32)[:, None]], -1)
    return lambda where: (None if top_ids is None else top_ids[where], p[where])


def check_head(model: Any) -> None:
    """Refuse a model whose logits are not what its head computes from its inputs; raises UnsupportedModelError."""
    start = np.zeros(1, np.int32) if model.config.is_encoder_decoder else None
    probe = bare_trace([0, 0], [0, 0, 0], vocab_size_of(model), start)
    with torch.no_grad():
        logits = completion_logits(model, [probe])[0].float()
        ours = _head(model)(_completion_states(model, [probe])).float()
    if not (logits - ours).abs().max() <= 0.02 * logits.abs().max():
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} changes its logits behind its output head in a way that is not known "
            "here, so that they cannot be computed in parts."
        )


def _completion_states(model: Any, traces: Sequence[Trace]) -> Tensor:
    """The inputs of the output head at each completion position, of shape `(positions, hidden)`."""
    head = unwrap(model).get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} has no output embeddings; distillation needs a language modeling head."
        )
    size = traces[0].vocab_size
    seen: list[Tensor] = []

    def stand_aside(states: Tensor) -> Tensor:
        seen.append(states)
        # No position but the full width, so that whatever the model does to logits costs nothing.
        return states.new_empty((*states.shape[:-2], 0, size))

    before = vars(head).get("forward")
    head.forward = stand_aside
    try:
        completion_logits(model, traces)
    finally:
        del head.forward
        if before is not None:
            head.forward = before
    if len(seen) > 1:  # decoder prompts of several lengths are run one by one
        return torch.cat([states[0, -len(t) :] for states, t in zip(seen, traces, strict=True)])
    mask = completion_mask(traces, seen[0].device)
    return seen[0][:, -mask.shape[1] :][mask]


def _head(model: Any) -> Callable[[Tensor], Tensor]:
    """Logits of states: the output head, and what some families do to its output."""
    inner = unwrap(model)
    config = inner.config.get_text_config(decoder=True)
    head, cap = inner.get_output_embeddings(), getattr(config, "final_logit_softcapping", None)
    bias = getattr(inner, "final_logits_bias", None)
    scales = [getattr(config, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scales.append(1 / divisor)
    scale = next((scale for scale in scales if scale is not None), 1)

    def logits_of(states: Tensor) -> Tensor:
        logits: Tensor = head(states)
        if scale != 1:
            logits = logits * scale
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits if bias is None else logits + bias.to(logits.device)

    return logits_of
