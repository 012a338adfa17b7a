"""Traces of a target: of assisted requests, by a hook without an extra forward, of its own and of given answers."""

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
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList

from osd_hf.decoding.batch import BatchRequest
from osd_hf.decoding.checks import check_generation
from osd_hf.decoding.exactness import StandIn, log_once
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

_LOOP, _CALL = "_assisted_decoding", "generate"
# Settings that stay where a target answers by its own choice: which tokens are special, and how its cache is kept.
_OF_EACH_ANSWER = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "cache_implementation",
    "cache_config", "max_cache_len", "compile_config", "disable_compile", "transformers_version",
}  # fmt: skip
_bindings: ContextVar[tuple[Binding, ...]] = ContextVar("osd_hf_bindings", default=())
_answers: WeakKeyDictionary[Any, WeakMethod[Callable[..., Any]]] = WeakKeyDictionary()  # of models taken over
_answering: WeakSet[Any] = WeakSet()  # those of them that are being asked
_listeners: Counter[tuple[type, str]] = Counter()
_before: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # what our methods took the place of
_lock = threading.RLock()  # a forgotten block is left whenever its last reference goes


@contextlib.contextmanager
def bind(target: Any, binding: Binding) -> Iterator[None]:
    """Let `binding` listen to every assisted request that this context runs on `target`. The model itself, its class
    included, stays as it is."""
    model = unwrap(target)
    if not isinstance(model, GenerationMixin):
        raise UnsupportedModelError(
            f"Capture needs a transformers model with `generate`, got {type(model).__name__}. Load the target with a "
            "class that has a language modeling head, such as `AutoModelForCausalLM`."
        )
    owners = _enter(type(model))
    try:
        binding.target = model
        _bindings.set((*_living(), binding))
        yield
    finally:
        # Contexts copied inside the block outlive it, and it may be left in another context than it was entered in.
        binding.end()
        _bindings.set(_living())
        _leave(owners)


