"""Compare drafting for batches with the target's own batches and with single rows.

    OSD_HF_DATA=... python recipes/batches.py                                             # gsm8k and finance
    OSD_HF_DATA=... python recipes/batches.py --learn 0                                   # the original draft
    OSD_HF_DATA=... python recipes/batches.py --parts memory growth --learn 0
    OSD_HF_DATA=... python recipes/batches.py --requests 4 --sizes 1 2 --learn 4 --datasets gsm8k \
        --max-new-tokens 8 --batches 4                                                    # smoke

The same prompts are answered greedily in batches by `target.generate`, by an assistant that chooses the draft length,
by one that drafts k tokens, and row by row by an assistant, in changing order. Ratios of seconds have a 95% bootstrap
interval over batches. The draft has learned from other requests. Nothing is compiled. The report also counts padding
tokens fed to the target, cache columns read beyond the tokens of a row, and bytes of copied caches.

`memory` measures the bytes of caches and of all tensors by batch size. `growth` answers `--batches` batches of 4 and
measures the bytes of all tensors and of the process.

The numbers for an H100 with an 8B target and a 0.6B draft are a model, not a measurement: bf16 weights are read once
per forward, and keys and values of `--context` tokens per row once, at 3.35 TB/s; arithmetic runs at 400 TFLOP/s;
kernel launches and sampling take no time. Acceptance is that of the lab pair.
"""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from common import (
    MAX_NEW_TOKENS,
    TEMPLATES,
    K,
    drawing,
    load_pair,
    make_parser,
    prompts,
    recorded,
    run_facts,
    simulated,
    write_report,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig
from osd_hf.decoding import batch as drafting
from osd_hf.speedup import expected_block_efficiency

BANDWIDTH, FLOPS = 3.35e12, 4e14  # bytes/s and FLOP/s of the model
# Parameters, and bytes of keys and values a token: Qwen3-8B and Qwen3-0.6B.
TARGET, DRAFT = (8.2e9, 36 * 8 * 128 * 4), (0.6e9, 28 * 8 * 128 * 4)
WAYS = ("alone", "auto", "fixed", "one by one")


class Counted:
    """Counts what forwards over rows of different lengths feed, read, and copy."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.reset()

    def reset(self) -> None:
        self.fed = self.filling = self.read = self.beyond = self.copied = self.bytes_read = 0

    def __enter__(self) -> Counted:
        counted, self._before = self, (drafting.Ragged.feed, drafting.Ragged.leave, drafting._with_room)
        feed, leave, room = self._before

        def feeds(ragged: Any, ids: Any, starts: Any, last: Any = None, **settings: Any) -> Any:
            if ragged.model is counted.target:
                rows, count = ids.shape
                width, ends = max(starts) + count, [start + count for start in starts]
                own = [start + 1 for start in starts] if last is None else (last[:, 0] + 1).tolist()
                counted.fed += rows * count
                counted.filling += sum(ends) - sum(own)
                counted.read += rows * width
                counted.beyond += rows * width - sum(own)
            layer = ragged.cache.layers[0]
            per_column = 2 * layer.keys[0, :, 0].nbytes * len(ragged.cache.layers)
            counted.bytes_read += per_column * len(starts) * (max(starts) + ids.shape[1])
            return feed(ragged, ids, starts, last, **settings)

        def leaves(ragged: Any, row: int) -> None:
            if row < ragged.rows - 1:
                layer = ragged.cache.layers[0]
                counted.copied += 2 * layer.keys[0].nbytes * len(ragged.cache.layers)
            leave(ragged, row)

        def with_room(states: Any, size: int, padding: Any = ()) -> Any:
            counted.copied += states.nbytes
            return room(states, size, padding)

        drafting.Ragged.feed, drafting.Ragged.leave = feeds, leaves  # type: ignore[method-assign]
        drafting._with_room = with_room
        return self

    def __exit__(self, *exc_info: object) -> None:
        drafting.Ragged.feed, drafting.Ragged.leave, drafting._with_room = self._before

    def shares(self) -> dict[str, float]:
        return {
            "filling_of_fed": self.filling / max(self.fed, 1),
            "beyond_of_read": self.beyond / max(self.read, 1),
            "copied_over_read": self.copied / max(self.bytes_read, 1),
        }


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return prompts with padding on the left."""
    ids, mask = torch.zeros(2, len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, -len(row) :], mask[i, -len(row) :] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def ratio(ours: list[float], theirs: list[float], seed: int) -> list[float]:
    """Return the speed ratio and its 95% interval over batches."""
    both = np.array([ours, theirs])
    drawn = both[:, np.random.default_rng(seed).integers(len(ours), size=(2000, len(ours)))].sum(-1)
    low, high = np.percentile(drawn[1] / drawn[0], [2.5, 97.5])
    return [float(both[1].sum() / both[0].sum()), float(low), float(high)]


def served(pair: Any, draft: Any, asked: list[list[int]], size: int, args: Any) -> dict[str, Any]:
    """Answer all prompts in batches of this size in each way."""
    config = OnlineConfig(update_strategy="manual", candidates="draft", seed=args.seed)
    configs = {"auto": config, "fixed": replace(config, num_assistant_tokens=args.k), "one by one": config}
    assistants = {way: OnlineAssistant(pair.target, draft, pair.tokenizer, each) for way, each in configs.items()}
    settings = {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    batches = [asked[i : i + size] for i in range(0, len(asked) - size + 1, size)]
    identical, tokens, counted = 0, 0, Counted(pair.target)

    def answer(way: str, rows: list[list[int]]) -> list[torch.Tensor]:
        if way == "one by one":
            return [assistants[way].generate(**padded([row]), learn=False, **settings)[0] for row in rows]
        if way == "alone":
            return list(pair.target.generate(**padded(rows), **settings))
        if way == "fixed":
            with counted:
                return list(assistants[way].generate(**padded(rows), learn=False, **settings))
        return list(assistants[way].generate(**padded(rows), learn=False, **settings))

    for way in WAYS:  # what only a first batch pays, costs among it
        for _ in range(2):
            answer(way, batches[0])
    counted.reset()
    for assistant in assistants.values():
        assistant.reset_stats()
    for i, rows in enumerate(tqdm(batches, desc=f"B = {size}", leave=False)):
        answers = {}
        for way in np.roll(WAYS, i).tolist():
            began = time.perf_counter()
            answers[way] = answer(way, rows)
            seconds[way].append(time.perf_counter() - began)
        identical += sum(map(torch.equal, answers["fixed"], answers["alone"]))
        tokens += sum(len(a) - len(padded(rows)["input_ids"][0]) for a in answers["alone"])
    stats: dict[str, AcceptanceStats] = {way: assistant.stats for way, assistant in assistants.items()}
    row = {
        "rows": size, "batches": len(batches), "identical": identical, "answers": len(batches) * size,
        "tokens_per_second": {way: tokens / sum(each) for way, each in seconds.items()},
        "times_alone": {way: ratio(seconds[way], seconds["alone"], args.seed) for way in WAYS[1:]},
        "times_one_by_one": ratio(seconds["auto"], seconds["one by one"], args.seed),
        "alpha": stats["fixed"].alpha, "tokens_per_round": {way: s.block_efficiency for way, s in stats.items()},
        "drafted_per_round": {way: s.drafted / max(s.target_forwards, 1) for way, s in stats.items()},
        "shares": counted.shares(),
    }  # fmt: skip
    told = ", ".join(f"{way} {row['times_alone'][way][0]:.2f}" for way in WAYS[1:])
    print(f"B = {size}: times batches of the target alone: {told}; alpha {row['alpha']:.3f}, {identical} of "
          f"{row['answers']} identical, {row['shares']}", flush=True)  # fmt: skip
    for assistant in assistants.values():
        assistant.close()
    return row


# --- memory ---------------------------------------------------------------------------------------------------------


def storages(things: list[Any]) -> list[Any]:
    """Return the storages of tensors; packed weights are not visible."""
    tensors = [thing for thing in things if issubclass(type(thing), torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]


class Peak(TorchDispatchMode):
    """Measures the maximum bytes of tensors that exist at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage._cdata for storage in storages(tree_leaves((args, kwargs)))}
        made = func(*args, **kwargs)
        for storage in storages(tree_leaves(made)):
            if storage._cdata not in given and storage._cdata not in self.known:
                self.known[storage._cdata] = weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return made

    def _gone(self, key: int, count: int) -> None:
        self.known.pop(key)
        self.now -= count


def cached_bytes(cache: Any) -> int:
    """Return the bytes of keys and values."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def held(pair: Any, draft: Any, asked: list[list[int]], size: int, args: Any) -> dict[str, Any]:
    """Return the memory of a batch for the target alone and with a draft."""
    config = OnlineConfig(update_strategy="manual", num_assistant_tokens=args.k, seed=args.seed)
    batch, settings = padded(asked[:size]), {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    caches, begin = list[Any](), drafting.Ragged.__init__

    def begins(ragged: Any, *given: Any) -> None:
        begin(ragged, *given)
        caches.append(ragged.cache)

    with Peak() as alone:
        theirs = pair.target.generate(**batch, **settings, return_dict_in_generate=True).past_key_values
    row = {"rows": size, "alone": {"caches": cached_bytes(theirs), "most": alone.most}}
    del theirs
    with OnlineAssistant(pair.target, draft, pair.tokenizer, config) as assistant:
        for _ in range(2):  # what only first batches make
            assistant.generate(**padded(asked[:2]), **settings, learn=False)
        drafting.Ragged.__init__ = begins  # type: ignore[method-assign]
        try:
            with Peak() as ours:
                assistant.generate(**batch, **settings, learn=False)
        finally:
            drafting.Ragged.__init__ = begin  # type: ignore[method-assign]
    row["drafted"] = {"caches": sum(map(cached_bytes, caches)), "most": ours.most}
    print(f"B = {size}: megabytes of caches {row['alone']['caches'] / 1e6:.2f} alone, "
          f"{row['drafted']['caches'] / 1e6:.2f} drafted; of tensors at once {alone.most / 1e6:.2f} alone, "
          f"{ours.most / 1e6:.2f} drafted", flush=True)  # fmt: skip
    return row


def growth(pair: Any, draft: Any, asked: list[list[int]], args: Any) -> list[dict[str, int]]:
    """Return the bytes of all tensors and of the process after each number of batches."""
    settings, found = {"do_sample": False, "max_new_tokens": min(16, args.max_new_tokens)}, []
    with OnlineAssistant(pair.target, draft, pair.tokenizer, OnlineConfig(update_strategy="manual")) as assistant:
        for number in tqdm(range(1, args.batches + 1), desc="growth", leave=False):
            first = 4 * number % max(len(asked) - 4, 1)
            assistant.generate(**padded(asked[first : first + 4]), **settings, learn=False)
            if number * 10 % args.batches < 10:
                gc.collect()
                sizes = {storage.data_ptr(): storage.nbytes() for storage in storages(gc.get_objects())}
                found.append({"batches": number, "tensors": sum(sizes.values()),
                              "process": psutil.Process().memory_info().rss})  # fmt: skip
                print(f"after {number} batches: {found[-1]}", flush=True)
    return found


# --- a model of an accelerator --------------------------------------------------------------------------------------


def model(alpha: float, context: int) -> list[dict[str, Any]]:
    """Return the roofline model of an H100 for the best k and for k = 4."""

    def forward(part: tuple[float, int], rows: int, fed: int) -> float:
        weights, kept = part
        return max((2 * weights + rows * context * kept) / BANDWIDTH, 2 * weights * rows * fed / FLOPS)

    found = []
    for rows in (1, 2, 4, 8, 16, 32, 64):
        alone, drafted = forward(TARGET, rows, 1), forward(DRAFT, rows, 1)
        times = {
            k: alone * expected_block_efficiency(alpha, k) / (forward(TARGET, rows, k + 1) + k * drafted)
            for k in range(1, 17)
        }
        best = max(times, key=lambda k: times[k])
        found.append({"rows": rows, "k": best, "times_alone": times[best], "times_alone_at_4": times[4]})
    return found


def main() -> None:
    parser = make_parser(__doc__, "batches")
    parser.add_argument("--datasets", nargs="+", default=["gsm8k", "finance_alpaca"], choices=list(TEMPLATES))
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--learn", type=int, default=480, help="requests that the draft has learned from before")
    parser.add_argument("--k", type=int, default=K)
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--context", type=int, default=1024, help="tokens of a row, in the model of an H100")
    parser.add_argument("--parts", nargs="+", default=["speed", "memory", "growth"])
    parser.add_argument("--batches", type=int, default=500, help="of `growth`")
    args = parser.parse_args()
    pair, started, report = load_pair(), time.time(), dict[str, Any]()
    for name in args.datasets:
        draft, total = pair.draft, args.learn + args.requests
        if args.learn:
            traces = recorded(name, args.seed, total, Path(args.traces), tuple(pair))[: args.learn]
            draft = simulated(draft, traces, OnlineConfig(seed=args.seed), bar=f"the draft learns {name}").draft
        asked = prompts(name, pair.tokenizer, total, args.seed)[args.learn :]
        print(f"\n{name}", flush=True)
        found = report[name] = dict[str, Any]()
        if "memory" in args.parts:
            found["memory"] = [held(pair, draft, asked, size, args) for size in args.sizes if size > 1]
        if "growth" in args.parts:
            found["growth"] = growth(pair, draft, asked, args)
        if "speed" in args.parts:
            rows = [served(pair, draft, asked, size, args) for size in args.sizes]
            found |= {"measured": rows, "model": model(rows[-1]["alpha"], args.context)}
        write_report(args.name, report, seed=args.seed, requests=args.requests, **run_facts(started))
    if "speed" not in args.parts:
        return
    with drawing(args.name, 1, len(report), figsize=(5 * len(report), 4)) as (_, axes):
        for axis, (name, part) in zip(axes[0], report.items(), strict=True):
            for way in WAYS[1:]:
                points = [(row["rows"], row["times_alone"][way][0]) for row in part["measured"]]
                axis.plot(*zip(*points, strict=True), marker="o", label=way)
            points = [(row["rows"], row["times_alone"]) for row in part["model"]]
            axis.plot(*zip(*points, strict=True), color="0.5", linestyle="--", label="model of an H100, 8B and 0.6B")
            axis.axhline(1, color="0.5", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set(title=name, xlabel="rows", ylabel="times batches of the target alone")
            axis.legend(fontsize=8)
            axis.grid(alpha=0.3)


if __name__ == "__main__":
    main()
