"""EAGLE-3 heads in `speculators`, which has an environment of its own, whose Python is OSD_HF_SPECULATORS."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from osd_hf.draft_head import DraftHead, DraftHeadConfig, keep_states, load_head
from osd_hf.trace import bare_trace

PYTHON = os.environ.get("OSD_HF_SPECULATORS")
CONFIGURATIONS, TOKENS, PROMPT = 20, 24, 5
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="OSD_HF_SPECULATORS is not set"),
]


def random_options(seed: int) -> dict[str, Any]:
    """Settings of a head of either kind of layers, with any norms, for the target with 32 values and 64 tokens."""
    rng = np.random.default_rng(seed)
    heads = int(rng.choice([2, 4, 8]))
    before_fc, each = [(False, False), (True, False), (False, True)][seed % 3]
    return {
        "kind": ["llama", "qwen3"][seed % 2], "rows": [64, 32][int(rng.integers(2))],
        "num_attention_heads": heads, "num_key_value_heads": heads // int(rng.choice([1, 2])),
        "head_dim": int(rng.choice([8, 16])), "intermediate_size": int(rng.choice([24, 48])),
        "attention_bias": bool(rng.integers(2)), "rms_norm_eps": float(rng.choice([1e-6, 1e-5])),
        "norms": {
            "norm_before_residual": bool(rng.integers(2)), "norm_before_fc": before_fc, "fc_norm": each,
            "norm_output": bool(rng.integers(2)),
        },
    }  # fmt: skip


def layer_settings(options: dict[str, Any]) -> dict[str, Any]:
    left_out = ("kind", "rows", "norms")
    own = {name: value for name, value in options.items() if name not in left_out}
    sizes = {"hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 256}
    return {"model_type": options["kind"], **sizes, **own}


def text_of_head(seed: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A trace, its ids, `(1, tokens)`, and states in the precision in which they are kept."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (1, TOKENS), generator=generator)
    states = torch.randn(1, TOKENS - 1, 96, generator=generator).half()
    trace = bare_trace(ids[0, :PROMPT].tolist(), ids[0, PROMPT:].tolist(), 64)
    return trace, ids, states


def compare(head: Any, trace: Any, states: torch.Tensor, theirs: list[torch.Tensor]) -> float:
    """The largest difference between our logits of unrolled steps and theirs."""
    keep_states(trace, states[0], head.config.state_layers)
    head.source.has_first_round = False  # which the reference does not have
    worst = 0.0
    with torch.no_grad():
        for depth, (hidden, _) in enumerate(head.unrolled([trace], len(theirs))):
            ours = head.lm_head(hidden)
            expected = theirs[depth][PROMPT - 2 : PROMPT - 2 + len(ours)]  # the first one reads the second token
            worst = max(worst, float((ours - expected).abs().max()))
    return worst


def run(how: str, folders: list[Path]) -> None:
    script = Path(__file__).parent / "speculators_logits.py"
    subprocess.run([str(PYTHON), str(script), how, *map(str, folders)], check=True)


def test_speculators_loads_our_heads(tmp_path: Path) -> None:
    target, cases = models.build("llama"), []
    target.save_pretrained(tmp_path / "target")
    for seed in range(CONFIGURATIONS):
        options, folder = random_options(seed), tmp_path / str(seed)
        settings = layer_settings(options)
        text = AutoConfig.for_model(settings.pop("model_type"), **settings)
        rows = options["rows"]
        head = DraftHead(DraftHeadConfig(text, [0, 1, 2], 32, "eagle3", draft_vocab_size=rows, **options["norms"]))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in head.parameters():
                scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
                parameter.copy_(scale * torch.randn_like(parameter) + (parameter.ndim == 1))
            head.set_input_embeddings(target.get_input_embeddings())
            if head.d2t is not None:
                chosen = torch.randperm(64)[:rows].sort().values
                head.d2t.copy_(chosen - torch.arange(rows))
                head.t2d[chosen] = True
        head = head.bind(target).eval()
        head.config.target_name = str(tmp_path / "target")
        head.save_pretrained(folder)
        trace, ids, states = text_of_head(seed)
        given = {"states": states.float(), "ids": ids, "embeddings": target.get_input_embeddings().weight.detach()}
        torch.save(given, folder / "inputs.pt")
        cases.append((head, trace, states, folder))
    run("load", [folder for *_, folder in cases])
    for head, trace, states, folder in cases:
        assert compare(head, trace, states, torch.load(folder / "logits.pt")) < 1e-5, random_options(int(folder.name))


def test_we_load_heads_of_speculators(tmp_path: Path) -> None:
    target, folders = models.build("llama"), []
    target.save_pretrained(tmp_path / "target")
    for seed in range(CONFIGURATIONS):
        options, folder = random_options(seed), tmp_path / str(seed)
        folder.mkdir()
        _, ids, states = text_of_head(seed)
        torch.save({"states": states.float(), "ids": ids}, folder / "inputs.pt")
        given = {
            "transformer_layer_config": layer_settings(options),
            "draft_vocab_size": options["rows"],
            "seed": seed,
        }
        given |= {"target_hidden_size": 32, "eagle_aux_hidden_state_layer_ids": [0, 1, 2], **options["norms"]}
        method = {"proposal_type": "greedy", "speculative_tokens": 3}
        given["speculators_config"] = {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]},
        }  # fmt: skip
        (folder / "options.json").write_text(json.dumps(given))
        folders.append(folder)
    run("save", folders)
    for seed, folder in enumerate(folders):
        head = load_head(folder, target)
        trace, _, states = text_of_head(seed)
        assert compare(head, trace, states, torch.load(folder / "logits.pt")) < 1e-5, random_options(seed)
