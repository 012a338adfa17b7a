"""The README of a published draft, and of a published store: what it is, what was measured, how it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData

from osd_hf.evaluation import EVALUATION, PLOT, Evaluation
from osd_hf.masking import without_credentials

__all__ = ["DraftFacts", "draft_card", "store_card"]

TAGS = ("assistant-model", "speculative-decoding", "draft-model", "distillation", "osd-hf")
CITATION = """@inproceedings{liu2024online,
  title = {Online Speculative Decoding},
  author = {Liu, Xiaoxuan and Hu, Lanxiang and Bailis, Peter and Cheung, Alvin and Deng, Zhijie and Stoica, Ion and Zhang, Hao},
  booktitle = {International Conference on Machine Learning},
  year = {2024},
  url = {https://arxiv.org/abs/2310.07177},
}"""  # noqa: E501


@dataclass(frozen=True)
class DraftFacts:
    """
    What a card says of a draft beside its figures.

    Args:
        target (`str`, *optional*):
            Hub id of the model that it drafts for.
        target_revision (`str`, *optional*):
            Commit of it.
        base_model (`str`, *optional*):
            Hub id of the draft that it was learned from.
        is_adapter (`bool`, *optional*, defaults to `False`):
            Whether the repo holds a LoRA adapter alone.
        domains (`tuple[str, ...]`, *optional*):
            That it was learned on.
        training (`Mapping[str, Any]`, *optional*):
            Facts of the learning, such as requests, updates and settings.
        command (`str`, *optional*):
            That made it.
        license (`str`, *optional*):
            Of the draft's base.
    """

    target: str | None = None
    target_revision: str | None = None
    base_model: str | None = None
    is_adapter: bool = False
    domains: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    license: str | None = None


def draft_card(repo_id: str, facts: DraftFacts, evaluation: Evaluation | None = None) -> ModelCard:
    """
    The model card of a draft.

    Args:
        repo_id (`str`):
            As `user/name`; what the snippets load.
        facts (`DraftFacts`):
            What it is.
        evaluation (`Evaluation`, *optional*):
            What was measured; lies in the repo's folder `evaluation`.
    """
    results = None
    if evaluation is not None:
        named: dict[str, Any] = {
            "task_type": "text-generation", "dataset_type": "evaluation/prompts.jsonl",
            "dataset_name": evaluation.dataset.name,
        }  # fmt: skip
        stats = evaluation.stats("after")
        results = [
            EvalResult(**named, metric_type="acceptance_rate", metric_name="acceptance rate (alpha)",
                       metric_value=round(stats.alpha, 4)),
            EvalResult(**named, metric_type="block_efficiency", metric_name="tokens per target forward",
                       metric_value=round(stats.block_efficiency, 4)),
        ]  # fmt: skip
    data = ModelCardData(
        base_model=facts.base_model,
        base_model_relation=None if facts.base_model is None else "adapter" if facts.is_adapter else "finetune",
        library_name="peft" if facts.is_adapter else "transformers",
        pipeline_tag="text-generation",
        license=facts.license,
        tags=list(TAGS),
        target_model=facts.target,
        target_revision=facts.target_revision,
        model_name=repo_id.split("/")[-1],
        eval_results=results,
    )
    parts = [_what(facts), _measured(evaluation), _use(repo_id, facts, evaluation), _made(facts)]
    text = f"# {repo_id.split('/')[-1]}\n\n" + "\n\n".join(part for part in parts if part)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n\n## Citation\n\n```bibtex\n{CITATION}\n```\n")


def _what(facts: DraftFacts) -> str:
    target = "its target" if facts.target is None else f"[{facts.target}](https://huggingface.co/{facts.target})"
    revision = "" if facts.target_revision is None else f" at revision `{facts.target_revision}`"
    base = (
        ""
        if facts.base_model is None
        else f", learned from [{facts.base_model}](https://huggingface.co/{facts.base_model})"
    )
    domains = f" It was learned on: {', '.join(facts.domains)}." if facts.domains else ""
    kind = "A LoRA adapter of a draft model" if facts.is_adapter else "A draft (assistant) model"
    return (
        f"{kind} for speculative decoding with {target}{revision}{base}. It was distilled from the target's own "
        f"corrections by [osd_hf](https://arxiv.org/abs/2310.07177), online speculative decoding: it is no model to "
        f"chat with, it guesses what its target will say, and the target's output stays the target's.{domains}"
    )


def _measured(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "## Acceptance\n\nNot measured."
    k = evaluation.num_assistant_tokens
    rows = [("all", None), *((domain, domain) for domain in evaluation.domains)]
    lines = [
        f"| {name} | {evaluation.stats('after', domain).num_requests} | "
        + " | ".join(
            f"{stats.alpha:.3f} [{stats.alpha_interval[0]:.3f}, {stats.alpha_interval[1]:.3f}]"
            for stats in (evaluation.stats(side, domain) for side in ("before", "after"))
        )
        + " | "
        + " to ".join(f"{evaluation.stats(side, domain).block_efficiency:.2f}" for side in ("before", "after"))
        + " |"
        for name, domain in rows
    ]
    table = "\n".join([
        "| prompts | number | alpha before | alpha of this draft | tokens per target forward |",
        "|---|---|---|---|---|",
        *lines,
    ])  # fmt: skip
    speed = ""
    if evaluation.speedups:
        told = "; ".join(
            f"{name} {s['median']:.2f} [{s['interval'][0]:.2f}, {s['interval'][1]:.2f}]"
            for name, s in evaluation.speedups.items()
        )
        facts = evaluation.facts
        speed = (
            f"\n\nTimes as fast as the target alone, answered in turns on {facts.get('processor', 'one machine')}, "
            f"median [95%]: {told}."
        )
    return (
        f"## Acceptance\n\nOn {evaluation.dataset.name} (`evaluation/prompts.jsonl`), greedy answers of the target of "
        f"at most {evaluation.dataset.max_new_tokens} tokens, k = {k}, threshold 0, with 95% intervals; alpha is the "
        f"share of examined draft tokens that the target accepts.\n\n{table}{speed}\n\n"
        f"![alpha before and after]({EVALUATION}/{PLOT})"
    )


def _use(repo_id: str, facts: DraftFacts, evaluation: Evaluation | None) -> str:
    target = facts.target or "TARGET"
    k = 5 if evaluation is None else evaluation.num_assistant_tokens
    if facts.is_adapter:
        load = (
            "from peft import PeftModel\n\n"
            f'base = AutoModelForCausalLM.from_pretrained("{facts.base_model or "DRAFT"}")\n'
            f'draft = PeftModel.from_pretrained(base, "{repo_id}").merge_and_unload()'
        )
    else:
        load = f'draft = AutoModelForCausalLM.from_pretrained("{repo_id}")'
    snippet = SNIPPET.format(repo=repo_id, target=target, load=load)
    if evaluation is not None:
        snippet += MEASURE.format(
            repo=repo_id, max_new_tokens=evaluation.dataset.max_new_tokens, alpha=evaluation.stats("after").alpha, k=k
        )
    else:
        snippet += "```"
    engine = ""
    if not facts.is_adapter:
        speculative = f'{{"method": "draft_model", "model": "{repo_id}", "num_speculative_tokens": {k}}}'
        engine = f"\n\nWith vLLM:\n\n```sh\nvllm serve {target} --speculative-config '{speculative}'\n```"
    return f"## Use\n\nWith transformers alone:\n\n{snippet}{engine}"


SNIPPET = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{target}")
{load}
tokenizer = AutoTokenizer.from_pretrained("{repo}")


def encoded(text):
    if tokenizer.chat_template is None:
        return tokenizer(text, return_tensors="pt")
    turn = [{{"role": "user", "content": text}}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt")


inputs = encoded("Hello!")
output = target.generate(**inputs, assistant_model=draft, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""

MEASURE = """```

The acceptance above, measured again with transformers alone:

```python
import json
from pathlib import Path

from huggingface_hub import hf_hub_download


class Rounds:
    "Counts what each round of draft and target gives: all tokens but the last were accepted."

    def __init__(self):
        self.sizes = []

    def put(self, ids):
        self.sizes.append(ids.numel())

    def end(self):
        pass


here = Path("{repo}", "evaluation/prompts.jsonl")
file = here if here.exists() else hf_hub_download("{repo}", "evaluation/prompts.jsonl")
k = draft.generation_config.num_assistant_tokens
examined = accepted = 0
for line in Path(file).read_text(encoding="utf-8").splitlines():
    rounds = Rounds()
    inputs = encoded(json.loads(line)["prompt"])
    target.generate(
        **inputs, assistant_model=draft, streamer=rounds, max_new_tokens={max_new_tokens}, do_sample=False
    )
    for size in rounds.sizes[1:]:  # the first is the prompt
        accepted += size - 1
        examined += min(size, k)
print("alpha", accepted / examined)  # {alpha:.3f} at k = {k}
```"""


def _made(facts: DraftFacts) -> str:
    lines = [f"- {name}: {value}" for name, value in facts.training.items()]
    command = "" if facts.command is None else f"\n\n```sh\n{facts.command}\n```"
    made = ("\n".join(lines) or "No facts were recorded.") + command
    return "## How it was made\n\n" + without_credentials(made)  # facts are their writer's, and cards are for others


def store_card(
    repo_id: str, *, target: str | None, requests: int, domains: Sequence[str], license: str
) -> DatasetCard:
    """
    The card of a published store of corrections.

    Args:
        repo_id (`str`):
            As `user/name`.
        target (`str`, *optional*):
            Hub id of the model whose answers these are.
        requests (`int`):
            In the store.
        domains (`Sequence[str]`):
            Labels of them.
        license (`str`):
            Of the data.
    """
    data = DatasetCardData(
        license=license, tags=["speculative-decoding", "distillation", "osd-hf"], task_categories=["text-generation"],
        pretty_name=repo_id.split("/")[-1], configs=[{"config_name": "default", "data_files": "**/*.parquet"}],
    )  # fmt: skip
    whose = "a target model" if target is None else f"[{target}](https://huggingface.co/{target})"
    labels = f" Domains: {', '.join(domains)}." if domains else ""
    text = (
        f"# {repo_id.split('/')[-1]}\n\n{requests:,} requests answered by {whose}, as token ids: prompt, completion, "
        "the rounds of speculative decoding, and the target's largest log-probabilities per position with the mass of "
        f"the tail.{labels} **It holds the text of the requests.** It was published by an explicit call, and is what "
        "osd_hf replays drafts on and learns from.\n\n```python\nfrom datasets import load_dataset\n\n"
        f'load_dataset("{repo_id}")\n```\n'
    )
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n{text}")
