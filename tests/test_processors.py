"""Processors and criteria: which are served with a draft, which by the target alone, and how a memory is replayed."""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from transformers import LogitsProcessor

from osd_hf import OnlineAssistant, OnlineConfig, ReplayedProcessor, capture_traces
from osd_hf.errors import UnsupportedGenerationError

IDS = models.prompt()
FROZEN = OnlineConfig(num_assistant_tokens=5, update_strategy="manual")


class Remembering(LogitsProcessor):  # type: ignore[misc]
    """Prefers another token at each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        pushed = scores.clone()
        pushed[:, 3 + self.calls % 5] += 30.0
        return pushed


def allowed(batch: int, ids: torch.Tensor) -> list[int]:
    return [token for token in range(3, models.VOCAB) if token % 3 == len(ids) % 3]


def stateless(function: Any) -> Any:
    function.is_stateless = True
    return function


@stateless
def forbids_a_token(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, 5] = -torch.inf
    return scores


UNKNOWN: dict[str, Callable[[], dict[str, Any]]] = {
    "Remembering": lambda: {"logits_processor": [Remembering()]},
    "<lambda>": lambda: {"logits_processor": [lambda ids, scores: scores.roll(1, -1)]},
    "allowed": lambda: {"prefix_allowed_tokens_fn": allowed},
}
STATELESS: dict[str, dict[str, Any]] = {
    "a processor": {"logits_processor": [forbids_a_token]},
    "a function": {"prefix_allowed_tokens_fn": stateless(functools.partial(allowed))},
}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return models.pair()


def answer(generate: Callable[..., Any], **kwargs: Any) -> list[int]:
    kwargs = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(IDS), **kwargs}
    return generate(IDS, **kwargs)[0, IDS.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_processor_is_served_without_speculation(
    name: str, do_sample: bool, pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = models.build(), pair[1]
    assistant = OnlineAssistant(target, draft, config=FROZEN)

    def asked(generate: Callable[..., Any], **kwargs: Any) -> list[int]:
        torch.manual_seed(0)
        return answer(generate, do_sample=do_sample, **UNKNOWN[name](), **kwargs)

    alone = asked(target.generate)
    assert asked(assistant.generate) == asked(assistant.generate, streamer=models.Streamer()) == alone
    assert assistant.stats.drafted == 0
    assert caplog.text.count(f"`{name}` may keep state between calls") == 1
    assert "is_stateless = True" in caplog.text
    assert "ReplayedProcessor" in caplog.text
    # A draft of the caller's is refused where it is captured.
    refused = pytest.raises(UnsupportedGenerationError, match=f"`{name}` may keep state.*is_stateless.*Replayed")
    with models.ForwardCounter(target, draft) as forwards, capture_traces(target, print), refused:
        asked(target.generate, assistant_model=draft)
    assert forwards.count == 0


@pytest.mark.parametrize("name", STATELESS)
def test_what_is_declared_stateless_is_served_with_the_draft(name: str, pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    alone = answer(target.generate, **STATELESS[name])
    for _ in range(2):
        assert answer(assistant.generate, **STATELESS[name]) == alone
    assert assistant.stats.drafted > 0


def at_the_tenth_call(calls: Iterator[int]) -> Callable[..., torch.Tensor]:
    return lambda input_ids, scores, **kwargs: torch.full((input_ids.shape[0],), next(calls) >= 10)


@pytest.mark.parametrize("kwargs", [{}, {"streamer": models.Streamer()}], ids=["tokens", "streamed"])
def test_a_criterion_that_remembers_stops_where_it_stops_the_target(
    kwargs: dict[str, Any], pair: tuple[Any, Any]
) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    alone = answer(target.generate, stopping_criteria=[at_the_tenth_call(itertools.count(1))])
    assert len(alone) == 10
    calls = itertools.count(1)
    assert answer(assistant.generate, stopping_criteria=[at_the_tenth_call(calls)], **kwargs) == alone
    assert next(calls) == 11
    assert assistant.stats.drafted > 0


def is_unsure(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    return scores[-1].softmax(-1).amax(-1) < 0.1


def test_a_criterion_reads_the_scores_of_the_newest_token(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    settings = {"return_dict_in_generate": True, "output_scores": True}
    found, expected = (
        generate(models.prompt(), do_sample=False, max_new_tokens=40, stopping_criteria=[is_unsure], **settings)
        for generate in (assistant.generate, target.generate)
    )
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert len(found.scores) == len(expected.scores) < 40


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_its_caller_ends_has_ended(streams: bool, pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assistant, is_stopped = OnlineAssistant(target, draft, config=FROZEN), threading.Event()

    @stateless
    def stops(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), is_stopped.is_set())

    @stateless
    def ends(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > IDS.shape[1] + 6:
            is_stopped.set()
        return scores

    streamer = models.Streamer(lambda count: is_stopped.set() if count > 2 else None)  # the prompt, and two rounds
    how: dict[str, Any] = {"streamer": streamer} if streams else {"logits_processor": [ends]}
    told = answer(assistant.generate, max_new_tokens=48, stopping_criteria=[stops], **how)
    assert is_stopped.is_set()
    assert 0 < len(told) < 48
    assert told == answer(target.generate, max_new_tokens=48)[: len(told)]


class Matcher(LogitsProcessor):  # type: ignore[misc]
    """A small grammar with a memory: each token is to be the sum of the tokens before it, or one of four beside."""

    made: list["Matcher"] = []

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sums: list[int] = []
        Matcher.made.append(self)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with self.lock:
            if self.sums:
                token = int(input_ids[0, -1])
                assert token in self.allowed() or token == 2, "no token of the grammar"
                self.sums.append(self.sums[-1] * 5 + token)
            else:
                self.sums.append(0)
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.allowed()] = scores[:, self.allowed()]
        return masked

    def allowed(self) -> list[int]:
        return [2, *(3 + (self.sums[-1] + 7 * i) % (models.VOCAB - 3) for i in range(6))]

    def take_back(self, calls: int) -> None:
        del self.sums[-calls:]
        assert self.sums


def opted_in(takes_back: bool) -> ReplayedProcessor:
    return ReplayedProcessor(Matcher, Matcher.take_back if takes_back else None)


@functools.cache
def answered_with_a_memory() -> list[tuple[torch.Tensor, dict[str, Any], list[list[int]]]]:
    """Prompts, settings, and what the target alone answers."""
    target, found = models.build(), []
    for ids in models.prompts(4):
        for eos in (None, 2):
            kwargs = {"max_new_tokens": 24, "attention_mask": torch.ones_like(ids), "eos_token_id": eos}
            alone = target.generate(ids, logits_processor=[Matcher()], do_sample=False, **kwargs)
            found.append((ids, kwargs, alone.tolist()))
    return found


@pytest.mark.parametrize("takes_back", [True, False])
def test_a_processor_with_a_memory_is_served_exactly_while_the_draft_learns(takes_back: bool) -> None:
    target, draft = models.pair(noise=0.2)
    config = replace(
        FROZEN, update_strategy="interval", update_interval=2, steps_per_update=2, learning_rate=3e-3, gate=False
    )
    assistant = OnlineAssistant(target, draft, config=config)
    processor = opted_in(takes_back)
    for ids, kwargs, alone in answered_with_a_memory():
        ours = assistant.generate(ids, logits_processor=[processor], do_sample=False, **kwargs)
        assert ours.tolist() == alone
    assert 0.1 < assistant.stats.alpha < 0.95
    assert assistant.version >= 3


def test_a_memory_serves_the_target_alone_and_taking_back_spares_new_processors(pair: tuple[Any, Any]) -> None:
    made, assistant = {}, OnlineAssistant(*pair, config=FROZEN)
    alone = answer(pair[0].generate, logits_processor=[Matcher()])
    for takes_back in (True, False):
        processor = opted_in(takes_back)
        assert [answer(pair[0].generate, logits_processor=[processor]) for _ in range(2)] == [alone] * 2
        Matcher.made.clear()
        assert answer(assistant.generate, logits_processor=[processor]) == alone
        made[takes_back] = len(Matcher.made)
    assert made[True] <= 3 < made[False]


def test_requests_at_once_share_no_memory(pair: tuple[Any, Any]) -> None:
    processor, expected, scores = opted_in(True), Matcher(), torch.zeros(1, models.VOCAB)
    one, other = processor.begin(6), processor.begin(6)
    longer = torch.cat([IDS, torch.tensor([[3]])], dim=1)
    first, second = expected(IDS, scores), expected(longer, scores)
    for ids, result in ((IDS, first), (longer, second)):
        assert torch.equal(one(ids, scores), result)
        assert torch.equal(other(ids, scores), result)
    assert torch.equal(one(IDS, scores), first)


def test_a_processor_that_fails_begins_anew(pair: tuple[Any, Any]) -> None:
    processor, scores = opted_in(True), torch.zeros(1, models.VOCAB)
    expected = Matcher()(IDS, scores)
    processor(IDS, scores)
    wrong = next(t for t in range(3, models.VOCAB) if t not in Matcher.made[-1].allowed())
    with pytest.raises(AssertionError, match="no token of the grammar"):
        processor(torch.cat([IDS, torch.tensor([[wrong]])], dim=1), scores)
    assert torch.equal(processor(IDS, scores), expected)
