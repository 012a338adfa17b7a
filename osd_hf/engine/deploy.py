"""Versions that deploy themselves: loaded into engines one after the other, watched there, and taken back."""

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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import httpx2
import numpy as np

from osd_hf.engine.completions import parse_address
from osd_hf.engine.versions import Published, VersionFolder
from osd_hf.errors import ConfigError, ServerError, first_line, shown_address
from osd_hf.learning.gate import GateDecision
from osd_hf.metrics import student
from osd_hf.utils.report import json_text

__all__ = ["JOURNAL", "Counts", "Deployer", "Engine", "Way", "compared", "read_counts"]

logger = logging.getLogger(__name__)

JOURNAL = "deploy.jsonl"
WINDOW = 10  # requests of one engine that are counted together: the tokens of an answer are not independent
LEAST_WINDOWS = 3  # with a version before anything is said of it
BEYOND_CHANCE = 2.6  # standard errors, of many windows, at the end of a watch; more before, see `compared`
REACH = 2  # times the requests of a watch that it is compared with
CONNECT_SECONDS, LOOK_SECONDS, RESET_SECONDS, RETRY_SECONDS = 10.0, 10.0, 30.0, 30.0
EXTENSION = (
    " Serve with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls osd_hf.engine.vllm_reload.DraftReload; its log has "
    "more."
)
PAUSE_SECONDS, LEAST_PAUSE = 1.0, 0.1  # between two attempts at an engine that is not ready; between two looks
WAY = re.compile(r"(?:([^=]+?):)?(reload|restart|webhook)=(\S+)(?:\s+(\S.*))?", re.DOTALL)
SAMPLE = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{(.*)\})?\s+(\S+)$", re.MULTILINE)
DRAFTS, ACCEPTED = "spec_decode_num_drafts", "spec_decode_num_accepted_tokens"
BY_POSITION, REQUESTS = f"{ACCEPTED}_per_pos", "request_success"


# --- what an engine counts ------------------------------------------------------------------------------------------


class Counts(NamedTuple):
    """Requests that an engine has answered, and tokens of its draft that were examined and accepted: since its start,
    or of a window between two looks."""

    requests: float
    examined: float
    accepted: float

    def since(self, before: Counts) -> Counts:
        """What has come after an earlier look."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))

    def at_most(self, requests: float) -> Counts:
        """The same rates, with the weight of so many requests where there are more."""
        share = min(requests / self.requests, 1.0) if self.requests else 1.0
        return Counts(*(count * share for count in self))


def read_counts(metrics: str) -> Counts | None:
    """
    The counters of vLLM's `/metrics`, over all of its engines and models; `None` where it does not draft.

    A draft examines its first token, and each one after an accepted one: as many as there were drafts, and tokens
    accepted at all positions but the last.
    """
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in SAMPLE.findall(metrics):
        if name == BY_POSITION:
            at = re.search(r'position="(\d+)"', labels)
            position = int(at[1]) if at is not None else 0
            positions[position] = positions.get(position, 0.0) + float(value)
        elif name in (DRAFTS, ACCEPTED, REQUESTS):
            totals[name] = totals.get(name, 0.0) + float(value)
    if DRAFTS not in totals or not positions:
        return None
    last = max(positions)
    examined = totals[DRAFTS] + sum(count for position, count in positions.items() if position != last)
    return Counts(totals.get(REQUESTS, 0.0), examined, totals.get(ACCEPTED, 0.0))


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


# --- an engine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How versions are loaded into one engine.

    Args:
        kind (`str`): `"reload"`, `"restart"` or `"webhook"`.
        url (`str`): The engine, whose `/metrics` are watched.
        rest (`str`): The command of a restart, the address of a webhook.
        domain (`str`, *optional*): Whose versions.
    """

    kind: str
    url: str
    rest: str = ""
    domain: str | None = None

    @classmethod
    def parse(cls, text: str) -> Way:
        """One as it is given: `[DOMAIN:]reload=URL`, `[DOMAIN:]restart=URL COMMAND` or `[DOMAIN:]webhook=URL HOOK`;
        raises ConfigError."""
        found = WAY.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                f"--deploy takes reload=URL, 'restart=URL COMMAND' or 'webhook=URL HOOK', got {text.strip()!r}."
            )
        domain, kind, url, rest = found.groups()
        needed = {"reload": "", "restart": "a command that starts it with {version}", "webhook": "the hook's address"}
        if bool(rest) != bool(needed[kind]):
            told = f"needs {needed[kind]} after the engine's address" if needed[kind] else f"takes no {rest!r}"
            raise ConfigError(f"--deploy {kind}={shown_address(url)} {told}.")
        try:
            for address in (url, rest) if kind == "webhook" else (url,):
                parse_address(address)
        except ServerError as error:
            raise ConfigError(f"--deploy: {error}") from None
        return cls(kind, url, rest or "", domain)


