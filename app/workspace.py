"""A workspace: the drafts that one visitor or all visitors share, and the records of their acceptance."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from osd_hf import AcceptanceStats, LabelRouter, OnlineAssistant, OnlineConfig
from osd_hf.errors import LearnerError, without_credentials
from osd_hf_app.pair import ServedPair

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
    """Return the number of records, and tokens per pass of the target and alpha of both drafts over the newest
    twenty, `None` if nothing was drafted."""
    found: dict[str, Any] = {"requests": len(records)}
    for side in SIDES:
        stats = sum((getattr(record, side) for record in records[-20:]), AcceptanceStats())
        found[f"{side}_tokens_per_target_pass"] = stats.block_efficiency if stats.target_forwards else None
        found[f"{side}_alpha"] = stats.alpha if stats.examined else None
    return found
