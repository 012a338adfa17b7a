"""What a visitor asked for, and what has come of it so far."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal

from osd_hf import AcceptanceStats, ConfigError
from osd_hf_app.domains import OTHER

__all__ = ["Answer", "Batch", "Settings", "ShownToken", "parsed_k"]

MAX_NEW_TOKENS = 512
MAX_K = 32


@dataclass(frozen=True)
class Settings:
    """
    How a prompt is answered.

    Args:
        domain (`str`, *optional*):
            `None` finds it by the prompt's words.
        learn (`bool`, defaults to `True`):
            With `False` nothing of the request is kept or learned from.
        k (`int` or `"auto"`, defaults to 5):
            Tokens drafted per round.
        do_sample (`bool`, defaults to `False`), temperature (`float`, defaults to 1), top_p (`float`, defaults to 1):
            As of `generate`.
        max_new_tokens (`int`, defaults to 96):
            Bound of the answer.
        check (`bool`, defaults to `False`):
            Whether the target answers once more alone, to compare time and, unless sampled, tokens.
        remember (`bool`, defaults to `False`):
            Whether the model sees the earlier turns of the chat.

    Raises:
        ConfigError: names the setting, the rule and the value.
    """

    domain: str | None = None
    learn: bool = True
    k: int | Literal["auto"] = 5
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 96
    check: bool = False
    remember: bool = False

    def __post_init__(self) -> None:
        def must(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise ConfigError(f"`{name}` must be {rule}, got {getattr(self, name)!r}.")

        must("k", self.k == "auto" or _within(self.k, 1, MAX_K), f'an integer from 1 to {MAX_K}, or "auto"')
        tokens = _within(self.max_new_tokens, 1, MAX_NEW_TOKENS)
        must("max_new_tokens", tokens, f"an integer from 1 to {MAX_NEW_TOKENS}")
        must("temperature", _is_number(self.temperature) and 0 < self.temperature <= 5, "above 0 and at most 5")
        must("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1")

    @property
    def generate_kwargs(self) -> dict[str, object]:
        """The part that `generate` takes."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0} if self.do_sample else {}
        return {"do_sample": self.do_sample, "max_new_tokens": self.max_new_tokens, **sampling}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def parsed_k(k: str | int) -> int | Literal["auto"]:
    """k from what a visitor or a program gives; raises ConfigError where it is neither a number nor "auto"."""
    if k == "auto":
        return "auto"
    try:
        return int(k)
    except (TypeError, ValueError) as error:
        raise ConfigError(f'`k` must be a number, or "auto", got {k!r}.') from error


def _within(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


@dataclass(frozen=True, slots=True)
class ShownToken:
    """
    A token of an answer: its text, where it came from (`EmittedToken.origin`; `"target"` while it is not known what of
    the target's it is), and for a correction what the draft had said and with what probability.
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
    room: object = None  # the visitor's own, that it is meant to teach

    @property
    def kept_bytes(self) -> int:
        """Memory that it takes, about."""
        return 1000 + 2 * len(self.prompt) + 300 * len(self.tokens) + len(self.drawn or "") + len(self.error or "")

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def speedup(self) -> float | None:
        """Over the target alone: measured on this answer, or by what the target took for others."""
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
    room: object = None  # as of an answer

    @property
    def kept_bytes(self) -> int:
        """Memory that it takes, about."""
        return 1000 + len(self.drawn or "") + sum(answer.kept_bytes for answer in self.answers)
