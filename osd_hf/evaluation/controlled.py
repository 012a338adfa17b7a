"""Drafts that are right with a given probability, and large shapes with random weights to time them on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from osd_hf.decoding.forward import DraftForward
from osd_hf.decoding.generator import LeanDrafting
from osd_hf.errors import ConfigError, first_line

LABEL = "controlled acceptance, random weights: times mean something, text does not"

Feed = Callable[..., torch.Tensor]


# Hidden size, layers, heads, intermediate size, vocabulary.
SHAPES = {
    "8b": (4096, 32, 32, 12288, 151_936),
    "0.6b": (1024, 28, 16, 3072, 151_936),
    "7b": (4096, 32, 32, 11008, 32000),
    "1.5b": (1536, 28, 12, 8960, 32000),
    "160m": (768, 12, 12, 3072, 32000),
    "0.15b": (1024, 6, 16, 2816, 32000),
    "tiny-target": (64, 2, 4, 128, 512),
    "tiny-draft": (32, 1, 2, 64, 512),
}
POSITIONS = 4096

# Beyond any logit of random weights, and within float16.
SURE = 2.0**14


def random_pair(
    target_shape: str, draft_shape: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Any, Any]:
    """
    A Llama-shaped target and draft of two of `SHAPES` with random weights, whose answers only end at their bound.

    The target's next token is clear at each step: its head is its embedding, shifted by one token, and the embedding
    outweighs the layers. Otherwise the likeliest tokens of random weights would be so close that, in half precision,
    verifying several tokens at once would now and then pick others than the target alone, and acceptance would be
    out of control. The cost of a forward is that of its shape.

    Raises:
        ConfigError: an unknown shape, vocabularies that differ, a device that is missing or too small.
    """
    for shape in (target_shape, draft_shape):
        if shape not in SHAPES:
            raise ConfigError(f"A shape must be one of {', '.join(SHAPES)}, got {shape!r}.")
    if SHAPES[target_shape][-1] != SHAPES[draft_shape][-1]:
        raise ConfigError(f"The shapes {target_shape} and {draft_shape} have different vocabularies.")
    try:
        with torch.device(device), torch.random.fork_rng():
            torch.manual_seed(seed)
            target, draft = (_random_model(SHAPES[shape], dtype) for shape in (target_shape, draft_shape))
            with torch.no_grad():
                embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
                embedding.normal_(0, 100)
                head.copy_(embedding.roll(1, 0) * (target.config.initializer_range / 100))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"The pair does not fit the device {device!r}: {first_line(error)}.") from error
    return target, draft


def _random_model(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    hidden, layers, heads, intermediate, vocab = shape
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        intermediate_size=intermediate, vocab_size=vocab, max_position_embeddings=POSITIONS,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


class ControlledAcceptance:
    """
    Puts proposals in place of a draft's own: at each position the token that the target is known to emit there, with
    a given probability, otherwise another one. The draft runs its forwards all the same. Whether a position is
    proposed right is settled once: all systems that draft for a prompt have the same tokens accepted.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self._random = random.Random(seed)
        self._proposals: dict[tuple[int, ...], list[int]] = {}

    def record(self, prompt_ids: Sequence[int], answer: Sequence[int], alpha: float) -> None:
        """Settle what is proposed after a prompt: the tokens of the target's own answer, each with the probability
        `alpha`, from 0 to 1. Raises ConfigError for another `alpha` and for a prompt that has proposals already."""
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

            def steer(ids: torch.Tensor, rows: int = 1) -> torch.Tensor:
                if forward.length == 0:
                    proposals[:] = self._after(ids)
                logits = feed(ids, rows)
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
    """Have the drafts of coming requests fed by what `around` returns for each request's forward, in place of its
    `feed`; the function that is returned undoes it."""
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
    Let a decoder-only target answer, and settle what is proposed to it.

    Args:
        prompts (`Mapping[float, Sequence[Sequence[int]]]`):
            Acceptance -> token ids of the prompts that get it; all prompts differ.

    Raises:
        ConfigError: an acceptance outside its range, a prompt that comes twice.
    """
    acceptance = ControlledAcceptance(int(target.config.get_text_config().vocab_size), seed)
    for alpha, group in prompts.items():
        for prompt in group:
            acceptance.record(prompt, answer_greedily(target, prompt, max_new_tokens)[0], alpha)
    return acceptance


def answer_greedily(target: Any, prompt_ids: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
    """The own answer of a decoder-only target, of at most `max_new_tokens` tokens, and its wall time in seconds."""
    input_ids = torch.tensor([list(prompt_ids)], device=target.device)
    started = time.perf_counter()
    output = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=max_new_tokens,
        stop_strings=None,
    )  # fmt: skip
    answer = output[0, len(prompt_ids) :].tolist()  # waits for the device
    return answer, time.perf_counter() - started
