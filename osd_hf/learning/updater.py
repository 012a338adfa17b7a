"""Steps on stored target rows: an fp32 master of a draft, its optimizer, and what one update did."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration

from osd_hf.acceptance import AcceptanceStats
from osd_hf.chunked_loss import SampledTail, divergence_sum, stored_rows
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, StateError, UnsupportedModelError, is_out_of_memory
from osd_hf.learning.activations import LEAST_TOKENS, Activations, computed_again, layers_of, num_tokens, shortened
from osd_hf.learning.faults import Parts, Readable
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.lesson import Lesson
from osd_hf.learning.optimizer import make_optimizers
from osd_hf.learning.placement import learner_device, learns_in_bf16, with_own_attention
from osd_hf.learning.weights import (
    Snapshot,
    adapter_state,
    in_fp32,
    learning_context,
    load_adapter,
    write_snapshot,
)
from osd_hf.losses import DIVERGENCES, outcome_logprobs
from osd_hf.models import is_peft
from osd_hf.replay import batches, completion_logits, completion_mask, has_plain_head
from osd_hf.trace import Trace
from osd_hf.utils.yielding import between, clock, computing, give_way, in_pieces

__all__ = ["UpdateReport", "Updater", "finish", "log_update", "make_accelerator", "trainable_parameters"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
BATCH_POSITIONS = 480  # completion tokens in the batch of one step, about, where some are replayed
MAX_LEARN_TOKENS = 2048  # of prompt and answer of one request: memory grows with them
MAX_GRAD_NORM = 1.0
MICRO_STEP_SECONDS = 0.02  # of a forward and backward with "idle": how long a request may have to wait
NOT_FINITE = "loss or gradient is not finite"
BACKWARD = 0.85  # of an optimizer step, about, that forwards and backwards of its batch are


@dataclass(frozen=True)
class UpdateReport:
    """
    What one update did.

    Args:
        version (`int`):
            Version of the draft that serves afterwards; unchanged if no step was kept, or the gate let none through.
        steps (`int`): Optimizer steps kept.
        dropped_steps (`int`): Steps dropped because loss or gradient was not finite.
        loss (`float`, *optional*): Mean over the kept steps, in nats per position; `None` if there was none.
        positions (`int`): Positions learned from, over all steps.
        new_requests (`int`): Requests seen for the first time.
        seconds (`float`): Wall time of the work, the gate's included.
        domain (`str`, *optional*): Whose draft; `None` where all share one.
        decision (`GateDecision`, *optional*):
            What became of the version that it made; `None` if there was nothing to learn from.
        set_aside (`Mapping[str, int]`, *optional*):
            Requests that made learning fail and are not learned from any more, by reason.
    """

    version: int
    steps: int
    dropped_steps: int
    loss: float | None
    positions: int
    new_requests: int
    seconds: float
    domain: str | None = None
    decision: GateDecision | None = None
    set_aside: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Field by field, ready for JSON."""
        return asdict(self)


