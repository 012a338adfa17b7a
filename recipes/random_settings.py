"""Compare answers of an assistant and its target under random generation settings.

    python recipes/random_settings.py                                # 2,000 examples, about 5 minutes on one core
    python recipes/random_settings.py --examples 200 --seed 7
    python recipes/random_settings.py --examples 500 --only attached # examples of one entry point, route, or context

An example draws settings, the route by which they reach the request (keywords, a `GenerationConfig`, the model's
default, a saved file), the context of the caller (autocast, inference mode, a default dtype, ...), the entry point,
one to four prompts, a kind of draft, streaming, and greedy or sampled answers. Models are tiny and in float64.
Sampling models have only probabilities of 0 and 1. Under autocast models are in float32, and answers may differ where
the two most likely tokens are close.

An example passes if the answer equals the target's and each prompt has its trace, if an `OSDError` refuses one of the
settings in `REFUSED`, or if the target fails with the same type of error. All failures are collected.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import string
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from common import Streamed, make_parser, run_facts, write_report
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    WatermarkingConfig,
)

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig
from osd_hf.errors import OSDError

VOCAB = 64
EXACT_GAP, AUTOCAST_GAP = 1e-6, 0.1  # of the two largest logits, over their spread, below which rounding may decide
RANDOM_GAP = 50.0  # of logits, below which what is drawn is random at any temperature
SHARP = {torch.float64: 1e5, torch.float32: 2e3}  # factor of the logits of models that sample
REFUSED = ("num_beams", "num_return_sequences", "prompt_lookup_num_tokens", "num_assistant_tokens")
ids_in_vocab = st.integers(3, VOCAB - 1)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_length": st.integers(10, 24), "min_length": st.integers(0, 20), "min_new_tokens": st.integers(0, 8),
    "max_time": st.sampled_from([0.0, 1e6]), "stop_strings": st.lists(st.sampled_from("abcxyzABC"), min_size=1),
    "repetition_penalty": st.sampled_from([1, 1.0, 0.8, 1.3]), "no_repeat_ngram_size": st.integers(0, 3),
    "encoder_repetition_penalty": st.sampled_from([1.0, 1.3]), "encoder_no_repeat_ngram_size": st.integers(0, 3),
    "bad_words_ids": st.lists(st.lists(ids_in_vocab, min_size=1, max_size=2), min_size=1, max_size=4),
    "suppress_tokens": st.lists(ids_in_vocab, max_size=20),
    "begin_suppress_tokens": st.lists(ids_in_vocab, max_size=9),
    "sequence_bias": st.lists(st.tuples(st.lists(ids_in_vocab, min_size=1, max_size=2), st.sampled_from([-9.0, 9.0])),
                              min_size=1, max_size=3).map(lambda pairs: [list(pair) for pair in pairs]),
    "forced_eos_token_id": ids_in_vocab, "forced_bos_token_id": ids_in_vocab,
    "exponential_decay_length_penalty": st.just((2, 1.2)), "remove_invalid_values": st.booleans(),
    "renormalize_logits": st.booleans(), "watermarking_config": st.builds(WatermarkingConfig, bias=st.just(8.0)),
    "eos_token_id": st.one_of(st.integers(0, 63), st.lists(ids_in_vocab, min_size=1, max_size=24)),
    "pad_token_id": st.sampled_from([0, 1, 2]), "return_dict_in_generate": st.just(True),
    "output_scores": st.booleans(), "output_logits": st.booleans(), "output_hidden_states": st.booleans(),
    "output_attentions": st.booleans(), "use_cache": st.booleans(), "guidance_scale": st.sampled_from([1.0, 1.5]),
    "num_beams": st.sampled_from([1, 2]), "num_return_sequences": st.sampled_from([1, 2]),
    "prefill_chunk_size": st.integers(1, 4), "token_healing": st.booleans(), "low_memory": st.booleans(),
    "cache_implementation": st.sampled_from([None, "dynamic", "static"]), "num_assistant_tokens": st.integers(1, 4),
    "assistant_confidence_threshold": st.sampled_from([0.0, 0.4]), "prompt_lookup_num_tokens": st.just(3),
    "temperature": st.sampled_from([0.5, 1.0, 1.5]), "top_k": st.integers(0, 60), "top_p": st.floats(0.1, 1.0),
    "min_p": st.floats(0.0, 0.9), "top_h": st.floats(0.1, 0.9), "typical_p": st.floats(0.1, 1.0),
    "epsilon_cutoff": st.sampled_from([0.0, 0.02]), "eta_cutoff": st.sampled_from([0.0, 0.02]),
}  # fmt: skip
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
ROUTES = ("keywords", "object", "default", "file")
ENTRIES = ("generate", "chat", "attached")
DRAFTS: dict[str, dict[str, Any]] = {
    "k = 3": {"num_assistant_tokens": 3, "candidates": "draft"}, "auto": {}, "text": {"candidates": "text"},
    "k = 0": {"num_assistant_tokens": 3},
}  # fmt: skip
CONTEXTS = (
    "plain", "no_grad", "inference_mode", "autocast bfloat16", "autocast float16", "default float64",
    "default bfloat16", "deterministic", "device cpu", "hook",
)  # fmt: skip


@dataclass(frozen=True)
class Example:
    """One request and the way it is made."""

    settings: dict[str, Any]
    route: str
    context: str
    entry: str
    prompts: tuple[tuple[int, ...], ...]
    draft: str
    streams: bool
    samples: bool


@st.composite
def examples(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Example:
    """Draw an example, with up to six settings."""
    samples, entry = draw(st.booleans()), draw(st.sampled_from(ENTRIES))
    names = sorted(FIELDS if samples else FIELDS.keys() - set(OF_SAMPLING))
    chosen = draw(st.lists(st.sampled_from(names), max_size=6, unique=True))
    given_settings = {name: draw(FIELDS[name]) for name in chosen}
    given_settings |= {"do_sample": True} if samples else draw(st.sampled_from([{}, {"do_sample": False}]))
    if "max_length" not in given_settings or draw(st.booleans()):
        given_settings["max_new_tokens"] = draw(st.integers(1, 14))
    given_settings.setdefault("pad_token_id", 0)
    if "exponential_decay_length_penalty" in given_settings:  # it needs one
        given_settings.setdefault("eos_token_id", 5)
    one = st.lists(ids_in_vocab, min_size=1, max_size=9).map(tuple)
    prompts = draw(st.lists(one, min_size=1, max_size=1 if entry == "chat" else draw(st.integers(1, 4))))
    drafts = [name for name in DRAFTS if entry != "attached" or name != "k = 0"]
    return Example(
        given_settings, draw(st.sampled_from(ROUTES)), draw(st.sampled_from(CONTEXTS)), entry, tuple(prompts),
        draw(st.sampled_from(drafts)), draw(st.sampled_from([False, False, True])), samples,
    )  # fmt: skip


# --- models ---------------------------------------------------------------------------------------------------------


@cache
def pair(dtype: torch.dtype, samples: bool) -> tuple[Any, Any]:
    """Return a tiny target whose greedy answers vary, and a noisy copy of it."""
    generator = torch.Generator().manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5, generator=generator)
        target.lm_head.weight *= SHARP[dtype] if samples else 1.0
    target.generation_config = GenerationConfig(bos_token_id=1, pad_token_id=0)
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim > 1:
                parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return target.to(dtype), draft.to(dtype)


@cache
def tokenizer() -> Any:
    """Return a tokenizer with a token for each character."""
    vocab = {
        token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *string.ascii_letters, *string.digits][:VOCAB])
    }
    backend = Tokenizer(BPE(vocab, []))
    backend.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.padding_side = "left"
    fast.chat_template = "{{ messages[0].content }}"
    return fast


@cache
def assistant(dtype: torch.dtype, samples: bool, draft: str) -> OnlineAssistant:
    """Return the assistant of a pair with a kind of draft."""
    config = OnlineConfig(update_strategy="manual", **DRAFTS[draft])
    return OnlineAssistant(*pair(dtype, samples), tokenizer(), config)


# --- how a request is made ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def inside(name: str, target: Any) -> Iterator[None]:
    """Enter the context of a caller."""
    kind, _, value = name.partition(" ")
    dtype = getattr(torch, value, None)
    with contextlib.ExitStack() as stack:
        if kind == "default":
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        elif kind == "deterministic":
            stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            torch.use_deterministic_algorithms(True)
        elif kind == "hook":
            spread = torch.arange(VOCAB, dtype=target.dtype) % 3 * float(target.lm_head.weight.std())
            stack.callback(target.lm_head.register_forward_hook(lambda module, args, logits: logits + spread).remove)
        elif kind != "plain":
            managers = {
                "no_grad": torch.no_grad, "inference_mode": torch.inference_mode,
                "device": lambda: torch.device("cpu"), "autocast": lambda: torch.autocast("cpu", dtype),
            }  # fmt: skip
            stack.enter_context(managers[kind]())
        yield


@contextlib.contextmanager
def asked(target: Any, route: str, chosen: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the keywords of `generate` by which settings reach a request on this route."""
    if route == "keywords":
        yield dict(chosen)
        return
    config, before = GenerationConfig(**chosen), target.generation_config
    if route == "object":
        yield {"generation_config": config}
        return
    if route == "file":
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "generation_config.json").write_text(config.to_json_string())
            config = GenerationConfig.from_pretrained(folder)
    target.generation_config = config
    try:
        yield {}
    finally:
        target.generation_config = before


