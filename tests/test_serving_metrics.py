"""What Prometheus reads: every figure is the object's own, and what is not known yet is left out."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import models
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.testclient import TestClient

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.errors import ConfigError
from osd_hf.server.metrics import assistant_metrics, learner_metrics, metrics_route, proxy_metrics, serve_metrics

DOCS = Path(__file__).parents[1] / "docs"

COUNTS = {
    "requests": 12, "collected": 9, "left_out": {"it was sampled": 2, 'of "another" model': 1}, "dropped": 0,
    "engine_errors": 1, "retries": 3, "bytes": 4096, "tokens": 300,
}  # fmt: skip


def metrics_text(*sources: Any) -> bytes:
    with TestClient(Starlette(routes=[metrics_route(*sources)])) as client:
        return client.get("/metrics").content


def read(text: bytes) -> dict[str, dict[tuple[str, ...], float]]:
    """Name of a sample -> its values by their labels, in the order of the labels' names."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = tuple(value for _, value in sorted(sample.labels.items()))
            assert key not in found.setdefault(sample.name, {})  # which Prometheus refuses
            found[sample.name][key] = sample.value
    return found


@pytest.fixture(scope="module")
def assistant() -> Any:
    target, draft = models.pair(num_hidden_layers=1)
    config = OnlineConfig(update_strategy="manual", gate=False, num_assistant_tokens=3, steps_per_update=1)
    with OnlineAssistant(target, draft, config=config) as assistant:
        for i, prompt in enumerate(models.prompts(5)):
            assistant.generate(prompt, max_new_tokens=8, domain=("sql", None)[i % 2])
        assistant.update()
        yield assistant


def test_the_figures_are_those_of_the_assistant(assistant: Any) -> None:
    found = read(metrics_text(partial(assistant_metrics, assistant)))
    for domain, label in (("sql", "sql"), (None, "(none)")):
        stats = assistant.stats_by_domain[domain]
        for name in ("drafted", "examined", "accepted"):
            assert found[f"osd_hf_{name}_tokens_total"][label, "draft"] == getattr(stats, name)
            assert found[f"osd_hf_{name}_tokens_total"][label, "text"] == 0
        assert found["osd_hf_requests_total"][(label,)] == stats.num_requests
        assert found["osd_hf_emitted_tokens_total"][(label,)] == stats.emitted
        assert found["osd_hf_target_forwards_total"][(label,)] == stats.target_forwards
        ends = [found[f"osd_hf_acceptance{end}_ratio"][(label,)] for end in ("", "_low", "_high")]
        assert ends == [stats.alpha, *stats.alpha_interval]
    assert found["osd_hf_draft_version"] == {("(none)",): 1}
    assert found["osd_hf_learning_seconds_total"][()] == assistant.learning_seconds > 0
    assert found["osd_hf_timed_tokens_total"][()] == assistant.stats.timed[0] > 0
    assert found["osd_hf_effort_ratio"] == {(): 1.0}
    assert found["osd_hf_learning_active"] == {(): 0}
    assert found["osd_hf_learning_failing"] == {("",): 0}


def test_what_is_decided_and_what_fails_is_told(assistant: Any) -> None:
    decided = [SimpleNamespace(outcome=outcome) for outcome in ("promoted", "dropped", "promoted")]
    names = ("stats", "stats_by_domain", "drafts", "learning_seconds", "effort", "is_learning")
    state = {name: getattr(assistant, name) for name in names}
    other = SimpleNamespace(**state, decisions=decided, learning_error=OSError("full"), saved_seconds=-2.5)
    found = read(metrics_text(partial(assistant_metrics, other)))
    assert found["osd_hf_decisions"] == {
        ("promoted",): 2, ("kept back",): 0, ("dropped",): 1, ("rolled back",): 0,
    }  # fmt: skip
    assert found["osd_hf_learning_failing"] == {("OSError",): 1}
    assert found["osd_hf_saved_seconds"] == {(): -2.5}


def test_what_is_not_known_is_left_out() -> None:
    target, draft = models.pair(num_hidden_layers=1)
    with OnlineAssistant(target, draft) as assistant:
        assistant.generate(models.prompt(), max_new_tokens=8, num_assistant_tokens=3)
        found = read(metrics_text(partial(assistant_metrics, assistant)))
    assert "osd_hf_acceptance_ratio" in found
    assert "osd_hf_acceptance_low_ratio" not in found  # of one request
    assert not any(math.isnan(value) for values in found.values() for value in values.values())


def test_the_counts_of_a_proxy_are_told_by_reason() -> None:
    text = metrics_text(partial(proxy_metrics, COUNTS))
    found = read(text)
    assert b'left_out_total{reason="it was sampled"} 2.0' in text
    assert found["osd_hf_proxy_left_out_total"] == {("it was sampled",): 2, ('of "another" model',): 1}
    assert found["osd_hf_proxy_requests_total"] == {(): 12}


def test_a_route_gives_what_is_there_at_each_scrape() -> None:
    counts = {"requests": 1}
    client = TestClient(Starlette(routes=[metrics_route(lambda: proxy_metrics(counts))]))
    assert read(client.get("/metrics").content)["osd_hf_proxy_requests_total"] == {(): 1}
    counts["requests"] = 2
    answer = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert "osd_hf_proxy_requests_total 2.0" in answer.text
    assert answer.headers["content-type"].startswith("application/openmetrics-text")


def test_a_port_answers_scrapes_and_a_taken_one_is_said() -> None:
    with serve_metrics(0, partial(proxy_metrics, COUNTS)) as port:
        text = httpx2.get(f"http://127.0.0.1:{port}/metrics").content
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"), serve_metrics(port):
            pass
    assert read(text)["osd_hf_proxy_retries_total"] == {(): 3}


def test_the_dashboard_shows_figures_that_there_are(assistant: Any) -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    stats = assistant.stats
    published = {"version": 3, "decision": {"domain": "sql"}}
    learner = SimpleNamespace(
        requests=3, tokens=9, set_aside=Counter(), skipped=Counter({"too long": 1}), learned=[stats], frozen=[stats],
        versions=SimpleNamespace(number=2), published=[published], is_pushed=True, learning_seconds=1.0,
    )  # fmt: skip
    names = ("stats_by_domain", "drafts", "decisions", "learning_error", "learning_seconds", "effort", "is_learning")
    state = {name: getattr(assistant, name) for name in names}
    known = SimpleNamespace(**state, stats=replace(stats, timed=(9.0, 1.0, 1.0, 2.0)), saved_seconds=1.0)
    text = metrics_text(
        partial(assistant_metrics, known), partial(proxy_metrics, COUNTS), partial(learner_metrics, learner)
    )
    versions = read(metrics_text(partial(learner_metrics, learner)))["osd_hf_published_version"]
    assert versions == {("(none)",): 2, ("sql",): 3}
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    shown = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"osd_hf_\w+", target["expr"])
            assert names and set(names) <= samples.keys(), target["expr"]
            shown |= set(names)
            labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]) + re.findall(r"by \((\w+)\)", target["expr"])
            assert all(set(labels) - {"instance"} <= samples[name] for name in names), target
    assert len(shown) > 25
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
