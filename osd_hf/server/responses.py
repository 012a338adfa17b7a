"""An answer over HTTP while it grows: where it ends, what may be shown of it, and the JSON that it is told in."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

from osd_hf.models import eos_ids
from osd_hf.server.requests import Asked
from osd_hf.utils.streaming import INCOMPLETE, Pieces, text_of

# Tokens beyond the bytes of a stop string that are looked at: those before it may show less there than they do behind
# others, or nothing.
MARGIN = 8


class StopText(StoppingCriteria):
    """Ends an answer at the token that completes one of these texts, however it is cut into tokens; what stands in the
    prompt of `prompt_tokens` tokens is none of the answer's."""

    is_stateless = True

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt_tokens: int) -> None:
        self._tokenizer, self._stops, self._start = tokenizer, stops, prompt_tokens
        self._reach = 2 * max(len(stop.encode()) for stop in stops) + MARGIN  # a token has a byte at least

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        tail = input_ids[0, max(self._start, input_ids.shape[1] - self._reach) :].tolist()
        text = self._tokenizer.decode(tail, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return torch.full((1,), any(stop in text for stop in self._stops), device=input_ids.device)


class Answer:
    """
    What one request is answered.

    Args:
        asked (`Asked`): The request.
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        generation_config (`GenerationConfig`): The target's, with the tokens that end an answer.
        name (`str`): The model that is served.
    """

    def __init__(self, asked: Asked, tokenizer: Any, generation_config: Any, name: str) -> None:
        self.asked, self._tokenizer = asked, tokenizer
        self._ends = eos_ids(generation_config)
        self._pieces = Pieces(tokenizer)
        self._is_cut = False
        self._shown = 0  # characters
        self.ids: list[int] = []
        self.text = ""
        self.logprobs: dict[str, Any] | None = None
        self._id, self._created, self._name = uuid.uuid4().hex, int(time.time()), name

    def push(self, ids: Iterable[int]) -> str:
        """Take in the next tokens; returns what may be shown now. What may be the beginning of a text that the answer
        is to end before waits for what follows."""
        before = len(self._pieces.texts)
        self.ids += ids
        self._pieces.push(self.ids[before:])
        return self._show("".join(self._pieces.texts[before:]))

    def end(self) -> str:
        """Take in that no tokens follow; returns what is still to be shown."""
        return self._show(self._pieces.unfinished, is_end=True)

    def _show(self, new: str, *, is_end: bool = False) -> str:
        if self._is_cut:
            return ""
        self.text += new
        stops, ready = self.asked.stop, len(self.text)
        found = [place for stop in stops if (place := self.text.find(stop, self._shown)) >= 0]
        if found:
            self.text, self._is_cut = self.text[: min(found)], True
            ready = len(self.text)
        elif not is_end:
            begun = (n for stop in stops for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
            ready = max(ready - max(begun, default=0), self._shown)
        shown, self._shown = self.text[self._shown : ready], ready
        return shown

    @property
    def finish_reason(self) -> str:
        """Return `"length"` if the answer has all the tokens that it may have and none that ends it, else `"stop"`."""
        has_ended = self._is_cut or len(self.ids) < self.asked.max_new_tokens or self.ids[-1] in self._ends
        return "stop" if has_ended else "length"

    @property
    def usage(self) -> dict[str, int]:
        """Tokens, the one that ended the answer included."""
        prompt, answer = len(self.asked.prompt_ids), len(self.ids)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    # --- log-probs --------------------------------------------------------------------------------------------------

    def tell_logprobs(self, logits: Sequence[torch.Tensor]) -> None:
        """Take in the target's raw logits of each token, `(1, vocab)`: what is told is of its own distribution, before
        temperature and the like, of the tokens whose text is shown."""
        count = self.asked.logprobs
        assert count is not None
        tokens, offsets, offset = list[dict[str, Any]](), list[int](), 0
        for token, piece, row in zip(self.ids, self._pieces.texts, logits, strict=True):
            is_shown = offset < len(self.text) or (piece == "" and token not in self._ends and not self._is_cut)
            if not is_shown:
                break
            logs = row[0].float().log_softmax(-1)
            values, ids = logs.topk(min(count, len(logs)))
            likeliest = zip(ids.tolist(), values.tolist(), strict=True)
            one, *others = [self._told(*pair) for pair in ((token, float(logs[token])), *likeliest)]
            tokens.append({**one, "top_logprobs": others})
            offsets.append(offset)
            offset += len(piece)
        if self.asked.is_chat:
            self.logprobs = {"content": tokens, "refusal": None}
            return
        top = [{other["token"]: other["logprob"] for other in one["top_logprobs"]} for one in tokens]
        self.logprobs = {
            "tokens": [one["token"] for one in tokens],
            "token_logprobs": [one["logprob"] for one in tokens],
            "top_logprobs": top if count else None,
            "text_offset": offsets,
        }

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        text = text_of(self._tokenizer, [token])
        # A part of a character has no text, and no bytes that would be its own.
        return {"token": text, "logprob": logprob, "bytes": None if INCOMPLETE in text else list(text.encode())}

    # --- JSON -------------------------------------------------------------------------------------------------------

    def _head(self, part: str = "") -> dict[str, Any]:
        prefix, kind = ("chatcmpl", f"chat.completion{part}") if self.asked.is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self._id}", "object": kind, "created": self._created, "model": self._name}

    @property
    def body(self) -> dict[str, Any]:
        """The whole answer, once it has ended; ready for JSON."""
        shown: dict[str, Any] = {"text": self.text}
        if self.asked.is_chat:
            shown = {"message": {"role": "assistant", "content": self.text, "refusal": None}}
        choice = {"index": 0, **shown, "logprobs": self.logprobs, "finish_reason": self.finish_reason}
        return {**self._head(), "choices": [choice], "usage": self.usage}

    def first(self) -> str:
        """What the stream of a chat begins with."""
        return self._event({"delta": {"role": "assistant", "content": ""}}) if self.asked.is_chat else ""

    def event(self, text: str) -> str:
        """A part of the stream with this text of the answer."""
        return self._event({"delta": {"content": text}} if self.asked.is_chat else {"text": text}) if text else ""

    def last(self) -> str:
        """What the stream ends with."""
        ended = self._event({"delta": {}} if self.asked.is_chat else {"text": ""}, self.finish_reason)
        usage = self._event(None) if self.asked.with_usage else ""
        return f"{ended}{usage}data: [DONE]\n\n"

    def _event(self, shown: dict[str, Any] | None, finish_reason: str | None = None) -> str:
        choice = {"index": 0, **(shown or {}), "logprobs": None, "finish_reason": finish_reason}
        body = {**self._head(".chunk"), "choices": [] if shown is None else [choice]}
        if self.asked.with_usage:
            body["usage"] = self.usage if shown is None else None
        return server_sent(body)


def server_sent(body: Any) -> str:
    """A server-sent event with this JSON."""
    return f"data: {json.dumps(body)}\n\n"
