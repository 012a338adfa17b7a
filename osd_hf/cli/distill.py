"""The command `osd-hf distill`: settings from flags and a YAML file, data from files, the Hub or a store."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import osd_hf
from osd_hf.cli.arguments import add_flags, flag, in_groups, settings_from
from osd_hf.cli.flags import (
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_KWARGS,
    DraftRevision,
    Dtype,
    Reporting,
    Rows,
    TargetLoading,
    adapters,
    recorded,
)
from osd_hf.distillation.data import ROW_COLUMNS
from osd_hf.errors import ConfigError, DataError, first_line, nearest, shown_settings
from osd_hf.evaluation.display import figure, text_table
from osd_hf.models import check_tokenizers, load_model, load_tokenizer, prompt_room
from osd_hf.prompts import encode_prompts, open_rows, read_prompts
from osd_hf.utils.report import make_folder, provenance, read_config, write_report

__all__ = ["DistillSettings", "distill_command"]

OF_FLAGS = {"config", "json", "help", "training"}  # settings that no file has

_models, _prompts = in_groups("models", "prompts")


@dataclass(frozen=True, kw_only=True)
class DistillSettings(Rows, DraftRevision, TargetLoading, Reporting):
    """The flags of `osd-hf distill`."""

    config: Path | None = flag("YAML or JSON with defaults of these flags by their names; flags go before",
                               metavar="FILE")  # fmt: skip
    target: str | None = _models("Hub id or folder of the model to learn from; not needed with --store",
                                 metavar="ID|PATH")  # fmt: skip
    draft: str | None = _models("Hub id or folder of the model that learns", metavar="ID|PATH")
    dtype: Dtype = _models("dtype of the target; a draft learns in float32", "auto")
    device: str | None = _models("where models are loaded, such as cpu or cuda:0")
    lora_rank: int | None = _models("train adapters of this rank on all linear layers, merged at the end", metavar="R")
    prompts: str | None = _prompts("Hub data set id, or a json, jsonl or parquet file. Without --column and "
                                   "--prompt-template, its columns are prompt and perhaps completion, or messages",
                                   metavar="ID|FILE")  # fmt: skip
    chat_template: bool = _prompts(CHAT_TEMPLATE, True)
    chat_template_kwargs: dict[str, Any] | None = _prompts(CHAT_TEMPLATE_KWARGS, metavar="JSON")
    store: str | None = _prompts("folder of captured requests, in place of prompts", metavar="DIR")
    num_requests: int | None = _prompts("first N requests of the data; all by default", metavar="N")
    eval_prompts: str | None = _prompts("held-out prompts, read like --prompts", metavar="ID|FILE")
    eval_split: str = _prompts("part of the data set of --eval-prompts", "test")
    eval_store: str | None = _prompts("folder of held-out captured requests, in place of --eval-prompts",
                                     metavar="DIR")  # fmt: skip
    num_held_out: int = _prompts("hold out the last N requests of the data", 0, metavar="N")
    resume: bool = flag("go on from the last checkpoint of the output folder", False)
    trust_remote_code: bool = False  # a flag of the training settings
    training: Any = None  # a DistillConfig, whose fields are flags as well; the class takes seconds to import

    def check(self) -> None:
        """Raises ConfigError for what is too small or missing, and for what does not go together."""
        for name, least in (("lora_rank", 1), ("num_requests", 1), ("num_held_out", 0)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= least):
                raise ConfigError(f"`{name}` must be an integer of at least {least}, got {value!r}.")
        if self.draft is None:
            raise ConfigError("Say which model learns: --draft.")
        for prefix in ("", "eval_"):
            if getattr(self, f"{prefix}prompts") is not None and getattr(self, f"{prefix}store") is not None:
                raise ConfigError(f"Give one of `{prefix}prompts` and `{prefix}store`.")
        if self.prompts is None and self.store is None:
            raise ConfigError("Say what is learned from: --prompts or --store.")
        if self.prompts is None and self.eval_prompts is None:
            self.check_rows("chat_template", "chat_template_kwargs")
        if self.changed("eval_split") and self.eval_prompts is None:
            raise ConfigError("--eval-split is for --eval-prompts.")
        if self.num_held_out and (self.eval_prompts is not None or self.eval_store is not None):
            raise ConfigError("--num-held-out cuts held-out requests off the data; give no others besides.")


def read_settings(arguments: Sequence[str], **how: Any) -> DistillSettings:
    """The settings that these arguments name, and what the file of `--config` says besides, wherever that flag stands;
    `how` are arguments of the parser. Raises ConfigError, also where trl is not installed."""
    try:
        kind = osd_hf.DistillConfig
    except ImportError as error:
        raise ConfigError(str(error)) from error
    from trl import TrlParser  # type: ignore[attr-defined]

    own = argparse.ArgumentParser(add_help=False)
    add_flags(own, DistillSettings)
    usage = "%(prog)s [-h] [--config FILE] [--NAME VALUE ...]"  # there are some 170 flags
    parser = TrlParser(kind, parents=[own], usage=usage, exit_on_error=False, **how)
    parser.set_defaults(output_dir="osd_hf_distill")
    for action in parser._actions:
        if action.dest in kind.without_meaning:
            action.help = argparse.SUPPRESS  # nothing is offered that would be refused
    try:
        first, unknown = parser.parse_known_args(arguments)
        if "config" in first:
            # YAML takes a written `no` for false.
            read = {
                name: "no" if name.endswith("_strategy") and value is False else value
                for name, value in read_config(first.config).items()
            }
            unknown += [*parser.set_defaults_with_config(**read), *(OF_FLAGS & set(read))]
        _refuse(unknown, [*vars(first), *(f.name for f in fields(DistillSettings))])
        given = parser.parse_args(arguments)
        (training,) = parser.parse_dict(vars(given), allow_extra_keys=True)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{first_line(error)}.") from error
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"The training settings do not go together: {first_line(error)}.") from error
    settings = settings_from(DistillSettings, vars(given))
    if settings.resume:
        if training.resume_from_checkpoint:
            raise ConfigError("Give one of --resume, the last checkpoint, and --resume-from-checkpoint.")
        training.resume_from_checkpoint = True
    return replace(settings, training=training, trust_remote_code=training.trust_remote_code)


def _refuse(unknown: list[str], known: Iterable[str]) -> None:
    """Raises ConfigError for the first of these flags, if there is one."""
    if unknown:
        name = unknown[0].split("=")[0].lstrip("-").replace("-", "_")
        raise ConfigError(f"`{name}` is no setting of distillation.{nearest(name, known)}")


# --- the command ----------------------------------------------------------------------------------------------------


def distill_command(settings: DistillSettings) -> int:
    """Distill and report; returns the exit code."""
    settings.check()
    with contextlib.redirect_stdout(sys.stderr):  # the trainer prints what it logs
        config = settings.training
        folder = Path(config.output_dir)
        make_folder(folder)
        # Not as a pair: a store needs no target, and the draft that is written has its own dtype and tokenizer.
        draft = load_model(str(settings.draft), **settings.draft_loading | {"dtype": "auto"})
        tokenizer = own_tokenizer = load_tokenizer(str(settings.draft), **settings.draft_fetching)
        target = None
        if settings.target is not None:
            target = load_model(settings.target, **settings.target_loading)
            tokenizer = load_tokenizer(settings.target, **settings.fetching)
            check_tokenizers(tokenizer, own_tokenizer)
        answering = draft if target is None else target
        configs = (answering.config, draft.config)
        dataset, eval_dataset = _read(settings, configs, tokenizer, config.max_new_tokens)
        result = osd_hf.distill(
            target=target, draft=draft, dataset=dataset, eval_dataset=eval_dataset, tokenizer=tokenizer,
            config=config, peft_config=adapters(settings.lora_rank),
        )  # fmt: skip
    if not result.state.is_world_process_zero:
        return 0
    result.draft.save_pretrained(folder / "draft")
    own_tokenizer.save_pretrained(folder / "draft")
    given = {n: v for n, v in vars(settings).items() if v is not None and n not in OF_FLAGS}
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
        rows = [[str(step), figure(alpha)] for step, alpha in result.alpha.items()]
        settings.say(text_table(["step", f"alpha (k={config.num_assistant_tokens})"], rows, left=0) + "\n")
    settings.say(f"{result.state.global_step} steps. Wrote draft/ and report.json to {folder}.")
    settings.write_json(report)
    return 0


def _read(
    settings: DistillSettings, configs: tuple[Any, Any], tokenizer: Any, new_tokens: int
) -> tuple[list[Any], list[Any] | None]:
    """The requests to learn from and, if some are named, the held-out ones. The configurations of the models bound a
    prompt's length."""

    def requests(prompts: str | None, store: str | None, split: str, limit: int | None) -> list[Any] | None:
        if store is not None:
            return list(itertools.islice(recorded(store), limit))
        if prompts is None:
            return None
        source = settings.source(prompts, default_column="prompt", split=split)
        if settings.column is None and settings.prompt_template is None:  # no user's turns, but rows as TRL has them
            names, rows = open_rows(source, ROW_COLUMNS)
            if not {"prompt", "messages"} & set(names):
                raise DataError(
                    f"{prompts} has no column 'prompt' or 'messages'; its columns are {', '.join(names)}. Name the "
                    "column of the prompt by --column."
                )
            return [_with_kwargs(row, settings.chat_template_kwargs) for row in itertools.islice(rows, limit)]
        encoded = encode_prompts(
            read_prompts(source), tokenizer, limit=limit, max_prompt_tokens=prompt_room(*configs, new_tokens),
            chat_template=settings.chat_template, chat_template_kwargs=settings.chat_template_kwargs,
        )  # fmt: skip
        return [{"prompt": ids} for _, ids in encoded.prompts]

    data = requests(settings.prompts, settings.store, settings.split, settings.num_requests)
    assert data is not None
    if not settings.num_held_out:
        return data, requests(settings.eval_prompts, settings.eval_store, settings.eval_split, None)
    if settings.num_held_out >= len(data):
        raise DataError(f"--num-held-out {settings.num_held_out} leaves nothing of {len(data)} requests.")
    return data[: -settings.num_held_out], data[-settings.num_held_out :]


def _with_kwargs(row: Any, kwargs: dict[str, Any] | None) -> Any:
    """Return a row with these settings of the chat template; the row's own settings go before them."""
    own = row.get("chat_template_kwargs") if isinstance(row, dict) else None
    if not kwargs or not isinstance(row, dict) or not isinstance(own, dict | None):
        return row
    return {**row, "chat_template_kwargs": kwargs | {n: v for n, v in (own or {}).items() if v is not None}}
