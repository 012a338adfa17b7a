"""Learn a draft from the stores that engines fill, and publish its versions."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from transformers import PreTrainedModel

from osd_hf.acceptance import AcceptanceStats
from osd_hf.config import OnlineConfig
from osd_hf.engines.versions import FACTS, VersionFolder, folder_name
from osd_hf.errors import ConfigError, OSDError, StateError, first_line
from osd_hf.hub import DraftFacts, check_written, push_folder, save_draft
from osd_hf.learning import session
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.learner import Learner
from osd_hf.learning.requests import ExcludedRequests, ReadableTraces
from osd_hf.learning.session import has_session, load_session, save_session
from osd_hf.learning.updater import UpdateReport, finish, log_update, make_accelerator
from osd_hf.learning.weights import Snapshot, shared_ends
from osd_hf.replay import replay_each
from osd_hf.simulate import serve_recorded
from osd_hf.store.folder import StoreFollower
from osd_hf.target_version import is_fingerprint
from osd_hf.trace import Trace
from osd_hf.utils.report import provenance

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_REQUESTS_PER_STEP = 16
RETRY_SECONDS = 30.0  # between two attempts to write
MAX_RECENT = 4096  # requests with their acceptance


@dataclass(eq=False, repr=False)
class StoreLearner:
    """Learn from new requests in stores, and publish the versions that pass the gate. What was learned and how far
    each store was read are saved together in the folder `state`, so that a killed learner continues without learning a
    request twice or not at all. With `domain`, only requests with this label count; with `by_domain`, each label has a
    draft of its own, with versions in a subfolder. Adapters (`peft_config`) are merged in versions. Requests of other
    target versions than `target_version`, by default the one with the newest requests, are left out. Requests without
    a version count as that one while it is the only one. Versions are pushed to `repo_id`, at least `publish_seconds`
    apart. `accelerator` runs the training steps, and has the trackers. Raises ConfigError without a fixed number of
    draft tokens, and StateError if the session belongs to another draft."""

    draft: Any
    tokenizer: Any
    follower: StoreFollower
    versions: VersionFolder
    config: OnlineConfig
    _: KW_ONLY
    state: Path | None = None
    domain: str | None = None
    by_domain: bool = False
    peft_config: Any = None
    target: Any = None  # kept for a head, which reads its states
    target_version: str | None = None
    facts: DraftFacts = field(default_factory=DraftFacts)
    repo_id: str | None = None
    token: str | None = None
    private: bool | None = None
    publish_seconds: float = 0.0
    accelerator: Accelerator | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # Nothing is drafted here, so there is no time to share.
        self.config = replace(self.config, update_strategy="interval", compile_draft=False)
        if self.config.compared_k is None:
            raise ConfigError("A fixed k is needed, got `num_assistant_tokens=None`.")
        self.k = self.config.compared_k
        if (source := getattr(self.draft, "source", None)) is not None:
            source.has_first_round = False
        self.skipped: Counter[str] = Counter()  # requests of this run that do not fit, by reason
        # Acceptance of the serving version and of the initial draft on the newest requests, and labels.
        self.learned: deque[AcceptanceStats] = deque(maxlen=MAX_RECENT)
        self.frozen: deque[AcceptanceStats] = deque(maxlen=MAX_RECENT)
        self.domains: deque[str | None] = deque(maxlen=MAX_RECENT)
        self.published: list[dict[str, Any]] = []  # facts of the versions of this run
        self._published_at = -float("inf")
        # Embeddings and output head of a loaded target do not learn: an engine shares them, too.
        shared = shared_ends(self.draft, self.target) if isinstance(self.target, PreTrainedModel) else None
        how: dict[str, Any] = {"per_domain": self.by_domain, "shared": shared}
        drafts = DomainDrafts(self.draft, self.config, peft_config=self.peft_config, **how)
        self.learner = Learner(drafts)
        self._accelerator = self.accelerator or make_accelerator(None, self.config)
        self._readable = ReadableTraces.by(drafts.base)
        self._counts: dict[str | None, list[int]] = {}  # requests and tokens, by draft
        self._version = self.target_version  # the target version that is learned from
        self._last_seen: dict[str, float] = {}  # target version -> time of its newest request
        self._unpublished: dict[str | None, GateDecision] = {}
        # The learner's version number and weights of published versions that may be rolled back to.
        self._served: dict[tuple[str | None, int], tuple[int, Snapshot]] = {}
        self._unpushed: Path | None = None
        self._unsaved_updates = 0
        self._retry_at = -float("inf")
        self._since_update = AcceptanceStats()
        if self.state is not None and has_session(self.state):
            self._resume(self.state)

    @property
    def requests(self) -> int:
        """Number of requests that were learned from or used by the gate since the session began."""
        return sum(requests for requests, _ in self._counts.values())

    @property
    def tokens(self) -> int:
        """Number of tokens of their answers."""
        return sum(tokens for _, tokens in self._counts.values())

    @property
    def is_pushed(self) -> bool:
        """Whether no version waits for the Hub."""
        return self._unpushed is None

    @property
    def set_aside(self) -> Counter[str]:
        """Requests since the session began that cannot be read or learned from, by reason."""
        return self.learner.set_aside + self.follower.left_out.copy()  # another thread may add to it

    @property
    def learning_seconds(self) -> float:
        """Time that this run has spent on learning."""
        return self.learner.seconds

    def step(
        self,
        on_request: Callable[[AcceptanceStats, AcceptanceStats, int], object] | None = None,
        *,
        limit: int | None = None,
    ) -> int:
        """Process some new requests, at most `limit`, and return their number. `on_request` gets the acceptance of the
        serving and of the initial draft for each request, and the version. Raises StateError if a version or the
        session cannot be written; this is tried again after half a minute."""
        self._follow_engines()
        taken = self.follower.take(min(limit or MAX_REQUESTS_PER_STEP, MAX_REQUESTS_PER_STEP))
        before = self.set_aside
        fitting = [trace for trace in taken if self._fits(trace) and self._set_aside(trace.domain).accepts(trace)]
        if not self.target_version:
            self._choose_version((trace.target, trace.created_at_seconds) for trace in fitting)
        fitting = [trace for trace in fitting if self._is_of_version(trace)]
        replays = self._isolated(lambda those: replay_each(self.draft, those, self.k), fitting)
        found = [(t, stats) for t, stats in zip(fitting, replays, strict=True) if stats is not None]
        frozen = iter([stats for _, stats in found])
        if self.set_aside != before:  # saved soon, so that a restart does not repeat them
            self._unsaved_updates = max(self._unsaved_updates, session.UPDATES_BETWEEN_SAVES)
        for moment in serve_recorded(self.learner, [trace for trace, _ in found], self.k):
            if isinstance(moment, UpdateReport):
                self._unsaved_updates += 1
                log_update(self._accelerator, moment, self.requests, self._since_update)
                self._since_update = AcceptanceStats()
                decisions = self.learner.take_decisions()
                self._unpublished |= {d.domain: d for d in decisions if d.outcome in ("promoted", "rolled back")}
                continue
            trace, stats = moment
            counts = self._counts.setdefault(self.learner.drafts.key(trace.domain), [0, 0])
            counts[0], counts[1] = counts[0] + 1, counts[1] + len(trace)
            self.domains.append(trace.domain)
            self.learned.append(stats)
            self.frozen.append(next(frozen))
            self._since_update += stats
            if on_request is not None:
                on_request(stats, self.frozen[-1], trace.draft_version)
        if self.clock() >= self._retry_at:
            is_due = self.clock() - self._published_at >= self.publish_seconds
            try:
                if (is_due and self.publish()) or self._unsaved_updates >= session.UPDATES_BETWEEN_SAVES:
                    self.save()
            except StateError:
                self._retry_at = self.clock() + RETRY_SECONDS
                raise
        return len(taken)

    def _set_aside(self, domain: str | None) -> ExcludedRequests:
        drafts = self.learner.drafts
        return drafts.requests[drafts.key(domain)].set_aside

    def _isolated(self, work: Callable[[Sequence[Trace]], Sequence[T]], traces: Sequence[Trace]) -> list[T | None]:
        """Apply `work` to the requests of each draft. Set aside those that it fails on, with the result `None`."""
        groups: dict[str | None, list[Trace]] = {}
        for trace in traces:
            groups.setdefault(self.learner.drafts.key(trace.domain), []).append(trace)
        outcomes: dict[Trace, T | None] = {}
        for domain, group in groups.items():
            outcomes.update(zip(group, finish(self._set_aside(domain).isolate(work, group)), strict=True))
        return [outcomes[trace] for trace in traces]

    def _choose_version(self, arrivals: Iterable[tuple[str | None, float]]) -> None:
        """Select the newest target version, or an earlier one when no request of the present one arrives any more."""
        known, arrived = set(self._last_seen), set[str]()
        for version, at in arrivals:
            if version is not None:
                arrived.add(version)
                self._last_seen[version] = max(at, self._last_seen.get(version, -math.inf))
        newest = max(reversed(self._last_seen), key=self._last_seen.__getitem__, default=None)
        if newest in arrived and (newest not in known or self._version not in arrived):
            self._version = newest

    def _is_of_version(self, trace: Trace) -> bool:
        """Return whether a request belongs to the selected target version, and count others."""
        is_unclear = trace.target is None and (self.target_version or len(self._last_seen) > 1)
        is_other = trace.target not in (None, self._version) or bool(is_unclear)
        if is_other:
            self._leave_out("of another version of the target")
        return not is_other

    def _fits(self, trace: Trace) -> bool:
        kept, readable, size = self.config.num_logprobs, self._readable, trace.vocab_size
        drafts, name = self.learner.drafts, trace.domain
        found, wanted = trace.top_ids.shape[1], 0 if kept is None or kept >= size else kept
        most = math.inf if readable.positions is None else readable.positions
        misfits = {
            "of another domain": self.domain not in (None, name),
            "without a domain": drafts.per_domain and name is None,
            "whose domain is too long for the name of a folder": drafts.per_domain and folder_name(name or "") is None,
            "without target rows": not len(trace) or not trace.num_kept,
            f"of a vocabulary of {size}, not {readable.vocab_size}": size != readable.vocab_size,
            f"with {found or 'all'} entries per position, not {wanted or 'all'}": found != wanted,
            "of an encoder-decoder": trace.is_encoder_decoder,
            f"longer than the draft's {most} positions": len(trace.prompt_ids) + len(trace) > most,
            "sampled, whose corrections cannot be known": trace.is_sampled and self.config.learn_from == "corrections",
        }
        reason = next((reason for reason, applies in misfits.items() if applies), None)
        if reason is None and not drafts.admit(name):
            reason = "of more domains than get a draft"
        if reason is not None:
            self._leave_out(reason)
        return reason is None

    def _leave_out(self, reason: str) -> None:
        if not self.skipped[reason]:
            logger.warning("Left out: requests %s.", reason)
        self.skipped[reason] += 1

    def publish(self) -> bool:
        """Publish and push the versions that wait; returns whether there were any. Raises StateError if a version
        cannot be written, or its files differ from the draft. Another call tries again."""
        self._follow_engines()
        if not self._unpublished and self._unpushed is None:
            return False
        failure: StateError | None = None
        for decision in list(self._unpublished.values()):
            try:
                self._publish(decision)
            except (StateError, OSError) as error:
                failure = StateError(f"Versions cannot be published: {first_line(error)}.")
        if self._unpushed is not None:
            self._push(self._unpushed)
        if failure is not None:
            self.save()
            raise failure
        return True

    def publish_start(self, domain: str | None = None) -> None:
        """Publish the initial draft as `v000000`, for rollbacks, if it is missing; raises StateError."""
        versions, facts, draft = self.versions.of(domain), self._facts(domain, None), self.learner.drafts.base
        if versions.version(0) is None:
            versions.publish(lambda path: self._write(path, draft, facts, domain), facts, is_start=True)

    def _publish(self, decision: GateDecision) -> None:
        self._published_at = self.clock()
        domain = decision.domain
        versions, facts = self.versions.of(domain), self._facts(domain, decision)
        with self.learner.drafts.lease(domain) as serving:
            folder = versions.publish(lambda path: self._write(path, serving.model, facts, domain), facts)
        del self._unpublished[domain]
        self.published.append(json.loads((folder / FACTS).read_text()))
        number, suffix = versions.number, "" if domain is None else f" of {domain!r}"
        logger.info("Published version %d%s after %d requests.", number, suffix, facts["requests"])
        if versions.pinned:  # engines may roll back
            drafts = self.learner.drafts
            weights = drafts.to_host(drafts.serving(domain).weights)
            self._served[domain, number] = drafts.serving_version(domain), weights
            gone = [key for key in self._served if key[0] == domain and key[1] not in {number, *versions.pinned}]
            for key in gone:
                del self._served[key]
        if self.repo_id is not None:
            self._unpushed = folder

    def _facts(self, domain: str | None, decision: GateDecision | None) -> dict[str, Any]:
        requests, tokens = self._counts.get(domain, (0, 0)) if decision is not None else (0, 0)
        return {
            "draft_version": 0 if decision is None else self.learner.drafts.serving_version(domain),
            "requests": requests, "tokens": tokens, "num_assistant_tokens": self.k,
            "decision": None if decision is None else decision.to_dict(),
            "created_at_seconds": time.time(), "provenance": provenance(),
        }  # fmt: skip

    def _write(self, folder: Path, draft: Any, facts: dict[str, Any], domain: str | None) -> None:
        decision = facts["decision"] or {}
        held_back = {
            f"Acceptance on {decision['requests']} held-back requests, {name}": f"{decision[side]:.3f}"
            for name, side in (("before", "alpha_before"), ("this version", "alpha_after"))
            if decision.get(side) is not None
        }
        training = {**self.facts.training, "Requests learned from": facts["requests"], **held_back}
        version = self.learner.drafts.serving(domain).target_version if decision else None
        version = version if is_fingerprint(version) else None  # the name of an engine may be a private path
        name = self.repo_id or f"{self.versions.of(domain).path.name}/{folder.name.lstrip('.').split('-')[0]}"
        domains = self.facts.domains if domain is None else (domain,)
        card = replace(self.facts, training=training, target_version=version, domains=domains)
        save_draft(folder, draft, self.tokenizer, num_assistant_tokens=self.k, repo_id=name, facts=card)
        check_written(folder, draft)

    def _follow_engines(self) -> None:
        """Continue from the version that engines serve after a rollback, if this process has published it."""
        drafts, has_gone_back = self.learner.drafts, False
        for decision in self.versions.take_rejections():
            domain, (number, weights) = decision.domain, (0, None)
            if self.repo_id is not None:
                serving = self.versions.of(domain).version(decision.serving)
                self._unpushed = self.versions.latest if serving is None else serving.path
            if domain not in drafts.learning:
                continue
            if decision.serving != 0:
                if (domain, decision.serving) not in self._served:
                    logger.info("The weights of version %d are not in memory; learning continues.", decision.serving)
                    continue
                number, weights = self._served[domain, decision.serving]
            self._unpublished.pop(domain, None)
            rejected = drafts.serving_version(domain)
            self.learner.go_back(replace(decision, version=rejected, serving=number), weights)
            self.learner.take_decisions()  # this version is published already
            has_gone_back = True
        if has_gone_back:  # saved immediately, so that a restart does not continue from the rejected version
            self._unsaved_updates = session.UPDATES_BETWEEN_SAVES  # a failure is repeated and raised later
            with contextlib.suppress(StateError):
                self.save()

    def _push(self, folder: Path) -> None:
        """Push a version; a failure is repeated when the next publication is due."""
        assert self.repo_id is not None
        self._unpushed = folder
        message = f"Version {int(folder.name.removeprefix('v'))} of the draft"
        try:
            push_folder(folder, self.repo_id, token=self.token, private=self.private, commit_message=message)
        except OSDError as error:
            logger.warning("Version %d was not pushed: %s", self.versions.number, error)
            self._published_at = self.clock()
        else:
            self._unpushed = None

    def save(self) -> None:
        """Save the session if it has a folder; raises StateError."""
        if self.state is None:
            return
        facts = {
            "config": self.config.to_dict(),
            "counts": list(self._counts.items()),
            "taken": self.follower.state_dict(),
            "left_out": dict(self.follower.left_out),
            "unpublished": [decision.to_dict() for decision in self._unpublished.values()],
            "unpushed": self._unpushed is not None,
            "target_versions": self._last_seen,
            "target_version": self._version,
        }
        save_session(self.state, self.learner.state_dict(), facts)
        self._unsaved_updates = 0

    def _resume(self, state: Path) -> None:
        facts = load_session(state, self.learner)
        try:
            self.follower.load_state_dict(facts["taken"], facts["left_out"])
            self._counts = {domain: [int(requests), int(tokens)] for domain, (requests, tokens) in facts["counts"]}
            self._last_seen = {str(name): float(at) for name, at in facts["target_versions"].items()}
            self._version = self.target_version or facts["target_version"]
            self._unpublished = {each["domain"]: GateDecision(**each) for each in facts["unpublished"]}
            self._unpushed = self.versions.latest if facts["unpushed"] and self.repo_id is not None else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"The session in {state} is of another command. Choose another folder.") from error

    def close(self) -> None:
        """Publish and push what waits, save the session, end tracking, and release the folder; raises StateError."""
        with contextlib.ExitStack() as last:
            last.callback(self.versions.close)
            last.callback(self._accelerator.end_training)
            last.callback(self.save)
            self.publish()
