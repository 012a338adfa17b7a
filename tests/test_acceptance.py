"""Counts of acceptance, their intervals, and comparisons of drafts on the same requests."""

import json
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osd_hf.acceptance import (
    MAX_DOMAINS,
    MAX_REQUESTS,
    AcceptanceStats,
    Comparison,
    Tally,
    alpha_gain_interval,
    figures_of,
)
from osd_hf.trace import DraftRound, bare_trace

repeatable = settings(deadline=None, derandomize=True, max_examples=50)


def draft_round(drafted, accepted, emitted):
    return DraftRound(np.zeros(drafted, np.int32), accepted, emitted)


def request(accepted, examined):
    """One request of which only alpha matters."""
    return AcceptanceStats.from_counts(
        drafted=examined, examined=examined, accepted=accepted, emitted=accepted + 1, target_forwards=1
    )


def requests(pairs):
    return sum((request(*pair) for pair in pairs), AcceptanceStats())


ROUNDS = [
    draft_round(5, 5, 6),  # all accepted, and a bonus token
    draft_round(5, 2, 3),  # a correction; two tokens behind it not examined
    draft_round(0, 0, 1),  # nothing drafted
    draft_round(5, 0, 1),  # corrected at once
    draft_round(12, 12, 13),
    draft_round(5, 2, 2),  # the answer ended inside the accepted tokens: nothing was rejected
]

rounds_strategy = st.lists(
    st.integers(0, 6).flatmap(
        lambda drafted: st.integers(0, drafted).map(lambda accepted: draft_round(drafted, accepted, accepted + 1))
    ),
    max_size=6,
).map(AcceptanceStats.from_rounds)


def test_counts_of_rounds():
    stats = AcceptanceStats.from_rounds(ROUNDS)
    assert (stats.drafted, stats.examined, stats.accepted) == (32, 5 + 3 + 0 + 1 + 12 + 2, 21)
    assert (stats.emitted, stats.target_forwards, stats.num_requests) == (26, 6, 1)
    assert stats.accepted_length_histogram == {0: 1, 2: 2, 5: 1, 12: 1}
    assert stats.alpha == 21 / 23
    assert stats.block_efficiency == 26 / 6
    assert all(isinstance(n, int) for n in (stats.drafted, stats.examined, stats.accepted, stats.emitted))


def trace(rounds, completion):
    return replace(bare_trace([0], np.zeros(completion), 8), rounds=tuple(rounds))


def test_a_trace_counts_as_its_rounds_and_a_target_only_one_takes_a_forward_a_token():
    assert AcceptanceStats.from_trace(trace(ROUNDS, 26)) == AcceptanceStats.from_rounds(ROUNDS)
    alone = AcceptanceStats.from_trace(trace([], 7))
    assert (alone.emitted, alone.target_forwards, alone.block_efficiency, alone.drafted) == (7, 7, 1, 0)
    assert math.isnan(alone.alpha) and alone.num_requests == 1


@repeatable
@given(rounds_strategy, rounds_strategy, rounds_strategy)
def test_addition_is_that_of_counts(a, b, c):
    before = json.dumps([a.to_dict(), b.to_dict()])
    total = a + b
    assert json.dumps([a.to_dict(), b.to_dict()]) == before
    for name in ("drafted", "examined", "accepted", "emitted", "target_forwards", "num_requests"):
        assert getattr(total, name) == getattr(a, name) + getattr(b, name)
    assert sum(total.accepted_length_histogram.values()) == sum(
        sum(x.accepted_length_histogram.values()) for x in (a, b)
    )
    assert (a + b) + c == a + (b + c) == sum([a, b, c])
    assert a + AcceptanceStats() == a == AcceptanceStats() + a


