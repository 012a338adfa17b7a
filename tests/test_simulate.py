from dataclasses import replace
from typing import Any

import models
import pytest
import torch

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig, simulate
from osd_hf.recording import record_traces
from osd_hf.replay import replay_each

# Without the gate each update is a version.
CONFIG = OnlineConfig(
    num_assistant_tokens=5, update_strategy="interval", update_interval=3, steps_per_update=2, batch_size=4,
    optimizer="adamw", learning_rate=3e-3, gate=False,
)  # fmt: skip


def counts(stats: AcceptanceStats) -> tuple[Any, ...]:
    """All but `drafted`: behind its rejected token a live draft may end itself with EOS, which nobody sees."""
    histogram = sorted(stats.accepted_length_histogram.items())
    return stats.examined, stats.accepted, stats.emitted, stats.target_forwards, histogram


PAPER, SHORT = OnlineConfig.paper(update_interval=3), replace(CONFIG, num_assistant_tokens=3)
SPREAD = replace(CONFIG, update_strategy="spread", update_interval=2)


@pytest.mark.parametrize(
    ("architecture", "config", "ends"),
    [
        ("llama", CONFIG, False),
        ("llama", PAPER, True),
        ("t5", SHORT, True),
        ("t5", PAPER, False),
        ("t5", SPREAD, True),
    ],
)
def test_a_simulated_run_is_the_live_run(
    architecture: str, config: OnlineConfig, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Recorded rows are those of batched forwards. In double precision both are stored as the same rows, and learning
    # in it, which the updater leaves otherwise, takes the same steps.
    monkeypatch.setattr(torch.nn.Module, "float", lambda module: module)
    target, draft = map(models.double, models.pair(architecture, noise=0.08))
    prompts = models.prompts(7)
    if ends:
        ids = prompts[0]
        answer = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        target.generation_config.eos_token_id = int(answer[0, -5])
    live: list[AcceptanceStats] = []
    assistant = OnlineAssistant(target, draft, config=config)
    for ids in prompts:
        _, trace = models.answered(assistant, ids, max_new_tokens=12)
        live.append(AcceptanceStats.from_trace(trace))
    assert sum(live, AcceptanceStats()) == assistant.stats
    traces = list(record_traces(target, [p[0].tolist() for p in prompts], max_new_tokens=12, num_logprobs=64))
    report = simulate(draft, traces, config)
    assert [counts(s) for s in report.stats] == [counts(s) for s in live]
    if not ends:
        assert list(report.stats) == live
    assert len(report.updates) == assistant.version == (3 if config is SPREAD else 2)
    assert sum(s.emitted for s in report.stats) == assistant.stats.emitted
    for (name, ours), theirs in zip(report.draft.named_parameters(), assistant.draft.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=0, msg=name)


@pytest.mark.parametrize("strategy", ["interval", "spread"])
def test_a_simulated_gate_decides_as_the_live_one(strategy: str) -> None:
    target, draft = models.pair("gpt2", noise=0.3, num_hidden_layers=1)
    config = replace(CONFIG, gate=True, update_interval=6, update_strategy=strategy)
    prompts = models.prompts(36)
    assistant = OnlineAssistant(target, draft, config=config)
    assistant.drafts.set_pace(min_effort=1.0)  # a simulation knows no costs
    for ids in prompts:
        assistant.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    traces = list(record_traces(target, [p[0].tolist() for p in prompts], max_new_tokens=8, num_logprobs=64))
    report = simulate(draft, traces, config)
    outcomes = [(d.outcome, d.version, d.serving, d.requests) for d in assistant.decisions]
    assert [(d.outcome, d.version, d.serving, d.requests) for d in report.decisions] == outcomes
    # One that is spread ends with the answer before the next is due: the last is not at its end.
    assert len(outcomes) == (6 if strategy == "interval" else 5)
    few = [outcome for outcome, *_, requests in outcomes if requests < 4]  # were held back by then
    assert few == ["kept back"] * (2 if strategy == "interval" else 1)
    assert "promoted" in [outcome for outcome, *_ in outcomes]
    assert report.learner.drafts.serving_version() == assistant.version > 0
    assert sum(report.stats, AcceptanceStats()).accepted == assistant.stats.accepted


@pytest.mark.parametrize("do_sample", [False, True])
def test_progress_is_told_and_without_updates_the_draft_is_the_given_one(do_sample: bool) -> None:
    target, draft = models.pair()
    before = [p.detach().clone() for p in draft.parameters()]
    traces = list(record_traces(target, [p[0].tolist() for p in models.prompts(4)], max_new_tokens=6))
    traces = [replace(trace, sampling={**trace.sampling, "do_sample": do_sample}) for trace in traces]
    seen: list[int] = []
    report = simulate(draft, traces, CONFIG, on_request=lambda number, stats: seen.append(number))
    assert seen == [0, 1, 2, 3]
    served = [draft] * 3 + [report.draft]
    assert list(report.stats) == [stats for d, t in zip(served, traces, strict=True) for stats in replay_each(d, [t])]
    assert all(map(torch.equal, draft.parameters(), before))
    report = simulate(draft, traces, replace(CONFIG, update_strategy="manual"))
    assert report.updates == ()
    assert all(map(torch.equal, draft.parameters(), report.draft.parameters()))
    assert simulate(draft, [], CONFIG).stats == ()
