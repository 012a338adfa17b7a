"""The quickstart: one draft serves and learns through all four domains, and is measured on later prompts."""

from __future__ import annotations

import copy
import random
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from osd_hf.assistant import OnlineAssistant
from osd_hf.bench import display
from osd_hf.bench.benchmark import BenchmarkReport, System, benchmark, choose_threads, cores
from osd_hf.bench.display import figure, ratio_text, text_table
from osd_hf.bundled import DOMAINS, bundled_prompts, check_answer
from osd_hf.bundled.example import Example
from osd_hf.capture.hook import record_traces
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError
from osd_hf.learning.updater import Updater
from osd_hf.metrics import AcceptanceStats, Comparison, figures_of
from osd_hf.pair import Pair
from osd_hf.prompts import encode_turn
from osd_hf.replay import replay_each
from osd_hf.trace import Trace
from osd_hf.utils.report import make_folder, provenance, write_report

K = 5
WAYS = ("target alone", "static draft", "learned draft")


def _size(default: int, help: str, least: int = 1) -> Any:
    return field(default=default, metadata={"help": help, "least": least})


@dataclass(frozen=True)
class QuickstartSizes:
    """
    How much of everything. The fields say what they mean in the `help` of their metadata.

    Raises:
        ConfigError: a number that is too small; more timed requests than later ones.
    """

    learn_requests: int = _size(80, "requests per domain that are served and learned from", 2)
    later_requests: int = _size(40, "later requests per domain, never learned from, that alpha is measured on", 2)
    timed_requests: int = _size(12, "those of them that are also answered live, three ways in alternation")
    max_new_tokens: int = _size(96, "bound of an answer", 2)
    ceiling_epochs: int = _size(30, "passes over the learned requests that make the offline ceiling")
    ceiling_seconds: int = _size(50, "bound of the time that the ceiling may take")

    def __post_init__(self) -> None:
        for f in fields(self):
            if getattr(self, f.name) < f.metadata["least"]:
                raise ConfigError(f"`{f.name}` must be at least {f.metadata['least']}, got {getattr(self, f.name)}.")
        if self.timed_requests > self.later_requests:
            raise ConfigError(
                f"`timed_requests` are some of the `later_requests`, got {self.timed_requests} of "
                f"{self.later_requests}."
            )


def quickstart(
    pair: Pair, sizes: QuickstartSizes, *, seed: int, threads: int | None, output_dir: Path,
    write: Callable[[str], object],
) -> dict[str, Any]:  # fmt: skip
    """
    Serve a shuffled stream of all domains with one draft that learns, then measure it on later prompts against the
    draft as it was and against a fresh copy trained offline on the same requests.

    Args:
        pair (`Pair`), sizes (`QuickstartSizes`): Left as it is; and how much of everything.
        seed (`int`): Seed of the prompts, of their order, and of learning.
        threads (`int`, *optional*): Threads of torch; with `None` the faster of one and all cores, measured.
        output_dir (`Path`), write (`Callable[[str], object]`):
            The folder gets `report.json`, `alpha.png` and `domains.png`; `write` takes the lines that are shown.

    Returns:
        `dict[str, Any]`: what `report.json` holds.

    Raises:
        ConfigError: threads below 1, a negative seed, an output folder that cannot be written.
    """
    config = OnlineConfig(num_assistant_tokens=K, seed=seed, min_effort=1.0)  # what learning can do, whatever it takes
    if threads is not None and threads < 1:
        raise ConfigError(f"`threads` must be at least 1, got {threads}.")
    started = time.perf_counter()
    make_folder(output_dir)
    learned_from, later = learned_and_later(sizes, seed)
    stream, asked = (
        [(example.domain, encode_turn(pair.tokenizer, example.prompt)) for example in examples]
        for examples in (learned_from, later)
    )
    threads_before = torch.get_num_threads()
    try:
        found = _measured(pair, config, sizes, stream, asked, threads, write)
    finally:
        torch.set_num_threads(threads_before)
    answers = [pair.tokenizer.decode(t.completion_ids.tolist(), skip_special_tokens=True) for t in found.later]
    right = [(e.domain, check_answer(e, a)) for e, a in zip(later, answers, strict=True)]
    outcomes = [answer.outcome for way in WAYS[1:] for answer in found.timed.answers_of(way)]
    report: dict[str, Any] = {
        "provenance": provenance(seed=seed, device=str(pair.target.device), threads=found.threads),
        "sizes": asdict(sizes),
        "config": config.to_dict(),
        "by_domain": {n: _domain_report(n, part, right, found.timed) for n, part in found.compared.parts().items()},
        "outputs": {name: outcomes.count(name) for name in ("identical", "tied", "differing")},
        **found.facts,
    }
    display.plot_alpha(output_dir / "alpha.png", found.serving, title=display.WHILE_SERVING)
    labels = {"static": "static", "learned": "learned while serving", "ceiling": "trained offline, many epochs"}
    title = "Acceptance on later prompts, never learned from"
    display.plot_domains(output_dir / "domains.png", found.compared.bars(labels), title=title)
    sample = next((i for i, (_, ok) in enumerate(right) if ok), 0)
    for line in _shown(report, later[sample], answers[sample]):
        write(line)
    report["total_seconds"] = round(time.perf_counter() - started, 2)
    write_report(output_dir / "report.json", report)
    write(f"\n{report['total_seconds']:.0f} s in all. Wrote report.json, alpha.png and domains.png to {output_dir}.")
    return report


