import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from models import same, weights
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM
from waiting import LONG

from osd_hf import CorrectionStore, LabelRouter, OnlineAssistant, OnlineConfig, Trace
from osd_hf.acceptance import AcceptanceStats
from osd_hf.errors import ConfigError, StateError
from osd_hf.router import RoutedPrompt

# Without the gate each update is a version, so that versions can be counted.
FAST = OnlineConfig(
    num_assistant_tokens=5, update_strategy="interval", update_interval=3, steps_per_update=2, batch_size=4,
    optimizer="adamw", learning_rate=3e-3, gate=False,
)  # fmt: skip
MANUAL = replace(FAST, update_strategy="manual")


def serve(assistant: OnlineAssistant, number: int, **settings: Any) -> list[list[int]]:
    answers = []
    for ids in models.prompts(number):
        kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8, **settings}
        answers.append(assistant.generate(ids, **kwargs)[0, ids.shape[1] :].tolist())
    return answers


@contextmanager
def weights_used(assistant: OnlineAssistant) -> Iterator[list[int]]:
    """Which weights each forward of a draft ran with, whichever model held them, as a checksum."""
    seen: list[int] = []

    def note(module: Any, *_: Any) -> None:
        if module in assistant.drafts.models:
            seen.append(hash(b"".join(p.detach().numpy().tobytes() for p in module.parameters())))

    handle = register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


# --- serving and learning -------------------------------------------------------------------------------------------


def test_alpha_rises_and_the_callers_draft_stays() -> None:
    target, draft = models.pair("gpt2", noise=0.3, n_layer=1)
    before, config = weights(draft), draft.generation_config.to_dict()
    assistant = OnlineAssistant(target, draft, config=FAST)
    for _ in range(8):
        serve(assistant, 6)
    requests = assistant.stats.requests
    assert requests[-12:, 1].sum() / requests[-12:, 0].sum() > requests[:12, 1].sum() / requests[:12, 0].sum() + 0.1
    assert assistant.version == 16
    assert same(weights(draft), before)
    assert draft.generation_config.to_dict() == config
    assert not same(weights(assistant.draft), before)
    assert assistant.serving_draft("any") is assistant.draft


def test_updates_come_every_so_many_requests() -> None:
    assistant = OnlineAssistant(*models.pair(), config=FAST)
    versions = []
    for _ in range(7):
        serve(assistant, 1)
        versions.append(assistant.version)
    assert versions == [0, 0, 1, 1, 1, 2, 2]
    report = assistant.update(steps=5)
    assert (report.version, report.steps, report.new_requests) == (3, 5, 1)
    assert assistant.version == 3
    serve(assistant, 2)
    assert assistant.version == 3  # counting began again


def test_a_request_that_is_not_to_be_learned_from_leaves_nothing() -> None:
    target, draft = models.pair()
    store = CorrectionStore()
    assistant = OnlineAssistant(target, draft, config=replace(FAST, update_interval=2), store=store)
    answers = serve(assistant, 4, learn=False)
    assert len(store) == 0
    assert not assistant.drafts.requests[None].pending
    assert (assistant.version, assistant.stats.num_requests) == (0, 4)
    assert answers == serve(OnlineAssistant(target, draft, config=FAST), 4)
    with assistant.attached(learn=False):
        target.generate(models.prompt(), assistant_model=assistant.draft, max_new_tokens=4)
    assert len(store) == 0
    assert assistant.stats.num_requests == 5


def test_a_request_is_logged_with_its_domain_and_version() -> None:
    store = CorrectionStore()
    assistant = OnlineAssistant(*models.pair(), config=FAST, store=store)
    serve(assistant, 4, domain="sql")
    serve(assistant, 2)
    assert [(t.domain, t.draft_version) for t in store] == [("sql", 0)] * 3 + [("sql", 1), (None, 1), (None, 1)]
    assert {d: s.num_requests for d, s in assistant.stats_by_domain.items()} == {"sql": 4, None: 2}
    assert sum(map(AcceptanceStats.from_trace, store), AcceptanceStats()) == assistant.stats
    assistant.reset_stats()
    assert assistant.stats == AcceptanceStats()
    assert assistant.version == 2


def test_the_trace_of_a_request_is_handed_over_also_where_nothing_is_kept_of_it() -> None:
    assistant = OnlineAssistant(*models.pair(), config=FAST)
    seen: list[Trace] = []
    answers = serve(assistant, 2, on_trace=seen.append, learn=False)
    assert [trace.completion_ids.tolist() for trace in seen] == answers
    assert all(trace.rounds and trace.num_kept for trace in seen)
    assert not list(assistant.drafts.requests[None].pending)


def test_who_fails_on_a_trace_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    def fail(trace: Trace) -> None:
        raise RuntimeError("no room for traces")

    assistant = OnlineAssistant(*models.pair(), config=FAST)
    answers = serve(assistant, 3)
    with caplog.at_level(logging.ERROR):
        assert serve(assistant, 3, on_trace=fail) == answers
    assert caplog.text.count("`on_trace` failed") == 3
    assert "no room for traces" in caplog.text


