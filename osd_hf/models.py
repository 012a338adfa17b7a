"""Load models and tokenizers by name, unwrap models, and check that a target and a draft fit together."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import linear
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    TorchAoConfig,
)
from transformers.utils import cached_file, extract_commit_hash

from osd_hf.errors import ConfigError, UnsupportedModelError, VocabularyMismatchError, first_line
from osd_hf.utils.context import Seeded
from osd_hf.utils.kernels import fast_kernels

logger = logging.getLogger(__name__)

Quantization = Literal["4bit", "8bit", "int8"]
# Arguments of `from_pretrained` that locate files.
HUB_ARGUMENTS = "cache_dir force_download local_files_only revision subfolder token trust_remote_code".split()
MAKE_ADVICE = "make one from the target with `make_draft`, or choose a draft of the target's family"
SHARED_SETTING = "osd_hf_shares_ends"  # in the configuration of a draft whose embeddings or head are the target's
# Kinds of layers in configurations.
FULL, SLIDING = "full_attention", "sliding_attention"
# Tokenizers of models that were loaded by name, fetched with the same arguments.
TOKENIZERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


# --- wrapped models -------------------------------------------------------------------------------------------------


def uncompiled(model: Any) -> Any:
    """Return the model inside a `torch.compile` wrapper, or the model itself."""
    return getattr(model, "_orig_mod", model)


def is_peft(model: Any) -> bool:
    """Return whether the model is a `PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def has_soft_prompt(model: Any) -> bool:
    """Return whether the model is a `PeftModel`, compiled or not, with an active soft prompt."""
    model = uncompiled(model)
    return is_peft(model) and bool(getattr(model.active_peft_config, "is_prompt_learning", False))


def unwrap(model: Any) -> Any:
    """Return the transformers model inside `torch.compile` and `PeftModel` wrappers."""
    inner = uncompiled(model)
    inner = inner.get_base_model() if is_peft(inner) else inner
    return model if inner is model else unwrap(inner)


def modules_of(model: Any) -> list[Any]:
    """Return each module of a model once. Called for every request, because `model.modules()` takes longer."""
    found, waiting = dict[Any, None](), [model]
    for module in waiting:
        if module is not None and module not in found:
            found[module] = None
            waiting += module._modules.values()
    return list(found)


def merged(model: Any) -> Any:
    """Return a copy of a `PeftModel` as an ordinary model, its adapter merged into the weights; the model itself if it
    has no adapter, or a soft prompt. Raises UnsupportedModelError if PEFT cannot merge the adapter."""
    if not is_peft(model) or not hasattr(model.base_model, "merge_and_unload"):
        return model
    model = copy.deepcopy(model)
    inner = model.get_base_model()
    ends = inner.get_output_embeddings(), inner.get_input_embeddings()
    if any(hasattr(end, "base_layer") for end in ends) and ends[0].weight is ends[1].weight:
        untie(inner)
    try:
        return model.merge_and_unload()
    except (NotImplementedError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"The adapter ({type(model.active_peft_config).__name__}) cannot be merged into the weights: "
            f"{first_line(error)}. Use an adapter that PEFT can merge, such as LoRA, or the model without it."
        ) from error


def untie(model: PreTrainedModel) -> None:
    """Copy the shared embedding weights into a separate output head. An adapter that is merged into tied weights would
    change both."""
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


# --- facts and settings ---------------------------------------------------------------------------------------------


def vocab_size_of(model: Any) -> int:
    """Return the number of logits of a model, given the model or its configuration."""
    return int(getattr(model, "config", model).get_text_config().vocab_size)


def config_value(config: PreTrainedConfig, name: str) -> Any:
    """Return a setting of a configuration; `None` if it has none, or one for each layer (heterogeneous models)."""
    with contextlib.suppress(RuntimeError):  # transformers' own error for settings of single layers
        return getattr(config, name, None)
    return None


def num_positions(config: PreTrainedConfig) -> int | None:
    """Return the maximum number of positions of a model, or of its decoder; `None` if there is no limit."""
    text = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_target_positions")
    return next((int(value) for name in names if (value := config_value(text, name))), None)


def prompt_room(target_config: PreTrainedConfig, draft_config: PreTrainedConfig, max_new_tokens: int) -> int | None:
    """Return the maximum number of prompt tokens that leaves room for the answer; `None` if there is no limit. The
    answer of an encoder-decoder has separate positions. Raises ConfigError if nothing fits."""
    known = [size for config in (target_config, draft_config) if (size := num_positions(config)) is not None]
    if not known:
        return None
    is_separate, positions = target_config.is_encoder_decoder, min(known)
    prompt_tokens = 0 if is_separate else 1  # at least
    if max_new_tokens + prompt_tokens > positions:
        problem = "do not fit" if is_separate else "leave no room for a prompt"
        raise ConfigError(f"{max_new_tokens} new tokens {problem}: the models have {positions} positions.")
    return positions if is_separate else positions - max_new_tokens


def eos_ids(config: Any) -> tuple[int, ...]:
    """Return the end-of-sequence ids of a configuration or mapping, which may hold one, several, a tensor, or none."""
    eos = config.get("eos_token_id") if isinstance(config, Mapping) else getattr(config, "eos_token_id", None)
    eos = eos.tolist() if isinstance(eos, torch.Tensor) else eos
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def until_end(answer: NDArray[np.int32], config: Any) -> NDArray[np.int32]:
    """Cut an answer after its first end-of-sequence token."""
    found = np.flatnonzero(np.isin(answer, eos_ids(config)))
    return answer[: found[0] + 1] if len(found) else answer


def set_fixed_k(generation_config: GenerationConfig, k: int | None = None) -> None:
    """Change a draft's generation config so that each round drafts the same number of tokens: `k`, or the number that
    is already set."""
    if k is not None:
        generation_config.num_assistant_tokens = k
    generation_config.num_assistant_tokens_schedule = "constant"
    generation_config.assistant_confidence_threshold = 0.0


@contextlib.contextmanager
def fixed_k(draft: Any, k: int | None = None) -> Iterator[None]:
    """Apply [`set_fixed_k`] to a copy of the draft's generation config inside the block."""
    model = unwrap(draft)
    before, model.generation_config = model.generation_config, copy.deepcopy(model.generation_config)
    set_fixed_k(model.generation_config, k)
    try:
        yield
    finally:
        model.generation_config = before


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the block, and restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device for the input ids. Offloaded models take them on the CPU."""
    device: torch.device = model.device
    return torch.device("cpu") if device.type == "meta" else device


def device_clock(model: PreTrainedModel) -> Callable[[], float]:
    """Return a clock in seconds that waits until the model's device has finished its work."""

    def clock() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter()

    return clock


# --- loading --------------------------------------------------------------------------------------------------------


def load_config(source: str, **model_kwargs: Any) -> PreTrainedConfig:
    """Load a configuration, with the commit of the Hub as its `_commit_hash`; raises UnsupportedModelError."""
    arguments = hub_arguments(model_kwargs)
    config: PreTrainedConfig = _load(AutoConfig, source, **arguments)
    place = {name: value for name, value in arguments.items() if name in ("cache_dir", "revision", "subfolder")}
    config._commit_hash = extract_commit_hash(cached_file(source, "config.json", local_files_only=True, **place), None)
    return config


def load_tokenizer(source: str, **model_kwargs: Any) -> Any:
    """Load the tokenizer of a model; raises UnsupportedModelError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(source, **hub_arguments(model_kwargs))
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UnsupportedModelError(f"{source!r} has no tokenizer that loads: {first_line(error)}.") from error


def load_eos_ids(source: str, **model_kwargs: Any) -> tuple[int, ...]:
    """Return the end-of-sequence ids of a model's generation config, or of its configuration."""
    try:
        return eos_ids(GenerationConfig.from_pretrained(source, **hub_arguments(model_kwargs)))
    except (OSError, ValueError):
        return eos_ids(load_config(source, **model_kwargs))


def quantization_config(name: Quantization, dtype: str = "auto") -> Any:
    """Return the quantization config for `"4bit"` (NF4), `"8bit"` (both bitsandbytes) or `"int8"` (torchao, weights
    only); raises ConfigError if the package is missing."""
    package = "torchao" if name == "int8" else "bitsandbytes"
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"The quantization {name!r} needs {package}: pip install {package}.")
    if name == "int8":
        return TorchAoConfig(importlib.import_module("torchao.quantization").Int8WeightOnlyConfig())
    if name == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = "bfloat16" if dtype == "auto" else dtype
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


def load_model(
    source: str,
    *,
    dtype: Any = "auto",
    device: Any = None,
    device_map: Any = None,
    quantization: Quantization | None = None,
    **model_kwargs: Any,
) -> PreTrainedModel:
    """Load a model in evaluation mode from the Hub or a folder, by default in the dtype of the checkpoint, on a CUDA
    device if there is one. `device_map` replaces `device`; the other arguments are those of `from_pretrained` and
    [`quantization_config`]. Raises UnsupportedModelError, and ConfigError if the device does not exist or a package is
    missing."""
    dtype = model_kwargs.pop("torch_dtype", dtype)  # the older name, which `from_pretrained` would overrule
    config = load_config(source, **model_kwargs)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if quantization is not None:
        model_kwargs["quantization_config"] = quantization_config(quantization, dtype)
    if model_kwargs.get("quantization_config") is not None:
        device_map = device_map or device  # quantized weights cannot be moved afterwards
    if device_map is not None:
        model_kwargs["device_map"] = device_map
    model = _load(auto, source, dtype=dtype, **model_kwargs)
    model = model if device_map is not None else placed(model, device)
    model.config._commit_hash = getattr(config, "_commit_hash", None)
    return model.eval()


def placed(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Move a model to a device; raises ConfigError if the device cannot be used."""
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"The device {device!r} cannot be used: {first_line(error)}.") from error


def _load(auto: Any, source: str, **kwargs: Any) -> Any:
    try:
        return auto.from_pretrained(source, **kwargs)
    except (OSError, ValueError, ImportError, TypeError) as error:
        raise UnsupportedModelError(f"The model {source!r} cannot be loaded: {first_line(error)}.") from error


def hub_arguments(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: model_kwargs[name] for name in HUB_ARGUMENTS if name in model_kwargs}


# --- tokenizers and vocabularies ------------------------------------------------------------------------------------


def find_tokenizer(model: Any) -> Any:
    """Return the tokenizer that a model was loaded with by name, or the one in its folder or in the local cache,
    without running its code. `None` if there is none."""
    found = TOKENIZERS.get(model) if isinstance(model, torch.nn.Module) else None
    if found is not None or not model.config.name_or_path:
        return found
    with contextlib.suppress(UnsupportedModelError):
        return load_tokenizer(model.config.name_or_path, local_files_only=True, trust_remote_code=False)
    return None


def common_tokenizer(given: Any, target: Any, draft: Any) -> Any:
    """Return the given tokenizer, the target's, or the draft's; raises VocabularyMismatchError if they differ."""
    found = [given, *(find_tokenizer(model) for model in (target, draft) if model is not None)]
    known = [tokenizer for tokenizer in found if tokenizer is not None]
    for other in known[1:]:
        check_tokenizers(known[0], other)
    return known[0] if known else None


def with_tokenizer(model: Any, model_kwargs: Mapping[str, Any]) -> Any:
    with contextlib.suppress(UnsupportedModelError):
        TOKENIZERS[model] = load_tokenizer(model.config.name_or_path, **model_kwargs)
    return model


def check_tokenizers(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Refuse tokenizers with vocabularies that differ in more than added tokens; raises VocabularyMismatchError.
    Added tokens, such as those of a chat template, are learned."""
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if ours == theirs:
        return
    added = target_tokenizer.get_added_vocab().keys() | draft_tokenizer.get_added_vocab().keys()
    names = sorted((ours.keys() | theirs.keys()) - added)
    tokens = [(token, ours.get(token), theirs.get(token)) for token in names if ours.get(token) != theirs.get(token)]
    if not tokens:
        return
    shown = ", ".join(f"{token!r} ({target_id} / {draft_id})" for token, target_id, draft_id in tokens[:3])
    raise VocabularyMismatchError(
        f"The tokenizers of target and draft differ in {len(tokens)} tokens, such as {shown}. The draft must have the "
        f"target's tokenizer: {MAKE_ADVICE}."
    )


def align_vocab(draft: Any, target: PreTrainedModel, tokenizer: Any = None) -> Any:
    """
    Return a draft with the target's vocabulary size, which assisted generation, TRL and vLLM need. Models of one
    family often have embeddings padded to different sizes (Qwen2.5-0.5B has 151,936 rows, 7B 152,064), or added
    tokens. New rows are close to the mean of the old ones. The result is the draft itself if the sizes are equal,
    otherwise a copy in evaluation mode. By default both tokenizers are loaded from the models' sources and compared.

    Raises VocabularyMismatchError if the vocabularies differ in more than padding and added tokens, the tokenizers
    cannot be found, or an adapter of the draft changes the layers to resize.
    """
    size, old_size = vocab_size_of(target), vocab_size_of(draft)
    if size == old_size:
        return draft
    if tokenizer is None:
        tokenizer, draft_tokenizer = find_tokenizer(target), find_tokenizer(draft)
        if tokenizer is None or draft_tokenizer is None:
            raise VocabularyMismatchError(
                f"The target has {size} tokens, the draft {old_size}, and no tokenizers were found where they came "
                f"from ({target.config.name_or_path!r}, {draft.config.name_or_path!r}), so it cannot be checked that "
                "they share one. Pass `tokenizer=`, the tokenizer of both."
            )
        check_tokenizers(tokenizer, draft_tokenizer)
    added = tokenizer.get_added_vocab()
    highest = max((i for token, i in tokenizer.get_vocab().items() if token not in added), default=0)
    if highest >= min(size, old_size):
        raise VocabularyMismatchError(
            f"The tokenizer uses ids up to {highest}, but the target has {size} rows and the draft {old_size}: they "
            f"differ in more than padding and added tokens. Another draft is needed: {MAKE_ADVICE}."
        )
    aligned = copy.deepcopy(draft)
    if draft in TOKENIZERS:
        TOKENIZERS[aligned] = TOKENIZERS[draft]
    ends = (aligned.get_input_embeddings(), aligned.get_output_embeddings())
    if not all(end is None or isinstance(end, torch.nn.Embedding | torch.nn.Linear) for end in ends):
        raise VocabularyMismatchError(
            f"The draft has {old_size} tokens instead of {size}, and its adapter changes the embeddings or the head. "
            "Merge the adapter into the draft first."
        )
    with Seeded(0):  # new rows are random, and a saved session needs the same ones
        aligned.resize_token_embeddings(size, mean_resizing=size > old_size)
    return aligned.eval()


# --- output heads and masks -----------------------------------------------------------------------------------------


def output_head(model: PreTrainedModel, ids: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from states to logits, of all tokens or of those with these ids: the output head and what
    some model families apply to its output."""
    inner = unwrap(model)
    config = inner.config.get_text_config(decoder=True)
    head, cap = inner.get_output_embeddings(), getattr(config, "final_logit_softcapping", None)
    bias, spread = getattr(inner, "final_logits_bias", None), getattr(inner, "spread", None)  # of a draft head
    scales = [getattr(config, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scales.append(1 / divisor)
    scale = next((scale for scale in scales if scale is not None), 1)

    if ids is not None:
        bias = None if bias is None else bias[..., ids]
        weight, head_bias = head.weight[ids], None if head.bias is None else head.bias[ids]

    def logits_of(states: torch.Tensor) -> torch.Tensor:
        with fast_kernels(head):
            logits: torch.Tensor = head(states) if ids is None else linear(states, weight.to(states), head_bias)
        if scale != 1:
            logits = logits * scale
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        logits = logits if bias is None else logits + bias.to(logits.device)
        return logits if spread is None else spread(logits)

    return logits_of


def model_masks(model: PreTrainedModel, mask: torch.Tensor, distance: torch.Tensor) -> Any:
    """Return an attention mask, bool, `(rows, 1, queries, keys)`, in the form that a model takes: by the kind of its
    layers, where it has several, and additive for eager attention. `distance` counts the positions from a key to a
    query, int64, and limits windows; it can be broadcast to the mask."""
    config = model.config.get_text_config(decoder=True)
    window, layer_types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    kinds = set(layer_types if layer_types is not None else [SLIDING] if window else ())
    masks = {FULL: mask}
    if SLIDING in kinds:
        masks[SLIDING] = mask & (distance < int(window or 0))
    if config._attn_implementation == "eager":
        lowest, zero = torch.finfo(model.dtype).min, torch.zeros((), dtype=model.dtype, device=mask.device)
        masks = {kind: zero.where(allowed, lowest) for kind, allowed in masks.items()}
    if SLIDING not in kinds:
        return masks[FULL]
    return masks[SLIDING] if layer_types is None else {kind: masks.get(kind) for kind in kinds}


# --- checks ---------------------------------------------------------------------------------------------------------


def check_pair(target: Any, draft: Any) -> None:
    """Refuse pairs of models that assisted generation does not support, apart from their vocabularies; without a
    target, check the draft alone. Raises UnsupportedModelError."""
    target, draft = unwrap(target), unwrap(draft)
    if target is not None and not (isinstance(target, GenerationMixin) and target.can_generate()):
        raise UnsupportedModelError(
            f"The target must be a transformers model that can `generate`, got {type(target).__name__}. Load it with "
            "a class that has a language modeling head, such as `AutoModelForCausalLM`."
        )
    _check_draft(draft)
    if target is not None and target.config.is_encoder_decoder != draft.config.is_encoder_decoder:
        kinds = ["encoder-decoder" if m.config.is_encoder_decoder else "decoder-only" for m in (target, draft)]
        raise UnsupportedModelError(
            f"Target ({kinds[0]}) and draft ({kinds[1]}) must be of one kind: the draft reads the target's input."
        )


def _check_draft(draft: Any) -> None:
    kind = type(draft).__name__
    if not callable(getattr(draft, "generate", None)) or not hasattr(draft, "generation_config"):
        raise UnsupportedModelError(f"The draft must be a transformers model that can `generate`, got {kind}.")
    if getattr(draft, "_is_stateful", False) and not _cache_can_be_cropped(draft):
        raise UnsupportedModelError(
            f"{kind} is stateful: its state cannot be rolled back when a drafted token is rejected. Use a draft with "
            "attention layers."
        )


def check_learner(draft: PreTrainedModel) -> None:
    """Refuse a draft with weights that cannot be trained; raises UnsupportedModelError."""
    kind, weights = type(draft).__name__, list(draft.parameters())
    if getattr(draft, "is_quantized", False) or not all(w.is_floating_point() for w in weights):
        raise UnsupportedModelError(
            f"The draft ({kind}) is quantized: its weights cannot learn, and no adapter can be merged into them. Load "
            "it without quantization; the target may be quantized."
        )
    if any(w.device.type == "meta" for w in weights):
        raise UnsupportedModelError(
            f"Weights of the draft ({kind}) are offloaded, so they cannot learn. Load all of them onto one "
            "device; the target may be offloaded."
        )


def _cache_can_be_cropped(draft: Any) -> bool:
    """Return whether rejected tokens can be removed from the cache of a stateful model that also has attention."""
    try:
        cache = DynamicCache(config=draft.config.get_text_config(decoder=True))
        cache.activate_past_recording()
        with torch.inference_mode():
            draft(input_ids=torch.zeros(1, 2, dtype=torch.long, device=draft.device), past_key_values=cache)
        cache.crop(-1)
        return int(cache.get_seq_length()) == 1
    except Exception as error:  # noqa: BLE001 - requests would fail with the same error
        logger.info("The cache of the draft cannot be cropped: %s", first_line(error))
        return False
