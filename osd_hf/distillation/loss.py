"""The loss of offline distillation: output heads and divergence over some positions at a time, never over a batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import LogitsProcessor

from osd_hf.errors import UnsupportedModelError
from osd_hf.losses import outcome_logprobs
from osd_hf.pair import unwrap
from osd_hf.replay import completion_logits, completion_mask
from osd_hf.trace import Trace, ids_dtype

__all__ = [
    "Rows",
    "SAMPLE_SOURCES",
    "Sampler",
    "check_head",
    "divergence_sum",
    "stored_rows",
    "target_rows",
    "unanswered",
]

SAMPLE_SOURCES = ("teacher", "student", "mix_request", "mix_token")


def unanswered(trace: Trace, completion_ids: Any = ()) -> Trace:
    """The trace's prompt with another completion, or none, and no rows."""
    ids = np.asarray(completion_ids, dtype=np.int32)
    return replace(
        trace, completion_ids=ids, rounds=(), top_logits=np.zeros((len(ids), 0), np.float16),
        top_ids=np.zeros((len(ids), 0), ids_dtype(trace.vocab_size)), tail_logprob=np.zeros(len(ids), np.float32),
    )  # fmt: skip


@dataclass(frozen=True)
class Sampler:
    """
    Completes requests. What a request draws hangs on the seed, the step and its row of the data set alone, so that
    it does not matter how a batch is cut into micro-batches or over processes, or when a run was resumed.

    Args:
        source (`str`):
            One of `SAMPLE_SOURCES`.
        student_share (`float`):
            Of the mixes: probability that a request, or a token, is the draft's.
        temperature (`float`):
            Of the samples; 0 takes the likeliest token.
        max_new_tokens (`int`):
            Bound of a completion.
        seed (`int`):
            Of the draws.
    """

    source: str
    student_share: float
    temperature: float
    max_new_tokens: int
    seed: int

    @torch.no_grad()
    def complete(
        self, requests: Sequence[Trace], rows: Sequence[int], step: int, *, target: Any, draft: Any
    ) -> list[Trace]:
        """
        The requests with completions to learn on. A completion that a request has stands for the target's.

        Args:
            requests (`Sequence[Trace]`):
                Of one micro-batch.
            rows (`Sequence[int]`):
                Their rows in the data set.
            step (`int`):
                Optimizer steps so far.
            target (`PreTrainedModel`, *optional*):
                Not needed where all requests have completions and the source is `"teacher"`.
            draft (`PreTrainedModel`):
                The one that learns, in evaluation mode.
        """
        draws = [np.random.default_rng((self.seed, step, row)) for row in rows]
        students = {"teacher": 0.0, "student": 1.0, "mix_request": self.student_share}.get(self.source)
        picks = np.stack([rng.random(self.max_new_tokens, dtype=np.float32) for rng in draws])
        coins = np.stack([rng.random(self.max_new_tokens) < self.student_share for rng in draws])
        if students is None:
            return self._answered(target, requests, picks, target=target, mixed=(draft, coins))
        is_student = np.array([rng.random() < students for rng in draws])
        completed = list(requests)
        missing = np.array([len(r) == 0 for r in requests])
        for model, chosen in ((draft, is_student), (target, ~is_student & missing)):
            indices = np.flatnonzero(chosen).tolist()
            if indices:
                part = self._answered(model, [requests[i] for i in indices], picks[indices], target=target)
                for i, answered in zip(indices, part, strict=True):
                    completed[i] = answered
        return completed

    def _answered(
        self,
        model: Any,
        requests: Sequence[Trace],
        picks: NDArray[np.float32],
        *,
        target: Any,
        mixed: tuple[Any, NDArray[np.bool_]] | None = None,
    ) -> list[Trace]:
        is_encoder_decoder = requests[0].is_encoder_decoder
        width = max(len(r.prompt_ids) for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            length = len(request.prompt_ids)
            where = slice(0, length) if is_encoder_decoder else slice(width - length, width)
            ids[row, where] = torch.from_numpy(request.prompt_ids.astype(np.int64))
            mask[row, where] = 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        start = 1 if is_encoder_decoder else width
        processors: list[Any] = []
        if mixed is not None:
            draft, coins = mixed
            processors.append(_DraftsTurn(draft, ids, mask, torch.from_numpy(coins).to(model.device), start))
        if self.temperature > 0:
            processors.append(_Draw(torch.from_numpy(picks).to(model.device), self.temperature, start))
        eos = target.generation_config.eos_token_id
        sequences = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, num_beams=1, use_cache=True, eos_token_id=eos,
            pad_token_id=0, max_new_tokens=self.max_new_tokens, logits_processor=processors,
        )  # fmt: skip
        answers = sequences[:, start:].cpu().numpy()
        ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        return [unanswered(r, _until(answer, ends)) for r, answer in zip(requests, answers, strict=True)]


