"""A batch of requests that are answered together, each as it would be alone."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from osd_hf.decoding.checks import undrafted
from osd_hf.decoding.draft_length import (
    MAX_K,
    READS_PROMPT_TOKENS,
    BatchPace,
    BatchRound,
    RoundTime,
)
from osd_hf.decoding.exactness import (
    difference,
    given_arguments,
    has_adapter_per_row,
    limits_of,
    log_failed_draft,
    log_once,
    of_row,
    plain_answer,
    text_arguments,
)
from osd_hf.decoding.forward import AHEAD, MASKED_ATTENTION
from osd_hf.decoding.generator import Clock, LeanDrafting
from osd_hf.decoding.request import Binding, Decoding, Request, Round, WatchedProcessors, bears_any_token, hand_over
from osd_hf.decoding.text import Guess, RequestText
from osd_hf.errors import first_line
from osd_hf.logits_processors import ReplayedProcessor, RowProcessors
from osd_hf.models import evaluating, vocab_size_of
from osd_hf.trace import num_accepted
from osd_hf.utils.context import neutral_context
from osd_hf.utils.kernels import fast_kernels

FULL, SLIDING = "full_attention", "sliding_attention"  # the kinds of layers, as configurations name them
GROWTH = 1.5  # of a cache that is full: copying it costs as much as a forward's reading of it
PROBE = (12, 3, 3)  # tokens of the two rows that a model is tried out on, and those behind them
ODD_IN_TRAINING = ("gradient_checkpointing", "layerdrop")  # of modules: no cache, or layers left out at random


# --- forwards -------------------------------------------------------------------------------------------------------


@dataclass
class _Place:
    """Where the tokens of a forward go: of each row (`(rows, 1)`) the columns (`(rows, tokens)`), of which the first
    `width` are read."""

    rows: Tensor
    columns: Tensor
    width: int


class _RaggedLayer(DynamicLayer):
    """The keys and values of one layer, each token's at the column of its position in its row."""

    keys: Tensor
    values: Tensor
    place: _Place

    def take_over(self, layer: DynamicLayer, padding: Sequence[int], size: int) -> None:
        """Hold what is behind the padding of each row of a layer, which is empty then, with room for so many
        columns."""
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = (_with_room(part, size, padding) for part in (layer.keys, layer.values))
        layer.reset()

    def make_room(self, columns: int, rows: int) -> None:
        held = self.keys.shape[2]
        if columns > held:
            size = grown(held, columns)
            self.keys, self.values = (_with_room(part[:rows], size) for part in (self.keys, self.values))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        place, device = self.place, self.keys.device
        rows, columns = place.rows.to(device), place.columns.to(device)
        self.keys[rows, :, columns] = key_states.transpose(1, 2).to(self.keys)  # autocast may change its mind
        self.values[rows, :, columns] = value_states.transpose(1, 2).to(self.values)
        held = len(rows)
        return self.keys[:held, :, : place.width], self.values[:held, :, : place.width]

    def get_seq_length(self) -> int:
        return self.place.width - self.place.columns.shape[1]


def first_columns(tokens: int, most: int) -> int:
    """Columns of a cache that begins with so many tokens of a row, behind which at most so many come."""
    return tokens + min(most + MAX_K, AHEAD)


def grown(held: int, columns: int) -> int:
    """Columns of a cache that had so many, and needs more."""
    return max(columns + AHEAD, int(GROWTH * held))


def _with_room(states: Tensor, size: int, padding: Sequence[int] = ()) -> Tensor:
    """The same, from behind the padding of each row, with room for so many columns. What no row has written yet is
    read, and masked: it must be finite."""
    larger, held = states.new_zeros(*states.shape[:2], size, states.shape[3]), states.shape[2]
    for row, pad in enumerate(padding or [0] * len(states)):
        larger[row, :, : held - pad] = states[row, :, pad:]
    return larger


