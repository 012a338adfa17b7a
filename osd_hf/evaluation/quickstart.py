"""The quickstart: serve four domains with one draft that learns, and compare it with the original draft."""

from __future__ import annotations

import random
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from osd_hf.acceptance import AcceptanceStats, Comparison, figures_of
from osd_hf.assistant import OnlineAssistant
from osd_hf.bundled import DOMAINS, Example, bundled_prompts
from osd_hf.config import OnlineConfig
from osd_hf.decoding.record import record_traces
from osd_hf.errors import ConfigError
from osd_hf.evaluation import display
from osd_hf.evaluation.benchmark import BenchmarkReport, System, answer_greedily, benchmark
from osd_hf.evaluation.display import figure, ratio_text, text_table
from osd_hf.models import Pair
from osd_hf.prompts import encode_turn
from osd_hf.replay import replay_each
from osd_hf.trace import Trace
from osd_hf.utils.context import choose_threads
from osd_hf.utils.report import make_folder, provenance, write_report

K = 5
WAYS = ("target alone", "prompt lookup", "static draft", "learned draft", "learned draft, target compiled")
COLUMNS = ("alone", "lookup x", "static x", "learned x", "compiled x")  # of the ways


def _size(default: int, minimum: int, help: str) -> Any:
    return field(default=default, metadata={"help": help, "minimum": minimum})


@dataclass(frozen=True)
class QuickstartSizes:
    """Numbers of requests of [`quickstart`], per domain."""

    learn_requests: int = _size(100, 2, "requests per domain to serve and learn from")
    later_requests: int = _size(20, 2, "later requests per domain for measuring alpha, never learned from")
    timed_requests: int = _size(12, 1, "later requests per domain that are also answered live in each way")
    max_new_tokens: int = _size(96, 2, "maximum tokens of an answer")

    def __post_init__(self) -> None:
        if self.timed_requests > self.later_requests:
            of = f"{self.timed_requests} of {self.later_requests}"
            raise ConfigError(f"`timed_requests` are part of the `later_requests`, got {of}.")


def quickstart(
    pair: Pair,
    sizes: QuickstartSizes,
    *,
    seed: int,
    threads: int | None,
    output_dir: Path,
    write: Callable[[str], object],
    compile_target: bool = True,
) -> dict[str, Any]:
    """
    Serve a stream of prompts from all domains with one draft that learns, and compare the draft with its original on
    later prompts. Returns the content of `report.json`.

    Args:
        pair (`Pair`), sizes (`QuickstartSizes`): The models; numbers of requests.
        seed (`int`): Seed of the prompts, their order, and learning.
        threads (`int`, *optional*): Number of torch threads; by default [`choose_threads`] decides.
        output_dir (`Path`): Folder of `report.json`, `alpha.png` and `domains.png`.
        write (`Callable[[str], object]`): Prints a text.
        compile_target (`bool`, *optional*, defaults to `True`): Whether to time the target compiled, too.
    """
    config = OnlineConfig(num_assistant_tokens=K, seed=seed)
    started = time.perf_counter()
    make_folder(output_dir)
    learned_from, later = split_prompts(sizes, seed)
    stream, asked = (
        [(example.domain, encode_turn(pair.tokenizer, example.prompt)) for example in examples]
        for examples in (learned_from, later)
    )
    threads_before = torch.get_num_threads()
    used, thread_seconds = choose_threads(pair.target, lambda: answer_greedily(pair.target, asked[0][1], 4), threads)
    num_timed, num_ways = len(DOMAINS) * sizes.timed_requests, 4 + compile_target
    write(
        f"1. A small draft proposes tokens while its target answers {len(stream)} prompts, and learns from the "
        f"answers.\n2. {len(later)} later prompts show how many proposals are right, before and after.\n"
        f"3. {num_timed} of them are answered in {num_ways} ways, to compare the speed.\n"
        f"Torch threads: {used}.\n"
    )
    try:
        with OnlineAssistant(*pair, config) as assistant:
            assistant.drafts.set_pace(min_effort=1.0)  # shows what learning can reach
            served = serve_stream(assistant, stream, sizes.max_new_tokens)
            balance = {"learning_seconds": assistant.learning_seconds, "saved_seconds": assistant.saved_seconds}
            prompts = [ids for _, ids in asked]
            recorded = record_traces(pair.target, prompts, max_new_tokens=sizes.max_new_tokens, num_logprobs=1)
            answered = list(display.progress(recorded, "later prompts", "request", len(prompts)))
            frozen, static = (replay_each(pair.draft, traces, K) for traces in (served, answered))
            learned = replay_each(assistant.draft, answered, K)
            timed = _timed(pair, assistant.draft, served, asked, sizes, compile_target=compile_target)
    finally:
        torch.set_num_threads(threads_before)
    while_serving = {"frozen": frozen, "learned": [AcceptanceStats.from_trace(t) for t in served]}
    compared = Comparison([domain for domain, _ in asked], {"static": static, "learned": learned})
    by_domain = {name: _domain_report(name, part, timed) for name, part in compared.parts().items()}
    report: dict[str, Any] = {
        "provenance": provenance(seed=seed, device=str(pair.target.device), threads=used),
        "defaults": OnlineConfig().to_dict(),  # shows whether a report is outdated
        "sizes": asdict(sizes),
        "config": config.to_dict(),
        "by_domain": by_domain,
        "outputs": by_domain["all"]["outputs"],
        "updates": assistant.version,
        "thread_seconds": thread_seconds,
        **balance,
    }
    serving = Comparison([t.domain for t in served], while_serving)
    display.plot_alpha(output_dir / "alpha.png", serving, title=display.WHILE_SERVING)
    labels = {"static": "static", "learned": "learned while serving"}
    title = "Acceptance on later prompts, never learned from"
    display.plot_domains(output_dir / "domains.png", compared, labels, title=title)
    answer = pair.tokenizer.decode(answered[0].completion_ids.tolist(), skip_special_tokens=True)
    for line in _shown(report, later[0], answer):
        write(line)
    report["total_seconds"] = round(time.perf_counter() - started, 2)
    write_report(output_dir / "report.json", report)
    write(f"\n{report['total_seconds']:.0f} s in all. Wrote report.json, alpha.png and domains.png to {output_dir}.")
    write(f"\n{_summary(report)}")
    return report


