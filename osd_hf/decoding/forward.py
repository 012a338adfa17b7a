"""The forwards of a round, the draft's and the target's, over caches that rejected tokens are taken back from.

Either may be compiled over a static cache."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from osd_hf.config import OnlineConfig
from osd_hf.decoding.exactness import KNOWN_ARGUMENTS, difference
from osd_hf.errors import UnsupportedModelError, first_line
from osd_hf.models import num_positions, vocab_size_of
from osd_hf.utils.kernels import fast_kernels

logger = logging.getLogger(__name__)

# Tokens of static caches: each doubling in between is compiled once. What a sequence has beyond the last is eager.
SMALLEST_STATIC_CACHE, LARGEST_STATIC_CACHE = 256, 8192
AHEAD = 256  # tokens of an answer that a request's first cache has room for; longer answers move on to larger ones
# Goes by a mask, which hides what lies behind the tokens of a static cache; kernels that go by lengths would see it.
MASKED_ATTENTION = ("sdpa", "eager", None)
CHECKED_PROMPT = 4  # tokens before those by which a compiled forward is compared with the eager one
MOST_COMPILED = 32  # tokens that a compiled draft takes at once


# Asking at each call whether what was compiled still fits takes as long as a fifth of a small model's forward.
UNGUARDED = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}


class DraftForward:
    """One request's draft: its cache, a dynamic one of its own unless one is given, and the forwards over it. `source`
    is what each forward of an encoder-decoder gets besides tokens: `encoder_outputs` and `attention_mask`."""

    def __init__(self, draft: Any, source: dict[str, Any] | None = None, cache: Any = None) -> None:
        self.draft = draft
        self.device = draft.device  # where tokens are fed; looked up once: a model searches its parameters for it
        self.length = 0  # tokens in the cache
        self.has_moved = False  # to another cache, with the last tokens that were fed
        self._ids_name = "decoder_input_ids" if draft.config.is_encoder_decoder else "input_ids"
        self._settings = {"use_cache": True, "return_dict": True, **(source or {})}
        self._keeps_logits = bool(draft._supports_logits_to_keep())
        self.begin() if cache is None else self._go_on_with(cache)

    def begin(self) -> None:
        """Begin anew, with an empty cache."""
        config = self.draft.config.get_text_config(decoder=True)
        cache: Any = DynamicCache(config=config)
        if self.draft.config.is_encoder_decoder:
            cache = EncoderDecoderCache(cache, DynamicCache(config=config))
        self.length = 0
        self._go_on_with(cache)

    def _go_on_with(self, cache: Any) -> None:
        self.cache = self._settings["past_key_values"] = cache
        cache.activate_past_recording()

    def feed(self, ids: torch.Tensor, rows: int = 1) -> torch.Tensor:
        """Append tokens, `(1, tokens)` and at least one, to the cache; returns the raw logits after the last of them,
        `(rows, vocab)`, in the draft's dtype."""
        kept = {"logits_to_keep": rows} if self._keeps_logits else {}
        logits: torch.Tensor = self.draft(**{self._ids_name: ids}, **self._settings, **kept).logits[0, -rows:]
        self.length += ids.shape[1]
        return logits

    def crop(self, length: int) -> None:
        """Take back all but the first `length` tokens. To be called every round, as sliding windows keep what they
        could be asked for until they are."""
        self.cache.crop(length - self.length)
        self.length = length

    def close(self) -> None:
        """The request has ended."""


class CroppableCache(StaticCache):
    """A static cache that tokens can be taken back from: what lies beyond its length is masked, and overwritten by the
    next ones."""

    def crop(self, tokens_to_remove: int) -> None:
        """Take back so many tokens, told as a number of at most 0."""
        lengths = [layer.cumulative_length for layer in self.layers if layer.is_initialized]
        if tokens_to_remove and lengths:
            with torch.inference_mode(lengths[0].is_inference()):
                torch._foreach_add_(lengths, tokens_to_remove)  # on accelerators by one kernel, not by one a layer

    def cut(self, length: int) -> None:
        """Hold the first so many tokens, whatever a forward that has failed left behind."""
        with torch.inference_mode(self.layers[0].cumulative_length.is_inference()):
            for layer in self.layers:
                if layer.is_initialized:
                    layer.cumulative_length.fill_(length)


