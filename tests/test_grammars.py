"""Structured generation with llguidance: refused as it is, exact and drafted for as a `ReplayedProcessor`."""

import json
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from osd_hf import OnlineAssistant, OnlineConfig, ReplayedProcessor
from osd_hf.bundled import load_bundled

llguidance = pytest.importorskip("llguidance")
hf, bits = pytest.importorskip("llguidance.hf"), pytest.importorskip("llguidance.torch")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_a_json_grammar_is_exact_and_drafted_for_where_it_opts_in() -> None:
    target, draft, tokenizer = load_bundled()
    known = hf.from_tokenizer(tokenizer, n_vocab=target.config.vocab_size)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))

    class Guided(LogitsProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.matcher = llguidance.LLMatcher(known, grammar)
            self.mask = bits.allocate_token_bitmask(1, known.vocab_size)
            self.has_begun = False

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self.has_begun:
                assert self.matcher.consume_token(int(input_ids[0, -1]))
            self.has_begun = True
            bits.fill_next_token_bitmask(self.matcher, self.mask)
            allowed = (self.mask[0, :, None] >> torch.arange(32)).reshape(-1)[: scores.shape[-1]] & 1
            return scores.masked_fill(allowed[None] == 0, -torch.inf)

    config = OnlineConfig(
        num_assistant_tokens=5, update_strategy="interval", update_interval=1, steps_per_update=1, gate=False
    )
    assistant = OnlineAssistant(target, draft, tokenizer, config)
    settings: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    replayed, answers = ReplayedProcessor(Guided), set[str]()
    for number in range(4):
        inputs = tokenizer(f"How many of the {number + 2} users ordered a book?", return_tensors="pt")
        alone = target.generate(**inputs, logits_processor=[Guided()], **settings)
        if number == 0:
            assert assistant.generate(**inputs, logits_processor=[Guided()], **settings).tolist() == alone.tolist()
            assert assistant.stats.drafted == 0
        ours = assistant.generate(**inputs, logits_processor=[replayed], **settings)
        assert ours.tolist() == alone.tolist()
        answers.add(tokenizer.decode(ours[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    assert any(set(json.loads(answer)) == {"name", "count", "tags"} for answer in answers if answer.endswith("}"))
    assert 0 < assistant.stats.alpha < 1
    assert assistant.version >= 3
