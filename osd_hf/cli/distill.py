"""The command `osd-hf distill`: settings from flags and a YAML file, data from files, the Hub or a store."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

import osd_hf
from osd_hf.bench.display import figure, text_table
from osd_hf.cli.flags import Reporting
from osd_hf.errors import ConfigError, DataError, StoreError, first_line, shown_settings
from osd_hf.pair import check_tokenizers, load_model, load_tokenizer, prompt_room
from osd_hf.prompts import PromptSource, encode_prompts, open_rows, read_prompts
from osd_hf.store.store import CorrectionStore
from osd_hf.utils.report import json_text, make_folder, provenance

__all__ = ["add_distill", "distill_command"]


# --- settings -------------------------------------------------------------------------------------------------------


def _meant(value: Any) -> Any:
    """YAML takes 1e-4 for text."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+\.?\d*[eE][-+]?\d+", value)
    return float(value) if is_number else value


def _scalar(text: str) -> Any:
    return _meant(yaml.safe_load(text))


def _flag(help: str, metavar: str | None = "NAME", default: Any = None, **options: Any) -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar, **options})


def _check_counts(settings: Any, **least: int) -> None:
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and not (isinstance(value, int) and value >= bound):
            raise ConfigError(f"`{name}` must be an integer of at least {bound}, got {value!r}.")


@dataclass(frozen=True)
class ModelSettings:
    """The models of the command. The metadata of a field describe its flag."""

    target: str | None = _flag("Hub id or folder of the model to learn from; not needed with --store", "ID|PATH")
    draft: str | None = _flag("Hub id or folder of the model that learns", "ID|PATH")
    dtype: str = _flag("of the target; a draft learns in float32", None, "auto",
                       choices=("auto", "float32", "bfloat16", "float16"))  # fmt: skip
    device: str | None = _flag("such as cpu or cuda:0, for loading")
    lora_rank: int | None = _flag("train adapters of this rank on all linear layers, merged at the end", "R",
                                  type=_scalar)  # fmt: skip

    def __post_init__(self) -> None:
        _check_counts(self, lora_rank=1)
        if self.draft is None:
            raise ConfigError("Say which model learns: --draft.")

    def load(self) -> tuple[Any, Any, Any, Any]:
        """The target, or `None`; the draft in its own dtype; the tokenizer to read with, and the draft's own."""
        draft, own_tokenizer = load_model(str(self.draft), device=self.device), load_tokenizer(str(self.draft))
        if self.target is None:
            return None, draft, own_tokenizer, own_tokenizer
        target, tokenizer = load_model(self.target, dtype=self.dtype, device=self.device), load_tokenizer(self.target)
        check_tokenizers(tokenizer, own_tokenizer)
        return target, draft, tokenizer, own_tokenizer

    def adapters(self) -> Any:
        """The configuration of the adapters, if any are to be trained."""
        from peft import LoraConfig

        rank = self.lora_rank
        return None if rank is None else LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


