"""Drafts made of a target's layers: copied, trained, chosen, saved, and refused."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from saved_pair import save_pair
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from osd_hf import CorrectionStore, DraftHead, OnlineAssistant, Trace, make_draft, replay
from osd_hf.cli.main import main
from osd_hf.distillation import make_draft as making
from osd_hf.distillation.make_draft import MakeDraftConfig, train_draft
from osd_hf.errors import ConfigError, DataError, UnsupportedModelError
from osd_hf.layers import copy_layers, num_layers_of
from osd_hf.learning.loss import SampledTail, divergence_sum, stored_rows
from osd_hf.learning.weights import ends_of
from osd_hf.recording import measured_costs, record_traces
from osd_hf.speedup import ForwardSeconds
from osd_hf.target_version import fingerprint
from osd_hf.trace import bare_trace

# Three layers each; of an encoder-decoder on both sides.
DEEP: dict[str, dict[str, Any]] = {
    **dict.fromkeys(models.ARCHITECTURES, {"num_hidden_layers": 3}),
    "gemma3": {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gpt2": {"n_layer": 3}, "t5": {"num_layers": 3, "num_decoder_layers": 3},
    "bart": {"encoder_layers": 3, "decoder_layers": 3},
}  # fmt: skip
CHEAP = ForwardSeconds(target=1.0, more=0.02, draft=0.1)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **inputs).logits  # type: ignore[no-any-return]


def without(model: Any, *numbers: int) -> Any:
    """A copy of the model, from whose decoder these layers were taken out."""
    model = copy.deepcopy(model)
    stack = next(m for m in model.get_decoder().modules() if isinstance(m, torch.nn.ModuleList))
    for number in sorted(numbers, reverse=True):
        del stack[number]
    text = model.config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = [kind for i, kind in enumerate(text.layer_types) if i not in numbers]
    text.num_hidden_layers -= len(numbers)
    return model


def asked(number: int = 12) -> list[list[int]]:
    return [ids[0].tolist() for ids in models.prompts(number)]


def steep() -> Any:
    """A target whose first layer says most of what all say, most of it by the last token alone."""
    target = models.build(num_hidden_layers=4)
    with torch.no_grad():
        for number, layer in enumerate(target.model.layers):
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.3 if number else 1.0)
    return target


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards take what they would on a quiet machine: one layer of a draft a tenth of the target's forward."""

    def costs(target: Any, drafts: Any, *how: Any) -> list[ForwardSeconds]:
        return [replace(CHEAP, draft=0.1 * num_layers_of(draft)) for draft in drafts]

    monkeypatch.setattr(making, "measured_costs", costs)


# --- copies of layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_a_copy_computes_what_the_target_computes_without_its_other_layers(architecture: str, tmp_path: Path) -> None:
    target = models.build(architecture, **DEEP[architecture])
    before = [p.clone() for p in target.parameters()]
    piece = copy_layers(target, (0, 2))
    ids = models.prompt(models.WINDOW + 4)
    torch.testing.assert_close(logits(piece, ids), logits(without(target, 1), ids), atol=1e-4, rtol=1e-4)
    assert all(map(torch.equal, target.parameters(), before))
    assert num_layers_of(piece) == 2
    shared = {p.data_ptr() for p in piece.parameters()} & {p.data_ptr() for p in target.parameters()}
    assert shared == {weight.data_ptr() for _, weight in ends_of(target)}
    # What is saved is what was cut, for whoever has transformers alone.
    piece.save_pretrained(tmp_path)
    auto = AutoModelForSeq2SeqLM if target.config.is_encoder_decoder else AutoModelForCausalLM
    torch.testing.assert_close(logits(auto.from_pretrained(tmp_path), ids), logits(piece, ids))


def test_copied_layers_keep_their_experts() -> None:
    # The first layer and each other one have no experts, which their numbers say.
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=models.VOCAB, hidden_size=32, num_hidden_layers=5, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=32, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=2, mlp_only_layers=[3],
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).eval()
    piece, ids = copy_layers(target, (0, 1, 3)), models.prompt()
    torch.testing.assert_close(logits(piece, ids), logits(without(target, 2, 4), ids))
    assert [type(layer.mlp).__name__ for layer in piece.model.layers] == [
        type(target.model.layers[i].mlp).__name__ for i in (0, 1, 3)
    ]


