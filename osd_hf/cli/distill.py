"""The command `osd-hf distill`: settings from flags and a YAML file, data from files, the Hub or a store."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

import osd_hf
from osd_hf.bench.display import figure, text_table
from osd_hf.cli.flags import Reporting
from osd_hf.errors import ConfigError, DataError, StoreError
from osd_hf.pair import check_tokenizers, first_line, load_model, load_tokenizer, prompt_room
from osd_hf.prompts import PromptSource, encode_prompts, open_rows, read_prompts
from osd_hf.store.store import CorrectionStore
from osd_hf.utils.masking import shown_settings
from osd_hf.utils.report import json_text, make_folder, provenance

__all__ = ["add_distill", "distill_command"]

# The fields of `DistillConfig` that have flags; a YAML file sets all of them.
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
# What else a YAML file may set; each has a flag.
PLACES = (
    "target", "draft", "dtype", "device", "prompts", "split", "subset", "column", "prompt_template",
    "no_chat_template", "store", "num_requests", "eval_prompts", "eval_split", "eval_store", "num_held_out",
    "lora_rank", "output_dir",
)  # fmt: skip
COUNTS = ("num_requests", "num_held_out", "lora_rank")
DEFAULTS: dict[str, Any] = {
    "dtype": "auto",
    "split": "train",
    "eval_split": "test",
    "num_held_out": 0,
    "output_dir": "osd_hf_distill",
}


def add_distill(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags. None has a default, so that those given can be told from the YAML file's."""

    def add(group: Any, name: str, help: str, **kwargs: Any) -> None:
        default = f" (default: {DEFAULTS[name]})" if name in DEFAULTS else ""
        group.add_argument(
            "--" + name.replace("_", "-"), dest=f"distill.{name}", default=argparse.SUPPRESS, help=help + default,
            **kwargs,
        )  # fmt: skip

    parser.add_argument("--config", metavar="FILE", help="YAML with these settings, underscores for hyphens, and any "
                        "of the fields of DistillConfig; flags go before")  # fmt: skip
    group = parser.add_argument_group("models")
    add(group, "target", "Hub id or folder of the model to learn from; not needed with --store", metavar="ID|PATH")
    add(group, "draft", "Hub id or folder of the model that learns", metavar="ID|PATH")
    add(group, "dtype", "of the target; a draft learns in float32", choices=("auto", "float32", "bfloat16", "float16"))
    add(group, "device", "such as cpu or cuda:0, for loading", metavar="NAME")
    add(group, "lora_rank", "train adapters of this rank on all linear layers, merged at the end", metavar="R")
    group = parser.add_argument_group("data")
    add(group, "prompts", "Hub data set id, or a json, jsonl or parquet file. Without --column and "
        "--prompt-template, its columns are prompt and perhaps completion, or messages",
        metavar="ID|FILE")  # fmt: skip
    add(group, "split", "of a Hub data set", metavar="NAME")
    add(group, "subset", "configuration of a Hub data set", metavar="NAME")
    add(group, "column", "column of the prompt, a user's turn", metavar="NAME")
    add(group, "prompt_template", "instead of a column: a format string", metavar="FORMAT")
    add(group, "no_chat_template", "plain text, also where the tokenizer has a chat template", action="store_true")
    add(group, "store", "instead of prompts: folder of captured requests", metavar="DIR")
    add(group, "num_requests", "of the data, the first N; all by default", metavar="N")
    add(group, "eval_prompts", "held-out prompts, read like --prompts", metavar="ID|FILE")
    add(group, "eval_split", "of a Hub data set", metavar="NAME")
    add(group, "eval_store", "instead: folder of held-out captured requests", metavar="DIR")
    add(group, "num_held_out", "instead: hold out the last N requests of the data", metavar="N")
    group = parser.add_argument_group("training; where nothing is said, the defaults of DistillConfig")
    for name, help in TRAINING.items():
        add(group, name, help, metavar="X")
    add(parser, "output_dir", "checkpoints, the draft, the report", metavar="DIR")


