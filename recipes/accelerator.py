"""Measure what needs an accelerator, with the shape of Qwen3-8B and drafts of a few such layers.

    python recipes/accelerator.py --parts exactness costs memory speed latency batches    # seven minutes on one H200
    OSD_HF_DATA=... python recipes/accelerator.py --parts stretched                       # four minutes; loads SmolLM2
    python recipes/accelerator.py --cost-model     # a table of expected speed-ups; needs no accelerator
    python recipes/accelerator.py --smoke          # tiny shapes on the CPU, without compilation

exactness   bundled pair, learning between requests, in float32 and bfloat16: identical answers, and the gap at the
            first different token of the others
costs       seconds of a verification by tokens and length, of a round and a drafted token by layers and vocabulary;
            what the loop adds, and how often it waits for the device
memory      a learning draft with a large target: bytes between updates and at most, against `memory_plan`
speed       default settings with drafts of a given acceptance, against the target alone: eager, compiled by
            transformers, and inside the assistant; time to the first token, and until full speed
latency     seconds per request while the draft learns, and while it does not
stretched   SmolLM2-135M with the cost of an 8B model and the same function: learning live, then all systems in turns
batches     several rows, against the target's own batches, eager and compiled

A part that fails or exceeds its time limit is reported with its error. The report is written after each part. The exit
code is 0 if all parts succeed.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from common import K, greedy, make_parser, parting, run_facts, stretched, write_report
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.streamers import BaseStreamer

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig, Trace
from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf.decoding.static import static_target
from osd_hf.evaluation.benchmark import System, answer_greedily, answer_traced, benchmark, compare_outputs
from osd_hf.layers import copy_layers
from osd_hf.learning.weights import SHARED_SETTING
from osd_hf.loading import load_pair
from osd_hf.prompts import encode_turn
from osd_hf.replay import redraft
from osd_hf.speedup import expected_block_efficiency
from osd_hf_app.pair import smollm2_pair

Found = dict[str, Any]
Model = Any

PROMPT = 64  # tokens of prompts to random weights
SKIPPED = 12  # first requests, in which longer candidates are captured
MAX_QUESTION = 448  # tokens of questions to the stretched model
LOW_IDS = 4096  # prompts end with a smaller id; answers count up from there
# Controlled acceptance -> the least that is expected, relative to the target compiled by transformers.
NEEDED = {0.5: 1.4, 0.65: 1.8, 0.75: 2.2}
LARGE: Found = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151_936, "max_position_embeddings": 32768,
}  # fmt: skip
TINY: Found = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "vocab_size": 8192, "max_position_embeddings": 512,
}  # fmt: skip
ALONE, COMPILED, INSIDE = "target alone", "target compiled", "inside the assistant"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run: the shape of the target, its dtype, and the number of requests."""

    shape: Found
    dtype: torch.dtype = torch.bfloat16
    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # of `exactness`
    answers: int = 64
    answer_tokens: int = 24
    new_tokens: int = 128
    timed: int = 4
    waits: int = 60  # requests per strategy
    waited_tokens: int = 48
    layers: tuple[int, ...] = (1, 2, 4)
    heads: tuple[int, ...] = (8192, 32768)
    lengths: tuple[int, ...] = (256, 2048, 8192)
    rows: tuple[int, ...] = (1, 4, 16)
    compiles: bool = True
    copies: tuple[int, int] = (7, 9)  # of the stretched model's residual stream and heads, and of the units of MLPs
    stretched_layers: int = 35
    requests: int = 100  # of each data set, which the draft learns from
    later: int = 8  # of each data set, answered in turns


SMOKE = Sizes(
    TINY,
    torch.float32,
    ("float32", "bfloat16"),
    5,
    6,
    9,
    2,
    6,
    6,
    (1,),
    (1024,),
    (256,),
    (2,),
    False,
    (3, 3),
    14,
    4,
    2,
)


# --- random weights, and drafts with a given acceptance -------------------------------------------------------------


