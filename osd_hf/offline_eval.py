"""What a draft is judged by while it is distilled: acceptance on held-out requests."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from osd_hf.arguments import NO_WARPING
from osd_hf.hook import capture_traces
from osd_hf.metrics import AcceptanceStats
from osd_hf.recording import record_traces
from osd_hf.records import Trace
from osd_hf.replay import replay
from osd_hf.wrappers import unwrap

__all__ = ["HeldOut"]


@dataclass
class HeldOut:
    """
    Held-out requests. Recorded ones are replayed; of prompts the target's greedy answers are recorded once, when they
    are first asked for, and replayed from then on; sampled answers are made anew by assisted decoding each time.

    Args:
        requests (`Sequence[Trace]`):
            Recorded requests, or prompts: traces without a token.
        target (`PreTrainedModel`, *optional*):
            Needed for prompts.
        num_assistant_tokens (`int`):
            k, tokens drafted per round.
        temperature (`float`):
            Of answers to prompts; 0 is greedy.
        max_new_tokens (`int`):
            Bound of an answer to a prompt.
        seed (`int`):
            Of sampled answers, the same at each measurement.
    """

    requests: Sequence[Trace]
    target: Any
    num_assistant_tokens: int
    temperature: float
    max_new_tokens: int
    seed: int
    _recorded: list[Trace] = field(default_factory=list)

    def stats(self, draft: Any) -> AcceptanceStats:
        """The draft's acceptance; neither its mode nor the state of any generator is changed."""
        prompts = [t for t in self.requests if len(t) == 0]
        if prompts and self.temperature > 0:
            return self._sampled(draft, prompts)
        if prompts and not self._recorded:
            ids = [t.prompt_ids.tolist() for t in prompts]
            self._recorded = list(record_traces(self.target, ids, max_new_tokens=self.max_new_tokens, num_logprobs=1))
        return replay(draft, self._recorded if prompts else self.requests, self.num_assistant_tokens)

    def _sampled(self, draft: Any, prompts: Sequence[Trace]) -> AcceptanceStats:
        traces: list[Trace] = []
        was_training = draft.training
        devices = [self.target.device] if self.target.device.type == "cuda" else []
        draft.eval()
        try:
            with (
                torch.random.fork_rng(devices),
                _drafting(draft, self.num_assistant_tokens),
                capture_traces(self.target, traces.append, num_logprobs=1),
            ):
                torch.manual_seed(self.seed)
                for prompt in prompts:
                    ids = torch.from_numpy(prompt.prompt_ids)[None].long().to(self.target.device)
                    self.target.generate(
                        input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=draft,
                        max_new_tokens=self.max_new_tokens, do_sample=True, pad_token_id=0,
                        **{**NO_WARPING, "temperature": self.temperature},
                    )  # fmt: skip
        finally:
            draft.train(was_training)
        return sum(map(AcceptanceStats.from_trace, traces), AcceptanceStats())


@contextmanager
def _drafting(draft: Any, k: int) -> Iterator[None]:
    """k drafted tokens in every round; `generate` reads that from the draft's own configuration."""
    inner = unwrap(draft)
    before = inner.generation_config
    inner.generation_config = copy.deepcopy(before)
    inner.generation_config.update(
        num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    try:
        yield
    finally:
        inner.generation_config = before
