import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch

from osd_hf import OnlineConfig, Trace, capture_traces
from osd_hf.learning import learner as learner_module
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.learner import Learner
from osd_hf.learning.loss import MIN_REQUEST_TOKENS, num_tokens
from osd_hf.learning.session import load_session, save_session
from osd_hf.learning.updater import Updater
from osd_hf.trace import DraftRound

CONFIG = OnlineConfig(
    update_strategy="interval", update_interval=8, steps_per_update=2, batch_size=8, num_logprobs=8, optimizer="adamw",
    num_assistant_tokens=5,
)  # fmt: skip
LONG = 40  # tokens of the answer that is too long


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    target, draft = models.pair(noise=0.12)
    seen: list[Trace] = []
    with capture_traces(target, seen.append, num_logprobs=8):
        for i, ids in enumerate(models.prompts(9)):
            kwargs = {"attention_mask": torch.ones_like(ids), "assistant_model": draft, "do_sample": False}
            target.generate(ids, max_new_tokens=LONG if i == 8 else 8, **kwargs)
    return [replace(trace, created_at_seconds=float(i)) for i, trace in enumerate(seen)]


def fails_on(
    is_bad: Callable[[Sequence[Trace]], bool], error: Callable[[], Exception] | None
) -> Callable[[Updater, Sequence[Trace]], Any]:
    """A loss that fails, or is not finite, for such batches."""
    loss = Updater._loss

    def spoiled(self: Updater, batch: Sequence[Trace]) -> Any:
        if not is_bad(batch):
            return loss(self, batch)
        if error is not None:
            raise error()
        value, count = loss(self, batch)
        return value * float("nan"), count

    return spoiled


def one_is_long(batch: Sequence[Trace]) -> bool:
    return any(len(trace) == LONG for trace in batch)


def one_is_hopeless(batch: Sequence[Trace]) -> bool:
    """However short it is made."""
    return any(trace.created_at_seconds in (8.0, *range(100, 106)) for trace in batch)


def taught(updater: Updater, traces: Sequence[Trace]) -> Any:
    for trace in traces:
        models.observe(updater, trace)
    return updater.update()


SHORT_OF_MEMORY = "that need more memory than there is"


