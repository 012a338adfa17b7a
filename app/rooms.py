"""Rooms: the drafts of each domain, which learn from all visitors of a room, and the figures of their acceptance."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig
from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf.errors import ConfigError, LearnerError, without_credentials
from osd_hf.router import CallableRouter
from osd_hf_app.pair import ServedPair

OTHER = "general"
SAMPLES = 200  # prompts per domain that the words of domains are learned from
LEAST_KNOWN = 0.5  # share of a prompt's words that the samples know
LEAST_MARGIN = 2.0  # nats between the two likeliest domains

SHARED = "shared"
SAVED = ".osd_hf_app_saved"  # in a folder that a save made: names of its files, which a later one may delete
MAKING = ".osd_hf_app_making"  # where a save puts together what it then moves to its place
KEPT = 5000  # newest requests that curves are drawn of


def classifier(samples: Mapping[str, Sequence[str]]) -> Callable[[str], str]:
    """A function from a prompt to its domain, by naive Bayes over words; to `OTHER` where the prompt is like none of
    the samples, or like those of two domains. Each domain has at least one sample."""
    counts = {domain: Counter(word for text in texts for word in _words(text)) for domain, texts in samples.items()}
    vocabulary = set().union(*counts.values())
    totals = {domain: sum(count.values()) + len(vocabulary) for domain, count in counts.items()}

    def domain_of(prompt: str) -> str:
        words = _words(prompt)
        known = [word for word in words if word in vocabulary]
        if not known or len(known) < LEAST_KNOWN * len(words):
            return OTHER
        scores = sorted(
            (sum(math.log((count[word] + 1) / totals[domain]) for word in known), domain)
            for domain, count in counts.items()
        )
        if len(scores) > 1 and scores[-1][0] - scores[-2][0] < LEAST_MARGIN:
            return OTHER
        return scores[-1][1]

    return domain_of


def _words(text: str) -> list[str]:
    # Digits stand for each other; signs tell code from prose.
    return re.findall(r"[^\W\d]+|\d|[^\w\s]", re.sub(r"\d", "0", text.lower()))


@functools.cache
def domain_router() -> CallableRouter:
    """What says which domain a prompt belongs to, learned from the bundled prompts."""
    return CallableRouter(classifier({d: [e.prompt for e in bundled_prompts(d, SAMPLES, seed=1)] for d in DOMAINS}))


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of a request, without any text. Both drafts are replayed on the same answer at the same k, so the
    curves compare drafts and nothing else."""

    number: int
    domain: str
    learning: AcceptanceStats
    frozen: AcceptanceStats
    version: int


