import contextvars
import copy
import gc
import inspect
import io
import itertools
import pickle
import threading
import warnings
import weakref
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, pipeline

from osd_hf import CorrectionStore, OnlineAssistant, OnlineConfig, capture_traces
from osd_hf.acceptance import AcceptanceStats
from osd_hf.decoding.draft_length import AutoPace
from osd_hf.decoding.request import Request, compress_rows
from osd_hf.errors import CaptureError, UnsupportedGenerationError, UnsupportedModelError
from osd_hf.models import unwrap
from osd_hf.trace import Trace

LOOP = "_assisted_decoding"  # what is listened to


def captured(
    target: Any, draft: Any, ids: torch.Tensor, *, num_logprobs: int | None = 64, **kwargs: Any
) -> tuple[Any, Trace]:
    """One assisted request under capture: what `generate` returned, and its trace."""
    traces: list[Trace] = []
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20, **kwargs}
    with capture_traces(target, traces.append, num_logprobs=num_logprobs):
        output = target.generate(ids, assistant_model=draft, **kwargs)
    assert len(traces) == 1
    return output, traces[0]


def stats(trace: Trace) -> AcceptanceStats:
    return AcceptanceStats.from_trace(trace)


def plain_rows(target: Any, trace: Trace) -> torch.Tensor:
    """The target's logits at the emitted positions, by a forward of their own."""
    completion = torch.from_numpy(trace.completion_ids.astype(np.int64))[None]
    start = torch.from_numpy(
        (trace.decoder_prompt_ids if trace.is_encoder_decoder else trace.prompt_ids).astype(np.int64)
    )
    ids = torch.cat([start[None], completion], dim=1)
    with torch.no_grad():
        if trace.is_encoder_decoder:
            source = torch.from_numpy(trace.prompt_ids.astype(np.int64))[None]
            logits = target(input_ids=source, decoder_input_ids=ids).logits
        else:
            logits = target(input_ids=ids).logits
    return logits[0, len(start) - 1 : -1]


def total_variation(trace: Trace, logits: torch.Tensor) -> float:
    """Largest distance of a stored row to a plain one: over the kept entries and, as one more outcome, the tail."""
    plain = logits.double().softmax(-1)
    kept = torch.from_numpy(np.exp(trace.kept_logprobs().astype(np.float64)))
    if trace.top_ids.shape[1] == 0:
        return float(0.5 * (kept - plain).abs().sum(-1).max())
    theirs = plain.gather(-1, torch.from_numpy(trace.top_ids.astype(np.int64)))
    tail = torch.from_numpy(np.exp(trace.tail_logprob.astype(np.float64)))
    return float(0.5 * ((kept - theirs).abs().sum(-1) + (tail - (1 - theirs.sum(-1))).abs()).max())


# --- counts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_the_target_as_its_own_draft_is_always_accepted(architecture: str) -> None:
    target = models.build(architecture)
    draft = models.fixed_k(copy.deepcopy(target))
    for ids in models.prompts(2):
        answer, trace = captured(target, draft, ids)
        assert len(trace) == 20
        assert stats(trace).alpha == 1.0
        assert stats(trace).target_forwards == 4  # 6 + 6 + 6, and the last draft is cut to one token
        eos = int(trace.completion_ids[12])
        first = trace.completion_ids.tolist().index(eos)
        _, trace = captured(target, draft, ids, eos_token_id=eos)
        assert trace.completion_ids.tolist() == answer[0, -20:].tolist()[: first + 1]
        if first:
            assert stats(trace).alpha == 1.0


def through(assistant: OnlineAssistant, ids: torch.Tensor, **kwargs: Any) -> tuple[Any, Trace]:
    """The same where an assistant drafts."""
    traces: list[Trace] = []
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20, **kwargs}
    with capture_traces(assistant.target, traces.append):
        output = assistant.generate(ids, **kwargs)
    assert len(traces) == 1
    return output, traces[0]


def plain_assistant(architecture: str, monkeypatch: pytest.MonkeyPatch) -> OnlineAssistant:
    """One that leaves every request to its target, as where speculation loses."""
    monkeypatch.setattr(AutoPace, "is_plain", lambda self: True)
    config = OnlineConfig(update_strategy="manual", num_assistant_tokens="auto", candidates="draft")
    return OnlineAssistant(*models.pair(architecture, **models.SHALLOW[architecture]), config=config)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "t5"])
