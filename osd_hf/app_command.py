"""The command `osd-hf app`: its flags, and what it needs installed."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from pathlib import Path

from osd_hf.errors import ConfigError
from osd_hf.shared_flags import add_placement, check_counts

__all__ = ["add_app", "app_command"]


def add_app(parser: argparse.ArgumentParser) -> None:
    """The arguments of `osd-hf app`."""
    group = parser.add_argument_group("models")
    group.add_argument("--target", metavar="ID|PATH", help="instead of the bundled target")
    group.add_argument("--draft", metavar="ID|PATH", help="instead of the bundled draft")
    add_placement(group, bundled=True)
    group.add_argument("--threads", type=int, metavar="N",
                       help="of torch; by default 1 for the bundled pair, all cores for others")  # fmt: skip
    group = parser.add_argument_group("server")
    group.add_argument("--host", help="this machine alone by default (or GRADIO_SERVER_NAME); any other address, such "
                       "as 0.0.0.0, lets others in and implies --public, unless --login is given")  # fmt: skip
    group.add_argument("--port", type=int, help="the first free one from 7860 by default")
    group.add_argument(
        "--share", action="store_true", help="also through a public address of Gradio's; implies --public"
    )
    group.add_argument("--public", action="store_true",
                       help="strangers come: nobody loads models, saves, pushes or resets what is shared (always so "
                       "in a Space, behind GRADIO_ROOT_PATH, and at any address but this machine's own)")  # fmt: skip
    group.add_argument("--login", action="store_true",
                       help="all controls, wherever the page is reached, for whoever logs in as `owner`, with the "
                       "password of OSD_HF_APP_PASSWORD or one that is printed; not for strangers")  # fmt: skip
    group = parser.add_argument_group("keeping")
    group.add_argument("--output-dir", type=Path, default=Path("osd_hf_app"), help="where the page saves")
    group.add_argument("--state", metavar="DIR", help="go on with a session that the page saved (its folder session)")


def app_command(args: argparse.Namespace) -> int:
    """Serve the demo; raises ConfigError where it is not installed."""
    if importlib.util.find_spec("gradio") is None or importlib.util.find_spec("osd_hf_app") is None:
        raise ConfigError('The app is an extra. Install it: pip install "osd-hf[app]"')
    if args.login and args.public:
        raise ConfigError("--public lets everybody in, --login only those with the password. Give one of them.")
    check_counts(args, "threads")
    return int(importlib.import_module("osd_hf_app.launch").launch(args))
