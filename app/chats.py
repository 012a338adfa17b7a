"""Chats: what visitors ask, how it is to be answered, and what has come of it so far."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from osd_hf import AcceptanceStats, ConfigError
from osd_hf_app.rooms import OTHER, Room

__all__ = ["Answer", "Batch", "Session", "Settings", "ShownToken"]

MAX_NEW_TOKENS = 512
MAX_K = 32
MAX_ENTRIES = 20  # of a chat, as many as are shown; the oldest go
MAX_CORRECTIONS = 500  # kinds of them counted in a chat; the rarest go
AWAY_SECONDS = 20.0  # after which what a stranger has left is stopped; a page that is loaded anew is back before


@dataclass(frozen=True)
class Settings:
    """How a prompt is answered. Raises ConfigError, which names the setting, the rule and the value."""

    domain: str | None = None  # `None` finds it by the prompt's words
    learn: bool = True  # otherwise nothing of the request is kept or learned from
    k: int | Literal["auto"] = 5  # tokens drafted per round
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
    """
    A token of an answer: its text, its origin (`EmittedToken.origin`, or `"target"` until it is known which of the
    target's it is), and for a correction what the draft had said and with what probability.
    """

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

    def begin(self, job: Answer | Batch) -> None:
        """Take a new entry, which is being answered from now on."""
        job.room = self.room if self.is_private else None
        self.job, self.notice, self.left = job, None, time.monotonic()
        self.entries.append(job)
        del self.entries[:-MAX_ENTRIES]

    def end(self, job: Answer | Batch) -> None:
        """Nothing is being answered any more."""
        with self.changed:
            self.job, job.is_done = None, True

    def weigh(self) -> None:
        """Count the memory that the entries take."""
        self.kept_bytes = sum(entry.kept_bytes for entry in self.entries)

    def forget_done(self) -> None:
        """Let go of the entries that are done."""
        count, self.entries = len(self.entries), [entry for entry in self.entries if not entry.is_done]
        self.weigh()
        if len(self.entries) < count:
            self.touch()

    def clear(self) -> None:
        """Forget what was asked and answered."""
        self.entries, self.corrections, self.notice, self.kept_bytes = [], Counter(), None, 0
        self.touch()

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
        # A new one each time, as the page may be reading the old one.
        counted = self.corrections + Counter(found)
        self.corrections = Counter(dict(counted.most_common(MAX_CORRECTIONS)))

    def touch(self, *, is_first: bool = False) -> None:
        """Tell those who watch that something is new; first tokens, and the end, are shown at once."""
        with self.changed:
            self.revision += 1
            self.changed.notify_all()
            if is_first or self.job is None:
                self._shown_at_once += 1
                self._urgent.notify_all()

    def frames(self, seconds: float, look_seconds: float, job: Answer | Batch | None = None) -> Iterator[None]:
        """
        The moments at which to show what has come of a job, by default of what is being answered: at once, then when
        something is new, but no more often than every `seconds`, or when nothing was new for `look_seconds`, to find
        out whether the page is still there. The last moment is when the job has ended. Whoever goes on with them
        counts as watching.
        """
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
