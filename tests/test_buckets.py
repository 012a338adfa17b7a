"""A store in a Storage Bucket: collectors on some machines, a learner on another one."""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_buckets import FakeBuckets
from huggingface_hub.errors import BucketBatchError, HfHubHTTPError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_following import make_trace
from waiting import LONG

from osd_hf import ConfigError, CorrectionStore, HubError, StoreError, Trace
from osd_hf.hub.buckets import AT_ONCE, LOCK_NAME, RECORD_NAME, StoreBucket, kept_alike
from osd_hf.store.folder import StoreFollower, list_shards
from osd_hf.utils.disk import lock_file

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
            assert calls < 10**9

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
    beside = written(copy.folder, 9)  # by a collector that has no bucket
    oldest = next(iter(own._folder.shards.values()))  # type: ignore[union-attr]
    own._folder.delete(oldest)  # type: ignore[union-attr]
    again = [StoreBucket(bucket.folder, URI + "/", api=hub) for bucket in (here, copy)]  # type: ignore[arg-type]
    assert (again[0].upload(), again[1].download()) == (0, 0)  # another process, which writes the place otherwise
    assert len(hub.files["me/corrections"]) == 2
    assert {trace.draft_version for trace in CorrectionStore(copy.folder)} == {2, 3, 9}
    beside.close()


def test_a_store_is_copied_in_one_direction(tmp_path: Path, here: StoreBucket, hub: FakeBuckets) -> None:
    written(here.folder, 1)
    copy = StoreBucket(tmp_path / "copy", URI, api=hub)  # type: ignore[arg-type]
    here.upload()
    copy.download()
    before = dict(hub.files["me/corrections"])
    with pytest.raises(ConfigError, match="here is copied to a bucket. Copy it in one direction"):
        here.download()
    with pytest.raises(ConfigError, match="copy is a copy of what a bucket has"):
        copy.upload()
    assert hub.files["me/corrections"] == before and shards(copy.folder) == shards(here.folder)


def test_room_is_made_before_more_is_copied(here: StoreBucket, hub: FakeBuckets) -> None:
    own = written(here.folder, 1, 2)
    here.upload()
    own.append(make_trace("here", 3))
    own._folder.delete(next(iter(own._folder.shards.values())))  # type: ignore[union-attr]

    def full(name: str, given: Any) -> None:
        if given.get("add") and len(hub.files["me/corrections"]) >= 2:
            raise OSError(28, "no space left")

    hub.before = full
    assert here.upload() == 1
    assert len(hub.files["me/corrections"]) == 2


def test_a_copy_makes_room_before_more_comes(tmp_path: Path, here: StoreBucket, hub: FakeBuckets) -> None:
    own = written(here.folder, 1, 2)
    copy = StoreBucket(tmp_path / "copy", URI, api=hub)  # type: ignore[arg-type]
    here.upload()
    copy.download()
    own.append(make_trace("here", 3))
    own._folder.delete(next(iter(own._folder.shards.values())))  # type: ignore[union-attr]
    here.upload()

    def full(name: str, given: Any) -> None:
        if name == "download_bucket_files":
            raise OSError(errno.ENOSPC, "No space left on device")

    hub.before = full
    with pytest.raises(StoreError, match="cannot copy the store in .*copy: .*No space left on device"):
        copy.download()
    assert {trace.draft_version for trace in CorrectionStore(copy.folder)} == {2}


def test_a_copy_that_could_not_be_deleted_is_deleted_later(
    tmp_path: Path, here: StoreBucket, hub: FakeBuckets, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = written(here.folder, 1, 2)
    copy = StoreBucket(tmp_path / "copy", URI, api=hub)  # type: ignore[arg-type]
    here.upload()
    copy.download()
    own._folder.delete(next(iter(own._folder.shards.values())))  # type: ignore[union-attr]
    here.upload()

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="Permission denied"):
        patch.setattr(Path, "unlink", refuse)
        copy.download()
    copy.download()
    assert shards(copy.folder) == shards(here.folder)


