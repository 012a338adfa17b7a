"""A fake engine that drafts: its `/metrics` count what vLLM would have, with a draft of the test's choice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fake_engine import FakeEngine, completion, handler_of, listening

ROUND_SECONDS = 0.01
POSITION = 'accepted_tokens_per_pos_total{{engine="0",position="{}"}}'


@torch.no_grad()
def rounds(draft: Any, prompt: Sequence[int], told: Sequence[int], length: int, k: int) -> list[int]:
    """Return the accepted tokens of each round of an answer, as vLLM drafts. The first token comes with the prompt,
    and the last round drafts k tokens, too. `told` is the answer of `length` tokens and at least k more."""
    ids = torch.tensor([[*prompt, *told]])
    said = draft(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].argmax(-1).tolist()
    begins, found = 1, []
    while begins < length:
        accepted = 0
        while accepted < k and said[len(prompt) + begins + accepted - 1] == told[begins + accepted]:
            accepted += 1
        found.append(accepted)
        begins += accepted + 1
    return found


class CountingEngine(FakeEngine):
    """An engine that serves a model and drafts k tokens a round with another model, if it has one and is not idle."""

    def __init__(self, model: Any, draft: Any, k: int) -> None:
        super().__init__(model)
        self.k, self._bodies = k, dict[str, Any]()
        self.set(draft)

    def set(self, draft: Any) -> None:
        """Begin to draft with this, and to count from zero."""
        self.draft, self.is_idle = draft, False
        self.number = self.tokens = self.steps = 0
        names = ["drafts_total", "draft_tokens_total", *(POSITION.format(i) for i in range(self.k))]
        self.counts = dict.fromkeys(names, 0.0)

    def body(self, asked: Mapping[str, Any], more: int = 0) -> Any:
        """The body of a response with so many more tokens than were asked for."""
        asked = {**asked, "max_tokens": asked["max_tokens"] + more}
        key = json.dumps(asked)
        if key not in self._bodies:
            self._bodies[key] = completion(self.model, asked)
        return self._bodies[key]

    def count(self, asked: Mapping[str, Any]) -> None:
        """Count an answer."""
        length = len(self.body(asked)["choices"][0]["token_ids"])
        told = [*self.body(asked, self.k)["choices"][0]["token_ids"], *[0] * self.k]
        self.number, self.tokens = self.number + 1, self.tokens + length
        if self.draft is None or self.is_idle:
            return
        for accepted in rounds(self.draft, asked["prompt"], told, length, self.k):
            self.steps += 1
            self.counts["drafts_total"] += 1
            self.counts["draft_tokens_total"] += self.k
            for i in range(accepted):
                self.counts[POSITION.format(i)] += 1

    def metrics(self) -> str:
        """As Prometheus' text format has it."""
        drafting = [f"vllm:spec_decode_num_{name} {n}" for name, n in self.counts.items() if self.draft is not None]
        lines = [
            "# HELP vllm:generation_tokens_total Number of generation tokens processed.",
            f'vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {self.tokens}',
            f'vllm:inter_token_latency_seconds_count{{engine="0"}} {self.steps}',
            f'vllm:inter_token_latency_seconds_sum{{engine="0"}} {self.steps * ROUND_SECONDS}',
            'vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf"} 1.0',
        ]
        return "\n".join([*lines, *drafting, "process_open_fds 12.0", ""])


@contextmanager
def counting_engine(model: Any, draft: Any = None, k: int = 3) -> Iterator[CountingEngine]:
    """An engine that serves a model on a port of this machine, and drafts with another."""
    engine = CountingEngine(model, draft, k)
    plain: Any = handler_of(engine)

    class Handler(plain):  # type: ignore[misc]
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.give(engine.metrics().encode())
            else:
                self.give(json.dumps({"data": [{"id": "tiny", "object": "model"}]}).encode())

        def decide(self, body: dict[str, Any], is_busy: bool) -> None:
            given = engine.body(body)
            engine.count(body)
            self.give(json.dumps(given).encode())

    with listening(Handler) as engine.address:
        yield engine
