"""The commands `osd-hf push` and `osd-hf export`: a learned draft to the Hub, or as a folder for a serving engine."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from osd_hf.bench.benchmark import evaluate
from osd_hf.bench.display import plot_domains
from osd_hf.bundled import load_bundled
from osd_hf.cli.flags import add_placement, output_stream, write_json
from osd_hf.errors import ConfigError
from osd_hf.hub.cards import EVALUATION, PLOT, EvaluationSet, facts_of, hub_id
from osd_hf.hub.export import export_to_vllm
from osd_hf.hub.push import check_push, check_visibility, push_folder, save_draft
from osd_hf.pair import load_model, load_tokenizer
from osd_hf.prompts import PromptSource, read_prompts
from osd_hf.utils.report import provenance

__all__ = ["add_export", "add_push", "export_command", "push_command"]


def _add_pair(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument("--draft", required=True, metavar="PATH", help="folder of the learned draft")
    group.add_argument("--target", metavar="ID|PATH", help="the model that it drafts for; the bundled one by default")
    add_placement(group)


def add_push(parser: argparse.ArgumentParser) -> None:
    """The arguments of `osd-hf push`."""
    parser.add_argument("repo_id", metavar="USER/NAME", help="where to")
    _add_pair(parser)
    group = parser.add_argument_group("evaluation, which goes up with it")
    group.add_argument("--before", metavar="ID|PATH", help="the draft before it learned; the bundled one by default")
    group.add_argument("--prompts", metavar="ID|FILE", help="Hub data set id, or a json, jsonl or parquet file of "
                       "prompts that everybody may read; generated ones by default")  # fmt: skip
    group.add_argument("--split", default="test", help="of a Hub data set")
    group.add_argument("--subset", help="configuration of a Hub data set")
    group.add_argument("--column", default="prompt", help="column of the prompt")
    group.add_argument("--prompt-template", metavar="FORMAT", help="instead of a column: a format string")
    group.add_argument("--domain-column", metavar="COLUMN", help="column of the label")
    group.add_argument("--requests", type=int, default=64, metavar="N", help="prompts")
    group.add_argument("--timed-requests", type=int, default=12, metavar="N", help="those that are also timed live")
    group.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="bound of an answer")
    group.add_argument("--k", type=int, metavar="N", help="tokens drafted per round; tuned by default")
    group = parser.add_argument_group("card")
    group.add_argument("--domain", action="append", metavar="NAME", help="that it learned on (repeat for several)")
    group.add_argument("--license", help="of the draft's base, as the Hub names it")
    group = parser.add_argument_group("push")
    readers = group.add_mutually_exclusive_group()
    readers.add_argument("--private", action="store_true",
                         help="as by default: a new repo is private, and a public one is refused")  # fmt: skip
    readers.add_argument("--public", action="store_true", help="everybody may read it; a draft may have learned "
                         "answers by heart")  # fmt: skip
    group.add_argument("--token", help="with the right to write; by default HF_TOKEN, or the login of this machine, "
                       "which other users of it cannot see")  # fmt: skip
    group.add_argument("--local-dir", type=Path, metavar="DIR", help="keep what is pushed there")
    group.add_argument("--dry-run", action="store_true", help="write --local-dir and push nothing")


def push_command(args: argparse.Namespace) -> int:
    """Evaluate a draft, write its repo, and push it."""
    if args.dry_run and args.local_dir is None:
        raise ConfigError("--dry-run pushes nothing: name a folder to write with --local-dir.")
    if args.local_dir is not None and args.local_dir.exists() and any(args.local_dir.iterdir()):
        raise ConfigError(f"{args.local_dir} is not empty. Choose another --local-dir.")
    out = output_stream(args)
    private = False if args.public else True if args.private else None
    if not args.dry_run and (args.token or get_token()):  # before the work, where it can be told
        check_visibility(args.repo_id, check_push(args.repo_id, args.token), private)
    target, before, tokenizer = _pair(args)
    draft = load_model(args.draft, dtype=args.dtype, device=args.device)
    evaluation = evaluate(
        target, before, draft, tokenizer, _evaluation_set(args), num_assistant_tokens=args.k,
        timed_requests=args.timed_requests, show_progress=True,
    )  # fmt: skip
    facts_now = provenance()
    versions = ", ".join(f"{name} {facts_now[name]}" for name in ("osd_hf", "transformers", "torch"))
    facts = replace(
        facts_of(target, before, args.domain or (), {"Distilled with": versions}),
        license=args.license, command=facts_now["command"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.local_dir or Path(scratch)
        save_draft(folder, draft, tokenizer, repo_id=args.repo_id, facts=facts, evaluation=evaluation)
        title = f"alpha on {evaluation.dataset.name}"
        plot_domains(folder / EVALUATION / PLOT, evaluation.bars(), title=title)
        for side in ("before", "after"):
            stats = evaluation.stats(side)
            low, high = stats.alpha_interval
            print(f"alpha {side}: {stats.alpha:.3f} [{low:.3f}, {high:.3f}]", file=out)
        report: dict[str, Any] = {"provenance": facts_now, "evaluation": evaluation.to_dict(), "url": None}
        if args.dry_run:
            print(f"written to {folder}, nothing pushed", file=out)
        else:
            report["url"] = push_folder(folder, args.repo_id, token=args.token, private=private)
            print(f"pushed to {report['url']}", file=out)
    write_json(args, report)
    return 0


def _pair(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Target, the draft before it learned, and their tokenizer."""
    if bool(args.target) != bool(args.before):
        raise ConfigError("--target and --before go together: name both, or neither for the bundled pair.")
    if not args.target:
        return load_bundled()
    models = (load_model(name, dtype=args.dtype, device=args.device) for name in (args.target, args.before))
    return *models, load_tokenizer(args.target)


def _evaluation_set(args: argparse.Namespace) -> EvaluationSet:
    if args.prompts is None:
        return EvaluationSet.bundled(args.requests, max_new_tokens=args.max_new_tokens)
    source = PromptSource(
        args.prompts, column=None if args.prompt_template else args.column, template=args.prompt_template,
        domain_column=args.domain_column, split=args.split, subset=args.subset,
    )  # fmt: skip
    prompts = [prompt for prompt, _ in zip(read_prompts(source), range(args.requests), strict=False)]
    name = hub_id(args.prompts) or Path(args.prompts).name
    subset = "" if args.subset is None else f", {args.subset}"
    split = f", {args.split}" if hub_id(args.prompts) else ""
    return EvaluationSet(f"{name}{subset}{split}", tuple(prompts), args.max_new_tokens)


def add_export(parser: argparse.ArgumentParser) -> None:
    """The arguments of `osd-hf export`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="new or empty")
    parser.add_argument("--to", choices=("vllm",), default="vllm", help="engine; others take the same folder")
    _add_pair(parser)
    parser.add_argument("--k", type=int, default=5, metavar="N", help="tokens drafted per round")


def export_command(args: argparse.Namespace) -> int:
    """Write a draft for an engine, and the command that serves it."""
    out = output_stream(args)
    if args.target:
        target, tokenizer = load_model(args.target, dtype=args.dtype, device=args.device), load_tokenizer(args.target)
    else:
        target, _, tokenizer = load_bundled()
    draft = load_model(args.draft, dtype=args.dtype, device=args.device)
    command = export_to_vllm(
        args.directory, draft, target, tokenizer, num_assistant_tokens=args.k, target_name=args.target
    )
    print(f"written to {args.directory}; serve it with:", file=sys.stderr)
    print(shlex.join(command), file=out)
    write_json(args, {"provenance": provenance(), "directory": str(args.directory), "command": command})
    return 0
