"""The command `osd-hf distill`: train a draft on a data set, a file, or a store."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import osd_hf
from osd_hf.cli.settings import NAME, AnswerSettings, CommandParser, RowSettings, flag, lora_config, open_recorded
from osd_hf.distillation.data import ROW_COLUMNS
from osd_hf.draft_head import DraftHead
from osd_hf.errors import ConfigError, DataError, shown_settings
from osd_hf.evaluation.display import figure, plot_training, text_table
from osd_hf.loading import load_draft_for
from osd_hf.models import check_tokenizers, load_tokenizer, prompt_room
from osd_hf.prompts import encode_prompts, open_rows, read_prompts
from osd_hf.utils.report import make_folder, provenance, write_report


@dataclass(frozen=True, kw_only=True)
class DistillSettings(AnswerSettings, RowSettings):
    """Flags of `osd-hf distill`, besides the training arguments."""

    target: str | None = flag("Hub id or folder of the target; not needed with --store", None, metavar="ID|PATH")
    draft: str | None = flag("Hub id or folder of the draft, which learns in float32", None, metavar="ID|PATH")
    lora_rank: int | None = flag("train adapters of this rank, merged at the end", None, minimum=1)
    prompts: str | None = flag("data set or file to train on", None, excludes="store", metavar="ID|FILE", aliases=NAME)
    store: str | None = flag("captured requests to train on, in place of prompts", None, metavar="DIR")
    num_requests: int | None = flag("first N requests; by default all", None, minimum=1)
    eval_prompts: str | None = flag("held-out prompts", None, excludes="eval_store num_held_out", metavar="ID|FILE")
    eval_split: str = flag("split of the data set of --eval-prompts", "test", needs="eval_prompts")
    eval_store: str | None = flag("held-out captured requests", None, excludes="num_held_out", metavar="DIR")
    num_held_out: int = flag("hold out the last N requests of the data", 0, minimum=0)

    def check(self) -> None:
        if not (self.draft or self.pair):
            raise ConfigError("Name a --draft, or --pair bundled.")
        if self.prompts is None and self.store is None:
            raise ConfigError("Name the data to train on: --prompts or --store.")
        if (self.chat_template_kwargs or not self.chat_template) and not (self.prompts or self.eval_prompts):
            raise ConfigError("Flags of the chat template would change nothing without --prompts or --eval-prompts.")


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command; raises ConfigError if trl is not installed."""
    try:
        kind = osd_hf.DistillConfig
    except ImportError as error:
        raise ConfigError(str(error)) from error
    parser = CommandParser([DistillSettings, kind], without=(*kind.without_meaning, "domain_column"), **how)
    parser.set_defaults(output_dir="osd_hf_distill")
    return parser


def distill_command(settings: DistillSettings, config: osd_hf.DistillConfig) -> int:
    """Distill and report; returns the exit code."""
    with contextlib.redirect_stdout(sys.stderr):  # the trainer prints its log
        folder = Path(str(config.output_dir))
        make_folder(folder)
        if settings.draft is None:
            target, draft, tokenizer = settings.load_pair()
            own_tokenizer = tokenizer
        else:  # the draft keeps its dtype and tokenizer, and a store needs no target
            target, tokenizer = settings.load_target() if settings.target else (None, None)
            draft = load_draft_for(target, settings.draft, settings.draft_loading | {"dtype": "auto"})
            own_tokenizer = tokenizer
            if not isinstance(draft, DraftHead):
                own_tokenizer = load_tokenizer(settings.draft, **settings.draft_fetching)
            tokenizer = tokenizer or own_tokenizer
            check_tokenizers(tokenizer, own_tokenizer)
        room = prompt_room((draft if target is None else target).config, draft.config, config.max_new_tokens)
        dataset, eval_dataset = _read(settings, tokenizer, room)
        teacher = target
        if settings.answers is not None:
            if target is None or not all(set(row) == {"prompt"} for row in dataset):
                raise ConfigError("--answers needs --target, and --prompts without answers; see --column.")
            prompts = [row["prompt"] for row in dataset]
            dataset, own = settings.sample_answers(target, prompts, config.max_new_tokens, config.seed)
            teacher, eval_dataset = None, eval_dataset or own  # a head still reads the states of `target`
        result = osd_hf.distill(
            target=teacher,
            draft=draft,
            dataset=dataset,
            eval_dataset=eval_dataset,
            tokenizer=tokenizer,
            config=config,
            peft_config=lora_config(settings.lora_rank),
        )
    if not result.state.is_world_process_zero:
        return 0
    result.draft.save_pretrained(folder / "draft")
    own_tokenizer.save_pretrained(folder / "draft")
    given = {name: value for name, value in vars(settings).items() if value is not None and name != "json"}
    report = {
        "provenance": provenance(seed=config.seed),
        "settings": shown_settings({**given, **config.to_dict()}),
        "num_requests": len(dataset),
        "steps": result.state.global_step,
        "alpha": {str(step): alpha for step, alpha in result.alpha.items()},
        "best_checkpoint": result.state.best_model_checkpoint,
        "log_history": result.log_history,
    }
    write_report(folder / "report.json", report)
    if result.alpha:
        plot_training(folder / "training.png", result.log_history)
        rows = [[str(step), figure(alpha)] for step, alpha in result.alpha.items()]
        settings.say(text_table(["step", f"alpha (k={config.num_assistant_tokens})"], rows, left=0) + "\n")
    settings.say(f"{result.state.global_step} steps. Wrote draft/ and report.json to {folder}.")
    settings.write_json(report)
    return 0


def _read(settings: DistillSettings, tokenizer: Any, room: int | None) -> tuple[list[Any], list[Any] | None]:
    """Return the training requests and the held-out ones, if there are any."""

    def requests(prompts: str | None, store: str | None, split: str, limit: int | None) -> list[Any] | None:
        if store is not None:
            return list(itertools.islice(open_recorded(store), limit))
        if prompts is None:
            return None
        source = settings.source(prompts, split=split)
        names, read = open_rows(source)
        is_plain = settings.column is None and settings.template is None
        if is_plain and {"prompt", "messages"} & set(names):  # rows with TRL's columns, maybe with answers
            if not settings.chat_template:
                raise ConfigError(f"--no-chat-template changes nothing here: name a --column of {prompts}.")
            rows = itertools.islice(read(ROW_COLUMNS), limit)
            return [_with_kwargs(row, settings.template_kwargs) for row in rows]
        encoded = encode_prompts(read_prompts(source), tokenizer, limit=limit, max_prompt_tokens=room, **settings.chat)
        return [{"prompt": ids} for _, ids in encoded.prompts]

    data = requests(settings.prompts, settings.store, settings.split, settings.num_requests)
    assert data is not None
    if not settings.num_held_out:
        return data, requests(settings.eval_prompts, settings.eval_store, settings.eval_split, None)
    if settings.num_held_out >= len(data):
        raise DataError(f"--num-held-out {settings.num_held_out} leaves nothing of {len(data)} requests.")
    return data[: -settings.num_held_out], data[-settings.num_held_out :]


def _with_kwargs(row: Any, kwargs: dict[str, Any] | None) -> Any:
    """Return a row with these arguments of the chat template, unless the row sets them."""
    own = row.get("chat_template_kwargs") if isinstance(row, dict) else None
    if not kwargs or not isinstance(row, dict) or not isinstance(own, dict | None):
        return row
    return {**row, "chat_template_kwargs": kwargs | {n: v for n, v in (own or {}).items() if v is not None}}
