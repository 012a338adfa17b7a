"""The draft's forward with a cache of its own: tokens are fed, and taken back when the target rejects them."""

from __future__ import annotations

import logging
import threading
import time
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from osd_hf.errors import first_line
from osd_hf.utils.disk import in_child, renewing

logger = logging.getLogger(__name__)

# Tokens of static caches: each doubling in between is compiled once, and longer sequences are drafted eagerly.
SMALLEST_STATIC_CACHE, LARGEST_STATIC_CACHE = 256, 8192


class _Compiling:
    """The threads that compile now. A child forked meanwhile would wait forever for the compiler's own lock, which
    such a thread holds: there nothing is compiled any more."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.is_lost = False
        in_child(self, _Compiling._renew)

    def _renew(self) -> None:
        ours = {threading.get_ident()}
        self.is_lost = self.is_lost or not self.threads <= ours
        self.threads &= ours


_compiling = _Compiling()


class DraftForward:
    """One request's draft: its cache, and the forwards over it. `source` is what each forward of an encoder-decoder
    gets besides tokens: `encoder_outputs` and `attention_mask`."""

    def __init__(self, draft: Any, source: dict[str, Any] | None = None) -> None:
        self.draft = draft
        self.device = draft.device  # where tokens are fed; looked up once: a model searches its parameters for it
        self.length = 0  # tokens in the cache
        self._settings: dict[str, Any] = {"use_cache": True, "return_dict": True, **(source or {})}
        if draft._supports_logits_to_keep():
            self._settings["logits_to_keep"] = 1
        self._ids_name = "decoder_input_ids" if draft.config.is_encoder_decoder else "input_ids"
        self.cache = self._new_cache()
        self.cache.activate_past_recording()

    def _new_cache(self) -> Any:
        config = self.draft.config.get_text_config(decoder=True)
        if self.draft.config.is_encoder_decoder:
            return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        return DynamicCache(config=config)

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """Append tokens, `(1, tokens)` and at least one, to the cache; returns the raw logits after the last of them,
        `(1, vocab)`, in the draft's dtype."""
        logits = self._forward(ids)
        self.length += ids.shape[1]
        return logits

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        inputs = {self._ids_name: ids, "past_key_values": self.cache, **self._settings}
        logits: torch.Tensor = self.draft(**inputs).logits[:, -1]
        return logits

    def crop(self, length: int) -> None:
        """Take back all but the first `length` tokens. To be called every round, as sliding windows keep what they
        could be asked for until they are."""
        self.cache.crop(length - self.length)
        self.length = length

    def close(self) -> None:
        """The request has ended."""


