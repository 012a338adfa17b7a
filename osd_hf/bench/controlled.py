"""Drafts that are right with a given probability, and large shapes with random weights to time them on."""

from __future__ import annotations

import functools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from osd_hf.drafting.forward import DraftForward
from osd_hf.drafting.generator import LeanDrafting
from osd_hf.errors import ConfigError
from osd_hf.pair import first_line

__all__ = [
    "ControlledAcceptance",
    "LABEL",
    "SHAPES",
    "answer_greedily",
    "compare_outputs",
    "controlled_acceptance",
    "cores",
    "faster_threads",
    "feeds_through",
    "in_turns",
    "median_ratio",
    "random_pair",
]

Request = TypeVar("Request")
Answer = TypeVar("Answer")

# Two tokens this close may swap places in a forward over more tokens, in float32 too.
TIE = 1e-4


def answer_greedily(target: Any, prompt_ids: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
    """
    The target's own answer, and its wall time in seconds.

    Args:
        target (`PreTrainedModel`):
            Decoder-only.
        prompt_ids (`Sequence[int]`):
            Token ids.
        max_new_tokens (`int`):
            Bound of the answer.
    """
    input_ids = torch.tensor([list(prompt_ids)], device=target.device)
    started = time.perf_counter()
    output = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=max_new_tokens
    )
    answer = output[0, len(prompt_ids) :].tolist()  # waits for the device
    return answer, time.perf_counter() - started


def in_turns(ways: Sequence[Callable[[Request], Answer]], requests: Iterable[Request]) -> Iterator[tuple[Answer, ...]]:
    """
    Answer each request in each way, one right after the other; who begins rotates, so that a machine that slows down
    does so for all.

    Args:
        ways (`Sequence[Callable[[Request], Answer]]`):
            What answers a request.
        requests (`Iterable[Request]`):
            In order.

    Yields:
        `tuple[Answer, ...]`: of one request, in the order of the ways.
    """
    for number, request in enumerate(requests):
        answers: dict[int, Answer] = {}
        for turn in range(len(ways)):
            way = (number + turn) % len(ways)
            answers[way] = ways[way](request)
        yield tuple(answers[way] for way in range(len(ways)))


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def faster_threads(target: Any, prompt_ids: Sequence[int], threads: int | None) -> tuple[int, dict[str, float]]:
    """
    Threads of torch with which the target answers sooner, one or all cores, and the medians in seconds; `threads` and
    nothing where they are given.
    """
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


LABEL = "controlled acceptance, random weights: times mean something, text does not"

Feed = Callable[[torch.Tensor], torch.Tensor]


def _shape(hidden: int, layers: int, heads: int, intermediate: int, vocab: int = 32000) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
    }


SHAPES = {
    "7b": _shape(4096, 32, 32, 11008),
    "1.5b": _shape(1536, 28, 12, 8960),
    "160m": _shape(768, 12, 12, 3072),
    "0.15b": _shape(1024, 6, 16, 2816),
    "tiny-target": _shape(64, 2, 4, 128, vocab=512),
    "tiny-draft": _shape(32, 1, 2, 64, vocab=512),
}
POSITIONS = 4096

# Beyond any logit of random weights, and within float16.
SURE = 2.0**14


def random_pair(
    target_shape: str, draft_shape: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Any, Any]:
    """
    A Llama-shaped target and draft with random weights, whose answers only end at their bound.

    The target's next token is clear at each step: its head is its embedding, shifted by one token, and the embedding
    outweighs the layers. Otherwise the likeliest tokens of random weights would be so close that, in half precision,
    verifying several tokens at once would now and then pick others than the target alone, and acceptance would be
    out of control. The cost of a forward is that of its shape.

    Args:
        target_shape (`str`), draft_shape (`str`):
            Keys of `SHAPES`.
        device (`str`, *optional*, defaults to `"cpu"`), dtype (`torch.dtype`, *optional*, defaults to float32):
            Of both.
        seed (`int`, *optional*, defaults to 0):
            Of the weights.

    Raises:
        ConfigError: an unknown shape, vocabularies that differ, a device that is missing or too small.
    """
    for shape in (target_shape, draft_shape):
        if shape not in SHAPES:
            raise ConfigError(f"A shape must be one of {', '.join(SHAPES)}, got {shape!r}.")
    if SHAPES[target_shape]["vocab_size"] != SHAPES[draft_shape]["vocab_size"]:
        raise ConfigError(f"The shapes {target_shape} and {draft_shape} have different vocabularies.")
    try:
        with torch.device(device), torch.random.fork_rng():
            torch.manual_seed(seed)
            target, draft = (_random_model(SHAPES[shape], dtype) for shape in (target_shape, draft_shape))
            _make_choices_clear(target)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"The pair does not fit the device {device!r}: {first_line(error)}.") from error
    return target, draft


