"""
Check that a vLLM engine drafts and answers with the models that it should have.

    python recipes/doctor.py --url http://localhost:8000 --target TARGET --draft versions/latest --store STORE
    python recipes/doctor.py --url http://localhost:8000 --target TARGET --draft DRAFT --prompts prompts.jsonl

The recipe asks the engine for greedy answers, reads its counters, and replays the answers with the draft. The engine
has this draft if it needed as many rounds as the replay. While `osd-hf learn --deploy` watches a version, nothing is
asked, because the questions would move the counters by which it decides, and the engine may have another version than
`latest`; `--ask` asks all the same. Exit codes: 0 healthy, 1 something is wrong, 2 unknown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from osd_hf import CorrectionStore, Trace, best_k, expected_block_efficiency, expected_speedup
from osd_hf.acceptance import student_quantile
from osd_hf.engines.completions import CompletionClient, RequestRefusedError, ResponseReader, vllm_counters
from osd_hf.engines.versions import JOURNAL
from osd_hf.errors import DataError, OSDError, ServerError
from osd_hf.models import eos_ids, load_config, load_eos_ids, load_model, load_tokenizer, vocab_size_of
from osd_hf.prompts import PromptSource, encode_prompts, read_prompts
from osd_hf.recording import scored
from osd_hf.replay import redraft

NUM_LOGPROBS = 20  # vLLM's limit without a flag
MIN_WINDOWS = 8
Z_999 = 3.290527  # standard errors on both sides of 99.9%
ALPHA_MARGIN = 0.02  # difference of alpha that is no error: the same draft in another dtype
FOREIGN_SHARE = 0.1  # share of the rounds that may belong to other clients
TIE = 0.25  # nats within which another dtype may choose another token
MAX_TOTAL_VARIATION = 0.02  # mean difference of distributions of one target; bfloat16 moved by 0.004
MAX_DIFFERING_SHARE = 0.1  # share of answers that may differ beyond ties
MIN_SPEEDUP = 0.95
SETTLE_SECONDS, PAUSE_SECONDS = 5.0, 0.05  # counters follow the answers
NUM_CHECKED = 8  # answers that the target's weights score, with --check-target
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos@"
COUNTERS = (
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "generation_tokens",
    "inter_token_latency_seconds_count", "inter_token_latency_seconds_sum",
)  # fmt: skip

# --- counters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineCounters:
    """Counters of vLLM's `/metrics`: rounds, drafted tokens, answered tokens, rounds of all requests, their seconds,
    and accepted tokens by position, float64 of shape `(5 + k,)`."""

    values: NDArray[np.float64]

    @classmethod
    def read(cls, text: str) -> EngineCounters:
        """Parse the text of `/metrics`; raises ServerError."""
        found = vllm_counters(text)
        if "generation_tokens" not in found:
            raise ServerError("Its /metrics are not vLLM's: name the engine itself, not a proxy.")
        k = sum(name.startswith(PER_POSITION) for name in found)
        return cls(np.array([found[name] for name in (*COUNTERS, *(f"{PER_POSITION}{i}" for i in range(k)))]))

    def __sub__(self, other: EngineCounters) -> EngineCounters:
        if len(self.values) != len(other.values) or (self.values < other.values).any():
            raise ServerError("The engine restarted meanwhile. Ask again.")
        return EngineCounters(self.values - other.values)

    @classmethod
    def total(cls, counters: Iterable[EngineCounters]) -> EngineCounters:
        """Return the sum."""
        return cls(np.sum([one.values for one in counters], axis=0))

    @property
    def drafts(self) -> float:
        """Rounds with a draft."""
        return float(self.values[0])

    @property
    def drafted(self) -> float:
        """Drafted tokens."""
        return float(self.values[1])

    @property
    def tokens(self) -> float:
        """Tokens of answers."""
        return float(self.values[2])

    @property
    def round_seconds(self) -> float:
        """Mean seconds of a round; `nan` before the first."""
        return float(self.values[4] / self.values[3]) if self.values[3] else math.nan

    @property
    def k(self) -> int:
        """Drafted tokens per round; 0 without a draft."""
        return len(self.values) - len(COUNTERS)

    @property
    def accepted(self) -> float:
        """Accepted tokens, with those after the end of an answer."""
        return float(self.values[len(COUNTERS) :].sum())

    @property
    def alpha(self) -> float:
        """Accepted over examined tokens; `nan` before the first round."""
        return (
            self.accepted / (self.drafts + float(self.values[len(COUNTERS) : -1].sum())) if self.drafts else math.nan
        )


@dataclass(frozen=True)
class Window:
    """Answers of one group of concurrent requests, and the change of the counters."""

    answers: tuple[Trace, ...]
    counts: EngineCounters

    @property
    def foreign(self) -> float:
        """Tokens of other clients' answers."""
        return self.counts.tokens - sum(map(len, self.answers))


