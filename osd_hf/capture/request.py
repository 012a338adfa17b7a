"""What is gathered of one assisted request, between its beginning and its end."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from osd_hf.capture.processors import TriedOut
from osd_hf.drafting.generator import Distributions, LeanCandidateGenerator, LeanDrafting, NoDistribution
from osd_hf.drafting.pacing import Pace
from osd_hf.errors import UnsupportedModelError
from osd_hf.pair import NO_WARPING, num_cached, request_settings, unwrap
from osd_hf.trace import DraftRound, Trace, ids_dtype, num_accepted

__all__ = ["Binding", "Lease", "Request", "Sink", "compress_rows"]

logger = logging.getLogger(__name__)

Sink = Callable[[Trace], object]

PENDING_LOGITS = 1 << 19  # elements that wait to be cut down: 2 MiB in float32, to leave caches to the weights

# Arguments of the assisted loop that the plain one does not know.
ASSISTED_ONLY = ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer")


@dataclass(frozen=True)
class Lease:
    """
    The draft of one request.

    Args:
        version (`int`, defaults to 0):
            Written into the trace.
        domain (`str`, *optional*):
            That the request belongs to; written into the trace.
        model (`PreTrainedModel`, *optional*):
            Takes the place of the request's assistant model; `None`: that one serves.
        drafting (`LeanDrafting`, *optional*):
            Makes its candidates; `None`: the stock generator does.
    """

    version: int = 0
    domain: str | None = None
    model: Any = None
    drafting: LeanDrafting | None = None


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
            Written into the traces, where `serving` finds no other.
        serving (`Callable[[Any, Any], ContextManager[Lease]]`, *optional*):
            Called with the request's assistant model and its prompt (token ids, int32, `(prompt,)`; `None` where it is
            not made of these alone), and entered around it; yields the draft that serves it.
        exact_stops (`bool`, defaults to `False`):
            Whether an answer ends at the token that meets a stopping criterion. The stock loop looks at the criteria
            once a round and may run past the token at which the target alone would have stopped.
        num_assistant_tokens (`int` or `"auto"`, *optional*):
            k of these requests, where it is another than that of the draft that serves them. Traces tell it.
    """

    sink: Sink
    owner: object
    num_logprobs: int | None = 64
    domain: str | None = None
    serving: Callable[[Any, Any], AbstractContextManager[Lease]] | None = None
    exact_stops: bool = False
    num_assistant_tokens: int | str | None = None
    tried: Sequence[TriedOut] = ()  # processors of the request to come that have been tried out already
    failure: BaseException | None = field(default=None, init=False)
    target: Any = field(default=None, init=False)  # whose requests it listens to now

    def lease(self, assistant_model: Any, prompt: Any) -> AbstractContextManager[Lease]:
        """The draft of a request, entered around it."""
        serving = self.serving
        if serving is None:
            return contextlib.nullcontext(Lease(domain=self.domain))
        return serving(assistant_model, prompt)

    def end(self) -> None:
        """Listen no more: requests under way go on, their traces go nowhere. Contexts that outlive the block still
        hold this; what it held is let go."""
        self.target, self.sink, self.serving = None, _dropped, None

    def deliver(self, trace: Trace) -> None:
        # An answer must not be lost to a broken sink: the failure is kept and raised where the capture ends.
        try:
            self.sink(trace)
        except Exception as error:
            logger.exception("A trace sink failed; the answer is delivered, the error is raised when capture ends.")
            self.failure = self.failure or error


def _dropped(trace: Trace) -> None:
    pass


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


class _WatchedProcessors(LogitsProcessorList):
    """The list of a target that decodes alone: each row that it gets is a token's. A recorder inside the list would
    have its signature inspected at every token."""

    def __init__(self, processors: LogitsProcessorList, request: Request) -> None:
        super().__init__(processors)
        self.request = request
        self.clock = time.perf_counter if request.drafting is None else request.drafting.clock
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(self.clock())
        if self.request.keeps_rows:
            self.request.keep(scores.clone())
        processed: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        return processed


