"""Decode a batch of requests together, each as it would be alone: rows draft, verify, and end independently."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from osd_hf.decoding.checks import (
    ASSISTED_ONLY,
    difference,
    given_arguments,
    has_adapter_per_row,
    limits_of,
    log_failed_draft,
    log_once,
    of_row,
    plain_answer,
    text_arguments,
    undrafted,
)
from osd_hf.decoding.draft_length import MAX_K, READS_PROMPT_TOKENS, BatchPace, BatchRound, RoundTime
from osd_hf.decoding.forward import AHEAD, MASKED_ATTENTION
from osd_hf.decoding.generator import Clock, LeanDrafting
from osd_hf.decoding.request import (
    Binding,
    Decoding,
    Request,
    Round,
    WatchedProcessors,
    bears_any_token,
    hand_over,
    plain_time,
)
from osd_hf.decoding.text import Guess, RequestText
from osd_hf.errors import first_line
from osd_hf.logits_processors import ReplayedProcessor, RowProcessors
from osd_hf.models import evaluating, vocab_size_of
from osd_hf.trace import num_accepted
from osd_hf.utils.context import neutral_context
from osd_hf.utils.kernels import fast_kernels

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers in configurations
GROWTH = 1.5  # of a full cache
PROBE = (12, 3, 3)  # tokens of the two rows of the probe, and those after them
TRAINING_ATTRIBUTES = ("gradient_checkpointing", "layerdrop")  # of modules: no cache, or layers dropped at random
MAX_GUESSES = 16  # of past text in a round
MIN_GUESS_CHANCE = 0.1  # of the last guess
NO_TOKEN = 1 << 40  # an id outside of every vocabulary


# --- forwards -------------------------------------------------------------------------------------------------------


@dataclass
class _Place:
    """Where the tokens of a forward are written: rows, `(rows, 1)`, and columns, `(rows, tokens)`. The first `width`
    columns are read."""

    rows: Tensor
    columns: Tensor
    width: int


class _RaggedLayer(DynamicLayer):
    """Keys and values of one layer, each at the column of its position in its row."""

    keys: Tensor
    values: Tensor
    place: _Place

    def take_over(self, layer: DynamicLayer, padding: Sequence[int], size: int) -> None:
        """Move the content of a layer, without the padding of each row, to `size` columns."""
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = (_resized(part, size, padding) for part in (layer.keys, layer.values))
        layer.reset()

    def make_room(self, columns: int, rows: int) -> None:
        held = self.keys.shape[2]
        if columns > held:
            size = grown(held, columns)
            self.keys, self.values = (_resized(part[:rows], size) for part in (self.keys, self.values))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        place, device = self.place, self.keys.device
        rows, columns = place.rows.to(device), place.columns.to(device)
        self.keys[rows, :, columns] = key_states.transpose(1, 2).to(self.keys)  # autocast may use another dtype
        self.values[rows, :, columns] = value_states.transpose(1, 2).to(self.values)
        held = len(rows)
        return self.keys[:held, :, : place.width], self.values[:held, :, : place.width]

    def get_seq_length(self) -> int:
        return self.place.width - self.place.columns.shape[1]


def first_columns(tokens: int, max_new_tokens: int) -> int:
    """Return the columns of a new cache."""
    return tokens + min(max_new_tokens + MAX_K, AHEAD)


def grown(held: int, columns: int) -> int:
    """Return the columns of a cache that had `held`, and needs more."""
    return max(columns + AHEAD, int(GROWTH * held))


def _resized(states: Tensor, size: int, padding: Sequence[int] = ()) -> Tensor:
    """Copy states without the padding of each row to `size` columns. Unused columns are masked, but must be finite."""
    larger, held = states.new_zeros(*states.shape[:2], size, states.shape[3]), states.shape[2]
    for row, pad in enumerate(padding or [0] * len(states)):
        larger[row, :, : held - pad] = states[row, :, pad:]
    return larger


class Ragged:
    """Run the forwards of a model over rows of different lengths. Each token is written at the column of its position,
    so a round overwrites what was rejected, and rows go on independently without moving anything."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, padding: Sequence[int], size: int = 0) -> None:
        self.model = model
        self.rows = len(padding)
        self._device = None if model.device.type == "meta" else model.device  # offloaded weights have no device
        size = max(size, cache.get_seq_length())
        layers = [_RaggedLayer() for _ in cache.layers]
        for new, old in zip(layers, cache.layers, strict=True):
            new.take_over(old, padding, size)
        self.cache = DynamicCache()
        self.cache.layers = layers
        config = model.config.get_text_config(decoder=True)
        self._is_additive = config._attn_implementation == "eager"
        self._window = getattr(config, "sliding_window", None)
        self._has_kinds = getattr(config, "layer_types", None) is not None
        self._kinds = set(config.layer_types if self._has_kinds else [SLIDING] if self._window else ())

    def feed(self, ids: Tensor, starts: Sequence[int], last: Tensor | None = None, **settings: Any) -> Tensor:
        """Return the logits after tokens, `(rows, tokens, vocab)`."""
        device, count, width = self._device or ids.device, ids.shape[1], max(starts) + ids.shape[1]
        ids, last = ids.to(device), None if last is None else last.to(device)
        columns = torch.tensor(starts, device=device)[:, None] + torch.arange(count, device=device)
        place = _Place(torch.arange(self.rows, device=device)[:, None], columns, width)
        for layer in self.cache.layers:
            layer.make_room(width, self.rows)
            layer.place = place
        logits: Tensor = self.model(
            input_ids=ids,
            attention_mask=self._mask(columns, width),
            position_ids=columns if last is None else columns.minimum(last),
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            **settings,
        ).logits
        return logits

    def _mask(self, columns: Tensor, width: int) -> Any:
        """Return the mask in the form that the model takes: a token sees its row up to itself, or a window of it."""
        at, columns = torch.arange(width, device=columns.device), columns[:, None, :, None]
        masks = {FULL: at <= columns}
        if SLIDING in self._kinds:
            masks[SLIDING] = masks[FULL] & (at > columns - int(self._window or 0))
        if self._is_additive:
            dtype = self.model.dtype
            lowest, zero = torch.finfo(dtype).min, torch.zeros((), dtype=dtype, device=columns.device)
            masks = {kind: zero.where(mask, lowest) for kind, mask in masks.items()}
        if SLIDING not in self._kinds:
            return masks[FULL]
        return {kind: masks[kind] for kind in self._kinds} if self._has_kinds else masks[SLIDING]

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.rows -= 1
        for layer in self.cache.layers if row < self.rows else ():
            for states in (layer.keys, layer.values):
                states[row] = states[self.rows]


