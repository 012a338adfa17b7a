"""Read prompts from a file or the Hub, put them into the chat template, and encode them."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import pyarrow as pa
from pyarrow import parquet

from osd_hf.errors import ConfigError, DataError, first_line

logger = logging.getLogger(__name__)

FILES = (".json", ".jsonl", ".parquet", ".csv")
# Columns of common formats, best first: chats (TRL, ShareGPT), then a user message (TRL, Alpaca, and others).
CHATS, TEXTS = ("messages", "conversations"), ("prompt", "instruction", "question")
INPUTS = ("input", "context")  # what an instruction is about
CHAT_COLUMNS = ("tools", "chat_template_kwargs")
ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT
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
    """One user turn, or a chat that ends before an answer."""

    index: int  # row of its source, from 0
    text: str  # without chat template
    domain: str | None = None
    problem: str | None = None  # why the row cannot be used; the text is empty then
    messages: tuple[Mapping[str, Any], ...] = ()  # of a chat
    chat_template_kwargs: Mapping[str, Any] | None = None  # of this row


@dataclass(frozen=True)
class PromptSource:
    """
    A source of prompts, and how a row becomes a prompt: by a column, by a template, or by a common format, which is
    detected: `messages`, `conversations` (ShareGPT), `prompt` (text or messages), `instruction` with `input`,
    `question`, `text`, or a single column. Of a chat, a last answer is left out. A template is a text with columns in
    braces, such as `"db: {db}\\n{question}"` or `"{messages[-1][content]}"`. A written `\\n` or `\\t` is a line break
    or a tab. Other braces, such as those of JSON, are text.

    Raises:
        ConfigError: both of `column` and `template`; two kinds of label.
    """

    location: str  # a file, a folder that `datasets.load_dataset` reads, or a Hub data set id
    column: str | None = None
    template: str | None = None
    domain: str | None = None  # label of all prompts
    domain_column: str | None = None
    split: str = "train"  # or a slice such as "train[:100]"
    subset: str | None = None  # configuration of a Hub data set

    def __post_init__(self) -> None:
        if self.column is not None and self.template is not None:
            raise ConfigError("One of `column` and `template` says where in a row the prompt is; got both.")
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


def report_skipped(name: str, num_used: int, skipped: Mapping[str, Sequence[int]]) -> None:
    """Log the rows that are left out, by reason: a few row numbers for each of a few reasons. Raises DataError if no
    row is used. `name` is what a row is called."""
    parts, count = [], sum(map(len, skipped.values()))
    for reason, rows in skipped.items():
        more = f" and {len(rows) - MAX_LISTED_ROWS} more" if len(rows) > MAX_LISTED_ROWS else ""
        parts.append(f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:MAX_LISTED_ROWS]))}{more}: {reason}")
    others = len(parts) - MAX_LISTED_REASONS
    listed = "; ".join(parts[:MAX_LISTED_REASONS]) + (f"; and {others} other reasons" if others > 0 else "")
    if not num_used:
        raise DataError(f"No {name} can be used: {listed or 'there is none'}.")
    if skipped:
        logger.warning("Skipped %d of %d %ss: %s.", count, num_used + count, name, listed)


# --- prompts of a source --------------------------------------------------------------------------------------------


def read_prompts(source: PromptSource) -> Iterator[Prompt]:
    """Read the prompts of a source in the order of its rows. A row that cannot be used becomes a prompt with a
    `problem`. The call opens the source and checks the columns. Only the columns that are needed are read. Raises
    ConfigError for a template without a column, and DataError for a missing or unreadable file, an unknown data set or
    split, a missing column, no rows, and no known format."""
    known, read = open_rows(source)
    text_of: Callable[[Mapping[str, Any]], Any]
    if source.template is None:
        column, *more = _detected(source, known) if source.column is None else [source.column]
        columns, text_of = [column, *more], lambda row: _prompt_of(row, column, *more)
    else:
        template = source.template.replace("\\n", "\n").replace("\\t", "\t")
        fields = _template_fields(template, known)
        columns, text_of = [column for column, _ in fields.values()], lambda row: _filled(template, fields, row)
    wanted = dict.fromkeys(columns if source.domain_column is None else [*columns, source.domain_column])
    if missing := [name for name in wanted if name not in known]:
        names = ", ".join(map(repr, missing))
        raise DataError(f"{source.location} has no column {names}; its columns are {', '.join(known)}.")
    return _prompts(read(wanted), source, text_of)


def _detected(source: PromptSource, known: Collection[str]) -> list[str]:
    """Return the column of the prompt in a common format, and others that belong to it; raises DataError."""
    names = [name for name in known if name != source.domain_column]
    chats, texts = ([name for name in some if name in names] for some in (CHATS, TEXTS))
    if chats or len(texts) == 1 or (not texts and "text" in names):
        column = (chats or texts or ["text"])[0]
        more = INPUTS if column == "instruction" else CHAT_COLUMNS if column in (*CHATS, "prompt") else ()
        return [column, *(name for name in more if name in names)]
    if len(names) == 1:
        return names
    found = f"{source.location} has {'several columns' if texts else 'no column'} that may be the prompt"
    hint = "Name one by `column`, or combine several in a `template`."
    raise DataError(f"{found}; its columns are {', '.join(known)}. {hint}")


def _prompt_of(row: Mapping[str, Any], column: str, *more: str) -> str | dict[str, Any]:
    """Return the text of a row, or the fields of a prompt that is a chat; raises RowError."""
    value = row.get(column)
    is_chat = isinstance(value, list) and all(isinstance(m, Mapping) and m.keys() & {"role", "from"} for m in value)
    if value and is_chat:
        given = {n: v for n, v in (row.get("chat_template_kwargs") or {}).items() if v is not None}
        tools = {"tools": row["tools"]} if row.get("tools") else {}
        return {"messages": _turns(value), "chat_template_kwargs": given | tools or None}
    parts = [prompt_text(row[name], name) for name in more if name in INPUTS and row.get(name)]
    return "\n\n".join([prompt_text(value, column), *parts])


def _turns(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the messages of a chat up to its last answer, as chat templates read them; raises RowError."""
    turns = []
    for message in messages:
        if "from" in message:
            role = str(message["from"])
            message = {"role": ROLES.get(role, role), "content": message.get("value")}
        try:
            turns.append(chat_message(message))
        except RowError as error:
            raise RowError(f"`content` {error}") from None
    while turns and turns[-1].get("role") == "assistant":
        turns.pop()
    if not any(turn["content"].strip() for turn in turns):
        raise RowError(NO_TEXT)
    return tuple(turns)


