"""Which version of a target answers: a fingerprint of the weights that shape its output, and whether they changed."""

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

__all__ = [
    "TAUGHT_FOR", "fingerprint", "is_fingerprint", "look_closely", "taught_for", "target_changed", "target_version",
    "warn_of_target",
]  # fmt: skip

logger = logging.getLogger(__name__)

VALUES = 256  # sampled of a tensor, at least
ROWS = 8  # of which at least one value is sampled: in a step, few rows of embeddings may change
PROBED = 8  # parameters of which each look asks whether they are there still
REMEMBERED = 16  # versions of one model, such as those of adapters that take turns
TAUGHT_FOR = "osd_hf_target"  # in a draft's configuration: the version of the target that it was taught for
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
_changes = operator.attrgetter("_version")


# --- the fingerprint ------------------------------------------------------------------------------------------------


@neutral_context()
@torch.no_grad()
def fingerprint(model: Any) -> str:
    """
    A short name of a model's weights: the same for a model that was saved and loaded again in the same dtype, on
    whatever device; another one after a step of training, with another adapter, or quantized otherwise. It is made of
    names, shapes, dtypes and a sample of the values, so that it takes milliseconds, and what changes a few values
    alone may go unnoticed. Adapters count where they are active, merged ones as part of the weights. Weights that are
    offloaded are known by their names and shapes alone.

    Args:
        model (`PreTrainedModel`): A `PeftModel` or a compiled model as well.

    Returns:
        `str`: 16 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=8)
    found = sorted(_shaping(unwrap(model)), key=operator.itemgetter(0))
    groups: dict[tuple[torch.device, int], list[tuple[int, torch.Tensor]]] = {}
    for place, (_, tensor) in enumerate(found):
        if tensor.device.type != "meta" and tensor.numel():
            groups.setdefault((tensor.device, tensor.element_size()), []).append((place, _sample(tensor)))
    values: dict[int, bytes] = {}
    for group in groups.values():  # one copy to the host for each
        joined, end = torch.cat([sample for _, sample in group]).cpu().numpy().tobytes(), 0
        for place, sample in group:
            start, end = end, end + sample.nbytes
            values[place] = joined[start:end]
    for place, (name, tensor) in enumerate(found):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode() + values.get(place, b""))
    return digest.hexdigest()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some values of a tensor, evenly spread, as integers of their bits."""
    flat = tensor.detach().reshape(-1)
    count = max(VALUES, len(tensor) // ROWS) if tensor.ndim > 1 else VALUES
    step = max(len(flat) // count, 1) | 1  # odd, so that it meets all columns of a matrix
    return flat[::step].view(INTEGERS[tensor.element_size()])


def _shaping(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, and the buffers that are saved with them, that shape the output, by the names that they have in a
    model without adapters; those of adapters by their place among the active ones."""
    renamed: dict[str, str | None] = {}  # beginnings of names; `None`: of no account
    met: set[int] = set()
    for path, module in model.named_modules():
        yield from _adapters(path, module, renamed)
        for name, tensor in _saved(module):
            shown = None if id(tensor) in met else _name(f"{path}.{name}", renamed)
            met.add(id(tensor))  # others are tied to it
            if shown is not None:
                yield from _plain(shown, tensor)


def _saved(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own weights, and the buffers that are saved with them."""
    buffers = (item for item in module._buffers.items() if item[0] not in module._non_persistent_buffers_set)
    return ((name, tensor) for name, tensor in (*module._parameters.items(), *buffers) if tensor is not None)


def _adapters(path: str, module: Any, renamed: dict[str, str | None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Note what the adapters of one of PEFT's layers are called, and yield what scales them."""
    parts = getattr(module, "adapter_layer_names", None)
    if not parts:
        return
    active = [] if module.disable_adapters or module.merged_adapters else list(module.active_adapters)
    for part in parts:
        for adapter in getattr(module, part, ()):
            is_whole = part == "modules_to_save"  # in place of the module
            shown = path if is_whole else f"{path}.{part}.{active.index(adapter) if adapter in active else None}"
            renamed[f"{path}.{part}.{adapter}"] = shown if adapter in active else None
            if is_whole and adapter in active:
                renamed[f"{path}.original_module"] = None
    renamed.setdefault(f"{path}.original_module", path)
    scaling = getattr(module, "scaling", None)
    if isinstance(scaling, dict) and active:
        scales = [float(scaling.get(adapter, 1.0)) for adapter in active]
        yield f"{path}.scaling", torch.tensor(scales, dtype=torch.float32)


def _name(name: str, renamed: dict[str, str | None]) -> str | None:
    end = len(name) if renamed else 0
    while end > 0:
        if (head := name[:end]) in renamed:
            shown = renamed[head]
            return None if shown is None else _name(shown + name[end:], {})
        end = name.rfind(".", 0, end)
    return name.replace(".base_layer", "").replace("_orig_mod.", "")


def _plain(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of memory that one is made of: quantized ones have scales beside their integers."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


# --- whether it has changed -----------------------------------------------------------------------------------------


def target_version(model: Any) -> str | None:
    """
    The fingerprint of a model as it is now, or the name that [`target_changed`] gave it; `None` where none can be
    made. It is made anew where torch has counted a change of a weight in place (as optimizers and `load_state_dict`
    make them), where weights were exchanged, or adapters were added, switched, merged or scaled: asking for that takes
    some ten microseconds. What is written through `.data`, hooks and patched methods are not noticed; the first is
    found by [`look_closely`].
    """
    return _told(model, _Known.version)


def look_closely(model: Any) -> str | None:
    """The fingerprint of a model where its weights have changed unnoticed since [`target_version`] was asked last;
    `None` where they have not, or torch counts a change meanwhile, which the next request is told of. Takes
    milliseconds."""
    return _told(model, _Known.unnoticed)


def target_changed(model: Any) -> str | None:
    """Let a model have another version from now on, also where its weights do not show it; returns that, or `None`
    where it has none."""
    return _told(model, _Known.renamed)


def _told(model: Any, ask: Callable[[_Known, Any], str | None]) -> str | None:
    model = unwrap(model)
    try:
        known = _known.get(model)
        if known is None:
            known = _known[model] = _Known(model)
        return ask(known, model)
    except Exception as error:  # noqa: BLE001 - whatever is odd about a model, or is done to it at this moment
        logger.info("The version of the target is not known: %s", first_line(error))
        return None


class _Known:
    """The versions that one model has had, by what torch and PEFT count of its changes."""

    def __init__(self, model: Any) -> None:
        self.versions: dict[object, str] = {}
        self.look(model)

    def look(self, model: Any) -> object:
        """Learn which weights there are, and return what is counted now. Weights that are taken out of the model are
        held until the next look; weak references would keep torch from exchanging their contents."""
        weights = [tensor for module in model.modules() for _, tensor in _saved(module)]
        self._tensors = [tensor for tensor in weights if not tensor.is_inference()]  # of which nothing is counted
        places = [(module._parameters, name) for module in model.modules() for name in module._parameters]
        chosen = places[:: max(len(places) // PROBED, 1)]
        self._probes = [(held, name, held[name]) for held, name in chosen]
        self._layer = next((m for m in model.modules() if getattr(m, "adapter_layer_names", None)), None)
        self._merged = tuple(getattr(self._layer, "merged_adapters", ()))
        return self._counted(model)

    def _counted(self, model: Any) -> object:
        """Another value after each change that is noticed."""
        if any(held.get(name) is not tensor for held, name, tensor in self._probes):
            return object()  # other weights are there
        layer, changes = self._layer, (sum(map(_changes, self._tensors)), *vars(model).get("peft_config", ()))
        if layer is None:
            return changes
        scaling = getattr(layer, "scaling", None)
        return (
            changes, tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters),
            tuple(scaling.values()) if isinstance(scaling, dict) else None,
        )  # fmt: skip

    def version(self, model: Any) -> str:
        version = self.versions.get(self._counted(model))
        if version is None:
            before, merged = self._tensors, self._merged
            counted = self.look(model)
            # Other weights have other versions; an adapter that is merged and taken out again leaves them rounded.
            is_same = list(map(id, before)) == list(map(id, self._tensors)) and merged == self._merged
            known = self.versions if is_same else {}
            version = fingerprint(model)
            if self._counted(model) == counted:  # otherwise it has changed meanwhile
                self.versions = dict([*known.items(), (counted, version)][-REMEMBERED:])
        return version

    def unnoticed(self, model: Any) -> str | None:
        """Its fingerprint where that is another one by what torch and PEFT have not counted."""
        before, noticed = self.version(model), self._counted(model)
        anew = _Known(model)
        counted, now = anew._counted(model), fingerprint(model)
        is_still = (self._counted(model), anew._counted(model)) == (noticed, counted)
        if now == before.partition("-")[0] or self.versions.get(noticed) != before or not is_still:
            return None
        anew.versions = {counted: now}
        _known[model] = anew
        return now

    def renamed(self, model: Any) -> str:
        """Another version than before, that of its weights if that is another one already."""
        before = self.version(model)
        if (now := self.unnoticed(model)) is None:
            plain, _, times = before.partition("-")
            now = f"{plain}-{int(times or 0) + 1}"
            self.versions = {self.look(model): now}
        return now


# --- what a draft was taught for ------------------------------------------------------------------------------------


@contextlib.contextmanager
def taught_for(draft: Any, version: str | None) -> Iterator[None]:
    """The configuration of a draft says inside the block which version of its target it was taught for; with `None` it
    stays as it is."""
    config = unwrap(draft).config
    before = vars(config).get(TAUGHT_FOR)
    if version is not None:
        setattr(config, TAUGHT_FOR, version)
    try:
        yield
    finally:
        if version is not None and before is None:
            delattr(config, TAUGHT_FOR)
        elif version is not None:
            setattr(config, TAUGHT_FOR, before)


def is_fingerprint(version: object) -> bool:
    """Whether a version is told by its weights, not by the name that somebody gave it, a folder's perhaps."""
    return isinstance(version, str) and re.fullmatch(r"[0-9a-f]{16}", version) is not None


def warn_of_target(draft: Any, target: Any) -> None:
    """Say in the log where a draft was taught for another version of its target."""
    before = getattr(unwrap(draft).config, TAUGHT_FOR, None)
    if is_fingerprint(before) and (now := target_version(target)) not in (None, before):
        logger.warning(
            "The draft was taught for another version of its target (%s; this one is %s). Answers are the target's "
            "own all the same; fewer tokens may be accepted, until it has learned from this one.", before, now,
        )  # fmt: skip
