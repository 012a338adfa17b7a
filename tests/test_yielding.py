"""Learning stops in the middle of a step for requests that arrive, or have waited long enough, and goes on as if
nobody had come."""

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from waiting import LONG

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf import live_learning as live_module
from osd_hf.decoding.hook import record_traces
from osd_hf.learning import drafts as drafts_module
from osd_hf.learning import learner as learner_module
from osd_hf.learning import optimizer as optimizer_module
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.learner import Learner
from osd_hf.learning.optimizer import AdamW
from osd_hf.learning.updater import Updater
from osd_hf.live_learning import LiveLearning, Traffic
from osd_hf.target_version import fingerprint
from osd_hf.utils import yielding
from osd_hf.utils.yielding import clock, give_way, give_way_at, gives_way, giving_way, in_pieces

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it

IDLE = OnlineConfig(
    num_assistant_tokens=5, update_strategy="idle", update_interval=3, steps_per_update=1, batch_size=4,
    num_logprobs=8, gate=False,
)  # fmt: skip


# --- pieces ---------------------------------------------------------------------------------------------------------


def test_pieces_are_all_there_is_and_none_is_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielding, "PIECE", 10)
    shapes = [(3,), (2, 3), (), (7, 4), (2, 20), (1, 2, 2), (4, 2)]
    ones, twos = ([torch.rand(shape) for shape in shapes] for _ in range(2))
    stops: list[None] = []
    with giving_way(lambda: stops.append(None)):
        pieces = list(in_pieces(ones, twos))
    assert len(stops) == len(pieces)
    for left, right in pieces:
        assert [t.shape for t in left] == [t.shape for t in right]
        assert sum(t.numel() for t in left) <= 10 or [t.shape[0] for t in left] == [1]  # one row at least
    for side, whole in enumerate((ones, twos)):
        flat = torch.cat([t.flatten() for piece in pieces for t in piece[side]])
        assert torch.equal(flat, torch.cat([t.flatten() for t in whole]))
    for left, _ in pieces:
        for part in left:
            part.zero_()
    assert all(not t.any() for t in ones)  # parts are views


def test_adamw_in_pieces_steps_as_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yielding, "PIECE", 64)  # a vector of any machine's registers
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in [(40, 16), (5,), (3, 64), (8, 8)]]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    kinds: list[Any] = [AdamW, torch.optim.AdamW]
    pair = [kind(those, 1e-2, weight_decay=0.1, fused=True) for kind, those in zip(kinds, (ours, theirs), strict=True)]
    for _ in range(3):
        for p, twin in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            twin.grad = p.grad.clone()
        ours[1].grad = theirs[1].grad = None
        for optimizer in pair:
            optimizer.step()
    for p, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, twin, rtol=0, atol=models.rounding(4, magnitude=4.0))
    states = [optimizer.state_dict() for optimizer in pair]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=1e-6, atol=0)
    pair[0].load_state_dict(states[1])


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_gradients_are_clipped_as_torch_does(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    updater = Updater(models.build(num_hidden_layers=1), replace(IDLE, max_grad_norm=limit))
    monkeypatch.setattr(yielding, "PIECE", 500)
    for p in updater.parameters.values():
        p.grad = 0.01 * torch.randn_like(p)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in updater.parameters.values()]
    for p, twin in zip(updater.parameters.values(), twins, strict=True):
        twin.grad = p.grad.clone()
    torch.nn.utils.clip_grad_norm_(twins, limit)
    assert updater._clip()
    for p, twin in zip(updater.parameters.values(), twins, strict=True):
        torch.testing.assert_close(p.grad, twin.grad, rtol=1e-6, atol=0)
    next(iter(updater.parameters.values())).grad.view(-1)[0] = float("inf")
    assert not updater._clip()


# --- turns ----------------------------------------------------------------------------------------------------------


def test_others_are_let_in_where_a_thread_says_so_alone() -> None:
    stops: list[str] = []
    give_way()
    assert not gives_way()
    with giving_way(lambda: stops.append("a")):
        give_way()
        with giving_way(None):  # where others wait for the work
            give_way()
        thread = threading.Thread(target=give_way)
        thread.start()
        thread.join(LONG)
        states = torch.ones(2, requires_grad=True) * 1
        give_way_at(states)
        assert stops == ["a", "a"]
    states.sum().backward(retain_graph=True)  # also after the block
    assert stops == ["a"] * 3
    # As on an accelerator, whose one thread all backwards share: who waited there would keep others from theirs.
    thread = threading.Thread(target=states.sum().backward)
    thread.start()
    thread.join(LONG)
    assert stops == ["a"] * 3


