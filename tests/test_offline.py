"""Offline distillation: what is learned on, what the loss counts, what a draft is judged by, and how runs go on."""

from __future__ import annotations

import copy
import re
import string
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import datasets
import distilled_weights
import models
import numpy as np
import pytest
import torch
from accelerate import debug_launcher
from transformers import TrainerCallback, TrainingArguments
from trl.experimental.gkd import GKDTrainer

from osd_hf import AcceptanceStats, CorrectionStore, replay
from osd_hf import models as pairs
from osd_hf.distillation import data as offline_data
from osd_hf.distillation.data import SAMPLE_SOURCES, completed, unanswered
from osd_hf.distillation.trainer import DistillConfig, distill
from osd_hf.errors import ConfigError, DataError, StateError, UnsupportedModelError, VocabularyMismatchError
from osd_hf.learning import loss as offline_loss
from osd_hf.learning.weights import ends_of
from osd_hf.losses import DIVERGENCES
from osd_hf.recording import record_traces
from osd_hf.replay import check_head, completion_logits

peft_warns = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it

PROMPTS = [ids[0].tolist() for ids in models.prompts(12)]
ROWS = [{"prompt": ids} for ids in PROMPTS]
HELD_OUT = [{"prompt": ids[0].tolist()} for ids in models.prompts(18)[12:]]
# Of different lengths, so that there is padding on both sides.
ANSWERED = [{"prompt": ids, "completion": PROMPTS[-1 - i][: 1 + i % 5]} for i, ids in enumerate(PROMPTS)]


def config(folder: Any, **changes: Any) -> DistillConfig:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4, "max_new_tokens": 6,
        "learning_rate": 1e-3, "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "disable_tqdm": True,
        "report_to": "none",
    }  # fmt: skip
    return DistillConfig(**{**settings, **changes})


def run(pair: tuple[Any, Any], folder: Any, dataset: Any = ROWS, **settings: Any) -> Any:
    extra = {name: settings.pop(name) for name in ("eval_dataset", "peft_config", "callbacks") if name in settings}
    target, draft = pair
    return distill(
        target=target, draft=draft, dataset=dataset, config=config(folder, **settings), tokenizer=models.tokenizer(),
        **extra,
    )  # fmt: skip


