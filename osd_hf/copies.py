"""Models ready to serve: made from learned weights as requests ask for them, held by those that use them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from osd_hf.config import OnlineConfig
from osd_hf.drafting import LeanDrafting
from osd_hf.snapshots import Snapshot, learning_context
from osd_hf.wrappers import merged

__all__ = ["FALLBACK_K", "Copies", "ServingDraft", "ready_to_serve"]

FALLBACK_K = 5  # where the number of drafted tokens is not fixed, and one is needed


@dataclass(eq=False)
class ServingDraft:
    """
    A model that drafts. Its weights change only while nobody holds it.

    Args:
        model (`PreTrainedModel`):
            With adapters merged.
        drafting (`LeanDrafting`, *optional*):
            What makes its candidates; `None`: transformers' own generator.
        domain (`str`, *optional*), version (`int`):
            Whose weights it holds, and which.
        is_written (`bool`, defaults to `True`):
            Whether it holds them whole.
        is_spoiled (`bool`, defaults to `False`):
            Whether what is being written now is not to be trusted any more.
        leases (`int`, defaults to 0):
            Requests that use it now.
        used (`int`, defaults to 0):
            When it was used last, in requests.
    """

    model: Any
    drafting: LeanDrafting | None
    domain: str | None = None
    version: int = 0
    is_written: bool = True
    is_spoiled: bool = False
    leases: int = 0
    used: int = 0


def ready_to_serve(draft: Any, config: OnlineConfig) -> Any:
    """A copy of a draft, its adapter merged, that drafts as the configuration says."""
    with learning_context():
        served = merged(draft)
        served = (copy.deepcopy(draft) if served is draft else served).eval()
    k = config.num_assistant_tokens
    if k is not None:
        served.generation_config.num_assistant_tokens = FALLBACK_K if k == "auto" else k
        served.generation_config.num_assistant_tokens_schedule = "constant"
        served.generation_config.assistant_confidence_threshold = 0.0
    return served


class Copies:
    """
    Copies of one base model, with the weights of different drafts and versions. Not locked: its owner is, for all but
    [`~Copies.fill`], which takes long.

    Args:
        base (`PreTrainedModel`):
            What is copied.
        draft_with (`Callable[[Any], LeanDrafting | None]`):
            Makes a model's candidate maker.
        write (`Callable[[Snapshot, Any], None]`):
            Writes weights into a model.
        most (`Callable[[], float]`):
            Models to hold at most; requests at once may need more for a while.
    """

    def __init__(
        self,
        base: Any,
        draft_with: Callable[[Any], LeanDrafting | None],
        write: Callable[[Snapshot, Any], None],
        most: Callable[[], float],
    ) -> None:
        self.base = ServingDraft(base, draft_with(base))
        self.held: list[ServingDraft] = []
        self._draft_with, self._write, self._most = draft_with, write, most
        self._made: weakref.WeakSet[Any] = weakref.WeakSet([base])

    def made(self, model: Any) -> bool:
        """Whether a model is, or was, one of these."""
        return model in self._made

    def find(self, domain: str | None, version: int | None = None) -> ServingDraft | None:
        """One that holds these weights, or any of the domain's; `None` where none does."""
        for serving in self.held:
            if serving.domain == domain and version in (None, serving.version) and serving.is_written:
                return serving
        return None

    def reserve(self, domain: str | None, version: int) -> ServingDraft:
        """One to be filled with these weights, leased to who fills it; its place counts from now on."""
        serving = self._free(domain)
        serving.domain, serving.version = domain, version
        serving.is_written = serving.is_spoiled = False
        serving.leases += 1
        return serving

    def fill(self, serving: ServingDraft, snapshot: Snapshot) -> None:
        """Copy and write what was reserved, outside of any lock. [`~Copies.filled`] is called after it, also
        after an error."""
        if serving.model is None:
            model = self.another()
            self._write(snapshot, model)
            serving.drafting, serving.model = self._draft_with(model), model
        else:
            self._write(snapshot, serving.model)

    def filled(self, serving: ServingDraft, *, is_whole: bool) -> None:
        """It may serve now, unless it was spoiled meanwhile; what could not be made is let go."""
        if serving.model is None:
            self.held.remove(serving)
            return
        self._made.add(serving.model)
        serving.is_written = is_whole and not serving.is_spoiled

    def _free(self, domain: str | None) -> ServingDraft:
        """One that nobody holds: of the same domain, or a new one, or the one that was not used for longest."""
        free = [serving for serving in self.held if serving.leases == 0]
        same = [serving for serving in free if serving.domain == domain]
        if same:
            return same[0]
        if free and len(self.held) >= self._most():
            return min(free, key=lambda serving: serving.used)
        self.held.append(ServingDraft(None, None, domain, is_written=False))
        return self.held[-1]

    def forget_leases(self) -> None:
        """Nobody uses these models any more, and nobody fills what was reserved. Who holds one nevertheless gives the
        old entry back, which no longer counts."""
        before, self.base = self.base, replace(self.base, leases=0)
        self.held = [
            self.base if serving is before else replace(serving, leases=0)
            for serving in self.held
            if serving.model is not None
        ]

    def another(self) -> Any:
        """A copy of the base, not held here."""
        with learning_context():
            return copy.deepcopy(self.base.model)

    def spoil(self, domain: str | None = None, *, everything: bool = False) -> None:
        """What these models hold is not to be trusted; they are written anew before they serve again."""
        for serving in self.held:
            if everything or serving.domain == domain:
                serving.is_written, serving.is_spoiled = False, True

    def trim(self, is_newest: Callable[[ServingDraft], bool]) -> None:
        """Let go what overlapping requests made, and what is over the limit."""
        for serving in sorted(self.held, key=lambda s: s.used):
            is_doubled = sum(s.domain == serving.domain for s in self.held) > 1
            is_old = not (serving.is_written and is_newest(serving))
            if serving.leases == 0 and ((is_doubled and is_old) or len(self.held) > self._most()):
                self.held.remove(serving)
