"""The draft's own forward: tokens fed and taken back leave what feeding the rest alone would; compiled as eager."""

import contextvars
import copy
import functools
import logging
import random
import shutil
import threading
from typing import Any

import models
import pytest
import torch
from waiting import LONG

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.decoding.forward import (
    SMALLEST_STATIC_CACHE,
    DraftForward,
)

COMPILABLE = ("llama", "gpt2")


COMPILE = torch.compile


def traced_alone(step: Any, **kwargs: Any) -> Any:
    """`torch.compile` without its compiler: what it traces runs as it was traced."""
    return COMPILE(step, **{**kwargs, "backend": "eager"})


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", traced_alone)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would have been compiled runs as it is, which saves most of the time."""
    monkeypatch.setattr(torch, "compile", lambda step, **kwargs: step)


def by_itself(model: Any, ids: list[int], source: torch.Tensor | None = None) -> torch.Tensor:
    """The logits behind some tokens, by one forward without a cache."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        if source is not None:
            return model(input_ids=source, decoder_input_ids=tokens).logits[:, -1]
        return model(tokens).logits[:, -1]


def feed_and_crop(model: Any, forward: DraftForward, source: torch.Tensor | None = None) -> None:
    """Rounds as a generator makes them, each forward compared with one without a cache."""
    rolls = random.Random(0)
    known = [1, *(rolls.randrange(3, models.VOCAB) for _ in range(5))]
    fed = kept = 0
    for _ in range(12):
        for _ in range(rolls.randrange(1, 6)):
            logits = forward.feed(torch.tensor([known[fed:]]))
            torch.testing.assert_close(logits, by_itself(model, known, source), atol=1e-10, rtol=0)
            fed = len(known)
            known.append(rolls.randrange(3, models.VOCAB))
        # Of this round's tokens, some are taken back, and one that was not fed stands in their place.
        kept = max(fed - rolls.randrange(0, 4), kept)
        known = [*known[:kept], rolls.randrange(3, models.VOCAB)]
        if kept == fed and rolls.random() < 0.5:
            known.append(rolls.randrange(3, models.VOCAB))  # accepted to the end, and one more
        forward.crop(kept)
        fed = kept
        assert forward.length == kept
    assert len(known) > 2 * models.WINDOW


# --- eager ----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_what_is_taken_back_leaves_no_trace(architecture: str) -> None:
    model = models.double(models.build(architecture))
    if not model.config.is_encoder_decoder:
        feed_and_crop(model, DraftForward(model))
        return
    ids = models.prompt(7)
    mask = torch.ones_like(ids)
    source = {"encoder_outputs": model.get_encoder()(input_ids=ids, attention_mask=mask), "attention_mask": mask}
    feed_and_crop(model, DraftForward(model, source), ids)


# --- compiled -------------------------------------------------------------------------------------------------------


def assistant_of(target: Any, draft: Any, **settings: Any) -> OnlineAssistant:
    return models.assistant_of(target, draft, **{"compile_draft": True, **settings})


def answer(assistant: OnlineAssistant, ids: torch.Tensor, length: int = 20, **settings: Any) -> list[int]:
    output: list[int] = assistant.generate(ids, **models.greedy(ids, max_new_tokens=length, **settings))[0].tolist()
    return output


Requests = list[tuple[torch.Tensor, dict[str, Any]]]


def served(assistant: OnlineAssistant, requests: Requests) -> list[list[int]]:
    answers = []
    for number, (ids, settings) in enumerate(requests):
        torch.manual_seed(number)
        answers.append(answer(assistant, ids, **settings))
    return answers


def same_as_eager(target: Any, draft: Any, requests: Requests, eagerly: Any = None) -> OnlineAssistant:
    """A compiled draft's assistant, which answers and counts as the eager one does. `eagerly` are the answers and
    statistics of that one, where they are known."""
    if eagerly is None:
        eager = assistant_of(target, draft, compile_draft=False)
        eagerly = served(eager, requests), eager.stats
    answers, theirs = eagerly
    compiled = assistant_of(target, draft)
    assert served(compiled, requests) == answers
    ours = compiled.stats
    assert (ours.drafted, ours.examined, ours.accepted) == (theirs.drafted, theirs.examined, theirs.accepted)
    assert ours.accepted_length_histogram == theirs.accepted_length_histogram
    assert 0 < ours.alpha < 1
    return compiled


def some_requests() -> Requests:
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), models.prompt(5)], dim=1)
    return [
        (models.prompt(3), {}),
        (padded, {"attention_mask": (torch.arange(9) >= 4).long()[None]}),
        (models.prompt(), {"do_sample": True, "top_k": 20}),
        (models.prompt(), {"eos_token_id": list(range(3, 12))}),
    ]


@functools.cache
def served_eagerly(architecture: str) -> Any:
    """A pair, some requests, and how the eager draft serves them."""
    target, draft = models.pair(architecture, noise=0.06)
    eager, requests = assistant_of(target, draft, compile_draft=False), some_requests()
    return target, draft, requests, (served(eager, requests), eager.stats)


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_compiled_drafts_are_the_eager_ones(architecture: str, traced: None, caplog: pytest.LogCaptureFixture) -> None:
    same_as_eager(*served_eagerly(architecture))
    assert "not compiled" not in caplog.text


def test_an_update_reaches_what_is_compiled(traced: None) -> None:
    target, draft = models.pair(noise=0.3, num_hidden_layers=1)
    ways = []
    for compile_draft in (True, False):
        assistant = assistant_of(
            target, draft, compile_draft=compile_draft, optimizer="adamw", learning_rate=1e-2, weight_average=0.0
        )
        answers = [answer(assistant, ids) for ids in models.prompts(2)]
        before = assistant.stats
        assistant.update()
        assistant.reset_stats()
        answers += [answer(assistant, ids) for ids in models.prompts(2)]
        assert assistant.version == 1
        assert assistant.stats.alpha > before.alpha + 0.1
        ways.append((answers, before, assistant.stats))
    (ours, *compiled), (theirs, *eager) = ways
    assert ours == theirs
    for one, other in zip(compiled, eager, strict=True):
        assert one.accepted_length_histogram == other.accepted_length_histogram


def served_together(assistant: OnlineAssistant, prompts: list[torch.Tensor]) -> list[list[int]]:
    barrier = threading.Barrier(len(prompts), timeout=LONG)  # behind the prompt: both are in their rounds together
    answers: dict[int, list[int]] = {}

    def serve(number: int) -> None:
        streamer = models.Streamer(lambda count: barrier.wait() if count == 2 else None)
        answers[number] = answer(assistant, prompts[number], streamer=streamer)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(serve, number)) for number in range(len(prompts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(len(prompts))]


def test_requests_of_two_threads_do_not_meet(untraced: None) -> None:
    target = models.build(num_hidden_layers=1)
    assistant = assistant_of(target, copy.deepcopy(target))
    prompts = models.prompts(2)
    alone = [answer(assistant, ids) for ids in prompts]
    assert served_together(assistant, prompts) == alone
    assert assistant.stats.alpha == 1.0


# --- where nothing can be compiled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["at once", "at the first call"])
def test_without_a_compiler_the_draft_runs_eagerly(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C++ compiler.\nSee the log.")

    monkeypatch.setattr(torch, "compile", fail if where == "at once" else lambda *args, **kwargs: fail)
    caplog.set_level(logging.WARNING)
    same_as_eager(*served_eagerly("llama"))
    assert caplog.text.count("runs eagerly") == 1
    assert "RuntimeError: no C++ compiler" in caplog.text


@pytest.mark.parametrize("architecture", ["mistral", "gemma3", "t5", "bart"])
def test_what_static_caches_cannot_serve_runs_eagerly(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    target, draft = models.pair(architecture, noise=0.08)
    same_as_eager(target, draft, [(ids, {}) for ids in models.prompts(3)])
    assert caplog.text.count("runs eagerly") == 1
    assert ("sliding windows" in caplog.text) != draft.config.is_encoder_decoder


# --- with the compiler ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # the compiler itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler: install g++")
def test_drafts_by_a_real_compiler_are_the_eager_ones(caplog: pytest.LogCaptureFixture) -> None:
    target, draft = models.pair(noise=0.1, max_position_embeddings=1024)
    long = (models.prompt(), {"length": SMALLEST_STATIC_CACHE + 20})
    compiled = same_as_eager(target, draft, [*some_requests(), long])
    other = assistant_of(target, copy.deepcopy(target))
    prompts = models.prompts(2)
    alone = [answer(other, ids) for ids in prompts]
    assert served_together(other, prompts) == alone
    assert other.stats.alpha == 1.0
    compiled.reset_stats()
    before = [answer(compiled, ids) for ids in prompts]
    earlier = compiled.stats.alpha
    with torch.no_grad():
        for ours, theirs in zip(compiled.draft.parameters(), target.parameters(), strict=True):
            ours.copy_(theirs)
    compiled.reset_stats()
    assert [answer(compiled, ids) for ids in prompts] == before == alone
    assert earlier < 1.0 == compiled.stats.alpha
    assert "not compiled" not in caplog.text


def test_another_dtype_is_compiled_anew_and_autocast_runs_eagerly(untraced: None) -> None:
    target, draft = models.pair(num_hidden_layers=1)
    assistant = OnlineAssistant(target, draft, config=OnlineConfig(num_assistant_tokens=5, compile_draft=True))
    ids = models.prompt()
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12, "learn": False}
    alone = assistant.generate(ids, **settings).tolist()
    with torch.autocast("cpu", torch.bfloat16):
        assert assistant.generate(ids, **settings).shape[1] == len(alone[0])
    assistant.draft.to(torch.bfloat16)
    assert assistant.generate(ids, **settings).tolist() == alone
    assistant.draft.to(torch.float32)
    assert assistant.generate(ids, **settings).tolist() == alone


# --- sequences that grow --------------------------------------------------------------------------------------------


def test_a_sequence_moves_to_larger_caches_and_then_to_a_dynamic_one(
    untraced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, tokens in {"SMALLEST_STATIC_CACHE": 16, "LARGEST_STATIC_CACHE": 32, "AHEAD": 4}.items():
        monkeypatch.setattr(f"osd_hf.decoding.forward.{name}", tokens)
    target, draft = map(models.double, models.pair(noise=0.1, num_hidden_layers=1))
    same_as_eager(target, draft, [(models.prompt(start), {"length": 40}) for start in (6, 14, 30, 31, 40)])
