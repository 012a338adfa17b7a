"""Collecting from a serving engine: what it answers, asked or read from its log, ends as traces in a store."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

import httpx2

from osd_hf.engine.log import LogReader
from osd_hf.engine.responses import ResponseReader, unwrapped
from osd_hf.errors import ConfigError, DataError, ServerError, shown_address, without_credentials
from osd_hf.pair import first_line
from osd_hf.prompts import Prompt
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace

__all__ = [
    "CollectionReport",
    "CompletionClient",
    "RequestRefusedError",
    "collect",
    "collect_log",
    "environment_key",
    "parse_address",
]

CONNECT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between two attempts
BUSY = (408, 425, 429, 500, 502, 503, 504)  # statuses that may pass
REFUSED = (400, 413, 422)  # statuses that are about one request
OPENAI = "https://api.openai.com"


class RequestRefusedError(ServerError):
    """The server takes this request for wrong, which another one may not be."""


class CompletionClient:
    """
    The `/v1/completions` of an OpenAI-compatible server, asked with token ids.

    Args:
        url (`str`):
            Such as `http://localhost:8000`, with or without `/v1`; with `user:password@` for basic authentication,
            percent-encoded. What is for this machine goes through no proxy, and no redirect is followed.
        model (`str`, *optional*):
            Name that it serves; its only one by default.
        api_key (`str`, *optional*):
            Sent as a bearer token.
        allow_plain_http (`bool`, *optional*, defaults to `False`):
            Whether a key or a password may go to another machine over plain HTTP, where those in between can read it.
        timeout_seconds (`float`, *optional*, defaults to 600):
            For one answer.
        patience_seconds (`float`, *optional*, defaults to 30):
            How long to go on trying while it cannot be reached, or is too busy.

    Raises:
        ConfigError: a key or a password would go over plain HTTP, or both are given.
        ServerError: it is no address, cannot be reached, or serves several models and none is named.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        allow_plain_http: bool = False,
        timeout_seconds: float = 600.0,
        patience_seconds: float = 30.0,
    ) -> None:
        address, user, password = parse_address(url)
        # The library's own log and errors tell the address: user and password travel beside it.
        self.url = str(address).rstrip("/").removesuffix("/v1") + "/v1"
        self._shown = self.url.replace("//", "//***@", 1) if user or password else self.url
        self.patience_seconds = patience_seconds
        self._closed = threading.Event()
        key = (api_key or "").strip()
        self._clean = _cleaner(key, password)
        if key and (user or password):
            raise ConfigError(f"There are both a key and a password for {self._shown}. Give one of them.")
        is_here = _is_this_machine(address.host)
        if (key or user or password) and address.scheme != "https" and not (is_here or allow_plain_http):
            raise ConfigError(
                f"A key or a password would go to {self._shown} over plain HTTP, where others can read it. Take an "
                "https address or a tunnel, or accept it with `allow_plain_http=True` (--allow-plain-http)."
            )
        host = f"[{address.host}]" if ":" in address.host else address.host
        try:
            self._http = httpx2.Client(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                auth=httpx2.BasicAuth(user, password) if user or password else None,
                mounts={f"all://{host}": None} if is_here else None,  # past the environment's proxies
                timeout=httpx2.Timeout(timeout_seconds, connect=CONNECT_SECONDS),
                limits=httpx2.Limits(max_connections=None),
                follow_redirects=False,
            )
        except ValueError as error:  # of the environment's proxies, for one
            raise ServerError(f"No connection can be made: {first_line(error)}.") from None
        try:
            self.model = model or self._only_model()
        except BaseException:
            self.close()
            raise

    def _only_model(self) -> str:
        body = self._call("GET", "/models")
        names = [str(entry["id"]) for entry in body.get("data", []) if isinstance(entry, dict) and "id" in entry]
        if len(names) != 1:
            known = ", ".join(names) or "none"
            raise ServerError(f"{self._shown} serves {known}. Name the model to ask.")
        return names[0]

    def complete(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, num_logprobs: int, **settings: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        One answer.

        Args:
            prompt_ids (`Sequence[int]`):
                Token ids.
            max_new_tokens (`int`):
                Bound of the answer.
            num_logprobs (`int`):
                Log-probs per position (K).
            settings (`Any`):
                `temperature`, `top_p`, `top_k`, `seed`; greedy by default.

        Returns:
            `tuple[dict, dict]`: body of the request and of the response.

        Raises:
            RequestRefusedError: it refused this request.
            ServerError: it could not be reached for so long, or refuses all.
        """
        request = {
            "model": self.model, "prompt": list(prompt_ids), "max_tokens": max_new_tokens, "temperature": 0,
            # What is not said vLLM takes from the model's generation config.
            "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": num_logprobs, "return_token_ids": True, "return_tokens_as_token_ids": True, **settings,
        }  # fmt: skip
        return request, self._call("POST", "/completions", request)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        until, pause = None, FIRST_PAUSE
        while True:
            try:
                response = self._http.request(method, self.url + path, json=body)
            except httpx2.LocalProtocolError:  # whose text may hold the key
                raise ServerError("The request cannot be sent: the key has characters that no header takes.") from None
            except httpx2.HTTPError as error:
                failed = f"{self._shown} cannot be reached: {first_line(error)}"
            else:
                if response.status_code == 200:
                    return self._json(response)
                said = self._clean(_message(response))[:300]
                failed = f"{self._shown} answered {path} with status {response.status_code}: {said}"
                if response.status_code not in BUSY:
                    kind = RequestRefusedError if response.status_code in REFUSED else ServerError
                    raise kind(f"{failed}.{_hint(failed, response.status_code)}")
            until = until or time.monotonic() + self.patience_seconds  # an answer may have taken longer than that
            if time.monotonic() + pause > until:
                raise ServerError(f"{failed}. Gave up after {self.patience_seconds:g} s.")
            if self._closed.wait(pause):
                raise ServerError(f"{failed}. The connection was closed.")
            pause = min(2 * pause, LONGEST_PAUSE)

    def _json(self, response: httpx2.Response) -> dict[str, Any]:
        try:
            body = response.json()
        except ValueError as error:
            shown = self._clean(response.text)[:80]
            raise ServerError(f"{self._shown} answered with something else than JSON: {shown!r}.") from error
        if not isinstance(body, dict):
            shown = self._clean(response.text)[:80]
            raise ServerError(f"{self._shown} answered with no JSON object: {shown!r}.")
        return body

    def close(self) -> None:
        """Let the connections go, and try no more."""
        self._closed.set()
        self._http.close()

    def __enter__(self) -> CompletionClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parse_address(url: str) -> tuple[httpx2.URL, str, str]:
    """
    An address without user and password, and these; raises ServerError where it is none, or has a query, which
    libraries and servers write into their logs.
    """
    shown = shown_address(url)
    try:
        address = httpx2.URL(url)
        text = url.partition("//")[2].partition("/")[0]
        is_whole = address.scheme in ("http", "https") and bool(address.host) and url.count("@") == text.count("@")
        why = "http://HOST or https://HOST is expected"
    except (httpx2.InvalidURL, ValueError) as error:
        # What the library says may be a piece of the password.
        is_whole, why = False, "" if {"@", "?", "#"} & set(url) else first_line(error)
    if "@" in url and not is_whole:
        why = "in user and password, characters such as @ / ? # are percent-encoded"
    elif "?" in url or "#" in url:
        is_whole, why = False, "it may have no query and no fragment; a key is given apart from it"
    if not is_whole:
        raise ServerError(f"{shown} is no address: {why}.") from None
    return address.copy_with(userinfo=b""), address.username, address.password


def environment_key(url: str) -> str | None:
    """The environment's `OPENAI_API_KEY`, for the host that it belongs to: that of `OPENAI_BASE_URL`, OpenAI's by
    default; `None` for any other."""
    home = os.environ.get("OPENAI_BASE_URL") or OPENAI
    try:
        asked, own = parse_address(url)[0], parse_address(home)[0]
    except ServerError:
        return None
    is_own = (asked.scheme, asked.host, asked.port) == (own.scheme, own.host, own.port)
    return os.environ.get("OPENAI_API_KEY") if is_own else None


def _is_this_machine(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _cleaner(*secrets: str) -> Callable[[str], str]:
    """Takes out what a server repeats of a secret. A function, as attributes show in what is printed of a client."""
    known = sorted(filter(None, secrets), key=len, reverse=True)

    def clean(text: str) -> str:
        for secret in known:
            text = text.replace(secret, "***")
        return without_credentials(text)

    return clean


def _message(response: httpx2.Response) -> str:
    try:
        body = response.json()
        error = body.get("error", body)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(str(text).split()).rstrip(".")


def _hint(failed: str, status: int) -> str:
    if 300 <= status < 400:
        return " It points to another address: name that one, if you trust it."
    if "logprobs" in failed:
        return " Keep fewer log-probs, or let the server give more (vLLM: --max-logprobs)."
    return ""


MOST_FAILURES = 8  # requests in a row that may fail before it is for a reason of all
STOP_SECONDS = 0.2  # within which a collection heeds who stops it
MOST_REASONS = 256  # counted apart, as servers may say something else each time
GRACE_SECONDS = 5.0  # for requests under way when a collection ends early


@dataclass
class CollectionReport:
    """
    What came of a collection.

    Args:
        requests (`int`), tokens (`int`):
            Traces kept, and their emitted tokens.
        skipped (`Counter[str]`):
            What was left out, by reason; reasons that differ in numbers alone are one, as it was said first.
        unanswered (`int`):
            Prompts that had no answer when the collection ended.
        seconds (`float`):
            From the first to the last.
    """

    requests: int = 0
    tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    seconds: float = 0.0
    _reasons: dict[str, str] = field(default_factory=dict, repr=False)

    def keep(
        self, store: CorrectionStore, traces: Sequence[Trace], on_request: Callable[[Trace], object] | None
    ) -> None:
        """Append traces, count them, and tell of each."""
        for trace in traces:
            store.append(trace)
            self.requests += 1
            self.tokens += len(trace)
            if on_request is not None:
                on_request(trace)

    def skip(self, reason: str) -> None:
        """Count what is left out."""
        reason = without_credentials(reason)
        kind = re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", reason)
        if kind not in self._reasons and len(self._reasons) >= MOST_REASONS:
            kind = reason = "other reasons"
        self.skipped[self._reasons.setdefault(kind, reason)] += 1


def collect(
    prompts: Sequence[tuple[Prompt, list[int]]],
    client: CompletionClient,
    reader: ResponseReader,
    store: CorrectionStore,
    *,
    max_new_tokens: int,
    concurrency: int = 4,
    report: CollectionReport | None = None,
    on_request: Callable[[Trace], object] | None = None,
    stop: threading.Event | None = None,
    **settings: Any,
) -> CollectionReport:
    """
    Send prompts to a server and keep the answers. A prompt that is refused, or has an answer that cannot be learned
    from, is left out and counted; where eight in a row are, or all, the collection ends with the reason.

    Args:
        prompts (`Sequence[tuple[Prompt, list[int]]]`):
            With their token ids.
        client (`CompletionClient`), reader (`ResponseReader`), store (`CorrectionStore`):
            Who is asked, how answers are read, where they go.
        max_new_tokens (`int`):
            Bound of an answer.
        concurrency (`int`, *optional*, defaults to 4):
            Requests at once.
        report (`CollectionReport`, *optional*):
            Counts, seen by the caller when an error ends the collection.
        on_request (`Callable[[Trace], object]`, *optional*):
            Called for each one kept.
        stop (`threading.Event`, *optional*):
            Ends the collection when it is set; answers that come within seconds are kept.
        settings (`Any`):
            As of [`~CompletionClient.complete`].

    Raises:
        ServerError: the server went away, or refused. What was answered is in the store.
        DataError: answers without token ids or log-probs.
        StoreError: the store cannot be written.
    """
    report = report or CollectionReport()
    work, asked = _Collection(reader, store, report, on_request), 0
    started, waiting = time.perf_counter(), iter(prompts)

    def ask(ids: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        return client.complete(ids, max_new_tokens=max_new_tokens, num_logprobs=reader.num_logprobs, **settings)

    try:
        try:
            while not (stop is not None and stop.is_set()):
                while len(work.answers) < concurrency and (following := next(waiting, None)) is not None:
                    work.answers[_begun(ask, following[1])] = following[0]
                    asked += 1
                if not work.answers:
                    break
                work.keep_done(wait(work.answers, timeout=STOP_SECONDS, return_when=FIRST_COMPLETED).done)
        finally:  # of requests under way, those that are answered soon
            wait(work.answers, timeout=GRACE_SECONDS)
            work.keep_done([future for future in work.answers if future.done()], is_over=True)
            report.unanswered += len(prompts) - asked + len(work.answers)
        if work.failure is not None and not report.requests:
            raise work.failure
    finally:
        report.seconds += time.perf_counter() - started
        store.flush()
    return report


def _begun(call: Callable[[list[int]], Any], ids: list[int]) -> Future[Any]:
    """A call by a thread that does not hold up the end of the program, as those of an executor do."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(ids))
        except BaseException as error:  # noqa: BLE001  # whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, name="osd_hf-collect", daemon=True).start()
    return future


@dataclass
class _Collection:
    """Requests under way, and what becomes of their answers."""

    reader: ResponseReader
    store: CorrectionStore
    report: CollectionReport
    on_request: Callable[[Trace], object] | None
    answers: dict[Future[Any], Prompt] = field(default_factory=dict)
    failures: int = 0  # in a row
    failure: ServerError | DataError | None = None

    def keep_done(self, done: Iterable[Future[Any]], *, is_over: bool = False) -> None:
        """Keep what was answered; raises what ends the collection behind it, unless it is over anyway."""
        fatal: ServerError | DataError | None = None
        for future in list(done):
            prompt = self.answers.pop(future)
            try:
                request, response = future.result()
                traces = self.reader.traces(response, request, domain=prompt.domain)
            except (RequestRefusedError, DataError) as error:
                self.failure, self.failures = error, self.failures + 1
                self.report.skip(str(error))
                if self.failures >= MOST_FAILURES:
                    fatal = error
                continue
            except ServerError as error:
                fatal = error
                self.report.unanswered += 1
                continue
            self.failures = 0
            self.report.keep(self.store, traces, self.on_request)
        if fatal is not None and not is_over:
            raise fatal


def collect_log(
    log: LogReader,
    reader: ResponseReader,
    store: CorrectionStore,
    *,
    domain: str | None = None,
    report: CollectionReport | None = None,
    on_request: Callable[[Trace], object] | None = None,
    stop: threading.Event | None = None,
) -> CollectionReport:
    """
    Keep the answers that a log has gained. Lines that hold none, or cannot be learned from, are counted by reason.

    Args:
        log (`LogReader`):
            What is read; each line as of [`~osd_hf.engine.responses.unwrapped`].
        reader (`ResponseReader`), store (`CorrectionStore`), report (`CollectionReport`, *optional*), `on_request`,
        `stop`:
            As of [`collect`].
        domain (`str`, *optional*):
            Label of all.

    Raises:
        StoreError: the store cannot be written; the lines since the last flush are read again the next time.
    """
    report = report or CollectionReport()
    started, kept, too_long = time.perf_counter(), 0, log.too_long
    try:
        for line in log.lines():
            traces = _traces_of(line, reader, domain, report) if line.strip() else []
            report.keep(store, traces, on_request)
            kept += len(traces)
            log.accept()
            if kept >= store.flush_every:
                store.flush()
                log.commit()
                kept = 0
            if stop is not None and stop.is_set():
                break
    finally:
        report.seconds += time.perf_counter() - started
        for _ in range(log.too_long - too_long):
            report.skip("a line is too long")
        store.flush()
        log.commit()
    return report


def _traces_of(line: bytes, reader: ResponseReader, domain: str | None, report: CollectionReport) -> list[Trace]:
    """The answers of a line of a log; a line without any is counted."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        report.skip("a line is cut off, or no JSON")
        return []
    try:
        if not isinstance(parsed, dict):
            raise DataError("a line is no JSON object")
        request, response = unwrapped(parsed)
        return reader.traces(response, request, domain=domain)
    except DataError as error:
        report.skip(str(error))
        return []
