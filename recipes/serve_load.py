"""Test `osd-hf serve` under load: errors, exactness of greedy answers, memory, and latency with and without learning.

    python recipes/serve_load.py                  # half an hour, besides starting and the target's own answers
    python recipes/serve_load.py --minutes 20 --buffer-size 256 --name serve_load_full   # memory with a full buffer
    python recipes/serve_load.py --smoke

Two servers have the bundled pair; one of them learns. `--clients` clients ask them alternately in blocks of requests.
Of twenty requests, two are sampled and one is abandoned; every other one is a stream. Greedy answers are compared with
the target's. The report has errors, different answers, seconds of complete answers and to their first token (p50 and
p99) by server and by pairs of blocks, and resident memory after each pair. Both servers are stopped at the end and
must exit cleanly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import torch
from common import greedy, make_parser, run_facts, write_report

from osd_hf.bundled import DOMAINS, bundled_prompts, load_bundled
from osd_hf.learning.session import has_session
from osd_hf.prompts import encode_turn

SIDES = {"learning": ["--learn"], "frozen": ["--no-learn"]}
SAMPLED, LEFT = (7, 14), 19  # of twenty requests


@dataclass
class Block:
    """Results of one block of requests."""

    seconds: list[float] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    took: float = 0.0
    heard: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        """Return the data for JSON."""
        return {
            "answer_seconds": quantiles(self.seconds), "first_token_seconds": quantiles(self.first_seconds),
            "tokens_per_second": self.tokens / self.took, "heard": dict(self.heard),
        }  # fmt: skip


def quantiles(seconds: list[float]) -> dict[str, float | None]:
    """Return the median and the 95% quantile."""
    if len(seconds) < 2:
        return {"p50": None, "p95": None}
    parts = statistics.quantiles(seconds, n=20, method="inclusive")
    return {"p50": parts[9], "p95": parts[18]}


def own_answers(texts: list[str], max_new_tokens: int) -> list[str]:
    """Return the target's answer to each prompt."""
    target, _, tokenizer = load_bundled()
    found = []
    for text in texts:
        ids, settings = greedy(encode_turn(tokenizer, text), max_new_tokens)
        output = target.generate(ids, **settings)
        found.append(str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)))
    return found


