"""The app's service on a tiny pair: answers, visitors beside each other, rooms, and what goes wrong."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from saved_pair import save_pair
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import LONG

from osd_hf import CorrectionStore, OnlineConfig
from osd_hf.bundled import bundled_prompts
from osd_hf.decoding.text import EarlierText
from osd_hf.errors import ConfigError, StateError, UnsupportedModelError, VocabularyMismatchError
from osd_hf.utils.streaming import Pieces
from osd_hf_app import pair as pair_module
from osd_hf_app import service as service_module
from osd_hf_app import visitors as visitors_module
from osd_hf_app.pair import ServedPair
from osd_hf_app.rooms import SAVED, Room
from osd_hf_app.service import MAX_CHARACTERS, Service
from osd_hf_app.visitors import Answer, Batch, Session, Settings

PATIENCE = LONG
SHORT = Settings(domain="sql", max_new_tokens=16)
MANUAL = {"update_strategy": "manual", "gate": False, "batch_size": 2, "optimizer": "adamw"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pair(folder: Path) -> ServedPair:
    pair = ServedPair(str(folder / "target"), str(folder / "draft"))
    pair.per_domain = True  # as the bundled pair
    return pair


@pytest.fixture
def service(pair: ServedPair) -> Iterator[Service]:
    made = Service(pair, config=MANUAL, threads=1)
    yield made
    made.close()


def until(session: Session, holds: Callable[[], bool]) -> None:
    with session.changed:
        assert session.changed.wait_for(holds, PATIENCE)


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


def targets_own(pair: ServedPair, prompt: str, settings: Settings = SHORT) -> list[int]:
    ids = pair.encode(prompt, settings.max_new_tokens)
    output = pair.target.generate(ids, attention_mask=torch.ones_like(ids), **settings.generate_kwargs)
    return list(output[0, ids.shape[1] :].tolist())


def texts(pair: ServedPair, ids: list[int]) -> list[str]:
    pieces = Pieces(pair.tokenizer)
    pieces.push(ids)
    return pieces.texts


def generated(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Ids of prompts with their answers, as the shared assistant gives them from now on."""
    found: list[list[int]] = []
    generate = service.visitors.shared.assistant.generate

    def spied(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        found.append(output[0].tolist())
        return output

    monkeypatch.setattr(service.visitors.shared.assistant, "generate", spied)
    return found


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 5, "auto"])
def test_a_greedy_answer_is_the_targets_own(
    service: Service, pair: ServedPair, k: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = generated(service, monkeypatch)
    settings = Settings(domain="sql", max_new_tokens=40, k=k)
    session = service.visitors.session(None)
    answer = asked(service, session, "one two", settings)
    own = targets_own(pair, "one two", settings)
    assert len(own) > 10
    assert found == [pair.encode("one two", 40)[0].tolist() + own]
    assert [token.text for token in answer.tokens] == texts(pair, own)
    assert answer.is_done
    assert answer.error is None
    assert not answer.stopped
    assert answer.stats is not None
    assert answer.stats.emitted == len(own)
    assert answer.seconds > 0
    assert answer.first_token_seconds is not None
    assert 0 < answer.first_token_seconds <= answer.seconds
    assert {token.origin for token in answer.tokens} <= {"accepted", "corrected", "bonus", "plain"}
    for token in answer.tokens:
        assert (token.said is not None) == (token.origin == "corrected")
    counted = Counter(token.origin for token in answer.tokens)
    assert counted["accepted"] == answer.stats.accepted
    assert session.corrections.total() == counted["corrected"]


def test_an_answer_grows_while_it_is_made(service: Service) -> None:
    session, lengths = service.visitors.session(None), []
    told(session, lambda: lengths.append(len(session.entries[0].tokens)))  # type: ignore[union-attr]
    answer = asked(service, session, "one", Settings(domain="sql", max_new_tokens=30))
    assert len(set(lengths)) > 3
    assert lengths == sorted(lengths)
    assert lengths[-1] == len(answer.tokens)


def test_first_tokens_and_the_end_are_shown_at_once_and_what_is_between_now_and_then(service: Service) -> None:
    session, shown, drawn = service.visitors.guest(), [], threading.Semaphore(0)
    session.job = Answer("one", Settings())

    def watch() -> None:
        for _ in session.frames(10 * PATIENCE, 10 * PATIENCE):
            shown.append(session.revision)
            drawn.release()

    thread = threading.Thread(target=watch)
    thread.start()
    assert drawn.acquire(timeout=PATIENCE)
    for _ in range(3):
        session.touch()
    session.touch(is_first=True)
    assert drawn.acquire(timeout=PATIENCE)
    for _ in range(3):
        session.touch()
    session.job = None
    session.touch()
    thread.join(PATIENCE)
    assert shown == [0, 4, 8]


def test_a_checked_answer_is_compared_with_the_target_alone(service: Service) -> None:
    session = service.visitors.session(None)
    checked = asked(service, session, "one", Settings(domain="sql", max_new_tokens=16, check=True))
    assert (checked.is_identical, checked.is_measured) == (True, True)
    assert checked.speedup is not None
    assert checked.speedup > 0
    estimated = asked(service, session, "two")
    assert (estimated.is_identical, estimated.is_measured) == (None, False)
    assert estimated.speedup is not None
    sampled = asked(service, session, "three", Settings("sql", check=True, do_sample=True, max_new_tokens=16))
    assert (sampled.is_identical, sampled.is_measured) == (None, True)


def test_what_is_not_to_be_learned_from_leaves_nothing_but_counts(service: Service, tmp_path: Path) -> None:
    session, assistant = service.visitors.session(None), service.visitors.shared.assistant
    assistant.store = CorrectionStore(tmp_path / "store")
    asked(service, session, "one", Settings(domain="sql", max_new_tokens=16, learn=False))
    assert assistant.drafts.domains == ()
    assert assistant._learner.lessons == {}
    assert len(assistant.store) == 0
    assert assistant.version == 0
    assert service.visitors.shared.count == 1
    assert [record.domain for record in service.visitors.shared.snapshot()] == ["sql"]
    asked(service, session, "one")
    assert assistant.drafts.domains == ("sql",)
    assert len(assistant.store) == 1


def test_both_drafts_are_counted_on_each_answer(service: Service) -> None:
    session = service.visitors.session(None)
    first = asked(service, session, "one")
    assert first.learning is not None
    assert first.frozen is not None
    assert first.learning.accepted == first.frozen.accepted  # nothing has been learned
    service.visitors.shared.assistant.update(2, domain="sql")
    second = asked(service, session, "one")
    assert second.version == 1
    versions = [(record.number, record.domain, record.version) for record in service.visitors.shared.snapshot()]
    assert versions == [(1, "sql", 0), (2, "sql", 1)]
    assert service.visitors.shared.snapshot("math") == []


def test_a_stopped_answer_ends_early(service: Service, pair: ServedPair) -> None:
    settings = Settings(domain="sql", max_new_tokens=100, check=True)
    session = service.visitors.session(None)

    def stop_soon() -> None:
        answer = session.entries[0]
        if isinstance(answer, Answer) and len(answer.tokens) >= 8:
            answer.stop.set()

    told(session, stop_soon)
    answer = asked(service, session, "one", settings)
    own = targets_own(pair, "one", settings)
    assert answer.stopped
    assert answer.is_done
    assert 8 <= len(answer.tokens) <= 8 + 2 * (32 + 1)
    assert len(answer.tokens) < len(own)
    assert [token.text for token in answer.tokens] == texts(pair, own[: len(answer.tokens)])
    assert not answer.is_measured
    assert service.visitors.shared.count == 1
    assert asked(service, session, "two").error is None


def test_what_a_chat_said_is_proposed_to_no_other_and_not_after_it_is_cleared(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[str | None] = []
    of = EarlierText.of

    def seen(self: EarlierText, owner: str | None, domain: str | None) -> Any:
        owners.append(owner)
        return of(self, owner, domain)

    monkeypatch.setattr(EarlierText, "of", seen)
    chat, guests = service.visitors.session(None), [service.visitors.guest() for _ in range(2)]
    for session in (chat, chat, *guests):
        asked(service, session, "one two three")
    assert None not in owners
    assert owners[0] == owners[1]
    assert len({owners[0], *owners[2:]}) == 3
    earlier = chat.room.assistant._live.earlier
    assert of(earlier, owners[0], None)
    service.visitors.clear(chat)
    assert not of(earlier, owners[0], None)
    asked(service, chat, "one two three")
    assert owners[-1] not in owners[:-1]


def test_an_answer_stopped_before_its_turn_is_hardly_begun(service: Service) -> None:
    session = service.visitors.session(None)
    with service.turns.turn():
        answer = service.ask(session, "one", Settings(domain="sql", max_new_tokens=100))
        answer.stop.set()
    ended(session)
    assert answer.error is None
    assert answer.stopped
    assert len(answer.tokens) <= 1


def test_earlier_turns_are_remembered_where_asked(
    service: Service, pair: ServedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    histories = []
    encode = ServedPair.encode

    def spied(self: ServedPair, prompt: str, max_new_tokens: int, history: Any = ()) -> torch.Tensor:
        histories.append((prompt, list(history)))
        return encode(self, prompt, max_new_tokens, history)

    monkeypatch.setattr(ServedPair, "encode", spied)
    session = service.visitors.session(None)
    first = asked(service, session, "one", Settings("sql", max_new_tokens=4))
    asked(service, session, "two", Settings("sql", max_new_tokens=4))
    asked(service, session, "three", Settings("sql", max_new_tokens=4, remember=True))
    assert ("two", []) in histories
    remembered = [history for prompt, history in histories if prompt == "three"]
    assert [prompt for prompt, _ in remembered[0]] == ["one", "two"]
    assert remembered[0][0] == ("one", first.text)


def test_the_oldest_turns_go_where_there_is_no_room(pair: ServedPair) -> None:
    history = [("a" * 60, "b" * 60), ("c" * 30, "d" * 30)]
    prompt = "e" * 40
    ids = pair.encode(prompt, 16, history)[0].tolist()
    assert ids == pair.encode(prompt, 16, history[1:])[0].tolist()
    text = pair.tokenizer.decode(ids)
    assert text == f"<s>[user]{'c' * 30}[assistant]{'d' * 30}[user]{prompt}[answer]"
    assert pair.encode(prompt, 200, history)[0].tolist() == pair.encode(prompt, 200)[0].tolist()
    with pytest.raises(ConfigError, match="room for 16. Shorten it, or allow fewer new tokens"):
        pair.encode(prompt, 240, history)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "is empty"),
        (" \n\t ", "is empty"),
        ("\x00\x07\x1b\x7f\x9f", "is empty"),
        ("\ud800", "is empty"),
        ("a" * 1000, r"has \d+ tokens.*Shorten it"),
        ("a" * 100_000, f"100,000 characters, at most {MAX_CHARACTERS:,}"),
        ("long " * 20_000, "99,999 characters"),
    ],
    ids=["empty", "spaces", "controls", "surrogate", "long", "huge", "words"],
)
def test_a_prompt_that_cannot_be_answered_is_refused_and_leaves_nothing(
    service: Service, prompt: str, words: str
) -> None:
    session = service.visitors.session(None)
    with pytest.raises(ConfigError, match=words):
        service.ask(session, prompt, SHORT)
    assert session.entries == []
    assert session.job is None
    assert service.visitors.shared.count == 0
    assert service.visitors.shared.assistant.drafts.domains == ()