def test_the_clock_stands_still_while_others_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(yielding.time, "perf_counter", lambda: now[0])

    def let_in() -> None:
        now[0] += 7

    assert clock() == 100
    with giving_way(let_in):
        give_way()
        now[0] += 1
        assert clock() == 101
    assert clock() == 108


class Work(TorchDispatchMode):
    """Counts the elements that operators read or write: all, and most between two stops."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.most = self.now = self.stops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not (func.is_view or "empty" in str(func)):
            size = sum(t.numel() for t in tree_leaves((args, kwargs, output)) if isinstance(t, torch.Tensor))
            self.now += size
            self.all += size
            self.most = max(self.most, self.now)
        return output

    def stop(self) -> None:
        self.now = 0
        self.stops += 1


@pytest.mark.parametrize("kind", ["whole", "adapters"])
def test_the_longest_stretch_without_a_stop_does_not_grow_with_the_draft(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yielding, "PIECE", 2048)
    monkeypatch.setattr(optimizer_module, "AT_ONCE", 2048)
    lora = LoraConfig(r=2, target_modules="all-linear") if kind == "adapters" else None
    config = replace(IDLE, gate=True, batch_size=2)
    prompts = [ids[0].tolist() for ids in models.prompts(16)]
    found = []
    for layers in (2, 6):
        target, draft = models.pair(num_hidden_layers=layers, vocab_size=128)
        learner = Learner(DomainDrafts(draft, config, peft_config=lora, per_domain=False), config)
        for trace in record_traces(target, prompts, max_new_tokens=3, num_logprobs=8):
            learner.observe(None, trace)
        work = Work()
        with giving_way(work.stop), work:
            report = learner.update()
        assert report.decision is not None
        assert report.decision.requests >= 4  # the gate has replayed both versions
        found.append(work)
    few, many = found
    assert many.all > 2 * few.all
    assert many.most <= 1.1 * few.most
    assert many.most < many.all / 30


def test_with_spread_replays_by_a_large_draft_alone_are_cut_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models.pair(num_hidden_layers=3)
    traces = list(record_traces(target, [[5, 6, 7], [8, 9]], max_new_tokens=3, num_logprobs=8))
    size = sum(p.numel() for p in draft.parameters())

    def cut(strategy: Any, piece: int) -> tuple[int, list[Any]]:
        monkeypatch.setattr(learner_module, "PIECE", piece)
        config = replace(IDLE, update_strategy=strategy)
        learner, found = Learner(DomainDrafts(draft, config, per_domain=False), config), list[None]()
        with giving_way(lambda: found.append(None)):
            scores = learner._replayed(learner.drafts.base, traces)
        return len(found), scores

    (small, alone), (large, same), (idle, _) = cut("spread", size), cut("spread", size - 1), cut("idle", size)
    assert large == idle >= small + 3
    assert alone == same


def test_others_are_let_in_around_the_copy_of_a_draft_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    _, draft = models.pair(num_hidden_layers=1)
    drafts, said, sharing = DomainDrafts(draft, IDLE, per_domain=False), list[str](), drafts_module.sharing
    monkeypatch.setattr(drafts_module, "sharing", lambda model: said.append("copy") or sharing(model))
    with giving_way(lambda: said.append("stop")):
        drafts.tried(drafts.base)
        drafts.tried(drafts.base)  # the same once more
    assert said == ["stop", "copy", "stop"]


# --- requests that arrive in the middle of a step -------------------------------------------------------------------


def ask(generate: Any, number: int, **settings: Any) -> list[int]:
    ids = models.prompts(9)[number % 9]
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    return generate(ids, **kwargs, **settings)[0, ids.shape[1] :].tolist()


@contextmanager
def visited(visit: Callable[[int], threading.Thread | None]) -> Iterator[None]:
    """At each stop of an idle thread, its number is told, and the request of the thread returned has come first."""
    numbers, give, wait_for = itertools.count(), LiveLearning._give_way, threading.Condition.wait_for

    def given(live: LiveLearning) -> None:
        thread, arrived = visit(next(numbers)), threading.Event()
        if thread is not None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Traffic, "arrived", arrived, raising=False)
                thread.start()
                assert arrived.wait(LONG)
        give(live)

    def told(traffic_changed: threading.Condition, predicate: Any, timeout: float | None = None) -> Any:
        if threading.current_thread().name.startswith("visitor") and (event := getattr(Traffic, "arrived", None)):
            event.set()
        return wait_for(traffic_changed, predicate, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveLearning, "_give_way", given)
        patch.setattr(threading.Condition, "wait_for", told)
        yield


@pytest.mark.parametrize("peft_config", [None, LoraConfig(r=2, target_modules=["q_proj"])])
def test_requests_in_the_middle_of_steps_get_their_answers_and_change_nothing_that_is_learned(
    peft_config: Any,
) -> None:
    target, draft = models.pair(num_hidden_layers=1)
    alone = [ask(target.generate, number) for number in range(9)]

    def learned(every: int) -> tuple[dict[str, torch.Tensor], int]:
        answers: dict[int, list[int]] = {}
        visitors: list[threading.Thread] = []

        def visit(stop: int) -> threading.Thread | None:
            if stop % every:
                return None

            def request() -> None:
                answers[stop] = ask(assistant.generate, stop, learn=False)

            visitors.append(threading.Thread(target=request, name=f"visitor {stop}"))
            return visitors[-1]

        with visited(visit), OnlineAssistant(target, draft, config=IDLE, peft_config=peft_config) as assistant:
            for version in (1, 2):  # the second one is written where the first one serves
                assistant.pause()
                for number in range(3):
                    assert ask(assistant.generate, number) == alone[number]
                assistant.resume()
                assert assistant.wait_until_idle(LONG)
                assert assistant.version == version
            for thread in visitors:
                thread.join(LONG)
            assert answers == {stop: alone[stop % 9] for stop in answers}
            assert assistant.learning_error is None
            return {name: p.clone() for name, p in assistant.draft.named_parameters()}, len(answers)

    undisturbed, none = learned(1 << 30)
    disturbed, many = learned(5)
    assert none <= 1
    assert many > 10
    assert all(torch.equal(disturbed[name], p) for name, p in undisturbed.items())


@pytest.mark.parametrize("what", ["close", "save", "update", "pause", "fail"])
def test_what_needs_the_learner_does_not_wait_for_the_request_that_it_waits_for(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models.pair(num_hidden_layers=1)
    inside, may_leave, answers = threading.Event(), threading.Event(), list[list[int]]()

    class Stays:
        def put(self, value: torch.Tensor) -> None:
            inside.set()
            assert may_leave.wait(LONG)

        def end(self) -> None:
            pass

    def request() -> None:
        answers.append(ask(assistant.generate, 5, learn=False, streamer=Stays()))

    visitor = threading.Thread(target=request, name="visitor")
    with visited(lambda stop: visitor if stop == 5 else None):  # in the middle of the first micro-batch
        assistant = OnlineAssistant(target, draft, config=IDLE)
        assistant.pause()
        for number in range(3):
            ask(assistant.generate, number)
        assistant.resume()
        assert inside.wait(LONG)
        traffic = assistant._live.traffic
        assert traffic.is_stepping
        assert traffic.gives_way
        if what == "close":
            assistant.close()
        elif what == "save":
            assistant.save_state(tmp_path / "session")
        elif what == "update":
            assert assistant.update().steps == 1  # after what is left of the one under way
        elif what == "pause":
            assistant.pause()
        else:
            monkeypatch.setattr(Updater, "_average", lambda *_: 1 / 0)  # when the step goes on
        assert visitor.is_alive()
        may_leave.set()
        visitor.join(LONG)
        assert answers == [ask(target.generate, 5)]
        if what != "close":
            assert assistant.wait_until_idle(LONG)
            assert assistant.version == {"save": 1, "update": 2, "pause": 0, "fail": 0}[what]
            assert isinstance(assistant.learning_error, ZeroDivisionError) == (what == "fail")
            monkeypatch.undo()
            assistant.resume()
            assert assistant.wait_until_idle(LONG)
            assert what != "pause" or assistant.version == 1
            assert what != "fail" or assistant.update().version == 1
            assert not traffic.gives_way
            assistant.close()


def test_a_target_that_changes_while_a_step_has_given_way_begins_a_new_lesson() -> None:
    target, draft = models.pair(num_hidden_layers=1)

    def request() -> None:
        with torch.no_grad():
            target.lm_head.weight *= 1.5
        ask(assistant.generate, 5)

    visitor = threading.Thread(target=request, name="visitor")
    with (
        visited(lambda stop: visitor if stop == 5 else None),
        OnlineAssistant(target, draft, config=IDLE) as assistant,
    ):
        assistant.pause()
        for number in range(3):
            ask(assistant.generate, number)
        assistant.resume()
        assert assistant.wait_until_idle(LONG)
        visitor.join(LONG)
        assert assistant.wait_until_idle(LONG)
        lesson = assistant.drafts.lessons[None]
        assert [trace.target for trace in (*lesson.pending, *lesson.buffer)] == [fingerprint(target)]
        assert lesson.older == 3
        assert assistant.learning_error is None


# --- parts that take longer than an answer may wait -----------------------------------------------------------------

SPREAD = replace(IDLE, update_strategy="spread", steps_per_update=2)


class Stops:
    """A clock that counts the stopping places that a learner has come to, in place of the seconds of an live."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: dict[float, Callable[[], object]] = {}  # what is done at a stop


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Stops:
    counted, give = Stops(), LiveLearning._give_way

    def given(live: LiveLearning) -> None:
        counted.now += 1
        counted.at.get(counted.now, lambda: None)()
        give(live)

    monkeypatch.setattr(LiveLearning, "_give_way", given)
    monkeypatch.setattr(live_module, "time", SimpleNamespace(perf_counter=lambda: counted.now))
    monkeypatch.setattr(live_module, "clock", lambda: counted.now)
    return counted


