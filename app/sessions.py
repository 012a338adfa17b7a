"""The chats of all visitors, the drafts that they share or own, and the limits of untrusted visitors."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from osd_hf import AcceptanceStats, LabelRouter, OnlineAssistant, OnlineConfig, Trace
from osd_hf.bundled import DOMAINS, GENERAL
from osd_hf.errors import ConfigError, LearnerError, OSDError, without_credentials
from osd_hf_app.pair import NO_DOMAIN, ServedPair
from osd_hf_app.sharing import Quota, RateLimit

logger = logging.getLogger(__name__)

AUTOMATIC = "automatic"  # the domain is found from the words of the prompt
MAX_NEW_TOKENS = 512
K_CHOICES = ("auto", "1", "2", "3", "5", "8", "12")
ID_PATTERN = r"[\w-]{22}|program [\w-]{1,64}"
MAX_ENTRIES = 20  # newest entries kept in a chat
FRAME_SECONDS = 0.3  # between two frames, except for urgent changes
LOOK_SECONDS = 2.0  # after which a frame comes even without a change, to notice that the page was closed
AWAY_SECONDS = 20.0  # until an abandoned answer stops; longer than a page needs to reload
MAX_SESSIONS = 200
MAX_PRIVATE = 4  # private workspaces; one for a pair that was loaded by name
MAX_JOBS = 32  # waiting or running at the same time
PRIVATE_RATE = (8, 60.0)  # private workspaces that untrusted visitors may create, and seconds
ACTIVE_SECONDS = 600.0  # after its last use, a chat or private draft may be removed for another visitor
PRIVATE_REMOVED = "Your private draft was removed to make room for other visitors. You now use the shared draft."

SHARED = "shared"  # folder of a draft that all domains share
SIDES = ("frozen", "learning")
MAX_RECORDS = 500  # newest requests in the curves and tables


@dataclass(frozen=True, slots=True)
class Record:
    """The counts of one request, without text. Both drafts are replayed on the same answer with the same k."""

    domain: str
    learning: AcceptanceStats
    frozen: AcceptanceStats
    version: int


class Workspace:
    """One assistant with a draft per domain, or one draft, as the pair requires. The pair's draft stays frozen."""

    def __init__(self, pair: ServedPair, config: OnlineConfig, *, is_private: bool = False) -> None:
        self.pair = pair
        self.config = config
        self.is_private = is_private
        self._start()

    def _start(self) -> None:
        pair, router = self.pair, LabelRouter() if self.pair.domains else None
        self.assistant = OnlineAssistant(pair.target, pair.draft, pair.tokenizer, self.config, router=router)
        self.records: list[Record] = []
        self.shown: Any = None  # an answer that the app asked for, shown before a visitor asks
        self.count = 0

    def add(self, record: Record) -> None:
        """Record a finished request."""
        self.count += 1
        self.records = [*self.records, record][-MAX_RECORDS:]  # a new list, because pages may be reading the old one

    def reset(self) -> None:
        """Discard what was learned and recorded. Call it only while no request of this workspace runs."""
        self.close()
        self._start()

    def close(self) -> None:
        """Stop learning. A failure of the learner was logged before."""
        with contextlib.suppress(LearnerError):
            self.assistant.close()

    @property
    def failure(self) -> str | None:
        """Why learning failed, if it has not succeeded since."""
        error = self.assistant.learning_error
        return None if error is None else without_credentials(f"Learning failed and will be retried ({error!r}).")

    @property
    def state(self) -> str:
        """What the learner does now: `"learning"`, `"idle"`, or `"failed"`."""
        if self.failure is not None:
            return "failed"
        return "learning" if self.assistant.is_learning else "idle"

    def statistics(self) -> dict[str, Any]:
        """Return counts and acceptance of all requests for JSON, without any text."""
        decisions = [
            {key: value for key, value in decision.to_dict().items() if key != "reason"}
            for decision in self.assistant.decisions[-20:]
        ]
        return {
            "pair": self.pair.name,
            "requests": self.count,
            "state": self.state,
            "overall": compare_drafts(self.records),
            "by_domain": {domain: compare_drafts(part) for domain, part in by_domain(self.records).items()},
            "learning_seconds": self.assistant.learning_seconds,
            "saved_seconds": self.assistant.saved_seconds,
            "decisions": decisions,
        }

    def save(self, folder: Path) -> list[Path]:
        """Save the session, and each draft that has learned as a model folder; return the folders."""
        self.assistant.save_state(folder / "session")
        saved = [folder / "session"]
        for domain in self.assistant.drafts.domains:
            if self.assistant.drafts.serving_version(domain):
                # Quoted, because a loaded session may have domains with any name.
                name = SHARED if domain is None else quote(domain, safe="").replace(".", "%2E")
                saved.append(folder / "drafts" / name)
                self.assistant.save_pretrained(saved[-1], domain=domain)
        return saved


