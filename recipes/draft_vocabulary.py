"""
What a draft vocabulary saves and what it loses: the draft's forward with whole and with restricted heads; on real
traffic, the share of the target's tokens that the tokens chosen before had among them, and the acceptance lost.

    OSD_HF_DATA=... python recipes/draft_vocabulary.py                          # lab pair: 4,096 tokens
    OSD_HF_DATA=... python recipes/draft_vocabulary.py --parts another --target FOLDER       # such as SmolLM2-135M
    OSD_HF_DATA=... python recipes/draft_vocabulary.py --requests 16 --learn 16 --datasets gsm8k --tokens 3 \\
        --shapes lab --no-compile                                                                     # smoke

heads     one token through drafts of random weights, whole and restricted heads in turns, small ones compiled as well;
          median ratios with 95% bootstrap intervals
lab       requests one after the other, drafted at k = 5, from `--learn` on by a draft that has learned from those
          before: the vocabulary is what `OnlineConfig(draft_vocabulary="auto")` would choose (it may choose 512, 1,024
          or 2,048 of the lab's 4,096 tokens); acceptance, by replay, with the whole head and with the rows chosen then
another   the same with another target, whose draft are its first layers
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import common
import numpy as np
import torch
from common import DATASETS, QUOTING_TEMPLATES, K, drawing, load_pair, make_parser, recorded, simulated
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from osd_hf import AcceptanceStats, OnlineConfig, Trace, replay
from osd_hf.decoding import vocabulary
from osd_hf.decoding.forward import CompiledDraft, DraftForward
from osd_hf.decoding.vocabulary import SIZES, RestrictedDraft, TrafficVocabulary
from osd_hf.evaluation.benchmark import median_ratio
from osd_hf.replay import redraft

# Layers, width, width inside the layers, heads, heads of keys, vocabulary.
SHAPES = {
    "lab, with 151,936 tokens": (2, 128, 344, 2, 2, 151_936),
    "3 layers of SmolLM2-135M": (3, 576, 1536, 9, 3, 49_152),
    "Qwen3-0.6B": (28, 1024, 3072, 16, 8, 151_936),
}
CONTEXT = 200  # tokens in the draft's cache


# --- heads ----------------------------------------------------------------------------------------------------------


def heads(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a token by the size of the head, and how much faster restricted ones are."""
    found: dict[str, Any] = {}
    for title in [title for title in SHAPES if any(title.startswith(shape) for shape in args.shapes)]:
        layers, width, inner, heads, kv_heads, size = SHAPES[title]
        config = LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=size, tie_word_embeddings=False,
        )  # fmt: skip
        torch.manual_seed(0)
        draft = LlamaForCausalLM(config).eval()
        sizes = [few for few in SIZES if 2 * few <= size]
        drafts = [draft, *(RestrictedDraft(draft, np.arange(few)).model for few in sizes)]
        found[title] = {}
        for way in ["eager", *(["compiled"] if args.compile and layers < 8 else [])]:
            compiled = CompiledDraft(draft) if way == "compiled" else None
            found[title][way] = timed(drafts, [size, *sizes], compiled, args.tokens)
            for few, row in found[title][way].items():
                print(f"  {title}, {way}, {few} tokens: {row}")
    return found


@torch.inference_mode()
def timed(drafts: Sequence[Any], sizes: Sequence[int], compiled: Any, tokens: int) -> dict[str, Any]:
    """The drafts in turns, the first of which has the whole head."""
    context = torch.randint(0, 1000, (1, CONTEXT))
    forwards = [DraftForward(d) if compiled is None else compiled.forward(d, CONTEXT, CONTEXT + 50) for d in drafts]
    times: list[list[float]] = [[] for _ in drafts]
    for forward in forwards:
        forward.feed(context)
    for turn in tqdm(range(tokens + 2), leave=False):
        for place in np.roll(range(len(drafts)), turn):
            started = time.perf_counter()
            logits = forwards[place].feed(context[:, :1])
            logits.max(-1)
            logits.softmax(-1, dtype=torch.float32)
            times[place].append(time.perf_counter() - started)
            forwards[place].crop(CONTEXT)
    times = [those[2:] for those in times]
    return {
        str(size): {
            "milliseconds": round(1e3 * float(np.median(those)), 3),
            "times_as_fast": median_ratio([whole / few for whole, few in zip(times[0], those, strict=True)]),
        }
        for size, those in zip(sizes, times, strict=True)
    }


# --- traffic --------------------------------------------------------------------------------------------------------


def followed(traces: Sequence[Trace]) -> tuple[list[Any], list[dict[str, Any]]]:
    """What was chosen when each request came, and how many of its tokens each size would have lacked."""
    known, chosen, rows = TrafficVocabulary(), [], []
    for trace in traces:
        ids = trace.completion_ids.astype(np.int64)
        ranks = np.full(len(ids), -1) if known._ranks is None else known._ranks[ids]
        chosen.append(known.chosen)
        rows.append({
            "size": None if known.chosen is None else len(known.chosen), "tokens": len(ids),
            "missed": 0 if known.chosen is None else int((~np.isin(ids, known.chosen)).sum()),
            "missed_by_size": {str(few): int((ranks >= few).sum()) for few in known._sizes.tolist()},
        })  # fmt: skip
        known.add(trace)
    return chosen, rows


