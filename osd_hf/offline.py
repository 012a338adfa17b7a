"""Offline distillation: `distill`, on TRL's trainer for decoder-only pairs, on transformers' for encoder-decoders."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from huggingface_hub import HfApi
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

from osd_hf.errors import ConfigError
from osd_hf.guards import common_tokenizer
from osd_hf.losses import DIVERGENCES, generalized_jsd
from osd_hf.offline_data import Data, collate, numbered, read_data
from osd_hf.offline_loss import check_head, divergence_sum, stored_rows, target_rows
from osd_hf.offline_models import (
    NoTarget,
    as_it_was,
    check_adapters,
    check_types,
    last_checkpoint,
    learner_of,
    let_run,
    trained_draft,
    without_dropout,
)
from osd_hf.offline_sampling import SAMPLE_SOURCES, Sampler
from osd_hf.records import Trace
from osd_hf.snapshots import learning_context
from osd_hf.visibility import TokenStaysHere, refuse_public
from osd_hf.wrappers import uncompiled

try:
    with warnings.catch_warnings():
        # What is used from there is pinned by a contract test.
        warnings.filterwarnings("ignore", "You are importing from 'trl.experimental'")
        from trl.experimental.gkd import GKDConfig, GKDTrainer
    from peft import get_peft_model
    from trl.models.utils import unwrap_model_for_generation
except ImportError as error:
    raise ImportError(
        f"Offline distillation needs trl and peft ({error}). Install them with `pip install 'osd-hf[distill]'`."
    ) from error

__all__ = ["DistillConfig", "DistillResult", "distill"]

# Settings that TRL's trainers take and that would do nothing here.
_WITHOUT_MEANING = (
    "assistant_only_loss", "chat_template_path", "completion_only_loss", "dataset_kwargs", "dataset_num_proc",
    "dataset_text_field", "eos_token", "eval_packing", "label_smoothing_factor", "loss_type", "max_length",
    "model_init_kwargs", "packing", "packing_strategy", "pad_to_multiple_of", "pad_token", "padding_free", "seq_kd",
    "router_aux_loss_coef", "shuffle_dataset", "teacher_model_init_kwargs", "teacher_model_name_or_path",
    "truncation_mode",
)  # fmt: skip


@dataclass
class DistillConfig(TokenStaysHere, GKDConfig):
    """
    Training arguments of [`distill`]: those of `transformers.TrainingArguments`, which work as users know them, and of
    TRL's `GKDConfig`, of which those about how TRL prepares text are refused; with these besides, or with another
    default.

    Args:
        sample_source (`str`, *optional*, defaults to `"teacher"`):
            Whose tokens are learned on: `"teacher"`, the target's (of rows with completions, those); `"student"`, the
            draft's own; `"mix_request"`, per request the draft's with probability `lmbda`; `"mix_token"`, per token.
        divergence (`str`, *optional*, defaults to `"forward_kl"`):
            What is lowered between the target's and the draft's distribution; a key of `osd_hf.losses`.
        lmbda (`float`, *optional*, defaults to 0.5):
            Of the mixes: the draft's share.
        beta (`float`, *optional*, defaults to 0.5):
            Of the divergence `"jsd"`: weight of the target.
        temperature (`float`, *optional*, defaults to 1.0):
            Of the samples; 0 takes the likeliest token. The loss compares distributions at 1.
        max_new_tokens (`int`, *optional*, defaults to 128):
            Bound of a sample, and of the answers to held-out prompts.
        num_assistant_tokens (`int`, *optional*, defaults to 5):
            k at which acceptance on held-out requests is measured, whenever `eval_strategy` says.
        eval_temperature (`float`, *optional*, defaults to 0.0):
            Of the target's answers to held-out prompts; 0 is greedy, measured by replay.
        early_stopping_patience (`int`, *optional*):
            Stop after so many evaluations without a new best `metric_for_best_model`; needs an `eval_strategy`.
        metric_for_best_model (`str`, *optional*, defaults to `"alpha"`):
            For `load_best_model_at_end`, `save_strategy="best"` and early stopping; `"block_efficiency"` as well.
        bf16 (`bool`, *optional*, defaults to `False`):
            Compute in bf16; off unless asked for, and so is `gradient_checkpointing`.
        hub_private_repo (`bool`, *optional*, defaults to `True`):
            With `push_to_hub`, a new repo is private, and one that is there and open to everybody is refused, unless
            this is `False`.

    Raises:
        ConfigError: a value of another type or outside its range, or a setting of TRL's that has no meaning here.
    """

    sample_source: str = field(
        default="teacher", metadata={"help": "Whose tokens are learned on: " + ", ".join(SAMPLE_SOURCES) + "."}
    )
    divergence: str = field(
        default="forward_kl", metadata={"help": "Loss between target and draft: " + ", ".join(DIVERGENCES) + "."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Of the samples; 0 takes the likeliest token."})
    num_assistant_tokens: int = field(
        default=5, metadata={"help": "Tokens drafted per round where acceptance is measured."}
    )
    eval_temperature: float = field(
        default=0.0, metadata={"help": "Of the target's answers to held-out prompts; 0 is greedy."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after so many evaluations without a new best."}
    )
    metric_for_best_model: str | None = field(
        default="alpha", metadata={"help": "What the best checkpoint is best at: alpha or block_efficiency."}
    )
    max_length: int | None = field(default=None, metadata={"help": "Without meaning here."})
    gradient_checkpointing: bool | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Deprecated in transformers; use activation_checkpointing."}
    )
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "Of no use: batches hold numbers of rows."})
    hub_private_repo: bool | None = field(
        default=True, metadata={"help": "Push to a private repo; a draft may have learned answers by heart."}
    )
    bf16: bool = field(default=False, metadata={"help": "Compute in bf16; the draft's weights are kept in fp32."})

    def __post_init__(self) -> None:
        def must(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise ConfigError(f"`{name}` must be {rule}, got {getattr(self, name)!r}.")

        check_types(self)
        must("sample_source", self.sample_source in SAMPLE_SOURCES, f"one of {', '.join(SAMPLE_SOURCES)}")
        must("divergence", self.divergence in DIVERGENCES, f"one of {', '.join(DIVERGENCES)}")
        for name in ("lmbda", "beta"):
            must(name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name in ("temperature", "eval_temperature"):
            must(name, 0 <= getattr(self, name) < float("inf"), "0 or a positive number")
        for name in ("max_new_tokens", "num_assistant_tokens", "early_stopping_patience"):
            must(name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        metrics = ("alpha", "block_efficiency")
        is_known = str(self.metric_for_best_model).removeprefix("eval_") in metrics
        must("metric_for_best_model", is_known, f"one of {', '.join(metrics)}")
        can_stop = self.early_stopping_patience is None or self.eval_strategy != "no"
        must("early_stopping_patience", can_stop, "left out where no `eval_strategy` is set, as it counts evaluations")
        is_order = self.train_sampling_strategy in ("random", "sequential")
        must("train_sampling_strategy", is_order, "random or sequential, as prompts have no length yet")
        defaults = {f.name: f.default for f in fields(self)}
        for name in _WITHOUT_MEANING:
            must(name, getattr(self, name) == defaults[name], "left alone: it has no meaning in distillation")
        self.hub_private_repo = self.hub_private_repo is not False
        super().__post_init__()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class DistillResult:
    """
    What a run leaves.

    Args:
        draft (`PreTrainedModel`):
            The trained draft in evaluation mode and in the dtype of the one given, adapters merged. Under FSDP or
            ZeRO-3, only the main process gets what was learned; the others get the draft as it was given.
        state (`TrainerState`):
            The trainer's, with the best metric and checkpoint.
        log_history (`list[dict[str, Any]]`):
            What was logged, in order.
        alpha (`dict[int, float]`):
            Acceptance on the held-out requests by optimizer step; 0 is before the first. It is that of the learner, in
            the precision of the run, from which the draft's own dtype may differ a little.
    """

    draft: Any
    state: Any
    log_history: list[dict[str, Any]]
    alpha: dict[int, float]


def distill(
    *,
    target: Any,
    draft: Any,
    dataset: Any,
    config: DistillConfig,
    eval_dataset: Any = None,
    tokenizer: Any = None,
    peft_config: Any = None,
    callbacks: Sequence[Any] = (),
) -> DistillResult:
    """
    Teach a copy of a draft its target's distributions, on a fixed data set.

    Args:
        target (`PreTrainedModel`, *optional*):
            Whose distributions are learned. `None` where `dataset` brings them along and nothing is sampled.
        draft (`PreTrainedModel` or `PeftModel`):
            Where learning starts; not changed. The copy learns in fp32; of a `PeftModel`, and with `peft_config`, the
            adapters do.
        dataset (`datasets.Dataset`, iterable of rows or of [`Trace`], or [`CorrectionStore`]):
            Rows with the columns `prompt` and perhaps `completion` (text, token ids or messages), or `messages`; what
            is missing is sampled as `config.sample_source` says. Of recorded requests the stored rows are learned
            from; with another source than `"teacher"`, they give prompts.
        config (`DistillConfig`):
            Training arguments. With `resume_from_checkpoint` the run goes on from there; `True` is the last checkpoint
            in `output_dir` that was written whole.
        eval_dataset (same, *optional*):
            Held-out requests. Of rows only the prompts are used.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Of both models; by default the one found where the target came from, else the draft's.
        peft_config (`PeftConfig`, *optional*):
            Train adapters only, of a kind that can be merged, and merge them at the end.
        callbacks (`Sequence[TrainerCallback]`, *optional*):
            Of transformers.

    Returns:
        `DistillResult`

    Raises:
        ConfigError: something needs a target or a tokenizer that is not there; several GPUs in one process; adapters
            that cannot be merged; a target that would have to answer under logits processors.
        StateError: there is no checkpoint to resume from; recordings that keep rows of several widths.
        DataError: no rows, a missing column, an empty prompt or completion, a prompt longer than the models,
            recordings of another kind of model.
        UnsupportedModelError: models that are no pair, or whose logits cannot be computed in parts; a draft that has
            nothing to train.
        VocabularyMismatchError: models, tokenizers or recordings with different vocabularies.
    """
    target, draft = uncompiled(target), uncompiled(draft)
    check_adapters(draft, peft_config)
    tokenizer = common_tokenizer(tokenizer, target, draft)
    if tokenizer is None and not draft.config.is_encoder_decoder:
        raise ConfigError("No tokenizer was found where the models came from. Pass `tokenizer=`.")
    if config.n_gpu > 1:
        raise ConfigError(
            f"{config.n_gpu} GPUs are visible to one process. Launch with `accelerate launch`, or set "
            "`CUDA_VISIBLE_DEVICES` to one of them."
        )
    token, config = config.hub_token, copy.copy(config)  # the trainers write into it
    config.hub_token = token
    data = read_data(target, draft, dataset, eval_dataset, tokenizer, config)
    callbacks = list(callbacks)
    if config.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(config.early_stopping_patience))
    checkpoint = last_checkpoint(config)
    config.eval_on_start |= data.held_out is not None and checkpoint is None
    with learning_context(), as_it_was(target):
        learner = learner_of(draft, peft_config)
        for model in (learner, data.target):
            if model is not None:
                check_head(model)
        kind = _Seq2SeqDistiller if draft.config.is_encoder_decoder else _CausalDistiller
        trainer = kind(learner, data, config, tokenizer, peft_config, callbacks)
        if config.push_to_hub and config.hub_private_repo and trainer.is_world_process_zero():
            refuse_public(HfApi(token=config.hub_token), trainer.hub_model_id)
        trainer.train(resume_from_checkpoint=checkpoint)
        if data.held_out is not None and config.eval_strategy == "no":
            trainer.evaluate()
        if config.push_to_hub:
            trainer.push_to_hub()
        trained = trained_draft(trainer, draft)
    history = trainer.state.log_history
    alpha = {int(entry["step"]): float(entry["eval_alpha"]) for entry in history if "eval_alpha" in entry}
    return DistillResult(trained, trainer.state, history, alpha)


# --- trainers -------------------------------------------------------------------------------------------------------


class _Distiller:
    """Mixed in front of a trainer: what a batch consists of, its loss, and what the draft is judged by."""

    # Every trainer of transformers reads this: the loss is normalized by the tokens of the whole accumulated batch.
    loss_is_scaled_for_ga = True

    model: Any
    model_wrapped: Any
    accelerator: Any
    args: Any
    state: Any
    control: Any

    def _begin(self, data: Data, target: Any, config: DistillConfig) -> None:
        self.data, self.target = data, target
        self.model_accepts_loss_kwargs = True  # or the trainer would not count the tokens
        self.sampler = Sampler(
            config.sample_source, config.lmbda, config.temperature, config.max_new_tokens, config.seed
        )
        self.divergence: Callable[..., torch.Tensor] = DIVERGENCES[config.divergence]
        if config.divergence == "jsd":
            self.divergence = functools.partial(generalized_jsd, beta=config.beta)
        if config.disable_dropout:
            without_dropout(self.model)
        let_run(self.model)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        # Here and not later, as the tokens of all micro-batches are counted before the first is learned from.
        batches = [self._batch(batch["rows"]) for batch in itertools.islice(epoch_iterator, num_batches)]
        return batches, self._get_num_items_in_batch(batches, device)  # type: ignore[attr-defined]

    def _batch(self, rows: Sequence[int]) -> dict[str, Any]:
        traces = [self.data.requests[row] for row in rows]
        if self.target is not None:
            traces = self._completed(traces, rows)

        def padded(parts: Iterable[Any], value: int) -> torch.Tensor:
            tensors = [torch.from_numpy(np.asarray(part, dtype=np.int64)) for part in parts]
            return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

        # The trainer only counts the tokens of these; it takes the first label for one that nothing predicts.
        return {
            "traces": traces,
            "labels": padded((np.append(-100, t.completion_ids) for t in traces), -100),
            "input_ids": padded((np.append(t.prompt_ids, t.completion_ids) for t in traces), 0),
            "attention_mask": padded((np.ones(len(t.prompt_ids) + len(t)) for t in traces), 0),
        }

    def _completed(self, traces: list[Trace], rows: Sequence[int]) -> list[Trace]:
        source = self.sampler.source
        if source == "teacher" and all(len(t) for t in traces):
            return traces
        with warnings.catch_warnings(), ExitStack() as stack:
            # trl asks by the old name.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

            def entered(model: Any) -> Any:
                kwargs = {"gradient_checkpointing_kwargs": self.args.gradient_checkpointing_kwargs}
                return stack.enter_context(unwrap_model_for_generation(model, self.accelerator, **kwargs)).eval()

            draft = None if source == "teacher" else entered(self.model_wrapped)
            target = entered(self.target)
            completed = self.sampler.complete(traces, rows, self.state.global_step, target=target, draft=draft)
        if source == "teacher" and self.sampler.temperature == 0:
            for row, trace in zip(rows, completed, strict=True):
                self.data.requests[row] = trace  # the target would answer the same in every epoch
        return completed

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        traces = inputs["traces"]
        if self.target is None:
            rows = stored_rows(traces)
        else:
            rows = target_rows(self.accelerator.unwrap_model(self.target), traces)
        learner = self.accelerator.unwrap_model(model)
        total: torch.Tensor = model(run=lambda: divergence_sum(learner, traces, rows, self.divergence))
        loss: torch.Tensor = total / num_items_in_batch
        # Gradients are averaged over processes, tokens were counted over all of them.
        return loss * self.accelerator.num_processes if self.args.average_tokens_across_devices else loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        assert self.data.held_out is not None
        # Every process measures all of it: nothing is left to agree upon.
        stats = self.data.held_out.stats(self.accelerator.unwrap_model(self.model))
        metrics = {
            f"{metric_key_prefix}_alpha": stats.alpha,
            f"{metric_key_prefix}_block_efficiency": stats.block_efficiency,
        }
        self.log(dict(metrics))  # type: ignore[attr-defined]
        self.control = self.callback_handler.on_evaluate(  # type: ignore[attr-defined]
            self.args, self.state, self.control, metrics
        )
        return metrics


class _CausalDistiller(_Distiller, GKDTrainer):  # type: ignore[misc]
    def __init__(
        self, learner: Any, data: Data, config: DistillConfig, tokenizer: Any, peft_config: Any, callbacks: list[Any]
    ) -> None:
        super().__init__(
            model=learner,
            teacher_model=data.target or NoTarget(learner.config),
            args=config,
            data_collator=collate,
            train_dataset=numbered(len(data.requests)),
            eval_dataset=data.held_out and numbered(len(data.held_out.requests)),
            processing_class=tokenizer,
            peft_config=peft_config,
            callbacks=callbacks,
        )
        self._begin(data, data.target and self.teacher_model, config)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Past GKD's own, which would replace the completions by samples of its own.
        step: torch.Tensor = super(GKDTrainer, self).training_step(*args, **kwargs)  # type: ignore[no-untyped-call]
        return step


class _Seq2SeqArguments(TokenStaysHere, Seq2SeqTrainingArguments):
    pass


class _Seq2SeqDistiller(_Distiller, Seq2SeqTrainer):
    def __init__(
        self, learner: Any, data: Data, config: DistillConfig, tokenizer: Any, peft_config: Any, callbacks: list[Any]
    ) -> None:
        shared = {f.name for f in fields(config)} & {f.name for f in fields(Seq2SeqTrainingArguments) if f.init}
        args = _Seq2SeqArguments(**{name: getattr(config, name) for name in shared})
        args.remove_unused_columns = False
        set_seed(config.seed)  # of the adapter's weights
        super().__init__(
            model=learner if peft_config is None else get_peft_model(learner, peft_config),
            args=args,
            data_collator=collate,
            train_dataset=numbered(len(data.requests)),
            eval_dataset=data.held_out and numbered(len(data.held_out.requests)),
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        self._begin(data, data.target and self.accelerator.prepare_model(data.target, evaluation_mode=True), config)
