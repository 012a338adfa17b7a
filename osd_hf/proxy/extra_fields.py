"""What is asked for beside a client's request, and taken out of the answer again: byte for byte the engine's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from osd_hf.engines.completions import shaped_by
from osd_hf.proxy.events import data_span

__all__ = ["READ", "Shape", "asking", "edited", "edited_event", "reason_against"]

READ = {"/v1/chat/completions": True, "/v1/completions": False}  # paths that are read, and whether they are chats
# Where an answer says what was asked for beside it.
PLACES = {"prompt_token_ids", "choices.logprobs", "choices.token_ids", "choices.prompt_token_ids"}
# Settings of a request by which a client asks for some of it by itself.
ASKING = (
    "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids",
    "return_tokens_as_token_ids",
)  # fmt: skip
SPACE = re.compile(r"[ \t\n\r]*")
PLAIN_NAME = re.compile(r'"([^"\\\n]*)"[ \t\n\r]*:[ \t\n\r]*')  # of a member, with what stands before its value
NEXT = re.compile(r"[ \t\n\r]*([,}\]])[ \t\n\r]*")

Edit = Literal["keep", "null", "drop"]
_value_at = json.JSONDecoder(strict=False).raw_decode


def asking(body: bytes, request: Mapping[str, Any], *, is_chat: bool, num_logprobs: int) -> bytes:
    """The body of a request that asks for what is learned from as well; the client's own text stays as it is, and of
    settings that it names without asking, the last one counts."""
    added: dict[str, Any] = {"logprobs": num_logprobs}
    if is_chat:
        added = {"logprobs": True, "top_logprobs": num_logprobs}
    added |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    end = body.rindex(b"}")
    return body[:end] + (b"," if request else b"") + json.dumps(added).encode()[1:] + body[end + 1 :]


def is_asking(request: Mapping[str, Any]) -> bool:
    """Whether a client asks for log-probs or token ids by itself."""
    values = (request.get(name) for name in ASKING)
    return any(value is not None and value is not False for value in values)


def gives_all(request: Mapping[str, Any], *, is_chat: bool, num_logprobs: int) -> bool:
    """Whether a client asks for all that is learned from by itself, which its answer has then."""
    names = ("logprobs", "return_token_ids", "return_tokens_as_token_ids")
    number = request.get("top_logprobs" if is_chat else "logprobs") or 0
    return all(request.get(name) for name in names) and not 0 <= number < num_logprobs  # -1: the whole vocabulary


def reason_against(request: Mapping[str, Any], *, is_chat: bool, num_logprobs: int) -> str | None:
    """Why the answer to a request cannot be learned from, or not be given as it would be; `None` where it can."""
    if shaped := shaped_by(request):
        return f"its tokens were shaped by {', '.join(shaped)}, not by the target alone"
    if request.get("prompt_embeds") is not None or _has_more_than_text(request.get("messages")):
        return "its prompt is more than text"
    if is_asking(request) and not gives_all(request, is_chat=is_chat, num_logprobs=num_logprobs):
        return "its client asks for log-probs or token ids of its own"
    return None


def _has_more_than_text(messages: Any) -> bool:
    turns = messages if isinstance(messages, list) else []
    parts = [part for turn in turns if isinstance(turn, dict) and isinstance(turn.get("content"), list)
             for part in turn["content"]]  # fmt: skip
    return any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)


class Shape:
    """
    How an engine writes what it is not asked for (as null, or not at all), as told by an answer that was not asked for
    it; what it gives unasked stays.
    """

    def __init__(self) -> None:
        self._nulls, self._given = set[str](), set[str]()

    def note(self, place: str, value: Any) -> Edit:
        """Look at a member of an answer that was not asked for it, and leave it."""
        (self._nulls if value is None else self._given).add(place)
        return "keep"

    def restored(self, place: str, value: Any) -> Edit:
        """What is done with a member of an answer that was asked for it, so that it is as if it were not."""
        if place in self._given:
            return "keep"
        if place not in self._nulls:
            return "drop"
        return "keep" if value is None else "null"


def edited(body: bytes, edit: Callable[[str, Any], Edit]) -> tuple[bytes, dict[str, Any]]:
    """
    The text of an answer, a JSON object, with what `edit` makes of its members at the places of ids and log-probs, and
    its values before that; all else stays byte for byte.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        editor = _Editor(body.decode("latin-1"), edit)  # a character a byte; strings are not looked at
        return editor.edited()
    except (IndexError, RecursionError) as error:
        raise ValueError("no whole JSON object") from error


