"""Distill a target into a draft offline, with TRL's and transformers' training arguments."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import HfApi
from transformers import PreTrainedModel, Trainer, TrainerState, TrainingArguments

from osd_hf.acceptance import AcceptanceStats
from osd_hf.config import OnlineConfig, setting
from osd_hf.distillation.data import SAMPLE_SOURCES, Data, completed, read_data
from osd_hf.errors import ConfigError, StateError
from osd_hf.hub import refuse_public
from osd_hf.learning.loss import SampledTail, divergence_sum, stored_rows, target_rows
from osd_hf.learning.updater import make_optimizers, trainable_parameters
from osd_hf.learning.weights import adapted, ends_of, learning_context, shared_of_head
from osd_hf.loading import load_named
from osd_hf.losses import DIVERGENCES, generalized_jsd
from osd_hf.models import align_vocab, check_pair, common_tokenizer, evaluating, is_peft, merged, uncompiled
from osd_hf.recording import record_traces
from osd_hf.replay import check_head, padded, replay
from osd_hf.trace import Trace

try:
    with warnings.catch_warnings():
        # A contract test pins what is used from there.
        warnings.filterwarnings("ignore", "You are importing from 'trl.experimental'")
        from trl.experimental.gkd import GKDConfig
    from peft import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTunerLayer
    from trl.models.utils import unwrap_model_for_generation
except ImportError as error:
    raise ImportError(
        f"Offline distillation needs trl and peft ({error}). Install them with `pip install 'osd-hf[distill]'`."
    ) from error


# --- settings -------------------------------------------------------------------------------------------------------

# TRL's settings with a meaning here; its others prepare text or load models.
_OF_TRL = {"beta", "disable_dropout", "lmbda", "max_new_tokens", "temperature", "trust_remote_code"}
_UNSUPPORTED = {"deepspeed", "label_smoothing_factor", "use_liger_kernel"}
_OF_ADAMW = ("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_WITHOUT_MEANING = sorted(
    {f.name for f in fields(GKDConfig)} - {f.name for f in fields(TrainingArguments)} - _OF_TRL | _UNSUPPORTED
)


@dataclass
class DistillConfig(GKDConfig):
    """
    Training arguments of [`distill`]: those of `transformers.TrainingArguments` and TRL's `GKDConfig`, without the
    ones that prepare text or load models. The fields below are added or have another default.

    The training tokens come from `sample_source`: `"teacher"`, the target or the completions of the data; `"student"`,
    the draft; or `"mix_request"`, for each request the draft with probability `lmbda`. The loss compares distributions
    at temperature 1. Raises ConfigError for a value outside its range, or without a meaning in distillation.
    """

    sample_source: str = setting("teacher", "source of the training tokens: " + ", ".join(SAMPLE_SOURCES))
    divergence: str = setting("forward_kl", "loss between target and draft: " + ", ".join(DIVERGENCES))
    temperature: float = setting(1.0, "temperature of the samples; 0 = greedy")
    num_assistant_tokens: int = setting(5, "tokens drafted per round (k) for acceptance on held-out requests")
    metric_for_best_model: str | None = setting("alpha", "metric of the best checkpoint: alpha or block_efficiency")
    max_length: int | None = setting(None, "without a meaning in distillation")
    gradient_checkpointing: bool | None = setting(  # type: ignore[assignment]
        None, "deprecated in transformers; use activation_checkpointing"
    )
    dataloader_pin_memory: bool = setting(False, "pin the memory of batches")
    hub_private_repo: bool | None = setting(True, "push to a private repository; a draft may have memorized answers")
    bf16: bool = setting(False, "compute in bf16; the draft's weights stay in fp32")
    lmbda: float = setting(0.5, "share of the draft in mix_request")
    optimizer: str = setting("adamw", "muon = Muon for hidden matrices; or adamw, as the field optim says")
    freeze_embeddings: bool = setting(False, "train neither embeddings nor output head, such as shared ones")
    resume_from_checkpoint: str | None = setting(None, "a checkpoint, or true for the last one in the output folder")

    without_meaning = frozenset(_WITHOUT_MEANING)  # get no flag

    def __post_init__(self) -> None:
        def must(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise ConfigError(f"`{name}` must be {rule}, got {getattr(self, name)!r}.")

        must("sample_source", self.sample_source in SAMPLE_SOURCES, f"one of {', '.join(SAMPLE_SOURCES)}")
        must("divergence", self.divergence in DIVERGENCES, f"one of {', '.join(DIVERGENCES)}")
        for name in ("lmbda", "beta"):
            must(name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        must("temperature", 0 <= self.temperature < float("inf"), "0 or a positive number")
        for name in ("max_new_tokens", "num_assistant_tokens"):
            must(name, getattr(self, name) >= 1, "at least 1")
        must("optimizer", self.optimizer in ("adamw", "muon"), "one of adamw, muon")
        metrics = ("alpha", "block_efficiency")
        is_known = str(self.metric_for_best_model).removeprefix("eval_") in metrics
        must("metric_for_best_model", is_known, f"one of {', '.join(metrics)}")
        is_order = self.train_sampling_strategy in ("random", "sequential")
        must("train_sampling_strategy", is_order, "random or sequential, as prompts have no length yet")
        defaults = {f.name: f.default for f in fields(self)}
        for name in _WITHOUT_MEANING:
            must(name, getattr(self, name) == defaults[name], "left alone: it has no meaning in distillation")
        for name, other, value in (("lmbda", "sample_source", "mix_request"), ("beta", "divergence", "jsd")):
            is_used = getattr(self, other) == value or getattr(self, name) == defaults[name]
            must(name, is_used, f"left alone unless `{other}` is {value}")
        for name in _OF_ADAMW if self.optimizer == "muon" else ():
            must(name, getattr(self, name) == defaults[name], "left alone unless `optimizer` is adamw")
        self.hub_private_repo = self.hub_private_repo is not False
        if self.resume_from_checkpoint in ("true", "false"):  # as a flag says it
            self.resume_from_checkpoint = self.resume_from_checkpoint == "true"  # type: ignore[assignment]
        super().__post_init__()  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        # Trainers save their arguments with the weights, and push them.
        return {**vars(self), "hub_token": None}


@dataclass(frozen=True)
class DistillResult:
    """The result of [`distill`]. The draft is in evaluation mode, with adapters merged. Under FSDP, only the main
    process gets the trained weights."""

    draft: PreTrainedModel
    state: TrainerState
    log_history: list[dict[str, Any]]
    alpha: dict[int, float]  # acceptance on held-out requests by optimizer step; step 0 is before training


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
    Train a copy of a draft on its target's distributions, on a fixed data set.

    Args:
        target (`PreTrainedModel`, *optional*): The target. Recorded requests with stored rows need none.
        draft (`PreTrainedModel` or `PeftModel`):
            The draft to start from. A copy is trained in fp32; of a `PeftModel` only the adapters. [`align_vocab`]
            aligns padded vocabularies.
        dataset (`datasets.Dataset`, iterable of rows or of [`Trace`], or [`CorrectionStore`]):
            Rows with the columns `prompt` and optionally `completion` (text, token ids or messages), or `messages`,
            and optionally `tools` and `chat_template_kwargs`. Unusable rows are skipped and logged. Missing
            completions are sampled as `config.sample_source` says. From recorded requests the stored rows are learned;
            with another source than `"teacher"`, only their prompts are used.
        config (`DistillConfig`): Training arguments. `resume_from_checkpoint=True` takes the last whole checkpoint.
        eval_dataset (same, *optional*): Held-out requests; only the prompts of rows are used.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Tokenizer of both models; by default the one found with the target, or with the draft.
        peft_config (`PeftConfig`, *optional*): Train only adapters, and merge them at the end.
        callbacks (`Sequence[TrainerCallback]`, *optional*): Callbacks of the trainer.

    Raises:
        ConfigError: A target or a tokenizer is missing, or settings do not fit the models.
        StateError: There is no checkpoint to resume from, or recordings have rows of several widths.
        DataError: No row can be used, or a recorded request is too long.
        UnsupportedModelError: The models are no pair, or the draft has nothing to train.
        VocabularyMismatchError: Models, tokenizers or recordings have different vocabularies.
    """
    target, draft = (uncompiled(model) for model in load_named(target, draft))
    args, checkpoint = _own_copy(config), last_checkpoint(config)
    if is_peft(draft) and peft_config is not None:
        raise ConfigError("The draft is a `PeftModel` already. Leave `peft_config` out, or merge its adapter first.")
    adapters = draft.active_peft_config if is_peft(draft) else peft_config
    if adapters is not None and not hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(adapters.peft_type), "merge_and_unload"):
        raise ConfigError(f"A {type(adapters).__name__} cannot be merged into the draft. Use another, such as LoRA.")
    check_pair(target, draft)
    tokenizer = common_tokenizer(tokenizer, target, draft)
    if tokenizer is None and not draft.config.is_encoder_decoder:
        raise ConfigError("No tokenizer was found with the models. Pass `tokenizer=`.")
    draft = draft if target is None else align_vocab(draft, target, tokenizer)
    data = read_data(target, draft, dataset, eval_dataset, tokenizer, args)
    args.eval_on_start |= data.held_out is not None and checkpoint is None
    with learning_context():
        trainer = DistillTrainer(target, draft, data, args, tokenizer, callbacks, peft_config)
        if args.push_to_hub and args.hub_private_repo and trainer.is_world_process_zero():
            refuse_public(HfApi(token=args.hub_token), trainer.hub_model_id)
        with trainer.prepared_target():
            trainer.train(resume_from_checkpoint=checkpoint)
            if data.held_out is not None and args.eval_strategy == "no":
                trainer.evaluate()
        if args.push_to_hub:
            trainer.push_to_hub()
        trained = _trained_draft(trainer, draft)
    history = trainer.state.log_history
    alpha = {int(entry["step"]): float(entry["eval_alpha"]) for entry in history if "eval_alpha" in entry}
    return DistillResult(trained, trainer.state, history, alpha)


