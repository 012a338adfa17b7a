"""A draft for any target: some of the target's own layers, taught on its answers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from osd_hf.acceptance import AcceptanceStats, figures_of
from osd_hf.chunked_loss import SampledTail
from osd_hf.config import OnlineConfig, setting
from osd_hf.cutting import cut, depth, has_attention, outer_layers
from osd_hf.decoding.draft_length import measured_costs
from osd_hf.decoding.forward import compiles_draft
from osd_hf.decoding.hook import record_traces, scored
from osd_hf.distillation.data import read_rows, read_traces
from osd_hf.errors import ConfigError, DataError, UnsupportedModelError
from osd_hf.learning.lesson import Lesson
from osd_hf.learning.optimizer import hidden_matrices
from osd_hf.learning.updater import Updater
from osd_hf.learning.weights import write_snapshot
from osd_hf.models import check_pair, device_clock, prompt_room, set_fixed_k, unwrap, vocab_size_of
from osd_hf.prompts import encode_turn
from osd_hf.replay import replay_each
from osd_hf.speedup import ForwardSeconds
from osd_hf.target_version import is_fingerprint, target_version
from osd_hf.trace import Trace, bare_trace

__all__ = [
    "ForwardSeconds", "Course", "MadeDraft", "MakingConfig", "Piece", "make_draft", "outer_layers", "split",
    "taught_draft", "teach",
]  # fmt: skip

logger = logging.getLogger(__name__)

K = 5  # drafted tokens a round, in every alpha here
KEPT = 64  # entries of the target's rows
SIZES = (1, 2, 4)  # layers that are tried
LEAST_REQUESTS, HELD_OUT_EVERY, MOST_HELD_OUT = 8, 8, 32  # requests
ANSWERING_SHARE, TRYING_SHARE = 0.4, 0.25  # of the time, and of what is left of it then
LOOKS = 4  # at held-out acceptance, while the chosen piece is taught
AT_ONCE = 16  # prompts that the target answers in a batch
HOPED_FOR = 0.8  # alpha that a draft seldom goes beyond
WEIGHT, MOST_RATE = 0.05, 4.0  # root mean square of weights that the learning rate suits; times as much at most


@dataclass(frozen=True)
class MakingConfig:
    """How a draft is made: what [`make_draft`] takes."""

    num_layers: int | None = setting(None, "layers of the draft; none = chosen by measurement")
    layers: tuple[int, ...] | None = None
    max_seconds: float = setting(600.0, "seconds that all of it may take")
    max_steps: int | None = setting(None, "optimizer steps that it learns in, at most")
    min_alpha: float | None = setting(None, "held-out acceptance (k = 5) at which teaching ends")
    max_new_tokens: int = setting(128, "most tokens of an answer to a prompt")
    seed: int = setting(0, "seed of what is held out, and of the batches")

    def __post_init__(self) -> None:
        for name in ("num_layers", "max_steps", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` must be at least 1, got {value}.")
        if self.num_layers is not None and self.layers is not None:
            raise ConfigError("`num_layers` and `layers` exclude each other: give one of them.")
        if not self.max_seconds > 0:
            raise ConfigError(f"`max_seconds` must be positive, got {self.max_seconds}.")
        if self.min_alpha is not None and not 0 < self.min_alpha <= 1:
            raise ConfigError(f"`min_alpha` must be above 0 and at most 1, got {self.min_alpha}.")


@dataclass(frozen=True)
class MadeDraft:
    """
    A draft, and what is known of it.

    Args:
        draft (`PreTrainedModel`): An ordinary model.
        layers (`tuple[int, ...]`): Of the target (its decoder), which it began as.
        encoder_layers (`tuple[int, ...]`, *optional*): Of the encoder, where the target has one.
        before (`AcceptanceStats`), after (`AcceptanceStats`):
            On held-out requests, untaught and taught, k = 5. Of the states that the draft went through, it is left in
            the best by these requests: new ones may be accepted a little less.
        costs (`ForwardSeconds`): Measured.
        num_assistant_tokens (`int`), speedup (`float`):
            The best k by these, and how many times as fast as the target alone it is expected to be.
        trials (`tuple[dict, ...]`):
            What was tried, each with its layers, costs, alpha and speed-up after the trial, and the speed-up that it
            `promised` for the end, by which one was chosen.
        curve (`tuple[tuple[float, float], ...]`):
            Seconds since it all began, and held-out alpha then, while the chosen layers were taught.
        requests (`int`), held_out (`int`), positions (`int`), steps (`int`), seconds (`float`):
            Learned from and held out; tokens and optimizer steps of its learning; of all.
    """

    draft: Any
    layers: tuple[int, ...]
    encoder_layers: tuple[int, ...] | None
    before: AcceptanceStats
    after: AcceptanceStats
    costs: ForwardSeconds
    num_assistant_tokens: int
    speedup: float
    trials: tuple[dict[str, Any], ...]
    curve: tuple[tuple[float, float], ...]
    requests: int
    held_out: int
    positions: int
    steps: int
    seconds: float

    @property
    def verdict(self) -> str:
        """What it is worth, in a sentence."""
        if self.speedup > 1:
            return f"expected {self.speedup:.2f} times as fast as the target alone, k = {self.num_assistant_tokens}"
        return (
            f"it does not pay yet, expected {self.speedup:.2f} of the target alone: teach it longer, or on more "
            "requests"
        )

    def to_dict(self) -> dict[str, Any]:
        """All but the draft, ready for JSON."""
        found = {name: value for name, value in vars(self).items() if name != "draft"}
        shown = {"before": figures_of(self.before), "after": figures_of(self.after)}
        return {**found, **shown, "costs": vars(self.costs) | {"c": self.costs.c}}


# --- the requests ---------------------------------------------------------------------------------------------------


def _asked(target: Any, tokenizer: Any, prompts: Iterable[Any], max_new_tokens: int) -> list[Trace]:
    """Prompts as traces, answered where they bring an answer, without those that are too long."""
    rows = [p if isinstance(p, Mapping) else {"prompt": _encoded(p, tokenizer)} for p in prompts]
    start = target.generation_config.decoder_start_token_id if target.config.is_encoder_decoder else None
    asked = read_rows(rows, tokenizer, vocab_size=vocab_size_of(target), decoder_start=start)
    room = prompt_room(target.config, target.config, max_new_tokens)
    fitting = [trace for trace in asked if room is None or len(trace.prompt_ids) <= room]
    if len(fitting) < len(asked):
        logger.warning(
            "%d prompts are left out: they leave no room for %d new tokens.", len(asked) - len(fitting), max_new_tokens
        )
    return fitting


def _encoded(prompt: Any, tokenizer: Any) -> list[int]:
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    if tokenizer is None:
        raise ConfigError("Prompts that are text need a tokenizer. Pass `tokenizer=`, the target's, or token ids.")
    return encode_turn(tokenizer, prompt)


def split(requests: Sequence[Trace], seed: int) -> tuple[list[Trace], list[Trace]]:
    """Requests to learn from, in random order, and held-out ones. Requests with one prompt are on one side."""
    by_prompt: dict[bytes, list[Trace]] = {}
    for trace in requests:
        by_prompt.setdefault(trace.prompt_ids.tobytes(), []).append(trace)
    groups = list(by_prompt.values())
    if len(groups) < LEAST_REQUESTS:
        raise DataError(
            f"A draft is taught on at least {LEAST_REQUESTS} requests with prompts of their own, got {len(groups)}. "
            "Some hundred are a beginning."
        )
    order = np.random.default_rng(seed).permutation(len(groups))
    held = min(max(len(groups) // HELD_OUT_EVERY, 2), MOST_HELD_OUT)
    first, rest = (([trace for i in part for trace in groups[i]]) for part in (order[:held], order[held:]))
    return rest, first


def _with_rows(target: Any, traces: Sequence[Trace], width: int | None) -> list[Trace]:
    """Answered requests with the target's rows: those that have none are scored, so many entries kept of each."""
    known, bare = list(traces), [i for i, trace in enumerate(traces) if not trace.num_kept and len(trace)]
    eos = {"eos_token_id": unwrap(target).generation_config.eos_token_id}
    for i, trace in zip(bare, scored(target, [traces[i] for i in bare], [width] * len(bare), AT_ONCE), strict=True):
        known[i] = replace(trace, sampling=trace.sampling or eos)
    return known


