"""Keep the requests of one draft: to learn from, to judge versions by, and excluded from learning."""

from __future__ import annotations

import hashlib
import logging
import threading
import traceback
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from transformers import PreTrainedModel

from osd_hf.acceptance import AcceptanceStats
from osd_hf.config import OnlineConfig
from osd_hf.errors import is_out_of_memory
from osd_hf.learning.gate import MIN_EFFORT, DraftChoice, Effort
from osd_hf.trace import DraftRound, Trace, ids_dtype, misshapen
from osd_hf.vocabulary import TrafficVocabulary

logger = logging.getLogger(__name__)

T = TypeVar("T")
Parts = Generator[float | None, None, T]
"""Work in parts, between which requests may run. Each part yields its size in optimizer steps, or `None`."""

HOLD_BACK_EVERY = 4  # requests of which one is held back
NUM_HELD_BACK = 16  # newest held-back requests that judge a version
NUM_WATCHED = 64  # newest requests that decide about a rollback
COMPARE_EVERY = 4  # requests of which one is compared while the effort is reduced
UNUSUAL_DEVIATIONS = 3.0  # standard deviations below the usual acceptance; the next requests are all compared then
COMPARED_AFTER_UNUSUAL = 12
USUAL_REQUESTS = 32  # newest requests that define the usual acceptance
MIN_EXAMINED_TOKENS = 8  # of a request that counts for it

MAX_EXCLUDED = 4096  # excluded traces that are remembered
MAX_REASONS = 64  # reasons counted separately; reasons contain foreign data
MAX_EXCLUDED_IN_A_ROW = 32  # traces excluded with no success between them
LOGIT_TOLERANCE = 1e-2  # of half-precision logits that should be at most 0


# --- the replay buffer ----------------------------------------------------------------------------------------------


class ReplayBuffer(list[Trace]):
    """Requests to replay, of all traffic with more of the recent: above the capacity, each new request replaces a
    random one. The caller holds a lock."""

    def __init__(self, capacity: int, rng: np.random.Generator) -> None:
        super().__init__()
        self.capacity = capacity
        self.rng = rng

    def append(self, trace: Trace) -> None:
        """Add a request."""
        if len(self) < self.capacity:
            super().append(trace)
        else:
            self[int(self.rng.integers(self.capacity))] = trace

    def extend(self, traces: Iterable[Trace]) -> None:
        """Add several requests in order."""
        for trace in traces:
            self.append(trace)

    def sample(self, n: int) -> list[Trace]:
        """Draw `n` different requests uniformly, or all if there are fewer."""
        n = min(n, len(self))
        return [self[i] for i in self.rng.choice(len(self), n, replace=False)] if n else []


# --- requests that cannot be learned from ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadableTraces:
    """Check whether a draft can read a trace. On a GPU an id outside of the embeddings ends the process."""

    vocab_size: int  # columns of the logits
    num_inputs: int  # rows of the input embeddings
    positions: int | None = None  # maximum number of tokens of a sequence

    @classmethod
    def by(cls, draft: PreTrainedModel) -> Self:
        """Read the limits of a draft."""
        config = draft.config.get_text_config(decoder=True)
        vocab_size = int(config.vocab_size)
        try:
            num_inputs = int(draft.get_input_embeddings().weight.shape[0])
        except (AttributeError, NotImplementedError):
            num_inputs = vocab_size
        return cls(vocab_size, num_inputs, getattr(config, "max_position_embeddings", None))

    def fault(self, trace: Trace) -> str | None:
        """Return why a trace cannot be learned from, as a phrase that follows "requests", or `None`."""
        if misshapen(trace) is not None:
            return "with arrays that do not fit together"
        if trace.vocab_size != self.vocab_size:
            return f"of a vocabulary of {trace.vocab_size}, not {self.vocab_size}"
        source, start = trace.prompt_ids, trace.decoder_prompt_ids
        read = [len(source) + len(trace) - 1] if start is None else [len(source), len(start) + len(trace) - 1]
        if self.positions is not None and max(read) > self.positions:
            return f"longer than the draft's {self.positions} positions"
        inputs = [source] if start is None else [source, start]
        bounds = [*((ids, self.num_inputs) for ids in inputs)]
        bounds += [(trace.completion_ids, self.vocab_size), (trace.top_ids, self.vocab_size)]
        if any(ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < end for ids, end in bounds):
            return "with token ids outside of the vocabulary"
        if trace.top_ids.shape[1] == 0 and trace.num_kept not in (0, self.vocab_size):
            return "with arrays that do not fit together"
        is_bounded = all(0 <= r.num_accepted <= min(r.num_drafted, r.num_emitted) for r in trace.rounds)
        if trace.rounds and not (is_bounded and sum(r.num_emitted for r in trace.rounds) == len(trace)):
            return "with inconsistent rounds"
        if trace.num_kept and len(trace):
            largest = trace.top_logits.max(axis=1)  # NaN where one is
            are_logits = (np.isfinite(largest) & (largest <= LOGIT_TOLERANCE)).all()
            if not (are_logits and (trace.tail_logprob <= LOGIT_TOLERANCE).all()):
                return "with invalid log-probs"
            if (np.diff(np.sort(trace.top_ids, axis=1)) == 0).any():
                return "with rows that contain a token twice"
        return None

    def simplest(self, like: Trace) -> Trace:
        """Return a request of one token with rows as wide as those of `like`. Work that fails on it fails on all."""
        kept, token = like.num_kept, np.zeros(1, np.int32)
        is_whole = like.top_ids.shape[1] == 0
        ids = np.arange(0 if is_whole else kept, dtype=ids_dtype(self.vocab_size))[None]
        tail = np.full(1, -np.inf if is_whole else -1.0, np.float32)
        rounds = (DraftRound(np.ones(1, np.int32), 0, 1),)  # a correction, for `learn_from="corrections"`
        start = token if like.is_encoder_decoder else None
        logits = np.zeros((1, kept), np.float16)
        return Trace(token, token, rounds, logits, ids, tail, self.vocab_size, decoder_prompt_ids=start)


