"""Make a draft for any target: copy some of its layers into a smaller model and train it on the target's answers."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedModel

from osd_hf.acceptance import AcceptanceStats, figures_of
from osd_hf.config import OnlineConfig, setting
from osd_hf.decoding.static import compiles_draft
from osd_hf.distillation.data import check_room, read_rows, read_traces, unanswered
from osd_hf.errors import ConfigError, DataError, UnsupportedModelError
from osd_hf.layers import (
    copy_layers,
    first_layer,
    has_attention,
    layers_without_state,
    new_eagle3_head,
    new_head,
    num_layers_of,
    outer_layers,
)
from osd_hf.learning.updater import Updater
from osd_hf.learning.weights import ends_of, write_snapshot
from osd_hf.models import (
    device_clock,
    prompt_room,
    set_fixed_k,
    unwrap,
    vocab_size_of,
)
from osd_hf.recording import GPU_BANDWIDTH, measured_costs, record_traces, scored
from osd_hf.replay import replay
from osd_hf.speedup import ForwardSeconds
from osd_hf.target_version import is_fingerprint, target_version
from osd_hf.trace import Trace
from osd_hf.vocabulary import write_usual_tokens

logger = logging.getLogger(__name__)

K = 5  # drafted tokens per round in every alpha of this module
NUM_LOGPROBS = 64  # kept entries of the target's rows
Kind = Literal["auto", "layers", "mtp", "eagle3"]
KINDS = get_args(Kind)
LAYER_COUNTS = (1, 2, 4)  # tried if the caller chooses none
MIN_REQUESTS = 8  # with different prompts
HELD_OUT_EVERY, MAX_HELD_OUT = 8, 32
ANSWERING_SHARE = 0.4  # of the time
TRIAL_SHARE = 0.25  # of the remaining time
EVALUATIONS = 4  # on the held-out requests, while the chosen draft is trained
BATCH_SIZE = 16  # prompts per batch of the target
REACHABLE_ALPHA = 0.8  # drafts are seldom accepted more often
USUAL_WEIGHT = 0.05  # root mean square of the weights that the default learning rate suits
MAX_RATE_FACTOR = 4.0


@dataclass(frozen=True)
class MakeDraftConfig:
    """Settings of [`make_draft`]."""

    kind: Kind = setting(
        "auto", "layers = some of the target's; mtp, eagle3 = a head that reads its states; auto = the better"
    )
    num_layers: int | None = setting(None, "layers of the draft; none = chosen by measurement")
    max_seconds: float = setting(600.0, "maximum time in seconds")
    max_steps: int | None = setting(None, "maximum number of optimizer steps")
    max_new_tokens: int = setting(128, "maximum length of an answer")
    seed: int = setting(0, "seed of the held-out split and of the batches")
    gpu: str | None = setting(None, f"GPU that will serve ({', '.join(GPU_BANDWIDTH)}); none = this machine")

    def __post_init__(self) -> None:
        for name in ("num_layers", "max_steps", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` must be at least 1, got {value}.")
        if self.kind not in KINDS:
            raise ConfigError(f"`kind` must be one of {', '.join(KINDS)}, got {self.kind!r}.")
        if self.num_layers is not None and self.kind in ("mtp", "eagle3"):
            raise ConfigError(f"A head has one layer, so `num_layers` is for drafts of layers, got {self.num_layers}.")
        if not self.max_seconds > 0:
            raise ConfigError(f"`max_seconds` must be positive, got {self.max_seconds}.")
        if self.gpu not in (None, *GPU_BANDWIDTH):
            raise ConfigError(f"`gpu` must be one of {', '.join(GPU_BANDWIDTH)}, got {self.gpu!r}.")


@dataclass(frozen=True)
class MadeDraft:
    """A draft and its measurements. It is the best of several states on the held-out requests, so acceptance on new
    requests may be slightly lower."""

    draft: PreTrainedModel
    kind: str  # "layers", "mtp" or "eagle3"
    layers: tuple[int, ...]  # of the target's decoder
    before: AcceptanceStats  # on held-out requests, k = 5
    after: AcceptanceStats
    costs: ForwardSeconds
    num_assistant_tokens: int  # the best k
    speedup: float  # expected at that k
    trials: tuple[dict[str, Any], ...]  # the measurements of `best_trial`
    requests: int
    held_out: int
    positions: int  # trained tokens
    steps: int
    seconds: float

    @property
    def verdict(self) -> str:
        """State in one sentence whether the draft pays."""
        if self.speedup > 1:
            return f"expected {self.speedup:.2f} times as fast as the target alone, k = {self.num_assistant_tokens}"
        return f"it does not pay yet, expected {self.speedup:.2f} of the target alone; train it on more requests"

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the draft, ready for JSON."""
        found = {name: value for name, value in vars(self).items() if name != "draft"}
        shown = {"before": figures_of(self.before), "after": figures_of(self.after)}
        return {**found, **shown, "costs": vars(self.costs) | {"c": self.costs.c}}