def test_only_the_text_part_of_a_multimodal_target_is_copied() -> None:
    text = {"vocab_size": models.VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "sliding_window": models.WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip
    sight = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
             "image_size": 28, "patch_size": 14}  # fmt: skip
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=sight, mm_tokens_per_image=1)
    target = AutoModelForCausalLM.from_config(config).eval()
    piece, ids = copy_layers(target, (0, 2)), models.prompt()
    assert type(target).__name__ == "Gemma3ForConditionalGeneration"
    assert type(piece).__name__ == "Gemma3ForCausalLM"
    assert piece.config.layer_types == ["sliding_attention"] * 2
    torch.testing.assert_close(logits(piece, ids), logits(without(target, 1), ids))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_adapters_are_merged_into_a_copy() -> None:
    from peft import LoraConfig, get_peft_model

    base = models.build(num_hidden_layers=3)
    target = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    names = [name for name, _ in target.named_parameters()]
    piece, ids = copy_layers(target, (0, 2)), models.prompt()
    merged = without(copy.deepcopy(target).merge_and_unload(), 1)
    torch.testing.assert_close(logits(piece, ids), logits(merged, ids), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits(piece, ids), logits(without(base, 1), ids), atol=1e-2)
    assert [name for name, _ in target.named_parameters()] == names
    assert not any("lora" in name for name, _ in piece.named_parameters())


def test_unsupported_models_are_refused() -> None:
    for target, why in ((models.bigram(0), "are not found"), (models.build().model, "can `generate`")):
        with pytest.raises(UnsupportedModelError, match=why):
            copy_layers(target, (1,))


# --- training --------------------------------------------------------------------------------------------------------


def test_training_increases_acceptance(cheap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "MAX_RATE_FACTOR", 1.0)  # sharpened random weights are large, and have learned nothing
    target = steep()
    config = MakeDraftConfig(num_layers=1, max_steps=30, max_new_tokens=8, max_seconds=1e6)
    made = train_draft(target, None, config, prompts=asked(32), show_progress=False)
    assert made.after.alpha > made.before.alpha + 0.1
    assert (made.layers, made.requests, made.held_out, made.steps) == ((0,), 28, 4, 30)
    # The figures are those of the draft that is returned.
    rest, first = making.split_requests([bare_trace(ids, (), models.VOCAB) for ids in asked(32)], 0)
    held_out = list(record_traces(target, [t.prompt_ids.tolist() for t in first], max_new_tokens=8))
    assert replay(made.draft, held_out).accepted == made.after.accepted
    assert (made.num_assistant_tokens, made.speedup) == made.costs.best_k(made.after.alpha, 8)
    settings = made.draft.generation_config
    assert settings.num_assistant_tokens == made.num_assistant_tokens
    assert (settings.num_assistant_tokens_schedule, settings.assistant_confidence_threshold) == ("constant", 0)
    json.dumps(made.to_dict())


def test_the_draft_with_the_best_expected_speed_is_trained_to_the_end(cheap: None) -> None:
    target = steep()
    config = MakeDraftConfig(max_steps=8, max_new_tokens=8, max_seconds=1e6)
    made = train_draft(target, None, config, prompts=asked(16), show_progress=False)
    tried = [(trial["kind"], trial["layers"]) for trial in made.trials]
    assert tried == [("layers", [0]), ("layers", [0, 3]), ("layers", [0, 1]), ("mtp", [0])]
    assert [trial["steps"] for trial in made.trials] == [2, 2, 2, 2]
    best = max(made.trials, key=lambda trial: trial["promised"])
    assert (made.kind, list(made.layers)) == (best["kind"], best["layers"])
    assert [making.outer_layers(n, 8) for n in (1, 2, 3, 4)] == [(0,), (0, 7), (0, 1, 7), (0, 1, 6, 7)]
    assert made.steps == 8


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_a_head_is_made_of_one_kind(cheap: None, kind: str) -> None:
    target = steep()
    config = MakeDraftConfig(kind=kind, max_steps=30, max_new_tokens=8, max_seconds=1e6)  # type: ignore[arg-type]
    made = train_draft(target, None, config, prompts=asked(32), show_progress=False)
    assert isinstance(made.draft, DraftHead) and made.draft.config.layout == kind == made.kind
    assert made.after.alpha > made.before.alpha
    assert made.trials == ()
    with OnlineAssistant(target, made.draft) as assistant:
        ids = torch.tensor([asked(1)[0]])
        assert torch.equal(assistant.generate(ids, do_sample=False, max_new_tokens=8),
                           target.generate(ids, do_sample=False, max_new_tokens=8))  # fmt: skip
    (costs,) = measured_costs(target, [made.draft], asked(1)[0], time.perf_counter)
    assert costs.draft > 0 and costs.draft_prompt > 0


