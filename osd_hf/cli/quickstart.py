"""The command `osd-hf quickstart`: serve four domains with a draft that learns, and compare it with the original."""

from __future__ import annotations

import random
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osd_hf.acceptance import AcceptanceStats, Comparison, figures_of
from osd_hf.assistant import OnlineAssistant
from osd_hf.bundled import DOMAINS, Example, bundled_prompts
from osd_hf.cli import FAILED
from osd_hf.cli.settings import PLACEMENT, THREADS, CommandParser, Reporting, ServedPairSettings, flag
from osd_hf.config import OnlineConfig
from osd_hf.draft_head import DraftHead
from osd_hf.errors import ConfigError
from osd_hf.evaluation import display
from osd_hf.evaluation.benchmark import BenchmarkReport, System, answer_greedily, answer_traced, benchmark
from osd_hf.evaluation.display import figure, ratio_text, text_table
from osd_hf.prompts import encode_turn
from osd_hf.recording import record_traces
from osd_hf.replay import replay_each
from osd_hf.trace import Trace
from osd_hf.utils.context import choose_threads
from osd_hf.utils.report import make_folder, provenance, write_report

K = 5
SIZES = ("learn_requests", "later_requests", "timed_requests", "max_new_tokens")
WAYS = ("target alone", "prompt lookup", "static draft", "learned draft", "learned draft, target compiled")
COLUMNS = ("alone", "lookup x", "static x", "learned x", "compiled x")  # of the ways


