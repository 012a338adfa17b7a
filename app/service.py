"""The service: accepts prompts, schedules them, and generates the answers."""

from __future__ import annotations

import logging
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteriaList

from osd_hf import AcceptanceStats, OnlineConfig, Trace
from osd_hf.bundled import DOMAINS
from osd_hf.errors import ConfigError, OSDError
from osd_hf.replay import EmittedToken, emitted_tokens, replay_each
from osd_hf.utils.context import choose_threads
from osd_hf.utils.streaming import Pieces, Rounds, Stop, text_of
from osd_hf_app.pair import GENERAL, NO_DOMAIN, ServedPair, domain_classifier
from osd_hf_app.sessions import PAIR_CHANGED, Answer, Batch, Session, Sessions, Settings, ShownToken
from osd_hf_app.sharing import MAX_STARTED, FairQueue, Slot
from osd_hf_app.workspace import Record, Workspace

logger = logging.getLogger(__name__)

REPLAY_K = 5  # tokens per round at which both drafts are compared
MAX_CHARACTERS = 20_000  # of a prompt
MAX_STARTED_BUNDLED = 16  # answers in progress with the bundled pair, which has small caches
MAX_PUBLIC_NEW_TOKENS = 192
STOP_SECONDS = 0.2  # within which a waiting batch reacts to a stop
LEARNING_SECONDS = 30.0  # that a batch waits at most for learning between two prompts
WARM_UP_PROMPT = "Who are you?"
# The bundled pair learns so often that twenty prompts show an effect.
BUNDLED_CONFIG = {"update_interval": 2, "steps_per_update": 16, "weight_average": 0.9}


