"""Read prompts from a file or the Hub, put them into the chat template, and encode them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import pyarrow as pa
from pyarrow import parquet

from osd_hf.errors import ConfigError, DataError, first_line

logger = logging.getLogger(__name__)

FILES = (".json", ".jsonl", ".parquet")
MAX_LISTED_ROWS, MAX_LISTED_REASONS = 5, 8
# Arguments of `apply_chat_template` that are set here, so they cannot be among a caller's `chat_template_kwargs`.
OF_CHAT = {
    "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
NO_TEXT = "no text"


class RowError(DataError):
    """A row that cannot be used. The message is the reason, without the number of the row."""


@dataclass(frozen=True)
class Prompt:
    """One user turn."""

    index: int  # row of its source, from 0
    text: str  # without chat template
    domain: str | None = None
    problem: str | None = None  # why the row cannot be used; the text is empty then


@dataclass(frozen=True)
class PromptSource:
    """
    A source of prompts, and how a row becomes a prompt. A template is a format string over the columns, such as
    `"db: {db}\\n{question}"` or `"{messages[-1][content]}"`. A written `\\n` or `\\t` is a line break or a tab. Other
    braces, such as those of JSON, are text.

    Raises:
        ConfigError: neither or both of `column` and `template`; two kinds of label.
    """

    location: str  # a file, a folder that `datasets.load_dataset` reads, or a Hub data set id
    column: str | None = None
    template: str | None = None
    domain: str | None = None  # label of all prompts
    domain_column: str | None = None
    split: str = "train"  # or a slice such as "train[:100]"
    subset: str | None = None  # configuration of a Hub data set

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
    """Prompts with their token ids, in order; and the rows that were left out, by reason."""

    prompts: tuple[tuple[Prompt, list[int]], ...]
    skipped: Mapping[str, Sequence[int]]

    @property
    def domains(self) -> list[str | None]:
        return [prompt.domain for prompt, _ in self.prompts]


def list_skipped(skipped: Mapping[str, Sequence[int]]) -> str:
    """List rows that are left out by reason, in a bounded length: a few row numbers for each of a few reasons."""
    parts = []
    for reason, rows in itertools.islice(skipped.items(), MAX_LISTED_REASONS):
        more = len(rows) - MAX_LISTED_ROWS
        numbers = ", ".join(map(str, rows[:MAX_LISTED_ROWS])) + (f" and {more} more" if more > 0 else "")
        parts.append(f"row{'s' if len(rows) > 1 else ''} {numbers}: {reason}")
    if others := sum(len(rows) for rows in itertools.islice(skipped.values(), MAX_LISTED_REASONS, None)):
        parts.append(f"{others} more rows for {len(skipped) - MAX_LISTED_REASONS} other reasons")
    return "; ".join(parts)


# --- prompts of a source --------------------------------------------------------------------------------------------


def read_prompts(source: PromptSource) -> Iterator[Prompt]:
    """
    Read the prompts of a source in the order of its rows. A row that cannot be used becomes a prompt with a `problem`.

    The call opens the source and checks the columns. Only the columns that are needed are read.

    Raises:
        ConfigError: a template without a column.
        DataError: a missing or unreadable file, an unknown data set or split, a missing column, no rows.
    """
    known, read = open_rows(source)
    label = [] if source.domain_column is None else [source.domain_column]
    if source.template is None:
        column = str(source.column)
        columns, text_of = [column], lambda row: prompt_text(row.get(column), column)
    else:
        template = _Template(source.template.replace("\\n", "\n").replace("\\t", "\t"), known)
        columns, text_of = template.columns, template.fill
    wanted = list(dict.fromkeys([*columns, *label]))
    if missing := [name for name in wanted if name not in known]:
        raise DataError(
            f"{source.location} has no column {', '.join(map(repr, missing))}; its columns are {', '.join(known)}."
        )
    return _prompts(read(wanted), source, text_of)


def _prompts(rows: Iterable[Any], source: PromptSource, text_of: Callable[[Any], str]) -> Iterator[Prompt]:
    for index, row in enumerate(rows):
        text, problem, label = "", None, source.domain
        try:
            if isinstance(row, RowError):
                raise row
            label = source.domain if source.domain_column is None else row.get(source.domain_column)
            text = text_of(row)
        except RowError as error:
            problem = str(error)
        yield Prompt(index, text, None if label is None else str(label), problem)


def prompt_text(value: Any, name: str | None) -> str:
    """Return the text of a column or field, which may be a list of text parts; raises RowError."""
    if value is None:
        raise RowError(f"`{name}` is null")
    if not isinstance(value, str):
        try:
            value = content_text(value)
        except RowError:
            raise RowError(f"`{name}` holds a {type(value).__name__}, not text") from None
    if not is_text(value):
        raise RowError(f"`{name}` holds half a character (a surrogate that stands alone)")
    if not value.strip():
        raise RowError(NO_TEXT)
    return value


FIELD = re.compile(r"\{[^{}]+\}")
REFERENCE = re.compile(r"([^.\[\]]+)((?:\.\w+|\[[^\[\]]+\])*)")
STEP = re.compile(r"[\w-]+|(?<=\[)[^\[\]]+")


class _Template:
    """
    A prompt template over columns. `{name}` is a field if a column has this name or the name is an identifier. All
    other braces are text, so JSON needs no escaping. Doubled braces mean single ones only if the template is a valid
    Python format string over columns.

    Raises:
        ConfigError: the template has no field.
    """

    def __init__(self, template: str, known: Collection[str]) -> None:
        self._known = known
        try:
            parts = list(string.Formatter().parse(template))
            if not all(name is None or self._field(name) for _, name, _, _ in parts):
                parts = self._parse_json(template)
        except ValueError:
            parts = self._parse_json(template)
        # Text, the field behind it, its format and conversion.
        self._parts = [
            (text, self._field(name or ""), spec or "", conversion) for text, name, spec, conversion in parts
        ]
        self.columns = list(dict.fromkeys(field[0] for _, field, _, _ in self._parts if field))
        if not self.columns:
            raise ConfigError(f"The prompt template {template!r} must name columns, such as '{{question}}'.")

    def _parse_json(self, template: str) -> list[tuple[str, str | None, str | None, str | None]]:
        """Parse a template like `string.Formatter`, with all braces that are no fields as text."""
        parts, end = [], 0
        for found in FIELD.finditer(template):
            with contextlib.suppress(ValueError):
                [(_, name, spec, conversion)] = string.Formatter().parse(found[0])
                if self._field(name or ""):
                    parts.append((template[end : found.start()], name, spec, conversion))
                    end = found.end()
        return [*parts, (template[end:], None, None, None)]

    def _field(self, name: str) -> tuple[str, list[str]] | None:
        """Split a name into a column and the steps inside of its value; `None` if it is no field."""
        if name in self._known:
            return name, []
        found = REFERENCE.fullmatch(name)
        if found is None or not (found[1] in self._known or found[1].isidentifier()):
            return None
        return found[1], STEP.findall(found[2])

    def fill(self, row: Mapping[str, Any]) -> str:
        """Return the prompt of a row; raises RowError."""
        values, filled = list[str](), ""
        for text, field, spec, conversion in self._parts:
            values.append("" if field is None else _value(row, *field, spec, conversion))
            filled += text + values[-1]
        return prompt_text(filled if any(map(str.strip, values)) else "", "template")


def _value(row: Mapping[str, Any], column: str, steps: list[str], spec: str, conversion: Any) -> str:
    value = row.get(column)
    try:
        for step in steps:
            value = value[int(step) if isinstance(value, list | tuple) else step]  # type: ignore[index]
        if isinstance(value, list | dict) and conversion is None or value is None:
            value = prompt_text(value, column)
        return format(string.Formatter().convert_field(value, conversion), spec)
    except RowError:
        raise
    except (LookupError, ValueError, TypeError) as error:
        raise RowError(f"it does not fit the template ({type(error).__name__}: {first_line(error)})") from error


# --- rows of a source -----------------------------------------------------------------------------------------------


def open_rows(source: PromptSource) -> tuple[list[str], Callable[[Collection[str]], Iterable[Any]]]:
    """Open a file or Hub data set; raises DataError if it cannot be read or has no rows. Return the names of all
    columns, and a function that reads the rows as mappings with at least the given columns. A row of a JSON file that
    cannot be parsed is a `RowError`."""
    path = Path(source.location)
    kind = path.suffix.lower()
    if kind in FILES and not path.is_file():
        raise DataError(f"There is no file {source.location}.")
    if path.is_file() and kind not in FILES:
        raise DataError(f"{source.location} is none of {', '.join(FILES)}.")
    read: Callable[[Collection[str]], Iterable[Any]]
    try:
        if kind not in FILES:
            dataset = _hub_dataset(source)
            names, count, read = dataset.column_names, len(dataset), dataset.select_columns
        elif kind == ".parquet":
            file = parquet.ParquetFile(path)
            names, count = file.schema_arrow.names, file.metadata.num_rows
            read = lambda columns: (row for part in file.iter_batches(columns=columns) for row in part.to_pylist())  # noqa: E731
        else:
            names, rows = _json_rows(path)
            count, read = len(rows), lambda _: rows
    except (OSError, ValueError, LookupError, RuntimeError, ImportError, pa.ArrowException) as error:
        raise DataError(f"{source.location} cannot be read: {first_line(error.__cause__ or error)}.") from error
    if not count:
        raise DataError(f"{source.location} has no rows.")
    return list(names), lambda columns: read([name for name in names if name in columns])


def _hub_dataset(source: PromptSource) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source.location, source.subset, split=source.split)
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(first_line(error)) from error.__cause__


def _json_rows(path: Path) -> tuple[list[str], list[Any]]:
    """Parse a list, or one value per line, without guessing types: a column may change its type, and text that looks
    like a date is text. Return the names of all columns, and the rows or a RowError in place of each unusable one.
    Raises ValueError if there is no JSON object."""
    text = path.read_bytes()
    values = _parsed(text)
    if not isinstance(values, list):
        values = (
            [values] if isinstance(values, dict) else [_parsed(line) for line in text.splitlines() if line.strip()]
        )
    names, rows = dict[str, None](), list[Any]()
    for value in values:
        row = {"text": value} if isinstance(value, str) else value
        if isinstance(row, dict):
            names |= dict.fromkeys(row)
        elif not isinstance(row, RowError):
            row = RowError(f"it is a value of type `{type(row).__name__}`, not a JSON object")
        rows.append(row)
    if rows and not names:
        raise ValueError(str(rows[0]))
    return list(names), rows


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return RowError("it is not UTF-8 text")
    except (ValueError, RecursionError) as error:
        return RowError(f"it is not valid JSON: {getattr(error, 'msg', first_line(error))}")


# --- chats ----------------------------------------------------------------------------------------------------------


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether a value is text that can be encoded: JSON can hold halves of characters."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def content_text(content: Any) -> str:
    """Return the text of a message's content: a text, or a list of parts of the type `text`; raises RowError."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(map(is_text, parts)):
            raise RowError("may hold parts of the type `text` alone")
        content = "".join(map(str, parts))
    if not is_text(content):
        raise RowError("must be a text, or a list of parts of the type `text`")
    return content