def _until(answer: NDArray[Any], ends: Sequence[int]) -> NDArray[Any]:
    found = np.flatnonzero(np.isin(answer, ends))
    return answer[: found[0] + 1] if len(found) else answer


class _Draw(LogitsProcessor):
    """Draws each row's token by its own number from (0, 1), and leaves only that one: `generate` draws for a whole
    batch, so that a request would hang on its neighbors."""

    def __init__(self, picks: Tensor, temperature: float, start: int) -> None:
        self.picks, self.temperature, self.start = picks, temperature, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        reached = (scores.float() / self.temperature).softmax(-1).cumsum(-1)
        pick = self.picks[:, input_ids.shape[1] - self.start, None] * reached[:, -1:] * (1 - 1e-6)
        chosen = torch.searchsorted(reached, pick, right=True).clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen, 0.0)


class _DraftsTurn(LogitsProcessor):
    """Puts the draft's logits in the place of the target's where the coin of a token says so."""

    def __init__(self, draft: Any, ids: Tensor, mask: Tensor, coins: Tensor, start: int) -> None:
        self.draft, self.mask, self.coins, self.start = draft, mask, coins, start
        self.seen, self.cache = 0, None
        self.accepted = inspect.signature(unwrap(draft).forward).parameters
        self.source: dict[str, Any] = {}
        if draft.config.is_encoder_decoder:
            encoded = unwrap(draft).get_encoder()(input_ids=ids, attention_mask=mask)
            self.source = {"encoder_outputs": encoded, "attention_mask": mask}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[:, self.seen :]
        inputs: dict[str, Any] = {**self.source, "past_key_values": self.cache, "use_cache": True}
        if self.source:
            inputs["decoder_input_ids"] = new
        else:
            emitted = self.mask.new_ones(len(new), input_ids.shape[1] - self.start)
            mask = torch.cat([self.mask, emitted], 1)
            inputs |= {"input_ids": new, "attention_mask": mask}
            if "position_ids" in self.accepted:
                inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, self.seen :]
        if "logits_to_keep" in self.accepted:
            inputs["logits_to_keep"] = 1
        output = self.draft(**inputs)
        self.seen, self.cache = input_ids.shape[1], output.past_key_values
        drafts = self.coins[:, input_ids.shape[1] - self.start, None]
        return torch.where(drafts, output.logits[:, -1].to(scores), scores)


# Elements of the logits that exist at once: 40 MiB in float32. Blocks of up to 32 MiB, glibc keeps in a heap, which
# they scatter: a step that holds 0.4 GB then took 8.5 GB of resident memory.
CHUNK_LOGITS = 10 << 20

Rows = Callable[[slice], tuple[Tensor | None, Tensor]]
"""Of the positions in a slice, the ids of the kept tokens (`None` for whole rows) and the target's log-probs, tail
last: what `outcome_logprobs` takes and gives."""


