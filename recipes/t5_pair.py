"""
An encoder-decoder pair of the T5 architecture, trained here from scratch, then its draft distilled offline and online:
acceptance before and after.

    OSD_HF_DATA=... python recipes/t5_pair.py                          # trains the pair first, unless it is there
    OSD_HF_DATA=... python recipes/t5_pair.py --stage offline online   # parts; what they need is made, no report
    OSD_HF_DATA=... python recipes/t5_pair.py --pair runs/t5_smoke --max-steps 10 --requests 16 --held-out 8 \\
        --epochs 1 --live 4 --max-new-tokens 16 --name t5_smoke        # smoke

train    target (5M parameters) and draft (1M) on dialogsum (300 summaries) and spider (6,280 queries), begun with
         the embeddings of the lab pair; saved in --pair
record   the target's greedy answers to the other rows, the requests, none of which was trained on; what they are worth
offline  `distill` from the recorded rows and from the target itself; held-out alpha before and after
online   one pass of the online learner, by replay; alpha over the last fifth and on the held-out requests
live     the first requests through `OnlineAssistant`: tokens and counts beside the target alone and the simulation

Small models and little text: spider's databases are known from training, and most requests ask in other words for a
query that was trained on; summaries have the form of summaries and hardly more. The pair is there to show acceptance
on an encoder-decoder; the paper's experiments run on it too (`spider.py --arch t5 --target runs/t5_pair/target ...`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    K,
    data_folder,
    drawing,
    equal_counts,
    gain,
    kept,
    last_share,
    make_parser,
    served_live,
    simulated,
    write_report,
)
from common import rows as rows_of
from tokenizers.processors import TemplateProcessing
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    get_cosine_schedule_with_warmup,
    set_seed,
)

from osd_hf import AcceptanceStats, CorrectionStore, DistillConfig, OnlineConfig, Trace, distill, replay
from osd_hf.decoding.hook import record_traces
from osd_hf.evaluation.display import rolling_alpha, rolling_window
from osd_hf.replay import replay_each

STAGES = ("train", "record", "offline", "online", "live")
PROMPTS = {"dialogsum": "summarize: {document}", "spider": "SQL: db: {db_id}\n{question}"}
ANSWERS = {"dialogsum": "summary", "spider": "query"}
TRAINED = {"dialogsum": 300, "spider": 6280}  # rows of which the pair is made; the others are requests
HELD_OUT = {"dialogsum": 40, "spider": 120}
MAX_PROMPT_TOKENS, MAX_ANSWER_TOKENS = 256, 96
SIZES = {
    "target": {"d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 512, "num_layers": 3, "num_decoder_layers": 3},
    "draft": {"d_model": 128, "d_kv": 32, "num_heads": 4, "d_ff": 256, "num_layers": 2, "num_decoder_layers": 1},
}
RATE = 7e-4
BATCH_TOKENS = 1024  # padded, of source and answer together
Row = tuple[list[int], list[int]]


# --- the pair -------------------------------------------------------------------------------------------------------


def make_tokenizer() -> Any:
    """The lab pair's, made to end each text with EOS, as T5's do, and without a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(data_folder() / "lab/target")
    tokenizer.chat_template = None
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    return tokenizer


def read(name: str, tokenizer: Any) -> list[Row]:
    """Token ids of a data set's prompts and answers, in an order that never changes, as it parts the two uses."""
    rows = rows_of(name)
    random.Random(0).shuffle(rows)
    sides = (
        ([PROMPTS[name].format(**row) for row in rows], MAX_PROMPT_TOKENS),
        ([row[ANSWERS[name]] for row in rows], MAX_ANSWER_TOKENS),
    )
    ids = [tokenizer(texts, truncation=True, max_length=limit)["input_ids"] for texts, limit in sides]
    return list(zip(*ids, strict=True))


