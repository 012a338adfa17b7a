"""Measure SmolLM2-135M-Instruct with a draft made from its own layers, before and after the draft has learned.

    make smollm2                                             # fetches the model; prompts of the bundled domains
    OSD_HF_DATA=... python recipes/smollm2.py --timed 40     # four data sets, all later requests timed; hours
    python recipes/smollm2.py --device cuda --make-seconds 60                # a GPU: minutes
    python recipes/smollm2.py --smoke --target FOLDER --traces FOLDER      # any small model, in seconds

The draft is made once and trained on everyday questions. For each data set a copy learns by the default rule from
`--requests` recorded answers, in a simulation with the counts of a live run. The first `--live` requests are also
served live, with learning included. Acceptance (k = 5) is measured by replay of `--later` other requests; the first
`--timed` of these are answered live by all systems in turns, greedily and sampled as the model card says. Results are
kept in `--traces`, so that a killed run can continue.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from common import K, gain, kept, make_parser, prompts, recorded_chats, recording, simulated, write_report
from tqdm import tqdm

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig, Trace
from osd_hf.bundled import DOMAINS
from osd_hf.cli.quickstart import split_prompts
from osd_hf.distillation.make_draft import MakeDraftConfig, train_draft
from osd_hf.evaluation.benchmark import System, benchmark, compare_outputs, in_turns, median_ratio, serve_before
from osd_hf.evaluation.display import figure, ratio_text, stats_interval, text_table
from osd_hf.models import Pair, fixed_k, load_model, load_tokenizer, prompt_room
from osd_hf.prompts import encode_turn
from osd_hf.replay import redraft, replay_each
from osd_hf_app.pair import NAME, SAMPLING, everyday_prompts, smollm2

MAKE_SECONDS = 300.0
SETS = ("gsm8k", "finance_alpaca", "code_search_net_python", "mt_bench")
ALONE, COMPILED, STOCK, OURS = "target alone", "target compiled", "stock as made", "ours learned"
KERNELS, LOOKUP = "our kernels, no drafting", "prompt lookup, our kernels"
TEXT, DRAFT = "ours, past text alone", "ours, learned draft alone"
SMOKE: dict[str, Any] = {
    "datasets": ["finance"], "requests": 6, "live": 4, "later": 4, "timed": 2, "max_new_tokens": 8,
    "layers": 1, "make_steps": 2, "compile": False, "threads": 1,
}  # fmt: skip


# --- the pair, and what it is asked ---------------------------------------------------------------------------------


def kept_draft(place: Path, tokenizer: Any, make: Callable[[], Any], device: str) -> Any:
    """Return the draft in a folder. If there is none, make and save it first."""
    if not place.is_dir():
        unfinished = place.with_name(f"{place.name}.unfinished")
        for part in (make(), tokenizer):
            part.save_pretrained(unfinished)
        unfinished.rename(place)
    return load_model(str(place), dtype="float32", device=device)


def made(args: argparse.Namespace) -> tuple[Pair, dict[str, Any]]:
    """Return the target with the draft that is made from its layers, and facts about it."""
    if args.target is None:
        target, tokenizer = smollm2(device=args.device)
    else:
        target, tokenizer = load_model(args.target, dtype="float32", device=args.device), load_tokenizer(args.target)
    how = (args.seed, args.layers, args.make_steps, args.make_seconds, args.max_new_tokens, *elsewhere(args))
    place = args.traces / "-".join(map(str, ("draft", Path(args.target).name if args.target else NAME, *how)))
    told = place.with_name(f"{place.name}.json")

    def make() -> Any:
        config = MakeDraftConfig(
            num_layers=args.layers, max_seconds=args.make_seconds, max_steps=args.make_steps,
            max_new_tokens=args.max_new_tokens, seed=args.seed,
        )  # fmt: skip
        found = train_draft(target, tokenizer, config, prompts=everyday_prompts(args.seed))
        told.write_text(json.dumps(found.to_dict()))
        return found.draft

    draft = kept_draft(place, tokenizer, make, device=args.device)
    return Pair(target, draft, tokenizer), json.loads(told.read_text())


def traffic(name: str, args: argparse.Namespace, pair: Pair) -> tuple[list[Trace], list[Trace]]:
    """Return requests to learn from and later ones, with the target's greedy answers."""
    target, draft, tokenizer = pair
    room = prompt_room(target.config, draft.config, args.max_new_tokens) or 2**20
    asked: list[list[int]]
    if name == "mt_bench":
        chats = recorded_chats(args.traces, target, tokenizer, args.max_new_tokens)
        traces = [trace for trace in chats if len(trace.prompt_ids) <= room]
    else:
        if name in DOMAINS:
            both = itertools.chain(*split_prompts(args.requests, args.later, args.seed))
            asked = [encode_turn(tokenizer, example.prompt) for example in both if example.domain == name]
        else:
            asked = prompts(name, tokenizer, args.requests + args.later, args.seed)
        place = args.traces / f"{name}-seed{args.seed}-{args.requests}-{args.later}-{args.max_new_tokens}"
        traces = recording(place, target, [ids for ids in asked if len(ids) <= room], name, args.max_new_tokens)
    return traces[: -args.later][: args.requests], traces[-args.later :]


