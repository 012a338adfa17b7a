import copy
import gc
import itertools
import pickle
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import numpy as np
import pytest
import torch

from osd_hf import CorrectionStore, OnlineAssistant, capture_traces
from osd_hf.acceptance import AcceptanceStats
from osd_hf.errors import CaptureError
from osd_hf.models import unwrap
from osd_hf.trace import Trace


def captured(
    target: Any, draft: Any, ids: torch.Tensor, *, num_logprobs: int | None = 64, **kwargs: Any
) -> tuple[Any, Trace]:
    """One assisted request under capture: what `generate` returned, and its trace."""
    traces: list[Trace] = []
    with capture_traces(target, traces.append, num_logprobs=num_logprobs):
        output = target.generate(ids, assistant_model=draft, **models.greedy(ids, **kwargs))
    assert len(traces) == 1
    return output, traces[0]


PLAIN = {"num_assistant_tokens": 0}  # the target decodes alone


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


def assistant_of(architecture: str = "llama") -> OnlineAssistant:
    return models.assistant_of(*models.pair(architecture, **models.SHALLOW[architecture]))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "t5"])
def test_requests_that_the_target_decodes_alone_are_captured(architecture: str, do_sample: bool) -> None:
    assistant = models.assistant_of(*map(models.double, models.pair(architecture, **models.SHALLOW[architecture])))
    ids, how = models.prompt(), {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ways: list[dict[str, Any]] = [{"repetition_penalty": 1.4}, {"eos_token_id": list(range(3, 12))}]
    for settings in (*ways, {"max_new_tokens": 1}):
        settings |= {"do_sample": do_sample, **how}
        torch.manual_seed(0)
        with models.ForwardCounter(assistant.draft) as drafted:
            output, trace = models.answered(assistant, ids, **PLAIN, **settings)
        torch.manual_seed(0)
        alone = models.alone(assistant.target, ids, **settings)
        assert type(output) is type(alone)
        assert torch.equal(output.sequences, alone.sequences)
        for name in ("scores", "logits"):
            ours, theirs = (torch.cat(getattr(each, name)) for each in (output, alone))
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=models.rounding(2))
        assert trace.completion_ids.tolist() == output.sequences[0, -len(trace) :].tolist()
        rounds = [(len(r.drafted_ids), r.num_accepted, r.num_emitted) for r in trace.rounds]
        assert rounds == [(0, 0, 1)] * len(trace)
        assert drafted.count == 0
        assert trace.is_sampled == do_sample
        assert trace.prompt_ids.tolist() == ids[0].tolist()
        assert total_variation(trace, plain_rows(assistant.target, trace)) < 1e-3  # raw, before any processor


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
    assert worst <= 1e-3


# --- every stock assisted generate ----------------------------------------------------------------------------------


def penalize(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, 5] -= 5.0  # in place, as some do
    return scores


penalize.is_stateless = True  # type: ignore[attr-defined]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eos": {"eos_token_id": list(range(3, 12))},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "several processors": {"repetition_penalty": 1.5, "min_new_tokens": 4, "bad_words_ids": [[7]], "eos_token_id": 9},
    "own processor": {"logits_processor": [penalize]},
    "sequence_bias": {"sequence_bias": {(5,): -4.0, (6, 7): 2.0}},
}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [*itertools.product(["llama", "t5"], SETTINGS), ("mistral", "plain"), ("mistral", "several processors")],
)
def test_capture_does_not_change_greedy_output(architecture: str, name: str) -> None:
    target, draft = models.pair(architecture, noise=0.1, **models.SHALLOW[architecture])
    ids = models.prompt(5)
    alone = models.alone(target, ids, **SETTINGS[name])
    output, trace = captured(target, draft, ids, **SETTINGS[name])
    assert torch.equal(output, alone)
    assert trace.completion_ids.tolist() == output[0, -len(trace) :].tolist()
    assert total_variation(trace, plain_rows(target, trace)) < 1e-3  # raw rows, before any processor


def test_capture_does_not_change_sampled_output() -> None:
    target, draft = models.pair()
    ids = models.prompt()
    kwargs = models.greedy(ids, do_sample=True, top_k=10)
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