def static_size(tokens: int) -> int:
    """Tokens of the static cache for a sequence of so many."""
    return max(SMALLEST_STATIC_CACHE, 1 << (tokens - 1).bit_length())


def first_tokens(begins: int, ends: int) -> int:
    """Tokens that the first cache of a sequence has room for which begins and ends with so many."""
    tokens = min(begins + AHEAD, ends)
    return min(tokens, LARGEST_STATIC_CACHE) if begins < LARGEST_STATIC_CACHE else tokens


def static_sizes(begins: int, ends: int) -> list[int]:
    """Tokens of the caches that such a sequence goes through; all are kept but the one beyond the largest."""
    size = static_size(first_tokens(begins, ends))
    sizes = [size if size <= LARGEST_STATIC_CACHE else ends]
    while sizes[-1] < ends:
        sizes.append(2 * sizes[-1] if 2 * sizes[-1] <= LARGEST_STATIC_CACHE else ends)
    return sizes


def compiles_draft(config: OnlineConfig, device_type: str) -> bool:
    """Whether a draft on a device of this type, such as `"cuda"`, is to be compiled, or captured as graphs."""
    if config.compile_draft == "auto":
        return device_type not in ("cpu", "meta")
    return config.compile_draft


def hindrance(config: Any, whose: str = "model") -> str | None:
    """Why the forward of a model of this configuration cannot be compiled over a static cache; `None` where it can."""
    taken_back = "cannot take tokens back from a static cache"
    if config.is_encoder_decoder:
        return f"an encoder-decoder {taken_back}"
    text = config.get_text_config(decoder=True)
    attention = getattr(text, "_attn_implementation", None)
    if attention not in MASKED_ATTENTION:
        return f"its attention, {attention}, may see what lies behind the tokens of a static cache"
    try:
        layers = StaticCache(config=text, max_cache_len=8).layers
    except Exception as error:  # noqa: BLE001 - of a configuration of any kind
        return f"no static cache can be made for it: {first_line(error)}"
    if any(getattr(layer, "is_sliding", True) for layer in layers):  # recurrent ones do not say
        return f"a {whose} with sliding windows or recurrent layers {taken_back}"
    return None


