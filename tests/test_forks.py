import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from processes import run_python

from osd_hf import OnlineConfig
from osd_hf.decoding import hook
from osd_hf.decoding.forward import CompiledDraft, DraftForward, StaticForward
from osd_hf.learning.activations import computed_again, layers_of
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.learner import DutyCycle
from osd_hf.live_learning import LiveLearning
from osd_hf.utils import kernels, yielding
from osd_hf.utils.disk import in_child, lock_file, renewing
from osd_hf.utils.yielding import between, breathe, computing, give_way, giving_way

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
LONG = 300  # seconds: never waited for but where something is broken


def in_a_fork(work: Callable[[], object]) -> int | None:
    """The exit code of a child that does this; `None` where it does not come to an end."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(LONG)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def held_elsewhere(lock: Any) -> threading.Event:
    """Another thread holds it until the event is set."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(LONG)

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(LONG)
    return done


class Owner:
    def __init__(self) -> None:
        self.lock, self.again = threading.Lock(), threading.RLock()
        in_child(self, renewing(lock=threading.Lock, again=threading.RLock))


def test_a_child_takes_locks_that_threads_of_its_parent_held() -> None:
    owner = Owner()
    done = [held_elsewhere(lock) for lock in (owner.lock, owner.again)]

    def take() -> None:
        with owner.lock, owner.again:
            pass

    assert in_a_fork(take) == 0
    for event in done:
        event.set()


def test_a_block_that_the_forking_thread_is_in_ends_as_it_began() -> None:
    owner = Owner()
    with owner.lock:
        child = os.fork()
        if child == 0:
            try:
                owner.lock.acquire(timeout=0)
            except BaseException:  # noqa: BLE001
                os._exit(3)
    if child == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not owner.lock.locked()


def idle(has_work: Callable[[], bool], step: Callable[[], None]) -> LiveLearning:
    """Takes steps between requests."""
    learner: Any = SimpleNamespace(
        has_work=has_work,
        step=step,
        duty_cycle=DutyCycle(1.0),
        drafts=None,
        config=OnlineConfig(update_strategy="idle"),
    )
    return LiveLearning(learner)


def test_a_request_of_a_child_waits_for_no_step_of_its_parent() -> None:
    stepping, done = threading.Event(), threading.Event()

    def step() -> None:
        stepping.set()
        done.wait(LONG)

    worker = idle(lambda: not done.is_set(), step)
    traffic = worker.traffic
    assert stepping.wait(LONG)

    def ask() -> None:
        with traffic.request():
            assert traffic.requests == 1

    assert in_a_fork(ask) == 0
    done.set()
    worker.stop()


def leave() -> None:
    pass


@pytest.mark.parametrize("place", [leave, breathe, give_way])
def test_a_fork_waits_until_a_thread_that_computes_comes_to_a_place(place: Callable[[], None]) -> None:
    inside, waited, forked = threading.Event(), threading.Event(), threading.Event()

    def compute() -> None:
        with giving_way(lambda: None), computing(), computing():
            inside.set()
            ends = time.monotonic() + LONG
            while yielding._forks.forking is None and time.monotonic() < ends:
                pass
            waited.set()  # and nothing has been forked
            place()
            if place is not leave:
                forked.wait(LONG)

    thread = threading.Thread(target=compute)
    thread.start()
    assert inside.wait(LONG)
    child = os.fork()
    if child == 0:
        os._exit(0 if waited.is_set() else 3)
    forked.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join(LONG)
    assert not yielding._forks.depth
    assert yielding._forks.forking is None


def needs_a_lock_of_forks() -> None:
    with hook._lock:
        pass


def needs_the_kernels() -> None:
    with kernels.fast_kernels(torch.nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("get_on", [needs_a_lock_of_forks, needs_the_kernels])
def test_what_a_fork_waits_for_can_get_on(get_on: Callable[[], None]) -> None:
    inside, got_on = threading.Event(), threading.Event()

    def compute() -> None:
        with computing():
            inside.set()
            ends = time.monotonic() + LONG
            while yielding._forks.forking is None and time.monotonic() < ends:
                pass
            get_on()
            got_on.set()

    thread = threading.Thread(target=compute)
    thread.start()
    assert inside.wait(LONG)

    def go_on() -> None:
        assert got_on.is_set()  # the fork has not given up waiting
        get_on()

    assert in_a_fork(go_on) == 0
    thread.join(LONG)
    get_on()


def test_a_fork_happens_though_others_compute_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielding, "PATIENCE", 0.0)
    done = held_elsewhere(computing())

    def compute() -> None:
        assert not yielding._forks.depth
        with computing():
            breathe()

    with computing():  # the forking thread's own is not waited for
        assert in_a_fork(lambda: os._exit(0 if list(yielding._forks.depth) == [threading.get_ident()] else 3)) == 0
    assert in_a_fork(compute) == 0
    done.set()


