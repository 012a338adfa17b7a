"""What is refused, with what words, and that no forward ran before."""

from collections.abc import Callable
from typing import Any

import models
import pytest
from transformers import LlamaModel, SynthIDTextWatermarkingConfig

from osd_hf import OnlineAssistant, capture_traces
from osd_hf.errors import UnsupportedGenerationError, UnsupportedModelError, VocabularyMismatchError
from osd_hf.models import check_tokenizers

SYNTHID = SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)
REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 3},
    "num_return_sequences": {"num_return_sequences": 2, "do_sample": True},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "use_mtp": {"use_mtp": True},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "assistant_tokenizer": {"assistant_tokenizer": models.tokenizer()},
    "assistant_model": {"assistant_model": models.build()},
    "stop_strings": {"stop_strings": ["ab"]},  # without a tokenizer
    "custom_generate": {"custom_generate": "somebody/else"},
}
# What the target answers alone where an assistant serves, and what is refused where there is a foreign draft to watch.
UNDRAFTED: dict[str, dict[str, Any]] = {
    "guidance_scale": {"guidance_scale": 1.5},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
    "watermarking_config": {"watermarking_config": SYNTHID},
}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return models.pair()


@pytest.mark.parametrize("name", REFUSED)
def test_modes_are_refused_before_any_work(name: str, pair: tuple[Any, Any]) -> None:
    assistant = OnlineAssistant(*pair)
    with models.ForwardCounter(assistant.target, assistant.draft) as forwards:
        with pytest.raises(UnsupportedGenerationError, match=name):
            assistant.generate(models.prompt(), max_new_tokens=3, **REFUSED[name])
        assert forwards.count == 0
    assert assistant.stats.num_requests == 0
    assistant.generate(models.prompt(), max_new_tokens=3)
    assert assistant.stats.num_requests == 1


@pytest.mark.parametrize("name", ["assistant_ensemble_weight", "prompt_lookup_num_tokens", "assistant_early_exit"])
@pytest.mark.parametrize("attach", ["attached", "capture"])
def test_modes_are_refused_where_the_caller_generates(attach: str, name: str, pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft)
    context: Callable[[], Any] = assistant.attached if attach == "attached" else lambda: capture_traces(target, print)
    with models.ForwardCounter(target, assistant.draft) as forwards, context():
        with pytest.raises(UnsupportedGenerationError, match=name):
            target.generate(models.prompt(), assistant_model=assistant.draft, max_new_tokens=3, **REFUSED[name])
        assert forwards.count == 0


@pytest.mark.parametrize("name", UNDRAFTED)
def test_settings_without_a_draft_are_refused_where_a_foreign_draft_is_watched(
    name: str, pair: tuple[Any, Any]
) -> None:
    target, draft = pair
    with models.ForwardCounter(target, draft) as forwards, capture_traces(target, print):
        with pytest.raises(UnsupportedGenerationError, match=f"{name}.*without `assistant_model`"):
            target.generate(models.prompt(), assistant_model=draft, max_new_tokens=3, **UNDRAFTED[name])
        assert forwards.count == 0


def test_a_draft_with_a_tokenizer_of_its_own_is_refused_where_the_caller_generates(pair: tuple[Any, Any]) -> None:
    target, draft = pair[0], models.build(vocab_size=70)
    tokenizers = {"tokenizer": models.tokenizer(), "assistant_tokenizer": models.tokenizer(characters="zyx")}
    with models.ForwardCounter(target, draft) as forwards, capture_traces(target, print):
        with pytest.raises(UnsupportedGenerationError, match="assistant_tokenizer"):
            target.generate(models.prompt(), assistant_model=draft, max_new_tokens=3, **tokenizers)
        assert forwards.count == 0


def test_tokenizers_that_differ_are_refused(tmp_path: Any) -> None:
    ours, theirs = models.tokenizer(), models.tokenizer(characters="zyxwvutsrqponmlkjihgfedcba")
    with pytest.raises(VocabularyMismatchError, match=r"differ in 61 tokens, such as '0' \(55 / None\)"):
        check_tokenizers(ours, theirs)
    check_tokenizers(ours, models.tokenizer())
    target, draft = models.pair()
    target.save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(VocabularyMismatchError, match="tokenizers of target and draft differ.*make_draft"):
        OnlineAssistant(tmp_path, draft, ours)


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        (lambda: LlamaModel(models.build().config), models.build, "AutoModelForCausalLM"),
        (object, models.build, "object"),
        (models.build, lambda: LlamaModel(models.build().config), "LlamaModel"),
        (models.build, lambda: models.build("t5"), "of one kind"),
        (lambda: models.build("bart"), models.build, "of one kind"),
    ],
)
def test_models_that_cannot_be_paired_are_refused(target: Any, draft: Any, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        OnlineAssistant(target(), draft())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_a_draft_without_anything_to_learn_is_refused() -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    target, draft = models.pair()
    wrapped = get_peft_model(draft, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2))
    assert isinstance(wrapped, PeftModel)
    for parameter in wrapped.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match="is_trainable=True"):
        OnlineAssistant(target, wrapped)