def last_checkpoint(config: Any) -> str | None:
    """Return the checkpoint to resume from, if any; raises StateError if `True` finds none. The trainer writes its
    state last, so a checkpoint without it is incomplete."""
    given = config.resume_from_checkpoint
    if given is not True:
        return given or None
    found = [path.parent for path in Path(config.output_dir).glob("checkpoint-*/trainer_state.json")]
    whole = [path for path in found if re.fullmatch(r"checkpoint-\d+", path.name)]  # not a copy by another name
    if not whole:
        raise StateError(f"There is no checkpoint in {config.output_dir} to resume from. Leave it out to start again.")
    return str(max(whole, key=lambda path: int(path.name.removeprefix("checkpoint-"))))


def learner_of(draft: Any, peft_config: Any) -> Any:
    """Return a copy of the draft to train, in fp32 unless adapters are added; raises UnsupportedModelError if no
    parameter can learn."""
    learner = copy.deepcopy(draft).eval()
    if peft_config is None:
        trainable_parameters(learner.float())
    return learner


# --- trainer --------------------------------------------------------------------------------------------------------


class DistillTrainer(Trainer):
    """Transformers' trainer for a copy of the draft. Batches are requests, the loss is the divergence between target
    and draft, and the evaluation measures acceptance on held-out requests."""

    control: Any
    optimizer: Any
    loss_is_scaled_for_ga = True  # `compute_loss` divides by the tokens of the whole accumulated batch

    def __init__(
        self,
        target: Any,
        draft: Any,
        data: Data,
        config: DistillConfig,
        tokenizer: Any,
        callbacks: Sequence[Any] = (),
        peft_config: Any = None,
    ) -> None:
        learner = learner_of(draft, peft_config)
        for _, weight in ends_of(learner) if config.freeze_embeddings else ():
            weight.requires_grad_(False)
        for name in shared_of_head(draft):  # does not learn
            learner.get_parameter(name).requires_grad_(False)
        for head in (learner, data.target):
            if head is not None:
                with evaluating(head):
                    check_head(head)
        super().__init__(
            model=_with_adapters(learner, config, peft_config),
            args=config,
            data_collator=lambda rows: {"rows": rows},
            train_dataset=range(len(data.requests)),
            eval_dataset=data.held_out and range(len(data.held_out)),
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )
        self.model_accepts_loss_kwargs = True  # otherwise the trainer would not count the tokens
        self.data, self.target, self.teacher = data, data.target, target
        self.divergence: Callable[..., torch.Tensor] = DIVERGENCES[config.divergence]
        if config.divergence == "jsd":
            self.divergence = functools.partial(generalized_jsd, beta=config.beta)
        for module in self.model.modules() if config.disable_dropout else ():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            for name, value in list(vars(module).items()):  # probabilities that a model stores as numbers
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)
        _let_run(self.model)

    def create_optimizer(self, model: Any = None) -> Any:
        if self.args.optimizer == "muon" and self.optimizer is None:
            learner = self.accelerator.unwrap_model(self.model if model is None else model)
            parameters = {name: p for name, p in learner.named_parameters() if p.requires_grad}
            config = OnlineConfig(learning_rate=self.args.learning_rate)
            self.optimizer = JoinedOptimizers(make_optimizers(learner, parameters, config))
        return super().create_optimizer(model)

    @contextmanager
    def prepared_target(self) -> Iterator[None]:
        """Prepare the target for the processes and the precision of the run, and undo that after the block."""
        target = self.teacher
        if target is None:
            yield
            return
        names = ("forward", "_original_forward", "_is_accelerate_prepared")  # that accelerate sets
        before = {name: vars(target)[name] for name in names if name in vars(target)}
        with evaluating(target):
            try:
                if self.data.target is not None:
                    self.target = self.accelerator.prepare_model(target, evaluation_mode=True)
                yield
            finally:
                for name in names:
                    vars(target).pop(name, None)
                vars(target).update(before)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        # All micro-batches are sampled here, because their tokens are counted before the first step.
        batches = [self._batch(batch["rows"]) for batch in itertools.islice(epoch_iterator, num_batches)]
        return batches, self._get_num_items_in_batch(batches, device)

    def _batch(self, rows: Sequence[int]) -> dict[str, Any]:
        traces = [self.data.requests[row] for row in rows]
        if self.target is not None:
            traces = self._completed(traces, rows)

        # The trainer only counts the tokens of these tensors; it ignores the first label.
        labels, is_label = padded([np.append(-100, t.completion_ids) for t in traces], "right", "cpu")
        ids, mask = padded([np.append(t.prompt_ids, t.completion_ids) for t in traces], "right", "cpu")
        labels = labels.masked_fill(is_label == 0, -100)
        return {"traces": traces, "labels": labels, "input_ids": ids, "attention_mask": mask}

    def _completed(self, traces: list[Trace], rows: Sequence[int]) -> list[Trace]:
        source = self.args.sample_source
        if source == "teacher" and all(len(t) for t in traces):
            return traces
        with warnings.catch_warnings(), ExitStack() as stack:
            # trl uses the old name.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

            def entered(model: Any) -> Any:
                kwargs = {"gradient_checkpointing_kwargs": self.args.gradient_checkpointing_kwargs}
                return stack.enter_context(unwrap_model_for_generation(model, self.accelerator, **kwargs)).eval()

            draft = None if source == "teacher" else entered(self.model_wrapped)
            target = entered(self.target)
            traces = completed(traces, rows, self.state.global_step, self.args, target=target, draft=draft)
        if source == "teacher" and self.args.temperature == 0:
            for row, trace in zip(rows, traces, strict=True):
                self.data.requests[row] = trace  # the answer is the same in every epoch
        return traces

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        traces = inputs["traces"]
        if self.target is None:
            rows = stored_rows(traces)
        else:
            rows = target_rows(self.accelerator.unwrap_model(self.target), traces)
        learner = self.accelerator.unwrap_model(model)
        tail = None
        if self.target is None:  # the head computes few columns; a resumed run draws the same ones
            tail = SampledTail.for_draft(learner, self.args.seed + self.state.global_step)
        total: torch.Tensor = model(run=lambda: divergence_sum(learner, traces, rows, self.divergence, tail=tail))
        loss: torch.Tensor = total / num_items_in_batch
        # Gradients are averaged over processes, but tokens are counted over all of them.
        return loss * self.accelerator.num_processes if self.args.average_tokens_across_devices else loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        held_out = self.data.held_out or []
        if not all(map(len, held_out)):  # prompts, which are answered once
            prompts = [trace.prompt_ids.tolist() for trace in held_out]
            answers = record_traces(self.teacher, prompts, max_new_tokens=self.args.max_new_tokens, num_logprobs=1)
            held_out = self.data.held_out = list(answers)
        # Every process measures all requests, so nothing has to be gathered.
        learner, k = self.accelerator.unwrap_model(self.model), self.args.num_assistant_tokens
        parts = [[t for t in held_out if t.is_sampled is sampled] for sampled in (True, False)]
        found = dict(zip(("_sampled", "_greedy"), (replay(learner, part, k) for part in parts if part), strict=False))
        found = {"": sum(found.values(), AcceptanceStats()), **(found if len(found) == 2 else {})}
        metrics = dict[str, float]()
        for kind, stats in found.items():
            metrics[f"{metric_key_prefix}_alpha{kind}"] = stats.alpha
            metrics[f"{metric_key_prefix}_block_efficiency{kind}"] = stats.block_efficiency
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class JoinedOptimizers(torch.optim.Optimizer):
    """Several optimizers as the one that a trainer, its schedule and its checkpoints expect."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._join()

    def _join(self) -> None:
        """Let all optimizers use the groups and the state of this one."""
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = list(itertools.islice(groups, len(optimizer.param_groups)))
            optimizer.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._join()


def _own_copy(args: DistillConfig) -> DistillConfig:
    """Return a copy of the training arguments, which trainers modify; raises ConfigError."""
    if not isinstance(args, DistillConfig):
        raise ConfigError(f"`config` must be a `DistillConfig`, got a {type(args).__name__}.")
    if args.n_gpu > 1:
        raise ConfigError(f"{args.n_gpu} GPUs are visible to one process. Launch with `accelerate launch`.")
    if args.deepspeed_plugin is not None:
        raise ConfigError("Distillation does not run under DeepSpeed. Launch it with DDP or FSDP.")
    config = copy.copy(args)
    config.hub_token = args.hub_token
    config.remove_unused_columns = False
    if config.include_num_input_tokens_seen == "no":
        config.include_num_input_tokens_seen = "non_padding"
    return config


def _with_adapters(learner: Any, config: Any, peft_config: Any) -> Any:
    """Return the learner with adapters, if there are any, prepared for gradient checkpointing."""
    if peft_config is not None:
        learner = adapted(learner, peft_config, config.seed)
    if is_peft(learner):
        head = learner.get_output_embeddings()
        if isinstance(head, BaseTunerLayer) and head.weight is learner.get_input_embeddings().weight:
            hint = "Leave the head out of the adapter's `target_modules`."
            raise ConfigError(f"The draft ties its output head to its input embeddings. {hint}")
        if config.gradient_checkpointing:
            learner.enable_input_require_grads()  # https://github.com/huggingface/transformers/issues/42489
    return learner


def _let_run(model: Any) -> None:
    """Let `model(run=f)` return `f()`, as wrappers for several processes only see calls of the forward."""
    inner = model.forward

    @functools.wraps(inner)  # `generate` reads the signature
    def forward(*args: Any, run: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) if run is None else run()

    model.forward = forward


def _trained_draft(trainer: Any, draft: Any) -> Any:
    """Return a copy of the draft with the trained weights; the trained model keeps the trainer's hooks."""
    learner = trainer.accelerator.unwrap_model(trainer.model)
    if is_peft(learner):
        vars(learner).pop("forward", None)
        learned = merged(learner).state_dict()
    else:
        learned = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    trained = copy.deepcopy(merged(draft))
    if learned:  # shards are gathered in the main process only
        trained.load_state_dict(learned)
    return trained.eval()
