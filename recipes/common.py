"""What the recipes share: the data sets of the experiments, recorded traces, report files."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from osd_hf import (
    AcceptanceStats,
    CorrectionStore,
    DomainDrafts,
    OnlineConfig,
    SimulationReport,
    Trace,
    UpdateReport,
    record_traces,
)
from osd_hf.bench.display import rolling_alpha
from osd_hf.learning.learner import Learner
from osd_hf.utils.report import provenance

# Data set -> template of the user's turn, over the columns that it has on the Hub.
TEMPLATES = {
    "gsm8k": "{question}",
    "spider": "db: {db_id}\n{question}",
    "code_search_net_python": "Write Python: {func_documentation_string:.300}",
    "finance_alpaca": "{instruction}",
}
RESULTS = Path(os.environ.get("OSD_HF_RESULTS", Path(__file__).parent / "results"))
MAX_NEW_TOKENS = 96


def data_folder() -> Path:
    """The folder with `data/*.jsonl` and the pair in `lab/`; ends the recipe with a clear line where there is none."""
    folder = os.environ.get("OSD_HF_DATA")
    if not folder:
        sys.exit("Set OSD_HF_DATA to a folder with data/*.jsonl and lab/{target,draft}.")
    return Path(folder)


def load_pair(target: str | None = None, draft: str | None = None) -> tuple[Any, Any, Any]:
    """Target, draft (fp32, k = 5, threshold 0, constant schedule) and tokenizer."""
    target, draft = target or str(data_folder() / "lab/target"), draft or str(data_folder() / "lab/draft")
    models = [AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32).eval() for m in (target, draft)]
    config = models[1].generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 5, "constant"
    config.assistant_confidence_threshold = 0.0
    return models[0], models[1], AutoTokenizer.from_pretrained(target)


def prompts(name: str, tokenizer: Any, n: int, seed: int) -> list[list[int]]:
    """Token ids of `n` prompts drawn at random (seeded) from a data set, each as one user turn."""
    lines = (data_folder() / f"data/{name}.jsonl").read_text().rstrip("\n").split("\n")
    rows = [json.loads(line) for line in lines]
    rows = random.Random(seed).sample(rows, min(n, len(rows)))
    turns = [[{"role": "user", "content": TEMPLATES[name].format(**row)}] for row in rows]
    return [tokenizer.apply_chat_template(t, add_generation_prompt=True)["input_ids"] for t in turns]


def recorded(
    name: str, seed: int, n: int, folder: Path, pair: tuple[Any, Any, Any] | None = None, *, start: int = 0
) -> list[Trace]:
    """The target's greedy answers to `n` prompts without the first `start`, recorded once and kept in a store below
    `folder`."""
    path = folder / (f"{name}-seed{seed}-n{n}" + (f"-from{start}" if start else ""))
    store = CorrectionStore(path)
    if len(store) == 0:
        target, _, tokenizer = pair or load_pair()
        questions = prompts(name, tokenizer, n, seed)
        if start and questions[:start] != prompts(name, tokenizer, start, seed):
            sys.exit(
                f"The first {start} of {n} prompts of {name} are others than {start} by themselves: ask for fewer."
            )
        questions = questions[start:]
        traces = record_traces(target, questions, max_new_tokens=MAX_NEW_TOKENS, domain=name)
        # All or nothing: a killed recording leaves no half of a data set behind.
        for trace in list(tqdm(traces, total=len(questions), desc=f"record {name} seed {seed}")):
            store.append(trace)
        store.close()
    return list(CorrectionStore(path))


def last_share(stats: list[AcceptanceStats] | tuple[AcceptanceStats, ...], share: float = 0.2) -> AcceptanceStats:
    """Joined stats of the last `share` of the requests."""
    return sum(stats[round(len(stats) * (1 - share)) :], AcceptanceStats())


def write_report(name: str, report: dict[str, Any], **facts: Any) -> Path:
    """Write `results/<name>.json`, provenance included."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"provenance": provenance(**facts), **report}, indent=1) + "\n")
    return path


def rotate(traces: dict[str, list[Trace]], segment: int, n: int) -> list[Trace]:
    """A stream of `n` requests that changes the data set every `segment` requests; each goes on where it was left."""
    names, left = list(traces), {name: iter(those) for name, those in traces.items()}
    return [next(left[names[i // segment % len(names)]]) for i in range(n)]


class ProcessorTimed(Learner):
    """A learner whose reports give processor seconds: with one thread, wall time on a core without other jobs."""

    def update(self, domain: str | None = None, steps: int | None = None) -> UpdateReport:
        started = time.process_time()
        return replace(super().update(domain, steps), seconds=time.process_time() - started)


def processor_timed(draft: Any, config: OnlineConfig) -> ProcessorTimed:
    """For `simulate`."""
    return ProcessorTimed(DomainDrafts(draft, config, per_domain=False), config)


def run_facts(started: float) -> dict[str, Any]:
    """Of a run that began at `started` (`time.time()`), for the report."""
    return {
        "threads": torch.get_num_threads(),
        "mixed_precision": os.environ.get("ACCELERATE_MIXED_PRECISION", "no"),
        "minutes": round((time.time() - started) / 60, 1),
    }


def requests_stats(report: SimulationReport) -> list[list[float]]:
    """Examined and accepted tokens of each request, ready for JSON."""
    return [[float(s.examined), float(s.accepted)] for s in report.stats]


def plot_ways(axis: Any, rows: list[dict[str, Any]], static: Sequence[AcceptanceStats], window: int) -> None:
    """Rolling alpha over all requests: the static draft, and a line for each way, from its `requests_stats`."""
    axis.plot(rolling_alpha(static, window), color="0.5", linestyle="--", label="static draft")
    for row in rows:
        stats = [
            AcceptanceStats.from_counts(drafted=e, examined=e, accepted=a, emitted=e, target_forwards=1)
            for e, a in row["requests_stats"]
        ]
        axis.plot(rolling_alpha(stats, window), label=row["way"])
    axis.legend(fontsize=8, ncols=3)
    axis.grid(alpha=0.3)