def _answered(
    target: Any, requests: Sequence[Trace], max_new_tokens: int, course: Course | None = None
) -> Iterator[Trace]:
    """The requests with the target's rows: what has no answer is answered, in batches; where a course is given, until
    its time for that is over."""
    width = next((trace.top_ids.shape[1] or None for trace in requests if trace.num_kept), KEPT)
    for first in range(0, len(requests), AT_ONCE):
        if course is not None:
            course.show(f"answering, {first} of {len(requests)}", course.elapsed / course.seconds)
            if first and course.elapsed > ANSWERING_SHARE * course.seconds:
                course.say(f"answered {first} of {len(requests)} prompts: the others would take too long")
                return
        batch = requests[first : first + AT_ONCE]
        yield from _with_rows(target, [trace for trace in batch if len(trace)], width)
        unanswered = [trace.prompt_ids.tolist() for trace in batch if not len(trace)]
        yield from record_traces(target, unanswered, max_new_tokens=max_new_tokens, num_logprobs=width)


def _of_target(target: Any, traces: Iterable[Trace]) -> list[Trace]:
    """Recorded requests without those of another version of the target; raises DataError where these are all."""
    version, known = target_version(target), list(traces)
    ours = [trace for trace in known if trace.target in (None, version) or not is_fingerprint(trace.target)]
    if known and not ours:
        raise DataError(
            f"All {len(known)} requests were answered by another version of the target ({known[-1].target}) than this "
            f"one ({version}). Record some of this one, or give them its rows by `rescore` and new ones beside them."
        )
    if len(ours) < len(known):
        logger.warning("%d requests of another version of the target are left out.", len(known) - len(ours))
    return ours


