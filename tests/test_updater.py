import copy
import functools
import importlib
import logging
from dataclasses import fields, replace
from typing import Any

import models
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from osd_hf import OnlineConfig, Trace, capture_traces
from osd_hf.errors import ConfigError
from osd_hf.learning import loss as loss_module
from osd_hf.learning import updater as updater_module
from osd_hf.learning.updater import Float32Muon, Updater

CONFIG = OnlineConfig(
    num_assistant_tokens=5, update_strategy="interval", batch_size=4, steps_per_update=2, learning_rate=1e-3,
    num_logprobs=16,
)  # fmt: skip
PLAIN = replace(CONFIG, optimizer="adamw", weight_average=0.0, replay_fraction=0.0)


@functools.cache
def recorded(architecture: str, number: int, num_logprobs: int | None, **changes: Any) -> tuple[Trace, ...]:
    target, draft = models.pair(architecture, **changes)
    traces: list[Trace] = []
    with capture_traces(target, traces.append, num_logprobs=num_logprobs):
        for i, ids in enumerate(models.prompts(number)):
            kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 6 + 3 * i}
            target.generate(ids, assistant_model=draft, **kwargs)
    return tuple(traces)


def traffic(
    architecture: str = "llama", number: int = 4, num_logprobs: int | None = 16, **changes: Any
) -> list[Trace]:
    """Requests of such a pair as it is drafted for, which are recorded once."""
    return list(recorded(architecture, number, num_logprobs, **changes))


def learned(draft: Any, traces: list[Trace], config: OnlineConfig, updates: int = 1) -> Updater:
    updater = Updater(draft, config)
    for _ in range(updates):
        for trace in traces:
            models.observe(updater, trace)
        updater.update()
    return updater


def weights(updater: Updater) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in updater.parameters.items()}


def served(updater: Updater, draft: Any) -> Any:
    copied = copy.deepcopy(draft)
    updater.copy_to(copied)
    return copied


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts in double precision learn in it, so that equal sums are equal to the last digits on every machine."""
    monkeypatch.setattr(torch.nn.Module, "float", lambda module: module)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The vocabulary of tiny models counts as large; the columns of logits that losses are computed on."""
    seen: list[int] = []
    monkeypatch.setattr(loss_module, "MIN_SAMPLED_VOCABULARY", models.VOCAB)
    monkeypatch.setattr(loss_module, "NUM_SAMPLED_TOKENS", 4)
    compare = loss_module.outcome_logprobs

    def watched(logits: torch.Tensor, top_ids: Any) -> torch.Tensor:
        seen.append(logits.shape[-1])
        return compare(logits, top_ids)

    monkeypatch.setattr(loss_module, "outcome_logprobs", watched)
    return seen


# --- one step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_an_update_brings_the_draft_closer(architecture: str, divergence: str) -> None:
    draft = models.pair(architecture)[1]
    traces = traffic(architecture)
    config = replace(CONFIG, divergence=divergence, steps_per_update=1)
    updater = Updater(draft, config)
    losses = []
    for _ in range(6):
        for trace in traces:
            models.observe(updater, trace)
        losses.append(updater.update().loss)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("learn_from", ["verified", "corrections"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "t5"])
def test_micro_batches_add_up_to_one_batch(
    architecture: str, learn_from: str, monkeypatch: pytest.MonkeyPatch, in_double: None
) -> None:
    draft = models.pair(architecture)[1]
    traces = traffic(architecture)
    draft = models.double(draft)
    monkeypatch.setattr(updater_module, "MAX_GRAD_NORM", 1e9)
    config = replace(PLAIN, learn_from=learn_from, steps_per_update=1)

    def gradients() -> tuple[dict[str, torch.Tensor], float | None]:
        updater = Updater(draft, config)
        monkeypatch.setattr(updater, "_zero_grad", lambda: None)
        for trace in traces:
            models.observe(updater, trace)
        report = updater.update()
        return {n: p.grad.clone() for n, p in updater.parameters.items() if p.grad is not None}, report.loss

    whole, whole_loss = gradients()
    monkeypatch.setattr(importlib.import_module("osd_hf.replay"), "MAX_LOGITS", 1)  # one trace a forward
    parts, parts_loss = gradients()
    assert parts_loss == pytest.approx(whole_loss, rel=1e-10)
    assert whole.keys() == parts.keys()
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], atol=1e-10, rtol=0)


def test_whole_rows_and_kept_rows_learn_alike() -> None:
    draft = models.pair()[1]
    kept, whole = (traffic(num_logprobs=n) for n in (63, None))
    first, second = (learned(draft, traces, PLAIN) for traces in (kept, whole))
    for name, parameter in weights(first).items():
        torch.testing.assert_close(parameter, weights(second)[name], atol=2e-3, rtol=0)