def until_learned(assistant: OnlineAssistant, stops: Stops, version: int = 1) -> list[float]:
    """Ask until this version serves, each time with the target's answer; the stops that each answer has waited for."""
    waits: list[float] = []
    while assistant.version < version:
        before = stops.now
        assert ask(assistant.generate, len(waits)) == ask(assistant.target.generate, len(waits))
        waits.append(stops.now - before)
        assert len(waits) < 200
    return waits


def test_a_part_goes_on_after_later_answers_where_one_would_wait_too_long_and_learns_the_same(
    stops: Stops, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models.pair(num_hidden_layers=1)
    learned, waited = [], []
    for most in (1000, 70, 7):
        monkeypatch.setattr(live_module, "LEAST_SHARE_SECONDS", most)
        with OnlineAssistant(target, draft, config=SPREAD) as assistant:
            waited.append(until_learned(assistant, stops))
            learned.append([p.clone() for p in assistant.draft.parameters()])
    whole, fitting, cut = waited
    assert len(whole) < 9
    # Each part is short enough: all is as if there were no bound, however long they take together.
    assert fitting == whole
    assert max(whole) > 70
    assert sorted(set(cut), reverse=True)[:2] == [9, 7]  # the first came to two stops before a part that was too long
    assert cut.count(9) == 1
    assert sum(cut) == sum(whole)
    for others in learned[1:]:
        assert all(map(torch.equal, others, learned[0]))


def test_what_held_a_machine_up_once_is_forgotten_after_an_update_without_it(
    stops: Stops, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models.pair(num_hidden_layers=1)

    def held_up() -> None:
        stops.now += 1000

    def waits(most: int, updates: int) -> list[list[float]]:
        stops.now = 0.0
        monkeypatch.setattr(live_module, "LEAST_SHARE_SECONDS", most)
        with OnlineAssistant(target, draft, config=SPREAD) as assistant:
            return [until_learned(assistant, stops, version) for version in range(1, updates + 1)]

    usual = waits(70, 5)
    assert min(map(max, usual)) > 70  # many parts, none of which is long
    # There is a long one in each update; the first answer that waits for one comes to two stops before it.
    assert [max(found) for found in waits(7, 2)] == [9, 7]
    stops.at[5] = held_up
    _, bounded, *others = waits(70, 5)
    assert max(bounded) == 70
    assert min(map(max, others)) > 70
    assert others[-1] == usual[-1]  # after the same requests again


def test_an_answer_waits_as_long_as_it_took_or_a_share_of_that(stops: Stops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "LEAST_SHARE_SECONDS", 4)
    target, draft = models.pair(num_hidden_layers=1)

    class Slow:
        def put(self, value: torch.Tensor) -> None:
            pass

        def end(self) -> None:
            stops.now += 10

    def longest(duty: float) -> float:
        config = replace(SPREAD, max_duty_cycle=duty)
        with OnlineAssistant(target, draft, config=config) as assistant:
            monkeypatch.setattr(assistant._learner.duty_cycle, "rest_seconds", lambda: 0.0)
            for number in range(6):  # the last one goes on with what the one before has begun
                before = stops.now
                ask(assistant.generate, number, streamer=Slow())
            return stops.now - before - 10

    assert (longest(1.0), longest(0.6), longest(0.1)) == (10, 6, 4)


@pytest.mark.parametrize("what", ["close", "save", "update", "pause", "fail", "target", "forget"])
def test_who_needs_the_learner_has_a_part_that_was_stopped_finished(
    what: str, stops: Stops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "LEAST_SHARE_SECONDS", 7)
    target, draft = models.pair(num_hidden_layers=1)
    assistant = OnlineAssistant(target, draft, config=SPREAD)
    for number in range(5):
        ask(assistant.generate, number)
    live, thread, before = assistant._live, assistant._live._sharing, stops.now
    assert thread is not None
    with live.traffic.changed:  # it is in the middle of the first micro-batch
        assert live.traffic.changed.wait_for(lambda: live.traffic.gives_way, LONG)
    if what == "close":
        assistant.close()
    elif what == "save":
        assistant.save_state(tmp_path / "session")
    elif what == "update":
        assert assistant.update().steps == 2  # after what is left of the one under way
    elif what == "target":
        assistant.target_changed()
        assert not assistant.drafts.lessons[None].buffer
    elif what == "fail":
        monkeypatch.setattr(Updater, "_average", lambda *_: 1 / 0)
        for number in range(60):
            assert ask(assistant.generate, number) == ask(target.generate, number)
    elif what == "pause":
        assistant.pause()
        ask(assistant.generate, 4)
        assert live._sharing is thread
        assert stops.now == before
        assistant.resume()
    else:
        del assistant
        gc.collect()
    assert not (thread.is_alive() and what in ("close", "forget"))
    if what not in ("fail", "pause"):
        thread.join(LONG)
        assert not thread.is_alive()
        assert stops.now > before
    if what in ("close", "forget"):
        return
    assert isinstance(assistant.learning_error, ZeroDivisionError) == (what == "fail")
    monkeypatch.undo()
    assistant.resume()
    assert assistant.version == (2 if what == "update" else 0)
    for number in range(9):
        ask(assistant.generate, number)
    assert assistant.version > (2 if what == "update" else 0)
    assert assistant.learning_error is None
    assistant.close()


def test_an_answer_does_not_wait_for_the_share_of_another(stops: Stops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "LEAST_SHARE_SECONDS", 1000)
    target, draft = models.pair(num_hidden_layers=1)
    answers: list[list[int]] = []
    visitor = threading.Thread(target=lambda: answers.append(ask(assistant.generate, 5)))

    def visit() -> None:
        visitor.start()
        visitor.join(LONG)
        assert not visitor.is_alive()

    stops.at[5] = visit
    with OnlineAssistant(target, draft, config=SPREAD) as assistant:
        until_learned(assistant, stops)
        assert answers == [ask(target.generate, 5)]
        assert assistant.learning_error is None


def test_where_no_thread_can_begin_answers_come_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models.pair(num_hidden_layers=1)

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with OnlineAssistant(target, draft, config=SPREAD) as assistant:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            for number in range(4):
                assert ask(assistant.generate, number) == ask(target.generate, number)
        assert isinstance(assistant.learning_error, RuntimeError)
        assert assistant.version == 0
        for number in range(9):
            ask(assistant.generate, number)
        assert assistant.version > 0
        assert assistant.learning_error is None
