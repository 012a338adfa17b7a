"""Run the complete loop with vLLM: `osd-hf proxy` records streamed chats, `osd-hf learn --deploy` trains the draft,
loads versions into vLLM, and watches its counters. At the end a bad version is published on purpose.

    bash recipes/vllm_env.sh .venv-vllm
    OSD_HF_DATA=... python recipes/deploy_loop.py --vllm .venv-vllm
    OSD_HF_DATA=... python recipes/deploy_loop.py --vllm .venv-vllm --requests 120 --part 40 --watch 60 \
        --settle 80 --later 20 --poison 140                                                            # smoke
    OSD_HF_DATA=... python recipes/deploy_loop.py --vllm .venv-vllm --domains finance_alpaca spider --poison 0 \
        --name deploy_loop_domains                                     # and with --shared --name deploy_loop_shared

Several domains alternate and are labeled by the header `x-osd-domain`. Each has an engine and a draft; with `--shared`
all engines get the versions of one draft.

The report has, by domain: vLLM's counters on later prompts with the original draft, over each part of the requests,
and on the later prompts again; the decisions of the deployer, also about the bad version; errors of clients; and
streams that differ from transformers' greedy answer in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import openai
import torch
from common import MAX_NEW_TOKENS, TEMPLATES, K, data_folder, rows, run_facts, write_report
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_loop import LEARN_SECONDS, Engine, counted, osd_hf, serving

from osd_hf.engines.versions import FACTS, JOURNAL, LATEST, folder_name
from osd_hf.proxy.app import METRICS_PATH

STEP = 20  # requests between two looks at the journal
LEARNED = ("osd_hf_learner_requests_total", "osd_hf_learner_left_out_total")
Prompt = tuple[str, str]  # its domain and its text


@contextmanager
def command(log: Path, *arguments: Any) -> Iterator[Any]:
    """Run a command of this package until the block ends."""
    with log.open("w") as file:
        process = subprocess.Popen(osd_hf(*arguments), stdout=subprocess.PIPE, stderr=file, text=True, env=os.environ)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def free_port() -> int:
    """Return an unused port."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Loop:
    """
    The proxy and the learner before and behind some engines, and what clients are told.

    Attributes:
        answers (`dict[str, set[str]]`): By prompt.
        errors (`list[str]`): Of clients.
    """

    def __init__(self, args: argparse.Namespace, engines: Mapping[str, Engine], folder: Path) -> None:
        self._concurrency, self._engines, self._folder = args.concurrency, engines, folder
        self.answers, self.errors = defaultdict[str, set[str]](set), list[str]()
        self.has_own_drafts = len(engines) > 1 and not args.shared
        lab, store, self._port = data_folder() / "lab", folder / "store", free_port()
        urls = {name: engine.url for name, engine in engines.items()}
        self._proxy = [
            "proxy", "--target", lab / "target", "--store", store, "--share", 1, "--port", 0,
            *(text for url in urls.values() for text in ("--url", url)),
            *(text for name, url in urls.items() for text in ("--route", f"{name}={url}")),
            "--json", folder / "proxy.json",
        ]  # fmt: skip
        to = [f"{name}:reload={url}" if self.has_own_drafts else f"reload={url}" for name, url in urls.items()]
        self._learn = [
            "learn", "--draft", lab / "draft", "--target", lab / "target", "--store", store,
            "--output-dir", folder / "versions", *(text for way in to for text in ("--deploy", way)),
            *(["--by-domain"] if self.has_own_drafts else []), "--watch-requests", args.watch,
            "--publish-seconds", 10, "--poll-seconds", 0.5, "--threads", 1,
            "--seed", args.seed, "--metrics-port", self._port, "--json", folder / "learn.json",
        ]  # fmt: skip

    @contextmanager
    def running(self) -> Iterator[str]:
        """Run both commands; yield the proxy's address. Afterwards wait until everything the proxy has read is
        learned."""
        with command(self._folder / "learn.log", *self._learn) as self._learner:
            with command(self._folder / "proxy.log", *self._proxy) as proxy:
                line = proxy.stdout.readline()
                if " stands before " not in line:
                    sys.exit(f"The proxy does not start; see {self._folder / 'proxy.log'}.")
                yield line.split()[0]
            collected = float(json.loads((self._folder / "proxy.json").read_text())["collected"])
            self._wait(lambda: collected)

    def versions(self, domain: str) -> Path:
        """Return the folder of the versions of a domain."""
        folder = self._folder / "versions"
        return folder / str(folder_name(domain)) if self.has_own_drafts else folder

    def journal(self, domain: str, event: str) -> list[int]:
        """Return the versions of these journal entries for the engine of a domain."""
        path, own = self.versions(domain) / JOURNAL, (None, self._engines[domain].url)
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [line["version"] for line in lines if line["event"] == event and line.get("engine") in own]

    def ask(self, prompts: Sequence[Prompt], front: str | None = None, *, collect: bool = False) -> dict[str, Any]:
        """Stream the answers to some prompts through the proxy or, without its address, directly. Return vLLM's
        counters and the last version by domain."""
        clients = {
            name: openai.OpenAI(base_url=f"{front or engine.url}/v1", api_key="none", max_retries=0)
            for name, engine in self._engines.items()
        }
        model = next(iter(clients.values())).models.list().data[0].id

        def told(prompt: Prompt) -> int:
            domain, text = prompt
            said, tokens = "", 0
            try:
                for chunk in clients[domain].chat.completions.create(
                    model=model, messages=[{"role": "user", "content": text}], max_tokens=MAX_NEW_TOKENS,
                    temperature=0, stream=True, stream_options={"include_usage": True},
                    extra_headers={"x-osd-domain": domain, "x-osd-collect": str(collect)},
                ):  # fmt: skip
                    said += "".join(choice.delta.content or "" for choice in chunk.choices)
                    tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            except openai.OpenAIError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            self.answers[text].add(said)
            return tokens

        before = {name: engine.counts() for name, engine in self._engines.items()}
        began = time.perf_counter()
        with ThreadPoolExecutor(self._concurrency) as pool:
            tokens = sum(pool.map(told, prompts))
        report: dict[str, Any] = {
            "requests": len(prompts), "tokens_per_second": tokens / (time.perf_counter() - began),
        }  # fmt: skip
        for name, engine in self._engines.items():
            served = self.journal(name, "loaded")[-1:]
            report[name] = {"served": served, **counted(before[name], engine.counts())}
        return report

    def ask_until(self, is_so: Callable[[], bool], prompts: Sequence[Prompt], front: str) -> list[dict[str, Any]]:
        """Ask some prompts at a time until a condition holds or no prompts are left."""
        parts = list[dict[str, Any]]()
        while not is_so() and STEP * len(parts) < len(prompts):
            parts.append(self.ask(prompts[STEP * len(parts) :][:STEP], front))
        return parts

    def has_newest(self) -> bool:
        """Return whether each engine has the published version."""
        return all(
            (self.versions(name) / LATEST).resolve().name == f"v{[0, *self.journal(name, 'loaded')][-1]:06d}"
            for name in self._engines
        )

    def wait(self, front: str) -> None:
        """Wait until there is a version of each draft and everything recorded is learned."""
        self._wait(lambda: scraped(front + METRICS_PATH, "osd_hf_proxy_collected_total"))

    def _wait(self, collected: Callable[[], float]) -> None:
        until = time.monotonic() + LEARN_SECONDS
        while time.monotonic() < until and self._learner.poll() is None:
            with suppress(httpx2.HTTPError):
                learned = scraped(f"http://127.0.0.1:{self._port}/metrics", LEARNED)
                begun = all((self.versions(name) / LATEST).exists() for name in self._engines)
                if begun and learned >= collected():
                    return
            time.sleep(0.2)
        sys.exit(f"Not all was learned from; see {self._folder / 'learn.log'}.")


