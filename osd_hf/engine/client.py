"""Asking an OpenAI-compatible server: its address, who asks, and `/v1/completions` with token ids and log-probs."""

from __future__ import annotations

import ipaddress
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from osd_hf.errors import ConfigError, ServerError, first_line, shown_address, without_credentials

__all__ = ["CompletionClient", "RequestRefusedError", "environment_key", "parse_address"]

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


class RequestRefusedError(ServerError):
    """The server takes this request for wrong, which another one may not be."""


class CompletionClient:
    """
    The `/v1/completions` of an OpenAI-compatible server, asked with token ids.

    Args:
        url (`str`):
            Such as `http://localhost:8000`, with or without `/v1`; with `user:password@` for basic authentication,
            percent-encoded. Requests to this machine go through no proxy, and no redirect is followed.
        model (`str`, *optional*):
            Name that the server knows the model by; its only one by default.
        api_key (`str`, *optional*):
            Sent as a bearer token.
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

    def _only_model(self) -> str:
        body = self._call("GET", "/models")
        names = [str(entry["id"]) for entry in body.get("data", []) if isinstance(entry, dict) and "id" in entry]
        if len(names) != 1:
            raise ServerError(f"{self._shown} serves {', '.join(names) or 'none'}. Name the model to ask.")
        return names[0]

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
