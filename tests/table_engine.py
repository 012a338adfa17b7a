"""An engine that writes chats, completions and streams as vLLM 0.32 does, as an ASGI application, and a wire to it in
this process, which streams. Its model is a table, so that an answer takes no time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import string
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import httpx2
import numpy as np

VOCAB, EOS = 64, 2
# Texts of tokens, with what JSON may write in two ways.
NAMES = ["", "", "", "é", "\u2028", '"', "\\", "\n", "𝄞", "/", "\x7f", "0.1", *string.ascii_letters]
GROUP = 3  # tokens of an event, as of a round of drafting
CREATED = int(time.time())
TOO_MANY = "Requested sample logprobs of {}, which is greater than max allowed: {}"


def name_of(token: int, as_id: bool) -> str:
    return f"token_id:{token}" if as_id else NAMES[token]


class Answer:
    """What the model says to a prompt, by its ids; `rows` are the log-probs of each position."""

    def __init__(self, prompt: Sequence[int], body: Mapping[str, Any], number: int = 0) -> None:
        generator = np.random.default_rng([zlib.crc32(bytes(prompt)), int(body.get("seed") or 0), number])
        self.prompt, self.ids, rows, self.texts = list(prompt), list[int](), [], list[str]()
        self.finish_reason, self.stop_reason = "length", None
        for _ in range(int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)):
            logits = generator.normal(size=VOCAB) * 3
            rows.append(logits - np.log(np.exp(logits).sum()))
            is_greedy = body.get("temperature") == 0
            token = int(rows[-1].argmax()) if is_greedy else int(generator.choice(VOCAB, p=np.exp(rows[-1])))
            self.ids.append(token)
            self.texts.append(NAMES[token])
            stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
            if token == EOS:
                self.finish_reason = "stop"
                break
            if found := [stop for stop in stops if stop in "".join(self.texts)]:
                self.finish_reason, self.stop_reason = "stop", found[0]
                self.texts[-1] = ""  # the text ends before it; good enough here
                break
        self.rows = np.array(rows)

    def logprobs(self, part: slice, top: int, *, is_chat: bool, as_id: bool, offset: int = 0) -> dict[str, Any]:
        """As vLLM writes them for some positions: the token that was chosen first, then the most probable ones."""
        entries = []
        for token, row in zip(self.ids[part], self.rows[part], strict=True):
            ids = [token, *(i for i in np.argsort(-row)[:top].tolist() if i != token)]
            entries.append((token, {i: max(float(row[i]), -9999.0) for i in ids}))
        if is_chat:

            def shown(i: int, value: float) -> dict[str, Any]:
                text = name_of(i, as_id)
                return {"token": text, "logprob": value, "bytes": list(text.encode())}

            return {"content": [
                shown(token, row[token]) | {"top_logprobs": [shown(i, v) for i, v in list(row.items())[:top]]}
                for token, row in entries
            ]}  # fmt: skip
        names = [name_of(token, as_id) for token, _ in entries]
        return {
            "text_offset": [offset + sum(map(len, names[:i])) for i in range(len(names))],
            "token_logprobs": [row[token] for token, row in entries],
            "tokens": names,
            "top_logprobs": [{name_of(i, as_id): v for i, v in list(row.items())[: top + 1]} for _, row in entries],
        }


class Refused(Exception):
    """A request that the engine answers with a status of its own."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


