"""The completions of an OpenAI-compatible server: asked for by token ids, and read as traces with log-probs."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np

from osd_hf.errors import ConfigError, DataError, ServerError, first_line, shown_address, without_credentials
from osd_hf.trace import Trace, ids_dtype

__all__ = [
    "CompletionClient", "RequestRefusedError", "ResponseReader", "environment_key", "message_of", "parse_address",
    "changed_sampling", "unwrapped", "vllm_counters",
]  # fmt: skip

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 600.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between two attempts
BUSY = (408, 425, 429, 500, 502, 503, 504)  # statuses that may pass
REFUSED = (400, 413, 422)  # statuses that are about one request
OPENAI = "https://api.openai.com"
# What a request does not say, vLLM takes from the model's generation config.
GREEDY = {
    "temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
ID_PREFIX = "token_id:"  # with which vLLM writes a token that is asked for as its id
TOLERANCE = 1e-3  # for a row's sum, and for two log-probs that tie
# A server's time is believed from ten years before ours to a minute after it: logs may be old, clocks differ a little.
PAST_SECONDS, FUTURE_SECONDS = 10 * 365 * 86_400.0, 60.0
# Settings of a request that make its tokens others than the target's own choice, with the values that change nothing;
# those of vLLM, SGLang and llama.cpp.
SHAPING: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "repeat_penalty": (1,),
    "length_penalty": (1,), "logit_bias": ({}, []), "bad_words": ([],), "allowed_token_ids": ([],), "min_tokens": (0,),
    "ignore_eos": (False,), "use_beam_search": (False,), "logits_processors": ([],), "thinking_token_budget": (),
    "structured_outputs": (), "response_format": ({"type": "text"},), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "grammar": ("",), "json_schema": ({},), "regex": (), "ebnf": (),
    "tool_choice": ("none", "auto"), "echo": (False,), "logprob_token_ids": ([],),
}  # fmt: skip
# Names of transformers, in the order in which it applies them, and values that change nothing.
WARPERS = (
    ("temperature", "TemperatureLogitsWarper", (1,)),
    ("top_k", "TopKLogitsWarper", (0, -1)),
    ("top_p", "TopPLogitsWarper", (1,)),
    ("min_p", "MinPLogitsWarper", (0,)),
)


# A line of vLLM's `/metrics`.
_VALUE = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|Inf|NaN)"
_SAMPLE = re.compile(rf"vllm:(?P<name>\w+?)(?:_total)?(?:\{{(?P<labels>.*)\}})?\s+(?P<value>{_VALUE})(?:\s+\d+)?")
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')


def vllm_counters(metrics: str) -> defaultdict[str, float]:
    """What vLLM counts in the text of its `/metrics`, over all of its engines and models: by name, without the prefix
    `vllm:` and the suffix `_total`, and with `@place` after it where places in a round are counted; 0 otherwise."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in filter(None, map(_SAMPLE.fullmatch, metrics.splitlines())):
        place = _POSITION.search(line["labels"] or "")
        found[line["name"] + (f"@{place[1]}" if place else "")] += float(line["value"])
    return found


# --- asking ---------------------------------------------------------------------------------------------------------


class RequestRefusedError(ServerError):
    """The server takes this request for wrong, which another one may not be."""