def test_requests_that_the_target_decodes_alone_are_captured(
    architecture: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assistant = plain_assistant(architecture, monkeypatch)
    ids = models.prompt()
    requests: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (ids, {"repetition_penalty": 1.4}),
        (ids, {"eos_token_id": list(range(3, 12))}),
        (ids, {"max_new_tokens": 1}),
        (ids, {"return_dict_in_generate": True, "output_logits": True}),
    ]
    if not assistant.target.config.is_encoder_decoder:
        padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
        requests.append((padded, {"attention_mask": (torch.arange(10) >= 4).long()[None]}))
    with models.ForwardCounter(assistant.draft) as forwards:
        for prompt, settings in requests:
            output, trace = through(assistant, prompt, do_sample=do_sample, **{"max_new_tokens": 10, **settings})
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            assert trace.completion_ids.tolist() == sequences[0, -len(trace) :].tolist()
            rounds = [(len(r.drafted_ids), r.num_accepted, r.num_emitted) for r in trace.rounds]
            assert rounds == [(0, 0, 1)] * len(trace)
            assert trace.sampling.get("do_sample", False) == do_sample
            assert trace.prompt_ids.tolist() == ids[0].tolist()
            assert total_variation(trace, plain_rows(assistant.target, trace)) < 1e-3  # raw, before any processor
    assert forwards.count == 0


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_cache_of_an_earlier_turn_is_used_where_the_target_decodes_alone(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assistant = plain_assistant(architecture, monkeypatch)
    target = assistant.target
    settings: dict[str, Any] = {"return_dict_in_generate": True}
    first, _ = through(assistant, models.prompt(), **settings)
    more = torch.cat([first.sequences, models.prompt(4, seed=9)], dim=1)
    again, trace = through(assistant, more, past_key_values=first.past_key_values, **settings)
    own = target.generate(more, attention_mask=torch.ones_like(more), do_sample=False, max_new_tokens=20)
    assert torch.equal(again.sequences, own)
    assert trace.prompt_ids.tolist() == more[0].tolist()
    assert total_variation(trace, plain_rows(target, trace)) < 1e-3


def test_a_draft_that_is_never_right_is_never_accepted() -> None:
    right = [3 + i % 7 for i in range(20)]
    target = models.scripted(right, 4)
    draft = models.scripted([token + 1 for token in right], 4)
    for eos in (None, right[9]):
        _, trace = captured(target, draft, models.prompt(4, vocab_size=16), eos_token_id=eos)
        assert stats(trace).alpha == 0.0
        assert stats(trace).examined > 0
        assert all(r.num_emitted == 1 for r in trace.rounds)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_scripted_draft_gives_the_scripted_counts(sampled: bool) -> None:
    #        round 1: 2 right,  |round 2: 5 right, bonus |r3: 0 |round 4: 3 right, then cut by max_new_tokens
    pattern = [1, 1, 0] + [1, 1, 1, 1, 1, 1] + [0] + [1, 1, 1, 1]
    right = [3 + i % 7 for i in range(len(pattern))]
    target = models.scripted(right, 4)
    draft = models.scripted([t if ok else t + 1 for t, ok in zip(right, pattern, strict=True)], 4)
    for model in (target, draft):  # certain enough that sampling draws nothing else
        with torch.no_grad():
            model.by_position.mul_(10)
    settings = {"max_new_tokens": len(pattern), "do_sample": sampled, "top_k": 0}
    output, trace = captured(target, draft, models.prompt(4, vocab_size=16), **settings)
    assert output[0, 4:].tolist() == right == trace.completion_ids.tolist()
    counts = stats(trace)
    assert counts.accepted_length_histogram == {0: 1, 2: 1, 3: 1, 5: 1}
    assert (counts.drafted, counts.examined, counts.accepted) == (5 + 5 + 4 + 3, 3 + 5 + 1 + 3, 10)
    assert (counts.emitted, counts.target_forwards) == (14, 4)
    assert np.flatnonzero(trace.correction_mask).tolist() == [2, 9]
    if sampled:
        for r in trace.rounds:
            accepted = np.arange(r.num_examined) < r.num_accepted
            np.testing.assert_allclose(r.p, accepted.astype(float), atol=1e-6)
            np.testing.assert_allclose(r.q, 1.0, atol=1e-6)


def test_a_correction_at_eos_is_no_acceptance() -> None:
    right = [3, 4, 5, 2]
    target, draft = models.scripted(right, 4), models.scripted([3, 4, 5, 6, 7], 4)
    _, trace = captured(target, draft, models.prompt(4, vocab_size=16), eos_token_id=2)
    assert trace.completion_ids.tolist() == right
    assert stats(trace).accepted_length_histogram == {3: 1}
    assert stats(trace).examined == 4
    assert trace.correction_mask.tolist() == [False, False, False, True]


# --- stored rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "num_logprobs"),
    [*((architecture, 64) for architecture in models.ARCHITECTURES), ("llama", None), ("t5", None)],
)
def test_stored_rows_are_the_targets(architecture: str, num_logprobs: int | None, tmp_path: Path) -> None:
    target, draft = models.pair(architecture, noise=0.12, vocab_size=100, **models.SHALLOW[architecture])
    store = CorrectionStore(tmp_path)
    worst = 0.0
    for ids in models.prompts(2):
        _, trace = captured(target, draft, ids, num_logprobs=num_logprobs, repetition_penalty=1.3, max_new_tokens=12)
        store.append(trace)
        worst = max(worst, total_variation(trace, plain_rows(target, trace)))
    store.flush()
    for trace in CorrectionStore(tmp_path):
        worst = max(worst, total_variation(trace, plain_rows(target, trace)))
    print(f"{architecture}, K={num_logprobs}: total variation at most {worst:.1e}")
    assert worst <= 1e-3


