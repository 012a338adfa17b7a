"""The memory of a draft that learns: held and planned."""

import copy
import gc
import json
from pathlib import Path
from typing import Any

import held
import models
import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.cli.main import main
from osd_hf.errors import UnsupportedModelError
from osd_hf.learning import drafts as drafts_module
from osd_hf.learning import learner as module
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.updater import Float32Muon as Muon
from osd_hf.learning.weights import adapted, fp32_copy, load_adapter
from osd_hf.memory_plan import memory_plan

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it

CONFIG = OnlineConfig(
    update_strategy="manual", steps_per_update=1, batch_size=4, num_logprobs=8, num_assistant_tokens=5
)
WIDE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "vocab_size": 128}
LORA = LoraConfig(r=1, target_modules=["q_proj"])


def learned(draft: Any, target: Any, peft_config: Any, patch: pytest.MonkeyPatch) -> tuple[Any, dict[str, int]]:
    """An assistant that has served three versions of its own, and what it held: between updates, in a step and while
    a version was tried."""
    most: dict[str, int] = {}

    def watched(when: str, work: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            most[when] = max(most.get(when, 0), held.held_bytes() - before)
            return work(*args, **kwargs)

        return run

    def promoted(version: int, serving: int, domain: Any, *_: Any) -> GateDecision:
        return GateDecision("promoted", version, version, domain, "for the test")

    patch.setattr(module, "judge", promoted)
    patch.setattr(module, "replay_each", watched("trial", module.replay_each))
    patch.setattr(Muon, "step", watched("step", Muon.step))
    gc.collect()
    before = most["start"] = held.held_bytes()
    assistant = OnlineAssistant(target, draft, None, CONFIG, peft_config=peft_config)
    for version in (1, 2, 3):  # the third step comes while there is one that serves and one before it
        for ids in models.prompts(5):
            assistant.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert assistant.update().version == version
    gc.collect()
    most["between"] = held.held_bytes() - before
    return assistant, most


def test_what_serves_is_the_version_and_what_served_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models.pair()
    assistant, _ = learned(draft, target, None, monkeypatch)
    with assistant:
        drafts, serving = assistant.drafts, dict(assistant.draft.named_parameters())
        version = drafts.serving_snapshot(None)
        assert all(serving[name].data_ptr() == weight.data_ptr() for name, weight in version.items())
        number, earlier = drafts.previous(None) or (0, {})
        kept = {name: weight.clone() for name, weight in earlier.items()}
        tried = dict(drafts.trial_model(earlier).named_parameters())
        assert all(torch.equal(tried[name], weight) for name, weight in kept.items())
        assert not any(torch.equal(p, serving[name]) for name, p in tried.items() if p.ndim > 1)
        drafts.roll_back(None, number)
        assert assistant.draft.state_dict().keys() == draft.state_dict().keys()
        assert all(torch.equal(p, kept[name]) for name, p in assistant.draft.named_parameters())
        assert all(torch.equal(p, drafts.base.get_parameter(name)) for name, p in draft.named_parameters())


@pytest.mark.parametrize("compiled", [False, True])
def test_what_no_model_serves_with_lies_in_main_memory(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # The draft is on the CPU, and what stands for main memory elsewhere.
    monkeypatch.setattr(drafts_module, "HOST", torch.device("meta"))
    drafts = DomainDrafts(models.build(num_hidden_layers=1), CONFIG, per_domain=False)
    drafts.updater(None)
    drafts._models.shares_weights = not compiled
    places = []
    for _ in range(2):
        drafts.promote(None, *drafts.candidate(None))
        _, before = drafts.previous(None) or (0, {})
        places.append(
            [{w.device.type for w in weights.values()} for weights in (drafts.serving_snapshot(None), before)]
        )
        assert {p.device.type for p in drafts.model(None).parameters()} == {"cpu"}
    serving = {"meta" if compiled else "cpu"}
    assert places == [[serving, {"cpu"}], [serving, {"meta"}]]  # the draft as it was lies where the base does


KINDS = {
    "lora": LoraConfig(r=2, target_modules="all-linear"),
    "dora": LoraConfig(r=2, target_modules=["q_proj", "lm_head"], use_dora=True),
    "biases": LoraConfig(r=2, target_modules=["q_proj"], bias="all"),
    "whole modules": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "some tokens": LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 4]),
    "decomposed": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="olora"),
    "loha": LoHaConfig(r=2, target_modules=["q_proj"]),
    "ia3": IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_merged_as_peft_does_and_the_base_stays(kind: str, dtype: torch.dtype) -> None:
    _, draft = models.pair(num_hidden_layers=1, attention_bias=kind == "biases")
    drafts = DomainDrafts(draft.to(dtype), CONFIG, peft_config=KINDS[kind], per_domain=False)
    drafts.updater(None)
    version, snapshot = drafts.candidate(None)
    moved = {name: weight + 0.3 * torch.randn_like(weight) for name, weight in snapshot.items()}
    whole = load_adapter(adapted(fp32_copy(draft), KINDS[kind], "default", CONFIG.seed), moved).merge_and_unload()
    drafts.promote(None, version, moved)
    tried = drafts.trial_model(moved)
    for name, expected in whole.named_parameters():
        assert torch.equal(drafts.model(None).get_parameter(name), expected.to(dtype))
        assert torch.equal(tried.get_parameter(name), expected.to(dtype))
    assert all(torch.equal(p, drafts.base.get_parameter(name)) for name, p in draft.named_parameters())


