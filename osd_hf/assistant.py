"""Provide `OnlineAssistant`: it serves a target with a draft that learns from the target's corrections."""

from __future__ import annotations

import contextlib
import copy
import functools
import html
import io
import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from osd_hf.acceptance import AcceptanceStats
from osd_hf.config import OnlineConfig
from osd_hf.decoding import checks
from osd_hf.decoding.draft_length import DraftingPlan
from osd_hf.decoding.hook import bind, warn_unused
from osd_hf.decoding.sources import Drafting
from osd_hf.decoding.static import static_target
from osd_hf.draft_head import DraftHead
from osd_hf.errors import ConfigError, LearnerError
from osd_hf.hub import facts_of, push_folder, save_draft
from osd_hf.layers import own_head
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.updater import UpdateReport, make_accelerator
from osd_hf.learning.weights import shared_ends
from osd_hf.live_learning import LiveLearning
from osd_hf.loading import load_named
from osd_hf.memory_plan import MemoryPlan, memory_plan
from osd_hf.models import (
    align_vocab,
    check_learner,
    check_pair,
    common_tokenizer,
    input_device,
    is_peft,
    uncompiled,
    unwrap,
    vocab_size_of,
)
from osd_hf.prompts import RowError, render_chat
from osd_hf.router import Router, as_router
from osd_hf.store.store import CorrectionStore
from osd_hf.target_version import warn_of_target, write_target
from osd_hf.trace import Trace
from osd_hf.utils.context import neutral_context
from osd_hf.utils.kernels import unpack

logger = logging.getLogger(__name__)

CHAT_TOKENS = 256  # default length of an answer to a chat, as in transformers' pipelines
LENGTHS = ("max_new_tokens", "max_length")


