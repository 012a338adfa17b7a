"""Copy, cast, check and load learned weights, of full copies and of adapters, and choose where learning runs."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, UnsupportedModelError, first_line
from osd_hf.models import SHARED_SETTING, has_soft_prompt, is_peft, merged, set_fixed_k, untie, unwrap
from osd_hf.utils.context import Seeded, neutral_context

Snapshot = dict[str, torch.Tensor]
"""Learned weights by parameter name; those of an adapter by the names in its file."""

# Kinds of soft prompts that PEFT cannot merge and that transformers' assisted generation cannot serve.
UNSERVED_SOFT_PROMPTS = ("PREFIX_TUNING", "CARTRIDGE", "MULTITASK_PROMPT_TUNING")


@contextmanager
def learning_context() -> Iterator[None]:
    """Compute gradients in the [`neutral_context`], also inside a caller's `no_grad` or `inference_mode`."""
    try:
        with neutral_context(), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.clear_autocast_cache()  # a caller's autocast caches casts of weights that may have changed


# --- devices and precision ------------------------------------------------------------------------------------------


def learner_device(config: OnlineConfig) -> torch.device | None:
    """Return the device of `learner_device`; `None` for the draft's. Raises ConfigError if it does not exist."""
    if config.learner_device is None:
        return None
    try:
        device = torch.device(config.learner_device)
        torch.zeros(1, device=device).item()  # fails on the meta device as well
    except Exception as error:  # each kind of device fails in its own way
        raise ConfigError(
            f"`learner_device` must be a device of this machine, got {config.learner_device!r}: {first_line(error)}. "
            'Name another one, such as "cpu", or None for the device of the draft.'
        ) from error
    return device


