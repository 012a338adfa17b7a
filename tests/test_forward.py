"""Forwards of the draft and the target: compiled and captured ones answer, count and record as eager ones."""

import contextvars
import copy
import functools
import shutil
import threading
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, TextStreamer
from waiting import LONG

from osd_hf import OnlineAssistant, OnlineConfig, Trace
from osd_hf import assistant as assistant_module
from osd_hf.decoding import static as forwards
from osd_hf.decoding.static import SMALLEST_SIZE, LayerCode, StaticForward, static_draft, static_target
from osd_hf.learning import drafts as drafts_module

COMPILABLE = ("llama", "gpt2")
COMPILE = torch.compile
BOTH = {"compile_draft": True, "compile_target": True}
Settings = dict[str, Any]
Requests = list[tuple[torch.Tensor, Settings]]


class Graphs(list[Any]):
    """A backend that keeps what it is asked to compile, and runs it as it was traced."""

    def compile(self, step: Any, *, fullgraph: bool, options: Any) -> Any:
        return COMPILE(step, fullgraph=fullgraph, backend=self.backend)

    def backend(self, graph: Any, _example: Any) -> Any:
        self.append(graph)
        return graph.forward


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    found = Graphs()
    monkeypatch.setattr(torch, "compile", found.compile)
    return found


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would have been compiled runs as it is, which saves most of the time."""
    monkeypatch.setattr(torch, "compile", lambda step, **kwargs: step)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each round that did not go through the target's own forward."""
    counts: list[int] = []
    step = StaticForward.step

    def seen(self: StaticForward, cache: Any, ids: torch.Tensor, *args: Any) -> Any:
        counts.extend([ids.shape[1]] * (self.role == "target"))
        return step(self, cache, ids, *args)

    monkeypatch.setattr(StaticForward, "step", seen)
    return counts


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


def served(assistant: OnlineAssistant, requests: Requests) -> list[list[int]]:
    answers = []
    for number, (ids, settings) in enumerate(requests):
        torch.manual_seed(number)
        answers.append(answer(assistant.generate, ids, **settings))
    return answers


def served_together(assistant: OnlineAssistant, prompts: list[torch.Tensor]) -> list[list[int]]:
    barrier = threading.Barrier(len(prompts), timeout=LONG)  # behind the prompt: both are in their rounds together
    answers: dict[int, list[int]] = {}

    def serve(number: int) -> None:
        streamer = models.Streamer(lambda count: barrier.wait() if count == 2 else None)
        answers[number] = answer(assistant.generate, prompts[number], streamer=streamer)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(serve, number)) for number in range(len(prompts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(len(prompts))]


# --- the draft ------------------------------------------------------------------------------------------------------


@functools.cache
def served_eagerly(architecture: str, sampled: bool) -> tuple[Any, Any, Requests, list[list[int]], Any]:
    """A pair, some requests, and the answers and statistics of an eager draft."""
    target, draft = models.pair(architecture, noise=0.06, **models.SHALLOW.get(architecture, {}))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), models.prompt(5)], dim=1)
    requests: Requests = [
        (models.prompt(3), {}),
        (padded, {"attention_mask": (torch.arange(9) >= 4).long()[None]}),
        (models.prompt(), {"eos_token_id": list(range(3, 12))}),
    ]
    if sampled:
        requests.append((models.prompt(), {"do_sample": True, "top_k": 20}))
    eager = models.assistant_of(target, draft, compile_draft=False)
    return target, draft, requests, served(eager, requests), eager.stats


def serves_as_eagerly(architecture: str = "llama", *, sampled: bool = True) -> None:
    target, draft, requests, answers, eager = served_eagerly(architecture, sampled)
    assistant = models.assistant_of(target, draft, compile_draft=True)
    assert served(assistant, requests) == answers
    assert assistant.stats == eager
    assert 0 < eager.alpha < 1


def test_compiled_drafts_are_the_eager_ones(graphs: Graphs, caplog: pytest.LogCaptureFixture) -> None:
    serves_as_eagerly()
    assert len(graphs) > 0
    assert "not compiled" not in caplog.text


