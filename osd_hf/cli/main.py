"""The command line: `osd-hf quickstart | app | env | plan | bench | replay | run | collect | ...`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import huggingface_hub.constants

from osd_hf import __version__
from osd_hf.cli import BAD_INPUT, FAILED, INTERRUPTED
from osd_hf.cli.arguments import add_flags, read_arguments, sentence, spelled
from osd_hf.errors import (
    CaptureError,
    ConfigError,
    HubError,
    LearnerError,
    OSDError,
    ServerError,
    nearest,
    without_credentials,
)

# What each command does, by what it is for. A module in this folder has its settings, `NameSettings`, and
# `name_command`.
GROUPS = {
    "try": {
        "quickstart": "serve the bundled pair, let its draft learn, and compare before and after",
        "app": "chat in the browser, and watch the draft learn",
        "env": "say what is installed and what the machine has, for a bug report",
    },
    "measure": {
        "plan": "say what a pair will take in memory, before anything is loaded",
        "bench": "time the target alone, stock and lean drafting side by side",
        "compare": "say which of several drafts for a target is worth it, on the same prompts",
        "replay": "score drafts on recorded requests, as they are and learning",
        "doctor": "say whether a serving engine drafts with the draft that it should, and whether that pays",
    },
    "learn": {
        "run": "serve a stream of prompts with a draft that learns",
        "serve": "answer over HTTP as OpenAI's API does, with a draft that learns",
        "collect": "keep what a serving engine answers, for a draft to learn from",
        "proxy": "stand before serving engines, and keep what they answer as it passes",
        "learn": "teach a draft from what was collected, and publish its versions",
    },
    "make": {
        "draft": "make a draft of the target's own layers, taught on its answers",
        "distill": "teach a draft on a fixed data set, before it serves",
    },
    "ship": {
        "export": "write a draft for a serving engine, and the command of vLLM that serves it",
        "push": "measure a draft and push it to the Hub, with its card",
    },
}
COMMANDS = {name: help for group in GROUPS.values() for name, help in group.items()}
MODULES = {"quickstart": "bench", "export": "push"}  # of commands whose module has another name
EPILOG = (
    "exit codes: 0 done; 1 the run failed, or an output differed (doctor: something is wrong); 2 bad usage or input "
    "(doctor: it could not tell); 130 interrupted"
)


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
    """The command that these arguments name, and its settings. Only that command is imported, so that the list of
    commands is shown at once."""
    if not argv or argv[0] not in COMMANDS:
        _refuse(argv)
    name, arguments = argv[0], spelled(argv[0], argv[1:])
    help = COMMANDS[name]
    texts = {"prog": f"osd-hf {name}", "description": sentence(help), "epilog": EPILOG}
    module = _module(name)
    if name == "distill":  # reads them by the parser of trl, which takes seconds to import
        # A token is known by the whole name of its flag, and never written down.
        return module.distill_command, module.read_settings(arguments, allow_abbrev=False, **texts)
    kind = getattr(module, f"{name.capitalize()}Settings")
    return getattr(module, f"{name}_command"), read_arguments(kind, arguments, **texts)


def _module(command: str) -> Any:
    return importlib.import_module(f"osd_hf.cli.{MODULES.get(command, command)}")


def _refuse(argv: Sequence[str]) -> None:
    """Show the list of commands, the version, or a script for the shell, where that is asked for, and otherwise say
    what is wrong; exits."""
    parser = argparse.ArgumentParser(
        prog="osd-hf", description="Assistant models that learn while they serve.", epilog=EPILOG,
        usage="%(prog)s COMMAND [--NAME VALUE ...]; %(prog)s COMMAND --help names the flags",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"osd-hf {__version__}")
    parser.add_argument(
        "--print-completion", metavar="SHELL",
        help="Print a script with which bash, zsh, fish, tcsh or powershell completes commands and flags.",
    )  # fmt: skip
    for title, commands in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, help in commands.items():
            group.add_argument(name, nargs="?", help=sentence(help))
    if not argv:
        parser.error("name a command")
    if not argv[0].startswith("-"):
        parser.error(f"there is no command {argv[0]!r}.{nearest(argv[0], COMMANDS)}")
    given = parser.parse_args(argv[: 2 if argv[0] == "--print-completion" else 1])
    if given.print_completion is None:
        parser.error("name a command first, and then its flags")
    print(_completion(given.print_completion))
    parser.exit()


def _completion(shell: str) -> str:
    """A script with which a shell completes commands, flags, and what they take; raises ConfigError. It is made once:
    asking a command at each touch of the key would take the seconds of its imports."""
    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError as error:
        raise ConfigError("Completion needs shtab: pip install 'osd-hf[completion]'.") from error
    if shell not in shtab.SUPPORTED_SHELLS:
        raise ConfigError(f"--print-completion takes {', '.join(shtab.SUPPORTED_SHELLS)}, got {shell!r}.")
    parser = argparse.ArgumentParser(prog="osd-hf")
    commands = parser.add_subparsers()
    for name, help in COMMANDS.items():
        kind = getattr(_module(name), f"{name.capitalize()}Settings")
        for action in add_flags(commands.add_parser(name, help=help), kind).values():
            places = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE, "PATH": shtab.FILE}
            of = str(action.metavar or "").split("|")[-1]
            if of in places:
                action.complete = places[of]  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))
