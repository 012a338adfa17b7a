"""Streams of prompts: read from a file or the Hub, made into user turns, encoded."""

from __future__ import annotations

import hashlib
import json
import string
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import parquet

from osd_hf.errors import ConfigError, DataError, first_line

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Prompt:
    """One user turn: the row of its source, the text without chat template, and a label."""

    index: int
    text: str
    domain: str | None = None


@dataclass(frozen=True)
class PromptSource:
    """
    Where prompts come from and how a row becomes one.

    Args:
        location (`str`):
            A `.json`, `.jsonl` or `.parquet` file, a folder that `datasets.load_dataset` reads, or a Hub data set id.
        column (`str`, *optional*), template (`str`, *optional*):
            Column of the prompt text; or a format string over the columns, in which a written `\\n` or `\\t` is a line
            break or a tab.
        domain (`str`, *optional*), domain_column (`str`, *optional*):
            Label of all prompts; or the column that holds it.
        split (`str`, *optional*, defaults to `"train"`), subset (`str`, *optional*):
            Split of a Hub data set, or a slice such as `"train[:100]"`, and its configuration.

    Raises:
        ConfigError: neither or both of `column` and `template`; two kinds of label.
    """

    location: str
    column: str | None = None
    template: str | None = None
    domain: str | None = None
    domain_column: str | None = None
    split: str = "train"
    subset: str | None = None

    def __post_init__(self) -> None:
        if (self.column is None) == (self.template is None):
            raise ConfigError(
                "One of `column` and `template` says where in a row the prompt is; "
                f"got {'neither' if self.column is None else 'both'}."
            )
        if self.domain is not None and self.domain_column is not None:
            raise ConfigError("`domain` labels all prompts, `domain_column` each by its row; give one of them.")


@dataclass(frozen=True)
class EncodedPrompts:
    """What is served: prompts with their token ids, in order, and how many were left out, as they have no text or
    leave no room for an answer."""

    prompts: tuple[tuple[Prompt, list[int]], ...]
    skipped_empty: int
    skipped_long: int

    @property
    def domains(self) -> list[str | None]:
        return [prompt.domain for prompt, _ in self.prompts]


def read_prompts(source: PromptSource) -> Iterator[Prompt]:
    """
    The prompts of a source in the order of its rows; a prompt of a row without text is empty.

    The source is opened and its columns are checked by the call, rows are read as they are asked for.

    Raises:
        DataError: a missing or unreadable file, an unknown data set or split, a missing column, no rows, a prompt that
            is not text.
    """
    rows = open_rows(source)
    template = source.template and source.template.replace("\\n", "\n").replace("\\t", "\t")
    columns = [str(source.column)] if template is None else _columns(template)
    label = [] if source.domain_column is None else [source.domain_column]
    wanted = dict.fromkeys([*columns, *label])
    if missing := [name for name in wanted if name not in rows.column_names]:
        raise DataError(
            f"{source.location} has no column {', '.join(map(repr, missing))}; "
            f"its columns are {', '.join(rows.column_names)}."
        )
    if len(rows) == 0:
        raise DataError(f"{source.location} has no rows.")
    return _prompts(rows.select_columns(list(wanted)), source, template, columns)


def _prompts(rows: Iterable[Any], source: PromptSource, template: str | None, columns: list[str]) -> Iterator[Prompt]:
    for index, row in enumerate(rows):
        values = [row[name] for name in columns]
        if template is None and not isinstance(values[0], str | None):
            raise DataError(
                f"Row {index} of {source.location}: column {source.column!r} holds a {type(values[0]).__name__}, not "
                "text. Name another column, or pick the text out with a template."
            )
        if None in values or not any(str(value).strip() for value in values):
            text = ""
        elif template is None:
            text = values[0]
        else:
            try:
                text = template.format(**row)
            except (LookupError, ValueError, AttributeError) as error:
                raise DataError(f"Row {index} of {source.location} does not fit the template: {error!r}.") from error
        label = row[source.domain_column] if source.domain_column is not None else source.domain
        yield Prompt(index, text, None if label is None else str(label))