def test_an_update_reaches_what_is_compiled(graphs: Graphs) -> None:
    target, draft = models.pair(noise=0.3, num_hidden_layers=1)
    found = []
    for compile_draft in (True, False):
        assistant = models.assistant_of(
            target, draft, compile_draft=compile_draft, optimizer="adamw", learning_rate=1e-2, weight_average=0.0
        )
        answers = [answer(assistant.generate, ids) for ids in models.prompts(2)]
        before = assistant.stats
        assistant.update()
        assistant.reset_stats()
        answers += [answer(assistant.generate, ids) for ids in models.prompts(2)]
        assert assistant.version == 1
        assert assistant.stats.alpha > before.alpha + 0.1
        found.append((answers, before, assistant.stats))
    assert found[0] == found[1]


def test_another_dtype_is_compiled_again_and_autocast_runs_eagerly(untraced: None) -> None:
    assistant = models.assistant_of(*models.pair(num_hidden_layers=1), compile_draft=True)
    ids = models.prompt()
    alone = answer(assistant.generate, ids, learn=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(answer(assistant.generate, ids, learn=False)) == len(alone)
    for dtype in (torch.bfloat16, torch.float32):
        assistant.draft.to(dtype)
        assert answer(assistant.generate, ids, learn=False) == alone


# --- captured, without an accelerator -------------------------------------------------------------------------------


class Recorder:
    """In place of `capture`: runs what was captured again, and nothing while a graph is made."""

    def __init__(self) -> None:
        self.graphs = 0
        self.replays = 0
        self.failures: list[Exception] = []
        self.added = 0.0  # to what is replayed

    def __call__(self, run: forwards.Replay, inputs: forwards.Tensors) -> forwards.Replay:
        if self.failures:
            raise self.failures.pop()
        self.graphs += 1
        read = [each.clone() for each in inputs]

        def replay(*given: torch.Tensor) -> forwards.Tensors:
            self.replays += 1
            for place, value in zip(read, given, strict=True):
                place.copy_(value)
            first, *others = run(*read)
            return first + self.added * torch.arange(first.shape[-1]) if self.added else first, *others

        return replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(forwards, "capture", made)
    for module, role in ((drafts_module, "draft"), (assistant_module, "target")):
        monkeypatch.setattr(
            module,
            f"static_{role}",
            lambda model, config, role=role, **states: (
                StaticForward(model, role, is_captured=True, **states) if getattr(config, f"compile_{role}") else None
            ),
        )
    return made


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral", "gemma3"])
def test_captured_models_answer_as_eager_ones(
    architecture: str, recorder: Recorder, fed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    serves_as_eagerly(architecture, sampled=False)
    assert recorder.replays > recorder.graphs > 0
    assert len(set(fed)) > 1
    assert "eagerly" not in caplog.text


def test_captured_drafts_of_sampled_requests_propose_from_their_distribution(recorder: Recorder) -> None:
    target = models.double(models.build(num_hidden_layers=1))
    assistant = models.assistant_of(target, copy.deepcopy(target))
    for settings in ({"top_k": 5, "temperature": 0.7}, {"top_k": 3, "temperature": 0.7}, {"top_p": 0.8}):
        torch.manual_seed(0)
        answer(assistant.generate, models.prompt(), do_sample=True, **settings)
    assert assistant.stats.alpha == 1.0  # a copy of the target is always accepted
    assert recorder.replays > 6


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_rows_of_a_captured_batch_go_on_independently(rows: int, recorder: Recorder, fed: list[int]) -> None:
    target, draft = small()
    assistant = models.assistant_of(target, draft)
    ids = torch.cat([models.prompt(9, seed) for seed in range(rows)])
    mask = (torch.arange(9) >= torch.arange(rows)[:, None]).long()
    for settings in ({}, {"eos_token_id": list(range(3, 12))}, {"repetition_penalty": 1.3}):
        given = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 25, "pad_token_id": 0, **settings}
        assert assistant.generate(ids, **given).tolist() == target.generate(ids, **given).tolist()
    assert recorder.replays > 20
    assert len(fed) > 10


def test_plain_decoding_is_captured(recorder: Recorder, fed: list[int]) -> None:
    assistant = models.assistant_of(*small(), num_assistant_tokens="auto", candidates="draft")
    same_as_alone(assistant, models.prompt(), num_assistant_tokens=0)
    assert fed == [1] * (len(fed))
    assert len(fed) > 15


@pytest.fixture
def layer_code(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Let captured models compile their layers with a backend."""
    made = StaticForward.__init__

    def use(backend: Any) -> None:
        code = LayerCode(backend=backend)
        monkeypatch.setattr(StaticForward, "__init__", lambda *args, **how: made(*args, **how, code=code))

    return use


@pytest.mark.parametrize(("architecture", "what"), [("gemma3", "works"), ("llama", "fails"), ("llama", "is wrong")])
def test_layers_of_captured_targets_share_compiled_code(
    architecture: str, what: str, recorder: Recorder, layer_code: Any, caplog: pytest.LogCaptureFixture
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _example: Any) -> Any:
        graphs.append(graph)
        return {"works": graph.forward, "fails": fail, "is wrong": lambda *args: [2 * x for x in graph(*args)]}[what]

    layer_code(backend)
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if architecture == "gemma3" else {}
    target = models.build(architecture, num_hidden_layers=4, max_position_embeddings=1024, **kinds)
    layers = [vars(module).get("layer_idx") for module in target.modules()]
    with models.assistant_of(target, copy.deepcopy(target), compile_draft=False) as assistant:
        for tokens in (3, 250):
            for k in (0, 2, 5):
                same_as_alone(assistant, models.prompt(tokens), num_assistant_tokens=k)
    assert recorder.replays > recorder.graphs > 0
    assert "eagerly" not in caplog.text
    assert ("The layers of the target are not compiled" in caplog.text) == (what != "works")
    assert len(graphs) == 2 or what != "works"  # for one token, and for several
    assert [vars(module).get("layer_idx") for module in target.modules()] == layers
    assert target.config._attn_implementation == "sdpa"


def test_captures_that_fail_are_given_up_with_compiled_layers_and_without(
    recorder: Recorder, layer_code: Any, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.failures += [RuntimeError("not permitted")] * 40
    layer_code("eager")
    target, draft = small()
    with models.assistant_of(target, draft, compile_draft=False) as assistant:
        for ids in models.prompts(3):
            same_as_alone(assistant, ids)
    assert len(recorder.failures) == 40 - 2 * forwards.MAX_CAPTURE_FAILURES
    assert "The layers of the target are not compiled" in caplog.text
    assert caplog.text.count("The target is not captured and runs eagerly") == 1


@pytest.mark.parametrize(("fails", "is_given_up"), [(1, False), (2 * forwards.MAX_CAPTURE_FAILURES, True)])
def test_what_cannot_be_captured_runs_eagerly(
    fails: int, is_given_up: bool, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.failures += [RuntimeError("operation not permitted when stream is capturing")] * fails
    serves_as_eagerly(sampled=False)
    for role in ("draft", "target"):
        told = f"The {role} is not captured and runs eagerly: capturing failed with RuntimeError"
        assert caplog.text.count(told) == is_given_up
    assert (recorder.replays > 0) != is_given_up
    assert not recorder.failures


def test_a_target_that_computes_otherwise_when_captured_runs_eagerly(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.added = 1e-2
    assistant = models.assistant_of(*small(), compile_draft=False)
    same_as_alone(assistant, models.prompt())
    assert "The target is not captured and runs eagerly" in caplog.text
    assert "its logits differ" in caplog.text


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_graphs_are_dropped_when_a_model_changes_otherwise_than_in_place(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    assistant, seen = models.assistant_of(*small()), set()
    layer = assistant.target.model.layers[0]

    def graphs_made() -> int:
        before = recorder.graphs
        for ids in models.prompts(4):
            seen.add(tuple(same_as_alone(assistant, ids, num_assistant_tokens=1)))
        return recorder.graphs - before

    assert graphs_made() > 0
    assert graphs_made() == 0
    with torch.no_grad():
        layer.mlp.up_proj.weight.mul_(-2)
    assert graphs_made() == 0
    layer.mlp.up_proj.weight = torch.nn.Parameter(-layer.mlp.up_proj.weight.detach())
    assert graphs_made() > 0
    replays, factors = recorder.replays, [-0.7]
    hook = layer.mlp.register_forward_hook(lambda module, args, output: output * factors[0])
    assert graphs_made() == 0
    factors[0] = 0.4
    assert graphs_made() == 0
    assert "it has hooks" in caplog.text
    hook.remove()
    graphs_made()
    assert recorder.replays > replays
    adapted = get_peft_model(assistant.target, LoraConfig(target_modules=["up_proj"], init_lora_weights=False))
    assert graphs_made() > 0
    adapted.merge_adapter()  # changes weights in place, and what the layers do
    assert graphs_made() > 0
    assert len(seen) > 12


def test_attention_may_change_between_requests(recorder: Recorder) -> None:
    target, draft = small()
    assistant = models.assistant_of(target, draft)
    for attention in ("sdpa", "eager", "sdpa"):
        target.set_attn_implementation(attention)
        same_as_alone(assistant, models.prompt())


def test_the_returned_cache_of_a_padded_prompt_has_its_padding(recorder: Recorder) -> None:
    target, draft = small("mistral", sliding_window=8)
    assistant = models.assistant_of(target, draft)
    for pad in (0, 4):
        ids = torch.cat([torch.zeros(1, pad, dtype=torch.long), models.prompt(5)], dim=1)
        given = models.greedy(ids, max_new_tokens=12, return_dict_in_generate=True)
        given["attention_mask"] = (torch.arange(pad + 5) >= pad).long()[None]
        ours, theirs = assistant.generate(ids, **given), target.generate(ids, **given)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        same_caches(ours.past_key_values, theirs.past_key_values)


def test_an_error_while_a_prompt_is_read_is_not_hidden(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = small()
    assistant = models.assistant_of(target, draft)
    same_as_alone(assistant, models.prompt())
    with monkeypatch.context() as patch:
        patch.setattr(type(target), "forward", fail)
        with pytest.raises(RuntimeError, match="no C"):
            assistant.generate(models.prompt(), past_key_values=DynamicCache(), max_new_tokens=4, learn=False)
    same_as_alone(assistant, models.prompt())


def test_by_default_models_on_cuda_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(device: str, make: Callable[..., Any], name: str) -> list[Any]:
        monkeypatch.setattr(type(model), "device", torch.device(device))
        found = [make(model, OnlineConfig(**{name: way})) for way in ("auto", True, False)]
        return [None if one is None else one.is_captured for one in found]

    model = models.build(num_hidden_layers=1)
    assert made("cuda", static_draft, "compile_draft") == [True, True, None]
    assert made("xpu", static_draft, "compile_draft") == [False, False, None]
    assert made("cpu", static_draft, "compile_draft") == [None, False, None]
    assert made("cuda", static_target, "compile_target") == [True, True, None]
    assert made("cpu", static_target, "compile_target") == [None, False, None]


# --- draft and target: what is not compiled -------------------------------------------------------------------------


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no C++ compiler.\nSee the log.")


@pytest.mark.parametrize("where", ["at once", "in the backend", "at the first call"])
def test_without_a_compiler_both_run_eagerly(
    where: str, fed: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ways: dict[str, Callable[..., Any]] = {
        "at once": fail,
        "in the backend": lambda step, **_: COMPILE(step, fullgraph=True, backend=fail),
        "at the first call": lambda *args, **kwargs: fail,
    }
    monkeypatch.setattr(torch, "compile", ways[where])
    assistant = models.assistant_of(*small(), **BOTH)
    for seed in range(2):
        same_as_alone(assistant, models.prompt(seed=seed))
    assert fed == []
    for role in ("draft", "target"):
        assert caplog.text.count(f"The {role} is not compiled and runs eagerly") == 1
    assert "RuntimeError: no C++ compiler" in caplog.text


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_what_static_caches_cannot_serve_runs_eagerly(
    architecture: str, untraced: None, fed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = models.pair(architecture, noise=0.08)
    assistant, eager = models.assistant_of(target, draft, **BOTH), models.assistant_of(target, draft)
    for ids in models.prompts(3):
        assert same_as_alone(assistant, ids) == answer(eager.generate, ids)
    assert assistant.stats == eager.stats
    assert fed == []
    assert caplog.text.count("runs eagerly") == 2


def test_requests_of_two_threads_do_not_meet(untraced: None, fed: list[int]) -> None:
    target = models.build(num_hidden_layers=1)
    assistant = models.assistant_of(target, copy.deepcopy(target), **BOTH)
    assistant.warm_up(256)  # while one thread compiles, the other one runs eagerly
    prompts = models.prompts(2)
    answer(assistant.generate, prompts[0])  # compiles
    fed.clear()
    assert served_together(assistant, prompts) == [answer(target.generate, ids) for ids in prompts]
    assert assistant.stats.alpha == 1.0
    assert len(fed) > 4


@pytest.mark.parametrize("k", [1, 5])
def test_a_sequence_moves_to_larger_caches_and_then_to_dynamic_ones(
    k: int, untraced: None, fed: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, tokens in {"SMALLEST_SIZE": 16, "LARGEST_COMPILED_SIZE": 128, "AHEAD": 4}.items():
        monkeypatch.setattr(forwards, name, tokens)
    target, draft = small()
    assistant, plain = models.assistant_of(target, draft, **BOTH), models.assistant_of(target, draft)
    for start, length in ((6, 110), (27, 20), (31, 80), (95, 20), (110, 20)):
        ids = models.prompt(start)
        settings = {"num_assistant_tokens": k, "return_dict_in_generate": True}
        output = assistant.generate(ids, max_new_tokens=length, do_sample=False, **settings)
        assert output.sequences[0].tolist() == answer(target.generate, ids, length)
        answer(plain.generate, ids, length, num_assistant_tokens=k)
        assert assistant.stats == plain.stats
        cache = output.past_key_values
        assert type(cache) is DynamicCache
        end = cache.get_seq_length()
        theirs = target(output.sequences[:, :end]).past_key_values
        torch.testing.assert_close(cache.layers[0].keys, theirs.layers[0].keys, atol=1e-10, rtol=0)
    assert len(fed) > 8
    assert "longer than 128 tokens" in caplog.text


# --- the target -----------------------------------------------------------------------------------------------------


def compiled(target: Any, draft: Any, **settings: Any) -> OnlineAssistant:
    return models.assistant_of(target, draft, **{"compile_target": True, **settings})


@functools.cache
def traced(architecture: str) -> tuple[OnlineAssistant, Graphs]:
    """An assistant whose target is traced, once for all tests that leave it as it was."""
    for every in models.ARCHITECTURES:  # transformers' list of classes is looked at by what it traces
        models.build(every)
    graphs = Graphs()
    assistant = compiled(*small(architecture))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", graphs.compile)
        same_as_alone(assistant, models.prompt())
    return assistant, graphs


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_answers_are_the_targets_for_any_number_of_drafted_tokens_and_in_any_mode(
    architecture: str, fed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assistant, graphs = traced(architecture)
    for number, k in enumerate([1, 2, 4, 7, 12, "auto", 3, "auto"]):
        same_as_alone(assistant, models.prompt(1 + 5 * number % 13, number), 13 + number, num_assistant_tokens=k)
    same_as_alone(assistant, models.prompt(40), 60)
    assert {1, 2, 3, 5, 8, 13} <= set(fed)
    assert 0 < assistant.stats.alpha < 1
    ids = models.prompt(7)
    alone = answer(assistant.target.generate, ids)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            cache, rounds = DynamicCache(), len(fed)
            assert answer(assistant.generate, ids.clone(), past_key_values=cache) == alone
            assert answer(assistant.generate, ids.clone(), logits_processor=[lambda _ids, row: row.mul_(2)]) == alone
            assert len(fed) > rounds
            assert cache.get_seq_length() == 26
    assert len(graphs) == 1  # nothing is compiled again
    assert "not compiled" not in caplog.text


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_answers_are_the_targets_however_they_end(
    architecture: str, untraced: None, fed: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assistant, tokenizer = compiled(*small(architecture)), models.tokenizer()
    ends = set()
    for seed in range(2):
        ids = models.prompt(6, seed)
        whole = same_as_alone(assistant, ids, num_assistant_tokens=None)
        requests: list[Settings] = [
            {"eos_token_id": whole[11:13]},
            {"stopping_criteria": [models.EndsWith(whole[9:12])]},
            {"stop_strings": [tokenizer.decode(whole[14:16])], "tokenizer": tokenizer},
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
    target, _ = small(architecture, **{"n_positions" if architecture == "gpt2" else "max_position_embeddings": most})
    assistant, last = compiled(target, copy.deepcopy(target)), set()
    for k in (3, 5, 12):
        for length in (most - 1, most, most + 1):
            for start in (20, 21, 23):
                same_as_alone(assistant, models.prompt(start), length - start, num_assistant_tokens=k)
                last.add((length, fed[-1]))
    assert {(most, 1), (most + 1, 1), (most + 1, 2)} <= last


def traces_of(assistant: OnlineAssistant, requests: Requests) -> list[Trace]:
    traces: list[Trace] = []
    for number, (ids, settings) in enumerate(requests):
        torch.manual_seed(number)
        tokens = answer(assistant.generate, ids, on_trace=traces.append, **settings)
        assert tokens[ids.shape[1] :] == traces[-1].completion_ids.tolist()
    assert len(traces) == len(requests)
    return traces


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_traces_are_those_of_the_targets_own_forward(architecture: str, fed: list[int]) -> None:
    assistant, _graphs = traced(architecture)
    eager = models.assistant_of(assistant.target, assistant.draft)
    sampled = {"do_sample": True, "temperature": 1.3}
    requests: Requests = [
        (models.prompt(3), {"num_assistant_tokens": 2}),
        (models.prompt(7, 1), {"repetition_penalty": 1.2}),
        (models.prompt(5, 2), {**sampled, "top_k": 20}),
        (models.prompt(9, 3), {**sampled, "num_assistant_tokens": 7}),
    ]
    ours = traces_of(assistant, requests)
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


def same_caches(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs) is DynamicCache
    assert ours.get_seq_length() == theirs.get_seq_length() > 0
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(one.values, other.values, atol=1e-5, rtol=0)


def test_the_cache_of_an_output_is_the_callers_and_can_be_gone_on_from(untraced: None, fed: list[int]) -> None:
    target, draft = small()
    assistant, eager = compiled(target, draft), models.assistant_of(target, draft)
    ids, given = models.prompt(), DynamicCache()
    settings = models.greedy(ids, max_new_tokens=15, output_logits=True, output_scores=True)
    settings["return_dict_in_generate"] = True
    theirs = eager.generate(ids, **settings)
    assert fed == []
    for cache in (None, given):
        ours = assistant.generate(ids, past_key_values=cache, **settings)
        assert cache is None or ours.past_key_values is given
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        same_caches(ours.past_key_values, theirs.past_key_values)
        for rows in ("logits", "scores"):
            assert len(getattr(ours, rows)) == 15
            torch.testing.assert_close(getattr(ours, rows), getattr(theirs, rows), atol=1e-5, rtol=0)
        kept = copy.deepcopy(ours.past_key_values)
        same_as_alone(assistant, models.prompt(9, 5))  # what serves others changes nothing of it
        same_caches(ours.past_key_values, kept)
        more = torch.cat([ours.sequences, models.prompt(3)], dim=1)
        assert answer(assistant.generate, more, past_key_values=ours.past_key_values) == answer(target.generate, more)
    assert len(fed) > 6


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_requests_of_other_kinds_go_through_the_targets_own_forward(
    architecture: str, untraced: None, fed: list[int]
) -> None:
    assistant = compiled(*small(architecture))
    ids = models.prompt(9)
    requests: Requests = [
        (ids, {"attention_mask": (torch.arange(9) != 4).long()[None]}),
        (ids, {"position_ids": torch.arange(9)[None] + 3}),
        (ids, {"output_hidden_states": True, "return_dict_in_generate": True}),
    ]
    for other, settings in requests:
        same_as_alone(assistant, other, **settings)
    with torch.autocast("cpu", torch.bfloat16):
        answer(assistant.generate, ids, learn=False)
    assert fed == []
    same_as_alone(assistant, ids, position_ids=torch.arange(9)[None])  # the usual ones
    assert len(fed) > 2


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_a_target_is_served_as_it_is_now(graphs: Graphs, fed: list[int], caplog: pytest.LogCaptureFixture) -> None:
    assistant, first = traced("llama")  # given back as it was
    target, ids, seen, made = assistant.target, models.prompt(), set(), len(first)

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
    assert len(first) + len(graphs) == made
    hook = layer.mlp.register_forward_hook(lambda module, args, output: output * -0.7)
    check("a hook")
    hook.remove()
    check("no hook", is_new=False)
    target.train()
    check("training", is_compiled=False, is_new=False)
    target.eval()
    layer.mlp = torch.nn.Linear(32, 32, dtype=torch.float64)
    check("another module")
    layer.mlp, layer.self_attn.o_proj.weight = mlp, weight
    with torch.no_grad():
        up.div_(-2)
    check("as it was", is_new=False)
    assert len(first) + len(graphs) == made + 2  # the hook and the other module, each once, for any number of tokens
    adapted = get_peft_model(target, LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False))
    check("an adapter")
    with adapted.disable_adapter():
        check("a disabled adapter", is_new=False)
    assert adapted.unload() is target
    target.requires_grad_(True)
    check("no adapter", is_new=False)
    assert len(first) + len(graphs) <= made + 4
    assert "not compiled" not in caplog.text


def test_a_target_that_computes_otherwise_when_compiled_runs_eagerly(
    graphs: Graphs, fed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = small()
    forward = type(target).forward

    def odd(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        output = forward(self, *args, position_ids=position_ids, **kwargs)
        if torch.compiler.is_compiling():
            output.logits = output.logits.roll(1, -1)
        return output

    target.__class__ = type(type(target).__name__, (type(target),), {"forward": odd})
    same_as_alone(compiled(target, draft), models.prompt())
    assert not fed
    assert "The target is not compiled and runs eagerly" in caplog.text
    assert "its logits differ" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # the compiler itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler: install g++")
@pytest.mark.parametrize("architecture", COMPILABLE)
def test_models_by_a_real_compiler_answer_and_count_as_eager_ones(
    architecture: str, fed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    positions = {"n_positions": 1024} if architecture == "gpt2" else {"max_position_embeddings": 1024}
    target, draft = small(architecture, **positions)
    assistant, eager = models.assistant_of(target, draft, **BOTH), models.assistant_of(target, draft)
    prompts = models.prompts(3)
    for k in (1, 3, 5, 12):
        for ids in prompts:
            same_as_alone(assistant, ids, num_assistant_tokens=k)
            answer(eager.generate, ids, num_assistant_tokens=k)
    same_as_alone(assistant, models.prompt(), SMALLEST_SIZE + 20)
    answer(eager.generate, models.prompt(), SMALLEST_SIZE + 20)
    assert assistant.stats == eager.stats
    assert {1, 2, 4, 6} <= set(fed)
    alone = [answer(target.generate, ids) for ids in prompts]
    assert served_together(assistant, prompts) == alone
    assistant.reset_stats()
    with torch.no_grad():
        for ours, theirs in zip(assistant.draft.parameters(), target.parameters(), strict=True):
            ours.copy_(theirs)
    assert [same_as_alone(assistant, ids) for ids in prompts] == alone
    assert assistant.stats.alpha == 1.0
    with torch.no_grad():
        target.lm_head.weight.copy_(target.lm_head.weight.roll(1, 0))
    assert [same_as_alone(assistant, ids) for ids in prompts] != alone
    assert "not compiled" not in caplog.text
