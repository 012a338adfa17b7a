"""Models that serve: versions of drafts, and the copies of the base that hold them."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from osd_hf.config import OnlineConfig
from osd_hf.decoding.draft_length import Pacer
from osd_hf.decoding.forward import static_draft
from osd_hf.decoding.generator import LeanDrafting
from osd_hf.learning.weights import Snapshot, learning_context, served_weights, sharing, write_snapshot

__all__ = ["Copies", "ServingDraft", "Version"]


class Version(NamedTuple):
    """A version of a draft: its number, 0 for the draft as it was, its weights, and the version of the target that it
    was taught for, where that is known. Equal numbers are no proof: a rollback or a session may bring other weights of
    the same one."""

    number: int
    weights: Snapshot
    taught_for: str | None = None


@dataclass(eq=False)
class ServingDraft:
    """A model that drafts. Its weights change only while nobody holds it."""

    model: Any  # with adapters merged; `None` before it is filled for the first time
    drafting: LeanDrafting | None  # makes its candidates; `None`: transformers' own generator
    domain: str | None = None  # whose weights it holds
    holds: Version | None = None  # which weights; `None` while they are written
    leases: int = 0  # requests that use it now
    is_changing: bool = False  # the tokens that it chooses among; nobody else may use it meanwhile
    used: int = 0  # when it was used last, in requests

    @property
    def version(self) -> int:
        """Number of the version that it holds."""
        return 0 if self.holds is None else self.holds.number


class Copies:
    """
    Copies of one base model, each `held` for a domain; requests at once may need more for a while. The base serves as
    well, always as it was. `making` are the domains of which one is being filled. Not
    locked: its owner is, for all but [`~Copies.ready`] and [`~Copies.fill`], which take long. Where weights are an
    adapter's, `template` is a `PeftModel` with that adapter, unmerged. Copies have the weights of their versions, or
    those that an adapter was merged into.
    """

    def __init__(self, base: Any, template: Any, config: OnlineConfig, pacer: Pacer) -> None:
        self.template, self.config, self.pacer = template, config, pacer
        self.compiled = static_draft(base, config)
        # Not where a compiled forward has captured where its weights lie, or some of them do not learn.
        is_part = getattr(base, "_hf_peft_config_loaded", False)
        self.shares = not is_part and self.compiled is None
        self.base = ServingDraft(base, self._draft_with(base))
        self.held: list[ServingDraft] = []
        self.making: set[str | None] = set()
        self.made: weakref.WeakSet[Any] = weakref.WeakSet([base])  # all models that serve, or did
        self.bytes_each: int = sum(tensor.nbytes for tensor in (*base.parameters(), *base.buffers()))
        self._clock = 0

    def find(self, domain: str | None, version: Version | None = None) -> ServingDraft | None:
        """One that holds this version of a domain's draft, or any; `None` where none does."""
        whole = (serving for serving in self.held if serving.domain == domain and serving.holds is not None)
        return next((serving for serving in whole if version is None or serving.holds is version), None)

    def use(self, serving: ServingDraft) -> ServingDraft:
        """Lease one."""
        self._clock += 1
        serving.leases, serving.used = serving.leases + 1, self._clock
        return serving

    def release(self, serving: ServingDraft, newest: Mapping[str | None, Version]) -> None:
        """End a lease; let go of what overlapping requests made and is old by now."""
        serving.leases -= 1
        for held in sorted(self.held, key=lambda s: s.used):
            is_doubled = sum(s.domain == held.domain for s in self.held) > 1
            is_old = held.holds is None or held.holds is not newest.get(held.domain)
            if held.leases == 0 and (is_doubled and is_old):
                self.held.remove(held)

    def reserve(self, domain: str | None) -> ServingDraft:
        """One to be filled for a domain, leased to who fills it: one of its own that nobody uses, or a new one."""
        own = [serving for serving in self.held if serving.leases == 0 and serving.domain == domain]
        if not own:
            own = [ServingDraft(None, None)]
            self.held += own
        serving = own[0]
        serving.domain, serving.holds = domain, None
        self.making.add(domain)
        return self.use(serving)

    def ready(self, snapshot: Snapshot) -> Snapshot:
        """What a version's copy is filled with: adapters merged, and none of the base's own, which nobody is to write
        into by a copy. Gives way meanwhile."""
        weights = served_weights(snapshot, self.base.model, self.template)
        base = {p.data_ptr() for p in self.base.model.parameters()}
        return {name: weight.clone() if weight.data_ptr() in base else weight for name, weight in weights.items()}

    def fill(self, serving: ServingDraft, weights: Snapshot) -> None:
        """Copy and write what was reserved, outside of any lock. [`~Copies.filled`] is called after it, also after an
        error."""
        model = self.another() if serving.model is None else serving.model
        if serving.drafting is not None:
            serving.drafting.forget()
        self._write(weights, model)
        if serving.model is None:
            serving.drafting, serving.model = self._draft_with(model), model
            if serving.drafting is not None and self.base.drafting is not None:
                serving.drafting.clock = self.base.drafting.clock  # they share what is known of costs

    def filled(self, serving: ServingDraft, version: Version | None) -> None:
        """It holds this version now, or none after an error; what could not be made is let go."""
        self.making.discard(serving.domain)
        if serving.model is None:
            self.held.remove(serving)
        else:
            self.made.add(serving.model)
            serving.holds = version

    def forget_leases(self) -> None:
        """Nobody uses these models any more, and nobody fills what was reserved. Who holds one nevertheless gives the
        old entry back, which no longer counts."""
        unused = functools.partial(replace, leases=0, is_changing=False)
        self.base = unused(self.base)
        self.held = [unused(serving) for serving in self.held if serving.model is not None]
        self.making = set()

    def another(self) -> Any:
        """A copy of the base, not held here."""
        with learning_context():
            return (sharing if self.shares else copy.deepcopy)(self.base.model)

    def _write(self, weights: Snapshot, model: Any) -> None:
        write_snapshot(weights, model, share=self.shares)

    def _draft_with(self, model: Any) -> LeanDrafting:
        k, sources = self.config.num_assistant_tokens, self.config.candidates
        return LeanDrafting(model, k, sources=sources, compiled=self.compiled, pacer=self.pacer)
