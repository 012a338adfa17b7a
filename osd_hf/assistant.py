"""The assistant that users call: it serves with a draft, captures the target's corrections and learns from them."""

from __future__ import annotations

import contextlib
import copy
import functools
import html
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
from osd_hf.decoding.checks import answered_alone, check_request, needed_tokenizer, setting
from osd_hf.decoding.draft_length import DraftingPlan
from osd_hf.decoding.exactness import drop_adapter_hooks, log_once
from osd_hf.decoding.forward import CompiledTarget
from osd_hf.decoding.generator import LeanDrafting
from osd_hf.decoding.hook import bind
from osd_hf.errors import ConfigError, LearnerError, first_line
from osd_hf.hub.cards import facts_of
from osd_hf.hub.push import push_folder, save_draft
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.learner import Learner
from osd_hf.learning.updater import UpdateReport, make_accelerator
from osd_hf.live_learning import LiveLearning
from osd_hf.memory_plan import MemoryPlan, memory_plan
from osd_hf.models import (
    align_vocab,
    check_learner,
    check_pair,
    common_tokenizer,
    input_device,
    is_peft,
    load_named,
    uncompiled,
    unwrap,
    vocab_size_of,
    warn_of_order,
)
from osd_hf.prompts import OF_CHAT
from osd_hf.router import Router, as_router
from osd_hf.store.store import CorrectionStore
from osd_hf.target_version import taught_for, warn_of_target
from osd_hf.trace import Trace
from osd_hf.utils.context import neutral_context
from osd_hf.utils.kernels import unpack
from osd_hf.utils.plots import svg

__all__ = ["OnlineAssistant"]

logger = logging.getLogger(__name__)

CHAT_TOKENS = 256  # of an answer to a chat at most, where nobody has said more; as transformers' pipelines
LENGTHS = ("max_new_tokens", "max_length")


