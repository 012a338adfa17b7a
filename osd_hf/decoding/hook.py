"""Capture a target's assisted requests by a hook without an extra forward, and record its own answers."""

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
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from osd_hf.decoding.batch import BatchRequest
from osd_hf.decoding.checks import StandIn, check_generation, log_once
from osd_hf.decoding.request import (
    NO_WARPING,
    Binding,
    Lease,
    Request,
    Rows,
    Sink,
    bounded,
    compress_rows,
    sampling_settings,
)
from osd_hf.errors import CaptureError, ConfigError, UnsupportedModelError, VocabularyMismatchError
from osd_hf.logits_processors import ReplayedProcessor
from osd_hf.models import input_device, until_end, unwrap, vocab_size_of
from osd_hf.replay import padded, raw_rows
from osd_hf.target_version import target_version
from osd_hf.trace import Trace, ids_dtype
from osd_hf.utils.context import default_device, neutral_context
from osd_hf.utils.kernels import fast_kernels

logger = logging.getLogger(__name__)

# Settings that stay when a target answers without the settings of its config: special tokens, and caches.
_BASIC_SETTINGS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "cache_implementation",
    "cache_config", "max_cache_len", "compile_config", "disable_compile", "transformers_version",
}  # fmt: skip

# --- the hook -------------------------------------------------------------------------------------------------------
#
# `generate` looks its loop up on the type, and ignores a patched instance. A subclass for the instance would break
# users who copy, pickle, or wrap their model. So the method is wrapped in the class that defines it, `GenerationMixin`
# as a rule, while any model has a listener. Requests without a listener are passed on.

_LOOP, _GENERATE = "_assisted_decoding", "generate"
_bindings: ContextVar[tuple[Binding, ...]] = ContextVar("osd_hf_bindings", default=())
_answers: WeakKeyDictionary[Any, WeakMethod[Callable[..., Any]]] = WeakKeyDictionary()  # of models taken over
_answering: WeakSet[Any] = WeakSet()  # those that are being asked
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
    try:
        binding.target = model
        _bindings.set((*_living(), binding))
        yield
    finally:
        # Copied contexts outlive the block, and it may end in another context than it began in.
        binding.end()
        _bindings.set(_living())
        _leave(owners, _LOOP)


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
    """Wrap a method in the classes that define it, and return these classes. If a model's own loop calls that of a
    parent class, it does so on a stand-in, which has no listeners: each request is captured once."""
    owners = [c for c in cls.__mro__ if name in vars(c)]
    with _lock:
        for owner in owners:
            method = vars(owner)[name]
            if method not in _original_methods:
                wrapped = _wrapped_loop(method) if name == _LOOP else _wrapped_generate(method)
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
        # A model's own `generate` may call that of its parent.
        if answer is None or self in _answering or kwargs.get("assistant_model") is not None:
            return generate(self, *args, **kwargs)
        _answering.add(self)
        try:
            return answer(functools.partial(generate, self), *args, **kwargs)
        finally:
            _answering.discard(self)

    return wrapped


def _living() -> tuple[Binding, ...]:
    return tuple(binding for binding in _bindings.get() if binding.target is not None)


def _listening(model: Any) -> list[Binding]:
    innermost = {id(binding.owner): binding for binding in _bindings.get() if binding.target is model}
    return list(innermost.values())


