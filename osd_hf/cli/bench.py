"""The commands `osd-hf bench` and `osd-hf quickstart`: systems side by side, and the main job on the bundled pair."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from osd_hf.assistant import OnlineAssistant
from osd_hf.bundled import DOMAINS
from osd_hf.cli import FAILED
from osd_hf.cli.arguments import flag, in_groups, part
from osd_hf.cli.flags import (
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_KWARGS,
    THREADS,
    DraftRevision,
    Reporting,
    Rows,
    TargetLoading,
    TargetRevision,
)
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, DataError
from osd_hf.evaluation.benchmark import BenchmarkReport, System, benchmark
from osd_hf.evaluation.controlled import (
    LABEL,
    SHAPES,
    ControlledAcceptance,
    answer_greedily,
    controlled_acceptance,
    random_pair,
)
from osd_hf.evaluation.display import figure, plot_speedups, ratio_text, text_table
from osd_hf.evaluation.quickstart import QuickstartSizes, learned_and_later, quickstart, serve_stream
from osd_hf.models import load_pair, prompt_room
from osd_hf.prompts import encode_prompts, encode_turn, read_prompts
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace
from osd_hf.utils.report import make_folder, provenance, write_report
from osd_hf.utils.threads import choose_threads

Stream = list[tuple[str, list[int]]]  # the data set and token ids of each request that is learned from
Prompts = dict[str, list[list[int]]]  # data set -> token ids of each prompt

MEBI = 1 << 20
SOURCES = {"draft": "draft only", "text": "text only", "both": "both"}
CONTROLLED = "controlled acceptance, for times of large shapes with random weights"

_models, _prompts, _sizes, _shapes = in_groups("models", "prompts", "sizes", CONTROLLED)


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Rows, DraftRevision, TargetLoading, Reporting):
    """The flags of `osd-hf bench`."""

    target: str | None = _models("a target in place of the bundled one", metavar="ID|PATH")
    draft: str | None = _models("a draft in place of the bundled one", metavar="ID|PATH")
    num_assistant_tokens: str = _models("tokens drafted per round (k), one or several", "5", metavar="N[,N...]")
    compile_draft: bool = _models("also time lean drafting with the draft compiled", False)
    prompts: list[str] | None = _prompts("Hub id or folder of a data set, or a json, jsonl or parquet file, in place "
                                         "of the bundled domains (repeat for several)", metavar="ID|FILE")  # fmt: skip
    column: str | None = _prompts("column of the prompt, a user's turn; prompt by default")
    chat_template: bool = _prompts(CHAT_TEMPLATE, True)
    chat_template_kwargs: dict[str, Any] | None = _prompts(CHAT_TEMPLATE_KWARGS, metavar="JSON")
    num_requests: int = _sizes("requests that are timed, per data set", 16, metavar="N")
    watched_requests: int = _sizes("requests per data set that are answered again, to time the parts of a round", 3,
                                   metavar="N")  # fmt: skip
    learn_requests: int = _sizes("requests per data set, served before to make the learned draft; 0 leaves it out",
                                 50, metavar="N")  # fmt: skip
    max_new_tokens: int = _sizes("most tokens of an answer", 96, metavar="N")
    seed: int = flag("seed of prompts, learning and random weights", 0)
    threads: int | None = flag(THREADS, metavar="N")
    controlled: str | None = _shapes("probability with which a proposal is right", metavar="ALPHA[,ALPHA...]")
    target_shape: str | None = _shapes(f"shape of the target: {', '.join(SHAPES)}; 7b by default", metavar="NAME")
    draft_shape: str | None = _shapes("shape of the draft; 160m by default", metavar="NAME")
    prompt_tokens: int | None = _shapes("tokens of a prompt; 64 by default", metavar="N")
    output_dir: Path = flag("folder of report and plot, which are overwritten", Path("osd_hf_bench"), metavar="DIR")

    def check(self) -> None:
        """Raises ConfigError for what is too small, and for what does not go together."""
        self.check_counts("num_requests", "max_new_tokens", "watched_requests", "threads")
        self.check_counts("learn_requests", "seed", least=0)
        is_controlled = self.controlled is not None
        shapes = ("target_shape", "draft_shape", "prompt_tokens")
        named = (
            "target", "draft", "prompts", "split", "subset", "column", "prompt_template", "chat_template",
            "chat_template_kwargs", "learn_requests", "attn_implementation", "device_map", "quantization",
            "revision", "draft_revision", "trust_remote_code",
        )  # fmt: skip
        if given := self.changed(*(named if is_controlled else shapes)):
            without = "cannot be given with" if is_controlled else "can only be given with"
            raise ConfigError(f"{', '.join(given)} {without} --controlled, which brings its own models and prompts.")
        self.check_together("target", "draft")
        if self.prompts is None:
            self.check_rows()
        if min(self.ks) < 1:
            raise ConfigError(f"--num-assistant-tokens must be at least 1, got {min(self.ks)}.")

    @property
    def ks(self) -> list[int]:
        """The numbers of drafted tokens."""
        return _numbers(self.num_assistant_tokens, int, "--num-assistant-tokens")


def bench_command(settings: BenchSettings) -> int:
    """Answer, measure and report; returns the exit code."""
    started, threads_before = time.perf_counter(), torch.get_num_threads()
    settings.check()
    folder, is_controlled = settings.output_dir, settings.controlled is not None
    make_folder(folder)
    try:
        report, threads, facts = _controlled(settings) if is_controlled else _served(settings)
    finally:
        torch.set_num_threads(threads_before)
    data = {
        "provenance": provenance(seed=settings.seed, threads=threads),
        "controlled": LABEL if is_controlled else None,
        **facts,
        **report.to_dict(),
        "total_seconds": round(time.perf_counter() - started, 1),
    }
    # Pooled over several controlled acceptances, a speed-up would say nothing.
    datasets = [*report.answers, *(["all"] if len(report.answers) > 1 and not is_controlled else [])]
    settings.say("\n".join(_tables(data, datasets)))
    title = "Times as fast as the target alone" + (f"\n({LABEL})" if is_controlled else "")
    plot_speedups(folder / "speedups.png", _bars(data, datasets, report.alone), title=title)
    write_report(folder / "report.json", data)
    settings.say(f"\n{data['total_seconds']:.0f} s in all. Wrote report.json and speedups.png to {folder}.")
    settings.write_json(data)
    differs = any(part["outputs"]["differing"] for part in data["by_dataset"]["all"].values())
    return FAILED if differs and data["dtype"] == "float32" else 0


@dataclass(frozen=True, kw_only=True)
class QuickstartSettings(TargetRevision, DraftRevision, Reporting):
    """The flags of `osd-hf quickstart`."""

    sizes: QuickstartSizes = part(metavar="N")
    seed: int = flag("seed of the prompts and of learning", 0)
    threads: int | None = flag(THREADS, metavar="N")
    target: str | None = flag("another target for the same prompts", metavar="ID|PATH")
    draft: str | None = flag("another draft for the same prompts", metavar="ID|PATH")
    compile_target: bool = flag("also time it with the target compiled, which needs a C++ compiler", True)
    output_dir: Path = flag(
        "folder of report and plots, which are overwritten", Path("osd_hf_quickstart"), metavar="DIR"
    )


def quickstart_command(settings: QuickstartSettings) -> int:
    """Serve, learn and measure; returns the exit code."""
    settings.check_together("target", "draft")
    versions = {**settings.fetching, "draft_revision": settings.draft_revision}
    pair = load_pair(settings.target, settings.draft, dtype="float32", device="cpu", **versions)
    report = quickstart(
        pair, settings.sizes, seed=settings.seed, threads=settings.threads, output_dir=settings.output_dir,
        write=settings.say, compile_target=settings.compile_target,
    )  # fmt: skip
    settings.write_json(report)
    return FAILED if report["outputs"]["differing"] else 0


# --- what is answered -----------------------------------------------------------------------------------------------


def _numbers(text: str, kind: Any, flag: str) -> list[Any]:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigError(f"{flag} takes numbers, separated by commas, got {text!r}.") from error


def _systems(
    drafts: Mapping[str, Any], ks: Sequence[int], *, compiles: bool, earlier: Sequence[Trace] = (),
    acceptance: ControlledAcceptance | None = None,
) -> list[System]:  # fmt: skip
    """The target alone (on an accelerator compiled, too, where drafts are), prompt lookup, stock with the
    first draft, lean with each; the last also at its own pace, with candidates of its own, of past text, and of
    both."""
    systems = [System("target alone", "alone")]
    if compiles and next(iter(drafts.values())).device.type != "cpu":  # where transformers compiles by itself
        systems.append(System("target alone, compiled", "alone", compile_target=True))
    if acceptance is None:
        systems.append(System("prompt lookup", "prompt_lookup", num_assistant_tokens=ks[0]))

    def add(kind: Any, name: str, k: Any, is_compiled: bool = False, candidates: Any = "draft") -> None:
        words = [kind, name, f"k={k}" if len(ks) > 1 else ""]
        if k == "auto":
            words = ["auto" if acceptance else f"auto, {SOURCES[candidates]}"]
        words.append("compiled" * is_compiled)
        shown = " ".join(word for word in words if word)
        systems.append(
            System(
                shown,
                kind,
                drafts[name],
                k,
                compile_draft=is_compiled or "auto",
                compile_target=is_compiled and k == "auto",
                candidates=candidates,
                earlier=earlier if k == "auto" else (),
                acceptance=acceptance,
            )  # fmt: skip
        )

    first, *_, last = [*drafts, *drafts]
    for name in drafts:
        for k in ks:
            if name == first:
                add("stock", name, k)
            for is_compiled in (False, True)[: 1 + compiles]:
                add("lean", name, k, is_compiled)
    for candidates in SOURCES if acceptance is None else ("draft",):
        for is_compiled in (False, True)[: 1 + compiles]:
            add("lean", last, "auto", is_compiled, candidates)
    return systems


def _served(settings: BenchSettings) -> tuple[BenchmarkReport, int, dict[str, Any]]:
    target, draft, tokenizer = load_pair(settings.target, settings.draft, **settings.loading)
    if settings.prompts is None:
        stream, prompts = _bundled_prompts(settings, tokenizer)
    else:
        room = prompt_room(target.config, draft.config, settings.max_new_tokens)
        stream, prompts = _read_prompts(settings, settings.prompts, tokenizer, room)
    threads, thread_seconds = choose_threads(
        target, lambda: answer_greedily(target, next(iter(prompts.values()))[0], 4), settings.threads
    )
    drafts, earlier = {"static": draft}, CorrectionStore()
    if stream:
        config = OnlineConfig(num_assistant_tokens=settings.ks[0], seed=settings.seed)
        with OnlineAssistant(target, draft, tokenizer, config, store=earlier) as assistant:
            serve_stream(assistant, stream, settings.max_new_tokens)
        drafts["learned"] = assistant.draft
    systems = _systems(drafts, settings.ks, compiles=settings.compile_draft, earlier=list(earlier))
    report = benchmark(
        target, systems, prompts, tokenizer=tokenizer, max_new_tokens=settings.max_new_tokens,
        watched_requests=settings.watched_requests, show_progress=True,
    )  # fmt: skip
    return report, threads, {"learned_from_requests": len(stream), "thread_seconds": thread_seconds}


def _bundled_prompts(settings: BenchSettings, tokenizer: Any) -> tuple[Stream, Prompts]:
    count = settings.num_requests
    sizes = QuickstartSizes(max(settings.learn_requests, 2), max(count, 2), timed_requests=1)
    learned, later = learned_and_later(sizes, settings.seed)
    encoded = functools.partial(
        encode_turn, tokenizer, chat_template=settings.chat_template,
        chat_template_kwargs=settings.chat_template_kwargs,
    )  # fmt: skip
    stream = [(e.domain, encoded(e.prompt)) for e in learned] if settings.learn_requests else []
    asked = {domain: [e.prompt for e in later if e.domain == domain][:count] for domain in DOMAINS}
    return stream, {domain: [*map(encoded, texts)] for domain, texts in asked.items()}


def _read_prompts(
    settings: BenchSettings, locations: Sequence[str], tokenizer: Any, room: int | None
) -> tuple[Stream, Prompts]:
    """The first prompts of each source to learn from, shuffled over the sources; the next ones to answer."""
    stream: Stream = []
    prompts: Prompts = {}
    wanted = settings.learn_requests + settings.num_requests
    for location in locations:
        name = Path(location).stem if Path(location).is_file() else location
        if name in prompts:
            raise ConfigError(f"Two sources of prompts have the name {name}.")
        source = settings.source(location, default_column="prompt")
        encoded = encode_prompts(
            read_prompts(source), tokenizer, limit=wanted, max_prompt_tokens=room,
            chat_template=settings.chat_template, chat_template_kwargs=settings.chat_template_kwargs,
        )  # fmt: skip
        ids = [ids for _, ids in encoded.prompts]
        if len(ids) < wanted:
            raise DataError(
                f"{location} has {len(ids)} prompts that leave room for an answer; --learn-requests and "
                f"--num-requests ask for {wanted}."
            )
        stream += [(name, one) for one in ids[: settings.learn_requests]]
        prompts[name] = ids[settings.learn_requests :]
    random.Random(settings.seed).shuffle(stream)
    return stream, prompts


def _controlled(settings: BenchSettings) -> tuple[BenchmarkReport, int, dict[str, Any]]:
    alphas = _numbers(str(settings.controlled), float, "--controlled")
    if not all(0 <= alpha <= 1 for alpha in alphas):
        raise ConfigError(f"--controlled must be between 0 and 1, got {settings.controlled}.")
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = ("float32" if device == "cpu" else "bfloat16") if settings.dtype == "auto" else settings.dtype
    shapes = (settings.target_shape or "7b", settings.draft_shape or "160m")
    target, draft = random_pair(*shapes, device=device, dtype=getattr(torch, name), seed=settings.seed)
    draw, length, new_tokens = random.Random(settings.seed), settings.prompt_tokens or 64, settings.max_new_tokens
    room = prompt_room(target.config, draft.config, new_tokens)
    if room is not None and not 1 <= length <= room:
        raise ConfigError(f"--prompt-tokens must be between 1 and {room}, got {length}.")
    tokens = target.config.vocab_size
    prompts = {
        alpha: [[draw.randrange(tokens) for _ in range(length)] for _ in range(settings.num_requests)]
        for alpha in alphas
    }
    threads, thread_seconds = choose_threads(
        target, lambda: answer_greedily(target, prompts[alphas[0]][0], 4), settings.threads
    )
    acceptance = controlled_acceptance(target, prompts, new_tokens, settings.seed)
    report = benchmark(
        target, _systems({"": draft}, settings.ks, compiles=settings.compile_draft, acceptance=acceptance),
        {f"alpha {alpha:g}": group for alpha, group in prompts.items()}, max_new_tokens=new_tokens,
        watched_requests=settings.watched_requests, show_progress=True,
    )  # fmt: skip
    facts = {"target_shape": shapes[0], "draft_shape": shapes[1], "prompt_tokens": length}
    return report, threads, {**facts, "thread_seconds": thread_seconds}


# --- what is shown --------------------------------------------------------------------------------------------------


def _bars(data: dict[str, Any], datasets: Sequence[str], alone: str) -> dict[str, dict[str, Any]]:
    return {
        dataset: {
            name: (*part["times_alone"].values(), part["predicted"] and part["predicted"]["speedup"])
            for name, part in data["by_dataset"][dataset].items()
            if name != alone
        }
        for dataset in datasets
    }


def _tables(data: dict[str, Any], datasets: Sequence[str]) -> list[str]:
    lines = []
    if data["controlled"]:
        lines.append(f"\n{data['controlled'].upper()}\n({data['target_shape']} with {data['draft_shape']})")
    for dataset in datasets:
        parts = data["by_dataset"][dataset]
        rows = [_speed_row(name, part) for name, part in parts.items()]
        requests = next(iter(parts.values()))["requests"]
        header = [
            f"{dataset}, {requests} requests", "tok/s", "first ms", "alpha", "tok/fwd", "x alone [95%]", "x stock",
            "model", "of it", "wide", "of it", "bound",
        ]  # fmt: skip
        lines += ["", text_table(header, rows)]
    lines += [
        "\nx alone, x stock: times as fast as the target alone and as the first stock system, median over requests",
        "answered in turns. model: expected from alpha, k and c; wide: the same with the measured time of the wider",
        "forward of the target; of it: tokens per second over the target's alone, both pooled and reading prompts, to",
        "the model, which reads none; bound: at alpha = 1.",
    ]
    parts = data["by_dataset"]["all"]
    rows = [_source_row(name, part) for name, part in parts.items()]
    header = ["where tokens came from", "draft", "its alpha", "past text", "its alpha", "target"]
    lines += ["", text_table(header, rows)]
    lines.append(
        "\nauto takes what pays by measured costs, with the last of the drafts above and the text it learned from."
    )
    rows = [_round_row(name, part, data["weights_bytes"][name]) for name, part in parts.items()]
    header = [
        "a round, in ms", "rounds", "drafted", "draft", "target", "rest", "all", "c", "identical", "weights MiB",
        "peak MiB",
    ]  # fmt: skip
    lines += ["", text_table(header, rows)]
    waits = "" if data["device"] == "cpu" else "; the device is waited for at each"
    lines.append(f"\nRounds of watched requests, without the first one, which reads the prompt{waits}.")
    peak = data["process_peak_bytes"]
    if peak is not None and data["device"] == "cpu":
        lines.append(f"Peak memory of the whole process: {peak / MEBI:.0f} MiB; systems share it.")
    assisted = [parts[system["name"]] for system in data["systems"] if system["kind"] != "alone"]
    outputs = {name: sum(part["outputs"][name] for part in assisted) for name in ("tied", "differing")}
    if outputs["tied"]:
        lines.append(f"{outputs['tied']} outputs part from the target's at a tie of its top two tokens.")
    if outputs["differing"]:
        reason = "" if data["dtype"] == "float32" else f", as wider forwards round otherwise in {data['dtype']}"
        lines.append(f"{outputs['differing']} outputs DIFFER from the target's own{reason}.")
    return lines


def _speed_row(name: str, part: dict[str, Any]) -> list[str]:
    model: dict[str, float] = part["predicted"] or {}
    over, over_wide = (
        f"{part[key]:.0%}" if model else "-" for key in ("measured_over_predicted", "measured_over_predicted_wide")
    )
    return [
        name, f"{part['tokens_per_second']:.0f}", f"{part['first_token_seconds'] * 1e3:.1f}", figure(part["alpha"]),
        figure(part["block_efficiency"], 2), ratio_text(part["times_alone"]),
        figure(part["times_stock"]["median"], 2) if "times_stock" in part else "-", figure(model.get("speedup"), 2),
        over, figure(model.get("speedup_wide"), 2), over_wide, figure(model.get("bound"), 2),
    ]  # fmt: skip


def _source_row(name: str, part: dict[str, Any]) -> list[str]:
    draft, text = (part["share_of_tokens"][source] for source in ("draft", "text"))
    alphas = figure(part["alpha"]), figure(part["text_alpha"])
    return [name, f"{draft:.0%}", alphas[0], f"{text:.0%}", alphas[1], f"{1 - draft - text:.0%}"]


def _round_row(name: str, part: dict[str, Any], weights: int) -> list[str]:
    times = part["round"]
    sides = ("draft_seconds", "target_seconds", "remaining_seconds", "seconds")
    return [
        name, str(times["rounds"]), figure(times["drafted"], 1), *(figure(times[side] * 1e3, 2) for side in sides),
        figure(part["predicted"] and part["predicted"]["c"]), f"{part['outputs']['identical']}/{part['requests']}",
        f"{weights / MEBI:.0f}", "-" if part["peak_bytes"] is None else f"{part['peak_bytes'] / MEBI:.0f}",
    ]  # fmt: skip