def test_a_child_has_no_hooks_of_a_forward_that_its_parent_is_in() -> None:
    model = models.build(num_hidden_layers=1)
    [layer] = layers_of(model)

    def is_bare() -> bool:
        return not layer._forward_pre_hooks and "forward" not in vars(layer)

    @contextmanager
    def forward() -> Iterator[None]:
        with giving_way(lambda: None), computed_again(model), between([layer]):
            yield

    done = held_elsewhere(forward())
    assert not is_bare()
    assert in_a_fork(lambda: os._exit(5 if is_bare() else 6)) == 5
    assert not is_bare()
    done.set()


def test_a_child_knows_nothing_of_a_step_of_its_parent_that_has_given_way() -> None:
    stepping, done = threading.Event(), threading.Event()

    def step() -> None:
        stepping.set()
        while not done.is_set():
            give_way()

    worker = idle(lambda: not done.is_set(), step)
    traffic = worker.traffic
    assert stepping.wait(LONG)
    answered = held_elsewhere(traffic.request())
    assert traffic.is_stepping
    assert traffic.gives_way

    def ask() -> None:
        assert not (traffic.is_stepping or traffic.gives_way or traffic.requests)
        with traffic.request():
            assert worker._is_torn  # what the step leaves behind is not learned on from
        worker.stop()

    assert in_a_fork(ask) == 0
    done.set()
    answered.set()
    worker.stop()


def test_a_child_counts_no_requests_of_its_parents_other_threads() -> None:
    may_step, stepped = threading.Event(), threading.Event()
    worker = idle(lambda: may_step.is_set() and not stepped.is_set(), stepped.set)
    traffic = worker.traffic
    done = held_elsewhere(traffic.request())

    def learn() -> None:
        assert traffic.requests == 0
        may_step.set()
        worker._wake()
        assert stepped.wait(LONG)

    assert in_a_fork(learn) == 0
    done.set()
    worker.stop()


def test_a_lock_of_a_file_is_the_parents_alone(tmp_path: Path) -> None:
    lock = lock_file(tmp_path / "lock", wait=True)
    assert lock is not None
    begin, end = os.pipe()
    is_there, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        lock.close()  # does nothing here
        os.write(say, b".")
        os.read(begin, 1)  # until the parent is done
        os._exit(0)
    os.close(begin)
    os.read(is_there, 1)
    assert lock_file(tmp_path / "lock", wait=False) is None
    os.close(lock.descriptor)  # as a kill does
    again = lock_file(tmp_path / "lock", wait=False)
    assert again is not None
    again.close()
    os.close(end)
    os.waitpid(child, 0)


def test_a_child_that_closes_before_it_knows_of_the_fork_leaves_the_lock(tmp_path: Path) -> None:
    lock = lock_file(tmp_path / "lock", wait=True)
    assert lock is not None
    lock._owner += 1  # as in a child
    other = os.dup(lock.descriptor)  # the parent's
    lock.close()
    assert lock_file(tmp_path / "lock", wait=False) is None
    os.close(other)


def compiled_draft(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, CompiledDraft]:
    """By a compiler that leaves the step as it is."""
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    model = models.build(num_hidden_layers=1)
    return model, CompiledDraft(model)