def _columns(template: str) -> list[str]:
    """The columns that a format string names."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"The prompt template {template!r} is no format string: {error}.") from error
    columns = [name.split(".")[0].split("[")[0] for name in names]
    if not columns or not all(columns):
        raise ConfigError(f"The prompt template {template!r} must name columns, such as '{{question}}'.")
    return list(dict.fromkeys(columns))


def open_rows(source: PromptSource) -> Any:
    """The rows of a file or Hub data set, a `datasets.Dataset`; raises DataError where they cannot be read."""
    import datasets

    path = Path(source.location)
    builder = BUILDERS.get(path.suffix.lower())
    if builder is not None and not path.is_file():
        raise DataError(f"There is no file {source.location}.")
    if path.is_file() and builder is None:
        raise DataError(f"{source.location} is none of {', '.join(BUILDERS)}.")
    if builder is not None and path.stat().st_size == 0:
        raise DataError(f"{source.location} is empty.")
    try:
        if builder is None:
            return datasets.load_dataset(source.location, source.subset, split=source.split)
        return _open_file(path, builder)
    except (OSError, ValueError, LookupError, RuntimeError, ImportError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source.location} cannot be read: {first_line(error.__cause__ or error)}.") from error


def _open_file(path: Path, builder: str) -> Any:
    import datasets

    shows_bars, verbosity = not datasets.utils.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what is wrong is said once, by the error raised
    try:
        if builder == "parquet" and parquet.read_metadata(path).num_rows == 0:
            return datasets.Dataset(parquet.read_table(path))  # which the builder takes for broken
        # A cache of its own: prompts are users' words, and a changed file must not be answered from an old copy.
        with tempfile.TemporaryDirectory() as cache:
            return datasets.load_dataset(
                builder, data_files=str(path), split="train", cache_dir=cache, keep_in_memory=True
            )
    finally:
        datasets.logging.set_verbosity(verbosity)
        if shows_bars:
            datasets.enable_progress_bars()


def encode_turn(tokenizer: Any, text: str, *, chat_template: bool = True) -> list[int]:
    """Token ids of a user turn: through the chat template where the target's tokenizer has one, otherwise, and with
    `chat_template=False`, of the plain text."""
    if chat_template and getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(text)["input_ids"])


def encode_prompts(
    prompts: Iterable[Prompt], tokenizer: Any, *, limit: int | None = None, max_prompt_tokens: int | None = None,
    chat_template: bool = True,
) -> EncodedPrompts:  # fmt: skip
    """
    Encode prompts until there are enough of them; those without text or too long are left out and counted.

    Args:
        prompts (`Iterable[Prompt]`): Read only as far as needed.
        tokenizer (`PreTrainedTokenizerBase`), chat_template (`bool`, *optional*, defaults to `True`):
            As for [`encode_turn`].
        limit (`int`, *optional*), max_prompt_tokens (`int`, *optional*):
            How many prompts are wanted, and the tokens of the longest one.

    Raises:
        DataError: nothing is left.
    """
    encoded: list[tuple[Prompt, list[int]]] = []
    empty = long = 0
    for prompt in prompts:
        if limit is not None and len(encoded) == limit:
            break
        ids = encode_turn(tokenizer, prompt.text, chat_template=chat_template) if prompt.text.strip() else []
        if not ids:
            empty += 1
        elif max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            long += 1
        else:
            encoded.append((prompt, ids))
    if not encoded:
        raise DataError(
            f"There is nothing to serve: {empty} prompts without text, {long} longer than {max_prompt_tokens} tokens."
        )
    return EncodedPrompts(tuple(encoded), empty, long)


def fingerprint(prompts: Sequence[tuple[Prompt, list[int]]]) -> str:
    """Tells two streams apart by domains and token ids, without giving any of them away."""
    digest = hashlib.sha256()
    for prompt, ids in prompts:
        digest.update(json.dumps([prompt.index, prompt.domain, ids]).encode())
    return digest.hexdigest()[:16]
