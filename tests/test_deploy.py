"""Versions that deploy themselves: loaded by each way, watched by counters, taken back, and gone on with."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import FakeVLLM, connecting, windows
from safetensors.torch import save_file
from waiting import full

from osd_hf.engines import deploy as module
from osd_hf.engines.deploy import Deployer, DeployMethod, DraftCounts, compare_windows, read_counts, run_command
from osd_hf.engines.versions import REJECTED, VersionFolder
from osd_hf.engines.vllm_reload import Weights, checksums, shared_modules, weights_digest
from osd_hf.errors import ConfigError, ServerError

WATCH = 200
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")


# --- the rule -------------------------------------------------------------------------------------------------------


def looked_at(before: list[DraftCounts], after: list[DraftCounts]) -> tuple[str, int]:
    """What is found first, asked after each window as a deployer does, and after how many."""
    for number in range(1, len(after) + 1):
        change = compare_windows(before, after[:number], WATCH)
        if change is not None and change.outcome != "unclear":
            return change.outcome, number
    return "unclear", len(after)


@pytest.mark.parametrize("spread", [0.08, 0.15])
def test_a_version_as_good_stays_and_a_fall_of_a_tenth_is_found(spread: float) -> None:
    rng, runs = np.random.default_rng(0), 150

    def found(before: float, after: float) -> tuple[str, int]:
        return looked_at(windows(rng, before, 40, spread=spread), windows(rng, after, 20, spread=spread))

    assert sum(found(0.6, 0.6)[0] == "fell" for _ in range(runs)) <= 0.02 * runs
    assert sum(found(0.6, 0.5)[0] == "fell" for _ in range(runs)) > 0.95 * runs
    outcome, number = found(0.4, 0.8)
    assert (outcome, number <= 5) == ("rose", True)
    assert found(0.6, 0.02) == ("fell", 3)


def test_tokens_of_one_answer_are_no_independent_evidence() -> None:
    # Windows that differ as much as these say less than their tokens: 0.6 and 0.5 may be chance.
    before = [DraftCounts(10, 400, accepted) for accepted in (120, 360) * 10]
    after = [DraftCounts(10, 400, accepted) for accepted in (60, 340) * 10]
    change = compare_windows(before, after, WATCH)
    assert change is not None
    assert (change.before, change.after, change.outcome) == (0.6, 0.5, "unclear")
    assert change.standard_error == pytest.approx(np.hypot(0.3, 0.35) / np.sqrt(19.5), rel=0.03)
    even = compare_windows([DraftCounts(10, 400, 240)] * 20, [DraftCounts(10, 400, 200)] * 20, WATCH)
    assert even is not None
    assert even.outcome == "fell"
    assert even.standard_error == pytest.approx(np.sqrt((0.24 + 0.25) / 8000), rel=1e-3)  # that of a binomial


def test_too_few_windows_say_nothing() -> None:
    many, none = [DraftCounts(10, 400, 240)] * 20, [DraftCounts(10, 400, 0)]
    assert compare_windows(many, none * 2, WATCH) is None
    assert compare_windows([], none * 9, WATCH) is None
    assert compare_windows(many, [DraftCounts(10, 0, 0)] * 9, WATCH) is None
    before = [DraftCounts(200, 8000, 4800)]  # what an engine had counted
    assert compare_windows(before, none * 3, WATCH) is not None


def test_counters_are_read_as_vllm_writes_them() -> None:
    text = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 20.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 130.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"} 70.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="1"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="2"} 20.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a"} 7.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="a"} 4.0
vllm:num_requests_running{engine="0",model_name="a"} 3.0
"""
    assert read_counts(text) == DraftCounts(11, 120 + 70 + 40, 130)
    assert read_counts("vllm:request_success_total 3\n") is None


# --- the roll-out ---------------------------------------------------------------------------------------------------


