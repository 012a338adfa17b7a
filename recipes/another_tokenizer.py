"""
A draft with a tokenizer of its own: what it learns beside the lab draft of the same size, which has the target's.

    OSD_HF_DATA=... python recipes/another_tokenizer.py --part draft     # its tokenizer, and the draft on plain text
    OSD_HF_DATA=... python recipes/another_tokenizer.py --part learn     # both drafts learn from 600 requests
    OSD_HF_DATA=... python recipes/another_tokenizer.py --part live      # the next 120 requests, served
    OSD_HF_DATA=... python recipes/another_tokenizer.py --datasets gsm8k --requests 8 --live 2 --steps 2      # smoke

Each part goes on where it was when it is called again, and stops after `--seconds`; without `--part` all are done. The
draft has the lab draft's layers, and as embeddings those of the same bytes, or the mean of those that make up a token;
it then reads what the lab draft was trained on (alpaca, and 5% of the others) in its own tokens. Learning is simulated
on recorded answers; what is reported is served live, by the drafts as they were and as they are, k = 5, greedy, and
compared with the target's own answers.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    MAX_NEW_TOKENS,
    TEMPLATES,
    K,
    greedy,
    kept,
    kept_stats,
    load_pair,
    make_parser,
    pooled,
    recorded,
    requests_stats,
    rows,
    run_facts,
    write_report,
)
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from osd_hf import OnlineAssistant, OnlineConfig, Trace, Translation, simulate
from osd_hf.errors import DataError
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.learner import Learner

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
ANSWERS = {"gsm8k": "answer", "spider": "query", "code_search_net_python": "func_code_string",
           "finance_alpaca": "output", "alpaca": "output"}  # fmt: skip
SHARE = 0.05  # of what is no alpaca
BLOCK = 256  # tokens of a row of plain text


# --- the draft ------------------------------------------------------------------------------------------------------


def chats(share: float) -> Iterator[str]:
    """The rows that the lab drafts were trained on, as chats."""
    for name, answer in ANSWERS.items():
        known = rows(name)
        chosen = known if name == "alpaca" else random.Random(0).sample(known, max(round(share * len(known)), 4))
        for row in chosen:
            question = row["instruction"] if name == "alpaca" else TEMPLATES[name].format(**row)
            yield f"<s><|user|>{question}<|assistant|>{row[answer]}</s>"


def own_tokenizer(size: int) -> Any:
    """A BPE of bytes with other words than the lab's, whose digits are each a word."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(chats(1.0), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def begun(tokenizer: Any, pair: Any) -> Any:
    """The lab draft with embeddings of these tokens."""
    lab, config = pair.draft, type(pair.draft.config).from_dict(pair.draft.config.to_dict())
    config.vocab_size = len(tokenizer)
    draft = AutoModelForCausalLM.from_config(config).eval()
    draft.generation_config = lab.generation_config
    weights = {name: weight for name, weight in lab.state_dict().items() if "embed" not in name and "head" not in name}
    draft.load_state_dict(weights, strict=False)
    to_lab = Translation(tokenizer, pair.tokenizer, len(tokenizer), lab.config.vocab_size)
    theirs, ours = lab.get_input_embeddings().weight, draft.get_input_embeddings().weight
    with torch.no_grad():
        for token in range(len(tokenizer)):
            reading = to_lab.read([token])
            if reading is not None and reading.ids:
                ours[token] = theirs[reading.ids].mean(0)
    return draft


