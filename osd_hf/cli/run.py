"""The command `osd-hf run`: serve prompts with a journal and a saved state, from which a killed run resumes."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import PreTrainedModel

from osd_hf.acceptance import AcceptanceStats, Comparison
from osd_hf.assistant import OnlineAssistant
from osd_hf.cli.settings import (
    PAPER,
    CommandParser,
    PromptSettings,
    Reporting,
    ServedPairSettings,
    flag,
    learning_parser,
    stop_on_signal,
)
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, LearnerError, StateError, first_line
from osd_hf.evaluation import display
from osd_hf.evaluation.benchmark import answer_traced, pad_setting
from osd_hf.evaluation.display import COMPARED, comparison_row, text_table
from osd_hf.learning.session import has_session
from osd_hf.models import prompt_room
from osd_hf.prompts import EncodedPrompts, prompts_digest
from osd_hf.replay import replay
from osd_hf.utils.disk import hold_lock, open_privately, sync_folder, write_whole
from osd_hf.utils.report import json_text, make_folder, provenance, write_report
from osd_hf.utils.streaming import Rounds

logger = logging.getLogger(__name__)

SOURCES = ("target", "draft", "prompts")
NEEDED = ("target", "prompts")  # without a draft, the target gets a head
SETTINGS = "settings.json"
JOURNAL = "journal.jsonl"
STATE = "state"
LOCK = ".run.lock"
SAVE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class RunSettings(PromptSettings, ServedPairSettings, Reporting):
    """Flags of `osd-hf run`."""

    max_new_tokens: int = flag("maximum tokens of an answer", 128, minimum=1)
    do_sample: bool = flag("sample answers, reproducible by --seed; otherwise they are greedy", False)
    temperature: float | None = flag("temperature of sampling", None, needs="do_sample")
    top_p: float | None = flag("probability mass to sample from", None, needs="do_sample")
    top_k: int | None = flag("number of tokens to sample from", None, needs="do_sample", minimum=0)
    learn: bool = flag("let the draft learn", True)
    paper: bool = flag(PAPER, False)
    output_dir: Path = flag("folder of report, plot, journal, draft and state", Path("osd_hf_run"))
    resume: bool = flag("resume the run in the output folder, with its settings", False)
    save_every: int | None = flag("updates between two saves; by default one minute", None, minimum=1, needs="learn")
    keep_text: bool = flag("keep prompts and answers in the journal", False)
    store: str | None = flag("also store the captured requests", None, metavar="DIR", needs="learn")
    report_to: list[str] | None = flag("also log to trackio, tensorboard, ...", None, metavar="NAME", needs="learn")

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """Arguments of `generate` for every request."""
        sampling = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        given = {name: value for name, value in sampling.items() if value is not None}
        return {"do_sample": self.do_sample, "max_new_tokens": self.max_new_tokens, **given}

    def check(self) -> None:
        if not self.pair and (missing := [name for name in NEEDED if not getattr(self, name)]):
            hint = f" There is no run in {self.output_dir} to resume." if self.resume else ""
            raise ConfigError(f"--{' and --'.join(missing)} must be given, or --pair bundled.{hint}")
        temperature, top_p = (1 if value is None else value for value in (self.temperature, self.top_p))
        if not (0 < temperature < math.inf and 0 < top_p <= 1):
            raise ConfigError("--temperature must be positive, and --top-p above 0 and at most 1.")

    def flags(self, config: OnlineConfig) -> dict[str, Any]:
        """Return the values of all flags with which a run is resumed, ready for JSON."""
        found = {**vars(self), **config.to_dict(), "store": self.store and str(Path(self.store).resolve())}
        left_out = ("resume", "output_dir", "json", "update_strategy")
        own = {name: value for name, value in found.items() if name not in left_out}
        return own | {name: self.place(name) for name in SOURCES}

    def place(self, name: str) -> str | None:
        """Return the Hub id of a source, or its absolute path."""
        place: str | None = getattr(self, name)
        return str(Path(place).resolve()) if place is not None and Path(place).exists() else place

    def identity(self, config: OnlineConfig, encoded: EncodedPrompts) -> dict[str, Any]:
        """Return what must stay the same for a run to be resumed, ready for JSON."""
        own = ("quantization", "revision", "draft_revision", "learn", "keep_text")
        return {
            **{name: self.place(name) or self.pair for name in SOURCES},
            **({"draft": "own head"} if self.own_head or not (self.pair or self.draft) else {}),
            **({"paper": True} if self.paper else {}),
            "requests": len(encoded.prompts),
            "prompts_fingerprint": prompts_digest(encoded.prompts),
            "dtype": "float32" if self.pair else self.dtype,
            **{name: value for name in own if (value := getattr(self, name)) is not None},
            **self.generate_kwargs,
            **{f"config.{name}": value for name, value in config.to_dict().items() if name != "update_strategy"},
        }


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command."""
    # Updates run between two requests, so that a run can be resumed.
    parser = learning_parser(RunSettings, arguments, without=("update_strategy",), k=5, **how)
    given = parser.read(arguments)
    if given["resume"]:  # flags of the first command are the defaults
        with contextlib.suppress(OSError, ValueError, KeyError):
            saved = json.loads((given["output_dir"] / SETTINGS).read_text())["flags"]
            parser.set_defaults(**{name: value for name, value in saved.items() if name in parser.rules})
    return parser


