import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from models import same, weights

from osd_hf import OnlineAssistant, OnlineConfig, Trace
from osd_hf import replay as replayed
from osd_hf.learning import learner as module
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.learner import Learner
from osd_hf.learning.requests import HOLD_BACK_EVERY
from osd_hf.learning.updater import Updater, finish
from osd_hf.simulate import simulate

CONFIG = OnlineConfig(
    update_strategy="interval", update_interval=4, steps_per_update=3, batch_size=8, num_logprobs=8, optimizer="adamw",
    learning_rate=3e-3,
)  # fmt: skip
NOISE = 0.2  # of the draft: there is something to learn
DIFFERENT = 9  # prompts, of which each comes again and again, and each is held back now and then


@pytest.fixture(scope="module")
def recorded() -> list[Trace]:
    return models.recorded(*models.pair(noise=NOISE), DIFFERENT, max_new_tokens=12)


def stream(recorded: list[Trace], requests: int) -> list[Trace]:
    return [replace(recorded[i % DIFFERENT], draft_version=0) for i in range(requests)]


def the_draft() -> Any:
    return models.pair(noise=NOISE)[1]


def learner(config: OnlineConfig = CONFIG, *, per_domain: bool = False, **changes: Any) -> Learner:
    return Learner(DomainDrafts(the_draft(), config, per_domain=per_domain), **changes)


def held(taught: Learner, domain: str | None = None) -> list[Trace]:
    """All requests that a draft has before it or behind it."""
    requests = taught.drafts.requests[domain]
    return [*requests.held_back, *requests.pending, *requests.buffer]


# --- whose update, and when -----------------------------------------------------------------------------------------


def test_each_domain_counts_its_own_requests(recorded: list[Trace]) -> None:
    taught = learner(replace(CONFIG, update_interval=3), per_domain=True)
    for trace, domain in zip(stream(recorded, 5), "aabba", strict=True):
        assert taught.due() is None
        taught.observe(domain, trace)
    due = taught.due()
    assert due is not None and (due.domain, due.requests_waiting) == ("a", 3)
    report = taught.update("a")
    assert (report.domain, report.new_requests) == ("a", 3 - len(taught.drafts.requests["a"].held_back))
    assert taught.due() is None  # b has had two
    assert taught.drafts.requests["b"].requests_waiting == 2
    taught.observe("b", recorded[0])
    assert taught.fullest() == "b"
    assert taught.drafts.learning == {"a"}
    taught.observe(None, recorded[0])  # of no domain, so that nobody learns
    assert None not in taught.drafts.requests


def test_what_nobody_learns_from_is_bounded(recorded: list[Trace]) -> None:
    taught = learner(replace(CONFIG, update_strategy="manual", buffer_size=10))
    for trace in stream(recorded, 100):
        taught.observe(None, trace)
    assert len(taught.drafts.requests[None].pending) == 10
    assert taught.due() is None


# --- work in parts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_steps_that_are_interrupted_learn_as_others(optimizer: Any, recorded: list[Trace]) -> None:
    config = replace(CONFIG, optimizer=optimizer)
    straight, interrupted = Updater(the_draft(), config), Updater(the_draft(), config)
    other = the_draft()
    for updater in (straight, interrupted):
        updater.micro_batch = 2
        for trace in recorded:
            models.observe(updater, trace)
    report = straight.update()
    work, parts = interrupted.micro_steps(), 0
    while True:
        try:
            with torch.inference_mode(parts % 3 == 1), torch.set_grad_enabled(parts % 3 == 0):  # as callers may be
                next(work)
        except StopIteration as done:
            assert replace(done.value, seconds=0) == replace(report, seconds=0)
            break
        parts += 1
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        ids = models.prompt(4, seed=parts)
        with torch.inference_mode(parts % 2 == 0):  # requests come in between
            other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=True)
            models.observe(interrupted, recorded[0])
    assert parts > 6
    assert same(dict(straight.parameters), dict(interrupted.parameters))
    assert same(straight.snapshot(), interrupted.snapshot())
    assert len(interrupted.requests.pending) == parts  # for the next update


