"""What would have no effect is said once, with what to do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import models
import pytest
from transformers import pipeline

from osd_hf import CorrectionStore, LabelRouter, OnlineAssistant, OnlineConfig, Trace, capture_traces
from osd_hf.errors import ConfigError

Log = pytest.LogCaptureFixture


@pytest.fixture(autouse=True)
def warnings_only(caplog: Log) -> None:
    """Leave out information, which commands in other tests let the package log."""
    caplog.set_level(logging.WARNING, logger="osd_hf")


def ask(target: Any, number: int = 4, **settings: Any) -> None:
    for ids in models.prompts(number):
        target.generate(ids, **models.greedy(ids, max_new_tokens=6, **settings))


def assert_said_once(caplog: Log, text: str) -> None:
    assert sum(text in message for message in caplog.messages) == 1, caplog.messages


def test_calls_inside_attached_and_captured_blocks_without_a_draft(caplog: Log) -> None:
    target, draft = models.pair()
    assistant, traces = models.assistant_of(target, draft), list[Trace]()
    with assistant.attached():
        ask(target)
        assert_said_once(caplog, "drafts nothing, and nothing is learned. Pass `assistant_model=assistant.draft`")
    with capture_traces(target, traces.append):
        ask(target)
    assert_said_once(caplog, "Pass `assistant_model=` to the call")
    ask(target)  # outside
    assert (len(caplog.messages), traces, assistant.stats.num_requests) == (2, [], 0)


def test_a_pipeline_inside_attached_without_a_draft(caplog: Log) -> None:
    target, draft = models.pair()
    tokenizer = models.tokenizer()
    assistant = OnlineAssistant(target, draft, tokenizer)
    how: dict[str, Any] = {"model": target, "tokenizer": tokenizer}
    with assistant.attached():
        pipeline("text-generation", **how)("abc", max_new_tokens=4)
        assert_said_once(caplog, "or to `pipeline`")
        pipeline("text-generation", **how, assistant_model=assistant.draft)("abc", max_new_tokens=4)
    assert assistant.stats.num_requests == 1


def test_a_request_that_the_target_must_answer_alone_gives_its_own_reason(caplog: Log) -> None:
    assistant = models.assistant_of(*models.pair())
    embeddings = assistant.target.get_input_embeddings()(models.prompt())
    with assistant.attached():
        assistant.generate(inputs_embeds=embeddings, max_new_tokens=2, on_trace=print)
    assert not [message for message in caplog.messages if "drafts nothing" in message]
    assert_said_once(caplog, "`on_trace` is not called")


def test_a_block_that_sees_no_request(caplog: Log) -> None:
    assistant = models.assistant_of(*models.pair())
    with assistant.attached():
        pass
    assert_said_once(caplog, "`attached()` has seen no request. Those of other threads need")
    with assistant.attached():
        ids = models.prompt()
        assistant.generate(ids, **models.greedy(ids, max_new_tokens=2))
    assert len(caplog.messages) == 1


def test_the_draft_that_was_passed_in_is_served_by_the_newest_version(caplog: Log) -> None:
    target, draft = models.pair(noise=0.3)
    store, other = CorrectionStore(), models.draft_of(target)
    config = OnlineConfig(num_assistant_tokens=5, update_strategy="manual", gate=False)
    assistant = OnlineAssistant(target, draft, None, config, store=store)
    with assistant.attached():
        ask(target, assistant_model=draft)
        assistant.update()
        ask(target, 1, assistant_model=draft)
        assert [trace.draft_version for trace in store] == [0] * 4 + [1]
        assert not caplog.messages
        ask(target, 2, assistant_model=other)
    assert_said_once(caplog, "drafts with another model than the assistant's")
    assert [trace.draft_version for trace in store][5:] == [0, 0]


def test_a_draft_that_is_larger_or_slower_than_its_target(caplog: Log) -> None:
    small, draft = models.build(num_hidden_layers=1), models.draft_of(models.build())
    with OnlineAssistant(small, draft) as assistant:
        assert_said_once(caplog, "Are they swapped?")
        ids = models.prompt()
        now = [0.0]  # seconds, which only forwards take
        for model, seconds in ((small, 0.1), (assistant.draft, 0.2)):
            model.register_forward_pre_hook(lambda *_, seconds=seconds: now.append(now.pop() + seconds))
        assistant.drafting.clock = lambda: now[0]
        for _ in range(20):
            assistant.generate(ids, **models.greedy(ids, max_new_tokens=12))
    assert_said_once(caplog, "Choose a smaller draft")


def test_saving_a_draft_that_has_learned_nothing(tmp_path: Path, caplog: Log) -> None:
    target, draft = models.pair()
    config = OnlineConfig(num_assistant_tokens=5, update_strategy="manual", gate=False)
    assistant = OnlineAssistant(target, draft, models.tokenizer(), config, router=LabelRouter())
    for ids in models.prompts(4):
        assistant.generate(ids, domain="sql", **models.greedy(ids, max_new_tokens=6))
    assistant.update(domain="sql")
    assistant.save_pretrained(tmp_path / "sql", domain="sql")
    assert not caplog.messages
    assistant.save_pretrained(tmp_path / "base")
    assert_said_once(caplog, "no learned version serves the domain None. Domains that have learned: sql.")
    assistant.save_pretrained(tmp_path / "other", domain="poems")
    assert_said_once(caplog, "serves the domain poems. Domains that have learned: sql.")


def test_a_callback_that_is_never_called_and_settings_without_an_effect(caplog: Log) -> None:
    target, draft = models.pair()
    config = OnlineConfig(num_assistant_tokens=5, candidates="draft", text_scope="request")
    with OnlineAssistant(target, draft, None, config, on_update=print) as assistant:
        for name in ("candidates", "text_scope"):
            assert_said_once(caplog, f"`{name}` has no effect")
        ids = models.prompt()
        assistant.generate(ids, **models.greedy(ids, max_new_tokens=6))
    assert_said_once(caplog, "`on_update` was never called: 1 requests, and no update.")


def learning(**changes: Any) -> OnlineConfig:
    return OnlineConfig(num_assistant_tokens=5, update_strategy="manual", gate=False, **changes)


def serve(assistant: OnlineAssistant, number: int = 1, **settings: Any) -> None:
    for ids in models.prompts(number):
        assistant.generate(ids, **models.greedy(ids, max_new_tokens=6), **settings)


def test_a_session_in_the_autosave_folder_that_is_not_loaded(tmp_path: Path, caplog: Log) -> None:
    target, draft = models.pair()
    with OnlineAssistant(target, draft, None, learning(), autosave=tmp_path) as assistant:
        serve(assistant)
    assert not caplog.messages
    with OnlineAssistant(target, draft, None, learning(), autosave=tmp_path) as assistant:
        assistant.load_state(tmp_path)
        serve(assistant)
    assert not caplog.messages
    with OnlineAssistant(target, draft, None, learning(), autosave=tmp_path) as assistant:
        serve(assistant, learn=False)
        assert not caplog.messages
    assert_said_once(caplog, f"The session in {tmp_path} stays as it is")
    again = OnlineAssistant(target, draft, None, learning())
    again.load_state(tmp_path)
    assert again.stats.num_requests == 2  # of the sessions before
    caplog.clear()
    with OnlineAssistant(target, draft, None, learning(), autosave=tmp_path) as assistant:
        serve(assistant, 2)
    assert_said_once(caplog, f"The session in {tmp_path} is not loaded, and the next save replaces it.")
    with OnlineAssistant(target, draft, None, learning(), autosave=tmp_path) as assistant:
        assistant.save_state(tmp_path)
        serve(assistant)
    assert len(caplog.messages) == 1


def test_a_loaded_session_learns_with_the_configured_rate(tmp_path: Path) -> None:
    target, draft = models.pair(noise=0.3)
    moved = []
    for rate in (1e-3, 1e-9):
        assistant = OnlineAssistant(target, draft, None, learning(learning_rate=rate, weight_average=0.0))
        if moved:
            assistant.load_state(tmp_path)
        before = models.weights(assistant.draft)
        serve(assistant, 4)
        assistant.update(1)
        after = models.weights(assistant.draft)
        moved.append(max(float((after[name] - before[name]).abs().max()) for name in before))
        assistant.save_state(tmp_path)
    assert moved[0] > 1e-4 and moved[1] < 1e-6


def test_drafts_of_domains_without_a_labeled_request(caplog: Log) -> None:
    target, draft = models.pair()
    for labels in ([None] * 36, [None] * 31 + ["sql"] + [None] * 4, ["sql"] + [None] * 36):
        assistant = OnlineAssistant(target, draft, None, learning(), router=LabelRouter())
        for label in labels:
            serve(assistant, domain=label)
        assistant.reset_stats()
    assert_said_once(caplog, "32 requests came without a domain, and only drafts of domains learn. Pass `domain=`")


def test_an_update_without_requests_and_a_store_without_traces(tmp_path: Path, caplog: Log) -> None:
    target, draft = models.pair()
    with OnlineAssistant(target, draft, None, learning(), store=tmp_path) as assistant:
        version = assistant.update().version
        assert version == 0
        assert_said_once(caplog, "The update changed nothing: there was nothing to learn from.")
        assert not [message for message in caplog.messages if "stored" in message]
    assert_said_once(caplog, "Nothing was stored: no request was seen.")
    caplog.clear()
    with OnlineAssistant(target, draft, None, learning(), store=tmp_path) as assistant:
        serve(assistant, 4)
        assistant.update()
    assert not caplog.messages


def test_text_of_a_domain_that_no_other_owner_may_use() -> None:
    target, draft = models.pair()
    assistant = OnlineAssistant(target, draft)
    assistant.remember([1, 2, 3])
    with pytest.raises(ConfigError, match='`text_scope="domain"` alone'):
        assistant.remember([1, 2, 3], domain="sql")
    OnlineAssistant(target, draft, None, OnlineConfig(text_scope="domain")).remember([1, 2, 3], domain="sql")


def test_a_tracker_that_is_not_installed_beside_one_that_is(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    target, draft = models.pair()
    with pytest.raises(ConfigError, match="`report_to`: swanlab is not installed"):
        OnlineAssistant(target, draft, report_to=["tensorboard", "swanlab"])