def answered(call: Callable[[], Any]) -> Any:
    """Return the tokens of the answers, the text of a chat, or the error."""
    torch.manual_seed(0)
    try:
        output = call()
    except Exception as error:  # noqa: BLE001 - of any library
        return error
    return output if isinstance(output, str) else getattr(output, "sequences", output).tolist()


@torch.no_grad()
def is_close(target: Any, example: Example, mask: torch.Tensor, alone: Any, ours: Any) -> bool:
    """Return whether two answers differ where the two most likely tokens of the target are about equally likely."""
    alone, ours = torch.tensor(alone), torch.tensor(ours)
    width = min(alone.shape[1], ours.shape[1])
    row, at = next(iter((alone[:, :width] != ours[:, :width]).nonzero().tolist()), (0, width))
    mask = torch.cat([mask[row : row + 1], torch.ones(1, max(at - mask.shape[1], 0), dtype=torch.long)], 1)
    logits = target(alone[row : row + 1, :at], attention_mask=mask[:, :at]).logits[0, -1].double()
    largest = logits.topk(2).values
    if example.samples and largest[0] - largest[1] < RANDOM_GAP:
        return True
    most = AUTOCAST_GAP if example.context.startswith("autocast") else EXACT_GAP
    return bool((largest[0] - largest[1]) / logits.std() < most)


