"""The command `osd-hf learn`: teaches a draft from collected requests while they come in, and publishes versions."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from osd_hf.bench.display import AlphaBar, plot_alpha, rolling_window, stats_interval
from osd_hf.bundled import load_bundled
from osd_hf.cli.flags import (
    FAILED,
    add_placement,
    check_counts,
    check_not_negative,
    config_from,
    output_stream,
    stopping,
    write_json,
)
from osd_hf.engine.learn import StoreFollower, StoreLearner
from osd_hf.engine.versions import VersionFolder
from osd_hf.errors import ConfigError, StateError, StoreError
from osd_hf.hub.cards import facts_of
from osd_hf.hub.push import check_push, check_visibility
from osd_hf.learning.tracking import make_accelerator
from osd_hf.metrics import AcceptanceStats
from osd_hf.pair import load_config, load_model, load_tokenizer, of_one_size, placed
from osd_hf.utils.report import provenance

__all__ = ["add_learn", "learn_command"]


def add_learn(parser: argparse.ArgumentParser) -> None:
    """The arguments of `osd-hf learn`, but for those of learning."""
    parser.add_argument("--store", required=True, action="append", type=Path, metavar="DIR",
                        help="folder that collectors fill (repeat for several)")  # fmt: skip
    parser.add_argument("--output-dir", required=True, type=Path, metavar="DIR",
                        help="where versions go; DIR/latest is the newest")  # fmt: skip
    group = parser.add_argument_group("models")
    group.add_argument("--draft", metavar="ID|PATH", help="where learning starts; the bundled one by default")
    group.add_argument("--target", metavar="ID|PATH", help="model whose answers the stores hold, for its tokenizer "
                       "and vocabulary (no weights are loaded); the bundled one by default")  # fmt: skip
    add_placement(group)
    group.add_argument("--threads", type=int, metavar="N", help="of torch; its own choice by default")
    group = parser.add_argument_group("requests")
    group.add_argument("--domain", metavar="NAME", help="learn from requests of this label only")
    group.add_argument("--once", action="store_true", help="end when all that is there is learned; wait otherwise")
    group.add_argument("--num-requests", type=int, metavar="N", help="end after so many more")
    group.add_argument("--poll-seconds", type=float, default=2.0, metavar="S", help="between two looks at the stores")
    group = parser.add_argument_group("publishing")
    group.add_argument("--state-dir", type=Path, metavar="DIR", help="session to go on with, which holds tokens of "
                       "requests; OUTPUT_DIR-state by default")  # fmt: skip
    group.add_argument("--keep", type=int, default=5, metavar="N", help="newest versions kept")
    group.add_argument("--publish-seconds", type=float, default=30.0, metavar="S", help="least between two versions")
    group.add_argument("--repo-id", metavar="USER/NAME", help="push each version there, too")
    group.add_argument("--public", action="store_true", help="with --repo-id: everybody may read it; otherwise a new "
                       "repo is private, and a public one is refused")  # fmt: skip
    group.add_argument("--token", help="of the Hub; the login of this machine by default")
    group.add_argument("--license", help="of the draft's base, as the Hub names it, for the card")
    group.add_argument("--report-to", action="append", metavar="NAME", help="trackio, tensorboard, wandb, ...")


def learn_command(args: argparse.Namespace) -> int:
    """`osd-hf learn`; the exit code."""
    config = config_from(args)
    if bool(args.draft) != bool(args.target):
        raise ConfigError("--draft and --target go together: name both, or neither for the bundled pair.")
    check_counts(args, "num_requests", "threads")
    check_not_negative(args, "poll_seconds", "publish_seconds")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    token, private = None, False if args.public else None
    if args.repo_id is not None:
        token = check_push(args.repo_id, args.token)
        check_visibility(args.repo_id, token, private)
    folder = args.output_dir.expanduser().absolute()
    state = folder.with_name(f"{folder.name}-state") if args.state_dir is None else args.state_dir.expanduser()
    target, draft, tokenizer = _learning_pair(args)
    versions = VersionFolder(folder, keep=args.keep)
    try:
        facts = replace(facts_of(target, draft), license=args.license, command=provenance()["command"])
        learner = StoreLearner(
            draft, tokenizer, StoreFollower(args.store), versions, config, domain=args.domain, facts=facts,
            state=state, repo_id=args.repo_id, token=token, private=private, publish_seconds=args.publish_seconds,
            accelerator=make_accelerator(args.report_to, config),
        )  # fmt: skip
    except BaseException:
        versions.close()
        raise
    is_done = _learn(args, learner, folder)
    report = _report(learner)
    out = output_stream(args)
    intervals = {name: stats_interval(_last_fifth(stats)) for name, stats in _sides(learner).items()}
    print(
        f"{learner.requests} requests, {learner.tokens} tokens; {len(learner.published)} versions published, latest "
        f"{report['latest'] or 'none'}; {learner.learning_seconds:.1f} s of learning\n"
        f"alpha over the last fifth: {intervals['learned']}, frozen {intervals['frozen']}",
        file=out,
    )
    for reason, count in learner.skipped.most_common():
        print(f"left out {count} {reason}", file=out)
    for reason, count in learner.set_aside.most_common():
        print(f"set aside {count} {reason}", file=out)
    if not learner.is_pushed:
        print(f"osd-hf: error: the newest version is not pushed to {args.repo_id} yet", file=sys.stderr)
    write_json(args, report)
    return 0 if is_done and learner.is_pushed else FAILED


def _learning_pair(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """What stands for the target, the draft, and their tokenizer."""
    if not args.draft:
        target, draft, tokenizer = load_bundled()
        return target, placed(draft, args.device or "cpu"), tokenizer
    target = SimpleNamespace(config=load_config(args.target))
    draft = load_model(args.draft, dtype=args.dtype, device=args.device)
    return target, of_one_size(draft, target), load_tokenizer(args.target)


def _learn(args: argparse.Namespace, learner: StoreLearner, folder: Path) -> bool:
    """Learn until told to stop; whether all could be written in the end."""
    begun, shown, failed = learner.requests, 0, False
    with stopping() as stop, AlphaBar(args.num_requests, "learning") as bar:
        while not stop.is_set():
            left = None if args.num_requests is None else args.num_requests - (learner.requests - begun)
            if left == 0:
                break
            try:
                taken = learner.step(bar.advance, limit=left)
            except StateError as error:  # of the disk: learning goes on, and writing is tried again
                print(f"osd-hf: warning: {error}", file=sys.stderr)
                continue
            except StoreError as error:  # the stores are gone
                print(f"osd-hf: error: {error}", file=sys.stderr)
                failed = True
                break
            if len(learner.published) > shown:
                shown = len(learner.published)
                _plot(learner, folder)
            if not taken:
                if args.once and not learner.follower.is_waiting:
                    break
                stop.wait(args.poll_seconds)
    try:
        learner.close()
    except StateError as error:
        print(f"osd-hf: error: {error}", file=sys.stderr)
        failed = True
    finally:
        _plot(learner, folder)
    return not failed


def _sides(learner: StoreLearner) -> dict[str, list[AcceptanceStats]]:
    return {"learned": list(learner.learned), "frozen": list(learner.frozen)}


def _last_fifth(stats: Sequence[AcceptanceStats]) -> AcceptanceStats:
    return sum(stats[-max(len(stats) // 5, 1) :], AcceptanceStats())


def _plot(learner: StoreLearner, folder: Path) -> None:
    sides = _sides(learner)
    count = len(sides["learned"])
    if count:
        with contextlib.suppress(OSError):  # a picture is not worth ending for
            plot_alpha(
                folder / "alpha.png", sides["learned"], sides["frozen"], [None] * count, window=rolling_window(count),
                title="Acceptance on the target's answers: the draft that learns, and the same draft frozen",
            )  # fmt: skip


def _report(learner: StoreLearner) -> dict[str, Any]:
    sides, latest = _sides(learner), learner.versions.latest
    return {
        "provenance": provenance(), "config": learner.config.to_dict(), "requests": learner.requests,
        "tokens": learner.tokens, "skipped": dict(learner.skipped), "set_aside": dict(learner.set_aside),
        "learning_seconds": learner.learning_seconds,
        "versions": learner.published, "latest": None if latest is None else latest.name, "pushed": learner.is_pushed,
        **{f"alpha_{name}": [s.alpha for s in stats] for name, stats in sides.items()},
        **{f"alpha_{name}_last_fifth": _last_fifth(stats).alpha for name, stats in sides.items()},
    }  # fmt: skip
