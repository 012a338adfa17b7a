"""The lean candidate generator: it drafts by the draft's own forward and leaves the rest to transformers' loop."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from osd_hf.drafting.forward import CompiledDraft, DraftForward
from osd_hf.drafting.pacing import FixedPace, Pace, Pacer
from osd_hf.pair import is_peft
from osd_hf.trace import num_accepted

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


def without_padding(ids: torch.Tensor, mask: Any) -> torch.Tensor:
    """The tokens of `ids`, of shape `(1, tokens)`, that a mask of the same shape does not hide; all without one."""
    row = ids[0]
    return row[mask[0].bool()] if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else row


class LeanCandidateGenerator(CandidateGenerator):
    """
    Candidates of one request. Greedy ones come without logits, as the loop compares tokens; sampled ones with the very
    logits that they were drawn from, processed as the target's, float32, `(1, drafted, vocab)`.

    The loop begins with `input_ids`, int64, `(1, prompt)`. What `attention_mask`, of the same shape, hides of them is
    padding, which the draft does not see: its positions are those of the target. The sequence has at most `max_length`
    tokens, of which the draft can be fed `max_positions`; drafting ends with one of `eos_token_ids`. `vocab_size` is
    the width of the target's logits, `logits_processor` its own, and `clock` tells the time in seconds.
    """

    def __init__(
        self,
        forward: DraftForward,
        pace: Pace,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None,
        logits_processor: LogitsProcessorList,
        do_sample: bool,
        max_length: int,
        max_positions: int | None,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.forward, self.pace, self.clock = forward, pace, clock
        # The loop's own list tells of the rows that it gets, which are to be the target's alone.
        self.logits_processor = LogitsProcessorList(logits_processor)
        self.do_sample, self.eos_token_ids, self.vocab_size = do_sample, eos_token_ids, vocab_size
        self.max_length, self.max_positions = max_length, max_positions
        # What the draft has been, or is to be, fed.
        self._context: list[int] = without_padding(input_ids, attention_mask).tolist()
        self._seen = input_ids.shape[1]
        self._drafted: list[int] = []
        self._confidences: list[float] = []
        self._began: float | None = None
        self._draft_seconds = 0.0
        self._is_typical = False

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft for the round that begins with this sequence, `(1, tokens)`: the sequence followed by the draft, and
        the draft's logits if they are drawn from; the sequence itself and `None` where nothing is drafted."""
        is_first = self._began is None
        now = self._began = self._end_round()
        self._drafted, self._confidences = [], []
        room = self.max_length - self._seen - 1
        if self.max_positions is not None:
            room = min(room, self.max_positions - len(self._context) + 1)
        tokens = min(self.pace.tokens(), room) if self._context else 0
        # A round that also reads a prompt, or catches up, does not tell what a round costs.
        missing = len(self._context) - self.forward.length
        self._is_typical = not is_first and (tokens <= 0 or missing <= 2)
        if tokens <= 0:
            self._draft_seconds = 0.0
            return input_ids, None
        drafted, rows = self._draft(input_ids, tokens)
        candidate_ids = torch.cat([input_ids, *drafted], dim=1)
        self._draft_seconds = self.clock() - now
        return candidate_ids, torch.stack(rows, dim=1) if rows else None

    def _end_round(self) -> float:
        now = self.clock()
        if self._began is not None:
            seconds = now - self._began if self._is_typical else None
            self.pace.timed(len(self._drafted), self._draft_seconds, seconds)
        return now

    def _draft(self, ids: torch.Tensor, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Draft into `self._drafted`; the tokens as tensors, and the logits that each was drawn from, if drawn."""
        pace, processors, device = self.pace, self.logits_processor, self.forward.device
        is_processed, reads_confidence = bool(self.do_sample or processors), pace.reads_confidence
        if self.forward.length:  # only a prompt can be padded; what was emitted stands at the end as it is
            feed = ids[:, self.forward.length - len(self._context) :].to(device)
        else:
            feed = torch.tensor([self._context], device=device)
        # Processors may keep what they make, and are called outside of inference mode.
        inference, no_mode = torch.inference_mode(), contextlib.nullcontext()
        drafted: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        with no_mode if is_processed else inference:
            while True:
                with inference if is_processed else no_mode:
                    logits = self.forward.feed(feed)
                if is_processed:
                    logits = self._like_the_targets(logits, ids)
                highest, chosen = logits.max(-1, keepdim=True)
                if not math.isfinite(highest):  # nothing can be drawn from NaN, nor where no token is allowed
                    self._is_typical = False
                    return drafted, rows
                if self.do_sample or reads_confidence:
                    probs = logits.softmax(-1, dtype=torch.float32)
                if self.do_sample:
                    chosen = torch.multinomial(probs, 1)
                    rows.append(logits)
                token = int(chosen)
                drafted.append(chosen.to(ids.device))
                self._drafted.append(token)
                confidence = 1.0
                if reads_confidence:
                    confidence = float(probs[0, token])
                    self._confidences.append(confidence)
                if len(self._drafted) >= tokens or token in self.eos_token_ids or not pace.goes_on(confidence):
                    return drafted, rows
                if processors:
                    ids = torch.cat([ids, drafted[-1]], dim=1)
                feed = chosen.to(device)

    def _like_the_targets(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # A copy: processors write into it, and into what they make of it, outside inference mode as well.
        logits = logits.to(device=ids.device, dtype=torch.float32, copy=True)
        missing = self.vocab_size - logits.shape[-1]
        if missing:  # embeddings padded otherwise than the target's
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        processed: torch.Tensor = self.logits_processor(ids, logits)
        return processed

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Take back what the target rejected. Takes the arguments of the loop, of which only the tokens are needed."""
        emitted: list[int] = input_ids[0, self._seen :].tolist()
        accepted = num_accepted(self._drafted, emitted)
        self._seen = input_ids.shape[1]
        known = len(self._context) + accepted
        self._context += emitted
        if self.forward.length:
            # The last drafted token was not fed; the last emitted one is what the next round begins with.
            self.forward.crop(min(self.forward.length, known, len(self._context) - 1))
        self.pace.judged(self._confidences, accepted, len(emitted))

    def close(self) -> None:
        """The request has ended."""
        self._end_round()
        self.pace.ended()
        self.forward.close()


class LeanDrafting:
    """
    Makes the lean candidate generators of one draft's requests. The weights of the draft may change in place between
    requests.

    Args:
        draft (`PreTrainedModel`): What drafts.
        num_assistant_tokens (`int` or `str`, *optional*):
            k, or `"auto"`; `None` reads the draft's generation config at each request.
        compiled (`CompiledDraft`, *optional*):
            Compiles the single-token forward, at the first request; shared with other copies of the draft.
        pacer (`Pacer`, *optional*): Shared with other drafts of the same size; what `"auto"` decides from.
    """

    def __init__(
        self,
        draft: Any,
        num_assistant_tokens: int | str | None,
        *,
        compiled: CompiledDraft | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self.draft, self.num_assistant_tokens = draft, num_assistant_tokens
        self.pacer = pacer or Pacer()
        self.clock: Clock = time.perf_counter  # one that waits for an accelerator makes costs exact, requests slower
        self._compiled = compiled
        self._told: set[str] = set()

    def at(self, num_assistant_tokens: int | str) -> LeanDrafting:
        """The same, for requests with another k."""
        other = copy.copy(self)
        other.num_assistant_tokens = num_assistant_tokens
        return other

    def pace(self, domain: str | None, *, do_sample: bool) -> Pace:
        """How one request of a domain drafts."""
        if self.num_assistant_tokens == "auto":
            return self.pacer.pace((domain, do_sample))
        if isinstance(self.num_assistant_tokens, int):
            return FixedPace(self.num_assistant_tokens, pacer=self.pacer)
        config = self.draft.generation_config
        defaults = config._get_default_generation_params()
        k, threshold = (
            defaults[name] if getattr(config, name, None) is None else getattr(config, name)
            for name in ("num_assistant_tokens", "assistant_confidence_threshold")
        )
        return FixedPace(int(k), float(threshold or 0.0), self.pacer)

    def generator(self, pace: Pace, vocab_size: int, **given: Any) -> LeanCandidateGenerator | None:
        """One request's generator, from what the loop passes to `_get_candidate_generator`; `None` where the stock one
        is to serve."""
        draft, generation_config, inputs_tensor = self.draft, given["generation_config"], given["inputs_tensor"]
        if is_peft(draft):
            self.left("the draft's adapter cannot be merged into its weights")
            return None
        schedule = getattr(draft.generation_config, "num_assistant_tokens_schedule", None)
        if self.num_assistant_tokens is None and schedule not in (None, "constant"):
            self.left(f"the draft's own generation config asks for the schedule {schedule!r}")
            return None
        limit = getattr(draft.config.get_text_config(decoder=True), "max_position_embeddings", None)
        source = None
        if draft.config.is_encoder_decoder:
            if limit is not None and inputs_tensor is not None and inputs_tensor.shape[1] > limit:
                limit = 0  # nothing is drafted for a source that the draft cannot read
            else:
                source = self._encode(inputs_tensor, given["model_kwargs"].get("attention_mask"))
        max_length = int(generation_config.max_length)
        if source is None and self._compiled is not None:
            forward = self._compiled.forward(draft, max_length if limit is None else min(max_length, limit))
        else:
            forward = DraftForward(draft, source)
        eos = generation_config._eos_token_tensor
        mask = "decoder_attention_mask" if draft.config.is_encoder_decoder else "attention_mask"
        return LeanCandidateGenerator(
            forward, pace, given["input_ids"], attention_mask=given["model_kwargs"].get(mask),
            logits_processor=given["logits_processor"], do_sample=bool(generation_config.do_sample),
            max_length=max_length, max_positions=limit,
            eos_token_ids=frozenset() if eos is None else frozenset(eos.tolist()), vocab_size=vocab_size,
            clock=self.clock,
        )  # fmt: skip

    @torch.inference_mode()
    def _encode(self, source_ids: Any, mask: torch.Tensor | None) -> dict[str, Any]:
        device = self.draft.device
        mask = None if mask is None else mask.to(device)
        outputs = self.draft.get_encoder()(input_ids=source_ids.to(device), attention_mask=mask, return_dict=True)
        return {"encoder_outputs": outputs, "attention_mask": mask}

    def left(self, why: str) -> None:
        """Say, once, why a request is left to the stock generator."""
        if why not in self._told:
            self._told.add(why)
            logger.warning("Drafting by transformers' stock generator: %s.", why)
