"""What the caller has set in its thread or process changes neither answers, nor traces, nor what is learned."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from models import weights
from peft import LoraConfig

from osd_hf import OnlineAssistant, OnlineConfig, Trace, capture_traces, replay

Context = Callable[[], AbstractContextManager[Any]]

CONFIG = OnlineConfig(
    num_assistant_tokens=4, update_strategy="manual", update_interval=2, steps_per_update=2, batch_size=4,
    learning_rate=1e-3, num_logprobs=16, gate=False,
)  # fmt: skip
PROMPTS = [(ids, torch.ones_like(ids)) for ids in models.prompts(3)]
BATCH = models.prompt(5, seed=7).repeat(2, 1)
NEW = 6


@contextlib.contextmanager
def set_by(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


HALF: dict[str, Context] = {
    "autocast-bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast-fp16": lambda: torch.autocast("cpu", torch.float16),
}
EXACT: dict[str, Context] = {
    "inference-mode": torch.inference_mode,
    "no-grad": torch.no_grad,
    "dtype-float64": lambda: set_by(torch.set_default_dtype, torch.float64, torch.float32),
    "dtype-bfloat16": lambda: set_by(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "device-meta": lambda: torch.device("meta"),
    "default-device-meta": lambda: set_by(torch.set_default_device, "meta", None),
    "deterministic": lambda: set_by(torch.use_deterministic_algorithms, True, False),
}
CONTEXTS = {**HALF, **EXACT}


def cases(arguments: str, *named: str) -> Any:
    """Parametrize a test by cases, each of which names the value of every argument; the last one is the context."""
    values = [[*case.split()[:-1], CONTEXTS[case.split()[-1]]] for case in named]
    return pytest.mark.parametrize(arguments.split(), values, ids=[case.replace(" ", "-") for case in named])


@functools.cache
def pair() -> tuple[Any, Any]:
    """A target and a draft, which nobody changes."""
    return models.pair(num_hidden_layers=1)


@functools.cache
def tokenizer() -> Any:
    made = models.tokenizer()
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


def alone(**settings: Any) -> list[Any]:
    """The target's answers to each prompt."""
    target, _ = pair()
    return [
        target.generate(ids, attention_mask=mask, max_new_tokens=NEW, **settings).tolist() for ids, mask in PROMPTS
    ]


ENTRIES = ("generate", "attached", "capture", "batch", "chat")


def asked(entry: str, on_trace: Callable[[Trace], object], **settings: Any) -> list[Any]:
    """The answers to requests on this way."""
    assistant, (target, draft) = OnlineAssistant(*pair(), tokenizer(), CONFIG), pair()
    how = {"max_new_tokens": NEW, "on_trace": on_trace, **settings}
    if entry == "generate":
        return [assistant.generate(ids, attention_mask=mask, **how).tolist() for ids, mask in PROMPTS]
    if entry == "batch":
        return assistant.generate(BATCH, attention_mask=torch.ones_like(BATCH), **how).tolist()  # type: ignore[no-any-return]
    if entry == "chat":
        return [assistant.chat(text, **how) for text in ("abc", "hello")]
    attaches = entry == "attached"
    with (
        assistant.attached() if attaches else contextlib.nullcontext(),
        capture_traces(target, on_trace, num_logprobs=16),
    ):
        return alone(assistant_model=assistant.draft if attaches else draft, **settings)


@functools.cache
def outside(entry: str) -> tuple[list[Any], list[Trace]]:
    """The answers and traces of requests in no context."""
    traces: list[Trace] = []
    return asked(entry, traces.append, do_sample=False), traces


