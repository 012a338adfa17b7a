import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from osd_hf import OnlineConfig
from osd_hf.learning.requests import DraftRequests, ReadableTraces, ReplayBuffer
from osd_hf.trace import Trace, bare_trace


def requests(number: int) -> list[Trace]:
    return [bare_trace((), (), vocab_size=4) for _ in range(number)]


def filled(capacity: int, traces: list[Trace], seed: int = 0) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, np.random.default_rng(seed))
    buffer.extend(traces)
    return buffer


@given(st.integers(1, 12), st.integers(0, 60), st.integers(0, 20))
def test_a_buffer_is_filled_up_to_its_capacity_and_sampled_without_repetition(
    capacity: int, number: int, size: int
) -> None:
    traces = requests(number)
    buffer = filled(capacity, traces)
    kept = list(buffer)
    assert len(kept) == len(buffer) == len(set(kept)) == min(number, capacity)
    assert set(kept) <= set(traces)
    assert not traces or traces[-1] in kept
    sample = buffer.sample(size)
    assert len(sample) == len(set(sample)) == min(size, len(kept))
    assert set(sample) <= set(kept)


def test_old_requests_become_rarer() -> None:
    traces, runs = requests(60), 400
    kept = [set(filled(20, traces, seed)) for seed in range(runs)]
    shares = [sum(trace in buffer for buffer in kept) / runs for trace in traces]
    expected = [(1 - 1 / 20) ** min(59 - i, 40) for i in range(60)]
    assert np.abs(np.subtract(shares, expected)).max() < 5 * np.sqrt(0.25 / runs)


@given(st.integers(1, 12), st.integers(0, 30), st.integers(0, 30))
def test_a_restored_buffer_continues_as_the_saved_one(capacity: int, before: int, after: int) -> None:
    saved, later = filled(capacity, requests(before)), requests(after)
    restored = filled(capacity, list(saved))
    restored.rng.bit_generator.state = saved.rng.bit_generator.state
    for buffer in (saved, restored):
        buffer.extend(later)
    assert list(restored) == list(saved)
    assert restored.sample(5) == saved.sample(5)


def test_requests_that_newer_ones_push_out_while_they_are_learned_from_are_replayed_afterwards() -> None:
    config = OnlineConfig(update_strategy="interval", gate=False, buffer_size=2)
    lesson, traces = DraftRequests(ReadableTraces(4, 4), config=config), requests(4)
    for trace in traces[:2]:
        lesson.observe(trace)
    learned = lesson.begin_update()
    for trace in traces[2:]:
        lesson.observe(trace)
    lesson.end_update(learned)
    assert list(lesson.buffer) == traces[:2]
    assert list(lesson.pending) == traces[2:]
