"""Systems side by side: the target alone, prompt lookup, stock and lean assisted generation, on the same requests."""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer

from osd_hf.assistant import OnlineAssistant
from osd_hf.bench.controlled import compare_outputs, feeds_through, in_turns
from osd_hf.bench.display import progress
from osd_hf.bench.report import ALL, BenchmarkReport, RoundTimes, System, TimedAnswer
from osd_hf.capture.recording import record_traces
from osd_hf.config import OnlineConfig
from osd_hf.drafting.forward import DraftForward
from osd_hf.drafting.generator import Clock
from osd_hf.errors import ConfigError, DataError, UnsupportedModelError
from osd_hf.hub.cards import Evaluation, EvaluationSet
from osd_hf.metrics import AcceptanceStats
from osd_hf.pair import unwrap
from osd_hf.prompts import encode_prompts
from osd_hf.replay import replay_each
from osd_hf.trace import DraftRound, num_accepted
from osd_hf.utils.report import provenance

__all__ = ["BenchmarkReport", "RoundTimes", "System", "TimedAnswer", "benchmark", "evaluate"]


def benchmark(
    target: Any,
    systems: Sequence[System],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    *,
    max_new_tokens: int,
    watched_requests: int = 3,
    tokenizer: Any = None,
    show_progress: bool = False,
) -> BenchmarkReport:
    """
    Let systems answer the same requests greedily, request by request in turns.

    Warmed up, each request is timed: while that goes on, only the tokens fed to the target and the moments at which
    tokens are delivered are noted. Some requests are then answered once more, under watch: forwards of both models
    are timed, which gives the times of rounds and the costs that predictions are made from.

    Args:
        target (`PreTrainedModel`):
            Decoder-only.
        systems (`Sequence[System]`):
            One of them of the kind `"alone"`.
        prompts (`Mapping[str, Sequence[Sequence[int]]]`):
            Data set -> token ids of each prompt.
        max_new_tokens (`int`):
            Bound of an answer.
        watched_requests (`int`, *optional*, defaults to 3):
            Per data set, the first ones.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Of target and drafts; found by the models' names otherwise.
        show_progress (`bool`, *optional*, defaults to `False`):
            Bars on the standard error.

    Raises:
        ConfigError: systems that share a name, no or several of kind `"alone"`, a data set without prompts or named
            `"all"`.
        UnsupportedModelError: an encoder-decoder.
    """
    names = [system.name for system in systems]
    if len(set(names)) < len(names) or [s.kind for s in systems].count("alone") != 1:
        raise ConfigError(f"Systems need names of their own, and one the kind alone, got {', '.join(names)}.")
    if not prompts or ALL in prompts or not all(prompts.values()):
        raise ConfigError(f'Each data set needs prompts and a name other than "{ALL}", got {", ".join(prompts)}.')
    if unwrap(target).config.is_encoder_decoder:
        raise UnsupportedModelError("The benchmark needs a decoder-only target, got an encoder-decoder.")
    requests = [_Request(name, tuple(ids)) for name, group in prompts.items() for ids in group]
    watched = [r for name in prompts for r in [r for r in requests if r.dataset == name][:watched_requests]]
    # One of each length: up to each doubling of it, a compiled draft is compiled anew.
    first = {(r.dataset, (len(r.ids) + max_new_tokens - 1).bit_length()): r for r in reversed(requests)}
    ways = [_Way(target, system, tokenizer, max_new_tokens) for system in systems]

    def turns(method: Callable[..., Any], chosen: Sequence[_Request], what: str) -> Iterator[tuple[Any, ...]]:
        answered = in_turns([functools.partial(method, way) for way in ways], chosen)
        return progress(answered, what, "request", len(chosen)) if show_progress else answered

    answers: dict[str, dict[str, list[TimedAnswer]]] = {d: {name: [] for name in names} for d in prompts}
    rounds = {d: dict.fromkeys(names, RoundTimes()) for d in prompts}
    try:
        for _ in turns(_Way.answer, list(first.values()), "warming up"):
            pass
        alone = [system.kind for system in systems].index("alone")
        for request, given in zip(requests, turns(_Way.answer, requests, "in turns"), strict=True):
            reference = given[alone].tokens
            for name, one in zip(names, given, strict=True):
                outcome = compare_outputs(target, request.ids, reference, one.tokens)
                answers[request.dataset][name].append(one.timed(outcome))
        for request, times in zip(watched, turns(_Way.watch, watched, "watched"), strict=True):
            for name, one_times in zip(names, times, strict=True):
                rounds[request.dataset][name] += one_times
    finally:
        for way in ways:
            way.close()
    weights = {way.system.name: _weights_bytes(target) + _weights_bytes(way.draft) for way in ways}
    return BenchmarkReport(tuple(systems), answers, rounds, _facts(unwrap(target), max_new_tokens, weights))


