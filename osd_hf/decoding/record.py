"""Record what a target decodes as traces: requests, its answers without a draft, and answers of another target."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, PreTrainedModel, WatermarkingConfig
from transformers.generation.configuration_utils import BaseWatermarkingConfig

from osd_hf.decoding.checks import foreign_arguments, log_once
from osd_hf.decoding.sources import Drafting
from osd_hf.decoding.static import StaticForward
from osd_hf.decoding.text import TextIndex
from osd_hf.draft_head import keep_states
from osd_hf.errors import UnsupportedGenerationError
from osd_hf.models import vocab_size_of
from osd_hf.target_version import target_version
from osd_hf.trace import DraftRound, Trace, ids_dtype, num_accepted
from osd_hf.utils.context import neutral_context
from osd_hf.utils.report import plain

logger = logging.getLogger(__name__)

Sink = Callable[[Trace], object]
Sinks = Callable[[Any], object]  # gets an iterator of traces

MAX_PENDING_LOGITS = 1 << 19  # elements that wait to be compressed: 2 MiB in float32
# `None` would be replaced by defaults, top_k = 50 among them.
NO_WARPING = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
}  # fmt: skip
# Settings that shape the distribution or bound the answer, with the value under which each does nothing. A trace keeps
# the others: a replay processes a draft's logits as the request did.
SAMPLING_FIELDS: dict[str, Any] = {
    "do_sample": False, **NO_WARPING, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "sequence_bias": None,
    "min_length": 0, "min_new_tokens": 0, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "exponential_decay_length_penalty": None,
    "remove_invalid_values": False, "renormalize_logits": False, "watermarking_config": None, "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Lease:
    """The draft of one request. Its version and domain are written into the trace."""

    version: int = 0
    domain: str | None = None
    model: PreTrainedModel | None = None  # replaces the request's assistant model
    drafting: Drafting | None = None  # makes the candidates; with `None`, transformers' own generator does
    earlier: Sequence[TextIndex] = ()  # text of earlier requests


@dataclass(eq=False)
class Binding:
    """A listener of a target's assisted requests."""

    sink: Sinks  # gets the traces of successful requests; an error of the sink costs the answer
    # Gets the request's assistant model and prompt (token ids, int32, `(prompt,)`; `None` if there is more than ids).
    # The context around the request yields the draft.
    serving: Callable[[Any, Any], AbstractContextManager[Lease]]
    owner: object  # of several bindings of one owner, only the innermost one listens
    num_logprobs: int | None = 64  # target entries stored per position; `None` stores full rows
    num_assistant_tokens: int | str | None = None  # k of these requests, if it differs from the draft's
    static: StaticForward | None = None  # verifies the candidates
    is_capture: bool = False  # only counts and records, with any draft
    undrafted: str | None = None  # logged once when `generate` is called without a draft
    has_requests: bool = field(default=False, init=False)  # whether `generate` was called on the target
    target: PreTrainedModel | None = field(default=None, init=False)

    def end(self) -> None:
        """Stop listening and release everything. Requests that are running go on."""
        self.target = None
        self.sink = lambda traces: None
        self.serving = lambda *_: nullcontext(Lease())


# --- the content of a trace -----------------------------------------------------------------------------------------


def sampling_settings(generation_config: GenerationConfig, *, padding: int = 0) -> dict[str, Any]:
    """Return the settings of `SAMPLING_FIELDS` that do something, ready for JSON. Padding counts in `min_length`;
    traces have none, so it is subtracted."""
    settings: dict[str, Any] = {}
    for name, neutral in SAMPLING_FIELDS.items():
        value = getattr(generation_config, name, None)
        if isinstance(value, BaseWatermarkingConfig):  # other kinds have a state
            value = value.to_dict() if type(value) is WatermarkingConfig else None
        if not (value is None or isinstance(value, bool | int | float)):
            value = plain(value)
        if value is not None and name == "min_length":
            value = max(value - padding, 0)
        does_something = value is not None and (neutral is None or value != neutral)
        if does_something and (generation_config.do_sample or name not in NO_WARPING):
            settings[name] = value
    return settings


