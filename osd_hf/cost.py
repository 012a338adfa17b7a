"""What speculation gains for an acceptance rate and a draft's cost: the model of arXiv 2211.17192 and 2310.07177."""

from __future__ import annotations

import math
import operator

from osd_hf.errors import ConfigError

__all__ = ["best_k", "expected_block_efficiency", "expected_speedup"]


def expected_block_efficiency(alpha: float, k: int) -> float:
    """
    Tokens that a round emits on average, `1 + alpha + ... + alpha^k = (1 - alpha^(k + 1)) / (1 - alpha)`
    (equation 1 of arXiv 2211.17192); `k + 1` for `alpha = 1`.

    Args:
        alpha (`float`): Acceptance rate of a drafted token, from 0 to 1, taken as independent of the others.
        k (`int`): Drafted tokens a round; 0 is plain decoding.

    Raises:
        ConfigError: an argument is outside its range.
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha must be between 0 and 1, got {alpha}")
    if operator.index(k) < 0:
        raise ConfigError(f"k must be at least 0, got {k}")
    # The closed form loses its digits as alpha approaches 1; k is small.
    return math.fsum(alpha**i for i in range(k + 1))


def expected_speedup(alpha: float, k: int, c: float) -> float:
    """
    How many times sooner the tokens come than from the target alone, `block efficiency / (c k + 1)`
    (theorem 3.8 of arXiv 2211.17192).

    Args:
        alpha (`float`): Acceptance rate of a drafted token, from 0 to 1.
        k (`int`): Drafted tokens a round; 0 is plain decoding, speed-up 1.
        c (`float`): Time of one forward of the draft over that of the target, at least 0.

    Raises:
        ConfigError: an argument is outside its range.
    """
    if not 0 <= c < math.inf:
        raise ConfigError(f"c must be finite and at least 0, got {c}")
    return expected_block_efficiency(alpha, k) / (c * k + 1)


def best_k(alpha: float, c: float, max_k: int = 32) -> int:
    """
    The number of drafted tokens a round with the largest expected speed-up; of equal ones the smallest.

    Args:
        alpha (`float`): Acceptance rate of a drafted token, from 0 to 1.
        c (`float`): Time of one forward of the draft over that of the target, at least 0.
        max_k (`int`, *optional*, defaults to 32):
            Largest answer; a draft that is always right or costs nothing has no finite optimum.

    Returns:
        `int`: from 0 (do not speculate) to `max_k`.

    Raises:
        ConfigError: an argument is outside its range.
    """
    if operator.index(max_k) < 0:
        raise ConfigError(f"max_k must be at least 0, got {max_k}")
    return max(range(max_k + 1), key=lambda k: expected_speedup(alpha, k, c))
