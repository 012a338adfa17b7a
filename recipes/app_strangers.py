"""Test the public app with hostile programs: latency of an ordinary visitor, memory, and leaks.

    python recipes/app_strangers.py                              # ten minutes
    python recipes/app_strangers.py --seconds 20 --clients 8     # smoke

An app in its own process serves the bundled pair. An ordinary visitor asks one prompt after the other, first alone,
then with `--clients` hostile programs at `--addresses` addresses. These open `--chats` chats under invented names,
send prompts of 10 MB, choose "private", leave during answers, do not read answers, upload files, call the owner's
controls, and send twenty prompts at a time. The report has the seconds to the first token, the app's memory, and
answers by status. Each prompt has a unique mark, and all received bytes are searched for marks of others. Needs
"osd-hf[app]" and Linux (/proc).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import write_report

MARK = re.compile(rb"mark[0-9a-f]{12}")
TOKEN = b"osd-t "
MIN_ANSWERS = 3  # of the visitor, without and with hostile programs
PAUSE_SECONDS = 0.2  # of a hostile program between two deeds: more is not hostile but the machine's other half
HUGE_BYTES = 10 * 2**20
QUIET_SHARE = 0.15  # of the time


@dataclass
class Program:
    """A client with an address. It records its own marks and searches what it receives for marks of others."""

    address: str
    client: httpx.AsyncClient
    events: dict[str, int]
    said: set[bytes] = field(default_factory=set)
    heard: Counter[str] = field(default_factory=Counter)
    leaks: list[str] = field(default_factory=list)
    received_bytes: int = 0
    chat: str | None = None
    _tail: bytes = b""

    def mark(self) -> str:
        mark = f"mark{secrets.token_hex(6)}"
        self.said.add(mark.encode())
        return mark

    def hear(self, data: bytes) -> None:
        self.received_bytes += len(data)
        text = self._tail + data
        self.leaks += [found.decode() for found in MARK.findall(text) if found not in self.said]
        self._tail = text[-15:]  # a mark cut in two

    async def send(self, method: str, path: str, **kwargs: Any) -> httpx.Response | None:
        """Send a request; return the answer, or `None` if the connection was closed."""
        try:
            headers = {"x-forwarded-for": self.address, **kwargs.pop("headers", {})}
            response = await self.client.request(method, path, headers=headers, **kwargs)
        except httpx.HTTPError as error:
            self.heard[type(error).__name__] += 1
            return None
        self.hear(response.content)
        self.heard[f"{response.status_code}"] += 1
        return response

    async def join(self, name: str, data: list[Any], page: str) -> bool:
        body = {"data": data, "fn_index": self.events[name], "session_hash": page}
        response = await self.send("POST", "/gradio_api/queue/join", json=body)
        return response is not None and response.status_code == 200

    async def told(self, page: str) -> AsyncIterator[bytes]:
        """Return what the app sends to a page."""
        headers = {"x-forwarded-for": self.address}
        try:
            async with self.client.stream(
                "GET", "/gradio_api/queue/data", params={"session_hash": page}, headers=headers
            ) as response:
                async for data in response.aiter_bytes():
                    self.hear(data)
                    yield data
        except httpx.HTTPError as error:
            self.heard[type(error).__name__] += 1

    async def call(self, name: str, data: list[Any], page: str) -> bytes:
        """Send an event of the page; return everything it receives."""
        if not await self.join(name, data, page):
            return b""
        return b"".join([data async for data in self.told(page)])

    async def arrive(self) -> str:
        """Open the page; return its session."""
        page = secrets.token_hex(6)
        found = re.search(rb'"data": ?\["([\w-]{22})"', await self.call("open", [self.chat], page))
        self.chat = found[1].decode() if found else self.chat
        return page


def settings(domain: str = "math", tokens: int = 64) -> list[Any]:
    """Return the settings of the page: domain, learn, k, sample, temperature, top p, tokens, check, remember."""
    return [domain, True, "5", False, 1.0, 1.0, tokens, False, False]


async def first_token(visitor: Program) -> float | None:
    """Return the seconds until the first token, or `None` without one."""
    page = await visitor.arrive()
    if visitor.chat is None:
        return None
    body = {"data": [visitor.chat], "fn_index": visitor.events["clear"], "session_hash": page}
    await visitor.send("POST", "/gradio_api/run/predict", json=body)
    numbers = random.sample(range(10, 90), 2)
    prompt = f"What is {numbers[0]} + {numbers[1]}? {visitor.mark()}"
    began, seconds, heard = time.perf_counter(), None, b""
    if not await visitor.join("submit", [prompt, visitor.chat, False, *settings()], page):
        return None
    async for data in visitor.told(page):
        heard = heard[-len(TOKEN) :] + data
        if seconds is None and TOKEN in heard:
            seconds = time.perf_counter() - began
    return seconds


async def deed(program: Program, rng: random.Random, counts: Counter[str], chats: int) -> None:
    """Do something that is not allowed."""
    page, prompt = secrets.token_hex(6), f"Tell me all about {program.mark()}"
    ask = {"data": [prompt, "math", 192], "session_hash": page}
    deeds = ["chat", "leave", "unread", "huge", "private", "invent", "batch", "remember", "owner", "upload", "slow"]
    name = rng.choices(deeds, [4, 4, 2, 1, 2, 6 if counts["invent"] < chats else 1, 2, 2, 1, 1, 1])[0]
    counts[name] += 1
    if name in ("chat", "leave", "unread", "remember"):
        ask["data"] += ["5", False, 1.0, 1.0, True, name == "remember"]
        if not await program.send("POST", "/gradio_api/call/chat", json=ask) or name == "unread":
            return
        async for _ in program.told(page):
            if name == "leave":
                return
    elif name == "huge":
        huge = json.dumps({**ask, "data": ["x" * HUGE_BYTES]}).encode()
        await program.send("POST", "/gradio_api/call/chat", content=huge)
    elif name == "private":
        page = await program.arrive()
        for wanted in (True, False, True):
            await program.call("set_private", [program.chat, wanted], page)
    elif name == "invent":
        program.chat = secrets.token_urlsafe(16)
        await program.call("open", [program.chat], page)
    elif name == "batch":
        program.chat = secrets.token_urlsafe(16)
        await program.join("send_many", [program.chat, False, *settings(tokens=192)], page)
    elif name == "owner":
        await program.call(rng.choice(["save", "reset"]), [program.chat], page)
    elif name == "upload":
        await program.send("POST", "/gradio_api/upload", files={"files": ("x", b"x" * HUGE_BYTES)})
        await program.send("GET", "/gradio_api/file=/etc/passwd")
    else:
        whole = json.dumps(ask).encode()

        async def slowly() -> AsyncIterator[bytes]:
            for i in range(0, len(whole), 64):
                yield whole[i : i + 64]
                await asyncio.sleep(0.5)

        await program.send("POST", "/gradio_api/call/chat", content=slowly())


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 0.0 if found is None else int(found[1]) / 1024


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start an app in public mode that trusts the addresses this program names."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "osd_hf.cli.main", "app", "--public", "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "FORWARDED_ALLOW_IPS": "127.0.0.1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    assert process.stdout is not None
    for line in process.stdout:
        if " serves " in line:
            return process, f"http://127.0.0.1:{port}"
    sys.exit(f"The app did not start:\n{(folder / 'log').read_text()}")


def summary(seconds: list[float]) -> dict[str, Any]:
    """Return the report."""
    if not seconds:
        return {"answers": 0}
    ranked = sorted(seconds)
    return {
        "answers": len(ranked),
        "median": round(statistics.median(ranked), 3),
        "p90": round(ranked[int(0.9 * (len(ranked) - 1))], 3),
        "most": round(ranked[-1], 3),
    }


async def measure(args: argparse.Namespace, address: str, pid: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients + 1)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
        config = (await client.get("/config")).json()
        events = {d["api_name"]: d["id"] for d in config["dependencies"] if d.get("api_name")}
        visitor = Program("198.51.100.1", client, events)
        rng = random.Random(args.seed)
        hostile = [Program(f"203.0.113.{1 + i % args.addresses}", client, events) for i in range(args.clients)]
        counts: Counter[str] = Counter()
        memory = {"start": rss_mb(pid)}
        quiet, beside, refused = [], [], 0
        until = time.monotonic() + QUIET_SHARE * args.seconds
        await first_token(visitor)
        while time.monotonic() < until or len(quiet) < MIN_ANSWERS:
            if (seconds := await first_token(visitor)) is not None:
                quiet.append(seconds)
            await asyncio.sleep(args.rest)
        memory["quiet"] = peak = rss_mb(pid)
        over = asyncio.Event()

        async def annoy(program: Program) -> None:
            while not over.is_set():
                try:
                    await asyncio.wait_for(deed(program, rng, counts, args.chats), 30)
                except TimeoutError:
                    counts["cut off"] += 1
                await asyncio.sleep(PAUSE_SECONDS)

        tasks = [asyncio.create_task(annoy(program)) for program in hostile]
        until = time.monotonic() + (1 - QUIET_SHARE) * args.seconds
        half = None
        while time.monotonic() < until or len(beside) + refused < MIN_ANSWERS:
            seconds = await first_token(visitor)
            beside, refused = (beside, refused + 1) if seconds is None else ([*beside, seconds], refused)
            peak = max(peak, rss_mb(pid))
            if half is None and time.monotonic() > until - (1 - QUIET_SHARE) * args.seconds / 2:
                half = memory["half way"] = rss_mb(pid)
            await asyncio.sleep(args.rest)
        over.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        memory |= {"peak": peak, "end": rss_mb(pid)}
    heard: Counter[str] = sum((program.heard for program in hostile), Counter())
    leaks = [leak for program in (visitor, *hostile) for leak in program.leaks]
    return {
        "seconds": args.seconds, "clients": args.clients, "addresses": args.addresses,
        "first_token_seconds": {"quiet": summary(quiet), "beside": summary(beside)},
        "beside_over_quiet": round(statistics.median(beside) / statistics.median(quiet), 2) if beside else None,
        "visitor_refused": refused,
        "memory_mb": {name: round(value) for name, value in memory.items()},
        "deeds": dict(counts.most_common()), "answered_with": dict(heard.most_common()),
        "received_mb": round(sum(p.received_bytes for p in (visitor, *hostile)) / 2**20, 1),
        "marks": sum(len(p.said) for p in (visitor, *hostile)), "marks_of_others_received": len(leaks),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--addresses", type=int, default=8, help="that the hostile ones come from")
    parser.add_argument("--chats", type=int, default=500, help="that are made under invented names")
    parser.add_argument("--rest", type=float, default=3.0, help="seconds of the visitor between two prompts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, address = start(Path(folder))
        try:
            report = asyncio.run(measure(args, address, process.pid))
            report["app_survived"] = process.poll() is None
        finally:
            process.terminate()
            process.communicate()
        report["log_kb"] = round((Path(folder) / "log").stat().st_size / 1024)
    print(json.dumps(report, indent=1))
    print(write_report("app_strangers", report, seed=args.seed, device="cpu"))
    return 0 if not report["marks_of_others_received"] and report["app_survived"] else 1


if __name__ == "__main__":
    sys.exit(main())
