"""The command `osd-hf bench`: compare the speed of decoding systems, or the acceptance of drafts."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from osd_hf.acceptance import Comparison, figures_of
from osd_hf.assistant import OnlineAssistant
from osd_hf.bundled import DOMAINS
from osd_hf.cli import FAILED
from osd_hf.cli.quickstart import serve_stream, split_prompts
from osd_hf.cli.settings import THREADS, CommandParser, Reporting, RowSettings, ServedPairSettings, flag, open_recorded
from osd_hf.config import OnlineConfig
from osd_hf.draft_head import DraftHead
from osd_hf.errors import ConfigError, DataError
from osd_hf.evaluation.benchmark import BenchmarkReport, System, alone_systems, answer_greedily, benchmark
from osd_hf.evaluation.compare import DraftComparison, compare
from osd_hf.evaluation.display import figure, plot_bars, ratio_text, stats_interval, text_table
from osd_hf.loading import is_head, load_draft
from osd_hf.models import input_device, prompt_room
from osd_hf.prompts import encode_prompts, encode_turn, read_prompts
from osd_hf.replay import replay_each
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace
from osd_hf.utils.context import choose_threads
from osd_hf.utils.report import make_folder, provenance, write_report

logger = logging.getLogger(__name__)

RequestStream = list[tuple[str, list[int]]]  # data set and token ids of each request that is learned from
EncodedSets = dict[str, list[list[int]]]  # data set -> token ids of each prompt

MEBI = 1 << 20
SOURCES: dict[Any, str] = {"draft": "draft only", "text": "text only", "both": "both"}
NUM_REQUESTS, NUM_COMPARED_REQUESTS = 16, 64  # defaults, per data set and in all
SAMPLED = "all, sampled"  # name of the data set with requests of all others

# Flags without an effect with --compare, and with --store.
NOT_COMPARED = "draft learn_requests seed threads temperature top_p chat_template chat_template_kwargs"
NOT_STORED = "pair prompts max_new_tokens output_dir"


@dataclass(frozen=True, kw_only=True)
class BenchSettings(RowSettings, ServedPairSettings, Reporting):
    """Flags of `osd-hf bench`."""

    num_assistant_tokens: list[int] | None = flag(
        "tokens drafted per round (k), one or several; by default 5", None, minimum=1, metavar="N"
    )
    prompts: list[str] | None = flag("data sets or files in place of the bundled domains", None, metavar="ID|FILE")
    num_requests: int | None = flag(
        "requests per data set; by default 16, 64 to compare drafts, all of a store", None, minimum=1, metavar="N"
    )
    learn_requests: int = flag(
        "requests per data set that the learned draft learns from; 0 = no such draft", 50, minimum=0, metavar="N"
    )
    max_new_tokens: int = flag("maximum tokens of an answer", 96, minimum=1, metavar="N")
    temperature: float = flag("temperature of the sampled answers; 0 = none are sampled", 0.7, minimum=0)
    top_p: float = flag("top-p of the sampled answers", 0.9, needs="temperature")
    seed: int = flag("seed of prompts and learning", 0, minimum=0)
    threads: int | None = flag(THREADS, None, minimum=1, metavar="N")
    compare: list[str] | None = flag(
        "only compare these drafts, by replay and measured costs", None, excludes=NOT_COMPARED, metavar="DRAFT"
    )
    domain_column: str | None = flag("column of each prompt's label", None, needs="prompts, compare", metavar="COLUMN")
    store: str | None = flag(
        "recordings that --compare replays", None, needs="compare", excludes=NOT_STORED, metavar="DIR"
    )
    output_dir: Path | None = flag(
        "folder of report and plot; by default osd_hf_bench, none to compare drafts", None, metavar="DIR"
    )

    def check(self) -> None:
        if self.compare is not None and (len(self.ks) > 1 or len(self.prompts or ()) > 1):
            raise ConfigError("--compare takes one --num-assistant-tokens and one source of --prompts.")
        if self.compare is not None and not (self.store or self.target or self.pair):
            raise ConfigError("--compare needs a --target, a --pair, or a --store.")

    @property
    def ks(self) -> list[int]:
        """The numbers of drafted tokens."""
        return self.num_assistant_tokens or [5]


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command."""
    return CommandParser([BenchSettings], **how)