class FakeVLLM:
    """
    The engine.

    Attributes:
        asked, headers: bodies of the requests that it has got for answers, and their headers.
        most_logprobs: it refuses to give more.
        is_parsing: whether a parser of tools holds back the text of each second event.
        before_piece: awaited before each piece of a stream, with its number.
        sent: pieces of streams that it has sent.
        left: set when a client leaves before its answer has ended.
    """

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.most_logprobs: int | None = None
        self.is_parsing = False
        self.before_piece: Callable[[int], Any] | None = None
        self.sent, self.left = 0, asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if not scope["path"].endswith("/completions"):
            await self.other(scope, bytes(body), send)
            return
        self.asked.append(bytes(body))
        self.headers.append(dict(scope["headers"]))
        try:
            given, is_stream = self.answer(scope["path"], bytes(body))
        except Refused as error:
            told = {"message": str(error), "type": "BadRequestError", "param": error.param, "code": error.status}
            await reply(send, error.status, compact({"error": told}))
            return
        if not is_stream:
            await reply(send, 200, compact(next(given)))
            return
        writing = asyncio.ensure_future(self.write(given, send))
        leaving = asyncio.ensure_future(receive())  # the client, as nothing else comes
        await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            writing.cancel()
            self.left.set()
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing

    async def write(self, given: Iterator[dict[str, Any]], send: Any) -> None:
        await send(start(200, b"text/event-stream; charset=utf-8"))
        for number, chunk in enumerate(given):
            await asyncio.sleep(0)  # others have their turn, as while a model computes
            if self.before_piece is not None:
                await self.before_piece(number)
            await send({"type": "http.response.body", "body": event(chunk), "more_body": True})
            self.sent += 1
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def other(self, scope: Any, body: bytes, send: Any) -> None:
        if scope["path"] == "/health":
            await reply(send, 200, b"")
        elif scope["path"] == "/v1/models":
            await reply(send, 200, compact({"object": "list", "data": [{"id": "table", "object": "model"}]}))
        elif scope["path"].startswith("/echo"):
            told = {
                "method": scope["method"], "path": scope["raw_path"].decode(), "query": scope["query_string"].decode(),
                "headers": sorted([n.decode(), v.decode()] for n, v in scope["headers"]), "crc": zlib.crc32(body),
                "bytes": len(body),
            }  # fmt: skip
            await reply(send, 203, compact(told), (b"x-one", b"1"), (b"x-one", b"2"), (b"set-cookie", b"a=b"))
        else:
            await reply(send, 404, b'{"detail":"Not Found"}')

    # --- answers ----------------------------------------------------------------------------------------------------

    def answer(self, path: str, body: bytes) -> tuple[Iterator[dict[str, Any]], bool]:
        """What is written, chunk by chunk, and whether as a stream."""
        try:
            asked = dict(json.loads(body))
        except ValueError as error:
            raise Refused(400, f"1 validation error: json_invalid: {error} in {body!r}") from error
        is_chat = path == "/v1/chat/completions"
        if missing := {"messages" if is_chat else "prompt", "model"} - asked.keys():
            raise Refused(400, f"1 validation error: {sorted(missing)} in {body.decode()}")
        if asked["model"] != "table":
            raise Refused(404, f"The model `{asked['model']}` does not exist.", "model")
        if asked.get("temperature", 1) < 0:
            raise Refused(400, f"temperature must be non-negative, got {asked['temperature']}.", "temperature")
        top = (asked.get("top_logprobs") or 0 if asked.get("logprobs") else None) if is_chat else asked.get("logprobs")
        if self.most_logprobs is not None and (top or 0) > self.most_logprobs:
            raise Refused(400, TOO_MANY.format(top, self.most_logprobs), "logprobs")
        prompt = "".join(f"[{m['role']}]{m['content']}" for m in asked["messages"]) if is_chat else asked["prompt"]
        ids = [1, *(byte % (VOCAB - 3) + 3 for byte in prompt.encode())] if isinstance(prompt, str) else prompt
        answers = [Answer(ids, asked, number) for number in range(asked.get("n") or 1)]
        writer = _Writer(self, asked, is_chat, top)
        return (writer.stream(answers) if asked.get("stream") else writer.whole(answers)), bool(asked.get("stream"))


