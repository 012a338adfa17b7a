"""
Numbers that a change of structure must not move.

    OSD_HF_DATA=FOLDER python recipes/fingerprint.py --out before.json    # on one commit
    OSD_HF_DATA=FOLDER python recipes/fingerprint.py --out after.json     # on another one; the files are equal

`--replayed` recorded requests of the lab pair, half of each of two data sets, are learned from in their order, and
`--live` requests are served while the draft learns. Written are the counts of each request, the versions that served,
and what the gate decided. One thread, so that sums have one order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import MAX_NEW_TOKENS, load_pair, prompts, recorded

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig, simulate

SETS = ("gsm8k", "spider")
DECISION = ("outcome", "version", "serving", "requests", "alpha_before", "alpha_after", "standard_error")


def counts(stats: AcceptanceStats) -> list[int]:
    return [stats.drafted, stats.examined, stats.accepted, stats.emitted, stats.target_forwards]


def replayed(pair: Any, n: int) -> dict[str, Any]:
    """What a learner makes of recorded requests."""
    with tempfile.TemporaryDirectory() as folder:
        traces = [trace for name in SETS for trace in recorded(name, 0, n // len(SETS), Path(folder), pair)]
    run = simulate(pair[1], traces, OnlineConfig(num_assistant_tokens=5))
    return {"counts": [counts(stats) for stats in run.stats], "updates": [update.to_dict() for update in run.updates]}


def live(pair: Any, n: int) -> dict[str, Any]:
    """What an assistant makes of requests while it learns from them."""
    target, draft, tokenizer = pair
    found: dict[str, Any] = {"counts": [], "versions": [], "answers": []}
    with OnlineAssistant(target, draft, tokenizer, OnlineConfig(num_assistant_tokens=5)) as assistant:
        for name in SETS:
            for prompt in prompts(name, tokenizer, n // len(SETS), 1):
                ids = torch.tensor([prompt])
                found["versions"].append(assistant.version)
                assistant.reset_stats()
                output = assistant.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_NEW_TOKENS
                )
                found["counts"].append(counts(assistant.stats))
                found["answers"].append(hashlib.sha256(str(output.tolist()).encode()).hexdigest()[:16])
        found["decisions"] = [[decision.to_dict()[name] for name in DECISION] for decision in assistant.decisions]
    return found


def without_seconds(found: Any) -> Any:
    """All but times, which no commit repeats."""
    if isinstance(found, dict):
        return {name: without_seconds(value) for name, value in found.items() if not name.endswith("seconds")}
    return [without_seconds(value) for value in found] if isinstance(found, list) else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replayed", type=int, default=256, metavar="N")
    parser.add_argument("--live", type=int, default=64, metavar="N")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pair = load_pair()
    found = without_seconds({"replayed": replayed(pair, args.replayed), "live": live(pair, args.live)})
    text = json.dumps(found, indent=1)
    args.out.write_text(text + "\n")
    print(f"{args.out}: sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
