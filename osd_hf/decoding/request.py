"""Decode one assisted request: lease its draft, watch transformers' loop, and record a trace."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator
from transformers.generation.configuration_utils import BaseWatermarkingConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from osd_hf.decoding.checks import (
    ASSISTED_ONLY,
    UNLIMITED,
    Limits,
    foreign_arguments,
    is_stateless,
    limits_of,
    log_failed_draft,
    log_once,
    not_watched,
    undrafted,
    unknown_criterion,
)
from osd_hf.decoding.draft_length import Pace, RoundTime
from osd_hf.decoding.forward import CompiledTarget, Verification
from osd_hf.decoding.generator import LeanCandidateGenerator, LeanDrafting, without_padding
from osd_hf.decoding.text import TextIndex
from osd_hf.errors import OSDError, UnsupportedGenerationError, UnsupportedModelError
from osd_hf.models import unwrap, vocab_size_of
from osd_hf.target_version import target_version
from osd_hf.trace import DraftRound, Trace, ids_dtype, num_accepted
from osd_hf.utils.context import neutral_context
from osd_hf.utils.kernels import fast_kernels

logger = logging.getLogger(__name__)

Sink = Callable[[Trace], object]
Sinks = Callable[[Sequence[Trace]], object]

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
    drafting: LeanDrafting | None = None  # makes the candidates; with `None`, transformers' own generator does
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
    compiled: CompiledTarget | None = None  # verifies the candidates
    target: PreTrainedModel | None = field(default=None, init=False)

    def end(self) -> None:
        """Stop listening and release everything. Requests that are running go on."""
        self.target = None
        self.sink = lambda traces: None
        self.serving = lambda *_: contextlib.nullcontext(Lease())


# --- the content of a trace -----------------------------------------------------------------------------------------


def sampling_settings(generation_config: GenerationConfig, *, padding: int = 0) -> dict[str, Any]:
    """Return the settings of `SAMPLING_FIELDS` that do something, ready for JSON. `min_length` counts the `padding`
    tokens before the prompt, which a trace does not have."""
    settings: dict[str, Any] = {}
    for name, neutral in SAMPLING_FIELDS.items():
        value = _as_json(getattr(generation_config, name, None))
        if value is not None and name == "min_length":
            value = max(value - padding, 0)
        does_something = value is not None and (neutral is None or value != neutral)
        if does_something and (generation_config.do_sample or name not in NO_WARPING):
            settings[name] = value
    return settings


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, BaseWatermarkingConfig):  # other kinds have a state
        return value.to_dict() if type(value) is WatermarkingConfig else None
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    if isinstance(value, dict):  # biases by tuples of ids; transformers accepts pairs as well
        return [[list(ids), bias] for ids, bias in value.items()]
    return value


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
    # If the encoder's outputs were given, negative ids replace the source.
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
    """
    Compress raw target rows, `(rows, vocab)`, to what a [`Trace`] stores.

    Returns:
        `tuple`: Logits of the K largest entries relative to the largest (float16, `(rows, K)`), their ids (int64,
            `(rows, K)`), and the log-mass of the others (float32, `(rows,)`). `None` stores full rows and no ids.
    """
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

    def add(self, rows: torch.Tensor) -> None:
        """Add raw rows, `(rows, vocab)`, of emitted tokens."""
        self._pending.append(rows)
        self._num_pending += rows.numel()
        if self._num_pending > MAX_PENDING_LOGITS:
            self._compress()

    @neutral_context()
    def _compress(self) -> None:
        if self._pending:
            rows = torch.cat(self._pending)
            self._pending, self._num_pending = [], 0
            for width, parts in self.parts.items():
                parts.append(compress_rows(rows, width))

    @neutral_context()
    def stored(
        self, width: int | None, num_tokens: int, vocab_size: int
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return `top_logits`, `top_ids` and `tail_logprob` of a [`Trace`]. The target's own loop may have run for one
        more step."""
        dtype = ids_dtype(vocab_size)
        if width == 0:
            nothing = np.zeros((num_tokens, 0), np.float16)
            return nothing, nothing.astype(dtype), np.zeros(num_tokens, np.float32)
        self._compress()
        columns = zip(*self.parts[width], strict=True)
        top_logits, top_ids, tail = (torch.cat(column)[:num_tokens].cpu().numpy() for column in columns)
        return top_logits, top_ids.astype(dtype), tail