def ask(
    client: CompletionClient, reader: ResponseReader, prompts: Sequence[Sequence[int]], *, windows: int,
    concurrency: int, max_new_tokens: int,
) -> Iterator[Window]:  # fmt: skip
    """Yield windows of greedy answers until enough of them had no other client; raises ServerError."""
    seen = EngineCounters.read(client.metrics())
    refused: list[RequestRefusedError] = []
    num_windows = num_quiet = 0

    def answer(prompt: Sequence[int]) -> list[Trace]:
        try:
            asked = client.complete(prompt, max_new_tokens=max_new_tokens, num_logprobs=reader.num_logprobs)
        except RequestRefusedError as error:
            refused.append(error)
            return []
        return reader.traces(asked[1], asked[0])

    with ThreadPoolExecutor(concurrency) as threads:
        for first in range(0, len(prompts) - concurrency + 1, concurrency):
            found = threads.map(answer, prompts[first : first + concurrency])
            answers = tuple(trace for traces in found for trace in traces)
            now = _settled(client, seen.tokens + sum(map(len, answers)), seen)
            if answers:
                window = Window(answers, now - seen)
                num_quiet += window.foreign == 0
                num_windows += 1
                yield window
            seen = now
            if num_quiet == windows:
                return
    if refused and not num_windows:
        raise refused[-1]


def _settled(client: CompletionClient, tokens: float, before: EngineCounters) -> EngineCounters:
    """Return the counters when they have counted the answers."""
    until = time.monotonic() + SETTLE_SECONDS
    while (now := EngineCounters.read(client.metrics())).tokens < tokens:
        if time.monotonic() > until:
            raise ServerError(
                f"Of {tokens - before.tokens:.0f} answered tokens its /metrics have counted "
                f"{now.tokens - before.tokens:.0f}: several engines share the address. Name one of them."
            )
        time.sleep(PAUSE_SECONDS)
    return now


def quiet(windows: Sequence[Window]) -> list[Window]:
    """Return the windows without other clients, or all if these are too few."""
    alone = [window for window in windows if window.foreign == 0]
    return alone if len(alone) >= MIN_WINDOWS else list(windows)


# --- replay ---------------------------------------------------------------------------------------------------------


def as_engine(trace: Trace) -> Trace:
    """Return the trace as vLLM drafts for it: the prompt's round emits the first token, others draft k."""
    ids = np.concatenate([trace.prompt_ids, trace.completion_ids[:1]])
    rows = {name: getattr(trace, name)[1:] for name in ("completion_ids", "top_logits", "top_ids", "tail_logprob")}
    sampling = {key: value for key, value in trace.sampling.items() if key != "max_new_tokens"}
    return replace(trace, prompt_ids=ids, sampling=sampling, **rows)


@dataclass(frozen=True)
class Fit:
    """Rounds per window that a draft needs by replay (`rounds`) and that the engine took (`counted`), float64 of shape
    `(windows,)`. Rounds that other clients may have taken are left out of `counted`."""

    name: str
    k: int
    alpha: float
    rounds: NDArray[np.float64]
    counted: NDArray[np.float64]

    @property
    def difference(self) -> NDArray[np.float64]:
        """Absolute difference per window."""
        return np.abs(self.counted - self.rounds)

    @property
    def ratio(self) -> float:
        """Rounds of the engine over those of the draft."""
        return float(self.counted.sum() / max(self.rounds.sum(), 1.0))

    @property
    def half_width(self) -> float:
        """Half of the 99.9% interval of the ratio, by its standard error over windows."""
        n = len(self.rounds)
        residuals = (self.counted - self.ratio * self.rounds) / max(self.rounds.mean(), 1.0)
        return student_quantile(Z_999, n) * float(np.std(residuals, ddof=1)) / math.sqrt(n)

    @property
    def margin(self) -> float:
        """Change of the ratio when alpha changes by `ALPHA_MARGIN`."""
        alpha = min(max(self.alpha, 0.0), 1 - ALPHA_MARGIN)
        more, less = (expected_block_efficiency(a, self.k) for a in (alpha + ALPHA_MARGIN, alpha))
        return more / less - 1