def edited_event(event: bytes, edit: Callable[[str, Any], Edit], *, is_asked: bool) -> tuple[bytes, dict[str, Any]]:
    """
    The same for a server-sent event, which has no values where its data are no JSON object. One that an engine sends
    only as it was asked for ids, while its text waits for a parser of tools or reasoning, becomes nothing.

    Raises:
        ValueError: its data begin as a JSON object and are none.
    """
    span = data_span(event)
    if span is None or event[span[0] : span[0] + 1] != b"{":
        return event, {}
    data, values = edited(event[slice(*span)], edit)
    choices = values.get("choices")
    if is_asked and choices and all(c.get("delta") == {} and c.get("finish_reason") is None for c in choices):
        return b"", values
    return event[: span[0]] + data + event[span[1] :], values


class _Editor:
    """Goes through a JSON text, down to the choices."""

    def __init__(self, text: str, edit: Callable[[str, Any], Edit]) -> None:
        self._text, self._edit = text, edit
        self._pieces, self._done = list[str](), 0  # the text that stays, and how far it goes

    def edited(self) -> tuple[bytes, dict[str, Any]]:
        begin = self._past_space(0)
        if self._text[begin] != "{":
            raise ValueError("no JSON object")
        values, end = self._object(begin, "")
        if self._past_space(end) != len(self._text):
            raise ValueError("more than a JSON object")
        self._copy(len(self._text))
        return "".join(self._pieces).encode("latin-1"), values

    def _past_space(self, at: int) -> int:
        return SPACE.match(self._text, at).end()  # type: ignore[union-attr]

    def _copy(self, until: int, skip_to: int | None = None) -> None:
        self._pieces.append(self._text[self._done : until])
        self._done = until if skip_to is None else skip_to

    def _object(self, at: int, prefix: str) -> tuple[dict[str, Any], int]:
        """The values of an object that begins there, and where it ends."""
        text, values = self._text, dict[str, Any]()
        before = opened = at + 1  # where the member before ends
        has_kept = has_dropped = False
        at = first = self._past_space(opened)
        while text[at] != "}":
            start = at
            name, value_at = self._name(start)
            place = prefix + name
            does: Edit = "keep"
            if place in PLACES:
                value, end = _value_at(text, value_at)
                does = self._edit(place, value)
            if does == "drop":
                self._copy(before, skip_to=end)  # with the comma before it
                has_dropped = True
            elif has_dropped and not has_kept:  # the comma before this one was for what is gone
                self._copy(self._done, skip_to=start)
                self._pieces.append(text[opened:first])
            if place not in PLACES:
                value, end = self._value(value_at, place)
            if does == "null":
                self._copy(value_at, skip_to=end)
                self._pieces.append("null")
            has_kept = has_kept or does != "drop"
            values[name], before = value, end
            at = self._next(end, "}")
        return values, at + 1

    def _name(self, at: int) -> tuple[str, int]:
        """The name of a member, and where its value begins."""
        if plain := PLAIN_NAME.match(self._text, at):
            return plain[1], plain.end()
        name, at = _value_at(self._text, at)
        at = self._past_space(at)
        if self._text[at] != ":" or not isinstance(name, str):
            raise ValueError("an object has no names")
        return name, self._past_space(at + 1)

    def _value(self, at: int, place: str) -> tuple[Any, int]:
        if place != "choices" or self._text[at] != "[":
            return _value_at(self._text, at)
        values, at = list[Any](), self._past_space(at + 1)
        while self._text[at] != "]":
            value, at = self._object(at, "choices.") if self._text[at] == "{" else _value_at(self._text, at)
            values.append(value)
            at = self._next(at, "]")
        return values, at + 1

    def _next(self, at: int, closing: str) -> int:
        """Where the next element begins, or the closing bracket is."""
        found = NEXT.match(self._text, at)
        if found and found[1] == ",":
            return found.end()
        if not found or found[1] != closing:
            raise ValueError("an element does not end")
        return found.start(1)
