"""How much of the configured learning is done."""

import functools
import json

import models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig
from osd_hf.errors import ConfigError
from osd_hf.learning.effort import CHEAP, RECENT, SOON, STRIDE, WINDOW, Effort


@functools.cache
def counted(accepted: int, examined: int) -> AcceptanceStats:
    return AcceptanceStats.from_counts(
        drafted=examined, examined=examined, accepted=accepted, emitted=examined, target_forwards=5
    )


def of(alpha: float, examined: int = 100) -> AcceptanceStats:
    return counted(round(alpha * examined), examined)


def gains(effort: Effort, values: object) -> None:
    for gain in values:  # type: ignore[attr-defined]
        effort.add(of(0.3), of(min(max(0.3 + float(gain), 0.0), 1.0)))


def noise(requests: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.12, requests)


@settings(max_examples=40)  # a series of a thousand requests each
@given(st.integers(0, 200))
def test_all_is_done_while_acceptance_rises(seed: int) -> None:
    effort = Effort(1 / 16)
    gains(effort, np.linspace(0, 0.5, 6 * WINDOW) + noise(6 * WINDOW, seed) / 3)
    assert effort.share == 1


def test_little_is_done_once_acceptance_stands() -> None:
    shares = []
    for seed in range(20):  # chance doubles the share now and then
        effort = Effort(1 / 16)
        gains(effort, 0.3 + noise(2 * WINDOW - 1, seed))
        assert effort.share == 1  # nothing is known yet
        gains(effort, 0.3 + noise(14 * STRIDE, seed + 1000))
        shares.append(effort.share)
    assert min(shares) == 1 / 16
    assert np.median(shares) <= 1 / 8


def test_all_is_done_again_when_traffic_changes() -> None:
    for fallen in (-0.2, 0.02):  # worse than the draft as it was; or just of little use
        effort = Effort(1 / 16)
        gains(effort, 0.3 + noise(2 * WINDOW + 6 * STRIDE))
        assert effort.share < 1
        gains(effort, fallen + noise(2 * RECENT) / 3)
        assert effort.share == 1


