"""
Versions that deploy themselves into vLLM: it serves with a static draft and is asked by `osd-hf collect`, while
`osd-hf learn --deploy` teaches the draft, loads versions, and watches vLLM's own counters; then a spoilt version is
published, as if the gate had let it through.

    bash recipes/vllm_env.sh .venv-vllm
    OSD_HF_DATA=... python recipes/deploy_loop.py --vllm .venv-vllm
    OSD_HF_DATA=... python recipes/deploy_loop.py --vllm .venv-vllm --requests 120 --part 40 --watch 60  # smoke

Reported: acceptance by vLLM's counters over each hundred requests, the decisions of the deployer, of which version the
later prompts were drafted; how many requests the spoilt version served; whether each completion is transformers' own
greedy one in float32.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import TEMPLATES, K, data_folder, rows, run_facts, write_report
from safetensors.torch import load_file, save_file
from vllm_loop import Engine, collected, counted, differing, osd_hf, serving

from osd_hf import CorrectionStore
from osd_hf.engine.versions import JOURNAL, LATEST, VersionFolder

LEARN_SECONDS = 3600
STEP = 20  # requests between two looks at whether the spoilt version is gone


@contextmanager
def learning(args: argparse.Namespace, engine: Engine, folder: Path, report: Path, *flags: Any) -> Iterator[Any]:
    """A learner that deploys what it publishes, stopped at the end."""
    command = osd_hf(
        "learn", "--store", folder / "store", "--output-dir", folder / "versions", "--threads", 1, "--seed", args.seed,
        "--draft", data_folder() / "lab/draft", "--target", data_folder() / "lab/target", "--publish-seconds", 10,
        "--mixed-precision", "bf16", "--poll-seconds", 0.5, "--deploy", f"reload={engine.url}",
        "--watch-requests", args.watch, "--json", report, *flags,
    )  # fmt: skip
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LEARN_SECONDS)


def asked_in_parts(
    args: argparse.Namespace, engine: Engine, texts: Sequence[str], size: int, store: Path, versions: Path
) -> Iterator[dict[str, Any]]:
    """vLLM's counters over each part of some prompts, and which version it ended with."""
    for start in range(0, len(texts), size):
        part, before = store.with_name(f"{store.name}-{start:04d}.jsonl"), engine.counts()
        part.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts[start : start + size]))
        report = collected(args, engine, part, store)
        yield {
            "requests": start + report["requests"], "served": journal(versions, "loaded")[-1:],
            "tokens_per_second": report["tokens"] / report["seconds"], **counted(before, engine.counts()),
        }  # fmt: skip


def journal(versions: Path, event: str) -> list[int]:
    """The versions of these lines of the journal."""
    path = versions / JOURNAL
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [line["version"] for line in lines if line["event"] == event]


def spoil(versions: Path, seed: int) -> int:
    """Publish the newest version with its weights in disorder, and return its number."""
    # The learner that pinned what serves is gone; the next one may go back to it.
    folder, generator = VersionFolder(versions, keep=1000), torch.Generator().manual_seed(seed)
    weights = load_file(versions / LATEST / "model.safetensors")
    spoilt = {name: w + 2 * w.std() * torch.randn(w.shape, generator=generator) for name, w in weights.items()}

    def write(path: Path) -> None:
        path.mkdir()
        for file in (versions / LATEST).iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        save_file(spoilt, path / "model.safetensors", metadata={"format": "pt"})

    folder.publish(write, {"spoilt": True})
    folder.close()
    return folder.number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="folder of vLLM's environment")
    parser.add_argument("--dataset", choices=TEMPLATES, default="finance_alpaca")
    parser.add_argument("--requests", type=int, default=600, help="collected and learned from")
    parser.add_argument("--part", type=int, default=100, help="requests that are counted together")
    parser.add_argument("--later", type=int, default=120, help="asked when all is learned")
    parser.add_argument("--poison", type=int, default=440, help="asked at most until the spoilt version is gone")
    parser.add_argument("--watch", type=int, default=200, help="requests that a version is watched for")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--port", type=int, default=8377)
    parser.add_argument("--folder", type=Path, default=Path("osd_hf_deploy"), help="new or empty")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="deploy_loop", help="of the report")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, folder = time.time(), args.folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty. Choose another --folder.")
    folder.mkdir(parents=True, exist_ok=True)
    texts = sorted({TEMPLATES[args.dataset].format(**row) for row in rows(args.dataset)})
    texts = random.Random(args.seed).sample(texts, args.requests + args.later + args.poison)
    later, poison = args.requests, args.requests + args.later
    static, versions = folder / "static", folder / "versions"
    models = ("--draft", data_folder() / "lab/draft", "--target", data_folder() / "lab/target")
    subprocess.run(osd_hf("export", static, *models, "--num-assistant-tokens", K), check=True)

    with serving(args, static, folder / "vllm.log") as (engine, _):
        with learning(args, engine, folder, folder / "learn.json", "--num-requests", args.requests) as learner:
            parts = list(asked_in_parts(args, engine, texts[:later], args.part, folder / "store", versions))
            if learner.wait(LEARN_SECONDS) != 0:
                sys.exit("Learning failed.")
        (after,) = asked_in_parts(args, engine, texts[later:poison], args.later, folder / "later", versions)
        spoilt = spoil(versions, args.seed)
        with learning(args, engine, folder, folder / "again.json"):
            spoilt_parts = []  # the version that is watched then is watched to its end first
            for part in asked_in_parts(args, engine, texts[poison:], STEP, folder / "poison", versions):
                spoilt_parts.append(part)
                if spoilt in journal(versions, "rolled back"):
                    break

    answers = [trace for name in ("store", "later", "poison") for trace in CorrectionStore(folder / name)]
    reports = [json.loads((folder / name).read_text())["deployed"][0] for name in ("learn.json", "again.json")]
    report = {
        "parts": parts, "later": after, "spoilt": spoilt_parts, "spoilt_version": spoilt,
        "loaded": journal(versions, "loaded"), "failed": journal(versions, "failed"),
        "decisions": [decision for each in reports for decision in each["decisions"]],
        "latest": (versions / LATEST).resolve().name, "answers": len(answers), "not_identical": differing(answers),
        "learned": {n: json.loads((folder / "learn.json").read_text())[n] for n in ("requests", "learning_seconds")},
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    write_report(args.name, report, seed=args.seed, dataset=args.dataset, **run_facts(started))
    if spoilt not in journal(versions, "rolled back"):
        sys.exit(f"Version {spoilt}, which is spoilt, was not taken back.")


if __name__ == "__main__":
    main()
