"""Train the fp32 master copy of a draft on stored target rows: optimizers, steps, averages, and reports."""

from __future__ import annotations

import logging
import math
import os
import time
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration
from transformers import PreTrainedModel

from osd_hf.acceptance import AcceptanceStats
from osd_hf.config import OnlineConfig
from osd_hf.draft_head import DraftHead
from osd_hf.errors import ConfigError, StateError, UnsupportedModelError, is_out_of_memory
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.loss import (
    MIN_REQUEST_TOKENS,
    ActivationMemory,
    SampledTail,
    divergence_sum,
    num_tokens,
    recomputed_layers,
    shortened,
    stored_rows,
)
from osd_hf.learning.requests import DraftRequests, Parts, ReadableTraces
from osd_hf.learning.weights import (
    Snapshot,
    adapter_state,
    fp32_copy,
    hidden_matrices,
    learner_device,
    learning_context,
    learns_in_bf16,
    load_adapter,
    with_fp32_attention,
    write_snapshot,
)
from osd_hf.losses import DIVERGENCES, outcome_logprobs
from osd_hf.models import is_peft, unwrap
from osd_hf.replay import batches, completion_logits, completion_mask, has_plain_head
from osd_hf.trace import Trace

logger = logging.getLogger(__name__)

T = TypeVar("T")
BATCH_POSITIONS, HEAD_BATCH_POSITIONS = 480, 720  # see `batch_positions`
MAX_LEARN_TOKENS = 2048  # of prompt and answer of one request; memory grows with them
MAX_GRAD_NORM = 1.0
MUON_MOMENTUM = 0.95
EMBEDDING_RATE = 0.5  # of Muon's learning rate, for the weights that AdamW updates
INPUT_RATE = 0.3  # of Muon's learning rate, for the matrices before the layers of a draft head
BACKWARD_SHARE = 0.85  # of an optimizer step, about, for forwards and backwards of its batch


