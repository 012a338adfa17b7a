"""Draft heads: they start as the draft that they were made of, draft what replay computes, and change no answer."""

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lossless import PAIRS, answer_distribution, fits, sampled_answers, small_pair
from test_lossless import VOCAB as SMALL_VOCAB
from test_models import family
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig
from transformers.cache_utils import MtpCache
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import MtpModel

from osd_hf import (
    AcceptanceStats,
    CorrectionStore,
    DistillConfig,
    OnlineAssistant,
    OnlineConfig,
    Trace,
    capture_traces,
    distill,
    replay,
    simulate,
)
from osd_hf.draft_head import DraftHead, DraftHeadConfig, half, keep_states, load_head
from osd_hf.errors import ConfigError, UnsupportedGenerationError, UnsupportedModelError
from osd_hf.layers import built_in_head, copy_layers, new_eagle3_head, new_head, save_built_in
from osd_hf.learning.updater import Updater, make_optimizers
from osd_hf.learning.weights import shared_ends
from osd_hf.loading import load_draft
from osd_hf.recording import record_traces
from osd_hf.replay import completion_logits, redraft
from osd_hf.trace import bare_trace

FAMILIES = (*models.DECODER_ONLY, "qwen2", "mixtral")
FIXED = OnlineConfig(num_assistant_tokens=4, update_strategy="manual", gate=False)
LEARNING = OnlineConfig(
    num_assistant_tokens=4, update_strategy="interval", update_interval=2, steps_per_update=2, learning_rate=3e-3,
    gate=False,
)  # fmt: skip


def head_of(target: Any, layers: tuple[int, ...] = (0,), states: tuple[int, ...] = (-1,), noise: float = 0.0) -> Any:
    """A head of one layer; with noise, it reads the states."""
    head = DraftHead.from_draft(copy_layers(target, list(layers)), target, states)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for projection in (head.input_proj, head.state_proj):
            if projection is not None:
                projection.weight.add_(noise * torch.randn(projection.weight.shape, generator=generator))
    return models.fixed_k(head, 4)


def prompts(count: int = 4, length: int = 7) -> list[torch.Tensor]:
    return list(torch.randint(3, models.VOCAB, (count, 1, length)))


def answered(assistant: OnlineAssistant, ids: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, list[Trace]]:
    seen: list[Trace] = []
    mask = settings.pop("attention_mask", torch.ones_like(ids))
    output = assistant.generate(ids, attention_mask=mask, on_trace=seen.append, **{"do_sample": False, **settings})
    return output, seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_starts_as_the_draft_that_it_was_made_of(family: str) -> None:
    target = models.build(family)
    cut = copy_layers(target, [0])
    traces = list(record_traces(target, [ids[0].tolist() for ids in prompts()], max_new_tokens=12))
    head = DraftHead.from_draft(cut, target)
    expected, found = completion_logits(cut, traces), completion_logits(head, traces)
    assert torch.allclose(expected, found, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("states", [(-1,), (0, 1, 2)])
def test_greedy_answers_are_the_targets_while_a_head_learns(family: str, states: tuple[int, ...]) -> None:
    target = models.build(family)
    with OnlineAssistant(target, head_of(target, states=states, noise=0.05), config=LEARNING) as assistant:
        for ids in prompts(6):
            output, _ = answered(assistant, ids, max_new_tokens=24)
            assert torch.equal(output, target.generate(ids, do_sample=False, max_new_tokens=24))
        assert assistant.learning_error is None
        assert len(assistant.decisions) == 3
        assert assistant.stats.drafted


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch_are_the_targets(family: str) -> None:
    target = models.build(family)
    ids = torch.randint(3, models.VOCAB, (4, 9))
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 3, 1, 5)):
        ids[row, :pad], mask[row, :pad] = 0, 0
    with OnlineAssistant(target, head_of(target, noise=0.05), config=LEARNING) as assistant:
        for _ in range(2):
            output, seen = answered(assistant, ids, attention_mask=mask, max_new_tokens=20)
            assert torch.equal(output, target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20))
        assert len(seen) == 4 and all(sum(r.num_drafted for r in trace.rounds) for trace in seen)


@pytest.mark.parametrize("states", [(-1,), (0, 1, 2)])
@pytest.mark.parametrize("rows", [1, 3])
def test_replay_counts_what_a_live_head_did(rows: int, states: tuple[int, ...]) -> None:
    target = models.build("llama").double()
    head = head_of(target, states=states, noise=0.02)
    with OnlineAssistant(target, head, config=FIXED) as assistant:
        seen = [
            trace
            for ids in torch.randint(3, models.VOCAB, (4, rows, 7))
            for trace in answered(assistant, ids, max_new_tokens=24)[1]
        ]
        live = sum(map(AcceptanceStats.from_trace, seen), AcceptanceStats())
        replayed = replay(assistant.draft, seen, 4)
        copies = [copy.copy(trace) for trace in seen]  # of which no states are kept
        computed = replay(assistant.draft, copies, 4)
    assert 0 < live.accepted < live.examined
    assert all(trace.rounds[0].num_drafted == 4 for trace in seen)  # before the target has given states
    for stats in (replayed, computed):
        assert (stats.examined, stats.accepted, stats.emitted) == (live.examined, live.accepted, live.emitted)
        assert stats.target_forwards == live.target_forwards
        assert stats.accepted_length_histogram == live.accepted_length_histogram