def run_command(settings: RunSettings, config: OnlineConfig) -> int:
    """Serve, learn and report; returns the exit code."""
    if config.num_assistant_tokens is None:
        raise ConfigError("--num-assistant-tokens must not be none: comparisons need one k throughout.")
    folder = settings.output_dir
    pair = target, draft, tokenizer = settings.load_pair()
    room = prompt_room(target.config, draft.config, settings.max_new_tokens)
    encoded = settings.encode_prompts(tokenizer, room, seed=config.seed)
    identity = settings.identity(config, encoded)
    _check_folder(folder, identity, resume=settings.resume)
    config = replace(config, update_strategy="manual")
    assistant = OnlineAssistant(*pair, config, store=settings.store, report_to=settings.report_to)
    open_folder(folder, {**identity, "flags": settings.flags(config)})
    try:
        with assistant:
            served = serve(settings, assistant, draft, encoded)
    except KeyboardInterrupt as interrupt:
        where = "" if not interrupt.args else f"{interrupt.args[0]} requests are saved in {folder}; "
        raise KeyboardInterrupt(f"{where}go on with: osd-hf run --resume --output-dir {folder}") from interrupt
    assistant.save_pretrained(folder / "draft")
    origin = provenance(device=str(target.device), dtype=str(target.dtype), seed=config.seed)
    _report(settings, {"provenance": origin, "settings": identity}, encoded, served, assistant.stats.speedup)
    return 0


def _report(
    settings: RunSettings,
    facts: dict[str, Any],
    encoded: EncodedPrompts,
    served: Sequence[Served],
    speedup: float | None,
) -> None:
    """Write and show the report of a run."""
    folder, identity = settings.output_dir, facts["settings"]
    frozen_is = "expected by replay on the sampled answers" if settings.do_sample else "exact but for rounding"
    if speedup is None:  # nothing was left to serve
        with contextlib.suppress(OSError, ValueError, KeyError):
            speedup = json.loads((folder / "report.json").read_text())["speedup"]
    places = {n: Path(v).name for n, v in identity.items() if isinstance(v, str) and Path(v).is_absolute()}
    report = {
        **facts,
        "settings": {**identity, **places},
        "skipped": {reason: len(rows) for reason, rows in encoded.skipped.items()},
        "frozen_is": frozen_is,
        "speedup": speedup,  # of the requests since the start or the last resume
        **report_on(served),
    }
    compared = _compared(served)
    display.plot_learning(folder / "learning.png", compared, title=display.WHILE_SERVING)
    write_report(folder / "report.json", report)
    parts = {**compared.parts(), "last 20%": compared.last_fifth()}
    settings.say(text_table(COMPARED, [comparison_row(name, one) for name, one in parts.items()]))
    times = "" if speedup is None else f", {speedup:.2f} times the speed of the target alone"
    settings.say(
        f"\n{report['tokens_per_second'] or 0:.0f} tokens/s{times}, {report['seconds']:.1f} s of answers, "
        f"{report['learning_seconds']:.1f} s of learning, which saved {report['saved_seconds']:.1f} s over the frozen "
        f"draft; draft version {report['draft_version']}. Frozen: {frozen_is}.\n"
        f"Wrote report.json, learning.png, journal.jsonl and draft/ to {folder}"
        + ("." if not settings.learn else "; state/ is for --resume and holds tokens of requests.")
    )
    settings.write_json(report)


