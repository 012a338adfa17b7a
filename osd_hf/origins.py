"""Where each token of an answer came from: accepted from the draft, corrected by the target, or its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from osd_hf.errors import VocabularyMismatchError
from osd_hf.forcing import completion_logits, process_rows
from osd_hf.records import Trace

__all__ = ["EmittedToken", "emitted_tokens"]


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """
    One token of an answer.

    Args:
        id (`int`):
            The token.
        origin (`str`):
            `"accepted"`: drafted, and verified by the target; `"corrected"`: the target's, in place of what the draft
            had said; `"bonus"`: the target's, behind a draft that was accepted whole; `"plain"`: the target's, in a
            round that drafted nothing.
        drafted_id (`int`, *optional*):
            Of a corrected token: what the draft had said.
        drafted_prob (`float`, *optional*):
            The probability that the draft gave to what it had said, processed as the request's; where it is known.
    """

    id: int
    origin: Literal["accepted", "corrected", "bonus", "plain"]
    drafted_id: int | None = None
    drafted_prob: float | None = None


def emitted_tokens(trace: Trace, draft: Any = None) -> list[EmittedToken]:
    """
    The tokens of a request's answer, each with its origin.

    Args:
        trace (`Trace`):
            Of an assisted request.
        draft (`PreTrainedModel`, *optional*):
            What drafted it, for the probabilities of what was corrected: one teacher-forced pass, if there is
            something corrected. Sampled traces have them recorded, and need no draft.

    Returns:
        `list[EmittedToken]`: as long as the completion; tokens of a recording of the target alone are `"plain"`.

    Raises:
        VocabularyMismatchError: the draft has another vocabulary than the trace.
    """
    tokens = [EmittedToken(int(token), "plain") for token in trace.completion_ids]
    recorded: dict[int, float] = {}
    start = 0
    for r in trace.rounds:
        for i in range(r.num_emitted):
            token, at = int(trace.completion_ids[start + i]), start + i
            if i < r.num_accepted:
                tokens[at] = EmittedToken(token, "accepted")
            elif r.has_correction:
                tokens[at] = EmittedToken(token, "corrected", int(r.drafted_ids[i]))
                if r.q is not None:
                    recorded[at] = float(r.q[i])
            elif r.num_drafted:
                tokens[at] = EmittedToken(token, "bonus")
        start += r.num_emitted
    corrected = [at for at, token in enumerate(tokens) if token.origin == "corrected"]
    missing = [at for at in corrected if at not in recorded]
    if missing and draft is not None:
        said = torch.tensor([tokens[at].drafted_id for at in missing])
        recorded |= dict(zip(missing, _probabilities(draft, trace, torch.tensor(missing), said), strict=True))
    for at in corrected:
        t = tokens[at]
        tokens[at] = EmittedToken(t.id, t.origin, t.drafted_id, recorded.get(at))
    return tokens


def _probabilities(draft: Any, trace: Trace, positions: torch.Tensor, ids: torch.Tensor) -> list[float]:
    size = int(draft.config.get_text_config().vocab_size)
    if size != trace.vocab_size:
        raise VocabularyMismatchError(
            f"The trace has a vocabulary of {trace.vocab_size} tokens, the draft {size}. Pass the one that drafted it."
        )
    was_training = draft.training
    draft.eval()
    try:
        with torch.inference_mode():
            logits = completion_logits(draft, [trace])[0, : len(trace)]
            rows = process_rows(draft, trace, logits)[positions.to(logits.device)].softmax(-1)
            return [float(p) for p in rows.gather(1, ids.to(rows.device)[:, None])[:, 0].cpu()]
    finally:
        draft.train(was_training)
