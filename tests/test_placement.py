"""Where a draft learns, in which precision, and with which attention."""

from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from peft import LoraConfig
from transformers import AttentionInterface

from osd_hf import OnlineConfig, Trace
from osd_hf.errors import ConfigError
from osd_hf.learning import updater as updater_module
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.learner import Learner
from osd_hf.learning.updater import Updater
from osd_hf.learning.weights import Snapshot, learns_in_bf16
from osd_hf.recording import record_traces

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it

CONFIG = OnlineConfig(
    num_assistant_tokens=5, update_strategy="manual", steps_per_update=2, batch_size=4, num_logprobs=8, gate=False
)
LORA = LoraConfig(r=2, target_modules=["q_proj"])


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    prompts = [ids[0].tolist() for ids in models.prompts(4)]
    return list(record_traces(models.build(), prompts, max_new_tokens=6, num_logprobs=8))


def taught(traces: list[Trace], config: OnlineConfig, *, elsewhere: bool = False, **kind: Any) -> tuple[Any, Snapshot]:
    """The drafts after an update, and the master's weights; `elsewhere`: what serves has no data at all."""
    drafts = DomainDrafts(models.pair(num_hidden_layers=1)[1].to(torch.bfloat16), config, **kind)
    learner, domain = Learner(drafts), "a" if drafts.per_domain else None
    for trace in traces:
        learner.observe(domain, trace)
    updater = learner.drafts.updater(domain)
    if elsewhere:
        drafts.base.to("meta")
        updater.update()
        drafts.promote(domain, *drafts.candidate(domain))
    else:
        learner.update(domain)
    return drafts, {name: p.detach().clone() for name, p in updater.parameters.items()}


KINDS: dict[str, dict[str, Any]] = {
    "whole": {"per_domain": False}, "adapters": {"per_domain": False, "peft_config": LORA},
    "adapters per domain": {"peft_config": LORA},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_on_a_device_that_is_named_learns_the_same(kind: str, traces: list[Trace]) -> None:
    drafts, expected = taught(traces, CONFIG, **KINDS[kind])
    apart, found = taught(traces, replace(CONFIG, learner_device="cpu"), **KINDS[kind])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    (domain,) = drafts.learning
    served = dict(drafts.model(domain).named_parameters())
    assert all(torch.equal(p, served[name]) for name, p in apart.model(domain).named_parameters())


def test_nothing_but_the_version_goes_to_where_the_draft_serves(traces: list[Trace]) -> None:
    # A tensor on the meta device next to one that is not makes almost every operator fail.
    _, expected = taught(traces, CONFIG, per_domain=False)
    config = replace(CONFIG, learner_device="cpu")
    drafts, found = taught(traces, config, elsewhere=True, per_domain=False)
    assert all(p.device.type == "cpu" and torch.equal(p, expected[name]) for name, p in found.items())
    version = drafts.serving(None).weights
    assert {(w.device.type, w.dtype) for w in version.values()} == {("meta", torch.bfloat16)}
    assert {p.device.type for p in drafts.model(None).parameters()} == {"meta"}


def test_a_session_of_another_device_serves_where_the_draft_does(traces: list[Trace]) -> None:
    state = taught(traces, CONFIG, per_domain=False)[0].state_dict()
    drafts = DomainDrafts(models.pair(num_hidden_layers=1)[1].to(torch.bfloat16), CONFIG, per_domain=False)
    drafts.base.to("meta")
    drafts.load_state_dict(state)
    assert drafts.serving_version() == 1
    assert {w.device.type for w in drafts.serving(None).weights.values()} == {"meta"}


@pytest.mark.parametrize("name", ["cuda:63", "meta", "gpu", "cuda:one"])
def test_a_device_that_is_not_here_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`learner_device` must be a device of this machine, got '{name}'"):
        DomainDrafts(models.build(num_hidden_layers=1), replace(CONFIG, learner_device=name))


def test_bf16_is_for_half_precision_drafts_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # is ignored
    half, other = (torch.bfloat16, torch.float16), torch.device("mps")
    assert [learns_in_bf16(dtype, other) for dtype in (*half, torch.float32)] == [True, True, False]
    assert not any(learns_in_bf16(dtype, torch.device("cpu")) for dtype in (*half, torch.float32))


def test_steps_are_in_fp32_while_forwards_compute_in_bf16(
    traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = models.pair(num_hidden_layers=1)[1]
    plain = Updater(draft, CONFIG)
    monkeypatch.setattr(updater_module, "learns_in_bf16", lambda *_: True)
    updater = Updater(draft, CONFIG)
    seen: list[torch.dtype] = []
    for module in updater.master.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    for one in (updater, plain):
        for trace in traces:
            models.observe(one, trace)
    assert updater.update().steps == plain.update().steps == 2
    assert torch.bfloat16 in seen
    assert {p.dtype for p in updater.parameters.values()} == {torch.float32}
    assert not all(torch.equal(p, plain.parameters[name]) for name, p in updater.parameters.items())
    rate = CONFIG.learning_rate
    for name, p in updater.parameters.items():  # two steps of about the rate, whatever the sign of a small gradient
        torch.testing.assert_close(p, plain.parameters[name], rtol=0, atol=8 * rate)


def half_only(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """As a flash kernel would: nothing but half precision."""
    assert query.dtype != torch.float32, "FlashAttention only supports fp16 and bf16"
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("peft_config", [None, LORA])
def test_a_draft_of_a_kernel_for_half_precision_learns(peft_config: Any, traces: list[Trace]) -> None:
    AttentionInterface.register("flash_of_a_test", half_only)
    draft = models.pair(num_hidden_layers=1)[1].to(torch.bfloat16)
    draft.config._attn_implementation = "flash_of_a_test"
    drafts = DomainDrafts(draft, CONFIG, peft_config=peft_config, per_domain=False)
    learner = Learner(drafts)
    for trace in traces:
        learner.observe(None, trace)
    assert learner.update().steps == 2
    assert learner.drafts.updater(None).master.config._attn_implementation == "sdpa"
    for serving in (draft, drafts.base, drafts.model(None)):
        assert serving.config._attn_implementation == "flash_of_a_test"
