"""What a pair that learns will take in memory, and learning in time, from the configurations alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from osd_hf.acceptance import MAX_REQUESTS
from osd_hf.chunked_loss import SampledTail
from osd_hf.config import OnlineConfig
from osd_hf.decoding.batch import first_columns, grown
from osd_hf.decoding.forward import compiles_draft, hindrance, static_sizes
from osd_hf.decoding.text import EARLIER_TEXT_BYTES
from osd_hf.errors import UnsupportedModelError, first_line
from osd_hf.learning.activations import Activations
from osd_hf.learning.learner import SCORED_AT_ONCE
from osd_hf.learning.optimizer import AT_ONCE, NS_STEPS, hidden_matrices
from osd_hf.learning.placement import HALF, is_half_only
from osd_hf.learning.updater import BATCH_POSITIONS, MAX_LEARN_TOKENS, trainable_parameters
from osd_hf.learning.weights import adapted
from osd_hf.models import config_value, unwrap, vocab_size_of
from osd_hf.replay import CHUNK_LOGITS, MAX_LOGITS
from osd_hf.speedup import expected_block_efficiency

__all__ = ["DEVICES", "Device", "MemoryPlan", "Part", "memory_plan"]

FP32 = 4  # bytes
LOGITS_COPIES = 4  # of a chunk: logits, log-probs, and the gradients of both
MUON_COPIES = 5  # of the matrices that are iterated together
PROBED = 16  # tokens of the sequence that activations are counted on
_ACTIVATIONS: dict[tuple[str, str | None], int] = {}  # bytes a token, by configuration
ALPHA, K = 0.6, 5  # acceptance and tokens a round that times are estimated for
EFFICIENCY = 0.5  # of a device's peak that matrix products reach


class Device(NamedTuple):
    """Figures of a data sheet: fp32 operations a second without tensor cores, half-precision ones, and bytes a
    second."""

    fp32_flops: float
    half_flops: float
    bandwidth: float


DEVICES = {
    "H100 SXM": Device(67e12, 989e12, 3.35e12),
    "A100 80GB": Device(19.5e12, 312e12, 2.04e12),
    "L4": Device(30.3e12, 121e12, 0.30e12),
    "RTX 4090": Device(82.6e12, 165e12, 1.01e12),
}


@dataclass(frozen=True)
class Part:
    """
    Memory for one purpose.

    Args:
        name (`str`): What it is for.
        bytes (`int`): How much.
        when (`str`): `"always"`; `"step"`, while a step of learning is under way; `"trial"`, while a version is tried.
        place (`str`): `"device"`, that of the models; `"learner"`, another accelerator that learning has to itself; or
            `"host"`.
    """

    name: str
    bytes: int
    when: Literal["always", "step", "trial"] = "always"
    place: Literal["device", "learner", "host"] = "device"


@dataclass(frozen=True)
class MemoryPlan:
    """
    What a pair takes once two versions of its draft have served: a model of it, which knows neither what the process
    itself takes nor what an allocator leaves unused, nor what graphs of kernels do that were captured.

    Args:
        parts (`tuple[Part, ...]`): By purpose.
        draft_parameters (`int`), learned_parameters (`int`): Of the draft; those that learn, an adapter's perhaps.
        learn_tokens (`int`): Tokens of the largest micro-batch, prompts included.
        learning_share (`Mapping[str, float]`):
            By device, the share of the time that learning takes at full effort while requests come without a pause, by
            its operations and by the bytes that are read: a lower bound of both times, at an acceptance of 0.6, 5
            tokens a round, and half of the peak. Starting kernels takes longer than this where models are small. Empty
            where the draft learns on another device.
    """

    parts: tuple[Part, ...]
    draft_parameters: int
    learned_parameters: int
    learn_tokens: int
    learning_share: Mapping[str, float]

    def bytes(self, *, when: str = "always", place: str = "device") -> int:
        """Bytes that are taken at a time, at a place."""
        return sum(part.bytes for part in self.parts if (part.when, part.place) == (when, place))

    def most_bytes(self, place: str) -> int:
        """Most bytes at a place: in a step or while a version is tried, whichever is more."""
        return self.bytes(place=place) + max(self.bytes(when=when, place=place) for when in ("step", "trial"))

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device of the models."""
        return self.most_bytes("device")

    def to_dict(self) -> dict[str, Any]:
        """Field by field and the totals, ready for JSON."""
        totals = {"always_bytes": self.bytes(), "peak_bytes": self.peak_bytes}
        return asdict(self) | totals | {f"{place}_bytes": self.most_bytes(place) for place in ("learner", "host")}


