"""Answers of engines as traces: they are what a recording of the same model is, or are refused with the reason."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import numpy as np
import pytest
import torch
from fake_engine import completion, warpers
from hypothesis import given, settings
from hypothesis import strategies as st

from osd_hf import Trace, replay
from osd_hf.engines.completions import ResponseReader
from osd_hf.errors import DataError
from osd_hf.logits_processors import Processors
from osd_hf.recording import record_traces

KEPT = 8
READER = ResponseReader(models.VOCAB, KEPT)


def request(prompt: Any, **settings: Any) -> dict[str, Any]:
    ids = prompt[0].tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
    return {
        "model": "tiny", "prompt": ids, "max_tokens": 12, "temperature": 0, "logprobs": KEPT,
        "return_token_ids": True, "return_tokens_as_token_ids": True, **settings,
    }  # fmt: skip


def as_chat(response: dict[str, Any], *, engine: str = "vllm") -> dict[str, Any]:
    """The same answer as `/v1/chat/completions` gives it."""
    (choice,) = response["choices"]
    found = choice["logprobs"]

    def entry(token: str, logprob: float) -> dict[str, Any]:
        if engine == "vllm":
            return {"token": token, "logprob": logprob, "bytes": []}
        return {"id": int(token.removeprefix("token_id:")), "token": " word", "logprob": logprob, "bytes": []}

    content = [
        {**entry(token, value), "top_logprobs": [entry(t, v) for t, v in top.items()]}
        for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    ]
    chat = {
        "index": 0, "message": {"role": "assistant", "content": choice["text"]}, "logprobs": {"content": content},
        "finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"],
        "token_ids": choice["token_ids"] if engine == "vllm" else None,
    }  # fmt: skip
    return {**response, "object": "chat.completion", "choices": [chat], "prompt_token_ids": choice["prompt_token_ids"]}


def assert_same(ours: Trace, theirs: Trace) -> None:
    assert ours.prompt_ids.tolist() == theirs.prompt_ids.tolist()
    assert ours.completion_ids.tolist() == theirs.completion_ids.tolist()
    assert ours.top_ids.tolist() == theirs.top_ids.tolist()
    assert (ours.prompt_ids.dtype, ours.completion_ids.dtype) == (np.int32, np.int32)
    assert ours.top_ids.dtype == theirs.top_ids.dtype
    assert (ours.top_logits.dtype, ours.tail_logprob.dtype) == (np.float16, np.float32)
    np.testing.assert_allclose(ours.top_logits, theirs.top_logits, rtol=2e-3, atol=1e-5)  # a unit of half precision
    np.testing.assert_allclose(np.exp(ours.tail_logprob), np.exp(theirs.tail_logprob), atol=1e-5)
    above = theirs.tail_logprob > -7
    np.testing.assert_allclose(ours.tail_logprob[above], theirs.tail_logprob[above], atol=1e-3)
    assert ours.rounds == ()
    assert (ours.vocab_size, ours.is_sampled) == (theirs.vocab_size, theirs.is_sampled)


@pytest.fixture(scope="module")
def target() -> Any:
    """One that now and then ends its answers."""
    target = models.build()
    ids = models.prompts(1)[0]
    answer = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    target.generation_config.eos_token_id = [int(answer[0, -5]), 9]
    return target


@pytest.fixture(scope="module")
def recorded(target: Any) -> list[Trace]:
    prompts = [p[0].tolist() for p in models.prompts(6)]
    traces = list(record_traces(target, prompts, max_new_tokens=12, num_logprobs=KEPT))
    assert {len(t) < 12 for t in traces} == {True, False}
    return traces


@pytest.fixture(scope="module")
def given_back(target: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(r, completion(target, r)) for r in map(request, models.prompts(6))]


@pytest.fixture
def good(given_back: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request and its response, to be spoiled."""
    return copy.deepcopy(given_back[0])


# --- what a recording would have kept -------------------------------------------------------------------------------


