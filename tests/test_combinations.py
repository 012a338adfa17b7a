"""Combinations of logits processors and settings, drawn at random: the answer is the target's own."""

import functools
import re
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_lossless import greedy_divergences
from test_processors import Remembering, allowed, forbids_a_token, opted_in, stateless
from transformers import LogitsProcessor, LogitsProcessorList, WatermarkingConfig

from osd_hf import OnlineAssistant

TOKENS = st.integers(3, models.VOCAB - 1)
TEMPERED = {
    "temperature": st.floats(0.3, 2.0),
    "top_k": st.integers(2, 20),
    "top_p": st.floats(0.5, 0.99),
    "min_p": st.floats(0.01, 0.2),
    "typical_p": st.floats(0.3, 0.95),
    "epsilon_cutoff": st.floats(0.001, 0.05),
    "eta_cutoff": st.floats(0.001, 0.05),
}
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.floats(0.7, 2.0),
    "no_repeat_ngram_size": st.integers(2, 4),
    "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=3),
    "min_length": st.integers(1, 20),
    "min_new_tokens": st.integers(1, 12),
    "forced_bos_token_id": TOKENS,
    "forced_eos_token_id": st.just(2),
    "suppress_tokens": st.lists(TOKENS, min_size=1, max_size=5),
    "begin_suppress_tokens": st.lists(TOKENS, min_size=1, max_size=5),
    "sequence_bias": st.lists(
        st.tuples(TOKENS, st.floats(-9, 9)).map(lambda p: [[p[0]], p[1]]), min_size=1, max_size=4
    ),
    "exponential_decay_length_penalty": st.tuples(st.integers(1, 6), st.floats(1.0, 1.5)),
    "watermarking_config": st.builds(WatermarkingConfig, bias=st.floats(0.5, 3.0), seeding_scheme=st.just("lefthash")),
    "renormalize_logits": st.booleans(),
    "remove_invalid_values": st.booleans(),
    "eos_token_id": TOKENS,
}


@functools.cache
def made_assistant() -> OnlineAssistant:
    often = {"update_strategy": "interval", "update_interval": 4, "steps_per_update": 1, "learning_rate": 3e-3}
    return models.assistant_of(*models.pair(noise=0.1), **often)


FOREIGN: dict[str, Callable[[], Any]] = {
    "stateless": lambda: forbids_a_token, "opted in": lambda: opted_in(True), "unknown": Remembering,
}  # fmt: skip
FUNCTIONS = {"stateless": stateless(functools.partial(allowed)), "unknown": allowed}


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], list[str], str | None]:
    names = draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=4, unique=True))
    foreign = st.sampled_from(["stateless", "opted in", "opted in", "unknown"])
    function = st.one_of(st.none(), st.none(), st.sampled_from(sorted(FUNCTIONS)))
    chosen = {name: draw(SETTINGS[name]) for name in names}
    if "exponential_decay_length_penalty" in chosen:
        chosen.setdefault("eos_token_id", 2)  # without one it cannot be computed
    if chosen.get("forced_bos_token_id") in chosen.get("suppress_tokens", ()):
        del chosen["suppress_tokens"]  # transformers refuses both for one token
    return chosen, draw(st.lists(foreign, max_size=2, unique=True)), draw(function)


def fitting(chosen: dict[str, Any], prompt_tokens: int, max_new_tokens: int) -> dict[str, Any]:
    """Settings whose least length is no longer than the answer may be, which `generate` warns of."""
    most = {"min_length": prompt_tokens + max_new_tokens, "min_new_tokens": max_new_tokens}
    return {name: min(value, most[name]) if name in most else value for name, value in chosen.items()} | {
        "max_new_tokens": max_new_tokens
    }


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(requests(), st.integers(0, 4))
def test_a_greedy_answer_is_the_targets_own(drawn: Any, number: int) -> None:
    chosen, foreign, function = drawn
    assistant, ids = made_assistant(), models.prompts(5)[number]

    def asked() -> dict[str, Any]:
        kwargs = {"logits_processor": [FOREIGN[name]() for name in foreign], **fitting(chosen, ids.shape[1], 14)}
        return kwargs if function is None else kwargs | {"prefix_allowed_tokens_fn": FUNCTIONS[function]}

    try:
        answer = assistant.generate(ids, attention_mask=torch.ones_like(ids), **asked())
    except Exception as error:  # noqa: BLE001 - settings that leave none of the allowed tokens fail the target as well
        with pytest.raises(type(error), match=re.escape(str(error).partition("\n")[0])):
            assistant.target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **asked())
        return
    wrong, ties = greedy_divergences(assistant.target, lambda ids, **_: answer, [(ids, asked())])
    assert wrong == []


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(requests(), st.fixed_dictionaries({}, optional=TEMPERED), st.integers(0, 4))
def test_sampled_tokens_are_verified_with_the_targets_own_rows(drawn: Any, tempered: Any, number: int) -> None:
    chosen, foreign, _ = drawn
    assistant, ids = made_assistant(), models.prompts(5)[number]
    target = assistant.target
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": True, **tempered}
    kwargs |= fitting(chosen, ids.shape[1], 8) | {"output_scores": True, "return_dict_in_generate": True}
    torch.manual_seed(number)
    output = assistant.generate(ids, logits_processor=[FOREIGN[name]() for name in foreign], **kwargs)
    answer = output.sequences[0, ids.shape[1] :].tolist()
    assert len(output.scores) == len(answer)

    class Said(LogitsProcessor):  # type: ignore[misc]
        """Makes the target alone say the same answer, and keeps the rows that it would have drawn from."""

        rows: list[torch.Tensor] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.rows.append(scores.clone())
            said = torch.full_like(scores, -torch.inf)
            said[:, answer[len(self.rows) - 1]] = 0.0
            return said

    class Alone(type(target)):  # type: ignore[misc]
        def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
            return LogitsProcessorList([*super()._get_logits_processor(*args, **kwargs), said])

    said, cls = Said(), type(target)
    said.rows = []
    target.__class__ = Alone
    try:
        target.generate(ids, logits_processor=[FOREIGN[name]() for name in foreign], **kwargs)
    finally:
        target.__class__ = cls
    for ours, alone in zip(output.scores, said.rows, strict=True):
        p, q = ours.double().softmax(-1), alone.double().softmax(-1)
        # A cut at a probability may fall otherwise for a token that lies on it to rounding.
        if torch.equal(ours.isfinite(), alone.isfinite()):
            assert float((p - q).abs().sum()) < 1e-3
        else:
            assert float(torch.cat([p[~alone.isfinite()], q[~ours.isfinite()]]).max()) < 0.2