def fit(windows: Sequence[Window], draft: PreTrainedModel, name: str) -> Fit:
    """Replay the answers with a draft. Rounds are compared, as the engine also counts tokens after an answer's end."""
    k = windows[0].counts.k
    traces = [as_engine(trace) for window in windows for trace in window.answers if len(trace) > 1]
    drafted = iter(redraft(draft, traces, k))
    by_window = [[next(drafted) for trace in window.answers if len(trace) > 1] for window in windows]
    rounds = np.array([sum(len(trace.rounds) for trace in traces) for traces in by_window], np.float64)
    counted = np.array([window.counts.drafts for window in windows])
    foreign = np.array([window.foreign for window in windows])  # a round emits at least one token
    counted = np.clip(rounds, np.maximum(counted - foreign, 0), counted)
    return Fit(name, k, _alpha([trace for traces in by_window for trace in traces], k), rounds, counted)


def _alpha(drafted: Sequence[Trace], k: int) -> float:
    """Return alpha as the engine counts: the last round drafts k tokens too, and examines them after the end."""
    accepted = float(sum(r.num_accepted for trace in drafted for r in trace.rounds))
    examined = float(sum(r.num_examined for trace in drafted for r in trace.rounds))
    alpha = accepted / examined if examined else math.nan
    for trace in drafted:
        last = trace.rounds[-1]
        if last.num_accepted == last.num_emitted < k:
            assumed = 0.0 if int(trace.completion_ids[-1]) in eos_ids(trace.sampling) else alpha
            more = expected_block_efficiency(assumed, k - last.num_accepted - 1)
            examined, accepted = examined + more, accepted + assumed * more
    return accepted / examined if examined else math.nan


# --- verdicts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One sentence of the verdict, with its figures."""

    about: Literal["engine", "vocabulary", "draft", "target", "speed"]
    state: Literal["healthy", "ill", "unknown", "note"]
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


def judge_draft(windows: Sequence[Window], given: Fit, others: Iterable[Fit]) -> Finding:
    """Decide whether the engine has this draft: its rounds lie within a 99.9% interval and a margin of alpha. `others`
    are fits of other versions, which are computed only if rounds differ."""
    if len(windows) < MIN_WINDOWS:
        raise DataError(f"At least {MIN_WINDOWS} windows are needed, got {len(windows)}. Ask more prompts.")
    total = EngineCounters.total(window.counts for window in windows)
    needed, foreign = float(given.rounds.sum()), sum(window.foreign for window in windows)
    figures: dict[str, Any] = {
        "k": given.k, "alpha_counted": total.alpha, "alpha_draft": given.alpha, "rounds": needed,
        "rounds_counted": float(given.counted.sum()), "ratio": given.ratio, "ratio_half_width": given.half_width,
        "ratio_margin": given.margin, "windows": len(windows), "equal_windows": int((given.difference == 0).sum()),
        "foreign_tokens": foreign,
    }  # fmt: skip

    def found(state: Literal["healthy", "ill", "unknown"], text: str) -> Finding:
        return Finding("draft", state, text, figures)

    if not given.counted.sum() + needed:
        return found("unknown", "the answers are too short for drafts: ask for more new tokens")
    if not total.drafts:
        return found("ill", f"the engine has a draft, but drafted nothing for {total.tokens:.0f} tokens")
    if total.drafted != given.k * total.drafts:
        mean = total.drafted / total.drafts
        return found("unknown", f"it drafts {mean:.2f} tokens per round, not always {given.k}: replay needs one k")
    shown = (
        f"the engine accepts {total.alpha:.3f} of the drafted tokens in {given.counted.sum():.0f} rounds; "
        f"{given.name} has {given.alpha:.3f} and {needed:.0f} on the same answers"
    )
    best = min(others, key=lambda other: other.difference.sum(), default=None) if given.difference.any() else None
    if best is not None:
        figures |= {"best_version": best.name, "best_ratio": best.ratio}
        if _fits_better(best, given) and abs(best.ratio - 1) <= best.margin:
            return found("ill", f"{shown}: stale weights; {best.name} fits, with {best.alpha:.3f}")
    deviation = abs(given.ratio - 1)
    if deviation > given.margin + given.half_width:
        reason = "stale or wrongly loaded weights" if given.ratio > 1 else "it has another, better draft"
        return found("ill", f"{shown}: {reason}" + ("" if best is None else ", and no other version fits"))
    if foreign > FOREIGN_SHARE * needed:
        return found("unknown", f"{shown}, but {foreign:.0f} tokens were other clients': ask when it is quiet")
    if deviation > given.margin:
        return found("unknown", f"{shown}, which is too close to call: ask more prompts")
    unequal = len(windows) - figures["equal_windows"]
    also = f", or one as good: rounds differ in {unequal} of {len(windows)} windows" if unequal else ""
    return found("healthy", f"{shown}: it is this draft{also}")


