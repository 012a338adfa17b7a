"""Online learning for engines that serve elsewhere: from stores that others fill to published versions."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator

from osd_hf.acceptance import AcceptanceStats
from osd_hf.config import OnlineConfig
from osd_hf.decoding.hook import rescore
from osd_hf.engines.versions import FACTS, VersionFolder, folder_name
from osd_hf.errors import ConfigError, OSDError, StateError, VocabularyMismatchError, first_line
from osd_hf.hub.cards import DraftFacts
from osd_hf.hub.push import check_written, push_folder, save_draft
from osd_hf.learning import session
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.faults import Readable
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.learner import Learner
from osd_hf.learning.session import check_pointer, has_session, load_session, save_session
from osd_hf.learning.updater import Updater, UpdateReport, finish, log_update
from osd_hf.learning.weights import Snapshot
from osd_hf.models import vocab_size_of
from osd_hf.replay import replay_each
from osd_hf.simulate import serve_recorded
from osd_hf.store.folder import StoreFollower
from osd_hf.target_version import is_fingerprint
from osd_hf.target_version import target_version as version_of
from osd_hf.trace import Trace
from osd_hf.utils.report import provenance

__all__ = ["StoreLearner"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

TAKEN_AT_ONCE = 16  # requests between two looks at the clock, and at who wants to stop
RETRY_SECONDS = 30.0  # between two attempts to write what could not be written
RECENT = 4096  # requests whose acceptance is kept


class StoreLearner:
    """
    Takes in what stores gain, as if the draft had drafted those answers, learns from it by the rule of an
    [`OnlineConfig`], and publishes what the gate lets through. What was learned, and how far each store was read, is
    saved together, so a killed learner goes on with no request learned twice or not at all since then.

    Args:
        draft (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`):
            Where learning starts, with the target's vocabulary size; not changed. The tokenizer is published with it.
        follower (`StoreFollower`), versions (`VersionFolder`): Where requests come from, and where versions go.
        config (`OnlineConfig`): The rule of learning; `num_assistant_tokens` must not be `None`.
        state (`Path`, *optional*): Folder of the session; one that lies there is gone on with.
        domain (`str`, *optional*): Learn from requests of this label only.
        by_domain (`bool`, *optional*, defaults to `False`):
            Teach each domain a draft of its own, whose versions are in a folder of its own below that of `versions`.
        peft_config (`peft.PeftConfig`, *optional*): Teach adapters; versions have them merged.
        target_version (`str`, *optional*):
            Learn from requests of this version of the target only; by default from those of the one whose requests are
            the newest in the stores, and of others as they take its place, an earlier one again among them. Requests
            that do not say one are taken for its own, as long as there was no other.
        target (`PreTrainedModel`, *optional*):
            The version that is learned from: requests of other ones are scored anew by it, see [`rescore`], instead of
            left out, and learned from without being judged by. Once there is a newer one, they are left out as well.
        facts (`DraftFacts`, *optional*): What the cards say beside the figures.
        repo_id (`str`, *optional*), token (`str`, *optional*), private (`bool`, *optional*):
            Repo of the Hub that each version is pushed to as well, by [`~osd_hf.hub.push.push_folder`].
        publish_seconds (`float`, *optional*, defaults to 0.0):
            Least time between two publications; what comes sooner waits, and the newest goes out.
        accelerator (`Accelerator`, *optional*): Runs backward and step, and has the trackers.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`): Seconds, for publications.

    Raises:
        ConfigError: a configuration without a fixed k, or a `target` that is not the version that is learned from.
        VocabularyMismatchError: a `target` of another vocabulary than the draft's.
        StateError: a session of another draft.

    Attributes:
        skipped (`Counter[str]`): What this run left out as it does not fit this learner, by reason.
        learned (`deque[AcceptanceStats]`), frozen (`deque[AcceptanceStats]`):
            What the version that served at the time, and the draft of the beginning, made of the newest requests of
            this run.
        domains (`deque[str]`): Their labels.
        published (`list[dict]`): Facts of the versions published by this run.
    """

    def __init__(
        self,
        draft: Any,
        tokenizer: Any,
        follower: StoreFollower,
        versions: VersionFolder,
        config: OnlineConfig,
        *,
        state: Path | None = None,
        domain: str | None = None,
        by_domain: bool = False,
        peft_config: Any = None,
        target_version: str | None = None,
        target: Any = None,
        facts: DraftFacts | None = None,
        repo_id: str | None = None,
        token: str | None = None,
        private: bool | None = None,
        publish_seconds: float = 0.0,
        accelerator: Accelerator | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Nothing is drafted here.
        config = replace(config, update_strategy="interval", compile_draft=False)
        if config.compared_k is None:
            raise ConfigError("A fixed k is needed, got `num_assistant_tokens=None`.")
        self.config, self.k = config, config.compared_k
        self.tokenizer, self.follower, self.versions = tokenizer, follower, versions
        self.domain, self.facts, self.repo_id = domain, facts or DraftFacts(), repo_id
        self._draft, self._token, self._private, self._state = draft, token, private, state
        self._publish_seconds, self._clock, self._published_at = publish_seconds, clock, -float("inf")
        drafts = DomainDrafts(draft, config, peft_config=peft_config, per_domain=by_domain)
        self.learner = Learner(drafts, config, accelerator, chooses=False)
        self._readable = Readable.by(drafts.base)
        self._counts: dict[str | None, list[int]] = {}  # requests and tokens, by draft
        self.skipped: Counter[str] = Counter()
        self.learned: deque[AcceptanceStats] = deque(maxlen=RECENT)
        self.frozen: deque[AcceptanceStats] = deque(maxlen=RECENT)
        self.domains: deque[str | None] = deque(maxlen=RECENT)
        self.published: list[dict[str, Any]] = []
        self._target, self._asked_version = target, target_version
        self._version = target_version  # that is learned from
        self._seen: dict[str, float] = {}  # versions, and when the newest request of each ended
        self._unpublished: dict[str | None, GateDecision] = {}
        # The learner's number and weights of versions that engines may be taken back to, by domain and number.
        self._served: dict[tuple[str | None, int], tuple[int, Snapshot]] = {}
        self._unstarted: list[str | None] = []  # whose draft as it was is to be published
        self._unpushed: Path | None = None
        self._unsaved_updates = 0
        self._retry_at = -float("inf")
        self._since_update = AcceptanceStats()
        if state is not None:
            check_pointer(state)
            if has_session(state):
                self._resume(state)
        if not target_version:  # those that have come already
            found = follower.targets(domain, self._readable.vocab_size)
            self._choose_version(found.items())
        self._at_hand = self._version  # what the model at hand scores for
        if target is not None:
            self._check_target()

    @property
    def requests(self) -> int:
        """Learned from, or judged by, since the session began."""
        return sum(requests for requests, _ in self._counts.values())

    @property
    def tokens(self) -> int:
        """Tokens of the answers to these requests."""
        return sum(tokens for _, tokens in self._counts.values())

    @property
    def is_pushed(self) -> bool:
        """Whether nothing waits to be pushed to the Hub."""
        return self._unpushed is None

    @property
    def set_aside(self) -> Counter[str]:
        """What cannot be read or learned from, since the session began, by reason; learning goes on without it, and
        it does not come back."""
        return self.learner.set_aside + self.follower.left_out.copy()  # which another thread may be adding to

    @property
    def learning_seconds(self) -> float:
        """Time that this run spent on learning."""
        return self.learner.seconds

    def step(
        self,
        on_request: Callable[[AcceptanceStats, AcceptanceStats, int], object] | None = None,
        *,
        limit: int | None = None,
    ) -> int:
        """
        Take in some of the requests that have come, at most `limit`, and return how many; 0 where nothing new has
        come. `on_request` is called for each with what the draft that serves and the frozen one made of it, and the
        version.

        Raises:
            StateError: a version or the session cannot be written. Learning goes on by further calls, and writing is
                tried again after half a minute.
        """
        self._follow_engines()
        taken = self.follower.take(min(limit or TAKEN_AT_ONCE, TAKEN_AT_ONCE))
        before = self.set_aside
        fitting = [trace for trace in taken if self._fits(trace) and self._updater(trace).accepts(trace)]
        if not self._asked_version:
            self._choose_version((trace.target, trace.created_at_seconds) for trace in fitting)
        if aside := [trace for trace in fitting if trace.is_rescored or self._is_another(trace)]:
            self._learn_anew(aside)
            fitting = [trace for trace in fitting if trace not in aside]
        # Each request has one place in the order of learning, so that counting on is safe where writing fails below.
        replays = self._isolated(lambda those: replay_each(self._draft, those, self.k), fitting)
        found = [(t, stats) for t, stats in zip(fitting, replays, strict=True) if stats is not None]
        frozen = iter([stats for _, stats in found])
        if self.set_aside != before:  # a restart is not to begin with what cannot be learned from
            self._unsaved_updates = max(self._unsaved_updates, session.UPDATES_BETWEEN_SAVES)
        for moment in serve_recorded(self.learner, [trace for trace, _ in found], self.k):
            if isinstance(moment, UpdateReport):
                self._updated(moment)
                continue
            trace, stats = moment
            self._count(trace)
            self.domains.append(trace.domain)
            self.learned.append(stats)
            self.frozen.append(next(frozen))
            self._since_update += stats
            if on_request is not None:
                on_request(stats, self.frozen[-1], trace.draft_version)
        if self._clock() >= self._retry_at:
            is_due = self._clock() - self._published_at >= self._publish_seconds
            try:
                if (is_due and self.publish()) or self._unsaved_updates >= session.UPDATES_BETWEEN_SAVES:
                    self.save()
            except StateError:
                self._retry_at = self._clock() + RETRY_SECONDS
                raise
        return len(taken)

    def _updater(self, trace: Trace) -> Updater:
        return self.learner.updater(self.learner.drafts.key(trace.domain))

    def _isolated(self, work: Callable[[Sequence[Trace]], Sequence[T]], traces: Sequence[Trace]) -> list[T | None]:
        """What work makes of each request; `None` for one that it fails on, which is set aside, for its draft."""
        groups: dict[str | None, list[int]] = {}
        for place, trace in enumerate(traces):
            groups.setdefault(self.learner.drafts.key(trace.domain), []).append(place)
        outcomes: list[T | None] = [None] * len(traces)
        for domain, places in groups.items():
            set_aside = self.learner.updater(domain).set_aside
            found = finish(set_aside.isolate(work, [traces[place] for place in places], self._readable))
            for place, outcome in zip(places, found, strict=True):
                outcomes[place] = outcome
        return outcomes

    def _count(self, trace: Trace) -> None:
        counts = self._counts.setdefault(self.learner.drafts.key(trace.domain), [0, 0])
        counts[0], counts[1] = counts[0] + 1, counts[1] + len(trace)

    def _choose_version(self, ended: Iterable[tuple[str | None, float]]) -> None:
        """Learn from the version of the newest request, by the versions of requests and when they ended: at once where
        it is a new one; where it was there before, once none is of the present one. Those of both may come mixed."""
        known, arrived = set(self._seen), set[str]()
        for version, at in ended:
            if version is not None:
                arrived.add(version)
                self._seen[version] = max(at, self._seen.get(version, -math.inf))
        newest = max(reversed(self._seen), key=self._seen.__getitem__, default=None)
        if newest in arrived and (newest not in known or self._version not in arrived):
            self._version = newest

    def _is_another(self, trace: Trace) -> bool:
        """Whether a request is of another version of the target than the one that is learned from."""
        is_sure = self._asked_version or len(self._seen) > 1
        return trace.target not in (None, self._version) or bool(trace.target is None and is_sure)

    def _check_target(self) -> None:
        """Refuse a model that cannot score requests for the version that is learned from."""
        size, wanted = vocab_size_of(self._target), self._readable.vocab_size
        if size != wanted:
            raise VocabularyMismatchError(
                f"The target has {size} tokens, the draft {wanted}. Use a draft of its size (see `align_vocab`)."
            )
        if not self._is_at_hand():
            raise ConfigError(
                f"The target is of version {version_of(self._target)}, but {self._version} is learned from, the "
                "newest in the stores or the one asked for. Load that, as it was served, or name this one's version."
            )

    def _is_at_hand(self) -> bool:
        """Whether the model at hand is the version that is learned from: names of engines are taken for the model's
        that were there when it was given, or came first."""
        if is_fingerprint(self._version):
            return version_of(self._target) == self._version
        self._at_hand = self._at_hand or self._version
        return self._version == self._at_hand

    def _learn_anew(self, traces: Sequence[Trace]) -> None:
        """Learn from requests of other versions with the rows of this one: those that were scored anew, and what the
        model that is at hand scores now, where it is this one."""
        others, anew = [trace for trace in traces if self._is_another(trace)], list[Trace]()
        if self._target is not None and self._is_at_hand():
            found = self._isolated(lambda those: rescore(self._target, those), others)
            anew = [replace(trace, target=self._version) for trace in found if trace is not None]
        else:
            hint = "" if self._target is None else " So is the target at hand: begin again with the newest."
            for _ in others:
                self._leave_out("of another version of the target", hint)
        for trace in (*anew, *(trace for trace in traces if trace not in others)):
            self.learner.observe(trace.domain, trace)
            self._count(trace)
        while (report := self.learner.after_answer()) is not None:
            self._updated(report)

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
        reason = next((reason for reason, is_so in misfits.items() if is_so), None)
        if reason is None and not drafts.admit(name):
            reason = "of more domains than get a draft"
        if reason is not None:
            self._leave_out(reason, " Set `num_logprobs` to what they were collected with." * ("entries" in reason))
        return reason is None

    def _leave_out(self, reason: str, hint: str = "") -> None:
        if not self.skipped[reason]:
            logger.warning("Left out: requests %s.%s", reason, hint)
        self.skipped[reason] += 1

    def _updated(self, report: UpdateReport) -> None:
        self._unsaved_updates += 1
        log_update(self.learner.accelerator, report, self.requests, self._since_update)
        self._since_update = AcceptanceStats()
        for decision in self.learner.take_decisions():
            if decision.outcome in ("promoted", "rolled back"):
                self._unpublished[decision.domain] = decision

    # --- publishing -------------------------------------------------------------------------------------------------

    def publish(self) -> bool:
        """
        Publish the versions that serve now, or push the one published last, where they wait; whether something did.
        The session is saved apart, but for a failure.

        Raises:
            StateError: a version cannot be written, or does not say what the draft says; the one before it stays. Of
                several drafts, the others are published; the session is saved, and another call tries again.
        """
        self._follow_engines()
        if not self._unpublished and self._unpushed is None and not self._unstarted:
            return False
        failures = []
        waiting = [partial(self._start, domain) for domain in self._unstarted]
        for publish in (*waiting, *(partial(self._publish, decision) for decision in self._unpublished.values())):
            try:
                publish()
            except StateError as error:
                failures.append(error)
            except OSError as error:  # each folder may be away
                failures.append(StateError(f"The folder {self.versions.path} cannot be used: {first_line(error)}."))
        if self._unpushed is not None:
            self._push(self._unpushed)
        if failures:
            self.save()
            raise failures[0]
        return True

    def publish_start(self, domain: str | None = None) -> None:
        """Publish the draft as it was, or the base draft of a domain, as `v000000`, which engines can be taken back
        to; raises StateError where it cannot be written now, and tries again with the versions."""
        self._unstarted.append(domain)
        self._start(domain)

    def _start(self, domain: str | None) -> None:
        versions, facts = self.versions.of(domain), self._facts(domain, None)
        if versions.version(0) is None:
            draft = self.learner.drafts.base
            versions.publish(lambda path: self._write(path, draft, facts, domain), facts, is_start=True)
        self._unstarted.remove(domain)

    def _publish(self, decision: GateDecision) -> None:
        self._published_at = self._clock()
        domain = decision.domain
        versions, facts = self.versions.of(domain), self._facts(domain, decision)
        with self.learner.drafts.lease(domain) as serving:
            folder = versions.publish(lambda path: self._write(path, serving.model, facts, domain), facts)
        del self._unpublished[domain]
        self.published.append(json.loads((folder / FACTS).read_text()))
        number, whose = versions.number, "" if domain is None else f" of {domain!r}"
        logger.info("Published version %d%s after %d requests.", number, whose, facts["requests"])
        if versions.pinned:  # by engines
            drafts = self.learner.drafts
            weights = drafts.aside(drafts.serving_snapshot(domain))
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
        version = self.learner.drafts.taught_for(domain) if decision else None
        version = version if is_fingerprint(version) else None  # names of engines may be folders of theirs
        name = self.repo_id or f"{self.versions.of(domain).path.name}/{folder.name.lstrip('.').split('-')[0]}"
        domains = self.facts.domains if domain is None else (domain,)
        card = replace(self.facts, training=training, target_version=version, domains=domains)
        save_draft(folder, draft, self.tokenizer, num_assistant_tokens=self.k, repo_id=name, facts=card)
        check_written(folder, draft, draft)

    def _follow_engines(self) -> None:
        """Go on from what engines serve where a version was taken back there: by its weights, as long as this process
        has published them; otherwise from what has been learned."""
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
                    logger.info("The weights of version %d are not at hand; learning goes on.", decision.serving)
                    continue
                number, weights = self._served[domain, decision.serving]
            self._unpublished.pop(domain, None)
            rejected = drafts.serving_version(domain)
            self.learner.go_back(replace(decision, version=rejected, serving=number), weights)
            self.learner.take_decisions()  # it is published already
            has_gone_back = True
        if has_gone_back:  # whoever is killed now is not to begin with what was taken back
            self._unsaved_updates = session.UPDATES_BETWEEN_SAVES  # where it fails now, it is told of and tried again
            with contextlib.suppress(StateError):
                self.save()

    def _push(self, folder: Path) -> None:
        """Push what was published last; a failure is tried again after the time between two versions."""
        assert self.repo_id is not None
        self._unpushed = folder
        message = f"Version {int(folder.name.removeprefix('v'))} of the draft"
        try:
            push_folder(folder, self.repo_id, token=self._token, private=self._private, commit_message=message)
        except OSDError as error:
            logger.warning("Version %d was not pushed: %s", self.versions.number, error)
            self._published_at = self._clock()
        else:
            self._unpushed = None

    # --- keeping ----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the session, where there is a folder for it; raises StateError where it cannot be written."""
        if self._state is None:
            return
        waiting = [decision.to_dict() for decision in self._unpublished.values()]
        facts = {
            "config": self.config.to_dict(), "counts": list(self._counts.items()),
            "taken": self.follower.state_dict(), "unpublished": waiting, "unpushed": self._unpushed is not None,
            "left_out": dict(self.follower.left_out), "target_versions": self._seen, "target_version": self._version,
        }  # fmt: skip
        save_session(self._state, self.learner.state_dict(), facts)
        self._unsaved_updates = 0

    def _resume(self, state: Path) -> None:
        facts = load_session(state, self.learner)
        try:
            self.follower.load_state_dict(facts["taken"], facts["left_out"])
            counts = facts["counts"] if "counts" in facts else [(None, [facts["requests"], facts["tokens"]])]
            self._counts = {domain: [int(requests), int(tokens)] for domain, (requests, tokens) in counts}
            seen = facts.get("target_versions")
            self._seen = {str(name): float(at) for name, at in seen.items()} if isinstance(seen, dict) else {}
            self._version = self._asked_version or facts.get("target_version")
            waiting = facts["unpublished"] or []
            for decision in [waiting] if isinstance(waiting, dict) else waiting:  # one, in sessions from before
                self._unpublished[decision["domain"]] = GateDecision(**decision)
            self._unpushed = self.versions.latest if facts["unpushed"] and self.repo_id is not None else None
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"The session in {state} is of another command. Choose another folder.") from error

    def close(self) -> None:
        """Publish and push what waits, save, end tracking, and let others publish; raises StateError where something
        cannot be written."""
        with contextlib.ExitStack() as last:
            last.callback(self.versions.close)
            last.callback(self.learner.accelerator.end_training)
            last.callback(self.save)
            self.publish()
