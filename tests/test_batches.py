"""Batches: each row is answered as alone, and as the target answers the batch, and learned from as such."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import models
import numpy as np
import pytest
import torch
from test_lossless import TIE, fits, stopped_distribution, stopping_pair, transitions_fit
from transformers import LogitsProcessor, MaxLengthCriteria, StoppingCriteria

from osd_hf import OnlineAssistant, OnlineConfig, Trace, capture_traces, replay
from osd_hf.router import CallableRouter

FIXED = OnlineConfig(num_assistant_tokens=4, update_strategy="manual")
INDEPENDENT = (
    *("llama", "qwen2", "qwen3", "gemma", "gpt2", "opt", "gpt_neox", "phi", "mixtral", "falcon"),
    *("mistral", "gemma3"),  # whose windows are shorter than the rows
)
TOGETHER = ("gpt_neo", "bloom", "t5", "bart")
SMALL: dict[str, dict[str, Any]] = {**models.SHALLOW, "falcon": {"num_hidden_layers": 1}, "bloom": {}, "gpt_neo": {}}
LENGTHS = (3, 11, 6, 8, 4, 9, 5, 7)
NEW = 16


def padded(lengths: tuple[int, ...], side: str = "left", vocab_size: int = models.VOCAB) -> dict[str, torch.Tensor]:
    """Prompts of these lengths, as a tokenizer pads them."""
    rows = [models.prompt(n, seed=40 + i, vocab_size=vocab_size)[0] for i, n in enumerate(lengths)]
    widest = max(lengths)
    ids, mask = torch.zeros(2, len(rows), widest, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(widest - len(row), None) if side == "left" else slice(len(row))
        ids[i, where], mask[i, where] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def each(batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The rows without padding."""
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        yield {"input_ids": ids[mask][None], "attention_mask": torch.ones_like(ids[mask][None])}


@functools.cache
def pair(architecture: str = "llama", noise: float = 0.08) -> tuple[Any, Any]:
    """A target and a draft that is right now and then, which nobody changes."""
    small = SMALL.get(architecture, {"num_hidden_layers": 1})
    return models.pair(architecture, noise=noise, **small)


def assistant_of(architecture: str = "llama", config: OnlineConfig = FIXED, noise: float = 0.08) -> OnlineAssistant:
    return OnlineAssistant(*pair(architecture, noise), config=config)


def divergences(
    target: Any, ours: torch.Tensor, batch: dict[str, torch.Tensor], settings: dict[str, Any]
) -> list[str]:
    """Rows of greedy answers that are not those of the target alone, but for ties."""
    theirs = target.generate(**batch, **settings, output_logits=True, return_dict_in_generate=True)
    wrong, begins = list[str](), theirs.sequences.shape[1] - len(theirs.logits)
    for row, (a, b) in enumerate(zip(ours, theirs.sequences, strict=True)):
        both = min(len(a), len(b))
        differs = (a[:both] != b[:both]).nonzero()[:, 0].tolist() or ([] if len(a) == len(b) else [both])
        if differs:
            top = theirs.logits[min(differs[0] - begins, len(theirs.logits) - 1)][row].topk(2).values
            if differs[0] == both or float(top[0] - top[1]) > TIE:
                wrong.append(f"row {row}: {a[begins:].tolist()} instead of {b[begins:].tolist()}")
    return wrong


def facts(trace: Trace) -> list[Any]:
    """What two traces of one request have in common, but for the rounding of rows."""
    rounds = [(r.drafted_ids.tolist(), r.num_accepted, r.num_emitted) for r in trace.rounds]
    return [trace.prompt_ids.tolist(), trace.completion_ids.tolist(), rounds, trace.domain, trace.draft_version]


