"""Online learning on recorded traces: what a live run would have shown, without the target."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, DataError
from osd_hf.metrics import AcceptanceStats
from osd_hf.records import Trace
from osd_hf.replay import redraft
from osd_hf.schedule import UpdateSchedule
from osd_hf.updater import Updater, UpdateReport, learning_context

__all__ = ["SimulationReport", "simulate"]


@dataclass(frozen=True)
class SimulationReport:
    """
    A simulated run.

    Args:
        stats (`tuple[AcceptanceStats, ...]`):
            Of each request, drafted by the version that would have served it.
        traces (`tuple[Trace, ...]`):
            The requests as a live run would have captured them, with the rounds of the version that served.
        updates (`tuple[UpdateReport, ...]`):
            In order.
        draft (`PreTrainedModel`):
            The draft at the end, in the dtype of the one given.
    """

    stats: tuple[AcceptanceStats, ...]
    traces: tuple[Trace, ...]
    updates: tuple[UpdateReport, ...]
    draft: Any


def simulate(
    draft: Any,
    traces: Sequence[Trace],
    config: OnlineConfig | None = None,
    *,
    on_request: Callable[[int, AcceptanceStats], object] | None = None,
) -> SimulationReport:
    """
    Serve recorded greedy requests one after the other to a learning draft. Counts are those of a live run, as greedy
    replay is exact (see [`replay`], also of `drafted`) and requests between two updates do not depend on each other.

    Args:
        draft (`PreTrainedModel`):
            Where learning starts; not changed.
        traces (`Sequence[Trace]`):
            Greedy requests in the order of arrival.
        config (`OnlineConfig`, *optional*):
            How to draft and learn.
        on_request (`Callable[[int, AcceptanceStats], object]`, *optional*):
            Called after each request with its number and stats; for a progress bar.

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
    k = config.num_assistant_tokens or draft.generation_config.num_assistant_tokens
    if not isinstance(k, int):
        raise ConfigError(
            f"Replay drafts the same number of tokens each round, got `num_assistant_tokens={k!r}`; set a number."
        )
    with learning_context():
        serving = copy.deepcopy(draft).eval()
    updater, schedule = Updater(draft, config), UpdateSchedule(config)
    stats: list[AcceptanceStats] = []
    served: list[Trace] = []
    updates: list[UpdateReport] = []
    chunk = schedule.interval or max(len(traces), 1)
    for first in range(0, len(traces), chunk):
        for trace in redraft(serving, traces[first : first + chunk], k):
            served.append(trace)
            stats.append(AcceptanceStats.from_rounds(trace.rounds))
            if on_request is not None:
                on_request(len(stats) - 1, stats[-1])
            updater.observe(trace)
            if schedule.request_ended():
                updates.append(updater.update())
                updater.copy_to(serving)
                schedule.updated()
    return SimulationReport(tuple(stats), tuple(served), tuple(updates), serving)
