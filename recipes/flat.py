"""Online speculative decoding (arXiv 2310.07177) in one file of torch and transformers.

    python recipes/flat.py --target DIR --draft DIR --prompts FILE.jsonl --column question --requests 200

A small draft model proposes k tokens one after the other. The target model verifies all of them in one forward pass,
keeps the longest prefix that it would have written itself, and adds one token. The answer equals the target's; it is
faster if more draft tokens are accepted.

Where a token is rejected, the target has just computed its distribution of the correct token. These rows are kept, and
every few requests the draft takes a step toward them.
"""

import argparse
import json
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


def read_on(model, cache, ids, count):
    """Return the logits of the last `count` positions of `ids`, (count, vocabulary). Cached positions are not computed
    again."""
    new = ids[:, cache.get_seq_length() :]
    return model(new, past_key_values=cache, use_cache=True).logits[0, -count:].float()


def forget_after(cache, length):
    """Crop the cache to the first `length` positions."""
    cache.crop(min(length - cache.get_seq_length(), 0))


@torch.no_grad()
def answer(target, draft, ids, k, max_new_tokens, eos):
    """Return the target's greedy answer to the prompt `ids`, of shape (1, length).

    Returns the ids with the answer, the corrections (pairs of a position and the target's logits for the token there),
    and the numbers of examined and accepted draft tokens.
    """
    target_cache, draft_cache = DynamicCache(config=target.config), DynamicCache(config=draft.config)
    end = ids.shape[1] + max_new_tokens
    corrections, examined, accepted = [], 0, 0
    while True:
        start = ids.shape[1]

        # The draft proposes. The last token that there is room for is the target's own.
        drafted = ids
        for _ in range(min(k, end - start - 1)):
            token = read_on(draft, draft_cache, drafted, 1).argmax(-1)
            drafted = torch.cat([drafted, token[None]], 1)
            if int(token) in eos:
                break
        proposed = drafted.shape[1] - start

        # The target says what it would have written at each of these positions, and at the one after them.
        logits = read_on(target, target_cache, drafted, proposed + 1)
        wanted = logits.argmax(-1)
        agrees = (wanted[:proposed] == drafted[0, start:]).long()
        matches = int(agrees.cumprod(0).sum())

        # The tokens up to the first disagreement stand, and the target's own follows them.
        ids = torch.cat([drafted[:, : start + matches], wanted[None, matches : matches + 1]], 1)
        is_rejected = matches < proposed
        examined, accepted = examined + matches + is_rejected, accepted + matches
        if is_rejected:
            corrections.append((start + matches, logits[matches]))
        ended = [i for i in range(start, ids.shape[1]) if int(ids[0, i]) in eos]
        if ended or ids.shape[1] == end:
            return ids[:, : ended[0] + 1] if ended else ids, corrections, examined, accepted

        # Both caches forget what was not emitted. The newest token is in neither yet.
        for cache in (target_cache, draft_cache):
            forget_after(cache, ids.shape[1] - 1)


def learn(draft, optimizer, requests):
    """Take one step on the last requests: forward KL between target and draft at the corrections."""
    total = sum(len(corrections) for _, corrections in requests)
    if total == 0:
        return
    optimizer.zero_grad()
    for ids, corrections in requests:
        if not corrections:
            continue
        positions = torch.tensor([position for position, _ in corrections], device=ids.device)
        p = torch.stack([row for _, row in corrections]).softmax(-1)
        # The logits that predict the token at a position are those of the position before it.
        log_q = draft(ids).logits[0, positions - 1].float().log_softmax(-1)
        loss = torch.nn.functional.kl_div(log_q, p, reduction="sum") / total
        loss.backward()
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, help="with the target's tokenizer")
    parser.add_argument("--prompts", required=True, help="jsonl file")
    parser.add_argument("--column", required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--interval", type=int, default=8, help="requests between two steps")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the paper's is 1e-4")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target).to(device).eval()
    # In fp32: in half precision small steps round away.
    draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=torch.float32).to(device).eval()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.learning_rate, weight_decay=0.0)
    eos = target.generation_config.eos_token_id
    eos = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)

    with open(args.prompts) as file:
        questions = [json.loads(line)[args.column] for line in file]
    random.Random(args.seed).shuffle(questions)

    counts, kept = [], []
    for number, question in enumerate(questions[: args.requests], start=1):
        if tokenizer.chat_template:
            turn = [{"role": "user", "content": question}]
            question = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(question, add_special_tokens=not tokenizer.chat_template, return_tensors="pt").input_ids
        ids, corrections, examined, accepted = answer(
            target, draft, prompt.to(device), args.k, args.max_new_tokens, eos
        )
        counts.append((examined, accepted))
        kept.append((ids, corrections))
        if number % args.interval == 0:
            learn(draft, optimizer, kept)
            kept = []
        if number % (5 * args.interval) == 0 or number == len(questions[: args.requests]):
            examined, accepted = map(sum, zip(*counts[-5 * args.interval :], strict=True))
            print(f"request {number}: alpha {accepted / max(examined, 1):.3f} over the last {5 * args.interval}")


if __name__ == "__main__":
    main()
