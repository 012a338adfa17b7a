"""The lean candidate generator: candidates by the draft's own forward and from past text, for transformers' loop."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList
from transformers.cache_utils import DynamicLayer
from transformers.generation.candidate_generator import CandidateGenerator

from osd_hf.decoding.draft_length import DRAFT, PROMPT, FixedPace, Pace, Pacer, RoundTime
from osd_hf.decoding.exactness import UNLIMITED, Limits, log_failed_draft
from osd_hf.decoding.forward import CompiledDraft, DraftForward
from osd_hf.decoding.text import Guess, RequestText, TextIndex, TokenIndex
from osd_hf.decoding.vocabulary import RestrictedDraft
from osd_hf.errors import first_line
from osd_hf.logits_processors import IMPARTIAL
from osd_hf.models import is_peft, num_positions
from osd_hf.trace import num_accepted

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
# What takes the place of the draft's token, the token, alone and as a tensor, and the row that it was drawn from.
Choice = tuple[Guess | None, int, torch.Tensor | None, torch.Tensor | None]

MOST_CHATS = 8  # of which a model that drafts keeps what it has read


def without_padding(ids: torch.Tensor, mask: Any) -> torch.Tensor:
    """The tokens of `ids`, of shape `(1, tokens)`, that a mask of the same shape does not hide; all without one."""
    row = ids[0]
    return row[mask[0].bool()] if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else row


class LeanCandidateGenerator(CandidateGenerator):
    """
    Candidates of one request. Greedy ones come without logits, as the loop compares tokens; sampled ones with the very
    logits that they were drawn from, processed as the target's, float32, `(1, candidates, vocab)`: for a token of past
    text, certainty. Where all are of past text, they come without: a token drawn from the target that is the same is
    accepted then, which is as often.

    The loop begins with `input_ids`, int64, `(1, prompt)`. What `attention_mask`, of the same shape, hides of them is
    padding, which the draft does not see: its positions are those of the target. The sequence has at most `max_length`
    tokens, of which the draft can be fed `max_positions`; drafting ends with one of `eos_token_ids`. `vocab_size` is
    the width of the target's logits, `logits_processor` its own, and `clock` tells the time in seconds. `limits` says
    how many candidates the target can verify exactly.
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
        text: RequestText | None = None,
        clock: Clock = time.perf_counter,
        limits: Limits = UNLIMITED,
    ) -> None:
        self.limits, self._prompt_tokens = limits, input_ids.shape[1]
        self.forward, self.pace, self.text, self.clock = forward, pace, text, clock
        # The loop's own list tells of the rows that it gets, which are to be the target's alone.
        self.logits_processor = LogitsProcessorList(logits_processor)
        self.do_sample, self.eos_token_ids, self.vocab_size = do_sample, eos_token_ids, vocab_size
        self.max_length, self.max_positions = max_length, max_positions
        # What the draft has been, or is to be, fed.
        self._context: list[int] = without_padding(input_ids, attention_mask).tolist()
        self._seen = input_ids.shape[1]
        self._drafted: list[int] = []
        self.from_text: list[bool] = []  # of the round's candidates, those that past text proposed
        self._began: float | None = None
        self._draft_seconds: list[float] = []  # of each forward of the draft in the round
        self._fed = 0  # tokens to the first of them
        self._is_typical = False

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The candidates of the round that begins with this sequence, `(1, tokens)`: the sequence followed by them,
        and the logits if they are drawn from; the sequence itself and `None` where there are none."""
        is_first = self._began is None
        self._began = self._end_round()
        self._drafted, self.from_text, self._draft_seconds = [], [], []
        self._is_typical = not is_first  # a round that also reads the prompt does not tell what a round costs
        self.pace.begin(self._missing)
        rows = self._propose(input_ids) if self._context else []
        if not self._drafted:
            return input_ids, None
        candidate_ids = torch.cat([input_ids, torch.tensor([self._drafted], device=input_ids.device)], dim=1)
        if not rows or all(row is None for row in rows):
            return candidate_ids, None
        certain = [self._certain(t) if row is None else row for t, row in zip(self._drafted, rows, strict=True)]
        return candidate_ids, torch.stack([row.to(input_ids.device) for row in certain], dim=1)

    def _end_round(self) -> float:
        now = self.clock()
        if self._began is not None:
            times = self._draft_seconds
            seconds = now - self._began if self._is_typical else None
            if times and self._fed > PROMPT:
                seconds = None  # it read a prompt
            first, others = sum(times[:1]), sum(times[1:])
            self.pace.timed(RoundTime(len(self._drafted), len(times), self._fed, first, others, seconds))
        return now

    def _propose(self, ids: torch.Tensor) -> list[torch.Tensor | None]:
        """Fill `self._drafted`; the logits that each token was drawn from, if it was drawn."""
        pace, text, rows = self.pace, self.text, list[torch.Tensor | None]()
        room = min(self.max_length - self._seen - 1, self.limits.max_candidates(self._seen, self._prompt_tokens))
        # Nothing was fed to the draft behind its last position.
        room_to_draft = room if self.max_positions is None else self.max_positions - len(self._context) + 1
        chosen: torch.Tensor | None = None  # the last token, where the draft is
        while len(self._drafted) < room:
            # Vocabularies of an encoder-decoder may differ in what they have beyond the decoder's.
            guesses = [guess for guess in text.guesses() if guess.token < self.vocab_size] if text else ()
            source = pace.next(guesses, len(self._drafted) < room_to_draft)
            if source is None:
                break
            row: torch.Tensor | None = None
            if source == DRAFT:
                began = self.clock()
                choice = self._say(ids, chosen)
                self._draft_seconds.append(self.clock() - began)
                if choice is None:
                    break
                source, token, chosen, row = choice
            if isinstance(source, Guess):
                token, row, chosen = source.token, None, None
            self._drafted.append(token)
            self.from_text.append(isinstance(source, Guess))
            if self.do_sample:
                rows.append(row)
            if token in self.eos_token_ids:
                break
            if text is not None:
                text.proposed(token)
        return rows

    @property
    def _missing(self) -> int:
        """Tokens of the context that the draft has not been fed."""
        return len(self._context) - self.forward.length

    def _say(self, ids: torch.Tensor, last: torch.Tensor | None) -> Choice | None:
        """What the draft proposes; `None` where it proposes nothing."""
        return self._choose(self._feed(ids, last))

    def untimed(self) -> None:
        """The round under way does not tell what a round takes."""
        self._is_typical = False

    def _feed(self, ids: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        """The draft's logits behind all tokens so far, `(1, vocab)`, processed as the target's; where that is enough,
        of the tokens alone that it chooses among. `last` is the last of the tokens so far, `(1, 1)`, if it lies where
        the draft is."""
        forward, missing = self.forward, len(self._context) + len(self._drafted) - self.forward.length
        if not self._draft_seconds:
            self._fed = missing
        if last is not None and missing == 1:
            feed = last
        else:
            feed = torch.tensor([(self._context + self._drafted)[-missing:]], device=forward.device)
        try:
            with torch.inference_mode():
                logits = forward.feed(feed)
        except Exception as error:  # of models of any kind: the answer goes on without the draft
            log_failed_draft(forward.draft, error)
            logger.debug("The draft failed.", exc_info=True)
            self.max_positions = forward.length = 0  # nothing is fed or cropped from here on
            return torch.full((1, self.vocab_size), torch.nan, device=ids.device)
        if forward.has_moved:
            self.untimed()
        if not (self.do_sample or self.logits_processor):
            return logits
        # Processors may keep what they make, and are called outside of inference mode.
        if self._drafted and self.logits_processor:
            ids = torch.cat([ids, torch.tensor([self._drafted], device=ids.device)], dim=1)
        return self._like_the_targets(logits, ids)

    def _choose(self, logits: torch.Tensor) -> Choice | None:
        """What takes the place of the draft's token, if anything does, that token, alone and as a tensor, `(1, 1)`,
        and the row that it was drawn from, if it was; `None` where nothing can be chosen."""
        pace = self.pace
        is_processed = bool(self.do_sample or self.logits_processor)
        with contextlib.nullcontext() if is_processed else torch.inference_mode():
            highest, chosen = logits.max(-1, keepdim=True)
            if self.do_sample or pace.reads_confidence:
                probs = logits.softmax(-1, dtype=torch.float32)
            # Only one of the two is read: each reading waits for the accelerator.
            confidence = float(probs.gather(-1, chosen) if pace.reads_confidence else highest)
            if not math.isfinite(confidence):  # nothing can be drawn from NaN, nor where no token is allowed
                self._is_typical = False
                return None
            confidence = confidence if pace.reads_confidence else 1.0
            token = self._id(chosen)
            number = int(token)
            # Decided before anything is drawn: what is proposed must not depend on what was.
            instead = pace.instead(number, confidence)
            if instead is None:
                if self.do_sample:
                    chosen = torch.multinomial(probs, 1)
                    token = self._id(chosen)
                    number = int(token)
                    confidence = float(probs.gather(-1, chosen)) if pace.reads_confidence else 1.0
                pace.drafted(number, confidence)
            row = self._whole(logits) if self.do_sample else None
            return instead, number, token.to(self.forward.device), row

    def _id(self, chosen: torch.Tensor) -> torch.Tensor:
        """The token of a column of the logits."""
        return chosen

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of all of the target's tokens."""
        missing = self.vocab_size - logits.shape[-1]  # embeddings padded otherwise than the target's
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _certain(self, token: int) -> torch.Tensor:
        """Logits of a distribution that is this token, float32, `(1, vocab)`."""
        row = torch.full((1, self.vocab_size), -torch.inf, dtype=torch.float32, device="cpu")
        row[0, token] = 0.0
        return row

    def _like_the_targets(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # A copy: processors write into it, and into what they make of it, outside inference mode as well.
        logits = logits.to(device=ids.device, dtype=torch.float32, copy=True)
        processed: torch.Tensor = self.logits_processor(ids, self._to_process(logits))
        return processed

    def _to_process(self, logits: torch.Tensor) -> torch.Tensor:
        """What of the logits the processors get."""
        return self._whole(logits)

    @property
    def read(self) -> list[int]:
        """The tokens that the draft's cache holds."""
        return (self._context + self._drafted)[: self.forward.length]

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Take back what the target rejected. Takes the arguments of the loop, of which only the tokens are needed."""
        emitted: list[int] = input_ids[0, self._seen :].tolist()
        accepted = num_accepted(self._drafted, emitted)
        if self.text is not None:
            self.text.settled(emitted)
        self._seen = input_ids.shape[1]
        known = len(self._context) + accepted
        self._context += emitted
        self._take_back(known, emitted)
        self.pace.judged(accepted, emitted)

    def _take_back(self, known: int, emitted: list[int]) -> None:
        """Let the draft have read nothing but what stands: so many tokens of what it was fed."""
        if self.forward.length:
            # The last drafted token was not fed; the last emitted one is what the next round begins with.
            self.forward.crop(min(self.forward.length, known, len(self._context) - 1))

    def close(self) -> None:
        """The request has ended."""
        self._end_round()
        self.pace.ended()
        self.forward.close()


class RestrictedCandidateGenerator(LeanCandidateGenerator):
    """The same with a draft whose logits are of `token_ids` alone, int64, `(tokens,)`."""

    def __init__(self, *args: Any, token_ids: torch.Tensor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._token_ids = token_ids
        # Processors may ask for tokens by their ids; where they do not, what is not chosen among need not be there.
        self._is_enough = all(type(processor) in IMPARTIAL for processor in self.logits_processor)

    def _id(self, chosen: torch.Tensor) -> torch.Tensor:
        return self._token_ids.to(chosen.device)[chosen] if self._is_enough else chosen

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.shape[-1] != len(self._token_ids):
            return super()._whole(logits)
        whole = logits.new_full((1, self.vocab_size), -torch.inf)
        return whole.index_copy_(1, self._token_ids.to(logits.device), logits)

    def _to_process(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._is_enough else self._whole(logits)


class Drafting:
    """Makes the lean candidate generators of one draft's requests, each of which drafts on its own."""

    index: type[TokenIndex] = TokenIndex  # what the text of a request is kept in

    def __init__(self, draft: Any, clock: Clock) -> None:
        self.draft = draft
        self.clock = clock  # one that waits for an accelerator makes costs exact, requests slower

    def generator(
        self, pace: Pace, vocab_size: int, earlier: Sequence[TokenIndex] = (), *, limits: Limits = UNLIMITED,
        **given: Any,
    ) -> LeanCandidateGenerator:  # fmt: skip
        """One request's generator, from what the loop passes to `_get_candidate_generator`, and the earlier text that
        it may look up."""
        draft, generation_config, inputs_tensor = self.draft, given["generation_config"], given["inputs_tensor"]
        max_length, kwargs = int(generation_config.max_length), given["model_kwargs"]
        limit = self._limit
        source, before = None, list[int]()
        mask = kwargs.get("attention_mask")
        if draft.config.is_encoder_decoder:
            is_text = not inputs_tensor.is_floating_point()
            if is_text and limit is not None and inputs_tensor.shape[1] > limit:
                limit = 0  # nothing is drafted for a source that the draft cannot read
            else:
                source = self._encode(inputs_tensor, mask)
            before = without_padding(inputs_tensor, mask).tolist() if is_text else []
            mask = kwargs.get("decoder_attention_mask")
        context = without_padding(given["input_ids"], mask).tolist()
        most = max_length if limit is None else min(max_length, limit)
        forward = self._forward(source, kwargs.get("past_key_values"), context, given["input_ids"].shape[1], most)
        text = RequestText(self.index, before, context, max_length, earlier) if pace.reads_text else None
        eos = generation_config._eos_token_tensor
        return self._candidates(
            forward, pace, given["input_ids"], attention_mask=mask,
            logits_processor=given["logits_processor"], do_sample=bool(generation_config.do_sample),
            max_length=max_length, max_positions=limit,
            eos_token_ids=frozenset() if eos is None else frozenset(eos.tolist()), vocab_size=vocab_size,
            text=text, clock=self.clock, limits=limits,
        )  # fmt: skip

    @property
    def _limit(self) -> int | None:
        """Positions of the draft."""
        return num_positions(self.draft)

    def reads(self, inputs_tensor: Any) -> bool:
        """Whether the draft can read what the prompt of an encoder-decoder is made of: token ids or, if its own input
        is of that kind, features."""
        if inputs_tensor is None or inputs_tensor.shape[1] == 0:
            return False
        if inputs_tensor.is_floating_point():
            return str(self.draft.main_input_name) not in ("input_ids", "inputs_embeds")
        return bool((inputs_tensor >= 0).all())  # ids below 0 stand for a source that only the target knows

    def _candidates(self, forward: Any, *args: Any, **kwargs: Any) -> LeanCandidateGenerator:
        return LeanCandidateGenerator(forward, *args, **kwargs)

    def _forward(self, source: dict[str, Any] | None, cache: Any, context: list[int], begins: int, most: int) -> Any:
        """The draft of a request with this `source`, whose sequence begins with `context`, in `begins` tokens with its
        padding, and has at most `most`; `cache` is what the target has come with."""
        return DraftForward(self.draft, source)

    @torch.inference_mode()
    def _encode(self, source_ids: Any, mask: torch.Tensor | None) -> dict[str, Any]:
        device = self.draft.device
        mask = None if mask is None else mask.to(device)
        source = source_ids.to(device, self.draft.dtype if source_ids.is_floating_point() else None)
        given = {self.draft.main_input_name: source} | ({} if mask is None else {"attention_mask": mask})
        outputs = self.draft.get_encoder()(**given, return_dict=True)
        return {"encoder_outputs": outputs, "attention_mask": mask}


class _Read(NamedTuple):
    """What a draft has read in the turns of a chat so far."""

    cache: Any
    ids: list[int]
    lies: tuple[Any, Any]  # dtype and device of the draft then


class LeanDrafting(Drafting):
    """
    [`Drafting`] for requests that follow each other. The weights of the draft may change in place between
    requests, after which [`~LeanDrafting.forget`] is called.

    Where the caller keeps the target's cache for another turn of a chat, the draft's is kept beside it: it lives as
    long as that object does, and nobody finds it who does not have that. A compiled draft reads each prompt anew, as
    requests take turns with its static caches.

    Args:
        draft (`PreTrainedModel`): What drafts.
        num_assistant_tokens (`int` or `str`, *optional*):
            k, or `"auto"`; `None` reads the draft's generation config at each request.
        sources (`str`, *optional*, defaults to `"both"`):
            Where the candidates come from with `"auto"`: `"draft"`, `"text"` or `"both"`.
        compiled (`CompiledDraft`, *optional*):
            Compiles or captures forwards of few tokens, at the first request; shared with other copies of the draft.
        pacer (`Pacer`, *optional*): Shared with other drafts of the same size; what `"auto"` decides from.
    """

    index = TextIndex

    def __init__(
        self,
        draft: Any,
        num_assistant_tokens: int | str | None,
        *,
        sources: str = "both",
        compiled: CompiledDraft | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        super().__init__(draft, time.perf_counter)
        self.num_assistant_tokens, self.sources, self.pacer = num_assistant_tokens, sources, pacer or Pacer()
        self.token_ids: NDArray[np.int64] | None = None  # among which it drafts; `None`: all
        self._restricted: dict[int, RestrictedDraft] = {}  # by their number
        self._chats: WeakKeyDictionary[Any, _Read] = WeakKeyDictionary()  # by the target's cache, oldest first
        self._can_be_restricted = True
        self._compiled = compiled
        self._told: set[str] = set()

    def at(self, num_assistant_tokens: int | str) -> LeanDrafting:
        """The same, for requests with another k."""
        other = copy.copy(self)
        other.num_assistant_tokens = num_assistant_tokens
        if num_assistant_tokens != "auto":
            other.token_ids = None
        return other

    def keep(self, generator: LeanCandidateGenerator, target_cache: Any) -> None:
        """A request has ended well: keep what its draft has read for the next turn with the target's cache."""
        forward = generator.forward
        if target_cache is None or self._compiled is not None or self.draft.config.is_encoder_decoder:
            return
        if not forward.length:  # layers that were never fed cannot be taken back
            return
        self._chats[target_cache] = _Read(forward.cache, generator.read, (self.draft.dtype, self.draft.device))
        while len(self._chats) > MOST_CHATS:
            self._chats.pop(next(iter(self._chats)), None)

    def forget(self) -> None:
        """The draft has other weights: what it has read in chats is read again."""
        self._chats.clear()

    def _forward(self, source: dict[str, Any] | None, cache: Any, context: list[int], begins: int, most: int) -> Any:
        model, _ = self.chosen()
        if source is not None:
            return DraftForward(model, source)
        if self._compiled is not None:
            return self._compiled.forward(model, begins, most)
        return self._going_on(model, cache, context)

    def _going_on(self, model: Any, target_cache: Any, ids: list[int]) -> DraftForward:
        """The draft of a request for these tokens, which has read what the turn before begins with as well."""
        read = None if target_cache is None else self._chats.pop(target_cache, None)
        if read is None or read.lies != (model.dtype, model.device):
            return DraftForward(model)
        # One is left to be fed: the first token is drafted from its logits.
        same = min(num_accepted(read.ids, ids), len(ids) - 1)
        # A window, or a state, is not to be had for an earlier token.
        if same < len(read.ids) and any(type(layer) is not DynamicLayer for layer in read.cache.layers):
            return DraftForward(model)
        forward = DraftForward(model, cache=read.cache)
        forward.length = len(read.ids)
        forward.crop(same)
        return forward

    def prepare(self, tokens: int) -> None:
        """Compile the draft with its whole head, if it is to be compiled, for sequences of at most so many tokens."""
        if self._compiled is not None:
            self._compiled.prepare(self.draft, tokens)

    def is_restricted_to(self, token_ids: NDArray[np.int64] | None) -> bool:
        """Whether [`~LeanDrafting.restrict`] would change nothing."""
        if token_ids is None or not self._can_be_restricted:
            return self.token_ids is None
        known = self._restricted.get(len(token_ids))
        return self.token_ids is token_ids and known is not None and known.is_of(token_ids)

    def restrict(self, token_ids: NDArray[np.int64] | None) -> None:
        """Draft among these tokens alone, `(tokens,)`, or among all; to be called while nobody drafts. A draft that
        cannot be restricted stays as it is, and the log says why."""
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
            logger.warning("The draft chooses among all tokens, not those in use: %s.", first_line(error))

    def pace(self, domain: str | None, *, do_sample: bool, may_repeat: bool = True) -> Pace:
        """How one request of a domain drafts; without `may_repeat` nothing comes from past text."""
        if self.num_assistant_tokens == "auto":
            return self.pacer.pace((domain, do_sample), self.sources, may_repeat=may_repeat)
        if isinstance(self.num_assistant_tokens, int):
            return FixedPace(self.num_assistant_tokens, pacer=self.pacer)
        config = self.draft.generation_config
        defaults = config._get_default_generation_params()
        k, threshold = (
            defaults[name] if getattr(config, name, None) is None else getattr(config, name)
            for name in ("num_assistant_tokens", "assistant_confidence_threshold")
        )
        return FixedPace(int(k), float(threshold or 0.0), self.pacer)

    def hindrance(self) -> str | None:
        """Why it cannot draft itself; `None` where it can."""
        if is_peft(self.draft):
            return "the draft's adapter cannot be merged into its weights"
        schedule = getattr(self.draft.generation_config, "num_assistant_tokens_schedule", None)
        if self.num_assistant_tokens is None and schedule not in (None, "constant"):
            return f"the draft's own generation config asks for the schedule {schedule!r}"
        return None

    def chosen(self) -> tuple[Any, torch.Tensor | None]:
        """The model that drafts, and the tokens, int64, that its logits are of; `None`: all."""
        if self.token_ids is None:
            return self.draft, None
        restricted = self._restricted[len(self.token_ids)]
        return restricted.model, restricted.token_ids

    def _candidates(self, forward: Any, *args: Any, **kwargs: Any) -> LeanCandidateGenerator:
        _, token_ids = self.chosen()
        if token_ids is None:
            return super()._candidates(forward, *args, **kwargs)
        return RestrictedCandidateGenerator(forward, *args, token_ids=token_ids, **kwargs)

    def left(self, why: str) -> None:
        """Say, once, why a request is left to the stock generator."""
        if why not in self._told:
            self._told.add(why)
            logger.warning("Drafting by transformers' stock generator: %s.", why)
