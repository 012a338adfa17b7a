"""The record of one request: its tokens, its rounds, and the target's distribution at each position."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


def ids_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the smallest integer type that holds every token id of the vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def num_accepted(drafted: Collection[int], emitted: Collection[int]) -> int:
    """Return the length of the longest common prefix of drafted and emitted tokens."""
    pairs = enumerate(zip(drafted, emitted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(drafted), len(emitted)))


@dataclass(frozen=True, slots=True, eq=False)
class DraftRound:
    """
    One round: the draft proposed tokens, and the target examined a prefix of them and emitted at least one token.

    Args:
        drafted_ids (`np.ndarray` of shape `(drafted,)`, int32):
            Proposed tokens; empty in a round without candidates. -1 for tokens from earlier text that were not
            accepted, and for tokens that no forward has seen.
        num_accepted (`int`): Length of the longest common prefix of the drafted and the emitted tokens.
        num_emitted (`int`):
            Tokens that the round added to the completion, after any cut at EOS or the maximum length.
        p (`np.ndarray` of shape `(examined,)`, float32, *optional*):
            Sampled requests only: the target's processed probability of each examined token.
        q (`np.ndarray` of shape `(examined,)`, float32, *optional*):
            Sampled requests only: the draft's processed probability of these tokens; 1 for tokens from earlier text.
        from_text (`np.ndarray` of shape `(drafted,)`, bool, *optional*):
            Which tokens come from earlier text; `None` if the draft proposed all.
    """

    drafted_ids: NDArray[np.int32]
    num_accepted: int
    num_emitted: int
    p: NDArray[np.float32] | None = None
    q: NDArray[np.float32] | None = None
    from_text: NDArray[np.bool_] | None = None

    @property
    def num_drafted(self) -> int:
        return len(self.drafted_ids)

    @property
    def has_correction(self) -> bool:
        """Whether the target rejected a token."""
        return self.num_accepted < min(self.num_drafted, self.num_emitted)

    @property
    def num_examined(self) -> int:
        """Accepted tokens and the rejected token, if there is one. Tokens after it are not examined."""
        return self.num_accepted + int(self.has_correction)

    @property
    def text_counts(self) -> tuple[int, int, int]:
        """Numbers of drafted, examined, and accepted tokens from earlier text."""
        if self.from_text is None:
            return 0, 0, 0
        ends = (self.num_drafted, self.num_examined, self.num_accepted)
        drafted, examined, accepted = (int(self.from_text[:end].sum()) for end in ends)
        return drafted, examined, accepted


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Trace:
    """
    The record of one request. Row `t` of the target arrays is the target's raw distribution (before any logits
    processor) of `completion_ids[t]` given all previous tokens.

    Args:
        prompt_ids (`np.ndarray` of shape `(prompt,)`, int32):
            Prompt without padding; the encoder's input of an encoder-decoder target.
        completion_ids (`np.ndarray` of shape `(completion,)`, int32): Emitted tokens, including a final EOS.
        rounds (`tuple[DraftRound, ...]`):
            The rounds in order; their `num_emitted` add up to the completion. Empty if the target answered alone.
        top_logits (`np.ndarray` of shape `(completion, K)`, float16):
            The K largest logits of each row in descending order, minus the largest. If `top_ids` has width 0: all
            logits in vocabulary order.
        top_ids (`np.ndarray` of shape `(completion, K)` or `(completion, 0)`, uint16 or int32): Their token ids.
        tail_logprob (`np.ndarray` of shape `(completion,)`, float32):
            Log of the probability mass outside the kept entries; `-inf` if all are kept.
        vocab_size (`int`): Width of the logits.
        decoder_prompt_ids (`np.ndarray` of shape `(decoder_prompt,)`, int32, *optional*):
            Encoder-decoder only: the first tokens of the decoder.
        domain (`str`, *optional*): Domain that the caller or router chose.
        draft_version (`int`, defaults to 0): Version of the draft of this request.
        sampling (`Mapping[str, Any]`, *optional*):
            Settings of `generate` that have an effect on the distribution or length of the answer.
        created_at_seconds (`float`, defaults to 0.0): Unix time at which the request ended.
        target (`str`, *optional*):
            Version of the target of these rows: the [`fingerprint`] of its weights, or the model name of an engine;
            `None` if unknown.
    """

    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    rounds: tuple[DraftRound, ...]
    top_logits: NDArray[np.float16]
    top_ids: NDArray[Any]
    tail_logprob: NDArray[np.float32]
    vocab_size: int
    decoder_prompt_ids: NDArray[np.int32] | None = None
    domain: str | None = None
    draft_version: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    created_at_seconds: float = 0.0
    target: str | None = None

    def __len__(self) -> int:
        """Number of emitted tokens."""
        return len(self.completion_ids)

    @property
    def is_encoder_decoder(self) -> bool:
        return self.decoder_prompt_ids is not None

    @property
    def is_sampled(self) -> bool:
        return bool(self.sampling.get("do_sample", False))

    @property
    def num_kept(self) -> int:
        """Entries kept per row (K)."""
        return int(self.top_logits.shape[1])

    @property
    def correction_mask(self) -> NDArray[np.bool_]:
        """Bool mask `(completion,)` of positions at which the target rejected a drafted token."""
        mask = np.zeros(len(self), dtype=bool)
        start = 0
        for r in self.rounds:
            if r.has_correction:
                mask[start + r.num_accepted] = True
            start += r.num_emitted
        return mask

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays: list[NDArray[Any] | None] = [self.prompt_ids, self.decoder_prompt_ids, self.completion_ids]
        arrays += [self.top_logits, self.top_ids, self.tail_logprob]
        arrays += [a for r in self.rounds for a in (r.drafted_ids, r.p, r.q, r.from_text)]
        return sum(a.nbytes for a in arrays if a is not None)

    def kept_logprobs(self, where: slice = slice(None)) -> NDArray[np.float32]:
        """Return the log-probs of the kept entries, float32 `(positions, K)`. They are renormalized, because half
        precision rounds, so that each row sums to one together with the tail."""
        logits = self.top_logits[where].astype(np.float32)
        kept_logsum = np.log(np.exp(logits).sum(axis=-1))
        kept_mass = np.log1p(-np.exp(np.minimum(self.tail_logprob[where], -1e-7)))
        return np.asarray(logits - kept_logsum[:, None] + kept_mass[:, None], dtype=np.float32)


def bare_trace(
    prompt_ids: Any, completion_ids: Any, vocab_size: int, decoder_prompt_ids: NDArray[np.int32] | None = None
) -> Trace:
    """Return a trace without rows of the target."""
    ids = np.asarray(completion_ids, dtype=np.int32)
    return Trace(
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32), completion_ids=ids, rounds=(),
        top_logits=np.zeros((len(ids), 0), np.float16), top_ids=np.zeros((len(ids), 0), ids_dtype(vocab_size)),
        tail_logprob=np.zeros(len(ids), np.float32), vocab_size=vocab_size, decoder_prompt_ids=decoder_prompt_ids,
    )  # fmt: skip


def misshapen(trace: Trace) -> str | None:
    """Return why a trace cannot be stored or learned from, or `None` if it can."""
    count = len(trace.completion_ids)
    top_ids_shape = (count, 0) if trace.top_ids.shape == (count, 0) else trace.top_logits.shape
    # Name, array, type, and shape, in which -1 is any size.
    arrays: list[tuple[str, NDArray[Any] | None, Any, tuple[int, ...]]] = [
        ("prompt_ids", trace.prompt_ids, np.integer, (-1,)),
        ("completion_ids", trace.completion_ids, np.integer, (-1,)),
        ("decoder_prompt_ids", trace.decoder_prompt_ids, np.integer, (-1,)),
        ("top_logits", trace.top_logits, np.float16, (count, -1)),
        ("top_ids", trace.top_ids, np.integer, top_ids_shape),
        ("tail_logprob", trace.tail_logprob, np.float32, (count,)),
    ]
    for r in trace.rounds:
        arrays.append(("drafted_ids", r.drafted_ids, np.integer, (-1,)))
        arrays += [("p", r.p, np.float32, (-1,)), ("q", r.q, np.float32, (-1,))]
        arrays.append(("from_text", r.from_text, np.bool_, (r.num_drafted,)))
    for name, array, kind, shape in arrays:
        if array is None:
            continue
        has_shape = array.ndim == len(shape) and all(n in (-1, m) for n, m in zip(shape, array.shape, strict=True))
        if not has_shape or not np.issubdtype(array.dtype, kind):
            expected = f"{kind.__name__} of shape {shape}"
            return f"{name} of a trace must be {expected}, got {array.dtype} of shape {array.shape}"
    if not math.isfinite(trace.created_at_seconds):
        return f"created_at_seconds must be finite, got {trace.created_at_seconds}"
    for label in (trace.domain, trace.target):
        if label is not None and any("\ud800" <= character <= "\udfff" for character in label):
            return f"the domain or target {label!r} is not valid Unicode"
    return None