def _wrapped_loop(decode: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decode)  # `generate` inspects the signature
    def _assisted_decoding(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        bindings = _listening(self)
        if not bindings:
            return decode(self, input_ids, **kwargs)
        check_generation(kwargs, kwargs["generation_config"])
        prompt_tokens, criteria = input_ids.shape[1], kwargs["stopping_criteria"]
        kwargs["logits_processor"] = LogitsProcessorList(
            p.begin(prompt_tokens) if type(p) is ReplayedProcessor else p for p in kwargs["logits_processor"]
        )
        kwargs["generation_config"] = bounded(kwargs["generation_config"], criteria, prompt_tokens)
        request = (Request if input_ids.shape[0] == 1 else BatchRequest)(self, input_ids, kwargs, bindings)
        with request.served():
            try:
                if isinstance(request, BatchRequest):
                    output = request.decode()
                elif request.is_plain:
                    output = request.decode_plainly()
                else:
                    with default_device(input_ids.device):  # the loop's sampling creates an `arange`
                        output = request.returned(decode(_WatchedModel(self, request), input_ids, **kwargs))
            finally:
                request.close()
        request.finish()
        return output

    return _assisted_decoding


class _Watched(StandIn):
    """A model or a generator as the loop of one request sees it."""

    __slots__ = ("_request",)

    def __init__(self, watched: Any, request: Request) -> None:
        super().__init__(watched)
        object.__setattr__(self, "_request", request)


class _WatchedModel(_Watched):
    __slots__ = ()

    @property
    def device(self) -> Any:
        """The device of candidates. Offloaded weights have none."""
        device = self._original.device
        return self._request.input_ids.device if device.type == "meta" else device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        verification = self._request.verification
        if verification is not None and kwargs.get("past_key_values") is verification.cache:
            return verification.forward(**kwargs)
        return self._original(*args, **kwargs)

    def _get_candidate_generator(self, **kwargs: Any) -> Any:
        return _WatchedGenerator(self._request.make_generator(**kwargs), self._request)

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        verification = self._request.verification
        if verification is not None and not kwargs.get("is_first_iteration"):
            if verification.begins(kwargs["past_key_values"], input_ids.shape[1] + 1):
                return verification.inputs(input_ids, kwargs["next_sequence_length"])
            if kwargs["past_key_values"] is verification.cache:
                kwargs["past_key_values"] = verification.given
        if self._request.num_cached and kwargs.get("is_first_iteration"):
            # The loop would feed the entire prompt after the tokens of an earlier turn in the cache.
            kwargs["next_sequence_length"] = input_ids.shape[1] - self._request.num_cached
        return self._original.prepare_inputs_for_generation(input_ids, *args, **kwargs)


class _WatchedGenerator(_Watched):
    __slots__ = ()

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._request.propose(input_ids, **kwargs)  # type: ignore[no-any-return]

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        self._request.end_round(input_ids, scores, num_matches)


@contextlib.contextmanager
def capture_traces(
    target: Any, sink: Sink, *, num_logprobs: int | None = 64, domain: str | None = None
) -> Iterator[None]:
    """
    Give `sink` one [`Trace`] for every assisted `generate` on `target` inside the `with` block. Any draft works, and
    nothing is learned. Greedy output is unchanged. Sampled output has the same distribution, but other tokens for one
    seed, because two bugs of transformers that spoil drafts are worked around. Only requests of this context (thread
    or task) are seen; start other threads with `contextvars.copy_context().run`.

    Args:
        target (`PreTrainedModel`): The model that `generate` is called on; also a `PeftModel` or a compiled model.
        sink (`Callable[[Trace], object]`): Called once per request, when it is complete; such as a store's `append`.
        num_logprobs (`int`, *optional*, defaults to 64): Target entries stored per position; `None` stores full rows.
        domain (`str`, *optional*): Label written into the traces.

    Raises:
        ConfigError: `num_logprobs` is below 1.
        UnsupportedModelError: The target has no `generate`.
        UnsupportedGenerationError: A request has no draft model to watch, or is lossy.
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
    with bind(target, Binding(deliver, lambda *_: lease, owner=object(), num_logprobs=num_logprobs)):
        yield
    if failures:
        raise CaptureError(
            f"The sink failed on a trace ({failures[0]!r}). Answers were delivered, and later traces were still "
            "offered. Correct the sink; the traces on which it failed are lost."
        ) from failures[0]


# --- recordings of the target's own answers -------------------------------------------------------------------------


@torch.no_grad()
def record_traces(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int = 32,
    num_logprobs: int | None = 64,
    domain: str | None = None,
) -> Iterator[Trace]:
    """
    Record the target's greedy answer to each prompt, as traces without rounds. Of the target's generation config, only
    special tokens count.

    Prompts are answered in padded batches. In fp32, a batch may rarely break a tie of the top two logits in another
    way than a single prompt does.

    Args:
        target (`PreTrainedModel`): Decoder-only or encoder-decoder.
        prompts (`Sequence[Sequence[int]]`): Token ids of each prompt.
        max_new_tokens (`int`): Maximum length of each answer.
        batch_size (`int`, *optional*, defaults to 32): Prompts per batch.
        num_logprobs (`int`, *optional*, defaults to 64): Target entries stored per position; `None` stores full rows.
        domain (`str`, *optional*): Label written into the traces.

    Yields:
        `Trace`: In the order of the prompts.

    Raises:
        ConfigError: A prompt is empty.
    """
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"Prompt {i} is empty; every prompt needs at least one token.")
    is_encoder_decoder, size = target.config.is_encoder_decoder, vocab_size_of(target)
    sampling = {"max_new_tokens": max_new_tokens, "processors": []}
    sampling["eos_token_id"] = target.generation_config.eos_token_id
    for first in range(0, len(prompts), batch_size):
        batch, version = prompts[first : first + batch_size], target_version(target)
        ids, mask = padded(batch, "right" if is_encoder_decoder else "left", input_device(target))
        recorder = _Recorder(num_logprobs)
        with fast_kernels(unwrap(target)), own_choice(target):
            output = target.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                logits_processor=LogitsProcessorList([recorder]),
            )
        sequences = output.cpu().numpy().astype(np.int32)
        start = sequences.shape[1] - len(recorder.steps)
        rows = recorder.rows(size)
        for row, prompt in enumerate(batch):
            answer = until_end(sequences[row, start:], target.generation_config)
            top_logits, top_ids, tail = (part[row, : len(answer)].copy() for part in rows)
            yield Trace(
                prompt_ids=np.asarray(prompt, dtype=np.int32),
                decoder_prompt_ids=sequences[row, :start] if is_encoder_decoder else None,
                completion_ids=answer,
                rounds=(),
                top_logits=top_logits,
                top_ids=top_ids,
                tail_logprob=tail,
                vocab_size=size,
                domain=domain,
                sampling=sampling,
                created_at_seconds=time.time(),
                target=version,
            )


@contextlib.contextmanager
def own_choice(target: Any) -> Iterator[None]:
    """Inside the block, the target's generation config has special tokens and cache settings only. A draft learns the
    target's raw rows; other settings apply to target and draft alike when they serve."""
    inner = unwrap(target)
    before = inner.generation_config
    inner.generation_config = copy.deepcopy(before)
    for name, default in vars(GenerationConfig()).items():
        if name not in _BASIC_SETTINGS and not name.startswith("_"):
            setattr(inner.generation_config, name, default)
    ignored = sampling_settings(before).keys() - {"do_sample", "eos_token_id", *NO_WARPING}
    ignored |= {name for name in ("stop_strings", "guidance_scale") if getattr(before, name) is not None}
    if ignored:
        log_once(
            inner,
            f"The target answers without {', '.join(f'`{name}`' for name in sorted(ignored))} of its generation "
            "config: a draft learns from its raw rows, and is judged by them.",
        )
    try:
        yield
    finally:
        inner.generation_config = before


class _Recorder(LogitsProcessor):
    """Compress the raw rows of a batch at each step, because all of them would be gigabytes."""

    def __init__(self, num_logprobs: int | None) -> None:
        self.num_logprobs = num_logprobs
        self.steps: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps.append(compress_rows(scores, self.num_logprobs))
        return scores

    @neutral_context()
    def rows(self, vocab_size: int) -> tuple[NDArray[Any], ...]:
        """Return `top_logits`, `top_ids` and `tail_logprob` of [`Trace`]s, `(batch, steps, ...)`."""
        top_logits, top_ids, tail = (torch.stack(c, 1).cpu().numpy() for c in zip(*self.steps, strict=True))
        return top_logits, top_ids.astype(ids_dtype(vocab_size)), tail


def rescore(target: PreTrainedModel, traces: Sequence[Trace], *, batch_size: int = 8) -> list[Trace]:
    """
    Return traces with the rows of another target, by one forward over each prompt and answer. Drafts can learn from
    them. The answers are those of the earlier target, so the traces have no rounds, and [`replay`] refuses them.

    Args:
        target (`PreTrainedModel`): A target with the vocabulary of the traces.
        traces (`Sequence[Trace]`): Traces of any version. Those without rows are returned as they are.
        batch_size (`int`, *optional*, defaults to 8): Maximum number of traces per forward.

    Raises:
        VocabularyMismatchError: A trace has another vocabulary.
    """
    size, version = vocab_size_of(target), target_version(target)
    if odd := next((trace for trace in traces if trace.vocab_size != size), None):
        raise VocabularyMismatchError(
            f"A trace has a vocabulary of {odd.vocab_size} tokens, the target {size}. Leave it out."
        )
    known = [trace for trace in traces if trace.num_kept]
    widths = [trace.top_ids.shape[1] or None for trace in known]
    rescored = dict(zip(known, scored(target, known, widths, batch_size), strict=True))
    for trace, new in rescored.items():
        sampling = {**trace.sampling, "rescored": True}
        rescored[trace] = replace(new, rounds=(), target=version, draft_version=0, sampling=sampling)
    return [rescored.get(trace, trace) for trace in traces]


@torch.inference_mode()
def scored(
    target: PreTrainedModel, traces: Sequence[Trace], widths: Sequence[int | None], batch_size: int
) -> list[Trace]:
    """Return traces with the rows of a target, by one forward over each. `widths` are the entries stored per row."""
    found = list(traces)
    for i, first, part in raw_rows(target, traces, batch_size):
        trace, width = traces[i], widths[i]
        if first == 0:
            rows = Rows({width})
        rows.add(part)
        if first + len(part) == len(trace):
            top_logits, top_ids, tail = rows.stored(width, len(trace), trace.vocab_size)
            found[i] = replace(trace, top_logits=top_logits, top_ids=top_ids, tail_logprob=tail)
    return found