class CompiledForward:
    """
    A forward of few tokens, compiled, over static caches that requests take turns with. It is that of `model` and of
    its copies, whose weights may change in place between requests, as may their dtype and device. What cannot be
    compiled runs eagerly, and the log says why, once.

    On CUDA the kernels are captured as graphs, which read and write at fixed places: for each copy and each cache that
    it meets, in each thread, and for each number of tokens. Capturing takes a fraction of a second.
    """

    whose = "draft"
    doing, done = "compiling", "compiled"
    counts: tuple[int, ...] = (1, 3)  # of tokens that it is compiled for: one alone, and any number of several
    mark = staticmethod(torch._dynamo.mark_dynamic)  # where it can only be for so many, compiling fails

    def __init__(self, model: Any) -> None:
        # By size of cache and rows of the head; `None` where compiling failed, and while it is under way.
        self._compiled: dict[tuple[int, int], _Compiled | None] = {}
        self._free: dict[int, list[CroppableCache]] = {}  # by size; heads of all sizes take turns with them
        self._made_for: tuple[Any, ...] = ()
        self._lock = threading.Lock()
        why = "its weights are offloaded" if model.device.type == "meta" else hindrance(model.config, self.whose)
        self.can_be_compiled = why is None
        if why:
            self._tell(why)

    @property
    def is_eager(self) -> bool:
        """Whether some requests run eagerly, as nothing could be compiled for them, or not yet."""
        return not self.can_be_compiled or None in self._compiled.values()

    def failed(self, error: Exception) -> None:
        """Say why compiling failed."""
        cause = getattr(error, "inner_exception", error)  # what the compiler itself said
        self._tell(f"{self.doing} failed with {type(cause).__name__}: {first_line(cause)}")

    def _tell(self, why: str) -> None:
        logger.warning("The %s is not %s and runs eagerly: %s.", self.whose, self.done, why)

    def give_up(self, compiled: _Compiled, error: Exception) -> None:
        """What was compiled has failed, or could not be compiled anew: requests under way go on eagerly, as those to
        come begin. Called while nobody else runs it."""
        compiled.step = compiled.several = self.step
        with self._lock:
            for key, made in self._compiled.items():
                if made is compiled:
                    self._compiled[key] = None
        self.failed(error)

    @staticmethod
    def step(model: Any, ids: torch.Tensor, cache: Any) -> Any:
        """What is compiled."""
        return model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True).logits[:, -1]

    def own_step(self) -> Any:
        """The function that is compiled. What was compiled is found again by its code object: each model and size of
        cache has one of its own."""
        return types.FunctionType(self.step.__code__.replace(), globals())

    def traced(self, options: dict[str, Any]) -> Any:
        """The function, to be compiled when it is called first. Its weights may be others at each call; whether what
        was compiled fits otherwise is not asked."""
        return torch.compile(self.own_step(), fullgraph=True, options=options | UNGUARDED)

    def warm_up(self, step: Any, model: Any, ids: torch.Tensor, cache: CroppableCache) -> None:
        """Have the function compiled, and run."""
        for _ in range(3):
            step(model, ids, cache)

    def tokens(self, count: int, device: Any) -> torch.Tensor:
        """Tokens such as those that it is compiled for; of several, there may be any number."""
        ids = torch.zeros(1, count, dtype=torch.long, device=device)
        if count > 1:
            self.mark(ids, 1)
        return ids

    def mode(self) -> AbstractContextManager[Any]:
        """Entered around what makes or changes a cache."""
        return torch.inference_mode()

    def lease(self, model: Any, tokens: int) -> tuple[_Compiled, CroppableCache] | None:
        """What is compiled for at most `tokens` tokens, and an empty cache to be put back among those that are free;
        `None` where the model runs eagerly. Where it has to be compiled first, this request waits for it; others run
        eagerly meanwhile."""
        size = static_size(tokens)
        # Compiled code and caches have the dtype that they were made with.
        if not self.can_be_compiled or torch.is_autocast_enabled(model.device.type):
            return None
        key = size, getattr(model.get_output_embeddings(), "out_features", 0)  # a head of other rows is another shape
        with self._lock:
            if self._made_for != (model.dtype, model.device):
                self._compiled, self._free, self._made_for = {}, {}, (model.dtype, model.device)
            made, free, is_new = self._compiled, self._free.setdefault(size, []), key not in self._compiled
            if is_new:
                made[key] = None
        with self.mode():
            if is_new:  # no lock is held meanwhile
                made[key] = self._compile(model, size, free)
            compiled = made[key]
            if compiled is None:
                return None
            cache = self._cache(model, size, free)
            cache.reset()
        return compiled, cache

    def _cache(self, model: Any, size: int, free: list[CroppableCache]) -> CroppableCache:
        with self._lock:
            return free.pop() if free else self._new_cache(model, size)

    def first(self, model: Any, begins: int, most: int) -> tuple[_Compiled, CroppableCache] | None:
        """A lease for a sequence that begins with so many tokens and ends with at most `most`."""
        return self.lease(model, first_tokens(begins, most))

    def larger(self, model: Any, compiled: _Compiled, cache: CroppableCache, tokens: int) -> Any:
        """What is leased of `compiled` goes back; returns a lease for more tokens whose cache holds what that one
        held, or, where the model goes on eagerly, `None` and a dynamic cache that does."""
        try:
            leased = self.lease(model, tokens)
        except Exception as error:  # noqa: BLE001 - a cache that memory is too little for costs no answer
            self._tell(f"no cache of {tokens} tokens could be made: {first_line(error)}")
            leased = None
        larger = DynamicCache(config=model.config.get_text_config(decoder=True)) if leased is None else leased[1]
        with self.mode():
            for ours, theirs in zip(larger.layers, cache.layers, strict=True):
                end = int(theirs.cumulative_length) if theirs.is_initialized else 0
                if end:
                    ours.update(theirs.keys[:, :, :end].clone(), theirs.values[:, :, :end].clone())
        compiled.free.append(cache)
        return (None, larger) if leased is None else leased

    def prepare(self, model: Any, tokens: int) -> None:
        """Compile for sequences of at most so many tokens what is not compiled yet."""
        size = SMALLEST_STATIC_CACHE
        while size < 2 * tokens and size <= LARGEST_STATIC_CACHE:
            with fast_kernels(model):  # as requests are served
                leased = self.lease(model, size)
            if leased is not None:
                leased[0].free.append(leased[1])
            size *= 2

    def _new_cache(self, model: Any, size: int) -> CroppableCache:
        return CroppableCache(config=model.config.get_text_config(decoder=True), max_cache_len=size)

    def _compile(self, model: Any, size: int, free: list[CroppableCache]) -> _Compiled | None:
        if size > LARGEST_STATIC_CACHE:
            self._tell(f"a sequence is longer than {LARGEST_STATIC_CACHE} tokens, where static caches end")
            return None
        options: dict[str, Any] = {"freezing": False}  # weights are no constants to be folded in
        if model.device.type == "cuda":
            # Launching the kernels of a small model takes longer than running them: they are captured as one graph.
            options["triton.cudagraphs"] = True
        started = time.perf_counter()
        what = f"the {self.whose}'s forward for up to {size} tokens"
        logger.info("%s %s.", self.doing.capitalize(), what)
        try:
            cache, steps = self._cache(model, size, free), []
            cache.reset()
            model(input_ids=self.tokens(1, model.device), past_key_values=cache, use_cache=True)
            # Each size is compiled for itself: not, because there are several, for any.
            with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
                for count in self.counts:
                    steps.append(self.traced(options))
                    self.warm_up(steps[-1], model, self.tokens(count, model.device), cache)
        except Exception as error:  # noqa: BLE001 - whatever a compiler fails with: the eager forward does the same
            self.failed(error)
            return None
        logger.info("%s %s in %.1f s.", self.done.capitalize(), what, time.perf_counter() - started)
        free.append(cache)
        return _Compiled(steps[0], steps[-1], size, free)


