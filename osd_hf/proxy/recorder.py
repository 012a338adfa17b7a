"""Record the answers that pass the proxy: fields that are added to requests for that, and the process that stores."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from osd_hf.engines.completions import WARPERS, CollectionReport, ResponseReader, changed_sampling
from osd_hf.errors import DataError, StoreError, first_line
from osd_hf.store.store import CorrectionStore

FLUSH_SECONDS = 5.0  # between two flushes of the store
RETRY_SECONDS = 30.0  # in which nothing is recorded after a flush that failed
MAX_WAITING_BYTES = 256 << 20
MAX_UNREADABLE = 8  # unreadable answers of an engine in a row, after which recording from it pauses
PAUSE_SECONDS = 600.0
NICENESS = 10  # of the process
# Settings of a request that `ResponseReader` reads.
KEPT_SETTINGS = (
    "temperature", "max_tokens", "max_completion_tokens", "stop", "prompt", "truncate_prompt_tokens",
    *(name for name, _, _ in WARPERS),
)  # fmt: skip
COMPLETION_PATHS = {"/v1/chat/completions": True, "/v1/completions": False}  # path -> is it a chat?
# Settings with which a client asks for log-probs or token ids itself.
FIELD_SETTINGS = (
    "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids",
    "return_tokens_as_token_ids",
)  # fmt: skip
ADDED_TO_RESPONSE = ("prompt_token_ids",)
ADDED_TO_CHOICES = ("logprobs", "token_ids", "prompt_token_ids")
BLANK_LINE = re.compile(rb"\n\n|\r\n\r\n|\r\r")
DATA_LINE = re.compile(rb"(?:\A|(?<=[\r\n]))data: ?([^\r\n]*)")

logger = logging.getLogger(__name__)


# --- fields that are added and removed ------------------------------------------------------------------------------


def add_fields(body: bytes, request: Mapping[str, Any], *, is_chat: bool, num_logprobs: int) -> bytes:
    """Return the body of a request with settings that ask for log-probs and token ids. The client's own text stays
    unchanged. JSON parsers use the last of two values with the same name."""
    added: dict[str, Any] = {"logprobs": num_logprobs}
    if is_chat:
        added = {"logprobs": True, "top_logprobs": num_logprobs}
    added |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    end = body.rindex(b"}")
    return body[:end] + (b"," if request else b"") + json.dumps(added).encode()[1:] + body[end + 1 :]


def reason_not_to_record(request: Mapping[str, Any]) -> str | None:
    """Return why the answer to a request is not recorded, or `None` if it can be recorded."""
    messages = request.get("messages") if isinstance(request.get("messages"), list) else []
    contents = [m.get("content") for m in messages or () if isinstance(m, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if changed := changed_sampling(request):
        return f"its tokens were shaped by {', '.join(changed)}, not by the target alone"
    is_multimodal = any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)
    if is_multimodal or request.get("prompt_embeds") is not None:
        return "its prompt is more than text"
    asked_for = [request.get(name) for name in FIELD_SETTINGS]
    if any(value is not None and value is not False for value in asked_for):  # 0 asks for some log-probs
        return "its client asks for log-probs or token ids of its own"
    return None


def remove_fields(body: bytes) -> bytes:
    """Return the JSON of a response with `null` in place of the fields that the proxy asked for. vLLM writes `null`
    for fields that were not requested, so the client gets the bytes of a direct call. Text that is not the JSON of a
    response is returned unchanged."""
    try:
        response = json.loads(body)
        has_changed = _set_to_null(response, ADDED_TO_RESPONSE)
        for choice in response.get("choices") or ():
            has_changed |= _set_to_null(choice, ADDED_TO_CHOICES)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return body
    return _to_json(response) if has_changed else body


def remove_fields_of_event(event: bytes) -> bytes:
    """Do the same for a server-sent event. An engine that parses tool calls or reasoning sends events with token ids
    and without text. It would not send them to a client that does not ask for ids, so they are removed."""
    data = event_data(event)
    if data is None or not data.startswith(b"{"):
        return event
    removed = remove_fields(data)
    choices = () if removed is data else json.loads(removed).get("choices") or ()
    if choices and all(c.get("delta") == {} and c.get("finish_reason") is None for c in choices):
        return b""
    return event.replace(data, removed, 1)


def _set_to_null(values: dict[str, Any], names: tuple[str, ...]) -> bool:
    found = [name for name in names if values.get(name) is not None]
    values.update(dict.fromkeys(found))
    return bool(found)


def _to_json(value: Any) -> bytes:
    """Write JSON as vLLM, SGLang and llama.cpp do: without spaces, and in UTF-8."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a surrogate stands alone
        return json.dumps(value, separators=(",", ":")).encode()


