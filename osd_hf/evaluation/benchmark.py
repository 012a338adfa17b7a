"""Benchmark decoding systems on the same requests: the target alone, prompt lookup, and assisted generation."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer

from osd_hf.acceptance import AcceptanceStats, figures_of
from osd_hf.assistant import OnlineAssistant
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, UnsupportedModelError
from osd_hf.evaluation.display import progress
from osd_hf.models import device_clock, eos_ids, input_device, set_fixed_k, unwrap
from osd_hf.recording import measured_costs
from osd_hf.speedup import ForwardSeconds, expected_block_efficiency
from osd_hf.trace import DraftRound, Trace, num_accepted
from osd_hf.utils.kernels import fast_kernels

KINDS = ("alone", "prompt_lookup", "stock", "lean")
ALL = "all"

TIE = 1e-4  # difference of logits within which wider forwards may choose another token, in float32 too

Request = TypeVar("Request")
Answer = TypeVar("Answer")


# --- systems and reports --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class System:
    """A decoding system. Its kind is `"alone"`, the target's `generate`; `"prompt_lookup"` or `"stock"`, transformers'
    assisted generation without or with a draft; or `"lean"`, [`OnlineAssistant`] without learning. Raises ConfigError
    for settings that do not fit the kind."""

    name: str
    kind: Literal["alone", "prompt_lookup", "stock", "lean"]
    draft: Any = None  # of "stock" and "lean"
    num_assistant_tokens: int | Literal["auto"] = 5  # only "lean" takes "auto"
    compile_draft: bool | Literal["auto"] = "auto"  # for "lean", as in `OnlineConfig`
    compile_target: bool = False  # for "lean", as in `OnlineConfig`; for "alone", transformers' static cache
    candidates: Literal["both", "draft", "text"] = "both"  # sources of "auto"
    earlier: Sequence[Trace] = ()  # requests that "auto" counts as served before
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
        """Whether this is transformers' eager target alone, the reference of all answers."""
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
        }


@dataclass(frozen=True, eq=False)
class TimedAnswer:
    """The answer of one system to one request."""

    num_tokens: int
    seconds: float
    first_token_seconds: float
    stats: AcceptanceStats
    outcome: str  # see `compare_outputs`; "sampled" answers are not compared
    peak_bytes: int | None  # additional device memory; `None` on a CPU


