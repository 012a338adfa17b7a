"""Run in an environment with `speculators`: compute the logits of EAGLE-3 heads over unrolled steps.

    python speculators_logits.py load FOLDER...     # checkpoints of ours
    python speculators_logits.py save FOLDER...     # random heads of speculators, by FOLDER/options.json

Each folder has `inputs.pt` with `states`, `(1, tokens - 1, width)`, and `ids`, `(1, tokens)`. Writes `logits.pt`.
"""

import json
import sys
from pathlib import Path

import torch
from speculators.models.attention import create_float_mask
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

STEPS = 3


def logits_of(model, states, ids):
    found = []
    model.lm_head.register_forward_hook(lambda _module, _args, output: found.append(output[0].detach()))
    tokens = ids[:, 1:]  # the state of a token is read beside the token after it
    with torch.no_grad():
        model(states, tokens, document_ids=torch.zeros_like(tokens), ttt_steps=STEPS)
    return found


def random_head(options):
    torch.manual_seed(options.pop("seed"))
    config = Eagle3SpeculatorConfig(**options)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.copy_(scale * torch.randn_like(parameter) + (parameter.ndim == 1))
        if model.use_draft_vocab:
            chosen = torch.randperm(model.verifier_vocab_size)[: model.draft_vocab_size].sort().values
            mask = torch.zeros(model.verifier_vocab_size, dtype=torch.bool)
            mask[chosen] = True
            model.load_vocab_mappings(mask, chosen - torch.arange(len(chosen)))
    return model


def main(how, *folders):
    for folder in map(Path, folders):
        inputs = torch.load(folder / "inputs.pt")
        if how == "save":
            model = random_head(json.loads((folder / "options.json").read_text()))
            model.save_pretrained(folder)
        model = Eagle3DraftModel.from_pretrained(folder)
        model._attn_impl, model._create_mask_fn = "eager", create_float_mask  # flex attention needs whole blocks
        model.config.transformer_layer_config._attn_implementation = "eager"
        if "embeddings" in inputs:  # the target's; speculators 0.9 leaves them uninitialized
            model.embed_tokens.weight.data = inputs["embeddings"]
        torch.save(logits_of(model.float().eval(), inputs["states"], inputs["ids"]), folder / "logits.pt")


main(*sys.argv[1:])
