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
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    MambaForCausalLM,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.generation import candidate_generator, logits_process, stopping_criteria
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator

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


def test_a_generator_has_what_is_mended() -> None:
    target, draft = models.pair()
    seen: list[Any] = []

    class Spy(type(target)):  # type: ignore[misc]
        def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(super()._get_candidate_generator(*args, **kwargs))
            seen.append((args, kwargs))
            return seen[0]

    target.__class__ = Spy
    ids = models.prompt()
    target.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=3, top_p=0.9, do_sample=True
    )
    generator, (args, kwargs) = seen
    assert type(generator) is AssistedCandidateGenerator
    assert args == ()  # everything is passed by name, as the hook reads it
    assert "logits_processor" in kwargs
    assert generator.assistant_model is draft
    assert isinstance(generator.generation_config, GenerationConfig)
    assert generator.generation_config.top_p == 0.9
    assert "past_key_values" in generator.assistant_kwargs
    # The list is copied: what is put into the loop's own list later, the draft does not see.
    assert generator.logits_processor is not kwargs["logits_processor"]


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


def test_stopping_criteria_are_told_apart() -> None:
    target = models.build()
    config = GenerationConfig(max_new_tokens=3, max_length=9, eos_token_id=2)
    target._prepare_special_tokens(config, True)
    criteria = target._get_stopping_criteria(generation_config=config, stopping_criteria=StoppingCriteriaList())
    assert {type(c) for c in criteria} == {stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria}


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


class Scripted(CandidateGenerator):
    """Drafts one round after the other, as told; moves the end of the answer before the second."""

    def __init__(self, drafts: list[list[int]], before: Any = lambda number: None) -> None:
        self.drafts = drafts
        self.before = before
        self.emitted: list[int] = []
        self.ids = torch.zeros(1, 0, dtype=torch.long)

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        assert kwargs == {}
        self.before(len(self.emitted))
        draft = self.drafts[len(self.emitted)] if len(self.emitted) < len(self.drafts) else []
        self.ids = input_ids
        return torch.cat([input_ids, torch.tensor([draft], dtype=torch.long)], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        self.emitted.append(input_ids.shape[1] - self.ids.shape[1])


def assisted_by(target: Any, generator: Any, seen: list[dict[str, Any]], ids: torch.Tensor, **settings: Any) -> Any:
    class Spy(type(target)):  # type: ignore[misc]
        def _get_candidate_generator(self, **kwargs: Any) -> Any:
            seen.append({**kwargs, "model_kwargs": dict(kwargs["model_kwargs"])})
            return generator

    cls, target.__class__ = type(target), Spy
    try:
        return target.generate(
            ids,
            assistant_model=models.build("t5" if target.config.is_encoder_decoder else "llama"),
            **{"attention_mask": torch.ones_like(ids), "do_sample": False, **settings},
        )
    finally:
        target.__class__ = cls


@pytest.mark.parametrize("architecture", ["llama", "bart"])
def test_the_loop_says_what_a_generator_needs(architecture: str) -> None:
    target = models.build(architecture)
    ids = models.prompt()
    seen: list[dict[str, Any]] = []
    mask = (torch.arange(6) >= 2).long()[None]
    assisted_by(target, Scripted([]), seen, ids, max_new_tokens=4, eos_token_id=[2, 9], attention_mask=mask)
    (kwargs,) = seen
    config = kwargs["generation_config"]
    start = 1 if target.config.is_encoder_decoder else 6
    assert kwargs["input_ids"].shape == (1, start)
    assert config.max_length == start + 4
    assert config._eos_token_tensor.tolist() == [2, 9]
    assert config.do_sample is False
    assert isinstance(kwargs["logits_processor"], list)
    assert torch.equal(kwargs["inputs_tensor"], ids)  # of an encoder-decoder, its source
    assert torch.equal(kwargs["model_kwargs"]["attention_mask"], mask)
    bare = target.generation_config
    target._prepare_special_tokens(bare, True)
    assert bare._eos_token_tensor is None


def test_the_loop_cuts_a_round_at_the_length_of_its_config() -> None:
    target = models.build()
    ids = models.prompt()
    own = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    answer = own[0, 6:].tolist()
    seen: list[dict[str, Any]] = []

    def move(number: int) -> None:
        seen[0]["generation_config"].max_length = 6 + 3 if number == 0 else 6 + 12

    generator = Scripted([answer[:5], answer[3:8]], move)
    output = assisted_by(target, generator, seen, ids, max_new_tokens=12)
    # Looked at each round; the criterion that ends the loop keeps a length of its own.
    assert generator.emitted[:2] == [3, 6]
    assert torch.equal(output, own)


def test_plain_decoding_calls_its_processors_with_each_row() -> None:
    target = models.double(models.build())
    rows: list[torch.Tensor] = []

    class Watched(logits_process.LogitsProcessorList):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
            assert scores.dtype == torch.float32
            rows.append(scores.clone())
            return super().__call__(input_ids, scores, **kwargs)

    class Spy(type(target)):  # type: ignore[misc]
        def _assisted_decoding(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            kwargs = {k: v for k, v in kwargs.items() if k not in capture.ASSISTED_ONLY}
            return self._sample(input_ids, **{**kwargs, "logits_processor": Watched(kwargs["logits_processor"])})

    target.__class__ = Spy
    ids = models.prompt()
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 7}
    output = target.generate(ids, assistant_model=models.build(), **settings)
    assert torch.equal(output, target.generate(ids, **settings))
    with torch.no_grad():
        expected = target(output).logits[0, 5:-1].float()  # as the loop has them
        torch.testing.assert_close(torch.cat(rows)[:7], expected, atol=1e-10, rtol=models.rounding(2))


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


def test_caches_of_encoder_decoders_take_tokens_back() -> None:
    config = models.build("bart").config.get_text_config(decoder=True)
    cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    cache.activate_past_recording()
    for part, length in ((cache.self_attention_cache, 5), (cache.cross_attention_cache, 7)):
        for index in range(len(part.layers)):
            part.update(torch.zeros(1, 4, length, 8), torch.zeros(1, 4, length, 8), index)
    cache.crop(-2)
    assert cache.get_seq_length() == 3
    assert cache.cross_attention_cache.get_seq_length() == 7


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


def test_lists_of_tensors_are_averaged_in_place() -> None:
    mean, new = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
    torch._foreach_lerp_([mean], [new], 0.5)
    assert mean.tolist() == [2.0, 4.0]
