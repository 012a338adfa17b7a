"""Shared code of the recipes: flags, data sets, recorded traces, runs, reports, and plots."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from osd_hf import AcceptanceStats, CorrectionStore, DraftHead, OnlineAssistant, OnlineConfig, Trace, simulate
from osd_hf.acceptance import alpha_gain_interval
from osd_hf.evaluation.display import rolling
from osd_hf.layers import copy_layers, new_eagle3_head
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.learner import Learner
from osd_hf.loading import Pair
from osd_hf.loading import load_pair as load_models
from osd_hf.prompts import encode_turn
from osd_hf.recording import record_traces
from osd_hf.simulate import SimulationReport
from osd_hf.utils.report import provenance

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Data set -> template of the user's turn, over the columns that it has on the Hub.
TEMPLATES = {
    "gsm8k": "{question}",
    "spider": "db: {db_id}\n{question}",
    "code_search_net_python": "Write Python: {func_documentation_string:.300}",
    "finance_alpaca": "{instruction}",
}
RESULTS = Path(os.environ.get("OSD_HF_RESULTS", Path(__file__).parent / "results"))
MAX_NEW_TOKENS = 96
SAMPLING = {"temperature": 0.7, "top_p": 0.9}  # of everyday chats
HELD_OUT_ROWS = 400  # the last rows of `alpaca`, which no draft is trained on
DRAFTS = ("lab", "cut", "head", "three", "eagle3")  # see `draft_of`
K = 5  # drafted tokens per round, in all figures that are compared


# --- flags ----------------------------------------------------------------------------------------------------------


def make_parser(
    description: str | None, name: str, *, seed: bool = True, traces: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with the flags of most recipes and the recipe's docstring as help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if seed:
        parser.add_argument("--seed", type=int, default=0)
    if traces:
        parser.add_argument("--traces", type=Path, default=Path("traces"), help="where recorded traces are kept")
    parser.add_argument("--name", default=name, help="of the report and the plots")
    return parser


# --- models, data sets, traces --------------------------------------------------------------------------------------


def data_folder() -> Path:
    """Return the folder with `data/*.jsonl` and the pair in `lab/`, or exit with a message."""
    folder = os.environ.get("OSD_HF_DATA")
    if not folder:
        sys.exit("Set OSD_HF_DATA to a folder with data/*.jsonl and lab/{target,draft}.")
    return Path(folder)


def load_pair(target: str | None = None, draft: str | None = None) -> Pair:
    """Load target, draft (fp32, k = 5, threshold 0, constant schedule), and tokenizer; by default the lab pair."""
    lab = Path() if target and draft else data_folder() / "lab"
    pair = load_models(target or str(lab / "target"), draft or str(lab / "draft"), dtype="float32", device="cpu")
    config = pair.draft.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = K, "constant"
    config.assistant_confidence_threshold = 0.0
    return pair


def one_layer_draft(kind: str, target: Any) -> Any:
    """Return a draft of the target's first layer (`"cut"`), a head that starts as that layer and reads the last state
    (`"head"`) or three states, or a head in EAGLE-3's layout (`"eagle3"`)."""
    if kind == "eagle3":
        return new_eagle3_head(target)
    cut, count = copy_layers(target, [0]), target.config.num_hidden_layers
    if kind == "cut":
        return cut
    return DraftHead.from_draft(cut, target, [-1] if kind == "head" else [2, count // 2, count])


def draft_of(kind: str, pair: Pair) -> Any:
    """Return the draft of the pair (`"lab"`), or another one for its target, as in [`one_layer_draft`]."""
    return pair.draft if kind == "lab" else one_layer_draft(kind, pair.target)


def rows(name: str) -> list[dict[str, Any]]:
    """Return all rows of a data set."""
    lines = (data_folder() / f"data/{name}.jsonl").read_text().rstrip("\n").split("\n")
    return [json.loads(line) for line in lines]


def alpaca_prompts() -> list[str]:
    """Return the everyday instructions with their inputs."""
    return [row["instruction"] + ("\n" + row["input"] if row["input"] else "") for row in rows("alpaca")]


def texts_of(name: str) -> list[str]:
    """Return all prompts of a data set as texts: held-out rows of `alpaca`, first turns of `mt_bench`."""
    if name == "alpaca":
        return alpaca_prompts()[-HELD_OUT_ROWS:]
    if name == "mt_bench":
        return [row["turns"][0] for row in rows(name)]
    return [TEMPLATES[name].format(**row) for row in rows(name)]


def prompts(name: str, tokenizer: Any, n: int, seed: int) -> list[list[int]]:
    """Return the token ids of `n` random prompts (seeded) of a data set, each as one user message."""
    texts = texts_of(name)
    return [encode_turn(tokenizer, text) for text in random.Random(seed).sample(texts, min(n, len(texts)))]


def kept_answers(folder: Path, target: Any, tokenizer: Any, count: int = 40) -> dict[str, list[Trace]]:
    """Return the target's answers to prompts that no draft is trained on, recorded once: sampled for `alpaca` and
    `mt_bench`, greedy for four data sets."""
    found = {}
    for how, sampling, names in (
        ("sampled", SAMPLING, ("alpaca", "mt_bench")),
        ("greedy", None, ("mt_bench", "gsm8k", "finance_alpaca", "code_search_net_python")),
    ):
        for name in names:
            asked = sorted(prompts(name, tokenizer, count, 1), key=len)
            place = folder / f"{name}-{how}-{count}"
            found[f"{name}, {how}"] = recording(place, target, asked, name, sampling=sampling, seed=7)
    return found


def recorded(
    name: str, seed: int, n: int, folder: Path, pair: tuple[Any, Any, Any] | None = None, *, start: int = 0
) -> list[Trace]:
    """Return the target's greedy answers to `n` prompts without the first `start`. They are recorded once and kept in
    a store in `folder`."""
    path = folder / (f"{name}-seed{seed}-n{n}" + (f"-from{start}" if start else ""))
    if len(CorrectionStore(path)) == 0:
        target, _, tokenizer = pair or load_pair()
        questions = prompts(name, tokenizer, n, seed)
        if start and questions[:start] != prompts(name, tokenizer, start, seed):
            sys.exit(
                f"The first {start} of {n} prompts of {name} are others than {start} by themselves: ask for fewer."
            )
        return recording(path, target, questions[start:], name)
    return list(CorrectionStore(path))


def recording(
    path: Path,
    target: Any,
    questions: Sequence[list[int]],
    name: str,
    max_new_tokens: int | None = None,
    **settings: Any,
) -> list[Trace]:
    """Return the target's answers to these prompts, recorded once and kept in a store: greedy, or as the `settings` of
    `record_traces` say."""
    store = CorrectionStore(path)
    if len(store) == 0:
        max_new_tokens = max_new_tokens or MAX_NEW_TOKENS
        traces = record_traces(target, questions, max_new_tokens=max_new_tokens, domain=name, **settings)
        # All or nothing: a killed recording leaves no part of a data set.
        for trace in list(tqdm(traces, total=len(questions), desc=f"record {name}")):
            store.append(trace)
        store.close()
    return list(CorrectionStore(path))


def recorded_chats(folder: Path, target: Any, tokenizer: Any, max_new_tokens: int | None = None) -> list[Trace]:
    """Return both turns of the mt_bench questions in random order, the second with the target's answer to the first.
    They are recorded once."""
    asked = rows("mt_bench")
    random.Random(0).shuffle(asked)
    chats = [[{"role": "user", "content": row["turns"][0]}] for row in asked]
    turns: list[list[Trace]] = []
    for number in (1, 2):
        ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
        place = folder / f"mt_bench-turn{number}-{max_new_tokens or MAX_NEW_TOKENS}"
        turns.append(recording(place, target, ids, "mt_bench", max_new_tokens))
        for chat, trace, row in zip(chats, turns[0], asked, strict=True):
            said = tokenizer.decode(trace.completion_ids, skip_special_tokens=True)
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": row["turns"][1]}]
    return [trace for both in zip(*turns, strict=True) for trace in both]


# --- a model with the cost of a larger one -------------------------------------------------------------------------


def coefficients(count: int, total: int) -> torch.Tensor:
    """Return an odd number of powers of two, none of them zero, that sum to 0 or 1. Products with them are exact."""
    first = [1.0] if total else [0.5, 0.5, -1.0]
    return torch.tensor(first + [0.5, -0.5] * ((count - len(first)) // 2))


def stretched(model: Any, layers: int, copies: tuple[int, int], dtype: torch.dtype) -> Any:
    """
    Return a wider and deeper Llama that computes the same function, up to rounding.

    The residual stream, the attention heads, and the units of each MLP are repeated. Weights read all copies with
    coefficients that sum to 1, such as +1/2, -1/2, and 1, so the result is that of the original. Additional layers
    copy the layer before them, but their last projections read with coefficients that sum to 0, so they add nothing.
    No weight is zero unless it was.
    """
    streams, units = copies
    old = model.config
    changes = {
        "hidden_size": old.hidden_size * streams, "num_attention_heads": old.num_attention_heads * streams,
        "num_key_value_heads": old.num_key_value_heads * streams, "intermediate_size": old.intermediate_size * units,
        "head_dim": old.head_dim, "num_hidden_layers": layers, "tie_word_embeddings": False,
    }  # fmt: skip
    with torch.device(model.device):
        wide: Any = LlamaForCausalLM._from_config(LlamaConfig(**{**old.to_dict(), **changes}), dtype=dtype).eval()

    inner = model.model.layers
    doubled = np.linspace(0, len(inner) - 1, layers - len(inner) + 2).astype(int)[1:-1]  # not the last
    sources = [(layer, counts) for i, layer in enumerate(inner) for counts in ((1, 0) if i in doubled else (1,))]
    wider = {"gate_proj": (units, streams), "up_proj": (units, streams), "down_proj": (streams, units)}
    with torch.no_grad():
        for new, (layer, counts) in zip(wide.model.layers, sources, strict=True):
            for name, given in layer.named_parameters():
                written, read = wider.get(name.split(".")[1], (streams, streams))
                total = counts if "o_proj" in name or "down_proj" in name else 1
                pattern = coefficients(read, total).repeat(written, 1) if given.ndim > 1 else torch.ones(streams)
                new.get_parameter(name).copy_(torch.kron(pattern.to(given), given))
        wide.model.norm.weight.copy_(model.model.norm.weight.repeat(streams))
        wide.model.embed_tokens.weight.copy_(model.get_input_embeddings().weight.repeat(1, streams))
        head = model.get_output_embeddings().weight
        wide.lm_head.weight.copy_(torch.kron(coefficients(streams, 1)[None].to(head), head))
    wide.generation_config = model.generation_config
    return wide


# --- runs -----------------------------------------------------------------------------------------------------------


def simulated(
    draft: Any, traces: Sequence[Trace], config: OnlineConfig | None = None, *, bar: str, **settings: Any
) -> SimulationReport:
    """Run `simulate` with a progress bar."""
    with tqdm(total=len(traces), desc=bar, leave=False) as progress:
        return simulate(draft, traces, config, on_request=lambda i, stats: progress.update(), **settings)


def lora(rank: int, *, head: bool = True) -> Any:
    """Return the configuration of adapters on all layers of the lab drafts."""
    from peft import LoraConfig

    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return LoraConfig(r=rank, lora_alpha=rank, target_modules=layers + ["lm_head"] * head)


def kept(path: Path, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of an earlier run, or compute and save it, so that a killed recipe can continue."""
    if not path.exists():
        found = find()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    return dict(json.loads(path.read_text()))


Counts = tuple[float, float, float]  # of one request: examined, accepted, emitted


def greedy(prompt: Sequence[int], max_new_tokens: int, device: str = "cpu") -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the arguments of `generate` for a greedy answer to a prompt (token ids)."""
    ids = torch.as_tensor(prompt, device=device)[None].long()
    return ids, {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": max_new_tokens}


def served_live(
    pair: Any, requests: Sequence[Any], config: OnlineConfig, max_new_tokens: int, *, bar: str
) -> tuple[int, list[Counts], list[Trace]]:
    """Serve prompts (token ids) with a learning draft and with the target alone. Return the number of identical
    answers, the counts of each request, and the traces."""
    identical, counts, store = 0, [], CorrectionStore()
    with OnlineAssistant(*pair, config, store=store) as assistant:
        for prompt in tqdm(requests, desc=bar, leave=False):
            ids, settings = greedy(prompt, max_new_tokens)
            alone = pair[0].generate(ids, **settings)
            identical += int(torch.equal(alone, assistant.generate(ids, **settings)))
            counts.append((assistant.stats.examined, assistant.stats.accepted, assistant.stats.emitted))
            assistant.reset_stats()
    return identical, counts, list(store)


def equal_counts(counts: Sequence[Counts], simulated: Sequence[AcceptanceStats]) -> int:
    """Return how many requests have the same counts live and in the simulation."""
    return sum(c == (s.examined, s.accepted, s.emitted) for c, s in zip(counts, simulated, strict=False))


def processor_timed(draft: Any, config: OnlineConfig) -> Learner:
    """Return a learner for `simulate` that reports processor seconds."""
    return Learner(DomainDrafts(draft, config, per_domain=False), timer=time.process_time)


# --- figures, reports, plots ----------------------------------------------------------------------------------------


def pooled(stats: Sequence[AcceptanceStats]) -> float:
    """Return alpha over several requests."""
    return sum(stats, AcceptanceStats()).alpha


def last_share(stats: list[AcceptanceStats] | tuple[AcceptanceStats, ...], share: float = 0.2) -> AcceptanceStats:
    """Return the joined stats of the last `share` of the requests."""
    return sum(stats[round(len(stats) * (1 - share)) :], AcceptanceStats())


def gain(before: AcceptanceStats, after: AcceptanceStats) -> dict[str, Any]:
    """Return the gain of alpha with its 95% interval."""
    return {"gain": after.alpha - before.alpha, "gain_interval": list(alpha_gain_interval([before], [after]))}


def write_report(name: str, report: dict[str, Any], **facts: Any) -> Path:
    """Write `results/<name>.json` with provenance and the current default settings."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    origin = {"provenance": provenance(**facts), "defaults": OnlineConfig().to_dict()}
    path.write_text(json.dumps({**origin, **report}, indent=1) + "\n")
    return path


@torch.no_grad()
def parting(target: Any, ids: list[int], alone: list[int], ours: list[int]) -> dict[str, Any]:
    """Return the first different token of two answers, and the gap between the two most likely tokens of the target
    there."""
    at = next((i for i, (a, b) in enumerate(zip(alone, ours, strict=False)) if a != b), min(len(alone), len(ours)))
    logits = target(torch.tensor([[*ids, *alone[:at]]], device=target.device)).logits[0, -1].float()
    top = logits.topk(2).values
    return {"token": at, "gap": float(top[0] - top[1]), "of": float(top[0])}


def run_facts(started: float) -> dict[str, Any]:
    """Return facts about a run that began at `started` (`time.time()`)."""
    return {
        "threads": torch.get_num_threads(),
        "minutes": round((time.time() - started) / 60, 1),
    }


class Streamed:
    """A streamer that collects the tokens of an answer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.has_ended = True


@contextmanager
def drawing(name: str, rows: int = 1, columns: int = 1, *, dpi: int = 130, **settings: Any) -> Iterator[Any]:
    """Yield a figure and its axes, of shape `(rows, columns)`, and save it as `results/<name>.png`."""
    figure, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained", **settings)
    yield figure, axes
    RESULTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(RESULTS / f"{name}.png", dpi=dpi)
    plt.close(figure)


def requests_stats(report: SimulationReport) -> list[list[float]]:
    """Return the examined and accepted tokens of each request for JSON."""
    return [[float(s.examined), float(s.accepted)] for s in report.stats]


def kept_stats(counts: Sequence[Sequence[float]]) -> list[AcceptanceStats]:
    """Return the stats of saved `requests_stats`."""
    return [
        AcceptanceStats.from_counts(drafted=e, examined=e, accepted=a, emitted=e, target_forwards=1) for e, a in counts
    ]


def plot_ways(axis: Any, rows: list[dict[str, Any]], static: Sequence[AcceptanceStats], window: int) -> None:
    """Plot the rolling alpha of the original draft and of each way."""
    axis.plot(rolling(static, window, "examined", "accepted"), color="0.5", linestyle="--", label="static draft")
    for row in rows:
        axis.plot(rolling(kept_stats(row["requests_stats"]), window, "examined", "accepted"), label=row["way"])
    axis.legend(fontsize=8, ncols=3)
    axis.grid(alpha=0.3)