async def ask(http: httpx2.AsyncClient, body: dict[str, Any], block: Block, *, leaves: bool) -> str | None:
    """Return the text of an answer, or `None`."""
    began, text = time.perf_counter(), ""
    try:
        if not body["stream"]:
            response = await http.post("/chat/completions", json=body)
            response.raise_for_status()
            answer = response.json()
            text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
        else:
            async with http.stream("POST", "/chat/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if piece := "".join(choice["delta"].get("content", "") for choice in event["choices"]):
                        if not text:
                            block.first_seconds.append(time.perf_counter() - began)
                        text += piece
                        if leaves:
                            block.heard["left"] += 1
                            return None
                    usage = event.get("usage")
        block.tokens += usage["completion_tokens"]
    except (httpx2.HTTPError, KeyError, TypeError) as error:
        block.heard[type(error).__name__] += 1
        return None
    block.seconds.append(time.perf_counter() - began)
    return text


async def asked(
    address: str, args: argparse.Namespace, expected: dict[str, str], draw: random.Random, seconds: float
) -> Block:
    """Send one block of requests to one server; no request begins after so many seconds."""
    block, left = Block(), iter(range(args.block))

    async def client() -> None:
        for turn in left:
            if time.perf_counter() - began > seconds:
                return
            prompt, is_sampled, leaves = draw.choice(list(expected)), turn % 20 in SAMPLED, turn % 20 == LEFT
            body = {
                "messages": [{"role": "user", "content": prompt}], "max_tokens": args.max_new_tokens,
                "temperature": 1.0 if is_sampled else 0.0, "stream": leaves or turn % 2 == 0,
            }  # fmt: skip
            if body["stream"]:
                body["stream_options"] = {"include_usage": True}
            text = await ask(http, body, block, leaves=leaves)
            if text is not None:
                is_own = is_sampled or text == expected[prompt]
                block.heard["sampled" if is_sampled else "own" if is_own else "other"] += 1

    began = time.perf_counter()
    async with httpx2.AsyncClient(base_url=address, timeout=600) as http:
        await asyncio.gather(*(client() for _ in range(args.clients)))
    block.took = time.perf_counter() - began
    return block


def blocks_of(addresses: dict[str, str], processes: dict[str, Any], args: argparse.Namespace,
              expected: dict[str, str]) -> tuple[dict[str, list[Block]], list[dict[str, Any]]]:  # fmt: skip
    """Run the blocks of both servers alternately while there is time for another pair, of which there are at least
    two if `--minutes` is set; measure memory after each pair."""
    seconds = 15 * args.minutes or math.inf  # of a block at most
    blocks: dict[str, list[Block]] = {side: [] for side in SIDES}
    memory, draw, began = list[dict[str, Any]](), random.Random(args.seed), time.monotonic()
    while not memory or (1 + 1 / len(memory)) * (time.monotonic() - began) < 60 * args.minutes:
        order = list(SIDES) if len(memory) % 2 == 0 else list(reversed(SIDES))
        for side in order:
            blocks[side].append(asyncio.run(asked(addresses[side], args, expected, draw, seconds)))
        megabytes = {side: psutil.Process(p.pid).memory_info().rss / 2**20 for side, p in processes.items()}
        memory.append({"minutes": (time.monotonic() - began) / 60, **megabytes})
        print({side: blocks[side][-1].to_dict() for side in SIDES}, memory[-1], flush=True)
    return blocks, memory


def report_on(blocks: dict[str, list[Block]]) -> dict[str, Any]:
    """Return the results of both servers, and the ratios of learning to not learning by pairs of blocks."""
    sides = {}
    for side, those in blocks.items():
        whole = Block()
        for block in those:
            whole.seconds += block.seconds
            whole.first_seconds += block.first_seconds
            whole.heard += block.heard
            whole.tokens, whole.took = whole.tokens + block.tokens, whole.took + block.took
        sides[side] = whole.to_dict()
    pairs = [[block.to_dict() for block in pair] for pair in zip(*(blocks[side] for side in SIDES), strict=True)]
    ratios = {
        f"{what} {name}": sorted(
            learning[what][name] / frozen[what][name] for learning, frozen in pairs if frozen[what][name]
        )
        for what in ("answer_seconds", "first_token_seconds")
        for name in ("p50", "p95")
    }
    return {
        "sides": sides, "pairs_of_blocks": pairs,
        "learning_over_frozen": {
            name: {"median": statistics.median(found), "least": found[0], "most": found[-1]}
            for name, found in ratios.items()
            if found
        },
    }  # fmt: skip


def main() -> int:
    parser = make_parser(__doc__, "serve_load", traces=False)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--block", type=int, default=320, help="requests of one server before the other is asked")
    parser.add_argument("--prompts", type=int, help="of each domain; by default 4 per minute, at most 100")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--buffer-size", type=int, help="requests kept to learn from; 2,048 by default")
    parser.add_argument("--smoke", action="store_true", help="one small block of each server")
    args = parser.parse_args()
    if args.smoke:
        args.minutes, args.clients, args.block, args.prompts, args.max_new_tokens = 0.0, 4, 20, 1, 8
    args.prompts = args.prompts or max(1, min(100, round(4 * args.minutes)))  # the target answers them first
    torch.set_num_threads(1)
    started = time.time()
    texts = [e.prompt for domain in DOMAINS for e in bundled_prompts(domain, args.prompts, seed=args.seed)]
    expected = dict(zip(texts, own_answers(texts, args.max_new_tokens), strict=True))
    processes: dict[str, Any] = {}
    addresses: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        session = Path(folder) / "session"
        for side, flags in SIDES.items():
            keeps = ["--state-dir", str(session)] if side == "learning" else []
            # The clients are more than may wait, were it not for this.
            server = [
                "serve",
                "--pair",
                "bundled",
                "--port",
                "0",
                "--threads",
                "1",
                "--max-queue",
                str(args.clients),
                *flags,
            ]
            server += ["--buffer-size", str(args.buffer_size)] if args.buffer_size else []
            with open(Path(folder) / side, "w") as log:
                processes[side] = subprocess.Popen(
                    [sys.executable, "-m", "osd_hf.cli.main", *server, *keeps], stdout=subprocess.PIPE, stderr=log,
                    text=True, env=os.environ,
                )  # fmt: skip
        try:
            for side, process in processes.items():
                line = process.stdout.readline()
                if " is served at " not in line:
                    sys.exit(f"The server does not start: {(Path(folder) / side).read_text()}")
                addresses[side] = line.split()[-1]
            blocks, memory = blocks_of(addresses, processes, args, expected)
        finally:
            for process in processes.values():
                process.terminate()
                process.communicate()
        ended = {side: process.poll() for side, process in processes.items()}
        is_saved = has_session(session)
    report = report_on(blocks)
    heard = sum((block.heard for those in blocks.values() for block in those), Counter[str]())
    failed = {name: count for name, count in heard.items() if name not in ("own", "sampled", "left")}
    holds = not failed and set(ended.values()) == {0} and is_saved
    write_report(
        args.name, {"holds": holds, "heard": dict(heard), "failed": failed, "exit_codes": ended,
                    "session_saved": is_saved, **report, "resident_mb": memory, "clients": args.clients},
        **run_facts(started),
    )  # fmt: skip
    print(f"{dict(heard)}; exit codes {ended}; learning over frozen {report['learning_over_frozen']}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
