"""The command `osd-hf draft`: make a draft from a target's own layers, trained on its answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import osd_hf
from osd_hf.cli.settings import AnswerSettings, CommandParser, PromptSettings, flag, open_recorded
from osd_hf.distillation.make_draft import K, MadeDraft, MakeDraftConfig, train_draft
from osd_hf.errors import ConfigError, DataError
from osd_hf.evaluation.display import figure, plot_training, stats_interval, text_table
from osd_hf.hub import facts_of, save_draft
from osd_hf.learning.weights import learns_in_bf16
from osd_hf.loading import load_draft_for
from osd_hf.models import device_clock, prompt_room, set_fixed_k
from osd_hf.recording import measured_costs
from osd_hf.replay import replay
from osd_hf.target_version import target_version
from osd_hf.utils.report import make_folder, provenance, read_config, write_report
from osd_hf.vocabulary import write_usual_tokens

NUM_TRIAL_ANSWERS = 2000  # that layers are compared with
LEARNING_RATE = 3e-3  # of Muon, at its highest
NOT_STORED = "prompts chat_template chat_template_kwargs max_new_tokens"  # without an effect with --store
EVALUATED_SHARE = 0.05  # of a long training, between evaluations and checkpoints


@dataclass(frozen=True, kw_only=True)
class DraftSettings(AnswerSettings, PromptSettings):
    """Flags of `osd-hf draft`."""

    target: str | None = flag("Hub id or folder of the target", None, positional=True, nargs="?", metavar="TARGET")
    output_dir: Path = flag("new or empty folder of the draft", positional=True)
    store: str | None = flag("recordings to train on", None, excludes=NOT_STORED, metavar="DIR")
    epochs: float = flag("passes over the answers", 3.0, needs="answers")
    report_to: str = flag("tracker of the training on answers, such as tensorboard", "none", needs="answers")

    def check(self) -> None:
        if not (self.target or self.pair):
            raise ConfigError("Name a TARGET and the DIR of the draft, or --pair bundled and the DIR.")
        folder = self.output_dir
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is not an empty folder. Choose another one.")
        if self.device and self.device_map:
            raise ConfigError("--device and --device-map exclude each other: give one of them.")


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command."""
    return CommandParser([DraftSettings, MakeDraftConfig], without=("draft", "draft_revision"), **how)


def draft_command(settings: DraftSettings, config: MakeDraftConfig) -> int:
    """Make and save a draft, and report its value; returns the exit code."""
    target, tokenizer = settings.load_target()
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
    history: list[dict[str, Any]] = []
    if settings.answers is None:
        made = train_draft(target, tokenizer, config, **requests)
    else:
        made, history = train_long(settings, config, target, tokenizer, requests["prompts"])
    training = {
        "Copied layers of the target": ", ".join(map(str, made.layers)),
        "Training": f"{made.requests} requests, {made.steps} steps of {made.positions} tokens in all",
        f"Acceptance (alpha, k = 5) on {made.held_out} held-out answers": _alphas(made),
        f"Speed on {config.gpu or 'the machine of the training'}": made.verdict,
    }
    facts = facts_of(target, target, domains, training)
    facts = replace(facts, command=provenance()["command"], target_version=version)
    save_draft(settings.output_dir, made.draft, tokenizer, facts=facts)
    if history:
        plot_training(settings.output_dir / "training.png", history)
    digits = {"c": 2, "alpha_before": 3, "alpha": 3, "speedup": 2, "promised": 2}
    rows = [
        [
            ("" if t["kind"] == "layers" else f"{t['kind']} head of ") + str(t["layers"]),
            *(figure(t[name], n) for name, n in digits.items()),
        ]
        for t in made.trials
    ]
    if rows:
        header = ["layers tried", "cost", "alpha before", "after the trial", "expected", "in the end"]
        settings.say(text_table(header, rows) + "\n")
    where = settings.store or settings.prompts or "the bundled pair's domains"
    settings.say(f"alpha (k = 5) on {made.held_out} held-out requests of {where}: {_alphas(made)}; {made.verdict}")
    settings.say(f"Wrote {settings.output_dir}.")
    if made.speedup <= 1:
        print("osd-hf: warning: the draft is not faster than the target alone yet", file=sys.stderr)
    origin = provenance(seed=config.seed)
    report = {"provenance": origin, "directory": str(settings.output_dir), **made.to_dict(), "log_history": history}
    settings.write_json(report)
    return 0