def random_model(shape: Found, dtype: torch.dtype, device: str, **changes: Any) -> Model:
    """Build a model with random weights that answers each token with the next id. Answers end only at their maximum.

    The head is the shifted embedding, which outweighs the layers, so the next token is always clear. Otherwise, in
    half precision, wider forwards would sometimes choose other tokens.
    """
    ends: Found = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    with torch.device(device), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        config = Qwen3Config(**{**shape, **ends, **changes}, tie_word_embeddings=False)
        model: Model = Qwen3ForCausalLM._from_config(config, dtype=dtype).eval()
        embedding = model.get_input_embeddings().weight.normal_(0, 100)
        model.get_output_embeddings().weight.copy_(embedding.roll(1, 0) * (config.initializer_range / 100))
    return model


def draft_for(target: Model, alpha: float, layers: int = 1) -> Model:
    """Return a draft with some of the target's layers that proposes the target's token after a share `alpha` of all
    tokens. Only its head is another one: the rows of the other tokens are exchanged, within blocks of common ids."""
    config = target.config.to_dict() | {"num_hidden_layers": layers, "layer_types": None, SHARED_SETTING: True}
    with torch.device("meta"):
        draft: Model = type(target)._from_config(type(target.config)(**config), dtype=target.dtype).eval()
    for name, module in target.model.named_children():
        setattr(draft.model, name, torch.nn.ModuleList(module[:layers]) if name == "layers" else module)
    draft.set_output_embeddings(target.get_output_embeddings())
    if alpha < 1:
        head = target.get_output_embeddings().weight
        source = np.arange(len(head))
        wrong = source[np.random.default_rng(0).random(len(head)) >= alpha]
        for block in np.split(wrong, np.searchsorted(wrong, range(LOW_IDS, len(head), LOW_IDS))):
            source[block] = np.roll(block, 1)
        draft.set_output_embeddings(torch.nn.Linear(head.shape[1], len(head), False, "meta", head.dtype))
        weight = head[torch.from_numpy(source).to(head.device)]
        draft.get_output_embeddings().weight = torch.nn.Parameter(weight, requires_grad=False)
    return draft


def prompts(number: int, vocab_size: int, new_tokens: int, answers: int = LOW_IDS) -> list[list[int]]:
    """Return prompts of random tokens with this number of `answers` that do not overlap, as many as there can be by
    default, so that none can be found in earlier text."""
    draw, step = random.Random(0), 2 * new_tokens
    ends = [first % min(step * answers, LOW_IDS) for first in range(0, step * number, step)]
    return [[draw.randrange(LOW_IDS, vocab_size) for _ in range(PROMPT - 1)] + [end] for end in ends]


class Moments(BaseStreamer):
    """Answer a request and record when it began, when tokens came, and when it was done."""

    def __init__(self, generate: Any, ids: Sequence[int], new_tokens: int, device: str, **settings: Any) -> None:
        inputs, how = greedy(ids, new_tokens, device)
        self.moments = [time.perf_counter()]
        self.answer = generate(inputs, **how, **settings, streamer=self)[0, len(ids) :].tolist()
        self.seconds = time.perf_counter() - self.moments[0]
        self.first_token_seconds = self.moments[2] - self.moments[0]
        self.round_seconds = (self.moments[-1] - self.moments[2]) / max(len(self.moments) - 3, 1)

    def put(self, value: Tensor) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        pass


def lean(name: str, draft: Model, **how: Any) -> System:
    """Return the package's default settings as a system."""
    return System(name, "lean", draft, "auto", compile_target=OnlineConfig().compile_target, **how)


def alone(sizes: Sizes) -> list[System]:
    return [System(ALONE, "alone"), *[System(COMPILED, "alone", compile_target=True)] * sizes.compiles]


def shown(report: Any, dataset: str) -> Found:
    """Return the main figures of each system, with ratios to the target alone, compiled if it was."""
    kept = ("tokens_per_second", "first_token_seconds", "alpha", "outputs", "round_seconds", "block_efficiency",
            "share_of_tokens", "times_alone")  # fmt: skip
    names = [system.name for system in report.systems]
    best = COMPILED if COMPILED in names else ALONE
    figures = {name: report.figures(name, dataset) for name in names}
    ratios = {name: report.ratio(name, best, dataset) for name in names}
    return {n: {k: figures[n][k] for k in kept} | {"times_best_alone": ratios[n]} for n in names}


# --- parts with random weights --------------------------------------------------------------------------------------


