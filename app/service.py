"""What serves all visitors: one pair of models, a room that they share, their chats, and whose turn it is."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from osd_hf import (
    AcceptanceStats,
    ConfigError,
    LearnerError,
    OnlineConfig,
    OSDError,
    Trace,
    capture_traces,
    emitted_tokens,
)
from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf.replay import replay_each
from osd_hf_app.answers import Answer, Batch, Settings, ShownToken
from osd_hf_app.domains import OTHER, classifier
from osd_hf_app.pair import Pair
from osd_hf_app.pieces import Pieces, text_of
from osd_hf_app.room import Room
from osd_hf_app.turns import Turns

__all__ = ["Service", "Session"]

logger = logging.getLogger(__name__)

K = 5  # at which both drafts of the curves are replayed
MAX_CHARACTERS = 20_000  # of a prompt
MAX_ENTRIES = 100  # of a chat; the oldest go
MAX_SESSIONS = 500  # chats kept; the one that was not used for longest goes
MAX_PRIVATE = 4  # rooms of one visitor; the one that was not used for longest goes
SAMPLES = 200  # prompts per domain that the classifier learns from
LEARNING_SECONDS = 30.0  # that a batch waits at most between two prompts for what is due to be learned
WARM_UP = "Who are you?"


def config_of(pair: Pair, **changes: Any) -> OnlineConfig:
    """Learning between requests; on the bundled pair so eagerly that twenty prompts show."""
    eager = {"update_interval": 2, "steps_per_update": 16, "weight_average": 0.9} if pair.is_bundled else {}
    return OnlineConfig(**{"update_strategy": "idle", **eager, **changes})


@dataclass(eq=False)
class Session:
    """A visitor's chat."""

    id: str
    room: Room
    is_private: bool = False
    entries: list[Answer | Batch] = field(default_factory=list)
    corrections: Counter[tuple[str, str]] = field(default_factory=Counter)
    revision: int = 0
    notice: str | None = None
    job: Answer | Batch | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def touch(self) -> None:
        """Tell those who watch that something is new."""
        with self.changed:
            self.revision += 1
            self.changed.notify_all()

    def wait(self, revision: int, timeout: float) -> int:
        """Wait for something newer than a revision; gives the newest."""
        with self.changed:
            self.changed.wait_for(lambda: self.revision != revision, timeout)
            return self.revision


class _Rounds(BaseStreamer):
    """Takes the tokens of each round as the loop emits them."""

    def __init__(self, take: Callable[[list[int]], None]) -> None:
        self._take = take
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._take(value.reshape(-1).tolist())

    def end(self) -> None:
        pass


