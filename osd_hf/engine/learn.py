"""Online learning for engines that serve elsewhere: from stores that others fill to published versions."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from osd_hf.config import OnlineConfig
from osd_hf.engine.log import StoreFollower
from osd_hf.engine.versions import VersionFolder
from osd_hf.errors import ConfigError, OSDError, StateError
from osd_hf.hub.cards import DraftFacts
from osd_hf.hub.push import check_written, push_folder, save_draft
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.learner import Learner
from osd_hf.learning.session import check_pointer, has_session, load_session, save_session
from osd_hf.learning.tracking import log_update
from osd_hf.learning.updater import UpdateReport, finish
from osd_hf.metrics import AcceptanceStats
from osd_hf.replay import replay_each
from osd_hf.simulate import serve_recorded
from osd_hf.trace import Trace
from osd_hf.utils.report import provenance

__all__ = ["StoreLearner"]

logger = logging.getLogger(__name__)

TAKEN_AT_ONCE = 16  # requests between two looks at the clock, and at who wants to stop
RETRY_SECONDS = 30.0  # between two attempts to write what could not be written
RECENT = 4096  # requests whose acceptance is kept


class StoreLearner:
    """
    Takes in what stores gain, as if the draft had drafted those answers, learns from it by the rule of an
    [`OnlineConfig`], and publishes what the gate lets through. What was learned, and how far each store was read, is
    saved together, so that a killed learner goes on with no request learned twice or not at all since then.

    Args:
        draft (`PreTrainedModel`):
            Where learning starts, with the target's vocabulary size; not changed.
        tokenizer (`PreTrainedTokenizerBase`):
            Goes out with each version.
        follower (`StoreFollower`):
            The stores.
        versions (`VersionFolder`):
            Where versions go.
        config (`OnlineConfig`, *optional*):
            The rule; `num_assistant_tokens` must be a number.
        state (`Path`, *optional*):
            Folder of the session; what lies there is gone on with.
        domain (`str`, *optional*):
            Learn from requests of this label only.
        facts (`DraftFacts`, *optional*):
            For the cards.
        repo_id (`str`, *optional*):
            Of the Hub; each version is pushed there as well.
        token (`str`, *optional*):
            For the Hub.
        private (`bool`, *optional*):
            As of [`~osd_hf.hub.push.push_folder`].
        publish_seconds (`float`, *optional*, defaults to 0.0):
            Least time between two publications; what comes sooner waits, and the newest goes out.
        accelerator (`Accelerator`, *optional*):
            Runs backward and step, and has the trackers.

    Raises:
        ConfigError: a configuration without a fixed k.
        StateError: a session of another draft.

    Attributes:
        requests (`int`), tokens (`int`):
            Learned from, or judged by, since the session began.
        skipped (`Counter[str]`):
            What was left out by this run as it does not fit this learner, by reason.
        learned (`deque[AcceptanceStats]`), frozen (`deque[AcceptanceStats]`):
            Of the newest requests of this run: what the version that served at the time, and the draft of the
            beginning, made of them.
        published (`list[dict]`):
            Facts of the versions published by this run.
        learning_seconds (`float`):
            Spent by this run.
    """

    def __init__(
        self,
        draft: Any,
        tokenizer: Any,
        follower: StoreFollower,
        versions: VersionFolder,
        config: OnlineConfig | None = None,
        *,
        state: Path | None = None,
        domain: str | None = None,
        facts: DraftFacts | None = None,
        repo_id: str | None = None,
        token: str | None = None,
        private: bool | None = None,
        publish_seconds: float = 0.0,
        accelerator: Accelerator | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = replace(config or OnlineConfig(), update_strategy="interval", max_duty_cycle=1.0)
        if not isinstance(config.num_assistant_tokens, int):
            raise ConfigError(f"A fixed k is needed, got `num_assistant_tokens={config.num_assistant_tokens!r}`.")
        self.config, self.k = config, config.num_assistant_tokens
        self.tokenizer, self.follower, self.versions = tokenizer, follower, versions
        self.domain, self.facts, self.repo_id = domain, facts or DraftFacts(), repo_id
        self._draft, self._token, self._private, self._state = draft, token, private, state
        self._publish_seconds, self._clock, self._published_at = publish_seconds, clock, -float("inf")
        text_config = draft.config.get_text_config()
        self._vocab_size = int(text_config.vocab_size)
        self._positions: int | None = getattr(text_config, "max_position_embeddings", None)
        self.learner = Learner(DomainDrafts(draft, config, per_domain=False), config, accelerator)
        self.requests = self.tokens = 0
        self.skipped: Counter[str] = Counter()
        self.learned: deque[AcceptanceStats] = deque(maxlen=RECENT)
        self.frozen: deque[AcceptanceStats] = deque(maxlen=RECENT)
        self.published: list[dict[str, Any]] = []
        self._unpublished: GateDecision | None = None
        self._unpushed: Path | None = None
        self._unsaved_updates = 0
        self._retry_at = -float("inf")
        self._since_update: list[AcceptanceStats] = []
        if state is not None:
            check_pointer(state)
            if has_session(state):
                self._resume(state)

    @property
    def is_pushed(self) -> bool:
        """Whether nothing waits to be pushed to the Hub."""
        return self._unpushed is None

    @property
    def set_aside(self) -> Counter[str]:
        """What cannot be read or learned from, since the session began, by reason; learning goes on without it, and
        it does not come back."""
        return self.learner.set_aside + self.follower.left_out

    @property
    def learning_seconds(self) -> float:
        return self.learner.seconds

    def step(
        self,
        on_request: Callable[[AcceptanceStats, AcceptanceStats, int], object] | None = None,
        *,
        limit: int | None = None,
    ) -> int:
        """
        Take in some of the requests that have come, if any have.

        Args:
            on_request (`Callable[[AcceptanceStats, AcceptanceStats, int], object]`, *optional*):
                Called for each with what the draft that serves and the frozen one made of it, and the version.
            limit (`int`, *optional*):
                Most requests taken.

        Returns:
            `int`: requests taken; 0 where nothing new has come.

        Raises:
            StateError: a version or the session cannot be written. Learning goes on by further calls, and writing is
                tried again after half a minute.
        """
        taken = self.follower.take(min(limit or TAKEN_AT_ONCE, TAKEN_AT_ONCE))
        updater, before = self.learner.updater(None), self.set_aside
        fitting = [trace for trace in taken if self._fits(trace) and updater.accepts(trace)]
        # Each request has one place in the order of learning, so that counting on is safe where writing fails below.
        replayed = finish(
            updater.set_aside.isolate(
                lambda those: replay_each(self._draft, those, self.k), fitting, updater.readable
            )
        )  # fmt: skip
        found = [(trace, stats) for trace, stats in zip(fitting, replayed, strict=True) if stats is not None]
        traces, frozen = [trace for trace, _ in found], [stats for _, stats in found]
        if self.set_aside != before:  # a restart is not to begin with what cannot be learned from
            self._unsaved_updates = max(self._unsaved_updates, self.config.autosave_interval)
        number = 0
        for moment in serve_recorded(self.learner, traces, self.k):
            if isinstance(moment, UpdateReport):
                self._updated(moment)
                continue
            trace, stats = moment
            self.requests += 1
            self.tokens += len(trace)
            self.learned.append(stats)
            self.frozen.append(frozen[number])
            self._since_update.append(stats)
            if on_request is not None:
                on_request(stats, frozen[number], trace.draft_version)
            number += 1
        if self._clock() >= self._retry_at:
            try:
                if self._publish_when_due() or self._unsaved_updates >= self.config.autosave_interval:
                    self.save()
            except StateError:
                self._retry_at = self._clock() + RETRY_SECONDS
                raise
        return len(taken)

    def _fits(self, trace: Trace) -> bool:
        kept = self.config.num_logprobs
        width = 0 if kept is None or kept >= trace.vocab_size else kept
        reason = None
        if self.domain is not None and trace.domain != self.domain:
            reason = "of another domain"
        elif not len(trace) or not trace.num_kept:
            reason = "without target rows"
        elif trace.vocab_size != self._vocab_size:
            reason = f"of a vocabulary of {trace.vocab_size}, not {self._vocab_size}"
        elif trace.top_ids.shape[1] != width:
            reason = f"with {trace.top_ids.shape[1] or 'all'} entries per position, not {width or 'all'}"
        elif trace.is_encoder_decoder:
            reason = "of an encoder-decoder"
        elif self._positions is not None and len(trace.prompt_ids) + len(trace) > self._positions:
            reason = f"longer than the draft's {self._positions} positions"
        elif trace.is_sampled and self.config.learn_from == "corrections":
            reason = "sampled, whose corrections cannot be known"
        if reason is not None:
            if not self.skipped[reason]:
                hint = " Set `num_logprobs` to what they were collected with." if "entries" in reason else ""
                logger.warning("Left out: requests %s.%s", reason, hint)
            self.skipped[reason] += 1
        return reason is None

    def _updated(self, report: UpdateReport) -> None:
        self._unsaved_updates += 1
        recent = sum(self._since_update, AcceptanceStats())
        self._since_update.clear()
        log_update(self.learner.accelerator, report, self.requests, recent)
        for decision in self.learner.decisions:
            if decision.outcome in ("promoted", "rolled back"):
                self._unpublished = decision
        self.learner.decisions.clear()

    # --- publishing -------------------------------------------------------------------------------------------------

    def _publish_when_due(self) -> bool:
        """Whether a version went out, or what waited was tried to be pushed."""
        is_due = self._clock() - self._published_at >= self._publish_seconds
        return is_due and self._publish_what_waits()

    def _publish_what_waits(self) -> bool:
        if self._unpublished is not None:
            self.publish()
        elif self._unpushed is not None:
            self._push()
        else:
            return False
        return True

    def publish(self) -> Path:
        """
        Publish the version that serves now; gives its folder. The session is saved apart.

        Raises:
            StateError: it cannot be written, or does not say what the draft says; the version before stays.
        """
        decision, self._published_at = self._unpublished, self._clock()
        facts: dict[str, Any] = {
            "draft_version": self.learner.drafts.serving_version(),
            "requests": self.requests,
            "tokens": self.tokens,
            "num_assistant_tokens": self.k,
            "decision": None if decision is None else decision.to_dict(),
            "created_at_seconds": time.time(),
            "provenance": provenance(),
        }
        with self.learner.drafts.lease() as serving:
            folder = self.versions.publish(lambda path: self._write(path, serving.model, facts), facts)
        self._unpublished = None
        self.published.append({"version": self.versions.number, **facts})
        logger.info("Published version %d after %d requests.", self.versions.number, self.requests)
        if self.repo_id is not None:
            self._unpushed = folder
            self._push()
        return folder

    def _write(self, folder: Path, draft: Any, facts: dict[str, Any]) -> None:
        decision = facts["decision"] or {}
        held_back = {
            f"Acceptance on {decision['requests']} held-back requests, {name}": f"{decision[side]:.3f}"
            for name, side in (("before", "alpha_before"), ("this version", "alpha_after"))
            if decision.get(side) is not None
        }
        training = {**self.facts.training, "Requests learned from": facts["requests"], **held_back}
        name = self.repo_id or f"{self.versions.path.name}/{folder.name.lstrip('.').split('-')[0]}"
        card = replace(self.facts, training=training)
        try:
            save_draft(folder, draft, self.tokenizer, num_assistant_tokens=self.k, repo_id=name, facts=card)
            check_written(folder, draft, draft)
        except ConfigError as error:
            raise StateError(str(error)) from error

    def _push(self) -> None:
        """Push what was published last; where that fails, it is tried again after the time between two versions."""
        assert self.repo_id is not None and self._unpushed is not None
        message = f"Version {int(self._unpushed.name.removeprefix('v'))} of the draft"
        try:
            push_folder(self._unpushed, self.repo_id, token=self._token, private=self._private, commit_message=message)
        except OSDError as error:
            logger.warning("Version %d was not pushed: %s", self.versions.number, error)
            self._published_at = self._clock()
            return
        self._unpushed = None

    # --- keeping ----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the session, where there is a folder for it; raises StateError where it cannot be written."""
        if self._state is None:
            return
        waiting = None if self._unpublished is None else self._unpublished.to_dict()
        facts = {
            "config": self.config.to_dict(), "requests": self.requests, "tokens": self.tokens,
            "taken": self.follower.state_dict(), "unpublished": waiting, "unpushed": self._unpushed is not None,
            "left_out": dict(self.follower.left_out),
        }  # fmt: skip
        save_session(self._state, self.learner, facts)
        self._unsaved_updates = 0

    def _resume(self, state: Path) -> None:
        facts, _ = load_session(state, self.learner)
        try:
            self.follower.load_state_dict(facts["taken"])
            self.follower.left_out.update(facts.get("left_out", {}))
            self.requests, self.tokens = int(facts["requests"]), int(facts["tokens"])
            self._unpublished = None if facts["unpublished"] is None else GateDecision(**facts["unpublished"])
            self._unpushed = self.versions.latest if facts["unpushed"] and self.repo_id is not None else None
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"The session in {state} is of another command. Choose another folder.") from error

    def close(self) -> None:
        """Publish and push what waits, save, end tracking, and let others publish; raises StateError where something
        cannot be written."""
        try:
            try:
                self._publish_what_waits()
            finally:
                self.save()
        finally:
            self.learner.accelerator.end_training()
            self.versions.close()