def exactness(device: str, sizes: Sizes) -> Iterator[Found]:
    examples = [e for domain in DOMAINS for e in bundled_prompts(domain, sizes.answers, seed=0)]
    found: Found = {}
    for dtype in sizes.dtypes:
        pair = load_pair(device=device)
        target, draft = (model.to(getattr(torch, dtype)) for model in (pair.target, pair.draft))
        fast = {"update_strategy": "interval", "update_interval": 4, "steps_per_update": 3, "gate": False}
        outcomes, parted = [], []
        with OnlineAssistant(target, draft, pair.tokenizer, OnlineConfig(num_assistant_tokens=K, **fast)) as assistant:
            for number, example in enumerate(random.Random(0).sample(examples, sizes.answers)):
                ids = encode_turn(pair.tokenizer, example.prompt)
                expected = answer_greedily(target, ids, sizes.answer_tokens)
                ours = Moments(assistant.generate, ids, sizes.answer_tokens, device).answer
                outcomes.append(compare_outputs(target, ids, expected, ours))
                if outcomes[-1] != "identical":
                    parted.append({"request": number, **parting(target, ids, expected, ours)})
            versions = assistant.version
        counts = {name: outcomes.count(name) for name in ("identical", "tied", "differing")}
        found[dtype] = {**counts, "versions": versions, "parted": parted}
        holds = all(row["versions"] and not row["differing"] for row in found.values())
        yield {"holds": holds, **found}


def costs(device: str, sizes: Sizes) -> Iterator[Found]:
    target = random_model(sizes.shape, sizes.dtype, device)
    found: Found = {"holds": True, "verification_seconds": {}, "drafts": {}}
    drafts = {layers: draft_for(target, 0.0, layers) for layers in sizes.layers}
    for length in sizes.lengths:
        found["verification_seconds"][length] = verification(target, length)
        yield found
    verify = found["verification_seconds"][sizes.lengths[0]]
    for layers, draft in drafts.items():
        for head in (*sizes.heads, sizes.shape["vocab_size"]):
            (one, waits), (seven, waits_of_seven) = (round_of(target, draft, k, head, sizes) for k in (1, 7))
            row = {"round_seconds": {1: one, 7: seven}, "waits_per_round": {1: waits, 7: waits_of_seven}}
            if verify:
                row["drafted_seconds"] = (seven - one - verify[8] + verify[2]) / 6
                row["loop_seconds"] = one - verify[2] - row["drafted_seconds"]
            found["drafts"][f"{layers} layers, {head} tokens"] = row
            yield found


@torch.no_grad()
def verification(target: Model, length: int) -> dict[int, float]:
    """Return the median seconds of captured forwards over 1 to 8 tokens, near the end of a cache of this size."""
    static, read = static_target(target, OnlineConfig()), DynamicCache(config=target.config)
    begin, seconds = length - 64, dict[int, float]()
    if static is None or (cache := static.lease(target, 1, begin, begin)) is None:
        return seconds
    for ids in torch.full((1, begin), 7, device=target.device).split(1024, 1):
        target(ids, past_key_values=read, use_cache=True, logits_to_keep=1)
    cache.load(read, [0])
    for count in (1, 2, 4, 6, 8):
        taken = []
        for _ in range(20):
            began = time.perf_counter()
            static.step(cache, torch.full((1, count), 7, device=target.device), [begin])
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        seconds[count] = float(np.median(taken[5:]))
    return seconds


def round_of(target: Model, draft: Model, k: int, head: int, sizes: Sizes) -> tuple[float, float]:
    """Return the seconds of a round in which no candidate is accepted, and how often it waits for the device."""
    count, device = sizes.answer_tokens, str(target.device)
    config = OnlineConfig(num_assistant_tokens=k, update_strategy="manual")
    with OnlineAssistant(target, draft, None, config) as assistant:
        chosen = np.arange(head) if head < target.config.vocab_size else None
        assistant.drafts.requests[None].vocabulary.chosen = chosen
        answer = functools.partial(assistant.generate, learn=False)
        *warm, timed, short, long = prompts(5, target.config.vocab_size, 2 * count)
        for ids in warm:
            Moments(answer, ids, count, device)
        seconds = Moments(answer, timed, count, device).round_seconds
        waits = [waits_of(answer, ids, n, device) for ids, n in ((short, count), (long, 2 * count))]
    return seconds, (waits[1] - waits[0]) / count