class _Measured(NamedTuple):
    serving: Comparison  # frozen and learned, on the requests that were learned from
    compared: Comparison  # static, learned and ceiling, on the later prompts
    later: list[Trace]
    timed: BenchmarkReport
    threads: int
    facts: dict[str, Any]  # for the report


def _measured(
    pair: Pair, config: OnlineConfig, sizes: QuickstartSizes, stream: Sequence[tuple[str, list[int]]],
    asked: Sequence[tuple[str, list[int]]], threads: int | None, write: Callable[[str], object],
) -> _Measured:  # fmt: skip
    """Serve and learn, replay the later prompts, train the ceiling, and time three ways to answer."""
    seconds, started = dict[str, float](), time.perf_counter()

    def done(phase: str) -> None:
        seconds[phase] = round(time.perf_counter() - started - sum(seconds.values()), 2)

    serving_threads, thread_seconds = choose_threads(pair.target, asked[0][1], threads)
    done("threads")
    with OnlineAssistant(*pair, config) as assistant:
        write(f"serving {len(stream)} requests of {len(DOMAINS)} domains, shuffled; the draft learns meanwhile")
        served = serve_stream(assistant, stream, sizes.max_new_tokens)
        balance = {"learning_seconds": assistant.learning_seconds, "saved_seconds": assistant.saved_seconds}
        done("serving")
        torch.set_num_threads(threads or cores())
        ids = [one for _, one in asked]
        recorded = record_traces(pair.target, ids, max_new_tokens=sizes.max_new_tokens, num_logprobs=1)
        later = list(display.progress(recorded, "later prompts", "request", len(ids)))
        frozen, static = (replay_each(pair.draft, traces, K) for traces in (served, later))
        learned = replay_each(assistant.draft, later, K)
        done("replay")
        best, ceiling = _ceiling(pair.draft, served, later, config, sizes)
        done("ceiling")
        torch.set_num_threads(serving_threads)
        timed = _timed(pair, assistant.draft, served, asked, sizes)
        done("timing")
    while_serving = {"frozen": frozen, "learned": [AcceptanceStats.from_trace(t) for t in served]}
    serving = Comparison([t.domain for t in served], while_serving)
    compared = Comparison([domain for domain, _ in asked], {"static": static, "learned": learned, "ceiling": best})
    facts = {
        "ceiling": ceiling, "updates": assistant.version, "thread_seconds": thread_seconds, "phase_seconds": seconds,
        **balance,
    }  # fmt: skip
    return _Measured(serving, compared, later, timed, serving_threads, facts)


