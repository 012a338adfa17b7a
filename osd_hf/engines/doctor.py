"""Whether an engine drafts with the draft, and answers with the target, that it is said to have."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from osd_hf.acceptance import student_quantile
from osd_hf.engines.completions import CompletionClient, RequestRefusedError, ResponseReader, vllm_counters
from osd_hf.errors import ConfigError, ServerError
from osd_hf.models import eos_ids
from osd_hf.replay import redraft
from osd_hf.speedup import best_k, expected_block_efficiency, expected_speedup
from osd_hf.trace import Trace

__all__ = [
    "NUM_LOGPROBS", "Counts", "Finding", "Fit", "Window", "as_engine", "fit", "judge_draft", "judge_pay",
    "judge_target", "other_versions", "quiet", "sample",
]  # fmt: skip

NUM_LOGPROBS = 20  # which vLLM gives without a flag
LEAST_WINDOWS = 8  # below which nothing is judged
SURE = 3.290527  # standard errors on both sides of 99.9%
MARGIN = 0.02  # of alpha: a draft that is as good, or the same one in another dtype, which rounds otherwise
FOREIGN = 0.1  # of the rounds that may be other clients' before nothing can be told
TIE = 0.25  # nats, within which another dtype may choose another token: bfloat16 parted from float32 by 0.07 at most
MOVED = 0.02  # mean total variation from which a target is another one: bfloat16 moved by 0.004
PARTED = 0.1  # of the answers that may part from the target's beyond ties
PAYS = 0.95  # of the speed of the target alone: what is closer to it than this is not said to lose
SETTLE_SECONDS, PAUSE = 5.0, 0.05  # for counters that follow the answers

_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos@"
_NAMES = (
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "generation_tokens",
    "inter_token_latency_seconds_count", "inter_token_latency_seconds_sum",
)  # fmt: skip


# --- counters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """
    What vLLM counts in `/metrics`, over all its engines, or what it has counted between two looks.

    Args:
        values (`np.ndarray` of shape `(5 + k,)`, float64):
            Rounds that drafted, and tokens that these drafted; tokens of answers; rounds of all requests, and the
            seconds that these took; drafted tokens that were accepted, by their place in the round. k is 0 where the
            engine has no draft.
    """

    values: NDArray[np.float64]

    @classmethod
    def read(cls, text: str) -> Counts:
        """From the text of `/metrics`; raises ServerError where it is not vLLM's."""
        found = vllm_counters(text)
        if "generation_tokens" not in found:
            raise ServerError("Its /metrics are not vLLM's: name the engine itself, not what stands before it.")
        k = sum(name.startswith(_PER_POSITION) for name in found)
        return cls(np.array([found[name] for name in (*_NAMES, *(f"{_PER_POSITION}{i}" for i in range(k)))]))

    def __sub__(self, other: Counts) -> Counts:
        if len(self.values) != len(other.values) or (self.values < other.values).any():
            raise ServerError("The engine has started anew meanwhile. Ask again.")
        return Counts(self.values - other.values)

    @classmethod
    def joined(cls, counts: Iterable[Counts]) -> Counts:
        """All of them together."""
        return cls(np.sum([those.values for those in counts], axis=0))

    @property
    def drafts(self) -> float:
        """Rounds that drafted."""
        return float(self.values[0])

    @property
    def drafted(self) -> float:
        """Tokens that were drafted."""
        return float(self.values[1])

    @property
    def tokens(self) -> float:
        """Tokens of answers."""
        return float(self.values[2])

    @property
    def round_seconds(self) -> float:
        """What a round took on average; `nan` before the first."""
        return float(self.values[4] / self.values[3]) if self.values[3] else math.nan

    @property
    def k(self) -> int:
        """Tokens that a round drafts; 0 without a draft."""
        return len(self.values) - len(_NAMES)

    @property
    def accepted(self) -> float:
        """Drafted tokens that were accepted, those after the end of an answer included."""
        return float(self.values[len(_NAMES) :].sum())

    @property
    def alpha(self) -> float:
        """Accepted over examined tokens: a round examines its first token, and each one behind an accepted one;
        `nan` before the first round."""
        return self.accepted / (self.drafts + float(self.values[len(_NAMES) : -1].sum())) if self.drafts else math.nan


