"""Deploy draft versions: load them into engines one after the other, watch acceptance there, and roll back."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import httpx2
import numpy as np

from osd_hf.acceptance import student_quantile
from osd_hf.engines.completions import parse_address, vllm_counters
from osd_hf.engines.versions import JOURNAL, PublishedVersion, VersionFolder
from osd_hf.errors import ConfigError, ServerError, first_line, without_credentials
from osd_hf.learning.gate import GateDecision
from osd_hf.utils.report import json_text

WINDOW_REQUESTS = 10  # requests that are counted together, because the tokens of an answer are not independent
MIN_WINDOWS = 3  # with a version before it is judged
MIN_WATCHED_REQUESTS = MIN_WINDOWS * WINDOW_REQUESTS
HISTORY_FACTOR = 2  # a version is compared with about this many times the requests of a watch
LIMIT_STANDARD_ERRORS = 2.6  # limit when a watch is complete, with many windows; see `compare_windows`
CONNECT_SECONDS = 10.0
QUICK_SECONDS = 10.0  # timeout of requests that an engine answers immediately
RESET_SECONDS = 30.0
RETRY_SECONDS = 30.0
PAUSE_SECONDS = 1.0  # between two attempts at an engine that is not ready
MIN_POLL_SECONDS = 0.1
MAX_LOAD_FAILURES = 3  # of a new version in an engine that had another one, after which it is rolled back
METHOD = re.compile(r"(?:([^=]+?):)?(reload|restart)=(\S+)(?:\s+(\S.*))?", re.DOTALL)
EXTENSION_HINT = (
    " Serve with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls osd_hf.engines.vllm_reload.DraftReload; its log "
    "has more."
)
DRAFTS, ACCEPTED = "spec_decode_num_drafts", "spec_decode_num_accepted_tokens"

logger = logging.getLogger(__name__)


# --- comparing ------------------------------------------------------------------------------------------------------


class DraftCounts(NamedTuple):
    """Requests that an engine answered, and draft tokens that it examined and accepted."""

    requests: float
    examined: float
    accepted: float

    def since(self, before: DraftCounts) -> DraftCounts:
        """Return the difference to earlier counts."""
        return DraftCounts(*(now - then for now, then in zip(self, before, strict=True)))

    def limited_to(self, requests: float) -> DraftCounts:
        """Return counts with the same rates and at most `requests` requests."""
        share = min(requests / self.requests, 1.0) if self.requests else 1.0
        return DraftCounts(*(count * share for count in self))


def read_counts(metrics: str) -> DraftCounts | None:
    """Read the counters of vLLM's `/metrics`, summed over its engines and models; `None` if it does not draft."""
    found, prefix = vllm_counters(metrics), f"{ACCEPTED}_per_pos@"
    positions = {int(name.removeprefix(prefix)): found[name] for name in found if name.startswith(prefix)}
    if DRAFTS not in found or not positions:
        return None
    # A round examines its first draft token, and each one after an accepted token.
    examined = found[DRAFTS] + sum(positions.values()) - positions[max(positions)]
    return DraftCounts(found["request_success"], examined, found[ACCEPTED])


class AcceptanceChange(NamedTuple):
    """Acceptance before and after, the standard error of the difference, and the limit in standard errors."""

    before: float
    after: float
    standard_error: float
    limit: float

    @property
    def outcome(self) -> Literal["fell", "rose", "unclear"]:
        """Whether acceptance has changed beyond chance."""
        gain, threshold = self.after - self.before, self.limit * self.standard_error
        return "fell" if gain < -threshold else "rose" if gain > threshold else "unclear"


