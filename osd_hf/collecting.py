"""Collecting from a serving engine: prompts sent to it, or its request log read, end as traces in a store."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from osd_hf.completions import ResponseReader, unwrapped
from osd_hf.errors import DataError, ServerError
from osd_hf.loading import first_line
from osd_hf.prompts import Prompt
from osd_hf.records import Trace
from osd_hf.shards import write_whole
from osd_hf.store import CorrectionStore

__all__ = ["CollectionReport", "CompletionClient", "LogReader", "collect", "collect_log"]

CONNECT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between two attempts
BUSY = (408, 425, 429, 500, 502, 503, 504)  # statuses that may pass
HEAD_BYTES = 1024  # of a log, by which it is known again
LOG_BYTES = 1 << 20  # read at once


@dataclass
class CollectionReport:
    """
    What came of a collection.

    Args:
        requests (`int`), tokens (`int`):
            Traces kept, and their emitted tokens.
        skipped (`Counter[str]`):
            What was left out, by reason.
        seconds (`float`):
            From the first to the last.
    """

    requests: int = 0
    tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def keep(self, store: CorrectionStore, trace: Trace) -> None:
        """Append a trace, and count it."""
        store.append(trace)
        self.requests += 1
        self.tokens += len(trace)


class CompletionClient:
    """
    The `/v1/completions` of an OpenAI-compatible server, asked with token ids.

    Args:
        url (`str`):
            Such as `http://localhost:8000`, with or without `/v1`.
        model (`str`, *optional*):
            Name that it serves; its only one by default.
        api_key (`str`, *optional*):
            Sent as a bearer token.
        timeout_seconds (`float`, *optional*, defaults to 600):
            For one answer.
        patience_seconds (`float`, *optional*, defaults to 30):
            How long to go on trying while it cannot be reached, or is too busy.

    Raises:
        ServerError: it cannot be reached, or serves several models and none is named.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 600.0,
        patience_seconds: float = 30.0,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.patience_seconds = patience_seconds
        self._closed = threading.Event()
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = httpx2.Timeout(timeout_seconds, connect=CONNECT_SECONDS)
        try:
            self._http = httpx2.Client(headers=headers, timeout=timeout, limits=httpx2.Limits(max_connections=None))
        except ValueError as error:  # of the environment's proxies, for one
            raise ServerError(f"No connection can be made: {first_line(error)}.") from error
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
            raise ServerError(f"{self.url} serves {known}. Name the model to ask.")
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
            ServerError: it could not be reached for so long, or refused.
        """
        request = {
            "model": self.model, "prompt": list(prompt_ids), "max_tokens": max_new_tokens, "temperature": 0,
            "repetition_penalty": 1.0,  # which vLLM takes from the model's generation config otherwise
            "logprobs": num_logprobs, "return_token_ids": True, "return_tokens_as_token_ids": True, **settings,
        }  # fmt: skip
        return request, self._call("POST", "/completions", request)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        until, pause = time.monotonic() + self.patience_seconds, FIRST_PAUSE
        while True:
            try:
                response = self._http.request(method, self.url + path, json=body)
            except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
                raise ServerError(f"{self.url} is no address: {first_line(error)}.") from error
            except httpx2.HTTPError as error:
                failed = f"{self.url} cannot be reached: {first_line(error)}"
            else:
                if response.status_code == 200:
                    return self._json(response)
                failed = f"{self.url} answered {path} with status {response.status_code}: {_message(response)}"
                if response.status_code not in BUSY:
                    raise ServerError(f"{failed}.{_hint(failed)}")
            if time.monotonic() + pause > until:
                raise ServerError(f"{failed}. Gave up after {self.patience_seconds:g} s.")
            if self._closed.wait(pause):
                raise ServerError(f"{failed}. The connection was closed.")
            pause = min(2 * pause, LONGEST_PAUSE)

    def _json(self, response: httpx2.Response) -> dict[str, Any]:
        try:
            body = response.json()
        except ValueError as error:
            raise ServerError(f"{self.url} answered with something else than JSON: {response.text[:80]!r}.") from error
        if not isinstance(body, dict):
            raise ServerError(f"{self.url} answered with no JSON object: {response.text[:80]!r}.")
        return body

    def close(self) -> None:
        """Let the connections go, and try no more."""
        self._closed.set()
        self._http.close()

    def __enter__(self) -> CompletionClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _message(response: httpx2.Response) -> str:
    try:
        body = response.json()
        error = body.get("error", body)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(str(text).split())[:300].rstrip(".")


def _hint(failed: str) -> str:
    if "logprobs" in failed:
        return " Keep fewer log-probs, or let the server give more (vLLM: --max-logprobs)."
    return ""


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
    **settings: Any,
) -> CollectionReport:
    """
    Send prompts to a server and keep the answers.

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
        settings (`Any`):
            As of [`~CompletionClient.complete`].

    Raises:
        ServerError: the server went away, or refused. What was answered is in the store.
        DataError: an answer without token ids or log-probs.
        StoreError: the store cannot be written.
    """
    report = report or CollectionReport()
    started, waiting, answers = time.perf_counter(), iter(prompts), dict[Future[Any], Prompt]()

    def ask(ids: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        return client.complete(ids, max_new_tokens=max_new_tokens, num_logprobs=reader.num_logprobs, **settings)

    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="osd_hf-collect")
    try:
        while True:
            while len(answers) < concurrency and (following := next(waiting, None)) is not None:
                answers[pool.submit(ask, following[1])] = following[0]
            if not answers:
                break
            done, _ = wait(answers, return_when=FIRST_COMPLETED)
            failure: BaseException | None = None
            for future in done:
                prompt = answers.pop(future)
                try:
                    _keep(future, prompt, reader, store, report, on_request)
                except (ServerError, DataError) as error:
                    failure = error  # those that were answered beside it are kept first
            if failure is not None:
                raise failure
    except BaseException:
        _keep_the_rest(answers, reader, store, report, on_request)
        raise
    finally:
        report.seconds += time.perf_counter() - started
        pool.shutdown(wait=False, cancel_futures=True)
        store.flush()
    return report


def _keep(
    future: Future[Any], prompt: Prompt, reader: ResponseReader, store: CorrectionStore, report: CollectionReport,
    on_request: Callable[[Trace], object] | None,
) -> None:  # fmt: skip
    request, response = future.result()
    for trace in reader.traces(response, request, domain=prompt.domain):
        report.keep(store, trace)
        if on_request is not None:
            on_request(trace)


def _keep_the_rest(answers: dict[Future[Any], Prompt], *args: Any) -> None:
    """Of requests under way, keep those that are answered already."""
    for future, prompt in answers.items():
        if future.done() and not future.cancelled() and future.exception() is None:
            try:
                _keep(future, prompt, *args)
            except DataError:
                continue


class LogReader:
    """
    New whole lines of a growing log. A line without its end is left until it has one; a log that was rotated away is
    read to its end before the new one is begun.

    Args:
        path (`Path`):
            Of JSON lines.
        place (`Path`, *optional*):
            File that keeps how far the log has been read, so that another run goes on there.

    Raises:
        DataError: there is no such file, or it cannot be read.
    """

    def __init__(self, path: Path, place: Path | None = None) -> None:
        self.path, self.place = path, place
        self.offset = 0
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise DataError(f"The log {path} cannot be read: {error.strerror}.") from error
        self._resume()

    @staticmethod
    def place_in(store: Path, path: Path) -> Path:
        """Where a store keeps how far a log has been read into it."""
        name = hashlib.sha256(os.fsencode(path.expanduser().absolute())).hexdigest()[:16]
        return store / f".osd_hf_store.log-{name}.json"

    def _resume(self) -> None:
        if self.place is None or not self.place.exists():
            return
        try:
            kept = json.loads(self.place.read_text())
            length, digest, offset = int(kept["head_bytes"]), str(kept["head_sha256"]), int(kept["offset"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # read from the start rather than lose a line
        head = self._file.read(length)
        if hashlib.sha256(head).hexdigest() == digest and offset <= os.fstat(self._file.fileno()).st_size:
            self.offset = offset

    def lines(self) -> Iterator[bytes]:
        """The lines that have come, without their ends."""
        while True:
            yield from self._whole_lines()
            if not self._was_rotated():
                return

    def _whole_lines(self) -> Iterator[bytes]:
        if os.fstat(self._file.fileno()).st_size < self.offset:  # emptied in place
            self.offset = 0
        self._file.seek(self.offset)
        rest = b""
        while block := self._file.read(LOG_BYTES):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                self.offset += len(line) + 1
                yield line

    def _was_rotated(self) -> bool:
        """Whether another file has the name now; it is read from here on."""
        try:
            now = self.path.stat()
        except OSError:
            return False  # until the new one is there
        mine = os.fstat(self._file.fileno())
        if (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino):
            return False
        try:
            file = self.path.open("rb")
        except OSError:
            return False
        self._file.close()
        self._file, self.offset = file, 0
        return True

    def commit(self) -> None:
        """Keep how far it has been read."""
        if self.place is None:
            return
        here = self._file.tell()
        self._file.seek(0)
        head = self._file.read(min(HEAD_BYTES, self.offset))
        self._file.seek(here)
        kept = {"head_bytes": len(head), "head_sha256": hashlib.sha256(head).hexdigest(), "offset": self.offset}
        write_whole(self.place, json.dumps(kept).encode())

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


def collect_log(
    log: LogReader,
    reader: ResponseReader,
    store: CorrectionStore,
    *,
    domain: str | None = None,
    report: CollectionReport | None = None,
    on_request: Callable[[Trace], object] | None = None,
) -> CollectionReport:
    """
    Keep the answers that a log has gained. Lines that hold none, or cannot be learned from, are counted by reason.

    Args:
        log (`LogReader`):
            What is read; each line as of [`~osd_hf.completions.unwrapped`].
        reader (`ResponseReader`), store (`CorrectionStore`), report (`CollectionReport`, *optional*), on_request:
            As of [`collect`].
        domain (`str`, *optional*):
            Label of all.

    Raises:
        StoreError: the store cannot be written; the lines since the last flush are read again the next time.
    """
    report = report or CollectionReport()
    started, kept = time.perf_counter(), 0
    for line in log.lines():
        if not line.strip():
            continue
        try:
            parsed = json.loads(line)
            if not isinstance(parsed, dict):
                raise DataError("a line is no JSON object")
            request, response = unwrapped(parsed)
            traces = reader.traces(response, request, domain=domain)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # DataError says why; what else is raised comes of JSON that is cut off, or of other kinds of values.
            known = isinstance(error, DataError)
            report.skipped[str(error) if known else "a line is cut off, or no JSON of a response"] += 1
            continue
        for trace in traces:
            report.keep(store, trace)
            kept += 1
            if on_request is not None:
                on_request(trace)
        if kept >= store.flush_every:
            store.flush()
            log.commit()
            kept = 0
    store.flush()
    log.commit()
    report.seconds += time.perf_counter() - started
    return report
