"""The command `osd-hf proxy`: stands before engines, and keeps what they answer for a draft to learn from."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osd_hf.cli import FAILED
from osd_hf.cli.arguments import flag, in_groups
from osd_hf.cli.flags import Collecting
from osd_hf.errors import ConfigError, StoreError
from osd_hf.proxy.app import METRICS_PATH, Proxy
from osd_hf.proxy.companion import Companion
from osd_hf.proxy.recorder import AnswerWriterProcess, ProxyCounts, Recorder
from osd_hf.proxy.upstream import Upstream
from osd_hf.server.metrics import metrics_route, proxy_metrics
from osd_hf.utils.report import provenance

_serving, _learning = in_groups("serving", "learning")


@dataclass(frozen=True, kw_only=True)
class ProxySettings(Collecting):
    """The flags of `osd-hf proxy`."""

    url: list[str] = flag("address of an OpenAI-compatible server, such as http://localhost:8000 (repeat for several, "
                          "of which the least busy answers)", required=True, metavar="URL")  # fmt: skip
    share: float = flag("share of the requests that are collected; log-probs cost the engine time", 0.2, metavar="X")
    domain: str | None = flag("label of requests without the header x-osd-domain", metavar="NAME")
    route: list[str] | None = _serving("engine of requests with a label (repeat for several)", metavar="DOMAIN=URL")
    host: str = _serving("address to listen at", "127.0.0.1")
    port: int = _serving("port to listen at", 8080)
    max_body_bytes: int = _serving("largest body of a request", 64 << 20, metavar="N")
    allow_development: bool = _serving("pass on what vLLM's development endpoints are asked, which rule it", False)
    shutdown_seconds: float = _serving("seconds that running answers are given after a signal", 60.0, metavar="S")
    learn: bool = _learning("also run osd-hf learn on the store, as a process of its own", False)
    draft: str | None = _learning("where learning starts; the bundled one by default", metavar="ID|PATH")
    output_dir: Path | None = _learning("where versions go", metavar="DIR")
    learn_config: Path | None = _learning("YAML or JSON with more flags of osd-hf learn", metavar="FILE")

    def check(self) -> None:
        """Raises ConfigError for what is out of range, and for what does not go together."""
        self.check_collecting()
        self.check_counts("max_body_bytes")
        self.check_counts("port", least=0)
        self.check_not_negative("shutdown_seconds")
        if not 0 < self.share <= 1:
            raise ConfigError(f"--share must be above 0 and at most 1, got {self.share}.")
        if not self.learn and (given := self.changed("draft", "output_dir", "learn_config")):
            raise ConfigError(f"{given[0]} is for --learn.")
        if self.learn:
            self.check_together("draft", "target")
            if self.output_dir is None:
                raise ConfigError("--learn needs an --output-dir for the versions.")

    def routes(self) -> dict[str, str]:
        """URLs by their labels; raises ConfigError."""
        pairs = [text.partition("=") for text in self.route or ()]
        if wrong := [domain for domain, equals, url in pairs if not (domain and equals and url)]:
            raise ConfigError(f"--route must be DOMAIN=URL, got {wrong[0]}.")
        return {domain: url for domain, _, url in pairs}

    def learner(self) -> list[str]:
        """The command that learns beside the proxy."""
        named = {
            "--store": self.store.expanduser(), "--output-dir": self.output_dir, "--target": self.target,
            "--draft": self.draft, "--revision": self.revision, "--config": self.learn_config,
        }  # fmt: skip
        flags = [text for name, value in named.items() if value is not None for text in (name, str(value))]
        flags += ["--trust-remote-code"] if self.trust_remote_code else []
        return [sys.executable, "-m", "osd_hf.cli", "learn", *flags]


def proxy_command(settings: ProxySettings) -> int:
    """Serve until told to stop; returns the exit code."""
    settings.check()
    needed = ("starlette", "uvicorn", "prometheus_client")
    if any(importlib.util.find_spec(name) is None for name in needed):
        raise ConfigError('osd-hf proxy needs the extra serve: pip install "osd-hf[serve]".')
    counts = ProxyCounts()
    by_url = {url: Upstream(url) for url in dict.fromkeys([*settings.url, *settings.routes().values()])}
    module: Any = importlib.import_module("osd_hf.server.listener")
    running = module.Listener(settings.host, settings.port)
    reader = settings.read_target()[1]
    with settings.open_store() as store:  # by which what is wrong with it is told here
        writer = AnswerWriterProcess(reader, store)
    recorder = Recorder(writer, counts)
    proxy = Proxy(
        [by_url[url] for url in dict.fromkeys(settings.url)], counts, recorder, share=settings.share,
        routes={domain: by_url[url] for domain, url in settings.routes().items()}, domain=settings.domain,
        max_body_bytes=settings.max_body_bytes, allow_development=settings.allow_development,
    )  # fmt: skip
    app = proxy.app([metrics_route(lambda: proxy_metrics(counts.to_dict()), path=METRICS_PATH)])
    learner = Companion("osd-hf learn", settings.learner()) if settings.learn else None
    try:
        running.run(
            app, shutdown_seconds=settings.shutdown_seconds,
            on_start=lambda: settings.say(f"{running.address} stands before {', '.join(by_url)}"),
            on_stop=lambda: settings.say("stopping as soon as running answers have ended"),
        )  # fmt: skip
    finally:
        failed = _stored(recorder, learner, writer)
    _report(settings, counts)
    return FAILED if failed else 0


def _stored(recorder: Recorder, learner: Companion | None, writer: AnswerWriterProcess) -> bool:
    """Store what waits, and end the learner; whether not all could be written."""
    recorder.close()
    if learner is not None:
        learner.stop()
    try:
        writer.close()
    except StoreError as error:
        print(f"osd-hf: error: {error}", file=sys.stderr)
        return True
    return False


def _report(settings: ProxySettings, counts: ProxyCounts) -> None:
    left_out = counts.to_dict()["left_out"]
    settings.say(
        f"{counts.requests} requests, {counts.collected} collected with {counts.tokens} tokens in {settings.store}, "
        f"{counts.dropped} dropped"
    )
    assert isinstance(left_out, dict)
    for reason, count in left_out.items():
        settings.say(f"left out {count}: {reason}")
    settings.write_json({"provenance": provenance(), **counts.to_dict()})
