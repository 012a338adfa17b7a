"""What offline distillation learns from: rows of a data set, or recorded requests, each as a trace."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import torch

from osd_hf.capture.hook import capture_traces
from osd_hf.capture.recording import record_traces
from osd_hf.capture.request import NO_WARPING, sampling_settings
from osd_hf.distillation.loss import unanswered
from osd_hf.errors import ConfigError, DataError, StateError, UnsupportedModelError, VocabularyMismatchError
from osd_hf.metrics import AcceptanceStats
from osd_hf.pair import check_draft, check_pair, prompt_room, unwrap
from osd_hf.replay import replay
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace

__all__ = ["Data", "HeldOut", "collate", "numbered", "read_data"]


@dataclass
class HeldOut:
    """
    Held-out requests. Recorded ones are replayed; of prompts the target's greedy answers are recorded once, when they
    are first asked for, and replayed from then on; sampled answers are made anew by assisted decoding each time.

    Args:
        requests (`Sequence[Trace]`):
            Recorded requests, or prompts: traces without a token.
        target (`PreTrainedModel`, *optional*):
            Needed for prompts.
        num_assistant_tokens (`int`):
            k, tokens drafted per round.
        temperature (`float`):
            Of answers to prompts; 0 is greedy.
        max_new_tokens (`int`):
            Bound of an answer to a prompt.
        seed (`int`):
            Of sampled answers, the same at each measurement.
    """

    requests: Sequence[Trace]
    target: Any
    num_assistant_tokens: int
    temperature: float
    max_new_tokens: int
    seed: int
    _recorded: list[Trace] = field(default_factory=list)

    def stats(self, draft: Any) -> AcceptanceStats:
        """The draft's acceptance; neither its mode nor the state of any generator is changed."""
        prompts = [t for t in self.requests if len(t) == 0]
        if prompts and self.temperature > 0:
            return self._sampled(draft, prompts)
        if prompts and not self._recorded:
            ids = [t.prompt_ids.tolist() for t in prompts]
            self._recorded = list(record_traces(self.target, ids, max_new_tokens=self.max_new_tokens, num_logprobs=1))
        return replay(draft, self._recorded if prompts else self.requests, self.num_assistant_tokens)

    def _sampled(self, draft: Any, prompts: Sequence[Trace]) -> AcceptanceStats:
        traces: list[Trace] = []
        was_training = draft.training
        devices = [self.target.device] if self.target.device.type == "cuda" else []
        draft.eval()
        try:
            with (
                torch.random.fork_rng(devices),
                _drafting(draft, self.num_assistant_tokens),
                capture_traces(self.target, traces.append, num_logprobs=1),
            ):
                torch.manual_seed(self.seed)
                for prompt in prompts:
                    ids = torch.from_numpy(prompt.prompt_ids)[None].long().to(self.target.device)
                    self.target.generate(
                        input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=draft,
                        max_new_tokens=self.max_new_tokens, do_sample=True, pad_token_id=0,
                        **{**NO_WARPING, "temperature": self.temperature},
                    )  # fmt: skip
        finally:
            draft.train(was_training)
        return sum(map(AcceptanceStats.from_trace, traces), AcceptanceStats())