class Ragged:
    """
    The forwards of a model over rows of different lengths. The tokens of a row lie from the left of its cache without
    gaps, and each is written at the column of its position: a round writes behind what is known of each row, over what
    was rejected there, so rows go on independently, and nothing is ever moved or left out between tokens.

    Args:
        model (`PreTrainedModel`): One that [`hindrance`] finds nothing in the way of.
        cache (`DynamicCache`):
            What one forward of the rows, padded on their left, has filled, past the windows of layers; it is emptied.
        padding (`Sequence[int]`): Tokens of padding with which each row begins.
        size (`int`): Columns that there is to be room for.
    """

    def __init__(self, model: Any, cache: DynamicCache, padding: Sequence[int], size: int = 0) -> None:
        self.model, self.rows = model, len(padding)
        self._device = None if model.device.type == "meta" else model.device  # offloaded weights lie nowhere
        size = max(size, cache.get_seq_length())
        layers = [_RaggedLayer() for _ in cache.layers]
        for ours, theirs in zip(layers, cache.layers, strict=True):
            ours.take_over(theirs, padding, size)
        self.cache = DynamicCache()
        self.cache.layers = layers
        config = model.config.get_text_config(decoder=True)
        self._is_additive = config._attn_implementation == "eager"
        self._window = getattr(config, "sliding_window", None)
        self._has_kinds = getattr(config, "layer_types", None) is not None
        self._kinds = set(config.layer_types if self._has_kinds else [SLIDING] if self._window else ())

    def feed(self, ids: Tensor, starts: Sequence[int], last: Tensor | None = None, **settings: Any) -> Tensor:
        """
        The logits behind tokens, `(rows, tokens, vocab)`.

        Args:
            ids (`torch.Tensor` of shape `(rows, tokens)`, int64): What is fed.
            starts (`Sequence[int]`): Position of the first of them in each row; what lies there or behind is written
                over.
            last (`torch.Tensor` of shape `(rows, 1)`, int64, *optional*): The largest position of each row; what is
                fed behind it is filling, whose logits mean nothing.
            settings (`Any`): Of the model's forward.
        """
        device, count, width = self._device or ids.device, ids.shape[1], max(starts) + ids.shape[1]
        ids, last = ids.to(device), None if last is None else last.to(device)
        columns = torch.tensor(starts, device=device)[:, None] + torch.arange(count, device=device)
        place = _Place(torch.arange(self.rows, device=device)[:, None], columns, width)
        for layer in self.cache.layers:
            layer.make_room(width, self.rows)
            layer.place = place
        logits: Tensor = self.model(
            input_ids=ids, attention_mask=self._mask(columns, width),
            position_ids=columns if last is None else columns.minimum(last),
            past_key_values=self.cache, use_cache=True, return_dict=True, **settings,
        ).logits  # fmt: skip
        return logits

    def _mask(self, columns: Tensor, width: int) -> Any:
        """What tokens at these columns see of so many, in the form that the model takes: a token sees those of its row
        up to itself, as columns are positions; in a sliding window, so many of them."""
        at, columns = torch.arange(width, device=columns.device), columns[:, None, :, None]
        masks = {FULL: at <= columns}
        if SLIDING in self._kinds:
            masks[SLIDING] = masks[FULL] & (at > columns - int(self._window or 0))
        if self._is_additive:
            dtype = self.model.dtype
            lowest, nothing = torch.finfo(dtype).min, torch.zeros((), dtype=dtype, device=columns.device)
            masks = {kind: nothing.where(mask, lowest) for kind, mask in masks.items()}
        if SLIDING not in self._kinds:
            return masks[FULL]
        return {kind: masks[kind] for kind in self._kinds} if self._has_kinds else masks[SLIDING]

    def leave(self, row: int) -> None:
        """A row has ended: the last one takes its place."""
        self.rows -= 1
        for layer in self.cache.layers if row < self.rows else ():
            for states in (layer.keys, layer.values):
                states[row] = states[self.rows]


_hindrances: WeakKeyDictionary[Any, tuple[object, str | None]] = WeakKeyDictionary()  # found of a model as it was


def hindrance(model: Any) -> str | None:
    """Why rows of a batch cannot go on independently in this model; `None` where they can. Asked first, a model is
    tried out on two rows of a few tokens, which must get the logits that they get alone."""
    # The configuration holds the kind of attention, the windows and the positions.
    config = vars(model.config.get_text_config(decoder=True))
    is_odd = model.training and any(getattr(m, name, 0) for m in model.modules() for name in ODD_IN_TRAINING)
    as_it_is = is_odd, model.dtype, model.device, repr(config)
    known, why = _hindrances.get(model, (None, None))
    if known != as_it_is:
        try:
            why = "it trains with gradient checkpointing or without some layers" if is_odd else _unfit(model)
            with evaluating(model):  # where values drop out, no two forwards are alike
                why = why or ("its logits depend on where the tokens of a row lie" if _are_odd_rows(model) else None)
        except Exception as error:  # noqa: BLE001 - of models of any kind
            # What has failed once, for want of memory or by a hook of the caller's, is tried again at the next batch.
            return f"its forward fails: {first_line(error)}"
        _hindrances[model] = as_it_is, why
    return why


