"""Turns of a chat that pass the target's cache on."""

from typing import Any

import models
import pytest
import torch
from test_lossless import transitions_fit

from osd_hf import OnlineAssistant

NEW, MORE = 10, 4  # tokens of an answer, and of the next question


def turn(assistant: OnlineAssistant, ids: torch.Tensor, cache: Any = None, **settings: Any) -> Any:
    settings = {"do_sample": False, "max_new_tokens": NEW, **settings}
    settings |= {} if cache is None else {"past_key_values": cache}
    return assistant.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **settings)


@pytest.mark.parametrize("first_tokens", [1, NEW])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
def test_later_turns_and_edited_histories_are_answered_as_by_the_target(architecture: str, first_tokens: int) -> None:
    target, draft = models.pair(architecture, noise=0.08)
    assistant = models.assistant_of(target, draft)
    output = turn(assistant, models.prompt(30), max_new_tokens=first_tokens)
    for seed in (1, 2):
        ids = torch.cat([output.sequences, models.prompt(MORE, seed=seed)], dim=1)
        output = turn(assistant, ids, output.past_key_values)
        assert output.sequences[0].tolist() == models.alone(target, ids, max_new_tokens=NEW)[0].tolist()
    assert assistant.stats.accepted > 0
    if architecture == "llama":  # from the caches of the others, earlier tokens cannot be restored
        ids, cache = output.sequences[:, :20], output.past_key_values
        cache.crop(19 - cache.get_seq_length())
        again = turn(assistant, ids, cache)
        assert again.sequences[0].tolist() == models.alone(target, ids, max_new_tokens=NEW)[0].tolist()


@pytest.mark.parametrize("hidden", [0, 2])
def test_a_prompt_that_is_only_in_the_cache_is_continued_as_by_the_target(hidden: int) -> None:
    target, draft = models.pair(noise=0.08)
    assistant, ids = models.assistant_of(target, draft), models.prompt(MORE)
    mask = torch.ones(1, 30 + MORE, dtype=torch.long)
    mask[:, :hidden] = 0
    with torch.no_grad():
        caches = [target(models.prompt(30, seed=1)).past_key_values for _ in range(2)]
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW}
    ours = assistant.generate(ids, past_key_values=caches[0], **settings)
    assert ours.tolist() == target.generate(ids, past_key_values=caches[1], **settings).tolist()


def test_sampled_turns_have_the_targets_distribution() -> None:
    target, draft = models.bigram(0), models.bigram(1)
    assistant = models.assistant_of(target, draft)
    ids, cache, answers = torch.tensor([[0, 1, 2]]), None, []
    for number in range(3):
        start = ids.shape[1]
        output = turn(assistant, ids, cache, do_sample=True, top_k=0, max_new_tokens=120)
        answers.append(output.sequences[0, start - 1 :].tolist())
        ids, cache = torch.cat([output.sequences, torch.tensor([[number]])], dim=1), output.past_key_values
    table = target.by_token.detach().double().softmax(-1).numpy()
    assert transitions_fit(answers, table) > 1e-3
