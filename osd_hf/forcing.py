"""Teacher forcing: a model's logits at every completion position of a batch of traces, in one forward."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList

from osd_hf.records import Trace
from osd_hf.wrappers import unwrap

__all__ = ["batches", "completion_logits", "completion_mask", "process_rows"]

logger = logging.getLogger(__name__)

MAX_LOGITS = 1 << 26  # elements of one batch's logits: 256 MiB in float32
MAX_TOKENS = 1 << 16  # of one batch, prompts included


def batches(traces: Sequence[Trace], vocab_size: int, batch_size: int = 32) -> Iterator[list[int]]:
    """Indices of the traces in batches of similar length, each within `MAX_LOGITS` and `MAX_TOKENS`."""
    order = sorted(range(len(traces)), key=lambda i: (len(traces[i]), len(traces[i].prompt_ids)))
    batch: list[int] = []
    prompt = 0
    for i in order:
        rows, prompt = len(batch) + 1, max(prompt, len(traces[i].prompt_ids))
        full = rows * len(traces[i]) * vocab_size > MAX_LOGITS or rows * (prompt + len(traces[i])) > MAX_TOKENS
        if batch and (rows > batch_size or full):
            yield batch
            batch, prompt = [], len(traces[i].prompt_ids)
        batch.append(i)
    if batch:
        yield batch


def completion_mask(traces: Sequence[Trace], device: Any = None) -> torch.Tensor:
    """Bool of shape `(traces, longest completion)`: where a trace has a token."""
    lengths = torch.tensor([len(t) for t in traces], device=device)
    return torch.arange(int(lengths.max()), device=device)[None] < lengths[:, None]


def completion_logits(model: Any, traces: Sequence[Trace]) -> torch.Tensor:
    """
    Logits with which `model` predicts each completion token given everything before it.

    Prompts are padded on the left and completions on the right, so that the positions wanted are the same columns in
    every row and the head runs over no prompt position.

    Args:
        model (`PreTrainedModel`):
            In the mode (training, gradients) that the caller wants.
        traces (`Sequence[Trace]`):
            All of decoder-only, or all of encoder-decoder requests.

    Returns:
        `torch.Tensor` of shape `(traces, longest completion, vocab)`, the model's dtype, raw logits; columns past a
        trace's end mean nothing.
    """
    device = model.device
    width = max(len(t) for t in traces)
    if traces[0].is_encoder_decoder:
        encoder_ids, encoder_mask = _pad([t.prompt_ids for t in traces], "right", device)
        starts = {len(t.decoder_prompt_ids) for t in traces}  # type: ignore[arg-type]
        if len(starts) != 1:
            rows = [completion_logits(model, [t]) for t in traces]
            return torch.cat([torch.nn.functional.pad(r, (0, 0, 0, width - r.shape[1])) for r in rows])
        decoder_ids, decoder_mask = _pad(
            [np.concatenate([t.decoder_prompt_ids, t.completion_ids]) for t in traces],
            "right",
            device,
        )
        logits: torch.Tensor = model(
            input_ids=encoder_ids,
            attention_mask=encoder_mask,
            decoder_input_ids=decoder_ids[:, :-1],
            decoder_attention_mask=decoder_mask[:, :-1],
            use_cache=False,
        ).logits
        return logits[:, starts.pop() - 1 :]

    prompt_ids, prompt_mask = _pad([t.prompt_ids for t in traces], "left", device)
    answer_ids, answer_mask = _pad([t.completion_ids for t in traces], "right", device)
    # The last token predicts nothing that is asked for.
    input_ids = torch.cat([prompt_ids, answer_ids[:, :-1]], dim=1)
    mask = torch.cat([prompt_mask, answer_mask[:, :-1]], dim=1)
    accepted = inspect.signature(unwrap(model).forward).parameters  # a `PeftModel` hides what it passes on
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask, "use_cache": False}
    if "position_ids" in accepted:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = width
    answer_logits: torch.Tensor = model(**inputs).logits[:, -width:]
    return answer_logits


def _pad(rows: Sequence[Any], side: str, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(r) for r in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, where] = torch.from_numpy(np.asarray(row, dtype=np.int64))
        mask[i, where] = 1
    return ids.to(device), mask.to(device)


def process_rows(model: Any, trace: Trace, logits: torch.Tensor) -> torch.Tensor:
    """
    Apply to each row the logits processors of the recorded request, as its settings rebuild them.

    Args:
        model (`PreTrainedModel`):
            Builds the processors.
        trace (`Trace`):
            Gives settings and context.
        logits (`torch.Tensor` of shape `(completion, vocab)`):
            Raw rows.

    Returns:
        `torch.Tensor`: float32 of the same shape; the rows themselves where the request had no processors.
    """
    recorded = list(trace.sampling.get("processors", ()))
    if not recorded:
        return logits.float()
    start = trace.decoder_prompt_ids if trace.decoder_prompt_ids is not None else trace.prompt_ids
    ids = torch.from_numpy(np.concatenate([start, trace.completion_ids]).astype(np.int64))[None].to(logits.device)
    processors = _processors(model, trace, len(start))
    if [type(p).__name__ for p in processors] != recorded:
        logger.warning(
            "A trace was made with logits processors %s, of which its settings rebuild %s: replay is approximate.",
            recorded,
            [type(p).__name__ for p in processors],
        )
    rows = [processors(ids[:, : len(start) + t], logits[t : t + 1].float()) for t in range(len(trace))]
    return torch.cat(rows)


def _processors(model: Any, trace: Trace, prompt_tokens: int) -> LogitsProcessorList:
    settings = {k: v for k, v in trace.sampling.items() if k not in ("processors", "max_new_tokens")}
    config = GenerationConfig(**settings)
    if trace.decoder_prompt_ids is not None:
        config.decoder_start_token_id = int(trace.decoder_prompt_ids[0])
    model._prepare_special_tokens(config, True, device=model.device)
    encoder_ids = None
    if trace.is_encoder_decoder:
        encoder_ids = torch.from_numpy(trace.prompt_ids.astype(np.int64))[None].to(model.device)
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt_tokens,
        encoder_input_ids=encoder_ids,
        device=model.device,
        model_kwargs={},
    )
