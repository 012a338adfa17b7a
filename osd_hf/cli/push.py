"""The commands `osd-hf push` and `osd-hf export`: a learned draft to the Hub, or as a folder for a serving engine."""

from __future__ import annotations

import itertools
import shlex
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import get_token

from osd_hf.bench.display import plot_domains, stats_interval
from osd_hf.bundled import load_bundled
from osd_hf.cli.flags import Reporting, Rows, TargetLoading, flag, in_groups
from osd_hf.errors import ConfigError
from osd_hf.evaluate import evaluate
from osd_hf.hub.cards import EVALUATION, PLOT, EvaluationSet, facts_of, hub_id
from osd_hf.hub.push import check_push, check_visibility, export_to_vllm, push_folder, save_draft
from osd_hf.pair import load_model, load_pair, load_tokenizer
from osd_hf.prompts import read_prompts
from osd_hf.utils.report import provenance

EVALUATED = "evaluation, which goes up with it"

_models, _prompts, _evaluation, _card, _pushing = in_groups("models", "prompts", EVALUATED, "card", "push")


@dataclass(frozen=True, kw_only=True)
class LearnedDraft(TargetLoading, Reporting):
    """A draft that has learned, and its target."""

    draft: str = _models("folder of the learned draft", required=True, metavar="PATH")
    target: str | None = _models("the model that it drafts for; the bundled one by default", metavar="ID|PATH")

    def load_draft(self) -> Any:
        """The draft, on the device of its target."""
        return load_model(
            self.draft, dtype=self.dtype, device=self.device or (None if self.target else "cpu"),
            attn_implementation=self.attn_implementation,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PushSettings(LearnedDraft, Rows):
    """The flags of `osd-hf push`."""

    repo_id: str = flag("where to", positional=True, metavar="USER/NAME")
    before: str | None = _evaluation("the draft before it learned; the bundled one by default", metavar="ID|PATH")
    prompts: str | None = _prompts("Hub data set id, or a json, jsonl or parquet file of prompts that everybody may "
                                   "read; generated ones by default", metavar="ID|FILE")  # fmt: skip
    split: str = _prompts("of a Hub data set", "test")
    column: str | None = _prompts("column of the prompt, a user's turn; prompt by default")
    domain_column: str | None = _prompts("column of the label", metavar="COLUMN")
    requests: int = _evaluation("prompts", 64, metavar="N")
    timed_requests: int = _evaluation("those that are also timed live", 12, metavar="N")
    max_new_tokens: int = _evaluation("bound of an answer", 96, metavar="N")
    k: int | None = _evaluation("tokens drafted per round; tuned by default", metavar="N")
    domain: list[str] | None = _card("that it learned on (repeat for several)", metavar="NAME")
    license: str | None = _card("of the draft's base, as the Hub names it")
    private: bool = _pushing("as by default: a new repo is private, and a public one is refused",
                             False, rivals="readers")  # fmt: skip
    public: bool = _pushing("everybody may read it; a draft may have learned answers by heart",
                            False, rivals="readers")  # fmt: skip
    token: str | None = _pushing("with the right to write; by default HF_TOKEN, or the login of this machine, which "
                                 "other users of it cannot see")  # fmt: skip
    local_dir: Path | None = _pushing("keep what is pushed there", metavar="DIR")
    dry_run: bool = _pushing("write --local-dir and push nothing", False)

    def evaluation_set(self) -> EvaluationSet:
        """What the draft is judged by; raises DataError where it cannot be read."""
        if self.prompts is None:
            return EvaluationSet.bundled(self.requests, max_new_tokens=self.max_new_tokens)
        source = self.source(self.prompts, default_column="prompt", domain_column=self.domain_column)
        prompts = tuple(itertools.islice(read_prompts(source), self.requests))
        name = hub_id(self.prompts) or Path(self.prompts).name
        subset = "" if self.subset is None else f", {self.subset}"
        split = f", {self.split}" if hub_id(self.prompts) else ""
        return EvaluationSet(f"{name}{subset}{split}", prompts, self.max_new_tokens)


def push_command(settings: PushSettings) -> int:
    """Evaluate a draft, write its repo, and push it."""
    repo_id, local_dir, token = settings.repo_id, settings.local_dir, settings.token
    if settings.dry_run and local_dir is None:
        raise ConfigError("--dry-run pushes nothing: name a folder to write with --local-dir.")
    if local_dir is not None and local_dir.exists() and any(local_dir.iterdir()):
        raise ConfigError(f"{local_dir} is not empty. Choose another --local-dir.")
    private = False if settings.public else True if settings.private else None
    if not settings.dry_run and (token or get_token()):  # before the work, where it can be told
        check_visibility(repo_id, check_push(repo_id, token), private)
    settings.check_together("target", "before")
    target, before, tokenizer = load_pair(settings.target or None, settings.before or None, **settings.loading)
    draft = settings.load_draft()
    evaluation = evaluate(
        target, before, draft, tokenizer, settings.evaluation_set(), num_assistant_tokens=settings.k,
        timed_requests=settings.timed_requests, show_progress=True,
    )  # fmt: skip
    origin = provenance()
    versions = ", ".join(f"{name} {origin[name]}" for name in ("osd_hf", "transformers", "torch"))
    facts = facts_of(target, before, settings.domain or (), {"Distilled with": versions})
    facts = replace(facts, license=settings.license, command=origin["command"])
    report: dict[str, Any] = {"provenance": origin, "evaluation": evaluation.to_dict(), "url": None}
    with tempfile.TemporaryDirectory() as scratch:
        folder = local_dir or Path(scratch)
        save_draft(folder, draft, tokenizer, repo_id=repo_id, facts=facts, evaluation=evaluation)
        title = f"alpha on {evaluation.dataset.name}"
        plot_domains(folder / EVALUATION / PLOT, evaluation.bars(), title=title)
        for side in ("before", "after"):
            stats = evaluation.stats(side)
            settings.say(f"alpha {side}: {stats.alpha:.3f} {stats_interval(stats)}")
        if settings.dry_run:
            settings.say(f"written to {folder}, nothing pushed")
        else:
            report["url"] = push_folder(folder, repo_id, token=token, private=private)
            settings.say(f"pushed to {report['url']}")
    settings.write_json(report)
    return 0


@dataclass(frozen=True, kw_only=True)
class ExportSettings(LearnedDraft):
    """The flags of `osd-hf export`."""

    directory: Path = flag("new or empty", positional=True, metavar="DIR")
    to: Literal["vllm"] = flag("engine; others take the same folder", "vllm")
    k: int = flag("tokens drafted per round", 5, metavar="N")


def export_command(settings: ExportSettings) -> int:
    """Write a draft for an engine, and the command that serves it."""
    if settings.target:
        target = load_model(settings.target, **settings.loading)
        tokenizer = load_tokenizer(settings.target)
    else:
        target, _, tokenizer = load_bundled()
    command = export_to_vllm(
        settings.directory, settings.load_draft(), target, tokenizer, num_assistant_tokens=settings.k,
        target_name=settings.target,
    )  # fmt: skip
    print(f"written to {settings.directory}; serve it with:", file=sys.stderr)
    settings.say(shlex.join(command))
    settings.write_json({"provenance": provenance(), "directory": str(settings.directory), "command": command})
    return 0
