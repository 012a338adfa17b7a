"""Calls of `generate` that few users make, each of which once gave other tokens, an error, or another cache."""

from typing import Any

import models
import pytest
import torch
from test_exactness import SIZES
from transformers import AutoModelForCausalLM, LogitsProcessor, Phi3Config, StaticCache
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList


class InHalfPrecision(LogitsProcessor):  # type: ignore[misc]
    is_stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.half()


CALLS: dict[str, Any] = {
    "static cache": lambda target: {"past_key_values": StaticCache(config=target.config, max_cache_len=64)},
    "two maximum lengths": lambda _: {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(12), MaxLengthCriteria(20)])
    },
    "half precision": lambda _: {"logits_processor": [InHalfPrecision()], "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("call", CALLS)
def test_the_answer_is_the_targets(call: str) -> None:
    target, draft = models.pair(noise=0.02)
    assistant, ids = models.assistant_of(target, draft), models.prompt(8)
    ours, own = (
        generate(ids, **models.greedy(ids, **CALLS[call](target)))
        for generate in (assistant.generate, target.generate)
    )
    assert ours.tolist() == own.tolist()


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # its new name is not in 5.20
def test_a_target_that_trains_with_checkpoints_answers_as_it_does_alone(architecture: str) -> None:
    target, draft = models.pair(architecture, noise=0.02)
    target.gradient_checkpointing_enable()
    target.train()
    assistant, ids = models.assistant_of(target, draft), models.prompt(8)
    ours, own = (generate(ids, **models.greedy(ids)) for generate in (assistant.generate, target.generate))
    assert ours.tolist() == own.tolist()


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("tokens", [8, 15, 17])
def test_a_model_that_makes_a_new_cache_returns_the_cache_of_the_whole_answer(window: int | None, tokens: int) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
    rope |= {"original_max_position_embeddings": 16, "factor": 4.0}
    positions = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    config = Phi3Config(**SIZES, **positions, pad_token_id=0, sliding_window=window, rope_parameters=rope)
    target = models.loud(AutoModelForCausalLM.from_config(config))
    assistant, ids = models.assistant_of(target, models.draft_of(target, 0.02)), models.prompt(tokens)
    settings = models.greedy(ids, return_dict_in_generate=True)
    ours, own = (generate(ids, **settings) for generate in (assistant.generate, target.generate))
    assert ours.sequences.tolist() == own.sequences.tolist()
    assert ours.past_key_values.get_seq_length() == own.past_key_values.get_seq_length()


def test_attentions_of_a_window_have_the_shapes_of_the_target() -> None:
    target, draft = models.pair("mistral", noise=0.02)
    target.set_attn_implementation("eager")
    assistant, ids = models.assistant_of(target, draft), models.prompt(12)
    settings = models.greedy(ids, return_dict_in_generate=True, output_attentions=True)
    ours, own = (generate(ids, **settings).attentions for generate in (assistant.generate, target.generate))
    assert [[x.shape for x in step] for step in ours] == [[x.shape for x in step] for step in own]