# --- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "rows"), [*((name, 4) for name in INDEPENDENT), ("llama", 1), ("llama", 2), ("gpt2", 8)]
)
def test_each_row_is_answered_as_alone_and_leaves_the_trace_that_it_leaves_alone(architecture: str, rows: int) -> None:
    assistant, batch = assistant_of(architecture), padded(LENGTHS[:rows])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
    traces, alone = list[Trace](), list[Trace]()
    answers = assistant.generate(**batch, **settings, on_trace=traces.append)
    assert divergences(assistant.target, answers, batch, settings) == []
    assert 0.1 < assistant.stats.alpha < 1 or rows == 1
    counts = replay(assistant.draft, traces, 4)
    assert counts == assistant.stats
    for row, answer in zip(each(batch), answers, strict=True):
        if architecture in ("llama", "opt"):  # as the target answers it alone; other tests hold that of an assistant's
            assert divergences(assistant.target, answer[None, -NEW - row["input_ids"].shape[1] :], row, settings) == []
        assistant.generate(**row, **settings, on_trace=alone.append)
    assert list(map(facts, traces)) == list(map(facts, alone))
    for ours, theirs in zip(traces, alone, strict=True):
        assert ours.sampling == theirs.sampling
        assert np.abs(ours.kept_logprobs() - theirs.kept_logprobs()).max() < 0.02  # half precision