@dataclass(frozen=True)
class UpdateReport:
    """
    Report one update.

    Args:
        version (`int`): Version of the draft that serves afterwards; unchanged if the gate promoted none.
        steps (`int`): Optimizer steps kept.
        dropped_steps (`int`): Steps dropped because loss or gradient was not finite.
        loss (`float`, *optional*): Mean over the kept steps, in nats per position.
        positions (`int`): Positions learned from, over all steps.
        new_requests (`int`): Requests seen for the first time.
        seconds (`float`): Wall time, including the gate.
        domain (`str`, *optional*): Domain of the draft; `None` if all share one.
        decision (`GateDecision`, *optional*): Decision about the new version; `None` if there was nothing to learn.
        set_aside (`Mapping[str, int]`, *optional*): Requests excluded because learning failed on them, by reason.
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
        """Return all fields, ready for JSON."""
        return asdict(self)


class Updater:
    """Train an fp32 copy of a draft on traces. Copy and optimizer persist, so that updates continue where the last one
    ended. A draft with adapters learns its trainable parameters, and frozen fp32 weights are shared; otherwise all
    parameters learn, except those of the names in `frozen`, which are shared. The serving draft has the given `dtype`,
    by default that of `draft`. Raises UnsupportedModelError if no parameter can learn, and ConfigError if the
    learner's device does not exist."""

    def __init__(
        self,
        draft: PreTrainedModel,
        config: OnlineConfig,
        *,
        requests: DraftRequests | None = None,
        dtype: torch.dtype | None = None,
        frozen: Container[str] = (),
    ) -> None:
        self.config = config
        self.tail = SampledTail.for_draft(draft, config.seed)  # `None` for a small vocabulary
        self.version = 0
        self.kept_steps = 0
        self.requests = requests or DraftRequests(ReadableTraces.by(draft), config=config)
        self.buffer = self.requests.buffer
        self.set_aside = self.requests.set_aside
        # Requests in one forward and backward. With "idle", an arriving request waits for one of them.
        self.micro_batch = 1 if config.update_strategy == "idle" else config.batch_size
        device = learner_device(config)
        with learning_context():
            # Evaluation mode: dropout would draw from the generator that sampled requests use.
            self.master = with_fp32_attention(fp32_copy(draft, frozen, device=device))
            self.parameters = trainable_parameters(self.master, frozen)
            self.optimizers = make_optimizers(self.master, self.parameters, config)
            self.averaged = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.device = next(iter(self.parameters.values())).device
        self.is_bf16 = learns_in_bf16(dtype or draft.dtype, self.device)
        self.activations = ActivationMemory.of(self.master)
        self.max_tokens = min(MAX_LEARN_TOKENS, self.activations.max_tokens)  # longer requests are shortened

    # --- updates ----------------------------------------------------------------------------------------------------

    def update(self, steps: int | None = None) -> UpdateReport:
        """Learn from the pending requests and replayed ones. Raises ConfigError if `steps` is below 1."""
        return finish(self.micro_steps(steps))

    def micro_steps(self, steps: int | None = None, newest: Sequence[Trace] | None = None) -> Parts[UpdateReport]:
        """Run an update on the `newest` pending requests (by default all) in parts: each micro-batch and each
        optimizer step is one. If the caller stops in between, the weights are those of the last complete step."""
        if steps is not None and steps < 1:
            raise ConfigError(f"`steps` must be at least 1, got {steps}.")
        newest = self.requests.still_valid(self.requests.pending if newest is None else newest)
        losses: list[float] = []
        dropped = positions = 0
        started = time.perf_counter()
        for _ in range(self.config.steps_per_update if steps is None else steps):
            loss, count = yield from self._step(self._batch(self.requests.still_valid(newest)))
            if count == 0:
                continue
            if loss is None:
                dropped += 1
            else:
                losses.append(loss)
                positions += count
        self.requests.end_update(newest)
        if losses:
            self.version += 1
        if dropped:
            logger.info(
                "%d of %d update steps were dropped: loss or gradient not finite.", dropped, dropped + len(losses)
            )
        return UpdateReport(
            version=self.version,
            steps=len(losses),
            dropped_steps=dropped,
            loss=float(np.mean(losses)) if losses else None,
            positions=positions,
            new_requests=len(newest),
            seconds=time.perf_counter() - started,
            set_aside=self.set_aside.take_new(),
        )

    def scale_learning_rate(self, factor: float) -> None:
        """Set the learning rate to this share of the configured one."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def _batch(self, newest: Sequence[Trace]) -> list[Trace]:
        """Draw the newest requests and a sample of the buffer, in the configured shares."""
        size, rng = self.config.batch_size, self.buffer.rng
        fresh = min(len(newest), size - round(size * self.config.replay_fraction))
        with self.requests.lock:
            replayed = min(len(self.buffer), size - fresh) if self.config.replay_fraction > 0 else 0
            fresh = min(len(newest), size - replayed)
            chosen = [newest[i] for i in rng.permutation(len(newest))[:fresh]] + self.buffer.sample(replayed)
        most = batch_positions(self.master)
        if not replayed or sum(min(len(trace), self.max_tokens) for trace in chosen) <= most:
            return chosen
        # Cut to these positions, in an order in which each part of the batch has both in their shares.
        places = np.concatenate([(np.arange(n) + 0.5) / n for n in (fresh, replayed) if n])
        order = np.roll(np.argsort(places, kind="stable"), rng.integers(len(chosen)))
        ordered = [chosen[i] for i in order]
        ends = np.cumsum([min(len(trace), self.max_tokens) for trace in ordered])
        return ordered[: max(int(np.searchsorted(ends, most, side="right")), 1)]

    def _step(self, traces: Sequence[Trace]) -> Parts[tuple[float | None, int]]:
        """Run one optimizer step; returns the loss (`None` if the step was dropped) and the number of positions. If
        memory does not suffice, micro-batches become smaller, and a single request is shortened. A request that fails
        even so, or for another reason, is excluded. An error that no request causes is raised."""
        size = self.micro_batch
        read = {trace: shortened(trace, self.max_tokens) for trace in traces}
        while (total := sum(int(_learned_mask(read[t], self.config.learn_from).sum()) for t in traces)) > 0:
            running: list[Trace] = []
            try:
                value = yield from self._gradients([read[t] for t in traces], total, size, running)
            except Exception as error:  # noqa: BLE001 - models fail in any way
                failure = error
            else:
                with learning_context():
                    self._take_step()
                if size < min(self.micro_batch, len(traces)):
                    self.micro_batch = size  # larger ones do not fit into memory
                yield 1 - BACKWARD_SHARE
                return value, total
            traceback.clear_frames(failure.__traceback__)  # the frames hold memory that may be needed
            self._zero_grad()
            suspects = traces
            if is_out_of_memory(failure):
                yield None
                if len(running) > 1:
                    size = len(running) // 2
                    continue
                suspects = [t for t in traces if read[t] in running]
                if suspects and (most := num_tokens(read[suspects[0]]) // 2) >= MIN_REQUEST_TOKENS:
                    read[suspects[0]] = shortened(read[suspects[0]], most)
                    continue
            is_valid = yield from self._check(suspects, read)
            if not all(is_valid.values()):
                traces = [trace for trace in traces if is_valid.get(trace, True)]
                size = self.micro_batch
            elif isinstance(failure, FloatingPointError):
                return None, total
            elif (size := min(size, len(traces)) // 2) == 0:  # each request alone can be learned from
                raise failure
        return 0.0, 0

    def _take_step(self) -> None:
        """Step and average. After a failure, the weights are the average of the last complete step."""
        try:
            for optimizer in self.optimizers:
                optimizer.step()
            self._average()
        except BaseException:
            for name, parameter in self.parameters.items():
                parameter.data.copy_(self.averaged[name])
            for optimizer in self.optimizers:
                optimizer.state.clear()
            raise
        finally:
            self._zero_grad()

    def _average(self) -> None:
        # The decay ramps up, so that the initial weights are forgotten quickly.
        self.kept_steps += 1
        decay = min(self.config.weight_average, self.kept_steps / (9 + self.kept_steps))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.averaged.values()), list(self.parameters.values()), 1 - decay)

    def _gradients(self, traces: Sequence[Trace], total: int, size: int, running: list[Trace]) -> Parts[float]:
        """Compute loss and clipped gradients of a batch with `total` positions in micro-batches of at most `size`
        requests, which are put into `running`. Layers of a request that exceeds the memory budget alone are recomputed
        in the backward pass. Raises FloatingPointError if loss or gradients are not finite."""
        self._zero_grad()
        value = 0.0
        for indices in batches(traces, traces[0].vocab_size, min(size, len(traces)), self.activations.fits):
            running[:] = part = [traces[i] for i in indices]
            is_large = not self.activations.fits(len(part), max(map(num_tokens, part)))
            with learning_context(), recomputed_layers(self.master) if is_large else nullcontext():
                loss, count = self._loss(part)
                loss = loss * (count / total)  # gradients add up to those of the batch
                loss.backward()  # type: ignore[no-untyped-call]
                value += float(loss.detach())
            yield BACKWARD_SHARE * count / total
        running.clear()
        with learning_context():
            norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), MAX_GRAD_NORM)
            if not (np.isfinite(value) and torch.isfinite(norm)):
                raise FloatingPointError("loss or gradient is not finite")
        return value

    def _check(self, traces: Sequence[Trace], read: Mapping[Trace, Trace]) -> Parts[dict[Trace, bool]]:
        """Find the requests that can be learned from as they are `read`, and exclude the others."""
        try:
            valid = yield from self.set_aside.isolate(
                lambda some: self._try_traces([read.get(t, t) for t in some]), traces
            )
        except FloatingPointError:  # caused by the weights, not by a request
            valid = [True] * len(traces)
        finally:
            self._zero_grad()
        if not all(valid):
            self.requests.remove_excluded()
        return {trace: bool(is_valid) for trace, is_valid in zip(traces, valid, strict=True)}

    def _try_traces(self, traces: Sequence[Trace]) -> list[bool]:
        """Compute gradients as a step on these traces would; raises the errors that it would raise."""
        for _ in self._gradients(traces, sum(map(len, traces)), self.micro_batch, []):
            pass
        return [True] * len(traces)

    def _loss(self, traces: Sequence[Trace]) -> tuple[torch.Tensor, int]:
        """Return the mean divergence over the positions learned from, and their number."""
        mask = np.concatenate([_learned_mask(t, self.config.learn_from) for t in traces])
        learned = torch.from_numpy(mask)
        count = int(learned.sum())
        where = None if count == len(learned) else learned
        rows, divergence = stored_rows(traces, where), DIVERGENCES[self.config.divergence]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_bf16):
            if count and has_plain_head(self.master):
                return divergence_sum(self.master, traces, rows, divergence, where, self.tail) / count, count
            logits = completion_logits(self.master, traces)
        top_ids, p = rows(slice(None))
        logits = logits[completion_mask(traces, logits.device)][learned.to(logits.device)]
        q = outcome_logprobs(logits, None if top_ids is None else top_ids.to(logits.device))
        return divergence(p.to(q), q).sum() / max(count, 1), count

    def _zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    # --- weights ----------------------------------------------------------------------------------------------------

    def snapshot(self, served: Mapping[str, torch.Tensor] | None = None) -> Snapshot:
        """Copy the learned (averaged) weights: an adapter's in fp32, by the names in its file; otherwise all trainable
        parameters, in the dtypes and on the devices of `served`, by default in fp32."""
        with learning_context(), torch.no_grad():
            like = served or self.averaged
            if not is_peft(self.master):
                return {name: learned.to(like[name], copy=True) for name, learned in self.averaged.items()}
            is_apart = served is not None and self.config.learner_device is not None
            device = next(iter(like.values())).device if is_apart else None
            stepped = {name: p.detach().clone() for name, p in self.parameters.items()}
            try:
                self._set_parameters(self.averaged)
                state = adapter_state(self.master)
                return {name: t.detach().to(device or t.device, torch.float32, copy=True) for name, t in state.items()}
            finally:
                self._set_parameters(stepped)

    def _set_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])

    def restart(self, snapshot: Snapshot) -> None:
        """Continue from these weights with a new optimizer state."""
        with learning_context(), torch.no_grad():
            if is_peft(self.master):
                load_adapter(self.master, snapshot)
            else:
                self._set_parameters(snapshot)
            for name, parameter in self.parameters.items():
                self.averaged[name].copy_(parameter)
            for optimizer in self.optimizers:
                optimizer.state.clear()
        self.kept_steps = 0

    def copy_to(self, draft: PreTrainedModel) -> None:
        """Write the learned (averaged) weights into another copy of the draft, adapters merged if its are."""
        write_snapshot(self.snapshot(), draft, self.master if is_peft(self.master) else None)

    def state_dict(self) -> dict[str, Any]:
        """Return learned parameters, optimizers, version and generators; the requests are saved separately."""
        return {
            "parameters": {name: p.detach() for name, p in self.parameters.items()},
            "averaged": dict(self.averaged),
            "kept_steps": self.kept_steps,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "version": self.version,
            "rng": self.buffer.rng.bit_generator.state,
            "tail": None if self.tail is None else self.tail.generator.get_state(),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise StateError for the state of another draft or optimizer."""
        saved_shapes = {name: p.shape for name, p in state["parameters"].items()}
        shapes = {name: p.shape for name, p in self.parameters.items()}
        if saved_shapes != shapes or len(state["optimizers"]) != len(self.optimizers):
            raise StateError(
                "The saved state belongs to another draft or optimizer. Load it with those that it was saved with."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; raises StateError if it belongs to another draft."""
        self.check_state(state)
        with learning_context(), torch.no_grad():
            self._set_parameters(state["parameters"])
            for name, averaged in self.averaged.items():
                averaged.copy_(state["averaged"][name])
            for optimizer, saved_optimizer in zip(self.optimizers, state["optimizers"], strict=True):
                groups = optimizer.state_dict()["param_groups"]  # as configured now
                optimizer.load_state_dict({**saved_optimizer, "param_groups": groups})
        self.kept_steps = int(state["kept_steps"])
        self.version = int(state["version"])
        self.buffer.rng.bit_generator.state = state["rng"]
        if self.tail is not None and state["tail"] is not None:
            self.tail.generator.set_state(state["tail"])


def batch_positions(draft: PreTrainedModel) -> int:
    """Return the completion tokens in the batch of one step, about, if some requests are replayed. A draft head has
    more to learn, from its target's states."""
    return HEAD_BATCH_POSITIONS if isinstance(unwrap(draft), DraftHead) else BATCH_POSITIONS


def finish(work: Parts[T]) -> T:
    """Run work in parts to its end, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result


def _learned_mask(trace: Trace, learn_from: str) -> Any:
    return trace.correction_mask if learn_from == "corrections" else np.ones(len(trace), dtype=bool)


# --- parameters and optimizers --------------------------------------------------------------------------------------


def trainable_parameters(model: PreTrainedModel, frozen: Container[str] = ()) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that learn, by name: adapters if the model has some, otherwise all that are not frozen.
    Raises UnsupportedModelError if there are none."""
    # Adapters, of a `PeftModel` or added by transformers, have frozen the rest already.
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


class Float32Muon(torch.optim.Muon):
    """Run Muon in float32, on CPUs. `torch.optim.Muon` iterates in bfloat16: on a CPU without instructions for it, a
    step for the bundled draft took 172 ms instead of 11 ms. Can go once torch lets users choose the dtype."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                direction = self._orthogonalized(p.grad.lerp(buffer, group["momentum"]), group)
                p.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))

    @staticmethod
    def _orthogonalized(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Move the singular values close to 1 by Newton-Schulz iterations."""
        a, b, c = group["ns_coefficients"]
        is_tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.T if is_tall else matrix
        x = x / x.norm().clamp(min=group["eps"])
        for _ in range(group["ns_steps"]):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if is_tall else x


def make_optimizers(
    model: PreTrainedModel, parameters: Mapping[str, torch.nn.Parameter], config: OnlineConfig
) -> list[torch.optim.Optimizer]:
    """Create Muon (arXiv 2502.16982) for hidden matrices, its steps scaled to the size of AdamW's, and AdamW for the
    other parameters; with `optimizer="adamw"` AdamW for all."""
    matrices = hidden_matrices(model, parameters) if config.optimizer == "muon" else []
    hidden = {id(p) for p in matrices}
    others = [p for p in parameters.values() if id(p) not in hidden]
    is_head, projections = isinstance(unwrap(model), DraftHead), {"input_proj", "state_proj"}
    first = {id(p) for name, p in parameters.items() if is_head and projections & {*name.split(".")}}
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        muon = Float32Muon if matrices[0].device.type == "cpu" else torch.optim.Muon
        how: dict[str, Any] = {"weight_decay": 0.0, "momentum": MUON_MOMENTUM, "adjust_lr_fn": "match_rms_adamw"}
        layers, before = ([p for p in matrices if (id(p) in first) is is_first] for is_first in (False, True))
        groups: list[dict[str, Any]] = [{"params": layers}] if layers else []
        groups += [{"params": before, "lr": config.learning_rate * INPUT_RATE}] if before else []
        optimizers.append(muon(groups, config.learning_rate, **how))
    if others:
        rate = config.learning_rate * (EMBEDDING_RATE if matrices else 1)
        optimizers.append(torch.optim.AdamW(others, rate, weight_decay=0.0, fused=True))
    return optimizers


# --- tracking -------------------------------------------------------------------------------------------------------


def make_accelerator(report_to: str | Sequence[str] | None, config: OnlineConfig) -> Accelerator:
    """Create an accelerator with trackers that does not move models. Raises ConfigError for a missing tracker."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names = [name for name in names if name != "none"]
    # Gradient accumulation is shared by the process: it stays as a trainer has set it.
    accumulation = GradientAccumulationPlugin(**GradientState().plugin_kwargs)
    settings: dict[str, Any] = {"device_placement": False, "gradient_accumulation_plugin": accumulation}
    if not names:
        return Accelerator(**settings)
    project = ProjectConfiguration(project_dir=".", logging_dir=os.environ.get("TENSORBOARD_LOGGING_DIR", "runs"))
    try:
        accelerator = Accelerator(log_with=names, project_config=project, **settings)
    except ValueError as error:
        raise ConfigError(f"`report_to={report_to!r}` is not known: {error}") from error
    found = [str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with]
    missing = [name for name in names if name not in ("all", *found)]
    missing = missing or ([] if found else names)  # "all" may find none
    if missing:
        raise ConfigError(f"`report_to`: {', '.join(missing)} is not installed. Install it, for example trackio.")
    accelerator.init_trackers("osd_hf", config=config.to_dict())
    return accelerator


def log_update(accelerator: Accelerator, report: UpdateReport, requests: int, recent: AcceptanceStats) -> None:
    """Log an update and the acceptance since the last one, after a number of requests."""
    values: dict[str, Any] = {} if report.loss is None else {"loss": report.loss}
    values |= {"version": report.version, "dropped_steps": report.dropped_steps, "update_seconds": report.seconds}
    if recent.examined:
        values |= {"alpha": recent.alpha, "block_efficiency": recent.block_efficiency}
    logger.info("Draft version %d after %d requests: %s", report.version, requests, values)
    accelerator.log(values, step=requests)