def bench_command(settings: BenchSettings) -> int:
    """Measure and report; returns the exit code."""
    started = time.perf_counter()
    if settings.compare is not None:
        return _score_recorded(settings) if settings.store is not None else _compare(settings)
    folder = settings.output_dir or Path("osd_hf_bench")
    make_folder(folder)
    report, facts = _measure(settings)
    data = {**facts, **report.to_dict(), "total_seconds": round(time.perf_counter() - started, 1)}
    datasets = [*report.answers, *(["all"] if len({*report.answers} - {SAMPLED}) > 1 else [])]
    settings.say("\n".join(speed_tables(data, datasets)))
    bars = {
        dataset: {
            n: tuple(p["times_alone"].values()) for n, p in data["by_dataset"][dataset].items() if n != report.alone
        }
        for dataset in datasets
    }
    _write(settings, folder, data, bars, "Measured in turns, median over requests")
    differs = any(part["outputs"]["differing"] for part in data["by_dataset"]["all"].values())
    return FAILED if differs and data["dtype"] == "float32" else 0


def _write(settings: BenchSettings, folder: Path | None, report: dict[str, Any], bars: Any, title: str) -> None:
    """Write the report and its plot."""
    if folder is not None:
        plot_bars(folder / "speedups.png", bars, title=title, label="times as fast as the target alone")
        write_report(folder / "report.json", report)
        settings.say(f"\nWrote report.json and speedups.png to {folder}.")
    settings.write_json(report)


# --- systems --------------------------------------------------------------------------------------------------------


def _systems(
    target: Any, drafts: Mapping[str, PreTrainedModel], settings: BenchSettings, earlier: Sequence[Trace]
) -> list[System]:
    """Return the systems to compare: the target alone, prompt lookup, transformers' assisted generation with the first
    draft, ours with each draft at a fixed k, and with the last draft at `"auto"` for each source of candidates."""
    ks, (first, *_) = settings.ks, drafts
    systems = [*alone_systems(target), System("prompt lookup", "prompt_lookup", num_assistant_tokens=ks[0])]
    for name, draft in drafts.items():
        for k in ks:
            title = f"{name} k={k}" if len(ks) > 1 else name
            if name == first and not isinstance(draft, DraftHead):  # transformers' loop knows no such heads
                systems.append(System(f"stock {title}", "stock", draft, k))
            systems.append(System(f"lean {title}", "lean", draft, k))
    for source, title in SOURCES.items():
        systems.append(System(f"auto, {title}", "lean", draft, "auto", candidates=source, earlier=earlier))
    return systems


