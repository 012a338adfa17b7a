"""What is asked for over HTTP: bodies as OpenAI's API has them, checked, and what cannot be given refused by name."""

from __future__ import annotations

import copy
import inspect
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from osd_hf.errors import ConfigError
from osd_hf.models import prompt_room, vocab_size_of
from osd_hf.prompts import RowError, chat_message, is_text, render_chat

MOST_LOGPROBS = 20  # alternatives per token
MOST_LOGIT_BYTES = 1 << 30  # that the rows of one answer with log-probs take, until it is sent
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 256
MOST_USER_CHARACTERS = 256
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-5, 1e5  # below, sampling is greedy but for rounding
COMPLETION_TOKENS = 16  # of `/v1/completions` by default, as OpenAI's
NO_LIMIT = -1  # value of `max_tokens` in clients of llama.cpp and LM Studio
ROLES = ("system", "developer", "user", "assistant", "tool")
# What would change the answer and is not there, by the values under which it changes nothing, besides null. Other
# parameters that are unknown here are passed over, as other servers do.
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
# What these values say to `generate`, where the target's generation config says otherwise.
NEUTRAL: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.0}, "min_p": {"min_p": None}, "bad_words": {"bad_words_ids": None},
    "min_tokens": {"min_new_tokens": None, "min_length": 0}, "logit_bias": {"sequence_bias": None},
}  # fmt: skip
# Parts of a tokenizer before its model that leave out no character, where they remove none.
_WHOLE = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}
# Characters that have each byte that UTF-8 has.
_BYTES = "".join(map(chr, [*range(0x801), *range(0x1000, 0x10000, 0x1000), *range(0x10000, 0x110000, 0x10000)]))


class ApiError(Exception):
    """What a client is answered instead of what it has asked for, as OpenAI's API writes it."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """Ready for JSON."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refuse(param: str, rule: str, value: Any, code: str | None = None) -> NoReturn:
    """Raise the ApiError of a parameter that breaks a rule."""
    raise ApiError(400, f"`{param}` {rule}, got {shown(value)}.", param=param, code=code)


def check_model(asked: Any, name: str) -> None:
    """Raise the ApiError of a client that asks for another model than `name`."""
    if asked != name:
        message = f"The model {shown(asked)} is not served here; `{name}` is."
        raise ApiError(404, message, param="model", code="model_not_found")


def shown(value: Any) -> str:
    """What a client has sent, in 100 characters at most; only the parts that are shown are written out."""
    written = _SHORT.repr(value)
    return f"{written[:97]}..." if len(written) > 100 else written


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 100, 100


def most_characters(tokenizer: Any) -> int | None:
    """Characters of a normalized text that a token can stand for at most; `None` where nothing bounds them: where
    spaces are left out, or unknown words are one token however long they are."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    part = {} if backend.pre_tokenizer is None else json.loads(backend.pre_tokenizer.__getstate__())
    parts = part.get("pretokenizers", [part] if part else [])
    if any(part["type"] not in _WHOLE or part.get("behavior") == "Removed" for part in parts):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return None
    vocab, model = tokenizer.get_vocab(), backend.model
    of_bytes = any(part["type"] == "ByteLevel" for part in parts)
    needed = {f"<0x{byte:02X}>" for byte in range(256)}
    if of_bytes:
        needed = {byte for piece, _ in backend.pre_tokenizer.pre_tokenize_str(_BYTES) for byte in piece}
    has_bytes = (of_bytes or model.byte_fallback) and vocab.keys() >= needed
    if not has_bytes and (model.unk_token is None or model.fuse_unk):
        return None
    return max(map(len, vocab))


@dataclass(frozen=True)
class Asked:
    """
    One request for an answer.

    Args:
        prompt_ids (`tuple[int, ...]`): Of the whole prompt, at least one.
        max_new_tokens (`int`): Of the answer; there is room for them.
        is_chat (`bool`): Whether it came to `/v1/chat/completions`.
        sampling (`Mapping[str, Any]`): `do_sample` and what goes with it, for `generate`.
        stop (`tuple[str, ...]`): The answer ends before the first of these texts.
        seed (`int`, *optional*): Of sampling.
        logprobs (`int`, *optional*): Alternatives of each token whose log-probs are told; `None`: no log-probs at all.
        is_stream, with_usage (`bool`): Whether it is told while it grows, and then with its usage.
        owner (`str`, *optional*): Whose request it is.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    is_chat: bool
    sampling: Mapping[str, Any]
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    is_stream: bool = False
    with_usage: bool = False
    owner: str | None = None


