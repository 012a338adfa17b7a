"""The models that serve: how they are loaded, how prompts reach them, and the text of their tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from osd_hf import ConfigError, OnlineAssistant, OnlineConfig
from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf.pair import load_pair, prompt_room
from osd_hf.prompts import encode_turn

MAX_TURNS = 8  # of the chat that the model sees at most, where it sees any
MAX_SAMPLES = 4096  # prompts of a domain that are made, in some seconds and megabytes; then they come again
INCOMPLETE = "\ufffd"  # what an unfinished character decodes to


class ServedPair:
    """A target, a draft and their tokenizer, loaded and checked; arguments and errors are those of `load_pair`."""

    def __init__(
        self, target: str | None = None, draft: str | None = None, *, dtype: str = "auto", device: str | None = None
    ) -> None:
        self.target, self.draft, self.tokenizer = load_pair(target or None, draft or None, dtype=dtype, device=device)
        self.is_bundled = not target
        self.per_domain = self.is_bundled  # with larger models, five drafts that learn take too much memory
        self.name = "the bundled pair" if self.is_bundled else f"{target} with {draft}"
        self.seq2seq = bool(self.target.config.is_encoder_decoder)
        self.is_exact = self.target.dtype == torch.float32  # in half precision ties may break otherwise
        self._samples: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
        self._asked = dict.fromkeys(DOMAINS, 0)
        self._lock = threading.Lock()
        # What a learner would refuse is refused here, while the models that serve are others.
        OnlineAssistant(self.target, self.draft, self.tokenizer, OnlineConfig(update_strategy="manual")).close()

    def encode(self, prompt: str, max_new_tokens: int, history: Sequence[tuple[str, str]] = ()) -> torch.Tensor:
        """Ids of shape `(1, tokens)`, int64, of a prompt and the turns before it, of which the oldest go where there
        is no room for them; raises ConfigError where there is none for the prompt itself."""
        room = prompt_room(self.target.config, self.draft.config, max_new_tokens)
        history = history[-MAX_TURNS:]
        for first in range(len(history) + 1):
            ids = self._encode(prompt, history[first:])
            if room is None or len(ids) <= room:
                return torch.tensor([ids], device=self.target.device)
        raise ConfigError(
            f"The prompt has {len(ids)} tokens; beside an answer of {max_new_tokens} these models have room for "
            f"{room}. Shorten it, or allow fewer new tokens."
        )

    def _encode(self, prompt: str, history: Sequence[tuple[str, str]]) -> list[int]:
        if not history or not getattr(self.tokenizer, "chat_template", None):
            return encode_turn(self.tokenizer, prompt)
        messages = []
        for asked, answered in history:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        messages.append({"role": "user", "content": prompt})
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def completion(self, ids: torch.Tensor, output: torch.Tensor) -> list[int]:
        """The tokens that `generate` has added to the prompt, or to what a decoder begins with."""
        return [int(token) for token in output[0, 1 if self.seq2seq else ids.shape[1] :]]

    def samples(self, domain: str, count: int) -> list[str]:
        """The next prompts of a domain, none of them again before there have been `MAX_SAMPLES`."""
        with self._lock:
            made, begin = self._samples[domain], self._asked[domain]
            end = begin + count
            if len(made) < min(end, MAX_SAMPLES):  # made anew, twice as many: more begin with the same ones
                made = [example.prompt for example in bundled_prompts(domain, min(2 * end, MAX_SAMPLES))]
                self._samples[domain] = made
            self._asked[domain] = end % MAX_SAMPLES
            return [made[i % MAX_SAMPLES] for i in range(begin, end)]


class Pieces:
    """Decodes an answer token by token, without special tokens; the pieces joined are the text of the whole. A token
    that ends in the middle of a character shows nothing, and the one that completes it shows the whole character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Decoding begins at a token that was shown already: what a token looks like depends on the one before it.
        self._begin = self._shown = 0
        self.texts: list[str] = []

    def push(self, ids: Iterable[int]) -> None:
        """The next tokens of the answer."""
        for token in ids:
            self._ids.append(token)
            before = self._decode(self._ids[self._begin : self._shown])
            now = self._decode(self._ids[self._begin :])
            # Decoding does not begin at a token that shows nothing, such as a special one.
            if now == before or now.endswith(INCOMPLETE):
                self.texts.append("")
                continue
            self.texts.append(now[len(before) :])
            self._begin, self._shown = self._shown, len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def text_of(tokenizer: Any, ids: Iterable[int]) -> str:
    """The text of one token, or a few, by themselves; special tokens by their names."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
