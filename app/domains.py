"""Which domain a visitor's prompt belongs to: naive Bayes over words, learned from the sample prompts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

__all__ = ["OTHER", "classifier"]

OTHER = "general"
LEAST_KNOWN = 0.5  # share of a prompt's words that the samples know
LEAST_MARGIN = 2.0  # nats between the two likeliest domains


def classifier(samples: Mapping[str, Sequence[str]]) -> Callable[[str], str]:
    """
    A function from a prompt to its domain, or to `OTHER` where it is like none of the samples, or like two.

    Args:
        samples (`Mapping[str, Sequence[str]]`):
            Prompts of each domain, at least one.
    """
    counts = {domain: Counter(word for text in texts for word in _words(text)) for domain, texts in samples.items()}
    vocabulary = set().union(*counts.values())
    totals = {domain: sum(count.values()) + len(vocabulary) for domain, count in counts.items()}

    def domain_of(prompt: str) -> str:
        words = _words(prompt)
        known = [word for word in words if word in vocabulary]
        if not known or len(known) < LEAST_KNOWN * len(words):
            return OTHER
        scores = sorted(
            (sum(math.log((count[word] + 1) / totals[domain]) for word in known), domain)
            for domain, count in counts.items()
        )
        if len(scores) > 1 and scores[-1][0] - scores[-2][0] < LEAST_MARGIN:
            return OTHER
        return scores[-1][1]

    return domain_of


def _words(text: str) -> list[str]:
    # Digits stand for each other; signs tell code from prose.
    return re.findall(r"[^\W\d]+|\d|[^\w\s]", re.sub(r"\d", "0", text.lower()))