def test_control_characters_are_removed_and_nothing_else(service: Service) -> None:
    session = service.visitors.session(None)
    assert asked(service, session, " a\x00b\x1b[0m\r\n\tc\x7f\x85 ").prompt == "ab[0m\n\tc"
    # Spaces of other widths and joiners are part of what is written.
    written = "a\u00a0b\u3000c \u0646\u200c\u0645 \U0001f469\u200d\U0001f680"
    assert asked(service, session, written).prompt == written


def test_an_unknown_domain_is_refused(service: Service) -> None:
    session = service.visitors.session(None)
    with pytest.raises(ConfigError, match="must be one of sql, math, python, finance, general, got 'poems'"):
        service.ask(session, "one", Settings(domain="poems"))
    with pytest.raises(ConfigError, match="There are prompts of sql, math, python, finance, got 'general'"):
        service.send(session, "general", 2, SHORT)
    assert session.entries == []


def test_a_domain_is_found_by_the_prompt(service: Service) -> None:
    session = service.visitors.session(None)
    settings = Settings(max_new_tokens=4)
    assert asked(service, session, "CREATE TABLE t (id INTEGER, name TEXT);", settings).domain == "sql"
    assert asked(service, session, "qwzx", settings).domain == "general"
    assert service.visitors.shared.assistant.drafts.domains == ("sql", "general")