# --- time -----------------------------------------------------------------------------------------------------------


class Course:
    """The time that all may take, and a bar that shows it."""

    def __init__(self, seconds: float, clock: Callable[[], float], is_shown: bool) -> None:
        self.seconds, self.clock, self.started = seconds, clock, clock()
        self.bar = tqdm(
            total=round(seconds), disable=not is_shown, file=sys.stderr, dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}, at most {remaining} left{postfix}",
        )  # fmt: skip

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    def show(self, doing: str, share: float, alpha: float | None = None) -> None:
        """What is being done, and the share of all that is done."""
        self.bar.n = min(share, 1.0) * self.bar.total
        if alpha is not None:
            self.bar.set_postfix(alpha=f"{alpha:.3f}", refresh=False)
        self.bar.set_description_str(doing)

    def say(self, text: str) -> None:
        """A line for the log, and above the bar."""
        logger.info(text)
        if not self.bar.disable:
            tqdm.write(text, file=sys.stderr)


# --- teaching -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Piece:
    """A piece of the target, and how far it has been taught."""

    draft: Any
    layers: tuple[int, ...]
    encoder_layers: tuple[int, ...] | None
    is_frozen: bool = True  # embeddings and head stay the target's
    drawn: int | None = None  # tokens that stand for the others in the loss; by the size of the vocabulary
    costs: ForwardSeconds = ForwardSeconds(1.0, 0.0, 1.0)  # until they are measured
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)  # of the best state so far, on held-out requests
    before: AcceptanceStats = field(default_factory=AcceptanceStats)
    best: Any = None  # its weights
    updater: Any = None
    curve: list[tuple[float, float]] = field(default_factory=list)  # seconds, and alpha on held-out requests
    steps: int = 0
    positions: int = 0

    @property
    def name(self) -> str:
        shown = f"layers {', '.join(map(str, self.layers))}"
        return shown if self.encoder_layers is None else f"{shown}, {len(self.encoder_layers)} of the encoder"

    def begin(self, requests: Sequence[Trace], held_out: Sequence[Trace], config: OnlineConfig) -> None:
        """Have it learn from these requests from now on, at a rate in proportion to its weights where they are large,
        as those of pretrained models are: they would hardly move."""
        matrices = hidden_matrices(self.draft, dict(self.draft.named_parameters()), config)
        sizes = [float(m.detach().float().square().mean().sqrt()) for m in matrices]
        factor = float(np.clip(np.median(sizes) / WEIGHT, 1.0, MOST_RATE)) if sizes else 1.0
        config = replace(config, learning_rate=config.learning_rate * factor)
        self.before = self.stats = sum(replay_each(self.draft, held_out, K), AcceptanceStats())
        tail = None if self.drawn is None else SampledTail(self.drawn, torch.Generator().manual_seed(config.seed))
        ends = {id(self.draft.get_input_embeddings().weight), id(self.draft.get_output_embeddings().weight)}
        frozen = {name for name, p in self.draft.named_parameters() if self.is_frozen and id(p) in ends}
        lesson = Lesson(config=config)
        lesson.buffer.extend(requests)
        self.updater = Updater(self.draft, config, lesson=lesson, frozen=frozen, tail=tail)
        self.best = self.updater.snapshot(dict(self.draft.named_parameters()))

    def step(self) -> None:
        """One step; raises DataError where nothing can be learned from."""
        report = self.updater.update(1)
        self.steps += report.steps
        self.positions += report.positions
        if not len(self.updater.buffer):
            raise DataError("None of the requests can be learned from; see the log.")

    def look(self, held_out: Sequence[Trace], seconds: float) -> None:
        """Compare its present state, after so many seconds, with the best so far, on held-out requests."""
        self.updater.copy_to(self.draft)
        stats = sum(replay_each(self.draft, held_out, K), AcceptanceStats())
        self.curve.append((seconds, stats.alpha))
        if stats.alpha >= self.stats.alpha:
            self.stats, self.best = stats, self.updater.snapshot(dict(self.draft.named_parameters()))

    def forget(self) -> None:
        """Let go of all that takes memory."""
        self.draft = self.updater = self.best = None

    def end(self) -> Any:
        """The draft in its best state."""
        write_snapshot(self.best, self.draft, share=True)
        self.updater = self.best = None
        return self.draft


