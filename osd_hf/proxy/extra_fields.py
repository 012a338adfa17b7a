"""Fields that the proxy adds to a request to learn from the answer, and removes from the response again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from osd_hf.engines.completions import changed_sampling

COMPLETION_PATHS = {"/v1/chat/completions": True, "/v1/completions": False}  # path -> is it a chat?
# Settings with which a client asks for log-probs or token ids itself.
FIELD_SETTINGS = (
    "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids",
    "return_tokens_as_token_ids",
)  # fmt: skip
ADDED_TO_RESPONSE = ("prompt_token_ids",)
ADDED_TO_CHOICES = ("logprobs", "token_ids", "prompt_token_ids")
BLANK_LINE = re.compile(rb"\n\n|\r\n\r\n|\r\r")
DATA_LINE = re.compile(rb"(?:\A|(?<=[\r\n]))data: ?([^\r\n]*)")


# --- requests -------------------------------------------------------------------------------------------------------


def add_fields(body: bytes, request: Mapping[str, Any], *, is_chat: bool, num_logprobs: int) -> bytes:
    """Return the body of a request with settings that ask for log-probs and token ids. The client's own text stays
    unchanged. JSON parsers use the last of two values with the same name."""
    added: dict[str, Any] = {"logprobs": num_logprobs}
    if is_chat:
        added = {"logprobs": True, "top_logprobs": num_logprobs}
    added |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    end = body.rindex(b"}")
    return body[:end] + (b"," if request else b"") + json.dumps(added).encode()[1:] + body[end + 1 :]


def reason_not_to_record(request: Mapping[str, Any]) -> str | None:
    """Return why the answer to a request is not recorded, or `None` if it can be recorded."""
    messages = request.get("messages") if isinstance(request.get("messages"), list) else []
    contents = [m.get("content") for m in messages or () if isinstance(m, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if changed := changed_sampling(request):
        return f"its tokens were shaped by {', '.join(changed)}, not by the target alone"
    is_multimodal = any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)
    if is_multimodal or request.get("prompt_embeds") is not None:
        return "its prompt is more than text"
    asked_for = [request.get(name) for name in FIELD_SETTINGS]
    if any(value is not None and value is not False for value in asked_for):  # 0 asks for some log-probs
        return "its client asks for log-probs or token ids of its own"
    return None


# --- responses ------------------------------------------------------------------------------------------------------


def remove_fields(body: bytes) -> bytes:
    """Return the JSON of a response with `null` in place of the fields that the proxy asked for. vLLM writes `null`
    for fields that were not requested, so the client gets the bytes of a direct call. Text that is not the JSON of a
    response is returned unchanged."""
    try:
        response = json.loads(body)
        has_changed = _set_to_null(response, ADDED_TO_RESPONSE)
        for choice in response.get("choices") or ():
            has_changed |= _set_to_null(choice, ADDED_TO_CHOICES)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return body
    return _to_json(response) if has_changed else body


def remove_fields_of_event(event: bytes) -> bytes:
    """Do the same for a server-sent event. An engine that parses tool calls or reasoning sends events with token ids
    and without text. It would not send them to a client that does not ask for ids, so they are removed."""
    data = event_data(event)
    if data is None or not data.startswith(b"{"):
        return event
    removed = remove_fields(data)
    choices = () if removed is data else json.loads(removed).get("choices") or ()
    if choices and all(c.get("delta") == {} and c.get("finish_reason") is None for c in choices):
        return b""
    return event.replace(data, removed, 1)


def _set_to_null(values: dict[str, Any], names: tuple[str, ...]) -> bool:
    found = [name for name in names if values.get(name) is not None]
    values.update(dict.fromkeys(found))
    return bool(found)


def _to_json(value: Any) -> bytes:
    """Write JSON as vLLM, SGLang and llama.cpp do: without spaces, and in UTF-8."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a surrogate stands alone
        return json.dumps(value, separators=(",", ":")).encode()


# --- streams --------------------------------------------------------------------------------------------------------


def split_events(text: bytes) -> list[bytes]:
    """Split a stream of server-sent events behind blank lines. The last part is an incomplete event, or empty."""
    ends = [blank.end() for blank in BLANK_LINE.finditer(text)]
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def event_data(event: bytes) -> bytes | None:
    """Return the data of an event, or `None` unless they are exactly one line."""
    lines = DATA_LINE.findall(event)
    return lines[0] if len(lines) == 1 else None
