"""Propose candidates with a draft: `Drafting` is shared by requests, `DraftSource` belongs to one request."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

from osd_hf.decoding.checks import log_once
from osd_hf.decoding.draft_length import DraftLength, Pacer
from osd_hf.decoding.forward import RecurrentStates
from osd_hf.decoding.head import HeadForward
from osd_hf.decoding.rows import BatchDraftForward
from osd_hf.decoding.static import StaticForward
from osd_hf.draft_head import DraftHead
from osd_hf.errors import first_line
from osd_hf.logits_processors import IMPARTIAL, WITHOUT_CONTEXT, RowProcessors, is_capturable, sample
from osd_hf.models import has_soft_prompt, num_positions, unwrap
from osd_hf.utils.context import to_device
from osd_hf.vocabulary import RestrictedDraft

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class Drafting:
    """
    Serve the requests of one draft, whose weights may change in place between requests. `num_assistant_tokens` is k,
    or `"auto"` with candidates from `sources` (`"draft"`, `"text"`, or `"both"`), or `None` to read the draft's
    generation config at each request. Drafts of the same size share `static` forwards and a `pacer`.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        num_assistant_tokens: int | str | None,
        *,
        sources: str = "both",
        static: StaticForward | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self.draft = draft
        self.clock: Clock = time.perf_counter  # one that waits for an accelerator measures exactly, and is slower
        self.num_assistant_tokens, self.sources, self.pacer = num_assistant_tokens, sources, pacer or Pacer()
        self.token_ids: NDArray[np.int64] | None = None  # the draft's vocabulary; `None`: all tokens
        self._restricted: dict[int, RestrictedDraft] = {}  # by the size of the vocabulary
        self._can_be_restricted = True
        self._static = static

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
        key = (domain, do_sample)
        if self.num_assistant_tokens == "auto":
            return DraftLength(self.pacer, key, rows, sources=self.sources, reads_text=reads_text)
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

    @property
    def state_layers(self) -> list[int]:
        """The hidden states of the target that the draft reads."""
        return self.draft.config.state_layers if isinstance(self.draft, DraftHead) else []

    def forward(
        self, kwargs: dict[str, Any], texts: Sequence[Sequence[int]], most: int, states: Sequence[list[Tensor]] = ()
    ) -> DraftForward | BatchDraftForward | HeadForward | None:
        """Return the forwards of rows with these tokens, and at most `most` in the end, of a request with these loop
        arguments, to whose `states` the loop appends those of the target. `None` if the source is longer than the
        draft's positions."""
        model, limit = self.model()[0], self.max_positions
        if isinstance(model, DraftHead):
            return HeadForward(model, states, most if limit is None else min(most, limit))
        if self.draft.config.is_encoder_decoder:
            source = kwargs["inputs_tensor"]
            if not source.is_floating_point() and limit is not None and source.shape[1] > limit:
                return None
            return DraftForward(model, self._encode(source, kwargs.get("attention_mask")))
        if len(texts) > 1 or self._static is not None:
            batch = BatchDraftForward(model, texts, most if limit is None else min(most, limit), limit, self._static)
            if len(texts) > 1 or batch.is_static:
                return batch
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
        """Capture or compile the draft for sequences of at most `tokens` tokens, if configured."""
        if self._static is not None:
            self._static.prepare(self.model()[0], tokens)

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
        )


class DraftForward:
    """Run a draft over one row. `source` are further arguments of each forward, such as an encoder's outputs."""

    captures = False  # no graph drafts several tokens
    keeps = True  # what was read

    def __init__(self, draft: PreTrainedModel, source: dict[str, Any] | None = None) -> None:
        self.draft = draft
        self.device = draft.device  # looked up once: a model searches its parameters for it
        self.length = 0  # tokens in the cache
        self._ids_name = "decoder_input_ids" if draft.config.is_encoder_decoder else "input_ids"
        self._settings = {"use_cache": True, "return_dict": True, **(source or {})}
        if draft._supports_logits_to_keep():
            self._settings["logits_to_keep"] = 1
        config = draft.config.get_text_config(decoder=True)
        self.cache: Cache = DynamicCache(config=config)
        if draft.config.is_encoder_decoder:
            self.cache = EncoderDecoderCache(self.cache, DynamicCache(config=config))
        self._settings["past_key_values"] = self.cache
        self.cache.activate_past_recording()
        self._states: RecurrentStates | None = None
        self._saved_length = 0  # where recurrent states were saved

    def feed(self, ids: Tensor) -> Tensor:
        """Append tokens, `(1, tokens)`; return the raw logits after the last one, `(1, vocab)`."""
        logits: Tensor = self.draft(**{self._ids_name: ids}, **self._settings).logits[:, -1]
        self.length += ids.shape[1]
        if self._states is not None:
            self._states.settle([True])
        return logits

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. Called every round: sliding windows keep removable tokens until then."""
        if self._states is not None:
            # What is kept behind the position of the states is read again.
            length = length if length == self.length else self._saved_length
        (self._states or self.cache).crop(length - self.length)
        self.length = length

    def read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Feed the tokens that were not read yet, and return the logits after the last one, `(rows, vocab)`."""
        logits = self.feed(torch.tensor([texts[0][self.length :]], device=self.device))
        self._states = self._states or RecurrentStates.of(self.cache)
        if self._states is not None:
            self._states.save()
            self._saved_length = self.length
        return logits

    def keep(self, row: int, length: int) -> None:
        """Keep the first `length` tokens of a row, and at most those that were read."""
        if self.length:  # sliding windows need this call after every round
            self.crop(min(self.length, length))

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""

    def close(self) -> None:
        """End the request."""


