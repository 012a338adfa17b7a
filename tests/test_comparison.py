"""Drafts compared on the same requests, in all and by domain."""

from __future__ import annotations

import json
import math

import pytest

from osd_hf import AcceptanceStats
from osd_hf.acceptance import Comparison, alpha_gain_interval, figures_of

DOMAINS = [*"abab", None]


def one_request(accepted: int, examined: int) -> AcceptanceStats:
    return AcceptanceStats.from_counts(
        drafted=examined, examined=examined, accepted=accepted, emitted=accepted + 1, target_forwards=1
    )


@pytest.fixture
def compared() -> Comparison:
    before = [one_request(i, 8) for i in range(5)]
    return Comparison(DOMAINS, {"before": before, "after": [one_request(i + 2, 8) for i in range(5)]})


def test_domains_and_all_requests_are_its_parts(compared: Comparison) -> None:
    parts = compared.parts()
    assert list(parts) == ["a", "b", "None", "all"]
    assert parts["a"].totals["before"].accepted == 0 + 2
    assert parts["b"].totals["after"].accepted == 3 + 5
    assert sum(part.totals["after"] for name, part in parts.items() if name != "all").examined == 40
    assert list(compared.of("a").parts()) == ["all"]


def test_the_gain_is_that_of_the_second_draft_over_the_first(compared: Comparison) -> None:
    assert compared.gain == pytest.approx(2 / 8)
    before, after = compared.totals.values()
    assert compared.gain_interval == alpha_gain_interval(before, after)
    data = compared.to_dict()
    assert data["requests"] == 5
    assert data["after"] == figures_of(after)
    assert "requests" not in data["after"]
    assert data["gain"] == compared.gain
    assert compared.alphas() == {"before": before.alpha, "after": after.alpha}


def test_the_last_fifth_is_rounded_like_its_beginning(compared: Comparison) -> None:
    assert compared.last_fifth().domains == [None]
    assert compared.of("a").last_fifth().domains == []


def test_what_is_undefined_is_null() -> None:
    nothing = Comparison(["a"], {"before": [one_request(0, 0)], "after": [one_request(0, 0)]})
    data = json.loads(json.dumps(nothing.to_dict(), allow_nan=False))
    assert (data["gain"], data["gain_interval"], nothing.alphas()) == (None, None, {"before": None, "after": None})
    assert math.isnan(nothing.bars({"before": "x"})["all"]["x"][0])


def test_bars_have_the_labels_of_drafts(compared: Comparison) -> None:
    bars = compared.bars({"after": "learned"})
    assert list(bars) == ["a", "b", "None", "all"]
    after = compared.totals["after"]
    assert bars["all"] == {"learned": (after.alpha, after.alpha_interval)}
