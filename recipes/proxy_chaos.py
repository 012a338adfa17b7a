"""Test the proxy with failures of the engine, the learner, the reading process, and the disk, and with slow and
hostile clients.

    OSD_HF_DATA=... python recipes/proxy_chaos.py
    OSD_HF_DATA=... python recipes/proxy_chaos.py --smoke

An engine in its own process streams a different answer to each prompt. Eight clients ask for streams without a pause
while one failure after the other happens. Each answer is compared with the engine's answer to that prompt, so that
cut, changed, or exchanged answers are found. At the end the proxy is stopped during answers, and each stored answer
must be one that a client received.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil
from common import data_folder, make_parser, run_facts, write_report
from proxy_cost import COMPLETIONS, NUM_LOGPROBS, PACED_ROWS, PacedEngine, read_body, reply
from tqdm import tqdm
from vllm_loop import osd_hf

from osd_hf import CorrectionStore
from osd_hf.models import load_config
from osd_hf.server.app import Listener

KEY = "Bearer right"
OWN, BROKEN, ALTERED = "whole and its own", "broken off", "another's text, or altered"
CLIENTS, MOST_TOKENS = 8, 24
AGAIN_SECONDS = 60  # within which answers are whole again after a fault
LARGE = 10 << 20  # bytes of a body
FIRST_MS, TOKEN_MS = 20.0, 5.0
LEARNER, READER = "osd_hf.cli.main learn", "multiprocessing.spawn"  # in commands of the proxy's processes


class Engine(PacedEngine):
    """A paced engine that also refuses wrong requests, ends when its client leaves, and reports its running answers at
    `/busy`."""

    busy = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
            return
        body = await read_body(receive)
        if scope["method"] == "GET":
            await reply(send, 200, {"busy": self.busy})
        elif dict(scope["headers"]).get(b"authorization", b"").decode() != KEY:
            await reply(send, 401, {"error": {"message": "the key is wrong"}})
        else:
            try:
                asked = json.loads(body)
            except ValueError as error:
                await reply(send, 400, {"error": {"message": str(error)}})
                return
            self.busy += 1
            answering, leaving = asyncio.ensure_future(self.stream(asked, send)), asyncio.ensure_future(receive())
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            answering.cancel()
            leaving.cancel()
            self.busy -= 1


def make_engine() -> Engine:
    """Return an engine with the lab target's vocabulary."""
    size = load_config(str(data_folder() / "lab/target")).vocab_size
    return Engine(FIRST_MS / 1000, TOKEN_MS / 1000, size, NUM_LOGPROBS)


# --- clients --------------------------------------------------------------------------------------------------------


class Clients:
    """Clients that ask without a pause and check each answer. `seen` counts the outcomes since it was last emptied."""

    def __init__(self, url: str, engine: PacedEngine) -> None:
        self.url, self.engine, self.seen = url, engine, Counter[str]()
        self.number, self.is_asking = 0, True
        self.whole = 0
        self.said = set[tuple[int, ...]]()  # in complete answers
        self.left = set[tuple[int, ...]]()  # answers that a client did not read to the end
        self.http = httpx2.AsyncClient(timeout=60, headers={"authorization": KEY}, limits=httpx2.Limits())

    def body(self, size: int = 0) -> dict[str, Any]:
        """Return a request with a new prompt, whose length determines its answer."""
        self.number += 1
        prompt = f"{self.number:06d} " + "x" * size
        prompt += "x" * ((self.number - len(prompt)) % PACED_ROWS)
        return {"model": "paced", "prompt": prompt, "max_tokens": MOST_TOKENS, "stream": True}

    def expected(self, prompt: str) -> list[int]:
        """Return the tokens of the engine's answer to a prompt."""
        return [token for token, _ in self.engine.rows_of(prompt, MOST_TOKENS)]

    async def ask(self, body: dict[str, Any], between: Callable[[int], Awaitable[object]] | None = None) -> None:
        """Send one request; `between` is awaited after each event with its number."""
        text, status = b"", 0
        try:
            async with self.http.stream("POST", self.url + COMPLETIONS, json=body) as answer:
                status = answer.status_code
                async for number, piece in numbered(answer.aiter_raw()):
                    text += piece
                    if between is not None:
                        await between(number)
        except httpx2.TransportError:
            self.seen[BROKEN if is_begun(text, self.expected(body["prompt"])) else ALTERED] += 1
            return
        if status != 200:
            self.seen[f"status {status}"] += 1
            return
        expected, is_plain = self.expected(body["prompt"]), b"token_id:" not in text
        is_own = tokens_of(text) == expected and text.endswith(b"data: [DONE]\n\n") and is_plain
        self.seen[OWN if is_own else ALTERED] += 1
        if is_own:
            self.said.add(tuple(expected))
            self.whole += 1

    async def keep_asking(self) -> None:
        """Ask until stopped."""
        while self.is_asking:
            whole = self.whole
            await self.ask(self.body())
            if self.whole == whole:
                await asyncio.sleep(0.05)


