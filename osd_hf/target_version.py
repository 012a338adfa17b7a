"""Identify the version of a target: a fingerprint of the weights that determine its output, updated on changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import operator
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from osd_hf.errors import first_line
from osd_hf.models import modules_of, unwrap
from osd_hf.utils.context import neutral_context

logger = logging.getLogger(__name__)

MIN_SAMPLES = 256  # values per tensor
ROWS_PER_SAMPLE = 8  # an update may change only a few rows of an embedding
TARGET_SETTING = "osd_hf_target"  # setting in a draft's configuration: the target version that it was trained for
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_tracked: WeakKeyDictionary[Any, tuple[_ModelState, str]] = WeakKeyDictionary()


# --- the fingerprint ------------------------------------------------------------------------------------------------


@neutral_context()
@torch.no_grad()
def fingerprint(model: Any) -> str:
    """Return a hash of a model's weights, 16 hexadecimal digits. It stays the same after saving and loading in the
    same dtype, on any device. It changes after a training step, with another adapter, or with another quantization. It
    uses names, shapes, dtypes and a sample of the values, so it takes milliseconds and may miss a change of a few
    values. Offloaded weights contribute only their names and shapes."""
    digest = hashlib.blake2b(digest_size=8)
    tensors = sorted(_named_tensors(unwrap(model), "", set()), key=operator.itemgetter(0))
    for name, tensor in tensors:
        has_values = tensor.device.type != "meta" and tensor.numel()
        values = _sample(tensor).cpu().numpy().tobytes() if has_values else b""
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode() + values)
    return digest.hexdigest()


def is_fingerprint(version: object) -> bool:
    """Return whether a version is a fingerprint, not a name that a user chose."""
    return isinstance(version, str) and re.fullmatch(r"[0-9a-f]{16}", version) is not None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced values of a tensor as integers with the same bits."""
    flat = tensor.detach().reshape(-1)
    count = max(MIN_SAMPLES, len(tensor) // ROWS_PER_SAMPLE) if tensor.ndim > 1 else MIN_SAMPLES
    step = max(len(flat) // count, 1) | 1  # odd, so that all columns of a matrix are sampled
    return flat[::step].view(INTEGERS[tensor.element_size()])


def _named_tensors(module: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights and persistent buffers that affect the output, with their names in a model without adapters.
    Weights of active adapters are named by their position. Tied weights are yielded once."""
    for name, tensor in (*module._parameters.items(), *_own_buffers(module)):
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            yield from _plain_tensors(f"{path}.{name}", tensor)
    parts, active = getattr(module, "adapter_layer_names", ()), list[str]()
    if parts and not (module.disable_adapters or module.merged_adapters):  # merged ones are part of the weights
        active = list(module.active_adapters)
    if active and isinstance(scaling := getattr(module, "scaling", None), dict):
        scales = [float(scaling.get(adapter, 1.0)) for adapter in active]
        yield f"{path}.scaling", torch.tensor(scales, dtype=torch.float32)
    replacing = [adapter for adapter in active if adapter in getattr(module, "modules_to_save", ())]
    for name, child in module.named_children():
        if name in parts:
            for adapter in (adapter for adapter in active if adapter in child):
                place = path if name == "modules_to_save" else f"{path}.{name}.{active.index(adapter)}"
                if isinstance(child[adapter], torch.Tensor):
                    yield place, child[adapter]
                else:
                    yield from _named_tensors(child[adapter], place, seen)
        elif name in ("base_layer", "original_module", "_orig_mod"):
            if not replacing:
                yield from _named_tensors(child, path, seen)
        else:
            yield from _named_tensors(child, f"{path}.{name}" if path else name, seen)


def _own_buffers(module: Any) -> list[tuple[str, Any]]:
    return [item for item in module._buffers.items() if item[0] not in module._non_persistent_buffers_set]


def _plain_tensors(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors inside a tensor subclass, such as the integers and scales of quantized weights."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


# --- changes --------------------------------------------------------------------------------------------------------


def target_version(model: Any) -> str | None:
    """Return the fingerprint of a model, or the name that [`target_changed`] gave it; `None` if it has none. The
    fingerprint is computed again only after a change that torch or PEFT count: in-place changes (optimizers,
    `load_state_dict`), replaced weights, and adapters that are added, switched, merged or scaled. Writes through
    `.data` are found only by [`look_closely`]. Hooks and patched methods are not noticed."""
    with _unknown_if_it_fails():
        return _tracked_version(unwrap(model))
    return None


def look_closely(model: Any) -> str | None:
    """Compute the fingerprint again, and return it if the weights have changed without being counted; otherwise
    `None`. Takes milliseconds."""
    with _unknown_if_it_fails():
        model = unwrap(model)
        before, state, now = _tracked_version(model), _ModelState(model), fingerprint(model)
        if now != before.partition("-")[0]:
            _tracked[model] = state, now
            return now
    return None


def target_changed(model: Any) -> str | None:
    """Give a model a new version, even if its weights do not show a change, and return it."""
    if (now := look_closely(model)) is not None:
        return now
    with _unknown_if_it_fails():
        plain, _, number = _tracked_version(model := unwrap(model)).partition("-")
        _tracked[model] = _ModelState(model), f"{plain}-{int(number or 0) + 1}"
        return _tracked[model][1]
    return None


@contextlib.contextmanager
def _unknown_if_it_fails() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - unusual models, or models that change at this moment
        logger.info("The version of the target is not known: %s", first_line(error))


def _tracked_version(model: Any) -> str:
    state, known = _ModelState(model), _tracked.get(model)
    if known is None or not state.is_same(known[0]):
        # The state is older than the version: a change in between makes the next call compute it again.
        known = _tracked[model] = state, fingerprint(model)
    return known[1]


class _ModelState:
    """What torch and PEFT count about a model: its tensors, their in-place changes, and the active adapters."""

    def __init__(self, model: Any) -> None:
        found, modules = list[Any](), modules_of(model)
        for module in modules:
            found += module._parameters.values()
            found += [tensor for _, tensor in _own_buffers(module)] if module._buffers else []
        # Weights that are removed from the model stay alive until the next call. Weak references would keep torch from
        # swapping their contents.
        self.tensors: list[torch.Tensor] = [tensor for tensor in found if tensor is not None]
        self.changes = [0 if tensor.is_inference() else tensor._version for tensor in self.tensors]
        self.adapters: object = None
        adapted = tuple(kind for kind in {type(module) for module in modules} if hasattr(kind, "adapter_layer_names"))
        layer = next((module for module in modules if isinstance(module, adapted)), None) if adapted else None
        if layer is not None:
            scaling = getattr(layer, "scaling", None)
            scales = dict(scaling) if isinstance(scaling, dict) else None
            self.adapters = list(layer.active_adapters), layer.disable_adapters, list(layer.merged_adapters), scales

    def is_same(self, other: _ModelState) -> bool:
        """Return whether nothing has changed between two states of a model."""
        if self.changes != other.changes or self.adapters != other.adapters:
            return False
        return all(map(operator.is_, self.tensors, other.tensors))


# --- the version that a draft was trained for -----------------------------------------------------------------------


def recorded_target(draft: Any) -> str | None:
    """Return the target version that a draft was trained for, from its configuration."""
    version: str | None = getattr(unwrap(draft).config, TARGET_SETTING, None)
    return version


def write_target(folder: str | os.PathLike[str], version: str | None) -> None:
    """Write the target version into the configuration of a saved draft; with `None` change nothing."""
    path = Path(folder) / "config.json"
    if version is not None and path.is_file():
        settings = json.loads(path.read_text(encoding="utf-8"))
        text = json.dumps(settings | {TARGET_SETTING: version}, indent=2, sort_keys=True) + "\n"
        path.write_text(text, encoding="utf-8")


def warn_of_target(draft: Any, target: Any) -> None:
    """Log a warning if a draft was trained for another version of its target."""
    before = recorded_target(draft)
    if is_fingerprint(before) and (now := target_version(target)) not in (None, before):
        logger.warning(
            "The draft was trained for another version of its target (%s; this one is %s). The answers are still the "
            "target's own. Fewer tokens may be accepted until the draft has learned from this version.",
            before,
            now,
        )
