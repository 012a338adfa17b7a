"""Train the drafts on served requests, and let versions serve that pass the gate."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from osd_hf.acceptance import DRAFTS, MAX_REQUESTS, AcceptanceStats
from osd_hf.config import REPLAY_NUM_ASSISTANT_TOKENS
from osd_hf.errors import StateError
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import MAX_DROPPED_IN_A_ROW, MIN_HELD_BACK, GateDecision, judge, regressed
from osd_hf.learning.requests import NUM_HELD_BACK, DraftRequests, Parts
from osd_hf.learning.updater import BACKWARD_SHARE, UpdateReport, finish
from osd_hf.learning.weights import Snapshot, is_finite
from osd_hf.replay import replay_each
from osd_hf.speedup import expected_block_efficiency
from osd_hf.trace import Trace

logger = logging.getLogger(__name__)

MAX_DECISIONS = 4096
REPLAY_BATCH = {"idle": 1, "spread": 4, "interval": 32, "manual": 32}  # requests that are replayed in one part
REPLAY_SHARE = 0.04  # of an optimizer step, about, for the replay of a request
MIN_STEPS_PER_ANSWER = 0.2  # optimizer steps after an answer, at least, during an update


class Learner:
    """Train the drafts of a [`DomainDrafts`]. Requests may arrive in any thread; one thread at a time may work."""

    def __init__(self, drafts: DomainDrafts, *, timer: Callable[[], float] = time.perf_counter) -> None:
        self.drafts = drafts
        self.config = drafts.config
        self._timer = timer
        self.decisions: deque[GateDecision] = deque(maxlen=MAX_DECISIONS)  # oldest first
        self.unreported: deque[GateDecision] = deque(maxlen=MAX_DECISIONS)  # for `on_update`
        self.is_paused = False  # then no update begins or continues
        self.working_domain: str | None = None  # of the draft that the last work was for
        self.seconds = 0.0  # of all learning
        self._saved_seconds = 0.0
        self.observed = 0  # requests since the last reset of the statistics
        # Replay of the learned and of the original draft over time, with the number of the request.
        self.replayed: deque[tuple[int, AcceptanceStats, AcceptanceStats]] = deque(maxlen=MAX_REQUESTS)
        # Domain and generator of the update in progress, and `seconds` when it began.
        self._work: tuple[str | None, Parts[UpdateReport | None], float] | None = None
        # Progress of the update, in optimizer steps: done, and due by now.
        self._steps_done = 0.0
        self._steps_due = 0.0
        self._steps_total = self.config.steps_per_update + 2 * NUM_HELD_BACK * REPLAY_SHARE * self.config.gate
        self._k = self.config.compared_k or REPLAY_NUM_ASSISTANT_TOKENS
        if not drafts.per_domain:
            self.drafts.updater(None)

    @property
    def set_aside(self) -> Counter[str]:
        """Requests excluded because learning failed on them, over all drafts, by reason."""
        return sum((requests.set_aside.counts.copy() for requests in self.drafts.requests.values()), Counter())

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def saved_seconds(self) -> float | None:
        """Seconds that the learned drafts have saved over the original ones; `None` until a round was timed."""
        return None if self.drafts.pacer.round_seconds(self._k) is None else self._saved_seconds

    def _token_seconds(self, alpha: float) -> float | None:
        """Return the time of a token at this acceptance, with the served k or the best; `None` until it is known."""
        if self.config.num_assistant_tokens == "auto":
            return self.drafts.pacer.token_seconds(alpha)
        seconds = self.drafts.pacer.round_seconds(self._k)
        return None if seconds is None else seconds / expected_block_efficiency(min(alpha, 1.0), self._k)

    def _saved_by(self, trace: Trace, original: AcceptanceStats, learned: AcceptanceStats) -> float:
        """Estimate the seconds that the learned draft saved on the tokens of a request that came from the draft."""
        served = AcceptanceStats.from_trace(trace)
        if not served.drafted or original.examined == 0 or learned.examined == 0:
            return 0.0
        before, after = self._token_seconds(original.alpha), self._token_seconds(learned.alpha)
        share = served.accepted / max(served.accepted + served.text_accepted, 1)
        return 0.0 if before is None or after is None else len(trace) * (before - after) * share

    def observe(self, domain: str | None, trace: Trace, *, learn: bool = True) -> None:
        """Add a served request of a domain. A request that cannot be learned from is excluded. Without `learn`, the
        request only shows whether the vocabulary of the draft suffices."""
        self.observed += 1
        if not learn:
            if (watching := self.drafts.requests.get(self.drafts.key(domain))) is not None:
                with watching.lock:
                    watching.vocabulary.add(trace, may_count=False)
        elif len(trace) and trace.num_kept and self.drafts.admit(domain):
            requests = self.drafts.requests[self.drafts.key(domain)]
            if requests.set_aside.accepts(trace) and requests.observe(trace):
                self.drafts.model_changed(requests.domain)

    def curves(self) -> dict[str, NDArray[np.float64]]:
        """Return the replay of both drafts over time, as `AcceptanceStats.curves`."""
        replayed = list(self.replayed)
        return {
            name: np.array([(number, *pair[side].requests[0]) for number, *pair in replayed]).reshape(-1, 5)
            for side, name in enumerate(DRAFTS)
        }

    def set_target_version(self, target: str | None) -> None:
        """Set the version of the target that answers all requests from now on."""
        for requests in self.drafts.requests.values():
            if requests.set_target_version(target):
                self.drafts.model_changed(requests.domain)

    def remove_requests(self, target: str | None) -> None:
        """Remove all requests, as the target is another one now, of this version if known."""
        self.abandon()
        for requests in self.drafts.requests.values():
            requests.remove_all(target)
            self.drafts.model_changed(requests.domain)

    def due(self) -> DraftRequests | None:
        """Return the requests of the draft that should be updated now; `None` if no update is due."""
        return None if self.config.update_strategy == "manual" else self._due()

    def _due(self) -> DraftRequests | None:
        return None if self.is_paused else self._fullest(lambda requests: requests.is_due)

    def _with_arrived(self) -> DraftRequests | None:
        """Return requests that the idle thread has not compared yet."""
        if self.config.update_strategy != "idle" or self.is_paused:  # without a gate, none arrive
            return None
        return self._fullest(lambda requests: bool(requests.arrived) and requests.may_learn)

    def fullest(self) -> str | None:
        """Return the domain with the most waiting requests, weighted by effort; `None` if all share one draft, or no
        draft can learn."""
        fullest = self._fullest(lambda requests: not requests.is_unconfirmed)
        return None if fullest is None else fullest.domain

    def _fullest(self, may_learn: Callable[[DraftRequests], bool]) -> DraftRequests | None:
        candidates = filter(may_learn, self.drafts.requests.values())
        return max(candidates, key=lambda requests: requests.requests_waiting * requests.effort.share, default=None)

    def begins(self) -> bool:
        """Whether the next part of work is the first of an update."""
        return self._work is None and self.due() is not None

    def has_work(self) -> bool:
        """Whether an update is in progress or due, or requests wait to be compared."""
        return not self.is_paused and (
            self._work is not None or self._due() is not None or self._with_arrived() is not None
        )

    def rest(self, domain: str | None, num_requests: int) -> None:
        """Learn nothing for a draft until `num_requests` more have come, except in [`~Learner.update`]."""
        if (requests := self.drafts.requests.get(domain)) is not None:
            with requests.lock:
                requests.rest = num_requests

    # --- work -------------------------------------------------------------------------------------------------------

    def step(self) -> UpdateReport | None:
        """Run one part of the update in progress, of comparing arrived requests, or of the update that is due. Returns
        a report at the end of an update."""
        if self._work is None:
            if (requests := self._with_arrived()) is not None:
                self._work = requests.domain, self._compare_arrived(requests), self.seconds
            elif (requests := self.due()) is not None:
                self._work = requests.domain, self._update(requests.domain, None), self.seconds
                self._steps_done = 0.0
                self._steps_due = 0.0
            else:
                return None
        domain, work, began = self._work
        try:
            with self._at_work(domain):
                self._steps_done += next(work) or 0.0
        except StopIteration as done:
            self._work = None
            report: UpdateReport | None = done.value
            return None if report is None else replace(report, seconds=self.seconds - began)
        except BaseException:
            self._work = None
            raise
        return None

    def after_answer(self) -> UpdateReport | None:
        """Compare the arrived requests, then run the answer's share of an update (`"spread"`) or a due update. Returns
        a report at the end of an update."""
        if self.config.gate and not self.is_paused:
            for requests in self.drafts.requests.values():
                if requests.may_learn:
                    with self._at_work(requests.domain):
                        finish(self._compare_arrived(requests))
        if self.config.update_strategy == "spread":
            return self._advance()
        due = self.due()
        return None if due is None else self.update(due.domain)

    def _advance(self) -> UpdateReport | None:
        """Run an answer's share of an update; all answers of an interval have the same share."""
        if self.is_paused:
            return None
        report = self.step() if self._work is None else None
        if self._work is not None:
            share = self._steps_total / self.drafts.requests[self._work[0]].update_interval
            self._steps_due += max(share, MIN_STEPS_PER_ANSWER)
        is_last = self._steps_due > self._steps_total - 1e-6  # answer of the interval: it finishes the update
        while self._work is not None and (is_last or self._steps_due - self._steps_done > BACKWARD_SHARE / 2):
            report = self.step()
        return report

    def update(self, domain: str | None = None, steps: int | None = None) -> UpdateReport:
        """Run an update in progress to its end, then an update of a domain's draft."""
        began = self.seconds
        while self._work is not None:
            self.step()
        self._work, report = (domain, self._update(domain, steps), began), None
        while report is None:
            report = self.step()
        return report

    @contextmanager
    def _at_work(self, domain: str | None) -> Iterator[None]:
        """Count the time inside as learning for a draft."""
        self.working_domain = domain
        started = self._timer()
        try:
            yield
        finally:
            seconds = self._timer() - started
            self.seconds += seconds
            has_price = self.config.gate and self.config.update_strategy != "idle"  # idle time is free
            if has_price and (requests := self.drafts.requests.get(domain)) is not None:
                with requests.lock:
                    requests.effort.spent(seconds)

    def abandon(self) -> None:
        """Abandon the update in progress; its requests stay pending."""
        if self._work is not None:
            (_, work, _), self._work = self._work, None
            work.close()

    def _update(self, domain: str | None, steps: int | None) -> Parts[UpdateReport]:
        """Learn, judge the new version, and let it serve if the gate promotes it."""
        requests = self.drafts.requests[domain]
        newest = requests.begin_update()  # first: after an error, too, the next update is due after an interval
        updater = self.drafts.updater(domain)
        newest = requests.still_valid(newest)
        target = requests.target
        yield from self._watch(requests)
        report = yield from updater.micro_steps(steps, newest)
        report = replace(report, domain=domain, version=self.drafts.serving_version(domain))
        if not report.steps and not report.dropped_steps:
            return report
        version, snapshot = self.drafts.candidate(domain)
        if report.steps:
            decision = yield from self._judge(requests, version, snapshot)
        else:
            reason = f"none of {report.dropped_steps} steps had a finite loss and gradient"
            decision = GateDecision("dropped", version, report.version, domain, reason)
        requests.dropped = requests.dropped + 1 if decision.outcome == "dropped" else 0
        if decision.outcome == "promoted":
            self.drafts.promote(domain, version, snapshot, target)
            requests.begin_watching(version)
        elif requests.dropped >= MAX_DROPPED_IN_A_ROW or not is_finite(snapshot):
            requests.dropped = 0
            updater.restart(self.drafts.serving(domain).weights)
        self._record(decision)
        set_aside = dict(Counter(report.set_aside) + Counter(updater.set_aside.take_new()))
        version = self.drafts.serving_version(domain)
        return replace(report, version=version, decision=decision, set_aside=set_aside)

    def _record(self, decision: GateDecision) -> None:
        self.decisions.append(decision)
        self.unreported.append(decision)
        level = logging.WARNING if decision.outcome == "rolled back" else logging.INFO
        of_domain = "" if decision.domain is None else f" of {decision.domain!r}"
        logger.log(level, "Draft version %d%s %s: %s.", decision.version, of_domain, decision.outcome, decision.reason)

    def _judge(self, requests: DraftRequests, version: int, snapshot: Snapshot) -> Parts[GateDecision]:
        """Compare a version with the serving one on the held-back requests."""
        domain, serving = requests.domain, self.drafts.serving_version(requests.domain)
        if not is_finite(snapshot):
            return GateDecision("dropped", version, serving, domain, "its weights are not finite")
        if not self.config.gate:
            return GateDecision("promoted", version, version, domain, "there is no gate")
        held_back = requests.still_valid(requests.held_back)
        newest = [trace for trace in held_back if trace.target not in requests.earlier]
        held_back = newest if len(newest) >= MIN_HELD_BACK else held_back
        with self.drafts.lease(domain) as draft:
            of_serving = yield from self._score(requests, draft.model, held_back)
        of_version = yield from self._score(requests, self.drafts.trial_model(snapshot), held_back)
        scores = [
            (trace, old, new)
            for trace, old, new in zip(held_back, of_serving, of_version, strict=True)
            if old is not None and new is not None and requests.is_current(trace)  # the target may have changed since
        ]
        judged, before, after = [t for t, _, _ in scores], [old for _, old, _ in scores], [new for _, _, new in scores]
        yield from self._weigh(requests, serving, judged, before, after)
        return judge(version, serving, domain, judged, before, after)

    def _weigh(
        self,
        requests: DraftRequests,
        serving: int,
        held_back: Sequence[Trace],
        before: Sequence[AcceptanceStats],
        after: Sequence[AcceptanceStats],
    ) -> Parts[None]:
        """Let the effort follow the gain of the newest version over the original draft."""
        known = dict(zip(held_back, before, strict=True)) if serving == 0 else requests.originals
        new = [trace for trace in held_back if trace not in known]
        with self.drafts.lease(requests.domain, original=True) as draft:
            scores = yield from self._score(requests, draft.model, new)
        known = known | {trace: score for trace, score in zip(new, scores, strict=True) if score is not None}
        both = [(known[trace], score) for trace, score in zip(held_back, after, strict=True) if trace in known]
        with requests.lock:
            requests.originals = {trace: known[trace] for trace in held_back if trace in known}
            tokens = [len(trace) - AcceptanceStats.from_trace(trace).text_accepted for trace in requests.originals]
            originals, newest = [first for first, _ in both], [second for _, second in both]
            requests.effort.judged(originals, newest, self._token_seconds, sum(tokens) / max(len(tokens), 1))

    def _compare_arrived(self, requests: DraftRequests) -> Parts[None]:
        """Compare the arrived requests, and decide about a rollback once per interval, even if updates are rare."""
        if requests.may_wait():
            return
        yield from self._compare(requests)
        if len(requests.unwatched) >= self.config.update_interval:
            yield from self._watch(requests)

    def _compare(self, requests: DraftRequests) -> Parts[None]:
        """Score the arrived requests by the original and the serving draft."""
        domain, version = requests.domain, self.drafts.serving_version(requests.domain)
        arrived, num_requests = requests.take_arrived()
        if version == 0 or not arrived:  # both drafts are the same
            return
        arrived = requests.still_valid(arrived)
        with self.drafts.lease(domain, original=True) as draft:
            originals = yield from self._score(requests, draft.model, arrived)
        with self.drafts.lease(domain) as draft:
            replayed = yield from self._score(requests, draft.model, arrived)
        for i, (trace, original, learned) in enumerate(zip(arrived, originals, replayed, strict=True), 1):
            if original is not None and learned is not None:
                self.replayed.append((self.observed - len(arrived) + i, learned, original))
                if trace.draft_version == version:
                    self._saved_seconds += self._saved_by(trace, original, learned) * num_requests
                requests.compare(trace, original, learned)

    def _watch(self, requests: DraftRequests) -> Parts[None]:
        """Roll back to an earlier version if it would have been accepted more on the served requests."""
        domain, version = requests.domain, self.drafts.serving_version(requests.domain)
        if not self.config.gate or version == 0:
            return
        yield from self._compare(requests)
        watched = requests.take_unwatched()
        previous = self.drafts.previous(domain)
        before: list[AcceptanceStats | None] = [original for _, original, _ in watched]
        if previous.number != 0:
            model = self.drafts.trial_model(previous.weights)
            before = yield from self._score(requests, model, [trace for trace, _, _ in watched])
        for (trace, original, learned), earlier in zip(watched, before, strict=True):
            if earlier is not None and requests.is_current(trace):  # the target may have changed since
                requests.compared.append((earlier, original, learned))
        of_previous, of_original, of_serving = ([row[side] for row in requests.compared] for side in range(3))
        falls = [
            regressed(version, previous.number, domain, of_previous, of_serving),
            regressed(version, 0, domain, of_original, of_serving),
        ]
        decision = max(filter(None, falls), key=lambda fall: fall.alpha_before or 0.0, default=None)
        if decision is not None:
            self.go_back(decision)

    def go_back(self, decision: GateDecision, weights: Snapshot | None = None) -> None:
        """Serve the version that a rollback names: the previous one, 0, or one with the given weights; and learn on
        from it."""
        domain, requests = decision.domain, self.drafts.requests[decision.domain]
        in_progress = self._work is not None and self._work[0] == domain and self._work[1]
        if in_progress and getgeneratorstate(in_progress) != GEN_RUNNING:
            self.abandon()
        self.drafts.updater(domain).restart(self.drafts.roll_back(domain, decision.serving, weights))
        requests.begin_watching(decision.serving)
        with requests.lock:
            requests.choice.clear()
            requests.effort.restart()
        self._record(decision)

    def _score(
        self, requests: DraftRequests, model: PreTrainedModel, traces: Sequence[Trace]
    ) -> Parts[list[AcceptanceStats | None]]:
        """Replay a draft on traces; `None` for a trace that was excluded."""
        size = REPLAY_BATCH[self.config.update_strategy]
        scores: list[AcceptanceStats | None] = []
        for first in range(0, len(traces), size):
            part = traces[first : first + size]
            scores += yield from requests.set_aside.isolate(lambda some: replay_each(model, some, self._k), part)
            yield REPLAY_SHARE * len(part)
        if None in scores:
            requests.remove_excluded()
        return scores

    # --- saved state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the drafts and, for each, its requests and its updater's state (`None` before its first update); and
        the decisions."""
        states = []
        for domain, requests in self.drafts.requests.items():
            updater = self.drafts.updater(domain) if domain in self.drafts.learning else None
            states.append({**requests.state_dict(), "updater": None if updater is None else updater.state_dict()})
        decisions = [decision.to_dict() for decision in self.decisions]
        return {"drafts": self.drafts.state_dict(), "requests": states, "decisions": decisions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state. Raises StateError, with nothing changed, if it belongs to another draft."""
        states = state["requests"]
        if any(saved["domain"] is None for saved in states) == self.drafts.per_domain:
            kind = "one shared draft" if self.drafts.per_domain else "drafts per domain"
            raise StateError(f"The session is one of {kind}. Load it with or without a router, as when it was saved.")
        for trace in (t for saved in states for traces in saved["traces"].values() for t in traces):
            self._check_width(trace)
        decisions = [GateDecision(**decision) for decision in state["decisions"]]
        learning = [saved for saved in states if saved["updater"] is not None]
        with self.drafts.unchanged_on_error():
            for saved in learning:
                self.drafts.updater(saved["domain"]).check_state(saved["updater"])
            self.drafts.load_state_dict(state["drafts"], {saved["domain"] for saved in learning})
        self.abandon()
        self.decisions = deque(decisions, MAX_DECISIONS)
        for saved in learning:
            self.drafts.updater(saved["domain"]).load_state_dict(saved["updater"])
        for saved in states:
            self.drafts.requests[saved["domain"]].load_state_dict(saved)

    def take_decisions(self) -> list[GateDecision]:
        """Return the decisions since the last call, and forget them."""
        taken, self.decisions = list(self.decisions), deque(maxlen=MAX_DECISIONS)
        return taken

    def _check_width(self, trace: Trace) -> None:
        """Raise StateError for a saved trace of another width than new traces."""
        kept = self.config.num_logprobs
        width = 0 if kept is None or kept >= trace.vocab_size else kept
        if len(trace) and trace.num_kept and trace.top_ids.shape[1] != width:
            raise StateError(
                f"The requests of the session keep {trace.top_ids.shape[1] or 'all'} entries per position, this "
                f"assistant {width or 'all'}. Set the `num_logprobs` that they were captured with."
            )
