"""A tiny random pair with a tokenizer, saved in a folder as a user's would be."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "<s>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[answer]"


def save_pair(folder: Path, *, chat_template: bool = True, vocab_size: int = 300, layers: int = 2) -> Path:
    """Write `target/` and `draft/`; the draft is the target with noise, so that it is often but not always right."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    if chat_template:
        fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    target = LlamaForCausalLM(config)
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.04 * torch.randn_like(parameter)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    return folder
