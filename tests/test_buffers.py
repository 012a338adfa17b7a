from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from osd_hf import OnlineConfig
from osd_hf.learning.requests import DraftRequests, ReplayBuffer
from osd_hf.trace import Trace, bare_trace

CAPACITY = st.integers(1, 12)
DOMAINS = st.lists(st.integers(0, 4), max_size=120)


def request(domain: object = None) -> Trace:
    return replace(bare_trace((), (), vocab_size=4), domain=None if domain is None else str(domain))


def buffer(capacity: int, seed: int = 0) -> ReplayBuffer:
    return ReplayBuffer(capacity, np.random.default_rng(seed))


def sizes(held: ReplayBuffer) -> dict[str | None, int]:
    return dict(Counter(trace.domain for trace in held))


@given(CAPACITY, DOMAINS, st.integers(0, 5))
def test_it_is_full_and_never_over_its_capacity(capacity: int, domains: list[int], seed: int) -> None:
    held = buffer(capacity, seed)
    for number, domain in enumerate(domains, 1):
        held.append(request(domain))
        assert len(held) == min(number, capacity)
    assert len(set(held)) == len(held)
    assert held.seen == {str(domain): domains.count(domain) for domain in domains}


@given(CAPACITY, DOMAINS, st.integers(0, 5))
def test_who_gives_way_is_the_largest_domain(capacity: int, domains: list[int], seed: int) -> None:
    held = buffer(capacity, seed)
    for domain in domains:
        before, new = list(held), request(domain)
        held.append(new)
        for gone in set(before) - set(held):
            were = Counter(trace.domain for trace in before)
            assert gone.domain == new.domain or were[gone.domain] == max(were.values())


@given(CAPACITY, DOMAINS, st.integers(0, 5))
def test_every_domain_has_its_share(capacity: int, domains: list[int], seed: int) -> None:
    held = buffer(capacity, seed)
    held.extend(map(request, domains))
    largest = max(sizes(held).values(), default=0)
    for domain, seen in held.seen.items():
        assert sizes(held).get(domain, 0) >= min(seen, largest - 1)


@pytest.mark.parametrize(
    ("pattern", "capacity"),
    [("a", 8), ("ab", 9), ("abc", 10), ("aaab", 7), ("a" * 30 + "b" * 20 + "a" * 10, 11)],
    ids=["one domain", "by turns", "three by turns", "unequal", "in blocks"],
)
def test_what_is_kept_is_a_uniform_sample_of_a_domains_history(pattern: str, capacity: int) -> None:
    runs, domains = 1500, (pattern * 60)[:60]
    requests = [request(domain) for domain in domains]
    kept: Counter[Trace] = Counter()
    size: dict[str | None, int] = {}
    for run in range(runs):
        held = buffer(capacity, run)
        held.extend(requests)
        kept.update(held)
        size = sizes(held)
    for domain in set(domains):
        history = [trace for trace in requests if trace.domain == domain]
        number = len(history)
        share = sum(kept[trace] for trace in history) / runs / number
        # Drawn without replacement: counts are less spread than those of a multinomial.
        spread = sum((kept[trace] - runs * share) ** 2 for trace in history) / (runs * share * (1 - share))
        assert stats.chi2.sf(spread * (number - 1) / number, number - 1) > 1e-4, domain
    assert sum(size.values()) == capacity


@given(CAPACITY, DOMAINS, st.integers(0, 20))
def test_a_sample_is_of_different_requests(capacity: int, domains: list[int], n: int) -> None:
    held = buffer(capacity)
    held.extend(map(request, domains))
    drawn = held.sample(n)
    assert len(drawn) == len(set(drawn)) == min(n, len(held))
    assert set(drawn) <= set(held)


@given(CAPACITY, DOMAINS, DOMAINS)
def test_restored_it_goes_on_as_if_nothing_had_been(capacity: int, before: list[int], after: list[int]) -> None:
    straight, saved = buffer(capacity, 1), buffer(capacity, 1)
    first = [request(domain) for domain in before]
    straight.extend(first)
    saved.extend(first)
    again = buffer(capacity, 1)
    again.append(request("of an earlier life"))
    again.restore(list(saved), list(saved.seen.items()))
    again.rng.bit_generator.state = saved.rng.bit_generator.state
    assert (list(again), again.seen) == (list(straight), straight.seen)
    for domain in after:
        new = request(domain)
        straight.append(new)
        again.append(new)
    assert (list(again), again.seen) == (list(straight), straight.seen)
    assert again.sample(5) == straight.sample(5)


def test_restored_into_less_room_the_largest_gives_way() -> None:
    held = buffer(6)
    few = [request("few"), request("few")]
    held.restore([*few, *(request("many") for _ in range(20))], [("few", 2), ("many", 40)])
    assert len(held) == 6
    assert [trace for trace in held if trace.domain == "few"] == few


def test_requests_that_newer_ones_push_out_while_they_are_learned_from_are_replayed_afterwards() -> None:
    lesson = DraftRequests(config=OnlineConfig(update_strategy="interval", gate=False, buffer_size=2))
    traces = [request() for _ in range(4)]
    for trace in traces[:2]:
        lesson.observe(trace)
    learned = lesson.begin_update()
    for trace in traces[2:]:
        lesson.observe(trace)
    lesson.end_update(learned)
    assert list(lesson.buffer) == traces[:2]
    assert list(lesson.pending) == traces[2:]
