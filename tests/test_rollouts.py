"""Rollouts that are drafted: the policy's own, its weights as without, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from datasets import Dataset
from models import same
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from test_lossless import transitions_fit
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import GenerationConfig, GenerationMixin, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, LogCompletionsCallback, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

from osd_hf import CorrectionStore, OnlineConfig, RolloutAssistant
from osd_hf.errors import VocabularyMismatchError
from osd_hf.learning.updater import Updater
from osd_hf.target_version import fingerprint

# Deprecated names, which peft reads, and which all versions know.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

CONFIG = OnlineConfig(
    num_assistant_tokens=3, update_strategy="interval", update_interval=4, steps_per_update=1, batch_size=4,
    optimizer="adamw", learning_rate=3e-3, num_logprobs=8,
)  # fmt: skip
PROMPTS = ["abc", "defgh", "ij", "klmn", "opqrst", "uv"]
GREEDY = {"do_sample": False}
Seen = list[list[int]]


def settings(cls: Any, folder: Path, **changes: Any) -> Any:
    usual: dict[str, Any] = {
        "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "use_cpu": True,
        "bf16": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return cls(str(folder), **{**usual, **changes})


def pair() -> tuple[Any, Any]:
    policy, draft = models.pair(num_hidden_layers=1, noise=0.1)
    policy.generation_config.eos_token_id = 2
    return policy, draft


# Not the policy as it was: so that greedy rollouts, all of a group alike, teach it something.
ADAPTER = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def rollouts(
    folder: Path, callbacks: list[Any], seen: Seen, cls: Any = GRPOTrainer, adapter: Any = ADAPTER, **changes: Any
) -> Any:
    """A trainer that has trained three steps; `seen` gets its completions."""

    def reward(completion_ids: Seen, **kwargs: Any) -> list[float]:
        seen.extend(completion_ids)
        return [float(len(set(ids))) for ids in completion_ids]

    config = GRPOConfig if cls is GRPOTrainer else RLOOConfig
    changes.setdefault("beta", 0.1 if adapter else 0.0)
    args = settings(config, folder, num_generations=2, max_completion_length=8, **changes)
    trainer = cls(
        pair()[0], reward_funcs=reward, args=args, train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=models.tokenizer(), callbacks=callbacks, peft_config=copy.deepcopy(adapter),
    )  # fmt: skip
    trainer.train()
    return trainer


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def methods() -> list[Any]:
    return [vars(GenerationMixin)[name] for name in ("generate", "_assisted_decoding")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, dict[str, torch.Tensor]]:
    """The completions of a training with greedy rollouts, and its weights in the end."""
    seen: Seen = []
    trainer = rollouts(tmp_path_factory.mktemp("alone"), [], seen, gradient_checkpointing=True,
                       generation_kwargs=GREEDY)  # fmt: skip
    return seen, trained(trainer)


class Tracker(TrainerCallback):  # type: ignore[misc]
    """Keeps what a tracker would be told, as it is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.told.append(dict(logs))


def test_greedy_rollouts_train_the_same_policy(alone: Any, tmp_path: Path) -> None:
    seen: Seen = []
    before, tracker = methods(), Tracker()
    rollout = RolloutAssistant(pair()[1], replace(CONFIG, gate=False))
    trainer = rollouts(tmp_path, [tracker, rollout], seen, gradient_checkpointing=True, generation_kwargs=GREEDY)
    assert seen == alone[0]
    assert same(trained(trainer), alone[1])
    # Learned from, and told, also to callbacks that are asked before those of users.
    assert rollout.assistant is not None
    told = [logs for logs in tracker.told if "rollout/seconds" in logs]
    assert len(told) == 3
    assert sum(logs["rollout/tokens"] for logs in told) == sum(map(len, seen))
    assert all(logs["rollout/tokens_per_forward"] > 1 and 0 < logs["rollout/alpha"] <= 1 for logs in told)
    assert sum(logs["rollout/learning_seconds"] for logs in told) == pytest.approx(rollout.assistant.learning_seconds)
    kept = [entry["rollout/tokens"] for entry in trainer.state.log_history if "reward" in entry]
    assert kept == [logs["rollout/tokens"] for logs in told]
    assert any(decision.outcome == "promoted" for decision in rollout.assistant.decisions)
    # The policy is as it was: others decide how it generates.
    assert methods() == before
    assert "generate" not in vars(trainer.model.get_base_model())
    count = rollout.assistant.stats.num_requests
    trainer.model.generate(models.prompt(), max_new_tokens=2, pad_token_id=0)
    assert rollout.assistant.stats.num_requests == count
    # And what has learned is an ordinary model, with which the next training begins.
    assert not same(dict(rollout.draft.named_parameters()), dict(pair()[1].named_parameters()))


