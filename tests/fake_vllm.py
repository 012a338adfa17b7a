"""An engine without a model: what vLLM's `/metrics`, `/collective_rpc`, `/reset_prefix_cache` and `/health` give."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from osd_hf.engines.deploy import DraftCounts
from osd_hf.engines.vllm_reload import weights_digest

K = 5
CLIENT = httpx2.Client


def draws(rng: np.random.Generator, alpha: float, requests: int, spread: float = 0.1, tokens: int = 40) -> Any:
    """Examined and accepted tokens of requests that differ: int64 of shape (requests, 2). The acceptance of each is of
    a beta distribution around `alpha`, with this standard deviation where there is room for it."""
    spread = min(spread, 0.9 * np.sqrt(alpha * (1 - alpha)))
    size = alpha * (1 - alpha) / spread**2 - 1
    own = rng.beta(alpha * size, (1 - alpha) * size, requests)
    examined = np.maximum(rng.lognormal(np.log(tokens), 0.5, requests).round(), 1).astype(np.int64)
    return np.stack([examined, rng.binomial(examined, own)], axis=1)


def windows(rng: np.random.Generator, alpha: float, number: int, each: int = 10, **how: Any) -> list[DraftCounts]:
    """So many windows of an engine."""
    found = draws(rng, alpha, number * each, **how).reshape(number, each, 2).sum(axis=1)
    return [DraftCounts(each, float(examined), float(accepted)) for examined, accepted in found]


class FakeVLLM:
    """
    One at an address, which has answered some requests before anybody looks.

    Attributes:
        alphas: acceptance of each draft, by the digest of its weights; of others, and of `None`, what it began with.
        digest: of the weights that were loaded into it last.
        loads: paths that were loaded.
        is_down, is_unhealthy, has_extension: what it is like.
        spoils: its loads read other weights than there are.
    """

    def __init__(self, url: str, alpha: float = 0.6, seed: int = 0, served: int = 40) -> None:
        self.url, self.alphas = url, {None: alpha}
        self.rng = np.random.default_rng(seed)
        self.digest: str | None = None
        self.loads: list[str] = []
        self.is_down = self.is_unhealthy = self.spoils = False
        self.has_extension = True
        self.resets = 0
        self.requests = 0
        self.counts = np.zeros(2, np.int64)
        self.serve(served)

    def serve(self, requests: int) -> None:
        """Answer so many requests with the draft that it has."""
        self.requests += requests
        self.counts += draws(self.rng, self.alphas.get(self.digest, self.alphas[None]), requests).sum(axis=0)

    def start_anew(self) -> None:
        """As after a crash: with what it began with, and counters from nothing."""
        self.digest, self.requests, self.counts = None, 0, np.zeros(2, np.int64)

    def metrics(self) -> str:
        """The counters, as vLLM writes them."""
        labels = 'engine="0",model_name="target"'
        lines = ["# HELP vllm:request_success_total Finished requests."]
        for reason, count in (("stop", self.requests // 2), ("length", self.requests - self.requests // 2)):
            lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(count)}')
        examined, accepted = (int(count) for count in self.counts)
        by_position = [accepted - (K - 1) * (accepted // K), *[accepted // K] * (K - 1)]
        drafts = examined - sum(by_position[:-1])
        lines += [
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(drafts)}",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(K * drafts)}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(accepted)}",
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {float(count)}'
            for i, count in enumerate(by_position)
        ]
        return "\n".join(lines) + "\n"

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        """What it says to a request."""
        if self.is_down:
            raise httpx2.ConnectError("refused", request=request)
        path = request.url.path
        if path == "/metrics":
            return httpx2.Response(200, text=self.metrics())
        if path == "/health":
            return httpx2.Response(503 if self.is_unhealthy else 200)
        if path == "/collective_rpc":
            return self.call(json.loads(request.read())) if self.has_extension else httpx2.Response(404)
        assert path == "/reset_prefix_cache"
        assert request.url.params["reset_running_requests"] == "true"
        assert request.extensions["timeout"]["read"] <= 10  # however long a load may take
        self.resets += 1
        return httpx2.Response(200, json={"success": True})

    def call(self, body: Mapping[str, Any]) -> httpx2.Response:
        """A call of the worker extension."""
        path, digest = body["args"]
        assert body["method"] == "load_draft"
        if digest == self.digest:
            return httpx2.Response(200, json={"results": [{"draft": path, "digest": digest, "is_new": False}]})
        self.loads.append(Path(path).name)
        try:
            self.digest = "0" * 64 if self.spoils else weights_digest(Path(path))
        except OSError as error:
            return httpx2.Response(200, json={"results": [{"error": f"{type(error).__name__}: {error}"}]})
        return httpx2.Response(200, json={"results": [{"draft": path, "digest": self.digest, "is_new": True}]})


def connecting(*engines: FakeVLLM) -> Any:
    """What stands for `httpx2.Client`, and reaches these engines alone."""
    by_host = {httpx2.URL(engine.url).host: engine for engine in engines}
    transport = httpx2.MockTransport(lambda request: by_host[request.url.host].answer(request))
    return functools.partial(CLIENT, transport=transport)
