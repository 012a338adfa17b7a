"""What is drafted in our loop, and which drafts are left to transformers' own."""

import copy
import functools
from typing import Any

import models
import pytest
import torch
from peft import PromptTuningConfig, get_peft_model

from osd_hf import replay
from osd_hf.acceptance import AcceptanceStats
from osd_hf.errors import ConfigError


def test_drafting_ends_behind_eos() -> None:
    target, draft = models.scripted([3, 4, 5, 6, 7, 8], 4), models.scripted([3, 2, 5, 6, 7, 8], 4)
    assistant = models.assistant_of(target, draft)
    _, trace = models.answered(assistant, models.prompt(4, vocab_size=16), eos_token_id=[2, 9], max_new_tokens=6)
    assert [r.drafted_ids.tolist() for r in trace.rounds] == [[3, 2], [5, 6, 7]]
    assert trace.completion_ids.tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_drafted_tokens_are_those_of_a_forward_over_the_whole_sequence(architecture: str) -> None:
    assistant = models.assistant_of(*models.pair(architecture, noise=0.12, **models.SHALLOW[architecture]))
    traces = [models.answered(assistant, ids)[1] for ids in models.prompts(3)]
    assert replay(assistant.draft, traces, 5) == assistant.stats
    assert 0 < assistant.stats.alpha < 1


def streamed(generate: Any, ids: torch.Tensor, **settings: Any) -> models.Streamer:
    streamer = models.Streamer()
    generate(ids, streamer=streamer, **models.greedy(ids, **settings))
    assert streamer.has_ended
    return streamer


@pytest.mark.parametrize(("architecture", "k"), [("llama", 0), ("llama", 1), ("llama", 5), ("gemma3", 5), ("t5", 5)])
def test_a_streamer_gets_the_targets_tokens_round_by_round(architecture: str, k: int) -> None:
    target, draft = models.pair(architecture, noise=0.06, **models.SHALLOW[architecture])
    assistant, sizes, ids = models.assistant_of(target, draft), set(), models.prompts(1)[0]
    drafting = functools.partial(assistant.generate, num_assistant_tokens=k)
    answer = models.alone(target, ids)[0].tolist()
    for settings in ({}, {"eos_token_id": answer[-4]}, {"stopping_criteria": [models.EndsWith(answer[-7:-6])]}):
        ours, own = (streamed(generate, ids, **settings) for generate in (drafting, target.generate))
        assert ours.tokens == own.tokens
        sizes |= {len(chunk) for chunk in ours.chunks[1:]}
    assert (len(sizes) > 1) == (k > 0)


LIMIT = 16
FEW_POSITIONS = {
    "llama": {"max_position_embeddings": LIMIT},
    "gpt2": {"n_positions": LIMIT},
    "opt": {"max_position_embeddings": LIMIT},
    "bart": {"max_position_embeddings": LIMIT},
}


def with_few_positions(target: Any, architecture: str) -> Any:
    """The target's weights in a model with room for `LIMIT` tokens."""
    draft = models.build(architecture, **FEW_POSITIONS[architecture])
    with torch.no_grad():
        for ours, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            ours.copy_(theirs[: ours.shape[0]])
    return draft


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("architecture", FEW_POSITIONS)
def test_a_draft_with_few_positions_drafts_up_to_its_limit(architecture: str, sampled: bool) -> None:
    target = models.build(architecture)
    assistant = models.assistant_of(target, with_few_positions(target, architecture))
    ids = models.prompt(6)
    output, trace = models.answered(assistant, ids, max_new_tokens=30, do_sample=sampled)
    assert len(trace) == 30
    if not sampled:
        assert torch.equal(output, models.alone(target, ids, max_new_tokens=30))
    counts = AcceptanceStats.from_trace(trace)
    assert counts.accepted == counts.examined
    length = len(trace.prompt_ids if trace.decoder_prompt_ids is None else trace.decoder_prompt_ids)
    furthest = 0
    for r in trace.rounds:
        if len(r.drafted_ids):
            furthest = length + len(r.drafted_ids)
        length += r.num_emitted
    assert furthest == LIMIT + 1  # the last drafted token is not fed
    assert [r.num_emitted for r in trace.rounds[-5:]] == [1] * 5


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("architecture", FEW_POSITIONS)
def test_behind_a_prompt_or_source_beyond_its_positions_a_draft_is_silent(architecture: str, sampled: bool) -> None:
    target = models.build(architecture)
    assistant = models.assistant_of(target, with_few_positions(target, architecture))
    ids, draft = models.prompt(LIMIT + 6), assistant.draft
    encoders = [draft.get_encoder()] if draft.config.is_encoder_decoder else []
    with models.ForwardCounter(draft, *encoders) as forwards:
        output, trace = models.answered(assistant, ids, do_sample=sampled)
    assert len(trace) == 20
    assert sampled or torch.equal(output, models.alone(target, ids))
    assert (forwards.count, assistant.stats.drafted) == (0, 0)


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_the_draft_does_not_see_the_padding_of_a_source(architecture: str) -> None:
    target = models.build(architecture)
    assistant = models.assistant_of(target, copy.deepcopy(target))
    ids = torch.cat([models.prompt(5), torch.zeros(1, 4, dtype=torch.long)], dim=1)
    mask = (torch.arange(9) < 5).long()[None]
    output, trace = models.answered(assistant, ids, attention_mask=mask)
    assert torch.equal(output, models.alone(target, ids, attention_mask=mask))
    assert AcceptanceStats.from_trace(trace).alpha == 1.0
    assert trace.prompt_ids.tolist() == ids[0, :5].tolist()


