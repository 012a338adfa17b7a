"""The families of models that people pair, tiny and with random weights: each served while its draft learns, or
refused as transformers refuses it. `docs/models.md` has the same table."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import models
import peft
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.errors import ConfigError, UnsupportedModelError
from osd_hf.layers import copy_layers, num_layers_of
from osd_hf.loading import load_pair
from osd_hf.models import quantization_config
from osd_hf.recording import record_traces

SIZES: dict[str, Any] = {
    "vocab_size": models.VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,  # tied, many repeat one token
}  # fmt: skip
ALTERNATING = {"sliding_window": models.WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {
    "mamba_d_ssm": 16, "mamba_d_state": 4, "mamba_expand": 2, "mamba_n_heads": 2, "mamba_d_head": 8,
    "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
EXACT: dict[str, dict[str, Any]] = {
    "bloom": {}, "cohere": {"logit_scale": 0.25}, "cohere2": {"logit_scale": 0.25, **ALTERNATING},
    "deepseek_v3": {
        **EXPERTS, "num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
    "falcon": {"multi_query": True}, "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, **ALTERNATING},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, **ALTERNATING},
    "glm4": {"head_dim": 8}, "gpt_neox": {}, "gpt_oss": {"head_dim": 8, **EXPERTS, **ALTERNATING},
    "granite": {"logits_scaling": 8.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "lfm2": {"layer_types": ["conv", "full_attention"]}, "llama": {"rope_parameters": SCALED},
    "llama4_text": {
        **EXPERTS, "head_dim": 8, "intermediate_size_mlp": 32, "attention_chunk_size": 8, "moe_layers": [0],
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "mixtral": EXPERTS, "olmo2": {}, "olmo3": ALTERNATING, "phi3": {}, "qwen2": {},
    "qwen3_moe": {"head_dim": 8, **EXPERTS}, "smollm3": {"no_rope_layers": [1, 0]},
}  # fmt: skip
LINEAR = {f"linear_{name}": 2 if name.startswith("num") else 8
          for name in ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")}  # fmt: skip
# What has a state. As a draft, only beside attention layers, from which tokens can be taken back.
STATEFUL: dict[str, tuple[dict[str, Any], bool]] = {
    "falcon_h1": (MAMBA, True),
    "jamba": ({**MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}, True),
    "mamba": ({"state_size": 4}, False),
    "qwen3_next": ({
        **EXPERTS, **LINEAR, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 16,
    }, True),
    "recurrent_gemma": ({"block_types": ["recurrent", "attention"], "lru_width": 16, "head_dim": 8}, False),
}  # fmt: skip

LEARNING = OnlineConfig(
    update_strategy="manual", steps_per_update=1, gate=False, optimizer="adamw", learning_rate=3e-3
)
PROMPT = models.prompt(5)


def family(name: str, seed: int = 0, **changes: Any) -> Any:
    own = EXACT[name] if name in EXACT else STATEFUL[name][0]
    config = AutoConfig.for_model(name, **{**SIZES, **own, **changes})
    return models.loud(AutoModelForCausalLM.from_config(config), seed)


def greedy(generate: Callable[..., Any], ids: torch.Tensor = PROMPT, **settings: Any) -> list[int]:
    mask = torch.ones_like(ids)
    settings = {"do_sample": False, "max_new_tokens": models.WINDOW + 4, **settings}
    return generate(ids, attention_mask=mask, **settings)[0].tolist()  # type: ignore[no-any-return]


def served(target: Any, draft: Any, tokenizer: Any = None, *, prompt: torch.Tensor = PROMPT, **how: Any) -> Any:
    """The assistant of a pair, after requests that were answered as the target answers alone, before and after an
    update: with measured and with fixed k, greedy, and sampled where the likeliest token alone is left."""
    alone = greedy(target.generate, prompt)
    assert len(set(alone[prompt.shape[1] :])) > 1
    assistant = OnlineAssistant(target, draft, tokenizer, LEARNING, **how)
    assert assistant.drafting is not None
    assistant.drafting.clock = models.ForwardTime({target: 1.0, assistant.draft: 0.1})
    fixed, sampled = {"num_assistant_tokens": 3}, {"do_sample": True, "top_k": 1}
    assert greedy(assistant.generate, prompt) == greedy(assistant.generate, prompt, **fixed) == alone
    assistant.update()
    assert greedy(assistant.generate, prompt) == greedy(assistant.generate, prompt, **fixed, **sampled) == alone
    assert assistant.version == 1
    assert assistant.stats.drafted
    return assistant


@pytest.mark.parametrize("name", EXACT)
def test_families_are_served_exactly_while_the_draft_learns(name: str, tmp_path: Path) -> None:
    target = family(name)
    assistant = served(target, models.draft_of(target, 0.2))
    assert 0 < assistant.stats.alpha < 1  # some are accepted, others taken back
    assistant.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(target)
    assert all(map(torch.equal, again.state_dict().values(), assistant.draft.state_dict().values()))
    assert greedy(target.generate, assistant_model=again) == greedy(target.generate)  # transformers assists it as well


@pytest.mark.parametrize("name", STATEFUL)
def test_a_stateful_target_is_served_exactly(name: str, caplog: pytest.LogCaptureFixture) -> None:
    target = family(name)
    with pytest.raises(ValueError, match="stateful"):
        greedy(target.generate, assistant_model=family("llama"))
    with pytest.raises(UnsupportedModelError, match="some are recurrent|is stateful"):
        copy_layers(target, (0,))
    # Mamba's scan of several tokens ignores the state.
    if name in ("falcon_h1", "qwen3_next"):
        assistant = served(target, models.draft_of(target, 0.2))
        assert 0 < assistant.stats.alpha < 1
        return
    assistant = OnlineAssistant(target, family("llama"), config=LEARNING)
    assert greedy(assistant.generate) == greedy(target.generate)
    assert caplog.text.count("answers without speculation") == 1


@pytest.mark.parametrize("name", EXACT)
def test_families_are_cut_up(name: str) -> None:
    target = family(name)
    piece = copy_layers(target, (1,))
    assert num_layers_of(piece) == 1
    layers = next(module for module in target.get_decoder().modules() if isinstance(module, torch.nn.ModuleList))

    def skip(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        return (states, *output[1:]) if isinstance(output, tuple) else states

    layers[0].register_forward_hook(skip, with_kwargs=True)
    with torch.no_grad():
        expected, found = (model(PROMPT, use_cache=False).logits for model in (target, piece))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_stateful_draft_serves_where_transformers_lets_it(name: str) -> None:
    target, draft = family("llama"), models.fixed_k(family(name, 1), 3)
    if STATEFUL[name][1]:
        assert greedy(target.generate, assistant_model=draft) == greedy(target.generate)
        served(target, draft)
        return
    with pytest.raises((ValueError, TypeError)):
        greedy(target.generate, assistant_model=draft)
    with pytest.raises(UnsupportedModelError, match="is stateful"):
        OnlineAssistant(target, draft)


@pytest.mark.parametrize("side", ["draft", "target"])
def test_convolutions_with_a_state_are_not_compiled(side: str, caplog: pytest.LogCaptureFixture) -> None:
    target = family("lfm2")
    config = OnlineConfig(update_strategy="manual", **{f"compile_{side}": True})
    assistant = OnlineAssistant(target, models.draft_of(target), config=config)
    assert greedy(assistant.generate) == greedy(target.generate)
    why = "it has layers other than full attention and sliding windows"
    assert f"The {side} is not compiled and runs eagerly: {why}" in caplog.text


def test_gemma3_with_images_is_drafted_for_by_one_without(tmp_path: Path) -> None:
    text = {**SIZES, **EXACT["gemma3_text"], "vocab_size": 72}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    images = {"mm_tokens_per_image": 4, "image_token_index": 64, "boi_token_index": 65, "eoi_token_index": 66,
              "tie_word_embeddings": False}  # fmt: skip
    target = models.loud(
        Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **images))
    )
    draft = family("gemma3_text")
    for model in (target, draft):
        model.generation_config.cache_implementation = "hybrid"  # as in their repos
    tokenizer = models.tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert tokenizer.get_vocab()["<image>"] == 64
    served(target, draft, tokenizer).save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 72
    assert draft.config.vocab_size == 64


class Int8Linear(torch.nn.Linear):
    """Weights of eight bits, as quantized models have them."""

    def __init__(self, linear: Any) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = torch.nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_parameter("bias", linear.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(states, self.weight.float() * self.scale, self.bias)


def quantized(model: Any) -> Any:
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, torch.nn.Linear):
                layer.set_submodule(name, Int8Linear(linear))
    return model


def test_a_quantized_target_is_served_exactly() -> None:
    plain = family("llama")
    served(quantized(plain), models.draft_of(plain))


@pytest.mark.parametrize("peft_config", [None, peft.LoraConfig(r=2, target_modules=["q_proj"])])
@pytest.mark.parametrize(("make", "words"), [(quantized, "is quantized"), (accelerate.cpu_offload, "are offloaded")])
def test_a_draft_that_cannot_learn_is_refused(make: Any, words: str, peft_config: Any) -> None:
    target = family("llama")
    with pytest.raises(UnsupportedModelError, match=words):
        OnlineAssistant(target, make(copy.deepcopy(target)), peft_config=peft_config)


def test_an_offloaded_target_is_served_exactly(tmp_path: Path) -> None:
    plain = family("llama")
    parts = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), "cpu")
    places = {**parts, "model.layers.1": "disk", "lm_head": "disk"}
    dispatched = accelerate.dispatch_model(copy.deepcopy(plain), places, main_device="cpu", offload_dir=str(tmp_path))
    offloaded = accelerate.cpu_offload(copy.deepcopy(plain), execution_device=torch.device("cpu"))
    assert offloaded.device.type == "meta"
    for target in (dispatched, offloaded):
        served(target, models.draft_of(plain))
        (trace,) = record_traces(target, [PROMPT[0].tolist()], max_new_tokens=8)
        assert trace.completion_ids.tolist() == greedy(plain.generate)[PROMPT.shape[1] :][:8]


def test_an_offloaded_target_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    plain = family("llama")
    target = accelerate.cpu_offload(copy.deepcopy(plain), execution_device=torch.device("cpu"))
    config = OnlineConfig(update_strategy="manual", compile_target=True)
    assistant = OnlineAssistant(target, models.draft_of(plain), config=config)
    assert greedy(assistant.generate) == greedy(plain.generate)
    assert "runs eagerly: its weights are offloaded" in caplog.text


def test_hooks_of_accelerate_on_a_draft_go_along() -> None:
    target = family("llama")
    draft = accelerate.dispatch_model(models.draft_of(target), {"": "cpu"}, force_hooks=True)
    served(target, draft)


def test_flags_of_loading_reach_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("target", "draft"):
        family("llama").save_pretrained(tmp_path / name)
    models.tokenizer().save_pretrained(tmp_path / "target")
    given = models.noted_loading(monkeypatch)
    monkeypatch.setattr("osd_hf.models.quantization_config", lambda *named: named)
    both = {"dtype": "float32", "attn_implementation": "eager", "trust_remote_code": True}
    how: dict[str, Any] = {"quantization": "8bit", "revision": "v1", "draft_revision": "v2", "device": "cpu", **both}
    load_pair(str(tmp_path / "target"), str(tmp_path / "draft"), **how)
    assert given == {
        "target": {**both, "revision": "v1", "device_map": "cpu", "quantization_config": ("8bit", "float32")},
        "draft": {**both, "revision": "v2"},
    }


@pytest.mark.parametrize(
    ("name", "value"), [("quantization", "int8"), ("draft_revision", "v1"), ("dtype", "float16"), ("revision", "v1")]
)
def test_the_bundled_pair_is_loaded_as_it_is(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` needs a target and a draft by name"):
        load_pair(**{name: value})


@pytest.mark.parametrize(("name", "package"), [("4bit", "bitsandbytes"), ("int8", "torchao")])
def test_a_quantization_names_the_package_it_needs(name: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        quantization_config(name)


def test_the_table_of_the_documentation_names_what_is_tested() -> None:
    root = Path(__file__).parents[1]
    table = (root / "docs" / "models.md").read_text()
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| ")][1:]
    named = {name: row[3] for row in rows for name in re.findall(r"`(\w+)`[,)]", row[1])}
    assert set(named) == {*EXACT, *STATEFUL, *models.ARCHITECTURES, "gemma3"}
    exact = [name for name, answers in named.items() if "refused" not in answers]
    assert f"{len(exact)} model types" in (root / "README.md").read_text()
    assert transformers.__version__.split(".")[0] in table