@dataclass(frozen=True, eq=False)
class BenchmarkReport:
    """The measurements. `dataset=None` pools all data sets."""

    systems: tuple[System, ...]
    answers: Mapping[str, Mapping[str, Sequence[TimedAnswer]]]  # data set -> system -> answers
    facts: Mapping[str, Any]  # device, dtype, memory of weights, systems whose target could not be compiled
    costs: Mapping[str, ForwardSeconds] = field(default_factory=dict)  # of the systems with a draft, if measured

    @property
    def alone(self) -> str:
        """Name of the baseline: transformers' target alone, eager or compiled, whichever is faster."""
        names = [system.name for system in self.systems if system.kind == "alone" and not system.kernels]
        return min(names, key=lambda name: sum(a.seconds / max(a.num_tokens, 1) for a in self.answers_of(name)))

    def answers_of(self, system: str, dataset: str | None = None) -> list[TimedAnswer]:
        """Return the answers of a system, in the order of the requests."""
        return [answer for name in self.answers if dataset in (None, name) for answer in self.answers[name][system]]

    def stats_of(self, system: str, dataset: str | None = None) -> AcceptanceStats:
        """Return the acceptance over the timed answers of a system."""
        return sum((answer.stats for answer in self.answers_of(system, dataset)), AcceptanceStats())

    def ratio(self, system: str, other: str, dataset: str | None = None) -> dict[str, Any]:
        """Return the ratio of tokens per second to another system's, over requests: `median` and 95% `interval`."""
        pairs = zip(self.answers_of(system, dataset), self.answers_of(other, dataset), strict=True)
        return median_ratio((a.num_tokens / a.seconds) / (b.num_tokens / b.seconds) for a, b in pairs)

    def predicted(self, system: str, dataset: str | None = None) -> dict[str, float] | None:
        """Return what the cost model predicts from acceptance and the costs of forwards; `None` without measured
        costs. `c` is the time of a draft forward over a one-token target forward; `speedup` is
        `expected_speedup(alpha, k, c)`; `speedup_wide` also counts the time to verify more than one token; `bound` is
        the speed-up at alpha = 1. Without a fixed k, measured tokens per round replace the expected ones."""
        cost, stats = self.costs.get(system), self.stats_of(system, dataset)
        if cost is None or not stats.target_forwards:
            return None
        c, k = cost.draft / cost.target, next(s.num_assistant_tokens for s in self.systems if s.name == system)
        if isinstance(k, int) and stats.examined:
            drafted, text, emitted = float(k), 0.0, expected_block_efficiency(stats.alpha, k)
        else:  # candidates from text take no draft forward
            drafted, text = (count / stats.target_forwards for count in (stats.drafted, stats.text_drafted))
            emitted = stats.block_efficiency
        return {
            "c": c,
            "speedup": emitted / (c * drafted + 1),
            "speedup_wide": emitted / (c * drafted + (drafted + text) * cost.more / cost.target + 1),
            "bound": (drafted + text + 1) / (c * drafted + 1),
        }

    def figures(self, system: str, dataset: str | None = None) -> dict[str, Any]:
        """Return all figures of one system on one data set, ready for JSON."""
        answers, stats = self.answers_of(system, dataset), self.stats_of(system, dataset)
        tokens, seconds = sum(a.num_tokens for a in answers), sum(a.seconds for a in answers)
        outcomes = [answer.outcome for answer in answers]
        peaks = [answer.peak_bytes for answer in answers if answer.peak_bytes is not None]
        rounds = stats.target_forwards - len(answers)  # without the first ones, which read the prompts
        alone = self.answers_of(self.alone, dataset)
        rate_alone = sum(a.num_tokens for a in alone) / sum(a.seconds for a in alone)
        figures: dict[str, Any] = {
            "requests": len(answers),
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "first_token_seconds": statistics.median(a.first_token_seconds for a in answers),
            "round_seconds": sum(a.seconds - a.first_token_seconds for a in answers) / rounds if rounds else None,
            **{k: v for k, v in figures_of(stats).items() if k != "accepted_length_histogram"},
            "drafted_per_round": (stats.drafted + stats.text_drafted) / stats.target_forwards,
            "share_of_tokens": {"draft": stats.accepted / stats.emitted, "text": stats.text_accepted / stats.emitted},
            "outputs": {name: outcomes.count(name) for name in ("identical", "tied", "differing")},
            "peak_bytes": max(peaks, default=None),
            "times_alone": self.ratio(system, self.alone, dataset),
            "pooled_speedup": tokens / seconds / rate_alone,
            "predicted": self.predicted(system, dataset),
        }
        stock = next((s.name for s in self.systems if s.kind == "stock"), None)
        if stock is not None and system not in (stock, self.alone):
            figures["times_stock"] = self.ratio(system, stock, dataset)
        return figures

    def to_dict(self) -> dict[str, Any]:
        """Return the figures by data set and for all (`"all"`), by system."""
        names = [system.name for system in self.systems]
        parts = {**{name: name for name in self.answers}, ALL: None}
        return {
            **self.facts,
            "baseline": self.alone,
            "systems": [system.to_dict() for system in self.systems],
            "by_dataset": {
                shown: {name: self.figures(name, dataset) for name in names} for shown, dataset in parts.items()
            },
        }


# --- the benchmark --------------------------------------------------------------------------------------------------


