"""A server as OpenAI's API has it: an assistant answers one request after another, and learns while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
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
from osd_hf.errors import OSDError
from osd_hf.evaluation.benchmark import pad_setting
from osd_hf.models import unwrap
from osd_hf.server.requests import ApiError, Asked, Reader, check_model, refuse, shown
from osd_hf.server.responses import Answer, StopText, server_sent
from osd_hf.utils.streaming import Rounds, Stop

logger = logging.getLogger(__name__)

MOST_BODY_BYTES = 8 << 20
MOST_READERS = 2  # bodies that are read at a time: long ones take a processor each, and memory
MOST_DOMAINS = 64  # labels that are counted apart: clients name them
LEARN, DOMAIN = "x-osd-learn", "x-osd-domain"  # headers

MOST_CHARACTERS = 64  # of a label


def stopping() -> ApiError:
    """What a request is answered that comes too late."""
    return ApiError(503, "The server is stopping. Send the request again, a little later.", code="stopping")


def left() -> ApiError:
    """What a client would be answered that is gone."""
    return ApiError(499, "The client has left.")


class Job:
    """One request on its way. What its client is told next stands in `told`: a piece of text, `None` when the answer
    is whole, or why there is none."""

    def __init__(self, answer: Answer, learn: bool, domain: str | None) -> None:
        self.answer, self.learn, self.domain = answer, learn, domain
        self.told: asyncio.Queue[str | ApiError | None] = asyncio.Queue()
        self.is_left = threading.Event()
        self.is_answered = False  # it may be learned from still
        self.future: Future[None] = Future()
        self._loop = asyncio.get_running_loop()

    def tell(self, news: str | ApiError | None) -> None:
        """Tell the client, from any thread."""
        self.is_answered = self.is_answered or not isinstance(news, str)
        with contextlib.suppress(RuntimeError):  # of a loop that has ended, and nobody listens
            self._loop.call_soon_threadsafe(self.told.put_nowait, news)

    def leave(self, why: ApiError) -> None:
        """Answer no further, in the event loop: within a round, or never where it has not begun."""
        self.is_left.set()
        self.future.cancel()
        self.told.put_nowait(why)


class Service:
    """
    Answers requests, one after another, by a thread of its own: the event loop only waits.

    Args:
        name (`str`): The model that is served, as clients name it.
        max_queue (`int`): Requests that may wait; further ones are refused.
        max_new_tokens (`int`): Of an answer to a chat that says nothing of it.
        learn (`bool`, *optional*, defaults to `True`): Whether the draft learns from requests.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Settings of the chat template; those of a request go before them.
    """

    def __init__(
        self, name: str, *, max_queue: int, max_new_tokens: int, learn: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.max_queue, self.learn = name, max_queue, learn
        self._template_kwargs = chat_template_kwargs
        self._max_new_tokens = max_new_tokens
        self.assistant: OnlineAssistant | None = None
        self.reader: Reader | None = None
        self.is_stopping = False
        self.jobs: set[Job] = set()  # those that wait, and the one that is answered or learned from
        self.readers = 0  # requests that are being read, and are no jobs yet
        self._line: deque[Job] = deque()  # those that wait
        self._domains: set[str] = set()
        self._worker = ThreadPoolExecutor(1, "osd_hf-answers")

    def open(self, assistant: OnlineAssistant) -> None:
        """Serve this assistant, which has a tokenizer, from now on."""
        self.reader = Reader(
            self.name, unwrap(assistant.target), assistant.tokenizer, self._max_new_tokens,
            chat_template_kwargs=self._template_kwargs,
        )  # fmt: skip
        self.assistant = assistant

    @property
    def state(self) -> str:
        """`"loading"`, `"ready"` or `"stopping"`."""
        return "stopping" if self.is_stopping else "loading" if self.assistant is None else "ready"

    def check(self) -> None:
        """Raises ApiError where no request can begin now."""
        if self.state == "loading":
            raise ApiError(503, "The model is being loaded. Try again a little later.", code="loading")
        if self.state == "stopping":
            raise stopping()
        if self.readers + sum(not job.is_answered for job in list(self.jobs)) > self.max_queue:
            raise ApiError(503, f"{self.max_queue} requests are waiting. Try again a little later.", code="queue_full")

    def begin(self, asked: Asked, *, learn: bool, domain: str | None) -> Job:
        """Put a request into the line, in the event loop; raises ApiError where that cannot be."""
        self.check()
        if domain is not None and domain not in self._domains:
            if len(self._domains) < MOST_DOMAINS:
                self._domains.add(domain)
            else:
                domain = None
        assert self.assistant is not None
        config = unwrap(self.assistant.target).generation_config
        job = Job(Answer(asked, self.assistant.tokenizer, config, self.name), learn and self.learn, domain)
        self.jobs.add(job)
        self._line.append(job)
        job.future.add_done_callback(lambda _: self._forget(job))
        self._worker.submit(self._answer_next)  # which does not hold the job: one that is left is let go of at once
        return job

    def _forget(self, job: Job) -> None:
        self.jobs.discard(job)
        with contextlib.suppress(ValueError):
            self._line.remove(job)

    def _answer_next(self) -> None:
        """Answer the first of those that wait, if there is one still, in the thread that does."""
        try:
            job = self._line.popleft()
        except IndexError:
            return
        if job.future.set_running_or_notify_cancel():
            try:
                self._answer(job)
            finally:
                job.future.set_result(None)

    def _answer(self, job: Job) -> None:
        """Answer a request, in the thread that does."""
        try:
            self._generate(job)
        except OSDError as error:
            job.tell(ApiError(400, str(error)))
        except Exception as error:
            logger.exception("A request failed.")
            job.tell(ApiError(500, f"The request failed ({type(error).__name__}); the server's log says more."))

    def _generate(self, job: Job) -> None:
        assistant, answer, asked = self.assistant, job.answer, job.answer.asked
        assert assistant is not None
        target, tokenizer, ids = unwrap(assistant.target), assistant.tokenizer, torch.tensor([asked.prompt_ids])
        needs_rows, is_seeded = asked.logprobs is not None, asked.seed is not None and asked.sampling["do_sample"]

        def ended() -> None:
            job.tell(answer.end())
            if not needs_rows:
                job.tell(None)  # whoever waits has the answer before the draft learns from it

        criteria = StoppingCriteriaList([Stop(job.is_left)])
        if asked.stop:
            start = 1 if target.config.is_encoder_decoder else ids.shape[1]
            criteria.append(StopText(tokenizer, asked.stop, start))
        more = {**asked.sampling, **pad_setting(target)}
        if needs_rows:
            more |= {"output_logits": True, "return_dict_in_generate": True}
        if is_seeded:
            torch.manual_seed(asked.seed)
            more["num_assistant_tokens"] = 0  # with a draft, how much is drawn depends on what it has learned
        try:
            output = assistant.generate(
                ids, attention_mask=torch.ones_like(ids), domain=job.domain, learn=job.learn, owner=asked.owner,
                streamer=Rounds(lambda new: job.tell(answer.push(new)), ended), stopping_criteria=criteria,
                max_new_tokens=asked.max_new_tokens, **more,
            )  # fmt: skip
        finally:
            if is_seeded:
                torch.seed()  # the next answers are not to follow from it
        if needs_rows:
            answer.tell_logprobs(output.logits)
            job.tell(None)

    # --- the end ----------------------------------------------------------------------------------------------------

    def stop(self, seconds: float) -> None:
        """Begin the end, in the event loop: nothing begins any more, and what is there has some seconds to end."""
        self.is_stopping = True
        if self.assistant is not None:
            self.assistant.pause()
        asyncio.get_running_loop().call_later(seconds, self.cut)

    def cut(self) -> None:
        """Leave all requests that are there, in the event loop."""
        for job in list(self.jobs):
            job.leave(stopping())

    def close(self) -> None:
        """Wait for the request that is ending, then for learning, and save the session where it is kept. Raises
        LearnerError as [`~OnlineAssistant.close`] does."""
        for job in list(self.jobs):
            job.is_left.set()
            job.future.cancel()
        self._worker.shutdown(cancel_futures=True)
        if self.assistant is not None:
            self.assistant.close()


# --- HTTP -----------------------------------------------------------------------------------------------------------


class _Api:
    """What is done at each address."""

    def __init__(self, service: Service, key: str | None) -> None:
        self.service, self._key = service, key
        self._reading = asyncio.Semaphore(MOST_READERS)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        state = self.service.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        asked = request.path_params.get("name")
        if asked:
            check_model(asked, self.service.name)
        model = {"id": self.service.name, "object": "model", "created": 0, "owned_by": "osd_hf"}
        return JSONResponse(model if asked else {"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        return await self._answered(request, lambda reader, body: reader.chat(body))

    async def completion(self, request: Request) -> Response:
        return await self._answered(request, lambda reader, body: reader.completion(body))

    async def _answered(self, request: Request, read: Callable[[Reader, dict[str, Any]], Asked]) -> Response:
        self._check_key(request)
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":  # what a web page may send to any address
            message = f"The body must come as `content-type: application/json`, got {shown(kind)}."
            raise ApiError(415, message, code="unsupported_media_type")
        self.service.check()
        text = await _body(request)
        learn, domain = request.headers.get(LEARN, "true").lower(), request.headers.get(DOMAIN) or None
        if learn not in ("true", "false"):
            refuse(LEARN, "must be true or false", learn)
        if domain is not None and not (domain.isprintable() and len(domain) <= MOST_CHARACTERS):
            refuse(DOMAIN, f"must have at most {MOST_CHARACTERS} characters", domain)
        asked = await self._read(text, read)
        job = self.service.begin(asked, learn=learn == "true", domain=domain)
        watching, is_told_on = asyncio.create_task(_watch(request, job)), False
        try:
            told = await job.told.get()
            if asked.is_stream and not isinstance(told, ApiError):  # what is wrong at once has its status
                told_on, headers = _stream(job, told, watching), {"cache-control": "no-cache"}
                is_told_on = True
                return StreamingResponse(told_on, headers=headers, media_type="text/event-stream")
            while isinstance(told, str):
                told = await job.told.get()
        finally:
            if not is_told_on:
                watching.cancel()
                job.leave(left())
        if isinstance(told, ApiError):
            raise told
        return JSONResponse(job.answer.body)

    async def _read(self, text: bytearray, read: Callable[[Reader, dict[str, Any]], Asked]) -> Asked:
        """What a body asks for, read in a thread: the event loop goes on. Raises ApiError."""
        self.service.check()
        reader = self.service.reader
        assert reader is not None
        self.service.readers += 1
        try:
            async with self._reading:
                return await run_in_threadpool(lambda: read(reader, _parsed(text)))
        finally:
            self.service.readers -= 1

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key.encode()):
            message = "The key is missing or wrong. Send `Authorization: Bearer KEY`."
            raise ApiError(401, message, code="invalid_api_key")


async def _body(request: Request) -> bytearray:
    """The body of a request; raises ApiError where it is too long."""
    text = bytearray()
    async for part in request.stream():
        text += part
        if len(text) > MOST_BODY_BYTES:
            raise ApiError(413, f"The body has more than {MOST_BODY_BYTES:,} bytes.", code="body_too_large")
    return text


def _parsed(text: bytearray) -> dict[str, Any]:
    """The JSON object of a body; raises ApiError."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is no JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"The body must be a JSON object, got a {type(body).__name__}.")
    return body


