"""
A target that is fine-tuned while it is served: what is left of the draft's acceptance, and how soon it is back.

    OSD_HF_DATA=... python recipes/fine_tuned.py                                          # lab pair, two data sets
    OSD_HF_DATA=... python recipes/fine_tuned.py --target FOLDER --datasets gsm8k         # such as SmolLM2-135M
    OSD_HF_DATA=... python recipes/fine_tuned.py --steps 2 --before 12 --after 12 --live 2 --datasets gsm8k     # smoke

The target is fine-tuned on another data set than those that are served (LoRA by TRL, merged). A draft learns from the
requests before, by replay; then the fine-tuned target answers others. Compared after the switch: the draft as it was;
the one that had learned, frozen; learning on with the requests of the older target set aside, which is what osd_hf
does; with them scored anew by the fine-tuned one; with them in the buffers and the gate, as if nothing had happened;
and a fresh draft that learns.
Live, the weights of a serving target are exchanged in place, and each answer is compared with the target's own.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import torch
from common import K, drawing, last_share, load_pair, make_parser, pooled, recorded, run_facts, simulated, write_report
from datasets import Dataset

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig, Trace
from osd_hf.decoding.hook import rescore
from osd_hf.evaluation.display import rolling_alpha
from osd_hf.models import Pair, load_model
from osd_hf.replay import replay_each
from osd_hf.target_version import fingerprint

CONFIG = OnlineConfig(num_assistant_tokens=K)
WINDOW = 32  # requests that acceptance is told over
BACK = 0.9  # of the acceptance before the switch
FROZEN, FRESH = "frozen", "a fresh draft"
ASIDE, ANEW, STALE = (f"learning, older {what}" for what in ("set aside", "scored anew", "kept"))
Stats = Sequence[AcceptanceStats]


# --- the models -----------------------------------------------------------------------------------------------------


def pair_of(target: Path | None, layers: int) -> Pair:
    """The lab pair, or another target with its first layers as the draft."""
    if target is None:
        return load_pair()
    large = load_model(str(target), dtype="float32", device="cpu")
    small = copy.deepcopy(large)
    small.model.layers = small.model.layers[:layers]
    small.config.num_hidden_layers = layers
    with tempfile.TemporaryDirectory() as folder:
        small.save_pretrained(folder)
        return load_pair(str(target), folder)


def fine_tuned(pair: Pair, folder: Path, args: Any) -> Any:
    """The target after some steps on another data set; kept in a folder."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    if not (folder / "config.json").exists():
        turns = [
            {
                "prompt": [{"role": "user", "content": f"{row['instruction']}\n{row['input']}".strip()}],
                "completion": [{"role": "assistant", "content": row["output"]}],
            }
            for row in common.rows(args.tuned_on)[: args.steps * args.batch]
        ]
        with tempfile.TemporaryDirectory() as scratch:
            settings = SFTConfig(
                scratch, max_steps=args.steps, per_device_train_batch_size=args.batch, learning_rate=args.rate,
                max_length=192, lr_scheduler_type="constant", save_strategy="no", report_to="none", use_cpu=True,
                bf16=False, gradient_checkpointing=False, seed=args.seed, logging_steps=25,
            )  # fmt: skip
            adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            trainer = SFTTrainer(
                copy.deepcopy(pair.target), settings, train_dataset=Dataset.from_list(turns), peft_config=adapters,
                processing_class=pair.tokenizer,
            )  # fmt: skip
            trainer.train()
            trainer.model.merge_and_unload().save_pretrained(folder)
    tuned = load_model(str(folder), dtype="float32", device="cpu")
    tuned.generation_config = copy.deepcopy(pair.target.generation_config)
    return tuned


# --- by replay ------------------------------------------------------------------------------------------------------


def unsaid(traces: Sequence[Trace]) -> list[Trace]:
    """The same without a word of which target they are of, so that nothing is set aside."""
    return [replace(trace, target=None) for trace in traces]