def summary(rows: Sequence[dict[str, Any]], parts: int = 5) -> dict[str, Any]:
    """Coverage, over the stream and by parts of it."""
    ends = np.linspace(0, len(rows), parts + 1).astype(int)

    def share(some: Sequence[dict[str, Any]], size: str | None) -> float:
        missed = sum(row["missed"] if size is None else row["missed_by_size"].get(size, 0) for row in some)
        return 1 - missed / max(sum(row["tokens"] for row in some), 1)

    restricted = [i for i, row in enumerate(rows) if row["size"] is not None]
    return {
        "requests": len(rows),
        "restricted_requests": len(restricted),
        "first_restricted": restricted[0] if restricted else None,
        "size_at_the_end": rows[-1]["size"],
        "covered_where_restricted": share([rows[i] for i in restricted], None) if restricted else None,
        "covered_by_size_by_part": {
            size: [round(share(rows[max(a, 1) : b], size), 4) for a, b in zip(ends, ends[1:], strict=False)]
            for size in rows[-1]["missed_by_size"]
        },
    }


def masked(draft: Any, traces: Sequence[Trace], chosen: Sequence[Any]) -> AcceptanceStats:
    """What a draft makes of requests, each with the tokens that were chosen when it came."""
    total, first = AcceptanceStats(), 0
    head = draft.get_output_embeddings()
    while first < len(traces):
        end = next((i for i in range(first, len(traces)) if chosen[i] is not chosen[first]), len(traces))
        handle = None
        if chosen[first] is not None:
            others = torch.ones(traces[0].vocab_size, dtype=torch.bool)
            others[torch.from_numpy(chosen[first])] = False
            handle = head.register_forward_hook(lambda _, __, out, mask=others: out.masked_fill(mask, -torch.inf))
        total = total + replay(draft, traces[first:end], K)
        if handle is not None:
            handle.remove()
        first = end
    return total


def of_pair(static: Any, traces: Sequence[Trace], learn: int, name: str) -> dict[str, Any]:
    """The traffic of a pair whose draft learns from the first requests, and drafts the others."""
    rule = OnlineConfig(num_assistant_tokens=K)
    learned = simulated(static, traces[:learn], rule, bar=f"a draft learns {name}").draft
    drafted = [*redraft(static, traces[:learn], K), *redraft(learned, traces[learn:], K)]
    chosen, rows = followed(drafted)
    found = summary(rows)
    for way, draft in (("static", static), ("learned", learned)):
        whole, few = replay(draft, traces[learn:], K), masked(draft, traces[learn:], chosen[learn:])
        found[way] = {"whole": whole.alpha, "restricted": few.alpha, **common.gain(whole, few)}
    print(f"  {name}: {found}")
    return found


def lab(args: argparse.Namespace) -> dict[str, Any]:
    """The lab pair's traffic."""
    pair = load_pair()
    total, learn = args.requests + args.learn, args.learn
    with mock.patch.multiple(vocabulary, LEAST_VOCABULARY=1, SIZES=(512, 1024, 2048)):
        return {
            name: of_pair(pair.draft, recorded(name, 0, total, args.traces, pair), learn, name)
            for name in args.datasets
        }


def another(args: argparse.Namespace) -> dict[str, Any]:
    """The traffic of another target, with vocabularies of the default sizes; its draft has its first layers."""
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    config = type(target.config).from_dict(target.config.to_dict() | {"num_hidden_layers": args.layers})
    draft = type(target)(config).eval()
    draft.load_state_dict(target.state_dict(), strict=False)
    found, (total, learn) = {}, args.another
    for name in args.datasets:
        traces = recorded(name, 0, total, args.traces / "another", (target, None, tokenizer))
        found[name] = of_pair(draft, traces, learn, name)
    return found


def plot(report: dict[str, Any], name: str) -> None:
    """Share of emitted tokens that would have been lacking, over time, by data set and size."""
    parts = [part for part in ("lab", "another") if part in report]
    with drawing(name, 1, len(parts), figsize=(6 * len(parts), 4)) as (_, axes):
        for axis, part in zip(axes[0], parts, strict=True):
            for color, (dataset, row) in enumerate(report[part].items()):
                for line, (size, shares) in zip("-:.", row["covered_by_size_by_part"].items(), strict=False):
                    style = {"-": "-", ":": "--", ".": ":"}[line]
                    axis.plot([1 - s for s in shares], style, color=f"C{color}", label=f"{dataset}, {size}")
            axis.set_xlabel("fifth of the requests")
            axis.set_ylabel("share of emitted tokens outside")
            axis.set_yscale("symlog", linthresh=1e-3)
            axis.set_title("lab target, 4,096 tokens" if part == "lab" else "another target", fontsize=10)
            axis.legend(fontsize=6, ncols=2)


def main() -> None:
    parser = make_parser(__doc__, "draft_vocabulary", seed=False)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help="beginnings of their names")
    parser.add_argument("--datasets", nargs="+", default=[*DATASETS, *QUOTING_TEMPLATES])
    parser.add_argument("--requests", type=int, default=198, help="judged, after those that are learned from")
    parser.add_argument("--learn", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=60, help="timed for each head")
    parser.add_argument("--parts", nargs="+", default=["heads", "lab"], choices=["heads", "lab", "another"])
    parser.add_argument("--target", help="of the part another: a folder; a vocabulary of at least 16,384 tokens")
    parser.add_argument("--layers", type=int, default=3, help="of that target, which are its draft")
    parser.add_argument("--another", type=int, nargs=2, default=[128, 96], help="its requests, and those learned from")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    plot(common.report_parts(args, lambda part: globals()[part](args)), args.name)


if __name__ == "__main__":
    main()