# --- making ---------------------------------------------------------------------------------------------------------


def make_draft(
    target: Any, tokenizer: Any = None, *, prompts: Iterable[Any] | None = None, traces: Iterable[Trace] | None = None,
    num_layers: int | None = None, layers: Sequence[int] | None = None, max_seconds: float = 600.0,
    max_steps: int | None = None, min_alpha: float | None = None, max_new_tokens: int = 128, seed: int = 0,
    show_progress: bool = True,
) -> Any:  # fmt: skip
    """
    A draft for any target: some of the target's own layers as a smaller model, taught on the target's answers.
    Embeddings and head stay as they are in the target.

    Which layers is measured: a few pieces are timed, by eager forwards, taught for a short while on the same requests,
    and the one with the best expected speed (held-out acceptance by replay, and half of what it lacks to 0.8; measured
    costs, the cost model) goes on to the end, at a rate that falls to zero by then. A draft of a large vocabulary is
    timed with a head of some thousand tokens, as [`OnlineAssistant`] drafts among those that traffic uses;
    transformers' own assisted generation takes the whole head.

    Args:
        target (`PreTrainedModel` or `PeftModel`):
            Left as it is. Adapters are merged into the draft, quantized layers dequantized where transformers can.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, for prompts that are text.
        prompts (`Iterable`, *optional*):
            What to answer, each the token ids of a prompt, a text (a user's turn, through the chat template), or a row
            as [`distill`] takes it, perhaps with an answer to learn from. The target answers the others, and all that
            are held out, greedily, in batches, without the logits processors that its generation config asks for.
        traces (`Iterable[Trace]`, *optional*):
            Instead: requests that were recorded, such as those of a [`CorrectionStore`]. Those without the target's
            rows are scored by it; those of another version of the target are left out.
        num_layers (`int`, *optional*): How many layers, without a trial of others: the first and the last ones.
        layers (`Sequence[int]`, *optional*): Instead: these layers, by their numbers; of an encoder-decoder, the
            decoder's, beside the whole encoder.
        max_seconds (`float`, *optional*, defaults to 600): Time that all may take, but for what is under way then.
        max_steps (`int`, *optional*): Optimizer steps that the draft may learn in, at most.
        min_alpha (`float`, *optional*): Held-out acceptance (k = 5) at which teaching ends.
        max_new_tokens (`int`, *optional*, defaults to 128): Of an answer to a prompt, at most.
        seed (`int`, *optional*, defaults to 0): Of what is held out, and of the batches.
        show_progress (`bool`, *optional*, defaults to `True`):
            A bar on the standard error, with the time that is left at most, and lines on what is tried.

    Returns:
        `PreTrainedModel`: an ordinary model of the target's kind, in evaluation mode, of its dtype and on its device,
        whose generation config drafts the best number of tokens a round.

    Raises:
        UnsupportedModelError: the target cannot be cut up, or it is so quick that no piece of it could pay.
        ConfigError: settings outside their range, or that exclude each other.
        DataError: fewer than eight different prompts, or requests that cannot be learned from, as those of another
            version of the target.
    """
    config = MakingConfig(
        num_layers=num_layers, layers=None if layers is None else tuple(layers), max_seconds=max_seconds,
        max_steps=max_steps, min_alpha=min_alpha, max_new_tokens=max_new_tokens, seed=seed,
    )  # fmt: skip
    made = taught_draft(target, tokenizer, config, prompts=prompts, traces=traces, show_progress=show_progress)
    return made.draft


