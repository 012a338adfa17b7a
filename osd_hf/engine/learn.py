"""Online learning for engines that serve elsewhere: from stores that others fill to published versions."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from osd_hf.capture.hook import rescore
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError, OSDError, StateError, VocabularyMismatchError
from osd_hf.fingerprint import is_fingerprint
from osd_hf.fingerprint import target_version as version_of
from osd_hf.hub.cards import DraftFacts
from osd_hf.hub.push import check_written, push_folder, save_draft
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.learner import Learner
from osd_hf.learning.session import check_pointer, has_session, load_session, save_session
from osd_hf.learning.updater import UpdateReport, finish, log_update
from osd_hf.metrics import AcceptanceStats
from osd_hf.pair import vocab_size_of
from osd_hf.replay import replay_each
from osd_hf.simulate import serve_recorded
from osd_hf.store.folder import StoreFollower
from osd_hf.trace import Trace
from osd_hf.utils.disk import hold_lock, sync_folder, sync_tree
from osd_hf.utils.report import make_folder, provenance, write_report

__all__ = ["FACTS", "LATEST", "StoreLearner", "VersionFolder", "latest_version"]

logger = logging.getLogger(__name__)

LATEST = "latest"
FACTS = "version.json"
LEAST_KEPT = 2  # the newest, and the one that an engine may be loading just now
LOCK = ".publisher.lock"
VERSION = re.compile(r"v(\d{6,})")
UNFINISHED = re.compile(rf"\.(v\d{{6,}}|{LATEST})-[0-9a-f]+\.tmp")  # names that nobody else gives
TAKEN_AT_ONCE = 16  # requests between two looks at the clock, and at who wants to stop
RETRY_SECONDS = 30.0  # between two attempts to write what could not be written
RECENT = 4096  # requests whose acceptance is kept


# --- versions -------------------------------------------------------------------------------------------------------


def latest_version(path: Path) -> Path | None:
    """Folder of the version that the pointer in a folder of versions names; `None` where there is none."""
    link = path / LATEST
    return link.resolve() if link.exists() else None


class VersionFolder:
    """
    Published versions `v000001`, `v000002`, ... and a symbolic link `latest` to the newest. A reader finds whole
    versions only: each is written under a hidden name, synced and renamed, and the link is replaced after that. Other
    files in the folder stay as they are: a version of ours is known by its `version.json`.

    Args:
        path (`Path`): Folder of the versions, made where it is missing.
        keep (`int`, *optional*, defaults to 5): Newest versions kept, at least 2.

    Raises:
        ConfigError: it cannot be written, another process publishes there, or `latest` is something else there.
    """

    def __init__(self, path: Path, *, keep: int = 5) -> None:
        if keep < LEAST_KEPT:
            raise ConfigError(f"At least {LEAST_KEPT} versions are kept, as one may just be read, got {keep}.")
        self.path, self.keep = path.expanduser().absolute(), keep
        make_folder(self.path)
        try:
            self._lock = hold_lock(
                self.path / LOCK,
                f"Another process publishes to {path}, or its file system has no locks. Choose another folder, or "
                "stop that process.",
            )
        except OSError as error:
            raise ConfigError(f"The folder {path} cannot be written to: {error.strerror}.") from error
        pointer = self.path / LATEST
        if os.path.lexists(pointer) and not pointer.is_symlink():
            self.close()
            raise ConfigError(f"{pointer} is no pointer to a version. Choose another folder, or move it away.")
        for entry in list(self.path.iterdir()):
            if UNFINISHED.fullmatch(entry.name):  # of a publisher that was killed
                _remove(entry)
        # A publisher may have been killed before the pointer followed; one that somebody set back stays.
        *_, before, newest = (0, 0, *self._numbers())
        if newest and self._pointed in (0, before):
            with contextlib.suppress(OSError):
                self._point(newest)

    def publish(self, write: Callable[[Path], object], facts: dict[str, Any]) -> Path:
        """
        Publish the next version, which `write` writes into a folder that does not exist yet, and return its folder.
        The facts are kept beside it in `version.json`, with its number.

        Raises:
            StateError: it cannot be written; the versions before it, and the pointer, stay as they are.
        """
        number = self.number + 1
        while os.path.lexists(self._folder(number)):  # somebody else's
            number += 1
        unfinished = self._hidden(f"v{number:06d}")
        try:
            write(unfinished)
            unfinished.mkdir(exist_ok=True)
            write_report(unfinished / FACTS, {"version": number, **facts})
            sync_tree(unfinished)
            os.replace(unfinished, self._folder(number))
            with contextlib.suppress(OSError):  # before the pointer names it; what is amiss is told below
                sync_folder(self.path)
            try:
                self._point(number)
            except BaseException:
                if self._pointed != number:  # nobody is ever told of it
                    _remove(self._folder(number))
                raise
        except Exception as error:  # safetensors and tokenizers report a full disk as errors of many kinds
            raise StateError(f"Version {number} cannot be written to {self.path}: {error}.") from error
        finally:
            _remove(unfinished)
        for old in filter(self._is_ours, self._numbers()[: -self.keep]):
            with contextlib.suppress(OSError):  # by its name nobody finds half of it
                os.replace(self._folder(old), gone := self._hidden(f"v{old:06d}"))
                _remove(gone)
        return self._folder(number)

    def _hidden(self, name: str) -> Path:
        return self.path / f".{name}-{secrets.token_hex(4)}.tmp"

    def _point(self, number: int) -> None:
        link = self._hidden(LATEST)
        try:
            os.symlink(self._folder(number).name, link, target_is_directory=True)
            os.replace(link, self.path / LATEST)
            sync_folder(self.path)
        finally:
            _remove(link)

    def _folder(self, number: int) -> Path:
        return self.path / f"v{number:06d}"

    @property
    def number(self) -> int:
        """Number of the newest version; 0 where there is none."""
        return max(self._numbers(), default=0)

    @property
    def latest(self) -> Path | None:
        """Folder of the version that the pointer names; `None` where there is none."""
        return latest_version(self.path)

    @property
    def _pointed(self) -> int:
        """Number of the version that the pointer names; 0 where it names none."""
        with contextlib.suppress(OSError):
            name = VERSION.fullmatch(os.readlink(self.path / LATEST))
            if name is not None and int(name[1]) in self._numbers():
                return int(name[1])
        return 0

    def _numbers(self) -> list[int]:
        names = (VERSION.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name is not None and (self.path / name[0] / FACTS).is_file())

    def _is_ours(self, number: int) -> bool:
        """Whether a version was published here, and is no folder of somebody else's by such a name."""
        try:
            return bool(json.loads((self._folder(number) / FACTS).read_text())["version"] == number)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def close(self) -> None:
        """Let another process publish here."""
        if self._lock is not None:
            self._lock.close()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