def _fits_better(one: Fit, other: Fit) -> bool:
    near, far = float(one.difference.sum()), float(other.difference.sum())
    return far - near > Z_999 * math.sqrt(far + near) and 2 * near < far


def judge_target(pairs: Sequence[tuple[Trace, Trace]], reference: str) -> Finding:
    """Decide whether the engine's target is the known one, by pairs of a known and a new answer to one prompt."""
    found = [_compare_answers(known, now) for known, now in pairs]
    variation = float(np.concatenate([moved for moved, _ in found]).mean())
    differing = sum(differs for _, differs in found)
    figures = {"answers": len(pairs), "differing": differing, "mean_total_variation": variation}
    shown = (
        f"{differing} of {len(pairs)} answers differ from {reference} beyond ties, probabilities by {variation:.2f}"
    )
    if variation > MAX_TOTAL_VARIATION or differing > MAX_DIFFERING_SHARE * len(pairs):
        return Finding("target", "ill", f"the target has changed: {shown}", figures)
    return Finding("target", "healthy", f"the target is the same: {shown}", figures)


def _compare_answers(known: Trace, now: Trace) -> tuple[NDArray[np.float64], bool]:
    """Return the total variation at positions with the same context, and whether the answers differ beyond ties."""
    shared = min(len(known), len(now))
    others = np.flatnonzero(known.completion_ids[:shared] != now.completion_ids[:shared])
    end = int(others[0]) + 1 if len(others) else shared
    (ids, logprobs), (ids_now, logprobs_now) = (_top_rows(trace, end) for trace in (known, now))
    same = ids[:, :, None] == ids_now[:, None, :]
    p, q = np.exp(logprobs), (same * np.exp(logprobs_now)[:, None, :]).sum(axis=2)
    taken = np.where(ids == now.completion_ids[:end, None], logprobs, -np.inf).max(axis=1)
    return np.abs(p - q).sum(axis=1) / 2, bool((logprobs.max(axis=1) - taken > TIE).any())


