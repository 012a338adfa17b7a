"""Measure what needs an accelerator, with the shapes of an 8B target and a 0.6B draft.

    python recipes/accelerator.py              # about ten minutes on one H100; shapes of 8B take 35 GB
    python recipes/accelerator.py --smoke      # tiny shapes on the CPU, without compilation

exactness   bundled pair, learning between requests, in float32 and bfloat16: identical answers, and the gap at the
            first different token of the others
memory      a learning draft with a large target: bytes between updates and at most, against `memory_plan`
latency     requests to a middle-sized pair, by `update_strategy`: seconds per request and until its first token
speed       large shapes with controlled acceptance: eager, captured, and compiled drafts, compiled targets, the target
            alone (eager and compiled by transformers), and the cost model
vocabulary  a token of the large draft with the full and with restricted output heads

No data set and no network is needed. A part that fails or exceeds its time limit is reported with its error. The exit
code is 0 if all parts succeed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import K, greedy, make_parser, parting, run_facts, write_report
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf.decoding import static
from osd_hf.decoding.sources import DraftForward, Drafting
from osd_hf.decoding.vocabulary import RestrictedDraft
from osd_hf.evaluation.benchmark import BenchmarkReport, System, answer_greedily, benchmark, compare_outputs
from osd_hf.models import load_pair
from osd_hf.prompts import encode_turn

PROMPT = 64  # tokens of prompts to random weights
ALPHAS = (0.5, 0.8)  # controlled acceptance
CERTAIN_LOGIT = 2.0**14  # above any logit of random weights, and within float16
SHAPES = {  # hidden size, layers, heads, intermediate size, vocabulary
    "8b": (4096, 32, 32, 12288, 151_936),
    "0.6b": (1024, 28, 16, 3072, 151_936),
    "1.5b": (1536, 28, 12, 8960, 32000),
    "160m": (768, 12, 12, 3072, 32000),
    "tiny-target": (64, 2, 4, 128, 512),
    "tiny-draft": (32, 1, 2, 64, 512),
}
Found = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run: shapes of the models, their dtype, and the number of requests."""

    large: tuple[str, str] = ("8b", "0.6b")
    middle: tuple[str, str] = ("1.5b", "160m")
    dtype: torch.dtype = torch.bfloat16
    answers: int = 32
    new_tokens: int = 64
    requests: int = 24  # of each strategy
    waited_tokens: int = 32  # of their answers
    timed: int = 3  # of each acceptance
    heads: tuple[int, ...] = (2048, 8192, 32768)
    compiles: bool = True


TINY = ("tiny-target", "tiny-draft")
SMOKE = Sizes(TINY, TINY, torch.float32, 2, 6, 9, 6, 1, (128,), compiles=False)


def prompts(number: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(PROMPT)] for _ in range(number)]


def asked(ids: list[int], device: str, new_tokens: int) -> dict[str, Any]:
    """Return the arguments of `generate`."""
    tensor, settings = greedy(ids, new_tokens, device)
    return {"inputs": tensor, **settings}


# --- random weights, and drafts with a given acceptance -------------------------------------------------------------