def waits_of(generate: Any, ids: Sequence[int], count: int, device: str) -> int:
    """Return how often a request waits for the device."""
    watch: Any = torch.cuda.set_sync_debug_mode if device != "cpu" else len
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        watch("warn")
        Moments(generate, ids, count, device)
        watch("default")
    return sum("synchronizing CUDA operation" in str(each.message) for each in told)


def memory(device: str, sizes: Sizes) -> Iterator[Found]:
    is_measured = device != "cpu"
    before = torch.cuda.memory_allocated() if is_measured else 0
    target = random_model(sizes.shape, sizes.dtype, device)
    config = OnlineConfig(num_assistant_tokens=K, update_strategy="manual", gate=False)
    found: Found = {}
    with OnlineAssistant(target, draft_for(target, 1.0, sizes.layers[-1]), None, config) as assistant:
        plan = assistant.memory_plan(prompt_tokens=PROMPT, new_tokens=sizes.answer_tokens)
        for number, ids in enumerate(prompts(12, target.config.vocab_size, sizes.answer_tokens)):
            Moments(assistant.generate, ids, sizes.answer_tokens, device)
            if number % 4 == 3:  # the third version comes while one serves and one is kept
                assistant.update(1)
            if is_measured and number == 7:
                torch.cuda.reset_peak_memory_stats()
                found["between_bytes"] = torch.cuda.memory_allocated() - before
        assert assistant.version == 3
        if is_measured:
            found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    parts = {part.name: part.bytes for part in plan.parts if part.place == "device"}
    planned = {"between_bytes": plan.bytes() - parts["target: cache"], "peak_bytes": plan.peak_bytes}
    over = {name: found[name] / planned[name] for name in found}
    holds = all(0.8 < ratio < 1.2 for ratio in over.values())
    yield {"holds": holds, "measured": found, "planned": planned, "measured_over_planned": over, "parts": parts}


def speed(device: str, sizes: Sizes) -> Iterator[Found]:
    target = random_model(sizes.shape, sizes.dtype, device)
    drafts = {f"defaults, alpha {alpha:g}": draft_for(target, alpha) for alpha in NEEDED}
    asked, some = prompts(8 + sizes.timed, target.config.vocab_size, sizes.new_tokens), next(iter(drafts.values()))
    with OnlineAssistant(target, some, None, OnlineConfig(update_strategy="manual")) as assistant:
        answers = [Moments(assistant.generate, ids, sizes.new_tokens, device) for ids in asked[:8]]
    full = 1.1 * float(np.median([answer.seconds for answer in answers[-3:]]))
    ready = next(a.moments[0] + a.seconds for a in answers if a.seconds <= full) - answers[0].moments[0]
    found = {"seconds_until_full_speed": ready, "first_requests_seconds": [answer.seconds for answer in answers]}
    yield {"holds": False, **found}
    systems = [*alone(sizes), lean(INSIDE, some, candidates="text")]
    systems += [lean(name, draft) for name, draft in drafts.items()]
    report = benchmark(target, systems, {"controlled": asked[8:]}, max_new_tokens=sizes.new_tokens)
    ways = shown(report, "controlled")
    reached = {name: way["times_best_alone"]["median"] for name, way in ways.items()}
    first = {name: way["first_token_seconds"] / ways[ALONE]["first_token_seconds"] for name, way in ways.items()}
    is_fast = all(reached[name] >= least for name, least in zip(drafts, NEEDED.values(), strict=True))
    is_soon = ready <= 10 and max(first[name] for name in drafts) <= 1.1
    holds = not sizes.compiles or (is_fast and is_soon and reached[INSIDE] >= 0.95)
    yield {"holds": holds, **found, "times_best_alone": reached, "times_first_token_alone": first, "systems": ways}


def percentiles(seconds: list[float]) -> Found:
    return dict(zip(("p50", "p99", "longest"), np.percentile(seconds, [50, 99, 100]).tolist(), strict=True))