class Engine:
    """
    An engine that versions are loaded into, what it holds, and what it counts.

    Args:
        way (`Way`): How to load.
        watch_requests (`int`): Requests that a version is watched for; windows reach back twice as far.
        load_seconds (`float`): The longest that a load may take.
        stop (`threading.Event`), clock (`Callable[[], float]`): End waiting; seconds.

    Attributes:
        digest (`str`, *optional*): Of the version that was loaded here last; `None` where none was.
        windows (`deque[Counts]`), before (`list[Counts]`): With that version, and with the one before it.
        counts_drafts (`bool`, *optional*): Whether it counts what it drafts; `None` where it could not be asked yet.
    """

    def __init__(
        self, way: Way, watch_requests: int, load_seconds: float, stop: threading.Event, clock: Callable[[], float]
    ) -> None:
        self.way, self._watch_requests, self._load_seconds = way, watch_requests, load_seconds
        self._stop, self._clock = stop, clock
        self.name = str(parse_address(way.url)[0]).rstrip("/").removesuffix("/v1")
        self._http = httpx2.Client(timeout=httpx2.Timeout(load_seconds, connect=CONNECT_SECONDS), trust_env=False)
        self.digest: str | None = None
        self.windows: deque[Counts] = deque()
        self.before: list[Counts] = []
        self.counts_drafts: bool | None = None
        self._is_sure = True  # that it still holds what was loaded: where it was away, it may have started anew
        self._last: Counts | None = None
        self._has_history = True  # its counts so far are of what it holds

    def holds(self, version: Published) -> bool:
        """Whether it serves a version, as far as is known."""
        return self.digest == version.digest and (self._is_sure or self.way.kind != "reload")

    def look(self) -> None:
        """Read the counters, and end a window where enough requests have come."""
        try:
            response = self._send("GET", self.way.url, "/metrics", timeout=LOOK_SECONDS)
        except httpx2.HTTPError:
            self._is_sure = False
            return
        if response.status_code >= 500:
            self._is_sure = False
            return
        now = read_counts(response.text) if response.status_code == 200 else None
        if now is None and self.counts_drafts is not False:
            logger.warning("%s counts no drafts at /metrics: versions are not watched there.", self.name)
        self.counts_drafts = now is not None
        if now is None:
            return
        if self._last is None:
            if self._has_history and now.requests:
                self.windows.append(now.at_most(self._watch_requests))
            self._last, self._has_history = now, False
        elif min(new := now.since(self._last)) < 0:  # it has started anew
            self._last, self._is_sure = now, False
        elif new.requests >= WINDOW:
            self._last = now
            self.windows.append(new)
            while sum(w.requests for w in self.windows) - self.windows[0].requests >= REACH * self._watch_requests:
                self.windows.popleft()

    def load(self, version: Published, previous: Published | None, *, is_new: bool) -> None:
        """Let it serve a version: a new one, whose windows are to be compared with those so far, or the one that
        served before; raises ServerError where it does not."""
        self._is_sure = False  # what is loaded half-way is neither
        {"reload": self._reload, "restart": self._restart, "webhook": self._tell}[self.way.kind](version, previous)
        if self.digest != version.digest:
            if is_new:
                self.before, self.windows = list(self.windows), deque()
            else:
                self.before, self.windows = [], deque(self.before)
        self.held(version.digest)

    def held(self, digest: str, *, is_sure: bool = True) -> None:
        """It holds this version; what it has counted so far may be of another one."""
        self.digest, self._is_sure = digest, is_sure
        self._last, self._has_history = None, False

    def _reload(self, version: Published, previous: Published | None) -> None:
        body = {"method": "load_draft", "args": [str(version.path), version.digest]}
        try:
            results = [dict(each) for each in self._post(self.way.url, "/collective_rpc", body)["results"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{self.name} has not said what it has loaded.{EXTENSION}") from error
        if failed := next((each["error"] for each in results if "error" in each), None):
            raise ServerError(f"{self.name} has not loaded version {version.number}: {failed}.")
        if {each.get("digest") for each in results} != {version.digest}:
            raise ServerError(
                f"{self.name} has loaded other weights than those of version {version.number}: their digest is "
                f"{results[0].get('digest') if results else None}, not {version.digest}."
            )
        if any(each.get("is_new", True) for each in results):
            self._forget_prompts()

    def _forget_prompts(self) -> None:
        """Empty what the draft has cached of prompts with its old weights: leaving it costs acceptance on prompts that
        come again, never an answer."""
        until, done = self._clock() + RESET_SECONDS, False
        while not done:
            with contextlib.suppress(ServerError, AttributeError):
                answer = self._post(self.way.url, "/reset_prefix_cache", params={"reset_running_requests": "true"})
                done = bool(answer.get("success"))
            if not done and (self._clock() >= until or self._stop.wait(PAUSE_SECONDS)):
                logger.warning("%s has not emptied its cache of prompts, which is of the draft before.", self.name)
                return

    def _restart(self, version: Published, previous: Published | None) -> None:
        given = {"{version}": str(version.path), "{url}": self.name}
        command = re.sub("|".join(map(re.escape, given)), lambda found: shlex.quote(given[found[0]]), self.way.rest)
        until = self._clock() + self._load_seconds
        _run(command, self._load_seconds)
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if self._send("GET", self.way.url, "/health", timeout=LOOK_SECONDS).status_code == 200:
                    return
            if self._clock() >= until or self._stop.wait(PAUSE_SECONDS):
                raise ServerError(f"{self.name} is not healthy after its restart with version {version.number}.")

    def _tell(self, version: Published, previous: Published | None) -> None:
        self._post(self.way.rest, "", {
            "version": version.number, "path": str(version.path), "digest": version.digest,
            "previous": None if previous is None else previous.number, "engine": self.name,
        })  # fmt: skip

    def _post(self, url: str, path: str, body: Any = None, **how: Any) -> Any:
        """The JSON of an answer, `None` where it has none; raises ServerError."""
        try:
            response = self._send("POST", url, path, json=body, **how)
        except httpx2.HTTPError as error:
            raise ServerError(f"{shown_address(url)} cannot be reached: {first_line(error)}.") from error
        if not response.is_success:
            said = f"{shown_address(url)} answered {path} with status {response.status_code}"
            raise ServerError(f"{said}.{EXTENSION if path else ''}")
        with contextlib.suppress(ValueError):
            return response.json()
        return None

    def _send(self, method: str, url: str, path: str, **how: Any) -> httpx2.Response:
        address, user, password = parse_address(url)  # beside each other: neither is told to the other's host
        auth = httpx2.BasicAuth(user, password) if user or password else None
        whole = str(address).rstrip("/").removesuffix("/v1") + path if path else str(address)
        return self._http.request(method, whole, auth=auth, **how)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def _run(command: str, seconds: float) -> None:
    """Run a user's command to its end; raises ServerError where it fails, or takes longer."""
    with tempfile.TemporaryFile() as output:  # no pipe: what it starts may live on, and hold it
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                process.kill() if sys.platform == "win32" else os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise ServerError(f"The command {command!r} did not end within {seconds:g} s.") from None
        if code:
            output.seek(max(output.seek(0, os.SEEK_END) - 2000, 0))
            said = output.read().decode(errors="replace").strip().splitlines()
            raise ServerError(f"The command {command!r} ended with code {code}: {said[-1] if said else 'no word'}.")


# --- the roll-out ---------------------------------------------------------------------------------------------------


class Deployer:
    """
    Brings the version that `latest` points to into engines, one after the other, and watches it there over the next
    requests: where fewer of its tokens are accepted than of the version before, by more than chance, that one is
    loaded again, `latest` set back to it, and weights of that digest are never deployed again. A load that fails is
    tried again later, and holds up the engines after it. All is told in the log and in `deploy.jsonl` beside the
    versions, from which another process goes on.

    Args:
        versions (`VersionFolder`): What is published.
        ways (`Sequence[Way]`): The engines, in the order of loading.
        domain (`str`, *optional*): Whose versions, for decisions.
        watch_requests (`int`, *optional*, defaults to 200):
            Requests after which a version stays, unless it was found better or worse before.
        load_seconds (`float`, *optional*, defaults to 600.0): The longest that a load into one engine may take.
        stop (`threading.Event`, *optional*), clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`):
            Ends waiting and [`~Deployer.run`]; seconds.

    Attributes:
        serving (`Published`, *optional*): What engines are to serve, watched to the end.
        candidate (`Published`, *optional*): What is being loaded or watched in its place.
        decisions (`list[GateDecision]`): Of this process, by numbers of versions.
    """

    def __init__(
        self, versions: VersionFolder, ways: Sequence[Way], *, domain: str | None = None, watch_requests: int = 200,
        load_seconds: float = 600.0, stop: threading.Event | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.versions, self.domain, self.watch_requests, self._clock = versions, domain, watch_requests, clock
        self.stop = stop or threading.Event()
        self.engines = [Engine(way, watch_requests, load_seconds, self.stop, clock) for way in ways]
        self.serving: Published | None = versions.version(0)
        self.candidate: Published | None = None
        self.decisions: list[GateDecision] = []
        self._rejected: set[str] = set()  # digests
        self._retry_at, self._failure = -math.inf, ""
        self._looking = threading.Lock()
        self._go_on()
        self._pin()

    def run(self, poll_seconds: float) -> None:
        """Look at versions and engines until told to stop."""
        while not self.stop.wait(max(poll_seconds, LEAST_PAUSE)):
            self.look()

    def look(self) -> None:
        """Read the engines' counters, load what is to be loaded, and decide about what is watched. What fails is told
        in the log, and tried again at the next look. May be called from several threads."""
        with self._looking:
            try:
                for engine in self.engines:
                    engine.look()
                self._choose()
                self._roll_out()
                self._decide()
                self._roll_out()
            except Exception:  # whatever it is, learning must go on
                logger.exception("Looking after the versions in engines failed; it is tried again.")

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
        watched = "" if found["watched"] is None else f", version {found['watched']} is watched"
        back = sum(decision.outcome == "rolled back" for decision in self.decisions)
        engines = ", ".join(found["engines"])
        return f"{engines}: version {found['serving'] or 0}{whose} serves{watched}; {back} taken back"

    def close(self) -> None:
        """Close the connections."""
        for engine in self.engines:
            engine.close()

    def _choose(self) -> None:
        """Take the version that is pointed to for the next one, unless another one is in an engine already."""
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

    def _roll_out(self) -> None:
        wanted = self.candidate or self.serving
        if wanted is None or self._clock() < self._retry_at:
            return
        for engine in self.engines:
            # Nothing is loaded in place of what an engine began with, before there is a version.
            if engine.holds(wanted) or (wanted.number == 0 and engine.digest is None):
                continue
            previous, is_again = self.serving if self.candidate else None, engine.digest == wanted.digest
            try:
                engine.load(wanted, previous, is_new=wanted is self.candidate)
            except ServerError as error:
                self._retry_at = self._clock() + RETRY_SECONDS
                failure = f"{wanted.number} {engine.name} {error}"
                if failure != self._failure:  # told once
                    logger.warning("Version %d was not loaded, and is tried again: %s", wanted.number, error)
                    self._note("failed", wanted, engine=engine.name, error=str(error))
                self._failure = failure
                return
            self._failure = ""
            logger.info("Loaded version %d into %s%s.", wanted.number, engine.name, " again" if is_again else "")
            self._note("loaded", wanted, engine=engine.name, before=[list(window) for window in engine.before])

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
        outcome = "unclear" if change is None else change.outcome
        told = "" if change is None else (
            f"acceptance went from {change.before:.3f} to {change.after:.3f}, standard error "
            f"{change.standard_error:.3f}, over {requests} requests"
        )  # fmt: skip
        if outcome == "fell" and self.serving is not None:
            self._decided("rolled back", told, requests, change)
        elif len(on) == len(self.engines) and all(engine.counts_drafts is False for engine in on):
            self._decided("promoted", "no engine counts what it drafts, so that nothing is watched", 0, None)
        elif outcome != "unclear" or requests >= self.watch_requests:
            told = told or f"{requests} requests, and none before to compare with"
            self._decided("promoted", told, requests, change)

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
        self._note("kept" if outcome == "promoted" else outcome, version, **decision.to_dict())
        if outcome == "rolled back":
            logger.warning("Version %d is taken back, version %d serves: %s.", version.number, serving.number, reason)
            self._rejected.add(version.digest)
            try:
                self.versions.reject(decision)
            except OSError as error:
                logger.warning("Version %d cannot be marked as taken back: %s.", version.number, first_line(error))
        else:
            logger.info("Version %d stays: %s.", version.number, reason)
            for engine in self.engines:
                engine.before = []
        self.serving, self.candidate, self._retry_at = serving, None, -math.inf
        self._pin()

    # --- the journal ------------------------------------------------------------------------------------------------

    def _note(self, event: str, version: Published, /, **facts: Any) -> None:
        line = {"at_seconds": time.time(), "event": event, **facts, "version": version.number,
                "digest": version.digest}  # fmt: skip
        try:
            with (self.versions.path / JOURNAL).open("a") as file:
                file.write(json_text(line) + "\n")
        except OSError as error:
            logger.warning("The journal of deployments cannot be written: %s.", first_line(error))

    def _go_on(self) -> None:
        """Begin where the journal ends."""
        journal = self.versions.path / JOURNAL
        for line in journal.read_text(errors="replace").splitlines() if journal.is_file() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line, of a process that was killed
                self._noted(json.loads(line))

    def _noted(self, line: Mapping[str, Any]) -> None:
        event, version = line["event"], self.versions.version(int(line["version"]))
        if event == "rolled back":
            self._rejected.add(line["digest"])
            self.candidate = None
        elif event == "kept" and version is not None:
            self.serving, self.candidate = version, None
        elif event == "loaded":
            if version is not None and (self.serving is None or line["digest"] != self.serving.digest):
                self.candidate = version
            for engine in self.engines:
                if engine.name == line["engine"]:
                    engine.held(line["digest"], is_sure=False)  # it may have started anew since
                    engine.before = [Counts(*window) for window in line["before"]]
        for engine in self.engines if event == "kept" else ():
            engine.before = []