@pytest.mark.parametrize("num_logprobs", [64, None])
@pytest.mark.parametrize("sharpness", [1e-3, 0.1, 1.0, 5.0])
def test_rows_over_4096_tokens_are_stored_exactly_enough(num_logprobs: int | None, sharpness: float) -> None:
    logits = sharpness * torch.randn(50, 4096, generator=torch.Generator().manual_seed(0)) + 3
    top_logits, top_ids, tail = compress_rows(logits, num_logprobs)
    trace = Trace(
        prompt_ids=np.zeros(1, np.int32),
        completion_ids=np.zeros(50, np.int32),
        rounds=(),
        top_logits=top_logits.numpy(),
        top_ids=np.zeros((50, 0), np.uint16) if top_ids is None else top_ids.numpy().astype(np.uint16),
        tail_logprob=tail.numpy(),
        vocab_size=4096,
    )
    worst = total_variation(trace, logits)
    print(f"K={num_logprobs}, sharpness {sharpness}: total variation at most {worst:.1e}")
    assert worst <= 1e-3


def test_rows_of_no_entries_are_kept_where_none_are_asked_for() -> None:
    target, draft = models.pair()
    _, trace = captured(target, draft, models.prompt(), num_logprobs=1)
    assert trace.top_logits.shape == (20, 1)
    np.testing.assert_array_equal(trace.top_ids[:, 0], trace.completion_ids)


# --- every stock assisted generate ----------------------------------------------------------------------------------


class Penalize(LogitsProcessor):  # type: ignore[misc]
    """A caller's own processor, without state."""

    is_stateless = True

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.token] -= 5.0  # in place, as some do
        return scores


class Listener:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eos": {"eos_token_id": list(range(3, 12))},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "several processors": {"repetition_penalty": 1.5, "min_new_tokens": 4, "bad_words_ids": [[7]], "eos_token_id": 9},
    "own processor": {"logits_processor": LogitsProcessorList([Penalize(5)])},
    "sequence_bias": {"sequence_bias": {(5,): -4.0, (6, 7): 2.0}},
}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [*itertools.product(["llama", "t5"], SETTINGS), ("mistral", "plain"), ("mistral", "several processors")],
)
def test_capture_does_not_change_greedy_output(architecture: str, name: str) -> None:
    target, draft = models.pair(architecture, noise=0.1, **models.SHALLOW[architecture])
    ids = models.prompt(5)
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, **SETTINGS[name]}
    alone = target.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    output, trace = captured(target, draft, ids, **settings)
    assert torch.equal(output, alone)
    assert trace.completion_ids.tolist() == output[0, -len(trace) :].tolist()
    assert total_variation(trace, plain_rows(target, trace)) < 1e-3  # raw rows, before any processor


