"""Measure whether a draft speeds up the rollouts of a policy in training.

    OSD_HF_DATA=... python recipes/rollouts.py --steps 60 --seeds 0 1 2                        # lab pair, gsm8k
    OSD_HF_DATA=... python recipes/rollouts.py --task sft                                      # spider from the middle
    python recipes/rollouts.py --pair bundled --noise 0.1                                      # bundled pair, sql
    python recipes/rollouts.py --pair bundled --steps 2 --prompts 2 --generations 2 --max-new-tokens 8 # smoke

GRPO by TRL, rewards by program, with and without a `RolloutAssistant`. The bundled target answers nearly everything
correctly, so noise on its weights makes a policy with something to learn. `--task sft` is supervised fine-tuning that
changes to the data of another domain halfway; completions of held-out prompts are generated after each step.

Each way trains from the same seed: without a draft, with text only, with the original draft, with a draft that follows
the policy, and with all of it (the default). The report has, by step, rewards, acceptance, tokens per row and forward,
seconds of generation with learning, and seconds of the training. Greedy answers before the first step are compared.
With one thread, seconds are processor time; with several they are wall time.
"""

from __future__ import annotations

import copy
import itertools
import re
import tempfile
import time
from functools import partial
from typing import Any

import common
import numpy as np
import torch
from bundled_prompts import check_answer, first_examples
from common import drawing, kept, make_parser, run_facts, write_report
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from osd_hf import OnlineConfig, RolloutAssistant
from osd_hf.bundled import DOMAINS, bundled_prompts, load_bundled
from osd_hf.loading import Pair
from osd_hf.models import unwrap

WAYS: dict[str, OnlineConfig | None] = {
    "alone": None,
    "past text": OnlineConfig(candidates="text", update_strategy="manual"),
    "frozen draft": OnlineConfig(candidates="draft", update_strategy="manual"),
    "draft that learns": OnlineConfig(candidates="draft"),
    "all": OnlineConfig(),
}
ANSWERS = ("answer", "query", "output", "whole_func_string")  # columns of the data sets
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
Row = dict[str, Any]


# --- tasks ----------------------------------------------------------------------------------------------------------


def loaded(name: str) -> Pair:
    return Pair(*load_bundled()) if name == "bundled" else common.load_pair()


def questions(args: Any, domain: str, count: int) -> list[Row]:
    """Return prompts with the data for checking their answers."""
    if args.pair == "lab":
        rows = common.rows(domain)[:count]
        answers = [next(str(row[name]) for name in ANSWERS if name in row) for row in rows]
        asked = [(common.TEMPLATES[domain].format(**row), said) for row, said in zip(rows, answers, strict=True)]
    else:
        asked = [(example.prompt, example.answer) for example in bundled_prompts(domain, count)]
    return [
        {"prompt": [{"role": "user", "content": text}], "number": i, "answer": answer, "domain": domain}
        for i, (text, answer) in enumerate(asked)
    ]


def rewarded(args: Any) -> Any:
    """Return the reward function: 1 for a correct answer; for the lab pair 0.2 for an answer in the expected form."""
    examples = first_examples(args.domain, args.dataset) if args.pair == "bundled" else []

    def right(text: str, number: int, answer: str) -> float:
        if examples:
            return float(check_answer(examples[number], text))
        said, wanted = NUMBER.findall(text.partition("####")[2]), NUMBER.findall(answer.rpartition("####")[2])
        return 0.2 * bool(said) + 0.8 * (said[:1] == wanted[:1] != [])

    def reward(completions: Any, number: list[int], answer: list[str], **kwargs: Any) -> list[float]:
        return [right(c[0]["content"], n, a) for c, n, a in zip(completions, number, answer, strict=True)]

    return reward


