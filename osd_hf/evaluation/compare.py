"""Compare drafts for one target by replay of its answers, and evaluate a draft before and after learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from osd_hf.acceptance import AcceptanceStats, Comparison, figures_of
from osd_hf.config import OnlineConfig
from osd_hf.decoding.static import compiles_draft
from osd_hf.draft_head import DraftHead
from osd_hf.errors import ConfigError, DataError, UnsupportedModelError, VocabularyMismatchError
from osd_hf.evaluation.benchmark import System, alone_systems, benchmark
from osd_hf.evaluation.display import progress
from osd_hf.hub import Evaluation, EvaluationSet, hub_id
from osd_hf.models import (
    align_vocab,
    check_pair,
    common_tokenizer,
    device_clock,
    input_device,
    merged,
    prompt_room,
    unwrap,
)
from osd_hf.prompts import Prompt, encode_prompts
from osd_hf.recording import measured_costs, record_traces
from osd_hf.replay import replay_each
from osd_hf.speedup import ForwardSeconds, alpha_from_block_efficiency
from osd_hf.target_version import target_version
from osd_hf.trace import Trace
from osd_hf.utils.report import provenance


class Worth(NamedTuple):
    """The best k of a draft, the expected speed-up over the target alone, and its 95% interval, which reflects only
    acceptance."""

    num_assistant_tokens: int
    speedup: float
    interval: tuple[float, float]

    @property
    def answer(self) -> str:
        """`"yes"`, `"no"`, or `"not sure"` if the interval contains 1."""
        low, high = self.interval
        return "yes" if low > 1 else "no" if high < 1 else "not sure"


def _worth(cost: ForwardSeconds, stats: AcceptanceStats, num_assistant_tokens: int, new_tokens: float) -> Worth:
    alpha, (low, high) = 0.0, (0.0, 1.0)
    if stats.examined:
        # Measured tokens per forward, which alpha alone would overestimate.
        alpha = alpha_from_block_efficiency(stats.block_efficiency, num_assistant_tokens)
        low, high = (min(max(end - stats.alpha + alpha, 0.0), 1.0) for end in stats.alpha_interval)
    k, speedup = cost.best_k(alpha, new_tokens)
    low, high = (cost.speedup(end, k, new_tokens) for end in (low, high))
    return Worth(k, speedup, (low, high))


@dataclass(frozen=True, eq=False)
class DraftComparison:
    """The result of [`compare`]. With `compiles_drafts` among the facts, drafts are compiled by default there and cost
    less than the eager forwards in `costs`."""

    dataset: EvaluationSet  # the prompts that left room for an answer
    num_assistant_tokens: int  # k of the scores
    scores: Comparison
    costs: Mapping[str, ForwardSeconds]  # of the target and each draft
    new_tokens: float  # mean tokens of an answer
    target: Mapping[str, Any]  # `name`, `revision` on the Hub, and `version`, a fingerprint of the weights
    models: Mapping[str, Mapping[str, Any]]  # the same of each draft
    facts: dict[str, Any] = field(default_factory=dict)  # command, versions, machine, device and dtype

    @cached_property
    def worth(self) -> dict[str, Worth]:
        """The worth of each draft, the best first."""
        found = {
            name: _worth(cost, self.scores.totals[name], self.num_assistant_tokens, self.new_tokens)
            for name, cost in self.costs.items()
        }
        return dict(sorted(found.items(), key=lambda one: -one[1].speedup))

    def summary(self) -> str:
        """Return two lines: whether the best draft pays, and why."""
        name, worth = next(iter(self.worth.items()))
        stats, cost = self.scores.totals[name], self.costs[name]
        (low, high), k = worth.interval, worth.num_assistant_tokens
        verdicts = {"yes": f"Yes, {name} is", "no": f"No, {name} is not", "not sure": f"Not sure of {name}"}
        verdict = verdicts[worth.answer]
        more = "; more prompts would tell" if worth.answer == "not sure" else ""
        if worth.answer != "yes" and self.facts.get("compiles_drafts"):
            more += "; compiled, which is the default on this device, a draft takes less time: measure by osd-hf bench"
        alphas = " to ".join(f"{alpha:.0%}" for alpha in stats.alpha_interval)
        return (
            f"Worth it? {verdict}: expected {worth.speedup:.2f} [{low:.2f}, {high:.2f}] times as fast as "
            f"{self.target['name']} alone, drafting {k} token{'s' * (k > 1)} a round{more}.\n"
            f"Why? The target accepts {stats.alpha:.0%} ({alphas}) of its tokens, and drafting pays from about "
            f"{cost.c:.0%} on: that share of a target forward is what a drafted token and its verification cost."
        )

    def gains(self) -> Iterator[tuple[str, str, Comparison]]:
        """Yield each pair of drafts, the better one first, with their comparison on the same requests."""
        for best, other in combinations(sorted(self.costs, key=lambda name: -self.scores.totals[name].alpha), 2):
            sides = {name: self.scores.sides[name] for name in (other, best)}
            yield best, other, Comparison(self.scores.domains, sides)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, ready for JSON."""
        drafts = {}
        for name, worth in self.worth.items():
            cost, parts = self.costs[name], self.scores.parts().items()
            drafts[name] = {
                **self.models[name],
                **figures_of(self.scores.totals[name]),
                "by_domain": {domain: figures_of(part.totals[name]) for domain, part in parts if domain != "all"},
                "c": cost.draft / cost.target,
                "c_with_verification": cost.c,
                "seconds": dict(vars(cost)),
                "best_num_assistant_tokens": worth.num_assistant_tokens,
                "expected_speedup": worth.speedup,
                "expected_speedup_interval": list(worth.interval),
                "worth_it": worth.answer,
            }
        gains = [
            {"draft": best, "over": other, "gain": pair.gain, "gain_interval": list(pair.gain_interval)}
            for best, other, pair in self.gains()
        ]
        return {
            "target": dict(self.target),
            "prompts": self.dataset.name,
            "num_prompts": len(self.dataset.prompts),
            "prompts_digest": self.dataset.digest,
            "max_new_tokens": self.dataset.max_new_tokens,
            "answer_tokens": self.new_tokens,
            "num_assistant_tokens": self.num_assistant_tokens,
            "drafts": drafts,
            "gains": gains,
            "provenance": self.facts,
        }


