"""Linear layers by oneDNN compute the same numbers, never with outdated weights, and leave models unchanged."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import models
import psutil
import pytest
import torch
from torch.nn.functional import linear

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.utils import kernels
from osd_hf.utils.kernels import OneDnnLinear, fast_kernels, min_side

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def faster_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "min_side", lambda: 1)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Number of rows of each product by oneDNN, and whether its weight was packed."""
    seen: list[tuple[int, bool]] = []
    multiply = kernels._multiply

    def noted(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append((len(rows), weight.layout != torch.strided))
        return multiply(rows, weight, bias)

    monkeypatch.setattr(kernels, "_multiply", noted)
    return seen


@pytest.fixture
def layer() -> torch.nn.Linear:
    return torch.nn.Linear(24, 16)


def is_exchanged(model: torch.nn.Module) -> bool:
    return any(type(module) is OneDnnLinear for module in model.modules())


def request(layer: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(), fast_kernels(layer, is_request=True):
        result: torch.Tensor = layer(states)
    return result


def plain(layer: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
    return linear(states, layer.weight, layer.bias).detach()


def test_builds_of_torch_without_the_kernel_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    min_side.cache_clear()
    assert min_side() is None
    min_side.cache_clear()


@pytest.mark.parametrize("shape", [(1, 24), (1, 3, 24), (2, 5, 24), (3, 7, 24), (0, 24), (2, 0, 24)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_request", [True, False])
def test_products_equal_those_of_torch(shape: tuple[int, ...], bias: bool, is_request: bool, products: Any) -> None:
    layer, states = torch.nn.Linear(24, 16, bias), torch.randn(shape)
    with fast_kernels(layer, is_request=is_request), torch.no_grad():
        torch.testing.assert_close(layer(states), plain(layer, states), rtol=1e-5, atol=1e-6)
    assert [packed for _, packed in products] == ([is_request] if states.numel() else [])


@pytest.mark.parametrize("state", ["half", "autocast", "small", "gradient", "disabled", "subclass", "compiled"])
def test_other_layers_are_left_to_torch(
    state: str, layer: torch.nn.Linear, products: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, states = torch.nn.Sequential(layer), torch.randn(2, 24)
    if state == "half":
        model, states = model.bfloat16(), states.bfloat16()
    elif state == "small":
        monkeypatch.setattr(kernels, "min_side", lambda: 17)
    elif state == "disabled":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    elif state == "subclass":
        layer.__class__ = type("Linear", (torch.nn.Linear,), {})
    elif state == "compiled":
        model.compile(backend="eager")
    with (
        fast_kernels(model, is_request=True),
        torch.autocast("cpu", enabled=state == "autocast"),
        torch.set_grad_enabled(state == "gradient"),
    ):
        output = model(states)
    assert products == []
    assert output.requires_grad == (state == "gradient")


def test_a_compiled_forward_computes_with_packed_weights(layer: torch.nn.Linear, products: list[Any]) -> None:
    states = torch.randn(2, 24)
    forward = torch.compile(lambda states: layer(states), backend="aot_eager", fullgraph=True)
    with torch.inference_mode(), fast_kernels(layer, is_request=True):
        torch.testing.assert_close(forward(states), plain(layer, states))
    assert products == [(2, True)]


def test_a_model_is_restored(products: list[Any]) -> None:
    model = models.build("llama")
    kinds, printed = [type(m) for m in model.modules()], repr(model)
    with pytest.raises(ZeroDivisionError), fast_kernels(model), fast_kernels(model, None):
        assert is_exchanged(model)
        copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model.lm_head))
        _ = 1 / 0
    assert [type(m) for m in model.modules()] == kinds == [type(m) for m in copied.modules()]
    assert type(unpickled) is torch.nn.Linear
    assert printed == repr(model)


def test_an_answer_is_the_targets_and_both_models_are_restored(products: list[tuple[int, bool]]) -> None:
    target, draft = models.build("llama"), models.build("llama", num_hidden_layers=1)
    ids = torch.randint(3, models.VOCAB, (1, 9))
    alone = target.generate(ids, max_new_tokens=24, do_sample=False)
    assert products == []
    packed_before = len(kernels._packed_weights)
    config = OnlineConfig(num_assistant_tokens=3, update_strategy="manual")
    with OnlineAssistant(target, draft, config=config) as assistant:
        for _ in range(2):
            assert torch.equal(assistant.generate(ids, max_new_tokens=24, do_sample=False), alone)
            assert not is_exchanged(target) and not is_exchanged(assistant.draft)
            assistant.update(1)
        assert any(packed for _, packed in products)
        assert len(kernels._packed_weights) > packed_before
    gc.collect()
    assert len(kernels._packed_weights) == packed_before


Change = Callable[[torch.nn.Linear], object]
CHANGES: dict[str, Change] = {
    "optimizer": lambda layer: torch.optim.SGD(layer.parameters(), lr=1.0).step(),
    "all data": lambda layer: layer.weight.data.add_(1.0),
    "one row": lambda layer: layer.weight.data[7].zero_(),
    "storage": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1.0),
    "transposed": lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),
    "parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight.detach() + 1.0)),
    "bias": lambda layer: layer.bias.data.add_(1.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_request", [True, False])
def test_packed_weights_are_never_outdated(change: str, is_request: bool) -> None:
    layer, states = torch.nn.Linear(16, 16), torch.randn(2, 16)
    layer.weight.grad = torch.ones_like(layer.weight)
    before = request(layer, states)
    with torch.no_grad():
        CHANGES[change](layer)
    with torch.inference_mode(), fast_kernels(layer, is_request=is_request):
        torch.testing.assert_close(layer(states), plain(layer, states))
    assert not torch.allclose(plain(layer, states), before)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    memory = SimpleNamespace(available=1 << 40)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    yield memory


def test_weights_are_packed_if_there_is_memory(
    layer: torch.nn.Linear, products: list[Any], memory: SimpleNamespace
) -> None:
    memory.available = layer.weight.nbytes / kernels.MAX_PACKED_SHARE - 1
    states = torch.randn(2, 24)
    torch.testing.assert_close(request(layer, states), plain(layer, states))
    memory.available += 1
    torch.testing.assert_close(request(layer, states), plain(layer, states))
    assert products == [(2, False), (2, True)]