def test_capture_does_not_change_sampled_output() -> None:
    target, draft = models.pair()
    ids = models.prompt()
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": True, "max_new_tokens": 20, "top_k": 10}
    torch.manual_seed(3)
    alone = target.generate(ids, assistant_model=draft, **kwargs)
    torch.manual_seed(3)
    output, trace = captured(target, draft, ids, **kwargs)
    assert torch.equal(output, alone)
    assert trace.is_sampled
    assert trace.sampling["top_k"] == 10
    for r in trace.rounds[:-1]:
        assert r.p is not None and r.q is not None
        assert len(r.p) == len(r.q) == r.num_examined
        assert ((r.q > 0) & (r.q <= 1) & (r.p >= 0) & (r.p <= 1)).all()


def test_probabilities_of_drafted_tokens_are_the_processed_ones() -> None:
    target, draft = models.pair()
    ids = models.prompt()
    _, trace = captured(target, draft, ids, do_sample=True, temperature=1.7, top_k=5, num_logprobs=None)
    rows = [plain_rows(model, trace) / 1.7 for model in (target, draft)]
    start = 0
    for r in trace.rounds:
        for mine, logits in ((r.p, rows[0]), (r.q, rows[1])):
            for i in range(r.num_examined):
                row = logits[start + i]
                kept = torch.where(row >= row.topk(5).values[-1], row, -torch.inf).softmax(-1)
                assert mine is not None
                assert mine[i] == pytest.approx(float(kept[int(r.drafted_ids[i])]), abs=1e-4)
        start += r.num_emitted


def test_streamers_see_the_same_tokens() -> None:
    target, draft = models.pair()
    ids = models.prompt()
    listener = Listener()
    output, _ = captured(target, draft, ids, streamer=listener)
    assert listener.ids == output[0].tolist()
    assert listener.ended


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("architecture", ["llama", "bart"])
def test_scores_and_logits_are_returned_as_without_capture(architecture: str, penalty: float) -> None:
    target, draft = map(models.double, models.pair(architecture))
    ids = models.prompt()
    settings = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 12,
        "do_sample": False,
        "repetition_penalty": penalty,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    alone = target.generate(ids, **settings)
    output, trace = captured(target, draft, ids, **settings)
    assert type(output) is type(alone)
    assert torch.equal(output.sequences, alone.sequences)
    assert len(output.scores) == len(output.logits) == len(trace) == 12
    for name in ("scores", "logits"):
        ours, theirs = (torch.cat(getattr(each, name)) for each in (output, alone))
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=models.rounding(2))


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("architecture", models.DECODER_ONLY)
def test_caches_are_reused_across_turns(architecture: str, padding: int) -> None:
    target, draft = models.pair(architecture)
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), models.prompt()], dim=1)
    mask = (torch.arange(60) >= padding).long()[None]
    settings = {"return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 10}
    first, _ = captured(target, draft, ids, attention_mask=mask[:, : ids.shape[1]], **settings)
    more = torch.cat([first.sequences, models.prompt(4, seed=9)], dim=1)
    settings |= {"max_new_tokens": 12, "attention_mask": mask[:, : more.shape[1]]}
    alone = target.generate(more, **settings)
    again, trace = captured(target, draft, more, past_key_values=first.past_key_values, **settings)
    assert torch.equal(again.sequences, alone.sequences)
    assert trace.prompt_ids.tolist() == more[0, padding:].tolist()
    assert total_variation(trace, plain_rows(target, trace)) < 1e-3


@pytest.mark.parametrize("architecture", models.DECODER_ONLY)
def test_left_padding_is_not_in_the_trace(architecture: str) -> None:
    target, draft = models.pair(architecture, noise=0.05)
    ids = models.prompt(5)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(9) >= 4).long()[None]
    alone = target.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=20)
    output, trace = captured(target, draft, padded, attention_mask=mask)
    assert torch.equal(output, alone)
    assert trace.prompt_ids.tolist() == ids[0].tolist()
    assert total_variation(trace, plain_rows(target, trace)) < 1e-3


def test_padding_of_an_encoders_input_is_not_in_the_trace() -> None:
    target, draft = models.pair("t5")
    ids = models.prompt(5)
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    mask = (torch.arange(9) < 5).long()[None]
    _, trace = captured(target, draft, padded, attention_mask=mask)
    assert trace.prompt_ids.tolist() == ids[0].tolist()
    assert trace.decoder_prompt_ids is not None
    assert trace.decoder_prompt_ids.tolist() == [0]
    assert total_variation(trace, plain_rows(target, trace)) < 1e-3


