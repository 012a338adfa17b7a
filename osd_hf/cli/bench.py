"""The command `osd-hf bench`: which systems on which prompts, the table, the JSON and the plot."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from osd_hf import bundled
from osd_hf.assistant import OnlineAssistant
from osd_hf.bench.benchmark import BenchmarkReport, System, benchmark
from osd_hf.bench.controlled import LABEL, ControlledAcceptance, controlled_acceptance, faster_threads, random_pair
from osd_hf.bench.display import figure, plot_speedups, text_table
from osd_hf.bench.quickstart import QuickstartSizes, learned_and_later, serve_stream
from osd_hf.cli.flags import FAILED, check_counts, output_stream, write_json
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, DataError
from osd_hf.pair import load_model, load_tokenizer, of_one_size, placed, prompt_room
from osd_hf.prompts import PromptSource, encode_prompts, encode_turn, read_prompts
from osd_hf.store.store import CorrectionStore
from osd_hf.utils.report import json_text, make_folder, provenance

__all__ = ["bench_command"]

Prompts = dict[str, list[list[int]]]

MEBI = 1 << 20


def bench_command(args: argparse.Namespace) -> int:
    """`osd-hf bench`; the exit code."""
    started, threads_before = time.perf_counter(), torch.get_num_threads()
    _check(args)
    ks = _numbers(args.k, int, "--k")
    if min(ks) < 1:
        raise ConfigError(f"--k must be at least 1, got {min(ks)}.")
    make_folder(args.output_dir)
    try:
        if args.controlled is not None:
            report, threads, facts = _controlled(args, ks)
        else:
            report, threads, facts = _served(args, ks)
    finally:
        torch.set_num_threads(threads_before)
    data = {
        "provenance": provenance(seed=args.seed, threads=threads),
        "controlled": LABEL if args.controlled is not None else None,
        **facts,
        **report.to_dict(),
        "total_seconds": round(time.perf_counter() - started, 1),
    }
    out = output_stream(args)
    # Pooled over several controlled acceptances, a speed-up would say nothing.
    datasets = [*report.datasets, *(["all"] if len(report.datasets) > 1 and args.controlled is None else [])]
    print("\n".join(_tables(data, datasets)), file=out)
    title = "Times as fast as the target alone" + (f"\n({LABEL})" if args.controlled is not None else "")
    plot_speedups(args.output_dir / "speedups.png", _bars(data, datasets, report.alone), title=title)
    (args.output_dir / "report.json").write_text(json_text(data, indent=1) + "\n")
    print(
        f"\n{data['total_seconds']:.0f} s in all. Wrote report.json and speedups.png to {args.output_dir}.", file=out
    )
    write_json(args, data)
    differs = any(part["outputs"]["differing"] for part in data["by_dataset"]["all"].values())
    return FAILED if differs and data["dtype"] == "float32" else 0


def _check(args: argparse.Namespace) -> None:
    check_counts(args, "requests", "max_new_tokens", "watched_requests", "threads")
    for name in ("learn_requests", "seed"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(args, name)}.")
    shapes = ("target_shape", "draft_shape", "prompt_tokens")
    foreign = ("target", "draft", "prompts", "prompt_template") if args.controlled is not None else shapes
    if given := [f"--{name.replace('_', '-')}" for name in foreign if getattr(args, name) is not None]:
        without = "cannot be given with" if args.controlled is not None else "can only be given with"
        raise ConfigError(f"{', '.join(given)} {without} --controlled, which brings its own models and prompts.")
    if (args.target is None) != (args.draft is None):
        raise ConfigError("Give both --target and --draft, or none for the bundled pair.")


def _numbers(text: str, kind: Any, flag: str) -> list[Any]:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigError(f"{flag} takes numbers, separated by commas, got {text!r}.") from error


def _systems(
    drafts: Mapping[str, Any], ks: Sequence[int], *, compiles: bool, acceptance: ControlledAcceptance | None = None
) -> list[System]:
    """The target alone, prompt lookup, stock with the first draft, lean with each; the last also at its own pace."""
    systems = [System("target alone", "alone")]
    if acceptance is None:
        systems.append(System("prompt lookup", "prompt_lookup", num_assistant_tokens=ks[0]))

    def add(kind: Any, name: str, k: Any, is_compiled: bool = False) -> None:
        words = [kind, name, "auto" if k == "auto" else f"k={k}" if len(ks) > 1 else "", "compiled" * is_compiled]
        shown = " ".join(word for word in words if word)
        systems.append(System(shown, kind, drafts[name], k, is_compiled, acceptance))

    for name in drafts:
        paces: list[Any] = [*ks, *(["auto"] if name == list(drafts)[-1] else [])]
        for k in paces:
            if name == next(iter(drafts)) and k != "auto":
                add("stock", name, k)
            add("lean", name, k)
            if compiles:
                add("lean", name, k, True)
    return systems


# --- with prompts ---------------------------------------------------------------------------------------------------


def _served(args: argparse.Namespace, ks: Sequence[int]) -> tuple[BenchmarkReport, int, dict[str, Any]]:
    if args.target is None:
        target, draft, tokenizer = bundled.load_bundled()
        target, draft = (placed(model, args.device or "cpu") for model in (target, draft))
    else:
        target, draft = (load_model(m, dtype=args.dtype, device=args.device) for m in (args.target, args.draft))
        tokenizer = load_tokenizer(args.target)
        draft = of_one_size(draft, target)
    if args.prompts is None:
        stream, prompts = _bundled_prompts(args, tokenizer)
    else:
        stream, prompts = _read_prompts(args, tokenizer, prompt_room(target.config, draft.config, args.max_new_tokens))
    threads, thread_seconds = _threads(args, target, next(iter(prompts.values()))[0])
    drafts = {"static": draft}
    if stream:
        config = OnlineConfig(num_assistant_tokens=ks[0], seed=args.seed)
        with OnlineAssistant(target, draft, tokenizer, config, store=CorrectionStore()) as assistant:
            serve_stream(assistant, stream, args.max_new_tokens)
        drafts["learned"] = assistant.draft
    systems = _systems(drafts, ks, compiles=args.compile)
    report = benchmark(
        target, systems, prompts, max_new_tokens=args.max_new_tokens, watched_requests=args.watched_requests,
        tokenizer=tokenizer, show_progress=True,
    )  # fmt: skip
    return report, threads, {"learned_from_requests": len(stream), "thread_seconds": thread_seconds}


def _bundled_prompts(args: argparse.Namespace, tokenizer: Any) -> tuple[list[tuple[str, list[int]]], Prompts]:
    sizes = QuickstartSizes(max(args.learn_requests, 2), max(args.requests, 2), timed_requests=1)
    learned, later = learned_and_later(sizes, args.seed)
    stream = [(e.domain, encode_turn(tokenizer, e.prompt)) for e in learned] if args.learn_requests else []
    prompts = {
        domain: [encode_turn(tokenizer, e.prompt) for e in later if e.domain == domain][: args.requests]
        for domain in bundled.DOMAINS
    }
    return stream, prompts


def _read_prompts(
    args: argparse.Namespace, tokenizer: Any, room: int | None
) -> tuple[list[tuple[str, list[int]]], Prompts]:
    """The first prompts of each source to learn from, shuffled over the sources; the next ones to answer."""
    stream: list[tuple[str, list[int]]] = []
    prompts: Prompts = {}
    wanted = args.learn_requests + args.requests
    column = None if args.prompt_template is not None else args.column
    for location in args.prompts:
        name = Path(location).stem if Path(location).is_file() else location
        if name in prompts:
            raise ConfigError(f"Two sources of prompts have the name {name}.")
        source = PromptSource(location, column, args.prompt_template, split=args.split)
        encoded = encode_prompts(
            read_prompts(source), tokenizer, limit=wanted, max_prompt_tokens=room,
            chat_template=not args.no_chat_template,
        )  # fmt: skip
        ids = [ids for _, ids in encoded.prompts]
        if len(ids) < wanted:
            raise DataError(
                f"{location} has {len(ids)} prompts that leave room for an answer; --learn-requests and --requests "
                f"ask for {wanted}."
            )
        stream += [(name, one) for one in ids[: args.learn_requests]]
        prompts[name] = ids[args.learn_requests :]
    random.Random(args.seed).shuffle(stream)
    return stream, prompts


def _threads(args: argparse.Namespace, target: Any, prompt: Sequence[int]) -> tuple[int, dict[str, float]]:
    given = args.threads if target.device.type == "cpu" else args.threads or torch.get_num_threads()
    threads, seconds = faster_threads(target, prompt, given)
    torch.set_num_threads(threads)
    return threads, seconds


# --- with controlled acceptance -------------------------------------------------------------------------------------


def _controlled(args: argparse.Namespace, ks: Sequence[int]) -> tuple[BenchmarkReport, int, dict[str, Any]]:
    alphas = _numbers(args.controlled, float, "--controlled")
    if not all(0 <= alpha <= 1 for alpha in alphas):
        raise ConfigError(f"--controlled must be between 0 and 1, got {args.controlled}.")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = ("float32" if device == "cpu" else "bfloat16") if args.dtype == "auto" else args.dtype
    shapes = (args.target_shape or "7b", args.draft_shape or "160m")
    target, draft = random_pair(*shapes, device=device, dtype=getattr(torch, name), seed=args.seed)
    draw, length = random.Random(args.seed), args.prompt_tokens or 64
    room = prompt_room(target.config, draft.config, args.max_new_tokens)
    if room is not None and not 1 <= length <= room:
        raise ConfigError(f"--prompt-tokens must be between 1 and {room}, got {length}.")
    vocab_size = target.config.vocab_size
    prompts = {
        alpha: [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(args.requests)] for alpha in alphas
    }
    threads, thread_seconds = _threads(args, target, prompts[alphas[0]][0])
    acceptance = controlled_acceptance(target, prompts, args.max_new_tokens, args.seed)
    report = benchmark(
        target, _systems({"": draft}, ks, compiles=args.compile, acceptance=acceptance),
        {f"alpha {alpha:g}": group for alpha, group in prompts.items()}, max_new_tokens=args.max_new_tokens,
        watched_requests=args.watched_requests, show_progress=True,
    )  # fmt: skip
    facts = {"target_shape": shapes[0], "draft_shape": shapes[1], "prompt_tokens": length}
    return report, threads, {**facts, "thread_seconds": thread_seconds}


# --- what is shown --------------------------------------------------------------------------------------------------


def _bars(data: dict[str, Any], datasets: Sequence[str], alone: str) -> dict[str, dict[str, Any]]:
    return {
        dataset: {
            name: (
                part["times_alone"]["median"],
                part["times_alone"]["interval"],
                part["predicted"] and part["predicted"]["speedup"],
            )
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
    low, high = part["times_alone"]["interval"]
    model: dict[str, float] = part["predicted"] or {}
    return [
        name,
        f"{part['tokens_per_second']:.0f}",
        f"{part['first_token_seconds'] * 1e3:.1f}",
        figure(part["alpha"]),
        figure(part["block_efficiency"], 2),
        f"{part['times_alone']['median']:.2f} [{low:.2f}, {high:.2f}]" if model else "-",
        figure(part["times_stock"]["median"], 2) if "times_stock" in part else "-",
        figure(model.get("speedup"), 2),
        f"{part['measured_over_predicted']:.0%}" if model else "-",
        figure(model.get("speedup_wide"), 2),
        f"{part['measured_over_predicted_wide']:.0%}" if model else "-",
        figure(model.get("bound"), 2),
    ]


def _round_row(name: str, part: dict[str, Any], weights: int) -> list[str]:
    times = part["round"]
    sides = ("draft_seconds", "target_seconds", "remaining_seconds", "seconds")
    return [
        name,
        str(times["rounds"]),
        figure(times["drafted"], 1),
        *(figure(times[side] * 1e3, 2) for side in sides),
        figure(part["predicted"]["c"] if part["predicted"] else math.nan),
        f"{part['outputs']['identical']}/{part['requests']}",
        f"{weights / MEBI:.0f}",
        "-" if part["peak_bytes"] is None else f"{part['peak_bytes'] / MEBI:.0f}",
    ]
