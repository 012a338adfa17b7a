"""Manage the drafts that serve and learn: one shared draft, or a base draft and one draft per domain."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from osd_hf.config import OnlineConfig
from osd_hf.decoding.draft_length import Pacer
from osd_hf.decoding.sources import Drafting
from osd_hf.decoding.static import static_draft
from osd_hf.errors import StateError
from osd_hf.learning.gate import MIN_EFFORT
from osd_hf.learning.requests import DraftRequests, ReadableTraces
from osd_hf.learning.updater import Updater
from osd_hf.learning.weights import (
    Snapshot,
    adapted,
    adapter_base,
    adapter_state,
    copy_with,
    fp32_copy,
    is_finite,
    learner_device,
    learning_context,
    make_template,
    serving_copy,
    shared_copy,
    shared_of_head,
    weights_for,
    write_snapshot,
)
from osd_hf.models import is_peft
from osd_hf.vocabulary import usual_tokens

logger = logging.getLogger(__name__)

MAX_DRAFTS = 32  # per domain; the base draft serves further domains
HOST = torch.device("cpu")


class DraftVersion(NamedTuple):
    """A version of a draft. Equal numbers do not imply equal weights: a rollback or a session may bring others."""

    number: int  # 0 is the original draft
    weights: Snapshot
    target_version: str | None = None  # that it learned from, if known


ORIGINAL = DraftVersion(0, {})


@dataclass(eq=False)
class ServingDraft:
    """A model that drafts. Its weights change only while it has no leases."""

    model: Any  # adapters merged
    drafting: Drafting  # generates its candidates
    domain: str | None = None  # of its weights
    holds: DraftVersion | None = None  # `None` while weights are written
    leases: int = 0  # requests that use it

    @property
    def version(self) -> int:
        """Number of the version that it holds."""
        return 0 if self.holds is None else self.holds.number


@dataclass(eq=False)
class _Draft:
    """A draft that learns: its requests, updater and versions. It has no weights before it learns."""

    requests: DraftRequests
    serving: DraftVersion = ORIGINAL
    previous: DraftVersion = ORIGINAL
    original: Snapshot = field(default_factory=dict)  # weights of version 0
    updater: Updater | None = None


class DomainDrafts:
    """Manage a base draft and, for each domain that is learned from, a separate draft: an adapter of `peft_config`, or
    by default a full copy. Without `per_domain`, all domains share one draft. Models that serve are made from learned
    weights when requests need them, with adapters merged. The caller's draft is copied, except parameters of the names
    in `shared`, whose values stay those given there; by default what a head shares with its target. May be used from
    several threads. Raises UnsupportedModelError for adapters that do not fit or cannot be merged, and ConfigError if
    the `learner_device` does not exist."""

    def __init__(
        self,
        draft: PreTrainedModel,
        config: OnlineConfig | None = None,
        *,
        peft_config: Any = None,
        per_domain: bool = True,
        shared: Snapshot | None = None,
        tokenizer: Any = None,
    ) -> None:
        shared = shared_of_head(draft) if shared is None else shared
        self.shared = frozenset(shared)  # names of parameters that never learn
        self.config = config or OnlineConfig()
        self.peft_config = peft_config
        self.per_domain = per_domain
        self._learner_device = learner_device(self.config)
        base = serving_copy(draft, self.config, shared)
        has_own_adapter = is_peft(draft) and not per_domain and peft_config is None
        self._source = fp32_copy(copy_with(draft, {})) if has_own_adapter else base  # updaters start from it
        self._template = make_template(self._source, peft_config, self.config.seed)
        self._fp32_base: PreTrainedModel | None = None  # below adapters that learn
        self.readable = ReadableTraces.by(base)
        self.pacer = Pacer()
        self.version = 0
        self._how: dict[str, Any] = {"usual_tokens": usual_tokens(draft, tokenizer)}
        self._drafts: dict[str | None, _Draft] = {} if per_domain else {None: self._new_draft(None)}
        self._has_refused = False
        self._static = static_draft(base, self.config)
        # Copies share memory with their versions, unless a graph has captured addresses, or only parts learn.
        is_part = getattr(base, "_hf_peft_config_loaded", False)
        self._shares_weights = not is_part and self._static is None
        self.base: Any = base  # the model of the original draft
        self._base = ServingDraft(base, self._drafting(base))  # serves as well, always unchanged
        self.held: list[ServingDraft] = []  # models with learned versions; overlapping requests may need several
        self.models: weakref.WeakSet[Any] = weakref.WeakSet([base])  # models that serve or have served
        self._lock = threading.RLock()

    def _new_draft(self, domain: str | None) -> _Draft:
        return _Draft(DraftRequests(self.readable, domain, self.config, **self._how))

    def set_pace(self, *, min_effort: float = MIN_EFFORT, target_lag: int = 0) -> None:
        """Set the least share of the configured updates, and the number of earlier versions of the target that are
        still learned from."""
        self._how |= {"min_effort": min_effort, "target_lag": target_lag}
        for requests in self.requests.values():
            requests.target_lag = target_lag
            requests.effort.least = min_effort

    # --- domains and versions ---------------------------------------------------------------------------------------

    def admit(self, domain: str | None) -> bool:
        """Whether a draft learns from requests of this domain. A new domain gets a draft, up to `MAX_DRAFTS`."""
        if not self.per_domain or domain is None:
            return not self.per_domain
        with self._lock:
            if domain in self._drafts:
                return True
            if len(self._drafts) < MAX_DRAFTS:
                self._drafts[domain] = self._new_draft(domain)
                return True
            if not self._has_refused:
                self._has_refused = True
                logger.warning(
                    "%d domains have drafts, the maximum. The base draft serves %r and further domains.",
                    len(self._drafts),
                    domain,
                )
            return False

    @property
    def domains(self) -> tuple[str | None, ...]:
        """Domains with a draft, in order of appearance; `(None,)` if all share one."""
        return tuple(self.requests)

    @property
    def requests(self) -> dict[str | None, DraftRequests]:
        """The requests of each draft, by domain."""
        with self._lock:
            return {domain: draft.requests for domain, draft in self._drafts.items()}

    def key(self, domain: str | None) -> str | None:
        """Return the key of the draft that serves a domain; `None` is the base draft or the shared one."""
        with self._lock:
            return domain if self.per_domain and domain in self._drafts else None

    def serving(self, domain: str | None) -> DraftVersion:
        """Return the version that serves a domain."""
        with self._lock:
            draft = self._drafts.get(self.key(domain))
            return ORIGINAL if draft is None else draft.serving

    def serving_version(self, domain: str | None = None) -> int:
        """Return the number of the version that serves a domain; 0 is the original draft."""
        return self.serving(domain).number

    def previous(self, domain: str | None) -> DraftVersion:
        """Return the version that served before; after a rollback and at first, the original draft."""
        with self._lock:
            return self._drafts[domain].previous

    # --- serving ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lease(self, domain: str | None = None, *, original: bool | None = False) -> Iterator[ServingDraft]:
        """Yield the newest version of a domain's draft, the original draft, or (`None`) the one that was accepted more
        on the newest requests. Its weights do not change inside."""
        with self._lock:
            try:
                serving = self._ready(domain, original=original)
            except Exception:  # such as out of memory: the request is served all the same
                logger.exception("The draft of %r cannot be made ready; another version serves.", domain)
                serving = self._find(self.key(domain)) or self._base
            serving.leases += 1
        try:
            yield serving
        finally:
            with self._lock:
                serving.leases -= 1
                self._remove_outdated()

    def model(self, domain: str | None = None) -> Any:
        """Return the model that serves requests of a domain now."""
        with self._lock:
            model = self._ready(domain).model
            self._remove_outdated()
            return model

    def vocab_size(self, domain: str | None) -> int | None:
        """Return the number of tokens that the draft of a domain chooses from; `None` for all."""
        with self._lock:
            token_ids = (self._find(self.key(domain)) or self._base).drafting.token_ids
        return None if token_ids is None else len(token_ids)

    # The caller of the next six methods holds the lock.

    def _find(self, domain: str | None, version: DraftVersion | None = None) -> ServingDraft | None:
        """Return a model that holds this version of a domain's draft, by default any version."""
        complete = (s for s in self.held if s.domain == domain and s.holds is not None)
        return next((s for s in complete if version is None or s.holds is version), None)

    def _ready(self, domain: str | None, *, original: bool | None = False) -> ServingDraft:
        """Return a model with the newest version of a draft, filled now if there is none; see [`lease`]."""
        key = self.key(domain)
        draft = self._drafts.get(key)
        if original is None:
            original = draft is not None and self.config.gate and draft.requests.choice.is_original
        if original or draft is None or draft.serving.number == 0:
            serving = self._base
        else:
            version = draft.serving
            serving = self._find(key, version) or self._fill(key, version, self._prepare(version.weights))
        token_ids = self._vocabulary(serving.domain)
        if not (serving.leases or serving.drafting.is_restricted_to(token_ids)):
            serving.drafting.restrict(token_ids)
        return serving

    def _vocabulary(self, domain: str | None) -> NDArray[Any] | None:
        """Return the tokens that a draft should choose from. The base of drafts per domain chooses from all."""
        draft = self._drafts.get(domain)
        return None if draft is None else draft.requests.vocabulary.chosen

    def _fill(self, domain: str | None, version: DraftVersion, weights: Snapshot) -> ServingDraft:
        """Write prepared weights into an unused model of the domain, or a new one."""
        serving = next((s for s in self.held if s.domain == domain and not s.leases), None)
        if serving is None:
            model = shared_copy(self.base, None if self._shares_weights else self.shared)
            write_snapshot(weights, model, share=self._shares_weights)
            serving = ServingDraft(model, self._drafting(model), domain)
            serving.drafting.clock = self._base.drafting.clock
            self.held.append(serving)
            self.models.add(model)
        else:
            serving.holds = None
            write_snapshot(weights, serving.model, share=self._shares_weights)
        serving.drafting.restrict(self._vocabulary(domain))
        serving.holds = version
        return serving

    def _remove_outdated(self) -> None:
        """Remove unused models of earlier versions if their domain has another model."""
        for held in list(self.held):
            has_another = sum(s.domain == held.domain for s in self.held) > 1
            draft = self._drafts.get(held.domain)
            is_newest = draft is not None and held.holds is draft.serving
            if has_another and not (held.leases or is_newest):
                self.held.remove(held)

    def _prepare(self, snapshot: Snapshot) -> Snapshot:
        """Return the weights to fill a model with: adapters merged, and nothing that shares memory with the base."""
        weights = weights_for(self.base, snapshot, self._template)
        base = {p.data_ptr() for p in self.base.parameters()}
        return {name: weight.clone() if weight.data_ptr() in base else weight for name, weight in weights.items()}

    def _drafting(self, model: PreTrainedModel) -> Drafting:
        k, sources = self.config.num_assistant_tokens, self.config.candidates
        return Drafting(model, k, sources=sources, static=self._static, pacer=self.pacer)

    def promote(self, domain: str | None, version: int, snapshot: Snapshot, target_version: str | None = None) -> None:
        """Serve a version, which learned from this version of the target, from the next request on. Running requests
        keep theirs."""
        weights = self._prepare(snapshot)
        kept = snapshot if self._shares_weights else self.to_host(snapshot)
        promoted = DraftVersion(version, kept, target_version)
        with self._lock:
            draft = self._drafts[domain]
        previous = draft.serving
        if previous.number:  # version 0 shares memory with the base
            previous = previous._replace(weights=self.to_host(previous.weights))
        with self._lock:
            self._fill(domain, promoted, weights)
            draft.previous = previous
            draft.serving = promoted
            self._remove_outdated()
        self.model_changed(domain)

    def roll_back(self, domain: str | None, version: int, weights: Snapshot | None = None) -> Snapshot:
        """Serve the previous version, 0, or one with the given weights; returns its weights."""
        with self._lock:
            draft = self._drafts[domain]
            earlier = DraftVersion(version, weights or draft.original)
            if version and version == draft.previous.number:
                earlier = draft.previous._replace()  # a new object, so that its weights are written again
            draft.serving = earlier
            draft.previous = ORIGINAL
        self.model(domain)  # filled now, so that no request waits
        self.model_changed(domain)
        return earlier.weights

    def model_changed(self, domain: str | None) -> None:
        """Halve the weight of past acceptance: another version of the draft, or of the target, serves."""
        self.pacer.draft_changed(domain if self.per_domain else ...)

    # --- learning ---------------------------------------------------------------------------------------------------

    def updater(self, domain: str | None) -> Updater:
        """Return the updater of a domain's draft, made from the base at the first call."""
        with self._lock:
            draft = self._drafts.get(domain) or self._new_draft(domain)
            if draft.updater is not None:
                return draft.updater
        source, peft_config = self._source, self.peft_config
        if peft_config is not None:
            with learning_context():
                if self._fp32_base is None:  # shared by all adapters and, if it can be, with the serving base
                    self._fp32_base = shared_copy(source).to(self._learner_device or source.device).float().eval()
                source = adapted(adapter_base(self._fp32_base, peft_config), peft_config, self.config.seed)
        how: dict[str, Any] = {"dtype": self.base.dtype, "frozen": self.shared}
        updater = Updater(source, self.config, requests=draft.requests, **how)
        base = dict(self.base.named_parameters())
        is_adapter = self._template is not None
        original = updater.snapshot(base) if is_adapter else {n: base[n].detach() for n in updater.averaged}
        with self._lock:
            self._drafts[domain] = draft
            draft.updater = updater
            draft.original = original
            if not draft.serving.weights:
                draft.serving = draft.serving._replace(weights=original)
        return updater

    @property
    def learning(self) -> set[str | None]:
        """Domains with an updater."""
        with self._lock:
            return {domain for domain, draft in self._drafts.items() if draft.updater is not None}

    @contextlib.contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Restore the drafts, their updaters and versions if an error is raised inside."""
        with self._lock:
            before = {domain: replace(draft) for domain, draft in self._drafts.items()}
        try:
            yield
        except BaseException:
            with self._lock:
                self._drafts = before
            raise

    def candidate(self, domain: str | None) -> tuple[int, Snapshot]:
        """Return a new version number, and the present weights of a domain's updater."""
        snapshot = self.updater(domain).snapshot(dict(self.base.named_parameters()))
        with self._lock:
            self.version += 1
            return self.version, snapshot

    def trial_model(self, snapshot: Snapshot) -> Any:
        """Return a model with these weights that does not serve. All but merged adapters shares their memory."""
        model = shared_copy(self.base)
        write_snapshot(snapshot, model, self._template, share=True)
        return model

    # --- saved state ------------------------------------------------------------------------------------------------

    def _placed(self, snapshot: Snapshot) -> Snapshot:
        """Move weights to the devices of the base."""
        devices = {name: p.device for name, p in self.base.named_parameters()}
        return {name: tensor.to(devices.get(name, self.base.device)) for name, tensor in snapshot.items()}

    def to_host(self, snapshot: Snapshot) -> Snapshot:
        """Move the weights of a full copy from an accelerator to main memory; other weights stay."""
        if self._template is not None or self.base.device.type in (HOST.type, "meta"):
            return snapshot
        return {name: weight.to(HOST) for name, weight in snapshot.items()}

    def _check(self, domain: str | None, snapshot: Snapshot) -> None:
        """Raise StateError for weights that are not finite or do not fit."""
        if not is_finite(snapshot):
            raise StateError(f"The saved draft of {domain!r} has weights that are not finite. Save it again.")
        parameters = self.base.named_parameters()
        learnable = {name: p for name, p in parameters if p.is_floating_point() and name not in self.shared}
        expected = learnable if self._template is None else adapter_state(self._template)
        # Adapters added by transformers learn alone, inside a full model.
        is_part = self._template is None and getattr(self.base, "_hf_peft_config_loaded", False)
        saved_shapes = {name: tuple(t.shape) for name, t in snapshot.items()}
        shapes = {name: tuple(t.shape) for name, t in expected.items()}
        if not saved_shapes.items() <= shapes.items() or (len(saved_shapes) < len(shapes) and not is_part):
            raise StateError(
                f"The saved draft of {domain!r} belongs to another base or adapter configuration. Load it with those "
                "that it was saved with."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the serving and previous versions by domain; updaters are saved separately."""
        with self._lock:
            drafts = [
                {"domain": domain, "serving": tuple(draft.serving), "previous": tuple(draft.previous)}
                for domain, draft in self._drafts.items()
            ]
            return {"version": self.version, "drafts": drafts}

    def load_state_dict(self, state: dict[str, Any], learners: Container[str | None] | None = None) -> None:
        """Serve saved versions. The domains of `learners` (all by default) keep their updaters and requests. Raises
        StateError, with nothing changed, if the versions belong to another draft."""
        for saved in state["drafts"]:
            if weights := saved["serving"][1]:
                self._check(saved["domain"], weights)
        with self._lock:
            self.version = int(state["version"])
            before, self._drafts = self._drafts, {}
            for saved in state["drafts"]:
                domain = saved["domain"]
                serving, previous = DraftVersion(*saved["serving"]), DraftVersion(*saved["previous"])
                draft = before.get(domain)
                if draft is None or (learners is not None and domain not in learners):
                    draft = self._new_draft(domain)
                draft.serving = serving._replace(weights=self._placed(serving.weights))
                place = self.to_host if self._template is None else self._placed
                draft.previous = previous._replace(weights=place(previous.weights))
                self._drafts[domain] = draft
        for domain in self.domains:
            self.model(domain)  # filled now
            self.model_changed(domain)
