"""The service: takes prompts, lets them have their turn at the models, and makes the answers."""

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
from osd_hf.utils.streaming import Pieces, Rounds, Stop, text_of
from osd_hf.utils.threads import choose_threads, release_team
from osd_hf_app.pair import NO_DOMAIN, ServedPair
from osd_hf_app.rooms import OTHER, Room, domain_router
from osd_hf_app.sharing import MAX_BEGUN, Turn, Turns
from osd_hf_app.visitors import MAX_WAITING, PAIR_LEFT, Answer, Batch, Session, Settings, ShownToken, Visitors

logger = logging.getLogger(__name__)

K = 5  # at which both drafts of the curves are replayed
MAX_CHARACTERS = 20_000  # of a prompt
SMALL_BEGUN = 16  # answers at once that have begun, where models are so small that their caches do not count
PUBLIC_NEW_TOKENS = 192  # at most, where strangers share the models
STOP_SECONDS = 0.2  # within which a batch that waits heeds its visitor
LEARNING_SECONDS = 30.0  # that a batch waits at most between two prompts for what is due to be learned
WARM_UP = "Who are you?"


class Service:
    """
    Answers prompts, one at a time, whoever asks.

    Args:
        pair (`ServedPair`):
            The models.
        state (`Path`, *optional*):
            A saved session that the shared room goes on with.
        config (`dict[str, Any]`, *optional*):
            Settings of `OnlineConfig` in place of the app's. Learning is paused during requests: `"interval"` never
            learns.
        is_public (`bool`, *optional*, defaults to `False`):
            Whether strangers come, each of whom then has limits: answers are shorter, and stop when they leave.
        threads (`int`, *optional*):
            Threads of torch; by default one, unless all cores are clearly faster.
        load_settings (`Any`):
            `dtype` and `device` of the pairs that are loaded later.
    """

    def __init__(self, pair: ServedPair, state: Path | None = None, config: dict[str, Any] | None = None, *,
                 is_public: bool = False, threads: int | None = None, **load_settings: Any) -> None:  # fmt: skip
        self.is_public = is_public
        self._config, self._threads, self._load_settings = config or {}, threads, load_settings
        self.turns = Turns()
        self.alone: deque[tuple[float, int]] = deque(maxlen=20)  # seconds and tokens of the target alone
        self.visitors = Visitors(self._opened(pair, state))

    @property
    def pair(self) -> ServedPair:
        """The models that serve."""
        return self.visitors.shared.pair

    def _opened(self, pair: ServedPair, state: Path | None = None) -> Room:
        """A room for a pair that is about to serve: threads are set, and what only a first request pays is paid."""
        # On the bundled pair learning is so eager that twenty prompts show it.
        eager = {"update_interval": 2, "steps_per_update": 16, "weight_average": 0.9} if pair.is_bundled else {}
        room = Room(pair, OnlineConfig(**{"update_strategy": "idle", **eager, **self._config}), state)
        try:
            self._use_threads(pair)
            for count in (2, 24):
                ids = pair.encode(WARM_UP, count)
                seconds, emitted = _timed_alone(pair, ids, {"do_sample": False, "max_new_tokens": count})
            release_team()  # others answer
        except BaseException:
            room.close()
            raise
        self.alone.clear()
        self.alone.append((seconds, len(emitted)))
        self.turns.max_begun = SMALL_BEGUN if pair.is_bundled else MAX_BEGUN
        return room

    def _use_threads(self, pair: ServedPair) -> None:
        ids = pair.encode(WARM_UP, 4)
        settings = {"do_sample": False, "max_new_tokens": 4}
        self._used, _ = choose_threads(pair.target, lambda: _timed_alone(pair, ids, settings), self._threads)

    def reset(self, room: Room) -> None:
        """Forget what a room's draft has learned, between two requests."""
        with self.turns.turn(alone=True):
            room.reset()
        self.visitors.touch(room)

    def load(self, target: str | None, draft: str | None) -> ServedPair:
        """Serve another pair, with new rooms, and return it; chats stay, to be read. Raises OSDError where the models
        cannot be loaded, or do not fit together; those that serve stay then."""
        pair = ServedPair(target, draft, **self._load_settings)
        with self.turns.turn(alone=True):
            try:
                shared = self._opened(pair)
            except BaseException:
                torch.set_num_threads(self._used)
                raise
            self.visitors.share(shared)
        return pair

    def close(self) -> None:
        """End learning in all rooms."""
        self.visitors.close()

    def ask(self, session: Session, prompt: str, settings: Settings, *, wants_private: bool | None = None) -> Answer:
        """
        Begin to answer a prompt; the answer grows by itself, whether anybody watches or not. `wants_private` says
        whether the visitor believes to have a draft of their own: nobody else's learns from what is meant for it.

        Raises:
            ConfigError: an empty or too long prompt, an unknown domain, the chat is still being answered, too many
                wait, or the visitor's own draft is gone.
        """
        text = self._checked(prompt, settings)
        # By the words that were typed: an encoded prompt has those of a template and of earlier turns as well.
        domain = settings.domain or str(domain_router().function(text)) if self.pair.domains else NO_DOMAIN
        answer = Answer(text, settings, domain)
        history = [
            (entry.prompt, entry.text)
            for entry in session.entries
            if settings.remember and isinstance(entry, Answer) and entry.error is None
        ]
        self.pair.encode(text, settings.max_new_tokens, history)  # what does not fit is said at once
        self._begin(session, answer, lambda: self._answer(session, answer, history), wants_private)
        return answer

    def _checked(self, prompt: str, settings: Settings) -> str:
        """What is left of a prompt without its control characters; raises ConfigError where it cannot be answered."""
        if len(prompt) > 2 * MAX_CHARACTERS:  # nobody's is so long, and all that follows costs time
            raise ConfigError(_too_long(prompt.strip()))
        if self.is_public and settings.max_new_tokens > PUBLIC_NEW_TOKENS:
            rule = f"`max_new_tokens` is at most {PUBLIC_NEW_TOKENS}"
            raise ConfigError(f"Visitors share this app: {rule}, got {settings.max_new_tokens}.")
        text = "".join(c for c in prompt if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs")).strip()
        if not text:
            raise ConfigError("The prompt is empty. Write something first.")
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(_too_long(text))
        if settings.domain not in (None, OTHER, *DOMAINS):
            raise ConfigError(f"The domain must be one of {', '.join((*DOMAINS, OTHER))}, got {settings.domain!r}.")
        return text

    def send(self, session: Session, domain: str, count: int, settings: Settings, *,
             wants_private: bool | None = None) -> Batch:  # fmt: skip
        """Begin to send prompts of a domain one after the other, letting the draft learn in between what is due, as
        long as nobody else asks. Raises ConfigError as [`~Service.ask`] does."""
        if domain not in (self.pair.domains or (NO_DOMAIN,)):
            known = ", ".join(self.pair.domains) or "no domain in particular"
            raise ConfigError(f"There are prompts of {known}, got {domain!r}.")
        batch = Batch(domain, count)
        tokens = min(settings.max_new_tokens, PUBLIC_NEW_TOKENS) if self.is_public else settings.max_new_tokens
        settings = replace(settings, domain=domain, check=False, remember=False, max_new_tokens=tokens)
        self._begin(session, batch, lambda: self._batch(session, batch, settings), wants_private)
        return batch

    def _begin(
        self, session: Session, job: Answer | Batch, work: Callable[[], None], wants_private: bool | None
    ) -> None:
        if session.visitor is None and len(self.turns) >= MAX_WAITING:
            raise ConfigError("Too many visitors are waiting for an answer. Try again in a moment.")
        self.visitors.begin(session, job, wants_private)

        def run() -> None:
            try:
                work()
            except OSDError as error:
                job.error = str(error)
            except Exception as error:
                logger.exception("An answer failed.")
                job.error = f"This failed ({type(error).__name__}). The log of the app says more."
            finally:
                self.visitors.end(session, job)

        threading.Thread(target=run, name="osd_hf-answer", daemon=True).start()

    def _batch(self, session: Session, batch: Batch, settings: Settings) -> None:
        for prompt in self.pair.samples(batch.domain, batch.total):
            if batch.stop.is_set():
                return
            answer = Answer(prompt, settings, batch.domain, stop=batch.stop, room=batch.room)
            for shown in batch.answers[-1:]:
                shown.tokens = []  # only the newest is shown
            batch.answers.append(answer)
            try:
                self._answer(session, answer, [])
            finally:
                answer.is_done = True
            assistant, until = session.room.assistant, time.monotonic() + LEARNING_SECONDS
            batch.is_learning = settings.learn and assistant.is_learning and batch.room in (None, session.room)
            session.touch()
            while batch.is_learning and not batch.stop.is_set() and time.monotonic() < until:
                batch.is_learning = not assistant.wait_until_idle(STOP_SECONDS)
            batch.is_learning = False

    def _answer(self, session: Session, answer: Answer, history: list[tuple[str, str]]) -> None:
        def moved(before: int) -> None:
            answer.waiting = before
            session.touch()

        def is_gone() -> bool:
            if session.is_left:
                answer.stop.set()
            return answer.stop.is_set()

        with self.turns.turn(moved, visitor=session.visitor, is_gone=is_gone) as turn:
            if turn is None or is_gone():
                answer.stopped = True
                return
            room = session.room
            if answer.room is not None and answer.room is not room:  # what was meant for it teaches no other draft
                answer.settings = replace(answer.settings, learn=False)
                session.say(f"{PAIR_LEFT} What you had sent before is answered, and no draft learns from it.")
            answer.is_exact = room.pair.is_exact
            ids = room.pair.encode(answer.prompt, answer.settings.max_new_tokens, history)
            traces: list[Trace] = []

            def pace() -> None:
                turn.give_way()
                is_gone()

            # Nobody learns until all is measured: what served stays, and times are comparable.
            with self.visitors.learning_paused():
                started = time.perf_counter()
                output = self._generated(session, room, ids, answer, pace, traces.append)
                answer.seconds = time.perf_counter() - started - turn.waited_seconds
                answer.stopped = answer.stop.is_set()
                if traces:
                    self._scored(session, room, answer, traces[0])
                    self._compared(room, answer, ids, output, turn)

    def _generated(self, session: Session, room: Room, ids: torch.Tensor, answer: Answer, pace: Callable[[], None],
                   on_trace: Callable[[Trace], None]) -> torch.Tensor:  # fmt: skip
        """What `generate` returns, while the answer grows by each round's tokens."""
        started = time.perf_counter()
        pieces = Pieces(room.pair.tokenizer)

        def take(round_ids: list[int]) -> None:
            is_first = answer.first_token_seconds is None
            if is_first:
                answer.first_token_seconds = time.perf_counter() - started
            shown = len(pieces.texts)
            pieces.push(round_ids)
            kinds = ["accepted"] * (len(round_ids) - 1) + ["target"]
            answer.tokens += [ShownToken(*t) for t in zip(pieces.texts[shown:], kinds, strict=True)]
            session.touch(is_first=is_first)
            pace()

        output: torch.Tensor = room.assistant.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            domain=answer.domain,
            learn=answer.settings.learn,
            num_assistant_tokens=answer.settings.k,
            owner=session.owner,  # what one visitor wrote is proposed to no other
            on_trace=on_trace,
            streamer=Rounds(take),
            stopping_criteria=StoppingCriteriaList([Stop(answer.stop)]),
            **answer.settings.generate_kwargs,
        )
        return output

    def _scored(self, session: Session, room: Room, answer: Answer, trace: Trace) -> None:
        """Tell the tokens' origins, and count both drafts on the answer."""
        tokenizer = room.pair.tokenizer
        with room.assistant.drafts.lease(answer.domain) as serving:  # what drafted: learning is paused
            origins = emitted_tokens(trace, serving.model)
            answer.learning, answer.frozen = (
                replay_each(draft, [trace], K)[0] for draft in (serving.model, room.pair.draft)
            )
        pieces = Pieces(tokenizer)
        pieces.push(token.id for token in origins)
        said = [None if token.drafted_id is None else text_of(tokenizer, [token.drafted_id]) for token in origins]
        answer.tokens = [
            ShownToken(text, _shown_origin(token), instead, token.drafted_prob)
            for text, token, instead in zip(pieces.texts, origins, said, strict=True)
        ]
        answer.stats, answer.version = AcceptanceStats.from_trace(trace), serving.version
        room.add(answer.domain, answer.learning, answer.frozen, answer.version)
        session.count_corrections(
            (instead, text_of(tokenizer, [token.id]))
            for instead, token in zip(said, origins, strict=True)
            if instead is not None
        )
        session.touch()

    def _compared(self, room: Room, answer: Answer, ids: torch.Tensor, output: torch.Tensor, turn: Turn) -> None:
        """Compare time, and unless sampled tokens, with those of the target alone."""
        assert answer.stats is not None
        settings, emitted = answer.settings, answer.stats.emitted
        if settings.check and not answer.stopped:
            seconds, alone = _timed_alone(room.pair, ids, settings.generate_kwargs, answer.stop, turn)
            if alone and not answer.stop.is_set():
                self.alone.append((seconds, len(alone)))
                answer.is_identical = None if settings.do_sample else alone == room.pair.completion(ids, output)
                answer.alone_seconds, answer.is_measured = seconds * emitted / len(alone), True
                return
        total, tokens = (sum(column) for column in zip(*self.alone, strict=True))
        answer.alone_seconds = total / tokens * emitted


def _shown_origin(token: EmittedToken) -> str:
    return "text" if token.origin == "accepted" and token.source == "text" else token.origin


def _timed_alone(pair: ServedPair, ids: torch.Tensor, settings: dict[str, Any], stop: threading.Event | None = None,
                 turn: Turn | None = None) -> tuple[float, list[int]]:  # fmt: skip
    """Seconds and tokens of the target alone, while nobody learns beside it."""
    waited, started = 0.0 if turn is None else turn.waited_seconds, time.perf_counter()
    output = pair.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        stopping_criteria=StoppingCriteriaList([] if stop is None else [Stop(stop)]),
        streamer=None if turn is None else Rounds(lambda _: turn.give_way()),
        **settings,
    )
    seconds = time.perf_counter() - started - (0.0 if turn is None else turn.waited_seconds - waited)
    return seconds, pair.completion(ids, output)


def _too_long(text: str) -> str:
    return f"The prompt has {len(text):,} characters, at most {MAX_CHARACTERS:,} are taken."
