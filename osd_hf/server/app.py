"""An OpenAI-compatible server: an assistant answers one request after another, and learns while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import math
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from types import FrameType
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from transformers import StoppingCriteriaList

from osd_hf.assistant import OnlineAssistant
from osd_hf.errors import ConfigError, OSDError
from osd_hf.evaluation.benchmark import pad_setting
from osd_hf.models import unwrap
from osd_hf.server.openai_api import (
    Answer,
    ApiError,
    CompletionRequest,
    RequestReader,
    StopText,
    check_model,
    event,
    refuse,
    shorten,
)
from osd_hf.utils.streaming import Rounds, Stop

MAX_BODY_BYTES = 8 << 20
MAX_DOMAINS = 64  # labels with statistics of their own, because clients choose them
MAX_DOMAIN_CHARACTERS = 64
LEARN_HEADER, DOMAIN_HEADER = "x-osd-learn", "x-osd-domain"

logger = logging.getLogger(__name__)
Update = str | ApiError | None  # a piece of text, an error, or the end of the answer


def _stopping_error() -> ApiError:
    return ApiError(503, "The server is stopping. Send the request again, a little later.", code="stopping")


def client_left_error() -> ApiError:
    return ApiError(499, "The client has left.")


@dataclass(eq=False)
class Job:
    """A request while it waits, is answered, and is learned from."""

    answer: Answer
    learn: bool
    domain: str | None
    updates: asyncio.Queue[Update] = field(default_factory=asyncio.Queue)  # what the client gets next
    is_left: threading.Event = field(default_factory=threading.Event)  # set when the client has left
    is_answered: bool = False  # the client has the answer, and the draft may still learn from it
    future: Future[None] = field(init=False)  # done when the draft has learned, or when the job is canceled
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def send(self, update: Update) -> None:
        """Send an update to the client, from any thread."""
        self.is_answered = self.is_answered or not isinstance(update, str)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self.loop.call_soon_threadsafe(self.updates.put_nowait, update)

    def leave(self, reason: ApiError) -> None:
        """Stop the job, in the event loop: within a round if it runs, immediately if it waits."""
        self.is_left.set()
        self.future.cancel()
        self.updates.put_nowait(reason)


@dataclass(eq=False)
class Service:
    """Answer requests one after another in a thread, with an assistant that has a tokenizer. Beyond `max_queue`
    waiting requests, others are refused. Chats get at most `max_new_tokens` if the request does not say a number, and
    the arguments of its chat template take precedence over `chat_template_kwargs`."""

    assistant: OnlineAssistant
    name: str
    _: KW_ONLY
    max_queue: int
    max_new_tokens: int
    learn: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None
    is_stopping: bool = False
    jobs: set[Job] = field(default_factory=set)  # that wait, and the one that is answered or learned from

    def __post_init__(self) -> None:
        models, kwargs = (unwrap(self.assistant.target), self.assistant.tokenizer), self.chat_template_kwargs
        self.reader = RequestReader(self.name, *models, self.max_new_tokens, chat_template_kwargs=kwargs)
        self._domains: set[str] = set()
        self._worker = ThreadPoolExecutor(1, "osd_hf-answers")

    def check(self) -> None:
        """Raise ApiError if no request can be accepted now."""
        if self.is_stopping:
            raise _stopping_error()
        if sum(not job.is_answered for job in list(self.jobs)) > self.max_queue:
            raise ApiError(503, f"{self.max_queue} requests are waiting. Try again a little later.", code="queue_full")

    def begin(self, request: CompletionRequest, *, learn: bool, domain: str | None) -> Job:
        """Queue a request, in the event loop; raises ApiError if it cannot be accepted."""
        self.check()
        if domain is not None and len(self._domains | {domain}) > MAX_DOMAINS:
            domain = None
        elif domain is not None:
            self._domains.add(domain)
        config = unwrap(self.assistant.target).generation_config
        job = Job(Answer(request, self.assistant.tokenizer, config, self.name), learn and self.learn, domain)
        self.jobs.add(job)
        job.future = self._worker.submit(self._answer, job)
        job.future.add_done_callback(lambda _: self.jobs.discard(job))
        return job

    def _answer(self, job: Job) -> None:
        """Answer a request, in the worker thread."""
        assistant, answer, request = self.assistant, job.answer, job.answer.request
        target, tokenizer = unwrap(assistant.target), assistant.tokenizer
        needs_logits = request.logprobs is not None
        is_seeded = request.seed is not None and request.sampling["do_sample"]

        def on_end() -> None:
            job.send(answer.end())
            if not needs_logits:
                job.send(None)  # the client has the answer before the draft learns from it

        try:
            input_ids = torch.tensor([request.prompt_ids])
            criteria = StoppingCriteriaList([Stop(job.is_left)])
            if request.stop:
                start = 1 if target.config.is_encoder_decoder else input_ids.shape[1]
                criteria.append(StopText(tokenizer, request.stop, start))
            settings = {**request.sampling, **pad_setting(target)}
            if needs_logits:
                settings |= {"output_logits": True, "return_dict_in_generate": True}
            if is_seeded:
                torch.manual_seed(request.seed)
                settings["num_assistant_tokens"] = 0  # with a draft, the number of draws depends on it
            output = assistant.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                domain=job.domain,
                learn=job.learn,
                owner=request.owner,
                streamer=Rounds(lambda ids: job.send(answer.push(ids)), on_end),
                stopping_criteria=criteria,
                max_new_tokens=request.max_new_tokens,
                **settings,
            )
            if needs_logits:
                answer.set_logprobs(output.logits)
                job.send(None)
        except OSDError as error:
            job.send(ApiError(400, str(error)))
        except Exception as error:
            logger.exception("A request failed.")
            job.send(ApiError(500, f"The request failed ({type(error).__name__}); the server's log says more."))
        finally:
            if is_seeded:
                torch.seed()  # later answers must not depend on it

    def stop(self, seconds: float) -> None:
        """Refuse new requests, and cancel the others after some seconds; called in the event loop."""
        self.is_stopping = True
        self.assistant.pause()
        asyncio.get_running_loop().call_later(seconds, self.cancel_all)

    def cancel_all(self) -> None:
        """Cancel all requests; called in the event loop."""
        for job in list(self.jobs):
            job.leave(_stopping_error())

    def close(self) -> None:
        """Wait for the running request and for learning, and save the session; see [`~OnlineAssistant.close`]."""
        for job in list(self.jobs):
            job.is_left.set()
        self._worker.shutdown(cancel_futures=True)
        self.assistant.close()


# --- HTTP -----------------------------------------------------------------------------------------------------------


class _Endpoints:
    def __init__(self, service: Service, key: str | None) -> None:
        self.service = service
        self._key = key

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        is_stopping = self.service.is_stopping
        return JSONResponse({"status": "stopping" if is_stopping else "ready"}, 503 if is_stopping else 200)

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        name = request.path_params.get("name")
        if name:
            check_model(name, self.service.name)
        model = {"id": self.service.name, "object": "model", "created": 0, "owned_by": "osd_hf"}
        return JSONResponse(model if name else {"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, RequestReader.chat)

    async def completion(self, request: Request) -> Response:
        return await self._complete(request, RequestReader.completion)

    async def _complete(
        self, request: Request, read: Callable[[RequestReader, dict[str, Any]], CompletionRequest]
    ) -> Response:
        self._check_key(request)
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":  # a web page may send other types anywhere
            message = f"The body must come as `content-type: application/json`, got {shorten(kind)}."
            raise ApiError(415, message, code="unsupported_media_type")
        self.service.check()
        body = await _read_body(request)
        learn, domain = request.headers.get(LEARN_HEADER, "true").lower(), request.headers.get(DOMAIN_HEADER) or None
        if learn not in ("true", "false"):
            refuse(LEARN_HEADER, "must be true or false", learn)
        if domain is not None and not (domain.isprintable() and len(domain) <= MAX_DOMAIN_CHARACTERS):
            refuse(DOMAIN_HEADER, f"must have at most {MAX_DOMAIN_CHARACTERS} characters", domain)
        # In a thread, because long prompts take time.
        completion_request = await run_in_threadpool(lambda: read(self.service.reader, _parse(body)))
        job = self.service.begin(completion_request, learn=learn == "true", domain=domain)
        watch, is_streaming = asyncio.create_task(_watch(request, job)), False
        try:
            update = await job.updates.get()
            if completion_request.is_stream and not isinstance(update, ApiError):
                is_streaming = True
                headers = {"cache-control": "no-cache"}
                return StreamingResponse(_stream(job, update, watch), headers=headers, media_type="text/event-stream")
            while isinstance(update, str):
                update = await job.updates.get()
        finally:
            if not is_streaming:
                watch.cancel()
                job.leave(client_left_error())
        if isinstance(update, ApiError):
            raise update
        return JSONResponse(job.answer.body())

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key.encode()):
            message = "The key is missing or wrong. Send `Authorization: Bearer KEY`."
            raise ApiError(401, message, code="invalid_api_key")


async def _read_body(request: Request) -> bytearray:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise ApiError(413, f"The body has more than {MAX_BODY_BYTES:,} bytes.", code="body_too_large")
    except ClientDisconnect:
        raise client_left_error() from None
    return body


def _parse(body: bytearray) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is no JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, f"The body must be a JSON object, got a {type(parsed).__name__}.")
    return parsed


async def _watch(request: Request, job: Job) -> None:
    """Leave the job when its client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.leave(client_left_error())


