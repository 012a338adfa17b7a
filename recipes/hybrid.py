"""
How fast answers come from the learned draft, from past text, and from both, beside the target alone and what
transformers has, on real text; what each source gave; what the index and the target's compiled forward take.

    OSD_HF_DATA=... python recipes/hybrid.py                               # everything, both drafts, six data sets
    OSD_HF_DATA=... python recipes/hybrid.py --parts index verification    # without a learned draft
    OSD_HF_DATA=... python recipes/hybrid.py --parts systems --drafts bundled      # the bundled pair, its domains
    OSD_HF_DATA=... python recipes/hybrid.py --requests 2 --learn 8 --drafts draft --datasets gsm8k mt_bench \\
        --max-new-tokens 16 --no-compile --answers 4 --indexed 1000                                    # smoke

systems        a draft that has learned from the first `--learn` recorded requests answers others, with the text of
               those it learned from: all systems in turns, ratios of tokens per second request by request, with a 95%
               bootstrap interval of their median. dialogsum quotes its prompt; mt_bench has two turns.
useless        the same with a draft of random weights, with prompts of random tokens, and with both
verification   the target's forward over drafted tokens, compiled against eager, and answers through it
index          bytes a token and microseconds of a lookup and of an append, by the tokens that are held
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import common
import torch
from common import (
    K,
    data_folder,
    drawing,
    load_pair,
    make_parser,
    prompts,
    recorded,
    recorded_chats,
    simulated,
)
from torch._dynamo.utils import counters
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from osd_hf import CorrectionStore, OnlineAssistant, OnlineConfig, Trace
from osd_hf.bundled import DOMAINS, bundled_prompts, load_bundled
from osd_hf.decoding.hook import record_traces
from osd_hf.decoding.text import LONGEST, TextIndex
from osd_hf.evaluation.benchmark import System, benchmark, median_ratio
from osd_hf.prompts import encode_turn

PARTS = ("systems", "useless", "verification", "index")
SETS = (*common.DATASETS, "dialogsum", "mt_bench")
BOTH = "both"


class Lab:
    """The lab pair, what its drafts learned, and the requests of each data set."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.names = args, args.datasets
        self.target, _, self.tokenizer = load_pair()

    def static(self, draft: str) -> Any:
        return load_pair(draft=str(data_folder() / "lab" / draft)).draft

    @functools.cache  # noqa: B019 - there is one
    def traces(self, name: str) -> tuple[list[Trace], list[list[int]]]:
        """Requests that are learned from, and the prompts of later ones."""
        args = self.args
        if name != "mt_bench":
            total = args.learn + 2 * args.requests
            traces = recorded(name, 0, total, args.traces, (self.target, None, self.tokenizer))
        else:
            traces = recorded_chats(args.traces, self.target, self.tokenizer)
        later = [t.prompt_ids.tolist() for t in traces[-2 * args.requests :]]
        room = 1024 - args.max_new_tokens  # positions of the lab's models
        return traces[: -2 * args.requests][: args.learn], [p for p in later if len(p) <= room][: args.requests]

    def learned(self, draft: str, name: str) -> Any:
        """After serving what is learned from; kept in a folder, as it takes minutes."""
        folder = self.args.traces / "learned" / f"hybrid-{draft}-{name}-{self.args.learn}"
        if not folder.exists():
            config = OnlineConfig(num_assistant_tokens=K)
            report = simulated(self.static(draft), self.traces(name)[0], config, bar=f"{draft} learns {name}")
            report.draft.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Bundled(Lab):
    """The bundled pair, with its own domains for data sets."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.names = args, DOMAINS
        self.target, self.given, self.tokenizer = load_bundled()

    def static(self, draft: str) -> Any:
        return copy.deepcopy(self.given)

    @functools.cache  # noqa: B019 - there is one
    def traces(self, name: str) -> tuple[list[Trace], list[list[int]]]:
        args = self.args
        examples = bundled_prompts(name, args.learn + args.requests, seed=1)
        ids = [encode_turn(self.tokenizer, example.prompt) for example in examples]
        store = CorrectionStore(args.traces / f"bundled-{name}-n{args.learn}")
        if len(store) == 0:
            bounds = {"max_new_tokens": args.max_new_tokens, "domain": name}
            for trace in list(record_traces(self.target, ids[: args.learn], **bounds)):
                store.append(trace)
            store.flush()
        return list(store), ids[args.learn :]


def systems_of(draft: Any, static: Any, earlier: Sequence[Trace], *, compiles: bool) -> list[System]:
    """The target alone, transformers' ways, and ours."""
    auto: dict[str, Any] = {"num_assistant_tokens": "auto", "earlier": earlier}
    compiled = {"compile_draft": compiles, "compile_target": compiles}
    return [
        System("alone", "alone"),
        System("prompt lookup", "prompt_lookup", num_assistant_tokens=10),
        System("stock", "stock", static),
        System("draft only, draft compiled", "lean", draft, "auto", candidates="draft", compile_draft=compiles),
        System("draft only", "lean", draft, candidates="draft", **auto, **compiled),
        System("text only", "lean", draft, candidates="text", **auto, **compiled),
        System(BOTH, "lean", draft, **auto, **compiled),
        System("both, own text", "lean", draft, "auto", **compiled),
    ]


