"""Drafts of several domains in one folder: each as PEFT or transformers loads it, and an index."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from osd_hf.config import OnlineConfig
from osd_hf.drafting.generator import LeanDrafting
from osd_hf.errors import ConfigError, StateError, UnsupportedModelError
from osd_hf.pair import is_peft, merged, ties_embeddings, untie
from osd_hf.utils.disk import write_whole
from osd_hf.utils.report import make_folder

__all__ = [
    "Copies",
    "FALLBACK_K",
    "ServingDraft",
    "Snapshot",
    "adapted",
    "adapter_state",
    "is_finite",
    "learning_context",
    "make_template",
    "read_drafts",
    "ready_to_serve",
    "seeded",
    "write_drafts",
    "write_snapshot",
]

Snapshot = dict[str, torch.Tensor]  # learned weights by name; of an adapter, by the names in its file


@contextmanager
def learning_context() -> Iterator[None]:
    """Gradients on, whatever mode the caller is in: answers are often made under `no_grad` or `inference_mode`."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def is_finite(snapshot: Snapshot) -> bool:
    """Whether all weights are numbers."""
    return all(bool(torch.isfinite(weight).all()) for weight in snapshot.values())


def adapter_state(model: Any, adapter: str) -> Snapshot:
    """Weights of an adapter of a `PeftModel`, by the names of its file; without those of embeddings below it, which
    PEFT would add and which it has not changed."""
    from peft import get_peft_model_state_dict

    state: Snapshot = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return state


def write_snapshot(snapshot: Snapshot, draft: Any, template: Any = None) -> None:
    """
    Write learned weights into a draft, in place, cast to its dtype.

    Args:
        snapshot (`dict[str, torch.Tensor]`):
            As [`Updater.snapshot`] gives it.
        draft (`PreTrainedModel`):
            A copy of the draft that was learned from; of one with adapters, with them merged or as it was.
        template (`PeftModel`, *optional*):
            Where the weights are an adapter's: one with that adapter, unmerged.
    """
    with learning_context(), torch.no_grad():
        if template is None:
            served = dict(draft.named_parameters())
            for name, learned in snapshot.items():
                served[name].copy_(learned)
            return
        from peft import set_peft_model_state_dict

        adapted = copy.deepcopy(template)
        set_peft_model_state_dict(adapted, snapshot, adapter_name=str(adapted.active_adapter))
        draft.load_state_dict((adapted if is_peft(draft) else adapted.merge_and_unload()).state_dict())


FALLBACK_K = 5  # where the number of drafted tokens is not fixed, and one is needed


@dataclass(eq=False)
class ServingDraft:
    """
    A model that drafts. Its weights change only while nobody holds it.

    Args:
        model (`PreTrainedModel`):
            With adapters merged.
        drafting (`LeanDrafting`, *optional*):
            What makes its candidates; `None`: transformers' own generator.
        domain (`str`, *optional*), version (`int`):
            Whose weights it holds, and which.
        is_written (`bool`, defaults to `True`):
            Whether it holds them whole.
        is_spoiled (`bool`, defaults to `False`):
            Whether what is being written now is not to be trusted any more.
        leases (`int`, defaults to 0):
            Requests that use it now.
        used (`int`, defaults to 0):
            When it was used last, in requests.
    """

    model: Any
    drafting: LeanDrafting | None
    domain: str | None = None
    version: int = 0
    is_written: bool = True
    is_spoiled: bool = False
    leases: int = 0
    used: int = 0


def ready_to_serve(draft: Any, config: OnlineConfig) -> Any:
    """A copy of a draft, its adapter merged, that drafts as the configuration says."""
    with learning_context():
        served = merged(draft)
        served = (copy.deepcopy(draft) if served is draft else served).eval()
    k = config.num_assistant_tokens
    if k is not None:
        served.generation_config.num_assistant_tokens = FALLBACK_K if k == "auto" else k
        served.generation_config.num_assistant_tokens_schedule = "constant"
        served.generation_config.assistant_confidence_threshold = 0.0
    return served


