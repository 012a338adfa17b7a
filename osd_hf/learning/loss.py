"""Compute the learning loss within a memory budget: divergence over chunks of positions, and shortened requests."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from osd_hf.draft_head import DEPTH_WEIGHT, TRAINED_DEPTHS, DraftHead
from osd_hf.learning.weights import hidden_matrices
from osd_hf.losses import outcome_logprobs
from osd_hf.models import config_value, output_head, unwrap, vocab_size_of
from osd_hf.replay import CHUNK_LOGITS, completion_states, draft_states
from osd_hf.trace import DraftRound, Trace
from osd_hf.utils.kernels import OneDnnLinear

MIN_SAMPLED_VOCABULARY = 1 << 14  # from this size on, the loss samples the tokens outside of the stored ones
NUM_SAMPLED_TOKENS = 2048
# Activations of one micro-batch, as estimated. Together with logits and gradients in flight they stay below 2 GiB.
ACTIVATION_BYTES = 3 << 29
# For each input and output of a weight matrix. Measured: 4.6 to 5 for Llama and Qwen3, 7 where the activation function
# consists of many operations.
BYTES_PER_FEATURE = 6
MIN_REQUEST_TOKENS = 32  # requests are not shortened below this length

TargetRows = Callable[[slice], tuple[Tensor | None, Tensor]]
"""Returns the token ids (`None` for whole rows) and the target's log-probs, tail last, at a slice of positions."""


# --- the loss -------------------------------------------------------------------------------------------------------


def divergence_sum(
    draft: PreTrainedModel,
    traces: Sequence[Trace],
    rows: TargetRows,
    divergence: Callable[[Tensor, Tensor], Tensor],
    where: Tensor | None = None,
    tail: SampledTail | None = None,
) -> Tensor:
    """Sum a divergence (a value of `osd_hf.losses.DIVERGENCES`) from the target's `rows` over the completion positions
    of a batch, in the order of the traces, in nats: a scalar in float32. With `where`, bool, `(positions,)`, only
    these positions count. With `tail`, tokens outside of the stored rows are sampled. The layers run over all of the
    batch. The output head runs over chunks of positions, and its logits are recomputed in the backward pass. Of a
    head, the tokens of a round are unrolled, and the divergences at later ones count less."""
    head, num_columns = output_head(draft), traces[0].vocab_size
    parts = draft_states(draft, traces, _depth(draft))
    weights = [DEPTH_WEIGHT**depth for depth in range(len(parts))]
    sums = []
    if tail is not None and any(len(trace) for trace in traces):
        head, rows, num_columns = tail.restrict(draft, rows, num_columns)
    for weight, (states, at) in zip(weights, parts, strict=True):
        if at is None:
            states = states if where is None else states[where.to(states.device)]
            part = rows
        else:
            places = at.to("cpu") if where is None else (where.cumsum(0) - 1)[at.to("cpu")]
            if where is not None:
                is_counted = where[at.to("cpu")]
                states, places = states[is_counted.to(states.device)], places[is_counted]
            part = functools.partial(_rows_at, rows, places)
        sums.append(weight * _chunked_sum(states, head, part, num_columns, divergence))
    return torch.stack(sums).sum() / sum(weights)


def _rows_at(rows: TargetRows, places: Tensor, where: slice) -> tuple[Tensor | None, Tensor]:
    return rows(places[where])  # type: ignore[arg-type]