@pytest.mark.parametrize("architecture", TOGETHER)
def test_a_target_whose_rows_cannot_go_on_independently_answers_by_itself(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = pair(architecture)
    assistant = OnlineAssistant(copy.deepcopy(target), draft, config=FIXED)  # of which nothing was logged yet
    batch = padded(LENGTHS[:3], "right" if assistant.target.config.is_encoder_decoder else "left")
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
    traces = list[Trace]()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            answers = assistant.generate(**batch, **settings, on_trace=traces.append)
    assert torch.equal(answers, assistant.target.generate(**batch, **settings))
    assert sum("Batches are decoded without a draft" in line for line in caplog.messages) == 1
    assert (assistant.stats.drafted, assistant.stats.emitted, assistant.stats.num_requests) == (0, 72, 6)
    for trace, row in zip(traces[:2], each(batch), strict=False):
        one = list[Trace]()
        assistant.generate(**row, **settings, on_trace=one.append)
        assert trace.prompt_ids.tolist() == one[0].prompt_ids.tolist()
        assert np.abs(trace.kept_logprobs() - one[0].kept_logprobs()).max() < 0.02


# --- ends -----------------------------------------------------------------------------------------------------------


def ends_of(target: Any, batch: dict[str, torch.Tensor]) -> list[int]:
    """Tokens at which rows end at different lengths, one of them never."""
    answers = target.generate(**batch, do_sample=False, max_new_tokens=NEW)[:, batch["input_ids"].shape[1] :]
    return [int(answers[0, 2]), int(answers[1, 7])]  # where a draft that is always right has drafted them


class Careless(models.EndsWith):
    """Ends all rows with the first one."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return super().__call__(input_ids, scores)[:1]


class PerRow(LogitsProcessor):  # type: ignore[misc]
    """Forbids each row other tokens, by what the row has said and by its number."""

    is_stateless = True  # pytest rewrites the assertion, which reaches far

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == len(scores) == 4
        scores = scores.clone()
        for row, ids in enumerate(input_ids):
            scores[row, (int(ids[-1]) * 7 + row + torch.arange(30)) % scores.shape[1]] = -torch.inf
        return scores


def allowed(row: int, ids: torch.Tensor) -> list[int]:
    return [(int(ids[-1]) * 5 + row * 11 + i) % models.VOCAB for i in range(24)]


SETTINGS: dict[str, dict[str, Any]] = {
    "eos": {"eos_token_id": "ends"},
    "eos and another pad": {"eos_token_id": "ends", "pad_token_id": 5},
    "stop strings": {"stop_strings": "words"},
    "stop strings and eos": {"stop_strings": "words", "eos_token_id": "one end"},
    "a criterion of each row": {"stopping_criteria": models.EndsWith},
    "a criterion and eos": {"stopping_criteria": models.EndsWith, "eos_token_id": "one end"},
    "a careless criterion": {"stopping_criteria": Careless},
    "max_length": {"max_length": 17, "max_new_tokens": None},
    "one token": {"max_new_tokens": 1},
    "penalty": {"repetition_penalty": 1.5},
    "ngrams": {"no_repeat_ngram_size": 2, "bad_words_ids": [[3], [4, 5]]},
    "least": {"eos_token_id": "ends", "min_new_tokens": 7},
    "forced": {"eos_token_id": "ends", "forced_eos_token_id": 2, "exponential_decay_length_penalty": (3, 1.2)},
    "encoder penalty": {"encoder_repetition_penalty": 1.4},
    "a processor of each row": {"logits_processor": [PerRow()], "eos_token_id": "ends"},
    "allowed tokens": {"prefix_allowed_tokens_fn": allowed, "eos_token_id": "ends"},
}


# Whatever goes by padding, or by the number of the row, makes something else of a row alone.
ALIKE_ALONE = ("eos", "eos and another pad", "stop strings", "stop strings and eos", "one token", "least", "forced")


def settings_of(name: str, target: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    settings = {"do_sample": False, "max_new_tokens": NEW, **SETTINGS[name]}
    ends, tokenizer = ends_of(target, batch), models.tokenizer()
    if "eos_token_id" in settings:
        settings["eos_token_id"] = ends if settings["eos_token_id"] == "ends" else ends[1]
    if "stop_strings" in settings:
        settings |= {"stop_strings": tokenizer.convert_ids_to_tokens(ends), "tokenizer": tokenizer}
    if "stopping_criteria" in settings:
        settings["stopping_criteria"] = [settings["stopping_criteria"](ends)]
    return settings


# A draft that is right now and then, and one that always is: then rows end at tokens that were drafted.
@pytest.mark.parametrize(
    ("name", "noise"),
    [*((name, 0.08) for name in SETTINGS), *((name, 0.0) for name in ("eos", "stop strings", "a criterion and eos"))],
)
def test_rows_end_and_are_processed_as_in_the_targets_own_loop(name: str, noise: float) -> None:
    assistant, batch = assistant_of("qwen3", noise=noise), padded(LENGTHS[:4])
    settings = settings_of(name, assistant.target, batch)
    traces = list[Trace]()
    answers = assistant.generate(**batch, **settings, on_trace=traces.append)
    asked = [list(c.calls) for c in settings.get("stopping_criteria", ())]
    assert divergences(assistant.target, answers, batch, settings) == []
    of_others = name in ("a processor of each row", "allowed tokens")  # which may not bear rows that are not as long
    assert (assistant.stats.drafted == 0) == (of_others or name == "one token")
    for criterion, ours in zip(settings.get("stopping_criteria", ()), asked, strict=True):
        theirs = criterion.calls[len(ours) :]
        assert ours[-len(theirs) :] == theirs  # behind those that try it out
    assert all(sum(r.num_emitted for r in trace.rounds) == len(trace) for trace in traces)
    for trace, row in zip(traces, each(batch) if name in ALIKE_ALONE else (), strict=False):
        alone = list[Trace]()
        assistant.generate(**row, **settings, on_trace=alone.append)
        assert facts(trace)[:3] == facts(alone[0])[:3]


class Raises(LogitsProcessor, StoppingCriteria):  # type: ignore[misc]
    """A processor, or a criterion, that fails on one row alone."""

    is_stateless = True

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if int(input_ids[0, -1]) == self.token:
            raise LookupError("no such token")
        return torch.zeros(len(input_ids), dtype=torch.bool) if scores is None else scores


@pytest.mark.parametrize("kind", ["logits_processor", "stopping_criteria"])
def test_what_one_row_raises_is_raised_as_by_the_target_and_costs_no_other_batch_anything(kind: str) -> None:
    assistant, batch, traces = assistant_of("qwen3"), padded(LENGTHS[:4]), list[Trace]()
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
    answer = assistant.target.generate(**batch, **settings)[0, batch["input_ids"].shape[1] :]
    settings[kind] = [Raises(int(answer[8]))]
    for generate in (assistant.target.generate, functools.partial(assistant.generate, on_trace=traces.append)):
        with pytest.raises(LookupError, match="no such token"):
            generate(**batch, **settings)
    assert (traces, assistant.stats.num_requests) == ([], 0)
    settings["max_new_tokens"] = 5  # drafted tokens that would have been too many are no reason to fail
    assert torch.equal(assistant.generate(**batch, **settings), assistant.target.generate(**batch, **settings))
    assert assistant.stats.num_requests == 4


class EachHasSaid(StoppingCriteria):  # type: ignore[misc]
    """Ends a batch once each answer has said one of these tokens lately, which it remembers, as
    lm-evaluation-harness does."""

    def __init__(self, tokens: list[int], begins: int) -> None:
        self.tokens, self.begins = torch.tensor(tokens), begins
        self.done = torch.zeros(1, dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        self.done = self.done | torch.isin(input_ids[:, self.begins :][:, -2:], self.tokens).any(-1)
        return bool(self.done.all())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rows_leave_after_the_caches_have_grown(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd_hf.decoding.rows.AHEAD", 4)
    assistant, batch = assistant_of(), padded((3, 11, 6, 8))
    settings: dict[str, Any] = {"eos_token_id": [5, 9], "max_new_tokens": 60, "do_sample": False}
    with mode():
        assert divergences(assistant.target, ours := assistant.generate(**batch, **settings), batch, settings) == []
    assert len({row.count(0) for row in ours[:, 11:].tolist()}) > 1


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("noise", [0.0, 0.08])
def test_criteria_that_remember_are_asked_as_without_a_draft(rows: int, noise: float) -> None:
    config, batch, traces = FIXED, padded(LENGTHS[:rows]), list[Trace]()
    assistant = assistant_of("qwen3", config, noise)
    target, begins = assistant.target, batch["input_ids"].shape[1]
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
    tokens = target.generate(**batch, **settings)[:, begins + 6].tolist()
    theirs = target.generate(**batch, **settings, stopping_criteria=[EachHasSaid(tokens, begins)])
    assert theirs.shape[1] < begins + NEW
    with assistant.attached(), capture_traces(target, traces.append):
        ours = target.generate(
            **batch, **settings, stopping_criteria=[EachHasSaid(tokens, begins)], assistant_model=assistant.draft
        )
    assert torch.equal(ours, theirs)
    assert assistant.stats.drafted > 0
    assert [trace.completion_ids.tolist() for trace in traces] == theirs[:, begins:].tolist()
    assert assistant.stats.emitted == rows * (len(theirs[0]) - begins)
    if noise == 0.0:  # what was drafted behind the end is not counted
        assert replay(assistant.draft, traces, 4) == assistant.stats


def test_the_scores_of_a_batch_are_the_targets_own() -> None:
    assistant, batch = assistant_of("qwen3"), padded(LENGTHS[:2])
    settings = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True}
    ours, theirs = (generate(**batch, **settings) for generate in (assistant.generate, assistant.target.generate))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.allclose(torch.stack(ours.scores), torch.stack(theirs.scores), atol=1e-3)


def test_without_drafted_tokens_the_target_draws_what_it_draws_alone() -> None:
    assistant, batch, answers = assistant_of("qwen3"), padded(LENGTHS[:3]), list[torch.Tensor]()
    for generate in (functools.partial(assistant.generate, num_assistant_tokens=0), assistant.target.generate):
        torch.manual_seed(3)
        answers.append(generate(**batch, do_sample=True, max_new_tokens=9, eos_token_id=[5, 9, 17, 30]))
    assert torch.equal(*answers)


# --- sampled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [FIXED, OnlineConfig(candidates="text", update_strategy="manual")])
def test_sampled_rows_have_the_targets_distribution(config: OnlineConfig) -> None:
    target, draft = models.bigram(0), models.bigram(1)
    assistant = OnlineAssistant(target, draft, config=config)
    if assistant.drafting is not None:
        assistant.drafting.clock = BatchTime({target: (1.0, 0.01), assistant.draft: (0.4, 0.0)})
    ids = torch.tensor([[0, 1], [2, 3], [4, 4], [3, 1]])
    mask = torch.tensor([[1, 1], [0, 1], [1, 1], [0, 1]])
    table, answers = target.by_token.detach().double().softmax(-1).numpy(), list[list[int]]()
    for _ in range(4):
        output = assistant.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=50)
        answers += output[:, 1:].tolist()
    assert transitions_fit(answers, table) > 1e-3
    assert assistant.stats.text_accepted > 30 if config.candidates == "text" else 0.2 < assistant.stats.alpha < 0.95


def test_sampled_rows_that_end_early_have_the_targets_distribution() -> None:
    target, draft = stopping_pair()
    assistant = OnlineAssistant(target, draft, config=FIXED)
    ids, counts = torch.full((50, 1), 2), Counter[tuple[int, ...]]()
    for _ in range(6):
        output = assistant.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=3,
            eos_token_id=[0, 1], pad_token_id=4,
        )  # fmt: skip
        for answer in output[:, 1:].tolist():
            end = next((i for i, token in enumerate(answer) if token in (0, 1)), 2)
            counts[tuple(answer[: end + 1])] += 1
    assert fits(counts, stopped_distribution(target, 2), [lambda answer: (len(answer), answer[-1] in (0, 1))]) > 1e-3


# --- traces and learning --------------------------------------------------------------------------------------------

LEARNS = OnlineConfig(
    num_assistant_tokens=4, update_strategy="interval", update_interval=4, gate=False, learning_rate=3e-3
)


def test_a_batch_is_learned_from_as_its_rows_are_one_by_one() -> None:
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
    assistants = [OnlineAssistant(*models.pair(num_hidden_layers=1, noise=0.2), config=LEARNS) for _ in range(2)]
    for _ in range(2):
        assistants[0].generate(**padded(LENGTHS[:4]), **settings)
        for row in each(padded(LENGTHS[:4])):
            assistants[1].generate(**row, **settings)
    ours, theirs = assistants
    assert ours.version == theirs.version == 2
    assert ours.stats.num_requests == theirs.stats.num_requests == 8
    for a, b, given in zip(*(list(m.parameters()) for m in (ours.draft, theirs.draft, pair()[1])), strict=True):
        assert (a - b).abs().max() < 0.05 * (a - given).abs().max() or a.ndim == 1


def test_rows_of_several_domains_are_drafted_by_the_drafts_of_these() -> None:
    router = CallableRouter(lambda text: "even" if len(text) % 2 == 0 else "odd")
    target, draft = models.pair("qwen3", num_hidden_layers=1, noise=0.2)
    assistant = OnlineAssistant(target, draft, models.tokenizer(), LEARNS, router=router)
    batch, settings, traces = padded(LENGTHS[:4]), {"do_sample": False, "max_new_tokens": 8}, list[Trace]()
    for _ in range(3):
        answers = assistant.generate(**batch, **settings, on_trace=traces.append)
        assert divergences(target, answers, batch, settings) == []
    assert [trace.domain for trace in traces[:4]] == ["odd", "odd", "even", "even"]
    assert {domain: s.num_requests for domain, s in assistant.stats_by_domain.items()} == {"odd": 6, "even": 6}
    assert {trace.draft_version for trace in traces} != {0}
    alone = list[Trace]()
    for row in each(batch):
        assistant.generate(**row, **settings, learn=False, on_trace=alone.append)
    assistant.generate(**batch, **settings, learn=False, on_trace=alone.append)
    assert list(map(facts, alone[:4])) == list(map(facts, alone[4:]))


def test_batches_of_the_callers_own_are_captured_and_drafted() -> None:
    (target, draft), batch, traces = pair("qwen3"), padded(LENGTHS[:3]), list[Trace]()
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
    assistant = OnlineAssistant(target, draft, config=FIXED)
    with assistant.attached(domain="mine"), capture_traces(target, traces.append):
        answers = target.generate(**batch, **settings, assistant_model=assistant.draft)
    with capture_traces(target, traces.append):
        assert torch.equal(target.generate(**batch, **settings, assistant_model=draft), answers)
    assert torch.equal(target.generate(**batch, **settings), answers)
    assert assistant.stats_by_domain["mine"].num_requests == 3
    assert [len(trace) for trace in traces] == [NEW] * 6
    assert all(trace.rounds[0].num_drafted for trace in traces)


# --- how many tokens are drafted ------------------------------------------------------------------------------------


def test_a_target_in_training_mode_serves_batches_and_stays_in_it() -> None:
    target, draft = models.pair(num_hidden_layers=1, noise=0.08, attention_dropout=0.5)
    target.train()
    target.lm_head.eval()  # as layers that are frozen may be
    assistant = OnlineAssistant(target, draft, config=FIXED)
    assistant.generate(**padded(LENGTHS[:2]), do_sample=False, max_new_tokens=NEW)
    assert assistant.stats.drafted > 0
    assert [name for name, module in target.named_modules() if not module.training] == ["lm_head"]


class BatchTime:
    """A clock on which forwards alone take time: each so many seconds, and so many for each token of each row."""

    def __init__(self, seconds: dict[Any, tuple[float, float]]) -> None:
        self.now = 0.0
        for model, (base, slope) in seconds.items():
            model.register_forward_pre_hook(functools.partial(self._pass, base, slope), with_kwargs=True)

    def _pass(self, base: float, slope: float, module: Any, args: Any, kwargs: Any) -> None:
        self.now += base + slope * kwargs["input_ids"].numel()

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("rows", "slope", "most", "drafts"), [(2, 0.1, 0.7, True), (16, 1.0, 1.01, False)])
def test_batches_draft_where_that_pays_and_lose_next_to_nothing_where_it_does_not(
    rows: int, slope: float, most: float, drafts: bool
) -> None:
    target, draft = models.pair("qwen3", num_hidden_layers=1, noise=0.04)
    assistant = OnlineAssistant(target, draft, config=OnlineConfig(candidates="draft", update_strategy="manual"))
    assert assistant.drafting is not None
    clock = assistant.drafting.clock = BatchTime({target: (1.0, slope), assistant.draft: (0.1, 0.0)})
    batch = padded(tuple(itertools.islice(itertools.cycle(LENGTHS), rows)))
    settings = {"do_sample": False, "max_new_tokens": 40, "learn": False}
    for _ in range(2):
        assistant.generate(**batch, **settings)
    assistant.reset_stats()
    began = clock()
    for _ in range(3):
        answers = assistant.generate(**batch, **settings)
    ours, began = clock() - began, clock()
    assert divergences(target, answers, batch, {"do_sample": False, "max_new_tokens": 40}) == []
    alone = clock() - began
    print(f"{rows} rows: {ours / 3 / alone:.2f} of the time of the target alone, {assistant.stats}")
    assert (assistant.stats.drafted > 0) == drafts
    assert ours < most * 3 * alone


@pytest.mark.parametrize("source", ["text", "both"])
def test_past_text_is_proposed_row_by_row(source: str) -> None:
    target, draft = models.pair("qwen3", num_hidden_layers=1, noise=0.04)
    assistant = OnlineAssistant(target, draft, config=OnlineConfig(candidates=source, update_strategy="manual"))
    assert assistant.drafting is not None
    assistant.drafting.clock = BatchTime({target: (1.0, 0.01), assistant.draft: (0.4, 0.0)})
    batch, settings, traces = padded(LENGTHS[:4]), {"do_sample": False, "max_new_tokens": 24}, list[Trace]()
    settings["eos_token_id"] = ends_of(target, batch)
    for more in (*[{}] * 4, {"repetition_penalty": 1.3}):  # the last time, other answers than the past ones
        traces.clear()
        answers = assistant.generate(**batch, **settings, **more, on_trace=traces.append)
        assert divergences(target, answers, batch, settings | more) == []
        if not more:
            said = [r for trace in traces for r in trace.rounds]
    assert sum(r.text_counts[2] for r in said) > 0.5 * sum(r.num_emitted for r in said)
    for r in said:
        assert (r.drafted_ids[r.num_accepted :] == -1).all() or r.from_text is None


@pytest.mark.parametrize("length", [5, 14, 40])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_length_of_the_callers_own_takes_the_place_of_the_settings(length: int, rows: int) -> None:
    assistant, batch = assistant_of("qwen3"), padded(LENGTHS[:rows])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9}
    theirs, ours = (
        generate(**batch, **settings, stopping_criteria=[MaxLengthCriteria(length)])
        for generate in (assistant.target.generate, assistant.generate)
    )
    assert torch.equal(ours, theirs)
