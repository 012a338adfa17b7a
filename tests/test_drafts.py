import copy
import json
import logging
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import same, weights
from peft import LoraConfig, PrefixTuningConfig, get_peft_model, set_peft_model_state_dict

from osd_hf import OnlineConfig, Trace
from osd_hf.errors import ConfigError, StateError, UnsupportedModelError
from osd_hf.learning import drafts as drafts_module
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.weights import Snapshot
from osd_hf.models import merged as merged_model

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it

CONFIG = OnlineConfig(
    update_strategy="interval", batch_size=4, steps_per_update=2, num_logprobs=8, optimizer="adamw", learning_rate=1e-2
)
KINDS = ["adapters", "copies"]


def lora(targets: Any = "all-linear", r: int = 4) -> LoraConfig:
    return LoraConfig(r=r, lora_alpha=8, target_modules=targets)


def made(kind: str, config: OnlineConfig = CONFIG, draft: Any = None, **changes: Any) -> DomainDrafts:
    draft = models.pair(**{"num_hidden_layers": 1, **changes})[1] if draft is None else draft
    return DomainDrafts(draft, config, peft_config=lora() if kind == "adapters" else None)


def promote(drafts: DomainDrafts, domain: str | None, seed: int = 0) -> tuple[int, Snapshot]:
    """Let a version with other weights serve, as if it had been learned."""
    assert drafts.admit(domain)
    drafts.updater(domain)
    version, snapshot = drafts.candidate(domain)
    generator = torch.Generator().manual_seed(seed)
    moved = {name: w + 0.3 * torch.randn(w.shape, generator=generator).to(w.dtype) for name, w in snapshot.items()}
    drafts.promote(domain, version, moved, f"target {version}")
    return version, moved


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    ids = models.prompt(9)
    if model.config.is_encoder_decoder:
        return model(input_ids=ids, decoder_input_ids=models.prompt(5, seed=3)).logits
    return model(ids).logits


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return models.recorded(*models.pair(), 6, max_new_tokens=8)


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_not_learned_is_served_by_the_base(kind: str) -> None:
    _, draft = models.pair()
    before = weights(draft)
    drafts = made(kind, draft=draft)
    assert drafts.base is not draft
    assert drafts.admit("a")
    drafts.updater("a")  # it learns, and nothing of it serves
    for domain in (None, "a", "never seen"):
        assert drafts.model(domain) is drafts.base
        with drafts.lease(domain) as serving:
            assert (serving.model is drafts.base, serving.version) == (True, 0)
    assert drafts.domains == ("a",)
    assert not drafts.held
    assert same(weights(drafts.base), before)
    assert not drafts.admit(None)
    promote(drafts, "a")
    assert drafts.model("a") is not drafts.base
    assert drafts.model("b") is drafts.base
    assert {drafts.model("a"), drafts.base} <= set(drafts.models) and draft not in drafts.models
    assert same(weights(draft), before)


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("architecture", "targets", "changes"),
    [
        ("llama", "all-linear", {}),
        ("llama", ["q_proj", "lm_head"], TIED),
        ("llama", ["q_proj", "embed_tokens"], TIED),
        ("gpt2", ["c_attn"], {}),
        ("t5", ["q", "wo"], {}),
        ("t5", ["q", "lm_head"], TIED),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # of peft, which we mend
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_a_merged_draft_speaks_as_its_adapter(architecture: str, targets: Any, changes: Any) -> None:
    _, draft = models.pair(architecture, **changes)
    before = logits(draft)
    drafts = DomainDrafts(draft, CONFIG, peft_config=lora(targets))
    _, learned = promote(drafts, "a")
    merged = logits(drafts.model("a"))
    plain = get_peft_model(copy.deepcopy(draft), lora(targets)).eval()
    set_peft_model_state_dict(plain, learned)
    torch.testing.assert_close(logits(plain), merged, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(merged_model(plain)), merged, atol=1e-4, rtol=1e-4)
    assert (merged - before).abs().max() > 0.1
    assert torch.equal(logits(draft), before)
    assert torch.equal(logits(drafts.base), before)


@pytest.mark.parametrize("kind", KINDS)
def test_learning_one_domain_leaves_the_others_alone(kind: str, traces: list[Trace]) -> None:
    drafts = made(kind)
    for domain in ("a", "b"):
        promote(drafts, domain)
    models.observe(drafts.updater("b"), traces[5])
    drafts.updater("b").update()
    base, other, learned = weights(drafts.base), weights(drafts.model("b")), drafts.updater("b").snapshot()
    taught = drafts.updater("a")
    start = taught.snapshot()
    for trace in traces[:4]:
        models.observe(taught, trace)
    assert taught.update().steps == 2
    drafts.promote("a", *drafts.candidate("a"))
    assert not same(taught.snapshot(), start)
    assert not same(weights(drafts.model("a")), base)
    assert same(weights(drafts.base), base)
    assert same(weights(drafts.model("b")), other)
    assert same(drafts.updater("b").snapshot(), learned)
    assert len(drafts.updater("b").buffer) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_promotion_leaves_what_is_in_use_alone(kind: str) -> None:
    drafts = made(kind)
    first, _ = promote(drafts, "a", seed=1)
    with drafts.lease("a") as old:
        held = weights(old.model)
        for seed in (2, 3):
            version, _ = promote(drafts, "a", seed=seed)
            with drafts.lease("a") as new:
                assert (new.version, drafts.serving_version("a")) == (version, version)
                assert not same(weights(new.model), held)
            assert (old.version, old.model is new.model) == (first, False)
        assert same(weights(old.model), held)
    assert len(drafts.held) == 1
    with drafts.lease("a") as serving:
        assert serving.version == version


@pytest.mark.parametrize("kind", KINDS)
def test_an_earlier_version_serves_again(kind: str) -> None:
    drafts = made(kind)
    first, snapshot = promote(drafts, "a", seed=1)
    held = weights(drafts.model("a"))
    promote(drafts, "a", seed=2)
    with torch.no_grad():
        next(drafts.model("a").parameters()).fill_(torch.nan)  # gone wrong by itself
    assert same(drafts.roll_back("a", first), snapshot)
    assert drafts.serving("a").target_version == f"target {first}"
    assert drafts.serving_version("a") == first
    assert same(weights(drafts.model("a")), held)
    assert drafts.previous("a").number == 0
    start = drafts.roll_back("a", 0)
    assert drafts.model("a") is drafts.base
    assert drafts.serving("a").target_version is None
    assert drafts.serving_version("a") == 0
    drafts.promote("a", 9, start)
    ours, theirs = (logits(models.double(model)) for model in (drafts.model("a"), drafts.base))
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def test_what_cannot_be_made_ready_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafts = made("copies")
    promote(drafts, "a")
    version, snapshot = drafts.candidate("a")

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(drafts_module, "write_snapshot", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            drafts.promote("a", version, snapshot, "another")
        assert (drafts.serving_version("a"), drafts.serving("a").target_version) == (1, "target 1")  # as before
        with drafts.lease("a") as serving, caplog.at_level(logging.ERROR):
            assert serving.version in (0, 1)
    with drafts.lease("a") as serving:
        assert serving.version == 1


def test_further_domains_take_the_base_draft(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts_module, "MAX_DRAFTS", 2)
    drafts = made("copies")
    with caplog.at_level(logging.WARNING):
        assert [drafts.admit(domain) for domain in "abcacdb"] == [True, True, False, True, False, False, True]
    assert len(caplog.records) == 1
    assert "the maximum" in caplog.text
    assert drafts.domains == ("a", "b")
    assert (drafts.key("c"), drafts.model("c") is drafts.base) == (None, True)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_request_is_published(kind: str, traces: list[Trace], tmp_path: Path) -> None:
    drafts = made(kind)
    assert drafts.admit("a")
    for trace in traces:
        models.observe(drafts.updater("a"), trace)
    drafts.updater("a").update()
    drafts.promote("a", *drafts.candidate("a"))
    drafts.model("a").save_pretrained(tmp_path)
    files = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in files} == {"config.json", "generation_config.json", "model.safetensors"}
    for trace in traces:
        for ids in (trace.prompt_ids, trace.completion_ids):
            listed = ids.tolist()
            forms = [ids.astype(kind).tobytes() for kind in ("<u2", "<i4", "<i8")]
            forms += [json.dumps(listed).encode(), json.dumps(listed, indent=1).encode(), repr(listed).encode()]
            assert not any(form in data for form in forms for data in files.values())


@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in KINDS), ("copies", TIED)])
def test_a_state_comes_back(kind: str, changes: Any, tmp_path: Path) -> None:
    drafts = made(kind, **changes)
    for seed, domain in enumerate("abb"):
        promote(drafts, domain, seed)
    assert drafts.admit("c")
    torch.save(drafts.state_dict(), tmp_path / "state.pt")
    again = made(kind, **changes)
    promote(again, "a", seed=7)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (again.version, again.domains) == (drafts.version, drafts.domains)
    for domain in (None, "a", "b", "c"):
        assert again.serving_version(domain) == drafts.serving_version(domain)
        assert again.serving(domain).target_version == drafts.serving(domain).target_version
        assert same(weights(again.model(domain)), weights(drafts.model(domain)))
    ours, theirs = again.previous("b"), drafts.previous("b")
    assert ours[0] == theirs[0] > 0 and same(ours[1], theirs[1])
    again.roll_back("b", ours[0])
    assert again.serving("b").target_version == f"target {ours[0]}"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (("adapters", {}), ("adapters", {"hidden_size": 16})),
        (("copies", {}), ("copies", {"hidden_size": 16})),
        (("copies", {}), ("copies", {"num_hidden_layers": 2})),
        (("copies", {}), ("adapters", {})),
        (("adapters", {}), ("rank", {})),
    ],
)
def test_drafts_of_another_base_are_refused(ours: Any, theirs: Any) -> None:
    def drafts(kind: str, changes: Any) -> DomainDrafts:
        if kind == "rank":
            return DomainDrafts(models.pair(num_hidden_layers=1, **changes)[1], CONFIG, peft_config=lora(r=8))
        return made(kind, **changes)

    saved, other = drafts(*theirs), drafts(*ours)
    promote(saved, "a")
    promote(other, "b")
    before = weights(other.model("b"))
    with pytest.raises(StateError):
        other.load_state_dict(saved.state_dict())
    assert other.domains == ("b",)
    assert same(weights(other.model("b")), before)


@pytest.mark.parametrize(
    "peft_config", [PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), lora(["no_such_layer"]), "lora"]
)
def test_adapters_that_do_not_fit_are_refused(peft_config: Any) -> None:
    with pytest.raises((UnsupportedModelError, ConfigError)):
        DomainDrafts(models.pair()[1], CONFIG, peft_config=peft_config)


def test_adapters_touch_neither_random_numbers_nor_their_configuration() -> None:
    _, draft = models.pair()
    peft_config = lora()
    before, state = copy.deepcopy(peft_config.to_dict()), torch.get_rng_state()
    drafts = DomainDrafts(draft, CONFIG, peft_config=peft_config)
    for domain in "abc":
        promote(drafts, domain)
    assert torch.equal(torch.get_rng_state(), state)
    assert peft_config.to_dict() == before
    assert not hasattr(draft, "peft_config")


def test_no_adapter_trains_with_dropout() -> None:
    drafts = DomainDrafts(
        models.pair()[1], CONFIG, peft_config=LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5)
    )
    for domain in "abc":
        assert drafts.admit(domain)
        assert not any(module.training for module in drafts.updater(domain).master.modules())