# --- learning -------------------------------------------------------------------------------------------------------


def compiled(args: argparse.Namespace) -> dict[str, Any]:
    return {"compile_draft": args.compile or "auto", "compile_target": args.compile}


def learned(name: str, args: argparse.Namespace, pair: Pair, traces: Sequence[Trace]) -> tuple[Any, dict[str, Any]]:
    """Return the draft after these requests, by simulation, and the cost of learning."""
    place, told = (args.traces / f"{name}-learned-{learning_sizes(args)}{end}" for end in ("", ".json"))

    def learn() -> Any:
        report = simulated(pair.draft, traces, OnlineConfig(), bar=f"learn {name}")
        outcomes = Counter(decision.outcome for decision in report.decisions)
        found = {"requests": len(traces), "learning_seconds": report.learner.seconds, "versions": outcomes}
        told.write_text(json.dumps(found))
        return report.draft

    draft = kept_draft(place, pair.tokenizer, learn, device=args.device)
    return draft, json.loads(told.read_text())


def served(args: argparse.Namespace, pair: Pair, traces: Sequence[Trace]) -> dict[str, Any]:
    """Serve live and learn, starting with the original draft."""
    seconds, tokens, outcomes = 0.0, 0, Counter[str]()
    with OnlineAssistant(*pair, OnlineConfig(**compiled(args))) as assistant:
        assistant.warm_up(max(len(t.prompt_ids) for t in traces) + args.max_new_tokens)
        for trace in tqdm(traces, desc="serve live", leave=False):
            ids, settings = common.greedy(trace.prompt_ids, args.max_new_tokens, args.device)
            started = time.perf_counter()
            output = assistant.generate(ids, **settings)
            seconds += time.perf_counter() - started
            answer = output[0, ids.shape[1] :].tolist()
            tokens += len(answer)
            known = trace.completion_ids.tolist()
            outcomes[compare_outputs(pair.target, trace.prompt_ids.tolist(), known, answer)] += 1
        return {
            "requests": len(traces), "tokens_per_second": tokens / seconds, "seconds": seconds,
            "learning_seconds": assistant.learning_seconds, "saved_seconds": assistant.saved_seconds or 0.0,
            "versions": Counter(decision.outcome for decision in assistant.decisions), "outputs": outcomes,
        }  # fmt: skip


# --- answering ------------------------------------------------------------------------------------------------------


def greedily(
    name: str, args: argparse.Namespace, pair: Pair, draft: Any, traces: Sequence[Trace], asked: list[list[int]]
) -> dict[str, Any]:
    """Run all systems in turns; return the results of each with the prediction of the cost model."""
    k, on_cpu = pair.draft.generation_config.num_assistant_tokens, args.device == "cpu"
    systems = [
        System(ALONE, "alone"),
        *[System(KERNELS, "alone", kernels=True)] * on_cpu,
        *[System(COMPILED, "alone", compile_target=True)] * (args.compile and not on_cpu),
        System("prompt lookup", "prompt_lookup", num_assistant_tokens=10),
        *[System(LOOKUP, "prompt_lookup", num_assistant_tokens=10, kernels=True)] * on_cpu,
        System(STOCK, "stock", pair.draft, k),
        System("ours as made", "lean", pair.draft, "auto", **compiled(args)),
        System(TEXT, "lean", draft, "auto", candidates="text", earlier=traces, **compiled(args)),
        System(DRAFT, "lean", draft, "auto", candidates="draft", earlier=traces, **compiled(args)),
        System(OURS, "lean", draft, "auto", earlier=traces, **compiled(args)),
    ]
    report = benchmark(
        pair.target, systems, {name: asked}, max_new_tokens=args.max_new_tokens, measure_costs=True,
        tokenizer=pair.tokenizer, show_progress=True,
    )  # fmt: skip
    return {system.name: report.figures(system.name) for system in systems}