def latency(device: str, sizes: Sizes) -> Iterator[Found]:
    target = random_model(sizes.shape, sizes.dtype, device)
    draft, found, holds = draft_for(target, 0.65), dict[str, Any](), True
    for name in ("manual", "spread", "manual again"):
        # The draft vocabulary needs answers whose tokens occur again, and past text must not find them.
        config = OnlineConfig(candidates="draft", update_strategy=name.split()[0])
        with OnlineAssistant(target, draft, None, config) as assistant:
            assistant.warm_up(PROMPT + sizes.waited_tokens)
            asked = prompts(SKIPPED + sizes.waits, target.config.vocab_size, sizes.waited_tokens, answers=4)
            answers = [Moments(assistant.generate, ids, sizes.waited_tokens, device) for ids in asked][SKIPPED:]
            found[name] = {
                "seconds": percentiles([answer.seconds for answer in answers]),
                "first_token_seconds": percentiles([answer.first_token_seconds for answer in answers]),
                "versions": len(assistant.decisions), "learning_seconds": assistant.learning_seconds,
                "error": None if assistant.learning_error is None else repr(assistant.learning_error),
            }  # fmt: skip
        still = [way["seconds"] for strategy, way in found.items() if strategy.startswith("manual")]
        for p in ("p50", "p99") if sizes.compiles else ():
            holds &= found[name]["seconds"][p] <= 1.05 * max(each[p] for each in still) or name == "manual again"
        holds &= found[name]["error"] is None
        yield {"holds": holds, **found}


def batches(device: str, sizes: Sizes) -> Iterator[Found]:
    target = random_model(sizes.shape, sizes.dtype, device)
    found, holds, count = dict[str, Found](), True, sizes.new_tokens
    with OnlineAssistant(target, draft_for(target, 0.65), None, OnlineConfig(update_strategy="manual")) as assistant:
        ways: dict[str, Any] = {"ours": functools.partial(assistant.generate, learn=False), "eager": target.generate}
        if sizes.compiles:
            ways["compiled"] = functools.partial(target.generate, cache_implementation="static")
        for rows in sizes.rows:
            rates: dict[str, list[float]] = {way: [] for way in ways}
            for part in torch.tensor(prompts(4 * rows, target.config.vocab_size, count), device=device).split(rows):
                for way, generate in ways.items():
                    began, mask = time.perf_counter(), torch.ones_like(part)
                    generate(part, attention_mask=mask, do_sample=False, max_new_tokens=count)[0, -1].item()
                    rates[way].append(rows * count / (time.perf_counter() - began))
            found[f"{rows} rows"] = row = {way: float(np.median(each[2:])) for way, each in rates.items()}
            holds &= not sizes.compiles or row["ours"] >= 0.98 * max(row.values())
            yield {"holds": holds, "tokens_per_second": found}


# --- SmolLM2 with the cost of an 8B model ---------------------------------------------------------------------------


def stretched_pair(device: str, sizes: Sizes) -> tuple[Model, Model, Model, Any, Found]:
    """Return the stretched target and bundled draft, the original target, its tokenizer, and facts about them."""
    if sizes.compiles:
        pair = smollm2_pair(device)
    else:
        pair = load_pair(device=device)
        pair = pair._replace(draft=copy_layers(pair.target, [0]))
    small, tokenizer = pair.target, pair.tokenizer
    target = stretched(small, sizes.stretched_layers, sizes.copies, sizes.dtype)
    draft = stretched(pair.draft, pair.draft.config.num_hidden_layers, sizes.copies, sizes.dtype)
    draft.set_input_embeddings(target.get_input_embeddings())
    draft.set_output_embeddings(target.get_output_embeddings())
    ids = torch.tensor([encode_turn(tokenizer, "Why is the sky blue?")], device=device)
    with torch.no_grad():
        logits, expected = (model(ids).logits[0].float() for model in (target, small))
    facts = {
        "parameters": target.num_parameters(), "parameters_of_the_original": small.num_parameters(),
        "layers_of_the_draft": draft.config.num_hidden_layers,
        "relative_difference_of_logits": float((logits - expected).norm() / expected.norm()),
        "equal_most_likely_tokens": float((logits.argmax(-1) == expected.argmax(-1)).float().mean()),
    }  # fmt: skip
    return target, draft, small, tokenizer, facts