def read_padded(
    model: PreTrainedModel,
    ids: Tensor,
    padding: Sequence[int],
    cache: DynamicCache,
    max_positions: int | None = None,
    **settings: Any,
) -> Tensor:
    """Read rows, `(rows, tokens)`, that begin with padding, into a cache; return their logits. Those of rows with more
    than `max_positions` mean nothing."""
    cache.activate_past_recording()
    positions = torch.arange(ids.shape[1], device=ids.device) - torch.tensor(padding, device=ids.device)[:, None]
    last = None if max_positions is None else max_positions - 1
    logits: Tensor = model(
        input_ids=ids,
        attention_mask=(positions >= 0).long(),
        position_ids=positions.clamp(min=0, max=last),
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
        **settings,
    ).logits
    return logits


# --- models that cannot hold independent rows -----------------------------------------------------------------------

_hindrances: WeakKeyDictionary[Any, tuple[object, str | None]] = WeakKeyDictionary()


def hindrance(model: PreTrainedModel) -> str | None:
    """Return why rows of a batch cannot go on independently in this model; `None` if they can. The first call probes
    the model with two short rows, which must get the logits that they get alone."""
    config = vars(model.config.get_text_config(decoder=True))  # kind of attention, windows, positions
    is_odd = model.training and any(getattr(m, name, 0) for m in model.modules() for name in TRAINING_ATTRIBUTES)
    state = is_odd, model.dtype, model.device, repr(config)
    known_state, why = _hindrances.get(model, (None, None))
    if known_state != state:
        try:
            why = "it trains with gradient checkpointing or without some layers" if is_odd else _unsupported(model)
            with evaluating(model):  # with dropout, no two forwards are equal
                why = why or ("its logits depend on where the tokens of a row are" if _rows_differ(model) else None)
        except Exception as error:  # noqa: BLE001 - models of any kind; tried again for the next batch
            return f"its forward fails: {first_line(error)}"
        _hindrances[model] = state, why
    return why