def test_a_chat_that_is_being_answered_takes_nothing_else(service: Service) -> None:
    session = service.visitors.session(None)
    with service.turns.turn():
        answer = service.ask(session, "one", SHORT)
        for refused in (
            lambda: service.ask(session, "two", SHORT),
            lambda: service.send(session, "finance", 2, SHORT),
            lambda: service.visitors.go_private(session, True),
            lambda: service.visitors.clear(session),
        ):
            with pytest.raises(ConfigError, match="still being answered"):
                refused()
        assert session.entries == [answer]
    ended(session)
    assert answer.error is None
    assert service.visitors.shared.count == 1
    service.visitors.clear(session)
    assert session.entries == []
    assert not session.corrections


def test_an_answer_that_fails_says_so_and_the_next_one_is_served(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = service.visitors.session(None)
    with monkeypatch.context() as patched:
        patched.setattr(service, "_generated", lambda *_: 1 / 0)
        failed = asked(service, session, "one")
    assert failed.error == "This failed (ZeroDivisionError). The log of the app says more."
    assert "ZeroDivisionError" in caplog.text
    assert failed.is_done
    assert len(service.turns) == 0
    assert asked(service, session, "two").error is None


def test_a_failure_of_learning_costs_no_answer_and_is_shown(service: Service, pair: ServedPair) -> None:
    session, room = service.visitors.session(None), service.visitors.shared
    room.assistant._live._failed(RuntimeError("x"), None)
    answer = asked(service, session, "one")
    assert answer.error is None
    assert [token.text for token in answer.tokens] == texts(pair, targets_own(pair, "one"))
    assert room.failure is not None
    assert "RuntimeError('x')" in room.failure
    assert room.state == room.statistics()["state"] == "failed"
    service.reset(room)
    assert (room.failure, room.state) == (None, "idle")


# --- visitors beside each other -------------------------------------------------------------------------------------


def test_two_visitors_at_once_get_their_own_answers(service: Service, pair: ServedPair) -> None:
    prompts = {"one two three": service.visitors.session(None), "seven eight": service.visitors.session(None)}
    said = {session.id: threading.Event() for session in prompts.values()}
    for session in prompts.values():
        told(session, lambda session=session: session.entries[0].waiting and said[session.id].set())
    with service.turns.turn():
        answers = {prompt: service.ask(session, prompt, SHORT) for prompt, session in prompts.items()}
        assert all(event.wait(PATIENCE) for event in said.values())
        assert all(1 <= answer.waiting <= 2 for answer in answers.values())
    for prompt, session in prompts.items():
        ended(session)
        answer = answers[prompt]
        assert session.entries == [answer]
        assert answer.waiting == 0
        assert [token.text for token in answer.tokens] == texts(pair, targets_own(pair, prompt))
        assert session.corrections.total() == sum(token.said is not None for token in answer.tokens)
    assert service.visitors.shared.count == 2
    assert sorted(record.number for record in service.visitors.shared.snapshot()) == [1, 2]


def test_corrections_can_be_read_while_they_are_counted(service: Service) -> None:
    session = service.visitors.session(None)
    asked(service, session, "one two three")
    reading = iter(session.corrections)
    next(reading)
    asked(service, session, "seven eight", Settings(domain="sql", max_new_tokens=60))
    list(reading)


def test_a_chat_has_a_name_that_cannot_be_guessed_and_is_found_by_it(service: Service) -> None:
    session = service.visitors.session("mine")
    assert session.id != "mine"
    assert len(session.id) >= 20
    assert service.visitors.session(session.id) is session
    assert service.visitors.session("mine") is not session
    assert service.visitors.session(None) is not session


def test_the_chat_that_was_not_used_for_longest_goes(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors_module, "MAX_SESSIONS", 2)
    busy, other = service.visitors.session(None), service.visitors.session(None)
    with service.turns.turn():
        service.ask(busy, "one", SHORT)
        third = service.visitors.session(None)
        assert list(service.visitors.sessions) == [busy.id, third.id]  # a chat that is being answered stays
    ended(busy)
    service.visitors.session(busy.id)
    fourth = service.visitors.session(None)
    assert list(service.visitors.sessions) == [busy.id, fourth.id]
    assert other.id not in service.visitors.sessions


def test_the_oldest_entries_of_a_chat_go(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors_module, "MAX_ENTRIES", 2)
    session = service.visitors.session(None)
    answers = [asked(service, session, prompt, Settings("sql", max_new_tokens=2)) for prompt in ("a", "b", "c")]
    assert session.entries == answers[1:]


# --- rooms ----------------------------------------------------------------------------------------------------------


def test_a_visitor_can_have_a_draft_of_their_own(service: Service) -> None:
    session, other = service.visitors.session(None), service.visitors.session(None)
    service.visitors.go_private(session, True)
    service.visitors.go_private(session, True)  # as it is already
    assert session.is_private
    assert session.room is not service.visitors.shared
    assert other.room is service.visitors.shared
    asked(service, session, "one")
    assert (session.room.count, service.visitors.shared.count) == (1, 0)
    assert session.room.assistant.drafts.domains == ("sql",)
    assert service.visitors.shared.assistant.drafts.domains == ()
    asked(service, other, "two")
    assert (session.room.count, service.visitors.shared.count) == (1, 1)
    service.visitors.go_private(session, False)
    assert not session.is_private
    assert session.room is service.visitors.shared
    assert session.notice is None
    assert not service.visitors.private
    asked(service, session, "three")
    assert service.visitors.shared.count == 2


def test_nobody_learns_during_an_answer(service: Service) -> None:
    session, other = service.visitors.session(None), service.visitors.session(None)
    service.visitors.go_private(other, True)
    learners = [service.visitors.shared.assistant._learner, other.room.assistant._learner]
    seen = set()
    told(
        session,
        lambda: seen.add(
            tuple(learner.is_paused for learner in learners) if session.job and session.job.tokens else None
        ),
    )
    asked(service, session, "one")
    assert seen == {None, (True, True)}
    assert [learner.is_paused for learner in learners] == [False, False]


def test_what_is_meant_for_a_draft_of_ones_own_teaches_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors_module, "MAX_PRIVATE", 1)
    first, second = service.visitors.session(None), service.visitors.session(None)
    service.visitors.go_private(first, True)
    service.visitors.go_private(second, True)  # the first one's is let go
    with pytest.raises(ConfigError, match="Nothing was sent"):
        service.ask(first, "a secret", SHORT, wants_private=True)
    with pytest.raises(ConfigError, match="Nothing was sent"):
        service.send(first, "sql", 2, SHORT, wants_private=True)
    assert first.entries == []
    assert service.visitors.shared.count == 0
    service.ask(first, "no secret", SHORT, wants_private=False)
    ended(first)
    assert service.visitors.shared.count == 1