def questions_to(small: Model, tokenizer: Any, sizes: Sizes) -> dict[str, list[list[int]]]:
    """Return requests by data set: gsm8k, and both turns of mt_bench with the original's answers to the first."""
    number = sizes.requests + sizes.later
    if not sizes.compiles:
        return {"bundled": [encode_turn(tokenizer, e.prompt) for e in bundled_prompts(DOMAINS[0], number, seed=0)]}
    chats = common.recorded_chats(Path("traces/stretched"), small, tokenizer, sizes.new_tokens // 2)
    asked = common.prompts("gsm8k", tokenizer, number, 0)
    turns = [ids for trace in chats if len(ids := trace.prompt_ids.tolist()) <= MAX_QUESTION]
    return {"gsm8k": asked, "mt_bench": turns[:number]}


def stretched_systems(device: str, sizes: Sizes) -> Iterator[Found]:
    target, draft, small, tokenizer, facts = stretched_pair(device, sizes)
    asked, tokens = questions_to(small, tokenizer, sizes), sizes.new_tokens // 2
    found: Found = {"holds": True, "models": facts, "live": {}, "in_turns": {}}
    if sizes.compiles:  # transformers keeps the size of the largest static cache, and compiles for each larger one
        longest = max(MAX_QUESTION, *map(len, sum(asked.values(), [])))
        Moments(target.generate, [7] * longest, tokens, device, cache_implementation="static")
    for name, group in asked.items():
        first, later = group[: -sizes.later], group[-sizes.later :]
        traces, stats, rates = list[Trace](), list[AcceptanceStats](), list[float]()
        with OnlineAssistant(target, draft, tokenizer) as assistant:
            began = time.perf_counter()
            for ids in first:
                started = time.perf_counter()
                new, trace = answer_traced(assistant, ids, do_sample=False, max_new_tokens=tokens)
                rates.append(len(new) / (time.perf_counter() - started))
                traces.append(trace)
                stats.append(assistant.stats)
                assistant.reset_stats()
            seconds, learned = time.perf_counter() - began, assistant.draft
            parts = [slice(max(len(first) // 5, 1)), slice(-max(len(first) // 5, 1), None)]
            found["live"][name] = {
                "requests": len(first), "tokens_per_second": sum(map(len, traces)) / seconds,
                "tokens_per_second_at_first_and_last": [float(np.mean(rates[part])) for part in parts],
                "alpha_at_first_and_last": [sum(stats[part], AcceptanceStats()).alpha for part in parts],
                "learning_seconds": assistant.learning_seconds, "versions": assistant.version,
            }  # fmt: skip
            yield found
        earlier = redraft(draft, traces)
        systems = [
            *alone(sizes), System("prompt lookup", "prompt_lookup", num_assistant_tokens=10),
            lean("past text alone", learned, candidates="text", earlier=earlier),
            lean("draft before learning, and text", draft, earlier=earlier),
            lean("draft after learning", learned, candidates="draft", earlier=earlier),
            lean("draft after learning, and text", learned, earlier=earlier),
        ]  # fmt: skip
        report = benchmark(target, systems, {name: later}, max_new_tokens=tokens, tokenizer=tokenizer)
        found["in_turns"][name] = shown(report, name)
        yield found


# --- the cost model -------------------------------------------------------------------------------------------------

# Milliseconds on an H100 with the shape of an 8B model: a token of the target compiled by transformers, and a captured
# verification; the loop before, and with one wait per round; a drafted token of 0.6B, captured and compiled, and of
# two layers and one.
TOKEN_MS, VERIFICATION_MS, LOOP_MS, DRAFTED_MS = 8.85, 9.6, (1.9, 0.5), (3.3, 1.9, 0.5, 0.25)


def cost_model() -> Found:
    """Return the best k and the expected speed-up over the compiled target, by loop, draft, and acceptance."""
    table: Found = {}
    for loop in LOOP_MS:
        for draft in DRAFTED_MS:
            row = table[f"loop {loop} ms, drafted token {draft} ms"] = {}
            for alpha in (0.5, 0.6, 0.65, 0.7, 0.75, 0.8):
                tokens = {k: expected_block_efficiency(alpha, k) for k in range(1, 17)}
                times = {k: TOKEN_MS * e / (VERIFICATION_MS + loop + k * draft) for k, e in tokens.items()}
                row[f"alpha {alpha:g}"] = max((round(each, 2), k) for k, each in times.items())
    for name, row in table.items():
        print(f"{name:38}" + "  ".join(f"{alpha}: {best:.2f} (k = {k})" for alpha, (best, k) in row.items()))
    return table


# --- running the parts ----------------------------------------------------------------------------------------------

# Each with the seconds that it may take.
PARTS: dict[str, tuple[Callable[[str, Sizes], Iterator[Found]], int]] = {
    "exactness": (exactness, 150), "costs": (costs, 90), "memory": (memory, 40), "speed": (speed, 140),
    "latency": (latency, 60), "stretched": (stretched_systems, 330), "batches": (batches, 200),
}  # fmt: skip


class OutOfTimeError(BaseException):
    """Raised at the time limit. Not an `Exception`, because the assistant would catch that and go on."""


def out_of_time(*_: Any) -> None:
    raise OutOfTimeError("the time limit of this part")


class Said(logging.Handler):
    """Records warnings, captures, and compilations of the package."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or record.name.startswith("osd_hf.decoding."):
            self.said.append(record.getMessage())


def attempt(name: str, device: str, sizes: Sizes, save: Callable[[Found], Any]) -> Found:
    """Run a part; return its result or its error with what was found before, and what was logged."""
    part, seconds = PARTS[name]
    log, began, found = Said(), time.perf_counter(), dict[str, Any]()
    logging.getLogger("osd_hf").addHandler(log)
    try:
        signal.signal(signal.SIGALRM, out_of_time)
        signal.alarm(seconds if device != "cpu" else 0)
        for found in part(device, sizes):
            save(found)
    except (Exception, OutOfTimeError) as error:  # noqa: BLE001 - the other parts go on
        traceback.print_exc()
        traceback.clear_frames(error.__traceback__)  # they hold models
        found = {**found, "holds": False, "failed_with": f"{type(error).__name__}: {error}"}
    finally:
        signal.alarm(0)
        logging.getLogger("osd_hf").removeHandler(log)
    torch._dynamo.reset()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    found = {**found, "took_seconds": round(time.perf_counter() - began, 1), "log": log.said}
    if any("runs eagerly" in said for said in log.said):  # what was to be compiled
        found["holds"] = False
    print(f"{name}: {'held' if found['holds'] else 'DID NOT HOLD'}\n{json.dumps(found, indent=1)}", flush=True)
    return found


def main() -> None:
    parser = make_parser(__doc__, "accelerator", seed=False, traces=False)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--requests", type=int, help="of each data set, which the stretched model's draft learns from")
    parser.add_argument("--later", type=int, help="of each data set, answered in turns")
    parser.add_argument("--rows", type=int, nargs="+", help="of the batches")
    parser.add_argument("--dtypes", nargs="+", help="of exactness, such as float32")
    parser.add_argument("--cost-model", action="store_true", help="print the cost model, and end")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    args = parser.parse_args()
    started = time.time()
    if args.cost_model:
        write_report(f"{args.name}_costs", {"cost_model": cost_model()})
        return
    if not args.smoke and not torch.cuda.is_available():
        sys.exit("There is no accelerator here: torch.cuda.is_available() is false. --smoke runs on the CPU.")
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("osd_hf").setLevel(logging.INFO)  # tells what is compiled, and how long that took
    given = {name: getattr(args, name) for name in ("requests", "later", "rows", "dtypes")}
    chosen = {name: value for name, value in given.items() if value is not None}
    device, sizes = ("cpu", SMOKE) if args.smoke else ("cuda", Sizes(LARGE))
    facts = {"device": "cpu" if args.smoke else torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    found: Found = {}

    def save(name: str, part: Found) -> Path:
        found[name] = part
        return write_report(args.name, {"parts": found}, **facts, **run_facts(started))

    for name in args.parts:
        part = attempt(name, device, replace(sizes, **chosen), functools.partial(save, name))
        path = save(name, part)
    failed = [name for name, part in found.items() if not part["holds"]]
    print(f"{'all held' if not failed else 'did not hold: ' + ', '.join(failed)}; wrote {path.name}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
