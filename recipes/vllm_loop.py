"""Run the loop with vLLM: serve a draft, record answers, learn, load the new version, and read vLLM's counters.

    bash recipes/vllm_env.sh .venv-vllm
    OSD_HF_DATA=... python recipes/vllm_loop.py --vllm .venv-vllm
    OSD_HF_DATA=... python recipes/vllm_loop.py --vllm .venv-vllm --draft HEAD      # an EAGLE-3 head of the lab target
    OSD_HF_DATA=... python recipes/vllm_loop.py --vllm .venv-vllm --requests 32 --later 8        # smoke

The report has the time of each step; vLLM's counters on later prompts with the original draft, with the learned one
loaded into the running server, and with the learned one after a restart, compared with replay; tokens per second
without a draft; whether each completion is transformers' greedy one in float32; and the bytes per token of the store.
Then ten versions are loaded one after the other, and checkpoints with embeddings and an output head of their own, of
which a head shares some with the target; the later prompts are asked again.

vLLM counts accepted over drafted tokens. Its first token comes with the prompt, so its rounds begin one token later
than those of transformers, and it counts accepted tokens behind the end of an answer. `examined` is computed from its
counts by position.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch
from common import MAX_NEW_TOKENS, TEMPLATES, K, data_folder, rows, run_facts, write_report
from doctor import as_engine
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from osd_hf import AcceptanceStats, CorrectionStore, DraftHead, Trace, replay
from osd_hf.engines.versions import LATEST
from osd_hf.loading import is_head, load_draft
from osd_hf.replay import raw_rows, rounds_of

NUM_LOGPROBS = 64
COUNTER = "vllm:spec_decode_num_"
READY_SECONDS = 300
LEARN_SECONDS = 3600
WARM_UP = 8  # prompts
NUM_LOADS = 10  # while the server runs
RELOAD = "osd_hf.engines.vllm_reload.DraftReload"


def target_of(args: argparse.Namespace) -> Path:
    """Return the target's folder, by default the lab's."""
    return Path(getattr(args, "target", None) or data_folder() / "lab/target")


class Engine:
    """A vLLM server with or without a draft on a port of this machine."""

    def __init__(self, args: argparse.Namespace, draft: Path | None, log: Path, extension: str = RELOAD) -> None:
        self.url = f"http://127.0.0.1:{args.port}"
        method = "draft_model" if draft is None or not is_head(draft) else "eagle3"
        config = {"method": method, "model": str(draft), "num_speculative_tokens": K}
        # The CPU package lacks the metadata that the command `vllm` looks for; this is what it starts.
        command = [
            str(Path(args.vllm).absolute() / "bin/python"), "-m", "vllm.entrypoints.openai.api_server",
            *("--model", str(target_of(args)), "--port", str(args.port), "--host", "127.0.0.1"),
            *("--dtype", "float32", "--max-model-len", "768", "--max-num-seqs", str(args.concurrency)),
            *("--max-logprobs", str(NUM_LOGPROBS), "--generation-config", "vllm", "--enforce-eager"),
            *("--gpu-memory-utilization", "0.3"),  # which means the memory of the machine here
            *("--worker-extension-cls", extension),
            *(() if draft is None else ("--speculative-config", json.dumps(config))),
        ]  # fmt: skip
        environment = {
            **os.environ, "PYTHONPATH": str(Path(__file__).parents[1].absolute()), "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._log = log

    def wait(self) -> None:
        """Wait until the server answers."""
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            try:
                if httpx2.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            time.sleep(0.5)
        self.stop()
        sys.exit(f"vLLM does not answer; see {self._log}.")

    def counts(self) -> dict[str, float]:
        """Return its counters: drafts, drafted and accepted tokens, and accepted tokens by position."""
        found: dict[str, float] = {}
        for line in httpx2.get(f"{self.url}/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(COUNTER) and "_total" in name:
                position = name.partition('position="')[2].partition('"')[0]
                found[name.removeprefix(COUNTER).partition("_total")[0] + position] = float(value)
        return found

    def load(self, draft: Path, *, may_fail: bool = False) -> dict[str, Any]:
        """Load a draft while the server runs."""
        body = {"method": "load_draft", "args": [str(draft)]}
        answer = httpx2.post(f"{self.url}/collective_rpc", json=body, timeout=READY_SECONDS)
        answer.raise_for_status()
        # What the draft has cached of prompts is of its old weights.
        reset = httpx2.post(f"{self.url}/reset_prefix_cache?reset_running_requests=true", timeout=READY_SECONDS)
        if not reset.json()["success"]:
            sys.exit("vLLM has not emptied its cache of prompts.")
        found: dict[str, Any] = answer.json()["results"][0]
        if "error" in found and not may_fail:
            sys.exit(f"vLLM has not loaded {draft}: {found['error']}")
        return found

    def stop(self) -> None:
        """Stop the server and its workers."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


