"""A small target, a weaker draft, their tokenizer, and prompts of four domains, for use without a network."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from osd_hf.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["DOMAINS", "GENERAL", "Example", "bundled_prompts", "find_domain", "load_bundled"]

DOMAINS: tuple[str, ...] = ("sql", "math", "python", "finance")

GENERAL = "general"  # prompts of no other domain
_CLASSIFIER_SAMPLES = 200  # prompts per domain that the classifier learns from
_MIN_KNOWN_SHARE = 0.5  # of a prompt's words
_MIN_MARGIN = 2.0  # nats between the two likeliest domains

_FOLDER = Path(__file__).parent
_SEED_STEP = 271  # has no common factor with the number of prompts, so that each seed starts at another prompt


@dataclass(frozen=True)
class Example:
    """One bundled prompt. Prompts that differ only in their wording have the same `problem` number."""

    domain: str
    prompt: str  # the user message, without chat template
    answer: str  # a correct one; others can be correct, too
    problem: int


@functools.cache
def _all_prompts() -> dict[str, list[Example]]:
    examples: dict[str, list[Example]] = {domain: [] for domain in DOMAINS}
    with (_FOLDER / "prompts.jsonl").open(encoding="utf-8") as file:
        for line in file:
            example = Example(**json.loads(line))
            examples[example.domain].append(example)
    return examples


def bundled_prompts(domain: str, n: int, *, seed: int = 0) -> list[Example]:
    """Return `n` distinct prompts of a domain, at most 1,000. Neither bundled model was trained on their problems. The
    `seed` selects the first prompt; up to 250 prompts of seeds 0, 1, and 2 do not overlap. Raises ConfigError for an
    unknown domain or another number."""
    if domain not in DOMAINS:
        raise ConfigError(f"domain must be one of {', '.join(DOMAINS)}, got {domain!r}")
    examples = _all_prompts()[domain]
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= len(examples):
        raise ConfigError(
            f"n must be an integer from 0 to {len(examples)} (the bundled prompts of a domain), got {n!r}"
        )
    start = seed * _SEED_STEP
    return [examples[(start + i) % len(examples)] for i in range(n)]


@functools.cache
def _word_counts() -> dict[str, Counter[str]]:
    return {
        domain: Counter(
            word for e in bundled_prompts(domain, _CLASSIFIER_SAMPLES, seed=1) for word in _words(e.prompt)
        )
        for domain in DOMAINS
    }


def find_domain(prompt: str) -> str:
    """Return the bundled domain of a prompt, by naive Bayes over its words. Returns `GENERAL` if most words are
    unknown, or if two domains are about equally likely."""
    counts = _word_counts()
    vocabulary = set().union(*counts.values())
    words = _words(prompt)
    known = [word for word in words if word in vocabulary]
    if not known or len(known) < _MIN_KNOWN_SHARE * len(words):
        return GENERAL
    scores = {
        domain: sum(math.log((count[word] + 1) / (count.total() + len(vocabulary))) for word in known)
        for domain, count in counts.items()
    }
    best, second = sorted(scores, key=scores.__getitem__, reverse=True)[:2]
    return best if scores[best] - scores[second] >= _MIN_MARGIN else GENERAL


def _words(text: str) -> list[str]:
    # All digits count as the same word. Punctuation helps to recognize code.
    return re.findall(r"[^\W\d]+|\d|[^\w\s]", re.sub(r"\d", "0", text.lower()))


def load_bundled() -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the bundled target, draft, and tokenizer from the installed package, in float32 on the CPU."""
    # Imported here because the prompts are used without torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, draft = (
        AutoModelForCausalLM.from_pretrained(_FOLDER / name, dtype=torch.float32, local_files_only=True)
        for name in ("target", "draft")
    )
    return target, draft, AutoTokenizer.from_pretrained(_FOLDER / "target", local_files_only=True)
