"""Hidden states of a target for the heads that read them: kept in memory with the newest traces, or recomputed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from osd_hf.trace import Trace
from osd_hf.utils.context import neutral_context

MAX_KEPT_BYTES = 256 << 20  # of the states of all traces; those of the oldest are dropped, and recomputed when needed

_kept: WeakKeyDictionary[Trace, Tensor] = WeakKeyDictionary()  # oldest first
_lock = threading.Lock()


def half(states: Tensor) -> Tensor:
    """Return states in half precision: bfloat16 stays, everything else becomes float16."""
    if states.dtype == torch.bfloat16:
        return states
    limit = torch.finfo(torch.float16).max
    return states.clamp(-limit, limit).half()


def keep_states(trace: Trace, states: Tensor) -> None:
    """Keep the states of all tokens of a trace but the last, `(tokens - 1, width)`, in half precision. They are never
    written to disk."""
    with _lock:
        _kept[trace] = states
        total = sum(kept.nbytes for kept in _kept.values())
        for oldest in list(_kept.keys()):
            if total <= MAX_KEPT_BYTES or oldest is trace:
                break
            total -= _kept.pop(oldest).nbytes


class StateSource:
    """The target whose states a head reads. It is not copied with the head, and not kept alive by it."""

    def __init__(self, target: PreTrainedModel, layers: Sequence[int]) -> None:
        self._target = ref(target)
        self.layers = list(layers)  # of `hidden_states`, of which the last is behind the last norm

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @property
    def target(self) -> PreTrainedModel:
        """The target; raises RuntimeError if it no longer exists."""
        if (target := self._target()) is None:
            raise RuntimeError("The target of the draft head no longer exists. Keep a reference to it.")
        return target

    def of(self, traces: Sequence[Trace]) -> list[Tensor]:
        """Return the states of all tokens of each trace but the last, `(tokens - 1, width)`, in half precision: those
        that were kept, or else recomputed by a forward of the target over the stored text."""
        with _lock:
            found = [_kept.get(trace) for trace in traces]
        return [self._computed(t) if s is None else s for t, s in zip(traces, found, strict=True)]

    @neutral_context()
    @torch.no_grad()
    def _computed(self, trace: Trace) -> Tensor:
        target = self.target
        ids = [*trace.prompt_ids.tolist(), *trace.completion_ids.tolist()][:-1]
        with torch.inference_mode(False):
            outputs = target.get_decoder()(
                input_ids=torch.tensor([ids], device=target.device), use_cache=False,
                output_hidden_states=self.layers, return_dict=True,
            )  # fmt: skip
            states = joined(outputs.hidden_states, self.layers)[0]
        keep_states(trace, states)
        return states


def joined(hidden_states: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """Return the states of these layers of one forward side by side, in half precision: `(rows, tokens, width)`."""
    return half(torch.cat([hidden_states[i] for i in layers], -1))
