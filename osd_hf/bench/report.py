"""What a benchmark compares, and what comes of it: speeds, acceptance, times of rounds, the cost model beside them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from osd_hf.bench.controlled import ControlledAcceptance, median_ratio
from osd_hf.errors import ConfigError
from osd_hf.metrics import AcceptanceStats, expected_speedup

__all__ = ["ALL", "BenchmarkReport", "RoundTimes", "System", "TimedAnswer"]

KINDS = ("alone", "prompt_lookup", "stock", "lean")
ALL = "all"


@dataclass(frozen=True, eq=False)
class System:
    """
    One way to answer.

    Args:
        name (`str`):
            In tables; no two share one.
        kind (`str`):
            `"alone"`: the target's `generate`; `"prompt_lookup"` and `"stock"`: transformers' own assisted generation,
            without a draft model and with one; `"lean"`: [`OnlineAssistant`], which does not learn meanwhile.
        draft (`PreTrainedModel`, *optional*):
            Of `"stock"` and `"lean"`; left as it is.
        num_assistant_tokens (`int` or `"auto"`, *optional*, defaults to 5):
            k, at threshold 0 and a constant schedule; `"auto"` only of `"lean"`.
        compile_draft (`bool`, *optional*, defaults to `False`):
            Of `"lean"`.
        acceptance (`ControlledAcceptance`, *optional*):
            What is put in place of the draft's own proposals.

    Raises:
        ConfigError: an unknown kind, a draft that is missing or of no use, a number of tokens below 1.
    """

    name: str
    kind: Literal["alone", "prompt_lookup", "stock", "lean"]
    draft: Any = None
    num_assistant_tokens: int | Literal["auto"] = 5
    compile_draft: bool = False
    acceptance: ControlledAcceptance | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"`kind` must be one of {', '.join(KINDS)}, got {self.kind!r}.")
        drafts = self.kind in ("stock", "lean")
        if drafts != (self.draft is not None):
            raise ConfigError(
                f"The system {self.name!r} of kind {self.kind} {'needs a' if drafts else 'has no'} draft."
            )
        k = self.num_assistant_tokens
        if (k == "auto" or self.compile_draft) and self.kind != "lean":
            raise ConfigError(f'Only a lean system drafts "auto" or compiled, got {self.name!r} of kind {self.kind}.')
        if k != "auto" and k < 1:
            raise ConfigError(f"`num_assistant_tokens` must be at least 1, got {k} for {self.name!r}.")

    @property
    def fixed_k(self) -> int | None:
        """Tokens drafted a round, where it is the same number each round."""
        k = self.num_assistant_tokens
        return k if self.kind in ("stock", "lean") and k != "auto" else None

    def to_dict(self) -> dict[str, Any]:
        """What the system is, ready for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "num_assistant_tokens": None if self.kind == "alone" else self.num_assistant_tokens,
            "compile_draft": self.compile_draft,
            "is_controlled": self.acceptance is not None,
        }


@dataclass(frozen=True, eq=False)
class TimedAnswer:
    """
    One request, answered by one system.

    Args:
        num_tokens (`int`):
            Of the answer.
        seconds (`float`):
            Of the whole call.
        first_token_seconds (`float`):
            Until a streamer got the first tokens.
        stats (`AcceptanceStats`):
            Of this very answer.
        outcome (`str`):
            `"identical"` to the target's own answer, `"tied"` or `"differing"`, see [`compare_outputs`].
        peak_bytes (`int`, *optional*):
            Device memory that the answer took beyond what was taken before it; `None` on a CPU.
    """

    num_tokens: int
    seconds: float
    first_token_seconds: float
    stats: AcceptanceStats
    outcome: str
    peak_bytes: int | None


