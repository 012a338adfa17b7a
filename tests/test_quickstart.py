"""`osd-hf quickstart` on a tiny pair, and the parts it is made of."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from osd_hf import OnlineConfig
from osd_hf.bundled import DOMAINS
from osd_hf.cli.main import main
from osd_hf.cli.quickstart import split_prompts
from osd_hf.evaluation.benchmark import answer_greedily, compare_outputs

SIZES = {"learn_requests": 4, "later_requests": 3, "timed_requests": 2, "max_new_tokens": 8}
SMALLER = {"learn_requests": 2, "later_requests": 2, "timed_requests": 1, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def models(pair):
    return [AutoModelForCausalLM.from_pretrained(pair / name) for name in ("target", "draft")]


def arguments(pair, folder, **changes):
    sizes = [part for name, n in {**SIZES, **changes}.items() for part in (f"--{name.replace('_', '-')}", str(n))]
    models = ["--target", str(pair / "target"), "--draft", str(pair / "draft")]
    return ["quickstart", *models, *sizes, "--threads", "1", "--output-dir", str(folder), "--no-compile-target"]


@pytest.fixture(scope="module", autouse=True)
def untraced():
    """What would be compiled runs as it is, because compiling takes most of a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda step, **kwargs: step)
        yield


@pytest.fixture(scope="module")
def finished(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "quickstart"
    compiled = ["--compile-target", "--json", str(folder.with_suffix(".json"))]
    assert main([*arguments(pair, folder), *compiled]) == 0
    return folder


def test_the_report_has_each_domain_and_all_of_them(finished):
    report = json.loads((finished / "report.json").read_text())
    assert list(report["by_domain"]) == [*DOMAINS, "all"]
    every = report["by_domain"]["all"]
    for name in ("static", "learned"):
        parts = [report["by_domain"][domain][name] for domain in DOMAINS]
        assert sum(part["examined"] for part in parts) == every[name]["examined"]
        assert {part["emitted"] for part in parts} == {24}
    assert report["outputs"] == {"identical": 32, "tied": 0, "differing": 0}
    assert report["updates"] == 1  # the second was spread over requests that did not come any more
    assert report["learning_seconds"] > 0
    ways = ["target alone", "prompt lookup", "static draft", "learned draft", "learned draft, target compiled"]
    assert list(every["tokens_per_second"]) == ways
    assert report["provenance"]["seed"] == 0
    assert OnlineConfig(**report["defaults"]) == OnlineConfig()
    assert json.loads(finished.with_suffix(".json").read_text())["by_domain"]
    for name in ("learning.png", "domains.png"):
        assert (finished / name).read_bytes().startswith(b"\x89PNG")


def test_it_is_overwritten_and_the_table_is_narrow(finished, pair, capsys):
    assert main([*arguments(pair, finished, **SMALLER), "--compile-target"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith((*DOMAINS, "all ", "domain"))]
    assert len(table) == 12
    assert max(map(len, table)) <= 110
    assert lines[0].startswith("1. A small draft proposes tokens while its target answers 8 prompts, and learns")
    assert "Torch threads: 1." in lines[3]
    summary = r"Your draft alone now gives [\d.]+ tokens per target forward instead of [\d.]+, and with text answers "
    summary += r"come [\d.]+ times as fast as "
    compiled = r"from the target alone \(transformers' `generate`\), [\d.]+ times with the target compiled; "
    own = "every answer was the target's own, token for token."
    assert re.fullmatch(summary + compiled + re.escape(own), lines[-1])


def test_a_target_that_is_not_compiled_and_outputs_that_differ_are_told(pair, tmp_path, monkeypatch, capsys, caplog):
    def without_a_compiler(*args, **kwargs):
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(torch, "compile", without_a_compiler)
    monkeypatch.setattr("osd_hf.evaluation.benchmark.compare_outputs", lambda *args: "differing")
    assert main([*arguments(pair, tmp_path / "out", **SMALLER), "--compile-target"]) == 1
    shown = capsys.readouterr().out
    assert "with the target compiled" not in shown and "compiled x" not in shown
    assert "12 DIFFER" in shown
    assert "The target is not compiled and runs eagerly" in caplog.text


def test_later_prompts_pose_other_problems_than_those_learned_from():
    learned, later = split_prompts(60, 20, seed=0)
    assert {e.domain for e in learned[:20]} == set(DOMAINS)
    assert [e.domain for e in later] == [domain for domain in DOMAINS for _ in range(20)]
    assert not {(e.domain, e.problem) for e in learned} & {(e.domain, e.problem) for e in later}


def test_outputs_are_compared_token_by_token(models):
    target, _ = models
    prompt = [1, 40, 41]
    alone = answer_greedily(target, prompt, 6)
    assert compare_outputs(target, prompt, alone, list(alone)) == "identical"
    assert compare_outputs(target, prompt, alone, alone[:-1]) == "differing"
    assert compare_outputs(target, prompt, alone, [*alone[:2], 7, *alone[3:]]) == "differing"
    alone = alone[:1]  # a tie of the two best tokens is no difference
    other = 9 if alone != [9] else 10
    weight = target.lm_head.weight
    with torch.no_grad():
        before = weight[other].clone()
        weight[other] = weight[alone[0]]
        try:
            assert compare_outputs(target, prompt, alone, [other]) == "tied"
        finally:
            weight[other] = before
    assert compare_outputs(target, prompt, alone, [other]) == "differing"
