"""Propose candidates for one request, from the draft's own forward and from past text."""

from __future__ import annotations

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
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation.candidate_generator import CandidateGenerator

from osd_hf.decoding.checks import UNLIMITED, Limits, log_failed_draft, log_once
from osd_hf.decoding.draft_length import DRAFT, READS_PROMPT_TOKENS, BatchPace, FixedPace, Pace, Pacer, RoundTime
from osd_hf.decoding.forward import CompiledDraft, DraftForward
from osd_hf.decoding.text import Guess, RequestText, TextIndex
from osd_hf.decoding.vocabulary import RestrictedDraft
from osd_hf.errors import first_line
from osd_hf.logits_processors import IMPARTIAL
from osd_hf.models import is_peft, num_positions
from osd_hf.trace import num_accepted

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

MAX_CHATS = 8  # of which a draft keeps the cache


def without_padding(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the tokens of `ids`, `(1, tokens)`, that a mask of the same shape does not hide."""
    row = ids[0]
    return row[mask[0].bool()] if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else row


class _Drafted(NamedTuple):
    """A token of the draft: its id, the id as a tensor `(1, 1)`, and the logits that it was sampled from."""

    token: int
    tensor: torch.Tensor
    logits: torch.Tensor | None


class LeanCandidateGenerator(CandidateGenerator):
    """
    Generate the candidates of one request for transformers' loop.

    Greedy candidates come without logits, because the loop compares tokens. Sampled ones come with the logits that
    they were drawn from, `(1, candidates, vocab)` in float32, processed as the target's; a token of past text is
    certain. If all candidates are from past text, they come without logits: a token drawn from the target that equals
    the candidate is accepted, which has the same probability.
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
        token_ids: torch.Tensor | None = None,
        text: RequestText | None = None,
        clock: Clock = time.perf_counter,
        limits: Limits = UNLIMITED,
    ) -> None:
        self.forward = forward
        self.pace = pace
        self.text = text
        self.clock = clock
        self.limits = limits
        # The loop's list records the target's rows, and the draft's are none.
        self.logits_processor = LogitsProcessorList(logits_processor)
        self.do_sample = do_sample
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.max_positions = max_positions
        self._token_ids = token_ids
        # Other processors look for tokens by their ids, and need logits of all tokens.
        self._processes_part = all(type(processor) in IMPARTIAL for processor in self.logits_processor)
        self._context: list[int] = without_padding(input_ids, attention_mask).tolist()  # for the draft
        self._prompt_tokens = self._seen = input_ids.shape[1]
        self._drafted: list[int] = []
        self.from_text: list[bool] = []  # which candidates of the round are from past text
        self._began: float | None = None
        self._draft_seconds: list[float] = []  # of each forward in the round
        self._first_fed = 0  # tokens of the first of these forwards
        self._is_timed = False

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sequence followed by the candidates of a new round, and their logits if they are sampled."""
        is_first = self._began is None
        self._began = self._end_round()
        self._drafted, self.from_text, self._draft_seconds = [], [], []
        self._is_timed = not is_first  # the first round also reads the prompt
        self.pace.begin()
        rows = self._propose(input_ids) if self._context else []
        if not self._drafted:
            return input_ids, None
        candidate_ids = torch.cat([input_ids, torch.tensor([self._drafted], device=input_ids.device)], dim=1)
        if all(row is None for row in rows):
            return candidate_ids, None
        certain = [self._certain(t) if row is None else row for t, row in zip(self._drafted, rows, strict=True)]
        return candidate_ids, torch.stack([row.to(input_ids.device) for row in certain], dim=1)

    def _end_round(self) -> float:
        now = self.clock()
        if self._began is not None:
            reads_prompt = bool(self._draft_seconds) and self._first_fed > READS_PROMPT_TOKENS
            seconds = now - self._began if self._is_timed and not reads_prompt else None
            times = self._draft_seconds
            self.pace.timed(RoundTime(len(self._drafted), len(times), sum(times), seconds))
        return now

    def _propose(self, ids: torch.Tensor) -> list[torch.Tensor | None]:
        """Fill `self._drafted`; return the logits that each token was sampled from."""
        pace, text = self.pace, self.text
        rows: list[torch.Tensor | None] = []
        room = min(self.max_length - self._seen - 1, self.limits.max_candidates(self._seen, self._prompt_tokens))
        last: torch.Tensor | None = None  # the last token, on the draft's device
        while len(self._drafted) < room:
            # The vocabularies of an encoder-decoder may differ beyond the decoder's tokens.
            guesses = [guess for guess in text.guesses() if guess.token < self.vocab_size] if text else ()
            known = len(self._context) + len(self._drafted)
            source = pace.next(guesses, self.max_positions is None or known <= self.max_positions)
            if source is None:
                break
            if isinstance(source, Guess):
                token, last, row = source.token, None, None
            else:
                began = self.clock()
                drafted = self._draft(ids, last)
                self._draft_seconds.append(self.clock() - began)
                if drafted is None:
                    break
                token, last, row = drafted
            self._drafted.append(token)
            self.from_text.append(source != DRAFT)
            rows.append(row)
            if token in self.eos_token_ids:
                break
            if text is not None:
                text.proposed(token)
        return rows

    def _draft(self, ids: torch.Tensor, last: torch.Tensor | None) -> _Drafted | None:
        """Draft a token; return `None` if there is none. `last` is the token before, `(1, 1)`, if the draft has it."""
        try:
            logits = self._logits(ids, last)
        except Exception as error:
            log_failed_draft(self.forward.draft, error)
            logger.debug("The draft failed.", exc_info=True)
            self.max_positions = self.forward.length = 0  # no more forwards
            return None
        highest, chosen = logits.max(-1, keepdim=True)
        if not math.isfinite(float(highest)):  # NaN, or no token is allowed
            self._is_timed = False
            return None
        confidence = 1.0
        if self.do_sample or self.pace.reads_confidence:
            probs = logits.softmax(-1, dtype=torch.float32)
            if self.do_sample:
                chosen = torch.multinomial(probs, 1)
            if self.pace.reads_confidence:
                confidence = float(probs.gather(-1, chosen))
        if self._token_ids is not None and logits.shape[-1] == len(self._token_ids):
            chosen = self._token_ids.to(chosen.device)[chosen]
        token = int(chosen)
        self.pace.drafted(token, confidence)
        return _Drafted(token, chosen.to(self.forward.device), self._whole(logits) if self.do_sample else None)

    def _logits(self, ids: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        """Return the draft's logits after all tokens so far, `(1, vocab)`, processed as the target's."""
        forward = self.forward
        missing = len(self._context) + len(self._drafted) - forward.length
        if not self._draft_seconds:
            self._first_fed = missing
        if last is None or missing != 1:
            last = torch.tensor([(self._context + self._drafted)[-missing:]], device=forward.device)
        with torch.inference_mode():
            logits = forward.feed(last)
        if not (self.do_sample or self.logits_processor):
            return logits
        if self._drafted and self.logits_processor:
            ids = torch.cat([ids, torch.tensor([self._drafted], device=ids.device)], dim=1)
        # A copy, outside of inference mode: processors write into it, and may keep it.
        logits = logits.to(device=ids.device, dtype=torch.float32, copy=True)
        processed: torch.Tensor = self.logits_processor(ids, logits if self._processes_part else self._whole(logits))
        return processed

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of all of the target's tokens."""
        if self._token_ids is not None and logits.shape[-1] == len(self._token_ids):
            whole = logits.new_full((1, self.vocab_size), -torch.inf)
            return whole.index_copy_(1, self._token_ids.to(logits.device), logits)
        missing = self.vocab_size - logits.shape[-1]  # embeddings may be padded to different sizes
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _certain(self, token: int) -> torch.Tensor:
        """Return the logits of a distribution that has only this token."""
        row = torch.full((1, self.vocab_size), -torch.inf, dtype=torch.float32, device="cpu")
        row[0, token] = 0.0
        return row

    @property
    def read(self) -> list[int]:
        """The tokens in the draft's cache."""
        return (self._context + self._drafted)[: self.forward.length]

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Remove rejected candidates from the draft's cache. The loop's other arguments are not needed."""
        emitted: list[int] = input_ids[0, self._seen :].tolist()
        accepted = num_accepted(self._drafted, emitted)
        if self.text is not None:
            self.text.settled(emitted)
        self._seen = input_ids.shape[1]
        known = len(self._context) + accepted
        self._context += emitted
        if self.forward.length:
            # The last candidate was not fed; the last emitted token is fed in the next round.
            self.forward.crop(min(self.forward.length, known, len(self._context) - 1))
        self.pace.judged(accepted, emitted)

    def close(self) -> None:
        """End the request."""
        self._end_round()
        self.pace.ended()
        self.forward.close()


class _Chat(NamedTuple):
    """The draft's cache of a chat, its tokens, and the dtype and device of the draft."""

    cache: Any
    ids: list[int]
    placement: tuple[torch.dtype, torch.device]


