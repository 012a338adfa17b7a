"""One target, many threads and tasks: who listens comes and goes, models are copied and pickled, answers stay."""

from __future__ import annotations

import contextvars
import copy
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import models
import pytest
import torch
from transformers import GenerationMixin

from osd_hf import OnlineAssistant, OnlineConfig, capture_traces
from osd_hf.trace import Trace

LONG = 120  # seconds; only ends a test that hangs

MANUAL = OnlineConfig(update_strategy="manual", num_assistant_tokens=5)


def ask(generate: Callable[..., Any], ids: torch.Tensor, **kwargs: Any) -> list[int]:
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8, **kwargs}
    answer: list[int] = generate(ids, **settings)[0].tolist()
    return answer


class Thread:
    """A thread whose error is raised where it is joined; in a copy of the context where one is inherited."""

    def __init__(self, work: Callable[[], Any], *, inherits: bool = False) -> None:
        self.outcome: Any = None
        self.error: BaseException | None = None
        run = contextvars.copy_context().run if inherits else contextvars.Context().run
        self.thread = threading.Thread(target=run, args=(self._run, work), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.outcome = work()
        except BaseException as error:  # noqa: BLE001  # raised by `join`
            self.error = error

    def join(self) -> Any:
        self.thread.join(LONG)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.outcome


class Gate:
    """A streamer that stops a request where it has been given so many pieces, until it is let on."""

    def __init__(self, piece: int) -> None:
        self.piece = piece
        self.pieces = 0
        self.reached = threading.Event()
        self.opened = threading.Event()

    def put(self, value: torch.Tensor) -> None:
        self.pieces += 1
        if self.pieces == self.piece:
            self.reached.set()
            assert self.opened.wait(LONG)

    def end(self) -> None:
        pass

    @contextmanager
    def held(self, thread: Thread) -> Iterator[None]:
        """Inside, the request of that thread stands at the gate; it is let on at the end."""
        assert self.reached.wait(LONG) or thread.join()
        try:
            yield
        finally:
            self.opened.set()


PROMPT_SEEN, FIRST_ROUND_DONE = 1, 2  # pieces that `generate` hands to a streamer

LISTENERS = ["capture", "attached"]


def listening(kind: str, assistant: OnlineAssistant, sink: Callable[[Trace], object]) -> AbstractContextManager[Any]:
    return capture_traces(assistant.target, sink) if kind == "capture" else assistant.attached()


def heard(kind: str, assistant: OnlineAssistant, traces: list[Trace]) -> int:
    """Requests that the listener has been told of."""
    return len(traces) if kind == "capture" else assistant.stats.num_requests


# --- threads that are not bound -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LISTENERS)
@pytest.mark.parametrize("piece", [PROMPT_SEEN, FIRST_ROUND_DONE])
def test_an_unbound_request_goes_on_when_the_last_listener_leaves(kind: str, piece: int) -> None:
    assistant = OnlineAssistant(*models.pair(), config=MANUAL)
    target, ids, gate = assistant.target, models.prompt(), Gate(piece)
    own = ask(target.generate, ids)
    traces: list[Trace] = []
    with ExitStack() as stack:
        stack.enter_context(listening(kind, assistant, traces.append))
        thread = Thread(lambda: ask(target.generate, ids, assistant_model=assistant.draft, streamer=gate))
        with gate.held(thread):
            stack.close()
        assert thread.join() == own
    assert heard(kind, assistant, traces) == 0


@pytest.mark.parametrize("kind", LISTENERS)
@pytest.mark.parametrize("piece", [PROMPT_SEEN, FIRST_ROUND_DONE])
def test_an_unbound_request_goes_on_when_a_listener_comes(kind: str, piece: int) -> None:
    assistant = OnlineAssistant(*models.pair(), config=MANUAL)
    target, ids, gate = assistant.target, models.prompt(), Gate(piece)
    own = ask(target.generate, ids)
    traces: list[Trace] = []
    thread = Thread(lambda: ask(target.generate, ids, assistant_model=assistant.draft, streamer=gate))
    with ExitStack() as stack:
        with gate.held(thread):
            stack.enter_context(listening(kind, assistant, traces.append))
            assert ask(target.generate, ids, assistant_model=assistant.draft) == own
        assert thread.join() == own
    assert heard(kind, assistant, traces) == 1


# --- who outlives a block -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LISTENERS)
@pytest.mark.parametrize("others_listen", [False, True])
@pytest.mark.parametrize("piece", [PROMPT_SEEN, FIRST_ROUND_DONE])
def test_a_thread_that_outlives_the_block_is_answered_and_not_heard(
    kind: str, others_listen: bool, piece: int
) -> None:
    assistant = OnlineAssistant(*models.pair(), config=MANUAL)
    target, ids, gate = assistant.target, models.prompt(), Gate(piece)
    own = ask(target.generate, ids)
    traces: list[Trace] = []

    def serve() -> list[list[int]]:
        draft = assistant.draft
        return [ask(target.generate, ids, assistant_model=draft, **s) for s in ({}, {"streamer": gate}, {})]

    with ExitStack() as stack:
        if others_listen:
            stack.enter_context(capture_traces(target, lambda trace: None))
        with listening(kind, assistant, traces.append):
            thread = Thread(serve, inherits=True)
            assert gate.reached.wait(LONG)
        with gate.held(thread):
            assert heard(kind, assistant, traces) == 1
        assert thread.join() == [own] * 3
    assert heard(kind, assistant, traces) == 1


def test_an_inner_block_that_has_ended_does_not_hide_the_outer_one() -> None:
    assistant = OnlineAssistant(*models.pair(), config=MANUAL)
    target, ids = assistant.target, models.prompt()
    ready = threading.Event()

    def serve() -> list[int]:
        assert ready.wait(LONG)
        return ask(target.generate, ids, assistant_model=assistant.draft)

    with assistant.attached(domain="outer"):
        with assistant.attached(domain="inner"):
            thread = Thread(serve, inherits=True)
        ready.set()
        assert thread.join() == ask(target.generate, ids)
    assert set(assistant.stats_by_domain) == {"outer"}


@pytest.mark.parametrize("call", ["generate", "attached"])
def test_requests_under_way_when_an_assistant_is_closed_are_answered_and_not_learned_from(
    call: str, tmp_path: Any
) -> None:
    assistant = OnlineAssistant(*models.pair(), config=MANUAL, store=tmp_path)
    target, ids, gate = assistant.target, models.prompt(), Gate(FIRST_ROUND_DONE)
    own = ask(target.generate, ids)
    streamed: dict[str, Any] = {"streamer": gate}

    def serve() -> list[list[int]]:
        if call == "generate":
            return [ask(assistant.generate, ids, **s) for s in ({}, streamed, {})]
        with assistant.attached():
            return [ask(target.generate, ids, assistant_model=assistant.draft, **s) for s in ({}, streamed, {})]

    thread = Thread(serve)
    with gate.held(thread):
        assistant.close()
        learned = [len(assistant.store or ()), assistant._learner.requests[None].requests_waiting]
        assert learned == [1, 1]
    assert thread.join() == [own] * 3
    with assistant.attached():
        assert ask(target.generate, ids, assistant_model=assistant.draft) == own
    assert [len(assistant.store or ()), assistant._learner.requests[None].requests_waiting] == learned


# --- coming and leaving ---------------------------------------------------------------------------------------------


def test_blocks_may_be_left_in_another_order_than_entered() -> None:
    target, draft = models.pair()
    cls, loop = type(target), GenerationMixin._assisted_decoding
    ids = models.prompt()
    sinks: list[list[Trace]] = [[], [], []]
    blocks = [capture_traces(target, sink.append) for sink in sinks]
    for block in blocks:
        block.__enter__()
    for left, expected in ((None, [1, 1, 1]), (0, [1, 2, 2]), (2, [1, 3, 2]), (1, [1, 3, 2])):
        if left is not None:
            blocks[left].__exit__(None, None, None)
        ask(target.generate, ids, assistant_model=draft)
        assert [len(sink) for sink in sinks] == expected
    assert type(target) is cls
    assert GenerationMixin._assisted_decoding is loop


# --- all at once ----------------------------------------------------------------------------------------------------


def storm(threads: int, requests: int, *, architecture: str = "llama", new_tokens: int = 6) -> dict[str, int]:
    """
    Serve `requests` requests from `threads` threads on one target: captured, attached, through the assistant and with
    nobody listening, with deep copies and pickles of the target in between. Asserts that every answer is the target's
    own and that nothing of a listener is left on the target; returns what was done, how often.
    """
    target, draft = models.pair(architecture)
    cls, loop, attributes = type(target), GenerationMixin._assisted_decoding, set(vars(target))
    assistant = OnlineAssistant(target, draft, config=MANUAL)
    prompts = models.prompts(12)
    own = [ask(target.generate, ids, max_new_tokens=new_tokens) for ids in prompts]
    done: list[str] = []
    delivered: list[tuple[str, int]] = []
    begin = threading.Barrier(threads)

    def serve(worker: int) -> None:
        chance = random.Random(worker)
        mine = copy.deepcopy(draft)
        begin.wait(LONG)
        for number in range(worker, requests, threads):
            pick = number % len(prompts)
            ids, traces = prompts[pick], list[Trace]()
            settings: dict[str, Any] = {"max_new_tokens": new_tokens}
            kind = chance.choice(["captured", "attached", "assistant", "both", "unbound", "alone"])
            if kind == "captured":
                with capture_traces(target, traces.append):
                    answer = ask(target.generate, ids, assistant_model=mine, **settings)
            elif kind == "attached":
                with assistant.attached():
                    answer = ask(target.generate, ids, assistant_model=assistant.draft, **settings)
            elif kind == "assistant":
                answer = ask(assistant.generate, ids, **settings)
            elif kind == "both":
                with capture_traces(target, traces.append):
                    answer = ask(assistant.generate, ids, **settings)
            elif kind == "unbound":
                answer = ask(target.generate, ids, assistant_model=mine, **settings)
            else:
                answer = ask(target.generate, ids, **settings)
            assert answer == own[pick], kind
            assert len(traces) == (kind in ("captured", "both"))
            for trace in traces:
                assert trace.completion_ids.tolist() == own[pick][-new_tokens:]
            done.append(kind)
            delivered.extend((kind, len(t)) for t in traces)
            if number % 5 == 0:
                other = copy.deepcopy(target) if chance.random() < 0.5 else pickle.loads(pickle.dumps(target))
                assert type(other) is cls
                with capture_traces(other, traces.append):
                    assert ask(other.generate, ids, assistant_model=mine, **settings) == own[pick]
                done.append("copied")

    started = [Thread(lambda worker=worker: serve(worker)) for worker in range(threads)]  # type: ignore[misc]
    for thread in started:
        thread.join()
    assert type(target) is cls
    assert set(vars(target)) == attributes
    assert GenerationMixin._assisted_decoding is loop
    counts = {kind: done.count(kind) for kind in sorted(set(done))}
    assert sum(counts.values()) - counts["copied"] == requests
    assert assistant.stats.num_requests == counts["attached"] + counts["assistant"] + counts["both"]
    return counts


def test_eight_threads_on_one_target_bound_and_unbound_get_the_targets_answers() -> None:
    print(storm(threads=8, requests=48))
