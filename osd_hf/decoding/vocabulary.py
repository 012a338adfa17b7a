"""The draft vocabulary: the tokens that traffic uses, and a draft whose head has the rows of these alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from osd_hf.errors import UnsupportedModelError
from osd_hf.replay import completion_logits
from osd_hf.trace import Trace, bare_trace
from osd_hf.utils.context import neutral_context
from osd_hf.utils.kernels import OneDnnLinear, onednn_is_faster

SIZES = (2048, 8192, 32768)  # of draft vocabularies: few, as each is compiled for itself
LEAST_VOCABULARY = 1 << 14  # below it, a head is too small to be worth restricting
LOST = 0.005  # of acceptance, that a draft vocabulary may cost; twice as much before it is given up
REQUESTS = 8  # between two rankings
FEWEST, MANY = 256, 1024  # emitted tokens that what is lacking is known from, and beyond which they fade
# Tokens that were lacking, and those of them that the draft had right: what is assumed until it is known.
ASSUMED_LACKING, ASSUMED_RIGHT = 4, 1
MEMORY = 0.5 ** (REQUESTS / 512)  # what a token's mass counts a ranking later: half after 512 requests
QUOTED = 0.1  # what a token of a prompt counts, beside an emitted one


class TrafficVocabulary:
    """
    The tokens that a target emits, ranked by how often, for a draft to choose among. A token counts by the probability
    that the target gave it at each position, too, where the likeliest are kept: what has been likely is ranked before
    it is first emitted. Tokens that have never come rank by their ids, as tokenizers number frequent tokens first.

    How many of them suffice is measured on what comes: the share of emitted tokens that a ranking made before lacks,
    times the share of such tokens that the draft had right as long as it could choose them.
    """

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, vocab_size: int) -> None:
        sizes = [size for size in SIZES if 2 * size <= vocab_size and vocab_size >= LEAST_VOCABULARY]
        self.chosen: NDArray[np.int64] | None = None  # in ascending order; `None`: all tokens
        self._vocab_size, self._sizes = vocab_size, np.array(sizes, np.int64)
        self._mass = np.zeros(vocab_size if sizes else 0, np.float32)
        self._ranks: NDArray[np.int32] | None = None
        self._requests = 0
        self._emitted = 0.0
        self._missed = np.zeros(len(sizes))  # of them, by each size
        # Where a draft with all tokens was asked: how many each size lacks, and how many of these the draft had right.
        self._lacking, self._right = np.zeros(len(sizes)), np.zeros(len(sizes))

    def add(self, trace: Trace) -> None:
        """Take in a request that has come."""
        if trace.vocab_size != self._vocab_size:
            self._begin(trace.vocab_size)
        if self._ranks is not None:
            self._emitted += len(trace)
            lacks = self._ranks[trace.completion_ids] >= self._sizes[:, None]
            self._missed += lacks.sum(axis=1)
            if self.chosen is None:
                examined, accepted = _of_draft(trace)
                self._lacking += (lacks & examined).sum(axis=1)
                self._right += (lacks & accepted).sum(axis=1)
        self._count(trace)
        self._requests += 1
        if self._requests % REQUESTS == 0:
            self._rank()

    def restore(self, traces: Iterable[Trace]) -> None:
        """Begin anew with requests, oldest first, that have come before: ranked, while what suffices is to be seen."""
        self._begin(0)
        for trace in traces:
            if trace.vocab_size != self._vocab_size:
                self._begin(trace.vocab_size)
            self._count(trace)
        self._rank()

    def _count(self, trace: Trace) -> None:
        if not len(self._sizes):
            return
        prompt = trace.prompt_ids[trace.prompt_ids < self._vocab_size]
        np.add.at(self._mass, prompt, np.float32(QUOTED))
        np.add.at(self._mass, trace.completion_ids, np.float32(1))
        if trace.top_ids.shape[1]:
            np.add.at(self._mass, trace.top_ids.ravel(), np.exp(trace.kept_logprobs()).ravel())

    def _rank(self) -> None:
        if not len(self._sizes):
            return
        order = np.argsort(-self._mass, kind="stable")
        now = None if self.chosen is None else len(self.chosen)
        bounds = np.where(self._sizes == now, 2 * LOST, LOST) * self._emitted
        right = (self._right + ASSUMED_RIGHT) / (self._lacking + ASSUMED_LACKING)
        enough = self._sizes[self._missed * right <= bounds].tolist() if self._emitted >= FEWEST else []
        chosen = np.sort(order[: enough[0]]) if enough else None
        if chosen is None or self.chosen is None or not np.array_equal(chosen, self.chosen):
            self.chosen = chosen
        self._ranks = np.empty(len(order), np.int32)
        self._ranks[order] = np.arange(len(order), dtype=np.int32)
        if self._emitted > MANY:
            self._emitted, self._missed = self._emitted / 2, self._missed / 2
        if self.chosen is None and self._lacking.max() > MANY:
            self._lacking, self._right = self._lacking / 2, self._right / 2
        self._mass *= MEMORY


def _of_draft(trace: Trace) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The positions of an answer at which the target has examined a token of the draft, and accepted it."""
    examined, accepted, start = np.zeros(len(trace), bool), np.zeros(len(trace), bool), 0
    for r in trace.rounds:
        is_drafts = np.ones(r.num_drafted, bool) if r.from_text is None else ~r.from_text
        examined[start : start + r.num_examined] = is_drafts[: r.num_examined]
        accepted[start : start + r.num_accepted] = is_drafts[: r.num_accepted]
        start += r.num_emitted
    return examined, accepted