def test_time_limits_the_training(cheap: None) -> None:
    target, now = steep(), 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    how: dict[str, Any] = {"prompts": asked(16), "show_progress": False, "clock": clock}
    short, long = (
        train_draft(target, None, MakeDraftConfig(num_layers=1, max_seconds=s, max_new_tokens=8), **how)
        for s in (30, 50)
    )
    assert 0 < short.steps < long.steps
    assert short.seconds >= 30


def test_no_draft_is_made_where_none_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        making, "measured_costs", lambda t, drafts, *_: [ForwardSeconds(1.0, 0.1, 0.75) for _ in drafts]
    )
    with models.ForwardCounter(target := steep()) as forwards:
        copy_layers(target, (0,))
        cutting = forwards.count
    with models.ForwardCounter(target) as forwards:
        with pytest.raises(UnsupportedModelError, match=r"No draft pays.*takes 0\.85"):
            make_draft(target, prompts=asked(), show_progress=False)
        assert forwards.count == 3 * cutting  # of each piece; nothing was answered


def test_costs_are_planned_for_the_gpu_that_will_serve() -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape |= {"head_dim": 128, "vocab_size": 8192}
    with torch.device("meta"):
        sizes = [Qwen3ForCausalLM(Qwen3Config(**shape, num_hidden_layers=count)) for count in (1, 2, 4)]
    measured = [0.29e-3, 0.42e-3, 0.94e-3]  # on an H200
    costs = measured_costs(sizes[2], sizes, [3], lambda: 0.0, "h200")
    assert [cost.draft for cost in costs] == pytest.approx(measured, rel=0.2)
    assert costs[0].target == costs[2].draft
    assert measured_costs(sizes[2], sizes, [3], lambda: 0.0, "l4")[0].draft > 2 * costs[0].draft
    with pytest.raises(ConfigError, match=r"`gpu` must be one of a100, h100, h200, l4, l40s, got 'b200'"):
        make_draft(models.build(), prompts=asked(), gpu="b200")


