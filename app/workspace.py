"""A workspace: the drafts that one visitor or all visitors share, and the records of their acceptance."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from osd_hf import AcceptanceStats, LabelRouter, OnlineAssistant, OnlineConfig
from osd_hf.errors import ConfigError, LearnerError, without_credentials
from osd_hf_app.pair import ServedPair

SHARED = "shared"  # folder of a draft that all domains share
MAX_RECORDS = 5000

Side = Literal["learning", "frozen"]


@dataclass(frozen=True, slots=True)
class Record:
    """The counts of one request, without text. Both drafts are replayed on the same answer with the same k."""

    domain: str
    learning: AcceptanceStats
    frozen: AcceptanceStats
    version: int


class Workspace:
    """One assistant with a draft per domain, or one draft, as the pair requires. The pair's draft stays frozen."""

    def __init__(self, pair: ServedPair, config: OnlineConfig, state: Path | None = None) -> None:
        self.pair = pair
        self.config = config
        self.records: list[Record] = []
        self.count = 0
        self._lock = threading.Lock()
        self.assistant = self._new_assistant()
        if state is not None:
            try:
                self.assistant.load_state(state)
            except BaseException:
                self.close()
                raise

    def _new_assistant(self) -> OnlineAssistant:
        router = LabelRouter() if self.pair.per_domain else None
        return OnlineAssistant(self.pair.target, self.pair.draft, self.pair.tokenizer, self.config, router=router)

    def add(self, record: Record) -> None:
        """Record a finished request."""
        with self._lock:
            self.count += 1
            self.records.append(record)
            del self.records[:-MAX_RECORDS]

    def reset(self) -> None:
        """Discard what was learned and recorded. Call it only while no request of this workspace runs."""
        self.close()
        self.assistant = self._new_assistant()
        with self._lock:
            self.records = []
            self.count = 0

    def close(self) -> None:
        """Stop learning. A failure of the learner was logged before."""
        with contextlib.suppress(LearnerError):
            self.assistant.close()

    def snapshot(self, domain: str | None = None) -> list[Record]:
        """Return the records of all domains, or of one."""
        with self._lock:
            return [record for record in self.records if domain in (None, record.domain)]

    @property
    def failure(self) -> str | None:
        """Why learning failed, if it has not succeeded since."""
        error = self.assistant.learning_error
        return None if error is None else without_credentials(f"Learning failed and will be retried ({error!r}).")

    @property
    def state(self) -> Literal["failed", "learning", "idle"]:
        """What the learner does now."""
        if self.failure is not None:
            return "failed"
        return "learning" if self.assistant.is_learning else "idle"

    def statistics(self) -> dict[str, Any]:
        """Return counts and acceptance of all requests for JSON, without any text."""
        records = self.snapshot()
        decisions = [
            {key: value for key, value in decision.to_dict().items() if key != "reason"}
            for decision in self.assistant.decisions[-20:]
        ]
        return {
            "pair": self.pair.name,
            "requests": self.count,
            "state": self.state,
            "overall": compare_drafts(records),
            "by_domain": {domain: compare_drafts(part) for domain, part in by_domain(records).items() if domain},
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

    def push(self, domain: str, repo_id: str, token: str | None) -> str:
        """Push the draft of a domain as a model repository; return its address. Raises ConfigError or HubError."""
        drafts = self.assistant.drafts
        if drafts.serving_version(domain) == 0:
            subject = f"The draft of {domain!r}" if self.pair.domains else "The draft"
            raise ConfigError(f"{subject} has learned nothing yet: there is nothing to push.")
        token = (token or "").strip() or None
        return self.assistant.push_to_hub(repo_id.strip(), domain=drafts.key(domain), token=token)


def by_domain(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group records by domain, in the order of each domain's first record."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.domain, []).append(record)
    return found


def compare_drafts(records: Sequence[Record], last: int = 20) -> dict[str, Any]:
    """Return alpha of both drafts over all records and over the last ones; `None` if nothing was drafted."""
    return {
        "requests": len(records),
        "learning_alpha": pooled_alpha(records, "learning"),
        "frozen_alpha": pooled_alpha(records, "frozen"),
        "last_learning_alpha": pooled_alpha(records[-last:], "learning"),
        "last_frozen_alpha": pooled_alpha(records[-last:], "frozen"),
    }


def pooled_alpha(records: Sequence[Record], side: Side) -> float | None:
    """Return alpha of one draft over all tokens of these records; `None` if nothing was drafted."""
    examined = sum(getattr(record, side).examined for record in records)
    return sum(getattr(record, side).accepted for record in records) / examined if examined else None
