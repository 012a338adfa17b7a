"""Cost model of speculative decoding (arXiv 2211.17192): expected tokens per round and expected speed-up."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import numpy as np

from osd_hf.errors import ConfigError


def expected_block_efficiency(alpha: float, k: int) -> float:
    """
    Return the mean number of tokens that a round emits, `(1 - alpha^(k + 1)) / (1 - alpha)` (equation 1).

    Args:
        alpha (`float`): Acceptance rate of a drafted token, from 0 to 1, assumed independent of other tokens.
        k (`int`): Drafted tokens per round; 0 means no speculation.

    Raises:
        ConfigError: An argument is outside its range.
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha must be between 0 and 1, got {alpha}")
    if operator.index(k) < 0:
        raise ConfigError(f"k must be at least 0, got {k}")
    # The closed form loses precision as alpha approaches 1, and k is small.
    return math.fsum(alpha**i for i in range(k + 1))


def alpha_from_block_efficiency(block_efficiency: float, k: int) -> float:
    """Return the acceptance rate at which [`expected_block_efficiency`] gives this block efficiency for k >= 1. It is
    below the counted rate, because hard tokens are adjacent and answers end within rounds."""
    grid = np.linspace(0.0, 1.0, 1001)
    return float(np.interp(block_efficiency, [expected_block_efficiency(alpha, k) for alpha in grid], grid))


def expected_speedup(alpha: float, k: int, c: float) -> float:
    """Return the expected speed-up over the target alone, `block efficiency / (c k + 1)` (theorem 3.8), where `c` is
    the time of one draft forward divided by the time of one target forward."""
    if not 0 <= c < math.inf:
        raise ConfigError(f"c must be finite and at least 0, got {c}")
    return expected_block_efficiency(alpha, k) / (c * k + 1)


def best_k(alpha: float, c: float, max_k: int = 32) -> int:
    """Return the number of drafted tokens per round, from 0 (do not speculate) to `max_k`, that has the largest
    [`expected_speedup`]."""
    if operator.index(max_k) < 0:
        raise ConfigError(f"max_k must be at least 0, got {max_k}")
    return max(range(max_k + 1), key=lambda k: expected_speedup(alpha, k, c))


@dataclass(frozen=True)
class ForwardSeconds:
    """Seconds of forwards over one sequence, output heads included. Each value is the minimum of several."""

    target: float  # over one token
    more: float  # of each further token of a target forward
    draft: float  # over one token
    target_prompt: float = 0.0  # over a prompt, encoder included
    draft_prompt: float = 0.0

    @property
    def c(self) -> float:
        """Cost of a drafted token, including its verification, divided by the cost of a token of the target alone.
        Drafting pays if the acceptance rate is higher than this ratio."""
        return (self.draft + self.more) / self.target

    def best_k(self, alpha: float, new_tokens: float) -> tuple[int, float]:
        """Return the best k (at least 1) at an acceptance rate, and its [`speedup`]."""
        k = max(best_k(alpha, self.c), 1)
        return k, self.speedup(alpha, k, new_tokens)

    def speedup(self, alpha: float, k: int, new_tokens: float) -> float:
        """Return the expected speed-up over the target alone for an answer of `new_tokens` tokens, prompts included;
        below 1 if drafting does not pay."""
        answer_seconds = new_tokens * self.target
        drafted_seconds = answer_seconds / expected_speedup(alpha, k, self.c) + self.draft_prompt
        return (self.target_prompt + answer_seconds) / (self.target_prompt + drafted_seconds)