def split_events(text: bytes) -> list[bytes]:
    """Split a stream of server-sent events behind blank lines. The last part is an incomplete event, or empty."""
    ends = [blank.end() for blank in BLANK_LINE.finditer(text)]
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def event_data(event: bytes) -> bytes | None:
    """Return the data of an event, or `None` unless they are exactly one line."""
    lines = DATA_LINE.findall(event)
    return lines[0] if len(lines) == 1 else None


# --- counts ---------------------------------------------------------------------------------------------------------


@dataclass
class ProxyCounts:
    """Counts of a proxy."""

    requests: int = 0  # of clients
    bytes: int = 0  # of the answers that they got
    collected: int = 0  # recorded answers
    tokens: int = 0  # of these
    dropped: int = 0  # answers that were not recorded because too many waited, or because the store failed
    engine_errors: int = 0  # requests without a response, or with a status from 500 on
    retries: int = 0  # requests that were sent again, to another engine or without the added fields

    def __post_init__(self) -> None:
        self._report = CollectionReport()
        self._lock = threading.Lock()

    def leave_out(self, reason: str) -> None:
        """Count an answer that cannot be learned from; may be called from any thread."""
        with self._lock:
            self._report.skip(reason)

    def drop(self) -> None:
        """Count an answer that was dropped; may be called from any thread."""
        with self._lock:
            self.dropped += 1

    def to_dict(self) -> dict[str, int | Mapping[str, int]]:
        """Return the counts by name, with `left_out` by reason."""
        with self._lock:
            return {**asdict(self), "left_out": dict(self._report.skipped)}


class Recording:
    """An answer of an engine while it passes the proxy, with some settings of the client's request and its label."""

    def __init__(self, request: Mapping[str, Any], domain: str | None, engine: str) -> None:
        self.request = {name: request[name] for name in ("model", *KEPT_SETTINGS) if name in request}
        if isinstance(self.request.get("prompt"), str):
            del self.request["prompt"]
        self.domain = domain
        self.engine = engine
        self.pieces: list[bytes] = []  # the body, or the data of each event of a stream
        self.is_stream = False

    def add(self, piece: bytes, *, is_event: bool = False) -> None:
        """Add the body, or an event of a stream."""
        data = event_data(piece) if is_event else piece
        if data is not None:
            self.pieces.append(data)
            self.is_stream = is_event

    @property
    def num_bytes(self) -> int:
        """Size of the answer so far."""
        return sum(map(len, self.pieces))


def _parse(pieces: list[bytes]) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(b"".join(pieces))
        if isinstance(found, dict) and isinstance(found.get("choices"), list):
            return found
    raise DataError("an answer is no JSON with `choices`")


def response_of_stream(data: Iterable[bytes]) -> dict[str, Any]:
    """Build the response that a stream of events amounts to: ids, log-probs and reasons of each choice, without text.
    Raises DataError if an event has an unexpected form."""
    response, choices = dict[str, Any](), dict[int, dict[str, Any]]()
    try:
        for text in data:
            if text == b"[DONE]":
                continue
            chunk = json.loads(text)
            for name in ("created", "model", "prompt_token_ids"):
                if chunk.get(name) is not None:
                    response.setdefault(name, chunk[name])
            for piece in chunk.get("choices") or ():
                choice = choices.setdefault(piece["index"], {"token_ids": [], "logprobs": {}})
                for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
                    if piece.get(name) is not None:
                        choice[name] = piece[name]
                choice["token_ids"] += piece.get("token_ids") or []
                for name, values in (piece.get("logprobs") or {}).items():
                    choice["logprobs"].setdefault(name, []).extend(values or [])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError("the stream has other kinds of events than expected") from error
    return response | {"choices": [choices[index] for index in sorted(choices)]}


# --- writing --------------------------------------------------------------------------------------------------------


class _Writer:
    """Reads answers and stores their traces, in the process of a recorder."""

    def __init__(self, reader: ResponseReader, store: CorrectionStore) -> None:
        self._reader = reader
        self._store = store
        self._failure: str | None = None  # of the last attempt to write

    def write(
        self, pieces: list[bytes], is_stream: bool, request: Mapping[str, Any], domain: str | None
    ) -> tuple[int, int, str | None]:
        """Return the number of traces, that of their tokens, and why the store cannot be written; raises DataError."""
        if self._failure is not None:
            self.flush()
        if self._failure is not None:
            return 0, 0, self._failure
        response = response_of_stream(pieces) if is_stream else _parse(pieces)
        traces = self._reader.traces(response, request, domain=domain)
        for trace in traces:
            try:
                self._store.append(trace)
            except StoreError as error:  # the store keeps the trace in memory
                self._failure = first_line(error)
        return len(traces), sum(map(len, traces)), self._failure

    def flush(self) -> None:
        """Write what is in memory."""
        try:
            self._store.flush()
            self._failure = None
        except Exception as error:  # noqa: BLE001  # a later answer tells it
            self._failure = first_line(error)

    def close(self) -> None:
        """Write what is in memory, and end; raises StoreError."""
        self._store.close()


_worker = threading.local()  # `writer` is that of a worker of an executor