# --- asking ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Some answers that an engine gave at once, and what it counted meanwhile."""

    answers: tuple[Trace, ...]
    counts: Counts

    @property
    def foreign(self) -> float:
        """Tokens of other clients' answers."""
        return self.counts.tokens - sum(map(len, self.answers))


def sample(
    client: CompletionClient, reader: ResponseReader, prompts: Sequence[Sequence[int]], *, windows: int,
    concurrency: int, max_new_tokens: int,
) -> Iterator[Window]:  # fmt: skip
    """
    Ask an engine for greedy answers, `concurrency` at once, and look at its counters before and after them, until
    there are `windows` that no other client's answer fell into, or no prompts any more. A prompt that is refused is
    left out.

    Args:
        client (`CompletionClient`), reader (`ResponseReader`): Who asks, and who reads.
        prompts (`Sequence[Sequence[int]]`): Token ids.
        windows (`int`), concurrency (`int`), max_new_tokens (`int`): How many, and how long.

    Raises:
        ServerError: the engine went away, refused all, or its counters do not see all answers.
        DataError: answers without token ids or log-probs.
    """
    seen = Counts.read(client.metrics())

    def ask(prompt: Sequence[int]) -> list[Trace]:
        try:
            asked = client.complete(prompt, max_new_tokens=max_new_tokens, num_logprobs=reader.num_logprobs)
        except RequestRefusedError as error:
            refused.append(error)
            return []
        return reader.traces(asked[1], asked[0])

    refused: list[RequestRefusedError] = []
    seen_windows = kept = 0
    with ThreadPoolExecutor(concurrency) as threads:
        for first in range(0, len(prompts) - concurrency + 1, concurrency):
            found = threads.map(ask, prompts[first : first + concurrency])
            answers = tuple(trace for traces in found for trace in traces)
            now = _settled(client, seen.tokens + sum(map(len, answers)), seen)
            if answers:
                window = Window(answers, now - seen)
                kept += window.foreign == 0
                seen_windows += 1
                yield window
            seen = now
            if kept == windows:
                return
    if refused and not seen_windows:
        raise refused[-1]


def _settled(client: CompletionClient, tokens: float, before: Counts) -> Counts:
    """The counters, once they have counted so many tokens of answers."""
    until = time.monotonic() + SETTLE_SECONDS
    while (now := Counts.read(client.metrics())).tokens < tokens:
        if time.monotonic() > until:
            raise ServerError(
                f"Of {tokens - before.tokens:.0f} tokens that were answered its /metrics have counted "
                f"{now.tokens - before.tokens:.0f}: several engines share the address. Name one of them."
            )
        time.sleep(PAUSE)
    return now


def quiet(windows: Sequence[Window]) -> list[Window]:
    """The windows that no other client's answer fell into, where they are enough to judge by; otherwise all."""
    alone = [window for window in windows if window.foreign == 0]
    return alone if len(alone) >= LEAST_WINDOWS else list(windows)


# --- the draft ------------------------------------------------------------------------------------------------------


def as_engine(trace: Trace) -> Trace:
    """The trace as vLLM drafts for it: its first token comes with the prompt and is not drafted, and a round drafts k
    tokens up to the end."""
    ids = np.concatenate([trace.prompt_ids, trace.completion_ids[:1]])
    rows = {name: getattr(trace, name)[1:] for name in ("completion_ids", "top_logits", "top_ids", "tail_logprob")}
    sampling = {key: value for key, value in trace.sampling.items() if key != "max_new_tokens"}
    return replace(trace, prompt_ids=ids, sampling=sampling, **rows)