async def _stream(job: Job, update: Update, watch: asyncio.Task[None]) -> AsyncIterator[str]:
    """Yield the events of an answer after its first update."""
    answer = job.answer
    try:
        yield answer.first_event()
        while isinstance(update, str):
            yield answer.text_event(update)
            update = await job.updates.get()
        yield answer.last_events() if update is None else event(update.body)
    finally:
        watch.cancel()
        job.leave(client_left_error())


def make_app(
    service: Service, *, api_key: str | None = None, hosts: Sequence[str] = (), routes: Sequence[BaseRoute] = ()
) -> Starlette:
    """Return the application of a service. Clients must send `api_key` for everything under `/v1`. `hosts` are the
    allowed values of the header `host`; any by default. Without a key, they keep out web pages with a name that leads
    to this machine (DNS rebinding)."""
    endpoints = _Endpoints(service, api_key)

    def on_error(request: Request, error: Exception) -> Response:
        headers = error.headers if isinstance(error, HTTPException) else None
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
        elif not isinstance(error, ApiError):
            error = ApiError(500, f"The request failed ({type(error).__name__}).")
        return JSONResponse(error.body, error.status, {"retry-after": "1"} if error.status == 503 else headers)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.completion, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.models),
            Route("/health", endpoints.health),
            Route("/ready", endpoints.ready),
            *routes,
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)] if hosts else [],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), on_error),
    )