def test_a_request_inside_attached_counts_once() -> None:
    assistant = OnlineAssistant(*models.pair(), config=FAST)
    with assistant.attached(domain="outer"):
        serve(assistant, 2, domain="inner")
    assert {d: s.num_requests for d, s in assistant.stats_by_domain.items()} == {"inner": 2}


def test_learning_does_not_touch_the_callers_random_numbers() -> None:
    target, draft = models.pair()
    sampled = []
    for config in (FAST, MANUAL):
        torch.manual_seed(1)
        assistant = OnlineAssistant(target, draft, config=config)
        serve(assistant, 3, do_sample=True)
        sampled.append(torch.rand(3))
    assert torch.equal(*sampled)


def test_what_is_saved_is_an_ordinary_draft(tmp_path: Path) -> None:
    target, draft = models.pair()
    assistant = OnlineAssistant(target, draft, models.tokenizer(), FAST)
    serve(assistant, 3)
    assistant.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(weights(saved), weights(assistant.draft))
    assert saved.generation_config.num_assistant_tokens == 5
    assert saved.generation_config.assistant_confidence_threshold == 0.0
    assert saved.generation_config.num_assistant_tokens_schedule == "constant"
    assert (tmp_path / "tokenizer.json").exists()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_a_peft_draft_learns_its_adapter_and_is_saved_merged(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    target, draft = models.pair(noise=0.05)
    base = weights(draft)
    wrapped = get_peft_model(draft, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=2))
    before = weights(wrapped)
    assistant = OnlineAssistant(target, wrapped, config=replace(FAST, learning_rate=0.05))
    answers = serve(assistant, 6)
    assert answers == serve(OnlineAssistant(target, models.build(seed=4), config=MANUAL), 6)
    assert assistant.version == 2
    assert same(weights(wrapped), before)
    served = weights(assistant.draft)  # an ordinary model, the adapter merged
    changed = {name for name, p in served.items() if not torch.equal(p, base[name])}
    assert changed
    assert all("q_proj" in name or "v_proj" in name for name in changed)
    assistant.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = models.prompt()
    with torch.no_grad():
        ours, theirs = (models.double(model)(ids).logits for model in (saved, assistant.draft))
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def test_an_error_of_the_target_reaches_the_caller_and_serving_goes_on() -> None:
    target, draft = models.pair()
    assistant = OnlineAssistant(target, draft, config=replace(FAST, update_interval=1))
    handle = target.model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        serve(assistant, 1)
    handle.remove()
    serve(assistant, 2)
    assert (assistant.version, assistant.stats.num_requests) == (2, 2)
    assert len(assistant.drafts.held) == 1  # the failed request has given its draft back


# --- threads --------------------------------------------------------------------------------------------------------


def test_a_promotion_waits_for_no_request_and_changes_none_that_is_running() -> None:
    target, draft = models.pair()
    store = CorrectionStore()
    config = replace(MANUAL, learning_rate=0.01)
    assistant = OnlineAssistant(target, draft, config=config, store=store)
    alone = serve(OnlineAssistant(target, draft, config=MANUAL), 1, max_new_tokens=16)
    serve(assistant, 3)
    given = assistant.draft
    other: dict[str, Any] = {}

    def in_another_thread() -> None:
        other["report"] = assistant.update()
        with weights_used(assistant) as used:
            other["answers"] = serve(assistant, 1, max_new_tokens=16)
            other["used"] = set(used)

    class Promoter:
        calls = 0

        def put(self, value: torch.Tensor) -> None:
            self.calls += 1
            if self.calls == 3:  # the prompt, a round, and the next
                other["before"] = set(seen)
                thread = threading.Thread(target=in_another_thread)
                thread.start()
                thread.join(timeout=LONG)
                assert not thread.is_alive()
                other["version"], other["kept"] = assistant.version, weights(given)
                seen.clear()

        def end(self) -> None:
            pass

    with weights_used(assistant) as seen:
        answers = serve(assistant, 1, streamer=Promoter(), max_new_tokens=16)
        after = set(seen)
    assert other["report"].version == other["version"] == assistant.version == 1
    assert same(other["kept"], weights(draft))
    assert other["before"] == after  # one version from beginning to end
    assert len(after) == len(other["used"]) == 1
    assert other["used"] != after  # the next one got the new version at once
    assert answers == other["answers"] == alone
    # The one that ended last is the one that began first.
    assert [t.draft_version for t in store] == [0, 0, 0, 1, 0]
    with weights_used(assistant) as seen:
        serve(assistant, 1)
    assert set(seen) == other["used"]
    assert len(assistant.drafts.held) == 1  # what overlapping requests made has gone


