"""Drafts that choose among the tokens in use alone."""

import itertools
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import VOCAB
from saved_pair import save_pair
from test_lossless import PAIRS, answer_distribution, fits, greedy_divergences, sampled_answers, small_pair
from transformers import AutoTokenizer

from osd_hf import LabelRouter, OnlineAssistant, OnlineConfig, Trace, vocabulary
from osd_hf.recording import measured_costs, record_traces
from osd_hf.trace import bare_trace


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies of tests are worth restricting, at once."""
    values = {"MIN_VOCAB_SIZE": 1, "SIZES": (VOCAB // 4, VOCAB // 2), "RANK_EVERY": 2, "MIN_EMITTED_TOKENS": 1,
              "MAX_EMITTED_TOKENS": 16, "MAX_MISSED": 0.3, "PROMPT_WEIGHT": 0.0}  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(vocabulary, name, value)


def assistant_of(target: Any, draft: Any, router: Any = None, **settings: Any) -> OnlineAssistant:
    """Drafting pays, and drafts alone are proposed from."""
    usual = {"candidates": "draft", "update_interval": 4, "steps_per_update": 1, "optimizer": "adamw", "gate": False}
    assistant = OnlineAssistant(target, draft, router=router, config=OnlineConfig(**{**usual, **settings}))
    assistant.drafting.clock = models.ForwardTime({target: 1.0, assistant.draft: 0.1})  # type: ignore[union-attr]
    return assistant


def whole_heads(assistant: OnlineAssistant) -> list[int]:
    """Grows with each row that the whole head of the draft that serves computes."""
    rows: list[int] = []
    head = assistant.draft.get_output_embeddings()
    head.register_forward_hook(lambda _module, _args, output: rows.append(output.shape[-1]))
    return rows


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "t5"])
def test_greedy_answers_are_the_targets_and_what_is_drafted_is_in_use(architecture: str) -> None:
    target = models.build(architecture, **models.SHALLOW[architecture])
    assistant = assistant_of(target, models.draft_of(target, noise=0.05), update_strategy="manual")
    requests = [(ids, {}) for ids in models.prompts(3)] * 3
    requests += [(requests[0][0], {"repetition_penalty": 1.2}), (requests[1][0], {"bad_words_ids": [[9]]})]
    drafted, whole = list[set[int]](), list[int]()

    def answer(ids: torch.Tensor, **settings: Any) -> Any:
        drafting = assistant.drafting
        assert drafting is not None
        known, before = drafting.token_ids, len(heads)
        output = assistant.generate(ids, on_trace=traces.append, **settings)
        if known is not None:
            used = {int(t) for r in traces[-1].rounds for t in r.drafted_ids}
            assert used <= set(known.tolist())
            drafted.append(used)
            whole.append(len(heads) - before)
        return output

    heads, traces = whole_heads(assistant), list[Trace]()
    wrong, _ = greedy_divergences(target, answer, requests)
    assert wrong == []
    assert len(drafted) >= 6
    assert max(map(len, drafted)) > 2
    assert sum(whole) == 0
    assert assistant.stats.accepted > 20
    plan = assistant.drafting_plan()
    assert plan is not None
    assert plan.vocab_size in (VOCAB // 4, VOCAB // 2)


def test_sampled_answers_have_the_targets_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "SIZES", (3,))
    monkeypatch.setattr(vocabulary, "MAX_MISSED", 1.0)
    target, draft = small_pair()
    assistant = assistant_of(target, draft, update_interval=10)
    ids = models.prompt(3, vocab_size=6)
    counts = sampled_answers(assistant, ids, 200)
    p_value = fits(counts, answer_distribution(target, ids), PAIRS)
    plan = assistant.drafting_plan(do_sample=True)
    assert p_value > 1e-3
    assert plan is not None
    assert plan.vocab_size == 3
    assert 0.2 < assistant.stats.alpha < 0.95


def test_a_fixed_number_of_tokens_is_drafted_among_all() -> None:
    target = models.build()
    assistant = assistant_of(target, models.draft_of(target), update_strategy="manual")
    for ids in models.prompts(4) * 3:
        assistant.generate(ids, max_new_tokens=12, do_sample=False)
    rows = whole_heads(assistant)
    assistant.generate(models.prompt(), max_new_tokens=12, do_sample=False)
    assert rows == []
    assistant.generate(models.prompt(), max_new_tokens=12, do_sample=False, num_assistant_tokens=3)
    assert set(rows) == {VOCAB}


def served(assistant: OnlineAssistant, domain: str | None = None) -> list[int | None]:
    """How many tokens the draft chose among, request by request."""
    sizes = []
    for ids in models.prompts(4) * 3:
        assistant.generate(ids, max_new_tokens=12, do_sample=False, domain=domain)
        sizes.append(assistant.drafting_plan(domain).vocab_size)  # type: ignore[union-attr]
    return sizes


def test_a_draft_that_cannot_be_restricted_chooses_among_all(caplog: pytest.LogCaptureFixture) -> None:
    assistant = assistant_of(*models.pair("bart"), update_strategy="manual")
    assert set(served(assistant)) == {None}
    assert assistant.stats.accepted > 0
    assert sum("vocabulary" in message for message in caplog.messages) == 1


def test_each_domain_has_its_tokens_and_their_base_has_all() -> None:
    target = models.build()
    assistant = assistant_of(target, models.draft_of(target, noise=0.1), router=LabelRouter(), update_interval=2)
    assert served(assistant, "law")[-1] is not None
    assert set(served(assistant)) == {None}


def test_a_session_knows_the_tokens_in_use(tmp_path: Path) -> None:
    target = models.build()
    draft = models.draft_of(target)
    assistant = assistant_of(target, draft)
    served(assistant)
    assistant.save_state(tmp_path)
    again = assistant_of(target, draft)
    again.load_state(tmp_path)
    known, loaded, new = (set(one.drafting.token_ids) for one in (assistant, again, assistant_of(target, draft)))
    assert known <= loaded
    assert not known <= new


def test_the_first_request_has_a_draft_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "USUAL_WEIGHT", 0.1)
    target, half, ids = models.build(), VOCAB // 2, models.prompt()
    draft = models.draft_of(target, noise=0.05)
    expected = target.generate(ids, max_new_tokens=12, do_sample=False)
    for first, learn in (([*range(half)], True), ([*range(half - 1), VOCAB - 1], False)):
        assistant = assistant_of(target, draft, update_strategy="manual")
        rows = whole_heads(assistant)
        assert assistant.drafting.token_ids.tolist() == first
        assert torch.equal(assistant.generate(ids, max_new_tokens=12, do_sample=False, learn=learn), expected)
        assert assistant.stats.drafted > 0 and rows == []
        draft.config.osd_hf_vocabulary = f"{VOCAB - 1} nothing {VOCAB} 99999999"  # one of them is a token
    traces = list(record_traces(target, [prompt[0].tolist() for prompt in models.prompts(3)], max_new_tokens=6))
    vocabulary.write_usual_tokens(draft, traces)
    answered = {int(token) for trace in traces for token in trace.completion_ids}
    assert max(answered) >= half
    assert answered <= set(assistant_of(target, draft).drafting.token_ids)
    # Of more tokens than a draft vocabulary has, the most frequent ones are written.
    once = bare_trace([1], list(range(VOCAB)), VOCAB, None)
    vocabulary.write_usual_tokens(draft, [once, *traces])
    written = [int(token) for token in draft.config.osd_hf_vocabulary.split()]
    assert len(written) == half and answered <= set(written)


@pytest.mark.parametrize("learn", [True, False])
def test_a_vocabulary_that_traffic_does_not_use_is_replaced_or_given_up(learn: bool) -> None:
    target, emitted = models.build(), set[int]()
    with torch.no_grad():
        target.lm_head.weight[: VOCAB // 2] = 0
    assistant = assistant_of(target, models.draft_of(target), update_strategy="manual")
    for ids in models.prompts(4):
        answer = assistant.generate(ids, max_new_tokens=12, do_sample=False, learn=learn)
        emitted.update(answer[0, ids.shape[1] :].tolist())
    assert min(emitted) >= VOCAB // 2
    assert assistant.drafting.token_ids is None or (learn and emitted <= set(assistant.drafting.token_ids))


def test_characters_and_added_tokens_are_usual(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_pair(tmp_path) / "target")
    usual = set(vocabulary.usual_tokens(models.build(), tokenizer))
    assert usual >= {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")}


def test_forwards_are_timed_with_a_head_of_the_size_that_serves() -> None:
    target, draft = models.pair(num_hidden_layers=1)
    ticks = itertools.count()
    [costs] = measured_costs(target, [draft], [3, 4, 5], lambda: float(next(ticks)))
    assert costs.draft > 0
