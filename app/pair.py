"""A target and a draft that fit together, and how prompts reach them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from osd_hf import ConfigError, OnlineAssistant, OnlineConfig
from osd_hf.bench.timing import cores
from osd_hf.bundled import load_bundled
from osd_hf.bundled.prompts import DOMAINS, bundled_prompts
from osd_hf.pair import load_model, load_tokenizer, of_one_size, placed, prompt_room
from osd_hf.prompts import encode_turn

__all__ = ["Pair", "use_threads"]

MAX_TURNS = 8  # of the chat that the model sees at most, where it sees any
MAX_SAMPLES = 4096  # prompts of a domain that are made, in some seconds and megabytes; then they come again


class Pair:
    """
    Models, loaded.

    Args:
        target (`str`, *optional*), draft (`str`, *optional*):
            Hub ids or folders; neither: the bundled pair.
        dtype (`str`, *optional*, defaults to `"auto"`), device (`str`, *optional*):
            As of `load_model`.

    Raises:
        ConfigError: one of the two is missing.
        UnsupportedModelError, VocabularyMismatchError: what cannot be loaded, or does not fit together.

    Attributes:
        per_domain (`bool`):
            Whether each domain has a draft of its own: of the bundled pair. With larger models all domains share one,
            as five drafts that learn take five times the memory.
        is_exact (`bool`):
            Whether answers are the target's own to the token; in half precision ties may break otherwise.
    """

    def __init__(
        self, target: str | None = None, draft: str | None = None, *, dtype: str = "auto", device: str | None = None
    ) -> None:
        if bool(target) != bool(draft):
            raise ConfigError("A pair is two models: name a target and a draft, or neither for the bundled pair.")
        self.is_bundled = not target
        if target and draft:
            self.name = f"{target} with {draft}"
            self.target = load_model(target, dtype=dtype, device=device)
            self.draft = load_model(draft, dtype=dtype, device=device)
            self.tokenizer = load_tokenizer(target)
            self.draft = of_one_size(self.draft, self.target)
        else:
            self.name = "the bundled pair"
            self.target, self.draft, self.tokenizer = load_bundled()
            if device is not None:
                self.target, self.draft = placed(self.target, device), placed(self.draft, device)
        self.per_domain = self.is_bundled
        self.seq2seq = bool(self.target.config.is_encoder_decoder)
        self.is_exact = self.target.dtype == torch.float32
        self._samples: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
        self._asked = dict.fromkeys(DOMAINS, 0)
        self._lock = threading.Lock()
        # What a learner would refuse is refused here, while the models that serve are others.
        OnlineAssistant(self.target, self.draft, self.tokenizer, OnlineConfig(update_strategy="manual")).close()

    def encode(self, prompt: str, max_new_tokens: int, history: Sequence[tuple[str, str]] = ()) -> torch.Tensor:
        """
        Ids of shape `(1, tokens)`, int64, of a prompt behind the turns before it, of which the oldest go where there
        is no room for them; raises ConfigError where there is none for the prompt itself.
        """
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
        roles = (
            {"role": role, "content": text}
            for turn in history
            for role, text in zip(("user", "assistant"), turn, strict=True)
        )
        messages = [*roles, {"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

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


def use_threads(pair: Pair, threads: int | None) -> None:
    """Set torch's threads: as asked, or one for the bundled pair, which is too small for more, and all cores else."""
    torch.set_num_threads(threads or (1 if pair.is_bundled else cores()))