@pytest.mark.parametrize("make", [new_head, new_eagle3_head])
@pytest.mark.parametrize("length", [1, 2, 90])
def test_replay_drafts_what_a_head_did_in_the_first_round(make: Any, length: int) -> None:
    target = models.build("llama").double()
    head = models.fixed_k(make(target), 4)
    asked = prompts(16, length)
    traces = list(record_traces(target, [ids[0].tolist() for ids in asked], max_new_tokens=16))
    updater = Updater(head, replace(FIXED, buffer_size=16, learning_rate=1e-2))
    updater.buffer.extend(traces)
    updater.update(40)
    updater.copy_to(head)
    with OnlineAssistant(target, head, config=FIXED) as assistant:
        seen = [answered(assistant, ids, max_new_tokens=16)[1][0] for ids in asked]
        drawn = redraft(assistant.draft, seen, 4)
    examined = [[r.drafted_ids[: r.num_examined].tolist() for t in s for r in t.rounds] for s in (drawn, seen)]
    assert examined[0] == examined[1]
    assert all(trace.rounds[0].num_drafted == 4 for trace in seen)
    assert any(trace.rounds[0].num_accepted > 1 for trace in seen)


@pytest.mark.parametrize("make", [new_head, new_eagle3_head])
def test_what_is_read_before_the_layers_learns_more_slowly(make: Any) -> None:
    head = make(models.build("llama"))
    layers, before = make_optimizers(head, dict(head.named_parameters()), OnlineConfig())[0].param_groups
    assert before["lr"] < layers["lr"] == OnlineConfig().learning_rate
    projection = head.input_proj if make is new_head else head.state_proj
    assert [id(p) for p in before["params"]] == [id(projection.weight)]


@pytest.mark.parametrize("states", [(-1,), (0, 1, 2)])
def test_a_head_learns_its_requests(states: tuple[int, ...]) -> None:
    target = models.build("llama")
    traces = list(record_traces(target, [ids[0].tolist() for ids in prompts(8)], max_new_tokens=24))
    head = head_of(target, states=states)
    before = replay(head, traces, 4).alpha
    updater = Updater(head, replace(FIXED, buffer_size=8, learning_rate=1e-2))
    updater.buffer.extend(traces)
    assert updater.update(60).steps == 60
    updater.copy_to(head)
    assert replay(head, traces, 4).alpha > before + 0.3


def test_sampled_answers_have_the_targets_distribution_while_a_head_learns() -> None:
    target, _ = small_pair()
    ids = models.prompt(3, vocab_size=SMALL_VOCAB)
    with OnlineAssistant(target, head_of(target, noise=0.3), config=LEARNING) as assistant:
        counts = sampled_answers(assistant, ids, 250)
        assert fits(counts, answer_distribution(target, ids), PAIRS) > 1e-3
        assert len(assistant.decisions) == 125
        assert 0.2 < assistant.stats.alpha < 0.95


def test_states_that_the_caller_asks_for_are_the_targets() -> None:
    target = models.build("llama")
    ids, how = prompts(1)[0], {"max_new_tokens": 12, "return_dict_in_generate": True, "output_hidden_states": True}
    with OnlineAssistant(target, head_of(target, noise=0.05), config=FIXED) as assistant:
        output, seen = answered(assistant, ids, **how)
    alone = target.generate(ids, do_sample=False, **how)
    assert torch.equal(output.sequences, alone.sequences)
    assert sum(r.num_drafted for r in seen[0].rounds)
    for ours, theirs in zip(output.hidden_states, alone.hidden_states, strict=True):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs, strict=True))


def test_a_head_is_saved_and_loaded(tmp_path: Path) -> None:
    target = models.build("qwen3")
    traces = list(record_traces(target, [ids[0].tolist() for ids in prompts()], max_new_tokens=12))
    with OnlineAssistant(target, head_of(target, states=(0, 2), noise=0.05), config=FIXED) as assistant:
        assistant.save_pretrained(tmp_path / "head")
        expected = completion_logits(assistant.draft, traces)
    with OnlineAssistant(target, tmp_path / "head", config=FIXED, dtype="float32") as again:
        assert isinstance(again.draft, DraftHead)
        assert torch.allclose(expected, completion_logits(again.draft, traces), atol=1e-5)


