"""Systems side by side: what is counted, timed and predicted, `osd-hf bench`."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from models import fixed_k
from models import pair as tiny_pair
from models import prompts as tiny_prompts
from transformers import AutoModelForSeq2SeqLM  # noqa: F401 - loads lazily, which warns inside a test

from osd_hf import AcceptanceStats, capture_traces, expected_speedup
from osd_hf.cli.main import main
from osd_hf.errors import ConfigError, UnsupportedModelError
from osd_hf.evaluation.benchmark import BenchmarkReport, System, TimedAnswer, alone_systems, benchmark
from osd_hf.speedup import ForwardSeconds
from osd_hf.utils import context
from osd_hf.utils.context import choose_threads

TOKENS = 16


def systems_of(draft):
    return [
        System("alone", "alone"),
        System("kernels", "alone", kernels=True),
        System("lookup", "prompt_lookup", num_assistant_tokens=3),
        System("lookup, kernels", "prompt_lookup", num_assistant_tokens=3, kernels=True),
        System("stock", "stock", draft, 4),
        System("lean", "lean", draft, 4),
        System("auto", "lean", draft, "auto"),
    ]


@pytest.fixture(scope="module")
def models():
    return tiny_pair("llama")


@pytest.fixture(scope="module")
def prompts():
    ids = [p[0].tolist() for p in tiny_prompts(6)]
    return {"one": ids[:3], "two": ids[3:]}


@pytest.fixture(scope="module")
def report(models, prompts):
    target, draft = models
    return benchmark(target, systems_of(draft), prompts, max_new_tokens=TOKENS)


def test_every_system_gives_the_targets_own_tokens(report):
    for name, figures in report.to_dict()["by_dataset"]["all"].items():
        assert figures["outputs"] == {"identical": 6, "tied": 0, "differing": 0}, name
        assert figures["tokens"] == figures["emitted"] == 6 * TOKENS


def test_some_data_sets_are_sampled_with_one_seed_for_each_request(models, prompts):
    target, draft = models
    systems = [System("alone", "alone"), System("lookup", "prompt_lookup"), System("lean", "lean", draft, 3)]
    how = {"max_new_tokens": TOKENS, "sampling": {"one": {"temperature": 5.0, "top_k": 0}}}
    first, second = (benchmark(target, systems, prompts, **how) for _ in range(2))
    parts = first.to_dict()["by_dataset"]
    assert parts["one"]["lean"]["outputs"] == {"identical": 0, "tied": 0, "differing": 0}
    assert parts["two"]["lean"]["outputs"] == {"identical": 3, "tied": 0, "differing": 0}
    # The draft and the hot target agree less often than two greedy models.
    assert parts["one"]["lean"]["alpha"] != parts["two"]["lean"]["alpha"]
    assert [first.stats_of(s.name) for s in systems] == [second.stats_of(s.name) for s in systems]
    with pytest.raises(ConfigError, match="unknown data sets: three"):
        benchmark(target, systems, prompts, max_new_tokens=TOKENS, sampling={"three": {}})


def test_data_sets_add_up_to_all_of_them(report):
    data = report.to_dict()["by_dataset"]
    assert list(data) == ["one", "two", "all"]
    for name in data["all"]:
        for key in ("requests", "tokens", "seconds", "drafted", "examined", "accepted", "target_forwards"):
            assert data["one"][name][key] + data["two"][name][key] == pytest.approx(data["all"][name][key])


def test_the_target_alone_emits_a_token_a_forward(report):
    figures = report.figures("alone")
    assert (figures["block_efficiency"], figures["alpha"], figures["drafted"]) == (1.0, None, 0)
    assert figures["times_alone"]["median"] == 1.0
    assert figures["predicted"] is None


def test_counts_are_those_of_a_capture(report, models, prompts):
    target, draft = models
    traces = []
    own = fixed_k(copy.deepcopy(draft), 4)
    with capture_traces(target, traces.append):
        for ids in [*prompts["one"], *prompts["two"]]:
            inputs = torch.tensor([ids])
            target.generate(
                inputs, attention_mask=torch.ones_like(inputs), assistant_model=own, do_sample=False,
                max_new_tokens=TOKENS,
            )  # fmt: skip
    captured = sum(map(AcceptanceStats.from_trace, traces), AcceptanceStats())
    assert 0 < captured.alpha < 1
    assert report.stats_of("stock") == captured
    assert report.stats_of("lean") == captured


@pytest.fixture
def made_up():
    stats = AcceptanceStats.from_counts(drafted=40, examined=20, accepted=10, emitted=30, target_forwards=10)
    plain = AcceptanceStats.from_counts(drafted=0, examined=0, accepted=0, emitted=30, target_forwards=30)
    systems = (System("alone", "alone"), System("lean", "lean", object(), 4))
    return BenchmarkReport(
        systems,
        {
            "d": {
                "alone": [TimedAnswer(30, seconds, 0.1, plain, "identical", None) for seconds in (3.0, 3.0, 6.0)],
                "lean": [TimedAnswer(30, seconds, 0.1, stats, "identical", None) for seconds in (1.5, 1.0, 6.0)],
            }
        },
        {},
        {"lean": ForwardSeconds(0.1, 0.005, 0.02)},
    )


def test_ratios_are_medians_of_what_each_request_took(made_up):
    assert made_up.ratio("lean", "alone")["median"] == 2.0
    assert made_up.ratio("alone", "lean", "d")["median"] == 0.5
    assert made_up.ratio("lean", "alone")["interval"] == [1.0, 3.0]


def test_the_faster_of_two_targets_alone_is_the_baseline(made_up):
    answers = made_up.answers["d"] | {"static": made_up.answers["d"]["lean"]}
    systems = (*made_up.systems, System("static", "alone", compile_target=True))
    report = replace(made_up, systems=systems, answers={"d": answers})
    assert report.alone == report.to_dict()["baseline"] == "static"
    assert [report.figures(name)["times_alone"]["median"] for name in ("lean", "alone")] == [1.0, 0.5]
    on_cuda = alone_systems(SimpleNamespace(device=torch.device("cuda")))
    assert [system.compile_target for system in on_cuda] == [False, True]


def test_a_fixed_k_is_predicted_by_the_cost_model(made_up):
    predicted = made_up.predicted("lean")
    assert predicted["c"] == pytest.approx(0.2)
    assert predicted["speedup"] == pytest.approx(expected_speedup(0.5, 4, 0.2))
    assert predicted["speedup_wide"] == pytest.approx(expected_speedup(0.5, 4, 0.25))
    assert predicted["bound"] == pytest.approx(expected_speedup(1, 4, 0.2))
    lean, alone = made_up.figures("lean"), made_up.figures("alone")
    assert lean["pooled_speedup"] == pytest.approx(lean["tokens_per_second"] / alone["tokens_per_second"])
    assert lean["round_seconds"] == pytest.approx((8.5 - 0.3) / 27)
    assert made_up.predicted("alone") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "quick"), "`kind` must be one of"),
        (("a", "stock"), "needs a draft"),
        (("a", "stock", object(), "auto"), 'Only a lean system drafts "auto"'),
        (("a", "lean", object(), 5, False, False, "both", (), True), "leave out `kernels` for 'a'"),
    ],
)
def test_a_system_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        System(*arguments)


@pytest.mark.parametrize(
    ("kinds", "data"),
    [(["lean"], {"d": [[3]]}), (["alone", "alone"], {"d": [[3]]}), (["alone"], {}), (["alone"], {"all": [[3]]}),
     (["alone"], {"d": []})],
)  # fmt: skip
def test_a_benchmark_without_sense_is_refused(models, kinds, data):
    target, draft = models
    systems = [System(f"{i}", kind, draft if kind == "lean" else None) for i, kind in enumerate(kinds)]
    with pytest.raises(ConfigError):
        benchmark(target, systems, data, max_new_tokens=4)


def test_an_encoder_decoder_is_refused():
    target, _ = tiny_pair("t5")
    with pytest.raises(UnsupportedModelError, match="decoder-only"):
        benchmark(target, [System("alone", "alone")], {"d": [[3]]}, max_new_tokens=4)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    path.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(12)))
    return path


def served(pair, rows, folder, *more):
    models = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--prompts", str(rows)]
    sizes = ["--num-requests", "2", "--learn-requests", "9", "--max-new-tokens", "8", "--threads", "1"]
    return ["bench", *models, *sizes, "--output-dir", str(folder), *more]


def test_the_command_times_static_and_learned_drafts(pair, rows, tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(served(pair, rows, folder, "--json", str(tmp_path / "report.json"))) == 0
    report = json.loads((folder / "report.json").read_text())
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert list(report["by_dataset"]) == ["all, sampled", "questions", "all"]
    names = [
        "target alone", "prompt lookup", "stock static", "lean static", "lean learned",
        *(f"auto, {source}" for source in ("draft only", "text only", "both")),
    ]  # fmt: skip
    assert list(report["by_dataset"]["questions"]) == names
    assert report["learned_from_requests"] == 9
    assert {part["requests"] for part in report["by_dataset"]["questions"].values()} == {2}
    assert (folder / "speedups.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    first_cells = [line.split("  ")[0] for line in out.splitlines()]
    assert [first_cells.count(name) for name in names] == [3] * len(names)


def test_bundled_prompts_are_answered_by_any_pair(pair, tmp_path):
    models = ["--target", str(pair / "target"), "--draft", str(pair / "draft")]
    sizes = ["--num-requests", "1", "--learn-requests", "0", "--max-new-tokens", "4", "--threads", "1"]
    assert main(["bench", *models, *sizes, "--output-dir", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report["by_dataset"]) == ["all, sampled", "sql", "math", "python", "finance", "all"]
    assert "auto, both" in report["by_dataset"]["all"]
    assert "lean learned" not in report["by_dataset"]["all"]


def test_a_differing_output_exits_with_1(pair, rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("osd_hf.evaluation.benchmark.compare_outputs", lambda *args: "differing")
    fewer = ["--learn-requests", "0", "--num-requests", "1", "--num-assistant-tokens", "2", "3"]
    arguments = served(pair, rows, tmp_path / "out", *fewer)
    assert main([*arguments, "--dtype", "bfloat16"]) == 0
    assert "wider forwards round differently in bfloat16" in capsys.readouterr().out
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "8 outputs DIFFER from the target's own." in out
    assert "stock static k=3" in out


@pytest.mark.parametrize(
    ("one", "all_cores", "chosen", "answers"), [(0.1, 0.08, 1, 11), (0.1, 0.06, 4, 11), (4.0, 2.0, 4, 3)]
)
def test_one_thread_answers_unless_all_are_clearly_faster(monkeypatch, one, all_cores, chosen, answers):
    taken, now = [], [0.0]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(context.os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(torch, "set_num_threads", taken.append)

    def answer():
        now[0] += one if taken[-1] == 1 else all_cores

    model = SimpleNamespace(device=torch.device("cpu"))
    assert choose_threads(model, answer, clock=lambda: now[0]) == (chosen, {"1": one, "4": all_cores})
    assert taken[-1] == chosen
    assert len(taken) == answers + 1


def test_the_target_alone_is_compiled_over_a_static_cache_as_transformers_has_it(models, monkeypatch):
    target, _ = models
    seen, generate = [], type(target).generate

    def noted(self, *args, **kwargs):
        seen.append(kwargs.get("cache_implementation"))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "generate", noted)
    systems = [
        System("alone", "alone"), System("compiled", "alone", compile_target=True), System("k", "alone", kernels=True)
    ]  # fmt: skip
    report = benchmark(target, systems, {"a": [[1, 5, 7]]}, max_new_tokens=6, measure_costs=True)
    assert set(seen) == {None, "static"}
    assert [answer.outcome for answer in report.answers_of("compiled")] == ["identical"]
    assert report.alone in ("alone", "compiled")
    with pytest.raises(ConfigError, match="Only a lean system"):
        System("a", "prompt_lookup", compile_target=True)