def _unfit(model: Any) -> str | None:
    """What a configuration says."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "an encoder-decoder's positions are those of the batch, not of the row"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no positions"
    if (attention := getattr(config, "_attn_implementation", None)) not in MASKED_ATTENTION:
        return f"its attention, {attention}, takes no mask of each row's own"
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    is_known = kinds <= {FULL, SLIDING, "global"} and getattr(config, "attention_chunk_size", None) is None
    if not is_known or not layers <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return "it has layers other than full attention and sliding windows"
    return None


@neutral_context()
@torch.no_grad()  # in inference mode, what a model keeps of its first forward could not be trained with
def _are_odd_rows(model: Any) -> bool:
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
    ours = Ragged(model, cache, [0, long - short]).feed(behind, [long, short]).float()
    alone = model(input_ids=torch.cat([prompts[1:, -short:], behind[1:]], 1)).logits[:, -count:].float()
    as_batch, as_row = list(ours.unbind(1)), list(ours[1])
    pairs = ((as_batch, batch.logits[1:]), (as_row, list(alone[0])))
    return any(difference(model, found, expected) is not None for found, expected in pairs)


def read_padded(
    model: Any, ids: Tensor, padding: Sequence[int], cache: DynamicCache, limit: int | None = None, **settings: Any
) -> Tensor:
    """The logits of rows, `(rows, tokens)`, that begin with so much padding each, which `cache` holds then. Those of
    rows with more than `limit` positions mean nothing."""
    cache.activate_past_recording()
    positions = torch.arange(ids.shape[1], device=ids.device) - torch.tensor(padding, device=ids.device)[:, None]
    last = None if limit is None else limit - 1
    logits: Tensor = model(
        input_ids=ids, attention_mask=(positions >= 0).long(), position_ids=positions.clamp(min=0, max=last),
        past_key_values=cache, use_cache=True, return_dict=True, **settings,
    ).logits  # fmt: skip
    return logits


# --- candidates -----------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """What a round proposes for each row: the tokens, int64, `(rows, k)`; which of them, bool, as some rows propose
    fewer; and the logits that they were drawn from, processed as the target's, float32, `(rows, k, vocab)`, if they
    were."""

    tokens: Tensor
    live: Tensor
    logits: Tensor | None = None


class BatchDraft:
    """
    Proposes for those rows of a batch that have one draft.

    Args:
        drafting (`LeanDrafting`): The draft, and the tokens that it chooses among.
        rows (`Sequence[int]`): Their numbers in the batch.
        processors (`RowProcessors`): The target's.
        vocab_size (`int`): Width of the target's logits.
        do_sample (`bool`): Whether tokens are drawn.
        eos (`torch.Tensor`, *optional*): Tokens that end a row.
        threshold (`float`): What a draft ends with is less probable than this.
    """

    def __init__(
        self, drafting: LeanDrafting, rows: Sequence[int], processors: RowProcessors, *, vocab_size: int,
        do_sample: bool, eos: Tensor | None, threshold: float = 0.0,
    ) -> None:  # fmt: skip
        self.rows, self.processors, self.vocab_size = list(rows), processors, vocab_size
        self.do_sample, self.eos, self.threshold = do_sample, eos, threshold
        self.model, self.token_ids = drafting.chosen()
        config = self.model.config.get_text_config(decoder=True)
        self._limit = getattr(config, "max_position_embeddings", None)
        self._keep_one = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        self._ragged: Ragged | None = None
        self._read = dict.fromkeys(self.rows, 0)  # tokens of each row in the cache
        self.times: list[float] = []  # of each forward of the round, in seconds
        self.fed = 0  # tokens of each row to the first of them

    def propose(
        self, k: int, texts: Mapping[int, Sequence[int]], lengths: Mapping[int, int], rooms: Mapping[int, int],
        clock: Clock,
    ) -> Candidates:  # fmt: skip
        """
        At most k candidates for each row.

        Args:
            k (`int`): 0 proposes none.
            texts (`Mapping[int, Sequence[int]]`): The tokens of each row so far, without padding.
            lengths (`Mapping[int, int]`): Their number with padding.
            rooms (`Mapping[int, int]`): How many candidates each row has room for.
            clock (`Callable[[], float]`): Tells the time in seconds.
        """
        rows, processors = self.rows, self.processors
        known = [len(texts[row]) for row in rows]
        room = [rooms[row] for row in rows]
        if self._limit is not None:  # nothing is fed to the draft behind its last position
            room = [min(most, self._limit - n + 1) for most, n in zip(room, known, strict=True)]
        k, self.times = min(k, max(room)), []
        device = self.model.device
        if k <= 0:
            none = torch.zeros(len(rows), 0, dtype=torch.long, device=device)
            return Candidates(none, none.bool())
        places = torch.tensor(room, device=device)
        live, tokens, lives, logits = places > 0, list[Tensor](), list[Tensor](), list[Tensor]()
        for j in range(k):
            began = clock()
            with torch.inference_mode():
                raw = (
                    self._first(texts, max(room))
                    if j == 0
                    else self._feed(tokens[-1][:, None], [n + j - 1 for n in known])
                )
            chosen, row, is_possible, confidence = self._choose(raw, [lengths[r] + j for r in rows])
            self.times.append(clock() - began)
            live = live & (places > j) & is_possible
            tokens.append(chosen)
            lives.append(live)
            logits += [] if row is None else [row]
            processors.write(rows, [lengths[r] + j for r in rows], chosen[:, None])
            if self.eos is not None:
                live = live & ~torch.isin(chosen, self.eos.to(device))
            if confidence is not None:
                live = live & (confidence >= self.threshold)
                if not bool(live.any()):
                    break
        self._read = {row: n + len(tokens) - 1 for row, n in zip(rows, known, strict=True)}
        return Candidates(torch.stack(tokens, 1), torch.stack(lives, 1), torch.stack(logits, 1) if logits else None)

    def _first(self, texts: Mapping[int, Sequence[int]], most: int) -> Tensor:
        """Feed what the draft has not seen yet, behind which at most so many tokens come; the logits behind it,
        `(rows, vocab)`."""
        known = [len(texts[row]) for row in self.rows]
        self.fed = max(n - self._read[row] for n, row in zip(known, self.rows, strict=True))
        if self._ragged is None or self.fed > min(known):
            self.fed = max(known)
            logits = self._read_all(texts, known, most)
        else:
            # Rows that have seen more are fed the last of it once more, which is written where it was.
            ids = torch.tensor([texts[row][-self.fed :] for row in self.rows], device=self.model.device)
            logits = self._feed(ids, [n - self.fed for n in known])
        return logits

    def _read_all(self, texts: Mapping[int, Sequence[int]], known: Sequence[int], most: int) -> Tensor:
        width = max(known)
        padding = [width - n for n in known]
        ids = [[0] * pad + list(texts[row]) for pad, row in zip(padding, self.rows, strict=True)]
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        fed = torch.tensor(ids, device=self.model.device)
        logits = read_padded(self.model, fed, padding, cache, self._limit, **self._keep_one)
        self._ragged = Ragged(self.model, cache, padding, first_columns(width, most))
        return logits[:, -1]

    def _feed(self, ids: Tensor, starts: Sequence[int]) -> Tensor:
        assert self._ragged is not None
        last = None
        if self._limit is not None and max(starts) + ids.shape[1] > self._limit:
            last = torch.full_like(ids[:, :1], self._limit - 1)
        return self._ragged.feed(ids, starts, last, **self._keep_one)[:, -1]

    def _choose(self, raw: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Tokens, `(rows,)`; the logits that they were drawn from, if they were; whether any can be chosen; and how
        probable they are, where that is asked for."""
        if not (self.do_sample or self.processors):
            highest, column = raw.max(-1)
            tokens, probable = column if self.token_ids is None else self.token_ids[column], None
            if self.threshold:
                probable = raw.softmax(-1, dtype=torch.float32).gather(-1, column[:, None])[:, 0]
            return tokens, None, highest.isfinite(), probable
        device = raw.device
        logits = self.processors(self._whole(raw), self.rows, lengths)
        highest, tokens = logits.max(-1)
        is_possible = highest.isfinite()
        if not (self.do_sample or self.threshold):
            return tokens.to(device), None, is_possible.to(device), None
        probs = logits.softmax(-1)
        if self.do_sample:
            # Nothing can be drawn from NaN, nor where no token is allowed.
            tokens = torch.multinomial(probs.where(is_possible[:, None], 1.0), 1)[:, 0]
        probable = probs.gather(-1, tokens[:, None])[:, 0].to(device) if self.threshold else None
        return tokens.to(device), logits if self.do_sample else None, is_possible.to(device), probable

    def _whole(self, raw: Tensor) -> Tensor:
        """Logits of all of the target's tokens, float32, where its own are: a copy that processors may write into."""
        logits = raw.to(self.processors.tokens.device, torch.float32, copy=True)
        if self.token_ids is not None:
            whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
            return whole.index_copy_(1, self.token_ids.to(logits.device), logits)
        missing = self.vocab_size - logits.shape[-1]  # embeddings padded otherwise than the target's
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def settle(self, row: int, length: int, accepted: int) -> None:
        """So many of the candidates after so many tokens of a row were accepted."""
        self._read[row] = min(self._read[row], length + accepted)

    def leave(self, row: int) -> None:
        """A row has ended."""
        place, last = self.rows.index(row), self.rows.pop()
        if last != row:
            self.rows[place] = last
        if self._ragged is not None:
            with torch.inference_mode():
                self._ragged.leave(place)