def _chunked_sum(
    states: Tensor,
    head: Callable[[Tensor], Tensor],
    rows: TargetRows,
    num_columns: int,
    divergence: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Sum a divergence over positions, `(positions, hidden)`."""
    chunk_size = max(1, CHUNK_LOGITS // num_columns)

    def chunk_sum(chunk: Tensor, first: int) -> Tensor:
        top_ids, p = rows(slice(first, first + len(chunk)))
        q = outcome_logprobs(head(chunk), None if top_ids is None else top_ids.to(chunk.device))
        return divergence(p.to(q), q).sum()

    if len(states) <= chunk_size:
        return chunk_sum(states, 0)
    sums = [
        checkpoint(chunk_sum, states[first : first + chunk_size], first, use_reentrant=False)
        for first in range(0, len(states), chunk_size)
    ]
    return torch.stack(sums).sum()


@dataclass
class SampledTail:
    """Sample tokens, for each batch again, from those that no row of the batch stores. Each sampled token is weighted
    by the number of tokens that it represents, so that the tail's mass and its gradient are right on average while the
    head computes few columns."""

    size: int  # tokens to sample
    generator: torch.Generator  # on the CPU

    @classmethod
    def for_draft(cls, draft: PreTrainedModel, seed: int) -> Self | None:
        """Return a sampler for a large vocabulary; `None` if the vocabulary is small, or if the head is no plain
        linear layer, of which single rows could be taken."""
        head = unwrap(draft).get_output_embeddings()
        is_plain = type(head) in (torch.nn.Linear, OneDnnLinear) and len(head.weight) == vocab_size_of(unwrap(draft))
        if not is_plain or vocab_size_of(unwrap(draft)) < MIN_SAMPLED_VOCABULARY:
            return None
        return cls(NUM_SAMPLED_TOKENS, torch.Generator("cpu").manual_seed(seed))

    def restrict(
        self, draft: PreTrainedModel, rows: TargetRows, vocab_size: int
    ) -> tuple[Callable[[Tensor], Tensor], TargetRows, int]:
        """Return head, rows and number of columns for the stored and the sampled tokens of a batch. Whole rows are
        returned unchanged."""
        top_ids, p = rows(slice(None))
        if top_ids is None:
            return output_head(draft), rows, vocab_size
        stored, columns = torch.unique(top_ids, return_inverse=True)
        is_other = torch.ones(vocab_size, dtype=torch.bool, device="cpu")
        is_other[stored] = False
        others = is_other.nonzero()[:, 0]
        weight = len(others) / self.size
        if weight > 1:
            others = others[torch.randint(len(others), (self.size,), generator=self.generator, device="cpu")]
        ids = torch.cat([stored, others]).to(draft.device)
        shift = torch.zeros(len(ids), dtype=torch.float64, device=draft.device)
        shift[len(stored) :] = math.log(max(weight, 1.0))
        head = output_head(draft, ids)

        def restricted_head(states: Tensor) -> Tensor:
            logits = head(states)
            return logits + shift.to(logits)

        return restricted_head, lambda where: (columns[where], p[where]), len(ids)


@torch.no_grad()
def target_rows(target: PreTrainedModel, traces: Sequence[Trace]) -> TargetRows:
    """Return whole rows of the target on the traces' tokens. The head runs when a slice is read."""
    states, head = completion_states(target, traces), output_head(target)

    def rows(where: slice) -> tuple[None, Tensor]:
        with torch.no_grad():
            return None, outcome_logprobs(head(states[where]), None)

    return rows


def stored_rows(traces: Sequence[Trace], where: Tensor | None = None) -> TargetRows:
    """Return the rows stored in the traces, all of one width; at the positions `where`, by default all."""

    def stacked(arrays: Sequence[Any], dtype: Any) -> Tensor:
        rows = torch.from_numpy(np.concatenate(arrays).astype(dtype))
        return rows if where is None else rows[where]

    is_whole = traces[0].top_ids.shape[1] == 0
    top_ids = None if is_whole else stacked([t.top_ids for t in traces], np.int64)
    kept = stacked([t.kept_logprobs() for t in traces], np.float32)
    p = torch.cat([kept, stacked([t.tail_logprob for t in traces], np.float32)[:, None]], -1)
    return lambda where: (None if top_ids is None else top_ids[where], p[where])


# --- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationMemory:
    """Estimate the bytes that a backward pass needs of a draft's forward. The estimate is at most a third too low."""

    per_token: int  # bytes of all layers
    per_pair: int  # bytes for each pair of tokens of one row: masks, or attention rows
    per_input: int  # bytes of the inputs of all layers, per token
    layers: int  # that can be recomputed in the backward pass, or 1

    @classmethod
    def of(cls, draft: PreTrainedModel) -> Self:
        """Estimate from the weights and the configuration of a draft."""
        config = draft.config.get_text_config(decoder=True)
        adapters = set(getattr(draft, "peft_config", ()))  # one of them is active, and small compared to the base
        own = {name: p for name, p in draft.named_parameters() if adapters.isdisjoint(name.split("."))}
        features = sum(sum(matrix.shape) for matrix in hidden_matrices(draft, own))
        layers = max(len(_layers(draft)), 1)
        heads = config_value(config, "num_attention_heads") or 1
        is_eager = getattr(config, "_attn_implementation", None) == "eager"
        # A fused kernel keeps a float32 mask, which holds the position biases of some encoder-decoders.
        rows = 3 * heads if is_eager else heads if config.is_encoder_decoder else 1
        width = config_value(config, "hidden_size") or 0
        if isinstance(unwrap(draft), DraftHead):  # each token of a round is a forward, and none is recomputed
            depth = _depth(draft)
            return cls(depth * BYTES_PER_FEATURE * features, 4 * depth**2 * rows * layers, 0, 1)
        return cls(BYTES_PER_FEATURE * features, 4 * rows * layers, 4 * width * layers, layers)

    def fits(self, rows: int, tokens: int) -> bool:
        """Whether a batch of `rows` requests, padded to `tokens`, stays within the budget."""
        return rows * tokens * (self.per_token + tokens * self.per_pair) <= ACTIVATION_BYTES

    @property
    def max_tokens(self) -> int:
        """The longest request that stays within the budget when its layers are recomputed."""
        linear = self.per_token / self.layers + (0 if self.layers == 1 else self.per_input)
        square = self.per_pair / self.layers
        # The larger root of square * n^2 + linear * n = budget, in the form that loses no digits.
        root = 2 * ACTIVATION_BYTES / (linear + math.sqrt(linear**2 + 4 * square * ACTIVATION_BYTES))
        return max(int(root), MIN_REQUEST_TOKENS)


def _depth(draft: Any) -> int:
    return TRAINED_DEPTHS[draft.config.layout] if isinstance(unwrap(draft), DraftHead) else 1


def _layers(model: Any) -> list[Any]:
    if isinstance(unwrap(model), DraftHead):  # its cache would be filled twice
        return []
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def recomputed_layers(model: Any) -> Iterator[None]:
    """Keep only the inputs of the layers in forwards inside, and recompute the layers in the backward pass.

    Gradient checkpointing of transformers would need training mode, and its dropout.
    """
    with ExitStack() as stack:
        for layer in _layers(model):
            stack.callback(_restore_forward, layer, vars(layer).get("forward"))
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        yield


def _restore_forward(layer: Any, forward: Any) -> None:
    vars(layer).pop("forward", None)
    if forward is not None:
        layer.forward = forward


def num_tokens(trace: Trace) -> int:
    """Count the tokens of prompt and answer."""
    return len(trace.prompt_ids) + len(trace)


def shortened(trace: Trace, max_tokens: int) -> Trace:
    """Cut a request to a number of tokens of prompt and answer, at least 2. The answer and the end of the prompt are
    kept. An answer that alone is too long keeps its beginning, and the prompt a quarter of the tokens. The input of an
    encoder keeps its beginning, as tokenizers cut it."""
    prompt, answer = len(trace.prompt_ids), len(trace)
    if prompt + answer <= max_tokens:
        return trace
    kept = answer if answer < max_tokens else max_tokens - min(prompt, max(max_tokens // 4, 1))
    read = max_tokens - kept
    return replace(
        trace,
        prompt_ids=trace.prompt_ids[:read] if trace.is_encoder_decoder else trace.prompt_ids[prompt - read :],
        completion_ids=trace.completion_ids[:kept],
        rounds=_first_rounds(trace.rounds, kept),
        top_logits=trace.top_logits[:kept],
        top_ids=trace.top_ids[:kept],
        tail_logprob=trace.tail_logprob[:kept],
    )


def _first_rounds(rounds: tuple[DraftRound, ...], emitted: int) -> tuple[DraftRound, ...]:
    """Return the rounds of the first emitted tokens; the last round is cut."""
    found = []
    for r in rounds:
        if r.num_emitted >= emitted:
            found.append(replace(r, num_accepted=min(r.num_accepted, emitted), num_emitted=emitted))
            break
        found.append(r)
        emitted -= r.num_emitted
    return tuple(found)
