"""What the commands do with their arguments, and what they print."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from osd_hf import bundled
from osd_hf.assistant import OnlineAssistant
from osd_hf.bench.display import AlphaBar, figure, plot_alpha, progress, rolling_window, stats_interval, text_table
from osd_hf.bench.quickstart import QuickstartSizes, quickstart
from osd_hf.cli.flags import (
    BUNDLED_REQUESTS,
    FAILED,
    bundled_mix,
    check_counts,
    config_from,
    output_stream,
    prompt_source,
    warn_skipped,
    write_json,
)
from osd_hf.cli.journal import check_folder, open_folder, report_on, serve
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, DataError, StoreError
from osd_hf.metrics import AcceptanceStats, alpha_gain_interval, expected_speedup
from osd_hf.pair import load_config, load_model, load_tokenizer, of_one_size, placed, prompt_room
from osd_hf.prompts import EncodedPrompts, Prompt, encode_prompts, fingerprint, read_prompts
from osd_hf.replay import replay_each
from osd_hf.simulate import simulate
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace
from osd_hf.utils.report import json_text, make_folder, provenance

__all__ = ["quickstart_command", "replay_command", "run_command"]

# --- quickstart -----------------------------------------------------------------------------------------------------


def quickstart_command(args: argparse.Namespace) -> int:
    """`osd-hf quickstart`; the exit code."""
    if (args.target is None) != (args.draft is None):
        raise ConfigError("Give both --target and --draft, or none for the bundled pair.")
    sizes = QuickstartSizes(**{f.name: getattr(args, f.name) for f in dataclasses.fields(QuickstartSizes)})
    if args.target is None:
        pair = bundled.load_bundled()
    else:
        models = [load_model(m, dtype="float32", device="cpu") for m in (args.target, args.draft)]
        pair = (*models, load_tokenizer(args.target))
    out = output_stream(args)
    report = quickstart(
        *pair, sizes=sizes, seed=args.seed, threads=args.threads, output_dir=args.output_dir,
        write=lambda line: print(line, file=out, flush=True),
    )  # fmt: skip
    write_json(args, report)
    return FAILED if report["outputs"]["differing"] else 0


# --- run ------------------------------------------------------------------------------------------------------------


def run_command(args: argparse.Namespace) -> int:
    """`osd-hf run`; the exit code."""
    config, generate_kwargs = config_from(args), _generate_kwargs(args)
    if config.update_strategy == "manual" and not args.no_learn:
        raise ConfigError("--update-strategy manual would never learn in a run; say so with --no-learn.")
    check_counts(args, "save_every", "max_new_tokens", "num_requests")
    prompts = _prompts(args, config.seed)
    check_folder(args.output_dir, resume=args.resume)
    if args.bundled:
        target, draft, tokenizer = bundled.load_bundled()
        target, draft = (placed(model, args.device or "cpu") for model in (target, draft))
        configs = (target.config, draft.config)
    else:
        configs = (load_config(args.target), load_config(args.draft))
        tokenizer = load_tokenizer(args.target)
    encoded = encode_prompts(
        prompts,
        tokenizer,
        limit=args.num_requests or (BUNDLED_REQUESTS if args.bundled else None),
        max_prompt_tokens=prompt_room(*configs, args.max_new_tokens),
        chat_template=not args.no_chat_template,
    )
    warn_skipped(encoded, args.max_new_tokens)
    settings = _run_settings(args, config, generate_kwargs, encoded)
    check_folder(args.output_dir, settings, resume=args.resume)
    if not args.bundled:
        target, draft = (load_model(m, dtype=args.dtype, device=args.device) for m in (args.target, args.draft))
        draft = of_one_size(draft, target)
    assistant = OnlineAssistant(
        target, draft, tokenizer, dataclasses.replace(config, update_strategy="manual"), store=args.store,
        report_to=args.report_to,
    )  # fmt: skip
    open_folder(args.output_dir, settings)
    try:
        with assistant, AlphaBar(len(encoded.prompts), "serving") as bar:
            served = serve(
                assistant, draft, encoded, args.output_dir,
                generate_kwargs=generate_kwargs | _padding(target), learn=not args.no_learn,
                save_every=args.save_every, keep_text=args.keep_text,
                on_request=lambda s: bar.advance(s.learned, s.frozen, s.draft_version),
            )  # fmt: skip
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("go on with the same command and --resume") from interrupt
    window = rolling_window(len(served))
    report = {
        "provenance": provenance(device=str(target.device), dtype=str(target.dtype), seed=config.seed),
        "settings": {name: _without_folder(value) for name, value in settings.items()},
        "skipped": {"empty": encoded.skipped_empty, "long": encoded.skipped_long},
        "frozen_is": _frozen_is(args, target, draft),
        **report_on(served, window=window),
    }
    assistant.save_pretrained(args.output_dir / "draft")
    plot_alpha(
        args.output_dir / "alpha.png", [s.learned for s in served], [s.frozen for s in served], encoded.domains,
        window=window, title="Acceptance while serving: the draft that learns, and the same draft frozen",
    )  # fmt: skip
    (args.output_dir / "report.json").write_text(json_text(report, indent=1) + "\n")
    _print_run(report, args.output_dir, output_stream(args))
    write_json(args, report)
    return 0


def _frozen_is(args: argparse.Namespace, target: Any, draft: Any) -> str:
    if args.do_sample:
        return "expected by replay on the sampled answers"
    if {target.dtype, draft.dtype} == {torch.float32}:
        return "exact, by replay"
    return "by replay, exact but for rounding, as the models are not in float32"


def _prompts(args: argparse.Namespace, seed: int) -> Iterator[Prompt]:
    if args.bundled:
        if args.target or args.draft or args.prompts or args.column or args.prompt_template or args.domain_column:
            raise ConfigError("--bundled brings its own target, draft and prompts; leave out the flags for others.")
        return iter(bundled_mix(args.domain, args.num_requests or BUNDLED_REQUESTS, seed))
    if missing := [name for name in ("target", "draft", "prompts") if not getattr(args, name)]:
        raise ConfigError(f"--{' and --'.join(missing)} must be given, or --bundled.")
    return read_prompts(prompt_source(args))


def _generate_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    sampling = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
    given = {name: value for name, value in sampling.items() if value is not None}
    if given and not args.do_sample:
        raise ConfigError(f"--{' and --'.join(name.replace('_', '-') for name in given)} need --do-sample.")
    temperature, top_p, top_k = (given.get(name, 1) for name in sampling)
    if not (0 < temperature < math.inf and 0 < top_p <= 1 and top_k >= 0):
        raise ConfigError("--temperature must be positive, --top-p above 0 and at most 1, --top-k at least 0.")
    return {"do_sample": args.do_sample, "max_new_tokens": args.max_new_tokens, **given}


def _padding(target: Any) -> dict[str, Any]:
    # Without it transformers remarks at every request that it takes the end token.
    eos = target.generation_config.eos_token_id
    if target.generation_config.pad_token_id is not None or eos is None:
        return {}
    return {"pad_token_id": eos if isinstance(eos, int) else eos[0]}


def _run_settings(
    args: argparse.Namespace, config: OnlineConfig, generate_kwargs: dict[str, Any], encoded: EncodedPrompts
) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    places = {
        name: getattr(args, name) or ("bundled" if args.bundled else None) for name in ("target", "draft", "prompts")
    }
    return {
        **{n: str(Path(p).resolve()) if p is not None and Path(p).exists() else p for n, p in places.items()},
        "requests": len(encoded.prompts),
        "prompts_fingerprint": fingerprint(encoded.prompts),
        "dtype": "float32" if args.bundled else args.dtype,
        **generate_kwargs,
        "learn": not args.no_learn,
        "keep_text": args.keep_text,
        **{f"config.{name}": value for name, value in config.to_dict().items()},
    }


def _without_folder(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _print_run(report: dict[str, Any], folder: Path, out: Any) -> None:
    named = [(d["domain"] or "no domain", d) for d in report["by_domain"]]
    parts = [*(named if len(named) > 1 else []), ("all", report["overall"]), ("last 20%", report["last_fifth"])]
    rows = []
    for name, part in parts:
        low_high = part["gain_interval"]
        gain = figure(part["gain"], sign=True)
        efficiency = [figure(part[side]["block_efficiency"], 2) for side in ("frozen", "learned")]
        rows.append([
            name, str(part["requests"]), *(figure(part[side]["alpha"]) for side in ("frozen", "learned")),
            gain if low_high is None else f"{gain} [{low_high[0]:+.3f}, {low_high[1]:+.3f}]", " > ".join(efficiency),
        ])  # fmt: skip
    header = ["requests of", "n", "alpha frozen", "alpha learning", "gain [95%]", "tokens/forward"]
    print(text_table(header, rows), file=out)
    print(
        f"\n{report['tokens_per_second'] or 0:.0f} tokens/s, {report['seconds']:.1f} s of answers, "
        f"{report['update_seconds']:.1f} s of learning; draft version {report['draft_version']}. "
        f"Frozen: {report['frozen_is']}.\nWrote report.json, alpha.png, journal.jsonl and draft/ to {folder}"
        + ("; state/ is for --resume and holds tokens of requests." if report["settings"]["learn"] else "."),
        file=out,
    )


# --- replay ---------------------------------------------------------------------------------------------------------


def replay_command(args: argparse.Namespace) -> int:
    """`osd-hf replay`; the exit code."""
    config = config_from(args)
    if args.cost is not None:
        expected_speedup(0.5, 1, args.cost)  # says what is wrong with it before any work
    traces = _recorded(args)
    if args.learn:
        make_folder(args.output_dir)
    k = config.num_assistant_tokens
    assert isinstance(k, int)
    report: dict[str, Any] = {"provenance": provenance(), "num_assistant_tokens": k, "drafts": []}
    rows, learned_rows = [], []
    for number, source in enumerate(args.draft):
        draft = load_model(source, dtype=args.dtype, device=args.device)
        static = _replayed(draft, traces, k)
        entry: dict[str, Any] = {"draft": _without_folder(source), "static": _by_domain(traces, static)}
        rows += [_replay_row(entry["draft"], name, stats, k, args.cost) for name, stats in _parts(traces, static)]
        if args.learn:
            learned, stats_rows = _learned(args, draft, traces, static, config, number)
            entry |= learned
            learned_rows += [[entry["draft"], *row] for row in stats_rows]
        report["drafts"].append(entry)
    out = output_stream(args)
    header = ["draft", "requests of", "n", "alpha", "95% interval", f"tokens/forward (k={k})"]
    print(text_table(header + (["expected speed-up"] if args.cost is not None else []), rows, left=2), file=out)
    if args.learn:
        print("\nLearning from the requests in their order; alpha over the last 20%:\n", file=out)
        print(
            text_table(["draft", "requests of", "n", "static", "learned", "gain [95%]"], learned_rows, left=2),
            file=out,
        )
        print(f"\nWrote the plots to {args.output_dir}.", file=out)
    write_json(args, report)
    return 0


def _recorded(args: argparse.Namespace) -> list[Trace]:
    if not Path(args.store).is_dir():
        raise StoreError(f"There is no store at {args.store}. `osd-hf run --store DIR` writes one.")
    check_counts(args, "limit")
    newest: deque[Trace] = deque(maxlen=args.limit)  # so that the others do not stay in memory
    domains = set()
    for trace in CorrectionStore(args.store):
        domains.add(str(trace.domain))
        if args.learn and (trace.is_sampled or not trace.num_kept):
            continue
        if args.domain in (None, trace.domain):
            newest.append(trace)
    if not newest:
        wanted = " of greedy requests with target rows" if args.learn else ""
        known = ", ".join(sorted(domains)) or "none"
        raise DataError(f"The store {args.store} has no recordings{wanted} to replay; its domains: {known}.")
    return list(newest)


def _replayed(draft: Any, traces: Sequence[Trace], k: int) -> list[AcceptanceStats]:
    stats = []
    for first in progress(range(0, len(traces), 64), "replaying", "batch"):
        stats += replay_each(draft, traces[first : first + 64], k)
    return stats


def _learned(
    args: argparse.Namespace,
    draft: Any,
    traces: list[Trace],
    static: list[AcceptanceStats],
    config: OnlineConfig,
    number: int,
) -> tuple[dict[str, Any], list[list[str]]]:
    with AlphaBar(len(traces), "learning") as bar:
        run = simulate(draft, traces, config, on_request=lambda i, stats: bar.advance(stats, static[i]))
    plot_alpha(
        args.output_dir / f"alpha-{number}.png", run.stats, static, [t.domain for t in traces],
        window=rolling_window(len(traces)), title="Replay in time order: learning, and frozen",
    )  # fmt: skip
    start = round(len(traces) * 0.8)
    sides = [_parts(traces[start:], stats[start:]) for stats in (static, run.stats)]
    rows = []
    for (name, before), (_, after) in zip(*sides, strict=True):
        low, high = alpha_gain_interval(before, after)
        gain = figure(after.alpha - before.alpha, sign=True) + (f" [{low:+.3f}, {high:+.3f}]" if low == low else "")
        rows.append([name, str(before.num_requests), figure(before.alpha), figure(after.alpha), gain])
    report = {
        "learned": _by_domain(traces, run.stats),
        "last_fifth": {
            n: _by_domain(traces[start:], s[start:]) for n, s in (("static", static), ("learned", run.stats))
        },
        "updates": [update.to_dict() for update in run.updates],
        "config": config.to_dict(),
    }
    return report, rows


def _parts(traces: Sequence[Trace], stats: Sequence[AcceptanceStats]) -> list[tuple[str, AcceptanceStats]]:
    names = list(dict.fromkeys(t.domain for t in traces))
    parts = [
        (str(n), sum((s for t, s in zip(traces, stats, strict=True) if t.domain == n), AcceptanceStats()))
        for n in names
    ]
    return [*(parts if len(parts) > 1 else []), ("all", sum(stats, AcceptanceStats()))]


def _by_domain(traces: Sequence[Trace], stats: Sequence[AcceptanceStats]) -> dict[str, Any]:
    return {n: {k: v for k, v in s.to_dict().items() if k != "requests"} for n, s in _parts(traces, stats)}


def _replay_row(draft: str, name: str, stats: AcceptanceStats, k: int, cost: float | None) -> list[str]:
    alpha = 0.0 if stats.alpha != stats.alpha else stats.alpha
    speedup = [] if cost is None else [f"{expected_speedup(alpha, k, cost):.2f}x"]
    efficiency = figure(stats.block_efficiency, 2)
    return [draft, name, str(stats.num_requests), figure(stats.alpha), stats_interval(stats), efficiency, *speedup]
