"""What `custom_generate/` of a draft's repo is made of: assisted generation by plain transformers."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import sys
import threading
import time
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
)

from osd_hf.drafting.exactness import known_limits
from osd_hf.drafting.generator import Drafting, LeanCandidateGenerator
from osd_hf.drafting.loop_inputs import (
    ASSISTED_ONLY,
    CROPPED_CACHES,
    IRRELEVANT,
    SERVED,
    WatchedProcessors,
    bounded,
    cut,
    forgets,
    looked_at_by_token,
    plain_time,
    setting,
)
from osd_hf.drafting.pacing import Pacer
from osd_hf.pair import vocab_size_of
from osd_hf.utils.kernels import fast_kernels, leave_others

logger = logging.getLogger(__name__)

REPO: str | None = None  # of the draft, where nobody says where this file comes from
# What `generate` hands on, with which this file was loaded: the draft is as well.
LEAST = (5, 20)  # of transformers
LOADING = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")

clock = time.perf_counter
# What is kept from call to call, as long as the target lives: drafts by where they come from; what was measured with
# each draft. No text, no tensor of any request.
_drafts: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
_pacers: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Pacer]] = WeakKeyDictionary()
_lock = threading.Lock()


def _renew() -> None:
    """In a process forked from this one nobody holds a lock that another thread held there."""
    global _lock
    _lock = threading.Lock()
    _pacers.clear()
    leave_others()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)

if tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2])) < LEAST:
    raise ImportError(
        f"This file needs transformers {LEAST[0]}.{LEAST[1]} or newer, and {transformers.__version__} is installed: "
        "pip install --upgrade transformers"
    )


def generate(model: Any, assistant_model: Any = None, **arguments: Any) -> Any:
    """
    What `model.generate(**arguments)` returns, sooner. One prompt, greedy or sampled, is answered with guesses of the
    draft and of the request's own text, which the model verifies; anything else (batches, beams, a cache of an earlier
    turn, embeddings or images, processors and criteria that are not transformers' own) by the model's own `generate`.
    Where the draft fails, the log says so, and the answer goes on without it.

    Args:
        model (`PreTrainedModel`): The target. It is as it was when the answer is there; where memory allows, a copy of
            its weights in the order that products compute in is kept for the next answer, as long as it lives.
        assistant_model (`PreTrainedModel`, *optional*):
            The draft, with the target's tokens; by default the one beside this file, loaded once for a target.

    Raises:
        ValueError: the draft has another vocabulary than the model, or only one of them is an encoder-decoder.
    """
    loading = {name: arguments.pop(name) for name in LOADING if name in arguments}
    kind: Any = type(model)
    # Looked up on the class: a model that was loaded with this file has it as its own `generate`.
    alone = functools.partial(kind.generate, model, **arguments)
    source = _source(model, sys._getframe(1))
    why = _unserved(model, arguments)
    if why is None and assistant_model is None and source is None:
        why = "there is no draft"
    if why is not None:
        logger.info("Answered by the model's own `generate`: %s.", why)
        return alone()
    draft = _own_draft(model, source, loading) if assistant_model is None else assistant_model
    _check(model, draft)
    assisted = _assisted(kind)
    # The model as another object, of a class with our loop, which ends with the call: nothing is written to its own.
    twin: Any = object.__new__(assisted)
    vars(twin).update(vars(model), _drafts_with=(_Drafting(draft, clock), _pacer(model, draft)))
    with fast_kernels(model, draft, is_request=True):
        return assisted.generate(twin, assistant_model=draft, **arguments)


def _source(model: Any, caller: Any) -> Any:
    """Where the draft lies: what `generate` was called with as `custom_generate`, as transformers runs a copy of this
    file. `None` where that is not known, and where the model itself is the draft."""
    if caller.f_code is inspect.unwrap(GenerationMixin.generate).__code__:
        source = caller.f_locals["custom_generate"]
        return None if source == model.name_or_path else source
    return None if "generate" in vars(model) else REPO  # it was loaded with this file as its own


def _unserved(model: Any, arguments: dict[str, Any]) -> str | None:
    """A setting that assisted answers may not heed, or what else leaves them to the model; `None` if nothing does."""
    if getattr(model, "_is_stateful", False):
        return "the model is stateful"
    prompts = (arguments.get("inputs"), arguments.get("input_ids"))
    if any(prompt is not None and len(prompt) > 1 for prompt in prompts):
        return "a batch"
    usual = {**vars(GenerationConfig()), **GenerationConfig._get_default_generation_params()}
    for name in usual.keys() - SERVED - IRRELEVANT:
        value = setting((arguments, arguments.get("generation_config"), model.generation_config), name)
        harmless = CROPPED_CACHES if name == "cache_implementation" else (None, usual[name])
        if not name.startswith("_") and value not in harmless:
            return f"`{name}={value!r}`"
    return None


def _own_draft(model: Any, source: Any, loading: dict[str, Any]) -> Any:
    """The draft beside this file, of the same commit, in the model's dtype and on its device."""
    if commit := re.search(r"\.([0-9a-f]{40})\.custom_generate\.\w+$", __name__):
        loading = {"revision": commit[1], **loading}
    with _lock:
        known, key = _drafts.setdefault(model, {}), (source, loading.get("revision"))
        if key not in known:
            auto = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM
            known[key] = auto.from_pretrained(source, dtype=model.dtype, **loading)  # runs no code of the repo
        device = model.device
        return known[key].to("cpu" if device.type == "meta" else device)