# --- how many candidates --------------------------------------------------------------------------------------------


# --- what the target makes of them ----------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What a round brings each row: how many candidates were accepted, and the token behind them, int64, `(rows,)`;
    the target's and the draft's probability of each candidate, float32, `(rows, k)`, where they were drawn."""

    accepted: Tensor
    token: Tensor
    p: Tensor | None = None
    q: Tensor | None = None


def judged(candidates: Candidates, scores: Tensor, *, do_sample: bool) -> Verdict:
    """
    What becomes of candidates. Greedy: those that are the target's choice, up to the first that is not. Sampled: the
    rejection sampling of arXiv 2211.17192 (algorithm 1), row by row.

    Args:
        candidates (`Candidates`): On the device of the scores.
        scores (`torch.Tensor` of shape `(rows, k + 1, vocab)`, float32): The target's processed logits at each
            candidate, and behind the last one.
        do_sample (`bool`): Whether tokens are drawn.
    """
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
    # Where both are the same but for rounding nothing is left, or noise: what is rejected then never is.
    rest = rest.where(rest.sum(-1, keepdim=True) > 0, own)
    token = torch.multinomial(rest / rest.sum(-1, keepdim=True), 1)[:, 0]
    return Verdict(accepted, token, p, q)


MOST_GUESSED, LEAST_CHANCE = 16, 0.1  # tokens of past text in a round, and how likely the last one is right
NO_TOKEN = 1 << 40  # stands for no token of any vocabulary


@dataclass(eq=False)
class _Row:
    """One request of a batch, as far as it has come."""

    request: Request
    padding: int
    text: list[int]  # without padding
    begins: int  # tokens of it that are the prompt
    past: RequestText | None = None  # what it may be continued by
    guesses: list[Guess] = field(default_factory=list)  # how that would go on now
    end: int | None = None  # tokens of the answer, once it has ended
    counts: list[int] = field(default_factory=lambda: [0, 0])  # accepted and examined candidates

    @property
    def emitted(self) -> int:
        return len(self.text) - self.begins

    @property
    def length(self) -> int:
        """Tokens with padding."""
        return self.padding + len(self.text)


class BatchRequest(Decoding):
    """
    What is gathered of a batch between its beginning and its end. Its rows are requests of their own, with drafts and
    traces of their own. Where they cannot go on independently, the target's own loop answers them, and the log says
    why, once.
    """

    def __init__(self, model: Any, input_ids: Tensor, kwargs: dict[str, Any], bindings: Sequence[Binding]) -> None:
        super().__init__(model, input_ids, kwargs, bindings)
        self.requests = [
            Request(model, input_ids[i : i + 1], of_row(kwargs, i, len(input_ids)), bindings)
            for i in range(len(input_ids))
        ]
        self.draftings: list[LeanDrafting] = []
        self.pace: BatchPace | None = None

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Entered around the batch: the drafts of all rows are leased inside."""
        with contextlib.ExitStack() as stack:
            for request in self.requests:
                request.lease(stack)
                model = request.kwargs.get("assistant_model")
                self.draftings.append(request.drafting or LeanDrafting(model, None))
            first = self.requests[0]
            may_repeat = all(map(bears_any_token, self.kwargs["logits_processor"]))
            do_sample = bool(self.config.do_sample)
            drafting, rows = self.draftings[0], len(self.requests)
            self.pace = BatchPace(drafting, first.domain, rows, do_sample=do_sample, may_repeat=may_repeat)
            drafts = {id(request.drafting): request.drafting.draft for request in self.requests if request.drafting}
            if drafts:
                stack.enter_context(fast_kernels(self.model, *drafts.values(), is_request=True))
            yield

    def decode(self) -> Any:
        """The answers, as the target's own loop returns them."""
        assert self.pace is not None
        why = self._hindrance()
        if why is not None:
            log_once(self.model, f"Batches are decoded without a draft: {why}.")
        elif not self.pace.is_plain:
            return _Rounds(self).decode()
        return self.decode_plainly(is_usual=why is None)

    def _hindrance(self) -> str | None:
        """Why the rows cannot go on independently; `None` where they can."""
        config, cache = self.config, self.kwargs.get("past_key_values")
        if why := undrafted(self.model, config, self.kwargs["logits_processor"]):
            return why
        others = list(given_arguments(self.kwargs))
        drafts = list({id(drafting.draft): drafting for drafting in self.draftings}.values())
        if self.kwargs.get("streamer") is not None or self.kwargs.get("synced_gpus"):
            return "they are streamed, or computed on several machines in step"
        if config.return_dict_in_generate:
            return "more than tokens is asked for (`return_dict_in_generate`)"
        for drafting in drafts:
            if why := drafting.hindrance():
                return why
        if self.kwargs.get("mm_encoder_outputs") is not None:
            return "a multimodal model numbers the positions of a batch by itself"
        if others:
            return f"`{others[0]}` was given"
        if has_adapter_per_row(self.model):
            return (
                "PEFT uses an adapter for each row (`adapter_names`, or aLoRA), and rows leave the batch as they end"
            )
        if any(type(p) is ReplayedProcessor for p in self.kwargs["logits_processor"]):
            return "a processor is replayed"
        if not all(map(bears_any_token, self.kwargs["logits_processor"])):
            return "a processor may not bear rows that are not as long as others yet"
        if not isinstance(cache, DynamicCache) or cache.offloading or self.cached_tokens:
            return "the cache is not one of the request's own"
        if not (all(request.prompts for request in self.requests) and _is_padded_left(self.kwargs, self.input_ids)):
            return "prompts are not token ids behind padding"
        limits = limits_of(self.model, self.input_ids, self.kwargs)
        # Rows are read by forwards of our own, which a model that reads its prompt again would not go through.
        if (
            not limits.allow_any(self.input_ids.shape[1], self.max_length - 1)
            or self.max_length > limits.max_length + 1
        ):
            return f"of {type(self.model).__name__}, {limits.reason}"
        for whose, model in (("the target", self.model), *(("the draft", drafting.draft) for drafting in drafts)):
            if why := hindrance(model):
                return f"{whose} cannot hold rows that go on independently: {why}"
        return None

    def decode_plainly(self, *, is_usual: bool = True) -> Any:
        """Let the target decode the batch alone, by its own loop, and keep its rows. The time of an unusual request,
        such as one without a cache, says nothing about others."""
        assert self.pace is not None
        clock, times, requests = self.draftings[0].clock, list[float](), self.requests

        def seen(scores: Tensor) -> None:
            times.append(clock())
            kept = scores.clone() if any(request.rows.parts for request in requests) else scores
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
            rounds = len(times) - 1
            time = RoundTime(seconds=(times[-1] - times[0]) / rounds, rounds=rounds)
            self.pace.timed(time, sum(ends) - len(ends))
        return output

    def close(self) -> None:
        """The batch has ended, well or not."""

    def finish(self) -> None:
        """The batch has ended well: each listener gets the traces of its rows."""
        hand_over(self.requests)


