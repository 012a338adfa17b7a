"""Every field of a generation config, by each way in which it reaches a request: the target's answer, or a refusal."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from transformers import CompileConfig, GenerationConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig, Trace, capture_traces, replay
from osd_hf.errors import OSDError

K = 3
NEW_TOKENS = 6
PROMPT = models.prompt(6)
EOS = {"eos_token_id": 5}  # settings that do nothing without a token that ends answers
SAMPLED = {"do_sample": True}
DICT = {"return_dict_in_generate": True}

# Every field of a generation config: settings to ask for, each with what it needs to do something.
VALUES: dict[str, list[dict[str, Any]]] = {
    "max_length": [{"max_length": 9}, {"max_length": 9, "max_new_tokens": None}, {"max_length": 6}],
    "max_new_tokens": [{"max_new_tokens": 1}, {"max_new_tokens": 5}, {"max_new_tokens": 0}],
    "min_length": [{"min_length": n, **EOS} for n in (0, 1, 9)],
    "min_new_tokens": [{"min_new_tokens": n, **EOS} for n in (0, 1, 5)],
    "early_stopping": [{"early_stopping": True}],
    "max_time": [{"max_time": 0.0}, {"max_time": 1e6}],
    "stop_strings": [{"stop_strings": s} for s in ("Z", ["zz", "aB"], ["zz"])],
    "do_sample": [{"do_sample": False}, {"do_sample": True}],
    "num_beams": [{"num_beams": 1}, {"num_beams": 2}],
    "use_mtp": [{"use_mtp": False}, {"use_mtp": True}],
    "use_cache": [{"use_cache": True}, {"use_cache": False}],
    "cache_implementation": [{"cache_implementation": c} for c in ("dynamic", "static", "hybrid", "nonsense")],
    "cache_config": [{"cache_config": {"nbits": 4}}],
    "max_cache_len": [{"max_cache_len": 64}],
    "temperature": [{"temperature": t, **SAMPLED} for t in (1, 1.0, 0.5)] + [{"temperature": 0.5}],
    "top_k": [{"top_k": k, **SAMPLED} for k in (0, 1, 5, 50)],
    "top_p": [{"top_p": p, **SAMPLED} for p in (1, 1.0, 0.5)],
    "min_p": [{"min_p": p, **SAMPLED} for p in (0.0, 0.2)],
    "top_h": [{"top_h": h, **SAMPLED} for h in (0.5, 1)],
    "typical_p": [{"typical_p": p, **SAMPLED} for p in (1, 0.5)],
    "epsilon_cutoff": [{"epsilon_cutoff": e, **SAMPLED} for e in (0.0, 0.01, 1)],
    "eta_cutoff": [{"eta_cutoff": e, **SAMPLED} for e in (0.0, 0.01, 1)],
    "repetition_penalty": [{"repetition_penalty": p} for p in (1, 1.0, 1.5)],
    "encoder_repetition_penalty": [{"encoder_repetition_penalty": p} for p in (1, 1.5)],
    "length_penalty": [{"length_penalty": 2.0}],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": n} for n in (0, 1, 2)],
    "encoder_no_repeat_ngram_size": [{"encoder_no_repeat_ngram_size": n} for n in (0, 1, 2)],
    "bad_words_ids": [{"bad_words_ids": [[9], [10, 11]]}],
    "renormalize_logits": [{"renormalize_logits": True}, {"renormalize_logits": False}],
    "forced_bos_token_id": [{"forced_bos_token_id": 0}],
    "forced_eos_token_id": [{"forced_eos_token_id": 0}, {"forced_eos_token_id": [1, 7]}],
    "remove_invalid_values": [{"remove_invalid_values": True}, {"remove_invalid_values": False}],
    "exponential_decay_length_penalty": [{"exponential_decay_length_penalty": (2, 1.5), **EOS}],
    "suppress_tokens": [{"suppress_tokens": [0, 9]}, {"suppress_tokens": torch.tensor([9, 10])}],
    "begin_suppress_tokens": [{"begin_suppress_tokens": [0, 9]}],
    "sequence_bias": [{"sequence_bias": [[[9], 30.0]]}, {"sequence_bias": {(9,): -30.0}}],
    "token_healing": [{"token_healing": False}, {"token_healing": True}],
    "guidance_scale": [{"guidance_scale": 1}, {"guidance_scale": 1.5}],
    "watermarking_config": [
        {"watermarking_config": WatermarkingConfig(bias=20.0)},
        {"watermarking_config": {"bias": 20.0, "seeding_scheme": "selfhash"}},
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)},
    ],
    "num_return_sequences": [{"num_return_sequences": 1}, {"num_return_sequences": 2, **SAMPLED}],
    "output_attentions": [{"output_attentions": True}, {"output_attentions": True, **DICT}],
    "output_hidden_states": [{"output_hidden_states": True, **DICT}],
    "output_scores": [{"output_scores": True, **DICT}],
    "output_logits": [{"output_logits": True, **DICT}],
    "return_dict_in_generate": [DICT],
    "pad_token_id": [{"pad_token_id": p} for p in (0, 7, torch.tensor(7))],
    "bos_token_id": [{"bos_token_id": 3}],
    "eos_token_id": [{"eos_token_id": e} for e in (0, 9, [9, 10], torch.tensor([9, 10]), torch.tensor(9))],
    "decoder_start_token_id": [{"decoder_start_token_id": 3}],
    "is_assistant": [{"is_assistant": False}, {"is_assistant": True}],
    "num_assistant_tokens": [{"num_assistant_tokens": 2}],
    "num_assistant_tokens_schedule": [{"num_assistant_tokens_schedule": "heuristic"}],
    "assistant_confidence_threshold": [{"assistant_confidence_threshold": 0.9}],
    "prompt_lookup_num_tokens": [{"prompt_lookup_num_tokens": 3}],
    "max_matching_ngram_size": [{"max_matching_ngram_size": 2}],
    "assistant_early_exit": [{"assistant_early_exit": 1}],
    "assistant_lookbehind": [{"assistant_lookbehind": 5}],
    "target_lookbehind": [{"target_lookbehind": 5}],
    "assistant_ensemble_weight": [{"assistant_ensemble_weight": 0.5}],
    "speculation_type": [{"speculation_type": "dflash"}],
    "compile_config": [{"compile_config": CompileConfig()}],
    "disable_compile": [{"disable_compile": True}],
    "continuous_batching_config": [{"continuous_batching_config": {"page_size": 4}}],
    "low_memory": [{"low_memory": True}],
    "penalty_alpha": [{"penalty_alpha": 0.0}, {"penalty_alpha": 0.6}],
    "dola_layers": [{"dola_layers": "low"}],
    "diversity_penalty": [{"diversity_penalty": 1.0}],
    "num_beam_groups": [{"num_beam_groups": 2}],
    "constraints": [{"constraints": [1]}],
    "force_words_ids": [{"force_words_ids": [[9]]}],
    "prefill_chunk_size": [{"prefill_chunk_size": 3}],
    "transformers_version": [{"transformers_version": "4.0.0"}],
}
CASES = [
    pytest.param("llama", given, id=f"{name}-{i}") for name, each in VALUES.items() for i, given in enumerate(each)
]
# Settings that mean something else where there is an encoder.
OF_ENCODERS = (
    "max_length", "min_length", "min_new_tokens", "stop_strings", "use_cache", "repetition_penalty",
    "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id",
    "begin_suppress_tokens", "bos_token_id", "pad_token_id", "decoder_start_token_id",
)  # fmt: skip
CASES += [
    pytest.param("t5", given, id=f"t5-{name}-{i}") for name in OF_ENCODERS for i, given in enumerate(VALUES[name])
]
REFUSED = {
    "num_beams", "num_return_sequences", "use_mtp", "prompt_lookup_num_tokens", "assistant_early_exit",
    "assistant_ensemble_weight", "speculation_type", "penalty_alpha", "dola_layers", "constraints", "force_words_ids",
}  # fmt: skip
ALONE = {"use_cache", "cache_implementation", "guidance_scale", "watermarking_config", "output_attentions"}
NOT_REBUILT = ("guidance_scale-1", "watermarking_config-2")  # processors with a state


def sharp(model: Any) -> Any:
    """The model with probabilities of 0 and 1 alone: what it samples is what it says greedily."""
    with torch.no_grad():
        model.lm_head.weight *= 300
    return model


@pytest.fixture(scope="module")
def assistants() -> dict[tuple[str, bool], OnlineAssistant]:
    """An assistant for greedy answers, and one for sampled ones, of each architecture."""
    config = OnlineConfig(num_assistant_tokens=K, candidates="draft", update_strategy="manual")
    found = {}
    for architecture in ("llama", "t5"):
        pair = [models.double(m) for m in models.pair(architecture, k=K, **models.SHALLOW[architecture])]
        for sampled in (False, True):
            target, draft = (sharp(copy.deepcopy(m)) for m in pair) if sampled else pair
            found[architecture, sampled] = OnlineAssistant(target, draft, models.tokenizer(), config)
    return found


@contextlib.contextmanager
def asked(target: Any, route: str, given: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """The keywords of `generate` by which settings reach a request on this route."""
    if route == "keyword":
        yield given
        return
    config = GenerationConfig(**given)
    if route == "object":
        yield {"generation_config": config}
        return
    before = target.generation_config
    if route == "file":  # as models of the Hub have it; `save_pretrained` refuses some of the values
        (folder / "generation_config.json").write_text(config.to_json_string())
        config = GenerationConfig.from_pretrained(folder)
    config.update(**before.to_dict(), defaults_only=True)
    target.generation_config = config
    try:
        yield {}
    finally:
        target.generation_config = before


def outcome(call: Callable[[], Any]) -> Any:
    """The tokens of an answer, or the error in its place."""
    try:
        output = call()
    except Exception as error:  # noqa: BLE001
        return error
    return getattr(output, "sequences", output).tolist()


def settings_of(given: dict[str, Any]) -> dict[str, Any]:
    return {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **given}


def can_be_written(given: dict[str, Any]) -> bool:
    try:
        json.dumps(GenerationConfig(**given).to_json_string())
    except (TypeError, ValueError):
        return False
    return True


def test_every_field_of_a_generation_config_is_asked_for() -> None:
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} == VALUES.keys()


@pytest.mark.filterwarnings("ignore")  # transformers warns of settings that do nothing
@pytest.mark.parametrize(("architecture", "given"), CASES)
def test_a_setting_does_the_same_by_every_route(
    architecture: str,
    given: dict[str, Any],
    assistants: dict[tuple[str, bool], OnlineAssistant],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    name, assistant = next(iter(given)), assistants[architecture, bool(given.get("do_sample"))]
    target, tokenizer, given = assistant.target, assistant.tokenizer, settings_of(given)
    how = {"attention_mask": torch.ones_like(PROMPT)}
    refused, recorded, last = dict[str, bool](), list[dict[str, Any]](), list[Trace]()
    for route in ("keyword", "object", "file" if can_be_written(given) else "default"):
        with contextlib.ExitStack() as stack:
            try:
                keywords = stack.enter_context(asked(target, route, given, tmp_path))
            except (ValueError, TypeError, AttributeError):
                continue  # the config of transformers does not take the value
            traces: list[Trace] = []
            alone = outcome(lambda: target.generate(PROMPT, tokenizer=tokenizer, **how, **keywords))  # noqa: B023
            ours = outcome(lambda: assistant.generate(PROMPT, on_trace=traces.append, **how, **keywords))  # noqa: B023
        refused[route] = isinstance(ours, OSDError)
        if isinstance(alone, Exception):
            assert isinstance(ours, OSDError | type(alone)), ours
        elif refused[route]:
            assert name in REFUSED and name in str(ours)
        else:
            assert ours == alone
            last = traces
            recorded.append({k: v for k, v in traces[0].sampling.items() if k != "num_assistant_tokens"})
    assert len(set(refused.values())) <= 1, refused
    assert all(settings == recorded[0] for settings in recorded), recorded
    if last:
        live, found = AcceptanceStats.from_trace(last[0]), replay(assistant.draft, last, K)
        assert name in ALONE or given.get("do_sample") or found.accepted == live.accepted
    assert "approximate" not in caplog.text or request.node.callspec.id in NOT_REBUILT
    json.dumps(recorded)


def test_a_config_and_keywords_together_are_resolved_as_the_target_does(
    assistants: dict[tuple[str, bool], OnlineAssistant], tmp_path: Path
) -> None:
    assistant, how = assistants["llama", False], {"attention_mask": torch.ones_like(PROMPT)}
    config = GenerationConfig(max_new_tokens=20, repetition_penalty=1.5, num_beams=2, stop_strings=["Z"])
    given = {"generation_config": config, "max_new_tokens": 5, "num_beams": 1, "no_repeat_ngram_size": 1}
    with asked(assistant.target, "default", {"min_new_tokens": 3, "eos_token_id": 5, "num_beams": 3}, tmp_path):
        alone = assistant.target.generate(PROMPT, tokenizer=assistant.tokenizer, **how, **given)
        ours = assistant.generate(PROMPT, **how, **given)
    assert torch.equal(ours, alone)
    assert config.num_beams == 2


@pytest.mark.parametrize("entry", ["attached", "captured", "chat"])
def test_stop_strings_of_a_config_end_an_answer_where_the_target_ends_it(entry: str, tmp_path: Path) -> None:
    target, draft = models.pair(num_hidden_layers=1, k=K)
    tokenizer = models.tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    ids = tokenizer("user", return_tensors="pt", add_special_tokens=False).input_ids
    how = models.greedy(ids, max_new_tokens=24, pad_token_id=0)
    free = tokenizer.decode(target.generate(ids, **how)[0, ids.shape[1] :])
    stop = {"stop_strings": [free[8:10]]}
    alone = target.generate(ids, tokenizer=tokenizer, **stop, **how)
    assert ids.shape[1] + 8 < alone.shape[1] < ids.shape[1] + 24
    draft.generation_config.stop_strings = ["any"]  # a draft of the same family has them, too
    assistant = OnlineAssistant(target, draft, tokenizer, OnlineConfig(update_strategy="manual"))
    for route in ("default", "file"):
        with asked(target, route, stop, tmp_path):
            if entry == "chat":
                answer = assistant.chat("user", do_sample=False, max_new_tokens=24)
                assert answer == tokenizer.decode(alone[0, ids.shape[1] :])
                continue
            with assistant.attached() if entry == "attached" else capture_traces(target, print):
                ours = target.generate(ids, assistant_model=assistant.draft, tokenizer=tokenizer, **how)
        assert torch.equal(ours, alone)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [1, 2])
def test_settings_without_a_draft_are_answered_counted_and_logged_once(
    rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = models.pair(num_hidden_layers=1)
    assistant = OnlineAssistant(target, draft, config=OnlineConfig(update_strategy="manual"))
    ids, traces = PROMPT.repeat(rows, 1), list[Trace]()
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):
        ours = assistant.generate(ids, use_cache=False, on_trace=traces.append, **how)
    assert torch.equal(ours, target.generate(ids, use_cache=False, **how))
    with assistant.attached():
        assert torch.equal(target.generate(ids, use_cache=False, assistant_model=assistant.draft, **how), ours)
    assert [trace.completion_ids.tolist() for trace in traces] == [*ours[:, PROMPT.shape[1] :].tolist()] * 2
    assert assistant.stats.num_requests == 3 * rows
    assert assistant.stats.drafted == 0
    assert caplog.text.count("`use_cache` is set") == 1


def test_a_minimum_length_counts_the_padding_that_a_trace_does_not_have() -> None:
    target, draft = (models.double(model) for model in models.pair(num_hidden_layers=1, k=K))
    config = OnlineConfig(num_assistant_tokens=K, candidates="draft", update_strategy="manual")
    assistant, traces = OnlineAssistant(target, draft, config=config), list[Trace]()
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), models.prompt(2, seed=5)], 1)
    ids = torch.cat([ids, PROMPT])
    given = {"min_new_tokens": 6, "eos_token_id": list(range(10, 50)), "max_new_tokens": 12, "pad_token_id": 0}
    mask = (ids != 0).long()
    ours = assistant.generate(ids, attention_mask=mask, on_trace=traces.append, do_sample=False, **given)
    assert torch.equal(ours, target.generate(ids, attention_mask=mask, do_sample=False, **given))
    for trace in traces:
        assert trace.sampling["min_length"] == len(trace.prompt_ids) + 6
