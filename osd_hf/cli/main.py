"""The command line: `osd-hf quickstart | plan | run | replay | bench | distill | collect | ...`."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import huggingface_hub.constants

from osd_hf.cli import BAD_INPUT, FAILED, INTERRUPTED
from osd_hf.errors import CaptureError, HubError, LearnerError, OSDError, ServerError, without_credentials

# What each command does. A module in this folder has its settings, `NameSettings`, and `name_command`.
COMMANDS = {
    "quickstart": "serve and learn on the bundled pair, before and after",
    "plan": "what a pair will take in memory, before anything is loaded",
    "run": "serve a stream of prompts with a draft that learns",
    "replay": "what drafts would have scored on recorded requests",
    "bench": "time target alone, stock and lean drafting side by side",
    "app": "chat in the browser, and watch the draft learn",
    "draft": "make a draft of the target's own layers, taught on its answers",
    "distill": "teach a draft on a fixed data set, before it serves",
    "export": "write a draft for a serving engine",
    "push": "measure a draft and push it to the Hub, with its card",
    "collect": "keep what a serving engine answers, for a draft to learn from",
    "learn": "teach a draft from what was collected, and publish its versions",
}
MODULES = {"quickstart": "bench", "export": "push"}  # of commands whose module has another name
EPILOG = "exit codes: 0 done; 1 the run failed, or an output differed; 2 bad usage or input; 130 interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments; those of the process by default.

    Returns:
        `int`: the exit code, see `osd-hf --help`. Bad usage exits by itself, as `argparse` does.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        command, settings = _asked(argv)
        _tell_nobody()
        importlib.import_module("transformers").utils.logging.disable_progress_bar()
        return int(command(settings))
    except KeyboardInterrupt as interrupt:
        print(": ".join(["osd-hf: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return INTERRUPTED
    except (OSDError, OSError) as error:
        print(f"osd-hf: error: {without_credentials(' '.join(str(error).split()))}", file=sys.stderr)
        is_failure = isinstance(error, LearnerError | CaptureError | HubError | ServerError | OSError)
        return FAILED if is_failure else BAD_INPUT


def _tell_nobody() -> None:
    """What the commands start reports to nobody how it is used, unless the environment says that it may."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    if "HF_HUB_DISABLE_TELEMETRY" not in os.environ:
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # for processes to come; in this one it has been read already
        huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True


def _asked(argv: Sequence[str]) -> tuple[Callable[[Any], int], Any]:
    """The command that these arguments name, and its settings."""
    if argv and argv[0] == "distill":  # reads them by the parser of trl, which takes seconds to import
        module: Any = importlib.import_module("osd_hf.cli.distill")
        return module.distill_command, module.read_settings(argv[1:], **_texts("distill"))
    args = _parser(argv).parse_args(argv)
    return args.command, args.settings(args)


def _texts(name: str) -> dict[str, Any]:
    """Arguments of the parser of a command."""
    help = COMMANDS[name]
    return {
        "prog": f"osd-hf {name}", "description": help[0].upper() + help[1:] + ".", "epilog": EPILOG,
        "allow_abbrev": False,  # a token is known by the whole name of its flag, and never written down
    }  # fmt: skip


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of these arguments. Only the command that they name is imported and gets its flags, so that the list
    of commands is shown at once."""
    parser = argparse.ArgumentParser(
        prog="osd-hf", description="Assistant models that learn while they serve.", epilog=EPILOG
    )
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for name, help in COMMANDS.items():
        added = subparsers.add_parser(name, help=help, **_texts(name))
        if argv and argv[0] == name:
            flags: Any = importlib.import_module("osd_hf.cli.flags")
            module: Any = importlib.import_module(f"osd_hf.cli.{MODULES.get(name, name)}")
            kind = getattr(module, f"{name.capitalize()}Settings")
            flags.add_flags(added, kind)
            read = functools.partial(flags.settings_from, kind)
            added.set_defaults(command=getattr(module, f"{name}_command"), settings=read)
    return parser