@dataclass(eq=False)
class Round:
    """What one round proposed, and how many tokens it emitted."""

    drafted: torch.Tensor
    num_emitted: int
    from_text: Sequence[bool] = ()
    p: torch.Tensor | None = None
    q: torch.Tensor | None = None


def _as_draft_rounds(completion: torch.Tensor, rounds: list[Round]) -> tuple[Any, tuple[DraftRound, ...]]:
    """Return the completion's token ids and the rounds. Tensors are moved from the device together."""
    emitted = completion.to(torch.int32).cpu().numpy()
    drafted = torch.cat([r.drafted for r in rounds]).to(torch.int32).cpu().numpy()
    found = []
    num_emitted = num_drafted = 0
    for r in rounds:
        theirs = emitted[num_emitted : num_emitted + r.num_emitted]
        ours = drafted[num_drafted : num_drafted + len(r.drafted)]
        num_emitted, num_drafted = num_emitted + len(theirs), num_drafted + len(ours)
        accepted = num_accepted(ours, theirs)
        examined = min(accepted + 1, len(ours), len(theirs))
        p, q = (None if x is None else x[:examined].float().cpu().numpy() for x in (r.p, r.q))
        from_text = np.array(r.from_text, dtype=bool) if any(r.from_text) else None
        if from_text is not None:  # a trace has no text of other requests
            ours = np.where(from_text & (np.arange(len(ours)) >= accepted), np.int32(-1), ours)
        found.append(DraftRound(ours, accepted, len(theirs), p, q, from_text))
    return emitted, tuple(found)


# --- the request ----------------------------------------------------------------------------------------------------


class Decoding:
    """A request with the arguments that `generate` passes to the assisted loop."""

    def __init__(
        self, model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict[str, Any], bindings: Sequence[Binding]
    ) -> None:
        self.model = model
        self.input_ids = input_ids
        self.kwargs = kwargs
        self.bindings = bindings
        self.config = kwargs["generation_config"]
        self.max_length = self.config.max_length
        cache = kwargs.get("past_key_values")
        self.cached_tokens = 0 if cache is None else int(cache.get_seq_length())  # of an earlier turn

    def _sample(self, processors: LogitsProcessorList, **changes: Any) -> Any:
        """Let the target answer alone, by its own loop."""
        kwargs = {name: value for name, value in self.kwargs.items() if name not in ASSISTED_ONLY}
        return self.model._sample(self.input_ids, **{**kwargs, **changes, "logits_processor": processors})


