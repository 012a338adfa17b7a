"""The models that serve: copies of one base, with the weights of different drafts and versions."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from osd_hf.config import OnlineConfig
from osd_hf.drafting.generator import LeanDrafting
from osd_hf.drafting.pacing import Pacer
from osd_hf.learning.weights import Snapshot, learning_context, write_snapshot
from osd_hf.pair import merged

__all__ = ["FALLBACK_K", "Copies", "ServingDraft", "ready_to_serve"]

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


class Copies:
    """
    Copies of one base model, with the weights of different drafts and versions. Not locked: its owner is, for all but
    [`~Copies.fill`], which takes long.

    Args:
        base (`PreTrainedModel`):
            What is copied.
        template (`PeftModel`, *optional*):
            Where weights are an adapter's: a model with that adapter, unmerged.
        config (`OnlineConfig`):
            How to draft, and how many bytes may be held; requests at once may need more for a while.
        pacer (`Pacer`):
            What all drafts' lengths are decided by.

    Attributes:
        held (`list[ServingDraft]`):
            Those that hold the weights of a draft, or are being filled with them.
        making (`set[str | None]`):
            Domains of which one is being filled.
    """

    def __init__(self, base: Any, template: Any, config: OnlineConfig, pacer: Pacer) -> None:
        self.template, self.config, self.pacer = template, config, pacer
        self.base = ServingDraft(base, self._draft_with(base))
        self.held: list[ServingDraft] = []
        self.making: set[str | None] = set()
        self._made: weakref.WeakSet[Any] = weakref.WeakSet([base])
        self._clock = 0

    @property
    def bytes_each(self) -> int:
        tensors = [*self.base.model.parameters(), *self.base.model.buffers()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def made(self, model: Any) -> bool:
        """Whether a model is, or was, one of these."""
        return model in self._made

    def find(self, domain: str | None, version: int | None = None) -> ServingDraft | None:
        """One that holds these weights, or any of the domain's; `None` where none does."""
        for serving in self.held:
            if serving.domain == domain and version in (None, serving.version) and serving.is_written:
                return serving
        return None

    def use(self, serving: ServingDraft) -> ServingDraft:
        """Lease one; it is released by [`~Copies.release`]."""
        serving.leases += 1
        self._clock += 1
        serving.used = self._clock
        return serving

    def release(self, serving: ServingDraft, newest: Mapping[str | None, int]) -> None:
        """End a lease, and let go what overlapping requests made and what is over the limit; `newest` are the versions
        that serve."""
        serving.leases -= 1
        for held in sorted(self.held, key=lambda s: s.used):
            is_doubled = sum(s.domain == held.domain for s in self.held) > 1
            is_old = not (held.is_written and newest.get(held.domain) == held.version)
            if held.leases == 0 and ((is_doubled and is_old) or len(self.held) > self._most()):
                self.held.remove(held)

    def reserve(self, domain: str | None, version: int) -> ServingDraft:
        """One to be filled with these weights, leased to who fills it; its place counts from now on. One thread at a
        time fills those of one draft."""
        free = [serving for serving in self.held if serving.leases == 0]
        same = [serving for serving in free if serving.domain == domain]
        if same:
            serving = same[0]
        elif free and len(self.held) >= self._most():
            serving = min(free, key=lambda s: s.used)
        else:
            serving = ServingDraft(None, None)
            self.held.append(serving)
        serving.domain, serving.version = domain, version
        serving.is_written = serving.is_spoiled = False
        self.making.add(domain)
        return self.use(serving)

    def fill(self, serving: ServingDraft, snapshot: Snapshot) -> None:
        """Copy and write what was reserved, outside of any lock. [`~Copies.filled`] is called after it, also after an
        error."""
        if serving.model is None:
            model = self.another()
            self._write(snapshot, model)
            serving.drafting, serving.model = self._draft_with(model), model
        else:
            self._write(snapshot, serving.model)

    def filled(self, serving: ServingDraft, *, is_whole: bool) -> None:
        """It may serve now, unless it was spoiled meanwhile; what could not be made is let go."""
        self.making.discard(serving.domain)
        if serving.model is None:
            self.held.remove(serving)
            return
        self._made.add(serving.model)
        serving.is_written = is_whole and not serving.is_spoiled

    def spoil(self, *domains: str | None) -> None:
        """What the models of these domains hold is not to be trusted; they are written anew before they serve."""
        for serving in self.held:
            if serving.domain in domains:
                serving.is_written, serving.is_spoiled = False, True

    def forget_leases(self) -> None:
        """Nobody uses these models any more, and nobody fills what was reserved. Who holds one nevertheless gives the
        old entry back, which no longer counts."""
        before, self.base = self.base, replace(self.base, leases=0)
        self.held = [
            self.base if serving is before else replace(serving, leases=0)
            for serving in self.held
            if serving.model is not None
        ]
        self.making = set()

    def another(self) -> Any:
        """A copy of the base, not held here."""
        with learning_context():
            return copy.deepcopy(self.base.model)

    def _write(self, snapshot: Snapshot, model: Any) -> None:
        write_snapshot(snapshot, model, self.template)

    def _draft_with(self, model: Any) -> LeanDrafting | None:
        if self.config.drafting != "lean":
            return None
        k, compiled = self.config.num_assistant_tokens, self.config.compile_draft
        return LeanDrafting(model, k, compile_draft=compiled, pacer=self.pacer)

    def _most(self) -> float:
        limit = self.config.max_draft_bytes
        return float("inf") if limit is None else max(limit // self.bytes_each, 1)


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