def outcome(example: Example) -> str:
    """Return the outcome of an example: `same`, `refused: ...`, `fails alone: ...`, or a failure in capitals."""
    dtype = torch.float32 if example.context.startswith("autocast") else torch.float64
    ours_of = assistant(dtype, example.samples, example.draft)
    target = ours_of.target
    text = "".join(tokenizer().convert_ids_to_tokens(example.prompts[0]))
    batch = tokenizer().pad({"input_ids": [list(ids) for ids in example.prompts]}, return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    traces: list[Any] = []
    streams: list[Streamed] = [Streamed(), Streamed()]
    streamer = [{"streamer": stream} if example.streams else {} for stream in streams]
    own: dict[str, Any] = {"num_assistant_tokens": 0} if example.draft == "k = 0" else {}
    with contextlib.ExitStack() as stack:
        try:
            given_keywords = stack.enter_context(asked(target, example.route, example.settings))
        except (ValueError, TypeError) as error:
            return f"fails alone: {type(error).__name__} of the configuration"
        if own:
            given_keywords.pop("num_assistant_tokens", None)
        stack.enter_context(inside(example.context, target))
        alone = answered(lambda: target.generate(**inputs, **given_keywords, **streamer[0], tokenizer=tokenizer()))
        served = ours_of.stats.num_requests
        if example.entry == "chat":
            own |= {"on_trace": traces.append, **streamer[1]}
            ours = answered(lambda: ours_of.chat(text, **given_keywords, **own))
        elif example.entry == "generate":
            own |= {"on_trace": traces.append, **streamer[1]}
            ours = answered(lambda: ours_of.generate(**inputs, **given_keywords, **own))
        else:
            own |= {"assistant_model": ours_of.draft, "tokenizer": tokenizer(), **streamer[1]}
            if example.route == "keywords":
                given_keywords.pop("num_assistant_tokens", None)
            with ours_of.attached():
                ours = answered(lambda: target.generate(**inputs, **given_keywords, **own))
            if isinstance(ours, Exception) and not isinstance(ours, OSDError) and not isinstance(alone, Exception):
                # Calls with an assistant model may fail in transformers where the target alone answers.
                alone = answered(lambda: target.generate(**inputs, **given_keywords, **own))
        if isinstance(ours, OSDError):
            name = str(ours).split("=")[0].split(" ")[0].strip("`.,")
            return f"refused: {name}" if name in REFUSED else f"REFUSED: {ours}"[:160]
        if isinstance(alone, Exception):
            same = isinstance(ours, type(alone))
            return f"{'fails alone' if same else 'ANSWERED'}: {type(alone).__name__}: {str(alone)[:60]}"
        if isinstance(ours, Exception):
            return f"ERROR: {type(ours).__name__}: {str(ours)[:100]}"
        if example.entry == "chat":
            begins = (
                inputs["input_ids"].shape[1] if not example.settings.get("token_healing") else len(example.prompts[0])
            )
            same = ours == tokenizer().decode(alone[0][begins:], skip_special_tokens=True)
            return "same" if same else "OTHER TEXT"
        if ours != alone:
            close = is_close(target, example, inputs["attention_mask"], alone, ours)
            return "same up to a tie" if close else "OTHER TOKENS"
        if example.streams and streams[1].tokens != streams[0].tokens:
            return "OTHER STREAM"
        count = len(traces) if example.entry == "generate" else ours_of.stats.num_requests - served
        is_beam = example.settings.get("num_beams", 1) > 1 or example.settings.get("prompt_lookup_num_tokens")
        if count != len(example.prompts) and not (is_beam and example.entry == "attached"):
            return f"TRACES: {count} for {len(example.prompts)} prompts"
        return "same"


def main() -> None:
    parser = make_parser(__doc__, "random_settings", traces=False)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--only", help="examples of this entry point, route, context, or draft alone")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("osd_hf").setLevel(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    started, found, failures = time.time(), Counter[str](), list[dict[str, Any]]()
    failed_by: dict[str, Counter[str]] = {name: Counter() for name in ("route", "context", "entry", "draft")}

    @seed(args.seed)
    @settings(
        max_examples=args.examples, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(examples())
    def run(example: Example) -> None:
        if args.only and args.only not in (example.route, example.context, example.entry, example.draft):
            return
        what = outcome(example)
        found[what] += 1
        if what[:2].isupper():
            failures.append({"outcome": what, **{k: repr(v) for k, v in vars(example).items()}})
            for name, counter in failed_by.items():
                counter[getattr(example, name)] += 1

    run()
    used = [assistant(*key) for key in itertools.product((torch.float64, torch.float32), (False, True), DRAFTS)]
    for what, count in found.most_common():
        print(f"{count:6}  {what}")
    for failure in failures[:20]:
        print(failure)
    print(f"\n{len(failures)} failures in {sum(found.values())} examples; by {failed_by}")
    stats = sum((ours.stats for ours in used), AcceptanceStats())
    report = {
        "requests": stats.num_requests, "drafted": stats.drafted, "accepted": stats.accepted,
        "examples": sum(found.values()), "outcomes": dict(found.most_common()), "failures": failures,
        "failed_by": {name: dict(counter) for name, counter in failed_by.items()},
    }  # fmt: skip
    print(f"Wrote {write_report(args.name, report, seed=args.seed, device='cpu', **run_facts(started))}.")


if __name__ == "__main__":
    main()