def _measure(settings: BenchSettings) -> tuple[BenchmarkReport, dict[str, Any]]:
    """Let a draft learn, and time all systems on later prompts."""
    target, draft, tokenizer = settings.load_pair()
    if settings.prompts is None:
        stream, prompts = _bundled_prompts(settings, tokenizer)
    else:
        room = prompt_room(target.config, draft.config, settings.max_new_tokens)
        stream, prompts = _read_prompts(settings, tokenizer, room)
    threads, thread_seconds = choose_threads(
        target, lambda: answer_greedily(target, next(iter(prompts.values()))[0], 4), settings.threads
    )
    drafts, earlier = {"static": draft}, CorrectionStore()
    if stream:
        config = OnlineConfig(num_assistant_tokens=settings.ks[0], seed=settings.seed)
        with OnlineAssistant(target, draft, tokenizer, config, store=earlier) as assistant:
            serve_stream(assistant, stream, settings.max_new_tokens)
        drafts["learned"] = assistant.draft
    systems = _systems(target, drafts, settings, list(earlier))
    how: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "measure_costs": True, "show_progress": True}
    if settings.temperature > 0:  # the first requests of all data sets, as chats are sampled
        count = -(-len(next(iter(prompts.values()))) // len(prompts))
        mixed = [ids for group in prompts.values() for ids in group[:count]]
        prompts = {SAMPLED: mixed, **prompts}
        how["sampling"] = {SAMPLED: {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}}
    report = benchmark(target, systems, prompts, tokenizer=tokenizer, **how)
    origin = provenance(seed=settings.seed, threads=threads)
    return report, {"provenance": origin, "learned_from_requests": len(stream), "thread_seconds": thread_seconds}


def _bundled_prompts(settings: BenchSettings, tokenizer: PreTrainedTokenizerBase) -> tuple[RequestStream, EncodedSets]:
    """Return prompts of the bundled domains to learn from, shuffled, and later ones to answer."""
    count = settings.num_requests or NUM_REQUESTS
    learned, later = (
        [(e.domain, encode_turn(tokenizer, e.prompt, **settings.chat)) for e in examples]
        for examples in split_prompts(settings.learn_requests, count, settings.seed)
    )
    return learned, {domain: [ids for name, ids in later if name == domain] for domain in DOMAINS}


def _read_prompts(
    settings: BenchSettings, tokenizer: PreTrainedTokenizerBase, room: int | None
) -> tuple[RequestStream, EncodedSets]:
    """Return the first prompts of each data set to learn from, shuffled, and the next ones to answer."""
    stream: RequestStream = []
    prompts: EncodedSets = {}
    wanted = settings.learn_requests + (settings.num_requests or NUM_REQUESTS)
    for location in settings.prompts or ():
        name = Path(location).stem if Path(location).is_file() else location
        if name in prompts:
            raise ConfigError(f"Two sources of prompts have the name {name}.")
        source = settings.source(location)
        encoded = encode_prompts(
            read_prompts(source), tokenizer, limit=wanted, max_prompt_tokens=room, **settings.chat
        )
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


SPEED_COLUMNS: dict[str, Callable[[Any], str]] = {
    "tok/s": lambda part: f"{part['tokens_per_second']:.0f}",
    "first ms": lambda part: f"{part['first_token_seconds'] * 1e3:.1f}",
    "alpha": lambda part: figure(part["alpha"]),
    "tok/fwd": lambda part: figure(part["block_efficiency"], 2),
    "x alone [95%]": lambda part: ratio_text(part["times_alone"]),
    "x stock": lambda part: figure(part["times_stock"]["median"], 2) if "times_stock" in part else "-",
    "model": lambda part: figure(part["predicted"] and part["predicted"]["speedup"], 2),
    "wide": lambda part: figure(part["predicted"] and part["predicted"]["speedup_wide"], 2),
    "bound": lambda part: figure(part["predicted"] and part["predicted"]["bound"], 2),
}
ROUND_COLUMNS: dict[str, Callable[[Any], str]] = {
    "draft": lambda part: f"{part['share_of_tokens']['draft']:.0%}",
    "past text": lambda part: f"{part['share_of_tokens']['text']:.0%}",
    "its alpha": lambda part: figure(part["text_alpha"]),
    "ms": lambda part: figure(part["round_seconds"] and part["round_seconds"] * 1e3, 2),
    "drafted": lambda part: figure(part["drafted_per_round"], 1),
    "c": lambda part: figure(part["predicted"] and part["predicted"]["c"]),
    "identical": lambda part: f"{part['outputs']['identical']}/{sum(part['outputs'].values())}",
    "weights MiB": lambda part: f"{part['weights_bytes'] / MEBI:.0f}",
    "peak MiB": lambda part: "-" if part["peak_bytes"] is None else f"{part['peak_bytes'] / MEBI:.0f}",
}


def speed_tables(data: dict[str, Any], datasets: Sequence[str]) -> list[str]:
    """Return the lines that `osd-hf bench` prints of its report."""
    lines = []

    def add_table(title: str, columns: Mapping[str, Callable[[Any], str]], parts: Mapping[str, Any]) -> None:
        rows = [[name, *(cell(part) for cell in columns.values())] for name, part in parts.items()]
        lines.append("\n" + text_table([title, *columns], rows))

    for dataset in datasets:
        parts = data["by_dataset"][dataset]
        add_table(f"{dataset}, {next(iter(parts.values()))['requests']} requests", SPEED_COLUMNS, parts)
    lines += [
        f"\nx alone, x stock: times as fast as the {data['baseline']} and the first stock system (medians).",
        "model: speed-up expected from alpha, k and c, the time of an eager draft forward over a target forward;",
        "wide: with the time of the target's wider forward; bound: the model at alpha = 1.",
    ]
    parts, weights = data["by_dataset"]["all"], data["weights_bytes"]
    add_table("all requests", ROUND_COLUMNS, {n: {**part, "weights_bytes": weights[n]} for n, part in parts.items()})
    lines += [
        "\ndraft, past text: share of the tokens from there; ms: of a round, without those that read prompts; auto",
        "chooses k and source by measured costs, with the last draft and the text of its requests.",
    ]
    assisted = [parts[system["name"]] for system in data["systems"] if system["kind"] != "alone"]
    outputs = {name: sum(part["outputs"][name] for part in assisted) for name in ("tied", "differing")}
    if outputs["tied"]:
        lines.append(f"{outputs['tied']} outputs differ from the target's at a tie of its top two tokens.")
    if outputs["differing"]:
        reason = "" if data["dtype"] == "float32" else f", as wider forwards round differently in {data['dtype']}"
        lines.append(f"{outputs['differing']} outputs DIFFER from the target's own{reason}.")
    return lines


# --- drafts ---------------------------------------------------------------------------------------------------------


def _drafts_by_name(settings: BenchSettings) -> dict[str, str]:
    """Return the name of each draft in reports, without local folders, and where it is loaded from."""
    sources = dict.fromkeys(settings.compare or ())
    shown = {Path(source).name if Path(source).is_absolute() else source: source for source in sources}
    return shown if len(shown) == len(sources) else {source: source for source in sources}


def _compare(settings: BenchSettings) -> int:
    """Compare drafts on new answers of the target; returns the exit code."""
    location, count = settings.prompts[0] if settings.prompts else None, settings.num_requests or NUM_COMPARED_REQUESTS
    dataset = settings.evaluation_set(location, count, settings.max_new_tokens)
    if settings.output_dir is not None:
        make_folder(settings.output_dir)
    target, tokenizer = settings.load_target()
    loading = settings.draft_loading | {"device": settings.device or str(input_device(target))}
    drafts = {name: load_draft(source, target, **loading) for name, source in _drafts_by_name(settings).items()}
    found = compare(target, drafts, tokenizer, dataset, num_assistant_tokens=settings.ks[0], show_progress=True)
    settings.say(found.summary() + "\n\n" + _comparison_tables(found))
    bars = {dataset.name: {name: (worth.speedup, worth.interval) for name, worth in found.worth.items()}}
    title = "Expected by acceptance and measured costs"
    _write(settings, settings.output_dir, found.to_dict(), bars, title)
    return 0


def _comparison_tables(found: DraftComparison) -> str:
    rows = []
    for name, worth in found.worth.items():
        stats, cost = found.scores.totals[name], found.costs[name]
        alpha, (low, high) = f"{figure(stats.alpha)} {stats_interval(stats)}", worth.interval
        speedup = f"{worth.speedup:.2f} [{low:.2f}, {high:.2f}]"
        cells = [alpha, figure(stats.block_efficiency, 2), figure(cost.draft / cost.target), figure(cost.c)]
        rows.append([name, *cells, str(worth.num_assistant_tokens), speedup, worth.answer])
    k = found.num_assistant_tokens
    header = ["draft", f"alpha (k={k}) [95%]", f"tokens/forward (k={k})", "c", "c + check"]
    header += ["best k", "expected speed-up", "worth it"]
    lines = [text_table(header, rows)]
    gains = [
        [f"{best} over {other}", f"{pair.gain:+.3f} [{pair.gain_interval[0]:+.3f}, {pair.gain_interval[1]:+.3f}]"]
        for best, other, pair in found.gains()
    ]
    if gains:
        lines.append("\n" + text_table(["difference on the same prompts", "alpha [95%]"], gains))
    lines.append(
        f"\n{len(found.dataset.prompts)} prompts of {found.dataset.name}, greedy answers of {found.new_tokens:.0f} "
        "tokens on average.\nc: time of a draft forward over a target forward; c + check: plus the target's time to "
        "verify one more\ntoken, the alpha from which drafting pays."
    )
    return "\n".join(lines)


def _score_recorded(settings: BenchSettings) -> int:
    """Score drafts on recorded requests by replay; returns the exit code."""
    k = settings.ks[0]
    traces = list(deque(open_recorded(str(settings.store)), maxlen=settings.num_requests))
    if not traces:
        raise DataError(f"The store {settings.store} has no recordings to replay.")
    rows = []
    report: dict[str, Any] = {"provenance": provenance(), "num_assistant_tokens": k, "drafts": []}
    sources = _drafts_by_name(settings)
    needs_target = any(is_head(source, **settings.draft_fetching) for source in sources.values())
    target = settings.load_target()[0] if needs_target and settings.target else None
    if settings.target and not needs_target:
        logger.warning("--target has no effect: these drafts replay the store without it.")
    for name, source in sources.items():
        draft = load_draft(source, target, device_map=settings.device_map, **settings.draft_loading)
        compared = Comparison([trace.domain for trace in traces], {"static": replay_each(draft, traces, k)})
        totals = {title: part.totals["static"] for title, part in compared.parts().items()}
        report["drafts"].append({"draft": name, "static": {title: figures_of(one) for title, one in totals.items()}})
        for title, one in totals.items():
            figures = [figure(one.alpha), stats_interval(one), figure(one.block_efficiency, 2)]
            rows.append([name, title, str(one.num_requests), *figures])
    header = ["draft", "requests of", "n", "alpha", "95% interval", f"tokens/forward (k={k})"]
    settings.say(text_table(header, rows, left=2))
    settings.write_json(report)
    return 0
