"""The chats of all visitors, their private drafts, and the limits of untrusted visitors."""

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
from osd_hf_app.pair import GENERAL
from osd_hf_app.sharing import Quota, RateLimit
from osd_hf_app.workspace import Workspace

MAX_NEW_TOKENS = 512
MAX_K = 32
MAX_ENTRIES = 20  # newest entries kept in a chat
MAX_CORRECTIONS = 500  # different corrections counted in a chat; the rarest are dropped
AWAY_SECONDS = 20.0  # until an abandoned answer stops; longer than a page needs to reload
MAX_SESSIONS = 200
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
        def check(name: str, kinds: tuple[type, ...], maximum: float, rule: str) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= maximum:
                raise ConfigError(f"`{name}` must be {rule}, got {value!r}.")

        if self.k != "auto":
            check("k", (int,), MAX_K, f'an integer from 1 to {MAX_K}, or "auto"')
        check("max_new_tokens", (int,), MAX_NEW_TOKENS, f"an integer from 1 to {MAX_NEW_TOKENS}")
        check("temperature", (int, float), 5, "above 0 and at most 5")
        check("top_p", (int, float), 1, "above 0 and at most 1")

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
    version: int = 0
    seconds: float = 0.0
    first_token_seconds: float | None = None
    alone_seconds: float | None = None
    is_measured: bool = False  # `alone_seconds` was measured for this answer; otherwise it is an estimate
    is_identical: bool | None = None
    is_exact: bool = True

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

    def move(self, workspace: Workspace, *, is_private: bool, notice: str | None = None) -> None:
        """Use another workspace from the next answer on."""
        self.workspace = workspace
        self.is_private = is_private
        self.show(notice)

    def show(self, notice: str | None) -> None:
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
        """Yield each time a job (by default the current one) should be shown, for the last time when it has ended.

        `seconds` is the minimum time between two frames, except for urgent changes. After `look_seconds`, a frame
        comes even without a change, to notice that the page was closed.
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
            self.changed.wait_for(lambda: self.urgent_revision > shown, seconds)
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
        self._private_rate = RateLimit(*PRIVATE_RATE)
        self._jobs = Quota(MAX_JOBS)
        self._paused = 0
        self._lock = threading.RLock()

    @property
    def private(self) -> list[Session]:
        """The chats with a private workspace, least recently used first."""
        return [session for session in self.by_id.values() if session.is_private]

    def open(self, session_id: str | None, visitor: str | None = None) -> Session:
        """Return the chat with this id, or a new chat. Raises ConfigError if no chat can be removed for a new one."""
        with self._lock:
            session = self.by_id.get(session_id or "")
            if session is None:
                # A page that was open while the app restarted keeps its id.
                is_valid = re.fullmatch(r"[\w-]{22}|program [\w-]{1,64}", session_id or "", re.ASCII)
                name = session_id if session_id and is_valid else secrets.token_urlsafe(16)
                removed = _to_remove(list(self.by_id.values()), MAX_SESSIONS, visitor, TOO_MANY_VISITORS)
                if removed is not None:
                    del self.by_id[removed.id]
                    if removed.is_private:
                        removed.workspace.close()
                session = self.by_id[name] = Session(name, self.shared, visitor=visitor)
            session.last_used = time.monotonic()
            self.by_id.move_to_end(session.id)
            return session

    def guest(self, visitor: str | None = None) -> Session:
        """Return a chat that is not kept."""
        return Session("", self.shared, visitor=visitor)

    def clear(self, session: Session) -> None:
        """Delete the content of a chat. Raises ConfigError while it is being answered."""
        with self._lock:
            _check_idle(session)
            session.entries = []
            session.corrections = Counter()
            session.workspace.assistant.forget(session.owner)
            session.owner = secrets.token_urlsafe(16)
        session.show(None)

    def begin(self, session: Session, job: Answer | Batch, wants_private: bool | None) -> None:
        """Add a job to a chat until [`~Sessions.end`]. Raises ConfigError as `Service.ask` does."""
        with self._lock:
            _check_idle(session)
            if wants_private and not session.is_private:
                raise ConfigError(f"{PRIVATE_REMOVED} Nothing was sent: tick the box again, or untick it.")
            if not self._jobs.acquire(session.visitor):
                raise ConfigError("Too many prompts are waiting. Try again in a moment.")
            job.private_workspace = session.workspace if session.is_private else None
            session.job = job
            session.last_watched = time.monotonic()
            session.entries.append(job)
            del session.entries[:-MAX_ENTRIES]
        session.show(None)

    def end(self, session: Session, job: Answer | Batch) -> None:
        """Mark a job as done."""
        with session.changed:
            session.job = None
            job.is_done = True
        self._jobs.release(session.visitor)
        session.touch()

    def set_private(self, session: Session, is_private: bool) -> None:
        """Give a chat a private workspace, or discard it and share again.

        Raises ConfigError during an answer, if no place is free, and if the visitor has created too many recently.
        """
        with self._lock:
            if is_private == session.is_private:
                return
            _check_idle(session)
            if not is_private:
                self._leave(session, None)
                return
            capacity = MAX_PRIVATE if self.shared.pair.per_domain else 1
            removed = _to_remove(self.private, capacity, session.visitor, ALL_IN_USE)
            if session.visitor is not None and not self._private_rate.acquire(session.visitor):
                raise ConfigError("Too many private drafts were created recently. Try again in a minute.")
            if removed is not None:
                self._leave(removed, PRIVATE_REMOVED)
            workspace = Workspace(self.shared.pair, self.shared.config)
            if self._paused:
                workspace.assistant.pause()
            session.move(workspace, is_private=True)

    def _leave(self, session: Session, notice: str | None) -> None:
        """Move a chat from its private workspace back to the shared one."""
        session.workspace.close()
        session.move(self.shared, is_private=False, notice=notice)

    @contextlib.contextmanager
    def learning_paused(self) -> Iterator[None]:
        """Pause learning in all workspaces inside the `with` block. Several threads may be inside."""
        with self._lock:
            self._paused += 1
            for workspace in self._workspaces():
                workspace.assistant.pause()
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1
                for workspace in [] if self._paused else self._workspaces():
                    workspace.assistant.resume()

    def _workspaces(self) -> list[Workspace]:
        return [self.shared, *(session.workspace for session in self.private)]

    def replace_shared(self, workspace: Workspace) -> None:
        """Move all chats to a new shared workspace, and close the old shared and private ones."""
        with self._lock:
            old, self.shared = self.shared, workspace
            for session in self.by_id.values():
                if session.is_private:
                    self._leave(session, PAIR_CHANGED)
                else:
                    session.move(workspace, is_private=False, notice=session.notice)
            old.close()

    def close(self) -> None:
        """Stop learning in all workspaces."""
        with self._lock:
            for workspace in self._workspaces():
                workspace.close()


def _check_idle(session: Session) -> None:
    if session.job is not None:
        raise ConfigError("This chat is still being answered. Wait for the end, or stop it.")


def _to_remove(kept: list[Session], capacity: int, visitor: str | None, error: str) -> Session | None:
    """Return the session that must be removed so that a visitor can have another, if any.

    A trusted visitor replaces the least recently used. An untrusted visitor may hold no more than there are free
    places, and then replaces own ones, empty chats first. If no place is free, one that was not used for some time is
    removed. Raises ConfigError if none can be removed.
    """
    free = capacity - len(kept)
    held = sum(session.visitor == visitor for session in kept)
    if free > 0 and (visitor is None or held < free):
        return None
    idle = [session for session in kept if session.job is None]
    candidates = [session for session in idle if visitor in (None, session.visitor)]
    if not candidates and free <= 0:
        candidates = [session for session in idle if session.last_used < time.monotonic() - ACTIVE_SECONDS]
        if not candidates:
            raise ConfigError(error)
    return min(candidates, key=lambda session: visitor is not None and bool(session.entries), default=None)