def test_equality_sees_counts_and_requests():
    assert requests([(1, 2), (3, 4)]) == requests([(1, 2), (3, 4)])
    assert requests([(1, 2), (3, 4)]) != requests([(3, 4), (1, 2)])
    assert requests([(1, 2), (3, 4)]) != requests([(2, 3), (2, 3)])
    assert AcceptanceStats(emitted=1) != AcceptanceStats(emitted=2)
    assert AcceptanceStats() != 0


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Requests differ in difficulty, so that counting tokens as independent would cover far less."""
    rng = np.random.default_rng(0)
    truth, hits, naive_hits, trials = 0.5, 0, 0, 300
    for _ in range(trials):
        rates, examined = rng.beta(2, 2, size=60), 50
        pairs = np.stack([np.full(60, examined), rng.binomial(examined, rates)], axis=1)
        stats = AcceptanceStats(examined=pairs[:, 0].sum(), accepted=pairs[:, 1].sum(), requests=pairs)
        low, high = stats.alpha_interval
        hits += low <= truth <= high
        naive_hits += abs(stats.alpha - truth) <= 1.96 * math.sqrt(0.25 / 3000)
    assert 0.90 <= hits / trials <= 0.98
    assert naive_hits / trials < 0.7


def test_the_interval_of_equal_requests_of_one_and_of_unexamined_ones():
    assert requests([(3, 4)] * 5).alpha_interval == (0.75, 0.75)
    for pairs in ([(3, 4)], [(0, 0), (0, 0)]):
        assert all(math.isnan(x) for x in requests(pairs).alpha_interval)
    assert requests([(0, 9), (9, 9)]).alpha_interval == (0, 1)
    low, high = requests([(0, 0), (1, 1), (0, 0)]).alpha_interval
    assert (low, high) == (1, 1)  # what examined nothing says nothing


def test_the_interval_is_that_of_all_requests_where_few_are_kept_one_by_one():
    pairs = np.tile([[10, 4], [10, 8]], (2000, 1))
    parts = (AcceptanceStats(examined=200, accepted=120, requests=part) for part in np.split(pairs, 200))
    stats = sum(parts, AcceptanceStats())
    assert (stats.num_requests, stats.examined, stats.accepted) == (4000, 40_000, 24_000)
    np.testing.assert_array_equal(stats.requests[:, :2], pairs[-MAX_REQUESTS:])
    assert stats.alpha_interval == AcceptanceStats(examined=40_000, accepted=24_000, requests=pairs).alpha_interval
    low, high = stats.alpha_interval
    assert low == pytest.approx(0.6 - 1.96 * 0.2 / math.sqrt(4000), abs=6e-4)
    assert high == pytest.approx(0.6 + 1.96 * 0.2 / math.sqrt(4000), abs=6e-4)


def test_the_gain_is_paired_by_request():
    rng = np.random.default_rng(2)
    rates = rng.uniform(0.1, 0.8, size=20)
    before = [request(round(100 * r), 100) for r in rates]
    after = [request(round(100 * r) + 10, 100) for r in rates]
    assert alpha_gain_interval(before, after) == pytest.approx((0.1, 0.1))  # every request gained the same
    assert sum(after, AcceptanceStats()).alpha_interval[0] < sum(before, AcceptanceStats()).alpha_interval[1]
    assert alpha_gain_interval(after, before) == pytest.approx((-0.1, -0.1))
    assert alpha_gain_interval(before, before) == (0, 0)
    assert alpha_gain_interval([sum(before)], [sum(after)]) == alpha_gain_interval(before, after)


def test_what_is_counted_stays_small_however_many_requests_and_domains_there_are():
    tally, some = Tally(), [request(i % 5, 5) for i in range(5)]

    def size():
        return len(json.dumps(tally.state())), len(pickle.dumps(tally.total()))

    for i in range(2 * MAX_REQUESTS):
        tally.add(None, some[i % 5])
    before = size()
    for i in range(5_000):
        tally.add(None, some[i % 5])
    assert tally.total().num_requests == tally.requests == 5_000 + 2 * MAX_REQUESTS
    assert all(after <= earlier + 150 for after, earlier in zip(size(), before, strict=True))  # digits of the counts
    assert tally.total().alpha == pytest.approx(0.4, abs=1e-3)
    for i in range(2 * MAX_DOMAINS):
        tally.add(f"by a stranger {i}", some[0])
    assert len(tally.by_domain()) == MAX_DOMAINS
    assert tally.total().num_requests == tally.requests
    again = Tally()
    assert again.load(json.loads(json.dumps(tally.state()))) == tally.requests
    assert again.by_domain() == tally.by_domain()
    assert again.total().alpha_interval == tally.total().alpha_interval


@pytest.mark.parametrize("stats", [AcceptanceStats(), AcceptanceStats.from_rounds(ROUNDS), requests([(1, 2), (2, 2)])])
def test_round_trip_through_json_and_pickle(stats):
    data = json.loads(json.dumps(stats.to_dict(), allow_nan=False))
    assert AcceptanceStats.from_dict(data) == stats
    assert AcceptanceStats.from_dict(data).requests.dtype == stats.requests.dtype
    assert AcceptanceStats.from_dict(data) + stats == stats + stats
    assert list(AcceptanceStats.from_dict(data).accepted_length_histogram) == list(stats.accepted_length_histogram)
    assert pickle.loads(pickle.dumps(stats)) == stats


def test_the_report_says_what_follows_from_the_counts():
    data = requests([(1, 2), (2, 2)]).to_dict()
    assert data["alpha"] == 0.75 and data["block_efficiency"] == 2.5 and len(data["alpha_interval"]) == 2
    empty = AcceptanceStats().to_dict()
    assert empty["alpha"] is empty["alpha_interval"] is empty["block_efficiency"] is None


def test_repr_reads_well():
    assert (
        repr(requests([(3, 4)] * 5)) == "4.00 tokens per target forward, acceptance 0.750 [0.750, 0.750], 5 requests"
    )
    assert str(request(3, 4)) == "4.00 tokens per target forward, acceptance 0.750, 1 request"
    text = AcceptanceStats.from_counts(examined=4, accepted=3, emitted=9, target_forwards=3, text_accepted=5)
    assert "acceptance 0.750, 3 tokens from the draft and 5 from earlier text, 1 request" in str(text)
    assert repr(AcceptanceStats()) == "0 requests"


@pytest.fixture
def compared() -> Comparison:
    before = [request(i, 8) for i in range(5)]
    return Comparison([*"abab", None], {"before": before, "after": [request(i + 2, 8) for i in range(5)]})


def test_parts_are_the_domains_and_all_requests(compared):
    parts = compared.parts()
    assert list(parts) == ["a", "b", "None", "all"]
    assert parts["a"].totals["before"].accepted == 0 + 2
    assert parts["b"].totals["after"].accepted == 3 + 5
    assert sum(part.totals["after"] for name, part in parts.items() if name != "all").examined == 40
    assert list(parts["a"].parts()) == ["all"]
    assert compared.last_fifth().domains == [None]
    assert parts["a"].last_fifth().domains == []


def test_the_gain_is_that_of_the_second_draft_over_the_first(compared):
    before, after = compared.totals.values()
    assert compared.gain == pytest.approx(2 / 8)
    assert compared.gain_interval == alpha_gain_interval([before], [after])
    data = compared.to_dict()
    assert (data["requests"], data["gain"]) == (5, compared.gain)
    assert data["after"] == figures_of(after)
    assert "requests" not in data["after"]
    assert compared.alphas() == {"before": before.alpha, "after": after.alpha}


def test_undefined_values_are_null():
    nothing = Comparison(["a"], {"before": [request(0, 0)], "after": [request(0, 0)]})
    data = json.loads(json.dumps(nothing.to_dict(), allow_nan=False))
    assert (data["gain"], data["gain_interval"], nothing.alphas()) == (None, None, {"before": None, "after": None})
