"""Generate the prompts of the bundled pair, with reference answers and checkers, without files, network, or torch.

`bundled_pair.py` trains both models on the `train` split. The package ships the first prompts of the `serve` split
(`bundled_pair.py --stage prompts`).
"""

import json
import random
import zlib
from collections.abc import Iterator
from itertools import islice

from bundled_prompts import finance, math_words, python_functions, sql
from bundled_prompts.example import Example

DOMAINS: tuple[str, ...] = ("sql", "math", "python", "finance")
SPLITS: tuple[str, ...] = ("train", "serve")

_MODULES = {"sql": sql, "math": math_words, "python": python_functions, "finance": finance}
SHIPPED_PROMPTS = 1000  # per domain
_SERVE_SHARE = 8  # one problem in eight belongs to the serve split


def _split_of(domain: str, content: str) -> str:
    return "serve" if zlib.crc32(f"{domain} {content}".encode()) % _SERVE_SHARE == 0 else "train"


def stream_examples(domain: str, *, seed: int = 0, split: str = "serve") -> Iterator[Example]:
    """Yield distinct examples of one domain without end, the same for the same seed.

    Args:
        domain (`str`): one of `DOMAINS`.
        seed (`int`, *optional*, defaults to 0): seed of the random examples.
        split (`str`, *optional*, defaults to `"serve"`): `"train"`, which the bundled models were trained on, or
            `"serve"`, whose problems neither model has seen.

    Raises:
        ValueError: if `domain` or `split` is unknown.
    """
    if domain not in DOMAINS:
        raise ValueError(f"domain must be one of {', '.join(DOMAINS)}, got {domain!r}")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    return _stream(domain, seed, split)


def _stream(domain: str, seed: int, split: str) -> Iterator[Example]:
    rng = random.Random(f"{domain} {split} {seed}")
    seen: set[str] = set()
    while True:
        example = _MODULES[domain].make(rng, lambda content: _split_of(domain, content) == split)
        if example is not None and example.prompt not in seen:
            seen.add(example.prompt)
            yield example


def first_examples(domain: str, n: int, *, seed: int = 0, split: str = "serve") -> list[Example]:
    """Return the first `n` examples of [`stream_examples`]."""
    return list(islice(stream_examples(domain, seed=seed, split=split), n))


def check_answer(example: Example, answer: str) -> bool:
    """Return whether `answer` solves `example`.

    SQL runs in sqlite3 on the schema of the prompt. Equations are evaluated. Python functions run on the examples of
    the prompt and on hidden ones. An answer that cannot be run is wrong; no error is raised.

    Args:
        example (`Example`): the question.
        answer (`str`): the answer, without special tokens.
    """
    return bool(_MODULES[example.domain].check(example, answer))


def shipped_lines() -> list[str]:
    """Return the lines of `osd_hf/bundled/prompts.jsonl`. `problem` numbers the problems of a domain."""
    lines = []
    for domain in DOMAINS:
        problems: dict[str, int] = {}
        for example in first_examples(domain, SHIPPED_PROMPTS):
            number = problems.setdefault(example.content, len(problems))
            row = {"domain": domain, "problem": number, "prompt": example.prompt, "answer": example.answer}
            lines.append(json.dumps(row))
    return lines