def test_pad_tokens_inside_the_context_do_not_hide_it_from_the_draft() -> None:
    # `generate` drops a mask of ones; the draft's own `generate` would infer another from the pad tokens.
    target = models.build("qwen3")
    draft = models.fixed_k(copy.deepcopy(target))
    ids = models.prompt(8)
    ids[0, 3] = 0
    _, trace = captured(target, draft, ids)
    assert stats(trace).alpha == 1.0


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_peft_targets_and_drafts_are_captured() -> None:
    from peft import LoraConfig, get_peft_model

    target, draft = models.pair()
    alone = target.generate(
        models.prompt(), attention_mask=torch.ones(1, 6).long(), do_sample=False, max_new_tokens=20
    )
    lora = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "r": 2}
    wrapped, small = get_peft_model(target, LoraConfig(**lora)), get_peft_model(draft, LoraConfig(**lora))
    models.fixed_k(small)
    for pair in ((wrapped, small), (wrapped, draft), (unwrap(wrapped), small)):
        cls = type(unwrap(pair[0]))
        output, trace = captured(*pair, models.prompt())
        assert torch.equal(output, alone)
        assert 0 < stats(trace).alpha < 1
        assert type(unwrap(pair[0])) is cls


def test_a_pipelines_requests_are_captured() -> None:
    target, draft = models.pair()
    tokenizer = models.tokenizer()
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft, device="cpu")
    traces: list[Trace] = []
    with capture_traces(target, traces.append):
        answer = pipe("cde", max_new_tokens=10, do_sample=False)
    assert len(traces) == 1
    assert traces[0].prompt_ids.tolist() == [5, 6, 7]
    assert tokenizer.decode(traces[0].completion_ids) in answer[0]["generated_text"]


class Compiled:
    """What `torch.compile` returns: it hides the model as `_orig_mod` and passes the rest on."""

    def __init__(self, model: Any) -> None:
        self._orig_mod = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._orig_mod, name)


def test_a_compiled_target_is_unwrapped() -> None:
    target, draft = models.pair()
    assert unwrap(Compiled(target)) is target
    output, trace = captured(Compiled(target), draft, models.prompt())
    assert trace.completion_ids.tolist() == output[0, 6:].tolist()


# --- the model is as before -----------------------------------------------------------------------------------------


def test_the_model_is_as_before() -> None:
    target, draft = models.pair()
    cls, config = type(target), target.generation_config.to_dict()
    names, own, loop = (cls.__name__, cls.__module__, cls.__qualname__), dict(vars(cls)), vars(GenerationMixin)[LOOP]
    traces: list[Trace] = []
    with capture_traces(target, traces.append):
        assert type(target) is target.__class__ is cls
        assert (type(target).__name__, type(target).__module__, type(target).__qualname__) == names
        assert inspect.signature(cls._assisted_decoding) == inspect.signature(loop)
        with capture_traces(target, print):
            pass
        captured_still = target.generate(models.prompt(), assistant_model=draft, max_new_tokens=4)
    assert [len(t) for t in traces] == [captured_still.shape[1] - 6] == [4]
    assert type(target) is cls
    assert pickle.loads(pickle.dumps(target)).config.vocab_size == models.VOCAB
    for trigger in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(trigger), capture_traces(target, print):
            raise trigger
        assert type(target) is cls

    def fail(*_: Any) -> None:
        raise RuntimeError("no forward")

    handle = target.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no forward"), capture_traces(target, print):
        target.generate(models.prompt(), assistant_model=draft, max_new_tokens=4)
    handle.remove()
    assert type(target) is cls
    assert target.generation_config.to_dict() == config
    _, trace = captured(target, draft, models.prompt())
    assert len(trace) == 20
    assert target.generation_config.to_dict() == config
    assert dict(vars(cls)) == own
    assert vars(GenerationMixin)[LOOP] is loop


# --- what users do with a model meanwhile ---------------------------------------------------------------------------


def through_file(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Any] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of what holds it": lambda model: copy.deepcopy({"models": [model, model]})["models"][1],
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle, old protocol": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "torch.save": through_file,
    "another process": lambda model: pickle.loads(ForkingPickler.dumps(copy.deepcopy(model))),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("listens", ["capture_traces", "attached"])