def fail(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("broken")


@pytest.mark.parametrize("part", ["draft", "learner"])
def test_what_fails_costs_no_step(
    part: str, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: Seen = []
    rollout = RolloutAssistant(pair()[1], CONFIG)
    if part == "learner":
        monkeypatch.setattr(Updater, "micro_steps", fail)
    else:
        monkeypatch.setattr("osd_hf.decoding.sources.DraftSource.propose", fail)
    trainer = rollouts(tmp_path, [rollout], seen, gradient_checkpointing=True, generation_kwargs=GREEDY)
    assert seen == alone[0]
    assert same(trained(trainer), alone[1])
    warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("osd_hf")]
    if part == "draft":
        assert warned == ["The draft failed; the answer continues without it: broken."]
    else:
        assert [text.partition(" failed")[0] for text in warned if "broken" in text][0] == "Learning"
        assert len(warned) <= 3  # the first failure, that learning pauses, and what is left in the end


@pytest.mark.parametrize("is_training", [True, False])
def test_sampled_completions_have_the_policys_distribution(is_training: bool) -> None:
    policy = models.bigram(0).train(is_training)
    rollout = RolloutAssistant(models.bigram(1), replace(CONFIG, update_strategy="manual"))
    state = SimpleNamespace(log_history=[])
    rollout.on_train_begin(SimpleNamespace(), state, None, model=policy)
    ids, answers = torch.tensor([[0, 1], [2, 3], [4, 4], [3, 1]]), list[list[int]]()
    mask = torch.tensor([[1, 1], [0, 1], [1, 1], [0, 1]])
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=50, pad_token_id=0, disable_compile=True)
    for _ in range(4):
        answers += policy.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, 1:].tolist()
    logs: dict[str, float] = {}
    rollout.on_log(None, state, None, logs=logs)
    assert 0.2 < logs["rollout/alpha"] < 0.95
    rollout.on_train_end(None, state, None)
    assert transitions_fit(answers, policy.by_token.detach().double().softmax(-1).numpy()) > 1e-3
    assert policy.training is is_training


def test_whole_policies_in_mixed_precision_roll_out_with_a_draft_by_rloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("osd_hf.rollouts.TARGET_LAG", 1)
    store = CorrectionStore()
    rollout, seen = RolloutAssistant(pair()[1], CONFIG, store=store), Seen()
    trainer = rollouts(tmp_path, [rollout], seen, RLOOTrainer, None, bf16=True)
    assert [trace.target for trace in store][::4] == list(dict.fromkeys(trace.target for trace in store))
    assert len([entry for entry in trainer.state.log_history if entry.get("rollout/alpha", 0) > 0]) == 3
    assert rollout.assistant is not None
    # Each rollout was another policy's; rows of the last two were kept.
    [lesson] = rollout.assistant.drafts.requests.values()
    versions = {trace.target for trace in (*lesson.pending, *lesson.held_back, *lesson.buffer)}
    assert versions <= {lesson.target, *lesson.earlier}
    assert (len(lesson.earlier), lesson.target == fingerprint(trainer.model)) == (1, False)


def test_completions_for_evaluation_are_drafted_too(tmp_path: Path) -> None:
    told = []
    for rollout in (None, RolloutAssistant(pair()[1], CONFIG)):
        args = settings(SFTConfig, tmp_path, per_device_eval_batch_size=3, gradient_checkpointing=True)
        rows = Dataset.from_dict({"prompt": PROMPTS, "completion": [text[::-1] for text in PROMPTS]})
        trainer = SFTTrainer(
            pair()[0], args=args, train_dataset=rows, eval_dataset=rows, processing_class=models.tokenizer(),
            callbacks=[] if rollout is None else [rollout],
        )  # fmt: skip
        logged = LogCompletionsCallback(trainer, GenerationConfig(max_new_tokens=6, pad_token_id=0), 3, freq=2)
        trainer.add_callback(logged)
        trainer.train()
        told.append(logged.table)
        if rollout is not None and rollout.assistant is not None:
            [entry] = [entry for entry in trainer.state.log_history if "rollout/tokens" in entry]
            assert (entry["step"], entry["rollout/alpha"] > 0) == (2, True)
    assert told[0] == told[1]
    assert len(told[0]) == 3