def make_draft(
    target: PreTrainedModel,
    tokenizer: Any = None,
    *,
    prompts: Iterable[Any] | None = None,
    traces: Iterable[Trace] | None = None,
    show_progress: bool = True,
    **settings: Any,
) -> PreTrainedModel:
    """
    Make a draft from a target and train it on the target's answers: some of its layers in a smaller model, or a
    [`DraftHead`], one layer that also reads the target's hidden states. The
    embeddings and the output head are the target's own, frozen, in the same memory if dtype and device allow it. A
    saved draft has copies of them. To train all weights, use a `copy.deepcopy` of the draft.

    Kind and layers are chosen by trials. Several drafts are timed with eager forwards, or planned for `gpu`, and
    trained for a short time on the same requests. The one with the best expected speed-up is trained to the end. With
    a large vocabulary, costs are those of an output head of a few thousand tokens, as [`OnlineAssistant`] uses it;
    transformers' own assisted generation computes all logits.

    Args:
        target (`PreTrainedModel` or `PeftModel`):
            Not changed. Adapters are merged into the draft. Quantized layers are dequantized if transformers can.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer, for prompts that are text.
        prompts (`Iterable`, *optional*):
            Token ids, texts (user turns, formatted with the chat template), or rows as [`distill`] takes them. Answers
            in rows are used for training. The target answers all other prompts, and the held-out ones, greedily.
        traces (`Iterable[Trace]`, *optional*):
            Recorded requests in place of prompts, such as a [`CorrectionStore`]. The target scores those without its
            rows. Requests of another version of the target are left out.
        show_progress (`bool`, *optional*, defaults to `True`): Whether to show a bar on the standard error.
        settings (`Any`):
            `kind`: `"layers"`, a model that transformers' own assisted generation can use, too; `"mtp"` or `"eagle3"`,
            a head in one of its layouts, for [`OnlineAssistant`] (and vLLM, if EAGLE-3); by default the best of layers
            and `"mtp"`. `num_layers`, by default chosen by trials, `max_seconds` (600), `max_steps`, `max_new_tokens`
            (128) of an answer, `seed` (0), and `gpu`, such as `"h100"`, to choose for that device, not this machine.

    Returns:
        `PreTrainedModel`: an ordinary model of the target's kind, or a [`DraftHead`], in evaluation mode, with the
        target's dtype and device. Its generation config drafts the best number of tokens per round.

    Raises:
        UnsupportedModelError: the layers cannot be copied, or the target is so fast that no draft pays.
        ConfigError: settings outside their range, or both or none of `prompts` and `traces`.
        DataError: fewer than eight different prompts, or requests that cannot be used for training.
    """
    config = MakeDraftConfig(**settings)
    return train_draft(target, tokenizer, config, prompts=prompts, traces=traces, show_progress=show_progress).draft


