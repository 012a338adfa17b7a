"""
Five drafts of the lab's target side by side, by `compare`: how much is accepted of each, what it costs, and how fast
the target is expected to answer with it.

    OSD_HF_DATA=... python recipes/comparing.py                        # all; goes on where it was when called again
    OSD_HF_DATA=... python recipes/comparing.py --part drafts --seconds 200       # as far as there is time
    OSD_HF_DATA=... python recipes/comparing.py --part compare         # with two cores to itself: two minutes
    OSD_HF_DATA=... python recipes/comparing.py --datasets gsm8k --requests 8 --live 2 --steps 2 --make-steps 1

static       the lab draft
learned      the lab draft after the first requests of the data set, replayed
made         some layers of the target, which `make_draft` chooses by measured costs and teaches on the same requests
lora         the lab draft with an adapter on it that has learned from the same requests, a `PeftModel`
own tokens   the draft of `another_tokenizer.py`, with a tokenizer of its own, after the same requests

Compared are the `--live` requests that follow, whose answers the target gives once. The expected speed-up is of eager
forwards, by tokens per target forward (k = 5) and measured costs.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import common
from another_tokenizer import drafts_of, learned, taught
from common import TEMPLATES, K, load_pair, lora, make_parser, recorded, run_facts, write_report
from peft import PeftModel
from transformers import AutoModelForCausalLM

from osd_hf import compare, make_draft
from osd_hf.evaluation.compare import DraftComparison
from osd_hf.evaluation.display import figure, plot_speedups, stats_interval, text_table
from osd_hf.hub.cards import EvaluationSet
from osd_hf.prompts import Prompt

DRAFTS = ("static", "learned", "made", "lora", "own tokens")


def prepared(name: str, args: Any) -> None:
    """Make the drafts of a data set that are not there yet, as far as there is time."""
    for which, (draft, _, translation) in drafts_of(args.folder / "draft").items():
        learned(name, which, draft, translation, args)
    learned(name, "lora", load_pair().draft, None, args, peft_config=lora(16), learning_rate=args.lora_rate)
    place = args.folder / f"{name}-made"
    if not place.exists() and time.time() < args.until:
        traces = recorded(name, args.seed, args.requests + args.live, args.traces)[: args.requests]
        how = {"max_steps": args.make_steps, "max_seconds": args.make_seconds, "seed": args.seed}
        make_draft(load_pair().target, traces=traces, **how).save_pretrained(place)


def compared(name: str, args: Any) -> DraftComparison:
    """The drafts on the requests that none of them has seen."""
    pair, (_, theirs, _) = load_pair(), drafts_of(args.folder / "draft")["own"]
    known = [args.folder / f"{name}-{which}" for which in ("lab", "made", "own")]
    taught_before, made, own = map(AutoModelForCausalLM.from_pretrained, known)
    adapted = PeftModel.from_pretrained(load_pair().draft, args.folder / f"{name}-lora")
    drafts = dict(zip(DRAFTS, (pair.draft, taught_before, made, adapted, own), strict=True))
    asked = common.chosen(name, args.requests + args.live, args.seed)[args.requests :]
    texts = [TEMPLATES[name].format(**row) for row in asked]
    held_out = EvaluationSet(name, tuple(map(Prompt, range(len(texts)), texts)), args.max_new_tokens)
    return compare(
        pair.target, drafts, pair.tokenizer, held_out, assistant_tokenizer={"own tokens": theirs},
        num_assistant_tokens=K,
    )  # fmt: skip


def table(found: DraftComparison) -> str:
    rows = []
    for name in DRAFTS:
        stats, cost, worth = found.scores.totals[name], found.costs[name], found.worth[name]
        low, high = worth.interval
        rows.append([
            name, f"{figure(stats.alpha)} {stats_interval(stats)}", figure(stats.block_efficiency, 2),
            figure(cost.draft / cost.target), figure(cost.c), str(worth.num_assistant_tokens),
            f"{worth.speedup:.2f} [{low:.2f}, {high:.2f}]",
        ])  # fmt: skip
    header = ["draft", "alpha [95%]", "tokens/forward", "c", "c + check", "best k", "expected speed-up"]
    gains = [
        [f"{best} over {other}", f"{two.gain:+.3f} [{two.gain_interval[0]:+.3f}, {two.gain_interval[1]:+.3f}]"]
        for best, other, two in found.gains()
    ]
    return text_table(header, rows) + "\n\n" + text_table(["on the same prompts", "alpha [95%]"], gains)


def main() -> None:
    parser = make_parser(__doc__, "comparing")
    parser.add_argument("--part", choices=["drafts", "compare"], help="both by default")
    parser.add_argument("--folder", type=Path, default=Path("runs/comparing"))
    parser.add_argument("--datasets", nargs="+", default=["gsm8k", "finance_alpaca"])
    parser.add_argument("--requests", type=int, default=480)
    parser.add_argument("--live", type=int, default=120, help="requests that the drafts are compared on")
    parser.add_argument("--vocab-size", type=int, default=3072, help="of the tokenizer of its own")
    parser.add_argument("--steps", type=int, default=700, help="of that draft on plain text")
    parser.add_argument("--rate", type=float, default=1e-3, help="of these")
    parser.add_argument("--steps-per-update", type=int, help="as configured by default")
    parser.add_argument("--lora-rate", type=float, default=4e-3, help="learning rate of the adapter")
    parser.add_argument("--make-steps", type=int, default=1200, help="that the made draft learns in, at most")
    parser.add_argument("--make-seconds", type=float, default=240.0)
    parser.add_argument("--max-new-tokens", type=int, default=common.MAX_NEW_TOKENS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no other draft is begun")
    args = parser.parse_args()
    started = time.time()
    args.until = started + args.seconds
    if args.part != "compare":
        taught(args.folder / "draft", args)
        for name in args.datasets:
            prepared(name, args)
    if args.part == "drafts":
        return
    report: dict[str, Any] = {"requests": args.requests, "steps_per_update": args.steps_per_update}
    bars = {}
    for name in args.datasets:
        found = compared(name, args)
        print(f"\n{name}\n{table(found)}\n\n{found.summary()}", flush=True)
        report[name] = {key: value for key, value in found.to_dict().items() if key != "provenance"}
        bars[name] = {draft: (found.worth[draft].speedup, found.worth[draft].interval, None) for draft in DRAFTS}
    write_report(args.name, report, seed=args.seed, **run_facts(started))
    plot_speedups(common.RESULTS / f"{args.name}.png", bars, title="Expected by acceptance and measured costs")


if __name__ == "__main__":
    main()