class OnlineAssistant:
    """
    Serve a target with a draft that learns from every request.

    Answers are those of the target: greedy output token by token (in fp32), sampled output in distribution. The draft
    is copied; the caller's is not changed.

    ```python
    assistant = OnlineAssistant("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", device_map="auto")
    print(assistant.chat("Why is the sky blue?"))
    ```

    Args:
        target (`PreTrainedModel` or `str` or `Path`):
            The model that answers: a model, a `PeftModel`, a compiled model, a Hub id or a folder.
        draft (`PreTrainedModel` or `str` or `Path`, *optional*):
            A smaller model, or a [`DraftHead`], which reads the target's hidden states; EAGLE-3 checkpoints are
            read by Hub id or from a folder. By default the target's built-in layers for multi-token prediction,
            or a new head, made of its first layer with attention; both learn from the requests and draft once that
            pays. Of a `PeftModel`, only the adapter learns. Of a draft made by
            [`make_draft`], embeddings and output head are shared with the target and do not learn. [`align_vocab`]
            aligns padded vocabularies.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer of both, saved with the draft; by default loaded from where the models came from.
        config (`OnlineConfig`, *optional*): How to draft and learn.
        store (`CorrectionStore` or `str` or `Path`, *optional*): Logs the captured traces.
        router (`Router` or `Callable[[str], str | None]`, *optional*):
            Gives each domain its own draft, and selects the domain of prompts without a label. A function gets the
            prompt's text. Without a router, all requests share one draft.
        peft_config (`peft.PeftConfig`, *optional*):
            Learn adapters of this kind, such as `LoraConfig`, and serve them merged. By default full copies learn.
        autosave (`str` or `Path`, *optional*):
            Folder for the session, saved after every 8 updates and in `close`; see [`~OnlineAssistant.load_state`].
        report_to (`str` or `list[str]`, *optional*):
            Trackers, as for Hugging Face trainers: `"trackio"`, `"tensorboard"`, `"wandb"`, `"all"`, ...
        on_update (`Callable[[GateDecision], object]`, *optional*):
            Called once for each gate decision, in order, from the thread that learned.
        model_kwargs (`Any`):
            Arguments of `from_pretrained` for models that are given by id or folder. `device_map`, `max_memory` and
            `quantization_config` are for the target alone. `device` is by default a CUDA device if there is one.

    Raises:
        UnsupportedModelError: A model that cannot be loaded, assisted, or trained.
        VocabularyMismatchError: Different tokenizers, or sizes of the vocabulary that padding does not explain.
        ConfigError: A missing tracker or `learner_device`, or an invalid argument.
    """

    def __init__(
        self,
        target: Any,
        draft: Any = None,
        tokenizer: Any = None,
        config: OnlineConfig | None = None,
        *,
        store: CorrectionStore | str | os.PathLike[str] | None = None,
        router: Router | Callable[[str], str | None] | None = None,
        peft_config: Any = None,
        autosave: str | os.PathLike[str] | None = None,
        report_to: str | Sequence[str] | None = None,
        on_update: Callable[[GateDecision], object] | None = None,
        **model_kwargs: Any,
    ) -> None:
        self.target, source = load_named(target, draft, **model_kwargs)
        source = own_head(self.target) if source is None else uncompiled(source)
        check_pair(self.target, source)
        if isinstance(unwrap(source), DraftHead):
            unwrap(source).bind(unwrap(self.target))
        check_learner(unwrap(source))
        self.tokenizer = common_tokenizer(tokenizer, unwrap(self.target), unwrap(source))
        source = align_vocab(source, unwrap(self.target), tokenizer)
        self.router = as_router(router)
        per_domain = self.router is not None
        has_adapter = is_peft(source) and not per_domain
        self._peft_config = peft_config or (source.active_peft_config if has_adapter else None)
        given: dict[str, Any] = {"shared": shared_ends(source, self.target), "tokenizer": self.tokenizer}
        self.drafts = DomainDrafts(source, config, peft_config=peft_config, per_domain=per_domain, **given)
        self.config = self.drafts.config
        self.store = store if store is None or isinstance(store, CorrectionStore) else CorrectionStore(store)
        layers = source.config.state_layers if isinstance(source, DraftHead) else ()
        self.static_target = static_target(unwrap(self.target), self.config, state_layers=layers)
        # Threads must not keep the assistant alive, nor may `on_update`, which may refer to it: it is held here alone.
        self._on_update = None if on_update is None else functools.partial(on_update)
        self._live = LiveLearning(
            unwrap(self.target),
            self.drafts,
            self.router,
            self.tokenizer,
            None if autosave is None else Path(autosave),
            self.static_target,
            make_accelerator(report_to, self.config),
            self._on_update,
        )
        if not isinstance(draft, str | os.PathLike | None):  # requests that name it are served by the newest version
            self.drafts.models.update({draft, unwrap(draft)})
        for name in self.config.unused:
            logger.warning("`%s` has no effect with this `num_assistant_tokens` and these `candidates`.", name)
        size, target_size = (unwrap(model).num_parameters() for model in (source, self.target))
        if size > target_size:
            logger.warning("The draft has %d parameters, the target only %d. Are they swapped?", size, target_size)
        self._learner = self._live.learner
        weakref.finalize(self, self._live.stop)
        warn_of_target(source, self.target)

    # --- serving ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Any = None,
        *,
        domain: str | None = None,
        learn: bool = True,
        num_assistant_tokens: int | str | None = None,
        owner: str | None = None,
        on_trace: Callable[[Trace], object] | None = None,
        **generate_kwargs: Any,
    ) -> Any:
        """
        Return what `target.generate` returns for these arguments, faster.

        Args:
            inputs (`torch.Tensor` or `Mapping[str, torch.Tensor]`, *optional*):
                Token ids, int64, of shape `(prompts, tokens)`, padded on the left for a decoder-only target; or the
                output of a tokenizer or processor. Tensors are moved to the target's device. With `inputs_embeds`,
                `encoder_outputs`, or a soft prompt, the target answers without a draft.
            domain (`str`, *optional*): Label under which the request is counted and logged.
            learn (`bool`, *optional*, defaults to `True`):
                With `False`, nothing of the request is stored or learned from. Its acceptance is counted.
            num_assistant_tokens (`int` or `"auto"`, *optional*):
                Tokens drafted per round for this request. With 0 the target answers without a draft, and samples as
                `target.generate` does from the same seed.
            owner (`str`, *optional*):
                Owner of the request. Earlier text of an owner is never used for requests of others. All requests
                without an owner share one.
            on_trace (`Callable[[Trace], object]`, *optional*):
                Called with the trace of each prompt after the answer, also with `learn=False`. Errors are logged.
            generate_kwargs (`Any`): Arguments of `target.generate`.

        Raises:
            UnsupportedGenerationError: The request cannot be served losslessly.
            ConfigError: An invalid `num_assistant_tokens`.
        """
        target = unwrap(self.target)
        if isinstance(inputs, Mapping):  # what a tokenizer or processor returns
            inputs, generate_kwargs = None, {**inputs, **generate_kwargs}
        checks.check_request(target, self.config, inputs, generate_kwargs, num_assistant_tokens)
        device = input_device(target)
        inputs, *moved = (
            value.to(device) if isinstance(value, torch.Tensor) else value
            for value in (inputs, *generate_kwargs.values())
        )
        generate_kwargs = dict(zip(generate_kwargs, moved, strict=True))
        config = generate_kwargs.get("generation_config")
        generate_kwargs |= checks.needed_tokenizer(self.tokenizer, generate_kwargs, config, target.generation_config)
        prompt = () if inputs is None else (inputs,)  # some models have another name for it
        if why := checks.answered_alone(self.target, generate_kwargs):
            checks.log_once(target, f"The target answers without a draft: {why}.")
        else:
            generate_kwargs["assistant_model"] = self.drafts.base
        seen: list[Trace] | None = None if on_trace is None else []
        binding = self._live.binding(
            domain, learn, self.store, owner=owner, is_begun=True, k=num_assistant_tokens, seen=seen
        )
        with self._live.traffic.request(), bind(self.target, binding):
            try:
                output = self.target.generate(*prompt, **generate_kwargs)
            except BaseException:
                checks.drop_adapter_hooks(target)
                raise
        self._live.take_in_finished()
        if on_trace is not None:
            if not seen:
                checks.log_once(
                    target, "`on_trace` is not called for a prompt that does not consist of token ids alone."
                )
            for trace in seen or ():
                try:
                    on_trace(trace)
                except Exception:
                    logger.exception("`on_trace` failed; the answer is delivered.")
        return output

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool | None = None,
        **generate_kwargs: Any,
    ) -> str:
        """
        Return the text of the target's answer to a chat, without special tokens.

        Args:
            messages (`str` or `Sequence[Mapping[str, Any]]`):
                Messages with `role` and `content`, or the text of one user.
            chat_template_kwargs (`Mapping[str, Any]`, *optional*):
                Arguments of `tokenizer.apply_chat_template`, such as `tools` or `enable_thinking`.
            continue_final_message (`bool`, *optional*):
                Continue the last message. By default, a last message of the assistant is continued. Only the new text
                is returned.
            generate_kwargs (`Any`):
                As for [`~OnlineAssistant.generate`]. Without a length here or in the target's generation config, an
                answer has at most 256 new tokens.

        Raises:
            ConfigError: No tokenizer, no chat template, or invalid `chat_template_kwargs`.
            UnsupportedGenerationError: As in [`~OnlineAssistant.generate`].
        """
        tokenizer = self.tokenizer
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            missing = "No tokenizer was found" if tokenizer is None else "The tokenizer has no chat template"
            raise ConfigError(
                f"{missing}, so messages cannot be put into a prompt. Pass `tokenizer=`, one of an instruction-tuned "
                "model, set `tokenizer.chat_template`, or call `generate` with token ids."
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if any(m.get("content") is None for m in messages if m.get("role") in ("system", "user")):
            raise ConfigError(f"Messages of the system and of users need `content`, got {messages}.")
        if continue_final_message is None:
            last = messages[-1] if messages else {}
            continue_final_message = last.get("role") == "assistant" and bool(last.get("content"))
        ending = {
            "add_generation_prompt": not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        try:
            rendered = render_chat(tokenizer, messages, chat_template_kwargs, **ending)
        except RowError as error:
            raise ConfigError(f"These messages are refused: {error}.") from error
        with neutral_context():  # the ids must not be created on the meta device
            prompt = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")
        ids = prompt["input_ids"]
        config = generate_kwargs.get("generation_config")
        sources = (generate_kwargs, config, unwrap(self.target).generation_config)
        if all(checks.setting(sources, name) is None for name in LENGTHS):
            if config is None:
                generate_kwargs["max_new_tokens"] = CHAT_TOKENS
            else:  # transformers refuses settings in both places
                generate_kwargs["generation_config"] = copy.copy(config)
                generate_kwargs["generation_config"].max_new_tokens = CHAT_TOKENS
        output = self.generate(input_ids=ids, attention_mask=prompt["attention_mask"], **generate_kwargs)
        answer = getattr(output, "sequences", output)[0]
        text: str = tokenizer.decode(
            answer if unwrap(self.target).config.is_encoder_decoder else answer[ids.shape[1] :],
            skip_special_tokens=True,
        )
        return text

    @contextlib.contextmanager
    def attached(
        self, *, domain: str | None = None, learn: bool = True, owner: str | None = None
    ) -> Iterator[OnlineAssistant]:
        """
        Capture and learn from any assisted `generate` on the target inside, with `assistant_model=assistant.draft`, or
        the draft that the assistant was made of: the newest version serves. A call without a draft is logged. Only
        requests of this context (thread or task) are captured; start other threads with
        `contextvars.copy_context().run`.

        ```python
        pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=assistant.draft)
        with assistant.attached():
            pipe("Why is the sky blue?", max_new_tokens=128)
        ```

        Args:
            domain (`str`, *optional*), learn (`bool`, *optional*, defaults to `True`), owner (`str`, *optional*):
                As for [`~OnlineAssistant.generate`].
        """
        binding = self._live.binding(domain, learn, self.store, owner=owner)
        with bind(self.target, binding):
            yield self
        warn_unused(self.target, binding, "`attached()`")

    def remember(self, token_ids: Any, *, owner: str | None = None, domain: str | None = None) -> None:
        """
        Add text to search for candidates: documents that answers will quote, code that they will continue.

        Args:
            token_ids (`Sequence[int]` or `torch.Tensor` or `np.ndarray`): Token ids of one text, `(tokens,)`.
            owner (`str`, *optional*): Owner of the requests that use it, as for [`~OnlineAssistant.generate`].
            domain (`str`, *optional*): With `text_scope="domain"`, all requests of this domain use it as well.

        Raises:
            ConfigError: Earlier text is not used, or a token is not in the vocabulary.
        """
        if self.config.text_scope == "request" or not self.config.reads_text:
            raise ConfigError(
                'Earlier text is kept with `num_assistant_tokens="auto"`, `candidates` "both" or "text", '
                'and the `text_scope` "owner" or "domain". Set these.'
            )
        if domain is not None and self.config.text_scope != "domain":
            raise ConfigError('A `domain` has text with `text_scope="domain"` alone. Set that, or leave `domain` out.')
        tokens, size = [int(token) for token in token_ids], vocab_size_of(unwrap(self.target))
        if odd := [token for token in tokens if not 0 <= token < size]:
            raise ConfigError(f"Tokens of the target are from 0 to {size - 1}, got {odd[0]}. Use its own tokenizer.")
        self._live.earlier.add(owner, domain, (), tokens)

    def forget(self, owner: str | None = None) -> None:
        """
        Remove the earlier text of an owner. What the draft has learned stays, as do answers that a domain shares.

        Args:
            owner (`str`, *optional*): As for [`~OnlineAssistant.generate`].
        """
        self._live.earlier.forget(owner)

    # --- learning ---------------------------------------------------------------------------------------------------

    def update(self, steps: int | None = None, *, domain: str | None = None) -> UpdateReport:
        """
        Learn now from the requests since the last update. The new version serves from the next request on.

        Args:
            steps (`int`, *optional*): Optimizer steps, `config.steps_per_update` by default.
            domain (`str`, *optional*): Domain of the draft; by default the one with the most new requests.

        Raises:
            LearnerError: The update failed, or the drafts are per domain and none has a request to learn from.
        """
        return self._live.update(steps, domain)

    def target_changed(self) -> None:
        """Remove all requests so far, as the target has changed. What the draft has learned stays. Most changes of
        weights and adapters are detected without this call. Hooks, patched methods, offloaded weights, and changes of
        single values are not."""
        self._live.target_changed()

    def pause(self) -> None:
        """Begin no update and continue none until [`~OnlineAssistant.resume`]. Requests are still captured."""
        self._live.pause(True)

    def resume(self) -> None:
        """Learn again after [`~OnlineAssistant.pause`], or after a pause caused by failures."""
        self._live.pause(False)

    @property
    def is_learning(self) -> bool:
        """Whether an update is in progress or due."""
        return self._learner.has_work()

    @property
    def learning_error(self) -> Exception | None:
        """The newest error outside of answers (an update, the gate, the store, saving, the router) that stands, or
        `None`. After three failures in a row, learning pauses for two update intervals, then four, then eight."""
        return next(reversed(self._live.failures.standing), None)

    @property
    def learning_seconds(self) -> float:
        """Seconds spent on learning so far."""
        return self._learner.seconds

    @property
    def effort(self) -> float:
        """Share of the configured updates that are done now, from 1/32 to 1: less once acceptance no longer rises, or
        learning costs more time than it saves. With drafts per domain, the largest."""
        return max((requests.effort.share for requests in self.drafts.requests.values()), default=1.0)

    @property
    def saved_seconds(self) -> float | None:
        """Seconds that the original draft would have needed more for the same answers. `None` until a round was timed;
        0 without a gate."""
        return self._learner.saved_seconds

    def wait_until_idle(self, timeout: float | None = None) -> bool:
        """With `"idle"`, wait at most `timeout` seconds until all due work is done; returns whether it is."""
        return self._live.wait_until_idle(timeout)

    # --- what can be read -------------------------------------------------------------------------------------------

    @property
    def draft(self) -> Any:
        """The draft that serves (with drafts per domain: the base draft). A new version may be another object."""
        return self.serving_draft()

    def serving_draft(self, domain: str | None = None) -> Any:
        """Return the draft that serves a domain now, a transformers model."""
        return self.drafts.model(domain)

    def memory_plan(self, *, prompt_tokens: int = 512, new_tokens: int = 256, rows: int = 1) -> MemoryPlan:
        """
        Estimate the memory of this pair by part, from the configurations.

        Args:
            prompt_tokens (`int`, *optional*, defaults to 512), new_tokens (`int`, *optional*, defaults to 256):
                Tokens of a request.
            rows (`int`, *optional*, defaults to 1): Prompts answered together.
        """
        target, base, config = unwrap(self.target), unwrap(self.drafts.base), self.config
        # "cuda" may be the device that the draft is on.
        if config.learner_device is not None and torch.empty(0, device=config.learner_device).device == base.device:
            config = replace(config, learner_device=None)
        return memory_plan(
            target.config,
            base.config,
            config,
            peft_config=self._peft_config,
            target_dtype=target.dtype,
            draft_dtype=base.dtype,
            target_bytes=sum(t.nbytes for t in (*target.parameters(), *target.buffers())),
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            rows=rows,
            drafts=max(len(self.drafts.domains), 1),
            device_type=base.device.type,
        )

    @property
    def decisions(self) -> tuple[GateDecision, ...]:
        """All gate decisions, oldest first."""
        return tuple(self._learner.decisions)

    @property
    def drafting(self) -> Drafting:
        """The candidate generator of [`~OnlineAssistant.draft`], with its timing."""
        with self.drafts.lease() as draft:
            return draft.drafting

    def drafting_plan(self, domain: str | None = None, *, do_sample: bool = False) -> DraftingPlan | None:
        """Return the number of drafted tokens for a domain, with the measured acceptance and costs that it follows
        from; `None` unless `num_assistant_tokens="auto"`."""
        if self.config.num_assistant_tokens != "auto":
            return None
        return replace(self.drafts.pacer.plan((domain, do_sample)), vocab_size=self.drafts.vocab_size(domain))

    def warm_up(self, max_length: int = 1024) -> None:
        """Compile the configured forwards now, for sequences of at most `max_length` tokens."""
        with self.drafts.lease() as draft:
            draft.drafting.prepare(max_length)
        if self.static_target is not None:
            self.static_target.prepare(unwrap(self.target), max_length)

    @property
    def version(self) -> int:
        """Version of the draft that serves, 0 before the first; with drafts per domain, the newest."""
        return max(self.drafts.serving_version(domain) for domain in (None, *self.drafts.domains))

    @property
    def stats(self) -> AcceptanceStats:
        """Tokens per target forward, the speed-up if known, and acceptance of all requests since the last reset, next
        to those of the original draft by replay."""
        learning, tally = self._learner.seconds - self._live.learned_before, self._live.tally
        curves = {"speedup": tally.speeds(), **self._learner.curves()}
        return replace(tally.total(), timed=(*self.drafts.pacer.timed, learning), curves=curves)

    @property
    def stats_by_domain(self) -> dict[str | None, AcceptanceStats]:
        """Acceptance by the label of the request."""
        return self._live.tally.by_domain()

    def reset_stats(self) -> None:
        """Reset the statistics. Nothing learned is lost."""
        self._live.reset_stats()

    def __repr__(self) -> str:
        """Describe the pair, its state and its statistics in two lines."""
        names = [m.config.name_or_path or type(m).__name__ for m in map(unwrap, (self.target, self.drafts.base))]
        learning = "manual updates" if self.config.update_strategy == "manual" else "learning"
        state = "closed" if self._live.is_closed else "paused" if self._learner.is_paused else learning
        if self.learning_error is not None:
            state += f", failing ({type(self.learning_error).__name__})"
        stats = self.stats
        served = f"{stats}" if stats.num_requests else "0 requests served"
        pair = f"target={names[0]}, draft={names[1]}"
        return f"OnlineAssistant({pair}, version={self.version}, {state})\n  {served}"

    def _repr_html_(self) -> str:
        """Show the description and the curve of tokens per target forward in notebooks."""
        text, stats = io.StringIO(), self.stats
        if stats.num_requests:
            stats.plot().savefig(text, format="svg")
        _, start, curve = text.getvalue().partition("<svg")
        return f"<pre>{html.escape(repr(self))}</pre>{start}{curve}"

    # --- keeping ----------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | os.PathLike[str], *, domain: str | None = None) -> None:
        """
        Save a draft, adapters merged, as a model folder with its tokenizer. Nothing of any request is saved.

        Args:
            save_directory (`str` or `Path`): Created if missing.
            domain (`str`, *optional*): Domain of the draft; `None` is the base or the shared draft.
        """
        self._warn_if_original(domain)
        version = self.drafts.serving(domain).target_version
        with self.drafts.lease(domain) as draft:
            draft.model.save_pretrained(save_directory)
        write_target(save_directory, version)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(save_directory)

    def _warn_if_original(self, domain: str | None) -> None:
        if self.drafts.serving_version(domain) == 0:
            learned = [name for name in self.drafts.domains if self.drafts.serving_version(name)]
            hint = f" Domains that have learned: {', '.join(map(str, learned))}." if learned else ""
            where = f"serves the domain {domain}" if self.drafts.per_domain else "serves yet"
            logger.warning("The original draft is saved, as no learned version %s.%s", where, hint)

    def push_to_hub(self, repo_id: str, *, domain: str | None = None, **kw: Any) -> str:
        """Push a draft, adapters merged, with its tokenizer and a card without figures, which `osd-hf push` measures.
        Takes the arguments of `osd_hf.hub.push_folder`: private unless `private=False`."""
        self._warn_if_original(domain)
        training = {"requests served": self.stats.num_requests, "version": self.drafts.serving_version(domain)}
        facts = facts_of(self.target, self.drafts.base, () if domain is None else (domain,), training)
        facts = replace(facts, target_version=self.drafts.serving(domain).target_version)
        with tempfile.TemporaryDirectory() as folder, self.drafts.lease(domain) as draft:
            save_draft(folder, draft.model, self.tokenizer, repo_id=repo_id, facts=facts)
            return push_folder(folder, repo_id, **kw)

    def save_state(self, directory: str | os.PathLike[str]) -> None:
        """
        Save the session for [`~OnlineAssistant.load_state`]. A reader sees the old state or the new one.

        The state contains tokens of requests, so share [`~OnlineAssistant.save_pretrained`] instead.

        Raises:
            StateError: The folder cannot be written.
        """
        self._live.save(Path(directory))

    def load_state(self, directory: str | os.PathLike[str]) -> None:
        """
        Continue with a saved session. If it belongs to another version of the target, its requests are removed.

        Raises:
            StateError: No readable state, or the session of another draft. The assistant is unchanged then.
        """
        self._live.load(Path(directory))

    def close(self) -> None:
        """
        Stop learning, save the session if `autosave` is set, flush the store, and end tracking. Requests are still
        answered, but neither counted nor learned from.

        Raises:
            LearnerError: After all of this, if [`~OnlineAssistant.learning_error`] stands.
        """
        try:
            self._live.close(self.store)
        finally:
            unpack(unwrap(self.target), *self.drafts.models)

    def __enter__(self) -> OnlineAssistant:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        # An older error, already logged, must not hide an error of the block.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(LearnerError):
            self.close()
