"""All that the installed transformers lets `generate` be asked for is known here; what a newer one adds is noticed."""

import inspect
from types import ModuleType
from typing import Any

import models
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationMode

from osd_hf import OnlineAssistant, capture_traces
from osd_hf.decoding import checks
from osd_hf.decoding.checks import IRRELEVANT, SERVED, STATELESS
from osd_hf.errors import UnsupportedGenerationError

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
    where = "SERVED, IRRELEVANT (osd_hf/decoding/checks.py) or REFUSED or UNDRAFTED (osd_hf/decoding/checks.py)"
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
    assert SERVED.isdisjoint(IRRELEVANT)
    assert (SERVED | IRRELEVANT).isdisjoint(name for name, _, _ in (*checks.REFUSED, *checks.UNDRAFTED))


def test_every_logits_processor_is_known() -> None:
    assert unknown_classes(logits_process) == []
    assert STATELESS.isdisjoint(STATEFUL)


def test_every_argument_and_mode_of_generate_is_known() -> None:
    arguments = set(inspect.signature(GenerationMixin.generate).parameters)
    assert unknown("ARGUMENTS of this test", arguments, ARGUMENTS) == []
    assert unknown("MODES of this test", {mode.name for mode in GenerationMode}, MODES) == []


# --- the next minor release, modelled -------------------------------------------------------------------------------


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


def test_caches_that_cannot_be_cropped_take_no_draft_and_unknown_ones_neither() -> None:
    target, config = models.build(), GenerationConfig(use_cache=True)
    for cache in ("static", "quantized", "of_a_newer_release"):
        config.cache_implementation = cache
        assert "cache_implementation" in str(checks.undrafted(target, config, []))
    for cache in (None, "dynamic", "dynamic_full", "offloaded"):
        config.cache_implementation = cache
        assert checks.undrafted(target, config, []) is None