class Request(Decoding):
    """One assisted request. Tensors stay on their device until the end, so no round waits for a transfer."""

    def __init__(
        self, model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict[str, Any], bindings: Sequence[Binding]
    ) -> None:
        super().__init__(model, input_ids, kwargs, bindings)
        self.num_cached = _num_cached(model, input_ids, kwargs, self.cached_tokens)
        self.prompts = _prompt_ids(model, input_ids, kwargs, is_partial=self.num_cached is None)
        padding = 0
        if self.prompts is not None and not model.config.is_encoder_decoder:
            padding = input_ids.shape[1] - len(self.prompts[0])
        self.settings = {
            **sampling_settings(self.config, padding=padding),
            "max_new_tokens": int(self.max_length) - input_ids.shape[1],
            "processors": [type(p).__name__ for p in kwargs["logits_processor"]],
        }
        self.leases: list[Lease] = []
        self.limits: Limits = UNLIMITED
        self.drafting: LeanDrafting | None = None
        self.pace: Pace | None = None
        self.domain: str | None = None
        self.earlier: Sequence[TextIndex] = ()
        self.verification: Verification | None = None
        self.generator: Any = None
        self.stop_at = StoppingCriteriaList()
        self.sequence = input_ids
        self.rounds: list[Round] = []
        self.rows = Rows({b.num_logprobs for b in bindings})
        self.version = target_version(model) if self.rows.parts else None
        self.raw: list[torch.Tensor] = []  # rows of the round, before processors overwrite them
        if self.rows.parts:
            raw = self.raw
            processors = WatchedProcessors(kwargs["logits_processor"], lambda scores: raw.append(scores[0].clone()))
            kwargs["logits_processor"] = processors
        self.drafted = input_ids[0, :0]
        self.draft_logits: torch.Tensor | None = None

    def lease(self, stack: contextlib.ExitStack) -> None:
        """Lease the drafts of all listeners. The innermost listener with a draft replaces the assistant model."""
        prompt = None if self.prompts is None else self.prompts[0]
        for binding in self.bindings:
            lease = stack.enter_context(binding.serving(self.kwargs.get("assistant_model"), prompt))
            self.leases.append(lease)
            if lease.drafting is not None:
                k = binding.num_assistant_tokens
                self.drafting = lease.drafting if k is None else lease.drafting.at(k)
                self.domain, self.earlier = lease.domain, lease.earlier
                self.settings |= {} if k is None else {"num_assistant_tokens": k}
            if lease.model is not None:
                self.kwargs["assistant_model"] = lease.model
        if self.kwargs.get("assistant_tokenizer") is not None:
            raise UnsupportedGenerationError(
                "`assistant_tokenizer` is not supported: the draft must have the target's tokenizer. Make such a "
                "draft from the target with `make_draft`."
            )

    @property
    def is_served(self) -> bool:
        """Whether a listener's draft serves, so the request is not only captured."""
        return any(lease.model is not None for lease in self.leases)

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Lease the drafts, and check whether and how they can help."""
        with contextlib.ExitStack() as stack:
            self.lease(stack)
            processors, criteria = self.kwargs["logits_processor"], self.kwargs["stopping_criteria"]
            why = undrafted(self.model, self.config, processors)
            if self.is_served:
                may_remember = unknown_criterion(criteria)
                if may_remember and not self._returns_more_than_tokens():
                    self.kwargs["stopping_criteria"] = _InTurn(criteria, self.input_ids.shape[1])
                else:
                    why = why or may_remember
                plain = Limits(why, max_tokens=1) if why else None
                self.limits = plain or limits_of(self.model, self.input_ids, self.kwargs)
                self._log_limits()
            elif why:
                raise not_watched(why)
            if self.drafting is not None:
                # The draft proposes only tokens that the processors allow; past text may not.
                may_repeat = self.prompts is not None and all(map(bears_any_token, processors))
                do_sample = bool(self.config.do_sample)
                self.pace = self.drafting.pace(self.domain, do_sample=do_sample, may_repeat=may_repeat)
                stack.enter_context(fast_kernels(self.model, self.drafting.draft, is_request=True))
            compiled = next((b.compiled for b in reversed(self.bindings) if b.compiled is not None), None)
            if compiled is not None and self.limits.allow_any(self.input_ids.shape[1], self.max_length - 1):
                self.verification = compiled.verification(
                    self.model, self.kwargs, self.input_ids.shape[1], self.max_length, self.limits.max_length
                )
            yield

    def _returns_more_than_tokens(self) -> bool:
        """Whether the caller gets something that the tokens after a met criterion would be in."""
        cache = self.kwargs.get("past_key_values")
        is_kept = self.config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        return self.kwargs.get("streamer") is not None or bool(is_kept)

    def _log_limits(self) -> None:
        limits, prompt_tokens = self.limits, self.input_ids.shape[1]
        if not limits.reason or limits.allow_any(prompt_tokens, self.max_length - 1):
            return
        how = "without speculation" if limits.max_tokens < 2 else "without speculation where that is not exact"
        log_once(self.model, f"{type(self.model).__name__} answers {how}: {limits.reason}.")

    @property
    def is_plain(self) -> bool:
        """Whether the target decodes alone."""
        prompt_tokens = self.input_ids.shape[1]
        if self.limits.forbid(prompt_tokens) or prompt_tokens == 0:  # of embeddings alone
            return True
        return self.pace is not None and self.verification is None and self.pace.is_plain()

    def decode_plainly(self) -> Any:
        """Let the target answer alone, and record its rows."""
        clock, rows = time.perf_counter if self.drafting is None else self.drafting.clock, self.rows
        times: list[float] = []

        def seen(scores: torch.Tensor) -> None:
            times.append(clock())
            if rows.parts:
                rows.add(scores.clone())

        output = self._sample(WatchedProcessors(self.kwargs["logits_processor"], seen))
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        self.sequence = sequences[:1]
        self.rounds = [Round(self.drafted, 1)] * (sequences.shape[1] - self.input_ids.shape[1])
        if len(times) > 1 and self.pace is not None and not self.limits.forbid(self.input_ids.shape[1]):
            self.pace.timed(plain_time(times))
        return output

    # --- called by the loop -----------------------------------------------------------------------------------------

    def make_generator(self, **kwargs: Any) -> Any:
        """Return the candidate generator: the draft's, or transformers' own."""
        generator: Any = None
        try:
            if self.drafting is not None and self.pace is not None:
                generator = self.drafting.generator(
                    self.pace, vocab_size_of(self.model), self.earlier, limits=self.limits, **kwargs
                )
            generator = generator or self.model._get_candidate_generator(**kwargs)
        except Exception as error:  # noqa: BLE001 - drafts of any kind
            generator = self._without_draft(error)
        self.watch(generator)
        return generator

    def _without_draft(self, error: Exception) -> CandidateGenerator:
        """Return a generator without candidates for a draft that has failed. Raise the error if the draft is the
        caller's."""
        if isinstance(error, OSDError) or not self.is_served:
            raise error
        log_failed_draft(self.kwargs["assistant_model"], error)
        logger.debug("The draft failed.", exc_info=error)
        return _NoCandidates()

    def watch(self, generator: Any) -> None:
        """Use this generator, and correct transformers' own one."""
        is_known = isinstance(generator, LeanCandidateGenerator | _NoCandidates)
        if type(generator) is not AssistedCandidateGenerator and not is_known:
            raise UnsupportedModelError(
                f"Drafts made by {type(generator).__name__} cannot be captured: learning needs an ordinary assistant "
                "model with the target's tokenizer, passed as `assistant_model`."
            )
        self.generator = generator
        self.stop_at = StoppingCriteriaList(filter(is_stateless, _checked_per_round(self.kwargs["stopping_criteria"])))
        if type(generator) is AssistedCandidateGenerator:
            if self.prompts is not None:
                _correct_draft_inputs(generator, self.input_ids)
            # The nested `generate` has no tokenizer, and gets a cache from round to round.
            generator.assistant_kwargs |= dict.fromkeys(("stop_strings", "token_healing", "cache_implementation"))
            if self.config.do_sample:
                generator.logits_processor.append(_RejectNoDistribution())

    def propose(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the candidates of a new round."""
        try:
            candidates = self.generator.get_candidates(input_ids, **kwargs)
        except _NoDistribution:
            candidates = input_ids, None
        except Exception as error:  # noqa: BLE001 - drafts of any kind
            failed, self.generator = self.generator, self._without_draft(error)
            if isinstance(failed, LeanCandidateGenerator):
                failed.close()
            candidates = input_ids, None
        length = input_ids.shape[1]
        count = self.limits.exact_candidates(candidates[0], length, self.input_ids.shape[1])
        if count < candidates[0].shape[1] - length:
            ids, logits = candidates
            candidates = ids[:, : length + count], None if logits is None or not count else logits[:, :count]
        if self.stop_at:
            candidates = self._up_to_stop(length, *candidates)
        candidate_ids, candidate_logits = candidates
        self.drafted = candidate_ids[0, length:]
        self.draft_logits = candidate_logits
        return candidate_ids, candidate_logits

    def _up_to_stop(
        self, length: int, candidate_ids: torch.Tensor, logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cut candidates after the token that meets a criterion, because the loop checks criteria once per round. The
        loop stops at `max_length`. The token itself stays a candidate: drawn only from the target after the draft had
        drawn it, it would be too rare."""
        ends = range(length + 1, candidate_ids.shape[1] + 1)
        end = next((n for n in ends if bool(self.stop_at(candidate_ids[:, :n], None).any())), None)
        self.config.max_length = self.max_length if end is None else end
        return candidate_ids[:, :end], logits if end is None or logits is None else logits[:, : end - length]

    def end_round(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Record a verified round: the sequence now, and its processed rows, `(1, rows, vocab)`."""
        count = input_ids.shape[1] - self.sequence.shape[1]
        self.sequence = input_ids
        if self.rows.parts:
            self.rows.add(torch.stack(self.raw[:count]) if self.raw else scores[0, :count])
            self.raw.clear()
        p = q = None
        if self.settings.get("do_sample") and len(self.drafted):
            examined = self.drafted[:count].to(scores.device)[:, None]
            p, q = (
                torch.ones(len(examined), dtype=torch.float32, device=scores.device)  # past text is certain
                if rows is None
                else rows[0, : len(examined)].to(scores.device).softmax(-1).gather(-1, examined)[:, 0]
                for rows in (scores, self.draft_logits)
            )
        from_text = self.generator.from_text if isinstance(self.generator, LeanCandidateGenerator) else ()
        self.rounds.append(Round(self.drafted, count, from_text[: len(self.drafted)], p, q))
        self.generator.update_candidate_strategy(input_ids, scores, num_matches)

    # --- the end ----------------------------------------------------------------------------------------------------

    def trim(self, count: int) -> None:
        """Keep the rounds of the first `count` tokens of the answer."""
        rounds, left = list[Round](), count
        for r in self.rounds:
            if left >= r.num_emitted:
                rounds.append(r)
            elif left > 0:  # it ends at an accepted candidate
                rounds.append(replace(r, num_emitted=left, drafted=r.drafted[:left], from_text=r.from_text[:left]))
            left -= min(left, r.num_emitted)
        self.rounds = rounds

    def returned(self, output: Any) -> Any:
        """Return the loop's output up to the token that met a criterion, and with the caller's cache."""
        criteria = self.kwargs["stopping_criteria"]
        if isinstance(criteria, _InTurn) and (excess := self.sequence.shape[1] - criteria.asked):
            output = self.sequence = self.sequence[:, :-excess]
            self.trim(output.shape[1] - self.input_ids.shape[1])
        if self.drafting is not None and isinstance(self.generator, LeanCandidateGenerator):
            self.drafting.keep(self.generator, self.kwargs.get("past_key_values"))
        if self.verification is not None and getattr(output, "past_key_values", None) is self.verification.cache:
            output.past_key_values = self.kwargs["past_key_values"]
        return output

    def close(self) -> None:
        """End the request, successful or not."""
        generator, self.generator = self.generator, None
        verification, self.verification = self.verification, None
        if isinstance(generator, LeanCandidateGenerator):
            generator.close()
        if verification is not None:
            verification.close()

    def finish(self) -> None:
        """Hand the trace of a successful request over."""
        hand_over([self])

    def traces(self) -> list[Trace | None]:
        """Return the trace for each listener; `None` if the request cannot be captured."""
        if self.prompts is None:
            return [None] * len(self.bindings)
        prompt, decoder_prompt = self.prompts
        size, found = vocab_size_of(self.model), list[Trace | None]()
        has_changed = self.rows.parts and target_version(self.model) != self.version
        if has_changed:
            logger.info("The target has changed during a request, so its rows are not stored.")
        for binding, lease in zip(self.bindings, self.leases, strict=True):
            width = 0 if has_changed else binding.num_logprobs
            try:
                completion, rounds = _as_draft_rounds(self.sequence[0, self.input_ids.shape[1] :], self.rounds)
                top_logits, top_ids, tail = self.rows.stored(width, len(completion), size)
            except Exception:  # such as too little memory: the answer is there
                logger.exception("A request is not captured; its answer is delivered.")
                found.append(None)
                continue
            trace = Trace(
                prompt_ids=prompt,
                decoder_prompt_ids=decoder_prompt,
                completion_ids=completion,
                rounds=rounds,
                top_logits=top_logits,
                top_ids=top_ids,
                tail_logprob=tail,
                vocab_size=size,
                domain=lease.domain,
                draft_version=lease.version,
                sampling=self.settings,
                created_at_seconds=time.time(),
                target=None if has_changed else self.version,
            )
            found.append(trace)
        return found


def hand_over(requests: Sequence[Request]) -> None:
    """Give each listener the traces of requests that were answered together."""
    traces = [request.traces() for request in requests]
    for i, binding in enumerate(requests[0].bindings):
        if kept := [trace for each in traces if (trace := each[i]) is not None]:
            binding.sink(kept)


def bears_any_token(processor: Any) -> bool:
    """Whether a processor accepts tokens that it forbids: one of transformers' own without a function of the user."""
    is_own = type(processor).__module__ == LogitsProcessor.__module__
    return is_own and type(processor) is not PrefixConstrainedLogitsProcessor


# --- arguments of transformers' loops -------------------------------------------------------------------------------


def bounded(config: GenerationConfig, criteria: StoppingCriteriaList, begins: int) -> GenerationConfig:
    """Return a copy of a request's generation config, because `max_length` changes from round to round."""
    config = copy.copy(config)
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:  # the caller's replaces that of the config
            config.max_length = max(int(criterion.max_length), begins + 1)
    return config


def _checked_per_round(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """Return the criteria that the loop checks once per round. It handles the others itself."""
    return StoppingCriteriaList(c for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria))


class WatchedProcessors(LogitsProcessorList):
    """The target's processors, which report each row before they overwrite it. A recorder inside of the list would
    have its signature inspected at every token."""

    def __init__(self, processors: LogitsProcessorList, seen: Callable[[torch.Tensor], object]) -> None:
        super().__init__(processors)
        self.seen = seen

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.seen(scores)
        processed: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        return processed


def plain_time(times: list[float]) -> RoundTime:
    """Return the average time of plain rounds, from the times of at least two rows. The first one read the prompt."""
    rounds = len(times) - 1
    return RoundTime(seconds=(times[-1] - times[0]) / rounds, rounds=rounds)


class _InTurn(StoppingCriteriaList):
    """The target's stopping criteria, which may remember their calls: they are called for each emitted token, up to
    the first one that meets a criterion."""

    def __init__(self, criteria: StoppingCriteriaList, asked: int) -> None:
        super().__init__(criteria)
        self.asked = asked  # tokens of the sequence

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        while True:
            self.asked += 1
            met: torch.Tensor = super().__call__(input_ids[:, : self.asked], scores, **kwargs)
            if self.asked >= input_ids.shape[1] or bool(met.any()):
                return met


class _NoCandidates(CandidateGenerator):
    """Propose nothing."""

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return input_ids, None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        pass


class _NoDistribution(Exception):
    """The draft's row has NaN, or allows no token."""


class _RejectNoDistribution(LogitsProcessor):
    """End the nested `generate` of transformers' own generator if no token can be sampled."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not math.isfinite(scores.amax()):
            raise _NoDistribution
        return scores


def _correct_draft_inputs(generator: AssistedCandidateGenerator, input_ids: torch.Tensor) -> None:
    """
    Give the draft the inputs that the target gets, so that a draft as good as the target is accepted.

    `generate` drops masks of ones. Then the draft's own `generate` takes pad tokens in the context for padding and,
    for an encoder-decoder, feeds the answer twice. It also warps the draft's distribution twice.
    """
    draft = unwrap(generator.assistant_model)
    name = "decoder_attention_mask" if draft.config.is_encoder_decoder else "attention_mask"
    if generator.assistant_kwargs.get(name) is None and name in inspect.signature(draft.forward).parameters:
        generator.assistant_kwargs[name] = torch.ones_like(input_ids, device=draft.device)
    if generator.generation_config.do_sample:
        for name, neutral in NO_WARPING.items():
            setattr(generator.generation_config, name, neutral)
