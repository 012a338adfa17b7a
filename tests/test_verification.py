"""The target's rounds, compiled: answers, traces and caches are those of its own forward, whatever becomes of it."""

import copy
import functools
import logging
import shutil
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_draft_forward import COMPILE, served_together
from transformers import DynamicCache, TextStreamer

from osd_hf import OnlineAssistant, Trace
from osd_hf.decoding.forward import SMALLEST_STATIC_CACHE, Verification

COMPILABLE = ("llama", "gpt2")
Settings = dict[str, Any]


class Graphs(list[Any]):
    """A backend that keeps what it is asked to compile, and runs it as it was traced."""

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "compile", self.compile)

    def compile(self, step: Any, *, fullgraph: bool, options: Any) -> Any:
        return COMPILE(step, fullgraph=fullgraph, backend=self.backend)

    def backend(self, graph: Any, _example: Any) -> Any:
        self.append(graph)
        return graph.forward


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    found = Graphs()
    found.patch(monkeypatch)
    return found


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would have been compiled runs as it is, which saves most of the time."""
    monkeypatch.setattr(torch, "compile", lambda step, **kwargs: step)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each round that did not go through the target's own forward."""
    counts: list[int] = []
    forward = Verification.forward

    def seen(self: Verification, past_key_values: Any, ids: torch.Tensor, length: int) -> Any:
        counts.append(ids.shape[1])
        return forward(self, past_key_values, ids, length)

    monkeypatch.setattr(Verification, "forward", seen)
    return counts


def assistant_of(target: Any, draft: Any, **settings: Any) -> OnlineAssistant:
    return models.assistant_of(target, draft, **{"compile_target": True, **settings})


def small(architecture: str = "llama", **changes: Any) -> tuple[Any, Any]:
    """A pair of one layer in double precision: what rounds otherwise changes no answer."""
    target, draft = models.pair(architecture, noise=0.1, **models.SHALLOW[architecture], **changes)
    return models.double(target), models.double(draft)


def answer(generate: Callable[..., Any], ids: torch.Tensor, length: int = 20, **settings: Any) -> list[int]:
    output = generate(ids, **models.greedy(ids, **{"max_new_tokens": length, **settings}))
    tokens: list[int] = getattr(output, "sequences", output)[0].tolist()
    return tokens


def same_as_alone(assistant: OnlineAssistant, ids: torch.Tensor, length: int = 20, **settings: Any) -> list[int]:
    target = assistant.target
    ours = answer(assistant.generate, ids, length, **settings)
    settings.pop("num_assistant_tokens", None)
    assert ours == answer(target.generate, ids, length, **settings)
    return ours


@functools.cache
def traced(architecture: str) -> tuple[OnlineAssistant, Graphs]:
    """An assistant whose target is traced, once for all tests that leave it as it was."""
    for every in models.ARCHITECTURES:  # transformers' list of classes is looked at by what it traces
        models.build(every)
    graphs = Graphs()
    assistant = assistant_of(*small(architecture))
    with pytest.MonkeyPatch.context() as patch:
        graphs.patch(patch)
        same_as_alone(assistant, models.prompt())
    return assistant, graphs


