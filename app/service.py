"""The service: accepts prompts, schedules them, and generates the answers."""

from __future__ import annotations

import logging
import threading
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteriaList

from osd_hf import AcceptanceStats, OnlineConfig, Trace, replay
from osd_hf.bundled import find_domain
from osd_hf.errors import ConfigError, OSDError
from osd_hf.replay import EmittedToken, emitted_tokens, padded, redraft
from osd_hf.utils.context import choose_threads
from osd_hf.utils.streaming import Pieces, Rounds, Stop, text_of
from osd_hf_app.pair import NO_DOMAIN, ServedPair
from osd_hf_app.sessions import (
    AUTOMATIC,
    SIDES,
    Answer,
    Batch,
    Record,
    Session,
    Sessions,
    Settings,
    ShownToken,
    Side,
    Workspace,
)
from osd_hf_app.sharing import FairQueue, Slot

logger = logging.getLogger(__name__)

REPLAY_K = 5  # tokens per round at which both drafts are compared
MAX_CHARACTERS = 20_000  # of a prompt
MAX_STARTED = 8  # answers in progress at the same time: each holds its caches
MAX_PUBLIC_NEW_TOKENS = 192
STOP_SECONDS = 0.2  # within which a waiting batch reacts to a stop
LEARNING_SECONDS = 30.0  # that a batch waits at most for learning between two prompts
DEMO = "the app itself"  # the visitor who asks for the demonstration
DEMO_DOMAIN, DEMO_TOKENS = "finance", 64
# Prompts that are answered together, and optimizer steps after them.
DEMO_PARTS = ((32, 0), (32, 0), (32, 16), (8, 16), (8, 16), (8, 16), (8, 16), (8, 0))
WARM_UP_PROMPT = "Who are you?"
# The bundled pair learns so often that twenty prompts show an effect.
BUNDLED_CONFIG = {"update_interval": 2, "steps_per_update": 16, "weight_average": 0.9}