@dataclass(eq=False)
class _Compiled:
    """The compiled forward over caches of one size, those that are free, and who may run it."""

    step: Any
    several: Any  # the same over several tokens, where that is another one
    size: int  # tokens that its caches have room for
    free: list[CroppableCache]
    running: threading.Lock = field(default_factory=threading.Lock)


# --- of a draft -----------------------------------------------------------------------------------------------------


class CompiledDraft(CompiledForward):
    """The forward of a draft and its copies over a single token and, for what it missed while past text proposed,
    over several."""

    def forward(self, draft: Any, begins: int, most: int) -> DraftForward:
        """The forward of one request that begins with so many tokens, and feeds at most `most` to the draft."""
        leased = self.first(draft, begins, most)
        return DraftForward(draft) if leased is None else StaticForward(self, draft, *leased)


class StaticForward(DraftForward):
    """Few tokens go through the compiled forward, a prompt through the eager one, over the same static cache, which
    gives way to a larger one where it is full. Beyond the largest, all is eager."""

    def __init__(self, owner: CompiledDraft, draft: Any, compiled: _Compiled, cache: CroppableCache) -> None:
        super().__init__(draft, cache=cache)
        self._owner = owner
        self._compiled: _Compiled | None = compiled

    def feed(self, ids: torch.Tensor, rows: int = 1) -> torch.Tensor:
        count = ids.shape[1]
        self.has_moved = self._compiled is not None and self.length + count > self._compiled.size
        if self._compiled is not None and self.has_moved:
            self._compiled, cache = self._owner.larger(self.draft, self._compiled, self.cache, self.length + count)
            self._go_on_with(cache)
        if self._compiled is None or self.length == 0 or count > MOST_COMPILED:
            return super().feed(ids, rows)
        assert rows == 1
        # A captured graph writes the next logits where these are, whoever asks for them.
        with self._compiled.running:
            step = self._compiled.step if count == 1 else self._compiled.several
            fed = ids.clone()  # a tensor of inference mode, wherever the tokens were made
            try:
                logits: torch.Tensor = step(self.draft, fed, self.cache)
            except Exception as error:  # capturing it for another number of tokens may fail, too
                if step is self._owner.step:
                    raise
                self._owner.give_up(self._compiled, error)
                self.cache.cut(self.length)
                logits = self._owner.step(self.draft, fed, self.cache)
            self.length += count
            return logits.clone()

    def close(self) -> None:
        if self._compiled is not None:
            self._compiled.free.append(self.cache)


