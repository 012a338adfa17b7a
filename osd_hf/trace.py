"""What was seen of one request: its tokens, its rounds, and the target's distribution at each position."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


def ids_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The smallest integer type that holds every token id of the vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def num_accepted(drafted: Collection[int], emitted: Collection[int]) -> int:
    """Length of the longest common prefix of drafted and emitted tokens. The assisted loop's own count of matches is
    one short where it cut the emitted tokens."""
    pairs = enumerate(zip(drafted, emitted, strict=False))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(drafted), len(emitted)))


@dataclass(frozen=True, slots=True, eq=False)
class DraftRound:
    """
    One draft-verify round: the draft proposed, the target examined a prefix of it and emitted at least one token.

    Args:
        drafted_ids (`np.ndarray` of shape `(drafted,)`, int32):
            Tokens that were proposed; empty where the round only decoded. -1 for those of past text that were not
            accepted, and for what no forward has seen.
        num_accepted (`int`): Length of the longest common prefix of the drafted and the emitted tokens.
        num_emitted (`int`):
            Tokens that the round added to the completion, after any cut at EOS or at the length limit.
        p (`np.ndarray` of shape `(examined,)`, float32, *optional*):
            Sampled requests only: the target's processed probability of each examined drafted token.
        q (`np.ndarray` of shape `(examined,)`, float32, *optional*):
            Sampled requests only: the draft's processed probability of the same tokens; 1 for those of past text.
        from_text (`np.ndarray` of shape `(drafted,)`, bool, *optional*):
            Which of the tokens past text proposed; `None` where the draft proposed all.
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
        """Whether the target emitted another token where the draft had proposed one."""
        return self.num_accepted < min(self.num_drafted, self.num_emitted)

    @property
    def num_examined(self) -> int:
        """Accepted tokens and, if there was one, the rejected token; tokens after it were never examined."""
        return self.num_accepted + int(self.has_correction)

    @property
    def text_counts(self) -> tuple[int, int, int]:
        """Tokens that past text proposed; those of them that were examined; and accepted."""
        if self.from_text is None:
            return 0, 0, 0
        ends = (self.num_drafted, self.num_examined, self.num_accepted)
        drafted, examined, accepted = (int(self.from_text[:end].sum()) for end in ends)
        return drafted, examined, accepted


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Trace:
    """
    What was seen of one request. Row `t` of the target arrays is the target's raw distribution (before any logits
    processor) of `completion_ids[t]` given everything before it.

    Args:
        prompt_ids (`np.ndarray` of shape `(prompt,)`, int32):
            Prompt of a decoder-only target, padding removed; the encoder's input of an encoder-decoder.
        completion_ids (`np.ndarray` of shape `(completion,)`, int32): Emitted tokens, a final EOS included.
        rounds (`tuple[DraftRound, ...]`):
            The rounds in order; their `num_emitted` add up to the completion. Empty for target-only recordings.
        top_logits (`np.ndarray` of shape `(completion, K)`, float16):
            The K largest target logits of each row, descending, minus the row's largest (so the first is 0). With
            `top_ids` of width 0: the whole row, in vocabulary order.
        top_ids (`np.ndarray` of shape `(completion, K)` or `(completion, 0)`, uint16 or int32): Their token ids.
        tail_logprob (`np.ndarray` of shape `(completion,)`, float32):
            Log of the probability mass outside the kept entries; `-inf` where everything was kept.
        vocab_size (`int`): Width of the target's logits.
        decoder_prompt_ids (`np.ndarray` of shape `(decoder_prompt,)`, int32, *optional*):
            Encoder-decoder only: what the decoder began with.
        domain (`str`, *optional*): Label that the caller gave.
        draft_version (`int`, defaults to 0): Version of the draft that drafted this request from beginning to end.
        sampling (`Mapping[str, Any]`, *optional*):
            Settings of `generate` that shape the distribution or bound the answer, `do_sample` and
            `max_new_tokens` among them; only those that differ from doing nothing.
        created_at_seconds (`float`, defaults to 0.0): Unix time at which the request ended.
        target (`str`, *optional*):
            Version of the target whose rows these are: the [`fingerprint`] of its weights, or the name that an
            engine's answers go by; `None` where it is not known.
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
    def is_rescored(self) -> bool:
        """Whether the answer is another target's than the rows, see [`rescore`]: what a draft would have scored on it
        says nothing of either."""
        return bool(self.sampling.get("rescored", False))

    @property
    def num_kept(self) -> int:
        """Entries kept per row (K)."""
        return int(self.top_logits.shape[1])

    @property
    def correction_mask(self) -> NDArray[np.bool_]:
        """Bool of shape `(completion,)`: positions where the target corrected the draft."""
        mask = np.zeros(len(self), dtype=bool)
        start = 0
        for r in self.rounds:
            if r.has_correction:
                mask[start + r.num_accepted] = True
            start += r.num_emitted
        return mask

    @property
    def nbytes(self) -> int:
        """Bytes held by the arrays."""
        arrays: list[NDArray[Any] | None] = [self.prompt_ids, self.decoder_prompt_ids, self.completion_ids]
        arrays += [self.top_logits, self.top_ids, self.tail_logprob]
        arrays += [a for r in self.rounds for a in (r.drafted_ids, r.p, r.q, r.from_text)]
        return sum(a.nbytes for a in arrays if a is not None)

    def kept_logprobs(self, where: slice = slice(None)) -> NDArray[np.float32]:
        """
        Log-probs of the kept entries at some positions, by default at all, float32 of shape `(positions, K)`:
        renormalized so that, together with the tail, every row sums to one in spite of half-precision storage.
        """
        logits = self.top_logits[where].astype(np.float32)
        kept_logsum = np.log(np.exp(logits).sum(axis=-1))
        kept_mass = np.log1p(-np.exp(np.minimum(self.tail_logprob[where], -1e-7)))
        return np.asarray(logits - kept_logsum[:, None] + kept_mass[:, None], dtype=np.float32)


def bare_trace(
    prompt_ids: Any, completion_ids: Any, vocab_size: int, decoder_prompt_ids: NDArray[np.int32] | None = None
) -> Trace:
    """A request without rows of the target."""
    ids = np.asarray(completion_ids, dtype=np.int32)
    return Trace(
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32), completion_ids=ids, rounds=(),
        top_logits=np.zeros((len(ids), 0), np.float16), top_ids=np.zeros((len(ids), 0), ids_dtype(vocab_size)),
        tail_logprob=np.zeros(len(ids), np.float32), vocab_size=vocab_size, decoder_prompt_ids=decoder_prompt_ids,
    )  # fmt: skip


def misshapen(trace: Trace) -> str | None:
    """What keeps the arrays of a trace from fitting together; `None` where they do."""
    count, kept, tail = len(trace.completion_ids), trace.top_logits, trace.tail_logprob
    ids = [trace.prompt_ids, trace.completion_ids, *(r.drafted_ids for r in trace.rounds)]
    if trace.decoder_prompt_ids is not None:
        ids.append(trace.decoder_prompt_ids)
    if wrong := [f"{a.dtype} {a.shape}" for a in ids if a.dtype.kind not in "iu" or a.ndim != 1]:
        return f"a trace's token ids must be vectors of integers, got {', '.join(wrong)}"
    probabilities = [a for r in trace.rounds for a in (r.p, r.q) if a is not None]
    if wrong := [f"{a.dtype} {a.shape}" for a in probabilities if a.dtype != np.float32 or a.ndim != 1]:
        return f"a round's p and q must be vectors of float32, got {', '.join(wrong)}"
    sources = [(r.from_text, r.num_drafted) for r in trace.rounds if r.from_text is not None]
    if wrong := [f"{a.dtype} {a.shape}" for a, n in sources if a.dtype != np.bool_ or a.shape != (n,)]:
        return f"a round's from_text must be a bool for each drafted token, got {', '.join(wrong)}"
    if kept.ndim != 2 or len(kept) != count or trace.top_ids.shape not in (kept.shape, (count, 0)):
        shapes = f"{kept.shape} and {trace.top_ids.shape}"
        return f"a trace of {count} emitted tokens needs as many rows of logits and ids, got {shapes}"
    if tail.shape != (count,):
        return f"tail_logprob must have shape ({count},), got {tail.shape}"
    if kept.dtype != np.float16 or tail.dtype != np.float32 or trace.top_ids.dtype.kind not in "iu":
        dtypes = f"{kept.dtype}, {tail.dtype} and {trace.top_ids.dtype}"
        return f"top_logits, tail_logprob and top_ids must be float16, float32 and integers, got {dtypes}"
    if kept.size >= 1 << 31:
        return f"a trace can keep at most 2**31 - 1 logits, got {kept.size}: keep fewer per position"
    return None