def chat_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates read it: without null fields, the content in one text, and the arguments of
    tool calls parsed. The content of an assistant or a tool may be null. Raises RowError for content without text,
    with a message that continues "`content` ..."."""
    turn = {name: value for name, value in message.items() if value is not None}
    turn["content"] = content_text(turn.get("content", "" if turn.get("role") in ("assistant", "tool") else None))
    calls = turn.pop("tool_calls", None)
    if calls:
        turn["tool_calls"] = [_parsed_call(call) for call in calls] if isinstance(calls, list) else calls
    return turn


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _parsed(function["arguments"].encode(errors="replace"))
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None = None,
    **how: Any,
) -> str:  # fmt: skip
    """
    Return the text of messages in the tokenizer's chat template.

    Raises:
        ConfigError: `chat_template_kwargs` holds an argument that is set here.
        RowError: the template cannot take the messages.
    """
    if fixed := OF_CHAT.intersection(chat_template_kwargs or ()):
        raise ConfigError(f"`chat_template_kwargs` must not hold `{min(fixed)}`, which is set already. Leave it out.")
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, **how, **(chat_template_kwargs or {})
        )
    except Exception as error:  # templates raise errors of any type
        raise RowError(f"the chat template cannot take it ({type(error).__name__}: {first_line(error)})") from error
    return text


def encode_turn(
    tokenizer: Any, text: str, *, chat_template: bool = True, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """
    Return the token ids of a user turn.

    Args:
        tokenizer (`PreTrainedTokenizerBase`), text (`str`): The target's tokenizer, and what the user says.
        chat_template (`bool`, *optional*, defaults to `True`):
            Whether to put the text into the chat template, if the tokenizer has one.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*): Arguments of the template, such as `enable_thinking`.

    Raises:
        ConfigError: `chat_template_kwargs` without a chat template, or with what is set here.
        RowError: the template cannot take the text.
    """
    if chat_template and getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": text}]
        text = render_chat(tokenizer, turn, chat_template_kwargs, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if chat_template_kwargs:
        why = "the tokenizer has none" if chat_template else "prompts are plain text here"
        raise ConfigError(f"`chat_template_kwargs` are for a chat template, and {why}. Leave them out.")
    return list(tokenizer(text)["input_ids"])


def encode_prompts(
    prompts: Iterable[Prompt], tokenizer: Any, *, limit: int | None = None, max_prompt_tokens: int | None = None,
    chat_template: bool = True, chat_template_kwargs: Mapping[str, Any] | None = None,
) -> EncodedPrompts:  # fmt: skip
    """
    Encode at most `limit` prompts of at most `max_prompt_tokens` as [`encode_turn`] does, reading no more than needed.
    The others are left out, and the log lists them once.

    Raises:
        ConfigError: as [`encode_turn`] does.
        DataError: no prompt can be used.
    """
    encoded: list[tuple[Prompt, list[int]]] = []
    skipped: dict[str, list[int]] = {}
    how: dict[str, Any] = {"chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs}
    for prompt in prompts:
        if limit is not None and len(encoded) == limit:
            break
        try:
            if prompt.problem is not None:
                raise RowError(prompt.problem)
            ids = encode_turn(tokenizer, prompt.text, **how) if prompt.text.strip() else []
            if not ids:
                raise RowError(NO_TEXT)
            if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
                raise RowError(f"more than the {max_prompt_tokens} tokens that there is room for")
        except RowError as error:
            skipped.setdefault(str(error), []).append(prompt.index)
        else:
            encoded.append((prompt, ids))
    if not encoded:
        raise DataError(f"No prompt can be used: {list_skipped(skipped) or 'there is none'}.")
    if skipped:
        count = sum(map(len, skipped.values()))
        logger.warning("Skipped %d prompt%s: %s.", count, "s" if count > 1 else "", list_skipped(skipped))
    return EncodedPrompts(tuple(encoded), skipped)


def prompts_digest(prompts: Sequence[tuple[Prompt, list[int]]]) -> str:
    """Return a hash of prompts with their domains and token ids."""
    digest = hashlib.sha256()
    for prompt, ids in prompts:
        digest.update(json.dumps([prompt.index, prompt.domain, ids]).encode())
    return digest.hexdigest()[:16]