# --- of the target --------------------------------------------------------------------------------------------------


class GuardedStep:
    """A compiled function of a model that may be changed in any way: a call asks whether what was compiled still fits,
    and compiles again where it does not. `sure` gives what the last call ran, without asking.

    Args:
        step (`Callable[[], Callable]`): Makes the function, each time as another one.
        options (`dict[str, Any]`): Of the compiler.
    """

    def __init__(self, step: Callable[[], Any], options: dict[str, Any]) -> None:
        self._step, self._options = step, options
        self._guarded: Any = torch.compile(step(), fullgraph=True, backend=self._compile)
        self._ran: object = None
        self._sure: dict[object, Any] = {}

    @staticmethod
    def inductor(graph: Any, inputs: Any, **options: Any) -> Any:
        """The compiler behind."""
        compiler: Any = torch._dynamo.lookup_backend("inductor")
        return compiler(graph, inputs, **options)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        compiled = self.inductor(graph, inputs, config_patches=self._options)
        this = object()

        def run(*args: Any) -> Any:
            self._ran = this
            return compiled(*args)

        return run

    def __call__(self, *args: Any) -> Any:
        return self._guarded(*args)

    def sure(self, model: Any, ids: torch.Tensor, cache: CroppableCache) -> Any:
        """For calls between which and the last one, with these arguments, nothing can have changed but weights."""
        ran = self._ran
        if ran not in self._sure:
            step: Any = torch.compile(self._step(), fullgraph=True, options=self._options | UNGUARDED)
            like_these = ids.clone()
            torch._dynamo.mark_dynamic(like_these, 1)  # nothing asks whether it fits other numbers of tokens
            with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
                step(model, like_these, cache)  # compiled now: later, the model may be another one
            cache.crop(-ids.shape[1])
            self._sure[ran] = step
        return self._sure[ran]


