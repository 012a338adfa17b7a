"""The drafts that serve: one shared by all requests, or a base draft and one per domain that learns on its own."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import threading
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from osd_hf.config import OnlineConfig
from osd_hf.decoding.draft_length import Pacer
from osd_hf.errors import ConfigError, StateError
from osd_hf.learning.effort import MIN_EFFORT
from osd_hf.learning.lesson import Lesson
from osd_hf.learning.placement import learner_device
from osd_hf.learning.serving_models import Copies, ServingDraft, Version
from osd_hf.learning.updater import Updater
from osd_hf.learning.weights import (
    Snapshot,
    adapted,
    adapter_state,
    beneath,
    in_fp32,
    is_finite,
    learning_context,
    load_adapter,
    make_template,
    ready_to_serve,
    sharing,
    write_snapshot,
)
from osd_hf.models import is_peft
from osd_hf.utils.disk import in_child, write_whole
from osd_hf.utils.report import make_folder
from osd_hf.utils.threads import Seeded
from osd_hf.utils.yielding import give_way, giving_way

__all__ = ["DomainDrafts", "ServingDraft"]

logger = logging.getLogger(__name__)

INDEX = "drafts.json"
MAX_DRAFTS = 32  # per domain; the base draft serves further domains
HOST = torch.device("cpu")  # main memory, for versions of drafts on an accelerator that no model serves with


@dataclass(eq=False)
class _Draft:
    """One draft that learns: its requests, its learner, and its versions. Without weights until it begins to learn."""

    lesson: Lesson
    serving: Version = field(default_factory=lambda: Version(0, {}))
    previous: Version | None = None
    original: Snapshot = field(default_factory=dict)  # weights of version 0
    updater: Updater | None = None


class DomainDrafts:
    """
    A base draft and, for each domain that has been learned from, a draft of its own: a LoRA adapter on the base, or a
    full copy. What is learned is kept as weights by version; models ready to serve, adapters merged, are made from it
    as requests ask for them, within a memory limit. May be used from several threads.

    Args:
        draft (`PreTrainedModel`): The base; copied, not changed. A `PeftModel` serves with its adapter merged.
        config (`OnlineConfig`, *optional*): How to draft and learn.
        peft_config (`peft.PeftConfig`, *optional*):
            Kind of adapter (`LoraConfig(r=16, target_modules="all-linear")`, for instance); without one every draft
            that learns is a full copy.
        per_domain (`bool`, *optional*, defaults to `True`): `False`: all domains share one draft, which learns.

    Raises:
        UnsupportedModelError: adapters that do not fit the draft, or that cannot be merged into its weights.
        ConfigError: there is no such `learner_device`.
    """

    def __init__(
        self, draft: Any, config: OnlineConfig | None = None, *, peft_config: Any = None, per_domain: bool = True
    ) -> None:
        self.config = config or OnlineConfig()
        self._learner_device = learner_device(self.config)
        self.peft_config = peft_config
        self.per_domain = per_domain
        base = ready_to_serve(draft, self.config)
        is_source = is_peft(draft) and not per_domain and peft_config is None
        self._source = in_fp32(draft) if is_source else base  # what learners start from
        self._template = make_template(self._source, peft_config, self.config.seed, per_domain=per_domain)
        self.pacer = Pacer()
        self.version = 0
        self._pace: dict[str, Any] = {}
        self._drafts: dict[str | None, _Draft] = {} if per_domain else {None: self._new_draft(None)}
        self._has_refused = False
        self._copies = Copies(base, self._template, self.config, self.pacer)
        self._master: Any = None  # of all domains' adapters
        self._tried: tuple[Any, Any] | None = None
        self._renew_locks()
        in_child(self, DomainDrafts._begin_in_child)

    def _new_draft(self, domain: str | None) -> _Draft:
        return _Draft(Lesson(domain, self.config, **self._pace))

    def set_pace(self, *, min_effort: float = MIN_EFFORT, target_lag: int = 0) -> None:
        """
        Set how often drafts learn; called before the first request.

        Args:
            min_effort (`float`, *optional*, defaults to 1/16): Least share of the configured updates that are done.
            target_lag (`int`, *optional*, defaults to 0):
                Earlier versions of the target whose requests are still learned from.
        """
        self._pace = {"min_effort": min_effort, "target_lag": target_lag}
        for lesson in self.lessons.values():
            lesson.target_lag = target_lag
            lesson.effort.least = min_effort

    def _renew_locks(self) -> None:
        self._lock = threading.RLock()  # held over no copy and no write of a model
        self._made = threading.Condition(self._lock)

    def _begin_in_child(self) -> None:
        """In a forked child nobody makes what others were making, and nobody uses what others were using."""
        self._renew_locks()
        self._copies.forget_leases()

    # --- which drafts there are -------------------------------------------------------------------------------------

    def admit(self, domain: str | None) -> bool:
        """Whether a request of this domain teaches a draft: any where one is shared; otherwise one of a named domain,
        which gets a draft as long as there is room for one more."""
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
                    "There are %d drafts of domains already (at most 32): %r and further domains are served by "
                    "the base draft.", len(self._drafts), domain,
                )  # fmt: skip
            return False

    @property
    def domains(self) -> tuple[str | None, ...]:
        """Those that have a draft, in order of appearance; `(None,)` where all share one."""
        with self._lock:
            return tuple(self._drafts)

    @property
    def lessons(self) -> dict[str | None, Lesson]:
        """The requests of each draft, by domain."""
        with self._lock:
            return {domain: draft.lesson for domain, draft in self._drafts.items()}

    def key(self, domain: str | None) -> str | None:
        """The domain whose draft serves this one; `None` is the base draft or the shared one."""
        with self._lock:
            return domain if self.per_domain and domain in self._drafts else None

    def serving_version(self, domain: str | None = None) -> int:
        """Version of the draft of a domain; 0: nothing learned serves."""
        with self._lock:
            draft = self._drafts.get(self.key(domain))
            return 0 if draft is None else draft.serving.number

    def taught_for(self, domain: str | None) -> str | None:
        """The version of the target that the draft which serves a domain was taught for; `None` where it is not known,
        or nothing learned serves."""
        with self._lock:
            draft = self._drafts.get(self.key(domain))
            return None if draft is None else draft.serving.taught_for

    def serving_snapshot(self, domain: str | None) -> Snapshot:
        """Weights of the version that serves."""
        with self._lock:
            return self._drafts[domain].serving.weights

    def previous(self, domain: str | None) -> tuple[int, Snapshot] | None:
        """The version that served before the one that does now."""
        with self._lock:
            previous = self._drafts[domain].previous
            return None if previous is None else previous[:2]

    # --- who serves -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lease(self, domain: str | None = None, *, original: bool = False) -> Iterator[ServingDraft]:
        """The draft of a domain, in its newest version or, `original`, as it was; its weights stay as they are inside
        the `with` block. Where it has to be made ready first, only requests of the same draft wait for it."""
        try:
            serving = self._leased(domain, original=original)
        except Exception:  # out of memory, for one: the answer must not suffer
            logger.exception("The draft of %r cannot be made ready; another version serves.", domain)
            with self._lock:
                serving = self._copies.use(self._copies.find(self.key(domain)) or self._copies.base)
        try:
            yield serving
        finally:
            self._release(serving)

    @property
    def base(self) -> Any:
        """The base draft's model: the draft as it was."""
        return self._copies.base.model

    def model(self, domain: str | None = None) -> Any:
        """The model that requests of a domain are served with now, an ordinary transformers model."""
        serving = self._leased(domain)
        self._release(serving)
        return serving.model

    @property
    def models(self) -> list[Any]:
        """All models that serve, or did and are there still."""
        with self._lock:
            return list(self._copies.made)

    def owns(self, model: Any) -> bool:
        """Whether a model is one of those that serve."""
        return model in self._copies.made

    def vocab_size(self, domain: str | None) -> int | None:
        """Tokens that the draft of a domain chooses among; `None`: all."""
        with self._lock:
            drafting = (self._copies.find(self.key(domain)) or self._copies.base).drafting
        return None if drafting is None or drafting.token_ids is None else len(drafting.token_ids)

    @property
    def bytes_per_draft(self) -> int:
        """Size of one model that serves."""
        return self._copies.bytes_each

    @property
    def num_serving(self) -> int:
        """Models per domain held ready now."""
        return len(self._copies.held)

    def _leased(self, domain: str | None, *, original: bool = False) -> ServingDraft:
        """A model that holds the newest version of a draft, leased; made ready now where none does."""
        while True:
            with self._lock:
                key = self.key(domain)
                draft = self._drafts.get(key)
                found: ServingDraft | None = self._copies.base  # what has learned nothing changes nothing
                if not (original or draft is None or draft.serving.number == 0):
                    version = draft.serving
                    found = self._copies.find(key, version)
                if key in self._copies.making if found is None else found.is_changing:
                    self._made.wait()
                    continue
                if found is not None:
                    self._copies.use(found)
                    found.is_changing = must_change = self._is_to_change(found)
                else:
                    serving = self._copies.reserve(key)
            if found is not None:
                try:
                    if must_change:
                        self._restrict(found)
                except BaseException:
                    self._release(found)
                    raise
                return found
            self._fill(serving, version)
            with self._lock:
                draft = self._drafts.get(key)
                if draft is not None and draft.serving is version:
                    return serving
            self._release(serving)

    def _chosen(self, serving: ServingDraft) -> Any:
        """The tokens that a draft is to choose among; the base of drafts per domain serves everybody, and has all."""
        draft = self._drafts.get(serving.domain)  # of drafts per domain, none is that of `None`
        return None if draft is None else draft.lesson.vocabulary.chosen

    def _is_to_change(self, serving: ServingDraft) -> bool:
        drafting = serving.drafting
        return drafting is not None and serving.leases == 1 and not drafting.is_restricted_to(self._chosen(serving))

    def _restrict(self, serving: ServingDraft) -> None:
        """Let what nobody else uses choose among the tokens that its traffic uses now; outside of the lock."""
        try:
            if serving.drafting is not None:
                serving.drafting.restrict(self._chosen(serving))
        finally:
            with self._lock:
                serving.is_changing = False
                self._made.notify_all()

    def _fill(self, serving: ServingDraft, version: Version, promoted: Snapshot | None = None) -> None:
        """Fill what was reserved, outside of the lock; where it is promoted, with what was made ready for it, it
        serves from then on."""
        written = None
        try:
            with giving_way(None):  # requests of this draft wait for it
                self._copies.fill(serving, promoted or self._copies.ready(version.weights))
                self._restrict(serving)
            written = version
        finally:
            with self._lock:
                self._copies.filled(serving, written)
                if written is None:
                    self._release(serving)
                elif promoted is not None:
                    draft = self._drafts[serving.domain]
                    draft.serving, draft.previous = version, draft.serving
                self._made.notify_all()

    def _release(self, serving: ServingDraft) -> None:
        with self._lock:
            self._copies.release(serving, {domain: draft.serving for domain, draft in self._drafts.items()})

    def promote(self, domain: str | None, version: int, snapshot: Snapshot, taught_for: str | None = None) -> None:
        """Let a version, `taught_for` this one of the target, serve from the next request on; those that are running
        keep theirs. It is made ready before it is known. Requests draft with the version before it meanwhile where one
        holds that model; otherwise the new weights are written into it, without a copy, and requests of this draft
        wait until they are."""
        weights = self._copies.ready(snapshot)
        kept = snapshot if self._copies.shares else self.aside(snapshot)
        with self._lock:
            self._made.wait_for(lambda: domain not in self._copies.making)
            serving = self._copies.reserve(domain)
        self._fill(serving, Version(version, kept, taught_for), weights)
        self._release(serving)
        with self._lock:
            draft = self._drafts[domain]
            before = draft.previous
        if before is not None and before.number:  # version 0 lies where the base does
            try:
                aside = before._replace(weights=self.aside(before.weights))
                with self._lock:
                    draft.previous = aside if draft.previous is before else draft.previous
            except (RuntimeError, MemoryError) as error:
                logger.warning("The version before stays on the accelerator, as main memory lacks room: %s", error)
        self.model_changed(domain)

    def roll_back(self, domain: str | None, version: int, weights: Snapshot | None = None) -> Snapshot:
        """Let the version before, or 0, serve again, or one of the weights that are given; returns its weights."""
        with self._lock:
            draft = self._drafts[domain]
            earlier = Version(version, weights or draft.original)
            if draft.previous is not None and version == draft.previous.number:
                earlier = draft.previous._replace()
            # Written anew: what serves may have gone wrong by itself.
            draft.serving, draft.previous = earlier, None
        self.model(domain)  # made ready now, so that no request waits for it
        self.model_changed(domain)
        return earlier.weights

    def model_changed(self, domain: str | None) -> None:
        """Another version of the draft serves, or one of the target answers: what was known of acceptance counts
        half."""
        self.pacer.draft_changed(domain if self.per_domain else ...)

    # --- who learns -------------------------------------------------------------------------------------------------

    def updater(self, domain: str | None) -> Updater:
        """The learner of a domain's draft, made from the base at the first call. One thread at a time may learn, as
        adapters share their base."""
        with self._lock:
            draft = self._drafts.get(domain) or self._new_draft(domain)
            if draft.updater is not None:
                return draft.updater
        updater = self._new_updater(draft.lesson)
        base = dict(self.base.named_parameters())  # it is there, and stays
        is_adapter = self._template is not None
        original = updater.snapshot(base) if is_adapter else {n: base[n].detach() for n in updater.averaged}
        with self._lock:
            self._drafts[domain] = draft
            draft.updater, draft.original = updater, original
            if not draft.serving.weights:
                draft.serving.weights.update(original)
        return updater

    def _new_updater(self, lesson: Lesson) -> Updater:
        peft_config, seed = self.peft_config, self.config.seed
        how: dict[str, Any] = {"lesson": lesson, "dtype": self.base.dtype}
        if peft_config is None:
            return Updater(self._source, self.config, **how)
        with learning_context():
            if not self.per_domain:
                source = adapted(beneath(self._source, peft_config), peft_config, "default", seed)
                return Updater(source, self.config, **how)
            number = 0 if self._master is None else len(self._master.peft_config)
            # Module names take no dots, and peft may take one name for the start of another.
            adapter = f"domain_{number:05d}"
            if self._master is None:
                source = beneath(self._source, peft_config)
                if self._learner_device is not None:
                    source = source.to(self._learner_device)
                self._master = adapted(source.float().eval(), peft_config, adapter, seed)
            else:
                with Seeded(seed):
                    self._master.add_adapter(adapter, copy.deepcopy(peft_config))
                self._master.eval()  # what it added trains
        return Updater(self._master, self.config, adapter=adapter, **how)

    @property
    def learning(self) -> set[str | None]:
        """Domains whose drafts have begun to learn."""
        with self._lock:
            return {domain for domain, draft in self._drafts.items() if draft.updater is not None}

    def forget(self, domains: Iterable[str | None], admitted: Container[str | None]) -> None:
        """Drop the learners of domains and, of those not admitted, the drafts of which nothing learned serves."""
        with self._lock:
            for domain in domains:
                draft = self._drafts[domain]
                draft.updater, draft.original = None, {}
                if draft.serving.number == 0:
                    draft.serving = Version(0, {})
                    if domain not in admitted:
                        del self._drafts[domain]

    def candidate(self, domain: str | None) -> tuple[int, Snapshot]:
        """Number and weights of a version that does not serve yet: what the learner of a domain has come to."""
        snapshot = self.updater(domain).snapshot(dict(self.base.named_parameters()))
        with self._lock:
            self.version += 1
            return self.version, snapshot

    def tried(self, draft: Snapshot | Any) -> Any:
        """A model with these weights, or with those of a model that serves, that never serves itself: valid until the
        next call."""
        if self._tried is None or self._tried[0] is not draft:
            has_weights = isinstance(draft, dict)
            self._tried = None
            give_way()  # many modules are copied, none of the weights
            model = sharing(self.base if has_weights else draft)
            give_way()
            if has_weights:
                write_snapshot(draft, model, self._template, share=True)
            self._tried = draft, model  # not before: writing may fail, and is tried again
        return self._tried[1]

    def end_trial(self) -> None:
        """Let go of the weights that were tried last."""
        self._tried = None

    # --- keeping ----------------------------------------------------------------------------------------------------

    def adapter(self, domain: str | None) -> Any:
        """
        The adapter of a domain on its base, as a `PeftModel` of its own: `.save_pretrained(...)` and
        `.push_to_hub(...)` publish the adapter alone. That push is PEFT's: public, unless `private=True`.

        Raises:
            ConfigError: no such domain, or drafts are full copies.
        """
        with self._lock:
            weights = self._drafts[domain].serving.weights if domain in self._drafts else {}
            known = ", ".join(map(repr, self._drafts)) or "none yet"
        if not weights:
            raise ConfigError(f"There is no draft of {domain!r} that has learned; there are: {known}.")
        if self._template is None:
            raise ConfigError(f"The draft of {domain!r} is a full copy, it has no adapter. Save it as a model.")
        with learning_context():
            return load_adapter(copy.deepcopy(self._template), weights)

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """
        Save what serves: each domain's draft in a folder of its own, as PEFT or transformers loads it, and an index.
        Nothing of any request is in it. To go on learning, a session is saved instead.

        Raises:
            ConfigError: the folder cannot be written.
        """
        directory = Path(save_directory)
        make_folder(directory)
        with self._lock:
            learned = {domain: draft.serving.number for domain, draft in self._drafts.items() if draft.serving.weights}
        index = {}
        for number, (domain, version) in enumerate(learned.items()):
            folder = f"draft-{number:03d}"
            if self._template is not None:
                self.adapter(domain).save_pretrained(directory / folder, save_embedding_layers=False)
            else:
                with self.lease(domain) as serving:
                    serving.model.save_pretrained(directory / folder)
            index[folder] = {"domain": domain, "version": version}
        write_whole(directory / INDEX, (json.dumps(index, indent=1) + "\n").encode(), private=False)

    def load_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """
        Serve what [`~DomainDrafts.save_pretrained`] has saved, on the same base.

        Raises:
            StateError: nothing readable there, or drafts of another base.
        """
        file = "model.safetensors" if self._template is None else "adapter_model.safetensors"
        fixed = self.base.state_dict().keys() - self._parameters().keys()
        loaded = {}
        try:
            for folder, entry in json.loads(Path(directory, INDEX).read_text()).items():
                state = load_file(Path(directory, folder, file))
                weights = self._placed({name: tensor for name, tensor in state.items() if name not in fixed})
                loaded[entry["domain"]] = int(entry["version"]), weights
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise StateError(
                f"The drafts in {directory} cannot be read: {error}. Restore them from a copy."
            ) from error
        for domain, (_, weights) in loaded.items():
            self._check(domain, weights)
        for domain, (number, weights) in loaded.items():
            if self.admit(domain):
                self.updater(domain).restart(weights)
                self.version = max(self.version, number)
                self.promote(domain, number, weights)

    def _parameters(self) -> Snapshot:
        """Those of the base that a full copy may learn."""
        return {name: p for name, p in self.base.named_parameters() if p.is_floating_point()}

    def _placed(self, snapshot: Snapshot) -> Snapshot:
        """Weights where they are served from: those of an adapter, which the base has not, with its first ones."""
        devices = {name: p.device for name, p in self.base.named_parameters()}
        return {name: tensor.to(devices.get(name, self.base.device)) for name, tensor in snapshot.items()}

    def aside(self, snapshot: Snapshot) -> Snapshot:
        """Weights of whole drafts in main memory, where they are on an accelerator; the same ones otherwise."""
        if self._template is not None or self.base.device.type in (HOST.type, "meta"):
            return snapshot
        found = Snapshot()
        for name, weight in snapshot.items():
            give_way()
            found[name] = weight.to(HOST)
        return found

    def _check(self, domain: str | None, snapshot: Snapshot) -> None:
        if not is_finite(snapshot):
            raise StateError(f"The saved draft of {domain!r} has weights that are not finite. Save it anew.")
        ours = self._parameters() if self._template is None else adapter_state(self._template)
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
                    {
                        "domain": domain,
                        "version": draft.serving.number,
                        "snapshot": dict(draft.serving.weights),
                        "taught_for": draft.serving.taught_for,
                        "previous": None if draft.previous is None else tuple(draft.previous),
                    }
                    for domain, draft in self._drafts.items()
                ],
            }

    def load_state_dict(self, state: dict[str, Any], learners: Container[str | None] | None = None) -> None:
        """Serve what was saved; raises StateError, with nothing changed, where it belongs to another draft. Of the
        learners those of these domains stay, with their requests; by default all."""
        for saved in state["drafts"]:
            if saved["snapshot"]:
                self._check(saved["domain"], saved["snapshot"])
        with self._lock:
            self.version = int(state["version"])
            before, self._drafts = self._drafts, {}
            for saved in state["drafts"]:
                domain, previous = saved["domain"], saved["previous"]
                draft = before.get(domain)
                if draft is None or (learners is not None and domain not in learners):
                    draft = self._new_draft(domain)
                # Sessions from before do not say what they were taught for.
                weights, taught_for = self._placed(saved["snapshot"]), saved.get("taught_for")
                draft.serving = Version(int(saved["version"]), weights, taught_for)
                if previous is not None:
                    is_whole = self._template is None
                    weights = self.aside(previous[1]) if is_whole else self._placed(previous[1])
                    previous = Version(previous[0], weights, *previous[2:])
                draft.previous = previous
                self._drafts[domain] = draft
        for domain in self.domains:
            self.model(domain)  # made ready now
            self.model_changed(domain)
