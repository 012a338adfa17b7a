"""The loss of learning, live and offline: output heads and divergence over some positions at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from osd_hf.losses import outcome_logprobs
from osd_hf.models import unwrap, vocab_size_of
from osd_hf.replay import CHUNK_LOGITS, completion_states, output_head
from osd_hf.trace import Trace
from osd_hf.utils.kernels import OneDnnLinear
from osd_hf.utils.yielding import give_way_at

__all__ = ["Rows", "SampledTail", "divergence_sum", "stored_rows", "target_rows"]

# From which on the loss draws so many tokens in place of all; `LEAST_VOCABULARY` of drafts, from which on a head is
# worth restricting, happens to be as large.
LARGE_VOCABULARY, DRAWN = 1 << 14, 2048

Rows = Callable[[slice], tuple[Tensor | None, Tensor]]
"""Returns, for the positions in a slice, the ids of the kept tokens (`None` for whole rows) and the target's
log-probs, tail last: what `outcome_logprobs` takes and returns."""


def divergence_sum(
    draft: Any, traces: Sequence[Trace], rows: Rows, divergence: Callable[[Tensor, Tensor], Tensor],
    where: Tensor | None = None, tail: SampledTail | None = None,
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
        tail (`SampledTail`, *optional*): What stands for the tokens that no row keeps; by default all of them do.

    Returns:
        Scalar `torch.Tensor`, float32, in nats.
    """
    states, head = completion_states(draft, traces), output_head(draft)
    states = states if where is None else states[where.to(states.device)]
    num_tokens = traces[0].vocab_size
    if tail is not None and len(states):
        head, rows, num_tokens = tail.in_place_of(draft, rows, num_tokens)
    size = max(1, CHUNK_LOGITS // num_tokens)

    def part(chunk: Tensor, first: int) -> Tensor:
        give_way_at(chunk)
        top_ids, p = rows(slice(first, first + len(chunk)))
        logits = head(chunk)
        give_way_at(logits)
        q = outcome_logprobs(logits, None if top_ids is None else top_ids.to(chunk.device))
        return divergence(p.to(q), q).sum()

    if len(states) <= size:
        return part(states, 0)
    parts = [
        checkpoint(part, states[first : first + size], first, use_reentrant=False)
        for first in range(0, len(states), size)
    ]
    return torch.stack(parts).sum()


@dataclass
class SampledTail:
    """
    Some tokens, drawn anew for each batch, in place of all that none of its rows keeps: each counts in the tail for as
    many as it stands for. The mass of the tail, and so the gradient, is right on average, and the head has few rows.

    Args:
        size (`int`): How many.
        generator (`torch.Generator`): Draws them, on the CPU.
    """

    size: int
    generator: torch.Generator

    @classmethod
    def where_large(cls, draft: Any, seed: int) -> Self | None:
        """That of a draft with a large vocabulary; `None` where it is small, or the head is more than one matrix, such
        as one with an adapter, of which some rows alone cannot be taken."""
        is_plain = type(unwrap(draft).get_output_embeddings()) in (torch.nn.Linear, OneDnnLinear)
        is_large = is_plain and vocab_size_of(unwrap(draft)) >= LARGE_VOCABULARY
        return cls(DRAWN, torch.Generator("cpu").manual_seed(seed)) if is_large else None

    def in_place_of(self, draft: Any, rows: Rows, vocab_size: int) -> tuple[Callable[[Tensor], Tensor], Rows, int]:
        """The head and the rows of a batch over kept and drawn tokens alone, and how many these are; whole rows stay
        as they are."""
        top_ids, p = rows(slice(None))
        if top_ids is None:
            return output_head(draft), rows, vocab_size
        kept, places = torch.unique(top_ids, return_inverse=True)
        is_other = torch.ones(vocab_size, dtype=torch.bool, device="cpu")
        is_other[kept] = False
        others = is_other.nonzero()[:, 0]
        stands_for = len(others) / self.size
        if stands_for > 1:
            drawn = torch.randint(len(others), (self.size,), generator=self.generator, device="cpu")
            others = others[drawn]
        ids = torch.cat([kept, others]).to(draft.device)
        shift = torch.zeros(len(ids), dtype=torch.float64, device=draft.device)
        shift[len(kept) :] = math.log(max(stands_for, 1.0))
        head = output_head(draft, ids)

        def few(states: Tensor) -> Tensor:
            logits = head(states)
            return logits + shift.to(logits)

        return few, lambda where: (places[where], p[where]), len(ids)


@torch.no_grad()
def target_rows(target: Any, traces: Sequence[Trace]) -> Rows:
    """The target's rows on the traces' tokens, its head computed when a chunk is asked for."""
    states, head = completion_states(target, traces), output_head(target)

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
