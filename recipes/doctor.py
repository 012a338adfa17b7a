"""
Does `osd-hf doctor` tell the right draft in a vLLM from wrong ones? The lab pair serves; drafts are taught on what it
answers; then the engine is examined with the newest version, which it has or has not.

    bash recipes/vllm_env.sh .venv-vllm
    OSD_HF_DATA=... python recipes/doctor.py --vllm .venv-vllm
    OSD_HF_DATA=... python recipes/doctor.py --vllm .venv-vllm --requests 48 --samples 1        # smoke

In the engine are: the newest version, for each of the samples of prompts; the version before it; the draft that was
taught, as it was; the newest version, loaded over that one without packing the tied head again; the lab's other draft;
and a draft of another target, which is the newest version with the rows of its embeddings in another order. Counts
decide, so that a busy machine is fine.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx2
import torch
from common import TEMPLATES, K, data_folder, rows, run_facts, write_report
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_loop import READY_SECONDS, Engine, collected, osd_hf, serving

WRONG = "recipes.vllm_wrong_reload.WrongReload"


def examined(args: argparse.Namespace, engine: Engine, texts: list[str], name: str) -> dict[str, Any]:
    """What the doctor says, asking these prompts for the newest version."""
    prompts, report = args.folder / f"{name}.jsonl", args.folder / f"{name}.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    done = subprocess.run(
        osd_hf(
            "doctor", "--url", engine.url, "--target", data_folder() / "lab/target", "--draft",
            args.folder / "versions/latest", "--prompts", prompts, "--column", "prompt", "--num-requests",
            args.asked, "--concurrency", args.concurrency, "--dtype", "float32", "--threads", 1, "--json", report,
        )
    )  # fmt: skip
    found = json.loads(report.read_text())
    findings = {finding["about"]: finding for finding in found["findings"]}
    return {"exit_code": done.returncode, "verdict": found["verdict"], **findings}


def permuted(draft: Path, folder: Path, seed: int) -> None:
    """Write a draft whose tokens mean others."""
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight.copy_(weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(seed))])
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(draft).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="folder of vLLM's environment")
    parser.add_argument("--dataset", choices=TEMPLATES, default="finance_alpaca")
    parser.add_argument("--requests", type=int, default=160, help="collected and learned from")
    parser.add_argument("--samples", type=int, default=20, help="of prompts, for the right draft")
    parser.add_argument("--asked", type=int, default=40, help="requests of a sample")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--port", type=int, default=8378)
    parser.add_argument("--folder", type=Path, default=Path("osd_hf_doctor"), help="new or empty")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="doctor", help="of the report")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, lab = time.time(), data_folder() / "lab"
    args.folder = args.folder.absolute()
    if args.folder.exists() and any(args.folder.iterdir()):
        raise SystemExit(f"{args.folder} is not empty. Choose another --folder.")
    args.folder.mkdir(parents=True, exist_ok=True)
    texts = sorted({TEMPLATES[args.dataset].format(**row) for row in rows(args.dataset)})
    random.Random(args.seed).shuffle(texts)
    learned_from, texts = texts[: args.requests], texts[args.requests :]

    def sample(number: int) -> list[str]:
        return random.Random(number).sample(texts, 2 * args.asked)

    versions, found = args.folder / "versions", dict[str, list[dict[str, Any]]]()
    for name in ("draft", "draft-1layer"):
        models = ("--draft", lab / name, "--target", lab / "target")
        subprocess.run(osd_hf("export", args.folder / name, *models, "--num-assistant-tokens", K), check=True)
    first = args.folder / "first.jsonl"
    first.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in learned_from))
    with serving(args, args.folder / "draft", args.folder / "vllm-static.log") as (engine, _):
        collected(args, engine, first, args.folder / "store")
    subprocess.run(
        osd_hf(
            "learn", "--store", args.folder / "store", "--output-dir", versions, "--draft", lab / "draft", "--target",
            lab / "target", "--threads", 1, "--seed", args.seed, "--publish-seconds", 0, "--once",
        ),
        check=True,
    )  # fmt: skip
    latest, older = (versions / "latest").resolve(), sorted(versions.glob("v*"))[-2]
    permuted(latest, args.folder / "permuted", args.seed)
    newest = "the newest version"
    for name, folder in (
        (newest, latest), ("the version before it", older), ("the draft as it was", args.folder / "draft"),
        ("the lab's other draft", args.folder / "draft-1layer"),
        ("a draft of another target", args.folder / "permuted"),
    ):  # fmt: skip
        numbers = range(args.samples if name == newest else 1)
        with serving(args, folder, args.folder / f"vllm-{folder.name}-examined.log", WRONG) as (engine, _):
            found[name] = [examined(args, engine, sample(i), f"{folder.name}-{i}") for i in numbers]
            if folder.name == "draft":
                body = {"method": "load_draft", "args": [str(latest)]}
                httpx2.post(f"{engine.url}/collective_rpc", json=body, timeout=READY_SECONDS).raise_for_status()
                httpx2.post(f"{engine.url}/reset_prefix_cache", timeout=READY_SECONDS).raise_for_status()
                name = "the newest version, its tied head not packed"
                found[name] = [examined(args, engine, sample(0), "wrong")]
    told = {name: sum(run["exit_code"] == (name != newest) for run in runs) for name, runs in found.items()}
    print(json.dumps({name: f"{count} of {len(found[name])}" for name, count in told.items()}, indent=1))
    write_report(
        args.name, {"told": told, "runs": found, "versions": [path.name for path in sorted(versions.glob("v*"))]},
        seed=args.seed, dataset=args.dataset, **run_facts(started),
    )  # fmt: skip


if __name__ == "__main__":
    main()
