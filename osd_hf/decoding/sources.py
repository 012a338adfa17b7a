"""Propose candidates with a draft: `Drafting` is shared by requests, `DraftSource` belongs to one request."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from osd_hf.decoding.checks import log_once
from osd_hf.decoding.compiled import CompiledDraft
from osd_hf.decoding.draft_length import DraftLength, Pacer, StopRule
from osd_hf.decoding.forward import BatchDraftForward, DraftForward
from osd_hf.decoding.vocabulary import RestrictedDraft
from osd_hf.errors import first_line
from osd_hf.logits_processors import IMPARTIAL, RowProcessors
from osd_hf.models import has_soft_prompt, num_positions, unwrap

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class Drafting:
    """
    Serve the requests of one draft, whose weights may change in place between requests. `num_assistant_tokens` is k,
    or `"auto"` with candidates from `sources` (`"draft"`, `"text"`, or `"both"`), or `None` to read the draft's
    generation config at each request. Drafts of the same size share `compiled` forwards and a `pacer`.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        num_assistant_tokens: int | str | None,
        *,
        sources: str = "both",
        compiled: CompiledDraft | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self.draft = draft
        self.clock: Clock = time.perf_counter  # one that waits for an accelerator measures exactly, and is slower
        self.num_assistant_tokens, self.sources, self.pacer = num_assistant_tokens, sources, pacer or Pacer()
        self.token_ids: NDArray[np.int64] | None = None  # the draft's vocabulary; `None`: all tokens
        self._restricted: dict[int, RestrictedDraft] = {}  # by the size of the vocabulary
        self._can_be_restricted = True
        self._compiled = compiled

    def at(self, num_assistant_tokens: int | str) -> Drafting:
        """Return the same for requests with another k."""
        other = copy.copy(self)
        other.num_assistant_tokens = num_assistant_tokens
        if num_assistant_tokens != "auto":
            other.token_ids = None
        return other

    # --- requests ---

    def length(self, domain: str | None, rows: int, *, do_sample: bool, reads_text: bool) -> DraftLength:
        """Return what chooses the number and the source of a request's candidates."""
        key, stops_early = (domain, do_sample), self.draft.device.type == "cpu"
        if self.num_assistant_tokens == "auto":
            return DraftLength(
                self.pacer, key, rows, sources=self.sources, reads_text=reads_text, stops_early=stops_early
            )
        if isinstance(self.num_assistant_tokens, int):
            return DraftLength(self.pacer, key, rows, fixed_k=self.num_assistant_tokens)
        config = self.draft.generation_config
        defaults = config._get_default_generation_params()
        schedule = getattr(config, "num_assistant_tokens_schedule", None)
        if schedule not in (None, "constant"):
            log_once(self.draft, f"The draft proposes a constant number of tokens, not by the schedule {schedule!r}.")
        k, threshold = (
            defaults[name] if getattr(config, name, None) is None else getattr(config, name)
            for name in ("num_assistant_tokens", "assistant_confidence_threshold")
        )
        return DraftLength(self.pacer, key, rows, fixed_k=int(k), threshold=float(threshold or 0.0))

    def hindrance(self) -> str | None:
        """Return why the draft cannot propose candidates; `None` if it can."""
        return "the draft has a soft prompt of PEFT" if has_soft_prompt(self.draft) else None

    def reads(self, inputs_tensor: Any) -> bool:
        """Whether the draft can read the source of an encoder-decoder: token ids or, if its own input is of that kind,
        features."""
        if inputs_tensor is None or inputs_tensor.shape[1] == 0:
            return False
        if inputs_tensor.is_floating_point():
            return str(self.draft.main_input_name) not in ("input_ids", "inputs_embeds")
        return bool((inputs_tensor >= 0).all())  # ids below 0 stand for a source that only the target knows

    def model(self) -> tuple[PreTrainedModel, Tensor | None]:
        """Return the model that drafts, and the ids of the columns of its logits, int64; `None`: all tokens."""
        if self.token_ids is None:
            return unwrap(self.draft), None
        restricted = self._restricted[len(self.token_ids)]
        return restricted.model, restricted.token_ids

    @property
    def max_positions(self) -> int | None:
        """Number of positions of the draft."""
        return num_positions(self.draft.config)

    def forward(self, kwargs: dict[str, Any], length: int, most: int) -> DraftForward | None:
        """Return the forwards of one request with these loop arguments: a prompt of `length` tokens, and at most
        `most` in the end. `None` if the source is longer than the draft's positions."""
        model, limit = self.model()[0], self.max_positions
        if self.draft.config.is_encoder_decoder:
            source = kwargs["inputs_tensor"]
            if not source.is_floating_point() and limit is not None and source.shape[1] > limit:
                return None
            return DraftForward(model, self._encode(source, kwargs.get("attention_mask")))
        most = most if limit is None else min(most, limit)
        if self._compiled is not None:
            return self._compiled.forward(model, length, most)
        return DraftForward(model)

    @torch.inference_mode()
    def _encode(self, source: Tensor, mask: Tensor | None) -> dict[str, Any]:
        device = self.draft.device
        mask = None if mask is None else mask.to(device)
        source = source.to(device, self.draft.dtype if source.is_floating_point() else None)
        given = {self.draft.main_input_name: source} | ({} if mask is None else {"attention_mask": mask})
        outputs = self.draft.get_encoder()(**given, return_dict=True)
        return {"encoder_outputs": outputs, "attention_mask": mask}

    # --- changes of the draft ---

    def prepare(self, tokens: int) -> None:
        """Compile the draft with its whole head, if it is to be compiled, for sequences of at most so many tokens."""
        if self._compiled is not None:
            self._compiled.prepare(self.draft, tokens)

    def is_restricted_to(self, token_ids: NDArray[np.int64] | None) -> bool:
        """Whether [`~Drafting.restrict`] would change nothing."""
        if token_ids is None or not self._can_be_restricted:
            return self.token_ids is None
        known = self._restricted.get(len(token_ids))
        return self.token_ids is token_ids and known is not None and known.is_of(token_ids)

    def restrict(self, token_ids: NDArray[np.int64] | None) -> None:
        """Restrict the draft to these tokens, `(tokens,)`, or lift the restriction. Called while no request drafts. A
        draft that cannot be restricted stays as it is, and a warning is logged."""
        self.token_ids = None
        if token_ids is None or not self._can_be_restricted:
            return
        try:
            if len(token_ids) in self._restricted:
                self._restricted[len(token_ids)].choose(token_ids)
            else:
                self._restricted[len(token_ids)] = RestrictedDraft(self.draft, token_ids)
            self.token_ids = token_ids
        except Exception as error:  # noqa: BLE001 - whatever a model or its memory fails with
            self._can_be_restricted = isinstance(error, MemoryError | torch.OutOfMemoryError)
            logger.warning("The draft keeps its whole vocabulary: %s.", first_line(error))