def train_draft(
    target: PreTrainedModel,
    tokenizer: Any,
    config: MakeDraftConfig,
    *,
    prompts: Iterable[Any] | None = None,
    traces: Iterable[Trace] | None = None,
    show_progress: bool = True,
    clock: Callable[[], float] | None = None,
) -> MadeDraft:
    """Make a draft as [`make_draft`] does, and return its measurements too. `clock` returns seconds."""
    if (prompts is None) == (traces is None):
        raise ConfigError("A draft is trained on `prompts` or on `traces`: give one of them.")
    budget = TimeBudget(config.max_seconds, clock or device_clock(target), show_progress)
    with budget.bar:
        trials = [] if config.kind in ("mtp", "eagle3") else layer_drafts(target, config.num_layers)
        if traces is None:
            requests = _read_prompts(unwrap(target), tokenizer, prompts or (), config.max_new_tokens)
        else:
            requests = read_traces(_of_this_version(target, traces), target, needs_rows=False)
        training, held_out = split_requests(requests, config.seed)
        trials += head_drafts(target, config)
        held_out = held_out if traces is not None else [unanswered(trace) for trace in held_out]
        new_tokens = float(np.mean([len(trace) or config.max_new_tokens for trace in held_out]))
        costs = measured_costs(target, [t.draft for t in trials], held_out[0].prompt_ids, budget.clock, config.gpu)
        trials = [replace(trial, costs=cost) for trial, cost in zip(trials, costs, strict=True)]
        trials = _worthwhile(trials, new_tokens, budget, config.gpu)
        held_out = read_traces(_answers(target, held_out, config.max_new_tokens), target)
        training = read_traces(_answers(target, training, config.max_new_tokens, budget), target)
        new_tokens = float(np.mean([len(trace) for trace in held_out]))
        best, tried = best_trial(trials, training, held_out, new_tokens, config, budget)
        train(best, held_out, budget, config.max_seconds, config.max_steps)
    k, speedup = best.costs.best_k(best.stats.alpha, new_tokens)
    draft = best.draft
    write_snapshot(best.best_weights, draft, share=True)
    set_fixed_k(draft.generation_config, k)
    write_usual_tokens(draft, [*held_out, *training])
    draft.generation_config.stop_strings = None  # transformers' assisted generation passes a draft no tokenizer
    made = MadeDraft(
        draft=draft,
        kind=best.kind,
        layers=best.layers,
        before=best.before,
        after=best.stats,
        costs=best.costs,
        num_assistant_tokens=k,
        speedup=speedup,
        trials=tuple(tried),
        requests=len(training),
        held_out=len(held_out),
        positions=best.positions,
        steps=best.steps,
        seconds=budget.elapsed,
    )
    budget.report(f"{best.name}: alpha {best.before.alpha:.3f} before, {best.stats.alpha:.3f} after; {made.verdict}")
    return made


# --- requests -------------------------------------------------------------------------------------------------------


