"""
Exchanges with an engine, direct and through `osd-hf proxy` that collects each: are they the same bytes?

    bash recipes/vllm_env.sh .venv-vllm
    OSD_HF_DATA=... python recipes/proxy_exchanges.py --vllm .venv-vllm
    OSD_HF_DATA=... python recipes/proxy_exchanges.py --vllm .venv-vllm --no-drafting --name proxy_exchanges_plain
    OSD_HF_DATA=... python recipes/proxy_exchanges.py --url http://localhost:8000 --exchanges 8        # smoke

Chats and completions, streams and not, greedy and sampled with a seed, one after the other; each is asked for
directly twice and through the proxy once, in turns. Ids and times are masked, and the header `date` is left out. Where
an engine makes its events as tokens come, two answers may be cut otherwise: those are told apart from other ones, with
the same for two direct ones. vLLM for CPUs that drafts samples something else each time, whatever the seed:
`--no-drafting` compares what is sampled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import torch
from common import MAX_NEW_TOKENS, TEMPLATES, data_folder, make_parser, rows, run_facts, write_report
from tqdm import tqdm

from osd_hf import CorrectionStore
from osd_hf.engines.completions import ResponseReader
from osd_hf.models import load_config
from osd_hf.proxy.app import Proxy
from osd_hf.proxy.recorder import AnswerWriter, ProxyCounts, Recorder
from osd_hf.proxy.upstream import Upstream
from osd_hf.server.listener import Running

NUM_LOGPROBS = 64
IDS = re.compile(rb'("id": ?"|"created": ?)[\w-]+')
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Answer = tuple[int, list[tuple[str, str]], bytes]


@contextlib.contextmanager
def engine_of(args: argparse.Namespace) -> Iterator[str]:
    """The address of an engine that runs, or of one that is started for as long as it is needed."""
    if args.url:
        yield args.url
        return
    import subprocess

    from vllm_loop import K, osd_hf, serving

    with tempfile.TemporaryDirectory() as folder:
        static, lab = Path(folder) / "static", data_folder() / "lab"
        models = ("--draft", lab / "draft", "--target", lab / "target")
        if args.drafting:
            subprocess.run(osd_hf("export", static, *models, "--num-assistant-tokens", K), check=True)
        with serving(args, static if args.drafting else None, Path(args.log).absolute()) as (engine, _):
            yield engine.url


@contextlib.contextmanager
def proxied(url: str, store: CorrectionStore, counts: ProxyCounts) -> Iterator[str]:
    """The address of a proxy before an engine, in a thread of this process."""
    size = load_config(str(data_folder() / "lab/target")).vocab_size
    recorder = Recorder(AnswerWriter(ResponseReader(size, NUM_LOGPROBS), store), counts)
    running, ready = Running("127.0.0.1", 0), threading.Event()
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


def exchanges(model: str, count: int, seed: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, path and body of each."""
    names = list(TEMPLATES)
    texts = {name: random.Random(seed).sample(rows(name), count // len(names) + 1) for name in names}
    for number in range(count):
        name = names[number // 8 % len(names)]
        text = TEMPLATES[name].format(**texts[name][number // len(names)])
        is_chat, is_stream, is_greedy = number % 2 == 0, number % 4 < 2, number % 8 < 4
        asked = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        how = {"temperature": 0} if is_greedy else {"temperature": 0.8, "top_p": 0.95, "seed": number}
        stream = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
        kind = f"{'chat' if is_chat else 'completion'}, {'stream' if is_stream else 'whole'}, "
        kind += "greedy" if is_greedy else "sampled"
        body = {"model": model, "max_tokens": MAX_NEW_TOKENS, **asked, **how, **stream}
        yield kind, CHAT if is_chat else COMPLETIONS, body


def asked(client: httpx2.Client, url: str, path: str, body: dict[str, Any]) -> Answer:
    """Status, headers and bytes, without what differs from answer to answer."""
    answer = client.post(url + path, json=body)
    headers = [(name, value) for name, value in answer.headers.multi_items() if name != "date"]
    return answer.status_code, headers, IDS.sub(rb"\g<1>0", answer.content)


def text_of(answer: Answer) -> Any:
    """What an answer says, however it is cut into events."""
    events = [json.loads(line[6:]) for line in answer[2].splitlines() if line.startswith(b"data: {")]
    choices = [choice for chunk in events or [json.loads(answer[2])] for choice in chunk["choices"]]
    said = [c.get("text") or (c.get("delta") or c.get("message") or {}).get("content") or "" for c in choices]
    return answer[0], "".join(said), [c["finish_reason"] for c in choices if c.get("finish_reason")]


def compared(one: Answer, other: Answer) -> str:
    """How two answers differ."""
    if one == other:
        return "identical"
    return "cut otherwise" if text_of(one) == text_of(other) else "different"


def main() -> None:
    parser = make_parser(__doc__, "proxy_exchanges", traces=False)
    parser.add_argument("--vllm", help="folder of vLLM's environment")
    parser.add_argument("--url", help="of an engine that runs already")
    parser.add_argument("--exchanges", type=int, default=200)
    parser.add_argument("--port", type=int, default=8378, help="of vLLM")
    parser.add_argument("--concurrency", type=int, default=1, help="requests that vLLM takes at once")
    parser.add_argument("--drafting", action=argparse.BooleanOptionalAction, default=True, help="vLLM with a draft")
    parser.add_argument("--log", default="proxy_exchanges_vllm.log", help="of vLLM")
    args = parser.parse_args()
    if not (args.vllm or args.url):
        parser.error("one of --vllm and --url says which engine")
    torch.set_num_threads(1)
    started, counts = time.time(), ProxyCounts()
    found = {"through the proxy": Counter[str](), "direct twice": Counter[str]()}
    differing = list[dict[str, Any]]()
    with (
        tempfile.TemporaryDirectory() as folder, CorrectionStore(Path(folder) / "store") as store,
        engine_of(args) as url, proxied(url, store, counts) as front, httpx2.Client(timeout=600) as client,
    ):  # fmt: skip
        model = client.get(f"{url}/v1/models").json()["data"][0]["id"]
        for number, (kind, path, body) in enumerate(
            tqdm(exchanges(model, args.exchanges, args.seed), total=args.exchanges, unit="exchange")
        ):
            ways = [url, front, url] if number % 2 else [front, url, url]
            answers = [asked(client, way, path, body) for way in ways]
            through = answers.pop(ways.index(front))
            for name, pair in (("through the proxy", (answers[0], through)), ("direct twice", tuple(answers))):
                how = compared(*pair)
                found[name][f"{kind}: {how}"] += 1
                if how != "identical":
                    differing.append({"exchange": number, "which": name, "how": how})
    summed = {name: Counter(key.rpartition(": ")[2] for key in those.elements()) for name, those in found.items()}
    print(json.dumps({"found": summed, "counts": counts.to_dict()}, indent=1))
    write_report(
        args.name,
        {"exchanges": args.exchanges, "summed": summed, "by_kind": found, "proxy": counts.to_dict(),
         "differing": differing},
        seed=args.seed, **run_facts(started),
    )  # fmt: skip


if __name__ == "__main__":
    main()
