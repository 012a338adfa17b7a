"""The app's service on a tiny pair: answers, visitors beside each other, workspaces, and what goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import LONG

from osd_hf import CorrectionStore, OnlineAssistant
from osd_hf.bundled import DOMAINS
from osd_hf.errors import ConfigError, HubError, StateError
from osd_hf.loading import load_pair
from osd_hf.utils.streaming import Pieces
from osd_hf_app import service as service_module
from osd_hf_app import sessions as sessions_module
from osd_hf_app.page import build
from osd_hf_app.pair import ServedPair
from osd_hf_app.service import MAX_CHARACTERS, Service
from osd_hf_app.sessions import AUTOMATIC, Answer, Session, Settings
from osd_hf_app.sharing import FairQueue

SHORT = Settings(domain="sql", max_new_tokens=16)
MANUAL = {"update_strategy": "manual", "gate": False, "batch_size": 2, "optimizer": "adamw"}


@pytest.fixture(scope="module")
def pair(pair: Path) -> ServedPair:
    names = str(pair / "target"), str(pair / "draft")
    pair = ServedPair(load_pair(*names), *names)
    pair.domains = DOMAINS  # as the bundled pair
    return pair


@pytest.fixture
def service(pair: ServedPair) -> Iterator[Service]:
    made = Service(pair, config=MANUAL, threads=1)
    yield made
    made.sessions.close()


def until(session: Session, holds: Callable[[], bool]) -> None:
    with session.changed:
        assert session.changed.wait_for(holds, LONG)


def ended(session: Session) -> None:
    until(session, lambda: session.job is None)


def asked(service: Service, session: Session, prompt: str, settings: Settings = SHORT) -> Answer:
    answer = service.ask(session, prompt, settings)
    ended(session)
    return answer


def told(session: Session, react: Callable[[], None]) -> None:
    """Let something happen in the thread that answers, whenever the chat has news."""
    touch = session.touch

    def touched(**news: bool) -> None:
        react()
        touch(**news)

    session.touch = touched  # type: ignore[method-assign]


@contextmanager
def watched(session: Session) -> Iterator[None]:
    """As a page that is open."""
    frames = session.frames()
    next(frames)
    yield
    frames.close()  # type: ignore[attr-defined]


def targets_own(pair: ServedPair, prompt: str, settings: Settings = SHORT) -> list[int]:
    ids = pair.encode(prompt, settings.max_new_tokens)
    output = pair.target.generate(ids, attention_mask=torch.ones_like(ids), **settings.generate_kwargs)
    return list(output[0, ids.shape[1] :].tolist())


def texts(pair: ServedPair, prompt: str, settings: Settings = SHORT) -> list[str]:
    """The pieces of the target's own answer."""
    pieces = Pieces(pair.tokenizer)
    pieces.push(targets_own(pair, prompt, settings))
    return pieces.texts