def _check(model: Any, draft: Any) -> None:
    """Raises ValueError for a draft that cannot draft for the model."""
    ours, theirs = ((vocab_size_of(m), m.config.is_encoder_decoder) for m in (model, draft))
    if ours != theirs:
        said = [f"{size} tokens{' (encoder-decoder)' if both else ''}" for size, both in (ours, theirs)]
        raise ValueError(
            f"The draft has {said[1]}, the model {said[0]}: it drafts for another model. Leave out `custom_generate`, "
            "or pass a draft with the model's tokens as `assistant_model`."
        )


def _pacer(model: Any, draft: Any) -> Pacer:
    with _lock:
        return _pacers.setdefault(model, WeakKeyDictionary()).setdefault(draft, Pacer())


# --- one call -------------------------------------------------------------------------------------------------------


class _Generator(LeanCandidateGenerator):
    """Ends candidates where a criterion ends the answer."""

    def ends(self, criteria: Any, config: Any) -> None:
        """Candidates end by these criteria; `config` is that of the loop."""
        self._criteria, self._config = looked_at_by_token(criteria), config

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        candidates = super().get_candidates(input_ids, **kwargs)
        if not self._criteria:
            return candidates
        return cut(input_ids.shape[1], candidates, self._criteria, self._config, self.max_length)


class _Drafting(Drafting):
    """Whose generators go on without a draft that fails."""

    def _candidates(self, forward: Any, *args: Any, **kwargs: Any) -> LeanCandidateGenerator:
        return _Generator(forward, *args, **kwargs)


@functools.cache
def _assisted(kind: Any) -> Any:
    """A class of models whose assisted loop is ours. Its name and module are those of `kind`, by which transformers
    knows models."""

    @functools.wraps(kind._assisted_decoding)  # `generate` looks at the signature of what it calls
    def _assisted_decoding(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return _decode(self, functools.partial(kind._assisted_decoding, self), input_ids, kwargs)

    def _get_candidate_generator(self: Any, **kwargs: Any) -> Any:
        return self._generator

    ours = {"_assisted_decoding": _assisted_decoding, "_get_candidate_generator": _get_candidate_generator}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **ours})


def _decode(twin: Any, loop: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    """One answer, by the loop of assisted generation or, where that cannot or need not be, of the model alone."""
    processors, criteria = kwargs["logits_processor"], kwargs["stopping_criteria"]
    alone = {name: value for name, value in kwargs.items() if name not in ASSISTED_ONLY}
    if not _is_served(twin, input_ids, kwargs):
        return twin._sample(input_ids, **alone)
    config = kwargs["generation_config"] = bounded(kwargs["generation_config"], criteria, input_ids.shape[1])
    drafting, pacer = twin._drafts_with
    pace = pacer.pace(bool(config.do_sample))
    if pace.is_plain():
        times = list[float]()
        alone["logits_processor"] = WatchedProcessors(processors, lambda _: times.append(clock()))
        output = twin._sample(input_ids, **alone)
        if len(times) > 1:
            pace.timed(plain_time(times))
        return output
    try:
        given = {"generation_config": config, "inputs_tensor": kwargs.get("inputs_tensor"), "input_ids": input_ids}
        generator = drafting.generator(
            pace, vocab_size_of(twin), logits_processor=processors, model_kwargs=kwargs, **given
        )
    except Exception:  # of the encoder of a draft, for one
        logger.warning("The draft failed; the model answers alone.", exc_info=True)
        return twin._sample(input_ids, **alone)
    generator.ends(criteria, config)
    twin._generator = generator
    try:
        return loop(input_ids, **kwargs)
    finally:
        generator.close()


def _is_served(model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether the request is one prompt of token ids alone, all of which are to be read, and none of its processors
    and criteria remembers what it was asked about."""
    cache = kwargs.get("past_key_values")
    source = kwargs.get("inputs_tensor") if model.config.is_encoder_decoder else input_ids
    max_length = int(kwargs["generation_config"].max_length)
    return (
        input_ids.shape[0] == 1
        and known_limits(model).allow_any(input_ids.shape[1], max_length - 1)
        and isinstance(cache, DynamicCache | EncoderDecoderCache)
        and int(cache.get_seq_length()) == 0
        and source is not None
        and source.shape[1] > 0
        and not source.is_floating_point()
        and bool((source >= 0).all())
        and not any(isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim > 2 for x in kwargs.values())
        and all(map(forgets, (*kwargs["logits_processor"], *kwargs["stopping_criteria"])))
    )