@dataclass(frozen=True)
class Fit:
    """
    What an engine would have counted with a draft, beside what it has.

    Args:
        name (`str`): Of the draft.
        k (`int`): Tokens that a round drafts.
        alpha (`float`): Accepted over examined tokens, as the engine counts them.
        rounds (`np.ndarray` of shape `(windows,)`, float64): That the draft needs for the answers of each window.
        counted (`np.ndarray` of shape `(windows,)`, float64):
            Those of the engine. Where other clients' fell into the window, as many of these are left out as bring it
            next to `rounds`, so that they raise no alarm.
    """

    name: str
    k: int
    alpha: float
    rounds: NDArray[np.float64]
    counted: NDArray[np.float64]

    @property
    def off(self) -> NDArray[np.float64]:
        """By how many rounds the engine differs in each window."""
        return np.abs(self.counted - self.rounds)

    @property
    def ratio(self) -> float:
        """Rounds of the engine over those of this draft."""
        return float(self.counted.sum() / max(self.rounds.sum(), 1.0))

    @property
    def width(self) -> float:
        """Half of the 99.9% interval of the ratio, by its standard error over windows."""
        n = len(self.rounds)
        residuals = (self.counted - self.ratio * self.rounds) / max(self.rounds.mean(), 1.0)
        return student_quantile(SURE, n) * float(np.std(residuals, ddof=1)) / math.sqrt(n)

    @property
    def margin(self) -> float:
        """By how much the ratio changes with alpha by [`MARGIN`]."""
        alpha = min(max(self.alpha, 0.0), 1 - MARGIN)
        more, less = (expected_block_efficiency(a, self.k) for a in (alpha + MARGIN, alpha))
        return more / less - 1


def fit(windows: Sequence[Window], draft: Any, name: str) -> Fit:
    """Replay the answers of an engine with a draft. What counts is how many rounds it takes: unlike accepted tokens,
    of which the engine counts those after the end of an answer as well, they are known exactly."""
    k = windows[0].counts.k
    traces = [as_engine(trace) for window in windows for trace in window.answers if len(trace) > 1]
    drafted = iter(redraft(draft, traces, k))
    by_window = [[next(drafted) for trace in window.answers if len(trace) > 1] for window in windows]
    rounds = np.array([sum(len(trace.rounds) for trace in traces) for traces in by_window], np.float64)
    counted = np.array([window.counts.drafts for window in windows])
    # A round of another client emits a token at least.
    foreign = np.array([window.foreign for window in windows])
    counted = np.clip(rounds, np.maximum(counted - foreign, 0), counted)
    return Fit(name, k, _alpha([trace for traces in by_window for trace in traces], k), rounds, counted)


def _alpha(drafted: Sequence[Trace], k: int) -> float:
    """Accepted over examined tokens of some rounds, as the engine counts them: it drafts k tokens in the last round of
    an answer, too, and examines those after its end. They are taken to be accepted as often as the others, and never
    after a token that ends the text."""
    accepted = float(sum(r.num_accepted for trace in drafted for r in trace.rounds))
    examined = float(sum(r.num_examined for trace in drafted for r in trace.rounds))
    alpha = accepted / examined if examined else math.nan
    for trace in drafted:
        last = trace.rounds[-1]
        if last.num_accepted == last.num_emitted < k:
            go_on = 0.0 if int(trace.completion_ids[-1]) in eos_ids(trace.sampling) else alpha
            more = expected_block_efficiency(go_on, k - last.num_accepted - 1)
            examined, accepted = examined + more, accepted + go_on * more
    return accepted / examined if examined else math.nan


def other_versions(draft: Path) -> list[Path]:
    """The other versions in the folder of versions that a draft lies in, newest first; none where it is no version."""
    draft = draft.resolve()
    found = sorted((facts.parent for facts in draft.parent.glob("v*/version.json")), reverse=True)
    return [path for path in found if path != draft] if draft in found else []


# --- verdicts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """
    One sentence of a verdict.

    Args:
        about (`str`): `"engine"`, `"vocabulary"`, `"draft"`, `"target"` or `"speed"`.
        state (`str`): `"healthy"`, `"ill"`, `"unknown"`, or `"note"`, which says something beside these.
        text (`str`): The sentence, with figures.
        figures (`dict[str, Any]`, *optional*): The same for machines.
    """

    about: Literal["engine", "vocabulary", "draft", "target", "speed"]
    state: Literal["healthy", "ill", "unknown", "note"]
    text: str
    figures: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Field by field, ready for JSON."""
        return asdict(self)