def _prompts(rows: Iterable[Any], source: PromptSource, text_of: Callable[[Any], Any]) -> Iterator[Prompt]:
    for index, row in enumerate(rows):
        text, problem, label = "", None, source.domain
        try:
            if isinstance(row, RowError):
                raise row
            label = source.domain if source.domain_column is None else row.get(source.domain_column)
            text = text_of(row)
        except RowError as error:
            problem = str(error)
        domain = None if label is None else str(label)
        if isinstance(text, str):
            yield Prompt(index, text, domain, problem)
        else:
            whole = "\n".join(turn["content"] for turn in text["messages"])
            yield Prompt(index, whole, domain, **text)


def prompt_text(value: Any, name: str) -> str:
    """Return the text of a column, which may be a list of text parts; raises RowError."""
    if value is None:
        raise RowError(f"`{name}` is null")
    try:
        text = content_text(value)
    except RowError as error:
        raise RowError(f"`{name}` {error}") from None
    if not text.strip():
        raise RowError(NO_TEXT)
    return text


FIELD = re.compile(r"\{([^{}]+)\}")
STEP = re.compile(r"[^.\[\]]+")


def _template_fields(template: str, known: Collection[str]) -> dict[str, tuple[str, list[str]]]:
    """Return the fields of a template, with the column and the steps inside its value. Braces hold a field if they
    name a column or an identifier. All others are text, so JSON needs no escaping."""
    fields: dict[str, tuple[str, list[str]]] = {}
    for name in FIELD.findall(template):
        column, *steps = [name] if name in known else STEP.findall(name) or [""]
        if column in known or column.isidentifier():
            fields[name] = column, steps
    if not fields:
        raise ConfigError(f"The prompt template {template!r} must name columns, such as '{{question}}'.")
    return fields


def _filled(template: str, fields: Mapping[str, tuple[str, list[str]]], row: Mapping[str, Any]) -> str:
    """Return the prompt of a row; raises RowError."""
    values = {name: _value(row, *field) for name, field in fields.items()}
    text = FIELD.sub(lambda found: values.get(found[1], found[0]), template)
    return prompt_text(text if any(map(str.strip, values.values())) else "", "template")


def _value(row: Mapping[str, Any], column: str, steps: Sequence[str]) -> str:
    """Return the text of a field; raises RowError."""
    value = row.get(column)
    try:
        for step in steps:
            value = value[int(step) if isinstance(value, list | tuple) else step]  # type: ignore[index]
    except (LookupError, ValueError, TypeError) as error:
        raise RowError(f"it does not fit the template ({type(error).__name__}: {first_line(error)})") from error
    return prompt_text(value, column) if value is None or isinstance(value, list | dict) else str(value)


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
    read: Callable[[list[str]], Iterable[Any]]
    try:
        if kind not in FILES:
            dataset = _hub_dataset(source)
            names, count, read = dataset.column_names, len(dataset), dataset.select_columns
        elif kind == ".parquet":
            file = parquet.ParquetFile(path)
            names, count = file.schema_arrow.names, file.metadata.num_rows
            read = lambda columns: (row for part in file.iter_batches(columns=columns) for row in part.to_pylist())  # noqa: E731
        else:
            names, rows = _csv_rows(path) if kind == ".csv" else _json_rows(path)
            count, read = len(rows), lambda _: rows
    except (OSError, ValueError, LookupError, RuntimeError, ImportError, pa.ArrowException) as error:
        raise DataError(f"{source.location} cannot be read: {first_line(error.__cause__ or error)}.") from error
    if not count:
        raise DataError(f"{source.location} has no rows.")
    return names, lambda columns: read([name for name in names if name in columns])