class _WatchedCriteria(StoppingCriteriaList):
    """The target's stopping criteria, whose answers are kept."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self.met: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        met: Tensor = super().__call__(input_ids, scores, **kwargs)
        self.met.append(met)
        return met


def _is_padded_left(kwargs: dict[str, Any], input_ids: Tensor) -> bool:
    """Whether what the mask hides is padding before each prompt, and positions are counted behind it."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and (mask.shape != input_ids.shape or not bool(mask[:, -1].all() & (mask.diff() >= 0).all())):
        return False
    counted = (torch.ones_like(input_ids) if mask is None else mask.long()).cumsum(-1) - 1
    return positions is None or bool((positions == counted.clamp(min=0)).all())


# --- the rounds -----------------------------------------------------------------------------------------------------


class _Rounds:
    """The loop over a batch: all rows draft and verify together, and each goes on by its own accepted tokens. A row
    that has ended leaves, so that the batch shrinks."""

    def __init__(self, batch: BatchRequest) -> None:
        assert batch.pace is not None
        self.model, self.kwargs, self.input_ids = batch.model, batch.kwargs, batch.input_ids
        self.pace, self.clock = batch.pace, batch.draftings[0].clock
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
        self.do_sample, self.begins = bool(config.do_sample), self.input_ids.shape[1]
        self.most = int(config.max_length) - self.begins  # tokens of an answer
        eos = [c.eos_token_id.flatten().cpu() for c in criteria if type(c) is EosTokenCriteria]
        self.eos = torch.cat(eos) if eos else None
        self.ends_with = set(() if self.eos is None else self.eos.tolist())
        self.strings = [c for c in criteria if type(c) is StopStringCriteria]
        # Those of others may look at the batch as a whole, and count their calls.
        known = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)
        self.others = StoppingCriteriaList([c for c in criteria if type(c) not in known])
        self.asked = 0  # tokens of each answer that they were asked about
        # Without a token that ends answers, rows go on until the last one has ended.
        self.pads = any(hasattr(c, "eos_token_id") for c in criteria)
        pad = config._pad_token_tensor
        self.pad_id = 0 if pad is None else int(pad.reshape(-1)[0])
        self.processors = RowProcessors(batch.kwargs["logits_processor"], self.input_ids, self.pad_id)
        self.live = list(range(len(self.rows)))  # in the order of the target's cache
        self.ragged: Ragged | None = None
        self.drafts = self._drafts(batch.draftings)
        self.failed = list[BatchDraft]()

    def _drafts(self, draftings: Sequence[LeanDrafting]) -> list[BatchDraft]:
        """One for the rows of each draft."""
        groups: dict[int, list[int]] = {}
        for row, drafting in enumerate(draftings):
            groups.setdefault(id(drafting.draft), []).append(row)
        return [
            BatchDraft(
                draftings[rows[0]], rows, self.processors, vocab_size=vocab_size_of(self.model),
                do_sample=self.do_sample, eos=self.eos, threshold=self.pace.threshold,
            )
            for rows in groups.values()
        ]  # fmt: skip

    def decode(self) -> Tensor:
        """The answers behind their prompts, int64, `(rows, tokens)`."""
        is_first = True
        while self.live:
            began, count = self.clock(), len(self.live)
            emitted = sum(row.emitted for row in self.rows)
            texts = {number: chances for number in self.live if (chances := self._look_up(self.rows[number]))}
            looked_up = self.clock() - began
            self.plan = self.pace.begin(count, texts)
            candidates = self._propose()
            raw = self._verify(candidates)
            scores = raw
            if self.processors:
                rows, starts = self._of_each(candidates.tokens.shape[1] + 1)
                scores = self.processors(raw.flatten(0, 1).clone(), rows, starts).view_as(raw)
            self._take(candidates, raw, judged(candidates, scores, do_sample=self.do_sample))
            del raw, scores
            time = self._round_time(candidates, None if is_first else self.clock() - began, looked_up)
            self.pace.timed(time, sum(row.emitted for row in self.rows) - emitted)
            is_first = False
        for row in self.rows:
            self.pace.ended(*row.counts)
        return self._output()

    def _round_time(self, candidates: Candidates, seconds: float | None, looked_up: float) -> RoundTime:
        drafted = [draft for draft in self.drafts if draft.times]
        if not drafted:
            k = candidates.tokens.shape[1]  # a plain round is one that looks nothing up
            return RoundTime(k, seconds=seconds if k or seconds is None else seconds - looked_up)
        if max(draft.fed for draft in drafted) > READS_PROMPT_TOKENS:
            seconds = None
        forwards, draft_seconds = max(len(draft.times) for draft in drafted), sum(sum(d.times) for d in drafted)
        return RoundTime(candidates.tokens.shape[1], forwards, draft_seconds, seconds)

    def _of_each(self, count: int) -> tuple[list[int], list[int]]:
        """The row, and the length, of each position of a round that has so many for each row."""
        rows = [row for row in self.live for _ in range(count)]
        return rows, [self.rows[row].length + j for row in self.live for j in range(count)]

    # --- candidates and the target --------------------------------------------------------------------------------

    def _look_up(self, row: _Row) -> list[float]:
        """Fill in how past text would go on with a row; how likely each of these tokens and all before it are
        right."""
        row.guesses, chances, size = [], list[float](), vocab_size_of(self.model)
        while row.past is not None and len(row.guesses) < min(MOST_GUESSED, self.most - row.emitted - 1):
            found = [guess for guess in row.past.guesses() if guess.token < size]
            if not found:
                break
            guess, chance = self.pace.likeliest(found)
            row.guesses.append(guess)
            chances.append(chance * (chances[-1] if chances else 1.0))
            if guess.token in self.ends_with or chances[-1] < LEAST_CHANCE:
                break
            row.past.proposed(guess.token)
        return chances

    def _propose(self) -> Candidates:
        """What past text and the drafts propose, in the order of the target's cache."""
        rows = {row: self.rows[row] for row in self.live}
        room = {number: self.most - row.emitted - 1 for number, row in rows.items()}
        texts = {number: row.text for number, row in rows.items()}
        lengths = {number: row.length for number, row in rows.items()}
        device = self.input_ids.device
        most, guessed = self.plan.k if self.plan.drafts else 0, self.plan.texts
        parts = list[tuple[BatchDraft, Candidates]]()
        for draft in self.drafts:
            none = torch.zeros(len(draft.rows), 0, dtype=torch.long, device=device)
            part = Candidates(none, none.bool())
            try:
                if draft.rows and draft not in self.failed:
                    part = draft.propose(most, texts, lengths, room, self.clock)
            except Exception as error:  # noqa: BLE001 - of models of any kind: the batch goes on without the draft
                log_failed_draft(draft.model, error)
                self.failed.append(draft)
                draft.times = []
            parts += [(draft, part)] if draft.rows else []
        if len(parts) == 1 and parts[0][0].rows == self.live and not guessed:
            tokens, live, logits = parts[0][1]
            return Candidates(tokens.to(device), live.to(device), None if logits is None else logits.to(device))
        k = max(part.tokens.shape[1] for _, part in parts)
        proposed = {number: [g.token for g in rows[number].guesses[: self.plan.k]] for number in guessed}
        k = max([k, *map(len, proposed.values())])
        tokens = torch.zeros(len(rows), k, dtype=torch.long, device=device)
        live, logits = tokens.bool(), None
        if self.do_sample and k:
            logits = torch.zeros(len(rows), k, vocab_size_of(self.model), dtype=torch.float32, device=device)
        place = {number: i for i, number in enumerate(self.live)}
        for draft, part in parts:
            at, width = [place[number] for number in draft.rows], part.tokens.shape[1]
            tokens[at, :width], live[at, :width] = part.tokens.to(device), part.live.to(device)
            if logits is not None and part.logits is not None:
                logits[at, :width] = part.logits.to(device)
        for number, ids in proposed.items():
            here, ours = place[number], torch.tensor(ids, device=device)
            tokens[here, : len(ids)] = ours
            live[here] = torch.arange(k, device=device) < len(ids)
            if logits is not None:  # certainty
                logits[here] = -torch.inf
                logits[here, : len(ids)].scatter_(1, ours[:, None], 0.0)
                logits[here, len(ids) :] = 0.0
            self.processors.write([number], [lengths[number]], ours[None])
        return Candidates(tokens, live, logits)

    def _verify(self, candidates: Candidates) -> Tensor:
        """The target's logits at each candidate, and behind the last one, float32, `(rows, k + 1, vocab)`."""
        tokens, k = candidates.tokens, candidates.tokens.shape[1]
        if self.ragged is None:
            logits = self._read(tokens)[:, -k - 1 :]
        else:
            rows = [self.rows[row] for row in self.live]
            newest = torch.tensor([[row.text[-1]] for row in rows], device=tokens.device)
            starts = [len(row.text) - 1 for row in rows]
            last = torch.tensor(starts, device=tokens.device)[:, None] + candidates.live.sum(1, keepdim=True)
            logits = self.ragged.feed(torch.cat([newest, tokens], 1), starts, last)
        return logits.to(dtype=torch.float32, device=tokens.device)

    def _read(self, tokens: Tensor) -> Tensor:
        """The logits of the prompts and the first candidates behind them, by a forward such as the loop's own."""
        kwargs, k = dict(self.kwargs), tokens.shape[1]
        for name in ("logits_processor", "stopping_criteria", "generation_config", "inputs_tensor", "assistant_model",
                     "assistant_tokenizer", "tokenizer", "streamer", "synced_gpus"):  # fmt: skip
            kwargs.pop(name, None)
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
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
        padding, size = [row.padding for row in self.rows], first_columns(self.begins, self.most)
        self.ragged = Ragged(self.model, kwargs["past_key_values"], padding, size)
        return logits

    # --- what becomes of them ---------------------------------------------------------------------------------------

    def _take(self, candidates: Candidates, raw: Tensor, verdict: Verdict) -> None:
        """Let each row go on by what it got."""
        counts = torch.stack([candidates.live.sum(1), verdict.accepted, verdict.token], 1)
        k, ended = candidates.tokens.shape[1], list[int]()
        drafts = {number: draft for draft in self.drafts for number in draft.rows}
        for i, (number, fact) in enumerate(
            zip(self.live, torch.cat([candidates.tokens, counts], 1).tolist(), strict=True)
        ):
            row, (count, accepted, token) = self.rows[number], fact[k:]
            drafted, known = fact[:count], len(row.text)
            is_text = number in self.plan.texts
            emitted, drafted, is_over = self._ended(row, drafted, [*drafted[:accepted], token])
            # The last token is still to be read, also where it was drafted: behind a stop string.
            drafts[number].settle(number, known, 0 if is_text else len(emitted) - 1)
            if row.end is None:
                self._note(row, drafted, emitted, raw[i], verdict, i, is_text)
            if row.past is not None:
                self._look_back(row, emitted, len(drafted) if is_text else 1)
            if self.processors:
                self.processors.write([number], [row.length], self.input_ids.new_tensor([emitted], dtype=torch.long))
            row.text += emitted
            self.processors.lengths[number] = row.length
            if is_over and row.end is None:
                row.end = row.emitted
            if (self.pads and row.end is not None) or row.emitted >= self.most:
                ended.append(number)
        self._ask()
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

    def _look_back(self, row: _Row, emitted: list[int], count: int) -> None:
        """Tell how so many guesses did, up to the first that was wrong, and go on from what was emitted."""
        assert row.past is not None
        for guess, token in zip(row.guesses[:count], emitted, strict=False):
            self.pace.guessed(guess, guess.token == token)
            if guess.token != token:
                break
        row.past.settled(emitted)

    def _note(
        self, row: _Row, drafted: list[int], emitted: list[int], raw: Tensor, verdict: Verdict, i: int, is_text: bool
    ) -> None:
        """Keep what a trace tells of a row's round."""
        accepted = num_accepted(drafted, emitted)
        examined = min(accepted + 1, len(drafted), len(emitted))
        if not is_text:
            row.counts = [row.counts[0] + accepted, row.counts[1] + examined]
            self.pace.judged(accepted, examined)
        p, q = (None if part is None or not drafted else part[i, : len(drafted)] for part in (verdict.p, verdict.q))
        request, from_text = row.request, [True] * len(drafted) if is_text else []
        request.rounds.append(
            Round(torch.tensor(drafted, dtype=torch.long, device="cpu"), len(emitted), from_text, p, q)
        )
        if request.rows.parts:
            request.rows.add(raw[: len(emitted)].clone())

    def _ended(self, row: _Row, drafted: list[int], emitted: list[int]) -> tuple[list[int], list[int], bool]:
        """What a row emits of these tokens before it ends; what it drafted, up to a token that would have ended it
        otherwise than the end token does; and whether it ends."""
        emitted = emitted[: self.most - row.emitted]
        is_over = len(emitted) == self.most - row.emitted
        at = next((i for i, token in enumerate(emitted) if token in self.ends_with), None)
        if at is not None:
            emitted, is_over = emitted[: at + 1], True
        if self.strings and row.end is None:
            met = self._first_met(row, drafted)
            drafted = drafted if met is None else drafted[:met]
            met = self._first_met(row, emitted)
            if met is not None:
                emitted, is_over = emitted[:met], True
        return emitted, drafted, is_over

    def _first_met(self, row: _Row, tokens: list[int]) -> int | None:
        """How many of these tokens it takes behind a row until a stop string is complete; `None` if it never is."""
        if not tokens:
            return None
        width = max(criterion.maximum_token_len for criterion in self.strings)
        padding = self.input_ids[self.rows.index(row), : row.padding].tolist()
        before = ([NO_TOKEN] * width + padding + row.text)[-width:] if len(row.text) < width else row.text[-width:]
        sequence = before + tokens
        ids = torch.tensor([sequence[i + 1 : i + 1 + width] for i in range(len(tokens))], device=self.input_ids.device)
        met = StoppingCriteriaList(self.strings)(ids, None).tolist()
        return met.index(True) + 1 if True in met else None

    def _ask(self) -> None:
        """Ask the other criteria as the target's own loop does: about the whole batch, once for each token, as soon as
        every row that goes on has come so far."""
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
        """Tokens that every answer has, those of rows that have ended and are padded left aside."""
        going = [row.emitted for row in self.rows if row.end is None or not self.pads]
        if all(row.end is not None for row in self.rows):
            going.append(max(row.end or 0 for row in self.rows))
        return min(going)

    def _answer(self, row: _Row, count: int) -> list[int]:
        """The first tokens of an answer, as the target's own loop has them."""
        answer = row.text[row.begins :][: row.end if self.pads else None][:count]
        return answer + [self.pad_id] * (count - len(answer))

    def _output(self) -> Tensor:
        total = max(row.end or 0 for row in self.rows)
        answers = self.input_ids.new_tensor([self._answer(row, total) for row in self.rows], dtype=torch.long)
        sequences = torch.cat([self.input_ids, answers], 1)
        for i, row in enumerate(self.rows):
            row.request.sequence = sequences[i : i + 1, : self.begins + (row.end or 0)]
        return sequences
