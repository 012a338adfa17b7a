"""The learner: an fp32 master of the draft, one optimizer, and steps on stored target rows."""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, StateError, UnsupportedModelError
from osd_hf.forcing import batches, completion_logits, completion_mask
from osd_hf.losses import divergence_loss
from osd_hf.records import Trace
from osd_hf.wrappers import is_peft

__all__ = ["UpdateReport", "Updater"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateReport:
    """
    What one update did.

    Args:
        version (`int`):
            Of the draft after the update; unchanged if no step was kept.
        steps (`int`):
            Optimizer steps kept.
        dropped_steps (`int`):
            Steps dropped because loss or gradient was not finite.
        loss (`float`, *optional*):
            Mean over the kept steps, in nats per position; `None` if there was none.
        positions (`int`):
            Positions learned from, over all steps.
        new_requests (`int`):
            Requests seen for the first time.
        seconds (`float`):
            Wall time.
    """

    version: int
    steps: int
    dropped_steps: int
    loss: float | None
    positions: int
    new_requests: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Field by field, ready for JSON."""
        return asdict(self)


class Updater:
    """
    Teaches a copy of a draft from traces. The copy is kept in fp32, as steps of AdamW round away in half precision,
    together with its optimizer, so that updates go on where the last one ended.

    Args:
        draft (`PreTrainedModel`):
            Copied, not changed. Of one with adapters the trainable parameters learn, otherwise all.
        config (`OnlineConfig`):
            The rule.
        accelerator (`Accelerator`, *optional*):
            Runs backward and step; by default one that leaves the model on its device.

    Raises:
        UnsupportedModelError: the draft has no parameter that could learn.
    """

    def __init__(self, draft: Any, config: OnlineConfig, accelerator: Accelerator | None = None) -> None:
        self.config = config
        self.version = 0
        self.new: deque[Trace] = deque(maxlen=config.buffer_size)
        self.buffer: deque[Trace] = deque(maxlen=config.buffer_size)
        self.rng = np.random.default_rng(config.seed)
        self.accelerator = accelerator or Accelerator(device_placement=False)
        self._shared = dict(AcceleratorState._shared_state)
        with learning_context():
            # Evaluation mode throughout: dropout would draw from the generator that sampled requests draw from.
            self.master = copy.deepcopy(draft).float().eval()
            self.parameters = trainable_parameters(self.master)
            self.optimizers = [
                self.accelerator.prepare_optimizer(o) for o in _optimizers(self.master, self.parameters, config)
            ]
            self.averaged = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.kept_steps = 0

    def observe(self, trace: Trace) -> None:
        """Take in one request to learn from at the next update; raises StateError if its rows are of another width."""
        if len(trace) and trace.num_kept:
            self.check_traces([trace])
            self.new.append(trace)

    def check_traces(self, traces: Sequence[Trace]) -> None:
        """Refuse traces that do not keep as many entries per row as those already there; raises StateError."""
        known = next(iter(self.new or self.buffer), None)
        widths = {t.top_ids.shape[1] for t in traces if len(t) and t.num_kept}
        widths |= set() if known is None else {known.top_ids.shape[1]}
        if len(widths) > 1:
            raise StateError(
                f"Traces keep {' and '.join(str(w or 'all') for w in sorted(widths))} entries per position; a learner "
                "takes one width. Use the `num_logprobs` that they were captured with."
            )

    def update(self, steps: int | None = None) -> UpdateReport:
        """
        Learn from the requests taken in since the last update, mixed with replayed ones.

        Args:
            steps (`int`, *optional*):
                Optimizer steps, `config.steps_per_update` by default.

        Returns:
            `UpdateReport`

        Raises:
            ConfigError: `steps` below 1.
        """
        if steps is not None and steps < 1:
            raise ConfigError(f"`steps` must be at least 1, got {steps}.")
        started = time.perf_counter()
        losses: list[float] = []
        dropped = positions = 0
        # Requests that end meanwhile, in other threads, are for the next update.
        newest = [self.new.popleft() for _ in range(len(self.new))]
        try:
            with learning_context(), self._state():
                for _ in range(self.config.steps_per_update if steps is None else steps):
                    loss, count = self._step(self._batch(newest))
                    if count == 0:
                        continue
                    if loss is None:
                        dropped += 1
                    else:
                        losses.append(loss)
                        positions += count
        finally:
            # A row that is not finite (an overflow in half precision) would go on spoiling steps.
            self.buffer.extend(t for t in newest if not np.isnan(t.top_logits).any())
        if losses:
            self.version += 1
        if dropped:
            logger.warning(
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
        )

    def copy_to(self, draft: Any) -> None:
        """Cast the learned (averaged) parameters into another copy of the draft, in place; adapters into the weights
        of one that has them merged."""
        with learning_context(), torch.no_grad():
            if is_peft(self.master) and not is_peft(draft):
                adapted = copy.deepcopy(self.master)
                self.copy_to(adapted)
                draft.load_state_dict(adapted.merge_and_unload().state_dict())
                return
            served = dict(draft.named_parameters())
            for name, learned in self.averaged.items():
                served[name].copy_(learned)

    @contextmanager
    def _state(self) -> Iterator[None]:
        """What all accelerators of a process share, put back for a while where `TrainingArguments` made meanwhile have
        emptied it; for a while only, as their trainer would not start on a state of another precision."""
        shared = AcceleratorState._shared_state
        is_empty = not shared
        if is_empty:
            shared.update(self._shared)
        try:
            yield
        finally:
            if is_empty:
                shared.clear()

    def _batch(self, newest: Sequence[Trace]) -> list[Trace]:
        """The newest requests and a uniform sample of the buffer, in the shares of the configuration."""
        size = self.config.batch_size
        fresh = min(len(newest), size - round(size * self.config.replay_fraction))
        replayed = min(len(self.buffer), size - fresh) if self.config.replay_fraction > 0 else 0
        fresh = min(len(newest), size - replayed)
        chosen = [newest[i] for i in self.rng.permutation(len(newest))[:fresh]]
        return chosen + [self.buffer[i] for i in self.rng.choice(len(self.buffer), replayed, replace=False)]

    def _step(self, traces: Sequence[Trace]) -> tuple[float | None, int]:
        """One optimizer step; the loss (`None` if the step was dropped) and the number of positions."""
        total = sum(int(_learned_mask(t, self.config.learn_from).sum()) for t in traces)
        if total == 0:
            return 0.0, 0
        self._zero_grad()
        value = 0.0
        # Memory is bounded by micro-batches; weights make their gradients add up to those of the whole batch.
        for indices in batches(traces, traces[0].vocab_size, len(traces)):
            part = [traces[i] for i in indices]
            loss, count = self._loss(part)
            loss = loss * (count / total)
            self.accelerator.backward(loss)
            value += float(loss.detach())
        norm = self.accelerator.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)
        if not (np.isfinite(value) and bool(torch.isfinite(norm))):
            self._zero_grad()
            return None, total
        for optimizer in self.optimizers:
            optimizer.step()
        self._average()
        return value, total

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _average(self) -> None:
        # The decay ramps up, so that the start is forgotten at once and not over 1 / (1 - decay) steps.
        self.kept_steps += 1
        decay = min(self.config.weight_average, self.kept_steps / (9 + self.kept_steps))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.averaged.values()), list(self.parameters.values()), 1 - decay)

    def _loss(self, traces: Sequence[Trace]) -> tuple[torch.Tensor, int]:
        with self.accelerator.autocast():
            logits = completion_logits(self.master, traces)
        device = logits.device
        learned = torch.from_numpy(np.concatenate([_learned_mask(t, self.config.learn_from) for t in traces])).to(
            device
        )
        rows = logits[completion_mask(traces, device)][learned]

        def stacked(arrays: Sequence[Any], dtype: Any) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(arrays).astype(dtype)).to(device)[learned]

        top_ids = None if traces[0].top_ids.shape[1] == 0 else stacked([t.top_ids for t in traces], np.int64)
        loss = divergence_loss(
            rows,
            top_ids=top_ids,
            top_logprobs=stacked([t.kept_logprobs() for t in traces], np.float32),
            tail_logprob=stacked([t.tail_logprob for t in traces], np.float32),
            divergence=self.config.divergence,
        )
        return loss, int(learned.sum())

    def state_dict(self) -> dict[str, Any]:
        """Learned parameters, optimizer, version and generator state; the buffer is saved apart."""
        return {
            "parameters": {name: p.detach() for name, p in self.parameters.items()},
            "averaged": dict(self.averaged),
            "kept_steps": self.kept_steps,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "version": self.version,
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; raises StateError where it belongs to another draft."""
        saved = {name: tuple(p.shape) for name, p in state["parameters"].items()}
        ours = {name: tuple(p.shape) for name, p in self.parameters.items()}
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
        with learning_context(), torch.no_grad(), self._state():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["parameters"][name])
                self.averaged[name].copy_(state["averaged"][name])
            for optimizer, saved_optimizer in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved_optimizer)
        self.kept_steps = int(state["kept_steps"])
        self.version = int(state["version"])
        self.rng.bit_generator.state = state["rng"]


