"""Following stores that others write, and publishing versions: once each, whole, killed at any moment."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import damage_end, replace_table

from osd_hf import CorrectionStore, Trace
from osd_hf.engines import versions as module
from osd_hf.engines.versions import FACTS, LATEST, VersionFolder
from osd_hf.errors import ConfigError, StateError, StoreError
from osd_hf.store.folder import StoreFollower
from osd_hf.trace import bare_trace

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals and locks")


# --- following stores -----------------------------------------------------------------------------------------------


def make_trace(writer: str, number: int) -> Trace:
    """One that its writer and its number identify."""
    rows = {"top_logits": np.zeros((1, 2), np.float16), "top_ids": np.array([[3, 4]], np.uint16)}
    facts = {"domain": writer, "draft_version": number, "created_at_seconds": float(number)}
    return replace(bare_trace([1, 2], [3], 9), **rows, **facts)


class Writers:
    """Writers of stores, each appending traces in the order of their numbers."""

    def __init__(self, *folders: Path, each: int = 2) -> None:
        self.stores = {
            f"{folder.name}-{i}": CorrectionStore(folder, flush_every=1000) for folder in folders for i in range(each)
        }
        self.written = dict.fromkeys(self.stores, 0)

    def write(self, writer: str, count: int) -> None:
        """A shard of so many."""
        for _ in range(count):
            self.stores[writer].append(make_trace(writer, self.written[writer]))
            self.written[writer] += 1
        self.stores[writer].flush()

    def folder(self, writer: str) -> Path:
        shards = Path(str(self.stores[writer].path)).glob("*/*.parquet")
        return next(shard.parent for shard in shards if pq.read_table(shard)["domain"][0].as_py() == writer)

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    writers = Writers(tmp_path / "a", tmp_path / "b")
    yield writers
    writers.close()


def follow(writers: Writers, state: Any = None) -> StoreFollower:
    follower = StoreFollower(list(dict.fromkeys(store.path for store in writers.stores.values() if store.path)))
    if state is not None:
        follower.load_state_dict(json.loads(json.dumps(state)))
    return follower


def named(traces: list[Trace]) -> list[tuple[str | None, int]]:
    return [(trace.domain, trace.draft_version) for trace in traces]


def numbers(traces: list[Trace], writer: str) -> list[int]:
    return [trace.draft_version for trace in traces if trace.domain == writer]


def drained(follower: StoreFollower, limit: int = 3) -> list[Trace]:
    found: list[Trace] = []
    while part := follower.take(limit):
        found += part
    return found


@given(st.data())
@settings(max_examples=50)
def test_each_request_is_taken_once_in_its_writer_s_order(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writers = Writers(Path(folder) / "a", Path(folder) / "b")
        follower, taken = follow(writers), list[Trace]()
        for _ in range(data.draw(st.integers(1, 10))):
            what = data.draw(st.sampled_from(["write", "write", "take", "take", "again"]))
            if what == "write":
                writers.write(data.draw(st.sampled_from(sorted(writers.stores))), data.draw(st.integers(1, 4)))
            elif what == "take":
                limit = data.draw(st.integers(1, 6))
                part = follower.take(limit)
                assert len(part) <= limit
                taken += part
            else:
                follower = follow(writers, follower.state_dict())
        taken += drained(follower, data.draw(st.integers(1, 20)))
        assert follower.take(5) == []
        for writer, count in writers.written.items():
            assert numbers(taken, writer) == list(range(count))
        assert len(taken) == sum(writers.written.values())
        writers.close()


def test_a_store_that_is_not_there_yet_is_begun(tmp_path: Path) -> None:
    follower = StoreFollower([tmp_path / "new"])
    assert follower.take(3) == []
    with CorrectionStore(tmp_path / "new") as store:
        store.append(make_trace("w", 0))
    assert named(follower.take(3)) == [("w", 0)]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").touch()
    with pytest.raises(StoreError, match="is not a store"):
        StoreFollower([tmp_path / "photos"])


def changed(column: str, value: Any) -> Callable[[Path], None]:
    """Damage the second request of a shard."""

    def change(shard: Path) -> None:
        table = pq.read_table(shard)
        at, values = table.schema.get_field_index(column), table[column].to_pylist()
        values[1] = value
        field = table.schema.field(at)
        pq.write_table(table.set_column(at, field, pa.array(values, field.type)), shard)

    return change


@pytest.mark.parametrize(
    "damage",
    [
        damage_end, replace_table, changed("vocab_size", None), changed("created_at_seconds", None),
        changed("sampling", "{torn"), changed("sampling", "[1]"), changed("top_ids", [[1, 2, 3], [4]]),
        changed("top_logits", [[None], [None]]),
    ],
)  # fmt: skip
def test_a_damaged_shard_is_left_out_and_counted(
    damage: Callable[[Path], None], writers: Writers, caplog: pytest.LogCaptureFixture
) -> None:
    for writer in ("a-0", "a-0", "a-0", "b-0"):
        writers.write(writer, 2)
    damage(sorted(writers.folder("a-0").glob("*.parquet"))[1])
    follower = follow(writers)
    found = drained(follower)
    writers.write("a-0", 1)
    found += drained(follower)
    assert numbers(found, "a-0") == [0, 1, 4, 5, 6]
    assert numbers(found, "b-0") == [0, 1]
    assert list(follower.left_out.values()) == [1]
    assert [record.message.startswith("Skipped") for record in caplog.records] == [True]


def test_shards_that_were_deleted_are_passed_over(writers: Writers) -> None:
    for _ in range(4):
        writers.write("a-0", 2)
    follower = follow(writers)
    assert numbers(follower.take(3), "a-0") == [0, 1, 2]
    shards = sorted(writers.folder("a-0").glob("*.parquet"))
    for shard in shards[1:3]:  # the one that is half taken, and one that is not
        shard.unlink()
    again = follow(writers, follower.state_dict())
    assert numbers(drained(again), "a-0") == [6, 7]
    shutil.rmtree(writers.folder("a-0"))
    assert drained(follow(writers, follower.state_dict())) == []


# --- versions -------------------------------------------------------------------------------------------------------


FILES = ("config.json", "weights/one", "weights/two")


def writing(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        assert folder.name.startswith(".")  # nobody takes it for a version
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    return write


def latest(path: Path) -> str | None:
    """What the version says that the pointer names, which is whole."""
    if not (path / LATEST).is_symlink():
        return None
    facts = json.loads((path / LATEST / FACTS).read_text())
    assert (path / LATEST).resolve().name == f"v{facts['version']:06d}"
    texts = {(path / LATEST / name).read_text() for name in FILES}
    assert texts == {facts["text"]}
    return str(facts["text"])


def published(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".") and entry.name != LATEST)


@pytest.fixture
def versions(tmp_path: Path) -> Iterator[VersionFolder]:
    versions = VersionFolder(tmp_path / "drafts", keep=3)
    yield versions
    versions.close()


def test_versions_are_numbered_and_the_newest_is_pointed_at(versions: VersionFolder) -> None:
    assert (versions.number, versions.latest) == (0, None)
    for number in range(1, 4):
        folder = versions.publish(writing(f"text {number}"), {"text": f"text {number}", "loss": float("nan")})
        assert folder == versions.path / f"v{number:06d}" == versions.latest
        assert latest(versions.path) == f"text {number}"
        assert versions.number == number
    assert json.loads((folder / FACTS).read_text()) == {"version": 3, "text": "text 3", "loss": None}
    assert os.readlink(versions.path / LATEST) == "v000003"  # so that the folder may be moved


def test_old_versions_go_and_the_newest_stay(versions: VersionFolder) -> None:
    for number in range(1, 8):
        versions.publish(writing(str(number)), {"text": str(number)})
        assert published(versions.path) == [f"v{n:06d}" for n in range(max(number - 2, 1), number + 1)]
        assert latest(versions.path) == str(number)


@posix
def test_a_second_publisher_is_refused(versions: VersionFolder) -> None:
    unfinished = versions.path / ".v000001-abcd.tmp"
    unfinished.mkdir()
    with pytest.raises(ConfigError, match="Another process publishes to"):
        VersionFolder(versions.path)
    assert unfinished.exists()  # it is the first one's
    versions.close()
    VersionFolder(versions.path).close()
    assert not unfinished.exists()


@pytest.mark.parametrize("keep", [1, 0, -3])
def test_the_version_that_is_being_read_is_kept(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ConfigError, match=f"At least 2 versions are kept, .*got {keep}"):
        VersionFolder(tmp_path, keep=keep)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        VersionFolder(tmp_path / "file")


class Killed(BaseException):
    """As by SIGKILL: nothing is tidied up behind it."""


PLACES = [("replace", os), ("symlink", os), ("fsync", os), ("mkdir", Path), ("write_text", Path), ("open", Path)]


def at_call(number: int, real: Callable[..., Any], failure: Callable[[], BaseException], *, after: bool) -> Any:
    calls = [0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] != number:
            return real(*args, **kwargs)
        if after and hasattr(done := real(*args, **kwargs), "close"):
            done.close()
        raise failure()

    return fail


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("place", "home"), PLACES, ids=[place for place, _ in PLACES])
def test_a_publisher_that_is_killed_leaves_whole_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, home: Any, after: bool
) -> None:
    path, deaths, reached = tmp_path / "drafts", 0, 0
    first = VersionFolder(path, keep=2)
    first.publish(writing("0"), {"text": "0"})
    first.close()
    for number in range(1, 30):
        versions = VersionFolder(path, keep=2)
        assert not [entry for entry in path.iterdir() if entry.name.endswith(".tmp")]
        was_killed = False
        with monkeypatch.context() as patch:
            patch.setattr(home, place, at_call(number, getattr(home, place), Killed, after=after))
            patch.setattr(module, "_remove", lambda path: None)  # who is killed removes nothing
            try:
                versions.publish(writing(str(number)), {"text": str(number)})
            except Killed:
                was_killed = True
        versions.close()
        now = int(latest(path) or -1)
        assert reached <= now <= number
        assert was_killed or now == number
        deaths, reached = deaths + was_killed, now
    assert deaths > 0
    again = VersionFolder(path, keep=2)
    again.publish(writing("end"), {"text": "end"})
    assert latest(path) == "end"
    assert len(published(path)) == 2
    again.close()


@pytest.mark.parametrize(("place", "home"), PLACES, ids=[place for place, _ in PLACES])
def test_a_full_disk_leaves_the_version_before(
    versions: VersionFolder, monkeypatch: pytest.MonkeyPatch, place: str, home: Any
) -> None:
    versions.publish(writing("one"), {"text": "one"})

    def full() -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(home, place, at_call(1, getattr(home, place), full, after=False))
        with pytest.raises(StateError, match=r"Version 2 cannot be written to .*No space left"):
            versions.publish(writing("two"), {"text": "two"})
    assert latest(versions.path) == "one"
    assert not [entry for entry in versions.path.iterdir() if entry.name.endswith(".tmp")]
    versions.publish(writing("three"), {"text": "three"})
    assert latest(versions.path) == "three"


def test_what_is_not_a_version_of_ours_stays_and_is_never_pointed_at(tmp_path: Path) -> None:
    path = tmp_path / "drafts"
    mine = ["v000001/notes.txt", "v20240101/model.txt", ".cache.tmp/a", ".mine.tmp", "v-best/a", "latest-good/a"]
    for name in mine:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    for number in range(2):
        versions = VersionFolder(path, keep=2)
        for _ in range(3):
            versions.publish(writing("ours"), {"text": "ours"})
        assert versions.number == 3 * number + 4  # beside the other one of the first number
        assert versions.latest == path / f"v{versions.number:06d}"
        assert len(published(path)) == 2 + 4
        versions.close()
    assert [(path / name).read_text() for name in mine] == mine


def test_a_latest_that_is_no_pointer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("mine")
    with pytest.raises(ConfigError, match="not a link to a version"):
        VersionFolder(tmp_path)
    assert (tmp_path / "latest").read_text() == "mine"
    (tmp_path / "latest").unlink()
    VersionFolder(tmp_path).close()