def distill_command(args: argparse.Namespace) -> int:
    """`osd-hf distill`; the exit code."""
    try:
        distill, kind = osd_hf.distill, osd_hf.DistillConfig
    except ImportError as error:
        raise ConfigError(str(error)) from error
    places, settings = _settings(args, {field.name for field in dataclasses.fields(kind)})
    if places.get("draft") is None:
        raise ConfigError("Say which model learns: --draft.")
    folder = Path(places["output_dir"])
    make_folder(folder)
    with contextlib.redirect_stdout(sys.stderr):  # the trainer prints what it logs
        try:
            config = kind(output_dir=str(folder), **settings)
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:
            raise ConfigError(f"The training settings do not go together: {first_line(error)}.") from error
        device = places.get("device")
        draft = load_model(places["draft"], device=device)
        own_tokenizer = tokenizer = load_tokenizer(places["draft"])
        target = None
        if places.get("target") is not None:
            target = load_model(places["target"], dtype=places["dtype"], device=device)
            tokenizer = load_tokenizer(places["target"])
            check_tokenizers(tokenizer, own_tokenizer)
        answering = draft if target is None else target
        room = functools.partial(prompt_room, answering.config, draft.config, config.max_new_tokens)
        dataset, eval_dataset = _data(places, tokenizer, room)
        result = distill(
            target=target, draft=draft, dataset=dataset, eval_dataset=eval_dataset, tokenizer=tokenizer,
            config=config, peft_config=_adapters(places),
        )  # fmt: skip
    if not result.state.is_world_process_zero:
        return 0
    result.draft.save_pretrained(folder / "draft")
    own_tokenizer.save_pretrained(folder / "draft")
    report = {
        "provenance": provenance(seed=config.seed),
        "settings": shown_settings({**{n: places[n] for n in PLACES if places.get(n) is not None}, **settings}),
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


def _settings(args: argparse.Namespace, known: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Places and training settings, of the YAML file and of the flags, which go before."""
    given = {} if args.config is None else _read_yaml(args.config)
    for name, value in vars(args).items():
        if name.startswith("distill."):
            name = name.removeprefix("distill.")
            is_text = not isinstance(value, str) or name in set(PLACES) - set(COUNTS)
            given[name] = value if is_text else yaml.safe_load(value)
    allowed = {*PLACES, *known}
    for name in given:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, 1)
            meant = f" Did you mean `{close[0]}`?" if close else ""
            raise ConfigError(f"`{name}` is no setting of distillation.{meant}")
    given = {name: _meant(name, value) for name, value in given.items()}
    places = {**DEFAULTS, **{name: given[name] for name in PLACES if name in given}}
    for name in COUNTS:
        value = places.get(name)
        if value is not None and not (isinstance(value, int) and value >= DEFAULTS.get(name, 1)):
            raise ConfigError(f"`{name}` must be an integer of at least {DEFAULTS.get(name, 1)}, got {value!r}.")
    return places, {name: value for name, value in given.items() if name not in PLACES}


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        read = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"The configuration {path} cannot be read: {first_line(error)}.") from error
    if not isinstance(read, dict) or not all(isinstance(name, str) for name in read):
        raise ConfigError(f"The configuration {path} must hold names with values, such as `learning_rate: 0.0001`.")
    return read


def _meant(name: str, value: Any) -> Any:
    """YAML takes 1e-4 for text, and no for false."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+\.?\d*[eE][-+]?\d+", value):
        return float(value)
    return "no" if name.endswith("_strategy") and value is False else value


def _data(
    places: dict[str, Any], tokenizer: Any, room: Callable[[], int | None]
) -> tuple[list[Any], list[Any] | None]:
    data = _part(places, tokenizer, "", room, places.get("num_requests"))
    if data is None:
        raise ConfigError("Say what is learned from: --prompts or --store.")
    held_out = _part(places, tokenizer, "eval_", room)
    if places["num_held_out"]:
        if held_out is not None:
            raise ConfigError("--num-held-out cuts held-out requests off the data; give no others besides.")
        if places["num_held_out"] >= len(data):
            raise DataError(f"--num-held-out {places['num_held_out']} leaves nothing of {len(data)} requests.")
        return data[: -places["num_held_out"]], data[-places["num_held_out"] :]
    return data, held_out


def _part(
    places: dict[str, Any], tokenizer: Any, prefix: str, room: Callable[[], int | None], limit: int | None = None
) -> list[Any] | None:
    """Requests of the places with a prefix, no more of them read than asked for; `None` where none are named."""
    location, store = places.get(f"{prefix}prompts"), places.get(f"{prefix}store")
    if location is not None and store is not None:
        raise ConfigError(f"Give one of `{prefix}prompts` and `{prefix}store`.")
    if store is not None:
        if not Path(store).is_dir():
            raise StoreError(f"There is no store at {store}. `osd-hf run --store DIR` writes one.")
        return list(itertools.islice(CorrectionStore(store), limit))
    if location is None:
        return None
    column, template = places.get("column"), places.get("prompt_template")
    is_turn = column is not None or template is not None
    source = PromptSource(
        str(location), column=column if is_turn else "prompt", template=template, split=places[f"{prefix}split"],
        subset=places.get("subset"),
    )  # fmt: skip
    if not is_turn:
        return list(itertools.islice(open_rows(source), limit))
    encoded = encode_prompts(
        read_prompts(source), tokenizer, limit=limit, max_prompt_tokens=room(),
        chat_template=not places.get("no_chat_template"),
    )  # fmt: skip
    if encoded.skipped_empty or encoded.skipped_long:
        print(
            f"osd-hf: warning: of {location}, skipped {encoded.skipped_empty} prompts without text and "
            f"{encoded.skipped_long} that leave no room for an answer.",
            file=sys.stderr,
        )
    return [{"prompt": ids} for _, ids in encoded.prompts]


def _adapters(places: dict[str, Any]) -> Any:
    if places.get("lora_rank") is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=places["lora_rank"], lora_alpha=2 * places["lora_rank"], target_modules="all-linear")