class Copies:
    """
    Copies of one base model, with the weights of different drafts and versions. Not locked: its owner is, for all but
    [`~Copies.fill`], which takes long.

    Args:
        base (`PreTrainedModel`):
            What is copied.
        draft_with (`Callable[[Any], LeanDrafting | None]`):
            Makes a model's candidate maker.
        write (`Callable[[Snapshot, Any], None]`):
            Writes weights into a model.
        most (`Callable[[], float]`):
            Models to hold at most; requests at once may need more for a while.
    """

    def __init__(
        self,
        base: Any,
        draft_with: Callable[[Any], LeanDrafting | None],
        write: Callable[[Snapshot, Any], None],
        most: Callable[[], float],
    ) -> None:
        self.base = ServingDraft(base, draft_with(base))
        self.held: list[ServingDraft] = []
        self._draft_with, self._write, self._most = draft_with, write, most
        self._made: weakref.WeakSet[Any] = weakref.WeakSet([base])

    def made(self, model: Any) -> bool:
        """Whether a model is, or was, one of these."""
        return model in self._made

    def find(self, domain: str | None, version: int | None = None) -> ServingDraft | None:
        """One that holds these weights, or any of the domain's; `None` where none does."""
        for serving in self.held:
            if serving.domain == domain and version in (None, serving.version) and serving.is_written:
                return serving
        return None

    def reserve(self, domain: str | None, version: int) -> ServingDraft:
        """One to be filled with these weights, leased to who fills it; its place counts from now on."""
        serving = self._free(domain)
        serving.domain, serving.version = domain, version
        serving.is_written = serving.is_spoiled = False
        serving.leases += 1
        return serving

    def fill(self, serving: ServingDraft, snapshot: Snapshot) -> None:
        """Copy and write what was reserved, outside of any lock. [`~Copies.filled`] is called after it, also
        after an error."""
        if serving.model is None:
            model = self.another()
            self._write(snapshot, model)
            serving.drafting, serving.model = self._draft_with(model), model
        else:
            self._write(snapshot, serving.model)

    def filled(self, serving: ServingDraft, *, is_whole: bool) -> None:
        """It may serve now, unless it was spoiled meanwhile; what could not be made is let go."""
        if serving.model is None:
            self.held.remove(serving)
            return
        self._made.add(serving.model)
        serving.is_written = is_whole and not serving.is_spoiled

    def _free(self, domain: str | None) -> ServingDraft:
        """One that nobody holds: of the same domain, or a new one, or the one that was not used for longest."""
        free = [serving for serving in self.held if serving.leases == 0]
        same = [serving for serving in free if serving.domain == domain]
        if same:
            return same[0]
        if free and len(self.held) >= self._most():
            return min(free, key=lambda serving: serving.used)
        self.held.append(ServingDraft(None, None, domain, is_written=False))
        return self.held[-1]

    def forget_leases(self) -> None:
        """Nobody uses these models any more, and nobody fills what was reserved. Who holds one nevertheless gives the
        old entry back, which no longer counts."""
        before, self.base = self.base, replace(self.base, leases=0)
        self.held = [
            self.base if serving is before else replace(serving, leases=0)
            for serving in self.held
            if serving.model is not None
        ]

    def another(self) -> Any:
        """A copy of the base, not held here."""
        with learning_context():
            return copy.deepcopy(self.base.model)

    def spoil(self, domain: str | None = None, *, everything: bool = False) -> None:
        """What these models hold is not to be trusted; they are written anew before they serve again."""
        for serving in self.held:
            if everything or serving.domain == domain:
                serving.is_written, serving.is_spoiled = False, True

    def trim(self, is_newest: Callable[[ServingDraft], bool]) -> None:
        """Let go what overlapping requests made, and what is over the limit."""
        for serving in sorted(self.held, key=lambda s: s.used):
            is_doubled = sum(s.domain == serving.domain for s in self.held) > 1
            is_old = not (serving.is_written and is_newest(serving))
            if serving.leases == 0 and ((is_doubled and is_old) or len(self.held) > self._most()):
                self.held.remove(serving)


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


INDEX = "drafts.json"


def write_drafts(
    directory: Path, versions: Mapping[str | None, int], save: Callable[[str | None, Path], None]
) -> None:
    """Write the draft of each domain by `save`, and the index last; raises ConfigError where it cannot be written."""
    make_folder(directory)
    index = {}
    for number, (domain, version) in enumerate(versions.items()):
        folder = f"draft-{number:03d}"
        save(domain, directory / folder)
        index[folder] = {"domain": domain, "version": version}
    write_whole(directory / INDEX, (json.dumps(index, indent=1) + "\n").encode(), private=False)


def read_drafts(
    directory: Path, *, adapters: bool, without: Collection[str]
) -> dict[str | None, tuple[int, Snapshot]]:
    """Version and weights by domain, less the tensors named in `without`; raises StateError where nothing
    can be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    name = "adapter_model.safetensors" if adapters else "model.safetensors"
    try:
        index = json.loads((directory / INDEX).read_text())
        loaded = {}
        for folder, entry in index.items():
            state = load_file(directory / folder / name)
            kept = {tensor: state[tensor] for tensor in state if tensor not in without}
            loaded[entry["domain"]] = (int(entry["version"]), kept)
        return loaded
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise StateError(f"The drafts in {directory} cannot be read: {error}. Restore them from a copy.") from error
