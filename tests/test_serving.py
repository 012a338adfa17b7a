"""`osd-hf run`: what it writes, and that a killed run ends as one that was not."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from models import rounding
from processes import run_python
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from osd_hf import CorrectionStore, OnlineAssistant
from osd_hf.cli.main import main
from osd_hf.learning import session
from osd_hf.prompts import encode_turn

REQUESTS, NEW_TOKENS = 14, 8
LEARNING = [  # without the gate each update is a version
    "--update-interval", "4", "--steps-per-update", "1", "--batch-size", "4", "--optimizer", "adamw",
    "--learning-rate", "3e-3", "--no-gate",
]  # fmt: skip
OFTEN = ["--save-every", "1"]
SAMPLING = ["--do-sample", "--temperature", "0.8", "--top-k", "20", "--seed", "3"]


@pytest.fixture(autouse=True)
def unplotted(monkeypatch):
    """Only the run of `straight`, which is made before, draws its figure."""
    monkeypatch.setattr("osd_hf.evaluation.display.plot_learning", lambda *args, **kwargs: None)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"question": f"quux {i} {'ab'[i % 2] * (i % 5)}", "kind": "ab"[i // 7]} for i in range(REQUESTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(pair, prompts, folder, *more):
    return [
        "run", "--target", str(pair / "target"), "--draft", str(pair / "draft"), "--prompts", str(prompts),
        "--column", "question", "--domain-column", "kind", "--max-new-tokens", str(NEW_TOKENS),
        "--output-dir", str(folder), *LEARNING, *more,
    ]  # fmt: skip


def interrupt(monkeypatch, request, number=None):
    """Send a signal, or else end as by Ctrl-C, while the request of this number is being served."""
    generate, calls = OnlineAssistant.generate, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == request:  # the answer in progress is dropped
            if number is None:
                raise KeyboardInterrupt
            signal.raise_signal(number)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(OnlineAssistant, "generate", interrupted)


def comparable(folder):
    """Everything that two equal runs share: the report and the journal without times, the draft's weights."""
    report = json.loads((folder / "report.json").read_text())
    for name in ("provenance", "seconds", "learning_seconds", "saved_seconds", "tokens_per_second", "speedup"):
        del report[name]
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    for update in [*report["updates"], *(line["update"] for line in lines if line["update"])]:
        del update["seconds"]
        # Of sampled requests these are expectations, whose last digits depend on what was replayed in one batch: at
        # most by what sums of the probabilities of 300 tokens round.
        for name in ("alpha_before", "alpha_after", "standard_error") if update["decision"] else ():
            if update["decision"][name] is not None:
                update["decision"][name] = pytest.approx(update["decision"][name], abs=rounding(300))
    for line in lines:
        del line["seconds"], line["learning_seconds"]
    return report, lines, load_file(folder / "draft" / "model.safetensors")