class RestrictedDraft:
    """
    A draft that chooses among some tokens: its model has a head of their rows alone, copied, and shares all else with
    the draft that it is made from.

    Args:
        draft (`PreTrainedModel`): Not changed.
        token_ids (`np.ndarray` of shape `(tokens,)`, int64): Ids of the draft's vocabulary, ascending.

    Raises:
        UnsupportedModelError: the draft has no head that rows could be taken from.
    """

    def __init__(self, draft: Any, token_ids: NDArray[np.int64]) -> None:
        self._head = head = draft.get_output_embeddings()
        name = next((name for name, module in draft.named_children() if module is head), None)
        if name is None or type(head) not in (torch.nn.Linear, OneDnnLinear) or token_ids[-1] >= head.out_features:
            raise UnsupportedModelError(f"the head of a {type(draft).__name__} has no row for each of them")
        self._name = name
        self.model = copy.copy(draft)
        self.model._modules = {**draft._modules, name: None}
        self._is_of: tuple[Any, ...] = ()
        self.choose(token_ids)
        self._check(draft)

    def _source(self, token_ids: NDArray[np.int64]) -> tuple[Any, ...]:
        """What the rows are taken from: another array, tensor or count of changes makes them others."""
        weight = self._head.weight
        changes = 0 if weight.is_inference() else weight._version
        return id(token_ids), weight.data_ptr(), weight.dtype, weight.device, changes

    def is_of(self, token_ids: NDArray[np.int64]) -> bool:
        """Whether it has the rows of these tokens, as they are now."""
        return self._is_of == self._source(token_ids)

    def choose(self, token_ids: NDArray[np.int64]) -> None:
        """Take the rows of tokens, of the same number as ever. Nobody may be drafting."""
        head, few = self._head, self.model._modules[self._name]
        with torch.inference_mode(False), torch.no_grad():
            if few is None or (few.weight.dtype, few.weight.device) != (head.weight.dtype, head.weight.device):
                few = (OneDnnLinear if onednn_is_faster() else torch.nn.Linear)(
                    head.in_features, len(token_ids), head.bias is not None, "meta", head.weight.dtype
                ).to_empty(device=head.weight.device)
                self.model._modules[self._name] = few.requires_grad_(False)
            self.token_ids = torch.from_numpy(token_ids).to(head.weight.device)
            few.weight.copy_(head.weight[self.token_ids])
            if head.bias is not None:
                few.bias.copy_(head.bias[self.token_ids])
        self._chosen = token_ids  # held, so that no other array gets its id
        self._is_of = self._source(token_ids)

    @neutral_context()
    def _check(self, draft: Any) -> None:
        """Some models do more with their logits than their head does."""
        start = np.zeros(1, np.int32) if draft.config.is_encoder_decoder else None
        probe = bare_trace([0, 0], [0, 0, 0], self._head.out_features, start)
        with torch.no_grad():
            whole = completion_logits(draft, [probe])[..., self.token_ids].float()
            ours = completion_logits(self.model, [probe]).float()
        is_same = whole.shape == ours.shape and bool(torch.isfinite(whole).all())
        if not is_same or not (whole - ours).abs().max() <= 0.02 * whole.abs().max():
            raise UnsupportedModelError(f"a {type(draft).__name__} does more with its logits than its head")
