"""OpenAI's API: request bodies are checked and become settings of `generate`, and answers become response bodies."""

from __future__ import annotations

import copy
import inspect
import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from osd_hf.errors import ConfigError
from osd_hf.models import eos_ids, prompt_room, vocab_size_of
from osd_hf.prompts import RowError, chat_message, is_text, render_chat
from osd_hf.utils.streaming import INCOMPLETE, Pieces, text_of

MAX_LOGPROBS = 20  # alternatives per token
MAX_LOGIT_BYTES = 1 << 30  # of the rows of one answer with log-probs
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_USER_CHARACTERS = 256
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e5  # below the minimum, sampling differs from greedy only by rounding
DEFAULT_COMPLETION_TOKENS = 16  # of `/v1/completions`, as in OpenAI's API
NO_LIMIT = -1  # value of `max_tokens` in clients of llama.cpp and LM Studio
ROLES = ("system", "developer", "user", "assistant", "tool")
# Parameters that would change the answer and are not supported, with the values that change nothing (and null).
# Unknown parameters are ignored, as other servers do.
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logit_bias": ({},), "frequency_penalty": (0,),
    "presence_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,), "min_tokens": (0,), "ignore_eos": (False,),
    "stop_token_ids": ([],), "bad_words": ([],), "allowed_token_ids": ([],), "prompt_logprobs": (),
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "use_beam_search": (False,),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "structured_outputs": (), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "reasoning_effort": (), "verbosity": (), "modalities": (["text"],),
    "audio": (), "web_search_options": (), "documents": ([],), "chat_template": (), "generation_config": (),
}  # fmt: skip
# Settings of `generate` for those values, because the target's generation config may have others.
NEUTRAL_SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.0}, "min_p": {"min_p": None}, "bad_words": {"bad_words_ids": None},
    "min_tokens": {"min_new_tokens": None, "min_length": 0}, "logit_bias": {"sequence_bias": None},
}  # fmt: skip
# Tokens beyond the bytes of a stop string that are decoded: the first ones may show less text without those before.
STOP_MARGIN_TOKENS = 8


class ApiError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refuse(param: str, rule: str, value: Any, code: str | None = None) -> NoReturn:
    """Raise the ApiError for a parameter that breaks a rule."""
    raise ApiError(400, f"`{param}` {rule}, got {shorten(value)}.", param=param, code=code)


def check_model(requested: Any, name: str) -> None:
    """Raise the ApiError for a request for another model than `name`."""
    if requested != name:
        message = f"The model {shorten(requested)} is not served here; `{name}` is."
        raise ApiError(404, message, param="model", code="model_not_found")


def shorten(value: Any) -> str:
    """Return a value of a client in at most 100 characters."""
    text = repr(value)
    return f"{text[:97]}..." if len(text) > 100 else text


# --- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request: prompt and answer fit into the model."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    is_chat: bool
    sampling: Mapping[str, Any]  # settings of `generate`
    stop: tuple[str, ...] = ()  # the answer ends before the first of these texts
    seed: int | None = None
    logprobs: int | None = None  # alternatives per token in the response; `None` for no log-probs
    is_stream: bool = False
    with_usage: bool = False
    owner: str | None = None  # the user that the request belongs to