@pytest.mark.parametrize("with_request", [True, False])
def test_answers_are_what_a_recording_keeps(given_back: Any, recorded: list[Trace], with_request: bool) -> None:
    reader = ResponseReader(models.VOCAB, KEPT, eos_token_ids=recorded[0].sampling["eos_token_id"])
    for (asked, response), theirs in zip(given_back, recorded, strict=True):
        (ours,) = reader.traces(response, asked if with_request else None, domain="sql")
        assert_same(ours, theirs)
        assert (ours.domain, ours.created_at_seconds) == ("sql", response["created"])
        assert sorted(ours.sampling["eos_token_id"]) == sorted(theirs.sampling["eos_token_id"])
        assert ours.sampling.get("max_new_tokens") == (12 if with_request else None)
        assert ours.sampling["processors"] == []


@pytest.mark.parametrize("name", ["model", "", None, 7])
def test_the_target_goes_by_its_name_in_the_response_or_as_is_said(good: Any, name: Any) -> None:
    asked, response = good
    (plain,) = READER.traces({**response, "model": name}, asked)
    assert plain.target == (name if name == "model" else None)
    (told,) = replace(READER, target_version="v2").traces({**response, "model": name}, asked)
    assert told.target == "v2"


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_chats_are_read_as_well(given_back: Any, recorded: list[Trace], engine: str) -> None:
    for (asked, response), theirs in zip(given_back, recorded, strict=True):
        chat = as_chat(response, engine=engine)
        messages = {name: value for name, value in asked.items() if name != "prompt"} | {"messages": []}
        (ours,) = READER.traces(chat, messages)
        assert_same(ours, theirs)


@pytest.mark.parametrize("missing", ["prompt_token_ids", "token_ids"])
def test_ids_may_be_read_from_the_request_or_from_the_log_probs(
    missing: str, good: Any, recorded: list[Trace]
) -> None:
    asked, response = good
    response["choices"][0][missing] = None
    (ours,) = READER.traces(response, asked)
    assert_same(ours, recorded[0])


def test_all_log_probs_of_the_vocabulary_are_a_whole_row(target: Any) -> None:
    ids = models.prompts(1)[0]
    asked = request(ids, logprobs=models.VOCAB)
    (ours,) = ResponseReader(models.VOCAB, models.VOCAB).traces(completion(target, asked), asked)
    (theirs,) = record_traces(target, [ids[0].tolist()], max_new_tokens=12, num_logprobs=64)
    assert theirs.top_ids.shape[1] == 0
    assert_same(ours, theirs)
    assert ours.top_logits.shape == theirs.top_logits.shape


def test_several_choices_are_several_traces(good: Any) -> None:
    asked, response = good
    other = copy.deepcopy(response["choices"][0])
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        other["logprobs"][name] = other["logprobs"][name][:3]
    other["token_ids"], other["finish_reason"] = other["token_ids"][:3], "length"
    first, second = READER.traces({**response, "choices": [*response["choices"], other]}, asked)
    assert second.completion_ids.tolist() == first.completion_ids.tolist()[:3]
    assert len(first) > 3


NOW = 1.7e9


@pytest.mark.parametrize(
    "created, believed",
    [(NOW, True), (NOW - 86_400 * 400, True), (NOW + 30, True), (NOW * 1000, False), (0, False), (-NOW, False),
     (float("nan"), False), (10**400, False), ("1700000000", False)],
)  # fmt: skip
def test_a_servers_time_that_cannot_be_is_not_believed(good: Any, created: Any, believed: bool) -> None:
    asked, response = good
    reader = ResponseReader(models.VOCAB, KEPT, clock=lambda: NOW)
    (trace,) = reader.traces({**response, "created": created}, asked)
    assert trace.created_at_seconds == (created if believed else NOW)


