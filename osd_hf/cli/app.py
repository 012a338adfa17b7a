"""The command `osd-hf app`: the demo in the browser."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from osd_hf.cli.flags import flag, switch
from osd_hf.cli.settings import Placement
from osd_hf.errors import ConfigError

__all__ = ["AppSettings", "app_command"]


@dataclass(frozen=True, kw_only=True)
class AppSettings(Placement):
    """The flags of `osd-hf app`."""

    target: str | None = flag("instead of the bundled target", group="models", metavar="ID|PATH")
    draft: str | None = flag("instead of the bundled draft", group="models", metavar="ID|PATH")
    threads: int | None = flag(
        "of torch; by default 1 for the bundled pair, all cores for others", group="models", metavar="N"
    )
    host: str | None = flag(
        "this machine alone by default (or GRADIO_SERVER_NAME); any other address, such as 0.0.0.0, lets others in "
        "and implies --public, unless --login is given",
        group="server",
    )
    port: int | None = flag("the first free one from 7860 by default", group="server")
    share: bool = switch("also through a public address of Gradio's; implies --public", group="server")
    public: bool = switch(
        "strangers come: nobody loads models, saves, pushes or resets what is shared (always so in a Space, with "
        "GRADIO_ROOT_PATH, and at any address but this machine's own)",
        group="server",
    )
    login: bool = switch(
        "all controls, wherever the page is reached, for whoever logs in as `owner`, with the password of "
        "OSD_HF_APP_PASSWORD or one that is printed; not for strangers",
        group="server",
    )
    output_dir: Path = flag("where the page saves", Path("osd_hf_app"), group="keeping")
    state: str | None = flag(
        "go on with a session that the page saved (its folder session)", group="keeping", metavar="DIR"
    )


def app_command(settings: AppSettings) -> int:
    """Serve the demo; raises ConfigError where it is not installed."""
    if importlib.util.find_spec("gradio") is None or importlib.util.find_spec("osd_hf_app") is None:
        raise ConfigError('The app is an extra. Install it: pip install "osd-hf[app]"')
    if settings.login and settings.public:
        raise ConfigError("--public lets everybody in, --login only those with the password. Give one of them.")
    settings.check_counts("threads")
    return int(importlib.import_module("osd_hf_app.launch").launch(settings))