def back_after(stats: Stats, level: float) -> int | None:
    """Requests until the last few together are accepted as much again."""
    sizes = range(WINDOW // 2, len(stats) + 1)
    return next((end for end in sizes if pooled(stats[max(end - WINDOW, 0) : end]) >= level), None)


def replayed(draft: Any, tuned: Any, before: list[Trace], after: list[Trace], name: str) -> dict[str, Any]:
    """Acceptance over both parts, in each way."""
    learned = simulated(draft, before, CONFIG, bar=f"{name} before")
    ways: dict[str, Stats] = {"as it was": replay_each(draft, after, K)}
    ways[FROZEN] = replay_each(learned.draft, after, K)
    decisions = {}
    for way in (ASIDE, ANEW, STALE, FRESH):
        first, second = (unsaid(before), unsaid(after)) if way == STALE else (before, after)
        learner = learned.learner if way == ASIDE else None
        if way in (ANEW, STALE):
            learner = simulated(draft, first, CONFIG, bar=f"{name} before, {way}").learner
        for trace in rescore(tuned, before) if way == ANEW and learner is not None else ():
            learner.observe(None, trace)
        run = simulated(draft, second, CONFIG, bar=f"{name} after, {way}", learner=learner)
        ways[way], decisions[way] = run.stats, Counter(decision.outcome for decision in run.decisions)
    reached = pooled(learned.stats[-2 * WINDOW :])
    shown = {way: [*learned.stats, *stats] for way, stats in ways.items() if way in (FROZEN, ASIDE, ANEW, STALE)}
    static = [*replay_each(draft, before, K), *ways["as it was"]]
    return {
        "dataset": name,
        "before": {"static": pooled(static[: len(before)][-2 * WINDOW :]), "learned": reached},
        "ways": [
            {
                "way": way,
                "at_the_switch": pooled(stats[: WINDOW // 2]),
                "first_quarter": pooled(stats[: len(stats) // 4]),
                "last_fifth": last_share(list(stats)).alpha,
                "last_fifth_interval": list(last_share(list(stats)).alpha_interval),
                "back_after": back_after(stats, BACK * reached),
                "decisions": dict(decisions.get(way, {})),
            }
            for way, stats in ways.items()
        ],
        "curves": {
            way: [round(float(x), 4) for x in rolling_alpha(stats, WINDOW)] for way, stats in shown.items()
        } | {"static": [round(float(x), 4) for x in rolling_alpha(static, WINDOW)]},
    }  # fmt: skip


# --- live -----------------------------------------------------------------------------------------------------------


def live(pair: Pair, tuned: Any, name: str, requests: int, seed: int) -> dict[str, Any]:
    """A target whose weights are exchanged in the middle of serving, in place."""
    target = copy.deepcopy(pair.target)
    questions = common.prompts(name, pair.tokenizer, 2 * requests, seed + 2)
    identical, versions = 0, list[str | None]()
    with OnlineAssistant(target, pair.draft, pair.tokenizer, CONFIG) as assistant:
        for number, question in enumerate(questions):
            if number == requests:
                target.load_state_dict(tuned.state_dict())
            ids, settings = common.greedy(question, common.MAX_NEW_TOKENS)
            alone = target.generate(ids, **settings)
            answer = assistant.generate(ids, **settings, on_trace=lambda trace: versions.append(trace.target))
            identical += int(torch.equal(alone, answer))
        [lesson] = assistant.drafts.lessons.values()
        kept = [*lesson.pending, *lesson.held_back, *lesson.buffer]
    told = [fingerprint(pair.target)] * requests + [fingerprint(tuned)] * requests
    return {
        "dataset": name, "requests": len(questions), "identical": identical,
        "requests_with_their_targets_version": sum(a == b for a, b in zip(versions, told, strict=True)),
        "kept_in_the_end": len(kept), "kept_of_the_older_target": sum(t.target != told[-1] for t in kept),
        "set_aside": lesson.older,
    }  # fmt: skip


# --- all of it ------------------------------------------------------------------------------------------------------


def plot(name: str, rows: list[dict[str, Any]], before: int) -> None:
    with drawing(name, 1, len(rows), figsize=(6.5 * len(rows), 4.2)) as (_, axes):
        for axis, row in zip(axes[0], rows, strict=True):
            for way, curve in row["curves"].items():
                axis.plot(curve, label=way, **({"color": "0.5", "linestyle": "--"} if way == "static" else {}))
            axis.axvline(before - 0.5, color="0.8", zorder=0)
            axis.set(title=row["dataset"], xlabel="request; fine-tuned at the line", ylabel=f"alpha, last {WINDOW}")
            axis.legend(fontsize=8)
            axis.grid(alpha=0.3)


def main() -> None:
    parser = make_parser(__doc__, "fine_tuned")
    parser.add_argument("--target", type=Path, help="folder of another target, whose first layers are its draft")
    parser.add_argument("--layers", type=int, default=3, help="of that draft")
    parser.add_argument("--datasets", nargs="+", default=["gsm8k", "finance_alpaca"], help="that are served")
    parser.add_argument("--tuned-on", default="alpaca", help="data set with instruction, input and output")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--before", type=int, default=192, help="requests of the target as it was")
    parser.add_argument("--after", type=int, default=256, help="requests of the fine-tuned one")
    parser.add_argument("--live", type=int, default=24, help="requests before and after, served live")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started = time.time()
    folder = args.traces / ("lab" if args.target is None else args.target.name)
    pair = pair_of(args.target, args.layers)
    kind = f"tuned-{args.tuned_on}-{args.steps}x{args.batch}-{args.rate:g}-seed{args.seed}"
    tuned = fine_tuned(pair, folder / kind / "target", args)
    rows, lives = [], []
    for name in args.datasets:
        before = recorded(name, args.seed, args.before, folder, pair)
        after = recorded(name, args.seed + 1, args.after, folder / kind, Pair(tuned, pair.draft, pair.tokenizer))
        rows.append(replayed(pair.draft, tuned, before, after, name))
        lives.append(live(pair, tuned, name, args.live, args.seed))
        print(json.dumps([{k: v for k, v in rows[-1].items() if k != "curves"}, lives[-1]], indent=1))
    plot(args.name, rows, args.before)
    settings = {
        k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in ("traces", "target")
    }
    write_report(args.name, {"settings": settings, "rows": rows, "live": lives, **run_facts(started)}, seed=args.seed)


if __name__ == "__main__":
    main()