@pytest.mark.parametrize("parts", [0, 1, 2, 5, 11, 30, 60])
def test_an_update_given_up_loses_no_request(
    parts: int, recorded: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = learner(replace(CONFIG, update_strategy="idle"))
    requests = stream(recorded, 13)
    for trace in requests:
        taught.observe(None, trace)
    for _ in range(parts):
        taught.step()
        assert Counter(map(id, held(taught))) == Counter(map(id, requests))
    taught.abandon()
    assert Counter(map(id, held(taught))) == Counter(map(id, requests))
    for trace in (more := stream(recorded, 4)):
        taught.observe(None, trace)
    taught.update()
    assert Counter(map(id, held(taught))) == Counter(map(id, [*requests, *more]))


# --- a learner that goes wrong --------------------------------------------------------------------------------------


def rate(factor: float) -> Callable[[pytest.MonkeyPatch], OnlineConfig]:
    return lambda _: replace(CONFIG, learning_rate=CONFIG.learning_rate * factor)


def with_nan(patch: pytest.MonkeyPatch) -> OnlineConfig:
    average = Updater._average

    def spoil(self: Updater) -> None:
        average(self)
        with torch.no_grad():
            next(iter(self.averaged.values())).view(-1)[0] = math.nan

    patch.setattr(Updater, "_average", spoil)
    return CONFIG


def with_shuffled_rows(patch: pytest.MonkeyPatch) -> OnlineConfig:
    loss = Updater._loss

    def spoil(self: Updater, traces: Any) -> Any:
        def shuffled(trace: Trace) -> Trace:
            return replace(trace, top_ids=(trace.top_ids + 17) % models.VOCAB)

        return loss(self, [shuffled(trace) for trace in traces])

    patch.setattr(Updater, "_loss", spoil)
    return CONFIG


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("poison", [rate(1000), with_nan, with_shuffled_rows], ids=["rate", "nan", "rows"])
def test_a_poisoned_learner_serves_no_request(
    poison: Callable[[pytest.MonkeyPatch], OnlineConfig], recorded: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    static = replayed(the_draft(), recorded).alpha
    served: list[float] = []

    def look(number: int, _: Any) -> None:
        if number % 4 == 0:
            served.append(replayed(run["learner"].drafts.model(None), recorded).alpha)

    with monkeypatch.context() as patch:
        config = poison(patch)
        run = {"learner": learner(config)}
        poisoned = simulate(None, stream(recorded, 56), config, learner=run["learner"], on_request=look)
    decisions = {d.version: d for d in poisoned.decisions}
    assert len(decisions) == len(poisoned.updates) == 14
    assert "dropped" in {d.outcome for d in decisions.values()}
    for trace in poisoned.traces:
        if trace.draft_version:
            decision = decisions[trace.draft_version]
            assert decision.outcome == "promoted"
            assert decision.alpha_before is not None and decision.alpha_after is not None
            assert decision.alpha_after >= decision.alpha_before
    assert min(served) >= static - 0.03
    assert all(bool(p.isfinite().all()) for p in poisoned.draft.parameters())


def test_with_nothing_wrong_the_same_learner_learns(recorded: list[Trace]) -> None:
    well = simulate(the_draft(), stream(recorded, 72), CONFIG)
    assert replayed(well.draft, recorded).alpha > replayed(the_draft(), recorded).alpha + 0.2
    assert {trace.draft_version for trace in well.traces} > {0}


@pytest.mark.parametrize("gate", [True, False])
def test_after_weights_that_are_not_finite_learning_starts_again(
    gate: bool, recorded: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = learner(replace(CONFIG, gate=gate))
    with monkeypatch.context() as patch:
        with_nan(patch)
        simulate(None, stream(recorded, 24), learner=taught)
    assert {d.reason for d in taught.decisions} == {"its weights are not finite"}
    assert taught.drafts.serving_version() == 0
    assert same(taught.drafts.updater(None).snapshot(), weights(the_draft()))
    simulate(None, stream(recorded, 60), learner=taught)
    assert "promoted" in {d.outcome for d in taught.decisions}
    assert replayed(taught.drafts.model(None), recorded).alpha > replayed(the_draft(), recorded).alpha + 0.2


def spoil_serving(taught: Learner, _: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        for parameter in taught.drafts.model(None).parameters():
            parameter.add_(torch.randn_like(parameter))


def bypass(taught: Learner, patch: pytest.MonkeyPatch) -> None:
    def let_through(version: int, serving: int, domain: Any, *_: Any) -> GateDecision:
        return GateDecision("promoted", version, version, domain, "by a gate that sleeps", alpha_after=1.0)

    def bad(self: Updater, _: Any) -> Any:
        return {name: torch.randn_like(w) for name, w in self.averaged.items()}

    patch.setattr(module, "judge", let_through)
    patch.setattr(Updater, "snapshot", bad)


# Where little is learned, versions are watched all the same.
@pytest.mark.parametrize(("regress", "effort"), [(spoil_serving, 1.0), (spoil_serving, 0.0625), (bypass, 1.0)])
def test_a_version_that_does_worse_than_the_one_before_it_goes(
    regress: Callable[..., None],
    effort: float,
    recorded: list[Trace],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Updates by hand: one that lets the bad version in, and none that covers it by a better one.
    config = replace(CONFIG, update_interval=16)
    taught = learner(config)
    simulate(None, stream(recorded, 96), learner=taught)
    good = replayed(taught.drafts.model(None), recorded).alpha
    serving = taught.drafts.serving_version()
    assert serving > 0
    with monkeypatch.context() as patch:
        regress(taught, patch)
        if regress is bypass:
            taught.update()
    bad = taught.drafts.serving_version()
    assert replayed(taught.drafts.model(None), recorded).alpha < good - 0.2
    taught.drafts.requests[None].effort.share = effort
    with caplog.at_level(logging.WARNING):
        simulate(None, stream(recorded, 16), learner=taught)
    (decision,) = [d for d in taught.decisions if d.outcome == "rolled back"]
    assert decision.version == bad
    assert decision.serving != bad
    assert decision.alpha_before is not None and decision.alpha_after is not None
    assert decision.alpha_before > decision.alpha_after + 0.2
    assert "rolled back" in caplog.text
    if regress is bypass:
        assert decision.serving == serving
    assert replayed(taught.drafts.model(None), recorded).alpha > good - 0.1


def test_another_draft_than_ours_is_not_taken_for_a_version_of_ours(recorded: list[Trace]) -> None:
    target, draft = models.pair(noise=NOISE)
    useless = models.draft_of(target, noise=3.0)
    with OnlineAssistant(target, draft, config=CONFIG) as assistant:
        simulate(None, stream(recorded, 48), learner=assistant._learner)
        version = assistant.version
        assert version > 0
        assistant.pause()
        with assistant.attached():
            for ids in models.prompts(DIFFERENT) * 2:
                kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
                target.generate(ids, assistant_model=useless, **kwargs)
        assistant.resume()
        finish(assistant._learner._watch(assistant.drafts.requests[None]))
        assert assistant.version == version
        assert "rolled back" not in {d.outcome for d in assistant.decisions}
        assert assistant.stats.num_requests == 2 * DIFFERENT
        assert HOLD_BACK_EVERY > 1 and len(assistant.drafts.requests[None].pending) > DIFFERENT


# --- at the least effort --------------------------------------------------------------------------------------------

SPREAD = replace(CONFIG, update_strategy="spread")


class Ticks:
    """A timer by which each piece of work takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5  # it is read as a piece begins and as it ends
        return self.now


def at_least(config: OnlineConfig, domains: str = "", *, least: float = 0.25, **changes: Any) -> Learner:
    """Learners of domains, or one, that do little, with a version that serves so that requests are compared."""
    taught = learner(config, per_domain=bool(domains), **changes)
    taught.drafts.set_pace(min_effort=least)
    for domain in domains or [None]:
        taught.drafts.admit(domain)
        lesson = taught.drafts.requests[domain]
        lesson.effort.share = lesson.effort.least
    return taught


def answered(taught: Learner, traces: list[Trace]) -> list[int]:
    """After how many of the requests updates have ended."""
    ended = []
    for i, trace in enumerate(traces, 1):
        taught.observe(None, trace)
        if taught.after_answer() is not None:
            ended.append(i)
    return ended


def test_at_little_effort_updates_are_spread_over_all_requests_between_two(recorded: list[Trace]) -> None:
    taught = at_least(replace(SPREAD, update_interval=8), timer=Ticks())
    most, ended = 0.0, []
    for i, trace in enumerate(stream(recorded, 96), 1):
        taught.drafts.requests[None].effort.share = 0.25
        before = taught.seconds
        taught.observe(None, trace)
        ended += [i] * (taught.after_answer() is not None)
        most = max(most, taught.seconds - before)
    first, second = ended
    assert 32 + 16 < first <= 64 < 64 + 16 < second
    # One part, and a look at what both drafts make of the request; the last answer takes what is left.
    assert most <= 4