@contextmanager
def _drafting(draft: Any, k: int) -> Iterator[None]:
    """k drafted tokens in every round; `generate` reads that from the draft's own configuration."""
    inner = unwrap(draft)
    before = inner.generation_config
    inner.generation_config = copy.deepcopy(before)
    inner.generation_config.update(
        num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    try:
        yield
    finally:
        inner.generation_config = before


COLUMNS = "`prompt`, with or without `completion`, or `messages`"


@dataclass(frozen=True)
class Data:
    """The training requests, the target where it is asked for rows, and the held-out requests."""

    requests: list[Trace]
    target: Any
    held_out: HeldOut | None


def read_data(target: Any, draft: Any, dataset: Any, eval_dataset: Any, tokenizer: Any, config: Any) -> Data:
    """
    Read the training and the held-out requests, as `distill` takes them, and say whether the target is needed.

    Raises:
        ConfigError, DataError, StateError, UnsupportedModelError, VocabularyMismatchError: as of `distill`.
    """
    if target is not None:
        check_pair(unwrap(target), unwrap(draft))
    else:
        check_draft(draft)
    text_config = draft.config.get_text_config()
    vocab_size = int(text_config.vocab_size)
    is_encoder_decoder = draft.config.is_encoder_decoder
    start = unwrap(draft).generation_config.decoder_start_token_id if is_encoder_decoder else None
    if is_encoder_decoder and start is None:
        raise UnsupportedModelError(
            f"The draft ({type(unwrap(draft)).__name__}) is an encoder-decoder without a `decoder_start_token_id`. "
            "Set it on `draft.generation_config`, to that of the target."
        )
    positions = prompt_room(draft.config if target is None else target.config, draft.config, 0)
    # What can be gone through only once is looked at before it is read.
    dataset, eval_dataset = (list(d) if isinstance(d, Iterator) else d for d in (dataset, eval_dataset))
    stored = _is_recorded(dataset) and config.sample_source == "teacher"

    def read(data: Any, *, needs_rows: bool, prompts_only: bool) -> list[Trace]:
        if _is_recorded(data):
            return _read_traces(data, vocab_size, needs_rows=needs_rows, is_encoder_decoder=is_encoder_decoder)
        return _read_rows(data, tokenizer, vocab_size=vocab_size, decoder_start=start, prompts_only=prompts_only)

    prompts_only = config.sample_source in ("student", "mix_token")
    requests = read(dataset, needs_rows=stored, prompts_only=prompts_only)
    if not stored:
        if target is None:
            raise ConfigError("`target` must be given: only recorded requests bring its distributions along.")
        if _is_recorded(dataset):
            requests = [unanswered(t, () if prompts_only else t.completion_ids) for t in requests]
        if config.sample_source != "student" and not all(len(t) for t in requests):
            _check_answers(target)
    sampled = config.max_new_tokens if config.sample_source == "mix_request" else 0
    _check_lengths(requests, positions, config.max_new_tokens, at_least=sampled)
    if eval_dataset is None:
        if config.eval_strategy != "no":
            raise ConfigError(f"`eval_strategy` is {config.eval_strategy.value!r}: pass `eval_dataset=`.")
        return Data(requests, None if stored else target, None)
    held_out = read(eval_dataset, needs_rows=False, prompts_only=True)
    _check_lengths(held_out, positions, config.max_new_tokens)
    if target is None and not _is_recorded(eval_dataset):
        raise ConfigError("Held-out prompts need a `target` to answer them. Pass it, or recorded requests.")
    if not _is_recorded(eval_dataset):
        _check_answers(target)
    judge = HeldOut(
        held_out, target, config.num_assistant_tokens, config.eval_temperature, config.max_new_tokens, config.seed
    )
    return Data(requests, None if stored else target, judge)


def numbered(number: int) -> datasets.Dataset:
    """What a trainer takes for its data set: the requests' numbers."""
    return datasets.Dataset.from_dict({"row": list(range(number))})


def collate(examples: Sequence[dict[str, int]]) -> dict[str, list[int]]:
    """A batch of them."""
    return {"rows": [example["row"] for example in examples]}


def _is_recorded(dataset: Any) -> bool:
    """Whether it holds recorded requests, and not rows with columns."""
    if isinstance(dataset, CorrectionStore):
        return True
    return isinstance(dataset, list | tuple) and len(dataset) > 0 and isinstance(dataset[0], Trace)


def _check_answers(target: Any) -> None:
    """Refuse a target that would answer prompts under logits processors, which its rows do not show."""
    settings = sampling_settings(unwrap(target).generation_config)
    if asked := sorted(settings.keys() - {"do_sample", "eos_token_id", *NO_WARPING}):
        raise ConfigError(
            f"The target must answer prompts, and its generation config sets {', '.join(asked)}, so that its answers "
            f"would not be of the distributions that are learned. Set {asked[0]} to its neutral value on "
            "`target.generation_config`, or bring answers: completions, or recorded requests."
        )


def _read_traces(
    dataset: Iterable[Trace], vocab_size: int, *, needs_rows: bool, is_encoder_decoder: bool
) -> list[Trace]:
    """
    Recorded requests, those without any token left out.

    Raises:
        DataError: nothing is left; a request of the other kind of model; `needs_rows`, and a request has been recorded
            without the target's rows.
        StateError: the requests keep rows of several widths.
        VocabularyMismatchError: they were recorded with another vocabulary than the draft's.
    """
    traces = [trace for trace in dataset if len(trace)]
    if not traces:
        raise DataError("The recordings hold no request with a token to learn from.")
    if other := sum(t.is_encoder_decoder != is_encoder_decoder for t in traces):
        kinds = ("encoder-decoder", "decoder-only") if is_encoder_decoder else ("decoder-only", "encoder-decoder")
        raise DataError(
            f"The draft is {kinds[0]}, but {other} of {len(traces)} recordings are of a target that is {kinds[1]}. "
            "Use recordings of a target of the draft's kind."
        )
    if foreign := {t.vocab_size for t in traces} - {vocab_size}:
        raise VocabularyMismatchError(
            f"The recordings have a vocabulary of {', '.join(map(str, sorted(foreign)))} tokens, the draft "
            f"{vocab_size}. Use a draft of the target's vocabulary (see `align_vocab`)."
        )
    if needs_rows:
        bare = sum(t.num_kept == 0 for t in traces)
        if bare:
            raise DataError(
                f"{bare} of {len(traces)} requests were recorded without the target's rows. Record them with "
                "`num_logprobs`, or distill from prompts with a target."
            )
        widths = sorted({t.top_ids.shape[1] for t in traces})
        if len(widths) > 1:
            raise StateError(
                f"The recordings keep {' and '.join(str(w or 'all') for w in widths)} entries per position; one run "
                "takes one width. Distill from each part by itself."
            )
    return traces


def _read_rows(
    dataset: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    vocab_size: int,
    decoder_start: int | None,
    prompts_only: bool = False,
) -> list[Trace]:
    """
    Rows in the columns that TRL names: `prompt` and perhaps `completion`, each text, token ids or messages, or
    `messages` alone, whose last turn is the completion if it is the assistant's.

    Args:
        dataset (`datasets.Dataset` or `Iterable[Mapping]`):
            The rows.
        tokenizer (`PreTrainedTokenizerBase`):
            For text and messages. Text is taken as it is, and a completion ends with EOS; messages go through the
            chat template.
        vocab_size (`int`):
            Of target and draft.
        decoder_start (`int`, *optional*):
            What the decoder of an encoder-decoder begins with.
        prompts_only (`bool`, *optional*, defaults to `False`):
            Leave completions out.

    Returns:
        `list[Trace]`: without rows, and without tokens where there is no completion.

    Raises:
        DataError: no rows, a missing column, an empty prompt or completion, an id outside of the vocabulary.
    """
    nothing = np.zeros((0, 0), np.float16)
    traces = []
    for number, row in enumerate(dataset):
        if not isinstance(row, Mapping) or not ("prompt" in row or "messages" in row):
            columns = ", ".join(row) if isinstance(row, Mapping) else f"none, it is a {type(row).__name__}"
            raise DataError(f"Row {number} needs the columns {COLUMNS}; its columns are {columns}.")
        prompt, completion = _encoded(row, tokenizer, number, is_encoder_decoder=decoder_start is not None)
        if not prompt:
            raise DataError(f"Row {number} has an empty prompt; leave it out.")
        if completion is not None and not completion:
            raise DataError(f"Row {number} has an empty completion; leave it out, or drop the column to generate.")
        ids = [*prompt, *(completion or ())]
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise DataError(f"Row {number} has token ids outside of the vocabulary of {vocab_size} tokens.")
        trace = Trace(
            prompt_ids=np.asarray(prompt, np.int32), completion_ids=np.zeros(0, np.int32), rounds=(),
            top_logits=nothing, top_ids=nothing, tail_logprob=np.zeros(0, np.float32), vocab_size=vocab_size,
            decoder_prompt_ids=None if decoder_start is None else np.asarray([decoder_start], np.int32),
        )  # fmt: skip
        traces.append(unanswered(trace, () if prompts_only else completion or ()))
    if not traces:
        raise DataError("The data set has no rows.")
    return traces


def _check_lengths(traces: Iterable[Trace], positions: int | None, max_new_tokens: int, *, at_least: int = 0) -> None:
    """Refuse prompts that leave no room for their completion in the models' positions, of which an encoder-decoder has
    as many for either; raises DataError."""
    if positions is None:
        return
    for number, trace in enumerate(traces):
        prompt, answer = len(trace.prompt_ids), max(len(trace) or max_new_tokens, at_least)
        needed = max(prompt, answer) if trace.is_encoder_decoder else prompt + answer
        if needed > positions:
            raise DataError(
                f"Row {number} is too long: a prompt of {prompt} tokens and a completion of {answer} do not fit into "
                f"the models' {positions} positions. Shorten it, leave it out, or lower `max_new_tokens`."
            )


def _encoded(
    row: Mapping[str, Any], tokenizer: Any, number: int, *, is_encoder_decoder: bool
) -> tuple[list[int], list[int] | None]:
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is None:
        messages = row.get("messages") or []
        if not isinstance(messages, list) or not all(isinstance(turn, Mapping) for turn in messages):
            raise DataError(_kinds(number, messages, None))
        has_answer = bool(messages) and messages[-1].get("role") == "assistant"
        prompt, completion = (messages[:-1], messages[-1:]) if has_answer else (messages, None)
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and completion.__class__ in (type(None), list)):
        raise DataError(_kinds(number, prompt, completion))
    if isinstance(prompt, str):
        if not isinstance(completion, str | None):
            raise DataError(_kinds(number, prompt, completion))
        _needs(tokenizer, "text")
        ids = list(tokenizer(prompt)["input_ids"])
        return ids, None if completion is None else _ended(tokenizer, completion, is_encoder_decoder)
    if all(isinstance(part, int) for part in prompt) and all(isinstance(part, int) for part in completion or ()):
        return prompt, completion
    if not all(isinstance(part, Mapping) for part in [*prompt, *(completion or ())]):
        raise DataError(_kinds(number, prompt, completion))
    _needs(tokenizer, "messages")
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(f"Row {number} holds messages, but the tokenizer has no chat template. Give text instead.")
    head = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) if prompt else ""
    ids = list(tokenizer(head, add_special_tokens=False)["input_ids"])
    if completion is None:
        return ids, None
    whole = tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
    if not whole.startswith(head):
        raise DataError(
            f"Row {number}: the chat template renders the prompt otherwise when an answer follows. Give text instead."
        )
    answer = list(tokenizer(whole[len(head) :], add_special_tokens=False)["input_ids"])
    # What templates write behind the end of a turn, no target ever says.
    return ids, answer[: answer.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in answer else answer


def _ended(tokenizer: Any, text: str, is_encoder_decoder: bool) -> list[int]:
    if not text:
        return []
    ids = list(tokenizer(text, add_special_tokens=is_encoder_decoder)["input_ids"])
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _needs(tokenizer: Any, kind: str) -> None:
    if tokenizer is None:
        raise DataError(f"The data set holds {kind}, and no tokenizer was found with the models. Pass `tokenizer=`.")


def _kinds(number: int, prompt: Any, completion: Any) -> str:
    return (
        f"Row {number}: prompt and completion must both be text, token ids or messages, got {_kind(prompt)} and "
        f"{_kind(completion)}."
    )


def _kind(value: Any) -> str:
    return f"list of {type(value[0]).__name__}" if isinstance(value, list) and value else type(value).__name__