def divergence_sum(
    draft: Any, traces: Sequence[Trace], rows: Rows, divergence: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """
    Sum of a divergence over all completion positions of a batch.

    The bodies run over the whole batch, the heads over chunks of positions, whose logits are computed again in the
    backward instead of being kept.

    Args:
        draft (`PreTrainedModel` or `PeftModel`):
            Whose parameters get gradients.
        traces (`Sequence[Trace]`):
            The batch.
        rows (`Rows`):
            The target's rows at the positions, in the order of the traces.
        divergence (`Callable`):
            A value of `osd_hf.losses.DIVERGENCES`.

    Returns:
        Scalar `torch.Tensor`, float32, in nats.
    """
    states, head = _completion_states(draft, traces), _head(draft)
    size = max(1, CHUNK_LOGITS // traces[0].vocab_size)

    def part(chunk: Tensor, first: int) -> Tensor:
        top_ids, p = rows(slice(first, first + len(chunk)))
        q = outcome_logprobs(head(chunk), None if top_ids is None else top_ids.to(chunk.device))
        return divergence(p.to(q), q).sum()

    if len(states) <= size:
        return part(states, 0)
    parts = [
        checkpoint(part, states[first : first + size], first, use_reentrant=False)
        for first in range(0, len(states), size)
    ]
    return torch.stack(parts).sum()


@torch.no_grad()
def target_rows(target: Any, traces: Sequence[Trace]) -> Rows:
    """The target's rows on the traces' tokens, its head computed when a chunk is asked for."""
    states, head = _completion_states(target, traces), _head(target)

    def rows(where: slice) -> tuple[None, Tensor]:
        with torch.no_grad():
            return None, outcome_logprobs(head(states[where]), None)

    return rows


def stored_rows(traces: Sequence[Trace]) -> Rows:
    """The rows that the traces have kept, all of one width."""

    def stacked(arrays: Sequence[Any], dtype: Any) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(dtype))

    is_whole = traces[0].top_ids.shape[1] == 0
    top_ids = None if is_whole else stacked([t.top_ids for t in traces], np.int64)
    kept = stacked([t.kept_logprobs() for t in traces], np.float32)
    p = torch.cat([kept, stacked([t.tail_logprob for t in traces], np.float32)[:, None]], -1)
    return lambda where: (None if top_ids is None else top_ids[where], p[where])


def check_head(model: Any) -> None:
    """
    Refuse a model whose logits are not what its head makes of the states that it is given; raises
    UnsupportedModelError.
    """
    size = int(model.config.get_text_config().vocab_size)
    nothing = np.zeros((3, 0), np.float16)
    start = np.zeros(1, np.int32) if model.config.is_encoder_decoder else None
    probe = Trace(
        prompt_ids=np.zeros(2, np.int32), completion_ids=np.zeros(3, np.int32), rounds=(), top_logits=nothing,
        top_ids=nothing, tail_logprob=np.zeros(3, np.float32), vocab_size=size, decoder_prompt_ids=start,
    )  # fmt: skip
    with torch.no_grad():
        logits = completion_logits(model, [probe])[0].float()
        ours = _head(model)(_completion_states(model, [probe])).float()
    if not (logits - ours).abs().max() <= 0.02 * logits.abs().max():
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} changes its logits behind its output head in a way that is not known "
            "here, so that they cannot be computed in parts."
        )


def _completion_states(model: Any, traces: Sequence[Trace]) -> Tensor:
    """What the output head is given at each completion position, of shape `(positions, hidden)`."""
    head = unwrap(model).get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} has no output embeddings; distillation needs a language modeling head."
        )
    size = traces[0].vocab_size
    seen: list[Tensor] = []

    def stand_aside(states: Tensor) -> Tensor:
        seen.append(states)
        # Of no position but of full width, so that whatever the model does to logits costs nothing.
        return states.new_empty((*states.shape[:-2], 0, size))

    before = vars(head).get("forward")
    head.forward = stand_aside
    try:
        completion_logits(model, traces)
    finally:
        del head.forward
        if before is not None:
            head.forward = before
    if len(seen) > 1:  # decoder prompts of several lengths are run one by one
        return torch.cat([states[0, -len(t) :] for states, t in zip(seen, traces, strict=True)])
    mask = completion_mask(traces, seen[0].device)
    return seen[0][:, -mask.shape[1] :][mask]


def _head(model: Any) -> Callable[[Tensor], Tensor]:
    """Logits of states, with what some families do to them afterwards."""
    inner = unwrap(model)
    config = inner.config.get_text_config(decoder=True)
    head, cap = inner.get_output_embeddings(), getattr(config, "final_logit_softcapping", None)
    scale = _scale(config)
    bias = getattr(inner, "final_logits_bias", None)
    steps: list[Callable[[Tensor], Tensor]] = [head]
    if scale != 1:
        steps.append(lambda logits: logits * scale)
    if cap is not None:
        steps.append(lambda logits: torch.tanh(logits / cap) * cap)
    if bias is not None:
        steps.append(lambda logits: logits + bias.to(logits.device))
    return lambda states: functools.reduce(lambda value, step: step(value), steps, states)


def _scale(config: Any) -> float:
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return cast(float, getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    return 1.0 if scaling is None else 1 / scaling