def learned_and_later(sizes: QuickstartSizes, seed: int) -> tuple[list[Example], list[Example]]:
    """What is learned from, shuffled over the domains; and what comes later, none of it the same problem."""
    learned: list[Example] = []
    later: list[Example] = []
    for domain in DOMAINS:
        wanted = sizes.learn_requests + sizes.later_requests
        examples = bundled_prompts(domain, wanted + wanted // 2 + 20, seed=seed)
        seen = {e.content for e in examples[: sizes.learn_requests]}
        fresh = [e for e in examples[sizes.learn_requests :] if e.content not in seen]
        if len(fresh) < sizes.later_requests:
            raise ConfigError(f"The domain {domain} has only {len(fresh)} later requests that pose new problems.")
        learned += examples[: sizes.learn_requests]
        later += fresh[: sizes.later_requests]
    random.Random(seed).shuffle(learned)
    return learned, later


def serve_stream(
    assistant: OnlineAssistant, requests: Sequence[tuple[str, Sequence[int]]], max_new_tokens: int
) -> list[Trace]:
    """Serve requests, each a domain and token ids, greedily and with a progress bar, while the assistant learns from
    them; returns their traces."""
    traces: list[Trace] = []
    with display.alpha_bar(len(requests), "serving") as advance:
        for domain, prompt_ids in requests:
            ids = torch.tensor([list(prompt_ids)], device=assistant.target.device)
            assistant.generate(
                ids, attention_mask=torch.ones_like(ids), domain=domain, on_trace=traces.append, do_sample=False,
                max_new_tokens=max_new_tokens,
            )  # fmt: skip
            advance(AcceptanceStats.from_trace(traces[-1]), version=assistant.version)
    return traces


def _ceiling(
    draft: Any, traces: Sequence[Trace], later: Sequence[Trace], config: OnlineConfig, sizes: QuickstartSizes
) -> tuple[list[AcceptanceStats], dict[str, Any]]:
    """A fresh copy of the draft after many passes over the same traces: the best of what it scores after each few."""
    updater = Updater(draft, replace(config, replay_fraction=1.0))
    trained = copy.deepcopy(draft)
    updater.buffer.extend(trace for trace in traces if len(trace))
    steps_per_epoch = max(1, round(len(traces) / config.batch_size))
    best, best_epoch, epoch = replay_each(draft, later, K), 0, 0
    started = time.perf_counter()
    for epoch in display.progress(range(1, sizes.ceiling_epochs + 1), "offline ceiling", "epoch"):
        updater.update(steps_per_epoch)
        is_last = epoch == sizes.ceiling_epochs or time.perf_counter() - started > sizes.ceiling_seconds
        if is_last or epoch % 5 == 0:
            updater.copy_to(trained)
            stats = replay_each(trained, later, K)
            if sum(stats, AcceptanceStats()).alpha >= sum(best, AcceptanceStats()).alpha:
                best, best_epoch = stats, epoch
        if is_last:
            break
    return best, {"epochs": epoch, "best_epoch": best_epoch, "steps_per_epoch": steps_per_epoch}


def _timed(
    pair: Pair, learned: Any, earlier: Sequence[Trace], asked: Sequence[tuple[str, list[int]]], sizes: QuickstartSizes
) -> BenchmarkReport:
    """The target alone, transformers' assisted generation with the draft as it was, and ours with the learned one and
    the text of what it was learned from."""
    prompts = {domain: [ids for name, ids in asked if name == domain][: sizes.timed_requests] for domain in DOMAINS}
    alone, static, ours = WAYS
    systems = [
        System(alone, "alone"), System(static, "stock", pair.draft, K),
        System(ours, "lean", learned, "auto", earlier=earlier),
    ]  # fmt: skip
    return benchmark(
        pair.target, systems, prompts, max_new_tokens=sizes.max_new_tokens, watched_requests=0,
        tokenizer=pair.tokenizer, show_progress=True,
    )  # fmt: skip


def _domain_report(
    name: str, part: Comparison, right: Sequence[tuple[str, bool]], timed: BenchmarkReport
) -> dict[str, Any]:
    """The figures of a domain, or of all."""
    answered = [is_right for domain, is_right in right if name in (domain, "all")]
    gap = part.totals["ceiling"].alpha - part.totals["static"].alpha
    ways = {way: timed.figures(way, None if name == "all" else name) for way in WAYS}
    outputs = [ways[way]["outputs"] for way in WAYS[1:]]
    return {
        **{side: figures_of(stats) for side, stats in part.totals.items()},
        "gap_closed": part.gain / gap if gap > 0 else None,
        "tokens_per_second": {way: figures["tokens_per_second"] for way, figures in ways.items()},
        "times_as_fast": {way: ways[way]["times_alone"] for way in WAYS[1:]},
        "outputs": sum(sum(counts.values()) for counts in outputs),
        "outputs_identical": sum(counts["identical"] for counts in outputs),
        "answers": len(answered),
        "answers_right": sum(answered),
    }


def _shown(report: dict[str, Any], sample: Example, answer: str) -> list[str]:
    rows, speeds = [], []
    for name, part in report["by_domain"].items():
        closed = "-" if part["gap_closed"] is None else f"{part['gap_closed']:.0%}"
        efficiency = " > ".join(figure(part[draft]["block_efficiency"], 2) for draft in ("static", "learned"))
        rows.append([
            name, _alpha(part["static"]), _alpha(part["learned"]), figure(part["ceiling"]["alpha"]), closed,
            efficiency, f"{part['answers_right']}/{part['answers']}",
        ])  # fmt: skip
        speeds.append([
            name, *(f"{rate:.0f}" for rate in part["tokens_per_second"].values()),
            *(ratio_text(ratio) for ratio in part["times_as_fast"].values()),
            f"{part['outputs_identical']}/{part['outputs']}",
        ])  # fmt: skip
    sizes, outputs, ceiling = report["sizes"], report["outputs"], report["ceiling"]
    rising = ", where it was still rising" if ceiling["best_epoch"] == ceiling["epochs"] else ""
    tied = f", {outputs['tied']} part at a tie of the target's top two tokens" if outputs["tied"] else ""
    differing = f", {outputs['differing']} DIFFER" if outputs["differing"] else ""
    prompt, answer = (textwrap.indent(text, "    ") for text in (sample.prompt, answer))
    return [
        f"\nLater prompts, never learned from ({sizes['later_requests']} per domain, k = {K}, threshold 0):\n",
        text_table(
            ["domain", "alpha static", "alpha learned", "ceiling", "gap closed", "tokens/forward", "right"], rows
        ),
        f"\nCeiling: a fresh copy of the draft, trained offline on the same {len(DOMAINS) * sizes['learn_requests']} "
        f"requests; the best of {ceiling['epochs']} passes was number {ceiling['best_epoch']}{rising},\n"
        "chosen on these later prompts, which favors the ceiling.",
        f"\nTokens per second and times as fast as the target alone ({sizes['timed_requests']} requests per domain in "
        f"alternation,\nmedian of the ratios; torch threads: {report['provenance']['threads']}). Static: "
        f"transformers' own assisted generation, k = {K};\nlearned: lean drafting at its own pace.\n",
        text_table(["domain", "alone", "static", "learned", "static x", "learned x", "identical"], speeds),
        f"\n{outputs['identical']} of {sum(outputs.values())} assisted outputs are the target's own, "
        f"token by token{tied}{differing}.",
        f"\nWhile the {len(DOMAINS) * sizes['learn_requests']} requests were served, learning took "
        f"{report['learning_seconds']:.1f} s and saved {report['saved_seconds'] or 0:.1f} s: rounds that the static "
        "draft would have needed more.",
        f"\nA prompt ({sample.domain}):\n{prompt}\nand its answer:\n{answer}",
    ]


def _alpha(part: dict[str, Any]) -> str:
    interval = part["alpha_interval"]
    return figure(part["alpha"]) if interval is None else f"{part['alpha']:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
