"""Compare greedy answers of an assistant and its target for everything that a tiny configuration can build.

    python recipes/exactness_survey.py                                          # about 20 minutes on one core
    python recipes/exactness_survey.py --groups models --only mamba --show      # some targets, with each row
    python recipes/exactness_survey.py --groups states --name exactness_survey_states --seconds 300
    python recipes/exactness_survey.py --groups heads --name exactness_survey_heads --seconds 300

`ropes` are the rope types of transformers with lengths that pass the limits of the configuration. `adapters` are the
methods of PEFT, as target and as draft. `models` are the families in the auto mappings for causal,
sequence-to-sequence, image-text, and speech models. `states` are those with recurrent or convolutional layers, with 64
answers each: one row or four, drafted or from text, streamed, and with stop strings. `heads` are twelve families with
draft heads that learned four answers and go on learning. Weights are random and in float64, so that a different token
is a fault. Each target runs in its own process with a time limit. The report has a row for each target and way, and is
written after each target.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import logging
import multiprocessing
import re
import string
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import tokenizers
import torch
import transformers
from common import RESULTS, Streamed, make_parser, run_facts, write_report
from peft import LoraConfig, get_peft_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import modeling_auto

from osd_hf import DraftHead, OnlineAssistant, OnlineConfig
from osd_hf.errors import OSDError
from osd_hf.layers import copy_layers, new_eagle3_head, new_head
from osd_hf.learning.updater import Updater
from osd_hf.learning.weights import shared_ends
from osd_hf.recording import record_traces

VOCAB, NEW_TOKENS, WINDOW = 64, 40, 8
PROMPTS = (9, 6, 12, 7)  # tokens of the prompts of a batch; a single prompt has those of the first
WAYS: dict[str, tuple[int, dict[str, Any]]] = {  # number of prompts, settings of the assistant
    "k = 3": (1, {"num_assistant_tokens": 3}),
    "auto": (1, {}),
    "text": (1, {"candidates": "text", "text_scope": "owner"}),
    "batch, k = 3": (3, {"num_assistant_tokens": 3}),
    "batch, auto": (3, {}),
}
STATE_WAYS = {  # number of prompts, requests, settings of the assistant
    "12 answers, k = 3": (1, 12, {"num_assistant_tokens": 3}),
    "8 answers, text": (1, 8, {"candidates": "text", "text_scope": "owner"}),
    "8 answers, streamed": (1, 8, {"num_assistant_tokens": 5}),
    "8 answers, stop strings": (1, 8, {"num_assistant_tokens": 4}),
    "4 rows, 3 times, k = 3": (4, 3, {"num_assistant_tokens": 3}),
    "4 rows, 2 times, text": (4, 2, {"candidates": "text", "text_scope": "owner"}),
    "4 rows, 2 times, stop strings": (4, 2, {"num_assistant_tokens": 4}),
}
LEARNING = {"num_assistant_tokens": 4, "update_strategy": "interval", "update_interval": 2, "gate": False}
HEAD_WAYS = {
    "8 answers, learning": (1, 8, LEARNING),
    "4 rows, 4 times, learning": (4, 4, LEARNING),
    "8 answers, auto": (1, 8, {}),
    "8 answers, streamed": (1, 8, LEARNING),
    "4 rows, 2 times, stop strings": (4, 2, LEARNING),
}
Target = tuple[Any, Any, dict[str, Any]]  # the target, a draft, arguments of `generate` beside or in place of a prompt
Build = Callable[[], Target]


# --- one target -----------------------------------------------------------------------------------------------------


def loud(model: Any, seed: int = 0, embeddings: float = 1.5) -> Any:
    """Draw large weights, so that the answer changes from token to token, and return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                # What an encoder gives is the same at each step: too loud, it drowns the tokens of the answer.
                is_cross = re.search("encoder_attn|encdecattention|cross_?att", name.lower())
                scale = 0.3 if is_cross else embeddings if re.search("shared|embed_tokens|word_emb", name) else 1.5
                weight.normal_(0, scale / weight.shape[-1] ** 0.5, generator=generator)
            else:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))  # equal values would be ties
    return model