def compare_windows(
    before: Sequence[DraftCounts], after: Sequence[DraftCounts], watch_requests: int
) -> AcceptanceChange | None:
    """Compare acceptance between two series of windows; `None` if there are too few. Accepted tokens of a window are
    binomial with a dispersion that is estimated from the differences among the windows of each side (a quasi-binomial
    comparison), because tokens of one answer depend on each other and requests differ. The limit follows Student's
    distribution. As the comparison is repeated after each window, early looks need more: the limit falls with the root
    of the requests seen (the boundary of O'Brien and Fleming)."""
    sides = [np.array([w[1:] for w in side if w.examined > 0], float).reshape(-1, 2) for side in (before, after)]
    degrees_of_freedom = sum(map(len, sides)) - 2
    if not len(sides[0]) or len(sides[1]) < MIN_WINDOWS or degrees_of_freedom < MIN_WINDOWS - 1:
        return None
    alphas, variances, squares = [], [], 0.0
    for examined, accepted in (side.T for side in sides):
        alpha = accepted.sum() / examined.sum()
        smoothed = (accepted.sum() + 0.5) / (examined.sum() + 1)  # neither 0 nor 1, with a variance of 0
        variance = smoothed * (1 - smoothed)
        squares += float(((accepted - alpha * examined) ** 2 / (examined * variance)).sum())
        alphas.append(float(alpha))
        variances.append(float(variance / examined.sum()))
    dispersion = max(squares / degrees_of_freedom, 1.0)
    share = min(sum(window.requests for window in after) / watch_requests, 1.0)
    limit = student_quantile(LIMIT_STANDARD_ERRORS / math.sqrt(share), degrees_of_freedom + 1)
    return AcceptanceChange(alphas[0], alphas[1], math.sqrt(dispersion * sum(variances)), limit)


# --- one engine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeployMethod:
    """How versions of a domain are loaded into one engine."""

    url: str  # of the engine, with its `/metrics`
    command: str | None = None  # restarts the engine with a version; without one, the engine reloads its weights
    domain: str | None = None

    @property
    def engine_name(self) -> str:
        """The engine's address, without user, password and `/v1`."""
        return str(parse_address(self.url)[0]).rstrip("/").removesuffix("/v1")

    @classmethod
    def parse(cls, text: str) -> DeployMethod:
        """Parse `[DOMAIN:]reload=URL` or `[DOMAIN:]restart=URL COMMAND`; raises ConfigError."""
        found = METHOD.fullmatch(text.strip())
        if found is None or (found[2] == "restart") != bool(found[4]):
            given = without_credentials(text.strip())
            raise ConfigError(f"--deploy takes reload=URL or 'restart=URL COMMAND', got {given!r}.")
        domain, _, url, command = found.groups()
        try:
            parse_address(url)
        except ServerError as error:
            raise ConfigError(f"--deploy: {error}") from None
        return cls(url, command, domain)


