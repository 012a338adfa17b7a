"""The command `osd-hf proxy`: forward requests to engines and store their answers to learn from."""

from __future__ import annotations

import contextlib
import importlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osd_hf.cli import FAILED
from osd_hf.cli.learn import StoreSettings
from osd_hf.cli.settings import PLACEMENT, CommandParser, flag, option, require_extra
from osd_hf.errors import ConfigError, StoreError
from osd_hf.proxy.app import METRICS_PATH, Proxy, Upstream
from osd_hf.proxy.recorder import ProxyCounts, Recorder
from osd_hf.server.metrics import metrics_route, proxy_metrics
from osd_hf.utils.report import provenance

POLL_SECONDS = 1.0  # between two looks whether the command that learns has ended
RESTART_SECONDS = 30.0  # before a restart
STOP_SECONDS = 60.0  # to save a session

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProxySettings(StoreSettings):
    """Flags of `osd-hf proxy`."""

    url: list[str] = flag("addresses of OpenAI-compatible servers; the least busy one answers", metavar="URL")
    store: Path = flag("store of the answers")
    num_logprobs: int = flag("log-probs stored per position", 64, minimum=1)
    share: float = flag("share of the requests that are stored; log-probs cost the engine time", 0.2)
    domain: str | None = flag("label of requests without the header x-osd-domain", None, metavar="NAME")
    route: list[str] | None = flag("engine of the requests with a label", None, metavar="DOMAIN=URL")
    host: str = flag("address to listen at", "127.0.0.1")
    port: int = flag("port to listen at", 8080, minimum=0)
    max_body_bytes: int = flag("maximum size of a request body", 64 << 20, minimum=1)
    allow_development: bool = flag("forward requests to vLLM's development endpoints, which control it", False)
    shutdown_seconds: float = flag("seconds for running answers after a signal", 60.0, minimum=0)
    learn: bool = flag("also run osd-hf learn on the store, in a separate process", False)
    draft: str | None = flag("first draft; by default the bundled one", None, needs="learn", metavar="ID|PATH")
    output_dir: Path | None = flag("folder of the versions", None, needs="learn")
    learn_config: Path | None = flag("file with more flags of osd-hf learn", None, needs="learn", metavar="FILE")

    def check(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"--share must be above 0 and at most 1, got {self.share}.")
        if self.learn:
            self.check_together("draft", "target")
            if self.output_dir is None:
                raise ConfigError("--learn needs an --output-dir for the versions.")

    def routes(self) -> dict[str, str]:
        """Return URLs by label; raises ConfigError."""
        pairs = [text.partition("=") for text in self.route or ()]
        if wrong := [domain for domain, equals, url in pairs if not (domain and equals and url)]:
            raise ConfigError(f"--route must be DOMAIN=URL, got {wrong[0]}.")
        return {domain: url for domain, _, url in pairs}

    def learn_command(self) -> list[str]:
        """Return the command of the process that learns."""
        named = {name: getattr(self, name) for name in ("output_dir", "pair", "target", "draft", "revision")}
        named |= {"store": self.store.expanduser(), "config": self.learn_config}
        flags = [f"{option(name)}={value}" for name, value in named.items() if value is not None]
        flags += ["--trust-remote-code"] if self.trust_remote_code else []
        return [sys.executable, "-m", "osd_hf.cli.main", "learn", *flags]


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command."""
    return CommandParser([ProxySettings], without=("draft_revision", *PLACEMENT), **how)


def proxy_command(settings: ProxySettings) -> int:
    """Serve until a signal; returns the exit code."""
    require_extra("serve", "starlette", "uvicorn", "prometheus_client")
    counts = ProxyCounts()
    by_url = {url: Upstream(url) for url in dict.fromkeys([*settings.url, *settings.routes().values()])}
    server: Any = importlib.import_module("osd_hf.server.app")
    running = server.Listener(settings.host, settings.port)
    reader = settings.read_target(settings.num_logprobs, is_text=False)[-1]
    recorder = Recorder(reader, settings.open_store(settings.store.expanduser()), counts)
    proxy = Proxy(
        [by_url[url] for url in dict.fromkeys(settings.url)],
        counts,
        recorder,
        share=settings.share,
        routes={domain: by_url[url] for domain, url in settings.routes().items()},
        domain=settings.domain,
        max_body_bytes=settings.max_body_bytes,
        allow_development=settings.allow_development,
    )
    app = proxy.app([metrics_route(lambda: proxy_metrics(counts.to_dict()), path=METRICS_PATH)])
    has_failed = False
    with contextlib.ExitStack() as learning:
        if settings.learn:
            learning.callback(LearnProcess(settings.learn_command()).stop)
        try:
            running.run(
                app,
                shutdown_seconds=settings.shutdown_seconds,
                on_start=lambda: settings.say(f"{running.address} stands before {', '.join(by_url)}"),
                on_stop=lambda: settings.say("stopping as soon as running answers have ended"),
            )
        finally:
            try:
                recorder.close()
            except StoreError as error:
                print(f"osd-hf: error: {error}", file=sys.stderr)
                has_failed = True
    report: dict[str, Any] = counts.to_dict()
    settings.say(
        f"{counts.requests} requests, {counts.collected} collected with {counts.tokens} tokens in {settings.store}, "
        f"{counts.dropped} dropped"
    )
    for reason, count in report["left_out"].items():
        settings.say(f"left out {count}: {reason}")
    settings.write_json({"provenance": provenance(), **report})
    return FAILED if has_failed else 0


class LearnProcess:
    """The command that learns next to the proxy. It is started again half a minute after it fails."""

    def __init__(self, command: Sequence[str], *, start: Callable[[Sequence[str]], Any] = subprocess.Popen) -> None:
        self._command = command
        self._start = start
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="osd_hf-learn", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            process = self._start(self._command)
            while (code := process.poll()) is None and not self._stopping.wait(POLL_SECONDS):
                pass
            if code is None:
                process.terminate()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
            elif code == 0:
                return
            else:
                logger.warning("osd-hf learn ended with code %s; it starts again in %.0f s.", code, RESTART_SECONDS)
                self._stopping.wait(RESTART_SECONDS)

    def stop(self) -> None:
        """Terminate the command and wait until it has ended; it is killed after a minute."""
        self._stopping.set()
        self._thread.join()
