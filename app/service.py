"""What serves all visitors: one pair of models, a room that they share, their chats, and whose turn it is."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
import time
import unicodedata
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
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
from osd_hf.bundled.prompts import DOMAINS, bundled_prompts
from osd_hf.replay import replay_each
from osd_hf_app.answers import Answer, Batch, Settings, ShownToken
from osd_hf_app.domains import OTHER, classifier
from osd_hf_app.pair import Pair, use_threads
from osd_hf_app.pieces import Pieces, text_of
from osd_hf_app.room import Room
from osd_hf_app.turns import MAX_BEGUN, Turn, Turns
from osd_hf_app.visitors import Rate, Shares

__all__ = ["Service", "Session"]

logger = logging.getLogger(__name__)

K = 5  # at which both drafts of the curves are replayed
MAX_CHARACTERS = 20_000  # of a prompt
MAX_ENTRIES = 20  # of a chat, as many as are shown; the oldest go
MAX_SESSIONS = 500  # chats kept; the one that was not used for longest goes
MAX_KEPT_BYTES = 64 * 2**20  # of all chats, about; the oldest of whoever has most go
MAX_PRIVATE = 4  # rooms of one visitor, one for a pair of one's own; the one that was not used for longest goes
MAX_WAITING = 32  # jobs at once
SMALL_BEGUN = 16  # answers at once that have begun, where models are so small that their caches do not count
MAX_CORRECTIONS = 500  # kinds of them counted in a chat; the rarest go
PUBLIC_NEW_TOKENS = 192  # at most, where strangers share the models
PRIVATE_RATE = (8, 60.0)  # drafts of strangers' own that are made at most, in so many seconds
ACTIVE_SECONDS = 600.0  # after its last use a stranger's chat or draft makes no room for another stranger's
AWAY_SECONDS = 20.0  # after which what a stranger has left is stopped; a page that is loaded anew is back before
LET_GO = "Your own draft was let go to make room for other visitors; the draft that all share serves you now."
PAIR_LEFT = "Another pair is served now; your own draft went."
FULL = "Too many visitors are here at the moment. Try again in a few minutes."
SAMPLES = 200  # prompts per domain that the classifier learns from
STOP_SECONDS = 0.2  # within which a batch that waits heeds its visitor
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
    visitor: str | None = None
    is_moving: bool = False  # to a draft of one's own, which is being made
    watchers: int = 0
    used: float = field(default_factory=time.monotonic)
    left: float = 0.0  # when nobody watched any more
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        lock = threading.Lock()
        self.changed = threading.Condition(lock)
        self._urgent = threading.Condition(lock)  # who waits for what is urgent does not wake in every round
        self._shown_at_once = 0

    def touch(self, *, is_first: bool = False) -> None:
        """Tell those who watch that something is new; first tokens, and the end, are shown at once."""
        with self.changed:
            self.revision += 1
            self.changed.notify_all()
            if is_first or self.job is None:
                self._shown_at_once += 1
                self._urgent.notify_all()

    def frames(self, seconds: float, look_seconds: float) -> Iterator[None]:
        """
        The moments at which to show what has come of what is being answered: at once, then when something is new but
        no more often than in so many seconds, or when nothing was for as long as to look whether the page is still
        there; the last one when all is done. Whoever goes on with them counts as watching.
        """
        with self.watched():
            while True:
                began = time.monotonic()
                with self.changed:
                    revision, urgent, is_busy = self.revision, self._shown_at_once, self.job is not None
                yield
                if not is_busy:
                    return
                self._wait(revision, urgent, began + seconds - time.monotonic(), look_seconds)

    def _wait(self, revision: int, urgent: int, seconds: float, look_seconds: float) -> None:
        with self.changed:
            self._urgent.wait_for(lambda: self._shown_at_once != urgent, max(seconds, 0.0))
            self.changed.wait_for(lambda: self.revision != revision, look_seconds)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While somebody looks at what is being answered."""
        with self.changed:
            self.watchers += 1
        try:
            yield
        finally:
            with self.changed:
                self.watchers -= 1
                self.left = time.monotonic()

    @property
    def is_left(self) -> bool:
        """Whether a stranger has gone who had asked for something."""
        return self.visitor is not None and not self.watchers and time.monotonic() - self.left > AWAY_SECONDS


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

    is_stateless = True  # a stop that comes while the criterion is checked would pass for its memory

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._stop.is_set(), device=input_ids.device)