def _start_thread(reader: ResponseReader, store: CorrectionStore) -> None:
    _worker.writer = _Writer(reader, store)


def _start_process(reader: ResponseReader, store: CorrectionStore) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the proxy ends this process
        signal.signal(number, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    _start_thread(reader, store)
    threading.Thread(target=_flush_regularly, args=(_worker.writer,), name="osd_hf-flush", daemon=True).start()


def _flush_regularly(writer: _Writer) -> None:
    """Flush the store every few seconds, and end with the proxy."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive():
        parent.join(FLUSH_SECONDS)
        writer.flush()
    os._exit(1)


def _call_writer(method: str, *args: Any) -> Any:
    return getattr(_worker.writer, method)(*args)


class Recorder:
    """Read and store answers in a separate process, because that would delay the events of other answers. The process
    opens the store again, and if the proxy is killed, it stores what it has read. Failures are counted and logged
    once; only `close` raises one."""

    def __init__(
        self,
        reader: ResponseReader,
        store: CorrectionStore,
        counts: ProxyCounts,
        *,
        in_process: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_logprobs = reader.num_logprobs
        self.counts = counts
        self._clock = clock
        args = (reader, store)
        self._start: Callable[[], Executor] = partial(ThreadPoolExecutor, 1, initializer=_start_thread, initargs=args)
        if in_process:
            context = multiprocessing.get_context("spawn")
            self._start = partial(ProcessPoolExecutor, 1, context, initializer=_start_process, initargs=args)
        self._executor: Executor = self._start()
        self._bytes_put = 0  # by the event loop
        self._bytes_done = 0  # by the thread of the executor
        self._is_failing = False  # the store cannot be written
        self._retry_at = -float("inf")
        self._has_warned = False  # of an internal error
        self._num_unreadable = Counter[str]()  # answers in a row, by engine
        self._paused_until: dict[str, float] = {}  # by engine

    @property
    def is_ready(self) -> bool:
        """Whether an answer would be recorded now."""
        return self._clock() >= self._retry_at and self._bytes_put - self._bytes_done < MAX_WAITING_BYTES

    def can_record(self, engine: str) -> bool:
        """Return whether requests to an engine get extra fields now."""
        return self._clock() >= self._paused_until.get(engine, -float("inf"))

    def pause(self, engine: str, reason: str) -> None:
        """Record nothing from an engine for ten minutes."""
        if self.can_record(engine):  # otherwise other requests were under way
            self._paused_until[engine] = self._clock() + PAUSE_SECONDS
            logger.warning("Collecting from %s is paused for some minutes: %s.", engine, reason)

    def put(self, recording: Recording) -> None:
        """Store a complete answer soon, or drop it if too many wait."""
        if self._bytes_put - self._bytes_done + recording.num_bytes > MAX_WAITING_BYTES:
            self.counts.drop()
            return
        self._bytes_put += recording.num_bytes
        answer = (recording.pieces, recording.is_stream, recording.request, recording.domain)
        try:
            future = self._executor.submit(_call_writer, "write", *answer)
        except BrokenExecutor:  # the process was killed
            self._executor = self._start()
            future = self._executor.submit(_call_writer, "write", *answer)
        future.add_done_callback(partial(self._count, recording))

    def _count(self, recording: Recording, future: Future[tuple[int, int, str | None]]) -> None:
        """Count the result of an answer, in the thread of the executor."""
        self._bytes_done += recording.num_bytes
        try:
            num_traces, num_tokens, failure = future.result()
        except DataError as error:
            self.counts.leave_out(str(error))
            self._num_unreadable[recording.engine] += 1
            if self._num_unreadable[recording.engine] >= MAX_UNREADABLE:
                self._num_unreadable[recording.engine] = 0
                self.pause(recording.engine, str(error))
            return
        except Exception as error:  # an internal error must not cost an answer
            self.counts.leave_out("it cannot be read because of an internal error")
            if not self._has_warned:
                message = "An answer cannot be collected: %s. Clients are served all the same."
                logger.warning(message, error, exc_info=error)
            self._has_warned = True
            return
        self.counts.collected += num_traces
        self.counts.tokens += num_tokens
        if num_traces:
            self._num_unreadable[recording.engine] = 0
        else:
            self.counts.drop()
        if failure is not None:
            self._retry_at = self._clock() + RETRY_SECONDS
            if not self._is_failing:
                logger.warning("Answers cannot be stored now, and are dropped: %s.", failure)
        self._is_failing = failure is not None

    def wait(self) -> None:
        """Wait until all answers that were put have been counted."""
        with contextlib.suppress(BrokenExecutor):  # the process was killed
            self._executor.submit(int).result()

    def close(self) -> None:
        """Store all waiting answers, and end the process; raises StoreError."""
        try:
            self._executor.submit(_call_writer, "close").result()
        except BrokenExecutor as error:
            logger.warning("The process that stores answers was killed: %s", error)
        finally:
            self._executor.shutdown()
