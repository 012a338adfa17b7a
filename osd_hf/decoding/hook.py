"""Capture a target's assisted requests by a hook, without an extra forward."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.stopping_criteria import MaxLengthCriteria

from osd_hf.decoding import checks
from osd_hf.decoding.draft_length import DraftLength, RoundTime
from osd_hf.decoding.forward import layers_with_state, usual_inputs
from osd_hf.decoding.loop import Loop
from osd_hf.decoding.record import Binding, Lease, Request, Round, Sink, hand_over, stores_rows
from osd_hf.decoding.rows import BatchTargetForward
from osd_hf.decoding.sources import Drafting, DraftSource
from osd_hf.errors import (
    CaptureError,
    ConfigError,
    OSDError,
    UnsupportedGenerationError,
    UnsupportedModelError,
    first_line,
)
from osd_hf.logits_processors import ReplayedProcessor
from osd_hf.models import unwrap
from osd_hf.target_version import target_version
from osd_hf.trace import Trace
from osd_hf.utils import kernels

logger = logging.getLogger(__name__)

# --- the hook -------------------------------------------------------------------------------------------------------
#
# `generate` looks its loop up on the type, and ignores a patched instance. A subclass for the instance would break
# users who copy, pickle, or wrap their model. So the method is wrapped in the class that defines it, `GenerationMixin`
# as a rule, while any model has a listener. Requests without a listener are passed on.

_LOOP, _GENERATE, _VALIDATE = "_assisted_decoding", "generate", "_validate_generation_mode"
_CANDIDATES = "_get_candidate_generator"
_bindings: ContextVar[tuple[Binding, ...]] = ContextVar("osd_hf_bindings", default=())
_answers: WeakKeyDictionary[Any, WeakMethod[Callable[..., Any]]] = WeakKeyDictionary()  # of models taken over
_answering: ContextVar[tuple[Any, ...]] = ContextVar("osd_hf_answering", default=())  # those asked in this thread
_watching: ContextVar[Any] = ContextVar("osd_hf_watching", default=None)  # a call that transformers decodes
_num_listeners: Counter[tuple[type, str]] = Counter()
_original_methods: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by the methods that wrap them
_lock = threading.RLock()  # a block may end when its last reference is dropped


@contextlib.contextmanager
def bind(target: Any, binding: Binding) -> Iterator[None]:
    """Let `binding` listen to every assisted request that this context runs on `target`."""
    model = unwrap(target)
    if not isinstance(model, GenerationMixin):
        raise UnsupportedModelError(
            f"Capture needs a transformers model with `generate`, got {type(model).__name__}. Load the target with a "
            "class that has a language modeling head, such as `AutoModelForCausalLM`."
        )
    owners = _enter(type(model), _LOOP)
    validated = _enter(type(model), _VALIDATE) if getattr(model, "_is_stateful", False) else []
    watched = _enter(type(model), _GENERATE) if binding.undrafted else []
    try:
        binding.target = model
        _bindings.set((*_living(), binding))
        yield
    finally:
        # Copied contexts outlive the block, and it may end in another context than it began in.
        binding.end()
        _bindings.set(_living())
        _leave(owners, _LOOP)
        _leave(validated, _VALIDATE)
        _leave(watched, _GENERATE)


def warn_unused(target: Any, binding: Binding, block: str) -> None:
    """Log, once for each target, that a block has seen no request."""
    if not binding.has_requests:
        text = f"{block} has seen no request. Those of other threads need `contextvars.copy_context().run`."
        checks.log_once(unwrap(target), text)


@contextlib.contextmanager
def taken_over(target: Any, answer: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, `target.generate(...)` without an assistant model is `answer(generate, ...)` in all threads,
    where `generate` is the original method. `answer` is a bound method; the block does not keep its object alive."""
    model, asked = unwrap(target), WeakMethod(answer)
    del answer  # this frame would keep its object alive
    owners = _enter(type(model), _GENERATE)
    try:
        _answers[model] = asked
        yield
    finally:
        _answers.pop(model, None)
        _leave(owners, _GENERATE)