@contextmanager
def serving(
    args: argparse.Namespace, draft: Path | None, log: Path, extension: str = RELOAD
) -> Iterator[tuple[Engine, float]]:
    """Start a server; yield it and the seconds until it answered."""
    began, engine = time.perf_counter(), Engine(args, draft, log, extension)
    try:
        engine.wait()
        yield engine, time.perf_counter() - began
    finally:
        engine.stop()


def osd_hf(*arguments: Any) -> list[str]:
    """Return a command line of this package."""
    return [sys.executable, "-m", "osd_hf.cli.main", *map(str, arguments)]


def collected(args: argparse.Namespace, engine: Engine, prompts: Path, store: Path) -> dict[str, Any]:
    """Collect the answers to a file of prompts; return the report."""
    report = store.with_suffix(".json")
    subprocess.run(
        osd_hf(
            "learn", "--collect-only", "--url", engine.url, "--target", data_folder() / "lab/target", "--store", store,
            "--prompts", prompts, "--column", "prompt", "--domain", args.dataset, "--concurrency", args.concurrency,
            "--max-new-tokens", MAX_NEW_TOKENS, "--num-logprobs", NUM_LOGPROBS, "--json", report,
        ),
        check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the difference of two readings of the counters."""
    c = {name: after[name] - before.get(name, 0.0) for name in after}
    by_position = [c[f"accepted_tokens_per_pos{i}"] for i in range(K)]
    examined = c["drafts"] + sum(by_position[:-1])
    return {
        "drafts": c["drafts"], "drafted": c["draft_tokens"], "accepted": c["accepted_tokens"], "examined": examined,
        "alpha": c["accepted_tokens"] / examined, "accepted_over_drafted": c["accepted_tokens"] / c["draft_tokens"],
        "tokens_per_draft": 1 + c["accepted_tokens"] / c["drafts"],
    }  # fmt: skip


def asked(
    args: argparse.Namespace, engine: Engine, prompts: Path, store: Path
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return vLLM's counters on the later prompts after a warm-up, and the report of their collection."""
    collected(args, engine, prompts.with_name("warm.jsonl"), store.with_name(f"{store.name}-warm"))
    before = engine.counts()
    report = collected(args, engine, prompts, store)
    return counted(before, engine.counts()), report


@torch.inference_mode()
def in_engine(model: Any, traces: Sequence[Trace]) -> AcceptanceStats:
    """Replay rounds that begin after the first token, for which the engine has read the prompt."""
    found = AcceptanceStats()
    for trace in (t for t in traces if len(t) > 1):
        predicted = np.full((K if isinstance(model, DraftHead) else 1, len(trace)), -1)
        for _, first, logits, depth in raw_rows(model, [trace], depths=len(predicted)):
            predicted[depth, first : first + len(logits)] = logits.argmax(-1)
        found += AcceptanceStats.from_rounds(rounds_of(as_engine(trace), predicted[:, 1:], K))
    return found


def ours(draft: Path, traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the result of replay in the rounds of transformers and of vLLM."""
    target = AutoModelForCausalLM.from_pretrained(data_folder() / "lab/target", dtype=torch.float32).eval()
    model = load_draft(str(draft), target, dtype="float32", device="cpu")
    found = {}
    for name, stats in {"replay": replay(model, traces, K), "replay_in_vllm_rounds": in_engine(model, traces)}.items():
        found[name] = {
            "alpha": stats.alpha, "interval": stats.alpha_interval, "accepted": stats.accepted,
            "examined": stats.examined, "rounds": stats.target_forwards, "block_efficiency": stats.block_efficiency,
        }  # fmt: skip
    return found


def spoiled(version: Path, folder: Path, names: Sequence[str]) -> Path:
    """Write a version whose weights of these names are random, as they would be for another target."""
    target = AutoModelForCausalLM.from_pretrained(data_folder() / "lab/target", dtype=torch.float32)
    folder.mkdir()
    weights = load_file(version / "model.safetensors")
    ends = {"embed_tokens.weight": target.get_input_embeddings(), "lm_head.weight": target.get_output_embeddings()}
    weights |= {name: torch.randn_like(ends[name].weight.detach()) for name in names}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(version / "config.json", folder / "config.json")
    return folder


@torch.inference_mode()
def differing(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Return the answers that differ from transformers' greedy ones, and the gap of the target at the first
    difference."""
    target = AutoModelForCausalLM.from_pretrained(data_folder() / "lab/target", dtype=torch.float32).eval()
    found = []
    for number, trace in enumerate(tqdm(traces, desc="checking", unit="answer")):
        ids = torch.from_numpy(trace.prompt_ids.astype(np.int64))[None]
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_NEW_TOKENS
        )
        answer = output[0, ids.shape[1] :].numpy()
        if not np.array_equal(answer, trace.completion_ids):
            shared = min(len(answer), len(trace))
            wrong = np.flatnonzero(answer[:shared] != trace.completion_ids[:shared])
            place = int(wrong[0]) if len(wrong) else shared
            logits = target(output[:, : ids.shape[1] + place]).logits[0, -1].topk(2).values
            found.append({"request": number, "place": place, "gap_of_two_best": float(logits[0] - logits[1])})
    return found


def in_order(store: Path, prompts: Sequence[bytes]) -> list[Trace]:
    """Return the traces of some prompts in order."""
    by_prompt = {trace.prompt_ids.tobytes(): trace for trace in CorrectionStore(store)}
    return [by_prompt[p] for p in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="folder of vLLM's environment")
    parser.add_argument("--draft", type=Path, help="folder of another draft or head of the lab target")
    parser.add_argument("--dataset", choices=TEMPLATES, default="finance_alpaca")
    parser.add_argument("--requests", type=int, default=600, help="collected and learned from")
    parser.add_argument("--later", type=int, default=120, help="asked before and after")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--port", type=int, default=8377)
    parser.add_argument("--folder", type=Path, default=Path("osd_hf_vllm"), help="new or empty")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="vllm_loop", help="of the report")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, target, seconds = time.time(), data_folder() / "lab/target", dict[str, Any]()
    folder = args.folder.absolute()
    for place in (folder, folder.with_name(f"{folder.name}-state")):
        if place.exists() and any(place.iterdir()):
            raise SystemExit(f"{place} is not empty. Choose another --folder.")
    folder.mkdir(parents=True, exist_ok=True)
    texts = [TEMPLATES[args.dataset].format(**row) for row in rows(args.dataset)]
    # A prompt that is asked twice would have one place in the store.
    texts = random.Random(args.seed).sample(sorted(set(texts)), args.requests + args.later + WARM_UP)
    parts = {
        "first": texts[: args.requests], "later": texts[args.requests : -WARM_UP], "warm": texts[-WARM_UP:],
    }  # fmt: skip
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in part))

    began = time.perf_counter()
    static, versions = folder / "static", folder / "versions"
    models = ("--draft", args.draft or data_folder() / "lab/draft", "--target", target)
    subprocess.run(osd_hf("push", "--export", static, *models, "--num-assistant-tokens", K), check=True)
    seconds["export"] = time.perf_counter() - began
    counters, reports = dict[str, Any](), dict[str, Any]()
    with serving(args, static, folder / "vllm-static.log") as (engine, seconds["start"]):
        counters["static"], reports["static"] = asked(args, engine, folder / "later.jsonl", folder / "later-static")
        learn = osd_hf(
            "learn", "--store", folder / "store", "--output-dir", versions, *models, "--threads", 1, "--seed",
            args.seed, "--num-requests", args.requests, "--publish-seconds", 10,
            "--json", folder / "learn.json",
        )  # fmt: skip
        learning, began = subprocess.Popen(learn), time.perf_counter()
        try:
            reports["collect"] = collected(args, engine, folder / "first.jsonl", folder / "store")
            seconds["collect"] = time.perf_counter() - began
            if reports["collect"]["requests"] != args.requests:
                sys.exit(f"Of {args.requests} prompts {reports['collect']['requests']} were kept.")
            if learning.wait(LEARN_SECONDS) != 0:
                sys.exit("Learning failed.")
        finally:
            learning.terminate()
        seconds["learn_behind_the_last_request"] = time.perf_counter() - began - seconds["collect"]
        began = time.perf_counter()
        reports["load"] = engine.load(versions / LATEST)
        seconds["load"] = time.perf_counter() - began
        counters["loaded"], reports["loaded"] = asked(args, engine, folder / "later.jsonl", folder / "later-loaded")
        published = sorted(path for path in versions.glob("v*") if (path / "model.safetensors").is_file())
        order = [published[i % len(published)] for i in range(NUM_LOADS)]
        reports["loads"] = [engine.load(path) for path in order] if len(published) > 1 else []
        if args.draft and is_head(args.draft):
            latest = (versions / LATEST).resolve()
            reports["spoiled"] = {
                name: engine.load(spoiled(latest, folder / name, [f"{name}.weight"]), may_fail=True)
                for name in ("embed_tokens", "lm_head")
            }
        engine.load(versions / LATEST)
        counters["again"], reports["again"] = asked(args, engine, folder / "later.jsonl", folder / "later-again")
    began = time.perf_counter()
    with serving(args, versions / LATEST, folder / "vllm-learned.log") as (engine, _):
        seconds["restart"] = time.perf_counter() - began
        name = "restarted"
        counters[name], reports[name] = asked(args, engine, folder / "later.jsonl", folder / f"later-{name}")
    with serving(args, None, folder / "vllm-alone.log") as (engine, _):  # which counts no drafts
        collected(args, engine, folder / "warm.jsonl", folder / "later-alone-warm")
        reports["alone"] = collected(args, engine, folder / "later.jsonl", folder / "later-alone")

    learned = json.loads((folder / "learn.json").read_text())
    order = [t.prompt_ids.tobytes() for t in CorrectionStore(folder / "later-static")]
    ways = ("alone", *counters)
    answers = {way: in_order(folder / f"later-{way}", order) for way in ways}
    latest = (versions / LATEST).resolve(strict=True)
    report = {
        "counters": counters,
        "ours": {"static": ours(static, answers["static"]), "learned": ours(latest, answers["restarted"])},
        "not_identical": {way: differing(traces) for way, traces in answers.items()},
        "seconds": {**seconds, "learning": learned["learning_seconds"]},
        "later_tokens_per_second": {way: reports[way]["tokens"] / reports[way]["seconds"] for way in ways},
        "bytes_per_token": reports["collect"]["bytes_per_token"],
        "collected": {name: reports["collect"][name] for name in ("requests", "tokens", "bytes", "seconds")},
        "versions": [
            {name: v[name] for name in ("version", "draft_version", "requests", "decision")}
            for v in learned["versions"]
        ],
        "alpha_last_fifth_while_learning": {
            side: learned[f"alpha_{side}_last_fifth"] for side in ("learned", "frozen")
        },
        "load": reports["load"],
        "loads": reports["loads"],
        "spoiled": reports.get("spoiled"),
    }  # fmt: skip
    print(json.dumps({k: v for k, v in report.items() if k != "versions"}, indent=1))
    write_report(args.name, report, seed=args.seed, dataset=args.dataset, **run_facts(started))


if __name__ == "__main__":
    main()
