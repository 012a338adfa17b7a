"""The recipe that checks an engine: the right draft is healthy, and a wrong, idle, or missing one is found."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_counters import counting_engine
from saved_pair import save_pair
from transformers import AutoModelForCausalLM, AutoTokenizer

from osd_hf import CorrectionStore
from osd_hf.prompts import encode_turn
from osd_hf.recording import record_traces

REQUESTS = 16
NOISES = {"v000001": 0.05, "v000002": 0.015}


def test_the_right_draft_is_healthy_and_others_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "recipes"))
    doctor: Any = importlib.import_module("doctor")
    target = AutoModelForCausalLM.from_pretrained(save_pair(tmp_path) / "target")
    tokenizer, drafts = AutoTokenizer.from_pretrained(tmp_path / "target"), dict[str, Any]()
    for number, (name, noise) in enumerate(NOISES.items(), 1):
        draft = drafts[name] = copy.deepcopy(target)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter += noise * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        draft.save_pretrained(tmp_path / "versions" / name)
        (tmp_path / "versions" / name / "version.json").write_text(json.dumps({"version": number}))
    (tmp_path / "versions" / "latest").symlink_to("v000002")
    texts = [f"what is {i}?" for i in range(2 * REQUESTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    for name, model in (("own", target), ("other", drafts["v000001"])):
        with CorrectionStore(tmp_path / name) as store:
            prompts = [encode_turn(tokenizer, text) for text in texts[:REQUESTS]]
            for trace in record_traces(model, prompts, max_new_tokens=8, num_logprobs=8):
                store.append(trace)

    def run(*source: str) -> tuple[int, dict[str, Any], str]:
        """Return the exit code, findings by what they are about, and the printed text."""
        monkeypatch.setattr(sys, "argv", [
            "doctor", "--url", engine.address, "--target", str(tmp_path / "target"), "--draft",
            str(tmp_path / "versions/latest"), "--num-requests", str(REQUESTS), "--concurrency", "2",
            "--max-new-tokens", "12", "--json", str(tmp_path / "report.json"),
            *(source or ("--prompts", str(tmp_path / "prompts.jsonl"), "--column", "text")),
        ])  # fmt: skip
        code = doctor.main()
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["verdict"] == ("healthy", "ill", "unknown")[code]
        found = {finding["about"]: finding for finding in report["findings"] if finding["state"] != "note"}
        return code, found, capsys.readouterr().out

    with counting_engine(target, drafts["v000002"]) as engine:
        code, found, said = run()
        figures = found["draft"]["figures"]
        assert code == 0 and "v000002 has" in said
        assert figures["rounds"] == figures["rounds_counted"] == engine.counts["drafts_total"] > 40
        assert figures["equal_windows"] == figures["windows"] == REQUESTS // 2
        assert abs(figures["alpha_counted"] - figures["alpha_draft"]) < 0.02
        for name, state in (("own", "healthy"), ("other", "ill")):  # are answers those of the store?
            code, found, _ = run("--store", str(tmp_path / name))
            assert (code == 1, found["target"]["state"]) == (state == "ill", state)
            assert found["draft"]["state"] == "healthy"  # whose rounds follow from the answers of now
        engine.set(drafts["v000001"])
        code, found, said = run()
        assert code == 1 and "stale weights; v000001 fits" in said
        assert found["draft"]["figures"]["best_version"] == "v000001"
        engine.set(None)
        assert run()[0] == 1
        engine.set(drafts["v000002"])
        engine.is_idle = True
        code, found, _ = run()
        assert code == 1 and "drafted nothing for" in found["draft"]["text"]


def test_nothing_is_asked_while_a_version_is_being_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may have another version than `latest` then, and questions would move the counters of the learner."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "recipes"))
    doctor: Any = importlib.import_module("doctor")
    (tmp_path / "latest").mkdir()
    flags = ["--url", "http://127.0.0.1:9", "--target", "x", "--draft", str(tmp_path / "latest"), "--store", "y"]
    monkeypatch.setattr(sys, "argv", ["doctor.py", *flags])
    lines = [json.dumps({"event": "loaded", "state": {"candidate": 3, "serving": 2}})]
    (tmp_path / "deploy.jsonl").write_text("\n".join(lines) + "\n")
    assert doctor.main() == 0
    assert "version 3 is being watched in place of version 2" in capsys.readouterr().out
    lines.append(json.dumps({"event": "kept", "state": {"candidate": None, "serving": 3}}))
    (tmp_path / "deploy.jsonl").write_text("\n".join(lines) + "\n")
    assert doctor.watched_version(tmp_path) is None