def _unsupported(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "an encoder-decoder's positions are those of the batch, not of the row"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no positions"
    if (attention := getattr(config, "_attn_implementation", None)) not in MASKED_ATTENTION:
        return f"its attention, {attention}, takes no mask for each row"
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    is_known = kinds <= {FULL, SLIDING, "global"} and getattr(config, "attention_chunk_size", None) is None
    if not is_known or not layers <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return "it has layers other than full attention and sliding windows"
    return None


@neutral_context()
@torch.no_grad()  # in inference mode, what a model caches in its first forward could not be trained with
def _rows_differ(model: PreTrainedModel) -> bool:
    """Whether two rows of different lengths get other logits than by the model's own loop, as a batch or alone."""
    long, short, count = PROBE
    device = model.device if model.device.type != "meta" else torch.device("cpu")
    ids = torch.arange(1, long + 1, device=device) ** 2 * 7 % vocab_size_of(model)
    prompts = torch.stack([ids, torch.cat([ids[: long - short], ids.flip(0)[:short]])])
    mask = torch.ones_like(prompts)
    mask[1, : long - short] = 0
    batch = plain_answer(model, prompts, text_arguments(model, mask, model.generation_config), count + 1)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    read_padded(model, prompts, [0, long - short], cache)
    behind = batch.sequences[:, long : long + count]
    ragged = Ragged(model, cache, [0, long - short]).feed(behind, [long, short]).float()
    alone = model(input_ids=torch.cat([prompts[1:, -short:], behind[1:]], 1)).logits[:, -count:].float()
    pairs = ((list(ragged.unbind(1)), batch.logits[1:]), (list(ragged[1]), list(alone[0])))
    return any(difference(model, found, expected) is not None for found, expected in pairs)


# --- candidates -----------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """The candidates of a round, `(rows, k)`."""

    tokens: Tensor
    live: Tensor  # which of them exist: some rows propose fewer
    logits: Tensor | None = None  # `(rows, k, vocab)`: what they were sampled from, processed as the target's

    @classmethod
    def none(cls, rows: int, device: torch.device) -> Candidates:
        tokens = torch.zeros(rows, 0, dtype=torch.long, device=device)
        return cls(tokens, tokens.bool())


class BatchDraft:
    """Draft for the rows of a batch that share one draft."""

    def __init__(
        self,
        drafting: LeanDrafting,
        rows: Sequence[int],
        processors: RowProcessors,
        *,
        vocab_size: int,
        do_sample: bool,
        eos: Tensor | None,
        threshold: float = 0.0,
    ) -> None:
        self.rows = list(rows)
        self.processors = processors
        self.vocab_size = vocab_size
        self.do_sample = do_sample
        self.eos = eos
        self.threshold = threshold
        self.model, self.token_ids = drafting.chosen()
        config = self.model.config.get_text_config(decoder=True)
        self._max_positions = getattr(config, "max_position_embeddings", None)
        self._keep_last = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        self._ragged: Ragged | None = None
        self._read = dict.fromkeys(self.rows, 0)  # tokens of each row in the cache
        self.times: list[float] = []  # seconds of each forward of the round
        self.first_fed = 0  # tokens per row of the first of these forwards

    def propose(
        self,
        k: int,
        texts: Mapping[int, Sequence[int]],
        lengths: Mapping[int, int],
        rooms: Mapping[int, int],
        clock: Clock,
    ) -> Candidates:
        """Draft at most k candidates for each row."""
        rows, processors, device = self.rows, self.processors, self.model.device
        known = [len(texts[row]) for row in rows]
        room = [rooms[row] for row in rows]
        if self._max_positions is not None:
            room = [min(most, self._max_positions - n + 1) for most, n in zip(room, known, strict=True)]
        k, self.times = min(k, max(room)), []
        if k <= 0:
            return Candidates.none(len(rows), device)
        places = torch.tensor(room, device=device)
        live = places > 0
        tokens, lives, logits = list[Tensor](), list[Tensor](), list[Tensor]()
        for j in range(k):
            began = clock()
            with torch.inference_mode():
                if j == 0:
                    raw = self._feed_missing(texts, max(room))
                else:
                    raw = self._feed(tokens[-1][:, None], [n + j - 1 for n in known])
            chosen, row_logits, is_possible, confidence = self._choose(raw, [lengths[r] + j for r in rows])
            self.times.append(clock() - began)
            live = live & (places > j) & is_possible
            tokens.append(chosen)
            lives.append(live)
            if row_logits is not None:
                logits.append(row_logits)
            processors.write(rows, [lengths[r] + j for r in rows], chosen[:, None])
            if self.eos is not None:
                live = live & ~torch.isin(chosen, self.eos.to(device))
            if confidence is not None:
                live = live & (confidence >= self.threshold)
                if not bool(live.any()):
                    break
        self._read = {row: n + len(tokens) - 1 for row, n in zip(rows, known, strict=True)}
        return Candidates(torch.stack(tokens, 1), torch.stack(lives, 1), torch.stack(logits, 1) if logits else None)

    def _feed_missing(self, texts: Mapping[int, Sequence[int]], max_new_tokens: int) -> Tensor:
        """Feed what the draft has not read yet; return the logits after it, `(rows, vocab)`."""
        known = [len(texts[row]) for row in self.rows]
        self.first_fed = max(n - self._read[row] for n, row in zip(known, self.rows, strict=True))
        if self._ragged is None or self.first_fed > min(known):
            self.first_fed = max(known)
            return self._read_all(texts, known, max_new_tokens)
        # Rows that miss fewer tokens are fed some again, which are written where they were.
        ids = torch.tensor([texts[row][-self.first_fed :] for row in self.rows], device=self.model.device)
        return self._feed(ids, [n - self.first_fed for n in known])

    def _read_all(self, texts: Mapping[int, Sequence[int]], known: Sequence[int], max_new_tokens: int) -> Tensor:
        width = max(known)
        padding = [width - n for n in known]
        padded = [[0] * pad + list(texts[row]) for pad, row in zip(padding, self.rows, strict=True)]
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        ids = torch.tensor(padded, device=self.model.device)
        logits = read_padded(self.model, ids, padding, cache, self._max_positions, **self._keep_last)
        self._ragged = Ragged(self.model, cache, padding, first_columns(width, max_new_tokens))
        return logits[:, -1]

    def _feed(self, ids: Tensor, starts: Sequence[int]) -> Tensor:
        assert self._ragged is not None
        last = None
        if self._max_positions is not None and max(starts) + ids.shape[1] > self._max_positions:
            last = torch.full_like(ids[:, :1], self._max_positions - 1)
        return self._ragged.feed(ids, starts, last, **self._keep_last)[:, -1]

    def _choose(self, raw: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return tokens, `(rows,)`; the logits that they were sampled from; whether any token is possible; and their
        probabilities if there is a threshold."""
        if not (self.do_sample or self.processors):
            highest, column = raw.max(-1)
            tokens, confidence = column if self.token_ids is None else self.token_ids[column], None
            if self.threshold:
                confidence = raw.softmax(-1, dtype=torch.float32).gather(-1, column[:, None])[:, 0]
            return tokens, None, highest.isfinite(), confidence
        device = raw.device
        logits = self.processors(self._whole(raw), self.rows, lengths)
        highest, tokens = logits.max(-1)
        is_possible = highest.isfinite()
        if not (self.do_sample or self.threshold):
            return tokens.to(device), None, is_possible.to(device), None
        probs = logits.softmax(-1)
        if self.do_sample:
            tokens = torch.multinomial(probs.where(is_possible[:, None], 1.0), 1)[:, 0]
        confidence = probs.gather(-1, tokens[:, None])[:, 0].to(device) if self.threshold else None
        return tokens.to(device), logits if self.do_sample else None, is_possible.to(device), confidence

    def _whole(self, raw: Tensor) -> Tensor:
        """Return a float32 copy of logits for the target's full vocabulary, on the target's device."""
        logits = raw.to(self.processors.tokens.device, torch.float32, copy=True)
        if self.token_ids is not None:
            whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
            return whole.index_copy_(1, self.token_ids.to(logits.device), logits)
        missing = self.vocab_size - logits.shape[-1]  # embeddings may be padded to different sizes
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def settle(self, row: int, length: int, accepted: int) -> None:
        """Keep the accepted candidates of a row that had `length` tokens."""
        self._read[row] = min(self._read[row], length + accepted)

    def leave(self, row: int) -> None:
        """Remove a row that has ended."""
        place, last = self.rows.index(row), self.rows.pop()
        if last != row:
            self.rows[place] = last
        if self._ragged is not None:
            with torch.inference_mode():
                self._ragged.leave(place)


# --- acceptance -----------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What a round brings each row."""

    accepted: Tensor  # number of accepted candidates
    token: Tensor  # the token after them
    p: Tensor | None = None  # the target's probability of each candidate, if tokens are sampled
    q: Tensor | None = None  # the draft's


def judged(candidates: Candidates, scores: Tensor, *, do_sample: bool) -> Verdict:
    """Accept candidates. Greedy: those that equal the target's choice, up to the first that does not. Sampled:
    rejection sampling (arXiv 2211.17192, algorithm 1) in each row."""
    tokens, live, rows = candidates.tokens, candidates.live, torch.arange(len(scores), device=scores.device)
    k = tokens.shape[1]
    if not do_sample:
        chosen = scores.argmax(-1)
        if not k:
            return Verdict(torch.zeros_like(rows), chosen[:, 0])
        accepted = ((tokens == chosen[:, :k]) & live).long().cumprod(1).sum(1)
        return Verdict(accepted, chosen[rows, accepted])
    target = scores.softmax(-1)
    if candidates.logits is None or not k:
        return Verdict(torch.zeros_like(rows), torch.multinomial(target[:, 0], 1)[:, 0])
    draft = candidates.logits.softmax(-1)
    p, q = (probs[:, :k].gather(-1, tokens[..., None])[..., 0] for probs in (target, draft))
    is_accepted = live & (torch.rand_like(p) < p / q)
    accepted = is_accepted.long().cumprod(1).sum(1)
    own = target[rows, accepted]
    is_rejected = (accepted < live.sum(1))[:, None]
    rest = (own - draft[rows, accepted.clamp(max=k - 1)].where(is_rejected, 0.0)).clamp(min=0)
    rest = rest.where(rest.sum(-1, keepdim=True) > 0, own)  # p and q may be equal except for rounding
    token = torch.multinomial(rest / rest.sum(-1, keepdim=True), 1)[:, 0]
    return Verdict(accepted, token, p, q)


# --- the batch ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Row:
    """The state of one request in a batch."""

    request: Request
    padding: int
    text: list[int]  # without padding
    prompt_tokens: int
    past: RequestText | None = None
    guesses: list[Guess] = field(default_factory=list)  # how past text would go on
    end: int | None = None  # tokens of the answer, once it has ended
    accepted: int = 0
    examined: int = 0

    @property
    def emitted(self) -> int:
        return len(self.text) - self.prompt_tokens

    @property
    def length(self) -> int:
        """Tokens with padding."""
        return self.padding + len(self.text)


class BatchRequest(Decoding):
    """A batch between its beginning and its end. Each row is a request with its own draft and trace. If rows
    cannot go on independently, the target's own loop answers, and the log says why, once."""

    def __init__(
        self, model: PreTrainedModel, input_ids: Tensor, kwargs: dict[str, Any], bindings: Sequence[Binding]
    ) -> None:
        super().__init__(model, input_ids, kwargs, bindings)
        self.requests = [
            Request(model, input_ids[i : i + 1], of_row(kwargs, i, len(input_ids)), bindings)
            for i in range(len(input_ids))
        ]
        self.draftings: list[LeanDrafting] = []
        self.pace: BatchPace | None = None

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Lease the drafts of all rows."""
        with contextlib.ExitStack() as stack:
            for request in self.requests:
                request.lease(stack)
                model = request.kwargs.get("assistant_model")
                self.draftings.append(request.drafting or LeanDrafting(model, None))
            may_repeat = all(map(bears_any_token, self.kwargs["logits_processor"]))
            self.pace = self.draftings[0].batch_pace(
                self.requests[0].domain,
                len(self.requests),
                do_sample=bool(self.config.do_sample),
                may_repeat=may_repeat,
            )
            drafts = {id(request.drafting): request.drafting.draft for request in self.requests if request.drafting}
            if drafts:
                stack.enter_context(fast_kernels(self.model, *drafts.values(), is_request=True))
            yield

    def decode(self) -> Any:
        """Return the answers as the target's own loop returns them."""
        assert self.pace is not None
        why = self._hindrance()
        if why is not None:
            log_once(self.model, f"Batches are decoded without a draft: {why}.")
        elif not self.pace.is_plain:
            return _Rounds(self).decode()
        return self.decode_plainly(is_usual=why is None)

    def _hindrance(self) -> str | None:
        """Return why the rows cannot go on independently; `None` if they can."""
        config, cache, processors = self.config, self.kwargs.get("past_key_values"), self.kwargs["logits_processor"]
        if why := undrafted(self.model, config, processors):
            return why
        drafts = list({id(drafting.draft): drafting for drafting in self.draftings}.values())
        if self.kwargs.get("streamer") is not None or self.kwargs.get("synced_gpus"):
            return "they are streamed, or computed on several machines in step"
        if config.return_dict_in_generate:
            return "more than tokens is returned (`return_dict_in_generate`)"
        for drafting in drafts:
            if why := drafting.hindrance():
                return why
        if self.kwargs.get("mm_encoder_outputs") is not None:
            return "a multimodal model numbers the positions of a batch itself"
        if others := list(given_arguments(self.kwargs)):
            return f"`{others[0]}` was given"
        if has_adapter_per_row(self.model):
            return (
                "PEFT uses an adapter for each row (`adapter_names`, or aLoRA), and rows leave the batch as they end"
            )
        if any(type(p) is ReplayedProcessor for p in processors):
            return "a processor is replayed"
        if not all(map(bears_any_token, processors)):
            return "a processor may not accept rows of different lengths"
        if not isinstance(cache, DynamicCache) or cache.offloading or self.cached_tokens:
            return "the cache is not a new dynamic one"
        if not (all(request.prompts for request in self.requests) and _is_padded_left(self.kwargs, self.input_ids)):
            return "prompts are not token ids after padding"
        limits = limits_of(self.model, self.input_ids, self.kwargs)
        is_unlimited = limits.allow_any(self.input_ids.shape[1], self.max_length - 1)
        if not is_unlimited or self.max_length > limits.max_length + 1:
            return f"of {type(self.model).__name__}, {limits.reason}"
        for role, model in (("the target", self.model), *(("the draft", drafting.draft) for drafting in drafts)):
            if why := hindrance(model):
                return f"{role} cannot hold independent rows: {why}"
        return None

    def decode_plainly(self, *, is_usual: bool = True) -> Any:
        """Let the target's own loop answer, and record its rows. An unusual request, such as one without a cache, is
        not timed."""
        assert self.pace is not None
        clock, times, requests = self.draftings[0].clock, list[float](), self.requests
        records = any(request.rows.parts for request in requests)

        def seen(scores: Tensor) -> None:
            times.append(clock())
            if records:
                kept = scores.clone()
                for i, request in enumerate(requests):
                    if request.rows.parts:
                        request.rows.add(kept[i : i + 1])

        criteria = _WatchedCriteria(self.kwargs["stopping_criteria"])
        processors = WatchedProcessors(self.kwargs["logits_processor"], seen)
        output = self._sample(processors, stopping_criteria=criteria)
        sequences = output if isinstance(output, Tensor) else output.sequences
        begins, total = self.input_ids.shape[1], sequences.shape[1] - self.input_ids.shape[1]
        done = torch.stack([met.expand(len(requests)) for met in criteria.met[:total]]).cpu()
        ends = done.int().argmax(0).add(1).where(done.any(0), total).tolist()
        for i, (request, end) in enumerate(zip(requests, ends, strict=True)):
            request.sequence = sequences[i : i + 1, : begins + end]
            request.rounds = [Round(request.drafted, 1)] * end
        if len(times) > 1 and is_usual:
            self.pace.timed(plain_time(times), sum(ends) - len(ends))
        return output

    def close(self) -> None:
        """End the batch, successful or not."""

    def finish(self) -> None:
        """Hand the traces of a successful batch over."""
        hand_over(self.requests)


class _WatchedCriteria(StoppingCriteriaList):
    """The target's stopping criteria with their results."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self.met: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        met: Tensor = super().__call__(input_ids, scores, **kwargs)
        self.met.append(met)
        return met


def _is_padded_left(kwargs: dict[str, Any], input_ids: Tensor) -> bool:
    """Whether the mask hides padding before each prompt only, and positions are counted after it."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and (mask.shape != input_ids.shape or not bool(mask[:, -1].all() & (mask.diff() >= 0).all())):
        return False
    counted = (torch.ones_like(input_ids) if mask is None else mask.long()).cumsum(-1) - 1
    return positions is None or bool((positions == counted.clamp(min=0)).all())


class _Rounds:
    """The loop over a batch. All rows draft and verify together, and each continues with its own accepted tokens. Rows
    that have ended are removed."""

    def __init__(self, batch: BatchRequest) -> None:
        assert batch.pace is not None
        self.model = batch.model
        self.kwargs = batch.kwargs
        self.input_ids = batch.input_ids
        self.pace = batch.pace
        self.clock = batch.draftings[0].clock
        config, criteria, prompts = batch.config, batch.kwargs["stopping_criteria"], batch.input_ids.tolist()
        mask = batch.kwargs.get("attention_mask")
        padding = [0] * len(prompts) if mask is None else (mask == 0).sum(-1).tolist()
        self.rows = [
            _Row(request, pad, ids[pad:], len(ids) - pad)
            for request, pad, ids in zip(batch.requests, padding, prompts, strict=True)
        ]
        for row in self.rows if self.pace.reads_text else ():
            row.past = RequestText((), row.text, int(config.max_length), row.request.earlier)
        self.plan = BatchRound(0)
        self.do_sample = bool(config.do_sample)
        self.begins = self.input_ids.shape[1]
        self.max_new_tokens = int(config.max_length) - self.begins
        eos = [c.eos_token_id.flatten().cpu() for c in criteria if type(c) is EosTokenCriteria]
        self.eos = torch.cat(eos) if eos else None
        self.eos_ids = set(() if self.eos is None else self.eos.tolist())
        self.strings = [c for c in criteria if type(c) is StopStringCriteria]
        # Other criteria may depend on all rows, and count their calls.
        known = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)
        self.others = StoppingCriteriaList([c for c in criteria if type(c) not in known])
        self.asked = 0  # tokens of each answer that the other criteria have seen
        # Without a token that ends answers, all rows go on until the last one has ended.
        self.pads = any(hasattr(c, "eos_token_id") for c in criteria)
        pad = config._pad_token_tensor
        self.pad_id = 0 if pad is None else int(pad.reshape(-1)[0])
        self.processors = RowProcessors(
            LogitsProcessorList(batch.kwargs["logits_processor"]), self.input_ids, self.pad_id
        )
        self.live = list(range(len(self.rows)))  # in the order of the target's cache
        self.ragged: Ragged | None = None
        self.drafts = self._drafts(batch.draftings)
        self.failed: list[BatchDraft] = []

    def _drafts(self, draftings: Sequence[LeanDrafting]) -> list[BatchDraft]:
        groups: dict[int, list[int]] = {}
        for row, drafting in enumerate(draftings):
            groups.setdefault(id(drafting.draft), []).append(row)
        return [
            BatchDraft(
                draftings[rows[0]],
                rows,
                self.processors,
                vocab_size=vocab_size_of(self.model),
                do_sample=self.do_sample,
                eos=self.eos,
                threshold=self.pace.threshold,
            )
            for rows in groups.values()
        ]

    def decode(self) -> Tensor:
        """Return the prompts and answers, int64, `(rows, tokens)`."""
        is_first = True
        while self.live:
            began, count = self.clock(), len(self.live)
            emitted = sum(row.emitted for row in self.rows)
            texts = {number: chances for number in self.live if (chances := self._look_up(self.rows[number]))}
            self.plan = self.pace.begin(count, texts)
            candidates = self._propose()
            raw = self._verify(candidates)
            scores = raw
            if self.processors:
                per_row = candidates.tokens.shape[1] + 1
                rows = [row for row in self.live for _ in range(per_row)]
                lengths = [self.rows[row].length + j for row in self.live for j in range(per_row)]
                scores = self.processors(raw.flatten(0, 1).clone(), rows, lengths).view_as(raw)
            self._take(candidates, raw, judged(candidates, scores, do_sample=self.do_sample))
            del raw, scores
            time = self._round_time(candidates, None if is_first else self.clock() - began)
            self.pace.timed(time, sum(row.emitted for row in self.rows) - emitted)
            is_first = False
        for row in self.rows:
            self.pace.ended(row.accepted, row.examined)
        return self._output()

    def _round_time(self, candidates: Candidates, seconds: float | None) -> RoundTime:
        drafted = [draft for draft in self.drafts if draft.times]
        if not drafted:
            return RoundTime(candidates.tokens.shape[1], seconds=seconds)
        if max(draft.first_fed for draft in drafted) > READS_PROMPT_TOKENS:
            seconds = None
        forwards, draft_seconds = max(len(draft.times) for draft in drafted), sum(sum(d.times) for d in drafted)
        return RoundTime(candidates.tokens.shape[1], forwards, draft_seconds, seconds)

    # --- candidates and the target ----------------------------------------------------------------------------------

    def _look_up(self, row: _Row) -> list[float]:
        """Look up how past text would go on with a row; return the probability of each token that it and all before it
        are right."""
        row.guesses, chances, size = [], list[float](), vocab_size_of(self.model)
        while row.past is not None and len(row.guesses) < min(MAX_GUESSES, self.max_new_tokens - row.emitted - 1):
            found = [guess for guess in row.past.guesses() if guess.token < size]
            if not found:
                break
            guess, chance = self.pace.likeliest(found)
            row.guesses.append(guess)
            chances.append(chance * (chances[-1] if chances else 1.0))
            if guess.token in self.eos_ids or chances[-1] < MIN_GUESS_CHANCE:
                break
            row.past.proposed(guess.token)
        return chances

    def _propose(self) -> Candidates:
        """Return the candidates of all sources, in the order of the target's cache."""
        rows, device = {row: self.rows[row] for row in self.live}, self.input_ids.device
        room = {number: self.max_new_tokens - row.emitted - 1 for number, row in rows.items()}
        texts = {number: row.text for number, row in rows.items()}
        lengths = {number: row.length for number, row in rows.items()}
        k = self.plan.k if self.plan.drafts else 0
        parts: list[tuple[BatchDraft, Candidates]] = []
        for draft in self.drafts:
            if not draft.rows:
                continue
            part = Candidates.none(len(draft.rows), device)
            try:
                if draft not in self.failed:
                    part = draft.propose(k, texts, lengths, room, self.clock)
            except Exception as error:  # noqa: BLE001 - drafts of any kind: the batch continues without the draft
                log_failed_draft(draft.model, error)
                self.failed.append(draft)
                draft.times = []
            parts.append((draft, part))
        if len(parts) == 1 and parts[0][0].rows == self.live and not self.plan.texts:
            tokens, live, logits = parts[0][1]
            return Candidates(tokens.to(device), live.to(device), None if logits is None else logits.to(device))
        return self._joined(parts, lengths)

    def _joined(self, parts: Sequence[tuple[BatchDraft, Candidates]], lengths: Mapping[int, int]) -> Candidates:
        """Join the candidates of several drafts and of past text."""
        device, count = self.input_ids.device, len(self.live)
        proposed = {row: [g.token for g in self.rows[row].guesses[: self.plan.k]] for row in self.plan.texts}
        k = max([*(part.tokens.shape[1] for _, part in parts), *map(len, proposed.values())])
        tokens = torch.zeros(count, k, dtype=torch.long, device=device)
        live, logits = tokens.bool(), None
        if self.do_sample and k:
            logits = torch.zeros(count, k, vocab_size_of(self.model), dtype=torch.float32, device=device)
        place = {number: i for i, number in enumerate(self.live)}
        for draft, part in parts:
            at, width = [place[number] for number in draft.rows], part.tokens.shape[1]
            tokens[at, :width], live[at, :width] = part.tokens.to(device), part.live.to(device)
            if logits is not None and part.logits is not None:
                logits[at, :width] = part.logits.to(device)
        for number, ids in proposed.items():
            here, guessed = place[number], torch.tensor(ids, device=device)
            tokens[here, : len(ids)] = guessed
            live[here] = torch.arange(k, device=device) < len(ids)
            if logits is not None:  # certain tokens
                logits[here] = -torch.inf
                logits[here, : len(ids)].scatter_(1, guessed[:, None], 0.0)
                logits[here, len(ids) :] = 0.0
            self.processors.write([number], [lengths[number]], guessed[None])
        return Candidates(tokens, live, logits)

    def _verify(self, candidates: Candidates) -> Tensor:
        """Return the target's logits at each candidate, and after the last one, float32, `(rows, k + 1, vocab)`."""
        tokens, k = candidates.tokens, candidates.tokens.shape[1]
        if self.ragged is None:
            logits = self._read_prompts(tokens)[:, -k - 1 :]
        else:
            rows = [self.rows[row] for row in self.live]
            newest = torch.tensor([[row.text[-1]] for row in rows], device=tokens.device)
            starts = [len(row.text) - 1 for row in rows]
            last = torch.tensor(starts, device=tokens.device)[:, None] + candidates.live.sum(1, keepdim=True)
            logits = self.ragged.feed(torch.cat([newest, tokens], 1), starts, last)
        return logits.to(dtype=torch.float32, device=tokens.device)

    def _read_prompts(self, tokens: Tensor) -> Tensor:
        """Return the logits of the prompts and the first candidates, by a forward like the loop's own."""
        loop_only = {"logits_processor", "stopping_criteria", "generation_config", "streamer", "synced_gpus"}
        kwargs = {name: value for name, value in self.kwargs.items() if name not in loop_only.union(ASSISTED_ONLY)}
        mask, positions, k = kwargs.get("attention_mask"), kwargs.get("position_ids"), tokens.shape[1]
        if mask is not None:
            kwargs["attention_mask"] = torch.cat([mask, torch.ones_like(tokens, dtype=mask.dtype)], 1)
        if positions is not None:
            behind = positions[:, -1:] + 1 + torch.arange(k, device=positions.device)
            kwargs["position_ids"] = torch.cat([positions, behind], 1)
        kwargs["past_key_values"].activate_past_recording()
        inputs = self.model.prepare_inputs_for_generation(
            torch.cat([self.input_ids, tokens], 1), next_sequence_length=None, is_first_iteration=True, **kwargs
        )
        inputs["past_key_values"] = kwargs["past_key_values"]  # Phi-3 drops an empty one behind a length
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = k + 1
        logits: Tensor = self.model(**inputs, return_dict=True).logits
        padding, size = [row.padding for row in self.rows], first_columns(self.begins, self.max_new_tokens)
        self.ragged = Ragged(self.model, kwargs["past_key_values"], padding, size)
        return logits

    # --- accepted tokens --------------------------------------------------------------------------------------------

    def _take(self, candidates: Candidates, raw: Tensor, verdict: Verdict) -> None:
        """Append to each row what it emits, and remove rows that have ended."""
        counts = torch.stack([candidates.live.sum(1), verdict.accepted, verdict.token], 1)
        k, ended = candidates.tokens.shape[1], list[int]()
        drafts = {number: draft for draft in self.drafts for number in draft.rows}
        results = torch.cat([candidates.tokens, counts], 1).tolist()  # one transfer
        for i, (number, result) in enumerate(zip(self.live, results, strict=True)):
            row, (count, accepted, token) = self.rows[number], result[k:]
            drafted, known = result[:count], len(row.text)
            is_text = number in self.plan.texts
            emitted, drafted, is_over = self._ended(row, drafted, [*drafted[:accepted], token])
            # The last token is still to be fed, also if it was drafted: the last one of a stop string.
            drafts[number].settle(number, known, 0 if is_text else len(emitted) - 1)
            if row.end is None:
                self._record(row, drafted, emitted, raw[i], verdict, i, is_text)
            if row.past is not None:
                self._judge_guesses(row, emitted, len(drafted) if is_text else 1)
            if self.processors:
                self.processors.write([number], [row.length], self.input_ids.new_tensor([emitted], dtype=torch.long))
            row.text += emitted
            self.processors.lengths[number] = row.length
            if is_over and row.end is None:
                row.end = row.emitted
            if (self.pads and row.end is not None) or row.emitted >= self.max_new_tokens:
                ended.append(number)
        self._ask_others()
        ended += [number for number in self.live if self.pads and self.rows[number].end is not None]
        if not self.pads and all(row.end is not None for row in self.rows):
            total = max(row.end or 0 for row in self.rows)
            ended += [number for number in self.live if self.rows[number].emitted >= total]
        for number in dict.fromkeys(ended):
            self._leave(number, drafts[number])

    def _leave(self, number: int, draft: BatchDraft) -> None:
        place, last = self.live.index(number), self.live.pop()
        if last != number:
            self.live[place] = last
        assert self.ragged is not None
        self.ragged.leave(place)
        draft.leave(number)

    def _judge_guesses(self, row: _Row, emitted: list[int], count: int) -> None:
        """Judge the first guesses up to a wrong one, and go on from what was emitted."""
        assert row.past is not None
        for guess, token in zip(row.guesses[:count], emitted, strict=False):
            self.pace.guessed(guess, guess.token == token)
            if guess.token != token:
                break
        row.past.settled(emitted)

    def _record(
        self, row: _Row, drafted: list[int], emitted: list[int], raw: Tensor, verdict: Verdict, i: int, is_text: bool
    ) -> None:
        """Record a row's round for its trace."""
        accepted = num_accepted(drafted, emitted)
        examined = min(accepted + 1, len(drafted), len(emitted))
        if not is_text:
            row.accepted += accepted
            row.examined += examined
            self.pace.judged(accepted, examined)
        p, q = (None if part is None or not drafted else part[i, : len(drafted)] for part in (verdict.p, verdict.q))
        drafted_ids = torch.tensor(drafted, dtype=torch.long, device="cpu")
        request = row.request
        request.rounds.append(Round(drafted_ids, len(emitted), [True] * len(drafted) if is_text else [], p, q))
        if request.rows.parts:
            request.rows.add(raw[: len(emitted)].clone())

    def _ended(self, row: _Row, drafted: list[int], emitted: list[int]) -> tuple[list[int], list[int], bool]:
        """Return what a row emits before it ends, its candidates up to a stop string, and whether it ends."""
        emitted = emitted[: self.max_new_tokens - row.emitted]
        is_over = len(emitted) == self.max_new_tokens - row.emitted
        at = next((i for i, token in enumerate(emitted) if token in self.eos_ids), None)
        if at is not None:
            emitted, is_over = emitted[: at + 1], True
        if self.strings and row.end is None:
            end = self._stop_string_end(row, drafted)
            drafted = drafted if end is None else drafted[:end]
            end = self._stop_string_end(row, emitted)
            if end is not None:
                emitted, is_over = emitted[:end], True
        return emitted, drafted, is_over

    def _stop_string_end(self, row: _Row, tokens: list[int]) -> int | None:
        """Return how many of these tokens complete a stop string after a row; `None` if none does."""
        if not tokens:
            return None
        width = max(criterion.maximum_token_len for criterion in self.strings)
        padding = self.input_ids[self.rows.index(row), : row.padding].tolist()
        before = ([NO_TOKEN] * width + padding + row.text)[-width:] if len(row.text) < width else row.text[-width:]
        sequence = before + tokens
        ids = torch.tensor([sequence[i + 1 : i + 1 + width] for i in range(len(tokens))], device=self.input_ids.device)
        met = StoppingCriteriaList(self.strings)(ids, None).tolist()
        return met.index(True) + 1 if True in met else None

    def _ask_others(self) -> None:
        """Call the other criteria as the target's own loop does: for all rows together, once for each token, when all
        rows that have not ended have reached it."""
        while self.others and self.asked < self._reached():
            self.asked += 1
            answers = [self._answer(row, self.asked) for row in self.rows]
            ids = torch.cat([self.input_ids, self.input_ids.new_tensor(answers, dtype=torch.long)], 1)
            met = self.others(ids, None).expand(len(self.rows)).tolist()
            for row, is_met in zip(self.rows, met, strict=True):
                if is_met and (row.end is None or row.end > self.asked):
                    row.end = self.asked
                    row.request.trim(self.asked)

    def _reached(self) -> int:
        """Return the number of tokens that every answer has, except padded ones."""
        going = [row.emitted for row in self.rows if row.end is None or not self.pads]
        if all(row.end is not None for row in self.rows):
            going.append(max(row.end or 0 for row in self.rows))
        return min(going)

    def _answer(self, row: _Row, count: int) -> list[int]:
        """Return the first tokens of an answer, padded."""
        answer = row.text[row.prompt_tokens :][: row.end if self.pads else None][:count]
        return answer + [self.pad_id] * (count - len(answer))

    def _output(self) -> Tensor:
        total = max(row.end or 0 for row in self.rows)
        answers = self.input_ids.new_tensor([self._answer(row, total) for row in self.rows], dtype=torch.long)
        sequences = torch.cat([self.input_ids, answers], 1)
        for i, row in enumerate(self.rows):
            row.request.sequence = sequences[i : i + 1, : self.begins + (row.end or 0)]
        return sequences