@pytest.mark.parametrize(
    "error, reason, strategy",
    [
        (MemoryError, SHORT_OF_MEMORY, "interval"),
        (MemoryError, SHORT_OF_MEMORY, "idle"),
        (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), SHORT_OF_MEMORY, "interval"),
        (lambda: IndexError("index out of range in self"), "that cannot be learned from (IndexError)", "interval"),
        (
            lambda: RuntimeError("the size of tensor a must match"),
            "that cannot be learned from (RuntimeError)",
            "idle",
        ),
        (None, "with a loss or gradient that is not finite", "interval"),
        (None, "with a loss or gradient that is not finite", "idle"),
    ],
)
def test_a_request_that_makes_steps_fail_is_set_aside_and_the_others_are_learned(
    error: Any, reason: str, strategy: Any, traces: list[Trace], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    updater = Updater(models.pair()[1], replace(CONFIG, update_strategy=strategy))
    monkeypatch.setattr(Updater, "_loss", fails_on(one_is_hopeless, error))
    updater.buffer.append(replace(traces[8]))  # it lies in the replay as well
    report = taught(updater, traces)
    assert (report.steps, report.dropped_steps) == (2, 0)
    assert [(reason in name, count) for name, count in report.set_aside.items()] == [(True, 1)]
    assert all(len(trace) < LONG for trace in [*updater.buffer, *updater.requests.pending])
    assert all(bool(torch.isfinite(p).all()) for p in updater.parameters.values())
    said = [record for record in caplog.records if "Set aside" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING]
    for _ in range(2):  # where it comes again, from a store or a session, it is known
        report = taught(updater, [*traces[:4], replace(traces[8], draft_version=7)])
        assert (report.steps, report.dropped_steps, report.set_aside) == (2, 0, {})


def test_requests_too_large_together_are_learned_in_smaller_parts(
    traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = replace(CONFIG, optimizer="adamw", weight_average=0.0, steps_per_update=1)
    whole, parts = Updater(models.pair()[1], plain), Updater(models.pair()[1], plain)
    expected = taught(whole, traces[:8])
    monkeypatch.setattr(Updater, "_loss", fails_on(lambda batch: len(batch) > 3, MemoryError))
    report = taught(parts, traces[:8])
    assert (report.steps, report.set_aside, parts.micro_batch) == (1, {}, 2)
    assert report.loss == pytest.approx(expected.loss, rel=1e-5)
    assert len(parts.buffer) == 8


def test_a_request_too_large_by_itself_is_shortened_and_learned(
    traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    updater, learned = Updater(models.pair()[1], replace(CONFIG, steps_per_update=1)), list[int]()
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    too_long = fails_on(lambda batch: any(num_tokens(trace) > 60 for trace in batch), lambda: full)

    def noted(self: Updater, batch: Sequence[Trace]) -> Any:
        found = too_long(self, batch)
        learned.extend(map(num_tokens, batch))
        return found

    monkeypatch.setattr(Updater, "_loss", noted)
    prompt = np.resize(traces[8].prompt_ids, 2 * MIN_REQUEST_TOKENS)
    report = taught(updater, [*traces[:3], replace(traces[8], prompt_ids=prompt)])
    assert (report.steps, report.set_aside, report.positions) == (1, {}, 3 * 8 + LONG)
    assert learned[-1] == (2 * MIN_REQUEST_TOKENS + LONG) // 2
    assert max(map(num_tokens, updater.buffer)) == 2 * MIN_REQUEST_TOKENS + LONG  # itself is as it was


def test_a_learner_that_fails_on_everything_sets_nothing_aside(
    traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = Updater(models.pair()[1], CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(Updater, "_loss", fails_on(lambda batch: True, lambda: RuntimeError("the driver is gone")))
        for first in range(0, 8, 2):
            with pytest.raises(RuntimeError, match="the driver is gone"):
                taught(updater, traces[first : first + 2])
    assert not updater.set_aside.counts
    assert list(updater.requests.pending) == traces[:8]
    assert updater.micro_batch == CONFIG.batch_size
    assert updater.update().steps == 2


def learner(**changes: Any) -> Learner:
    config = replace(CONFIG, **changes)
    return Learner(DomainDrafts(models.pair(noise=0.12)[1], config, per_domain=False))


def everything(taught: Learner) -> list[Trace]:
    lesson = taught.drafts.requests[None]
    return [*lesson.held_back, *lesson.arrived, *lesson.pending, *lesson.buffer]


def test_a_request_that_cannot_be_replayed_leaves_the_gate(
    traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_each = learner_module.replay_each

    def spoiled(draft: Any, those: Sequence[Trace], k: int, **kwargs: Any) -> Any:
        if one_is_long(those):
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return replay_each(draft, those, k, **kwargs)

    monkeypatch.setattr(learner_module, "replay_each", spoiled)
    monkeypatch.setattr(Updater, "_loss", fails_on(one_is_hopeless, MemoryError))
    taught = learner(batch_size=128)
    long = [replace(traces[8], created_at_seconds=100.0 + i) for i in range(6)]
    for i in range(60):
        taught.observe(None, replace(traces[i % 8], created_at_seconds=float(i)))
    taught.drafts.requests[None].held_back.extend(long[:2])
    taught.drafts.requests[None].arrived.extend([long[2], traces[0]])
    taught.drafts.requests[None].pending.extend(long[3:])
    reports = [taught.update() for _ in range(3)]
    assert all(report.steps for report in reports)
    assert all(report.decision is not None for report in reports)
    assert sum(reports[0].set_aside.values()) == 5  # the one that was served is looked at behind a promotion
    assert not [trace for trace in everything(taught) if len(trace) == LONG]
    assert taught.set_aside == {"that need more memory than there is": sum(taught.set_aside.values())}


def test_what_was_set_aside_does_not_come_back_from_a_session(
    traces: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Updater, "_loss", fails_on(one_is_hopeless, MemoryError))
    first = learner(gate=False)
    save_session(tmp_path / "early", first.state_dict(), {})
    for trace in traces:
        first.observe(None, trace)
    early = first.state_dict()
    first.update()
    assert sum(first.set_aside.values()) == 1
    save_session(tmp_path / "late", first.state_dict(), {})

    second = learner(gate=False)
    load_session(tmp_path / "late", second)
    assert second.set_aside == first.set_aside
    assert not [trace for trace in everything(second) if len(trace) == LONG]
    second.observe(None, replace(traces[8]))  # out of a store
    for trace in traces[:4]:
        second.observe(None, trace)
    report = second.update()
    assert (report.steps, report.set_aside) == (2, {})

    # A session of before: what is known by now stays out.
    second.load_state_dict(early)
    assert not [trace for trace in everything(second) if len(trace) == LONG]


def changed(trace: Trace, name: str) -> Trace:
    far, nan = np.array([models.VOCAB], np.int32), np.full_like(trace.tail_logprob, np.nan)
    odd: dict[str, Any] = {
        "prompt": {"prompt_ids": np.concatenate([trace.prompt_ids, far])},
        "negative": {"prompt_ids": np.concatenate([trace.prompt_ids, -far])},
        "answer": {"completion_ids": np.full_like(trace.completion_ids, models.VOCAB)},
        "rows": {"top_ids": trace.top_ids + models.VOCAB},
        "twice": {"top_ids": np.zeros_like(trace.top_ids)},
        "short": {"tail_logprob": trace.tail_logprob[1:]},
        "nan": {"top_logits": np.full_like(trace.top_logits, np.nan)},
        "nothing": {"top_logits": np.full_like(trace.top_logits, -np.inf)},
        "above": {"top_logits": np.full_like(trace.top_logits, 3.0)},
        "tail": {"tail_logprob": nan},
        "mass": {"tail_logprob": np.ones_like(nan)},
        "vocabulary": {"vocab_size": models.VOCAB * 2},
        "length": {"prompt_ids": np.ones(300, np.int32)},
        "rounds": {"rounds": (DraftRound(np.ones(2, np.int32), 1, len(trace) + 1),)},
        "accepted": {"rounds": (DraftRound(np.ones(2, np.int32), 9, len(trace)),)},
    }
    return replace(trace, **odd[name])


@pytest.mark.parametrize(
    "name, reason",
    [
        *((name, "with token ids outside of the vocabulary") for name in ("prompt", "negative", "answer", "rows")),
        ("twice", "with rows that contain a token twice"),
        ("short", "with arrays that do not fit together"),
        *((name, "with invalid log-probs") for name in ("nan", "nothing", "above", "tail", "mass")),
        ("vocabulary", "of a vocabulary of 128, not 64"),
        ("length", "longer than the draft's 256 positions"),
        *((name, "with inconsistent rounds") for name in ("rounds", "accepted")),
    ],
)
def test_an_odd_request_is_set_aside_by_reason_and_learning_goes_on(
    name: str, reason: str, traces: list[Trace]
) -> None:
    taught = learner()
    for trace in [*traces[:8], *[replace(changed(traces[0], name), created_at_seconds=50.0 + i) for i in range(4)]]:
        taught.observe(None, trace)
    report = taught.update()
    assert (report.steps, report.dropped_steps) == (2, 0)
    assert set(taught.set_aside) == {reason}
    assert set(everything(taught)) <= set(traces)
    assert report.to_dict()["set_aside"] == dict(taught.set_aside)
