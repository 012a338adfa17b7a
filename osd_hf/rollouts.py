"""Rollouts of a trainer that stay fast: a draft for the policy that is being trained, which follows it."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from accelerate.utils import parse_flag_from_env
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_callback import CallbackHandler

from osd_hf.assistant import OnlineAssistant
from osd_hf.config import OnlineConfig
from osd_hf.decoding.hook import taken_over
from osd_hf.errors import LearnerError, OSDError
from osd_hf.models import is_peft, unwrap
from osd_hf.target_version import look_closely

__all__ = ["RolloutAssistant"]

logger = logging.getLogger(__name__)

# Rollouts of four earlier policies are learned from, too. Where learning does not pay it rests but for a look at every
# other thousand of rollouts: these come in batches, where a draft saves less, and the training waits for the learner.
TARGET_LAG = 4
MIN_EFFORT = 1 / 256


class RolloutAssistant(TrainerCallback):
    """
    Drafts what a trainer lets its policy generate, and learns from it: the rollouts of TRL's `GRPOTrainer` and
    `RLOOTrainer`, completions that are logged during any training. They are the policy's own, greedy ones token by
    token (in fp32), sampled ones in distribution; so are rewards and gradients. The policy itself stays as it is.

    The trainer's logs have `rollout/seconds` (generating, since the log before), `rollout/learning_seconds` (what
    learning has cost beside), `rollout/tokens`, `rollout/tokens_per_forward` (of the policy, by row), `rollout/alpha`
    (acceptance of the draft's tokens), `rollout/speedup` (over the policy alone, as rounds were timed) and
    `rollout/draft_version`.

    ```python
    trainer = GRPOTrainer(model, rewards, train_dataset=prompts, callbacks=[RolloutAssistant("my-draft")])
    ```

    Args:
        draft (`PreTrainedModel` or `str` or `Path`):
            A smaller model with the policy's tokenizer, as for [`OnlineAssistant`]. After a training it is the draft
            that has learned, an ordinary model.
        config (`OnlineConfig`, *optional*):
            How to draft and learn. Rollouts of the four policies before the newest one are learned from, too, and
            learning all but stops where it does not pay.
            `update_strategy="idle"` with a `learner_device` that is idle learns beside the training.
        assistant_kwargs (`Any`): More arguments of [`OnlineAssistant`], such as `store` or `peft_config`.

    Raises:
        OSDError: where a training begins, what [`OnlineAssistant`] raises for a pair that does not fit.
    """

    def __init__(self, draft: Any, config: OnlineConfig | None = None, **assistant_kwargs: Any) -> None:
        self.draft = draft
        self.config = config or OnlineConfig()
        self.assistant: OnlineAssistant | None = None  # of the training under way, or of the last one
        self._kwargs = assistant_kwargs
        self._block = contextlib.ExitStack()
        self._told: set[str] = set()
        self._calls, self._seconds, self._learned = 0, 0.0, 0.0  # since the last log
        self._is_open = self._drafts = self._has_stepped = False
        weakref.finalize(self, self._block.close)

    # --- the trainer's events ---------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **kwargs: Any
    ) -> None:
        """Take over what the policy generates from now on."""
        self._end()  # of a training that broke off
        if why := _hindrance(args, model):
            logger.warning("Rollouts are not drafted: %s.", why)
            return
        self._go_first()
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self.assistant = OnlineAssistant(unwrap(model), self.draft, tokenizer, self.config, **self._kwargs)
        self.assistant.drafts.set_pace(min_effort=MIN_EFFORT, target_lag=TARGET_LAG)
        self._block.enter_context(taken_over(model, self._answer))
        self._is_open = self._drafts = True
        self._calls, self._seconds, self._learned = 0, 0.0, 0.0
        self._told.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The policy is another one, of which fused optimizers leave no count."""
        self._has_stepped = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the figures since the last log."""
        if self.assistant is None or logs is None or not self._calls:
            return
        stats, learned = self.assistant.stats, self.assistant.learning_seconds
        figures = {
            "seconds": self._seconds,
            "learning_seconds": learned - self._learned,
            "tokens": stats.emitted,
            "tokens_per_forward": stats.block_efficiency if stats.target_forwards else None,
            "alpha": stats.alpha if stats.examined else None,
            "speedup": stats.speedup,
            "draft_version": self.assistant.version,
        }
        told = {f"rollout/{name}": float(value) for name, value in figures.items() if value is not None}
        logs.update(told)
        if state.log_history:  # has the log already
            state.log_history[-1].update(told)
        self.assistant.reset_stats()
        self._calls, self._seconds, self._learned = 0, 0.0, learned

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the policy as it was."""
        self._end()

    def _end(self) -> None:
        self._block.close()
        if self.assistant is not None and self._is_open:
            try:
                self.assistant.close()
            except LearnerError as error:
                logger.warning("%s", str(error))
            self.draft = self.assistant.draft
        self._is_open = self._drafts = False

    def _go_first(self) -> None:
        """Trackers are told of a log before the callbacks of users are, and no event says whose it is."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not CallbackHandler.call_event.__code__:
            frame = frame.f_back
        callbacks = [] if frame is None else frame.f_locals["self"].callbacks
        if self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def _answer(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `plain` returns for these arguments, sooner."""
        assert self.assistant is not None
        began, learned = time.perf_counter(), self.assistant.learning_seconds
        self._calls += 1
        try:
            if self._has_stepped:
                self._has_stepped = False
                look_closely(self.assistant.target)
            if self._drafts and len(args) < 2:
                try:
                    return self.assistant.generate(*args, **kwargs)
                except OSDError as error:  # refused, before any work
                    if (why := str(error)) not in self._told:
                        self._told.add(why)
                        logger.warning("The policy generates without a draft: %s", why)
                except Exception:
                    # Drawn anew, one rollout may lack what the draft failed on: the last one that this can happen to.
                    self._drafts = False
                    logger.warning("A rollout failed with the draft; the policy goes on without it.", exc_info=True)
            return plain(*args, **kwargs)
        finally:
            learning = self.assistant.learning_seconds - learned
            self._seconds += time.perf_counter() - began - learning


def _hindrance(args: Any, model: Any) -> str | None:
    """Why nothing can be drafted in a training; `None` where it can."""
    is_spread = any(hasattr(p, "device_mesh") for p in model.parameters())
    # Who launches a training may ask for FSDP where its arguments do not.
    has_fsdp = getattr(args, "fsdp", None) or parse_flag_from_env("ACCELERATE_USE_FSDP")
    if is_spread or has_fsdp or is_deepspeed_zero3_enabled():
        return "the policy's weights are spread over several machines"
    if getattr(args, "use_vllm", False):
        return "vLLM generates them, which takes a draft of its own"
    if getattr(args, "use_transformers_continuous_batching", False):
        return "continuous batching takes no draft"
    if is_peft(model) and model.active_peft_config.is_prompt_learning:
        return "the policy is a tuned prompt, which no draft can read"
    return None