def test_copies_made_inside_are_ordinary_models(how: str, listens: str) -> None:
    target, draft = models.pair()
    cls, ids = type(target), models.prompt()
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
    alone = target.generate(ids, **settings)
    assistant = OnlineAssistant(target, draft, config=OnlineConfig(num_assistant_tokens=5, update_strategy="manual"))
    traces: list[Trace] = []
    with assistant.attached() if listens == "attached" else capture_traces(target, traces.append):
        copied = COPIES[how](target)
        assert type(copied) is cls
        assert torch.equal(copied.generate(ids, assistant_model=draft, **settings), alone)
        assert (len(traces), assistant.stats.num_requests) == (0, 0)
        output, trace = captured(copied, draft, ids, max_new_tokens=8)
        assert torch.equal(output, alone)
        assert len(trace) == 8
    output, trace = captured(copied, draft, ids, max_new_tokens=8)
    assert torch.equal(output, alone)
    assert len(trace) == 8
    assert type(copied) is type(target) is cls


def test_a_class_is_let_go_of_with_its_models() -> None:
    def serve() -> weakref.ref[type]:
        target, draft = models.pair()

        class Short(type(target)):  # type: ignore[misc]
            pass

        target.__class__ = Short
        captured(target, draft, models.prompt())
        return weakref.ref(Short)

    made = serve()
    gc.collect()
    assert made() is None


def test_a_request_that_has_ended_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models.pair()
    assistant = OnlineAssistant(target, draft, config=OnlineConfig(num_assistant_tokens=5, update_strategy="manual"))
    through(assistant, models.prompt())
    held: list[weakref.ref[Any]] = []
    watch = Request.watch

    def watched(self: Request, generator: Any, *args: Any) -> None:
        held.extend((weakref.ref(self), weakref.ref(generator)))
        watch(self, generator, *args)

    monkeypatch.setattr(Request, "watch", watched)
    gc.collect()
    gc.disable()  # the cache of a draft is too large to wait for it
    try:
        through(assistant, models.prompt())
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_a_model_saved_under_capture_names_its_own_class(tmp_path: Path) -> None:
    target = models.build()
    with capture_traces(target, print):
        target.save_pretrained(tmp_path)
    assert type(target).from_pretrained(tmp_path).config.architectures == ["LlamaForCausalLM"]


def test_plain_requests_are_not_captured() -> None:
    target = models.build()
    traces: list[Trace] = []
    with capture_traces(target, traces.append):
        target.generate(models.prompt(), max_new_tokens=4)
        with pytest.warns(UserWarning):
            warnings.warn("so that none of the above warned", stacklevel=1)
    assert traces == []


def test_a_failed_request_leaves_no_trace() -> None:
    target, draft = models.pair()
    traces: list[Trace] = []

    class Stop(Listener):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.ids) > 12:
                raise ConnectionResetError

    with capture_traces(target, traces.append):
        with pytest.raises(ConnectionResetError):
            target.generate(models.prompt(), assistant_model=draft, max_new_tokens=20, streamer=Stop())
        assert traces == []
        target.generate(models.prompt(), assistant_model=draft, max_new_tokens=6)
    assert [len(t) for t in traces] == [6]


# --- who listens ----------------------------------------------------------------------------------------------------


def test_nested_captures_both_see_the_request() -> None:
    target, draft = models.pair()
    outer: list[Trace] = []
    inner: list[Trace] = []
    with capture_traces(target, outer.append, num_logprobs=None, domain="outer"):
        with capture_traces(target, inner.append, num_logprobs=4, domain="inner"):
            target.generate(models.prompt(), assistant_model=draft, max_new_tokens=9)
        target.generate(models.prompt(), assistant_model=draft, max_new_tokens=5)
    assert ([len(t) for t in outer], [len(t) for t in inner]) == ([9, 5], [9])
    assert (outer[0].domain, inner[0].domain) == ("outer", "inner")
    assert (outer[0].num_kept, inner[0].num_kept) == (64, 4)
    assert outer[0].completion_ids.tolist() == inner[0].completion_ids.tolist()