def noisy(model: Any, noise: float = 0.1) -> Any:
    """Copy a model and add noise to its weights: a draft that is accepted sometimes."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim > 1:
                weight.add_((noise * weight.std() * torch.randn(weight.shape, generator=generator)).to(weight.dtype))
    return draft


def finished(model: Any) -> Any:
    """Return the model in float64, with answers that end only by their length."""
    settings = model.double().eval().generation_config
    settings.eos_token_id, settings.forced_eos_token_id, settings.pad_token_id = None, None, 0
    settings.decoder_start_token_id = settings.decoder_start_token_id or 1
    return model


def request(rows: int, given: dict[str, Any], seed: int = 5) -> dict[str, Any]:
    """Return the arguments of `generate`: random prompts, padded on the left, with the inputs of each row."""
    generator, width = torch.Generator().manual_seed(seed), max(PROMPTS[:rows])
    ids = torch.zeros(rows, width, dtype=torch.long)
    mask = ids.clone()
    for row, length in enumerate(PROMPTS[:rows]):
        ids[row, -length:] = torch.randint(3, 48, (length,), generator=generator)
        mask[row, -length:] = 1
    asked = {"input_ids": ids, "attention_mask": mask, "do_sample": False, "max_new_tokens": NEW_TOKENS}
    for name, value in given.items():
        is_tensor = isinstance(value, torch.Tensor)
        asked[name] = value.repeat(rows, *[1] * (value.ndim - 1)) if is_tensor else value and value * rows
    return {name: value for name, value in asked.items() if value is not None}


def failure(outcome: str, error: BaseException) -> dict[str, Any]:
    """Return a row with an error and its place."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/osd_hf/" in frame.filename]
    places = [f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}" for frame in (*ours[-1:], frames[-1])]
    why = f"{type(error).__name__}: {lines[-1 if 'validator' in lines[0] else 0][:240]}"
    return {"outcome": outcome, "why": why, "where": list(dict.fromkeys(places))}


def difference(target: Any, asked: dict[str, Any], alone: Any, ours: Any) -> dict[str, Any]:
    """Return the first different token and the gap between the two most likely tokens of the target."""
    row = next(i for i, (a, b) in enumerate(zip(alone, ours, strict=True)) if a != b)
    pairs = zip(alone[row], ours[row], strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(alone[row]), len(ours[row])))
    said = copy.deepcopy(target).generate(**asked, output_logits=True, return_dict_in_generate=True)
    step = at - len(said.sequences[row]) + len(said.logits)
    best = said.logits[min(step, len(said.logits) - 1)][row].float().topk(2).values
    return {"outcome": "DIFFERENT", "row": row, "new_token": step, "gap": float(best[0] - best[1])}


