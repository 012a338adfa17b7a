"""Identify the version of a target: a fingerprint of the weights that determine its output, updated on changes."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from osd_hf.errors import first_line
from osd_hf.models import unwrap
from osd_hf.utils.context import neutral_context

logger = logging.getLogger(__name__)

MIN_SAMPLES = 256  # values per tensor
ROWS_PER_SAMPLE = 8  # an update may change only a few rows of an embedding
NUM_PROBES = 8  # parameters that are checked for replacement on each call
MAX_VERSIONS = 16  # remembered per model, such as those of alternating adapters
TARGET_SETTING = "osd_hf_target"  # setting in a draft's configuration: the target version that it was trained for
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_tracked: WeakKeyDictionary[Any, _Versions] = WeakKeyDictionary()
_in_place_changes = operator.attrgetter("_version")  # counted by torch


# --- the fingerprint ------------------------------------------------------------------------------------------------


@neutral_context()
@torch.no_grad()
def fingerprint(model: Any) -> str:
    """
    Return a short hash of a model's weights. It stays the same after saving and loading in the same dtype, on any
    device. It changes after a training step, with another adapter, or with another quantization. It uses names,
    shapes, dtypes and a sample of the values, so it takes milliseconds and may miss a change of a few values.
    Offloaded weights contribute only their names and shapes.

    Args:
        model (`PreTrainedModel`): May be a `PeftModel` or compiled.

    Returns:
        `str`: 16 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=8)
    tensors = sorted(_named_tensors(unwrap(model)), key=operator.itemgetter(0))
    groups: dict[tuple[torch.device, int], list[tuple[int, torch.Tensor]]] = {}
    for place, (_, tensor) in enumerate(tensors):
        if tensor.device.type != "meta" and tensor.numel():
            groups.setdefault((tensor.device, tensor.element_size()), []).append((place, _sample(tensor)))
    values: dict[int, bytes] = {}
    for group in groups.values():  # one copy to the host per group
        joined, end = torch.cat([sample for _, sample in group]).cpu().numpy().tobytes(), 0
        for place, sample in group:
            start, end = end, end + sample.nbytes
            values[place] = joined[start:end]
    for place, (name, tensor) in enumerate(tensors):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode() + values.get(place, b""))
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


def _named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights and persistent buffers that affect the output, with their names in a model without adapters.
    Weights of active adapters are named by their position."""
    renamed: dict[str, str | None] = {}  # name prefixes; `None` for weights without effect
    seen: set[int] = set()
    for path, module in model.named_modules():
        yield from _adapter_names(path, module, renamed)
        for name, tensor in _own_tensors(module):
            shown = None if id(tensor) in seen else _new_name(f"{path}.{name}", renamed)  # tied weights count once
            seen.add(id(tensor))
            if shown is not None:
                yield from _plain_tensors(shown, tensor)


def _own_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    buffers = (item for item in module._buffers.items() if item[0] not in module._non_persistent_buffers_set)
    return ((name, tensor) for name, tensor in (*module._parameters.items(), *buffers) if tensor is not None)


def _adapter_names(path: str, module: Any, renamed: dict[str, str | None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Add the names of a PEFT layer's adapters to `renamed`, and yield their scaling."""
    parts = getattr(module, "adapter_layer_names", None)
    if not parts:
        return
    active = [] if module.disable_adapters or module.merged_adapters else list(module.active_adapters)
    for part in parts:
        for adapter in getattr(module, part, ()):
            if adapter not in active:
                renamed[f"{path}.{part}.{adapter}"] = None
            elif part == "modules_to_save":  # a copy that replaces the module
                renamed[f"{path}.{part}.{adapter}"] = path
                renamed[f"{path}.original_module"] = None
            else:
                renamed[f"{path}.{part}.{adapter}"] = f"{path}.{part}.{active.index(adapter)}"
    renamed.setdefault(f"{path}.original_module", path)
    scaling = getattr(module, "scaling", None)
    if isinstance(scaling, dict) and active:
        scales = [float(scaling.get(adapter, 1.0)) for adapter in active]
        yield f"{path}.scaling", torch.tensor(scales, dtype=torch.float32)


def _new_name(name: str, renamed: dict[str, str | None]) -> str | None:
    end = len(name) if renamed else 0
    while end > 0:
        if (head := name[:end]) in renamed:
            shown = renamed[head]
            return None if shown is None else _new_name(shown + name[end:], {})
        end = name.rfind(".", 0, end)
    return name.replace(".base_layer", "").replace("_orig_mod.", "")


