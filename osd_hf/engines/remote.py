"""Inference engines that versions are loaded into: the ways of loading, and what engines count."""

from __future__ import annotations

import contextlib
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
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx2

from osd_hf.engines.completions import parse_address, vllm_counters
from osd_hf.engines.versions import Published
from osd_hf.errors import ConfigError, ServerError, first_line, shown_address

__all__ = ["LEAST_REQUESTS", "LEAST_WINDOWS", "Counts", "Engine", "Way", "read_counts"]

logger = logging.getLogger(__name__)

WINDOW = 10  # requests of one engine that are counted together: the tokens of an answer are not independent
LEAST_WINDOWS = 3  # with a version before anything is said of it
LEAST_REQUESTS = LEAST_WINDOWS * WINDOW
REACH = 2  # times the requests of a watch that it is compared with
CONNECT_SECONDS, LOOK_SECONDS, RESET_SECONDS, RETRY_SECONDS = 10.0, 10.0, 30.0, 30.0
IDLE_SECONDS = 600.0  # without a request, after which nobody waits for an engine's counters
EXTENSION = (
    " Serve with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls osd_hf.engines.vllm_reload.DraftReload; its log "
    "has more."
)
PAUSE_SECONDS = 1.0  # between two attempts at an engine that is not ready
WAY = re.compile(r"(?:([^=]+?):)?(reload|restart|webhook)=(\S+)(?:\s+(\S.*))?", re.DOTALL)
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
    found = vllm_counters(metrics)
    names = {name: name.partition("@") for name in found}
    positions = {int(at or 0): found[name] for name, (of, _, at) in names.items() if of == BY_POSITION}
    if DRAFTS not in found or not positions:
        return None
    last = max(positions)
    examined = found[DRAFTS] + sum(count for position, count in positions.items() if position != last)
    return Counts(found.get(REQUESTS, 0.0), examined, found.get(ACCEPTED, 0.0))


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

    @property
    def name(self) -> str:
        """The engine's address, without user, password and path of its API."""
        return str(parse_address(self.url)[0]).rstrip("/").removesuffix("/v1")

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


