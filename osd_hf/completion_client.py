"""Asking an OpenAI-compatible server for completions with token ids and log-probs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from osd_hf.errors import ServerError
from osd_hf.loading import first_line
from osd_hf.provenance import without_credentials

__all__ = ["CompletionClient", "RequestRefusedError"]

CONNECT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between two attempts
BUSY = (408, 425, 429, 500, 502, 503, 504)  # statuses that may pass
REFUSED = (400, 413, 422)  # statuses that are about one request


class RequestRefusedError(ServerError):
    """The server takes this request for wrong, which another one may not be."""


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
        self._shown = without_credentials(self.url)
        self.patience_seconds = patience_seconds
        self._closed = threading.Event()
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key.strip()}"}
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
            except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
                raise ServerError(f"{self._shown} is no address: {first_line(error)}.") from error
            except httpx2.LocalProtocolError:  # whose text may hold the key
                raise ServerError("The request cannot be sent: the key has characters that no header takes.") from None
            except httpx2.HTTPError as error:
                failed = f"{self._shown} cannot be reached: {first_line(error)}"
            else:
                if response.status_code == 200:
                    return self._json(response)
                failed = f"{self._shown} answered {path} with status {response.status_code}: {_message(response)}"
                if response.status_code not in BUSY:
                    kind = RequestRefusedError if response.status_code in REFUSED else ServerError
                    raise kind(f"{failed}.{_hint(failed)}")
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
            raise ServerError(
                f"{self._shown} answered with something else than JSON: {response.text[:80]!r}."
            ) from error
        if not isinstance(body, dict):
            raise ServerError(f"{self._shown} answered with no JSON object: {response.text[:80]!r}.")
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