class Service:
    """Answer the prompts of all visitors. One answer is generated at a time.

    `state` is a saved session that the shared workspace continues. `config` replaces settings of the app, and
    `loading` has the `dtype` and `device` of pairs that are loaded later.
    """

    def __init__(
        self,
        pair: ServedPair,
        state: Path | None = None,
        config: dict[str, Any] | None = None,
        *,
        is_public: bool = False,
        threads: int | None = None,
        **loading: Any,
    ) -> None:
        self.is_public = is_public
        self._config = config or {}
        self._threads = threads
        self._loading = loading
        self.queue = FairQueue()
        self.target_timings: deque[tuple[float, int]] = deque(maxlen=20)  # seconds and tokens of the target alone
        self.sessions = Sessions(self._new_workspace(pair, state))

    @property
    def pair(self) -> ServedPair:
        """The models that serve."""
        return self.sessions.shared.pair

    def _new_workspace(self, pair: ServedPair, state: Path | None = None) -> Workspace:
        """Create a shared workspace, choose the number of threads, and warm up the target."""
        defaults = {"update_strategy": "idle", **(BUNDLED_CONFIG if pair.is_bundled else {})}
        workspace = Workspace(pair, OnlineConfig(**{**defaults, **self._config}), state)
        try:
            choose_threads(pair.target, lambda: _time_target(pair, 4), self._threads)
            _time_target(pair, 2)
            timing = _time_target(pair, 24)
        except BaseException:
            workspace.close()
            raise
        self.target_timings.clear()
        self.target_timings.append((timing[0], len(timing[1])))
        self.queue.max_started = MAX_STARTED_BUNDLED if pair.is_bundled else MAX_STARTED
        return workspace

    def reset(self, workspace: Workspace) -> None:
        """Discard what the drafts of a workspace have learned, between two requests."""
        with self.queue.slot():
            workspace.reset()

    def load(self, target: str | None, draft: str | None) -> ServedPair:
        """Serve another pair with new workspaces, and return it. The content of chats stays.

        Raises OSDError if the models cannot be loaded or do not fit together; the current ones stay then.
        """
        pair = ServedPair(target, draft, **self._loading)
        with self.queue.slot():
            threads = torch.get_num_threads()
            try:
                shared = self._new_workspace(pair)
            except BaseException:
                torch.set_num_threads(threads)
                raise
            self.sessions.replace_shared(shared)
        return pair

    def close(self) -> None:
        """Stop learning in all workspaces."""
        self.sessions.close()

    def ask(self, session: Session, prompt: str, settings: Settings, *, wants_private: bool | None = None) -> Answer:
        """Start to answer a prompt.

        With `wants_private`, the prompt is refused if the visitor's private draft was removed, so that no other draft
        learns from it. Raises ConfigError then, and for an empty or too long prompt, an unknown domain, a chat that is
        still being answered, or too many waiting prompts.
        """
        text = self._clean(prompt, settings)
        # The classifier reads the typed words only, and not the template or earlier turns.
        domain = settings.domain or domain_classifier()(text) if self.pair.domains else NO_DOMAIN
        answer = Answer(text, settings, domain)
        history = [
            (entry.prompt, entry.text)
            for entry in session.entries
            if settings.remember and isinstance(entry, Answer) and entry.error is None
        ]
        self.pair.encode(text, settings.max_new_tokens, history)  # raises if the prompt is too long
        self._start(session, answer, lambda: self._answer(session, answer, history), wants_private)
        return answer

    def _clean(self, prompt: str, settings: Settings) -> str:
        """Return a prompt without control characters. Raises ConfigError if it cannot be answered."""
        prompt = prompt.strip()
        if len(prompt) > MAX_CHARACTERS:
            raise ConfigError(f"The prompt has {len(prompt):,} characters; the maximum is {MAX_CHARACTERS:,}.")
        if self.is_public and settings.max_new_tokens > MAX_PUBLIC_NEW_TOKENS:
            raise ConfigError(
                f"In public mode, `max_new_tokens` is at most {MAX_PUBLIC_NEW_TOKENS}, got {settings.max_new_tokens}."
            )
        text = "".join(c for c in prompt if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs")).strip()
        if not text:
            raise ConfigError("The prompt is empty. Write something first.")
        if settings.domain not in (None, GENERAL, *DOMAINS):
            raise ConfigError(f"The domain must be one of {', '.join((*DOMAINS, GENERAL))}, got {settings.domain!r}.")
        return text

    def send(
        self, session: Session, domain: str, count: int, settings: Settings, *, wants_private: bool | None = None
    ) -> Batch:
        """Start to answer sample prompts of a domain one after the other.

        Between two prompts, the draft learns while no other visitor asks. Raises ConfigError as `ask` does.
        """
        if domain not in (self.pair.domains or (NO_DOMAIN,)):
            known = ", ".join(self.pair.domains) or "no particular domain"
            raise ConfigError(f"There are sample prompts of {known}, got {domain!r}.")
        batch = Batch(domain, count)
        tokens = min(settings.max_new_tokens, MAX_PUBLIC_NEW_TOKENS) if self.is_public else settings.max_new_tokens
        settings = replace(settings, domain=domain, check=False, remember=False, max_new_tokens=tokens)
        self._start(session, batch, lambda: self._answer_batch(session, batch, settings), wants_private)
        return batch

    def _start(
        self, session: Session, job: Answer | Batch, work: Callable[[], None], wants_private: bool | None
    ) -> None:
        self.sessions.begin(session, job, wants_private)

        def run() -> None:
            try:
                work()
            except OSDError as error:
                job.error = str(error)
            except Exception as error:
                logger.exception("An answer failed.")
                job.error = f"Internal error ({type(error).__name__}). See the log of the app."
            finally:
                self.sessions.end(session, job)

        threading.Thread(target=run, name="osd_hf-answer", daemon=True).start()

    def _answer_batch(self, session: Session, batch: Batch, settings: Settings) -> None:
        for prompt in self.pair.samples(batch.domain, batch.total):
            if batch.stop.is_set():
                return
            answer = Answer(prompt, settings, batch.domain, stop=batch.stop, private_workspace=batch.private_workspace)
            for shown in batch.answers[-1:]:
                shown.tokens = []  # only the newest answer is shown
            batch.answers.append(answer)
            try:
                self._answer(session, answer, [])
            finally:
                answer.is_done = True
            assistant, deadline = session.workspace.assistant, time.monotonic() + LEARNING_SECONDS
            is_current = batch.private_workspace in (None, session.workspace)
            batch.is_learning = settings.learn and assistant.is_learning and is_current
            session.touch()
            while batch.is_learning and not batch.stop.is_set() and time.monotonic() < deadline:
                batch.is_learning = not assistant.wait_until_idle(STOP_SECONDS)
            batch.is_learning = False

    def _answer(self, session: Session, answer: Answer, history: list[tuple[str, str]]) -> None:
        def update_position(position: int) -> None:
            answer.position = position
            session.touch()

        def is_gone() -> bool:
            return session.is_abandoned or answer.stop.is_set()

        with self.queue.slot(update_position, visitor=session.visitor, is_gone=is_gone) as slot:
            if slot is None or is_gone():
                answer.is_stopped = True
                answer.stop.set()  # ends a batch
                return
            workspace = session.workspace
            if answer.private_workspace not in (None, workspace):
                answer.settings = replace(answer.settings, learn=False)
                session.show(f"{PAIR_CHANGED} Your earlier prompts are answered, but no draft learns from them.")
            answer.is_exact = workspace.pair.is_exact
            ids = workspace.pair.encode(answer.prompt, answer.settings.max_new_tokens, history)
            # Until all is measured, the served drafts stay the same and times are comparable.
            with self.sessions.learning_paused():
                started = time.perf_counter()
                output, trace = self._generate(session, workspace, ids, answer, slot)
                answer.seconds = time.perf_counter() - started - slot.waited_seconds
                answer.is_stopped = answer.stop.is_set()
                if trace is not None:
                    self._score(session, workspace, answer, trace)
                    self._compare_with_target(workspace, answer, ids, output, slot)

    def _generate(
        self, session: Session, workspace: Workspace, ids: torch.Tensor, answer: Answer, slot: Slot
    ) -> tuple[torch.Tensor, Trace | None]:
        """Return the output of `generate` and its trace, and add the tokens of each round to the answer."""
        started = time.perf_counter()
        pieces = Pieces(workspace.pair.tokenizer)
        traces: list[Trace] = []

        def add_round(round_ids: list[int]) -> None:
            is_first = answer.first_token_seconds is None
            if is_first:
                answer.first_token_seconds = time.perf_counter() - started
            shown = len(pieces.texts)
            pieces.push(round_ids)
            origins = ["accepted"] * (len(round_ids) - 1) + ["target"]
            answer.tokens += [ShownToken(*token) for token in zip(pieces.texts[shown:], origins, strict=True)]
            session.touch(is_urgent=is_first)
            self.queue.yield_to_others(slot)
            if session.is_abandoned:
                answer.stop.set()

        output: torch.Tensor = workspace.assistant.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            domain=answer.domain,
            learn=answer.settings.learn,
            num_assistant_tokens=answer.settings.k,
            owner=session.owner,  # the text of one visitor is not proposed to others
            on_trace=traces.append,
            streamer=Rounds(add_round),
            stopping_criteria=StoppingCriteriaList([Stop(answer.stop)]),
            **answer.settings.generate_kwargs,
        )
        return output, traces[0] if traces else None

    def _score(self, session: Session, workspace: Workspace, answer: Answer, trace: Trace) -> None:
        """Find the origin of each token, and count what both drafts would have had accepted."""
        tokenizer = workspace.pair.tokenizer
        with workspace.assistant.drafts.lease(answer.domain) as serving:
            emitted = emitted_tokens(trace, serving.model)
            learning, frozen = (
                replay_each(draft, [trace], REPLAY_K)[0] for draft in (serving.model, workspace.pair.draft)
            )
        pieces = Pieces(tokenizer)
        pieces.push(token.id for token in emitted)
        drafted = [None if token.drafted_id is None else text_of(tokenizer, [token.drafted_id]) for token in emitted]
        answer.tokens = [
            ShownToken(text, _shown_origin(token), other, token.drafted_prob)
            for text, token, other in zip(pieces.texts, emitted, drafted, strict=True)
        ]
        answer.stats = AcceptanceStats.from_trace(trace)
        answer.version = serving.version
        workspace.add(Record(answer.domain, learning, frozen, serving.version))
        session.count_corrections(
            (other, text_of(tokenizer, [token.id]))
            for other, token in zip(drafted, emitted, strict=True)
            if other is not None
        )
        session.touch()

    def _compare_with_target(
        self, workspace: Workspace, answer: Answer, ids: torch.Tensor, output: torch.Tensor, slot: Slot
    ) -> None:
        """Compare time, and unless sampled the tokens, with those of the target alone."""
        assert answer.stats is not None
        settings, emitted = answer.settings, answer.stats.emitted
        if settings.check and not answer.is_stopped:
            waited, after_round = slot.waited_seconds, lambda _: self.queue.yield_to_others(slot)
            seconds, alone = _generate_alone(workspace.pair, ids, settings.generate_kwargs, answer.stop, after_round)
            seconds -= slot.waited_seconds - waited
            if alone and not answer.stop.is_set():
                self.target_timings.append((seconds, len(alone)))
                if not settings.do_sample:
                    answer.is_identical = alone == workspace.pair.new_tokens(ids, output)
                answer.alone_seconds = seconds * emitted / len(alone)
                answer.is_measured = True
                return
        total_seconds, total_tokens = (sum(column) for column in zip(*self.target_timings, strict=True))
        answer.alone_seconds = total_seconds / total_tokens * emitted


def _shown_origin(token: EmittedToken) -> str:
    return "text" if token.origin == "accepted" and token.source == "text" else token.origin


def _time_target(pair: ServedPair, tokens: int) -> tuple[float, list[int]]:
    settings = {"do_sample": False, "max_new_tokens": tokens}
    return _generate_alone(pair, pair.encode(WARM_UP_PROMPT, tokens), settings)


def _generate_alone(
    pair: ServedPair,
    ids: torch.Tensor,
    settings: dict[str, Any],
    stop: threading.Event | None = None,
    after_round: Callable[[list[int]], object] = lambda ids: None,
) -> tuple[float, list[int]]:
    """Return the seconds and the tokens of the target alone."""
    started = time.perf_counter()
    output = pair.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        stopping_criteria=StoppingCriteriaList([Stop(stop or threading.Event())]),
        streamer=Rounds(after_round),
        **settings,
    )
    return time.perf_counter() - started, pair.new_tokens(ids, output)