def benchmark(
    target: Any,
    systems: Sequence[System],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    *,
    max_new_tokens: int,
    sampling: Mapping[str, Mapping[str, Any]] | None = None,
    measure_costs: bool = False,
    tokenizer: Any = None,
    show_progress: bool = False,
) -> BenchmarkReport:
    """
    Let systems answer the same requests, one request after the other in all systems, after a warm-up.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`, *optional*):
            A decoder-only model; by default its tokenizer is found by the model's name.
        systems (`Sequence[System]`): Exactly one of them is the eager target alone; see [`alone_systems`].
        prompts (`Mapping[str, Sequence[Sequence[int]]]`): Data set -> token ids of each prompt.
        max_new_tokens (`int`): Maximum tokens of an answer.
        sampling (`Mapping[str, Mapping[str, Any]]`, *optional*):
            Data set -> arguments of `generate`, such as `{"temperature": 0.7}`, with which it is sampled. Answers to
            others are greedy, and compared with the target's. Sampled answers of two systems differ in length, so
            speeds are compared per token.
        measure_costs (`bool`, *optional*, defaults to `False`):
            Whether to time eager forwards of target and drafts for the cost model.
        show_progress (`bool`, *optional*, defaults to `False`): Whether to show progress bars.

    Raises:
        ConfigError: Duplicate names, no or several systems that are the target alone, no prompts, or sampling for
            unknown data sets.
        UnsupportedModelError: An encoder-decoder.
    """
    names = [system.name for system in systems]
    if len(set(names)) < len(names) or sum(system.is_the_target for system in systems) != 1:
        raise ConfigError(
            f"Systems need different names, and one of them must be the target alone, got {', '.join(names)}."
        )
    if not prompts or ALL in prompts or not all(prompts.values()):
        raise ConfigError(f'Each data set needs prompts and a name other than "{ALL}", got {", ".join(prompts)}.')
    sampling = sampling or {}
    if unknown := sampling.keys() - prompts:
        raise ConfigError(f"`sampling` names unknown data sets: {', '.join(sorted(unknown))}.")
    if unwrap(target).config.is_encoder_decoder:
        raise UnsupportedModelError("The benchmark needs a decoder-only target, got an encoder-decoder.")
    requests = [
        _TimedRequest(name, tuple(ids), seed, sampling.get(name))
        for name, group in prompts.items()
        for seed, ids in enumerate(group)
    ]
    # Compilation repeats for each doubling of the length, so warm up one request of each length.
    device = unwrap(target).device
    compiles = device.type != "cpu" or any(s.compile_draft is True or s.compile_target for s in systems)
    first = {
        (r.dataset, (len(r.ids) + max_new_tokens - 1).bit_length() if compiles else 0): r for r in reversed(requests)
    }
    ways = [_Way(target, system, tokenizer, max_new_tokens) for system in systems]

    def turns(chosen: Sequence[_TimedRequest], what: str) -> Iterator[tuple[Any, ...]]:
        answered = in_turns([way.answer for way in ways], chosen)
        return progress(answered, what, "request", len(chosen)) if show_progress else answered

    answers: dict[str, dict[str, list[TimedAnswer]]] = {d: {name: [] for name in names} for d in prompts}
    with contextlib.ExitStack() as served:
        for way in ways:
            if way.assistant is not None:
                served.enter_context(way.assistant)
        for _ in turns(list(first.values()), "warming up"):
            pass
        alone = [system.is_the_target for system in systems].index(True)
        for request, given in zip(requests, turns(requests, "in turns"), strict=True):
            reference, _ = given[alone]
            for name, (tokens, answer) in zip(names, given, strict=True):
                is_greedy = request.sampling is None
                outcome = compare_outputs(target, request.ids, reference, tokens) if is_greedy else "sampled"
                answers[request.dataset][name].append(replace(answer, outcome=outcome))
    own = unwrap(target).get_memory_footprint()
    weights = {w.system.name: own + (0 if w.draft is None else w.draft.get_memory_footprint()) for w in ways}
    eager = [w.system.name for w in ways if w.assistant and (c := w.assistant.static_target) and c.is_eager]
    facts = {
        "device": str(device) if device.type != "cuda" else torch.cuda.get_device_name(device),
        "dtype": str(unwrap(target).dtype).removeprefix("torch."),
        "max_new_tokens": max_new_tokens,
        "weights_bytes": weights,
        "target_not_compiled": eager,
    }
    costs: dict[str, ForwardSeconds] = {}
    if measure_costs:
        drafts = {id(system.draft): system.draft for system in systems if system.draft is not None}
        measured = measured_costs(target, list(drafts.values()), requests[0].ids, device_clock(target))
        of_draft = dict(zip(drafts, measured, strict=True))
        costs = {system.name: of_draft[id(system.draft)] for system in systems if system.draft is not None}
    return BenchmarkReport(tuple(systems), answers, facts, costs)


