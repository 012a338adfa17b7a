"""Recording: greedy answers of the target alone, as traces."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from osd_hf.capture.request import NO_WARPING, CompressedRows, compress_rows, sampling_settings, stored_rows
from osd_hf.errors import ConfigError
from osd_hf.pair import eos_ids, vocab_size_of
from osd_hf.replay import padded
from osd_hf.trace import Trace


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
        prompts (`Sequence[Sequence[int]]`): Token ids of each prompt.
        max_new_tokens (`int`): Bound of each answer.
        batch_size (`int`, *optional*, defaults to 32): Prompts answered at once.
        num_logprobs (`int`, *optional*, defaults to 64): Target entries kept per position; `None` keeps whole rows.
        domain (`str`, *optional*): Label written into the traces.

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
    is_encoder_decoder, size = target.config.is_encoder_decoder, vocab_size_of(target)
    ends = eos_ids(target.generation_config)
    sampling = {"max_new_tokens": max_new_tokens, "processors": []}
    sampling["eos_token_id"] = target.generation_config.eos_token_id
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        ids, mask = padded(batch, "right" if is_encoder_decoder else "left", target.device)
        output = target.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        sequences = output.sequences.cpu().numpy().astype(np.int32)
        start = sequences.shape[1] - len(output.logits)
        steps = [compress_rows(step, num_logprobs) for step in output.logits]
        for row, prompt in enumerate(batch):
            answer = sequences[row, start:]
            ended = np.flatnonzero(np.isin(answer, ends))
            answer = answer[: ended[0] + 1] if len(ended) else answer
            here = slice(row, row + 1)
            parts = [
                CompressedRows(logits[here], None if ids is None else ids[here], tail[here])
                for logits, ids, tail in steps[: len(answer)]
            ]
            top_logits, top_ids, tail_logprob = stored_rows(parts, len(answer), size)
            start_ids = sequences[row, :start] if is_encoder_decoder else None
            yield Trace(
                prompt_ids=np.asarray(prompt, dtype=np.int32), decoder_prompt_ids=start_ids, completion_ids=answer,
                rounds=(), top_logits=top_logits, top_ids=top_ids, tail_logprob=tail_logprob, vocab_size=size,
                domain=domain, sampling=sampling, created_at_seconds=time.time(),
            )  # fmt: skip
