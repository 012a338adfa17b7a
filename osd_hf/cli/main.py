"""Run a command: `osd-hf quickstart | app | env | run | bench | draft | distill | serve | proxy | learn | push`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import huggingface_hub.constants

from osd_hf import __version__
from osd_hf.cli import BAD_INPUT, FAILED, INTERRUPTED
from osd_hf.errors import CaptureError, HubError, LearnerError, OSDError, ServerError, nearest, without_credentials

# Each command is a module of this folder with `make_parser` and `NAME_command`.
COMMANDS = {
    "quickstart": "serve the bundled pair, let its draft learn, and compare before and after",
    "app": "chat in the browser and watch the draft learn",
    "env": "show versions and hardware for a bug report, or the memory that models need",
    "run": "serve a stream of prompts with a draft that learns",
    "bench": "compare the speed of decoding methods, or the acceptance of drafts",
    "draft": "make a draft from the target's own layers, trained on its answers",
    "distill": "train a draft on a fixed data set",
    "serve": "serve an OpenAI-compatible API with a draft that learns",
    "proxy": "forward requests to serving engines and store their answers",
    "learn": "train a draft on stored answers of a serving engine, and publish its versions",
    "push": "evaluate a draft and push it to the Hub, or export it for vLLM",
}
POSITIONALS = {"draft": "[TARGET] DIR ", "env": "[TARGET DRAFT] ", "push": "[REPO] "}
EPILOG = "exit codes: 0 done; 1 the run failed, or an output differed; 2 bad usage or input; 130 interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with these arguments, by default those of the process; returns the exit code, see `osd-hf --help`.
    Bad usage exits, as `argparse` does."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        command, settings = parse(argv)
        disable_telemetry()
        importlib.import_module("transformers").utils.logging.disable_progress_bar()
        return int(command(*settings))
    except KeyboardInterrupt as interrupt:
        print(": ".join(["osd-hf: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return INTERRUPTED
    except (OSDError, OSError) as error:
        print(f"osd-hf: error: {without_credentials(' '.join(str(error).split()))}", file=sys.stderr)
        is_failure = isinstance(error, LearnerError | CaptureError | HubError | ServerError | OSError)
        return FAILED if is_failure else BAD_INPUT


def parse(argv: Sequence[str]) -> tuple[Any, tuple[Any, ...]]:
    """Return the function of a command and its settings. Only the module of that command is imported."""
    if not argv or argv[0] not in COMMANDS:  # print the commands or the version, or what is wrong, and exit
        usage = "%(prog)s COMMAND [--NAME VALUE ...]; %(prog)s COMMAND --help shows the flags"
        description = "Drafts that keep learning while they serve."
        parser = argparse.ArgumentParser(prog="osd-hf", description=description, epilog=EPILOG, usage=usage)
        parser.add_argument("--version", action="version", version=f"osd-hf {__version__}")
        for name, help in COMMANDS.items():
            parser.add_argument(name, nargs="?", help=help)
        if argv and not argv[0].startswith("-"):
            parser.error(f"there is no command {argv[0]!r}.{nearest(argv[0], COMMANDS)}")
        parser.parse_args(argv[:1])
        parser.error("name a command")
    name, arguments = argv[0], argv[1:]
    module: Any = importlib.import_module(f"osd_hf.cli.{name}")
    usage = f"osd-hf {name} [-h] {POSITIONALS.get(name, '')}[--NAME VALUE ...]"
    description = f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}."
    parser = module.make_parser(arguments, prog=f"osd-hf {name}", description=description, epilog=EPILOG, usage=usage)
    return getattr(module, f"{name}_command"), parser.parse_settings(arguments)


def disable_telemetry() -> None:
    """Turn off usage reports of Gradio and the Hub client, unless the environment sets them."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    if "HF_HUB_DISABLE_TELEMETRY" not in os.environ:
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # for child processes; this one has read the variable already
        huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True


if __name__ == "__main__":
    sys.exit(main())
