"""Completions of OpenAI-compatible servers: ask with token ids, read responses as traces, and store them."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx2
import numpy as np

from osd_hf.errors import ConfigError, DataError, ServerError, first_line, shown_address, without_credentials
from osd_hf.prompts import Prompt
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace, ids_dtype

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 600.0
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 15.0  # between two attempts
BUSY = (408, 425, 429, 500, 502, 503, 504)  # statuses after which a request is repeated
REFUSED = (400, 413, 422)  # statuses that are about one request
# All settings of a greedy request, because vLLM takes missing ones from the model's generation config.
GREEDY = {
    "temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
ID_PREFIX = "token_id:"  # of tokens that vLLM names by their ids
TOLERANCE = 1e-3  # of the sum of probabilities, and between two equal log-probs
MAX_AHEAD_SECONDS = 60.0  # of a server's clock
# Settings of vLLM, SGLang and llama.cpp that change which tokens the target would choose, with their neutral values.
CHANGING_SETTINGS: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "repeat_penalty": (1,),
    "length_penalty": (1,), "logit_bias": ({}, []), "bad_words": ([],), "allowed_token_ids": ([],), "min_tokens": (0,),
    "ignore_eos": (False,), "use_beam_search": (False,), "logits_processors": ([],), "thinking_token_budget": (),
    "structured_outputs": (), "response_format": ({"type": "text"},), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "grammar": ("",), "json_schema": ({},), "regex": (), "ebnf": (),
    "tool_choice": ("none", "auto"), "echo": (False,), "logprob_token_ids": ([],),
}  # fmt: skip
# Settings, the processors of transformers in the order in which it applies them, and neutral values.
WARPERS = (
    ("temperature", "TemperatureLogitsWarper", (1,)),
    ("top_k", "TopKLogitsWarper", (0, -1)),
    ("top_p", "TopPLogitsWarper", (1,)),
    ("min_p", "MinPLogitsWarper", (0,)),
)
MAX_FAILURES = 8  # requests that fail in a row before the collection ends
MAX_REASONS = 256  # counted separately, because servers may give a different reason each time
POLL_SECONDS = 0.2  # between two checks of `stop`
GRACE_SECONDS = 5.0  # for requests under way when a collection ends early
# A line of vLLM's `/metrics`.
_VALUE = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|Inf|NaN)"
_SAMPLE = re.compile(rf"vllm:(?P<name>\w+?)(?:_total)?(?:\{{(?P<labels>.*)\}})?\s+(?P<value>{_VALUE})(?:\s+\d+)?")
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')

T = TypeVar("T")


def vllm_counters(metrics: str) -> defaultdict[str, float]:
    """Read vLLM's `/metrics`, summed over its engines and models. Names have no prefix `vllm:` and no suffix `_total`;
    counters by position in a round have the suffix `@position`."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in filter(None, map(_SAMPLE.fullmatch, metrics.splitlines())):
        position = _POSITION.search(line["labels"] or "")
        found[line["name"] + (f"@{position[1]}" if position else "")] += float(line["value"])
    return found


def parse_address(url: str) -> tuple[httpx2.URL, str, str]:
    """Split a URL into the address, the user, and the password. Raises ServerError if it is not an address, or has a
    query, which libraries and servers would log."""
    rule = "http://HOST or https://HOST, without a query; in user and password, @ / ? # are percent-encoded"
    try:
        address = httpx2.URL(url)
        authority = url.partition("//")[2].partition("/")[0]
        is_valid = address.scheme in ("http", "https") and address.host and url.count("@") == authority.count("@")
    except (httpx2.InvalidURL, ValueError):  # whose message may contain a part of the password
        is_valid = False
    if not is_valid or {"?", "#"} & set(url):
        raise ServerError(f"{shown_address(url)} is no address ({rule}).") from None
    return address.copy_with(userinfo=b""), address.username, address.password