def assert_same_run(one, other):
    (report, lines, weights), (other_report, other_lines, other_weights) = comparable(one), comparable(other)
    assert report == other_report
    assert lines == other_lines
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.fixture(scope="module")
def straight(pair, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert main(arguments(pair, prompts, folder)) == 0
    return folder


def test_a_run_leaves_report_journal_plot_draft_and_session(straight, pair):
    report = json.loads((straight / "report.json").read_text())
    lines = [json.loads(line) for line in (straight / "journal.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(REQUESTS))
    assert report["overall"]["requests"] == REQUESTS
    for side in ("learned", "frozen"):
        accepted, examined = (sum(line[side][name] for line in lines) for name in ("accepted", "examined"))
        assert report["overall"][side]["alpha"] == accepted / examined
    assert list(report["by_domain"]) == ["a", "b"]
    assert [update["after_requests"] for update in report["updates"]] == [4, 8, 12]
    assert [line["draft_version"] for line in lines] == [i // 4 for i in range(REQUESTS)]
    assert report["settings"]["target"] == "target"
    assert (straight / "learning.png").read_bytes().startswith(b"\x89PNG")
    draft = AutoModelForCausalLM.from_pretrained(straight / "draft")
    before = AutoModelForCausalLM.from_pretrained(pair / "draft")
    assert not torch.equal(draft.lm_head.weight, before.lm_head.weight)
    assert AutoTokenizer.from_pretrained(straight / "draft").chat_template is not None


def test_learned_and_frozen_agree_until_the_first_update_and_part_after_it(straight):
    lines = [json.loads(line) for line in (straight / "journal.jsonl").read_text().splitlines()]
    counts = ("examined", "accepted", "emitted", "target_forwards", "accepted_length_histogram")
    same = [all(line["learned"][name] == line["frozen"][name] for name in counts) for line in lines]
    assert all(same[:4])
    assert not all(same[4:])


def test_no_prompt_and_no_folder_is_written_where_it_might_be_shared(straight):
    for name in ("journal.jsonl", "report.json", "settings.json"):
        assert "quux" not in (straight / name).read_text()
    assert str(straight.parent) not in (straight / "report.json").read_text()


def test_kept_answers_are_the_targets_own(pair, prompts, tmp_path):
    assert main(arguments(pair, prompts, tmp_path / "run", "--keep-text", "--num-requests", "6")) == 0
    target = AutoModelForCausalLM.from_pretrained(pair / "target")
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    for line in lines:
        ids = torch.tensor([encode_turn(tokenizer, line["prompt"])])
        alone = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)
        assert line["answer"] == tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)


KILLED = """
import os, signal, sys
from osd_hf import OnlineAssistant
from osd_hf.cli.main import main
generate, calls = OnlineAssistant.generate, []
def killed(self, *args, **kwargs):
    calls.append(1)
    output = generate(self, *args, **kwargs)
    if len(calls) == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    return output
OnlineAssistant.generate = killed
main(sys.argv[1:])
"""


def test_a_run_killed_between_two_saves_ends_as_one_that_was_not(straight, pair, prompts, tmp_path):
    folder, store = tmp_path / "run", tmp_path / "store"
    done = run_python(KILLED, *arguments(pair, prompts, folder, *OFTEN, "--store", str(store)))
    assert done.returncode == -signal.SIGKILL
    assert len((folder / "journal.jsonl").read_text().splitlines()) == 10
    with (folder / "journal.jsonl").open("a") as journal:
        journal.write('{"index": 10, "dom')
    assert len(CorrectionStore(store)) == 8
    assert main(arguments(pair, prompts, folder, "--resume", "--store", str(store))) == 0
    assert_same_run(folder, straight)
    assert [trace.domain for trace in CorrectionStore(store)] == ["a"] * 7 + ["b"] * 7


def test_an_interrupted_sampled_run_goes_on_with_the_same_draws(pair, prompts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("osd_hf.learning.requests.HOLD_BACK_EVERY", 2)  # enough to judge by, sooner
    how = [*SAMPLING, *OFTEN, "--gate"]
    arguments_of = lambda name, *more: arguments(pair, prompts, tmp_path / name, *how, *more)  # noqa: E731
    assert main(arguments_of("straight")) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, 11)
        assert main(arguments_of("resumed")) == 130
    folder = str(tmp_path / "resumed")
    assert f"osd-hf: interrupted: go on with: osd-hf run --resume --output-dir {folder}" in capsys.readouterr().err
    assert main(["run", "--resume", "--output-dir", folder]) == 0
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")
    updates = json.loads((tmp_path / "straight" / "report.json").read_text())["updates"]
    assert updates[-1]["decision"]["alpha_after"] is not None  # the gate has judged


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_a_resumed_run_needs_no_flags(
    straight, pair, prompts, tmp_path, monkeypatch, capsys, number
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt(patch, 8, number)
        assert main(arguments(pair, prompts, folder)) == 130
    assert f"7 of {REQUESTS} requests are saved in {folder}; go on with: osd-hf run --res" in capsys.readouterr().err
    assert len((folder / "journal.jsonl").read_text().splitlines()) == 7
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--resume", "--output-dir", "run", "--learning-rate", "1"]) == 2
    assert "config.learning_rate was 0.003, is 1.0" in capsys.readouterr().err
    assert main(["run", "--resume", "--output-dir", "run"]) == 0
    assert_same_run(folder, straight)


def test_there_is_nothing_to_resume(tmp_path, capsys):
    assert main(["run", "--resume", "--output-dir", str(tmp_path / "run")]) == 2
    assert f"There is no run in {tmp_path / 'run'} to resume." in capsys.readouterr().err


def test_resuming_with_other_settings_names_them(straight, pair, prompts, capsys):
    more = ["--resume", "--replay-fraction", "0.1", "--num-requests", "9", "--draft", str(pair / "target")]
    assert main(arguments(pair, prompts, straight, *more)) == 2
    message = capsys.readouterr().err
    for name in ("config.replay_fraction was 0.75, is 0.1", "requests was 14, is 9", "draft was", "fingerprint"):
        assert name in message
    assert "batch_size" not in message
    assert main(arguments(pair, prompts, straight, "--resume", "--paper")) == 2
    assert "paper was None, is True" in capsys.readouterr().err


def test_resuming_a_complete_run_keeps_its_report(pair, prompts, tmp_path):
    more = ["--num-requests", "2"]
    assert main(arguments(pair, prompts, tmp_path / "run", *more)) == 0
    place = tmp_path / "run" / "report.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "speedup": 1.25}))
    assert main(["run", "--resume", "--output-dir", str(tmp_path / "run")]) == 0
    report = json.loads(place.read_text())
    assert (report["speedup"], report["overall"]["requests"]) == (1.25, 2)
    assert "config.update_strategy" not in report["settings"]


def test_a_journal_that_lost_lines_is_refused(pair, prompts, tmp_path, capsys):
    more = ["--num-requests", "5"]
    assert main(arguments(pair, prompts, tmp_path / "run", *more)) == 0
    (tmp_path / "run" / "journal.jsonl").write_text("")
    assert main(arguments(pair, prompts, tmp_path / "run", *more, "--resume")) == 2
    assert "has 0 of the 5 saved requests" in capsys.readouterr().err


def test_without_learning_the_journal_alone_says_where_to_go_on(pair, prompts, tmp_path, monkeypatch, caplog, capsys):
    assert main(arguments(pair, prompts, tmp_path / "straight", "--no-learn", "--resume")) == 0
    assert "straight to resume: a new one starts." in caplog.text
    assert "--optimizer, --gate would change nothing without --learn" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        interrupt(patch, 8)
        assert main(arguments(pair, prompts, tmp_path / "run", "--no-learn")) == 130
    assert not (tmp_path / "run" / "state").exists()
    with (tmp_path / "run" / "journal.jsonl").open("a") as journal:
        journal.write('{"index": 7, "dom')
    assert main(arguments(pair, prompts, tmp_path / "run", "--no-learn", "--resume")) == 0
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_failed_learning_is_one_line_and_the_saved_session_stands(straight, pair, prompts, tmp_path, capsys):
    update, calls = OnlineAssistant.update, []

    def failing(self, *args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory\nsee the manual")
        return update(self, *args)

    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnlineAssistant, "update", failing)
        assert main(arguments(pair, prompts, folder, *OFTEN)) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("osd-hf: error: Learning failed after request 12: out of memory. ")
    assert main(arguments(pair, prompts, folder, "--resume")) == 0
    assert_same_run(folder, straight)


def test_skipped_prompts_are_counted_and_listed(pair, tmp_path, caplog):
    path = tmp_path / "prompts.jsonl"
    texts = ["one", "", "x" * 300, None, "two", "", 5]
    path.write_text("".join(json.dumps({"question": text, "kind": "a"}) + "\n" for text in texts))
    assert main(arguments(pair, path, tmp_path / "run")) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    long = "more than the 248 tokens that there is room for"
    wrong = "`question` must be a text of whole characters, or a list of parts of the type `text`"
    assert report["skipped"] == {"no text": 2, long: 1, "`question` is null": 1, wrong: 1}
    assert report["overall"]["requests"] == 2
    said = f"Skipped 5 of 7 prompts: rows 1, 5: no text; row 2: {long}; row 3: `question` is null; row 6: {wrong}."
    assert said in caplog.messages


def test_a_run_that_was_killed_while_it_saved_first_begins_anew(
    pair, prompts, straight, tmp_path, monkeypatch, caplog
):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".settings-0123abcd.tmp").write_text("{")  # of a run that was killed even before

    class Killed(BaseException):
        pass

    def killed(path, target):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        patch.setattr(session.shutil, "rmtree", lambda *_, **__: None)  # who is killed removes nothing
        with pytest.raises(Killed):
            main(arguments(pair, prompts, folder, *OFTEN))
    assert len(list((folder / "state").glob(".state-*.tmp"))) >= 1
    assert (folder / "journal.jsonl").read_text()
    assert main(arguments(pair, prompts, folder, *OFTEN, "--resume")) == 0
    assert "Nothing was saved" in caplog.text
    assert_same_run(folder, straight)
    assert len(list((folder / "state").glob("state-*"))) == 1
