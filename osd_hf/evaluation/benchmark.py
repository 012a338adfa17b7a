"""Benchmark decoding systems on the same requests: the target alone, prompt lookup, and assisted generation."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from osd_hf.acceptance import AcceptanceStats, figures_of
from osd_hf.assistant import OnlineAssistant
from osd_hf.config import OnlineConfig
from osd_hf.decoding.forward import CompiledTarget, DraftForward
from osd_hf.decoding.generator import Clock, LeanDrafting
from osd_hf.errors import ConfigError, UnsupportedModelError, first_line
from osd_hf.evaluation.display import progress
from osd_hf.models import device_clock, eos_ids, set_fixed_k, unwrap
from osd_hf.speedup import expected_speedup
from osd_hf.trace import DraftRound, Trace, num_accepted
from osd_hf.utils.kernels import fast_kernels
from osd_hf.utils.report import process_peak_bytes

KINDS = ("alone", "prompt_lookup", "stock", "lean")
ALL = "all"

TIE = 1e-4  # difference of logits within which wider forwards may choose another token, in float32 too

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Feed = Callable[..., torch.Tensor]


# --- systems and reports --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class System:
    """
    A decoding system.

    Its kind is `"alone"`, the target's `generate`; `"prompt_lookup"` or `"stock"`, transformers' assisted generation
    without or with a draft; or `"lean"`, [`OnlineAssistant`] without learning. Raises ConfigError for settings that do
    not fit the kind.
    """

    name: str
    kind: Literal["alone", "prompt_lookup", "stock", "lean"]
    draft: Any = None  # of "stock" and "lean"
    num_assistant_tokens: int | Literal["auto"] = 5  # only "lean" takes "auto"
    compile_draft: bool | Literal["auto"] = "auto"  # for "lean", as in `OnlineConfig`
    compile_target: bool = False  # for "lean", as in `OnlineConfig`; for "alone", transformers' static cache
    candidates: Literal["both", "draft", "text"] = "both"  # sources of "auto"
    earlier: Sequence[Trace] = ()  # requests that "auto" counts as served before
    acceptance: ControlledAcceptance | None = None  # replaces the draft's proposals
    kernels: bool = False  # use the assistant's CPU kernels; "lean" always does

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"`kind` must be one of {', '.join(KINDS)}, got {self.kind!r}.")
        drafts = self.kind in ("stock", "lean")
        if drafts != (self.draft is not None):
            rule = "needs a" if drafts else "has no"
            raise ConfigError(f"The system {self.name!r} of kind {self.kind} {rule} draft.")
        k, is_compiled = self.num_assistant_tokens, self.compile_target and self.kind != "alone"
        if (k == "auto" or self.compile_draft is True or is_compiled) and self.kind != "lean":
            raise ConfigError(f'Only a lean system drafts "auto" or compiled, got {self.name!r} of kind {self.kind}.')
        if self.kernels and self.kind == "lean":
            raise ConfigError(f"A lean system always uses the kernels; leave out `kernels` for {self.name!r}.")
        if k != "auto" and k < 1:
            raise ConfigError(f"`num_assistant_tokens` must be at least 1, got {k} for {self.name!r}.")

    @property
    def is_the_target(self) -> bool:
        """Whether this is transformers' target alone, the reference of all comparisons."""
        return self.kind == "alone" and not self.kernels and not self.compile_target

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, ready for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "num_assistant_tokens": None if self.kind == "alone" else self.num_assistant_tokens,
            "kernels": self.kernels or self.kind == "lean",
            "compile_draft": self.kind == "lean" and self.compile_draft,
            "compile_target": self.compile_target,
            "candidates": self.candidates if self.num_assistant_tokens == "auto" else None,
            "earlier_requests": len(self.earlier),
            "is_controlled": self.acceptance is not None,
        }