class CompiledDraft:
    """A draft whose single-token forward is compiled, over static caches that requests take turns with. What cannot be
    compiled is served eagerly, and the log says why, once. The weights of the draft may change in place between
    requests, and so may their dtype and device."""

    def __init__(self, draft: Any) -> None:
        self.draft = draft
        # By size of cache; `None` where compiling failed, and while it is under way.
        self._compiled: dict[int, _Compiled | None] = {}
        self._made_for: tuple[Any, ...] = ()
        self._lock = threading.Lock()
        in_child(self, renewing(_lock=threading.Lock, _compiled=dict))  # what was under way never ends in a child
        kind = "an encoder-decoder" if draft.config.is_encoder_decoder else None
        config = draft.config.get_text_config(decoder=True)
        if any(layer.is_sliding for layer in StaticCache(config=config, max_cache_len=8).layers):
            kind = "a draft with sliding windows"
        self._can_be_compiled = kind is None
        if kind:
            self._tell(f"{kind} cannot take tokens back from a static cache")

    def _tell(self, why: str) -> None:
        logger.warning("The draft is not compiled and runs eagerly: %s.", why)

    @torch.inference_mode()
    def forward(self, tokens: int) -> DraftForward:
        """The forward of one request that feeds at most `tokens` tokens. Where it has to be compiled first, this
        request waits for it; others are drafted eagerly meanwhile."""
        draft = self.draft
        size = max(SMALLEST_STATIC_CACHE, 1 << (tokens - 1).bit_length())
        # Compiled code and caches have the dtype that they were made with.
        if not self._can_be_compiled or torch.is_autocast_enabled(draft.device.type):
            return DraftForward(draft)
        with self._lock:
            if self._made_for != (draft.dtype, draft.device):
                self._compiled, self._made_for = {}, (draft.dtype, draft.device)
            made, is_new = self._compiled, size not in self._compiled
            if is_new:
                made[size] = None
        if is_new:  # no lock is held meanwhile
            made[size] = self._compile(size)
        with self._lock:
            compiled = made[size]
            if compiled is None:
                return DraftForward(draft)
            cache = compiled.free.pop() if compiled.free else self._new_cache(size)
        cache.reset()
        return StaticForward(draft, compiled, cache)

    def _new_cache(self, size: int) -> Any:
        return StaticCache(config=self.draft.config.get_text_config(decoder=True), max_cache_len=size)

    def _compile(self, size: int) -> _Compiled | None:
        draft = self.draft
        if size > LARGEST_STATIC_CACHE:
            self._tell(f"up to {size} tokens were asked for, and static caches end at {LARGEST_STATIC_CACHE}")
            return None
        if _compiling.is_lost:
            self._tell("this process was forked while a thread of its parent was compiling")
            return None
        # Weights are no constants to be folded in. Each draft and size of cache has a function of its own, called with
        # nothing but single tokens and such caches: asking at each call whether it still fits takes as long as a fifth
        # of a small draft's forward. On CUDA launching the kernels of a small draft takes longer than running them:
        # they are captured as one graph.
        options: dict[str, Any] = {"freezing": False, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        if draft.device.type == "cuda":
            options["triton.cudagraphs"] = True

        def step(ids: torch.Tensor, cache: Any) -> Any:
            return draft(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True).logits[:, -1]

        # What was compiled is found again by its code object: each function gets one of its own.
        own = types.FunctionType(step.__code__.replace(), globals(), closure=step.__closure__)
        started = time.perf_counter()
        logger.info("Compiling the draft's forward for up to %d tokens, which takes some seconds.", size)
        _compiling.threads.add(threading.get_ident())
        try:
            compiled = torch.compile(own, fullgraph=True, dynamic=False, options=options)
            cache = self._new_cache(size)
            ids = torch.zeros(1, 1, dtype=torch.long, device=draft.device)
            draft(input_ids=ids, past_key_values=cache, use_cache=True)
            for _ in range(3):
                compiled(ids, cache)
        except Exception as error:  # noqa: BLE001 - whatever a compiler fails with: the eager forward does the same
            cause = getattr(error, "inner_exception", error)  # what the compiler itself said
            self._tell(f"compiling failed with {type(cause).__name__}: {first_line(cause)}")
            return None
        finally:
            _compiling.threads.discard(threading.get_ident())
        logger.info("Compiled the draft's forward in %.1f s.", time.perf_counter() - started)
        return _Compiled(compiled, [cache])


@dataclass(eq=False)
class _Compiled:
    """The compiled forward over caches of one size, those that are free, and who may run it."""

    step: Any
    free: list[Any]
    running: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        in_child(self, renewing(running=threading.Lock))  # for the request that the forking thread is in


class StaticForward(DraftForward):
    """Single tokens go through the compiled forward, a prompt through the eager one, over the same static cache."""

    def __init__(self, draft: Any, compiled: _Compiled, cache: Any) -> None:
        self._static = cache
        self._compiled = compiled
        super().__init__(draft)

    def _new_cache(self) -> Any:
        return self._static

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.length == 0 or ids.shape[1] > 2:
            return super()._forward(ids)
        # A captured graph writes the next logits where these are, whoever asks for them.
        with self._compiled.running:
            for i in range(ids.shape[1]):
                logits: torch.Tensor = self._compiled.step(ids[:, i : i + 1], self.cache)
            return logits.clone()

    @torch.inference_mode()
    def crop(self, length: int) -> None:
        # A static cache cannot be cropped: what lies beyond its length is masked, and overwritten by the next tokens.
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.cumulative_length.fill_(length)
        self.length = length

    def close(self) -> None:
        self._compiled.free.append(self._static)