def judge_draft(windows: Sequence[Window], given: Fit, others: Iterable[Fit]) -> Finding:
    """
    Whether an engine drafts with this draft: the rounds that it took for its answers are those that the draft needs,
    within a 99.9% interval and a margin of 0.02 of alpha.

    Args:
        windows (`Sequence[Window]`): What was asked; at least eight.
        given (`Fit`): Of the draft that the engine should have.
        others (`Iterable[Fit]`): Of other versions; taken only where rounds differ.

    Raises:
        ConfigError: fewer than eight windows.
    """
    if len(windows) < LEAST_WINDOWS:
        raise ConfigError(f"At least {LEAST_WINDOWS} windows are needed to judge by, got {len(windows)}. Ask more.")
    total = Counts.joined(window.counts for window in windows)
    needed, foreign = float(given.rounds.sum()), sum(window.foreign for window in windows)
    figures: dict[str, Any] = {
        "k": given.k, "alpha_counted": total.alpha, "alpha_draft": given.alpha, "rounds": needed,
        "rounds_counted": float(given.counted.sum()), "ratio": given.ratio, "ratio_half_width": given.width,
        "ratio_margin": given.margin, "windows": len(windows), "equal_windows": int((given.off == 0).sum()),
        "foreign_tokens": foreign,
    }  # fmt: skip

    def found(state: Literal["healthy", "ill", "unknown"], text: str) -> Finding:
        return Finding("draft", state, text, figures)

    if not given.counted.sum() + needed:
        return found("unknown", "the answers are too short to draft in: ask for more new tokens")
    if not total.drafts:
        return found("ill", f"the engine has a draft, but it drafted nothing for {total.tokens:.0f} tokens")
    if total.drafted != given.k * total.drafts:
        mean = total.drafted / total.drafts
        return found("unknown", f"it drafts {mean:.2f} tokens a round, not always {given.k}: replay needs one k")
    shown = (
        f"the engine accepts {total.alpha:.3f} of what it drafts, in {given.counted.sum():.0f} rounds, where "
        f"{given.name} has {given.alpha:.3f} and {needed:.0f} on the same answers"
    )
    best = min(others, key=lambda other: other.off.sum(), default=None) if given.off.any() else None
    if best is not None:
        figures |= {"best_version": best.name, "best_ratio": best.ratio}
        if _is_nearer(best, given) and abs(best.ratio - 1) <= best.margin:
            return found("ill", f"{shown}: stale weights; {best.name} fits, with {best.alpha:.3f}")
    off = abs(given.ratio - 1)
    if off > given.margin + given.width:
        why = "stale or wrongly loaded weights" if given.ratio > 1 else "it has another draft, a better one"
        known = "" if best is None else ", and no other version there fits"
        return found("ill", f"{shown}: {why}{known}")
    if foreign > FOREIGN * needed:
        return found("unknown", f"{shown}, but {foreign:.0f} tokens were other clients': ask when it is quiet")
    if off > given.margin:
        return found("unknown", f"{shown}, which is too close to call: ask more")
    unequal = len(windows) - figures["equal_windows"]
    or_else = f", or one as good: rounds differ in {unequal} of {len(windows)} windows" if unequal else ""
    return found("healthy", f"{shown}: it is this draft{or_else}")


def _is_nearer(one: Fit, other: Fit) -> bool:
    """Whether the rounds of the engine are much nearer to those of one draft than to those of the other: where the
    right one differs, it does as rounding has it, now and then."""
    near, far = float(one.off.sum()), float(other.off.sum())
    return far - near > SURE * math.sqrt(far + near) and 2 * near < far


