"""Figures of an assistant, a proxy, and a learner for Prometheus (extra `serve`)."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from osd_hf.acceptance import AcceptanceStats
from osd_hf.engines.learn import StoreLearner
from osd_hf.errors import ConfigError

if TYPE_CHECKING:  # an extra
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

NO_DOMAIN = "(none)"  # of requests without a label
RECENT_REQUESTS = 128  # of a learner, for its acceptance
LEARNING = "Time that learning has taken."
OUTCOMES = ("promoted", "kept back", "dropped", "rolled back")

Source = Callable[[], "Iterable[Metric]"]
Samples = Iterable[tuple[tuple[str, ...], float | None]]

# Help texts of the counts of a proxy.
PROXY_COUNTS = {
    "requests": "Requests that clients have sent.",
    "collected": "Answers that were kept to learn from.",
    "left_out": "Answers that cannot be learned from, by reason.",
    "dropped": "Answers that were not kept because too many waited, or because the store failed.",
    "engine_errors": "Requests that an engine has answered with an error, or not at all.",
    "retries": "Requests that were sent again, to another engine or without what was added.",
    "bytes": "Bytes of the answers that were passed on.",
    "tokens": "Tokens of the answers that were kept.",
}


def metrics_route(*sources: Source, path: str = "/metrics") -> Any:
    """Return the `starlette.routing.Route` that answers scrapes with the figures of functions; raises ConfigError."""
    registry = _registry(sources)
    from prometheus_client.exposition import choose_encoder
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    def metrics(request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": kind})

    return Route(path, metrics)


@contextlib.contextmanager
def serve_metrics(port: int, *sources: Source, host: str = "127.0.0.1") -> Iterator[int]:
    """Answer scrapes in a thread, inside a `with` block that gets the port; raises ConfigError."""
    registry = _registry(sources)
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"No metrics at {host}:{port}: {error}. Take another --metrics-port.") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Collector:
    def __init__(self, source: Source) -> None:
        self.collect = source


def _registry(sources: Iterable[Source]) -> CollectorRegistry:
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise ConfigError('Metrics need prometheus-client: pip install "osd-hf[serve]".') from error
    registry = CollectorRegistry()
    for source in sources:
        registry.register(_Collector(source))
    return registry


def assistant_metrics(assistant: Any) -> Iterator[Metric]:
    """Yield acceptance, tokens, versions and learning of an [`OnlineAssistant`]."""
    stats, by_domain = assistant.stats, assistant.stats_by_domain
    by_key = {domain or NO_DOMAIN: of_it for domain, of_it in by_domain.items()}
    for name, help, field in (
        ("requests", "Requests that were answered.", "num_requests"),
        ("emitted_tokens", "Tokens of answers.", "emitted"),
        ("target_forwards", "Forward passes of the target, one a round of drafting.", "target_forwards"),
    ):
        yield _counter(f"osd_hf_{name}", help, [((key,), getattr(s, field)) for key, s in by_key.items()], "domain")
    for name, help in (
        ("drafted", "Tokens that were proposed, by the draft or as past text."),
        ("examined", "Proposed tokens that the target decided on."),
        ("accepted", "Proposed tokens that the target accepted."),
    ):
        sides = (("draft", name), ("text", f"text_{name}"))
        rows = [((key, who), getattr(s, field)) for key, s in by_key.items() for who, field in sides]
        yield _counter(f"osd_hf_{name}_tokens", help, rows, "domain", "source")
    yield from _acceptance("osd_hf", "Accepted over examined tokens of the draft", by_key, "domain")
    tokens, seconds, *_ = stats.timed
    yield _counter("osd_hf_timed_tokens", "Tokens of timed answers.", [((), tokens)])
    yield _counter("osd_hf_timed_seconds", "Time of these answers, without learning.", [((), seconds)])
    help = "Times as fast as the target alone, from measured costs."
    yield _gauge("osd_hf_speedup_ratio", help, [((), stats.speedup)])
    versions = {(d or NO_DOMAIN,): assistant.drafts.serving_version(d) for d in assistant.drafts.domains}
    yield _gauge("osd_hf_draft_version", "Version of the draft that serves.", versions.items(), "domain")
    decided = Counter(decision.outcome for decision in assistant.decisions)
    help = "Decisions of the gate on versions, of the newest 4,096."
    yield _gauge("osd_hf_decisions", help, [((name,), decided[name]) for name in OUTCOMES], "outcome")
    yield _counter("osd_hf_learning_seconds", LEARNING, [((), assistant.learning_seconds)])
    help = "Time that requests would have taken longer with the draft as it came, by replay."
    yield _gauge("osd_hf_saved_seconds", help, [((), assistant.saved_seconds)])
    yield _gauge("osd_hf_effort_ratio", "Share of the configured updates that are done.", [((), assistant.effort)])
    yield _gauge("osd_hf_learning_active", "Whether an update is under way or due.", [((), assistant.is_learning)])
    error = assistant.learning_error
    why = "" if error is None else type(error).__name__
    help = "Whether something fails beside the answers, and with what."
    yield _gauge("osd_hf_learning_failing", help, [((why,), error is not None)], "error")


def proxy_metrics(counts: Mapping[str, int | Mapping[str, int]]) -> Iterator[Metric]:
    """Yield the counts of a proxy: numbers by name, or by name and reason."""
    for name, count in counts.items():
        if isinstance(count, Mapping):
            rows: Samples = [((reason,), number) for reason, number in dict(count).items()]
            yield _counter(f"osd_hf_proxy_{name}", PROXY_COUNTS[name], rows, "reason")
        else:
            yield _counter(f"osd_hf_proxy_{name}", PROXY_COUNTS[name], [((), count)])


def learner_metrics(learner: StoreLearner) -> Iterator[Metric]:
    """Yield requests, versions and acceptance of a [`StoreLearner`]."""
    requests = "Requests that were learned from, or judged by, since the session began."
    yield _counter("osd_hf_learner_requests", requests, [((), learner.requests)])
    yield _counter("osd_hf_learner_tokens", "Tokens of their answers.", [((), learner.tokens)])
    left_out = learner.set_aside + learner.skipped.copy()
    help = "Requests that cannot be learned from, by reason."
    yield _counter("osd_hf_learner_left_out", help, [((why,), n) for why, n in left_out.items()], "reason")
    recent = {
        name: sum(list(stats)[-RECENT_REQUESTS:], AcceptanceStats())
        for name, stats in (("learned", learner.learned), ("frozen", learner.frozen))
    }
    help = f"Accepted over examined tokens on the newest {RECENT_REQUESTS} requests"
    yield from _acceptance("osd_hf_learner", help, recent, "draft")
    numbers = {NO_DOMAIN: learner.versions.number}
    numbers |= {facts["decision"]["domain"] or NO_DOMAIN: facts["version"] for facts in list(learner.published)}
    help = "Number of the newest published version; for a domain, only versions of this run count."
    yield _gauge("osd_hf_published_version", help, [((name,), n) for name, n in numbers.items()], "domain")
    help = "Versions that this run has published."
    yield _counter("osd_hf_published_versions", help, [((), len(learner.published))])
    help = "Whether the newest published version waits for the Hub."
    yield _gauge("osd_hf_push_waiting", help, [((), not learner.is_pushed)])
    yield _counter("osd_hf_learning_seconds", LEARNING, [((), learner.learning_seconds)])


def _acceptance(prefix: str, what: str, stats: Mapping[str, AcceptanceStats], label: str) -> Iterator[Metric]:
    ends = {key: (s.alpha, *s.alpha_interval) for key, s in stats.items()}
    parts = (("", "."), ("_low", ", lower end of its 95% interval."), ("_high", ", upper end of its 95% interval."))
    for i, (name, end) in enumerate(parts):
        rows = [((key,), values[i]) for key, values in ends.items()]
        yield _gauge(f"{prefix}_acceptance{name}_ratio", what + end, rows, label)


def _family(kind: str, name: str, help: str, samples: Samples, *labels: str) -> Any:
    from prometheus_client import core

    family = getattr(core, f"{kind}MetricFamily")(name, help, labels=labels)
    for key, value in samples:
        if value is not None and not math.isnan(value):
            family.add_metric(key, float(value))
    return family


_counter, _gauge = partial(_family, "Counter"), partial(_family, "Gauge")