# --- the same answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_answers_are_the_targets_for_any_number_of_drafted_tokens_and_nothing_is_compiled_again(
    architecture: str, fed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assistant, graphs = traced(architecture)
    for number, k in enumerate([*range(1, 13), "auto", 3, "auto"]):
        same_as_alone(assistant, models.prompt(1 + 5 * number % 13, number), 13 + number, num_assistant_tokens=k)
    same_as_alone(assistant, models.prompt(40), 60)
    assert {1, *range(2, 14)} <= set(fed)
    assert len(graphs) == 1
    assert "not compiled" not in caplog.text
    assert 0 < assistant.stats.alpha < 1


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_answers_are_the_targets_however_they_end(
    architecture: str, untraced: None, fed: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assistant, tokenizer = assistant_of(*small(architecture)), models.tokenizer()
    ends = set()
    for seed in range(2):
        ids = models.prompt(6, seed)
        whole = same_as_alone(assistant, ids, num_assistant_tokens=None)
        text = tokenizer.decode(whole[14:16])
        requests: list[Settings] = [
            {"eos_token_id": whole[11:13]},
            {"stopping_criteria": [models.EndsWith(whole[9:12])]},
            {"stop_strings": [text], "tokenizer": tokenizer},
            {"streamer": TextStreamer(tokenizer)},
            {"repetition_penalty": 1.3},
            {"length": 1},
            {"length": 2},
        ]
        ends |= {len(same_as_alone(assistant, ids, **settings)) for settings in requests}
        ours, theirs = capsys.readouterr().out.splitlines()
        assert ours == theirs
    assert len(ends) > 4
    assert len(fed) > 20


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_the_last_token_of_a_target_has_no_position_behind_it(
    architecture: str, untraced: None, fed: list[int]
) -> None:
    most = 32
    size = {"n_positions": most} if architecture == "gpt2" else {"max_position_embeddings": most}
    target, _draft = small(architecture, **size)
    assistant, last = assistant_of(target, copy.deepcopy(target)), set()
    for k in (3, 5, 12):
        for length in (most - 1, most, most + 1):
            for start in (20, 21, 23):
                same_as_alone(assistant, models.prompt(start), length - start, num_assistant_tokens=k)
                last.add((length, fed[-1]))
    assert {(most, 1), (most + 1, 1), (most + 1, 2)} <= last


@pytest.mark.parametrize("k", [1, 5])
def test_a_sequence_moves_to_larger_caches_and_then_to_the_callers(
    k: int, untraced: None, fed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, tokens in {"SMALLEST_STATIC_CACHE": 16, "LARGEST_STATIC_CACHE": 32, "AHEAD": 4}.items():
        monkeypatch.setattr(f"osd_hf.decoding.forward.{name}", tokens)
    target, draft = small()
    assistant = assistant_of(target, draft)
    for start in (6, 14, 30, 31, 40):
        ids = models.prompt(start)
        settings = {"num_assistant_tokens": k, "return_dict_in_generate": True}
        with models.ForwardCounter(target) as eager:
            output = assistant.generate(ids, max_new_tokens=40, do_sample=False, **settings)
        assert output.sequences[0].tolist() == answer(target.generate, ids, 40)
        assert eager.count > 4  # what comes behind the largest cache
        cache = output.past_key_values
        assert type(cache) is DynamicCache
        end = cache.get_seq_length()
        theirs = target(output.sequences[:, :end]).past_key_values
        torch.testing.assert_close(cache.layers[0].keys, theirs.layers[0].keys, atol=1e-10, rtol=0)
    assert len(fed) > 8


def traces_of(assistant: OnlineAssistant, requests: list[tuple[torch.Tensor, Settings]]) -> list[Trace]:
    traces: list[Trace] = []
    for number, (ids, settings) in enumerate(requests):
        torch.manual_seed(number)
        tokens = answer(assistant.generate, ids, on_trace=traces.append, **settings)
        assert tokens[ids.shape[1] :] == traces[-1].completion_ids.tolist()
    assert len(traces) == len(requests)
    return traces


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_traces_are_those_of_the_targets_own_forward(architecture: str, fed: list[int]) -> None:
    compiled, _graphs = traced(architecture)
    eager = assistant_of(compiled.target, compiled.draft, compile_target=False)
    sampled = {"do_sample": True, "temperature": 1.3}
    requests: list[tuple[torch.Tensor, Settings]] = [
        (models.prompt(3), {"num_assistant_tokens": 2}),
        (models.prompt(7, 1), {"repetition_penalty": 1.2}),
        (models.prompt(5, 2), {**sampled, "top_k": 20}),
        (models.prompt(9, 3), {**sampled, "num_assistant_tokens": 7}),
    ]
    ours = traces_of(compiled, requests)
    rounds = len(fed)
    assert rounds > 10
    theirs = traces_of(eager, requests)
    assert len(fed) == rounds
    for one, other in zip(ours, theirs, strict=True):
        assert one.completion_ids.tolist() == other.completion_ids.tolist()
        for name in ("top_logits", "top_ids", "tail_logprob"):
            rows = (torch.from_numpy(getattr(trace, name)).double() for trace in (one, other))
            torch.testing.assert_close(*rows, atol=1e-4, rtol=0)
        for mine, its in zip(one.rounds, other.rounds, strict=True):
            assert mine.drafted_ids.tolist() == its.drafted_ids.tolist()
            assert (mine.num_accepted, mine.num_emitted) == (its.num_accepted, its.num_emitted)
            for p, p_eager in ((mine.p, its.p), (mine.q, its.q)):
                assert (p is None) == (p_eager is None)
                if p is not None:
                    torch.testing.assert_close(torch.from_numpy(p), torch.from_numpy(p_eager), atol=1e-4, rtol=0)


# --- caches of the caller -------------------------------------------------------------------------------------------


def same_caches(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs) is DynamicCache
    assert ours.get_seq_length() == theirs.get_seq_length() > 0
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(one.values, other.values, atol=1e-5, rtol=0)


def test_the_cache_of_an_output_is_the_callers_and_can_be_gone_on_from(untraced: None, fed: list[int]) -> None:
    target, draft = small()
    compiled, eager = assistant_of(target, draft), assistant_of(target, draft, compile_target=False)
    ids, given = models.prompt(), DynamicCache()
    settings = models.greedy(ids, max_new_tokens=15, output_logits=True, output_scores=True)
    settings["return_dict_in_generate"] = True
    theirs = eager.generate(ids, **settings)
    assert fed == []
    for cache in (None, given):
        ours = compiled.generate(ids, past_key_values=cache, **settings)
        assert cache is None or ours.past_key_values is given
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        same_caches(ours.past_key_values, theirs.past_key_values)
        for rows in ("logits", "scores"):
            assert len(getattr(ours, rows)) == 15
            torch.testing.assert_close(getattr(ours, rows), getattr(theirs, rows), atol=1e-5, rtol=0)
        kept = copy.deepcopy(ours.past_key_values)
        same_as_alone(compiled, models.prompt(9, 5))  # what serves others changes nothing of it
        same_caches(ours.past_key_values, kept)
        more = torch.cat([ours.sequences, models.prompt(3)], dim=1)
        assert answer(compiled.generate, more, past_key_values=ours.past_key_values) == answer(target.generate, more)
    assert len(fed) > 6


# --- what is left to the target's own forward ------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_requests_of_other_kinds_go_through_the_targets_own_forward(
    architecture: str, untraced: None, fed: list[int]
) -> None:
    assistant = assistant_of(*small(architecture))
    ids = models.prompt(9)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), models.prompt(5)], dim=1)
    requests: dict[str, tuple[torch.Tensor, Settings]] = {
        "padding": (padded, {"attention_mask": (torch.arange(9) >= 4).long()[None]}),
        "a hole": (ids, {"attention_mask": (torch.arange(9) != 4).long()[None]}),
        "positions": (ids, {"position_ids": torch.arange(9)[None] + 3}),
        "states": (ids, {"output_hidden_states": True, "return_dict_in_generate": True}),
    }
    for other, settings in requests.values():
        same_as_alone(assistant, other, **settings)
    with torch.autocast("cpu", torch.bfloat16):
        answer(assistant.generate, ids, learn=False)
    assert fed == []
    usual = {"position_ids": torch.arange(9)[None]}
    same_as_alone(assistant, ids, **usual)
    assert len(fed) > 2