class OnlineAssistant:
    """
    Serves a target with a draft that learns from every request.

    The draft that serves is a copy: the caller's stays as it was. Answers are the target's own: greedy output token by
    token (in fp32), sampled output in distribution.

    ```python
    assistant = OnlineAssistant("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", device_map="auto")
    print(assistant.chat("Why is the sky blue?"))
    ```

    Args:
        target (`PreTrainedModel` or `str` or `Path`):
            The model that answers; a `PeftModel` or a compiled model as well, or its Hub id or folder.
        draft (`PreTrainedModel` or `str` or `Path`):
            A smaller model; if it is a `PeftModel`, only its adapter learns. Where its vocabulary is padded to another
            size than the target's, it is brought to that by [`align_vocab`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer of both, saved with the draft; by default found where the models came from.
        config (`OnlineConfig`, *optional*): How to draft and learn.
        store (`CorrectionStore` or `str` or `Path`, *optional*):
            Where captured traces are logged, beside the learner's own buffer.
        router (`Router` or `Callable[[str], str | None]`, *optional*):
            With a router each domain has a draft of its own. It says which domain a prompt belongs to if the request
            has no label: [`LabelRouter`], [`LanguageRouter`], [`TopicRouter`], or any function of the prompt's text.
            Requests of no known domain are served by the base draft, which stays as it was. Without a router all
            requests share one draft, and labels are only counted.
        peft_config (`peft.PeftConfig`, *optional*):
            Learn adapters of this kind, such as `LoraConfig`, and serve them merged; by default whole drafts learn.
        autosave (`str` or `Path`, *optional*):
            Folder that the session is saved to after every 8 updates, beside serving, and when the
            assistant is closed; [`~OnlineAssistant.load_state`] goes on from it. A forked child serves and learns by
            itself but leaves the folder to its parent: it saves where [`~OnlineAssistant.save_state`] says.
        report_to (`str` or `list[str]`, *optional*):
            Trackers as the Hugging Face trainers take them: `"trackio"`, `"tensorboard"`, `"wandb"`, `"all"`, ...
        on_update (`Callable[[GateDecision], object]`, *optional*):
            Called with what became of each version that was learned, once that is done, by the thread that has learned
            it, or with `"spread"` by that of the request that has waited for it, of the next one, or of `close`; one
            call at a time, in order: a thread that comes in the middle of one leaves its decision to the thread that
            is there. It may use the assistant, but inside of a request's thread not `update`. Where it fails, the log
            says so once, and [`~OnlineAssistant.learning_error`] keeps it.
        model_kwargs (`Any`):
            How to load models that are given by id or folder, as `from_pretrained` takes it: `dtype` (the checkpoint's
            own by default), `attn_implementation`, `trust_remote_code`, ... for both; `device_map`, `max_memory`, and
            `quantization_config` for the target alone, as a draft learns, whole. `device` is a CUDA device where there
            is one, otherwise the CPU; the draft comes to the target's.

    Raises:
        UnsupportedModelError: a model that cannot be loaded or assisted, or cannot assist or learn.
        VocabularyMismatchError: the tokenizers differ, or the vocabularies differ in size and no tokenizer shows that
            this is padding.
        ConfigError: a tracker that is not installed; a `learner_device` that does not exist; an unknown argument, or
            one for a model that is loaded already.
    """

    def __init__(
        self, target: Any, draft: Any, tokenizer: Any = None, config: OnlineConfig | None = None, *,
        store: CorrectionStore | str | os.PathLike[str] | None = None,
        router: Router | Callable[[str], str | None] | None = None, peft_config: Any = None,
        autosave: str | os.PathLike[str] | None = None, report_to: str | Sequence[str] | None = None,
        on_update: Callable[[GateDecision], object] | None = None, **model_kwargs: Any,
    ) -> None:  # fmt: skip
        self.target, source = load_named(target, draft, **model_kwargs)
        source = uncompiled(source)
        check_pair(unwrap(self.target), unwrap(source))
        warn_of_order(unwrap(self.target), unwrap(source))
        check_learner(unwrap(source))
        self.tokenizer = common_tokenizer(tokenizer, unwrap(self.target), unwrap(source))
        source = align_vocab(source, unwrap(self.target), tokenizer)
        self.router = as_router(router)
        per_domain = self.router is not None
        has_adapter = is_peft(source) and not per_domain
        self._peft_config = peft_config or (source.active_peft_config if has_adapter else None)
        self._drafts = DomainDrafts(source, config, peft_config=peft_config, per_domain=per_domain)
        self.config = self._drafts.config
        self.store = store if store is None or isinstance(store, CorrectionStore) else CorrectionStore(store)
        self._learner = Learner(self._drafts, self.config, make_accelerator(report_to, self.config))
        folder = None if autosave is None else Path(autosave)
        # Threads hold no reference to the assistant: one that nobody uses any more takes them along. Nor may what
        # listens, which refers to it, perhaps: it is held here alone.
        self._on_update = None if on_update is None else functools.partial(on_update)
        compiled = CompiledTarget(unwrap(self.target)) if self.config.compile_target else None
        self._live = LiveLearning(
            self._learner, self.router, self.tokenizer, folder, compiled, unwrap(self.target), self._on_update
        )  # fmt: skip
        weakref.finalize(self, self._live.stop)
        warn_of_target(source, self.target)

    # --- serving ----------------------------------------------------------------------------------------------------

    def generate(
        self, inputs: Any = None, *, domain: str | None = None, learn: bool = True,
        num_assistant_tokens: int | str | None = None, owner: str | None = None,
        on_trace: Callable[[Trace], object] | None = None, **generate_kwargs: Any,
    ) -> Any:  # fmt: skip
        """
        What `target.generate` returns for these arguments, sooner.

        Args:
            inputs (`torch.Tensor` or `Mapping[str, torch.Tensor]`, *optional*):
                Token ids, int64, of shape `(prompts, tokens)`, or what the target takes instead, such as audio
                features; or what a tokenizer or processor returns. It can also be passed as keywords (`**inputs`).
                Several prompts of a decoder-only target are padded on the left. Tensors are moved to the target's
                device. With `inputs_embeds`, `encoder_outputs`, or a soft prompt (PEFT) the target answers alone,
                and the log says so once.
            domain (`str`, *optional*): Label under which the request is counted and logged.
            learn (`bool`, *optional*, defaults to `True`):
                With `False` nothing of the request is kept or learned from; its acceptance is still counted.
            num_assistant_tokens (`int` or `"auto"`, *optional*):
                Tokens drafted per round for this request, in place of the configuration's; needs lean drafting. With
                0 the target answers alone: what it samples is then what `target.generate` would from the same seed.
            owner (`str`, *optional*):
                Whose request it is: past text of one owner is proposed to no other. Requests without one are taken
                for one owner's; where several people are served, name them.
            on_trace (`Callable[[Trace], object]`, *optional*):
                Called with the request's trace, or with that of each prompt, once the answer is there, also with
                `learn=False`; not called where nothing could be captured, such as a prompt of embeddings. Where it
                fails, the log says so.
            generate_kwargs (`Any`):
                Passed on to `target.generate`. With `past_key_values` of an earlier turn of a chat, neither model
                reads again what it has read; a compiled draft does.

        Raises:
            UnsupportedGenerationError: what cannot be kept lossless; before any work is done.
            ConfigError: `num_assistant_tokens` cannot be had.
        """
        target = unwrap(self.target)
        if isinstance(inputs, Mapping):  # what a tokenizer or processor returns
            inputs, generate_kwargs = None, {**inputs, **generate_kwargs}
        check_request(target, self.config, inputs, generate_kwargs, num_assistant_tokens)
        device = input_device(target)
        inputs, *moved = (
            value.to(device) if isinstance(value, torch.Tensor) else value
            for value in (inputs, *generate_kwargs.values())
        )
        generate_kwargs = dict(zip(generate_kwargs, moved, strict=True))
        config = generate_kwargs.get("generation_config")
        generate_kwargs |= needed_tokenizer(self.tokenizer, generate_kwargs, config, target.generation_config)
        prompt = () if inputs is None else (inputs,)  # some models name their first argument otherwise
        if why := answered_alone(self.target, generate_kwargs):
            log_once(target, f"The target answers without a draft: {why}.")
            with self._live.request():
                return self.target.generate(*prompt, **generate_kwargs)
        generate_kwargs["assistant_model"] = self._drafts.base
        seen: list[Trace] | None = None if on_trace is None else []
        binding = self._live.binding(
            domain, learn, self.store, owner=owner, is_begun=True, k=num_assistant_tokens, seen=seen
        )
        with self._live.request(), bind(self.target, binding):
            try:
                output = self.target.generate(*prompt, **generate_kwargs)
            except BaseException:
                drop_adapter_hooks(target)
                raise
        if on_trace is not None:
            for trace in seen or ():
                try:
                    on_trace(trace)
                except Exception:
                    logger.exception("`on_trace` failed; the answer is delivered.")
        return output

    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], *, chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool | None = None, **generate_kwargs: Any,
    ) -> str:  # fmt: skip
        """
        Return the text of the target's answer to a chat, without special tokens.

        Args:
            messages (`str` or `Sequence[Mapping[str, Any]]`):
                `{"role": ..., "content": ...}` of each turn, or the text of a single one of the user's.
            chat_template_kwargs (`Mapping[str, Any]`, *optional*):
                Passed on to `tokenizer.apply_chat_template`, such as `tools` or `enable_thinking`.
            continue_final_message (`bool`, *optional*):
                Continue the last message instead of beginning a new one. By default a last message of the assistant
                is continued, as by transformers' pipelines. Only the new text is returned. It may also be given in
                `chat_template_kwargs`.
            generate_kwargs (`Any`):
                As for [`~OnlineAssistant.generate`], such as `streamer=TextStreamer(tokenizer, skip_prompt=True)`.
                Without a length here or in the target's generation config, an answer has at most 256 new tokens.

        Raises:
            ConfigError: there is no tokenizer, or it has no chat template; `chat_template_kwargs` holds what is
                set here.
            UnsupportedGenerationError: as [`~OnlineAssistant.generate`] does.
        """
        tokenizer = self.tokenizer
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            missing = "No tokenizer was found" if tokenizer is None else "The tokenizer has no chat template"
            raise ConfigError(
                f"{missing}, so messages cannot be put into a prompt. Pass `tokenizer=`, one of an instruction-tuned "
                "model, set `tokenizer.chat_template`, or call `generate` with ids of the whole prompt."
            )
        template_kwargs = dict(chat_template_kwargs or {})
        given = template_kwargs.pop("continue_final_message", None)
        if fixed := OF_CHAT.intersection(template_kwargs):
            raise ConfigError(
                f"`chat_template_kwargs` must not hold `{min(fixed)}`, which `chat` sets by itself. Leave it out; for "
                "another form of the prompt call `tokenizer.apply_chat_template` and `generate`."
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        is_list = isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)
        if not is_list or any(m.get("content") is None and m.get("role") in ("system", "user") for m in messages):
            raise ConfigError(
                "`messages` must be a text, or a list of mappings with `role` and `content`, got "
                f"{messages if is_list else type(messages).__name__}."
            )
        is_continued = given if continue_final_message is None else continue_final_message
        if is_continued is None:
            last = messages[-1] if messages else {}
            is_continued = last.get("role") == "assistant" and bool(last.get("content"))
        try:
            with neutral_context():  # ids on the meta device, for one, could not be read
                prompt = tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=not is_continued, continue_final_message=is_continued,
                    return_dict=True, return_tensors="pt", **template_kwargs,
                )  # fmt: skip
        except Exception as error:  # templates raise errors of any type
            raise ConfigError(f"The chat template cannot take these messages: {first_line(error)}.") from error
        ids = prompt["input_ids"]
        config = generate_kwargs.get("generation_config")
        sources = (generate_kwargs, config, unwrap(self.target).generation_config)
        if all(setting(sources, name) is None for name in LENGTHS):
            if config is None:
                generate_kwargs["max_new_tokens"] = CHAT_TOKENS
            else:  # transformers wants all settings in one place
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
        Inside the `with` block, any assisted `generate` on the target is captured and learned from: the caller's own
        call, a pipeline, an evaluation harness. Pass `assistant_model=assistant.draft`. Only requests of this context
        (thread or task) are seen; start other threads with `contextvars.copy_context().run`.

        ```python
        pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=assistant.draft)
        with assistant.attached():
            pipe("Why is the sky blue?", max_new_tokens=128)
        ```

        Args:
            domain (`str`, *optional*), learn (`bool`, *optional*, defaults to `True`), owner (`str`, *optional*):
                As for [`~OnlineAssistant.generate`].
        """
        with bind(self.target, self._live.binding(domain, learn, self.store, owner=owner)):
            yield self

    def remember(self, token_ids: Any, *, owner: str | None = None, domain: str | None = None) -> None:
        """
        Propose from this text as well: documents that answers will quote, code that they will go on with.

        Args:
            token_ids (`Sequence[int]` or `torch.Tensor` or `np.ndarray`): Of one text, `(tokens,)`.
            owner (`str`, *optional*): To whose requests it is proposed, as for [`~OnlineAssistant.generate`].
            domain (`str`, *optional*): With the `text_scope` `"domain"`: to all requests of this domain as well.

        Raises:
            ConfigError: past text is not looked up, or a token that is none of the target's.
        """
        if self.config.text_scope == "request" or not self.config.reads_text:
            raise ConfigError(
                'Past text is kept with `num_assistant_tokens="auto"`, `candidates` "both" or "text", '
                'and the `text_scope` "owner" or "domain". Set these.'
            )
        tokens, size = [int(token) for token in token_ids], vocab_size_of(unwrap(self.target))
        if odd := [token for token in tokens if not 0 <= token < size]:
            raise ConfigError(f"Tokens of the target are from 0 to {size - 1}, got {odd[0]}. Use its own tokenizer.")
        self._live.earlier.add(owner, domain, (), tokens)

    def forget(self, owner: str | None = None) -> None:
        """Propose nothing any more of what this owner's requests were so far; what the draft has learned stays, as do
        answers that a domain shares.

        Args:
            owner (`str`, *optional*): As for [`~OnlineAssistant.generate`].
        """
        self._live.earlier.forget(owner)

    # --- learning ---------------------------------------------------------------------------------------------------

    def update(self, steps: int | None = None, *, domain: str | None = None) -> UpdateReport:
        """
        Learn now from what has been captured since the last update, and serve the outcome from the next request on.

        Args:
            steps (`int`, *optional*): Optimizer steps, `config.steps_per_update` by default.
            domain (`str`, *optional*):
                Whose draft, with drafts per domain; by default the one with the most new requests.

        Raises:
            LearnerError: the update failed, with the cause; called in the middle of a request of this thread; or no
                draft has anything to learn from.
        """
        return self._live.update(steps, domain)

    def target_changed(self) -> None:
        """
        Say that the target is another one now: what is known of its answers so far is learned from no more, nor are
        versions judged by it, and an update under way is given up; what the draft has learned stays.

        Most changes are noticed without it, by the weights' [`fingerprint`]: at the next request, steps of an
        optimizer, weights that were loaded or exchanged, and adapters that were added, switched, merged or scaled;
        before the next update, what else has changed in most weights, as by assigning through `.data`. Hooks, patched
        methods, offloaded weights, and single values that were set are not.
        """
        self._live.target_changed()

    def pause(self) -> None:
        """Begin no update, and take no further step of one under way, until [`~OnlineAssistant.resume`]; requests are
        still captured."""
        self._live.pause(True)

    def resume(self) -> None:
        """Learn again after [`~OnlineAssistant.pause`] or, called without one, where learning pauses as it has failed;
        updates that have become due meanwhile are done at the next occasion."""
        self._live.pause(False)

    @property
    def is_learning(self) -> bool:
        """Whether an update is under way or due."""
        return self._learner.has_work()

    @property
    def learning_error(self) -> Exception | None:
        """What failed last beside the answers (an update, comparing versions, the store, saving the session, the
        router) and has not succeeded since; `None` where all is well. No request suffers from it. After three failures
        in a row learning pauses and is tried again after two update intervals, then four, then each eight; an update
        that succeeds, a try or [`~OnlineAssistant.update`], ends that."""
        return next(reversed(self._live.failures.standing), None)

    @property
    def learning_seconds(self) -> float:
        """Time spent on learning so far, the update under way included."""
        return self._learner.seconds

    @property
    def effort(self) -> float:
        """Share of the configured updates that are done now, from 1/16 to 1: less once acceptance
        no longer rises, or what that saves is less than it takes; of the draft with the most, where domains have their
        own."""
        return max((requests.effort.share for requests in self._learner.requests.values()), default=1.0)

    @property
    def saved_seconds(self) -> float | None:
        """What learning has saved so far: time that the draft as it came would have needed more for the same answers,
        by replay and what a round takes. Beside [`~OnlineAssistant.learning_seconds`] it says whether learning has
        paid. `None` until a round was timed, which stock drafting never does; 0 without a gate, as nothing is compared
        then. With `num_assistant_tokens="auto"` both drafts are taken to draft as many tokens as pays best."""
        return self._learner.saved_seconds

    def wait_until_idle(self, timeout: float | None = None) -> bool:
        """Wait, with the strategy `"idle"`, until all that is due has been learned, at most `timeout` seconds; returns
        whether it has. `on_update` may be called with the last decision a moment later."""
        return self._live.wait_until_idle(timeout)

    # --- what can be read -------------------------------------------------------------------------------------------

    @property
    def draft(self) -> Any:
        """The draft that serves (with drafts per domain: the base draft), an ordinary transformers model. Its weights
        change between requests, and a new version may be another model: ask again. They are what is kept of its
        version, too: copy it before you change them."""
        return self.serving_draft()

    def serving_draft(self, domain: str | None = None) -> Any:
        """The draft that a request of this domain is served with now, an ordinary transformers model."""
        return self._drafts.model(domain)

    def memory_plan(self, *, prompt_tokens: int = 512, new_tokens: int = 256, rows: int = 1) -> MemoryPlan:
        """
        What this pair takes in memory, by part, once versions of its draft have served: a model of it, made of the
        configurations. `osd-hf plan` makes it before anything is loaded.

        Args:
            prompt_tokens (`int`, *optional*, defaults to 512), new_tokens (`int`, *optional*, defaults to 256):
                Of a request.
            rows (`int`, *optional*, defaults to 1): Prompts that are answered at once.
        """
        target, base, config = unwrap(self.target), unwrap(self._drafts.base), self.config
        # A tensor is on the device that a name without an index stands for now.
        if config.learner_device is not None and torch.empty(0, device=config.learner_device).device == base.device:
            config = replace(config, learner_device=None)
        return memory_plan(
            target.config, base.config, config, peft_config=self._peft_config, target_dtype=target.dtype,
            draft_dtype=base.dtype, target_bytes=sum(t.nbytes for t in (*target.parameters(), *target.buffers())),
            prompt_tokens=prompt_tokens, new_tokens=new_tokens, rows=rows,
            drafts=max(len(self._drafts.domains), 1), device_type=base.device.type,
        )  # fmt: skip

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
        is_auto = self.config.num_assistant_tokens == "auto"
        if not is_auto:
            return None
        return replace(self._drafts.pacer.plan((domain, do_sample)), vocab_size=self._drafts.vocab_size(domain))

    def warm_up(self, max_length: int = 1024) -> None:
        """
        Compile now what `compile_draft` and `compile_target` ask for, so that no request waits for it. The head of a
        draft vocabulary is compiled when it comes up.

        Args:
            max_length (`int`, *optional*, defaults to 1024):
                Tokens of prompt and answer, together, of the longest sequences that are compiled for. Each doubling
                from 256 on takes some seconds; where sequences get longer, it is done when the first one does.
        """
        with self._drafts.lease() as draft:
            if draft.drafting is not None:
                draft.drafting.prepare(max_length)
        if self.compiled_target is not None:
            self.compiled_target.prepare(unwrap(self.target), max_length)

    @property
    def compiled_target(self) -> CompiledTarget | None:
        """What verifies with `compile_target=True`; `None` without."""
        return self._live.compiled

    @property
    def version(self) -> int:
        """Version of the draft that serves, 0 before the first update; with drafts per domain, the newest of them."""
        return max(self._drafts.serving_version(domain) for domain in (None, *self._drafts.domains))

    @property
    def stats(self) -> AcceptanceStats:
        """Acceptance over all requests since the last reset; tokens per second and the speed-up over the target alone,
        as far as they are known; `assistant.stats.plot()` draws the course of acceptance."""
        return replace(self._live.tally.total(), timed=self._drafts.pacer.timed)

    @property
    def stats_by_domain(self) -> dict[str | None, AcceptanceStats]:
        """Acceptance by the label of the request."""
        return self._live.tally.by_domain()

    def reset_stats(self) -> None:
        """Count from zero again; nothing learned is lost."""
        self._live.tally.reset()
        self._drafts.pacer.reset_timed()

    def __repr__(self) -> str:
        """What serves, and how well: two lines."""
        names = [m.config.name_or_path or type(m).__name__ for m in map(unwrap, (self.target, self._drafts.base))]
        learning = "manual updates" if self.config.update_strategy == "manual" else "learning"
        state = "closed" if self._live.is_closed else "paused" if self._learner.is_paused else learning
        if self.learning_error is not None:
            state += f", failing ({type(self.learning_error).__name__})"
        stats, (before, now) = self.stats, self._learner.compared()
        requests = f"{stats.num_requests} request{'' if stats.num_requests == 1 else 's'} served"
        alpha = f", alpha {stats.alpha:.3f}" if stats.examined else ""
        if before.examined and now.examined:
            alpha += f"; on the last {now.num_requests}, {before.alpha:.3f} with the draft as it was and "
            alpha += f"{now.alpha:.3f} with the learned ones"
        pair = f"target={names[0]}, draft={names[1]}"
        return f"OnlineAssistant({pair}, version={self.version}, {state})\n  {requests}{alpha}"

    def _repr_html_(self) -> str:
        """For notebooks: the same, and the curve of acceptance."""
        stats = self.stats
        curve = svg(stats.plot()) if stats.examined else ""
        return f"<pre>{html.escape(repr(self))}</pre>{curve}"

    # --- keeping ----------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | os.PathLike[str], *, domain: str | None = None) -> None:
        """
        Save a draft as an ordinary model folder with its tokenizer, adapters merged; nothing of any request is in it.
        Its configuration says which version of the target it was taught for.

        Args:
            save_directory (`str` or `Path`): Made where it is missing.
            domain (`str`, *optional*):
                Whose draft, with drafts per domain; `None` is the base or the shared draft. An adapter alone is saved
                by `assistant.drafts.adapter(domain).save_pretrained(...)`, all of them by
                `assistant.drafts.save_pretrained(...)`.
        """
        # One version from the first file to the last.
        with self._drafts.lease(domain) as draft, taught_for(draft.model, self._drafts.taught_for(domain)):
            draft.model.save_pretrained(save_directory)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(save_directory)

    def push_to_hub(self, repo_id: str, *, domain: str | None = None, **kw: Any) -> str:
        """Push a draft, adapters merged, with the tokenizer and a card without figures, which `osd-hf push` measures.
        Takes the arguments of `osd_hf.hub.push.push_folder`: private unless `private=False`."""
        training = {"requests served": self.stats.num_requests, "version": self._drafts.serving_version(domain)}
        facts = facts_of(self.target, self._drafts.base, () if domain is None else (domain,), training)
        facts = replace(facts, target_version=self._drafts.taught_for(domain))
        with tempfile.TemporaryDirectory() as folder, self._drafts.lease(domain) as draft:
            save_draft(folder, draft.model, self.tokenizer, repo_id=repo_id, facts=facts)
            return push_folder(folder, repo_id, kept="The assistant has it still.", **kw)

    def save_state(self, directory: str | os.PathLike[str]) -> None:
        """
        Save the session, so that [`~OnlineAssistant.load_state`] goes on: learned weights, optimizer, replay buffers,
        versions, decisions, router and counts. Atomic: a reader sees the old state or the new one. Requests go on
        meanwhile; learning waits. It holds requests' tokens; [`~OnlineAssistant.save_pretrained`] is for others.

        Raises:
            StateError: the folder cannot be written.
        """
        self._live.save(Path(directory))

    def load_state(self, directory: str | os.PathLike[str]) -> None:
        """
        Go on with a saved session. Of one of another version of the target, weights and counts are loaded, and its
        requests are set aside.

        Raises:
            StateError: nothing readable there, or the session of another draft; the assistant is as before.
        """
        self._live.load(Path(directory))

    def close(self) -> None:
        """End the thread that learns, call `on_update` with what it has decided, save the session where it is saved by
        itself, flush the store, end tracking. A part of an update that is under way is finished first, with `"spread"`
        also one that answers have stopped waiting for. Requests are answered all the same, but neither counted nor
        learned from any more.

        Raises:
            LearnerError: once all that is done, where [`~OnlineAssistant.learning_error`] stands, or a part of it
                failed; the cause is chained.
        """
        try:
            self._live.close(self.store)
        finally:
            unpack(unwrap(self.target), *self._drafts.models)

    def __enter__(self) -> OnlineAssistant:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        # An error of the block is not to be hidden by an older one, which the log has told.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(LearnerError):
            self.close()
