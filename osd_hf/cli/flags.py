"""What several commands share: flags, what becomes of them, exit codes, reports, and being told to stop."""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from osd_hf import bundled
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError
from osd_hf.prompts import EncodedPrompts, Prompt, PromptSource
from osd_hf.utils.report import json_text

__all__ = [
    "BAD_INPUT",
    "BUNDLED_REQUESTS",
    "FAILED",
    "INTERRUPTED",
    "add_placement",
    "add_prompts",
    "bundled_mix",
    "check_counts",
    "check_json",
    "check_not_negative",
    "config_from",
    "output_stream",
    "prompt_source",
    "stopping",
    "warn_skipped",
    "write_json",
]

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
BUNDLED_REQUESTS = 200


# --- flags ----------------------------------------------------------------------------------------------------------


def add_placement(group: argparse._ArgumentGroup, *, bundled: bool = False) -> None:
    """The flags of how and where models are loaded; `bundled` where a command has the bundled pair by default."""
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
                       help="auto is each checkpoint's own; only float32 is exact to the token")  # fmt: skip
    pair = ", for the bundled pair the CPU" if bundled else ""
    group.add_argument("--device", help=f"such as cpu or cuda:0; CUDA where there is one by default{pair}")


def add_prompts(group: argparse._ArgumentGroup, *, bundled_flag: str = "") -> None:
    """The flags of where prompts come from; `bundled_flag` asks for those of the bundled domains."""
    with_bundled = f"with {bundled_flag}" if bundled_flag else "without --prompts"
    group.add_argument("--prompts", metavar="ID|FILE", help="Hub data set id, or a json, jsonl or parquet file")
    group.add_argument("--split", default="train", help="of a Hub data set")
    group.add_argument("--subset", help="configuration of a Hub data set")
    group.add_argument("--column", help="column of the prompt")
    group.add_argument("--prompt-template", metavar="FORMAT",
                       help="instead of a column: a format string, such as 'db: {db_id}\\n{question}'")  # fmt: skip
    group.add_argument("--no-chat-template", action="store_true",
                       help="plain text, also where the tokenizer has a chat template")  # fmt: skip
    group.add_argument("--domain", action="append", metavar="NAME", help=f"label of all prompts; {with_bundled}, "
                       "domains to serve (repeat for several)")  # fmt: skip
    group.add_argument("--domain-column", metavar="COLUMN", help="column of the label")
    group.add_argument("--num-requests", type=int, metavar="N",
                       help=f"all by default; {BUNDLED_REQUESTS} {with_bundled}")  # fmt: skip


def prompt_source(args: argparse.Namespace) -> PromptSource:
    """Where the flags of prompts point; raises ConfigError where they exclude each other."""
    if args.domain is not None and len(args.domain) > 1:
        raise ConfigError("--domain can be given several times only for bundled prompts; see --domain-column.")
    return PromptSource(
        args.prompts, args.column, args.prompt_template, args.domain[0] if args.domain else None, args.domain_column,
        args.split, args.subset,
    )  # fmt: skip


def bundled_mix(domains: Sequence[str] | None, count: int, seed: int) -> list[Prompt]:
    """Prompts of the bundled domains, mixed; raises ConfigError for a domain that is none."""
    if unknown := set(domains or ()) - set(bundled.DOMAINS):
        raise ConfigError(f"--domain must be one of {', '.join(bundled.DOMAINS)}, got {', '.join(sorted(unknown))}.")
    domains = domains or bundled.DOMAINS
    share = -(-count // len(domains))
    mixed = [(d, e.prompt) for d in domains for e in bundled.bundled_prompts(d, share, seed=seed)]
    random.Random(seed).shuffle(mixed)
    return [Prompt(i, text, domain) for i, (domain, text) in enumerate(mixed[:count])]


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError for a flag that is given and below 1."""
    for name in names:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}.")


def check_not_negative(args: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError for a flag that is negative, or no finite number."""
    for name in names:
        if not 0 <= getattr(args, name) < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must not be negative, got {getattr(args, name)}.")


def warn_skipped(encoded: EncodedPrompts, max_new_tokens: int) -> None:
    """Say which prompts are left out, if any are."""
    if encoded.skipped_empty or encoded.skipped_long:
        print(
            f"osd-hf: warning: skipped {encoded.skipped_empty} prompts without text and {encoded.skipped_long} that "
            f"leave no room for {max_new_tokens} new tokens.",
            file=sys.stderr,
        )


def config_from(args: argparse.Namespace) -> OnlineConfig:
    """The configuration of the flags of learning."""
    given = {name.removeprefix("config."): value for name, value in vars(args).items() if name.startswith("config.")}
    config = OnlineConfig.paper(**given) if args.paper else OnlineConfig(**given)
    if not isinstance(config.num_assistant_tokens, int):
        raise ConfigError("--num-assistant-tokens must be a number: what is compared needs one k throughout.")
    return config


# --- output ---------------------------------------------------------------------------------------------------------


def output_stream(args: argparse.Namespace) -> Any:
    """Where people read: not where the machine's JSON goes."""
    return sys.stderr if args.json == "-" else sys.stdout


def check_json(path: str | None) -> None:
    """Raises ConfigError where the report could not be written at the end of a long command."""
    if path not in (None, "-") and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise ConfigError(f"The report cannot be written to {path}: name a file in a folder that exists.")


def write_json(args: argparse.Namespace, report: dict[str, Any]) -> None:
    if args.json is None:
        return
    text = json_text(report, indent=1)
    if args.json == "-":
        print(text)
        return
    try:
        Path(args.json).write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"The report cannot be written to {args.json}: {error}.") from error


# --- long runs ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second SIGINT interrupts."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def stopped(number: int, _: Any) -> None:
        stop.set()
        print("osd-hf: stopping", file=sys.stderr)
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, stopped)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
