"""What transformers' loops are handed, so that an assisted answer ends, and is timed, as one of the target alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from osd_hf.drafting.costs import RoundTime
from osd_hf.logits_processors import ReplayedProcessor

# Arguments of the assisted loop that the plain one does not know.
ASSISTED_ONLY = ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer")
# Arguments of the loop for any request of token ids.
KNOWN_ARGUMENTS = {
    "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "logits_processor",
    "stopping_criteria", "generation_config", "synced_gpus", "streamer", "inputs_tensor", "assistant_model",
    "assistant_tokenizer", "tokenizer",
}  # fmt: skip
# "hybrid" stands in old generation configs, as Gemma's; `generate` takes it for a dynamic cache.
CROPPED_CACHES = (None, "dynamic", "dynamic_full", "offloaded", "hybrid")
# Fields of a generation config that are served, and those that do nothing to an assisted answer.
SERVED = frozenset({
    "assistant_confidence_threshold", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "decoder_start_token_id", "do_sample", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "eos_token_id", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "pad_token_id", "remove_invalid_values",
    "renormalize_logits", "repetition_penalty", "return_dict_in_generate", "sequence_bias", "stop_strings",
    "suppress_tokens", "temperature", "token_healing", "top_h", "top_k", "top_p", "typical_p", "watermarking_config",
})  # fmt: skip
IRRELEVANT = frozenset({
    "assistant_lookbehind", "cache_config", "compile_config", "continuous_batching_config",
    "disable_compile", "diversity_penalty", "early_stopping", "is_assistant", "length_penalty", "low_memory",
    "max_cache_len", "max_matching_ngram_size", "num_beam_groups", "prefill_chunk_size", "target_lookbehind",
    "transformers_version",
})  # fmt: skip
# Classes of transformers whose calls depend on nothing but their arguments: those that `generate` makes from settings.
STATELESS = frozenset({
    "EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "EpsilonLogitsWarper",
    "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper",
    "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper", "WatermarkLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
    "EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria",
})  # fmt: skip


def setting(sources: tuple[Any, ...], name: str) -> Any:
    """
    Return a setting as `generate` resolves it: from the first of these sources that has it.

    Args:
        sources (`tuple`):
            Keywords (a dict) or generation configs, the strongest first. A keyword counts even if it is `None`; a
            `None` in a generation config leaves the setting to the next source.
        name (`str`): The setting.
    """
    for source in sources:
        if isinstance(source, dict):
            if name in source:
                return source[name]
        elif (value := getattr(source, name, None)) is not None:
            return value
    return None


def is_stateless(thing: Any) -> bool:
    """Whether the result of a logits processor or stopping criterion depends only on its arguments: it is one of
    transformers' own, says so itself, or is replayed."""
    if type(thing) is ReplayedProcessor or getattr(asked_function(thing), "is_stateless", None) is True:
        return True
    return type(thing).__module__.split(".")[0] == "transformers" and type(thing).__name__ in STATELESS


def asked_function(thing: Any) -> Any:
    """Return the function of `prefix_allowed_tokens_fn` that a processor calls; other processors themselves."""
    return thing._prefix_allowed_tokens_fn if type(thing) is PrefixConstrainedLogitsProcessor else thing


def of_row(arguments: dict[str, Any], row: int, rows: int) -> dict[str, Any]:
    """Return the arguments of the loop as they would be for one row of a batch."""
    is_of_rows = {
        n for n, value in arguments.items() if isinstance(value, torch.Tensor) and value.shape[:1] == (rows,)
    }
    return {name: value[row : row + 1] if name in is_of_rows else value for name, value in arguments.items()}


# --- where an answer ends -------------------------------------------------------------------------------------------


def bounded(config: Any, criteria: StoppingCriteriaList, begins: int) -> Any:
    """A copy of the generation config of a request whose sequence begins with so many tokens, as the length at which
    the loop ends is moved round by round, and the config is the caller's to see."""
    config = copy.copy(config)
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:  # one of the caller's takes the place of the config's
            config.max_length = max(int(criterion.max_length), begins + 1)
    return config


def looked_at_by_token(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """The criteria that the loop, which looks at all of them once a round, does not end an answer by in time."""
    return StoppingCriteriaList(c for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria))


def end_of(begins: int, candidate_ids: torch.Tensor, criteria: StoppingCriteriaList) -> int | None:
    """Length of a sequence, `(1, tokens)`, up to and with the first of the tokens drafted behind so many that meets a
    criterion; `None` if none does."""
    for length in range(begins + 1, candidate_ids.shape[1] + 1):
        if bool(criteria(candidate_ids[:, :length], None).any()):
            return length
    return None


def cut(
    begins: int, candidates: tuple[torch.Tensor, torch.Tensor | None], criteria: StoppingCriteriaList, config: Any,
    max_length: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """
    The candidates of a round, as [`LeanCandidateGenerator.get_candidates`] returns them, up to the token that meets a
    criterion. The loop cuts what it emits at the length that `config` is told: nothing after that token. The token
    itself stays drafted: left out, it would come too rarely when sampled, as it would have to be drawn from the
    target's distribution after the draft had drawn it from its own.
    """
    candidate_ids, logits = candidates
    end = end_of(begins, candidate_ids, criteria)
    config.max_length = max_length if end is None else end
    return candidate_ids[:, :end], logits if end is None or logits is None else logits[:, : end - begins]


# --- what the target alone takes ------------------------------------------------------------------------------------


class WatchedProcessors(LogitsProcessorList):
    """The target's processors, which are told of each row before they overwrite it in place. A recorder inside the
    list would have its signature inspected at every token."""

    def __init__(self, processors: LogitsProcessorList, seen: Callable[[torch.Tensor], object]) -> None:
        super().__init__(processors)
        self.seen = seen

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.seen(scores)
        processed: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        return processed


def plain_time(times: list[float]) -> RoundTime:
    """The rounds of the target alone, whose rows came at these times in seconds, at least two; the first one read the
    prompt."""
    rounds = len(times) - 1
    return RoundTime(seconds=(times[-1] - times[0]) / rounds, rounds=rounds)
