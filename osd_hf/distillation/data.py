"""Read, complete and hold out the requests of offline distillation; each request is a trace."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from osd_hf.decoding.record import NO_WARPING, sampling_settings
from osd_hf.errors import ConfigError, DataError, StateError, UnsupportedModelError, VocabularyMismatchError
from osd_hf.models import prompt_room, until_end, unwrap, vocab_size_of
from osd_hf.prompts import RowError, chat_message, prompt_text, render_chat, report_skipped
from osd_hf.replay import padded
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace, bare_trace

logger = logging.getLogger(__name__)

SAMPLE_SOURCES = ("teacher", "student", "mix_request")
COLUMNS = "`prompt`, with or without `completion`, or `messages`"
ROW_COLUMNS = ("prompt", "completion", "messages", "tools", "chat_template_kwargs")


def unanswered(trace: Trace, completion_ids: Any = ()) -> Trace:
    """Return the trace's prompt with another completion, or none, without target rows."""
    return bare_trace(trace.prompt_ids, completion_ids, trace.vocab_size, trace.decoder_prompt_ids)


@dataclass
class Data:
    """Training requests, the target if its rows must be computed, and held-out requests. A request without an answer
    is a trace without tokens."""

    requests: list[Trace]
    target: Any
    held_out: list[Trace] | None


def read_data(target: Any, draft: Any, dataset: Any, eval_dataset: Any, tokenizer: Any, config: Any) -> Data:
    """Read the data of `distill`, and decide whether the target is needed; raises as `distill` does."""
    vocab_size = vocab_size_of(draft)
    is_encoder_decoder = draft.config.is_encoder_decoder
    start = unwrap(draft).generation_config.decoder_start_token_id if is_encoder_decoder else None
    if is_encoder_decoder and start is None:
        raise UnsupportedModelError("The draft is an encoder-decoder without a `decoder_start_token_id`. Set it.")
    positions = prompt_room(draft.config if target is None else target.config, draft.config, 0)

    def read(data: Any, *, needs_rows: bool, may_answer: bool) -> list[Trace]:
        check = functools.partial(check_room, positions, config.max_new_tokens, may_answer=may_answer)
        if not _is_recorded(data):
            return read_rows(data, tokenizer, vocab_size=vocab_size, decoder_start=start, check=check)
        traces = read_traces(data, draft, needs_rows=needs_rows)
        for number, trace in enumerate(traces):
            try:
                check(trace)
            except RowError as error:
                raise DataError(f"Request {number} cannot be used: {error}. Leave it out.") from error
        return traces

    # An iterator can be read only once.
    dataset, eval_dataset = (list(d) if isinstance(d, Iterator) else d for d in (dataset, eval_dataset))
    source, has_rows = config.sample_source, _is_recorded(dataset) and config.sample_source == "teacher"
    if target is None and not has_rows:
        raise ConfigError("`target` must be given: only recorded requests contain its distributions.")
    of_draft = source == "student"
    requests = read(dataset, needs_rows=has_rows, may_answer=source != "teacher")
    if not has_rows:
        requests = [unanswered(t, () if of_draft else t.completion_ids) for t in requests]
        if not of_draft and not all(map(len, requests)):
            _check_answers(target)
    if eval_dataset is None:
        if config.eval_strategy != "no":
            raise ConfigError(f"`eval_strategy` is {config.eval_strategy.value!r}: pass `eval_dataset=`.")
        return Data(requests, None if has_rows else target, None)
    held_out = read(eval_dataset, needs_rows=False, may_answer=False)
    if not _is_recorded(eval_dataset):
        held_out = [unanswered(trace) for trace in held_out]
        if target is None:
            raise ConfigError("Held-out prompts need a `target` to answer them. Pass it, or recorded requests.")
        _check_answers(target)
    return Data(requests, None if has_rows else target, held_out)


def _is_recorded(dataset: Any) -> bool:
    """Return whether a data set holds recorded requests instead of rows."""
    if isinstance(dataset, CorrectionStore):
        return True
    return isinstance(dataset, list | tuple) and len(dataset) > 0 and isinstance(dataset[0], Trace)


