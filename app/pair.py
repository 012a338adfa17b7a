"""The models that serve: how they are loaded, and how prompts reach them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf.errors import ConfigError
from osd_hf.models import Pair, load_pair, prompt_room
from osd_hf.prompts import encode_turn
from osd_hf_app.smollm2 import NAME, SAMPLING, everyday_prompts

MAX_TURNS = 8  # of the chat that the model sees at most, where it sees any
MAX_SAMPLES = 1000  # the bundled prompts of a domain; then they come again
NO_DOMAIN = ""  # of all prompts, where there are no drafts by domain
PENALTY = 1.1  # of SmolLM2's repetitions, with the draft or alone: without it long answers run in circles
ABOUT_BUNDLED = (
    "The bundled target is tiny: it knows simple SQL, sums, short Python functions and small talk about money. "
    "Suggest a prompt shows what."
)
ABOUT_SMOLLM2 = (
    f"The target is {NAME} by Hugging Face (Apache License 2.0). Ask what you like, in English; it is a small model, "
    "so look up what matters. Its draft is a few of its own layers."
)


class ServedPair:
    """A target, a draft and their tokenizer, loaded and checked; arguments and errors are those of `load_pair`. With
    `smollm2` it is that pair, loaded already, whose target is told not to repeat itself."""

    def __init__(
        self, target: str | None = None, draft: str | None = None, *, smollm2: Pair | None = None, **loading: Any
    ) -> None:
        loaded = smollm2 or load_pair(target or None, draft or None, **loading)
        self.target, self.draft, self.tokenizer = loaded
        if smollm2:
            self.target.generation_config.repetition_penalty = PENALTY
        self.is_bundled = smollm2 is None and not target
        self.per_domain = self.is_bundled  # with larger models, five drafts that learn take too much memory
        self.name = "the bundled pair" if self.is_bundled else NAME if smollm2 else f"{target} with {draft}"
        self.about = ABOUT_BUNDLED if self.is_bundled else ABOUT_SMOLLM2 if smollm2 else ""
        self.sampling = SAMPLING if smollm2 else {"temperature": 1.0, "top_p": 1.0}  # where the page begins
        self.seq2seq = bool(self.target.config.is_encoder_decoder)
        self.is_exact = self.target.dtype == torch.float32  # in half precision ties may break otherwise
        self._samples: dict[str, list[str]] = {**{domain: [] for domain in DOMAINS}, NO_DOMAIN: everyday_prompts()}
        self._asked = dict.fromkeys(self._samples, 0)
        self._lock = threading.Lock()
        # What a learner would refuse is refused here, while the models that serve are others.
        OnlineAssistant(self.target, self.draft, self.tokenizer, OnlineConfig(update_strategy="manual")).close()

    @property
    def domains(self) -> tuple[str, ...]:
        """Those that have drafts of their own, and prompts; none where all prompts share one draft."""
        return DOMAINS if self.per_domain else ()

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
        """The next prompts of a domain, none of them again before there have been `MAX_SAMPLES`; everyday ones of
        `NO_DOMAIN`, none of them again before all have been."""
        with self._lock:
            made, begin = self._samples[domain], self._asked[domain]
            end = begin + count
            most = MAX_SAMPLES if domain else len(made)
            if len(made) < min(end, most):  # made anew, twice as many: more begin with the same ones
                made = [example.prompt for example in bundled_prompts(domain, min(2 * end, most))]
                self._samples[domain] = made
            self._asked[domain] = end % most
            return [made[i % most] for i in range(begin, end)]