def weights(model: Any) -> torch.Tensor:
    values = [p.detach().flatten() for p in model.state_dict().values()]
    return torch.cat([value.to(torch.promote_types(value.dtype, torch.float32)) for value in values])


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft in double precision is trained in it, not in single precision, so that equal runs are equal to the last
    digits on every machine."""
    monkeypatch.setattr(
        "osd_hf.distillation.trainer.learner_of", lambda draft, peft_config: copy.deepcopy(draft).eval()
    )


def losses(result: Any) -> list[float]:
    return [entry["loss"] for entry in result.log_history if "loss" in entry]


def recorded(target: Any, number: int = 6, **settings: Any) -> list[Any]:
    return list(record_traces(target, PROMPTS[:number], **{"max_new_tokens": 7, **settings}))


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return models.pair(noise=0.5, num_hidden_layers=1)


@pytest.fixture(scope="module")
def t5_pair() -> tuple[Any, Any]:
    return models.pair("t5", noise=0.5)


def test_models_settings_and_data_of_the_caller_stay_as_they_are(tmp_path: Any, pair: Any) -> None:
    target, draft = pair
    given, args = weights(draft), config(tmp_path, max_steps=2)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(tmp_path / name)
        models.tokenizer().save_pretrained(tmp_path / name)
    how: dict[str, Any] = {"config": args, "eval_dataset": HELD_OUT}
    plain = distill(target=target, draft=draft, dataset=ANSWERED, tokenizer=models.tokenizer(), **how)
    paths = {"target": str(tmp_path / "target"), "draft": tmp_path / "draft"}
    named = distill(**paths, dataset=datasets.Dataset.from_list(ANSWERED), **how)
    assert torch.equal(weights(plain.draft), weights(named.draft))
    assert plain.alpha == named.alpha and set(plain.alpha) == {0, 2}
    assert torch.equal(weights(draft), given)
    assert args.eval_on_start is False
    other: Any = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ConfigError, match="must be a `DistillConfig`, got a TrainingArguments"):
        distill(**paths, dataset=ANSWERED, config=other)


# --- it learns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "source"),
    [*(("llama", source) for source in SAMPLE_SOURCES), ("t5", "mix_request"), ("bart", "student")],
)
def test_a_draft_gets_closer_to_its_target(tmp_path: Any, architecture: str, source: str) -> None:
    target, draft = models.pair(architecture, noise=0.5, **models.SHALLOW[architecture])
    before = weights(draft)
    how: dict[str, Any] = {"max_steps": 8, "learning_rate": 1e-2, "per_device_train_batch_size": 12}
    result = run((target, draft), tmp_path, sample_source=source, **how)
    assert np.mean(losses(result)[-3:]) < 0.8 * np.mean(losses(result)[:3])
    assert torch.equal(weights(draft), before)
    assert type(result.draft) is type(draft)
    assert not result.draft.training


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_stored_whole_rows_teach_what_the_target_teaches(tmp_path: Any, architecture: str) -> None:
    target, draft = models.pair(architecture, noise=0.5, **models.SHALLOW[architecture])
    traces = recorded(target, 4, num_logprobs=None)
    rows = [{"prompt": t.prompt_ids.tolist(), "completion": t.completion_ids.tolist()} for t in traces]
    stored = run((None, draft), tmp_path, traces)
    assert losses(stored) == pytest.approx(losses(run((target, draft), tmp_path, rows)), abs=2e-3)


@peft_warns
@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_adapters_learn_and_are_merged(tmp_path: Any, architecture: str) -> None:
    from peft import LoraConfig

    target, draft = models.pair(architecture, noise=0.5, **models.SHALLOW[architecture])
    modules = ["q_proj", "down_proj"] if architecture == "llama" else ["q", "wo"]
    result = run(
        (target, draft), tmp_path, peft_config=LoraConfig(target_modules=modules, r=4), save_strategy="steps",
        save_steps=3, learning_rate=1e-2, eval_dataset=HELD_OUT,
    )  # fmt: skip
    assert type(result.draft) is type(draft)
    moved = {n for n, p in result.draft.named_parameters() if not torch.equal(p, draft.get_parameter(n))}
    assert moved == {n for n, _ in draft.named_parameters() if n.split(".")[-2] in modules}
    assert (tmp_path / "checkpoint-3" / "adapter_model.safetensors").is_file()
    assert result.alpha[3] == replay(result.draft, recorded_answers(target), 5).alpha


def test_a_half_precision_draft_learns_in_full_precision(tmp_path: Any, pair: Any) -> None:
    target, draft = pair[0], copy.deepcopy(pair[1]).bfloat16()
    kept = {}

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            kept["dtype"] = model.dtype

    result = run((target, draft), tmp_path, callbacks=[Look()])
    assert kept["dtype"] == torch.float32
    assert result.draft.dtype == torch.bfloat16
    assert not torch.equal(weights(result.draft), weights(draft))


def test_nothing_is_left_on_the_models(tmp_path: Any, pair: Any) -> None:
    target, draft = copy.deepcopy(pair)
    target.train()
    names = [set(vars(model)) for model in (target, draft)]
    settings = config(tmp_path, bf16=True)  # for which accelerate changes the forward of both
    before = settings.to_dict()
    result = distill(
        target=target, draft=draft, dataset=ROWS, config=settings, eval_dataset=HELD_OUT, tokenizer=models.tokenizer()
    )
    assert [set(vars(model)) for model in (target, draft)] == names
    assert set(vars(result.draft)) == names[1]
    assert target.training
    assert result.draft.config.to_dict() == draft.config.to_dict()
    assert result.draft.generation_config.to_dict() == draft.generation_config.to_dict()
    assert settings.to_dict() == before


def half_lora(draft: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["lm_head"])
    return get_peft_model(copy.deepcopy(draft).bfloat16(), lora, autocast_adapter_dtype=False)


@peft_warns
def test_adapters_that_cannot_learn_or_be_merged_are_refused(tmp_path: Any, pair: Any) -> None:
    from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

    target, draft = pair
    half_lora(draft).save_pretrained(tmp_path / "adapter")
    frozen = PeftModel.from_pretrained(copy.deepcopy(draft), tmp_path / "adapter")
    with pytest.raises(UnsupportedModelError, match="is_trainable=True"):
        run((target, frozen), tmp_path)
    soft = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    for drafted, peft_config in ((draft, soft), (get_peft_model(copy.deepcopy(draft), soft), None)):
        with pytest.raises(ConfigError, match="PromptTuningConfig cannot be merged"):
            run((target, drafted), tmp_path, peft_config=peft_config)
    with pytest.raises(ConfigError, match="Leave `peft_config` out"):
        run((target, half_lora(draft)), tmp_path, peft_config=LoraConfig(target_modules=["q_proj"]))
    tied = models.pair(noise=0.5, tie_word_embeddings=True)
    refused = pytest.raises(ConfigError, match="ties its output head to its input embeddings")
    with refused, pytest.warns(UserWarning, match="tied layer"):
        run(tied, tmp_path, peft_config=LoraConfig(target_modules=["lm_head"]))


# --- what the loss counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("divergence", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.5), ("jsd", 0.1)]
)
def test_the_loss_is_that_of_gkd_on_whole_logits(
    tmp_path: Any, pair: Any, divergence: str, beta: float, in_double: None
) -> None:
    target, draft = pair = [models.double(model) for model in pair]
    total = count = 0.0
    for row in ANSWERED:
        ids = torch.tensor([row["prompt"] + row["completion"]])
        labels = ids.clone()
        labels[:, : len(row["prompt"])] = -100
        with torch.no_grad():
            q, p = draft(ids).logits, target(ids).logits
        answer = len(row["completion"])
        total += answer * float(
            GKDTrainer.generalized_jsd_loss(q[:, :-1], p[:, :-1], labels[:, 1:], beta=beta, reduction="batchmean")
        )
        count += answer
    given = {"beta": beta} if divergence == "jsd" else {}
    how = {"per_device_train_batch_size": 12, "max_steps": 1}
    result = run(pair, tmp_path, ANSWERED, divergence=divergence, **given, **how)
    assert losses(result) == pytest.approx([total / count], rel=models.rounding(1))  # as it is logged


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "t5", "bart"])
def test_identical_models_have_no_loss_and_learn_nothing(tmp_path: Any, architecture: str, in_double: None) -> None:
    target = models.double(models.build(architecture, **models.SHALLOW[architecture]))
    result = run(
        (target, copy.deepcopy(target)), tmp_path, sample_source="mix_request", optim="sgd", learning_rate=1.0
    )
    assert losses(result) == pytest.approx([0, 0, 0], abs=1e-12)
    torch.testing.assert_close(weights(result.draft), weights(target), atol=1e-10, rtol=0)


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_chunks_of_positions_make_no_difference(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = map(models.double, models.pair(architecture, noise=0.5, **models.SHALLOW[architecture]))
    traces = recorded(target)
    found = []
    for size in (1 << 24, 5 * models.VOCAB):
        monkeypatch.setattr(offline_loss, "CHUNK_LOGITS", size)
        draft.zero_grad()
        rows = offline_loss.target_rows(target, traces)
        loss = offline_loss.divergence_sum(draft, traces, rows, DIVERGENCES["forward_kl"])
        loss.backward()
        found.append((loss.detach(), torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None])))
    assert found[0][1].dtype == torch.float64
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)
    with torch.no_grad():
        p, q = (completion_logits(model, traces)[:, :7].log_softmax(-1) for model in (target, draft))
    torch.testing.assert_close(found[0][0], (p.exp() * (p - q)).sum(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("architecture", ["llama", "t5", "bart"])
def test_no_logits_of_a_whole_batch_exist(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models.pair(architecture, vocab_size=4096)
    traces = [unanswered(t, range(60)) for t in recorded(target)]
    monkeypatch.setattr(offline_loss, "CHUNK_LOGITS", 48 * 4096)  # a size that kernels compute as it is
    with models.Largest() as largest:
        rows = offline_loss.target_rows(target, traces)
        offline_loss.divergence_sum(draft, traces, rows, DIVERGENCES["jsd"]).backward()
    assert largest.elements == 48 * 4097  # a chunk, and the tail; of 360 positions


def test_logits_that_a_model_changes_behind_its_head_are_known_or_refused() -> None:
    capped = models.build("gemma3")
    capped.config.final_logit_softcapping = 2.0
    check_head(capped)
    biased = models.build("bart")
    biased.final_logits_bias = torch.randn(1, models.VOCAB)
    check_head(biased)

    class Odd(type(models.build())):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.abs()
            return output

    odd = models.build()
    odd.__class__ = Odd
    with pytest.raises(UnsupportedModelError, match="Odd changes its logits"):
        check_head(odd)


# --- whose tokens ---------------------------------------------------------------------------------------------------


def requests(number: int, prompt_tokens: int = 3, vocab_size: int = 16) -> list[Any]:
    trace = recorded(models.build(), 1)[0]
    return [
        replace(unanswered(trace), prompt_ids=np.full(prompt_tokens, 3 + i % 5, np.int32), vocab_size=vocab_size)
        for i in range(number)
    ]


def sampling(source: str, temperature: float, max_new_tokens: int, **changes: Any) -> Any:
    settings = {"sample_source": source, "lmbda": 0.5, "temperature": temperature, "max_new_tokens": max_new_tokens}
    return SimpleNamespace(**{**settings, "seed": 0, **changes})


def sampled(source: str, number: int = 40, share: float = 0.3, **changes: Any) -> np.ndarray:
    """Tokens of scripted models: the target says 4, the draft 5; shape `(requests, 10)`."""
    target, draft = models.scripted([4] * 10, 3), models.scripted([5] * 10, 3)
    settings = sampling(source, 0.0, 10, lmbda=share, **changes)
    answered = completed(requests(number), range(number), 0, settings, target=target, draft=draft)
    return np.stack([t.completion_ids for t in answered])


def test_each_request_is_answered_by_one_model() -> None:
    assert (sampled("teacher") == 4).all()
    assert (sampled("student") == 5).all()
    tokens = sampled("mix_request", 400)
    assert all(len(set(row)) == 1 for row in tokens)
    assert set(tokens[:, 0]) == {4, 5}
    assert abs((tokens[:, 0] == 5).mean() - 0.3) < 0.08


@pytest.mark.parametrize("source", SAMPLE_SOURCES)
def test_what_a_request_draws_does_not_hang_on_its_batch(pair: Any, source: str) -> None:
    prompts = [unanswered(t) for t in recorded(pair[0])]
    settings = sampling(source, 1.0, 8)
    models_ = {"target": pair[0], "draft": pair[1]}
    whole = completed(prompts, range(6), 4, settings, **models_)
    alone = [completed([p], [i], 4, settings, **models_)[0] for i, p in enumerate(prompts)]
    assert [t.completion_ids.tolist() for t in whole] == [t.completion_ids.tolist() for t in alone]
    later = completed(prompts, range(6), 5, settings, **models_)
    assert [t.completion_ids.tolist() for t in whole] != [t.completion_ids.tolist() for t in later]


def test_samples_have_the_model_s_distribution() -> None:
    model = models.bigram(0, vocab_size=5)
    prompts = requests(4000, 1, 5)
    prompts = [replace(p, prompt_ids=np.array([2], np.int32)) for p in prompts]
    tokens = completed(prompts, range(4000), 0, sampling("teacher", 0.7, 1), target=model, draft=None)
    shares = np.bincount([t.completion_ids[0] for t in tokens], minlength=5) / 4000
    expected = (model.by_token[2] / 0.7).softmax(-1).detach().numpy()
    assert np.abs(shares - expected).max() < 4 * np.sqrt(0.25 / 4000)


def test_an_answer_ends_at_eos() -> None:
    target = models.scripted([4, 4, 2, 7, 7], 3)
    target.generation_config.eos_token_id = [2, 9]
    # A shorter prompt is one token behind: the batch goes on when the other has ended.
    prompts = [*requests(1), *requests(1, 2)]
    answered = completed(prompts, range(2), 0, sampling("teacher", 0.0, 5), target=target, draft=None)
    assert [t.completion_ids.tolist() for t in answered] == [[4, 4, 2], [0, 4, 4, 2]]


def test_a_given_completion_stands_for_the_target_s() -> None:
    target, draft = models.scripted([4] * 3, 3), models.scripted([5] * 3, 3)
    given = [unanswered(r, [7, 8]) for r in requests(40)]
    answered = completed(given, range(40), 0, sampling("mix_request", 0.0, 3), target=target, draft=draft)
    assert {tuple(t.completion_ids.tolist()) for t in answered} == {(7, 8), (5, 5, 5)}


# --- equal settings, one trajectory ---------------------------------------------------------------------------------


PLAIN = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0}  # under which the size of a gradient matters


@pytest.mark.parametrize("source", SAMPLE_SOURCES)
def test_accumulated_micro_batches_equal_one_batch(tmp_path: Any, pair: Any, source: str, in_double: None) -> None:
    target, draft = (models.double(model) for model in pair)
    target.generation_config.eos_token_id = list(range(3, 14))  # answers of different lengths
    trained = [
        weights(run((target, draft), tmp_path, sample_source=source, max_steps=2, **PLAIN, **sizes).draft)
        for sizes in (
            {"per_device_train_batch_size": 4},
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        )
    ]
    torch.testing.assert_close(trained[0], trained[1], atol=1e-10, rtol=0)
    assert not torch.allclose(trained[0], weights(draft), atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("architecture", "source"), [("llama", "teacher"), pytest.param("t5", "mix_request", marks=pytest.mark.slow)]
)
def test_two_processes_learn_what_one_does(tmp_path: Any, architecture: str, source: str) -> None:
    one = distilled_weights.distilled(architecture, source, 4, str(tmp_path / "one"))
    debug_launcher(distilled_weights.save_distilled, (architecture, source, 2, str(tmp_path / "two")), num_processes=2)
    two = torch.load(tmp_path / "two" / "result.pt")
    assert two["epoch"] == pytest.approx(1 / 6, abs=1e-4)  # a step takes 4 of 24 requests, so there are two
    for name, weight in one.draft.state_dict().items():
        torch.testing.assert_close(two["weights"][name], weight, atol=1e-4, rtol=0)
    assert two["alpha"] == one.alpha


class Killed(Exception):
    pass


class Kill(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            raise Killed


@pytest.mark.parametrize(
    ("architecture", "source", "optimizer"), [("llama", "mix_request", "muon"), ("t5", "student", "adamw")]
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Any, architecture: str, source: str, optimizer: str
) -> None:
    pair = models.pair(architecture, noise=0.5, **models.SHALLOW[architecture])
    # Three steps an epoch: the checkpoint at step 4 lies in the middle of the second.
    settings = {"sample_source": source, "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    settings["optimizer"] = optimizer
    straight = run(pair, tmp_path / "straight", **settings)
    with pytest.raises(Killed):
        run(pair, tmp_path / "killed", callbacks=[Kill()], **settings)
    (tmp_path / "killed" / "checkpoint-5").mkdir()  # as if killed while it was written
    resumed = run(pair, tmp_path / "killed", resume_from_checkpoint=True, **settings)
    assert torch.equal(weights(resumed.draft), weights(straight.draft))
    assert losses(resumed) == losses(straight)
    states = [
        torch.load(tmp_path / name / "checkpoint-6" / "optimizer.pt", weights_only=True)["state"]
        for name in ("straight", "killed")
    ]
    for ours, theirs in zip(states[0].values(), states[1].values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_frozen_embeddings_stay_and_layers_learn(tmp_path: Any, pair: Any) -> None:
    trained = run(pair, tmp_path, recorded(pair[0]), optimizer="muon", freeze_embeddings=True).draft
    frozen = {name for name, _ in ends_of(trained)}
    for name, weight in trained.named_parameters():
        assert torch.equal(weight, pair[1].get_parameter(name)) == (name in frozen), name


def test_judging_does_not_change_what_is_learned(tmp_path: Any, pair: Any) -> None:
    silent = run(pair, tmp_path, sample_source="mix_request", max_steps=2)
    judging = {"eval_dataset": HELD_OUT, "eval_strategy": "steps", "eval_steps": 1}
    judged = run(pair, tmp_path, sample_source="mix_request", max_steps=2, **judging)
    assert torch.equal(weights(silent.draft), weights(judged.draft))
    assert set(judged.alpha) == {0, 1, 2}


# --- what a draft is judged by --------------------------------------------------------------------------------------


def recorded_answers(target: Any, max_new_tokens: int = 6) -> list[Any]:
    return list(record_traces(target, [row["prompt"] for row in HELD_OUT], max_new_tokens=max_new_tokens))


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_alpha_is_that_of_the_draft_on_held_out_requests(tmp_path: Any, architecture: str) -> None:
    target, draft = models.pair(architecture, noise=0.2, **models.SHALLOW[architecture])
    answers = recorded_answers(target)
    settings = {"num_assistant_tokens": 3, "eval_strategy": "steps", "eval_steps": 3}
    for held_out in (HELD_OUT, answers):
        result = run((target, draft), tmp_path, eval_dataset=held_out, **settings)
        assert result.alpha == {0: replay(draft, answers, 3).alpha, 3: replay(result.draft, answers, 3).alpha}
    entries = [entry for entry in result.log_history if "eval_block_efficiency" in entry]
    assert entries[-1]["eval_block_efficiency"] == replay(result.draft, answers, 3).block_efficiency


def scripted_alphas(monkeypatch: pytest.MonkeyPatch, alphas: list[float]) -> None:
    left = iter(alphas)
    scripted = lambda *_: AcceptanceStats(examined=100, accepted=next(left))  # noqa: E731
    monkeypatch.setattr("osd_hf.distillation.trainer.replay", scripted)


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("llama", True), ("t5", False)])
def test_the_best_checkpoint_is_best_by_alpha(
    tmp_path: Any, architecture: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = models.pair(architecture, noise=0.5, tie_word_embeddings=tied)
    scripted_alphas(monkeypatch, [10, 20, 40, 30, 35])
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    settings["per_device_train_batch_size"] = 12
    result = run(pair, tmp_path, ANSWERED, eval_dataset=HELD_OUT, load_best_model_at_end=True, **settings)
    assert result.alpha == {0: 0.1, 1: 0.2, 2: 0.4, 3: 0.3, 4: 0.35}
    assert losses(result)[-1] < losses(result)[0]  # the loss goes on falling
    assert result.state.best_metric == 0.4
    assert result.state.best_model_checkpoint.endswith("checkpoint-2")
    best = type(pair[1]).from_pretrained(tmp_path / "checkpoint-2")
    assert torch.equal(weights(result.draft), weights(best))


# --- what is read ---------------------------------------------------------------------------------------------------


def read(rows: Any, tokenizer: Any = None, **changes: Any) -> list[tuple[list[int], list[int]]]:
    settings = {"vocab_size": models.VOCAB, "decoder_start": None, **changes}
    traces = offline_data.read_rows(rows, tokenizer or models.tokenizer(), **settings)
    return [(t.prompt_ids.tolist(), t.completion_ids.tolist()) for t in traces]


def chat_tokenizer() -> Any:
    tokenizer = models.tokenizer(characters=string.ascii_letters + ":")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return tokenizer


def test_text_ids_and_messages_are_read_alike() -> None:
    tokenizer = chat_tokenizer()

    def ids(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    assert read([{"prompt": "abc"}, {"prompt": "abc", "completion": "de"}], tokenizer) == [
        (ids("abc"), []),
        (ids("abc"), [*ids("de"), tokenizer.eos_token_id]),
    ]
    assert read([{"prompt": [5, 6], "completion": [7]}, {"prompt": [5]}], tokenizer) == [([5, 6], [7]), ([5], [])]
    user, answer = {"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}
    expected = (ids("u:abca:"), ids("de"))
    for row in ({"messages": [user, answer]}, {"prompt": [user], "completion": [answer]}):
        assert read([row], tokenizer) == [expected]
    for row in ({"messages": [user]}, {"prompt": [user]}):
        assert read([row], tokenizer) == [(expected[0], [])]


def test_a_chat_answer_ends_where_the_target_ends_it() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}</s>{% endif %}zz{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    turns = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
    ((_, completion),) = read([{"messages": turns}], tokenizer)
    assert completion == [*tokenizer("de")["input_ids"], tokenizer.eos_token_id]


USER, ANSWER = {"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}
UNUSABLE: list[tuple[Any, str]] = [
    ({"messages": ["hello"]}, "must both be text, token ids or messages"),
    ({"messages": None}, "the prompt is missing or empty.*has values in no column"),
    ({"messages": [ANSWER]}, "the prompt is missing or empty"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "the answer is empty"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts of the type `text`"),
    ({"messages": [{"from": "human", "value": "a"}]}, "a message has no `role`; its fields are from, value"),
    ({"messages": [USER], "tools": "{"}, "`tools` is no JSON"),
    ({"messages": [USER], "chat_template_kwargs": {"fail": 1}}, "chat template cannot take it .*no way"),
    ({"text": "abc"}, "the prompt is missing or empty.*has values in text"),
    ({"prompt": "a", "completion": ""}, "the completion is empty"),
    ({"prompt": "a\ud83d"}, "`prompt` must be a text of whole characters"),
    ({"prompt": "a", "completion": [5]}, "must both be text, token ids or messages"),
]


@pytest.mark.parametrize(("row", "reason"), UNUSABLE)
def test_a_row_that_cannot_be_used_costs_no_other_row(row: Any, reason: str, caplog: Any) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template += "{{ raise_exception('no way') if fail }}{{ other.a.b if other }}"
    fine: list[Any] = [{"prompt": "abc"}, {"messages": [USER, ANSWER]}]
    assert read([fine[0], row, fine[1]], tokenizer) == read(fine, tokenizer)
    (message,) = caplog.messages
    assert re.search(f"Skipped 1 of 3 rows: row 1: .*{reason}", message)
    with pytest.raises(DataError, match=f"No row can be used: rows 0, 1: .*{reason}"):
        read([row, row], tokenizer)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "No row can be used: there is none"),
        ([{"prompt": [64]}], "outside of the vocabulary of 64"),
        ([{"messages": [USER]}], "no chat template"),
        ({"train": [{"prompt": [5]}], "test": []}, "has the splits train, test. Pass one"),
    ],
)
def test_data_sets_that_cannot_be_learned_from_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(rows)


def test_rows_that_are_too_long_are_left_out(tmp_path: Any, pair: Any, caplog: Any) -> None:
    run(pair, tmp_path, [{"prompt": [5] * 251}, *ROWS, {"prompt": [5] * 400}], max_steps=1)
    assert f"rows 0, {len(ROWS) + 1}: prompt and completion do not fit into the models' 256 positions" in caplog.text


def test_data_sets_of_every_kind_are_read_alike(caplog: Any) -> None:
    tokenizer, ids = chat_tokenizer(), [{"prompt": [5, 6], "completion": [7], "unused": None}]
    chats = [{"messages": [USER, ANSWER], "unused": 1}, {"messages": [{**USER, "name": "bob"}, ANSWER], "unused": 2}]
    for rows in (ids, chats):
        plain, expected = datasets.Dataset.from_list(rows), read(rows, tokenizer)
        for kind in (None, "numpy", "torch", "pandas", "arrow"):
            assert read(plain.with_format(kind), tokenizer) == expected
        for kind in (None, "numpy", "torch"):
            assert read(plain.to_iterable_dataset().with_format(kind), tokenizer) == expected
        assert read(datasets.DatasetDict({"train": plain}), tokenizer) == expected
    arrays = [{"prompt": np.array([5, 6]), "completion": torch.tensor([7])}]
    assert read(arrays) == read(ids)
    shouted = datasets.Dataset.from_list([{"text": "abc"}]).with_transform(lambda rows: {"prompt": rows["text"]})
    assert read(shouted, tokenizer) == read([{"prompt": "abc"}], tokenizer)
    assert not caplog.messages


def test_tools_and_settings_of_a_row_reach_the_chat_template() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template += "{% for tool in tools or [] %}{{ tool['x'] }}{% endfor %}{{ mark }}"

    def prompt(**columns: Any) -> str:
        ((ids, _),) = read([{"prompt": [USER], **columns}], tokenizer)
        return str(tokenizer.decode(ids))

    assert prompt() == "u:abca:"
    for tools in ([{"x": "T"}], '[{"x": "T"}]'):
        assert prompt(tools=tools) == "u:abca:T"
    for kwargs in ({"mark": "M", "fail": None}, '{"mark": "M"}'):
        assert prompt(chat_template_kwargs=kwargs, tools=None) == "u:abca:M"


THINKING = (
    "{% for m in messages %}{{ m['role'][0] }}:{% if m['role'] == 'assistant' and loop.last and shown %}TUV{% endif %}"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}a:{{ 'T' if think else 'TUV' }}{% endif %}"
)


def test_an_answer_is_what_follows_the_start_that_the_template_writes() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = THINKING
    for think, expected in ((True, ("u:abca:T", "UVde")), (False, ("u:abca:TUV", "de"))):
        row = {"messages": [USER, ANSWER], "chat_template_kwargs": {"think": think, "shown": True}}
        ((prompt, completion),) = read([row], tokenizer)
        assert (tokenizer.decode(prompt), tokenizer.decode(completion)) == expected
    with pytest.raises(DataError, match="starts an answer differently.*set `chat_template_kwargs`"):
        read([{"messages": [USER, ANSWER], "chat_template_kwargs": {"think": True, "shown": False}}], tokenizer)


def test_text_without_a_tokenizer_is_refused(t5_pair: Any, tmp_path: Any) -> None:
    target, draft = t5_pair
    with pytest.raises(DataError, match="Pass `tokenizer=`"):
        distill(target=target, draft=draft, dataset=[{"prompt": "a"}], config=config(tmp_path))
    ids = distill(target=target, draft=draft, dataset=ROWS, config=config(tmp_path, max_steps=1))
    assert len(losses(ids)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"divergence": "kl"}, "`divergence` must be one of forward_kl, .* got 'kl'"),
        ({"sample_source": "both"}, "`sample_source` must be one of teacher, .* got 'both'"),
        ({"lmbda": 1.5}, "`lmbda` must be between 0 and 1"),
        ({"beta": 1.0}, "`beta` must be left alone unless `divergence` is jsd"),
        ({"temperature": -1.0}, "`temperature` must be 0 or"),
        ({"num_assistant_tokens": 0}, "`num_assistant_tokens` must be at least 1"),
        ({"metric_for_best_model": "accuracy"}, "`metric_for_best_model` must be one of alpha, block_efficiency"),
        ({"packing": True}, "`packing` must be left alone"),
        ({"optimizer": "muon", "weight_decay": 0.1}, "`weight_decay` must be left alone unless `optimizer` is adamw"),
        ({"use_liger_kernel": True}, "`use_liger_kernel` must be left alone"),
    ],
)
def test_settings_outside_their_range_are_refused(tmp_path: Any, changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **changes)


def test_the_target_s_tokenizer_reads_and_must_be_the_draft_s(
    tmp_path: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    found = {id(target): chat_tokenizer(), id(draft): chat_tokenizer()}
    monkeypatch.setattr(pairs, "find_tokenizer", lambda model: found.get(id(model)))
    assert pairs.common_tokenizer(None, target, draft) is found[id(target)]
    assert pairs.common_tokenizer(None, None, draft) is found[id(draft)]
    given = chat_tokenizer()
    assert pairs.common_tokenizer(given, target, draft) is given
    found[id(draft)].chat_template = None
    dataset = [{"messages": [{"role": "user", "content": "abc"}]}]
    distill(target=target, draft=draft, dataset=dataset, config=config(tmp_path, max_steps=1))
    found[id(draft)] = models.tokenizer(characters=string.ascii_lowercase)
    for tokenizer in (None, given):
        with pytest.raises(VocabularyMismatchError, match="tokenizers of target and draft differ"):
            distill(target=target, draft=draft, dataset=ROWS, config=config(tmp_path), tokenizer=tokenizer)


def test_a_padded_vocabulary_is_aligned(tmp_path: Any, pair: Any) -> None:
    result = run((models.build(vocab_size=models.VOCAB + 8), pair[1]), tmp_path, max_steps=1)
    assert (result.draft.config.vocab_size, pair[1].config.vocab_size) == (models.VOCAB + 8, models.VOCAB)


def test_recordings_of_the_other_kind_of_model_are_refused(tmp_path: Any, pair: Any, t5_pair: Any) -> None:
    for draft, target in ((pair[1], t5_pair[0]), (t5_pair[1], pair[0])):
        with pytest.raises(DataError, match="is an encoder-decoder, the other one is not"):
            run((None, draft), tmp_path, recorded(target))
    unstarted = copy.deepcopy(t5_pair[1])
    unstarted.generation_config.decoder_start_token_id = None
    with pytest.raises(UnsupportedModelError, match="without a `decoder_start_token_id`"):
        run((t5_pair[0], unstarted), tmp_path)


def test_a_target_that_would_answer_under_processors_is_refused(tmp_path: Any, pair: Any) -> None:
    target, draft = copy.deepcopy(pair[0]), pair[1]
    target.generation_config.repetition_penalty = 1.1
    for source in ("teacher", "mix_request"):
        with pytest.raises(
            ConfigError, match="sets repetition_penalty.* `target.generation_config`, or pass completions"
        ):
            run((target, draft), tmp_path, sample_source=source)
    with pytest.raises(ConfigError, match="sets repetition_penalty"):
        run((target, draft), tmp_path, ANSWERED, eval_dataset=HELD_OUT)
    assert run((target, draft), tmp_path, ANSWERED, eval_dataset=recorded(pair[0]), max_steps=1).alpha


def test_what_is_missing_or_does_not_fit_is_refused(tmp_path: Any, pair: Any) -> None:
    target, draft = pair
    with pytest.raises(ConfigError, match="`target` must be given"):
        run((None, draft), tmp_path)
    with pytest.raises(ConfigError, match="Held-out prompts need a `target`"):
        run((None, draft), tmp_path, recorded(target), eval_dataset=HELD_OUT)
    with pytest.raises(ConfigError, match="`eval_strategy` is 'steps': pass `eval_dataset=`"):
        run(pair, tmp_path, eval_strategy="steps", eval_steps=1)
    with pytest.raises(StateError, match="no checkpoint in .* to resume from"):
        run(pair, tmp_path, resume_from_checkpoint=True)
    with pytest.raises(VocabularyMismatchError, match="ids up to 63, but the target has 48 rows"):
        run((models.build(vocab_size=48), draft), tmp_path)
    with pytest.raises(UnsupportedModelError, match="must be of one kind"):
        run((models.build("t5"), draft), tmp_path)
    with pytest.raises(DataError, match="completion do not fit"):  # where the draft may answer, too
        run(pair, tmp_path, [{"prompt": [5] * 251, "completion": [5]}], sample_source="mix_request")
    with pytest.raises(DataError, match="All 2 requests were recorded without"):
        run(pair, tmp_path, [unanswered(trace, [5]) for trace in recorded(target, 2)])
    with pytest.raises(StateError, match="keep 8 and 16 entries"):
        run(pair, tmp_path, [*recorded(target, 1, num_logprobs=8), *recorded(target, 1, num_logprobs=16)])
    with pytest.raises(DataError, match="no request with a token"):
        run(pair, tmp_path, CorrectionStore())
