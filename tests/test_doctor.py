"""The recipe that checks an engine: the right draft is healthy, and every other one is found."""

from __future__ import annotations

import copy
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from fake_counters import ROUND_SECONDS, CountingEngine, counting_engine, rounds
from saved_pair import save_pair
from transformers import AutoModelForCausalLM, AutoTokenizer

from osd_hf import CorrectionStore
from osd_hf.decoding.hook import record_traces
from osd_hf.errors import ServerError
from osd_hf.prompts import encode_turn

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
doctor: Any = importlib.import_module("doctor")
Counts, Window, fit, judge_draft, judge_speed = (
    doctor.EngineCounters, doctor.Window, doctor.fit, doctor.judge_draft, doctor.judge_speed,
)  # fmt: skip
K, REQUESTS, NEW_TOKENS = 3, 16, 12
NOISES = {"v000001": 0.05, "v000002": 0.03, "v000003": 0.015}
Run = Callable[..., tuple[int, dict[str, Any], str]]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, three versions of a draft, and prompts."""
    folder = save_pair(tmp_path_factory.mktemp("doctor"))
    target = load(folder / "target")
    for number, (name, noise) in enumerate(NOISES.items(), 1):
        draft = copy.deepcopy(target)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter += noise * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        draft.save_pretrained(folder / "versions" / name)
        (folder / "versions" / name / "version.json").write_text(json.dumps({"version": number}))
    (folder / "versions" / "latest").symlink_to("v000003")
    lines = [json.dumps({"text": f"what is {i}?"}) for i in range(2 * REQUESTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def drafts(saved: Path) -> dict[str, Any]:
    return {name: load(saved / "versions" / name) for name in NOISES}


@pytest.fixture(scope="module")
def serving(saved: Path) -> Iterator[CountingEngine]:
    with counting_engine(load(saved / "target"), k=K) as engine:
        yield engine


@pytest.fixture
def engine(serving: CountingEngine, drafts: dict[str, Any]) -> CountingEngine:
    serving.set(drafts["v000003"], k=K)
    return serving


@pytest.fixture
def run(saved: Path, engine: CountingEngine, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the recipe; returns the exit code, findings by what they are about, and the printed text."""

    def run(*more: str, draft: str = "versions/latest") -> tuple[int, dict[str, Any], str]:
        prompts = [] if "--store" in more else ["--prompts", str(saved / "prompts.jsonl"), "--column", "text"]
        arguments = [
            "doctor", "--url", engine.address, "--target", str(saved / "target"), "--draft", str(saved / draft),
            "--num-requests", str(REQUESTS), "--concurrency", "2", "--max-new-tokens",
            str(NEW_TOKENS), "--json", str(tmp_path / "report.json"), *prompts, *more,
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", arguments)
        code = doctor.main()
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["verdict"] == ("healthy", "ill", "unknown")[code]
        found = {finding["about"]: finding for finding in report["findings"] if finding["state"] != "note"}
        return code, found, capsys.readouterr().out

    return run


def test_the_right_draft_is_healthy(run: Run, engine: CountingEngine) -> None:
    code, found, said = run()
    assert code == 0
    figures = found["draft"]["figures"]
    assert figures["rounds"] == figures["rounds_counted"] == engine.counts["drafts_total"] > 40
    assert figures["equal_windows"] == figures["windows"] == REQUESTS // 2
    assert abs(figures["alpha_counted"] - figures["alpha_draft"]) < 0.02
    assert "v000003 has" in said


@pytest.mark.parametrize("name", ["v000001", "v000002"])
def test_an_older_version_is_named(run: Run, engine: CountingEngine, drafts: dict[str, Any], name: str) -> None:
    engine.set(drafts[name])
    code, found, said = run()
    assert code == 1
    assert f"stale weights; {name} fits" in said
    assert found["draft"]["figures"]["best_version"] == name


def test_weights_that_are_no_version_are_told(run: Run, engine: CountingEngine, drafts: dict[str, Any]) -> None:
    wrong = copy.deepcopy(drafts["v000003"])
    with torch.no_grad():  # the head of another checkpoint
        wrong.lm_head.weight.copy_(wrong.lm_head.weight.roll(1, 0))
    engine.set(wrong)
    code, found, said = run()
    assert code == 1
    assert "stale or wrongly loaded weights, and no other version fits" in said
    assert found["draft"]["figures"]["alpha_counted"] < 0.1 < found["draft"]["figures"]["alpha_draft"]


def test_an_engine_without_a_draft_is_told(run: Run, engine: CountingEngine, drafts: dict[str, Any]) -> None:
    engine.set(None)
    assert run()[0] == 1
    engine.set(drafts["v000003"])
    engine.is_idle = True
    code, found, _ = run()
    assert code == 1
    assert "drafted nothing for" in found["draft"]["text"]


def test_another_vocabulary_is_told_before_anything_is_asked(run: Run, engine: CountingEngine, saved: Path) -> None:
    wide = save_pair(saved / "wide", vocab_size=320)
    code, found, _ = run(draft=str(wide / "draft"))
    assert (code, engine.number) == (1, 0)
    assert "the draft has 320 tokens, the target 300" in found["vocabulary"]["text"]


# --- what cannot be told --------------------------------------------------------------------------------------------


def test_windows_with_other_clients_are_left_out(run: Run, engine: CountingEngine, drafts: dict[str, Any]) -> None:
    engine.set(drafts["v000003"], foreign={0: 40, 5: 40})
    code, found, _ = run()
    assert code == 0
    assert found["draft"]["figures"]["windows"] == 8


def test_what_is_no_engine_of_vllm_or_another_one_is_not_judged(
    run: Run, engine: CountingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.instead_of_metrics = "osd_hf_proxy_requests_total 3.0\n"
    code, found, _ = run()
    assert code == 2
    assert "name the engine itself" in found["engine"]["text"]
    engine.set(engine.draft)
    engine.is_elsewhere = True
    monkeypatch.setattr(doctor, "SETTLE_SECONDS", 0.0)
    code, found, _ = run()
    assert code == 2
    assert "several engines share the address" in found["engine"]["text"]


def test_counters_are_read_and_a_restart_is_told() -> None:
    text = "\n".join([
        '# TYPE vllm:generation_tokens_total counter', 'vllm:generation_tokens_total{engine="0"} 7.0',
        'vllm:generation_tokens_total{engine="1"} 5.0', 'vllm:spec_decode_num_drafts_total{engine="0"} 3.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0"} 6.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 1.0',
        'vllm:inter_token_latency_seconds_count{engine="0"} 4.0', 'vllm:inter_token_latency_seconds_sum 0.5',
    ])  # fmt: skip
    counts = Counts.read(text)
    assert (counts.tokens, counts.drafts, counts.k, counts.alpha) == (12, 3, 2, 3 / 5)
    assert counts.round_seconds == 0.125
    with pytest.raises(ServerError, match="restarted"):
        counts - Counts(counts.values + 1)


# --- the target -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_changed", [False, True])
def test_answers_are_compared_with_those_of_the_store(
    run: Run, saved: Path, drafts: dict[str, Any], tmp_path: Path, is_changed: bool
) -> None:
    target = drafts["v000002"] if is_changed else load(saved / "target")
    tokenizer = AutoTokenizer.from_pretrained(saved / "target")
    prompts = [encode_turn(tokenizer, f"what is {i}?") for i in range(REQUESTS)]
    with CorrectionStore(tmp_path / "store") as store:
        for trace in record_traces(target, prompts, max_new_tokens=8, num_logprobs=8):
            store.append(trace)
    code, found, _ = run("--store", str(tmp_path / "store"))
    assert code == is_changed
    assert found["target"]["state"] == ("ill" if is_changed else "healthy")
    assert found["draft"]["state"] == "healthy"  # whose rounds follow from the answers of now
    assert found["target"]["figures"]["differing"] == 0 or is_changed


# --- the speed ------------------------------------------------------------------------------------------------------


def test_what_drafting_is_worth_follows_from_the_round(windows: list[Any], run: Run) -> None:
    counts = Counts.total(window.counts for window in windows)
    per_round = 1 + counts.accepted / counts.drafts
    assert judge_speed(counts, None).state == "note"
    assert f"more than {1e3 * ROUND_SECONDS / per_round:.1f} ms" in judge_speed(counts, None).text
    assert judge_speed(counts, ROUND_SECONDS / per_round * 1.2).state == "healthy"
    lost = judge_speed(counts, ROUND_SECONDS / per_round / 1.2)
    assert (lost.state, lost.figures["speedup"]) == ("ill", pytest.approx(1 / 1.2))
    assert run("--token-seconds", "1e-4")[0] == 1


# --- no false alarm -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft() -> Any:
    return models.draft_of(models.build(num_hidden_layers=1), noise=0.3)


@pytest.fixture(scope="module")
def answered(draft: Any) -> list[tuple[Any, list[int], int]]:
    """Answers; the rounds of an engine that drafts in half precision; and those that it takes in single precision."""
    target, prompts = models.build(num_hidden_layers=1), [ids[0].tolist() for ids in models.prompts(64)]
    traces = list(record_traces(target, prompts, max_new_tokens=20, num_logprobs=4))
    half, found = copy.deepcopy(draft).bfloat16(), []
    for trace in traces:
        told = trace.completion_ids.tolist()
        both = [rounds(d, trace.prompt_ids.tolist(), told + [0] * K, len(told), K) for d in (half, draft)]
        found.append((trace, both[0], len(both[1])))
    return found


def in_windows(answered: list[tuple[Any, list[int], int]], size: int = 4) -> list[Any]:
    """As an engine counts them."""
    windows = []
    for first in range(0, len(answered), size):
        part = answered[first : first + size]
        accepted = [n for _, found, _ in part for n in found]
        places = [sum(n > i for n in accepted) for i in range(K)]
        rounds, tokens = len(accepted), sum(len(trace) for trace, _, _ in part)
        values = [rounds, K * rounds, tokens, rounds, rounds * ROUND_SECONDS, *places]
        windows.append(Window(tuple(trace for trace, _, _ in part), Counts(np.array(values, float))))
    return windows


@pytest.fixture(scope="module")
def windows(answered: list[tuple[Any, list[int], int]]) -> list[Any]:
    return in_windows(answered)


def test_rounds_are_replayed_as_the_engine_drafts(answered: list[tuple[Any, list[int], int]], draft: Any) -> None:
    found = fit(in_windows(answered, 1), draft, "it")
    assert found.rounds.tolist() == [rounds for _, _, rounds in answered]


def test_the_right_draft_raises_no_alarm_in_twenty_samples(
    answered: list[tuple[Any, list[int], int]], draft: Any
) -> None:
    off = 0.0
    for seed in range(20):
        some = in_windows(random.Random(seed).sample(answered, 48))
        found = fit(some, draft, "it")
        assert judge_draft(some, found, ()).state == "healthy"
        off += found.difference.sum()
    assert off > 0  # half precision rounds otherwise now and then


def test_what_is_drafted_after_the_end_is_counted_as_the_engine_does() -> None:
    target = models.build(num_hidden_layers=1)
    [trace] = record_traces(target, [models.prompt()[0].tolist()], max_new_tokens=11, num_logprobs=4)
    counts = Counts(np.zeros(5 + K))
    assert fit([Window((trace,), counts)], target, "it").alpha == 1.0  # the answer would go on
    ended = replace(trace, sampling={**trace.sampling, "eos_token_id": [int(trace.completion_ids[-1])]})
    assert fit([Window((ended,), counts)], target, "it").alpha == 8 / 9  # rounds of 4, 4 and 2 tokens


def test_a_target_that_says_the_same_less_surely_has_changed() -> None:
    target, prompts = models.build(num_hidden_layers=1), [ids[0].tolist() for ids in models.prompts(4)]
    known = list(record_traces(target, prompts, max_new_tokens=8))  # whole rows
    with torch.no_grad():
        target.lm_head.weight.mul_(0.8)
    now = list(record_traces(target, prompts, max_new_tokens=8, num_logprobs=20))
    finding = doctor.judge_target(list(zip(known, now, strict=True)), "those of before")
    assert (finding.state, finding.figures["differing"]) == ("ill", 0)
    assert doctor.judge_target(list(zip(now, now, strict=True)), "its own").figures["mean_total_variation"] == 0