# --- listening ------------------------------------------------------------------------------------------------------


class Listener:
    """An address where an application will be served, bound immediately; port 0 selects a free one. Raises ConfigError
    if the address cannot be bound."""

    def __init__(self, host: str, port: int) -> None:
        try:
            family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            # Whether only this machine can connect.
            self.is_local = ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback
            self._socket = socket.create_server((str(place[0]), int(place[1])), family=family)
            # Also for accepted connections: otherwise the first event of a stream waits 40 ms until its client
            # confirms the headers. asyncio sets it only for sockets that it makes.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, OverflowError) as error:
            hint = "Choose another host or port, or stop what listens there."
            raise ConfigError(f"The address {host}:{port} cannot be listened at: {error}. {hint}") from error
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        self._server: _Server | None = None

    def run(
        self,
        app: Any,
        *,
        shutdown_seconds: float,
        on_start: Callable[[], object] = lambda: None,
        on_stop: Callable[[], object] = lambda: None,
    ) -> None:
        """Serve an ASGI application until SIGTERM, SIGINT or [`~Listener.stop`]. Then no connections are accepted, and
        running requests are canceled after some seconds, or at a second signal. `on_start` and `on_stop` are called in
        the event loop when the address answers, and when stopping begins."""
        config = uvicorn.Config(
            app,
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(shutdown_seconds),
        )
        self._server = _Server(config, on_start, on_stop)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """Release the address of a server that does not run."""
        self._socket.close()

    def stop(self) -> None:
        """Stop as after a signal, from any thread."""
        if self._server is not None:
            self._server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_start: Callable[[], object], on_stop: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        with contextlib.suppress(OSError):
            self._on_stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own method raises the signal again in the end, so the process would not exit with code 0.
        self.force_exit = self.should_exit
        self.should_exit = True