def split_requests(requests: Sequence[Trace], seed: int) -> tuple[list[Trace], list[Trace]]:
    """Split requests at random into training and held-out ones. Requests with the same prompt stay together."""
    by_prompt: dict[bytes, list[Trace]] = {}
    for trace in requests:
        by_prompt.setdefault(trace.prompt_ids.tobytes(), []).append(trace)
    groups = list(by_prompt.values())
    if len(groups) < MIN_REQUESTS:
        raise DataError(
            f"Making a draft needs at least {MIN_REQUESTS} requests with different prompts, got {len(groups)}. A few "
            "hundred are a good start."
        )
    order = np.random.default_rng(seed).permutation(len(groups))
    num_held_out = min(max(len(groups) // HELD_OUT_EVERY, 2), MAX_HELD_OUT)
    held_out, training = (
        [trace for i in part for trace in groups[i]] for part in (order[:num_held_out], order[num_held_out:])
    )
    return training, held_out


def _read_prompts(target: PreTrainedModel, tokenizer: Any, prompts: Iterable[Any], max_new_tokens: int) -> list[Trace]:
    """Convert prompts, with or without answers, to traces, without those that are too long."""
    rows = [_row(prompt, tokenizer) for prompt in prompts]
    start = target.generation_config.decoder_start_token_id if target.config.is_encoder_decoder else None
    positions = prompt_room(target.config, target.config, 0)
    check = functools.partial(check_room, positions, max_new_tokens, may_answer=True)
    return read_rows(rows, tokenizer, vocab_size=vocab_size_of(target), decoder_start=start, check=check)


def _row(prompt: Any, tokenizer: Any) -> Mapping[str, Any]:
    """Return a prompt as a row for [`read_rows`]. A text is a user turn if there is a chat template."""
    if isinstance(prompt, Mapping):
        return prompt
    if not isinstance(prompt, str):
        return {"prompt": [int(token) for token in prompt]}
    has_template = getattr(tokenizer, "chat_template", None)
    return {"prompt": [{"role": "user", "content": prompt}] if has_template else prompt}


def _of_this_version(target: PreTrainedModel, traces: Iterable[Trace]) -> list[Trace]:
    """Leave out requests of other versions of the target."""
    version, recorded = target_version(target), list(traces)
    kept = [trace for trace in recorded if trace.target in (None, version) or not is_fingerprint(trace.target)]
    if len(kept) < len(recorded):
        left_out = len(recorded) - len(kept)
        logger.warning("%d of %d requests, of other versions of the target, are left out.", left_out, len(recorded))
    return kept


def _answers(
    target: PreTrainedModel, requests: Sequence[Trace], max_new_tokens: int, budget: TimeBudget | None = None
) -> Iterator[Trace]:
    """Answer the requests that have no answer, in batches, and score the others. Stop when the time for it is over."""
    width = next((trace.top_ids.shape[1] or None for trace in requests if trace.num_kept), NUM_LOGPROBS)
    eos = unwrap(target).generation_config.eos_token_id
    for first in range(0, len(requests), BATCH_SIZE):
        if budget is not None:
            budget.show(f"answering, {first} of {len(requests)}")
            if first and budget.elapsed > ANSWERING_SHARE * budget.seconds:
                budget.report(f"answered {first} of {len(requests)} prompts in the available time")
                return
        batch = requests[first : first + BATCH_SIZE]
        yield from (trace for trace in batch if len(trace) and trace.num_kept)
        unscored = [trace for trace in batch if len(trace) and not trace.num_kept]
        for trace in scored(target, unscored, [width] * len(unscored), BATCH_SIZE):
            yield replace(trace, sampling=trace.sampling or {"eos_token_id": eos})
        prompts = [trace.prompt_ids.tolist() for trace in batch if not len(trace)]
        yield from record_traces(target, prompts, max_new_tokens=max_new_tokens, num_logprobs=width)


# --- trials and training --------------------------------------------------------------------------------------------


class TimeBudget:
    """The available time, and a progress bar that shows it."""

    def __init__(self, seconds: float, clock: Callable[[], float], is_shown: bool) -> None:
        self.seconds = seconds
        self.clock = clock
        self.started = clock()
        self.bar = tqdm(
            total=round(seconds),
            disable=not is_shown,
            file=sys.stderr,
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}, at most {remaining} left{postfix}",
        )

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    def show(self, activity: str) -> None:
        """Show the current activity and the time that has passed."""
        self.bar.n = min(self.elapsed, self.seconds)
        self.bar.set_description_str(activity)

    def report(self, text: str) -> None:
        """Log a line, and write it above the bar."""
        logger.info(text)
        if not self.bar.disable:
            tqdm.write(text, file=sys.stderr)


@dataclass(eq=False)
class LayerDraft:
    """A draft with some layers of the target, and the state of its training."""

    draft: Any
    layers: tuple[int, ...]
    kind: str = "layers"
    costs: ForwardSeconds = ForwardSeconds(1.0, 0.0, 1.0)  # until they are measured
    before: AcceptanceStats = field(default_factory=AcceptanceStats)  # on held-out requests, without training
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)  # the same in the best state so far
    best_weights: Any = None
    updater: Any = None
    steps: int = 0
    positions: int = 0

    @property
    def name(self) -> str:
        kind = "layers" if self.kind == "layers" else f"head ({self.kind}) of layer"
        return f"{kind} {', '.join(map(str, self.layers))}"

    def begin(self, training: Sequence[Trace], held_out: Sequence[Trace], seed: int) -> None:
        """Prepare the training. The learning rate grows with the size of the weights: the default rate would hardly
        change the large weights of pretrained models."""
        config = OnlineConfig(
            num_assistant_tokens=K, gate=False, update_strategy="manual", buffer_size=len(training), seed=seed
        )
        frozen = {name for name, _ in ends_of(self.draft)}
        matrices = [p for name, p in self.draft.named_parameters() if p.ndim == 2 and name not in frozen]
        sizes = [float(m.detach().float().square().mean().sqrt()) for m in matrices]
        factor = float(np.clip(np.median(sizes) / USUAL_WEIGHT, 1.0, MAX_RATE_FACTOR)) if sizes else 1.0
        config = replace(config, learning_rate=config.learning_rate * factor)
        self.updater = Updater(self.draft, config, frozen=frozen)
        self.updater.buffer.extend(training)
        self.evaluate(held_out)
        self.before = self.stats

    def step(self) -> None:
        """Take one optimizer step; raises DataError if no request can be used."""
        report = self.updater.update(1)
        self.steps += report.steps
        self.positions += report.positions
        if not len(self.updater.buffer):
            raise DataError("None of the requests can be learned from; see the log.")

    def evaluate(self, held_out: Sequence[Trace]) -> None:
        """Measure the current state on held-out requests, and remember its weights if it is the best so far."""
        self.updater.copy_to(self.draft)
        stats = replay(self.draft, held_out, K)
        if self.best_weights is None or stats.alpha >= self.stats.alpha:
            self.stats = stats
            self.best_weights = self.updater.snapshot(dict(self.draft.named_parameters()))