def memory_plan(
    target: Any, draft: Any, config: OnlineConfig | None = None, *, peft_config: Any = None,
    target_dtype: Any = "auto", draft_dtype: Any = "auto", target_bytes: int | None = None, prompt_tokens: int = 512,
    new_tokens: int = 256, rows: int = 1, drafts: int = 1, device_type: str = "cuda",
) -> MemoryPlan:  # fmt: skip
    """
    Plan the memory of a pair. No weights are loaded.

    Args:
        target (`PreTrainedConfig`), draft (`PreTrainedConfig`): The configurations of the models.
        config (`OnlineConfig`, *optional*): How to draft and learn.
        peft_config (`peft.PeftConfig`, *optional*): Adapters that learn; by default the whole draft does.
        target_dtype (`str` or `torch.dtype`, *optional*), draft_dtype (`str` or `torch.dtype`, *optional*):
            Of the weights; `"auto"` is what the configuration names. Quantized weights of a target have the bits that
            its `quantization_config` names.
        target_bytes (`int`, *optional*): Of the target's weights, where they are known.
        prompt_tokens (`int`, *optional*, defaults to 512), new_tokens (`int`, *optional*, defaults to 256):
            Of a request.
        rows (`int`, *optional*, defaults to 1):
            Prompts that are answered at once. Their caches have room for tokens to come, and no windows.
        drafts (`int`, *optional*, defaults to 1): Drafts of domains that have learned.
        device_type (`str`, *optional*, defaults to `"cuda"`):
            Where the draft lies. On an accelerator `compile_draft="auto"` captures or compiles it, over static caches
            whose sizes are powers of two, and versions of a whole draft that no model serves with lie in main memory.

    Raises:
        UnsupportedModelError: a model that cannot be built from its configuration, or adapters that do not fit it.
    """
    config = config or OnlineConfig()
    if vocab_size_of(draft) != vocab_size_of(target):  # as `align_vocab` makes it
        draft = copy.deepcopy(draft)
        draft.get_text_config().vocab_size = vocab_size_of(target)
    large, small = skeleton(target, target_dtype), skeleton(draft, draft_dtype)
    learner = small if peft_config is None else adapted(skeleton(draft, draft_dtype), peft_config, "default", 0)
    if target_bytes is None:
        target_bytes = stored_bytes(large, target)
    activations = Activations.of(learner)
    length = min(prompt_tokens + new_tokens, MAX_LEARN_TOKENS, activations.most_tokens)
    answer = min(new_tokens, length)
    requests = _requests_at_once(config, activations, vocab_size_of(draft), length, answer)
    sizes = dtype_of(target, target_dtype).itemsize, dtype_of(draft, draft_dtype).itemsize
    is_compiled = compiles_draft(config, device_type) and hindrance(draft) is None
    static = (
        sum(static_sizes(prompt_tokens, prompt_tokens + new_tokens)) - prompt_tokens if is_compiled else new_tokens
    )
    parts = [
        Part("target: weights", target_bytes),
        Part("target: cache", cache_bytes(target, prompt_tokens, new_tokens, sizes[0], rows)),
        Part("draft: cache", cache_bytes(draft, prompt_tokens, static if rows == 1 else new_tokens, sizes[1], rows)),
        *_of_weights(
            small,
            learner,
            config,
            is_whole=peft_config is None,
            is_compiled=is_compiled,
            drafts=drafts,
            aside="device" if device_type == "cpu" else "host",
        ),
        Part("learner: activations", _kept_bytes(draft, activations, requests, length), "step"),
        *_of_requests(learner, config, requests * answer, prompt_tokens, new_tokens, drafts),
    ]
    place = _learners_place(config)
    parts = [replace(part, place=place) if part.name.startswith("learner:") else part for part in parts if part.bytes]
    tokens = requests * length
    learns = _numel(trainable_parameters(learner).values())
    shares = {}
    if place == "device":
        shares = _learning_shares(large, small, learner, config, target_bytes, prompt_tokens, new_tokens)
    return MemoryPlan(tuple(parts), _numel(small.parameters()), learns, tokens, shares)