class _Stop(StoppingCriteria):
    """Ends an answer that its visitor has stopped."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._stop.is_set(), device=input_ids.device)

    def __deepcopy__(self, memo: Any) -> _Stop:
        return self  # the copy that is asked about drafted tokens heeds the same visitor


class Service:
    """
    Answers prompts, one at a time, whoever asks.

    Args:
        pair (`Pair`):
            The models.
        state (`Path`, *optional*):
            A saved session that the shared room goes on with.
        config (`dict[str, Any]`, *optional*):
            Settings of `OnlineConfig` in place of the app's.
    """

    def __init__(self, pair: Pair, state: Path | None = None, config: dict[str, Any] | None = None) -> None:
        self._config = config or {}
        self.pair = pair
        self.turns = Turns()
        self.shared = Room(pair, config_of(pair, **self._config), state)
        self.private: OrderedDict[str, Room] = OrderedDict()
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.domain_of = classifier({d: [e.prompt for e in bundled_prompts(d, SAMPLES, seed=1)] for d in DOMAINS})
        self.alone: deque[tuple[float, int]] = deque(maxlen=20)
        self._lock = threading.RLock()
        self._warm_up(pair)

    def _warm_up(self, pair: Pair) -> None:
        """What only the first request pays, and how long the target takes alone."""
        for count in (2, 24):
            ids = pair.encode(WARM_UP, count)
            seconds, emitted = self._timed_alone(pair, ids, {"do_sample": False, "max_new_tokens": count})
        self.alone.clear()
        self.alone.append((seconds, len(emitted)))

    # --- visitors ---------------------------------------------------------------------------------------------------

    def session(self, session_id: str | None, *, program: bool = False) -> Session:
        """
        A visitor's chat; a new one, with a name that cannot be guessed, where there is none of that name. That of a
        program is named as it says: it has no page that could keep another name.
        """
        with self._lock:
            found = self.sessions.get(session_id or "")
            if found is None:
                name = session_id if program and session_id else secrets.token_urlsafe(16)
                found = Session(name, self.shared)
                self.sessions[found.id] = found
                for other in [s for s in self.sessions.values() if s.job is None and s is not found]:
                    if len(self.sessions) <= MAX_SESSIONS:
                        break
                    self.sessions.pop(other.id)
            self.sessions.move_to_end(found.id)
            return found

    def go_private(self, session: Session, is_private: bool) -> None:
        """Give a visitor a draft of their own, which learns from nobody else; or let them share again, when their own
        is forgotten. Raises ConfigError in the middle of an answer."""
        self._check_free(session)
        with self._lock:
            if is_private == session.is_private:
                return
            if is_private:
                self.private[session.id] = Room(self.pair, self.shared.config)
                session.room, session.is_private = self.private[session.id], True
                busy = {s.id for s in self.sessions.values() if s.job is not None}
                for owner in [o for o in self.private if o not in busy | {session.id}]:
                    if len(self.private) <= MAX_PRIVATE:
                        break
                    self._leave(owner, "Your own draft was let go to make room for other visitors.")
            else:
                self._leave(session.id, None)
        session.touch()

    def _leave(self, owner: str, notice: str | None) -> None:
        self.private.pop(owner).close()
        session = self.sessions.get(owner)
        if session is not None:
            session.room, session.is_private, session.notice = self.shared, False, notice
            session.touch()

    def clear(self, session: Session) -> None:
        """Forget a chat."""
        self._check_free(session)
        session.entries.clear()
        session.corrections.clear()
        session.notice = None
        session.touch()

    def _check_free(self, session: Session) -> None:
        if session.job is not None:
            raise ConfigError("This chat is still being answered. Wait for the end, or stop it.")

    # --- answers ----------------------------------------------------------------------------------------------------

    def ask(self, session: Session, prompt: str, settings: Settings) -> Answer:
        """
        Begin to answer a prompt; the answer grows by itself, whether anybody watches or not.

        Raises:
            ConfigError: an empty or too long prompt, an unknown domain, or the chat is still being answered.
        """
        text = "".join(c for c in prompt if c in "\n\t" or c.isprintable()).strip()
        if not text:
            raise ConfigError("The prompt is empty. Write something first.")
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(f"The prompt has {len(text):,} characters, at most {MAX_CHARACTERS:,} are taken.")
        answer = Answer(text, settings, self._domain(text, settings))
        history = [
            (entry.prompt, entry.text)
            for entry in session.entries
            if settings.remember and isinstance(entry, Answer) and entry.error is None
        ]
        self.pair.encode(text, settings.max_new_tokens, history)  # what does not fit is said at once
        self._begin(session, answer, lambda: self._answer(session, answer, history))
        return answer

    def send(self, session: Session, domain: str, count: int, settings: Settings) -> Batch:
        """
        Begin to send prompts of a domain one after the other, letting the draft learn in between what is due.

        Raises:
            ConfigError: an unknown domain, or the chat is still being answered.
        """
        if domain not in DOMAINS:
            raise ConfigError(f"There are prompts of {', '.join(DOMAINS)}, got {domain!r}.")
        batch = Batch(domain, count)
        settings = replace(settings, domain=domain, check=False, remember=False)
        self._begin(session, batch, lambda: self._batch(session, batch, settings))
        return batch

    def _domain(self, text: str, settings: Settings) -> str:
        if settings.domain not in (None, OTHER, *DOMAINS):
            raise ConfigError(f"The domain must be one of {', '.join((*DOMAINS, OTHER))}, got {settings.domain!r}.")
        return settings.domain or self.domain_of(text)

    def _begin(self, session: Session, job: Answer | Batch, work: Callable[[], None]) -> None:
        with self._lock:
            self._check_free(session)
            session.job, session.notice = job, None
            session.entries.append(job)
            del session.entries[:-MAX_ENTRIES]

        def run() -> None:
            try:
                work()
            except OSDError as error:
                job.error = str(error)
            except Exception as error:
                logger.exception("An answer failed.")
                job.error = f"This failed ({type(error).__name__}). The log of the app says more."
            finally:
                job.is_done, session.job = True, None
                session.touch()

        session.touch()
        threading.Thread(target=run, name="osd_hf-answer", daemon=True).start()

    def _batch(self, session: Session, batch: Batch, settings: Settings) -> None:
        for prompt in self.pair.samples(batch.domain, batch.total):
            if batch.stop.is_set():
                return
            answer = Answer(prompt, settings, batch.domain, stop=batch.stop)
            batch.answers.append(answer)
            self._answer(session, answer, [])
            answer.is_done = True
            batch.is_learning = settings.learn and session.room.assistant.is_learning
            session.touch()
            if batch.is_learning:
                session.room.assistant.wait_until_idle(LEARNING_SECONDS)
                batch.is_learning = False

    def _answer(self, session: Session, answer: Answer, history: list[tuple[str, str]]) -> None:
        answer.waiting = len(self.turns)
        with self.turns.turn():
            answer.waiting = 0
            room = session.room
            pair, settings = room.pair, answer.settings
            ids = pair.encode(answer.prompt, settings.max_new_tokens, history)
            pieces = Pieces(pair.tokenizer)
            traces: list[Trace] = []
            started = time.perf_counter()

            def take(round_ids: list[int]) -> None:
                if answer.first_token_seconds is None:
                    answer.first_token_seconds = time.perf_counter() - started
                shown = len(pieces.texts)
                pieces.push(round_ids)
                kinds = ["accepted"] * (len(round_ids) - 1) + ["target"]
                answer.tokens += [ShownToken(*t) for t in zip(pieces.texts[shown:], kinds, strict=True)]
                session.touch()

            with self._others_paused(room), room.assistant.drafts.lease(answer.domain) as serving:
                with capture_traces(pair.target, traces.append, num_logprobs=room.config.num_logprobs):
                    output = self._generated(room, ids, answer, _Rounds(take))
                answer.seconds = time.perf_counter() - started
                self._scored(session, answer, traces, serving)
                answer.stopped = answer.stop.is_set()
                if settings.check and not answer.stopped:
                    seconds, emitted = self._timed_alone(pair, ids, settings.generate_kwargs, room)
                    self.alone.append((seconds, len(emitted)))
                    own = output[0] if pair.seq2seq else output[0, ids.shape[1] :]
                    answer.is_identical = None if settings.do_sample else emitted == own.tolist()
                    if emitted:
                        answer.alone_seconds = seconds * (answer.stats.emitted if answer.stats else 0) / len(emitted)
                        answer.is_measured = True
                elif answer.stats is not None:
                    total, tokens = (sum(column) for column in zip(*self.alone, strict=True))
                    answer.alone_seconds = total / tokens * answer.stats.emitted

    def _generated(self, room: Room, ids: torch.Tensor, answer: Answer, streamer: _Rounds) -> torch.Tensor:
        while True:
            try:
                output: torch.Tensor = room.assistant.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    domain=answer.domain,
                    learn=answer.settings.learn,
                    num_assistant_tokens=answer.settings.k,
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([_Stop(answer.stop)]),
                    **answer.settings.generate_kwargs,
                )
                return output
            except LearnerError as error:  # of an earlier request: raised before this one began
                room.failure = str(error)

    def _scored(self, session: Session, answer: Answer, traces: list[Trace], serving: Any) -> None:
        if not traces:
            return
        trace, pair = traces[0], session.room.pair
        origins = emitted_tokens(trace, serving.model)
        pieces = Pieces(pair.tokenizer)
        pieces.push(token.id for token in origins)
        answer.tokens = [
            ShownToken(
                text,
                token.origin,
                None if token.drafted_id is None else text_of(pair.tokenizer, [token.drafted_id]),
                token.drafted_prob,
            )
            for text, token in zip(pieces.texts, origins, strict=True)
        ]
        answer.stats, answer.version = AcceptanceStats.from_trace(trace), serving.version
        answer.learning, answer.frozen = (replay_each(draft, [trace], K)[0] for draft in (serving.model, pair.draft))
        session.room.add(answer.domain, answer.learning, answer.frozen, serving.version)
        for shown, token in zip(answer.tokens, origins, strict=True):
            if shown.said is not None:
                session.corrections[shown.said, text_of(pair.tokenizer, [token.id])] += 1
        session.touch()

    def _timed_alone(
        self, pair: Pair, ids: torch.Tensor, settings: dict[str, Any], room: Room | None = None
    ) -> tuple[float, list[int]]:
        """Seconds and tokens of the target alone, while nobody learns beside it."""
        with contextlib.ExitStack() as stack:
            if room is not None:
                room.assistant.pause()
                stack.callback(room.assistant.resume)
            started = time.perf_counter()
            output = pair.target.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            seconds = time.perf_counter() - started
        return seconds, (output[0] if pair.seq2seq else output[0, ids.shape[1] :]).tolist()

    @contextlib.contextmanager
    def _others_paused(self, room: Room) -> Iterator[None]:
        """Drafts of other rooms do not learn while a request of this one runs."""
        others = [other.assistant for other in (self.shared, *self.private.values()) if other is not room]
        for assistant in others:
            assistant.pause()
        try:
            yield
        finally:
            for assistant in others:
                assistant.resume()

    # --- what changes for all ---------------------------------------------------------------------------------------

    def reset(self, room: Room) -> None:
        """Forget what a room's draft has learned, between two requests."""
        with self.turns.turn():
            room.reset()
        self._touch_all(room)

    def load(self, target: str | None, draft: str | None, **settings: Any) -> None:
        """
        Serve another pair, with new rooms; chats stay, to be read.

        Raises:
            OSDError: the models cannot be loaded, or do not fit together; those that serve stay.
        """
        pair = Pair(target, draft, **settings)
        with self.turns.turn():
            shared = Room(pair, config_of(pair, **self._config))
            try:
                self._warm_up(pair)
            except Exception:
                shared.close()
                raise
            with self._lock:
                for owner in list(self.private):
                    self._leave(owner, None)
                old, self.shared, self.pair = self.shared, shared, pair
                for session in self.sessions.values():
                    session.room = shared
            old.close()
        self._touch_all(shared)

    def _touch_all(self, room: Room) -> None:
        for session in list(self.sessions.values()):
            if session.room is room:
                session.touch()

    def close(self) -> None:
        """End learning in all rooms."""
        for room in (self.shared, *self.private.values()):
            room.close()
