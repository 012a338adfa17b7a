"""The experiments of the paper (arXiv 2310.07177): one data set, one pair, online or offline.

    python recipes/paper.py gsm8k                                          # the paper's models, online
    python recipes/paper.py xsum --mode offline --arch causal
    python recipes/paper.py spider --target DIR --draft DIR --data spider.jsonl --requests 600

The report has the acceptance of the original and of the learned draft on the same greedy answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import K, gain, last_share, write_report
from datasets import load_dataset
from tqdm import tqdm

from osd_hf import AcceptanceStats, CorrectionStore, OnlineAssistant, OnlineConfig, replay
from osd_hf.distillation.data import SAMPLE_SOURCES
from osd_hf.loading import Pair
from osd_hf.loading import load_pair as load_models
from osd_hf.losses import DIVERGENCES
from osd_hf.models import prompt_room
from osd_hf.prompts import Prompt, encode_prompts
from osd_hf.recording import record_traces
from osd_hf.replay import replay_each

HELD_OUT = 0.2
MAX_TEXT_TOKENS = 1024  # longer texts are cut
PAPER_MODELS = {
    "causal": ("lmsys/vicuna-7b-v1.3", "JackFram/llama-160m"),
    "t5": ("google/flan-t5-xl", "google/t5-efficient-small"),
}
# Its repository has none; this is how the model was trained.
VICUNA = (
    "{{ bos_token }}A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
    "{% for m in messages %} USER: {{ m['content'] }}{% endfor %} ASSISTANT:"
)


@dataclass(frozen=True)
class Experiment:
    """
    A data set of the paper.

    Args:
        hub (`str`), subset (`str`, *optional*), revision (`str`, *optional*):
            The data set on the Hub (its train split), its configuration, and its branch.
        template (`str`):
            Format string of the prompt over the columns of the data set.
        architectures (`tuple[str, ...]`, *optional*, defaults to `("causal", "t5")`):
            Kinds of pairs. The first is the default.
    """

    hub: str
    template: str
    subset: str | None = None
    revision: str | None = None
    architectures: tuple[str, ...] = ("causal", "t5")


EXPERIMENTS = {
    "gsm8k": Experiment("openai/gsm8k", "{question}", subset="main"),
    "spider": Experiment(
        "xlangai/spider",
        "Translate this question to the database {db_id} into SQL. Answer with the SQL alone.\n{question}",
    ),
    "finance_alpaca": Experiment("gbharti/finance-alpaca", "{instruction}"),
    "code_search_net_python": Experiment(
        "code-search-net/code_search_net",
        "Write a Python function with this documentation:\n{func_documentation_string}",
        subset="python",
    ),
    # The main branch of piqa has a loading script, which `datasets` no longer runs.
    "piqa": Experiment("ybisk/piqa", "{goal}", revision="refs/convert/parquet", architectures=("causal",)),
    "cnn_dailymail": Experiment(
        "abisee/cnn_dailymail", "summarize: {article}", subset="3.0.0", architectures=("t5", "causal")
    ),
    "xsum": Experiment("EdinburghNLP/xsum", "summarize: {document}", architectures=("t5", "causal")),
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=tuple(EXPERIMENTS))
    parser.add_argument("--mode", choices=("online", "offline"), default="online")
    parser.add_argument("--arch", choices=tuple(PAPER_MODELS), help="kind of models")
    parser.add_argument("--target", help="Hub id or folder; the paper's by default")
    parser.add_argument("--draft", help="Hub id or folder; the paper's by default")
    parser.add_argument("--data", help="jsonl or parquet file with the columns of the Hub data set")
    parser.add_argument("--template", help="template of the prompt over these columns")
    parser.add_argument("--requests", type=int, default=2000, help="offline, a fifth of them is held out")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-steps", type=int, help="maximum number of optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order, the samples, and the replay")
    parser.add_argument("--divergence", choices=tuple(DIVERGENCES), default="forward_kl")
    parser.add_argument("--learning-rate", type=float, help="default: that of OnlineConfig online, 2e-5 offline")
    parser.add_argument("--paper-rule", action="store_true", help="online: the update rule of the paper")
    parser.add_argument("--sample-source", choices=SAMPLE_SOURCES, default="teacher", help="offline")
    parser.add_argument("--epochs", type=float, default=2.0, help="offline, unless --max-steps is given")
    parser.add_argument("--name", help="name of the report")
    args = parser.parse_args(argv)
    experiment = EXPERIMENTS[args.dataset]
    args.arch = args.arch or experiment.architectures[0]
    args.template = args.template or experiment.template
    if args.arch not in experiment.architectures:
        parser.error(f"{args.dataset} is for --arch {experiment.architectures[0]}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run the experiment of the command line and write its report."""
    args = parse_arguments(argv)
    pair = load_pair(args)
    write(args, run(args, pair, read_rows(args)))


def load_pair(args: argparse.Namespace) -> Pair:
    """Load target, draft, and tokenizer; those of the paper by default."""
    target, draft = PAPER_MODELS[args.arch]
    args.target, args.draft = args.target or target, args.draft or draft
    pair = load_models(args.target, args.draft)
    if "vicuna" in args.target and pair.tokenizer.chat_template is None:
        pair.tokenizer.chat_template = VICUNA
    if pair.target.config.is_encoder_decoder != (args.arch == "t5"):
        sys.exit(f"--arch {args.arch} does not fit: {args.target} is a {type(pair.target).__name__}.")
    return pair


