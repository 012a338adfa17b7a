"""Targets and drafts with recurrent or convolutional layers: states are taken back exactly, in each row by itself."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import models
import pytest
import torch
from test_batches import divergences, padded
from test_lossless import NEW, PAIRS, SETTINGS, VOCAB, answer_distribution, fits
from test_models import LEARNING, PROMPT, family, greedy
from transformers import DynamicCache

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.decoding.checks import unsupported
from osd_hf.decoding.forward import TargetForward
from osd_hf.decoding.rows import BatchTargetForward
from osd_hf.decoding.sources import DraftForward
from osd_hf.distillation.make_draft import layer_drafts

RECURRENT = ("falcon_h1", "qwen3_next")  # layers of Mamba 2 beside attention, and a gated delta rule
CONVOLUTIONAL = "lfm2"
K = 3


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in double precision what the code of these models computes in single precision."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)


def double_family(name: str) -> Any:
    target = models.double(family(name))
    target.set_experts_implementation("eager")  # others compute in single precision
    target.generation_config.max_length = 200
    return target


def next_logits(target: Any, cache: DynamicCache, tokens: list[int]) -> torch.Tensor:
    """Read tokens one at a time; return the logits behind each, `(tokens, vocab)`."""
    rows = [target(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in tokens]
    return torch.stack(rows)


def states(cache: DynamicCache) -> list[torch.Tensor]:
    kinds = ("conv_states", "recurrent_states", "keys", "values")
    found = [getattr(layer, kind, None) for layer in cache.layers for kind in kinds]
    return [s for part in found if part is not None for s in (part.values() if isinstance(part, dict) else [part])]


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("accepts", ["all", "none", "some"])
def test_states_are_those_of_single_tokens(name: str, accepts: str, double: None) -> None:
    target, cache, alone, draw = double_family(name), DynamicCache(), DynamicCache(), random.Random(0)
    cache, alone = (DynamicCache(config=target.config) for _ in range(2))
    settings = {"generation_config": target.generation_config, "use_cache": True, "past_key_values": cache}
    forward, none = TargetForward(target, PROMPT, settings), PROMPT[:, :0]
    with torch.no_grad():
        newest = int(forward.verify(none, none > 0)[0, -1].argmax())
        forward.keep([[newest]])
        target(input_ids=PROMPT, past_key_values=alone)
        for _ in range(16):  # more than a forward may read again
            accepted = {"all": K, "none": 0, "some": draw.randint(0, K)}[accepts]
            right, logits = [], next_logits(target, alone, [newest])
            for _ in range(accepted):
                right.append(int(logits[-1].argmax()))
                logits = torch.cat([logits, next_logits(target, alone, right[-1:])])
            wrong = (int(logits[-1].argmax()) + 1) % models.VOCAB
            candidates = torch.tensor([[*right, *[wrong] * (K - accepted)]])
            found = forward.verify(candidates, candidates >= 0)[0, : accepted + 1]
            torch.testing.assert_close(found, logits, atol=1e-9, rtol=0)
            newest = int(logits[-1].argmax())
            forward.keep([[*right, newest]])
        forward.verify(none, none > 0)
        forward.keep([[0]])
        next_logits(target, alone, [newest])
    for ours, theirs in zip(states(cache), states(alone), strict=True):
        torch.testing.assert_close(ours, theirs[..., -ours.shape[-1] :], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", [*RECURRENT, CONVOLUTIONAL])
def test_rows_go_back_independently(name: str, double: None) -> None:
    target, draw, rows = double_family(name), random.Random(1), 4
    texts = [models.prompt(5, seed=row)[0].tolist() for row in range(rows)]
    kwargs = {"generation_config": target.generation_config, "past_key_values": DynamicCache(config=target.config)}
    forward, none = BatchTargetForward(target, torch.tensor(texts), kwargs, texts, 90), torch.zeros(rows, 0).long()
    live, alone = list(range(rows)), [DynamicCache(config=target.config) for _ in range(rows)]
    with torch.no_grad():
        found = forward.verify(none, none > 0)[:, -1].argmax(-1, keepdim=True).tolist()
        forward.keep(found)
        for row, tokens in enumerate(found):
            target(input_ids=torch.tensor(texts[row : row + 1]), past_key_values=alone[row])
            texts[row] += tokens
        for number in range(16):
            emitted, expected, candidates = [], [], []
            for row in live:
                tokens, logits = [texts[row][-1]], []
                for _ in range(draw.choice((0, 1, 1, 2, K)) + 1 if number % 7 else 1):
                    logits.append(next_logits(target, alone[row], tokens[-1:])[0])
                    tokens.append(int(logits[-1].argmax()))
                wrong = (tokens[-1] + 1) % models.VOCAB
                candidates.append([*tokens[1:-1], *[wrong] * (K + 2 - len(tokens))] if number % 7 else [])
                emitted.append(tokens[1:])
                expected.append(torch.stack(logits))
                texts[row] += tokens[1:]
            proposed = torch.tensor(candidates).long()
            for ours, theirs in zip(forward.verify(proposed, proposed >= 0), expected, strict=True):
                torch.testing.assert_close(ours[: len(theirs)], theirs, atol=1e-9, rtol=0)
            forward.keep(emitted)
            if number in (5, 11):  # the last row takes the place of one that ends
                forward.leave(live.index(live[0]))
                live[0] = live.pop()


@pytest.mark.parametrize("name", RECURRENT)
def test_a_draft_reads_accepted_tokens_again(name: str, double: None) -> None:
    draft, draw, text = double_family(name), random.Random(2), PROMPT[0].tolist()
    forward = DraftForward(draft)
    with torch.no_grad():
        for _ in range(8):
            logits = forward.read([text])
            torch.testing.assert_close(logits, draft(input_ids=torch.tensor([text])).logits[:, -1], atol=1e-9, rtol=0)
            drafted = [draw.randrange(3, models.VOCAB) for _ in range(K)]
            for token in drafted[:-1]:
                forward.feed(torch.tensor([[token]]))
            accepted = draw.randint(0, K)
            text += [*drafted[:accepted], 5]
            forward.keep(0, len(text) - 1)


@pytest.mark.parametrize("name", [*RECURRENT, CONVOLUTIONAL])
@pytest.mark.parametrize("settings", [{"num_assistant_tokens": K}, {"candidates": "text", "text_scope": "owner"}])
def test_batches_are_answered_as_by_the_target(name: str, settings: dict[str, Any]) -> None:
    target, batch = family(name), padded((9, 5, 7, 3))
    how = {"do_sample": False, "max_new_tokens": 24}
    assistant = OnlineAssistant(target, models.draft_of(target, 0.2), config=OnlineConfig(**settings))
    for answer in target.generate(**batch, **how).tolist() if "candidates" in settings else ():
        assistant.remember([token if i % 7 else 5 for i, token in enumerate(answer)])
    assert divergences(target, assistant.generate(**batch, **how), batch, how) == []
    assert assistant.stats.accepted + assistant.stats.text_accepted > 0
    tokenizer = models.tokenizer()
    answer = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **how)[0].tolist()
    stop = {"stop_strings": tokenizer.convert_ids_to_tokens(answer[-7:-5]), "tokenizer": tokenizer}
    streamer = models.Streamer()
    assert greedy(assistant.generate, max_new_tokens=24, streamer=streamer, **stop) == streamer.tokens
    assert streamer.tokens == greedy(target.generate, max_new_tokens=24, **stop)


@pytest.mark.parametrize("name", [*RECURRENT, CONVOLUTIONAL])
def test_sampled_answers_have_the_targets_distribution(name: str) -> None:
    target = family(name, vocab_size=VOCAB)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.5)
    config = OnlineConfig(num_assistant_tokens=2, update_strategy="manual")
    assistant = OnlineAssistant(target, models.draft_of(target, noise=1.0), config=config)
    ids, counts = models.prompt(3, vocab_size=VOCAB), Counter[tuple[int, ...]]()
    for _ in range(8):
        many = ids.expand(48, -1)
        how = {"attention_mask": torch.ones_like(many), "max_new_tokens": NEW, **SETTINGS}
        counts.update(tuple(row[-NEW:]) for row in assistant.generate(many, **how).tolist())
    assert 0.1 < assistant.stats.alpha < 0.95
    assert fits(counts, answer_distribution(target, ids), PAIRS) > 1e-3


def test_rows_of_layers_with_states_and_windows_do_not_go_on_independently() -> None:
    target = family("qwen3_next")
    assert unsupported(target, allows_states=True) is None
    target.config.sliding_window = 8
    target.config.layer_types = ["hybrid_sliding" for _ in target.config.layer_types]
    assert unsupported(target, allows_states=True) == "it has layers other than full attention and sliding windows"


def test_plain_rounds_that_read_tokens_again_are_a_cost_of_speculation() -> None:
    target, tokens = family("qwen3_next"), [0]
    config = OnlineConfig(candidates="draft", update_strategy="manual")
    assistant = OnlineAssistant(target, models.draft_of(target, 0.4), config=config)
    assert assistant.drafting is not None

    def count(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tokens[0] += kwargs["input_ids"].shape[1]

    target.register_forward_pre_hook(count, with_kwargs=True)
    assistant.drafting.clock = lambda: float(tokens[0])  # reading a token takes a second
    alone = list[float]()  # seconds of all requests by the target alone, as estimated
    for _ in range(4):
        greedy(assistant.generate, max_new_tokens=40)
        alone.append((assistant.stats.speedup or 1.0) * tokens[0])
    plan = assistant.drafting_plan()
    assert plan is not None
    assert plan.plain_seconds == pytest.approx(1.0, rel=0.01)
    took = 3 * (PROMPT.shape[1] + 39)  # the target alone; reading again is a cost of speculation
    assert 0.94 * took < alone[-1] - alone[0] <= took


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("clamped", "limit time steps only in forwards over several tokens"),
        ("states", "states of tokens that are read again would be returned"),
    ],
)
def test_unsafe_requests_are_answered_without_speculation(
    how: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = family("falcon_h1", **({"time_step_limit": (0.01, 10.0)} if how == "clamped" else {}))
    draft = models.draft_of(target, 0.2)
    assistant = OnlineAssistant(target, draft, config=LEARNING)
    asked = {"output_hidden_states": True, "return_dict_in_generate": True} if how == "states" else {}
    asked |= {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT), "do_sample": False, "max_new_tokens": 12}
    ours, theirs = (answer if not asked.get("return_dict_in_generate") else answer.sequences
                    for answer in (assistant.generate(**asked), target.generate(**asked)))  # fmt: skip
    assert ours.tolist() == theirs.tolist()
    assert assistant.stats.drafted == 0
    assert caplog.text.count(why) == 1


def test_turns_continue_with_a_returned_cache() -> None:
    target = family("qwen3_next")
    assistant = OnlineAssistant(target, models.draft_of(target, 0.2), config=OnlineConfig(num_assistant_tokens=K))
    alone: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    ids = {"ours": PROMPT, "alone": PROMPT}
    for _ in range(3):
        for name, generate, kept in (("ours", assistant.generate, ours), ("alone", target.generate, alone)):
            mask = torch.ones_like(ids[name])
            how = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 9, "return_dict_in_generate": True}
            output = generate(ids[name], **how, **kept)
            kept["past_key_values"] = output.past_key_values
            ids[name] = torch.cat([output.sequences, models.prompt(3, seed=1)], 1)
        assert ids["ours"].tolist() == ids["alone"].tolist()
        lengths = [kept["past_key_values"].get_seq_length() for kept in (ours, alone)]
        assert lengths[0] == lengths[1]
    assert assistant.stats.accepted > 0


def test_a_draft_is_made_from_layers_with_attention() -> None:
    target = family("qwen3_next", num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
    made = layer_drafts(target)
    assert [draft.layers for draft in made] == [(1,), (1, 3)]
    for one in made:
        assert set(one.draft.config.layer_types) == {"full_attention"}
        assert OnlineAssistant(target, models.fixed_k(one.draft)).generate(PROMPT, max_new_tokens=9).shape[1] == 14