class Service:
    """
    Answers prompts, one at a time, whoever asks.

    Args:
        pair (`Pair`):
            The models.
        state (`Path`, *optional*):
            A saved session that the shared room goes on with.
        config (`dict[str, Any]`, *optional*):
            Settings of `OnlineConfig` in place of the app's; learning is paused during requests, so that the strategy
            `"interval"` never learns.
        is_public (`bool`, *optional*, defaults to `False`):
            Whether strangers come, each of whom then has limits: answers are shorter, and stop when they leave.
        threads (`int`, *optional*):
            Of torch; by default one for the bundled pair, which is too small for more, and all cores for others.
        load_settings (`Any`):
            `dtype` and `device` of the pairs that are loaded later.
    """

    def __init__(
        self,
        pair: Pair,
        state: Path | None = None,
        config: dict[str, Any] | None = None,
        *,
        is_public: bool = False,
        threads: int | None = None,
        **load_settings: Any,
    ) -> None:
        self.is_public = is_public
        self._config = config or {}
        self._threads = threads
        self._load_settings = load_settings
        use_threads(pair, threads)
        self.pair = pair
        self.turns = Turns()
        self.turns.max_begun = SMALL_BEGUN if pair.is_bundled else MAX_BEGUN
        self.shared = Room(pair, config_of(pair, **self._config), state)
        self.private: OrderedDict[str, Room] = OrderedDict()
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.domain_of = classifier({d: [e.prompt for e in bundled_prompts(d, SAMPLES, seed=1)] for d in DOMAINS})
        self.alone: deque[tuple[float, int]] = deque(maxlen=20)
        self._lock = threading.RLock()
        self._jobs = Shares(MAX_WAITING)
        self._making: list[Session] = []  # whose drafts are being made
        self._private_rate = Rate(*PRIVATE_RATE)
        self._answering = 0
        self._warm_up(pair)

    def _warm_up(self, pair: Pair) -> None:
        """What only the first request pays, and how long the target takes alone."""
        for count in (2, 24):
            ids = pair.encode(WARM_UP, count)
            seconds, emitted = self._timed_alone(pair, ids, {"do_sample": False, "max_new_tokens": count})
        self.alone.clear()
        self.alone.append((seconds, len(emitted)))

    # --- visitors ---------------------------------------------------------------------------------------------------

    def session(self, session_id: str | None, visitor: str | None = None) -> Session:
        """
        A visitor's chat, by a name that cannot be guessed; a new one where there is none of that name.

        Args:
            session_id (`str`, *optional*):
                The name.
            visitor (`str`, *optional*):
                Who the stranger is, as far as limits go; `None` is somebody who is trusted.

        Raises:
            ConfigError: so many strangers chat that none of their chats can go.
        """
        evicted: list[Session] = []
        with self._lock:
            found = self.sessions.get(session_id or "")
            if found is None:
                # A page that was open while the app was started anew keeps its name.
                is_name = re.fullmatch(r"[\w-]{22}|program [\w-]{1,64}", session_id or "", re.ASCII)
                name = session_id if session_id and is_name else secrets.token_urlsafe(16)
                found = Session(name, self.shared, visitor=visitor)
                evicted = self._make_room(visitor)
                self.sessions[found.id] = found
            self.sessions.move_to_end(found.id)
            found.used = time.monotonic()
            if found.id in self.private:
                self.private.move_to_end(found.id)
            closing = [self.private.pop(gone.id) for gone in evicted if gone.id in self.private]
        _close(closing)
        return found

    def guest(self, visitor: str | None = None) -> Session:
        """A chat that nobody comes back to, and that is not kept."""
        return Session("", self.shared, visitor=visitor)

    def _make_room(self, visitor: str | None) -> list[Session]:
        """
        Chats that went so that one more can come. A stranger may have as many as there are places left, and makes room
        with chats of their own first; else whoever has most makes room, if they have more than one more. Empty ones go
        before others.
        """
        held = sum(session.visitor == visitor for session in self.sessions.values())
        free = MAX_SESSIONS - len(self.sessions)
        if held < free if visitor is not None else free > 0:
            return []
        idle = [session for session in self.sessions.values() if session.job is None and not session.is_moving]
        if visitor is None:
            going = idle[: 1 - free]
        else:
            going = [session for session in idle if session.visitor == visitor]
            if not going and free <= 0:
                chats = Counter(session.visitor for session in self.sessions.values())
                most = max((session.visitor for session in idle), key=lambda other: chats[other], default=visitor)
                long_ago = time.monotonic() - ACTIVE_SECONDS
                going = [s for s in idle if s.used < long_ago or (s.visitor == most and chats[most] > held + 1)]
            going = sorted(going, key=lambda session: bool(session.entries))[:1]
            if not going and free <= 0:
                raise ConfigError(FULL)
        for session in going:
            self.sessions.pop(session.id)
        return going

    def _weigh(self, session: Session) -> None:
        """Count what a chat holds, and let go of the oldest of whoever holds most, where all hold too much."""
        with self._lock:
            session.kept_bytes = sum(entry.kept_bytes for entry in session.entries)
            by_visitor: Counter[str | None] = Counter()
            for other in self.sessions.values():
                by_visitor[other.visitor] += other.kept_bytes
            left = [other for other in self.sessions.values() if other.kept_bytes]  # each has its turn once
            while left and by_visitor.total() > MAX_KEPT_BYTES:
                oldest = max(left, key=lambda other: by_visitor[other.visitor])  # the first one of whoever has most
                left.remove(oldest)
                before, count = oldest.kept_bytes, len(oldest.entries)
                oldest.entries = [entry for entry in oldest.entries if not entry.is_done]
                oldest.kept_bytes = sum(entry.kept_bytes for entry in oldest.entries)
                by_visitor[oldest.visitor] += oldest.kept_bytes - before
                if len(oldest.entries) < count:
                    oldest.touch()

    def go_private(self, session: Session, is_private: bool) -> None:
        """
        Give a visitor a draft of their own, which learns from nobody else; or let them share again, when their own is
        forgotten. There are never more drafts than `MAX_PRIVATE`, those included that are being made.

        Raises:
            ConfigError: in the middle of an answer, or while one is being made for this chat already; there is no
                place for one more; a stranger has had too many of late.
        """
        with self._lock:
            if is_private == session.is_private:
                return
            self._check_free(session)
            leaving = None if is_private else self._leave(session, None)
        if leaving is not None:
            leaving.close()
            return
        with self._lock:
            self._check_free(session)
            if session.is_private:
                return
            closing = self._private_place(session)
            session.is_moving = True
            self._making.append(session)
            pair = self.pair
        room: Room | None = None
        try:
            _close(closing)  # before the new one is made: memory has room for so many and no more
            room = Room(pair, self.shared.config)  # takes a while: nobody waits for it
            with self._lock:
                if pair is not self.pair:
                    raise ConfigError("Another pair was loaded meanwhile. Tick the box again.")
                if self.sessions.get(session.id) is session:
                    self.private[session.id] = room
                    session.room, session.is_private, session.notice = room, True, None
                    if self._answering:
                        room.assistant.pause()
                    room = None
        finally:
            with self._lock:
                session.is_moving = False
                self._making.remove(session)
            _close([] if room is None else [room])
            session.touch()

    def _private_place(self, session: Session) -> list[Room]:
        """Rooms that are to be closed before one more is made."""
        visitor, most = session.visitor, MAX_PRIVATE if self.pair.per_domain else 1
        owners = [s for name in self.private if (s := self.sessions.get(name)) is not None]  # longest unused first
        held = sum(s.visitor == visitor for s in (*owners, *self._making))
        free = most - len(self.private) - len(self._making)
        going: list[Session] = []
        if not (held < free if visitor is not None else free > 0):
            idle = [s for s in owners if s.job is None]
            if visitor is not None:
                long_ago = time.monotonic() - ACTIVE_SECONDS
                idle = [s for s in idle if s.visitor == visitor] or [s for s in idle if s.used < long_ago]
            going = idle[:1]
            if not going and free <= 0:
                raise ConfigError("All drafts of visitors' own are in use at the moment. Try again in a few minutes.")
        if visitor is not None and not self._private_rate.take(visitor):
            raise ConfigError("Too many drafts of visitors' own were made just now. Try again in a minute.")
        return [self._leave(other, LET_GO) for other in going]

    def _leave(self, session: Session, notice: str | None) -> Room:
        """Let a visitor share again; gives the room that is to be closed."""
        room = self.private.pop(session.id)
        session.room, session.is_private, session.notice = self.shared, False, notice
        session.touch()
        return room

    def clear(self, session: Session) -> None:
        """Forget a chat."""
        with self._lock:
            self._check_free(session)
            session.entries = []
            session.kept_bytes = 0
            session.corrections = Counter()
            session.notice = None
        session.touch()

    def _check_free(self, session: Session) -> None:
        if session.job is not None:
            raise ConfigError("This chat is still being answered. Wait for the end, or stop it.")
        if session.is_moving:
            raise ConfigError("Your own draft is still being made. Try again in a moment.")

    # --- answers ----------------------------------------------------------------------------------------------------

    def ask(self, session: Session, prompt: str, settings: Settings, *, wants_private: bool | None = None) -> Answer:
        """
        Begin to answer a prompt; the answer grows by itself, whether anybody watches or not.

        Args:
            session (`Session`):
                Whose chat.
            prompt (`str`):
                As it was typed.
            settings (`Settings`):
                How to answer.
            wants_private (`bool`, *optional*):
                Whether the visitor believes to have a draft of their own: nobody else's learns from what is meant for
                it.

        Raises:
            ConfigError: an empty or too long prompt, an unknown domain, the chat is still being answered, too many
                wait, or the visitor's own draft is gone.
        """
        if len(prompt) > 2 * MAX_CHARACTERS:  # nobody's is so long, and all that follows costs time
            raise ConfigError(_too_long(prompt.strip()))
        if self.is_public and settings.max_new_tokens > PUBLIC_NEW_TOKENS:
            raise ConfigError(
                f"Visitors share this app: `max_new_tokens` is at most {PUBLIC_NEW_TOKENS}, got "
                f"{settings.max_new_tokens}."
            )
        text = "".join(c for c in prompt if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs")).strip()
        if not text:
            raise ConfigError("The prompt is empty. Write something first.")
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(_too_long(text))
        answer = Answer(text, settings, self._domain(text, settings))
        history = [
            (entry.prompt, entry.text)
            for entry in session.entries
            if settings.remember and isinstance(entry, Answer) and entry.error is None
        ]
        self.pair.encode(text, settings.max_new_tokens, history)  # what does not fit is said at once
        self._begin(session, answer, lambda: self._answer(session, answer, history), wants_private)
        return answer

    def send(
        self, session: Session, domain: str, count: int, settings: Settings, *, wants_private: bool | None = None
    ) -> Batch:
        """
        Begin to send prompts of a domain one after the other, letting the draft learn in between what is due, as long
        as nobody else asks.

        Raises:
            ConfigError: as of [`~Service.ask`].
        """
        if domain not in DOMAINS:
            raise ConfigError(f"There are prompts of {', '.join(DOMAINS)}, got {domain!r}.")
        batch = Batch(domain, count)
        tokens = min(settings.max_new_tokens, PUBLIC_NEW_TOKENS) if self.is_public else settings.max_new_tokens
        settings = replace(settings, domain=domain, check=False, remember=False, max_new_tokens=tokens)
        self._begin(session, batch, lambda: self._batch(session, batch, settings), wants_private)
        return batch

    def _domain(self, text: str, settings: Settings) -> str:
        if settings.domain not in (None, OTHER, *DOMAINS):
            raise ConfigError(f"The domain must be one of {', '.join((*DOMAINS, OTHER))}, got {settings.domain!r}.")
        return settings.domain or self.domain_of(text)

    def _begin(
        self, session: Session, job: Answer | Batch, work: Callable[[], None], wants_private: bool | None
    ) -> None:
        if session.visitor is None and len(self.turns) >= MAX_WAITING:
            raise ConfigError("Too many visitors are waiting for an answer. Try again in a moment.")
        with self._lock:
            self._check_free(session)
            if wants_private and not session.is_private:
                raise ConfigError(f"{LET_GO} Nothing was sent: tick the box again, or untick it.")
            if not self._jobs.take(session.visitor):
                raise ConfigError(
                    "Too many prompts from your address are waiting for an answer. Try again in a moment."
                )
            job.room = session.room if session.is_private else None
            session.job, session.notice, session.left = job, None, time.monotonic()
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
                self._jobs.give(session.visitor)
                self._weigh(session)
                session.touch()

        session.touch()
        threading.Thread(target=run, name="osd_hf-answer", daemon=True).start()

    def _batch(self, session: Session, batch: Batch, settings: Settings) -> None:
        for prompt in self.pair.samples(batch.domain, batch.total):
            if batch.stop.is_set():
                return
            answer = Answer(prompt, settings, batch.domain, stop=batch.stop, room=batch.room)
            for shown in batch.answers[-1:]:
                shown.tokens = []  # only the newest is shown
            batch.answers.append(answer)
            try:
                self._answer(session, answer, [])
            finally:
                answer.is_done = True
            assistant, until = session.room.assistant, time.monotonic() + LEARNING_SECONDS
            batch.is_learning = settings.learn and assistant.is_learning and batch.room in (None, session.room)
            session.touch()
            while batch.is_learning and not batch.stop.is_set() and time.monotonic() < until:
                batch.is_learning = not assistant.wait_until_idle(STOP_SECONDS)
            batch.is_learning = False

    def _answer(self, session: Session, answer: Answer, history: list[tuple[str, str]]) -> None:
        def moved(before: int) -> None:
            answer.waiting = before
            session.touch()

        def is_gone() -> bool:
            if session.is_left:
                answer.stop.set()
            return answer.stop.is_set()

        with self.turns.turn(moved, visitor=session.visitor, is_gone=is_gone) as turn:
            if turn is None or is_gone():
                answer.stopped = True
                return
            room, settings = session.room, answer.settings
            if answer.room is not None and answer.room is not room:  # what was meant for it teaches no other draft
                settings = answer.settings = replace(settings, learn=False)
                session.notice = f"{PAIR_LEFT} What you had sent before is answered, and no draft learns from it."
            pair = room.pair
            answer.is_exact = pair.is_exact
            ids = pair.encode(answer.prompt, settings.max_new_tokens, history)
            traces: list[Trace] = []

            def pace() -> None:
                turn.give_way()
                is_gone()

            # Nobody learns until all is measured: what served stays, and times are comparable.
            with self._learning_paused():
                started = time.perf_counter()
                with capture_traces(pair.target, traces.append, num_logprobs=room.config.num_logprobs):
                    output = self._generated(session, room, ids, answer, started, pace)
                answer.seconds = time.perf_counter() - started - turn.waited_seconds
                answer.stopped = answer.stop.is_set()
                if traces:
                    self._scored(session, room, answer, traces[0])
                if answer.stats is not None:
                    self._compared(room, answer, ids, self._completion(pair, ids, output), turn)

    def _compared(self, room: Room, answer: Answer, ids: torch.Tensor, own: list[int], turn: Turn) -> None:
        """Time, and unless sampled tokens, beside those of the target alone."""
        assert answer.stats is not None
        settings, emitted = answer.settings, answer.stats.emitted
        if settings.check and not answer.stopped:
            seconds, alone = self._timed_alone(room.pair, ids, settings.generate_kwargs, answer.stop, turn)
            if alone and not answer.stop.is_set():
                self.alone.append((seconds, len(alone)))
                answer.is_identical = None if settings.do_sample else alone == own
                answer.alone_seconds, answer.is_measured = seconds * emitted / len(alone), True
                return
        total, tokens = (sum(column) for column in zip(*self.alone, strict=True))
        answer.alone_seconds = total / tokens * emitted

    def _generated(
        self,
        session: Session,
        room: Room,
        ids: torch.Tensor,
        answer: Answer,
        started: float,
        pace: Callable[[], None],
    ) -> torch.Tensor:
        while True:
            pieces = Pieces(room.pair.tokenizer)

            def take(round_ids: list[int], pieces: Pieces = pieces) -> None:
                is_first = answer.first_token_seconds is None
                if is_first:
                    answer.first_token_seconds = time.perf_counter() - started
                shown = len(pieces.texts)
                pieces.push(round_ids)
                kinds = ["accepted"] * (len(round_ids) - 1) + ["target"]
                answer.tokens += [ShownToken(*t) for t in zip(pieces.texts[shown:], kinds, strict=True)]
                session.touch(is_first=is_first)
                pace()

            try:
                output: torch.Tensor = room.assistant.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    domain=answer.domain,
                    learn=answer.settings.learn,
                    num_assistant_tokens=answer.settings.k,
                    streamer=_Rounds(take),
                    stopping_criteria=StoppingCriteriaList([_Stop(answer.stop)]),
                    **answer.settings.generate_kwargs,
                )
                return output
            except LearnerError as error:  # of an earlier request: raised before this one began
                room.failed(str(error))

    def _scored(self, session: Session, room: Room, answer: Answer, trace: Trace) -> None:
        tokenizer = room.pair.tokenizer
        with room.assistant.drafts.lease(answer.domain) as serving:  # what drafted: learning is paused
            origins = emitted_tokens(trace, serving.model)
            answer.learning, answer.frozen = (
                replay_each(draft, [trace], K)[0] for draft in (serving.model, room.pair.draft)
            )
        pieces = Pieces(tokenizer)
        pieces.push(token.id for token in origins)
        answer.tokens = [
            ShownToken(
                text,
                token.origin,
                None if token.drafted_id is None else text_of(tokenizer, [token.drafted_id]),
                token.drafted_prob,
            )
            for text, token in zip(pieces.texts, origins, strict=True)
        ]
        answer.stats, answer.version = AcceptanceStats.from_trace(trace), serving.version
        room.add(answer.domain, answer.learning, answer.frozen, answer.version)
        found = Counter(
            (shown.said, text_of(tokenizer, [token.id]))
            for shown, token in zip(answer.tokens, origins, strict=True)
            if shown.said is not None
        )
        # A new one each time, as the page may be reading the old one.
        session.corrections = Counter(dict((session.corrections + found).most_common(MAX_CORRECTIONS)))
        session.touch()

    def _timed_alone(
        self,
        pair: Pair,
        ids: torch.Tensor,
        settings: dict[str, Any],
        stop: threading.Event | None = None,
        turn: Turn | None = None,
    ) -> tuple[float, list[int]]:
        """Seconds and tokens of the target alone, while nobody learns beside it."""
        criteria = StoppingCriteriaList([] if stop is None else [_Stop(stop)])
        waited, started = 0.0 if turn is None else turn.waited_seconds, time.perf_counter()
        output = pair.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            stopping_criteria=criteria,
            streamer=None if turn is None else _Rounds(lambda _: turn.give_way()),
            **settings,
        )
        seconds = time.perf_counter() - started - (0.0 if turn is None else turn.waited_seconds - waited)
        return seconds, self._completion(pair, ids, output)

    @staticmethod
    def _completion(pair: Pair, ids: torch.Tensor, output: torch.Tensor) -> list[int]:
        """Tokens behind the prompt, or behind what a decoder begins with."""
        return [int(token) for token in output[0, 1 if pair.seq2seq else ids.shape[1] :]]

    @contextlib.contextmanager
    def _learning_paused(self) -> Iterator[None]:
        with self._lock:
            self._answering += 1
            for room in (self.shared, *self.private.values()):
                room.assistant.pause()
        try:
            yield
        finally:
            with self._lock:
                self._answering -= 1
                for room in () if self._answering else (self.shared, *self.private.values()):
                    room.assistant.resume()

    # --- what changes for all ---------------------------------------------------------------------------------------

    def reset(self, room: Room) -> None:
        """Forget what a room's draft has learned, between two requests."""
        with self.turns.turn(alone=True):
            room.reset()
        self._touch_all(room)

    def load(self, target: str | None, draft: str | None, **settings: Any) -> None:
        """
        Serve another pair, with new rooms; chats stay, to be read.

        Raises:
            OSDError: the models cannot be loaded, or do not fit together; those that serve stay.
        """
        pair = Pair(target, draft, **{**self._load_settings, **settings})
        with self.turns.turn(alone=True):
            shared = Room(pair, config_of(pair, **self._config))
            closing: list[Room] = []
            try:
                use_threads(pair, self._threads)
                self._warm_up(pair)
            except BaseException:
                use_threads(self.pair, self._threads)
                shared.close()
                raise
            with self._lock:
                closing.append(self.shared)
                self.shared, self.pair = shared, pair
                self.turns.max_begun = SMALL_BEGUN if pair.is_bundled else MAX_BEGUN
                for session in self.sessions.values():
                    if session.is_private:
                        closing.append(self._leave(session, PAIR_LEFT))
                    session.room = shared
            _close(closing)
        self._touch_all(shared)

    def _touch_all(self, room: Room) -> None:
        with self._lock:
            sessions = [session for session in self.sessions.values() if session.room is room]
        for session in sessions:
            session.touch()

    def close(self) -> None:
        """End learning in all rooms."""
        with self._lock:
            rooms = [self.shared, *self.private.values()]
        _close(rooms)


def _close(rooms: Iterable[Room]) -> None:
    for room in rooms:
        room.close()


def _too_long(text: str) -> str:
    return f"The prompt has {len(text):,} characters, at most {MAX_CHARACTERS:,} are taken."