def _check_answers(target: Any) -> None:
    """Raise ConfigError for a target whose answers would depend on logits processors, which its rows do not show."""
    settings = sampling_settings(unwrap(target).generation_config)
    if asked := sorted(settings.keys() - {"do_sample", "eos_token_id", *NO_WARPING}):
        hint = f"Set {asked[0]} to its neutral value on `target.generation_config`, or pass completions."
        what = f"its generation config sets {', '.join(asked)}, which changes its distributions"
        raise ConfigError(f"The target must answer prompts, but {what}. {hint}")


def check_room(positions: int | None, new_tokens: int, trace: Trace, *, may_answer: bool) -> None:
    """Raise RowError if prompt and completion do not fit into the models' positions. A request without a completion
    gets up to `new_tokens`, and with `may_answer` others, too. Encoder-decoders have separate positions for both."""
    prompt, answer = len(trace.prompt_ids), len(trace)
    if may_answer or not answer:
        answer = max(answer, new_tokens)
    needed = max(prompt, answer) if trace.is_encoder_decoder else prompt + answer
    if positions is not None and needed > positions:
        raise RowError(f"prompt and completion do not fit into the models' {positions} positions")


def read_traces(dataset: Iterable[Trace], model: PreTrainedModel, *, needs_rows: bool = True) -> list[Trace]:
    """Return the recorded requests that have tokens and, with `needs_rows`, target rows. Raises DataError,
    VocabularyMismatchError and StateError for requests that do not fit to the model, and for rows of several widths or
    target versions."""
    traces, vocab_size = [trace for trace in dataset if len(trace)], vocab_size_of(model)
    if not traces:
        raise DataError("The recordings hold no request with a token to learn from.")
    if any(t.is_encoder_decoder != model.config.is_encoder_decoder for t in traces):
        raise DataError("The draft or the target of the recordings is an encoder-decoder, the other one is not.")
    if foreign := {t.vocab_size for t in traces} - {vocab_size}:
        sizes = f"a vocabulary of {min(foreign)} tokens, the draft {vocab_size}"
        raise VocabularyMismatchError(f"The recordings have {sizes}; see `align_vocab`.")
    if not needs_rows:
        return traces
    known = [t for t in traces if t.num_kept]
    if not known:
        raise DataError(f"All {len(traces)} requests were recorded without the target's rows, see `num_logprobs`.")
    if len(known) < len(traces):  # the target changed while it answered them
        logger.warning("%d requests without the target's rows are left out.", len(traces) - len(known))
        traces = known
    widths = sorted({t.top_ids.shape[1] for t in traces})
    if len(widths) > 1:
        kept = " and ".join(str(width or "all") for width in widths)
        raise StateError(f"The recordings keep {kept} entries per position. Distill from each part by itself.")
    versions = sorted({t.target for t in traces if t.target is not None})
    if len(versions) > 1:
        names = ", ".join(versions)
        raise DataError(f"The recordings are of {len(versions)} versions of the target ({names}). Take one.")
    return traces


def read_rows(
    dataset: Iterable[Any],
    tokenizer: Any,
    *,
    vocab_size: int,
    decoder_start: int | None,
    check: Callable[[Trace], None] = lambda trace: None,
) -> list[Trace]:
    """Read rows with TRL's columns: `prompt` and optionally `completion`, as text, token ids or messages; or
    `messages`, whose last one may be the completion. A text completion gets EOS. Rows that cannot be used, or for
    which `check` raises RowError, are skipped and logged once. Raises DataError if no row is left, for a token id
    outside the vocabulary, for text without a tokenizer, and for messages without a chat template."""
    start = None if decoder_start is None else np.asarray([decoder_start], np.int32)
    traces, skipped = list[Trace](), dict[str, list[int]]()
    for number, row in enumerate(_rows(dataset)):
        try:
            prompt, completion = _encoded(row, tokenizer, is_encoder_decoder=decoder_start is not None)
            if not prompt or completion == []:
                raise RowError(f"the {'completion' if prompt else 'prompt'} has no tokens")
            ids = [*prompt, *(completion or ())]
            if min(ids) < 0 or max(ids) >= vocab_size:
                raise DataError(f"Row {number} has token ids outside of the vocabulary of {vocab_size} tokens.")
            trace = bare_trace(prompt, completion or (), vocab_size, start)
            check(trace)
        except RowError as error:
            skipped.setdefault(str(error), []).append(number)
        else:
            traces.append(trace)
    report_skipped("row", len(traces), skipped)
    return traces