@dataclass(frozen=True)
class RoundTimes:
    """
    Where the time of rounds goes, in sums that add up with `+`. A round is what happens between two deliveries to the
    streamer; the first of each answer, which reads the prompt, is left out. On CUDA the device is waited for at each
    reading of the clock, which a run that is not watched does not do.

    Args:
        rounds (`int`):
            How many.
        drafted (`int`):
            Tokens drafted in them.
        seconds (`float`), draft_seconds (`float`), target_seconds (`float`):
            In all, inside forwards of the draft, inside forwards of the target.
    """

    rounds: int = 0
    drafted: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0

    def __add__(self, other: RoundTimes) -> RoundTimes:
        return RoundTimes(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def to_dict(self) -> dict[str, Any]:
        """`rounds`, and per round: `drafted`, and seconds of all, draft, target and what remains; ready for JSON."""
        n = self.rounds or math.nan
        return {
            "rounds": self.rounds,
            "drafted": self.drafted / n,
            "seconds": self.seconds / n,
            "draft_seconds": self.draft_seconds / n,
            "target_seconds": self.target_seconds / n,
            "remaining_seconds": (self.seconds - self.draft_seconds - self.target_seconds) / n,
        }


@dataclass(frozen=True, eq=False)
class BenchmarkReport:
    """
    What was measured. `dataset=None` pools all data sets.

    Args:
        systems (`tuple[System, ...]`):
            One of them is the target alone.
        answers (`Mapping[str, Mapping[str, Sequence[TimedAnswer]]]`):
            Data set -> system -> answers, in the order of the prompts.
        rounds (`Mapping[str, Mapping[str, RoundTimes]]`):
            The same for the watched answers.
        facts (`Mapping[str, Any]`):
            Device, dtype, memory of weights.
    """

    systems: tuple[System, ...]
    answers: Mapping[str, Mapping[str, Sequence[TimedAnswer]]]
    rounds: Mapping[str, Mapping[str, RoundTimes]]
    facts: Mapping[str, Any]

    @property
    def alone(self) -> str:
        """Name of the target alone."""
        return next(system.name for system in self.systems if system.kind == "alone")

    @property
    def datasets(self) -> list[str]:
        return list(self.answers)

    def answers_of(self, system: str, dataset: str | None = None) -> list[TimedAnswer]:
        """Answers of a system, in the order of the requests."""
        return [answer for name in self._named(dataset) for answer in self.answers[name][system]]

    def rounds_of(self, system: str, dataset: str | None = None) -> RoundTimes:
        """Where the time of a system's rounds went."""
        return sum((self.rounds[name][system] for name in self._named(dataset)), RoundTimes())

    def stats_of(self, system: str, dataset: str | None = None) -> AcceptanceStats:
        """Acceptance over the timed answers of a system."""
        return sum((answer.stats for answer in self.answers_of(system, dataset)), AcceptanceStats())

    def _named(self, dataset: str | None) -> list[str]:
        return self.datasets if dataset is None else [dataset]

    def ratio(self, system: str, other: str, dataset: str | None = None) -> dict[str, Any]:
        """
        How many times as fast as another system one is, in tokens per second of the same request: `median` over
        requests, and its 95% `interval`.
        """
        pairs = zip(self.answers_of(system, dataset), self.answers_of(other, dataset), strict=True)
        return median_ratio((a.num_tokens / a.seconds) / (b.num_tokens / b.seconds) for a, b in pairs)

    def predicted(self, system: str, dataset: str | None = None) -> dict[str, float] | None:
        """
        What the cost model makes of the measured acceptance and costs; `None` for the target alone, or where answers
        are too short to tell.

        Returns:
            `dict[str, float]`: `c`, the time of a drafted token over that of the target's one-token forward;
            `speedup`, `expected_speedup(alpha, k, c)`; `speedup_wide`, the same with the measured forward over the
            drafted tokens in place of the one-token forward; `bound`, `expected_speedup(1, k, c)`. Where the number
            of drafted tokens is not fixed, the measured tokens per forward and drafted tokens per round stand in
            for the expected ones.
        """
        own, alone = self.rounds_of(system, dataset), self.rounds_of(self.alone, dataset)
        if system == self.alone or not own.rounds or not alone.rounds:
            return None
        stats = self.stats_of(system, dataset)
        one_token = alone.target_seconds / alone.rounds
        c = own.draft_seconds / own.drafted / one_token if own.drafted else 0.0
        wide = own.target_seconds / own.rounds / one_token
        k = next(s.fixed_k for s in self.systems if s.name == system)
        if k is not None and stats.examined:
            drafted, speedup, bound = float(k), expected_speedup(stats.alpha, k, c), expected_speedup(1, k, c)
        else:
            drafted = stats.drafted / stats.target_forwards
            speedup = stats.block_efficiency / (c * drafted + 1)
            bound = (drafted + 1) / (c * drafted + 1)
        as_wide = (c * drafted + 1) / (c * drafted + wide)
        return {"c": c, "speedup": speedup, "speedup_wide": speedup * as_wide, "bound": bound}

    def figures(self, system: str, dataset: str | None = None) -> dict[str, Any]:
        """Everything about one system on one data set, ready for JSON."""
        answers, stats = self.answers_of(system, dataset), self.stats_of(system, dataset)
        tokens, seconds = sum(a.num_tokens for a in answers), sum(a.seconds for a in answers)
        outcomes = [answer.outcome for answer in answers]
        peaks = [answer.peak_bytes for answer in answers if answer.peak_bytes is not None]
        times_alone, predicted = self.ratio(system, self.alone, dataset), self.predicted(system, dataset)
        figures: dict[str, Any] = {
            "requests": len(answers),
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "first_token_seconds": statistics.median(a.first_token_seconds for a in answers),
            **{k: v for k, v in stats.to_dict().items() if k not in ("requests", "accepted_length_histogram")},
            "drafted_per_round": stats.drafted / stats.target_forwards,
            "outputs": {name: outcomes.count(name) for name in ("identical", "tied", "differing")},
            "peak_bytes": max(peaks, default=None),
            "times_alone": times_alone,
            "predicted": predicted,
            "round": self.rounds_of(system, dataset).to_dict(),
        }
        alone = self.answers_of(self.alone, dataset)
        rate_alone = sum(a.num_tokens for a in alone) / sum(a.seconds for a in alone)
        figures["pooled_speedup"] = figures["tokens_per_second"] / rate_alone
        stock = next((s.name for s in self.systems if s.kind == "stock"), None)
        if stock is not None and system not in (stock, self.alone):
            figures["times_stock"] = self.ratio(system, stock, dataset)
        if predicted is not None:
            # Both sides pooled over requests; what is measured also reads the prompts, with both models.
            figures["measured_over_predicted"] = figures["pooled_speedup"] / predicted["speedup"]
            figures["measured_over_predicted_wide"] = figures["pooled_speedup"] / predicted["speedup_wide"]
        return figures

    def to_dict(self) -> dict[str, Any]:
        """Figures of each data set and of all (`"all"`), system by system, and the times of each request."""
        names = [system.name for system in self.systems]
        parts = {**{name: name for name in self.datasets}, ALL: None}
        return {
            **self.facts,
            "systems": [system.to_dict() for system in self.systems],
            "by_dataset": {
                shown: {name: self.figures(name, dataset) for name in names} for shown, dataset in parts.items()
            },
            "requests": {
                dataset: {
                    name: [
                        {"tokens": a.num_tokens, "seconds": a.seconds, "first_token_seconds": a.first_token_seconds}
                        for a in self.answers[dataset][name]
                    ]
                    for name in names
                }
                for dataset in self.datasets
            },
        }