@contextlib.contextmanager
def taken_over(target: Any, answer: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, `target.generate(...)` without an assistant model is `answer(plain, ...)`, whoever calls it,
    where `plain` is what it would have been. The model itself, its class included, stays as it is. `answer` is a
    bound method; the block alone keeps neither its object nor the target."""
    model, asked = unwrap(target), WeakMethod(answer)
    del answer  # which this frame would keep
    owners = _enter(type(model), _CALL)
    try:
        _answers[model] = asked
        yield
    finally:
        _answers.pop(model, None)
        _leave(owners, _CALL)


@contextlib.contextmanager
def capture_traces(
    target: Any, sink: Sink, *, num_logprobs: int | None = 64, domain: str | None = None
) -> Iterator[None]:
    """
    Hand one [`Trace`] to `sink` for every assisted `generate` on `target` inside the `with` block. Nothing is learned,
    any draft will do, and the output is what it would have been. Only requests of this context (thread or task) are
    seen; start other threads with `contextvars.copy_context().run`. Sampled answers have the same distribution, though
    not the same tokens for one seed, as slips of transformers that spoil drafts are mended while somebody listens.

    Args:
        target (`PreTrainedModel`): The model that `generate` is called on; a `PeftModel` or a compiled model as well.
        sink (`Callable[[Trace], object]`):
            Called once a request, when its tokens are all there; a store's `append`, for instance.
        num_logprobs (`int`, *optional*, defaults to 64): Target entries kept per position; `None` keeps whole rows.
        domain (`str`, *optional*): Label written into the traces.

    Raises:
        ConfigError: `num_logprobs` below 1.
        UnsupportedModelError: the target cannot `generate`.
        UnsupportedGenerationError: a request uses a mode that has no draft model to watch, or is lossy.
        CaptureError: on exit, if the sink had failed; every answer was delivered.
    """
    if num_logprobs is not None and num_logprobs < 1:
        raise ConfigError(f"`num_logprobs` must be at least 1, or None for whole rows, got {num_logprobs}.")
    failures: list[Exception] = []

    def deliver(traces: Sequence[Trace]) -> None:
        for trace in traces:
            # An answer must not be lost to a broken sink.
            try:
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
            f"The sink failed on a trace ({failures[0]!r}); answers were delivered, traces after it were still "
            "offered. Mend the sink; what it did not take is not in the log."
        ) from failures[0]


# --- recordings -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def record_traces(
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int = 32,
    num_logprobs: int | None = 64,
    domain: str | None = None,
) -> Iterator[Trace]:
    """
    Record the target's greedy answer to each prompt, as traces without rounds. An answer ends at an `eos_token_id` or
    after `max_new_tokens`. Of the target's generation config, special tokens alone count: neither logits processors
    such as a `repetition_penalty`, nor `stop_strings`, nor sampling or beams.

    Prompts are answered in padded batches. In fp32 a batch may, once in many thousand tokens, break a tie of the top
    two logits otherwise than a single prompt does.

    Args:
        target (`PreTrainedModel`):
            Decoder-only or encoder-decoder.
        prompts (`Sequence[Sequence[int]]`): Token ids of each prompt.
        max_new_tokens (`int`): Bound of each answer.
        batch_size (`int`, *optional*, defaults to 32): Prompts answered at once.
        num_logprobs (`int`, *optional*, defaults to 64): Target entries kept per position; `None` keeps whole rows.
        domain (`str`, *optional*): Label written into the traces.

    Yields:
        `Trace`: in the order of the prompts.

    Raises:
        ConfigError: an empty prompt.
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
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens,
                logits_processor=LogitsProcessorList([recorder]),
            )  # fmt: skip
        sequences = output.cpu().numpy().astype(np.int32)
        start = sequences.shape[1] - len(recorder.steps)
        rows = recorder.rows(size)
        for row, prompt in enumerate(batch):
            answer = until_end(sequences[row, start:], target.generation_config)
            start_ids = sequences[row, :start] if is_encoder_decoder else None
            top_logits, top_ids, tail = (part[row, : len(answer)].copy() for part in rows)
            yield Trace(
                prompt_ids=np.asarray(prompt, dtype=np.int32), decoder_prompt_ids=start_ids, completion_ids=answer,
                rounds=(), top_logits=top_logits, top_ids=top_ids, tail_logprob=tail, vocab_size=size,
                domain=domain, sampling=sampling, created_at_seconds=time.time(), target=version,
            )  # fmt: skip


@contextlib.contextmanager
def own_choice(target: Any) -> Iterator[None]:
    """
    Inside the block, the target's generation config sets no more than special tokens and how caches are kept.

    A draft learns the target's raw rows. Settings that change them (logits processors), end answers (`stop_strings`,
    `max_time`) or choose another way to generate (beams, prompt lookup) do so for target and draft alike at serving
    time.
    """
    inner = unwrap(target)
    before = inner.generation_config
    inner.generation_config = copy.deepcopy(before)
    for name, default in vars(GenerationConfig()).items():
        if name not in _OF_EACH_ANSWER and not name.startswith("_"):
            setattr(inner.generation_config, name, default)
    asked = sampling_settings(before).keys() - {"do_sample", "eos_token_id", *NO_WARPING}
    asked |= {name for name in ("stop_strings", "guidance_scale") if getattr(before, name) is not None}
    if asked:
        log_once(
            inner, "The target answers without what its generation config asks for, "
            f"{', '.join(f'`{name}`' for name in sorted(asked))}: a draft learns from its raw rows, and is judged by "
            "them.",
        )  # fmt: skip
    try:
        yield
    finally:
        inner.generation_config = before


