"""The draft vocabulary: the tokens that traffic uses, and a draft whose head has the rows of these alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from osd_hf.errors import UnsupportedModelError
from osd_hf.replay import completion_logits
from osd_hf.trace import Trace, bare_trace

SIZES = (2048, 8192, 32768)  # of draft vocabularies: few, as each is compiled for itself
LEAST_VOCABULARY = 1 << 14  # below it, a head is too small to be worth restricting
MISSED = 0.005  # share of emitted tokens that a draft vocabulary may lack
REQUESTS = 8  # between two rankings
FEWEST = 256  # emitted tokens that this share is known from
RECENT = 0.5  # what counts of it a ranking later
MEMORY = 0.5 ** (REQUESTS / 512)  # what a token's mass counts a ranking later: half after 512 requests
QUOTED = 0.1  # what a token of a prompt counts, beside an emitted one


class TrafficVocabulary:
    """
    The tokens that a target emits, ranked by how often, for a draft to choose among. A token counts by the probability
    that the target gave it at each position, too: what has been likely is ranked before it is first emitted. Tokens
    that have never come rank by their ids, as tokenizers number frequent tokens first.

    How many of them suffice is measured on what comes: the share of emitted tokens that a ranking made before lacks.
    """

    def __init__(self) -> None:
        self.chosen: NDArray[np.int64] | None = None  # in ascending order; `None`: all tokens
        self._sizes = np.zeros(0, np.int64)  # that may suffice
        self._mass = np.zeros(0, np.float32)
        self._ranks: NDArray[np.int32] | None = None
        self._requests = 0
        self._emitted = 0.0
        self._missed = np.zeros(0)  # of them, by each size

    def add(self, trace: Trace) -> None:
        """Take in a request."""
        size = trace.vocab_size
        if len(self._mass) != size:
            few = [n for n in SIZES if 2 * n <= size and size >= LEAST_VOCABULARY]
            self._sizes, self._missed, self._mass = np.array(few), np.zeros(len(few)), np.zeros(size, np.float32)
        emitted = trace.completion_ids.astype(np.int64)
        if self._ranks is not None:
            self._emitted += len(emitted)
            self._missed += (self._ranks[emitted] >= self._sizes[:, None]).sum(axis=1)
        self._count(emitted, np.float32(1))
        prompt = trace.prompt_ids.astype(np.int64)
        self._count(prompt[prompt < size], np.float32(QUOTED))
        if trace.top_ids.shape[1]:
            self._count(trace.top_ids.astype(np.int64).ravel(), np.exp(trace.kept_logprobs()).ravel())
        elif trace.num_kept:
            self._mass += np.exp(trace.kept_logprobs()).sum(axis=0)
        self._requests += 1
        if self._requests % REQUESTS == 0 and len(self._sizes):
            self._rank()

    def _count(self, ids: NDArray[np.int64], counts: NDArray[np.float32] | np.float32) -> None:
        np.add.at(self._mass, ids, counts)

    def _rank(self) -> None:
        order = np.argsort(-self._mass, kind="stable")
        enough = self._sizes[self._missed <= MISSED * self._emitted].tolist() if self._emitted >= FEWEST else []
        self.chosen = np.sort(order[: enough[0]]) if enough else None
        self._ranks = np.empty(len(order), np.int32)
        self._ranks[order] = np.arange(len(order), dtype=np.int32)
        self._emitted, self._missed = self._emitted * RECENT, self._missed * RECENT
        self._mass *= MEMORY


class RestrictedDraft:
    """
    A draft that chooses among some tokens: its model has a head of their rows alone, copied, and shares all else with
    the draft that it is made from.

    Args:
        draft (`PreTrainedModel`): Not changed.
        token_ids (`np.ndarray` of shape `(tokens,)`, int64): Ids of the draft's vocabulary.

    Raises:
        UnsupportedModelError: the draft has no head that rows could be taken from.
    """

    def __init__(self, draft: Any, token_ids: NDArray[np.int64]) -> None:
        self._head = head = draft.get_output_embeddings()
        name = next((name for name, module in draft.named_children() if module is head), None)
        if name is None or type(head) is not torch.nn.Linear:
            raise UnsupportedModelError(f"the head of a {type(draft).__name__} is no linear layer of its own")
        with torch.inference_mode(False), torch.no_grad():
            few = torch.nn.Linear(
                head.in_features, len(token_ids), head.bias is not None, head.weight.device, head.weight.dtype
            )
        self._few = few.requires_grad_(False)
        self.model = copy.copy(draft)
        self.model._modules = {**draft._modules, name: self._few}
        self.choose(token_ids)
        self._check(draft)

    def choose(self, token_ids: NDArray[np.int64]) -> None:
        """Choose among other tokens, of the same number, from now on. Nobody may be drafting."""
        with torch.inference_mode(False):
            self.token_ids = torch.from_numpy(token_ids).to(self._head.weight.device)
        self.refresh()

    def refresh(self) -> None:
        """Take the rows again: the draft's weights have changed."""
        with torch.inference_mode(False), torch.no_grad():
            self._few.weight.copy_(self._head.weight[self.token_ids])
            if self._head.bias is not None:
                self._few.bias.copy_(self._head.bias[self.token_ids])

    def _check(self, draft: Any) -> None:
        """Some models do more with their logits than their head does."""
        start = np.zeros(1, np.int32) if draft.config.is_encoder_decoder else None
        probe = bare_trace([0, 0], [0, 0, 0], self._head.out_features, start)
        with torch.no_grad():
            whole = completion_logits(draft, [probe])[..., self.token_ids].float()
            ours = completion_logits(self.model, [probe]).float()
        if whole.shape != ours.shape or not (whole - ours).abs().max() <= 0.02 * whole.abs().max():
            raise UnsupportedModelError(f"a {type(draft).__name__} does more with its logits than its head")
