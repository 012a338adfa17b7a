"""Versions that deploy themselves: loaded into engines one after the other, watched there, and taken back."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from osd_hf.acceptance import student
from osd_hf.engines.remote import LEAST_REQUESTS, LEAST_WINDOWS, Counts, Engine, Way
from osd_hf.engines.versions import JOURNAL, Published, VersionFolder
from osd_hf.errors import ConfigError, ServerError, first_line
from osd_hf.learning.gate import GateDecision
from osd_hf.utils.disk import write_whole
from osd_hf.utils.report import json_text

__all__ = ["Deployer", "compared"]

logger = logging.getLogger(__name__)

BEYOND_CHANCE = 2.6  # standard errors, of many windows, at the end of a watch; more before, see `compared`
MOST_LINES = 1000  # of the journal, when a process begins, beside decisions and what came last to each engine
DECISIONS = ("kept", "rolled back")
LEAST_PAUSE = 0.1  # seconds between two looks
MOST_FAILURES = 3  # loads of a new version into an engine that had another one, after which it is taken back


# --- the rule -------------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """Acceptance before and after, the standard error of their difference, and how many of these are beyond chance."""

    before: float
    after: float
    standard_error: float
    limit: float

    @property
    def outcome(self) -> Literal["fell", "rose", "unclear"]:
        """What is beyond chance."""
        gain, least = self.after - self.before, self.limit * self.standard_error
        return "fell" if gain < -least else "rose" if gain > least else "unclear"


def compared(before: Sequence[Counts], after: Sequence[Counts], watch_requests: int) -> Change | None:
    """
    How acceptance changed between two series of windows; `None` where they are too few.

    Accepted tokens of a window are taken for binomial, spread out by a factor that how the windows of each side differ
    among themselves tells (a quasi-binomial comparison): tokens of one answer go together, and requests differ. What
    is beyond chance follows Student's distribution, by the number of windows. It is asked after each window, so that
    more is needed early: the limit falls with the root of the requests seen (the boundary of O'Brien and Fleming).
    """
    sides = [np.array([w[1:] for w in side if w.examined > 0], float).reshape(-1, 2) for side in (before, after)]
    freedom = sum(map(len, sides)) - 2
    if not len(sides[0]) or len(sides[1]) < LEAST_WINDOWS or freedom < LEAST_WINDOWS - 1:
        return None
    alphas, variances, squares = [], [], 0.0
    for examined, accepted in (side.T for side in sides):
        alpha = accepted.sum() / examined.sum()
        smoothed = (accepted.sum() + 0.5) / (examined.sum() + 1)  # neither 0 nor 1, which would know no chance
        spread = smoothed * (1 - smoothed)
        squares += float(((accepted - alpha * examined) ** 2 / (examined * spread)).sum())
        alphas.append(float(alpha))
        variances.append(float(spread / examined.sum()))
    dispersion = max(squares / freedom, 1.0)
    share = min(sum(window.requests for window in after) / watch_requests, 1.0)
    limit = student(BEYOND_CHANCE / math.sqrt(share), freedom + 1)
    return Change(alphas[0], alphas[1], math.sqrt(dispersion * sum(variances)), limit)


# --- the roll-out ---------------------------------------------------------------------------------------------------


class Deployer:
    """
    Brings the version that `latest` points to into engines, one after the other, and watches it there over the next
    requests: where fewer of its tokens are accepted than of the version before, by more than chance, that one is
    loaded again, `latest` set back to it, and weights of that digest are never deployed again. A load that fails is
    tried again later; of a new version, it holds up the engines after it, and the third failure takes it back. All is
    told in the log and in `deploy.jsonl` beside the versions, from which another process goes on.

    Args:
        versions (`VersionFolder`): What is published.
        ways (`Sequence[Way]`): The engines, in the order of loading.
        domain (`str`, *optional*): Whose versions, for decisions.
        watch_requests (`int`, *optional*, defaults to 200):
            Requests after which a version stays, unless it was found better or worse before; at least 30.
        load_seconds (`float`, *optional*, defaults to 600.0): The longest that a load into one engine may take.
        stop (`threading.Event`, *optional*), clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`):
            Ends waiting and [`~Deployer.run`]; seconds.

    Raises:
        ConfigError: a watch of too few requests.

    Attributes:
        serving (`Published`, *optional*): What engines are to serve, watched to the end.
        candidate (`Published`, *optional*): What is being loaded or watched in its place.
        decisions (`list[GateDecision]`): Of this process, by numbers of versions.
    """

    def __init__(
        self, versions: VersionFolder, ways: Sequence[Way], *, domain: str | None = None, watch_requests: int = 200,
        load_seconds: float = 600.0, stop: threading.Event | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if watch_requests < LEAST_REQUESTS:
            raise ConfigError(f"A version is watched for {LEAST_REQUESTS} requests or more, got {watch_requests}.")
        self.versions, self.domain, self.watch_requests = versions, domain, watch_requests
        self.stop = stop or threading.Event()
        self.engines = [Engine(way, watch_requests, load_seconds, self.stop, clock) for way in ways]
        self.serving: Published | None = None
        self.candidate: Published | None = None
        self.decisions: list[GateDecision] = []
        self._rejected: set[str] = set()  # digests
        self._unwritten: list[str] = []  # lines of the journal
        self._unmarked: list[GateDecision] = []  # rejections that are not on the disk yet
        self._has_begun, self._is_stuck, self._failure = False, False, ""
        self._looking = threading.Lock()
        with contextlib.suppress(OSError):  # told at the first look
            self._go_on()

    def run(self, poll_seconds: float) -> None:
        """Look at versions and engines until told to stop."""
        while not self.stop.wait(max(poll_seconds, LEAST_PAUSE)):
            self.look()

    def look(self) -> None:
        """Read the engines' counters, decide about what is watched, and load what is to be loaded: a new version into
        one more engine at most. What fails is told in the log once, and tried again at the next look. May be called
        from several threads."""
        with self._looking:
            try:
                if not self._has_begun:
                    self._go_on()
                for engine in self.engines:
                    engine.look()
                self._choose()
                self._decide()
                self._roll_out()
                self._write()
                self._failure = ""
            except Exception as error:  # whatever it is, learning must go on
                if self._failure != (failure := f"{type(error).__name__}: {error}"):
                    logger.exception("Looking after the versions in engines failed; it is tried again.")
                self._failure = failure

    def report(self) -> dict[str, Any]:
        """What engines serve, what is watched, and what was decided; ready for JSON."""
        serving, watched = (None if v is None else v.number for v in (self.serving, self.candidate))
        return {
            "domain": self.domain, "engines": [engine.name for engine in self.engines], "serving": serving,
            "watched": watched, "decisions": [decision.to_dict() for decision in self.decisions],
        }  # fmt: skip

    def summary(self) -> str:
        """The same in a line."""
        found = self.report()
        whose = "" if self.domain is None else f" of {self.domain!r}"
        how = "waits for another command to watch it" if self.stop.is_set() else "is watched"
        watched = "" if found["watched"] is None else f", version {found['watched']} {how}"
        back = sum(decision.outcome == "rolled back" for decision in self.decisions)
        engines = ", ".join(found["engines"])
        return f"{engines}: version {found['serving'] or 0}{whose} serves{watched}; {back} taken back"

    def close(self) -> None:
        """Write down what was counted, and close the connections."""
        self.stop.set()
        if self._looking.acquire(blocking=False):  # otherwise a load is under way, and nobody waits for it
            with contextlib.suppress(OSError):
                if self._has_begun and (version := self.candidate or self.serving) is not None:
                    self._note("closed", version, windows=self._windows())
                self._write()
            self._looking.release()
        for engine in self.engines:
            engine.close()

    def _choose(self) -> None:
        """Take the version that is pointed to for the next one, unless another one is in an engine already."""
        if self.serving is None:
            self.serving = self.versions.version(0)
            self._pin()
        if self.candidate is not None and any(engine.digest == self.candidate.digest for engine in self.engines):
            return
        folder, known = self.versions.latest, self.candidate or self.serving
        if folder is None or (known is not None and folder.name == known.path.name):
            return
        newest = self.versions.newest()
        if newest is None:
            return
        self.candidate = None
        if self.serving is not None and newest.digest == self.serving.digest:
            self.serving = newest  # the same weights
        elif newest.digest not in self._rejected:
            self.candidate = newest
        self._pin()

    def _pin(self) -> None:
        self.versions.pin(version.number for version in (self.serving, self.candidate) if version is not None)

    # --- loading ----------------------------------------------------------------------------------------------------

    def _roll_out(self) -> None:
        """Load what serves wherever it is not, whatever fails elsewhere, and a new version into one more engine."""
        new, spreads = self.candidate, self._may_spread()
        for engine in self.engines:
            has_new = new is not None and new.digest in (engine.digest, engine.failed)
            begins = spreads and not has_new and engine.is_measured and not engine.is_away
            wanted = new if has_new or begins else self.serving
            if wanted is None or engine.holds(wanted) or engine.must_wait(wanted):
                continue
            spreads = spreads and not begins
            self._load(engine, wanted)
            if self.candidate is not new:  # it was taken back
                self._roll_out()
                return

    def _may_spread(self) -> bool:
        """Whether one more engine may get the version that is watched: nowhere has its load failed, and enough was
        seen of it for a fall to be found. Nobody waits for engines without requests."""
        if self.candidate is None or any(engine.failed == self.candidate.digest for engine in self.engines):
            return False
        on = [e for e in self.engines if e.digest == self.candidate.digest and e.counts_drafts is not False]
        return sum(len(e.windows) for e in on) >= LEAST_WINDOWS or all(e.is_idle for e in on)

    def _load(self, engine: Engine, wanted: Published) -> None:
        is_told, is_new, earlier = engine.failed == wanted.digest, wanted is self.candidate, engine.digest
        try:
            has_changed = engine.load(wanted, self.serving if is_new else None, is_new=is_new)
        except ServerError as error:
            if not is_told:
                logger.warning("Version %d was not loaded, and is tried again: %s", wanted.number, error)
                self._note("failed", wanted, engine=engine.name, error=str(error))
            is_hopeless = engine.failures >= MOST_FAILURES and earlier not in (None, wanted.digest)
            if is_new and is_hopeless and self.serving is not None:
                told = f"{engine.name} has not loaded it {engine.failures} times"
                self._decided("rolled back", f"{told}: {first_line(error)}", 0, None)
            return
        if has_changed:
            again = " again" if earlier == wanted.digest else ""
            logger.info("Loaded version %d into %s%s.", wanted.number, engine.name, again)
            self._note("loaded", wanted, engine=engine.name, before=engine.before, windows=self._windows(engine))

    # --- deciding ---------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Take the version that is watched back, or let it stay, where that is clear."""
        if self.candidate is None:
            return
        on = [engine for engine in self.engines if engine.digest == self.candidate.digest]
        both = [engine for engine in on if engine.before and engine.windows]
        requests = round(sum(window.requests for engine in on for window in engine.windows))
        change = compared(
            [w for e in both for w in e.before], [w for e in both for w in e.windows], self.watch_requests
        )
        if len(on) == len(self.engines) and all(engine.counts_drafts is False for engine in on):
            self._decided("promoted", "no engine counts what it drafts, so that nothing is watched", 0, None)
        elif change is None:
            if requests >= self.watch_requests and self.serving is not None and not any(e.before for e in on):
                logger.info("Version %d has nothing to be compared with: version %d is loaded again, and counted.",
                            self.candidate.number, self.serving.number)  # fmt: skip
                self.candidate = None
            return
        elif change.outcome != "unclear" or requests >= self.watch_requests:
            told = (
                f"acceptance went from {change.before:.3f} to {change.after:.3f}, standard error "
                f"{change.standard_error:.3f}, over {requests} requests"
            )
            if change.outcome != "fell":
                self._decided("promoted", told, requests, change)
            elif self.serving is not None:
                self._decided("rolled back", told, requests, change)
            elif not self._is_stuck:
                self._is_stuck = True
                logger.warning("Version %d: %s, and there is no version to go back to.", self.candidate.number, told)

    def _decided(
        self, outcome: Literal["promoted", "rolled back"], reason: str, requests: int, change: Change | None
    ) -> None:
        assert self.candidate is not None
        version, serving = self.candidate, self.candidate
        if outcome == "rolled back":
            assert self.serving is not None
            serving = self.serving
        figures = (None, None, None) if change is None else change[:3]
        decision = GateDecision(outcome, version.number, serving.number, self.domain, reason, requests, *figures)
        self.decisions.append(decision)
        if outcome == "rolled back":
            logger.warning("Version %d is taken back, version %d serves: %s.", version.number, serving.number, reason)
            self._rejected.add(version.digest)
            self._unmarked.append(decision)
            self._note(outcome, version, **decision.to_dict())
        else:
            logger.info("Version %d stays: %s.", version.number, reason)
            for engine in self.engines:
                engine.before = []
            self._note("kept", version, **decision.to_dict(), windows=self._windows())
        self.serving, self.candidate = serving, None
        with contextlib.suppress(OSError):  # it is tried again, and told, at the end of each look
            self._write()
        self._pin()

    # --- the journal ------------------------------------------------------------------------------------------------

    def _windows(self, *engines: Engine) -> dict[str, Any]:
        """What engines have counted with what they hold, by their names."""
        return {e.name: {"digest": e.digest, "windows": list(e.windows)} for e in engines or self.engines}

    def _note(self, event: str, version: Published, /, **facts: Any) -> None:
        line = {"at_seconds": time.time(), "event": event, **facts, "version": version.number,
                "digest": version.digest}  # fmt: skip
        self._unwritten.append(json_text(line) + "\n")

    def _write(self) -> None:
        """Bring to the disk what is not there yet; raises OSError where it does not take all, which is kept."""
        failed = None
        try:
            while self._unmarked:
                self.versions.reject(self._unmarked[0])
                del self._unmarked[0]
        except OSError as error:
            failed = error
        if self._unwritten:
            with (self.versions.path / JOURNAL).open("ab+") as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # half a line, of a full disk or of a process that was killed
                        file.write(b"\n")
                file.write("".join(self._unwritten).encode())
            self._unwritten.clear()
        if failed is not None:
            raise failed

    def _go_on(self) -> None:
        """Begin where the journal ends, which is made shorter; raises OSError where it cannot be read."""
        journal, lines = self.versions.path / JOURNAL, list[dict[str, Any]]()
        for text in journal.read_text(errors="replace").splitlines() if journal.is_file() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line, of a process that was killed
                line = json.loads(text)
                if "event" in line and "digest" in line:
                    lines.append(line)
        self._rejected |= self.versions.rejected()
        self.serving = self.versions.version(0)
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._noted(line)
        newest = self.versions.newest()
        if newest is not None and self.serving is not None and newest.digest in self._rejected - {self.serving.digest}:
            told = "it was taken back before"  # and the process ended before the disk said so
            self._unmarked.append(GateDecision("rolled back", newest.number, self.serving.number, self.domain, told))
        if len(lines) > MOST_LINES:
            last = {id(line) for line in {(line["event"], line.get("engine")): line for line in lines}.values()}
            kept = [line for line in lines[:-MOST_LINES] if id(line) in last or line["event"] in DECISIONS]
            kept = [line if id(line) in last else {**line, "windows": {}} for line in kept] + lines[-MOST_LINES:]
            with contextlib.suppress(OSError):
                write_whole(journal, "".join(json_text(line) + "\n" for line in kept).encode(), private=False)
        self._has_begun = True
        self._pin()

    def _noted(self, line: Mapping[str, Any]) -> None:
        event, version = line["event"], self.versions.version(int(line["version"]))
        if event == "rolled back":
            self._rejected.add(line["digest"])
            self.candidate = None
        elif event == "kept":
            self.candidate = None
            self.serving = version or self.serving
        elif (
            event == "loaded"
            and version is not None
            and (self.serving is None or line["digest"] != self.serving.digest)
        ):
            self.candidate = version
        counted = line.get("windows", {})
        for engine in self.engines:
            if event == "kept":
                engine.before = []
            if event == "loaded" and engine.name == line["engine"]:
                # It may have started anew since; other ways than reloading start what was loaded last.
                engine.held(line["digest"], is_sure=engine.way.kind != "reload")
                engine.before = [Counts(*window) for window in line["before"]]
            if event == "failed" and engine.name == line["engine"]:
                engine.doubted()
            if (own := counted.get(engine.name)) is not None and own["digest"] == engine.digest:
                engine.remember(Counts(*window) for window in own["windows"])
