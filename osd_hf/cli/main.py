"""The command line: `osd-hf quickstart | run | replay | bench | distill | collect | learn | export | push | app`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import os
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers

from osd_hf.bench.controlled import SHAPES
from osd_hf.bench.quickstart import QuickstartSizes
from osd_hf.cli import flags as shared_flags
from osd_hf.cli import run as commands
from osd_hf.cli.bench import bench_command
from osd_hf.cli.collect import add_collect, collect_command
from osd_hf.cli.distill import add_distill, distill_command
from osd_hf.cli.flags import add_placement, check_counts
from osd_hf.cli.learn import add_learn, learn_command
from osd_hf.cli.push import add_export, add_push, export_command, push_command
from osd_hf.config import OnlineConfig
from osd_hf.errors import CaptureError, ConfigError, HubError, LearnerError, OSDError, ServerError
from osd_hf.utils.masking import without_credentials

__all__ = ["add_app", "app_command", "main"]


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


EPILOG = "exit codes: 0 done; 1 the run failed, or an output differed; 2 bad usage or input; 130 interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments; those of the process by default.

    Returns:
        `int`: the exit code, see `osd-hf --help`. Bad usage exits by itself, as `argparse` does.
    """
    args = _parser().parse_args(argv)
    _tell_nobody()
    transformers.utils.logging.disable_progress_bar()
    try:
        shared_flags.check_json(getattr(args, "json", None))  # not every command reports
        return int(args.command(args))
    except KeyboardInterrupt as interrupt:
        print(": ".join(["osd-hf: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return shared_flags.INTERRUPTED
    except (OSDError, OSError) as error:
        print(f"osd-hf: error: {without_credentials(' '.join(str(error).split()))}", file=sys.stderr)
        return (
            shared_flags.FAILED
            if isinstance(error, LearnerError | CaptureError | HubError | ServerError | OSError)
            else shared_flags.BAD_INPUT
        )


def _tell_nobody() -> None:
    """What the commands start reports to nobody how it is used, unless the environment says that it may."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    if "HF_HUB_DISABLE_TELEMETRY" not in os.environ:
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # for processes to come; in this one it has been read already
        huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True


# --- arguments ----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="osd-hf", description="Assistant models that learn while they serve.", epilog=EPILOG
    )
    subparsers = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, command: Any, help: str) -> argparse.ArgumentParser:
        added = subparsers.add_parser(
            name, help=help, description=help[0].upper() + help[1:] + ".", epilog=EPILOG,
            formatter_class=_HelpWithDefaults,
            allow_abbrev=False,  # a token is known by the whole name of its flag, and never written down
        )  # fmt: skip
        added.set_defaults(command=command)
        return added

    def add_reporting(name: str, command: Any, help: str) -> argparse.ArgumentParser:
        added = add(name, command, help)
        added.add_argument("--json", metavar="PATH", help="also write the report there; - is the standard output")
        return added

    _add_quickstart(
        add_reporting(
            "quickstart", commands.quickstart_command, "serve and learn on the bundled pair, before and after"
        )
    )
    _add_run(add_reporting("run", commands.run_command, "serve a stream of prompts with a draft that learns"))
    _add_replay(add_reporting("replay", commands.replay_command, "what drafts would have scored on recorded requests"))
    _add_bench(add_reporting("bench", bench_command, "time target alone, stock and lean drafting side by side"))
    add_app(add("app", app_command, "chat in the browser, and watch the draft learn"))
    add_distill(add_reporting("distill", distill_command, "teach a draft on a fixed data set, before it serves"))
    add_export(add_reporting("export", export_command, "write a draft for a serving engine"))
    add_push(add_reporting("push", push_command, "measure a draft and push it to the Hub, with its card"))
    added = add_reporting("collect", collect_command, "keep what a serving engine answers, for a draft to learn from")
    add_collect(added)
    added = add_reporting("learn", learn_command, "teach a draft from what was collected, and publish its versions")
    add_learn(added)
    _add_config(added)
    return parser


class _HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only where it says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default in (None, False, argparse.SUPPRESS)
        return action.help if says_nothing else super()._get_help_string(action)


def _add_quickstart(parser: argparse.ArgumentParser) -> None:
    for field in dataclasses.fields(QuickstartSizes):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=field.default, metavar="N", help=field.metadata["help"])
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and of learning")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch, at least 1; measured by default")
    parser.add_argument("--target", metavar="ID|PATH", help="another target for the same prompts")
    parser.add_argument("--draft", metavar="ID|PATH", help="another draft for the same prompts")
    parser.add_argument("--output-dir", type=Path, default=Path("osd_hf_quickstart"), help="overwritten")


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument("--target", metavar="ID|PATH", help="Hub id or folder of the model that answers")
    group.add_argument("--draft", metavar="ID|PATH", help="Hub id or folder of the model that drafts and learns")
    group.add_argument("--bundled", action="store_true", help="the bundled pair, on prompts of its domains")
    shared_flags.add_placement(group)
    group = parser.add_argument_group("prompts")
    shared_flags.add_prompts(group, bundled_flag="--bundled")
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="bound of an answer")
    group.add_argument("--do-sample", action="store_true", help="sample; greedy otherwise. --seed makes it repeatable")
    group.add_argument("--temperature", type=float, help="with --do-sample")
    group.add_argument("--top-p", type=float, help="with --do-sample")
    group.add_argument("--top-k", type=int, help="with --do-sample")
    _add_config(parser)
    parser.add_argument("--no-learn", action="store_true", help="serve and count only")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-dir", type=Path, default=Path("osd_hf_run"), help="report, plot, journal, draft, state"
    )
    group.add_argument("--resume", action="store_true", help="go on with the run in the output folder")
    group.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="updates between two saves; saved once a minute by default",
    )
    group.add_argument("--keep-text", action="store_true", help="prompts and answers in the journal")
    group.add_argument("--store", metavar="DIR", help="also log the captured requests there, for replay; a killed run "
                       "serves those since its last save again, so they may stand there twice")  # fmt: skip
    group.add_argument("--report-to", action="append", metavar="NAME", help="trackio, tensorboard, wandb, ...")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", required=True, metavar="DIR", help="folder of captured requests")
    parser.add_argument("--draft", required=True, action="append", metavar="ID|PATH", help="repeat for several")
    parser.add_argument("--domain", help="requests of this domain only")
    parser.add_argument("--limit", type=int, metavar="N", help="the newest N requests only")
    parser.add_argument("--cost", type=float, metavar="C",
                        help="time of a draft's forward over the target's, for the expected speed-up")  # fmt: skip
    parser.add_argument("--learn", action="store_true", help="let each draft learn from the requests, in their order")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="of a draft"
    )
    parser.add_argument("--device", help="such as cpu or cuda:0; CUDA where there is one by default")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("osd_hf_replay"), help="plots, with --learn; overwritten"
    )
    _add_config(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument("--target", metavar="ID|PATH", help="instead of the bundled target")
    group.add_argument("--draft", metavar="ID|PATH", help="instead of the bundled draft")
    shared_flags.add_placement(group, bundled=True)
    group.add_argument("--k", default="5", metavar="N[,N...]", help="tokens drafted per round")
    group.add_argument("--compile", action="store_true", help="also time lean drafting with the draft compiled")
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompts", action="append", metavar="ID|FILE",
                       help="instead of the bundled domains: Hub data set id, or a json, jsonl or parquet file "
                       "(repeat for several)")  # fmt: skip
    group.add_argument("--column", default="prompt", help="column of the prompt")
    group.add_argument("--prompt-template", metavar="FORMAT", help="instead of a column: a format string")
    group.add_argument("--split", default="train", help="of a Hub data set")
    group.add_argument("--no-chat-template", action="store_true",
                       help="plain text, also where the tokenizer has a chat template")  # fmt: skip
    group = parser.add_argument_group("sizes")
    group.add_argument("--requests", type=int, default=16, metavar="N", help="timed, per data set")
    group.add_argument("--watched-requests", type=int, default=3, metavar="N",
                       help="per data set, answered once more to time what a round consists of")  # fmt: skip
    group.add_argument("--learn-requests", type=int, default=50, metavar="N",
                       help="per data set, served before to make the learned draft; 0 leaves it out")  # fmt: skip
    group.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="bound of an answer")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, learning and random weights")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch, at least 1; measured by default")
    group = parser.add_argument_group("controlled acceptance, for times of large shapes with random weights")
    group.add_argument("--controlled", metavar="ALPHA[,ALPHA...]", help="a proposal is right with this probability")
    group.add_argument("--target-shape", metavar="NAME", help=f"one of {', '.join(SHAPES)}; 7b by default")
    group.add_argument("--draft-shape", metavar="NAME", help="likewise; 160m by default")
    group.add_argument("--prompt-tokens", type=int, metavar="N", help="64 by default")
    parser.add_argument("--output-dir", type=Path, default=Path("osd_hf_bench"), help="report and plot; overwritten")


def _add_config(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("learning")
    group.add_argument("--paper", action="store_true", help="the rule of arXiv 2310.07177; other flags change it")
    kinds = typing.get_type_hints(OnlineConfig)
    for field in dataclasses.fields(OnlineConfig):
        if kinds[field.name] is bool:
            group.add_argument(
                "--" + field.name.replace("_", "-"), dest=f"config.{field.name}",
                action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS,
                help=f"{field.metadata['help']} (default: {'yes' if field.default else 'no'})",
            )  # fmt: skip
            continue
        options = set(typing.get_args(kinds[field.name]))
        is_choice = typing.get_origin(kinds[field.name]) is typing.Literal
        kind = str if is_choice else _optional_number if types.NoneType in options else kinds[field.name]
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=f"config.{field.name}",
            type=kind,
            choices=typing.get_args(kinds[field.name]) if is_choice else None,
            metavar=None if is_choice else "X",
            default=argparse.SUPPRESS,
            help=f"{field.metadata['help']} (default: {_shown(field.default)})",
        )


def _optional_number(text: str) -> int | str | None:
    try:
        return None if text.lower() == "none" else int(text)
    except ValueError:
        return text  # for settings that are a number or a word; the configuration says what it takes


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
