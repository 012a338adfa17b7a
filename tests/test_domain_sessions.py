import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from osd_hf import OnlineAssistant, OnlineConfig, Router
from osd_hf.errors import LearnerError, StateError

CONFIG = OnlineConfig(
    num_assistant_tokens=5, update_strategy="interval", update_interval=3, steps_per_update=2, batch_size=8,
    num_logprobs=8, optimizer="adamw", learning_rate=3e-3,
)  # fmt: skip
NOISE = 0.2  # of the draft: there is something to learn
DIFFERENT = 9  # prompts, of which each comes again and again


class Parity(Router):
    """By the sum of the ids; and it counts, to have something to remember."""

    def __init__(self) -> None:
        self.seen = 0

    def route(self, prompt: Any) -> str | None:
        self.seen += 1
        return ("even", "odd")[int(prompt.ids.sum()) % 2]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "seen" not in state:
            raise StateError("of another router")
        self.seen = state["seen"]


@contextlib.contextmanager
def routed(router: Any = None, **changes: Any) -> Iterator[OnlineAssistant]:
    target, draft = models.pair(noise=NOISE, num_hidden_layers=1)
    config = replace(CONFIG, **changes)
    with OnlineAssistant(target, draft, models.tokenizer(), config, router=router or Parity()) as assistant:
        yield assistant


def serve(assistant: OnlineAssistant, first: int, last: int) -> None:
    prompts = models.prompts(DIFFERENT)
    for i in range(first, last):
        ids = prompts[i % DIFFERENT]
        assistant.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)


def everything(assistant: OnlineAssistant) -> dict[str, Any]:
    """What a session is, in plain values."""
    drafts = assistant.drafts

    def told(traces: Any) -> list[Any]:
        return [(t.prompt_ids.tolist(), t.completion_ids.tolist(), t.domain, t.draft_version) for t in traces]

    lessons = [
        (s["domain"], s["requests_waiting"], s["observed"], {k: told(v) for k, v in s["traces"].items()})
        for s in (lesson.state_dict() for lesson in drafts.requests.values())
    ]
    tensors = {(d, name): p for d in (None, *drafts.domains) for name, p in drafts.model(d).named_parameters()}
    for domain in drafts.learning:
        tensors |= {(domain, "learned", name): p for name, p in drafts.updater(domain).parameters.items()}
    return {
        "requests": lessons,
        "decisions": [d.to_dict() for d in assistant.decisions],
        "versions": {d: drafts.serving_version(d) for d in drafts.domains},
        "router": assistant.router.state_dict() if assistant.router is not None else None,
        "stats": {d: s.to_dict() for d, s in assistant.stats_by_domain.items()},
        "weights": {str(key): p.detach().numpy().tobytes() for key, p in tensors.items()},
    }


def test_a_session_with_domains_goes_on_as_if_it_had_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("osd_hf.learning.requests.HOLD_BACK_EVERY", 2)  # enough to judge by, sooner
    saved = {}
    with routed() as straight:
        for split in (4, 12, 20):
            serve(straight, straight.stats.num_requests, split)
            straight.save_state(tmp_path / str(split))
            saved[split] = everything(straight)
    expected = saved.pop(20)
    for split in saved:
        with routed() as after:
            serve(after, 1, 7)  # of an earlier life, that is forgotten
            after.load_state(tmp_path / str(split))
            assert everything(after) == saved[split], split
            serve(after, split, 20)
            assert everything(after) == expected, split
    assert set(expected["versions"]) == {"even", "odd"}
    assert "promoted" in {d["outcome"] for d in expected["decisions"]}
    assert any(groups["held_back"] for *_, groups in expected["requests"])
    json.dumps(expected["decisions"])


def test_a_session_of_another_kind_changes_nothing(tmp_path: Path) -> None:
    class Forgetful(Parity):
        def state_dict(self) -> dict[str, Any]:
            return {"something": "else"}

    with routed(Forgetful(), optimizer="muon") as other:
        serve(other, 0, 8)
        other.save_state(tmp_path / "router")
    with routed(num_logprobs=16) as other:
        serve(other, 0, 8)
        other.save_state(tmp_path / "optimizer")
    target, draft = models.pair(noise=NOISE, num_hidden_layers=1)
    with OnlineAssistant(target, draft, config=CONFIG) as shared:
        shared.save_state(tmp_path / "shared")
    with routed(optimizer="muon") as assistant:
        serve(assistant, 0, 2)  # nothing has begun to learn
        before = everything(assistant)
        for name in ("optimizer", "router", "shared"):
            with pytest.raises(StateError):
                assistant.load_state(tmp_path / name)
            assert everything(assistant) == before, name


def test_a_router_that_fails_costs_no_answer() -> None:
    class Broken(Router):
        def route(self, prompt: Any) -> str | None:
            raise ValueError("cannot read this")

    target, _ = models.pair(noise=NOISE, num_hidden_layers=1)
    with pytest.raises(LearnerError, match="cannot read this"), routed(Broken()) as assistant:
        for _ in range(2):
            ids = models.prompt()
            kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
            assert torch.equal(assistant.generate(ids, **kwargs), target.generate(ids, **kwargs))
            assert isinstance(assistant.learning_error, ValueError)
            # A label needs no router.
            assert torch.equal(assistant.generate(ids, domain="a", **kwargs), target.generate(ids, **kwargs))
        assert set(assistant.stats_by_domain) == {None, "a"}
