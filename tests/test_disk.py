import errno
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
from waiting import LONG

from osd_hf import CorrectionStore, OnlineAssistant, OnlineConfig, Trace
from osd_hf.cli.run import RunSettings, open_folder, serve
from osd_hf.engines.versions import VersionFolder
from osd_hf.errors import ConfigError
from osd_hf.hub import EvaluationSet
from osd_hf.prompts import Prompt, encode_prompts
from osd_hf.utils.disk import hold_lock, make_private_folder, new_file, wait_for_lock, write_whole

posix = pytest.mark.skipif(os.name != "posix", reason="needs modes and locks of POSIX")
CONFIG = OnlineConfig(
    update_interval=2, steps_per_update=1, batch_size=2, num_logprobs=8, num_assistant_tokens=3, gate=False,
    update_strategy="manual",
)  # fmt: skip


def modes(folder: Path) -> dict[str, int]:
    """Of a folder and all that it holds, by path within it."""
    paths = [folder, *folder.rglob("*")]
    return {str(p.relative_to(folder)): stat.S_IMODE(p.lstat().st_mode) for p in paths if not p.is_symlink()}


def open_to_others(folder: Path) -> list[str]:
    return [path for path, mode in modes(folder).items() if mode & 0o077]


@pytest.fixture(params=[0o000, 0o022], ids=["umask 0", "umask 022"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return models.recorded(*models.pair(), 3, max_new_tokens=6)


def write_store(folder: Path, traces: list[Trace]) -> None:
    with CorrectionStore(folder, flush_every=2) as store:
        for trace in traces:
            store.append(trace)


def write_session(folder: Path, traces: list[Trace]) -> None:
    with OnlineAssistant(*models.pair(), config=CONFIG, autosave=folder) as assistant:
        for trace in traces:
            assistant._live.binding(None, True, None).sink([trace])
        assistant.update()
        assistant.save_state(folder)


def write_run(folder: Path, traces: list[Trace]) -> None:
    """Journal, settings, session and store of `osd-hf run`."""
    target, draft = models.pair(vocab_size=128)
    tokenizer = models.tokenizer()
    prompts = encode_prompts([Prompt(i, "abc"[: i + 1]) for i in range(3)], tokenizer, max_prompt_tokens=20)
    open_folder(folder, {"a": 1})
    with OnlineAssistant(target, draft, tokenizer, CONFIG) as assistant:
        serve(
            RunSettings(output_dir=folder, max_new_tokens=3, keep_text=True, save_every=1), assistant, draft, prompts
        )


WRITERS = {"store": write_store, "session": write_session}


@posix
@pytest.mark.parametrize("writer", WRITERS)
def test_what_holds_requests_is_its_owners_alone_at_every_moment(
    writer: str, umask: int, tmp_path: Path, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found, moments = tmp_path / "on" / "the way", [], 0
    whole = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal moments
        moments += 1
        found.extend(open_to_others(folder) if folder.exists() else [])
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    WRITERS[writer](folder, traces)
    assert moments > 3
    assert found == []
    assert open_to_others(folder) == []
    assert modes(folder.parent)["."] == 0o755  # what was missing on the way: for nobody else to write
    assert sum(mode == 0o600 for mode in modes(folder).values()) >= 3


@posix
def test_a_runs_journal_settings_and_session_are_its_owners_alone(umask: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, [])
    found = modes(folder)
    assert {name: found[name] for name in ("journal.jsonl", "settings.json", "state")} == {
        "journal.jsonl": 0o600, "settings.json": 0o600, "state": 0o700,
    }  # fmt: skip
    assert found["."] == 0o777 & ~umask  # the draft and the plot in it are for others
    assert open_to_others(folder) == ["."]


@posix
def test_a_folder_of_the_users_keeps_its_mode_and_what_is_put_there_is_private(
    umask: int, tmp_path: Path, traces: list[Trace]
) -> None:
    for name, write in WRITERS.items():
        folder = tmp_path / name
        folder.mkdir()
        folder.chmod(0o755)
        write(folder, traces)
        assert open_to_others(folder) == ["."]
        assert modes(folder)["."] == 0o755


@posix
def test_evaluation_prompts_are_private_and_published_files_are_ordinary(umask: int, tmp_path: Path) -> None:
    EvaluationSet("own", (Prompt(0, "one"), Prompt(1, "zwei, ü"))).write(tmp_path / "prompts.jsonl")
    assert modes(tmp_path)["prompts.jsonl"] == 0o600
    assert [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text("utf-8").splitlines()] == [
        "one", "zwei, ü",
    ]  # fmt: skip
    versions = VersionFolder(tmp_path / "drafts")
    folder = versions.publish(lambda path: (path.mkdir(), (path / "config.json").write_text("{}")), {})
    versions.close()
    assert modes(folder) == {".": 0o777 & ~umask, "config.json": 0o666 & ~umask, "version.json": 0o666 & ~umask}
    write_whole(tmp_path / "index.json", b"{}", private=False)
    assert modes(tmp_path)["index.json"] == 0o666 & ~umask


def test_a_file_is_on_the_disk_before_its_name_and_the_name_before_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, move = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def replace(source: Any, target: Any) -> None:
        done.append("replace")
        move(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_whole(tmp_path / "a", b"1")
    assert done == ["file", "replace", "folder"]
    done.clear()
    with new_file(tmp_path / "b") as file:
        file.write(b"1")
    assert done == ["file"]
    done.clear()
    make_private_folder(tmp_path / "c" / "d")
    assert done == ["folder", "folder"]
    with pytest.raises(OSError, match="a"):
        make_private_folder(tmp_path / "a")


@posix
def test_a_folder_that_cannot_be_opened_or_synced_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file, sync, refusals = os.open, os.fsync, [errno.EINVAL, errno.ENOTSUP, errno.EBADF]

    def refused(path: Any, flags: int, *more: int, **named: Any) -> int:
        if Path(path).is_dir():  # it may be entered and written, and not be read
            raise PermissionError(errno.EACCES, "denied")
        return open_file(path, flags, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        make_private_folder(tmp_path / "a" / "b")
        write_whole(tmp_path / "a" / "b" / "c", b"1")

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, "not here")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    for code in refusals:
        write_whole(tmp_path / f"{code}", b"1")
    for code in (errno.EIO, errno.ENOSPC):
        with pytest.raises(OSError, match="not here"):
            write_whole(tmp_path / f"{code}", b"1")


def test_a_lock_is_awaited_and_the_wait_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = wait_for_lock(tmp_path / "lock", 1.0)
    with pytest.raises(TimeoutError, match="another process holds"):
        wait_for_lock(tmp_path / "lock", 0.0)
    assert "Waiting" not in caplog.text
    with pytest.raises(TimeoutError, match="another process holds"):
        wait_for_lock(tmp_path / "lock", 0.2)
    assert caplog.text.count("Waiting up to 0 s for another process") == 1
    with pytest.raises(ConfigError, match="in use"):
        hold_lock(tmp_path / "lock", "in use")
    threading.Thread(target=held.release).start()
    again = wait_for_lock(tmp_path / "lock", LONG)
    assert again.is_locked
    again.release()
    hold_lock(tmp_path / "lock", "in use").release()


@posix
def test_a_file_system_without_locks_can_be_written_but_not_shared(
    tmp_path: Path, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    write_session(tmp_path / "session", traces)
    assert len(list((tmp_path / "session").glob("state-*"))) == 1
    write_store(tmp_path / "store", traces)
    assert len(CorrectionStore(tmp_path / "store")) == len(traces)
    with pytest.raises(ConfigError, match="in use"):
        hold_lock(tmp_path / "lock", "in use")