def split_prompts(sizes: QuickstartSizes, seed: int) -> tuple[list[Example], list[Example]]:
    """Return the examples to learn from, shuffled, and later examples that pose other problems."""
    learned: list[Example] = []
    later: list[Example] = []
    for domain in DOMAINS:
        wanted = sizes.learn_requests + sizes.later_requests
        examples = bundled_prompts(domain, wanted + wanted // 2 + 20, seed=seed)
        seen = {e.problem for e in examples[: sizes.learn_requests]}
        fresh = [e for e in examples[sizes.learn_requests :] if e.problem not in seen]
        if len(fresh) < sizes.later_requests:
            raise ConfigError(f"The domain {domain} has only {len(fresh)} later requests that pose new problems.")
        learned += examples[: sizes.learn_requests]
        later += fresh[: sizes.later_requests]
    random.Random(seed).shuffle(learned)
    return learned, later


def serve_stream(
    assistant: OnlineAssistant, requests: Sequence[tuple[str, Sequence[int]]], max_new_tokens: int
) -> list[Trace]:
    """Serve requests of domains and token ids greedily while the assistant learns; returns their traces."""
    traces: list[Trace] = []
    with display.alpha_bar(len(requests), "serving") as advance:
        for domain, prompt_ids in requests:
            ids = torch.tensor([list(prompt_ids)], device=assistant.target.device)
            how: dict[str, Any] = {
                "do_sample": False,
                "max_new_tokens": max_new_tokens,
                "attention_mask": torch.ones_like(ids),
            }
            assistant.generate(ids, domain=domain, on_trace=traces.append, **how)
            advance(AcceptanceStats.from_trace(traces[-1]), version=assistant.version)
    return traces


def _timed(
    pair: Pair,
    learned: Any,
    earlier: Sequence[Trace],
    asked: Sequence[tuple[str, list[int]]],
    sizes: QuickstartSizes,
    *,
    compile_target: bool,
) -> BenchmarkReport:
    """Time the target alone, prompt lookup, the original draft, and the learned draft with earlier text."""
    prompts = {domain: [ids for name, ids in asked if name == domain][: sizes.timed_requests] for domain in DOMAINS}
    alone, lookup, static, ours, compiled = WAYS
    systems = [
        System(alone, "alone"),
        System(lookup, "prompt_lookup", num_assistant_tokens=K),
        System(static, "stock", pair.draft, K),
        System(ours, "lean", learned, "auto", earlier=earlier),
    ]
    if compile_target:
        systems.append(System(compiled, "lean", learned, "auto", earlier=earlier, compile_target=True))
    how: dict[str, Any] = {"max_new_tokens": sizes.max_new_tokens, "tokenizer": pair.tokenizer, "show_progress": True}
    return benchmark(pair.target, systems, prompts, **how)


def _domain_report(name: str, part: Comparison, timed: BenchmarkReport) -> dict[str, Any]:
    """Return the figures of a domain, or of all. A target that could not be compiled is left out."""
    shown = [s.name for s in timed.systems if s.name not in timed.facts["target_not_compiled"]]
    ways = {way: timed.figures(way, None if name == "all" else name) for way in shown}
    outputs = [ways[way]["outputs"] for way in shown[1:]]
    return {
        **{side: figures_of(stats) for side, stats in part.totals.items()},
        "gain": part.gain,
        "tokens_per_second": {way: figures["tokens_per_second"] for way, figures in ways.items()},
        "times_as_fast": {way: ways[way]["times_alone"] for way in shown[1:]},
        "outputs": {kind: sum(counts[kind] for counts in outputs) for kind in outputs[0]},
    }


def _shown(report: dict[str, Any], sample: Example, answer: str) -> list[str]:
    rows, speeds = [], []
    for name, part in report["by_domain"].items():
        efficiency = " > ".join(figure(part[draft]["block_efficiency"], 2) for draft in ("static", "learned"))
        alphas, gain = [_alpha(part[draft]) for draft in ("static", "learned")], figure(part["gain"], sign=True)
        rows.append([name, *alphas, gain, efficiency])
        alone, times = f"{part['tokens_per_second'][WAYS[0]]:.0f}", map(ratio_text, part["times_as_fast"].values())
        speeds.append([name, alone, *times, f"{part['outputs']['identical']}/{sum(part['outputs'].values())}"])
    sizes, columns = report["sizes"], COLUMNS[: len(report["by_domain"]["all"]["tokens_per_second"])]
    compiled = (
        ";\ncompiled: the same, with the target's forwards compiled by torch, which takes half a minute once"
        if columns == COLUMNS
        else ""
    )
    prompt, answer = (textwrap.indent(text, "    ") for text in (sample.prompt, answer))
    return [
        f"\nLater prompts, never learned from ({sizes['later_requests']} per domain, k = {K}, threshold 0):\n",
        text_table(["domain", "alpha static", "alpha learned", "gain", "tokens/forward"], rows),
        f"\nTokens per second of the target alone, and times as fast ({sizes['timed_requests']} of these requests per "
        f"domain in turns,\nmedian of the ratios, torch threads: {report['provenance']['threads']}). Lookup: "
        f"transformers' prompt lookup; static: its assisted\ngeneration with the draft as it was, k = {K}; learned: "
        f"with the learned draft and past text, at its own pace{compiled}.\n",
        text_table(["domain", *columns, "identical"], speeds),
        f"\nWhile the {len(DOMAINS) * sizes['learn_requests']} requests were served, learning took "
        f"{report['learning_seconds']:.1f} s and saved {report['saved_seconds'] or 0:.1f} s: rounds that the static "
        "draft would have needed more.",
        f"\nA prompt ({sample.domain}):\n{prompt}\nand its answer:\n{answer}",
    ]


def _alpha(part: dict[str, Any]) -> str:
    interval = part["alpha_interval"]
    return figure(part["alpha"]) if interval is None else f"{part['alpha']:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def _summary(report: dict[str, Any]) -> str:
    every, outputs = report["by_domain"]["all"], report["outputs"]
    learned, *compiled = (f"{of['median']:.1f}" for way, of in every["times_as_fast"].items() if way in WAYS[3:])
    now, before = (figure(100 * every[draft]["alpha"], 0) for draft in ("learned", "static"))
    if outputs["tied"] or outputs["differing"]:
        own = (
            f"{outputs['identical']} of {sum(outputs.values())} answers were the target's own, token for token, "
            f"{outputs['tied']} part from it at a tie of its top two tokens, {outputs['differing']} DIFFER"
        )
    else:
        own = "every answer was the target's own, token for token"
    return (
        f"Your draft now proposes {now} of 100 tokens right instead of {before}, and answers come "
        f"{learned} times as fast as from the target alone"
        + "".join(f", {times} times with the target compiled" for times in compiled)
        + f"; {own}."
    )
