"""The command `osd-hf push`: evaluate a draft and push it to the Hub, or export it for vLLM."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from huggingface_hub import get_token
from transformers import PreTrainedModel

from osd_hf.cli.settings import PAIRS, CommandParser, PairSettings, Reporting, RowSettings, flag
from osd_hf.errors import ConfigError
from osd_hf.evaluation.compare import evaluate
from osd_hf.evaluation.display import plot_domains, stats_interval
from osd_hf.hub import EVALUATION, PLOT, card_data, check_push, export_to_vllm, facts_of, push_folder, save_draft
from osd_hf.loading import Pair, load_draft, load_pair
from osd_hf.utils.report import provenance

# Flags without an effect with --export.
NOT_EXPORTED = "repo_id before before_revision prompts num_requests max_new_tokens timed_requests domain license"
NOT_EXPORTED += " private public token output_dir dry_run"
NOT_OF_PAIR = "target revision before before_revision device_map quantization"
SIDES = {"before": "draft before", "after": "this draft"}


@dataclass(frozen=True, kw_only=True)
class PushSettings(RowSettings, PairSettings, Reporting):
    """Flags of `osd-hf push`."""

    repo_id: str | None = flag("Hub repository of the draft", None, positional=True, nargs="?", metavar="REPO")
    draft: str = flag("folder of the learned draft", metavar="PATH")
    target: str | None = flag("its target; by default the one on the draft's model card", None, metavar="ID|PATH")
    pair: Literal["bundled", "smollm2"] | None = flag(PAIRS, None, excludes=NOT_OF_PAIR)
    export: Path | None = flag("only write it for vLLM to this new folder", None, excludes=NOT_EXPORTED)
    before: str | None = flag("the draft before it learned; by default from its card", None, metavar="ID|PATH")
    before_revision: str | None = flag("branch, tag or commit of that draft on the Hub", None, metavar="NAME")
    split: str = flag("split of a data set", "test", needs="prompts")
    prompts: str | None = flag("public prompts for the evaluation; by default generated", None, metavar="ID|FILE")
    num_requests: int = flag("number of prompts", 64, minimum=1)
    max_new_tokens: int = flag("maximum tokens of an answer", 96, minimum=1)
    timed_requests: int = flag("prompts that are also timed live", 12, minimum=0)
    num_assistant_tokens: int | None = flag("tokens drafted per round (k); by default tuned", None, minimum=1)
    domain: list[str] | None = flag("domains that the draft learned, for the card", None, metavar="NAME")
    license: str | None = flag("license of the draft's base, for the card", None, metavar="NAME")
    private: bool = flag("refuse a public repository, as by default", False, excludes="public")
    public: bool = flag("let everybody read it; a draft may have memorized answers", False)
    token: str | None = flag("token of the Hub; by default HF_TOKEN, or this machine's login", None)
    output_dir: Path | None = flag("folder that keeps what is pushed", None)
    dry_run: bool = flag("write --output-dir and push nothing", False, excludes="private public token")

    def check(self) -> None:
        if self.export is not None:
            return
        if self.repo_id is None:
            raise ConfigError("Name the repository of the draft, or --export DIR.")
        if self.dry_run and self.output_dir is None:
            raise ConfigError("--dry-run pushes nothing: name a folder to write with --output-dir.")
        if self.output_dir is not None and self.output_dir.exists() and any(self.output_dir.iterdir()):
            raise ConfigError(f"{self.output_dir} is not empty. Choose another --output-dir.")

    def with_target(self) -> Self:
        """Return the settings with the target that the draft's card names, if none is given; raises ConfigError."""
        if self.pair or self.target is not None:
            return self
        named = card_data(self.draft)
        if "target_model" not in named:
            raise ConfigError(f"No card in a folder {self.draft} names the target: set --target, or --pair.")
        return replace(self, target=named["target_model"], revision=self.revision or named.get("target_revision"))

    def load_draft(self, target: PreTrainedModel) -> PreTrainedModel:
        """Load the draft on the device of its target."""
        return load_draft(self.draft, target, **self.draft_loading | {"device": self.device or str(target.device)})

    def models(self) -> Pair:
        """Load the target, the draft before it learned, and their tokenizer; raises ConfigError if one is unknown."""
        if self.pair:
            return self.load_pair()
        named = card_data(self.draft)
        before = self.before or named.get("base_model")
        if before is None or before in (self.target, named.get("target_model")):
            reason = "no card names it" if before is None else f"{before} is the target itself"
            raise ConfigError(f"The draft before it learned is unknown: {reason}. Name it with --before.")
        return load_pair(self.target, before, **self.loading | {"draft_revision": self.before_revision})


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command."""
    return CommandParser([PushSettings], without=("chat_template", "chat_template_kwargs"), **how)


def push_command(settings: PushSettings) -> int:
    """Evaluate a draft, write its repository, and push it, or export it; returns the exit code."""
    settings = settings.with_target()
    if settings.export is not None:
        return _export(settings, settings.export)
    repo_id, token = str(settings.repo_id), settings.token
    private = False if settings.public else True if settings.private else None
    if not settings.dry_run and (token or get_token()):  # before the evaluation, which takes long
        check_push(repo_id, token, private)
    target, before, tokenizer = settings.models()
    dataset = settings.evaluation_set(settings.prompts, settings.num_requests, settings.max_new_tokens)
    draft, k = settings.load_draft(target), settings.num_assistant_tokens
    how: dict[str, Any] = {"timed_requests": settings.timed_requests, "num_assistant_tokens": k, "show_progress": True}
    evaluation = evaluate(target, before, draft, tokenizer, dataset, **how)
    origin = provenance()
    versions = ", ".join(f"{name} {origin[name]}" for name in ("osd_hf", "transformers", "torch"))
    facts = facts_of(target, before, settings.domain or (), {"Distilled with": versions})
    facts = replace(facts, license=settings.license, command=origin["command"])
    report: dict[str, Any] = {"provenance": origin, "evaluation": evaluation.to_dict(), "url": None}
    with tempfile.TemporaryDirectory() as scratch:
        folder = settings.output_dir or Path(scratch)
        save_draft(folder, draft, tokenizer, repo_id=repo_id, facts=facts, evaluation=evaluation)
        title = f"alpha on {evaluation.dataset.name}"
        plot_domains(folder / EVALUATION / PLOT, evaluation.scores, SIDES, title=title)
        for side in SIDES:
            stats = evaluation.scores.totals[side]
            settings.say(f"alpha {side}: {stats.alpha:.3f} {stats_interval(stats)}")
        if settings.dry_run:
            settings.say(f"written to {folder}, nothing pushed")
        else:
            report["url"] = push_folder(folder, repo_id, token=token, private=private)
            settings.say(f"pushed to {report['url']}")
    settings.write_json(report)
    return 0


def _export(settings: PushSettings, folder: Path) -> int:
    """Write a draft for vLLM, and print the command that serves it; returns the exit code."""
    target, tokenizer = settings.load_target()
    draft, k = settings.load_draft(target), settings.num_assistant_tokens or 5
    names: dict[str, Any] = {"target_name": settings.target, "num_assistant_tokens": k}
    command = export_to_vllm(folder, draft, target, tokenizer, **names)
    print(f"written to {folder}; serve it with:", file=sys.stderr)
    settings.say(shlex.join(command))
    settings.write_json({"provenance": provenance(), "directory": str(folder), "command": command})
    return 0