def read_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows in a random order (seeded), streamed because some of the data sets are huge."""
    experiment = EXPERIMENTS[args.dataset]
    source: dict[str, Any] = {
        "path": experiment.hub, "name": experiment.subset, "revision": experiment.revision, "split": "train",
    }  # fmt: skip
    if args.data is not None:
        kind = "parquet" if args.data.endswith(".parquet") else "json"
        source = {"path": kind, "data_files": args.data, "split": "train"}
    yield from load_dataset(**source, streaming=True).shuffle(seed=args.seed, buffer_size=10_000)


def prompts(args: argparse.Namespace, pair: Pair, rows: Iterable[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of the requests."""
    target, draft, tokenizer = pair
    template = args.template.replace("\\n", "\n")  # as a shell passes it

    def text(row: dict[str, Any]) -> str:
        try:
            whole = template.format(**row)
        except (LookupError, TypeError) as error:
            sys.exit(f"The template {template!r} does not fit a row ({error!r}) with the columns {', '.join(row)}.")
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        if len(ids) <= MAX_TEXT_TOKENS:
            return whole
        return tokenizer.decode(ids[:MAX_TEXT_TOKENS], skip_special_tokens=True)

    encoded = encode_prompts(
        (Prompt(index, text(row)) for index, row in enumerate(rows)),
        tokenizer,
        limit=args.requests,
        max_prompt_tokens=prompt_room(target.config, draft.config, args.max_new_tokens),
    )
    return [ids for _, ids in encoded.prompts]


def run(args: argparse.Namespace, pair: Pair, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Learn from the requests of these rows; return the acceptance before and after."""
    requests, label = prompts(args, pair, rows), args.dataset
    learn = {"online": online, "offline": offline}[args.mode]
    before, after, steps = learn(args, pair, requests, label)
    rise = gain(before, after)
    low, high = rise["gain_interval"]
    print(
        f"{label}, {args.arch}, {args.mode}, {len(requests)} requests, {steps} steps: before {before!r}; "
        f"after {after!r}; gain {rise['gain']:+.3f} [{low:+.3f}, {high:+.3f}]",
        flush=True,
    )
    return {
        "label": label, "requests": len(requests), "steps": steps, "before": before.to_dict(),
        "after": after.to_dict(), **rise,
    }  # fmt: skip


def online(
    args: argparse.Namespace, pair: Pair, requests: list[list[int]], label: str
) -> tuple[AcceptanceStats, AcceptanceStats, int]:
    """Serve the requests and learn from them. Acceptance is measured on the last fifth."""
    rule = OnlineConfig.paper if args.paper_rule else OnlineConfig
    changes = {} if args.learning_rate is None else {"learning_rate": args.learning_rate}
    config = rule(
        num_assistant_tokens=K, update_strategy="manual", divergence=args.divergence, seed=args.seed, **changes
    )
    store, steps = CorrectionStore(), 0
    with OnlineAssistant(*pair, config, store=store) as assistant:
        for number, request in enumerate(tqdm(requests, desc=label, leave=False), start=1):
            ids = torch.tensor([request], device=pair.target.device)
            assistant.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=args.max_new_tokens
            )
            left = config.steps_per_update if args.max_steps is None else args.max_steps - steps
            if number % config.update_interval == 0 and left > 0:
                steps += assistant.update(min(left, config.steps_per_update)).steps
    traces = list(store)
    before = replay_each(pair.draft, traces, K)
    return last_share(before, HELD_OUT), last_share([*map(AcceptanceStats.from_trace, traces)], HELD_OUT), steps


def offline(
    args: argparse.Namespace, pair: Pair, requests: list[list[int]], label: str
) -> tuple[AcceptanceStats, AcceptanceStats, int]:
    """Distill from four fifths of the prompts. Acceptance is measured on answers to the others."""
    from osd_hf import DistillConfig, distill  # imports trl, which takes seconds

    target, draft, _ = pair
    split = round(len(requests) * (1 - HELD_OUT))
    config = DistillConfig(
        output_dir=f"runs/{label}", sample_source=args.sample_source, divergence=args.divergence,
        learning_rate=args.learning_rate or 2e-5, lr_scheduler_type="cosine", warmup_steps=0.03,
        # The target's answers as they are served; drafts' greedy ones run in circles.
        temperature=0.0 if args.sample_source == "teacher" else 1.0,
        num_train_epochs=args.epochs, max_steps=args.max_steps or -1, per_device_train_batch_size=16,
        max_new_tokens=args.max_new_tokens, num_assistant_tokens=K, seed=args.seed, bf16=target.device.type == "cuda",
        save_strategy="no", report_to="none",
    )  # fmt: skip
    rows = [{"prompt": ids} for ids in requests[:split]]
    result = distill(dataset=rows, config=config, **pair._asdict())
    held_out = list(record_traces(target, requests[split:], max_new_tokens=args.max_new_tokens, num_logprobs=1))
    return replay(draft, held_out, K), replay(result.draft, held_out, K), result.state.global_step


def write(args: argparse.Namespace, row: dict[str, Any]) -> None:
    """Write the report."""
    names = {model: Path(model).name if Path(model).is_dir() else model for model in (args.target, args.draft)}
    settings = {
        "target": names[args.target], "draft": names[args.draft], "arch": args.arch, "mode": args.mode,
        "dataset": EXPERIMENTS[args.dataset].hub if args.data is None else Path(args.data).name,
        "template": args.template,
        "max_new_tokens": args.max_new_tokens, "num_assistant_tokens": K, "divergence": args.divergence,
        "learning_rate": args.learning_rate, "paper_rule": args.paper_rule, "sample_source": args.sample_source,
        "epochs": args.epochs, "max_steps": args.max_steps,
    }  # fmt: skip
    report = {"experiment": args.dataset, "settings": settings, "rows": [row]}
    path = write_report(args.name or f"{args.dataset}_{args.arch}_{args.mode}", report, seed=args.seed)
    print(f"Wrote {path.name}.")


if __name__ == "__main__":
    main()