@dataclass(eq=False, repr=False)
class Engine:
    """An engine that versions are loaded into: what it serves, and what it counts. It starts with version 0."""

    method: DeployMethod
    digest: str  # of the version that it got last
    watch_requests: int
    load_seconds: float
    stop: threading.Event
    clock: Callable[[], float]
    has_loaded: bool = False  # a version was loaded since the engine's start
    windows: dict[str, list[DraftCounts]] = field(default_factory=dict)  # the newest, by digest
    counts_drafts: bool | None = None  # unknown before the first answer
    is_away: bool = False  # the last attempt to read the counters failed
    failed_digest: str | None = None  # of the version that could not be loaded
    num_failures: int = 0  # in a row
    _retry_at: float = -math.inf
    _is_known: bool = True  # the engine surely serves `digest`
    _window_start: DraftCounts | None = DraftCounts(0, 0, 0)  # what an engine has counted is of version 0

    def __post_init__(self) -> None:
        self.name = self.method.engine_name
        _, user, password = parse_address(self.method.url)
        self._http = httpx2.Client(
            base_url=self.name,
            auth=httpx2.BasicAuth(user, password) if user or password else None,
            timeout=httpx2.Timeout(self.load_seconds, connect=CONNECT_SECONDS),
            trust_env=False,
        )

    def serves(self, version: PublishedVersion) -> bool:
        """Return whether the engine surely serves a version."""
        return self._is_known and self.digest == version.digest

    def must_wait(self, version: PublishedVersion) -> bool:
        """Return whether a load would fail or comes too early after a failure."""
        is_gone = self.is_away and self.method.command is None  # a command may start an engine
        return is_gone or (self.failed_digest == version.digest and self.clock() < self._retry_at)

    @property
    def has_baseline(self) -> bool:
        """Whether there are enough counts to compare a new version with, or never will be."""
        num_requests = sum(window.requests for window in self.windows.get(self.digest, ()))
        return self.counts_drafts is False or num_requests >= MIN_WATCHED_REQUESTS

    def windows_of(self, version: PublishedVersion) -> list[DraftCounts]:
        """Return the newest windows with a version."""
        return self.windows.get(version.digest, [])

    def look(self) -> None:
        """Read the counters, and end a window if there are enough requests."""
        now = self._read_counters()
        if self.is_away:
            self._may_have_restarted()
        if now is None:
            return
        if self._window_start is not None and min(now.since(self._window_start)) < 0:  # the engine has restarted
            self._window_start = None
            self._may_have_restarted()
        if not self._is_known:
            return
        window = now.since(self._window_start or now)
        self._window_start = self._window_start or now
        if window.requests >= WINDOW_REQUESTS:
            self._window_start = now
            windows = self.windows.setdefault(self.digest, [])
            windows.append(window.limited_to(self.watch_requests))
            del windows[: -HISTORY_FACTOR * self.watch_requests // WINDOW_REQUESTS]

    def _may_have_restarted(self) -> None:
        if self.method.command is None and self.has_loaded:  # a command restores what was loaded
            self._is_known = False

    def _read_counters(self) -> DraftCounts | None:
        """Return the counts; `None` if the engine is away, does not count drafts, or does not any more."""
        was_away, self.is_away = self.is_away, True
        try:
            response = self._http.get("/metrics", timeout=QUICK_SECONDS)
        except httpx2.HTTPError as error:
            reason = first_line(error)
        else:
            is_page = "html" in response.headers.get("content-type", "")
            now = read_counts(response.text) if response.status_code == 200 and not is_page else None
            may_lack_counters = response.status_code in (200, 404) and not is_page and not self.counts_drafts
            if now is not None or may_lack_counters:
                if now is None and self.counts_drafts is None:
                    logger.warning("%s counts no drafts at /metrics: versions are not watched there.", self.name)
                self.is_away = False
                self.counts_drafts = now is not None
                return now
            reason = f"status {response.status_code}{', no counters' if response.status_code == 200 else ''}"
        if not was_away:
            logger.warning("%s cannot be asked at /metrics, and is not watched until it can: %s.", self.name, reason)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what another process needs to continue; ready for JSON."""
        return {
            "digest": self.digest,
            "has_loaded": self.has_loaded,
            "is_known": self._is_known,
            "windows": self.windows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another process."""
        self.digest = state["digest"]
        self.has_loaded = state["has_loaded"]
        self._is_known = state["is_known"]
        self._may_have_restarted()
        self._window_start = None
        self.windows = {
            digest: [DraftCounts(*window) for window in windows] for digest, windows in state["windows"].items()
        }

    def load(self, version: PublishedVersion) -> bool:
        """Load a version; returns whether the engine did not serve it before. Raises ServerError if that fails."""
        self._is_known = False  # a failed load may leave a mixture
        try:
            has_changed = self._reload(version) if self.method.command is None else self._restart(version)
        except ServerError:
            self.num_failures = self.num_failures + 1 if self.failed_digest == version.digest else 1
            self.failed_digest = version.digest
            self._retry_at = self.clock() + RETRY_SECONDS
            self._window_start = None
            raise
        self.failed_digest = None
        self.num_failures = 0
        self.has_loaded = True
        self._is_known = True
        if self.digest == version.digest and not has_changed:  # the engine had not restarted
            return False
        self.digest = version.digest
        self._window_start = self._read_counters()
        return True

    def _reload(self, version: PublishedVersion) -> bool:
        body = {"method": "load_draft", "args": [str(version.path), version.digest]}
        try:
            response = self._http.post("/collective_rpc", json=body)
            if not response.is_success:
                status = response.status_code
                raise ServerError(f"{self.name} answered /collective_rpc with status {status}.{EXTENSION_HINT}")
            results = [dict(each) for each in response.json()["results"]]
        except httpx2.HTTPError as error:
            raise ServerError(f"{self.name} cannot be reached: {first_line(error)}.") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{self.name} has not said what it has loaded.{EXTENSION_HINT}") from error
        if failed := next((each["error"] for each in results if "error" in each), None):
            raise ServerError(f"{self.name} has not loaded version {version.number}: {failed}.")
        if {each.get("digest") for each in results} != {version.digest}:
            loaded = results[0].get("digest") if results else None
            hint = f"their digest is {loaded}, not {version.digest}"
            raise ServerError(f"{self.name} has loaded other weights than those of version {version.number}: {hint}.")
        is_new = any(each.get("is_new", True) for each in results)
        if is_new:
            # Drop the draft's cached prompts, which old weights computed: they cost acceptance, never an answer.
            send = partial(self._http.post, "/reset_prefix_cache?reset_running_requests=true", timeout=QUICK_SECONDS)
            if not self._repeat(lambda: send().json().get("success"), RESET_SECONDS):
                logger.warning("%s has not emptied its cache of prompts, which is of the draft before.", self.name)
        return is_new

    def _restart(self, version: PublishedVersion) -> bool:
        assert self.method.command is not None
        command = self.method.command.replace("{url}", shlex.quote(self.name))
        run_command(command.replace("{version}", shlex.quote(str(version.path))), self.load_seconds)
        if not self._repeat(lambda: self._http.get("/health", timeout=QUICK_SECONDS).is_success, self.load_seconds):
            raise ServerError(f"{self.name} is not healthy after its restart with version {version.number}.")
        return True

    def _repeat(self, is_done: Callable[[], Any], seconds: float) -> bool:
        """Repeat requests until they succeed; returns whether they have before the time is over."""
        until = self.clock() + seconds
        while True:
            with contextlib.suppress(httpx2.HTTPError, ValueError, AttributeError):
                if is_done():
                    return True
            if self.clock() >= until or self.stop.wait(PAUSE_SECONDS):
                return False

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def run_command(command: str, seconds: float) -> None:
    """Run a user's shell command; raises ServerError if it fails or takes longer."""
    with tempfile.TemporaryFile() as output:  # not a pipe, because programs that it starts may keep a pipe open
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                process.kill() if sys.platform == "win32" else os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise ServerError(f"The command {command!r} did not end within {seconds:g} s.") from None
        if code:
            output.seek(max(output.seek(0, os.SEEK_END) - 2000, 0))
            lines = output.read().decode(errors="replace").strip().splitlines()
            raise ServerError(f"The command {command!r} ended with code {code}: {(lines or ['no output'])[-1]}.")


# --- the roll-out ---------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Deployer:
    """Load the version that `latest` points to into engines, one after the other, and watch it there. If significantly
    fewer tokens are accepted than with the version before, that one is loaded again, `latest` points to it, and
    weights with that digest are never deployed again. A version is kept after `watch_requests` (at least 30), or
    earlier if it is clearly better. A failed load is repeated later. A new version that fails to load does not go to
    further engines, and is rolled back after the third failure. The log and the file `deploy.jsonl` record everything;
    another process continues from that file. Raises OSError if the journal cannot be read."""

    versions: VersionFolder
    methods: Sequence[DeployMethod]
    _: KW_ONLY
    domain: str | None = None
    watch_requests: int = 200
    load_seconds: float = 600.0
    stop: threading.Event = field(default_factory=threading.Event)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        assert self.watch_requests >= MIN_WATCHED_REQUESTS
        start = self.versions.version(0)
        assert start is not None
        how = (start.digest, self.watch_requests, self.load_seconds, self.stop, self.clock)
        self.engines = [Engine(method, *how) for method in self.methods]
        self.candidate: PublishedVersion | None = None  # the version being tried in place of the serving one
        self.decisions: list[GateDecision] = []  # of this process
        self._rejected_digests: set[str] = set()
        self._failure = ""
        self._lock = threading.Lock()
        self.serving = start  # the version that engines should serve
        self._read_journal()

    def run(self, poll_seconds: float) -> None:
        """Call [`~Deployer.look`] regularly until stopped."""
        while not self.stop.wait(max(poll_seconds, MIN_POLL_SECONDS)):
            self.look()

    def look(self) -> None:
        """Read the counters, decide about the watched version, and load versions; may be called from any thread."""
        with self._lock:
            try:
                for engine in self.engines:
                    engine.look()
                self._choose_candidate()
                self._judge_candidate()
                self._roll_out()
                self._failure = ""
            except Exception as error:  # learning continues after any failure
                if self._failure != (failure := f"{type(error).__name__}: {error}"):
                    logger.exception("Looking after the versions in engines failed; it is tried again.")
                self._failure = failure

    def report(self) -> dict[str, Any]:
        """Return what engines serve, what is watched, and the decisions; ready for JSON."""
        return {
            "domain": self.domain,
            "engines": [engine.name for engine in self.engines],
            "serving": self.serving.number,
            "watched": None if self.candidate is None else self.candidate.number,
            "decisions": [decision.to_dict() for decision in self.decisions],
        }

    def summary(self) -> str:
        """Return the report in one line."""
        engines = ", ".join(engine.name for engine in self.engines)
        domain = "" if self.domain is None else f" of {self.domain!r}"
        watched = "" if self.candidate is None else f", version {self.candidate.number} is watched"
        num_rollbacks = sum(decision.outcome == "rolled back" for decision in self.decisions)
        return f"{engines}: version {self.serving.number}{domain} serves{watched}; {num_rollbacks} rolled back"

    def close(self) -> None:
        """Write the counts to the journal, and close the connections."""
        self.stop.set()
        if self._lock.acquire(blocking=False):  # otherwise a load is under way, and this does not wait for it
            self._note("closed", self.candidate or self.serving)
            self._lock.release()
        for engine in self.engines:
            engine.close()

    def _choose_candidate(self) -> None:
        """Make the version that `latest` points to the candidate, unless an engine serves another candidate."""
        if self.candidate is not None and any(engine.digest == self.candidate.digest for engine in self.engines):
            return
        newest = self.versions.newest()
        if newest is None or newest.number == (self.candidate or self.serving).number:
            return
        self.candidate = None
        if newest.digest == self.serving.digest:
            self.serving = newest  # the same weights
        elif newest.digest not in self._rejected_digests:
            self.candidate = newest
        self._pin()

    def _pin(self) -> None:
        candidates = () if self.candidate is None else (self.candidate.number,)
        self.versions.pin((0, self.serving.number, *candidates))

    def _roll_out(self) -> None:
        """Load the serving version wherever it is missing, and the candidate into another engine."""
        candidate, may_spread = self.candidate, self._may_spread()
        for engine in self.engines:
            has_candidate = candidate is not None and candidate.digest in (engine.digest, engine.failed_digest)
            begins = may_spread and not has_candidate and engine.has_baseline and not engine.is_away
            wanted = candidate if candidate is not None and (has_candidate or begins) else self.serving
            if engine.serves(wanted) or engine.must_wait(wanted):
                continue
            may_spread = may_spread and not begins
            self._load(engine, wanted)
            if self.candidate is not candidate:  # it was rolled back
                self._roll_out()
                return

    def _may_spread(self) -> bool:
        """Return whether another engine may get the candidate: no load failed, and there are enough windows."""
        if self.candidate is None or any(engine.failed_digest == self.candidate.digest for engine in self.engines):
            return False
        serving = [e for e in self.engines if e.digest == self.candidate.digest and e.counts_drafts is not False]
        return not serving or sum(len(e.windows_of(self.candidate)) for e in serving) >= MIN_WINDOWS

    def _load(self, engine: Engine, wanted: PublishedVersion) -> None:
        had_failed = engine.failed_digest == wanted.digest
        is_candidate, earlier = wanted is self.candidate, engine.digest
        try:
            has_changed = engine.load(wanted)
        except ServerError as error:
            if not had_failed:
                logger.warning("Version %d was not loaded, and is tried again: %s", wanted.number, error)
                self._note("failed", wanted, engine=engine.name, error=str(error))
            could_load = engine.has_loaded and earlier != wanted.digest
            if is_candidate and could_load and engine.num_failures >= MAX_LOAD_FAILURES:
                reason = f"{engine.name} has not loaded it {engine.num_failures} times: {first_line(error)}"
                self._decide("rolled back", reason, 0, None)
            return
        if has_changed:
            again = " again" if earlier == wanted.digest else ""
            logger.info("Loaded version %d into %s%s.", wanted.number, engine.name, again)
            self._note("loaded", wanted, engine=engine.name)

    def _judge_candidate(self) -> None:
        """Keep the candidate or roll it back, if its acceptance is clear."""
        if self.candidate is None:
            return
        engines = [engine for engine in self.engines if engine.digest == self.candidate.digest]
        sides = [(engine.windows_of(self.serving), engine.windows_of(self.candidate)) for engine in engines]
        num_requests = round(sum(window.requests for _, after in sides for window in after))
        comparable = [(before, after) for before, after in sides if before and after]
        before = [window for windows, _ in comparable for window in windows]
        after = [window for _, windows in comparable for window in windows]
        change = compare_windows(before, after, self.watch_requests)
        if len(engines) == len(self.engines) and all(engine.counts_drafts is False for engine in engines):
            self._decide("promoted", "no engine counts what it drafts, so that nothing is watched", 0, None)
            return
        if change is None or (change.outcome == "unclear" and num_requests < self.watch_requests):
            return
        reason = (
            f"acceptance went from {change.before:.3f} to {change.after:.3f}, standard error "
            f"{change.standard_error:.3f}, over {num_requests} requests"
        )
        self._decide("rolled back" if change.outcome == "fell" else "promoted", reason, num_requests, change)

    def _decide(
        self,
        outcome: Literal["promoted", "rolled back"],
        reason: str,
        num_requests: int,
        change: AcceptanceChange | None,
    ) -> None:
        assert self.candidate is not None
        version = self.candidate
        serving = version if outcome == "promoted" else self.serving
        figures = (None, None, None) if change is None else change[:3]
        decision = GateDecision(outcome, version.number, serving.number, self.domain, reason, num_requests, *figures)
        if outcome == "rolled back":
            self.versions.reject(decision)  # after an OSError, the next look decides again
            logger.warning("Version %d is rolled back, version %d serves: %s.", version.number, serving.number, reason)
            self._rejected_digests.add(version.digest)
        else:
            logger.info("Version %d stays: %s.", version.number, reason)
        self.decisions.append(decision)
        for engine in self.engines:
            engine.windows = {serving.digest: engine.windows_of(serving)}
        self.serving = serving
        self.candidate = None
        self._note("kept" if outcome == "promoted" else outcome, version, **decision.to_dict())
        self._pin()

    def _note(self, event: str, version: PublishedVersion, /, **facts: Any) -> None:
        """Add a line to the journal: an event, and the state after it, which the next line has as well."""
        state = {
            "serving": self.serving.number,
            "candidate": None if self.candidate is None else self.candidate.number,
            "rejected": sorted(self._rejected_digests),
            "engines": {engine.name: engine.state_dict() for engine in self.engines},
        }
        line = {"at_seconds": time.time(), "event": event, **facts, "version": version.number}
        try:
            with (self.versions.path / JOURNAL).open("a", encoding="utf-8") as file:
                file.write(json_text({**line, "digest": version.digest, "state": state}) + "\n")
        except OSError as error:
            logger.warning("The journal has no line on %r: %s.", event, first_line(error))

    def _read_journal(self) -> None:
        """Restore the state from the last complete line of the journal."""
        journal = self.versions.path / JOURNAL
        lines = journal.read_text(errors="replace").splitlines() if journal.is_file() else []
        if lines:
            journal.write_text("\n".join(lines) + "\n")  # a killed process may have left half a line
        self._rejected_digests |= self.versions.rejected()
        for text in reversed(lines):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line
                state = json.loads(text)["state"]
                candidate = state["candidate"]
                self.serving = self.versions.version(state["serving"]) or self.serving
                self.candidate = None if candidate is None else self.versions.version(candidate)
                self._rejected_digests |= set(state["rejected"])
                for engine in self.engines:
                    if engine.name in state["engines"]:
                        engine.load_state_dict(state["engines"][engine.name])
                break
        self._pin()
