"""What is called of transformers without being public there: fails first when something moves."""

import inspect
from typing import Any

import models
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList
from transformers.generation import candidate_generator, logits_process, stopping_criteria
from transformers.generation import utils as generation_utils
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from osd_hf import arguments, guards


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


def test_functions_that_the_lossless_tests_break() -> None:
    expected = {"candidate_input_ids", "candidate_logits", "candidate_length", "new_logits"}
    assert expected <= parameters(generation_utils._speculative_sampling)


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
    assert set(arguments.SAMPLING_FIELDS) - {"forced_bos_token_id"} <= set(known) | set(vars(GenerationConfig()))


def test_processors_that_are_refused_by_name_exist() -> None:
    elsewhere = {"WhisperNoSpeechDetection"}
    assert all(hasattr(logits_process, name) for name in guards._STATEFUL - elsewhere)


def test_warpers_are_those_that_sampling_adds() -> None:
    target = models.build()
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "top_h": 0.5,
                "typical_p": 0.5, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1}  # fmt: skip
    config = GenerationConfig(**settings)
    target._prepare_special_tokens(config, True)
    assert len(target._get_logits_processor(config, model_kwargs={})) == len(settings) - 1
    assert set(settings) - {"do_sample"} == set(arguments.NO_WARPING)
    for name, neutral in arguments.NO_WARPING.items():
        setattr(config, name, neutral)
    assert len(target._get_logits_processor(config, model_kwargs={})) == 0