def _rows(dataset: Any) -> Any:
    """Return the rows of a data set as Python objects, with the columns of [`read_rows`]."""
    if isinstance(dataset, Mapping):
        if len(dataset) != 1:
            raise DataError(f"The data set has the splits {', '.join(dataset)}. Pass one, such as `dataset['train']`.")
        (dataset,) = dataset.values()
    has_transform = getattr(dataset, "format", {"type": None})["type"] == "custom"
    if hasattr(dataset, "with_format") and not has_transform:  # of `datasets`
        dataset = dataset.with_format(None)
        if kept := [name for name in dataset.column_names or () if name in ROW_COLUMNS]:
            dataset = dataset.select_columns(kept)
    return dataset


def _encoded(row: Any, tokenizer: Any, *, is_encoder_decoder: bool) -> tuple[list[int], list[int] | None]:
    """Return the token ids of a row's prompt and completion; `None` for a row without one. Raises RowError."""
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, Mapping):
        raise RowError(f"it is a {type(row).__name__}, not an object with the columns {COLUMNS}")
    prompt, completion, messages = (_listed(row.get(name)) for name in ("prompt", "completion", "messages"))
    if prompt is None:
        prompt, completion = messages, None
        if _are(Mapping, messages) and messages and messages[-1].get("role") == "assistant":
            prompt, completion = messages[:-1], messages[-1:]
    if not prompt or completion in ("", []):
        given = ", ".join(str(name) for name, value in row.items() if value is not None) or "no column"
        missing = "completion is empty" if prompt else "prompt is missing or empty"
        raise RowError(f"the {missing}; the columns are {COLUMNS}, and it has values in {given}")
    parts = [prompt] if completion is None else [prompt, completion]
    if _are(int, *parts):
        return prompt, completion
    is_text = all(isinstance(part, str) for part in parts)
    if not is_text and not _are(Mapping, *parts):
        raise RowError("prompt and completion must both be text, token ids or messages")
    if tokenizer is None:
        raise DataError("The data set holds text, and no tokenizer was found with the models. Pass `tokenizer=`.")
    if not is_text:
        return _encoded_messages(prompt, completion, tokenizer, row)
    ids = list(tokenizer(prompt_text(prompt, "prompt"))["input_ids"])
    if completion is None:
        return ids, None
    answer = list(tokenizer(prompt_text(completion, "completion"), add_special_tokens=is_encoder_decoder)["input_ids"])
    if tokenizer.eos_token_id not in (None, *answer[-1:]):
        answer.append(tokenizer.eos_token_id)
    return ids, answer