# --- learning -------------------------------------------------------------------------------------------------------


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
        requests (`int`), tokens (`int`): Learned from, or judged by, since the session began.
        skipped (`Counter[str]`): What this run left out as it does not fit this learner, by reason.
        learned (`deque[AcceptanceStats]`), frozen (`deque[AcceptanceStats]`):
            What the version that served at the time, and the draft of the beginning, made of the newest requests of
            this run.
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
        config = replace(config, update_strategy="interval", max_duty_cycle=1.0, compile_draft=False)
        if config.compared_k is None:
            raise ConfigError("A fixed k is needed, got `num_assistant_tokens=None`.")
        self.config, self.k = config, config.compared_k
        self.tokenizer, self.follower, self.versions = tokenizer, follower, versions
        self.domain, self.facts, self.repo_id = domain, facts or DraftFacts(), repo_id
        self._draft, self._token, self._private, self._state = draft, token, private, state
        self._publish_seconds, self._clock, self._published_at = publish_seconds, clock, -float("inf")
        drafts = DomainDrafts(draft, config, per_domain=False)
        self.learner = Learner(drafts, config, accelerator, chooses=False)
        self.requests = self.tokens = 0
        self.skipped: Counter[str] = Counter()
        self.learned: deque[AcceptanceStats] = deque(maxlen=RECENT)
        self.frozen: deque[AcceptanceStats] = deque(maxlen=RECENT)
        self.published: list[dict[str, Any]] = []
        self._target, self._asked_version = target, target_version
        self._version = target_version  # that is learned from
        self._seen: dict[str, float] = {}  # versions, and when the newest request of each ended
        self._unpublished: GateDecision | None = None
        self._unpushed: Path | None = None
        self._unsaved_updates = 0
        self._retry_at = -float("inf")
        self._since_update = AcceptanceStats()
        if state is not None:
            check_pointer(state)
            if has_session(state):
                self._resume(state)
        if not target_version:  # those that have come already
            found = follower.targets(domain, self.learner.updater(None).readable.vocab_size)
            self._choose_version(found.items())
        self._at_hand = self._version  # what the model at hand scores for
        if target is not None:
            self._check_target()

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
        taken = self.follower.take(min(limit or TAKEN_AT_ONCE, TAKEN_AT_ONCE))
        updater, before = self.learner.updater(None), self.set_aside
        fitting = [trace for trace in taken if self._fits(trace) and updater.accepts(trace)]
        if not self._asked_version:
            self._choose_version((trace.target, trace.created_at_seconds) for trace in fitting)
        if aside := [trace for trace in fitting if trace.is_rescored or self._is_another(trace)]:
            self._learn_anew(aside)
            fitting = [trace for trace in fitting if trace not in aside]
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
            self._since_update += stats
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
        size, wanted = vocab_size_of(self._target), self.learner.updater(None).readable.vocab_size
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
            updater = self.learner.updater(None)
            found = updater.set_aside.isolate(lambda those: rescore(self._target, those), others, updater.readable)
            anew = [replace(trace, target=self._version) for trace in finish(found) if trace is not None]
        else:
            hint = "" if self._target is None else " So is the target at hand: begin again with the newest."
            for _ in others:
                self._leave_out("of another version of the target", hint)
        for trace in (*anew, *(trace for trace in traces if trace not in others)):
            self.learner.observe(None, trace)
            self.requests += 1
            self.tokens += len(trace)
        while (report := self.learner.after_answer()) is not None:
            self._updated(report)

    def _fits(self, trace: Trace) -> bool:
        kept, readable, size = self.config.num_logprobs, self.learner.updater(None).readable, trace.vocab_size
        found, wanted = trace.top_ids.shape[1], 0 if kept is None or kept >= size else kept
        most = math.inf if readable.positions is None else readable.positions
        misfits = {
            "of another domain": self.domain not in (None, trace.domain),
            "without target rows": not len(trace) or not trace.num_kept,
            f"of a vocabulary of {size}, not {readable.vocab_size}": size != readable.vocab_size,
            f"with {found or 'all'} entries per position, not {wanted or 'all'}": found != wanted,
            "of an encoder-decoder": trace.is_encoder_decoder,
            f"longer than the draft's {most} positions": len(trace.prompt_ids) + len(trace) > most,
            "sampled, whose corrections cannot be known": trace.is_sampled and self.config.learn_from == "corrections",
        }
        reason = next((reason for reason, is_so in misfits.items() if is_so), None)
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
                self._unpublished = decision

    # --- publishing -------------------------------------------------------------------------------------------------

    def _publish_what_waits(self) -> bool:
        """Publish the version that serves now, or push the one published last, where that waits; whether something
        did. The session is saved apart. Raises StateError where a version cannot be written, or does not say what the
        draft says; the one before it stays."""
        if self._unpublished is not None:
            self._publish(self._unpublished)
        elif self._unpushed is not None:
            self._push(self._unpushed)
        else:
            return False
        return True

    def _publish(self, decision: GateDecision) -> None:
        self._published_at = self._clock()
        facts: dict[str, Any] = {
            "draft_version": self.learner.drafts.serving_version(),
            "requests": self.requests,
            "tokens": self.tokens,
            "num_assistant_tokens": self.k,
            "decision": decision.to_dict(),
            "created_at_seconds": time.time(),
            "provenance": provenance(),
        }
        with self.learner.drafts.lease() as serving:
            folder = self.versions.publish(lambda path: self._write(path, serving.model, facts), facts)
        self._unpublished = None
        self.published.append({"version": self.versions.number, **facts})
        logger.info("Published version %d after %d requests.", self.versions.number, self.requests)
        if self.repo_id is not None:
            self._push(folder)

    def _write(self, folder: Path, draft: Any, facts: dict[str, Any]) -> None:
        decision = facts["decision"]
        held_back = {
            f"Acceptance on {decision['requests']} held-back requests, {name}": f"{decision[side]:.3f}"
            for name, side in (("before", "alpha_before"), ("this version", "alpha_after"))
            if decision[side] is not None
        }
        training = {**self.facts.training, "Requests learned from": facts["requests"], **held_back}
        version = self.learner.drafts.taught_for(None)
        version = version if is_fingerprint(version) else None  # names of engines may be folders of theirs
        name = self.repo_id or f"{self.versions.path.name}/{folder.name.lstrip('.').split('-')[0]}"
        card = replace(self.facts, training=training, target_version=version)
        save_draft(folder, draft, self.tokenizer, num_assistant_tokens=self.k, repo_id=name, facts=card)
        check_written(folder, draft, draft)

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
        waiting = None if self._unpublished is None else self._unpublished.to_dict()
        facts = {
            "config": self.config.to_dict(), "requests": self.requests, "tokens": self.tokens,
            "taken": self.follower.state_dict(), "unpublished": waiting, "unpushed": self._unpushed is not None,
            "left_out": dict(self.follower.left_out), "target_versions": self._seen, "target_version": self._version,
        }  # fmt: skip
        save_session(self._state, self.learner.state_dict(), facts)
        self._unsaved_updates = 0

    def _resume(self, state: Path) -> None:
        facts = load_session(state, self.learner)
        try:
            self.follower.load_state_dict(facts["taken"], facts["left_out"])
            self.requests, self.tokens = int(facts["requests"]), int(facts["tokens"])
            seen = facts.get("target_versions")
            self._seen = {str(name): float(at) for name, at in seen.items()} if isinstance(seen, dict) else {}
            self._version = self._asked_version or facts.get("target_version")
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