def generate_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of all following calls of `generate`, with their output."""
    calls: list[dict[str, Any]] = []
    generate = OnlineAssistant.generate

    def spied(self: OnlineAssistant, *args: Any, **kwargs: Any) -> Any:
        output = generate(self, *args, **kwargs)
        calls.append({**kwargs, "output": output[0].tolist()})
        return output

    monkeypatch.setattr(OnlineAssistant, "generate", spied)
    return calls


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", ["1", "5", "auto"])
def test_a_greedy_answer_is_the_targets_own(
    service: Service, pair: ServedPair, k: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = generate_calls(monkeypatch)
    settings = Settings(domain="sql", max_new_tokens=40, k=k)
    answer = asked(service, service.sessions.open(None), "one two", settings)
    own = targets_own(pair, "one two", settings)
    assert len(own) > 10
    assert [call["output"] for call in calls] == [pair.encode("one two", 40)[0].tolist() + own]
    assert [token.text for token in answer.tokens] == texts(pair, "one two", settings)
    assert (answer.is_done, answer.error, answer.stop.is_set()) == (True, None, False)
    assert answer.stats is not None
    assert answer.stats.emitted == len(own)
    assert answer.seconds > 0
    counted = Counter(token.origin for token in answer.tokens)
    assert set(counted) <= {"accepted", "corrected", "bonus", "plain"}
    assert counted["accepted"] == answer.stats.accepted
    assert all((token.drafted is not None) == (token.origin == "corrected") for token in answer.tokens)


def test_first_tokens_and_the_end_are_shown_at_once_and_what_is_between_now_and_then(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "FRAME_SECONDS", 10 * LONG)
    monkeypatch.setattr(sessions_module, "LOOK_SECONDS", 10 * LONG)
    session, shown, drawn = service.sessions.guest(), [], threading.Semaphore(0)
    session.job = Answer("one", Settings())

    def watch() -> None:
        for _ in session.frames():
            shown.append(session.revision)
            drawn.release()

    thread = threading.Thread(target=watch)
    thread.start()
    assert drawn.acquire(timeout=LONG)
    for _ in range(3):
        session.touch()
    session.touch(is_urgent=True)
    assert drawn.acquire(timeout=LONG)
    for _ in range(3):
        session.touch()
    session.job = None
    session.touch()
    thread.join(LONG)
    assert shown == [0, 4, 8]


def test_a_checked_answer_is_compared_with_the_target_alone(service: Service) -> None:
    session = service.sessions.open(None)
    checked = asked(service, session, "one", Settings(domain="sql", max_new_tokens=16, check=True))
    assert (checked.is_identical, checked.is_measured) == (True, True)
    assert checked.alone_seconds is not None
    assert checked.alone_seconds > 0
    estimated = asked(service, session, "two")
    assert (estimated.is_identical, estimated.is_measured) == (None, False)
    assert estimated.alone_seconds is not None
    sampled = asked(service, session, "three", Settings("sql", check=True, do_sample=True, max_new_tokens=16))
    assert (sampled.is_identical, sampled.is_measured) == (None, True)


def test_with_learning_off_only_counts_are_kept_and_with_it_on_both_drafts_are_compared(
    service: Service, tmp_path: Path
) -> None:
    session, workspace = service.sessions.open(None), service.sessions.shared
    assistant = workspace.assistant
    assistant.store = CorrectionStore(tmp_path / "store")
    asked(service, session, "one", Settings(domain="sql", max_new_tokens=16, learn=False))
    assert assistant.drafts.domains == ()
    assert len(assistant.store) == 0
    asked(service, session, "one")
    assert assistant.drafts.domains == ("sql",)
    assert len(assistant.store) == 1
    assistant.update(2, domain="sql")
    assert asked(service, session, "one").version == 1
    assert [(record.domain, record.version) for record in workspace.records] == [("sql", 0), ("sql", 0), ("sql", 1)]
    first = workspace.records[0]
    assert first.learning.accepted == first.frozen.accepted  # nothing had been learned


def test_a_stopped_answer_ends_early_and_costs_nothing_in_the_line(service: Service, pair: ServedPair) -> None:
    settings = Settings(domain="sql", max_new_tokens=100, check=True)
    session = service.sessions.open(None)

    def stop_soon() -> None:
        answer = session.entries[-1]
        if isinstance(answer, Answer) and len(answer.tokens) >= 8:
            answer.stop.set()

    with service.queue.slot():
        waiting = service.ask(session, "one", settings)
        until(session, lambda: waiting.position == 1)
        waiting.stop.set()
    ended(session)
    assert waiting.tokens == []
    assert service.sessions.shared.count == 0
    told(session, stop_soon)
    answer = asked(service, session, "one", settings)
    own = texts(pair, "one", settings)
    assert answer.is_done
    assert 8 <= len(answer.tokens) <= 8 + 2 * (32 + 1)
    assert len(answer.tokens) < len(own)
    assert [token.text for token in answer.tokens] == own[: len(answer.tokens)]
    assert not answer.is_measured
    assert service.sessions.shared.count == 1
    assert asked(service, session, "two").error is None


def test_text_of_a_chat_is_proposed_only_there_and_forgotten_when_it_is_cleared(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forgotten = generate_calls(monkeypatch), list[str]()
    forget = OnlineAssistant.forget
    monkeypatch.setattr(
        OnlineAssistant, "forget", lambda self, owner: (forgotten.append(owner), forget(self, owner))[1]
    )
    chat, guests = service.sessions.open(None), [service.sessions.guest() for _ in range(2)]
    for session in (chat, chat, *guests):
        asked(service, session, "one two three")
    service.sessions.clear(chat)
    asked(service, chat, "one two three")
    owners = [call["owner"] for call in calls]
    assert None not in owners
    assert owners[0] == owners[1]
    assert len(set(owners)) == 4
    assert chat.id not in owners  # what a browser knows names nobody here
    assert forgotten == owners[:1]


def test_earlier_turns_are_remembered_where_asked(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    histories, encode = dict[str, list[tuple[str, str]]](), ServedPair.encode

    def spied(self: ServedPair, prompt: str, max_new_tokens: int, history: Any = ()) -> torch.Tensor:
        histories[prompt] = list(history)
        return encode(self, prompt, max_new_tokens, history)

    monkeypatch.setattr(ServedPair, "encode", spied)
    session = service.sessions.open(None)
    first, second = (asked(service, session, prompt, Settings("sql", max_new_tokens=4)) for prompt in ("one", "two"))
    asked(service, session, "three", Settings("sql", max_new_tokens=4, remember=True))
    assert histories == {"one": [], "two": [], "three": [("one", first.text), ("two", second.text)]}


def test_the_oldest_turns_go_where_there_is_no_room(pair: ServedPair) -> None:
    history = [("a" * 60, "b" * 60), ("c" * 30, "d" * 30)]
    prompt = "e" * 40
    ids = pair.encode(prompt, 16, history)[0].tolist()
    assert ids == pair.encode(prompt, 16, history[1:])[0].tolist()
    text = pair.tokenizer.decode(ids)
    assert text == f"<s>[user]{'c' * 30}[assistant]{'d' * 30}[user]{prompt}[answer]"
    assert pair.encode(prompt, 200, history)[0].tolist() == pair.encode(prompt, 200)[0].tolist()
    with pytest.raises(ConfigError, match="these models take 16 with an answer of 240 tokens"):
        pair.encode(prompt, 240, history)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "is empty"),
        (" \n\t ", "is empty"),
        ("\x00\x07\x1b\x7f\x9f", "is empty"),
        ("\ud800", "is empty"),
        ("a" * 1000, r"has \d+ tokens.*Shorten the prompt"),
        ("a" * 100_000, f"100,000 characters; the maximum is {MAX_CHARACTERS:,}"),
    ],
    ids=["empty", "spaces", "controls", "surrogate", "long", "huge"],
)
def test_a_prompt_that_cannot_be_answered_is_refused_and_leaves_nothing(
    service: Service, prompt: str, words: str
) -> None:
    session = service.sessions.open(None)
    with pytest.raises(ConfigError, match=words):
        service.ask(session, prompt, SHORT)
    assert session.entries == []
    assert session.job is None
    assert service.sessions.shared.count == 0
    assert service.sessions.shared.assistant.drafts.domains == ()


def test_control_characters_are_removed_and_nothing_else(service: Service) -> None:
    session = service.sessions.open(None)
    assert asked(service, session, " a\x00b\x1b[0m\r\n\tc\x7f\x85 ").prompt == "ab[0m\n\tc"
    # Spaces of other widths and joiners are part of what is written.
    written = "a\u00a0b\u3000c \u0646\u200c\u0645 \U0001f469\u200d\U0001f680"
    assert asked(service, session, written).prompt == written


def test_a_domain_is_found_by_the_prompt_and_an_unknown_one_is_refused(service: Service) -> None:
    session = service.sessions.open(None)
    with pytest.raises(ConfigError, match="must be one of sql, math, python, finance, general, got 'poems'"):
        Settings(domain="poems")
    with pytest.raises(ConfigError, match="There are sample prompts of sql, math, python, finance, got 'general'"):
        service.send(session, "general", 2, SHORT)
    assert session.entries == []
    settings = Settings(max_new_tokens=4)
    assert asked(service, session, "CREATE TABLE t (id INTEGER, name TEXT);", settings).domain == "sql"
    assert asked(service, session, "qwzx", settings).domain == "general"
    assert service.sessions.shared.assistant.drafts.domains == ("sql", "general")


def test_a_chat_that_is_being_answered_takes_nothing_else(service: Service) -> None:
    session = service.sessions.open(None)
    with service.queue.slot():
        answer = service.ask(session, "one", SHORT)
        for refused in (
            lambda: service.ask(session, "two", SHORT),
            lambda: service.send(session, "finance", 2, SHORT),
            lambda: service.sessions.set_private(session, True),
            lambda: service.sessions.clear(session),
        ):
            with pytest.raises(ConfigError, match="still being answered"):
                refused()
        assert session.entries == [answer]
    ended(session)
    assert answer.error is None
    assert service.sessions.shared.count == 1
    service.sessions.clear(session)
    assert session.entries == []


def test_an_answer_that_fails_says_so_and_the_next_one_is_served(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = service.sessions.open(None)
    with monkeypatch.context() as patched:
        patched.setattr(service, "_generate", lambda *_: 1 / 0)
        failed = asked(service, session, "one")
    assert failed.error == "Internal error (ZeroDivisionError). See the log of the app."
    assert "ZeroDivisionError" in caplog.text
    assert failed.is_done
    assert asked(service, session, "two").error is None


def test_a_failure_of_learning_is_shown(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = service.sessions.shared
    assert (workspace.failure, workspace.state) == (None, "idle")
    monkeypatch.setattr(OnlineAssistant, "learning_error", property(lambda self: RuntimeError("x")))
    assert "RuntimeError('x')" in (workspace.failure or "")
    assert workspace.state == workspace.statistics()["state"] == "failed"


# --- visitors beside each other -------------------------------------------------------------------------------------


def test_the_id_of_a_chat_cannot_be_guessed_and_survives_a_restart(service: Service) -> None:
    session = service.sessions.open("mine")
    assert len(session.id) >= 20
    assert service.sessions.open(session.id) is session
    assert service.sessions.open(None) is not session
    service.sessions.by_id.clear()
    assert service.sessions.open(session.id).id == session.id
    for other in ("mine", "short", "../../etc/passwd", session.id + "x", "<script>"):
        assert service.sessions.open(other).id not in (other, session.id)


def test_the_chat_that_was_not_used_for_longest_goes_with_its_private_draft(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    busy, other = service.sessions.open(None), service.sessions.open(None)
    service.sessions.set_private(other, True)
    with service.queue.slot():
        service.ask(busy, "one", SHORT)
        third = service.sessions.open(None)
        assert list(service.sessions.by_id) == [busy.id, third.id]  # a chat that is being answered stays
    ended(busy)
    assert not service.sessions.private
    service.sessions.open(busy.id)
    fourth = service.sessions.open(None)
    assert list(service.sessions.by_id) == [busy.id, fourth.id]


# --- workspaces -----------------------------------------------------------------------------------------------------


def test_a_visitor_can_have_a_draft_of_their_own(service: Service) -> None:
    session, other, shared = service.sessions.open(None), service.sessions.open(None), service.sessions.shared
    for _ in range(2):  # the second time it is private already
        service.sessions.set_private(session, True)
    assert session.workspace.is_private
    assert session.workspace is not shared is other.workspace
    asked(service, session, "one")
    assert (session.workspace.count, shared.count) == (1, 0)
    assert session.workspace.assistant.drafts.domains == ("sql",)
    assert shared.assistant.drafts.domains == ()
    asked(service, other, "two")
    assert (session.workspace.count, shared.count) == (1, 1)
    service.sessions.set_private(session, False)
    assert session.workspace is shared
    assert session.notice is None
    assert not service.sessions.private
    asked(service, session, "three")
    assert shared.count == 2


def test_learning_is_paused_during_an_answer(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    session, other = service.sessions.open(None), service.sessions.open(None)
    service.sessions.set_private(other, True)
    asked(service, other, "two")
    paused, seen = set[OnlineAssistant](), list[set[OnlineAssistant]]()
    pause, resume = OnlineAssistant.pause, OnlineAssistant.resume
    monkeypatch.setattr(OnlineAssistant, "pause", lambda self: (paused.add(self), pause(self))[1])
    monkeypatch.setattr(OnlineAssistant, "resume", lambda self: (paused.discard(self), resume(self))[1])
    told(session, lambda: seen.append(set(paused)) if session.job and session.job.tokens else None)
    asked(service, session, "one")
    both = {service.sessions.shared.assistant, other.workspace.assistant}
    assert seen
    assert all(assistants == both for assistants in seen)
    assert paused == set()


def test_the_private_draft_that_was_not_used_for_longest_makes_room_and_no_other_learns_what_was_meant_for_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "MAX_PRIVATE", 2)
    first, second, third = (service.sessions.open(None) for _ in range(3))
    service.sessions.set_private(first, True)
    service.sessions.set_private(second, True)
    service.sessions.open(first.id)
    service.sessions.set_private(third, True)
    assert [s.workspace.is_private for s in (first, second, third)] == [True, False, True]
    assert second.workspace is service.sessions.shared
    assert "make room" in (second.notice or "")
    with pytest.raises(ConfigError, match="Nothing was sent"):
        service.ask(second, "a secret", SHORT, wants_private=True)
    with pytest.raises(ConfigError, match="Nothing was sent"):
        service.send(second, "sql", 2, SHORT, wants_private=True)
    assert second.entries == []
    assert asked(service, second, "no secret").error is None
    assert service.sessions.shared.count == 1
    assert second.notice is None
    with service.queue.slot():  # drafts that are in use stay
        for session in (first, third):
            service.ask(session, "two", SHORT)
        with pytest.raises(ConfigError, match="in use at the moment"):
            service.sessions.set_private(second, True)
    ended(first)
    ended(third)
    assert (first.workspace.count, third.workspace.count) == (1, 1)


def test_reset_forgets_what_was_learned_and_counted(service: Service) -> None:
    session, workspace = service.sessions.open(None), service.sessions.shared
    asked(service, session, "one")
    workspace.assistant.update(1, domain="sql")
    assert workspace.assistant.version == 1
    workspace.reset()
    assert workspace.assistant.version == 0
    assert workspace.assistant.drafts.domains == ()
    assert (workspace.count, workspace.records, workspace.statistics()["decisions"]) == (0, [], [])
    assert len(session.entries) == 1  # to be read
    assert asked(service, session, "two").version == 0
    assert workspace.count == 1


def test_a_saved_session_goes_on_and_its_drafts_load(service: Service, pair: ServedPair, tmp_path: Path) -> None:
    session, workspace = service.sessions.open(None), service.sessions.shared
    asked(service, session, "one")
    asked(service, session, "two", Settings("math", max_new_tokens=8))
    workspace.assistant.update(2, domain="sql")
    written = workspace.save(tmp_path / "demo")
    assert written == [tmp_path / "demo" / "session", tmp_path / "demo" / "drafts" / "sql"]  # math has learned nothing
    learned = AutoModelForCausalLM.from_pretrained(written[1])
    with workspace.assistant.drafts.lease("sql") as serving:
        for name, weight in serving.model.state_dict().items():
            assert torch.equal(learned.state_dict()[name], weight)
    assert any(not torch.equal(p, q) for p, q in zip(learned.parameters(), pair.draft.parameters(), strict=True))
    assert len(AutoTokenizer.from_pretrained(written[1])) == len(pair.tokenizer)
    again = Service(pair, state=written[0], config=MANUAL, threads=1)
    try:
        assert again.sessions.shared.assistant.drafts.domains == ("sql", "math")
        assert asked(again, again.sessions.open(None), "one").version == 1
    finally:
        again.sessions.close()
    with pytest.raises(StateError):
        Service(pair, state=tmp_path / "nothing", config=MANUAL, threads=1)


def test_drafts_are_saved_under_quoted_names(service: Service, tmp_path: Path) -> None:
    workspace, ids = service.sessions.shared, torch.tensor([[3, 4, 5]])
    for domain in ("sql", "a/b", "a?b", ".."):
        workspace.assistant.generate(ids, attention_mask=torch.ones_like(ids), domain=domain, max_new_tokens=8)
        workspace.assistant.update(1, domain=domain)
    for _ in range(2):  # the second save replaces the first
        session, *drafts = workspace.save(tmp_path)
        assert session == tmp_path / "session"
        assert len(set(drafts)) == 4
        assert all(draft.parent == tmp_path / "drafts" and (draft / "model.safetensors").is_file() for draft in drafts)


def test_a_push_is_of_a_draft_that_has_learned_and_private_if_ticked(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def built() -> gr.Blocks:
        return build(service)

    page, assistant = asyncio.run(built()), service.sessions.shared.assistant
    calls: list[Any] = []

    def push_to_hub(*args: Any, **kwargs: Any) -> str:
        calls.append((*args, kwargs))
        if kwargs["private"]:
            return "https://hub/me/draft"
        raise HubError("No connection.")

    monkeypatch.setattr(assistant, "push_to_hub", push_to_hub)
    try:
        push = next(fn.fn for fn in page.fns.values() if fn.api_name == "push")
        request = SimpleNamespace(client=None)
        assert list(push(request, None, "sql", "me/draft", True))[-1].startswith("Not pushed: ")
        assert calls == []
        session = service.sessions.open(None)
        asked(service, session, "one")
        assistant.update(1, domain="sql")
        for domain in ("sql", AUTOMATIC):  # the newest request of this chat was of sql
            said = list(push(request, session.id, domain, " me/draft ", True))
            assert said[-1] == "Pushed the draft of sql to https://hub/me/draft"
        assert list(push(request, session.id, "sql", "me/draft", False))[-1] == "Not pushed: No connection."
        assert calls == [("me/draft", {"domain": "sql", "private": private}) for private in (True, True, False)]
    finally:
        page.close()


# --- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_answers_different_prompts_of_a_domain(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_ENTRIES", 2)
    session = service.sessions.open(None)
    batches = []
    for _ in range(3):
        settings = Settings(domain="sql", max_new_tokens=4, check=True)
        batches.append(service.send(session, "finance", 2, settings))
        ended(session)
    assert session.entries == batches[1:]  # the oldest entry was removed
    assert all((batch.is_done, batch.error, len(batch.answers)) == (True, None, 2) for batch in batches)
    answers = [answer for batch in batches for answer in batch.answers]
    assert len({answer.prompt for answer in answers}) == 6
    assert all(answer.is_done and answer.stats is not None and not answer.is_measured for answer in answers)
    assert {answer.domain for answer in answers} == {"finance"}
    assert service.sessions.shared.count == 6


def test_a_batch_with_a_prompt_that_does_not_fit_says_so(service: Service) -> None:
    session = service.sessions.open(None)
    batch = service.send(session, "sql", 3, Settings(max_new_tokens=200))
    ended(session)
    assert batch.is_done
    assert batch.error is not None
    assert "Shorten the prompt" in batch.error
    assert asked(service, session, "one").error is None


def test_a_batch_learns_between_its_prompts(pair: ServedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "LEARNING_SECONDS", LONG)  # however slow learning is
    eager = {"update_strategy": "idle", "update_interval": 2, "steps_per_update": 1, "gate": False, "batch_size": 2}
    service = Service(pair, config=eager, threads=1)
    try:
        session = service.sessions.open(None)
        batch = service.send(session, "finance", 4, Settings(max_new_tokens=4))
        ended(session)
        assert batch.error is None
        assert not batch.is_learning
        assert [answer.version for answer in batch.answers] == [0, 0, 1, 1]
        assert len(service.sessions.shared.assistant.decisions) == 2
        assert service.sessions.shared.statistics()["learning_seconds"] > 0
    finally:
        service.sessions.close()


def test_closed_workspaces_leave_no_thread(pair: ServedPair) -> None:
    before = set(threading.enumerate())
    service = Service(pair, config={"update_strategy": "idle"}, threads=1)
    sessions = [service.sessions.open(None) for _ in range(2)]
    for session in sessions:
        service.sessions.set_private(session, True)
    assert len({session.workspace.assistant for session in sessions}) == 2
    assert len(set(threading.enumerate()) - before) == 3
    service.sessions.set_private(sessions[0], False)
    service.sessions.set_private(sessions[0], True)
    service.sessions.close()
    assert sessions[0].workspace.assistant.learning_error is None  # a page that still shows it starts no learner
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]


def test_statistics_hold_no_text_of_anyone(service: Service) -> None:
    session = service.sessions.open(None)
    answer = asked(service, session, "swordfish 4711", Settings("sql", max_new_tokens=30))
    service.sessions.shared.assistant.update(1, domain="sql")
    told = service.sessions.shared.statistics()
    written = json.dumps(told, ensure_ascii=False)
    assert "swordfish" not in written
    assert "4711" not in written
    assert answer.text.strip()
    assert answer.text not in written
    assert told["requests"] == 1
    assert told["overall"]["requests"] == told["by_domain"]["sql"]["requests"] == 1
    assert told["overall"]["frozen_alpha"] == service.sessions.shared.records[0].frozen.alpha
    assert [decision["outcome"] for decision in told["decisions"]] == ["promoted"]
    assert "reason" not in told["decisions"][0]


# --- strangers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def public(pair: ServedPair) -> Iterator[Service]:
    made = Service(pair, config=MANUAL, is_public=True, threads=1)
    yield made
    made.sessions.close()


def test_a_stranger_takes_no_draft_from_another_and_makes_few(
    public: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = public.sessions.open(None, "192.0.2.1")
    public.sessions.set_private(own, True)
    for _ in range(3):
        public.sessions.set_private(public.sessions.open(None, "192.0.2.2"), True)
    assert own.workspace.is_private
    assert len(public.sessions.private) == 3  # theirs made workspace for their next
    with pytest.raises(ConfigError, match="created recently"):
        for _ in range(9):
            session = public.sessions.open(None, "192.0.2.2")
            public.sessions.set_private(session, True)
            public.sessions.set_private(session, False)
    assert own.workspace.is_private


def test_invented_names_evict_no_chat_of_another_visitor(public: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 12)
    own = public.sessions.open(None, "192.0.2.1")
    answer = asked(public, own, "one")
    empty = public.sessions.open(None, "192.0.2.1")
    for address in ("192.0.2.2", "192.0.2.3"):
        for i in range(40):
            public.sessions.open(f"program {address}-{i}", address)
            public.sessions.open(f"{i:022}", address)
    assert len(public.sessions.by_id) <= 12
    assert public.sessions.open(own.id, "192.0.2.1") is own
    assert public.sessions.open(empty.id, "192.0.2.1") is empty
    newcomer = public.sessions.open(None, "192.0.2.4")
    assert public.sessions.open(newcomer.id, "192.0.2.4") is newcomer
    for _ in range(12):  # empty chats make room first
        public.sessions.open(None, "192.0.2.1")
    assert public.sessions.by_id.get(own.id) is own
    assert own.entries == [answer]


def test_where_all_chats_are_in_use_one_more_is_refused_until_some_are_old(
    public: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    sessions = [public.sessions.open(None, f"192.0.2.{i}") for i in range(2)]
    with pytest.raises(ConfigError, match="in use at the moment"):
        public.sessions.open(None, "192.0.2.9")
    sessions[0].last_used -= sessions_module.ACTIVE_SECONDS + 1
    public.sessions.open(None, "192.0.2.9")
    assert sessions[0].id not in public.sessions.by_id
    assert sessions[1].id in public.sessions.by_id


def test_one_visitor_cannot_hold_all_places(public: Service) -> None:
    with public.queue.slot():
        taken = []
        with pytest.raises(ConfigError, match="Too many prompts are waiting"):
            for _ in range(sessions_module.MAX_JOBS):
                guest = public.sessions.guest("192.0.2.1")
                taken.append((guest, public.ask(guest, "one", SHORT)))
        assert len(taken) == sessions_module.MAX_JOBS // 2
        other = public.sessions.guest("192.0.2.2")
        answer = public.ask(other, "two", SHORT)
        for _, theirs in taken:
            theirs.stop.set()
    ended(other)
    assert answer.error is None
    assert answer.tokens
    for guest, _ in taken:
        ended(guest)


def test_what_a_stranger_has_left_is_stopped_in_the_line_and_in_its_middle(
    public: Service, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "AWAY_SECONDS", -1.0)
    waiting, running, back = (public.sessions.open(None, f"192.0.2.{i}") for i in range(3))
    long = Settings("sql", max_new_tokens=100)
    with public.queue.slot():
        queued = public.ask(waiting, "one", long)
        ended(waiting)
        assert queued.stop.is_set()
    left = threading.Event()
    told(running, lambda: running.watchers and len(running.entries[0].text) > 8 and left.set())
    with watched(running):
        answer = public.ask(running, "one", long)
        assert left.wait(LONG)
    ended(running)
    assert answer.stop.is_set()
    with watched(back):
        assert not asked(public, back, "one").stop.is_set()
    assert not asked(service, service.sessions.open(None), "one").stop.is_set()  # an owner may leave


def test_visitors_get_shorter_answers(public: Service, service: Service) -> None:
    session = public.sessions.open(None, "192.0.2.1")
    with pytest.raises(ConfigError, match="`max_new_tokens` is at most 192, got 200"):
        public.ask(session, "one", Settings(max_new_tokens=200))
    batch = public.send(session, "sql", 1, Settings(max_new_tokens=200))
    ended(session)
    assert batch.answers[0].settings.max_new_tokens == 192
    assert asked(service, service.sessions.open(None), "one", Settings(max_new_tokens=200)).error is None


def test_an_interrupted_answer_is_the_targets_own(pair: ServedPair) -> None:
    public = Service(pair, config=MANUAL, is_public=True, threads=1)
    public.queue = FairQueue(3, work=itertools.count(0.0, 1.0).__next__)  # each round takes a second
    first, second = public.sessions.open(None, "192.0.2.1"), public.sessions.open(None, "192.0.2.2")
    settings = Settings("sql", max_new_tokens=40, check=True)
    beside, waits = list[Answer](), threading.Event()
    ran_beside = list[bool]()

    def ask_second() -> None:
        if isinstance(first.job, Answer) and first.job.tokens and not beside:
            beside.append(public.ask(second, "two", settings))
            assert waits.wait(LONG)

    def observe() -> None:
        if isinstance(second.job, Answer) and second.job.position:
            waits.set()
        if isinstance(second.job, Answer) and second.job.tokens and not ran_beside:
            ran_beside.append(first.job is not None)

    told(first, ask_second)
    told(second, observe)
    answer = asked(public, first, "three", settings)
    ended(second)
    public.sessions.close()
    assert [session.entries for session in (first, second)] == [[answer], beside]
    assert ran_beside == [True]
    assert answer.is_identical is beside[0].is_identical is True
    assert [t.text for t in answer.tokens] == texts(pair, "three", settings)
    assert [t.text for t in beside[0].tokens] == texts(pair, "two", settings)