def without_padding(ids: torch.Tensor, mask: Any) -> torch.Tensor:
    """Return the tokens of `ids`, of shape `(1, tokens)`, that a mask of the same shape does not hide; all without
    one."""
    row = ids[0]
    return row[mask[0].bool()] if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else row


def _num_cached(model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict[str, Any], cached: int) -> int | None:
    """Return the prompt tokens that are in a cache of an earlier turn; `None` if the cache has tokens that the prompt
    does not repeat: then the mask is longer than the prompt."""
    if cached == 0:
        return 0
    mask = kwargs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    length = getattr(kwargs["generation_config"], "_mask_length", None) if mask is None else mask.shape[1]
    is_repeated = length in (None, input_ids.shape[1]) and cached < input_ids.shape[1]
    return cached if is_repeated else None


def _prompt_ids(
    model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict[str, Any], *, is_partial: bool
) -> tuple[Any, Any] | None:
    """Return prompt ids without padding and, for an encoder-decoder, the decoder's prompt; `None` if the request
    depends on more than token ids, because no draft could learn from its trace."""
    is_encoder_decoder = model.config.is_encoder_decoder
    source = kwargs.get("inputs_tensor") if is_encoder_decoder else input_ids
    foreign = foreign_arguments(kwargs)
    is_empty = source is None or source.is_floating_point() or source.shape[1] == 0
    # With given encoder outputs, source ids are negative placeholders.
    if source is None or is_empty or foreign or is_partial or (is_encoder_decoder and bool((source < 0).any())):
        what = ", ".join(foreign) or ("part of it is only in the cache" if is_partial else "embeddings or features")
        log_once(
            model,
            "Requests are not captured, so nothing is learned from them: the prompt does not consist of token ids "
            f"alone ({what}).",
        )
        return None
    prompt = without_padding(source, kwargs.get("attention_mask")).to(torch.int32).cpu().numpy()
    return prompt, input_ids[0].to(torch.int32).cpu().numpy() if is_encoder_decoder else None