@dataclass(frozen=True, kw_only=True)
class QuickstartSettings(ServedPairSettings, Reporting):
    """Flags of `osd-hf quickstart`."""

    learn_requests: int = flag("requests per domain to serve and learn from", 100, minimum=2)
    later_requests: int = flag("later requests per domain, never learned from", 20, minimum=2)
    timed_requests: int = flag("later requests per domain that are also timed", 12, minimum=1)
    max_new_tokens: int = flag("maximum tokens of an answer", 96, minimum=2)
    seed: int = flag("seed of the prompts and of learning", 0)
    threads: int | None = flag(THREADS, None, minimum=1)
    compile_target: bool = flag("also time it with the target compiled, which needs a C++ compiler", True)
    output_dir: Path = flag("folder of report and plots", Path("osd_hf_quickstart"))

    def check(self) -> None:
        if self.timed_requests > self.later_requests:
            counts = f"{self.timed_requests} of {self.later_requests}"
            raise ConfigError(f"--timed-requests must be at most --later-requests, got {counts}.")


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command."""
    return CommandParser([QuickstartSettings], without=PLACEMENT, **how)


def quickstart_command(settings: QuickstartSettings) -> int:
    """Serve prompts of all domains with one draft that learns, and compare the draft with its original on later
    prompts; returns the exit code."""
    pair = settings.load_pair(dtype="float32", device="cpu")
    sizes = {name: getattr(settings, name) for name in SIZES}
    folder, max_new_tokens = settings.output_dir, settings.max_new_tokens
    config = OnlineConfig(num_assistant_tokens=K, seed=settings.seed)
    started = time.perf_counter()
    make_folder(folder)
    learned_from, later = split_prompts(settings.learn_requests, settings.later_requests, settings.seed)
    stream, asked = (
        [(example.domain, encode_turn(pair.tokenizer, example.prompt)) for example in examples]
        for examples in (learned_from, later)
    )
    threads, thread_seconds = choose_threads(
        pair.target, lambda: answer_greedily(pair.target, asked[0][1], 4), settings.threads
    )
    num_timed, num_ways = len(DOMAINS) * settings.timed_requests, 4 + settings.compile_target
    settings.say(
        f"1. A small draft proposes tokens while its target answers {len(stream)} prompts, and learns from the "
        f"answers.\n2. {len(later)} later prompts show how many proposals are right, before and after.\n"
        f"3. {num_timed} of them are answered in {num_ways} ways, to compare the speed.\n"
        f"Torch threads: {threads}.\n"
    )
    with OnlineAssistant(*pair, config) as assistant:
        assistant.drafts.set_pace(min_effort=1.0)  # shows what learning can reach
        served = serve_stream(assistant, stream, max_new_tokens)
        balance = {"learning_seconds": assistant.learning_seconds, "saved_seconds": assistant.saved_seconds}
        prompts = [ids for _, ids in asked]
        recorded = record_traces(pair.target, prompts, max_new_tokens=max_new_tokens, num_logprobs=1)
        answered = list(display.progress(recorded, "later prompts", "request", len(prompts)))
        frozen, static = (replay_each(pair.draft, traces, K) for traces in (served, answered))
        learned = replay_each(assistant.draft, answered, K)
        timed_prompts = {d: [ids for name, ids in asked if name == d][: settings.timed_requests] for d in DOMAINS}
        alone, lookup, static_draft, ours, compiled = WAYS
        ways = [
            System(alone, "alone"),
            System(lookup, "prompt_lookup", num_assistant_tokens=K),
            # transformers' loop knows no such heads
            System(static_draft, "lean" if isinstance(pair.draft, DraftHead) else "stock", pair.draft, K),
            System(ours, "lean", assistant.draft, "auto", earlier=served),
        ]
        if settings.compile_target:
            ways.append(System(compiled, "lean", assistant.draft, "auto", earlier=served, compile_target=True))
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "tokenizer": pair.tokenizer, "show_progress": True}
        timed = benchmark(pair.target, ways, timed_prompts, **how)
    while_serving = {"frozen": frozen, "learned": [AcceptanceStats.from_trace(t) for t in served]}
    compared = Comparison([domain for domain, _ in asked], {"static": static, "learned": learned})
    by_domain = {name: _domain_report(name, part, timed) for name, part in compared.parts().items()}
    report: dict[str, Any] = {
        "provenance": provenance(seed=settings.seed, device=str(pair.target.device), threads=threads),
        "defaults": OnlineConfig().to_dict(),  # shows whether a report is outdated
        "sizes": sizes,
        "config": config.to_dict(),
        "by_domain": by_domain,
        "outputs": by_domain["all"]["outputs"],
        "updates": assistant.version,
        "thread_seconds": thread_seconds,
        **balance,
    }
    serving = Comparison([t.domain for t in served], while_serving)
    display.plot_learning(folder / "learning.png", serving, title=display.WHILE_SERVING)
    labels = {"static": "static", "learned": "learned while serving"}
    title = "Acceptance on later prompts, never learned from"
    display.plot_domains(folder / "domains.png", compared, labels, title=title)
    answer = pair.tokenizer.decode(answered[0].completion_ids.tolist(), skip_special_tokens=True)
    for line in _shown(report, later[0], answer):
        settings.say(line)
    report["total_seconds"] = round(time.perf_counter() - started, 2)
    write_report(folder / "report.json", report)
    settings.say(
        f"\n{report['total_seconds']:.0f} s in all. Wrote report.json, learning.png and domains.png to {folder}.\n\n"
        f"{_summary(report)}"
    )
    settings.write_json(report)
    return FAILED if report["outputs"]["differing"] else 0


def split_prompts(learn_requests: int, later_requests: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Return the examples to learn from, shuffled, and later examples that pose other problems."""
    learned: list[Example] = []
    later: list[Example] = []
    for domain in DOMAINS:
        wanted = learn_requests + later_requests
        examples = bundled_prompts(domain, wanted + wanted // 2 + 20, seed=seed)
        seen = {e.problem for e in examples[:learn_requests]}
        fresh = [e for e in examples[learn_requests:] if e.problem not in seen]
        if len(fresh) < later_requests:
            raise ConfigError(f"The domain {domain} has only {len(fresh)} later requests that pose new problems.")
        learned += examples[:learn_requests]
        later += fresh[:later_requests]
    random.Random(seed).shuffle(learned)
    return learned, later


def serve_stream(
    assistant: OnlineAssistant, requests: Sequence[tuple[str, Sequence[int]]], max_new_tokens: int
) -> list[Trace]:
    """Serve requests of domains and token ids greedily while the assistant learns; returns their traces."""
    traces: list[Trace] = []
    with display.learning_bar(len(requests), "serving") as advance:
        for domain, prompt_ids in requests:
            _, trace = answer_traced(
                assistant, prompt_ids, domain=domain, do_sample=False, max_new_tokens=max_new_tokens
            )
            traces.append(trace)
            advance(AcceptanceStats.from_trace(trace), version=assistant.version)
    return traces


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
        rows.append([name, efficiency, *alphas, gain])
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
        text_table(["domain", "tokens/forward", "acceptance static", "learned", "gain"], rows),
        f"\nTokens per second of the target alone, and times as fast ({sizes['timed_requests']} of these requests per "
        f"domain in turns,\nmedian of the ratios, torch threads: {report['provenance']['threads']}). Lookup: "
        f"transformers' prompt lookup; static: assisted\ngeneration with the draft as it was, k = {K}; learned: "
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
    now, before = (figure(every[draft]["block_efficiency"], 2) for draft in ("learned", "static"))
    if outputs["tied"] or outputs["differing"]:
        own = (
            f"{outputs['identical']} of {sum(outputs.values())} answers were the target's own, token for token, "
            f"{outputs['tied']} part from it at a tie of its top two tokens, {outputs['differing']} DIFFER"
        )
    else:
        own = "every answer was the target's own, token for token"
    return (
        f"Your draft alone now gives {now} tokens per target forward instead of {before}, and with text answers come "
        f"{learned} times as fast as from the target alone (transformers' `generate`)"
        + "".join(f", {times} times with the target compiled" for times in compiled)
        + f"; {own}."
    )
