"""What is gathered of one assisted request, between its beginning and its end."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from osd_hf.drafting import LeanCandidateGenerator, LeanDrafting
from osd_hf.errors import UnsupportedModelError
from osd_hf.pacing import Pace
from osd_hf.records import DraftRound, Trace, ids_dtype
from osd_hf.wrappers import unwrap

__all__ = ["Binding", "Request", "Sink", "compress_rows", "sampling_settings"]

logger = logging.getLogger(__name__)

Sink = Callable[[Trace], object]

PENDING_LOGITS = 1 << 19  # elements that wait to be cut down: 2 MiB in float32, to leave caches to the weights

# Arguments of the assisted loop that the plain one does not know.
ASSISTED_ONLY = ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer")

# `None` would be filled up with defaults, top_k = 50 among them.
NO_WARPING = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
}  # fmt: skip
# What of a generation config shapes the distribution or bounds the answer: kept with a trace, so that a replay can
# process a draft's logits as the live request did.
SAMPLING_FIELDS = (
    "do_sample", *NO_WARPING, "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "min_length", "min_new_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits", "eos_token_id",
)  # fmt: skip


@dataclass(eq=False)
class Binding:
    """
    One listener of a target's assisted requests.

    Args:
        sink (`Callable[[Trace], object]`):
            Gets the trace when a request has ended well.
        owner (`object`):
            Of several bindings with one owner, the innermost alone listens.
        num_logprobs (`int`, *optional*):
            Target entries kept per position; 0 keeps no rows, `None` keeps whole rows.
        domain (`str`, *optional*):
            Written into the traces.
        serving (`Callable[[], ContextManager[int]]`, *optional*):
            Entered around each request; yields the version of the draft that serves it.
        exact_stops (`bool`, defaults to `False`):
            Whether an answer ends at the token that meets a stopping criterion. The stock loop looks at the criteria
            once a round and may run past the token at which the target alone would have stopped.
        drafting (`LeanDrafting`, *optional*):
            Makes the candidates where the request's assistant model is its draft; otherwise the stock generator does.
    """

    sink: Sink
    owner: object
    num_logprobs: int | None = 64
    domain: str | None = None
    serving: Callable[[], AbstractContextManager[int]] = field(default=lambda: contextlib.nullcontext(0))
    exact_stops: bool = False
    drafting: LeanDrafting | None = None
    failure: BaseException | None = field(default=None, init=False)

    def deliver(self, trace: Trace) -> None:
        # An answer must not be lost to a broken sink: the failure is kept and raised where the capture ends.
        try:
            self.sink(trace)
        except Exception as error:
            logger.exception("A trace sink failed; the answer is delivered, the error is raised when capture ends.")
            self.failure = self.failure or error


def compress_rows(
    logits: torch.Tensor, num_logprobs: int | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """
    Cut target rows down to what a [`Trace`] keeps of them.

    Args:
        logits (`torch.Tensor` of shape `(rows, vocab)`):
            Raw logits.
        num_logprobs (`int`, *optional*):
            Entries to keep (K); `None` keeps whole rows.

    Returns:
        `top_logits` (float16, `(rows, K)`, relative to the largest), `top_ids` (int64, `(rows, K)`; `None` for whole
        rows) and `tail_logprob` (float32, `(rows,)`).
    """
    logits = logits.float()
    if num_logprobs is None or num_logprobs >= logits.shape[-1]:
        relative = logits - logits.amax(-1, keepdim=True)
        return relative.half(), None, torch.full_like(relative[:, 0], -torch.inf)
    top, ids = logits.topk(num_logprobs, dim=-1)
    kept = (top.logsumexp(-1) - logits.logsumexp(-1)).clamp(max=0)
    return (top - top[:, :1]).half(), ids, torch.log(-torch.expm1(kept))


class _RawRows(LogitsProcessor):
    """First in the list, it sees each row as the target made it; later ones overwrite it in place, so it clones."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows.append(scores[0].clone())
        return scores


class _PlainRows(LogitsProcessor):
    """The same where the target decodes alone: each row is a token's."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        self.request.keep(scores.clone())
        return scores


@dataclass(eq=False)
class _Round:
    drafted: torch.Tensor
    emitted: torch.Tensor
    p: torch.Tensor | None
    q: torch.Tensor | None


class Request:
    """What is gathered between the beginning and the end of one assisted request. Tensors stay where they are until
    the end, so that a round waits for no transfer."""

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        kwargs: dict[str, Any],
        bindings: list[Binding],
        versions: list[int],
    ) -> None:
        self.model = model
        self.bindings = bindings
        self.generator: Any = None
        self.versions = versions
        self.input_ids = input_ids
        self.kwargs = kwargs
        self.length = input_ids.shape[1]
        self.rounds: list[_Round] = []
        self.pending: list[torch.Tensor] = []
        self.num_pending = 0
        self.kept: dict[int | None, list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]] = {}
        self.raw: _RawRows | None = None
        self.drafted = input_ids[0, :0]
        self.draft_logits: torch.Tensor | None = None
        self.widths = {b.num_logprobs for b in bindings}
        self.num_cached = _num_cached(model, input_ids, kwargs)
        self.prompts = _prompt_ids(model, input_ids, kwargs, prefix_unseen=self.num_cached is None)
        self.drafting: LeanDrafting | None = None
        self.pace: Pace | None = None
        for binding in bindings:
            if binding.drafting is not None and binding.drafting.draft is kwargs.get("assistant_model"):
                self.drafting = binding.drafting
                do_sample = bool(kwargs["generation_config"].do_sample)
                self.pace = binding.drafting.pace(binding.domain, do_sample=do_sample)
        self.settings = _settings(kwargs["generation_config"], input_ids.shape[1], kwargs["logits_processor"])

    def decode_plainly(self, decode: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Let the target decode alone, by its own loop `decode`, while its rows are kept."""
        rows = _PlainRows(self)
        kwargs["logits_processor"].insert(0, rows)
        kwargs = {name: value for name, value in kwargs.items() if name not in ASSISTED_ONLY}
        output = decode(self.input_ids, **kwargs)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        emitted = sequences[0, self.length :].split(1)
        self.rounds = [_Round(self.drafted, token, None, None) for token in emitted]
        if self.pace is not None and len(rows.times) > 1:
            seconds = (rows.times[-1] - rows.times[0]) / (len(rows.times) - 1)
            self.pace.timed(0, 0.0, seconds, rounds=len(rows.times))
        return output

    def lean_generator(self, *, generation_config: Any, **kwargs: Any) -> Any:
        """The lean generator of a listener whose draft this is; `None` where the stock one is to serve."""
        if self.prompts is None or self.drafting is None or self.pace is None:
            return None
        return self.drafting.generator(
            self.pace,
            kwargs["input_ids"],
            generation_config=generation_config,
            inputs_tensor=kwargs["inputs_tensor"],
            logits_processor=kwargs["logits_processor"],
            model_kwargs=kwargs["model_kwargs"],
            vocab_size=int(self.model.config.get_text_config().vocab_size),
        )

    def watch(self, generator: Any, logits_processor: LogitsProcessorList) -> None:
        if type(generator) not in (AssistedCandidateGenerator, LeanCandidateGenerator):
            raise UnsupportedModelError(
                f"Drafts made by {type(generator).__name__} cannot be watched: learning needs an ordinary assistant "
                "model with the target's tokenizer, passed as `assistant_model`."
            )
        if len(logits_processor) > 0:
            # Behind the generator's back: it has copied the list, the draft's own rows must not be recorded.
            self.raw = _RawRows()
            logits_processor.insert(0, self.raw)
        is_stock = type(generator) is AssistedCandidateGenerator
        if is_stock and self.prompts is not None:
            _mend_drafting(generator, self.input_ids)
        criteria = self.kwargs["stopping_criteria"]
        stops = [c for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
        stop_at = StoppingCriteriaList(stops) if any(b.exact_stops for b in self.bindings) and stops else None
        if stop_at is not None and is_stock:
            # The nested `generate` has no tokenizer and refuses stop strings; they are heeded below instead.
            generator.generation_config.stop_strings = None
        config = self.kwargs["generation_config"]
        max_length = config.max_length
        self.generator = generator

        propose, adapt = generator.get_candidates, generator.update_candidate_strategy

        def get_candidates(input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            candidate_ids, candidate_logits = propose(input_ids, **kwargs)
            if stop_at is not None:
                end = _end_of(input_ids, candidate_ids, stop_at)
                # The loop cuts what it emits at this length: nothing behind the token that meets the criterion. That
                # token itself stays drafted: left out, it would come too rarely when sampled, as it would have to be
                # drawn from the target's distribution after the draft had drawn it from its own.
                config.max_length = max_length if end is None else end
                candidate_ids = candidate_ids[:, :end]
                if candidate_logits is not None:
                    candidate_logits = candidate_logits[:, : candidate_ids.shape[1] - input_ids.shape[1]]
            self.drafted = candidate_ids[0, input_ids.shape[1] :]
            self.draft_logits = candidate_logits
            return candidate_ids, candidate_logits

        def update_candidate_strategy(input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
            self.end_round(input_ids, scores)
            adapt(input_ids, scores, num_matches)

        generator.get_candidates = get_candidates
        generator.update_candidate_strategy = update_candidate_strategy

    def end_round(self, input_ids: torch.Tensor, scores: torch.Tensor) -> None:
        emitted = input_ids[0, self.length :]
        self.length = input_ids.shape[1]
        count = len(emitted)
        if self.raw is None:
            rows = scores[0, :count]
        else:
            rows = torch.stack(self.raw.rows[:count])
            self.raw.rows.clear()
        p = q = None
        if self.settings.get("do_sample") and self.draft_logits is not None:
            examined = self.drafted[:count].to(scores.device)
            index = examined[:, None]
            p = scores[0, : len(examined)].softmax(-1).gather(-1, index)[:, 0]
            q = self.draft_logits[0, : len(examined)].to(scores.device).softmax(-1).gather(-1, index)[:, 0]
        self.keep(rows)
        self.rounds.append(_Round(self.drafted, emitted, p, q))

    def keep(self, rows: torch.Tensor) -> None:
        """Take in raw target rows, `(rows, vocab)`, of emitted tokens."""
        if self.widths != {0}:
            self.pending.append(rows)
            self.num_pending += rows.numel()
            if self.num_pending > PENDING_LOGITS:
                self.compress()

    def compress(self) -> None:
        """Cut the pending rows down, those of many rounds at once."""
        rows = torch.cat(self.pending)
        self.pending.clear()
        self.num_pending = 0
        for width in self.widths - {0}:
            self.kept.setdefault(width, []).append(compress_rows(rows, width))

    def close(self) -> None:
        """The request has ended, well or not."""
        if isinstance(self.generator, LeanCandidateGenerator):
            self.generator.close()

    def finish(self) -> None:
        if self.prompts is None:
            return
        rounds = tuple(_as_draft_round(r) for r in self.rounds)
        completion = torch.cat([r.emitted for r in self.rounds]).to(torch.int32).cpu().numpy()
        if self.pending:
            self.compress()
        prompt_ids, decoder_prompt_ids = self.prompts
        vocab_size = int(self.model.config.get_text_config().vocab_size)
        for binding, version in zip(self.bindings, self.versions, strict=True):
            top_logits, top_ids, tail = self._rows(binding.num_logprobs, vocab_size)
            binding.deliver(
                Trace(
                    prompt_ids=prompt_ids,
                    decoder_prompt_ids=decoder_prompt_ids,
                    completion_ids=completion,
                    rounds=rounds,
                    top_logits=top_logits,
                    top_ids=top_ids,
                    tail_logprob=tail,
                    vocab_size=vocab_size,
                    domain=binding.domain,
                    draft_version=version,
                    sampling=self.settings,
                    created_at_seconds=time.time(),
                )
            )

    def _rows(self, width: int | None, vocab_size: int) -> tuple[Any, Any, Any]:
        dtype = ids_dtype(vocab_size)
        total = sum(len(r.emitted) for r in self.rounds)
        if width == 0:
            return np.zeros((total, 0), np.float16), np.zeros((total, 0), dtype), np.zeros(total, np.float32)
        kept = self.kept[width]
        # The target's own loop may have run on behind the end, by a step that it took back.
        top_logits = torch.cat([k[0] for k in kept])[:total].cpu().numpy()
        tail = torch.cat([k[2] for k in kept])[:total].cpu().numpy()
        ids = [k[1] for k in kept if k[1] is not None]
        top_ids = torch.cat(ids)[:total].cpu().numpy().astype(dtype) if ids else np.zeros((total, 0), dtype)
        return top_logits, top_ids, tail


def _mend_drafting(generator: AssistedCandidateGenerator, input_ids: torch.Tensor) -> None:
    """
    Let the draft see what the target sees. The output would be the same without it, but a draft as good as the target
    would be rejected: `generate` drops masks of ones, so that the draft's own `generate` takes pad tokens in the
    context for padding and, for an encoder-decoder, feeds the whole answer once more on top of its cache; and it warps
    the draft's distribution twice, by the processors that it is handed and by its settings.
    """
    draft = unwrap(generator.assistant_model)
    name = "decoder_attention_mask" if draft.config.is_encoder_decoder else "attention_mask"
    if generator.assistant_kwargs.get(name) is None and name in inspect.signature(draft.forward).parameters:
        generator.assistant_kwargs[name] = torch.ones_like(input_ids, device=draft.device)
    if generator.generation_config.do_sample:
        for name, neutral in NO_WARPING.items():
            setattr(generator.generation_config, name, neutral)


def _num_cached(model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> int | None:
    """Tokens of the prompt that lie in a cache of an earlier turn; `None` where the cache holds tokens that the prompt
    does not repeat, which `generate` tells by a mask longer than the prompt."""
    cache = kwargs.get("past_key_values")
    cached = 0 if cache is None else int(cache.get_seq_length())
    if cached == 0:
        return 0
    mask = kwargs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    length = getattr(kwargs["generation_config"], "_mask_length", None) if mask is None else mask.shape[1]
    repeated = length in (None, input_ids.shape[1]) and cached < input_ids.shape[1]
    return cached if repeated else None


def _as_draft_round(r: _Round) -> DraftRound:
    drafted, emitted = r.drafted.cpu().numpy().astype(np.int32), r.emitted.cpu().numpy()
    both = min(len(drafted), len(emitted))
    # Not the loop's own count of matches, which is one short where the emitted tokens were cut at EOS or at the limit.
    differs = np.flatnonzero(drafted[:both] != emitted[:both])
    accepted = int(differs[0]) if len(differs) else both
    examined = min(accepted + 1, both)
    p, q = (None if x is None else x[:examined].float().cpu().numpy() for x in (r.p, r.q))
    return DraftRound(drafted, accepted, len(emitted), p, q)


def _end_of(input_ids: torch.Tensor, candidate_ids: torch.Tensor, criteria: StoppingCriteriaList) -> int | None:
    """Length of the sequence up to and with the first drafted token that meets a criterion; `None` if none does."""
    for length in range(input_ids.shape[1] + 1, candidate_ids.shape[1] + 1):
        if bool(criteria(candidate_ids[:, :length], None).any()):
            return length
    return None


def _prompt_ids(
    model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any], *, prefix_unseen: bool
) -> tuple[Any, Any] | None:
    """Prompt ids without padding and, for an encoder-decoder, the decoder's prompt; `None` where the request also
    hangs on something other than token ids, so that no draft could be taught from its trace."""

    def without_padding(ids: torch.Tensor, mask: Any) -> Any:
        row = ids[0]
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            row = row[mask[0].bool()]
        return row.to(torch.int32).cpu().numpy()

    is_encoder_decoder = model.config.is_encoder_decoder
    source = kwargs.get("inputs_tensor") if is_encoder_decoder else input_ids
    foreign = [
        name
        for name, value in kwargs.items()
        if name != "inputs_tensor" and isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 2
    ]
    if source is None or source.is_floating_point() or source.shape[1] == 0 or foreign or prefix_unseen:
        logger.warning(
            "A request is not captured: its prompt is not made of token ids alone (%s).",
            ", ".join(foreign) or ("part of it lies only in the cache" if prefix_unseen else "embeddings or features"),
        )
        return None
    if not is_encoder_decoder:
        return without_padding(input_ids, kwargs.get("attention_mask")), None
    return without_padding(source, kwargs.get("attention_mask")), input_ids[0].to(torch.int32).cpu().numpy()


def sampling_settings(generation_config: Any) -> dict[str, Any]:
    """Those settings of `SAMPLING_FIELDS` that do something, ready for JSON."""
    settings: dict[str, Any] = {}
    for name in SAMPLING_FIELDS:
        value = getattr(generation_config, name, None)
        is_id = name.endswith("_token_id")  # of which 0 is one like any other
        neutral = value is None or value is False or (not is_id and value in (0, 1.0) and not isinstance(value, bool))
        if not neutral and (generation_config.do_sample or name not in NO_WARPING):
            # Biases are keyed by tuples of ids, which JSON has not; transformers takes pairs as well.
            settings[name] = [[list(k), v] for k, v in value.items()] if isinstance(value, dict) else value
    return settings


def _settings(generation_config: Any, prompt_tokens: int, processors: LogitsProcessorList) -> dict[str, Any]:
    return {
        **sampling_settings(generation_config),
        "max_new_tokens": int(generation_config.max_length) - prompt_tokens,
        "processors": [type(p).__name__ for p in processors],
    }