@dataclass(frozen=True)
class DataSettings:
    """The data of the command. The metadata of a field describe its flag."""

    prompts: str | None = _flag("Hub data set id, or a json, jsonl or parquet file. Without --column and "
                                "--prompt-template, its columns are prompt and perhaps completion, or messages",
                                "ID|FILE")  # fmt: skip
    split: str = _flag("of a Hub data set", default="train")
    subset: str | None = _flag("configuration of a Hub data set")
    column: str | None = _flag("column of the prompt, a user's turn")
    prompt_template: str | None = _flag("instead of a column: a format string", "FORMAT")
    no_chat_template: bool | None = field(
        default=None, metadata={"help": "plain text, also where the tokenizer has a chat template"}
    )
    store: str | None = _flag("instead of prompts: folder of captured requests", "DIR")
    num_requests: int | None = _flag("of the data, the first N; all by default", "N", type=_scalar)
    eval_prompts: str | None = _flag("held-out prompts, read like --prompts", "ID|FILE")
    eval_split: str = _flag("of a Hub data set", default="test")
    eval_store: str | None = _flag("instead: folder of held-out captured requests", "DIR")
    num_held_out: int = _flag("instead: hold out the last N requests of the data", "N", 0, type=_scalar)

    def __post_init__(self) -> None:
        _check_counts(self, num_requests=1, num_held_out=0)
        for prefix in ("", "eval_"):
            if getattr(self, f"{prefix}prompts") is not None and getattr(self, f"{prefix}store") is not None:
                raise ConfigError(f"Give one of `{prefix}prompts` and `{prefix}store`.")
        if self.prompts is None and self.store is None:
            raise ConfigError("Say what is learned from: --prompts or --store.")
        if self.num_held_out and (self.eval_prompts is not None or self.eval_store is not None):
            raise ConfigError("--num-held-out cuts held-out requests off the data; give no others besides.")

    def read(self, models: Sequence[Any], tokenizer: Any, max_new_tokens: int) -> tuple[list[Any], list[Any] | None]:
        """The requests to learn from and, if some are named, the held-out ones; `models` bound a prompt's length."""

        def part(prompts: str | None, store: str | None, split: str, limit: int | None) -> list[Any] | None:
            if store is not None:
                if not Path(store).is_dir():
                    raise StoreError(f"There is no store at {store}. `osd-hf run --store DIR` writes one.")
                return list(itertools.islice(CorrectionStore(store), limit))
            return None if prompts is None else self._prompts(prompts, split, limit, models, tokenizer, max_new_tokens)

        data = part(self.prompts, self.store, self.split, self.num_requests)
        assert data is not None
        if not self.num_held_out:
            return data, part(self.eval_prompts, self.eval_store, self.eval_split, None)
        if self.num_held_out >= len(data):
            raise DataError(f"--num-held-out {self.num_held_out} leaves nothing of {len(data)} requests.")
        return data[: -self.num_held_out], data[-self.num_held_out :]

    def _prompts(
        self, location: str, split: str, limit: int | None, models: Sequence[Any], tokenizer: Any, max_new_tokens: int
    ) -> list[Any]:
        is_turn = self.column is not None or self.prompt_template is not None
        column = self.column if is_turn else "prompt"
        source = PromptSource(location, column, self.prompt_template, split=split, subset=self.subset)
        if not is_turn:
            return list(itertools.islice(open_rows(source), limit))
        encoded = encode_prompts(
            read_prompts(source),
            tokenizer,
            limit=limit,
            max_prompt_tokens=prompt_room(models[0].config, models[-1].config, max_new_tokens),
            chat_template=not self.no_chat_template,
        )
        if encoded.skipped_empty or encoded.skipped_long:
            print(
                f"osd-hf: warning: of {location}, skipped {encoded.skipped_empty} prompts without text and "
                f"{encoded.skipped_long} that leave no room for an answer.",
                file=sys.stderr,
            )
        return [{"prompt": ids} for _, ids in encoded.prompts]


# Flags of fields of `DistillConfig`; a YAML file may set all its fields. The class itself takes seconds to import.
OUTPUT_DIR = "osd_hf_distill"
TRAINING = {
    "sample_source": "whose tokens are learned on: teacher, student, mix_request, mix_token",
    "divergence": "loss between target and draft: forward_kl, reverse_kl, jsd, ...",
    "lmbda": "of the mixes: the draft's share",
    "temperature": "of the samples; 0 takes the likeliest token",
    "max_new_tokens": "bound of a sample",
    "learning_rate": "at the start",
    "lr_scheduler_type": "linear, constant, cosine, ...",
    "num_train_epochs": "passes over the data",
    "max_steps": "optimizer steps, instead of epochs",
    "per_device_train_batch_size": "requests in a micro-batch",
    "gradient_accumulation_steps": "micro-batches in a step",
    "bf16": "true: compute in bf16",
    "seed": "of the order and the samples",
    "num_assistant_tokens": "tokens drafted per round where acceptance is measured",
    "eval_temperature": "of the answers to held-out prompts; 0 is greedy",
    "eval_strategy": "no, steps or epoch",
    "eval_steps": "optimizer steps between two measurements",
    "early_stopping_patience": "measurements without a new best before the run stops",
    "load_best_model_at_end": "true: keep the checkpoint of the best acceptance",
    "save_strategy": "no, steps, epoch or best",
    "save_steps": "optimizer steps between two checkpoints",
    "resume_from_checkpoint": "true: go on from the last checkpoint in the output folder",
    "report_to": "trackio, tensorboard, wandb, ...",
    "push_to_hub": "true: push the checkpoints, to a private repo",
    "hub_model_id": "where to",
    "hub_private_repo": "false: everybody may read it",
}