class Unreached(ServerError):
    """An address that nothing could be sent to, which says nothing of a version."""


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
        is_away (`bool`): Whether its counters could not be read at the last look.
        failed (`str`, *optional*), failures (`int`):
            Digest of the version whose load has failed last, `None` after one that has not; how often in a row, where
            it was reached.
    """

    def __init__(
        self, way: Way, watch_requests: int, load_seconds: float, stop: threading.Event, clock: Callable[[], float]
    ) -> None:
        self.way, self.name, self._watch_requests, self._load_seconds = way, way.name, watch_requests, load_seconds
        self._stop, self._clock = stop, clock
        self._http = httpx2.Client(timeout=httpx2.Timeout(load_seconds, connect=CONNECT_SECONDS), trust_env=False)
        self.digest: str | None = None
        self.windows: deque[Counts] = deque()
        self.before: list[Counts] = []
        self.counts_drafts: bool | None = None
        self.is_away = False
        self.failed: str | None = None
        self.failures = 0
        self._retry_at = -math.inf
        self._is_sure = True  # that it holds what was loaded last, or what it began with
        self._last: Counts | None = None
        self._unsure: Counts | None = None  # counters of the last look, where it was not sure
        self._has_history = True  # its counts so far are of what it holds
        self._busy_at, self._seen = clock(), 0.0  # when its last request was seen, and how many there were

    def holds(self, version: Published) -> bool:
        """Whether it serves a version, as far as is known; what it began with is taken for version 0."""
        return self._is_sure and self.digest in (version.digest, None if version.number == 0 else version.digest)

    def must_wait(self, version: Published) -> bool:
        """Whether it is too early to try a load, or for naught."""
        is_gone = self.is_away and self.way.kind == "reload"  # another way may start it
        return is_gone or (self.failed == version.digest and self._clock() < self._retry_at)

    @property
    def is_measured(self) -> bool:
        """Whether there is something to compare a new version with, or never will be."""
        return self.counts_drafts is False or sum(window.requests for window in self.windows) >= LEAST_REQUESTS

    @property
    def is_idle(self) -> bool:
        """Whether it answers, and has had no request for long."""
        return not self.is_away and self._clock() - self._busy_at >= IDLE_SECONDS

    def look(self) -> None:
        """Read the counters, and end a window where enough requests have come."""
        now = self._counters()
        if self.is_away:
            self._is_sure = self._is_sure and (self.way.kind != "reload" or self.digest is None)
        if now is None:
            return
        if now.requests != self._seen:
            self._busy_at, self._seen = self._clock(), now.requests
        if self._last is not None and min(now.since(self._last)) < 0:  # it has started anew
            self._last, self._is_sure = None, self._is_sure and (self.way.kind != "reload" or self.digest is None)
            self._has_history = False
        self._unsure = None if self._is_sure else now
        if self._is_sure:  # otherwise what it counts may be of anything
            self._end_window(now)

    def _end_window(self, now: Counts) -> None:
        if self._last is None:
            if self._has_history and now.requests:
                self.windows.append(now.at_most(self._watch_requests))
            self._last, self._has_history = now, False
        elif (new := now.since(self._last)).requests >= WINDOW:
            self._last = now
            self.windows.append(new)
            while (
                len(self.windows) > LEAST_WINDOWS
                and sum(w.requests for w in self.windows) - self.windows[0].requests >= REACH * self._watch_requests
            ):
                self.windows.popleft()

    def _counters(self) -> Counts | None:
        """What it counts; `None` where it is away, or counts no drafts. What has counted them once and does not is
        away: its address may be another's for a moment."""
        self.is_away, was_away = True, self.is_away
        try:
            response = self._send("GET", self.way.url, "/metrics", timeout=LOOK_SECONDS)
        except httpx2.HTTPError as error:
            said = first_line(error)
        else:
            is_page = "html" in response.headers.get("content-type", "")
            now = read_counts(response.text) if response.status_code == 200 and not is_page else None
            # An engine may well have no counters, and no page of them.
            if now is not None or (response.status_code in (200, 404) and not is_page and not self.counts_drafts):
                if now is None and self.counts_drafts is None:
                    logger.warning("%s counts no drafts at /metrics: versions are not watched there.", self.name)
                self.is_away, self.counts_drafts = False, now is not None
                return now
            said = f"status {response.status_code}{', no counters' if response.status_code == 200 else ''}"
        if not was_away:
            logger.warning("%s cannot be asked at /metrics, and is not watched until it can: %s.", self.name, said)
        return None

    def load(self, version: Published, previous: Published | None, *, is_new: bool) -> bool:
        """Let it serve a version: a new one, whose windows are to be compared with those so far, or the one that
        served before; whether it held it not yet. Raises ServerError where it does not."""
        self._is_sure = False  # what is loaded half-way is neither
        try:
            ways = {"reload": self._reload, "restart": self._restart, "webhook": self._tell}
            has_changed = ways[self.way.kind](version, previous)
        except ServerError as error:
            failures = self.failures if self.failed == version.digest else 0
            self.failed, self.failures = version.digest, failures + (not isinstance(error, Unreached))
            self._retry_at, self._last, self._has_history = self._clock() + RETRY_SECONDS, None, False
            raise
        self.failed, self.failures, self._busy_at = None, 0, self._clock()
        if self.digest != version.digest:
            if is_new:
                self.before, self.windows = list(self.windows), deque()
            else:
                self.before, self.windows = [], deque(self.before)
        elif not has_changed:  # its workers have been the same all the time
            self._is_sure = True
            if self._unsure is not None:
                self._end_window(self._unsure)
            return False
        self.held(version.digest)
        self._last = self._counters()
        return True

    def held(self, digest: str | None, *, is_sure: bool = True) -> None:
        """It holds this version; what it has counted so far may be of another one."""
        self.digest, self._is_sure = digest, is_sure
        self._last, self._has_history = None, False

    def doubted(self) -> None:
        """It may hold anything."""
        self._is_sure, self._last, self._has_history = False, None, False

    def remember(self, windows: Iterable[Counts]) -> None:
        """What another process has counted, with the version that it holds."""
        self.windows, self._has_history = deque(windows), False

    def _reload(self, version: Published, previous: Published | None) -> bool:
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
        is_new = any(each.get("is_new", True) for each in results)
        if is_new:
            self._forget_prompts()
        return is_new

    def _forget_prompts(self) -> None:
        """Empty what the draft has cached of prompts with its old weights: leaving it costs acceptance on prompts that
        come again, never an answer."""
        until, done = self._clock() + RESET_SECONDS, False
        while not done:
            with contextlib.suppress(ServerError, AttributeError):
                answer = self._post(self.way.url, "/reset_prefix_cache", timeout=LOOK_SECONDS,
                                    params={"reset_running_requests": "true"})  # fmt: skip
                done = bool(answer.get("success"))
            if not done and (self._clock() >= until or self._stop.wait(PAUSE_SECONDS)):
                logger.warning("%s has not emptied its cache of prompts, which is of the draft before.", self.name)
                return

    def _restart(self, version: Published, previous: Published | None) -> bool:
        given = {"{version}": str(version.path), "{url}": self.name}
        command = re.sub("|".join(map(re.escape, given)), lambda found: shlex.quote(given[found[0]]), self.way.rest)
        until = self._clock() + self._load_seconds
        _run(command, self._load_seconds)
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if self._send("GET", self.way.url, "/health", timeout=LOOK_SECONDS).status_code == 200:
                    return True
            if self._clock() >= until or self._stop.wait(PAUSE_SECONDS):
                raise ServerError(f"{self.name} is not healthy after its restart with version {version.number}.")

    def _tell(self, version: Published, previous: Published | None) -> bool:
        self._post(self.way.rest, "", {
            "version": version.number, "path": str(version.path), "digest": version.digest,
            "previous": None if previous is None else previous.number, "engine": self.name,
        })  # fmt: skip
        return True

    def _post(self, url: str, path: str, body: Any = None, **how: Any) -> Any:
        """The JSON of an answer, `None` where it has none; raises ServerError."""
        try:
            response = self._send("POST", url, path, json=body, **how)
        except httpx2.HTTPError as error:
            kind = Unreached if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) else ServerError
            raise kind(f"{shown_address(url)} cannot be reached: {first_line(error)}.") from error
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
