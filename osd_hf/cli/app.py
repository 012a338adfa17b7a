"""The command `osd-hf app`: the demo in the browser."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osd_hf.cli.settings import THREADS, CommandParser, ServedPairSettings, flag, require_extra


@dataclass(frozen=True, kw_only=True)
class AppSettings(ServedPairSettings):
    """Flags of `osd-hf app`."""

    threads: int | None = flag(THREADS, None, minimum=1)
    host: str | None = flag("address to listen at; other machines are let in by 0.0.0.0, which implies --public", None)
    port: int | None = flag("port to listen at; by default the first free one from 7860", None)
    share: bool = flag("also serve at a public address of Gradio's; implies --public", False)
    public: bool = flag("serve strangers, who may not save, push, or reset", False, excludes="login output_dir")
    login: bool = flag("ask for the user `owner` and the password in OSD_HF_APP_PASSWORD, or a printed one", False)
    output_dir: Path = flag("folder where the page saves", Path("osd_hf_app"))
    state_dir: Path | None = flag("resume from a state that the page saved (its folder session)", None)


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command."""
    return CommandParser([AppSettings], **how)


def app_command(settings: AppSettings) -> int:
    """Serve the demo; raises ConfigError if it is not installed."""
    require_extra("app", "gradio", "osd_hf_app")
    return int(importlib.import_module("osd_hf_app.launch").launch(settings))
