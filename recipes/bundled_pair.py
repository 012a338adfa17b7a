"""Make the bundled pair: tokenizer, target, draft, and the scores in its README.

    python recipes/bundled_pair.py                      # everything, in two hours on two cores
    python recipes/bundled_pair.py --stage draft        # one stage: prompts, tokenizer, target, grow, ...
    python recipes/bundled_pair.py --stage grow --minutes 30    # deepens the target, or continues its training
    python recipes/bundled_pair.py --max-steps 2 --out /some/folder   # a smoke run

All text comes from `recipes/bundled_prompts`. The target is trained with Muon (matrices) and AdamW (the rest), mostly
on the answers: first with half of its layers, then with all of them; new layers start as identity. `prune` removes
them if the target answers equally well without them. The draft sees small talk and some prompts of the domains, and
its training ends early.
"""

import argparse
import copy
import functools
import itertools
import json
import math
import platform
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import transformers
from bundled_prompts import DOMAINS, check_answer, first_examples, shipped_lines, stream_examples
from bundled_prompts.small_talk import make as small_talk
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SEED = 0
STAGES = ("prompts", "tokenizer", "target", "grow", "prune", "draft", "score")
VOCAB_SIZE = 2048
SPECIALS = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FIGURES = ("<!-- figures: begin -->", "<!-- figures: end -->")
TARGET_STEPS = 4500
FIRST_LAYERS = 12
LAYERS = 24
DRAFT_STEPS = 180
DRAFT_SHARES = {"talk": 0.84, "sql": 0.035, "math": 0.055, "python": 0.04, "finance": 0.03}
# The harder sums get more of the tokens. Of what finance leaves:
TARGET_SHARES = {"sql": 0.23, "math": 0.51, "python": 0.26}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level BPE in which each digit is a token and a space before a digit belongs to the previous word."""
    texts = [
        text
        for domain in DOMAINS
        for e in first_examples(domain, 5000, seed=SEED, split="train")
        for text in (e.prompt, e.answer)
    ]
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r"\d| ?[A-Za-z]+(?: (?=\d))?| ?[^\sA-Za-z\d]+(?: (?=\d))?|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=SPECIALS[3:],
        model_max_length=512,
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(
    tokenizer: PreTrainedTokenizerFast, layers: int, width: int = 128, inner: int = 344
) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def deepen(model: LlamaForCausalLM, layers: int) -> None:
    """Insert copies of blocks with zero output projections, in place, so that the outputs stay equal (LLaMA Pro, arXiv
    2401.02415)."""
    places, blocks = new_places(model.config.num_hidden_layers, layers), list(model.model.layers)
    for place in places:
        block = copy.deepcopy(blocks[place - 1])
        torch.nn.init.zeros_(block.self_attn.o_proj.weight)
        torch.nn.init.zeros_(block.mlp.down_proj.weight)
        blocks.insert(place, block)
    use_blocks(model, blocks)


def use_blocks(model: LlamaForCausalLM, blocks: list[Any]) -> None:
    """Replace the blocks of the model."""
    for place, block in enumerate(blocks):
        block.self_attn.layer_idx = place
    model.model.layers = torch.nn.ModuleList(blocks)
    model.config.num_hidden_layers = len(blocks)


def new_places(before: int, layers: int) -> list[int]:
    """Return the positions of new blocks in a model that grows from `before` to `layers` blocks."""
    added = layers - before
    copied = [(i + 1) * added // before - i * added // before for i in range(before)]
    return [i + sum(copied[:i]) + 1 + j for i in range(before) for j in range(copied[i])]


def batches(
    tokenizer, shares: dict[str, float], batch_tokens: int, prompt_weight: float, seed: int
) -> Iterator[tuple]:
    """Yield (ids, weight of each target token) in batches of similar length, padded on the right with weight 0."""
    rng = random.Random(seed)
    streams: dict = {domain: stream_examples(domain, seed=1000 + seed, split="train") for domain in DOMAINS}
    streams["talk"] = (small_talk(rng) for _ in itertools.count())
    while True:
        drawn = [next(streams[d]) for d in rng.choices(list(shares), list(shares.values()), k=1024)]
        prompts = tokenizer([f"<s><|user|>{e.prompt}<|assistant|>" for e in drawn], add_special_tokens=False)[
            "input_ids"
        ]
        answers = tokenizer([f"{e.answer}</s>" for e in drawn], add_special_tokens=False)["input_ids"]
        rows = sorted(zip(prompts, answers, strict=True), key=lambda row: len(row[0]) + len(row[1]))
        groups: list[list] = [[]]
        for row in rows:
            if groups[-1] and (len(groups[-1]) + 1) * (len(row[0]) + len(row[1])) > batch_tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            longest = max(len(p) + len(a) for p, a in group)
            ids = torch.full((len(group), longest), tokenizer.pad_token_id)
            weight = torch.zeros(len(group), longest)
            for i, (p, a) in enumerate(group):
                ids[i, : len(p) + len(a)] = torch.tensor(p + a)
                weight[i, 1 : len(p)] = prompt_weight
                weight[i, len(p) : len(p) + len(a)] = 1.0
            yield ids, weight


class Muon(torch.optim.Optimizer):
    """Muon: momentum with orthogonalized updates (Newton-Schulz), computed for all matrices of one shape together."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for (rows, columns), params in shapes.items():
                for p in params:
                    state = self.state[p]
                    buffer = state.setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                x = torch.stack([p.grad.lerp(self.state[p]["momentum"], group["momentum"]) for p in params])
                x = x.mT if rows > columns else x
                x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
                for _ in range(5):
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.mT if rows > columns else x
                for p, update in zip(params, x, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * 0.2 * max(rows, columns) ** 0.5)