class Asked(TrainerCallback):  # type: ignore[misc]
    """Generates for held-out prompts: greedily before the first step, and sampled after each step."""

    def __init__(self, pair: Pair, rows: list[Row], args: Any, *, each_step: bool) -> None:
        texts = [pair.tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, tokenize=False)
                 for r in rows]  # fmt: skip
        self.batch = pair.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt",
                                    add_special_tokens=False)  # fmt: skip
        self.batch.pop("token_type_ids", None)
        self.limit, self.each_step, self.temperature = args.max_new_tokens, each_step, args.temperature
        self.greedy: list[list[int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        answers = model.generate(**self.batch, do_sample=False, max_new_tokens=self.limit)
        self.greedy = answers.tolist()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.each_step:
            model.generate(**self.batch, do_sample=True, temperature=self.temperature, top_k=0,
                           max_new_tokens=self.limit)  # fmt: skip


def trainer_of(pair: Pair, seed: int, rate: float, args: Any, callbacks: list[Any], folder: str) -> Any:
    """Return a trainer of a copy of the target with these callbacks."""
    size = args.prompts * args.generations
    settings: Row = {
        "output_dir": folder, "max_steps": args.steps, "logging_steps": 1, "learning_rate": rate, "seed": seed,
        "per_device_train_batch_size": size, "lr_scheduler_type": "constant", "save_strategy": "no", "use_cpu": True,
        "bf16": False, "activation_checkpointing": False, "report_to": "none", "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    policy, generator = copy.deepcopy(pair.target), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters() if args.noise else ():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.add_(args.noise * parameter.std() * drawn if parameter.ndim > 1 else 0.0)
    if args.task == "grpo":
        rows = Dataset.from_list(questions(args, args.domain, args.dataset))
        config = GRPOConfig(**settings, num_generations=args.generations, max_completion_length=args.max_new_tokens,
                            temperature=args.temperature, beta=0.0)  # fmt: skip
        return quiet(GRPOTrainer(policy, rewarded(args), config, train_dataset=rows, processing_class=pair.tokenizer,
                                 callbacks=callbacks))  # fmt: skip
    half = -(-args.steps // 2) * size
    rows = list(itertools.islice(itertools.cycle(questions(args, args.domain, args.dataset)), half))
    rows.extend(itertools.islice(itertools.cycle(questions(args, args.then, args.dataset)), half))
    turns = [{"prompt": r["prompt"], "completion": [{"role": "assistant", "content": r["answer"]}]} for r in rows]
    config = SFTConfig(**settings, train_sampling_strategy="sequential", max_length=512)
    return quiet(SFTTrainer(policy, config, train_dataset=Dataset.from_list(turns), processing_class=pair.tokenizer,
                            callbacks=callbacks))  # fmt: skip


def quiet(trainer: Any) -> Any:
    trainer.remove_callback(PrinterCallback)
    return trainer


def held_out(args: Any) -> list[Row]:
    """Return the held-out prompts, with `--task sft` of both domains."""
    names = [args.domain] if args.task == "grpo" else [args.domain, args.then]
    return [row for name in names for row in questions(args, name, args.dataset + args.asked)[-args.asked :]]


# --- live -----------------------------------------------------------------------------------------------------------


def live(pair: Pair, way: str, seed: int, rate: float, args: Any) -> Row:
    """Run one training."""
    config = WAYS[way]
    rollout = None if config is None else RolloutAssistant(pair.draft, config)
    asked = Asked(pair, held_out(args), args, each_step=args.task == "sft")
    seconds: list[float] = []  # of each call
    clock = time.process_time if args.threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(pair, seed, rate, args, [*([] if rollout is None else [rollout]), asked], folder)
        policy = unwrap(trainer.model)

        def generate(*inputs: Any, **settings: Any) -> Any:
            began = clock()
            answers = type(policy).generate(policy, *inputs, **settings)
            if settings.get("assistant_model") is None:  # otherwise it is a part of another call
                seconds.append(clock() - began)
            return answers

        policy.generate = generate
        began = clock()
        trainer.train()
        total = clock() - began
    told = ("reward", "entropy", "loss", "rollout/alpha", "rollout/tokens_per_forward", "rollout/learning_seconds")
    steps = [{name: entry.get(name) for name in told} for entry in trainer.state.log_history if "loss" in entry]
    found = seconds[1:]  # the first was the greedy one
    for i, step in enumerate(steps):
        step["seconds"] = found[i] if i < len(found) else None
    return {
        "way": way, "seed": seed, "rate": rate, "steps": steps, "greedy": asked.greedy, "total_seconds": total,
        "rollout_seconds": sum(found),
        "speedup": None if rollout is None or rollout.assistant is None else rollout.assistant.stats.speedup,
    }  # fmt: skip


def compared(rows: list[Row], seed: int, rate: float) -> Row:
    """Compare each way with the training without a draft."""
    those = {row["way"]: row for row in rows if (row["seed"], row["rate"]) == (seed, rate)}
    alone = those["alone"]
    return {
        way: {
            "greedy_identical": row["greedy"] == alone["greedy"],
            "rollouts_times_alone": alone["rollout_seconds"] / row["rollout_seconds"],
            "training_times_alone": alone["total_seconds"] / row["total_seconds"],
            "learning_share": sum(s["rollout/learning_seconds"] or 0 for s in row["steps"]) / row["total_seconds"],
            "reward_last_half": mean([s["reward"] for s in row["steps"][len(row["steps"]) // 2 :]]),
        }
        for way, row in those.items()
    }


def mean(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


# --- all of it ------------------------------------------------------------------------------------------------------


LIVE = {
    "seconds": "seconds of a rollout, with learning", "rollout/alpha": "alpha of the draft's tokens, live",
    "reward": "reward",
}  # fmt: skip


def plot(name: str, report: Row) -> None:
    """Plot the means over all runs by step."""
    rows = report.get("live", {}).get("rows", [])
    lines: dict[str, dict[str, list[float]]] = {}
    for told, label in LIVE.items():
        for way in dict.fromkeys(row["way"] for row in rows):
            runs = np.array([[s[told] for s in row["steps"]] for row in rows if row["way"] == way], float)
            if np.isfinite(runs).any():
                windows = [runs[:, max(i - 4, 0) : i + 1] for i in range(runs.shape[1])]
                means = [float(np.nanmean(w)) if np.isfinite(w).any() else np.nan for w in windows]
                lines.setdefault(label, {})[way] = means
    with drawing(name, 1, len(lines), figsize=(6 * len(lines), 4.2)) as (_, (axes,)):
        for axis, (label, ways) in zip(axes, lines.items(), strict=True):
            for way, values in ways.items():
                axis.plot(values, label=way)
            axis.set(xlabel="step", ylabel=label)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)


def main() -> None:
    parser = make_parser(__doc__, "rollouts", seed=False)
    parser.add_argument("--pair", choices=["bundled", "lab"], default="lab")
    parser.add_argument("--noise", type=float, default=0.0, help="on the weights of the policy, over their spread")
    parser.add_argument("--task", choices=["grpo", "sft"], default="grpo")
    parser.add_argument("--domain", help=f"a data set of the lab pair, or one of {', '.join(DOMAINS)}: gsm8k, sql")
    parser.add_argument("--then", help="with --task sft, that of the second half: spider, finance")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="alone is always among them")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-4], help="learning rates of the policy")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0], help="of the rollouts")
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--generations", type=int, default=4, help="for each prompt")
    parser.add_argument("--dataset", type=int, default=64, help="prompts; an epoch is as many")
    parser.add_argument("--asked", type=int, default=8, help="held-out prompts that are asked beside")
    parser.add_argument("--max-new-tokens", type=int, default=common.MAX_NEW_TOKENS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    own = {"bundled": ("sql", "finance"), "lab": ("gsm8k", "spider")}[args.pair]
    args.domain, args.then = args.domain or own[0], args.then or own[1]
    pair, started, report = loaded(args.pair), time.time(), Row()
    size = f"{args.steps}x{args.prompts}x{args.generations}x{args.max_new_tokens}-{args.dataset}"
    shape = f"{args.pair}-{args.noise:g}-{args.task}-{args.domain}-{size}"
    for rate, seed, temperature in itertools.product(args.rates, args.seeds, args.temperatures):
        args.temperature = temperature
        case = args.traces / "rollouts" / f"{shape}-{rate:g}-{temperature:g}-seed{seed}"
        part = report.setdefault("live", {"rows": [], "compared": []})
        ways = dict.fromkeys(["alone", *args.ways])
        rows = [
            kept(case.with_name(f"{case.name}-{way}.json"), partial(live, pair, way, seed, rate, args)) for way in ways
        ]
        part["compared"].append({"rate": rate, "seed": seed, "ways": compared(rows, seed, rate)})
        part["rows"] += [{k: v for k, v in row.items() if k != "greedy"} for row in rows]
        print(part["compared"][-1], flush=True)
        settings = {name: str(value) for name, value in vars(args).items() if name not in ("traces", "temperature")}
        write_report(args.name, {"settings": settings, **report}, seed=seed, **run_facts(started))
    plot(args.name, report)


if __name__ == "__main__":
    main()