def test_captures_of_two_targets_do_not_meet() -> None:
    first, second = models.build(seed=0), models.build(seed=1)
    draft = models.draft_of(first)
    traces: list[Trace] = []
    with capture_traces(first, traces.append):
        second.generate(models.prompt(), assistant_model=draft, max_new_tokens=5)
        assert traces == []
        first.generate(models.prompt(), assistant_model=draft, max_new_tokens=5)
    assert len(traces) == 1


def test_a_thread_without_the_context_is_not_captured() -> None:
    target, draft = models.pair()
    traces: list[Trace] = []

    def serve(length: int) -> None:
        target.generate(models.prompt(), assistant_model=draft, max_new_tokens=length)

    with capture_traces(target, traces.append):
        threads = [
            threading.Thread(target=serve, args=(5,)),
            threading.Thread(target=contextvars.copy_context().run, args=(serve, 7)),
        ]
        for thread in threads:
            thread.start()
            thread.join()
    assert [len(t) for t in traces] == [7]


def test_threads_with_captures_of_their_own_do_not_mix() -> None:
    target, draft = models.pair()
    cls = type(target)
    seen: dict[int, list[Trace]] = {4: [], 11: []}
    ready = threading.Barrier(2)

    def serve(length: int) -> None:
        own = copy.deepcopy(draft)  # a draft's own requests must not meet either
        with capture_traces(target, seen[length].append):
            ready.wait()
            for ids in models.prompts(4):
                target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=own,
                    max_new_tokens=length,
                    do_sample=False,
                )

    threads = [threading.Thread(target=serve, args=(length,)) for length in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert type(target) is cls
    for length, traces in seen.items():
        assert [len(t) for t in traces] == [length] * 4
        for trace in traces:
            assert sum(r.num_emitted for r in trace.rounds) == length
            assert total_variation(trace, plain_rows(target, trace)) < 1e-3


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_failing_sink_costs_no_answer() -> None:
    target, draft = models.pair()
    taken: list[Trace] = []

    def sink(trace: Trace) -> None:
        if len(trace) == 5:
            raise OSError("disk full")
        taken.append(trace)

    answers = []
    with pytest.raises(CaptureError, match="disk full") as caught, capture_traces(target, sink):
        for length in (4, 5, 6):
            answers.append(target.generate(models.prompt(), assistant_model=draft, max_new_tokens=length))
    assert [a.shape[1] - 6 for a in answers] == [4, 5, 6]
    assert [len(t) for t in taken] == [4, 6]
    assert isinstance(caught.value.__cause__, OSError)


def test_a_callers_own_error_is_not_hidden_by_a_sinks() -> None:
    target, draft = models.pair()

    def sink(trace: Trace) -> None:
        raise OSError("disk full")

    with pytest.raises(ZeroDivisionError), capture_traces(target, sink):
        target.generate(models.prompt(), assistant_model=draft, max_new_tokens=4)
        raise ZeroDivisionError


@pytest.mark.parametrize("long", [False, True])
def test_a_prompt_that_lies_only_in_the_cache_is_not_captured(long: bool, caplog: pytest.LogCaptureFixture) -> None:
    target, draft = models.pair()
    ids = models.prompt(8)
    cut = 2 if long else 7
    cache = target(ids[:, :cut], use_cache=True).past_key_values
    alone = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    traces: list[Trace] = []
    with capture_traces(target, traces.append):
        output = target.generate(
            ids[:, cut:],
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            assistant_model=draft,
            max_new_tokens=4,
            do_sample=False,
        )
    assert torch.equal(output[0, -4:], alone[0, -4:])
    assert traces == []
    assert "not captured" in caplog.text


def test_capture_needs_a_model_that_generates() -> None:
    target = models.build()
    with pytest.raises(UnsupportedModelError, match="AutoModelForCausalLM"), capture_traces(target.model, print):
        pass
    with pytest.raises(UnsupportedModelError, match="list"), capture_traces([], print):
        pass


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"assistant_early_exit": 1}, "assistant_early_exit"),
    ],
)
def test_lossy_and_draftless_modes_are_refused_under_capture(settings: dict[str, Any], name: str) -> None:
    target, draft = models.pair()
    if name in ("assistant_ensemble_weight", "guidance_scale"):
        settings["assistant_model"] = draft
    with models.ForwardCounter(target, draft) as forwards, capture_traces(target, print):
        with pytest.raises(UnsupportedGenerationError, match=name):
            target.generate(models.prompt(), max_new_tokens=4, **settings)
        assert forwards.count == 0
