"""Measure SmolLM2-135M-Instruct with the draft of the package: sampled everyday chats first, then narrow traffic.

    OSD_HF_DATA=... python recipes/chats.py                                 # all parts
    OSD_HF_DATA=... python recipes/chats.py --parts learn --kinds alpaca gsm8k --requests 100
    OSD_HF_DATA=... python recipes/chats.py --head DIR                      # a draft head of SmolLM2
    OSD_HF_DATA=... python recipes/chats.py --target DIR --draft DIR --requests 20 --held-out 2 --timed 1   # smoke

replay    acceptance of the draft (k = 5) on the target's own answers, sampled and greedy
learn     sampled requests of one kind are served with the default settings, and the draft learns: acceptance on
          held-out answers before and after, learning's share of the time after the first 16 requests, seconds saved
timing    systems answer the same requests in turns: the target alone, without and with the CPU kernels of osd_hf,
          prompt lookup, transformers' assisted generation with the draft, and osd_hf with text, with the draft, and
          with both; nothing is learned

Sampled means temperature 0.7 and top-p 0.9. Finished results are kept in `--runs`, so that a killed run can continue.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from common import K, gain, kept, kept_answers, make_parser, run_facts, write_report
from tqdm import tqdm

from osd_hf import OnlineAssistant, OnlineConfig, replay
from osd_hf.acceptance import figures_of
from osd_hf.draft_head import load_head
from osd_hf.evaluation.benchmark import System, benchmark
from osd_hf.loading import Pair, load_pair
from osd_hf.recording import record_traces
from osd_hf_app.pair import smollm2_pair

KINDS = ("alpaca", "gsm8k", "finance_alpaca", "code_search_net_python", "mixed")
WARM_UP = 16  # requests before learning's share of the time is measured


def asked(kind: str, tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    """Return random prompts of one kind; no draft was trained on them."""
    if kind == "mixed":
        parts = [asked(name, tokenizer, -(-count // 4), seed) for name in KINDS[:4]]
        return [ids for group in zip(*parts, strict=False) for ids in group][:count]
    return common.prompts(kind, tokenizer, count, seed)


def replayed(args: Any, pair: Pair) -> dict[str, Any]:
    """Return the acceptance of the draft by data set."""
    found = {}
    for name, part in kept_answers(args.runs / "held_out", pair.target, pair.tokenizer, args.held_out).items():
        stats = replay(pair.draft, part, K)
        found[name] = {"answers": len(part), **figures_of(stats)}
        print(f"{name}: alpha {stats.alpha:.3f}, {stats.block_efficiency:.2f} tokens per forward", flush=True)
    return found


def learned(kind: str, args: Any, pair: Pair) -> dict[str, Any]:
    """Serve sampled requests and learn; return the effect and the cost."""
    prompts = asked(kind, pair.tokenizer, args.requests + args.held_out, args.seed)
    served, later = prompts[: -args.held_out], prompts[-args.held_out :]
    settings: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "sampling": common.SAMPLING}
    held_out = list(record_traces(pair.target, later, seed=args.seed, **settings))
    before = replay(pair.draft, held_out, K)
    seconds, tokens, learning, first = 0.0, 0, 0.0, {}
    with OnlineAssistant(*pair, OnlineConfig(seed=args.seed)) as assistant:
        for number, prompt in enumerate(tqdm(served, desc=kind, leave=False)):
            if number == min(WARM_UP, len(served) - 1):
                first = {"seconds": seconds, "learning_seconds": learning, "tokens": tokens}
            ids, how = common.greedy(prompt, args.max_new_tokens)
            torch.manual_seed(number)
            begun = time.perf_counter()
            output = assistant.generate(ids, **how | {"do_sample": True, "top_k": 0, **common.SAMPLING})
            seconds += time.perf_counter() - begun
            tokens += output.shape[1] - len(prompt)
            learning = assistant.learning_seconds
        after = replay(assistant.draft, held_out, K)
        stats = assistant.stats
        found = {
            "requests": len(served), "held_out": len(later), "tokens": tokens, "seconds": seconds,
            "learning_seconds": learning, "saved_seconds": assistant.saved_seconds, "first": first,
            "learning_share": (learning - first["learning_seconds"]) / (seconds - first["seconds"]),
            "served_tokens_per_forward": stats.block_efficiency, "stats": str(stats), "effort": assistant.effort,
            "alpha": [before.alpha, after.alpha], **gain(before, after),
            "tokens_per_forward": [before.block_efficiency, after.block_efficiency],
            "versions": [decision.outcome for decision in assistant.decisions],
        }  # fmt: skip
    print(
        f"{kind}: alpha {before.alpha:.3f} to {after.alpha:.3f}, tokens per forward {before.block_efficiency:.2f} to "
        f"{after.block_efficiency:.2f}; served {stats.block_efficiency:.2f}; learning {learning:.0f} of {seconds:.0f} "
        f"s, {found['learning_share']:.1%} after the first {WARM_UP}; saved {found['saved_seconds'] or 0:.0f} s",
        flush=True,
    )
    return found


def timed(args: Any, pair: Pair, head: Any) -> dict[str, Any]:
    """Return the speeds of all systems by data set, with a draft head in addition unless it is `None`."""
    target, draft, tokenizer = pair
    sets: dict[str, Sequence[list[int]]] = {
        "alpaca, sampled": asked("alpaca", tokenizer, 2 * args.timed, args.seed),
        **{name: asked(name, tokenizer, args.timed, args.seed) for name in ("mt_bench", *KINDS[1:4])},
    }
    ours = {source: partial(System, draft=draft, num_assistant_tokens="auto", candidates=source)
            for source in ("text", "draft", "both")}  # fmt: skip
    systems = [
        System("target alone", "alone"),
        System("target alone, CPU kernels", "alone", kernels=True),
        System("prompt lookup", "prompt_lookup", num_assistant_tokens=10),
        System("stock, draft", "stock", draft, draft.generation_config.num_assistant_tokens or K),
        *(make(f"osd_hf, {source}", "lean") for source, make in ours.items()),
    ]
    if head is not None:
        systems.append(System("osd_hf, head and text", "lean", head, num_assistant_tokens="auto"))
    report = benchmark(
        target, systems, sets, max_new_tokens=args.max_new_tokens, tokenizer=tokenizer, measure_costs=True,
        sampling={"alpaca, sampled": {**common.SAMPLING, "top_k": 0}}, show_progress=True,
    )  # fmt: skip
    found = report.to_dict()
    for name in sets:
        for system, part in found["by_dataset"][name].items():
            ratio = part["times_alone"]
            low, high = ratio["interval"]
            speed = f"{part['tokens_per_second']:.1f} tokens/s, {ratio['median']:.2f} [{low:.2f}, {high:.2f}]"
            print(f"{name}, {system}: {speed}, {part['block_efficiency']:.2f} tokens per forward", flush=True)
    return found


def main() -> None:
    parser = make_parser(__doc__, "chats", traces=False)
    parser.add_argument("--parts", nargs="+", default=["replay", "learn", "timing"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="of requests that are learned")
    parser.add_argument("--requests", type=int, default=200, help="requests to learn from, of each kind")
    parser.add_argument("--held-out", type=int, default=40, help="answers of each kind that are replayed")
    parser.add_argument("--timed", type=int, default=10, help="requests of each data set; twice as many sampled")
    parser.add_argument("--max-new-tokens", type=int, default=common.MAX_NEW_TOKENS)
    parser.add_argument("--target", help="folder of another target")
    parser.add_argument("--draft", help="folder of another draft")
    parser.add_argument("--head", help="folder of a draft head, which replaces the draft; timing has both")
    parser.add_argument("--runs", type=Path, default=Path("runs/chats"), help="where finished results are kept")
    args, started = parser.parse_args(), time.time()
    if bool(args.target) != bool(args.draft):
        parser.error("--target and --draft go together")
    pair = load_pair(args.target, args.draft, dtype="float32", device="cpu") if args.target else smollm2_pair()
    head = None if args.head is None else load_head(args.head, pair.target)
    own = pair if head is None else pair._replace(draft=head)
    others = [Path(place).name for place in (args.target, args.draft, args.head) if place]
    facts = (args.requests, args.held_out, args.timed, args.max_new_tokens, args.seed, *others)
    sizes = "-".join(map(str, facts)) + ".json"
    report: dict[str, Any] = {}
    if "replay" in args.parts:
        report["replay"] = kept(args.runs / f"replay-{sizes}", partial(replayed, args, own))
    if "learn" in args.parts:
        report["learn"] = {
            kind: kept(args.runs / f"learn-{kind}-{sizes}", partial(learned, kind, args, own)) for kind in args.kinds
        }
    if "timing" in args.parts:
        report["timing"] = kept(args.runs / f"timing-{sizes}", partial(timed, args, pair, head))
    write_report(args.name, {"sampling": common.SAMPLING, **report}, seed=args.seed, **run_facts(started))


if __name__ == "__main__":
    main()
