"""Prompts of four domains with reference answers and checkers, all made here: no file, no network, no torch."""

import random
import zlib
from collections.abc import Iterator

from osd_hf.bundled import finance, math_words, python_functions, sql
from osd_hf.bundled.example import Example

DOMAINS: tuple[str, ...] = ("sql", "math", "python", "finance")
SPLITS: tuple[str, ...] = ("train", "serve")

_MODULES = {"sql": sql, "math": math_words, "python": python_functions, "finance": finance}
_SERVE_SHARE = 8


def _split_of(domain: str, content: str) -> str:
    return "serve" if zlib.crc32(f"{domain} {content}".encode()) % _SERVE_SHARE == 0 else "train"


def stream_examples(domain: str, *, seed: int = 0, split: str = "serve") -> Iterator[Example]:
    """Yield distinct examples of one domain without end, the same for the same seed.

    Args:
        domain (`str`): one of `DOMAINS`.
        seed (`int`, *optional*, defaults to 0): another seed, other examples.
        split (`str`, *optional*, defaults to `"serve"`): `"train"` (what the bundled models were trained on) or
            `"serve"` (one problem in eight, which neither model has seen in any wording).

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


def bundled_prompts(domain: str, n: int, *, seed: int = 0, split: str = "serve") -> list[Example]:
    """The first `n` examples of a domain: distinct prompts, the same for the same seed.

    Args:
        domain (`str`): one of `DOMAINS`.
        n (`int`): how many, 0 or more. More begin with the same ones.
        seed (`int`, *optional*, defaults to 0): another seed, other examples.
        split (`str`, *optional*, defaults to `"serve"`): `"serve"`, problems that neither bundled model was trained
            on, or `"train"`.

    Raises:
        ValueError: if `domain` or `split` is unknown, or `n` is negative.
    """
    stream = stream_examples(domain, seed=seed, split=split)
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ValueError(f"n must be an integer of at least 0, got {n!r}")
    return [next(stream) for _ in range(n)]


def check_answer(example: Example, answer: str) -> bool:
    """Whether `answer` is a right answer to `example`, by running or recomputing it.

    SQL is run in sqlite3 on the schema shown, equations are evaluated, Python is run on examples shown and hidden,
    and money figures are compared. An answer that cannot be run is wrong; nothing is raised for it.

    Args:
        example (`Example`): what was asked.
        answer (`str`): what was answered, without special tokens.
    """
    return bool(_MODULES[example.domain].check(example, answer))