def _random_model(shape: Mapping[str, int], dtype: torch.dtype) -> Any:
    config = LlamaConfig(
        **shape, max_position_embeddings=POSITIONS, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


@torch.no_grad()
def _make_choices_clear(target: Any) -> None:
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    embedding.normal_(0, 100)
    head.copy_(embedding.roll(1, 0) * (target.config.initializer_range / 100))


class ControlledAcceptance:
    """
    Puts proposals in place of a draft's own: at each position the token that the target is known to emit there, with
    a given probability, or else another one. The draft runs its forwards all the same.

    Whether a position is proposed right is settled once, so that each system that drafts for a prompt has the same
    tokens accepted.

    Args:
        vocab_size (`int`):
            Of the target.
        seed (`int`, *optional*, defaults to 0):
            Of what is right.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self._random = random.Random(seed)
        self._proposals: dict[tuple[int, ...], list[int]] = {}

    def record(self, prompt_ids: Sequence[int], answer: Sequence[int], alpha: float) -> None:
        """
        Settle what is proposed after a prompt.

        Args:
            prompt_ids (`Sequence[int]`):
                Token ids.
            answer (`Sequence[int]`):
                The target's own.
            alpha (`float`):
                Probability that a proposal is right, from 0 to 1.

        Raises:
            ConfigError: `alpha` is outside its range; the prompt has its proposals already.
        """
        if not 0 <= alpha <= 1:
            raise ConfigError(f"A controlled acceptance must be between 0 and 1, got {alpha}.")
        if tuple(prompt_ids) in self._proposals:
            raise ConfigError("A prompt can be recorded once only, with one acceptance.")

        def proposal(token: int) -> int:
            if self._random.random() < alpha:
                return token
            return (token + 1 + self._random.randrange(self.vocab_size - 1)) % self.vocab_size

        self._proposals[tuple(prompt_ids)] = [*prompt_ids, *map(proposal, answer)]

    def steer_module(self, draft: Any) -> None:
        """From now on, proposals are put into the logits of each forward of this decoder-only model."""
        proposals: list[int] = []

        def steer(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            length = int(output.past_key_values.get_seq_length())
            if kwargs["input_ids"].shape[1] == length:
                proposals[:] = self._after(kwargs["input_ids"])
            _put(output.logits[:, -1], proposals, length)

        draft.register_forward_hook(steer, with_kwargs=True)

    def steer_lean(self, drafting: LeanDrafting) -> None:
        """From now on, proposals are put into the logits of each request's lean draft, compiled or not."""

        def steered(forward: DraftForward) -> Feed:
            feed = forward.feed
            proposals: list[int] = []

            def steer(ids: torch.Tensor) -> torch.Tensor:
                if forward.length == 0:
                    proposals[:] = self._after(ids)
                logits = feed(ids)
                _put(logits, proposals, forward.length)
                return logits

            return steer

        feeds_through(drafting, steered)

    def _after(self, ids: torch.Tensor) -> list[int]:
        context = tuple(ids[0].tolist())
        return next((p for prompt, p in self._proposals.items() if context[: len(prompt)] == prompt), [])


def _put(logits: torch.Tensor, proposals: list[int], length: int) -> None:
    if length < len(proposals):
        logits[0, proposals[length]] = SURE


def feeds_through(drafting: LeanDrafting, around: Callable[[DraftForward], Feed]) -> Callable[[], None]:
    """
    Exchange how the drafts of coming requests are fed.

    Args:
        drafting (`LeanDrafting`):
            Of an assistant.
        around (`Callable[[DraftForward], Callable[[torch.Tensor], torch.Tensor]]`):
            Gets each request's forward, and returns what is called in place of its `feed`.

    Returns:
        `Callable[[], None]`: undoes it.
    """
    make = drafting.generator

    def generator(*args: Any, **kwargs: Any) -> Any:
        made: Any = make(*args, **kwargs)
        if made is not None:
            made.forward.feed = around(made.forward)
        return made

    def undo() -> None:
        drafting.generator = make  # type: ignore[method-assign]

    drafting.generator = generator  # type: ignore[method-assign]
    return undo


def controlled_acceptance(
    target: Any, prompts: Mapping[float, Sequence[Sequence[int]]], max_new_tokens: int, seed: int = 0
) -> ControlledAcceptance:
    """
    Let the target answer, and settle what is proposed to it.

    Args:
        target (`PreTrainedModel`):
            Decoder-only.
        prompts (`Mapping[float, Sequence[Sequence[int]]]`):
            Acceptance -> token ids of the prompts that get it; all prompts differ.
        max_new_tokens (`int`):
            Bound of an answer.
        seed (`int`, *optional*, defaults to 0):
            Of what is right.

    Raises:
        ConfigError: an acceptance outside its range, a prompt that comes twice.
    """
    acceptance = ControlledAcceptance(int(target.config.get_text_config().vocab_size), seed)
    for alpha, group in prompts.items():
        for prompt in group:
            acceptance.record(prompt, answer_greedily(target, prompt, max_new_tokens)[0], alpha)
    return acceptance
