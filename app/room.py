"""A draft that learns from those who share it, and what it has shown: every visitor's, or one visitor's own."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osd_hf import AcceptanceStats, ConfigError, LabelRouter, LearnerError, OnlineAssistant, OnlineConfig
from osd_hf_app.pair import Pair

__all__ = ["Record", "Room", "compared", "pooled"]

SHARED = "shared"
SAVED = ".osd_hf_app_saved"  # in a folder that a save made: names of its files, which a later one may delete
MAKING = ".osd_hf_app_making"  # where a save puts together what it then moves to its place
KEPT = 5000  # newest requests that curves are drawn of


@dataclass(frozen=True, slots=True)
class Record:
    """
    What is kept of a request: no text. Both drafts by replay on the same answer at the same k, so that the curves
    compare drafts and nothing else.
    """

    number: int
    domain: str
    learning: AcceptanceStats
    frozen: AcceptanceStats
    version: int


class Room:
    """
    One assistant, with a draft per domain or one that all domains share, as the pair has it.

    Args:
        pair (`Pair`):
            The models; the pair's own draft is the frozen one.
        config (`OnlineConfig`):
            How to draft and learn.
        state (`Path`, *optional*):
            A saved session to go on with.
    """

    def __init__(self, pair: Pair, config: OnlineConfig, state: Path | None = None) -> None:
        self.pair = pair
        self.config = config
        self.records: list[Record] = []
        self.count = 0
        self._failure: tuple[str, int] | None = None
        self._lock = threading.Lock()
        self.assistant = self._assistant(state)

    def _assistant(self, state: Path | None = None) -> OnlineAssistant:
        assistant = OnlineAssistant(
            self.pair.target,
            self.pair.draft,
            self.pair.tokenizer,
            self.config,
            router=LabelRouter() if self.pair.per_domain else None,
        )
        if state is not None:
            try:
                assistant.load_state(state)
            except BaseException:
                assistant.close()
                raise
        return assistant

    def add(self, domain: str, learning: AcceptanceStats, frozen: AcceptanceStats, version: int) -> None:
        """A request has ended."""
        with self._lock:
            self.count += 1
            self.records.append(Record(self.count, domain, learning, frozen, version))
            del self.records[:-KEPT]

    def reset(self) -> None:
        """Forget what was learned and what was counted; while no request of this room runs."""
        old, self.assistant = self.assistant, self._assistant()
        close_quietly(old)
        with self._lock:
            self.records, self.count, self._failure = [], 0, None

    def snapshot(self, domain: str | None = None) -> list[Record]:
        """The requests so far, of all domains or one."""
        with self._lock:
            return [record for record in self.records if domain in (None, record.domain)]

    def failed(self, message: str) -> None:
        """Learning has failed; it is said until a later version comes."""
        self._failure = (message, len(self.assistant.decisions))

    @property
    def failure(self) -> str | None:
        """What learning failed of, if nothing has been learned since."""
        if self._failure is None or len(self.assistant.decisions) > self._failure[1]:
            return None
        return self._failure[0]

    @property
    def learned(self) -> dict[str, str | None]:
        """Drafts that have learned something: a name for a folder or a list, and the domain."""
        drafts = self.assistant.drafts
        return {domain or SHARED: domain for domain in drafts.domains if drafts.serving_version(domain) > 0}

    @property
    def state(self) -> str:
        """What the learner does."""
        if self.failure is not None:
            return "failed"
        return "learning" if self.assistant.is_learning else "idle"

    def statistics(self) -> dict[str, Any]:
        """Counts and figures of all requests, ready for JSON; no text of anyone."""
        records = self.snapshot()
        domains = list(dict.fromkeys(record.domain for record in records))
        decisions = [
            {key: value for key, value in decision.to_dict().items() if key != "reason"}
            for decision in self.assistant.decisions[-20:]
        ]
        return {
            "pair": self.pair.name,
            "requests": self.count,
            "state": self.state,
            "overall": compared(records),
            "by_domain": {domain: compared([r for r in records if r.domain == domain]) for domain in domains},
            "learning_seconds": self.assistant.learning_seconds,
            "decisions": decisions,
        }

    def save(self, folder: Path) -> list[Path]:
        """
        Save the session, and each learned draft as an ordinary model folder; returns what was written. The files of
        drafts of an earlier save go, what else lies there stays.

        Raises:
            ConfigError: a folder that a draft should get holds something else; the session is saved, and no draft is.
        """
        session = folder / "session"
        self.assistant.save_state(session)
        places: dict[Path, str | None] = {}
        for name, domain in self.learned.items():
            place = folder / "drafts" / (re.sub(r"[^\w.-]", "_", name).lstrip(".") or "_")
            while place in places:  # two names may differ in what a folder's name cannot hold
                place = place.with_name(f"{place.name}_")
            if place.exists() and not (place / SAVED).exists():
                raise ConfigError(
                    f"The session is saved as {session}, the drafts are not: {place} is no draft that was saved here. "
                    "Move it away, or save under another name."
                )
            places[place] = domain
        making = folder / "drafts" / MAKING
        shutil.rmtree(making, ignore_errors=True)  # what a kill has left
        for saved in list((folder / "drafts").glob(f"*/{SAVED}")):
            _forget(saved.parent)
        for place, domain in places.items():
            self.assistant.save_pretrained(making, domain=domain)
            _move(making, place)
        return [session, *places]

    def push(self, domain: str, repo_id: str, token: str | None) -> str:
        """Push the draft that serves a domain as an ordinary model repo; gives its address. Raises ConfigError or
        HubError."""
        drafts = self.assistant.drafts
        if drafts.serving_version(domain) == 0:
            raise ConfigError(f"The draft of {domain!r} has learned nothing yet: there is nothing to push.")
        return self.assistant.push_to_hub(
            repo_id.strip(), domain=drafts.key(domain), token=(token or "").strip() or None
        )

    def close(self) -> None:
        """End learning."""
        close_quietly(self.assistant)


def _move(made: Path, place: Path) -> None:
    """Move the files of a folder to where others may be, and note which ones have come."""
    names = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
    place.mkdir(parents=True, exist_ok=True)
    (place / SAVED).write_text("\n".join(names), encoding="utf-8")  # first: what a kill leaves is known, too
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).replace(place / name)
    shutil.rmtree(made)


def _forget(place: Path) -> None:
    """Delete the files that a save has put into a folder, and the folder where there are no others."""
    names = [Path(line) for line in (place / SAVED).read_text(encoding="utf-8").splitlines()]
    for name in names:
        if name.is_absolute() or ".." in name.parts:  # nothing that a save writes
            continue
        (place / name).unlink(missing_ok=True)
        for inner in name.parents[:-1]:
            with contextlib.suppress(OSError):  # other files are there
                (place / inner).rmdir()
    if [path.name for path in place.iterdir()] == [SAVED]:
        shutil.rmtree(place)
    else:  # known as a place for drafts for all that
        (place / SAVED).write_text("", encoding="utf-8")


def close_quietly(assistant: OnlineAssistant) -> None:
    """Close an assistant that nobody will ask again; what its learner failed of was logged."""
    with contextlib.suppress(LearnerError):
        assistant.close()


def compared(records: Sequence[Record], last: int = 20) -> dict[str, Any]:
    """Alpha of both drafts, over all of these requests and over the last of them; `None` where nothing was drafted."""
    found: dict[str, Any] = {"requests": len(records)}
    for name, part in (("", records), ("last_", records[-last:])):
        for side in ("learning", "frozen"):
            found[f"{name}{side}_alpha"] = pooled(part, side)
    return found


def pooled(records: Sequence[Record], side: str) -> float | None:
    """Alpha of one of the drafts over these requests."""
    examined = sum(getattr(record, side).examined for record in records)
    return sum(getattr(record, side).accepted for record in records) / examined if examined else None
