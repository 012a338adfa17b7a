"""Measure the cost of `osd-hf proxy`: time to the first token, time of complete answers, and tokens per second.

    bash recipes/vllm_env.sh .venv-vllm
    OSD_HF_DATA=... python recipes/proxy_cost.py --vllm .venv-vllm
    OSD_HF_DATA=... python recipes/proxy_cost.py --paced --name proxy_cost_paced   # an engine that computes nothing
    OSD_HF_DATA=... python recipes/proxy_cost.py --vllm .venv-vllm --target DIR --chats --own-core --name own_core
    OSD_HF_DATA=... python recipes/proxy_cost.py --url http://localhost:8000 --smoke

1, 4, and 16 clients stream greedy completions in four ways: direct, direct with the log-probs that recording needs,
forwarded, and recorded. The ways alternate in `--rounds` rounds after a warm-up, with the same `--requests` per
client. Then the tokens per second of 16 clients are measured by the recorded share. The proxy runs in its own process
and the clients in this one. `--own-core` reserves the first core for the engine; `--chats` asks for chats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch
from common import MAX_NEW_TOKENS, TEMPLATES, data_folder, make_parser, rows, run_facts, write_report
from tqdm import tqdm
from vllm_loop import K, osd_hf, serving, target_of

from osd_hf import CorrectionStore
from osd_hf.engines.completions import ResponseReader
from osd_hf.models import load_config
from osd_hf.proxy.app import METRICS_PATH, Proxy, Upstream
from osd_hf.proxy.recorder import ProxyCounts, Recorder, add_fields
from osd_hf.server.app import Listener

NUM_LOGPROBS = 64
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PACED_MODEL, PACED_PROMPT_TOKENS, CREATED = "paced", 24, int(time.time())
PACED_ROWS = 256  # positions with different log-probs; they repeat
PACED_FIRST_SECONDS, PACED_TOKEN_SECONDS = 0.06, 0.012
BETWEEN_SECONDS = 0.05  # after which one client comes behind another
LEAST = 24  # requests of a round, however few the clients
DIRECT, ASKED, THROUGH, COLLECTED = "direct", "direct with log-probs", "through", "collected"


@contextlib.contextmanager
def server_of(command: list[str]) -> Iterator[str]:
    """Start a server; yield the address that it prints first."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[0]
    finally:
        process.terminate()
        process.communicate()


@contextlib.contextmanager
def engine_of(args: argparse.Namespace) -> Iterator[str]:
    """Yield the address of a running engine, or start one."""
    if args.url:
        yield args.url
        return
    with tempfile.TemporaryDirectory() as folder:
        static, lab = Path(folder) / "static", data_folder() / "lab"
        models = ("--draft", lab / "draft", "--target", lab / "target")
        if args.drafting:
            subprocess.run(osd_hf("push", "--export", static, *models, "--num-assistant-tokens", K), check=True)
        with serving(args, static if args.drafting else None, Path(args.log).absolute()) as (engine, _):
            yield engine.url