def sampled(
    args: argparse.Namespace, pair: Pair, draft: Any, earlier: Sequence[Trace], asked: Sequence[list[int]]
) -> dict[str, Any]:
    """Run the target, stock assisted generation, and osd_hf in turns, sampled; return also the expected acceptance."""
    target, own = pair.target, pair.target.generation_config
    settings = {name: getattr(own, name, None) or value for name, value in SAMPLING.items()}
    traces: list[Trace] = []
    config = OnlineConfig(update_strategy="manual", **compiled(args))
    with OnlineAssistant(target, draft, pair.tokenizer, config) as assistant, fixed_k(pair.draft):
        serve_before(assistant, earlier)
        ways = {
            ALONE: target.generate,
            STOCK: functools.partial(target.generate, assistant_model=pair.draft),
            OURS: functools.partial(assistant.generate, learn=False, on_trace=traces.append),
        }

        def answer(way: str, request: tuple[int, list[int]]) -> tuple[int, float]:
            number, prompt = request
            ids, given = common.greedy(prompt, args.max_new_tokens, args.device)
            torch.manual_seed(number)
            started = time.perf_counter()
            output = ways[way](ids, **given | {"do_sample": True, **settings})
            return output.shape[1] - ids.shape[1], time.perf_counter() - started

        # The first one warms up.
        requests = tqdm(list(enumerate([asked[0], *asked])), desc="sampled", unit="request")
        taken = list(in_turns([functools.partial(answer, way) for way in ways], requests))[1:]
    counts = np.array(taken, float)  # request, way, tokens and seconds
    rates, totals = counts[..., 0] / counts[..., 1], counts.sum(0)
    return {
        "settings": settings,
        "tokens_per_second": dict(zip(ways, (totals[:, 0] / totals[:, 1]).tolist(), strict=True)),
        "times_alone": {way: median_ratio(rates[:, i] / rates[:, 0]) for i, way in enumerate(ways)},
        **alphas(pair.draft, draft, traces[1:]),
    }