class DraftSource:
    """
    Propose candidates with a draft model for the rows of a request that share it. `rows` are their numbers in the
    request, in the order of the draft's cache. `token_ids` are the ids of the columns of the draft's logits, int64,
    where the draft has a vocabulary of its own; by default, column i is token i. `ends_with` are tokens that end
    answers.
    """

    def __init__(
        self,
        forward: DraftForward | BatchDraftForward | HeadForward,
        rows: Sequence[int],
        processors: RowProcessors | None,
        *,
        vocab_size: int,
        do_sample: bool,
        ends_with: Collection[int],
        token_ids: Tensor | None,
        max_positions: int | None,
        clock: Clock,
    ) -> None:
        self.forward, self.rows, self.clock = forward, list(rows), clock
        self.vocab_size, self.do_sample, self.max_positions = vocab_size, do_sample, max_positions
        self.ends_with = ends_with
        self.token_ids = None if token_ids is None else token_ids.to(forward.device)
        self.processors = processors
        applied = [] if processors is None else processors.processors
        # Most processors depend only on the logits. They can run on the draft's own vocabulary.
        self._is_reduced = token_ids is not None and all(type(p) in IMPARTIAL for p in applied)
        self._reads_context = not all(type(p) in WITHOUT_CONTEXT for p in applied)
        self._graph_key: Any = None  # equal for requests whose graphs are equal
        if forward.captures and is_capturable(applied):
            settings = [(type(p).__name__, sorted(vars(p).items())) for p in applied]
            self._graph_key = repr((settings, do_sample, vocab_size)), token_ids is None or token_ids.data_ptr()
        self.times: list[float] = []  # seconds of each forward of the round
        self.reads_prompt = self._has_read_prompt = False  # in the round, and at all
        self.has_failed = False

    def room(self, length: int, room: int) -> int:
        """Return how many candidates a row of this length, in tokens without padding, may have."""
        return room if self.max_positions is None else min(room, self.max_positions - length + 1)

    def propose(
        self, k: int, texts: Sequence[Sequence[int]], lengths: Sequence[int], rooms: Sequence[int], threshold: float
    ) -> Candidates | None:
        """Propose at most k candidates for each row, or return `None` where no row has room. `texts` are the tokens of
        the rows without padding, `lengths` their numbers with padding, and `rooms` the largest numbers of candidates.
        A row ends with a token that is less probable than the `threshold`."""
        rooms = [self.room(len(text), room) for text, room in zip(texts, rooms, strict=True)]
        k, self.times = min(k, max(rooms)), []
        if k <= 0:
            return None
        self.reads_prompt, self._has_read_prompt = not self._has_read_prompt, self.forward.keeps
        began, drafted = self.clock(), None
        if self._graph_key is not None and not threshold:
            assert isinstance(self.forward, BatchDraftForward)
            drafted = self.forward.draft_tokens(
                texts, k, self._graph_key, lambda raw, noise: self._choose(raw, [], noise=noise)
            )
        if drafted is None:
            return self._draft(k, texts, lengths, rooms, threshold)
        self.times = [(self.clock() - began) / k] * k
        tokens, highest, *q = drafted
        return Candidates(tokens, self._is_proposed(tokens, highest, rooms), q[0] if q else None)

    def _draft(
        self, k: int, texts: Sequence[Sequence[int]], lengths: Sequence[int], rooms: Sequence[int], threshold: float
    ) -> Candidates:
        """Draft token by token. On a CPU, this ends where no row continues; elsewhere, reading that takes time."""
        on_cpu = self.forward.device.type == "cpu"
        found, ids = list[tuple[Tensor, ...]](), list[list[int]]()
        is_open, counts = [True] * len(rooms), [0] * len(rooms)  # rows that continue; candidates of each row
        # Processors that read the context may keep the logits, which must not be tensors of inference mode.
        with torch.no_grad() if self._reads_context else torch.inference_mode():
            for j in range(k):
                began = self.clock()
                raw = self.forward.read(texts) if j == 0 else self.forward.feed(found[-1][0][:, None])
                found.append(self._choose(raw, [n + j for n in lengths], reads_confidence=threshold > 0))
                self.times.append(self.clock() - began)
                token, highest, *others = found[-1]
                if self._reads_context and self.processors is not None:
                    self.processors.write(self.rows, [n + j for n in lengths], token[:, None])
                if not on_cpu:
                    continue
                goes_on = (others[-1] >= threshold).tolist() if threshold else [True] * len(rooms)
                ids.append(token.tolist())
                for i, (one, score) in enumerate(zip(ids[-1], highest.tolist(), strict=True)):
                    if is_open[i]:
                        is_candidate = math.isfinite(score) and j < rooms[i]
                        counts[i] += is_candidate
                        is_open[i] = is_candidate and one not in self.ends_with and goes_on[i]
                if not any(is_open):
                    break
        rest = [torch.stack(parts, 1) for parts in zip(*(parts[2:] for parts in found), strict=True)]
        confidence = rest.pop() if threshold else None
        q = rest[0] if rest else None
        if on_cpu:
            tokens, columns = torch.tensor(list(zip(*ids, strict=True)), device="cpu"), range(len(found))
            shown = torch.tensor([[j < count for j in columns] for count in counts], device="cpu")
            return Candidates(tokens, shown, q)
        tokens, highest = (torch.stack(parts, 1) for parts in zip(*(parts[:2] for parts in found), strict=True))
        is_last = None if confidence is None else confidence < threshold
        return Candidates(tokens, self._is_proposed(tokens, highest, rooms, is_last), q)

    def _is_proposed(
        self, tokens: Tensor, highest: Tensor, rooms: Sequence[int], is_last: Tensor | None = None
    ) -> Tensor:
        """Return which tokens, `(rows, k)`, are candidates: those up to the end of an answer, where a row has no room
        or allows no token, or up to one that `is_last`."""
        is_open = highest.isfinite()
        if min(rooms) < tokens.shape[1]:
            columns = torch.arange(tokens.shape[1], device=tokens.device)
            is_open = is_open & (columns < to_device(rooms, tokens.device)[:, None])
        is_last = torch.zeros_like(is_open) if is_last is None else is_last
        if self.ends_with:
            is_last = is_last | torch.isin(tokens, to_device(sorted(self.ends_with), tokens.device))
        return (is_open & ~torch.nn.functional.pad(is_last[:, :-1], (1, 0))).cumprod(1).bool()

    def _choose(
        self, raw: Tensor, lengths: Sequence[int], *, reads_confidence: bool = False, noise: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the next token of each row, `(rows,)`; the highest logit, which is finite if the row allows any
        token; with sampling the token's distribution, `(rows, vocab)`; and its probability where it is asked for.
        `noise` is uniform, `(rows,)`."""
        ids = self.token_ids
        if not self.do_sample and self.processors is None:
            highest, column = raw.max(-1)
            token = column if ids is None else ids[column]
            if not reads_confidence:
                return token, highest
            return token, highest, (highest.float() - raw.float().logsumexp(-1)).exp()
        # A copy outside of inference mode, which processors may write into and keep.
        logits = raw.to(dtype=torch.float32, copy=True)
        if not self._is_reduced:
            logits = self._whole(logits)
        if self.processors is not None and self._reads_context:
            logits = self.processors(logits.to(self.processors.tokens.device), self.rows, lengths).to(raw.device)
        elif self.processors is not None:
            for processor in self.processors.processors:
                logits = processor(self.processors.tokens, logits)
        highest, column = logits.max(-1)
        if not (self.do_sample or reads_confidence):
            return self._id(column), highest
        probs = logits.softmax(-1)
        if self.do_sample:
            allowed = probs.where(highest.isfinite()[:, None], 1.0)  # nothing can be drawn from NaN
            column = torch.multinomial(allowed, 1)[:, 0] if noise is None else sample(allowed, noise)
        found = [self._id(column), highest]
        if self.do_sample:
            found.append(self._whole(probs, 0.0) if self._is_reduced else probs)
        return (*found, probs.gather(-1, column[:, None])[:, 0]) if reads_confidence else tuple(found)

    def _id(self, column: Tensor) -> Tensor:
        """Return the token of a column of the processed logits."""
        return self.token_ids[column] if self.token_ids is not None and self._is_reduced else column

    def _whole(self, rows: Tensor, missing: float = -math.inf) -> Tensor:
        """Spread rows over the target's vocabulary."""
        if self.token_ids is not None:
            whole = rows.new_full((len(rows), self.vocab_size), missing)
            return whole.index_copy_(1, self.token_ids, rows)
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
