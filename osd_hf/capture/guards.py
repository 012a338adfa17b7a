"""Which requests are refused, and which the target answers alone; a processor with a memory may be replayed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import marshal
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkingConfig,
)

from osd_hf.capture.object_state import CannotLookThrough, Reachable
from osd_hf.config import OnlineConfig
from osd_hf.drafting.exactness import SOFT_PROMPT
from osd_hf.drafting.loop_inputs import CROPPED_CACHES, IRRELEVANT, SERVED, forgets, is_listed, setting
from osd_hf.errors import UnsupportedGenerationError
from osd_hf.models import has_soft_prompt, unwrap, vocab_size_of

# Fields of a generation config that are refused: name, values under which it does nothing, reason.
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("num_beams", (None, 1), "beams verify no draft; use greedy decoding or sampling"),
    ("num_return_sequences", (None, 1), "a draft serves one answer per prompt; repeat the prompt instead"),
    ("assistant_ensemble_weight", (None,), "it trades the target's distribution for acceptance, so it is lossy"),
    ("prompt_lookup_num_tokens", (None,), "prompt lookup has no draft model that could learn"),
    ("assistant_early_exit", (None,), "early exit drafts with the target itself, there is no draft to teach"),
    ("use_mtp", (None, False), "multi-token prediction drafts with the target's own heads"),
    ("speculation_type", (None,), "block drafting has no ordinary assistant model to teach"),
    ("penalty_alpha", (None, 0, 0.0), "contrastive search verifies no draft"),
    ("dola_layers", (None,), "DoLa verifies no draft"),
    ("constraints", (None,), "constrained beams verify no draft"),
    ("force_words_ids", (None,), "constrained beams verify no draft"),
)
# Fields under which the target answers alone: name, values under which it does nothing, reason.
UNDRAFTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("guidance_scale", (None, 1, 1.0), "guidance keeps state that target and draft would share"),
    ("use_cache", (True,), "drafts need the key-value cache"),
    ("cache_implementation", CROPPED_CACHES, "tokens cannot be taken back from such a cache"),
)
# Arguments of `OnlineAssistant.generate` that no generation config has: name, why it is refused and what to do.
REFUSED_ARGUMENTS = (
    ("assistant_model", "the assistant brings its own draft. Leave it out, or call `target.generate` inside `with "
     "assistant.attached():`"),
    ("custom_generate", "it replaces assisted decoding, so no draft is used. Leave it out"),
    ("assistant_tokenizer", "the draft has the target's tokenizer. Leave it out"),
)  # fmt: skip
# Arguments under which `target.generate` answers alone: name, reason.
ALONE_ARGUMENTS = (
    ("inputs_embeds", "the draft reads token ids, and `inputs_embeds` was given"),
    ("encoder_outputs", "the draft reads the source with an encoder of its own, and `encoder_outputs` was given"),
)
# Arguments that `target.generate` takes as tensors, beside the model's own `main_input_name`.
_TENSORS = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
_NEEDS_TOKENIZER = ("stop_strings", "token_healing")
# A newer transformers may bring fields that are in none of these. The target answers alone where one is set: what the
# field does is not known here.
_KNOWN = SERVED | IRRELEVANT | {name for name, _, _ in (*REFUSED, *UNDRAFTED)}

# Classes of transformers that remember earlier calls, or need more than the row and the tokens: draft and target would
# share one memory.
STATEFUL = frozenset({
    "AlternatingCodebooksLogitsProcessor", "BarkEosPrioritizerLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor", "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor", "DiaEOSDelayPatternLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperNoSpeechDetection",
    "ConfidenceCriteria",
})  # fmt: skip
# Classes in neither list are tried out: those of a newer transformers, and what is as good as its function.

MOST_NAMED = 32  # tokens tried out because they are named
MOST_WRITTEN = 4096  # bytes of a container that is searched for them

_PROCESSOR, _CRITERION = "logits processor", "stopping criterion"


# --- settings and inputs --------------------------------------------------------------------------------------------


@functools.lru_cache(2)
def _unknown_settings(init: Any) -> dict[str, tuple[Any, ...]]:
    """Settings of a newer transformers, whose configs are made by `init`: the values under which each does nothing."""
    fields, defaults = vars(GenerationConfig()), GenerationConfig._get_default_generation_params()
    unknown = [name for name in fields if name not in _KNOWN and not name.startswith("_")]
    return {name: (None, fields[name], defaults.get(name)) for name in unknown}


def check_generation(*sources: Any) -> None:
    """
    Refuse modes of `generate` that are lossy, or have no draft to teach.

    Args:
        sources (`Any`): Keywords (a dict) or generation configs, the strongest first, as for [`setting`].

    Raises:
        UnsupportedGenerationError: names the setting, its value, the reason and what to do.
    """
    given = functools.partial(setting, sources)
    for name, harmless, reason in REFUSED:
        value = given(name)
        if not any(value is ok or value == ok for ok in harmless):
            raise UnsupportedGenerationError(
                f"`{name}={value!r}` cannot be used here: {reason}. Leave it out, or pass `{name}={harmless[-1]!r}` "
                "where a generation config sets it."
            )
    if given("cache_implementation") == "paged":
        raise UnsupportedGenerationError(
            "`cache_implementation='paged'` cannot be used here: continuous batching takes no draft. Leave it out."
        )


def undrafted(model: Any, config: Any) -> str | None:
    """
    Return why the target answers a request alone, without a draft: the settings, and the reason. `None` if a draft can
    help.

    Args:
        model (`PreTrainedModel`): The target.
        config (`GenerationConfig`): Of the request, as `generate` has resolved it.
    """
    for name, harmless, reason in UNDRAFTED:
        value = getattr(config, name)
        if not any(value is ok or value == ok for ok in harmless):
            return f"`{name}` is set, and {reason}"
    for name, values in _unknown_settings(GenerationConfig.__init__).items():
        if getattr(config, name, None) not in values:
            return f"`{name}` is set, which this version of osd_hf does not know"
    if isinstance(config.watermarking_config, SynthIDTextWatermarkingConfig):
        return "`watermarking_config` is SynthID's, which keeps state that target and draft would share"
    attention = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", "eager")
    if config.return_dict_in_generate and config.output_attentions and attention != "eager":
        return f"`output_attentions` is set, and {attention} attention returns none"
    return None


def not_watched(why: str) -> UnsupportedGenerationError:
    """Return the error of a request that has no draft to watch, by what [`undrafted`] has returned."""
    return UnsupportedGenerationError(
        f"This request cannot be assisted: {why}. Leave the setting out, or call `generate` without `assistant_model`."
    )


def needed_tokenizer(tokenizer: Any, *sources: Any) -> dict[str, Any]:
    """
    Return the argument `tokenizer` of `generate` where a setting needs one, and otherwise nothing.

    Args:
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's.
        sources (`Any`): As for [`check_generation`]; a `tokenizer` among the keywords comes first.

    Raises:
        UnsupportedGenerationError: a setting needs a tokenizer, and there is none.
    """
    keywords = sources[0]
    name = next((name for name in _NEEDS_TOKENIZER if setting(sources, name) not in (None, False)), None)
    if name is None:
        return {}
    if keywords.get("tokenizer") is not None:
        tokenizer = keywords["tokenizer"]
    if tokenizer is None:
        raise UnsupportedGenerationError(
            f"`{name}={setting(sources, name)!r}` needs a tokenizer, and none was found where the models came from. "
            "Pass `tokenizer=`, the target's, here or to `OnlineAssistant`."
        )
    return {"tokenizer": tokenizer}


def answered_alone(target: Any, kwargs: dict[str, Any]) -> str | None:
    """
    Return why `target.generate` answers a request alone, without any part of the assistant; `None` if it does not.

    Args:
        target (`PreTrainedModel` or `PeftModel`): As the user passed it.
        kwargs (`dict[str, Any]`): Arguments of `generate`.
    """
    if has_soft_prompt(target):
        return SOFT_PROMPT
    kind: Any = type(unwrap(target))
    if not _decodes_by_itself(kind):
        return "its own `generate` decodes by another model"
    return next((reason for name, reason in ALONE_ARGUMENTS if kwargs.get(name) is not None), None)


@functools.cache
def _decodes_by_itself(kind: Any) -> bool:
    """Whether a class of models decodes by `GenerationMixin.generate` of the same object. Some have a `generate` of
    their own that calls that of a part, such as the language model behind an image encoder."""
    owner = next(cls for cls in kind.__mro__ if "generate" in vars(cls))
    if owner is GenerationMixin:
        return True
    try:
        return re.search(r"(super\(.*\)|GenerationMixin)\.generate\(", inspect.getsource(owner)) is not None
    except (OSError, TypeError):  # made without a file
        return True


def _check_inputs(target: Any, inputs: Any, kwargs: dict[str, Any]) -> None:
    """Refuse prompts that `target.generate` does not take: lists, arrays, and token ids of another shape than
    `(prompts, tokens)`. Features, images, and embeddings are left to the target."""
    main = target.main_input_name
    given = {"inputs": inputs, **{name: kwargs.get(name) for name in (*_TENSORS, main)}}
    for name, value in given.items():
        if value is None or isinstance(value, Mapping):
            continue
        if not isinstance(value, torch.Tensor):
            raise UnsupportedGenerationError(
                f"`{name}` must be a tensor, got {type(value).__name__}. For text, call the tokenizer with "
                f"`return_tensors='pt'`; for numbers, pass `torch.as_tensor({name})`."
            )
        names = kwargs.get("adapter_names")
        if names is not None and name in ("inputs", "input_ids", main) and len(names) != len(value):
            raise UnsupportedGenerationError(
                f"`adapter_names` must name an adapter for each of the {len(value)} prompts, got {len(names)} names. "
                'Use "__base__" for the model without an adapter.'
            )
        is_prompt = name == "input_ids" or (name == "inputs" and main == "input_ids")
        if is_prompt and (value.ndim != 2 or not len(value) or value.is_floating_point()):
            raise UnsupportedGenerationError(
                f"`{name}` must be token ids of shape (prompts, prompt tokens), got {value.dtype} of shape "
                f"{tuple(value.shape)}. One prompt has the shape (1, tokens); embeddings go to `inputs_embeds`."
            )


def check_request(
    target: Any, config: OnlineConfig, inputs: Any, kwargs: dict[str, Any], num_assistant_tokens: Any
) -> list[TriedOut]:
    """
    Refuse what an assistant's `generate` cannot be called with, before it does anything: arguments, settings, the
    shape of the prompt, a k that `config` could not have, processors and criteria. Returns what [`check_processors`]
    does; raises UnsupportedGenerationError or ConfigError.
    """
    for name, reason in REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedGenerationError(f"`{name}` cannot be used here: {reason}.")
    if num_assistant_tokens is not None and (type(num_assistant_tokens) is not int or num_assistant_tokens != 0):
        replace(config, num_assistant_tokens=num_assistant_tokens)
    _check_inputs(target, inputs, kwargs)
    sources = (kwargs, kwargs.get("generation_config"), target.generation_config)
    check_generation(*sources)
    processors, criteria = (list(kwargs.get(name) or ()) for name in ("logits_processor", "stopping_criteria"))
    if kwargs.get("prefix_allowed_tokens_fn") is not None:
        processors.append(PrefixConstrainedLogitsProcessor(kwargs["prefix_allowed_tokens_fn"], 1))
    prompt = inputs if inputs is not None else kwargs.get("input_ids", kwargs.get(target.main_input_name))
    if prompt is None or not (processors or criteria):
        return []
    if target.config.is_encoder_decoder:  # they are asked about the answer
        begun = kwargs.get("decoder_input_ids")
        if begun is None:
            names = ("decoder_start_token_id", "bos_token_id")
            start = next((value for name in names if (value := setting(sources, name)) is not None), 0)
            begun = torch.full((1, 1), int(torch.as_tensor(start, device="cpu").reshape(-1)[0]), device=prompt.device)
        prompt = begun
    if prompt.is_floating_point():
        return []
    check_criteria(criteria, prompt, vocab_size_of(target))
    return check_processors(processors, prompt, vocab_size_of(target))


# --- processors and criteria ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TriedOut:
    """A processor that seemed to forget when it was tried out, as it was before and after its first call. One that
    remembers only certain tokens is found out after the request, by [`~TriedOut.refusal`]."""

    thing: Any
    before: Reachable
    settled: Reachable

    def refusal(self) -> UnsupportedGenerationError | None:
        """The error that says that it remembers, where the calls of a request have changed more than its first one
        does."""
        return _remembers(self.thing, _PROCESSOR) if _has_changed(self.thing, self.before, self.settled) else None


def check_processors(
    processors: Any, input_ids: torch.Tensor, vocab_size: int, tried: Iterable[TriedOut] = ()
) -> list[TriedOut]:
    """
    Refuse logits processors that remember earlier calls, or may: target and draft share the instances, so drafted
    tokens that were never emitted would change the target's output. What is not known to forget is tried out on
    made-up continuations of the prompt, and left as it was; what was `tried` for this request already is not again.
    Returns those that were tried out, to be looked at again after the request; raises UnsupportedGenerationError.
    """
    row = functools.partial(torch.zeros, input_ids.shape[0], vocab_size, device=input_ids.device)
    return [
        next((one for one in tried if _asked(one.thing) is _asked(processor)), None)
        or _try_out(processor, _PROCESSOR, input_ids, row, vocab_size)
        for processor in processors or ()
        if not _is_known(processor, _PROCESSOR)
    ]


def check_criteria(criteria: Any, input_ids: torch.Tensor, vocab_size: int) -> None:
    """
    Refuse stopping criteria that remember earlier calls, or may: they are also asked about drafted tokens, as an
    answer ends at the very token at which the target alone would end it. They are tried out as logits processors are,
    but not looked at again after the request: what has changed then may well be a flag by which the caller ended it.
    Raises UnsupportedGenerationError.
    """
    for criterion in criteria or ():
        if not _is_known(criterion, _CRITERION):
            _try_out(criterion, _CRITERION, input_ids, lambda: None, vocab_size)


def _is_known(thing: Any, kind: str) -> bool:
    """Whether nothing of it has to be tried out; raises where it is known to remember."""
    if type(thing) is ReplayedProcessor or any(getattr(x, "is_stateless", 0) is True for x in (thing, _asked(thing))):
        return True
    if is_listed(thing, STATEFUL):
        raise _remembers(thing, kind)
    return forgets(thing)


def _asked(thing: Any) -> Any:
    """The function that a processor is as good as, or the thing itself."""
    is_prefix = type(thing).__name__ == "PrefixConstrainedLogitsProcessor"
    return getattr(thing, "_prefix_allowed_tokens_fn", thing) if is_prefix else thing


def _name(thing: Any) -> str:
    if _asked(thing) is not thing:
        return f"of `prefix_allowed_tokens_fn={_name(_asked(thing))}`"
    return str(getattr(thing, "__name__", type(thing).__name__))


def _remembers(thing: Any, kind: str, how: str = "keeps state between calls") -> UnsupportedGenerationError:
    replayed = "or let `osd_hf.ReplayedProcessor` make it, which serves a processor with a memory exactly; "
    return UnsupportedGenerationError(
        f"The {kind} {_name(thing)} {how}, and assisted generation also calls it on drafted tokens that are never "
        f"emitted. Derive what it needs from `input_ids` instead; {replayed if kind == _PROCESSOR else ''}or, where "
        "its calls depend on their arguments alone, say so by an attribute `is_stateless = True` on it."
    )


@torch.no_grad()
def _try_out(
    thing: Any, kind: str, input_ids: torch.Tensor, scores: Callable[[], torch.Tensor | None], vocab_size: int
) -> TriedOut:
    def ask(ids: torch.Tensor) -> Any:
        answer = thing(ids, scores())
        return answer.clone() if isinstance(answer, torch.Tensor) else answer

    try:
        before = Reachable(thing, keep=True)
        try:
            first = ask(input_ids)
            settled = Reachable(thing)  # what is built when it is first asked for is there by now
            for token in _named_tokens(settled, vocab_size):
                with contextlib.suppress(Exception):  # no answer goes on like that
                    ask(torch.cat([input_ids, input_ids.new_full((input_ids.shape[0], 1), token)], dim=-1))
            same = _answers_alike(ask, input_ids, first) and Reachable(thing) == settled
        finally:
            if _has_changed(thing, before):  # otherwise other threads may be using what is shared
                before.put_back()
    except CannotLookThrough as error:
        how = f"may keep state between calls: it reaches {error}, which cannot be looked through"
        raise _remembers(thing, kind, how) from None
    except Exception as error:
        raise UnsupportedGenerationError(
            f"The {kind} {_name(thing)} cannot be asked about drafted tokens ({error!r}): it must decide from "
            f"`input_ids` {'and `scores` alone' if kind == _PROCESSOR else 'alone, `scores` being None'}."
        ) from error
    if not same:
        raise _remembers(thing, kind)
    return TriedOut(thing, before, settled)


def _has_changed(thing: Any, *snapshots: Reachable) -> bool:
    """Whether it is as in none of these snapshots, or cannot be looked through any more."""
    try:
        now = Reachable(thing)
    except CannotLookThrough:
        return True
    return now not in snapshots


def _named_tokens(snapshot: Reachable, vocab_size: int) -> list[int]:
    """Numbers that code and attributes name and that may be tokens: what waits for one, such as the end of a thought,
    shows its memory only there."""

    found: set[int] = set()
    todo = [*snapshot.trail]
    while todo:
        fact = todo.pop()
        if type(fact) is int and 0 <= fact < vocab_size:
            found.add(fact)
        elif type(fact) is bytes and len(fact) <= MOST_WRITTEN:  # a plain container, written down
            with contextlib.suppress(ValueError, EOFError, TypeError):
                todo.append(marshal.loads(fact))
        elif isinstance(fact, dict):
            todo += (*fact, *fact.values())
        elif isinstance(fact, list | tuple | set | frozenset):
            todo += fact
    return sorted(found, reverse=True)[:MOST_NAMED]  # special tokens have large numbers, lengths have small ones


def _answers_alike(ask: Callable[[torch.Tensor], Any], input_ids: torch.Tensor, first: Any) -> bool:
    """Whether questions that are asked again, after others, get the same answers."""
    asked = [(input_ids, first)]
    for parent in (0, 0, -1):
        ids, answer = asked[parent]
        token = _likely_token(answer, ids, len(asked))
        if token is None:
            continue
        longer = torch.cat([ids, token.to(ids).expand(ids.shape[0], 1)], dim=-1)
        with contextlib.suppress(Exception):  # no answer goes on like that
            asked.append((longer, ask(longer)))
    return all(_equal(answer, ask(ids)) for ids, answer in reversed(asked))


def _likely_token(answer: Any, ids: torch.Tensor, number: int) -> torch.Tensor | None:
    """A token that the answer of a processor allows; of a criterion's answer, one of the prompt."""
    if not isinstance(answer, torch.Tensor) or not answer.is_floating_point():
        return ids[0, -(number % ids.shape[1])] if ids.shape[1] else None
    allowed = answer[0].isfinite().nonzero()[:, 0]
    return allowed[number * 7919 % len(allowed)] if len(allowed) else None


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