@dataclass(frozen=True, eq=False)
class TimedAnswer:
    """The answer of one system to one request."""

    num_tokens: int
    seconds: float
    first_token_seconds: float
    stats: AcceptanceStats
    outcome: str  # see `compare_outputs`
    peak_bytes: int | None  # additional device memory; `None` on a CPU


@dataclass(frozen=True)
class RoundTimes:
    """
    Times of rounds, as sums that can be added. A round lies between two deliveries to the streamer; the first one,
    which reads the prompt, does not count. On CUDA each clock reading waits for the device.
    """

    rounds: int = 0
    drafted: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0

    def __add__(self, other: RoundTimes) -> RoundTimes:
        return RoundTimes(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def to_dict(self) -> dict[str, Any]:
        """Return the number of rounds and, per round, drafted tokens and seconds; ready for JSON."""
        n = self.rounds or math.nan
        times = {name: getattr(self, name) / n for name in ("seconds", "draft_seconds", "target_seconds")}
        remaining = (self.seconds - self.draft_seconds - self.target_seconds) / n
        return {"rounds": self.rounds, "drafted": self.drafted / n, **times, "remaining_seconds": remaining}


@dataclass(frozen=True, eq=False)
class BenchmarkReport:
    """The measurements. `dataset=None` pools all data sets."""

    systems: tuple[System, ...]
    answers: Mapping[str, Mapping[str, Sequence[TimedAnswer]]]  # data set -> system -> answers
    rounds: Mapping[str, Mapping[str, RoundTimes]]  # the same for the watched answers
    facts: Mapping[str, Any]  # device, dtype, memory of weights, systems whose target could not be compiled

    @property
    def alone(self) -> str:
        """Name of the target alone."""
        return next(system.name for system in self.systems if system.is_the_target)

    def answers_of(self, system: str, dataset: str | None = None) -> list[TimedAnswer]:
        """Return the answers of a system, in the order of the requests."""
        return [answer for name in self.answers if dataset in (None, name) for answer in self.answers[name][system]]

    def rounds_of(self, system: str, dataset: str | None = None) -> RoundTimes:
        """Return the times of a system's rounds."""
        return sum((self.rounds[name][system] for name in self.answers if dataset in (None, name)), RoundTimes())

    def stats_of(self, system: str, dataset: str | None = None) -> AcceptanceStats:
        """Return the acceptance over the timed answers of a system."""
        return sum((answer.stats for answer in self.answers_of(system, dataset)), AcceptanceStats())

    def ratio(self, system: str, other: str, dataset: str | None = None) -> dict[str, Any]:
        """Return the ratio of tokens per second to another system's, over requests: `median` and 95% `interval`."""
        pairs = zip(self.answers_of(system, dataset), self.answers_of(other, dataset), strict=True)
        return median_ratio((a.num_tokens / a.seconds) / (b.num_tokens / b.seconds) for a, b in pairs)

    def predicted(self, system: str, dataset: str | None = None) -> dict[str, float] | None:
        """
        Return what the cost model predicts from measured acceptance and costs; `None` for the target alone, or if
        answers are too short: `c`, the time of a drafted token over a one-token target forward; `speedup`,
        `expected_speedup(alpha, k, c)`; `speedup_wide`, the same with the measured wider target forward; `bound`, the
        speed-up at alpha = 1. Without a fixed k, measured tokens per round replace the expected ones.
        """
        own, alone = self.rounds_of(system, dataset), self.rounds_of(self.alone, dataset)
        kind, draft, k = next((s.kind, s.draft, s.num_assistant_tokens) for s in self.systems if s.name == system)
        if kind == "alone" or not own.rounds or not alone.rounds:
            return None
        stats = self.stats_of(system, dataset)
        one_token = alone.target_seconds / alone.rounds
        c = own.draft_seconds / own.drafted / one_token if own.drafted else 0.0
        wide = own.target_seconds / own.rounds / one_token
        if draft is not None and isinstance(k, int) and stats.examined:
            drafted, speedup, bound = float(k), expected_speedup(stats.alpha, k, c), expected_speedup(1, k, c)
        else:
            drafted = stats.drafted / stats.target_forwards  # past text takes no forward
            speedup = stats.block_efficiency / (c * drafted + 1)
            bound = (drafted + 1) / (c * drafted + 1)
        as_wide = (c * drafted + 1) / (c * drafted + wide)
        return {"c": c, "speedup": speedup, "speedup_wide": speedup * as_wide, "bound": bound}

    def figures(self, system: str, dataset: str | None = None) -> dict[str, Any]:
        """Return all figures of one system on one data set, ready for JSON."""
        answers, stats = self.answers_of(system, dataset), self.stats_of(system, dataset)
        tokens, seconds = sum(a.num_tokens for a in answers), sum(a.seconds for a in answers)
        outcomes = [answer.outcome for answer in answers]
        peaks = [answer.peak_bytes for answer in answers if answer.peak_bytes is not None]
        times_alone, predicted = self.ratio(system, self.alone, dataset), self.predicted(system, dataset)
        figures: dict[str, Any] = {
            "requests": len(answers),
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "first_token_seconds": statistics.median(a.first_token_seconds for a in answers),
            **{k: v for k, v in figures_of(stats).items() if k != "accepted_length_histogram"},
            "drafted_per_round": (stats.drafted + stats.text_drafted) / stats.target_forwards,
            "share_of_tokens": {"draft": stats.accepted / stats.emitted, "text": stats.text_accepted / stats.emitted},
            "outputs": {name: outcomes.count(name) for name in ("identical", "tied", "differing")},
            "peak_bytes": max(peaks, default=None),
            "times_alone": times_alone,
            "predicted": predicted,
            "round": self.rounds_of(system, dataset).to_dict(),
        }
        alone = self.answers_of(self.alone, dataset)
        rate_alone = sum(a.num_tokens for a in alone) / sum(a.seconds for a in alone)
        figures["pooled_speedup"] = figures["tokens_per_second"] / rate_alone
        stock = next((s.name for s in self.systems if s.kind == "stock"), None)
        if stock is not None and system not in (stock, self.alone):
            figures["times_stock"] = self.ratio(system, stock, dataset)
        if predicted is not None:
            # The measured speed-up includes the time to read the prompts with both models.
            figures["measured_over_predicted"] = figures["pooled_speedup"] / predicted["speedup"]
            figures["measured_over_predicted_wide"] = figures["pooled_speedup"] / predicted["speedup_wide"]
        return figures

    def to_dict(self) -> dict[str, Any]:
        """Return the figures by data set and for all (`"all"`), by system, and the times of each request."""
        names = [system.name for system in self.systems]
        parts = {**{name: name for name in self.answers}, ALL: None}
        times = ("num_tokens", "seconds", "first_token_seconds")
        return {
            **self.facts,
            "systems": [system.to_dict() for system in self.systems],
            "by_dataset": {
                shown: {name: self.figures(name, dataset) for name in names} for shown, dataset in parts.items()
            },
            "requests": {
                dataset: {
                    name: [{key.removeprefix("num_"): getattr(answer, key) for key in times} for answer in answered]
                    for name, answered in by_system.items()
                }
                for dataset, by_system in self.answers.items()
            },
        }


# --- the benchmark --------------------------------------------------------------------------------------------------


def benchmark(
    target: Any, systems: Sequence[System], prompts: Mapping[str, Sequence[Sequence[int]]], *, max_new_tokens: int,
    watched_requests: int = 3, tokenizer: Any = None, show_progress: bool = False,
) -> BenchmarkReport:  # fmt: skip
    """
    Let systems answer the same requests greedily, one request after the other in all systems.

    After a warm-up, each request is timed. Some requests are then answered again with timed forwards of both models,
    for the times of rounds and the cost model.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`, *optional*):
            A decoder-only model; by default its tokenizer is found by the model's name.
        systems (`Sequence[System]`): Exactly one of them is the target alone.
        prompts (`Mapping[str, Sequence[Sequence[int]]]`): Data set -> token ids of each prompt.
        max_new_tokens (`int`): Maximum tokens of an answer.
        watched_requests (`int`, *optional*, defaults to 3): Requests per data set with timed forwards.
        show_progress (`bool`, *optional*, defaults to `False`): Whether to show progress bars.

    Raises:
        ConfigError: Duplicate names, no or several systems that are the target alone, or no prompts.
        UnsupportedModelError: An encoder-decoder.
    """
    names = [system.name for system in systems]
    if len(set(names)) < len(names) or sum(system.is_the_target for system in systems) != 1:
        raise ConfigError(
            f"Systems need different names, and one of them must be the target alone, got {', '.join(names)}."
        )
    if not prompts or ALL in prompts or not all(prompts.values()):
        raise ConfigError(f'Each data set needs prompts and a name other than "{ALL}", got {", ".join(prompts)}.')
    if unwrap(target).config.is_encoder_decoder:
        raise UnsupportedModelError("The benchmark needs a decoder-only target, got an encoder-decoder.")
    requests = [_TimedRequest(name, tuple(ids)) for name, group in prompts.items() for ids in group]
    watched = [r for name in prompts for r in [r for r in requests if r.dataset == name][:watched_requests]]
    # Compilation repeats for each doubling of the length, so warm up one request of each length.
    compiles = unwrap(target).device.type != "cpu" or any(s.compile_draft is True or s.compile_target for s in systems)
    lengths = {r: (len(r.ids) + max_new_tokens - 1).bit_length() if compiles else 0 for r in requests}
    first = {(r.dataset, lengths[r]): r for r in reversed(requests)}
    ways = [_Way(target, system, tokenizer, max_new_tokens) for system in systems]

    def turns(method: Callable[..., Any], chosen: Sequence[_TimedRequest], what: str) -> Iterator[tuple[Any, ...]]:
        answered = in_turns([functools.partial(method, way) for way in ways], chosen)
        return progress(answered, what, "request", len(chosen)) if show_progress else answered

    answers: dict[str, dict[str, list[TimedAnswer]]] = {d: {name: [] for name in names} for d in prompts}
    rounds = {d: dict.fromkeys(names, RoundTimes()) for d in prompts}
    with contextlib.ExitStack() as served:
        for way in ways:
            if way.assistant is not None:
                served.enter_context(way.assistant)
        for _ in turns(_Way.answer, list(first.values()), "warming up"):
            pass
        alone = [system.is_the_target for system in systems].index(True)
        for request, given in zip(requests, turns(_Way.answer, requests, "in turns"), strict=True):
            reference, _ = given[alone]
            for name, (tokens, answer) in zip(names, given, strict=True):
                outcome = compare_outputs(target, request.ids, reference, tokens)
                answers[request.dataset][name].append(replace(answer, outcome=outcome))
        for request, times in zip(watched, turns(_Way.watch, watched, "watched"), strict=True):
            for name, one_times in zip(names, times, strict=True):
                rounds[request.dataset][name] += one_times
    own = unwrap(target).get_memory_footprint()
    weights = {w.system.name: own + (0 if w.draft is None else w.draft.get_memory_footprint()) for w in ways}
    eager = [w.system.name for w in ways if w.assistant and (c := w.assistant.compiled_target) and c.is_eager]
    facts = _facts(unwrap(target), max_new_tokens, weights) | {"target_not_compiled": eager}
    return BenchmarkReport(tuple(systems), answers, rounds, facts)


def in_turns(ways: Sequence[Callable[[Request], Answer]], requests: Iterable[Request]) -> Iterator[tuple[Answer, ...]]:
    """
    Yield the answers of all ways to each request, in the order of the ways. The way that answers first rotates, so
    that a change of the machine's speed affects all ways.
    """
    for number, request in enumerate(requests):
        order = [(number + turn) % len(ways) for turn in range(len(ways))]
        answers = {way: ways[way](request) for way in order}
        yield tuple(answers[way] for way in range(len(ways)))


@torch.no_grad()
def compare_outputs(target: Any, prompt_ids: Sequence[int], alone: list[int], assisted: list[int]) -> str:
    """Return `"identical"`; `"tied"` if the answers first differ at two tokens that are equally likely for the target;
    or `"differing"`."""
    if alone == assisted:
        return "identical"
    at = next((i for i, (a, b) in enumerate(zip(alone, assisted, strict=False)) if a != b), None)
    if at is None:
        return "differing"
    context = torch.tensor([[*prompt_ids, *alone[:at]]], device=target.device)
    top = target(context).logits[0, -1].float().topk(2)
    is_tie = float(top.values[0] - top.values[1]) < TIE
    return "tied" if is_tie and {alone[at], assisted[at]} == set(top.indices.tolist()) else "differing"


def median_ratio(ratios: Iterable[float]) -> dict[str, Any]:
    """Return the `median` and its 95% `interval` by a bootstrap over requests."""
    values = np.array(list(ratios))
    draws = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(np.median(values[draws], axis=1), [0.025, 0.975])
    return {"median": float(np.median(values)), "interval": [float(low), float(high)]}


def pad_setting(model: Any) -> dict[str, int]:
    """Return the padding token as an argument of `generate` if the model names none; otherwise transformers warns at
    each request."""
    ends = eos_ids(model.generation_config)
    return {"pad_token_id": ends[0]} if ends and model.generation_config.pad_token_id is None else {}


# --- one answer -----------------------------------------------------------------------------------------------------


class _TimedRequest(NamedTuple):
    dataset: str
    ids: tuple[int, ...]


class _Notes(BaseStreamer):
    """Record what one answer delivered and when, the inputs of the target and, if asked, the times of forwards."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.moments: list[float] = []
        self.delivered, self.fed = list[torch.Tensor](), list[torch.Tensor]()
        self.spans: dict[str, list[tuple[float, float]]] = {"draft": [], "target": []}

    def put(self, value: torch.Tensor) -> None:
        self.moments.append(self.clock())
        self.delivered.append(value.flatten())

    def end(self) -> None:
        pass

    def note_input(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.fed.append(kwargs["input_ids"])

    def time_module(self, model: Any, side: str) -> list[Any]:
        """Time the forwards of a model; returns the handles that end it."""
        began = 0.0

        def begin(*_: Any) -> None:
            nonlocal began
            began = self.clock()

        def end(*_: Any) -> None:
            self.spans[side].append((began, self.clock()))

        return [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]

    def timed_feed(self, forward: DraftForward) -> Callable[..., torch.Tensor]:
        feed = forward.feed

        def timed(*args: Any) -> torch.Tensor:
            began = self.clock()
            logits = feed(*args)
            self.spans["draft"].append((began, self.clock()))
            return logits

        return timed

    def rounds(self) -> list[DraftRound]:
        """Return the rounds: the target's inputs after the known tokens are the drafted ones."""
        rounds = []
        known = len(self.delivered[0])
        for fed, tokens in zip(self.fed, self.delivered[1:], strict=False):
            drafted, emitted = fed[0, known:].cpu().numpy().astype(np.int32), tokens.numpy()
            rounds.append(DraftRound(drafted, num_accepted(drafted, emitted), len(emitted)))
            known = 1
        return rounds

    def time_compiled(self, compiled: CompiledTarget) -> Callable[[], None]:
        """Time the rounds of a compiled target; returns the function that ends it."""
        make = compiled.verification

        def timed(*args: Any) -> Any:
            made: Any = make(*args)
            if made is not None:
                forward = made.forward

                def run(**kwargs: Any) -> Any:
                    began = self.clock()
                    output = forward(**kwargs)
                    self.spans["target"].append((began, self.clock()))
                    return output

                made.forward = run
            return made

        compiled.verification = timed  # type: ignore[method-assign, assignment]
        return functools.partial(setattr, compiled, "verification", make)

    def round_times(self, known: Sequence[DraftRound] | None = None) -> RoundTimes:
        """Return the times of the rounds, which follow from the target's inputs unless they are given."""
        first, rounds = self.moments[1], (self.rounds() if known is None else known)[1:]
        draft, target = (sum(end - began for began, end in spans if began >= first) for spans in self.spans.values())
        drafted = sum(r.num_drafted - r.text_counts[0] for r in rounds)
        return RoundTimes(len(rounds), drafted, self.moments[-1] - first, draft, target)


def serve_before(assistant: OnlineAssistant, traces: Sequence[Trace]) -> None:
    """Let an assistant treat these requests as served before: their text may be proposed, and their tokens define the
    draft vocabulary."""
    requests = assistant.drafts.requests[None]
    for trace in traces:
        assistant.remember(np.concatenate([trace.prompt_ids, trace.completion_ids]))
        with requests.lock:
            requests.observe(trace)


class _Way:
    """A system that is ready to answer."""

    def __init__(self, target: Any, system: System, tokenizer: Any, max_new_tokens: int) -> None:
        self.system, self.target = system, target
        self.draft: Any = None
        self.assistant: OnlineAssistant | None = None
        self.model = unwrap(target)
        # transformers' assisted generation fails on stop strings.
        self.kwargs: dict[str, Any] = {
            "do_sample": False, "max_new_tokens": max_new_tokens, "stop_strings": None, **pad_setting(self.model)
        }  # fmt: skip
        k = system.num_assistant_tokens
        if system.kind == "alone" and system.compile_target:
            self.kwargs["cache_implementation"] = "static"
        elif system.kind == "prompt_lookup":
            self.kwargs["prompt_lookup_num_tokens"] = k
        elif system.kind == "stock":
            self.draft = self.kwargs["assistant_model"] = copy.deepcopy(system.draft).eval()
            assert isinstance(k, int)
            set_fixed_k(unwrap(self.draft).generation_config, k)
            unwrap(self.draft).generation_config.stop_strings = None
            if system.acceptance is not None:
                system.acceptance.steer_module(self.draft)
        elif system.kind == "lean":
            config = OnlineConfig(
                num_assistant_tokens=k, candidates=system.candidates, compile_draft=system.compile_draft,
                compile_target=system.compile_target, num_logprobs=1, update_strategy="manual",
            )  # fmt: skip
            self.assistant = OnlineAssistant(target, system.draft, tokenizer, config)
            if system.earlier and config.reads_text:
                serve_before(self.assistant, system.earlier)
            self.draft = self.assistant.draft
            assert self.assistant.drafting is not None
            if system.acceptance is not None:
                system.acceptance.steer_lean(self.assistant.drafting)

    def _generate(self, request: _TimedRequest, notes: _Notes, on_trace: Any = None) -> list[int]:
        ids = torch.tensor([request.ids], device=self.model.device)
        kwargs = {**self.kwargs, "attention_mask": torch.ones_like(ids), "streamer": notes}
        if self.assistant is not None:  # a hook would recompile a compiled target
            self.assistant.reset_stats()
            output = self.assistant.generate(ids, domain=request.dataset, learn=False, on_trace=on_trace, **kwargs)
        else:
            ours = [self.model, *([] if self.draft is None else [self.draft])] if self.system.kernels else []
            hook = self.model.register_forward_pre_hook(notes.note_input, with_kwargs=True)
            with fast_kernels(*ours, is_request=True), hook:
                output = self.target.generate(ids, **kwargs)
        return list(output[0, len(request.ids) :].tolist())  # waits for the device

    def answer(self, request: _TimedRequest) -> tuple[list[int], TimedAnswer]:
        """Return the tokens of an answer and its times, without the outcome."""
        notes, device, before = _Notes(), self.model.device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        started = time.perf_counter()
        tokens = self._generate(request, notes)
        seconds = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
        stats = AcceptanceStats.from_rounds(notes.rounds()) if self.assistant is None else self.assistant.stats
        return tokens, TimedAnswer(len(tokens), seconds, notes.moments[1] - started, stats, "", peak)

    def watch(self, request: _TimedRequest) -> RoundTimes:
        """Return the times of the rounds of one answer."""
        clock = device_clock(self.model)
        notes, traces, handles = _Notes(clock), list[Trace](), list[Any]()
        with contextlib.ExitStack() as timed:
            if self.assistant is not None and self.assistant.drafting is not None:
                timed.callback(feeds_through(self.assistant.drafting, notes.timed_feed))
                if self.assistant.compiled_target is not None:
                    timed.callback(notes.time_compiled(self.assistant.compiled_target))
            elif self.draft is not None:
                handles += notes.time_module(unwrap(self.draft), "draft")
            if not self.system.compile_target:  # a hook would recompile it
                handles += notes.time_module(self.model, "target")
            for handle in handles:
                timed.enter_context(handle)
            self._generate(request, notes, on_trace=None if self.assistant is None else traces.append)
        return notes.round_times(traces[0].rounds if traces else None)


def _facts(target: Any, max_new_tokens: int, weights: dict[str, int]) -> dict[str, Any]:
    on_cuda = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if on_cuda else str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_new_tokens": max_new_tokens,
        "weights_bytes": weights,
        "process_peak_bytes": process_peak_bytes(),
    }


