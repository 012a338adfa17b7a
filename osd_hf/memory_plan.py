"""Plan the memory of a pair that serves and learns, from the models' configurations."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from accelerate.utils import compute_module_sizes
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from osd_hf.config import OnlineConfig
from osd_hf.decoding.text import EARLIER_TEXT_BYTES
from osd_hf.errors import UnsupportedModelError, first_line
from osd_hf.learning.loss import ActivationMemory
from osd_hf.learning.updater import MAX_LEARN_TOKENS, batch_positions, trainable_parameters
from osd_hf.learning.weights import adapted, ends_of, hidden_matrices
from osd_hf.models import SHARED_SETTING, config_value, vocab_size_of
from osd_hf.replay import CHUNK_LOGITS, MAX_LOGITS
from osd_hf.vocabulary import vocabulary_sizes

FP32_BYTES = 4
LOGITS_COPIES = 4  # logits, log-probs, and the gradients of both


@dataclass(frozen=True)
class Part:
    """Memory for one purpose: always, during a learning step, or while the gate tries a version; on the device of the
    models, another accelerator that learns, or the host."""

    name: str
    bytes: int
    when: Literal["always", "step", "trial"] = "always"
    place: Literal["device", "learner", "host"] = "device"


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a pair needs, without the CUDA context, captured graphs, and unused memory of the allocator.
    `learned_parameters` of the draft's parameters are trained, on up to `learn_tokens` tokens in a micro-batch."""

    parts: tuple[Part, ...]
    draft_parameters: int
    learned_parameters: int
    learn_tokens: int

    def bytes(self, *, when: str = "always", place: str = "device") -> int:
        """Return the bytes that are needed at some time and place."""
        return sum(part.bytes for part in self.parts if (part.when, part.place) == (when, place))

    def most_bytes(self, place: str) -> int:
        """Return the maximum at a place: in a learning step or a trial of the gate."""
        return self.bytes(place=place) + max(self.bytes(when=when, place=place) for when in ("step", "trial"))

    @property
    def peak_bytes(self) -> int:
        """The maximum on the device of the models."""
        return self.most_bytes("device")

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and totals, ready for JSON."""
        totals = {"always_bytes": self.bytes(), "peak_bytes": self.peak_bytes}
        return asdict(self) | totals | {f"{place}_bytes": self.most_bytes(place) for place in ("learner", "host")}


def memory_plan(
    target: PreTrainedConfig,
    draft: PreTrainedConfig,
    config: OnlineConfig | None = None,
    *,
    peft_config: Any = None,
    target_dtype: str | torch.dtype = "auto",
    draft_dtype: str | torch.dtype = "auto",
    target_bytes: int | None = None,
    prompt_tokens: int = 512,
    new_tokens: int = 256,
    rows: int = 1,
    drafts: int = 1,
    device_type: str = "cuda",
) -> MemoryPlan:
    """Plan the memory of a pair from its configurations, for requests of `rows` prompts and `drafts` domains that have
    a draft of their own. No weights are loaded. The dtype `"auto"` is that of the configuration. A target in
    `target_bytes` need not be estimated, as one with a `quantization_config` is. Embeddings and output head that a
    draft shares with the target that it was made from are counted once. Raises UnsupportedModelError if a model cannot
    be built from its configuration, or the adapters do not fit."""
    config = config or OnlineConfig()
    if vocab_size_of(draft) != vocab_size_of(target):  # `align_vocab` resizes the draft
        draft = copy.deepcopy(draft)
        draft.get_text_config().vocab_size = vocab_size_of(target)
    large, small = empty_model(target, target_dtype), empty_model(draft, draft_dtype)
    learner = small if peft_config is None else adapted(empty_model(draft, draft_dtype), peft_config, 0)
    is_sharing = getattr(draft, SHARED_SETTING, False) and large.dtype == small.dtype
    shared = dict(ends_of(small) if is_sharing else ())
    learned, count = trainable_parameters(learner, shared), _numel(small.parameters())
    learns = _numel(learned.values())
    in_muon = _numel(hidden_matrices(learner, learned)) if config.optimizer == "muon" else 0
    is_whole, on_cpu = peft_config is None, device_type == "cpu"
    place: Any = "device"
    if config.learner_device is not None:
        place = "host" if torch.device(config.learner_device).type == "cpu" else "learner"
    num_shared = _numel(shared.values())
    shared_bytes = num_shared * small.dtype.itemsize
    served = compute_module_sizes(small)[""] - shared_bytes
    is_half = small.dtype in (torch.float16, torch.bfloat16)
    adapter = 0 if is_whole else learns * FP32_BYTES
    version = learns * small.dtype.itemsize if is_whole else adapter
    # An fp32 base of adapters is shared with the draft that serves.
    frozen = 0 if is_whole or (not is_half and place == "device") else count * FP32_BYTES
    frozen += shared_bytes if is_whole and place != "device" else 0
    previous_place: Any = "device" if on_cpu or not is_whole else "host"

    activations = ActivationMemory.of(learner)
    length = min(prompt_tokens + new_tokens, MAX_LEARN_TOKENS, activations.max_tokens)
    answer, vocab, kept = min(new_tokens, length), vocab_size_of(draft), config.num_logprobs
    requests = max(min(config.batch_size, batch_positions(small) // answer, MAX_LOGITS // (answer * vocab)), 1)
    while requests > 1 and not activations.fits(requests, length):
        requests -= 1
    per_token = activations.per_token + length * activations.per_pair
    if not activations.fits(requests, length):  # layers are recomputed in the backward
        per_token = activations.per_input + per_token // activations.layers
    row = 2 * vocab if kept is None or kept >= vocab else kept * (4 if vocab <= 1 << 16 else 6)
    stored = new_tokens * (row + 8) + prompt_tokens * 4
    head_rows = max(vocabulary_sizes(vocab), default=0) * (config.num_assistant_tokens == "auto")
    head = head_rows * config_value(draft.get_text_config(decoder=True), "hidden_size") * small.dtype.itemsize
    cached = prompt_tokens + new_tokens
    draft_cached = cached if on_cpu else 1 << (cached - 1).bit_length()  # static caches
    parts = [
        Part("target: weights", _stored_bytes(large, target) if target_bytes is None else target_bytes),
        Part("target: cache", rows * cache_bytes(target, prompt_tokens, new_tokens, large.dtype)),
        Part("draft: cache", rows * cache_bytes(draft, prompt_tokens, draft_cached - prompt_tokens, small.dtype)),
        Part("draft: as it came", served),
        Part("draft: as it was", served + drafts * adapter),
        Part("draft: serving", drafts * (served if is_whole else version + served)),
        Part("draft: heads of its vocabulary", (1 + drafts) * head),
        Part("draft: version before", drafts * version, place=previous_place),
        Part("learner: master", drafts * (learns * FP32_BYTES) + frozen + adapter),
        Part("learner: average", drafts * learns * FP32_BYTES * (config.weight_average > 0)),
        Part("learner: optimizer", drafts * (in_muon + 2 * (learns - in_muon)) * FP32_BYTES),
        Part("learner: gradients", learns * FP32_BYTES, "step"),
        Part("learner: weights in bf16", (count - num_shared) * 2 * (is_half and place != "host"), "step"),
        Part("learner: activations", requests * length * per_token, "step"),
        Part("learner: logits", min(requests * answer * vocab, CHUNK_LOGITS) * FP32_BYTES * LOGITS_COPIES, "step"),
        Part("gate: version tried", (version if is_whole else version + served) * config.gate, "trial"),
        Part("gate: logits", MAX_LOGITS * FP32_BYTES * config.gate, "trial"),
        Part("replay buffer", drafts * config.buffer_size * stored, place="host"),
        Part("past text", EARLIER_TEXT_BYTES * config.reads_text, place="host"),
    ]
    parts = [replace(part, place=place) if part.name.startswith("learner:") else part for part in parts if part.bytes]
    return MemoryPlan(tuple(parts), count, learns, requests * length)


def empty_model(config: PreTrainedConfig, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """Build a model without weights; raises UnsupportedModelError."""
    plain = copy.deepcopy(config)
    plain._attn_implementation = None  # transformers' choice, which needs no kernel of the real device
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        with init_empty_weights(include_buffers=True):
            dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
            model: PreTrainedModel = auto.from_config(plain, dtype=dtype).eval()
    except (ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UnsupportedModelError(f"No model can be built from this configuration: {first_line(error)}.") from error
    return model


def cache_bytes(config: PreTrainedConfig, prompt_tokens: int, new_tokens: int, dtype: torch.dtype) -> int:
    """Return the size of the keys and values of one row."""
    text = config.get_text_config(decoder=True)

    def first(*names: str) -> Any:
        return next((value for name in names if (value := config_value(text, name))), None)

    queries = first("decoder_attention_heads", "num_attention_heads")
    heads, width = first("num_key_value_heads") or queries, first("head_dim", "d_kv") or text.hidden_size // queries
    layers, length = first("num_decoder_layers", "decoder_layers", "num_hidden_layers"), prompt_tokens + new_tokens
    kinds = first("layer_types") or ["full_attention"] * layers
    lengths = [min(length, text.sliding_window) if kind == "sliding_attention" else length for kind in kinds]
    return int(2 * heads * width * sum(lengths) * dtype.itemsize)


def _stored_bytes(model: PreTrainedModel, config: PreTrainedConfig) -> int:
    """Return the size of the weights, with linear layers in the bits of the configuration's quantization."""
    sizes, quantization = compute_module_sizes(model), getattr(config, "quantization_config", None)
    if quantization is None:
        return int(sizes[""])
    known = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    if known.get("load_in_8bit") or "fp8" in str(known.get("quant_method", "")).lower():
        bits: float | None = 8.0
    else:
        bits = 4.5 if known.get("load_in_4bit") else known.get("bits")  # with scales of 64 weights
    if bits is None:
        raise UnsupportedModelError("The quantization names no bits per weight. Pass `target_bytes`, or leave it out.")
    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
    quantized = sum(sizes[f"{name}.weight"] for name in linear)
    return int(sizes[""] - quantized * (1 - bits / (8 * model.dtype.itemsize)))


def _numel(parameters: Iterable[torch.Tensor]) -> int:
    return int(sum(p.numel() for p in parameters))
