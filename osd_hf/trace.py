"""What is wrong with a trace, which one makes learning fail, and which ones were set aside for it."""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["DraftRound", "Readable", "SetAside", "Trace", "ids_dtype", "misshapen", "num_accepted"]


def ids_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The smallest integer type that holds every token id of the vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def num_accepted(drafted: Sequence[int] | NDArray[Any], emitted: Sequence[int] | NDArray[Any]) -> int:
    """Length of the longest common prefix of drafted and emitted tokens. Not the assisted loop's own count of matches,
    which is one short where it cut the emitted tokens."""
    pairs = enumerate(zip(drafted, emitted, strict=False))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(drafted), len(emitted)))


@dataclass(frozen=True, slots=True, eq=False)
class DraftRound:
    """
    One draft-verify round: the draft proposed, the target examined a prefix of it and emitted at least one token.

    Args:
        drafted_ids (`np.ndarray` of shape `(drafted,)`, int32):
            Tokens the draft proposed; empty where the round only decoded.
        num_accepted (`int`):
            Length of the longest common prefix of the drafted and the emitted tokens.
        num_emitted (`int`):
            Tokens that the round added to the completion, after any cut at EOS or at the length limit.
        p (`np.ndarray` of shape `(examined,)`, float32, *optional*):
            Sampled requests only: the target's processed probability of each examined drafted token.
        q (`np.ndarray` of shape `(examined,)`, float32, *optional*):
            Sampled requests only: the draft's processed probability of the same tokens.
    """

    drafted_ids: NDArray[np.int32]
    num_accepted: int
    num_emitted: int
    p: NDArray[np.float32] | None = None
    q: NDArray[np.float32] | None = None

    @property
    def num_drafted(self) -> int:
        return len(self.drafted_ids)

    @property
    def has_correction(self) -> bool:
        """Whether the target emitted another token where the draft had proposed one."""
        return self.num_accepted < min(self.num_drafted, self.num_emitted)

    @property
    def num_examined(self) -> int:
        """Accepted tokens and, if there was one, the rejected token; tokens behind it were never examined."""
        return self.num_accepted + int(self.has_correction)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """
    What was seen of one request. Row `t` of the target arrays is the target's raw distribution (before any logits
    processor) of `completion_ids[t]` given everything before it.

    Args:
        prompt_ids (`np.ndarray` of shape `(prompt,)`, int32):
            Prompt of a decoder-only target, padding removed; the encoder's input of an encoder-decoder.
        completion_ids (`np.ndarray` of shape `(completion,)`, int32):
            Emitted tokens, a final EOS included.
        rounds (`tuple[DraftRound, ...]`):
            The rounds in order; their `num_emitted` add up to the completion. Empty for target-only recordings.
        top_logits (`np.ndarray` of shape `(completion, K)`, float16):
            The K largest target logits of each row, descending, minus the row's largest (so the first is 0). With
            `top_ids` of width 0: the whole row, in vocabulary order.
        top_ids (`np.ndarray` of shape `(completion, K)` or `(completion, 0)`, uint16 or int32):
            Their token ids.
        tail_logprob (`np.ndarray` of shape `(completion,)`, float32):
            Log of the probability mass outside the kept entries; `-inf` where everything was kept.
        vocab_size (`int`):
            Width of the target's logits.
        decoder_prompt_ids (`np.ndarray` of shape `(decoder_prompt,)`, int32, *optional*):
            Encoder-decoder only: what the decoder began with.
        domain (`str`, *optional*):
            Label that the caller gave.
        draft_version (`int`, defaults to 0):
            Version of the draft that drafted this request from beginning to end.
        sampling (`Mapping[str, Any]`, *optional*):
            Settings of `generate` that shape the distribution or bound the answer, `do_sample` and
            `max_new_tokens` among them; only those that differ from doing nothing.
        created_at_seconds (`float`, defaults to 0.0):
            Unix time at which the request ended.
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
        arrays: list[NDArray[Any]] = [
            self.prompt_ids,
            self.completion_ids,
            self.top_logits,
            self.top_ids,
            self.tail_logprob,
        ]
        if self.decoder_prompt_ids is not None:
            arrays.append(self.decoder_prompt_ids)
        for r in self.rounds:
            arrays += [a for a in (r.drafted_ids, r.p, r.q) if a is not None]
        return sum(a.nbytes for a in arrays)

    def kept_logprobs(self) -> NDArray[np.float32]:
        """
        Log-probs of the kept entries, float32 of shape `(completion, K)`: renormalized so that, together with the
        tail, every row sums to one in spite of half-precision storage.
        """
        logits = self.top_logits.astype(np.float32)
        kept_logsum = np.log(np.exp(logits).sum(axis=-1))
        kept_mass = np.log1p(-np.exp(np.minimum(self.tail_logprob, -1e-7)))
        return np.asarray(logits - kept_logsum[:, None] + kept_mass[:, None], dtype=np.float32)


logger = logging.getLogger(__name__)
T = TypeVar("T")
Parts = Generator[None, None, T]  # of work that others may come between

MOST_KEYS = 4096  # traces remembered
MOST_REASONS = 64  # counted apart; reasons come from strangers' data
MOST_IN_A_ROW = 32  # traces set aside with none between them that could be learned from
OF_MEMORY = ("out of memory", "not enough memory", "allocate memory", "memory allocation")
TOLERANCE = 1e-2  # of logits in half precision that should be at most 0


def misshapen(trace: Trace) -> str | None:
    """What keeps the arrays of a trace from fitting together; `None` where they do."""
    count, kept = len(trace.completion_ids), trace.top_logits
    ids = [trace.prompt_ids, trace.completion_ids, *(r.drafted_ids for r in trace.rounds)]
    if trace.decoder_prompt_ids is not None:
        ids.append(trace.decoder_prompt_ids)
    if wrong := [f"{a.dtype} {a.shape}" for a in ids if a.dtype.kind not in "iu" or a.ndim != 1]:
        return f"a trace's token ids must be vectors of integers, got {', '.join(wrong)}"
    probabilities = [a for r in trace.rounds for a in (r.p, r.q) if a is not None]
    if wrong := [f"{a.dtype} {a.shape}" for a in probabilities if a.dtype != np.float32 or a.ndim != 1]:
        return f"a round's p and q must be vectors of float32, got {', '.join(wrong)}"
    if kept.ndim != 2 or len(kept) != count or trace.top_ids.shape not in (kept.shape, (count, 0)):
        return (
            f"a trace of {count} emitted tokens needs as many rows of logits and ids, got {kept.shape} and "
            f"{trace.top_ids.shape}"
        )
    if trace.tail_logprob.shape != (count,):
        return f"tail_logprob must have shape ({count},), got {trace.tail_logprob.shape}"
    if kept.dtype != np.float16 or trace.tail_logprob.dtype != np.float32 or trace.top_ids.dtype.kind not in "iu":
        return (
            f"top_logits, tail_logprob and top_ids must be float16, float32 and integers, got {kept.dtype}, "
            f"{trace.tail_logprob.dtype} and {trace.top_ids.dtype}"
        )
    if kept.size >= 1 << 31:
        return f"a trace can keep at most 2**31 - 1 logits, got {kept.size}: keep fewer per position"
    return None


@dataclass(frozen=True)
class Readable:
    """
    What a draft can read. An id beyond its embeddings ends the process on a GPU, where no error can be caught.

    Args:
        vocab_size (`int`):
            Width of its logits.
        num_inputs (`int`):
            Rows of its input embeddings.
        positions (`int`, *optional*):
            Most tokens of one sequence.
    """

    vocab_size: int
    num_inputs: int
    positions: int | None = None

    @classmethod
    def by(cls, draft: Any) -> Self:
        """What this draft can read."""
        config = draft.config.get_text_config(decoder=True)
        vocab_size = int(config.vocab_size)
        try:
            num_inputs = int(draft.get_input_embeddings().weight.shape[0])
        except (AttributeError, NotImplementedError):
            num_inputs = vocab_size
        return cls(vocab_size, num_inputs, getattr(config, "max_position_embeddings", None))

    def fault(self, trace: Trace) -> str | None:
        """Why nothing can be learned from a trace, in words that fit behind "requests"; `None` where something can."""
        if misshapen(trace) is not None:
            return "whose arrays do not fit together"
        if trace.vocab_size != self.vocab_size:
            return f"of a vocabulary of {trace.vocab_size}, not {self.vocab_size}"
        start = trace.prompt_ids if trace.decoder_prompt_ids is None else trace.decoder_prompt_ids
        fed = [len(start) + len(trace) - 1, 0 if start is trace.prompt_ids else len(trace.prompt_ids)]
        if self.positions is not None and max(fed) > self.positions:
            return f"longer than the draft's {self.positions} positions"
        within = [(trace.completion_ids, self.vocab_size), (trace.top_ids, self.vocab_size)]
        if any(a.size and not 0 <= int(a.min()) <= int(a.max()) < end for a, end in [
            *within, (trace.prompt_ids, self.num_inputs), (start, self.num_inputs)
        ]):  # fmt: skip
            return "with token ids outside of the vocabulary"
        if trace.top_ids.shape[1] == 0 and trace.num_kept not in (0, self.vocab_size):
            return "whose arrays do not fit together"
        emitted = sum(r.num_emitted for r in trace.rounds)
        if trace.rounds and (
            emitted != len(trace)
            or any(not 0 <= r.num_accepted <= min(r.num_drafted, r.num_emitted) for r in trace.rounds)
        ):
            return "whose rounds do not add up"
        if trace.num_kept and len(trace):
            largest = trace.top_logits.max(axis=1)  # NaN where one is
            if not (np.isfinite(largest) & (largest <= TOLERANCE)).all():
                return "with log-probs that are none"
            if np.isnan(trace.tail_logprob).any() or (trace.tail_logprob > TOLERANCE).any():
                return "with log-probs that are none"
            if (np.diff(np.sort(trace.top_ids, axis=1)) == 0).any():
                return "whose rows name a token twice"
        return None

    def simplest(self, like: Trace) -> Trace:
        """A request of one token with rows of the width of another's: what fails on this one fails on all."""
        kept, token = like.num_kept, np.zeros(1, np.int32)
        is_whole = like.top_ids.shape[1] == 0
        dtype = ids_dtype(self.vocab_size)
        ids = np.zeros((1, 0), dtype) if is_whole else np.arange(kept, dtype=dtype)[None]
        tail = np.full(1, -np.inf if is_whole else -1.0, np.float32)
        rounds = (DraftRound(np.ones(1, np.int32), 0, 1),)  # a correction, for those that learn from nothing else
        return Trace(
            token, token, rounds, np.zeros((1, kept), np.float16), ids, tail, self.vocab_size,
            decoder_prompt_ids=token if like.is_encoder_decoder else None,
        )  # fmt: skip