def _hub_dataset(source: PromptSource) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source.location, source.subset, split=source.split)
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(first_line(error)) from error.__cause__


def _csv_rows(path: Path) -> tuple[list[str], list[Any]]:
    """Return the names of all columns, and the rows with all values as text. Raises ValueError if it is no CSV."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            return list(reader.fieldnames or ()), list(reader)
    except csv.Error as error:
        raise ValueError(str(error)) from error


def _json_rows(path: Path) -> tuple[list[str], list[Any]]:
    """Return the names of all columns, and the objects of a JSON list or of one line each, with a RowError in place of
    each unusable one. Types are not guessed: text that looks like a date is text. Raises ValueError if there is no
    JSON object."""
    text = path.read_bytes()
    values = _parsed(text)
    if not isinstance(values, list):
        values = [_parsed(line) for line in text.splitlines() if line.strip()]
    rows = [
        value
        if isinstance(value, dict | RowError)
        else RowError(f"it is a value of type `{type(value).__name__}`, not a JSON object")
        for value in values
    ]
    names = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
    if rows and not names:
        raise ValueError(str(rows[0]))
    return names, rows


def _parsed(text: bytes) -> Any:
    """Return the JSON value of a text, or a RowError."""
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
        content = "".join(map(str, parts)) if all(map(is_text, parts)) else None
    if not is_text(content):
        raise RowError("must be a text of whole characters, or a list of parts of the type `text`")
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
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None, **how: Any
) -> str:
    """Return the text of messages in the tokenizer's chat template. Raises ConfigError if `chat_template_kwargs` holds
    an argument that is set here, and RowError if the template cannot take the messages."""
    if fixed := OF_CHAT.intersection(chat_template_kwargs or ()):
        raise ConfigError(f"`chat_template_kwargs` must not hold `{min(fixed)}`, which is set already. Leave it out.")
    how |= chat_template_kwargs or {}
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **how))
    except Exception as error:  # templates raise errors of any type
        raise RowError(f"the chat template cannot take it ({type(error).__name__}: {first_line(error)})") from error


def encode_turn(
    tokenizer: Any,
    text: str | Prompt,
    *,
    chat_template: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a user turn or a prompt, in the tokenizer's chat template if it has one and
    `chat_template` is set. Raises ConfigError for `chat_template_kwargs` without a template or with an argument that
    is set here, and RowError if the template cannot take the text."""
    prompt = text if isinstance(text, Prompt) else Prompt(0, text)
    if chat_template and getattr(tokenizer, "chat_template", None):
        turn = prompt.messages or [{"role": "user", "content": prompt.text}]
        kwargs = {**(chat_template_kwargs or {}), **(prompt.chat_template_kwargs or {})}
        text = render_chat(tokenizer, turn, kwargs, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if chat_template_kwargs:
        why = "the tokenizer has none" if chat_template else "prompts are plain text here"
        raise ConfigError(f"`chat_template_kwargs` are for a chat template, and {why}. Leave them out.")
    return list(tokenizer(prompt.text)["input_ids"])


def encode_prompts(
    prompts: Iterable[Prompt],
    tokenizer: Any,
    *,
    limit: int | None = None,
    max_prompt_tokens: int | None = None,
    **how: Any,
) -> EncodedPrompts:
    """Encode at most `limit` prompts of at most `max_prompt_tokens` with [`encode_turn`] and its arguments. Reads no
    more than needed. Other prompts are skipped and logged once. Raises ConfigError as [`encode_turn`], and DataError
    if no prompt can be used."""
    encoded: list[tuple[Prompt, list[int]]] = []
    skipped: dict[str, list[int]] = {}
    for prompt in prompts:
        if limit is not None and len(encoded) == limit:
            break
        try:
            if prompt.problem is not None:
                raise RowError(prompt.problem)
            ids = encode_turn(tokenizer, prompt, **how) if prompt.text.strip() else []
            if not ids:
                raise RowError(NO_TEXT)
            if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
                raise RowError(f"more than the {max_prompt_tokens} tokens that there is room for")
        except RowError as error:
            skipped.setdefault(str(error), []).append(prompt.index)
        else:
            encoded.append((prompt, ids))
    report_skipped("prompt", len(encoded), skipped)
    return EncodedPrompts(tuple(encoded), skipped)


def prompts_digest(prompts: Sequence[tuple[Prompt, list[int]]]) -> str:
    """Return a hash of prompts with their domains and token ids."""
    digest = hashlib.sha256()
    for prompt, ids in prompts:
        digest.update(json.dumps([prompt.index, prompt.domain, ids]).encode())
    return digest.hexdigest()[:16]
