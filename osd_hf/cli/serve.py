"""The command `osd-hf serve`: an OpenAI-compatible server with a draft that learns."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from osd_hf.assistant import OnlineAssistant
from osd_hf.cli.settings import (
    PAPER,
    THREADS,
    CommandParser,
    ServedPairSettings,
    TemplateSettings,
    flag,
    learning_parser,
    read_key,
    require_extra,
)
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError
from osd_hf.evaluation.benchmark import pad_setting
from osd_hf.learning.session import has_session
from osd_hf.models import input_device
from osd_hf.utils.context import choose_threads
from osd_hf.utils.disk import hold_lock, make_private_folder

logger = logging.getLogger(__name__)

WARM_UP_PROMPT, WARM_UP_TOKENS = "Who are you?", 8
LOCK = ".serve.lock"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")  # names of this machine for itself
CANCEL_SECONDS = 2.0  # to tell clients that their requests are cut off


@dataclass(frozen=True, kw_only=True)
class ServeSettings(TemplateSettings, ServedPairSettings):
    """Flags of `osd-hf serve`."""

    threads: int | None = flag(THREADS, None, minimum=1)
    host: str = flag("address to listen at; any other one lets other machines in", "127.0.0.1")
    port: int = flag("port to listen at; 0 = a free one", 8000, minimum=0)
    served_model_name: str | None = flag("name of the model for clients; by default --target", None, metavar="NAME")
    api_key: str | None = flag("token of clients; users of this machine can see it", None, excludes="api_key_file")
    api_key_file: Path | None = flag("file with that token", None, metavar="FILE")
    max_queue: int = flag("requests that may wait; further ones get status 503", 64, minimum=0)
    shutdown_seconds: float = flag("seconds for running requests after a signal", 30.0, minimum=0)
    max_new_tokens: int = flag("maximum tokens of an answer, unless the request sets it", 1024, minimum=1)
    learn: bool = flag("let the draft learn", True)
    paper: bool = flag(PAPER, False)
    state_dir: Path | None = flag("state to resume from and to save, with tokens of requests", None)

    @property
    def name(self) -> str:
        """Name of the model for clients."""
        return self.served_model_name or self.target or str(self.pair)

    def check(self) -> None:
        if not (self.pair or self.target):
            raise ConfigError("Name a --target, and a --draft if there is one, or --pair bundled.")

    @property
    def key(self) -> str | None:
        """The bearer token of clients; raises ConfigError if it cannot be read or sent."""
        key = self.api_key if self.api_key_file is None else read_key(self.api_key_file)
        if key is not None and not (key.isascii() and key.isprintable() and key.split() == [key]):
            where = "--api-key" if self.api_key_file is None else f"The file {self.api_key_file}"
            raise ConfigError(f"{where} must hold a key of printable ASCII characters without spaces.")
        return key


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command."""
    return learning_parser(ServeSettings, arguments, **how)


def serve_command(settings: ServeSettings, config: OnlineConfig) -> int:
    """Serve until a signal; returns the exit code."""
    if config.update_strategy == "manual":
        raise ConfigError("--update-strategy manual would never learn here: choose another, or --no-learn.")
    key, template_kwargs = settings.key, settings.template_kwargs
    require_extra("serve", "starlette", "uvicorn", "prometheus_client")
    server: Any = importlib.import_module("osd_hf.server.app")
    metrics: Any = importlib.import_module("osd_hf.server.metrics")
    running = server.Listener(settings.host, settings.port)
    if key is None and not running.is_local:
        logger.warning("Other machines can reach %s without a key: set one by --api-key-file.", running.address)
    hosts = (*LOCAL_HOSTS, settings.host) if key is None and running.is_local else ()
    state = settings.state_dir if settings.learn else None
    lock = None
    try:
        if state is not None:
            make_private_folder(state.expanduser())
            refusal = f"Another server saves to {state}. Choose another folder."
            lock = hold_lock(state.expanduser() / LOCK, refusal, is_needed=False)
        service = server.Service(
            open_assistant(settings, config),
            settings.name,
            max_queue=settings.max_queue,
            max_new_tokens=settings.max_new_tokens,
            learn=settings.learn,
            chat_template_kwargs=template_kwargs,
        )
    except BaseException:
        running.close()
        raise

    def stop() -> None:
        print("osd-hf: stopping", file=sys.stderr)
        service.stop(settings.shutdown_seconds)

    route = metrics.metrics_route(lambda: metrics.assistant_metrics(service.assistant))
    running.run(
        server.make_app(service, api_key=key, hosts=hosts, routes=[route]),
        shutdown_seconds=settings.shutdown_seconds + CANCEL_SECONDS,
        on_start=lambda: print(f"{settings.name} is served at {running.address}/v1", flush=True),
        on_stop=stop,
    )
    service.close()
    if lock is not None:
        lock.release()
        print(f"osd-hf: the state is saved in {state}", file=sys.stderr)
    return 0


def open_assistant(settings: ServeSettings, config: OnlineConfig) -> OnlineAssistant:
    """Load the pair and its saved state, and warm it up."""
    pair = settings.load_pair()
    session = None if settings.state_dir is None else settings.state_dir.expanduser()
    ids = torch.tensor([pair.tokenizer(WARM_UP_PROMPT)["input_ids"]], device=input_device(pair.target))
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": WARM_UP_TOKENS, "stop_strings": None}
    how |= {"attention_mask": torch.ones_like(ids), **pad_setting(pair.target)}
    choose_threads(pair.target, lambda: pair.target.generate(ids, **how), settings.threads)
    assistant = OnlineAssistant(*pair, config, autosave=session if settings.learn else None)
    assistant.warm_up()
    assistant.generate(ids, learn=False, **how)
    assistant.reset_stats()
    if session is not None and has_session(session):
        assistant.load_state(session)
        served, version = assistant.stats.num_requests, assistant.version
        print(f"osd-hf: continues {session}: {served} requests, draft version {version}", file=sys.stderr)
    return assistant
