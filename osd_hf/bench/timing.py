"""Times that can be compared: requests answered in turns, medians of their ratios, threads, equal outputs."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from osd_hf.pair import eos_ids

Request = TypeVar("Request")
Answer = TypeVar("Answer")

# Two tokens this close may swap places in a forward over more tokens, in float32 too.
TIE = 1e-4


def answer_greedily(target: Any, prompt_ids: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
    """The own answer of a decoder-only target, of at most `max_new_tokens` tokens, and its wall time in seconds."""
    input_ids = torch.tensor([list(prompt_ids)], device=target.device)
    started = time.perf_counter()
    output = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=max_new_tokens
    )
    answer = output[0, len(prompt_ids) :].tolist()  # waits for the device
    return answer, time.perf_counter() - started


def in_turns(ways: Sequence[Callable[[Request], Answer]], requests: Iterable[Request]) -> Iterator[tuple[Answer, ...]]:
    """
    Answer each request in each way, one right after the other. The way that begins rotates: a machine that slows down
    does so for all.

    Yields:
        `tuple[Answer, ...]`: the answers to one request, in the order of the ways.
    """
    for number, request in enumerate(requests):
        order = [(number + turn) % len(ways) for turn in range(len(ways))]
        answers = {way: ways[way](request) for way in order}
        yield tuple(answers[way] for way in range(len(ways)))


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def faster_threads(target: Any, prompt_ids: Sequence[int], threads: int | None) -> tuple[int, dict[str, float]]:
    """The number of torch's threads, one or all cores, with which the target answers sooner, and the median times of
    both in seconds. Given `threads` are returned without a measurement."""
    choices = [1, cores()]
    if threads is not None or choices[1] == 1:
        return threads or 1, {}

    def answer(number: int, prompt_ids: Sequence[int]) -> float:
        torch.set_num_threads(number)
        return answer_greedily(target, prompt_ids, 24)[1]

    taken = list(in_turns([functools.partial(answer, number) for number in choices], [prompt_ids] * 5))
    # The first round warms up.
    medians = dict(zip(choices, map(statistics.median, zip(*taken[1:], strict=True)), strict=True))
    return min(choices, key=lambda n: medians[n]), {str(n): round(s, 4) for n, s in medians.items()}


@torch.no_grad()
def compare_outputs(target: Any, prompt_ids: Sequence[int], alone: list[int], assisted: list[int]) -> str:
    """
    `"identical"`, token by token; `"tied"`, where the answers part at two tokens that the target finds equally likely
    to rounding; `"differing"` otherwise.
    """
    if alone == assisted:
        return "identical"
    at = next((i for i, (a, b) in enumerate(zip(alone, assisted, strict=False)) if a != b), None)
    if at is None:
        return "differing"
    context = torch.tensor([[*prompt_ids, *alone[:at]]], device=target.device)
    top = target(context).logits[0, -1].float().topk(2)
    is_tie = float(top.values[0] - top.values[1]) < TIE
    return "tied" if is_tie and {alone[at], assisted[at]} == set(top.indices.tolist()) else "differing"


def median_ratio(ratios: Iterable[float]) -> dict[str, Any]:
    """`median`, and its 95% `interval` by a bootstrap over requests; ready for JSON."""
    values = np.array(list(ratios))
    draws = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(np.median(values[draws], axis=1), [0.025, 0.975])
    return {"median": float(np.median(values)), "interval": [float(low), float(high)]}


def pad_setting(model: Any) -> dict[str, int]:
    """The padding token as an argument of `generate`, where a model names none: otherwise transformers remarks at each
    request that it takes the end token."""
    ends = eos_ids(model.generation_config)
    return {"pad_token_id": ends[0]} if ends and model.generation_config.pad_token_id is None else {}