def token_losses(model, ids: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of all tokens but the first, of shape (rows, tokens - 1)."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    flat = logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(flat, ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def hardest(model, stream, share: float = 1 / 3) -> Iterator[tuple]:
    """Yield the rows of each batch with the highest loss."""
    for ids, weight in stream:
        with torch.no_grad():
            losses = (token_losses(model, ids) * weight[:, 1:]).sum(1)
        kept = losses.topk(math.ceil(share * len(losses))).indices
        longest = int(weight[kept].count_nonzero(0).nonzero().max()) + 1
        yield ids[kept, :longest], weight[kept, :longest]


def train(
    model, stream, steps: int, learning_rate: float, minutes: float, name: str, save=None, falling: float = 0.4,
    new: Sequence[int] | None = None, max_steps: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train on `steps` batches; over the last share of them, `falling`, the rate falls to zero, sooner where `minutes`
    would be passed. Where blocks are `new`, all other weights learn at a quarter of the rate.

    In a process group the gradients are averaged: two processes of one thread each outrun one of two threads.
    """
    named, starts = list(model.named_parameters()), tuple(f"model.layers.{place}." for place in new or ())
    parameters = [p for _, p in named]
    rest = [p for n, p in named if p.ndim != 2 or "embed" in n]

    def groups(of_matrices: bool) -> list[dict[str, Any]]:
        chosen = [(n, p) for n, p in named if of_matrices == (p.ndim == 2 and "embed" not in n)]
        fast = [p for n, p in chosen if new is None or n.startswith(starts)]
        slow = [p for n, p in chosen if not (new is None or n.startswith(starts))]
        return [{"params": params, "scale": scale} for params, scale in ((fast, 1.0), (slow, 0.25)) if params]

    optimizers = [
        Muon(groups(True), learning_rate),
        torch.optim.AdamW(groups(False), learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    world = dist.get_world_size() if dist.is_initialized() else 1
    first = world == 1 or dist.get_rank() == 0
    model.train()
    start, seen, losses, shown, progress = time.monotonic(), 0, [], -1, 0.0
    bar = tqdm(total=steps, desc=name, mininterval=10, disable=not first)
    for step in range(steps):
        if progress >= 1 or step == max_steps:
            break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["scale"] * learning_rate * min(1.0, (step + 1) / 50, (1.02 - progress) / falling)
        ids, weight = next(stream)
        weight = weight[:, 1:]
        loss = (token_losses(model, ids) * weight).sum() / weight.sum()
        loss.backward()
        progress = max((step + 1) / steps, (time.monotonic() - start) / (60 * minutes))
        losses.append(loss.item())
        if world > 1:
            flat = torch.cat([*(p.grad.flatten() for p in parameters), torch.tensor([progress])])
            dist.all_reduce(flat)
            flat /= world
            progress = flat[-1].item()
            for p, grad in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
                p.grad.copy_(grad.view_as(p))
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen += ids.numel() * world
        bar.update()
        if first and int(progress * 20) > shown:
            shown = int(progress * 20)
            elapsed = time.monotonic() - start
            recent = sum(losses[-50:]) / len(losses[-50:])
            tqdm.write(
                f"{name} {progress:.0%} step {step} loss {recent:.4f} "
                f"{seen / 1e6:.2f}M tokens {seen / elapsed:.0f}/s {elapsed:.0f}s"
            )
            if save is not None:
                save()
    bar.close()
    model.eval()
    return {"steps": len(losses), "tokens": seen, "minutes": round((time.monotonic() - start) / 60, 1)}


def train_target(rank: int, folder: str, meeting: str, stage: str, options: argparse.Namespace) -> None:
    """Run one process of the target training. The first process saves checkpoints and the model."""
    torch.set_num_threads(1)
    world = options.processes
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(f"{folder}/target")
    if stage == "target":
        model, seed = make_model(tokenizer, FIRST_LAYERS), SEED + rank
        rate, falling, new = 0.004, 0.4, None
    else:
        model, rate, falling = load(f"{folder}/target"), 0.002, 0.8
        new = new_places(FIRST_LAYERS, LAYERS)
        if model.config.num_hidden_layers < LAYERS:
            deepen(model, LAYERS)
        seed = SEED + rank + 50 + recorded(folder).get("grow", {}).get("steps", 0)
    model.set_attn_implementation("eager")  # over short rows, training takes half the time of the fused one on CPUs
    shares = {domain: share * (1 - options.finance) for domain, share in TARGET_SHARES.items()}
    shares = {**shares, "finance": options.finance}
    if stage == "target":
        stream = batches(tokenizer, shares, 2000, 0.1, seed)
    else:
        stream = hardest(model, batches(tokenizer, shares, 4500, 0.0, seed))
    save = functools.partial(save_pair_member, model, tokenizer, f"{folder}/target") if rank == 0 else None
    done = train(model, stream, options.steps, rate, options.minutes, stage, save, falling, new, options.max_steps)
    if save is not None:
        save()
        record(folder, stage, {**done, "processes": world, "finance": options.finance})
    if world > 1:
        dist.destroy_process_group()


def prune(folder: str, n: int, lost: float = 0.02) -> None:
    """Remove the new blocks of the target unless a domain scores lower without them."""
    torch.set_num_threads(1)
    target, tokenizer = load(f"{folder}/target"), PreTrainedTokenizerFast.from_pretrained(f"{folder}/target")
    new, shallow, found = new_places(FIRST_LAYERS, LAYERS), copy.deepcopy(target), dict[str, list[float]]()
    use_blocks(shallow, [block for place, block in enumerate(shallow.model.layers) if place not in new])
    for domain in tqdm(DOMAINS, desc="prune"):
        examples = first_examples(domain, n, seed=SEED + 1)
        texts = [answers_of(model, tokenizer, [e.prompt for e in examples]) for model in (target, shallow)]
        found[domain] = [round(sum(map(check_answer, examples, these)) / n, 3) for these in texts]
    is_pruned = all(without >= with_new - lost for with_new, without in found.values())
    if is_pruned:  # with a tokenizer that has not padded anything
        unused = PreTrainedTokenizerFast.from_pretrained(f"{folder}/target")
        save_pair_member(shallow, unused, f"{folder}/target")
    record(folder, "prune", {"with_and_without": found, "n": n, "is_pruned": is_pruned})


def load(folder: str) -> LlamaForCausalLM:
    """Load a model of the pair in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train_draft(folder: str, steps: int, max_steps: int | None) -> None:
    """Train the draft on small talk and some prompts of the domains, and stop early."""
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(f"{folder}/target")
    model = make_model(tokenizer, layers=1)
    stream = batches(tokenizer, DRAFT_SHARES, 2000, 1.0, SEED + 100)
    done = train(model, stream, steps, 0.002, 10, "draft", max_steps=max_steps)
    save_pair_member(model, tokenizer, f"{folder}/draft")
    record(folder, "draft", done)


def save_pair_member(model, tokenizer, folder: str) -> None:
    """Write an ordinary model folder, in bfloat16, with generation settings and the tokenizer."""
    stored = LlamaForCausalLM(copy.deepcopy(model.config)).to(torch.bfloat16)
    stored.load_state_dict(model.state_dict())
    settings = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if folder.endswith("draft"):
        settings |= {
            "num_assistant_tokens": 5,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
    stored.generation_config = GenerationConfig(**settings)
    stored.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def record(folder: str, stage: str, entry: dict[str, Any]) -> None:
    """Add the result of a stage to `made.json`; after the score, update the tables of the README."""
    made, card = recorded(folder), Path(folder) / "README.md"
    if stage in ("target", "grow"):
        made.pop("prune", None)
    if stage == "target":
        made.pop("grow", None)
    if stage == "grow" and stage in made:
        entry |= {what: entry[what] + made[stage][what] for what in ("steps", "tokens", "minutes")}
    versions = {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)}
    made[stage] = {**entry, "seed": SEED, "versions": {"python": platform.python_version(), **versions}}
    (Path(folder) / "made.json").write_text(json.dumps(made, indent=2) + "\n")
    if card.exists() and stage == "score" and {"target", "draft"} <= made.keys():
        before, _, rest = card.read_text().partition(FIGURES[0])
        card.write_text(f"{before}{FIGURES[0]}\n{figures(made)}\n{FIGURES[1]}{rest.partition(FIGURES[1])[2]}")


def recorded(folder: str) -> dict[str, Any]:
    """Return the results of earlier stages."""
    path = Path(folder) / "made.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def figures(made: dict[str, Any]) -> str:
    """Return the tables of the README."""
    score, draft = made["score"], made["draft"]
    parts = [made[stage] for stage in ("target", "grow") if stage in made]
    steps, minutes = (" + ".join(f"{part[what]:,}" for part in parts) for what in ("steps", "minutes"))
    sizes, ms = score["parameters"], score["token_milliseconds"]
    lines = [
        "| | target | draft |",
        "|---|---|---|",
        f"| layers x width | {score['layers']['target']} x 128 | {score['layers']['draft']} x 128 |",
        f"| parameters | {sizes['target']:,} | {sizes['draft']:,} |",
        f"| trained on, tokens | {sum(part['tokens'] for part in parts):,} | {draft['tokens']:,} |",
        f"| steps | {steps} | {draft['steps']:,} |",
        f"| minutes of training | {minutes} | {draft['minutes']} |",
        f"| one token, one thread | {ms['target']} ms | {ms['draft']} ms (c = {ms['draft'] / ms['target']:.2f}) |",
        "",
        f"| domain | score on {score['n']} | 95% interval | alpha | alpha after ten passes |",
        "|---|---|---|---|---|",
    ]
    for name, row in score["domains"].items():
        low, high = row["interval"]
        alphas = f"{row['alpha']:.2f} | {row['alpha_tuned']:.2f}"
        lines.append(f"| {name} | {row['score']:.3f} | {low:.3f} to {high:.3f} | {alphas} |")
    if (pruned := made.get("prune")) is not None:
        told = ", ".join(f"{name} {a:.3f} and {b:.3f}" for name, (a, b) in pruned["with_and_without"].items())
        left = "so these are left out" if pruned["is_pruned"] else "so these stay"
        lines += [
            "",
            f"With the layers that `grow` added, and without them, on {pruned['n']} other prompts: {told}; {left}.",
        ]
    versions = ", ".join(f"{name} {version}" for name, version in draft["versions"].items())
    return "\n".join([*lines, "", f"Seed {SEED}; {versions}; CPU, two cores."])


def alpha(draft, rows: list[tuple[list[int], list[int]]], k: int = 5) -> float:
    """Return accepted / examined draft tokens over (prompt ids, target's greedy ids), with one teacher-forced pass per
    row."""
    accepted = examined = 0
    for prompt, answer in rows:
        with torch.inference_mode():
            logits = draft(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        right = (logits.argmax(-1) == torch.tensor(answer)).tolist()
        at = 0
        while at < len(answer):
            run = 0
            while run < k and at + run < len(answer) and right[at + run]:
                run += 1
            accepted += run
            examined += run + (run < k and at + run < len(answer))
            at += run + 1
    return accepted / examined


def tune(
    draft, target, rows: list[tuple[list[int], list[int]]], epochs: int = 10, learning_rate: float = 1e-3
) -> None:
    """Train the draft on the target's rows (forward KL at the answer's positions)."""
    order = random.Random(SEED)
    optimizer = torch.optim.AdamW(draft.parameters(), learning_rate, weight_decay=0.0)
    with torch.inference_mode():
        wanted = [target(input_ids=torch.tensor([p + a])).logits[0, len(p) - 1 : -1].log_softmax(-1) for p, a in rows]
    wanted = [row.clone() for row in wanted]
    draft.train()
    for _ in range(epochs):
        indices = order.sample(range(len(rows)), len(rows))
        for begin in range(0, len(rows), 8):
            chosen = indices[begin : begin + 8]
            longest = max(len(rows[i][0]) + len(rows[i][1]) for i in chosen)
            ids = torch.tensor([rows[i][0] + rows[i][1] + [0] * (longest - sum(map(len, rows[i]))) for i in chosen])
            logits = draft(input_ids=ids).logits
            got = torch.cat(
                [logits[j, len(rows[i][0]) - 1 : sum(map(len, rows[i])) - 1] for j, i in enumerate(chosen)]
            )
            F.kl_div(
                got.log_softmax(-1), torch.cat([wanted[i] for i in chosen]), reduction="batchmean", log_target=True
            ).backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    draft.eval()


@torch.inference_mode()
def answers_of(model, tokenizer, prompts: list[str], max_new_tokens: int = 128) -> list[str]:
    """Return greedy answers, in left-padded batches."""
    texts = []
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for begin in range(0, len(prompts), 50):
        chosen = [prompts[i] for i in order[begin : begin + 50]]
        inputs = tokenizer(
            [f"<s><|user|>{p}<|assistant|>" for p in chosen],
            add_special_tokens=False,
            return_tensors="pt",
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
        )
        out = model.generate(
            **inputs, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id
        )
        texts += tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    back = [""] * len(prompts)
    for i, text in zip(order, texts, strict=True):
        back[i] = text
    return back


def wilson(right: int, n: int, z: float = 1.96) -> list[float]:
    """Return the 95% interval of a share."""
    share, spread = right / n, z * math.sqrt(right * (n - right) / n**3 + z * z / (4 * n * n))
    return [round((share + z * z / (2 * n) + sign * spread) / (1 + z * z / n), 3) for sign in (-1, 1)]


@torch.inference_mode()
def token_milliseconds(cases: dict[str, tuple[Any, int]], repeats: int = 300) -> dict[str, float]:
    """Return the processor time of a forward of (model, new tokens) after 64 tokens, the 5% quantile of alternating
    runs."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    caches = {name: DynamicCache() for name in cases}
    for name, (model, _) in cases.items():
        model(input_ids=torch.randint(5, 1000, (1, 64)), past_key_values=caches[name])
    for _ in range(repeats):
        for name, (model, width) in cases.items():
            ids = torch.randint(5, 1000, (1, width))
            begin = time.process_time()
            model(input_ids=ids, past_key_values=caches[name])
            times[name].append(time.process_time() - begin)
            caches[name].crop(-width)
    return {name: round(1000 * sorted(row)[repeats // 20], 2) for name, row in times.items()}


def score(folder: str, n: int, learn_from: int = 100, held_out: int = 40) -> None:
    """Score the target on `n` unseen prompts per domain and measure the draft before and after a short training."""
    torch.set_num_threads(1)
    target, draft = (load(f"{folder}/{name}") for name in ("target", "draft"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(f"{folder}/target")
    entry: dict[str, Any] = {"n": n, "learn_from": min(learn_from, n), "held_out": held_out, "domains": {}}
    for domain in tqdm(DOMAINS, desc="score"):
        examples = first_examples(domain, n + held_out, seed=SEED)
        texts = answers_of(target, tokenizer, [e.prompt for e in examples])
        right = sum(map(check_answer, examples[:n], texts))
        rows = [
            (
                tokenizer(f"<s><|user|>{e.prompt}<|assistant|>", add_special_tokens=False)["input_ids"],
                tokenizer(f"{text}</s>", add_special_tokens=False)["input_ids"],
            )
            for e, text in zip(examples, texts, strict=True)
        ]
        before = alpha(draft, rows[n:])
        learner = copy.deepcopy(draft)
        tune(learner, target, rows[: min(learn_from, n)])
        entry["domains"][domain] = {
            "score": round(right / n, 3),
            "interval": wilson(right, n),
            "alpha": round(before, 3),
            "alpha_tuned": round(alpha(learner, rows[n:]), 3),
        }
        tqdm.write(f"{domain} {entry['domains'][domain]}")
    cases = {"target": (target, 1), "target_6_tokens": (target, 6), "draft": (draft, 1)}
    entry["token_milliseconds"] = token_milliseconds(cases)
    entry["layers"] = {"target": target.config.num_hidden_layers, "draft": draft.config.num_hidden_layers}
    entry["parameters"] = {"target": target.num_parameters(), "draft": draft.num_parameters()}
    record(folder, "score", entry)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the bundled pair.")
    parser.add_argument("--stage", choices=("all", *STAGES), default="all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "osd_hf" / "bundled")
    parser.add_argument("--steps", type=int, default=TARGET_STEPS, help="steps of each half of the target")
    parser.add_argument("--minutes", type=float, default=45, help="end each half by then")
    parser.add_argument("--processes", type=int, default=2, help="processes that train the target, one thread each")
    parser.add_argument("--prompts", type=int, default=300, help="unseen prompts of each domain to score")
    parser.add_argument("--finance", type=float, default=0.35, help="share of finance in what the target learns")
    parser.add_argument("--max-steps", type=int, help="stop every training after so many steps")
    options = parser.parse_args()
    folder = str(options.out.resolve())
    stages = STAGES if options.stage == "all" else (options.stage,)
    if "prompts" in stages:
        options.out.mkdir(parents=True, exist_ok=True)
        Path(f"{folder}/prompts.jsonl").write_text("\n".join(shipped_lines()) + "\n")
    if "tokenizer" in stages:
        make_tokenizer().save_pretrained(f"{folder}/target")
    for stage in [stage for stage in ("target", "grow") if stage in stages]:
        with tempfile.TemporaryDirectory() as scratch:
            mp.spawn(train_target, (folder, f"{scratch}/meeting", stage, options), nprocs=options.processes)
    if "prune" in stages:
        prune(folder, options.prompts)
    if "draft" in stages:
        train_draft(folder, DRAFT_STEPS, options.max_steps)
    if "score" in stages:
        score(folder, options.prompts)


if __name__ == "__main__":
    main()