def answered(target: Any, rows: int, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Let the target answer a request twice; return facts for the report and the answers, or `None`."""
    asked, alone = request(rows, given), copy.deepcopy(target)  # no request finds what another one left
    try:
        answers = alone.generate(**asked).tolist()
        repeats = alone.generate(**asked).tolist() == answers
    except Exception as error:  # noqa: BLE001 - of any library
        return failure("target fails alone", error), None
    return {"distinct": len(set(answers[0][-NEW_TOKENS:])), **({} if repeats else {"repeats": False})}, answers


def compared(target: Any, draft: Any, way: str, given: dict[str, Any], alone: Any) -> dict[str, Any]:
    """Answer a request with the assistant; return the outcome of the comparison with the target's answer."""
    rows, settings = WAYS[way]
    asked = request(rows, given)
    try:
        config = OnlineConfig(update_strategy="manual", **settings)
        with OnlineAssistant(copy.deepcopy(target), draft, config=config) as assistant:
            if way == "text":  # the answer with some wrong tokens
                assistant.remember([token if i % 7 else 3 for i, token in enumerate(alone[0])])
            ours, stats = assistant.generate(**asked).tolist(), assistant.stats
        if ours != alone:
            return difference(target, asked, alone, ours)
    except OSDError as error:
        return failure("refused", error)
    except Exception as error:  # noqa: BLE001 - of any library
        return failure("ERROR", error)
    drafted, accepted = stats.drafted + stats.text_drafted, stats.accepted + stats.text_accepted
    outcome = "same" if drafted else "same, without speculation"
    return {"outcome": outcome, "drafted": int(drafted), "accepted": int(accepted)}


def several(target: Any, draft: Any, way: str) -> dict[str, Any]:
    """Compare several answers of one assistant with those of the target."""
    rows, count, settings = (STATE_WAYS | HEAD_WAYS)[way]
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(string.printable[:VOCAB])}, []))
    letters.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters)
    config, different = OnlineConfig(**{"update_strategy": "manual", **settings}), list[int]()
    try:
        with OnlineAssistant(copy.deepcopy(target), draft, tokenizer, config=config) as assistant:
            for seed in range(count):
                asked = request(rows, {}, seed)
                alone = target.generate(**asked)
                if "stop" in way:
                    ids = alone[0, -NEW_TOKENS // 2 :][:2].tolist()
                    asked |= {"stop_strings": "".join(tokenizer.convert_ids_to_tokens(ids)), "tokenizer": tokenizer}
                    alone = target.generate(**asked)
                for answer in alone.tolist() if "text" in way else ():
                    assistant.remember([token if i % 7 else 3 for i, token in enumerate(answer)])
                streamer = Streamed()
                ours = assistant.generate(**asked, **({"streamer": streamer} if "streamed" in way else {}))
                is_same = ours.tolist() == alone.tolist()
                if "streamed" in way:
                    is_same &= streamer.has_ended and streamer.tokens == alone[0].tolist()
                different += [] if is_same else [seed]
            stats = assistant.stats
    except OSDError as error:
        return failure("refused", error)
    except Exception as error:  # noqa: BLE001 - of any library
        return failure("ERROR", error)
    drafted, accepted = stats.drafted + stats.text_drafted, stats.accepted + stats.text_accepted
    outcome = "DIFFERENT" if different else "same" if drafted else "same, without speculation"
    return {"outcome": outcome, "seeds": different, "drafted": int(drafted), "accepted": int(accepted)}


@torch.no_grad()
def one_forward(target: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the first new token for which one forward over the answer has other logits than single steps."""
    asked = request(1, given)
    said = target.generate(**asked, output_logits=True, return_dict_in_generate=True)
    steps, ids = torch.cat(said.logits).float(), said.sequences
    inputs = {name: value for name, value in asked.items() if name not in ("do_sample", "max_new_tokens")}
    is_causal = not target.config.is_encoder_decoder
    inputs |= {"input_ids": ids, "attention_mask": None} if is_causal else {"decoder_input_ids": ids}
    whole = target(**inputs).logits[0, -len(steps) - 1 : -1].float()
    differs = (whole - steps).abs().amax(-1) > 1e-4 * steps.std()
    return {"one forward differs at": int(differs.int().argmax()) if bool(differs.any()) else None}


class Log(logging.Handler):
    """Records the log of the package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage()[:300])


def examine(build: Build, ways: list[str], send: Any) -> None:
    """Build a target and send its rows."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    log, started = Log(), time.time()
    logging.getLogger("osd_hf").addHandler(log)
    try:
        target, draft, given = build()
    except Exception as error:  # noqa: BLE001 - of any library
        send.send({"way": "all", **failure("cannot be built", error)})
        return
    facts = {"dtype": str(target.dtype)[6:], "seconds_to_build": round(time.time() - started, 1)}
    with contextlib.suppress(Exception):
        facts |= one_forward(copy.deepcopy(target), given)
    alone = functools.cache(lambda rows: answered(target, rows, given))
    for way in ways:
        log.lines.clear()
        if way in STATE_WAYS | HEAD_WAYS:
            found = several(target, draft, way)
            send.send({"way": way, **facts, **found} | ({"log": log.lines[:2]} if log.lines else {}))
            continue
        found, answers = alone(WAYS[way][0])
        if answers is not None:
            found = found | compared(target, draft, way, given, answers)
        send.send({"way": way, **facts, **found} | ({"log": log.lines[:2]} if log.lines else {}))


def rows_of(build: Build, ways: list[str], seconds: float) -> list[dict[str, Any]]:
    """Examine a target in its own process; return the rows that it sent within the time limit."""
    context = multiprocessing.get_context("fork")  # which has imported everything already
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=examine, args=(build, ways, send), daemon=True)
    process.start()
    send.close()
    rows, until = list[dict[str, Any]](), time.time() + seconds
    try:
        while receive.poll(max(0.0, until - time.time())):
            rows.append(receive.recv())
        rows.append({"way": "rest", "outcome": "took too long", "why": f"more than {seconds} seconds"})
        process.kill()
    except EOFError:
        process.join()
        if process.exitcode:
            rows.append({"way": "rest", "outcome": "ERROR", "why": f"its process ended with {process.exitcode}"})
    return rows


# --- tiny configurations --------------------------------------------------------------------------------------------

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS, HEADS = ("num_hidden_layers", "n_layer", "num_layers"), ("num_attention_heads", "n_head", "num_heads")
SIZES = {  # of fields whose names match as a whole; the first one counts
    r".*vocab_size.*|num_embeddings": VOCAB,
    r"num_nextn_predict_layers|num_mtp.*|mtp_.*layers|first_k_dense_replace|num_kv_shared_layers": 0,
    r".*(sliding_window|window_size|attention_window|local_attention|attention_chunk_size)(_size)?": WINDOW,
    r".*max_.*position.*|n_positions|n_ctx|.*max_seq(uence)?_len.*|max_(source|target)_positions|seq_len(gth)?": 64,
    r".*(experts_per_tok|moe_topk|moe_k|top_k_experts|num_experts_per_token|experts_per_token|expert_top_k).*": 2,
    r"n_group|topk_group|num_expert_group|expert_groups|.*(n_shared_experts|num_shared_experts|shared_expert_num)": 1,
    r".*(num_(local_|routed_)?experts|n_routed_experts|num_zero_experts|zero_expert_num|moe_num_experts).*": 4,
    r".*(moe_intermediate_size|shared_expert_intermediate_size|expert_ffn.*size|moe_.*intermediate.*)": 16,
    r".*(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden.*|mlp_dim|dff|inner_dim|feed_forward.*|ffn_.*size).*": 48,
    r".*(key_value|kv)_heads.*|num_query_groups|num_key_value_groups|(mamba_|ssm_)?n_groups|mamba_ngroups": 2,
    r".*_rank|rank_.*": 16,
    r".*(head_dim|d_kv|kv_channels|attention_head_size|head_size|head_width|rotary_dim)": 8,
    r".*(num_.*heads|n_heads?|attention_heads|num_head).*": 4,
    r".*(num_.*layers|n_layers?|_layers|depth|num_blocks|num_hidden_groups)": 2,
    r".*(state_size|d_state|ssm_state.*|chunk_size|mamba_chunk.*)": 8,
    r".*(conv_kernel.*|d_conv|conv_dim_kernel|_kernel_dim|conv_L_cache)": 4,
    r".*image_size": 32,
    r".*patch_size|.*mel.*": 16,
    r".*(hidden_size|d_model|n_embd|hidden_dim|embed_dim|embedding_size|model_dim|_proj_dim|projection_dim|"
    r"hidden_channels|embedding_dim|d_embed|lru_width|output_dim|dim|width).*": 32,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
OTHER: dict[str, dict[str, Any]] = {  # what else fields of a model type must be
    **{f"{name}_text": MROPE for name in ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "glm4v", "glm_ocr", "glm46v")},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]}, "xlnet": {"d_head": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64}, "mamba2": {"num_heads": 8},
    "glm5_next": {"num_key_value_heads": 4}, "xmod": {"default_language": "en_XX"},
    "deepseek_v2": {"num_experts_per_tok": 2}, "longcat_flash": {"qk_head_dim": 16},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]}, "chameleon": {"vocabulary_map": {"<image>": 60}},
    **{name: {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2} for name in ("lfm2", "lfm2_moe")},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]}, "zamba": {"attention_hidden_size": 64},
}  # fmt: skip


def shrunk(config: Any, **changes: Any) -> Any:
    """Make a configuration of the same class with small sizes and one layer of each kind."""
    kind, own, special = type(config), dict[str, Any](), iter(range(VOCAB - 1, 48, -1))
    values = {name: vars(config)[name] for name in inspect.signature(kind).parameters if name in vars(config)}
    layers, heads = (next((values[name] for name in names if values.get(name)), 0) for names in (LAYERS, HEADS))
    for name, value in values.items():
        if isinstance(value, transformers.PreTrainedConfig):
            own[name] = shrunk(value)
        elif name in IDS:
            own[name] = IDS[name]
        elif name == "tie_word_embeddings":
            own[name] = False
        elif re.fullmatch(r".*token_(id|index)|.*_token", name):
            own |= {name: 1 if "decoder_start" in name else next(special)} if type(value) is int else {}
        elif re.fullmatch(r"num_key_value_heads|num_kv_heads|multi_query_group_num", name):
            own[name] = 4 if value in (heads, None) or not heads else min(value, 2)
        elif type(value) is int or name == "head_dim":
            size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), value)
            own[name] = value if type(value) is int and 0 <= value < size and "window" not in name else size
        elif isinstance(value, list | tuple) and len(value) == layers > 2:
            own[name] = value
        elif isinstance(value, dict) and "mrope_section" in value:
            own[name] = {**value, "mrope_section": [2, 1, 1]}
    of_layers = {name: value for name, value in own.items() if isinstance(value, list | tuple)}
    if of_layers:
        kinds = list(zip(*(map(repr, value) for value in of_layers.values()), strict=True))
        kept = sorted(map(kinds.index, {*kinds}))[:4]
        kept = kept if len(kept) > 1 else [0, 1]
        own |= {name: [value[i] for i in kept] for name, value in of_layers.items()}
        own |= {name: len(kept) for name in LAYERS if name in own}
    return kind(**{**own, **OTHER.get(kind.model_type, {}), **changes})


def tiny(name: str, **changes: Any) -> Any:
    """Build a model of a class of transformers."""
    cls = getattr(transformers, name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls._from_config(shrunk(cls.config_class(), **changes), experts_implementation="eager")
    return finished(loud(model))


# --- rope types -----------------------------------------------------------------------------------------------------

ROPES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM", "PhimoeForCausalLM", "MistralForCausalLM",
         "Gemma3ForCausalLM", "GPTNeoXForCausalLM", "DeepseekV3ForCausalLM", "Ministral3ForCausalLM")  # fmt: skip


def with_rope(name: str, kind: str, limit: int) -> Target:
    """Build a model with a rope type and this limit of positions."""
    text = shrunk(getattr(transformers, name).config_class()).get_text_config(decoder=True)
    before, is_scaled = text.rope_parameters or {}, kind in ("yarn", "longrope", "llama3")
    partial = before.get("partial_rotary_factor", 0.5 if kind == "proportional" else 1.0)
    channels = int((getattr(text, "qk_rope_head_dim", None) or getattr(text, "head_dim", None) or 8) * partial) // 2
    own: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": partial} | {
        "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": {"short_factor": [1.0] * channels, "long_factor": [2.0 + i for i in range(channels)]},
    }.get(kind, {})
    own |= {"original_max_position_embeddings": limit} if is_scaled else {}
    own |= {key: before[key] for key in ("llama_4_scaling_beta",) if key in before}
    own |= {"short_mscale": 1.2, "long_mscale": 1.2} if name.startswith("Phimoe") else {}
    changes = {"rope_parameters": own, "max_position_embeddings": 4 * limit if is_scaled else limit}
    if any(isinstance(value, dict) for value in before.values()):
        changes["rope_parameters"] = dict.fromkeys(before, own)
    if hasattr(text, "original_max_position_embeddings"):
        changes["original_max_position_embeddings"] = limit
    target = tiny(name, **changes)
    draft = noisy(target)
    draft.config.get_text_config(decoder=True).max_position_embeddings = 256  # it drafts beyond the target's limit
    return target, draft, {}


def ropes() -> Iterator[tuple[str, Build]]:
    """Return the targets of this group."""
    for name in ROPES:
        for kind in ("default", *ROPE_INIT_FUNCTIONS):
            for limit, where in ((4, "in the prompt"), (24, "in the answer"), (256, "never")):
                if kind in ("dynamic", "longrope", "yarn", "llama3") or limit == 24:
                    yield f"{name} {kind}, limit passed {where}", functools.partial(with_rope, name, kind, limit)


# --- adapters -------------------------------------------------------------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {  # what a method needs beside the layers
    **{name: {"num_virtual_tokens": 4} for name in ("PROMPT_TUNING", "PREFIX_TUNING", "CARTRIDGE")},
    "P_TUNING": {"num_virtual_tokens": 4, "encoder_hidden_size": 16}, "UNILORA": {"theta_d_length": 64},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 2}, "PSOFT": {"r": 8}, "MISS": {"r": 8},
    "CPT": {"cpt_token_ids": [5, 6, 7, 8], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2, "target_modules": None}, "GRALORA": {"r": 8},
    "POLY": {"n_tasks": 2, "n_skills": 2, "n_splits": 1}, "ADALORA": {"total_step": 10}, "OSF": {"effective_rank": 8},
    "TRAINABLE_TOKENS": {"target_modules": None, "token_indices": [7, 20, 30]}, "LN_TUNING": {"target_modules": None},
    "VBLORA": {"num_vectors": 8, "vector_length": 8, "topk": 2}, "IA3": {"feedforward_modules": []}, "SHIRA": {"r": 4},
    "OFT": {"r": 0, "oft_block_size": 4}, "BOFT": {"boft_block_size": 4}, "C3A": {"block_size": 8}, "LORA": {"r": 4},
    "FOURIERFT": {"n_frequency": 50}, "WAVEFT": {"n_frequency": 50}, "ROAD": {"group_size": 8}, "RANDLORA": {"r": 4},
}  # fmt: skip
LORAS: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True}, "rsLoRA": {"use_rslora": True}, "bias": {"lora_bias": True},
    "activated at tokens": {"alora_invocation_tokens": [7, 8]}, "PiSSA": {"init_lora_weights": "pissa"},
    "trainable tokens": {"trainable_token_indices": [7, 20]}, "saved head": {"modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens"]}, "replicated layers": {"layer_replication": [[0, 2], [0, 2]]},
}  # fmt: skip
SEVERAL = ("X-LoRA", "names of rows", "no adapter for a row", "weighted", "both active", "mixed kinds", "disabled",
           "merged", "of transformers")  # fmt: skip


def stirred(model: Any) -> Any:
    """Set the weights of an adapter so that they change the answer, and return the model."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad or "lora_" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


def base(kind: str) -> Any:
    """Build the model of an adapter."""
    return tiny("LlamaForCausalLM") if kind == "causal" else tiny("T5ForConditionalGeneration")


def with_adapter(kind: str, method: str, role: str, changes: dict[str, Any]) -> Target:
    """Build a target or a draft with an adapter of this method."""
    plain, cls = base(kind), peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[method]
    own = {"task_type": "CAUSAL_LM" if kind == "causal" else "SEQ_2_SEQ_LM"}
    if "target_modules" in inspect.signature(cls).parameters:
        own["target_modules"] = ["q_proj", "v_proj"] if kind == "causal" else ["q", "v"]
    inner = (copy.deepcopy(plain) if role == "target" else noisy(plain, 0.05)).float()  # which some methods ask for
    adapted = finished(stirred(get_peft_model(inner, cls(**{**own, **METHODS.get(method, {}), **changes}))))
    if role == "draft":
        return plain, adapted, {}
    given: dict[str, Any] = {}
    if method in ("MULTITASK_PROMPT_TUNING", "POLY"):
        given["task_ids"] = torch.zeros(1, dtype=torch.long)
    if "alora_invocation_tokens" in changes:
        given["input_ids"] = torch.tensor([[20, 21, 22, 7, 8, 23, 24, 30, 31]])
        given["attention_mask"] = torch.ones(1, 9, dtype=torch.long)
    return adapted, noisy(plain), given


def with_several(what: str) -> Target:
    """Build a target with several LoRA adapters, or one that is used in a special way."""
    plain, lora = base("causal"), LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    inner = copy.deepcopy(plain)
    if what == "of transformers":
        inner.add_adapter(lora)
        return finished(stirred(inner)), noisy(plain), {}
    if what == "mixed kinds":
        mixed = peft.PeftMixedModel(inner, lora)
        mixed.add_adapter("second", peft.LoHaConfig(r=4, target_modules=["k_proj"]))
        mixed.set_adapter(["default", "second"])
        return finished(stirred(mixed)), noisy(plain), {}
    model = get_peft_model(inner, lora, adapter_name="first")
    model.add_adapter("second", lora)
    stirred(model)
    if what == "X-LoRA":
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            paths, again = {name: f"{folder}/{name}" for name in ("first", "second")}, copy.deepcopy(plain)
            again.config.use_cache = False  # which it asks for
            config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters=paths, xlora_size=16)
            return finished(stirred(get_peft_model(again, config))), noisy(plain), {}
    if what == "weighted":
        model.add_weighted_adapter(["first", "second"], [0.7, 0.5], "both", combination_type="linear")
        model.set_adapter("both")
    elif what == "both active":
        model.base_model.set_adapter(["first", "second"])
    elif what == "disabled":
        model.base_model.disable_adapter_layers()
    elif what == "merged":
        model.merge_adapter()
    names = {"names of rows": ["second"], "no adapter for a row": ["__base__"]}.get(what)
    return finished(model), noisy(plain), {"adapter_names": names} if names else {}