def test_a_session_with_a_head_goes_on(tmp_path: Path) -> None:
    target, ids = models.build("llama"), prompts(3)
    with OnlineAssistant(target, head_of(target), config=FIXED) as assistant:
        for one in ids:
            answered(assistant, one, max_new_tokens=12)
        assistant.update(4)
        assistant.save_state(tmp_path)
        weights = assistant.draft.state_dict()
    with OnlineAssistant(target, head_of(target), config=FIXED) as again:
        again.load_state(tmp_path)
        assert all(torch.equal(weights[name], found) for name, found in again.draft.state_dict().items())
        again.update(1)


def test_states_are_kept_within_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    target, kept = models.build("llama"), []
    monkeypatch.setattr("osd_hf.draft_head.MAX_KEPT_BYTES", 2500)
    source = head_of(target).source
    forwards = itertools.count()
    target.model.register_forward_pre_hook(lambda *_: (next(forwards), None)[1])
    for number in range(3):
        trace = bare_trace([1, 2, 3], [4, 5, 6], models.VOCAB)
        keep_states(trace, half(torch.full((5, 100), float(number))), [-1])
        kept.append(trace)
    assert source is not None
    assert float(source.of(kept[2:])[0][0, 0]) == 2.0  # the newest
    before = next(forwards)
    assert source.of(kept[:1])[0].shape == (5, 32)  # recomputed
    assert next(forwards) == before + 2  # one forward, and this call


def test_heads_that_read_other_states_replay_the_same_traces() -> None:
    target = models.build("llama")
    traces = list(record_traces(target, [ids[0].tolist() for ids in prompts()], max_new_tokens=12))
    heads = [head_of(target, states=states, noise=0.05) for states in ((-1,), (0, 1, 2), (-1,))]
    first, _, third = (completion_logits(head, traces) for head in heads)
    assert torch.equal(first, third)


def test_a_head_of_another_target_is_refused() -> None:
    head = head_of(models.build("llama"))
    with pytest.raises(UnsupportedModelError, match="32 values"):
        OnlineAssistant(models.build("llama", hidden_size=64), head)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        DraftHead.from_draft(copy_layers(models.build("t5"), [0]), models.build("t5"))
    with pytest.raises(ConfigError, match="OnlineAssistant"):
        head.generate(torch.ones(1, 2, dtype=torch.long))


def test_transformers_own_loop_refuses_a_head_and_says_what_to_do() -> None:
    target, ids, seen = models.build("llama"), prompts(1)[0], list[Trace]()
    head, how = head_of(target), {"do_sample": False, "max_new_tokens": 8}
    with pytest.raises(ConfigError, match="OnlineAssistant"):
        target.generate(ids, assistant_model=head, **how)
    with capture_traces(target, seen.append):
        output = target.generate(ids, assistant_model=head, **how)
    assert torch.equal(output, target.generate(ids, **how))
    assert sum(r.num_drafted for r in seen[0].rounds)


def test_a_failing_head_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    target, ids = models.build("llama"), prompts(1)[0]
    with OnlineAssistant(target, head_of(target), config=FIXED) as assistant:
        monkeypatch.setattr(DraftHead, "forward", lambda *_, **__: 1 / 0)
        output, _ = answered(assistant, ids, max_new_tokens=12)
    assert torch.equal(output, target.generate(ids, do_sample=False, max_new_tokens=12))


def test_drafts_per_domain_are_adapters_of_a_head() -> None:
    peft = pytest.importorskip("peft")
    target = models.build("llama")
    lora = peft.LoraConfig(r=4, target_modules=["input_proj", "q_proj", "down_proj"])
    made = OnlineAssistant(target, head_of(target), config=LEARNING, router=lambda _: "sql", peft_config=lora)
    with made as assistant:
        for ids in prompts(4):
            output, _ = answered(assistant, ids, domain="sql", max_new_tokens=16)
            assert torch.equal(output, target.generate(ids, do_sample=False, max_new_tokens=16))
        assert assistant.learning_error is None
        assert assistant.decisions[-1].outcome == "promoted"


def test_stored_traces_have_no_states(tmp_path: Path) -> None:
    target = models.build("llama")
    with OnlineAssistant(target, head_of(target), config=FIXED, store=tmp_path) as assistant:
        _, seen = answered(assistant, prompts(1)[0], max_new_tokens=12)
        expected = replay(assistant.draft, seen, 4)
    (stored,) = CorrectionStore(tmp_path)
    assert replay(assistant.draft, [stored], 4).accepted == expected.accepted


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
@pytest.mark.parametrize("rows", [1, 3])
def test_heads_help_targets_with_recurrent_layers(name: str, rows: int) -> None:
    target = family(name)
    attention = next(i for i, kind in enumerate(target.config.layer_types) if kind == "full_attention")
    ids = torch.randint(3, models.VOCAB, (rows, 7))
    with OnlineAssistant(target, head_of(target, (attention,), noise=0.05), config=LEARNING) as assistant:
        for _ in range(3):
            output, seen = answered(assistant, ids, max_new_tokens=20)
            assert torch.equal(output, target.generate(ids, do_sample=False, max_new_tokens=20))
        assert sum(r.num_drafted for r in seen[0].rounds)
        assert assistant.learning_error is None