# --- the session ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gate", "optimizer"), [(False, "muon"), (True, "adamw")])
def test_a_resumed_session_equals_one_straight_through(tmp_path: Path, gate: bool, optimizer: Any) -> None:
    target, draft = models.pair(noise=0.12, num_hidden_layers=1)
    config = replace(FAST, gate=gate, optimizer=optimizer)
    straight = OnlineAssistant(target, draft, config=config)
    first = OnlineAssistant(target, draft, config=config)
    for assistant in (straight, first):
        assistant.drafts.set_pace(min_effort=1.0)  # otherwise the clock decides about updates
        serve(assistant, 5, domain="a")  # one update, and two requests waiting for the next
    first.save_state(tmp_path)
    second = OnlineAssistant(target, draft, config=config)
    second.drafts.set_pace(min_effort=1.0)
    second.load_state(tmp_path)
    assert (second.version, second.stats) == (first.version, first.stats)
    for assistant in (straight, second):
        serve(assistant, 8)
        serve(assistant, 5)
    assert second.decisions == straight.decisions
    assert len(second.decisions) == 6
    assert second.version == straight.version
    assert second.version == 6 or gate
    assert second.version > 0
    assert second.stats == straight.stats
    assert {d: s.num_requests for d, s in second.stats_by_domain.items()} == {"a": 5, None: 13}
    assert same(weights(second.draft), weights(straight.draft))


def test_the_session_of_another_draft_leaves_the_assistant_as_it_was(tmp_path: Path) -> None:
    target, draft = models.pair()
    OnlineAssistant(models.build("gpt2"), models.build("gpt2"), config=FAST).save_state(tmp_path)
    assistant = OnlineAssistant(target, draft, config=FAST)
    serve(assistant, 4)
    before, stats, waiting = weights(assistant.draft), assistant.stats, len(assistant.drafts.requests[None].pending)
    with pytest.raises(StateError, match="another draft"):
        assistant.load_state(tmp_path)
    with pytest.raises(StateError, match="no saved session"):
        assistant.load_state(tmp_path / "nowhere")
    assert same(weights(assistant.draft), before)
    assert (assistant.version, assistant.stats, len(assistant.drafts.requests[None].pending)) == (1, stats, waiting)
    serve(assistant, 2)
    assert assistant.version == 2


def test_a_session_takes_the_place_of_other_domains_drafts(tmp_path: Path) -> None:
    target, draft = models.pair()
    first, used, fresh = (OnlineAssistant(target, draft, config=FAST, router=LabelRouter()) for _ in range(3))
    serve(first, 3, domain="x")
    first.save_state(tmp_path)
    serve(used, 3, domain="y")
    for assistant in (used, fresh):
        assistant.load_state(tmp_path)
        assert assistant.drafts.domains == ("x",)
        assert same(weights(assistant.serving_draft("y")), weights(draft))
        serve(assistant, 6, domain="y")
    # Nothing is left of what was learned of "y" before.
    assert same(weights(used.serving_draft("y")), weights(fresh.serving_draft("y")))
    assert same(weights(used.serving_draft("x")), weights(first.serving_draft("x")))
    assert used.drafts.previous("y")[1].keys() == weights(draft).keys()


# --- tracking -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own imports
def test_tensorboard_gets_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with OnlineAssistant(*models.pair(), config=FAST, report_to="tensorboard") as assistant:
        serve(assistant, 6)
    (folder,) = {p.parent for p in tmp_path.rglob("events.out.tfevents.*") if p.parent.name == "osd_hf"}
    events = EventAccumulator(str(folder)).Reload()
    assert {"alpha", "block_efficiency", "loss", "version"} <= set(events.Tags()["scalars"])
    assert [(e.step, e.value) for e in events.Scalars("version")] == [(3, 1.0), (6, 2.0)]
    alphas = [e.value for e in events.Scalars("alpha")]
    halves = [assistant.stats.requests[:3], assistant.stats.requests[3:]]
    np.testing.assert_allclose(alphas, [h[:, 1].sum() / h[:, 0].sum() for h in halves], rtol=1e-5)


@pytest.mark.parametrize("report_to", ["nothing_of_that_name", ["tensorboard", "nothing_of_that_name"]])
def test_trackers_that_do_not_exist_are_refused(report_to: Any) -> None:
    with pytest.raises(ConfigError, match="nothing_of_that_name"):
        OnlineAssistant(*models.pair(), report_to=report_to)


def test_what_is_not_learned_from_is_not_shown_to_the_router_as_such() -> None:
    seen = []

    class Watching(LabelRouter):
        def route(self, prompt: RoutedPrompt) -> str | None:
            seen.append(prompt.learn)
            return None

    target, draft = models.pair()
    with OnlineAssistant(target, draft, config=FAST, router=Watching()) as assistant:
        for learn in (True, False):
            ids = models.prompt(5)
            assistant.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, learn=learn)
    assert seen == [True, False]