class CompiledTarget(CompiledForward):
    """The target's forward of a round's tokens, of any number from 2 on. The target is the user's own and may be
    changed in any way between requests: each request's first round asks whether what was compiled still fits, and
    compiles again where it does not."""

    whose = "target"
    counts = (3,)
    mark = staticmethod(torch._dynamo.maybe_mark_dynamic)  # it would be compiled again for so many

    @staticmethod
    def step(model: Any, ids: torch.Tensor, cache: Any) -> Any:
        return model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True).logits

    def traced(self, options: dict[str, Any]) -> Any:
        return GuardedStep(self.own_step, options)

    def warm_up(self, step: Any, model: Any, ids: torch.Tensor, cache: CroppableCache) -> None:
        super().warm_up(step, model, ids, cache)
        step.sure(model, ids, cache)  # the inductor finds again what it compiled a moment ago
        self._check(step, model, cache)

    def _check(self, step: Any, model: Any, cache: CroppableCache) -> None:
        """Raise UnsupportedModelError if the compiled forward over several tokens gives other logits than eager
        single-token forwards."""
        count, eager = self.counts[0], DynamicCache(config=model.config.get_text_config(decoder=True))
        ids = torch.arange(1, CHECKED_PROMPT + count + 1, device=model.device)[None] % vocab_size_of(model)
        prompt, behind = ids[:, :-count], ids[0, -count:].clone()[None]  # with strides of its own
        self.mark(behind, 1)
        cache.reset()
        for used in (cache, eager):
            self.step(model, prompt, used)
        ours = step(model, behind, cache)[0]
        theirs = torch.cat([self.step(model, behind[:, i : i + 1], eager)[0] for i in range(count)])
        if why := difference(model, list(ours), list(theirs)):
            raise UnsupportedModelError(f"compiled, {why}")

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        # The loop writes into the logits, which it may not where they are of inference mode. Hooks that come or go
        # change what a forward does; the compiler asks for them only where it is told to.
        hooks = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
        with hooks, torch.inference_mode(False), torch.no_grad():
            yield

    def verification(
        self, target: Any, kwargs: dict[str, Any], begins: int, most: int, limit: float = math.inf
    ) -> Verification | None:
        """Return the verification of a request that begins with so many tokens and ends with at most `most`, whose
        loop gets `kwargs`; `None` where it is left to the eager forward. No forward reaches behind `limit` tokens."""
        config, cache = kwargs["generation_config"], kwargs.get("past_key_values")
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if cache is None or type(cache) is not DynamicCache or cache.get_seq_length() > 0 or target.training:
            return None
        # Other arguments may change what the forward does.
        others = any(kwargs[name] is not None for name in kwargs.keys() - KNOWN_ARGUMENTS)
        if others or config.output_attentions or config.output_hidden_states or (mask is not None and not mask.all()):
            return None
        if positions is not None and not torch.equal(positions[0], torch.arange(len(positions[0])).to(positions)):
            return None
        leased = self.first(target, begins, most + 1)  # a single token is fed with another one behind it
        return None if leased is None else Verification(self, target, *leased, limit)


