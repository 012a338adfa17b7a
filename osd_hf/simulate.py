"""Online learning on recorded traces: what a live run would have shown, without the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from osd_hf.acceptance import AcceptanceStats
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, DataError
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.learner import Learner
from osd_hf.learning.requests import NUM_WATCHED
from osd_hf.learning.updater import UpdateReport
from osd_hf.replay import redraft, replay_each
from osd_hf.router import RoutedPrompt, Router, as_router
from osd_hf.trace import Trace

__all__ = ["SimulationReport", "serve_recorded", "simulate"]


@dataclass(frozen=True)
class SimulationReport:
    """
    A simulated run.

    Args:
        stats (`tuple[AcceptanceStats, ...]`):
            Acceptance of each request, drafted by the version that would have served it.
        traces (`tuple[Trace, ...]`):
            The requests as a live run would have captured them, with the rounds of the version that served, its number
            and, with a router, the domain that it was routed to.
        updates (`tuple[UpdateReport, ...]`): In order.
        learner (`Learner`): Goes on in another call of [`simulate`].
    """

    stats: tuple[AcceptanceStats, ...]
    traces: tuple[Trace, ...]
    updates: tuple[UpdateReport, ...]
    learner: Learner = field(repr=False)

    @property
    def drafts(self) -> DomainDrafts:
        """The drafts at the end."""
        return self.learner.drafts

    @property
    def draft(self) -> Any:
        """The draft that all requests share, or the base of the domains' drafts, at the end, in the dtype of the one
        given."""
        return self.drafts.model(None)

    @property
    def decisions(self) -> tuple[GateDecision, ...]:
        """What became of each version."""
        return tuple(update.decision for update in self.updates if update.decision is not None)


def simulate(
    draft: Any, traces: Sequence[Trace], config: OnlineConfig | None = None, *,
    router: Router | Callable[[str], str | None] | None = None, peft_config: Any = None, tokenizer: Any = None,
    learner: Learner | None = None,
    on_request: Callable[[int, AcceptanceStats], object] | None = None,
    on_update: Callable[[int, UpdateReport], object] | None = None,
) -> SimulationReport:  # fmt: skip
    """
    Serve recorded greedy requests one after the other to a learning draft. Counts are those of a live run, as greedy
    replay is exact (see [`replay`], also of `drafted`).
    Updates follow `update_interval`: spread over the requests between two or whole, as they are without a simulation;
    whole for `"idle"`.

    Args:
        draft (`PreTrainedModel`): Where learning starts; not changed.
        traces (`Sequence[Trace]`): Greedy requests in the order of arrival.
        config (`OnlineConfig`, *optional*): How to draft and learn.
        router (`Router` or `Callable[[str], str | None]`, *optional*), peft_config (`peft.PeftConfig`, *optional*):
            Drafts per domain and adapters, as for [`OnlineAssistant`]; a trace's `domain` is its label.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): For routers that read text.
        learner (`Learner`, *optional*):
            The learner of an earlier report, to go on with; `draft`, `config` and `peft_config` are its own then.
        on_request (`Callable[[int, AcceptanceStats], object]`, *optional*):
            Called after each request with its number and stats; for a progress bar.
        on_update (`Callable[[int, UpdateReport], object]`, *optional*):
            Called after each update with the number of requests served before it.

    Returns:
        `SimulationReport`

    Raises:
        DataError: sampled traces, whose rounds cannot be simulated.
        ConfigError: k is set neither by the configuration nor by the draft's generation config.
    """
    config = config or OnlineConfig()
    sampled = sum(trace.is_sampled for trace in traces)
    if sampled:
        raise DataError(
            f"{sampled} of {len(traces)} traces were sampled; only greedy ones can be simulated. Leave them out."
        )
    routes = as_router(router)
    if learner is None:
        config = replace(config, compile_draft=False)  # nothing is drafted here
        per_domain = routes is not None
        drafts = DomainDrafts(draft, config, peft_config=peft_config, per_domain=per_domain)
        learner = Learner(drafts, drafts.config)
    k = learner.config.compared_k or learner.drafts.base.generation_config.num_assistant_tokens
    if not isinstance(k, int):
        raise ConfigError(
            "Replay drafts the same number of tokens each round; neither the configuration nor the draft's generation "
            "config names one. Set `num_assistant_tokens`."
        )
    if routes is not None:
        traces = [
            t if t.domain is not None else replace(t, domain=routes.route(RoutedPrompt(t.prompt_ids, tokenizer)))
            for t in traces
        ]
    served: list[tuple[Trace, AcceptanceStats]] = []
    updates: list[UpdateReport] = []
    for moment in serve_recorded(learner, traces, k):
        if isinstance(moment, UpdateReport):
            updates.append(moment)
            if on_update is not None:
                on_update(len(served), moment)
        else:
            served.append(moment)
            if on_request is not None:
                on_request(len(served) - 1, moment[1])
    return SimulationReport(
        tuple(stats for _, stats in served), tuple(trace for trace, _ in served), tuple(updates), learner
    )


def serve_recorded(
    learner: Learner, traces: Sequence[Trace], k: int
) -> Iterator[tuple[Trace, AcceptanceStats] | UpdateReport]:
    """
    Let a learner serve recorded requests in their order, `k` tokens drafted per round, and learn in between. Greedy
    requests get the rounds of the draft that serves them; sampled ones stay as they are, as their rounds cannot be
    known.

    Yields:
        Each request with its acceptance (the expected one if it was sampled, see [`replay`]), and each update after
        the requests that made it due.
    """
    start = 0
    while start < len(traces):
        end = start + _until_due(learner, traces, start)
        for trace, stats in _redrafted(learner, traces[start:end], k):
            learner.observe(trace.domain, trace)
            yield trace, stats
        report = learner.after_answer()
        while report is not None:
            yield report
            report = learner.after_answer()
        start = end


def _until_due(learner: Learner, traces: Sequence[Trace], start: int) -> int:
    """Requests until one of the drafts has its next update: these do not depend on each other. Where the gate compares
    drafts by the last request, or updates are spread, each depends on the one before."""
    if learner.config.update_strategy == "manual":
        return len(traces) - start
    if learner.chooses or learner.config.update_strategy == "spread":
        return 1
    waiting = {domain: requests.requests_waiting for domain, requests in learner.requests.items()}
    for count, trace in enumerate(traces[start:], 1):
        domain = trace.domain if learner.drafts.per_domain else None
        waiting[domain] = waiting.get(domain, 0) + 1
        requests = learner.requests.get(domain)
        interval = requests.update_interval if requests is not None else learner.config.update_interval
        if waiting[domain] >= interval or count == NUM_WATCHED:
            return count
    return len(traces) - start


def _redrafted(learner: Learner, traces: Sequence[Trace], k: int) -> list[tuple[Trace, AcceptanceStats]]:
    """As captured with the drafts that serve now, with what these made of them."""
    drafts = learner.drafts
    groups: dict[tuple[str | None, bool], list[int]] = {}
    for i, trace in enumerate(traces):
        groups.setdefault((drafts.key(trace.domain), trace.is_sampled), []).append(i)
    drafted: dict[int, tuple[Trace, AcceptanceStats]] = {}
    for (key, is_sampled), places in groups.items():
        those = [traces[i] for i in places]
        with drafts.lease(key, original=learner.prefers_original(key)) as draft:
            if is_sampled:
                found = replay_each(draft.model, those, k)
            else:
                those = redraft(draft.model, those, k)
                found = [AcceptanceStats.from_rounds(trace.rounds) for trace in those]
            for i, trace, stats in zip(places, those, found, strict=True):
                drafted[i] = replace(trace, draft_version=draft.version), stats
    return [drafted[i] for i in range(len(traces))]
