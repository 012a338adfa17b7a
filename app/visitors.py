"""Visitors: their chats with prompts and answers, drafts of their own, and the limits of strangers."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from osd_hf import AcceptanceStats
from osd_hf.errors import ConfigError
from osd_hf_app.rooms import OTHER, Room
from osd_hf_app.sharing import Rate, Shares

MAX_NEW_TOKENS = 512
MAX_K = 32
MAX_ENTRIES = 20  # of a chat, as many as are shown; the oldest go
MAX_CORRECTIONS = 500  # kinds of them counted in a chat; the rarest go
AWAY_SECONDS = 20.0  # after which what a stranger has left is stopped; a page that is loaded anew is back before
MAX_SESSIONS = 500  # chats kept; the one that was not used for longest goes
MAX_KEPT_BYTES = 64 * 2**20  # of all chats, about; the oldest of whoever has most go
MAX_PRIVATE = 4  # rooms of one visitor, one for a pair of one's own; the one that was not used for longest goes
MAX_WAITING = 32  # jobs at once
PRIVATE_RATE = (8, 60.0)  # drafts of strangers' own that are made at most, in so many seconds
ACTIVE_SECONDS = 600.0  # after its last use a stranger's chat or draft may make room for another stranger's
LET_GO = "Your own draft was let go to make room for other visitors; the draft that all share serves you now."
PAIR_LEFT = "Another pair is served now; your own draft went."
FULL = "Too many visitors are here at the moment. Try again in a few minutes."


@dataclass(frozen=True)
class Settings:
    """How a prompt is answered. Raises ConfigError, which names the setting, the rule and the value."""

    domain: str | None = None  # `None` finds it by the prompt's words
    learn: bool = True  # otherwise nothing of the request is kept or learned from
    k: int | Literal["auto"] = "auto"  # tokens drafted per round
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 96
    check: bool = False  # whether the target also answers alone, to compare time and, unless sampled, tokens
    remember: bool = False  # whether the model sees the earlier turns of the chat

    def __post_init__(self) -> None:
        def must(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise ConfigError(f"`{name}` must be {rule}, got {getattr(self, name)!r}.")

        def is_whole(value: object, most: int) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most

        def is_number(value: object, most: float) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= most

        must("k", self.k == "auto" or is_whole(self.k, MAX_K), f'an integer from 1 to {MAX_K}, or "auto"')
        tokens = is_whole(self.max_new_tokens, MAX_NEW_TOKENS)
        must("max_new_tokens", tokens, f"an integer from 1 to {MAX_NEW_TOKENS}")
        must("temperature", is_number(self.temperature, 5), "above 0 and at most 5")
        must("top_p", is_number(self.top_p, 1), "above 0 and at most 1")

    @property
    def generate_kwargs(self) -> dict[str, object]:
        """The part that `generate` takes."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0} if self.do_sample else {}
        return {"do_sample": self.do_sample, "max_new_tokens": self.max_new_tokens, **sampling}


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of an answer: its text, its origin (`EmittedToken.origin`; `"text"` if it was accepted from past text,
    and `"target"` until it is known which of the target's it is), and for a correction of the draft what it had
    said and with what probability."""

    text: str
    origin: str
    said: str | None = None
    prob: float | None = None


@dataclass(eq=False)
class Answer:
    """One prompt and its answer, which grows while it is made."""

    prompt: str
    settings: Settings
    domain: str = OTHER
    tokens: list[ShownToken] = field(default_factory=list)
    waiting: int = 0
    is_done: bool = False
    stopped: bool = False
    error: str | None = None
    stats: AcceptanceStats | None = None
    learning: AcceptanceStats | None = None
    frozen: AcceptanceStats | None = None
    version: int = 0
    seconds: float = 0.0
    first_token_seconds: float | None = None
    alone_seconds: float | None = None
    is_measured: bool = False
    is_identical: bool | None = None
    is_exact: bool = True
    drawn: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    room: Room | None = None  # the visitor's own, that it is meant to teach

    @property
    def kept_bytes(self) -> int:
        """Memory that it takes, about."""
        return 1000 + 2 * len(self.prompt) + 300 * len(self.tokens) + len(self.drawn or "") + len(self.error or "")

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def speedup(self) -> float | None:
        """Over the target alone: measured on this answer, or estimated from what the target took for others."""
        return None if self.alone_seconds is None or not self.seconds else self.alone_seconds / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.stats is None or not self.seconds else self.stats.emitted / self.seconds


@dataclass(eq=False)
class Batch:
    """Prompts that were sent in one go."""

    domain: str
    total: int
    answers: list[Answer] = field(default_factory=list)
    is_learning: bool = False
    is_done: bool = False
    error: str | None = None
    drawn: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    room: Room | None = None  # the visitor's own, that it is meant to teach

    @property
    def kept_bytes(self) -> int:
        """Memory that it takes, about."""
        return 1000 + len(self.drawn or "") + sum(answer.kept_bytes for answer in self.answers)


@dataclass(eq=False)
class Session:
    """A visitor's chat: its entries, the room that serves it, and who watches it."""

    id: str
    room: Room
    owner: str = field(default_factory=lambda: secrets.token_urlsafe(16))  # of what it says, until it is cleared
    is_private: bool = False
    entries: list[Answer | Batch] = field(default_factory=list)
    corrections: Counter[tuple[str, str]] = field(default_factory=Counter)
    revision: int = 0
    notice: str | None = None
    job: Answer | Batch | None = None
    visitor: str | None = None
    watchers: int = 0
    used: float = field(default_factory=time.monotonic)
    left: float = 0.0  # when the last watcher went
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        lock = threading.Lock()
        self.changed = threading.Condition(lock)
        self._urgent = threading.Condition(lock)  # who waits for what is urgent does not wake in every round
        self._shown_at_once = 0

    def weigh(self) -> None:
        """Count the memory that the entries take."""
        self.kept_bytes = sum(entry.kept_bytes for entry in self.entries)

    def move(self, room: Room, *, is_private: bool, notice: str | None = None) -> None:
        """Be served by another room from the next answer on."""
        self.room, self.is_private, self.notice = room, is_private, notice
        self.touch()

    def say(self, notice: str) -> None:
        """Show a notice below the entries until the next one begins."""
        self.notice = notice
        self.touch()

    def count_corrections(self, found: Iterable[tuple[str, str]]) -> None:
        """Add what the draft had said and what the target said instead."""
        # A new counter each time, as the page may be reading the old one.
        self.corrections = Counter(dict((self.corrections + Counter(found)).most_common(MAX_CORRECTIONS)))

    def touch(self, *, is_first: bool = False) -> None:
        """Tell those who watch that something is new; first tokens, and the end, are shown at once."""
        with self.changed:
            self.revision += 1
            self.changed.notify_all()
            if is_first or self.job is None:
                self._shown_at_once += 1
                self._urgent.notify_all()

    def frames(self, seconds: float, look_seconds: float, job: Answer | Batch | None = None) -> Iterator[None]:
        """The moments at which to show what has come of a job, by default of what is being answered: at once, then
        when something is new, but no more often than every `seconds`, or when nothing was new for `look_seconds`, to
        find out whether the page is still there. The last moment is when the job has ended. Whoever goes on with them
        counts as watching."""
        job = job or self.job
        with self.watched():
            while True:
                began = time.monotonic()
                with self.changed:
                    revision, urgent, is_busy = self.revision, self._shown_at_once, job is not None and self.job is job
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


class Visitors:
    """The chats of all visitors, each served by the room that all share or by a private one. A stranger is told apart
    by the `visitor` of a chat; `None` is a trusted visitor, without limits of their own."""

    def __init__(self, shared: Room) -> None:
        self.shared = shared
        self.sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first, as the next
        self.private: OrderedDict[str, Session] = OrderedDict()  # those with a draft of their own
        self._making: list[Session] = []  # those whose draft is being made
        self._made = Rate(*PRIVATE_RATE)
        self._jobs = Shares(MAX_WAITING)
        self._answering = 0
        self._lock = threading.RLock()

    def session(self, session_id: str | None, visitor: str | None = None) -> Session:
        """A visitor's chat, by a name that cannot be guessed; a new one where there is none of that name. Raises
        ConfigError where so many strangers chat that none of their chats can go."""
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
            found.used = time.monotonic()
            for kept in (self.sessions, self.private):
                if found.id in kept:
                    kept.move_to_end(found.id)
            closing = [gone.room for gone in evicted if self.private.pop(gone.id, None) is not None]
        _close(closing)
        return found

    def guest(self, visitor: str | None = None) -> Session:
        """A chat that nobody comes back to, and that is not kept."""
        return Session("", self.shared, visitor=visitor)

    def _make_room(self, visitor: str | None) -> list[Session]:
        """Let go of chats, so that one more can come, and return them. A stranger may have as many as there are places
        left, and makes room with chats of their own first; otherwise whoever has most makes room, if they have more
        than one more. Empty ones go before others."""
        held = sum(session.visitor == visitor for session in self.sessions.values())
        free = MAX_SESSIONS - len(self.sessions)
        if held < free if visitor is not None else free > 0:
            return []
        idle = [s for s in self.sessions.values() if s.job is None and s not in self._making]
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

    def _check_free(self, session: Session) -> None:
        if session.job is not None:
            raise ConfigError("This chat is still being answered. Wait for the end, or stop it.")
        if session in self._making:
            raise ConfigError("Your own draft is still being made. Try again in a moment.")

    def clear(self, session: Session) -> None:
        """Forget a chat; raises ConfigError while it is being answered."""
        with self._lock:
            self._check_free(session)
            session.entries, session.corrections, session.notice, session.kept_bytes = [], Counter(), None, 0
            session.room.assistant.forget(session.owner)
            session.owner = secrets.token_urlsafe(16)
        session.touch()

    def begin(self, session: Session, job: Answer | Batch, wants_private: bool | None) -> None:
        """Take a job into a chat; raises ConfigError as `Service.ask` does. Ended by [`~Visitors.end`]."""
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
        session.touch()

    def end(self, session: Session, job: Answer | Batch) -> None:
        """A job is done. Where all chats hold too much by now, the oldest one of whoever holds most is emptied."""
        with session.changed:
            session.job, job.is_done = None, True
        self._jobs.give(session.visitor)
        with self._lock:
            session.weigh()
            by_visitor: Counter[str | None] = Counter()
            for other in self.sessions.values():
                by_visitor[other.visitor] += other.kept_bytes
            left = [other for other in self.sessions.values() if other.kept_bytes]  # each has its turn once
            while left and by_visitor.total() > MAX_KEPT_BYTES:
                oldest = max(left, key=lambda other: by_visitor[other.visitor])  # the first one of whoever has most
                left.remove(oldest)
                by_visitor[oldest.visitor] -= oldest.kept_bytes
                oldest.entries = [entry for entry in oldest.entries if not entry.is_done]
                oldest.weigh()
                by_visitor[oldest.visitor] += oldest.kept_bytes
                oldest.touch()
        session.touch()

    def go_private(self, session: Session, is_private: bool) -> None:
        """Give a visitor a draft of their own, which learns from nobody else; or let them share again, when their own
        is forgotten. There are never more drafts than `MAX_PRIVATE`, those included that are being made. Raises
        ConfigError in the middle of an answer, while one is being made for this chat already, where there is no place
        for one more, and where a stranger has had too many of late."""
        with self._lock:
            if is_private == session.is_private:
                return
            self._check_free(session)
            closing = self._private_place(session) if is_private else [self._leave(session, None)]
            if is_private:
                self._making.append(session)
            shared = self.shared
        if not is_private:
            _close(closing)
            return
        room: Room | None = None
        try:
            _close(closing)  # before the new one is made: memory has room for so many and no more
            room = Room(shared.pair, shared.config)  # takes a while: nobody waits for it
            with self._lock:
                if shared is not self.shared:
                    raise ConfigError("Another pair was loaded meanwhile. Tick the box again.")
                if self.sessions.get(session.id) is session:
                    self.private[session.id] = session
                    session.move(room, is_private=True)
                    if self._answering:
                        room.assistant.pause()
                    room = None
        finally:
            with self._lock:
                self._making.remove(session)
            _close([] if room is None else [room])

    def _private_place(self, session: Session) -> list[Room]:
        """Rooms that are to be closed before one more is made."""
        visitor, most = session.visitor, MAX_PRIVATE if self.shared.pair.per_domain else 1
        held = sum(s.visitor == visitor for s in (*self.private.values(), *self._making))
        free = most - len(self.private) - len(self._making)
        going: list[Session] = []
        if not (held < free if visitor is not None else free > 0):
            idle = [s for s in self.private.values() if s.job is None]
            if visitor is not None:
                long_ago = time.monotonic() - ACTIVE_SECONDS
                idle = [s for s in idle if s.visitor == visitor] or [s for s in idle if s.used < long_ago]
            going = idle[:1]
            if not going and free <= 0:
                raise ConfigError("All drafts of visitors' own are in use at the moment. Try again in a few minutes.")
        if visitor is not None and not self._made.take(visitor):
            raise ConfigError("Too many drafts of visitors' own were made just now. Try again in a minute.")
        return [self._leave(other, LET_GO) for other in going]

    def _leave(self, session: Session, notice: str | None) -> Room:
        """Let a visitor share again; returns the room that is to be closed."""
        del self.private[session.id]
        room = session.room
        session.move(self.shared, is_private=False, notice=notice)
        return room

    @contextlib.contextmanager
    def learning_paused(self) -> Iterator[None]:
        """Nobody learns inside the `with` block; several threads may be inside theirs at once."""
        with self._lock:
            self._answering += 1
            for room in self._rooms():
                room.assistant.pause()
        try:
            yield
        finally:
            with self._lock:
                self._answering -= 1
                for room in [] if self._answering else self._rooms():
                    room.assistant.resume()

    def _rooms(self) -> list[Room]:
        return [self.shared, *(session.room for session in self.private.values())]

    def share(self, room: Room) -> None:
        """Let another room serve all chats, in place of the shared one and of all private ones, which are closed."""
        with self._lock:
            closing, self.shared = self._rooms(), room
            for session in self.sessions.values():
                if session.is_private:
                    self._leave(session, PAIR_LEFT)
                else:
                    session.move(room, is_private=False, notice=session.notice)
        _close(closing)

    def touch(self, room: Room) -> None:
        """Tell those who watch a chat of this room that something is new."""
        with self._lock:
            sessions = [session for session in self.sessions.values() if session.room is room]
        for session in sessions:
            session.touch()

    def close(self) -> None:
        """End learning in all rooms."""
        with self._lock:
            rooms = self._rooms()
        _close(rooms)


def _close(rooms: Iterable[Room]) -> None:
    for room in rooms:
        room.close()