class RequestReader:
    """Reads request bodies for one target; see [`~osd_hf.server.app.Service`]. Raises ConfigError for
    `chat_template_kwargs` without a chat template, or with arguments of `apply_chat_template`."""

    def __init__(
        self,
        name: str,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._template_kwargs = chat_template_kwargs or {}
        has_template = getattr(tokenizer, "chat_template", None)
        if self._template_kwargs and (not has_template or self._template_kwargs.keys() & _template_names(tokenizer)):
            more = "" if has_template else ", and the tokenizer has no chat template"
            rule = "must hold what the chat template itself reads"
            raise ConfigError(f"`chat_template_kwargs` {rule}, got {self._template_kwargs}{more}.")
        self.name = name
        self._tokenizer = copy.deepcopy(tokenizer)  # because another thread decodes
        self._defaults = target.generation_config
        self._max_new_tokens = max_new_tokens
        self._vocab_size = vocab_size_of(target)
        self._is_encoder_decoder = target.config.is_encoder_decoder
        self._max_length = prompt_room(target.config, target.config, 0)  # of prompt and answer together

    def chat(self, body: Mapping[str, Any]) -> CompletionRequest:
        """Read the body of a request to `/v1/chat/completions`; raises ApiError."""
        self._check_parameters(body)
        prompt_ids = self._chat_prompt(body)
        logprobs = None
        if _flag(body, "logprobs"):
            logprobs = _integer(body, "top_logprobs", 0, MAX_LOGPROBS) or 0
        elif body.get("top_logprobs") not in (None, 0):
            refuse("top_logprobs", "needs `logprobs: true`", body["top_logprobs"])
        return self._request(body, prompt_ids, logprobs, is_chat=True)

    def completion(self, body: Mapping[str, Any]) -> CompletionRequest:
        """Read the body of a request to `/v1/completions`; raises ApiError."""
        self._check_parameters(body)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            prompt = self._tokenizer(prompt)["input_ids"] if is_text(prompt) else None
        rule = "must be one text, or one list of token ids, and not empty; send a request for each"
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            refuse("prompt", rule, body.get("prompt"))
        if outside := [token for token in prompt if not 0 <= token < self._vocab_size]:
            refuse("prompt", f"must hold token ids from 0 to {self._vocab_size - 1}", outside[0])
        return self._request(body, prompt, _integer(body, "logprobs", 0, MAX_LOGPROBS), is_chat=False)

    def _check_parameters(self, body: Mapping[str, Any]) -> None:
        if body.get("model"):  # some clients send an empty name
            check_model(body["model"], self.name)
        for name, neutral in REFUSED.items():
            value = body.get(name)
            if value is not None and value not in neutral:
                rule = "is not supported here, and would change the answer (leave it out)"
                refuse(name, rule, value, "unsupported_parameter")

    def _chat_prompt(self, body: Mapping[str, Any]) -> list[int]:
        """Apply the chat template; returns token ids."""
        if not getattr(self._tokenizer, "chat_template", None):
            message = f"The tokenizer of `{self.name}` has no chat template. Send the prompt to /v1/completions."
            raise ApiError(400, message, param="messages", code="no_chat_template")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            refuse("messages", "must be a list of at least one message", messages)
        messages = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        kwargs = body.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, dict) or kwargs.keys() & _template_names(self._tokenizer):
            refuse("chat_template_kwargs", "must be an object with what the chat template itself reads", kwargs)
        is_continued = _flag(body, "continue_final_message")
        if body.get("add_generation_prompt") is not None and _flag(body, "add_generation_prompt") == is_continued:
            rule = "must be the opposite of `continue_final_message`"
            refuse("add_generation_prompt", rule, body["add_generation_prompt"], "unsupported_parameter")
        ending = {"add_generation_prompt": not is_continued, "continue_final_message": is_continued}
        try:
            text = render_chat(self._tokenizer, messages, {**self._template_kwargs, **kwargs}, **ending)
        except RowError as error:
            raise ApiError(400, f"These messages are refused: {error}.", param="messages") from error
        if not is_text(text):
            refuse("chat_template_kwargs", "must hold whole characters (a surrogate stands alone)", kwargs)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _request(
        self, body: Mapping[str, Any], prompt_ids: list[int], logprobs: int | None, *, is_chat: bool
    ) -> CompletionRequest:
        stream = _flag(body, "stream")
        options = body.get("stream_options")
        if options is not None and (not stream or not isinstance(options, dict)):
            refuse("stream_options", "must be an object, and needs `stream: true`", options)
        if stream and logprobs is not None:
            rule = "is not supported in streams (leave `stream` out)"
            refuse("logprobs", rule, body["logprobs"], "unsupported_parameter")
        if not prompt_ids:
            raise ApiError(400, "The prompt is empty.", param="messages" if is_chat else "prompt")
        is_newer_name = is_chat and body.get("max_completion_tokens") is not None
        length_name = "max_completion_tokens" if is_newer_name else "max_tokens"
        length = None if body.get(length_name) == NO_LIMIT else _integer(body, length_name, 1)
        default_length = self._max_new_tokens if is_chat or "max_tokens" in body else DEFAULT_COMPLETION_TOKENS
        max_new_tokens = self._answer_length(len(prompt_ids), length, default_length, length_name)
        if logprobs is not None and max_new_tokens * self._vocab_size * 4 > MAX_LOGIT_BYTES:
            possible = MAX_LOGIT_BYTES // (4 * self._vocab_size)
            refuse(length_name, f"may be {possible} at most with `logprobs`", max_new_tokens)
        user = body.get("user")
        if user is not None and not (isinstance(user, str) and len(user) <= MAX_USER_CHARACTERS):
            refuse("user", f"must be a text of at most {MAX_USER_CHARACTERS} characters", user)
        return CompletionRequest(
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=max_new_tokens,
            is_chat=is_chat,
            sampling=self._sampling(body),
            stop=_stops(body.get("stop")),
            seed=_integer(body, "seed", -(1 << 63), (1 << 63) - 1),
            logprobs=logprobs,
            is_stream=stream,
            with_usage=bool((options or {}).get("include_usage")),
            owner=user,
        )

    def _answer_length(self, prompt_length: int, length: int | None, default_length: int, name: str) -> int:
        """Return the maximum length of the answer; raises ApiError if prompt and answer do not fit."""
        max_new_tokens = length or default_length
        if self._max_length is None:
            return max_new_tokens
        used = 0 if self._is_encoder_decoder else prompt_length
        if length is None:
            max_new_tokens = max(min(max_new_tokens, self._max_length - used), 1)
        if prompt_length > self._max_length or used + max_new_tokens > self._max_length:
            raise ApiError(
                400,
                f"The model has {self._max_length} positions; the prompt has {prompt_length} tokens, and the answer "
                f"may have {max_new_tokens}. Shorten the prompt, or lower `{name}`.",
                param=name if length else None,
                code="context_length_exceeded",
            )
        return max_new_tokens

    def _sampling(self, body: Mapping[str, Any]) -> dict[str, Any]:
        temperature = _number(body, "temperature", 0.0, MAX_TEMPERATURE)
        top_p = _number(body, "top_p", 0.0, 1.0)
        top_k = _integer(body, "top_k", -1)
        neutral: dict[str, Any] = {}
        for name in NEUTRAL_SETTINGS.keys() & body.keys():
            neutral |= NEUTRAL_SETTINGS[name] if body[name] is not None else {}
        samples = bool(self._defaults.do_sample) if temperature is None else temperature >= MIN_TEMPERATURE
        if not samples or top_p == 0:
            return {"do_sample": False, **neutral}
        # Without a value, transformers would use its own default of 50; clients of this API expect no limit.
        k = self._defaults.top_k if top_k is None else max(top_k, 0)
        given = {"temperature": temperature, "top_p": top_p, "top_k": k or 0}
        return {"do_sample": True, **neutral, **{name: value for name, value in given.items() if value is not None}}


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(name, "must be true or false", value)
    return bool(value)