class Verification:
    """One request's rounds by the compiled target. The prompt goes through the eager forward, into the cache that the
    loop came with; what it holds is put into a static one for the rounds, larger ones as the sequence grows, and back
    at the end, or where it fits into none."""

    def __init__(
        self, owner: CompiledTarget, target: Any, compiled: _Compiled, cache: CroppableCache, limit: float = math.inf
    ) -> None:
        self.cache = cache
        self._owner, self._target = owner, target
        self._compiled: _Compiled | None = compiled  # `None`: the rest of the request is eager
        self.has_moved = False  # to another cache, for the round that began last
        self._step: Any = None  # once it is known that what was compiled fits
        self.given: DynamicCache | None = None  # what the loop came with, once it was taken over
        self._limit = min(num_positions(target) or math.inf, limit)

    def begins(self, given: Any, tokens: int) -> bool:
        """Take over what the loop's cache holds, for a round after which the sequence has at most so many tokens;
        returns whether the round is verified here. Otherwise [`~Verification.given`] is what the loop goes on with."""
        is_ours, layers = given is self.cache, given.layers
        if not is_ours and (
            len(layers) != len(self.cache.layers) or any(type(layer) is not DynamicLayer for layer in layers)
        ):
            return False
        self.has_moved = self._compiled is not None and tokens > self._compiled.size
        if self._compiled is not None and self.has_moved:
            self._compiled, cache = self._owner.larger(self._target, self._compiled, self.cache, tokens)
            self._step = None
            if self._compiled is None:
                self._put_back(cache)
            else:
                self.cache = cache
        if self._compiled is None or is_ours:
            return self._compiled is not None
        self.given = given
        with self._owner.mode():
            for ours, theirs in zip(self.cache.layers, layers, strict=True):
                ours.update(theirs.keys, theirs.values)
                theirs.keys, theirs.values = theirs.keys[:, :, :0].clone(), theirs.values[:, :, :0].clone()
        return True

    def inputs(self, ids: torch.Tensor, count: int) -> dict[str, Any]:
        """What [`~Verification.forward`] is called with for the last `count` tokens of a sequence, `(1, tokens)`."""
        return {"past_key_values": self.cache, "ids": ids[:, -count:], "length": ids.shape[1]}

    def forward(self, past_key_values: CroppableCache, ids: torch.Tensor, length: int) -> CausalLMOutputWithPast:
        """The target's logits, `(1, tokens, vocab)`, of the last tokens, `(1, tokens)`, of a sequence so long."""
        cache, count = past_key_values, ids.shape[1]
        mode = self._owner.mode() if self._step is None else torch.inference_mode(False)
        assert self._compiled is not None
        with mode, torch.no_grad(), self._compiled.running:
            fed = ids[0].repeat(2 if count == 1 else 1)[None]  # with strides of its own, not those of the sequence
            torch._dynamo.maybe_mark_dynamic(fed, 1)  # compiled again, it is for any number of tokens again
            if count == 1 and length == self._limit:  # there is no position behind it
                logits = self._owner.step(self._target, ids, cache)
            else:
                logits = self._compiled_logits(fed, length - count)
                if count == 1:
                    cache.crop(-1)
            # A captured graph writes the next logits where these are.
            return CausalLMOutputWithPast(logits=logits[:, :count].clone(), past_key_values=cache)

    def _compiled_logits(self, ids: torch.Tensor, begins: int) -> torch.Tensor:
        """The logits of tokens behind so many others."""
        assert self._compiled is not None
        step, args = self._step or self._compiled.step, (self._target, ids, self.cache)
        try:
            logits: torch.Tensor = step(*args)
            if self._step is None:
                self._step = step.sure(*args) if isinstance(step, GuardedStep) else step
        except Exception as error:  # the target has changed, or capturing it has failed
            if step is self._owner.step:
                raise
            self._owner.give_up(self._compiled, error)
            self.cache.cut(begins)
            self._step = self._owner.step
            logits = self._step(*args)
        return logits

    def close(self) -> None:
        """The request has ended: whoever holds the cache that it came with finds there what it read."""
        if self._compiled is not None:
            self._put_back(self.cache)
            self._compiled.free.append(self.cache)

    def _put_back(self, cache: Any) -> None:
        if self.given is not None:
            end = int(cache.get_seq_length())
            for ours, theirs in zip(cache.layers, self.given.layers, strict=True):
                theirs.keys, theirs.values = (x[:, :, :end].clone() for x in (ours.keys, ours.values))


# --- captured graphs ----

Replay = Callable[[torch.Tensor], torch.Tensor]
Step = Callable[[Any, torch.Tensor, CroppableCache], torch.Tensor]

OFTEN = 3  # forwards of several tokens that are eager before so many are captured, which takes as long as some of them
MOST_FAILURES = 3  # captures in turn that fail before all is eager: what other threads do may break one


