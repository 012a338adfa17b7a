"""The chats of all visitors, their private drafts, and the limits of untrusted visitors."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from osd_hf import AcceptanceStats
from osd_hf.errors import ConfigError
from osd_hf_app.pair import GENERAL
from osd_hf_app.sharing import Quota, RateLimit
from osd_hf_app.workspace import Workspace

MAX_NEW_TOKENS = 512
MAX_K = 32
MAX_ENTRIES = 20  # newest entries kept in a chat
MAX_CORRECTIONS = 500  # different corrections counted in a chat; the rarest are dropped
AWAY_SECONDS = 20.0  # until an abandoned answer stops; longer than a page needs to reload
MAX_SESSIONS = 500
MAX_KEPT_BYTES = 64 * 2**20  # estimated size of all chats
MAX_PRIVATE = 4  # private workspaces; one for a pair that was loaded by name
MAX_JOBS = 32  # waiting or running at the same time
PRIVATE_RATE = (8, 60.0)  # private workspaces that untrusted visitors may create, and seconds
ACTIVE_SECONDS = 600.0  # after its last use, a chat or private draft may be removed for another visitor
PRIVATE_REMOVED = "Your private draft was removed to make room for other visitors. You now use the shared draft."
PAIR_CHANGED = "The models were changed; your private draft was removed."
ALL_IN_USE = "All private drafts are in use at the moment. Try again in a few minutes."
TOO_MANY_VISITORS = "There are too many visitors at the moment. Try again in a few minutes."


@dataclass(frozen=True)
class Settings:
    """Settings of one prompt. Raises ConfigError with the setting, the rule, and the value."""

    domain: str | None = None  # `None`: found from the words of the prompt
    learn: bool = True  # `False`: nothing of the request is kept or learned from
    k: int | Literal["auto"] = "auto"  # tokens drafted per round
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 96
    check: bool = False  # compare with an answer of the target alone
    remember: bool = False  # include the earlier turns of the chat

    def __post_init__(self) -> None:
        def check(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise ConfigError(f"`{name}` must be {rule}, got {getattr(self, name)!r}.")

        def is_integer(value: object, maximum: int) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= maximum

        def is_number(value: object, maximum: float) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= maximum

        check("k", self.k == "auto" or is_integer(self.k, MAX_K), f'an integer from 1 to {MAX_K}, or "auto"')
        tokens_hold = is_integer(self.max_new_tokens, MAX_NEW_TOKENS)
        check("max_new_tokens", tokens_hold, f"an integer from 1 to {MAX_NEW_TOKENS}")
        check("temperature", is_number(self.temperature, 5), "above 0 and at most 5")
        check("top_p", is_number(self.top_p, 1), "above 0 and at most 1")

    @property
    def generate_kwargs(self) -> dict[str, object]:
        """The arguments of `generate`."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0} if self.do_sample else {}
        return {"do_sample": self.do_sample, "max_new_tokens": self.max_new_tokens, **sampling}


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of an answer, as the page shows it.

    `origin` is that of `EmittedToken`, or `"text"` if the token was accepted from earlier text, or `"target"` until
    the origin is known. A correction has what the draft proposed (`drafted`) and its probability.
    """

    text: str
    origin: str
    drafted: str | None = None
    probability: float | None = None


@dataclass(eq=False, kw_only=True)
class _Job:
    is_done: bool = False
    error: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    private_workspace: Workspace | None = None  # the only one that may learn from it, if private


@dataclass(eq=False)
class Answer(_Job):
    """One prompt and its answer, which grows while it is generated."""

    prompt: str
    settings: Settings
    domain: str = GENERAL
    tokens: list[ShownToken] = field(default_factory=list)
    position: int = 0  # number of requests ahead
    is_stopped: bool = False
    stats: AcceptanceStats | None = None
    learning: AcceptanceStats | None = None
    frozen: AcceptanceStats | None = None
    version: int = 0
    seconds: float = 0.0
    first_token_seconds: float | None = None
    alone_seconds: float | None = None
    is_measured: bool = False  # `alone_seconds` was measured for this answer; otherwise it is an estimate
    is_identical: bool | None = None
    is_exact: bool = True

    @property
    def kept_bytes(self) -> int:
        """Estimated memory of the answer."""
        return 1000 + 2 * len(self.prompt) + 300 * len(self.tokens) + len(self.error or "")

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def speedup(self) -> float | None:
        """Speed-up over the target alone."""
        return None if self.alone_seconds is None or not self.seconds else self.alone_seconds / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.stats is None or not self.seconds else self.stats.emitted / self.seconds


@dataclass(eq=False)
class Batch(_Job):
    """Sample prompts that are answered one after the other."""

    domain: str
    total: int
    answers: list[Answer] = field(default_factory=list)
    is_learning: bool = False

    @property
    def kept_bytes(self) -> int:
        """Estimated memory of the batch."""
        return 1000 + sum(answer.kept_bytes for answer in self.answers)


@dataclass(eq=False)
class Session:
    """One chat. `visitor` is the id of an untrusted visitor; `None` is a trusted one."""

    id: str
    workspace: Workspace
    is_private: bool = False
    # Owner of the text that may be proposed again; not the `id`, and new after the chat is cleared.
    owner: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    entries: list[Answer | Batch] = field(default_factory=list)
    corrections: Counter[tuple[str, str]] = field(default_factory=Counter)
    revision: int = 0
    notice: str | None = None
    job: Answer | Batch | None = None
    visitor: str | None = None
    watchers: int = 0
    last_used: float = field(default_factory=time.monotonic)
    last_watched: float = 0.0
    changed: threading.Condition = field(default_factory=threading.Condition)
    urgent_revision: int = 0

    @property
    def kept_bytes(self) -> int:
        """Estimated memory of all entries."""
        return sum(entry.kept_bytes for entry in self.entries)

    def move(self, workspace: Workspace, *, is_private: bool, notice: str | None = None) -> None:
        """Use another workspace from the next answer on."""
        self.workspace = workspace
        self.is_private = is_private
        self.notice = notice
        self.touch()

    def show(self, notice: str) -> None:
        """Show a notice below the entries until the next one starts."""
        self.notice = notice
        self.touch()

    def count_corrections(self, found: Iterable[tuple[str, str]]) -> None:
        """Count pairs of a drafted token and the token that the target chose instead."""
        # A new counter, because the page may be reading the old one.
        self.corrections = Counter(dict((self.corrections + Counter(found)).most_common(MAX_CORRECTIONS)))

    def touch(self, *, is_urgent: bool = False) -> None:
        """Notify watchers of a change. Urgent changes, and the end of a job, are shown without delay."""
        with self.changed:
            self.revision += 1
            if is_urgent or self.job is None:
                self.urgent_revision = self.revision
            self.changed.notify_all()

    def frames(self, seconds: float, look_seconds: float, job: Answer | Batch | None = None) -> Iterator[None]:
        """Yield each time a job should be shown, for the last time when it has ended.

        Args:
            seconds (`float`): Minimum time between two frames, except for urgent changes.
            look_seconds (`float`): Yield after this time even without a change, to notice that the page was closed.
            job (`Answer` or `Batch`, *optional*): The current job by default.
        """
        job = job or self.job
        with self.watched():
            while True:
                started = time.monotonic()
                with self.changed:
                    shown, is_running = self.revision, job is not None and self.job is job
                yield
                if not is_running:
                    return
                self._wait(shown, started + seconds - time.monotonic(), look_seconds)

    def _wait(self, shown: int, seconds: float, look_seconds: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.urgent_revision > shown, max(seconds, 0.0))
            self.changed.wait_for(lambda: self.revision > shown, look_seconds)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count a watcher inside the `with` block."""
        with self.changed:
            self.watchers += 1
        try:
            yield
        finally:
            with self.changed:
                self.watchers -= 1
                self.last_watched = time.monotonic()

    @property
    def is_abandoned(self) -> bool:
        """Whether an untrusted visitor has left while a job runs."""
        return self.visitor is not None and not self.watchers and time.monotonic() - self.last_watched > AWAY_SECONDS


