"""
How fast drafting is, on real text: lean against transformers' stock generator at equal tokens, the learned drafts
against the target alone and against the cost model, and `num_assistant_tokens="auto"` against the best fixed k.

    OSD_HF_DATA=... python recipes/lab_drafting.py                                # everything, two drafts, 4 data sets
    OSD_HF_DATA=... python recipes/lab_drafting.py --parts equal --pair bundled   # the bundled pair
    OSD_HF_DATA=... python recipes/lab_drafting.py --requests 1 --learn 8 --drafts draft --datasets gsm8k \\
        --parts equal learned pace useless loop --max-new-tokens 16 --no-compile                              # smoke

Requests are answered by all systems in turns; ratios of tokens per second are taken request by request, with a 95%
bootstrap interval of their median. A learned draft has served the first 480 of 600 recorded requests of its data set,
and answers others here. One thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, TEMPLATES, data_folder, load_pair, prompts, recorded, simulated, write_report
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.generation import utils as generation_utils
from transformers.generation.candidate_generator import CandidateGenerator

from osd_hf import OnlineAssistant, OnlineConfig, replay
from osd_hf.bundled import DOMAINS, bundled_prompts, load_bundled
from osd_hf.evaluation.benchmark import System, benchmark
from osd_hf.prompts import encode_turn
from osd_hf.utils.report import provenance

PARTS = ("equal", "learned", "pace", "useless", "loop")


class Lab:
    """The lab pair, its drafts as they came and as they learned, and the requests of each data set."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.total = args.learn * 5 // 4
        self.target, _, self.tokenizer = load_pair()

    def static(self, draft: str) -> Any:
        return load_pair(draft=str(data_folder() / "lab" / draft)).draft

    def learned(self, draft: str, name: str) -> Any:
        """After serving the first `--learn` recorded requests; kept in a folder, as it takes minutes."""
        folder = self.args.traces / "learned" / f"{draft}-{name}-{self.args.learn}"
        if not folder.exists():
            traces = self.traces(name)[: self.args.learn]
            report = simulated(self.static(draft), traces, OnlineConfig(), bar=f"{draft} learns {name}")
            report.draft.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def traces(self, name: str) -> list[Any]:
        """A quarter more than are learned from."""
        return recorded(name, 0, self.total, self.args.traces, (self.target, None, self.tokenizer))

    def requests(self, name: str) -> list[list[int]]:
        """The first of those that no draft has learned from."""
        return prompts(name, self.tokenizer, self.total, 0)[self.args.learn :][: self.args.requests]


def equal(lab: Lab, args: argparse.Namespace) -> dict[str, Any]:
    """Stock, lean and compiled with the same static draft at k = 5."""
    if args.pair == "bundled":
        target, draft, tokenizer = load_bundled()
        questions = {
            domain: [encode_turn(tokenizer, e.prompt) for e in bundled_prompts(domain, args.requests, seed=1)]
            for domain in DOMAINS
        }
        drafts = {"draft": draft}
    else:
        target, questions = lab.target, {name: lab.requests(name) for name in args.datasets}
        drafts = {name: lab.static(name) for name in args.drafts}
    found = {}
    for name, draft in drafts.items():
        systems = [System("alone", "alone"), System("stock", "stock", draft), System("lean", "lean", draft)]
        if args.compile:
            systems.append(System("compiled", "lean", draft, compile_draft=True))
        report = benchmark(target, systems, questions, max_new_tokens=args.max_new_tokens, show_progress=True)
        found[name] = {
            "over_stock": {s.name: report.ratio(s.name, "stock") for s in systems[2:]},
            "over_alone": {s.name: report.ratio(s.name, "alone") for s in systems[1:]},
            "rounds": {s.name: report.rounds_of(s.name).to_dict() for s in systems},
            "figures": {s.name: report.figures(s.name) for s in systems},
        }
        print(f"\nequal, {args.pair} {name}:", *rows(found[name]["over_stock"], "over stock"), sep="\n  ")
        for system, times in found[name]["rounds"].items():
            parts = (f"{p} {1e3 * times[p + '_seconds']:.2f}" for p in ("draft", "target", "remaining"))
            print(f"  {system}: {1e3 * times['seconds']:.2f} ms a round:", ", ".join(parts))
    return found


