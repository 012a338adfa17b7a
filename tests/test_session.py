import functools
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import killed_savers
import models
import pytest
import torch
from processes import run_python

from osd_hf import OnlineConfig, Trace
from osd_hf.errors import StateError
from osd_hf.learning import session as module
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.learner import Learner
from osd_hf.learning.session import load_session
from osd_hf.learning.updater import Updater
from osd_hf.utils.disk import wait_for_lock

CONFIG = OnlineConfig(
    num_assistant_tokens=5, update_strategy="interval", batch_size=4, steps_per_update=1, num_logprobs=8,
    buffer_size=5, optimizer="adamw", gate=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return models.recorded(*models.pair(), 7, max_new_tokens=6, domain="d")


def learner(traces: list[Trace], updates: int, config: OnlineConfig = CONFIG, draft: Any = None) -> Learner:
    taught = Learner(DomainDrafts(draft or models.pair()[1], config, per_domain=False))
    for _ in range(updates):
        for trace in traces[:3]:
            taught.observe(None, trace)
        taught.update()
    for trace in traces[3:5]:
        taught.observe(None, trace)
    return taught


def save_session(folder: Path, taught: Learner, facts: dict[str, Any], router: dict[str, Any] | None = None) -> None:
    module.save_session(folder, taught.state_dict(), facts, router)


@pytest.fixture(scope="module")
def taught(traces: list[Trace]) -> Callable[[int], Learner]:
    """Learners of so many updates, to be read and saved by whoever asks."""
    return functools.cache(lambda updates: learner(traces, updates))


def updater(taught: Learner) -> Updater:
    return taught.drafts.updater(None)


def weights(taught: Learner) -> list[torch.Tensor]:
    """What learns, and what serves."""
    parameters = [*updater(taught).parameters.values(), *taught.drafts.model().parameters()]
    return [p.detach().clone() for p in parameters]


def alike(a: Any, b: Any) -> bool:
    """Whether two states are the same, tensors and traces in them included."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Trace):
        rows = (
            a.top_logits.tobytes() == b.top_logits.tobytes() and a.tail_logprob.tobytes() == b.tail_logprob.tobytes()
        )
        tokens = (
            a.completion_ids.tolist() == b.completion_ids.tolist() and a.prompt_ids.tolist() == b.prompt_ids.tolist()
        )
        told = (a.domain, a.sampling, a.draft_version, len(a.rounds))
        return rows and tokens and told == (b.domain, b.sampling, b.draft_version, len(b.rounds))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


@pytest.mark.parametrize("gate", [False, True])
def test_a_session_comes_back_whole(tmp_path: Path, traces: list[Trace], gate: bool) -> None:
    config = replace(CONFIG, optimizer="muon", gate=gate)
    saved = learner(traces, 3, config)
    save_session(tmp_path / "new" / "folder", saved, {"version": 2, "note": [1, None]}, {"weights": torch.ones(2)})
    fresh = learner(traces, 0, config)
    routers: list[dict[str, Any]] = []
    router = SimpleNamespace(state_dict=dict, load_state_dict=routers.append)
    facts = load_session(tmp_path / "new" / "folder", fresh, router)
    assert (facts["version"], facts["note"]) == (2, [1, None])
    assert [state["weights"].tolist() for state in routers] == [[1, 1]]
    assert all(map(torch.equal, weights(saved), weights(fresh)))
    assert alike(fresh.state_dict()["requests"], saved.state_dict()["requests"])
    assert alike(fresh.drafts.state_dict(), saved.drafts.state_dict())
    (state,) = fresh.state_dict()["requests"]
    sizes = {group: len(found) for group, found in state["traces"].items()}
    # 11 requests: with the gate three are held back, one of each four, and the two newest wait.
    assert sizes == {"held_back": 3 * gate, "pending": 2, "replayed": 5}
    assert fresh.drafts.serving_version() == (0 if gate else 3)
    assert updater(fresh).buffer.capacity == 5
    # Both go on alike: the same batches, and the same weights.
    for taught in (saved, fresh):
        taught.update()
    assert all(map(torch.equal, weights(saved), weights(fresh)))


def damage(folder: Path, file: str, how: str) -> None:
    (state,) = folder.glob("state-*")
    path = state / file
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("how", ["missing", "half"])
@pytest.mark.parametrize("file", ["session.json", "requests-000.parquet", "drafts.pt"])
def test_damaged_files_are_named_and_change_nothing(
    file: str, how: str, tmp_path: Path, traces: list[Trace], taught: Callable[[int], Learner]
) -> None:
    save_session(tmp_path, taught(2), {"version": 2})
    damage(tmp_path, file, how)
    fresh = learner(traces, 1)
    before, states, drafts = weights(fresh), fresh.state_dict()["requests"], fresh.drafts.state_dict()
    with pytest.raises(StateError, match="session"):
        load_session(tmp_path, fresh)
    assert all(map(torch.equal, weights(fresh), before))
    assert alike(fresh.state_dict()["requests"], states)
    assert alike(fresh.drafts.state_dict(), drafts)
    assert fresh.drafts.serving_version() == 1


@pytest.mark.parametrize("other", [1, 99])
def test_another_format_is_not_guessed_at(other: int, tmp_path: Path, traces: list[Trace]) -> None:
    save_session(tmp_path, learner(traces, 1), {})
    (path,) = tmp_path.glob("state-*/session.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": other}))
    with pytest.raises(StateError, match=f"format {other}, this version reads 11"):
        load_session(tmp_path, learner(traces, 0))


@pytest.mark.parametrize(
    "other",
    [
        OnlineConfig(update_strategy="interval", optimizer="muon"),
        OnlineConfig(update_strategy="interval", optimizer="adamw", weight_average=0.0),
    ],
)
def test_the_state_of_another_rule_is_refused_or_taken_whole(
    other: OnlineConfig, tmp_path: Path, traces: list[Trace]
) -> None:
    save_session(tmp_path, learner(traces, 2), {"version": 2})
    fresh = learner([], 0, other)
    before = weights(fresh)
    try:
        load_session(tmp_path, fresh)
    except StateError:
        assert all(map(torch.equal, weights(fresh), before))
        assert fresh.drafts.serving_version() == 0
    else:
        assert all(map(torch.equal, weights(fresh), weights(learner(traces, 2))))


@pytest.mark.parametrize("num_logprobs", [4, None])
def test_requests_of_another_width_are_refused_before_anything_changes(
    num_logprobs: int | None, tmp_path: Path, traces: list[Trace]
) -> None:
    save_session(tmp_path, learner(traces, 1), {})
    fresh = learner([], 0, replace(CONFIG, num_logprobs=num_logprobs))
    before = weights(fresh)
    with pytest.raises(StateError, match=f"keep 8 entries per position, this assistant {num_logprobs or 'all'}"):
        load_session(tmp_path, fresh)
    assert all(map(torch.equal, weights(fresh), before))
    assert fresh.drafts.serving_version() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked children")
def test_savers_that_are_killed_leave_the_old_state_or_the_new_one_and_what_is_the_users(tmp_path: Path) -> None:
    done = run_python(Path(killed_savers.__file__), str(tmp_path / "session"), "8")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"failures": [], "own": True, "left": 1, "last": 1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked children")
def test_a_saver_killed_at_any_step_leaves_the_old_state_or_the_new_one(tmp_path: Path) -> None:
    done = run_python(Path(killed_savers.__file__), str(tmp_path), "session", "3")
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout)
    assert {(k["first"], k["there"]) for k in kills} == {(True, None), (True, 2), (False, 1), (False, 2)}
    assert all(k["after"] == [3, True, 0] for k in kills)  # loads, with the user's files, and nothing else is left


def test_a_second_saver_waits_for_the_first(
    tmp_path: Path, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = learner(traces, 1), learner(traces, 2)
    save_session(tmp_path, one, {"version": 0})
    write, wait, waits = module.pq.write_table, module.wait_for_lock, threading.Event()
    savers: list[threading.Thread] = []

    def waiting(path: Path, seconds: float) -> Any:
        if savers:
            waits.set()
        return wait(path, seconds)

    def overtaken(table: Any, file: Any) -> None:
        if not savers:
            savers.append(threading.Thread(target=save_session, args=(tmp_path, other, {"version": 2})))
            savers[0].start()
            assert waits.wait(300)
        write(table, file)

    monkeypatch.setattr(module.pq, "write_table", overtaken)
    monkeypatch.setattr(module, "wait_for_lock", waiting)
    save_session(tmp_path, one, {"version": 1})
    savers[0].join(300)
    assert load_session(tmp_path, learner(traces, 0))["version"] == 2
    assert len(list(tmp_path.glob("state-*"))) == 1


def test_a_saver_that_never_ends_is_told(tmp_path: Path, traces: list[Trace]) -> None:
    save_session(tmp_path, learner(traces, 1), {"version": 1})
    lock = wait_for_lock(tmp_path / module.LOCK, 0.0)
    with pytest.raises(StateError, match="another process holds"):
        module.save_session(tmp_path, learner(traces, 2).state_dict(), {"version": 2}, patience_seconds=0.0)
    lock.release()
    assert load_session(tmp_path, learner(traces, 0))["version"] == 1


def test_the_old_state_goes_when_the_new_one_is_on_the_disk(
    tmp_path: Path, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_session(tmp_path, learner(traces, 1), {"version": 1})
    done: list[str] = []
    sync, move, remove = os.fsync, Path.rename, shutil.rmtree

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        places = {path.stat().st_ino: path for path in [tmp_path, *tmp_path.rglob("*")]}
        done.append(f"sync {places[status.st_ino].relative_to(tmp_path).name.split('-')[0] or 'folder'}")
        sync(descriptor)

    def rename(source: Path, target: Path) -> Path:
        done.append(f"move to {target.name}")
        return move(source, target)

    def rmtree(path: Path, **kwargs: Any) -> None:
        done.append(f"delete {path.name}")
        remove(path, **kwargs)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    save_session(tmp_path, learner(traces, 2), {"version": 2})
    files = ["requests", "drafts.pt", "session.json"]
    assert done == [
        *(f"sync {name}" for name in files), "sync .state", "move to state-00000002", "sync folder",
        "delete state-00000001",
    ]  # fmt: skip