def test_a_training_that_breaks_off_leaves_a_policy_that_answers_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    before, rollout = methods(), RolloutAssistant(pair()[1], CONFIG)
    policy = pair()[0]
    state = SimpleNamespace(log_history=[])
    rollout.on_train_begin(SimpleNamespace(), state, None, model=policy)
    given = {"attention_mask": torch.ones(1, 6, dtype=torch.long), "max_new_tokens": 6, "do_sample": False}
    drafted = policy.generate(models.prompt(), **given)
    assert rollout.assistant is not None
    assert rollout.assistant.stats.num_requests == 1
    # What an assistant would refuse, the policy generates alone.
    beams = {"num_beams": 2, "num_return_sequences": 2}
    assert len(policy.generate(models.prompt(), **given, **beams)) == 2
    assert policy.generate(models.prompt(), GenerationConfig(max_new_tokens=1)).shape == (1, 7)
    assert caplog.text.count("A call with a positional configuration is not drafted. Pass it by name.") == 1
    assert caplog.text.count("generates without a draft") == 1
    # Nor does it meddle where the caller brings a draft.
    assert torch.equal(policy.generate(models.prompt(), **given, assistant_model=pair()[1]), drafted)
    assert caplog.text.count("generates without a draft") == 1
    assert rollout.assistant.stats.num_requests == 1
    copied = copy.deepcopy(policy)
    kept = weakref.ref(rollout)
    del rollout
    gc.collect()
    assert kept() is None
    assert methods() == before
    for model in (policy, copied):
        assert torch.equal(model.generate(models.prompt(), **given), drafted)


@pytest.mark.parametrize(
    ("args", "wrap", "why"),
    [
        ({"use_vllm": True}, None, "vLLM"),
        ({"fsdp": ["full_shard"]}, None, "sharded"),
        ({"use_transformers_continuous_batching": True}, None, "continuous batching"),
        ({}, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "prompt"),
        ({}, None, None),
    ],
)
def test_what_cannot_be_drafted_is_left_alone(
    args: dict[str, Any], wrap: Any, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    policy = pair()[0]
    policy = policy if wrap is None else get_peft_model(policy, wrap)
    before, rollout = methods(), RolloutAssistant(pair()[1], CONFIG)
    rollout.on_train_begin(SimpleNamespace(**args), None, None, model=policy)
    assert (methods() == before) == (why is not None)
    assert ("Rollouts are not drafted" in caplog.text) == (why is not None)
    assert why is None or why in caplog.text
    assert "generated nothing" not in caplog.text
    rollout.on_train_end(None, None, None)
    assert methods() == before
    assert ("The policy generated nothing in this training" in caplog.text) == (why is None)


@pytest.mark.parametrize("by", ["accelerate launch", "its weights"])
def test_a_policy_that_others_have_spread_is_left_alone(by: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    policy, before = pair()[0], methods()
    if by == "accelerate launch":  # the trainer's arguments say nothing
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        if by == "its weights":
            spread = distribute_tensor(policy.lm_head.weight.detach(), init_device_mesh("cpu", (1,)))
            policy.lm_head.weight = torch.nn.Parameter(spread)
        RolloutAssistant(pair()[1], CONFIG).on_train_begin(SimpleNamespace(), None, None, model=policy)
    finally:
        distributed.destroy_process_group()
    assert "sharded" in caplog.text and methods() == before


def test_a_draft_that_does_not_fit_is_told_before_the_first_step() -> None:
    rollout = RolloutAssistant(models.build(vocab_size=48, num_hidden_layers=1))
    with pytest.raises(VocabularyMismatchError):
        rollout.on_train_begin(SimpleNamespace(), None, None, model=pair()[0])