@pytest.mark.parametrize("architecture", ["mistral", "gemma3", "t5", "bart"])
def test_what_static_caches_cannot_serve_is_verified_eagerly(
    architecture: str, untraced: None, fed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    target, draft = models.pair(architecture, noise=0.08)
    assistant = assistant_of(target, draft)
    for ids in models.prompts(3):
        same_as_alone(assistant, ids)
    assert fed == []
    assert caplog.text.count("runs eagerly") == 1
    assert ("a target with sliding windows" in caplog.text) != target.config.is_encoder_decoder


# --- a target that changes ------------------------------------------------------------------------------------------


def test_a_target_is_served_as_it_is_now(fed: list[int], caplog: pytest.LogCaptureFixture) -> None:
    assistant, graphs = traced("llama")  # given back as it was
    target, ids, seen, made = assistant.target, models.prompt(), set(), len(graphs)

    def check(name: str, *, is_compiled: bool = True, is_new: bool = True) -> None:
        rounds = len(fed)
        tokens = tuple(same_as_alone(assistant, ids, 12))
        assert (len(fed) > rounds) == is_compiled, name
        assert (tokens not in seen) == is_new, name
        seen.add(tokens)

    layer = target.model.layers[0]
    mlp, weight, up = layer.mlp, layer.self_attn.o_proj.weight, layer.mlp.up_proj.weight
    check("as it came")
    with torch.no_grad():
        up.mul_(-2)
    check("weights in place")
    layer.self_attn.o_proj.weight = torch.nn.Parameter(-weight.detach())
    check("a new parameter")
    assert len(graphs) == made
    hook = layer.mlp.register_forward_hook(lambda module, args, output: output * -0.7)
    check("a hook")
    hook.remove()
    check("no hook", is_new=False)
    target.train()
    check("training", is_compiled=False, is_new=False)
    target.eval()
    check("no training", is_new=False)
    layer.mlp = torch.nn.Linear(32, 32, dtype=torch.float64)
    check("another module")
    layer.mlp, layer.self_attn.o_proj.weight = mlp, weight
    with torch.no_grad():
        up.div_(-2)
    check("as it was", is_new=False)
    assert len(graphs) == made + 2  # the hook and the other module, each once, for any number of tokens
    assert "not compiled" not in caplog.text


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_adapters_of_the_target_are_served_as_they_are_now(
    graphs: Graphs, fed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assistant, _graphs = traced("llama")  # given back as it was
    target, ids = assistant.target, models.prompt()
    before = same_as_alone(assistant, ids, 10)
    wrapped = get_peft_model(target, LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False))
    with_adapter = same_as_alone(assistant, ids, 10)
    assert with_adapter != before
    with wrapped.disable_adapter():
        assert same_as_alone(assistant, ids, 10) == before
    assert wrapped.unload() is target
    target.requires_grad_(True)
    assert same_as_alone(assistant, ids, 10) == before
    assert len(graphs) <= 2  # beside the one without an adapter
    assert "not compiled" not in caplog.text


# --- failures -------------------------------------------------------------------------------------------------------

COMPLAINT = "no C++ compiler.\nSee the log."


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(COMPLAINT)


@pytest.mark.parametrize("where", ["at once", "in the backend", "at the first call"])
def test_without_a_compiler_the_target_verifies_eagerly(
    where: str, fed: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ways: dict[str, Callable[..., Any]] = {
        "at once": fail,
        "in the backend": lambda step, **_: COMPILE(step, fullgraph=True, backend=fail),
        "at the first call": lambda *args, **kwargs: fail,
    }
    monkeypatch.setattr(torch, "compile", ways[where])
    caplog.set_level(logging.WARNING)
    assistant = assistant_of(*small())
    for seed in range(2):
        same_as_alone(assistant, models.prompt(seed=seed))
    assert fed == []
    assert caplog.text.count("The target is not compiled and runs eagerly") == 1
    assert "RuntimeError: no C++ compiler" in caplog.text


# --- threads and modes ----------------------------------------------------------------------------------------------


def test_requests_of_two_threads_do_not_meet(fed: list[int]) -> None:
    assistant, graphs = traced("llama")
    made = len(graphs)
    prompts = models.prompts(2)
    assert served_together(assistant, prompts) == [answer(assistant.target.generate, ids) for ids in prompts]
    assert len(fed) > 4
    assert len(graphs) == made


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_answers_are_the_targets_in_any_mode(architecture: str, fed: list[int]) -> None:
    assistant, graphs = traced(architecture)
    made = len(graphs)
    ids = models.prompt(7)
    alone = answer(assistant.target.generate, ids)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            cache, rounds = DynamicCache(), len(fed)
            assert answer(assistant.generate, ids.clone(), past_key_values=cache) == alone
            assert answer(assistant.generate, ids.clone(), logits_processor=[lambda _ids, row: row.mul_(2)]) == alone
            assert len(fed) > rounds
            assert cache.get_seq_length() == 26
    assert len(graphs) == made


# --- with the compiler ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # the compiler itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler: install g++")
@pytest.mark.parametrize("architecture", COMPILABLE)
def test_targets_by_a_real_compiler_answer_as_they_do_alone(
    architecture: str, fed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assistant = assistant_of(*small(architecture))
    for k in (1, 3, 5, 12, "auto"):
        for ids in models.prompts(3):
            same_as_alone(assistant, ids, num_assistant_tokens=k)
    assert {1, 2, 4, 6} <= set(fed)
    same_as_alone(assistant, models.prompt(), SMALLEST_STATIC_CACHE - 10)
    prompts = models.prompts(2)
    assert served_together(assistant, prompts) == [answer(assistant.target.generate, ids) for ids in prompts]
    before = same_as_alone(assistant, models.prompt())
    with torch.no_grad():
        assistant.target.lm_head.weight.copy_(assistant.target.lm_head.weight.roll(1, 0))
    assert same_as_alone(assistant, models.prompt()) != before
    assert "not compiled" not in caplog.text


def test_a_target_that_computes_otherwise_when_compiled_runs_eagerly(
    graphs: Graphs, fed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = small()
    forward = type(target).forward

    def odd(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            output.logits = output.logits.roll(1, -1)
        return output

    target.__class__ = type(type(target).__name__, (type(target),), {"forward": odd})
    same_as_alone(assistant_of(target, draft), models.prompt())
    assert not fed
    assert "The target is not compiled and runs eagerly" in caplog.text
    assert "its logits differ" in caplog.text