# --- controlled acceptance -----------------------------------------------------------------------------------------


CONTROLLED_LABEL = "controlled acceptance, random weights: times mean something, text does not"

SHAPES = {  # hidden size, layers, heads, intermediate size, vocabulary
    "8b": (4096, 32, 32, 12288, 151_936),
    "0.6b": (1024, 28, 16, 3072, 151_936),
    "7b": (4096, 32, 32, 11008, 32000),
    "1.5b": (1536, 28, 12, 8960, 32000),
    "160m": (768, 12, 12, 3072, 32000),
    "0.15b": (1024, 6, 16, 2816, 32000),
    "tiny-target": (64, 2, 4, 128, 512),
    "tiny-draft": (32, 1, 2, 64, 512),
}
POSITIONS = 4096

CERTAIN_LOGIT = 2.0**14  # above any logit of random weights, and within float16


def random_pair(
    target_shape: str, draft_shape: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Any, Any]:
    """
    Build a Llama-shaped target and draft of two `SHAPES` with random weights. Answers end only at their maximum.

    The target's head is its shifted embedding, which outweighs the layers, so the next token is always clear.
    Otherwise, in half precision, wider forwards would sometimes choose other tokens, and acceptance would vary.

    Raises:
        ConfigError: An unknown shape, different vocabularies, or a device that is missing or too small.
    """
    for shape in (target_shape, draft_shape):
        if shape not in SHAPES:
            raise ConfigError(f"A shape must be one of {', '.join(SHAPES)}, got {shape!r}.")
    if SHAPES[target_shape][-1] != SHAPES[draft_shape][-1]:
        raise ConfigError(f"The shapes {target_shape} and {draft_shape} have different vocabularies.")
    try:
        with torch.device(device), torch.random.fork_rng():
            torch.manual_seed(seed)
            target, draft = (_random_model(SHAPES[shape], dtype) for shape in (target_shape, draft_shape))
            with torch.no_grad():
                embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
                embedding.normal_(0, 100)
                head.copy_(embedding.roll(1, 0) * (target.config.initializer_range / 100))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"The pair does not fit the device {device!r}: {first_line(error)}.") from error
    return target, draft


