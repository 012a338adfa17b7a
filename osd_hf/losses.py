"""
Divergences between the target's stored distribution p and the draft's q, on K kept tokens and a tail.

A row of log-probs has K + 1 outcomes: the kept tokens, then the mass of all others (the tail). No divergence exceeds
the one over the vocabulary, and both are equal if all tokens are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from osd_hf.errors import ConfigError

LOG_ZERO = -100.0  # replaces log(0): negligible as a probability, and finite in half precision


def _finite(logprobs: Tensor) -> Tensor:
    # A clamp would also remove the gradient of very small probabilities.
    return logprobs.masked_fill(logprobs == -torch.inf, LOG_ZERO)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp() * (a - b)).sum(-1)


def forward_kl(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """Compute KL(p || q)."""
    return _kl(_finite(p_logprobs), _finite(q_logprobs))


def reverse_kl(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """Compute KL(q || p)."""
    return _kl(_finite(q_logprobs), _finite(p_logprobs))


def generalized_jsd(p_logprobs: Tensor, q_logprobs: Tensor, beta: float = 0.5) -> Tensor:
    """Compute `beta KL(p || m) + (1 - beta) KL(q || m)` with `m = beta p + (1 - beta) q` (equation 1 of arXiv
    2306.13649, in TRL's convention), from the forward KL (`beta=0`) to the reverse KL (`beta=1`)."""
    if not 0 <= beta <= 1:
        raise ConfigError(f"beta must be between 0 and 1, got {beta}")
    if beta == 0:
        return forward_kl(p_logprobs, q_logprobs)
    if beta == 1:
        return reverse_kl(p_logprobs, q_logprobs)
    p, q = _finite(p_logprobs), _finite(q_logprobs)
    m = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return beta * _kl(p, m) + (1 - beta) * _kl(q, m)


def total_variation(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """Compute `1/2 sum |p - q|`, the probability that speculative sampling rejects a token drawn from q."""
    return 0.5 * (p_logprobs.exp() - q_logprobs.exp()).abs().sum(-1)


def neg_log_overlap(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """Compute `-log sum min(p, q)`. Its gradient remains large if p and q hardly overlap."""
    return -torch.minimum(_finite(p_logprobs), _finite(q_logprobs)).logsumexp(-1)


def hard_label(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """Compute the cross-entropy on the target's most likely kept token, as greedy verification compares."""
    label = p_logprobs[..., :-1].argmax(-1, keepdim=True)
    return -_finite(q_logprobs).gather(-1, label).squeeze(-1)


# From log-probs of target and draft, both `(..., K + 1)` with the tail last and `-inf` allowed, to a loss `(...)`.
# Values and gradients are finite.
DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": generalized_jsd,
    "total_variation": total_variation,
    "neg_log_overlap": neg_log_overlap,
    "hard_label": hard_label,
}


def overlap(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """Compute `sum min(p, q)`, the expected acceptance when sampling (theorem 3.5 of arXiv 2211.17192)."""
    return torch.minimum(p_logprobs, q_logprobs).exp().sum(-1)


class _OutcomeLogprobs(torch.autograd.Function):
    """Log-softmax over the kept tokens and the tail. The tail is summed itself, because `1 - sum(kept)` is inexact if
    the kept tokens have almost all of the mass. Forward and backward allocate one dense tensor each."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        kept = logits.gather(-1, ids).to(dtype)
        rest = logits.to(dtype, copy=True).scatter_(-1, ids, -torch.inf)
        peak = rest.amax(-1, keepdim=True).clamp_(min=torch.finfo(dtype).min)
        tail = rest.sub_(peak).exp_().sum(-1, keepdim=True).log_() + peak
        outcomes = torch.cat([kept, tail], -1)
        logprobs = outcomes - outcomes.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, ids, tail, logprobs)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, ids, tail, logprobs = ctx.saved_tensors
        # The gradient of the tail is distributed over its tokens by their softmax within the tail.
        grad = grad - logprobs.exp() * grad.sum(-1, keepdim=True)
        dense = (logits - tail.clamp(min=torch.finfo(tail.dtype).min)).exp_().mul_(grad[..., -1:])
        return dense.scatter_(-1, ids, grad[..., :-1]), None


def outcome_logprobs(draft_logits: Tensor, top_ids: Tensor | None) -> Tensor:
    """Compute the log-probs of the kept tokens and, last, of the tail, `(N, K + 1)`, float64 for float64 logits and
    float32 otherwise, from the draft's logits, `(N, V)`, in which `-inf` is allowed, and the distinct ids of the kept
    tokens, `(N, K)`, int64. Without ids, all tokens are kept in vocabulary order, with a tail of `-inf`."""
    if top_ids is not None:
        return cast(Tensor, _OutcomeLogprobs.apply(draft_logits, top_ids))  # type: ignore[no-untyped-call]
    dtype = torch.promote_types(draft_logits.dtype, torch.float32)
    return F.pad(draft_logits.log_softmax(-1, dtype=dtype), (0, 1), value=-torch.inf)