# --- the plan -------------------------------------------------------------------------------------------------------

# Named as the assistant holds them between requests; caches and rows of requests are not there, or no tensors.
HELD = ("draft: as it was", "draft: serving", "draft: version before", "learner: master", "learner: average",
        "learner: optimizer")  # fmt: skip
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("architecture", "dtype", "rank", "changes"),
    [
        ("llama", torch.float32, None, WIDE),
        ("qwen3", torch.bfloat16, None, WIDE | TIED),
        ("llama", torch.float32, 2, WIDE),
        ("qwen3", torch.bfloat16, 2, WIDE | TIED),
        ("t5", torch.float32, None, {"d_model": 96, "d_ff": 256, "vocab_size": 128}),
    ],
)
def test_a_plan_is_what_is_held(
    architecture: str, dtype: torch.dtype, rank: int | None, changes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models.pair(architecture, **changes)
    peft_config = None if rank is None else LoraConfig(r=rank, target_modules="all-linear")
    assistant, most = learned(draft.to(dtype), target, peft_config, monkeypatch)
    with assistant:
        before = most["between"] + most["start"]
        plan = assistant.memory_plan(prompt_tokens=8, new_tokens=6)
        gc.collect()
        assert held.held_bytes() <= before  # nothing was loaded
    parts = {part.name: part.bytes for part in plan.parts}
    between = sum(parts[name] for name in HELD)
    assert between == pytest.approx(most["between"], rel=0.15)
    assert between + parts["learner: gradients"] == pytest.approx(most["step"], rel=0.15)
    assert between + parts["gate: version tried"] == pytest.approx(most["trial"], rel=0.15)
    assert parts["target: weights"] == sum(t.nbytes for t in (*target.parameters(), *target.buffers()))
    assert plan.draft_parameters == sum(p.numel() for p in draft.parameters())


def published(kind: Any, layers: int, hidden: int, heads: int, kv: int, width: int, inner: int, vocab: int,
              tied: bool = False, **more: Any) -> Any:  # fmt: skip
    """A configuration with the figures of a model on the Hub, in bf16."""
    config = kind(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv,
        head_dim=width, intermediate_size=inner, vocab_size=vocab, tie_word_embeddings=tied, **more,
    )  # fmt: skip
    config.dtype = torch.bfloat16
    return config


def counted(config: Any) -> tuple[int, int]:
    """Parameters of a decoder of this kind, and those of the matrices inside its layers, by hand."""
    h, width = config.hidden_size, config.head_dim
    attention = 2 * h * width * (config.num_attention_heads + config.num_key_value_heads)
    matrices = config.num_hidden_layers * (attention + 3 * h * config.intermediate_size)
    kind = config.model_type
    norms = {"llama": 2 * h, "qwen3": 2 * h + 2 * width, "gemma3_text": 4 * h + 2 * width}[kind]
    tables = config.vocab_size * h * (1 if config.tie_word_embeddings else 2)
    return tables + matrices + config.num_hidden_layers * norms + h, matrices


SLIDING = {"sliding_window": 512, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3}
PAIRS = {
    "Qwen3-8B, 0.6B": (
        published(Qwen3Config, 36, 4096, 32, 8, 128, 12288, 151_936),
        published(Qwen3Config, 28, 1024, 16, 8, 128, 3072, 151_936, True),
        (8_190_735_360, 596_049_920),
    ),
    "Llama-3.1-8B, 3.2-1B": (
        published(LlamaConfig, 32, 4096, 32, 8, 128, 14336, 128_256),
        published(LlamaConfig, 16, 2048, 32, 8, 64, 8192, 128_256, True),
        (8_030_261_248, 1_235_814_400),
    ),
    "Vicuna-7B, LLaMA-160M": (
        published(LlamaConfig, 32, 4096, 32, 32, 128, 11008, 32_000),
        published(LlamaConfig, 12, 768, 12, 12, 64, 3072, 32_000),
        (6_738_415_616, 162_417_408),
    ),
    "Gemma-3-4B, 270M": (  # the 4B's text model; the 270M gets its vocabulary
        published(Gemma3TextConfig, 34, 2560, 8, 4, 256, 10240, 262_208, True, sliding_window=1024),
        published(Gemma3TextConfig, 18, 640, 4, 1, 256, 2048, 262_144, True, **SLIDING),
        (3_880_263_168, 268_098_176 + 64 * 640),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_plan_of_a_published_pair_adds_up(name: str) -> None:
    target, draft, (large, small) = PAIRS[name]
    plan = memory_plan(target, draft, OnlineConfig(), prompt_tokens=1024, new_tokens=1024)
    parts = {part.name: part.bytes for part in plan.parts}
    if draft.vocab_size != target.vocab_size:
        draft = published(Gemma3TextConfig, 18, 640, 4, 1, 256, 2048, target.vocab_size, True, **SLIDING)
    assert counted(target)[0] == large and counted(draft)[0] == plan.draft_parameters == small
    matrices = counted(draft)[1]
    slack = 1 << 20  # buffers
    assert 0 <= parts["target: weights"] - 2 * large < slack
    for held_in_bf16 in ("draft: as it came", "draft: as it was", "draft: serving", "draft: version before"):
        assert 0 <= parts[held_in_bf16] - 2 * small < slack
    assert 0 <= parts["learner: master"] - 4 * small < slack
    assert parts["learner: average"] == parts["learner: gradients"] == 4 * small
    assert parts["learner: optimizer"] == 4 * matrices + 8 * (small - matrices)
    lengths = [512 if kind == "sliding_attention" else 2048 for kind in getattr(draft, "layer_types", None) or []]
    positions = sum(lengths) or 2048 * draft.num_hidden_layers  # static caches of a power of two
    assert parts["draft: cache"] == 2 * 2 * draft.num_key_value_heads * draft.head_dim * positions
    on_device = {part.name for part in plan.parts if part.place == "device"}
    assert not on_device & {"draft: version that serves", "draft: version before"}
    held_bytes = sum(parts[part] for part in HELD if part in on_device)
    assert held_bytes / small < 20
    assert (held_bytes + parts["learner: gradients"]) / small < 23
    assert plan.peak_bytes == sum(p.bytes for p in plan.parts if (p.when, p.place) == ("always", "device")) + max(
        sum(p.bytes for p in plan.parts if p.when == when) for when in ("step", "trial")
    )


def test_adapters_of_a_published_draft_take_less_than_nine_bytes_a_parameter() -> None:
    target, draft, (_, small) = PAIRS["Qwen3-8B, 0.6B"]
    plan = memory_plan(target, draft, peft_config=LoraConfig(r=16, target_modules="all-linear"))
    h, q, kv, inner = 1024, 2048, 1024, 3072
    adapter = 16 * 28 * ((h + q) + 2 * (h + kv) + (q + h) + 2 * (h + inner) + (inner + h))
    parts = {part.name: part.bytes for part in plan.parts}
    assert (plan.draft_parameters, plan.learned_parameters) == (small, adapter)
    assert parts["learner: average"] == parts["learner: optimizer"] == 4 * adapter
    assert sum(parts[name] for name in HELD) / small < 9


def test_quantized_weights_of_a_target_have_the_bits_that_they_name() -> None:
    target, draft, (large, _) = PAIRS["Vicuna-7B, LLaMA-160M"]
    matrices = counted(target)[1]
    for quantization, bits in [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
    ]:
        config = copy.deepcopy(target)
        config.quantization_config = quantization
        expected = matrices * bits / 8 + 2 * (large - matrices)
        (weights, *_) = memory_plan(config, draft).parts
        assert weights.bytes == pytest.approx(expected, rel=1e-4)
    config.quantization_config = {"quant_method": "of tomorrow"}
    with pytest.raises(UnsupportedModelError, match="names no bits per weight"):
        memory_plan(config, draft)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """A pair without weights."""
    for name, model in zip(("target", "draft"), models.pair(), strict=True):
        model.config.save_pretrained(tmp_path / name)
    return [str(tmp_path / "target"), str(tmp_path / "draft")]


def test_the_command_reads_configurations_alone(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt-tokens", "8", "--max-new-tokens", "8", "--device-memory", "100MB"]
    assert main(["env", *folders, *sizes, "--optimizer", "adamw", "--json", "-"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    parts = {part["name"]: part["bytes"] for part in report["parts"]}
    assert parts["learner: optimizer"] == 8 * report["draft_parameters"]
    assert report["peak_bytes"] > report["always_bytes"] > sum(parts[name] for name in HELD)
    assert report["fits"] == (report["peak_bytes"] <= 100e6)
    assert "draft: version before" in printed.err and "in 100MB: " in printed.err
    assert main(["env", *folders, *sizes, "--lora-rank", "2", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["learned_parameters"] < report["draft_parameters"] / 4


def test_a_size_that_is_none_is_refused(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", *folders, "--device-memory", "a lot"]) == 2
    assert "--device-memory must be a size such as 24GB or 80GiB, got 'a lot'" in capsys.readouterr().err


def test_a_target_may_be_quantized_as_it_is_loaded(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    weights = []
    for bits in ([], ["--target-bits", "8"], ["--target-bits", "4"]):
        assert main(["env", *folders, *bits, "--json", "-"]) == 0
        parts = {part["name"]: part["bytes"] for part in json.loads(capsys.readouterr().out)["parts"]}
        weights.append(parts["target: weights"])
        assert parts["learner: gradients"]  # of the draft, whose weights stay as they are
    target = models.pair()[0]
    linear = sum(m.weight.numel() for m in target.model.modules() if isinstance(m, torch.nn.Linear))
    assert weights[0] - weights[1] == 3 * linear
    assert weights[1] - weights[2] == pytest.approx(linear * (8 - 4.5) / 8, abs=1)
