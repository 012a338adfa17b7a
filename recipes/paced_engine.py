"""
An engine that computes nothing: it streams completions as vLLM writes them, at the pace that it is given.

    python recipes/paced_engine.py --first-ms 60 --token-ms 12     # prints its address; a signal ends it

`proxy_cost.py --paced` stands a proxy before it: what passing costs is not seen where engine, proxy and clients take
turns on two cores, as beside vLLM for CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from typing import Any

from common import data_folder

from osd_hf.models import load_config
from osd_hf.server.listener import Running

MODEL, CREATED, PROMPT_TOKENS = "paced", int(time.time()), 24
ROWS = 256  # log-probs of so many positions, which come again


class PacedEngine:
    """An ASGI application; `first_seconds` pass before a first token, `token_seconds` before each further one."""

    def __init__(self, first_seconds: float, token_seconds: float, vocab_size: int, num_logprobs: int) -> None:
        self.first_seconds, self.token_seconds = first_seconds, token_seconds
        draw = random.Random(0)
        self.rows = []
        for _ in range(ROWS):
            ids = draw.sample(range(3, vocab_size), num_logprobs)
            weights = sorted((draw.expovariate(1.0) ** 8 for _ in ids), reverse=True)
            values = [math.log(0.99 * weight / sum(weights) + 1e-9) for weight in weights]  # others have the rest
            top = {f"token_id:{i}": value for i, value in zip(ids, values, strict=True)}
            shown = {
                "text_offset": [0], "token_logprobs": values[:1], "tokens": [f"token_id:{ids[0]}"],
                "top_logprobs": [top],
            }  # fmt: skip
            self.rows.append((ids[0], json.dumps(shown)))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
            return
        body = await body_of(receive)
        if scope["method"] == "GET":
            await say(send, 200, {"data": [{"id": MODEL}]})
        else:
            await self.stream(json.loads(body), send)

    def rows_of(self, prompt: str, most: int) -> list[tuple[int, str]]:
        """The tokens that are said to a prompt, and their log-probs. As answers end, clients are not in step."""
        count = random.Random(prompt).randint(-(-most // 4), most)
        return [self.rows[(number + len(prompt)) % ROWS] for number in range(count)]

    async def stream(self, asked: dict[str, Any], send: Any) -> None:
        """A whole answer of events, at times that do not depend on how long each took."""
        loop = asyncio.get_running_loop()
        rows, begun = self.rows_of(asked["prompt"], int(asked["max_tokens"])), loop.time()
        count = len(rows)
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        ids = json.dumps(list(range(3, 3 + PROMPT_TOKENS))) if asked.get("return_token_ids") else "null"
        for number, (token, row) in enumerate(rows):
            due = begun + self.first_seconds + number * self.token_seconds
            await asyncio.sleep(due - loop.time())
            logprobs = row if asked.get("logprobs") else "null"
            own = f"[{token}]" if asked.get("return_token_ids") else "null"
            reason = '"stop"' if number == count - 1 else "null"
            event = (
                f'data: {{"id":"cmpl-1","object":"text_completion","created":{CREATED},"model":"{MODEL}","choices":'
                f'[{{"index":0,"text":" t{token}","logprobs":{logprobs},"finish_reason":{reason},"stop_reason":null,'
                f'"prompt_token_ids":{ids if number == 0 else "null"},"token_ids":{own}}}],"usage":null}}\n\n'
            )
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": count, "total_tokens": PROMPT_TOKENS + count}
        last = {"id": "cmpl-1", "object": "text_completion", "created": CREATED, "model": MODEL, "choices": [],
                "usage": usage}  # fmt: skip
        end = f"data: {json.dumps(last, separators=(',', ':'))}\n\ndata: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end.encode(), "more_body": False})


async def body_of(receive: Any) -> bytes:
    """The whole body of a request."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def say(send: Any, status: int, said: Any) -> None:
    """An answer that is no stream."""
    head = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": json.dumps(said).encode()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-ms", type=float, default=60.0)
    parser.add_argument("--token-ms", type=float, default=12.0)
    parser.add_argument("--num-logprobs", type=int, default=64)
    args = parser.parse_args()
    size = load_config(str(data_folder() / "lab/target")).vocab_size
    engine = PacedEngine(args.first_ms / 1000, args.token_ms / 1000, size, args.num_logprobs)
    running = Running("127.0.0.1", 0)
    running.run(engine, shutdown_seconds=2, on_start=lambda: print(running.address, flush=True))


if __name__ == "__main__":
    main()