def _key(trace: Trace) -> str:
    """The same for a trace and for its copy out of a store or a session, whatever draft has been replayed on it."""
    digest = hashlib.sha256(np.float64(trace.created_at_seconds).tobytes())
    for ids in (trace.prompt_ids, trace.completion_ids, trace.decoder_prompt_ids):
        digest.update(b"|" if ids is None else np.asarray(ids).astype(np.int64).tobytes() + b";")
    return digest.hexdigest()[:32]


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in OF_MEMORY):
        return "that need more memory than there is"
    if isinstance(error, ArithmeticError):
        return "whose loss or gradient is not finite"
    return f"that cannot be learned from ({type(error).__name__})"


def _attempt(
    work: Callable[[Sequence[Trace]], Sequence[T] | Parts[Sequence[T]]], traces: Sequence[Trace]
) -> Parts[Sequence[T]]:
    found = work(traces)
    return (yield from found) if isinstance(found, Generator) else found


class SetAside:
    """
    Traces that one draft does not learn from any more, because they make learning fail: remembered, as far as there
    is room, and counted.

    Attributes:
        counts (`Counter[str]`):
            Traces set aside, by reason.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._reported: Counter[str] = Counter()
        self._in_a_row = 0

    def __contains__(self, trace: object) -> bool:
        return bool(self._keys) and isinstance(trace, Trace) and _key(trace) in self._keys

    def add(self, trace: Trace, reason: str) -> None:
        """Remember a trace, count it, and say so, without a word of it; once."""
        if trace in self:
            return
        if reason not in self.counts and len(self.counts) >= MOST_REASONS:
            reason = "for other reasons"
        self.counts[reason] += 1
        self._keys[_key(trace)] = None
        while len(self._keys) > MOST_KEYS:
            self._keys.popitem(last=False)
        logger.warning(
            "Set aside: a request of %d and %d tokens, one of those %s. Learning goes on without it.",
            len(trace.prompt_ids), len(trace.completion_ids), reason,
        )  # fmt: skip

    def take_new(self) -> dict[str, int]:
        """Counts since the last call."""
        new, self._reported = self.counts - self._reported, self.counts.copy()
        return dict(new)

    def isolate(
        self,
        work: Callable[[Sequence[Trace]], Sequence[T] | Parts[Sequence[T]]],
        traces: Sequence[Trace],
        readable: Readable,
    ) -> Generator[None, None, list[T | None]]:
        """
        Do work on traces; where it fails, on halves and then on single ones, so that those at fault are found and set
        aside. Yields between two attempts, and where the work does.

        Args:
            work (`Callable[[Sequence[Trace]], Sequence[T] | Generator]`):
                One outcome per trace, each independent of the others; at once, or in parts.
            traces (`Sequence[Trace]`):
                What it is done on.
            readable (`Readable`):
                Makes the request by which a failure of all is told from one of some.

        Returns:
            `list[T | None]`: the outcome of each trace; `None` for one that was set aside.

        Raises:
            Exception: of the work, where it fails on the simplest request as well, or on one trace after the other
                and on none between them: then no trace is at fault, and none is set aside.
        """
        if not traces:
            return []
        try:
            found = yield from _attempt(work, traces)
        except Exception as error:  # noqa: BLE001 - whatever a model fails with
            failure = error
        else:
            self._in_a_row = 0
            return list(found)
        traceback.clear_frames(failure.__traceback__)  # they hold the memory that was too little
        try:
            yield from _attempt(work, [readable.simplest(traces[0])])
        except Exception:  # noqa: BLE001
            raise failure from None
        yield
        outcomes = yield from self._halved(work, traces, failure)
        failed = [(t, o) for t, o in zip(traces, outcomes, strict=True) if isinstance(o, Exception)]
        if len(failed) == len(traces):
            if self._in_a_row + len(failed) > MOST_IN_A_ROW:
                raise failure
            self._in_a_row += len(failed)
        else:
            self._in_a_row = 0
        for trace, cause in failed:
            self.add(trace, _reason(cause))
        return [None if isinstance(o, Exception) else o for o in outcomes]

    def _halved(
        self,
        work: Callable[[Sequence[Trace]], Sequence[T] | Parts[Sequence[T]]],
        traces: Sequence[Trace],
        failure: Exception,
    ) -> Generator[None, None, list[T | Exception]]:
        """The outcome of each, where all together have failed; or what it failed with by itself."""
        if len(traces) == 1:
            return [failure]
        middle = len(traces) // 2
        outcomes: list[T | Exception] = []
        for part in (traces[:middle], traces[middle:]):
            try:
                outcomes += yield from _attempt(work, part)
            except Exception as error:  # noqa: BLE001
                again = error
            else:
                yield
                continue
            traceback.clear_frames(again.__traceback__)
            yield
            outcomes += yield from self._halved(work, part, again)
        return outcomes

    def state_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"counts": dict(self.counts), "keys": list(self._keys)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a state; what is set aside already stays so. `None`: of a session that knew of none."""
        if state is not None:
            self.counts = Counter({str(reason): int(count) for reason, count in state["counts"].items()})
            self._keys = OrderedDict.fromkeys([*map(str, state["keys"]), *self._keys])
            self._reported = self.counts.copy()