@contextmanager
def learning_context() -> Iterator[None]:
    """Gradients on, whatever mode the caller is in: answers are often made under `no_grad` or `inference_mode`."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def trainable_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that learn, by name: the adapters of a model that has some, otherwise all; raises
    UnsupportedModelError where there is none."""
    # Adapters, of a `PeftModel` or added by transformers, have frozen the rest, and are saved without it.
    if not is_peft(model) and not getattr(model, "_hf_peft_config_loaded", False):
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise UnsupportedModelError(
            f"The draft ({type(model).__name__}) has no parameter that could learn. Load its adapter with "
            "`is_trainable=True`, or use a draft in full or half precision."
        )
    return found


def _optimizers(
    model: Any, parameters: dict[str, torch.nn.Parameter], config: OnlineConfig
) -> list[torch.optim.Optimizer]:
    """Muon (arXiv 2502.16982) is for matrices that map hidden states; embeddings and vectors go to AdamW."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    if head is not None:
        embeddings.add(id(head.weight))
    matrices = [p for p in parameters.values() if p.ndim == 2 and id(p) not in embeddings]
    if config.optimizer == "adamw" or not matrices:
        return [torch.optim.AdamW(parameters.values(), lr=config.learning_rate, weight_decay=0.0)]
    hidden = {id(p) for p in matrices}
    rest = [p for p in parameters.values() if id(p) not in hidden]
    muon = torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, *([torch.optim.AdamW(rest, lr=config.learning_rate, weight_decay=0.0)] if rest else [])]


def _learned_mask(trace: Trace, learn_from: str) -> Any:
    return trace.correction_mask if learn_from == "corrections" else np.ones(len(trace), dtype=bool)