class Now(threading.Event):
    """A clock that waiting moves on, without any."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return self.is_set()


def weights(value: float) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        folder.mkdir()
        save_file({"b": torch.full((2, 3), value), "a": torch.ones(4, dtype=torch.bfloat16)}, folder / "a.safetensors")

    return write


@pytest.fixture
def versions(tmp_path: Path) -> Iterator[VersionFolder]:
    folder = VersionFolder(tmp_path / "our  versions", keep=2)
    folder.publish(weights(0.0), {}, is_start=True)
    yield folder
    folder.close()


@pytest.fixture
def make(versions: VersionFolder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Deployer, Now]]:
    """Makes deployers for these engines, by default by reloading."""

    def make(*engines: FakeVLLM, ways: Any = (), **settings: Any) -> tuple[Deployer, Now]:
        monkeypatch.setattr(module.httpx2, "Client", connecting(*engines))
        now = Now()
        ways = [DeployMethod.parse(text) for text in ways or [f"reload={engine.url}" for engine in engines]]
        return Deployer(versions, ways, watch_requests=WATCH, load_seconds=50, stop=now, clock=now, **settings), now

    return make


def drive(deployer: Deployer, *engines: FakeVLLM, requests: int) -> None:
    """Let all engines answer so many requests, and look after every fifth."""
    for _ in range(requests // 5):
        for engine in engines:
            engine.serve(5)
        deployer.look()


def journal(versions: VersionFolder) -> list[tuple[str, int]]:
    lines = (versions.path / "deploy.jsonl").read_text().splitlines()
    return [(line["event"], line["version"]) for line in map(json.loads, lines)]


def test_versions_are_loaded_into_one_engine_after_the_other_and_stay_where_they_are_as_good(
    make: Any, versions: VersionFolder
) -> None:
    engines = [FakeVLLM("http://one:8000", seed=1), FakeVLLM("http://two:8000/v1/", seed=2)]
    deployer, _ = make(*engines)
    drive(deployer, *engines, requests=100)
    assert [engine.loads for engine in engines] == [[], []]  # what they began with stays
    versions.publish(weights(1.0), {})
    deployer.look()
    assert [engine.loads for engine in engines] == [["v000001"], []]
    drive(deployer, *engines, requests=25)
    assert [engine.loads for engine in engines] == [["v000001"], []]  # a fall would be found first
    drive(deployer, *engines, requests=5)
    assert [engine.loads for engine in engines] == [["v000001"], ["v000001"]]
    assert [engine.digest for engine in engines] == [weights_digest(versions.latest)] * 2
    assert [engine.resets for engine in engines] == [1, 1]
    versions.publish(weights(2.0), {})
    drive(deployer, *engines, requests=80)
    assert engines[0].loads == ["v000001"]  # the next one waits until this one has been watched
    drive(deployer, *engines, requests=80)
    assert [engine.loads for engine in engines] == [["v000001", "v000002"]] * 2
    assert deployer.report()["serving"] == 1
    assert journal(versions) == [("loaded", 1), ("loaded", 1), ("kept", 1), ("loaded", 2), ("loaded", 2)]
    assert "version 1 serves, version 2 is watched" in deployer.summary()


def test_a_version_that_is_accepted_less_is_taken_back_everywhere_and_not_deployed_again(
    make: Any, versions: VersionFolder, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [FakeVLLM("http://one:8000", seed=1), FakeVLLM("http://two:8000", seed=2)]
    deployer, _ = make(*engines)
    drive(deployer, *engines, requests=200)
    poisoned = versions.publish(weights(1.0), {})
    for engine in engines:
        engine.alphas[weights_digest(poisoned)] = 0.5
    with caplog.at_level(logging.WARNING):
        drive(deployer, *engines, requests=WATCH // 2)
    start = weights_digest(versions.path / "v000000")
    assert [engine.digest for engine in engines] == [start, start]
    # What they did before it is what the next version is compared with.
    before = [engine.windows_of(versions.version(0)) for engine in deployer.engines]
    assert all(sum(window.requests for window in each) >= 200 for each in before)
    assert versions.latest == versions.path / "v000000"
    told = json.loads((poisoned / REJECTED).read_text())
    assert (told["version"], told["serving"], told["outcome"]) == (1, 0, "rolled back")
    assert told["alpha_after"] < told["alpha_before"] - 0.05
    assert told["requests"] <= WATCH
    assert "Version 1 is rolled back, version 0 serves: acceptance went from 0." in caplog.text
    [decision] = versions.take_rejections()
    assert (decision.version, decision.serving) == (1, 0)
    assert versions.take_rejections() == []
    versions.publish(weights(1.0), {})  # the same weights by another name
    drive(deployer, *engines, requests=50)
    assert engines[0].loads == ["v000001", "v000000"]
    good = versions.publish(weights(3.0), {})
    for engine in engines:
        engine.alphas[weights_digest(good)] = 0.8
    drive(deployer, *engines, requests=100)
    assert deployer.serving is not None
    assert deployer.serving.number == 3
    assert deployer.decisions[-1].alpha_before == pytest.approx(0.6, abs=0.04)
    assert journal(versions)[-1] == ("kept", 3)


def test_a_load_that_fails_stops_the_roll_out_and_is_tried_again(
    make: Any, versions: VersionFolder, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [FakeVLLM(f"http://{name}:8000") for name in ("one", "two", "three")]
    deployer, now = make(*engines)
    engines[1].spoils = True
    versions.publish(weights(1.0), {})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            deployer.look()
        drive(deployer, *engines, requests=40)
    assert [engine.loads for engine in engines] == [["v000001"], ["v000001"], []]
    assert caplog.text.count("other weights than those of version 1") == 1
    now.now += 30
    with caplog.at_level(logging.WARNING):
        deployer.look()
    assert [engine.loads for engine in engines] == [["v000001"], ["v000001"] * 2, []]
    assert caplog.text.count("other weights") == 1  # told once
    engines[1].spoils = False
    now.now += 30
    deployer.look()
    deployer.look()
    assert [engine.loads[-1:] for engine in engines] == [["v000001"]] * 3
    assert journal(versions) == [("loaded", 1), ("failed", 1), ("loaded", 1), ("loaded", 1)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"is_down": True}, "cannot be reached: refused"),
        ({"has_extension": False}, r"answered /collective_rpc with status 404.*VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_an_engine_that_cannot_reload_is_told_of(
    make: Any, versions: VersionFolder, change: dict[str, Any], said: str
) -> None:
    engine = FakeVLLM("http://user:secret@one:8000")
    vars(engine).update(change)
    deployer, _ = make(engine)
    with pytest.raises(ServerError, match=said) as raised:
        deployer.engines[0].load(versions.newest())
    assert "secret" not in str(raised.value)


def test_an_engine_that_starts_anew_gets_the_version_again(make: Any, versions: VersionFolder) -> None:
    engine = FakeVLLM("http://one:8000")
    deployer, _ = make(engine)
    drive(deployer, engine, requests=100)
    versions.publish(weights(1.0), {})
    drive(deployer, engine, requests=60)
    engine.start_anew()
    drive(deployer, engine, requests=20)
    assert engine.loads == ["v000001"] * 2
    engine.is_down = True
    deployer.look()
    engine.is_down = False  # it was away for a moment, and has it still
    drive(deployer, engine, requests=20)
    assert engine.loads == ["v000001"] * 2
    windows = deployer.engines[0].windows_of(versions.version(1))
    assert all(window.requests >= 10 and min(window) >= 0 for window in windows)
    drive(deployer, engine, requests=WATCH)
    assert [decision.outcome for decision in deployer.decisions] == ["promoted"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_another_process_compares_with_what_was_counted_before_it(
    make: Any, versions: VersionFolder, is_killed: bool
) -> None:
    engine = FakeVLLM("http://one:8000")
    deployer, _ = make(engine)
    versions.publish(weights(1.0), {})
    drive(deployer, engine, requests=WATCH + 10)
    assert deployer.decisions[0].outcome == "promoted"
    if not is_killed:
        drive(deployer, engine, requests=50)
        deployer.close()
    counted = deployer.engines[0].windows_of(versions.version(1))
    poisoned = versions.publish(weights(2.0), {})
    engine.alphas[weights_digest(poisoned)] = 0.2
    again, _ = make(engine)
    assert again.engines[0].windows_of(versions.version(1)) == counted
    drive(again, engine, requests=WATCH)
    assert [(each.outcome, each.serving) for each in again.decisions] == [("rolled back", 1)]


def test_another_process_goes_on_with_the_watch(make: Any, versions: VersionFolder) -> None:
    engine = FakeVLLM("http://one:8000")
    deployer, _ = make(engine)
    drive(deployer, engine, requests=200)
    bad = versions.publish(weights(1.0), {})
    engine.alphas[weights_digest(bad)] = 0.5
    drive(deployer, engine, requests=15)
    with (versions.path / "deploy.jsonl").open("a") as file:
        file.write('{"event": "kept", "vers')  # it was killed in the middle of a line
    again, _ = make(engine)
    assert (again.serving, again.candidate) == (deployer.serving, deployer.candidate)
    drive(again, engine, requests=WATCH)
    assert engine.loads == ["v000001", "v000000"]
    third, _ = make(engine)
    assert (third.serving, third.candidate) == (again.serving, None)
    versions.publish(weights(1.0), {})
    third.look()
    assert engine.loads == ["v000001", "v000000"]  # the digest is known


def test_the_version_that_may_be_gone_back_to_is_kept(make: Any, versions: VersionFolder) -> None:
    engine = FakeVLLM("http://one:8000")
    deployer, _ = make(engine)
    for value in range(1, 6):
        versions.publish(weights(float(value)), {})
        deployer.look()
    kept = sorted(path.name for path in versions.path.glob("v*"))
    assert kept == ["v000000", "v000001", "v000004", "v000005"]  # serves, is watched, and the newest two
    (versions.path / "latest").unlink()
    os.symlink("v000004", versions.path / "latest")  # whoever points decides
    drive(deployer, engine, requests=WATCH + 20)
    assert engine.loads == ["v000001", "v000004"]


def test_a_rejected_version_is_not_taken_for_one_that_was_never_pointed_to(versions: VersionFolder) -> None:
    versions.publish(weights(1.0), {})
    versions.reject(module.GateDecision("rolled back", 1, 0, None, "worse"))
    versions.close()
    again = VersionFolder(versions.path)
    assert again.latest == versions.path / "v000000"
    assert again.publish(weights(2.0), {}).name == "v000002"
    again.close()


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_dead_engine_does_not_keep_others_from_going_back(make: Any, versions: VersionFolder) -> None:
    engines = [FakeVLLM(f"http://{name}:8000", seed=i) for i, name in enumerate(("one", "two", "three"))]
    deployer, _ = make(*engines)
    poisoned = versions.publish(weights(1.0), {})
    while not all(engine.loads for engine in engines):
        drive(deployer, *engines, requests=5)
    engines[0].is_down = True
    for engine in engines[1:]:
        engine.alphas[weights_digest(poisoned)] = 0.1
    drive(deployer, *engines[1:], requests=WATCH // 2)
    assert [engine.loads[-1] for engine in engines] == ["v000001", "v000000", "v000000"]
    engines[2].start_anew()
    drive(deployer, *engines[1:], requests=10)
    assert engines[2].loads[-2:] == ["v000000"] * 2  # nor from getting again what serves
    engines[0].is_down = False
    deployer.look()
    assert engines[0].loads == ["v000001", "v000000"]


def test_a_version_that_an_engine_cannot_load_is_taken_back(make: Any, versions: VersionFolder) -> None:
    engine = FakeVLLM("http://one:8000")
    deployer, now = make(engine, ways=[f"restart={engine.url} case {{version}} in *2) exit 3;; esac"])
    for value in (1.0, 2.0):
        versions.publish(weights(value), {})
        drive(deployer, engine, requests=WATCH + 10)
    for _ in range(2):
        now.now += 30
        assert deployer.decisions[1:] == []
        deployer.look()
    assert [(each.outcome, each.serving) for each in deployer.decisions[1:]] == [("rolled back", 1)]
    assert "has not loaded it 3 times: The command" in deployer.decisions[1].reason
    assert deployer.engines[0].serves(versions.version(1))
    assert journal(versions)[-3:] == [("failed", 2), ("rolled back", 2), ("loaded", 1)]


def test_a_full_disk_loses_no_rollback(
    make: Any, versions: VersionFolder, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    engine = FakeVLLM("http://one:8000", served=1000)
    deployer, _ = make(engine)
    poisoned = versions.publish(weights(1.0), {})
    engine.alphas[weights_digest(poisoned)] = 0.2
    deployer.look()
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(os, "symlink", full)
        patch.setattr(module, "JOURNAL", "no/such/folder")
        drive(deployer, engine, requests=100)
    assert engine.loads == ["v000001"]
    assert versions.latest == poisoned
    assert caplog.text.count("it is tried again") == 1
    deployer.look()
    assert engine.loads == ["v000001", "v000000"]
    assert versions.latest == versions.path / "v000000"
    assert (poisoned / REJECTED).exists()
    assert len(versions.take_rejections()) == 1
    assert journal(versions)[-2:] == [("rolled back", 1), ("loaded", 0)]
    (versions.path / "latest").unlink()
    os.symlink("v000001", versions.path / "latest")
    (versions.path / "deploy.jsonl").unlink()
    again, _ = make(engine)
    drive(again, engine, requests=50)
    assert engine.loads == ["v000001", "v000000"]  # the mark in its folder is enough


# --- ways -----------------------------------------------------------------------------------------------------------


@posix
def test_an_engine_is_restarted_by_a_command(make: Any, versions: VersionFolder, tmp_path: Path) -> None:
    engine = FakeVLLM("http://one:8000")
    told = tmp_path / "it's told"
    way = f'restart={engine.url} sleep 100 & echo {{version}} {{url}} {{other}} >> "{told}"'
    deployer, _ = make(engine, ways=[way])
    folder = versions.publish(weights(1.0), {})
    deployer.look()  # what the command leaves running is not waited for
    assert told.read_text() == f"{folder} http://one:8000 {{other}}\n"
    engine.serve(30)
    deployer.look()
    engine.start_anew()
    deployer.look()
    assert len(told.read_text().splitlines()) == 1  # it starts with what it was told by itself


@posix
@pytest.mark.parametrize(
    ("command", "said", "is_unhealthy"),
    [("echo first; echo last >&2; exit 3", "ended with code 3: last", False), ("true", "is not healthy", True)],
)
def test_a_restart_that_fails_is_told_of(
    make: Any, versions: VersionFolder, command: str, said: str, is_unhealthy: bool
) -> None:
    engine = FakeVLLM("http://one:8000")
    engine.is_unhealthy = is_unhealthy
    deployer, now = make(engine, ways=[f"restart={engine.url} {command}"])
    with pytest.raises(ServerError, match=said):
        deployer.engines[0].load(versions.newest())
    assert now.now == (50 if is_unhealthy else 0)


@posix
def test_a_command_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ServerError, match=r"did not end within 0\.01 s"):
        run_command("sleep 100", 0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://one:8000", "takes reload=URL"),
        ("reload=one:8000", "is no address"),
        ("reload=http://user:secret@one:8000 now", r"got 'reload=http://\*\*\*@one:8000 now'"),
        ("restart=http://one:8000", "takes reload=URL or 'restart=URL COMMAND'"),
    ],
)
def test_a_way_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        DeployMethod.parse(text)
    assert "secret" not in str(raised.value)
    expected = DeployMethod("http://one:8000", "run reload=x", "a:b")
    assert DeployMethod.parse("a:b:restart=http://one:8000 run reload=x") == expected


# --- the extension --------------------------------------------------------------------------------------------------


def test_the_digest_is_of_the_weights_alone(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(3)}
    for name in ("whole", "split", "other", "shaped"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    save_file({"b": tensors["b"], "c": tensors["c"]}, tmp_path / "split" / "model-1.safetensors")
    save_file({"a": tensors["a"]}, tmp_path / "split" / "model-2.safetensors")
    save_file({**tensors, "c": torch.tensor(4)}, tmp_path / "other" / "model.safetensors")
    save_file({**tensors, "a": tensors["a"].reshape(3, 2)}, tmp_path / "shaped" / "model.safetensors")
    digests = {name: weights_digest(tmp_path / name) for name in ("whole", "split", "other", "shaped")}
    assert len(digests["whole"]) == 64
    assert digests["split"] == digests["whole"]
    assert len(set(digests.values())) == 3
    handed = Weights(tmp_path / "whole")
    next(iter(handed))
    assert handed.digest != digests["whole"]  # of what was handed out
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        weights_digest(tmp_path)


def test_the_extension_is_imported_where_only_vllms_packages_are() -> None:
    root = Path(module.__file__).parents[2]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r}); import osd_hf.engines.vllm_reload as it; "
        "worker = it.DraftReload(); print(worker.load_draft('nowhere')['error'])"
    )
    found = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("FileNotFoundError")


def test_nothing_is_loaded_into_what_a_head_shares_with_the_target(tmp_path: Path) -> None:
    target, head = torch.nn.ModuleDict(), torch.nn.ModuleDict()
    target["embed_tokens"] = head["embed_tokens"] = torch.nn.Embedding(4, 2)  # one module
    target["lm_head"], head["lm_head"] = torch.nn.Linear(2, 4), torch.nn.Linear(2, 4)
    head["fc"] = torch.nn.Linear(6, 2)
    assert shared_modules(head, target) == {"embed_tokens"}
    head["lm_head"].weight = target["lm_head"].weight  # one weight
    assert shared_modules(head, target) == {"embed_tokens", "lm_head"}
    names = ("model.embed_tokens.weight", "lm_head.weight", "fc.weight", "layers.0.self_attn.q_proj.weight")
    save_file({name: torch.full((2,), float(i)) for i, name in enumerate(names)}, tmp_path / "model.safetensors")
    handed = Weights(tmp_path, except_for=shared_modules(head, target))
    assert [name for name, _ in handed] == ["fc.weight", "layers.0.self_attn.q_proj.weight"]
    assert handed.digest == weights_digest(tmp_path)  # of all of them


def test_a_changed_weight_of_the_target_changes_its_sums() -> None:
    target = torch.nn.Linear(300, 400)
    target.register_buffer("scale", torch.ones(3))
    before = checksums(target)
    assert checksums(target) == before
    with torch.no_grad():
        target.weight.copy_(torch.randn_like(target.weight))
        target.scale[1] = 2.0
    changed = {name for name, value in checksums(target).items() if value != before[name]}
    assert changed == {"weight", "scale"}