@dataclass(frozen=True)
class Served:
    """One request of a run, a line of its journal."""

    index: int  # row of the prompt in its source
    domain: str | None
    learned: AcceptanceStats
    frozen: AcceptanceStats  # of the original draft, by replay
    seconds: float  # of the answer, without learning
    draft_version: int
    learning_seconds: float = 0.0
    update: Mapping[str, Any] | None = None  # report of the update that followed
    prompt: str | None = None  # texts, if kept
    answer: str | None = None

    def to_line(self) -> str:
        sides = {name: getattr(self, name).to_dict() for name in ("learned", "frozen")}
        return json_text({**vars(self), **sides})

    @classmethod
    def from_line(cls, line: str) -> Served:
        data = json.loads(line)
        sides = {name: AcceptanceStats.from_dict(data[name]) for name in ("learned", "frozen")}
        return cls(**{**data, **sides})


def _check_folder(folder: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
    """Raise ConfigError for a folder in use, and StateError if it has no run with this identity to resume."""
    try:
        if not folder.exists() or all(entry.name.startswith(".") for entry in folder.iterdir()):
            if resume:
                logger.warning("There is no run in %s to resume: a new one starts.", folder)
            return
    except (OSError, ValueError) as error:
        raise ConfigError(f"The output folder {folder} cannot be used: {error}.") from error
    if not resume:
        raise ConfigError(f"{folder} is not empty. Choose another output folder, or resume the run in it: --resume.")
    try:
        earlier = json.loads((folder / SETTINGS).read_text())
    except (OSError, ValueError) as error:
        raise StateError(f"There is no run in {folder} to resume: {SETTINGS} is missing or broken.") from error
    earlier.pop("flags", None)
    current = json.loads(json.dumps(identity))
    differing = [name for name in {**earlier, **current} if earlier.get(name) != current.get(name)]
    if differing:
        shown = "; ".join(f"{name} was {earlier.get(name)!r}, is {current.get(name)!r}" for name in differing)
        raise StateError(f"The run in {folder} has other settings: {shown}. Leave these out, or start a new run.")


def open_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Create the folder of a run and write its settings; raises ConfigError."""
    make_folder(folder)
    write_whole(folder / SETTINGS, (json.dumps(settings, indent=1) + "\n").encode())


def serve(
    settings: RunSettings, assistant: OnlineAssistant, frozen: PreTrainedModel, prompts: EncodedPrompts
) -> list[Served]:
    """Serve the prompts that the run in this folder has not served yet, with a new assistant with the strategy
    `"manual"`. The saved state decides where a run resumes: later journal lines are dropped and their requests are
    served again, from the same draft, so that a resumed run ends as an uninterrupted one. Without learning, the
    journal alone decides. SIGINT and SIGTERM drop the answer in progress, save, and raise KeyboardInterrupt with the
    number of saved requests. `frozen` is the original draft. Raises ConfigError, StateError and LearnerError."""
    folder, learn = settings.output_dir, settings.learn
    generate_kwargs = settings.generate_kwargs | pad_setting(assistant.target)
    lock = hold_lock(folder / LOCK, f"Another process serves into {folder}. Choose another output folder.")
    try:
        served = _resume(assistant, folder, learn)
        updates = sum(request.update is not None for request in served)
        k, saved_at = assistant.config.compared_k, time.monotonic()
        assert k is not None
        with (
            open(folder / JOURNAL, "a", opener=open_privately) as file,
            display.learning_bar(len(prompts.prompts), "serving") as advance,
            stop_on_signal() as stop,
        ):

            def check_signal(_: Any) -> None:
                if stop.is_set():
                    raise KeyboardInterrupt

            generate_kwargs["streamer"] = Rounds(check_signal)
            for request in served:
                advance(request.learned, request.frozen, request.draft_version)
            for count, (prompt, ids) in enumerate(prompts.prompts[len(served) :], len(served) + 1):
                torch.manual_seed(assistant.config.seed * 1_000_003 + count - 1)
                started, learned_before = time.perf_counter(), assistant.learning_seconds
                try:
                    answer, trace = answer_traced(assistant, ids, domain=prompt.domain, learn=learn, **generate_kwargs)
                except KeyboardInterrupt:  # a request that failed leaves nothing
                    if stop.is_set():
                        break
                    raise
                seconds = time.perf_counter() - started - (assistant.learning_seconds - learned_before)
                # With "auto", the draft drafts easy tokens and text comes first: replay compares both drafts fairly.
                if assistant.config.num_assistant_tokens == k:
                    learned = AcceptanceStats.from_trace(trace)
                else:
                    serving = frozen if trace.draft_version == 0 else assistant.serving_draft(trace.domain)
                    learned = replay(serving, [trace], k)
                is_due = learn and assistant.is_learning
                update = _update(assistant, count) if is_due else None
                updates += is_due
                text = assistant.tokenizer.decode(answer, skip_special_tokens=True) if settings.keep_text else None
                request = Served(
                    index=prompt.index,
                    domain=prompt.domain,
                    learned=learned,
                    frozen=replay(frozen, [trace], k),
                    seconds=seconds,
                    draft_version=trace.draft_version,
                    learning_seconds=assistant.learning_seconds - learned_before,
                    update=update,
                    prompt=prompt.text if settings.keep_text else None,
                    answer=text,
                )
                served.append(request)
                file.write(request.to_line() + "\n")
                file.flush()
                if settings.save_every is None:
                    is_time = time.monotonic() - saved_at >= SAVE_SECONDS
                else:
                    is_time = is_due and updates % settings.save_every == 0
                if learn and (is_time or count == len(prompts.prompts)):
                    _save(assistant, file, folder)
                    saved_at = time.monotonic()
                advance(request.learned, request.frozen, request.draft_version)
                if stop.is_set():
                    break
            if stop.is_set() and len(served) < len(prompts.prompts):
                if learn:
                    _save(assistant, file, folder)
                raise KeyboardInterrupt(f"{len(served)} of {len(prompts.prompts)}")
        return served
    finally:
        lock.release()


def _save(assistant: OnlineAssistant, journal: TextIO, folder: Path) -> None:
    """Save the state after the journal and the store, so that neither is ever older."""
    os.fsync(journal.fileno())
    sync_folder(folder)
    if assistant.store is not None:
        assistant.store.flush()
    assistant.save_state(folder / STATE)


def _update(assistant: OnlineAssistant, requests: int) -> dict[str, Any]:
    try:
        return assistant.update().to_dict()
    except Exception as error:
        cause = error.__cause__ if isinstance(error, LearnerError) and error.__cause__ else error
        hint = "The last saved state is intact; fix the cause, then go on with --resume."
        raise LearnerError(f"Learning failed after request {requests}: {first_line(cause)}. {hint}") from error


def _resume(assistant: OnlineAssistant, folder: Path, learn: bool) -> list[Served]:
    """Load the saved state, cut the journal to it, and return its requests; raises StateError. Without learning, all
    complete lines of the journal count."""
    state, journal, count = folder / STATE, folder / JOURNAL, None
    if learn:
        if not has_session(state):
            if journal.exists():
                logger.warning("Nothing was saved in %s before that run ended; it starts again.", state)
            journal.unlink(missing_ok=True)
            return []
        assistant.load_state(state)
        count = assistant.stats.num_requests
    try:
        lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
        served = [Served.from_line(line) for line in lines[:count] if line.endswith("\n")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"The journal {journal} cannot be read: {first_line(error)}. Start a new run.") from error
    if count is not None and len(served) < count:
        raise StateError(f"The journal {journal} has {len(served)} of the {count} saved requests. Start a new run.")
    if len(served) < len(lines):
        write_whole(journal, "".join(lines[: len(served)]).encode())
    return served


def report_on(served: Sequence[Served]) -> dict[str, Any]:
    """Return acceptance of the learning and the frozen draft, overall and by domain."""
    compared, seconds = _compared(served), sum(s.seconds for s in served)
    rounds = {name: stats.target_forwards for name, stats in compared.totals.items()}
    # The frozen draft would have needed more rounds, each as long as a round took.
    saved = (rounds["frozen"] - rounds["learned"]) * seconds / rounds["learned"] if rounds["learned"] else 0.0
    updates = [{"after_requests": i, **s.update} for i, s in enumerate(served, 1) if s.update is not None]
    return {
        "overall": compared.to_dict(),
        "last_fifth": compared.last_fifth().to_dict(),
        "by_domain": {name: part.to_dict() for name, part in compared.parts().items() if name != "all"},
        "updates": updates,
        "draft_version": updates[-1]["version"] if updates else 0,
        "seconds": seconds,
        "learning_seconds": sum(s.learning_seconds for s in served),
        "saved_seconds": saved,
        "tokens_per_second": sum(s.learned.emitted for s in served) / seconds if seconds else None,
    }


def _compared(served: Sequence[Served]) -> Comparison:
    sides = {"frozen": [s.frozen for s in served], "learned": [s.learned for s in served]}
    return Comparison([s.domain for s in served], sides)
