"""The assistant that users call: it serves with a draft, captures the target's corrections and learns from them."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from osd_hf.capture import Binding
from osd_hf.config import OnlineConfig
from osd_hf.drafting import LeanDrafting
from osd_hf.errors import LearnerError, UnsupportedGenerationError
from osd_hf.guards import (
    check_criteria,
    check_generation,
    check_inputs,
    check_pair,
    check_processors,
    common_tokenizer,
)
from osd_hf.hook import bind
from osd_hf.loading import load_model
from osd_hf.metrics import AcceptanceStats
from osd_hf.pacing import DraftingPlan
from osd_hf.promotion import Promotion
from osd_hf.records import Trace
from osd_hf.schedule import UpdateSchedule
from osd_hf.session import load_session, save_session
from osd_hf.store import CorrectionStore
from osd_hf.tracking import make_accelerator
from osd_hf.updater import Updater, UpdateReport, learning_context
from osd_hf.wrappers import merged, uncompiled, unwrap

__all__ = ["OnlineAssistant"]

logger = logging.getLogger(__name__)

FALLBACK_K = 5  # with "auto", where the draft is used without it


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
        report_to: str | Sequence[str] | None = None,
    ) -> None:
        self.config = config or OnlineConfig()
        named = (str, os.PathLike)
        self.target = load_model(os.fspath(target)) if isinstance(target, named) else target
        source = load_model(os.fspath(draft)) if isinstance(draft, named) else uncompiled(draft)
        check_pair(unwrap(self.target), unwrap(source))
        self.tokenizer = common_tokenizer(tokenizer, unwrap(self.target), unwrap(source))
        with learning_context():
            served = merged(source)
            self._draft = (copy.deepcopy(source) if served is source else served).eval()
        if self.config.num_assistant_tokens is not None:
            generation_config = self._draft.generation_config
            is_auto = self.config.num_assistant_tokens == "auto"
            generation_config.num_assistant_tokens = FALLBACK_K if is_auto else self.config.num_assistant_tokens
            generation_config.num_assistant_tokens_schedule = "constant"
            generation_config.assistant_confidence_threshold = 0.0
        self.store = store if store is None or isinstance(store, CorrectionStore) else CorrectionStore(store)
        self._accelerator = make_accelerator(report_to, self.config)
        self._updater = Updater(source, self.config, self._accelerator)
        self._drafting: LeanDrafting | None = None
        if self.config.drafting == "lean":
            k, compiled = self.config.num_assistant_tokens, self.config.compile_draft
            self._drafting = LeanDrafting(self._draft, k, compile_draft=compiled)
        self._schedule = UpdateSchedule(self.config)
        self._stats: dict[str | None, AcceptanceStats] = {}
        self._since_update = AcceptanceStats()
        self._requests = 0
        self._version = 0
        self._failure: Exception | None = None
        self._counting = threading.Lock()
        self._learning = threading.Lock()
        self._serving = Promotion()

    # --- serving ----------------------------------------------------------------------------------------------------

    def generate(
        self, inputs: Any = None, *, domain: str | None = None, learn: bool = True, **generate_kwargs: Any
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
            generate_kwargs (`Any`):
                As of `target.generate`.

        Raises:
            UnsupportedGenerationError: what cannot be kept lossless; before any work is done.
            LearnerError: once, before any work is done, if learning had failed after an earlier answer.
        """
        if generate_kwargs.pop("assistant_model", None) is not None:
            raise UnsupportedGenerationError(
                "`assistant_model` was given, but the assistant brings its own draft. Leave it out, or call "
                "`target.generate` inside `with assistant.attached():`."
            )
        if generate_kwargs.get("custom_generate") is not None:
            raise UnsupportedGenerationError(
                "`custom_generate` replaces assisted decoding, so no draft is used. Leave it out."
            )
        check_inputs(inputs, generate_kwargs)
        check_generation(
            generate_kwargs,
            generate_kwargs.get("generation_config"),
            unwrap(self.target).generation_config,
            assistant_tokenizer=generate_kwargs.get("assistant_tokenizer"),
        )
        prompt = inputs if inputs is not None else generate_kwargs.get("input_ids")
        if prompt is not None and not prompt.is_floating_point():
            vocab_size = unwrap(self.target).config.get_text_config().vocab_size
            check_processors(generate_kwargs.get("logits_processor"), prompt, vocab_size)
            check_criteria(generate_kwargs.get("stopping_criteria"), prompt)
        if self.tokenizer is not None and generate_kwargs.get("stop_strings") is not None:
            generate_kwargs.setdefault("tokenizer", self.tokenizer)
        self._raise_failure()
        with self._bound(domain=domain, learn=learn, exact_stops=True):
            return self.target.generate(inputs, assistant_model=self._draft, **generate_kwargs)

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
        self, *, domain: str | None, learn: bool, exact_stops: bool
    ) -> contextlib.AbstractContextManager[Binding]:
        binding = Binding(
            functools.partial(self._observe, learn=learn),
            owner=self,
            num_logprobs=self.config.num_logprobs if learn else 0,
            domain=domain,
            serving=self._request,
            exact_stops=exact_stops,
            drafting=self._drafting,
        )
        return bind(self.target, binding)

    @contextlib.contextmanager
    def _request(self) -> Iterator[int]:
        self._raise_failure()
        with self._serving.request():
            yield self._version

    def _observe(self, trace: Trace, *, learn: bool) -> None:
        stats = AcceptanceStats.from_trace(trace)
        with self._counting:
            self._requests += 1
            self._stats[trace.domain] = self._stats.get(trace.domain, AcceptanceStats()) + stats
            self._since_update = self._since_update + stats
        if not learn:
            return
        try:
            if self.store is not None:
                self.store.append(trace)
            with self._counting:
                self._updater.observe(trace)
                due = self._schedule.request_ended()
            # While another thread learns, this one's answer does not wait for it; the update stays due.
            if due and self._learning.acquire(blocking=False):
                try:
                    self._update(None)
                finally:
                    self._learning.release()
        except Exception as error:
            logger.exception("Learning failed; the answer is delivered, the error is raised by the next call.")
            self._failure = error
            self._schedule.updated()  # try again after another interval, not at every request

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise LearnerError(
                f"Learning failed after an earlier answer ({failure!r}); that answer was delivered, and serving goes "
                "on with draft version "
                f"{self._version}. Call again to be served; mend the cause to learn on."
            ) from failure

    # --- learning ---------------------------------------------------------------------------------------------------

    def update(self, steps: int | None = None) -> UpdateReport:
        """
        Learn now from what has been captured since the last update, and serve the outcome from the next request on.

        Args:
            steps (`int`, *optional*):
                Optimizer steps, `config.steps_per_update` by default.
        """
        with self._learning:
            return self._update(steps)

    def _update(self, steps: int | None) -> UpdateReport:
        report = self._updater.update(steps)
        self._schedule.updated()
        if report.version != self._version:
            with self._serving.promotion():
                self._promote(report.version)
        self._track(report)
        return report

    def _promote(self, version: int) -> None:
        self._updater.copy_to(self._draft)
        self._version = version
        if self._drafting is not None:
            self._drafting.pacer.draft_changed()

    def _track(self, report: UpdateReport) -> None:
        with self._counting:
            recent, self._since_update = self._since_update, AcceptanceStats()
            requests = self._requests
        values: dict[str, Any] = {
            "version": report.version,
            "dropped_steps": report.dropped_steps,
            "update_seconds": report.seconds,
        }
        if report.loss is not None:
            values["loss"] = report.loss
        if recent.examined:
            values |= {"alpha": recent.alpha, "block_efficiency": recent.block_efficiency}
        logger.info("Draft version %d after %d requests: %s", report.version, requests, values)
        self._accelerator.log(values, step=requests)

    # --- what can be read -------------------------------------------------------------------------------------------

    @property
    def draft(self) -> Any:
        """The draft that serves, an ordinary transformers model; its weights change between requests."""
        return self._draft

    def serving_draft(self, domain: str | None = None) -> Any:
        """The draft that a request of this domain is served with."""
        return self._draft

    @property
    def drafting(self) -> LeanDrafting | None:
        """What makes the candidates, with its clock and its pace; `None` where transformers' generator does."""
        return self._drafting

    def drafting_plan(self, domain: str | None = None, *, do_sample: bool = False) -> DraftingPlan | None:
        """
        With `num_assistant_tokens="auto"`: how many tokens are drafted for requests of a domain, and the measured
        acceptance and costs that this is decided from; `None` otherwise.
        """
        if self._drafting is None or self.config.num_assistant_tokens != "auto":
            return None
        return self._drafting.pacer.plan((domain, do_sample))

    @property
    def version(self) -> int:
        """Version of the serving draft; 0 before the first update."""
        return self._version

    @property
    def stats(self) -> AcceptanceStats:
        """Acceptance over all requests since the last reset."""
        with self._counting:
            return sum(self._stats.values(), AcceptanceStats())

    @property
    def stats_by_domain(self) -> dict[str | None, AcceptanceStats]:
        """Acceptance by the label of the request."""
        with self._counting:
            return dict(self._stats)

    def reset_stats(self) -> None:
        """Count from zero again; nothing learned is lost."""
        with self._counting:
            self._stats.clear()
            self._since_update = AcceptanceStats()

    # --- keeping ----------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Save the draft as an ordinary model folder with its tokenizer; nothing of any request is in it."""
        with self._published() as draft:
            draft.save_pretrained(save_directory)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(save_directory)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Push draft and tokenizer as an ordinary model repo; arguments as of `PreTrainedModel.push_to_hub`."""
        with self._published() as draft:
            commit = draft.push_to_hub(repo_id, **kwargs)
        if self.tokenizer is not None:
            self.tokenizer.push_to_hub(repo_id, **kwargs)
        return commit

    @contextlib.contextmanager
    def _published(self) -> Iterator[Any]:
        with self._serving.request():  # one version from the first file to the last
            yield self._draft

    def save_state(self, directory: str | os.PathLike[str]) -> None:
        """
        Save the session, so that [`~OnlineAssistant.load_state`] goes on where it stood: learned weights, optimizer,
        replay buffer, versions and counts. Atomic: a reader sees the old state or the new one. It holds requests'
        tokens; what is meant for others is saved by [`~OnlineAssistant.save_pretrained`].
        """
        with self._learning, self._counting:
            save_session(
                Path(directory),
                self._updater,
                {
                    "version": self._version,
                    "requests": self._requests,
                    "requests_waiting": self._schedule.requests_waiting,
                    "stats": [[domain, stats.to_dict()] for domain, stats in self._stats.items()],
                    "config": self.config.to_dict(),
                },
            )

    def load_state(self, directory: str | os.PathLike[str]) -> None:
        """
        Go on with a saved session.

        Raises:
            StateError: nothing readable there, or the session of another draft; the assistant is as before.
        """
        with self._learning, self._serving.promotion(), self._counting:
            session = load_session(Path(directory), self._updater)
            self._promote(int(session["version"]))
            self._requests = int(session["requests"])
            self._schedule.requests_waiting = int(session["requests_waiting"])
            self._stats = {domain: AcceptanceStats.from_dict(stats) for domain, stats in session["stats"]}
            self._since_update = AcceptanceStats()

    def close(self) -> None:
        """Flush the store, end tracking; raises LearnerError if learning had failed unnoticed."""
        if self.store is not None:
            self.store.flush()
        self._accelerator.end_training()
        self._raise_failure()

    def __enter__(self) -> OnlineAssistant:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
