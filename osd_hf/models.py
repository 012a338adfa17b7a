"""A target, a draft and their tokenizer: how they are loaded and unwrapped, and whether they fit together."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError
from numpy.typing import NDArray
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    TorchAoConfig,
)
from transformers.utils import find_adapter_config_file

from osd_hf.bundled import load_bundled
from osd_hf.errors import ConfigError, UnsupportedModelError, VocabularyMismatchError, first_line
from osd_hf.utils.threads import Seeded

logger = logging.getLogger(__name__)

Quantization = Literal["4bit", "8bit", "int8"]
# What says where a model's files are, and how the target alone is loaded: a draft learns, whole and on one device.
OF_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
OF_TARGET = ("device_map", "max_memory", "offload_buffers", "offload_folder", "quantization", "quantization_config")
ADVICE = "Name a folder that `save_pretrained` wrote, or a model of the Hub as `owner/name`."
TIMES_LARGER = 2  # than the target: a draft beyond saves no time, though it has experts of which few are asked
MOST_WRAPPERS = 16  # one inside the other; what makes up every attribute that it is asked for has no end
# The tokenizers of models that were loaded by name, found with the arguments of their models.
_TOKENIZERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def uncompiled(model: Any) -> Any:
    """The model that `torch.compile` has wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def is_peft(model: Any) -> bool:
    """Whether it is a `PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def has_soft_prompt(model: Any) -> bool:
    """Whether a model is a `PeftModel`, compiled or not, whose active adapter is a soft prompt."""
    model = uncompiled(model)
    return is_peft(model) and bool(getattr(model.active_peft_config, "is_prompt_learning", False))


def unwrap(model: Any) -> Any:
    """The transformers model whose `generate` runs in the end: inside a compiled model, inside a `PeftModel`."""
    for _ in range(MOST_WRAPPERS):
        inner = uncompiled(model)
        inner = inner.get_base_model() if is_peft(inner) else inner
        if inner is model:
            break
        model = inner
    return model


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


def untie(model: Any) -> None:
    """Give a model a head of its own, equal to its embeddings so far: merged into a tensor that is both, an adapter on
    one of the two would change the other as well."""
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def vocab_size_of(model: Any) -> int:
    """Width of the logits of a model, or of one with this configuration."""
    return int(getattr(model, "config", model).get_text_config().vocab_size)


def config_value(config: Any, name: str) -> Any:
    """Return a setting of a configuration; `None` if it has none, or one for each layer (heterogeneous models)."""
    with contextlib.suppress(Exception):  # transformers' own error for settings of single layers is no AttributeError
        return getattr(config, name, None)
    return None


def device_clock(model: Any) -> Callable[[], float]:
    """A clock in seconds that waits until the model's device has done what it was asked for."""

    def clock() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter()

    return clock


def eos_ids(config: Any) -> tuple[int, ...]:
    """Return the ids that end an answer, by a configuration or a mapping that has one, several, a tensor, or none."""
    eos = config.get("eos_token_id") if isinstance(config, Mapping) else getattr(config, "eos_token_id", None)
    eos = eos.tolist() if isinstance(eos, torch.Tensor) else eos
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def until_end(answer: NDArray[np.int32], config: Any) -> NDArray[np.int32]:
    """An answer up to and with its first token that ends one, by a generation config."""
    found = np.flatnonzero(np.isin(answer, eos_ids(config)))
    return answer[: found[0] + 1] if len(found) else answer


def set_fixed_k(generation_config: Any, k: int | None = None) -> None:
    """Let a draft's generation config draft the same number of tokens each round, however sure of them it is: `k`, or
    what it has set. Changed in place."""
    if k is not None:
        generation_config.num_assistant_tokens = k
    generation_config.num_assistant_tokens_schedule = "constant"
    generation_config.assistant_confidence_threshold = 0.0


@contextlib.contextmanager
def fixed_k(draft: Any, k: int | None = None) -> Iterator[None]:
    """[`set_fixed_k`] for a block: the draft has a generation config of its own inside, and then the old one again."""
    model = unwrap(draft)
    before, model.generation_config = model.generation_config, copy.deepcopy(model.generation_config)
    set_fixed_k(model.generation_config, k)
    try:
        yield
    finally:
        model.generation_config = before