class CompletionClient:
    """
    The `/v1/completions` of an OpenAI-compatible server, asked with token ids.

    Args:
        url (`str`):
            Such as `http://localhost:8000`, with or without `/v1`; with `user:password@` for basic authentication,
            percent-encoded. Requests to this machine go through no proxy, and no redirect is followed.
        model (`str`, *optional*): Name that the server knows the model by; its only one by default.
        api_key (`str`, *optional*): Sent as a bearer token.
        allow_plain_http (`bool`, *optional*, defaults to `False`):
            Whether a key or a password may go to another machine over plain HTTP, where those in between can read it.
        patience_seconds (`float`, *optional*, defaults to 30):
            How long to try a server that cannot be reached or is too busy.

    Raises:
        ConfigError: a key or a password would go over plain HTTP, or both are given.
        ServerError: the URL is no address, cannot be reached, or serves several models and none is named.
    """

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
                timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
                limits=httpx2.Limits(max_connections=None),
                follow_redirects=False,
            )
        except ValueError as error:  # such as a proxy of the environment that is none
            raise ServerError(f"No connection can be made: {first_line(error)}.") from None
        try:
            self.model = model or self._only_model()
        except BaseException:
            self.close()
            raise

    def _models(self) -> dict[str, dict[str, Any]]:
        body = self._call("GET", "/models")
        return {str(entry["id"]): entry for entry in body.get("data", []) if isinstance(entry, dict) and "id" in entry}

    def _only_model(self) -> str:
        names = list(self._models())
        if len(names) != 1:
            raise ServerError(f"{self._shown} serves {', '.join(names) or 'none'}. Name the model to ask.")
        return names[0]

    def most_tokens(self) -> int | None:
        """The most tokens of a prompt and its answer together, where the server says so, as vLLM does."""
        found = self._models().get(self.model, {}).get("max_model_len")
        return found if type(found) is int else None

    def metrics(self) -> str:
        """What its `/metrics` say; raises ServerError as [`~CompletionClient.complete`] does."""
        return self._answer("GET", "/metrics", base=self.url.removesuffix("/v1")).text

    def complete(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, num_logprobs: int, **settings: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        Ask for an answer of at most `max_new_tokens` to a prompt of token ids, with K log-probs per position.
        `settings` are `temperature`, `top_p`, `top_k` and `seed`; greedy by default. Returns the bodies of the request
        and of the response.

        Raises:
            RequestRefusedError: the server refused this request.
            ServerError: it could not be reached for so long, or refuses all.
        """
        request = {
            "model": self.model, "prompt": list(prompt_ids), "max_tokens": max_new_tokens, **GREEDY,
            "logprobs": num_logprobs, "return_token_ids": True, "return_tokens_as_token_ids": True, **settings,
        }  # fmt: skip
        return request, self._call("POST", "/completions", request)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._json(self._answer(method, path, body))

    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, base: str | None = None
    ) -> httpx2.Response:
        until, pause = None, FIRST_PAUSE
        while True:
            try:
                response = self._http.request(method, (base or self.url) + path, json=body)
            except httpx2.LocalProtocolError:  # whose text may hold the key
                raise ServerError("The request cannot be sent: the key has characters that no header takes.") from None
            except httpx2.HTTPError as error:
                failed = f"{self._shown} cannot be reached: {first_line(error)}"
            else:
                if response.status_code == 200:
                    return response
                said = self._clean(message_of(response))[:300]
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
            body, found = response.json(), "no JSON object"
        except ValueError:
            body, found = None, "something else than JSON"
        if not isinstance(body, dict):
            raise ServerError(f"{self._shown} answered with {found}: {self._clean(response.text)[:80]!r}.")
        return body

    def close(self) -> None:
        """Close the connections, and try no more."""
        self._closed.set()
        self._http.close()

    def __enter__(self) -> CompletionClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parse_address(url: str) -> tuple[httpx2.URL, str, str]:
    """
    An address without user and password, then these two; raises ServerError where it is none, or has a query, which
    libraries and servers write into their logs.
    """
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
        raise ServerError(f"{shown_address(url)} is no address: {why}.") from None
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


def message_of(response: httpx2.Response) -> str:
    """What a server says of an error, in one line."""
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


# --- reading --------------------------------------------------------------------------------------------------------


def unwrapped(line: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
    """
    The request, where there is one, and the response of a line of a log: a response by itself, one beside its request
    under the names `request` and `response`, or a line of an OpenAI batch output file, which wraps it in `body`.

    Raises:
        DataError: there is no response, or it tells of an error.
    """
    request, response = line.get("request"), line.get("response", line)
    if isinstance(response, Mapping) and "body" in response:
        status = response.get("status_code", 200)
        if status != 200:
            raise DataError(f"the server answered with status {status}")
        response = response["body"]
    if isinstance(request, Mapping) and "body" in request:
        request = request["body"]
    if not isinstance(response, Mapping) or not isinstance(response.get("choices"), list):
        raise DataError("there is no response with `choices`")
    return request if isinstance(request, Mapping) else None, response


def changed_sampling(request: Mapping[str, Any]) -> list[str]:
    """The settings of a request by which its tokens are others than the target's own choice."""
    return [
        name for name, nothing in SHAPING.items() if request.get(name) is not None and request[name] not in nothing
    ]


@dataclass(frozen=True)
class ResponseReader:
    """
    Turns responses of `/v1/completions` or `/v1/chat/completions` into traces.

    Args:
        vocab_size (`int`): Width of the target's logits.
        num_logprobs (`int`): Entries kept per position (K); a response must have as many.
        eos_token_ids (`Sequence[int]`, *optional*):
            Ids that end an answer; the one that a response ends with is added to them.
        target_version (`str`, *optional*):
            Version of the target that answers; by default the name of the model in each response, where it has one.
        clock (`Callable[[], float]`, *optional*, defaults to `time.time`):
            Now, in Unix seconds: the time of a trace where the server's cannot be believed.
    """

    vocab_size: int
    num_logprobs: int
    eos_token_ids: Sequence[int] = ()
    target_version: str | None = None
    clock: Callable[[], float] = time.time

    def traces(
        self, response: Mapping[str, Any], request: Mapping[str, Any] | None = None, *, domain: str | None = None
    ) -> list[Trace]:
        """
        One trace per choice, without rounds, from the body of an answer with token ids and log-probs: vLLM sends them
        for `logprobs=K`, `return_token_ids=true` and `return_tokens_as_token_ids=true`; llama.cpp names ids by itself.
        Without the body of its request, an answer of most probable tokens alone is taken for a greedy one.

        Raises:
            DataError: something needed is missing or makes no sense; says what, and how to ask for it.
        """
        if shaped := changed_sampling(request or {}):
            raise DataError(f"its tokens were shaped by {', '.join(shaped)}, not by the target alone")
        try:
            if not response["choices"]:
                raise DataError("the response has no choices")
            return [self._trace(choice, response, request or {}, domain) for choice in response["choices"]]
        except DataError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise DataError("the response has other kinds of values than expected") from error

    def _when(self, created: Any) -> float:
        """The server's time of an answer, or ours: by milliseconds, or by zero, ages would be judged wrong."""
        now = self.clock()
        is_known = type(created) in (int, float) and now - PAST_SECONDS <= created <= now + FUTURE_SECONDS
        return float(created) if is_known else now

    def _trace(
        self, choice: Any, response: Mapping[str, Any], request: Mapping[str, Any], domain: str | None
    ) -> Trace:
        if not isinstance(choice, Mapping):
            raise DataError("a choice is no object")
        if choice.get("finish_reason") is None or "delta" in choice:
            raise DataError("it is a piece of a stream, or was cut off; log whole responses")
        prompt = self._ids(_prompt_ids(choice, response, request), "prompt")
        emitted, rows = self._rows(choice)
        completion = self._ids(choice.get("token_ids") or emitted, "completion")
        if completion.tolist() != emitted:
            raise DataError("the token ids are others than those of the log-probs")
        if not rows:
            raise DataError("the answer is empty")
        # The most probable first; of two that tie, the one that was emitted, as it was for the target.
        ordered = [
            sorted(row.items(), key=lambda entry: (-entry[1], entry[0] != token))
            for row, token in zip(rows, emitted, strict=True)
        ]
        is_greedy = all(
            row[token] >= top[0][1] - TOLERANCE for row, top, token in zip(rows, ordered, emitted, strict=True)
        )
        if request.get("temperature") == 0 and not is_greedy:
            raise DataError(
                "a greedy answer has tokens that are not the most probable ones; the server reshapes its rows (vLLM: "
                "serve with --generation-config vllm --logprobs-mode raw_logprobs)"
            )
        return Trace(
            prompt_ids=prompt,
            completion_ids=completion,
            rounds=(),
            **self._kept(ordered),
            vocab_size=self.vocab_size,
            domain=domain,
            sampling=self._sampling(choice, request, completion, is_greedy),
            created_at_seconds=self._when(response.get("created")),
            target=self.target_version or (name if isinstance(name := response.get("model"), str) and name else None),
        )

    def _ids(self, values: Any, what: str) -> Any:
        if not isinstance(values, list) or not all(type(v) is int for v in values):
            raise DataError(f"the {what} is no list of token ids")
        if outside := [v for v in values if not 0 <= v < self.vocab_size]:
            raise DataError(f"the {what} has the id {outside[0]}, the target's vocabulary ends at {self.vocab_size}")
        return np.array(values, np.int32)

    def _rows(self, choice: Mapping[str, Any]) -> tuple[list[int], list[dict[int, float]]]:
        """Emitted ids as the log-probs name them, and log-probs by id."""
        found = choice.get("logprobs")
        if not isinstance(found, Mapping):
            raise DataError(f"there are no log-probs; ask for `logprobs={self.num_logprobs}`")
        emitted, rows = [], []
        for token, logprob, top in list(_entries(found)):
            row = dict(top)
            if len(row) < self.num_logprobs:
                raise DataError(
                    f"a position has {len(row)} log-probs, {self.num_logprobs} are kept; ask for more, or keep fewer"
                )
            row.setdefault(token, logprob)  # a sampled token may lie below the top ones
            if not all(math.isfinite(v) and v <= TOLERANCE for v in row.values()):
                raise DataError("a position has log-probs that are none")
            emitted.append(token)
            rows.append(row)
        return emitted, rows

    def _kept(self, rows: list[list[tuple[int, float]]]) -> dict[str, Any]:
        """The arrays of a trace, from token ids with their log-probs."""
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
        if self.num_logprobs >= self.vocab_size:  # whole rows, in the order of the vocabulary
            order = ids.argsort(axis=1)
            nothing = np.full(len(ids), -np.inf, np.float32)
            return {
                "top_logits": np.take_along_axis(relative, order, axis=1), "top_ids": np.zeros((len(ids), 0), dtype),
                "tail_logprob": nothing,
            }  # fmt: skip
        with np.errstate(divide="ignore"):
            tail = np.log(np.maximum(1 - mass, 0))
        return {"top_logits": relative, "top_ids": ids.astype(dtype), "tail_logprob": tail.astype(np.float32)}

    def _sampling(
        self, choice: Mapping[str, Any], request: Mapping[str, Any], completion: Any, is_greedy: bool
    ) -> dict[str, Any]:
        eos = set(self.eos_token_ids)
        if choice.get("finish_reason") == "stop" and choice.get("stop_reason") is None and not request.get("stop"):
            eos.add(int(completion[-1]))
        sampling: dict[str, Any] = {"processors": [], "eos_token_id": sorted(eos) or None}
        bound = request.get("max_completion_tokens") or request.get("max_tokens")
        if bound is not None:
            sampling["max_new_tokens"] = int(bound)
        if request.get("temperature") == 0 or (not request and is_greedy):
            return sampling
        sampling["do_sample"] = True
        for name, processor, nothing in WARPERS:
            if (value := request.get(name)) is not None and value not in nothing:
                if type(value) not in (int, float) or not math.isfinite(value):
                    raise DataError(f"its {name} is no number")
                sampling[name] = value
                sampling["processors"].append(processor)
        return sampling


def _prompt_ids(choice: Mapping[str, Any], response: Mapping[str, Any], request: Mapping[str, Any]) -> list[int]:
    asked = None if request.get("truncate_prompt_tokens") else request.get("prompt")
    for found in (choice.get("prompt_token_ids"), response.get("prompt_token_ids"), asked):
        if isinstance(found, list) and found and all(type(v) is int for v in found):
            return found
    raise DataError("there are no token ids of the prompt; ask with `return_token_ids=true`")


def _entries(logprobs: Mapping[str, Any]) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Each position's emitted id, its log-prob, and the most probable ids with theirs."""
    content = logprobs.get("content")
    if isinstance(content, list):  # as chats have it
        for entry in content:
            top = [(_id(e), float(e["logprob"])) for e in entry.get("top_logprobs") or []]
            yield _id(entry), float(entry["logprob"]), top
        return
    tokens, values, tops = (logprobs.get(name) for name in ("tokens", "token_logprobs", "top_logprobs"))
    if not (isinstance(tokens, list) and isinstance(values, list) and isinstance(tops, list)):
        raise DataError("there are no log-probs of the most probable tokens")
    if not len(tokens) == len(values) == len(tops):
        raise DataError("tokens and log-probs differ in number")
    for token, value, top in zip(tokens, values, tops, strict=True):
        if value is None or top is None:
            raise DataError("a position has no log-probs")
        yield _id({"token": token}), float(value), [(_id({"token": t}), float(v)) for t, v in top.items()]


def _id(entry: Mapping[str, Any]) -> int:
    if type(entry.get("id")) is int:
        return int(entry["id"])
    token = entry.get("token")
    if isinstance(token, str) and token.startswith(ID_PREFIX):
        return int(token.removeprefix(ID_PREFIX))
    raise DataError("the log-probs name tokens by their text; ask with `return_tokens_as_token_ids=true`")
