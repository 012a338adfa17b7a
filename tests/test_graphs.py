"""Captured drafts. Without an accelerator a stand-in for graphs computes again what was captured, with the weights
that lay there then."""

from __future__ import annotations

import logging
from typing import Any

import models
import pytest
import torch
from test_draft_forward import COMPILABLE, same_as_eager, served_eagerly

from osd_hf import OnlineConfig
from osd_hf.decoding import forward as graphs
from osd_hf.decoding.forward import CapturedDraft, CompiledDraft, StaticForward, static_draft
from osd_hf.learning import drafts as drafts_module


class Recorder:
    """In place of `capture`: a graph reads the memory that it was captured with, whatever the model's weights are by
    then, and runs nothing while it is made."""

    def __init__(self) -> None:
        self.graphs = 0
        self.replays = 0

    def __call__(self, run: graphs.Replay, example: torch.Tensor) -> graphs.Replay:
        self.graphs += 1
        model = next(cell.cell_contents for cell in run.__closure__ if isinstance(cell.cell_contents, torch.nn.Module))
        memory = [weight.data for weight in model.parameters()]

        read = example.clone()

        def replay(given: torch.Tensor) -> torch.Tensor:
            self.replays += 1
            read.copy_(given)
            now = [weight.data for weight in model.parameters()]
            for weight, then in zip(model.parameters(), memory, strict=True):
                weight.data = then
            try:
                return run(read)
            finally:
                for weight, given in zip(model.parameters(), now, strict=True):
                    weight.data = given

        return replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(graphs, "capture", made)
    return made


def logits_of(captured: CapturedDraft, model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of a request: behind a prompt, a token, three for as often as they are eager and once more, and a token."""
    with torch.inference_mode():
        forward = captured.forward(model, 40, 40)
        assert type(forward) is StaticForward
        found = []
        for _ in range(graphs.MIN_EAGER_FORWARDS + 1):
            found += [forward.feed(part) for part in ids.split([ids.shape[1] - 5, 1, 3, 1], dim=1)]
            forward.crop(0)
        forward.close()
    return found


@pytest.mark.parametrize("architecture", COMPILABLE)
def test_captured_drafts_are_the_eager_ones(
    architecture: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drafts_module, "static_draft", lambda base, config: CapturedDraft(base))
    same_as_eager(*served_eagerly(architecture))
    assert recorder.replays > 3 * recorder.graphs > 0
    assert "eagerly" not in caplog.text


def test_graphs_follow_weights_that_are_written_and_weights_that_move(recorder: Recorder) -> None:
    model, other, ids = models.build(), models.build(), models.prompt(9)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    captured = CapturedDraft(model)
    before, theirs = (logits_of(captured, one, ids) for one in (model, other))
    made = recorder.graphs

    def compare(expected: list[torch.Tensor]) -> None:
        for ours, others in zip(logits_of(captured, model, ids), expected, strict=True):
            torch.testing.assert_close(ours, others)

    own = [weight.detach().clone() for weight in model.parameters()]
    with torch.no_grad():
        for weight, given in zip(model.parameters(), other.parameters(), strict=True):
            weight.copy_(given)
    compare(theirs)
    assert recorder.graphs == made
    for weight, moved in zip(model.parameters(), own, strict=True):
        weight.data = moved
    compare(before)
    assert recorder.graphs == made + 2


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