class ExcludedRequests:
    """Remember the traces that one draft cannot read, or that made learning fail, and count them by reason."""

    def __init__(self, readable: ReadableTraces) -> None:
        self.readable = readable
        self.counts: Counter[str] = Counter()
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._reported: Counter[str] = Counter()
        self._in_a_row = 0

    def __contains__(self, trace: object) -> bool:
        return bool(self._keys) and isinstance(trace, Trace) and _key(trace) in self._keys

    def accepts(self, trace: Trace) -> bool:
        """Whether a trace can be learned from. One that the draft cannot read is excluded."""
        if trace in self:
            return False
        if (fault := self.readable.fault(trace)) is not None:
            self.add(trace, fault)
        return fault is None

    def add(self, trace: Trace, reason: str) -> None:
        """Exclude a trace and log it, without any of its text."""
        if trace in self:
            return
        if reason not in self.counts and len(self.counts) >= MAX_REASONS:
            reason = "for other reasons"
        self.counts[reason] += 1
        self._keys[_key(trace)] = None
        while len(self._keys) > MAX_EXCLUDED:
            self._keys.popitem(last=False)
        logger.warning(
            "Set aside: a request of %d and %d tokens, one %s. Learning continues without it.",
            len(trace.prompt_ids),
            len(trace.completion_ids),
            reason,
        )

    def take_new(self) -> dict[str, int]:
        """Return the counts since the last call."""
        new = self.counts - self._reported
        self._reported = self.counts.copy()
        return dict(new)

    def isolate(
        self, work: Callable[[Sequence[Trace]], Sequence[T]], traces: Sequence[Trace]
    ) -> Parts[list[T | None]]:
        """Work on traces. If that fails, work on each trace alone and exclude those that fail, with the result `None`.
        The work returns one independent result per trace. If it fails on the simplest request as well, or on many
        traces in a row, its error is raised and no trace is excluded."""
        if not traces:
            return []
        found, failure = _attempt(work, traces)
        if failure is None:
            self._in_a_row = 0
            return list(found)
        if _attempt(work, [self.readable.simplest(traces[0])])[1] is not None:
            raise failure
        results: list[T | None] = []
        failed: list[tuple[Trace, Exception]] = []
        for trace in traces:
            yield None
            found, error = _attempt(work, [trace])
            results.append(None if error is not None else found[0])
            if error is not None:
                failed.append((trace, error))
        in_a_row = self._in_a_row + len(failed) if len(failed) == len(traces) else 0
        if in_a_row > MAX_EXCLUDED_IN_A_ROW:
            raise failure
        self._in_a_row = in_a_row
        for trace, error in failed:
            self.add(trace, _reason(error))
        return results

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"counts": dict(self.counts), "keys": list(self._keys)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. Traces that are excluded already stay so."""
        self.counts = Counter({str(reason): int(count) for reason, count in state["counts"].items()})
        self._keys = OrderedDict.fromkeys([*map(str, state["keys"]), *self._keys])
        self._reported = self.counts.copy()


def _key(trace: Trace) -> str:
    """Return a key that a trace shares with its copies in a store or a session."""
    digest = hashlib.sha256(np.float64(trace.created_at_seconds).tobytes())
    for ids in (trace.prompt_ids, trace.completion_ids, trace.decoder_prompt_ids):
        digest.update(b"|" if ids is None else np.asarray(ids).astype(np.int64).tobytes() + b";")
    return digest.hexdigest()[:32]


def _reason(error: Exception) -> str:
    if is_out_of_memory(error):
        return "that need more memory than there is"
    if isinstance(error, ArithmeticError):
        return "with a loss or gradient that is not finite"
    return f"that cannot be learned from ({type(error).__name__})"


def _attempt(
    work: Callable[[Sequence[Trace]], Sequence[T]], traces: Sequence[Trace]
) -> tuple[Sequence[T], Exception | None]:
    """Return the results of the work, or its error."""
    try:
        return work(traces), None
    except Exception as error:  # noqa: BLE001 - models fail in any way
        traceback.clear_frames(error.__traceback__)  # the frames hold memory that may be needed
        return (), error


# --- the requests of one draft --------------------------------------------------------------------------------------


class DraftRequests:
    """Keep the requests of one draft, of a domain or shared by all. A request is held back to judge versions, or
    pending until an update learns from it, or in the replay buffer. A held-back request becomes pending when a newer
    one takes its place. All requests belong to one version of the target or to the `target_lag` versions before;
    others are removed. Requests may arrive in any thread. One thread learns."""

    def __init__(
        self,
        readable: ReadableTraces,
        domain: str | None = None,
        config: OnlineConfig | None = None,
        *,
        target_lag: int = 0,
        min_effort: float = MIN_EFFORT,
        usual_tokens: Sequence[int] = (),
    ) -> None:
        self.domain = domain
        self.config = config or OnlineConfig()
        self.target_lag = target_lag
        self.lock = threading.RLock()

        self.target: str | None = None  # version of the target; `None` until a request names one
        self.earlier: tuple[str, ...] = ()  # versions before, newest first, that are still learned from
        self.older = 0  # removed requests of other versions
        self.is_unconfirmed = False  # loaded from a session, perhaps of another target: the next request shows it

        self.observed = 0  # requests
        self.requests_waiting = 0  # since an update began
        self.rest = 0  # requests to wait for before learning again, after failures in a row
        # Oldest first, including those of the update in progress. Bounded, as updates may never come.
        self.pending: deque[Trace] = deque(maxlen=self.config.buffer_size)
        self.held_back: deque[Trace] = deque()
        self.buffer = ReplayBuffer(self.config.buffer_size, np.random.default_rng(self.config.seed))
        self.set_aside = ExcludedRequests(readable)

        self.arrived: deque[Trace] = deque(maxlen=NUM_WATCHED)  # not yet compared by both drafts
        # Compared, with the scores of the original and the learned draft; not yet used to decide about a rollback.
        self.unwatched: deque[tuple[Trace, AcceptanceStats, AcceptanceStats]] = deque(maxlen=NUM_WATCHED)
        self.originals: dict[Trace, AcceptanceStats] = {}  # scores of the original draft on held-back requests
        self._usual: deque[float] = deque(maxlen=USUAL_REQUESTS)  # acceptance by request
        self._compare_all = 0  # requests

        is_auto = self.config.num_assistant_tokens == "auto"
        self.vocabulary = TrafficVocabulary(readable.vocab_size if is_auto else 0, usual_tokens)
        self.choice = DraftChoice()
        self.effort = Effort(min_effort)
        self.dropped = 0  # versions in a row
        # Scores of the previous version, the original draft and the serving version on requests that it served.
        self.compared: deque[tuple[AcceptanceStats, AcceptanceStats, AcceptanceStats]] = deque(maxlen=NUM_WATCHED)

    # --- arrival ----------------------------------------------------------------------------------------------------

    def observe(self, trace: Trace) -> bool:
        """Add a request. Returns whether the target changed, so that earlier requests were removed."""
        with self.lock:
            has_changed = self.set_target_version(trace.target)
            self.is_unconfirmed = False
            self.rest = max(self.rest - 1, 0)
            if self.is_current(trace):
                self._add(trace)
            else:
                self.older += 1
            return has_changed

    def _add(self, trace: Trace) -> None:
        self.requests_waiting += 1
        self.vocabulary.add(trace)
        to_learn = self.hold_back(trace) if self.config.gate else trace
        if to_learn is not None:
            self.pending.append(to_learn)
        if self.config.gate:
            self.arrived.append(trace)
            self._notice_unusual(AcceptanceStats.from_trace(trace))

    def _notice_unusual(self, served: AcceptanceStats) -> None:
        """Let the next requests all be compared if this one was accepted much less than usual."""
        self._compare_all = max(self._compare_all - 1, 0)
        if served.examined < MIN_EXAMINED_TOKENS:
            return
        usual = np.array(self._usual)
        limit = usual.mean() - UNUSUAL_DEVIATIONS * usual.std() if len(usual) >= USUAL_REQUESTS / 2 else -np.inf
        if served.alpha < limit:
            self._compare_all = COMPARED_AFTER_UNUSUAL
        self._usual.append(served.alpha)

    def hold_back(self, trace: Trace) -> Trace | None:
        """Add a request; returns the one to learn from instead: itself, an older one, or none yet."""
        block, place = divmod(self.observed, HOLD_BACK_EVERY)
        self.observed += 1
        # The place in each block varies, as domains may alternate.
        if place != zlib.crc32(block.to_bytes(8, "little")) % HOLD_BACK_EVERY:
            return trace
        self.held_back.append(trace)
        return self.held_back.popleft() if len(self.held_back) > NUM_HELD_BACK else None

    # --- the version of the target ----------------------------------------------------------------------------------

    def set_target_version(self, target: str | None) -> bool:
        """Set the version of the target that answers from now on; returns whether earlier requests were removed. The
        learned weights stay, as the target usually changes little."""
        with self.lock:
            if target is None or target == self.target:
                return False
            if self.target is None:  # requests without a version belong to the first version that is named
                self.target = target
                return False
            if not self.target_lag:
                self.remove_all(target)
                return True
            known = (self.target, *(version for version in self.earlier if version != target))
            self.target = target
            self.earlier = known[: self.target_lag]
            kept = (*self.pending, *self.held_back, *self.arrived, *self.buffer)
            old = {trace for trace in kept if not self.is_current(trace)}
            self._remove(old)
            self.older += len(old)
            return False

    def remove_all(self, target: str | None) -> None:
        """Remove all requests, as the target is another one now, of this version if known."""
        with self.lock:
            before, self.target, self.earlier = self.target, target, ()
            removed = len(self.pending) + len(self.held_back) + len(self.buffer)
            logger.log(
                logging.INFO if self.older else logging.WARNING,
                "Set aside %d requests of an older target%s: it was %s, and is %s now. What the draft has learned "
                "stays, and it learns from new requests.",
                removed,
                "" if self.domain is None else f" of {self.domain!r}",
                before or "unknown",
                target or "unknown",
            )
            self.older += max(removed, 1)
            for kept in (self.pending, self.held_back, self.arrived, self.unwatched, self._usual, self.buffer):
                kept.clear()
            self._compare_all = 0
            self.choice.clear()
            self.effort.restart()
            self.compared = deque(maxlen=NUM_WATCHED)  # the learning thread may still read the old one
            self.is_unconfirmed = False

    def is_current(self, trace: Trace) -> bool:
        """Whether a request is of a version of the target that is learned from. Requests without a version are, as
        long as the target has not changed."""
        return trace.target in (self.target, *self.earlier) or (trace.target is None and not self.older)

    # --- comparing drafts -------------------------------------------------------------------------------------------

    def may_wait(self) -> bool:
        """Whether arrived requests need not be compared yet."""
        with self.lock:
            return self._is_sparse() and len(self.arrived) < COMPARE_EVERY

    def _is_sparse(self) -> bool:
        """Whether one compared request in `COMPARE_EVERY` suffices. Idle time is free."""
        if self._compare_all or self.config.update_strategy == "idle":
            return False
        return self.effort.share < 1

    def take_arrived(self) -> tuple[list[Trace], int]:
        """Return the arrived requests to compare, and the number of requests that each of them represents."""
        with self.lock:
            arrived = list(self.arrived)
            self.arrived.clear()
            if self._is_sparse():
                return arrived[-1:], len(arrived)
            return arrived[-COMPARE_EVERY:] if self._compare_all else arrived, 1

    def take_unwatched(self) -> list[tuple[Trace, AcceptanceStats, AcceptanceStats]]:
        """Return the requests compared since the last call, with the scores of the original and the learned draft."""
        with self.lock:
            taken = list(self.unwatched)
            self.unwatched.clear()
            return taken

    def compare(self, trace: Trace, original: AcceptanceStats, learned: AcceptanceStats) -> None:
        """Add the scores of both drafts on an arrived request."""
        with self.lock:
            if self.is_current(trace):
                self.choice.add(original, learned)
                self.effort.served(original, learned)
                self.unwatched.append((trace, original, learned))

    def begin_watching(self, version: int) -> None:
        """Watch a version that serves from now on, on the requests that it serves."""
        with self.lock:
            self.unwatched.clear()
            kept = [trace for trace in self.arrived if trace.draft_version == version]
            self.arrived.clear()
            self.arrived.extend(kept)
            self.compared.clear()

    # --- updates ----------------------------------------------------------------------------------------------------

    @property
    def update_interval(self) -> int:
        """Requests between two updates at the present effort."""
        return max(round(self.config.update_interval / self.effort.share), 1)

    @property
    def may_learn(self) -> bool:
        """Whether automatic learning is allowed now."""
        return not (self.rest or self.is_unconfirmed)

    @property
    def is_due(self) -> bool:
        """Whether an update is due."""
        return self.may_learn and self.requests_waiting >= self.update_interval

    def begin_update(self) -> list[Trace]:
        """Return the pending requests. The next update is due after an interval, even if this one fails."""
        with self.lock:
            self.requests_waiting = 0
            return list(self.pending)

    def still_valid(self, traces: Iterable[Trace]) -> list[Trace]:
        """Return those that are current and not excluded."""
        with self.lock:
            return [trace for trace in traces if self.is_current(trace) and trace not in self.set_aside]

    def end_update(self, learned: Sequence[Trace]) -> None:
        """Move requests from pending to the replay buffer."""
        with self.lock:
            for trace in learned:
                if trace in self.pending:
                    self.pending.remove(trace)
                if self.is_current(trace) and trace not in self.set_aside:
                    self.buffer.append(trace)

    def remove_excluded(self) -> None:
        """Remove requests that were excluded since."""
        with self.lock:
            self._remove(self.set_aside)

    def _remove(self, traces: Container[Trace]) -> None:
        for kept in (self.pending, self.held_back, self.arrived, self.buffer):
            for trace in [trace for trace in kept if trace in traces]:
                kept.remove(trace)

    # --- saved state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return counts and requests; everything but the traces is ready for JSON."""
        with self.lock:
            traces = {"held_back": list(self.held_back), "pending": list(self.pending), "replayed": list(self.buffer)}
            return {
                "domain": self.domain,
                "target": [self.target, *self.earlier, self.older],
                "requests_waiting": self.requests_waiting,
                "observed": self.observed,
                "dropped": self.dropped,
                "choice": self.choice.state_dict(),
                "effort": self.effort.state_dict(),
                "traces": traces,
                "set_aside": self.set_aside.state_dict(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved requests and counts. Excluded requests stay excluded."""
        self.set_aside.load_state_dict(state["set_aside"])
        traces = {group: list(filter(self.set_aside.accepts, kept)) for group, kept in state["traces"].items()}
        with self.lock:
            self.target, *earlier, self.older = state["target"]
            self.earlier = tuple(earlier[: self.target_lag])
            self.buffer.clear()
            self.buffer.extend(filter(self.is_current, traces["replayed"]))
            self.is_unconfirmed = False
            self.requests_waiting = int(state["requests_waiting"])
            self.observed = int(state["observed"])
            self.dropped = int(state["dropped"])
            self.effort.restart()
            if self.config.gate:  # without a gate, nothing shows that fewer updates suffice
                self.effort.load_state_dict(state["effort"])
            self.choice.load_state_dict(state["choice"])
            known = [trace for group in traces.values() for trace in group]
            self.vocabulary.restore(sorted(known, key=lambda trace: trace.created_at_seconds))
            self.arrived.clear()
            self.unwatched.clear()
            for kept, saved in ((self.pending, traces["pending"]), (self.held_back, traces["held_back"])):
                kept.clear()
                kept.extend(saved)
            self.compared.clear()