def layer_drafts(target: PreTrainedModel, num_layers: int | None = None) -> list[LayerDraft]:
    """Copy each set of layers that is tried; raises UnsupportedModelError and ConfigError."""
    inner = unwrap(target)
    count, usable = num_layers_of(inner), layers_without_state(inner)
    sizes = [size for size in ((num_layers,) if num_layers else LAYER_COUNTS) if size < count and size <= len(usable)]
    # With and without the last layers, which may not fit the first ones.
    places = [s for size in sizes for s in (outer_layers(size, len(usable)), tuple(range(size)))]
    sets = [tuple(usable[i] for i in s) for s in (places[:1] if num_layers else places)]
    chosen = [layers for layers in dict.fromkeys(sets) if has_attention(inner, layers)]
    if not chosen:
        raise UnsupportedModelError(
            f"A draft needs fewer layers than its target, and at least one with attention. {type(inner).__name__} has "
            f"{count} layers."
        )
    return [LayerDraft(copy_layers(target, layers), layers) for layers in chosen]


def head_drafts(target: PreTrainedModel, config: MakeDraftConfig) -> list[LayerDraft]:
    """Make each head that is tried; raises UnsupportedModelError if the only one cannot be made."""
    if config.kind == "layers" or config.num_layers is not None:
        return []
    if unwrap(target).config.is_encoder_decoder:
        if config.kind == "auto":
            return []
        raise UnsupportedModelError("A draft head needs a decoder-only target, got an encoder-decoder.")
    make = new_eagle3_head if config.kind == "eagle3" else new_head
    try:
        return [LayerDraft(make(target), (first_layer(target),), "eagle3" if config.kind == "eagle3" else "mtp")]
    except UnsupportedModelError:
        if config.kind != "auto":
            raise
        return []