def test_a_half_precision_draft_keeps_small_steps() -> None:
    draft = models.pair()[1]
    traces = traffic()
    half = copy.deepcopy(draft).to(torch.bfloat16)
    config = replace(PLAIN, learning_rate=3e-5, steps_per_update=1)
    updater = learned(half, traces, config)
    name, given = next((n, p) for n, p in half.named_parameters() if "q_proj" in n)
    assert updater.parameters[name].dtype == torch.float32
    assert bool((updater.parameters[name] != given.float()).all())

    def changed() -> float:
        now = dict(served(updater, half).named_parameters())[name]
        assert now.dtype == torch.bfloat16
        return float((now != given).float().mean())

    assert changed() < 0.15  # one step rounds away in what serves, many do not
    for _ in range(40):
        for trace in traces:
            models.observe(updater, trace)
        updater.update()
    assert changed() > 0.4


# --- what cannot be learned from ------------------------------------------------------------------------------------


def test_an_update_without_requests_changes_nothing() -> None:
    draft = models.build()
    updater = Updater(draft, CONFIG)
    before = weights(updater)
    report = updater.update()
    assert (report.version, report.steps, report.dropped_steps, report.loss, report.positions) == (0, 0, 0, None, 0)
    assert all(torch.equal(before[n], p) for n, p in weights(updater).items())


def test_a_perfect_draft_leaves_no_corrections() -> None:
    draft = models.pair(noise=0.0)[1]
    updater = learned(draft, traffic(noise=0.0), replace(CONFIG, learn_from="corrections"))
    assert updater.version == 0


def test_steps_that_are_not_finite_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    draft = models.pair()[1]
    updater = Updater(draft, PLAIN)
    for trace in traffic():
        models.observe(updater, trace)
    before = weights(updater)
    hook = next(iter(updater.parameters.values())).register_hook(lambda gradient: gradient * float("inf"))
    with caplog.at_level(logging.INFO):
        report = updater.update()
    assert (report.steps, report.dropped_steps, report.loss, report.version) == (0, 2, None, 0)
    assert report.set_aside == {}  # it is no request's fault
    assert "not finite" in caplog.text
    assert all(torch.equal(before[n], p) for n, p in weights(updater).items())
    hook.remove()
    assert updater.update().dropped_steps == 0
    assert all(torch.isfinite(p).all() for p in weights(updater).values())


# --- across updates -------------------------------------------------------------------------------------------------


def test_the_optimizer_goes_on_where_it_stood(in_double: None) -> None:
    draft = models.pair()[1]
    traces = traffic()
    draft = models.double(draft)
    whole = learned(draft, traces, replace(PLAIN, steps_per_update=4))
    halves = learned(draft, traces, replace(PLAIN, steps_per_update=2), updates=2)
    for name, parameter in weights(whole).items():
        torch.testing.assert_close(weights(halves)[name], parameter, atol=1e-10, rtol=0)
    assert halves.version == 2


@pytest.mark.parametrize("config", [CONFIG, PLAIN, OnlineConfig.paper(batch_size=3), replace(CONFIG, num_logprobs=2)])
def test_saved_and_resumed_equals_straight_through(config: OnlineConfig, request: pytest.FixtureRequest) -> None:
    if config.num_logprobs == 2:
        request.getfixturevalue("large")  # tokens are drawn
    draft = models.pair()[1]
    traces = traffic(number=8, num_logprobs=2 if config.num_logprobs == 2 else 16)
    straight = learned(draft, traces[:4], config)
    first = learned(draft, traces[:4], config)
    second = Updater(draft, config)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.buffer.extend(first.buffer)
    for updater in (straight, second):
        for trace in traces[4:]:
            models.observe(updater, trace)
        updater.update()
    assert second.version == straight.version == 2
    for name, parameter in weights(straight).items():
        assert torch.equal(weights(second)[name], parameter), name
    for a, b in zip(served(straight, draft).parameters(), served(second, draft).parameters(), strict=True):
        assert torch.equal(a, b)


def test_over_a_large_vocabulary_some_tokens_stand_for_those_that_no_row_keeps(large: list[int]) -> None:
    draft, traces = models.pair()[1], traffic(num_logprobs=2)
    kept = len(np.unique(np.concatenate([trace.top_ids for trace in traces])))
    assert kept < models.VOCAB - 4
    assert learned(draft, traces, CONFIG).version == 1
    assert set(large) == {kept + 4}  # all four are in each batch
    large.clear()
    learned(draft, traffic(num_logprobs=None), CONFIG)  # whole rows
    assert set(large) == {models.VOCAB}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.parametrize("module", ["q_proj", "lm_head"])
def test_a_head_with_an_adapter_is_taken_whole(module: str, large: list[int]) -> None:
    draft, traces = models.pair()[1], traffic(num_logprobs=2)
    updater = learned(get_peft_model(draft, LoraConfig(r=2, target_modules=[module])), traces, CONFIG)
    assert (max(large) == models.VOCAB) == (module == "lm_head")
    name = next(name for name in updater.parameters if "lora_B" in name)
    assert updater.parameters[name].any()  # it has learned