def same_traces(ours: list[Trace], theirs: list[Trace]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.target == other.target
        for name in ("completion_ids", "top_logits", "top_ids", "tail_logprob"):
            assert getattr(one, name).dtype == getattr(other, name).dtype
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


def nothing_failed(caplog: pytest.LogCaptureFixture) -> None:
    own = [record for record in caplog.records if record.name.startswith("osd_hf")]
    assert [record.getMessage() for record in own if record.levelno >= logging.WARNING] == []


@cases(
    "entry context",
    *(f"generate {name}" for name in EXACT),
    *(f"{entry} device-meta" for entry in ENTRIES if entry != "generate"),
)
def test_answers_and_traces_are_those_outside_the_context(
    entry: str, context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    traces, (expected, before) = list[Trace](), outside(entry)
    with context():
        answers = asked(entry, traces.append, do_sample=False)
    assert answers == expected
    if entry == "generate":
        assert answers == alone(do_sample=False)
    same_traces(traces, before)
    nothing_failed(caplog)


@cases("context", *HALF)
def test_half_precision_rows_are_the_targets_own(context: Context) -> None:
    target, traces = pair()[0], list[Trace]()
    with context():
        asked("generate", traces.append, do_sample=False)
        for (ids, mask), trace in zip(PROMPTS, traces, strict=True):
            own = target.generate(
                ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            assert own.sequences[0, ids.shape[1] :].tolist() == trace.completion_ids.tolist()
            rows = torch.cat(own.logits).float()
            kept = rows.gather(1, torch.from_numpy(trace.top_ids.astype(np.int64)))
            # A forward over several tokens may round otherwise than one over a single token, in half precision too.
            np.testing.assert_allclose(trace.top_logits, kept - rows.amax(-1, keepdim=True), atol=0.02)


@cases(
    "entry context",
    "generate device-meta",
    "capture default-device-meta",
    "batch device-meta",
    "generate dtype-float64",
)
def test_sampled_answers_are_those_outside_the_context(entry: str, context: Context) -> None:
    found = []
    for around in (contextlib.nullcontext, context):
        traces: list[Trace] = []
        with around():
            torch.manual_seed(3)
            found.append((asked(entry, traces.append, do_sample=True, top_k=0), traces))
    (expected, before), (answers, after) = found
    assert answers == expected
    same_traces(after, before)


def same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def adapters(lora: bool) -> LoraConfig | None:
    return LoraConfig(r=2, target_modules="all-linear") if lora else None


def served(
    config: OnlineConfig, *, lora: bool = False, around: Context = contextlib.nullcontext
) -> dict[str, torch.Tensor]:
    """The weights that serve after some requests to an assistant that is made here."""
    assistant = OnlineAssistant(*pair(), tokenizer(), config, peft_config=adapters(lora))
    for ids, mask in PROMPTS:
        assistant.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        assistant.wait_until_idle()
    if config.update_strategy == "manual":
        with around():
            assistant.update()
    assistant.close()
    assert assistant.version > 0
    return weights(assistant.draft)


@functools.cache
def served_outside(strategy: str, lora: bool) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT
        return served(of(strategy), lora=lora)


def of(strategy: str) -> OnlineConfig:
    return OnlineConfig(**{**CONFIG.to_dict(), "update_strategy": strategy})


@cases(
    "strategy kind context",
    "interval lora dtype-float64", "interval lora dtype-bfloat16", "interval lora device-meta",
    "interval whole inference-mode", "interval whole device-meta",
    "manual lora device-meta", "spread lora device-meta", "idle lora device-meta",
)  # fmt: skip
def test_updates_are_those_outside_the_context(strategy: str, kind: str, context: Context) -> None:
    expected = served_outside(strategy, kind == "lora")
    with context():
        found = served(of(strategy), lora=kind == "lora")
    same_weights(found, expected)


@cases("kind context", "whole autocast-bf16", "lora autocast-fp16")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_what_is_learned_from_a_request_is_the_same_under_autocast(kind: str, context: Context) -> None:
    lora = kind == "lora"
    same_weights(served(of("manual"), lora=lora, around=context), served_outside("manual", lora))


def test_a_new_version_serves_at_once_under_autocast() -> None:
    assistant = OnlineAssistant(*pair(), tokenizer(), CONFIG)
    with torch.autocast("cpu", torch.float16):  # which keeps casts of the weights that it has met
        for ids, mask in PROMPTS * 2:
            assistant.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
            assistant.draft(ids)
            assistant.update()
        found, expected = (draft(PROMPTS[0][0]).logits for draft in (assistant.draft, copy.deepcopy(assistant.draft)))
    assert torch.equal(found, expected)


def test_a_session_that_is_loaded_in_inference_mode_learns_on(tmp_path: Path) -> None:
    found = []
    for mode in (contextlib.nullcontext, torch.inference_mode):
        saved, loaded = (OnlineAssistant(*pair(), tokenizer(), CONFIG) for _ in range(2))
        for ids, mask in PROMPTS:
            saved.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        saved.update()
        saved.save_state(tmp_path)
        with mode():
            loaded.load_state(tmp_path)
            loaded.update()
        found.append(weights(loaded.draft))
    same_weights(*found)


@functools.cache
def sampled() -> list[Trace]:
    traces: list[Trace] = []
    torch.manual_seed(5)
    asked("generate", traces.append, do_sample=True, repetition_penalty=1.2)
    return traces


@cases("context", "autocast-bf16", "autocast-fp16", "device-meta", "dtype-bfloat16")
def test_replay_counts_the_same_in_the_context(context: Context) -> None:
    traces = [*outside("generate")[1], *sampled()]
    expected = replay(pair()[1], traces)
    fresh = [copy.copy(trace) for trace in traces]  # of which nothing is known
    with context():
        assert replay(pair()[1], fresh) == expected
