"""Whose tokens offline distillation learns on: the target's, the draft's, or a mix of both."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor

from osd_hf.records import Trace, ids_dtype
from osd_hf.wrappers import unwrap

__all__ = ["SAMPLE_SOURCES", "Sampler", "unanswered"]

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