def compare(
    target: Any,
    drafts: Mapping[str, Any],
    tokenizer: Any,
    dataset: EvaluationSet | Sequence[str],
    *,
    num_assistant_tokens: int = 5,
    clock: Callable[[], float] | None = None,
    show_progress: bool = False,
) -> DraftComparison:
    """
    Compare drafts for one target. The target answers each prompt once, greedily. All drafts are scored on these
    answers by replay, and their eager forwards are timed. The expected speed-up follows from the cost model
    (arXiv 2211.17192).

    Args:
        target (`PreTrainedModel`): The target.
        drafts (`Mapping[str, Any]`): Name -> a draft, or a `PeftModel`; its vocabulary may be padded differently.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        dataset (`osd_hf.hub.EvaluationSet` or `Sequence[str]`): The prompts.
        num_assistant_tokens (`int`, *optional*, defaults to 5): The k of the reported acceptance.
        clock (`Callable[[], float]`, *optional*): Seconds; by default wall time when the device has finished.
        show_progress (`bool`, *optional*, defaults to `False`): Whether to show progress bars.

    Raises:
        ConfigError: No draft; the answers leave no room for a prompt; `dataset` is one text.
        DataError: Fewer than two prompts leave room for their answers.
        UnsupportedModelError: A draft that assisted generation cannot run with this target.
        VocabularyMismatchError: A draft with another tokenizer.
    """
    if not drafts:
        raise ConfigError("There is no draft to compare. Name one, or several.")
    fitted = {name: _fitted(name, draft, target, tokenizer) for name, draft in drafts.items()}
    models = list(fitted.values())
    dataset, traces = answered(target, [target, *models], tokenizer, dataset, show_progress)
    sides = {name: replay_each(draft, traces, num_assistant_tokens) for name, draft in fitted.items()}
    asked = sorted(traces, key=lambda trace: len(trace.prompt_ids))[len(traces) // 2]
    costs = measured_costs(target, models, asked.prompt_ids, clock or device_clock(target))
    facts, device = provenance(threads=torch.get_num_threads()), input_device(unwrap(target))
    facts["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else facts["processor"]
    facts["dtype"] = str(unwrap(target).dtype).removeprefix("torch.")
    facts["compiles_drafts"] = compiles_draft(OnlineConfig(), device.type)
    return DraftComparison(
        dataset=dataset,
        num_assistant_tokens=num_assistant_tokens,
        scores=Comparison([p.domain for p in dataset.prompts], sides),
        costs=dict(zip(fitted, costs, strict=True)),
        new_tokens=float(np.mean([len(trace) for trace in traces])),
        target=_known(target),
        models={name: _known(draft) | {"name": name} for name, draft in drafts.items()},
        facts=facts,
    )


def _fitted(name: str, draft: Any, target: Any, tokenizer: Any) -> Any:
    """Return the draft with its adapter merged and its vocabulary resized to the target's."""
    try:
        draft = merged(draft)
        check_pair(target, draft)
        common_tokenizer(tokenizer, unwrap(target), unwrap(draft))
        return align_vocab(draft, unwrap(target), tokenizer)
    except (UnsupportedModelError, VocabularyMismatchError) as error:
        raise type(error)(f"The draft {name!r} cannot be compared. {error}") from error


def _known(model: Any) -> dict[str, Any]:
    config = unwrap(model).config
    name = config.name_or_path
    return {
        "name": hub_id(name) or Path(name).name or type(unwrap(model)).__name__,
        "revision": getattr(config, "_commit_hash", None),
        "version": target_version(model),
    }


# --- one draft, before and after -----------------------------------------------------------------------------------


def evaluate(
    target: Any,
    before: Any,
    after: Any,
    tokenizer: Any,
    dataset: EvaluationSet | Sequence[str],
    *,
    num_assistant_tokens: int | None = None,
    timed_requests: int = 0,
    show_progress: bool = False,
) -> Evaluation:
    """Measure a draft before and after learning on the target's greedy answers; see [`compare`]. By default k is the
    best one by the cost model if requests are timed, otherwise 5. Decoder-only pairs answer the first `timed_requests`
    prompts live as well, by the target alone and with both drafts."""
    dataset, traces = answered(target, [before], tokenizer, dataset, False)
    speedups, k = dict[str, dict[str, Any]](), num_assistant_tokens or 5
    if timed_requests and not target.config.is_encoder_decoder:
        asked = {"evaluation": [trace.prompt_ids.tolist() for trace in traces[:timed_requests]]}
        if num_assistant_tokens is None:
            (cost,) = measured_costs(target, [after], traces[0].prompt_ids, device_clock(target))
            stats = sum(replay_each(after, traces, k), AcceptanceStats())
            k = _worth(cost, stats, k, float(np.mean([len(trace) for trace in traces]))).num_assistant_tokens
        sides = {"transformers, draft before": before, "transformers, this draft": after}
        systems = [
            *alone_systems(target),
            # transformers' loop knows no such heads.
            *(System(name, "stock", d, k) for name, d in sides.items() if not isinstance(d, DraftHead)),
            System("osd_hf, this draft, auto", "lean", after, "auto"),
        ]
        how: dict[str, Any] = {"tokenizer": tokenizer, "show_progress": show_progress}
        report = benchmark(target, systems, asked, max_new_tokens=dataset.max_new_tokens, **how)
        speedups = {s.name: report.ratio(s.name, report.alone) for s in systems if s.kind != "alone"}
    scores = {name: replay_each(draft, traces, k) for name, draft in (("before", before), ("after", after))}
    return Evaluation(dataset, k, Comparison([p.domain for p in dataset.prompts], scores), speedups, provenance())


def answered(
    target: Any, drafts: Sequence[Any], tokenizer: Any, dataset: EvaluationSet | Sequence[str], show_progress: bool
) -> tuple[EvaluationSet, list[Trace]]:
    """Return the prompts that leave room for an answer, and the target's greedy answers; raises as [`evaluate`]."""
    if isinstance(dataset, str):
        raise ConfigError("`dataset` must be a list of texts or an `EvaluationSet`, got one text. Put it into a list.")
    if not isinstance(dataset, EvaluationSet):
        dataset = EvaluationSet("prompts", tuple(Prompt(i, text) for i, text in enumerate(dataset)))
    rooms = [prompt_room(target.config, draft.config, dataset.max_new_tokens) for draft in drafts]
    room = min((room for room in rooms if room is not None), default=None)
    encoded = encode_prompts(dataset.prompts, tokenizer, max_prompt_tokens=room)
    if len(encoded.prompts) < 2:
        counts = f"{len(encoded.prompts)} of {len(dataset.prompts)} prompts of {dataset.name!r}"
        raise DataError(f"{counts} leave room for {dataset.max_new_tokens} tokens of an answer; two are needed.")
    ids = [ids for _, ids in encoded.prompts]
    traces: Iterable[Trace] = record_traces(target, ids, max_new_tokens=dataset.max_new_tokens, num_logprobs=1)
    if show_progress:
        traces = progress(traces, "the target answers", "prompt", len(ids))
    return replace(dataset, prompts=tuple(p for p, _ in encoded.prompts)), list(traces)