def test_a_folder_that_was_copied_deletes_nothing_of_the_other(here: StoreBucket, hub: FakeBuckets) -> None:
    own = written(here.folder, 1)
    here.upload()
    shutil.copytree(here.folder, here.folder.with_name("twin"))
    own.append(make_trace("here", 2))
    here.upload()
    twin = StoreBucket(here.folder.with_name("twin"), URI, api=hub)  # type: ignore[arg-type]
    assert twin.upload() == 0
    assert len(hub.files["me/corrections"]) == 2


@pytest.mark.parametrize("said", [None, False])  # by `HF_HUB_DISABLE_PROGRESS_BARS`
def test_bars_of_the_hub_are_not_shown_for_each_shard(
    here: StoreBucket, hub: FakeBuckets, monkeypatch: pytest.MonkeyPatch, said: bool | None
) -> None:
    monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "HF_HUB_DISABLE_PROGRESS_BARS", said)
    monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "progress_bar_states", {})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", said)
    written(here.folder, 1)
    shown: list[bool] = []
    hub.before = lambda name, given: shown.append(not are_progress_bars_disabled())
    here.upload()
    assert set(shown) == {said is False}
    assert not are_progress_bars_disabled()
    if said is None:
        disable_progress_bars()
        here.upload()
        assert are_progress_bars_disabled()


@pytest.mark.parametrize("gone", [0, 1])  # the one that is copied just then, or another one
def test_what_is_deleted_while_others_are_copied_holds_nothing_up(
    here: StoreBucket, hub: FakeBuckets, gone: int
) -> None:
    own = written(here.folder, 1, 2)
    paths = [Path(shard.path) for shard in own._folder.shards.values()]  # type: ignore[union-attr]
    data = [path.read_bytes() for path in paths]

    def delete(name: str, given: Any) -> None:
        if name == "batch_bucket_files":
            paths[gone].unlink(missing_ok=True)

    hub.before = delete
    assert here.upload() == 1
    assert list(hub.files["me/corrections"].values()) == [data[1 - gone]]


def test_what_its_store_deletes_while_it_comes_is_told(tmp_path: Path, here: StoreBucket, hub: FakeBuckets) -> None:
    written(here.folder, 1)
    here.upload()
    copy = StoreBucket(tmp_path / "copy", URI, api=hub)  # type: ignore[arg-type]

    def gone(name: str, given: Any) -> None:
        if name == "download_bucket_files":
            response: Any = SimpleNamespace(status_code=404, headers={}, request=None)
            raise HfHubHTTPError("no such file", response=response)

    hub.before = gone
    told = "^A file of .* is there no more: its store has deleted it meanwhile. It is tried again. The store stays in "
    with pytest.raises(HubError, match=told):
        copy.download()


@pytest.mark.parametrize("asked", ["create_bucket", "batch_bucket_files"])
def test_who_copies_to_an_unknown_user_is_told(asked: str, here: StoreBucket, hub: FakeBuckets) -> None:
    def unknown(name: str, given: Any) -> None:
        if name == asked:
            response: Any = SimpleNamespace(status_code=404, headers={}, request=None)
            raise HfHubHTTPError("no such user", response=response)

    hub.before = unknown
    written(here.folder, 1)
    with pytest.raises(HubError, match="There is no place for 'hf://buckets/me/corrections.*': the user or organiza"):
        here.upload()


def test_what_has_come_of_a_long_copy_stays(tmp_path: Path, here: StoreBucket, hub: FakeBuckets) -> None:
    written(here.folder, *range(AT_ONCE + 3))
    here.upload()
    copy = StoreBucket(tmp_path / "copy", URI, api=hub)  # type: ignore[arg-type]

    def drop(name: str, given: Any) -> None:
        if name == "download_bucket_files" and len(given["files"]) < AT_ONCE:
            raise ConnectionError("the network is down")

    hub.before = drop
    with pytest.raises(HubError):
        copy.download()
    assert [trace.draft_version for trace in StoreFollower([copy.folder]).take(100)] == list(range(AT_ONCE))