@dataclass(eq=False)
class _Round:
    drafted: torch.Tensor
    num_emitted: int
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
        leases: list[Lease],
        prompts: tuple[Any, Any] | None,
    ) -> None:
        self.model = model
        self.bindings = bindings
        self.generator: Any = None
        self.leases = leases
        self.input_ids = input_ids
        self.sequence = input_ids  # as far as it has come
        self.kwargs = kwargs
        self.rounds: list[_Round] = []
        self.pending: list[torch.Tensor] = []
        self.num_pending = 0
        self.kept: dict[int | None, list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]] = {}
        self.raw: _RawRows | None = None
        self.drafted = input_ids[0, :0]
        self.draft_logits: torch.Tensor | None = None
        self.widths = {b.num_logprobs for b in bindings}
        self.keeps_rows = self.widths != {0}
        self.num_cached = num_cached(model, input_ids, kwargs)
        self.prompts = prompts
        self.drafting: LeanDrafting | None = None
        self.pace: Pace | None = None
        self.settings = request_settings(kwargs["generation_config"], input_ids.shape[1], kwargs["logits_processor"])
        for binding, lease in zip(bindings, leases, strict=True):
            if lease.drafting is not None:
                k = binding.num_assistant_tokens
                self.drafting = lease.drafting if k is None else lease.drafting.at(k)
                do_sample = bool(kwargs["generation_config"].do_sample)
                self.pace = self.drafting.pace(lease.domain, do_sample=do_sample)
                self.settings |= {} if k is None else {"num_assistant_tokens": k}

    def decode_plainly(self, decode: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Let the target decode alone, by its own loop `decode`, while its rows are kept."""
        self.num_cached = 0  # that loop knows by itself what a cache holds
        watched = _WatchedProcessors(kwargs["logits_processor"], self)
        kwargs = {name: value for name, value in kwargs.items() if name not in ASSISTED_ONLY}
        output = decode(self.input_ids, **{**kwargs, "logits_processor": watched})
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        self.sequence = sequences[:1]
        self.rounds = [_Round(self.drafted, 1, None, None)] * (sequences.shape[1] - self.input_ids.shape[1])
        if self.pace is not None and len(watched.times) > 1:
            rounds = len(watched.times) - 1
            self.pace.timed(0, 0.0, (watched.times[-1] - watched.times[0]) / rounds, rounds=rounds)
        return output

    def lean_generator(self, *, generation_config: Any, **kwargs: Any) -> Any:
        """The lean generator of a listener whose draft this is; `None` where the stock one is to serve."""
        if self.drafting is None or self.pace is None:
            return None
        if self.prompts is None:
            self.drafting.left("a prompt is not made of token ids alone")
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

        if is_stock:
            generator.logits_processor.append(Distributions())

        propose, adapt = generator.get_candidates, generator.update_candidate_strategy

        def get_candidates(input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            try:
                candidate_ids, candidate_logits = propose(input_ids, **kwargs)
            except NoDistribution:
                candidate_ids, candidate_logits = input_ids, None
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
        count = input_ids.shape[1] - self.sequence.shape[1]
        self.sequence = input_ids
        if self.keeps_rows:
            self.keep(scores[0, :count] if self.raw is None else torch.stack(self.raw.rows[:count]))
        if self.raw is not None:
            self.raw.rows.clear()
        p = q = None
        if self.settings.get("do_sample") and self.draft_logits is not None:
            examined = self.drafted[:count].to(scores.device)
            index = examined[:, None]
            p = scores[0, : len(examined)].softmax(-1).gather(-1, index)[:, 0]
            q = self.draft_logits[0, : len(examined)].to(scores.device).softmax(-1).gather(-1, index)[:, 0]
        self.rounds.append(_Round(self.drafted, count, p, q))

    def keep(self, rows: torch.Tensor) -> None:
        """Take in raw target rows, `(rows, vocab)`, of emitted tokens."""
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
        generator, self.generator = self.generator, None
        if generator is None:
            return
        for name in ("get_candidates", "update_candidate_strategy"):  # a circle, in which the draft's cache would wait
            vars(generator).pop(name, None)
        if isinstance(generator, LeanCandidateGenerator):
            generator.close()

    def finish(self) -> None:
        if self.prompts is None:
            return
        completion, rounds = _as_draft_rounds(self.sequence[0, self.input_ids.shape[1] :], self.rounds)
        if self.pending:
            self.compress()
        prompt, decoder_prompt = self.prompts
        vocab_size = int(self.model.config.get_text_config().vocab_size)
        for binding, lease in zip(self.bindings, self.leases, strict=True):
            top_logits, top_ids, tail = self._rows(binding.num_logprobs, vocab_size, len(completion))
            binding.deliver(
                Trace(
                    prompt_ids=prompt,
                    decoder_prompt_ids=decoder_prompt,
                    completion_ids=completion,
                    rounds=rounds,
                    top_logits=top_logits,
                    top_ids=top_ids,
                    tail_logprob=tail,
                    vocab_size=vocab_size,
                    domain=lease.domain,
                    draft_version=lease.version,
                    sampling=self.settings,
                    created_at_seconds=time.time(),
                )
            )

    def _rows(self, width: int | None, vocab_size: int, total: int) -> tuple[Any, Any, Any]:
        dtype = ids_dtype(vocab_size)
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


def _as_draft_rounds(completion: torch.Tensor, rounds: list[_Round]) -> tuple[Any, tuple[DraftRound, ...]]:
    """The completion's token ids, and the rounds. What lies on the device comes over at once."""
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
        found.append(DraftRound(ours, accepted, len(theirs), p, q))
    return emitted, tuple(found)


def _end_of(input_ids: torch.Tensor, candidate_ids: torch.Tensor, criteria: StoppingCriteriaList) -> int | None:
    """Length of the sequence up to and with the first drafted token that meets a criterion; `None` if none does."""
    for length in range(input_ids.shape[1] + 1, candidate_ids.shape[1] + 1):
        if bool(criteria(candidate_ids[:, :length], None).any()):
            return length
    return None
