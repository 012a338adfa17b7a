"""Interrupt `osd-hf run` at random moments by SIGINT, SIGTERM, and SIGKILL, resume it each time, and compare with a
run that was not interrupted: answers, counts, versions, and the learned draft.

    python recipes/interruptions.py                     # 50 interruptions
    python recipes/interruptions.py --interruptions 3   # smoke
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import make_parser, run_facts, write_report
from safetensors.torch import load_file
from tqdm import tqdm

KEPT = ("index", "domain", "learned", "frozen", "draft_version", "prompt", "answer")  # of a line; the rest are times
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def command(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "osd_hf.cli.main", "run", "--output-dir", str(folder), *flags]


def first_flags(args: Any) -> list[str]:
    """Return the flags of the first command. A part of the pair's prompts is served, and each update is saved."""
    count, tokens = str(args.requests), str(args.max_new_tokens)
    flags = ["--pair", "bundled", "--num-requests", count, "--max-new-tokens", tokens, "--save-every", "1"]
    return [*flags, "--keep-text", "--no-gate", "--seed", str(args.seed)]


def outcome(folder: Path) -> dict[str, Any]:
    """Return what must not depend on interruptions."""
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    report = json.loads((folder / "report.json").read_text())
    return {
        "lines": [{name: line[name] for name in KEPT} for line in lines],
        "overall": report["overall"], "version": report["draft_version"],
        "weights": {name: w.tolist() for name, w in load_file(folder / "draft/model.safetensors").items()},
    }  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__, "interruptions", traces=False)
    parser.add_argument("--interruptions", type=int, default=50)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    args, started = parser.parse_args(), time.time()
    rng, folder = random.Random(args.seed), Path(tempfile.mkdtemp())
    subprocess.run(command(folder / "straight", *first_flags(args)), check=True, capture_output=True)
    whole = time.time() - started
    straight = outcome(folder / "straight")
    sent: Counter[str] = Counter()
    before, runs, differing = Counter[str](), 0, list[str]()
    with tqdm(total=args.interruptions) as bar:
        while sum(sent.values()) < args.interruptions:
            place, flags, runs = folder / f"run{runs}", first_flags(args), runs + 1
            while True:
                process = subprocess.Popen(command(place, *flags), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                try:
                    error = process.communicate(timeout=rng.uniform(0.25 * whole, 0.7 * whole))[1]
                except subprocess.TimeoutExpired:
                    which = rng.choice(SIGNALS)
                    served = len((place / "journal.jsonl").read_text()) if (place / "journal.jsonl").exists() else 0
                    process.send_signal(which)
                    error = process.communicate()[1]
                    sent[which.name] += 1
                    before["while serving" if served else "before the first request"] += 1
                    bar.update()
                if process.returncode == 0:
                    break
                if process.returncode not in (130, 143, -signal.SIGKILL, -signal.SIGINT, -signal.SIGTERM):
                    sys.exit(f"A resumed run failed with {process.returncode}: {error.decode()[-2000:]}")
                flags = ["--resume"] if (place / "settings.json").exists() else first_flags(args)
            if outcome(place) != straight:
                differing.append(place.name)
            shutil.rmtree(place)
    shutil.rmtree(folder)
    report = {
        "interruptions": sum(sent.values()), "signals": dict(sent), "moments": dict(before), "runs": runs,
        "requests": args.requests, "updates": straight["version"], "differing_runs": differing,
    }  # fmt: skip
    write_report(args.name, report, seed=args.seed, **run_facts(started))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