def adapters() -> Iterator[tuple[str, Build]]:
    """Return the targets of this group."""
    for role in ("target", "draft"):
        for method in sorted(peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.keys() - {"XLORA"}):
            for kind in ("causal", "seq2seq"):
                yield f"{method.value} as {role}, {kind}", functools.partial(with_adapter, kind, method, role, {})
        for name, changes in LORAS.items():
            yield f"LoRA, {name} as {role}", functools.partial(with_adapter, "causal", "LORA", role, changes)
    for what in SEVERAL:
        yield f"LoRA, {what}", functools.partial(with_several, what)


# --- families -------------------------------------------------------------------------------------------------------

ENCODERS = r".*bert.*|electra|ernie|roformer|xmod|data2vec-text|big_bird"  # decoders where the configuration says so

# Families whose images need nothing but pixels.
IMAGES = ("aya_vision", "cohere2_vision", "florence2", "gemma3", "got_ocr2", "internvl", "llava", "ovis2", "paligemma",
          "qianfan_ocr", "video_llava")  # fmt: skip


def of_family(name: str, changes: dict[str, Any]) -> Target:
    """Build a model with varying answers, in float32 if it fails in float64."""
    target, given = tiny(name, **changes), dict[str, Any]()
    if (main := target.main_input_name) != "input_ids":  # a sound or an image
        sizes = [getattr(target.config, field, None) for field in ("num_mel_bins", "input_feat_per_channel")]
        mel = next(filter(None, sizes), 16)
        shape = {"pixel_values": (1, 3, 32, 32), "input_values": (1, 6400)}.get(main, (1, 64, mel))
        if "Whisper" in name:
            shape = (1, mel, 2 * target.config.max_source_positions)
        sound = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        given = {"input_ids": None, "attention_mask": None, main: sound}
    for attempt in range(6):
        try:
            logits = {"output_logits": True, "return_dict_in_generate": True}
            said = copy.deepcopy(target).generate(**request(3, given), **logits)
            fails = any(bool(step.isnan().any()) for step in said.logits)
        except Exception:  # noqa: BLE001 - of any library
            fails = True
        if fails and target.dtype is torch.float64:
            target = target.float()
            given = {key: None if value is None else value.float() for key, value in given.items()}
        elif fails or len(set(said.sequences[0, -NEW_TOKENS:].tolist())) > 10:
            break
        else:
            loud(target, attempt, 5.0 if attempt % 2 else 1.5)
    return target, noisy(target), given


