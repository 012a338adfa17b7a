"""Traces of the target alone, in batches: what replay and offline learning need where no traffic was captured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from osd_hf.arguments import NO_WARPING, sampling_settings
from osd_hf.capture import compress_rows
from osd_hf.errors import ConfigError
from osd_hf.records import Trace, ids_dtype

__all__ = ["record_traces"]


@torch.no_grad()
def record_traces(
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int = 32,
    num_logprobs: int | None = 64,
    domain: str | None = None,
) -> Iterator[Trace]:
    """
    Greedy answers of the target to each prompt, as traces without rounds.

    Prompts are answered in padded batches. In fp32 a batch may, once in many thousand tokens, break a tie of the top
    two logits otherwise than a single prompt does.

    Args:
        target (`PreTrainedModel`):
            Decoder-only or encoder-decoder; its own generation config must be greedy without logits processors.
        prompts (`Sequence[Sequence[int]]`):
            Token ids of each prompt.
        max_new_tokens (`int`):
            Bound of each answer.
        batch_size (`int`, *optional*, defaults to 32):
            Prompts answered at once.
        num_logprobs (`int`, *optional*, defaults to 64):
            Target entries kept per position; `None` keeps whole rows.
        domain (`str`, *optional*):
            Label written into the traces.

    Yields:
        `Trace`: in the order of the prompts.

    Raises:
        ConfigError: an empty prompt, or a target whose generation config asks for logits processors.
    """
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"Prompt {i} is empty; every prompt needs at least one token.")
    asked = sampling_settings(target.generation_config).keys() - {"do_sample", "eos_token_id", *NO_WARPING}
    if asked:
        raise ConfigError(
            f"The target's generation config sets {', '.join(sorted(asked))}, so its answers are not its own greedy "
            "choice. Unset it for the recording, or capture assisted requests instead."
        )
    size = int(target.config.get_text_config().vocab_size)
    eos = target.generation_config.eos_token_id
    eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        width = max(len(p) for p in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch):
            where = slice(0, len(prompt)) if target.config.is_encoder_decoder else slice(width - len(prompt), width)
            ids[row, where] = torch.tensor(list(prompt))
            mask[row, where] = 1
        output = target.generate(
            input_ids=ids.to(target.device),
            attention_mask=mask.to(target.device),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        start = output.sequences.shape[1] - len(output.logits)
        answers = output.sequences[:, start:].cpu().numpy().astype(np.int32)
        kept = [compress_rows(step, num_logprobs) for step in output.logits]
        for row, prompt in enumerate(batch):
            ends = np.flatnonzero(np.isin(answers[row], eos_ids))
            length = int(ends[0]) + 1 if len(ends) else answers.shape[1]
            top_ids = [k[1][row] for k in kept[:length] if k[1] is not None]
            yield Trace(
                prompt_ids=np.asarray(prompt, dtype=np.int32),
                decoder_prompt_ids=(
                    output.sequences[row, :start].cpu().numpy().astype(np.int32)
                    if target.config.is_encoder_decoder
                    else None
                ),
                completion_ids=answers[row, :length],
                rounds=(),
                top_logits=torch.stack([k[0][row] for k in kept[:length]]).cpu().numpy(),
                top_ids=(
                    torch.stack(top_ids).cpu().numpy().astype(ids_dtype(size))
                    if top_ids
                    else np.zeros((length, 0), ids_dtype(size))
                ),
                tail_logprob=torch.stack([k[2][row] for k in kept[:length]]).cpu().numpy(),
                vocab_size=size,
                domain=domain,
                sampling={"max_new_tokens": max_new_tokens, "processors": [], "eos_token_id": eos},
                created_at_seconds=time.time(),
            )