class Updater:
    """
    Teaches a copy of a draft from traces. The copy is kept in fp32, as steps of AdamW round away in half precision,
    together with its optimizer, so that updates go on where the last one ended, on `config.learner_device`. A thread
    that gives way to others does so between layers and between pieces of a step.

    Args:
        draft (`PreTrainedModel`):
            Copied, not changed. Where it has adapters the trainable parameters learn, and what is frozen in fp32 is
            not copied; otherwise all.
        config (`OnlineConfig`): The rule.
        adapter (`str`, *optional*):
            The draft is an fp32 `PeftModel`, where it is to learn, that several learners share, each an adapter of its
            own: not copied.
        lesson (`Lesson`, *optional*): The requests of this draft; by default it begins with none.
        dtype (`torch.dtype`, *optional*): Of the draft that serves; by default that of the draft given.
        frozen (`Container[str]`, *optional*): Names of parameters that stay as they are.
        tail (`SampledTail`, *optional*):
            What stands for the tokens that no row keeps; by default some that are drawn where the vocabulary is large,
            all of them where it is not.

    Raises:
        UnsupportedModelError: the draft has no parameter that could learn.
        ConfigError: there is no such device.
    """

    def __init__(
        self, draft: Any, config: OnlineConfig, *, adapter: str | None = None, lesson: Lesson | None = None,
        dtype: torch.dtype | None = None, frozen: Container[str] = (), tail: SampledTail | None = None,
    ) -> None:  # fmt: skip
        self.config, self.adapter = config, adapter
        self.tail = tail or SampledTail.where_large(draft, config.seed)
        self.version = self.kept_steps = 0
        self.is_torn = False  # the weights are of a step that was not whole: to be restarted from others
        self.lesson = lesson or Lesson(config=config)
        self.buffer, self.set_aside = self.lesson.buffer, self.lesson.set_aside
        self.readable = Readable.by(draft)  # what the draft can learn from
        # Requests in one forward and backward, at most; between requests nobody knows yet how long one takes.
        self.micro_batch = 1 if config.update_strategy == "idle" else config.batch_size
        self._backward_seconds: float | None = None  # of the last micro-batch
        device = learner_device(config)
        with learning_context():
            # Evaluation mode throughout: dropout would draw from the generator that sampled requests draw from.
            self.master = with_own_attention(in_fp32(draft, own=False, device=device) if adapter is None else draft)
            self._activate()
            self.parameters = trainable_parameters(self.master, frozen)
            self.optimizers = make_optimizers(self.master, self.parameters, config)
            own = config.weight_average > 0  # otherwise they are the last step's
            self.averaged = {name: p.detach().clone() if own else p.detach() for name, p in self.parameters.items()}
        self.device = next(iter(self.parameters.values())).device
        self.is_bf16 = learns_in_bf16(dtype or draft.dtype, self.device)
        self.activations = Activations.of(self.master)
        # The longest request that is learned from as it is, its prompt included.
        self.most_tokens = min(MAX_LEARN_TOKENS, self.activations.most_tokens)

    # --- requests ---------------------------------------------------------------------------------------------------

    def observe(self, trace: Trace) -> None:
        """Take in a request to learn from at the next update; raises StateError if its rows are of another width."""
        if len(trace) and trace.num_kept and self.accepts(trace):
            self.lesson.check_width([trace])
            with self.lesson.lock:
                self.lesson.meet(trace.target)
            self.lesson.pending.append(trace)

    def accepts(self, trace: Trace) -> bool:
        """Whether a request can be learned from; one that cannot is set aside."""
        if trace in self.set_aside:
            return False
        fault = self.readable.fault(trace)
        if fault is not None:
            self.set_aside.add(trace, fault)
        return fault is None

    # --- updates ----------------------------------------------------------------------------------------------------

    def update(self, steps: int | None = None) -> UpdateReport:
        """Learn from the requests taken in since the last update, mixed with replayed ones, in so many optimizer
        steps (`config.steps_per_update` by default); raises ConfigError if `steps` is below 1."""
        return finish(self.micro_steps(steps))

    def micro_steps(self, steps: int | None = None, newest: Sequence[Trace] | None = None) -> Parts[UpdateReport]:
        """[`~Updater.update`] in parts: yields after the backward of each micro-batch and after each optimizer step
        how much of such a step that was, in whatever mode the caller is; whoever stops in between, or a failure,
        leaves the weights of the last whole step, and all requests. Learns from `newest` of the pending requests, by
        default from all."""
        if steps is not None and steps < 1:
            raise ConfigError(f"`steps` must be at least 1, got {steps}.")
        newest = self.lesson.still_good(list(self.lesson.pending) if newest is None else newest)
        losses: list[float] = []
        dropped = positions = 0
        started = time.perf_counter()
        for _ in range(self.config.steps_per_update if steps is None else steps):
            loss, count = yield from self._step(self._batch(self.lesson.still_good(newest)))
            if count == 0:
                continue
            if loss is None:
                dropped += 1
            else:
                losses.append(loss)
                positions += count
        self.lesson.end_update(newest)
        if losses:
            self.version += 1
        if dropped:
            logger.info(
                "%d of %d update steps were dropped: loss or gradient not finite.", dropped, dropped + len(losses)
            )
        return UpdateReport(
            version=self.version, steps=len(losses), dropped_steps=dropped,
            loss=float(np.mean(losses)) if losses else None, positions=positions, new_requests=len(newest),
            seconds=time.perf_counter() - started, set_aside=self.set_aside.take_new(),
        )  # fmt: skip

    def slow(self, share: float) -> None:
        """Step at this share of the learning rate from now on."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * share

    def pace(self) -> None:
        """Fit the size of the next backward passes to what the last one took and an arriving request may wait."""
        seconds, self._backward_seconds = self._backward_seconds, None
        limit = MICRO_STEP_SECONDS
        if seconds is not None and seconds > limit:
            self.micro_batch = max(self.micro_batch // 2, 1)
        elif seconds is not None and seconds < limit / 3:
            self.micro_batch = min(self.micro_batch + 1, self.config.batch_size)

    def _batch(self, newest: Sequence[Trace]) -> list[Trace]:
        """The newest requests and a uniform sample of the buffer, in the shares of the configuration."""
        size = self.config.batch_size
        fresh = min(len(newest), size - round(size * self.config.replay_fraction))
        replayed = min(len(self.buffer), size - fresh) if self.config.replay_fraction > 0 else 0
        fresh = min(len(newest), size - replayed)
        chosen = [newest[i] for i in self.buffer.rng.permutation(len(newest))[:fresh]] + self.buffer.sample(replayed)
        if not replayed or sum(min(len(trace), self.most_tokens) for trace in chosen) <= BATCH_POSITIONS:
            return chosen
        # In an order in which every part of the batch has both in their shares, also a part of one request.
        places = np.concatenate([(np.arange(n) + 0.5) / n for n in (fresh, replayed) if n])
        order = np.roll(np.argsort(places, kind="stable"), self.buffer.rng.integers(len(chosen)))
        ordered = [chosen[i] for i in order]
        ends = np.cumsum([min(len(trace), self.most_tokens) for trace in ordered])
        return ordered[: max(int(np.searchsorted(ends, BATCH_POSITIONS, side="right")), 1)]

    def _step(self, traces: Sequence[Trace]) -> Parts[tuple[float | None, int]]:
        """
        One optimizer step; the loss (`None` if the step was dropped) and the number of positions.

        Where memory is too little, fewer requests are computed at once, down to one, which is shortened then. Where a
        request fails even so, or for another reason, it is set aside, and the step is taken without it. What is the
        fault of none of them is raised.
        """
        size, seen = self.micro_batch, {trace: shortened(trace, self.most_tokens) for trace in traces}
        while (total := sum(int(_learned_mask(seen[t], self.config.learn_from).sum()) for t in traces)) > 0:
            under_way: list[Trace] = []
            try:
                value = yield from self._gradients([seen[t] for t in traces], total, size, under_way)
            except Exception as error:  # noqa: BLE001 - whatever a model fails with
                failure = error
            else:
                with self._at_work():
                    self._take_step()
                if size < min(self.micro_batch, len(traces)):
                    self.micro_batch = size  # more are too much
                yield 1 - BACKWARD
                return value, total
            traceback.clear_frames(failure.__traceback__)  # they hold the memory that was too little
            with self._at_work():
                self._zero_grad()
            suspects = traces
            if is_out_of_memory(failure):
                yield None
                if len(under_way) > 1:
                    size = len(under_way) // 2
                    continue
                suspects = [t for t in traces if seen[t] in under_way]
                if suspects and (most := num_tokens(seen[suspects[0]]) // 2) >= LEAST_TOKENS:
                    seen[suspects[0]] = shortened(seen[suspects[0]], most)
                    continue
            is_sound = yield from self._sound(suspects, seen)
            if not all(is_sound.values()):
                traces = [trace for trace in traces if is_sound.get(trace, True)]
                size = self.micro_batch
            elif isinstance(failure, FloatingPointError):
                return None, total
            elif (size := min(size, len(traces)) // 2) == 0:  # otherwise: each by itself can be learned from
                raise failure
        return 0.0, 0

    def _take_step(self) -> None:
        """Step, and average; gradients, which are as large as the weights, go. Where that fails half-way, the weights
        are the average of the last whole step; without one they are torn."""
        try:
            for optimizer in self.optimizers:
                with computing():
                    optimizer.step()
            self._average()
            self._zero_grad()
        except BaseException:
            self.is_torn = self.config.weight_average == 0
            self._zero_grad()
            for name, parameter in self.parameters.items():
                parameter.data.copy_(self.averaged[name])
            for optimizer in self.optimizers:
                optimizer.state.clear()
            raise

    def _gradients(self, traces: Sequence[Trace], total: int, size: int, under_way: list[Trace]) -> Parts[float]:
        """Loss and clipped gradients of a batch with `total` positions, `size` requests at once at most, those
        `under_way`; raises FloatingPointError if they are not finite."""
        with self._at_work():
            self._zero_grad()
        value = 0.0
        # Memory is bounded by micro-batches; weights make their gradients add up to those of the whole batch.
        for part in self._micro_batches(traces, size):
            under_way[:] = part
            started = clock()
            with self._at_work(), computing():
                loss, count = self._bounded_loss(part)
                loss = loss * (count / total)
                _backward(loss)
                value += float(loss.detach())
            self._backward_seconds = clock() - started
            yield BACKWARD * count / total
        under_way.clear()
        with self._at_work():
            if not (np.isfinite(value) and self._clip()):
                raise FloatingPointError(NOT_FINITE)
        return value

    def _clip(self) -> bool:
        """Clip the gradients, as `torch.nn.utils.clip_grad_norm_` does; returns whether their norm is finite."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norms = [torch.nn.utils.get_total_norm(piece).to(self.device) for (piece,) in in_pieces(grads)]
        norm = torch.nn.utils.get_total_norm(norms)
        scale = (MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0)
        for (piece,) in in_pieces(grads) if scale < 1 else ():
            torch._foreach_mul_(piece, scale.to(piece[0].device))
        return bool(torch.isfinite(norm))

    def _micro_batches(self, traces: Sequence[Trace], size: int) -> Iterator[list[Trace]]:
        for indices in batches(traces, traces[0].vocab_size, min(size, len(traces)), self.activations.fit):
            yield [traces[i] for i in indices]

    def _sound(self, traces: Sequence[Trace], seen: Mapping[Trace, Trace]) -> Parts[dict[Trace, bool]]:
        """Which requests can be learned from, as they are `seen`; the others are set aside."""
        try:
            sound = yield from self.set_aside.isolate(
                lambda those: self._tried([seen.get(t) or t for t in those]), traces, self.readable
            )
        except FloatingPointError:  # of the weights, not of a request
            sound = [True] * len(traces)
        finally:
            with self._at_work():
                self._zero_grad()
        if not all(sound):
            self.lesson.forget_set_aside()
        return {trace: bool(is_sound) for trace, is_sound in zip(traces, sound, strict=True)}

    def _tried(self, traces: Sequence[Trace]) -> Parts[list[bool]]:
        """Whether traces can be learned from: raises what a step on them would. Yields after each micro-batch."""
        for part in self._micro_batches(traces, self.micro_batch):
            with self._at_work(), computing():
                self._zero_grad()
                loss, _ = self._bounded_loss(part)
                _backward(loss)
                found = [loss.detach(), *(p.grad for p in self.parameters.values() if p.grad is not None)]
                if not all(bool(torch.isfinite(tensor).all()) for tensor in found):
                    raise FloatingPointError(NOT_FINITE)
                self._zero_grad()
            yield BACKWARD * len(part) / len(traces)
        return [True] * len(traces)

    def _bounded_loss(self, traces: Sequence[Trace]) -> tuple[torch.Tensor, int]:
        """[`~Updater._loss`] of a micro-batch, whose layers are computed again in the backward where what they would
        keep of a single request is over the budget."""
        is_large = not self.activations.fit(len(traces), max(map(num_tokens, traces)))
        with computed_again(self.master) if is_large else nullcontext(), between(layers_of(self.master)):
            return self._loss(traces)

    def _loss(self, traces: Sequence[Trace]) -> tuple[torch.Tensor, int]:
        """Mean divergence over the positions learned from, and their number."""
        mask = np.concatenate([_learned_mask(t, self.config.learn_from) for t in traces])
        learned = torch.from_numpy(mask)
        count = int(learned.sum())
        where = None if count == len(learned) else learned
        rows, divergence = stored_rows(traces, where), DIVERGENCES[self.config.divergence]
        if count and has_plain_head(self.master):
            with self._autocast():
                return divergence_sum(self.master, traces, rows, divergence, where, self.tail) / count, count
        with self._autocast():
            logits = completion_logits(self.master, traces)
        top_ids, p = rows(slice(None))
        logits = logits[completion_mask(traces, logits.device)][learned.to(logits.device)]
        q = outcome_logprobs(logits, None if top_ids is None else top_ids.to(logits.device))
        return divergence(p.to(q), q).sum() / max(count, 1), count

    def _average(self) -> None:
        # The decay ramps up, so that the start is forgotten at once and not over 1 / (1 - decay) steps.
        self.kept_steps += 1
        decay = min(self.config.weight_average, self.kept_steps / (9 + self.kept_steps))
        with torch.no_grad():
            for averages, parameters in in_pieces(list(self.averaged.values()), list(self.parameters.values())):
                torch._foreach_lerp_(averages, parameters, 1 - decay)

    def _zero_grad(self) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                give_way()
                parameter.grad = None

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_bf16)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Entered around each part of a step, and left between them."""
        with learning_context():
            self._activate()
            yield

    def _activate(self) -> None:
        """Let our adapter learn, where the master has several."""
        if self.adapter is not None and self.master.active_adapters != [self.adapter]:
            self.master.set_adapter(self.adapter)

    # --- weights ----------------------------------------------------------------------------------------------------

    def snapshot(self, served: Mapping[str, torch.Tensor] | None = None) -> Snapshot:
        """A copy of the learned (averaged) weights: an adapter's, in fp32, by the names of its file; otherwise of all
        parameters that learn, in the dtypes of those `served`, in fp32 by default. Where a `learner_device` is set,
        the copy is where those served are."""
        with learning_context(), torch.no_grad():
            like = served or self.averaged
            if not is_peft(self.master):
                made = {
                    name: torch.empty_like(learned, dtype=like[name].dtype, device=like[name].device)
                    for name, learned in self.averaged.items()
                }
                for copies, learned in in_pieces(list(made.values()), list(self.averaged.values())):
                    for one, other in zip(copies, learned, strict=True):
                        one.copy_(other)
                return made
            is_apart = served is not None and self.config.learner_device is not None
            device = next(iter(like.values())).device if is_apart else None
            stepped = {name: p.detach().clone() for name, p in self.parameters.items()}
            try:
                self._set_parameters(self.averaged)
                state = adapter_state(self.master, self.adapter)
                return {name: t.detach().to(device or t.device, torch.float32, copy=True) for name, t in state.items()}
            finally:
                self._set_parameters(stepped)

    def _set_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.parameters.items():
            give_way()
            parameter.copy_(values[name])

    def restart(self, snapshot: Snapshot) -> None:
        """Go back to these weights, with an optimizer that knows nothing."""
        with learning_context(), torch.no_grad():
            if is_peft(self.master):
                load_adapter(self.master, snapshot, self.adapter)
            else:
                self._set_parameters(snapshot)
            for name, parameter in self.parameters.items():
                give_way()
                self.averaged[name].copy_(parameter)
            for optimizer in self.optimizers:
                optimizer.state.clear()
        self.kept_steps, self.is_torn = 0, False

    def copy_to(self, draft: Any) -> None:
        """Cast the learned (averaged) weights into another copy of the draft, in place; adapters into the weights of
        one that has them merged."""
        self._activate()
        write_snapshot(self.snapshot(), draft, self.master if is_peft(self.master) else None)

    def _portable(self, name: str) -> str:
        """A parameter's name without that of our adapter, which another session may call otherwise."""
        return ".".join(part for part in name.split(".") if part != self.adapter)

    def state_dict(self) -> dict[str, Any]:
        """Learned parameters, optimizer, version and generator state; the requests are saved apart."""
        return {
            "parameters": {self._portable(name): p.detach() for name, p in self.parameters.items()},
            "averaged": {self._portable(name): p for name, p in self.averaged.items()},
            "kept_steps": self.kept_steps,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "version": self.version,
            "rng": self.buffer.rng.bit_generator.state,
            "tail": None if self.tail is None else self.tail.generator.get_state(),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse the state of another draft or optimizer; raises StateError."""
        saved = {name: tuple(p.shape) for name, p in state["parameters"].items()}
        ours = {self._portable(name): tuple(p.shape) for name, p in self.parameters.items()}
        if saved != ours:
            differing = sorted(n for n in saved.keys() | ours.keys() if saved.get(n) != ours.get(n))
            raise StateError(
                f"The saved state belongs to another draft: {len(differing)} parameters differ, such as "
                f"{differing[0]}. Load it with the draft that it was saved with."
            )

        def groups(states: Any) -> list[list[int]]:
            return [[len(group["params"]) for group in s["param_groups"]] for s in states]

        if groups(state["optimizers"]) != groups([o.state_dict() for o in self.optimizers]):
            raise StateError(
                "The saved state belongs to another optimizer. Load it with the `optimizer` it was saved with."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; raises StateError where it belongs to another draft."""
        self.check_state(state)
        with learning_context(), torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["parameters"][self._portable(name)])
                self.averaged[name].copy_(state["averaged"][self._portable(name)])
            for optimizer, saved_optimizer in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved_optimizer)
        self.kept_steps, self.is_torn = int(state["kept_steps"]), False
        self.version = int(state["version"])
        self.buffer.rng.bit_generator.state = state["rng"]
        drawn = state.get("tail")  # sessions from before say nothing of it
        if self.tail is not None and drawn is not None:
            self.tail.generator.set_state(drawn)


