"""What is used of transformers and peft: these tests fail first when something there moves, or is new."""

import inspect
from types import ModuleType
from typing import Any

import models
import pytest
import torch
from peft import PEFT_TYPE_TO_TUNER_MAPPING, LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, MambaForCausalLM, PreTrainedModel
from transformers.generation import candidate_generator, logits_process
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.configuration_utils import GenerationMode

from osd_hf import OnlineAssistant, capture_traces
from osd_hf.decoding import checks
from osd_hf.decoding.checks import SERVED, STATELESS
from osd_hf.errors import UnsupportedGenerationError


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_assisted_decoding", "input_ids logits_processor stopping_criteria generation_config assistant_model "
         "assistant_tokenizer inputs_tensor streamer"),
        ("_get_candidate_generator", "generation_config input_ids inputs_tensor logits_processor model_kwargs "
         "assistant_model"),
        ("_sample", "input_ids logits_processor stopping_criteria generation_config synced_gpus streamer "
         "model_kwargs"),
        ("_get_logits_processor", "generation_config input_ids_seq_length encoder_input_ids device model_kwargs"),
        ("_prepare_special_tokens", "generation_config kwargs_has_attention_mask device"),
        ("prepare_inputs_for_generation", "input_ids next_sequence_length past_key_values is_first_iteration"),
    ],
)  # fmt: skip
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


WHAT_TO_DO = (
    "Read in transformers what it does to an answer, show that an assisted one is the target's own under it or refuse "
    "it, and enter it in {where}."
)
BASES = {"LogitsProcessor"}
# Classes of transformers that keep state, or call a function of the user.
STATEFUL = {
    "AlternatingCodebooksLogitsProcessor", "BarkEosPrioritizerLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor", "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor", "DiaEOSDelayPatternLogitsProcessor", "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperNoSpeechDetection",
}  # fmt: skip
# Arguments of `generate` that are no fields of a config, and how each is dealt with.
ARGUMENTS = {
    "self", "inputs", "kwargs", "generation_config", "synced_gpus", "streamer",  # handed on
    "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",  # checked
    "assistant_model", "custom_generate",  # refused, or the assistant's own
    "negative_prompt_ids", "negative_prompt_attention_mask",  # read with `guidance_scale` alone
}  # fmt: skip
MODES = {
    "CONTRASTIVE_SEARCH", "GREEDY_SEARCH", "SAMPLE", "ASSISTED_GENERATION", "DOLA_GENERATION", "BEAM_SEARCH",
    "BEAM_SAMPLE", "CONSTRAINED_BEAM_SEARCH", "GROUP_BEAM_SEARCH",
}  # fmt: skip


def unknown(where: str, found: set[str], known: set[str] | frozenset[str]) -> list[str]:
    return [f"{name}: {WHAT_TO_DO.format(where=where)}" for name in sorted(found - known)]


def unknown_fields() -> list[str]:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    where = "SERVED (osd_hf/decoding/checks.py) or REFUSED or UNDRAFTED (osd_hf/decoding/checks.py)"
    return unknown(where, fields, checks._KNOWN)


def unknown_classes(*modules: ModuleType) -> list[str]:
    found = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, LogitsProcessor)
    }
    return unknown(
        "STATELESS of osd_hf/decoding/checks.py or STATEFUL of this test", found - BASES, STATELESS | STATEFUL
    )


def test_every_field_of_a_generation_config_is_known() -> None:
    assert unknown_fields() == []
    assert SERVED.isdisjoint(name for name, _, _ in (*checks.REFUSED, *checks.UNDRAFTED))


def test_every_logits_processor_is_known() -> None:
    assert unknown_classes(logits_process) == []
    assert STATELESS.isdisjoint(STATEFUL)


def test_every_argument_and_mode_of_generate_is_known() -> None:
    arguments = set(inspect.signature(GenerationMixin.generate).parameters)
    assert unknown("ARGUMENTS of this test", arguments, ARGUMENTS) == []
    assert unknown("MODES of this test", {mode.name for mode in GenerationMode}, MODES) == []


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field more, which has a default."""
    init, defaults = GenerationConfig.__init__, GenerationConfig._get_default_generation_params

    def newer_init(self: Any, **kwargs: Any) -> None:
        self.entropy_floor = kwargs.pop("entropy_floor", None)
        init(self, **kwargs)

    monkeypatch.setattr(GenerationConfig, "__init__", newer_init)
    monkeypatch.setattr(
        GenerationConfig, "_get_default_generation_params", staticmethod(lambda: defaults() | {"entropy_floor": 0.0})
    )


def test_a_newer_release_is_noticed(newer: None) -> None:
    assert [line.split(":")[0] for line in unknown_fields()] == ["entropy_floor"]


def test_a_setting_of_a_newer_release_leaves_the_answer_to_the_target(
    newer: None, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = models.pair()
    assistant, ids = OnlineAssistant(target, draft), models.prompt()
    kwargs = {"max_new_tokens": 4, "attention_mask": torch.ones_like(ids)}
    alone = target.generate(ids, **kwargs)
    for good in ({}, {"entropy_floor": 0.0}, {"entropy_floor": None}):
        assert torch.equal(assistant.generate(ids, **good, **kwargs), alone)
    assert "entropy_floor" not in caplog.text
    drafted = assistant.stats.drafted
    for unknown in ({"entropy_floor": 0.5}, {"generation_config": GenerationConfig(entropy_floor=0.5)}):
        assert torch.equal(assistant.generate(ids, **unknown, **kwargs), alone)
        with capture_traces(target, print), pytest.raises(UnsupportedGenerationError, match="entropy_floor"):
            target.generate(ids, assistant_model=draft, **unknown, **kwargs)
    assert assistant.stats.drafted == drafted
    assert caplog.text.count("`entropy_floor` is set, which this version of osd_hf does not know") == 1


def test_what_a_config_carries_beside_its_fields_does_no_harm() -> None:
    # As configs of the Hub do, for code of their own.
    target, draft = models.pair()
    target.generation_config.chat_format = "chatml"
    assert OnlineAssistant(target, draft).generate(models.prompt(), max_new_tokens=4).shape == (1, 10)