class _Recorder(LogitsProcessor):
    """Cuts the raw rows of a batch down at each step: those of all steps, whole, would be gigabytes."""

    def __init__(self, num_logprobs: int | None) -> None:
        self.num_logprobs = num_logprobs
        self.steps: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps.append(compress_rows(scores, self.num_logprobs))
        return scores

    @neutral_context()
    def rows(self, vocab_size: int) -> tuple[NDArray[Any], ...]:
        """`top_logits`, `top_ids` and `tail_logprob` of [`Trace`]s, `(batch, steps, ...)`."""
        top_logits, top_ids, tail = (torch.stack(c, 1).cpu().numpy() for c in zip(*self.steps, strict=True))
        return top_logits, top_ids.astype(ids_dtype(vocab_size)), tail


def rescore(target: Any, traces: Sequence[Trace], *, batch_size: int = 8) -> list[Trace]:
    """
    The same prompts and answers with the rows of another target, by one teacher-forced pass over each: what was kept
    of an earlier version of a target can be learned from again. The answers stay those of the earlier one, so that
    nothing is judged by them: neither by the gate, nor by [`replay`], which refuses them.

    Args:
        target (`PreTrainedModel`): With the vocabulary of the traces.
        traces (`Sequence[Trace]`): Of any version; left as they are.
        batch_size (`int`, *optional*, defaults to 8): Traces per forward at most.

    Returns:
        `list[Trace]`: in the order of the traces, without rounds, with as many entries kept per position; those that
        have no rows are left as they are.

    Raises:
        VocabularyMismatchError: a trace of another vocabulary than the target's.
    """
    size, version = vocab_size_of(target), target_version(target)
    if odd := next((trace for trace in traces if trace.vocab_size != size), None):
        raise VocabularyMismatchError(
            f"A trace has a vocabulary of {odd.vocab_size} tokens, the target {size}. Leave it out."
        )
    known = [trace for trace in traces if trace.num_kept]
    widths = [trace.top_ids.shape[1] or None for trace in known]
    anew = dict(zip(known, scored(target, known, widths, batch_size), strict=True))
    for trace, one in anew.items():
        sampling = {**trace.sampling, "rescored": True}
        anew[trace] = replace(one, rounds=(), target=version, draft_version=0, sampling=sampling)
    return [anew.get(trace, trace) for trace in traces]


@torch.inference_mode()
def scored(target: Any, traces: Sequence[Trace], widths: Sequence[int | None], batch_size: int) -> list[Trace]:
    """Answered requests with the rows of a target in place of their own, so many entries kept of each (`None`: all),
    by one teacher-forced pass over each."""
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


# --- where requests are met -----------------------------------------------------------------------------------------
#
# `generate` looks its loop up on the type, and ignores a patched instance. A class of our own for the instance would
# do, but users copy, pickle, wrap and exchange the class of their model themselves meanwhile. So the loop is wrapped
# where it is defined, in `GenerationMixin` as a rule, while anybody listens to any model; what nobody listens to is
# passed on. So is `generate` itself, where calls without an assistant model are to be drafted for, too.


def _enter(cls: type, name: str = _LOOP) -> list[type]:
    """Listen where a method of a class is defined; returns those classes. A model's own loop may call that of a parent
    class: it does so on the stand-in of its request, which nobody listens to, so each request is captured once."""
    owners = [c for c in cls.__mro__ if name in vars(c)]
    with _lock:
        for owner in owners:
            method = vars(owner)[name]
            if method not in _before:
                ours = _listened_to(method) if name == _LOOP else _asked_first(method)
                _before[ours] = method
                setattr(owner, name, ours)
            _listeners[owner, name] += 1
    return owners


def _leave(owners: list[type], name: str = _LOOP) -> None:
    with _lock:
        for owner in owners:
            _listeners[owner, name] -= 1
            if not _listeners[owner, name]:
                del _listeners[owner, name]
                method = vars(owner).get(name)
                if method in _before:  # what others have put there meanwhile stays
                    setattr(owner, name, _before[method])