class Room:
    """One assistant, with a draft per domain or one that all domains share, as the pair has it; the pair's own draft
    is the frozen one. With `state` a saved session goes on."""

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
                self.assistant.close()
                raise

    def _new_assistant(self) -> OnlineAssistant:
        router = domain_router() if self.pair.per_domain else None
        return OnlineAssistant(self.pair.target, self.pair.draft, self.pair.tokenizer, self.config, router=router)

    def add(self, domain: str, learning: AcceptanceStats, frozen: AcceptanceStats, version: int) -> None:
        """A request has ended."""
        with self._lock:
            self.count += 1
            self.records.append(Record(self.count, domain, learning, frozen, version))
            del self.records[:-KEPT]

    def reset(self) -> None:
        """Forget what was learned and what was counted; while no request of this room runs."""
        old, self.assistant = self.assistant, self._new_assistant()
        with contextlib.suppress(LearnerError):
            old.close()
        with self._lock:
            self.records, self.count = [], 0

    def close(self) -> None:
        """End learning. Nobody asks this room again, and a failure of its learner was logged."""
        with contextlib.suppress(LearnerError):
            self.assistant.close()

    def snapshot(self, domain: str | None = None) -> list[Record]:
        """The requests so far, of all domains or one."""
        with self._lock:
            return [record for record in self.records if domain in (None, record.domain)]

    @property
    def failure(self) -> str | None:
        """Why learning fails, if it has not succeeded since."""
        error = self.assistant.learning_error
        return None if error is None else without_credentials(f"Learning failed ({error!r}), and is tried again.")

    @property
    def state(self) -> str:
        """What the learner does."""
        if self.failure is not None:
            return "failed"
        return "learning" if self.assistant.is_learning else "idle"

    def statistics(self) -> dict[str, Any]:
        """Counts and figures of all requests, ready for JSON; no text of anyone."""
        records = self.snapshot()
        decisions = [
            {key: value for key, value in decision.to_dict().items() if key != "reason"}
            for decision in self.assistant.decisions[-20:]
        ]
        return {
            "pair": self.pair.name,
            "requests": self.count,
            "state": self.state,
            "overall": compared(records),
            "by_domain": {domain: compared(part) for domain, part in by_domain(records).items() if domain},
            "learning_seconds": self.assistant.learning_seconds,
            "saved_seconds": self.assistant.saved_seconds,
            "decisions": decisions,
        }

    def save(self, folder: Path) -> list[Path]:
        """Save the session, and each learned draft as an ordinary model folder; returns what was written. Files of
        drafts of an earlier save are deleted, other files there stay. Raises ConfigError where a folder that a draft
        should get holds something else: the session is saved then, and no draft is."""
        session, drafts = folder / "session", self.assistant.drafts
        self.assistant.save_state(session)
        places: dict[Path, str | None] = {}
        for domain in drafts.domains:
            if drafts.serving_version(domain) == 0:  # has learned nothing
                continue
            place = folder / "drafts" / (re.sub(r"[^\w.-]", "_", domain or SHARED).lstrip(".") or "_")
            while place in places:  # two names may differ in what a folder's name cannot hold
                place = place.with_name(f"{place.name}_")
            if place.exists() and not (place / SAVED).exists():
                raise ConfigError(
                    f"The session is saved as {session}, the drafts are not: {place} is no draft that was saved here. "
                    "Move it away, or save under another name."
                )
            places[place] = domain
        making = folder / "drafts" / MAKING
        shutil.rmtree(making, ignore_errors=True)  # left where a save was killed
        for saved in list((folder / "drafts").glob(f"*/{SAVED}")):
            _forget(saved.parent)
        for place, domain in places.items():
            self.assistant.save_pretrained(making, domain=domain)
            _move(making, place)
        return [session, *places]

    def push(self, domain: str, repo_id: str, token: str | None) -> str:
        """Push the draft that serves a domain as an ordinary model repo; returns its address. Raises ConfigError or
        HubError."""
        drafts = self.assistant.drafts
        if drafts.serving_version(domain) == 0:
            whose = f"The draft of {domain!r}" if self.pair.domains else "The draft"
            raise ConfigError(f"{whose} has learned nothing yet: there is nothing to push.")
        token = (token or "").strip() or None
        return self.assistant.push_to_hub(repo_id.strip(), domain=drafts.key(domain), token=token)


def _move(made: Path, place: Path) -> None:
    """Move the files of a folder to where others may be, and note which ones have come."""
    names = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
    place.mkdir(parents=True, exist_ok=True)
    (place / SAVED).write_text("\n".join(names), encoding="utf-8")  # first: files that a kill leaves are known, too
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).replace(place / name)
    shutil.rmtree(made)


def _forget(place: Path) -> None:
    """Delete the files that a save has put into a folder, and the folder where there are no others."""
    names = [Path(line) for line in (place / SAVED).read_text(encoding="utf-8").splitlines()]
    for name in names:
        if name.is_absolute() or ".." in name.parts:  # no save writes such a name
            continue
        (place / name).unlink(missing_ok=True)
        for inner in name.parents[:-1]:
            with contextlib.suppress(OSError):  # other files are there
                (place / inner).rmdir()
    if [path.name for path in place.iterdir()] == [SAVED]:
        shutil.rmtree(place)
    else:  # still known as a place for drafts
        (place / SAVED).write_text("", encoding="utf-8")


def by_domain(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The requests of each domain, in the order in which the domains came."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.domain, []).append(record)
    return found


def compared(records: Sequence[Record], last: int = 20) -> dict[str, Any]:
    """Alpha of both drafts, over all of these requests and over the last of them; `None` where nothing was drafted."""
    found: dict[str, Any] = {"requests": len(records)}
    for name, part in (("", records), ("last_", records[-last:])):
        for side in ("learning", "frozen"):
            found[f"{name}{side}_alpha"] = pooled(part, side)
    return found


def pooled(records: Sequence[Record], side: str) -> float | None:
    """Alpha of one of the drafts, `"learning"` or `"frozen"`, over these requests."""
    examined = sum(getattr(record, side).examined for record in records)
    return sum(getattr(record, side).accepted for record in records) / examined if examined else None