def test_requests_learned_from_are_replayed_later() -> None:
    draft = models.pair()[1]
    traces = traffic()
    updater = learned(draft, traces[:3], replace(CONFIG, replay_fraction=0.5, buffer_size=2, steps_per_update=1))
    assert not updater.requests.pending
    assert list(updater.buffer) == traces[1:3]
    models.observe(updater, traces[3])
    report = updater.update()
    assert report.new_requests == 1
    assert report.positions == sum(len(t) for t in traces[1:])
    assert len(updater.buffer) == 2
    assert set(updater.buffer) < set(traces[1:])


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_restart_is_a_fresh_beginning_and_holds_no_more_memory(optimizer: Any) -> None:
    draft = models.pair()[1]
    traces = traffic()
    config = replace(CONFIG, optimizer=optimizer)
    updater = learned(draft, traces, config, updates=2)
    optimizers = list(updater.optimizers)
    start = Updater(draft, config).snapshot()
    for _ in range(3):
        updater.restart(start)
    assert updater.optimizers == optimizers
    fresh = Updater(draft, config)
    for one in (updater, fresh):
        one.buffer.clear()
        one.buffer.rng.bit_generator.state = np.random.default_rng(1).bit_generator.state
        for trace in traces:
            models.observe(one, trace)
        one.update()
    ours, theirs = weights(updater), weights(fresh)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("part", ["_gradients", "_average", "step"])
def test_a_failed_update_keeps_its_requests_and_the_weights_of_the_last_whole_step(
    part: str, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = models.pair()[1]
    updater = Updater(draft, replace(PLAIN, optimizer=optimizer, learning_rate=1e-2, weight_average=0.5))
    traces = traffic(number=2)
    for trace in traces:
        models.observe(updater, trace)
    updater.update(steps=2)
    before = weights(updater)
    if part != "_gradients":  # a step has begun: the average of those before stands
        assert any(not torch.equal(before[n], p) for n, p in updater.averaged.items())
        before = {name: p.clone() for name, p in updater.averaged.items()}
    for trace in traces:
        models.observe(updater, trace)
    with monkeypatch.context() as patch:
        # The first optimizer of two has stepped when the last one fails.
        owner = updater.optimizers[-1] if part == "step" else updater
        patch.setattr(owner, part, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            updater.update(steps=1)
    assert list(updater.requests.pending) == traces
    assert all(torch.equal(before[n], p) for n, p in weights(updater).items())
    assert all(p.grad is None for p in updater.parameters.values())
    assert updater.update().steps == 2
    assert not updater.requests.pending


# --- the configuration ----------------------------------------------------------------------------------------------


def test_the_papers_rule() -> None:
    config = OnlineConfig.paper()
    assert (config.num_assistant_tokens, config.update_interval, config.steps_per_update) == (5, 8, 1)
    assert (config.learn_from, config.divergence, config.learning_rate) == ("corrections", "forward_kl", 1e-4)
    assert (config.replay_fraction, config.batch_size) == (0.0, 8)
    assert OnlineConfig.paper(learning_rate=1e-5).learning_rate == 1e-5


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_assistant_tokens", 0, 'at least 1, "auto", or None'),
        ("num_assistant_tokens", "heuristic", 'at least 1, "auto", or None'),
        ("compile_draft", "always", 'True, False, or "auto"'),
        ("compile_target", 1, 'True, False, or "auto"'),
        ("num_logprobs", 0, "at least 1, or None"),
        ("divergence", "kl", "one of forward_kl"),
        ("learn_from", "all", "one of verified"),
        ("update_strategy", "sometimes", "one of spread"),
        ("update_interval", 0, "at least 1"),
        ("buffer_size", "many", "at least 1"),
        ("replay_fraction", 1.5, "between 0 and 1"),
        ("learning_rate", float("inf"), "positive"),
        ("seed", -1, "at least 0"),
    ],
)
def test_values_outside_their_range_are_named(field: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OnlineConfig(**{field: value})
    assert f"`{field}`" in str(caught.value)
    assert rule in str(caught.value)
    assert repr(value) in str(caught.value)


def test_every_field_has_its_help_and_goes_to_json() -> None:
    assert all(f.metadata["help"] for f in fields(OnlineConfig))
    assert OnlineConfig(**OnlineConfig().to_dict()) == OnlineConfig()
    with pytest.raises(AttributeError):
        OnlineConfig().seed = 3  # type: ignore[misc]


def test_corrections_need_a_fixed_number_of_tokens() -> None:
    with pytest.raises(ConfigError, match="nothing would be corrected"):
        OnlineConfig(num_assistant_tokens="auto", learn_from="corrections")


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_float32_muon_steps_as_torch_s_own(shape: tuple[int, int]) -> None:
    start = torch.randn(shape)
    parameters = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    settings: dict[str, Any] = {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [
        kind([p], 0.01, **settings) for kind, p in zip((Float32Muon, torch.optim.Muon), parameters, strict=True)
    ]
    for _ in range(4):
        gradient = torch.randn(shape)
        for p, optimizer in zip(parameters, optimizers, strict=True):
            p.grad = gradient.clone()
            optimizer.step()
    ours, theirs = (p.detach() for p in parameters)
    assert float((ours - theirs).norm()) < 0.03 * float((ours - start).norm())  # theirs is in bfloat16
