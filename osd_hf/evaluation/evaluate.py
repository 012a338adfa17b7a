"""A draft as it was and as it is, measured on the target's own answers: what goes up with it to the Hub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from osd_hf.acceptance import AcceptanceStats
from osd_hf.decoding.hook import record_traces
from osd_hf.errors import ConfigError, DataError
from osd_hf.evaluation.benchmark import System, benchmark
from osd_hf.evaluation.display import progress
from osd_hf.hub.cards import Evaluation, EvaluationSet
from osd_hf.models import prompt_room
from osd_hf.prompts import Prompt, encode_prompts
from osd_hf.replay import replay_each
from osd_hf.trace import Trace
from osd_hf.utils.report import provenance

__all__ = ["evaluate"]

TUNED = range(1, 9)  # numbers of drafted tokens that are tried, where none is given


def evaluate(
    target: Any, before: Any, after: Any, tokenizer: Any, dataset: EvaluationSet | Sequence[str], *,
    num_assistant_tokens: int | None = None, timed_requests: int = 0, show_progress: bool = False,
) -> Evaluation:  # fmt: skip
    """
    Measure a draft as it was and as it is on the target's greedy answers.

    Args:
        target (`PreTrainedModel`), before (`PreTrainedModel`), after (`PreTrainedModel`):
            Models with one vocabulary; left as they are.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of all three.
        dataset (`osd_hf.hub.cards.EvaluationSet` or `Sequence[str]`):
            The prompts, with the most tokens of an answer; of texts alone, the set's own default.
        num_assistant_tokens (`int`, *optional*):
            k. By default, where requests are timed, the one with the most tokens per second by replay and measured
            costs; otherwise 5.
        timed_requests (`int`, *optional*, defaults to 0):
            Prompts that are also answered live by decoder-only pairs: by the target alone and with both drafts in
            turns, with bars on the standard error where `show_progress` is set.

    Raises:
        ConfigError: the answers leave no room for a prompt; `dataset` is one text.
        DataError: fewer than two prompts leave room for their answers.
    """
    dataset, traces = answered(target, [before], tokenizer, dataset)
    speedups, k = dict[str, dict[str, Any]](), num_assistant_tokens or 5
    if timed_requests and not target.config.is_encoder_decoder:
        asked = {"evaluation": [trace.prompt_ids.tolist() for trace in traces[:timed_requests]]}
        if num_assistant_tokens is None:
            k = _tuned(target, after, tokenizer, asked, traces, dataset.max_new_tokens)
        systems = [
            System("target alone", "alone"),
            System("transformers, draft before", "stock", before, k),
            System("transformers, this draft", "stock", after, k),
            System("osd_hf, this draft, auto", "lean", after, "auto"),
        ]
        report = benchmark(
            target, systems, asked, max_new_tokens=dataset.max_new_tokens, watched_requests=0, tokenizer=tokenizer,
            show_progress=show_progress,
        )  # fmt: skip
        speedups = {s.name: report.ratio(s.name, report.alone) for s in systems if s.name != report.alone}
    as_it_was, as_it_is = (tuple(replay_each(draft, traces, k)) for draft in (before, after))
    return Evaluation(dataset, k, as_it_was, as_it_is, speedups, provenance())


def answered(
    target: Any, drafts: Sequence[Any], tokenizer: Any, dataset: EvaluationSet | Sequence[str], *,
    show_progress: bool = False,
) -> tuple[EvaluationSet, list[Trace]]:  # fmt: skip
    """The prompts that leave room for an answer of the target and for these drafts, and its greedy answers to them;
    raises as [`evaluate`] does."""
    if isinstance(dataset, str):
        raise ConfigError("`dataset` must be a list of texts or an `EvaluationSet`, got one text. Put it into a list.")
    if not isinstance(dataset, EvaluationSet):
        dataset = EvaluationSet("prompts", tuple(Prompt(i, text) for i, text in enumerate(dataset)))
    rooms = [prompt_room(target.config, draft.config, dataset.max_new_tokens) for draft in drafts]
    room = min((room for room in rooms if room is not None), default=None)
    encoded = encode_prompts(dataset.prompts, tokenizer, max_prompt_tokens=room)
    if len(encoded.prompts) < 2:
        raise DataError(
            f"Of {len(dataset.prompts)} prompts of {dataset.name!r}, {len(encoded.prompts)} leave room for an answer "
            f"of {dataset.max_new_tokens} tokens; two are needed. Bound the answers lower, or take shorter prompts."
        )
    ids = [ids for _, ids in encoded.prompts]
    traces: Iterable[Trace] = record_traces(target, ids, max_new_tokens=dataset.max_new_tokens, num_logprobs=1)
    if show_progress:
        traces = progress(traces, "the target answers", "prompt", len(ids))
    return replace(dataset, prompts=tuple(p for p, _ in encoded.prompts)), list(traces)


def _tuned(
    target: Any, draft: Any, tokenizer: Any, asked: dict[str, list[list[int]]], traces: Any, max_new_tokens: int
) -> int:
    """The k with the most tokens per second: rounds by replay, their times from a few watched ones."""
    first = {name: group[:4] for name, group in asked.items()}
    systems = [System("alone", "alone"), *(System(f"k{k}", "stock", draft, k) for k in (1, 7))]
    report = benchmark(target, systems, first, max_new_tokens=max_new_tokens, watched_requests=0, tokenizer=tokenizer)
    # Seconds of a round are taken for a line in k through the two that were timed.
    seconds = []
    for k in (1, 7):
        answers = report.answers_of(f"k{k}")
        seconds.append(sum(a.seconds for a in answers) / sum(a.stats.target_forwards for a in answers))
    slope = max((seconds[1] - seconds[0]) / 6, 0.0)

    def rate(k: int) -> float:
        stats = sum(replay_each(draft, traces, k), AcceptanceStats())
        return stats.block_efficiency / (seconds[0] + (k - 1) * slope)

    return max(TUNED, key=rate)
