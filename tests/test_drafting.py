"""The lean candidate generator: what it drafts and hands to the loop, and when it leaves that to the stock one."""

import copy
import logging
from typing import Any

import models
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from osd_hf import OnlineAssistant, OnlineConfig, capture_traces, replay
from osd_hf.acceptance import AcceptanceStats
from osd_hf.decoding.draft_length import AutoPace, FixedPace
from osd_hf.decoding.forward import DraftForward
from osd_hf.decoding.generator import LeanCandidateGenerator
from osd_hf.errors import ConfigError
from osd_hf.trace import Trace


def assistant_of(target: Any, draft: Any, **settings: Any) -> OnlineAssistant:
    settings = {
        "num_assistant_tokens": 5,
        "update_strategy": "manual",
        "gate": False,
        **settings,
    }  # without the gate each update is a version
    return OnlineAssistant(target, draft, config=OnlineConfig(**settings))


def answered(assistant: OnlineAssistant, ids: torch.Tensor, **settings: Any) -> tuple[Any, Trace]:
    """What `generate` returned, and the trace of the request."""
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20, **settings}
    traces: list[Trace] = []
    with capture_traces(assistant.target, traces.append):
        output = assistant.generate(ids, **settings)
    assert len(traces) == 1
    return output, traces[0]


def alone(target: Any, ids: torch.Tensor, **settings: Any) -> Any:
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20, **settings}
    return target.generate(ids, **settings)


def padded(ids: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt with padding on its left, and the mask."""
    more = torch.cat([torch.zeros(1, padding, dtype=torch.long), ids], dim=1)
    return more, (torch.arange(more.shape[1]) >= padding).long()[None]


class Calls:
    """The generators whose candidates were asked for, with what they gave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        for cls in (AssistedCandidateGenerator, LeanCandidateGenerator):
            monkeypatch.setattr(cls, "get_candidates", self._noting(cls.get_candidates))

    def _noting(self, propose: Any) -> Any:
        def get_candidates(generator: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            ids, logits = propose(generator, input_ids, **kwargs)
            self.seen.append((generator, input_ids.clone(), ids.clone(), None if logits is None else logits.clone()))
            return ids, logits

        return get_candidates

    @property
    def kinds(self) -> set[type]:
        return {type(generator) for generator, *_ in self.seen}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


# --- counts ---------------------------------------------------------------------------------------------------------


def test_drafting_ends_behind_eos() -> None:
    target, draft = models.scripted([3, 4, 5, 6, 7, 8], 4), models.scripted([3, 2, 5, 6, 7, 8], 4)
    assistant = assistant_of(target, draft)
    _, trace = answered(assistant, models.prompt(4, vocab_size=16), eos_token_id=[2, 9], max_new_tokens=6)
    assert [r.drafted_ids.tolist() for r in trace.rounds] == [[3, 2], [5, 6, 7]]
    assert trace.completion_ids.tolist() == [3, 4, 5, 6, 7, 8]


# --- streaming ------------------------------------------------------------------------------------------------------


class Listener:
    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.ends == 0
        self.chunks.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk]


def streamed(generate: Any, ids: torch.Tensor, **settings: Any) -> Listener:
    listener = Listener()
    generate(ids, attention_mask=torch.ones_like(ids), streamer=listener, max_new_tokens=20, **settings)
    assert listener.ends == 1
    return listener


@pytest.mark.parametrize(("architecture", "k"), [("llama", 1), ("llama", 5), ("gemma3", 5), ("t5", 5)])
def test_a_streamer_gets_the_chunks_that_transformers_generator_gives(architecture: str, k: int) -> None:
    target, draft = models.pair(architecture, noise=0.06, **models.SHALLOW[architecture])
    assistant = assistant_of(target, draft, num_assistant_tokens=k)
    for name, value in (("num_assistant_tokens", k), ("assistant_confidence_threshold", 0.0)):
        setattr(draft.generation_config, name, value)
    draft.generation_config.num_assistant_tokens_schedule = "constant"

    def stock(*args: Any, **kwargs: Any) -> Any:
        with capture_traces(target, lambda trace: None):
            return target.generate(*args, assistant_model=draft, **kwargs)

    sizes = set()
    for ids in models.prompts(1):
        answer = alone(target, ids)[0].tolist()
        token = answer[-7]

        class EndsWith(StoppingCriteria):  # type: ignore[misc]
            is_stateless = True

            def __call__(self, ids: torch.Tensor, scores: Any, token: int = token, **kwargs: Any) -> torch.Tensor:
                return ids[:, -1] == token

        stop = StoppingCriteriaList([EndsWith()])
        for settings in ({}, {"eos_token_id": answer[-4]}, {"stopping_criteria": stop}):
            settings["do_sample"] = False
            ours, theirs, own = (
                streamed(generate, ids, **settings) for generate in (assistant.generate, stock, target.generate)
            )
            assert ours.chunks == theirs.chunks
            assert ours.tokens == own.tokens
            sizes |= {len(chunk) for chunk in ours.chunks[1:]}
    assert len(sizes) > 1


# --- sampled drafts -------------------------------------------------------------------------------------------------


class Penalize(LogitsProcessor):  # type: ignore[misc]
    """A caller's own processor, in place as some are."""

    is_stateless = True

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.token] -= 5.0 + float(input_ids[0, -1] % 3)
        return scores