@neutral_context()
def compress_rows(logits: torch.Tensor, num_logprobs: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compress raw target rows, `(rows, vocab)`, to what a [`Trace`] stores: logits of the K largest entries relative
    to the largest (float16, `(rows, K)`), their ids (int64, `(rows, K)`), and the log-mass of the others (float32,
    `(rows,)`). `None` stores full rows and no ids."""
    logits = logits.float()
    if num_logprobs is None or num_logprobs >= logits.shape[-1]:
        relative = logits - logits.amax(-1, keepdim=True)
        no_ids = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
        return relative.half(), no_ids, torch.full_like(relative[:, 0], -torch.inf)
    top, ids = logits.topk(num_logprobs, dim=-1)
    kept = (top.logsumexp(-1) - logits.logsumexp(-1)).clamp(max=0)
    return (top - top[:, :1]).half(), ids, torch.log(-torch.expm1(kept))


class Rows:
    """Target rows of one answer, in every width that a listener stores."""

    def __init__(self, widths: set[int | None]) -> None:
        self.parts: dict[int | None, list[tuple[torch.Tensor, ...]]] = {width: [] for width in widths - {0}}
        self._pending: list[torch.Tensor] = []
        self._num_pending = 0
        self._lock = threading.Lock()  # traces for several listeners may be made at once

    def add(self, rows: torch.Tensor) -> None:
        """Add raw rows, `(rows, vocab)`, of emitted tokens."""
        self._pending.append(rows)
        self._num_pending += rows.numel()
        if self._num_pending > MAX_PENDING_LOGITS:
            self._compress()

    @neutral_context()
    def _compress(self) -> None:
        with self._lock:
            if self._pending:
                rows = torch.cat(self._pending)
                self._pending, self._num_pending = [], 0
                for width, parts in self.parts.items():
                    parts.append(compress_rows(rows, width))

    @neutral_context()
    def stored(
        self, width: int | None, num_tokens: int, vocab_size: int
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return `top_logits`, `top_ids` and `tail_logprob` of a [`Trace`], without an extra row of the plain loop."""
        dtype = ids_dtype(vocab_size)
        if width == 0:
            nothing = np.zeros((num_tokens, 0), np.float16)
            return nothing, nothing.astype(dtype), np.zeros(num_tokens, np.float32)
        self._compress()
        columns = zip(*self.parts[width], strict=True)
        top_logits, top_ids, tail = (torch.cat(column)[:num_tokens].cpu().numpy() for column in columns)
        return top_logits, top_ids.astype(dtype), tail


class Round(NamedTuple):
    """What one round proposed, and how many tokens it emitted."""

    drafted: Sequence[int]
    num_emitted: int
    from_text: Sequence[bool] = ()
    p: torch.Tensor | None = None
    q: torch.Tensor | None = None


def _as_draft_rounds(completion: torch.Tensor, rounds: list[Round]) -> tuple[Any, tuple[DraftRound, ...]]:
    """Return the completion's token ids and the rounds."""
    emitted = completion.to(torch.int32).cpu().numpy()
    found, num_emitted = [], 0
    for r in rounds:
        theirs = emitted[num_emitted : num_emitted + r.num_emitted]
        ours = np.array(r.drafted, np.int32)
        num_emitted += len(theirs)
        accepted = num_accepted(ours, theirs)
        examined = min(accepted + 1, len(ours), len(theirs))
        p, q = (None if x is None else x[:examined].float().cpu().numpy() for x in (r.p, r.q))
        from_text = np.array(r.from_text, dtype=bool) if any(r.from_text) else None
        if from_text is not None:  # rejected text becomes -1: text of other requests is not stored
            ours = np.where(from_text & (np.arange(len(ours)) >= accepted), np.int32(-1), ours)
        found.append(DraftRound(ours, accepted, len(theirs), p, q, from_text))
    return emitted, tuple(found)


# --- the request ----------------------------------------------------------------------------------------------------


class Request:
    """One row of a call of `generate`, from its beginning to its end, with the arguments of the loop for this row.
    Tensors stay on their device until the end."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        kwargs: dict[str, Any],
        bindings: Sequence[Binding],
        version: str | None,
    ) -> None:
        self.model, self.input_ids, self.kwargs, self.bindings = model, input_ids, kwargs, bindings
        self.version = version  # of the target; `None` if nothing is stored
        self.config = kwargs["generation_config"]
        cache = kwargs.get("past_key_values")
        cached = 0 if cache is None else int(cache.get_seq_length())
        self.num_cached = _num_cached(model, input_ids, kwargs, cached)
        self.prompts = _prompt_ids(model, input_ids, kwargs, is_partial=self.num_cached is None)
        padding = 0
        if self.prompts is not None and not model.config.is_encoder_decoder:
            padding = input_ids.shape[1] - len(self.prompts[0])
        self.settings = {
            **sampling_settings(self.config, padding=padding),
            "max_new_tokens": int(self.config.max_length) - input_ids.shape[1],
            "processors": [type(p).__name__ for p in kwargs["logits_processor"]],
        }
        self.leases: list[Lease] = []
        self.drafting: Drafting | None = None
        self.began = 0.0  # by the clock of `drafting`
        self.domain: str | None = None
        self.earlier: Sequence[TextIndex] = ()
        self.sequence = input_ids  # prompt and answer so far
        self.rounds: list[Round] = []
        self.states: list[torch.Tensor] = []  # of the target, `(tokens, width)` each, if the draft reads them
        self.ended_at_seconds = 0.0
        self.rows = Rows({b.num_logprobs for b in bindings})

    @property
    def assistant_model(self) -> Any:
        """The draft that serves the request."""
        return self.kwargs.get("assistant_model")

    @property
    def is_served(self) -> bool:
        """Whether a listener serves the draft. Otherwise the request is only captured."""
        return any(lease.model is not None for lease in self.leases)

    @property
    def source_tokens(self) -> list[int]:
        """The tokens that an encoder reads; empty without them."""
        source = self.kwargs.get("inputs_tensor") if self.model.config.is_encoder_decoder else None
        if source is None or source.is_floating_point():
            return []
        tokens: list[int] = without_padding(source, self.kwargs.get("attention_mask")).tolist()
        return tokens

    def lease(self, stack: ExitStack) -> None:
        """Lease the draft of every listener until the stack is left. The innermost draft that serves replaces the
        caller's assistant model."""
        prompt = None if self.prompts is None else self.prompts[0]
        for binding in self.bindings:
            lease = stack.enter_context(binding.serving(self.assistant_model, prompt))
            self.leases.append(lease)
            if lease.drafting is not None:
                k = binding.num_assistant_tokens
                self.drafting = lease.drafting if k is None else lease.drafting.at(k)
                self.domain, self.earlier = lease.domain, lease.earlier
                self.settings |= {} if k is None else {"num_assistant_tokens": k}
                self.began = lease.drafting.clock()
        for lease in self.leases:
            if lease.model is not None:
                self.kwargs["assistant_model"] = lease.model
        if self.kwargs.get("assistant_tokenizer") is not None:
            raise UnsupportedGenerationError(
                "`assistant_tokenizer` is not supported: the draft must have the target's tokenizer. Make such a "
                "draft from the target with `make_draft`."
            )

    def trim(self, count: int) -> None:
        """Keep the rounds of the first `count` tokens of the answer."""
        rounds, left = list[Round](), count
        for r in self.rounds:
            if left >= r.num_emitted:
                rounds.append(r)
            elif left > 0:  # the answer now ends inside this round
                rounds.append(r._replace(num_emitted=left, drafted=r.drafted[:left], from_text=r.from_text[:left]))
            left -= min(left, r.num_emitted)
        self.rounds = rounds

    def trace(self, binding: Binding, lease: Lease, *, has_changed: bool) -> Trace:
        """Return the trace for a listener, without rows if the target has changed during the request."""
        assert self.prompts is not None
        completion, rounds = _as_draft_rounds(self.sequence[0, self.input_ids.shape[1] :], self.rounds)
        width, size = 0 if has_changed else binding.num_logprobs, vocab_size_of(self.model)
        top_logits, top_ids, tail = self.rows.stored(width, len(completion), size)
        trace = Trace(
            prompt_ids=self.prompts[0],
            decoder_prompt_ids=self.prompts[1],
            completion_ids=completion,
            rounds=rounds,
            top_logits=top_logits,
            top_ids=top_ids,
            tail_logprob=tail,
            vocab_size=size,
            domain=lease.domain,
            draft_version=lease.version,
            sampling=self.settings,
            created_at_seconds=self.ended_at_seconds,
            target=None if has_changed else self.version,
        )
        if self.states and self.drafting is not None:
            states = torch.cat(self.states)[: len(trace.prompt_ids) + len(trace) - 1]
            keep_states(trace, states, self.drafting.state_layers)
        return trace


def stores_rows(bindings: Sequence[Binding]) -> bool:
    """Whether a listener stores rows of the target."""
    return any(binding.num_logprobs != 0 for binding in bindings)


def hand_over(requests: Sequence[Request]) -> None:
    """Give each listener the traces of requests that were answered together, which are made when they are read, and
    the pacer their time."""
    if (drafting := requests[0].drafting) is not None:
        tokens = sum(each.num_emitted for request in requests for each in request.rounds)
        drafting.pacer.answered(tokens, drafting.clock() - requests[0].began)
    for request in requests:
        request.ended_at_seconds = time.time()
    for i, binding in enumerate(requests[0].bindings):
        binding.sink(_traces(requests, i))


def _traces(requests: Sequence[Request], number: int) -> Iterator[Trace]:
    """Yield the traces for a listener, without those of requests that cannot be captured."""
    first = requests[0]
    has_changed = stores_rows(first.bindings) and target_version(first.model) != first.version
    if has_changed:
        logger.info("The target has changed during a request, so its rows are not stored.")
    for request in requests:
        if request.prompts is not None:
            try:
                yield request.trace(request.bindings[number], request.leases[number], has_changed=has_changed)
            except Exception:  # such as too little memory: the answer is there
                logger.exception("A request is not captured; its answer is delivered.")