def taught_draft(
    target: Any, tokenizer: Any, config: MakingConfig, *, prompts: Iterable[Any] | None = None,
    traces: Iterable[Trace] | None = None, show_progress: bool = True, clock: Callable[[], float] | None = None,
) -> MadeDraft:  # fmt: skip
    """[`make_draft`], and what is known of the draft. `clock` counts seconds, by default those of the wall once the
    target's device has done what it was asked for."""
    if (prompts is None) == (traces is None):
        raise ConfigError("A draft is taught on `prompts` or on `traces`: give one of them.")
    course = Course(config.max_seconds, clock or device_clock(target), show_progress)
    with course.bar:
        candidates = _pieces(target, config)
        if traces is None:
            rest, first = split(_asked(unwrap(target), tokenizer, prompts or (), config.max_new_tokens), config.seed)
            # Judged by what the target says, whatever answers there are to learn from.
            first = [bare_trace(t.prompt_ids, (), t.vocab_size, t.decoder_prompt_ids) for t in first]
        else:
            rest, first = split(_learnable(target, _of_target(target, traces), needs_rows=False), config.seed)
            rest += [trace for trace in first if trace.sampling.get("rescored")]
            first = [trace for trace in first if not trace.sampling.get("rescored")]
            if not first:
                raise DataError("Requests that were scored anew say nothing of acceptance. Add some of this target.")
        answer = float(np.mean([len(trace) or config.max_new_tokens for trace in first]))
        costs = measured_costs(target, [c.draft for c in candidates], first[0].prompt_ids, course.clock)
        candidates = _judge(candidates, costs, answer, course)
        held_out = _learnable(target, _answered(target, first, config.max_new_tokens))
        learned = _learnable(target, _answered(target, rest, config.max_new_tokens, course))
        answer = float(np.mean([len(trace) for trace in held_out]))
        rule = OnlineConfig(
            num_assistant_tokens=K, gate=False, update_strategy="manual", buffer_size=len(learned), seed=config.seed
        )
        best, trials = _tried(candidates, learned, held_out, rule, answer, config, course)
        teach(best, held_out, course, config.max_seconds, config.max_steps, config.min_alpha)
    k, speedup = best.costs.best_k(best.stats.alpha, answer)
    draft = best.end()
    set_fixed_k(draft.generation_config, k)
    draft.generation_config.stop_strings = None  # transformers' assisted generation gives a draft no tokenizer
    made = MadeDraft(
        draft, best.layers, best.encoder_layers, best.before, best.stats, best.costs, k, speedup, tuple(trials),
        tuple(best.curve), len(learned), len(held_out), best.positions, best.steps, course.elapsed,
    )  # fmt: skip
    course.say(f"{best.name}: alpha {best.before.alpha:.3f} before, {best.stats.alpha:.3f} after; {made.verdict}")
    return made