def _enter(cls: type, name: str) -> list[type]:
    """Wrap a method in the classes that define it, and return these classes."""
    owners = [c for c in cls.__mro__ if name in vars(c)]
    with _lock:
        for owner in owners:
            method = vars(owner)[name]
            if method not in _original_methods:
                wrapped = _WRAPPERS[name](method)
                _original_methods[wrapped] = method
                setattr(owner, name, wrapped)
            _num_listeners[owner, name] += 1
    return owners


def _leave(owners: list[type], name: str) -> None:
    with _lock:
        for owner in owners:
            _num_listeners[owner, name] -= 1
            if not _num_listeners[owner, name]:
                del _num_listeners[owner, name]
                method = vars(owner).get(name)
                if method in _original_methods:  # or else somebody has replaced it
                    setattr(owner, name, _original_methods[method])


def _wrapped_generate(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = _answers.get(self)
        answer = None if found is None else found()
        is_assisted = kwargs.get("assistant_model") is not None
        sources = (kwargs, kwargs.get("generation_config"), self.generation_config)
        is_drafted = is_assisted or "custom_generate" in kwargs or checks.setting(sources, "use_mtp")
        if answer is None and not is_drafted:
            for binding in _listening(self):
                if binding.undrafted:
                    checks.log_once(
                        self, f"A call of `generate` drafts nothing, and nothing is learned. {binding.undrafted}"
                    )
        # A model's own `generate` may call that of its parent.
        if answer is None or is_assisted or any(model is self for model in _answering.get()):
            return generate(self, *args, **kwargs)
        before = _answering.set((*_answering.get(), self))
        try:
            return answer(functools.partial(generate, self), *args, **kwargs)
        finally:
            _answering.reset(before)

    return wrapped


def _living() -> tuple[Binding, ...]:
    return tuple(binding for binding in _bindings.get() if binding.target is not None)


def _listening(model: Any) -> list[Binding]:
    bindings = [binding for binding in _bindings.get() if binding.target is model]
    for binding in bindings:
        binding.has_requests = True
    innermost = {id(binding.owner): binding for binding in bindings}
    return list(innermost.values())


def _wrapped_loop(decode: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decode)  # `generate` inspects the signature
    def _assisted_decoding(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        bindings = _listening(self)
        if not bindings:
            return decode(self, input_ids, **kwargs)
        is_captured = all(binding.is_capture for binding in bindings)
        checks.check_generation(kwargs, kwargs["generation_config"], but=checks.WATCHED if is_captured else ())
        prompt_tokens, criteria = input_ids.shape[1], kwargs["stopping_criteria"]
        kwargs["logits_processor"] = LogitsProcessorList(
            p.begin(prompt_tokens) if type(p) is ReplayedProcessor else p for p in kwargs["logits_processor"]
        )
        kwargs["generation_config"] = bounded(kwargs["generation_config"], criteria, prompt_tokens)
        call = Call(self, input_ids, kwargs, bindings)
        with call.served():
            try:
                output = call.watch(decode) if call.is_watched else call.decode()
            finally:
                call.close()
        hand_over(call.requests)
        return output

    return _assisted_decoding


def _wrapped_validation(validate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(validate)
    def _validate_generation_mode(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            validate(self, *args, **kwargs)
        except ValueError as error:  # our loop rolls states back
            if not ("stateful models" in str(error) and _listening(self)):
                raise

    return _validate_generation_mode


def _wrapped_candidates(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def _get_candidate_generator(self: Any, *args: Any, **kwargs: Any) -> Any:
        made, call = make(self, *args, **kwargs), _watching.get()
        return made if call is None or call.model is not self else _Watched(made, call)

    return _get_candidate_generator


_WRAPPERS = {
    _LOOP: _wrapped_loop, _GENERATE: _wrapped_generate, _VALIDATE: _wrapped_validation,
    _CANDIDATES: _wrapped_candidates,
}  # fmt: skip


def bounded(config: GenerationConfig, criteria: StoppingCriteriaList, begins: int) -> GenerationConfig:
    """Return a copy of a request's generation config, because `max_length` changes from round to round."""
    config = copy.copy(config)
    lengths = [int(criterion.max_length) for criterion in criteria if type(criterion) is MaxLengthCriteria]
    if lengths:  # the caller's criteria replace that of the config
        config.max_length = max(min(lengths), begins + 1)
    return config


# --- one call of `generate` -----------------------------------------------------------------------------------------


class Call:
    """One assisted call of `generate`, with the arguments of transformers' assisted loop and its listeners."""

    def __init__(
        self, model: PreTrainedModel, input_ids: Tensor, kwargs: dict[str, Any], bindings: Sequence[Binding]
    ) -> None:
        self.model, self.input_ids, self.kwargs, self.bindings = model, input_ids, kwargs, bindings
        self.config, count = kwargs["generation_config"], len(input_ids)
        version = target_version(model) if stores_rows(bindings) else None
        self.requests = [
            Request(
                model,
                input_ids[i : i + 1],
                checks.of_row(kwargs, i, count) if count > 1 else kwargs,
                bindings,
                version,
            )
            for i in range(count)
        ]
        self.draftings: list[Drafting] = []  # of each row
        self.length: DraftLength | None = None
        self.limits = checks.Limits()
        self.target: BatchTargetForward | None = None  # over a static cache
        self._undrafted: str | None = None  # why no draft may help
        self.clock: Callable[[], float] = time.perf_counter

    @property
    def is_served(self) -> bool:
        """Whether a listener serves a draft. Otherwise the call is only captured."""
        return self.requests[0].is_served

    @property
    def is_watched(self) -> bool:
        """Whether transformers makes the candidates, with built-in layers or by drafting blocks."""
        return any(getattr(self.config, name, None) for name in checks.WATCHED)

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Lease the drafts of all rows while the call runs."""
        with contextlib.ExitStack() as stack:
            for request in self.requests:
                request.lease(stack)
            if self.is_watched:
                self._check_watched()
            else:
                self._find_limits()
                self._prepare(stack)
            yield

    def _find_limits(self) -> None:
        why = self._undrafted = checks.undrafted(self.model, self.config, self.kwargs["logits_processor"])
        if why and not self.is_served and len(self.requests) == 1:
            raise UnsupportedGenerationError(
                f"This request cannot be assisted: {why}. Otherwise leave it out, or call `generate` without "
                "`assistant_model`."
            )
        self.limits = (
            checks.Limits(why, max_tokens=1) if why else checks.limits_of(self.model, self.input_ids, self.kwargs)
        )
        limits, prompt_tokens = self.limits, self.input_ids.shape[1]
        has_limits = limits.reason and not limits.allow_any(prompt_tokens, self.config.max_length - 1)
        if has_limits and len(self.requests) == 1:
            how = "without speculation" if limits.max_tokens < 2 else "without speculation where that is not exact"
            checks.log_once(self.model, f"{type(self.model).__name__} answers {how}: {limits.reason}.")

    def _prepare(self, stack: contextlib.ExitStack) -> None:
        first, processors = self.requests[0], self.kwargs["logits_processor"]
        self.draftings = [r.drafting or Drafting(r.assistant_model, None) for r in self.requests]
        # A draft proposes tokens that the processors allow. Text may propose others, and some processors fail then.
        reads_text = first.prompts is not None and all(map(takes_any_token, processors))
        self.length = self.draftings[0].length(
            first.domain, len(self.requests), do_sample=bool(self.config.do_sample), reads_text=reads_text
        )
        self.clock = self.draftings[0].clock
        models = [self.model, *(r.drafting.draft for r in self.requests if r.drafting)]
        if len(models) > 1 and any(model.device.type == "cpu" for model in models) and kernels.min_side():
            stack.enter_context(kernels.fast_kernels(*models, is_request=True))

    def decode(self) -> Any:
        """Return the answers as `generate` returns them. Calls that cannot have candidates are decoded by the target
        alone, and the log says why, once."""
        if len(self.requests) == 1 and self.limits.forbid(self.input_ids.shape[1]):
            return self.decode_alone(is_usual=False)
        is_batch = len(self.requests) > 1
        why = self._hindrance() or (self._batch_hindrance() if is_batch else None)
        if why is not None:
            what = "Batches are decoded" if is_batch else "The target decodes"
            checks.log_once(self.model, f"{what} without a draft: {why}.")
            return self.decode_alone(is_usual=False)
        assert self.length is not None
        self.target = self._static_target()
        if self.length.is_plain and self.target is None:
            return self.decode_alone()
        loop = Loop(self)  # which refers to this call: with a reference back, only the garbage collector frees both
        try:
            return loop.decode()
        finally:
            for source in loop.sources or ():
                source.forward.close()

    def _static_target(self) -> BatchTargetForward | None:
        """Return forwards of the target over a static cache; `None` if it runs eagerly."""
        static = next((b.static for b in reversed(self.bindings) if b.static is not None), None)
        has_states = self.config.output_attentions or self.config.output_hidden_states
        if static is None or has_states or (len(self.requests) == 1 and self._rows_hindrance()):  # batches passed it
            return None
        rows, mask = self.input_ids.tolist(), self.kwargs.get("attention_mask")
        if mask is not None:
            rows = [row[len(row) - shown :] for row, shown in zip(rows, mask.sum(1).tolist(), strict=True)]
        if len(rows) == 1 and len(rows[0]) < self.input_ids.shape[1]:
            return None  # the cache that is given back has the padding
        more = int(self.config.max_length) - self.input_ids.shape[1]
        layers = self.draftings[0].state_layers
        made = BatchTargetForward(self.model, self.input_ids, self.kwargs, rows, more, static, layers)
        return made if made.is_static else None

    def _hindrance(self) -> str | None:
        """Return why our loop cannot decode the call; `None` if it can."""
        if self.input_ids.shape[1] == 0 or self.requests[0].num_cached is None:
            return "a part of the prompt, or all of it, is not given as token ids"
        if self.kwargs.get("synced_gpus"):
            return "several machines compute in step"
        if getattr(self.model, "_is_stateful", False):
            if self.config.output_hidden_states or self.config.output_attentions:
                return "states of tokens that are read again would be returned"
            is_usual = len(self.requests) > 1 or usual_inputs(self.model, self.input_ids, self.kwargs) is not None
            if self.requests[0].num_cached or not is_usual:
                return "its recurrent states are taken back only in requests for text with a cache of their own"
        cache = self.kwargs.get("past_key_values")
        layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
        if not all(hasattr(layer, "crop") for layer in layers):
            return f"tokens cannot be removed from a {type(cache).__name__}"
        # The hook replaces the method where it is defined.
        owner = next(cls for cls in type(self.model).__mro__ if "_assisted_decoding" in vars(cls))
        if owner is not GenerationMixin:
            return f"{owner.__name__} has a loop of its own"
        source = self.kwargs.get("inputs_tensor")
        for drafting in self.draftings:
            if self.model.config.is_encoder_decoder and not drafting.reads(source):
                return "the draft cannot read the source of the prompt"
            if why := drafting.hindrance():
                return why
        return None

    def _batch_hindrance(self) -> str | None:
        """Return why the rows of a batch cannot be decoded independently; `None` if they can."""
        processors = self.kwargs["logits_processor"]
        if self._undrafted is not None:
            return self._undrafted
        if self.kwargs.get("streamer") is not None:
            return "a batch is streamed"
        if self.config.return_dict_in_generate:
            return "more than tokens is asked for (`return_dict_in_generate`)"
        if any(type(p) is ReplayedProcessor for p in processors):
            return "a processor is replayed"
        if not all(map(takes_any_token, processors)):
            return "a processor may not take rows that are shorter than others"
        if not all(request.prompts for request in self.requests):
            return "prompts are not token ids alone"
        if why := self._rows_hindrance():
            return why
        drafts = {id(d.draft): d.draft for d in self.draftings if not (d.state_layers or layers_with_state(d.draft))}
        for name, model in (("the target", self.model), *(("the draft", draft) for draft in drafts.values())):
            if why := checks.batch_hindrance(model):
                return f"{name} cannot hold rows that continue independently: {why}"
        return None

    def _rows_hindrance(self) -> str | None:
        """Return why this call's rows cannot be in a cache where each token is at the column of its position."""
        cache, limits, most = self.kwargs.get("past_key_values"), self.limits, self.config.max_length
        if self.kwargs.get("mm_encoder_outputs") is not None:
            return "a multimodal model numbers the positions of a batch by itself"
        if others := list(checks.given_arguments(self.kwargs)):
            return f"`{others[0]}` was given"
        if checks.adapter_arguments(self.model):
            return (
                "PEFT uses an adapter for each row (`adapter_names`, or aLoRA), and rows leave the batch as they end"
            )
        if not isinstance(cache, DynamicCache) or cache.offloading or cache.get_seq_length():
            return "the cache is not one of the request's own"
        if not _is_padded_left(self.kwargs, self.input_ids):
            return "prompts are not token ids behind padding"
        # These forwards do not read the prompt again, so requests that may cross such a length are excluded.
        if not limits.allow_any(self.input_ids.shape[1], most - 1) or most > limits.max_length + 1:
            return f"of {type(self.model).__name__}, {limits.reason}"
        return None

    # --- drafts ---

    def draft_sources(self, loop: Loop) -> list[DraftSource]:
        """Return the drafts of the rows that have not ended, each for its rows. A draft that fails is left out."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row in loop.live:
            draft = self.draftings[row].draft
            # A draft with recurrent layers reads each row by itself.
            groups.setdefault((id(draft), row if layers_with_state(draft) else -1), []).append(row)
        sources = []
        for rows in groups.values():
            drafting = self.draftings[rows[0]]
            try:
                source = self._draft_source(loop, drafting, rows)
            except Exception as error:  # noqa: BLE001 - of drafts of any kind
                self.draft_failed(rows, error)
                continue
            sources += [] if source is None else [source]
        return sources

    def _draft_source(self, loop: Loop, drafting: Drafting, rows: list[int]) -> DraftSource | None:
        texts = [loop.rows[number].tokens for number in rows]
        states = [loop.rows[number].states for number in rows]
        if drafting.state_layers and not loop.state_layers:
            return None
        forward = drafting.forward(self.kwargs, texts, int(self.config.max_length), states)
        if forward is None:
            return None
        return DraftSource(
            forward,
            rows,
            loop.processors,
            vocab_size=loop.vocab_size,
            do_sample=loop.do_sample,
            ends_with=loop.ends_with,
            token_ids=drafting.model()[1],
            max_positions=drafting.max_positions,
            clock=self.clock,
        )

    def draft_failed(self, rows: Sequence[int], error: Exception) -> None:
        """Log the failure of the draft of these rows; raise the error again if the draft is the caller's own."""
        if isinstance(error, OSDError) or not self.is_served:
            raise error
        draft = self.draftings[rows[0]].draft
        checks.log_once(draft, f"The draft failed; the answer continues without it: {first_line(error)}.")
        logger.debug("The draft failed.", exc_info=error)

    # --- without a draft ---

    def decode_alone(self, *, is_usual: bool = True) -> Any:
        """Let the target decode by transformers' own loop, and record its rows. Unusual calls are not timed."""
        times, requests = list[float](), self.requests

        def record(_: Tensor, scores: Tensor) -> Tensor:
            times.append(self.clock())
            kept = scores.clone() if any(request.rows.parts for request in requests) else scores
            for i, request in enumerate(requests):
                if request.rows.parts:
                    request.rows.add(kept[i : i + 1])
            return scores

        criteria = _RecordedCriteria(self.kwargs["stopping_criteria"])
        kwargs = {name: value for name, value in self.kwargs.items() if name not in checks.ASSISTED_ONLY}
        kwargs["logits_processor"] = LogitsProcessorList([record, *self.kwargs["logits_processor"]])
        output = self.model._sample(self.input_ids, **{**kwargs, "stopping_criteria": criteria})
        sequences = output if isinstance(output, Tensor) else output.sequences
        begins = self.input_ids.shape[1]
        total = sequences.shape[1] - begins
        ends = [total] * len(requests)
        if len(requests) > 1:
            done = torch.stack([met.expand(len(requests)) for met in criteria.met[:total]]).cpu()
            ends = done.int().argmax(0).add(1).where(done.any(0), total).tolist()
        for i, (request, end) in enumerate(zip(requests, ends, strict=True)):
            request.sequence = sequences[i : i + 1, : begins + end]
            request.rounds = [Round((), 1)] * end
        if len(times) > 1 and is_usual and self.length is not None:
            rounds = len(times) - 1
            time = RoundTime(seconds=(times[-1] - times[0]) / rounds, rounds=rounds)
            self.length.took(time, sum(ends) - len(ends))
        return output

    def _check_watched(self) -> None:
        if len(self.requests) > 1:
            raise UnsupportedGenerationError(
                f"Candidates that transformers makes are counted for one prompt at a time, got {len(self.requests)}."
            )
        if getattr(self.model, "_is_stateful", False):  # the other loop does not take all of its states back
            raise UnsupportedGenerationError(
                f"{type(self.model).__name__} has recurrent states, with which transformers does not draft. Pass an "
                "`assistant_model` without such a mode."
            )

    def watch(self, decode: Callable[..., Any]) -> Any:
        """Let transformers decode with candidates of its own, and record rounds and rows."""
        owners, before = _enter(type(self.model), _CANDIDATES), _watching.set(self)
        try:
            output = decode(self.model, self.input_ids, **self.kwargs)
        finally:
            _watching.reset(before)
            _leave(owners, _CANDIDATES)
        request = self.requests[0]
        request.sequence = output if isinstance(output, Tensor) else output.sequences
        request.trim(request.sequence.shape[1] - self.input_ids.shape[1])
        return output

    # --- the end ---

    def close(self) -> None:
        """Release the target's cache, whether the call ended well or not."""
        if self.target is not None:
            self.target.close()


def takes_any_token(processor: Any) -> bool:
    """Whether a processor may be called behind tokens that it forbids: those of transformers, except
    `prefix_allowed_tokens_fn`, which calls a function of the user."""
    own = type(processor) is not PrefixConstrainedLogitsProcessor
    return own and type(processor).__module__ == LogitsProcessor.__module__


class _Watched(CandidateGenerator):
    """A candidate generator of transformers whose rounds are recorded."""

    def __init__(self, inner: CandidateGenerator, call: Call) -> None:
        self.inner, self.request, self.do_sample = inner, call.requests[0], bool(call.config.do_sample)
        self.requires_model_outputs = inner.requires_model_outputs
        self.model_kwargs_overrides = inner.model_kwargs_overrides
        self.rows: list[Tensor] | None = None  # of the target, as it verifies
        self.drafted, self.logits = call.input_ids[0, :0], None
        call.kwargs["logits_processor"].insert(0, self.record)

    def record(self, _: Tensor, scores: Tensor) -> Tensor:
        """Keep the target's row before it is processed; rows of the draft are processed in `get_candidates`."""
        if self.rows is not None:
            self.rows.append(scores.clone())
        return scores

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        self.rows = None
        ids, self.logits = self.inner.get_candidates(input_ids, **kwargs)
        self.drafted, self.rows = ids[0, input_ids.shape[1] :], []
        return ids, self.logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        self.inner.update_candidate_strategy(input_ids, scores, num_matches)
        p = q = None
        if self.logits is not None and self.do_sample:
            q, p = (
                logits[0, : len(self.drafted)].softmax(-1).gather(-1, self.drafted[:, None])[:, 0]
                for logits in (self.logits, scores)
            )
        count = int(num_matches) + 1
        self.request.rounds.append(Round(self.drafted.tolist(), count, p=p, q=q))
        for row in (self.rows or ())[:count] if self.request.rows.parts else ():
            self.request.rows.add(row)


class _RecordedCriteria(StoppingCriteriaList):
    """The target's stopping criteria, whose results are kept."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self.met: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        met: Tensor = super().__call__(input_ids, scores, **kwargs)
        self.met.append(met)
        return met


def _is_padded_left(kwargs: dict[str, Any], input_ids: Tensor) -> bool:
    """Whether the mask hides only padding before each prompt, and positions are counted behind it."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and (mask.shape != input_ids.shape or not bool(mask[:, -1].all() & (mask.diff() >= 0).all())):
        return False
    counted = (torch.ones_like(input_ids) if mask is None else mask.long()).cumsum(-1) - 1
    return positions is None or bool((positions == counted.clamp(min=0)).all())


# --- capture alone --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def capture_traces(
    target: Any, sink: Sink, *, num_logprobs: int | None = 64, domain: str | None = None
) -> Iterator[None]:
    """
    Give `sink` one [`Trace`] for every assisted `generate` on `target` inside the `with` block. Any draft works, and
    nothing is learned. Greedy output is unchanged. Sampled output has the same distribution, but other tokens for one
    seed, because the loop of this package decodes. With `use_mtp` or `speculation_type="dflash"`, transformers decodes
    one prompt at a time with candidates of its own, which are counted. Only requests of this context (thread or task)
    are seen; start other threads with `contextvars.copy_context().run`.

    Args:
        target (`PreTrainedModel`): The model that `generate` is called on; also a `PeftModel` or a compiled model.
        sink (`Callable[[Trace], object]`): Called once per request, when it is complete; such as a store's `append`.
        num_logprobs (`int`, *optional*, defaults to 64): Target entries stored per position; `None` stores full rows.
        domain (`str`, *optional*): Label written into the traces.

    Raises:
        ConfigError: `num_logprobs` is below 1.
        UnsupportedModelError: The target has no `generate`.
        UnsupportedGenerationError: A request has no draft to watch, or is lossy; or transformers makes the candidates
            of several prompts or of a target with recurrent states.
        CaptureError: On exit, if the sink has failed; every answer was delivered.
    """
    if num_logprobs is not None and num_logprobs < 1:
        raise ConfigError(f"`num_logprobs` must be at least 1, or None for full rows, got {num_logprobs}.")
    failures: list[Exception] = []

    def deliver(traces: Sequence[Trace]) -> None:
        for trace in traces:
            try:  # a broken sink must not cost the answer
                sink(trace)
            except Exception as error:
                logger.exception(
                    "A trace sink failed; the answer is delivered, the error is raised when capture ends."
                )
                failures.append(error)

    lease = contextlib.nullcontext(Lease(domain=domain))
    binding = Binding(deliver, lambda *_: lease, owner=object(), num_logprobs=num_logprobs)
    binding.is_capture = True
    binding.undrafted = "Pass `assistant_model=` to the call."
    with bind(target, binding):
        yield
    warn_unused(target, binding, "`capture_traces`")
    if failures:
        raise CaptureError(
            f"The sink failed on a trace ({failures[0]!r}). Answers were delivered, and later traces were still "
            "offered. Correct the sink; the traces on which it failed are lost."
        ) from failures[0]