async def _watch(request: Request, job: Job) -> None:
    """Leave the request when its client does."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.leave(left())


async def _stream(job: Job, told: str | ApiError | None, watching: asyncio.Task[None]) -> AsyncIterator[str]:
    """The events of an answer while it grows, of which the first piece is there."""
    answer = job.answer
    try:
        yield answer.first()
        while isinstance(told, str):
            yield answer.event(told)
            told = await job.told.get()
        yield answer.last() if told is None else server_sent(told.body)
    finally:
        watching.cancel()
        job.leave(left())


def make_app(
    service: Service, *, api_key: str | None = None, hosts: Sequence[str] = (), routes: Sequence[BaseRoute] = ()
) -> Starlette:
    """
    The application of a service.

    Args:
        service (`Service`): What answers; it may still be loading.
        api_key (`str`, *optional*): What clients must send for everything under `/v1`.
        hosts (`Sequence[str]`, *optional*): The names by which it may be addressed, as the header `host` says; any by
            default. Without a key they keep out web pages whose own name leads to this machine.
        routes (`Sequence[BaseRoute]`, *optional*): What else is served.
    """
    api = _Api(service, api_key)

    def told(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body, error.status, {"retry-after": "1"} if error.status == 503 else None)

    def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}."
        return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)

    def gone(_: Request, error: Exception) -> Response:
        return JSONResponse(left().body, left().status)

    def failed(_: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(500, f"The request failed ({type(error).__name__}).").body, 500)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completion, methods=["POST"]),
            Route("/v1/models", api.models), Route("/v1/models/{name:path}", api.models),
            Route("/health", api.health), Route("/ready", api.ready), *routes,
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)] if hosts else [],
        exception_handlers={ApiError: told, HTTPException: unknown, ClientDisconnect: gone, Exception: failed},
    )  # fmt: skip
