"""The command `osd-hf serve`: a server as OpenAI's API has it, whose draft learns while it serves."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from osd_hf.assistant import OnlineAssistant
from osd_hf.cli.arguments import flag, in_groups
from osd_hf.cli.flags import CHAT_TEMPLATE_KWARGS, THREADS, DraftRevision, Learning, TargetLoading, learning
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError
from osd_hf.evaluation.benchmark import pad_setting
from osd_hf.learning.session import check_pointer, has_session
from osd_hf.models import input_device, load_pair
from osd_hf.utils.threads import choose_threads

logger = logging.getLogger(__name__)

WARM_UP = "Who are you?"
WARM_UP_TOKENS = 8  # of its answer
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")  # names of this machine for itself
CUT_SECONDS = 2.0  # that requests which are cut off have to be told so

_models, _server, _answers = in_groups("models", "server", "answers")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(DraftRevision, TargetLoading, Learning):
    """The flags of `osd-hf serve`."""

    target: str | None = _models("Hub id or folder of the model that answers", metavar="ID|PATH")
    draft: str | None = _models("Hub id or folder of the model that drafts and learns", metavar="ID|PATH")
    bundled: bool = _models("serve the bundled pair", False)
    threads: int | None = _models(THREADS, metavar="N")
    host: str = _server("where to listen; any other address lets other machines in", "127.0.0.1")
    port: int = _server("where to listen; 0 is a free one", 8000)
    served_model_name: str | None = _server("how clients name the model; as --target does by default", metavar="NAME")
    api_key: str | None = _server("what clients must send as a bearer token; other users of this machine can see it, "
                                  "so the next one is better", rivals="key")  # fmt: skip
    api_key_file: Path | None = _server("file that holds that key", rivals="key", metavar="FILE")
    max_queue: int = _server("requests that may wait; further ones are answered 503", 64, metavar="N")
    shutdown_seconds: float = _server("seconds that requests are given to end, once the server is told to stop",
                                      30.0, metavar="S")  # fmt: skip
    max_new_tokens: int = _answers("most tokens of an answer to a chat that names no most", 1024, metavar="N")
    chat_template_kwargs: dict[str, Any] | None = _answers(
        f"{CHAT_TEMPLATE_KWARGS}; those of a request go before", metavar="JSON"
    )
    learn: bool = flag("let the draft learn; without it, serve and count only", True)
    state_dir: Path | None = flag("session to go on with, which is saved there every 8 updates and "
                                  "in the end; it holds tokens of requests", metavar="DIR")  # fmt: skip
    config: OnlineConfig = learning()

    @property
    def name(self) -> str:
        """The model, as clients name it."""
        return self.served_model_name or self.target or "bundled"

    def check(self) -> None:
        """Raises ConfigError for what is missing or too small, and for what does not go together."""
        if self.bundled == bool(self.target or self.draft):
            raise ConfigError("Name a --target and a --draft, or --bundled, which brings both.")
        self.check_together("target", "draft")
        self.check_counts("threads", "max_new_tokens")
        self.check_not_negative("port", "max_queue", "shutdown_seconds")
        self.check_auto()
        if self.config.update_strategy == "manual":
            raise ConfigError("--update-strategy manual would never learn here: choose another, or --no-learn.")
        _ = self.key

    @property
    def key(self) -> str | None:
        """What clients must send; raises ConfigError where it cannot be read, or sent."""
        key = self.api_key
        try:
            if self.api_key_file is not None:
                key = self.api_key_file.expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"The key cannot be read from {self.api_key_file}: {why}.") from None
        if key is not None and not (key.isascii() and key.isprintable() and key.split() == [key]):
            where = "--api-key" if self.api_key_file is None else f"The file {self.api_key_file}"
            raise ConfigError(
                f"{where} must hold a key of printable ASCII characters without spaces, "
                f"got {f'{len(key)} characters with others among them' if key.strip() else 'nothing'}."
            )
        return key


def serve_command(settings: ServeSettings) -> int:
    """Serve until told to stop; returns the exit code."""
    settings.check()
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn", "prometheus_client")):
        raise ConfigError('The server is an extra. Install it: pip install "osd-hf[serve]"')
    server: Any = importlib.import_module("osd_hf.server.app")
    running: Any = importlib.import_module("osd_hf.server.listener")
    metrics: Any = importlib.import_module("osd_hf.server.metrics")
    key = settings.key
    service = server.Service(
        settings.name, max_queue=settings.max_queue, max_new_tokens=settings.max_new_tokens, learn=settings.learn,
        chat_template_kwargs=settings.chat_template_kwargs,
    )  # fmt: skip
    address = running.Listener(settings.host, settings.port)
    if key is None and not address.is_local:
        logger.warning(
            "Other machines can reach %s, and no key is asked for: give one by --api-key-file.", address.address
        )
    hosts = (*LOCAL_HOSTS, settings.host) if key is None and address.is_local else ()
    failed: list[Exception] = []

    def figures() -> Iterable[Any]:
        return () if service.assistant is None else metrics.assistant_metrics(service.assistant)

    def load() -> None:
        try:
            service.open(opened(settings))
        except Exception as error:  # noqa: BLE001 - raised by the thread that serves
            failed.append(error)
            address.stop()
        else:
            print(f"{settings.name} is served at {address.address}/v1", flush=True)

    def stop() -> None:
        if not failed:
            print("osd-hf: stopping", file=sys.stderr)
        service.stop(settings.shutdown_seconds)

    loading = threading.Thread(target=load, name="osd_hf-loading", daemon=True)
    address.run(
        server.make_app(service, api_key=key, hosts=hosts, routes=[metrics.metrics_route(figures)]),
        shutdown_seconds=settings.shutdown_seconds + CUT_SECONDS,
        on_start=loading.start, on_stop=stop,
    )  # fmt: skip
    if not failed and loading.is_alive():
        os._exit(0)  # nothing is to be kept, and an interpreter that ends beside it would be aborted by torch
    if failed:
        raise failed[0]
    service.close()
    return 0


def opened(settings: ServeSettings) -> OnlineAssistant:
    """The pair with its session, warmed up."""
    pair = load_pair(settings.target, settings.draft, **settings.loading)
    session = None if settings.state_dir is None else settings.state_dir.expanduser()
    if session is not None:
        check_pointer(session)
    ids = torch.tensor([pair.tokenizer(WARM_UP)["input_ids"]], device=input_device(pair.target))
    how: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": WARM_UP_TOKENS,
        "stop_strings": None,
        **pad_setting(pair.target),
    }  # fmt: skip
    choose_threads(pair.target, lambda: pair.target.generate(ids, **how), settings.threads)
    assistant = OnlineAssistant(*pair, settings.config, autosave=session if settings.learn else None)
    assistant.warm_up()
    assistant.generate(ids, learn=False, **how)
    assistant.reset_stats()
    if session is not None and has_session(session):
        assistant.load_state(session)
    return assistant