def test_traces_stores_rows_and_prompts_give_the_same_draft(cheap: None) -> None:
    target = steep()
    how: dict[str, Any] = {"num_layers": 1, "max_steps": 2, "show_progress": False}
    traces = list(record_traces(target, asked(), max_new_tokens=8))
    store = CorrectionStore()
    for trace in traces:
        store.append(trace)
    bare = [bare_trace(t.prompt_ids, t.completion_ids, models.VOCAB) for t in traces]
    rows = [{"prompt": t.prompt_ids.tolist(), "completion": t.completion_ids.tolist()} for t in traces]
    made = [make_draft(target, traces=source, **how) for source in (traces, store, bare)]
    made.append(make_draft(target, prompts=rows, **how))
    made.append(make_draft(target, prompts=asked(), max_new_tokens=8, **how))
    for other in made[1:]:  # the same rows, up to batches
        for ours, theirs in zip(made[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[list[Trace]]:
    """What drafts are taught on, and then judged by."""
    found: list[list[Trace]] = []
    tried = making.best_trial

    def watched(candidates: Any, learned: Any, held_out: Any, *rest: Any) -> Any:
        found.extend((learned, held_out))
        return tried(candidates, learned, held_out, *rest)

    monkeypatch.setattr(making, "best_trial", watched)
    return found


QUICK: dict[str, Any] = {"num_layers": 1, "max_steps": 1, "max_new_tokens": 6, "show_progress": False}


def test_requests_of_another_target_version_are_left_out(
    cheap: None, taken: list[list[Trace]], caplog: pytest.LogCaptureFixture
) -> None:
    target, other = steep(), models.build(seed=3)
    own, others = (list(record_traces(model, asked(), max_new_tokens=6)) for model in (target, other))
    store = CorrectionStore()
    for pair in zip(own, others, strict=True):
        for trace in pair:
            store.append(trace)
    make_draft(target, traces=store, **QUICK)
    assert len(taken[0]) + len(taken[1]) == 12
    assert {trace.target for part in taken for trace in part} == {fingerprint(target)}
    assert "12 of 24 requests, of other versions of the target, are left out" in caplog.text
    with pytest.raises(DataError, match="no request with a token"):
        make_draft(target, traces=others, **QUICK)


def test_held_out_answers_are_the_targets_own(cheap: None, taken: list[list[Trace]]) -> None:
    target = steep()
    rows = [{"prompt": ids, "completion": [7, 7, 7]} for ids in asked()]
    make_draft(target, prompts=rows, **QUICK)
    learned, held_out = taken
    assert {tuple(trace.completion_ids) for trace in learned} == {(7, 7, 7)}
    wanted = record_traces(target, [trace.prompt_ids.tolist() for trace in held_out], max_new_tokens=6)
    answers = [trace.completion_ids.tolist() for trace in held_out]
    assert answers == [trace.completion_ids.tolist() for trace in wanted]
    assert [7, 7, 7] not in answers


def test_a_draft_is_made_of_a_target_with_stop_strings(cheap: None) -> None:
    target = models.build(num_hidden_layers=2)
    target.generation_config.stop_strings = ["a"]
    draft = make_draft(target, prompts=asked(8), num_layers=1, max_steps=1, max_new_tokens=4, show_progress=False)
    assert draft.generation_config.stop_strings is None  # with which transformers' assisted generation would fail
    assert target.generation_config.stop_strings == ["a"]


def test_requests_with_one_prompt_are_on_one_side() -> None:
    prompts = [*asked(16), *asked(16)]
    rest, first = making.split_requests([bare_trace(ids, (), models.VOCAB) for ids in prompts], 0)
    sides = [{trace.prompt_ids.tobytes() for trace in side} for side in (rest, first)]
    assert sides[0].isdisjoint(sides[1])
    assert (len(rest), len(first)) == (28, 4)
    with pytest.raises(DataError, match="at least 8 requests.*got 7"):
        making.split_requests([bare_trace(ids, (), models.VOCAB) for ids in [*asked(7), *asked(7)]], 0)


def test_a_draft_is_made_of_an_encoder_decoder(cheap: None) -> None:
    target = models.build("t5", num_layers=2, num_decoder_layers=2)
    draft = make_draft(target, prompts=asked(), max_steps=2, max_new_tokens=6, max_seconds=1e6, show_progress=False)
    assert draft.config.is_encoder_decoder
    assert (draft.config.num_layers, draft.config.num_decoder_layers) == (2, 1)  # the encoder stays whole


def test_invalid_settings_are_refused() -> None:
    target = models.build()
    for settings, why in (
        ({}, "on `prompts` or on `traces`"), ({"prompts": asked(), "traces": []}, "give one"),
        ({"prompts": asked(), "max_seconds": 0}, "`max_seconds` must be positive"),
        ({"prompts": asked(), "max_steps": 0}, "`max_steps` must be at least 1"),
        ({"prompts": asked(), "kind": "eagle"}, "`kind` must be one of auto, layers, mtp, eagle3"),
        ({"prompts": asked(), "kind": "mtp", "num_layers": 2}, "A head has one layer"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            make_draft(target, **{"show_progress": False, **settings})
    with pytest.raises(DataError, match="Pass `tokenizer=`"):
        make_draft(target, prompts=["text"] * 8, show_progress=False)
    with pytest.raises(UnsupportedModelError, match="needs a decoder-only target"):
        make_draft(models.build("t5"), prompts=asked(), kind="mtp", show_progress=False)
    with pytest.raises(UnsupportedModelError, match="fewer layers than its target"):
        make_draft(target, prompts=asked(), num_layers=2, show_progress=False)


def recorded(target: Any, kept: int) -> list[Trace]:
    return list(record_traces(target, asked(3), max_new_tokens=6, num_logprobs=kept))


def tail_mass(draft: Any, traces: list[Trace], tail: SampledTail | None) -> torch.Tensor:
    """The mass that the draft gives to what is not kept, over that of what is, at each position."""
    seen: list[torch.Tensor] = []

    def watch(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        seen.append((q[:, -1] - q[:, :-1].logsumexp(-1)).exp())
        return q.sum(-1)

    divergence_sum(draft, traces, stored_rows(traces), watch, None, tail)
    return torch.cat(seen)


def test_the_sampled_tail_is_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = map(models.double, models.pair())
    traces = recorded(target, 2)
    others = models.VOCAB - len(np.unique(np.concatenate([t.top_ids for t in traces])))
    dense = tail_mass(draft, traces, None)
    generator, drawn = torch.Generator(), []
    # Each of the others, one after the other, drawn alone.
    with torch.no_grad():
        for number in range(others):
            monkeypatch.setattr(torch, "randint", lambda *_, number=number, **__: torch.tensor([number]))
            drawn.append(tail_mass(draft, traces, SampledTail(1, generator)))
    # What is kept at one position may be in the tail of another: it is always counted there.
    torch.testing.assert_close(torch.stack(drawn).mean(0), dense, atol=1e-9, rtol=1e-9)
    assert torch.stack(drawn).std(0).min() > 0


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_an_ordinary_folder(
    tmp_path: Path, cheap: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, rows, out = save_pair(tmp_path / "pair"), tmp_path / "rows.jsonl", tmp_path / "draft"
    rows.write_text("".join(json.dumps({"question": f"what is {i}?"}) + "\n" for i in range(12)))
    flags = [str(pair / "target"), str(out), "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "6"]
    learning = ["--num-layers", "1", "--max-steps", "3", "--json", "-"]
    assert main(["draft", *flags, "--prompts", str(rows), "--column", "question", *learning]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert (report["layers"], report["requests"], report["held_out"], report["steps"]) == ([0], 10, 2, 3)
    draft, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert draft.config.num_hidden_layers == 1
    assert draft.generation_config.num_assistant_tokens == report["num_assistant_tokens"]
    assert tokenizer.chat_template
    assert f"{report['after']['alpha']:.3f}" in (out / "README.md").read_text()
    target = AutoModelForCausalLM.from_pretrained(pair / "target")
    assert json.loads((out / "config.json").read_text())["osd_hf_target"] == fingerprint(target)
    ids = torch.tensor([[5, 6, 7]])
    how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 6}
    assert torch.equal(target.generate(ids, assistant_model=draft, **how), target.generate(ids, **how))
    # What is there already stays.
    assert main(["draft", *flags, "--prompts", str(rows), "--column", "question"]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_a_draft_is_trained_long_and_goes_on(tmp_path: Path, cheap: None, capsys: pytest.CaptureFixture[str]) -> None:
    pair, rows = save_pair(tmp_path / "pair"), tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"what is {i} plus {i * 7 % 13}?"}) + "\n" for i in range(60)))
    flags = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "6", "--prompts", str(rows)]
    flags += ["--column", "question", "--answers", str(tmp_path / "answers"), "--num-layers", "1", "--max-steps", "2"]

    def made(name: str, *more: str) -> Any:
        out = tmp_path / name
        command = ["draft", str(pair / "target"), str(out), *flags, *more, "--json", str(tmp_path / f"{name}.json")]
        assert main(command) == 0, capsys.readouterr().err
        assert (out / "training.png").stat().st_size and (out / "config.json").is_file()
        return json.loads((tmp_path / f"{name}.json").read_text())

    first = made("first", "--answer-tokens", "300", "--epochs", "1")
    kept = {path.name for path in (tmp_path / "answers-training").glob("checkpoint-*")}
    second = made("second", "--answer-tokens", "300", "--epochs", "2")
    assert "training the layers chosen before" in capsys.readouterr().err
    assert second["requests"] == first["requests"] and second["steps"] == 2 * first["steps"]
    evaluated = [entry for entry in second["log_history"] if "eval_alpha_sampled" in entry]
    assert len(evaluated) > 2 and all("eval_alpha_greedy" in entry for entry in evaluated)
    assert kept and evaluated[-1]["num_input_tokens_seen"] > evaluated[0]["num_input_tokens_seen"]
