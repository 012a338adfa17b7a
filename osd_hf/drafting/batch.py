"""Batches whose rows each go on by as many tokens as were accepted: forwards, candidates, and what becomes of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from osd_hf.drafting.costs import COSTS_KNOWN, Average, RoundTime
from osd_hf.drafting.exactness import difference, plain_answer, text_arguments
from osd_hf.drafting.forward import AHEAD, MASKED_ATTENTION
from osd_hf.drafting.generator import Clock, LeanDrafting
from osd_hf.drafting.pacing import (
    MAX_K,
    OWN_MEMORY,
    PROBE_BURST,
    REFRESH,
    TEXT_PROBE,
    WARM_UP,
    WORTH,
    FixedPace,
    best_rate,
    least_speedup,
)
from osd_hf.drafting.text import Guess
from osd_hf.errors import first_line
from osd_hf.logits_processors import RowProcessors
from osd_hf.models import evaluating, vocab_size_of
from osd_hf.speedup import expected_block_efficiency
from osd_hf.utils.context import neutral_context

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


class BatchRound(NamedTuple):
    """What a round of a batch proposes: at most k tokens for each row, those of past text for these rows and, if it
    `drafts`, the draft's for the others."""

    k: int
    texts: frozenset[int] = frozenset()
    drafts: bool = True


class BatchPace:
    """
    How many tokens the rounds of one batch propose for each row: as many as `fixed` does, or as pay best, by what is
    known of the domain's acceptance and by what rounds of so many rows take. A round of a batch is worth it for fewer
    rows and not for many, where the target computes instead of reading its weights; as rows end, it may be again. From
    `sources` as [`AutoPace`].
    """

    def __init__(
        self, drafting: LeanDrafting, domain: str | None, rows: int, *, do_sample: bool, may_repeat: bool = True
    ) -> None:
        pacer, is_auto = drafting.pacer, drafting.num_assistant_tokens == "auto"
        self._pacer = pacer
        pace = None if is_auto else drafting.pace(domain, do_sample=do_sample)
        self._fixed = pace if isinstance(pace, FixedPace) else None
        self.threshold = 0.0 if self._fixed is None else self._fixed.threshold
        with pacer.lock:
            known = self._domain = pacer.acceptance((domain, do_sample))
            known.requests += 1
            looks_up = known.text_gain.mean > WORTH or known.requests % TEXT_PROBE == 0
            self._costs, plan = pacer.of_batches(rows), pacer.plan_for(known, None, rows)
            # The draft reads the prompts for it: few batches find out, and each for long.
            self._probes = known.drafts_to_learn(plan.examined, PROBE_BURST * (plan.plain_seconds or 0.0))
        self._plan, self._rows = plan, rows
        self.reads_text = is_auto and drafting.sources != "draft" and may_repeat and looks_up
        self._drafts = drafting.sources != "text"
        self._own = Average(memory=OWN_MEMORY)
        self._is_steady = False  # after a round without the draft, whose weights have left the processor's caches

    @property
    def is_plain(self) -> bool:
        """Whether no round is to propose anything: then the target's own loop answers, and draws what it draws."""
        return self._fixed is not None and self._fixed.k == 0

    def begin(self, rows: int, texts: Mapping[int, Sequence[float]]) -> BatchRound:
        """A round of so many rows begins. For some, past text proposes tokens: how likely it is that each of these and
        all before it are right."""
        pacer, domain = self._pacer, self._domain
        with pacer.lock:
            costs = self._costs = pacer.of_batches(rows)
            self._rows = rows
            if self._fixed is not None:
                return BatchRound(self._fixed.k)
            plan = self._plan = pacer.plan_for(domain, self._own, rows)
            if costs.plain.weight < COSTS_KNOWN or (costs.are_known and domain.begin_round() % REFRESH < 2):
                return BatchRound(0)  # several in a row, of which the first is not timed
            if not costs.are_known:
                needed = WARM_UP[round(costs.verified) % len(WARM_UP)]
                return BatchRound(needed, frozenset(() if self._drafts else texts), self._drafts)
            k = 0
            if self._drafts and plan.speculates:
                k = plan.k
            elif self._drafts and self._probes and domain.drafts_to_learn(plan.examined):
                k = best_rate(costs, plan.alpha)[1]
            return self._with_text(k, plan.alpha, texts) if self.reads_text else BatchRound(k)

    def _with_text(self, k: int, alpha: float, texts: Mapping[int, Sequence[float]]) -> BatchRound:
        """The better of k tokens of the draft, or of past text where it has as likely ones, and of past text alone."""
        costs, rows, domain = self._costs, self._rows, self._domain
        drafted = expected_block_efficiency(alpha, k) - 1 if k else 0.0
        alone, columns = 0.0, 0
        for n in range(1, max(map(len, texts.values()), default=0) + 1):
            rate = (rows + sum(sum(chances[:n]) for chances in texts.values())) / costs.round(n, 0)
            alone, columns = max((alone, columns), (rate, n))
        domain.text_gain.add(max(alone * costs.plain.mean / rows - 1, 0.0))
        better = frozenset(row for row, chances in texts.items() if sum(chances[:k]) > drafted)
        gained = (rows - len(better)) * drafted + sum(sum(texts[row][:k]) for row in better)
        other = (rows + gained) / costs.round(k) if k else least_speedup(rows) * rows / costs.plain.mean
        is_text = alone > other or costs.retry_text(sum(sum(c[:1]) for c in texts.values()), other, rows)
        return BatchRound(columns, frozenset(texts), False) if is_text else BatchRound(k, better if k else frozenset())

    def likeliest(self, guesses: Sequence[Guess]) -> tuple[Guess, float]:
        """The guess that is right most often, and how often."""
        with self._pacer.lock:
            means = [self._domain.guessed(guess).mean for guess in guesses]
        best = max(range(len(guesses)), key=lambda i: means[i])
        return guesses[best], means[best]

    def guessed(self, guess: Guess, is_right: bool) -> None:
        """Past text was right, or not."""
        with self._pacer.lock:
            self._domain.guessed(guess).add(is_right)

    def judged(self, accepted: int, examined: int) -> None:
        """So many of the draft's candidates for a row were accepted and examined in a round."""
        if examined:
            with self._pacer.lock:
                self._own.add(accepted / examined, examined)

    def timed(self, time: RoundTime, emitted: int) -> None:
        """Rounds have ended, which have emitted so many tokens."""
        domain, is_plain = self._domain, time.candidates == 0 and time.forwards == 0
        with self._pacer.lock:
            is_usual, self._is_steady = self._is_steady or not is_plain or time.rounds > 1, is_plain
            self._pacer.took(time, emitted, self._costs, self._rows, is_usual=is_usual)
            if self._fixed is None and time.forwards == 0:
                domain.spend(plain_seconds=(time.seconds or 0.0) * time.rounds)
            elif self._fixed is None and not self._plan.speculates:
                plain = self._costs.level * self._costs.plain.mean
                lost = time.draft_seconds if time.seconds is None else time.seconds - emitted / self._rows * plain
                domain.spend(probe_seconds=lost)

    def ended(self, accepted: int, examined: int) -> None:
        """A row has ended, of whose drafted tokens so many were accepted and examined."""
        with self._pacer.lock:
            self._domain.ended(accepted, examined)


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
