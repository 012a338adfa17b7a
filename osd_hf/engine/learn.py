"""Online learning for engines that serve elsewhere: from stores that others fill to published versions."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from accelerate import Accelerator

from osd_hf.config import OnlineConfig
from osd_hf.engine.versions import VersionFolder
from osd_hf.errors import ConfigError, OSDError, StateError, StoreError
from osd_hf.hub.cards import DraftFacts
from osd_hf.hub.export import check_written
from osd_hf.hub.push import push_folder, save_draft
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.faults import Readable
from osd_hf.learning.learner import Learner
from osd_hf.learning.lesson import GateDecision
from osd_hf.learning.session import check_pointer, has_session, load_session, save_session
from osd_hf.learning.updater import UpdateReport, finish, log_update
from osd_hf.metrics import AcceptanceStats
from osd_hf.replay import replay_each
from osd_hf.simulate import serve_recorded
from osd_hf.store.arrow import readable_traces
from osd_hf.store.folder import list_shards, open_store, read_table
from osd_hf.trace import Trace
from osd_hf.utils.report import provenance

__all__ = ["StoreFollower", "StoreLearner"]

logger = logging.getLogger(__name__)

ATTEMPTS = 5  # at a shard that cannot be read before it is left out
TAKEN_AT_ONCE = 16  # requests between two looks at the clock, and at who wants to stop
RETRY_SECONDS = 30.0  # between two attempts to write what could not be written
RECENT = 4096  # requests whose acceptance is kept


class StoreFollower:
    """
    New requests of stores that other processes append to; each request of a finished shard is taken once.

    Args:
        paths (`Sequence[Path]`):
            Folders of the stores; made where they are missing.

    Raises:
        StoreError: a path is no store.

    Attributes:
        is_waiting (`bool`):
            Whether a shard could not be read just now, and is tried again later.
        left_out (`Counter[str]`):
            Shards and requests that cannot be read, by reason.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(dict.fromkeys(path.expanduser().absolute() for path in paths))
        for path in self.paths:
            open_store(path)
        self.is_waiting = False
        self.left_out: Counter[str] = Counter()
        # Writer -> number of the shard to read next, and how many of its rows were taken. No two writers of any stores
        # have one name.
        self._taken: dict[str, tuple[int, int]] = {}
        self._unread: list[tuple[int, str, str]] = []  # number, writer and path of each shard, in the order of reading
        self._failed: Counter[str] = Counter()  # attempts by path; "" is the listing
        self._open: tuple[str, list[Trace | None]] = ("", [])

    def take(self, limit: int) -> list[Trace]:
        """
        The next requests, those of each writer in their order; none where nothing new has come. A shard that again
        and again cannot be read is left out, and the log says so: others come after it.

        Raises:
            StoreError: a store cannot be listed, again and again.
        """
        if not self._unread:
            self._unread = self._listed()
        taken: list[Trace] = []
        while self._unread and len(taken) < limit:
            number, writer, path = self._unread[0]
            traces = self._load(path)
            if traces is None:  # it is tried again at the next look, and later shards of its writer wait for it
                self._unread = [shard for shard in self._unread if shard[1] != writer]
                continue
            begin, first = self._taken.get(writer, (number, 0))
            first = first if begin == number else 0
            part = traces[first : first + limit - len(taken)]
            readable = [trace for trace in part if trace is not None]
            taken += readable
            if unreadable := len(part) - len(readable):
                self.left_out["that cannot be read"] += unreadable
                logger.warning("Left out: %d requests of %s that cannot be read.", unreadable, path)
            is_done = first + len(part) >= len(traces)
            self._taken[writer] = (number + 1, 0) if is_done else (number, first + len(part))
            if is_done:
                del self._unread[0]
        return taken

    def _listed(self) -> list[tuple[int, str, str]]:
        """The shards that are not read to their end; none where a store is away for a moment."""
        try:
            paths = [Path(path) for store in self.paths for path in list_shards(store)]
        except StoreError as error:
            self._failed[""] += 1
            if self._failed[""] == ATTEMPTS:
                raise
            logger.warning("Tried again: %s.", error)
            self.is_waiting = True
            return []
        self._failed[""], self.is_waiting = 0, False
        numbered = [(re.search(r"(\d+)\.parquet$", path.name), path.parent.name, str(path)) for path in paths]
        shards = [(int(number[1]), writer, path) for number, writer, path in numbered if number is not None]
        return sorted(shard for shard in shards if shard[0] >= self._taken.get(shard[1], (0, 0))[0])

    def _load(self, path: str) -> list[Trace | None] | None:
        """The requests of a shard, `None` for one that cannot be read; `None` where it should be tried again."""
        if self._open[0] == path:
            return self._open[1]
        try:
            table = read_table(path)
            self._open = (path, [] if table is None else readable_traces(table))
        except (StoreError, ValueError, TypeError, MemoryError, pa.ArrowException) as error:
            self._failed[path] += 1
            if self._failed[path] < ATTEMPTS:
                self.is_waiting = True
                return None
            logger.warning("Left out: %s.", error)
            del self._failed[path]
            self.left_out["of shards that cannot be read, counted by shard"] += 1
            self._open = (path, [])
        return self._open[1]

    def state_dict(self) -> dict[str, list[int]]:
        """What has been taken, ready for JSON."""
        return {writer: list(place) for writer, place in self._taken.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[int]], left_out: Mapping[str, int] | None = None) -> None:
        """Go on after what was taken and left out."""
        self._taken = {str(writer): (int(place[0]), int(place[1])) for writer, place in state.items()}
        self.left_out.update(left_out or {})
        self._unread.clear()