def alphas(before: Any, after: Any, traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the acceptance of the original and of the learned draft on the same answers."""
    stats = [sum(replay_each(draft, traces, K), AcceptanceStats()) for draft in (before, after)]
    told = {"as made": stats[0], "learned": stats[1]}
    return {
        "alpha": {way: {"alpha": s.alpha, "interval": list(s.alpha_interval)} for way, s in told.items()},
        **gain(*stats),
        "shown": " to ".join(f"{s.alpha:.3f} {stats_interval(s)}" for s in stats),
    }


def measured(name: str, args: argparse.Namespace, pair: Pair) -> dict[str, Any]:
    """Return the results of one data set."""
    traces, later = traffic(name, args, pair)
    served_before = redraft(pair.draft, traces)
    asked = [trace.prompt_ids.tolist() for trace in later[: args.timed]]
    draft, recorded = learned(name, args, pair, traces)

    def part(what: str, find: Any, *given: Any) -> dict[str, Any]:
        return kept(args.traces / f"{name}-{what}-{sizes_of(args)}.json", functools.partial(find, *given))

    return {
        "learned_from": len(traces), "later": len(later), "timed": len(asked),
        **alphas(pair.draft, draft, later),
        "learning": {"recorded": recorded, "live": part("live", served, args, pair, traces[: args.live])},
        "greedy": part("greedy", greedily, name, args, pair, draft, served_before, asked),
        "sampled": part("sampled", sampled, args, pair, draft, served_before, asked),
    }  # fmt: skip


def sizes_of(args: argparse.Namespace) -> str:
    """Return the part of file names that tells runs of other sizes apart."""
    sizes = (learning_sizes(args), args.live, args.timed)
    return "-".join(map(str, sizes)) + "-compiled" * args.compile


def learning_sizes(args: argparse.Namespace) -> str:
    """Return the same for learned drafts."""
    sizes = (args.seed, args.requests, args.later, args.max_new_tokens, args.layers, args.make_steps,
             args.make_seconds, *elsewhere(args))  # fmt: skip
    return "-".join(map(str, sizes))


def elsewhere(args: argparse.Namespace) -> list[str]:
    """Return the device in file names, if it is not the CPU."""
    return [] if args.device == "cpu" else [args.device]


# --- what is shown --------------------------------------------------------------------------------------------------


def show(name: str, found: dict[str, Any]) -> None:
    """Print a data set as a table."""
    print(
        f"\n{name}: learned from {found['learned_from']} requests, measured on {found['later']} later ones, "
        f"{found['timed']} of them timed\nalpha as made, and learned: {found['shown']}; sampled: "
        f"{found['sampled']['shown']}\n"
    )
    rows, sampling = [], found["sampled"]
    for system, part in found["greedy"].items():
        predicted, outputs = part["predicted"] or {}, part["outputs"]
        other = [figure(sampling["tokens_per_second"].get(system), 1)]
        other += [ratio_text(sampling["times_alone"][system]) if system in sampling["times_alone"] else "-"]
        rows.append([
            system, figure(part["tokens_per_second"], 1), ratio_text(part["times_alone"]),
            figure(part["pooled_speedup"], 2), figure(predicted.get("speedup"), 2),
            figure(predicted.get("speedup_wide"), 2), figure(part["block_efficiency"], 2),
            f"{outputs['identical']}/{sum(outputs.values())}", *other,
        ])  # fmt: skip
    print(text_table(
        ["greedy", "tokens/s", "times alone", "pooled", "model", "model, wide", "a forward", "identical",
         "sampled tokens/s", "times alone"], rows,
    ))  # fmt: skip
    for how, part in found["learning"].items():
        saved = f", saved {part['saved_seconds']:.1f} s" if "saved_seconds" in part else ""
        rate = f", {part['tokens_per_second']:.1f} tokens/s all counted" if "tokens_per_second" in part else ""
        print(f"learning, {how}: {part['requests']} requests, took {part['learning_seconds']:.1f} s{saved}{rate}")


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return geometric means over the data sets, and counts of greedy outputs."""
    systems = next(iter(found.values()))["greedy"]
    ways = {way: [one["greedy"][way]["times_alone"]["median"] for one in found.values()] for way in systems}
    sampled = {way: [one["sampled"]["times_alone"][way]["median"] for one in found.values()] for way in (STOCK, OURS)}
    outputs = Counter[str]()
    for one in found.values():
        for part in one["greedy"].values():
            outputs.update(part["outputs"])
    return {
        "greedy": {way: statistics.geometric_mean(ratios) for way, ratios in ways.items()},
        "sampled": {way: statistics.geometric_mean(ratios) for way, ratios in sampled.items()},
        "outputs": outputs,
    }


def settings() -> argparse.Namespace:
    """Parse the flags."""
    parser = make_parser(__doc__, "smollm2")
    has_data = "OSD_HF_DATA" in os.environ and (common.data_folder() / "data").is_dir()
    parser.add_argument("--target", help=f"a model's folder in place of {NAME}")
    sets = SETS if has_data else DOMAINS
    parser.add_argument("--datasets", nargs="+", choices=[*SETS, *DOMAINS], default=list(sets))
    parser.add_argument("--requests", type=int, default=200, help="per data set, that are learned from")
    parser.add_argument("--live", type=int, default=40, help="of these, the first ones, served live")
    parser.add_argument("--later", type=int, default=40, help="per data set, that acceptance is measured on")
    parser.add_argument("--timed", type=int, default=16, help="of these, the first ones, answered by all systems")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--make-seconds", type=float, default=MAKE_SECONDS, help="that making the draft may take")
    parser.add_argument("--make-steps", type=int, help="of its learning, at most")
    parser.add_argument("--layers", type=int, help="of the draft; by default chosen by measurement")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="such as cuda, where the draft is captured as graphs")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes by default")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**SMOKE)
    args = parser.parse_args()
    args.traces = args.traces / "smollm2"
    args.traces.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = settings()
    torch.set_num_threads(args.threads)
    started, found = time.time(), dict[str, Any]()
    pair, how = made(args)
    sizes = {name: value for name, value in vars(args).items() if name not in ("traces", "target", "name")}
    report: dict[str, Any] = {"target": NAME if args.target is None else Path(args.target).name, "draft": how}
    for name in args.datasets:
        found[name] = measured(name, args, pair)
        show(name, found[name])
        write_report(
            args.name, {**report, "sizes": sizes, "datasets": found, "geometric_mean": summary(found)},
            **common.run_facts(started),
        )  # fmt: skip
    means = summary(found)
    print(
        "\ntimes the target alone, geometric means: "
        + ", ".join(f"{way} {ratio:.2f}" for way, ratio in means["greedy"].items())
        + f"; sampled: {', '.join(f'{way} {ratio:.2f}' for way, ratio in means['sampled'].items())}"
        f"\ngreedy outputs: {dict(means['outputs'])}"
    )


if __name__ == "__main__":
    main()
