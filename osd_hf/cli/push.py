"""The commands `osd-hf push` and `osd-hf export`: a learned draft to the Hub, or as a folder for a serving engine."""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from huggingface_hub import get_token

from osd_hf.cli.arguments import flag, in_groups
from osd_hf.cli.flags import DraftRevision, Evaluated, Reporting, TargetLoading
from osd_hf.errors import ConfigError
from osd_hf.evaluation.display import plot_domains, stats_interval
from osd_hf.evaluation.evaluate import evaluate
from osd_hf.hub.cards import EVALUATION, PLOT, card_data, facts_of
from osd_hf.hub.push import check_push, check_visibility, export_to_vllm, push_folder, save_draft
from osd_hf.models import Pair, load_model, load_pair, load_tokenizer
from osd_hf.utils.report import provenance

EVALUATED = "evaluation, which goes up with it"

_models, _prompts, _evaluation, _card, _pushing = in_groups("models", "prompts", EVALUATED, "card", "push")


@dataclass(frozen=True, kw_only=True)
class LearnedDraft(DraftRevision, TargetLoading, Reporting):
    """A draft that has learned, and its target."""

    draft: str = _models("folder of the learned draft", required=True, metavar="PATH")
    target: str | None = _models("the model that it drafts for; by default the one that the draft's card names",
                                 metavar="ID|PATH")  # fmt: skip
    bundled: bool = _models("the target is the bundled one", False)

    def with_target(self) -> Self:
        """With the target that the card of the draft names where none is given; raises ConfigError where none is
        known, and for what has no meaning beside the others."""
        if self.draft_revision is not None and Path(self.draft).exists():
            raise ConfigError(f"--draft-revision is of a draft on the Hub, and {self.draft} lies here. Leave it out.")
        if self.bundled:
            if given := self.changed("target", "before", "before_revision"):
                raise ConfigError(f"--bundled names the models beside the draft: leave out {given[0]}.")
            return self
        if self.target is not None:
            return self
        named = card_data(self.draft)
        if "target_model" not in named:
            raise ConfigError(
                f"The target of the draft is not known: {self.silence}. Name it with --target, or with --bundled "
                "where it is the bundled one."
            )
        return replace(self, target=named["target_model"], revision=self.revision or named.get("target_revision"))

    @property
    def silence(self) -> str:
        """Why no card says what is asked for."""
        if Path(self.draft).is_dir():
            return f"{self.draft} has no card that names one"
        return f"there is no folder {self.draft}, and cards on the Hub are not read"

    def load_draft(self, *, on_cpu: bool) -> Any:
        """The draft, on the device of its target."""
        how = self.draft_loading
        return load_model(self.draft, **how | {"device": how["device"] or ("cpu" if on_cpu else None)})