class StoreLearner:
    """
    Takes in what stores gain, as if the draft had drafted those answers, learns from it by the rule of an
    [`OnlineConfig`], and publishes what the gate lets through. What was learned, and how far each store was read, is
    saved together, so a killed learner goes on with no request learned twice or not at all since then.

    Args:
        draft (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`):
            Where learning starts, with the target's vocabulary size; not changed. The tokenizer is published with it.
        follower (`StoreFollower`), versions (`VersionFolder`):
            Where requests come from, and where versions go.
        config (`OnlineConfig`, *optional*):
            The rule of learning; `num_assistant_tokens` must be a number.
        state (`Path`, *optional*):
            Folder of the session; one that lies there is gone on with.
        domain (`str`, *optional*):
            Learn from requests of this label only.
        facts (`DraftFacts`, *optional*):
            What the cards say beside the figures.
        repo_id (`str`, *optional*), token (`str`, *optional*), private (`bool`, *optional*):
            Repo of the Hub that each version is pushed to as well, by [`~osd_hf.hub.push.push_folder`].
        publish_seconds (`float`, *optional*, defaults to 0.0):
            Least time between two publications; what comes sooner waits, and the newest goes out.
        accelerator (`Accelerator`, *optional*):
            Runs backward and step, and has the trackers.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`):
            Seconds, for publications.

    Raises:
        ConfigError: a configuration without a fixed k.
        StateError: a session of another draft.

    Attributes:
        requests (`int`), tokens (`int`):
            Learned from, or judged by, since the session began.
        skipped (`Counter[str]`):
            What this run left out as it does not fit this learner, by reason.
        learned (`deque[AcceptanceStats]`), frozen (`deque[AcceptanceStats]`):
            What the version that served at the time, and the draft of the beginning, made of the newest requests of
            this run.
        published (`list[dict]`):
            Facts of the versions published by this run.
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
        self._readable = Readable.by(draft)
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
        taken = self.follower.take(min(limit or TAKEN_AT_ONCE, TAKEN_AT_ONCE))
        updater, before = self.learner.updater(None), self.set_aside
        fitting = [trace for trace in taken if self._fits(trace) and updater.accepts(trace)]
        # Each request has one place in the order of learning, so that counting on is safe where writing fails below.
        replays = updater.set_aside.isolate(
            lambda those: replay_each(self._draft, those, self.k), fitting, updater.readable
        )
        found = [(t, stats) for t, stats in zip(fitting, finish(replays), strict=True) if stats is not None]
        frozen = iter([stats for _, stats in found])
        if self.set_aside != before:  # a restart is not to begin with what cannot be learned from
            self._unsaved_updates = max(self._unsaved_updates, self.config.autosave_interval)
        for moment in serve_recorded(self.learner, [trace for trace, _ in found], self.k):
            if isinstance(moment, UpdateReport):
                self._updated(moment)
                continue
            trace, stats = moment
            self.requests += 1
            self.tokens += len(trace)
            self.learned.append(stats)
            self.frozen.append(next(frozen))
            self._since_update.append(stats)
            if on_request is not None:
                on_request(stats, self.frozen[-1], trace.draft_version)
        if self._clock() >= self._retry_at:
            is_due = self._clock() - self._published_at >= self._publish_seconds
            try:
                if (is_due and self._publish_what_waits()) or self._unsaved_updates >= self.config.autosave_interval:
                    self.save()
            except StateError:
                self._retry_at = self._clock() + RETRY_SECONDS
                raise
        return len(taken)

    def _fits(self, trace: Trace) -> bool:
        kept, positions = self.config.num_logprobs, self._readable.positions
        width = 0 if kept is None or kept >= trace.vocab_size else kept
        reason = None
        if self.domain is not None and trace.domain != self.domain:
            reason = "of another domain"
        elif not len(trace) or not trace.num_kept:
            reason = "without target rows"
        elif trace.vocab_size != self._readable.vocab_size:
            reason = f"of a vocabulary of {trace.vocab_size}, not {self._readable.vocab_size}"
        elif trace.top_ids.shape[1] != width:
            reason = f"with {trace.top_ids.shape[1] or 'all'} entries per position, not {width or 'all'}"
        elif trace.is_encoder_decoder:
            reason = "of an encoder-decoder"
        elif positions is not None and len(trace.prompt_ids) + len(trace) > positions:
            reason = f"longer than the draft's {positions} positions"
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
        for decision in self.learner.take_decisions():
            if decision.outcome in ("promoted", "rolled back"):
                self._unpublished = decision

    # --- publishing -------------------------------------------------------------------------------------------------

    def _publish_what_waits(self) -> bool:
        """Publish or push what waits; whether something did."""
        if self._unpublished is not None:
            self.publish()
        elif self._unpushed is not None:
            self._push()
        else:
            return False
        return True

    def publish(self) -> Path:
        """
        Publish the version that serves now, and return its folder. The session is saved apart.

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
        """Push what was published last; a failure is tried again after the time between two versions."""
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
        save_session(self._state, self.learner.state_dict(), facts)
        self._unsaved_updates = 0

    def _resume(self, state: Path) -> None:
        facts = load_session(state, self.learner)
        try:
            self.follower.load_state_dict(facts["taken"], facts.get("left_out"))
            self.requests, self.tokens = int(facts["requests"]), int(facts["tokens"])
            self._unpublished = None if facts["unpublished"] is None else GateDecision(**facts["unpublished"])
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
            self._publish_what_waits()
