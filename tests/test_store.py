import contextlib
import errno
import functools
import inspect
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import killed_savers
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from processes import run_python
from waiting import LONG, Clock, full

from osd_hf.errors import ConfigError, DataError, StoreError
from osd_hf.store import folder as folder_module
from osd_hf.store import store as module
from osd_hf.store.folder import table_to_traces, traces_to_table
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import DraftRound, Trace, ids_dtype

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals, forks or locks")


def make_trace(time: float, *, positions: int = 12, kept: int = 8, domain: str | None = None) -> Trace:
    """A trace that `time` identifies: `draft_version` is its whole part."""
    rng = np.random.default_rng(int(time))
    rounds = tuple(DraftRound(rng.integers(0, 100, 5).astype(np.int32), 1, 2) for _ in range(positions // 2))
    return Trace(
        prompt_ids=rng.integers(0, 100, 7).astype(np.int32),
        completion_ids=rng.integers(0, 100, positions).astype(np.int32),
        rounds=rounds,
        top_logits=-np.sort(rng.exponential(3.0, (positions, kept)), axis=1).astype(np.float16),
        top_ids=rng.integers(0, 100, (positions, kept)).astype(np.uint16),
        tail_logprob=-rng.exponential(3.0, positions).astype(np.float32),
        vocab_size=100,
        domain=domain,
        draft_version=int(time),
        sampling={"max_new_tokens": positions},
        created_at_seconds=time,
    )


def versions(traces: Iterable[Trace]) -> list[int]:
    return [t.draft_version for t in traces]


def bits(value: Any) -> Any:
    """Something that compares equal only where every bit, shape and type does."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Trace | DraftRound):
        return tuple(bits(getattr(value, field.name)) for field in fields(value))
    return tuple(map(bits, value)) if isinstance(value, tuple) else value


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*/*.parquet"))


def unfinished(path: Path) -> list[Path]:
    return sorted(path.glob("*/.*.tmp"))


# Round trips


def int32s(size: int | st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    return hnp.arrays(np.int32, size)


def float32s(size: int) -> st.SearchStrategy[Any]:
    return hnp.arrays(np.uint32, size).map(lambda a: a.view(np.float32))  # NaNs with payloads and infinities too


@st.composite
def draft_rounds(draw: st.DrawFn) -> DraftRound:
    drafted, examined = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    p, q = (draw(st.none() | float32s(examined)) for _ in "pq")
    text = draw(st.none() | hnp.arrays(np.bool_, drafted))
    return DraftRound(draw(int32s(drafted)), draw(st.integers(0, 4)), draw(st.integers(0, 5)), p, q, text)


@st.composite
def all_traces(draw: st.DrawFn) -> Trace:
    positions, kept = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    vocab_size = draw(st.sampled_from([5, 1 << 16, (1 << 16) + 1, 152064]))
    ids_shape = (positions, draw(st.sampled_from([0, kept])))
    json_values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    return Trace(
        prompt_ids=draw(int32s(st.integers(0, 4))),
        completion_ids=draw(int32s(positions)),
        rounds=tuple(draw(st.lists(draft_rounds(), max_size=3))),
        top_logits=draw(hnp.arrays(np.uint16, (positions, kept))).view(np.float16),
        top_ids=draw(hnp.arrays(ids_dtype(vocab_size), ids_shape, elements=st.integers(0, vocab_size - 1))),
        tail_logprob=draw(float32s(positions)),
        vocab_size=vocab_size,
        decoder_prompt_ids=draw(st.none() | int32s(st.integers(0, 3))),
        domain=draw(st.none() | st.text(st.characters(codec="utf-8"))),
        draft_version=draw(st.integers(0, (1 << 31) - 1)),
        sampling=draw(st.dictionaries(st.text(), json_values | st.lists(json_values, max_size=2), max_size=2)),
        created_at_seconds=draw(st.floats(allow_nan=False, allow_infinity=False)),
        target=draw(st.none() | st.text(st.characters(codec="utf-8"))),
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(all_traces(), max_size=4), st.integers(0, 3))
def test_a_table_keeps_every_bit(traces: list[Trace], start: int) -> None:
    table = traces_to_table(traces)
    assert table.schema.equals(folder_module.SCHEMA)
    table.validate(full=True)
    assert bits(tuple(table_to_traces(table))) == bits(tuple(traces))
    assert bits(tuple(table_to_traces(table.slice(start)))) == bits(tuple(traces[start:]))


@settings(max_examples=15, deadline=None)
@given(st.lists(all_traces(), min_size=1, max_size=5))
def test_a_folder_keeps_every_bit(tmp_path_factory: pytest.TempPathFactory, traces: list[Trace]) -> None:
    path = tmp_path_factory.mktemp("store")
    traces = sorted(traces, key=lambda t: t.created_at_seconds)
    with CorrectionStore(path) as store:
        for trace in traces:
            store.append(trace)
        assert bits(tuple(store)) == bits(tuple(traces))
    assert bits(tuple(CorrectionStore(path))) == bits(tuple(traces))


def test_settings_that_json_does_not_know_are_written_as_what_it_knows() -> None:
    sampling = {"ids": np.array([1, 2]), "bias": {(1, 2): np.float32(0.5)}, "stop": {"a"}, "type": np.float32}
    read = table_to_traces(traces_to_table([replace(make_trace(1), sampling=sampling)]))[0].sampling
    assert read == {"ids": [1, 2], "bias": [[[1, 2], 0.5]], "stop": ["a"], "type": "<class 'numpy.float32'>"}


def test_a_table_without_the_columns_is_refused() -> None:
    with pytest.raises(StoreError, match="lacks .*prompt_ids"):
        table_to_traces(pa.table({"text": ["a"]}))
    wrong = traces_to_table([]).set_column(0, "prompt_ids", pa.array([], pa.struct([("a", pa.int32())])))
    with pytest.raises(StoreError, match="not a table of traces"):
        table_to_traces(wrong)
    column = pa.array([[None]], pa.list_(pa.int32()))
    with pytest.raises(StoreError, match="not a table of traces"):
        table_to_traces(traces_to_table([make_trace(1)]).set_column(0, "prompt_ids", column))


# Appending and reading, in memory and on disk


@pytest.fixture(params=["memory", "disk"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "store" if request.param == "disk" else None


def test_iterates_oldest_first_and_in_the_order_of_appending_and_counts(path: Path | None) -> None:
    store = CorrectionStore(path, flush_every=3)
    assert (len(store), list(store)) == (0, [])
    for time in [5, 1, 4, 2, 3, 9, 7, 8]:
        store.append(make_trace(time))
    assert versions(store) == [1, 2, 3, 4, 5, 7, 8, 9]
    for time in range(100, 108):
        store.append(replace(make_trace(time), created_at_seconds=9.5))
    for _ in range(2):
        assert versions(store) == [1, 2, 3, 4, 5, 7, 8, 9, *range(100, 108)]
        assert len(store) == 16
        store.flush()


def test_a_sample_has_different_traces_evenly(path: Path | None) -> None:
    store = CorrectionStore(path, flush_every=4)
    for i in range(10):
        store.append(make_trace(i))
    assert sorted(versions(store.sample(10, rng=0))) == list(range(10))
    assert sorted(versions(store.sample(99, rng=0))) == list(range(10))
    assert store.sample(0) == []
    assert len(set(versions(store.sample(4)))) == 4
    assert versions(store.sample(4, rng=3)) == versions(store.sample(4, rng=np.random.default_rng(3)))
    rng = np.random.default_rng(0)
    counts = np.bincount([v for _ in range(500) for v in versions(store.sample(3, rng=rng))], minlength=10)
    assert counts.min() > 110  # 150 each, standard deviation 10
    assert counts.max() < 190


def test_a_sample_keeps_to_a_domain_and_to_the_newest(path: Path | None) -> None:
    store = CorrectionStore(path, flush_every=4)
    for i in range(10):
        store.append(make_trace(i, domain="even" if i % 2 == 0 else None))
    assert sorted(versions(store.sample(99, domain="even"))) == [0, 2, 4, 6, 8]
    assert sorted(versions(store.sample(99, newest=3))) == [7, 8, 9]
    assert sorted(versions(store.sample(99, newest=2, domain="even"))) == [6, 8]
    assert store.sample(99, newest=0) == []
    assert store.sample(3, domain="odd") == []
    for arguments in [{"n": -1}, {"n": 1, "newest": -1}]:
        with pytest.raises(ConfigError, match="must not be negative, got -1"):
            store.sample(**arguments)


def test_the_dataset_has_the_columns_of_the_shards(tmp_path: Path) -> None:
    import datasets

    store = CorrectionStore(tmp_path / "store", flush_every=3)
    traces = [make_trace(time) for time in [5, 1, 4, 2, 3, 9, 7]]
    for trace in traces:
        store.append(trace)
    dataset = store.to_dataset()
    assert isinstance(dataset, datasets.Dataset)
    assert dataset["draft_version"] == [1, 2, 3, 4, 5, 7, 9]
    assert bits(tuple(table_to_traces(dataset.data.table))) == bits(tuple(store))
    store.flush()
    datasets.disable_progress_bars()
    files, cache = f"{tmp_path}/store/*/*.parquet", str(tmp_path / "cache")
    loaded: Any = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
    assert loaded.features == dataset.features
    assert str(loaded.features["top_logits"].feature.feature.dtype) == "float16"
    read = sorted(table_to_traces(loaded.data.table), key=lambda t: t.created_at_seconds)
    assert bits(tuple(read)) == bits(tuple(store))
    assert loaded[0]["top_logits"] == next(iter(store)).top_logits.tolist()
    memory = CorrectionStore()
    assert memory.to_dataset().column_names == dataset.column_names
    memory.append(next(iter(store)))
    assert memory.to_dataset()[0] == loaded[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logits": np.zeros((3, 8), np.float16)},
        {"top_logits": np.zeros((12, 8), np.float32)},
        {"top_ids": np.zeros((12, 7), np.uint16)},
        {"top_ids": np.zeros((12, 8), np.float32)},
        {"tail_logprob": np.zeros(11, np.float32)},
        {"tail_logprob": np.zeros(12, np.float64)},
        {"prompt_ids": np.zeros(3)},
        {"prompt_ids": np.zeros((1, 3), np.int32)},
        {"decoder_prompt_ids": np.zeros(3)},
        {"rounds": (DraftRound(np.zeros(2), 0, 1),)},  # type: ignore[arg-type]
        {"rounds": (DraftRound(np.zeros(2, np.int32), 0, 1, np.zeros(1), None),)},  # type: ignore[arg-type]
        {"created_at_seconds": float("nan")},
        {"domain": "\ud800"},
        {"target": "\ud800"},
    ],
)
def test_a_trace_that_could_not_be_written_is_refused_at_once(path: Path | None, fields: dict[str, Any]) -> None:
    store = CorrectionStore(path)
    with pytest.raises(DataError):
        store.append(replace(make_trace(1), **fields))
    store.append(make_trace(2))
    store.flush()
    assert versions(store) == [2]


# Limits


def test_memory_keeps_the_newest_within_its_bytes() -> None:
    size = make_trace(0).nbytes
    store = CorrectionStore(max_bytes=3 * size)
    for i in [4, 0, 1, 2, 3]:
        store.append(make_trace(i))
        assert store.nbytes <= 3 * size
    assert versions(store) == [2, 3, 4]
    assert store.nbytes == 3 * size


def test_a_folder_stays_within_its_bytes_and_keeps_the_newest(tmp_path: Path) -> None:
    max_bytes = 150_000
    store = CorrectionStore(tmp_path, max_bytes=max_bytes, flush_every=5)
    for i in range(120):
        store.append(make_trace(i, kept=32))
        assert sum(shard.stat().st_size for shard in shards(tmp_path)) <= store.nbytes <= max_bytes
    kept = versions(store)
    assert kept == list(range(kept[0], 120))
    assert kept[0] > 0
    assert store.nbytes > max_bytes * 2 / 3


def test_a_limit_below_one_trace_keeps_nothing_and_says_so(
    path: Path | None, caplog: pytest.LogCaptureFixture
) -> None:
    store = CorrectionStore(path, max_bytes=200)
    store.append(make_trace(1))
    store.flush()
    assert list(store) == []
    assert store.nbytes <= 200
    assert "too small for a single trace" in caplog.text


def test_a_writer_deletes_the_oldest_shards_of_others(tmp_path: Path) -> None:
    old, new = CorrectionStore(tmp_path), CorrectionStore(tmp_path)
    for i in range(3):
        old.append(make_trace(i))
    old.flush()
    for i in range(3, 6):
        new.append(make_trace(i))
    new.flush()
    one = shards(tmp_path)[0].stat().st_size
    bounded = CorrectionStore(tmp_path, max_bytes=2 * one + 2000)
    bounded.append(make_trace(6))
    bounded.flush()
    assert versions(bounded) == versions(old) == versions(new) == [3, 4, 5, 6]


def test_age_is_counted_from_the_creation(path: Path | None) -> None:
    clock = Clock(100.0)
    store = CorrectionStore(path, max_age_seconds=80, flush_every=3, clock=clock)
    store.append(make_trace(19))
    assert len(store) == 0
    for time in [20, 30, 40, 50, 60]:
        store.append(make_trace(time))
    assert versions(store) == [20, 30, 40, 50, 60]
    clock.now = 111.0
    assert versions(store) == [40, 50, 60]
    assert sorted(versions(store.sample(9))) == [40, 50, 60]
    assert store.to_dataset()["draft_version"] == [40, 50, 60]
    assert len(store) == 3
    store.append(make_trace(111))
    assert versions(store) == [40, 50, 60, 111]
    clock.now = 1000.0
    store.flush()
    assert store.nbytes == 0


def test_nothing_older_than_the_limit_is_left_on_disk(tmp_path: Path) -> None:
    clock = Clock()
    store = CorrectionStore(tmp_path, max_age_seconds=40, flush_every=1000, clock=clock)
    oldest = functools.cache(lambda shard: min(pq.read_table(shard)["draft_version"].to_pylist()))
    for time in range(100):
        clock.now = float(time)
        store.append(make_trace(time, positions=2))
        assert all(time - oldest(shard) <= 40 for shard in shards(tmp_path))
        assert len(store) >= min(time, 40 - 5)  # a shard spans an eighth of the age


def test_a_time_in_the_future_is_replaced(tmp_path: Path) -> None:
    clock, future = Clock(1e9), 2e9
    store = CorrectionStore(tmp_path, max_age_seconds=80_000, clock=clock)
    store.append(make_trace(future))
    store.append(make_trace(1e9 + 60))  # clocks of machines differ a little
    assert [t.created_at_seconds for t in store] == [1e9, 1e9 + 60]
    with CorrectionStore(tmp_path) as other:
        other.append(make_trace(future))
    for shard in shards(tmp_path):
        os.utime(shard, (1e9, 1e9))
    store.flush()
    assert len(store) == 3
    clock.now += 80_100
    store.flush()
    assert len(store) == 0
    assert shards(tmp_path) == []


def test_limits_must_be_positive() -> None:
    for limits in [{"max_bytes": 0}, {"max_age_seconds": -1.0}, {"flush_every": 0}]:
        with pytest.raises(ConfigError, match=f"{next(iter(limits))} must be positive"):
            CorrectionStore(**limits)  # type: ignore[arg-type]


# Flushing and closing


def test_a_tail_is_flushed_when_it_is_long_or_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CorrectionStore(tmp_path, flush_every=3)
    store.append(make_trace(0))
    store.append(make_trace(1))
    assert len(CorrectionStore(tmp_path)) == 0
    store.append(make_trace(2))
    assert len(CorrectionStore(tmp_path)) == 3
    monkeypatch.setattr(module, "FLUSH_BYTES", 2 * make_trace(0).nbytes)
    store = CorrectionStore(tmp_path)
    for i in range(3, 6):
        store.append(make_trace(i))
    assert len(CorrectionStore(tmp_path)) == 5
    store = CorrectionStore(tmp_path / "other", max_bytes=100 * make_trace(0).nbytes)
    store.append(make_trace(0))
    assert (store.nbytes, shards(tmp_path / "other")) == (make_trace(0).nbytes, [])
    for i in range(1, 20):
        store.append(make_trace(i))
    assert shards(tmp_path / "other") != []  # a shard is at most an eighth of the store


def test_closing_flushes_and_ends_appending_but_not_reading(path: Path | None) -> None:
    with CorrectionStore(path) as store:
        store.append(make_trace(1))
    store.close()
    assert versions(store) == [1]
    with pytest.raises(StoreError, match="closed"):
        store.append(make_trace(2))
    assert versions(store) == [1]


def test_closing_quietly_reports_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CorrectionStore(tmp_path / "store")
    store.append(make_trace(1))
    shutil.rmtree(tmp_path / "store")
    del store
    assert "1 traces were lost: cannot write" in caplog.text


# Children start sooner without the rest of the package and of this file.
CHILD = """
import sys, types
from collections.abc import Iterable
from pathlib import Path
import numpy as np
package = types.ModuleType("osd_hf")
package.__path__ = [sys.argv[2]]
sys.modules["osd_hf"] = package
from osd_hf.store import store as module
from osd_hf.trace import DraftRound, Trace
from osd_hf.store.store import CorrectionStore
path = Path(sys.argv[1])
"""


def start(code: str, path: Path) -> subprocess.Popen[str]:
    code = "\n".join(
        [CHILD, inspect.getsource(make_trace), inspect.getsource(shards), inspect.getsource(versions), code]
    )
    command = [sys.executable, "-c", code, str(path), str(Path(module.__file__).parent.parent)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_end_of_a_program_flushes(tmp_path: Path) -> None:
    child = start("store = CorrectionStore(path); store.append(make_trace(1)); store.cycle = store", tmp_path)
    child.communicate()
    assert child.returncode == 0
    assert versions(CorrectionStore(tmp_path)) == [1]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CorrectionStore(tmp_path, flush_every=3)
    store.append(make_trace(0))

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.os, "fsync", full)
        with pytest.raises(StoreError, match="cannot write .*shard-000001.parquet: No space left on device") as caught:
            store.flush()
        assert isinstance(caught.value.__cause__, OSError)
        store.append(make_trace(1))
        for i in (2, 3, 4):
            with pytest.raises(StoreError, match="No space left"):
                store.append(make_trace(i))
    assert shards(tmp_path) == unfinished(tmp_path) == []
    assert versions(store) == [0, 1, 2, 3, 4]
    store.flush()
    assert versions(CorrectionStore(tmp_path)) == [0, 1, 2, 3, 4]
    assert versions(store) == [0, 1, 2, 3, 4]


# Many writers, many readers


def test_writers_have_their_own_folders_and_all_see_everything(tmp_path: Path) -> None:
    a, b, reader = (CorrectionStore(tmp_path, flush_every=2) for _ in range(3))
    for i in range(0, 8, 2):
        a.append(make_trace(i))
        b.append(make_trace(i + 1))
    assert versions(a) == versions(b) == versions(reader) == list(range(8))
    assert reader.to_dataset()["draft_version"] == list(range(8))
    assert len({s.parent for s in shards(tmp_path)}) == 2
    a.append(make_trace(8))
    assert len(a) == 9
    assert len(reader) == 8  # not flushed yet


def test_reading_survives_shards_that_vanish(tmp_path: Path) -> None:
    with CorrectionStore(tmp_path, flush_every=2) as store:
        for i in range(8):
            store.append(make_trace(i))
    reader = CorrectionStore(tmp_path)
    iterator = iter(reader)
    shards(tmp_path)[1].unlink()
    assert versions(iterator) == versions(reader) == [0, 1, 4, 5, 6, 7]
    assert sorted(versions(reader.sample(8))) == [0, 1, 4, 5, 6, 7]
    assert reader.to_dataset()["draft_version"] == [0, 1, 4, 5, 6, 7]


def test_threads_append_and_read_at_once(path: Path | None) -> None:
    store = CorrectionStore(path, flush_every=7)
    barrier = threading.Barrier(5)

    def write(start: int) -> None:
        barrier.wait()
        for i in range(start, start + 25):
            store.append(make_trace(i, positions=2))

    def read() -> None:
        barrier.wait()
        for i in range(15):
            seen = versions(store.sample(10, rng=i))
            assert len(seen) == len(set(seen))
            seen = versions(store)
            assert len(seen) == len(set(seen))
            assert seen == sorted(seen)

    with ThreadPoolExecutor(5) as pool:
        for future in [*(pool.submit(write, s) for s in (0, 25, 50, 75)), pool.submit(read)]:
            future.result()
    assert versions(store) == list(range(100))


def test_processes_write_and_read_at_once(tmp_path: Path) -> None:
    code = """
store = CorrectionStore(path, flush_every=4)
print("ready", flush=True)
start = int(input())
for i in range(start, start + 40):
    store.append(make_trace(i))
    if i % 10 == 0:
        assert set(range(start, i + 1)) <= set(versions(store))
store.close()
"""
    children = [start(code, tmp_path) for _ in range(2)]  # both begin the store at once
    for i, child in enumerate(children):
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert child.stdin is not None
        child.stdin.write(f"{40 * i}\n")
        child.stdin.flush()
    reader, seen = CorrectionStore(tmp_path), 0
    while any(child.poll() is None for child in children):
        assert len(reader) >= seen
        seen = len(list(reader))
    for child in children:
        child.communicate()
        assert child.returncode == 0
    assert versions(reader) == list(range(80))


@posix
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_tail_and_folder(tmp_path: Path) -> None:
    store = CorrectionStore(tmp_path)
    store.append(make_trace(0))

    def child() -> None:
        store.append(make_trace(1))
        store.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    with store._lock:  # as when another thread of the parent is busy with the store
        process.start()
        process.join(timeout=LONG)
    assert process.exitcode == 0
    assert [pq.read_table(s)["draft_version"].to_pylist() for s in shards(tmp_path)] == [[1]]
    store.flush()
    assert versions(store) == [0, 1]
    assert len({s.parent for s in shards(tmp_path)}) == 2


def test_an_unpickled_store_is_another_writer(tmp_path: Path) -> None:
    store = CorrectionStore(tmp_path, max_bytes=10**6, flush_every=2)
    for i in range(3):
        store.append(make_trace(i))
    copy = pickle.loads(pickle.dumps(store))
    assert (versions(copy), copy.max_bytes, copy.flush_every) == ([0, 1], 10**6, 2)
    copy.append(make_trace(9))
    copy.flush()
    store.flush()
    assert versions(store) == [0, 1, 2, 9]
    with pytest.raises(TypeError, match="in memory"):
        pickle.dumps(CorrectionStore())


# Writers that die


@posix
def test_a_writer_killed_at_any_step_loses_no_finished_shard_and_what_it_left_is_deleted_later(tmp_path: Path) -> None:
    done = run_python(Path(killed_savers.__file__), str(tmp_path), "store", "6")
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout)
    assert {tuple(kill["there"]) for kill in kills} == {(0,), (0, 1), (0, 1, 2)}
    assert all(kill["after"] == [True, 0] for kill in kills)


def test_old_remains_of_writers_are_deleted_and_new_ones_stay(tmp_path: Path) -> None:
    for i in range(3):
        with CorrectionStore(tmp_path) as store:
            store.append(make_trace(i))
    living = CorrectionStore(tmp_path)
    living.append(make_trace(3))
    first, second, _ = shards(tmp_path)
    files = [shard.with_name(f".shard-000002-{number}.tmp") for shard in (first, second) for number in (0, 1)]
    for file in files:
        file.write_text("torn")
    (gone,) = pq.read_table(second)["draft_version"].to_pylist()
    second.unlink()
    for path in (files[0], files[2], files[3], second.parent):
        os.utime(path, (0, 0))
    CorrectionStore(tmp_path).append(make_trace(4))
    assert unfinished(tmp_path) == [files[1]]
    assert first.exists() and not second.parent.exists()
    for folder in tmp_path.iterdir():
        os.utime(folder, (0, 0))
    CorrectionStore(tmp_path).append(make_trace(5))  # deletes the empty folder of a store that waited for long
    living.append(make_trace(6))
    living.flush()
    assert versions(living) == [i for i in range(7) if i != gone]


# Foreign and unreadable stores


def test_a_folder_that_is_no_store_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(StoreError, match=r"not a store .* contains photos and no \.osd_hf_store\.json.*new or empty"):
        CorrectionStore(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["photos"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=f"cannot open the store {path}"):
            CorrectionStore(path)


@pytest.mark.parametrize(
    "marker", ["{torn", "", "[1]", json.dumps({"format": "other"}), json.dumps(folder_module.MARKER | {"version": 2})]
)
def test_a_marker_of_another_kind_is_refused(tmp_path: Path, marker: str) -> None:
    (tmp_path / folder_module.MARKER_NAME).write_text(marker)
    with pytest.raises(StoreError, match="is not the marker of a store that this package reads"):
        CorrectionStore(tmp_path)


def test_a_store_being_begun_by_another_process_is_no_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / f"{folder_module.MARKER_NAME.removesuffix('.json')}-00.tmp").write_text("{")
    assert len(CorrectionStore(tmp_path)) == 0


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Patched rather than by file modes, which do not bind root."""

    def deny(name: str) -> None:
        def refuse(*arguments: Any, **_: Any) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(arguments[0]))

        monkeypatch.setattr(folder_module.os, name, refuse)

    yield deny


def test_a_folder_without_permission_is_refused(tmp_path: Path, denied: Callable[[str], None]) -> None:
    store = CorrectionStore(tmp_path)
    store.append(make_trace(0))
    denied("scandir")
    with pytest.raises(StoreError, match="cannot list the store .*Permission denied"):
        len(store)
    with pytest.raises(StoreError, match="Permission denied"):
        CorrectionStore(tmp_path)


def test_a_store_that_is_only_readable_fails_at_the_first_append(
    tmp_path: Path, denied: Callable[[str], None]
) -> None:
    with CorrectionStore(tmp_path) as store:
        store.append(make_trace(0))
    denied("mkdir")
    store = CorrectionStore(tmp_path)
    assert versions(store) == [0]
    with pytest.raises(StoreError, match="cannot write to the store .*Permission denied"):
        store.append(make_trace(1))


def damage_end(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-20])


