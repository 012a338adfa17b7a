"""Settings that several commands share: where models are loaded, what prompts are served, how a draft learns."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf.cli.flags import Settings, in_groups, part
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError
from osd_hf.prompts import EncodedPrompts, Prompt, PromptSource, encode_prompts, read_prompts

BUNDLED_REQUESTS = 200

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_models, _learning, _prompts = in_groups("models", "learning", "prompts")


@dataclass(frozen=True, kw_only=True)
class Placement(Settings):
    """How and where models are loaded."""

    dtype: Dtype = _models("auto is each checkpoint's own; only float32 is exact to the token", "auto")
    device: str | None = _models("such as cpu or cuda:0; by default CUDA where there is one, and the CPU for the "
                                 "bundled pair")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Learning(Settings):
    """How a draft learns."""

    paper: bool = _learning("the rule of arXiv 2310.07177; other flags change it", False)
    config: OnlineConfig = part(group="learning", metavar="X")

    def fixed_k(self) -> int:
        """Tokens drafted per round; raises ConfigError where the configuration names no number."""
        k = self.config.num_assistant_tokens
        if not isinstance(k, int):
            raise ConfigError("--num-assistant-tokens must be a number: what is compared needs one k throughout.")
        return k


@dataclass(frozen=True, kw_only=True)
class Prompts(Settings):
    """Prompts that are served: those of the bundled domains where no others are named."""

    prompts: str | None = _prompts("Hub data set id, or a json, jsonl or parquet file", metavar="ID|FILE")
    split: str = _prompts("of a Hub data set", "train")
    subset: str | None = _prompts("configuration of a Hub data set")
    column: str | None = _prompts("column of the prompt")
    prompt_template: str | None = _prompts("instead of a column: a format string, such as 'db: {db_id}\\n{question}'",
                                           metavar="FORMAT")  # fmt: skip
    no_chat_template: bool = _prompts("plain text, also where the tokenizer has a chat template", False)
    domain: list[str] | None = _prompts("label of all prompts; of bundled ones, domains to serve (repeat for several)",
                                        metavar="NAME")  # fmt: skip
    domain_column: str | None = _prompts("column of the label", metavar="COLUMN")
    num_requests: int | None = _prompts(f"all by default; {BUNDLED_REQUESTS} of the bundled ones", metavar="N")

    def read_prompts(self, seed: int) -> Iterator[Prompt]:
        """The prompts in their order, mixed by the seed where they are bundled; raises ConfigError and DataError."""
        if self.prompts is not None:
            if self.domain is not None and len(self.domain) > 1:
                raise ConfigError("--domain can be given several times only for bundled prompts; see --domain-column.")
            label = self.domain[0] if self.domain else None
            row = (self.column, self.prompt_template, label, self.domain_column)
            return read_prompts(PromptSource(self.prompts, *row, self.split, self.subset))
        if unknown := set(self.domain or ()) - set(DOMAINS):
            raise ConfigError(f"--domain must be one of {', '.join(DOMAINS)}, got {', '.join(sorted(unknown))}.")
        count, domains = self.num_requests or BUNDLED_REQUESTS, self.domain or DOMAINS
        share = -(-count // len(domains))
        mixed = [(d, e.prompt) for d in domains for e in bundled_prompts(d, share, seed=seed)]
        random.Random(seed).shuffle(mixed)
        return (Prompt(i, text, domain) for i, (domain, text) in enumerate(mixed[:count]))

    def encode(self, prompts: Iterator[Prompt], tokenizer: Any, room: int | None, new_tokens: int) -> EncodedPrompts:
        """Encode as many prompts as are wanted, and say which ones are left out, as they have no text or more tokens
        than there is room for beside an answer."""
        encoded = encode_prompts(
            prompts, tokenizer, limit=self.num_requests, max_prompt_tokens=room,
            chat_template=not self.no_chat_template,
        )  # fmt: skip
        if encoded.skipped_empty or encoded.skipped_long:
            print(
                f"osd-hf: warning: skipped {encoded.skipped_empty} prompts without text and {encoded.skipped_long} "
                f"that leave no room for {new_tokens} new tokens.",
                file=sys.stderr,
            )
        return encoded