# --- EAGLE-3 ---------------------------------------------------------------------------------------------------------


def eagle3_of(target: Any, kind: str = "llama", rows: int | None = None, **options: bool) -> Any:
    """An EAGLE-3 head with random weights and, with `rows`, a vocabulary of its own: every other token."""
    sizes = {name: getattr(target.config, name) for name in ("hidden_size", "num_attention_heads", "vocab_size")}
    text = AutoConfig.for_model(
        kind, **sizes, num_hidden_layers=1, num_key_value_heads=2, head_dim=8, intermediate_size=48,
        max_position_embeddings=256,
    )  # fmt: skip
    head = DraftHead(DraftHeadConfig(text, [0, 1, 2], 32, "eagle3", draft_vocab_size=rows, **options))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.0 / parameter.shape[-1] ** 0.5)
        head.set_input_embeddings(target.get_input_embeddings())
        if rows is not None:
            head.d2t.copy_(torch.arange(rows))
            head.t2d[2 * torch.arange(rows)] = True
    return models.fixed_k(head.to(target.dtype).bind(target).eval(), 4)


def reference(head: Any, ids: list[int], states: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Logits of a round behind `ids`, one forward over everything for each token: the paper's layer written out."""
    layer, found = head.model.layers[0], []
    attention, known = layer.self_attn, len(ids)
    states = states if head.state_norm is None else head.state_norm(states)
    if head.state_norms is not None:
        states = torch.cat([norm(s) for norm, s in zip(head.state_norms, states.chunk(3, -1), strict=True)], -1)
    hidden = head.state_proj(states)  # of all tokens but one
    tokens, read = list(ids[1:]), list(hidden)
    for _ in range(steps):
        embedded = head.get_input_embeddings()(torch.tensor(tokens))
        state = torch.stack(read)
        normed = layer.hidden_norm(state)
        both = torch.cat([layer.input_layernorm(embedded), normed], -1)
        places = torch.arange(len(tokens))[None]
        turn = head.model.rotary_emb(embedded[None], places)
        mask = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=state.dtype).triu(1)[None, None]
        attended = attention(both[None], position_embeddings=turn, attention_mask=mask)[0][0]
        out = (normed if layer.norm_before_residual else state) + attended
        out = out + layer.mlp(layer.post_attention_layernorm(out))
        found.append(head.lm_head(head.norm(out[-1])))
        out = head.norm(out) if head.config.norm_output else out
        row = int(found[-1].argmax())
        tokens.append(row if head.config.draft_vocab_size is None else row + int(head.d2t[row]))
        read.append(out[-1])
    assert len(tokens) == known - 1 + steps
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("rows", "norms"),
    [(None, ()), (32, ("norm_before_residual", "fc_norm")), (32, ("norm_before_fc", "norm_output"))],
)
def test_an_eagle3_head_drafts_as_the_paper_says(kind: str, rows: int | None, norms: tuple[str, ...]) -> None:
    target = models.build("llama").double()
    head = eagle3_of(target, kind, rows, **dict.fromkeys(norms, True))
    ids = prompts(1)[0]
    with OnlineAssistant(target, head, config=FIXED) as assistant:
        output, (trace,) = answered(assistant, ids, max_new_tokens=12)
        assert torch.equal(output, target.generate(ids, do_sample=False, max_new_tokens=12))
        with torch.no_grad():
            hidden = target(output, output_hidden_states=True).hidden_states
            states = half(torch.cat([hidden[i] for i in (0, 1, 2)], -1))[0].double()
            known = 7 + trace.rounds[0].num_emitted
            for r in trace.rounds[1:]:
                text = output[0, :known].tolist()
                expected = reference(assistant.draft, text, states[: known - 1], r.num_drafted)
                rows_of = [int(logits.argmax()) for logits in expected]
                offsets = [0] * len(rows_of) if rows is None else [int(head.d2t[row]) for row in rows_of]
                assert r.drafted_ids.tolist() == [a + b for a, b in zip(rows_of, offsets, strict=True)]
                known += r.num_emitted
        live = AcceptanceStats.from_trace(trace)
        replayed = replay(assistant.draft, [trace], 4)
        assert (replayed.examined, replayed.accepted) == (live.examined, live.accepted)


@pytest.mark.parametrize("rows", [None, 32])
def test_an_eagle3_head_learns(rows: int | None) -> None:
    target = models.build("llama")
    with OnlineAssistant(target, eagle3_of(target, rows=rows), config=LEARNING) as assistant:
        losses = []
        for ids in prompts(6) * 3:
            output, _ = answered(assistant, ids, max_new_tokens=16)
            assert torch.equal(output, target.generate(ids, do_sample=False, max_new_tokens=16))
        losses = [assistant.update(10).loss for _ in range(4)]
        assert losses[-1] < losses[0]
        assert assistant.learning_error is None


