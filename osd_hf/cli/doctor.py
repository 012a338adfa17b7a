"""The command `osd-hf doctor`: whether an engine drafts and answers with the models that it should."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from osd_hf.cli.arguments import in_groups
from osd_hf.cli.flags import (
    SERVER,
    THREADS,
    DraftRevision,
    Prompts,
    Reporting,
    Server,
    TargetLoading,
    recorded,
)
from osd_hf.decoding.hook import scored
from osd_hf.engines.completions import ResponseReader
from osd_hf.engines.doctor import (
    LEAST_WINDOWS,
    NUM_LOGPROBS,
    Counts,
    Finding,
    Fit,
    Window,
    fit,
    judge_draft,
    judge_pay,
    judge_target,
    other_versions,
    quiet,
    sample,
)
from osd_hf.errors import ConfigError, DataError, ServerError
from osd_hf.evaluation.display import progress
from osd_hf.models import load_config, load_eos_ids, load_model, load_tokenizer, prompt_room, vocab_size_of
from osd_hf.trace import Trace
from osd_hf.utils.report import provenance

HEALTHY, ILL, UNKNOWN = 0, 1, 2  # exit codes
CHECKED = 8  # answers that a local target reads
WORDS = {"healthy": "healthy", "ill": "ILL", "unknown": "could not tell", "note": "note"}

_server, _models, _prompts, _answers = in_groups(SERVER, "models", "prompts", "answers")


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(Server, DraftRevision, TargetLoading, Prompts, Reporting):
    """The flags of `osd-hf doctor`."""

    url: str = _server("address of the engine itself, such as http://localhost:8000", required=True)
    draft: str = _models("draft that the engine should have; beside a published version, older ones are tried as well",
                         required=True, metavar="ID|PATH")  # fmt: skip
    target: str = _models("target that the engine should have, for its tokenizer and vocabulary (no weights are read)",
                          required=True, metavar="ID|PATH")  # fmt: skip
    check_target: bool = _models("load the target's weights, and let it read some answers", False)
    threads: int | None = _models(THREADS, metavar="N")
    store: str | None = _prompts("folder of collected requests, in place of prompts; the newest are asked again and "
                                 "compared with their answers", metavar="DIR")  # fmt: skip
    num_requests: int = _prompts("requests that are asked; up to twice as many where others use the engine", 48,
                                 metavar="N")  # fmt: skip
    max_new_tokens: int = _answers("most tokens of an answer", 64, metavar="N")
    token_seconds: float | None = _answers("seconds of a token in this engine without a draft, at this concurrency, "
                                           "to say whether drafting pays", metavar="S")  # fmt: skip

    def check(self) -> None:
        """Raises ConfigError for what is too small, and for what does not go together."""
        self.check_counts("concurrency", "max_new_tokens", "threads")
        least = LEAST_WINDOWS * self.concurrency
        if self.num_requests < least:
            raise ConfigError(f"--num-requests must be at least {least} with this --concurrency: as many are asked at "
                              f"once, {LEAST_WINDOWS} times, got {self.num_requests}.")  # fmt: skip
        if self.token_seconds is not None and not 0 < self.token_seconds < math.inf:
            raise ConfigError(f"--token-seconds must be a positive number, got {self.token_seconds}.")
        if self.store is not None and self.prompts is not None:
            raise ConfigError("Give one of --prompts and --store.")
        of_weights = self.changed("device_map", "quantization")
        if of_weights and not self.check_target:
            raise ConfigError(f"{of_weights[0]} is of the target's weights, which --check-target alone loads.")


def doctor_command(settings: DoctorSettings) -> int:
    """Examine an engine; returns the exit code: 0 where nothing is wrong, 1 where something is, 2 where it could not
    be told."""
    settings.check()
    key = settings.key()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    findings: list[Finding] = []
    try:
        for finding in _examined(settings, key):
            findings.append(finding)
            settings.say(f"{WORDS[finding.state]}: {finding.text}")
    except (ServerError, DataError) as error:
        findings.append(Finding("engine", "unknown", str(error)))
        settings.say(f"{WORDS['unknown']}: {error}")
    states = {finding.state for finding in findings}
    code = ILL if "ill" in states else UNKNOWN if "unknown" in states else HEALTHY
    verdict = {HEALTHY: "healthy", ILL: "ill", UNKNOWN: "could not tell"}[code]
    found = [finding.to_dict() for finding in findings]
    settings.write_json({"provenance": provenance(), "verdict": verdict, "findings": found})
    return code


def _examined(settings: DoctorSettings, key: str | None) -> Iterator[Finding]:
    config = load_config(settings.target, **settings.fetching)
    size = int(config.get_text_config().vocab_size)
    link = Path(settings.draft)
    if link.exists():  # what it points to now, whatever is published meanwhile
        settings = replace(settings, draft=str(link.resolve()))
    draft = load_model(settings.draft, **settings.draft_loading)
    if (own := vocab_size_of(draft)) != size:
        text = f"the draft has {own} tokens and the target {size}, a pair that vLLM refuses: see `osd-hf export`"
        yield Finding("vocabulary", "ill", text)
        return
    ends = load_eos_ids(settings.target, **settings.fetching)
    reader = ResponseReader(size, min(NUM_LOGPROBS, size), ends)
    with settings.client(key) as client:
        k = Counts.read(client.metrics()).k
        if not k:
            yield Finding("engine", "ill", "the engine has no draft: start it with --speculative-config")
            return
        known = _known(settings, size)
        most = client.most_tokens()
        room = None if most is None else most - settings.max_new_tokens - k
        prompts = [trace.prompt_ids.tolist() for trace in known] or _encoded(settings, config, draft.config, room)
        fitting = [ids for ids in prompts if room is None or len(ids) <= room]
        number = settings.num_requests // settings.concurrency
        asked = sample(
            client, reader, fitting, windows=number, concurrency=settings.concurrency,
            max_new_tokens=settings.max_new_tokens,
        )  # fmt: skip
        windows = list(progress(asked, "asking", "window", number))
    chosen = quiet(windows)
    if len(chosen) < LEAST_WINDOWS:
        least = LEAST_WINDOWS * settings.concurrency
        raise DataError(f"There are {len(fitting)} prompts that fit; at least {least} are needed.")
    if loud := sum(window.foreign > 0 for window in windows):
        used = "these are left out" if len(chosen) < len(windows) else "the verdict allows for these"
        yield Finding("engine", "note", f"other clients were answered in {loud} of {len(windows)} windows; {used}")
    answers = [trace for window in windows for trace in window.answers]
    if known:
        yield from _compared(known, answers)
    if settings.check_target:
        target, some = load_model(settings.target, **settings.target_loading), answers[:CHECKED]
        rows = scored(target, some, [reader.num_logprobs] * len(some), CHECKED)
        yield judge_target(list(zip(rows, some, strict=True)), f"those of {Path(settings.target).name} here")
    found = judge_draft(chosen, fit(chosen, draft, _name(settings.draft)), _others(settings, chosen))
    if link.exists() and str(link.resolve()) != settings.draft:
        found = replace(found, state="unknown", text=f"{_name(str(link))} was published meanwhile: {found.text}")
    yield found
    counts = Counts.joined(window.counts for window in chosen)
    if counts.drafts:
        yield judge_pay(counts, settings.token_seconds)


def _name(draft: str) -> str:
    """What a sentence calls a draft: the name of the version that a link points to."""
    return Path(draft).resolve().name if Path(draft).exists() else draft


def _others(settings: DoctorSettings, windows: Sequence[Window]) -> Iterator[Fit]:
    for path in other_versions(Path(settings.draft)) if Path(settings.draft).exists() else ():
        yield fit(windows, load_model(str(path), **settings.draft_loading), path.name)


def _known(settings: DoctorSettings, size: int) -> list[Trace]:
    """The newest requests of the store, one for each prompt. Their rows are the target's own, sampled or not."""
    if settings.store is None:
        return []
    newest: dict[bytes, Trace] = {}
    for trace in recorded(settings.store):
        if not (trace.is_rescored or trace.is_encoder_decoder) and len(trace) and trace.num_kept:
            newest.pop(trace.prompt_ids.tobytes(), None)
            newest[trace.prompt_ids.tobytes()] = trace
    chosen = list(newest.values())[-2 * settings.num_requests :]
    if not chosen:
        raise DataError(f"The store {settings.store} has no requests with rows of the target: ask --prompts.")
    if odd := next((trace for trace in chosen if trace.vocab_size != size), None):
        raise DataError(f"The store has requests of a vocabulary of {odd.vocab_size} tokens, the target {size}.")
    return chosen


def _encoded(settings: DoctorSettings, config: Any, draft_config: Any, room: int | None) -> list[list[int]]:
    tokenizer = load_tokenizer(settings.target, **settings.fetching)
    rooms = [room, prompt_room(config, draft_config, settings.max_new_tokens)]
    limit = min((r for r in rooms if r is not None), default=None)
    encoded = settings.encode_prompts(tokenizer, limit, limit=2 * settings.num_requests)
    return [ids for _, ids in encoded.prompts]


def _compared(known: Sequence[Trace], answers: Sequence[Trace]) -> Iterator[Finding]:
    """The answers beside those of the store."""
    by_prompt = {trace.prompt_ids.tobytes(): trace for trace in known}
    pairs = [(by_prompt[now.prompt_ids.tobytes()], now) for now in answers]
    names = {trace.target for trace in known[-len(answers) :]}, {now.target for now in answers}
    if names[0] != names[1]:
        then, called = (", ".join(sorted(map(str, those))) for those in names)
        yield Finding("target", "note", f"the engine answers as {called}, the requests of the store are of {then}")
    yield judge_target(pairs, "those of the store")
