"""What is called of transformers without being public there: fails first when something moves."""

import inspect
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import PEFT_TYPE_TO_TUNER_MAPPING, LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    MambaForCausalLM,
    PreTrainedModel,
    StaticCache,
)
from transformers.generation import candidate_generator
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from osd_hf.decoding import request as capture


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "_assisted_decoding",
            "input_ids logits_processor stopping_criteria generation_config assistant_model assistant_tokenizer "
            "inputs_tensor streamer",
        ),
        (
            "_get_candidate_generator",
            "generation_config input_ids inputs_tensor logits_processor model_kwargs assistant_model",
        ),
        (
            "_sample",
            "input_ids logits_processor stopping_criteria generation_config synced_gpus streamer model_kwargs",
        ),
        ("_get_logits_processor", "generation_config input_ids_seq_length encoder_input_ids device model_kwargs"),
        ("_prepare_special_tokens", "generation_config kwargs_has_attention_mask device"),
        ("prepare_inputs_for_generation", "input_ids next_sequence_length past_key_values is_first_iteration"),
    ],
)
def test_methods_of_models(name: str, expected: str) -> None:
    assert set(expected.split()) <= parameters(getattr(GenerationMixin, name))


def test_methods_of_candidate_generators() -> None:
    assert {"input_ids"} <= parameters(AssistedCandidateGenerator.get_candidates)
    assert parameters(AssistedCandidateGenerator.update_candidate_strategy) == {
        "self",
        "input_ids",
        "scores",
        "num_matches",
    }
    assert issubclass(
        candidate_generator.AssistedCandidateGeneratorDifferentTokenizers, AssistedCandidateGenerator
    )  # told apart by type, not isinstance