class _Writer:
    def __init__(self, engine: FakeVLLM, asked: Mapping[str, Any], is_chat: bool, top: int | None) -> None:
        self.engine, self.asked, self.is_chat, self.top = engine, asked, is_chat, top
        self.with_ids = bool(asked.get("return_token_ids"))
        self.as_id = bool(asked.get("return_tokens_as_token_ids"))
        self.id = "chatcmpl-1" if is_chat else "cmpl-1"

    def logprobs(self, answer: Answer, part: slice, offset: int = 0) -> Any:
        if self.top is None:
            return None
        return answer.logprobs(part, self.top, is_chat=self.is_chat, as_id=self.as_id, offset=offset)

    def whole(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        choices = []
        for index, answer in enumerate(answers):
            text, everything = "".join(answer.texts), slice(None)
            said: dict[str, Any] = {"text": text}
            if self.is_chat:
                said = {"message": {"role": "assistant", "content": text, "refusal": None, "annotations": None,
                                    "audio": None, "function_call": None, "reasoning": None}}  # fmt: skip
            choices.append({
                "index": index, **said, "logprobs": self.logprobs(answer, everything),
                "finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason,
                "token_ids": answer.ids if self.with_ids else None,
                **({} if self.is_chat else {
                    "prompt_logprobs": None, "prompt_token_ids": answer.prompt if self.with_ids else None}),
                "routed_experts": None,
            })  # fmt: skip
        prompt = answers[0].prompt
        yield {
            "id": self.id, "object": "chat.completion" if self.is_chat else "text_completion", "created": CREATED,
            "model": "table", "choices": choices, "service_tier": None, "system_fingerprint": None,
            "usage": self.usage(answers),
            **({"prompt_logprobs": None, "prompt_token_ids": prompt if self.with_ids else None}
               if self.is_chat else {}),
            "kv_transfer_params": None,
        }  # fmt: skip

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        given = sum(len(answer.ids) for answer in answers)
        size = len(answers[0].prompt)
        return {"prompt_tokens": size, "total_tokens": size + given, "completion_tokens": given,
                "prompt_tokens_details": None}  # fmt: skip

    def stream(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": CREATED, "model": "table"}
        prompt = answers[0].prompt if self.with_ids else None
        if self.is_chat:
            for index in range(len(answers)):
                first = {"index": index, "delta": {"role": "assistant", "content": ""},
                         "logprobs": None, "finish_reason": None}  # fmt: skip
                yield head | {"choices": [first], "prompt_token_ids": prompt, "prompt_text": None}
        for begin in range(0, max(len(answer.ids) for answer in answers), GROUP):
            for index, answer in enumerate(answers):
                if begin < len(answer.ids):
                    chunk = self.chunk(index, answer, begin, prompt if begin == 0 else None)
                    if chunk is not None:
                        yield head | {"choices": [chunk]}
        if (self.asked.get("stream_options") or {}).get("include_usage"):
            yield head | {"choices": [], "usage": self.usage(answers)}

    def chunk(self, index: int, answer: Answer, begin: int, prompt: Any) -> dict[str, Any] | None:
        part, is_last = slice(begin, begin + GROUP), begin + GROUP >= len(answer.ids)
        ids = answer.ids[part] if self.with_ids else None
        finish = answer.finish_reason if is_last else None
        reason = {"stop_reason": answer.stop_reason} if is_last or not self.is_chat else {}
        text = "".join(answer.texts[part])
        logprobs = self.logprobs(answer, part, offset=begin)
        if not self.is_chat:
            return {
                "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, **reason,
                "prompt_token_ids": prompt, "token_ids": ids,
            }  # fmt: skip
        delta = {"content": text}
        if self.engine.is_parsing and begin // GROUP % 2 and not is_last:
            if logprobs is None and ids is None:
                return None
            delta = {}
        return {
            "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **reason,
            "token_ids": ids,
        }  # fmt: skip


def compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(chunk: Any) -> bytes:
    return b"data: " + compact(chunk) + b"\n\n"


def start(status: int, kind: bytes, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *headers]}


async def reply(send: Any, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send(start(status, b"application/json", (b"content-length", str(len(body)).encode()), *headers))
    await send({"type": "http.response.body", "body": body, "more_body": False})


# --- a wire in this process -----------------------------------------------------------------------------------------


class Wire(httpx2.AsyncBaseTransport):
    """Joins a client to an ASGI application, which waits with each piece until the one before is taken, and is told
    when the client leaves, as by a server."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        target = request.extensions.get("target", request.url.raw_path)
        path, _, query = target.partition(b"?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method,
            "headers": [(n.lower(), v) for n, v in request.headers.raw], "scheme": "http",
            "path": unquote(path.decode()), "raw_path": path, "query_string": query, "root_path": "",
            "client": ("client", 1), "server": ("server", 80),
        }  # fmt: skip
        answered = _Answered(request.stream)
        answered.task = asyncio.ensure_future(answered.run(self.app, scope))
        try:
            status, headers = await answered.begun
        except BaseException:
            answered.left.set()
            raise
        return httpx2.Response(status, headers=headers, stream=answered)


class _Answered(httpx2.AsyncByteStream):
    task: asyncio.Future[None]

    def __init__(self, body: Any) -> None:
        self.body = body.__aiter__()
        self.has_body, self.has_ended, self.left = True, False, asyncio.Event()
        self.begun = asyncio.get_running_loop().create_future()
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue(1)  # None where it ends

    async def run(self, app: Any, scope: Any) -> None:
        try:
            await app(scope, self.receive, self.send)
        except Exception as error:  # noqa: BLE001  # as a server does
            if not self.begun.done():
                self.begun.set_exception(error)
                return
        await self.put(None)

    async def receive(self) -> dict[str, Any]:
        if self.has_body:
            async for piece in self.body:
                return {"type": "http.request", "body": piece, "more_body": True}
            self.has_body = False
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if not self.begun.done():
                self.begun.set_result((message["status"], list(message["headers"])))
            return
        if message.get("body"):
            await self.put(message["body"])
        self.has_ended = not message.get("more_body")

    async def put(self, piece: bytes | None) -> None:
        if not self.left.is_set():
            await self.pieces.put(piece)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self.pieces.get()) is not None:
            yield piece
        if not self.has_ended:
            raise httpx2.RemoteProtocolError("peer closed connection without sending complete message body")

    async def aclose(self) -> None:
        self.left.set()
        if not self.pieces.empty():
            self.pieces.get_nowait()  # whoever waits to put the next goes on
        await asyncio.wait([self.task])


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of a real server of an application, in a thread."""
    import threading

    import uvicorn

    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    ready = threading.Event()
    begin = server.startup

    async def startup(sockets: Any = None) -> None:
        await begin(sockets)
        ready.set()

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