class Reader:
    """
    Reads the bodies of requests for one target.

    Args:
        name (`str`): The model that is served.
        target (`PreTrainedModel`): What answers: its positions, its vocabulary, and how it samples by default.
        tokenizer (`PreTrainedTokenizerBase`): Its own, of which a copy is used: answers are decoded meanwhile.
        max_new_tokens (`int`): Of an answer to a chat that says nothing of it.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Settings of the chat template; those of a request go before them.

    Raises:
        ConfigError: `chat_template_kwargs` without a chat template, or with arguments of `apply_chat_template`.
    """

    def __init__(
        self, name: str, target: Any, tokenizer: Any, max_new_tokens: int, *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._template_kwargs = chat_template_kwargs or {}
        has_template = getattr(tokenizer, "chat_template", None)
        if self._template_kwargs and (not has_template or self._template_kwargs.keys() & _arguments(tokenizer)):
            raise ConfigError(
                f"`chat_template_kwargs` must hold what the chat template itself reads, got {self._template_kwargs}"
                + ("." if has_template else ", and the tokenizer has no chat template.")
            )
        self.name, self._config, self._tokenizer = name, target.config, copy.deepcopy(tokenizer)
        self._usual, self._max_new_tokens = target.generation_config, max_new_tokens
        self._vocab_size = vocab_size_of(target)
        self._room = prompt_room(self._config, self._config, 0)  # of prompt and answer together
        self._most_characters = most_characters(self._tokenizer)

    def chat(self, body: Mapping[str, Any]) -> Asked:
        """What a body for `/v1/chat/completions` asks for; raises ApiError."""
        self._check(body)
        prompt = self._of_messages(body)
        logprobs = None
        if _flag(body, "logprobs"):
            logprobs = _whole(body, "top_logprobs", 0, MOST_LOGPROBS) or 0
        elif body.get("top_logprobs") not in (None, 0):
            refuse("top_logprobs", "needs `logprobs: true`", body["top_logprobs"])
        name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        return self._asked(body, prompt, name, self._max_new_tokens, logprobs, is_chat=True)

    def completion(self, body: Mapping[str, Any]) -> Asked:
        """What a body for `/v1/completions` asks for; raises ApiError."""
        self._check(body)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            prompt = self._ids(prompt, "prompt") if is_text(prompt) else None
        rule = "must be one text, or one list of token ids, and not empty; send a request for each"
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            refuse("prompt", rule, body.get("prompt"))
        if odd := [token for token in prompt if not 0 <= token < self._vocab_size]:
            refuse("prompt", f"must hold token ids from 0 to {self._vocab_size - 1}", odd[0])
        usual = self._max_new_tokens if "max_tokens" in body else COMPLETION_TOKENS
        logprobs = _whole(body, "logprobs", 0, MOST_LOGPROBS)
        return self._asked(body, prompt, "max_tokens", usual, logprobs, is_chat=False)

    def _check(self, body: Mapping[str, Any]) -> None:
        """Raises ApiError for another model, and for what cannot be given."""
        if body.get("model"):  # some clients send an empty name
            check_model(body["model"], self.name)
        for name, harmless in REFUSED.items():
            value = body.get(name)
            if value is not None and value not in harmless:
                rule = "is not supported here, and would change the answer (leave it out)"
                refuse(name, rule, value, "unsupported_parameter")

    def _of_messages(self, body: Mapping[str, Any]) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ApiError(
                400, f"The tokenizer of `{self.name}` has no chat template. Send the whole prompt to /v1/completions.",
                param="messages", code="no_chat_template",
            )  # fmt: skip
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            refuse("messages", "must be a list of at least one message", messages)
        turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
        kwargs = body.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, dict) or kwargs.keys() & _arguments(self._tokenizer):
            refuse("chat_template_kwargs", "must be an object with what the chat template itself reads", kwargs)
        is_continued = _flag(body, "continue_final_message")
        if body.get("add_generation_prompt") is not None and _flag(body, "add_generation_prompt") == is_continued:
            rule = "must be the opposite of `continue_final_message`"
            refuse("add_generation_prompt", rule, body["add_generation_prompt"], "unsupported_parameter")
        how = {"add_generation_prompt": not is_continued, "continue_final_message": is_continued}
        try:
            text = render_chat(self._tokenizer, turns, {**self._template_kwargs, **kwargs}, **how)
        except RowError as error:
            raise ApiError(400, f"These messages are refused: {error}.", param="messages") from error
        if not is_text(text):
            refuse("chat_template_kwargs", "must hold whole characters (a surrogate stands alone)", kwargs)
        return self._ids(text, "messages", add_special_tokens=False)

    def _ids(self, text: str, param: str, **how: Any) -> list[int]:
        """The tokens of a text; raises ApiError before it is read where it cannot fit however it is cut."""
        if self._room is not None and self._most_characters is not None:
            most = self._room * self._most_characters
            normalizer = self._tokenizer.backend_tokenizer.normalizer
            if len(text) > most and (normalizer is None or len(normalizer.normalize_str(text)) > most):
                raise ApiError(
                    400, f"The model has {self._room} positions; the prompt has {len(text)} characters, which do not "
                    "fit however they are cut into tokens. Shorten the prompt.", param=param,
                    code="context_length_exceeded",
                )  # fmt: skip
        return list(self._tokenizer(text, **how)["input_ids"])

    def _asked(
        self, body: Mapping[str, Any], prompt: list[int], length: str, usual: int, logprobs: int | None, *,
        is_chat: bool,
    ) -> Asked:  # fmt: skip
        stream = _flag(body, "stream")
        options = body.get("stream_options")
        if options is not None and (not stream or not isinstance(options, dict)):
            refuse("stream_options", "must be an object, and needs `stream: true`", options)
        if stream and logprobs is not None:
            rule = "is not supported in streams (leave `stream` out)"
            refuse("logprobs", rule, body["logprobs"], "unsupported_parameter")
        asked = None if body.get(length) == NO_LIMIT else _whole(body, length, 1)
        most = self._most(prompt, asked, usual, length, is_chat=is_chat)
        if logprobs is not None and most * self._vocab_size * 4 > MOST_LOGIT_BYTES:
            fit = MOST_LOGIT_BYTES // (4 * self._vocab_size)
            refuse(length, f"may be {fit} at most with `logprobs`", most)
        user = body.get("user")
        if user is not None and not (isinstance(user, str) and len(user) <= MOST_USER_CHARACTERS):
            refuse("user", f"must be a text of at most {MOST_USER_CHARACTERS} characters", user)
        sampling, seed = self._sampling(body), _whole(body, "seed", -(1 << 63), (1 << 63) - 1)
        return Asked(
            prompt_ids=tuple(prompt), max_new_tokens=most, is_chat=is_chat, sampling=sampling,
            stop=_stops(body.get("stop")), seed=seed, logprobs=logprobs,
            is_stream=stream, with_usage=bool((options or {}).get("include_usage")), owner=user,
        )  # fmt: skip

    def _most(self, prompt: list[int], asked: int | None, usual: int, name: str, *, is_chat: bool) -> int:
        """Tokens that the answer may have; raises ApiError where prompt and answer do not fit."""
        if not prompt:
            raise ApiError(400, "The prompt is empty.", param="messages" if is_chat else "prompt")
        most = asked or usual
        room = self._room
        if room is None:
            return most
        own = 0 if self._config.is_encoder_decoder else len(prompt)
        if asked is None:
            most = max(min(most, room - own), 1)
        if len(prompt) > room or own + most > room:
            raise ApiError(
                400, f"The model has {room} positions; the prompt has {len(prompt)} tokens, and the answer may have "
                f"{most}. Shorten the prompt, or lower `{name}`.", param=name if asked else None,
                code="context_length_exceeded",
            )  # fmt: skip
        return most

    def _sampling(self, body: Mapping[str, Any]) -> dict[str, Any]:
        temperature = _number(body, "temperature", 0.0, MOST_TEMPERATURE)
        top_p = _number(body, "top_p", 0.0, 1.0)
        top_k = _whole(body, "top_k", -1)
        usual, plain = self._usual, dict[str, Any]()
        for name in NEUTRAL.keys() & body.keys():
            plain |= NEUTRAL[name] if body[name] is not None else {}
        samples = bool(usual.do_sample) if temperature is None else temperature >= LEAST_TEMPERATURE
        if not samples or top_p == 0:  # the likeliest token alone
            return {"do_sample": False, **plain}
        # Where the target names no k, transformers would take 50 of the tokens: not what clients of this API expect.
        k = usual.top_k if top_k is None else max(top_k, 0)
        given = {"temperature": temperature, "top_p": top_p, "top_k": k or 0}
        return {"do_sample": True, **plain, **{name: value for name, value in given.items() if value is not None}}


