"""Sample a target's answers into a store. A stopped run continues where it stopped."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from osd_hf.decoding.record import NO_WARPING
from osd_hf.models import unwrap
from osd_hf.recording import record_traces
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace

logger = logging.getLogger(__name__)

MAX_ROUNDS_WITHOUT_NEWS = 3  # over all prompts; then every new answer is a duplicate
HELD_OUT_SHARE, MAX_HELD_OUT = 32, 32  # one of so many prompts, and the answers of each kind that are evaluated


def sampling_of(target: Any, **changes: float | None) -> dict[str, float]:
    """Return temperature, top-p, and top-k of the target's generation config, with changes that are not `None`."""
    own = unwrap(target).generation_config
    found = {name: getattr(own, name, None) for name in ("temperature", "top_p", "top_k")}
    found |= {name: value for name, value in changes.items() if value is not None}
    return {name: value for name, value in found.items() if value is not None and value != NO_WARPING[name]}


def is_held_out(prompt_ids: Any) -> bool:
    """Whether answers to a prompt are kept for evaluation: by its tokens, so that this never changes."""
    return zlib.crc32(np.asarray(prompt_ids, np.int32).tobytes()) % HELD_OUT_SHARE == 0


def sample_answers(
    target: Any,
    prompts: Sequence[Sequence[int]],
    store: CorrectionStore,
    *,
    num_tokens: int,
    max_new_tokens: int,
    sampling: Mapping[str, float],
    batch_size: int = 32,
    num_logprobs: int = 64,
    seed: int = 0,
    show_progress: bool = True,
) -> Counter[str]:
    """
    Sample answers to prompts (token ids), with settings of [`sampling_of`], until the store has enough tokens. Each
    prompt is answered once before any is answered twice. Answers that the store has already are left out. Prompts of
    [`is_held_out`] are answered once greedily and once by sampling. Returns counts: `tokens` and `answers` in the
    store, without held-out ones, and the `duplicates` of this run.
    """
    known, times, counts, others = set[bytes](), Counter[tuple[bytes, bool]](), Counter[str](), 0

    def add(trace: Trace) -> bool:
        """Count an answer; return whether it is new."""
        prompt = trace.prompt_ids.tobytes()
        times[prompt, trace.is_sampled] += 1
        answer = prompt + b"|" + trace.completion_ids.tobytes() + (b"s" if trace.is_sampled else b"g")
        if answer in known:
            return False
        known.add(answer)
        if not is_held_out(trace.prompt_ids):
            counts.update(tokens=len(trace), answers=1)
        return True

    for trace in store:
        add(trace)
        earlier = {name: trace.sampling.get(name, no) for name, no in NO_WARPING.items()}
        others += trace.is_sampled and earlier != {**NO_WARPING, **sampling}
    if others:
        logger.warning("%d answers in the store were sampled otherwise than by %s.", others, dict(sampling))
    asked = {np.asarray(ids, np.int32).tobytes(): list(ids) for ids in prompts}
    held = [prompt for prompt, ids in asked.items() if is_held_out(ids)][:MAX_HELD_OUT]
    training = [prompt for prompt, ids in asked.items() if not is_held_out(ids)]
    size, order = batch_size, np.random.default_rng((seed, len(known)))
    bar = tqdm(total=num_tokens, initial=counts["tokens"], unit="token", desc="answering",
               disable=not show_progress)  # fmt: skip

    def answer(batch: Sequence[bytes], how: Mapping[str, float] | None) -> int:
        """Answer a batch, and return how many answers are new."""
        before, news = counts["tokens"], 0
        given = [asked[prompt] for prompt in batch]
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": size, "num_logprobs": num_logprobs}
        number = sum(times.values())
        for trace in record_traces(target, given, sampling=how, seed=seed + number, **settings):
            if add(trace):
                store.append(trace)
                news += 1
            else:
                counts["duplicates"] += 1
        store.flush()
        bar.update(counts["tokens"] - before)
        return news

    with bar:
        for how, is_sampled in ((None, False), (sampling, True)):
            missing = [prompt for prompt in held if not times[prompt, is_sampled]]
            for first in range(0, len(missing), size):
                answer(missing[first : first + size], how)
        without_news = 0
        while training and counts["tokens"] < num_tokens and without_news < MAX_ROUNDS_WITHOUT_NEWS:
            fewest = min(times[prompt, True] for prompt in training)
            due = [prompt for prompt in training if times[prompt, True] == fewest]
            order.shuffle(due)
            news = 0
            for first in range(0, len(due), 8 * size):  # sorted in parts, so that little is padded
                part = sorted(due[first : first + 8 * size], key=len)
                for start in range(0, len(part), size):
                    if counts["tokens"] < num_tokens:
                        news += answer(part[start : start + size], sampling)
            without_news = 0 if news else without_news + 1
    if counts["tokens"] < num_tokens:
        logger.warning("The answers repeat themselves: the store has %d tokens. Give more prompts.", counts["tokens"])
    return counts


def split_answers(store: CorrectionStore) -> tuple[list[Trace], list[Trace]]:
    """Return the answers of a store to train on, and held-out ones: sampled and greedy."""
    training, held_out = list[Trace](), list[Trace]()
    for trace in store:
        (held_out if is_held_out(trace.prompt_ids) else training).append(trace)
    return training, held_out