def _encoded_messages(
    prompt: list[Any], completion: list[Any] | None, tokenizer: Any, row: Mapping[str, Any]
) -> tuple[list[int], list[int] | None]:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("The data set holds messages, but the tokenizer has no chat template. Give text instead.")
    prompt, answers = ([_turn(message) for message in part or ()] for part in (prompt, completion))
    if answers and not any(message["content"] or message.get("tool_calls") for message in answers):
        raise RowError("the answer is empty")
    settings = {name: v for name, v in _setting(row, "chat_template_kwargs", dict).items() if v is not None}
    if tools := _setting(row, "tools", list):
        settings["tools"] = tools
    head = render_chat(tokenizer, prompt, settings, add_generation_prompt=True)
    ids = list(tokenizer(head, add_special_tokens=False)["input_ids"])
    if not answers:
        return ids, None
    whole = render_chat(tokenizer, [*prompt, *answers], settings)
    if not whole.startswith(head):
        raise RowError(
            "the chat template starts an answer differently than it renders a given one, as templates of thinking "
            "models do; set `chat_template_kwargs`, such as `enable_thinking`, or pass text"
        )
    answer = list(tokenizer(whole[len(head) :], add_special_tokens=False)["input_ids"])
    # Some templates add text after the end of a turn, which no target generates.
    return ids, answer[: answer.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in answer else answer


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise RowError(f"a message has no `role`; its fields are {', '.join(map(str, message))}")
    try:
        return chat_message(message)
    except RowError as error:
        raise RowError(f"`content` of a message {error}") from None


def _setting(row: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a column with a setting of the chat template, given as a value or as JSON."""
    value = _listed(row.get(name))
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise RowError(f"`{name}` is no JSON") from None
    if value is not None and not isinstance(value, kind):
        raise RowError(f"`{name}` must be a {kind.__name__}, got {type(value).__name__}")
    return value or kind()


def _listed(value: Any) -> Any:
    """Return an array as a list."""
    return value.tolist() if hasattr(value, "tolist") else value


def _are(kind: type, *parts: Any) -> bool:
    return all(isinstance(part, list) and all(isinstance(item, kind) for item in part) for part in parts)


@torch.no_grad()
def completed(
    requests: Sequence[Trace], rows: Sequence[int], step: int, config: Any, *, target: Any, draft: Any
) -> list[Trace]:
    """Complete requests by samples; existing completions count as the target's. The samples of a request depend only
    on the seed, the optimizer step and its row, so batches, processes and resumed runs give the same ones. The models
    are in evaluation mode."""
    draws = [np.random.default_rng((config.seed, step, row)) for row in rows]
    share = {"teacher": 0.0, "student": 1.0}.get(config.sample_source, config.lmbda)
    is_student = np.array([rng.random() < share for rng in draws])
    picks = np.stack([rng.random(config.max_new_tokens, dtype=np.float32) for rng in draws])
    missing = np.array([len(request) == 0 for request in requests])
    traces = list(requests)
    for model, chosen in ((draft, is_student), (target, ~is_student & missing)):
        indices = np.flatnonzero(chosen).tolist()
        if indices:
            end = target.generation_config.eos_token_id
            answers = _sampled(model, [requests[i] for i in indices], picks[indices], config.temperature, end)
            for i, answer in zip(indices, answers, strict=True):
                traces[i] = unanswered(requests[i], until_end(answer, target.generation_config))
    return traces


def _sampled(
    model: Any, requests: Sequence[Trace], picks: NDArray[np.float32], temperature: float, end: Any
) -> NDArray[np.int32]:
    """Generate with one model until the token `end`, greedily at a temperature of 0. `picks` are random numbers, and
    the result is ids, both `(requests, new tokens)`."""
    is_encoder_decoder = requests[0].is_encoder_decoder
    ids, mask = padded([r.prompt_ids for r in requests], "right" if is_encoder_decoder else "left", model.device)
    start = 1 if is_encoder_decoder else ids.shape[1]
    drawn = torch.from_numpy(picks).to(model.device)
    sequences = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=end,
        pad_token_id=0,
        max_new_tokens=picks.shape[1],
        logits_processor=[_SampledToken(drawn, temperature, start)] if temperature > 0 else [],
        stop_strings=None,
    )
    answers: NDArray[np.int32] = sequences[:, start:].cpu().numpy()
    return answers


class _SampledToken(LogitsProcessor):
    """Sample each row's token by its own random number, so that a request does not depend on its batch."""

    def __init__(self, picks: Tensor, temperature: float, start: int) -> None:
        self.picks = picks
        self.temperature = temperature
        self.start = start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        reached = (scores.float() / self.temperature).softmax(-1).cumsum(-1)
        pick = self.picks[:, input_ids.shape[1] - self.start, None] * reached[:, -1:] * (1 - 1e-6)
        chosen = torch.searchsorted(reached, pick, right=True).clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen, 0.0)