def _learners_place(config: OnlineConfig) -> Literal["device", "learner", "host"]:
    if config.learner_device is None:
        return "device"
    return "host" if torch.device(config.learner_device).type == "cpu" else "learner"


def _learns_in_bf16(small: Any, config: OnlineConfig) -> bool:
    """Whether steps compute in bf16, as on an accelerator."""
    return _learners_place(config) != "host" and small.dtype in HALF


def _learning_shares(
    large: Any, small: Any, learner: Any, config: OnlineConfig, target_bytes: int, prompt_tokens: int, new_tokens: int
) -> dict[str, float]:
    """Share of the time that learning takes, by device."""
    count, learned = _numel(small.parameters()), trainable_parameters(learner)
    learns, iterated = _numel(learned.values()), _iterations(hidden_matrices(learner, learned, config))
    draft_bytes = sum(p.nbytes for p in small.parameters())
    requests, is_bf16 = _batch(config, new_tokens), _learns_in_bf16(small, config)
    products = count * requests * (prompt_tokens + new_tokens)
    if rows := _rows_of_head(learner, config, requests * new_tokens):
        head = small.get_output_embeddings().weight
        products += requests * (rows * head.shape[1] * new_tokens - head.numel() * (prompt_tokens + new_tokens))
    shares = {}
    for name, device in DEVICES.items():
        flops = device.half_flops if is_bf16 else device.fp32_flops
        # Frozen weights get no gradients: two passes in place of three.
        step = (6 if learns == count else 4) * products / flops / EFFICIENCY
        step += iterated / device.half_flops / EFFICIENCY
        step += 10 * learns * FP32 / device.bandwidth  # weights, averages, gradients and states, read and written
        learning = config.steps_per_update * step / config.update_interval
        rounds = new_tokens / expected_block_efficiency(ALPHA, K)
        serving = rounds * (target_bytes + K * draft_bytes) / device.bandwidth
        serving += 2 * _numel(large.parameters()) * prompt_tokens / device.half_flops / EFFICIENCY
        shares[name] = learning / (learning + serving)
    return shares


