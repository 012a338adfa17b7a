"""A store in a Storage Bucket: collectors on some machines, a learner on another one."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_buckets import FakeBuckets
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_following import make_trace
from waiting import LONG

from osd_hf import ConfigError, CorrectionStore, HubError, StoreError, Trace
from osd_hf.hub.buckets import RECORD_NAME, StoreBucket, kept_alike
from osd_hf.store.folder import StoreFollower, list_shards

URI = "hf://buckets/me/corrections/qwen"


def shards(folder: Path) -> dict[str, bytes]:
    """By writer and name."""
    return {"/".join(Path(path).parts[-2:]): Path(path).read_bytes() for path in list_shards(folder)}


def written(folder: Path, *numbers: int) -> CorrectionStore:
    """A store with a shard for each number."""
    store = CorrectionStore(folder, flush_every=1)
    for number in numbers:
        store.append(make_trace(folder.name, number))
    return store


@pytest.fixture
def hub() -> FakeBuckets:
    hub = FakeBuckets()
    hub.files["me/corrections"] = {}
    return hub


@pytest.fixture
def here(tmp_path: Path, hub: FakeBuckets) -> StoreBucket:
    return StoreBucket(tmp_path / "here", URI, api=hub)  # type: ignore[arg-type]


class Machines(RuleBasedStateMachine):
    """Two machines that collect, and one that learns, whose calls to the Hub fail now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.hub = FakeBuckets()
        self.hub.files["me/corrections"] = {"qwen2/of-others": b"", "qwen/README.md": b"", "other": b""}
        self.folders = {name: self.root / name for name in ("one", "two", "learner")}
        self.stores = {name: CorrectionStore(self.folders[name], flush_every=100) for name in ("one", "two")}
        api: Any = self.hub
        self.buckets = {name: StoreBucket(folder, URI, api=api) for name, folder in self.folders.items()}
        self.follower = StoreFollower([self.folders["learner"]])
        self.count = dict.fromkeys(self.stores, 0)
        self.taken: list[Trace] = []
        self.left = 10**9  # calls until one fails
        self.hub.before = self._before

    def teardown(self) -> None:
        self.left = 10**9
        for name in self.stores:
            self.buckets[name].upload()
        self.buckets["learner"].download()
        of_collectors = shards(self.folders["one"]) | shards(self.folders["two"])
        assert shards(self.folders["learner"]) == of_collectors
        assert set(self.hub.files["me/corrections"]) == {
            "qwen2/of-others", "qwen/README.md", "other", *(f"qwen/{name}" for name in of_collectors)
        }  # fmt: skip
        self.take()
        kept = {(t.domain, t.draft_version) for path in self.stores.values() for t in path}
        assert kept <= {(t.domain, t.draft_version) for t in self.taken}  # none was passed by
        for store in self.stores.values():
            store.close()
        shutil.rmtree(self.root)

    def _before(self, name: str, given: dict[str, Any]) -> None:
        self.left -= 1
        if self.left < 0:
            if name == "download_bucket_files":  # one file has come, and half of the next one
                for (file, path), share in zip(given["files"], (1, 2), strict=False):
                    data = self.hub.files["me/corrections"][file.path]
                    Path(path).write_bytes(data[: len(data) // share])
            raise ConnectionError("the network is down")

    @rule(name=st.sampled_from(["one", "two"]), count=st.integers(1, 3))
    def write(self, name: str, count: int) -> None:
        for _ in range(count):
            self.stores[name].append(make_trace(name, self.count[name]))
            self.count[name] += 1
        self.stores[name].flush()

    @rule(name=st.sampled_from(["one", "two"]))
    def delete_the_oldest(self, name: str) -> None:
        folder: Any = self.stores[name]._folder
        if folder.shards:
            folder.delete(next(iter(folder.shards.values())))

    @rule(name=st.sampled_from(["one", "two"]))
    def begin_again(self, name: str) -> None:
        self.stores[name].close()
        self.stores[name] = CorrectionStore(self.folders[name], flush_every=100)
        self.stores[name]._folder.start_writing()  # type: ignore[union-attr]  # which tidies up

    @rule(name=st.sampled_from(["one", "two", "learner"]), calls=st.sampled_from([0, 1, 2, 3, 10**9]))
    def copy(self, name: str, calls: int) -> None:
        self.left = calls
        bucket = self.buckets[name]
        try:
            bucket.download() if name == "learner" else bucket.upload()
        except HubError as error:
            assert "could not be reached to the end" in str(error)
            assert "It is tried again. The store stays in" in str(error)

    @rule()
    def take(self) -> None:
        while found := self.follower.take(16):
            self.taken += found

    @invariant()
    def each_is_taken_once_in_its_writers_order(self) -> None:
        for name in self.stores:
            numbers = [trace.draft_version for trace in self.taken if trace.domain == name]
            assert numbers == sorted(set(numbers))
        assert not self.follower.left_out


Machines.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestMachines = Machines.TestCase


def test_what_a_store_deletes_goes_from_the_bucket_and_from_its_copies(
    tmp_path: Path, here: StoreBucket, hub: FakeBuckets
) -> None:
    own = written(here.folder, 1, 2, 3)
    copy = StoreBucket(tmp_path / "copy", URI, api=hub)  # type: ignore[arg-type]
    assert (here.upload(), copy.download()) == (3, 3)
    mine = written(copy.folder, 9)  # of this machine's own
    assert (here.upload(), copy.download()) == (0, 0)
    oldest = next(iter(own._folder.shards.values()))  # type: ignore[union-attr]
    own._folder.delete(oldest)  # type: ignore[union-attr]
    assert (here.upload(), copy.upload(), copy.download()) == (0, 1, 0)  # what came from others is not sent back
    assert len(hub.files["me/corrections"]) == 3
    assert {trace.draft_version for trace in CorrectionStore(copy.folder)} == {2, 3, 9}
    mine.close()


def test_a_copy_that_is_emptied_leaves_no_folders(tmp_path: Path, here: StoreBucket, hub: FakeBuckets) -> None:
    own = written(here.folder, 1)
    copy = StoreBucket(tmp_path / "copy", URI, api=hub)  # type: ignore[arg-type]
    here.upload()
    copy.download()
    own._folder.delete(next(iter(own._folder.shards.values())))  # type: ignore[union-attr]
    here.upload()
    copy.download()
    assert [path for path in copy.folder.iterdir() if path.is_dir()] == []


def test_no_path_in_a_bucket_leads_out_of_the_folder(here: StoreBucket, hub: FakeBuckets) -> None:
    own = written(here.folder.with_name("own"), 1)
    [[name, data]] = shards(own.path).items()  # type: ignore[arg-type]
    writer, _, shard = name.partition("/")
    for path in (f"../{writer}/{shard}", f"{writer}/../{shard}", f"{writer}/x/{shard}", f"{writer}/{shard}.exe",
                 f"/{writer}/{shard}", f"x/{shard}", shard, f"{writer}/.lock"):  # fmt: skip
        hub.files["me/corrections"][f"qwen/{path}"] = data
    assert here.download() == 0
    hub.files["me/corrections"][f"qwen/{name}"] = data
    assert here.download() == 1 and shards(here.folder) == {name: data}


def test_what_comes_cut_short_is_not_taken(here: StoreBucket, hub: FakeBuckets, tmp_path: Path) -> None:
    [[name, data]] = shards(written(tmp_path / "own", 1).path).items()  # type: ignore[arg-type]
    files = hub.files["me/corrections"]
    files[f"qwen/{name}"] = data

    def cut(asked: str, given: Any) -> None:
        if asked == "download_bucket_files":
            files[f"qwen/{name}"] = data[:-1]

    hub.before = cut
    with pytest.raises(HubError, match="did not come whole"):
        here.download()
    assert shards(here.folder) == {}
    hub.before = lambda asked, given: None
    files[f"qwen/{name}"] = data
    assert here.download() == 1 and shards(here.folder) == {name: data}
    assert [path.name for path in (here.folder / name).parent.iterdir()] == [Path(name).name]  # nothing is left over


@pytest.mark.parametrize("uri", [
    "me/corrections", "hf://me/corrections", "hf://datasets/me/corrections", "hf://buckets/me", "s3://me/corrections",
    "https://example.com", "",
])  # fmt: skip
def test_what_is_no_bucket_is_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="A bucket is named as hf://buckets/USER/NAME"):
        StoreBucket(tmp_path / "store", uri, token="hf_fake")
    assert not (tmp_path / "store").exists()


def test_without_a_token_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(ConfigError, match="There is no token"):
        StoreBucket(tmp_path / "store", URI)


def test_a_bucket_is_private_or_refused(here: StoreBucket, hub: FakeBuckets) -> None:
    hub.files.clear()
    with pytest.raises(HubError, match=f"There is no place for '{URI}'"):
        here.check(make=False)
    here.check(make=True)
    assert hub.files == {"me/corrections": {}}
    hub.public.add("me/corrections")
    for make in (True, False):
        with pytest.raises(ConfigError, match="is open to everybody"):
            here.check(make=make)
    other = StoreBucket(here.folder, URI, api=hub)  # type: ignore[arg-type]
    written(here.folder, 1)
    for _ in range(2):  # nor does anything go there from who could not look before
        with pytest.raises(ConfigError, match="is open to everybody"):
            other.upload()
    assert hub.files == {"me/corrections": {}}


def test_the_hub_switched_off_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        StoreBucket(tmp_path / "store", URI, token="hf_fake").check(make=True)


def test_a_record_that_cannot_be_read_is_said(here: StoreBucket) -> None:
    (here.folder / RECORD_NAME).write_text("{")
    with pytest.raises(StoreError, match="Move it away"):
        here.upload()


def test_copies_go_on_after_a_failure_which_is_said_once(caplog: Any) -> None:
    outcomes = iter([HubError("away"), HubError("away"), RuntimeError("odd"), None, HubError("away again"), None])
    has_come = threading.Event()

    def copy() -> int:
        outcome = next(outcomes, "all")
        if isinstance(outcome, Exception):
            raise outcome
        if outcome == "all":
            has_come.set()
        return 0

    with caplog.at_level(logging.WARNING), kept_alike(copy, seconds=0):
        assert has_come.wait(LONG)
    assert [record.getMessage() for record in caplog.records] == ["away", "away again"]


@pytest.mark.parametrize("is_last", [True, False])
def test_what_came_last_is_copied_at_the_end(is_last: bool) -> None:
    copies = []
    with kept_alike(lambda: copies.append(1) or 1, seconds=LONG, is_last=is_last):  # type: ignore[func-returns-value]
        assert copies == []
    assert copies == [1] * is_last