# --- one answer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    dataset: str
    ids: tuple[int, ...]


class _Notes(BaseStreamer):
    """Notes what one answer delivered and when, what the target was fed and, if asked, when each forward ran."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.moments: list[float] = []
        self.delivered: list[torch.Tensor] = []
        self.fed: list[torch.Tensor] = []
        self.spans: dict[str, list[tuple[float, float]]] = {"draft": [], "target": []}

    def put(self, value: torch.Tensor) -> None:
        self.moments.append(self.clock())
        self.delivered.append(value.flatten())

    def end(self) -> None:
        pass

    def note_input(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.fed.append(kwargs["input_ids"])

    def time_module(self, model: Any, side: str) -> list[Any]:
        """Time the forwards of a model until the handles are removed."""
        began = 0.0

        def begin(*_: Any) -> None:
            nonlocal began
            began = self.clock()

        def end(*_: Any) -> None:
            self.spans[side].append((began, self.clock()))

        return [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]

    def timed_feed(self, forward: DraftForward) -> Callable[[torch.Tensor], torch.Tensor]:
        feed = forward.feed

        def timed(ids: torch.Tensor) -> torch.Tensor:
            began = self.clock()
            logits = feed(ids)
            self.spans["draft"].append((began, self.clock()))
            return logits

        return timed

    def rounds(self) -> list[DraftRound]:
        """Drafted are the tokens that the target was fed behind those it knew; the prompt was delivered first."""
        rounds = []
        known = len(self.delivered[0])
        for fed, tokens in zip(self.fed, self.delivered[1:], strict=False):
            drafted, emitted = fed[0, known:].cpu().numpy().astype(np.int32), tokens.numpy()
            rounds.append(DraftRound(drafted, num_accepted(drafted, emitted), len(emitted)))
            known = 1
        return rounds

    def round_times(self) -> RoundTimes:
        first, rounds = self.moments[1], self.rounds()[1:]
        draft, target = (sum(end - began for began, end in spans if began >= first) for spans in self.spans.values())
        drafted = sum(r.num_drafted for r in rounds)
        return RoundTimes(len(rounds), drafted, self.moments[-1] - first, draft, target)


@dataclass(frozen=True, eq=False)
class _Answer:
    tokens: list[int]
    seconds: float
    first_token_seconds: float
    notes: _Notes
    peak_bytes: int | None

    def timed(self, outcome: str) -> TimedAnswer:
        stats = AcceptanceStats.from_rounds(self.notes.rounds())
        return TimedAnswer(len(self.tokens), self.seconds, self.first_token_seconds, stats, outcome, self.peak_bytes)


class _Way:
    """A system, ready to answer."""

    def __init__(self, target: Any, system: System, tokenizer: Any, max_new_tokens: int) -> None:
        self.system = system
        self.target = target
        self.draft: Any = None
        self.assistant: OnlineAssistant | None = None
        self.kwargs: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
        settings = unwrap(target).generation_config
        if settings.pad_token_id is None and settings.eos_token_id is not None:
            # Otherwise transformers remarks at each request that it takes the end token.
            eos = settings.eos_token_id
            self.kwargs["pad_token_id"] = eos if isinstance(eos, int) else eos[0]
        k = system.num_assistant_tokens
        if system.kind == "prompt_lookup":
            self.kwargs["prompt_lookup_num_tokens"] = k
        elif system.kind == "stock":
            self.draft = self.kwargs["assistant_model"] = copy.deepcopy(system.draft).eval()
            drafting = unwrap(self.draft).generation_config
            drafting.num_assistant_tokens, drafting.num_assistant_tokens_schedule = k, "constant"
            drafting.assistant_confidence_threshold = 0.0
            if system.acceptance is not None:
                system.acceptance.steer_module(self.draft)
        elif system.kind == "lean":
            config = OnlineConfig(num_assistant_tokens=k, compile_draft=system.compile_draft, update_strategy="manual")
            self.assistant = OnlineAssistant(target, system.draft, tokenizer, config)
            self.draft = self.assistant.draft
            assert self.assistant.drafting is not None
            if system.acceptance is not None:
                system.acceptance.steer_lean(self.assistant.drafting)

    def close(self) -> None:
        if self.assistant is not None:
            self.assistant.close()

    def _generate(self, request: _Request, notes: _Notes) -> list[int]:
        ids = torch.tensor([request.ids], device=unwrap(self.target).device)
        kwargs = {**self.kwargs, "attention_mask": torch.ones_like(ids), "streamer": notes}
        handle = unwrap(self.target).register_forward_pre_hook(notes.note_input, with_kwargs=True)
        try:
            if self.assistant is not None:
                output = self.assistant.generate(ids, domain=request.dataset, learn=False, **kwargs)
            else:
                output = self.target.generate(ids, **kwargs)
            tokens: list[int] = output[0, len(request.ids) :].tolist()  # waits for the device
        finally:
            handle.remove()
        return tokens

    def answer(self, request: _Request) -> _Answer:
        """Time one answer."""
        notes, device = _Notes(), unwrap(self.target).device
        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        started = time.perf_counter()
        tokens = self._generate(request, notes)
        seconds = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
        return _Answer(tokens, seconds, notes.moments[1] - started, notes, peak)

    def watch(self, request: _Request) -> RoundTimes:
        """Times of the rounds of one answer."""
        notes = _Notes(_waiting_clock(unwrap(self.target).device))
        handles = notes.time_module(unwrap(self.target), "target")
        undo = None
        if self.assistant is not None and self.assistant.drafting is not None:
            undo = feeds_through(self.assistant.drafting, notes.timed_feed)
        elif self.draft is not None:
            handles += notes.time_module(unwrap(self.draft), "draft")
        try:
            self._generate(request, notes)
        finally:
            for handle in handles:
                handle.remove()
            if undo is not None:
                undo()
        return notes.round_times()


def _waiting_clock(device: torch.device) -> Clock:
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def _weights_bytes(model: Any) -> int:
    if model is None:
        return 0
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


def _facts(target: Any, max_new_tokens: int, weights: dict[str, int]) -> dict[str, Any]:
    on_cuda = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if on_cuda else str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_new_tokens": max_new_tokens,
        "weights_bytes": weights,
        "peak_bytes_are": (
            "device memory that an answer took beyond what lay there before: weights, what learning keeps, and a "
            "compiled draft's cache, which stays between answers"
            if on_cuda
            else "not measured: the systems share one process, whose resident memory does not tell them apart"
        ),
        "process_peak_bytes": _process_peak_bytes(),
    }


def _process_peak_bytes() -> int | None:
    """Largest resident memory of this process so far; `None` where the system does not say."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


