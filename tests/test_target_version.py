"""Which version of a target answers: the same for the same weights, another one after any change, and noticed."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from osd_hf import Trace, capture_traces
from osd_hf.target_version import fingerprint, look_closely, target_changed, target_version

module = sys.modules["osd_hf.target_version"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft reads it
    pytest.mark.filterwarnings("ignore:.*:UserWarning:peft"),  # of adapters that are merged twice
]


def tiny(**changes: Any) -> Any:
    return models.build(num_hidden_layers=1, **changes)


def sft_step(model: Any, names: tuple[str, ...] | None = None, rate: float = 1e-3) -> None:
    """A step of AdamW on the parameters of these names, or on all."""
    ids = models.prompt(24)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(names is None or name in names)
    loss = model(input_ids=ids, labels=ids).loss
    if not loss.requires_grad:  # of an adapter that is not active
        return
    loss.backward()
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate).step()
    model.zero_grad()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_comes_back_with_its_own(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    model = models.build(architecture, **models.SHALLOW[architecture]).to(dtype)
    auto = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM
    model.save_pretrained(tmp_path)
    assert fingerprint(auto.from_pretrained(tmp_path, dtype=dtype)) == fingerprint(model)
    assert fingerprint(SimpleNamespace(_orig_mod=model)) == fingerprint(model)  # compiled
    assert fingerprint(copy.deepcopy(model).double()) != fingerprint(model)  # another dtype rounds otherwise


def test_a_step_on_any_weight_is_another_version() -> None:
    plain = tiny()
    before, seen = fingerprint(plain), set()
    for name, _ in plain.named_parameters():
        model = copy.deepcopy(plain)
        sft_step(model, (name,), 1e-5)
        seen.add(fingerprint(model))
    assert before not in seen
    assert len(seen) == len(dict(plain.named_parameters()))


def test_what_is_not_saved_is_no_part_of_it() -> None:
    model = tiny()
    before = fingerprint(model)
    for buffer in model.buffers():
        buffer += 1
    assert fingerprint(model) == before
    model.lm_head.register_buffer("scale", torch.ones(1))
    assert fingerprint(model) != before


class Scaled(torch.Tensor):
    """A tensor made of others, as those of quantization packages are."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=torch.float32)

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self) -> Any:
        return ["integers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].integers, args[0].scale)
        plain = tree_map(lambda x: x.integers * x.scale if isinstance(x, Scaled) else x, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def test_quantized_weights_are_known_by_what_they_are_made_of() -> None:
    def quantized(scale: float) -> Any:
        model = tiny()
        integers = torch.arange(64 * 32).reshape(64, 32).to(torch.int8)
        model.lm_head.weight = torch.nn.Parameter(Scaled(integers, torch.tensor(scale)), requires_grad=False)
        return model

    assert fingerprint(quantized(0.1)) == fingerprint(quantized(0.1))
    assert len({fingerprint(tiny()), fingerprint(quantized(0.1)), fingerprint(quantized(0.2))}) == 3
    assert target_version(quantized(0.1)) == fingerprint(quantized(0.1))


def adapted(*names: str, save: str | None = None) -> Any:
    """A model with adapters of these names, the first one active; none of them is neutral."""
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=[save] if save else None)
    model = get_peft_model(tiny(), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name or "modules_to_save" in parameter_name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.mark.parametrize("save", [None, "lm_head"])
def test_adapters_count_where_they_shape_the_output(save: str | None, tmp_path: Path) -> None:
    plain, model = tiny(), adapted("one", "two", save=save)
    a = fingerprint(model)
    model.set_adapter("two")
    b = fingerprint(model)
    with model.disable_adapter():
        assert fingerprint(model) == fingerprint(plain)
    model.set_adapter("one")
    assert len({a, b, fingerprint(plain)}) == 3
    assert fingerprint(model) == a
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["one"] *= 2
    assert fingerprint(model) != a
    alone = adapted("one", save=save)
    alone.save_pretrained(tmp_path)
    own = fingerprint(alone)
    # Under another name it is the same adapter.
    again = adapted("else", save=save)
    again.load_adapter(tmp_path / "one", "other")
    again.set_adapter("other")
    assert fingerprint(again) == own
    alone.merge_adapter()
    merged = fingerprint(alone)
    assert fingerprint(alone.merge_and_unload()) == merged != own


ACTIONS: dict[str, Any] = {
    "train all": lambda m: sft_step(m),
    "train an adapter": lambda m: sft_step(m, tuple(n for n, _ in m.named_parameters() if "lora_A.two" in n)),
    "to a": lambda m: m.set_adapter("one"),
    "to b": lambda m: m.set_adapter("two"),
    "without": lambda m: m.base_model.disable_adapter_layers(),
    "with": lambda m: m.base_model.enable_adapter_layers(),
    "merge": lambda m: m.merge_adapter(),
    "unmerge": lambda m: m.unmerge_adapter(),
    "another adapter": lambda m: "three" in m.peft_config or m.add_adapter("three", m.peft_config["one"]),
    "load": lambda m: m.load_state_dict({n: t + 0.25 for n, t in m.state_dict().items()}),
    "load others": lambda m: m.load_state_dict({n: t + 0.5 for n, t in m.state_dict().items()}, assign=True),
    "nothing": lambda m: None,
}


@functools.cache
def with_adapters() -> Any:
    return adapted("one", "two")


@given(st.lists(st.sampled_from(sorted(ACTIONS)), max_size=6))
@example(["merge", "unmerge"])  # which leaves other weights, by rounding
@settings(max_examples=25)
def test_what_is_done_to_a_model_is_noticed(actions: list[str]) -> None:
    model = copy.deepcopy(with_adapters())
    target_version(model)
    for action in actions:
        ACTIONS[action](model)
        assert target_version(model) == fingerprint(model), action


def test_what_is_written_past_torch_is_found_by_a_close_look() -> None:
    model = tiny()
    before = target_version(model)
    for parameter in model.parameters():
        parameter.data += 1e-3
    assert target_version(model) == before  # which is what is not noticed
    assert look_closely(model) == target_version(model) == fingerprint(model) != before
    assert look_closely(model) is None


def test_whoever_says_so_is_believed() -> None:
    model = tiny()
    before = target_version(model)
    names = [target_changed(model) for _ in range(2)]
    assert len({before, *names}) == 3
    assert target_version(model) == names[-1]
    assert look_closely(model) is None
    sft_step(model)
    assert target_version(model) == fingerprint(model)
    assert target_changed(model) != fingerprint(model)


def test_what_has_no_weights_has_no_version_and_answers() -> None:
    assert target_version(object()) is None
    target, draft = models.pair(num_hidden_layers=1)
    target.register_parameter("odd", torch.nn.Parameter(torch.zeros(2, dtype=torch.complex128), requires_grad=False))
    seen: list[Trace] = []
    ids = models.prompt()
    with capture_traces(target, seen.append):
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=4)
    assert [trace.target for trace in seen] == [None]
    assert len(seen[0]) == 4
