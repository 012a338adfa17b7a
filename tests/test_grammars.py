"""Structured generation by the libraries that people use: refused as they are, exact where they opt in."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from osd_hf import OnlineAssistant, OnlineConfig, ReplayedProcessor
from osd_hf.bundled import load_bundled

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
ANSWERS = 4

Made = tuple[Callable[[], Any], Callable[[Any, int], object] | None]


@pytest.fixture(scope="module")
def trio() -> tuple[Any, Any, Any]:
    return load_bundled()


def by_xgrammar(target: Any, tokenizer: Any) -> Made:
    xgrammar = pytest.importorskip("xgrammar")
    hf = pytest.importorskip("xgrammar.contrib.hf")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return lambda: hf.LogitsProcessor(compiled), lambda processor, calls: processor.matchers[0].rollback(calls)


def by_llguidance(target: Any, tokenizer: Any) -> Made:
    llguidance = pytest.importorskip("llguidance")
    hf, bits = pytest.importorskip("llguidance.hf"), pytest.importorskip("llguidance.torch")
    known = hf.from_tokenizer(tokenizer, n_vocab=target.config.vocab_size)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
    )

    class Guided(LogitsProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.matcher = llguidance.LLMatcher(known, grammar)
            self.mask = bits.allocate_token_bitmask(1, known.vocab_size)
            self.begun = False

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self.begun:
                assert self.matcher.consume_token(int(input_ids[0, -1]))
            self.begun = True
            bits.fill_next_token_bitmask(self.matcher, self.mask)
            allowed = (self.mask[0, :, None] >> torch.arange(32)).reshape(-1)[: scores.shape[-1]] & 1
            return scores.masked_fill(allowed[None] == 0, -torch.inf)

    return Guided, None


@pytest.mark.parametrize("library", [by_xgrammar, by_llguidance])
def test_a_json_grammar_is_exact_and_drafted_for_where_it_opts_in(
    library: Callable[..., Made], trio: tuple[Any, Any, Any]
) -> None:
    target, draft, tokenizer = trio
    make, take_back = library(target, tokenizer)
    config = OnlineConfig(
        num_assistant_tokens=5, update_strategy="interval", update_interval=1, steps_per_update=1, gate=False
    )
    assistant = OnlineAssistant(target, draft, tokenizer, config)
    grammar = ReplayedProcessor(make, take_back)
    answers = set()
    for number in range(ANSWERS):
        inputs = tokenizer(f"How many of the {number + 2} users ordered a book?", return_tensors="pt")
        settings = {"max_new_tokens": 40, "do_sample": False}
        alone = target.generate(**inputs, logits_processor=[make()], **settings)
        if number == 0:
            assert assistant.generate(**inputs, logits_processor=[make()], **settings).tolist() == alone.tolist()
            assert assistant.stats.drafted == 0
        ours = assistant.generate(**inputs, logits_processor=[grammar], **settings)
        assert ours.tolist() == alone.tolist()
        answers.add(tokenizer.decode(ours[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    assert any(set(json.loads(answer)) == {"name", "count", "tags"} for answer in answers if answer.endswith("}"))
    assert 0 < assistant.stats.alpha < 1
    assert assistant.version >= 3