@pytest.mark.parametrize("value", ["hot", [1], {}, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_settings_that_are_no_numbers_are_refused(good: Any, name: str, value: Any) -> None:
    asked, response = good
    with pytest.raises(DataError, match=f"its {name} is no number"):
        READER.traces(response, {**asked, "temperature": 0.5, name: value})


# --- what ends an answer --------------------------------------------------------------------------------------------


def ends(good: Any, asked_for: dict[str, Any], **choice: Any) -> Any:
    asked, response = good
    response["choices"][0] |= choice
    (trace,) = READER.traces(response, {**asked, **asked_for})
    return trace.sampling["eos_token_id"], int(trace.completion_ids[-1])


def test_what_an_answer_ends_with_ends_answers(good: Any) -> None:
    found, last = ends(good, {}, finish_reason="stop", stop_reason=None)
    assert found == [last]


@pytest.mark.parametrize(
    ("asked_for", "choice"),
    [
        ({}, {"finish_reason": "length"}),
        ({}, {"finish_reason": "stop", "stop_reason": 5}),
        ({"stop": ["\n"]}, {"finish_reason": "stop", "stop_reason": None}),
    ],
)
def test_what_was_cut_elsewhere_ends_no_answer(good: Any, asked_for: Any, choice: Any) -> None:
    assert ends(good, asked_for, **choice)[0] is None


# --- sampled ones ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0},
    ],
)
def test_sampled_settings_rebuild_the_processors_of_transformers(
    target: Any, shape: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    asked = {**request(models.prompts(2)[1], seed=3), **shape}
    (trace,) = READER.traces(completion(target, asked), asked)
    assert trace.is_sampled
    wanted = warpers(shape)
    assert trace.sampling["processors"] == [type(w).__name__ for w in wanted]
    rows = torch.randn(len(trace), models.VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    ids = torch.zeros(1, 1, dtype=torch.long)
    expected = rows.clone()
    for warper in wanted:
        expected = warper(ids, expected)
    with caplog.at_level(logging.WARNING):
        found = Processors(target, trace)(rows)
    assert torch.equal(found, expected)
    assert not [r for r in caplog.records if "processors" in r.message]
    assert bool(torch.isinf(found).any()) == any(name in shape and shape[name] not in (0, -1, 1, 0.0, 1.0)
                                                 for name in ("top_k", "top_p", "min_p"))  # fmt: skip


def test_a_sampled_token_below_the_kept_ones_leaves_the_largest_ones(target: Any) -> None:
    asked = request(models.prompts(2)[1], temperature=6.0, seed=5)
    response = completion(target, asked)
    (trace,) = READER.traces(response, asked)
    assert any(len(top) == KEPT + 1 for top in response["choices"][0]["logprobs"]["top_logprobs"])
    ids = [*asked["prompt"], *trace.completion_ids.tolist()]
    logits = target(torch.tensor([ids])).logits[0, len(asked["prompt"]) - 1 : -1]
    assert trace.top_ids.tolist() == logits.topk(KEPT).indices.tolist()
    kept = np.exp(trace.kept_logprobs()).sum(axis=1) + np.exp(trace.tail_logprob)
    np.testing.assert_allclose(kept, 1, atol=1e-4)
    assert replay(models.draft_of(target, 0.1), [trace], 3).examined > 0


def test_without_a_request_the_answer_says_whether_it_is_greedy(target: Any) -> None:
    for wanted, asked in ((False, request([3, 4, 5])), (True, request([3, 4, 5], temperature=5.0, seed=1))):
        response = completion(target, asked)
        (trace,) = READER.traces(response)
        assert trace.is_sampled == wanted
        assert trace.sampling["processors"] == []
        # Whoever asks for no temperature gets the usual one, which is 1.
        known = {name: value for name, value in asked.items() if name != "temperature"}
        assert READER.traces(response, known)[0].is_sampled


def test_a_greedy_answer_that_is_none_is_refused(target: Any) -> None:
    asked = request([3, 4, 5], temperature=5.0, seed=1)
    with pytest.raises(DataError, match=r"not the most probable ones; .*--logprobs-mode raw_logprobs"):
        READER.traces(completion(target, asked), {**asked, "temperature": 0})


# --- properties of rows ---------------------------------------------------------------------------------------------


@st.composite
def responses(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """One position a row, of random probabilities, some of them equal; and how many are kept."""
    size = draw(st.integers(2, 12))
    length = draw(st.integers(1, 4))
    kept = draw(st.integers(1, size))
    tokens, values, tops = [], [], []
    for _ in range(length):
        weights = np.array(draw(st.lists(st.integers(1, 4), min_size=size, max_size=size)), float)
        row = np.log(weights / weights.sum())
        order = draw(st.permutations(range(size)))
        top = sorted(order, key=lambda i: -row[i])[: draw(st.integers(kept, size))]
        token = draw(st.sampled_from(range(size)))
        tokens.append(f"token_id:{token}")
        values.append(float(row[token]))
        tops.append({f"token_id:{i}": float(row[i]) for i in draw(st.permutations(top))})
    logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
    ids = [int(t.removeprefix("token_id:")) for t in tokens]
    choice = {"prompt_token_ids": [1], "token_ids": ids, "logprobs": logprobs, "finish_reason": "length"}
    return {"choices": [choice], "created": 1}, kept


@given(responses())
@settings(max_examples=80)
def test_rows_are_whole_and_ordered_with_the_emitted_token_first_of_equals(drawn: Any) -> None:
    response, kept = drawn
    logprobs = response["choices"][0]["logprobs"]
    (trace,) = ResponseReader(13, kept).traces(response)  # one more than is ever named: never a whole row
    assert trace.top_ids.shape == trace.top_logits.shape == (len(trace), kept)
    assert (trace.top_logits[:, 0] == 0).all()
    assert (np.diff(trace.top_logits, axis=1) <= 0).all()
    np.testing.assert_allclose(
        np.exp(trace.kept_logprobs()).sum(axis=1) + np.exp(trace.tail_logprob), 1, atol=1e-5
    )  # fmt: skip
    for t, (token, value, top) in enumerate(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    ):
        all_of_them = {**top, token: value}
        ids = [f"token_id:{i}" for i in trace.top_ids[t]]
        assert len(set(ids)) == kept
        # The largest ones, each with its own log-prob.
        assert sorted((all_of_them[i] for i in ids), reverse=True) == sorted(all_of_them.values(), reverse=True)[:kept]
        found = np.array([all_of_them[i] - all_of_them[ids[0]] for i in ids])
        np.testing.assert_allclose(trace.top_logits[t], found, atol=2e-3)
        if value == max(all_of_them.values()):
            assert ids[0] == token
    best = [max({**top, token: value}.values()) for token, value, top in
            zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)]  # fmt: skip
    assert trace.is_sampled == (not all(np.isclose(logprobs["token_logprobs"], best)))


# --- refusals -------------------------------------------------------------------------------------------------------


def of_logprobs(**changes: Any) -> Callable[[Any, Any], None]:
    return lambda asked, response: response["choices"][0]["logprobs"].update(changes)


def of_choice(**changes: Any) -> Callable[[Any, Any], None]:
    return lambda asked, response: response["choices"][0].update(changes)


def of_request(**changes: Any) -> Callable[[Any, Any], None]:
    return lambda asked, response: asked.update(changes)


def of_position(change: Callable[[dict[str, Any]], object]) -> Callable[[Any, Any], None]:
    return lambda asked, response: change(response["choices"][0]["logprobs"]) and None


def without_prompt(asked: Any, response: Any) -> None:
    response["choices"][0]["prompt_token_ids"], asked["prompt"] = None, "a text"


def cut_short(asked: Any, response: Any) -> None:
    response["choices"][0]["token_ids"] = response["choices"][0]["token_ids"][:-1]


def rename(name: str) -> Callable[[Any, Any], None]:
    def spoil(asked: Any, response: Any) -> None:
        top = response["choices"][0]["logprobs"]["top_logprobs"][1]
        top[name] = top.pop(min(top, key=top.__getitem__))

    return spoil


def revalue(value: float) -> Callable[[Any, Any], None]:
    def spoil(asked: Any, response: Any) -> None:
        top = response["choices"][0]["logprobs"]["top_logprobs"][1]
        top[min(top, key=top.__getitem__)] = value

    return spoil


def too_sure(asked: Any, response: Any) -> None:
    for top in response["choices"][0]["logprobs"]["top_logprobs"]:
        top.update(dict.fromkeys(top, -0.5))


def chat_by_text(asked: Any, response: Any) -> None:
    content = [{"token": "a", "logprob": -0.1, "top_logprobs": []}]
    response["choices"][0]["logprobs"] = {"content": content}


REFUSALS: list[tuple[Callable[[Any, Any], None], str | None]] = [  # `None`: any message
    (lambda asked, response: response.update(choices=[]), "the response has no choices"),
    (of_choice(finish_reason=None), "a piece of a stream, or was cut off; log complete responses"),
    (without_prompt, "no token ids of the prompt; ask with `return_token_ids=true`"),
    (of_choice(prompt_token_ids=[3, 64]), "the prompt has the id 64, the target's vocabulary ends at 64"),
    (of_choice(token_ids=[3, 1 << 40]), "the completion has the id 1099511627776"),
    (of_choice(token_ids="text"), "the completion is no list of token ids"),
    (cut_short, "the token ids are others than those of the log-probs"),
    (of_choice(logprobs=None), "there are no log-probs; ask for `logprobs=8`"),
    (of_logprobs(top_logprobs=None), "there are no log-probs of the most probable tokens"),
    (of_position(lambda p: p["top_logprobs"][1].popitem()), "a position has 7 log-probs, 8 are kept"),
    (of_position(lambda p: p["tokens"].__setitem__(0, " a")), "ask with `return_tokens_as_token_ids=true`"),
    (rename("token_id:64"), "the log-probs name the id 64, the vocabulary ends at 64"),
    (revalue(math.nan), "a position has log-probs that are none"),
    (too_sure, "the log-probs of a position add up to more than one"),
    (chat_by_text, "ask with `return_tokens_as_token_ids=true`"),
    (
        lambda asked, response: response["choices"][0].update(
            token_ids=[], logprobs={"tokens": [], "token_logprobs": [], "top_logprobs": []}
        ),
        "the answer is empty",
    ),
    *[
        (of_request(**{name: value}), f"its tokens were shaped by {name}, not by the target alone")
        for name, value in {
            "frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.1, "repeat_penalty": 1.1,
            "length_penalty": 0.9, "logit_bias": {"5": 1}, "bad_words": ["no"], "allowed_token_ids": [3],
            "min_tokens": 2, "ignore_eos": True, "use_beam_search": True, "logits_processors": ["a"],
            "thinking_token_budget": 9, "structured_outputs": {"choice": ["a"]}, "guided_json": {}, "regex": "a",
            "response_format": {"type": "json_object"}, "grammar": "root ::= a", "ebnf": "a", "echo": True,
            "json_schema": {"type": "object"}, "tool_choice": "required", "logprob_token_ids": [3],
        }.items()
    ],
    (of_request(min_tokens=2, echo=True), "shaped by min_tokens, echo"),
    (lambda asked, response: response.pop("choices") and None, None),
    (lambda asked, response: response.update(choices=["text"]), None),
    (of_logprobs(token_logprobs=[-1.0]), None),
    (of_position(lambda p: p["top_logprobs"].__setitem__(2, None)), None),
    (rename("token_id:a"), None),
    (rename(f"token_id:{1 << 70}"), None),
    (of_logprobs(content=[{"token": "token_id:5"}]), None),  # a chat's entry without a log-prob
    (of_request(max_tokens=math.inf), None),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), REFUSALS)
def test_what_cannot_be_learned_from_is_refused(good: Any, spoil: Any, message: str | None) -> None:
    asked, response = good
    READER.traces(response, asked)
    spoil(asked, response)
    with pytest.raises(DataError, match=message):
        READER.traces(response, asked)


def test_settings_that_change_nothing_are_accepted(good: Any, recorded: list[Trace]) -> None:
    asked, response = good
    asked |= {
        "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0,
        "logit_bias": {}, "bad_words": [], "allowed_token_ids": None, "min_tokens": 0, "ignore_eos": False,
        "structured_outputs": None, "response_format": {"type": "text"}, "echo": False, "top_p": 0.5, "stream": True,
    }  # fmt: skip
    (trace,) = READER.traces(response, asked)
    assert_same(trace, recorded[0])
    assert trace.sampling["processors"] == []  # top_p does nothing to a greedy answer


def test_a_prompt_that_the_server_cut_is_not_taken_whole(good: Any) -> None:
    asked, response = good
    for part in (response, *response["choices"]):
        part.pop("prompt_token_ids", None)
    assert READER.traces(response, asked)
    with pytest.raises(DataError, match="ids of the prompt"):
        READER.traces(response, {**asked, "truncate_prompt_tokens": 3})
