"""Processors over many positions of recorded requests and batches, against transformers' own one by one."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from osd_hf import Trace, logits_processors
from osd_hf.decoding.record import compress_rows
from osd_hf.logits_processors import IMPARTIAL, Processors, RowProcessors, is_capturable, sample
from osd_hf.losses import overlap
from osd_hf.trace import bare_trace

VOCAB = 40
SHARES = st.floats(0.05, 0.95)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([0.7, 1.1, 1.8]),
    "no_repeat_ngram_size": st.integers(1, 4),
    "bad_words_ids": st.just([[3], [4, 5], [5, 4, 3]]),
    "sequence_bias": st.just([[[6], 1.5], [[3, 4], -2.0], [[3, 4, 5], 3.0]]),
    "min_length": st.integers(1, 14),
    "min_new_tokens": st.integers(1, 9),
    "forced_bos_token_id": st.just(3),
    "forced_eos_token_id": st.just(2),
    "suppress_tokens": st.just([4, 7]),
    "begin_suppress_tokens": st.just([5, 6]),
    "exponential_decay_length_penalty": st.just((2, 1.3)),
    "remove_invalid_values": st.just(True),
    "renormalize_logits": st.just(True),
}
FOR_ENCODERS = {
    "encoder_repetition_penalty": st.sampled_from([0.8, 1.3]),
    "encoder_no_repeat_ngram_size": st.integers(1, 3),
}
WARPERS = {
    "temperature": st.sampled_from([0.3, 0.7, 1.4]),
    "top_k": st.integers(1, 2 * VOCAB),
    "top_p": SHARES,
    "min_p": SHARES,
}
OTHER_WARPERS = {"top_h": SHARES, "typical_p": SHARES, "epsilon_cutoff": st.just(0.02), "eta_cutoff": st.just(0.03)}


@functools.cache
def model(architecture: str) -> Any:
    return models.build(architecture, vocab_size=VOCAB, **models.SHALLOW[architecture])


def rebuilt(trace: Trace, asked: dict[str, Any], of: Any = None) -> Trace:
    """With the processors that these settings make."""
    trace = replace(trace, sampling={**asked, "eos_token_id": 2, "max_new_tokens": len(trace), "processors": ["?"]})
    names = [type(p).__name__ for p in Processors(of or model("llama"), trace).processors]
    return replace(trace, sampling={**trace.sampling, "processors": names})


def alone(processors: list[Any], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """What `generate` does at one length."""
    for processor in processors:
        scores = processor(ids, scores)
    return scores


def one_by_one(of: Processors, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([alone(of.processors, of.ids[None, : of.start + t], row[None]) for t, row in enumerate(rows)])


def drawn_rows(data: st.DataObject, count: int, vocab_size: int = VOCAB) -> torch.Tensor:
    """Rows with and without ties."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 16)))
    scale, step = data.draw(st.sampled_from([(1.0, 0.0), (4.0, 0.0), (3.0, 0.5), (2.0, 1.0)]))
    rows = scale * torch.randn(count, vocab_size, generator=generator)
    return rows if step == 0 else (rows / step).round() * step


@pytest.mark.parametrize("name", sorted(FIELDS | FOR_ENCODERS | WARPERS | OTHER_WARPERS))
@settings(max_examples=12)
@given(st.data())
def test_many_positions_are_processed_as_one_by_one(name: str, data: st.DataObject) -> None:
    architecture = "t5" if name in FOR_ENCODERS else data.draw(st.sampled_from(["llama", "t5"]))
    fields = FIELDS | WARPERS | OTHER_WARPERS | (FOR_ENCODERS if architecture == "t5" else {})
    names = {name, *data.draw(st.lists(st.sampled_from(sorted(fields)), max_size=3))}
    ids = st.lists(st.integers(3, 7), min_size=1, max_size=8)
    prompt, answer = data.draw(ids), data.draw(ids)
    start = None if architecture == "llama" else np.array([0, 3], np.int32)[: data.draw(st.integers(1, 2))]
    trace = bare_trace(prompt, answer, VOCAB, start)
    asked = {name: data.draw(fields[name]) for name in sorted(names)}
    trace = rebuilt(trace, {"do_sample": True, **asked}, model(architecture))
    rows = drawn_rows(data, len(trace))
    expected = one_by_one(Processors(model(architecture), trace), rows)
    parts, cut = Processors(model(architecture), trace), data.draw(st.integers(0, len(trace)))
    found = [parts(part, first) for first, part in ((0, rows[:cut]), (cut, rows[cut:])) if len(part)]
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=0, equal_nan=True)
    check_batch(lambda rows: parts.processors, parts.start, data)