def answered(lab: Lab, systems: list[System], questions: dict[str, list[list[int]]]) -> dict[str, Any]:
    """What [`benchmark`] finds, and the hybrid beside each of the others."""
    report = benchmark(
        lab.target, systems, questions, max_new_tokens=lab.args.max_new_tokens, watched_requests=4, show_progress=True,
    )  # fmt: skip
    found: dict[str, Any] = {
        "figures": {s.name: report.figures(s.name) for s in systems},
        "over_alone": {s.name: report.ratio(s.name, "alone") for s in systems[1:]},
        "both_over": {s.name: report.ratio(BOTH, s.name) for s in systems if s.name != BOTH},
    }
    for system in systems[1:]:
        figures, ratio = found["figures"][system.name], found["over_alone"][system.name]
        share, predicted = figures["share_of_tokens"], figures["predicted"] or {"speedup_wide": float("nan")}
        over = found["both_over"].get(system.name)
        print(
            f"  {system.name}: x{ratio['median']:.3f} {[round(x, 3) for x in ratio['interval']]} of alone, "
            f"{figures['block_efficiency']:.2f} tokens a forward, of the draft {share['draft']:.0%}, of text "
            f"{share['text']:.0%}, model {predicted['speedup_wide']:.2f} of pooled {figures['pooled_speedup']:.2f}, "
            f"{figures['outputs']}" + ("" if over is None else f", both over it {over['median']:.3f}")
        )
    return found


def systems(lab: Lab, args: argparse.Namespace) -> dict[str, Any]:
    """All systems on each data set."""
    found: dict[str, Any] = {}
    for draft in args.drafts:
        own = Bundled(args) if draft == "bundled" else lab
        for name in own.names:
            earlier, later = own.traces(name)
            print(f"\n{draft}, {name}, {len(later)} requests")
            ways = systems_of(own.learned(draft, name), own.static(draft), earlier, compiles=args.compile)
            found[f"{draft} {name}"] = answered(own, ways, {name: later})
    return found


def useless(lab: Lab, args: argparse.Namespace) -> dict[str, Any]:
    """What it costs where there is nothing to gain."""
    static = lab.static(args.drafts[0])
    noise = lab.static(args.drafts[0])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in noise.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    draw = random.Random(0)
    random_ids = [[draw.randrange(3, 4096) for _ in range(100)] for _ in range(args.requests)]
    real = lab.traces(args.datasets[0])[1]
    cases = {
        "useless draft": (noise, real), "random tokens": (static, random_ids), "both useless": (noise, random_ids),
    }  # fmt: skip
    found = {}
    for case, (draft, questions) in cases.items():
        for compiles in (False, True)[: 1 + args.compile]:
            compiled = {"compile_draft": compiles, "compile_target": compiles}
            ways = [System("alone", "alone"), System(BOTH, "lean", draft, "auto", **compiled)]
            report = benchmark(
                lab.target, ways, {case: questions}, max_new_tokens=args.max_new_tokens, watched_requests=1
            )
            row = found[case + ", compiled" * compiles] = report.ratio(BOTH, "alone")
            print(f"  {case}{', compiled' * compiles}: x{row['median']:.3f} {row['interval']} of alone")
    return found


