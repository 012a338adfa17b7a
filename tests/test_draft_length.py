"""How many tokens are drafted with `"auto"`: acceptance is known, and only forwards take time."""

import random
from typing import Any

import models
import pytest
import torch

from osd_hf import OnlineAssistant, OnlineConfig, expected_block_efficiency

POSITIONS, VOCAB = 2000, 16
BAD_LUCK = 0.003  # share of forwards during which a busy machine does something else


class Clock(models.ForwardTime):
    """Forwards take their time, and at random, fifty times as much."""

    bad_luck = 0.0

    def _pass(self, seconds: float, *_: Any) -> None:
        self.now += seconds * (50 if random.random() < self.bad_luck else 1)


def assistant_of(alpha: float, draft_seconds: float, *, hard: bool = False) -> OnlineAssistant:
    """
    Return an assistant whose target's forward takes a second. At each position, a token is right with probability
    `alpha`; in the second half of the positions, none is if that half is `hard`.
    """
    generator = torch.Generator().manual_seed(0)
    target, draft = (models.TableModel(models.TableConfig(VOCAB, POSITIONS)).eval() for _ in range(2))
    tokens = torch.randint(VOCAB, (POSITIONS,), generator=generator)
    is_right = torch.rand(POSITIONS, generator=generator) < alpha
    if hard:
        is_right[POSITIONS // 2 :] = False
    strength = torch.rand(POSITIONS, generator=generator) * 8 + 1
    places = torch.arange(POSITIONS)
    with torch.no_grad():
        target.by_position[places, tokens] = 9.0
        draft.by_position[places, (tokens + ~is_right) % VOCAB] = strength
    assistant = OnlineAssistant(target, draft, config=OnlineConfig(candidates="draft", update_strategy="manual"))
    set_costs(assistant, draft_seconds)
    return assistant


def set_costs(assistant: OnlineAssistant, draft_seconds: float) -> Clock:
    assert assistant.drafting is not None
    clock = assistant.drafting.clock = Clock({assistant.target: 1.0, assistant.draft: draft_seconds})
    return clock


def rate_of(assistant: OnlineAssistant, requests: int, length: int = 60, half: int = 0, **settings: Any) -> float:
    """Serve requests that begin at any position; return the number of tokens per second."""
    clock: Any = assistant.drafting.clock  # type: ignore[union-attr]
    began = clock()
    for _ in range(requests):
        start = random.randrange(4, POSITIONS // 2 - length) + half * POSITIONS // 2
        ids = torch.ones(1, start, dtype=torch.long)
        how = models.greedy(ids, max_new_tokens=length, learn=False, **settings)
        assert assistant.generate(ids, **how).shape[1] == start + length
    return float(requests * length / (clock() - began))


def expected_rate(alpha: float, draft_seconds: float, k: int) -> float:
    return expected_block_efficiency(alpha, k) / (1 + k * draft_seconds)


@pytest.mark.parametrize(
    ("alpha", "draft_seconds", "bad_luck"),
    [(0.3, 0.05, 0.0), (0.5, 0.15, 0.0), (0.7, 0.4, 0.0), (0.85, 0.15, 0.0), (0.85, 0.15, BAD_LUCK)],
)
def test_the_plan_is_near_the_best_number(alpha: float, draft_seconds: float, bad_luck: float) -> None:
    assistant = assistant_of(alpha, draft_seconds)
    assistant.drafting.clock.bad_luck = bad_luck  # type: ignore[union-attr]
    rate_of(assistant, 16)
    plan = assistant.drafting_plan()
    assert plan is not None
    best = max(expected_rate(alpha, draft_seconds, k) for k in range(33))
    assert expected_rate(alpha, draft_seconds, plan.k) > 0.95 * best
    assert plan.alpha == pytest.approx(alpha, abs=0.1)
    assert plan.draft_seconds == pytest.approx(draft_seconds, rel=0.3)
    assert plan.plain_seconds == pytest.approx(1.0, rel=0.3)


def test_costs_are_followed() -> None:
    assistant = assistant_of(0.75, 0.05)
    rate_of(assistant, 10)
    cheap = assistant.drafting_plan()
    set_costs(assistant, 0.6)
    rate_of(assistant, 20)
    dear = assistant.drafting_plan()
    assert cheap is not None and dear is not None
    assert cheap.k - dear.k >= 3


@pytest.mark.parametrize(("alpha", "draft_seconds"), [(0.05, 0.3), (0.9, 3.0)])
def test_a_draft_that_does_not_pay_costs_little(alpha: float, draft_seconds: float) -> None:
    assistant = assistant_of(alpha, draft_seconds)
    rate_of(assistant, 15)
    plan = assistant.drafting_plan()
    assert plan is not None and (plan.speculates, plan.k) == (False, 0)
    assert rate_of(assistant, 40) > 0.95


def test_speculation_returns_once_it_pays() -> None:
    settings = {"num_assistant_tokens": "auto", "candidates": "draft", "optimizer": "adamw", "learning_rate": 0.3}
    assistant = models.assistant_of(models.bigram(0, sharpness=3.0), models.bigram(0, sharpness=-3.0), **settings)
    set_costs(assistant, 0.3)

    def serve(requests: int) -> bool:
        for start in range(requests):
            ids = torch.tensor([[start % 5]])
            assistant.generate(ids, **models.greedy(ids, max_new_tokens=60))
        plan = assistant.drafting_plan()
        assert plan is not None
        return plan.speculates

    assert not serve(20)
    assistant.update(20)
    assert serve(20)


def test_domains_share_costs_and_nothing_else() -> None:
    assistant = assistant_of(0.9, 0.2, hard=True)
    for _ in range(12):
        rate_of(assistant, 1, domain="easy")
        rate_of(assistant, 1, half=1, domain="hard")
    easy, hard, other = map(assistant.drafting_plan, ("easy", "hard", "other"))
    assert easy is not None and hard is not None and other is not None
    assert easy.speculates and easy.alpha > 0.8
    assert not hard.speculates and hard.alpha < 0.2
    assert other.examined < 10
    assert 0.4 < other.alpha < 0.8
    assert other.draft_seconds == easy.draft_seconds == pytest.approx(0.2, rel=0.2)


def test_there_is_a_plan_with_auto_only() -> None:
    assert models.assistant_of(*models.pair()).drafting_plan() is None
    plan = assistant_of(0.7, 0.2).drafting_plan()
    assert plan is not None
    assert plan.speculates and plan.draft_seconds is plan.plain_seconds is None