# --- a processor with a memory --------------------------------------------------------------------------------------


class ReplayedProcessor(LogitsProcessor):
    """
    Serves a logits processor that remembers the tokens it has seen, such as the matcher of a grammar: before each call
    it is brought to where the sequence stands. Draft and target ask it in turns, also about tokens that are rejected
    later. Every request begins with a fresh one.

    ```python
    grammar = ReplayedProcessor(lambda: xgrammar.contrib.hf.LogitsProcessor(compiled))
    assistant.generate(**inputs, logits_processor=[grammar])
    ```

    What the processor remembers must follow from the tokens alone: calls that are repeated get another row of scores.

    Args:
        make (`Callable[[], LogitsProcessor]`):
            Makes a processor as it is when an answer begins: its first call is about the prompt, each later one about
            a token more.
        take_back (`Callable[[LogitsProcessor, int], object]`, *optional*):
            Makes a processor forget as many of its last calls, the very first excepted. Without it another one is made
            and called again for each token of the answer so far, which takes the longer the longer the answer.
    """

    def __init__(
        self, make: Callable[[], Callable[..., torch.Tensor]], take_back: Callable[[Any, int], object] | None = None
    ) -> None:
        self.make = make
        self.take_back = take_back
        self._starts_at: int | None = None  # tokens of the prompt, where a request says so
        self._processor: Callable[..., torch.Tensor] | None = None
        self._first = 0  # tokens at the first call of the processor
        self._seen = torch.zeros(1, 0, dtype=torch.long)  # what its last call was about

    def begin(self, prompt_tokens: int) -> ReplayedProcessor:
        """The same for one request, which nothing outside of it shares."""
        own = ReplayedProcessor(self.make, self.take_back)
        own._starts_at = prompt_tokens
        return own

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length, seen = input_ids.shape[1], self._seen
        common = _common(input_ids, seen)
        first = self._first if self._starts_at is None else min(self._starts_at, length)
        if self._starts_at is None and (common < first or length > seen.shape[1] + 1):
            first = length  # outside of an assisted request: another prompt
        known = min(common, length - 1)  # calls about more than these tokens are to be forgotten
        processor, self._processor = self._processor, None  # after an error its state is anybody's guess
        excess = seen.shape[1] - known
        if processor is not None and first == self._first and known >= first and (not excess or self.take_back):
            if excess and self.take_back is not None:
                self.take_back(processor, excess)
        else:
            processor, known = self.make(), first - 1
        for end in range(known + 1, length):
            processor(input_ids[:, :end], scores.clone())
        processed = processor(input_ids, scores)
        self._processor, self._first, self._seen = processor, first, input_ids.clone()
        return processed


def _common(a: torch.Tensor, b: torch.Tensor) -> int:
    """Number of tokens with which both begin."""
    length = min(a.shape[1], b.shape[1])
    if length == 0 or a.shape[0] != b.shape[0]:
        return 0
    same = (a[:, :length] == b[:, :length].to(a.device)).all(0)
    return length if bool(same.all()) else int(same.int().argmin())
