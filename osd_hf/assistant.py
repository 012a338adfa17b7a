"""The assistant that users call: it serves with a draft, captures the target's corrections and learns from them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from osd_hf.capture import guards
from osd_hf.capture.hook import bind
from osd_hf.capture.processors import TriedOut, check_callables
from osd_hf.capture.request import Binding, Lease
from osd_hf.config import OnlineConfig
from osd_hf.drafting.generator import LeanDrafting
from osd_hf.drafting.pacing import DraftingPlan
from osd_hf.errors import LearnerError
from osd_hf.hub.cards import facts_of
from osd_hf.hub.push import push_folder, save_draft
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.learner import Learner
from osd_hf.learning.session import FolderBusyError, load_session, save_session
from osd_hf.learning.tracking import log_update, make_accelerator
from osd_hf.learning.updater import Updater, UpdateReport
from osd_hf.learning.upkeep import Upkeep
from osd_hf.metrics import AcceptanceStats, Tally
from osd_hf.pair import check_pair, common_tokenizer, load_model, uncompiled, unwrap
from osd_hf.routing import RoutedPrompt, Router, as_router
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace
from osd_hf.utils.disk import in_child

__all__ = ["OnlineAssistant"]

logger = logging.getLogger(__name__)

AUTOSAVE_PATIENCE_SECONDS = 5.0  # with another process that saves to the folder: learning waits meanwhile


class OnlineAssistant:
    """
    Serves a target with a draft that learns from every request.

    The draft that serves is a copy: the caller's stays as it was. Answers are the target's own: greedy output token by
    token (in fp32), sampled output in distribution.

    Args:
        target (`PreTrainedModel` or `str` or `Path`):
            The model that answers; a `PeftModel` or a compiled model as well, or where to load one.
        draft (`PreTrainedModel` or `str` or `Path`):
            A smaller model with the target's tokenizer; of a `PeftModel` only the adapter learns.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer of both, saved with the draft. By default the one found where the models came from.
        config (`OnlineConfig`, *optional*):
            How to draft and learn.
        store (`CorrectionStore` or `str` or `Path`, *optional*):
            Where captured traces are logged, beside the learner's own buffer.
        router (`Router` or `Callable[[str], str | None]`, *optional*):
            Gives each domain a draft of its own, and says which domain a prompt belongs to where the request has no
            label: [`LabelRouter`], [`LanguageRouter`], [`TopicRouter`], or any function of the prompt's text. What it
            does not know, and what is of no domain, is served by the base draft, which stays as it was. Without a
            router all requests share one draft, and labels are only counted.
        peft_config (`peft.PeftConfig`, *optional*):
            Learn adapters of this kind, such as `LoraConfig`, and serve them merged; by default whole drafts learn.
        autosave (`str` or `Path`, *optional*):
            Folder that the session is saved to after every `autosave_interval` updates, beside serving, and when the
            assistant is closed; [`~OnlineAssistant.load_state`] goes on from it. A forked child serves and learns by
            itself but leaves the folder to its parent: it saves where [`~OnlineAssistant.save_state`] says.
        report_to (`str` or `list[str]`, *optional*):
            Trackers as the Hugging Face trainers take them: `"trackio"`, `"tensorboard"`, `"wandb"`, `"all"`, ...

    Raises:
        UnsupportedModelError: a model that cannot be assisted, or cannot assist or learn.
        VocabularyMismatchError: vocabularies or tokenizers differ.
        ConfigError: a tracker that is not installed.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        tokenizer: Any = None,
        config: OnlineConfig | None = None,
        *,
        store: CorrectionStore | str | os.PathLike[str] | None = None,
        router: Router | Callable[[str], str | None] | None = None,
        peft_config: Any = None,
        autosave: str | os.PathLike[str] | None = None,
        report_to: str | Sequence[str] | None = None,
    ) -> None:
        self.config = config or OnlineConfig()
        named = (str, os.PathLike)
        self.target = load_model(os.fspath(target)) if isinstance(target, named) else target
        source = load_model(os.fspath(draft)) if isinstance(draft, named) else uncompiled(draft)
        check_pair(unwrap(self.target), unwrap(source))
        self.tokenizer = common_tokenizer(tokenizer, unwrap(self.target), unwrap(source))
        self.router = as_router(router)
        per_domain = self.router is not None
        self._drafts = DomainDrafts(source, self.config, peft_config=peft_config, per_domain=per_domain)
        self.store = store if store is None or isinstance(store, CorrectionStore) else CorrectionStore(store)
        self._accelerator = make_accelerator(report_to, self.config)
        self._learner = Learner(self._drafts, self.config, self._accelerator)
        self._tally = Tally()
        # Held while a request is counted and taken in, and while both are read to be saved.
        self._taking_in = threading.Lock()
        self._is_closed = False
        self._autosave = None if autosave is None else Path(autosave)
        # Threads hold no reference to the assistant: one that nobody uses any more takes them along.
        self._upkeep = Upkeep(self._learner, self._track, None if autosave is None else self._save_beside)
        weakref.finalize(self, self._upkeep.stop)
        in_child(self, OnlineAssistant._begin_in_child)

    def _begin_in_child(self) -> None:
        self._taking_in = threading.Lock()
        self._autosave = None  # the folder stays with the parent

    # --- serving ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Any = None,
        *,
        domain: str | None = None,
        learn: bool = True,
        num_assistant_tokens: int | str | None = None,
        on_trace: Callable[[Trace], object] | None = None,
        **generate_kwargs: Any,
    ) -> Any:
        """
        What `target.generate` returns for these arguments, sooner.

        Args:
            inputs (`torch.Tensor` of shape `(1, prompt)`, int64, *optional*):
                Prompt ids; or pass `input_ids` and `attention_mask` as the tokenizer returns them.
            domain (`str`, *optional*):
                Label under which the request is counted and logged.
            learn (`bool`, *optional*, defaults to `True`):
                With `False` nothing of the request is kept or learned from; its acceptance is still counted.
            num_assistant_tokens (`int` or `"auto"`, *optional*):
                Of this request, in place of the configuration's; needs lean drafting.
            on_trace (`Callable[[Trace], object]`, *optional*):
                Called with the request's trace once the answer is there, also with `learn=False`; not called where
                nothing could be captured, such as a prompt of embeddings.
            generate_kwargs (`Any`):
                As of `target.generate`.

        Raises:
            UnsupportedGenerationError: what cannot be kept lossless; before any work is done.
            ConfigError: `num_assistant_tokens` cannot be had.
            LearnerError: once, before any work is done, if learning had failed after an earlier answer.
        """
        guards.check_drafted_by_us(generate_kwargs)
        guards.check_k(self.config, num_assistant_tokens)
        guards.check_inputs(inputs, generate_kwargs)
        guards.check_generation(
            generate_kwargs,
            generate_kwargs.get("generation_config"),
            unwrap(self.target).generation_config,
            assistant_tokenizer=generate_kwargs.get("assistant_tokenizer"),
        )
        tried: list[TriedOut] = []
        prompt = inputs if inputs is not None else generate_kwargs.get("input_ids")
        if prompt is not None and not prompt.is_floating_point():
            tried = check_callables(unwrap(self.target), prompt, generate_kwargs)
        if self.tokenizer is not None and generate_kwargs.get("stop_strings") is not None:
            generate_kwargs.setdefault("tokenizer", self.tokenizer)
        self._upkeep.raise_failure()
        seen: list[Trace] | None = None if on_trace is None else []
        bound = self._bound(
            domain=domain, learn=learn, k=num_assistant_tokens, exact_stops=True, tried=tried, seen=seen
        )
        with self._upkeep.traffic.request(), bound:
            output = self.target.generate(inputs, assistant_model=self._drafts.base, **generate_kwargs)
        if on_trace is not None:
            for trace in seen or ():
                on_trace(trace)
        return output

    @contextlib.contextmanager
    def attached(self, *, domain: str | None = None, learn: bool = True) -> Iterator[OnlineAssistant]:
        """
        Inside the `with` block, any assisted `generate` on the target is captured and learned from: the caller's own
        call, a pipeline, an evaluation harness. Pass `assistant_model=assistant.draft`. Stopping criteria other than
        EOS and length are looked at once a round there, as transformers does. Only requests of this context (thread or
        task) are seen; start other threads with `contextvars.copy_context().run`.

        Args:
            domain (`str`, *optional*), learn (`bool`, *optional*, defaults to `True`):
                As of [`~OnlineAssistant.generate`].
        """
        with self._bound(domain=domain, learn=learn, exact_stops=False):
            yield self

    def _bound(
        self,
        *,
        domain: str | None,
        learn: bool,
        exact_stops: bool,
        k: int | str | None = None,
        tried: Sequence[TriedOut] = (),
        seen: list[Trace] | None = None,
    ) -> contextlib.AbstractContextManager[Binding]:
        binding = Binding(
            functools.partial(self._observe, learn=learn, seen=seen),
            owner=self,
            num_logprobs=self.config.num_logprobs if learn or seen is not None else 0,
            serving=functools.partial(self._request, domain, learn),
            exact_stops=exact_stops,
            num_assistant_tokens=k,
            tried=tried,
        )
        return bind(self.target, binding)

    @contextlib.contextmanager
    def _request(self, domain: str | None, learn: bool, assistant_model: Any, prompt: Any) -> Iterator[Lease]:
        with self._upkeep.serving():
            if domain is None and self.router is not None and prompt is not None:
                domain = self._routed(RoutedPrompt(prompt, self.tokenizer, learn=learn))
            with self._drafts.lease(domain) as draft:
                is_ours = self._drafts.owns(assistant_model)  # another one serves, and ours learns
                model, drafting = (draft.model, draft.drafting) if is_ours else (None, None)
                yield Lease(draft.version if is_ours else 0, domain, model, drafting)

    def _routed(self, prompt: RoutedPrompt) -> str | None:
        """The router's choice; a router that fails costs no answer."""
        assert self.router is not None
        try:
            return self.router.route(prompt)
        except Exception as error:
            logger.exception("The router failed; the base draft serves, the error is raised by the next call.")
            self._upkeep.failed(error)
            return None

    def _observe(self, trace: Trace, *, learn: bool, seen: list[Trace] | None) -> None:
        if seen is not None:
            seen.append(trace)
        if self._is_closed:  # a request that outlives it is answered, and that is all
            return
        try:
            try:
                if learn and self.store is not None:
                    self.store.append(trace)
            finally:  # a log that is full does not end learning
                with self._taking_in:
                    self._tally.add(trace.domain, AcceptanceStats.from_trace(trace))
                    if learn:
                        self._learner.observe(trace.domain, trace)
                if learn:
                    self._upkeep.served()
        except Exception as error:
            logger.exception("Learning failed; the answer is delivered, the error is raised by the next call.")
            self._upkeep.failed(error)

    # --- learning ---------------------------------------------------------------------------------------------------

    def update(self, steps: int | None = None, *, domain: str | None = None) -> UpdateReport:
        """
        Learn now from what has been captured since the last update, and serve the outcome from the next request on.

        Args:
            steps (`int`, *optional*):
                Optimizer steps, `config.steps_per_update` by default.
            domain (`str`, *optional*):
                Whose draft, with drafts per domain; by default the one with the most new requests.

        Raises:
            LearnerError: called in the middle of a request of this thread; or no draft has anything to learn from.
        """
        self._upkeep.check_outside()
        with self._upkeep.alone():
            key = self._learner.fullest() if domain is None else self._drafts.key(domain)
            if self.router is not None and key is None:
                raise LearnerError("No domain has a draft that could learn yet. Serve requests of one first.")
            return self._upkeep.update(key, steps)

    def pause(self) -> None:
        """Begin no update, and take no further step of one under way, until [`~OnlineAssistant.resume`]; requests are
        still captured."""
        self._upkeep.pause()

    def resume(self) -> None:
        """Learn again; what has come to be due meanwhile is done at the next occasion."""
        self._upkeep.resume()

    @property
    def is_learning(self) -> bool:
        """Whether an update is under way or due."""
        return self._learner.has_work()

    @property
    def learning_seconds(self) -> float:
        """Time spent on learning so far, the update under way included."""
        return self._learner.seconds

    def wait_until_idle(self, timeout: float | None = None) -> bool:
        """Wait, with the strategy `"idle"`, until all that is due has been learned, at most `timeout` seconds; gives
        whether it has."""
        return self._upkeep.wait_until_idle(timeout)

    def _track(self, report: UpdateReport) -> None:
        log_update(self._accelerator, report, *self._tally.take_recent())

    # --- what can be read -------------------------------------------------------------------------------------------

    @property
    def draft(self) -> Any:
        """The draft that serves (with drafts per domain: the base draft), an ordinary transformers model. Its weights
        change between requests; where requests overlap, a new version may be another model: ask again."""
        return self.serving_draft()

    def serving_draft(self, domain: str | None = None) -> Any:
        """The draft that a request of this domain is served with now, an ordinary transformers model."""
        return self._drafts.model(domain)

    @property
    def drafts(self) -> DomainDrafts:
        """All drafts: versions, adapters, what is held ready."""
        return self._drafts

    @property
    def decisions(self) -> tuple[GateDecision, ...]:
        """What became of each version that was learned, and why, oldest first."""
        return tuple(self._learner.decisions)

    @property
    def drafting(self) -> LeanDrafting | None:
        """What makes the candidates of [`~OnlineAssistant.draft`], with its clock and its pace; `None` where
        transformers' generator does."""
        with self._drafts.lease() as draft:
            return draft.drafting

    def drafting_plan(self, domain: str | None = None, *, do_sample: bool = False) -> DraftingPlan | None:
        """
        With `num_assistant_tokens="auto"`: how many tokens are drafted for requests of a domain, and the measured
        acceptance and costs that this is decided from; `None` otherwise.
        """
        if self.config.drafting != "lean" or self.config.num_assistant_tokens != "auto":
            return None
        return self._drafts.pacer.plan((domain, do_sample))

    @property
    def version(self) -> int:
        """Version of the draft that serves, 0 before the first update; with drafts per domain, the newest of them."""
        return max(self._drafts.serving_version(domain) for domain in (None, *self._drafts.domains))

    @property
    def _updater(self) -> Updater:
        return self._learner.updater(None)

    @property
    def stats(self) -> AcceptanceStats:
        """Acceptance over all requests since the last reset."""
        return self._tally.total()

    @property
    def stats_by_domain(self) -> dict[str | None, AcceptanceStats]:
        """Acceptance by the label of the request."""
        return self._tally.by_domain()

    def reset_stats(self) -> None:
        """Count from zero again; nothing learned is lost."""
        self._tally.reset()

    # --- keeping ----------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | os.PathLike[str], *, domain: str | None = None) -> None:
        """
        Save a draft as an ordinary model folder with its tokenizer, adapters merged; nothing of any request is in it.

        Args:
            save_directory (`str` or `Path`):
                Made where it is missing.
            domain (`str`, *optional*):
                Whose draft, with drafts per domain; `None` is the base or the shared draft. An adapter alone is saved
                by `assistant.drafts.adapter(domain).save_pretrained(...)`, all of them by
                `assistant.drafts.save_pretrained(...)`.
        """
        with self._drafts.lease(domain) as draft:  # one version from the first file to the last
            draft.model.save_pretrained(save_directory)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(save_directory)

    def push_to_hub(self, repo_id: str, *, domain: str | None = None, **kwargs: Any) -> str:
        """Push a draft, adapters merged, with the tokenizer and a model card without figures. Takes the arguments of
        `osd_hf.hub.push.push_folder`; a new repo is private unless `private=False`. `osd-hf push` measures a draft for
        its card."""
        training = {"requests served": self.stats.num_requests, "version": self._drafts.serving_version(domain)}
        facts = facts_of(self.target, self._drafts.base, () if domain is None else (domain,), training)
        with tempfile.TemporaryDirectory() as folder, self._drafts.lease(domain) as draft:
            save_draft(folder, draft.model, self.tokenizer, repo_id=repo_id, facts=facts)
            return push_folder(folder, repo_id, kept="The assistant has it still.", **kwargs)

    def save_state(self, directory: str | os.PathLike[str]) -> None:
        """
        Save the session, so that [`~OnlineAssistant.load_state`] goes on: learned weights, optimizer, replay buffers,
        versions, decisions, router and counts. Atomic: a reader sees the old state or the new one. Requests go on
        meanwhile; learning waits. It holds requests' tokens; [`~OnlineAssistant.save_pretrained`] is for others.

        Raises:
            StateError: the folder cannot be written.
        """
        self._save_to(Path(directory))

    def _save_to(self, directory: Path, patience_seconds: float | None = None) -> None:
        with self._upkeep.alone():
            with self._taking_in:  # requests go on: each is in both or in neither
                counts, lessons = self._tally.state(), self._learner.lesson_states()
            facts = {
                **counts,
                "config": self.config.to_dict(),
                "decisions": [decision.to_dict() for decision in self._learner.decisions],
            }
            router = None if self.router is None else self.router.state_dict()
            save_session(directory, self._learner, facts, router, lessons=lessons, patience_seconds=patience_seconds)

    def _save_beside(self) -> None:
        assert self._autosave is not None
        try:
            self._save_to(self._autosave, AUTOSAVE_PATIENCE_SECONDS)
        except FolderBusyError as error:
            logger.warning("%s Nothing is lost: the next autosave tries again.", error)

    def load_state(self, directory: str | os.PathLike[str]) -> None:
        """
        Go on with a saved session.

        Raises:
            StateError: nothing readable there, or the session of another draft; the assistant is as before.
        """
        with self._upkeep.alone():
            facts, _ = load_session(Path(directory), self._learner, self.router)
            self._learner.decisions.clear()
            self._learner.decisions.extend(GateDecision(**decision) for decision in facts["decisions"])
            self._tally.load(facts)

    def close(self) -> None:
        """End the idle thread, save the session where it is saved by itself, flush the store, end tracking; raises
        LearnerError if learning had failed unnoticed. Requests are answered all the same, but neither counted nor
        learned from any more."""
        self._is_closed = True
        self._upkeep.stop()
        try:
            if self._autosave is not None:
                self.save_state(self._autosave)
        finally:
            if self.store is not None:
                self.store.flush()
            self._accelerator.end_training()
        self._upkeep.raise_failure()

    def __enter__(self) -> OnlineAssistant:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