def taught(folder: Path, args: Any) -> None:
    """Make the draft, or go on with it, on plain text, until it has had its steps."""
    state = folder / "training.pt"
    if not folder.exists():
        tokenizer, pair = own_tokenizer(args.vocab_size), load_pair()
        begun(tokenizer, pair).save_pretrained(folder)
        tokenizer.chat_template = pair.tokenizer.chat_template
        tokenizer.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    draft = AutoModelForCausalLM.from_pretrained(folder)
    optimizer, done = torch.optim.AdamW(draft.parameters(), lr=args.rate, weight_decay=0.0), 0
    if state.exists():
        saved = torch.load(state)
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    texts = list(chats(SHARE))
    random.Random(1).shuffle(texts)
    ids = [i for encoded in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in encoded]
    blocks = torch.tensor(ids[: len(ids) // BLOCK * BLOCK]).view(-1, BLOCK)
    draft.train()
    loss = torch.zeros(())
    while done < args.steps and time.time() < args.until:
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, (done + 1) / 50) * max(1 - done / args.steps, 0.02)
        drawn = torch.randint(len(blocks), (8,), generator=torch.Generator().manual_seed(done))
        loss = draft(input_ids=blocks[drawn], labels=blocks[drawn]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
    print(f"{done} of {args.steps} steps on {blocks.numel()} tokens, loss {float(loss.detach()):.3f}")
    draft.eval().save_pretrained(folder)
    torch.save({"optimizer": optimizer.state_dict(), "done": done}, state)


# --- learning, and serving ------------------------------------------------------------------------------------------


def drafts_of(folder: Path) -> dict[str, Any]:
    """The lab draft, and the one with a tokenizer of its own: the pair of each, and the translation."""
    lab, own = load_pair(), AutoModelForCausalLM.from_pretrained(folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    config = own.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = K, "constant"
    config.assistant_confidence_threshold = 0.0
    translation = Translation(lab.tokenizer, theirs, lab.target.config.vocab_size, own.config.vocab_size)
    return {"lab": (lab.draft, None, None), "own": (own.eval(), theirs, translation)}


def learned(
    name: str, which: str, draft: Any, translation: Any, args: Any, *, peft_config: Any = None, **changes: Any
) -> None:
    """Let a draft learn from the first requests, as far as there is time; of an adapter, that alone is saved."""
    place, folder = args.folder / f"{name}-{which}.pickle", args.folder / f"{name}-{which}"
    if folder.exists():
        return
    traces = recorded(name, args.seed, args.requests + args.live, args.traces)[: args.requests]
    changes |= {} if args.steps_per_update is None else {"steps_per_update": args.steps_per_update}
    config = OnlineConfig(num_assistant_tokens=K, update_strategy="interval", **changes)
    is_apart = peft_config is not None
    drafts = DomainDrafts(draft, config, per_domain=is_apart, peft_config=peft_config, translation=translation)
    learner, counts = Learner(drafts, drafts.config, timer=time.process_time), list[list[float]]()
    if place.exists():
        state, counts = pickle.loads(place.read_bytes())  # of an earlier part of this run
        learner.load_state_dict(state)
    while len(counts) < len(traces) and time.time() < args.until:
        part = traces[len(counts) : len(counts) + config.update_interval]
        counts += requests_stats(simulate(draft, part, learner=learner))
    place.write_bytes(pickle.dumps((learner.state_dict(), counts)))
    print(f"{name}, {which}: {len(counts)} of {len(traces)}, alpha {pooled(kept_stats(counts[-120:])):.3f}")
    if len(counts) == len(traces):
        if is_apart:
            drafts.adapter(name).save_pretrained(folder, save_embedding_layers=False)
        else:
            drafts.model(None).save_pretrained(folder)
        (args.folder / f"{name}-{which}.json").write_text(json.dumps(counts))


def served(name: str, draft: Any, own: Any, pair: Any, args: Any) -> dict[str, Any]:
    """The requests after those that were learned from, by one draft, beside the target alone."""
    traces = recorded(name, args.seed, args.requests + args.live, args.traces)[args.requests :]
    config, identical = OnlineConfig(num_assistant_tokens=K, update_strategy="manual"), 0
    with OnlineAssistant(pair.target, draft, pair.tokenizer, config, assistant_tokenizer=own) as assistant:
        for trace in traces:
            ids, settings = greedy(trace.prompt_ids, args.max_new_tokens)
            alone = pair.target.generate(ids, **settings)
            identical += int(torch.equal(alone, assistant.generate(ids, learn=False, **settings)))
        stats = assistant.stats
    return {
        "requests": len(traces), "identical": identical, "alpha": stats.alpha, "interval": list(stats.alpha_interval),
        "tokens_per_forward": stats.block_efficiency, "examined": stats.examined,
    }  # fmt: skip


def live(name: str, which: str, draft: Any, own: Any, args: Any) -> dict[str, Any]:
    """A draft as it was and as it is after learning, live."""
    found, pair = dict[str, Any](), load_pair()
    for side in ("before", "after"):
        path = args.folder / f"{name}-{which}-{side}.json"
        if not path.exists() and time.time() > args.until:
            break
        if side == "after":
            if not (args.folder / f"{name}-{which}").exists():
                break
            draft = AutoModelForCausalLM.from_pretrained(args.folder / f"{name}-{which}")
        found[side] = kept(path, lambda model=draft: served(name, model, own, pair, args))
        print(f"{name}, {which}, {side}: {found[side]}")
    return found


def positions(made: Translation, traces: list[Trace]) -> Iterator[Any]:
    """Where the draft's tokens have rows of the target, by request."""
    for trace in traces:
        with contextlib.suppress(DataError):
            yield made(trace).has_row


def main() -> None:
    parser = make_parser(__doc__, "another_tokenizer")
    parser.add_argument("--part", choices=["draft", "learn", "live"], help="all by default")
    parser.add_argument("--folder", type=Path, default=Path("runs/another_tokenizer"))
    parser.add_argument("--datasets", nargs="+", default=["finance_alpaca", "gsm8k", "spider"])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--live", type=int, default=120)
    parser.add_argument("--vocab-size", type=int, default=3072)
    parser.add_argument("--steps", type=int, default=700, help="of training on plain text")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--steps-per-update", type=int, help="as configured by default")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which a part stops")
    args = parser.parse_args()
    started = time.time()
    args.until = started + args.seconds
    if args.part in (None, "draft"):
        taught(args.folder / "draft", args)
    report: dict[str, Any] = {"requests": args.requests, "vocab_size": args.vocab_size}
    if args.part != "draft":
        for name in args.datasets:
            for which, (draft, own, translation) in drafts_of(args.folder / "draft").items():
                if args.part in (None, "learn"):
                    learned(name, which, draft, translation, args)
                if args.part in (None, "live"):
                    report.setdefault(name, {})[which] = live(name, which, draft, own, args)
    for name in args.datasets:
        sides = [report.get(name, {}).get(which, {}) for which in ("lab", "own")]
        if all("after" in side for side in sides):
            made = drafts_of(args.folder / "draft")["own"][2]
            traces = recorded(name, args.seed, args.requests + args.live, args.traces)[:100]
            found = [*positions(made, traces)]
            report[name]["share_of_positions_with_rows"] = float(np.concatenate(found).mean()) if found else None
            lab, own = (side["after"]["alpha"] - side["before"]["alpha"] for side in sides)
            report[name]["share_of_gain"] = own / lab if lab else None
            print(f"{name}: gain {lab:.3f} with the target's tokenizer, {own:.3f} with its own")
    write_report(args.name, report, seed=args.seed, **run_facts(started))


if __name__ == "__main__":
    main()