def _asked_first(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def asked_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = _answers.get(self)
        answer = None if found is None else found()
        # Nobody is asked twice: a model's own `generate` may call that of its parent.
        if answer is None or self in _answering or kwargs.get("assistant_model") is not None:
            return generate(self, *args, **kwargs)
        _answering.add(self)
        try:
            return answer(functools.partial(generate, self), *args, **kwargs)
        finally:
            _answering.discard(self)

    return asked_first


def _living() -> tuple[Binding, ...]:
    return tuple(binding for binding in _bindings.get() if binding.target is not None)


def _listening(model: Any) -> list[Binding]:
    innermost = {id(binding.owner): binding for binding in _bindings.get() if binding.target is model}
    return list(innermost.values())


def _listened_to(decode: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decode)  # `generate` inspects the signature of what it calls
    def _assisted_decoding(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        bindings = _listening(self)
        if not bindings:
            return decode(self, input_ids, **kwargs)
        check_generation(kwargs, kwargs["generation_config"])
        kwargs["logits_processor"] = _begun(kwargs["logits_processor"], input_ids)
        begins, criteria = input_ids.shape[1], kwargs["stopping_criteria"]
        kwargs["generation_config"] = bounded(kwargs["generation_config"], criteria, begins)
        request = (Request if input_ids.shape[0] == 1 else BatchRequest)(self, input_ids, kwargs, bindings)
        with request.served():
            try:
                if isinstance(request, BatchRequest):
                    output = request.decode()
                elif request.is_plain:
                    output = request.decode_plainly()
                else:
                    with default_device(input_ids.device):  # transformers' sampling looks p and q up by an `arange`
                        output = request.returned(decode(_WatchedModel(self, request), input_ids, **kwargs))
            finally:
                request.close()
        request.finish()
        return output

    return _assisted_decoding


def _begun(processors: LogitsProcessorList, input_ids: torch.Tensor) -> LogitsProcessorList:
    """The processors of one request: those with a memory are made anew for it."""
    start = input_ids.shape[1]
    return LogitsProcessorList(p.begin(start) if type(p) is ReplayedProcessor else p for p in processors)


class _Watched(StandIn):
    """A model or a generator as the loop of one request sees it. It belongs to the request: listeners that come or go
    in the meantime do not change the request."""

    __slots__ = ("_watched_by",)

    def __init__(self, watched: Any, request: Request) -> None:
        super().__init__(watched)
        object.__setattr__(self, "_watched_by", request)


class _WatchedModel(_Watched):
    __slots__ = ()

    @property
    def device(self) -> Any:
        """Where the loop puts candidates: weights that are offloaded lie nowhere, and tokens stay where they are."""
        device = self._original.device
        return self._watched_by.input_ids.device if device.type == "meta" else device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        verification = self._watched_by.verification
        if verification is not None and kwargs.get("past_key_values") is verification.cache:
            return verification.forward(**kwargs)
        return self._original(*args, **kwargs)

    def _get_candidate_generator(self, **kwargs: Any) -> Any:
        return _WatchedGenerator(self._watched_by.make_generator(**kwargs), self._watched_by)

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        verification = self._watched_by.verification
        if verification is not None and not kwargs.get("is_first_iteration"):
            if verification.begins(kwargs["past_key_values"], input_ids.shape[1] + 1):
                return verification.inputs(input_ids, kwargs["next_sequence_length"])
            if kwargs["past_key_values"] is verification.cache:
                kwargs["past_key_values"] = verification.given
        if self._watched_by.num_cached and kwargs.get("is_first_iteration"):
            # The loop feeds the whole prompt although a cache of an earlier turn holds most of it, which changes the
            # answer; `generate` without an assistant feeds the rest.
            kwargs["next_sequence_length"] = input_ids.shape[1] - self._watched_by.num_cached
        return self._original.prepare_inputs_for_generation(input_ids, *args, **kwargs)


class _WatchedGenerator(_Watched):
    __slots__ = ()

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._watched_by.propose(input_ids, **kwargs)  # type: ignore[no-any-return]

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        self._watched_by.end_round(input_ids, scores, num_matches)
