"""Speed up the rollouts of a trainer with a draft that follows the policy."""

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
from osd_hf.decoding.checks import log_once
from osd_hf.decoding.hook import taken_over
from osd_hf.errors import LearnerError, OSDError
from osd_hf.models import is_peft, unwrap
from osd_hf.target_version import look_closely

logger = logging.getLogger(__name__)

# The policy changes every step, so earlier ones are learned from as well. Rollouts come in batches, where a draft
# saves less, and the training waits for the learner: if learning does not pay, it almost stops.
TARGET_LAG = 4
MIN_EFFORT = 1 / 256


class RolloutAssistant(TrainerCallback):
    """
    Speed up what a trainer lets its policy generate, and learn from it: the rollouts of TRL's `GRPOTrainer` and
    `RLOOTrainer`, or completions that are logged during any training.

    Rollouts are the policy's own, greedy ones token by token (in fp32), sampled ones in distribution. Rewards,
    gradients and the policy are not affected.

    The trainer's logs get `rollout/seconds` (generation since the last log), `rollout/learning_seconds`,
    `rollout/tokens`, `rollout/tokens_per_forward` (of the policy, by row), `rollout/alpha`, `rollout/speedup` (over
    the policy alone) and `rollout/draft_version`.

    ```python
    trainer = GRPOTrainer(model, rewards, train_dataset=prompts, callbacks=[RolloutAssistant("my-draft")])
    ```

    Args:
        draft (`PreTrainedModel` or `str` or `Path`):
            A smaller model with the policy's tokenizer, as for [`OnlineAssistant`]. After a training, the attribute
            `draft` is the draft that has learned.
        config (`OnlineConfig`, *optional*):
            How to draft and learn. Rollouts of the four policies before the newest one are learned from as well, and
            learning almost stops when it does not pay. `update_strategy="idle"` with a `learner_device` that is idle
            learns in parallel to the training.
        assistant_kwargs (`Any`): More arguments of [`OnlineAssistant`], such as `store` or `peft_config`.

    Raises:
        OSDError: When a training begins, if the pair does not fit.
    """

    def __init__(self, draft: Any, config: OnlineConfig | None = None, **assistant_kwargs: Any) -> None:
        self.draft = draft
        self.config = config or OnlineConfig()
        self.assistant: OnlineAssistant | None = None  # of the current or the last training
        self._kwargs = assistant_kwargs
        self._block = contextlib.ExitStack()
        self._calls = 0  # since the last log
        self._seconds = 0.0  # of generation, since the last log
        self._learned = 0.0  # seconds of learning at the last log
        self._is_open = self._drafts = self._has_generated = False
        self._has_stepped = False
        weakref.finalize(self, self._block.close)

    # --- the trainer's events ---------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **kwargs: Any
    ) -> None:
        """Take over the policy's `generate`."""
        self._end()  # a training that was interrupted
        if why := _hindrance(args, model):
            logger.warning("Rollouts are not drafted: %s.", why)
            return
        self._go_first()
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self.assistant = OnlineAssistant(unwrap(model), self.draft, tokenizer, self.config, **self._kwargs)
        self.assistant.drafts.set_pace(min_effort=MIN_EFFORT, target_lag=TARGET_LAG)
        self._block.enter_context(taken_over(model, self._answer))
        self._is_open, self._drafts, self._has_generated = True, True, False
        self._calls, self._seconds, self._learned = 0, 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the policy changed; fused optimizers leave no count."""
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
        logged = {f"rollout/{name}": float(value) for name, value in figures.items() if value is not None}
        logs.update(logged)
        if state.log_history:  # has the log already
            state.log_history[-1].update(logged)
        self.assistant.reset_stats()
        self._calls, self._seconds, self._learned = 0, 0.0, learned

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the policy's `generate`."""
        self._end()

    def _end(self) -> None:
        self._block.close()
        if self.assistant is not None and self._is_open:
            if not self._has_generated:
                logger.warning("The policy generated nothing in this training, so nothing was drafted or learned.")
            try:
                self.assistant.close()
            except LearnerError as error:
                logger.warning("%s", str(error))
            self.draft = self.assistant.draft
        self._is_open = self._drafts = False

    def _go_first(self) -> None:
        """Move this callback before those that report logs to trackers."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not CallbackHandler.call_event.__code__:
            frame = frame.f_back
        callbacks = [] if frame is None else frame.f_locals["self"].callbacks
        if self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def _answer(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `plain` returns for these arguments, faster."""
        assert self.assistant is not None
        began, learned = time.perf_counter(), self.assistant.learning_seconds
        self._calls += 1
        self._has_generated = True
        if len(args) > 1:
            log_once(self.assistant.target, "A call with a positional configuration is not drafted. Pass it by name.")
        try:
            if self._has_stepped:
                self._has_stepped = False
                look_closely(self.assistant.target)
            if self._drafts and len(args) < 2:
                try:
                    return self.assistant.generate(*args, **kwargs)
                except OSDError as error:  # refused before any work
                    log_once(self.assistant.target, f"The policy generates without a draft: {error}")
                except Exception:
                    # The policy samples this rollout again. To keep its distribution, no later one may fail.
                    self._drafts = False
                    logger.warning("A rollout failed with the draft; the policy continues without it.", exc_info=True)
            return plain(*args, **kwargs)
        finally:
            learning = self.assistant.learning_seconds - learned
            self._seconds += time.perf_counter() - began - learning


def _hindrance(args: Any, model: Any) -> str | None:
    """Return why rollouts of a training cannot be drafted, or `None`."""
    is_spread = any(hasattr(p, "device_mesh") for p in model.parameters())
    # `accelerate launch` may set FSDP outside of the arguments.
    has_fsdp = getattr(args, "fsdp", None) or parse_flag_from_env("ACCELERATE_USE_FSDP")
    if is_spread or has_fsdp or is_deepspeed_zero3_enabled():
        return "the policy's weights are sharded"
    if getattr(args, "use_vllm", False):
        return "vLLM generates them and needs its own draft"
    if getattr(args, "use_transformers_continuous_batching", False):
        return "continuous batching takes no draft"
    if is_peft(model) and model.active_peft_config.is_prompt_learning:
        return "the policy is a soft prompt, which a draft cannot read"
    return None