def by_domain(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group records by domain, without those of a pair that has no domains."""
    domains = dict.fromkeys(record.domain for record in records if record.domain)
    return {domain: [record for record in records if record.domain == domain] for domain in domains}


def compare_drafts(records: Sequence[Record]) -> dict[str, Any]:
    """Return the number of records, and tokens per pass of the target and alpha of both drafts over the newest twenty,
    `None` if nothing was drafted."""
    found: dict[str, Any] = {"requests": len(records)}
    for side in SIDES:
        stats = sum((getattr(record, side) for record in records[-20:]), AcceptanceStats())
        found[f"{side}_tokens_per_target_pass"] = stats.block_efficiency if stats.target_forwards else None
        found[f"{side}_alpha"] = stats.alpha if stats.examined else None
    return found


@dataclass(frozen=True)
class Settings:
    """Settings of one prompt. Raises ConfigError for a value out of range."""

    domain: str = AUTOMATIC
    learn: bool = True  # `False`: nothing of the request is kept or learned from
    k: str = "auto"  # tokens drafted per round
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 96
    check: bool = False  # compare with an answer of the target alone
    remember: bool = False  # include the earlier turns of the chat

    def __post_init__(self) -> None:
        if self.domain not in (AUTOMATIC, GENERAL, NO_DOMAIN, *DOMAINS):
            raise ConfigError(f"The domain must be one of {', '.join((*DOMAINS, GENERAL))}, got {self.domain!r}.")
        if self.k not in K_CHOICES:
            raise ConfigError(f"`k` must be one of {', '.join(K_CHOICES)}, got {self.k!r}.")
        if type(self.max_new_tokens) is not int or not 0 < self.max_new_tokens <= MAX_NEW_TOKENS:
            raise ConfigError(
                f"`max_new_tokens` must be an integer from 1 to {MAX_NEW_TOKENS}, got {self.max_new_tokens!r}."
            )
        for name, value, maximum in (("temperature", self.temperature, 5), ("top_p", self.top_p, 1)):
            if type(value) not in (int, float) or not 0 < value <= maximum:
                raise ConfigError(f"`{name}` must be above 0 and at most {maximum}, got {value!r}.")

    @property
    def generate_kwargs(self) -> dict[str, object]:
        """The arguments of `generate`."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0} if self.do_sample else {}
        return {"do_sample": self.do_sample, "max_new_tokens": self.max_new_tokens, **sampling}


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of an answer, as the page shows it. `origin` is that of `EmittedToken`, or `"text"` if the token was
    accepted from earlier text, or `"target"` until the origin is known. A correction has what the draft proposed
    (`drafted`) and its probability."""

    text: str
    origin: str
    drafted: str | None = None
    probability: float | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """What one draft proposes along a greedy answer, by replay: the tokens by origin, and the counts."""

    tokens: list[ShownToken]
    stats: AcceptanceStats
    version: int


@dataclass(eq=False, kw_only=True)
class _Job:
    is_done: bool = False
    error: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class Answer(_Job):
    """One prompt and its answer, which grows while it is generated."""

    prompt: str
    settings: Settings
    domain: str = GENERAL
    tokens: list[ShownToken] = field(default_factory=list)
    position: int = 0  # number of requests ahead
    stats: AcceptanceStats | None = None
    version: int = 0
    seconds: float = 0.0
    alone_seconds: float | None = None
    is_measured: bool = False  # `alone_seconds` was measured for this answer; otherwise it is an estimate
    is_identical: bool | None = None
    trace: Trace | None = None  # kept to show the answer again with later versions of the draft
    sides: dict[str, Side] = field(default_factory=dict)  # of the frozen and the learning draft, if greedy

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


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
    # Owner of the text that may be proposed again; not the `id`, and new after the chat is cleared.
    owner: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    entries: list[Answer | Batch] = field(default_factory=list)
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
    def compared(self) -> Answer | None:
        """The newest answer with both sides, or the one that the app itself asked for."""
        last = [a for entry in self.entries for a in (entry.answers[-2:] if isinstance(entry, Batch) else [entry])]
        return next((answer for answer in reversed(last) if answer.sides), self.workspace.shown)

    def show(self, notice: str | None) -> None:
        """Show a notice below the entries until the next one starts."""
        self.notice = notice
        self.touch()

    def touch(self, *, is_urgent: bool = False) -> None:
        """Notify watchers of a change. Urgent changes, and the end of a job, are shown without delay."""
        with self.changed:
            self.revision += 1
            if is_urgent or self.job is None:
                self.urgent_revision = self.revision
            self.changed.notify_all()

    def frames(self, job: Answer | Batch | None = None) -> Iterator[None]:
        """Yield each time a job (by default the current one) should be shown, for the last time when it has ended."""
        job = job or self.job
        with self.changed:
            self.watchers += 1
        try:
            while True:
                next_frame = time.monotonic() + FRAME_SECONDS
                with self.changed:
                    shown, is_running = self.revision, job is not None and self.job is job
                yield
                if not is_running:
                    return
                self._wait(shown, next_frame - time.monotonic())
        finally:
            with self.changed:
                self.watchers -= 1
                self.last_watched = time.monotonic()

    def _wait(self, shown: int, seconds: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.urgent_revision > shown, seconds)
            self.changed.wait_for(lambda: self.revision > shown, LOOK_SECONDS)

    def stop_if_left(self, job: Answer | Batch) -> bool:
        """Stop a job if its untrusted visitor has left; return whether it is stopped."""
        is_away = not self.watchers and time.monotonic() - self.last_watched > AWAY_SECONDS
        if self.visitor is not None and is_away:
            job.stop.set()
        return job.stop.is_set()


class Sessions:
    """All chats, each with the shared workspace or a private one."""

    def __init__(self, shared: Workspace) -> None:
        self.shared = shared
        self.by_id: dict[str, Session] = {}
        self._private_rate = RateLimit(*PRIVATE_RATE)
        self._jobs = Quota(MAX_JOBS)
        self._paused = 0
        self._lock = threading.RLock()

    @property
    def private(self) -> list[Session]:
        """The chats with a private workspace."""
        return [session for session in self.by_id.values() if session.workspace.is_private]

    def open(self, session_id: str | None, visitor: str | None = None) -> Session:
        """Return the chat with this id, or a new chat. Raises ConfigError if no chat can be removed for a new one."""
        with self._lock:
            # A page that was open while the app restarted keeps its id.
            is_valid = isinstance(session_id, str) and re.fullmatch(ID_PATTERN, session_id, re.ASCII)
            name = session_id if is_valid else secrets.token_urlsafe(16)
            session = self.by_id.get(name)
            if session is None:
                removed = _to_remove(list(self.by_id.values()), MAX_SESSIONS, visitor)
                if removed is not None:
                    del self.by_id[removed.id]
                    if removed.workspace.is_private:
                        removed.workspace.close()
                session = self.by_id[name] = Session(name, self.shared, visitor=visitor)
            session.last_used = time.monotonic()
            return session

    def guest(self, visitor: str | None = None) -> Session:
        """Return a chat that is not kept."""
        return Session("", self.shared, visitor=visitor)

    def clear(self, session: Session) -> None:
        """Delete the content of a chat. Raises ConfigError while it is being answered."""
        with self._lock:
            _check_idle(session)
            session.entries = []
            session.workspace.assistant.forget(session.owner)
            session.owner = secrets.token_urlsafe(16)
        session.show(None)

    def start(self, session: Session, job: Answer | Batch, work: Callable[[], None], wants_private: bool) -> None:
        """Add a job to a chat, and do its work in a thread. Raises ConfigError as `Service.ask` does."""
        with self._lock:
            _check_idle(session)
            if wants_private and not session.workspace.is_private:
                raise ConfigError(f"{PRIVATE_REMOVED} Nothing was sent: tick the box again, or untick it.")
            if not self._jobs.acquire(session.visitor):
                raise ConfigError("Too many prompts are waiting. Try again in a moment.")
            session.job = job
            session.last_watched = time.monotonic()
            session.entries = [*session.entries, job][-MAX_ENTRIES:]
        session.show(None)

        def run() -> None:
            try:
                work()
            except OSDError as error:
                job.error = str(error)
            except Exception as error:
                logger.exception("An answer failed.")
                job.error = f"Internal error ({type(error).__name__}). See the log of the app."
            finally:
                with session.changed:
                    session.job = None
                    job.is_done = True
                self._jobs.release(session.visitor)
                session.touch()

        threading.Thread(target=run, name="osd_hf-answer", daemon=True).start()

    def set_private(self, session: Session, is_private: bool) -> None:
        """Give a chat a private workspace, or discard it and share again. Raises ConfigError during an answer, if no
        place is free, and if the visitor has created too many recently."""
        with self._lock:
            if is_private == session.workspace.is_private:
                return
            _check_idle(session)
            if not is_private:
                self._leave(session, None)
                return
            capacity = MAX_PRIVATE if self.shared.pair.domains else 1
            removed = _to_remove(self.private, capacity, session.visitor)
            if session.visitor is not None and not self._private_rate.acquire(session.visitor):
                raise ConfigError("Too many private drafts were created recently. Try again in a minute.")
            if removed is not None:
                self._leave(removed, PRIVATE_REMOVED)
            session.workspace = Workspace(self.shared.pair, self.shared.config, is_private=True)
            self._pause_or_resume()
        session.show(None)

    def _leave(self, session: Session, notice: str | None) -> None:
        """Close the private workspace of a chat, which shares again."""
        session.workspace.close()
        session.workspace = self.shared
        session.show(notice)

    @contextlib.contextmanager
    def learning_paused(self) -> Iterator[None]:
        """Pause learning in all workspaces inside the `with` block. Several threads may be inside."""
        with self._lock:
            self._paused += 1
            self._pause_or_resume()
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1
                self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        for workspace in self._workspaces():
            if self._paused:
                workspace.assistant.pause()
            else:
                workspace.assistant.resume()

    def _workspaces(self) -> list[Workspace]:
        return [self.shared, *(session.workspace for session in self.private)]

    def close(self) -> None:
        """Stop learning in all workspaces."""
        with self._lock:
            for workspace in self._workspaces():
                workspace.close()


def _check_idle(session: Session) -> None:
    if session.job is not None:
        raise ConfigError("This chat is still being answered. Wait for the end, or stop it.")


def _to_remove(kept: list[Session], capacity: int, visitor: str | None) -> Session | None:
    """Return the session that must be removed so that a visitor can have another, if any. A trusted visitor replaces
    the least recently used. An untrusted visitor may hold no more than there are free places, and then replaces own
    ones, empty chats first. If no place is free, one that was not used for some time is removed. Raises ConfigError if
    none can be removed."""
    free = capacity - len(kept)
    held = sum(session.visitor == visitor for session in kept)
    if free > 0 and (visitor is None or held < free):
        return None
    idle = [session for session in kept if session.job is None]
    candidates = [session for session in idle if visitor in (None, session.visitor)]
    if not candidates and free <= 0:
        candidates = [session for session in idle if session.last_used < time.monotonic() - ACTIVE_SECONDS]
        if not candidates:
            raise ConfigError("All places are in use at the moment. Try again in a few minutes.")
    return min(candidates, key=lambda s: (visitor is not None and bool(s.entries), s.last_used), default=None)