def rising(effort: Effort, saved: float | None, seconds: float, seed: int = 0, requests: int = 8 * WINDOW) -> float:
    """The share once alpha rises steadily, by 0.1 a window, each 0.1 of it saves `saved` seconds a request, and a
    request's learning takes `seconds` at full effort; the mean over the second half of the requests."""
    shares = []
    for gain in np.linspace(0, 0.1 * requests / WINDOW, requests) + noise(requests, seed) / 4:
        effort.took(seconds * effort.share)
        alpha = float(np.clip(0.1 + gain, 0, 1))
        effort.add(of(0.1), of(alpha), None if saved is None else saved * 10 * gain)
        shares.append(effort.share)
    return float(np.mean(shares[requests // 2 :]))


@pytest.mark.parametrize("seed", range(4))
def test_what_does_not_pay_is_not_learned_although_acceptance_rises(seed: int) -> None:
    # After n requests a window's rise saves n times its seconds, for a window's learning.
    pays = 0.1
    assert rising(Effort(1 / 16), 3 * pays, 0.1, seed) == 1
    assert rising(Effort(1 / 16), None, 0.1, seed) == 1  # nobody knows
    assert rising(Effort(1 / 16), pays / 100, 0.1, seed) < 0.15
    assert rising(Effort(1.0), pays / 100, 0.1, seed) == 1  # asked for


@pytest.mark.parametrize(("could_save", "requests"), [(0.01, SOON), (0.1, None), (None, None)])
def test_where_no_draft_could_save_enough_little_is_done_at_once(
    could_save: float | None, requests: int | None
) -> None:
    effort, seen = Effort(1 / 256), None
    for number in range(1, 2 * SOON + 1):
        effort.took(0.1)
        effort.add(of(0.3), of(0.4), 0.0, could_save=could_save)
        seen = seen or (number if effort.share == 1 / 256 else None)
    assert seen == requests
    effort.renew()  # traffic has changed, prices have not
    for _ in range(SOON):
        assert effort.share == 1
        effort.took(0.1)
        effort.add(of(0.3), of(0.4), 0.0, could_save=could_save)
    assert (effort.share == 1 / 256) == (requests is not None)


def test_all_is_done_once_a_draft_could_save_what_it_takes() -> None:
    effort = Effort(1 / 16)
    for _ in range(SOON):
        effort.took(0.1)
        effort.add(of(0.3), of(0.4), 0.0, could_save=0.01)
    assert effort.share == 1 / 16
    effort.load_state_dict(json.loads(json.dumps(effort.state_dict())))
    for _ in range(4 * SOON):
        effort.add(of(0.3), of(0.4), 0.0, could_save=0.05)
    assert effort.share == 1 / 16  # less than it would take
    for _ in range(SOON):
        effort.add(of(0.3), of(0.4), 0.0, could_save=0.2)
    assert effort.share == 1


@pytest.mark.parametrize("seed", range(4))
def test_chance_does_not_bring_all_of_it_back(seed: int) -> None:
    effort, rng = Effort(1 / 16), np.random.default_rng(seed)
    for _ in range(SOON):
        effort.took(0.1)
        effort.add(of(0.3), of(0.3), 0.0, could_save=0.01)
    for could_save in rng.exponential(0.07, size=20 * SOON):
        effort.add(of(0.3), of(0.3), 0.0, could_save=float(could_save))
    assert effort.share == 1 / 16
    for could_save in rng.exponential(0.4, size=2 * SOON):
        effort.add(of(0.3), of(0.3), 0.0, could_save=float(could_save))
    assert effort.share == 1


def test_few_requests_that_a_draft_could_save_much_on_bring_all_of_it_back() -> None:
    effort = Effort(1 / 16)
    for _ in range(SOON):
        effort.took(0.1)
        effort.add(of(0.3), of(0.3), 0.0, could_save=0.01)
    shares = []
    for number in range(WINDOW):
        effort.add(of(0.3), of(0.3), 0.0, could_save=3.2 * (number % 8 == 0))
        shares.append(effort.share)
    assert 1 in shares


def test_what_no_draft_could_save_soon_may_be_much_in_time() -> None:
    effort = Effort(1 / 16)
    effort._requests = 40 * SOON
    for _ in range(2 * SOON):
        effort.took(0.1)
        effort.add(of(0.3), of(0.4), 0.0, could_save=0.01)
    assert effort.share == 1


def test_states_of_before_have_no_price_of_the_best_draft() -> None:
    effort = Effort(1 / 16)
    state = effort.state_dict() | {"gains": [[0.1, None], [0.2, 0.5]]}
    effort.load_state_dict(state)
    assert effort.state_dict()["gains"] == [[0.1, None, None], [0.2, 0.5, None]]


def test_the_longer_traffic_is_the_same_the_more_pays() -> None:
    pays = 0.1
    late = Effort(1 / 16)
    late._requests = 40 * WINDOW
    assert rising(late, pays / 10, 0.1) > rising(Effort(1 / 16), pays / 10, 0.1) + 0.3


def test_at_its_least_learning_goes_on_once_requests_have_paid_for_it() -> None:
    effort = Effort(1 / 16)
    for share in (1, 1 / 8):  # whatever it takes, as it may be worth it
        effort.share = share
        effort.served(1.0)
        effort.took(10.0)
        assert effort.is_cheap
    effort.share = effort.least
    assert effort.is_cheap
    taken, requests = 0.0, 1000
    for _ in range(requests):
        effort.served(1.0)
        if effort.is_cheap:
            effort.took(0.5)
            taken += 0.5
    assert CHEAP * requests - 0.5 <= taken <= CHEAP * requests + 0.5
    effort.renew()
    assert effort.is_cheap


def test_updates_come_however_much_comparing_takes() -> None:
    effort, updates = Effort(1 / 16), 0
    effort.share = effort.least
    for _ in range(1000):
        effort.served(1.0)
        effort.took(2 * CHEAP, compared=True)
        if effort.is_cheap:
            effort.took(1.0)
            updates += 1
    assert updates == pytest.approx(1000 * CHEAP, abs=1)


def test_what_all_requests_paid_for_is_not_saved_up() -> None:
    effort = Effort(1 / 16)
    effort.share = effort.least
    for _ in range(1000):
        effort.served(1.0)
    effort.took(1.0)
    assert not effort.is_cheap


@pytest.mark.parametrize("least", [1.0, 1 / 16])
def test_all_that_is_asked_for_and_what_serves_in_unknown_time_is_learned(least: float) -> None:
    effort = Effort(least)
    effort.share = least
    if least == 1:
        effort.served(1.0)
    effort.took(100.0)
    assert effort.is_cheap


def test_a_saved_effort_goes_on() -> None:
    one, other = Effort(1 / 16), Effort(1 / 16)
    rising(one, 0.01, 0.1, requests=3 * WINDOW + 5)
    one.share = one.least
    one.served(1.0)
    one.took(5.0)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one.is_cheap == other.is_cheap is False
    for effort in (one, other):
        rising(effort, 0.01, 0.1, seed=1, requests=2 * WINDOW)
    assert one.state_dict() == other.state_dict()


def test_where_nothing_is_gained_little_is_done() -> None:
    shares = []
    for seed in range(20):
        effort = Effort(1 / 16)
        gains(effort, noise(16 * WINDOW, seed) / 2)
        shares.append(effort.share)
    assert np.median(shares) <= 1 / 8


def test_a_slow_fall_is_seen() -> None:
    looked_at = 0
    for seed in range(20):
        effort = Effort(1 / 16)
        gains(effort, 0.3 + noise(2 * WINDOW + 4 * STRIDE, seed))
        if effort.share == 1:  # by chance
            continue
        looked_at += 1
        reached = []
        for one in np.linspace(0.3, 0.05, 5 * WINDOW) + noise(5 * WINDOW, seed + 100):
            gains(effort, [one])
            reached.append(effort.share)
        assert max(reached) == 1
    assert looked_at > 10


def test_where_no_version_is_let_through_little_is_done() -> None:
    target, draft = models.pair(noise=0.0)  # the draft is the target: nothing can be gained
    config = OnlineConfig(update_strategy="interval", update_interval=64, steps_per_update=1, batch_size=2)
    with OnlineAssistant(target, draft, config=config) as assistant:
        lesson = assistant._learner.lessons[None]
        gains(lesson.effort, np.zeros(2 * WINDOW + STRIDE - 4))
        before = lesson.effort.share
        for ids in models.prompts(20):  # one in a few is looked at
            assistant.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        assert assistant.version == 0
        assert lesson.effort.share < before


def test_requests_of_which_nothing_was_examined_say_nothing() -> None:
    effort = Effort(0.5)
    for _ in range(4 * WINDOW):
        effort.add(AcceptanceStats(), of(0.5))
    assert effort.share == 1


def test_an_assistant_updates_less_often_by_its_effort() -> None:
    target, draft = models.pair(noise=0.2)
    config = OnlineConfig(
        update_strategy="interval", update_interval=2, steps_per_update=1, batch_size=2, learning_rate=3e-3
    )
    with OnlineAssistant(target, draft, config=config) as assistant:
        assert assistant.effort == 1
        assistant._learner.lessons[None].effort.share = 0.25
        assert assistant.effort == 0.25
        for ids in models.prompts(16):
            assistant.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        assert len(assistant.decisions) == 2


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_a_floor_outside_its_range_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="min_effort"):
        OnlineConfig(min_effort=value)


@pytest.mark.parametrize("value", [0.5, float("inf"), float("nan")])
def test_a_ceiling_outside_its_range_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="max_effort"):
        OnlineConfig(max_effort=value)


def test_a_ceiling_above_one_lets_updates_come_sooner() -> None:
    target, draft = models.pair(noise=0.2)
    config = OnlineConfig(
        update_strategy="interval", update_interval=4, max_effort=2, steps_per_update=1, batch_size=2
    )
    with OnlineAssistant(target, draft, config=config) as assistant:
        for ids in models.prompts(8):
            assistant.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        assert len(assistant.decisions) == 4
