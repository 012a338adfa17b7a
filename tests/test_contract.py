"""What is called of transformers without being public there: fails first when something moves."""

import inspect
from typing import Any

import models
import pytest
import torch
from peft import PEFT_TYPE_TO_TUNER_MAPPING, LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from transformers import (
    GenerationMixin,
    MambaForCausalLM,
    PreTrainedModel,
)
from transformers.generation import candidate_generator
from transformers.generation.candidate_generator import AssistedCandidateGenerator


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
