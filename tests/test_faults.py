import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import killed_sessions
import models
import numpy as np
import pytest
import torch
from processes import run_python
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from waiting import LONG, full

from osd_hf import CorrectionStore, LabelRouter, OnlineAssistant, OnlineConfig, Trace
from osd_hf.acceptance import Tally
from osd_hf.errors import LearnerError, StateError, StoreError
from osd_hf.learning import learner as learner_module
from osd_hf.learning import session as session_module
from osd_hf.learning.learner import Learner
from osd_hf.learning.requests import DraftRequests
from osd_hf.learning.updater import Updater
from osd_hf.store import folder as shards

# Without the gate each update is a version.
CONFIG = OnlineConfig(num_assistant_tokens=5, update_strategy="interval",
    update_interval=3, steps_per_update=1, batch_size=4, num_logprobs=8, optimizer="adamw", learning_rate=3e-3,
    gate=False,
)  # fmt: skip
IDLE = replace(CONFIG, update_strategy="idle")


@pytest.fixture(autouse=True)
def save_after_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "UPDATES_BETWEEN_SAVES", 1)


def ask(
    generate: Any, number: int, max_new_tokens: int = 8, vocab_size: int = models.VOCAB, **settings: Any
) -> list[int]:
    ids = models.prompts(9, vocab_size)[number % 9]
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, "do_sample": False}
    return generate(ids, **kwargs, **settings)[0, ids.shape[1] :].tolist()


def answers(generate: Any, numbers: Any, **settings: Any) -> list[list[int]]:
    return [ask(generate, number, **settings) for number in numbers]


# --- a learner that dies --------------------------------------------------------------------------------------------