def add_distill(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags. None has a default, so that those given can be told from the YAML file's."""

    def add(group: Any, name: str, help: str, default: Any = None, **options: Any) -> None:
        shown = "" if default is None else f" (default: {default})"
        group.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS, help=help + shown, **options)

    parser.add_argument("--config", metavar="FILE", help="YAML with these settings, underscores for hyphens, and any "
                        "of the fields of DistillConfig; flags go before")  # fmt: skip
    for title, settings in (("models", ModelSettings), ("data", DataSettings)):
        group = parser.add_argument_group(title)
        for f in fields(settings):
            options = {"action": "store_true"} if f.name == "no_chat_template" else {}
            add(group, f.name, default=f.default, **f.metadata, **options)
    group = parser.add_argument_group("training; where nothing is said, the defaults of DistillConfig")
    for name, help in TRAINING.items():
        add(group, name, help, metavar="X", type=_scalar)
    add(parser, "output_dir", "checkpoints, the draft, the report", OUTPUT_DIR, metavar="DIR")


def _given(args: argparse.Namespace, kinds: Sequence[type]) -> dict[str, Any]:
    """The settings of the YAML file and of the flags, which go before; refuses names that are no setting."""
    allowed = {f.name for kind in kinds for f in fields(kind) if f.init}
    given: dict[str, Any] = {"output_dir": OUTPUT_DIR}
    for name, value in ({} if args.config is None else _read_yaml(args.config)).items():
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, 1)
            meant = f" Did you mean `{close[0]}`?" if close else ""
            raise ConfigError(f"`{name}` is no setting of distillation.{meant}")
        given[name] = _meant(value)
    given |= {name: value for name, value in vars(args).items() if name in allowed}
    for name, value in given.items():
        if name.endswith("_strategy") and value is False:
            given[name] = "no"  # which YAML takes for false
    return given


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        read = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"The configuration {path} cannot be read: {first_line(error)}.") from error
    if not isinstance(read, dict) or not all(isinstance(name, str) for name in read):
        raise ConfigError(f"The configuration {path} must hold names with values, such as `learning_rate: 0.0001`.")
    return read


# --- the command ----------------------------------------------------------------------------------------------------


def distill_command(args: argparse.Namespace) -> int:
    """`osd-hf distill`; the exit code."""
    try:
        kinds = (ModelSettings, DataSettings, osd_hf.DistillConfig)
    except ImportError as error:
        raise ConfigError(str(error)) from error
    given = _given(args, kinds)
    with contextlib.redirect_stdout(sys.stderr):  # the trainer prints what it logs
        try:
            models, data, config = HfArgumentParser(kinds).parse_dict(given)
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:
            raise ConfigError(f"The training settings do not go together: {first_line(error)}.") from error
        folder = Path(config.output_dir)
        make_folder(folder)
        target, draft, tokenizer, own_tokenizer = models.load()
        bounds = [model for model in (target, draft) if model is not None]
        dataset, eval_dataset = data.read(bounds, tokenizer, config.max_new_tokens)
        result = osd_hf.distill(
            target=target, draft=draft, dataset=dataset, eval_dataset=eval_dataset, tokenizer=tokenizer,
            config=config, peft_config=models.adapters(),
        )  # fmt: skip
    if not result.state.is_world_process_zero:
        return 0
    result.draft.save_pretrained(folder / "draft")
    own_tokenizer.save_pretrained(folder / "draft")
    places = {name: value for name, value in {**asdict(models), **asdict(data)}.items() if value is not None}
    report = {
        "provenance": provenance(seed=config.seed),
        "settings": shown_settings({**places, **given}),
        "num_requests": len(dataset),
        "steps": result.state.global_step,
        "alpha": {str(step): alpha for step, alpha in result.alpha.items()},
        "best_checkpoint": result.state.best_model_checkpoint,
        "log_history": result.log_history,
    }
    (folder / "report.json").write_text(json_text(report, indent=1) + "\n")
    reporting = Reporting(json=args.json)
    out = reporting.out
    if result.alpha:
        rows = [[str(step), figure(alpha)] for step, alpha in result.alpha.items()]
        print(text_table(["step", f"alpha (k={config.num_assistant_tokens})"], rows, left=0) + "\n", file=out)
    print(f"{result.state.global_step} steps. Wrote draft/ and report.json to {folder}.", file=out)
    reporting.write_json(report)
    return 0