def _pieces(target: Any, config: MakingConfig) -> list[Piece]:
    """What of the target is tried as a draft; raises UnsupportedModelError and ConfigError."""
    inner = unwrap(target)
    check_pair(inner, inner)
    count = depth(inner)
    encoders: list[tuple[int, ...] | None] = [None]
    if inner.config.is_encoder_decoder:
        whole = depth(inner, "encoder")
        encoders = [tuple(range(whole))]
        if config.layers is None and config.num_layers is None and whole > 1:
            encoders.append(tuple(range(whole // 2)))
    if config.layers is not None:
        chosen = [config.layers]
    elif config.num_layers is not None:
        chosen = [outer_layers(config.num_layers, count)] if config.num_layers < count else []
    else:  # the last layers may be strangers to the first
        forms = [form for size in SIZES if size < count for form in (outer_layers(size, count), tuple(range(size)))]
        chosen = [form for form in dict.fromkeys(forms) if has_attention(inner, form)]
    if not chosen:
        raise UnsupportedModelError(
            f"A draft has fewer layers than its target, one with attention among them. {type(inner).__name__} has "
            f"{count}; asked for were {config.num_layers or 'the first, or these and the last'}. Choose `layers`."
        )
    pieces = [
        Piece(cut(target, layers, encoder), layers, encoder)
        for encoder in encoders
        for layers in chosen
        # transformers' caches of some have as many layers as the encoder
        if encoder == encoders[0] or len(layers) <= len(encoder or ())
    ]
    for piece in pieces[1:]:  # embeddings and heads are large, and no piece changes them
        piece.draft.set_input_embeddings(pieces[0].draft.get_input_embeddings())
        piece.draft.set_output_embeddings(pieces[0].draft.get_output_embeddings())
    return pieces


def _judge(candidates: list[Piece], costs: Sequence[ForwardSeconds], new_tokens: float, course: Course) -> list[Piece]:
    """The candidates that could pay, and what they would be worth; raises UnsupportedModelError where none could."""
    for candidate, cost in zip(candidates, costs, strict=True):
        candidate.costs = cost
        hoped = ", ".join(f"{cost.best_k(alpha, new_tokens)[1]:.2f} at {alpha}" for alpha in (0.4, 0.6, HOPED_FOR))
        course.say(
            f"{candidate.name}: a drafted token takes {cost.c:.2f} of the target's; pays from alpha {cost.c:.2f} on: "
            f"times as fast as the target alone {hoped}"
        )
    able = [c for c in candidates if c.costs.best_k(HOPED_FOR, new_tokens)[1] > 1]
    if able:
        return able
    least = min(candidates, key=lambda c: c.costs.c)
    if compiles_draft(OnlineConfig(), least.draft.device.type):
        course.say("with eager forwards no draft pays; captured or compiled, as they serve here, drafts take less")
        return candidates
    best = max(c.costs.best_k(HOPED_FOR, new_tokens)[1] for c in candidates)
    raise UnsupportedModelError(
        f"No draft pays for this target here: with {least.name} alone, a drafted token takes {least.costs.c:.2f} of "
        f"the time of one of the target's own, and with {HOPED_FOR} of its tokens right, which is seldom reached, "
        f"answers of {new_tokens:.0f} tokens would come {best:.2f} times as fast. Use the target alone, a smaller "
        "model of its family, or candidates from past text."
    )


def _learnable(target: Any, traces: Iterable[Trace], *, needs_rows: bool = True) -> list[Trace]:
    """Requests of this target, without those that have no token; raises DataError, StateError and
    VocabularyMismatchError."""
    is_encoder_decoder = target.config.is_encoder_decoder
    return read_traces(traces, vocab_size_of(target), needs_rows=needs_rows, is_encoder_decoder=is_encoder_decoder)


def _tried(
    candidates: Sequence[Piece], learned: Sequence[Trace], held_out: Sequence[Trace], rule: OnlineConfig,
    new_tokens: float, config: MakingConfig, course: Course,
) -> tuple[Piece, list[dict[str, Any]]]:  # fmt: skip
    """The candidate that promises the most after a share of the time, and what was found of each."""
    found, trials = list[tuple[float, Piece]](), list[dict[str, Any]]()
    time_for_it = TRYING_SHARE * max(config.max_seconds - course.elapsed, 0.0)
    until, share = course.elapsed + time_for_it, time_for_it / len(candidates)
    steps = None if config.max_steps is None else max(round(TRYING_SHARE * config.max_steps), 1)
    for candidate in candidates:
        if found and course.elapsed >= until:  # replays and single steps may take longer than their share
            course.say(f"{candidate.name}: not tried, as time is short")
            candidate.forget()
            continue
        candidate.begin(learned, held_out, rule)
        if len(candidates) == 1:
            return candidate, trials
        teach(candidate, held_out, course, course.elapsed + share, steps, looks=1, slows=False)
        k, speedup = candidate.costs.best_k(candidate.stats.alpha, new_tokens)
        # By its end, teaching makes about half of the way that is left; a dear piece is often there already.
        reached = max((candidate.stats.alpha + HOPED_FOR) / 2, candidate.stats.alpha)
        promised = candidate.costs.best_k(reached, new_tokens)[1]
        trials.append({
            "layers": list(candidate.layers),
            "encoder_layers": None if candidate.encoder_layers is None else list(candidate.encoder_layers),
            "c": candidate.costs.c, "alpha_before": candidate.before.alpha, "alpha": candidate.stats.alpha, "k": k,
            "speedup": speedup, "promised": promised, "steps": candidate.steps,
        })  # fmt: skip
        course.say(
            f"{candidate.name}: alpha {candidate.before.alpha:.3f} before, {candidate.stats.alpha:.3f} after "
            f"{candidate.steps} steps; expected {speedup:.2f} times as fast as the target alone, in the end "
            f"{promised:.2f}"
        )
        found.append((promised, candidate))
        if len(found) == 2:  # no more than two are held at once
            found.sort(key=lambda one: one[0])
            found.pop(0)[1].forget()
    return found[0][1], trials


def teach(
    candidate: Piece, held_out: Sequence[Trace], course: Course, until: float, max_steps: int | None,
    min_alpha: float | None = None, *, looks: int = LOOKS, slows: bool = True,
) -> None:  # fmt: skip
    """Go on teaching until so many seconds of the course, or steps in all, or that held-out acceptance is reached,
    which is looked at so many times; if it `slows`, at a rate that falls to zero by then."""
    started, first_step, looked = course.elapsed, candidate.steps, 0
    while True:
        is_over = course.elapsed >= until or (max_steps is not None and candidate.steps >= max_steps)
        share = (course.elapsed - started) / max(until - started, 1e-9)
        if max_steps is not None:
            share = max(share, (candidate.steps - first_step) / max(max_steps - first_step, 1))
        if is_over or share * looks >= looked + 1:
            looked = int(share * looks)
            candidate.look(held_out, course.elapsed)
            if is_over or (min_alpha is not None and candidate.stats.alpha >= min_alpha):
                return
        course.show(f"teaching {candidate.name}", course.elapsed / course.seconds, candidate.stats.alpha)
        if slows:
            candidate.updater.slow(max(1 - share, 0.0))
        candidate.step()