def test_none_reads_the_drafts_own_constant_k_and_threshold() -> None:
    target, draft = models.pair(k=3)
    assistant = models.assistant_of(target, draft, num_assistant_tokens=None)
    _, trace = models.answered(assistant, models.prompt())
    assert max(len(r.drafted_ids) for r in trace.rounds) == 3
    assistant.draft.generation_config.num_assistant_tokens = 6
    assistant.draft.generation_config.assistant_confidence_threshold = 0.9
    output, trace = models.answered(assistant, models.prompt())
    assert torch.equal(output, models.alone(target, models.prompt()))
    lengths = {len(r.drafted_ids) for r in trace.rounds[:-2]}
    assert min(lengths) < 6  # some ended by confidence


@pytest.mark.parametrize("why", ["'heuristic'", "a soft prompt of PEFT"])
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # by peft, in transformers' loop
def test_drafts_with_a_schedule_or_a_soft_prompt_change_no_answer(why: str, caplog: pytest.LogCaptureFixture) -> None:
    target, draft = models.pair(noise=0.05)
    if why == "'heuristic'":
        draft.generation_config.num_assistant_tokens_schedule = "heuristic"
        assistant = models.assistant_of(target, draft, num_assistant_tokens=None)
    else:
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        assistant = models.assistant_of(target, get_peft_model(draft, config))
    for ids in models.prompts(2):
        output, _ = models.answered(assistant, ids)
        assert torch.equal(output, models.alone(target, ids))
    assert caplog.text.count(why) == 1


def test_a_draft_learns_from_plain_requests() -> None:
    settings = {"update_interval": 2, "optimizer": "adamw", "learning_rate": 3e-3}
    assistant = models.assistant_of(*models.pair(), update_strategy="interval", **settings)
    traces = []
    for ids in models.prompts(8):
        _, trace = models.answered(assistant, ids, num_assistant_tokens=0)
        assert not any(len(r.drafted_ids) for r in trace.rounds)
        traces.append(trace)
    assert assistant.version == 4
    untaught = models.draft_of(assistant.target)
    learned, given = (replay(draft, traces, 5).alpha for draft in (assistant.draft, untaught))
    assert learned > given + 0.1


def test_a_request_may_have_a_k_of_its_own() -> None:
    target, draft = models.pair()
    assistant = models.assistant_of(target, draft, num_assistant_tokens=5)
    ids = models.prompt(6)
    for k in (2, 7):
        output, trace = models.answered(assistant, ids, num_assistant_tokens=k)
        assert trace.rounds[0].num_drafted == k
        assert trace.sampling["num_assistant_tokens"] == k
        assert torch.equal(output, models.alone(target, ids))
    output, trace = models.answered(assistant, ids, num_assistant_tokens="auto")
    assert trace.sampling["num_assistant_tokens"] == "auto"
    assert torch.equal(output, models.alone(target, ids))
    _, trace = models.answered(assistant, ids)  # and the next one has the configuration's
    assert trace.rounds[0].num_drafted == 5
    assert "num_assistant_tokens" not in trace.sampling


@pytest.mark.parametrize(
    ("settings", "k", "message"),
    [
        ({}, -1, "`num_assistant_tokens` must be an integer of at least 1"),
        ({}, "many", "`num_assistant_tokens` must be an integer of at least 1"),
        ({"learn_from": "corrections"}, "auto", "needs a fixed `num_assistant_tokens`"),
    ],
)
def test_a_k_that_cannot_be_had_is_refused(settings: dict[str, Any], k: Any, message: str) -> None:
    assistant = models.assistant_of(*models.pair(), **settings)
    with pytest.raises(ConfigError, match=message):
        assistant.generate(models.prompt(6), max_new_tokens=4, num_assistant_tokens=k)
    assert assistant.stats.num_requests == 0


def test_a_draft_that_cannot_begin_is_tried_once_and_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = models.pair("t5", **models.SHALLOW["t5"])
    assistant, ids, tries = models.assistant_of(target, draft), models.prompts(1)[0], []

    def fail(*args: Any, **kwargs: Any) -> None:
        tries.append(1)
        raise RuntimeError("no memory for the encoder")

    monkeypatch.setattr(assistant.draft.get_encoder(), "forward", fail)
    output, trace = models.answered(assistant, ids)
    assert torch.equal(output, models.alone(target, ids))
    assert len(tries) == 1 < len(trace.rounds)
    assert caplog.text.count("no memory for the encoder") == 1