def train_long(
    settings: DraftSettings, config: MakeDraftConfig, target: Any, tokenizer: Any, prompts: list[list[int]]
) -> tuple[MadeDraft, list[dict[str, Any]]]:
    """Choose layers on a part of the answers, then train that draft on all of them. Return it, with its measurements,
    and the log of the training."""
    assert settings.answers is not None
    training, held_out = settings.sample_answers(target, prompts, config.max_new_tokens, config.seed)
    folder = settings.answers.with_name(f"{settings.answers.name}-training")
    start, chosen = folder / "start", folder / "chosen.json"
    if not chosen.is_file():  # layers are compared, and the first weights learned, with a part of the answers
        made = train_draft(target, tokenizer, config, traces=training[:NUM_TRIAL_ANSWERS])
        made.draft.save_pretrained(start)
        write_report(chosen, made.to_dict())
    else:
        print(f"osd-hf: training the layers chosen before; remove {folder} to choose again", file=sys.stderr)
    draft, choice = load_draft_for(target, str(start), {"dtype": str(target.dtype)[6:]}), read_config(chosen)
    is_cpu = target.device.type == "cpu"
    result = osd_hf.distill(
        target=None, draft=draft, dataset=training, eval_dataset=held_out, tokenizer=tokenizer,
        config=osd_hf.DistillConfig(
            output_dir=str(folder), num_train_epochs=settings.epochs, learning_rate=LEARNING_RATE, optimizer="muon",
            freeze_embeddings=True, lr_scheduler_type="cosine", warmup_steps=0.02, per_device_train_batch_size=16,
            eval_strategy="steps", eval_steps=EVALUATED_SHARE, save_strategy="steps", save_steps=EVALUATED_SHARE,
            save_total_limit=2, load_best_model_at_end=True, logging_steps=10, report_to=settings.report_to,
            seed=config.seed, use_cpu=is_cpu, disable_tqdm=False,
            bf16=torch.cpu._is_avx512_bf16_supported() if is_cpu else learns_in_bf16(torch.bfloat16, target.device),
            resume_from_checkpoint="true" if any(folder.glob("checkpoint-*/trainer_state.json")) else None,
        ),
    )  # fmt: skip
    new_tokens = float(np.mean([len(trace) for trace in held_out]))
    costs = measured_costs(target, [result.draft], held_out[0].prompt_ids, device_clock(target), config.gpu)[0]
    after = replay(result.draft, held_out, K)
    k, speedup = costs.best_k(after.alpha, new_tokens)
    set_fixed_k(result.draft.generation_config, k)
    write_usual_tokens(result.draft, training)
    made = MadeDraft(
        draft=result.draft, kind=choice.get("kind", "layers"), layers=tuple(choice["layers"]),
        before=replay(draft, held_out, K), after=after,
        costs=costs, num_assistant_tokens=k, speedup=speedup, trials=tuple(choice["trials"]), requests=len(training),
        held_out=len(held_out), positions=round(settings.epochs * sum(map(len, training))),
        steps=result.state.global_step, seconds=result.log_history[-1].get("train_runtime", 0.0),
    )  # fmt: skip
    return made, result.log_history


def _alphas(made: MadeDraft) -> str:
    sides = [f"{figure(stats.alpha)} {stats_interval(stats)}" for stats in (made.before, made.after)]
    return f"{sides[0]} before, {sides[1]} after"
