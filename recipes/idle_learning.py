"""
Learning in spare time, live: Poisson arrivals at a share of what the machine can serve, learning on and off in
alternating blocks.

    OSD_HF_DATA=... python recipes/idle_learning.py                              # 30% and 60% load, 192 requests each
    OSD_HF_DATA=... python recipes/idle_learning.py --loads 0.6 --requests 16 --block 4      # smoke
    python recipes/idle_learning.py --shape 0.6b --name idle_waits                           # a larger draft

One server, first come first served. Of each request: service time, from the call to the answer; delay, from the call
to the target's first forward, which is what a request may have to wait for the learner; alpha, and what the static
draft would have had, by replay. Of each load: the ratio of service times on and off at the median and the 95th
percentile with bootstrap intervals over requests, the share of the idle time that learning used, and alpha gained over
the static draft per minute. Requests in off blocks are captured, not learned from; drafts stay as they are.

With `--shape`, the longest waits for a draft of that shape (random weights, bf16, on the CPU) beside a small target,
while one update is done. With "idle": from the arrival of a request until the learner lets it in, and what was under
way; and the longest stretches between two places where the learner can be interrupted, waited for or not. With
"spread", the default: how long an answer waits for its share of learning, and how long it may. No data set is needed.
One step on two requests, without an average: 0.6b takes some 12 GB, and some minutes, as one step of Muon is 11 TFLOP.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import MAX_NEW_TOKENS, K, drawing, load_pair, make_parser, pooled, prompts, run_facts, write_report
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from osd_hf import AcceptanceStats, CorrectionStore, OnlineAssistant, OnlineConfig
from osd_hf.learning.learner import Learner
from osd_hf.live_learning import LiveLearning
from osd_hf.replay import replay_each
from osd_hf.utils import yielding
from osd_hf.utils.report import process_peak_bytes

Seconds = NDArray[np.float64]


class FirstForward:
    """When the target was run first after a request had come."""

    def __init__(self, target: Any) -> None:
        self.at: float | None = None
        self._forward: Callable[..., Any] = target.forward
        target.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.at is None:
            self.at = time.perf_counter()
        return self._forward(*args, **kwargs)


def serve(assistant: OnlineAssistant, watch: FirstForward, ids: list[int]) -> tuple[float, float]:
    """Service time and delay of one request, seconds."""
    prompt = torch.tensor([ids])
    watch.at, began = None, time.perf_counter()
    assistant.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    assert watch.at is not None
    return time.perf_counter() - began, watch.at - began


def ratio(on: Seconds, off: Seconds, percentile: float) -> list[float]:
    """On over off at a percentile, with its 95% bootstrap interval."""
    rng = np.random.default_rng(0)
    resampled = [
        np.percentile(rng.choice(on, len(on)), percentile) / np.percentile(rng.choice(off, len(off)), percentile)
        for _ in range(2000)
    ]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return [float(np.percentile(on, percentile) / np.percentile(off, percentile)), float(low), float(high)]


def run(load: float, pair: Any, watch: FirstForward, asked: list[list[int]], args: Any) -> dict[str, Any]:
    target, draft, tokenizer = pair
    rng, store = random.Random(args.seed), CorrectionStore()
    config = OnlineConfig(
        num_assistant_tokens=5, update_strategy="idle", micro_step_seconds=args.micro_step, seed=args.seed
    )
    rows, idle = [], {True: 0.0, False: 0.0}
    with OnlineAssistant(target, draft, tokenizer, config, store=store) as assistant:
        assistant.pause()
        alone = float(np.mean([serve(assistant, watch, ids)[0] for ids in asked[: args.block]]))
        arrival = free = time.perf_counter()
        minutes = 0.0
        for i, ids in enumerate(tqdm(asked[args.block :], desc=f"load {load:g}")):
            learns = i // args.block % 2 == 0
            (assistant.resume if learns else assistant.pause)()
            arrival += rng.expovariate(load / alone)
            time.sleep(max(arrival - time.perf_counter(), 0.0))
            idle[learns] += max(time.perf_counter() - free, 0.0)
            service, delay = serve(assistant, watch, ids)
            minutes += (time.perf_counter() - free) / 60 * learns
            free = time.perf_counter()
            rows.append((learns, service, delay))
        assistant.pause()
        spent = assistant.learning_seconds
    traces = list(store)[args.block :]
    stats = [AcceptanceStats.from_trace(t) for t in traces]
    static = replay_each(draft, traces, K)
    on, off = (np.array([r[1] for r in rows if r[0] is learns]) for learns in (True, False))
    waits = {learns: 1e3 * np.array([r[2] for r in rows if r[0] is learns]) for learns in (True, False)}
    last = slice(round(len(stats) * 0.75), None)
    gain = pooled(stats[last]) - pooled(static[last])
    return {
        "load": load, "service_ms_alone": 1e3 * alone, "requests": len(rows),
        "service_p50": ratio(on, off, 50), "service_p95": ratio(on, off, 95),
        "delay_ms": {
            name: {f"p{p}": float(np.percentile(waits[learns], p)) for p in (50, 95, 100)}
            for name, learns in (("on", True), ("off", False))
        },
        "idle_seconds_on": idle[True], "learning_seconds": spent, "idle_share_used": spent / max(idle[True], 1e-9),
        "gain_last_quarter": gain, "minutes_on": minutes, "gain_per_minute": gain / minutes,
        "promoted": sum(d.outcome == "promoted" for d in assistant.decisions),
        "services": [[int(r[0]), r[1], r[2]] for r in rows],
    }  # fmt: skip


def plot(name: str, rows: list[dict[str, Any]]) -> None:
    with drawing(name, 1, len(rows), figsize=(4.5 * len(rows), 3.6)) as (_, axes):
        for axis, row in zip(axes[0], rows, strict=True):
            for learns, label in ((1, "learning"), (0, "paused")):
                seconds = sorted(s for on, s, _ in row["services"] if on == learns)
                axis.plot(seconds, np.linspace(0, 1, len(seconds)), label=label)
            axis.set(xlabel="service time, s", ylabel="share of requests", title=f"load {row['load']:g}")
            axis.legend()
            axis.grid(alpha=0.3)


# --- the longest waits beside a draft of some shape -----------------------------------------------------------------

SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {  # as published for Qwen3-0.6B
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    },
}  # fmt: skip
TARGET = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
PRIMED, LONGEST_SECONDS = (
    16,
    480.0,
)  # requests before learning begins, so that the gate can judge; then at most so long


class Stretches:
    """Times of a learner between two places where it can be interrupted, by what both are."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        self.last = ""  # the stretch that has ended last
        self._since: tuple[str, float] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Of all learners inside."""
        step, give_way = Learner.step, LiveLearning._give_way

        def stepped(learner: Learner) -> Any:
            self._since = "begin of a step", time.perf_counter()
            try:
                return step(learner)
            finally:
                self._end("end of a step")
                self._since = None

        def given(live: LiveLearning) -> None:
            place = self._place()
            self._end(place)
            give_way(live)
            self._since = place, time.perf_counter()

        with patch.object(Learner, "step", stepped), patch.object(LiveLearning, "_give_way", given):
            yield

    def _end(self, place: str) -> None:
        if self._since is not None:
            name, seconds = f"{self._since[0]} -> {place}", time.perf_counter() - self._since[1]
            self.last, self.longest[name] = name, max(self.longest.get(name, 0.0), seconds)

    @staticmethod
    def _place() -> str:
        """Who gives way: what stands above the calls of `turns`."""
        frame, before = sys._getframe(2), ""
        while frame is not None:
            code = frame.f_code
            if code.co_filename == yielding.__file__:
                if code.co_name == "<lambda>":
                    return "backward"
                before = "a layer in " if code.co_name == "_at_layer" else before
            elif f"{Path('osd_hf')}/" in code.co_filename:
                return f"{before}{code.co_qualname.replace('.<locals>', '')}"
            frame = frame.f_back  # type: ignore[assignment]
        return "elsewhere"


def small_pair(shape: dict[str, Any], seed: int) -> tuple[Any, Any]:
    """A small target, in float32, and a draft of a shape, in bfloat16: random weights, which say the same nothing."""
    torch.manual_seed(seed)
    ends: dict[str, Any] = {"tie_word_embeddings": True, "eos_token_id": None}
    draft = Qwen3ForCausalLM._from_config(Qwen3Config(**shape | ends), dtype=torch.bfloat16)
    return Qwen3ForCausalLM(Qwen3Config(**shape | TARGET | ends)).eval(), draft.eval()


def longest_waits(strategy: Any, args: Any, stretches: Stretches) -> dict[str, Any]:
    """What learning makes requests wait while it does one update."""
    config = OnlineConfig(
        num_assistant_tokens=2, update_strategy=strategy, update_interval=4, steps_per_update=1, batch_size=2,
        weight_average=0.0, min_effort=1.0, seed=args.seed,
    )  # fmt: skip
    rng, waits, services = random.Random(args.seed), list[tuple[float, str]](), list[float]()
    stretches.longest.clear()
    size = SHAPES[args.shape]["vocab_size"]
    pair = small_pair(SHAPES[args.shape], args.seed)
    with stretches.watched(), OnlineAssistant(*pair, config=config) as assistant:
        del pair
        request, share = assistant._live.request, assistant._live._share

        @contextmanager
        def arrived() -> Iterator[None]:
            began = time.perf_counter()
            with request():
                waits.append((time.perf_counter() - began, stretches.last))
                yield

        def shared(seconds: float) -> None:
            began = time.perf_counter()
            share(seconds)
            name = f"the share of an answer, which may wait {seconds:.2f} s for a part"
            waits.append((time.perf_counter() - began, name))

        if strategy == "idle":
            assistant._live.request = arrived  # type: ignore[method-assign]
        else:
            assistant._live._share = shared  # type: ignore[method-assign]

        def ask(learn: bool) -> None:
            ids, began = torch.tensor([[rng.randrange(3, size) for _ in range(16)]]), time.perf_counter()
            mask = torch.ones_like(ids)
            assistant.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8, learn=learn)
            services.append(time.perf_counter() - began)

        assistant.pause()
        for _ in range(PRIMED):
            ask(learn=True)
        alone, services[:], waits[:] = list(services), [], []
        assistant.resume()
        began = time.perf_counter()
        # While an update is spread over many answers, the next one becomes due.
        while (not assistant.decisions or (strategy == "idle" and assistant.is_learning)) and (
            time.perf_counter() - began < LONGEST_SECONDS
        ):
            if strategy == "idle":
                time.sleep(rng.expovariate(1 / args.pause))
            ask(learn=strategy != "idle")
        is_bf16 = assistant._learner.updater(None).is_bf16
    if not assistant.decisions:
        print("The update has not come to its end in time: its last stretches may be missing.")
    return {
        "strategy": strategy, "requests": len(services), "learning_seconds": assistant.learning_seconds,
        "updates": len(assistant.decisions), "mixed_precision": "bf16" if is_bf16 else "no",
        "wait_seconds": {f"p{p}": float(np.percentile([wait for wait, _ in waits], p)) for p in (50, 95, 100)},
        "longest_waits": sorted(waits, reverse=True)[:5],
        "longest_stretches": sorted(((s, name) for name, s in stretches.longest.items()), reverse=True)[:8],
        "service_seconds": {name: float(np.median(s)) for name, s in (("alone", alone), ("learning", services))},
        "process_peak_bytes": process_peak_bytes(),
    }  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__, "idle_learning", traces=False)
    parser.add_argument("--dataset", default="finance_alpaca")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6])
    parser.add_argument("--requests", type=int, default=192, help="of a load")
    parser.add_argument("--block", type=int, default=16, help="requests between switching learning on and off")
    parser.add_argument("--micro-step", type=float, default=0.02, help="seconds")
    parser.add_argument("--shape", choices=SHAPES, help="the longest waits beside a draft of this shape instead")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two requests, with a shape")
    parser.add_argument("--strategies", nargs="+", default=["idle", "spread"], help="with a shape")
    args = parser.parse_args()
    started = time.time()
    if args.shape is not None:
        stretches, rows = Stretches(), []
        for strategy in args.strategies:
            rows.append(longest_waits(strategy, args, stretches))
            print(*(f"{name}: {value}" for name, value in rows[-1].items()), sep="\n", end="\n\n", flush=True)
        write_report(args.name, {"rows": rows}, seed=args.seed, shape=args.shape, **run_facts(started))
        return
    pair = load_pair()
    watch = FirstForward(pair[0])
    asked = prompts(args.dataset, pair[2], args.requests + args.block, args.seed)
    rows = []
    for load in args.loads:
        rows.append(run(load, pair, watch, asked, args))
        r = rows[-1]
        print(
            f"load {load:g}: service on / off p50 {r['service_p50'][0]:.3f} [{r['service_p50'][1]:.3f}, "
            f"{r['service_p50'][2]:.3f}], p95 {r['service_p95'][0]:.3f} [{r['service_p95'][1]:.3f}, "
            f"{r['service_p95'][2]:.3f}]; delay ms {r['delay_ms']}; idle time used {r['idle_share_used']:.2f}; gain "
            f"{r['gain_last_quarter']:+.3f} over static in the last quarter, {r['gain_per_minute']:+.3f} a minute; "
            f"{r['promoted']} versions promoted",
            flush=True,
        )
    plot(args.name, rows)
    write_report(args.name, {"rows": rows}, seed=args.seed, requests=args.requests, **run_facts(started))


if __name__ == "__main__":
    main()