def learns_in_bf16(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether forwards and backwards run in bf16 autocast: for half-precision drafts on accelerators that have it."""
    if dtype not in (torch.bfloat16, torch.float16) or device.type == "cpu":
        return False
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def with_fp32_attention(master: PreTrainedModel) -> PreTrainedModel:
    """Switch an fp32 model from attention kernels for half precision (FlashAttention, Hub kernels) to SDPA."""
    inner = unwrap(master)
    attention = getattr(inner.config, "_attn_implementation", None)
    if attention is not None and ("flash" in attention or "/" in attention):
        try:
            inner.set_attn_implementation("sdpa")
        except (ValueError, ImportError):  # some models have no SDPA
            inner.set_attn_implementation("eager")
    return master


# --- copies ---------------------------------------------------------------------------------------------------------


def ends_of(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return the weights of the input embeddings and of the output head, with their parameter names."""
    names = {id(p): name for name, p in model.named_parameters()}
    weights = [getattr(end, "weight", None) for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    return [(names.get(id(weight), ""), weight) for weight in weights]


def hidden_matrices(model: PreTrainedModel, parameters: Mapping[str, torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the matrices that map hidden states, which Muon updates; without embeddings and output head."""
    excluded = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    if (head := model.get_output_embeddings()) is not None:
        excluded.add(id(head.weight))
    return [p for p in parameters.values() if p.ndim == 2 and id(p) not in excluded]


def shared_ends(draft: PreTrainedModel, target: Any) -> Snapshot:
    """Return frozen parameters in the target's memory for the embeddings and the output head of a draft that was cut
    from it, by name: those with the same values, dtype, and device. There are none for other drafts."""
    found = Snapshot()
    if getattr(draft.config, SHARED_SETTING, False) and not is_peft(draft):
        for (name, own), (_, theirs) in zip(ends_of(draft), ends_of(unwrap(target)), strict=True):
            is_plain = type(own) is type(theirs) is torch.nn.Parameter and not theirs.is_inference()
            is_alike = is_plain and (own.dtype, own.device) == (theirs.dtype, theirs.device)
            if is_alike and (own.data_ptr() == theirs.data_ptr() or torch.equal(own, theirs)):  # equal in shape, too
                found[name] = torch.nn.Parameter(theirs.detach(), requires_grad=False)
    return found


def shared_of_head(draft: PreTrainedModel) -> Snapshot:
    """Return what a draft head shares with its target, as [`shared_ends`] does; nothing for other drafts, or if the
    target no longer exists."""
    source = getattr(unwrap(draft), "source", None)
    target = None if source is None else source.living
    return Snapshot() if target is None else shared_ends(draft, target)


def copy_with(model: PreTrainedModel, parameters: Snapshot) -> PreTrainedModel:
    """Return a copy of a model with these parameters in place of its own."""
    memo = {id(own): parameters[name] for name, own in model.named_parameters() if name in parameters}
    with learning_context():
        return copy.deepcopy(model, memo)


def shared_copy(model: PreTrainedModel, names: Container[str] | None = None) -> PreTrainedModel:
    """Return a copy that shares the memory of the parameters, or of those with these names."""
    shared = {name: p for name, p in model.named_parameters() if names is None or name in names}
    with torch.inference_mode(False):
        new = {n: torch.nn.Parameter(p.detach(), p.requires_grad) for n, p in shared.items() if p.is_floating_point()}
    return copy_with(model, {**shared, **new})


def serving_copy(draft: PreTrainedModel, config: OnlineConfig, shared: Snapshot | None = None) -> PreTrainedModel:
    """Return a copy of a draft, its adapter merged, with the configured number of drafted tokens, and with `shared`
    parameters. Raises UnsupportedModelError for an adapter that can be neither merged nor served."""
    if has_soft_prompt(draft) and draft.active_peft_config.peft_type in UNSERVED_SOFT_PROMPTS:
        raise UnsupportedModelError(
            f"The draft has a soft prompt ({type(draft.active_peft_config).__name__}), which cannot be merged, and "
            "which assisted generation cannot serve. Use LoRA, or the draft without it."
        )
    with learning_context():
        served = merged(draft)
        served = (copy_with(draft, shared or {}) if served is draft else served).eval()
    if getattr(served.config, SHARED_SETTING, False):
        setattr(served.config, SHARED_SETTING, bool(shared))
    if config.compared_k is not None:
        set_fixed_k(served.generation_config, config.compared_k)
    return served


def fp32_copy(draft: PreTrainedModel, frozen: Container[str] = (), *, device: Any = None) -> PreTrainedModel:
    """Return a copy in fp32 and evaluation mode, by default on the same device. Weights of the names in `frozen`, and
    fp32 weights frozen below adapters, share memory with the draft's. The former keep their dtype, and are cast where
    they are used."""
    has_adapters = is_peft(draft) or getattr(draft, "_hf_peft_config_loaded", False)
    below = {name for name, p in draft.named_parameters() if has_adapters and not p.requires_grad}
    shared = below | {name for name, _ in draft.named_parameters() if name in frozen}
    with learning_context():
        if device is not None:
            draft = shared_copy(draft).to(device)  # before the cast: the draft's device may lack memory
        model = shared_copy(draft, shared).eval()
        uncast = {p: p.data for name, p in model.named_parameters() if name in frozen}
        for p, data in uncast.items():
            p.data = data[:0]
        model.float()
        for p, data in uncast.items():
            p.data = data
    for module in (module for module in model.modules() if getattr(module, "weight", None) in uncast):
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(lambda _module, _args, output: output.float())
        else:
            module.forward = functools.partial(_linear_by_cast, module)
    return model


def _linear_by_cast(layer: Any, states: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(states, layer.weight.to(states), layer.bias)


def is_finite(snapshot: Snapshot) -> bool:
    """Whether all weights are finite."""
    return all(bool(torch.isfinite(weight).all()) for weight in snapshot.values())


def weights_for(draft: PreTrainedModel, snapshot: Snapshot, template: PreTrainedModel | None = None) -> Snapshot:
    """Return learned weights by the names of a draft's parameters, in its dtypes and on its devices. For an adapter's
    weights, `template` is a model with that adapter, unmerged; the draft's may be merged or not."""
    with learning_context(), torch.no_grad():
        weights = snapshot if template is None else _adapted_weights(snapshot, template, is_merged=not is_peft(draft))
        parameters = dict(draft.named_parameters())
        return {name: learned.to(parameters[name]) for name, learned in weights.items()}


def write_snapshot(
    snapshot: Snapshot, draft: PreTrainedModel, template: PreTrainedModel | None = None, *, share: bool = False
) -> None:
    """Write learned weights into a draft in place; arguments as for [`weights_for`]. With `share`, parameters of equal
    dtype and device share memory with the snapshot."""
    weights, parameters = weights_for(draft, snapshot, template), dict(draft.named_parameters())
    with learning_context(), torch.no_grad():
        for name, learned in weights.items():
            if share:
                parameters[name].data = learned
            else:
                parameters[name].copy_(learned)


# --- adapters -------------------------------------------------------------------------------------------------------


def adapter_state(model: Any) -> Snapshot:
    """Return the weights of the adapter of a `PeftModel`, without embeddings below it, which PEFT would add."""
    from peft import get_peft_model_state_dict

    name = str(model.active_adapter)
    state: Snapshot = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return state


def load_adapter(model: Any, snapshot: Snapshot) -> Any:
    """Load the weights of the adapter into a `PeftModel`, and return the model."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, snapshot, adapter_name=str(model.active_adapter))
    return model


def _adapted_weights(snapshot: Snapshot, template: PreTrainedModel, *, is_merged: bool) -> Snapshot:
    """Return all parameters of the template's model with this adapter, merged or not. Parameters that the adapter
    does not change share memory with the template."""
    frozen = {name for name, p in template.named_parameters() if not p.requires_grad}
    model = load_adapter(shared_copy(template, frozen), snapshot)
    if is_merged:
        from peft.tuners.tuners_utils import BaseTunerLayer

        for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
            for parameter in layer.get_base_layer().parameters():
                parameter.data = parameter.data.clone()  # shared with the template until now
            layer.merge()
        model = model.unload()
    return {name: p.detach() for name, p in model.named_parameters()}


def adapted(model: PreTrainedModel, peft_config: Any, seed: int) -> Any:
    """Return a `PeftModel` around a model. Raises ConfigError without peft, and UnsupportedModelError if the adapters
    do not fit."""
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise ConfigError('`peft_config` needs peft: pip install "osd-hf[distill]".') from error
    try:
        with Seeded(seed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # read by PEFT 0.21
            # PEFT writes the name of the base model into the configuration, hence the copy.
            return get_peft_model(model, copy.deepcopy(peft_config)).eval()
    except (ValueError, TypeError, AttributeError) as error:  # AttributeError: no PeftConfig
        raise UnsupportedModelError(
            f"The adapters of `peft_config` do not fit the draft ({type(model).__name__}): {error}"
        ) from error


def make_template(source: PreTrainedModel, peft_config: Any, seed: int) -> Any:
    """Return a `PeftModel` for copies into which an adapter's weights are loaded to be merged; `None` without
    adapters. All but the adapter shares memory with `source`. Embeddings of `source` are untied if an adapter would
    change both. Raises UnsupportedModelError for adapters that cannot be merged."""
    with learning_context():
        if peft_config is None:
            return shared_copy(source) if is_peft(source) else None
        if _adapts_tied_embeddings(source, peft_config, seed):
            untie(source)  # our copy, not the caller's model
        template = adapted(adapter_base(source, peft_config), peft_config, seed)
    if not hasattr(template.base_model, "merge_and_unload"):
        raise UnsupportedModelError(
            f"Adapters of the kind {type(peft_config).__name__} cannot be merged into the draft's weights, "
            "so they would make drafting slow. Use LoRA, or no `peft_config` for full copies."
        )
    return template


def adapter_base(source: PreTrainedModel, peft_config: Any) -> PreTrainedModel:
    """Return a copy of a model for adapters of this kind. The copy shares memory unless the adapters change the base,
    as those that start from a decomposition of the weights do."""
    start = getattr(peft_config, "init_lora_weights", True)
    return shared_copy(source) if isinstance(start, bool) or start == "gaussian" else fp32_copy(source)


def _adapts_tied_embeddings(model: PreTrainedModel, peft_config: Any, seed: int) -> bool:
    """Whether input embeddings and output head are one tensor that an adapter would change."""
    head = model.get_output_embeddings()
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about tied weights
        base = adapted(adapter_base(model, peft_config), peft_config, seed).get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    return any(isinstance(end, BaseTunerLayer | ModulesToSaveWrapper) for end in ends)