def test_one_process_copies_a_store_at_a_time(here: StoreBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd_hf.hub.buckets.LAST_SECONDS", 0.0)
    lock = lock_file(here.folder / LOCK_NAME, wait=True)
    with contextlib.closing(lock), pytest.raises(StoreError, match="another process holds"):  # type: ignore[type-var]
        here.upload()
    assert here.upload() == 0


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
    # The Hub looks for letters: of a folder that a writer's name begins with it lists that writer, too.
    hub.files["me/corrections"][name] = data
    beside = StoreBucket(here.folder.with_name("beside"), f"hf://buckets/me/corrections/{writer[:4]}", api=hub)  # type: ignore[arg-type]
    assert beside.download() == 0


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
    with pytest.raises(HubError, match="There is no bucket 'me/corrections', or this token cannot see it"):
        here.download()
    assert not (here.folder / RECORD_NAME).exists()  # which way it goes is not known yet
    here.upload()
    assert hub.files == {"me/corrections": {}}
    hub.public.add("me/corrections")  # meanwhile
    written(here.folder, 1)
    for _ in range(2):
        with pytest.raises(ConfigError, match="is open to everybody"):
            here.upload()
    assert hub.files == {"me/corrections": {}}


def test_what_the_hub_does_not_take_is_said(here: StoreBucket, hub: FakeBuckets) -> None:
    def refuse(name: str, given: Any) -> None:
        if name == "batch_bucket_files":
            response: Any = SimpleNamespace(status_code=422, headers={}, request=None)
            error = BucketBatchError("Failed", response=response)
            error.failures = [{"path": "x", "error": "the quota is reached"}]
            raise error

    hub.before = refuse
    written(here.folder, 1)
    with pytest.raises(HubError, match="the quota is reached"):
        here.upload()


def test_the_hub_switched_off_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        StoreBucket(tmp_path / "store", URI, token="hf_fake").upload()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"direction": "upload", "shards": 1}'])
def test_a_record_that_cannot_be_read_is_said(here: StoreBucket, text: str) -> None:
    (here.folder / RECORD_NAME).write_text(text)
    with pytest.raises(StoreError, match="Move it away"):
        here.upload()


def test_copies_go_on_after_a_failure_which_is_said_once(caplog: Any) -> None:
    outcomes = iter([HubError("away"), HubError("away"), BaseException("odd"), None, HubError("away again"), None])
    has_come = threading.Event()

    def copy() -> int:
        outcome = next(outcomes, "all")
        if isinstance(outcome, BaseException):  # as errors of Rust are
            raise outcome
        if outcome == "all":
            has_come.set()
        return 0

    with caplog.at_level(logging.WARNING), kept_alike(copy, seconds=0):
        assert has_come.wait(LONG)
    assert [record.getMessage() for record in caplog.records] == ["away", "away again"]


def test_what_came_last_is_copied_at_the_end_and_a_failure_told(caplog: Any) -> None:
    first, copies = threading.Event(), []

    def copy() -> int:
        copies.append(1)
        first.set()
        raise HubError("away")

    with caplog.at_level(logging.WARNING), kept_alike(copy, seconds=LONG, is_last=True) as copying:
        assert first.wait(LONG)
    assert len(copies) == 2
    assert copying.is_behind
    assert [record.getMessage() for record in caplog.records] == ["away", "away"]


def test_a_copy_that_nobody_needs_any_more_is_not_waited_for() -> None:
    begun, end = threading.Event(), threading.Event()

    def copy() -> int:
        begun.set()
        end.wait(LONG)
        return 0

    with kept_alike(copy, seconds=LONG):
        assert begun.wait(LONG)
    end.set()  # after the block has ended
