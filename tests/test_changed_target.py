"""A target that changes: nothing is learned from the one before, or judged by it, and answers stay its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from osd_hf import CorrectionStore, LabelRouter, OnlineAssistant, OnlineConfig, Trace
from osd_hf.distillation.data import read_traces
from osd_hf.errors import DataError, LearnerError
from osd_hf.learning import learner as learner_module
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.learner import Learner
from osd_hf.learning.requests import DraftRequests
from osd_hf.learning.updater import Updater
from osd_hf.recording import record_traces, scored
from osd_hf.replay import completion_logits
from osd_hf.target_version import fingerprint
from osd_hf.trace import bare_trace

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
CONFIG = OnlineConfig(
    num_assistant_tokens=4, update_strategy="interval", update_interval=4, steps_per_update=1, batch_size=4,
    optimizer="adamw", learning_rate=3e-3, num_logprobs=8, buffer_size=32,
)  # fmt: skip


def train(target: Any, seed: int = 5) -> None:
    """Steps in place after which a target answers otherwise."""
    ids = models.prompt(48, seed=seed)
    optimizer = torch.optim.SGD(target.parameters(), lr=0.5)
    with torch.enable_grad():
        for _ in range(2):
            target(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def serve(assistant: OnlineAssistant, number: int, start: int = 0, **settings: Any) -> list[Trace]:
    """Requests, each answered as by the target alone."""
    seen: list[Trace] = []
    for ids in itertools.islice(models.prompts(start + number), start, None):
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
        answer = assistant.generate(ids, **given, on_trace=seen.append, **settings)
        assert torch.equal(answer, assistant.target.generate(ids, **given))
    return seen


def lesson_of(assistant: OnlineAssistant, domain: str | None = None) -> DraftRequests:
    return assistant.drafts.requests[domain]


def kept(lesson: DraftRequests) -> list[Trace]:
    return [*lesson.pending, *lesson.held_back, *lesson.buffer, *lesson.arrived]


def of_versions(lesson: DraftRequests) -> set[str | None]:
    return {trace.target for trace in kept(lesson)}


@pytest.fixture
def pair() -> Any:
    return models.pair(noise=0.2, num_hidden_layers=1)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[str | None]]]:
    """The versions of the target that versions of the draft were taught and judged by, each time."""
    seen: list[set[str | None]] = []
    batch, judge = Updater._batch, learner_module.judge

    def noted_batch(self: Updater, newest: Any) -> list[Trace]:
        chosen = batch(self, newest)
        seen.append({trace.target for trace in chosen})
        return chosen

    def noted_judge(version: int, serving: int, domain: Any, held_back: Any, *stats: Any) -> Any:
        seen.append({trace.target for trace in held_back})
        return judge(version, serving, domain, held_back, *stats)

    monkeypatch.setattr(Updater, "_batch", noted_batch)
    monkeypatch.setattr(learner_module, "judge", noted_judge)
    return seen


# --- live -----------------------------------------------------------------------------------------------------------


def test_a_target_trained_between_requests_begins_a_new_lesson(
    pair: Any, judged: Any, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = pair
    with OnlineAssistant(target, draft, config=replace(CONFIG, update_strategy="spread")) as assistant:
        before = serve(assistant, 22)
        lesson, version = lesson_of(assistant), assistant.version
        lesson.effort.share = lesson.effort.least
        assert version > 0
        assert of_versions(lesson) == {fingerprint(target)} == {trace.target for trace in before}
        assert len(lesson.choice.scores) > 1
        train(target)
        judged.clear()
        [first] = serve(assistant, 1, 22)
        assert first.target == fingerprint(target) != before[0].target
        assert kept(lesson)[0] is first
        assert of_versions(lesson) == {first.target}
        assert len(lesson.choice.scores) <= 1  # of the first request
        assert assistant.effort == 1
        assistant.drafts.set_pace(min_effort=1.0)  # although it does not pay
        assert assistant.version == version  # what was learned is a better start than nothing
        after = serve(assistant, 23, 23)
        assert {trace.target for trace in after} == of_versions(lesson) == {first.target}
        assert judged
        assert set().union(*judged) == {first.target}
        assert assistant.decisions[-1].requests <= len(after)
        assert any(decision.requests >= 4 for decision in assistant.decisions[-3:])
        assert assistant.learning_error is None
    told = [record.getMessage() for record in caplog.records if "older target" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("Set aside ")


def test_an_update_asked_for_after_a_change_learns_nothing_of_before(pair: Any, judged: Any) -> None:
    target, draft = pair
    with OnlineAssistant(target, draft, config=replace(CONFIG, update_strategy="manual")) as assistant:
        serve(assistant, 8)
        train(target)
        report = assistant.update()
        assert (report.steps, report.new_requests, report.decision) == (0, 0, None)
        serve(assistant, 3, 8)
        for parameter in target.parameters():  # which torch does not count
            parameter.data *= 1.5
        assert assistant.update().steps == 0
        assert not kept(lesson_of(assistant))
        serve(assistant, 3, 11)
        assert assistant.update().steps == 1
        assistant.target_changed()
        assert not kept(lesson_of(assistant))
        [trace] = serve(assistant, 1, 14)
        assert trace.target == f"{fingerprint(target)}-1"
        assert set().union(*judged) <= {trace.target, fingerprint(target)}


class Trains(torch.nn.Module):
    """A processor that changes the target in the middle of a request."""

    is_stateless = True

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.target = [target]

    def forward(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 9 and self.target:
            train(self.target.pop())
        return scores


def test_a_request_in_whose_middle_the_target_changes_keeps_no_rows(pair: Any) -> None:
    target, draft = pair
    store = CorrectionStore()
    with OnlineAssistant(target, draft, config=CONFIG, store=store) as assistant:
        seen: list[Trace] = []
        ids = models.prompt()
        kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "logits_processor": [Trains(target)]}
        assistant.generate(ids, **kwargs, on_trace=seen.append)
        assert (len(seen[0]), seen[0].num_kept, seen[0].target) == (8, 0, None)
        assert assistant.stats.num_requests == 1
        assert not kept(lesson_of(assistant))
        assert not len(store)  # offline, one request without rows would do for none
        assistant.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
        assert len(store) == 1


ADAPTERS = ("one", "two")


def with_adapters() -> tuple[Any, Any]:
    target, draft = models.pair(noise=0.2, num_hidden_layers=1)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    target = get_peft_model(target, config, adapter_name="one")
    target.add_adapter("two", config)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    return target.eval(), draft


def test_adapters_that_take_turns_have_lessons_of_their_own_by_domain() -> None:
    target, draft = with_adapters()
    config = replace(CONFIG, gate=False)
    with OnlineAssistant(target, draft, config=config, router=LabelRouter()) as assistant:
        names = {}
        for turn in range(6):
            for adapter in ADAPTERS:
                target.set_adapter(adapter)
                serve(assistant, 1, turn, domain=adapter)
                names[adapter] = fingerprint(target)
        assert {domain: of_versions(lesson) for domain, lesson in assistant.drafts.requests.items()} == {
            adapter: {name} for adapter, name in names.items()
        }
        assert [len(kept(lesson)) > 4 for lesson in assistant.drafts.requests.values()] == [True, True]
    target.set_adapter("one")
    with OnlineAssistant(target, draft, config=config) as assistant:
        serve(assistant, 3)
        target.set_adapter("two")
        serve(assistant, 1, 3)
        assert of_versions(lesson_of(assistant)) == {names["two"]}
        assert lesson_of(assistant).older == 3


# --- on disk --------------------------------------------------------------------------------------------------------


def test_a_session_of_another_target_brings_its_weights_alone(
    pair: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = pair
    with OnlineAssistant(target, draft, config=CONFIG) as assistant:
        serve(assistant, 22)
        learned = {name: p.clone() for name, p in assistant.draft.named_parameters()}
        old = fingerprint(target)
        requests = len(kept(lesson_of(assistant)))
        assistant.save_state(tmp_path)
    for is_changed in (False, True):
        caplog.clear()
        if is_changed:
            train(target)
        with OnlineAssistant(target, draft, config=CONFIG) as again:
            again.load_state(tmp_path)
            lesson = lesson_of(again)
            found = kept(lesson)
            assert of_versions(lesson) == (set() if is_changed else {old})
            assert is_changed or len(found) >= requests - 64
            assert ("Set aside" in caplog.text) == is_changed
            assert again.stats.num_requests == 22
            assert again.version == assistant.version > 0
            assert all(torch.equal(p, learned[name]) for name, p in again.draft.named_parameters())
            serve(again, 8, 22)
            assert of_versions(lesson) == {fingerprint(target)}
            assert ("Set aside" in caplog.text) == is_changed


def test_a_session_of_domains_waits_for_each_ones_next_request(tmp_path: Path) -> None:
    target, draft = with_adapters()
    config = replace(CONFIG, gate=False, update_strategy="manual")
    with OnlineAssistant(target, draft, config=config, router=LabelRouter()) as assistant:
        for adapter in ADAPTERS:
            target.set_adapter(adapter)
            serve(assistant, 3, domain=adapter)
        assistant.save_state(tmp_path)
    with OnlineAssistant(target, draft, config=config, router=LabelRouter()) as again:
        again.load_state(tmp_path)
        assert [len(kept(lesson_of(again, adapter))) for adapter in ADAPTERS] == [3, 3]
        again.resume()
        assert [lesson_of(again, adapter).is_unconfirmed for adapter in ADAPTERS] == [True, False]
        with pytest.raises(LearnerError, match="No draft of 'one' could learn yet"):
            again.update(domain="one")
        assert again.update(1).domain == "two"
        target.set_adapter("one")
        with torch.no_grad():
            target.get_base_model().lm_head.weight += 0.5
        serve(again, 1, 3, domain="one")
        assert [len(kept(lesson_of(again, adapter))) for adapter in ADAPTERS] == [1, 3]
        assert again.update(1, domain="one").new_requests == 1


def test_a_saved_draft_says_which_target_it_learned_from(
    pair: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = pair
    with OnlineAssistant(target, draft, config=CONFIG) as assistant:
        assistant.save_pretrained(tmp_path / "unlearned")
        serve(assistant, 22)
        assert assistant.version > 0
        learned_from = fingerprint(target)
        train(target)
        serve(assistant, 1)  # which has taught it nothing yet
        assistant.save_pretrained(tmp_path / "learned")
        assert not hasattr(assistant.draft.config, "osd_hf_target")
    for name, version in (("unlearned", None), ("learned", learned_from)):
        caplog.clear()
        loaded = models.fixed_k(AutoModelForCausalLM.from_pretrained(tmp_path / name))
        assert getattr(loaded.config, "osd_hf_target", None) == version
        with OnlineAssistant(target, loaded, config=CONFIG) as again:
            again.save_pretrained(tmp_path / "again")
            assert ("trained for another version" in caplog.text) == (version is not None)
        kept_word = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert getattr(kept_word.config, "osd_hf_target", None) == version
    caplog.clear()
    OnlineAssistant(pair_as_it_was()[0], loaded).close()
    assert "taught for" not in caplog.text


def pair_as_it_was() -> Any:
    return models.pair(noise=0.2, num_hidden_layers=1)


# --- a lesson -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> list[Trace]:
    target, _ = pair_as_it_was()
    prompts = [p[0].tolist() for p in models.prompts(12)]
    return list(record_traces(target, prompts, max_new_tokens=6, num_logprobs=8))


def test_rows_of_two_targets_never_meet(recorded: list[Trace], judged: list[set[str | None]]) -> None:
    config = replace(CONFIG, update_strategy="spread", steps_per_update=3)
    taught = Learner(DomainDrafts(pair_as_it_was()[1], config, per_domain=False))
    lesson, said = taught.drafts.requests[None], "aaaaaaa-aaaaaaaabbbb-bbabbbbbbbbbbbbccccccccccccccccccccccccccc"
    for number, name in enumerate(said):
        trace = replace(recorded[number % 12], target=None if name == "-" else name, created_at_seconds=float(number))
        judged.clear()
        taught.observe(None, trace)
        taught.after_answer()
        assert len(set().union(*judged, of_versions(lesson)) - {None}) <= 1, number
        # After a change, who does not say is not believed.
        assert name != "-" or (trace in kept(lesson)) == (number < 18), number
    assert len([d for d in taught.decisions if d.requests >= 4]) >= 2
    assert taught.drafts.serving_version() == 0 or taught.drafts.serving(None).target_version in {"a", "b", "c"}


def test_with_a_lag_earlier_targets_teach_and_the_newest_judges(
    recorded: list[Trace], judged: list[set[str | None]]
) -> None:
    config = replace(CONFIG, update_interval=8)
    taught = Learner(DomainDrafts(pair_as_it_was()[1], config, per_domain=False))
    taught.drafts.set_pace(target_lag=1)
    lesson, met = taught.drafts.requests[None], list[tuple[set[str | None], int]]()
    for number, name in enumerate("a" * 24 + "b" * 24 + "c" * 24 + "b"):
        lesson.effort.share = 1.0
        trace = replace(recorded[number % 12], target=name, created_at_seconds=float(number))
        taught.observe(None, trace)
        taught.after_answer()
        met.append((of_versions(lesson), len(kept(lesson))))
    assert [versions for versions, _ in met[::24]] == [{"a"}, {"a", "b"}, {"b", "c"}, {"b", "c"}]
    assert met[24][1] > 20  # nothing begins anew
    assert met[48][1] > 20
    # Batches of both, and versions of the draft that the newest target alone has judged.
    assert {"a", "b"} in judged
    assert judged[-1] == {"c"}
    assert not any({"a", "c"} <= versions for versions in judged)
    again = Learner(DomainDrafts(pair_as_it_was()[1], config, per_domain=False))
    again.drafts.set_pace(target_lag=1)
    again.load_state_dict(taught.state_dict())
    assert (again.drafts.requests[None].target, again.drafts.requests[None].earlier) == ("b", ("c",))
    taught.remove_requests("d")
    assert not kept(lesson)


def test_offline_one_run_takes_one_target(recorded: list[Trace]) -> None:
    def read(names: str) -> int:
        traces = [replace(t, target=None if n == "-" else n) for t, n in zip(recorded, names, strict=False)]
        return len(read_traces(traces, pair_as_it_was()[0]))

    assert (read("aaa"), read("a-a"), read("---")) == (3, 3, 3)
    with pytest.raises(DataError, match=r"2 versions of the target \(a, b\)"):
        read("ab-")


def test_offline_requests_without_rows_are_left_out(recorded: list[Trace], caplog: pytest.LogCaptureFixture) -> None:
    bare = bare_trace(recorded[0].prompt_ids, recorded[0].completion_ids, models.VOCAB)
    mixed = [bare, *recorded[:2], bare]
    assert read_traces(mixed, pair_as_it_was()[0]) == recorded[:2]
    assert [r.getMessage() for r in caplog.records] == ["2 requests without the target's rows are left out."]


@pytest.mark.parametrize("architecture", ["llama", "t5"])
@pytest.mark.parametrize("width", [8, None])
def test_rows_scored_anew_are_those_of_the_target(architecture: str, width: int | None) -> None:
    target = models.build(architecture, **models.SHALLOW[architecture])
    prompts = [p[0].tolist() for p in models.prompts(3)]
    own = list(record_traces(target, prompts, max_new_tokens=6, num_logprobs=width, batch_size=1))
    for before, after in zip(own, scored(target, own, [width] * 3, 2), strict=True):
        assert np.abs(before.top_logits.astype(float) - after.top_logits).max() < 1e-2
        np.testing.assert_array_equal(before.completion_ids, after.completion_ids)
    train(target) if architecture == "llama" else target.lm_head.weight.data.mul_(2)
    for after in scored(target, own, [width] * 3, 2):
        rows = completion_logits(target, [after])[0].float().log_softmax(-1)
        ids = torch.arange(rows.shape[1])[None] if width is None else torch.from_numpy(after.top_ids.astype(np.int64))
        wanted = rows.gather(1, ids.expand(len(rows), -1)).detach().numpy()
        assert np.abs(wanted - after.kept_logprobs()).max() < 1e-2
