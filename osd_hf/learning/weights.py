"""Learned weights by name, of a whole draft or of an adapter: copied, checked, read, and written into models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, UnsupportedModelError
from osd_hf.models import has_soft_prompt, is_peft, merged, set_fixed_k, untie
from osd_hf.utils.context import neutral_context
from osd_hf.utils.threads import Seeded
from osd_hf.utils.yielding import computing, give_way, in_pieces

__all__ = [
    "FALLBACK_K",
    "Snapshot",
    "adapted",
    "adapter_state",
    "beneath",
    "in_fp32",
    "is_finite",
    "learning_context",
    "load_adapter",
    "make_template",
    "ready_to_serve",
    "served_weights",
    "sharing",
    "write_snapshot",
]

Snapshot = dict[str, torch.Tensor]  # learned weights by name; of an adapter, by the names in its file
FALLBACK_K = 5  # where the draft's own configuration says how many tokens are drafted, and a number is needed


@contextmanager
def learning_context() -> Iterator[None]:
    """Compute gradients, in the [`neutral_context`]: answers are often made under `no_grad` or `inference_mode`."""
    try:
        with neutral_context(), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.clear_autocast_cache()  # a caller's autocast keeps casts of weights that may have changed inside


# Of PEFT; a soft prompt of another kind drafts by transformers' own assisted generation.
UNSERVED_SOFT_PROMPTS = ("PREFIX_TUNING", "CARTRIDGE", "MULTITASK_PROMPT_TUNING")


def ready_to_serve(draft: Any, config: OnlineConfig) -> Any:
    """Return a copy of a draft, its adapter merged, that drafts as the configuration says. Raises
    UnsupportedModelError for an adapter that can be neither merged nor served."""
    if has_soft_prompt(draft) and draft.active_peft_config.peft_type in UNSERVED_SOFT_PROMPTS:
        raise UnsupportedModelError(
            f"The draft has a soft prompt ({type(draft.active_peft_config).__name__}), which cannot be merged, and "
            "which assisted generation cannot serve. Use LoRA, or the draft without it."
        )
    with learning_context():
        served = merged(draft)
        served = (copy.deepcopy(draft) if served is draft else served).eval()
    if config.compared_k is not None:
        set_fixed_k(served.generation_config, config.compared_k)
    return served


def sharing(model: Any, *, learned: bool = True) -> Any:
    """A copy of a model whose weights lie where the model's own do, and take no memory; buffers are its own, as are,
    with `learned=False`, the parameters that require gradients. Writing into the others changes both."""
    with learning_context():
        shared = [p for p in model.parameters() if learned or not p.requires_grad]
        others = (torch.nn.Parameter(p.detach(), p.requires_grad) if p.is_floating_point() else p for p in shared)
        return copy.deepcopy(model, {id(p): other for p, other in zip(shared, others, strict=True)})


def in_fp32(draft: Any, *, own: bool = True, device: torch.device | None = None) -> Any:
    """A copy of a draft in fp32, in evaluation mode, on its device or another one. With `own=False` weights that are
    frozen beside adapters, and in fp32 on that device already, lie where the draft's do."""
    has_adapters = is_peft(draft) or getattr(draft, "_hf_peft_config_loaded", False)
    with learning_context():
        if device is not None:
            draft = sharing(draft).to(device)  # before it grows, which there may be no room for where it serves
        return (sharing(draft, learned=False) if has_adapters and not own else copy.deepcopy(draft)).float().eval()


def is_finite(snapshot: Snapshot) -> bool:
    """Whether all weights are numbers."""
    return all(
        bool(torch.isfinite(weight).all()) for (piece,) in in_pieces(list(snapshot.values())) for weight in piece
    )


def served_weights(snapshot: Snapshot, draft: Any, template: Any = None) -> Snapshot:
    """
    Learned weights by the names of a draft's parameters, in its dtypes and where it is; gives way between them.

    Args:
        snapshot (`dict[str, torch.Tensor]`): As returned by [`Updater.snapshot`].
        draft (`PreTrainedModel`):
            A copy of the draft that was learned from; of one with adapters, with them merged or as it was.
        template (`PeftModel`, *optional*): Where the weights are an adapter's: a model with that adapter, unmerged.
    """
    with learning_context(), torch.no_grad():
        weights = snapshot if template is None else _adapted_weights(snapshot, template, is_merged=not is_peft(draft))
        served, found = dict(draft.named_parameters()), Snapshot()
        for name, learned in weights.items():
            give_way()
            found[name] = learned.to(served[name])
        return found


