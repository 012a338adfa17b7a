"""The command `osd-hf draft`: make a draft from a target's own layers, trained on its answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from osd_hf.cli.settings import CommandParser, Loading, PromptSettings, Reporting, flag, open_recorded
from osd_hf.distillation.make_draft import MadeDraft, MakeDraftConfig, train_draft
from osd_hf.errors import ConfigError, DataError
from osd_hf.evaluation.display import figure, stats_interval, text_table
from osd_hf.hub import facts_of, save_draft
from osd_hf.models import load_model, load_tokenizer, prompt_room
from osd_hf.target_version import target_version
from osd_hf.utils.report import make_folder, provenance


@dataclass(frozen=True, kw_only=True)
class DraftSettings(PromptSettings, Loading, Reporting):
    """Flags of `osd-hf draft`."""

    target: str = flag("Hub id or folder of the target", positional=True, metavar="TARGET")
    output_dir: Path = flag("new or empty folder of the draft", positional=True, metavar="DIR")
    store: str | None = flag(
        "recordings to train on", None, excludes="prompts chat_template chat_template_kwargs", metavar="DIR"
    )

    def check(self) -> None:
        folder = self.output_dir
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is not an empty folder. Choose another one.")
        if self.device and self.device_map:
            raise ConfigError("--device and --device-map exclude each other: give one of them.")


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command."""
    return CommandParser([DraftSettings, MakeDraftConfig], without=("draft_revision",), **how)


def draft_command(settings: DraftSettings, config: MakeDraftConfig) -> int:
    """Make and save a draft, and report its value; returns the exit code."""
    target = load_model(settings.target, **settings.target_loading)
    tokenizer = load_tokenizer(settings.target, **settings.fetching)
    make_folder(settings.output_dir)
    requests: dict[str, Any]
    if settings.store is not None:
        held = [t for t in open_recorded(settings.store) if settings.domain is None or t.domain in settings.domain]
        if not held:
            raise DataError(f"{settings.store} holds no request of {settings.domain}. Name others with --domain.")
        requests = {"traces": held[-(settings.num_requests or 0) :]}
        domains = sorted({trace.domain for trace in requests["traces"] if trace.domain is not None})
    else:
        room = prompt_room(target.config, target.config, config.max_new_tokens)
        encoded = settings.encode_prompts(tokenizer, room, seed=config.seed)
        requests = {"prompts": [ids for _, ids in encoded.prompts]}
        domains = sorted({domain for domain in encoded.domains if domain is not None})
    version = target_version(target)
    made = train_draft(target, tokenizer, config, **requests)
    facts = facts_of(target, target, domains, _card_facts(made))
    facts = replace(facts, command=provenance()["command"], target_version=version)
    save_draft(settings.output_dir, made.draft, tokenizer, facts=facts)
    digits = {"c": 2, "alpha_before": 3, "alpha": 3, "speedup": 2, "promised": 2}
    rows = [[str(t["layers"]), *(figure(t[name], n) for name, n in digits.items())] for t in made.trials]
    if rows:
        header = ["layers tried", "cost", "alpha before", "after the trial", "expected", "in the end"]
        settings.say(text_table(header, rows) + "\n")
    where = settings.store or settings.prompts or "the bundled pair's domains"
    settings.say(f"alpha (k = 5) on {made.held_out} held-out requests of {where}: {_alphas(made)}; {made.verdict}")
    settings.say(f"Wrote {settings.output_dir}.")
    if made.speedup <= 1:
        print("osd-hf: warning: the draft is not faster than the target alone yet", file=sys.stderr)
    origin = provenance(seed=config.seed)
    settings.write_json({"provenance": origin, "directory": str(settings.output_dir), **made.to_dict()})
    return 0


def _alphas(made: MadeDraft) -> str:
    sides = [f"{figure(stats.alpha)} {stats_interval(stats)}" for stats in (made.before, made.after)]
    return f"{sides[0]} before, {sides[1]} after"


def _card_facts(made: MadeDraft) -> dict[str, Any]:
    """Return the rows of the model card about the training."""
    facts: dict[str, Any] = {"Copied layers of the target": ", ".join(map(str, made.layers))}
    return facts | {
        "Training": f"{made.requests} requests, {made.steps} steps of {made.positions} tokens in all",
        f"Acceptance (alpha, k = 5) on {made.held_out} held-out answers": _alphas(made),
        "Speed on the machine of the training": made.verdict,
    }