def judge_target(pairs: Sequence[tuple[Trace, Trace]], whose: str) -> Finding:
    """
    Whether an engine answers as its target did, or does here.

    Args:
        pairs (`Sequence[tuple[Trace, Trace]]`):
            What is known of the target, and the engine's answer to the same prompt, as far as both agree: a recorded
            answer, or the rows of a target for this one.
        whose (`str`): What is known, as it is called in the sentence.
    """
    found = [_departure(known, now) for known, now in pairs]
    positions = sum(len(moved) for moved, _ in found)
    moved = float(np.concatenate([moved for moved, _ in found]).mean())
    parted = sum(has_parted for _, has_parted in found)
    figures = {"answers": len(pairs), "positions": positions, "parted": parted, "mean_total_variation": moved}
    shown = f"{parted} of {len(pairs)} answers part from {whose} beyond ties, and distributions differ by {moved:.3f}"
    if moved > MOVED or parted > PARTED * len(pairs):
        return Finding("target", "ill", f"the target has changed: {shown}", figures)
    return Finding("target", "healthy", f"the target is the same: {shown}", figures)


def _departure(known: Trace, now: Trace) -> tuple[NDArray[np.float64], bool]:
    """Total variation between the rows at positions that have the same context, float64 of shape `(positions,)`, and
    whether the second answer takes a token there that the first's rows do not have among their best."""
    shared = min(len(known), len(now))
    others = np.flatnonzero(known.completion_ids[:shared] != now.completion_ids[:shared])
    end = int(others[0]) + 1 if len(others) else shared
    (ids, logprobs), (ids_now, logprobs_now) = (_largest(trace, end) for trace in (known, now))
    same = ids[:, :, None] == ids_now[:, None, :]
    p, q = np.exp(logprobs), (same * np.exp(logprobs_now)[:, None, :]).sum(axis=2)
    taken = np.where(ids == now.completion_ids[:end, None], logprobs, -np.inf).max(axis=1)
    return np.abs(p - q).sum(axis=1) / 2, bool((logprobs.max(axis=1) - taken > TIE).any())


def _largest(trace: Trace, end: int) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """The most probable ids of the first rows and their log-probs, both of shape `(end, at most NUM_LOGPROBS)`."""
    logprobs = trace.kept_logprobs(slice(end)).astype(np.float64)
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :NUM_LOGPROBS]
    ids = np.take_along_axis(trace.top_ids[:end].astype(np.int64), order, axis=1) if trace.top_ids.shape[1] else order
    return ids, np.take_along_axis(logprobs, order, axis=1)


def judge_pay(counts: Counts, token_seconds: float | None) -> Finding:
    """
    Whether drafting is worth its time, at the load that the counts are of.

    Args:
        counts (`Counts`): Of windows with drafts.
        token_seconds (`float`, *optional*): What a token takes in the engine without a draft, at this load.
    """
    per_round, seconds = 1 + counts.accepted / counts.drafts, counts.round_seconds
    figures = {"tokens_per_round": per_round, "round_seconds": seconds, "token_seconds": token_seconds}
    shown = f"a round takes {1e3 * seconds:.1f} ms and emits {per_round:.2f} tokens"
    if token_seconds is None or math.isnan(seconds):
        least = seconds / per_round
        text = f"{shown}: drafting pays if a token takes more than {1e3 * least:.1f} ms without a draft"
        return Finding("speed", "note", text, figures)
    c = max(seconds / token_seconds - 1, 0.0) / counts.k
    speedup, k = per_round * token_seconds / seconds, best_k(counts.alpha, c, counts.k)
    expected = expected_speedup(counts.alpha, k, c)
    figures |= {"c": c, "speedup": speedup, "best_k": k, "speedup_at_best_k": expected}
    shown += f", a token {1e3 * token_seconds:.1f} ms without a draft"
    if speedup < PAYS:
        advice = f"k = {k} would, {expected:.2f} times as fast by the cost model" if k else "no k would"
        return Finding("speed", "ill", f"drafting does not pay at this load: {shown}; {advice}", figures)
    return Finding("speed", "healthy", f"drafting is {speedup:.2f} times as fast at this load: {shown}", figures)