def learned(lab: Lab, args: argparse.Namespace) -> dict[str, Any]:
    """The learned draft, lean, auto, beside the target alone, stock with the static draft, and the cost model."""
    found: dict[str, Any] = {}
    for draft in args.drafts:
        for name in args.datasets:
            after = lab.learned(draft, name)
            systems = [
                System("alone", "alone"),
                System("lookup", "prompt_lookup"),
                System("stock static", "stock", lab.static(draft)),
                System("lean learned", "lean", after),
                System("auto learned", "lean", after, "auto", candidates="draft"),
            ]
            if args.compile:
                systems.append(
                    System("auto learned compiled", "lean", after, "auto", candidates="draft", compile_draft=True)
                )
            report = benchmark(
                lab.target, systems, {name: lab.requests(name)}, max_new_tokens=args.max_new_tokens,
                watched_requests=6, show_progress=True,
            )  # fmt: skip
            row = {s.name: report.figures(s.name) for s in systems}
            found[f"{draft} {name}"] = row
            print(f"\nlearned, {draft}, {name}:")
            for system, figures in list(row.items())[1:]:
                predicted = figures["predicted"] or {"speedup": float("nan"), "speedup_wide": float("nan")}
                print(
                    f"  {system}: alpha {figures['alpha']:.3f}, x{figures['times_alone']['median']:.3f} of alone "
                    f"{interval(figures['times_alone'])}, pooled x{figures['pooled_speedup']:.3f}, predicted "
                    f"{predicted['speedup']:.3f}, with the measured forward {predicted['speedup_wide']:.3f}; "
                    f"{figures['outputs']}"
                )
    return found


def pace(lab: Lab, args: argparse.Namespace) -> dict[str, Any]:
    """Auto against the fixed k that replay and the cost model find best, and against its neighbors."""
    found: dict[str, Any] = {}
    for draft in args.drafts:
        for name in args.datasets:
            for state in ("static", "learned"):
                model = lab.static(draft) if state == "static" else lab.learned(draft, name)
                c = cost_ratio(lab, model, args)
                held_out = lab.traces(name)[args.learn :]
                best = max(range(1, 13), key=lambda k: predicted_speedup(model, held_out, k, c))
                ks = sorted({max(best - 1, 1), best, best + 1})
                systems = [System("alone", "alone"), System("auto", "lean", model, "auto", candidates="draft")]
                systems += [System(f"k={k}", "lean", model, k) for k in ks]
                questions = {name: lab.requests(name)}
                report = benchmark(
                    lab.target, systems, questions, max_new_tokens=args.max_new_tokens, show_progress=True
                )
                row = {
                    "c": c,
                    "predicted_best_k": best,
                    "over_alone": {s.name: report.ratio(s.name, "alone") for s in systems[1:]},
                    "auto_over": {f"k={k}": report.ratio("auto", f"k={k}") for k in ks},
                    "drafted_per_round": report.figures("auto")["drafted_per_round"],
                }
                # The best of the three is the one that auto is the least ahead of.
                row["auto_over_best"] = min(row["auto_over"].values(), key=lambda r: r["median"])
                found[f"{draft} {name} {state}"] = row
                print(f"\npace, {draft}, {name}, {state}: c {c:.3f}, predicted k {best}")
                print("  ", *rows(row["over_alone"], "of alone"), sep="\n  ")
                print(f"  auto / best {row['auto_over_best']['median']:.3f} {interval(row['auto_over_best'])}")
    return found


def useless(lab: Lab, args: argparse.Namespace) -> dict[str, Any]:
    """Auto with a draft that is never right."""
    draft = lab.static(args.drafts[0])
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    systems = [
        System("alone", "alone"),
        System("auto", "lean", draft, "auto", candidates="draft"),
        System("k=5", "lean", draft),
    ]
    questions = {name: lab.requests(name) for name in args.datasets}
    report = benchmark(lab.target, systems, questions, max_new_tokens=args.max_new_tokens, show_progress=True)
    found = {s.name: report.ratio(s.name, "alone") for s in systems[1:]}
    print("\nuseless draft:", *rows(found, "of alone"), sep="\n  ")
    return found


class _Nothing(CandidateGenerator):  # type: ignore[misc]
    """Drafts nothing, at no cost."""

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return input_ids, None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        pass


