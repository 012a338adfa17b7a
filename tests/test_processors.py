"""Processors and criteria: which are served with a draft, which by the target alone, and how a memory is replayed."""

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList

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


class Forgetting(LogitsProcessor):  # type: ignore[misc]
    """Forbids one token."""

    is_stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 5] = -torch.inf
        return scores


def allowed_function(*, is_stateless: bool) -> Callable[[int, torch.Tensor], list[int]]:
    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        return [token for token in range(3, models.VOCAB) if token % 3 == len(ids) % 3]

    allowed.is_stateless = is_stateless  # type: ignore[attr-defined]
    return allowed


UNKNOWN: dict[str, Callable[[], dict[str, Any]]] = {
    "Remembering": lambda: {"logits_processor": [Remembering()]},
    "<lambda>": lambda: {"logits_processor": [lambda ids, scores: scores.roll(1, -1)]},
    "allowed": lambda: {"prefix_allowed_tokens_fn": allowed_function(is_stateless=False)},
}
STATELESS: dict[str, Callable[[], dict[str, Any]]] = {
    "a processor": lambda: {"logits_processor": [Forgetting()]},
    "a function": lambda: {"prefix_allowed_tokens_fn": allowed_function(is_stateless=True)},
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


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_processor_is_refused_where_a_draft_of_the_callers_is_captured(
    name: str, pair: tuple[Any, Any]
) -> None:
    target, draft = pair
    with models.ForwardCounter(target, draft) as forwards, capture_traces(target, print):
        with pytest.raises(UnsupportedGenerationError, match=f"`{name}` may keep state.*is_stateless.*Replayed"):
            answer(target.generate, assistant_model=draft, **UNKNOWN[name]())
        assert forwards.count == 0


@pytest.mark.parametrize("name", STATELESS)
def test_what_is_declared_stateless_is_served_with_the_draft(name: str, pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    alone = answer(target.generate, **STATELESS[name]())
    for _ in range(2):
        assert answer(assistant.generate, **STATELESS[name]()) == alone
    assert assistant.stats.drafted > 0


# --- stopping criteria ----------------------------------------------------------------------------------------------


class AtTheTenthCall(StoppingCriteria):  # type: ignore[misc]
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.full((input_ids.shape[0],), self.calls >= 10)


@pytest.mark.parametrize("kwargs", [{}, {"streamer": models.Streamer()}], ids=["tokens", "streamed"])
def test_a_criterion_that_remembers_stops_where_it_stops_the_target(
    kwargs: dict[str, Any], pair: tuple[Any, Any]
) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    alone = answer(target.generate, stopping_criteria=StoppingCriteriaList([AtTheTenthCall()]))
    assert len(alone) == 10
    criterion = AtTheTenthCall()
    assert answer(assistant.generate, stopping_criteria=StoppingCriteriaList([criterion]), **kwargs) == alone
    assert criterion.calls == 10
    assert assistant.stats.drafted > 0


class Unsure(StoppingCriteria):  # type: ignore[misc]
    """Ends an answer at the first token that is not likely."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        assert len(scores) > 0
        return scores[-1].softmax(-1).amax(-1) < 0.1


def test_a_criterion_reads_the_scores_of_the_newest_token(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    settings = {"return_dict_in_generate": True, "output_scores": True}
    found, expected = (
        generate(models.prompt(), do_sample=False, max_new_tokens=40, stopping_criteria=[Unsure()], **settings)
        for generate in (assistant.generate, target.generate)
    )
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert len(found.scores) == len(expected.scores) < 40


class Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends an answer when somebody else says so."""

    is_stateless = True

    def __init__(self) -> None:
        self.is_stopped = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.is_stopped)


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_its_caller_ends_has_ended(streams: bool, pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    stop = Stop()

    class Ending(LogitsProcessor):  # type: ignore[misc]
        is_stateless = True

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            stop.is_stopped |= input_ids.shape[1] > IDS.shape[1] + 6
            return scores

    streamer = models.Streamer(lambda count: setattr(stop, "is_stopped", count > 2))  # the prompt, and two rounds
    how: dict[str, Any] = {"streamer": streamer} if streams else {"logits_processor": [Ending()]}
    told = answer(assistant.generate, max_new_tokens=48, stopping_criteria=StoppingCriteriaList([stop]), **how)
    assert stop.is_stopped
    assert 0 < len(told) < 48
    assert told == answer(target.generate, max_new_tokens=48)[: len(told)]


# --- ReplayedProcessor ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("takes_back", [True, False])
def test_a_processor_with_a_memory_serves_the_target_alone_too(takes_back: bool, pair: tuple[Any, Any]) -> None:
    processor = opted_in(takes_back)
    for _ in range(2):
        assert answer(pair[0].generate, logits_processor=[processor]) == answer(
            pair[0].generate, logits_processor=[Matcher()]
        )


def test_taking_back_spares_making_processors_anew(pair: tuple[Any, Any]) -> None:
    assistant = OnlineAssistant(*pair, config=FROZEN)
    made = {}
    for takes_back in (True, False):
        Matcher.made.clear()
        answer(assistant.generate, logits_processor=[opted_in(takes_back)])
        made[takes_back] = len(Matcher.made)
    assert made[True] <= 3 < made[False]


def test_requests_at_once_share_no_memory(pair: tuple[Any, Any]) -> None:
    processor = opted_in(True)
    one, other = processor.begin(6), processor.begin(6)
    scores = torch.zeros(1, models.VOCAB)
    longer = torch.cat([IDS, torch.tensor([[3]])], dim=1)
    expected = Matcher()
    first, second = expected(IDS, scores), expected(longer, scores)
    assert torch.equal(one(IDS, scores), first)
    assert torch.equal(other(IDS, scores), first)
    assert torch.equal(one(longer, scores), second)
    assert torch.equal(other(longer, scores), second)
    assert torch.equal(one(IDS, scores), first)


def test_a_processor_that_fails_begins_anew(pair: tuple[Any, Any]) -> None:
    processor, scores = opted_in(True), torch.zeros(1, models.VOCAB)
    expected = Matcher()(IDS, scores)
    processor(IDS, scores)
    wrong = next(t for t in range(3, models.VOCAB) if t not in Matcher.made[-1].allowed())
    with pytest.raises(AssertionError, match="no token of the grammar"):
        processor(torch.cat([IDS, torch.tensor([[wrong]])], dim=1), scores)
    assert torch.equal(processor(IDS, scores), expected)
