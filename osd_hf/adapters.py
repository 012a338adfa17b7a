"""Adapters around a draft: made without a trace in the caller's generators, and where they would sit."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from osd_hf.errors import ConfigError, UnsupportedModelError
from osd_hf.snapshots import learning_context
from osd_hf.wrappers import is_peft, ties_embeddings, untie

__all__ = ["adapted", "make_template", "seeded"]


def adapted(model: Any, peft_config: Any, adapter: str, seed: int) -> Any:
    """A `PeftModel` around `model`."""
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise ConfigError('`peft_config` needs peft: pip install "osd-hf[distill]".') from error
    try:
        with seeded(seed):
            # A copy: it is written into the configuration which model it belongs to.
            return get_peft_model(model, copy.deepcopy(peft_config), adapter_name=adapter).eval()
    except (ValueError, TypeError, AttributeError) as error:  # the last: it is no configuration
        raise UnsupportedModelError(
            f"The adapters of `peft_config` do not fit the draft ({type(model).__name__}): {error}"
        ) from error


def _adapts_embeddings(model: Any, peft_config: Any, seed: int) -> bool:
    """Whether an adapter would sit on the input embeddings or on the output head."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights, which this is asked to prevent
        base = adapted(copy.deepcopy(model), peft_config, "default", seed).get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    return any(isinstance(end, BaseTunerLayer | ModulesToSaveWrapper) for end in ends)


def make_template(source: Any, peft_config: Any, seed: int, *, per_domain: bool) -> Any:
    """A `PeftModel` in fp32 that an adapter's weights are loaded into, to be merged; `None` without adapters."""
    if peft_config is None:
        with learning_context():
            return copy.deepcopy(source).float() if is_peft(source) else None
    with learning_context():
        if ties_embeddings(source) and _adapts_embeddings(source, peft_config, seed):
            untie(source)  # ours, not the caller's
        template = adapted(copy.deepcopy(source).float(), peft_config, "default", seed)
    if not hasattr(template.base_model, "merge_and_unload"):
        raise UnsupportedModelError(
            f"Adapters of the kind {type(peft_config).__name__} cannot be merged into the draft's weights, "
            "so they would make drafting slow. Use LoRA, or no `peft_config` for full copies."
        )
    if per_domain:
        try:
            with learning_context(), seeded(seed):
                copy.deepcopy(template).add_adapter("second", copy.deepcopy(peft_config))
        except ValueError as error:
            raise UnsupportedModelError(
                f"A model can have one adapter of this `peft_config` only, and each domain needs its own: {error}"
            ) from error
    return template


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Adapters begin at random; the caller's generators, which sampled requests draw from, must not notice."""
    devices: list[Any] = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield
