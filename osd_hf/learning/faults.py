"""What fails beside serving: kept to be read, told once; traces that make learning fail: set aside, and counted."""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np

from osd_hf.errors import is_out_of_memory
from osd_hf.trace import DraftRound, Trace, ids_dtype, misshapen

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Work in parts, between which other work may run. After each part it yields how much of an optimizer step that was, or
# `None` if it was next to nothing, or is seldom part of an update.
Parts = Generator[float | None, None, T]
Work = Callable[[Sequence[Trace]], Sequence[T] | Parts[Sequence[T]]]

MOST_KEYS = 4096  # traces remembered
MOST_REASONS = 64  # counted apart; reasons come from strangers' data
MOST_IN_A_ROW = 32  # traces set aside with none between them that could be learned from
TOLERANCE = 1e-2  # of logits in half precision that should be at most 0


class Failures:
    """What fails beside serving, by the work that it was: told in the log once for each kind of error, and kept until
    the same work succeeds."""

    def __init__(self) -> None:
        self._standing: dict[str, Exception] = {}  # newest last
        self._in_a_row: Counter[str] = Counter()
        self._told: set[tuple[str, type]] = set()

    @property
    def standing(self) -> list[Exception]:
        """What each work that has not succeeded since has failed with, newest last."""
        return list(self._standing.values())

    def add(self, work: str, error: Exception) -> int:
        """Take in what some work, in words that begin a sentence, has failed with; returns how often it has in a
        row."""
        is_new = (work, type(error)) not in self._told
        self._told.add((work, type(error)))
        logger.log(
            logging.WARNING if is_new else logging.INFO,
            "%s failed (%r). No answer suffers, and serving goes on; `learning_error` says so until it succeeds.",
            work, error, exc_info=error if is_new else None,
        )  # fmt: skip
        cause: BaseException | None = error
        while cause is not None:  # its frames hold what was computed, on a GPU perhaps
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__
        self._standing.pop(work, None)
        self._standing[work] = error
        self._in_a_row[work] += 1
        return self._in_a_row[work]

    def clear(self, work: str) -> None:
        """It has succeeded."""
        self._standing.pop(work, None)
        self._in_a_row.pop(work, None)

    def count_anew(self) -> None:
        """What is tried again begins a new row, and is told in the log again."""
        self._in_a_row.clear()
        self._told.clear()

    @contextmanager
    def kept(self, work: str) -> Iterator[None]:
        """Entered around some work: what it fails with is taken in, and goes no further."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it fails with, no answer suffers
            self.add(work, error)
        else:
            self.clear(work)


@dataclass(frozen=True)
class Readable:
    """What a draft can read. An id beyond its embeddings ends the process on a GPU, where no error can be caught."""

    vocab_size: int  # width of its logits
    num_inputs: int  # rows of its input embeddings
    positions: int | None = None  # most tokens of one sequence

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
        """Why nothing can be learned from a trace, in words that fit after "requests"; `None` where something can."""
        if misshapen(trace) is not None:
            return "whose arrays do not fit together"
        if trace.vocab_size != self.vocab_size:
            return f"of a vocabulary of {trace.vocab_size}, not {self.vocab_size}"
        source, start = trace.prompt_ids, trace.decoder_prompt_ids
        fed = [len(source) + len(trace) - 1] if start is None else [len(source), len(start) + len(trace) - 1]
        if self.positions is not None and max(fed) > self.positions:
            return f"longer than the draft's {self.positions} positions"
        read = [source] if start is None else [source, start]
        bounds = [*((ids, self.num_inputs) for ids in read)]
        bounds += [(trace.completion_ids, self.vocab_size), (trace.top_ids, self.vocab_size)]
        if any(ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < end for ids, end in bounds):
            return "with token ids outside of the vocabulary"
        if trace.top_ids.shape[1] == 0 and trace.num_kept not in (0, self.vocab_size):
            return "whose arrays do not fit together"
        fits = all(0 <= r.num_accepted <= min(r.num_drafted, r.num_emitted) for r in trace.rounds)
        if trace.rounds and not (fits and sum(r.num_emitted for r in trace.rounds) == len(trace)):
            return "whose rounds do not add up"
        if trace.num_kept and len(trace):
            largest = trace.top_logits.max(axis=1)  # NaN where one is
            are_logits = (np.isfinite(largest) & (largest <= TOLERANCE)).all()
            if not (are_logits and (trace.tail_logprob <= TOLERANCE).all()):
                return "with log-probs that are none"
            if (np.diff(np.sort(trace.top_ids, axis=1)) == 0).any():
                return "whose rows name a token twice"
        return None

    def simplest(self, like: Trace) -> Trace:
        """A request of one token with rows of the width of another's: what fails on this one fails on all."""
        kept, token = like.num_kept, np.zeros(1, np.int32)
        is_whole = like.top_ids.shape[1] == 0
        ids = np.arange(0 if is_whole else kept, dtype=ids_dtype(self.vocab_size))[None]
        tail = np.full(1, -np.inf if is_whole else -1.0, np.float32)
        rounds = (DraftRound(np.ones(1, np.int32), 0, 1),)  # a correction, for those that learn from nothing else
        start = token if like.is_encoder_decoder else None
        logits = np.zeros((1, kept), np.float16)
        return Trace(token, token, rounds, logits, ids, tail, self.vocab_size, decoder_prompt_ids=start)