def with_image(name: str) -> Target:
    """Build a model and a prompt with an image."""
    target = tiny(name)
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = {"pixel_values": pixels}
    features = target.get_image_features(**inputs)
    features = getattr(features, "pooler_output", features)
    count = sum(len(part.view(-1, part.shape[-1])) for part in features)
    ids = [1, *[target.config.image_token_id] * count, 20, 21, 22, 23, 24]
    prompt = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    return target, noisy(target), prompt | inputs


def models() -> Iterator[tuple[str, Build]]:
    """Return the targets of this group."""
    seen = set[str]()
    for task in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ"):
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            for name in {*([names] if isinstance(names, str) else names)} - seen:
                seen.add(name)
                yield f"{name} ({kind})", functools.partial(of_family, name, {})
                if kind in IMAGES:
                    yield f"{name} ({kind}) with an image", functools.partial(with_image, name)
                if task == "CAUSAL_LM" and re.fullmatch(ENCODERS, kind):
                    yield f"{name} ({kind}) as decoder", functools.partial(of_family, name, {"is_decoder": True})


def states() -> Iterator[tuple[str, Build]]:
    """Return the targets of this group: models that call themselves stateful, and those that keep convolutions."""
    for name, build in models():
        cls = getattr(transformers, name.split()[0])
        if cls._is_stateful or "update_conv_state" in Path(inspect.getfile(cls)).read_text():
            yield name, build


FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma3", "GPT2", "GPTNeoX", "Phi3", "Olmo2", "Mixtral",
            "DeepseekV3")  # fmt: skip


def with_head(name: str, make: Callable[[Any], Any], states: tuple[int, ...]) -> Target:
    """Build a target and a head that has learned some of its answers."""
    target, _, given = of_family(name, {})
    head = make(target) if len(states) == 1 else DraftHead.from_draft(copy_layers(target, [0]), target, states)
    head.model.config._experts_implementation = "eager"  # another one cannot compute in float64
    prompts = [request(1, {}, seed)["input_ids"][0].tolist() for seed in range(4)]
    updater = Updater(head, OnlineConfig(gate=False, learning_rate=1e-2), frozen=shared_ends(head, target))
    updater.buffer.extend(record_traces(target, prompts, max_new_tokens=NEW_TOKENS))
    updater.update(60)
    updater.copy_to(head)
    return target, head, given


def heads() -> Iterator[tuple[str, Build]]:
    """Return the targets of this group."""
    kinds = {
        "last state": (new_head, (-1,)),
        "three states": (new_head, (0, 1, -1)),
        "eagle3": (new_eagle3_head, (-1,)),
    }
    for family in FAMILIES:
        for kind, (make, states) in kinds.items():
            name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
            yield f"{name}, {kind}", functools.partial(with_head, name, make, states)