def trainable_parameters(model: Any, frozen: Container[str] = ()) -> dict[str, torch.nn.Parameter]:
    """The parameters that learn, by name: the adapters of a model that has some, otherwise all that are not frozen;
    raises UnsupportedModelError where there is none."""
    # Adapters, of a `PeftModel` or added by transformers, have frozen the rest, and are saved without it.
    if not is_peft(model) and not getattr(model, "_hf_peft_config_loaded", False):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point() and name not in frozen)
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise UnsupportedModelError(
            f"The draft ({type(model).__name__}) has no parameter that could learn. Load its adapter with "
            "`is_trainable=True`, or use a draft in full or half precision."
        )
    return found


def _backward(loss: torch.Tensor) -> None:
    """Compute the gradients of a loss; raises FloatingPointError where torch's anomaly detection finds NaN in them."""
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if torch.is_anomaly_enabled() and "returned nan values" in str(error):
            raise FloatingPointError(NOT_FINITE) from error
        raise


def finish(work: Parts[T]) -> T:
    """Run work that comes in parts to its end."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result


def _learned_mask(trace: Trace, learn_from: str) -> Any:
    return trace.correction_mask if learn_from == "corrections" else np.ones(len(trace), dtype=bool)


# --- the accelerator ------------------------------------------------------------------------------------------------


def make_accelerator(report_to: str | Sequence[str] | None, config: OnlineConfig) -> Accelerator:
    """One that leaves models where they are; raises ConfigError for a tracker that is not installed."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names = [name for name in names if name != "none"]
    # All of a process share how gradients are accumulated: it stays as a trainer has set it.
    accumulation = GradientAccumulationPlugin(**GradientState().plugin_kwargs)
    settings: dict[str, Any] = {"device_placement": False, "gradient_accumulation_plugin": accumulation}
    if not names:
        return Accelerator(**settings)
    project = ProjectConfiguration(project_dir=".", logging_dir=os.environ.get("TENSORBOARD_LOGGING_DIR", "runs"))
    try:
        accelerator = Accelerator(log_with=names, project_config=project, **settings)
    except ValueError as error:
        raise ConfigError(f"`report_to={report_to!r}` is not known: {error}") from error
    accelerator.init_trackers("osd_hf", config=config.to_dict())
    if not accelerator.trackers:
        raise ConfigError(f"`report_to={report_to!r}` finds no tracker installed; try `pip install trackio`.")
    return accelerator


def log_update(accelerator: Accelerator, report: UpdateReport, requests: int, recent: AcceptanceStats) -> None:
    """Tell the log and the trackers of an update, after so many requests, and of the acceptance since the last one."""
    values: dict[str, Any] = {
        "version": report.version, "dropped_steps": report.dropped_steps, "update_seconds": report.seconds,
    }  # fmt: skip
    if report.loss is not None:
        values["loss"] = report.loss
    if recent.examined:
        values |= {"alpha": recent.alpha, "block_efficiency": recent.block_efficiency}
    logger.info("Draft version %d after %d requests: %s", report.version, requests, values)
    accelerator.log(values, step=requests)