@pytest.mark.parametrize("is_flat", [False, True])
def test_eagle3_checkpoints_are_saved_and_loaded(is_flat: bool, tmp_path: Path) -> None:
    target = models.build("llama")
    head = eagle3_of(target, rows=32, norm_before_residual=not is_flat)
    head.save_pretrained(tmp_path)
    if is_flat:  # as SpecForge saves them
        saved = json.loads((tmp_path / "config.json").read_text())
        flat = saved["transformer_layer_config"] | {
            "draft_vocab_size": 32,
            "architectures": ["LlamaForCausalLMEagle3"],
        }
        options = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1], "use_aux_hidden_state": True}}
        (tmp_path / "config.json").write_text(json.dumps(flat | options))
        weights = load_file(tmp_path / "model.safetensors")
        renamed = {name.replace("layers.0.", "midlayer."): w for name, w in weights.items() if name != "t2d"}
        (tmp_path / "model.safetensors").unlink()
        names, files = sorted(renamed), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        for number, file in enumerate(files):
            save_file({name: renamed[name] for name in names[number::2]}, tmp_path / file)
        index = {"weight_map": {name: files[i % 2] for i, name in enumerate(names)}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        assert not any("embed_tokens" in name for name in load_file(tmp_path / "model.safetensors"))
    again = load_head(tmp_path, target)
    traces = list(record_traces(target, [ids[0].tolist() for ids in prompts()], max_new_tokens=8))
    assert torch.allclose(completion_logits(head, traces), completion_logits(again, traces), atol=1e-6)


def test_a_checkpoint_with_other_weights_is_refused(tmp_path: Path) -> None:
    target = models.build("llama")
    eagle3_of(target).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "fc_norm.0.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="fc_norm"):
        load_head(tmp_path, target)


def test_a_checkpoint_in_another_precision_keeps_the_weights_that_were_learned(tmp_path: Path) -> None:
    target = models.build("llama")
    head = eagle3_of(target)
    head.save_pretrained(tmp_path / "old")
    saved = json.loads((tmp_path / "old/config.json").read_text())
    assert saved["transformer_layer_config"]["dtype"] == "float32"
    saved["transformer_layer_config"]["dtype"] = "bfloat16"
    (tmp_path / "old/config.json").write_text(json.dumps(saved))
    again = load_head(tmp_path / "old", target)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in head.state_dict().items())