class LeanDrafting:
    """
    Make the candidate generators of one draft's requests. If the weights of the draft change in place between
    requests, [`~LeanDrafting.forget`] is called.

    If the caller keeps the target's cache for the next turn of a chat, the draft's cache is kept with it. A compiled
    draft reads each prompt again, because requests share its static caches.
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
        self.num_assistant_tokens = num_assistant_tokens
        self.sources = sources
        self.pacer = pacer or Pacer()
        self.clock: Clock = time.perf_counter
        self.token_ids: NDArray[np.int64] | None = None  # the draft vocabulary; `None` means all tokens
        self._restricted: dict[int, RestrictedDraft] = {}  # by the size of the vocabulary
        self._can_be_restricted = True
        self._chats: WeakKeyDictionary[Any, _Chat] = WeakKeyDictionary()  # by the target's cache, oldest first
        self._compiled = compiled

    def at(self, num_assistant_tokens: int | str) -> LeanDrafting:
        """Return the same drafting with another k."""
        other = copy.copy(self)
        other.num_assistant_tokens = num_assistant_tokens
        if num_assistant_tokens != "auto":
            other.token_ids = None
        return other

    def pace(self, domain: str | None, *, do_sample: bool, may_repeat: bool = True) -> Pace:
        """Return the pace of one request. Without `may_repeat`, past text is not used."""
        return self._fixed_pace() or self.pacer.pace((domain, do_sample), self.sources, may_repeat=may_repeat)

    def batch_pace(self, domain: str | None, rows: int, *, do_sample: bool, may_repeat: bool = True) -> BatchPace:
        """Return the pace of a batch of so many rows, as [`~LeanDrafting.pace`]."""
        return BatchPace(
            self.pacer,
            (domain, do_sample),
            rows,
            fixed=self._fixed_pace(),
            sources=self.sources,
            may_repeat=may_repeat,
        )

    def _fixed_pace(self) -> FixedPace | None:
        """Return the pace of a fixed k; `None` with `"auto"`."""
        if self.num_assistant_tokens == "auto":
            return None
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
        """Return why transformers' own generator must draft; `None` if it need not."""
        if is_peft(self.draft):
            return "the draft's adapter cannot be merged into its weights"
        schedule = getattr(self.draft.generation_config, "num_assistant_tokens_schedule", None)
        if self.num_assistant_tokens is None and schedule not in (None, "constant"):
            return f"the draft's own generation config asks for the schedule {schedule!r}"
        return None

    def reads(self, inputs_tensor: torch.Tensor | None) -> bool:
        """Whether an encoder-decoder draft can read this prompt: token ids, or features if its own input is such."""
        if inputs_tensor is None or inputs_tensor.shape[1] == 0:
            return False
        if inputs_tensor.is_floating_point():
            return str(self.draft.main_input_name) not in ("input_ids", "inputs_embeds")
        return bool((inputs_tensor >= 0).all())  # negative ids replace a source that only the target knows

    def generator(
        self,
        pace: Pace,
        vocab_size: int,
        earlier: Sequence[TextIndex] = (),
        *,
        limits: Limits = UNLIMITED,
        **given: Any,
    ) -> LeanCandidateGenerator | None:
        """Return the generator of one request, from the arguments of `_get_candidate_generator` and text of `earlier`
        requests; `None` (logged) if transformers' own generator must draft."""
        draft, config, inputs_tensor = self.draft, given["generation_config"], given["inputs_tensor"]
        is_encoder_decoder = draft.config.is_encoder_decoder
        why = self.hindrance()
        if is_encoder_decoder and not self.reads(inputs_tensor):
            why = "the prompt does not consist of token ids alone"
        if why is not None:
            log_once(draft, f"Transformers' own generator drafts: {why}.")
            return None
        kwargs = given["model_kwargs"]
        mask = kwargs.get("attention_mask")
        max_positions = num_positions(draft.config)
        source, before = None, list[int]()
        if is_encoder_decoder:
            is_text = not inputs_tensor.is_floating_point()
            if is_text and max_positions is not None and inputs_tensor.shape[1] > max_positions:
                max_positions = 0  # the draft cannot read the source
            else:
                source = self._encode(inputs_tensor, mask)
            before = without_padding(inputs_tensor, mask).tolist() if is_text else []
            mask = kwargs.get("decoder_attention_mask")
        context = without_padding(given["input_ids"], mask).tolist()
        max_length = int(config.max_length)
        model, token_ids = self.chosen()
        if source is not None:
            forward = DraftForward(model, source)
        elif self._compiled is not None:
            longest = max_length if max_positions is None else min(max_length, max_positions)
            forward = self._compiled.forward(model, given["input_ids"].shape[1], longest)
        else:
            forward = self._resumed(model, kwargs.get("past_key_values"), context)
        eos = config._eos_token_tensor
        return LeanCandidateGenerator(
            forward,
            pace,
            given["input_ids"],
            attention_mask=mask,
            logits_processor=given["logits_processor"],
            do_sample=bool(config.do_sample),
            max_length=max_length,
            max_positions=max_positions,
            eos_token_ids=frozenset() if eos is None else frozenset(eos.tolist()),
            vocab_size=vocab_size,
            token_ids=token_ids,
            text=RequestText(before, context, max_length, earlier) if pace.reads_text else None,
            clock=self.clock,
            limits=limits,
        )

    @torch.inference_mode()
    def _encode(self, source: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
        device = self.draft.device
        mask = None if mask is None else mask.to(device)
        source = source.to(device, self.draft.dtype if source.is_floating_point() else None)
        given = {self.draft.main_input_name: source} | ({} if mask is None else {"attention_mask": mask})
        outputs = self.draft.get_encoder()(**given, return_dict=True)
        return {"encoder_outputs": outputs, "attention_mask": mask}

    # --- turns of a chat --------------------------------------------------------------------------------------------

    def keep(self, generator: LeanCandidateGenerator, target_cache: Any) -> None:
        """Keep the draft's cache for the next turn with the target's cache."""
        forward = generator.forward
        if target_cache is None or self._compiled is not None or self.draft.config.is_encoder_decoder:
            return
        if not forward.length:
            return
        self._chats[target_cache] = _Chat(forward.cache, generator.read, (self.draft.dtype, self.draft.device))
        while len(self._chats) > MAX_CHATS:
            self._chats.pop(next(iter(self._chats)), None)

    def forget(self) -> None:
        """Drop the caches of chats, because the draft has other weights."""
        self._chats.clear()

    def _resumed(self, model: PreTrainedModel, target_cache: Any, ids: list[int]) -> DraftForward:
        """Return a forward with the cache of an earlier turn, as far as the tokens are the same."""
        chat = None if target_cache is None else self._chats.pop(target_cache, None)
        if chat is None or chat.placement != (model.dtype, model.device):
            return DraftForward(model)
        same = min(num_accepted(chat.ids, ids), len(ids) - 1)  # one token is left to be fed
        # Sliding windows and recurrent states are not kept for an earlier token.
        if same < len(chat.ids) and any(type(layer) is not DynamicLayer for layer in chat.cache.layers):
            return DraftForward(model)
        forward = DraftForward(model, cache=chat.cache)
        forward.length = len(chat.ids)
        forward.crop(same)
        return forward

    # --- the draft vocabulary ---------------------------------------------------------------------------------------

    def prepare(self, tokens: int) -> None:
        """Compile the draft with its full vocabulary for sequences of at most `tokens` tokens."""
        if self._compiled is not None:
            self._compiled.prepare(self.draft, tokens)

    def is_restricted_to(self, token_ids: NDArray[np.int64] | None) -> bool:
        """Whether [`~LeanDrafting.restrict`] would change nothing."""
        if token_ids is None or not self._can_be_restricted:
            return self.token_ids is None
        known = self._restricted.get(len(token_ids))
        return self.token_ids is token_ids and known is not None and known.is_of(token_ids)

    def restrict(self, token_ids: NDArray[np.int64] | None) -> None:
        """Draft only these tokens, `(tokens,)`, or all. Called while no request drafts. If the draft cannot be
        restricted, the log says why."""
        self.token_ids = None
        if token_ids is None or not self._can_be_restricted:
            return
        try:
            if len(token_ids) in self._restricted:
                self._restricted[len(token_ids)].choose(token_ids)
            else:
                self._restricted[len(token_ids)] = RestrictedDraft(self.draft, token_ids)
            self.token_ids = token_ids
        except Exception as error:  # noqa: BLE001 - models of any kind
            self._can_be_restricted = isinstance(error, MemoryError | torch.OutOfMemoryError)
            logger.warning("The draft keeps its full vocabulary: %s.", first_line(error))

    def chosen(self) -> tuple[PreTrainedModel, torch.Tensor | None]:
        """Return the model that drafts, and its draft vocabulary; `None` means all tokens."""
        if self.token_ids is None:
            return self.draft, None
        restricted = self._restricted[len(self.token_ids)]
        return restricted.model, restricted.token_ids
