"""What learning from requests takes of memory: estimated from the draft, kept within a budget, by shorter requests."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from osd_hf.models import config_value
from osd_hf.trace import DraftRound, Trace
from osd_hf.utils.disk import in_child

__all__ = ["Activations", "computed_again", "layers_of", "num_tokens", "shortened"]

# Kept by the forward of one micro-batch, as estimated; with the logits of a chunk, gradients on their way, and what
# the estimate leaves out, within 2 GiB.
BUDGET_BYTES = 3 << 29
# For each input and output of a weight matrix: 4.6 to 5 of Llama and Qwen3 (float32, once for both, and norms), 7
# where the activation function is made of many operations.
BYTES_PER_FEATURE = 6
LEAST_TOKENS = 32  # a request is not cut below this for want of memory


@dataclass(frozen=True)
class Activations:
    """
    What a backward needs of the forward of a draft, in bytes: estimated, at most a third too low.

    Args:
        per_token (`int`): Of all layers.
        per_pair (`int`): For each pair of tokens of one row, of all layers: masks, or rows of attention.
        per_input (`int`): Of the inputs of all layers, a token.
        layers (`int`): That can be computed again in the backward; 1 where that is not known of the model.
    """

    per_token: int
    per_pair: int
    per_input: int
    layers: int

    @classmethod
    def of(cls, draft: Any) -> Self:
        """The estimate for this draft, from its weights and its configuration."""
        config = draft.config.get_text_config(decoder=True)
        head = draft.get_output_embeddings()
        apart = {id(m.weight) for m in draft.modules() if isinstance(m, torch.nn.Embedding)}
        apart |= set() if head is None else {id(head.weight)}
        adapters = set(getattr(draft, "peft_config", ()))  # of all domains: beside the base's, little is kept for one
        features = sum(
            sum(p.shape)
            for name, p in draft.named_parameters()
            if p.ndim == 2 and id(p) not in apart and adapters.isdisjoint(name.split("."))
        )
        layers = max(len(layers_of(draft)), 1)
        heads = config_value(config, "num_attention_heads") or 1
        is_eager = getattr(config, "_attn_implementation", None) == "eager"
        # A fused kernel keeps a mask in float32, which holds the positions' biases of some encoder-decoders.
        rows = 3 * heads if is_eager else heads if config.is_encoder_decoder else 1
        width = config_value(config, "hidden_size") or 0
        return cls(BYTES_PER_FEATURE * features, 4 * rows * layers, 4 * width * layers, layers)

    def fit(self, rows: int, tokens: int) -> bool:
        """Whether a batch of so many rows, each padded to so many tokens, keeps within the budget."""
        return rows * tokens * (self.per_token + tokens * self.per_pair) <= BUDGET_BYTES

    @property
    def most_tokens(self) -> int:
        """The longest request that keeps within the budget if its layers are computed again in the backward."""
        is_one = self.layers == 1
        linear = self.per_token / self.layers + (0 if is_one else self.per_input)
        square = self.per_pair / self.layers
        # The larger root of square * n^2 + linear * n = budget, in the form that loses no digits.
        root = 2 * BUDGET_BYTES / (linear + math.sqrt(linear**2 + 4 * square * BUDGET_BYTES))
        return max(int(root), LEAST_TOKENS)


def layers_of(model: Any) -> list[Any]:
    """The layers of a transformers model, each a module that it can compute again in a backward."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def computed_again(model: Any) -> Iterator[None]:
    """The layers of a forward inside keep their inputs alone, and are computed again in its backward: the same
    numbers, a third slower. Transformers' own way would need the training mode, and its dropout."""
    with ExitStack() as stack:
        in_child(stack, ExitStack.close)  # a forked child has no thread that would
        for layer in layers_of(model):
            stack.callback(_take_back, layer, vars(layer).get("forward"))
            layer.forward = functools.partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )  # fmt: skip
        yield


def _take_back(layer: Any, forward: Any) -> None:
    vars(layer).pop("forward", None)
    if forward is not None:
        layer.forward = forward


def num_tokens(trace: Trace) -> int:
    """Tokens of its prompt and its answer."""
    return len(trace.prompt_ids) + len(trace)


def shortened(trace: Trace, most: int) -> Trace:
    """
    A request cut to so many tokens of prompt and answer, at least 2; itself where it has no more.

    All positions of the answer stay, and the end of the prompt, which they depend on most. Of an answer that alone is
    too long, the beginning stays, after a quarter of the tokens for the prompt: a later part would stand without the
    prompt that it answers. Of the input of an encoder, the beginning stays, as tokenizers cut it: it says what to do.
    """
    prompt, answer = len(trace.prompt_ids), len(trace)
    if prompt + answer <= most:
        return trace
    kept = answer if answer < most else most - min(prompt, max(most // 4, 1))
    read = most - kept
    return replace(
        trace,
        prompt_ids=trace.prompt_ids[:read] if trace.is_encoder_decoder else trace.prompt_ids[prompt - read :],
        completion_ids=trace.completion_ids[:kept], rounds=_first(trace.rounds, kept),
        top_logits=trace.top_logits[:kept], top_ids=trace.top_ids[:kept], tail_logprob=trace.tail_logprob[:kept],
    )  # fmt: skip


def _first(rounds: tuple[DraftRound, ...], emitted: int) -> tuple[DraftRound, ...]:
    """The rounds of the first tokens, the last of them cut."""
    found = []
    for r in rounds:
        if r.num_emitted >= emitted:
            found.append(replace(r, num_accepted=min(r.num_accepted, emitted), num_emitted=emitted))
            break
        found.append(r)
        emitted -= r.num_emitted
    return tuple(found)