def tokens_of(text: bytes) -> list[int]:
    """Return the tokens of a stream."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith(b"data: {")]
    return [int(choice["text"][2:]) for event in events for choice in event["choices"]]


def is_begun(text: bytes, expected: list[int]) -> bool:
    """Return whether a broken stream is a prefix of the expected answer."""
    whole = text[: text.rfind(b"\n\n") + 2] if b"\n\n" in text else b""
    said = tokens_of(whole)
    return said == expected[: len(said)]


async def numbered(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """Yield pieces with their numbers."""
    number = 0
    async for piece in pieces:
        yield number, piece
        number += 1


# --- what goes wrong ------------------------------------------------------------------------------------------------


class World:
    """An engine, a proxy with or without a learner, and a store."""

    def __init__(self, folder: Path, seconds: float, learns: bool) -> None:
        self.folder, self.seconds, self.learns = folder, seconds, learns
        self.clients = CLIENTS if learns else 2
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.engine = self.started_engine()
        lab = data_folder() / "lab"
        learning = ("--learn", "--draft", lab / "draft", "--output-dir", folder / "versions")
        command = osd_hf(
            "proxy", "--url", self.url, "--store", folder / "store", "--target", lab / "target", "--port", 0,
            "--share", 1, "--num-logprobs", NUM_LOGPROBS, "--flush-every", 8, *(learning if learns else ()),
        )  # fmt: skip
        self.log = (folder / "proxy.log").open("w")
        self.proxy = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.proxy.stdout is not None
        self.front = self.proxy.stdout.readline().split()[0]

    def started_engine(self) -> subprocess.Popen[str]:
        """Start an engine and wait for it."""
        command = [sys.executable, __file__, "--engine", str(self.port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout:  # it says no more than that it is there
            process.stdout.readline()
        return process

    def child(self, has: str) -> psutil.Process | None:
        """Return the proxy's process whose command contains a word."""
        for child in psutil.Process(self.proxy.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if has in " ".join(child.cmdline()):
                    return child
        return None

    async def another(self, has: str) -> None:
        """Kill such a process and wait until another one runs."""
        killed = self.child(has)
        assert killed is not None
        killed.kill()
        while (child := self.child(has)) is None or child.pid == killed.pid:
            await asyncio.sleep(0.1)

    async def nothing(self, clients: Clients) -> None:
        """Let nothing fail."""
        await asyncio.sleep(self.seconds)

    async def engine_dies(self, clients: Clients) -> None:
        """Kill the engine; restart it after some seconds."""
        self.engine.kill()
        self.engine.wait()
        await asyncio.sleep(self.seconds / 2)
        self.engine = await asyncio.to_thread(self.started_engine)

    async def learner_dies(self, clients: Clients) -> None:
        """Kill the learner."""
        await self.another(LEARNER)

    async def reading_dies(self, clients: Clients) -> None:
        """Kill the process that reads and stores answers."""
        await self.another(READER)

    async def disk_is_full(self, clients: Clients) -> None:
        """Limit the size of files that the process that stores answers can write."""
        process = self.child(READER)
        assert process is not None
        limits = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        await asyncio.sleep(self.seconds)
        process.rlimit(psutil.RLIMIT_FSIZE, limits)

    async def store_is_away(self, clients: Clients) -> None:
        """Replace the store's folder by a file, then restore it."""
        store, away = self.folder / "store", self.folder / "away"
        store.rename(away)
        store.write_text("no store")
        await asyncio.sleep(self.seconds)
        store.unlink()
        away.rename(store)

    async def slow_client(self, clients: Clients) -> None:
        """Read one event per second."""
        await clients.ask(clients.body(), lambda number: asyncio.sleep(1.0 if number < self.seconds else 0.0))

    async def clients_leave(self, clients: Clients) -> None:
        """Let twenty clients leave during an answer; the engine must notice."""

        class Leaves(Exception):
            pass

        async def leave(number: int) -> None:
            raise Leaves

        for _ in range(20):
            body = clients.body()
            # On a busy machine an answer can be complete before the proxy notices that its client has left.
            clients.left.add(tuple(clients.expected(body["prompt"])))
            with contextlib.suppress(Leaves):
                await clients.ask(body, leave)
        async with httpx2.AsyncClient() as direct:
            busy = (await direct.get(f"{self.url}/busy")).json()["busy"]
        clients.seen[f"{busy} answered by the engine afterwards, of {self.clients} clients that stay"] += 1

    async def large_bodies(self, clients: Clients) -> None:
        """Send four requests of 10 MB at a time."""
        await asyncio.gather(*(clients.ask(clients.body(LARGE)) for _ in range(4)))

    async def refused(self, clients: Clients) -> None:
        """Send malformed JSON and a wrong key, through the proxy and directly."""
        for body, key in ((b'{"prompt": "a', KEY), (b"{}", "Bearer wrong"), (b"\xff" * 99, KEY)):
            told = []
            for url in (self.url, clients.url):
                answer = await clients.http.post(url + COMPLETIONS, content=body, headers={"authorization": key})
                headers = [(n, v) for n, v in answer.headers.multi_items() if n != "date"]
                told.append((answer.status_code, headers, answer.content))
            clients.seen[f"status {told[0][0]}, {'as direct' if told[0] == told[1] else 'not as direct'}"] += 1

    def close(self) -> None:
        """Stop all processes."""
        for process in (self.proxy, self.engine):
            process.kill()
            process.wait()
        assert self.proxy.stdout is not None
        self.proxy.stdout.close()
        self.log.close()


async def chaos(world: World) -> tuple[list[dict[str, Any]], Clients]:
    """Return the outcomes during each failure and for `world.seconds` after it, or until complete answers return."""
    clients, table = Clients(world.front, make_engine()), list[dict[str, Any]]()
    asking = [asyncio.ensure_future(clients.keep_asking()) for _ in range(world.clients)]
    faults = [world.nothing, world.engine_dies]
    if world.learns:
        faults += [world.learner_dies, world.reading_dies, world.disk_is_full, world.store_is_away]
    faults += [world.slow_client, world.clients_leave, world.large_bodies, world.refused]
    for fault in tqdm(faults, desc="faults"):
        clients.seen.clear()
        await fault(clients)
        during = dict(clients.seen)
        clients.seen.clear()
        await asyncio.sleep(world.seconds)
        async with asyncio.timeout(AGAIN_SECONDS):
            while not clients.seen[OWN]:
                await asyncio.sleep(0.01)
        table.append({"fault": fault.__name__, "during": during, "after": dict(clients.seen)})
    clients.seen.clear()
    world.proxy.send_signal(signal.SIGTERM)
    clients.is_asking = False
    await asyncio.gather(*asking)
    await clients.http.aclose()
    table.append({"fault": "stop", "during": dict(clients.seen), "after": {}})
    return table, clients


def main() -> None:
    parser = make_parser(__doc__, "proxy_chaos", traces=False)
    parser.add_argument("--seconds", type=float, default=6.0, help="that most faults last")
    parser.add_argument("--smoke", action="store_true", help="its smallest form, without a learner")
    parser.add_argument("--engine", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        running = Listener("127.0.0.1", args.engine)
        running.run(make_engine(), shutdown_seconds=2, on_start=lambda: print(running.address, flush=True))
        return
    started = time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        world = World(folder, 0.2 if args.smoke else args.seconds, learns=not args.smoke)
        try:
            table, clients = asyncio.run(chaos(world))
            said = world.proxy.communicate(timeout=120)[0]
        finally:
            world.close()
        with CorrectionStore(folder / "store") as store:
            kept = [tuple(trace.completion_ids.tolist()) for trace in store]
        said, log = (
            re.sub(r'(?<=File ").*/', "", text.replace(name, "..."))  # without the folders of this machine
            for text in (said, (folder / "proxy.log").read_text())
        )
    report = {
        "table": table, "whole": clients.whole, "kept": len(kept),
        "kept_as_said": sum(ids in clients.said | clients.left for ids in kept), "exit_code": world.proxy.returncode,
        "proxy_said": said.splitlines()[-8:], "log": log.splitlines()[-40:],
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    write_report(args.name, report, seed=args.seed, **run_facts(started))


if __name__ == "__main__":
    main()