def _number(body: Mapping[str, Any], name: str, minimum: float, maximum: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        refuse(name, f"must be a number from {minimum:g} to {maximum:g}", value)
    return float(value)


def _integer(body: Mapping[str, Any], name: str, minimum: int, maximum: int | None = None) -> int | None:
    value = body.get(name)
    if isinstance(value, float) and value.is_integer():  # some languages write integers so
        value = int(value)
    if value is not None and (type(value) is not int or value < minimum or (maximum is not None and value > maximum)):
        bound = "" if maximum is None else f", at most {maximum}"
        refuse(name, f"must be an integer of at least {minimum}{bound}", value)
    return None if value is None else int(value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    is_valid = isinstance(stops, list | tuple) and len(stops) <= MAX_STOPS
    if not is_valid or not all(is_text(stop) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        rule = f"must be a text, or a list of at most {MAX_STOPS}, each of 1 to {MAX_STOP_CHARACTERS} characters"
        refuse("stop", rule, value)
    return tuple(stops)


def _message(message: Any, name: str) -> dict[str, Any]:
    """Return a message in the form that chat templates read; raises ApiError."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        refuse(name, f"must be an object whose `role` is one of {', '.join(ROLES)}", message)
    try:
        read = chat_message(message)
    except RowError as error:
        refuse(f"{name}.content", str(error), message.get("content"))
    # Templates of open models know this role only as "system".
    return {**read, "role": "system" if read["role"] == "developer" else read["role"]}


def _template_names(tokenizer: Any) -> set[str]:
    return set(inspect.signature(tokenizer.apply_chat_template).parameters)  # which a client must not set


# --- answers --------------------------------------------------------------------------------------------------------


class StopText(StoppingCriteria):
    """Ends an answer at the token that completes one of the stop texts, which are ignored in the prompt."""

    is_stateless = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._start = prompt_tokens
        self._num_tokens = 2 * max(len(stop.encode()) for stop in stops) + STOP_MARGIN_TOKENS  # a token has 1+ bytes

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        tail = input_ids[0, max(self._start, input_ids.shape[1] - self._num_tokens) :].tolist()
        text = self._tokenizer.decode(tail, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return torch.full((1,), any(stop in text for stop in self._stops), device=input_ids.device)


@dataclass(eq=False)
class Answer:
    """The answer to one request while it grows, and its response bodies."""

    request: CompletionRequest
    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationConfig
    model_name: str
    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: dict[str, Any] | None = None
    _is_stopped: bool = False  # a stop text was found
    _num_shown: int = 0  # characters

    def __post_init__(self) -> None:
        self._eos_ids = eos_ids(self.generation_config)
        self._pieces = Pieces(self.tokenizer)
        self._id = uuid.uuid4().hex
        self._created = int(time.time())

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens; returns the text that can be shown now. Text that may begin a stop text is held back."""
        before = len(self._pieces.texts)
        self.ids += ids
        self._pieces.push(self.ids[before:])
        return self._show("".join(self._pieces.texts[before:]))

    def end(self) -> str:
        """End the answer; returns the remaining text."""
        return self._show(self._pieces.unfinished, is_end=True)

    def _show(self, new: str, *, is_end: bool = False) -> str:
        if self._is_stopped:
            return ""
        self.text += new
        stops, ready = self.request.stop, len(self.text)
        found = [place for stop in stops if (place := self.text.find(stop, self._num_shown)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._is_stopped = True
            ready = len(self.text)
        elif not is_end:
            begun = (n for stop in stops for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
            ready = max(ready - max(begun, default=0), self._num_shown)
        shown = self.text[self._num_shown : ready]
        self._num_shown = ready
        return shown

    @property
    def finish_reason(self) -> str:
        """`"length"` if the answer has its maximum length and nothing else ended it, otherwise `"stop"`."""
        has_room = len(self.ids) < self.request.max_new_tokens
        return "stop" if self._is_stopped or has_room or self.ids[-1] in self._eos_ids else "length"

    @property
    def usage(self) -> dict[str, int]:
        """Token counts, with the token that ended the answer."""
        prompt, answer = len(self.request.prompt_ids), len(self.ids)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def set_logprobs(self, logits: Sequence[torch.Tensor]) -> None:
        """Set the log-probs of the shown tokens from the target's raw logits, `(1, vocab)` for each token."""
        num_alternatives = self.request.logprobs
        assert num_alternatives is not None
        tokens, offsets, offset = list[dict[str, Any]](), list[int](), 0
        for token, piece, row in zip(self.ids, self._pieces.texts, logits, strict=True):
            is_shown = offset < len(self.text) or (piece == "" and token not in self._eos_ids and not self._is_stopped)
            if not is_shown:
                break
            logprobs = row[0].float().log_softmax(-1)
            values, ids = logprobs.topk(min(num_alternatives, len(logprobs)))
            top = [self._token_entry(*pair) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
            tokens.append({**self._token_entry(token, float(logprobs[token])), "top_logprobs": top})
            offsets.append(offset)
            offset += len(piece)
        if self.request.is_chat:
            self.logprobs = {"content": tokens, "refusal": None}
            return
        by_text = [{other["token"]: other["logprob"] for other in one["top_logprobs"]} for one in tokens]
        self.logprobs = {
            "tokens": [one["token"] for one in tokens],
            "token_logprobs": [one["logprob"] for one in tokens],
            "top_logprobs": by_text if num_alternatives else None,
            "text_offset": offsets,
        }

    def _token_entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = text_of(self.tokenizer, [token])
        # A part of a character has no text, and no own bytes.
        return {"token": text, "logprob": logprob, "bytes": None if INCOMPLETE in text else list(text.encode())}

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        content: dict[str, Any] = {"text": self.text}
        if self.request.is_chat:
            content = {"message": {"role": "assistant", "content": self.text, "refusal": None}}
        choice = {"index": 0, **content, "logprobs": self.logprobs, "finish_reason": self.finish_reason}
        return {**self._header(), "choices": [choice], "usage": self.usage}

    def first_event(self) -> str:
        """Return the start of a stream."""
        return self._event({"delta": {"role": "assistant", "content": ""}}) if self.request.is_chat else ""

    def text_event(self, text: str) -> str:
        """Return the event for some text of the answer."""
        if not text:
            return ""
        return self._event({"delta": {"content": text}} if self.request.is_chat else {"text": text})

    def last_events(self) -> str:
        """Return the end of a stream."""
        last = self._event({"delta": {}} if self.request.is_chat else {"text": ""}, self.finish_reason)
        usage = self._event(None) if self.request.with_usage else ""
        return f"{last}{usage}data: [DONE]\n\n"

    def _event(self, content: dict[str, Any] | None, finish_reason: str | None = None) -> str:
        choice = {"index": 0, **(content or {}), "logprobs": None, "finish_reason": finish_reason}
        body = {**self._header(".chunk"), "choices": [] if content is None else [choice]}
        if self.request.with_usage:
            body["usage"] = self.usage if content is None else None
        return event(body)

    def _header(self, suffix: str = "") -> dict[str, Any]:
        prefix, kind = "cmpl", "text_completion"
        if self.request.is_chat:
            prefix, kind = "chatcmpl", f"chat.completion{suffix}"
        return {"id": f"{prefix}-{self._id}", "object": kind, "created": self._created, "model": self.model_name}


def event(body: Any) -> str:
    """Return a server-sent event with some JSON."""
    return f"data: {json.dumps(body)}\n\n"