def batched(rows: list[Row], rng: random.Random) -> list[list[Row]]:
    """Batches of rows of about one length, in a random order."""
    rows = sorted(rng.sample(rows, len(rows)), key=lambda row: (len(row[0]) // 8, len(row[1])))
    batches: list[list[Row]] = [[]]
    for row in rows:
        wider = [*batches[-1], row]
        if len(wider) * (max(len(r[0]) for r in wider) + max(len(r[1]) for r in wider)) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(row)
    rng.shuffle(batches)
    return batches


def padded(rows: list[Row]) -> dict[str, torch.Tensor]:
    def pad(side: int, value: int) -> torch.Tensor:
        parts = [torch.tensor(row[side]) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)

    ids = pad(0, 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": pad(1, -100)}


def train(kind: str, rows: list[Row], tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Train one of the pair and save it."""
    set_seed(args.seed)
    config = T5Config(
        vocab_size=len(tokenizer), dropout_rate=0.0, feed_forward_proj="relu", tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id, **SIZES[kind],
    )  # fmt: skip
    model, rng, epochs = T5ForConditionalGeneration(config), random.Random(args.seed), args.train_epochs[kind]
    batches = [batch for _ in range(int(np.ceil(epochs))) for batch in batched(rows, rng)]
    batches = batches[: min(round(len(batches) * epochs / np.ceil(epochs)), args.max_steps or len(batches))]
    # Begun with the embeddings of the lab's model of the same width and tokenizer, at the size that T5's begin with.
    with torch.no_grad():
        known = AutoModelForCausalLM.from_pretrained(data_folder() / "lab" / kind).get_input_embeddings().weight
        model.shared.weight.copy_(known / known.std())
    # T5's embeddings begin 16 times as large as other matrices, so that steps of one size would hardly move them.
    shared = model.shared.weight
    groups = [{"params": [p for p in model.parameters() if p is not shared]}, {"params": [shared], "lr": 10 * RATE}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.0, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, max(len(batches) // 20, 1), len(batches))
    began, began_cpu, losses = time.perf_counter(), time.process_time(), []
    for batch in (bar := tqdm(batches, desc=f"train {kind}")):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**padded(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        bar.set_postfix(loss=f"{np.mean(losses[-50:]):.3f}", refresh=False)
    for saved in (model, tokenizer):
        saved.save_pretrained(args.pair / kind)
    found = {
        "parameters": model.num_parameters(), "epochs": epochs, "steps": len(batches), "learning_rate": RATE,
        "seed": args.seed, "threads": torch.get_num_threads(),
        "minutes": (time.perf_counter() - began) / 60, "cpu_minutes": (time.process_time() - began_cpu) / 60,
        "loss": float(np.mean(losses[-50:])), **SIZES[kind],
    }  # fmt: skip
    print(f"{kind}: {found}", flush=True)
    return found


class Lab:
    """The pair, the requests of each data set that are learned from, those held out, and what was found so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.made = args, {}
        for kind in SIZES:
            made = args.pair / f"{kind}.json"  # written last: without it the model is not whole
            if not made.exists():
                tokenizer = make_tokenizer()
                rows = [row for name in PROMPTS for row in read(name, tokenizer)[: TRAINED[name]]]
                made.write_text(json.dumps(train(kind, rows, tokenizer, args), indent=1) + "\n")
            self.made[kind] = json.loads(made.read_text())
        self.target, self.draft = (
            T5ForConditionalGeneration.from_pretrained(args.pair / kind, dtype=torch.float32).eval()
            for kind in ("target", "draft")
        )
        self.tokenizer = AutoTokenizer.from_pretrained(args.pair / "target")
        self.rows = {name: read(name, self.tokenizer) for name in args.datasets}

    def split(self, name: str) -> tuple[list[Row], list[Row]]:
        requests, held_out = self.rows[name][TRAINED[name] :], self.args.held_out or HELD_OUT[name]
        return requests[:-held_out][: self.args.requests], requests[-held_out:]

    def traces(self, name: str) -> tuple[list[Trace], list[Trace]]:
        """The target's answers to both, recorded once."""
        learned, held_out = self.split(name)
        requests, args = [row[0] for row in (*learned, *held_out)], self.args
        store = CorrectionStore(path := args.pair / f"traces/{self.label(name)}")
        # By length, as each batch is padded to its longest prompt.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i]))
        if len(store) == 0:
            asked = [requests[i] for i in order]
            answers = record_traces(self.target, asked, max_new_tokens=args.max_new_tokens, domain=name)
            # All or nothing: a killed recording leaves no part of a data set.
            for trace in list(tqdm(answers, total=len(asked), desc=f"record {name}")):
                store.append(trace)
            store.close()
        found = list(CorrectionStore(path))  # in the order of their creation
        traces = [found[i] for i in np.argsort(order)]
        return traces[: len(learned)], traces[len(learned) :]

    def label(self, name: str) -> str:
        return f"{name}-{'-'.join(str(len(part)) for part in self.split(name))}-{self.args.max_new_tokens}"

    def kept(self, name: str, what: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return kept(self.args.pair / f"found/{self.label(name)}-seed{self.args.seed}-{what}.json", find)


# --- stages ---------------------------------------------------------------------------------------------------------


def gold(lab: Lab, name: str) -> dict[str, Any]:
    """Nats per token of each model on answers that it was not trained on."""
    rows = sorted((row for part in lab.split(name) for row in part), key=lambda row: len(row[0]))
    found = {}
    for kind, model in (("target", lab.target), ("draft", lab.draft)):
        total, count = 0.0, 0
        for first in range(0, len(rows), 16):
            batch = padded(rows[first : first + 16])
            with torch.no_grad():
                tokens = int((batch["labels"] >= 0).sum())
                total, count = total + float(model(**batch).loss) * tokens, count + tokens
        found[kind] = round(total / count, 3)
    print(f"{name:10s} nats per token of the true answers: {found}", flush=True)
    return found


def answers(lab: Lab, name: str) -> dict[str, Any]:
    """What the target's answers are worth beside the data set's."""
    rows = [row for part in lab.split(name) for row in part]
    traces = [trace for part in lab.traces(name) for trace in part]
    known = {tuple(answer) for _, answer in lab.rows[name][: TRAINED[name]]}
    answered = lab.tokenizer.batch_decode([t.completion_ids for t in traces], skip_special_tokens=True)
    wanted = lab.tokenizer.batch_decode([answer for _, answer in rows], skip_special_tokens=True)
    words = [(a.lower().split(), b.lower().split()) for a, b in zip(answered, wanted, strict=True)]
    exact = np.array([ours == theirs for ours, theirs in words])
    new = np.array([tuple(answer) not in known for _, answer in rows])
    overlaps = [(sum((Counter(a) & Counter(b)).values()), len(a) + len(b)) for a, b in words]
    found = {
        "requests": len(rows), "tokens_per_answer": float(np.mean([len(t) for t in traces])),
        "ended": float(np.mean([int(t.completion_ids[-1]) == lab.tokenizer.eos_token_id for t in traces])),
        "unigram_f1": float(np.mean([2 * shared / max(both, 1) for shared, both in overlaps])),
        "exact": float(exact.mean()), "requests_with_a_new_answer": int(new.sum()),
        "exact_of_new_answers": float(exact[new].mean()) if new.any() else None,
        "different_answers": len(set(answered)),
    }  # fmt: skip
    print(f"{name:10s} answers: {found}; such as {answered[:3]}", flush=True)
    return found


def compared(before: AcceptanceStats, after: AcceptanceStats) -> dict[str, Any]:
    return {
        "requests": before.num_requests, "static": before.alpha, "static_interval": list(before.alpha_interval),
        "alpha": after.alpha, "interval": list(after.alpha_interval), **gain(before, after),
    }  # fmt: skip


def offline_runs(lab: Lab, name: str) -> list[dict[str, Any]]:
    """Held-out alpha after `distill` from recorded rows, and from prompts with the target at hand."""
    runs = [("recorded", epochs, rate) for epochs in lab.args.epochs for rate in lab.args.rates]
    runs.append(("target", lab.args.epochs[0], lab.args.rates[0]))
    return [lab.kept(name, "offline-{}-{:g}-{:g}".format(*run), partial(offline, lab, name, *run)) for run in runs]


def offline(lab: Lab, name: str, source: str, epochs: float, rate: float) -> dict[str, Any]:
    (learned, held_out), args = lab.traces(name), lab.args
    config = DistillConfig(
        output_dir=str(args.pair / "distilled"), learning_rate=rate, lr_scheduler_type="cosine", warmup_steps=0.03,
        num_train_epochs=epochs, per_device_train_batch_size=8, temperature=0.0, seed=args.seed,
        max_new_tokens=args.max_new_tokens, num_assistant_tokens=K, save_strategy="no", report_to="none",
        logging_steps=50,
    )  # fmt: skip
    pair: dict[str, Any] = {"target": None, "draft": lab.draft, "tokenizer": lab.tokenizer, "dataset": learned}
    if source == "target":
        pair |= {"target": lab.target, "dataset": [{"prompt": trace.prompt_ids.tolist()} for trace in learned]}
    began = time.perf_counter()
    result = distill(config=config, **pair)
    seconds = time.perf_counter() - began
    found = {
        "source": source, "epochs": epochs, "learning_rate": rate, "steps": result.state.global_step,
        "seconds": seconds, **compared(replay(lab.draft, held_out, K), replay(result.draft, held_out, K)),
    }  # fmt: skip
    show(f"{name:10s} offline, {source}, {epochs:g} epochs at {rate:g}, held out", found)
    return found


def online(lab: Lab, name: str) -> dict[str, Any]:
    """One pass over the requests: alpha over the last fifth, and of what was learned on those held out."""
    learned, held_out = lab.traces(name)
    static, began = replay_each(lab.draft, learned, K), time.perf_counter()
    report = simulated(lab.draft, learned, OnlineConfig(seed=lab.args.seed), bar=f"online {name}")
    found = {
        "steps": sum(u.steps for u in report.updates), "seconds": time.perf_counter() - began,
        "last_fifth": compared(last_share(static), last_share(report.stats)),
        "held_out": compared(replay(lab.draft, held_out, K), replay(report.draft, held_out, K)),
        "rolling": {
            label: [round(float(a), 4) for a in rolling_alpha(stats, rolling_window(len(learned)))]
            for label, stats in (("learning", report.stats), ("static", static))
        },
    }  # fmt: skip
    show(f"{name:10s} online, last fifth", found["last_fifth"])
    show(f"{name:10s} online, held out", found["held_out"])
    return found


def live(lab: Lab, name: str) -> dict[str, Any]:
    """Serve the first requests with the target; its tokens alone, and the counts of both simulations, beside it."""
    recorded, config = lab.traces(name)[0][: lab.args.live], OnlineConfig(num_assistant_tokens=K, seed=lab.args.seed)
    pair, asked = (lab.target, lab.draft, lab.tokenizer), [trace.prompt_ids for trace in recorded]
    identical, counts, captured = served_live(pair, asked, config, lab.args.max_new_tokens, bar=f"live {name}")
    found = {"requests": len(recorded), "token_identical": identical}
    for label, traces in (("captured", captured), ("recorded", recorded)):
        stats = simulated(lab.draft, traces, config, bar=f"online {name}").stats
        found[f"equal_counts_by_replay_of_{label}"] = equal_counts(counts, stats)
    print(f"{name:10s} live: {found}", flush=True)
    return found


def show(label: str, run: dict[str, Any]) -> None:
    (low, high), (gain_low, gain_high) = run["interval"], run["gain_interval"]
    print(
        f"{label}: alpha {run['static']:.3f} to {run['alpha']:.3f} [{low:.3f}, {high:.3f}], gain {run['gain']:+.3f} "
        f"[{gain_low:+.3f}, {gain_high:+.3f}]",
        flush=True,
    )


def plot(name: str, online: dict[str, Any], offline: dict[str, Any]) -> None:
    """Rolling alpha over the requests of each data set; what offline distillation reaches, as a line."""
    with drawing(name, 1, len(online), figsize=(5 * len(online), 4)) as (_, panels):
        for axis, (dataset, run) in zip(panels[0], online.items(), strict=True):
            for (label, alpha), style in zip(run["rolling"].items(), ("-", "--"), strict=True):
                axis.plot(range(1, len(alpha) + 1), alpha, style, label=label)
            best = max(offline.get(dataset, []), key=lambda run: run["alpha"], default=None)
            if best is not None:
                note = f"offline, {best['epochs']:g} epochs, held out"
                axis.axhline(best["alpha"], color="0.5", linestyle=":", label=note)
            window = rolling_window(len(run["rolling"]["static"]))
            axis.set(xlabel="request", ylabel=f"alpha, last {window} requests", title=dataset, ylim=(0, 1))
            axis.legend(fontsize=8, loc="lower right")
            axis.grid(alpha=0.3)


def main() -> None:
    parser = make_parser(__doc__, "t5_pair", traces=False)
    parser.add_argument("--stage", nargs="+", choices=STAGES, help="all by default")
    parser.add_argument("--datasets", nargs="+", choices=tuple(PROMPTS), default=list(PROMPTS))
    parser.add_argument("--pair", type=Path, default=Path("runs/t5_pair"), help="folder of the pair, used if there")
    parser.add_argument("--target-epochs", type=float, default=6.0)
    parser.add_argument("--draft-epochs", type=float, default=0.5, help="few, as a draft that is to learn starts weak")
    parser.add_argument("--max-steps", type=int, help="of the training of each model at most")
    parser.add_argument("--requests", type=int, help="of a data set to learn from at most; all by default")
    parser.add_argument("--held-out", type=int, help="requests of a data set; 40 and 120 by default")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--epochs", type=float, nargs="+", default=[2.0, 10.0], help="offline")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3], help="offline learning rates")
    parser.add_argument("--live", type=int, default=50, help="requests of a data set that are served live")
    args = parser.parse_args()
    args.train_epochs = {"target": args.target_epochs, "draft": args.draft_epochs}
    lab = Lab(args)
    finders = {"train": gold, "record": answers, "online": online, "live": live}
    found: dict[str, Any] = {"offline": {}}
    for stage in [stage for stage in STAGES if not args.stage or stage in args.stage]:
        if stage == "offline":
            found[stage] = {name: offline_runs(lab, name) for name in args.datasets}
            continue
        what = f"live-{args.live}" if stage == "live" else stage
        found[stage] = {name: lab.kept(name, what, partial(finders[stage], lab, name)) for name in args.datasets}
    if args.stage:
        return  # the report is of all of them
    settings = {key: getattr(args, key) for key in ("requests", "held_out", "max_new_tokens", "epochs", "rates")}
    settings |= {"num_assistant_tokens": K, "online": OnlineConfig(seed=args.seed).to_dict()}
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    facts = {"seed": args.seed, "mixed_precision": mixed, "threads": torch.get_num_threads()}
    plot(args.name, found["online"], found["offline"])
    for run in found["online"].values():
        del run["rolling"]  # drawn
    write_report(args.name, {"pair": lab.made, "settings": settings, **found}, **facts)


if __name__ == "__main__":
    main()