def test_the_loop_calls_the_generator_as_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models.pair()
    calls: list[tuple[str, int]] = []
    propose, adapt = AssistedCandidateGenerator.get_candidates, AssistedCandidateGenerator.update_candidate_strategy

    def get_candidates(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        calls.append(("get_candidates", input_ids.shape[1]))
        return propose(self, input_ids, **kwargs)

    def update_candidate_strategy(self: Any, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> Any:
        calls.append(("update_candidate_strategy", input_ids.shape[1]))
        assert scores.dtype == torch.float32
        return adapt(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", get_candidates)
    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", update_candidate_strategy)
    ids = models.prompt()
    output = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=12)
    assert [name for name, _ in calls] == ["get_candidates", "update_candidate_strategy"] * (len(calls) // 2)
    lengths = [length for _, length in calls]
    assert lengths[0] == 6
    assert lengths[1:-1:2] == lengths[2::2]  # what a round emitted is what the next one begins with
    assert lengths[-1] == output.shape[1]


def test_settings_that_are_read_exist() -> None:
    known = GenerationConfig().to_dict() | dict.fromkeys(GenerationConfig._get_default_generation_params())
    assert set(capture.SAMPLING_FIELDS) - {"forced_bos_token_id"} <= set(known) | set(vars(GenerationConfig()))


def test_warpers_are_those_that_sampling_adds() -> None:
    target = models.build()
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "top_h": 0.5,
                "typical_p": 0.5, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1}  # fmt: skip
    config = GenerationConfig(**settings)
    target._prepare_special_tokens(config, True)
    assert len(target._get_logits_processor(config, model_kwargs={})) == len(settings) - 1
    assert set(settings) - {"do_sample"} == set(capture.NO_WARPING)
    for name, neutral in capture.NO_WARPING.items():
        setattr(config, name, neutral)
    assert len(target._get_logits_processor(config, model_kwargs={})) == 0


# --- what lean drafting leans on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_models_say_whether_they_take_logits_to_keep(architecture: str) -> None:
    model = models.build(architecture)
    assert isinstance(model, PreTrainedModel)
    takes = "logits_to_keep" in parameters(model.forward)
    assert model._supports_logits_to_keep() == takes
    assert takes or model.config.is_encoder_decoder


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
def test_dynamic_caches_take_tokens_back(architecture: str) -> None:
    model = models.double(models.build(architecture))
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    ids = models.prompt(30)
    with torch.no_grad():
        expected = model(ids).logits[0, -1]
        model(ids[:, :20], past_key_values=cache)
        cache.crop(0)
        assert cache.get_seq_length() == 20
        model(torch.cat([ids[:, 20:22], models.prompt(4, seed=8)], dim=1), past_key_values=cache)
        cache.crop(-4)
        assert cache.get_seq_length() == 22
        logits = model(ids[:, 22:], past_key_values=cache).logits[0, -1]
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
    held = {layer.keys.shape[2] for layer in cache.layers if layer.is_sliding}
    assert architecture == "llama" or max(held) > models.WINDOW  # until it is cropped, with 0 too
    cache.crop(0)
    assert all(layer.keys.shape[2] < models.WINDOW for layer in cache.layers if layer.is_sliding)


def test_a_static_cache_is_set_back_by_its_length() -> None:
    model = models.double(models.build())
    cache = StaticCache(config=model.config, max_cache_len=32)
    ids = models.prompt(12)
    with torch.inference_mode():
        model(torch.cat([ids[:, :8], models.prompt(4, seed=8)], dim=1), past_key_values=cache)
        for layer in cache.layers:
            assert layer.is_initialized
            assert isinstance(layer.cumulative_length, torch.Tensor)
            assert int(layer.cumulative_length) == 12
            layer.cumulative_length.fill_(8)
        logits = model(ids[:, 8:], past_key_values=cache).logits[0, -1]
        torch.testing.assert_close(logits, model(ids).logits[0, -1], atol=1e-10, rtol=0)
        cache.reset()
        assert int(cache.layers[0].cumulative_length) == 0
    sliding = models.build("mistral").config
    assert all(layer.is_sliding for layer in StaticCache(config=sliding, max_cache_len=32).layers)


# --- what is read of models and of other libraries without being public there ---------------------------------------


def test_models_say_whether_their_state_can_be_taken_back() -> None:
    # Read with a default: renamed, all models would pass for ones that can.
    assert PreTrainedModel._is_stateful is False
    assert MambaForCausalLM._is_stateful is True


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # the compiler itself
def test_a_model_knows_its_compiled_self_and_its_adapters() -> None:
    # Each read with a default, too.
    model = models.build()
    assert torch.compile(model)._orig_mod is model
    assert model._hf_peft_config_loaded is False
    model.add_adapter(LoraConfig(target_modules=["q_proj"], r=2))
    assert model._hf_peft_config_loaded is True
    assert isinstance(model.all_tied_weights_keys, dict)  # emptied where a head is untied


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")  # of some versions, tied or not
def test_adapters_are_told_by_their_layers() -> None:
    config = LoraConfig(target_modules=["embed_tokens"], modules_to_save=["lm_head"], r=2)
    inner = get_peft_model(models.build(tie_word_embeddings=False), config).get_base_model()
    assert isinstance(inner.get_input_embeddings(), BaseTunerLayer)
    assert isinstance(inner.get_output_embeddings(), ModulesToSaveWrapper)
    assert hasattr(PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type], "merge_and_unload")


@pytest.fixture
def no_accelerator() -> Iterator[None]:
    shared = AcceleratorState._shared_state
    kept = dict(shared)
    shared.clear()
    yield
    shared.clear()
    shared.update(kept)


def test_what_preparing_a_model_sets_on_it_is_known(no_accelerator: None) -> None:
    model = models.build()
    before = set(vars(model))
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model, evaluation_mode=True)
    assert prepared is model
    # The last is set by some versions only.
    known = {"forward", "_original_forward", "_is_accelerate_prepared"}
    assert {"forward", "_original_forward"} <= set(vars(model)) - before <= known
