"""The cost model of speculative decoding."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osd_hf.errors import ConfigError
from osd_hf.speedup import best_k, expected_block_efficiency, expected_speedup

repeatable = settings(deadline=None, derandomize=True)
alphas, costs, ks = st.floats(0, 1), st.floats(0, 2), st.integers(0, 20)


@pytest.mark.parametrize(
    ("alpha", "k", "speedup"), [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 10, 6.86)]
)
def test_table_1_of_the_paper(alpha, k, speedup):
    assert expected_speedup(alpha, k, 0) == pytest.approx(speedup, abs=0.005)  # arXiv 2211.17192


@repeatable
@given(st.floats(0, 0.999), ks, costs)
def test_the_closed_forms(alpha, k, c):
    block = (1 - alpha ** (k + 1)) / (1 - alpha)
    assert expected_block_efficiency(alpha, k) == pytest.approx(block, rel=1e-9)
    assert expected_speedup(alpha, k, c) == pytest.approx(block / (c * k + 1), rel=1e-9)


@repeatable
@given(alphas, costs, st.integers(0, 25))
def test_best_k_is_the_first_of_the_best(alpha, c, max_k):
    speedups = [expected_speedup(alpha, k, c) for k in range(max_k + 1)]
    assert best_k(alpha, c, max_k=max_k) == int(np.argmax(speedups))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *[(lambda alpha=a: expected_block_efficiency(alpha, 3), "alpha must be between 0") for a in (-0.01, math.nan)],
        (lambda: best_k(1.01, 0.1), "alpha must be between 0 and 1"),
        *[(lambda c=c: expected_speedup(0.5, 3, c), "c must be finite and at least 0") for c in (-0.1, math.inf)],
        (lambda: expected_block_efficiency(0.5, -1), "k must be at least 0, got -1"),
        (lambda: best_k(0.5, 0.1, max_k=-1), "max_k must be at least 0, got -1"),
    ],
)
def test_values_outside_their_range_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
