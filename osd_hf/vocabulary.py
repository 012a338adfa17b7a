"""Restrict a draft to the tokens that traffic uses: choose them, and make a draft with a head of their rows."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from osd_hf.errors import UnsupportedModelError
from osd_hf.models import vocab_size_of
from osd_hf.replay import completion_logits
from osd_hf.trace import Trace, bare_trace
from osd_hf.utils.context import neutral_context
from osd_hf.utils.kernels import OneDnnLinear, min_side

SIZES = (2048, 8192, 32768)  # of draft vocabularies; each is compiled once
MIN_VOCAB_SIZE = 1 << 14  # a smaller head is not worth restricting
MAX_MISSED = 0.015  # share of the emitted tokens; twice as many before a draft vocabulary is given up
FIRST_MAX_MISSED, FIRST_REQUESTS = 0.12, 64  # for the largest size while the ranking knows few tokens
RANK_EVERY = 8  # requests
MIN_EMITTED_TOKENS = 256  # that the share is measured on
MAX_EMITTED_TOKENS = 1024  # beyond which old ones are forgotten
KEPT_MASS = 0.5 ** (RANK_EVERY / 512)  # of a token per ranking: half after 512 requests
FIRST_RANKINGS = (1, 2, 4)  # requests, before there are enough for `RANK_EVERY`
VOCABULARY_SETTING = "osd_hf_vocabulary"  # in a draft's configuration: ids of tokens that its target uses
USUAL_PER_POSITION = 4  # of the tokens that a trace keeps, the likeliest first
LAST_CHARACTER = "\u2600"  # of the usual ones: letters, digits, punctuation, and the space of SentencePiece
PROMPT_WEIGHT = USUAL_WEIGHT = 0.1  # of a token in a prompt or of the usual ones, compared with an emitted one


def vocabulary_sizes(vocab_size: int) -> list[int]:
    """Return the sizes that the vocabulary of a draft may have, ascending."""
    return [size for size in SIZES if 2 * size <= vocab_size and vocab_size >= MIN_VOCAB_SIZE]


class TrafficVocabulary:
    """
    Rank the tokens that a target emits, and choose how many of them a draft needs.

    A token counts by the target's probability at each position, so likely tokens are ranked before they are first
    emitted. Tokens that never occurred rank by their ids, because tokenizers number frequent tokens first. The
    smallest size is chosen with which an earlier ranking misses few of the emitted tokens. Until enough were emitted,
    the largest size is chosen, with `usual_tokens`. Without a `vocab_size`, or for a small one, nothing is counted,
    and all tokens are chosen.
    """

    def __init__(self, vocab_size: int = 0, usual_tokens: Sequence[int] = ()) -> None:
        self._usual = np.array(usual_tokens, np.int64)
        self._begin(vocab_size)

    def _begin(self, vocab_size: int) -> None:
        self.chosen: NDArray[np.int64] | None = None  # ascending; `None` means all tokens
        self._vocab_size = vocab_size
        self._sizes = sizes = np.array(vocabulary_sizes(vocab_size), np.int64)
        self._mass = np.zeros(vocab_size if len(sizes) else 0, np.float32)
        self._ranks = np.arange(vocab_size, dtype=np.int32)
        self._requests = 0
        self._emitted = np.zeros(len(sizes))  # tokens, by size
        self._missed = np.zeros(len(sizes))
        self._mass[self._usual[self._usual < len(self._mass)]] = USUAL_WEIGHT
        self._rank()

    def add(self, trace: Trace, *, may_count: bool = True) -> None:
        """Add a new request. Its tokens change the ranking only if they `may_count`."""
        if not len(self._sizes) or trace.vocab_size != self._vocab_size:
            return
        # The first rankings know few tokens, which would count against the smaller sizes.
        is_measured = (self._requests >= RANK_EVERY) | (self._sizes == self._sizes[-1])
        is_missing = is_measured[:, None] & (self._ranks[trace.completion_ids] >= self._sizes[:, None])
        self._emitted += is_measured * len(trace)
        self._missed += is_missing.sum(axis=1)
        if may_count:
            self._count(trace)
        self._requests += 1
        if self._requests % RANK_EVERY == 0 or self._requests in FIRST_RANKINGS:
            self._rank()

    def restore(self, traces: Iterable[Trace]) -> None:
        """Begin again with earlier requests, oldest first. What is missed is measured on new ones."""
        self._begin(self._vocab_size)
        for trace in traces:
            self._count(trace)
        self._rank()

    def _count(self, trace: Trace) -> None:
        if not len(self._sizes):
            return
        prompt = trace.prompt_ids[trace.prompt_ids < self._vocab_size]
        np.add.at(self._mass, prompt, np.float32(PROMPT_WEIGHT))
        np.add.at(self._mass, trace.completion_ids, np.float32(1))
        if trace.top_ids.shape[1]:
            np.add.at(self._mass, trace.top_ids.ravel(), np.exp(trace.kept_logprobs()).ravel())

    def _rank(self) -> None:
        if not len(self._sizes):
            return
        order = np.argsort(-self._mass, kind="stable")
        now = None if self.chosen is None else len(self.chosen)
        most = np.where(self._sizes == now, 2 * MAX_MISSED, MAX_MISSED)
        most[-1] = max(most[-1], FIRST_MAX_MISSED * (self._requests < FIRST_REQUESTS))
        is_enough = (self._missed <= most * self._emitted) & (self._emitted >= MIN_EMITTED_TOKENS)
        is_enough[-1] |= self._emitted[-1] < MIN_EMITTED_TOKENS
        enough = self._sizes[is_enough]
        chosen = np.sort(order[: enough[0]]) if len(enough) else None
        if chosen is None or self.chosen is None or not np.array_equal(chosen, self.chosen):
            self.chosen = chosen
        self._ranks[order] = np.arange(len(order), dtype=np.int32)
        kept = np.where(self._emitted > MAX_EMITTED_TOKENS, 0.5, 1.0)
        self._emitted *= kept
        self._missed *= kept
        self._mass *= KEPT_MASS


def usual_tokens(draft: PreTrainedModel, tokenizer: Any = None) -> list[int]:
    """Return the ids of tokens that any first vocabulary of a draft should have: those in its configuration, or
    characters and added tokens of the tokenizer, whose ids may be high."""
    if isinstance(saved := getattr(draft.config, VOCABULARY_SETTING, None), str):
        return [int(token) for token in re.findall(r"\b\d{1,7}\b", saved)]
    if not hasattr(tokenizer, "get_added_vocab") or vocab_size_of(draft) < MIN_VOCAB_SIZE:
        return []
    characters = (i for token, i in tokenizer.get_vocab().items() if len(token) == 1 and token < LAST_CHARACTER)
    return [*tokenizer.get_added_vocab().values(), *characters]


def write_usual_tokens(draft: PreTrainedModel, traces: Iterable[Trace]) -> None:
    """Write the tokens that a target is likely to use, by its traces, into a draft's configuration: the most frequent
    ones, as many as the largest draft vocabulary has."""
    if sizes := vocabulary_sizes(vocab_size_of(draft)):
        likely = (token for t in traces for token in (*t.completion_ids, *t.top_ids[:, :USUAL_PER_POSITION].flat))
        ids = sorted(token for token, _ in Counter(map(int, likely)).most_common(sizes[-1]))
        setattr(draft.config, VOCABULARY_SETTING, " ".join(map(str, ids)))


class RestrictedDraft:
    """A copy of a draft with an output head that has the rows of some tokens (ascending ids, int64). All else is
    shared. Raises UnsupportedModelError if the draft has no head with a row for each token."""

    def __init__(self, draft: PreTrainedModel, token_ids: NDArray[np.int64]) -> None:
        self._head: Any = draft.get_output_embeddings()
        name = next((name for name, module in draft.named_children() if module is self._head), None)
        is_linear = type(self._head) in (torch.nn.Linear, OneDnnLinear)
        if name is None or not is_linear or token_ids[-1] >= self._head.out_features:
            raise UnsupportedModelError(f"the head of a {type(draft).__name__} has no row for each of them")
        self._name = name
        self.model = copy.copy(draft)
        self.model._modules = {**draft._modules, name: None}
        self._source: tuple[Any, ...] = ()
        with torch.inference_mode(False):  # they are changed in place
            self.token_ids = torch.tensor(token_ids, device=self._head.weight.device)
        self.choose(token_ids)
        self._check(draft)

    def _source_of(self, token_ids: NDArray[np.int64]) -> tuple[Any, ...]:
        """Return what identifies the content of the rows."""
        weight = self._head.weight
        changes = 0 if weight.is_inference() else weight._version
        return id(token_ids), weight.data_ptr(), weight.dtype, weight.device, changes

    def is_of(self, token_ids: NDArray[np.int64]) -> bool:
        """Whether the head has the current rows of these tokens."""
        return self._source == self._source_of(token_ids)

    def choose(self, token_ids: NDArray[np.int64]) -> None:
        """Copy the rows of other tokens, of the same number. No request may be drafting."""
        head, part = self._head, self.model._modules[self._name]
        with torch.inference_mode(False), torch.no_grad():
            if part is None or (part.weight.dtype, part.weight.device) != (head.weight.dtype, head.weight.device):
                part = (OneDnnLinear if min_side() else torch.nn.Linear)(
                    head.in_features, len(token_ids), head.bias is not None, "meta", head.weight.dtype
                ).to_empty(device=head.weight.device)
                self.model._modules[self._name] = part.requires_grad_(False)
            ids = torch.tensor(token_ids, device=head.weight.device)
            if self.token_ids.device != ids.device:
                self.token_ids = ids
            self.token_ids.copy_(ids)  # captured graphs read them from where they were
            part.weight.copy_(head.weight[self.token_ids])
            if head.bias is not None:
                part.bias.copy_(head.bias[self.token_ids])
        self._chosen = token_ids  # kept, so that no other array gets its id
        self._source = self._source_of(token_ids)

    @neutral_context()
    def _check(self, draft: PreTrainedModel) -> None:
        """Raise UnsupportedModelError if the model changes the logits of its head, such as by scaling them."""
        start = np.zeros(1, np.int32) if draft.config.is_encoder_decoder else None
        probe = bare_trace([0, 0], [0, 0, 0], self._head.out_features, start)
        with torch.no_grad():
            expected = completion_logits(draft, [probe])[..., self.token_ids].float()
            found = completion_logits(self.model, [probe]).float()
        is_comparable = expected.shape == found.shape and bool(torch.isfinite(expected).all())
        if not is_comparable or not (expected - found).abs().max() <= 0.02 * expected.abs().max():
            raise UnsupportedModelError(f"a {type(draft).__name__} does more with its logits than its head")