def random_pair(target_shape: str, draft_shape: str, *, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """
    Build a Llama-shaped target and draft with random weights. Answers end only at their maximum.

    The target's head is its shifted embedding, which outweighs the layers, so the next token is always clear.
    Otherwise, in half precision, wider forwards would sometimes choose other tokens, and acceptance would vary.
    """
    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        target, draft = (random_model(SHAPES[shape], dtype) for shape in (target_shape, draft_shape))
        with torch.no_grad():
            embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
            embedding.normal_(0, 100)
            head.copy_(embedding.roll(1, 0) * (target.config.initializer_range / 100))
    return target, draft


def random_model(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    hidden, layers, heads, intermediate, vocab = shape
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


class ControlledAcceptance:
    """
    Replaces the proposals of drafts: at each position by the token that the target will emit there, with a given
    probability, otherwise by another one. The drafts still run their forwards. All get the same proposals.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.random = random.Random(0)
        self.proposals: dict[tuple[int, ...], list[int]] = {}

    def record(self, prompt_ids: Sequence[int], answer: Sequence[int], alpha: float) -> None:
        """Choose the proposals after a prompt from the target's answer."""

        def proposal(token: int) -> int:
            if self.random.random() < alpha:
                return token
            return (token + 1 + self.random.randrange(self.vocab_size - 1)) % self.vocab_size

        self.proposals[tuple(prompt_ids)] = [*prompt_ids, *map(proposal, answer)]

    @contextlib.contextmanager
    def steering(self) -> Iterator[None]:
        """Put the proposals into the logits of all drafts of this process."""
        make = Drafting.forward

        def steered(drafting: Drafting, *args: Any, **kwargs: Any) -> Any:
            made: Any = make(drafting, *args, **kwargs)
            made.feed = self.steered_feed(made)
            return made

        Drafting.forward = steered  # type: ignore[method-assign]
        try:
            yield
        finally:
            Drafting.forward = make  # type: ignore[method-assign]

    def steered_feed(self, forward: DraftForward) -> Callable[[torch.Tensor], torch.Tensor]:
        feed = forward.feed
        proposals: list[int] = []

        def steered(ids: torch.Tensor) -> torch.Tensor:
            if forward.length == 0:
                context = tuple(ids[0].tolist())
                proposals[:] = next(
                    (p for prompt, p in self.proposals.items() if context[: len(prompt)] == prompt), []
                )
            logits = feed(ids)
            if forward.length < len(proposals):
                logits[0, proposals[forward.length]] = CERTAIN_LOGIT
            return logits

        return steered


def controlled_report(
    target: Any, systems: Sequence[System], groups: dict[float, list[list[int]]], new_tokens: int
) -> BenchmarkReport:
    """Time the systems on prompts by their acceptance; the drafts of lean systems reach it."""
    acceptance = ControlledAcceptance(target.config.vocab_size)
    for alpha, group in groups.items():
        for prompt in group:
            acceptance.record(prompt, answer_greedily(target, prompt, new_tokens), alpha)
    named = {f"alpha {alpha:g}": group for alpha, group in groups.items()}
    with acceptance.steering():
        return benchmark(target, systems, named, max_new_tokens=new_tokens, measure_costs=True)


# --- the parts ------------------------------------------------------------------------------------------------------


def exactness(device: str, sizes: Sizes) -> Found:
    share = -(-sizes.answers // len(DOMAINS))
    texts = [e.prompt for domain in DOMAINS for e in bundled_prompts(domain, share, seed=0)][: sizes.answers]
    found: Found = {}
    for dtype in (torch.float32, torch.bfloat16):
        pair = load_pair(device=device)
        target, draft = pair.target.to(dtype), pair.draft.to(dtype)
        fast = {"update_strategy": "interval", "update_interval": 2, "steps_per_update": 3, "gate": False}
        config = OnlineConfig(num_assistant_tokens=K, **fast)
        outcomes, parted = [], []
        with OnlineAssistant(target, draft, pair.tokenizer, config) as assistant:
            for number, text in enumerate(texts):
                ids = encode_turn(pair.tokenizer, text)
                alone = answer_greedily(target, ids, sizes.new_tokens)
                ours = assistant.generate(**asked(ids, device, sizes.new_tokens))[0, len(ids) :].tolist()
                outcomes.append(compare_outputs(target, ids, alone, ours))
                if outcomes[-1] != "identical":
                    parted.append({"request": number, **parting(target, ids, alone, ours)})
            versions = assistant.version
        counts = {name: outcomes.count(name) for name in ("identical", "tied", "differing")}
        found[str(dtype).removeprefix("torch.")] = {**counts, "versions": versions, "parted": parted}
    return {"holds": found["float32"]["differing"] == 0 and found["float32"]["versions"] > 0, **found}


def memory(device: str, sizes: Sizes) -> Found:
    is_measured = device != "cpu"
    before = torch.cuda.memory_allocated() if is_measured else 0
    target, draft = random_pair(*sizes.large, device=device, dtype=sizes.dtype)
    config = OnlineConfig(num_assistant_tokens=K, update_strategy="manual", gate=False)
    found: Found = {}
    updates = []
    with OnlineAssistant(target, draft, None, config) as assistant:
        plan = assistant.memory_plan(prompt_tokens=PROMPT, new_tokens=sizes.new_tokens)
        for number, ids in enumerate(prompts(12, target.config.vocab_size)):
            assistant.generate(**asked(ids, device, sizes.new_tokens))
            if number % 4 == 3:  # the third version comes while one serves and one is kept
                began = time.perf_counter()
                assistant.update(1)
                updates.append(time.perf_counter() - began)
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
    return {"holds": holds, "measured": found, "planned": planned, "measured_over_planned": over, "parts": parts,
            "update_seconds": updates}  # fmt: skip


class FirstToken(BaseStreamer):
    """Records the time of the first new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def latency(device: str, sizes: Sizes) -> Found:
    target, draft = random_pair(*sizes.middle, device=device, dtype=sizes.dtype)
    found: Found = {}
    for strategy in ("manual", "spread", "interval", "idle"):
        config = OnlineConfig(num_assistant_tokens=K, update_strategy=strategy)
        seconds, waits = [], []
        with OnlineAssistant(target, draft, None, config) as assistant:
            assistant.warm_up(PROMPT + sizes.waited_tokens)
            for ids in prompts(sizes.requests, target.config.vocab_size):
                first, began = FirstToken(), time.perf_counter()
                assistant.generate(**asked(ids, device, sizes.waited_tokens), streamer=first)
                seconds.append(time.perf_counter() - began)
                waits.append(first.times[1] - began)
                if strategy == "idle":
                    assistant.wait_until_idle(seconds[-1] / 2)
            versions, error = len(assistant.decisions), assistant.learning_error
        found[strategy] = {
            "seconds": spread_of(seconds[2:]), "first_token_seconds": spread_of(waits[2:]), "versions": versions,
            "learning_seconds": assistant.learning_seconds, "error": None if error is None else repr(error),
        }  # fmt: skip
    return {"holds": all(way["error"] is None for way in found.values()), **found}


def spread_of(seconds: list[float]) -> Found:
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "longest": max(seconds)}


def speed(device: str, sizes: Sizes) -> Found:
    target, draft = random_pair(*sizes.large, device=device, dtype=sizes.dtype)
    drawn = iter(prompts(len(ALPHAS) * sizes.timed, target.config.vocab_size))
    groups = {alpha: [next(drawn) for _ in range(sizes.timed)] for alpha in ALPHAS}
    compiles = sizes.compiles
    ways: dict[str, dict[str, Any]] = {
        "eager draft": {"compile_draft": False},
        "default": {},  # captured
        "compiled draft": {"compile_draft": compiles},
        "both compiled": {"compile_draft": compiles, "compile_target": compiles},
    }
    lean = [System(name, "lean", draft, K, **how) for name, how in ways.items()]
    systems = [System("target alone", "alone"), System("target compiled", "alone", compile_target=compiles), *lean]
    systems = systems if compiles else [systems[0], *lean]
    report = controlled_report(target, systems, groups, sizes.new_tokens)
    kept = ("tokens_per_second", "first_token_seconds", "alpha", "outputs", "peak_bytes", "times_alone", "predicted",
            "round_seconds")  # fmt: skip
    found: Found = {
        dataset: {
            s.name: {k: v for k, v in report.figures(s.name, dataset).items() if k in kept} for s in report.systems
        }
        for dataset in report.answers
    }
    drafts = ("eager draft", "default", "compiled draft")
    eager, captured, compiled = (report.figures(name)["round_seconds"] for name in drafts)
    differing = sum(a.outcome == "differing" for s in report.systems for a in report.answers_of(s.name))
    is_exact = sizes.dtype != torch.float32 or differing == 0
    return {"holds": is_exact and (compiled < captured < eager or not compiles), "differing": differing, **found}


@torch.inference_mode()
def vocabulary(device: str, sizes: Sizes) -> Found:
    draft, _ = random_pair(sizes.large[1], sizes.large[1], device=device, dtype=sizes.dtype)
    drafts = {draft.config.vocab_size: draft} | {n: RestrictedDraft(draft, np.arange(n)).model for n in sizes.heads}
    context = torch.tensor(prompts(1, draft.config.vocab_size), device=device)
    found: Found = {}
    for way in ("eager",):
        forwards = {size: DraftForward(d) for size, d in drafts.items()}
        times: dict[int, list[float]] = {size: [] for size in forwards}
        for one in forwards.values():
            one.feed(context)
        for _ in range(4 + 8 * sizes.timed):
            for size, one in forwards.items():
                began = time.perf_counter()
                float(one.feed(context[:, :1]).max())  # waits for the device
                times[size].append(time.perf_counter() - began)
                one.crop(PROMPT)
        found[way] = {str(size): float(np.median(those[4:])) for size, those in times.items()}
    whole, *few = next(reversed(found.values())).values()
    return {"holds": device == "cpu" or min(few) < 1.05 * whole, "seconds": found}


# Each with the seconds that it may take.
PARTS: dict[str, tuple[Callable[[str, Sizes], Found], int]] = {
    "exactness": (exactness, 100), "memory": (memory, 90), "latency": (latency, 130), "speed": (speed, 300),
    "vocabulary": (vocabulary, 40),
}  # fmt: skip


# --- running them ---------------------------------------------------------------------------------------------------


class OutOfTimeError(BaseException):
    """Raised at the time limit. Not an `Exception`, because the assistant would catch that and go on."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    def over(*_: Any) -> None:
        raise OutOfTimeError(f"not done within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Said(logging.Handler):
    """Records warnings, captures, and compilations of the package."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or record.name == static.__name__:
            self.said.append(record.getMessage())


def attempt(name: str, device: str, sizes: Sizes) -> Found:
    """Run a part; return its result or its error, and what was logged."""
    part, seconds = PARTS[name]
    log, began = Said(), time.perf_counter()
    logging.getLogger("osd_hf").addHandler(log)
    try:
        with within(seconds) if device != "cpu" else contextlib.nullcontext():
            found = part(device, sizes)
    except (Exception, OutOfTimeError) as error:  # noqa: BLE001 - the other parts go on
        traceback.print_exc()
        traceback.clear_frames(error.__traceback__)  # they hold models
        found = {"holds": False, "failed_with": f"{type(error).__name__}: {error}"}
    finally:
        logging.getLogger("osd_hf").removeHandler(log)
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    found |= {"took_seconds": round(time.perf_counter() - began, 1), "log": log.said}
    if any("runs eagerly" in said for said in log.said):  # what was to be compiled
        found["holds"] = False
    print(f"{name}: {'held' if found['holds'] else 'DID NOT HOLD'}\n{json.dumps(found, indent=1)}", flush=True)
    return found


def main() -> None:
    parser = make_parser(__doc__, "accelerator", seed=False, traces=False)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        sys.exit("There is no accelerator here: torch.cuda.is_available() is false. --smoke runs on the CPU.")
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("osd_hf").setLevel(logging.INFO)  # tells what is compiled, and how long that took
    device, sizes, started = ("cpu", SMOKE, time.time()) if args.smoke else ("cuda", Sizes(), time.time())
    facts = {"device": "cpu" if args.smoke else torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    found: Found = {}
    for name in args.parts:
        found[name] = attempt(name, device, sizes)
        path = write_report(args.name, {"parts": found}, **facts, **run_facts(started))
    failed = [name for name, part in found.items() if not part["holds"]]
    print(f"{'all held' if not failed else 'did not hold: ' + ', '.join(failed)}; wrote {path.name}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