@contextlib.contextmanager
def proxied(url: str, store: CorrectionStore, counts: ProxyCounts) -> Iterator[str]:
    """Run a proxy in a thread of this process; yield its address."""
    size = load_config(str(data_folder() / "lab/target")).vocab_size
    recorder = Recorder(ResponseReader(size, NUM_LOGPROBS), store, counts, in_process=False)
    running, ready = Listener("127.0.0.1", 0), threading.Event()
    app = Proxy([Upstream(url)], counts, recorder).app()
    thread = threading.Thread(target=lambda: running.run(app, shutdown_seconds=10, on_start=ready.set), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield running.address
    finally:
        running.stop()
        thread.join()
        recorder.close()


@contextlib.contextmanager
def proxy_of(url: str, folder: str, args: argparse.Namespace) -> Iterator[str]:
    """Start a proxy that records everything except opt-outs; yield its address."""
    if args.smoke:
        with CorrectionStore(Path(folder) / "store") as store, proxied(url, store, ProxyCounts()) as front:
            yield front
        return
    command = osd_hf(
        "proxy", "--url", url, "--store", Path(folder) / "store", "--target", target_of(args),
        "--port", 0, "--share", 1, "--num-logprobs", NUM_LOGPROBS,
    )  # fmt: skip
    with server_of(command) as front:
        yield front


class PacedEngine:
    """An ASGI application that computes nothing and streams completions as vLLM does, at a given pace.

    Args:
        first_seconds (`float`), token_seconds (`float`): time to the first token, and to each further token.
    """

    def __init__(self, first_seconds: float, token_seconds: float, vocab_size: int, num_logprobs: int) -> None:
        self.first_seconds, self.token_seconds = first_seconds, token_seconds
        draw = random.Random(0)
        self.rows = []
        for _ in range(PACED_ROWS):
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
        body = await read_body(receive)
        if scope["method"] == "GET":
            await reply(send, 200, {"data": [{"id": PACED_MODEL}]})
        else:
            await self.stream(json.loads(body), send)

    def rows_of(self, prompt: str, most: int) -> list[tuple[int, str]]:
        """Return the tokens of the answer to a prompt with their log-probs. Answers have different lengths."""
        count = random.Random(prompt).randint(-(-most // 4), most)
        return [self.rows[(number + len(prompt)) % PACED_ROWS] for number in range(count)]

    async def stream(self, asked: dict[str, Any], send: Any) -> None:
        """Stream an answer. The time of each event does not depend on how long the others took."""
        loop = asyncio.get_running_loop()
        rows, begun = self.rows_of(asked["prompt"], int(asked["max_tokens"])), loop.time()
        count = len(rows)
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        ids = json.dumps(list(range(3, 3 + PACED_PROMPT_TOKENS))) if asked.get("return_token_ids") else "null"
        for number, (token, row) in enumerate(rows):
            due = begun + self.first_seconds + number * self.token_seconds
            await asyncio.sleep(due - loop.time())
            logprobs = row if asked.get("logprobs") else "null"
            own = f"[{token}]" if asked.get("return_token_ids") else "null"
            reason = '"stop"' if number == count - 1 else "null"
            event = (
                f'data: {{"id":"cmpl-1","object":"text_completion","created":{CREATED},"model":"{PACED_MODEL}",'
                f'"choices":[{{"index":0,"text":" t{token}","logprobs":{logprobs},"finish_reason":{reason},'
                f'"stop_reason":null,'
                f'"prompt_token_ids":{ids if number == 0 else "null"},"token_ids":{own}}}],"usage":null}}\n\n'
            )
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        usage = {
            "prompt_tokens": PACED_PROMPT_TOKENS,
            "completion_tokens": count,
            "total_tokens": PACED_PROMPT_TOKENS + count,
        }
        last = {"id": "cmpl-1", "object": "text_completion", "created": CREATED, "model": PACED_MODEL, "choices": [],
                "usage": usage}  # fmt: skip
        end = f"data: {json.dumps(last, separators=(',', ':'))}\n\ndata: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end.encode(), "more_body": False})


async def read_body(receive: Any) -> bytes:
    """Return the whole body of a request."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def reply(send: Any, status: int, said: Any) -> None:
    """Send a JSON answer."""
    head = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": json.dumps(said).encode()})


def serve_paced() -> None:
    """Serve a paced engine and print its address."""
    size = load_config(str(data_folder() / "lab/target")).vocab_size
    engine = PacedEngine(PACED_FIRST_SECONDS, PACED_TOKEN_SECONDS, size, NUM_LOGPROBS)
    running = Listener("127.0.0.1", 0)
    running.run(engine, shutdown_seconds=2, on_start=lambda: print(running.address, flush=True))


@contextlib.contextmanager
def paced(args: argparse.Namespace) -> Iterator[str]:
    """Run a paced engine in a separate process; yield its address."""
    folder = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import proxy_cost; proxy_cost.serve_paced()"
    with server_of([sys.executable, "-c", code]) as url:
        yield url


@contextlib.contextmanager
def on_cores(cores: set[int], is_asked: bool) -> Iterator[None]:
    """Pin this process, and what it starts inside the block, to these cores."""
    before = os.sched_getaffinity(0)
    if is_asked:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def body_of(text: str, max_new_tokens: int, is_chat: bool) -> dict[str, Any]:
    """Return a request for a streamed answer. Chats get different lengths."""
    how = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    if not is_chat:
        return {"prompt": text, "max_tokens": max_new_tokens, **how}
    length = random.Random(text).randint(-(-max_new_tokens // 2), max_new_tokens)
    return {"messages": [{"role": "user", "content": text}], "max_tokens": length, **how}


async def timed(client: httpx2.AsyncClient, url: str, body: dict[str, Any], collect: bool) -> tuple[float, float, int]:
    """Return the seconds to the first token and to the end, and the number of tokens."""
    began, first, tokens = time.perf_counter(), 0.0, 0
    headers = {} if collect else {"x-osd-collect": "false"}
    path = CHAT if "messages" in body else COMPLETIONS
    async with client.stream("POST", url + path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            first = first or time.perf_counter() - began
            if '"usage":{' in line:
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    return first, time.perf_counter() - began, tokens


async def served(url: str, bodies: list[dict[str, Any]], clients: int, share: float) -> dict[str, Any]:
    """Run all requests with this number of clients, each with one request at a time."""
    waiting, found = list(enumerate(bodies)), list[tuple[float, float, int]]()

    async def ask(client: httpx2.AsyncClient, begins: float) -> None:
        await asyncio.sleep(begins)
        while waiting:
            number, body = waiting.pop(0)
            is_collected = int((number + 1) * share) > int(number * share)
            found.append(await timed(client, url, body, is_collected))

    began = time.perf_counter()
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None)) as client:
        await asyncio.gather(*(ask(client, number * BETWEEN_SECONDS) for number in range(clients)))
    seconds, tokens = time.perf_counter() - began, sum(n for _, _, n in found)
    return {
        "first": [f for f, _, _ in found],
        "whole": [w for _, w, _ in found],
        "tokens_per_second": tokens / seconds,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return percentiles in milliseconds, with the minimum and maximum over the rounds."""
    result: dict[str, Any] = {}
    for name in ("first", "whole"):
        for share in (50, 95):
            each = [float(np.percentile(run[name], share)) * 1000 for run in runs]
            pooled = float(np.percentile(np.concatenate([run[name] for run in runs]), share)) * 1000
            result[f"{name}_ms_p{share}"] = {"all": pooled, "rounds": [min(each), max(each)]}
    rates = [run["tokens_per_second"] for run in runs]
    return result | {"tokens_per_second": {"all": float(np.mean(rates)), "rounds": [min(rates), max(rates)]}}


def parsed() -> argparse.Namespace:
    """Parse the flags."""
    parser = make_parser(__doc__, "proxy_cost", traces=False)
    parser.add_argument("--vllm", help="folder of vLLM's environment")
    parser.add_argument("--url", help="of an engine that runs already")
    parser.add_argument("--paced", action="store_true", help="an engine that waits like one on a GPU")
    parser.add_argument(
        "--target", help="folder of the model that vLLM serves, without a draft; by default the lab's pair"
    )
    parser.add_argument("--chats", action="store_true", help="chats instead of completions")
    parser.add_argument("--own-core", action="store_true", help="the engine on the first core, all else on the others")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.5, 1.0])
    parser.add_argument("--requests", type=int, default=8, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=8379, help="of vLLM")
    parser.add_argument("--log", default="proxy_cost_vllm.log", help="of vLLM")
    parser.add_argument("--smoke", action="store_true", help="its smallest form")
    args = parser.parse_args()
    if args.smoke:
        args.clients, args.shares, args.requests, args.rounds = [1, 2], [0.5], 2, 1
    if sum(map(bool, (args.vllm, args.url, args.paced))) != 1:
        parser.error("one of --vllm, --url and --paced says which engine")
    if args.own_core and args.url:
        parser.error("--own-core is for an engine that is started here, and --url names one that runs already")
    if args.paced and (args.chats or args.target):
        parser.error("the paced engine answers completions alone and has no model: leave --chats and --target out")
    if args.own_core and len(os.sched_getaffinity(0)) < 2:
        parser.error("--own-core needs two cores at least, and here is one")
    args.concurrency, args.drafting = max(args.clients), args.target is None
    return args


def main() -> None:
    args, started = parsed(), time.time()
    torch.set_num_threads(1)
    least, cores = 0 if args.smoke else LEAST, sorted(os.sched_getaffinity(0))
    added = json.loads(add_fields(b"{}", {}, is_chat=args.chats, num_logprobs=NUM_LOGPROBS))
    texts = [TEMPLATES["finance_alpaca"].format(**row) for row in rows("finance_alpaca")]
    draw = random.Random(args.seed)
    report: dict[str, Any] = {"clients": {}, "shares": {}}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        with on_cores(set(cores[:1]), args.own_core):
            url = running.enter_context((paced if args.paced else engine_of)(args))
        running.enter_context(on_cores(set(cores[1:]), args.own_core))
        front = running.enter_context(proxy_of(url, folder, args))
        model = {"model": httpx2.get(f"{url}/v1/models").json()["data"][0]["id"]}

        def run(ways: dict[str, tuple[str, dict[str, Any], float]], clients: int, bar: str) -> dict[str, Any]:
            runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for number in tqdm(range(args.rounds + 1), desc=bar):
                those = [
                    body_of(text, args.max_new_tokens, args.chats)
                    for text in draw.sample(texts, max(args.requests * clients, least))
                ]
                for way in draw.sample(list(ways), len(ways)):
                    where, asked, share = ways[way]
                    found = asyncio.run(served(where, [body | asked for body in those], clients, share))
                    if number:  # the first round warms up
                        runs[way].append(found)
            return {way: summary(of_way) for way, of_way in runs.items()}

        for clients in args.clients:
            ways = {
                DIRECT: (url, model, 0.0), ASKED: (url, model | added, 0.0),
                THROUGH: (front, model, 0.0), COLLECTED: (front, model, 1.0),
            }  # fmt: skip
            report["clients"][clients] = run(ways, clients, f"{clients} clients")
        by_share = {str(share): (front, model, share) for share in args.shares}
        report["shares"] = run(by_share, max(args.clients), "shares")
        if not args.smoke:
            report["proxy"] = httpx2.get(front + METRICS_PATH).text.splitlines()
    print(json.dumps(report, indent=1))
    write_report(args.name, report, seed=args.seed, requests=args.requests, rounds=args.rounds, **run_facts(started))


if __name__ == "__main__":
    main()