def num_positions(model: Any) -> int | None:
    """Return the number of positions of a model, or of its decoder; `None` if nothing bounds it."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_target_positions")
    return next((int(value) for name in names if (value := config_value(config, name))), None)


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode inside the block; afterwards each of its modules is in its mode of before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _loaded(auto: Any, source: str, **kwargs: Any) -> Any:
    try:
        return auto.from_pretrained(source, **kwargs)
    except (OSError, ValueError, ImportError, TypeError) as error:
        named = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if named and named[1] in kwargs:
            raise ConfigError(
                f"`{named[1]}` is no argument of `from_pretrained` for {source!r}. Leave it out, or look at the "
                "spelling."
            ) from error
        advice = ""
        is_folder = os.path.isdir(source)
        if is_folder and not os.path.isfile(os.path.join(source, "config.json")):
            advice = f"It is a folder without a `config.json`. {ADVICE}"
        elif isinstance(error.__cause__ or error, GatedRepoError):
            advice = "Ask for access on its page of the Hub, then log in with `hf auth login` or pass `token=`."
        elif isinstance(error, OSError) and not is_folder:
            advice = ADVICE
        raise UnsupportedModelError(
            f"The model {source!r} cannot be loaded: {first_line(error)}. {advice}".rstrip()
        ) from error


def load_config(source: str, **model_kwargs: Any) -> Any:
    """The configuration of a model, with the commit of the Hub that it is of in `_commit_hash` (`None` for a folder);
    raises UnsupportedModelError where there is none."""
    config = _loaded(AutoConfig, source, **_of_hub(model_kwargs))
    if getattr(config, "_commit_hash", None) is None:  # which transformers before 5.23 notes
        config._commit_hash = None if os.path.exists(source) else _commit(source, **_of_hub(model_kwargs))
    return config


def _commit(name: str, *, revision: str | None = None, subfolder: str = "", cache_dir: Any = None, **_: Any) -> Any:
    file = os.path.join(subfolder, "config.json")
    path = try_to_load_from_cache(name, file, cache_dir, revision)
    return Path(path.removesuffix(file)).name if isinstance(path, str) else None


def _of_hub(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: model_kwargs[name] for name in OF_HUB if name in model_kwargs}


def quantization_config(name: Quantization, dtype: str = "auto") -> Any:
    """What `from_pretrained` quantizes a model by: `"4bit"` (NF4) and `"8bit"` by bitsandbytes, `"int8"` (weights
    only) by torchao; raises ConfigError where that package is missing."""
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
    source: str, *, dtype: Any = "auto", device: Any = None, device_map: Any = None,
    quantization: Quantization | None = None, attn_implementation: str | None = None, **model_kwargs: Any,
) -> Any:  # fmt: skip
    """
    A model in evaluation mode.

    Args:
        source (`str`): Its Hub id or folder.
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`): The checkpoint's own by default.
        device (`str` or `torch.device`, *optional*): By default CUDA where there is one, otherwise the CPU.
        device_map (`str` or `dict`, *optional*):
            As `from_pretrained` takes it, such as `"auto"`; takes the place of the device.
        quantization (`str`, *optional*): As for [`quantization_config`].
        attn_implementation (`str`, *optional*): Such as `"sdpa"` or `"eager"`; transformers' choice by default.
        model_kwargs (`Any`): What else `from_pretrained` is to be passed, such as `quantization_config`.

    Raises:
        UnsupportedModelError: it cannot be loaded.
        ConfigError: there is no such device, or a package is missing.
    """
    dtype = model_kwargs.pop("torch_dtype", dtype)  # its older name, which `from_pretrained` takes for the lesser one
    config = load_config(source, **model_kwargs)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    how = model_kwargs if attn_implementation is None else {**model_kwargs, "attn_implementation": attn_implementation}
    if quantization is not None:
        how = {**how, "quantization_config": quantization_config(quantization, dtype)}
    if how.get("quantization_config") is not None:
        device_map = device_map or device  # what is quantized is not moved afterwards
    if device_map is not None:
        model = _loaded(auto, source, dtype=dtype, device_map=device_map, **how)
    else:
        model = placed(_loaded(auto, source, dtype=dtype, **how), device)
    model.config._commit_hash = config._commit_hash
    return model.eval()


def load_draft(source: str, **model_kwargs: Any) -> Any:
    """A draft as [`load_model`] loads it, its tokenizer kept for [`find_tokenizer`]; of a LoRA adapter alone the model
    that it names, with the adapter merged, for which PEFT is needed."""
    found, where = None, {k: v for k, v in _of_hub(model_kwargs).items() if k != "trust_remote_code"}
    with contextlib.suppress(OSError):  # which is told better by what loads a model
        found = find_adapter_config_file(source, **where)
    if found is None:
        return _with_tokenizer(load_model(source, **model_kwargs), model_kwargs)
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"{source!r} is an adapter, which needs PEFT: pip install 'osd-hf[distill]'.")
    of_base = {name: value for name, value in model_kwargs.items() if name not in ("revision", "subfolder")}
    base = load_model(json.loads(Path(found).read_text())["base_model_name_or_path"], **of_base)
    draft = merged(importlib.import_module("peft").PeftModel.from_pretrained(base, source, **where))
    unwrap(draft).config._commit_hash = None  # which is the base's
    return _with_tokenizer(draft, of_base)


def load_named(target: Any, draft: Any, **model_kwargs: Any) -> tuple[Any, Any]:
    """
    Both models, of which those that are a Hub id or a folder are loaded by [`load_model`], and their tokenizers are
    fetched with them. What is in `OF_TARGET` is the target's alone; the draft comes to the target's device.

    Raises:
        UnsupportedModelError, ConfigError: as [`load_model`] does; an argument is for a model that is there already.
    """
    named = [isinstance(model, str | os.PathLike) for model in (target, draft)]
    for name in model_kwargs:
        if not any(named) or (name in OF_TARGET and not named[0]):
            raise ConfigError(
                f"`{name}` would be passed on to `from_pretrained`, where {'the target' if any(named) else 'a model'} "
                f"is given by its id or path, got a {type(target).__name__}. Leave `{name}` out, name the model, or "
                "look at the spelling."
            )
    if named[0]:
        target = _with_tokenizer(load_model(os.fspath(target), **model_kwargs), model_kwargs)
    if named[1]:
        shared = {name: value for name, value in model_kwargs.items() if name not in OF_TARGET}
        if shared.get("device") is None and hasattr(unwrap(target), "device"):
            shared["device"] = str(input_device(unwrap(target)))
        draft = _with_tokenizer(load_model(os.fspath(draft), **shared), shared)
    return target, draft


def _with_tokenizer(model: Any, model_kwargs: Mapping[str, Any]) -> Any:
    """The model, its tokenizer fetched with the arguments that it was loaded with, and kept for [`find_tokenizer`]."""
    _TOKENIZERS[model] = _tokenizer_at(model.config.name_or_path, **_of_hub(model_kwargs))
    return model


class Pair(NamedTuple):
    """Models that serve together: one that answers, a smaller one that drafts, with the same vocabulary size, and the
    tokenizer of both."""

    target: Any
    draft: Any
    tokenizer: Any


def load_pair(
    target: str | None = None, draft: str | None = None, *, dtype: str = "auto", device: str | None = None,
    device_map: str | None = None, quantization: Quantization | None = None, attn_implementation: str | None = None,
    revision: str | None = None, draft_revision: str | None = None, trust_remote_code: bool = False,
) -> Pair:  # fmt: skip
    """
    The models of these names, as [`load_model`] loads them, or the bundled pair (fp32, on the CPU unless a device is
    named) where neither is given. `device_map` and `quantization` are the target's alone: a draft learns, whole.
    `revision` is the target's on the Hub, `draft_revision` the draft's; both may run code that lies beside their
    weights with `trust_remote_code`.

    Raises:
        ConfigError: one of the two is missing, how to load is told for the bundled pair, or what [`load_model`]
            raises.
        UnsupportedModelError: a model or the tokenizer cannot be loaded.
        VocabularyMismatchError: the vocabularies differ in more than padding and added tokens.
    """
    if (target is None) != (draft is None):
        raise ConfigError("A pair is two models: name a target and a draft, or neither for the bundled pair.")
    if target is None or draft is None:
        told = {
            "device_map": device_map, "quantization": quantization, "attn_implementation": attn_implementation,
            "revision": revision, "draft_revision": draft_revision, "trust_remote_code": trust_remote_code,
            "dtype": None if dtype in ("auto", "float32") else dtype,
        }  # fmt: skip
        if given := [name for name, value in told.items() if value]:
            raise ConfigError(f"The bundled pair is loaded as it is; `{given[0]}` needs a target and a draft by name.")
        large, small, tokenizer = load_bundled()
        return Pair(placed(large, device or "cpu"), placed(small, device or "cpu"), tokenizer)
    how: dict[str, Any] = {
        "dtype": dtype, "device": device, "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    versions = [{} if name is None else {"revision": name} for name in (revision, draft_revision)]
    large, _ = load_named(target, None, device_map=device_map, quantization=quantization, **how, **versions[0])
    _, small = load_named(large, draft, **how, **versions[1])
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code, **versions[0])
    common_tokenizer(tokenizer, large, small)
    return Pair(large, of_one_size(small, large), tokenizer)


def load_eos_ids(source: str, **model_kwargs: Any) -> tuple[int, ...]:
    """Ids that end an answer, by a model's generation config, or by its configuration where it has none."""
    try:
        return eos_ids(GenerationConfig.from_pretrained(source, **_of_hub(model_kwargs)))
    except (OSError, ValueError):
        return eos_ids(load_config(source, **model_kwargs))


def input_device(model: Any) -> torch.device:
    """Where a model takes tokens: its hooks bring them to weights that are offloaded, which lie nowhere."""
    device: torch.device = model.device
    return torch.device("cpu") if device.type == "meta" else device


def placed(model: Any, device: str) -> Any:
    """The model, moved to a device; raises ConfigError where there is no such device."""
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"The device {device!r} cannot be used: {first_line(error)}.") from error


def load_tokenizer(source: str, **model_kwargs: Any) -> Any:
    """The tokenizer that lies beside a model; raises UnsupportedModelError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(source, **_of_hub(model_kwargs))
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UnsupportedModelError(f"{source!r} has no tokenizer that loads: {first_line(error)}.") from error


def prompt_room(target_config: Any, draft_config: Any, max_new_tokens: int) -> int | None:
    """Tokens that a prompt may have beside the answer, or as the source of an encoder-decoder, whose answer has
    positions of its own; `None` where nothing bounds it. Raises ConfigError where there is no room for a prompt, or
    for the answer."""
    texts = [config.get_text_config() for config in (target_config, draft_config)]
    sizes = [getattr(text, "max_position_embeddings", None) for text in texts]
    positions = min((int(size) for size in sizes if size is not None), default=None)
    if positions is None:
        return None
    if target_config.is_encoder_decoder:
        if max_new_tokens > positions:
            raise ConfigError(f"{max_new_tokens} new tokens do not fit: the models have {positions} positions.")
        return positions
    if max_new_tokens >= positions:
        raise ConfigError(
            f"{max_new_tokens} new tokens leave no room for a prompt: the models have {positions} positions."
        )
    return positions - max_new_tokens


def check_draft(draft: Any) -> None:
    """Refuse what is no ordinary assistant model; raises UnsupportedModelError."""
    kind = type(draft).__name__
    if not callable(getattr(draft, "generate", None)) or not hasattr(draft, "generation_config"):
        raise UnsupportedModelError(f"The draft must be a transformers model that can `generate`, got {kind}.")
    if getattr(draft, "_is_stateful", False):
        if not _takes_back(draft):
            raise UnsupportedModelError(
                f"{kind} is stateful: its state cannot be rolled back when a drafted token is rejected. Use an "
                "attention model as the draft."
            )
        logger.warning(
            "Recurrent layers of the draft (%s) are not rolled back when a drafted token is rejected, so it is "
            "accepted less often than it could be; answers are the target's own all the same.", kind,
        )  # fmt: skip


def check_learner(draft: Any) -> None:
    """Refuse a draft whose weights cannot learn while it serves; raises UnsupportedModelError."""
    kind, weights = type(draft).__name__, list(draft.parameters())
    if getattr(draft, "is_quantized", False) or not all(w.is_floating_point() for w in weights):
        raise UnsupportedModelError(
            f"The draft ({kind}) is quantized: neither can its weights learn, nor can an adapter be merged into them. "
            "Load it without quantization; the target may be quantized."
        )
    if any(w.device.type == "meta" for w in weights):
        raise UnsupportedModelError(
            f"Weights of the draft ({kind}) are offloaded, so they cannot learn. Load it whole, onto one device; the "
            "target may be offloaded."
        )


def _takes_back(draft: Any) -> bool:
    """Whether tokens can be taken back from the cache of a stateful model, as assisted generation does: from that of
    one with attention layers as well, as far as these go."""
    try:
        cache = DynamicCache(config=draft.config.get_text_config(decoder=True))
        cache.activate_past_recording()
        with torch.inference_mode():
            draft(input_ids=torch.zeros(1, 2, dtype=torch.long, device=draft.device), past_key_values=cache)
        cache.crop(-1)
        return int(cache.get_seq_length()) == 1
    except Exception as error:  # noqa: BLE001 - whatever it fails with, a request would as well
        logger.info("No tokens can be taken back from the cache of the draft: %s", first_line(error))
        return False


def check_pair(target: Any, draft: Any) -> None:
    """Refuse pairs of unwrapped models that assisted generation cannot run, or that could not learn, whatever their
    vocabularies; raises UnsupportedModelError."""
    if not isinstance(target, GenerationMixin) or not target.can_generate():
        raise UnsupportedModelError(
            f"The target must be a transformers model that can `generate`, got {type(target).__name__}. Load it with "
            "a class that has a language modeling head, such as `AutoModelForCausalLM`."
        )
    if getattr(target, "_is_stateful", False):
        raise UnsupportedModelError(
            f"assisted generation is not supported with stateful models, such as {type(target).__name__}: its state "
            "cannot be rolled back when a drafted token is rejected. Use an attention model as the target."
        )
    check_draft(draft)
    if target.config.is_encoder_decoder != draft.config.is_encoder_decoder:
        kinds = ["encoder-decoder" if m.config.is_encoder_decoder else "decoder-only" for m in (target, draft)]
        raise UnsupportedModelError(
            f"Target ({kinds[0]}) and draft ({kinds[1]}) must be of one kind: a draft is taught on the target's input."
        )


def warn_of_order(target: Any, draft: Any) -> None:
    """Say so where the draft is clearly larger than its target, as when the two are exchanged. What is packed by a
    quantization, or sharded, has no number of weights to go by."""
    sizes = [sum(w.numel() for w in model.parameters()) for model in (target, draft)]
    if getattr(target, "is_quantized", False) or not sizes[0] or sizes[1] <= TIMES_LARGER * sizes[0]:
        return
    logger.warning(
        "The draft has %s weights, the target %s: a draft has to be much smaller to save time. If they are exchanged, "
        "pass the large model first: `OnlineAssistant(target, draft)`.", f"{sizes[1]:,}", f"{sizes[0]:,}",
    )  # fmt: skip


def check_sizes(target: Any, draft: Any) -> None:
    """Refuse vocabularies of different sizes; raises VocabularyMismatchError."""
    size, draft_size = vocab_size_of(target), vocab_size_of(draft)
    if size != draft_size:
        raise VocabularyMismatchError(
            f"The target has {size} tokens, the draft {draft_size}. If they share one tokenizer and differ only in "
            "padding, use `draft = align_vocab(draft, target, tokenizer)`; otherwise make a draft from the target "
            "with `make_draft`, or choose one of the target's family."
        )


def check_tokenizers(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Refuse tokenizers whose vocabularies differ in more than added tokens, such as those of a chat template, which a
    draft learns as the target uses them; raises VocabularyMismatchError."""
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if ours == theirs:
        return
    added = target_tokenizer.get_added_vocab().keys() | draft_tokenizer.get_added_vocab().keys()
    names = sorted((ours.keys() | theirs.keys()) - added)
    tokens = [(token, ours.get(token), theirs.get(token)) for token in names if ours.get(token) != theirs.get(token)]
    if not tokens:
        return
    shown = ", ".join(f"{token!r} ({ours} / {theirs})" for token, ours, theirs in tokens[:3])
    raise VocabularyMismatchError(
        f"The tokenizers of target and draft differ in {len(tokens)} tokens, such as {shown}. The draft must have "
        "the target's tokenizer: make one from the target with `make_draft`, or choose a draft of the target's family."
    )


def find_tokenizer(model: Any) -> Any:
    """The tokenizer that a model was loaded with by name, or the one that lies where it came from: in a folder or the
    local cache, and without code of its own. `None` if there is none."""
    found = _TOKENIZERS.get(model) if isinstance(model, torch.nn.Module) else None
    if found is not None or not model.config.name_or_path:
        return found
    return _tokenizer_at(model.config.name_or_path, local_files_only=True, trust_remote_code=False)


def _tokenizer_at(source: str, **how: Any) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, **how)
    except (OSError, ValueError, KeyError):
        return None


def common_tokenizer(given: Any, target: Any, draft: Any) -> Any:
    """The tokenizer given, or the target's, or the draft's; raises VocabularyMismatchError where one differs."""
    found = [given, *(find_tokenizer(model) for model in (target, draft) if model is not None)]
    known = [tokenizer for tokenizer in found if tokenizer is not None]
    for other in known[1:]:
        check_tokenizers(known[0], other)
    return known[0] if known else None


def align_vocab(draft: Any, target: Any, tokenizer: Any = None) -> Any:
    """
    A copy of the draft with the target's vocabulary size. Families often pad their embeddings to different sizes
    (Qwen2.5-0.5B has 151,936 rows, 7B 152,064), or add tokens to one model (Gemma 3 4B has rows for images); the
    padding rows belong to no token, and assisted generation, TRL and vLLM refuse such a pair until the sizes agree.

    Args:
        draft (`PreTrainedModel`): Left as it is.
        target (`PreTrainedModel`): Has the size.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer of both. Without it, the tokenizers are loaded from where the models came from and compared.

    Returns:
        `PreTrainedModel`: in evaluation mode, same dtype and device; new rows are about the mean of the old ones: of
        padding, which a target never draws, and of added tokens, which are still to be learned.

    Raises:
        VocabularyMismatchError: the tokenizers differ or cannot be found, they use ids beyond the smaller vocabulary
            for other than added tokens, or an adapter of the draft changes what would be resized.
    """
    size, old_size = vocab_size_of(target), vocab_size_of(draft)
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
            "differ in more than padding and added tokens. Make a draft from the target with `make_draft`, or choose "
            "one of the target's family."
        )
    aligned = copy.deepcopy(draft)
    if draft in _TOKENIZERS:
        _TOKENIZERS[aligned] = _TOKENIZERS[draft]
    if size != old_size:
        ends = (aligned.get_input_embeddings(), aligned.get_output_embeddings())
        if not all(end is None or isinstance(end, torch.nn.Embedding | torch.nn.Linear) for end in ends):
            raise VocabularyMismatchError(
                f"The draft has {old_size} tokens instead of {size}, and its adapter changes the embeddings or the "
                "head. Merge the adapter into the draft first."
            )
        with Seeded(0):  # new rows are drawn: alike each time, as sessions go on with the same draft
            aligned.resize_token_embeddings(size, mean_resizing=size > old_size)
    return aligned.eval()


def of_one_size(draft: Any, target: Any, tokenizer: Any = None) -> Any:
    """The draft itself where its vocabulary has the target's size, otherwise what [`align_vocab`] makes of it."""
    return draft if vocab_size_of(draft) == vocab_size_of(target) else align_vocab(draft, target, tokenizer)