# --- parts of a body ------------------------------------------------------------------------------------------------


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(name, "must be true or false", value)
    return bool(value)


def _number(body: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        refuse(name, f"must be a number from {least:g} to {most:g}", value)
    return float(value)


def _whole(body: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    value = body.get(name)
    if isinstance(value, float) and value.is_integer():  # as some languages write whole numbers
        value = int(value)
    if value is not None and (type(value) is not int or value < least or (most is not None and value > most)):
        refuse(name, f"must be an integer of at least {least}" + ("" if most is None else f", at most {most}"), value)
    return None if value is None else int(value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    is_fine = isinstance(stops, list | tuple) and len(stops) <= MOST_STOPS
    if not is_fine or not all(is_text(stop) and 0 < len(stop) <= MOST_STOP_CHARACTERS for stop in stops):
        rule = f"must be a text, or a list of at most {MOST_STOPS}, each of 1 to {MOST_STOP_CHARACTERS} characters"
        refuse("stop", rule, value)
    return tuple(stops)


def _turn(message: Any, name: str) -> dict[str, Any]:
    """Return a message as chat templates read it; raises ApiError."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        refuse(name, f"must be an object whose `role` is one of {', '.join(ROLES)}", message)
    try:
        turn = chat_message(message)
    except RowError as error:
        refuse(f"{name}.content", str(error), message.get("content"))
    # Templates of open models know no other name for it.
    return {**turn, "role": "system" if turn["role"] == "developer" else turn["role"]}


def _arguments(tokenizer: Any) -> set[str]:
    """Return the arguments of `apply_chat_template`, which a client must not set."""
    return set(inspect.signature(tokenizer.apply_chat_template).parameters)