def damage_middle(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    at = pq.read_metadata(shard).row_group(0).column(8).data_page_offset + 100
    data[at : at + 8] = bytes(b ^ 255 for b in data[at : at + 8])
    shard.write_bytes(data)


def replace_table(shard: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), shard)


@pytest.mark.parametrize("damage", [damage_end, replace_table])
def test_a_damaged_shard_is_named_on_opening(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with CorrectionStore(tmp_path, flush_every=1) as store:
        store.append(make_trace(0))
        store.append(make_trace(1))
    shard = shards(tmp_path)[1]
    damage(shard)
    with pytest.raises(StoreError, match=str(shard)):
        CorrectionStore(tmp_path)
    shard.unlink()
    assert versions(CorrectionStore(tmp_path)) == [0]


def test_damaged_rows_are_noticed_on_reading(tmp_path: Path) -> None:
    with CorrectionStore(tmp_path) as store:
        store.append(make_trace(0, positions=64, kept=64))
    shard = shards(tmp_path)[0]
    damage_middle(shard)
    store = CorrectionStore(tmp_path)
    with pytest.raises(StoreError, match=f"the shard {shard} cannot be read"):
        list(store)
    with pytest.raises(StoreError, match=f"the shard {shard} cannot be read"):
        store.to_dataset()


@posix
def test_only_what_writers_of_stores_made_is_deleted(tmp_path: Path) -> None:
    with CorrectionStore(tmp_path, flush_every=1) as store:
        store.append(make_trace(0))
    (shard,) = shards(tmp_path)
    mine = [tmp_path / "backup" / "best.parquet", shard.with_name("copy.parquet"), shard.with_name(".notes.tmp")]
    mine += [tmp_path / "backup" / ".lock", tmp_path / "backup" / ".draft.tmp", tmp_path / "notes.txt"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(shard.read_bytes())
    mine.append(shard.with_name(".hidden.parquet"))
    mine[-1].write_text("torn")  # is not read
    with CorrectionStore(tmp_path, flush_every=1, max_bytes=1 << 20, max_age_seconds=50, clock=lambda: 100) as store:
        store.append(make_trace(99))
        assert versions(store) == [99]  # what is too old is not read, whoever put it there
    small = CorrectionStore(tmp_path, max_bytes=1)
    small.flush()
    assert shards(tmp_path) == sorted(path for path in mine if path.suffix == ".parquet")
    assert all(path.exists() for path in mine)


def test_a_forgotten_store_with_a_relative_path_is_flushed_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = CorrectionStore("store")
    monkeypatch.chdir("/")
    store.append(make_trace(1))
    del store
    assert versions(CorrectionStore(tmp_path / "store")) == [1]


def test_a_full_disk_does_not_break_the_byte_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = make_trace(0).nbytes
    store = CorrectionStore(tmp_path, max_bytes=10 * size, flush_every=1000)
    monkeypatch.setattr(folder_module, "write_whole", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    for i in range(30):
        with contextlib.suppress(StoreError):
            store.append(make_trace(i))
        assert store.nbytes <= 10 * size
    assert versions(store) == list(range(30 - len(store), 30))
    assert len(store) >= 9
    monkeypatch.undo()