def out_of_memory(self: Updater, traces: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def buggy(self: Updater, traces: Any) -> Any:
    raise KeyError("attention_mask")


def not_a_number(loss: Any) -> Any:
    return lambda self, traces: (loss(self, traces)[0] * float("nan"), 1)


FAILING: dict[str, Any] = {
    "memory": (torch.OutOfMemoryError, lambda patch: patch.setattr(Updater, "_loss", out_of_memory)),
    "bug": (KeyError, lambda patch: patch.setattr(Updater, "_loss", buggy)),
    "nan": (FloatingPointError, lambda patch: patch.setattr(Updater, "_loss", not_a_number(Updater._loss))),
    "gate": (MemoryError, lambda patch: patch.setattr(learner_module, "judge", no_memory)),
}  # fmt: skip


def no_memory(*_: Any) -> None:
    raise MemoryError("no more")


@pytest.mark.parametrize(
    ("cause", "strategy"), [*((cause, "spread") for cause in FAILING), ("bug", "interval"), ("nan", "idle")]
)
def test_a_learner_that_always_fails_is_told_of_once_pauses_and_resumes_by_itself(
    cause: str, strategy: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error, fails = FAILING[cause]
    target, draft = models.bigram(0, vocab_size=12), models.bigram(1, vocab_size=12)
    alone = answers(target.generate, range(9), max_new_tokens=3, vocab_size=12)
    caplog.set_level(logging.INFO, logger="osd_hf")
    config = replace(CONFIG, update_strategy=strategy, update_interval=2, gate=True, learning_rate=0.1)
    assistant, tried = OnlineAssistant(target, draft, config=config), []
    assistant.drafts.set_pace(min_effort=1.0)  # all updates, however long one takes
    begin = DraftRequests.begin_update

    def begun(self: DraftRequests) -> list[Trace]:
        tried.append(assistant.stats.num_requests)
        return begin(self)

    def serve(numbers: Any) -> None:
        for number in numbers:
            assert ask(assistant.generate, number, 3, vocab_size=12) == alone[number % 9]
            assert assistant.wait_until_idle(LONG)

    monkeypatch.setattr(DraftRequests, "begin_update", begun)
    with monkeypatch.context() as patch:
        fails(patch)
        serve(range(42))
        assert isinstance(assistant.learning_error, error)
        assert (assistant.version, assistant.stats.num_requests) == (0, 42)
        with pytest.raises(LearnerError) if cause != "nan" else nullcontext():
            assistant.update(steps=1)  # a try as well, whose report says what was dropped
        assert assistant.learning_error is not None
    (told,) = [r for r in caplog.records if r.levelno >= logging.WARNING and "A token takes" not in r.message]
    assert told.message.startswith("Learning failed")
    assert cause == "nan" or (told.exc_info is not None and told.exc_info[2] is not None)
    assert sum("Learning pauses" in record.message for record in caplog.records) == 1
    late = np.diff(tried[:-1]) - [2, 2, 4, 8, 16]  # by the requests that an update is spread over
    assert set(late) <= ({0, 1} if strategy == "spread" else {0})
    serve(range(24))
    assert assistant.learning_error is None
    assert assistant.version > 0
    assert "promoted" in {decision.outcome for decision in assistant.decisions}
    assistant.close()


@pytest.mark.parametrize("how", ["resume", "update"])
def test_learning_that_pauses_goes_on_at_once_when_asked_to(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assistant = OnlineAssistant(*models.pair(), config=replace(CONFIG, update_interval=1))
    with monkeypatch.context() as patch:
        patch.setattr(Updater, "_loss", buggy)
        answers(assistant.generate, range(3))
    assert not assistant.is_learning
    answers(assistant.generate, [3])
    assert assistant.version == 0  # it rests
    assistant.pause()
    assistant.resume()  # as an app does around each request
    assert not assistant.is_learning
    if how == "update":
        assert assistant.update().steps
        assert assistant.learning_error is None
    else:
        assistant.resume()
        assert assistant.is_learning
        assert assistant.learning_error is not None  # nothing has succeeded yet
    version = assistant.version
    answers(assistant.generate, [4])
    assert assistant.version == version + 1
    assert assistant.learning_error is None
    assistant.close()


def test_a_draft_of_one_domain_that_cannot_learn_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assistant = OnlineAssistant(*models.pair(), config=replace(CONFIG, update_interval=1), router=LabelRouter())
    make, asked = assistant.drafts.updater, []

    def made(domain: Any, *args: Any) -> Updater:
        if domain == "a":
            asked.append(domain)
            raise MemoryError("no more")
        return make(domain, *args)

    monkeypatch.setattr(assistant.drafts, "updater", made)
    for number in range(24):
        ask(assistant.generate, number, domain="ab"[number % 2])
    assert len(asked) == 5  # after 1, 2, 3, 5 and 9 of its requests; the next try comes after 17
    assert assistant.drafts.serving_version("b") == 12
    assert isinstance(assistant.learning_error, MemoryError)
    with pytest.raises(LearnerError, match="no more"):
        assistant.close()


# --- a disk that is full --------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_at_the_close_is_told_and_the_log_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models.pair()
    store = CorrectionStore(tmp_path / "log")
    assistant = OnlineAssistant(target, draft, config=CONFIG, store=store, autosave=tmp_path / "session")
    answers(assistant.generate, range(2))
    with monkeypatch.context() as patch:
        patch.setattr(session_module.torch, "save", full)
        with pytest.raises(LearnerError, match="No space left") as caught:
            assistant.close()
    assert isinstance(caught.value.__cause__, StateError)
    assert len(CorrectionStore(tmp_path / "log")) == 2
    assistant.close()
    assert session_module.has_session(tmp_path / "session")


@pytest.mark.parametrize("place", ["mkdir", "save", "write_table", "fsync", "rename"])
def test_a_disk_that_is_full_while_saving_costs_no_answer_and_no_session(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = {"save": torch, "write_table": session_module.pq}
    target, draft = models.pair()
    alone = answers(target.generate, range(9))
    assistant, other = (OnlineAssistant(target, draft, config=CONFIG) for _ in range(2))
    with assistant, other:
        found = answers(assistant.generate, range(3))
        assistant.save_state(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(homes.get(place, os), place, full)
            found += answers(assistant.generate, range(3, 6))
            with pytest.raises(StateError, match="No space left"):
                assistant.save_state(tmp_path)
            found += answers(assistant.generate, range(6, 9))
        other.load_state(tmp_path)  # what was saved before
        assert (other.version, other.stats.num_requests) == (1, 3)
        assistant.save_state(tmp_path)
        other.load_state(tmp_path)
        assert (other.version, other.stats.num_requests) == (3, 9)
    assert found == alone
    assert len(list(tmp_path.glob("state-*"))) == 1


@pytest.mark.parametrize("strategy", ["spread", "interval", "idle"])
def test_a_disk_that_stays_full_costs_no_answer_and_is_told_of_once(
    strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = models.bigram(0, vocab_size=12), models.bigram(1, vocab_size=12)
    alone = answers(target.generate, range(9), max_new_tokens=3, vocab_size=12)
    changes = {"update_interval": 8, "learning_rate": 0.1, "gate": True}
    config = replace(CONFIG, update_strategy=strategy, **changes)
    store = CorrectionStore(tmp_path / "log", flush_every=1)
    assistant = OnlineAssistant(target, draft, config=config, store=store, autosave=tmp_path / "session")
    assistant.drafts.set_pace(min_effort=1.0)

    def serve(numbers: Any) -> None:
        for number in numbers:
            assert ask(assistant.generate, number, 3, vocab_size=12) == alone[number % 9]
            assert assistant.wait_until_idle(LONG)
            if assistant._live.save_thread is not None:
                assistant._live.save_thread.join(LONG)

    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "fsync", full)
        serve(range(42))
        assert isinstance(assistant.learning_error, StoreError | StateError)
        assert "No space left" in str(assistant.learning_error)
        assert len(assistant.decisions) >= 4  # and learning went on
    told = [r for r in caplog.records if r.levelno >= logging.WARNING and "A token takes" not in r.message]
    assert sorted(record.message.split(" failed")[0] for record in told) == [
        "Logging a request", "Saving the session"
    ]  # fmt: skip
    assert all(record.exc_info for record in told)
    serve(range(10))
    assert assistant.learning_error is None
    assert assistant.version > 0
    assistant.close()
    assert len(CorrectionStore(tmp_path / "log")) == 52
    assert session_module.has_session(tmp_path / "session")


# --- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="restarts by fork")
def test_a_session_killed_at_any_moment_goes_on(tmp_path: Path) -> None:
    kills = 14
    done = run_python(Path(killed_sessions.__file__), str(tmp_path / "session"), str(kills))
    assert done.returncode == 0, done.stderr
    first, *lives = [json.loads(line) for line in done.stdout.splitlines()]
    alone, least = first["alone"], 0
    assert len(lives) == kills
    for life in lives:
        assert life["killed"], done.stderr
        found, *answered = life["said"]
        state = found["state"]
        assert state["finite"]
        assert state["serving"] in [0, *state["promoted"]]
        assert state["serving"] <= state["version"] == max(state["decided"], default=0)
        assert state["kept"] == state["observed"]  # no request is lost
        assert state["requests"] == state["observed"]  # read at one moment, though requests go on
        assert state["requests"] >= least  # a later state is never lost
        least = state["requests"]
        for request in answered:
            assert request["answer"] == alone[request["number"] % len(alone)]
    assert least >= 10  # two at least for each life that saved, of which the last one tells
    assert lives[-1]["said"][0]["state"]["promoted"]


@pytest.mark.parametrize(
    ("home", "step", "work", "meanwhile", "requests"),
    [
        (Tally, "state", "save", "ask", 1),
        (Tally, "add", "ask", "save", 2),
        (Learner, "load_state_dict", "load", "ask", 2),
    ],
)
def test_a_request_that_ends_while_a_session_is_saved_or_loaded_is_in_all_of_it_or_in_none(
    home: type, step: str, work: str, meanwhile: str, requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, update_strategy="manual", gate=True)
    with OnlineAssistant(*models.pair(), config=config) as assistant:
        actions = {
            "ask": lambda: ask(assistant.generate, 1),
            "save": lambda: assistant.save_state(tmp_path),
            "load": lambda: assistant.load_state(tmp_path),
        }
        ask(assistant.generate, 0)
        assistant.save_state(tmp_path)
        other, whole = threading.Thread(target=actions[meanwhile]), getattr(home, step)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            result = whole(*args, **kwargs)
            if other.ident is None:
                other.start()
                other.join(0.5)  # until it has ended, or waits
            return result

        with monkeypatch.context() as patch:
            patch.setattr(home, step, interrupted)
            actions[work]()
            other.join(LONG)
        if work != "load":
            assert assistant.stats.num_requests == 2
            assistant.load_state(tmp_path)
        assert assistant.stats.num_requests == assistant.drafts.requests[None].observed == requests


# --- many at once ---------------------------------------------------------------------------------------------------


@contextmanager
def drafted_with(assistant: OnlineAssistant) -> Iterator[dict[int, list[int]]]:
    """A fingerprint of the weights at each forward of a draft, by thread."""
    seen: dict[int, list[int]] = {}

    def note(module: Any, *_: Any) -> None:
        if module in assistant.drafts.models:
            weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
            seen.setdefault(threading.get_ident(), []).append(hash(weights))

    handles = [register_module_forward_pre_hook(note), register_module_forward_hook(note)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def test_requests_of_two_threads_are_the_targets_own_while_versions_come_and_go() -> None:
    target, draft = models.bigram(0, vocab_size=12), models.bigram(1, vocab_size=12)
    assistant = OnlineAssistant(target, draft, config=replace(CONFIG, update_strategy="manual"))
    prompts = [models.prompt(4, seed=seed, vocab_size=12) for seed in range(10)]
    kwargs = {"attention_mask": torch.ones(1, 4, dtype=torch.long), "max_new_tokens": 8, "do_sample": False}
    alone = [target.generate(ids, **kwargs) for ids in prompts]
    wrong: list[Any] = []
    versions: list[set[int]] = [set(), set()]
    learned, at_work = [threading.Semaphore(0), threading.Semaphore(0)], [2]

    def serve(thread: int) -> None:
        try:
            for number in range(40):
                if number % 4 == 0:
                    assert learned[thread].acquire(timeout=LONG)  # however slow learning is
                seen.setdefault(threading.get_ident(), []).clear()
                output = assistant.generate(prompts[number % 10], **kwargs)
                used = set(seen[threading.get_ident()])
                if not torch.equal(output, alone[number % 10]) or len(used) != 1:
                    wrong.append((thread, number, used))
                versions[thread] |= used
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)
        finally:
            at_work[0] -= 1

    with drafted_with(assistant) as seen:
        threads = [threading.Thread(target=serve, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        while at_work[0]:
            assistant.update(steps=1)
            for semaphore in learned:
                semaphore.release()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()
    assert wrong == []
    assert assistant.stats.num_requests == 80
    assert assistant.version >= 10
    assert min(map(len, versions)) > 5
    assert len(assistant.drafts.held) == 1


def test_an_idle_learner_computes_only_while_no_request_runs() -> None:
    target, draft = models.pair()
    alone = answers(target.generate, range(9), max_new_tokens=4)
    loss, running, wrong = Updater._loss, {"target": 0, "learning": 0}, list[str]()

    def begin(*_: Any) -> None:
        running["target"] += 1
        if running["learning"]:
            wrong.append("a request computed while learning")

    def end(*_: Any) -> None:
        running["target"] -= 1

    def learning(self: Updater, traces: Any) -> Any:
        running["learning"] += 1
        if running["target"]:
            wrong.append("learning began while a request computed")
        try:
            return loss(self, traces)
        finally:
            running["learning"] -= 1

    found: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch, OnlineAssistant(target, draft, config=IDLE) as assistant:
        patch.setattr(Updater, "_loss", learning)
        hooks = [target.register_forward_pre_hook(begin), target.register_forward_hook(end)]
        client = threading.Thread(
            target=lambda: found.extend(answers(assistant.generate, [*range(9)] * 2, max_new_tokens=4))
        )
        client.start()
        client.join(LONG)
        assert assistant.wait_until_idle(LONG)
        for hook in hooks:
            hook.remove()
        assert found == alone * 2
        assert wrong == []
        assert assistant.version > 0


def test_an_idle_learner_wakes_for_whatever_becomes_due() -> None:
    target, draft = models.pair()
    with OnlineAssistant(target, draft, config=IDLE) as assistant:
        with assistant.attached():  # a request ends before it is observed
            for number in range(3):
                ask(target.generate, number, assistant_model=assistant.draft)
        assert assistant.wait_until_idle(LONG)
        assert assistant.version == 1
        assistant.pause()
        answers(assistant.generate, range(3))
        assert assistant.wait_until_idle(LONG)
        assert assistant.version == 1
        assistant.resume()
        assert assistant.wait_until_idle(LONG)
        assert assistant.version == 2
        with assistant._live.traffic.alone():  # as while a session is saved, or learned from by hand
            answers(assistant.generate, range(3))
        assert assistant.wait_until_idle(LONG)
        assert assistant.version == 3


def test_waiting_for_a_learner_that_is_closed_ends() -> None:
    target, draft = models.pair()
    assistant = OnlineAssistant(target, draft, config=IDLE)
    assistant.pause()
    answers(assistant.generate, range(4))
    assistant.close()
    assistant.resume()
    assert assistant.is_learning  # it is due, and nobody will do it
    assert assistant.wait_until_idle(LONG)
    assert assistant.version == 0
    assert answers(assistant.generate, range(4)) == answers(target.generate, range(4))


def test_pausing_holds_an_update_in_the_middle() -> None:
    target, draft = models.pair()
    with OnlineAssistant(target, draft, config=IDLE) as assistant:
        steps = threading.Semaphore(0)
        average = Updater._average

        def pausing(self: Updater) -> None:
            average(self)
            assistant.pause()
            steps.release()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Updater, "_average", pausing)
            answers(assistant.generate, range(3))
            assert steps.acquire(timeout=LONG)
            assert assistant.wait_until_idle(LONG)
            assert assistant.version == 0
            assert answers(assistant.generate, range(2)) == answers(target.generate, range(2))
        assert assistant.version == 0
        assistant.resume()
        assert assistant.wait_until_idle(LONG)
        assert assistant.version == 1