def verification(lab: Lab, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of the compiled target against eager ones at equal tokens, and answers through both."""
    wide = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            eos_token_id=2,
            bos_token_id=1,
            pad_token_id=0,
        )  # fmt: skip
    ).eval()
    found: dict[str, Any] = {}
    name = args.datasets[0]
    for title, target in {"lab": lab.target, "8 layers of 512": wide}.items():
        draft = lab.static(args.drafts[0])
        ways = [
            OnlineAssistant(
                target, draft, lab.tokenizer,
                OnlineConfig(num_assistant_tokens=K, compile_target=compiles, update_strategy="manual"),
            )
            for compiles in (False, True)
        ]  # fmt: skip
        ratios, identical, total = [], 0, args.answers if title == "lab" else max(args.answers // 10, 2)
        draw = random.Random(0)
        compiled_before = None
        for i, ids in enumerate(tqdm(prompts(name, lab.tokenizer, total, 1), desc=f"{title} answers")):
            prompt = torch.tensor([ids])
            settings = {
                "attention_mask": torch.ones_like(prompt), "do_sample": False,
                "max_new_tokens": draw.randrange(1, args.max_new_tokens + 1),
            }  # fmt: skip
            times, outputs = [], []
            for turn in range(2):
                way = ways[(i + turn) % 2]
                started = time.perf_counter()
                outputs.append(way.generate(prompt, learn=False, **settings))
                times.append(time.perf_counter() - started)
            identical += int(torch.equal(*outputs))
            if i >= 20:
                ratios.append(times[i % 2] / times[(i + 1) % 2])
            elif i == 19:
                compiled_before = counters["stats"]["unique_graphs"]
        again = counters["stats"]["unique_graphs"] - (compiled_before or counters["stats"]["unique_graphs"])
        found[title] = {
            "eager_over_compiled": median_ratio(ratios or [1.0]), "identical": identical, "of": total,
            "compiled_after_warm_up": again,
        }  # fmt: skip
        print(f"  {title}: {found[title]}")
    return found


def index(lab: Lab, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What an index of real text takes."""
    text = [t for name in args.datasets[:2] for trace in lab.traces(name)[0]
            for t in (*trace.prompt_ids.tolist(), *trace.completion_ids.tolist())]  # fmt: skip
    draw, found = random.Random(0), []
    for count in args.indexed:
        held = [draw.randrange(4096) if i >= len(text) and draw.random() < 0.2 else text[i % len(text)]
                for i in range(count)]  # fmt: skip
        own, started = TextIndex(1 << (count - 1).bit_length()), time.perf_counter()
        own.extend(held)
        append = (time.perf_counter() - started) / count
        lookups = []
        for _ in range(2000):
            end = draw.randrange(LONGEST, len(text))
            started = time.perf_counter()
            next(own.guesses(text[end - LONGEST : end]), None)
            lookups.append(time.perf_counter() - started)
        found.append({
            "tokens": count, "bytes_per_token": own.nbytes / len(own), "append_us": 1e6 * append,
            "lookup_us": 1e6 * statistics.median(lookups), "lookup_us_99": 1e6 * sorted(lookups)[-20],
        })  # fmt: skip
        print("  ", found[-1])
    return found


def plot(found: dict[str, Any], name: str) -> None:
    """Times as fast as the target alone, by data set and system."""
    with drawing(name, figsize=(12, 4.5)) as (_, axes):
        axis, names = axes[0, 0], list(found)
        shown = [system for system in next(iter(found.values()))["over_alone"] if "compiled" not in system]
        width = 0.8 / len(shown)
        for i, system in enumerate(shown):
            heights = [found[one]["over_alone"][system]["median"] for one in names]
            axis.bar([x + i * width for x in range(len(names))], heights, width, label=system)
        axis.axhline(1.0, color="0.5", linestyle="--")
        axis.set_xticks([x + 0.4 - width / 2 for x in range(len(names))], names, rotation=20, ha="right", fontsize=8)
        axis.set_ylabel("times as fast as the target alone")
        axis.legend(fontsize=8, ncols=3)


def main() -> None:
    parser = make_parser(__doc__, "hybrid", seed=False)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--drafts", nargs="+", default=["draft", "draft-1layer"])
    parser.add_argument("--datasets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--learn", type=int, default=450)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--answers", type=int, default=500, help="of the part verification")
    parser.add_argument("--indexed", type=int, nargs="+", default=[1000, 100_000, 1_000_000], help="tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lab = Lab(args)
    report = common.report_parts(args, lambda part: globals()[part](lab, args))
    if "systems" in report:
        plot(report["systems"], args.name)


if __name__ == "__main__":
    main()
