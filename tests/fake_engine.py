"""An engine of one's own: what `/v1/models` and `/v1/completions` of vLLM give, from a tiny model in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

TOO_MANY = "Requested sample logprobs of {}, which is greater than max allowed: {}"
LEAST = -9999.0  # which vLLM writes for a probability of nothing


def warpers(settings: Mapping[str, Any]) -> list[Any]:
    """As transformers makes and orders them, of those settings of a request that do something."""
    made: list[Any] = []
    if settings.get("temperature") not in (None, 0, 1):
        made.append(TemperatureLogitsWarper(float(settings["temperature"])))
    if settings.get("top_k") not in (None, 0, -1):
        made.append(TopKLogitsWarper(settings["top_k"]))
    if settings.get("top_p") not in (None, 1):
        made.append(TopPLogitsWarper(settings["top_p"]))
    if settings.get("min_p") not in (None, 0):
        made.append(MinPLogitsWarper(settings["min_p"]))
    return made


@torch.no_grad()
def answer(model: Any, prompt: Sequence[int], body: Mapping[str, Any]) -> tuple[list[int], torch.Tensor, Any]:
    """Ids of an answer, the log-probs of each of its positions (raw, whole rows), and the id that ended it."""
    ids, rows = torch.tensor([list(prompt)]), []
    generator = torch.Generator().manual_seed(int(body.get("seed") or 0))
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    ended: Any = None
    for _ in range(int(body.get("max_tokens") or 16)):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, -1].float()
        rows.append(logits[0].log_softmax(-1))
        if body.get("temperature") == 0:
            token = logits.argmax(-1, keepdim=True)
        else:
            for warper in warpers(body):
                logits = warper(ids, logits)
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, token], dim=1)
        if int(token) in ends or int(token) in (body.get("stop_token_ids") or ()):
            ended = int(token)
            break
    return ids[0, len(prompt) :].tolist(), torch.stack(rows), ended


def completion(model: Any, body: Mapping[str, Any], *, with_logprobs: bool = True) -> Any:
    """The body of a response to the body of a request for `/v1/completions`, as vLLM writes it."""
    name = "token_id:{}"
    tokens, rows, ended = answer(model, body["prompt"], body)
    kept, tops = body.get("logprobs"), []
    for token, row in zip(tokens, rows, strict=True):
        values, ids = row.topk(kept or 0)
        top = {name.format(token): float(row[token])}  # first, and beside the others where it is none of them
        top |= {name.format(i): max(v, LEAST) for i, v in zip(ids.tolist(), values.tolist(), strict=True)}
        tops.append(top)
    is_own = ended is not None and ended not in (body.get("stop_token_ids") or ())
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.get("model"),
        "choices": [
            {
                "index": 0,
                "text": "".join(f"<{token}>" for token in tokens),
                "logprobs": {
                    "text_offset": list(range(len(tokens))),
                    "tokens": [name.format(token) for token in tokens],
                    "token_logprobs": [float(row[token]) for token, row in zip(tokens, rows, strict=True)],
                    "top_logprobs": tops,
                } if with_logprobs and kept else None,
                "finish_reason": "length" if ended is None else "stop",
                "stop_reason": None if ended is None or is_own else ended,
                "token_ids": tokens if body.get("return_token_ids") else None,
                "prompt_token_ids": list(body["prompt"]) if body.get("return_token_ids") else None,
            }
        ],
        "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)},
    }  # fmt: skip


class FakeEngine:
    """
    One that serves a model.

    Attributes:
        model: a transformers model that answers.
        names: of the models that it says it serves.
        asked: bodies of the requests for completions, in the order of arrival.
        keys: `Authorization` of each request, that for models included.
        answered: prompts that got an answer.
        gone_after: answers until it hangs up on whoever asks.
        busy: times that it says 503 yet.
        most_logprobs: it refuses to give more, with vLLM's message.
        with_logprobs: whether answers have log-probs.
        instead: what it answers with status 200 in place of a completion.
        on_request: called with each request's body before it is answered.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.names = ["tiny"]
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answered: list[list[int]] = []
        self.gone_after: int | None = None
        self.busy = 0
        self.most_logprobs: int | None = None
        self.with_logprobs = True
        self.instead: bytes | None = None
        self.on_request: Callable[[dict[str, Any]], object] = lambda body: None
        self.lock = threading.Lock()
        self.address = ""


def handler_of(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def give(self, body: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def refuse(self, status: int, message: str) -> None:
            self.give(json.dumps({"error": {"message": message, "type": "BadRequestError"}}).encode(), status)

        def do_GET(self) -> None:
            engine.keys.append(self.headers.get("Authorization"))
            assert self.path == "/v1/models"
            models = [{"id": name, "object": "model"} for name in engine.names]
            self.give(json.dumps({"object": "list", "data": models}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions"
            with engine.lock:
                engine.asked.append(body)
                engine.keys.append(self.headers.get("Authorization"))
                is_busy, engine.busy = engine.busy > 0, max(engine.busy - 1, 0)
            engine.on_request(body)
            with engine.lock:
                self.decide(body, is_busy)

        def decide(self, body: dict[str, Any], is_busy: bool) -> None:
            if engine.gone_after is not None and len(engine.answered) >= engine.gone_after:
                self.close_connection = True
                self.connection.close()
            elif is_busy:
                self.refuse(503, "The engine is starting.")
            elif engine.most_logprobs is not None and body.get("logprobs", 0) > engine.most_logprobs:
                self.refuse(400, TOO_MANY.format(body["logprobs"], engine.most_logprobs))
            elif engine.instead is not None:
                self.give(engine.instead)
            else:
                given = completion(engine.model, body, with_logprobs=engine.with_logprobs)
                engine.answered.append(body["prompt"])
                self.give(json.dumps(given).encode())

    return Handler


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server on a port of this machine, in a thread; yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def fake_engine(model: Any) -> Iterator[FakeEngine]:
    """An engine that serves a model on a port of this machine."""
    engine = FakeEngine(model)
    with listening(handler_of(engine)) as engine.address:
        yield engine
