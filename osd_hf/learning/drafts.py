"""The drafts that serve: one shared by all requests, or a base draft and one per domain that learns on its own."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from osd_hf.config import OnlineConfig
from osd_hf.drafting.generator import LeanDrafting
from osd_hf.drafting.pacing import Pacer
from osd_hf.errors import ConfigError, StateError
from osd_hf.learning.updater import Updater
from osd_hf.learning.weights import (
    Copies,
    ServingDraft,
    Snapshot,
    adapted,
    adapter_state,
    is_finite,
    learning_context,
    make_template,
    read_drafts,
    ready_to_serve,
    seeded,
    write_drafts,
    write_snapshot,
)
from osd_hf.utils.disk import in_child

__all__ = ["DomainDrafts", "ServingDraft"]

logger = logging.getLogger(__name__)


@dataclass
class _Learned:
    """Versions of one draft, as weights."""

    version: int
    snapshot: Snapshot = field(repr=False)
    previous: tuple[int, Snapshot] | None = field(default=None, repr=False)


class DomainDrafts:
    """
    A base draft and, for each domain that has been learned from, a draft of its own: a LoRA adapter on the base, or a
    full copy. What is learned is kept as weights by version; models ready to serve, adapters merged, are made from it
    as requests ask for them, within a memory limit. May be used from several threads.

    Args:
        draft (`PreTrainedModel`):
            The base; copied, not changed. Of a `PeftModel`, what its adapter makes of it.
        config (`OnlineConfig`, *optional*):
            How to draft and learn; `max_drafts` and `max_draft_bytes` are the limits.
        peft_config (`peft.PeftConfig`, *optional*):
            Of an adapter (`LoraConfig(r=16, target_modules="all-linear")`, for instance); without one every draft
            that learns is a full copy.
        per_domain (`bool`, *optional*, defaults to `True`):
            `False`: all domains share one draft, which learns.

    Raises:
        UnsupportedModelError: adapters that do not fit the draft, or that cannot be merged into its weights.
    """

    def __init__(
        self, draft: Any, config: OnlineConfig | None = None, *, peft_config: Any = None, per_domain: bool = True
    ) -> None:
        self.config = config or OnlineConfig()
        self.peft_config = peft_config
        self.per_domain = per_domain
        base = ready_to_serve(draft, self.config)
        self._source = base if per_domain or peft_config is not None else draft  # what learners start from
        self._template = make_template(self._source, peft_config, self.config.seed, per_domain=per_domain)
        self.pacer = Pacer()
        self._renew()
        self._clock = 0
        self._learned: dict[str | None, _Learned] = {}
        self._updaters: dict[str | None, Updater] = {}
        self._originals: dict[str | None, Snapshot] = {}
        self._master: Any = None  # of all domains' adapters
        self._copies = Copies(base, self._drafting, self._write, self._most)
        if not per_domain:
            self._copies.held.append(self._copies.base)
        self._scratch: Any = None
        self._refused: set[str | None] = set()
        self.version = 0
        in_child(self, DomainDrafts._begin_in_child)

    def _drafting(self, model: Any) -> LeanDrafting | None:
        if self.config.drafting != "lean":
            return None
        k, compiled = self.config.num_assistant_tokens, self.config.compile_draft
        return LeanDrafting(model, k, compile_draft=compiled, pacer=self.pacer)

    # --- who serves -------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """The locks, and what is being made."""
        self._lock = threading.RLock()  # held over no copy and no write of a model
        self._made = threading.Condition(self._lock)
        self._making: set[str | None] = set()  # drafts of which a version is being made ready

    def _begin_in_child(self) -> None:
        """In a forked child nobody makes what others were making, and nobody uses what others were using."""
        self._renew()
        self._copies.forget_leases()

    def admit(self, domain: str | None) -> bool:
        """Whether a request of this domain teaches a draft: any where one is shared; otherwise one of a named domain,
        which gets a draft as long as there is room for one more."""
        if not self.per_domain:
            return True
        if domain is None:
            return False
        with self._lock:
            if domain in self._learned or domain in self._refused:
                return domain in self._learned
            if len(self._learned) >= self.config.max_drafts:
                if not self._refused:
                    logger.warning(
                        "There are %d drafts of domains already (`max_drafts`): %r and further domains are served by "
                        "the base draft.", len(self._learned), domain,
                    )  # fmt: skip
                if len(self._refused) < 1024:
                    self._refused.add(domain)
                return False
            self._learned[domain] = _Learned(0, {})
            return True

    @property
    def domains(self) -> tuple[str | None, ...]:
        """Those that have a draft, in order of appearance; `(None,)` where all share one."""
        with self._lock:
            return tuple(self._learned) if self.per_domain else (None,)

    def key(self, domain: str | None) -> str | None:
        """The domain whose draft serves this one; `None` is the base draft or the shared one."""
        with self._lock:
            return domain if self.per_domain and domain in self._learned else None

    @contextlib.contextmanager
    def lease(self, domain: str | None = None) -> Iterator[ServingDraft]:
        """The draft of a domain, in its newest version; its weights stay as they are inside the `with` block. Where it
        has to be made ready first, only requests of the same draft wait for it."""
        try:
            serving = self._leased(domain)
        except Exception:  # out of memory, for one: the answer must not suffer
            logger.exception("The draft of %r cannot be made ready; another version serves.", domain)
            with self._lock:
                serving = self._used(self._copies.find(self.key(domain)) or self._copies.base)
        try:
            yield serving
        finally:
            self._release(serving)

    @property
    def base(self) -> Any:
        """The base draft's model; where all share one, a model that serves."""
        return self._copies.base.model

    def model(self, domain: str | None = None) -> Any:
        """The model that requests of a domain are served with now, an ordinary transformers model."""
        serving = self._leased(domain)
        self._release(serving)
        return serving.model

    def owns(self, model: Any) -> bool:
        """Whether a model is one of those that serve."""
        return self._copies.made(model)

    def serving_version(self, domain: str | None = None) -> int:
        """Version of the draft of a domain; 0: nothing learned serves."""
        with self._lock:
            learned = self._learned.get(self.key(domain))
            return 0 if learned is None else learned.version

    def _leased(self, domain: str | None) -> ServingDraft:
        """A model that holds the newest version of a draft, leased; made ready now where none does."""
        while True:
            with self._lock:
                key = self.key(domain)
                learned = self._learned.get(key)
                if learned is None or (self.per_domain and learned.version == 0):
                    return self._used(self._copies.base)  # an adapter that has learned nothing changes nothing
                found = self._copies.find(key, learned.version)
                if found is not None:
                    return self._used(found)
                if key in self._making:
                    self._made.wait()
                    continue
                serving = self._reserved(key, learned.version)
            self._fill(serving, learned)
            with self._lock:
                if serving.is_written and self._learned.get(key) is learned:
                    return serving
            self._release(serving)

    def _reserved(self, key: str | None, version: int) -> ServingDraft:
        """A model to be filled with the weights of a version, leased; inside the lock. One thread at a time fills
        those of one draft."""
        serving = self._copies.reserve(key, version)
        self._making.add(key)
        return self._used(serving, leases=0)

    def _fill(self, serving: ServingDraft, learned: _Learned, *, promoted: bool = False) -> None:
        """Fill what was reserved, outside of the lock; where it is promoted, it serves from then on."""
        key, is_whole = serving.domain, False
        try:
            self._copies.fill(serving, learned.snapshot)
            is_whole = True
        finally:
            with self._lock:
                self._copies.filled(serving, is_whole=is_whole)
                if is_whole and promoted:
                    before = self._learned[key]
                    self._learned[key] = replace(learned, previous=(before.version, before.snapshot))
                elif not is_whole:
                    self._release(serving)
                self._making.discard(key)
                self._made.notify_all()

    def _used(self, serving: ServingDraft, *, leases: int = 1) -> ServingDraft:
        serving.leases += leases
        self._clock += 1
        serving.used = self._clock
        return serving

    def _release(self, serving: ServingDraft) -> None:
        with self._lock:
            serving.leases -= 1
            self._trim()

    def _trim(self) -> None:
        self._copies.trim(lambda s: s.domain in self._learned and self._learned[s.domain].version == s.version)

    def _most(self) -> float:
        limit = self.config.max_draft_bytes
        return float("inf") if limit is None else max(limit // self.bytes_per_draft, 1)

    @property
    def bytes_per_draft(self) -> int:
        """Size of one model that serves."""
        tensors = [*self.base.parameters(), *self.base.buffers()]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def num_serving(self) -> int:
        """Models per domain held ready now."""
        return len(self._copies.held)

    # --- who learns -------------------------------------------------------------------------------------------------

    def updater(self, domain: str | None, accelerator: Accelerator | None = None) -> Updater:
        """The learner of a domain's draft, made from the base at the first call. One thread at a time may learn, as
        adapters share their base."""
        with self._lock:
            if domain in self._updaters:
                return self._updaters[domain]
        if self.per_domain and self.peft_config is not None:
            number = 0 if self._master is None else len(self._master.peft_config)
            adapter = (
                f"domain_{number:05d}"  # module names take no dots, and peft may take one for the start of another
            )
            with learning_context():
                if self._master is None:
                    master = copy.deepcopy(self._source).float().eval()
                    self._master = adapted(master, self.peft_config, adapter, self.config.seed)
                else:
                    with seeded(self.config.seed):
                        self._master.add_adapter(adapter, copy.deepcopy(self.peft_config))
                    self._master.eval()  # what it added trains
            updater = Updater(self._master, self.config, accelerator, adapter=adapter)
        elif self.peft_config is not None:
            with learning_context():
                source = adapted(copy.deepcopy(self._source), self.peft_config, "default", self.config.seed)
            updater = Updater(source, self.config, accelerator)
        else:
            updater = Updater(self._source, self.config, accelerator)
        if self.per_domain and self._template is None:  # the base is there, and stays
            original = {name: p.detach() for name, p in self.base.named_parameters() if name in updater.averaged}
        else:
            original = self._cast(updater.snapshot())
        with self._lock:
            learned = self._learned.setdefault(domain, _Learned(0, {}))
            self._originals[domain] = original
            learned.snapshot = learned.snapshot or original
            self._updaters[domain] = updater
        return updater

    @property
    def learning(self) -> set[str | None]:
        """Domains whose drafts have begun to learn."""
        with self._lock:
            return set(self._updaters)

    def forget(self, domains: Iterable[str | None], admitted: Container[str | None]) -> None:
        """Drop the learners of domains and, of those not admitted, the drafts of which nothing learned serves."""
        with self._lock:
            for domain in domains:
                del self._updaters[domain], self._originals[domain]
                learned = self._learned.get(domain)
                if learned is not None and learned.version == 0:
                    learned.snapshot = {}
                    if domain not in admitted:
                        del self._learned[domain]

    def _cast(self, snapshot: Snapshot) -> Snapshot:
        """Full weights in the dtype that they serve in; adapters stay in fp32, to be merged."""
        if self._template is not None:
            return snapshot
        served = dict(self.base.named_parameters())
        return {name: weight.to(served[name].dtype) for name, weight in snapshot.items()}

    def candidate(self, domain: str | None) -> tuple[int, Snapshot]:
        """Number and weights of a version that does not serve yet: what the learner of a domain has come to."""
        snapshot = self._cast(self._updaters[domain].snapshot())
        with self._lock:
            self.version += 1
            return self.version, snapshot

    def serving_snapshot(self, domain: str | None) -> Snapshot:
        """Weights of the version that serves."""
        with self._lock:
            return self._learned[domain].snapshot

    def previous(self, domain: str | None) -> tuple[int, Snapshot] | None:
        """The version that served before the one that does now."""
        with self._lock:
            return self._learned[domain].previous

    def promote(self, domain: str | None, version: int, snapshot: Snapshot) -> None:
        """Let a version serve, from the next request on; those that are running keep theirs. It is made ready before
        it is known. Requests draft with the version before it meanwhile where one holds that model; otherwise the new
        weights are written into it, without a copy, and requests of this draft wait until they are."""
        with self._lock:
            self._made.wait_for(lambda: domain not in self._making)
            serving = self._reserved(domain, version)
        self._fill(serving, _Learned(version, snapshot), promoted=True)
        self._release(serving)
        self._draft_changed(domain)

    def original(self, domain: str | None) -> Snapshot:
        """Weights of version 0: nothing learned."""
        with self._lock:
            return self._originals[domain]

    def roll_back(self, domain: str | None, version: int) -> Snapshot:
        """Let the version before, or 0, serve again; gives its weights."""
        with self._lock:
            learned = self._learned[domain]
            snapshot = self._originals[domain]
            if learned.previous is not None and version == learned.previous[0]:
                snapshot = learned.previous[1]
            self._learned[domain] = _Learned(version, snapshot)
            self._copies.spoil(domain)  # it may have gone wrong by itself
        self._release(self._leased(domain))  # now, so that no request waits for it
        self._draft_changed(domain)
        return self.serving_snapshot(domain)

    def _draft_changed(self, domain: str | None) -> None:
        self.pacer.draft_changed(domain if self.per_domain else ...)

    def tried(self, snapshot: Snapshot) -> Any:
        """A model with these weights that never serves: valid until the next call."""
        if self._scratch is None:
            self._scratch = self._copies.another()
        self._write(snapshot, self._scratch)
        return self._scratch

    def _write(self, snapshot: Snapshot, model: Any) -> None:
        write_snapshot(snapshot, model, self._template)

    # --- keeping ----------------------------------------------------------------------------------------------------

    def adapter(self, domain: str | None) -> Any:
        """
        The adapter of a domain on its base, as a `PeftModel` of its own: `.save_pretrained(...)` and
        `.push_to_hub(...)` publish the adapter alone. That push is PEFT's: public, unless `private=True`.

        Raises:
            ConfigError: no such domain, or drafts are full copies.
        """
        learned = self._published(domain)
        if self._template is None:
            raise ConfigError(f"The draft of {domain!r} is a full copy, it has no adapter. Save it as a model.")
        from peft import set_peft_model_state_dict

        with learning_context():
            model = copy.deepcopy(self._template)
            set_peft_model_state_dict(model, learned.snapshot, adapter_name=str(model.active_adapter))
        return model

    def _published(self, domain: str | None) -> _Learned:
        with self._lock:
            if domain not in self._learned or not self._learned[domain].snapshot:
                known = ", ".join(map(repr, self._learned)) or "none yet"
                raise ConfigError(f"There is no draft of {domain!r} that has learned; there are: {known}.")
            return self._learned[domain]

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """
        Save what serves: each domain's draft in a folder of its own, as PEFT or transformers loads it, and an index.
        Nothing of any request is in it. To go on learning, a session is saved instead.

        Raises:
            ConfigError: the folder cannot be written.
        """
        with self._lock:
            learned = {domain: it.version for domain, it in self._learned.items() if it.snapshot}
        write_drafts(Path(save_directory), learned, self._save)

    def _save(self, domain: str | None, folder: Path) -> None:
        if self._template is not None:
            self.adapter(domain).save_pretrained(folder, save_embedding_layers=False)
            return
        with self.lease(domain) as serving:
            serving.model.save_pretrained(folder)

    def load_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """
        Serve what [`~DomainDrafts.save_pretrained`] has saved, on the same base.

        Raises:
            StateError: nothing readable there, or drafts of another base.
        """
        parameters = {name for name, p in self.base.named_parameters() if p.is_floating_point()}
        fixed = self.base.state_dict().keys() - parameters
        loaded = read_drafts(Path(directory), adapters=self._template is not None, without=fixed)
        for domain, (_, snapshot) in loaded.items():
            self._check(domain, snapshot)
        for domain, (version, snapshot) in loaded.items():
            if self.admit(domain):
                self.updater(domain).restart(snapshot)
                self.version = max(self.version, version)
                self._copies.spoil(domain)  # which may hold other weights of the same number
                self.promote(domain, version, snapshot)

    def _check(self, domain: str | None, snapshot: Snapshot) -> None:
        if not is_finite(snapshot):
            raise StateError(f"The saved draft of {domain!r} has weights that are not finite. Save it anew.")
        if self._template is not None:
            ours = adapter_state(self._template, str(self._template.active_adapter))
        else:
            ours = {name: p for name, p in self.base.named_parameters() if p.is_floating_point()}
        # Where transformers has added adapters, they alone learn, inside a model that is whole.
        is_part = self._template is None and getattr(self.base, "_hf_peft_config_loaded", False)
        theirs = {name: tuple(t.shape) for name, t in snapshot.items()}
        fitting = {name: tuple(t.shape) for name, t in ours.items()}
        if not theirs.items() <= fitting.items() or (len(theirs) < len(fitting) and not is_part):
            raise StateError(
                f"The saved draft of {domain!r} belongs to another base or adapter configuration. Load it with those "
                "that it was saved with."
            )

    def state_dict(self) -> dict[str, Any]:
        """Versions and weights that serve or served, by domain; learners are saved apart."""
        with self._lock:
            return {
                "version": self.version,
                "drafts": [
                    {"domain": domain, "version": it.version, "snapshot": dict(it.snapshot), "previous": it.previous}
                    for domain, it in self._learned.items()
                ],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Serve what was saved; raises StateError where it belongs to another draft."""
        for saved in state["drafts"]:
            if saved["snapshot"]:
                self._check(saved["domain"], saved["snapshot"])
        with self._lock:
            self.version = int(state["version"])
            self._learned = {
                s["domain"]: _Learned(int(s["version"]), s["snapshot"], s["previous"]) for s in state["drafts"]
            }
            self._copies.spoil(everything=True)
        for domain in self.domains:
            self._release(self._leased(domain))
            self._draft_changed(domain)
