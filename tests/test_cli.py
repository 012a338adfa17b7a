"""The commands: help, exit codes, one line for what is wrong, JSON for machines; scores of recorded requests."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
from saved_pair import save_pair
from transformers import AutoModelForCausalLM

from osd_hf import CorrectionStore, OnlineConfig, replay
from osd_hf.cli.main import main, parse
from osd_hf.errors import LearnerError
from osd_hf.utils.report import json_text


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text('{"question": "one", "n": 1}\n{"question": "two", "n": 2}\n')
    return path


@pytest.mark.parametrize("command", [[], ["run"], ["bench"], ["quickstart"]])
def test_help_says_the_exit_codes(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert "exit codes: 0 done; 1" in capsys.readouterr().out


def test_the_list_of_commands_loads_no_model_library():
    """It is shown within a second."""
    code = "import sys, osd_hf.cli.main as c; sys.argv[1:] = ['--help']; c.main()"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True)
    assert "serve a stream of prompts" in done.stdout
    assert not [line for line in done.stderr.splitlines() if line.split()[-1] in ("torch", "transformers", "numpy")]


def run_arguments(pair, rows, folder):
    return {
        "--target": str(pair / "target"), "--draft": str(pair / "draft"), "--prompts": str(rows),
        "--column": "question", "--output-dir": str(folder), "--max-new-tokens": "8",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--target": None}, "--target must be given, or --pair bundled"),
        ({"--target": "no/such/model"}, "The model 'no/such/model' cannot be loaded"),
        ({"--max-new-tokens": "256"}, "leave no room for a prompt: the models have 256 positions"),
        ({"--num-assistant-tokens": "none"}, "--num-assistant-tokens must not be none"),
        ({"--json": "no such folder/report.json"}, "name a file in a folder that exists"),
        ({"--temperature": "0.5"}, "--temperature would change nothing without --do-sample"),
        ({"--divergence": "distance"}, "`divergence` must be one of forward_kl"),
        ({"--device": "cuda:99"}, "cannot be used"),
        ({"--report-to": "paper"}, "`report_to=['paper']`"),
        ({"--output-dir": "a folder in use"}, "is not empty"),
        ({"--output-dir": "a file"}, "The output folder"),
    ],
)
def test_bad_input_of_run_is_one_line_and_exits_with_2(pair, rows, tmp_path, capsys, changes, message):
    arguments = run_arguments(pair, rows, tmp_path / "run")
    arguments |= changes
    if arguments["--output-dir"] == "a folder in use":
        arguments["--output-dir"] = str(pair)
    if arguments["--output-dir"] == "a file":
        arguments["--output-dir"] = str(rows)
    given = [part for flag, value in arguments.items() if value is not None for part in (flag, value) if part]
    assert main(["run", *given]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("osd-hf: warning")]
    assert out == ""
    assert lines[-1].startswith("osd-hf: error: ")
    assert message in lines[-1]
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_the_papers_rule_can_be_changed_by_flags(pair, rows, tmp_path, capsys):
    arguments = run_arguments(pair, rows, tmp_path / "run")
    given = [part for item in arguments.items() for part in item]
    assert main(["run", *given, "--paper", "--learning-rate", "3e-5", "--num-logprobs", "none", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    config = {name.removeprefix("config."): v for name, v in report["settings"].items() if name.startswith("config.")}
    expected = OnlineConfig.paper(learning_rate=3e-5, num_logprobs=None).to_dict()
    expected.pop("update_strategy")  # a run learns between requests
    assert config == expected


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (LearnerError("no luck"), 1, "osd-hf: error: no luck\n"),
        (KeyboardInterrupt(), 130, "osd-hf: interrupted\n"),
        (OSError(28, "disk full"), 1, "osd-hf: error: [Errno 28] disk full\n"),
    ],
)
def test_a_failed_and_an_interrupted_run_have_their_own_exit_codes(monkeypatch, capsys, error, code, said):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("osd_hf.loading.load_bundled", fail)
    assert main(["run", "--pair", "bundled", "--output-dir", "never-made"]) == code
    assert capsys.readouterr().err == said


def test_a_report_with_what_json_has_no_number_for_is_json():
    assert json_text({"a": [math.nan, (math.inf, 1.5)], "b": {"c": -math.inf, "d": "x"}}) == (
        '{"a": [null, [null, 1.5]], "b": {"c": null, "d": "x"}}'
    )


def test_drafts_are_scored_on_recorded_requests_overall_and_by_domain(pair, store, traces, capsys):
    drafts = [str(pair / "draft"), str(pair / "target")]
    assert main(["bench", "--store", str(store), "--compare", *drafts, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert [entry["draft"] for entry in report["drafts"]] == ["draft", "target"]
    expected = replay(AutoModelForCausalLM.from_pretrained(pair / "draft"), traces, 5)
    static = report["drafts"][0]["static"]
    assert static["all"]["alpha"] == expected.alpha
    assert static["all"]["block_efficiency"] == expected.block_efficiency
    assert static["sql"]["emitted"] + static["math"]["emitted"] == static["all"]["emitted"]
    assert report["drafts"][1]["static"]["all"]["alpha"] == 1.0
    assert f"{expected.alpha:.3f}" in err


def test_the_newest_requests_are_scored(pair, store, traces, capsys):
    arguments = ["--store", str(store), "--compare", str(pair / "draft"), "--num-requests", "3"]
    assert main(["bench", *arguments, "--json", "-"]) == 0
    static = json.loads(capsys.readouterr().out)["drafts"][0]["static"]
    assert static["all"]["emitted"] == sum(map(len, traces[-3:]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store", "{foreign}"], "is not a store of this package"),
        (["--store", "{empty}"], "no recordings to replay"),
        (["--store", "{store}", "--compare", "{padded}"], "A trace has a vocabulary of 300 tokens, the draft 320"),
    ],
)
def test_bad_input_of_a_score_is_one_line_and_exits_with_2(pair, store, tmp_path, capsys, arguments, message):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    places = {"store": store, "foreign": tmp_path / "foreign", "padded": tmp_path / "padded" / "draft"}
    CorrectionStore(tmp_path / "empty").close()
    places["empty"] = tmp_path / "empty"
    if "{padded}" in arguments:
        save_pair(tmp_path / "padded", vocab_size=320)
    given = [argument.format(**places) for argument in arguments]
    drafts = [] if "--compare" in given else ["--compare", str(pair / "draft")]
    assert main(["bench", *given, *drafts]) == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "value"), [(["--compile-draft"], True), (["--compile-draft", "false"], False), ([], "auto")]
)
def test_a_setting_that_is_true_or_false_or_a_word_is_a_flag(flags, value):
    assert parse(["run", "--pair", "bundled", *flags])[1][1].compile_draft == value


def test_a_command_starts_where_nothing_is_said_of_telemetry():
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_TELEMETRY"}
    code = "from osd_hf.cli import main; main.disable_telemetry(); print(main.os.environ['HF_HUB_DISABLE_TELEMETRY'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