def test_too_many_who_wait_are_told(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_WAITING", 2)
    sessions = [service.visitors.session(None) for _ in range(2)]
    with service.turns.turn():
        answer = service.ask(sessions[0], "one", SHORT)
        until(sessions[0], lambda: answer.waiting == 1)
        with pytest.raises(ConfigError, match="Too many visitors"):
            service.ask(sessions[1], "two", SHORT)
    ended(sessions[0])
    assert asked(service, sessions[1], "two").error is None


def test_an_answer_that_is_stopped_in_the_line_costs_nothing(service: Service) -> None:
    session = service.visitors.session(None)
    with service.turns.turn():
        answer = service.ask(session, "one", SHORT)
        until(session, lambda: answer.waiting == 1)
        answer.stop.set()
    ended(session)
    assert answer.stopped
    assert answer.tokens == []
    assert service.visitors.shared.count == 0


def test_a_chat_keeps_its_name_while_the_app_is_started_anew(service: Service) -> None:
    name = service.visitors.session(None).id
    service.visitors.sessions.clear()
    assert service.visitors.session(name).id == name
    for other in ("short", "../../etc/passwd", name + "x", "<script>"):
        assert service.visitors.session(other).id not in (other, name)


def test_private_drafts_make_room_for_new_ones(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors_module, "MAX_PRIVATE", 1)
    first, second = service.visitors.session(None), service.visitors.session(None)
    service.visitors.go_private(first, True)
    service.visitors.go_private(second, True)
    assert (first.is_private, second.is_private) == (False, True)
    assert first.room is service.visitors.shared
    assert first.notice is not None
    assert "make room" in first.notice
    assert list(service.visitors.private) == [second.id]
    assert asked(service, first, "one").error is None
    assert first.notice is None
    with service.turns.turn():  # the one that is being answered keeps its own
        answer = service.ask(second, "two", SHORT)
        with pytest.raises(ConfigError, match="in use at the moment"):
            service.visitors.go_private(first, True)
        assert second.is_private
    ended(second)
    assert answer.error is None
    assert second.room.count == 1


def test_of_private_drafts_the_one_not_used_for_longest_goes(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors_module, "MAX_PRIVATE", 2)
    first, second, third = (service.visitors.session(None) for _ in range(3))
    service.visitors.go_private(first, True)
    service.visitors.go_private(second, True)
    service.visitors.session(first.id)
    service.visitors.go_private(third, True)
    assert [s.is_private for s in (first, second, third)] == [True, False, True]


def test_a_chat_that_goes_takes_its_private_draft_along(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors_module, "MAX_SESSIONS", 1)
    service.visitors.go_private(service.visitors.session(None), True)
    service.visitors.session(None)
    assert not service.visitors.private


def test_reset_forgets_what_was_learned_and_counted(service: Service) -> None:
    session, room = service.visitors.session(None), service.visitors.shared
    asked(service, session, "one")
    room.assistant.update(1, domain="sql")
    assert room.assistant.version == 1
    service.reset(room)
    assert room.assistant.version == 0
    assert room.assistant.drafts.domains == ()
    assert (room.count, room.snapshot(), room.statistics()["decisions"]) == (0, [], [])
    assert len(session.entries) == 1  # to be read
    assert asked(service, session, "two").version == 0
    assert room.count == 1


def test_a_saved_session_goes_on_and_its_drafts_load(service: Service, pair: ServedPair, tmp_path: Path) -> None:
    session, room = service.visitors.session(None), service.visitors.shared
    asked(service, session, "one")
    asked(service, session, "two", Settings("math", max_new_tokens=8))
    room.assistant.update(2, domain="sql")
    written = room.save(tmp_path / "demo")
    assert written == [tmp_path / "demo" / "session", tmp_path / "demo" / "drafts" / "sql"]  # math has learned nothing
    learned = AutoModelForCausalLM.from_pretrained(written[1])
    with room.assistant.drafts.lease("sql") as serving:
        for name, weight in serving.model.state_dict().items():
            assert torch.equal(learned.state_dict()[name], weight)
    assert any(not torch.equal(p, q) for p, q in zip(learned.parameters(), pair.draft.parameters(), strict=True))
    assert len(AutoTokenizer.from_pretrained(written[1])) == len(pair.tokenizer)
    again = Service(pair, state=written[0], config=MANUAL, threads=1)
    try:
        assert again.visitors.shared.assistant.drafts.domains == ("sql", "math")
        assert asked(again, again.visitors.session(None), "one").version == 1
    finally:
        again.close()
    with pytest.raises(StateError):
        Service(pair, state=tmp_path / "nothing", config=MANUAL, threads=1)


def test_saving_deletes_drafts_of_an_earlier_save_and_nothing_else(service: Service, tmp_path: Path) -> None:
    room = service.visitors.shared

    def learn(domain: str) -> None:
        ids = torch.tensor([[3, 4, 5]])
        room.assistant.generate(ids, attention_mask=torch.ones_like(ids), domain=domain, max_new_tokens=8)
        room.assistant.update(1, domain=domain)

    for name in ("sql", "a/b", "a?b", ".."):
        learn(name)
    drafts = tmp_path / "demo" / "drafts"
    (drafts / "mine").mkdir(parents=True)
    (drafts / "mine" / "model.txt").write_text("mine")
    (drafts / "notes.txt").write_text("mine")
    written = room.save(tmp_path / "demo")
    assert written[1:] == [drafts / name for name in ("sql", "a_b", "a_b_", "_")]  # a folder for each
    assert all((path / "model.safetensors").is_file() for path in written[1:])
    room.reset()
    assert room.save(tmp_path / "demo") == [tmp_path / "demo" / "session"]
    assert {path.name for path in drafts.iterdir()} == {"mine", "notes.txt"}
    learn("mine")
    with pytest.raises(ConfigError, match="no draft that was saved here"):
        room.save(tmp_path / "demo")
    assert [path.name for path in (drafts / "mine").iterdir()] == ["model.txt"]


def test_a_session_is_saved_where_a_folder_is_in_the_way_of_a_draft(service: Service, tmp_path: Path) -> None:
    asked(service, service.visitors.session(None), "one", Settings("sql", max_new_tokens=8))
    service.visitors.shared.assistant.update(1, domain="sql")
    (tmp_path / "demo" / "drafts" / "sql").mkdir(parents=True)
    with pytest.raises(ConfigError, match="The session is saved as .*session, the drafts are not: .*sql is no draft"):
        service.visitors.shared.save(tmp_path / "demo")
    again = Service(service.pair, state=tmp_path / "demo" / "session", config=MANUAL, threads=1)
    again.close()
    assert again.visitors.shared.assistant.drafts.domains == ("sql",)
    assert list((tmp_path / "demo" / "drafts" / "sql").iterdir()) == []


def test_saving_leaves_a_file_of_ones_own_in_a_drafts_folder(service: Service, tmp_path: Path) -> None:
    room = service.visitors.shared

    def learn() -> None:
        asked(service, service.visitors.session(None), "one", Settings("sql", max_new_tokens=8))
        room.assistant.update(1, domain="sql")

    learn()
    draft = room.save(tmp_path / "demo")[1]
    (draft / "notes.txt").write_text("mine")
    (draft / "inner").mkdir()
    (draft / "inner" / "notes.txt").write_text("mine")
    outside = tmp_path / "demo" / "drafts" / "outside.txt"
    outside.write_text("mine")
    with (draft / SAVED).open("a") as marker:  # not what a save has written
        marker.write(f"\n../outside.txt\n{outside}")
    made = {path.name for path in draft.iterdir()}
    assert room.save(tmp_path / "demo")[1] == draft
    assert {path.name for path in draft.iterdir()} == made
    room.reset()
    room.save(tmp_path / "demo")
    assert {path.name for path in draft.iterdir()} == {"notes.txt", "inner", SAVED}
    learn()
    assert room.save(tmp_path / "demo")[1] == draft  # still a place for drafts
    assert AutoModelForCausalLM.from_pretrained(draft).num_parameters() > 0
    found = [draft / "notes.txt", draft / "inner" / "notes.txt", outside]
    assert [path.read_text() for path in found] == ["mine"] * 3
    assert {path.name for path in draft.parent.iterdir()} == {"sql", "outside.txt"}


# --- other models ---------------------------------------------------------------------------------------------------


def test_a_pair_that_cannot_serve_leaves_the_one_that_does(
    service: Service, pair: ServedPair, folder: Path, tmp_path: Path
) -> None:
    other = save_pair(tmp_path / "other", vocab_size=320)
    models.tokenizer().save_pretrained(other / "draft")
    session, shared = service.visitors.session(None), service.visitors.shared
    before = asked(service, session, "one")
    target, draft = str(folder / "target"), str(other / "draft")
    with pytest.raises(VocabularyMismatchError):
        service.load(target, draft)
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        service.load(target, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="name a target and a draft, or neither"):
        service.load(target, None)
    assert (service.pair, service.visitors.shared, session.room) == (pair, shared, shared)
    assert len(service.turns) == 0
    assert asked(service, session, "one").text == before.text
    assert shared.count == 2


def test_another_pair_serves_all_chats_which_stay(service: Service, pair: ServedPair, tmp_path: Path) -> None:
    other = save_pair(tmp_path / "other", vocab_size=320)
    session, private = service.visitors.session(None), service.visitors.session(None)
    asked(service, session, "one")
    service.visitors.go_private(private, True)
    service.load(str(other / "target"), str(other / "draft"))
    assert service.pair is not pair
    assert service.visitors.shared.pair is service.pair
    assert session.room is private.room is service.visitors.shared
    assert not private.is_private
    assert not service.visitors.private
    assert service.visitors.shared.count == 0
    answer = asked(service, session, "two")
    assert [token.text for token in answer.tokens] == texts(service.pair, targets_own(service.pair, "two"))
    assert len(session.entries) == 2
    assert service.visitors.shared.count == 1


# --- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_answers_different_prompts_of_a_domain(service: Service) -> None:
    session = service.visitors.session(None)
    batch = service.send(session, "finance", 3, Settings(domain="sql", max_new_tokens=4, check=True))
    ended(session)
    assert session.entries == [batch]
    assert (batch.is_done, batch.error, len(batch.answers)) == (True, None, 3)
    assert len({answer.prompt for answer in batch.answers}) == 3
    assert all(answer.is_done and answer.stats is not None for answer in batch.answers)
    assert {answer.domain for answer in batch.answers} == {"finance"}
    assert not any(answer.is_measured for answer in batch.answers)
    assert service.visitors.shared.count == 3
    more = service.send(session, "finance", 2, Settings(max_new_tokens=4))
    ended(session)
    assert not {a.prompt for a in more.answers} & {a.prompt for a in batch.answers}


def test_a_batch_stops_in_the_middle(service: Service) -> None:
    session = service.visitors.session(None)

    def stop_at_the_second() -> None:
        batch = session.entries[0]
        if isinstance(batch, Batch) and len(batch.answers) == 2 and batch.answers[1].tokens:
            batch.stop.set()

    told(session, stop_at_the_second)
    batch = service.send(session, "finance", 3, Settings(max_new_tokens=60))
    ended(session)
    assert (batch.is_done, batch.error) == (True, None)
    assert [answer.stopped for answer in batch.answers] == [False, True]
    assert all(answer.is_done for answer in batch.answers)
    assert service.visitors.shared.count == 2


def test_a_batch_with_a_prompt_that_does_not_fit_says_so(service: Service) -> None:
    session = service.visitors.session(None)
    batch = service.send(session, "sql", 3, Settings(max_new_tokens=200))
    ended(session)
    assert batch.is_done
    assert batch.error is not None
    assert "Shorten it" in batch.error
    assert asked(service, session, "one").error is None


def test_a_batch_learns_between_its_prompts(pair: ServedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "LEARNING_SECONDS", LONG)  # however slow learning is
    eager = {"update_strategy": "idle", "update_interval": 2, "steps_per_update": 1, "gate": False, "batch_size": 2}
    service = Service(pair, config=eager, threads=1)
    try:
        session = service.visitors.session(None)
        batch = service.send(session, "finance", 4, Settings(max_new_tokens=4))
        ended(session)
        assert batch.error is None
        assert not batch.is_learning
        assert [answer.version for answer in batch.answers] == [0, 0, 1, 1]
        assert len(service.visitors.shared.assistant.decisions) == 2
        assert service.visitors.shared.statistics()["learning_seconds"] > 0
    finally:
        service.close()


@pytest.mark.parametrize("asked_for", [None, 3])
def test_a_pair_that_is_about_to_serve_is_timed_for_the_number_of_threads(
    pair: ServedPair, monkeypatch: pytest.MonkeyPatch, asked_for: int | None
) -> None:
    asked: list[Any] = []

    def chosen(model: Any, answer: Callable[[], tuple[float, list[int]]], threads: int | None) -> tuple[int, Any]:
        asked.extend([model, len(answer()[1]), threads])
        return 1, {}

    monkeypatch.setattr(service_module, "choose_threads", chosen)
    Service(pair, config=MANUAL, threads=asked_for).close()
    assert asked == [pair.target, 4, asked_for]


@pytest.mark.parametrize("is_bundled", [True, False])
def test_on_the_bundled_pair_learning_is_so_eager_that_few_prompts_show_it(
    pair: ServedPair, monkeypatch: pytest.MonkeyPatch, is_bundled: bool
) -> None:
    monkeypatch.setattr(pair, "is_bundled", is_bundled)
    service = Service(pair, config={"batch_size": 3}, threads=1)
    config, usual = service.visitors.shared.assistant.config, OnlineConfig()
    service.close()
    is_eager = config.update_interval < usual.update_interval and config.steps_per_update > usual.steps_per_update
    assert is_eager == is_bundled
    assert (config.batch_size, config.update_strategy) == (3, "idle")


def test_a_closed_service_leaves_no_thread(pair: ServedPair) -> None:
    before = set(threading.enumerate())
    service = Service(pair, config={"update_strategy": "idle"}, threads=1)
    service.visitors.go_private(service.visitors.session(None), True)
    assert len(set(threading.enumerate()) - before) == 2
    service.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]


