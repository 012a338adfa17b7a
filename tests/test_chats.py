"""Turns of a chat that pass the target's cache on: the draft's is kept beside it, and reads nothing twice."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from test_lossless import transitions_fit

from osd_hf import OnlineAssistant, Trace
from osd_hf.decoding.forward import DraftForward

NEW, MORE = 10, 4  # tokens of an answer, and of what is asked then
UNREAD = 3  # tokens at the end of an answer that a draft has not read, at most


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward of the draft."""
    counts: list[int] = []
    feed = DraftForward.feed

    def counting(self: DraftForward, ids: torch.Tensor, *args: Any) -> torch.Tensor:
        counts.append(ids.shape[1])
        return feed(self, ids, *args)

    monkeypatch.setattr(DraftForward, "feed", counting)
    return counts


def leave(count: int) -> None:
    if count == 2:
        raise ConnectionResetError


def turn(assistant: OnlineAssistant, ids: torch.Tensor, cache: Any = None, **settings: Any) -> tuple[Any, Trace]:
    traces: list[Trace] = []
    settings = {"do_sample": False, "max_new_tokens": NEW, **settings}
    settings |= {} if cache is None else {"past_key_values": cache}
    output = assistant.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, on_trace=traces.append, **settings
    )
    return output, traces[0]


def asked_on(output: Any, seed: int = 1) -> torch.Tensor:
    return torch.cat([output.sequences, models.prompt(MORE, seed=seed)], dim=1)


def drafted(trace: Trace) -> list[list[int]]:
    return [r.drafted_ids.tolist() for r in trace.rounds]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
def test_the_second_turn_reads_what_is_new_and_proposes_what_a_fresh_draft_would(
    architecture: str, fed: list[int]
) -> None:
    assistant = models.assistant_of(*models.pair(architecture, noise=0.08))
    first, _ = turn(assistant, models.prompt(30))
    ids, fresh = asked_on(first), copy.deepcopy(first.past_key_values)
    fed.clear()
    theirs, its_trace = turn(assistant, ids, fresh)
    assert fed[0] == ids.shape[1]
    fed.clear()
    ours, trace = turn(assistant, ids, first.past_key_values)
    assert MORE < fed[0] <= MORE + UNREAD
    assert (
        ours.sequences.tolist()
        == theirs.sequences.tolist()
        == [models.alone(assistant.target, ids, max_new_tokens=NEW)[0].tolist()]
    )
    assert drafted(trace) == drafted(its_trace)
    assert any(r.num_accepted for r in trace.rounds)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_history_that_was_edited_is_read_from_there(architecture: str, fed: list[int]) -> None:
    target, _ = models.pair()
    draft = models.draft_of(models.build(architecture)) if architecture != "llama" else models.draft_of(target)
    assistant = models.assistant_of(target, draft)
    first, _ = turn(assistant, models.prompt(30))
    ids, kept = asked_on(first), 20
    ids[0, kept] = 3 + (ids[0, kept] - 2) % 7
    cache = first.past_key_values
    cache.crop(kept - cache.get_seq_length())
    _, as_fresh = turn(assistant, ids, copy.deepcopy(cache))
    fed.clear()
    again, trace = turn(assistant, ids, cache)
    # A window has forgotten what came before it.
    assert fed[0] == ids.shape[1] - (kept if architecture == "llama" else 0)
    assert again.sequences[0].tolist() == models.alone(target, ids, max_new_tokens=NEW)[0].tolist()
    assert drafted(trace) == drafted(as_fresh)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_turn_in_which_nothing_was_drafted_keeps_nothing(architecture: str) -> None:
    assistant = models.assistant_of(*models.pair(architecture, num_hidden_layers=2))
    first, _ = turn(assistant, models.prompt(10), max_new_tokens=1)
    ids = asked_on(first)
    again, _ = turn(assistant, ids, first.past_key_values)
    assert again.sequences[0].tolist() == models.alone(assistant.target, ids, max_new_tokens=NEW)[0].tolist()


def test_another_version_reads_all_anew(fed: list[int]) -> None:
    assistant = models.assistant_of(*models.pair(noise=0.2), optimizer="adamw")
    ids, cache = models.prompt(30), None
    for version in range(3):  # the third is written where the second one was
        assert assistant.version == version
        fed.clear()
        output, _ = turn(assistant, ids, cache)
        assert fed[0] == ids.shape[1]
        assert output.sequences[0].tolist() == models.alone(assistant.target, ids, max_new_tokens=NEW)[0].tolist()
        ids, cache = asked_on(output, seed=version), output.past_key_values
        assistant.update(1)


def test_the_oldest_of_many_chats_are_forgotten_and_so_is_one_that_failed(fed: list[int]) -> None:
    assistant = models.assistant_of(*models.pair(num_hidden_layers=1))
    *_, failed, newest = outputs = [turn(assistant, models.prompt(30, seed=n), max_new_tokens=3)[0] for n in range(20)]
    cache = failed.past_key_values
    with pytest.raises(ConnectionResetError):
        turn(assistant, asked_on(failed), cache, streamer=models.Streamer(leave))
    cache.crop(30 - cache.get_seq_length())
    for output, is_read in ((outputs[0], False), (failed, False), (newest, True)):
        fed.clear()
        turn(assistant, asked_on(output), output.past_key_values)
        assert fed[0] <= MORE + UNREAD if is_read else fed[0] == 30 + 3 + MORE


def test_sampled_turns_have_the_targets_distribution(fed: list[int]) -> None:
    target, draft = models.bigram(0), models.bigram(1)
    assistant = models.assistant_of(target, draft)
    ids, cache, answers = torch.tensor([[0, 1, 2]]), None, []
    for number in range(3):
        fed.clear()
        start = ids.shape[1]
        output, _ = turn(assistant, ids, cache, do_sample=True, top_k=0, max_new_tokens=120)
        assert number == 0 or fed[0] <= 1 + UNREAD
        answers.append(output.sequences[0, start - 1 :].tolist())
        ids, cache = torch.cat([output.sequences, torch.tensor([[number]])], dim=1), output.past_key_values
    table = target.by_token.detach().double().softmax(-1).numpy()
    assert transitions_fit(answers, table) > 1e-3


def test_a_compiled_draft_keeps_nothing(fed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    assistant = models.assistant_of(*models.pair(num_hidden_layers=1), compile_draft=True)
    first, _ = turn(assistant, models.prompt(30))
    ids = asked_on(first)
    fed.clear()
    again, _ = turn(assistant, ids, first.past_key_values)
    assert fed[0] == ids.shape[1]
    assert again.sequences[0].tolist() == models.alone(assistant.target, ids, max_new_tokens=NEW)[0].tolist()
