"""Where a forward over several tokens differs from single-token forwards, answers are still the target's own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import models
import peft
import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    DogeConfig,
    DogeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MoshiConfig,
    MoshiForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput

from osd_hf import OnlineAssistant, OnlineConfig, Trace
from osd_hf.decoding.checks import UNLIMITED, Limits, known_limits, limits_of
from osd_hf.errors import UnsupportedGenerationError, UnsupportedModelError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft reads it
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),  # of peft, for soft prompts
]

MANUAL = OnlineConfig(update_strategy="manual", num_assistant_tokens=4)
TEXT = OnlineConfig(update_strategy="manual", candidates="text")
LENGTH = 24  # at which the models of these tests change
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
        "original_max_position_embeddings": LENGTH,
    },
}  # fmt: skip


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def loud(model: Any) -> Any:
    return models.loud(model).double()


def roped(name: str, seed: int = 0, architecture: str = "llama") -> Any:
    positions = 4 * LENGTH if name in ("longrope", "yarn") else LENGTH
    rope = {**ROPES[name], "rope_theta": 10000.0}
    if name == "yarn":
        rope["original_max_position_embeddings"] = LENGTH
    return models.build(architecture, seed, max_position_embeddings=positions, rope_parameters=rope).double()


def inputs(*lengths: int) -> dict[str, Tensor]:
    """Prompts of these lengths, padded on the left."""
    widest = max(lengths)
    ids = torch.zeros(len(lengths), widest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, widest - length :] = models.prompt(length, seed=row)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def same(
    target: Any, assistant: OnlineAssistant, requests: int = 2, *, attached: bool = False, **arguments: Any
) -> OnlineAssistant:
    """Assert that the assistant answers a request as its target does, several times, perhaps attached as well."""
    arguments = {"do_sample": False, "max_new_tokens": 2 * LENGTH, **arguments}
    # Dynamic frequencies stay as a long sequence has made them until a short one comes: so each request begins anew.
    is_dynamic = "dynamic" in str(getattr(target.config, "rope_parameters", None))
    short = {"input_ids": models.prompt(2), "max_new_tokens": 1}
    alone = target.generate(**arguments)
    for _ in range(requests):
        if is_dynamic:
            target.generate(**short)
        assert assistant.generate(**arguments).tolist() == alone.tolist()
    if attached:
        with assistant.attached():
            ours = target.generate(**arguments, assistant_model=assistant.draft)
        assert ours.tolist() == alone.tolist()
    return assistant


# --- known causes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, begins, config",
    [
        *itertools.product(("dynamic", "longrope"), (LENGTH - 9, LENGTH - 2, LENGTH + 6), (MANUAL, TEXT)),
        *itertools.product(("default", "linear", "yarn"), (LENGTH - 9,), (MANUAL,)),
    ],
)
def test_answers_cross_the_length_at_which_frequencies_change(name: str, begins: int, config: OnlineConfig) -> None:
    target = roped(name)
    draft = models.draft_of(roped("default"))  # with positions of its own
    draft.config.max_position_embeddings = 1000
    same(target, OnlineAssistant(target, draft, config=config), **inputs(begins), max_new_tokens=LENGTH)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_requests_below_the_length_are_answered_with_speculation(name: str) -> None:
    target = roped(name)
    assistant = OnlineAssistant(target, models.draft_of(target), config=MANUAL)
    stats = same(target, assistant, **inputs(6), max_new_tokens=LENGTH - 8).stats
    assert stats.block_efficiency > 1.2
    same(target, assistant, **inputs(6, 4, 5), max_new_tokens=LENGTH - 8)
    assert assistant.stats.drafted > 2 * stats.drafted  # the batch as well


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_padding_does_not_count_for_the_length(name: str) -> None:
    target, ids = roped(name), inputs(LENGTH - 6)
    padded = {key: torch.nn.functional.pad(value, (12, 0)) for key, value in ids.items()}
    same(target, OnlineAssistant(target, models.draft_of(target), config=MANUAL), **padded, max_new_tokens=20)


def test_candidates_stay_within_the_positions_of_the_target() -> None:
    target = models.build("gpt2", n_positions=LENGTH).double()
    free = target.generate(**inputs(LENGTH - 6), do_sample=False, max_new_tokens=6)[0, LENGTH - 6 :].tolist()
    draft = models.draft_of(models.build("gpt2", n_positions=99).double())
    settings = {"max_new_tokens": 50, "eos_token_id": free[4]}  # which ends the answer in time
    for config in (MANUAL, TEXT):
        same(target, OnlineAssistant(target, draft, config=config), **inputs(LENGTH - 6), **settings)


def test_a_prompt_beyond_dynamic_frequencies_is_answered_without_speculation_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = roped("dynamic")
    assistant = OnlineAssistant(target, models.draft_of(target), config=MANUAL)
    same(target, assistant, 3, **inputs(LENGTH + 3))
    same(target, assistant, **inputs(8, 5, 6))  # a batch that crosses the length
    assert assistant.stats.drafted == 0
    assert sum("without speculation where that is not exact: its rotary" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("kind, rope", [("Phi3", "longrope"), ("Phimoe", "llama3")])
def test_a_model_that_reads_its_prompt_again_at_a_length_answers_as_alone(kind: str, rope: str) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": LENGTH, "short_mscale": 1.0, "long_mscale": 1.0}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        **{**SIZES, "num_hidden_layers": 2}, max_position_embeddings=4 * LENGTH,
        original_max_position_embeddings=LENGTH,
        rope_parameters={**(llama3 if rope == "llama3" else ROPES[rope]), "rope_theta": 1e4}, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, sliding_window=None, num_local_experts=2,
    )  # fmt: skip
    target = loud(getattr(transformers, f"{kind}ForCausalLM")(config)).float()  # in which experts are computed
    for batch in (inputs(LENGTH - 5), inputs(LENGTH + 5), inputs(LENGTH + 5, LENGTH - 2)):
        same(target, OnlineAssistant(target, models.draft_of(target), config=MANUAL), **batch, max_new_tokens=LENGTH)


def test_a_model_with_a_cache_of_its_own_answers_alone() -> None:
    more = {"num_hidden_layers": 2, "head_dim": 8, "block_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    target = loud(MiniMaxForCausalLM(MiniMaxConfig(**{**SIZES, **more}))).float()
    same(target, OnlineAssistant(target, models.draft_of(base().float()), config=MANUAL), **inputs(6))
    assert known_limits(target).forbid(6)


def test_attention_to_the_best_keys_is_exact_up_to_their_number() -> None:
    target = loud(DogeForCausalLM(DogeConfig(keep_window_size=LENGTH, **SIZES)))
    assistant = OnlineAssistant(target, models.draft_of(target), config=MANUAL)
    same(target, assistant, **inputs(6), max_new_tokens=LENGTH - 8)
    assert assistant.stats.drafted > 0
    assert known_limits(target).max_length == LENGTH
    same(target, assistant, **inputs(LENGTH - 4))


def test_no_candidate_follows_a_padding_token_where_positions_skip_it() -> None:
    target = loud(
        RobertaForCausalLM(RobertaConfig(is_decoder=True, max_position_embeddings=99, pad_token_id=9, **SIZES))
    )
    free = target.generate(**inputs(6), do_sample=False, max_new_tokens=40, bad_words_ids=[[9]])[0, 6:].tolist()
    often = max(set(free), key=free.count)
    target.generation_config.pad_token_id = target.config.pad_token_id = often
    for module in target.modules():
        if hasattr(module, "padding_idx") and hasattr(module, "position_embeddings"):
            module.padding_idx = often
    assistant = OnlineAssistant(target, models.draft_of(target, noise=0.0), config=MANUAL)
    same(target, assistant, **inputs(6), max_new_tokens=40)
    assert assistant.stats.drafted > 0
    same(target, assistant, **inputs(6, 6), max_new_tokens=40)


@pytest.mark.parametrize("capacity", [1, 2, 64])
def test_experts_with_a_capacity_get_no_more_tokens_than_it(capacity: int) -> None:
    config = SwitchTransformersConfig(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_sparse_encoder_layers=1, num_decoder_layers=2,
        num_sparse_decoder_layers=2, num_heads=4, num_experts=2, expert_capacity=capacity, pad_token_id=0,
        eos_token_id=2, decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    target = loud(SwitchTransformersForConditionalGeneration(config))
    ids = models.prompt(6)
    assistant = OnlineAssistant(target, models.draft_of(target), config=MANUAL)
    same(target, assistant, input_ids=ids, max_new_tokens=30)
    assert (assistant.stats.drafted > 0) == (capacity > 1)


# --- PEFT -----------------------------------------------------------------------------------------------------------


def base() -> Any:
    return loud(models.build())


def with_adapters(*names: str, **settings: Any) -> Any:
    how = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False, **settings}
    torch.manual_seed(0)
    target = peft.get_peft_model(base(), peft.LoraConfig(**how), adapter_name=names[0])
    for name in names[1:]:
        target.add_adapter(name, peft.LoraConfig(**how))
    return target.double().eval()


@pytest.mark.parametrize("prompt", [[5, 6, 7, 8, 9, 10, 11], [5, 7, 8, 9, 10], [5, 6, 9, 10, 7, 8]])
def test_an_adapter_that_is_activated_by_tokens_is_applied_as_alone(prompt: list[int]) -> None:
    target = with_adapters("default", alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM")
    assistant = OnlineAssistant(target, models.draft_of(base()), config=MANUAL)
    ids = torch.tensor([prompt])
    for batch in (ids, ids.repeat(2, 1)):
        arguments = {"input_ids": batch, "attention_mask": torch.ones_like(batch)}
        same(target, assistant, 1, attached=batch is ids, **arguments, max_new_tokens=20)


def test_rows_with_adapters_of_their_own_may_end_at_different_lengths() -> None:
    target, names = with_adapters("first", "second"), ["first", "second", "__base__"]
    assistant = OnlineAssistant(target, models.draft_of(base()), config=MANUAL)
    batch = inputs(6, 4, 6)
    free = target.generate(**batch, adapter_names=names, max_new_tokens=20, do_sample=False)[:, 6:].tolist()
    ends = [free[0][3], free[1][9]]
    same(target, assistant, **batch, adapter_names=names, eos_token_id=ends)
    single = {name: value[:1] for name, value in batch.items()}
    drafted = same(target, assistant, **single, adapter_names=["first"]).stats.drafted
    assert drafted > 0


def test_a_failed_request_leaves_batches_as_they_were() -> None:
    target, batch = with_adapters("first", "second"), inputs(6, 4, 6)
    assistant = OnlineAssistant(target, models.draft_of(base()), config=MANUAL)
    with pytest.raises(UnsupportedGenerationError, match="3 prompts, got 1 names"):
        assistant.generate(**batch, adapter_names=["first"], max_new_tokens=5)
    with pytest.raises(ValueError, match="non-existing adapter"):  # PEFT's own
        assistant.generate(**batch, adapter_names=["first", "second", "third"], max_new_tokens=5)

    def broken(*_: Any) -> None:
        raise RuntimeError("not now")

    hook = target.get_base_model().model.register_forward_pre_hook(broken)
    for names in (None, ["first", "second", "first"]):
        with pytest.raises(RuntimeError, match="not now"):
            assistant.generate(**batch, adapter_names=names, max_new_tokens=5)
    hook.remove()
    assert same(target, assistant, **batch).stats.block_efficiency > 1


def soft_prompts() -> dict[str, Callable[[Any], Any]]:
    own = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 5}
    return {
        "prompt": lambda: peft.PromptTuningConfig(**own),
        "prefix": lambda: peft.PrefixTuningConfig(**own),
        "p": lambda: peft.PromptEncoderConfig(**own, encoder_hidden_size=16),
    }


@pytest.mark.parametrize("name", ["prompt", "prefix", "p"])
def test_soft_prompts_are_answered_as_alone_and_logged_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    target = peft.get_peft_model(models.build("llama", num_key_value_heads=4), soft_prompts()[name]()).double().eval()
    draft = models.draft_of(base())
    assistant = OnlineAssistant(target, draft, config=MANUAL)
    for batch in (inputs(6), inputs(6, 4, 6)):
        same(target, assistant, attached=True, **batch)
    assert sum("The target answers without a draft: PEFT puts a soft prompt" in m for m in caplog.messages) == 1


def test_drafts_whose_adapters_cannot_be_merged_are_refused() -> None:
    lora = peft.LoraConfig(alora_invocation_tokens=[7], task_type="CAUSAL_LM", target_modules=["q_proj"])
    for config, words in ((soft_prompts()["prefix"](), "soft prompt"), (lora, "cannot be merged")):
        draft = peft.get_peft_model(models.build(num_key_value_heads=4), config)
        with pytest.raises(UnsupportedModelError, match=words):
            OnlineAssistant(models.build(), draft)


# --- unknown causes -------------------------------------------------------------------------------------------------


def disturbed(model: Any, from_length: int = 0) -> Any:
    """Let a model's logits depend on the number of tokens of a call, for sequences beyond a length."""
    forward = model.forward

    def odd(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        begins = 0 if cache is None else int(cache.get_seq_length())
        output = forward(*args, **kwargs)
        count = kwargs["input_ids"].shape[1]
        if begins and count > 1 and begins + count > from_length:
            output.logits = output.logits.roll(1, -1)
        return output

    model.forward = odd
    return model


@pytest.mark.parametrize("config", [MANUAL, TEXT])
def test_a_model_that_counts_the_tokens_of_a_call_is_found_by_a_probe(
    config: OnlineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    target = disturbed(models.build())
    assistant = OnlineAssistant(target, models.draft_of(models.build()), config=config)
    same(target, assistant, 3, **inputs(6))
    same(target, assistant, **inputs(6, 4))
    assert assistant.stats.drafted == 0
    assert (
        sum("answers without speculation: a forward over several tokens is not exact" in m for m in caplog.messages)
        == 1
    )


@pytest.mark.parametrize("name, length", [("attention_window_size", 2048), ("local_window", 700)])
def test_there_is_no_speculation_beyond_a_length_that_is_neither_known_nor_probed(name: str, length: int) -> None:
    target = models.build()
    setattr(target.config, name, length)
    limits = limits_of(target, models.prompt(), arguments_of(target))
    assert (limits.max_length, limits.forbid(length - 1), limits.forbid(length)) == (length, False, True)
    assert f"`{name}`" in limits.reason
    setattr(target.config, name, 40)  # which is probed
    assert limits_of(copy.deepcopy(target), models.prompt(), arguments_of(target)) == UNLIMITED


def moshi(window: int) -> Any:
    sizes = {**SIZES, "ffn_dim": 48, "head_dim": 8, "num_hidden_layers": 2}
    return loud(MoshiForCausalLM(MoshiConfig(sliding_window=window, **sizes)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_the_cache_alone_makes_is_a_limit(dtype: torch.dtype) -> None:
    assert limits_of(moshi(3000).to(dtype), models.prompt(9), arguments_of(moshi(3000))).max_length == 3000
    for window in (12, 64):
        target = moshi(window).to(dtype)
        assert limits_of(target, models.prompt(9), arguments_of(target)).forbid(9)
    target = moshi(12)
    same(target, OnlineAssistant(target, models.draft_of(target), config=MANUAL), **inputs(6))


def arguments_of(target: Any) -> dict[str, Any]:
    config = copy.deepcopy(target.generation_config)
    config.max_length = 99
    return {"generation_config": config}


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("llama", torch.bfloat16), ("llama", torch.float16), ("mixtral", torch.float16), ("gemma3", torch.bfloat16)],
)
def test_targets_in_half_precision_are_served_with_speculation(
    architecture: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(3):
        target = models.build(architecture, seed).to(dtype)
        assistant = OnlineAssistant(target, models.draft_of(target), config=MANUAL)
        for batch in (inputs(9), inputs(6, 4)):
            before = assistant.stats.drafted
            assistant.generate(**batch, do_sample=False, max_new_tokens=10)
            assert assistant.stats.drafted > before
    assert "speculation" not in caplog.text  # rounding is no reason to answer without it


def test_a_probe_changes_nothing() -> None:
    target = models.build("gpt2", attn_pdrop=0.2, resid_pdrop=0.2).train()
    state, mask = torch.get_rng_state(), {name: m.training for name, m in target.named_modules()}
    arguments = arguments_of(target)
    before = copy.deepcopy(arguments["generation_config"])
    assert limits_of(target, models.prompt(9), arguments) == Limits("it has 256 positions", max_length=256)
    assert torch.equal(state, torch.get_rng_state())
    assert mask == {name: m.training for name, m in target.named_modules()}
    assert arguments["generation_config"] == before


# --- inputs under other names ---------------------------------------------------------------------------------------


def whisper() -> Any:
    config = WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=50,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = loud(WhisperForConditionalGeneration(config))
    settings = model.generation_config
    settings.eos_token_id, settings.decoder_start_token_id, settings.max_length = 2, 3, 30
    settings.return_timestamps, settings.no_timestamps_token_id = False, 63
    return model


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("rows", [1, 2])
def test_audio_is_answered_by_keyword_and_by_position(rows: int) -> None:
    target = whisper()
    assistant = OnlineAssistant(target, models.draft_of(target), config=MANUAL)
    features = torch.randn(rows, 8, 100, generator=torch.Generator().manual_seed(0)).double()
    alone = target.generate(input_features=features, do_sample=False).tolist()
    assert assistant.generate(input_features=features, do_sample=False).tolist() == alone
    assert assistant.generate(features, do_sample=False).tolist() == alone
    if rows == 1:
        with assistant.attached():
            assert target.generate(features, do_sample=False, assistant_model=assistant.draft).tolist() == alone


def llava() -> Any:
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                              image_size=8, patch_size=4)  # fmt: skip
    text = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=60, tie_word_embeddings=False)
    return loud(LlavaForConditionalGeneration(config))


@pytest.mark.parametrize("config", [MANUAL, TEXT])
def test_images_are_answered_with_a_draft_that_reads_text(config: OnlineConfig, caplog: Any) -> None:
    target = llava()
    ids = torch.tensor([[1, 5, 60, 60, 60, 60, 7, 9]])
    images = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    traces = list[Trace]()
    assistant = OnlineAssistant(target, models.draft_of(base()), config=config)
    same(target, assistant, input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=images)
    assistant.generate(ids, pixel_values=images, max_new_tokens=3, on_trace=traces.append)
    assert not traces  # the image is not in the ids
    assert sum("are not captured" in line for line in caplog.messages) == 1


def test_a_multimodal_model_that_is_asked_about_text_is_drafted_for_and_captured() -> None:
    target, traces = llava(), list[Trace]()
    assistant = OnlineAssistant(target, models.draft_of(base()), config=MANUAL)
    drafted = same(target, assistant, **inputs(6)).stats.drafted
    assistant.generate(**inputs(6), max_new_tokens=3, on_trace=traces.append)
    assert drafted > 0
    before = assistant.stats.drafted
    assert same(target, assistant, **inputs(6, 4)).stats.drafted == before  # of a batch, by the target alone
    assert len(traces) == 1


class Wrapping(LlamaForCausalLM):
    """Decodes by a part of itself, as models of images do."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.config)
        self.inner = inner

    def generate(self, input_ids: Tensor, **settings: Any) -> Any:
        return self.inner.generate(input_ids, **settings)


def test_a_model_that_decodes_by_a_part_of_itself_answers_alone(caplog: pytest.LogCaptureFixture) -> None:
    target = Wrapping(base())
    same(target, OnlineAssistant(target, models.draft_of(base()), config=MANUAL), **inputs(6, 4))
    assert sum("decodes by another model" in line for line in caplog.messages) == 1


def test_embeddings_and_encoder_outputs_are_answered_by_the_target_alone(caplog: pytest.LogCaptureFixture) -> None:
    target = base()
    embeddings = target.get_input_embeddings()(models.prompt()).detach()
    assistant = OnlineAssistant(target, models.draft_of(target), config=MANUAL)
    same(target, assistant, attached=True, inputs_embeds=embeddings)
    t5, draft = models.pair("t5")
    with torch.no_grad():
        outputs = t5.get_encoder()(input_ids=models.prompt()).last_hidden_state
    given = {"encoder_outputs": BaseModelOutput(last_hidden_state=outputs)}
    expected = t5.generate(**copy.deepcopy(given), max_new_tokens=9, do_sample=False)
    assert (
        OnlineAssistant(t5, draft).generate(**given, max_new_tokens=9, do_sample=False).tolist() == expected.tolist()
    )
    assert sum("`encoder_outputs` was given" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("name", ["inputs", "input_ids"])
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda ids: ids.tolist(), "a tensor, got list"),
        (lambda ids: ids.numpy(), "a tensor, got ndarray"),
        (lambda ids: ids[0], r"got torch.int64 of shape \(6,\)"),
        (lambda ids: ids[None], r"of shape \(1, 1, 6\)"),
        (lambda ids: ids.float(), "got torch.float32"),
        (lambda ids: ids[:0], r"of shape \(0, 6\)"),
    ],
)
def test_prompts_that_the_target_does_not_take_are_refused(name: str, make: Any, message: str) -> None:
    target = models.build()
    assistant = OnlineAssistant(target, models.draft_of(target))
    with pytest.raises(UnsupportedGenerationError, match=f"`{name}` must be .*{message}"):
        assistant.generate(**{name: make(models.prompt())}, max_new_tokens=3)


@pytest.mark.parametrize("rows", [(6,), (6, 4, 5)])
@pytest.mark.parametrize("calls", [0, 4])
def test_a_draft_that_fails_costs_no_answer(
    rows: tuple[int, ...], calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    target, left = models.build().double(), [calls]
    assistant = OnlineAssistant(target, models.draft_of(target), config=MANUAL)
    same(target, assistant, 1, **inputs(*rows))

    def failing(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no memory")

    hook = assistant.draft.register_forward_pre_hook(failing)
    same(target, assistant, 2, **inputs(*rows))
    hook.remove()
    assert sum("The draft failed; the answer continues without it: " in line for line in caplog.messages) == 1
    drafted = assistant.stats.drafted
    assert same(target, assistant, 1, **inputs(*rows)).stats.drafted > drafted