@dataclass(frozen=True, kw_only=True)
class PushSettings(LearnedDraft, Evaluated):
    """The flags of `osd-hf push`."""

    repo_id: str = flag("repo of the Hub that the draft goes to", positional=True, metavar="USER/NAME")
    before: str | None = _evaluation("the draft before it learned; by default the one that its card names",
                                     metavar="ID|PATH")  # fmt: skip
    before_revision: str | None = _evaluation("branch, tag or commit of that draft on the Hub", metavar="NAME")
    prompts: str | None = _prompts("Hub data set id, or a json, jsonl or parquet file of prompts that everybody may "
                                   "read; generated ones by default", metavar="ID|FILE")  # fmt: skip
    timed_requests: int = _evaluation("prompts that are also timed live", 12, metavar="N")
    num_assistant_tokens: int | None = _evaluation("tokens drafted per round (k); tuned by default", metavar="N")
    domain: list[str] | None = _card("domain that the draft learned on (repeat for several)", metavar="NAME")
    license: str | None = _card("license of the draft's base, as the Hub names it", metavar="NAME")
    private: bool = _pushing("keep it private, as by default: a public repo is refused",
                             False, rivals="readers")  # fmt: skip
    public: bool = _pushing("let everybody read it; a draft may have learned answers by heart",
                            False, rivals="readers")  # fmt: skip
    token: str | None = _pushing("token with the right to write; by default HF_TOKEN, or the login of this "
                                 "machine, which other users of it cannot see")  # fmt: skip
    output_dir: Path | None = _pushing("folder that keeps what is pushed", metavar="DIR")
    dry_run: bool = _pushing("write --output-dir and push nothing", False)

    def check(self) -> None:
        """Raises ConfigError for what is too small, and for what changes nothing."""
        self.check_counts("num_requests", "max_new_tokens", "num_assistant_tokens")
        self.check_counts("timed_requests", least=0)
        if self.prompts is None:
            self.check_rows()
        folder = self.output_dir
        if self.dry_run and folder is None:
            raise ConfigError("--dry-run pushes nothing: name a folder to write with --output-dir.")
        if folder is not None and folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty. Choose another --output-dir.")

    def pair(self) -> Pair:
        """The target, the draft before it learned, and their tokenizer; raises ConfigError where one is not known."""
        if self.bundled:
            return load_pair(**self.loading | {"draft_revision": None})
        named = card_data(self.draft)
        before = self.before or named.get("base_model")
        if before is None or before in (self.target, named.get("target_model")):
            told = "--before" if self.before else "the base that its card names"
            why = self.silence if before is None else f"{before}, {told}, is the target itself"
            raise ConfigError(
                f"What the draft has learned is told beside the draft before, which is not known: {why}. Name it with "
                "--before."
            )
        return load_pair(self.target, before, **self.loading | {"draft_revision": self.before_revision})


def push_command(settings: PushSettings) -> int:
    """Evaluate a draft, write its repo, and push it."""
    settings.check()
    settings = settings.with_target()
    repo_id, token = settings.repo_id, settings.token
    private = False if settings.public else True if settings.private else None
    if not settings.dry_run and (token or get_token()):  # before the work, where it can be told
        check_visibility(repo_id, check_push(repo_id, token), private)
    target, before, tokenizer = settings.pair()
    draft = settings.load_draft(on_cpu=settings.bundled)
    evaluation = evaluate(
        target, before, draft, tokenizer, settings.evaluation_set(), timed_requests=settings.timed_requests,
        num_assistant_tokens=settings.num_assistant_tokens, show_progress=True,
    )  # fmt: skip
    origin = provenance()
    versions = ", ".join(f"{name} {origin[name]}" for name in ("osd_hf", "transformers", "torch"))
    facts = facts_of(target, before, settings.domain or (), {"Distilled with": versions})
    facts = replace(facts, license=settings.license, command=origin["command"])
    report: dict[str, Any] = {"provenance": origin, "evaluation": evaluation.to_dict(), "url": None}
    with tempfile.TemporaryDirectory() as scratch:
        folder = settings.output_dir or Path(scratch)
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
    """The flags of `osd-hf export`, which writes for vLLM; other engines take the same folder."""

    output_dir: Path = flag("new or empty folder", positional=True, metavar="DIR")
    num_assistant_tokens: int = flag("tokens drafted per round (k)", 5, metavar="N")


def export_command(settings: ExportSettings) -> int:
    """Write a draft for an engine, and the command that serves it."""
    settings, folder = settings.with_target(), settings.output_dir
    if settings.target is not None:
        target = load_model(settings.target, **settings.target_loading)
        tokenizer = load_tokenizer(settings.target, **settings.fetching)
    else:  # the dtype, the version and the code are the draft's
        how = settings.loading
        target, _, tokenizer = load_pair(**{name: how[name] for name in ("device_map", "quantization", "revision")})
    command = export_to_vllm(
        folder, settings.load_draft(on_cpu=settings.bundled), target, tokenizer,
        num_assistant_tokens=settings.num_assistant_tokens, target_name=settings.target,
    )  # fmt: skip
    print(f"written to {folder}; serve it with:", file=sys.stderr)
    settings.say(shlex.join(command))
    settings.write_json({"provenance": provenance(), "directory": str(folder), "command": command})
    return 0