SAMPLED: dict[str, dict[str, Any]] = {
    "as they are": {"top_k": 0},
    "temperature": {"temperature": 1.7, "top_k": 0},
    "top_k": {"top_k": 3},
    "top_p": {"top_k": 0, "top_p": 0.7},
    "penalty": {"top_k": 0, "repetition_penalty": 1.6},
    "own processor": {"logits_processor": LogitsProcessorList([Penalize(5)]), "temperature": 0.8, "top_k": 0},
    "all": {
        "temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3,
        "logits_processor": LogitsProcessorList([Penalize(7)]),
    },
}  # fmt: skip


def processed(draft: Any, ids: torch.Tensor, prompt: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """A draft's next logits as transformers' own sampling would process them, by a forward of their own."""
    config = copy.deepcopy(draft.generation_config)
    settings = {"do_sample": True, **settings}
    own = settings.pop("logits_processor", LogitsProcessorList())
    config.update(**settings)
    processors = draft._get_logits_processor(
        config,
        input_ids_seq_length=prompt.shape[1],
        encoder_input_ids=prompt,
        logits_processor=own,
        device="cpu",
        model_kwargs={},
    )
    with torch.no_grad():
        logits = draft(ids).logits[:, -1].float()
    return processors(ids, logits)


@pytest.mark.parametrize("name", SAMPLED)
def test_the_logits_are_those_that_tokens_were_drawn_from(
    name: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models.pair("llama")
    assistant = assistant_of(target, draft, num_assistant_tokens=3)
    drawn: list[tuple[torch.Tensor, int]] = []
    multinomial = torch.multinomial

    def noting(probabilities: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        chosen = multinomial(probabilities, *args, **kwargs)
        if probabilities.shape[0] == 1 and chosen.numel() == 1:
            drawn.append((probabilities[0].clone(), int(chosen)))
        return chosen

    monkeypatch.setattr(torch, "multinomial", noting)
    ids = models.prompt()
    answered(assistant, ids, do_sample=True, max_new_tokens=12, **SAMPLED[name])
    assert calls.kinds == {LeanCandidateGenerator}
    draws = iter(drawn)
    checked = 0
    for _, before, after, logits in calls.seen:
        if logits is None:
            continue
        tokens = after[0, before.shape[1] :].tolist()
        assert logits.dtype == torch.float32
        assert logits.shape == (1, len(tokens), models.VOCAB)
        for i, token in enumerate(tokens):
            # The loop draws as well, from the target's rows.
            probabilities, chosen = next(d for d in draws if torch.equal(d[0], logits[0, i].softmax(-1)))
            assert chosen == token
            own = processed(assistant.draft, after[:, : before.shape[1] + i], ids, SAMPLED[name])
            torch.testing.assert_close(logits[:, i], own, atol=1e-4, rtol=1e-4)
            checked += 1
    assert checked >= 6


@pytest.mark.parametrize("width", [models.VOCAB - 4, models.VOCAB + 4])
def test_logits_have_the_targets_width(width: int) -> None:
    draft = models.double(models.build("llama", vocab_size=width))
    ids = models.prompt(vocab_size=models.VOCAB - 4)
    generator = LeanCandidateGenerator(
        DraftForward(draft),
        FixedPace(4),
        ids,
        attention_mask=None,
        logits_processor=LogitsProcessorList(),
        do_sample=True,
        max_length=30,
        max_positions=None,
        eos_token_ids=frozenset(),
        vocab_size=models.VOCAB,
    )
    candidates, logits = generator.get_candidates(ids)
    assert candidates.shape == (1, 10)
    assert logits is not None
    assert logits.shape == (1, 4, models.VOCAB)
    assert (candidates[0, 6:] < min(width, models.VOCAB)).all()
    with torch.no_grad():
        own = draft(candidates[:, :-1]).logits[:, 5:].float()
    both = min(width, models.VOCAB)
    torch.testing.assert_close(logits[..., :both], own[..., :both], atol=1e-10, rtol=models.rounding(2))
    assert (logits[..., both:] == -torch.inf).all()


# --- positions, encoders, fallbacks ---------------------------------------------------------------------------------

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
    assistant = assistant_of(target, with_few_positions(target, architecture))
    ids = models.prompt(6)
    output, trace = answered(assistant, ids, max_new_tokens=30, do_sample=sampled)
    assert len(trace) == 30
    if not sampled:
        assert torch.equal(output, alone(target, ids, max_new_tokens=30))
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


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_behind_a_prompt_beyond_its_positions_a_draft_is_silent(architecture: str) -> None:
    target = models.build(architecture)
    assistant = assistant_of(target, with_few_positions(target, architecture))
    ids = models.prompt(LIMIT + 4)
    with models.ForwardCounter(assistant.draft) as forwards:
        output, trace = answered(assistant, ids)
    assert forwards.count == 0
    assert torch.equal(output, alone(target, ids))
    assert all(len(r.drafted_ids) == 0 for r in trace.rounds)


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_the_draft_does_not_see_the_padding_of_a_source(architecture: str) -> None:
    target = models.build(architecture)
    assistant = assistant_of(target, copy.deepcopy(target))
    ids = torch.cat([models.prompt(5), torch.zeros(1, 4, dtype=torch.long)], dim=1)
    mask = (torch.arange(9) < 5).long()[None]
    output, trace = answered(assistant, ids, attention_mask=mask)
    assert torch.equal(output, alone(target, ids, attention_mask=mask))
    assert AcceptanceStats.from_trace(trace).alpha == 1.0


def test_for_a_source_beyond_its_positions_a_draft_is_silent() -> None:
    target = models.build("bart")
    assistant = assistant_of(target, with_few_positions(target, "bart"))
    ids = models.prompt(LIMIT + 6)
    with models.ForwardCounter(assistant.draft, assistant.draft.get_encoder()) as forwards:
        for do_sample in (False, True):
            output, trace = answered(assistant, ids, do_sample=do_sample)
            assert len(trace) == 20
            assert do_sample or torch.equal(output, alone(target, ids))
    assert forwards.count == 0
    assert assistant.stats.drafted == 0


def test_a_schedule_of_the_drafts_own_is_left_to_the_stock_generator(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = models.pair()
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    assistant = assistant_of(target, draft, num_assistant_tokens=None)
    for ids in models.prompts(3):
        output, _ = answered(assistant, ids)
        assert torch.equal(output, alone(target, ids))
    assert calls.kinds == {AssistedCandidateGenerator}
    assert caplog.text.count("own generator") == 1
    assert "'heuristic'" in caplog.text


def test_none_reads_the_drafts_own_constant_k_and_threshold(calls: Calls) -> None:
    target, draft = models.pair(k=3)
    assistant = assistant_of(target, draft, num_assistant_tokens=None)
    _, trace = answered(assistant, models.prompt())
    assert calls.kinds == {LeanCandidateGenerator}
    assert max(len(r.drafted_ids) for r in trace.rounds) == 3
    assistant.draft.generation_config.num_assistant_tokens = 6
    assistant.draft.generation_config.assistant_confidence_threshold = 0.9
    output, trace = answered(assistant, models.prompt())
    assert torch.equal(output, alone(target, models.prompt()))
    lengths = {len(r.drafted_ids) for r in trace.rounds[:-2]}
    assert min(lengths) < 6  # some ended by confidence


def test_attached_drafts_leanly_with_the_assistants_draft_alone(calls: Calls) -> None:
    target, draft = models.pair()
    assistant = assistant_of(target, draft)
    ids = models.prompt()
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
    with assistant.attached():
        own = target.generate(ids, assistant_model=assistant.draft, **settings)
        assert calls.kinds == {LeanCandidateGenerator}
        calls.seen.clear()
        other = target.generate(ids, assistant_model=draft, **settings)
        assert calls.kinds == {AssistedCandidateGenerator}
    calls.seen.clear()
    outside = target.generate(ids, assistant_model=assistant.draft, **settings)
    assert calls.kinds == {AssistedCandidateGenerator}
    assert torch.equal(own, other) and torch.equal(own, outside)


# --- adapters -------------------------------------------------------------------------------------------------------

peft_warns = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it


@peft_warns
def test_a_lora_draft_is_served_merged_after_each_update(calls: Calls) -> None:
    from peft import LoraConfig, get_peft_model

    target, draft = models.pair(noise=0.05, num_hidden_layers=1)
    wrapped = get_peft_model(draft, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=2))
    settings = {"update_interval": 2, "steps_per_update": 2, "optimizer": "adamw", "learning_rate": 0.05}
    assistant = assistant_of(target, wrapped, update_strategy="interval", weight_average=0.0, **settings)
    seen = []
    for ids in models.prompts(4):
        output, _ = answered(assistant, ids)
        assert torch.equal(output, alone(target, ids))
        master = copy.deepcopy(assistant._learner.updater(None).master).merge_and_unload()
        served = dict(assistant.draft.named_parameters())
        assert served.keys() == dict(master.named_parameters()).keys()
        for name, parameter in master.named_parameters():
            torch.testing.assert_close(served[name], parameter, atol=1e-6, rtol=1e-6)
        seen.append(served["model.layers.0.self_attn.q_proj.weight"].clone())
    assert assistant.version == 2
    assert not torch.equal(seen[0], seen[-1])
    assert calls.kinds == {LeanCandidateGenerator}
    for generator, *_ in calls.seen:
        assert assistant.drafts.owns(generator.forward.draft)  # the base until the first update, then the learned one
    assert type(assistant.draft) is type(models.build())
    assert not any("lora" in type(m).__module__ or "lora" in name for name, m in assistant.draft.named_modules())


@peft_warns
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # by peft, in the stock generator
def test_an_adapter_that_cannot_be_merged_is_left_to_the_stock_generator(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import PromptTuningConfig, get_peft_model

    target, draft = models.pair(noise=0.05)
    wrapped = get_peft_model(draft, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assistant = assistant_of(target, wrapped)
    for ids in models.prompts(2):
        output, _ = answered(assistant, ids)
        assert torch.equal(output, alone(target, ids))
    assert calls.kinds == {AssistedCandidateGenerator}
    assert caplog.text.count("own generator") == 1
    assert "adapter cannot be merged" in caplog.text


# --- when speculation loses -----------------------------------------------------------------------------------------


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request is one that is not worth a draft."""
    monkeypatch.setattr(AutoPace, "is_plain", lambda self: True)


def plain_assistant(architecture: str, **settings: Any) -> OnlineAssistant:
    target, draft = map(models.double, models.pair(architecture))
    return assistant_of(target, draft, num_assistant_tokens="auto", **settings)


def test_while_speculation_loses_most_requests_are_plain(calls: Calls) -> None:
    target, draft = models.pair(num_hidden_layers=1)
    assistant = assistant_of(target, draft, num_assistant_tokens="auto", candidates="draft")
    assert assistant.drafting is not None
    assistant.drafting.clock = models.ForwardTime({target: 1.0, assistant.draft: 5.0})
    plain = []
    for number in range(40):
        ids = models.prompt(seed=number)
        calls.seen.clear()
        output, _ = answered(assistant, ids, max_new_tokens=10)
        assert torch.equal(output, alone(target, ids, max_new_tokens=10))
        plain.append(calls.seen == [])
    plan = assistant.drafting_plan()
    assert plan is not None
    assert not plan.speculates
    assert not plain[0]  # costs are measured
    assert sum(plain[20:]) > 10


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "t5"])
def test_a_plain_request_returns_what_the_target_alone_does(architecture: str, calls: Calls, plainly: None) -> None:
    assistant = plain_assistant(architecture)
    ids = models.prompt()
    settings = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with models.ForwardCounter(assistant.draft) as forwards:
        for extra in ({}, {"repetition_penalty": 1.4}):
            own = alone(assistant.target, ids, **settings, **extra)
            output, trace = answered(assistant, ids, **settings, **extra)
            assert type(output) is type(own)
            assert torch.equal(output.sequences, own.sequences)
            for name in ("scores", "logits"):
                assert len(getattr(output, name)) == len(getattr(own, name)) == 20
                ours, theirs = (torch.cat(getattr(each, name)) for each in (output, own))
                torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=models.rounding(2))
            assert len(trace) == 20
    assert forwards.count == 0
    assert calls.seen == []  # not by the assisted loop


def test_plain_requests_stream_and_stop_as_the_target_alone(plainly: None) -> None:
    assistant = plain_assistant("llama")
    tokenizer = models.tokenizer()
    ids = models.prompt()
    answer = alone(assistant.target, ids)[0, 6:].tolist()
    stop = StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] == answer[4]])
    word = tokenizer.convert_ids_to_tokens(answer[3])
    ways: list[dict[str, Any]] = [
        {},
        {"eos_token_id": answer[5]},
        {"stopping_criteria": stop},
        {"stop_strings": [word], "tokenizer": tokenizer},
    ]
    with models.ForwardCounter(assistant.draft) as forwards:
        for settings in ways:
            settings["do_sample"] = False
            ours, own = (streamed(g, ids, **settings) for g in (assistant.generate, assistant.target.generate))
            assert ours.chunks == own.chunks
    assert forwards.count == 0


def test_a_plain_request_draws_as_the_target_alone(plainly: None) -> None:
    assistant = plain_assistant("llama")
    ids = models.prompt()
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": True, "max_new_tokens": 20, "top_k": 10}
    answers = []
    for generate in (assistant.generate, assistant.target.generate):
        torch.manual_seed(1)
        answers.append(generate(ids, **settings))
    assert torch.equal(*answers)


def test_a_draft_learns_from_plain_requests(plainly: None) -> None:
    settings = {"update_interval": 2, "optimizer": "adamw", "learning_rate": 3e-3}
    assistant = plain_assistant("llama", update_strategy="interval", **settings)
    traces = []
    for ids in models.prompts(8):
        _, trace = answered(assistant, ids)
        assert not any(len(r.drafted_ids) for r in trace.rounds)
        traces.append(trace)
    assert assistant.version == 4
    untaught = models.draft_of(assistant.target)
    learned, given = (replay(draft, traces, 5).alpha for draft in (assistant.draft, untaught))
    assert learned > given + 0.1


def test_the_plan_is_there_with_auto_alone(caplog: pytest.LogCaptureFixture) -> None:
    target, draft = models.pair()
    assert assistant_of(target, draft).drafting_plan() is None
    caplog.set_level(logging.WARNING)
    assistant = assistant_of(target, draft, num_assistant_tokens="auto")
    answered(assistant, models.prompt())
    plan = assistant.drafting_plan()
    assert plan is not None
    assert plan.examined > 0
    assert caplog.records == []


# --- what once went wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"prefill_chunk_size": 8}])
def test_a_plain_request_goes_on_from_an_earlier_turns_cache(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoPace, "is_plain", lambda self: True)
    target, draft = models.pair()
    assistant = OnlineAssistant(target, draft, config=OnlineConfig(num_assistant_tokens="auto"))
    settings = {"do_sample": False, "return_dict_in_generate": True}
    answers = []
    for generate in (target.generate, assistant.generate):
        first = generate(models.prompt(3), max_new_tokens=2, **settings)
        ids = torch.cat([first.sequences, models.prompt(15, seed=1)], dim=1)
        mask = torch.ones_like(ids)
        settings_now = {**settings, **more, "attention_mask": mask, "past_key_values": first.past_key_values}
        answers.append(generate(ids, max_new_tokens=12, **settings_now).sequences.tolist())
    assert answers[0] == answers[1]


# --- k of one request -----------------------------------------------------------------------------------------------


def test_a_request_may_have_a_k_of_its_own() -> None:
    target, draft = models.pair()
    assistant = assistant_of(target, draft, num_assistant_tokens=5)
    ids = models.prompt(6)
    for k in (2, 7):
        output, trace = answered(assistant, ids, num_assistant_tokens=k)
        assert trace.rounds[0].num_drafted == k
        assert trace.sampling["num_assistant_tokens"] == k
        assert torch.equal(output, alone(target, ids))
    output, trace = answered(assistant, ids, num_assistant_tokens="auto")
    assert len({r.num_drafted for r in trace.rounds}) > 1
    assert torch.equal(output, alone(target, ids))
    _, trace = answered(assistant, ids)  # and the next one has the configuration's
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
    assistant = assistant_of(*models.pair(), **settings)
    with pytest.raises(ConfigError, match=message):
        assistant.generate(models.prompt(6), max_new_tokens=4, num_assistant_tokens=k)
    assert assistant.stats.num_requests == 0