def _plain_tensors(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors inside a tensor subclass, such as the integers and scales of quantized weights."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


# --- changes --------------------------------------------------------------------------------------------------------


def target_version(model: Any) -> str | None:
    """
    Return the fingerprint of a model, or the name that [`target_changed`] gave it; `None` if it has none.

    The fingerprint is computed again only after a change that torch or PEFT count: in-place changes (optimizers,
    `load_state_dict`), replaced weights, and adapters that are added, switched, merged or scaled. The check takes
    about ten microseconds. Writes through `.data` are found only by [`look_closely`]. Hooks and patched methods are
    not noticed.
    """
    return _ask(model, _Versions.current)


def look_closely(model: Any) -> str | None:
    """Compute the fingerprint again, and return it if the weights have changed without being counted; otherwise
    `None`. Takes milliseconds."""
    return _ask(model, _Versions.unnoticed)


def target_changed(model: Any) -> str | None:
    """Give a model a new version, even if its weights do not show a change, and return it."""
    return _ask(model, _Versions.renew)


def _ask(model: Any, question: Callable[[_Versions, Any], str | None]) -> str | None:
    model = unwrap(model)
    try:
        versions = _tracked.get(model)
        if versions is None:
            versions = _tracked[model] = _Versions(model)
        return question(versions, model)
    except Exception as error:  # noqa: BLE001 - unusual models, or models that change at this moment
        logger.info("The version of the target is not known: %s", first_line(error))
        return None


class _Versions:
    """The versions of one model, by the state of the counters of torch and PEFT."""

    def __init__(self, model: Any) -> None:
        self.versions: dict[object, str] = {}
        self.register(model)

    def register(self, model: Any) -> object:
        """List the weights to watch, and return the state of their counters. Weights that are removed from the model
        stay alive until the next call; weak references would keep torch from swapping their contents."""
        weights = [tensor for module in model.modules() for _, tensor in _own_tensors(module)]
        self._tensors = [
            tensor for tensor in weights if not tensor.is_inference()
        ]  # inference tensors have no counter
        places = [(module._parameters, name) for module in model.modules() for name in module._parameters]
        chosen = places[:: max(len(places) // NUM_PROBES, 1)]
        self._probes = [(parameters, name, parameters[name]) for parameters, name in chosen]
        self._peft_layer = next((m for m in model.modules() if getattr(m, "adapter_layer_names", None)), None)
        self._merged = tuple(getattr(self._peft_layer, "merged_adapters", ()))
        return self._counters(model)

    def _counters(self, model: Any) -> object:
        """Return a value that changes with each change that is noticed."""
        if any(parameters.get(name) is not tensor for parameters, name, tensor in self._probes):
            return object()  # weights were replaced
        changes = (sum(map(_in_place_changes, self._tensors)), *vars(model).get("peft_config", ()))
        layer = self._peft_layer
        if layer is None:
            return changes
        scaling = getattr(layer, "scaling", None)
        return (
            changes, tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters),
            tuple(scaling.values()) if isinstance(scaling, dict) else None,
        )  # fmt: skip

    def current(self, model: Any) -> str:
        version = self.versions.get(self._counters(model))
        if version is None:
            tensors, merged = self._tensors, self._merged
            counters = self.register(model)
            # Known versions stay valid only for the same weights. Unmerging an adapter leaves rounding errors.
            is_same = list(map(id, tensors)) == list(map(id, self._tensors)) and merged == self._merged
            known = self.versions if is_same else {}
            version = fingerprint(model)
            if self._counters(model) == counters:  # no change during the computation
                self.versions = dict([*known.items(), (counters, version)][-MAX_VERSIONS:])
        return version

    def unnoticed(self, model: Any) -> str | None:
        before, counters = self.current(model), self._counters(model)
        fresh = _Versions(model)
        fresh_counters, now = fresh._counters(model), fingerprint(model)
        is_unchanged = (self._counters(model), fresh._counters(model)) == (counters, fresh_counters)
        if now == before.partition("-")[0] or self.versions.get(counters) != before or not is_unchanged:
            return None
        fresh.versions = {fresh_counters: now}
        _tracked[model] = fresh
        return now

    def renew(self, model: Any) -> str:
        before = self.current(model)
        if (now := self.unnoticed(model)) is None:
            plain, _, number = before.partition("-")
            now = f"{plain}-{int(number or 0) + 1}"
            self.versions = {self.register(model): now}
        return now


# --- the version that a draft was trained for -----------------------------------------------------------------------


def recorded_target(draft: Any) -> str | None:
    """Return the target version that a draft was trained for, from its configuration."""
    version: str | None = getattr(unwrap(draft).config, TARGET_SETTING, None)
    return version


@contextlib.contextmanager
def record_target(draft: Any, version: str | None) -> Iterator[None]:
    """Write the target version into the draft's configuration inside the block; with `None` change nothing."""
    config, before = unwrap(draft).config, recorded_target(draft)
    if version is not None:
        setattr(config, TARGET_SETTING, version)
    try:
        yield
    finally:
        if before is not None:
            setattr(config, TARGET_SETTING, before)
        elif version is not None:
            delattr(config, TARGET_SETTING)


def warn_of_target(draft: Any, target: Any) -> None:
    """Log a warning if a draft was trained for another version of its target."""
    before = recorded_target(draft)
    if is_fingerprint(before) and (now := target_version(target)) not in (None, before):
        logger.warning(
            "The draft was trained for another version of its target (%s; this one is %s). The answers are still the "
            "target's own. Fewer tokens may be accepted until the draft has learned from this version.", before, now,
        )  # fmt: skip