def scraped(url: str, names: str | tuple[str, ...]) -> float:
    """Return the sum of the Prometheus metrics with these names."""
    lines = httpx2.get(url).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


def spoil(versions: Path, seed: int) -> int:
    """Publish a copy of the newest version with shuffled weights; return its number."""
    number = 1 + max(int(path.name[1:]) for path in versions.glob("v*"))
    unfinished, generator = versions / "spoilt", torch.Generator().manual_seed(seed)
    shutil.copytree(versions / LATEST, unfinished)
    weights = load_file(unfinished / "model.safetensors")
    spoilt = {name: w + 2 * w.std() * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(spoilt, unfinished / "model.safetensors", metadata={"format": "pt"})
    (unfinished / FACTS).write_text(json.dumps({"version": number, "spoilt": True}))
    unfinished.rename(versions / f"v{number:06d}")
    (versions / "spoilt").symlink_to(f"v{number:06d}")
    (versions / "spoilt").replace(versions / LATEST)
    return number


@torch.inference_mode()
def differing(answers: Mapping[str, set[str]]) -> list[dict[str, Any]]:
    """Return the prompts whose answer differs from transformers' greedy answer, and the gap between the target's two
    most likely tokens at the first difference."""
    lab, found = data_folder() / "lab/target", []
    target = AutoModelForCausalLM.from_pretrained(lab, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(lab)
    for text, told in tqdm(answers.items(), desc="checking", unit="answer"):
        turn = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt")
        output = target.generate(
            **prompt, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, return_dict_in_generate=True, output_logits=True
        )
        ids = output.sequences[0, prompt["input_ids"].shape[1] :]
        starts = [tokenizer.decode(ids[: i + 1], skip_special_tokens=True) for i in range(len(ids))]
        for said in told - {starts[-1]}:
            place = next((i for i, start in enumerate(starts) if not said.startswith(start)), len(ids) - 1)
            best = output.logits[place][0].topk(2).values
            found.append({"prompt": text, "place": place, "gap_of_two_best": float(best[0] - best[1])})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="folder of vLLM's environment")
    parser.add_argument("--domains", nargs="+", choices=TEMPLATES, default=["finance_alpaca"], help="one engine each")
    parser.add_argument("--shared", action="store_true", help="one draft for all domains")
    parser.add_argument("--requests", type=int, default=600, help="collected and learned from")
    parser.add_argument("--part", type=int, default=100, help="requests that are counted together")
    parser.add_argument("--settle", type=int, default=300, help="then asked at most until the newest version is in")
    parser.add_argument("--later", type=int, default=120, help="asked before all this, and then")
    parser.add_argument("--poison", type=int, default=440, help="asked at most until the spoilt version is gone")
    parser.add_argument("--watch", type=int, default=200, help="requests that a version is watched for")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--port", type=int, default=8377, help="of the first engine")
    parser.add_argument("--folder", type=Path, default=Path("osd_hf_deploy"), help="new or empty")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="deploy_loop", help="of the report")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, folder = time.time(), args.folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty. Choose another --folder.")
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: getattr(args, name) for name in ("requests", "settle", "later", "poison")}
    texts = {name: sorted({TEMPLATES[name].format(**row) for row in rows(name)}) for name in args.domains}
    drawn = [random.Random(args.seed).sample(texts[name], -(-sum(sizes.values()) // len(texts))) for name in texts]
    prompts = (prompt for turn in zip(*drawn, strict=True) for prompt in zip(texts, turn, strict=True))
    first, settling, later, poison = (list(islice(prompts, size)) for size in sizes.values())
    static, lab = folder / "static", data_folder() / "lab"
    models = ("--draft", lab / "draft", "--target", lab / "target")
    subprocess.run(osd_hf("push", "--export", static, *models, "--num-assistant-tokens", K), check=True)

    report: dict[str, Any] = {"parts": [], "spoilt": []}
    spoilt: int | None = None

    def is_taken_back() -> bool:
        return spoilt in loop.journal(args.domains[0], "rolled back")

    with ExitStack() as stack:
        engines = {}
        for number, name in enumerate(args.domains):
            own = argparse.Namespace(**{**vars(args), "port": args.port + number})
            engines[name], _ = stack.enter_context(serving(own, static, folder / f"vllm-{name}.log"))
        loop = Loop(args, engines, folder)
        report["static"] = loop.ask(later)
        with loop.running() as front:
            for start in range(0, len(first), args.part):
                report["parts"].append(loop.ask(first[start : start + args.part], front, collect=True))
                print(json.dumps(report["parts"][-1]), flush=True)
            loop.wait(front)
            report["settling"] = loop.ask_until(loop.has_newest, settling, front)
            report["later"] = loop.ask(later, front)
            if poison:
                spoilt = spoil(loop.versions(args.domains[0]), args.seed)
                report["spoilt"] = loop.ask_until(is_taken_back, poison, front)

    learned, proxy = (json.loads((folder / f"{name}.json").read_text()) for name in ("learn", "proxy"))
    report |= {
        "spoilt_version": spoilt, "failed_loads": {name: loop.journal(name, "failed") for name in engines},
        "loaded": {name: loop.journal(name, "loaded") for name in engines},
        "decisions": [decision for each in learned["deployed"] for decision in each["decisions"]],
        "learned": {name: learned[name] for name in ("requests", "learning_seconds")},
        "proxy": {name: value for name, value in proxy.items() if name != "provenance"},
        "errors": loop.errors, "answered": len(loop.answers), "not_identical": differing(loop.answers),
    }  # fmt: skip
    print(json.dumps({name: value for name, value in report.items() if name != "parts"}, indent=1))
    write_report(args.name, report, seed=args.seed, domains=args.domains, shared=args.shared, **run_facts(started))
    if spoilt is not None and not is_taken_back():
        sys.exit(f"Version {spoilt}, which is spoilt, was not taken back.")
    if loop.errors:
        sys.exit(f"Clients met {len(loop.errors)} errors.")


if __name__ == "__main__":
    main()