class _Place:
    """What the graphs of a device share: the stream that they are captured in, as libraries keep memory for each; the
    memory that they compute in, which is never given back, as those libraries go on using it; and a lock, as one of
    them is captured, or runs, at a time."""

    def __init__(self, device: Any) -> None:
        self.device, self.lock = device, threading.Lock()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.first = self.capture(lambda: torch.zeros(1, device=device))  # memory without a graph would be given back

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        # The outer stream is the one to go on with, which a capture that fails does not see to. Other threads may
        # learn, and take memory, meanwhile.
        try:
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(now),
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                result = run()
        except RuntimeError as error:  # of the end of a capture that was broken before
            raise error.__context__ or error from None
        return graph, result

    def replay(
        self, graph: torch.cuda.CUDAGraph, result: torch.Tensor, read: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        """What a graph that reads from `read` computes of what is given, after those before it, in whatever stream
        these ran."""
        now = torch.cuda.current_stream(self.device)
        with self.lock:
            self.done.wait(now)
            read.copy_(given)
            graph.replay()
            found = result.clone()
            self.done.record(now)
        return found


_places: dict[Any, _Place] = {}
_making = threading.Lock()


def capture(run: Callable[[torch.Tensor], torch.Tensor], example: torch.Tensor) -> Replay:
    """Capture the kernels that a function of a tensor such as `example` starts, which do not run meanwhile; returns
    what runs them on another one and gives a result of its own each time. Other tensors are read where they lay."""
    device, read = example.device, example.clone()
    with _making:
        if device not in _places:
            _places[device] = _Place(device)
        place = _places[device]
    with place.lock:
        graph, result = place.capture(lambda: run(read))
    return lambda given: place.replay(graph, result, read, given)


@dataclass
class _OfCache:
    """Graphs over a cache by their number of tokens; eager forwards of so many tokens."""

    graphs: dict[int, Replay] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)


class CapturedStep:
    """
    A forward of few tokens over static caches. The first ones of a model over a cache and for a number of tokens are
    eager, then its kernels are captured, in a tenth of a second, and those after it are graphs. One thread calls it at
    a time.

    Args:
        step (`Callable[[Any, torch.Tensor, CroppableCache], torch.Tensor]`): The forward.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graphs: WeakKeyDictionary[Any, WeakKeyDictionary[CroppableCache, _OfCache]] = WeakKeyDictionary()
        self._addresses: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()  # of a model's weights
        self._failures = 0

    def begins(self, model: Any) -> None:
        """A request begins: graphs that read where the model's weights no longer lie are let go."""
        if model in self._graphs and self._addresses[model] != addresses(model):
            del self._graphs[model]

    def __call__(self, model: Any, ids: torch.Tensor, cache: CroppableCache) -> torch.Tensor:
        if model not in self._graphs:
            self._graphs[model], self._addresses[model] = WeakKeyDictionary(), addresses(model)
        known, count = self._graphs[model].setdefault(cache, _OfCache()), ids.shape[1]
        if count in known.graphs:
            return known.graphs[count](ids)
        logits = self._step(model, ids, cache)  # before: libraries choose their kernels in it
        known.calls[count] += 1
        if count == 1 or known.calls[count] >= OFTEN:
            try:
                known.graphs[count] = capture(lambda read: self._step(model, read, cache), ids)
                self._failures = 0
            except RuntimeError:
                self._failures += 1
                if self._failures == MOST_FAILURES:
                    raise
        return logits


def addresses(model: Any) -> tuple[int, ...]:
    """Where the weights of a model lie."""
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))


class CapturedDraft(CompiledDraft):
    """A draft and its copies as [`CompiledDraft`] has them, with graphs of the eager forward's kernels in place of
    compiled code: hardly anything is to be waited for, and a token takes longer."""

    doing, done = "capturing", "captured"
    counts = (1,)  # other numbers of tokens are captured where they come often

    def traced(self, options: dict[str, Any]) -> Any:
        return CapturedStep(self.step)

    def lease(self, model: Any, tokens: int) -> Any:
        leased = super().lease(model, tokens)
        if leased is not None:
            with leased[0].running:
                if isinstance(leased[0].step, CapturedStep):
                    leased[0].step.begins(model)
        return leased


def static_draft(base: Any, config: OnlineConfig) -> CompiledDraft | None:
    """The forward of a draft and its copies over static caches, as `compile_draft` asks for it; `None` where they are
    eager."""
    if not compiles_draft(config, base.device.type):
        return None
    is_captured = config.compile_draft == "auto" and base.device.type == "cuda"
    made = (CapturedDraft if is_captured else CompiledDraft)(base)
    return made if made.can_be_compiled else None
