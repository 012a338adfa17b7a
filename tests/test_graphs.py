"""Captured drafts, without an accelerator: a stand-in for graphs computes again what was captured."""

from __future__ import annotations

import logging
from typing import Any

import models
import pytest
import torch
from test_draft_forward import COMPILABLE, same_as_eager, served_eagerly

from osd_hf import OnlineConfig
from osd_hf.decoding import forward as graphs
from osd_hf.decoding.forward import CapturedDraft, CompiledDraft, static_draft
from osd_hf.learning import drafts as drafts_module


class Recorder:
    """In place of `capture`: runs what was captured again, and nothing while a graph is made."""

    def __init__(self) -> None:
        self.graphs = 0
        self.replays = 0

    def __call__(self, run: graphs.Replay, example: torch.Tensor) -> graphs.Replay:
        self.graphs += 1
        read = example.clone()

        def replay(given: torch.Tensor) -> torch.Tensor:
            self.replays += 1
            read.copy_(given)
            return run(read)

        return replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(graphs, "capture", made)
    return made


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_captured_drafts_are_the_eager_ones(
    architecture: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drafts_module, "static_draft", lambda base, config: CapturedDraft(base))
    same_as_eager(*served_eagerly(architecture))
    assert recorder.replays > 3 * recorder.graphs > 0
    assert "eagerly" not in caplog.text


@pytest.mark.parametrize(("fails", "is_given_up"), [(1, False), (graphs.MAX_CAPTURE_FAILURES, True)])
def test_what_cannot_be_captured_runs_eagerly(
    fails: int, is_given_up: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    left = [RuntimeError("operation not permitted when stream is capturing")] * fails

    def capture(*args: Any) -> Any:
        if left:
            raise left.pop()
        return recorder(*args)

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(drafts_module, "static_draft", lambda base, config: CapturedDraft(base))
    caplog.set_level(logging.WARNING)
    same_as_eager(*served_eagerly("llama"))
    told = "The draft is not captured and runs eagerly: capturing failed with RuntimeError"
    assert caplog.text.count(told) == is_given_up
    assert (recorder.replays > 0) != is_given_up
    assert not left


def test_by_default_a_draft_on_cuda_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"auto": OnlineConfig(), True: OnlineConfig(compile_draft=True), False: OnlineConfig(compile_draft=False)}

    def made(device: str) -> list[Any]:
        monkeypatch.setattr(type(model), "device", torch.device(device))
        return [type(static_draft(model, config)) for config in ways.values()]

    model = models.build(num_hidden_layers=1)
    assert made("cuda") == [CapturedDraft, CompiledDraft, type(None)]
    assert made("xpu") == [CompiledDraft, CompiledDraft, type(None)]
    assert made("cpu") == [type(None), CompiledDraft, type(None)]