def _random_model(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    hidden, layers, heads, intermediate, vocab = shape
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        intermediate_size=intermediate, vocab_size=vocab, max_position_embeddings=POSITIONS,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


class ControlledAcceptance:
    """
    Replaces a draft's proposals: at each position by the token that the target will emit there, with a given
    probability, otherwise by another one. The draft still runs its forwards. All systems get the same proposals.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self._random = random.Random(seed)
        self._proposals: dict[tuple[int, ...], list[int]] = {}

    def record(self, prompt_ids: Sequence[int], answer: Sequence[int], alpha: float) -> None:
        """Choose the proposals after a prompt: the tokens of the target's answer, each with the probability `alpha`.
        Raises ConfigError for an invalid `alpha` and for a prompt that is recorded already."""
        if not 0 <= alpha <= 1:
            raise ConfigError(f"A controlled acceptance must be between 0 and 1, got {alpha}.")
        if tuple(prompt_ids) in self._proposals:
            raise ConfigError("A prompt can be recorded once only, with one acceptance.")

        def proposal(token: int) -> int:
            if self._random.random() < alpha:
                return token
            return (token + 1 + self._random.randrange(self.vocab_size - 1)) % self.vocab_size

        self._proposals[tuple(prompt_ids)] = [*prompt_ids, *map(proposal, answer)]

    def steer_module(self, draft: Any) -> None:
        """Put proposals into the logits of each forward of this decoder-only model."""
        proposals: list[int] = []

        def steer(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            length = int(output.past_key_values.get_seq_length())
            if kwargs["input_ids"].shape[1] == length:
                proposals[:] = self._after(kwargs["input_ids"])
            _put(output.logits[:, -1], proposals, length)

        draft.register_forward_hook(steer, with_kwargs=True)

    def steer_lean(self, drafting: LeanDrafting) -> None:
        """Put proposals into the logits of the draft of each request."""

        def steered(forward: DraftForward) -> Feed:
            feed = forward.feed
            proposals: list[int] = []

            def steer(ids: torch.Tensor) -> torch.Tensor:
                if forward.length == 0:
                    proposals[:] = self._after(ids)
                logits = feed(ids)
                _put(logits, proposals, forward.length)
                return logits

            return steer

        feeds_through(drafting, steered)

    def _after(self, ids: torch.Tensor) -> list[int]:
        context = tuple(ids[0].tolist())
        return next((p for prompt, p in self._proposals.items() if context[: len(prompt)] == prompt), [])


def _put(logits: torch.Tensor, proposals: list[int], length: int) -> None:
    if length < len(proposals):
        logits[0, proposals[length]] = CERTAIN_LOGIT


def feeds_through(drafting: LeanDrafting, around: Callable[[DraftForward], Feed]) -> Callable[[], None]:
    """Replace the `feed` of each later request's draft forward by `around(forward)`; returns the function that undoes
    it."""
    make = drafting.generator

    def generator(*args: Any, **kwargs: Any) -> Any:
        made: Any = make(*args, **kwargs)
        if made is not None:
            made.forward.feed = around(made.forward)
        return made

    def undo() -> None:
        drafting.generator = make  # type: ignore[method-assign]

    drafting.generator = generator  # type: ignore[method-assign]
    return undo


def controlled_acceptance(
    target: Any, prompts: Mapping[float, Sequence[Sequence[int]]], max_new_tokens: int, seed: int = 0
) -> ControlledAcceptance:
    """Record the answers of a decoder-only target to prompts, by their acceptance; raises ConfigError."""
    acceptance = ControlledAcceptance(int(target.config.get_text_config().vocab_size), seed)
    for alpha, group in prompts.items():
        for prompt in group:
            acceptance.record(prompt, answer_greedily(target, prompt, max_new_tokens)[0], alpha)
    return acceptance


def answer_greedily(target: Any, prompt_ids: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
    """Return the answer of a decoder-only target and its wall time in seconds."""
    input_ids = torch.tensor([list(prompt_ids)], device=target.device)
    started = time.perf_counter()
    output = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=max_new_tokens,
        stop_strings=None,
    )  # fmt: skip
    answer = output[0, len(prompt_ids) :].tolist()  # waits for the device
    return answer, time.perf_counter() - started
