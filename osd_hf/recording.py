"""Record a target's own answers as traces, score traces with another target, and time forwards."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from osd_hf import vocabulary
from osd_hf.decoding.checks import log_once
from osd_hf.decoding.forward import AHEAD
from osd_hf.decoding.head import HeadForward
from osd_hf.decoding.record import NO_WARPING, Rows, compress_rows, sampling_settings
from osd_hf.decoding.sources import DraftForward
from osd_hf.draft_head import DraftHead
from osd_hf.errors import ConfigError, UnsupportedModelError
from osd_hf.logits_processors import sample
from osd_hf.models import input_device, until_end, unwrap, vocab_size_of
from osd_hf.replay import padded, raw_rows
from osd_hf.speedup import ForwardSeconds
from osd_hf.target_version import target_version
from osd_hf.trace import Trace, ids_dtype
from osd_hf.utils.context import neutral_context
from osd_hf.utils.kernels import fast_kernels, unpack

TIMED_K = 5
MIN_TURNS, MAX_TURNS = 4, 64
TIMED_SECONDS = 0.5
GPU_BANDWIDTH = {"a100": 2.0e12, "h100": 3.35e12, "h200": 4.8e12, "l4": 3.0e11, "l40s": 8.6e11}  # bytes/s, data sheets
# Settings that stay when a target answers without the settings of its config: special tokens, and caches.
_BASIC_SETTINGS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "cache_implementation",
    "cache_config", "max_cache_len", "compile_config", "disable_compile", "transformers_version",
}  # fmt: skip
# In the order in which transformers applies them.
_WARPERS = {"temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}


@torch.no_grad()
def record_traces(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int = 32,
    num_logprobs: int | None = 64,
    domain: str | None = None,
    sampling: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Iterator[Trace]:
    """
    Record the target's answer to each prompt (token ids), as traces without rounds, in the order of the prompts:
    greedy, or sampled with `temperature`, `top_p`, and `top_k` of `sampling` and a seed. Of the target's generation
    config, only special tokens count. Traces keep `num_logprobs` target entries per position, or full rows with
    `None`, and the label `domain`.

    Prompts are answered in padded batches. In fp32, a batch may rarely break a tie of the top two logits in another
    way than a single prompt does.

    Raises:
        ConfigError: A prompt is empty.
    """
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"Prompt {i} is empty; every prompt needs at least one token.")
    is_encoder_decoder, size = target.config.is_encoder_decoder, vocab_size_of(target)
    eos = target.generation_config.eos_token_id
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "processors": [], "eos_token_id": eos}
    warpers: list[Any] = []
    if sampling is not None:
        warpers = [kind(sampling[name]) for name, kind in _WARPERS.items() if name in sampling]
        settings |= {"do_sample": True, **sampling, "processors": [type(warper).__name__ for warper in warpers]}
        warpers.append(_Sampler(seed))
    for first in range(0, len(prompts), batch_size):
        batch, version = prompts[first : first + batch_size], target_version(target)
        ids, mask = padded(batch, "right" if is_encoder_decoder else "left", input_device(target))
        recorder = _Recorder(num_logprobs)
        with fast_kernels(unwrap(target)), own_choice(target):
            output = target.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                logits_processor=LogitsProcessorList([recorder, *warpers]),
            )
        sequences = output.cpu().numpy().astype(np.int32)
        start = sequences.shape[1] - len(recorder.steps)
        rows = recorder.rows(size)
        for row, prompt in enumerate(batch):
            answer = until_end(sequences[row, start:], target.generation_config)
            top_logits, top_ids, tail = (part[row, : len(answer)].copy() for part in rows)
            yield Trace(
                prompt_ids=np.asarray(prompt, dtype=np.int32),
                decoder_prompt_ids=sequences[row, :start] if is_encoder_decoder else None,
                completion_ids=answer,
                rounds=(),
                top_logits=top_logits,
                top_ids=top_ids,
                tail_logprob=tail,
                vocab_size=size,
                domain=domain,
                sampling=settings,
                created_at_seconds=time.time(),
                target=version,
            )


@contextlib.contextmanager
def own_choice(target: Any) -> Iterator[None]:
    """Inside the block, the target's generation config has special tokens and cache settings only. A draft learns the
    target's raw rows; other settings apply to target and draft alike when they serve."""
    inner = unwrap(target)
    before = inner.generation_config
    inner.generation_config = copy.deepcopy(before)
    for name, default in vars(GenerationConfig()).items():
        if name not in _BASIC_SETTINGS and not name.startswith("_"):
            setattr(inner.generation_config, name, default)
    ignored = sampling_settings(before).keys() - {"do_sample", "eos_token_id", *NO_WARPING}
    ignored |= {name for name in ("stop_strings", "guidance_scale") if getattr(before, name) is not None}
    if ignored:
        log_once(
            inner,
            f"The target answers without {', '.join(f'`{name}`' for name in sorted(ignored))} of its generation "
            "config: a draft learns from its raw rows, and is judged by them.",
        )
    try:
        yield
    finally:
        inner.generation_config = before


class _Recorder(LogitsProcessor):
    """Compress the raw rows of a batch at each step, because all of them would be gigabytes."""

    def __init__(self, num_logprobs: int | None) -> None:
        self.num_logprobs = num_logprobs
        self.steps: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps.append(compress_rows(scores, self.num_logprobs))
        return scores

    @neutral_context()
    def rows(self, vocab_size: int) -> tuple[NDArray[Any], ...]:
        """Return `top_logits`, `top_ids` and `tail_logprob` of [`Trace`]s, `(batch, steps, ...)`."""
        top_logits, top_ids, tail = (torch.stack(c, 1).cpu().numpy() for c in zip(*self.steps, strict=True))
        return top_logits, top_ids.astype(ids_dtype(vocab_size)), tail


