import json
import os
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from osd_hf import OnlineConfig, StateError, Trace, capture_traces
from osd_hf import session as module
from osd_hf.session import load_session, save_session
from osd_hf.updater import Updater

CONFIG = OnlineConfig(batch_size=4, steps_per_update=1, num_logprobs=8, buffer_size=5)


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    target, draft = models.pair()
    seen: list[Trace] = []
    with capture_traces(target, seen.append, num_logprobs=8, domain="d"):
        for ids in models.prompts(7):
            target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=6)
    return seen


def updater(traces: list[Trace], updates: int) -> Updater:
    taught = Updater(models.pair()[1], CONFIG)
    for _ in range(updates):
        for trace in traces[:3]:
            taught.observe(trace)
        taught.update()
    for trace in traces[3:5]:
        taught.observe(trace)
    return taught


def weights(taught: Updater) -> list[torch.Tensor]:
    return [p.detach().clone() for p in taught.parameters.values()]


def test_a_session_comes_back_whole(tmp_path: Path, traces: list[Trace]) -> None:
    saved = updater(traces, 2)
    save_session(tmp_path / "new" / "folder", saved, {"version": 2, "note": [1, None]})
    fresh = Updater(models.pair()[1], CONFIG)
    facts = load_session(tmp_path / "new" / "folder", fresh)
    assert (facts["version"], facts["note"]) == (2, [1, None])
    assert all(map(torch.equal, weights(saved), weights(fresh)))
    for ours, theirs in ((list(fresh.new), list(saved.new)), (list(fresh.buffer), list(saved.buffer))):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert a.completion_ids.tolist() == b.completion_ids.tolist()
            assert a.top_logits.tobytes() == b.top_logits.tobytes()
            assert (a.domain, a.sampling, len(a.rounds)) == (b.domain, b.sampling, len(b.rounds))
    assert fresh.buffer.maxlen == 5


def test_saving_again_leaves_one_state(tmp_path: Path, traces: list[Trace]) -> None:
    for version in range(3):
        save_session(tmp_path, updater(traces, version), {"version": version})
    assert len(list(tmp_path.glob("state-*"))) == 1
    assert load_session(tmp_path, updater(traces, 0))["version"] == 2
    assert not list(tmp_path.glob(".CURRENT-*"))


class Killed(BaseException):
    """Of no kind that anybody catches, as a signal is."""


STEPS = ("mkdir", "torch.save", "write_table", "write_text", "fsync", "replace", "rmtree")


@pytest.mark.parametrize("error", [Killed, OSError])
@pytest.mark.parametrize("step", STEPS)
def test_what_breaks_while_saving_leaves_a_state_that_loads(
    step: str, error: type[BaseException], tmp_path: Path, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_session(tmp_path, updater(traces, 1), {"version": 1})

    def fail(*_: Any, **__: Any) -> None:
        raise error("killed")

    homes: dict[str, tuple[Any, str]] = {
        "mkdir": (Path, "mkdir"),
        "torch.save": (module.torch, "save"),
        "write_table": (module.pq, "write_table"),
        "write_text": (Path, "write_text"),
        "fsync": (os, "fsync"),
        "replace": (os, "replace"),
        "rmtree": (module.shutil, "rmtree"),
    }
    second = updater(traces, 2)
    with monkeypatch.context() as patch:
        patch.setattr(*homes[step], fail)
        with pytest.raises(StateError if error is OSError and step != "rmtree" else error):
            save_session(tmp_path, second, {"version": 2})
    expected = 2 if step == "rmtree" else 1
    fresh = updater(traces, 0)
    assert load_session(tmp_path, fresh)["version"] == expected
    assert all(map(torch.equal, weights(fresh), weights(updater(traces, expected))))
    save_session(tmp_path, second, {"version": 3})  # goes on, and clears what was left
    assert load_session(tmp_path, fresh)["version"] == 3
    assert len(list(tmp_path.glob("state-*"))) == 1


def damage(folder: Path, file: str, how: str) -> None:
    (state,) = folder.glob("state-*")
    path = folder / "CURRENT" if file == "CURRENT" else state / file
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.write_bytes(b"\x80\x04not what it should be" * 10)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")  # torch, of the garbage
@pytest.mark.parametrize("how", ["missing", "empty", "half", "garbage"])
@pytest.mark.parametrize("file", ["CURRENT", "session.json", "requests.parquet", "learner.pt"])
def test_damaged_files_are_named_and_change_nothing(file: str, how: str, tmp_path: Path, traces: list[Trace]) -> None:
    save_session(tmp_path, updater(traces, 2), {"version": 2})
    damage(tmp_path, file, how)
    fresh = updater(traces, 1)
    before, waiting = weights(fresh), list(fresh.new)
    with pytest.raises(StateError, match="session"):
        load_session(tmp_path, fresh)
    assert all(map(torch.equal, weights(fresh), before))
    assert list(fresh.new) == waiting
    assert fresh.version == 1


def test_a_later_format_is_not_guessed_at(tmp_path: Path, traces: list[Trace]) -> None:
    save_session(tmp_path, updater(traces, 1), {})
    (path,) = tmp_path.glob("state-*/session.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(StateError, match="format 99, this version reads 1"):
        load_session(tmp_path, updater(traces, 0))


def test_nothing_saved_is_said(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no saved session"):
        load_session(tmp_path, Updater(models.build(), CONFIG))


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, traces: list[Trace]) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateError, match="cannot be saved"):
        save_session(tmp_path / "file", updater(traces, 0), {})


@pytest.mark.parametrize("other", [OnlineConfig(optimizer="adamw"), OnlineConfig(weight_average=0.0)])
def test_the_state_of_another_rule_is_refused_or_taken_whole(
    other: OnlineConfig, tmp_path: Path, traces: list[Trace]
) -> None:
    save_session(tmp_path, updater(traces, 2), {"version": 2})
    fresh = Updater(models.pair()[1], other)
    before = weights(fresh)
    try:
        load_session(tmp_path, fresh)
    except StateError:
        assert all(map(torch.equal, weights(fresh), before))
        assert fresh.version == 0
    else:
        assert all(map(torch.equal, weights(fresh), weights(updater(traces, 2))))