def test_a_head_does_not_tell_where_its_target_lies(tmp_path: Path) -> None:
    models.build("llama").save_pretrained(tmp_path / "secret")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "secret")
    for kind in (new_eagle3_head(target), head_of(target)):
        kind.save_pretrained(tmp_path / "head")
        assert "secret" not in (tmp_path / "head/config.json").read_text()
    target.config.name_or_path = "org/target"
    new_eagle3_head(target).save_pretrained(tmp_path / "head")
    verifier = json.loads((tmp_path / "head/config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}


def test_a_head_that_is_bound_to_another_target_keeps_its_embeddings(tmp_path: Path) -> None:
    target, other = models.build("llama"), models.build("llama", seed=1)
    head = eagle3_of(target)
    head.bind(other).save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")


def test_embeddings_of_its_own_are_kept(tmp_path: Path) -> None:
    target = models.build("llama")
    head = eagle3_of(models.build("llama", seed=1))
    head.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    own = torch.randn(models.VOCAB, 32)
    save_file({**weights, "embed_tokens.weight": own}, tmp_path / "model.safetensors")
    with OnlineAssistant(target, tmp_path, config=FIXED) as assistant:
        assert torch.equal(assistant.draft.get_input_embeddings().weight, own)
        assistant.save_pretrained(tmp_path / "again")
    assert torch.equal(load_file(tmp_path / "again/model.safetensors")["embed_tokens.weight"], own)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("token_ids", [None, torch.arange(2, 60, 2)])
def test_a_new_eagle3_head_learns(kind: str, token_ids: torch.Tensor | None) -> None:
    target = models.build(kind, num_hidden_layers=4)
    head = new_eagle3_head(target, token_ids)
    assert head.config.state_layers == [1, 2, 3]
    asked = list(prompts(8))
    traces = list(record_traces(target, [ids[0].tolist() for ids in asked], max_new_tokens=24))
    before = replay(head, traces, 4).alpha
    frozen = set(shared_ends(head, target))  # copied back, they would change the target
    updater = Updater(head, replace(FIXED, buffer_size=8, learning_rate=1e-2), frozen=frozen)
    updater.buffer.extend(traces)
    updater.update(60)
    updater.copy_to(head)
    assert replay(head, traces, 4).alpha > before + 0.2
    with OnlineAssistant(target, head, config=LEARNING) as assistant:
        for ids in asked[:4]:
            output, _ = answered(assistant, ids, max_new_tokens=16)
            assert torch.equal(output, target.generate(ids, do_sample=False, max_new_tokens=16))
        assert assistant.learning_error is None and assistant.stats.alpha > 0.2


def test_states_of_any_size_teach_a_head_as_fast() -> None:
    """Muon's steps have one size: large states would change a new head too much, small ones too little."""
    target = models.build()
    asked = [ids[0].tolist() for ids in prompts(8)]
    learned = []
    for factor in (1.0, 1e-2, 1e2):
        traces = list(record_traces(target, asked, max_new_tokens=24))
        head = new_head(target)
        assert head.source is not None
        for trace, states in zip(traces, head.source.of(traces), strict=True):
            keep_states(trace, half(states.float() * factor), [-1])
        updater = Updater(head, replace(FIXED, buffer_size=8), frozen=set(shared_ends(head, target)))
        updater.buffer.extend(traces)
        updater.update(10)
        updater.copy_to(head)
        learned.append(replay(head, traces, 4).alpha)
    assert learned[0] > replay(new_head(target), traces, 4).alpha
    assert learned[1:] == pytest.approx([learned[0]] * 2, abs=0.02)


def test_a_head_of_a_target_with_tied_embeddings_is_saved(tmp_path: Path) -> None:
    target = models.build("llama", tie_word_embeddings=True)
    with OnlineAssistant(target, config=FIXED) as assistant:
        answered(assistant, prompts(1)[0], max_new_tokens=12)
        assistant.update(2)
        assistant.save_pretrained(tmp_path)
        learned = assistant.draft.state_dict()
    with OnlineAssistant(target, tmp_path, config=FIXED) as again:
        assert all(torch.equal(learned[name], found) for name, found in again.draft.state_dict().items())
        ends = again.draft.get_input_embeddings().weight, again.draft.get_output_embeddings().weight
        assert {end.data_ptr() for end in ends} == {target.get_input_embeddings().weight.data_ptr()}
    assert models.fixed_k(load_head(tmp_path, target), 3).generation_config.num_assistant_tokens == 3
    loaded = load_head(tmp_path, target)
    assert loaded.generation_config.num_assistant_tokens == 4  # which it was saved with


def test_a_head_alone_cannot_be_loaded_without_its_target(tmp_path: Path) -> None:
    eagle3_of(models.build("llama")).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="Name the target"):
        load_draft(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="0 to 1"):
        load_head(tmp_path, models.build("llama", num_hidden_layers=1))


def test_an_assistant_without_a_draft_makes_a_head(tmp_path: Path) -> None:
    target = models.build("llama")
    with OnlineAssistant(target, config=LEARNING) as assistant:
        assert isinstance(assistant.draft, DraftHead)
        for ids in prompts(4):
            output, _ = answered(assistant, ids, max_new_tokens=16)
            assert torch.equal(output, target.generate(ids, do_sample=False, max_new_tokens=16))
        assert assistant.decisions
    eagle3_of(target).save_pretrained(tmp_path)
    with OnlineAssistant(target, tmp_path, config=FIXED) as assistant:
        assert assistant.draft.is_eagle3


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # the compiler itself
def test_a_compiled_target_returns_the_states() -> None:
    target = models.build("llama")
    config = replace(FIXED, compile_target=True)
    with OnlineAssistant(target, head_of(target, states=(0, 1, 2), noise=0.02), config=config) as assistant:
        for ids in prompts(2):
            output, (trace,) = answered(assistant, ids, max_new_tokens=24)
            assert torch.equal(output, target.generate(ids, do_sample=False, max_new_tokens=24))
            live, replayed = AcceptanceStats.from_trace(trace), replay(assistant.draft, [copy.copy(trace)], 4)
            assert live.accepted and (live.examined, live.accepted) == (replayed.examined, replayed.accepted)
        assert assistant.static_target is not None and not assistant.static_target.is_eager


def test_a_head_drafts_from_a_part_of_a_large_vocabulary() -> None:
    target = models.build("llama", vocab_size=20_000)
    config = replace(LEARNING, num_assistant_tokens="auto", candidates="draft", update_strategy="manual")
    with OnlineAssistant(target, head_of(target, noise=0.02), config=config) as assistant:
        assert assistant.drafting is not None
        assistant.drafting.clock = models.ForwardTime({target: 1.0, assistant.draft: 0.05})
        for ids in prompts(4):
            output, _ = answered(assistant, ids, max_new_tokens=24)
            assert torch.equal(output, target.generate(ids, do_sample=False, max_new_tokens=24))
        assert assistant.drafts.vocab_size(None) == 8192
        assert assistant.stats.drafted


def test_a_head_learns_again_from_states_that_replay_computed() -> None:
    target = models.build("llama")
    traces = list(record_traces(target, [ids[0].tolist() for ids in prompts()], max_new_tokens=12))
    head = head_of(target)
    assert replay(head, traces, 4).examined
    updater = Updater(head, replace(FIXED, buffer_size=4))
    updater.buffer.extend(traces)
    assert updater.update(3).steps == 3


# --- built-in layers -------------------------------------------------------------------------------------------------


def target_with_mtp(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose checkpoint has a layer for multi-token prediction behind its two layers."""
    sizes = {
        "vocab_size": models.VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "max_position_embeddings": 256, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = AutoConfig.for_model(kind, **sizes, **(latent if kind == "deepseek_v3" else {"head_dim": 8}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    # transformers knows the layer by its number in the published checkpoints.
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    model.save_pretrained(folder)
    layer = MtpModel(model, 1).layers[0]
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 if p.ndim > 1 else 1 + 0.1 * torch.randn_like(p))
    own = layer.state_dict()
    block = {f"model.layers.2.{n[10:]}": w for n, w in own.items() if n.startswith("mtp_block.")}
    weights = revert_weight_conversion(model, block)
    for name in ("enorm", "hnorm", "eh_proj", "post_norm"):
        weights[f"model.layers.2.{name.replace('post_', 'shared_head.')}.weight"] = own[f"{name}.weight"]
    stored = load_file(folder / "model.safetensors") | {n: w.contiguous() for n, w in weights.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_built_in_layers_serve_and_learn(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_with_mtp(kind, tmp_path / "target", monkeypatch)
    with OnlineAssistant(target, config=LEARNING) as assistant:
        head, ids = assistant.draft, prompts(1)[0]
        assert head.config.has_input_norms
        with torch.no_grad():
            states = target(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
            theirs = MtpModel.from_pretrained(target)(
                ids[:, 1:], half(states).float(), None, torch.arange(1, 7)[None],
                MtpCache(config=target.config.get_mtp_config()),
            )[1][0, 0]  # fmt: skip
        trace = bare_trace(ids[0].tolist(), [3, 4], models.VOCAB)
        assert torch.allclose(completion_logits(head, [trace])[0, 0], theirs, atol=1e-4)
        for ids in prompts(4):
            output, _ = answered(assistant, ids, max_new_tokens=20)
            assert torch.equal(output, target.generate(ids, do_sample=False, max_new_tokens=20))
        assert assistant.learning_error is None and len(assistant.decisions) == 2
        save_built_in(assistant.draft, target, tmp_path / "saved")
        learned = dict(assistant.draft.named_parameters())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    reloaded = built_in_head(again)
    assert reloaded is not None
    assert all(torch.equal(learned[name], p) for name, p in reloaded.named_parameters())
    assert any(not torch.equal(p, dict(head.named_parameters())[name]) for name, p in reloaded.named_parameters())
    alone = again.generate(ids, do_sample=False, max_new_tokens=12)
    assert torch.equal(again.generate(ids, do_sample=False, max_new_tokens=12, use_mtp=True), alone)


def test_built_in_layers_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = target_with_mtp("glm4_moe", tmp_path / "target", monkeypatch)
    with pytest.raises(ConfigError, match="built-in"):
        save_built_in(head_of(target, (1,)), target, tmp_path / "saved")
    head = built_in_head(target)
    assert head is not None
    with pytest.raises(ConfigError, match="not empty"):
        save_built_in(head, target, tmp_path / "target")
    stored = load_file(tmp_path / "target/model.safetensors")
    del stored["model.layers.2.eh_proj.weight"]
    save_file(stored, tmp_path / "target/model.safetensors", {"format": "pt"})
    assert built_in_head(target) is None
    assert "eh_proj" in caplog.text


# --- candidates that transformers makes -----------------------------------------------------------------------------


def dflash_of(target: Any) -> Any:
    """A draft that proposes blocks from the states of a target."""
    config = AutoConfig.for_model(
        "muse_glimmer_assistant", hidden_size=target.config.hidden_size, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, block_size=4, mask_token_id=0,
        target_layer_ids=[0, 1], max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModel.from_config(config).eval()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_candidates_of_transformers_are_counted(
    kind: str, do_sample: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "mtp":
        target: Any = target_with_mtp("deepseek_v3", tmp_path, monkeypatch)
        how: dict[str, Any] = {"use_mtp": True}
    else:
        target = models.build(num_hidden_layers=2)
        how = {"assistant_model": dflash_of(target), "speculation_type": "dflash"}
    ids, traces = prompts(1)[0], list[Any]()
    settings = {"max_new_tokens": 20, "do_sample": do_sample, "repetition_penalty": 1.3, "output_scores": True}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(3)
    theirs = target.generate(ids, **settings, **how)
    torch.manual_seed(3)
    with capture_traces(target, traces.append):
        ours = target.generate(ids, **settings, **how)
    assert torch.equal(ours.sequences, theirs.sequences)
    (trace,) = traces
    assert trace.completion_ids.tolist() == ours.sequences[0, ids.shape[1] :].tolist()
    assert sum(r.num_emitted for r in trace.rounds) == len(trace) == len(ours.logits)
    stats = AcceptanceStats.from_trace(trace)
    assert stats.drafted >= len(trace) / 2
    raw = torch.stack(ours.logits)[:, 0]
    assert np.allclose(trace.top_logits, (raw - raw.amax(-1, keepdim=True)).numpy(), atol=1e-2)  # whole rows
    rounds = [r for r in trace.rounds if len(r.drafted_ids)]
    assert all((r.p is not None) == do_sample for r in rounds)
    if not do_sample:
        alone = target.generate(ids, max_new_tokens=20, do_sample=False, repetition_penalty=1.3)
        assert torch.equal(alone, ours.sequences)
    with capture_traces(target, traces.append), pytest.raises(UnsupportedGenerationError, match="one prompt"):
        target.generate(ids.repeat(2, 1), **settings, **how)
    assistant = OnlineAssistant(target, new_head(target))
    for given in (how, {**how, "assistant_model": assistant.draft}):
        with assistant.attached(), pytest.raises(UnsupportedGenerationError, match="learn"):
            target.generate(ids, **settings, **given)
    assert assistant.stats.num_requests == 0


def test_transformers_own_candidates_are_refused_where_states_are_not_taken_back() -> None:
    target = family("qwen3_next")
    how = {"assistant_model": dflash_of(target), "speculation_type": "dflash", "max_new_tokens": 4}
    with capture_traces(target, print), pytest.raises(UnsupportedGenerationError, match="recurrent states"):
        target.generate(prompts(1)[0], **how)


def test_candidates_of_transformers_are_counted_as_they_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, traces = target_with_mtp("deepseek_v3", tmp_path, monkeypatch), list[Any]()
    streamed: list[int] = []

    class Streamer:
        def put(self, ids: torch.Tensor) -> None:
            streamed.extend(ids.flatten().tolist())

        def end(self) -> None:
            pass

    ids = prompts(1)[0]
    end = int(target.generate(ids, do_sample=False, max_new_tokens=12)[0, -3])
    config = GenerationConfig(use_mtp=True, do_sample=False, max_new_tokens=12, eos_token_id=end)
    with capture_traces(target, traces.append):
        output = target.generate(ids, generation_config=config, streamer=Streamer())
    assert streamed == output[0].tolist()
    assert traces[0].completion_ids.tolist() == output[0, 7:].tolist()
    assert int(output[0, -1]) == end
    assert "drafts nothing" not in caplog.text


def test_what_a_head_shares_with_its_target_does_not_learn_in_a_simulation() -> None:
    target = models.build("llama", num_hidden_layers=2)
    head = new_head(target)
    asked = [ids[0].tolist() for ids in prompts(4)]
    report = simulate(head, list(record_traces(target, asked, max_new_tokens=8)), LEARNING)
    learned = dict(report.draft.named_parameters())
    assert torch.equal(learned["model.embed_tokens.weight"], target.get_input_embeddings().weight)
    assert any(not torch.equal(p, learned[name]) for name, p in head.named_parameters())


def test_sampled_requests_are_replayed_and_pass_the_gate() -> None:
    target = models.build()
    config = replace(LEARNING, gate=True, update_interval=4)
    with OnlineAssistant(target, config=config) as assistant:
        for seed, ids in enumerate(prompts(1) * 40):
            torch.manual_seed(seed)
            answered(assistant, ids, do_sample=True, temperature=0.7, top_k=20, max_new_tokens=12)
        assert assistant.learning_error is None
        assert 0 < (assistant.decisions[-1].alpha_before or 0) < 1  # `None` if replay fails


def test_a_head_is_distilled_in_bfloat16(tmp_path: Path) -> None:
    target = models.build()
    traces = list(record_traces(target, [ids[0].tolist() for ids in prompts(8)], max_new_tokens=12))
    config = DistillConfig(
        str(tmp_path), max_steps=6, learning_rate=3e-3, optimizer="muon", freeze_embeddings=True, bf16=True,
        save_strategy="no", report_to="none", logging_steps=1, use_cpu=True,
    )  # fmt: skip
    given = {"dataset": traces, "config": config, "tokenizer": models.tokenizer()}
    result = distill(target=None, draft=new_head(target), **given)
    losses = [entry["loss"] for entry in result.log_history if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0]


@pytest.mark.parametrize("make", [new_head, new_eagle3_head])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_of_a_target_in_half_precision_learns_without_autocast(make: Any, dtype: torch.dtype) -> None:
    target = models.build(num_hidden_layers=4).to(dtype)
    with OnlineAssistant(target, make(target), config=LEARNING) as assistant:
        before = models.weights(assistant.draft)
        for ids in prompts(6):
            answered(assistant, ids, max_new_tokens=12)
        assert assistant.learning_error is None and assistant.version
        assert assistant.draft.dtype == dtype and not models.same(before, models.weights(assistant.draft))