# What the report holds of an answer that is the same.
SAME = ("target", "way", "outcome", "drafted", "accepted", "repeats", "log")
GROUPS = {"ropes": ropes, "adapters": adapters, "models": models, "states": states, "heads": heads}
WAYS_OF = {"states": STATE_WAYS, "heads": HEAD_WAYS}


def main() -> None:
    parser = make_parser(__doc__, "exactness_survey", seed=False, traces=False)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=[*GROUPS][:3])
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="parts of names; other rows of the report stay",
    )
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *STATE_WAYS, *HEAD_WAYS], help="of asking")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a target")
    parser.add_argument("--show", action="store_true", help="print each row")
    args = parser.parse_args()
    started, report, summary = time.time(), dict[str, Any](), dict[str, Counter[str]]()
    for group in args.groups:
        chosen = {n: build for n, build in GROUPS[group]() if any(part.lower() in n.lower() for part in args.only)}
        path, others = RESULTS / f"{args.name}.json", list[dict[str, Any]]()
        if args.only != [""] and path.exists():
            others = [
                row for row in json.loads(path.read_text())["rows"].get(group, ()) if row["target"] not in chosen
            ]
        report[group], summary[group] = others, Counter(row["outcome"] for row in others)
        for name, build in chosen.items():
            ways = args.ways or list(WAYS_OF.get(group, WAYS))
            rows = [{"target": name, **row} for row in rows_of(build, ways, args.seconds)]
            for row in rows:
                is_same = row["outcome"].startswith("same")  # short, as most are
                kept = {key: value for key, value in row.items() if not is_same or key in SAME}
                report[group].append(kept)
            summary[group].update(row["outcome"] for row in rows)
            for row in rows:
                if args.show or row["outcome"] in ("DIFFERENT", "ERROR"):
                    print(json.dumps(row), flush=True)
            write_report(args.name, {"summary": summary, "rows": report}, **run_facts(started))
    for group, counts in summary.items():
        print(f"\n{group}", *(f"{number:6} {outcome}" for outcome, number in counts.most_common()), sep="\n")


if __name__ == "__main__":
    main()
