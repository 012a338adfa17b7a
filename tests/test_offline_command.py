"""`osd-hf distill`: settings of a file and of flags, data of files and stores, what is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import osd_hf
from osd_hf import replay
from osd_hf.cli.distill import distill_command, make_parser
from osd_hf.cli.main import main
from osd_hf.errors import ConfigError, DataError, StoreError
from osd_hf.prompts import encode_turn
from osd_hf.recording import record_traces

SMALL = ["--max-steps", "2", "--per-device-train-batch-size", "2", "--max-new-tokens", "5", "--save-strategy", "no"]
SMALL += ["--report-to", "none", "--learning-rate", "1e-3"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    lines = [{"prompt": f"add {i}", "completion": f"= {i}", "question": f"what is {i}?"} for i in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def parsed(*flags: Any) -> Any:
    return make_parser([]).parse_settings(list(map(str, flags)))


def unchecked(*flags: Any) -> Any:
    parser = make_parser([])
    return parser.make_settings(parser.read(list(map(str, flags))))


def command(folder: Path, *flags: Any) -> int:
    return distill_command(*parsed("--output-dir", folder, *flags))


def report(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


def test_prompts_are_distilled_and_the_draft_is_written(tmp_path: Path, pair: Path, rows: Path, capsys: Any) -> None:
    flags = ["--target", pair / "target", "--draft", pair / "draft", "--prompts", rows, "--column", "question"]
    assert command(tmp_path, *flags, "--num-held-out", 3, "--sample-source", "mix_request", *SMALL) == 0
    found = report(tmp_path)
    assert found["num_requests"] == 5
    assert found["settings"]["sample_source"] == "mix_request"
    assert found["settings"]["learning_rate"] == 1e-3
    assert list(found["alpha"]) == ["0", "2"]
    learned = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    target = AutoModelForCausalLM.from_pretrained(pair / "target")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "draft")
    held_out = [encode_turn(tokenizer, f"what is {i}?") for i in (5, 6, 7)]
    assert replay(learned, list(record_traces(target, held_out, max_new_tokens=5))).alpha == found["alpha"]["2"]
    assert "2 steps. Wrote draft/ and report.json" in capsys.readouterr().out


def test_prompts_are_the_target_s_and_the_draft_keeps_its_tokenizer(
    tmp_path: Path, pair: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tmp_path / "draft_without_template"
    AutoModelForCausalLM.from_pretrained(pair / "draft").save_pretrained(draft)
    tokenizer = AutoTokenizer.from_pretrained(pair / "draft")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(draft)
    read = []
    monkeypatch.setattr(
        osd_hf,
        "distill",
        lambda dataset, real=osd_hf.distill, **kw: read.append(dataset) or real(dataset=dataset, **kw),
    )
    flags = ["--target", pair / "target", "--draft", draft, "--prompts", rows, "--column", "question", *SMALL]
    assert command(tmp_path / "out", *flags) == 0
    assert read[0][0]["prompt"] == encode_turn(AutoTokenizer.from_pretrained(pair / "target"), "what is 0?")
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "draft").chat_template is None


def test_prompts_without_room_for_an_answer_are_left_out(tmp_path: Path, pair: Path, caplog: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": text}) + "\n" for text in ("a", "b" * 300, "", "c")))
    flags = ["--target", pair / "target", "--draft", pair / "draft", "--prompts", path, "--column", "question"]
    assert command(tmp_path / "out", *flags, "--num-requests", 2, *SMALL) == 0
    assert report(tmp_path / "out")["num_requests"] == 2
    assert (
        "Skipped 2 of 4 prompts: row 1: more than the 251 tokens that there is room for; row 2: no text."
        in caplog.text
    )


def test_a_store_is_distilled_without_a_target(tmp_path: Path, pair: Path, store: Path, capsys: Any) -> None:
    flags = ["--output-dir", tmp_path, "--draft", pair / "draft", "--store", store, "--num-held-out", 2, "--json", "-"]
    assert main(["distill", *map(str, flags), *SMALL]) == 0
    printed = json.loads(capsys.readouterr().out)  # nothing but the report
    assert printed == report(tmp_path)
    assert printed["num_requests"] == 14


def test_every_setting_is_a_flag_and_a_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "distill.yaml"
    path.write_text("eval_strategy: no\nweight_decay: 1e-2\nbf16: false\nsubset: null\nreport_to: [none]\n")
    assert unchecked("--draft", "d", f"--config={path}")[1].weight_decay == 0.01
    more = ["--draft", "d", "--adam-beta2", "0.9", "--save_steps", "7", "--resume-from-checkpoint", "true"]
    settings, training = unchecked(*more, "--hub-private-repo", "false", "--config", path, "--weight-decay", "0")
    assert (training.weight_decay, training.adam_beta2, training.save_steps) == (0, 0.9, 7)
    assert (training.eval_strategy, settings.subset) == ("no", None)
    assert (training.resume_from_checkpoint, training.hub_private_repo) == (True, False)
    assert unchecked("--draft", "d")[1].to_dict() == osd_hf.DistillConfig("osd_hf_distill").to_dict()


def test_a_missing_extra_names_the_pip_command(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delitem(sys.modules, "osd_hf.distillation.trainer", raising=False)
    monkeypatch.delitem(vars(osd_hf), "DistillConfig", raising=False)
    monkeypatch.setitem(sys.modules, "trl.experimental.gkd", None)
    assert main(["distill", "--help"]) == 2
    assert "pip install 'osd-hf[distill]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- draft", "must hold names with values"),
        ("divergence: kl", "`divergence` must be one of"),
        ("batch_eval_metrics: true\nfp16: true\nbf16: true", "settings do not go together: "),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(
    tmp_path: Path, pair: Path, store: Path, text: str, message: str
) -> None:
    path = tmp_path / "distill.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        command(tmp_path, "--config", path, "--draft", pair / "draft", "--store", store)


def test_flags_that_make_no_sense_are_refused(tmp_path: Path, pair: Path, rows: Path, store: Path) -> None:
    draft = ["--draft", pair / "draft"]
    with pytest.raises(ConfigError, match="Name the data"):
        command(tmp_path, *draft)
    with pytest.raises(ConfigError, match="--prompts and --store exclude each other"):
        command(tmp_path, *draft, "--store", store, "--prompts", rows)
    with pytest.raises(ConfigError, match="--eval-store and --num-held-out exclude each other"):
        command(tmp_path, *draft, "--store", store, "--num-held-out", 2, "--eval-store", store)
    for flag in (["--dtype", "float16"], ["--no-chat-template"]):
        with pytest.raises(ConfigError, match="would change nothing without"):
            command(tmp_path, *draft, "--store", store, *flag)
    with pytest.raises(DataError, match="leaves nothing of 16 requests"):
        command(tmp_path, *draft, "--store", store, "--num-held-out", 16)
    with pytest.raises(StoreError, match="There is no store"):
        command(tmp_path, *draft, "--store", tmp_path / "missing")