def test_a_child_drafts_with_what_a_thread_of_its_parent_was_running(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = compiled_draft(monkeypatch)
    under_way = compiled.forward(model, 4, 4)
    assert isinstance(under_way, StaticForward)
    ids = torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode():
        under_way.feed(ids)
    done = held_elsewhere(under_way._compiled.running)

    @torch.inference_mode()
    def draft() -> None:
        torch.set_num_threads(1)  # torch's own threads are not in the child
        under_way.feed(ids)
        again = compiled.forward(model, 4, 4)
        assert isinstance(again, StaticForward)
        again.feed(ids)
        again.feed(ids)

    assert in_a_fork(draft) == 0
    done.set()


def test_a_child_compiles_nothing_where_a_thread_of_its_parent_held_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, compiled = compiled_draft(monkeypatch)
    compiler, reached, done = threading.Lock(), threading.Event(), threading.Event()

    def compile_slowly(step: Any, **_: Any) -> Any:
        with compiler:
            reached.set()
            done.wait(LONG)
        return step

    monkeypatch.setattr(torch, "compile", compile_slowly)
    thread = threading.Thread(target=lambda: compiled.forward(model, 4, 4), daemon=True)
    thread.start()
    assert reached.wait(LONG)

    def draft() -> None:
        for drafts in (compiled, CompiledDraft(model)):
            for tokens in (4, 300):
                assert type(drafts.forward(model, tokens, tokens)) is DraftForward

    assert in_a_fork(draft) == 0
    done.set()
    thread.join(LONG)
    assert type(compiled.forward(model, 4, 4)) is StaticForward


def test_a_child_uses_again_what_threads_of_its_parent_were_using() -> None:
    drafts = DomainDrafts(
        models.build(num_hidden_layers=1), OnlineConfig(update_strategy="interval", max_draft_bytes=1)
    )
    for domain in "ab":
        assert drafts.admit(domain)
        drafts.updater(domain)
        drafts.promote(domain, *drafts.candidate(domain))
    copies, done = drafts._copies, [held_elsewhere(drafts.lease(domain)) for domain in "ab"]
    with drafts._lock:
        copies.reserve("a")  # and a thread that fills it
    assert drafts.num_serving == 3

    def serve() -> None:
        for domain in "abab":
            with drafts.lease(domain) as serving:
                assert serving.domain == domain
        assert drafts.num_serving == 1
        assert [serving.leases for serving in [copies.base, *copies.held]] == [0, 0]

    assert in_a_fork(serve) == 0
    with drafts.lease("a") as ours:
        child = os.fork()
        if child == 0:
            os._exit(int(any(serving.leases for serving in copies.held)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ours.leases == 1  # the other thread's
    for event in done:
        event.set()


def test_a_lease_that_the_forking_thread_holds_ends_in_the_child() -> None:
    drafts = DomainDrafts(
        models.build(num_hidden_layers=1), OnlineConfig(update_strategy="interval"), per_domain=False
    )
    with drafts.lease():
        child = os.fork()
    if child == 0:
        os._exit(0 if drafts._copies.base.leases == 0 and not drafts._copies.held else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert drafts._copies.base.leases == 0


# A process of its own, as torch's own threads do not live on in a fork.
CHILDREN = """
import faulthandler, json, os, signal, sys, threading, traceback
from dataclasses import replace
from pathlib import Path
import models
import test_faults
import torch
from osd_hf import OnlineAssistant
from osd_hf.learning.updater import Updater

LONG = 250
faulthandler.dump_traceback_later(2 * LONG, exit=True)
torch.set_num_threads(int(sys.argv[2]))
target, draft = models.pair()
alone = test_faults.answers(target.generate, range(6))
average = Updater._average

def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

def child(assistant, config, folder):
    faulthandler.register(signal.SIGALRM, chain=True)  # the parent's timer does not run here
    signal.alarm(LONG)
    Updater._average = average
    version = assistant.version
    said = {"same": test_faults.answers(assistant.generate, range(6)) == alone}
    assert assistant.wait_until_idle(LONG)
    said |= {"learned": assistant.version > version, "error": repr(assistant.learning_error)}
    before = names(folder / "session")
    assistant.close()
    said["left_alone"] = names(folder / "session") == before
    assistant.save_state(folder / "own")
    again = OnlineAssistant(target, draft, config=config)
    again.load_state(folder / "own")
    return said | {"goes_on": again.version == assistant.version}

def case(folder, strategy, is_learning):
    config = replace(test_faults.CONFIG, update_strategy=strategy, autosave_interval=1)
    assistant = OnlineAssistant(target, draft, config=config, autosave=folder / "session")
    reached, done = threading.Event(), threading.Event()

    def stopped(self):
        reached.set()
        done.wait(2 * LONG)
        average(self)

    def hold():
        with assistant._live._taking_in:
            reached.set()
            done.wait(2 * LONG)

    if is_learning:  # another thread is in the middle of a step, with what locks that takes
        Updater._average = stopped
        client = threading.Thread(target=lambda: test_faults.answers(assistant.generate, range(9)))
        if strategy == "idle":  # that thread is the learner's: it begins when all are answered, as none could pass it
            with assistant._live.request():
                client.start()
                client.join()
        else:
            client.start()
        assert reached.wait(LONG)
    else:
        test_faults.answers(assistant.generate, range(3))
        assistant._live.saving.join()
        client = threading.Thread(target=hold)  # another thread is about to count a request
        client.start()
        assert reached.wait(LONG)
    pid = os.fork()
    if pid == 0:
        try:
            print(json.dumps(child(assistant, config, folder)), flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    Updater._average = average
    done.set()
    client.join()
    same = test_faults.answers(assistant.generate, range(6)) == alone
    assert assistant.wait_until_idle(LONG)
    assistant.close()
    print(json.dumps({"same": same, "learned": assistant.version > 0}), flush=True)

for strategy in sys.argv[3:]:
    case(Path(sys.argv[1]) / strategy, strategy, strategy != "interval")
"""


@pytest.mark.parametrize(("threads", "strategies"), [(1, ["idle", "spread", "interval"]), (2, ["interval"])])
def test_a_forked_child_serves_and_learns_and_leaves_the_folder_to_its_parent(
    tmp_path: Path, threads: int, strategies: list[str]
) -> None:
    done = run_python(CHILDREN, str(tmp_path), str(threads), *strategies, timeout=900)
    assert done.returncode == 0, done.stderr
    parent = {"same": True, "learned": True}
    child = parent | {"error": "None", "left_alone": True, "goes_on": True}
    assert [json.loads(line) for line in done.stdout.splitlines()] == [child, parent] * len(strategies), done.stderr