def _worthwhile(trials: list[LayerDraft], new_tokens: float, budget: TimeBudget, gpu: Any) -> list[LayerDraft]:
    """Return the drafts that can pay at an acceptance of 0.8; raises UnsupportedModelError if none can."""
    speedups = []
    for trial in trials:
        speedups.append(trial.costs.best_k(REACHABLE_ALPHA, new_tokens)[1])
        promise = f"speed-up {speedups[-1]:.2f} at alpha {REACHABLE_ALPHA}"
        budget.report(f"{trial.name}: a drafted token costs {trial.costs.c:.2f} of a target token; {promise}")
    if able := [trial for trial, speedup in zip(trials, speedups, strict=True) if speedup > 1]:
        return able
    cheapest = min(trials, key=lambda trial: trial.costs.c)
    if gpu is None and compiles_draft(OnlineConfig(), cheapest.draft.device.type):
        budget.report("no draft pays with eager forwards; captured or compiled forwards, used here, are faster")
        return trials
    raise UnsupportedModelError(
        f"No draft pays for this target: with {cheapest.name} alone, a drafted token takes "
        f"{cheapest.costs.c:.2f} of the time of a target token. Even at an acceptance of {REACHABLE_ALPHA}, answers "
        f"of {new_tokens:.0f} tokens would be {max(speedups):.2f} times as fast. Use the target alone, a smaller "
        "model of its family, or text candidates."
    )


def best_trial(
    trials: list[LayerDraft],
    training: Sequence[Trace],
    held_out: Sequence[Trace],
    new_tokens: float,
    config: MakeDraftConfig,
    budget: TimeBudget,
) -> tuple[LayerDraft, list[dict[str, Any]]]:
    """Train each draft for a short time. Empties `trials`, because each draft needs much memory. Return the most
    promising draft, and the measurements of all, if there are several. The speed-up expected after full training
    (`promised`) decides."""
    best, measured = trials[0], list[dict[str, Any]]()
    if len(trials) == 1:
        best.begin(training, held_out, config.seed)
        return best, measured
    available = TRIAL_SHARE * max(config.max_seconds - budget.elapsed, 0.0)
    until, share = budget.elapsed + available, available / len(trials)
    steps = None if config.max_steps is None else max(round(TRIAL_SHARE * config.max_steps), 1)
    while trials:
        trial = trials.pop(0)
        if measured and budget.elapsed >= until:  # a replay or a step may take longer than its share
            budget.report(f"{trial.name}: not tried, the time for trials is over")
            continue
        trial.begin(training, held_out, config.seed)
        train(trial, held_out, budget, budget.elapsed + share, steps, is_trial=True)
        k, speedup = trial.costs.best_k(trial.stats.alpha, new_tokens)
        # Full training closes about half of the gap to the reachable acceptance.
        reached = max((trial.stats.alpha + REACHABLE_ALPHA) / 2, trial.stats.alpha)
        promised = trial.costs.best_k(reached, new_tokens)[1]
        if all(promised > other["promised"] for other in measured):
            best = trial
        found = {"kind": trial.kind, "layers": list(trial.layers), "c": trial.costs.c, "k": k}
        found |= {"alpha_before": trial.before.alpha}
        found |= {"alpha": trial.stats.alpha, "speedup": speedup, "promised": promised, "steps": trial.steps}
        measured.append(found)
        budget.report(
            f"{trial.name}: alpha {trial.before.alpha:.3f} before, {trial.stats.alpha:.3f} after {trial.steps} steps; "
            f"expected speed-up {speedup:.2f} now, {promised:.2f} after full training"
        )
    return best, measured


def train(
    trial: LayerDraft,
    held_out: Sequence[Trace],
    budget: TimeBudget,
    until: float,
    max_steps: int | None,
    *,
    is_trial: bool = False,
) -> None:
    """Train until the time `until` or the number of steps is reached. Except in a trial, the learning rate falls
    linearly to zero."""
    started, evaluated, evaluations = budget.elapsed, 0, 1 if is_trial else EVALUATIONS
    while True:
        share = (budget.elapsed - started) / max(until - started, 1e-9)
        if max_steps is not None:
            share = max(share, trial.steps / max_steps)
        if share * evaluations >= evaluated + 1:
            evaluated = int(share * evaluations)
            trial.evaluate(held_out)
        if share >= 1:
            return
        budget.show(f"training {trial.name}, alpha {trial.stats.alpha:.3f}")
        if not is_trial:
            trial.updater.scale_learning_rate(1 - share)
        trial.step()