def loop(lab: Lab, args: argparse.Namespace) -> dict[str, Any]:
    """The time of a round outside of draft and target: lean at k = 5, and transformers' loop with nothing drafted."""
    draft = lab.static(args.drafts[0])
    assistant = OnlineAssistant(
        lab.target, draft, lab.tokenizer, OnlineConfig(num_assistant_tokens=5, update_strategy="manual")
    )
    stock = generation_utils.GenerationMixin._get_candidate_generator
    rest: dict[str, list[float]] = {"nothing": [], "lean": [], "lean, learning": []}

    def one(way: str, prompt: list[int]) -> None:
        ids = torch.tensor([prompt])
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": args.max_new_tokens}
        with Watch(lab.target, assistant.draft) as watch:
            if way == "nothing":
                generation_utils.GenerationMixin._get_candidate_generator = lambda *a, **k: _Nothing()
                try:
                    lab.target.generate(ids, assistant_model=draft, streamer=watch, **settings)
                finally:
                    generation_utils.GenerationMixin._get_candidate_generator = stock
            else:
                assistant.generate(ids, learn=way != "lean", streamer=watch, **settings)
        rest[way].append(watch.remaining())

    questions = [p for name in args.datasets for p in lab.requests(name)]
    for number, prompt in enumerate(tqdm([questions[0], *questions], desc="loop")):
        ways = list(rest)
        for turn in range(len(ways)):
            one(ways[(number + turn) % len(ways)], prompt)
    found = {way: median_of(values[1:]) for way, values in rest.items()}
    print("\nloop, ms of a round that are neither draft nor target:")
    for way, value in found.items():
        print(f"  {way}: {1e3 * value:.3f}")
    return {"remaining_seconds": found, "lean_more_seconds": found["lean"] - found["nothing"]}


class Watch:
    """A streamer that times rounds, and the forwards of both models in them; the first round is left out."""

    def __init__(self, *models: Any) -> None:
        self.models, self.moments, self.inside = models, [], 0.0

    def __enter__(self) -> Watch:
        # Not by hooks, which take as long to be called as much of what is measured here.
        for model in self.models:
            model.forward = self.timed(model.forward)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for model in self.models:
            del model.forward

    def timed(self, forward: Any) -> Any:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return forward(*args, **kwargs)
            finally:
                if len(self.moments) > 1:
                    self.inside += time.perf_counter() - began

        return run

    def put(self, value: Any) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        pass

    def remaining(self) -> float:
        rounds = len(self.moments) - 2
        return (self.moments[-1] - self.moments[1] - self.inside) / max(rounds, 1)


def cost_ratio(lab: Lab, draft: Any, args: argparse.Namespace) -> float:
    """c: a drafted token over a token of the target alone, forwards only."""
    systems = [System("alone", "alone"), System("lean", "lean", draft)]
    questions = {args.datasets[0]: lab.requests(args.datasets[0])[:2]}
    report = benchmark(lab.target, systems, questions, max_new_tokens=args.max_new_tokens)
    return float((report.predicted("lean") or {"c": 0.2})["c"])


def predicted_speedup(draft: Any, traces: list[Any], k: int, c: float) -> float:
    return replay(draft, traces, k).block_efficiency / (c * k + 1)


def median_of(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def interval(ratio: dict[str, Any]) -> str:
    return "[{:.3f}, {:.3f}]".format(*ratio["interval"])


def rows(ratios: dict[str, Any], of_what: str) -> list[str]:
    return [f"{name}: x{ratio['median']:.3f} {interval(ratio)} {of_what}" for name, ratio in ratios.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pair", choices=("lab", "bundled"), default="lab", help="of the part equal")
    parser.add_argument("--datasets", nargs="+", choices=list(TEMPLATES), default=list(TEMPLATES))
    parser.add_argument("--drafts", nargs="+", default=["draft", "draft-1layer"])
    parser.add_argument("--requests", type=int, default=24, help="per data set")
    parser.add_argument("--learn", type=int, default=480, help="recorded requests that a draft learns from")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--traces", type=Path, default=Path(__file__).parent / "traces")
    parser.add_argument("--name", default="lab_drafting")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lab = Lab(args)
    path = RESULTS / f"{args.name}.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    report.pop("provenance", None)
    for part in args.parts:
        name = f"{part} {args.pair}" if part == "equal" else part
        report[name] = globals()[part](lab, args)
        facts = provenance()
        report.setdefault("measured", {})[name] = {key: facts[key] for key in ("command", "commit", "date")}
        write_report(args.name, report, requests=args.requests, threads=1)


if __name__ == "__main__":
    main()
