"""The hook: one `Trace` for every assisted `generate` on a target, without an extra forward of either model."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationMixin

from osd_hf.arguments import num_cached, prompt_ids
from osd_hf.capture import Binding, Request, Sink
from osd_hf.errors import CaptureError, ConfigError, UnsupportedModelError
from osd_hf.guards import check_generation
from osd_hf.processors import begin_processors
from osd_hf.wrappers import unwrap

__all__ = ["bind", "capture_traces"]

_bindings: ContextVar[tuple[tuple[Any, Binding], ...]] = ContextVar("osd_hf_bindings", default=())
_request: ContextVar[Request | None] = ContextVar("osd_hf_request", default=None)


@contextlib.contextmanager
def bind(target: Any, binding: Binding) -> Iterator[Binding]:
    """Let `binding` listen to every assisted request that this context runs on `target`; the model is as before on
    exit."""
    model = unwrap(target)
    if not isinstance(model, GenerationMixin):
        raise UnsupportedModelError(
            f"Capture needs a transformers model with `generate`, got {type(model).__name__}. Load the target with a "
            "class that has a language modeling head, such as `AutoModelForCausalLM`."
        )
    _seat(model)
    token = _bindings.set((*_bindings.get(), (model, binding)))
    try:
        yield binding
    finally:
        try:
            _bindings.reset(token)
        finally:  # left in another context than entered, the token is refused; the model is put back all the same
            _unseat(model)


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
        target (`PreTrainedModel`):
            The model that `generate` is called on; a `PeftModel` or a compiled model as well.
        sink (`Callable[[Trace], object]`):
            Called once a request, when its tokens are all there; a store's `append`, for instance.
        num_logprobs (`int`, *optional*, defaults to 64):
            Target entries kept per position; `None` keeps whole rows.
        domain (`str`, *optional*):
            Label written into the traces.

    Raises:
        ConfigError: `num_logprobs` below 1.
        UnsupportedModelError: the target cannot `generate`.
        UnsupportedGenerationError: a request uses a mode that has no draft model to watch, or is lossy.
        CaptureError: on exit, if the sink had failed; every answer was delivered.
    """
    if num_logprobs is not None and num_logprobs < 1:
        raise ConfigError(f"`num_logprobs` must be at least 1, or None for whole rows, got {num_logprobs}.")
    binding = Binding(sink, owner=object(), num_logprobs=num_logprobs, domain=domain)
    with bind(target, binding):
        yield
    if binding.failure is not None:
        raise CaptureError(
            f"The sink failed on a trace ({binding.failure!r}); answers were delivered, traces after it were still "
            "offered. Mend the sink; what it did not take is not in the log."
        ) from binding.failure


class _Captured:
    """Mixed in front of a target's class while somebody listens."""

    @functools.wraps(GenerationMixin._assisted_decoding)  # `generate` inspects the signature of what it calls
    def _assisted_decoding(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        bindings = _listening(self)
        if not bindings or input_ids.shape[0] != 1:  # batches are refused there
            return super()._assisted_decoding(input_ids, **kwargs)  # type: ignore[misc]
        check_generation(kwargs["generation_config"], assistant_tokenizer=kwargs.get("assistant_tokenizer"))
        vocab_size = self.config.get_text_config().vocab_size  # type: ignore[attr-defined]
        kwargs["logits_processor"] = begin_processors(kwargs["logits_processor"], input_ids, vocab_size)
        # The length at which the loop ends is moved round by round; the config is the caller's to see.
        kwargs["generation_config"] = copy.copy(kwargs["generation_config"])
        with contextlib.ExitStack() as stack:
            prefix_unseen = num_cached(self, input_ids, kwargs) is None
            prompts = prompt_ids(self, input_ids, kwargs, prefix_unseen=prefix_unseen)
            prompt = None if prompts is None else prompts[0]
            leases = [stack.enter_context(b.lease(kwargs.get("assistant_model"), prompt)) for b in bindings]
            for lease in leases:
                if lease.model is not None:
                    kwargs["assistant_model"] = lease.model
            request = Request(self, input_ids, kwargs, bindings, leases, prompts)
            token = _request.set(request)
            try:
                if request.pace is not None and request.pace.is_plain():
                    output = request.decode_plainly(super()._sample, kwargs)  # type: ignore[misc]
                else:
                    output = super()._assisted_decoding(input_ids, **kwargs)  # type: ignore[misc]
            finally:
                _request.reset(token)
                request.close()
        request.finish()
        return output

    @functools.wraps(GenerationMixin._get_candidate_generator)
    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        request = _request.get()
        if request is None or request.model is not self:
            return super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]
        generator = request.lean_generator(**kwargs)
        if generator is None:
            generator = super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]
        request.watch(generator, kwargs["logits_processor"])
        return generator


@functools.cache
def _captured_class(cls: type) -> type:
    @functools.wraps(cls.prepare_inputs_for_generation)  # type: ignore[attr-defined]  # `generate` inspects this one as well
    def prepare_inputs_for_generation(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        request = _request.get()
        if request is not None and request.model is self and request.num_cached and kwargs.get("is_first_iteration"):
            # The loop feeds the whole prompt although a cache of an earlier turn holds most of it, which changes the
            # answer; `generate` without an assistant feeds the rest.
            kwargs["next_sequence_length"] = input_ids.shape[1] - request.num_cached
        return cls.prepare_inputs_for_generation(self, input_ids, *args, **kwargs)  # type: ignore[attr-defined]

    # Name, qualified name and module stay: saved `architectures` and registries inside transformers read them.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    methods = {"prepare_inputs_for_generation": prepare_inputs_for_generation}
    return type(cls.__name__, (_Captured, cls), {**names, **methods})


_seats: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_seats_lock = threading.Lock()


def _seat(model: Any) -> None:
    # Methods are looked up on the type, so the instance's class is exchanged, once for all listeners and threads.
    with _seats_lock:
        if _seats.get(model, 0) == 0:
            seat: Any = type(model)
            model.__class__ = _captured_class(seat)
        _seats[model] = _seats.get(model, 0) + 1


def _unseat(model: Any) -> None:
    with _seats_lock:
        _seats[model] -= 1
        if _seats[model] == 0:
            del _seats[model]
            model.__class__ = type(model).__mro__[2]


def _listening(model: Any) -> list[Binding]:
    innermost = {id(binding.owner): binding for bound, binding in _bindings.get() if bound is model}
    return list(innermost.values())