class Candidates(NamedTuple):
    """The candidates of one round, up to k for each row."""

    tokens: Tensor  # (rows, k), int64
    is_proposed: Tensor  # (rows, k), bool; false behind the last candidate of a shorter row
    q: Tensor | None = None  # (rows, k, vocab), float32; with sampling, the distributions of a draft's tokens
    from_text: Tensor | None = None  # (rows, 1), bool; rows with text (q = 1). Without `q` and this, all rows
    confidence: Tensor | None = None  # (rows, k), float32; the draft's probability of each token

    def to(self, device: torch.device) -> Candidates:
        """Return the same on another device."""
        return Candidates(*(None if part is None else part.to(device) for part in self))  # type: ignore[arg-type]

    def cut(self, count: int) -> Candidates:
        """Return the first `count` candidates of each row."""
        return Candidates(
            self.tokens[:, :count],
            self.is_proposed[:, :count],
            None if self.q is None else self.q[:, :count],
            self.from_text,
            None if self.confidence is None else self.confidence[:, :count],
        )


class DraftSource:
    """
    Propose candidates with a draft model for the rows of a request that share it. `rows` are their numbers in the
    request, in the order of the draft's cache. `token_ids` are the ids of the columns of the draft's logits, int64,
    where the draft has a vocabulary of its own; by default, column i is token i. `eos` are tokens that end answers.
    """

    def __init__(
        self,
        forward: DraftForward | BatchDraftForward,
        rows: Sequence[int],
        processors: RowProcessors | None,
        *,
        vocab_size: int,
        do_sample: bool,
        eos: Tensor | None,
        token_ids: Tensor | None,
        max_positions: int | None,
        clock: Clock,
    ) -> None:
        self.forward, self.rows, self.processors, self.clock = forward, list(rows), processors, clock
        self.vocab_size, self.do_sample, self.max_positions = vocab_size, do_sample, max_positions
        self.eos = None if eos is None else eos.to(forward.device)
        self.token_ids = None if token_ids is None else token_ids.to(forward.device)
        # Most processors depend only on the logits. They can run on the draft's own vocabulary.
        self._is_reduced = token_ids is not None and (
            processors is None or all(type(p) in IMPARTIAL for p in processors.processors)
        )
        self.times: list[float] = []  # seconds of each forward of the round
        self.reads_prompt = self._has_read_prompt = False  # in the round, and at all
        self.has_failed = False

    def room(self, length: int, room: int) -> int:
        """Return how many candidates a row of this length, in tokens without padding, may have."""
        return room if self.max_positions is None else min(room, self.max_positions - length + 1)

    def propose(
        self,
        k: int,
        texts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        rooms: Sequence[int],
        stop: StopRule | None,
    ) -> Candidates | None:
        """Propose at most k candidates for each row, or return `None` where no row has room. `texts` are the tokens of
        the rows without padding, `lengths` their numbers with padding, and `rooms` the largest numbers of
        candidates."""
        rooms = [self.room(len(text), room) for text, room in zip(texts, rooms, strict=True)]
        k, self.times = min(k, max(rooms)), []
        if k <= 0:
            return None
        device = self.forward.device
        places, continues = torch.tensor(rooms, device=device), stop.begin(len(rooms), device) if stop else None
        tokens, proposed, q, confidences = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        is_open, self.reads_prompt, self._has_read_prompt = places > 0, not self._has_read_prompt, True
        for j in range(k):
            began = self.clock()
            with torch.inference_mode():
                raw = self.forward.read(texts, max(rooms)) if j == 0 else self.forward.feed(tokens[-1][:, None])
            chosen, probs, is_possible, confidence = self._choose(raw, lengths, j, reads_confidence=stop is not None)
            self.times.append(self.clock() - began)
            is_open = is_open & (places > j) & is_possible
            tokens.append(chosen)
            proposed.append(is_open)
            q += [] if probs is None else [probs]
            if self.processors is not None:
                self.processors.write(self.rows, [n + j for n in lengths], chosen[:, None])
            if self.eos is not None:
                is_open = is_open & ~torch.isin(chosen, self.eos)
            if confidence is not None and continues is not None:
                confidences.append(confidence)
                is_open = is_open & continues(confidence)
            if device.type == "cpu" and not bool(is_open.any()):  # on an accelerator, reading this would wait for it
                break
        return Candidates(
            torch.stack(tokens, 1),
            torch.stack(proposed, 1),
            torch.stack(q, 1) if q else None,
            None,
            torch.stack(confidences, 1) if confidences else None,
        )

    def _choose(
        self, raw: Tensor, lengths: Sequence[int], j: int, *, reads_confidence: bool
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return the j-th candidate of each row, `(rows,)`; with sampling its distribution, `(rows, vocab)`; whether
        the row allows any token; and the token's probability where it is asked for."""
        ids, is_processed = self.token_ids, self.do_sample or self.processors is not None
        if not is_processed:
            highest, column = raw.max(-1)
            confidence = None
            if reads_confidence:
                confidence = raw.softmax(-1, dtype=torch.float32).gather(-1, column[:, None])[:, 0]
            return column if ids is None else ids[column], None, highest.isfinite(), confidence
        # A copy outside of inference mode, which processors may write into and keep.
        logits = raw.to(dtype=torch.float32, copy=True)
        if not self._is_reduced:
            logits = self._whole(logits)
        if self.processors is not None:
            logits = self.processors(logits.to(self.processors.tokens.device), self.rows, [n + j for n in lengths])
        highest, column = logits.max(-1)
        is_possible = highest.isfinite()  # no token can be drawn from NaN, or where all are forbidden
        if not (self.do_sample or reads_confidence):
            return self._id(column), None, is_possible.to(raw.device), None
        probs = logits.softmax(-1)
        if self.do_sample:
            column = torch.multinomial(probs.where(is_possible[:, None], 1.0), 1)[:, 0]
        confidence = probs.gather(-1, column[:, None])[:, 0].to(raw.device) if reads_confidence else None
        token = self._id(column).to(raw.device)
        if not self.do_sample:
            return token, None, is_possible.to(raw.device), confidence
        return token, self._whole(probs, 0.0) if self._is_reduced else probs, is_possible.to(raw.device), confidence

    def _id(self, column: Tensor) -> Tensor:
        """Return the token of a column of the processed logits."""
        if self.token_ids is None or not self._is_reduced:
            return column
        return self.token_ids[column.to(self.token_ids.device)]

    def _whole(self, rows: Tensor, missing: float = -torch.inf) -> Tensor:
        """Spread rows over the target's vocabulary."""
        if self.token_ids is not None:
            whole = rows.new_full((len(rows), self.vocab_size), missing)
            return whole.index_copy_(1, self.token_ids.to(rows.device), rows)
        width = self.vocab_size - rows.shape[-1]  # embeddings that are padded otherwise than the target's
        return torch.nn.functional.pad(rows, (0, width), value=missing) if width else rows

    def keep(self, row: int, length: int) -> None:
        """Keep the first `length` tokens of a row."""
        self.forward.keep(self.rows.index(row), length)

    def leave(self, row: int) -> None:
        """Remove a row."""
        place, last = self.rows.index(row), self.rows.pop()
        if last != row:
            self.rows[place] = last
        self.forward.leave(place)
