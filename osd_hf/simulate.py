"""Simulation of online learning on recorded traces, without the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from osd_hf.acceptance import AcceptanceStats
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.learner import Learner
from osd_hf.learning.updater import UpdateReport
from osd_hf.replay import redraft, replay_each
from osd_hf.router import RoutedPrompt, Router, as_router
from osd_hf.trace import Trace


@dataclass(frozen=True)
class SimulationReport:
    """Result of a simulated run."""

    stats: tuple[AcceptanceStats, ...]  # of each request with the version that served it
    traces: tuple[Trace, ...]  # the requests as a live run would have recorded them
    updates: tuple[UpdateReport, ...]
    learner: Learner = field(repr=False)  # can continue in another call of `simulate`

    @property
    def draft(self) -> Any:
        """The shared draft, or the base of the domain drafts, after the last request in its original dtype."""
        return self.learner.drafts.model(None)

    @property
    def decisions(self) -> tuple[GateDecision, ...]:
        """The decision about each version."""
        return tuple(update.decision for update in self.updates if update.decision is not None)


def simulate(
    draft: Any,
    traces: Sequence[Trace],
    config: OnlineConfig | None = None,
    *,
    router: Router | Callable[[str], str | None] | None = None,
    peft_config: Any = None,
    tokenizer: Any = None,
    learner: Learner | None = None,
    on_request: Callable[[int, AcceptanceStats], object] | None = None,
) -> SimulationReport:
    """
    Serve recorded requests in order with a learning draft. The counts of greedy requests equal those of a live run,
    those of sampled requests are expected values (see [`replay`]). Updates follow `update_interval` as in a live run;
    `"idle"` updates are done completely when they are due.

    Args:
        draft (`PreTrainedModel`): The first version. It is not changed.
        traces (`Sequence[Trace]`): Requests in the order of arrival.
        config (`OnlineConfig`, *optional*): Settings of drafting and learning.
        router (`Router` or `Callable[[str], str | None]`, *optional*), peft_config (`peft.PeftConfig`, *optional*):
            Domain drafts and adapters, as for [`OnlineAssistant`]. The `domain` of a trace is its label.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): For routers that read text.
        learner (`Learner`, *optional*):
            Learner of an earlier report to continue with, instead of `draft`, `config`, and `peft_config`.
        on_request (`Callable[[int, AcceptanceStats], object]`, *optional*):
            Called after each request with its number and stats.

    Raises:
        ConfigError: Neither the configuration nor the generation config of the draft sets k.
    """
    routes = as_router(router)
    if learner is None:
        config = replace(config or OnlineConfig(), compile_draft=False)  # replay drafts nothing
        drafts = DomainDrafts(draft, config, peft_config=peft_config, per_domain=routes is not None)
        learner = Learner(drafts)
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
    served: list[Trace] = []
    stats: list[AcceptanceStats] = []
    updates: list[UpdateReport] = []
    for event in serve_recorded(learner, traces, k):
        if isinstance(event, UpdateReport):
            updates.append(event)
            continue
        served.append(event[0])
        stats.append(event[1])
        if on_request is not None:
            on_request(len(stats) - 1, event[1])
    return SimulationReport(tuple(stats), tuple(served), tuple(updates), learner)


def serve_recorded(
    learner: Learner, traces: Iterable[Trace], k: int
) -> Iterator[tuple[Trace, AcceptanceStats] | UpdateReport]:
    """Serve recorded requests in order with k tokens per round, and learn from each. Yields each request with its
    acceptance, and each update after the request that made it due. Greedy requests get the rounds of the draft that
    serves them, sampled requests keep theirs."""
    drafts = learner.drafts
    for trace in traces:
        key = drafts.key(trace.domain)
        with drafts.lease(key, original=None) as draft:
            if trace.is_sampled:
                (stats,) = replay_each(draft.model, [trace], k)
            else:
                (trace,) = redraft(draft.model, [trace], k)
                stats = AcceptanceStats.from_rounds(trace.rounds)
        served = replace(trace, draft_version=draft.version)
        learner.observe(served.domain, served)
        yield served, stats
        while (report := learner.after_answer()) is not None:
            yield report
