"""The processors of a recorded request over many positions at once, against transformers' own one by one."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from osd_hf import Trace, logits_processors
from osd_hf.decoding.record import compress_rows
from osd_hf.logits_processors import Processors
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


def one_by_one(processors: Processors, rows: torch.Tensor) -> torch.Tensor:
    """What `generate` does: at each position the processors in their order."""
    done = []
    for t in range(len(rows)):
        row = rows[t : t + 1].float()
        for processor in processors.processors:
            row = processor(processors.ids[None, : processors.start + t], row)
        done.append(row)
    return torch.cat(done)


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


class Remembering(LogitsProcessor):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(scores) == 1
        self.seen.append(input_ids.shape[1])
        return scores + len(self.seen) * input_ids.shape[1]


class Colder(TemperatureLogitsWarper):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores / self.temperature / input_ids.shape[1]


@pytest.mark.parametrize(
    "make", [Remembering, lambda: Colder(0.7), lambda: RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=2)]
)
def test_what_is_not_known_sees_one_position_after_the_other(make: Any) -> None:
    trace, rows = bare_trace([3, 4, 5], [5, 3, 6, 4], VOCAB), torch.randn(4, VOCAB)
    found, expected = (Processors(model("llama"), trace) for _ in range(2))
    for processors in (found, expected):
        processors.processors = [TemperatureLogitsWarper(0.5), make()]
    assert torch.equal(torch.cat([found(rows[:3]), found(rows[3:], 3)]), one_by_one(expected, rows))
    if make is Remembering:
        assert found.processors[1].seen == [3, 4, 5, 6]


# --- sampled: what is accepted --------------------------------------------------------------------------------------


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