def _is_this_machine(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


# --- the client -----------------------------------------------------------------------------------------------------


class RequestRefusedError(ServerError):
    """The server refuses this request. It may accept others."""


class CompletionClient:
    """A client of `/v1/completions` that sends token ids. The address, such as `http://localhost:8000`, may contain
    `user:password@`, percent-encoded. Requests to this machine use no proxy, and redirects are not followed. The model
    is by default the server's only one. While the server cannot be reached or is busy, requests are repeated for
    `patience_seconds`. Raises ConfigError if both a key and a password are given, or one of them would go to another
    machine over plain HTTP without `allow_plain_http`, and ServerError."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        allow_plain_http: bool = False,
        patience_seconds: float = 30.0,
    ) -> None:
        address, user, password = parse_address(url)
        self.url = str(address).rstrip("/").removesuffix("/v1") + "/v1"
        self.patience_seconds = patience_seconds
        self._closed = threading.Event()
        key = (api_key or "").strip()
        if key and (user or password):
            raise ConfigError(f"There are both a key and a password for {self.url}. Give one of them.")
        secret = key or password

        def remove_secrets(text: str) -> str:  # not an attribute, which would show the secret
            return without_credentials(text.replace(secret, "***") if secret else text)

        self._remove_secrets = remove_secrets
        is_here = _is_this_machine(address.host)
        if (key or user or password) and address.scheme != "https" and not (is_here or allow_plain_http):
            hint = "Take an https address or a tunnel, or accept it with `allow_plain_http=True` (--allow-plain-http)."
            raise ConfigError(f"A key or a password would go to {self.url} over plain HTTP. {hint}")
        try:
            self._http = httpx2.Client(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                auth=httpx2.BasicAuth(user, password) if user or password else None,
                trust_env=not is_here,  # no proxy of the environment
                timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
                limits=httpx2.Limits(max_connections=None),
                follow_redirects=False,
            )
        except ValueError as error:  # such as an invalid proxy of the environment
            raise ServerError(f"No connection can be made: {first_line(error)}.") from None
        try:
            names = [model] if model else list(self.models())
            if len(names) != 1:
                raise ServerError(f"{self.url} serves {', '.join(names) or 'none'}. Name the model to ask.")
        except ServerError:
            self.close()
            raise
        self.model = names[0]

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the server's facts about its models, by name; raises ServerError."""
        body = self._call("GET", "/models")
        return {str(entry["id"]): entry for entry in body.get("data", []) if isinstance(entry, dict) and "id" in entry}

    def metrics(self) -> str:
        """Return the text of `/metrics`; raises ServerError as [`~CompletionClient.complete`] does."""
        return self._send("GET", self.url.removesuffix("/v1") + "/metrics").text

    def complete(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, num_logprobs: int, **settings: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Request an answer with log-probs; returns the bodies of the request and of the response. `settings` are
        `temperature`, `top_p`, `top_k` and `seed`; greedy by default. Raises RequestRefusedError if the server refused
        this request, and ServerError if it could not be reached for `patience_seconds`, or refuses all requests."""
        request = {
            "model": self.model, "prompt": list(prompt_ids), "max_tokens": max_new_tokens, **GREEDY,
            "logprobs": num_logprobs, "return_token_ids": True, "return_tokens_as_token_ids": True, **settings,
        }  # fmt: skip
        return request, self._call("POST", "/completions", request)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = self._send(method, self.url + path, body)
        with contextlib.suppress(ValueError):
            parsed = response.json()
            if isinstance(parsed, dict):
                return parsed
        text = self._remove_secrets(response.text)[:80]
        raise ServerError(f"{self.url} answered with no JSON object: {text!r}.")

    def _send(self, method: str, url: str, body: dict[str, Any] | None = None) -> httpx2.Response:
        """Send a request until it succeeds, is refused, or the time is over."""
        until, pause = None, MIN_PAUSE_SECONDS
        while True:
            try:
                response = self._http.request(method, url, json=body)
            except httpx2.LocalProtocolError:  # its message may contain the key
                raise ServerError("The request cannot be sent: the key has characters that no header takes.") from None
            except httpx2.HTTPError as error:
                failure = f"{self.url} cannot be reached: {first_line(error)}"
            else:
                if response.status_code == 200:
                    return response
                message = self._remove_secrets(error_message(response))[:300]
                path = url.removeprefix(self.url).removeprefix(self.url.removesuffix("/v1"))
                failure = f"{self.url} answered {path} with status {response.status_code}: {message}"
                if response.status_code not in BUSY:
                    kind = RequestRefusedError if response.status_code in REFUSED else ServerError
                    hint = ""
                    if 300 <= response.status_code < 400:
                        hint = " It points to another address: name that one, if you trust it."
                    elif "logprobs" in failure:
                        hint = " Keep fewer log-probs, or let the server give more (vLLM: --max-logprobs)."
                    raise kind(f"{failure}.{hint}")
            until = until or time.monotonic() + self.patience_seconds  # counted from the first failure
            if time.monotonic() + pause > until:
                raise ServerError(f"{failure}. Gave up after {self.patience_seconds:g} s.")
            if self._closed.wait(pause):
                raise ServerError(f"{failure}. The connection was closed.")
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def close(self) -> None:
        """Close the connections, and stop retrying."""
        self._closed.set()
        self._http.close()

    def __enter__(self) -> CompletionClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def error_message(response: httpx2.Response) -> str:
    """Return the message of an error response in one line."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(str(text).split()).rstrip(".")


# --- reading responses ----------------------------------------------------------------------------------------------


def changed_sampling(request: Mapping[str, Any]) -> list[str]:
    """Return the settings of a request that change which tokens the target would choose."""
    given = {name: request[name] for name in CHANGING_SETTINGS if request.get(name) is not None}
    return [name for name, value in given.items() if value not in CHANGING_SETTINGS[name]]


@dataclass(frozen=True)
class ResponseReader:
    """Turn responses of `/v1/completions` or `/v1/chat/completions` into traces with `num_logprobs` entries per
    position; responses must have at least as many. `vocab_size` is the width of the target's logits. The ids in
    `eos_token_ids` end an answer, in addition to the last id of a response. The target's version is by default the
    model name."""

    vocab_size: int
    num_logprobs: int
    eos_token_ids: Sequence[int] = ()
    target_version: str | None = None
    clock: Callable[[], float] = time.time

    def traces(
        self, response: Mapping[str, Any], request: Mapping[str, Any] | None = None, *, domain: str | None = None
    ) -> list[Trace]:
        """Return one trace per choice of a response, without rounds. Without the request, an answer of most probable
        tokens counts as greedy. Raises DataError if something is missing or invalid, with how to ask for it."""
        if changed := changed_sampling(request or {}):
            raise DataError(f"its tokens were shaped by {', '.join(changed)}, not by the target alone")
        try:
            if not response["choices"]:
                raise DataError("the response has no choices")
            return [self._trace(choice, response, request or {}, domain) for choice in response["choices"]]
        except DataError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise DataError("the response has other kinds of values than expected") from error

    def _trace(
        self, choice: Any, response: Mapping[str, Any], request: Mapping[str, Any], domain: str | None
    ) -> Trace:
        if choice.get("finish_reason") is None or "delta" in choice:
            raise DataError("it is a piece of a stream, or was cut off; log complete responses")
        requested = None if request.get("truncate_prompt_tokens") else request.get("prompt")
        prompts = (choice.get("prompt_token_ids"), response.get("prompt_token_ids"), requested)
        given = next((ids for ids in prompts if ids and isinstance(ids, list) and type(ids[0]) is int), None)
        if given is None:
            raise DataError("there are no token ids of the prompt; ask with `return_token_ids=true`")
        prompt = self._ids(given, "prompt")
        emitted, rows = self._rows(choice)
        completion = self._ids(choice.get("token_ids") or emitted, "completion")
        if completion.tolist() != emitted:
            raise DataError("the token ids are others than those of the log-probs")
        if not rows:
            raise DataError("the answer is empty")
        # By probability; of two equal entries, the emitted token comes first, because the target chose it.
        ordered = [
            sorted(row.items(), key=lambda entry: (-entry[1], entry[0] != token))
            for row, token in zip(rows, emitted, strict=True)
        ]
        is_greedy = all(
            row[token] >= top[0][1] - TOLERANCE for row, top, token in zip(rows, ordered, emitted, strict=True)
        )
        if request.get("temperature") == 0 and not is_greedy:
            hint = "vLLM: serve with --generation-config vllm --logprobs-mode raw_logprobs"
            raise DataError(f"a greedy answer has tokens that are not the most probable ones; {hint}")
        name, now = response.get("model"), self.clock()
        created: Any = response.get("created")
        if type(created) not in (int, float) or not 0 < created <= now + MAX_AHEAD_SECONDS:
            created = now
        return Trace(
            prompt_ids=prompt,
            completion_ids=completion,
            rounds=(),
            **self._target_rows(ordered),
            vocab_size=self.vocab_size,
            domain=domain,
            sampling=self._sampling(choice, request, completion, is_greedy),
            created_at_seconds=float(created),
            target=self.target_version or (name if isinstance(name, str) and name else None),
        )

    def _ids(self, values: Any, what: str) -> Any:
        if not isinstance(values, list) or not all(type(v) is int for v in values):
            raise DataError(f"the {what} is no list of token ids")
        if outside := [v for v in values if not 0 <= v < self.vocab_size]:
            raise DataError(f"the {what} has the id {outside[0]}, the target's vocabulary ends at {self.vocab_size}")
        return np.array(values, np.int32)

    def _rows(self, choice: Mapping[str, Any]) -> tuple[list[int], list[dict[int, float]]]:
        """Return the emitted ids, and the log-probs of each position by id."""
        found = choice.get("logprobs")
        if not isinstance(found, Mapping):
            raise DataError(f"there are no log-probs; ask for `logprobs={self.num_logprobs}`")
        emitted, rows = [], []
        for token, logprob, top in _positions(found):
            row = dict(top)
            if len(row) < self.num_logprobs:
                few = f"a position has {len(row)} log-probs, {self.num_logprobs} are kept"
                raise DataError(f"{few}; ask for more, or keep fewer")
            row.setdefault(token, logprob)  # a sampled token may not be among the top ones
            if not all(math.isfinite(v) and v <= TOLERANCE for v in row.values()):
                raise DataError("a position has log-probs that are none")
            emitted.append(token)
            rows.append(row)
        return emitted, rows

    def _target_rows(self, rows: list[list[tuple[int, float]]]) -> dict[str, Any]:
        """Return the target's rows as arrays of a trace."""
        top = [row[: self.num_logprobs] for row in rows]
        ids = np.array([[token for token, _ in row] for row in top], np.int64)
        logprobs = np.array([[value for _, value in row] for row in top], np.float64)
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise DataError(f"the log-probs name the id {wrong}, the vocabulary ends at {self.vocab_size}")
        mass = np.exp(logprobs).sum(axis=1)
        if (mass > 1 + TOLERANCE).any():
            raise DataError("the log-probs of a position add up to more than one")
        relative = np.maximum(logprobs - logprobs[:, :1], np.finfo(np.float16).min).astype(np.float16)
        dtype = ids_dtype(self.vocab_size)
        if self.num_logprobs >= self.vocab_size:  # full rows, in the order of the vocabulary
            top_logits = np.take_along_axis(relative, ids.argsort(axis=1), axis=1)
            tail = np.full(len(ids), -np.inf, np.float32)
            return {"top_logits": top_logits, "top_ids": np.zeros((len(ids), 0), dtype), "tail_logprob": tail}
        with np.errstate(divide="ignore"):
            tail = np.log(np.maximum(1 - mass, 0)).astype(np.float32)
        return {"top_logits": relative, "top_ids": ids.astype(dtype), "tail_logprob": tail}

    def _sampling(
        self, choice: Mapping[str, Any], request: Mapping[str, Any], completion: Any, is_greedy: bool
    ) -> dict[str, Any]:
        eos = set(self.eos_token_ids)
        if choice.get("finish_reason") == "stop" and choice.get("stop_reason") is None and not request.get("stop"):
            eos.add(int(completion[-1]))
        sampling: dict[str, Any] = {"processors": [], "eos_token_id": sorted(eos) or None}
        max_tokens = request.get("max_completion_tokens") or request.get("max_tokens")
        if max_tokens is not None:
            sampling["max_new_tokens"] = int(max_tokens)
        if request.get("temperature") == 0 or (not request and is_greedy):
            return sampling
        sampling["do_sample"] = True
        for name, processor, neutral in WARPERS:
            if (value := request.get(name)) is not None and value not in neutral:
                if type(value) not in (int, float) or not math.isfinite(value):
                    raise DataError(f"its {name} is no number")
                sampling[name] = value
                sampling["processors"].append(processor)
        return sampling


def _positions(logprobs: Mapping[str, Any]) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Yield the emitted id of each position, its log-prob, and the most probable ids with theirs."""
    content = logprobs.get("content")
    if isinstance(content, list):  # of a chat
        for entry in content:
            top = [(_id(e), float(e["logprob"])) for e in entry.get("top_logprobs") or []]
            yield _id(entry), float(entry["logprob"]), top
        return
    tokens, values, tops = (logprobs.get(name) for name in ("tokens", "token_logprobs", "top_logprobs"))
    if not (isinstance(tokens, list) and isinstance(values, list) and isinstance(tops, list)):
        raise DataError("there are no log-probs of the most probable tokens")
    for token, value, top in zip(tokens, values, tops, strict=True):
        yield _id({"token": token}), float(value), [(_id({"token": t}), float(v)) for t, v in top.items()]


def _id(entry: Mapping[str, Any]) -> int:
    if type(entry.get("id")) is int:
        return int(entry["id"])
    token = entry.get("token")
    if isinstance(token, str) and token.startswith(ID_PREFIX):
        return int(token.removeprefix(ID_PREFIX))
    raise DataError("the log-probs name tokens by their text; ask with `return_tokens_as_token_ids=true`")


# --- collecting -----------------------------------------------------------------------------------------------------


@dataclass
class CollectionReport:
    """The result of a collection: stored traces and their tokens, and answers that cannot be learned from."""

    requests: int = 0
    tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    unanswered: int = 0  # prompts without an answer when the collection ended
    seconds: float = 0.0
    _reasons: dict[str, str] = field(default_factory=dict, repr=False)  # reason without numbers -> first such reason

    def skip(self, reason: str) -> None:
        """Count an answer that cannot be learned from."""
        reason = without_credentials(reason)
        kind = re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", reason)
        if kind not in self._reasons and len(self._reasons) >= MAX_REASONS:
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
    """Send prompts with their token ids to a server, `concurrency` at a time, and store the answers. `settings` are
    passed to [`~CompletionClient.complete`]. `report` is filled with counts, also if an error ends the collection. A
    prompt with an answer that is refused or cannot be learned from is counted and left out. The collection ends with
    the reason if that happens eight times in a row, or to all prompts, and when `stop` is set. Raises ServerError,
    DataError and StoreError if the server, its answers, or the store fail. Earlier answers are stored."""
    report = report or CollectionReport()
    waiting, running = deque(prompts), set[Future[list[Trace]]]()
    failures: list[RequestRefusedError | DataError] = []  # since the last stored answer
    start = time.perf_counter()

    def ask(prompt: Prompt, ids: list[int]) -> list[Trace]:
        num_logprobs = reader.num_logprobs
        request, response = client.complete(ids, max_new_tokens=max_new_tokens, num_logprobs=num_logprobs, **settings)
        return reader.traces(response, request, domain=prompt.domain)

    def keep(done: set[Future[list[Trace]]]) -> ServerError | DataError | None:
        """Store answers; returns the error that should end the collection."""
        fatal: ServerError | DataError | None = None
        for future in done:
            running.remove(future)
            try:
                traces = future.result()
            except (RequestRefusedError, DataError) as error:
                report.skip(str(error))
                failures.append(error)
                if len(failures) >= MAX_FAILURES:
                    fatal = error
            except ServerError as error:
                report.unanswered += 1
                fatal = error
            else:
                failures.clear()
                for trace in traces:
                    store.append(trace)
                    report.requests += 1
                    report.tokens += len(trace)
                    if on_request is not None:
                        on_request(trace)
        return fatal

    fatal: ServerError | DataError | None = None
    try:
        while fatal is None and not (stop is not None and stop.is_set()):
            while waiting and len(running) < concurrency:
                running.add(_run_in_daemon(ask, *waiting.popleft()))
            if not running:
                break
            fatal = keep(wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED).done)
        keep(wait(running, timeout=GRACE_SECONDS).done)
    finally:
        report.unanswered += len(waiting) + len(running)
        report.seconds += time.perf_counter() - start
        store.flush()
    if failures and not report.requests:
        fatal = fatal or failures[-1]
    if fatal is not None:
        raise fatal
    return report


def _run_in_daemon(call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Run a call in a thread that, unlike those of an executor, does not delay the end of the program."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001  # raised where the result is read
            future.set_exception(error)

    threading.Thread(target=run, name="osd_hf-collect", daemon=True).start()
    return future