def _batch(config: OnlineConfig, new_tokens: int) -> int:
    """Requests in the batch of one step."""
    positions = BATCH_POSITIONS
    return max(min(config.batch_size, positions // new_tokens), 1)


def _of_weights(
    small: Any, learner: Any, config: OnlineConfig, *, is_whole: bool, is_compiled: bool, drafts: int,
    aside: Literal["device", "host"],
) -> list[Part]:  # fmt: skip
    """What the weights of drafts and their learners take; `aside` is where those of whole drafts are that no model
    serves with."""
    count, learned = _numel(small.parameters()), trainable_parameters(learner)
    learns, matrices = _numel(learned.values()), hidden_matrices(learner, learned, config)
    buffers = sum(b.nbytes for b in small.buffers())
    size = next(small.parameters()).element_size()
    served, muon = count * size + buffers, _numel(matrices)
    adapter = 0 if is_whole else learns * FP32
    version = learns * size if is_whole else adapter
    # Beside adapters, what is in fp32 already lies where the base does.
    frozen = 0 if is_whole or (size == FP32 and _learners_place(config) == "device") else count * FP32
    masters = drafts * buffers if is_whole else 2 * buffers + adapter  # and what versions are merged with
    # A copy that serves has the weights of its version, unless these are an adapter's, or a graph has captured where
    # its own lie.
    copies = buffers if is_whole else served
    changed = 0 if is_whole else size * _numel(p for p in _below_adapters(learner))
    iterated = min(muon, max(AT_ONCE, max((p.numel() for p in matrices), default=0)))
    return [
        Part("draft: as it came", served),
        Part("draft: as it was", served + drafts * adapter),
        Part("draft: serving", drafts * (version + copies)),
        Part("draft: version that serves", drafts * count * size * (is_whole and is_compiled), place=aside),
        Part("draft: version before", drafts * version, place=aside if is_whole else "device"),
        Part("learner: master", drafts * learns * FP32 + frozen + masters),
        Part("learner: average", drafts * learns * FP32 * (config.weight_average > 0)),
        Part("learner: optimizer", drafts * (muon + 2 * (learns - muon)) * FP32),
        Part("learner: gradients", learns * FP32, "step"),
        Part("learner: weights in bf16", count * 2 * _learns_in_bf16(small, config), "step"),
        Part("learner: Muon", MUON_COPIES * FP32 * iterated, "step"),
        Part("gate: version tried", (version + buffers + changed) * config.gate, "trial"),
    ]


def _rows_of_head(learner: Any, config: OnlineConfig, positions: int) -> int:
    """Rows of the head that the logits of so many positions are computed with, at most; 0 where all are, in place."""
    vocab, kept = vocab_size_of(learner), config.num_logprobs
    tail = SampledTail.where_large(learner, config.seed)
    return 0 if tail is None or kept is None or kept >= vocab else min(positions * kept + tail.size, vocab)


def _of_requests(
    learner: Any, config: OnlineConfig, positions: int, prompt_tokens: int, new_tokens: int, drafts: int
) -> list[Part]:
    """What the logits of learning and judging take, so many positions at once, and what keeping requests does."""
    vocab, kept = vocab_size_of(learner), config.num_logprobs
    rows = _rows_of_head(learner, config, positions)
    taken = rows * unwrap(learner).get_output_embeddings().weight.shape[1] * FP32 if rows else 0
    row = 2 * vocab if kept is None or kept >= vocab else kept * (2 + (2 if vocab <= 1 << 16 else 4))
    chunk = min(positions * (rows or vocab), CHUNK_LOGITS)
    replayed = min(SCORED_AT_ONCE[config.update_strategy] * new_tokens * vocab, MAX_LOGITS)
    trace = new_tokens * (row + 8) + prompt_tokens * 4
    return [
        Part("learner: logits", chunk * FP32 * LOGITS_COPIES, "step"),
        Part("learner: rows of the head", 2 * taken, "step"),  # and their gradients
        Part("gate: logits", replayed * FP32 * config.gate, "trial"),
        Part("replay buffer", drafts * config.buffer_size * trace, place="host"),
        Part("past text", EARLIER_TEXT_BYTES * config.reads_text, place="host"),
        Part("counts", MAX_REQUESTS * 2 * 16, place="host"),
    ]


def _requests_at_once(config: OnlineConfig, activations: Activations, vocab: int, length: int, answer: int) -> int:
    """Requests of so many tokens, with answers of so many, in a micro-batch."""
    most = max(min(_batch(config, answer), MAX_LOGITS // (answer * vocab)), 1)
    return next((n for n in range(most, 1, -1) if activations.fit(n, length)), 1)


def _kept_bytes(draft: Any, activations: Activations, requests: int, length: int) -> int:
    """What a micro-batch keeps for its backward: of one request that is too long, the inputs of the layers, and one
    layer at a time."""
    each = activation_bytes(draft)
    if not activations.fit(requests, length) and activations.layers > 1:
        each = activations.per_input + each // activations.layers
    return requests * length * each


def _iterations(matrices: list[torch.nn.Parameter]) -> float:
    """Operations with which Muon makes the momentum of matrices orthogonal."""
    shapes = [sorted(p.shape) for p in matrices]
    return float(sum(NS_STEPS * (4 * m * m * n + 2 * m**3) for m, n in shapes))


def _numel(parameters: Iterable[torch.Tensor]) -> int:
    return int(sum(p.numel() for p in parameters))


def _below_adapters(learner: Any) -> list[torch.nn.Parameter]:
    """Weights of the base that an adapter is merged into."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module.get_base_layer() for module in learner.modules() if isinstance(module, BaseTunerLayer)]
    return list({id(p): p for layer in layers for p in layer.parameters() if not p.requires_grad}.values())


# --- from a configuration -------------------------------------------------------------------------------------------


def dtype_of(config: Any, dtype: Any = "auto") -> torch.dtype:
    """The dtype that weights are loaded in; `"auto"` is the configuration's own."""
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    found: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return found


def skeleton(config: Any, dtype: Any = "auto") -> Any:
    """A model without weights; raises UnsupportedModelError where none can be made of the configuration."""
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return auto.from_config(_plain(config), dtype=dtype_of(config, dtype)).eval()
    except (ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UnsupportedModelError(f"No model can be made of this configuration: {first_line(error)}.") from error


def _plain(config: Any) -> Any:
    """A copy of a configuration that a model can be made of anywhere, and in fp32."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    if is_half_only(plain._attn_implementation):
        plain._attn_implementation = None  # transformers' own choice
    return plain


def stored_bytes(model: Any, config: Any) -> int:
    """Bytes of a model's weights, those that its configuration says are quantized in as many bits as it names."""
    bits = _bits(getattr(config, "quantization_config", None))
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    quantized = {id(layer.weight) for layer in layers} if bits is not None else set()
    total = sum(p.numel() * bits / 8 if bits and id(p) in quantized else p.nbytes for p in model.parameters())
    return int(total + sum(b.nbytes for b in model.buffers()))


def _bits(quantization: Any) -> float | None:
    """Bits of a quantized weight, scales included; `None` where weights are as their dtype says."""
    if quantization is None:
        return None
    known = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    method = str(known.get("quant_method", "")).rsplit(".")[-1].lower()
    if known.get("load_in_8bit") or "fp8" in method:
        return 8.0
    if known.get("load_in_4bit"):
        return 4 + (0.127 if known.get("bnb_4bit_use_double_quant") else 0.5)  # a scale of 8 or 32 bits for 64 weights
    bits, group = known.get("bits") or known.get("w_bit"), known.get("group_size") or known.get("q_group_size") or -1
    if bits is None:
        raise UnsupportedModelError(
            f"How many bits a weight has with the quantization {method or 'of this configuration'!r} is not known "
            "here. Pass `target_bytes`, or a configuration without it."
        )
    return float(bits + (16 + bits) / group if group > 0 else bits)


def cache_bytes(config: Any, prompt_tokens: int, new_tokens: int, size: int, rows: int = 1) -> int:
    """Bytes of the keys and values of so many requests, of `size` bytes each."""
    text = config.get_text_config(decoder=True)

    def first(*names: str) -> Any:
        return next((value for name in names if (value := config_value(text, name))), None)

    layers = first("num_decoder_layers", "decoder_layers", "num_hidden_layers")
    queries = first("decoder_attention_heads", "num_attention_heads")
    heads, width = first("num_key_value_heads") or queries, first("head_dim", "d_kv") or text.hidden_size // queries
    whole = prompt_tokens + new_tokens
    kinds = first("layer_types") or ["full_attention"] * layers
    lengths = [min(whole, text.sliding_window) if kind == "sliding_attention" else whole for kind in kinds]
    if config.is_encoder_decoder:  # the answer's own, and those of the source
        lengths = [new_tokens + prompt_tokens] * layers
    elif rows > 1:
        held = first_columns(prompt_tokens, new_tokens)
        while held < whole:
            held = grown(held, held + 1)
        lengths = [held] * layers
    return int(2 * heads * width * sum(lengths) * size * rows)


def activation_bytes(config: Any) -> int:
    """Bytes a token that a forward in fp32 keeps for its backward, the output head's left out: of a forward that
    computes nothing, which takes some seconds for a large model, and is asked for once."""
    plain = _plain(config)
    key = (repr(plain), plain._attn_implementation)
    if key not in _ACTIVATIONS:
        _ACTIVATIONS[key] = _kept_by_a_forward(plain)
    return _ACTIVATIONS[key]


def _kept_by_a_forward(config: Any) -> int:
    with FakeTensorMode():
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32).eval()
        others = {p.untyped_storage()._cdata for p in model.parameters()}
        kept: dict[int, Any] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in others:
                kept[storage._cdata] = storage
            return tensor

        ids = torch.zeros(1, PROBED, dtype=torch.long)
        given = {"decoder_input_ids": ids} if config.is_encoder_decoder else {"logits_to_keep": 1}
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=ids, use_cache=False, **given)
        return int(sum(storage.nbytes() for storage in kept.values())) // PROBED