def _top_rows(trace: Trace, end: int) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Return the most probable ids of the first rows and their log-probs, `(end, at most NUM_LOGPROBS)`."""
    logprobs = trace.kept_logprobs(slice(end)).astype(np.float64)
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :NUM_LOGPROBS]
    ids = np.take_along_axis(trace.top_ids[:end].astype(np.int64), order, axis=1) if trace.top_ids.shape[1] else order
    return ids, np.take_along_axis(logprobs, order, axis=1)


def judge_speed(counts: EngineCounters, token_seconds: float | None) -> Finding:
    """Decide whether drafting pays at this load, given the seconds of a token without a draft."""
    per_round, seconds = 1 + counts.accepted / counts.drafts, counts.round_seconds
    figures = {"tokens_per_round": per_round, "round_seconds": seconds, "token_seconds": token_seconds}
    shown = f"a round takes {1e3 * seconds:.1f} ms and emits {per_round:.2f} tokens"
    if token_seconds is None or math.isnan(seconds):
        text = f"{shown}: drafting pays if a token takes more than {1e3 * seconds / per_round:.1f} ms without a draft"
        return Finding("speed", "note", text, figures)
    c = max(seconds / token_seconds - 1, 0.0) / counts.k
    speedup, k = per_round * token_seconds / seconds, best_k(counts.alpha, c, counts.k)
    expected = expected_speedup(counts.alpha, k, c)
    figures |= {"c": c, "speedup": speedup, "best_k": k, "speedup_at_best_k": expected}
    shown += f", a token {1e3 * token_seconds:.1f} ms without a draft"
    if speedup < MIN_SPEEDUP:
        advice = f"k = {k} would, {expected:.2f} times as fast by the cost model" if k else "no k would"
        return Finding("speed", "ill", f"drafting does not pay at this load: {shown}; {advice}", figures)
    return Finding("speed", "healthy", f"drafting is {speedup:.2f} times as fast at this load: {shown}", figures)


# --- the command ----------------------------------------------------------------------------------------------------


def watched_version(folder: Path) -> tuple[int, int] | None:
    """Return the version that a learner watches in engines, and the one that it may replace, by the journal in the
    folder of the versions; `None` if there is no such version."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        state = json.loads((folder / JOURNAL).read_text().splitlines()[-1])["state"]
        return None if state["candidate"] is None else (state["candidate"], state["serving"])
    return None


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings about an engine."""
    if not args.ask and (found := watched_version(Path(args.draft).absolute().parent)):
        text = "version {} is being watched in place of version {}; look again once it is kept or rolled back"
        yield Finding("deployment", "note", text.format(*found))
        return
    config, path = load_config(args.target), Path(args.draft)
    source = str(path.resolve()) if path.exists() else args.draft  # a link may point to a newer version later
    size, draft = int(config.get_text_config().vocab_size), load_model(source, dtype=args.dtype)
    if (own := vocab_size_of(draft)) != size:
        yield Finding(
            "vocabulary", "ill", f"the draft has {own} tokens, the target {size}: see `osd-hf push --export`"
        )
        return
    reader = ResponseReader(size, min(NUM_LOGPROBS, size), load_eos_ids(args.target))
    with CompletionClient(args.url, args.model, api_key=args.api_key) as client:
        k = EngineCounters.read(client.metrics()).k
        if not k:
            yield Finding("engine", "ill", "the engine has no draft: start it with --speculative-config")
            return
        known = {t.prompt_ids.tobytes(): t for t in CorrectionStore(args.store) if t.num_kept} if args.store else {}
        prompts = [trace.prompt_ids.tolist() for trace in known.values()][-2 * args.num_requests :]
        if not known:
            rows = read_prompts(PromptSource(args.prompts, column=args.column))
            encoded = encode_prompts(rows, load_tokenizer(args.target), limit=2 * args.num_requests)
            prompts = [ids for _, ids in encoded.prompts]
        most = client.models().get(client.model, {}).get("max_model_len")  # as vLLM tells it
        fitting = [ids for ids in prompts if most is None or len(ids) <= most - args.max_new_tokens - k]
        windows = list(
            ask(
                client,
                reader,
                fitting,
                windows=args.num_requests // args.concurrency,
                concurrency=args.concurrency,
                max_new_tokens=args.max_new_tokens,
            )  # fmt: skip
        )
    chosen = quiet(windows)
    if len(chosen) < MIN_WINDOWS:
        raise DataError(f"{len(fitting)} prompts fit; at least {MIN_WINDOWS * args.concurrency} are needed.")
    answers = [trace for window in windows for trace in window.answers]
    if known:
        yield judge_target([(known[now.prompt_ids.tobytes()], now) for now in answers], "those of the store")
    if args.check_target:
        target, some = load_model(args.target, dtype=args.dtype), answers[:NUM_CHECKED]
        rows = scored(target, some, [reader.num_logprobs] * len(some), NUM_CHECKED)
        yield judge_target(list(zip(rows, some, strict=True)), f"those of {Path(args.target).name} here")
    folder = Path(source).parent
    others = [p.parent for p in sorted(folder.glob("v*/version.json"), reverse=True) if p.parent != Path(source)]
    versions = (fit(chosen, load_model(str(version), dtype=args.dtype), version.name) for version in others)
    yield judge_draft(chosen, fit(chosen, draft, Path(source).name), versions)
    counts = EngineCounters.total(window.counts for window in chosen)
    if counts.drafts:
        yield judge_speed(counts, args.token_seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("url", "target", "draft"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("store", "prompts", "model", "api-key", "json"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--column", default="prompt")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--token-seconds", type=float, help="seconds of a token without a draft")
    parser.add_argument("--check-target", action="store_true", help="load the target and let it score some answers")
    parser.add_argument("--ask", action="store_true", help="ask also while a version is being watched")
    args = parser.parse_args()
    if (args.store is None) == (args.prompts is None):
        parser.error("give one of --store and --prompts")
    findings: list[Finding] = []
    try:
        for finding in examine(args):
            findings.append(finding)
            print(f"{finding.state}: {finding.text}", flush=True)
    except (OSDError, OSError) as error:
        findings.append(Finding("engine", "unknown", str(error)))
        print(f"unknown: {error}", file=sys.stderr)
    states = {finding.state for finding in findings}
    verdict = next((state for state in ("ill", "unknown") if state in states), "healthy")
    if args.json:
        Path(args.json).write_text(
            json.dumps({"verdict": verdict, "findings": [asdict(f) for f in findings]}, indent=1)
        )
    return {"healthy": 0, "ill": 1, "unknown": 2}[verdict]


if __name__ == "__main__":
    sys.exit(main())