# --- what is told to others -----------------------------------------------------------------------------------------


def test_statistics_hold_no_text_of_anyone(service: Service) -> None:
    session = service.visitors.session(None)
    answer = asked(service, session, "swordfish 4711", Settings("sql", max_new_tokens=30))
    service.visitors.shared.assistant.update(1, domain="sql")
    told = service.visitors.shared.statistics()
    written = json.dumps(told, ensure_ascii=False)
    assert "swordfish" not in written
    assert "4711" not in written
    assert answer.text.strip()
    assert answer.text not in written
    assert told["requests"] == 1
    assert told["overall"]["requests"] == told["by_domain"]["sql"]["requests"] == 1
    assert told["overall"]["last_frozen_alpha"] == answer.frozen.alpha  # type: ignore[union-attr]
    assert [decision["outcome"] for decision in told["decisions"]] == ["promoted"]
    assert "reason" not in told["decisions"][0]


def test_a_push_is_of_a_draft_that_has_learned_and_says_where_it_is(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="draft of 'sql' has learned nothing yet"):
        service.visitors.shared.push("sql", "me/draft", "t")
    asked(service, service.visitors.session(None), "one", Settings("sql", max_new_tokens=4))
    service.visitors.shared.assistant.update(1, domain="sql")
    calls = []

    def push_to_hub(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "https://hub/me/draft"

    monkeypatch.setattr(service.visitors.shared.assistant, "push_to_hub", push_to_hub)
    assert service.visitors.shared.push("sql", " me/draft ", " t ") == "https://hub/me/draft"
    assert service.visitors.shared.push("sql", "me/draft", "") == "https://hub/me/draft"
    assert calls == [(("me/draft",), {"domain": "sql", "token": token}) for token in ("t", None)]


# --- strangers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def public(pair: ServedPair) -> Iterator[Service]:
    made = Service(pair, config=MANUAL, is_public=True, threads=1)
    yield made
    made.close()


def test_what_waited_for_a_private_draft_teaches_no_other_when_models_are_exchanged(
    service: Service, tmp_path: Path
) -> None:
    other = save_pair(tmp_path / "other", vocab_size=320)
    session, begun = service.visitors.session(None), service.visitors.session(None)
    service.visitors.go_private(session, True)
    room = session.room
    loading = threading.Thread(target=service.load, args=(str(other / "target"), str(other / "draft")))
    line = service.turns._line
    with service.turns.turn():
        loading.start()
        while not any(place.is_alone for place in list(line)):
            assert loading.is_alive()
        answer = service.ask(session, "a secret", SHORT, wants_private=True)
        batch = service.send(begun, "sql", 1, Settings(max_new_tokens=4))
    loading.join(PATIENCE)
    ended(session)
    ended(begun)
    assert not session.is_private
    assert session.room is service.visitors.shared is not room
    assert answer.error is None
    assert [token.text for token in answer.tokens] == texts(service.pair, targets_own(service.pair, "a secret"))
    assert session.notice is not None
    assert "no draft learns from it" in session.notice
    learned = service.visitors.shared.assistant._learner.lessons
    assert {domain: len(lesson.pending) for domain, lesson in learned.items()} == {"sql": len(batch.answers)} or (
        sum(len(lesson.pending) for lesson in learned.values()) == len(batch.answers)
    )
    assert room.count == 0
    assert not any(len(lesson.pending) for lesson in room.assistant._learner.lessons.values())


def test_a_private_draft_of_models_that_went_meanwhile_does_not_serve(
    service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, made = service.visitors.session(None), []

    def late(*args: Any, **kwargs: Any) -> Room:
        room = Room(*args, **kwargs)
        if not made:
            made.append(room)
            service.load(str(folder / "target"), str(folder / "draft"))
        return room

    monkeypatch.setattr(visitors_module, "Room", late)
    with pytest.raises(ConfigError, match="Another pair was loaded meanwhile"):
        service.visitors.go_private(session, True)
    assert not session.is_private
    assert session.room is service.visitors.shared
    assert not service.visitors.private


def test_many_who_want_drafts_of_their_own_at_once_get_no_more_copies_than_there_are_places(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors_module, "MAX_PRIVATE", 2)
    copies, most, go_on = [0], [0], threading.Event()
    lock, under_way = threading.Lock(), threading.Semaphore(0)

    class Counted(Room):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with lock:
                copies[0] += 1
                most[0] = max(most[0], copies[0])
            under_way.release()
            assert go_on.wait(PATIENCE)
            super().__init__(*args, **kwargs)

        def close(self) -> None:
            super().close()
            with lock:
                copies[0] -= 1

    monkeypatch.setattr(visitors_module, "Room", Counted)
    refused = []

    def toggle(session: Session) -> None:
        try:
            service.visitors.go_private(session, True)
        except ConfigError as error:
            refused.append(str(error))

    one = service.visitors.session(None)
    first = [threading.Thread(target=toggle, args=(session,)) for session in (one, service.visitors.session(None))]
    for thread in first:
        thread.start()
        assert under_way.acquire(timeout=PATIENCE)
    toggle(one)  # a second click meanwhile
    for _ in range(50):
        toggle(service.visitors.session(None))
    assert len(refused) == 51
    with pytest.raises(ConfigError, match="still being made"):
        service.ask(one, "one", SHORT)
    go_on.set()
    for thread in first:
        thread.join(PATIENCE)
    assert most == [2]
    assert len(service.visitors.private) == 2
    service.visitors.go_private(service.visitors.session(None), True)  # one makes room before the new one is made
    assert most == [2]


def test_a_stranger_takes_no_draft_from_another_and_makes_few(
    public: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = public.visitors.session(None, "192.0.2.1")
    public.visitors.go_private(own, True)
    for _ in range(3):
        public.visitors.go_private(public.visitors.session(None, "192.0.2.2"), True)
    assert own.is_private
    assert len(public.visitors.private) == 3  # theirs made room for their next
    with pytest.raises(ConfigError, match="made just now"):
        for _ in range(9):
            session = public.visitors.session(None, "192.0.2.2")
            public.visitors.go_private(session, True)
            public.visitors.go_private(session, False)
    assert own.is_private


def test_invented_names_evict_no_chat_of_another_visitor(public: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors_module, "MAX_SESSIONS", 12)
    own = public.visitors.session(None, "192.0.2.1")
    answer = asked(public, own, "one")
    empty = public.visitors.session(None, "192.0.2.1")
    for address in ("192.0.2.2", "192.0.2.3"):
        for i in range(40):
            public.visitors.session(f"program {address}-{i}", address)
            public.visitors.session(f"{i:022}", address)
    assert len(public.visitors.sessions) <= 12
    assert public.visitors.session(own.id, "192.0.2.1") is own
    assert public.visitors.session(empty.id, "192.0.2.1") is empty
    assert own.entries == [answer]
    newcomer = public.visitors.session(None, "192.0.2.4")
    assert public.visitors.session(newcomer.id, "192.0.2.4") is newcomer


def test_of_ones_own_chats_empty_ones_go_first(public: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors_module, "MAX_SESSIONS", 4)
    first = public.visitors.session(None, "192.0.2.1")
    asked(public, first, "one")
    for _ in range(5):
        public.visitors.session(None, "192.0.2.1")
    assert public.visitors.sessions.get(first.id) is first


def test_where_all_chats_are_in_use_one_more_is_refused_until_some_are_old(
    public: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors_module, "MAX_SESSIONS", 2)
    sessions = [public.visitors.session(None, f"192.0.2.{i}") for i in range(2)]
    with pytest.raises(ConfigError, match="Too many visitors are here"):
        public.visitors.session(None, "192.0.2.9")
    sessions[0].used -= visitors_module.ACTIVE_SECONDS + 1
    public.visitors.session(None, "192.0.2.9")
    assert sessions[0].id not in public.visitors.sessions
    assert sessions[1].id in public.visitors.sessions


def test_one_visitor_cannot_hold_all_places(public: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with public.turns.turn():
        taken = []
        with pytest.raises(ConfigError, match="from your address are waiting"):
            for _ in range(service_module.MAX_WAITING):
                guest = public.visitors.guest("192.0.2.1")
                taken.append((guest, public.ask(guest, "one", SHORT)))
        assert len(taken) == service_module.MAX_WAITING // 2
        other = public.visitors.guest("192.0.2.2")
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
    monkeypatch.setattr(visitors_module, "AWAY_SECONDS", -1.0)
    waiting, running, back = (public.visitors.session(None, f"192.0.2.{i}") for i in range(3))
    long = Settings("sql", max_new_tokens=100)
    with public.turns.turn():
        queued = public.ask(waiting, "one", long)
        ended(waiting)
        assert queued.stopped
        assert len(public.turns) == 1
    with running.watched():
        left = threading.Event()
        told(running, lambda: running.watchers and len(running.entries[0].text) > 8 and left.set())  # type: ignore[union-attr]
        answer = public.ask(running, "one", long)
        assert left.wait(PATIENCE)
    ended(running)
    assert answer.stopped
    with back.watched():
        assert not asked(public, back, "one").stopped
    assert not asked(service, service.visitors.session(None), "one").stopped  # an owner may leave


def test_strangers_get_shorter_answers(public: Service, service: Service) -> None:
    session = public.visitors.session(None, "192.0.2.1")
    with pytest.raises(ConfigError, match="`max_new_tokens` is at most 192, got 200"):
        public.ask(session, "one", Settings(max_new_tokens=200))
    batch = public.send(session, "sql", 1, Settings(max_new_tokens=200))
    ended(session)
    assert batch.answers[0].settings.max_new_tokens == 192
    assert asked(service, service.visitors.session(None), "one", Settings(max_new_tokens=200)).error is None


def test_a_huge_prompt_is_refused_before_it_is_looked_through(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(*args: Any) -> str:
        raise AssertionError("every character was looked at")

    monkeypatch.setattr(service_module.unicodedata, "category", looked)
    with pytest.raises(ConfigError, match="10,000,000 characters, at most"):
        service.ask(service.visitors.session(None), "x" * 10_000_000, SHORT)


def test_texts_of_all_chats_are_bounded_and_those_of_whoever_has_most_go(
    public: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    modest = public.visitors.session(None, "192.0.2.1")
    kept = asked(public, modest, "one", Settings("sql", max_new_tokens=2))
    monkeypatch.setattr(visitors_module, "MAX_KEPT_BYTES", 4 * kept.kept_bytes)
    for _ in range(6):
        asked(public, public.visitors.session(None, "192.0.2.2"), "two", Settings("sql", max_new_tokens=2))
    assert modest.entries == [kept]
    assert (
        sum(entry.kept_bytes for s in public.visitors.sessions.values() for entry in s.entries) <= 4 * kept.kept_bytes
    )


def test_a_chat_that_was_cleared_weighs_nothing(public: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared = public.visitors.session(None, "192.0.2.1")
    kept = asked(public, cleared, "one", Settings("sql", max_new_tokens=2))
    public.visitors.clear(cleared)
    assert cleared.kept_bytes == 0
    monkeypatch.setattr(visitors_module, "MAX_KEPT_BYTES", kept.kept_bytes)
    other = public.visitors.session(None, "192.0.2.1")
    assert other.entries == [asked(public, other, "one", Settings("sql", max_new_tokens=2))]


def test_a_chat_that_is_being_answered_keeps_no_other_from_making_room(
    public: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, done, last = (public.visitors.session(None, f"192.0.2.{number}") for number in (1, 2, 3))
    busy.entries, done.entries = [Answer("x" * 9000, SHORT)], [Answer("y" * 100, SHORT, is_done=True)]
    busy.kept_bytes, done.kept_bytes = busy.entries[0].kept_bytes, done.entries[0].kept_bytes
    monkeypatch.setattr(visitors_module, "MAX_KEPT_BYTES", 1)
    asked(public, last, "one", Settings("sql", max_new_tokens=2))  # ends, though there is more than may be
    assert (len(busy.entries), done.entries, last.entries) == (1, [], [])


def test_suggested_prompts_come_again_rather_than_growing_without_bound(
    pair: ServedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_module, "MAX_SAMPLES", 8)
    monkeypatch.setattr(pair, "_samples", {"sql": []})
    monkeypatch.setattr(pair, "_asked", {"sql": 0})
    asked_for: list[int] = []

    def counted(domain: str, count: int) -> list[Any]:
        asked_for.append(count)
        return bundled_prompts(domain, count)

    monkeypatch.setattr(pair_module, "bundled_prompts", counted)
    found = [prompt for _ in range(9) for prompt in pair.samples("sql", 3)]
    assert found == 3 * found[:8] + found[:3]
    assert len(set(found)) == 8
    assert asked_for == [6, 8]


def test_an_answer_that_gives_way_is_the_targets_own(public: Service, pair: ServedPair) -> None:
    hog, modest = public.visitors.session(None, "192.0.2.1"), public.visitors.session(None, "192.0.2.2")
    settings = Settings("sql", max_new_tokens=40, check=True)
    asked(public, hog, "one", settings)
    beside: list[Answer] = []
    waits = threading.Event()
    has_begun_beside: list[bool] = []

    def press() -> None:
        if hog.job is not None and hog.job.tokens and not beside:  # type: ignore[union-attr]
            beside.append(public.ask(modest, "two", settings))
            assert waits.wait(PATIENCE)

    def see() -> None:
        if modest.job is not None and modest.job.waiting:  # type: ignore[union-attr]
            waits.set()
        if modest.job is not None and modest.job.tokens and not has_begun_beside:  # type: ignore[union-attr]
            has_begun_beside.append(hog.job is not None)

    told(hog, press)
    told(modest, see)
    public.turns._done |= {"192.0.2.1": 1000.0, "192.0.2.2": 0.0}
    first = asked(public, hog, "three", settings)
    ended(modest)
    assert has_begun_beside == [True]
    assert first.is_identical is beside[0].is_identical is True
    assert [t.text for t in first.tokens] == texts(pair, targets_own(pair, "three", settings))
    assert [t.text for t in beside[0].tokens] == texts(pair, targets_own(pair, "two", settings))
    assert public.visitors.shared.assistant._learner.is_paused is False