def check_batch(make: Callable[[int], Any], prompt: int, data: st.DataObject) -> None:
    """Compare positions of rows, which begin with padding, with calls for each position alone."""
    count, dtype = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([torch.float32, torch.float64]))
    ids = torch.tensor(data.draw(st.lists(st.integers(3, 7), min_size=30, max_size=30))).view(3, 10)[:count]
    ids = torch.cat([torch.zeros(count, prompt, dtype=torch.long), ids], dim=1)
    places = st.tuples(st.integers(0, count - 1), st.integers(prompt + 2, prompt + 8))
    at = data.draw(st.lists(places, min_size=1, max_size=12, unique=True))
    processors, raw = make(count), drawn_rows(data, len(at)).to(dtype)
    batch, starts = RowProcessors(processors, ids[:, : prompt + 4], pad_id=0), range(prompt + 2, prompt + 2 + count)
    batch.write(range(count), starts, torch.stack([row[n : n + 6] for row, n in zip(ids, starts, strict=True)]))
    found = batch(raw.clone(), *zip(*at, strict=True))
    for row, length, scores, result in zip(*zip(*at, strict=True), raw, found, strict=True):
        expected = alone(processors, ids[row, :length].repeat(count, 1), scores.repeat(count, 1))
        torch.testing.assert_close(result, expected[row], rtol=0, atol=0, equal_nan=True)


class Colder(TemperatureLogitsWarper):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores / self.temperature / input_ids.shape[1]


@pytest.mark.parametrize("ignored", [None, 0, 4, 8, 40, torch.tensor([5, 2, 40])])
@settings(max_examples=25)
@given(st.data(), st.integers(0, 3))
def test_processors_see_each_position_at_its_length(ignored: Any, data: st.DataObject, prompt: int) -> None:
    def make(rows: int) -> list[Any]:
        of_rows = ignored[:rows] if isinstance(ignored, torch.Tensor) else ignored
        return [Colder(0.7), RepetitionPenaltyLogitsProcessor(1.3, of_rows)]

    check_batch(make, prompt, data)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.02, 0.99), st.sampled_from([0.2, 1.0, 3.0, 8.0]), st.integers(1, 3))
def test_top_p_keeps_what_sorting_keeps(seed: int, top_p: float, scale: float, least: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(6, 4096, generator=generator)
    logits[1] = logits[1].round()  # many are tied
    logits[2, 5:] = -torch.inf
    logits[3, :300] = 9.0  # more are tied than usually decide
    logits[4, 7] = torch.nan
    logits[5] = logits[5].sort().values
    processor = TopPLogitsWarper(top_p, min_tokens_to_keep=least)
    expected = processor(None, logits)
    found = RowProcessors([processor], torch.zeros(6, 3), 0)(logits.clone(), list(range(6)), [3] * 6)
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))


def test_top_p_seldom_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_rows: list[int] = []
    sort = TopPLogitsWarper.__call__
    monkeypatch.setattr(TopPLogitsWarper, "__call__", lambda *a: sorted_rows.append(len(a[2])) or sort(*a))
    logits = 8 * torch.randn(200, 4096, generator=torch.Generator().manual_seed(0))
    RowProcessors([TopPLogitsWarper(0.9)], torch.zeros(1, 3), 0)(logits, [0] * 200, [3] * 200)
    assert sum(sorted_rows) < 20


def test_what_a_graph_may_contain_reads_no_values() -> None:
    torch.distributions.Distribution.set_default_validate_args(True)  # libraries may change it
    asked = {"do_sample": True, "temperature": 0.7, "top_k": 9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01}
    asked |= {"top_p": 0.5, "min_p": 0.5, "typical_p": 0.5, "top_h": 0.5, "renormalize_logits": True}
    made = Processors(model("llama"), rebuilt(bare_trace([3], [4], VOCAB), asked)).processors
    assert set(map(type, made)) == set(IMPARTIAL)
    scores, probs = torch.empty(3, VOCAB, device="meta"), torch.empty(3, device="meta")
    for processor in made:
        with contextlib.nullcontext() if is_capturable([processor]) else pytest.raises(RuntimeError, match="item"):
            processor(None, scores)
    assert sample(scores, probs).shape == (3,)
    assert not is_capturable([made[0], RepetitionPenaltyLogitsProcessor(1.3)])