def alone_systems(target: Any) -> list[System]:
    """Return the target alone, and on CUDA also compiled over transformers' static cache."""
    compiled = [System("target alone, compiled", "alone", compile_target=True)]
    return [System("target alone", "alone"), *compiled * (unwrap(target).device.type == "cuda")]


def in_turns(ways: Sequence[Callable[[Request], Answer]], requests: Iterable[Request]) -> Iterator[tuple[Answer, ...]]:
    """Yield the answers of all ways to each request, in the order of the ways. The way that answers first rotates, so
    that a change of the machine's speed affects all ways."""
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
    seed: int
    sampling: Mapping[str, Any] | None  # `None` for a greedy answer


class _Notes(BaseStreamer):
    """Record what one answer delivered and when, and the inputs of the target."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.delivered, self.fed = list[torch.Tensor](), list[torch.Tensor]()

    def put(self, value: torch.Tensor) -> None:
        self.moments.append(time.perf_counter())
        self.delivered.append(value.flatten())

    def end(self) -> None:
        pass

    def note_input(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.fed.append(kwargs["input_ids"])

    def rounds(self) -> list[DraftRound]:
        """Return the rounds: the target's inputs after the known tokens are the drafted ones."""
        rounds = []
        known = len(self.delivered[0])
        for fed, tokens in zip(self.fed, self.delivered[1:], strict=False):
            drafted, emitted = fed[0, known:].cpu().numpy().astype(np.int32), tokens.numpy()
            rounds.append(DraftRound(drafted, num_accepted(drafted, emitted), len(emitted)))
            known = 1
        return rounds


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
        self.kwargs: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens, "stop_strings": None}
        self.kwargs |= pad_setting(self.model)
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
        elif system.kind == "lean":
            config = OnlineConfig(
                num_assistant_tokens=k,
                candidates=system.candidates,
                compile_draft=system.compile_draft,
                compile_target=system.compile_target or "auto",
                num_logprobs=1,
                update_strategy="manual",
            )
            self.assistant = OnlineAssistant(target, system.draft, tokenizer, config)
            if system.earlier and config.reads_text:
                serve_before(self.assistant, system.earlier)
            self.draft = self.assistant.draft

    def _generate(self, request: _TimedRequest, notes: _Notes) -> list[int]:
        ids = torch.tensor([request.ids], device=self.model.device)
        kwargs = {**self.kwargs, "attention_mask": torch.ones_like(ids), "streamer": notes}
        if request.sampling is not None:
            kwargs |= {"do_sample": True, **request.sampling}
            torch.manual_seed(request.seed)
        if self.assistant is not None:  # a hook would recompile a compiled target
            self.assistant.reset_stats()
            output = self.assistant.generate(ids, domain=request.dataset, learn=False, **kwargs)
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


def answer_traced(assistant: OnlineAssistant, prompt_ids: Sequence[int], **kwargs: Any) -> tuple[list[int], Trace]:
    """Return the new tokens of an answer and the trace of the request."""
    traces: list[Trace] = []
    ids = torch.tensor([list(prompt_ids)], device=input_device(assistant.target))
    mask = torch.ones_like(ids)
    output = assistant.generate(ids, attention_mask=mask, on_trace=traces.append, **kwargs)
    start = 0 if assistant.target.config.is_encoder_decoder else len(prompt_ids)
    return output[0, start:].tolist(), traces[0]  # waits for the device


def answer_greedily(target: Any, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the answer of a decoder-only target."""
    ids = torch.tensor([list(prompt_ids)], device=target.device)
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens, "stop_strings": None}
    output = target.generate(ids, attention_mask=torch.ones_like(ids), **how)
    return list(output[0, len(prompt_ids) :].tolist())