@pytest.mark.parametrize("is_lean", [False, True])
def test_probabilities_of_drafted_tokens_are_the_processed_ones(is_lean: bool) -> None:
    assistant, ids = assistant_of(), models.prompt()
    target, draft = assistant.target, models.draft_of(assistant.target)
    settings = {"do_sample": True, "temperature": 1.7, "top_k": 5}
    _, trace = models.answered(assistant, ids, **settings) if is_lean else captured(target, draft, ids, **settings)
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


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("architecture", ["llama", "bart"])
def test_scores_and_logits_are_returned_as_without_capture(architecture: str, penalty: float) -> None:
    target, draft = map(models.double, models.pair(architecture))
    ids = models.prompt()
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    settings |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    settings["repetition_penalty"] = penalty
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
    alone = models.alone(target, models.prompt())
    lora = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "r": 2}
    wrapped, small = get_peft_model(target, LoraConfig(**lora)), get_peft_model(draft, LoraConfig(**lora))
    models.fixed_k(small)
    for pair in ((wrapped, small), (wrapped, draft), (unwrap(wrapped), small)):
        cls = type(unwrap(pair[0]))
        output, trace = captured(*pair, models.prompt())
        assert torch.equal(output, alone)
        assert 0 < stats(trace).alpha < 1
        assert type(unwrap(pair[0])) is cls


def test_a_compiled_target_is_unwrapped() -> None:
    target, draft = models.pair()
    compiled = SimpleNamespace(_orig_mod=target, generate=target.generate)  # so `torch.compile` hides it
    assert unwrap(compiled) is target
    output, trace = captured(compiled, draft, models.prompt())
    assert trace.completion_ids.tolist() == output[0, 6:].tolist()


# --- what users do with a model meanwhile ---------------------------------------------------------------------------


COPIES: dict[str, Any] = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("listens", ["capture_traces", "attached"])
def test_copies_made_inside_are_ordinary_models(how: str, listens: str) -> None:
    assistant, ids, traces = assistant_of(), models.prompt(), list[Trace]()
    target, draft = assistant.target, models.draft_of(assistant.target)
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
    alone = target.generate(ids, **settings)
    with assistant.attached() if listens == "attached" else capture_traces(target, traces.append):
        copied = COPIES[how](target)
        assert torch.equal(copied.generate(ids, assistant_model=draft, **settings), alone)
        assert (len(traces), assistant.stats.num_requests) == (0, 0)
        output, trace = captured(copied, draft, ids, max_new_tokens=8)
    assert torch.equal(output, alone)
    assert len(trace) == 8
    assert type(copied) is type(target)


def test_a_failed_request_leaves_no_trace() -> None:
    target, draft = models.pair()
    traces: list[Trace] = []

    def leave(count: int) -> None:
        if count > 2:
            raise ConnectionResetError

    with capture_traces(target, traces.append):
        with pytest.raises(ConnectionResetError):
            target.generate(models.prompt(), assistant_model=draft, max_new_tokens=20, streamer=models.Streamer(leave))
        assert traces == []
        target.generate(models.prompt(), max_new_tokens=4)
        assert traces == []  # without a draft, nothing is captured
        target.generate(models.prompt(), assistant_model=draft, max_new_tokens=6)
    assert [len(t) for t in traces] == [6]


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
    with pytest.raises(ZeroDivisionError), capture_traces(target, sink):  # the caller's own error is not hidden
        target.generate(models.prompt(), assistant_model=draft, max_new_tokens=5)
        raise ZeroDivisionError


@pytest.mark.parametrize("long", [False, True])
def test_a_prompt_that_lies_only_in_the_cache_is_not_captured(long: bool, caplog: pytest.LogCaptureFixture) -> None:
    target, draft = models.pair()
    ids = models.prompt(8)
    cut = 2 if long else 7
    cache = target(ids[:, :cut], use_cache=True).past_key_values
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    alone = target.generate(ids, **settings)
    traces: list[Trace] = []
    with capture_traces(target, traces.append):
        output = target.generate(ids[:, cut:], past_key_values=cache, assistant_model=draft, **settings)
    assert torch.equal(output[0, -4:], alone[0, -4:])
    assert traces == []
    assert "not captured" in caplog.text


@pytest.mark.parametrize("returned", [{}, {"return_dict_in_generate": True, "output_scores": True}], ids=str)
def test_a_closed_assistant_is_released_without_the_garbage_collector(returned: dict[str, Any]) -> None:
    target, draft = models.pair(noise=0.3)
    gc.collect()
    gc.disable()
    try:
        with OnlineAssistant(target, draft) as assistant:
            assistant.generate(models.prompt(), **models.greedy(models.prompt()), **returned)
        serving = weakref.ref(assistant.draft)
        del assistant
        assert serving() is None
    finally:
        gc.enable()