def test_samples_have_the_probabilities_of_their_tokens() -> None:
    weights = torch.tensor([[0, 3, 1e-3, 0, 5, 2, 0], [1, 0, 0, 1e-4, 0, 0, 0]])
    generator, count = torch.Generator().manual_seed(3), 40_000
    for row, scale in zip(weights, (1.0, 1e-3), strict=True):
        noise = torch.rand(count, generator=generator)
        found = torch.bincount(sample(scale * row.expand(count, -1), noise), minlength=7)[row > 0]
        expected = count * row[row > 0] / row.sum()
        assert ((found - expected) ** 2 / expected).sum() < 20  # far in the tail of chi-square with 1 to 3 degrees


@settings(max_examples=200)
@given(st.data(), st.integers(1, 60))
def test_tokens_without_probability_are_never_drawn(data: st.DataObject, vocab: int) -> None:
    values = st.sampled_from([0.0, 0.0, 0.0, 1e-45, 1e-30, 1e-8, 0.1, 1 / 3, 1.0])
    probs = torch.tensor([data.draw(st.lists(values, min_size=vocab, max_size=vocab).filter(any))])
    noise = torch.tensor([0.0, 1e-45, 1e-9, 0.25, 0.5, 1 - 2**-24])
    tokens = sample(probs.expand(len(noise), -1), noise)
    assert (probs[0, tokens] > 0).all()
    assert tokens[0] == (probs[0] > 0).nonzero()[0]
    assert (tokens.diff() >= 0).all()


@pytest.fixture(scope="module", autouse=True)
def narrow() -> Iterator[None]:
    """Few tokens, so that it matters in a small vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits_processors, "TIED_TOKENS", 2)
        yield


def kept(rows: torch.Tensor, num_logprobs: int | None, **changes: Any) -> Trace:
    """A request of these rows, whose answer says likely and unlikely tokens."""
    top_logits, top_ids, tail = compress_rows(rows, num_logprobs)
    answer = [3 + t % 5 if t % 3 else int(row.argmax()) for t, row in enumerate(rows)]
    trace = bare_trace([3, 9, 4, 11], answer, rows.shape[1])
    return replace(
        trace, top_logits=top_logits.numpy(), top_ids=top_ids.numpy().astype(np.int32), tail_logprob=tail.numpy(),
        **changes,
    )  # fmt: skip


def dense(trace: Trace) -> torch.Tensor:
    """The target's rows over the vocabulary, the tail spread evenly."""
    logprobs = torch.from_numpy(trace.kept_logprobs())
    if trace.top_ids.shape[1] == 0:
        return logprobs
    others = max(trace.vocab_size - trace.num_kept, 1)
    rows = (torch.from_numpy(trace.tail_logprob) - float(np.log(others)))[:, None].repeat(1, trace.vocab_size)
    return rows.scatter_(1, torch.from_numpy(trace.top_ids.astype(np.int64)), logprobs)


def reference(trace: Trace, rows: torch.Tensor) -> torch.Tensor:
    p, q = (one_by_one(Processors(model("llama"), trace), r).log_softmax(-1) for r in (dense(trace), rows))
    return overlap(p, q).clamp(0, 1).double()


@pytest.mark.parametrize("other", [None, "repetition_penalty", "no_repeat_ngram_size", "typical_p"])
@pytest.mark.parametrize("cut", [None, "top_k", "top_p", "min_p"])
@settings(max_examples=8)
@given(st.data(), st.sampled_from([None, 3, 8, 30, VOCAB - 1]))
def test_acceptance_is_that_of_whole_rows(
    cut: str | None, other: str | None, data: st.DataObject, num_logprobs: int | None
) -> None:
    names = {cut, other, *data.draw(st.lists(st.sampled_from(sorted(WARPERS)), max_size=2))} - {None}
    asked = {str(name): data.draw((FIELDS | WARPERS | OTHER_WARPERS)[name]) for name in sorted(map(str, names))}
    target = drawn_rows(data, 10)
    rows = target + data.draw(st.sampled_from([0.0, 1.0, 4.0])) * drawn_rows(data, 10)
    trace = rebuilt(kept(target, num_logprobs), {"do_sample": True, **asked})
    expected = reference(trace, rows)
    processors = Processors(model("llama"), trace)
    found = [processors.acceptance(part, first) for first, part in ((0, rows[:7]), (7, rows[7:]))]
    # If tokens are tied at the bound of a nucleus, any of them may be kept.
    is_tied = (dense(trace).sort(-1).values.diff() == 0).any(-1) | (rows.sort(-1).values.diff() == 0).any(-1)
    compared = ~is_tied if {"top_k", "top_p"} <= set(asked) else torch.ones_like(is_tied)
    np.testing.assert_allclose(np.concatenate(found)[compared], expected[compared].numpy(), rtol=0, atol=1e-6)