class SetAside:
    """Traces that one draft does not learn from any more, because they make learning fail: remembered, as far as there
    is room, and counted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by reason
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

    def isolate(self, work: Work[T], traces: Sequence[Trace], readable: Readable) -> Parts[list[T | None]]:
        """
        Do work on traces; where it fails, on halves and then on single ones, so that those at fault are found and set
        aside. Yields between two attempts, and where the work does.

        Args:
            work (`Callable[[Sequence[Trace]], Sequence[T] | Generator]`):
                One outcome per trace, each independent of the others; at once, or in parts.
            traces (`Sequence[Trace]`): What it is done on.
            readable (`Readable`): Makes the request by which a failure of all is told from one of some.

        Returns:
            `list[T | None]`: the outcome of each trace; `None` for one that was set aside.

        Raises:
            Exception: of the work, where it fails on the simplest request as well, or on one trace after the other
                and on none between them: then no trace is at fault, and none is set aside.
        """
        if not traces:
            return []
        found, failure = yield from _attempt(work, traces)
        if failure is None:
            self._in_a_row = 0
            return list(found)
        _, is_general = yield from _attempt(work, [readable.simplest(traces[0])])
        if is_general is not None:
            raise failure
        yield None
        outcomes = yield from _halved(work, traces, failure)
        failed = [(t, o) for t, o in zip(traces, outcomes, strict=True) if isinstance(o, Exception)]
        in_a_row = self._in_a_row + len(failed) if len(failed) == len(traces) else 0
        if in_a_row > MOST_IN_A_ROW:
            raise failure
        self._in_a_row = in_a_row
        for trace, cause in failed:
            self.add(trace, _reason(cause))
        return [None if isinstance(o, Exception) else o for o in outcomes]

    def state_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"counts": dict(self.counts), "keys": list(self._keys)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; what is set aside already stays so."""
        self.counts = Counter({str(reason): int(count) for reason, count in state["counts"].items()})
        self._keys = OrderedDict.fromkeys([*map(str, state["keys"]), *self._keys])
        self._reported = self.counts.copy()


def _key(trace: Trace) -> str:
    """The same for a trace and for its copy out of a store or a session, whatever draft has been replayed on it."""
    digest = hashlib.sha256(np.float64(trace.created_at_seconds).tobytes())
    for ids in (trace.prompt_ids, trace.completion_ids, trace.decoder_prompt_ids):
        digest.update(b"|" if ids is None else np.asarray(ids).astype(np.int64).tobytes() + b";")
    return digest.hexdigest()[:32]


def _reason(error: Exception) -> str:
    if is_out_of_memory(error):
        return "that need more memory than there is"
    if isinstance(error, ArithmeticError):
        return "whose loss or gradient is not finite"
    return f"that cannot be learned from ({type(error).__name__})"


def _attempt(work: Work[T], traces: Sequence[Trace]) -> Parts[tuple[Sequence[T], Exception | None]]:
    """The outcomes, or what the work failed with."""
    try:
        found = work(traces)
        return (yield from found) if isinstance(found, Generator) else found, None
    except Exception as error:  # noqa: BLE001 - whatever a model fails with
        traceback.clear_frames(error.__traceback__)  # they hold the memory that was too little
        return (), error


def _halved(work: Work[T], traces: Sequence[Trace], failure: Exception) -> Parts[list[T | Exception]]:
    """The outcome of each trace, where all together have failed; or what it fails with by itself."""
    if len(traces) == 1:
        return [failure]
    middle = len(traces) // 2
    outcomes: list[T | Exception] = []
    for part in (traces[:middle], traces[middle:]):
        found, again = yield from _attempt(work, part)
        yield None
        outcomes += found if again is None else (yield from _halved(work, part, again))
    return outcomes