def write_snapshot(snapshot: Snapshot, draft: Any, template: Any = None, *, share: bool = False) -> None:
    """Write learned weights into a draft, in place, cast to its dtype; takes the arguments of [`served_weights`]. With
    `share` the draft's parameters are these weights themselves where dtype and device are the same, in place of
    copies: they take no memory of their own then."""
    weights, served = served_weights(snapshot, draft, template), dict(draft.named_parameters())
    with learning_context(), torch.no_grad():
        for name, learned in weights.items():
            if share:
                served[name].data = learned
            else:
                served[name].copy_(learned)


# --- adapters -------------------------------------------------------------------------------------------------------


def adapter_state(model: Any, adapter: str | None = None) -> Snapshot:
    """Weights of an adapter of a `PeftModel` (the active one by default), by the names of its file; without those of
    embeddings below it, which PEFT would add and which it has not changed."""
    from peft import get_peft_model_state_dict

    name = adapter or str(model.active_adapter)
    state: Snapshot = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return state


def load_adapter(model: Any, snapshot: Snapshot, adapter: str | None = None) -> Any:
    """The `PeftModel` itself, whose adapter (the active one by default) has these weights from now on."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, snapshot, adapter_name=adapter or str(model.active_adapter))
    return model


def _adapted_weights(snapshot: Snapshot, template: Any, *, is_merged: bool) -> Snapshot:
    """All parameters of the template's model, with this adapter merged or beside it; what it does not change lies
    where the template's does."""
    model = load_adapter(sharing(template, learned=False), snapshot)
    if is_merged:
        from peft.tuners.tuners_utils import BaseTunerLayer

        # One layer after the other, in fp32: all at once, they would need twice the memory of what serves.
        for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
            give_way()
            dtypes = {name: p.dtype for name, p in layer.get_base_layer().named_parameters() if p.is_floating_point()}
            for name in dtypes:
                parameter = layer.get_base_layer().get_parameter(name)
                parameter.data = parameter.data.to(torch.float32, copy=True)
            with computing():
                layer.merge()
            for name, dtype in dtypes.items():
                parameter = layer.get_base_layer().get_parameter(name)
                parameter.data = parameter.data.to(dtype)
        model = model.unload()
    return {name: p.detach() for name, p in model.named_parameters()}


def adapted(model: Any, peft_config: Any, adapter: str, seed: int) -> Any:
    """A `PeftModel` around `model`; raises ConfigError without peft, UnsupportedModelError where adapters do not
    fit."""
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise ConfigError('`peft_config` needs peft: pip install "osd-hf[distill]".') from error
    try:
        with Seeded(seed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # which PEFT 0.21 reads
            # A copy: PEFT writes into the configuration which model it belongs to.
            return get_peft_model(model, copy.deepcopy(peft_config), adapter_name=adapter).eval()
    except (ValueError, TypeError, AttributeError) as error:  # the last: it is no configuration
        raise UnsupportedModelError(
            f"The adapters of `peft_config` do not fit the draft ({type(model).__name__}): {error}"
        ) from error


def make_template(source: Any, peft_config: Any, seed: int, *, per_domain: bool) -> Any:
    """A `PeftModel` whose copies an adapter's weights are loaded into, to be merged; `None` without adapters. All but
    its adapter lies where the weights of `source` do. Unties the embeddings of `source` where an adapter would change
    both. Raises UnsupportedModelError for adapters that cannot be merged or, per domain, of which a model can have
    only one."""
    with learning_context():
        if peft_config is None:
            return sharing(source) if is_peft(source) else None
        if _adapts_tied_embeddings(source, peft_config, seed):
            untie(source)  # ours, not the caller's
        template = adapted(beneath(source, peft_config), peft_config, "default", seed)
        if not hasattr(template.base_model, "merge_and_unload"):
            raise UnsupportedModelError(
                f"Adapters of the kind {type(peft_config).__name__} cannot be merged into the draft's weights, "
                "so they would make drafting slow. Use LoRA, or no `peft_config` for full copies."
            )
        if per_domain:
            try:
                with Seeded(seed):
                    sharing(template).add_adapter("second", copy.deepcopy(peft_config))
            except ValueError as error:
                raise UnsupportedModelError(
                    f"A model can have one adapter of this `peft_config` only, and each domain needs its own: {error}"
                ) from error
    return template


def beneath(source: Any, peft_config: Any) -> Any:
    """A copy of a model that adapters of this kind can be put on; in its memory, unless they change the weights there,
    as those that begin with a decomposition of them do."""
    begins = getattr(peft_config, "init_lora_weights", True)
    return sharing(source) if isinstance(begins, bool) or begins == "gaussian" else in_fp32(source)


def _adapts_tied_embeddings(model: Any, peft_config: Any, seed: int) -> bool:
    """Whether input embeddings and output head are one tensor, and an adapter would change either."""
    head = model.get_output_embeddings()
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied weights, which this is asked to prevent
        base = adapted(beneath(model, peft_config), peft_config, "default", seed).get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    return any(isinstance(end, BaseTunerLayer | ModulesToSaveWrapper) for end in ends)