class Service:
    """Answer the prompts of all visitors. One answer is generated at a time. `state` is a saved session that the
    shared workspace continues. `config` replaces settings of the app."""

    def __init__(
        self,
        pair: ServedPair,
        state: Path | None = None,
        config: dict[str, Any] | None = None,
        *,
        is_public: bool = False,
        threads: int | None = None,
    ) -> None:
        self.pair = pair
        self.is_public = is_public
        self.queue = FairQueue(MAX_STARTED)
        defaults = {"update_strategy": "idle", **(BUNDLED_CONFIG if pair.is_bundled else {})}
        shared = Workspace(pair, OnlineConfig(**{**defaults, **(config or {})}))
        self.sessions = Sessions(shared)
        try:
            if state is not None:
                shared.assistant.load_state(state)
            choose_threads(pair.target, lambda: _time_target(pair, 4), threads)
            _time_target(pair, 2)  # warms up
            seconds, tokens = _time_target(pair, 24)
        except BaseException:
            shared.close()
            raise
        self.seconds_per_token = seconds / len(tokens)  # of the target alone, a moving average

    def ask(self, session: Session, prompt: str, settings: Settings, *, wants_private: bool = False) -> Answer:
        """Start to answer a prompt. With `wants_private`, the prompt is refused if the visitor's private draft was
        removed, so that no other draft learns from it. Raises ConfigError then, and for an empty or too long prompt,
        an unknown domain, a chat that is still being answered, or too many waiting prompts."""
        if len(prompt) > MAX_CHARACTERS:
            raise ConfigError(f"The prompt has {len(prompt):,} characters; the maximum is {MAX_CHARACTERS:,}.")
        if self.is_public and (tokens := settings.max_new_tokens) > MAX_PUBLIC_NEW_TOKENS:
            raise ConfigError(f"In public mode, `max_new_tokens` is at most {MAX_PUBLIC_NEW_TOKENS}, got {tokens}.")
        # Without control characters.
        text = "".join(c for c in prompt if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs")).strip()
        if not text:
            raise ConfigError("The prompt is empty. Write something first.")
        # The classifier reads the typed words only, and not the template or earlier turns.
        domain = find_domain(text) if settings.domain in (AUTOMATIC, NO_DOMAIN) else settings.domain
        answer = Answer(text, settings, domain if self.pair.domains else NO_DOMAIN)
        earlier = session.entries if settings.remember else []
        history = [(e.prompt, e.text) for e in earlier if isinstance(e, Answer) and e.error is None]
        self.pair.encode(text, settings.max_new_tokens, history)  # raises if the prompt is too long
        self.sessions.start(session, answer, lambda: self._answer(session, answer, history), wants_private)
        return answer

    def send(
        self, session: Session, domain: str, count: int, settings: Settings, *, wants_private: bool = False
    ) -> Batch:
        """Start to answer sample prompts of a domain one after the other. Between two prompts, the draft learns while
        no other visitor asks. Raises ConfigError as `ask` does."""
        if domain not in (self.pair.domains or (NO_DOMAIN,)):
            known = ", ".join(self.pair.domains) or "no particular domain"
            raise ConfigError(f"There are sample prompts of {known}, got {domain!r}.")
        batch = Batch(domain, count)
        tokens = min(settings.max_new_tokens, MAX_PUBLIC_NEW_TOKENS) if self.is_public else settings.max_new_tokens
        settings = replace(settings, domain=domain, check=False, remember=False, max_new_tokens=tokens)
        self.sessions.start(session, batch, lambda: self._answer_batch(session, batch, settings), wants_private)
        return batch

    def demonstrate(self) -> None:
        """Answer sample prompts that nobody asked for, in batches, and learn from them, so that a new page shows what
        learning does on a prompt that is not learned from."""
        threading.Thread(target=self._demonstrate, name="osd_hf-demo", daemon=True).start()

    def _demonstrate(self) -> None:
        workspace, domain = self.sessions.shared, DEMO_DOMAIN if self.pair.domains else NO_DOMAIN
        assistant = workspace.assistant
        shown, *prompts = self.pair.samples(domain, 1 + sum(count for count, _ in DEMO_PARTS))
        answer = Answer(shown, Settings(learn=False, max_new_tokens=DEMO_TOKENS), domain)
        try:
            self._answer(self.sessions.guest(), answer, [])
            workspace.shown = answer
            for count, steps in DEMO_PARTS:
                rows = [self.pair.encode(prompt, DEMO_TOKENS)[0].tolist() for prompt in prompts[:count]]
                del prompts[:count]
                ids, mask = padded(rows, "left", self.pair.target.device)
                traces: list[Trace] = []
                with self.queue.slot(visitor=DEMO):
                    how = answer.settings.generate_kwargs
                    assistant.generate(
                        ids, attention_mask=mask, domain=domain, owner=DEMO, on_trace=traces.append, **how
                    )
                for trace in traces:
                    sides = self._sides(workspace, domain, trace)
                    workspace.add(Record(domain, sides["learning"].stats, sides["frozen"].stats, trace.draft_version))
                if steps:
                    with self.queue.slot(visitor=DEMO):  # not beside the answer of a visitor
                        assistant.update(steps, domain=domain or None)
                    answer.sides = self._sides(workspace, domain, answer.trace)
        except OSDError as error:  # such as a reset in between
            logger.warning("The demonstration ended: %s", error)

    def _answer_batch(self, session: Session, batch: Batch, settings: Settings) -> None:
        for prompt in self.pair.samples(batch.domain, batch.total):
            if batch.stop.is_set():
                return
            answer = Answer(prompt, settings, batch.domain, stop=batch.stop)
            for earlier in batch.answers[-1:]:
                earlier.tokens = []  # only the newest answer is shown
            for earlier in batch.answers[-2:-1]:
                earlier.sides = {}
            batch.answers.append(answer)
            try:
                self._answer(session, answer, [])
            finally:
                answer.is_done = True
            assistant, deadline = session.workspace.assistant, time.monotonic() + LEARNING_SECONDS
            batch.is_learning = settings.learn and assistant.is_learning
            session.touch()
            while batch.is_learning and not batch.stop.is_set() and time.monotonic() < deadline:
                batch.is_learning = not assistant.wait_until_idle(STOP_SECONDS)
            batch.is_learning = False

    def _answer(self, session: Session, answer: Answer, history: list[tuple[str, str]]) -> None:
        def keep_waiting(position: int) -> bool:
            if position != answer.position:
                answer.position = position
                session.touch()
            return not session.stop_if_left(answer)

        with self.queue.slot(keep_waiting, visitor=session.visitor) as slot:
            if slot is None or session.stop_if_left(answer):
                return
            answer.position = 0
            ids = self.pair.encode(answer.prompt, answer.settings.max_new_tokens, history)
            # Until all is measured, the served drafts stay the same and times are comparable.
            with self.sessions.learning_paused():
                started = time.perf_counter()
                traces = self._generate(session, answer, ids, slot)
                answer.seconds = time.perf_counter() - started - slot.waited_seconds
                for trace in traces:  # none if it was stopped before the first token
                    self._score(session, answer, trace)
                    self._compare_with_target(answer, ids, trace, slot)

    def _generate(self, session: Session, answer: Answer, ids: torch.Tensor, slot: Slot) -> list[Trace]:
        """Add the tokens of each round to the answer, and return its trace."""
        pieces = Pieces(self.pair.tokenizer)
        traces: list[Trace] = []

        def add_round(round_ids: list[int]) -> None:
            is_first, shown = not answer.tokens, len(pieces.texts)
            pieces.push(round_ids)
            origins = ["accepted"] * (len(round_ids) - 1) + ["target"]
            answer.tokens += [ShownToken(*token) for token in zip(pieces.texts[shown:], origins, strict=True)]
            session.touch(is_urgent=is_first)
            self.queue.yield_to_others(slot)
            session.stop_if_left(answer)

        session.workspace.assistant.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            domain=answer.domain,
            learn=answer.settings.learn,
            num_assistant_tokens="auto" if answer.settings.k == "auto" else int(answer.settings.k),
            owner=session.owner,  # the text of one visitor is not proposed to others
            on_trace=traces.append,
            streamer=Rounds(add_round),
            stopping_criteria=StoppingCriteriaList([Stop(answer.stop)]),
            **answer.settings.generate_kwargs,
        )
        return traces

    def _score(self, session: Session, answer: Answer, trace: Trace) -> None:
        """Find the origin of each token, and count what both drafts would have had accepted."""
        workspace = session.workspace
        with workspace.assistant.drafts.lease(answer.domain) as serving:
            emitted = emitted_tokens(trace, serving.model)
            if trace.is_sampled:
                frozen, learning = (replay(draft, [trace], REPLAY_K) for draft in (self.pair.draft, serving.model))
            else:
                answer.trace, answer.sides = trace, self._sides(workspace, answer.domain, trace)
                frozen, learning = (answer.sides[side].stats for side in SIDES)
        answer.tokens = _shown(self.pair.tokenizer, emitted)
        answer.stats = AcceptanceStats.from_trace(trace)
        answer.version = serving.version
        workspace.add(Record(answer.domain, learning, frozen, serving.version))
        session.touch()

    def _sides(self, workspace: Workspace, domain: str, trace: Trace) -> dict[str, Side]:
        """Return what the frozen and the learning draft propose along a greedy answer."""
        with workspace.assistant.drafts.lease(domain) as serving:
            drafts = (self.pair.draft, serving.model)
            redrafted = [redraft(draft, [trace], REPLAY_K)[0] for draft in drafts]
        shown = [_shown(self.pair.tokenizer, emitted_tokens(each)) for each in redrafted]
        stats = map(AcceptanceStats.from_trace, redrafted)
        return dict(zip(SIDES, map(Side, shown, stats, (0, serving.version)), strict=True))

    def _compare_with_target(self, answer: Answer, ids: torch.Tensor, trace: Trace, slot: Slot) -> None:
        """Compare time, and unless sampled the tokens, with those of the target alone."""
        settings = answer.settings
        if settings.check and not answer.stop.is_set():
            slot.waited_seconds = 0.0
            streamer = Rounds(lambda _: self.queue.yield_to_others(slot))
            stopping = StoppingCriteriaList([Stop(answer.stop)])
            seconds, alone = _generate_alone(
                self.pair, ids, streamer=streamer, stopping_criteria=stopping, **settings.generate_kwargs
            )
            if not answer.stop.is_set():
                measured = (seconds - slot.waited_seconds) / len(alone)
                self.seconds_per_token += 0.2 * (measured - self.seconds_per_token)
                answer.is_measured = True
                if not settings.do_sample and self.pair.is_exact:
                    answer.is_identical = alone == trace.completion_ids.tolist()
        answer.alone_seconds = self.seconds_per_token * len(trace)


def _shown(tokenizer: Any, emitted: Sequence[EmittedToken]) -> list[ShownToken]:
    pieces = Pieces(tokenizer)
    pieces.push(token.id for token in emitted)
    drafted = [None if token.drafted_id is None else text_of(tokenizer, [token.drafted_id]) for token in emitted]
    origins = ["text" if (t.origin, t.source) == ("accepted", "text") else t.origin for t in emitted]
    return list(map(ShownToken, pieces.texts, origins, drafted, [token.drafted_prob for token in emitted]))


def _time_target(pair: ServedPair, tokens: int) -> tuple[float, list[int]]:
    return _generate_alone(pair, pair.encode(WARM_UP_PROMPT, tokens), do_sample=False, max_new_tokens=tokens)


def _generate_alone(pair: ServedPair, ids: torch.Tensor, **kwargs: Any) -> tuple[float, list[int]]:
    """Return the seconds and the tokens of the target alone."""
    started = time.perf_counter()
    output = pair.target.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)
    return time.perf_counter() - started, pair.new_tokens(ids, output)