KS = range(1, 9)  # that are tried, where k is not given


def evaluate(
    target: Any,
    before: Any,
    after: Any,
    tokenizer: Any,
    dataset: EvaluationSet,
    *,
    num_assistant_tokens: int | None = None,
    timed_requests: int = 0,
    show_progress: bool = False,
) -> Evaluation:
    """
    Measure a draft as it was and as it is on the target's greedy answers.

    Args:
        target (`PreTrainedModel`), before (`PreTrainedModel`), after (`PreTrainedModel`):
            Of one vocabulary; left as they are.
        tokenizer (`PreTrainedTokenizerBase`):
            Of all three.
        dataset (`EvaluationSet`):
            The prompts.
        num_assistant_tokens (`int`, *optional*):
            k. By default, where requests are timed, the one with the most tokens per second by replay and measured
            costs; otherwise 5.
        timed_requests (`int`, *optional*, defaults to 0):
            Prompts that are also answered live, by the target alone and with both drafts in turns. Decoder-only pairs.
        show_progress (`bool`, *optional*, defaults to `False`):
            Bars on the standard error.

    Raises:
        DataError: fewer than two prompts leave room for their answers.
    """
    positions = [getattr(m.config.get_text_config(), "max_position_embeddings", None) for m in (target, before)]
    limit = min((p for p in positions if p is not None), default=None)
    room = None if limit is None or target.config.is_encoder_decoder else limit - dataset.max_new_tokens
    encoded = encode_prompts(dataset.prompts, tokenizer, max_prompt_tokens=room)
    if len(encoded.prompts) < 2:
        raise DataError(
            f"Of {len(dataset.prompts)} prompts of {dataset.name!r}, {len(encoded.prompts)} leave room for an answer "
            f"of {dataset.max_new_tokens} tokens; two are needed. Bound the answers lower, or take shorter prompts."
        )
    dataset = EvaluationSet(dataset.name, tuple(p for p, _ in encoded.prompts), dataset.max_new_tokens)
    ids = [ids for _, ids in encoded.prompts]
    traces = list(record_traces(target, ids, max_new_tokens=dataset.max_new_tokens, num_logprobs=1))
    speedups: dict[str, dict[str, Any]] = {}
    k = num_assistant_tokens or 5
    if timed_requests and not target.config.is_encoder_decoder:
        asked = {"evaluation": ids[: min(timed_requests, len(ids))]}
        if num_assistant_tokens is None:
            k = _tuned(target, after, tokenizer, asked, traces, dataset.max_new_tokens)
        systems = [
            System("target alone", "alone"),
            System("transformers, draft before", "stock", before, k),
            System("transformers, this draft", "stock", after, k),
            System("osd_hf, this draft, auto", "lean", after, "auto"),
        ]
        report = benchmark(
            target, systems, asked, max_new_tokens=dataset.max_new_tokens, watched_requests=0, tokenizer=tokenizer,
            show_progress=show_progress,
        )  # fmt: skip
        speedups = {s.name: report.ratio(s.name, report.alone) for s in systems if s.name != report.alone}
    as_it_was, as_it_is = (tuple(replay_each(draft, traces, k)) for draft in (before, after))
    return Evaluation(dataset, k, as_it_was, as_it_is, speedups, provenance())


def _tuned(
    target: Any, draft: Any, tokenizer: Any, asked: dict[str, list[list[int]]], traces: Any, max_new_tokens: int
) -> int:
    """The k with the most tokens per second: rounds by replay, their times from a few watched ones."""
    first = {name: group[:4] for name, group in asked.items()}
    systems = [System("alone", "alone"), *(System(f"k{k}", "stock", draft, k) for k in (1, 7))]
    report = benchmark(target, systems, first, max_new_tokens=max_new_tokens, watched_requests=0, tokenizer=tokenizer)
    # Seconds of a round are taken for a line in k through the two that were timed.
    seconds = []
    for k in (1, 7):
        answers = report.answers_of(f"k{k}")
        seconds.append(sum(a.seconds for a in answers) / sum(a.stats.target_forwards for a in answers))
    slope = max((seconds[1] - seconds[0]) / 6, 0.0)

    def rate(k: int) -> float:
        stats = sum(replay_each(draft, traces, k), AcceptanceStats())
        return stats.block_efficiency / (seconds[0] + (k - 1) * slope)

    return max(KS, key=rate)
