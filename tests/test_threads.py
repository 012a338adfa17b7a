"""One target, many threads and tasks: who listens comes and goes, models are copied and pickled, answers stay."""

from __future__ import annotations

import contextvars
import copy
import functools
import pickle
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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


POOL = ThreadPoolExecutor(16)


def in_thread(work: Callable[[], Any], *, inherits: bool = False) -> Future[Any]:
    """Run a function in another thread, with a copy of this thread's context where one is inherited."""
    run = contextvars.copy_context().run if inherits else contextvars.Context().run
    return POOL.submit(run, work)


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
    def held(self, thread: Future[Any]) -> Iterator[None]:
        """Inside, the request of that thread stands at the gate; it is let on at the end."""
        assert self.reached.wait(LONG) or thread.result(LONG)
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


@pytest.mark.parametrize("kind", LISTENERS)
@pytest.mark.parametrize("piece", [PROMPT_SEEN, FIRST_ROUND_DONE])
@pytest.mark.parametrize("leaves", [True, False])
def test_an_unbound_request_goes_on_when_a_listener_leaves_or_comes(kind: str, piece: int, leaves: bool) -> None:
    assistant = OnlineAssistant(*models.pair(), config=MANUAL)
    target, ids, gate = assistant.target, models.prompt(), Gate(piece)
    own = ask(target.generate, ids)
    traces: list[Trace] = []
    with ExitStack() as stack:
        if leaves:
            stack.enter_context(listening(kind, assistant, traces.append))
        thread = in_thread(lambda: ask(target.generate, ids, assistant_model=assistant.draft, streamer=gate))
        with gate.held(thread):
            if leaves:
                stack.close()
            else:
                stack.enter_context(listening(kind, assistant, traces.append))
                assert ask(target.generate, ids, assistant_model=assistant.draft) == own
        assert thread.result(LONG) == own
    assert heard(kind, assistant, traces) == (not leaves)


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
            thread = in_thread(serve, inherits=True)
            assert gate.reached.wait(LONG)
        with gate.held(thread):
            assert heard(kind, assistant, traces) == 1
        assert thread.result(LONG) == [own] * 3
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
            thread = in_thread(serve, inherits=True)
        ready.set()
        assert thread.result(LONG) == ask(target.generate, ids)
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

    thread = in_thread(serve)
    with gate.held(thread):
        assistant.close()
        assert len(assistant.store or ()) == 1
    assert thread.result(LONG) == [own] * 3
    with assistant.attached():
        assert ask(target.generate, ids, assistant_model=assistant.draft) == own
    assert len(assistant.store or ()) == 1


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


def test_eight_threads_on_one_target_bound_and_unbound_get_the_targets_answers() -> None:
    """Requests are captured, attached, through the assistant, and with nobody listening, with copies of the target in
    between. Nothing of a listener is left on the target."""
    threads, requests, new_tokens = 8, 48, 6
    target, draft = models.pair()
    cls, loop, attributes = type(target), GenerationMixin._assisted_decoding, set(vars(target))
    assistant = OnlineAssistant(target, draft, config=OnlineConfig(update_strategy="manual"))  # past text as well
    prompts = models.prompts(12)
    own = [ask(target.generate, ids, max_new_tokens=new_tokens) for ids in prompts]
    done, begin = Counter[str](), threading.Barrier(threads)

    def serve(worker: int) -> None:
        chance = random.Random(worker)
        mine = copy.deepcopy(draft)
        begin.wait(LONG)
        for number in range(worker, requests, threads):
            pick = number % len(prompts)
            ids, traces, settings = prompts[pick], list[Trace](), {"max_new_tokens": new_tokens}
            kind = chance.choice(["captured", "attached", "assistant", "both", "unbound", "alone"])
            generate = assistant.generate if kind in ("assistant", "both") else target.generate
            drafts = {"captured": mine, "unbound": mine, "attached": assistant.draft}
            own_draft = {"assistant_model": drafts[kind]} if kind in drafts else {}
            with ExitStack() as stack:
                if kind in ("captured", "both"):
                    stack.enter_context(capture_traces(target, traces.append))
                elif kind == "attached":
                    stack.enter_context(assistant.attached())
                answer = ask(generate, ids, **settings, **own_draft)
            assert answer == own[pick], kind
            assert len(traces) == (kind in ("captured", "both"))
            for trace in traces:
                assert trace.completion_ids.tolist() == own[pick][-new_tokens:]
            done[kind] += 1
            if number % 5 == 0:
                other = copy.deepcopy(target) if chance.random() < 0.5 else pickle.loads(pickle.dumps(target))
                assert type(other) is cls
                with capture_traces(other, traces.append):
                    assert ask(other.generate, ids, assistant_model=mine, **settings) == own[pick]
                done["copied"] += 1

    for thread in [in_thread(functools.partial(serve, worker)) for worker in range(threads)]:
        thread.result(LONG)
    assert type(target) is cls
    assert set(vars(target)) == attributes
    assert GenerationMixin._assisted_decoding is loop
    assert done.total() - done["copied"] == requests
    assert assistant.stats.num_requests == done["attached"] + done["assistant"] + done["both"]