class Sessions:
    """All chats, each with the shared workspace or a private one."""

    def __init__(self, shared: Workspace) -> None:
        self.shared = shared
        self.by_id: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self.private: OrderedDict[str, Session] = OrderedDict()  # those with a private workspace, in the same order
        self._private_rate = RateLimit(*PRIVATE_RATE)
        self._jobs = Quota(MAX_JOBS)
        self._paused = 0
        self._lock = threading.RLock()

    def open(self, session_id: str | None, visitor: str | None = None) -> Session:
        """Return the chat with this id, or a new chat. Raises ConfigError if no chat can be removed for a new one."""
        removed: list[Session] = []
        with self._lock:
            session = self.by_id.get(session_id or "")
            if session is None:
                # A page that was open while the app restarted keeps its id.
                is_valid = re.fullmatch(r"[\w-]{22}|program [\w-]{1,64}", session_id or "", re.ASCII)
                name = session_id if session_id and is_valid else secrets.token_urlsafe(16)
                session = Session(name, self.shared, visitor=visitor)
                removed = self._to_remove(self.by_id, MAX_SESSIONS, visitor, TOO_MANY_VISITORS, from_largest=True)
                for other in removed:
                    del self.by_id[other.id]
                self.by_id[session.id] = session
            session.last_used = time.monotonic()
            for sessions in (self.by_id, self.private):
                if session.id in sessions:
                    sessions.move_to_end(session.id)
            closing = [other.workspace for other in removed if self.private.pop(other.id, None) is not None]
        _close(closing)
        return session

    def guest(self, visitor: str | None = None) -> Session:
        """Return a chat that is not kept."""
        return Session("", self.shared, visitor=visitor)

    def _check_idle(self, session: Session) -> None:
        if session.job is not None:
            raise ConfigError("This chat is still being answered. Wait for the end, or stop it.")

    def clear(self, session: Session) -> None:
        """Delete the content of a chat. Raises ConfigError while it is being answered."""
        with self._lock:
            self._check_idle(session)
            session.entries = []
            session.corrections = Counter()
            session.notice = None
            session.workspace.assistant.forget(session.owner)
            session.owner = secrets.token_urlsafe(16)
        session.touch()

    def begin(self, session: Session, job: Answer | Batch, wants_private: bool | None) -> None:
        """Add a job to a chat until [`~Sessions.end`]. Raises ConfigError as `Service.ask` does."""
        with self._lock:
            self._check_idle(session)
            if wants_private and not session.is_private:
                raise ConfigError(f"{PRIVATE_REMOVED} Nothing was sent: tick the box again, or untick it.")
            if not self._jobs.acquire(session.visitor):
                raise ConfigError("Too many prompts from your address are waiting. Try again in a moment.")
            job.private_workspace = session.workspace if session.is_private else None
            session.job = job
            session.notice = None
            session.last_watched = time.monotonic()
            session.entries.append(job)
            del session.entries[:-MAX_ENTRIES]
        session.touch()

    def end(self, session: Session, job: Answer | Batch) -> None:
        """Mark a job as done, and delete old entries if all chats together have become too large."""
        with session.changed:
            session.job = None
            job.is_done = True
        self._jobs.release(session.visitor)
        with self._lock:
            sizes = {other.id: other.kept_bytes for other in self.by_id.values()}
            by_visitor: Counter[str | None] = Counter()
            for other in self.by_id.values():
                by_visitor[other.visitor] += sizes[other.id]
            candidates = [other for other in self.by_id.values() if sizes[other.id]]
            while candidates and by_visitor.total() > MAX_KEPT_BYTES:
                largest = max(candidates, key=lambda other: by_visitor[other.visitor])  # oldest chat of that visitor
                candidates.remove(largest)
                largest.entries = [entry for entry in largest.entries if not entry.is_done]
                by_visitor[largest.visitor] -= sizes[largest.id] - largest.kept_bytes
                largest.touch()
        session.touch()

    def set_private(self, session: Session, is_private: bool) -> None:
        """Give a chat a private workspace, or discard it and share again.

        Raises ConfigError during an answer, if no place is free, and if the visitor has created too many recently.
        """
        with self._lock:
            if is_private == session.is_private:
                return
            self._check_idle(session)
            if is_private:
                closing = self._make_private_room(session.visitor)
                self.private[session.id] = session
                # Its assistant is created later, without this lock.
                session.move(Workspace(self.shared.pair, self.shared.config, is_lazy=True), is_private=True)
            else:
                closing = [self._leave(session, None)]
        _close(closing)

    def _make_private_room(self, visitor: str | None) -> list[Workspace]:
        """Return the workspaces to close before another is created."""
        capacity = MAX_PRIVATE if self.shared.pair.per_domain else 1
        removed = self._to_remove(self.private, capacity, visitor, ALL_IN_USE)
        if visitor is not None and not self._private_rate.allow(visitor):
            raise ConfigError("Too many private drafts were created recently. Try again in a minute.")
        return [self._leave(other, PRIVATE_REMOVED) for other in removed]

    def _to_remove(
        self,
        kept: Mapping[str, Session],
        capacity: int,
        visitor: str | None,
        error: str,
        *,
        from_largest: bool = False,
    ) -> list[Session]:
        """Return the sessions that must be removed so that a visitor can have another.

        A trusted visitor replaces the least recently used. An untrusted visitor may hold no more than there are free
        places, and then replaces own ones, empty chats first. If no place is free, an old one is removed, or with
        `from_largest` one of the visitor who holds most. Raises ConfigError if none can be removed.
        """
        held = Counter(session.visitor for session in kept.values())
        free = capacity - held.total()
        if held[visitor] < free if visitor is not None else free > 0:
            return []
        idle = [session for session in kept.values() if session.job is None]
        candidates = idle
        if visitor is not None:
            candidates = [session for session in idle if session.visitor == visitor]
            if not candidates and free <= 0:
                most = max((session.visitor for session in idle), key=lambda other: held[other], default=None)
                is_largest = from_largest and held[most] > held[visitor] + 1
                too_old = time.monotonic() - ACTIVE_SECONDS
                candidates = [s for s in idle if s.last_used < too_old or (is_largest and s.visitor == most)]
            candidates = sorted(candidates, key=lambda session: bool(session.entries))
        if not candidates and free <= 0:
            raise ConfigError(error)
        return candidates[:1]

    def _leave(self, session: Session, notice: str | None) -> Workspace:
        """Move a chat back to the shared workspace; return the private one, which the caller closes."""
        del self.private[session.id]
        workspace = session.workspace
        session.move(self.shared, is_private=False, notice=notice)
        return workspace

    @contextlib.contextmanager
    def learning_paused(self, workspace: Workspace) -> Iterator[None]:
        """Pause learning in all workspaces, including this one, inside the `with` block.

        Several threads may be inside.
        """
        workspace.assistant.pause()  # may create it, so the lock is not held
        with self._lock:
            self._paused += 1
            for other in self._workspaces():
                if other.has_assistant:
                    other.assistant.pause()
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1
                for other in [] if self._paused else self._workspaces():
                    if other.has_assistant:
                        other.assistant.resume()

    def _workspaces(self) -> list[Workspace]:
        return [self.shared, *(session.workspace for session in self.private.values())]

    def replace_shared(self, workspace: Workspace) -> None:
        """Move all chats to a new shared workspace, and close the old shared and private ones."""
        with self._lock:
            closing = self._workspaces()
            self.shared = workspace
            for session in self.by_id.values():
                if session.is_private:
                    self._leave(session, PAIR_CHANGED)
                else:
                    session.move(workspace, is_private=False, notice=session.notice)
        _close(closing)

    def touch(self, workspace: Workspace) -> None:
        """Notify the watchers of all chats that use a workspace."""
        with self._lock:
            sessions = [session for session in self.by_id.values() if session.workspace is workspace]
        for session in sessions:
            session.touch()

    def close(self) -> None:
        """Stop learning in all workspaces."""
        with self._lock:
            workspaces = self._workspaces()
        _close(workspaces)


def _close(workspaces: Iterable[Workspace]) -> None:
    for workspace in workspaces:
        workspace.close()