class _Sampler(LogitsProcessor):
    """Choose the token of each row by sampling, with random numbers of its own."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.from_numpy(self.random.random(len(scores))).to(scores.device)
        chosen = sample(scores.float().softmax(-1), noise)
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen[:, None], 0.0)


@torch.inference_mode()
def scored(
    target: PreTrainedModel, traces: Sequence[Trace], widths: Sequence[int | None], batch_size: int
) -> list[Trace]:
    """Return traces with the rows of a target, by one forward over each. `widths` are the entries stored per row."""
    found = list(traces)
    for i, first, part, _ in raw_rows(target, traces, batch_size):
        trace, width = traces[i], widths[i]
        if first == 0:
            rows = Rows({width})
        rows.add(part)
        if first + len(part) == len(trace):
            top_logits, top_ids, tail = rows.stored(width, len(trace), trace.vocab_size)
            found[i] = replace(trace, top_logits=top_logits, top_ids=top_ids, tail_logprob=tail)
    return found


# --- the time of forwards -------------------------------------------------------------------------------------------


@torch.inference_mode()
def measured_costs(
    target: PreTrainedModel,
    drafts: Sequence[PreTrainedModel],
    prompt_ids: Sequence[int] | NDArray[np.int32],
    clock: Callable[[], float],
    gpu: str | None = None,
) -> list[ForwardSeconds]:
    """Time forwards of the target and of each draft, in turns, or estimate them for a GPU of `GPU_BANDWIDTH`. A draft
    with a large vocabulary has a head of some thousand tokens, as when it serves."""
    if gpu is not None:
        return _planned_costs(target, drafts, gpu)
    models = [unwrap(target), *map(_with_serving_vocabulary, drafts)]
    prompt = torch.from_numpy(np.asarray(prompt_ids, np.int64))[None].to(models[0].device)
    with fast_kernels(*models, is_request=True):  # weights are packed in the second block, as when they serve
        timed = [_TimedModel(model, prompt, clock) for model in models]
    turns, started = 0, clock()
    with fast_kernels(*models, is_request=True):
        while turns < MIN_TURNS or (turns < MAX_TURNS and clock() - started < TIMED_SECONDS):
            for model in timed:
                model.time_forward(1)
            timed[0].time_forward(1 + TIMED_K)
            turns += 1
    unpack(*models)
    one, several = timed[0].seconds[1], timed[0].seconds[1 + TIMED_K]
    more = max(several - one, 0.0) / TIMED_K
    return [
        ForwardSeconds(one, more, model.seconds[1], timed[0].prompt_seconds, model.prompt_seconds)
        for model in timed[1:]
    ]


def _planned_costs(target: PreTrainedModel, drafts: Sequence[PreTrainedModel], gpu: str) -> list[ForwardSeconds]:
    """Estimate captured forwards in bfloat16, limited by the memory of the GPU; the constants are those of an H200."""

    def seconds(model: Any) -> float:
        layers = {*model.get_decoder().parameters()} - {*model.get_input_embeddings().parameters()}
        read = layers | {*model.get_output_embeddings().parameters()}  # of the embeddings one row
        size: int = sum(p.numel() * min(p.element_size(), 2) for p in read)
        depth = model.config.get_text_config(decoder=True).num_hidden_layers
        return 1e-4 * (1 + int(depth)) + size / (0.9 * GPU_BANDWIDTH[gpu])

    one = seconds(unwrap(target))
    return [ForwardSeconds(one, 0.02 * one, seconds(_with_serving_vocabulary(draft))) for draft in drafts]


def _with_serving_vocabulary(draft: PreTrainedModel) -> PreTrainedModel:
    if vocab_size_of(draft) < vocabulary.MIN_VOCAB_SIZE:
        return draft
    try:
        restricted: PreTrainedModel = vocabulary.RestrictedDraft(draft, np.arange(vocabulary.SIZES[1])).model
        return restricted
    except UnsupportedModelError:
        return draft


class _TimedModel:
    """A model that has read a prompt. `seconds` has the minimum time of its forwards by their number of tokens."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[int, float] = {}
        self.prompt_seconds = math.inf
        self.token = prompt[:, :1]
        for _ in range(2):  # the first time, much is set up
            started = clock()
            if isinstance(unwrap(model), DraftHead):
                states: list[torch.Tensor] = []
                self.forward: Any = HeadForward(model, [states], prompt.shape[1] + AHEAD)
                self.forward.read(prompt.tolist())  # the first round
                states.append(torch.zeros(prompt.shape[1], model.state_width, device=prompt.device))
                self.forward.read(prompt.tolist())
            elif model.config.is_encoder_decoder:
                mask = torch.ones_like(prompt)
                outputs = model.get_encoder()(prompt, attention_mask=mask)
                self.forward = DraftForward(model, {"attention_mask": mask, "encoder_outputs": outputs})
                self.forward.feed(self.token)
            else:
                self.forward = DraftForward(model)
                self.forward.feed(prompt)
            self.prompt_seconds = min(self.prompt_seconds, clock() - started)

    def time_forward(self, tokens: int) -> None:
        """Time a forward over new tokens, and remove them."""
        length, started = self.forward.length, self.clock()
        self.forward.feed(self.token.expand(1, tokens))
        self.seconds[tokens] = min(self.clock() - started, self.seconds.get(tokens, math.inf))
        self.forward.crop(length)
