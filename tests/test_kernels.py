"""Products by oneDNN and attention without copies: the same numbers, and models that are afterwards as they were."""

import contextlib
import copy
import gc
import importlib.util
import itertools
import os
import pickle
import sys
import threading
import warnings
import weakref
from types import SimpleNamespace
from unittest import mock

import models
import numpy as np
import psutil
import pytest
import torch
from torch.nn.functional import linear
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.decoding import vocabulary
from osd_hf.decoding.draft_length import measured_costs
from osd_hf.memory_plan import memory_plan
from osd_hf.utils import attention, kernels
from osd_hf.utils.kernels import fast_kernels, is_linear, with_fast_products

TIMED, HALF_TIMED = kernels._timed, kernels._half_timed
pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def faster_for_all_layers(monkeypatch):
    monkeypatch.setattr(kernels, "_timed", lambda: True)
    monkeypatch.setattr(kernels, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(kernels, "LEAST_PRODUCTS", 1)


@pytest.fixture
def products(monkeypatch):
    """Shapes of the states of the products that oneDNN computes."""
    seen, own = [], kernels._onednn

    def noted(states, weight, bias=None):
        seen.append(tuple(states.shape))
        return own(states, weight, bias)

    monkeypatch.setattr(kernels, "_onednn", noted)
    return seen


def is_exchanged(model):
    return any(type(m) is kernels.Linear for m in model.modules())


@pytest.mark.parametrize("shape", [(1, 24), (1, 3, 24), (2, 5, 24), (3, 7, 24), (0, 24), (2, 0, 24)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_torch(shape, bias, products):
    layer, states = torch.nn.Linear(24, 16, bias), torch.randn(shape)
    alone = layer(states)
    with fast_kernels(layer):
        ours = layer(states)
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)
    assert len(products) == (1 if states.numel() else 0)


def test_onednn_meets_few_sizes_whatever_the_lengths_of_prompts(products):
    layer, states = torch.nn.Linear(24, 16), torch.randn(1000, 24)
    with fast_kernels(layer), torch.inference_mode():
        alone = linear(states, layer.weight, layer.bias)
        for count in range(1, 1001):
            torch.testing.assert_close(layer(states[:count]), alone[:count], rtol=1e-5, atol=1e-6)
    rows = [shape[0] for shape in products]
    assert all(count <= taken <= min(count * 9 / 8, count + 63) for count, taken in enumerate(rows, 1))
    assert rows[:16] == list(range(1, 17)) and len(set(rows)) == 16 + 6 * 8


@pytest.mark.parametrize("tokens", [5, 26])
def test_a_model_may_write_into_products(tokens):
    layer = with_fast_products(torch.nn.Linear(24, 16))
    states = torch.randn(1, tokens, 24)
    layer(states).clamp_(-0.5, 0.5).sum().backward()
    wanted = linear(states, layer.weight, layer.bias).clamp(-0.5, 0.5)
    (grad,) = torch.autograd.grad(wanted.sum(), layer.weight)
    torch.testing.assert_close(layer.weight.grad, grad, rtol=1e-5, atol=1e-5)


def test_states_that_do_not_lie_in_one_piece(products):
    layer, states = torch.nn.Linear(24, 16), torch.randn(2, 24, 7).mT[:, 1::2]
    with fast_kernels(layer), torch.inference_mode():
        torch.testing.assert_close(layer(states), linear(states, layer.weight, layer.bias), rtol=1e-5, atol=1e-6)
    assert products


@pytest.mark.parametrize("learns", ["states weight bias", "states weight", "bias", "weight", "states"])
@pytest.mark.parametrize("features", [16, 40])
@pytest.mark.parametrize("tokens", [5, 13])
def test_gradients_are_those_of_torch(tokens, features, learns, products):
    layer = torch.nn.Linear(24, features, "bias" in learns)
    states, weights = torch.randn(2, tokens, 24, requires_grad="states" in learns), torch.randn(2, tokens, features)
    layer.weight.requires_grad_("weight" in learns)
    ours = with_fast_products(copy.deepcopy(layer))
    assert is_exchanged(ours)
    grads = []
    for model in (layer, ours):
        states.grad = None
        (model(states) * weights).sum().backward()
        grads.append([states.grad, *(p.grad for p in model.parameters())])
    assert sum(grad is not None for grad in grads[0]) == len(learns.split())
    if "weight" in learns:  # oneDNN copies the first of the two: the smaller one
        assert products[-1][0] == min(24, features)
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_is_no_wrong_one():
    layer, states = with_fast_products(torch.nn.Linear(24, 16)), torch.randn(2, 24, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(states).square().sum(), states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("state", ["half", "cast", "small", "disabled", "another", "sparse", "compiled"])
def test_what_is_left_to_torch(state, products, monkeypatch):
    layer, states = torch.nn.Linear(24, 16), torch.randn(2, 24)
    model = torch.nn.Sequential(layer)
    if state == "half":
        model, states = model.bfloat16(), states.bfloat16()
    elif state == "small":
        monkeypatch.setattr(kernels, "LEAST_WEIGHTS", 24 * 16 + 1)
        monkeypatch.setattr(kernels, "LEAST_PRODUCTS", 2 * 24 * 16 + 1)
    elif state == "disabled":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    elif state == "another":
        layer.__class__ = type("Linear", (torch.nn.Linear,), {})
    elif state == "sparse":
        layer.weight = torch.nn.Parameter(layer.weight.detach().to_sparse(), requires_grad=False)
        monkeypatch.setattr(torch.nn.functional, "linear", lambda states, weight, bias: states)
    elif state == "compiled":
        model.compile(backend="eager")
    with fast_kernels(model), torch.autocast("cpu", enabled=state == "cast"):
        model(states)
    assert products == []


@pytest.mark.parametrize("how", [fast_kernels, with_fast_products])
def test_many_rows_are_worth_it_for_a_small_layer(how, products, monkeypatch):
    monkeypatch.setattr(kernels, "LEAST_WEIGHTS", 24 * 16 + 1)
    monkeypatch.setattr(kernels, "LEAST_PRODUCTS", 8 * 24 * 16)
    layer = torch.nn.Linear(24, 16, bias=False)
    with fast_kernels(layer) if how is fast_kernels else contextlib.nullcontext(with_fast_products(layer)):
        for rows in (7, 8):
            states = torch.randn(rows, 24)
            product = layer(states)
            torch.testing.assert_close(product, linear(states, layer.weight), rtol=1e-5, atol=1e-6)
            if rows == 7:
                assert products == []
            (ours,) = torch.autograd.grad(product.square().sum(), layer.weight)
            (plain,) = torch.autograd.grad(linear(states, layer.weight).square().sum(), layer.weight)
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    assert products[0] == (8, 24) and len(products) == 2


def test_what_is_compiled_for_any_number_of_rows_leaves_small_layers_to_torch(products, monkeypatch):
    monkeypatch.setattr(kernels, "LEAST_WEIGHTS", 24 * 16 + 1)
    monkeypatch.setattr(kernels, "LEAST_PRODUCTS", 8 * 24 * 16)
    layer, graphs = with_fast_products(torch.nn.Linear(24, 16)), []
    compiled = torch.compile(lambda x: layer(x), dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph)
    with torch.inference_mode():
        for rows in (4, 7, 9, 30):
            states = torch.randn(rows, 24)
            assert torch.equal(compiled(states), linear(states, layer.weight, layer.bias))
    assert len(graphs) == 1
    assert products == []


@pytest.mark.parametrize("is_added", [True, False])
@pytest.mark.parametrize("is_turned", [True, False])
@pytest.mark.parametrize("shape", [(3, 6, 8, 6), (1, 5, 5, 9), (0, 4, 4, 4)])
def test_products_of_matrices_are_those_of_torch(shape, is_turned, is_added, products):
    n, rows, inner, columns = shape
    added = torch.randn(n, rows, columns) if is_added else None
    first = torch.randn(n, rows, inner)
    second = torch.randn(n, columns, inner).mT if is_turned else torch.randn(n, inner, columns)
    ours = kernels.baddbmm(added, first, second, beta=0.5, alpha=-2.0)
    plain = first @ second if added is None else -2.0 * (first @ second) + 0.5 * added
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    assert products == n * [(rows, inner)]


@pytest.mark.parametrize("state", ["half", "small", "slower"])
def test_products_of_matrices_that_are_left_to_torch(state, products, monkeypatch):
    first, second = torch.randn(2, 4, 6), torch.randn(2, 6, 5)
    if state == "half":
        first, second = first.bfloat16(), second.bfloat16()
    elif state == "small":
        monkeypatch.setattr(kernels, "LEAST_PRODUCTS", 4 * 6 * 5 + 1)
    elif state == "slower":
        monkeypatch.setattr(kernels, "_timed", lambda: False)
    for added in (None, torch.ones_like(first @ second)):
        plain = first @ second if added is None else 3.0 * (first @ second) + added
        rounding = 0.2 if state == "half" else 1e-5
        torch.testing.assert_close(kernels.baddbmm(added, first, second, alpha=3.0), plain, rtol=0, atol=rounding)
    assert products == []


@pytest.mark.parametrize("fp32_by", ["onednn", "mkl"])
@pytest.mark.parametrize(("half_seconds", "is_faster"), [(0.5, True), (0.9, False), (2.0, False)])
def test_bfloat16_is_faster_where_it_took_clearly_less_time(half_seconds, is_faster, fp32_by, products, monkeypatch):
    monkeypatch.setattr(kernels, "_timed", lambda: fp32_by == "onednn")
    took = itertools.chain([0, 9.0, 0, 0.1], itertools.cycle([0, 1.0, 0, half_seconds]))  # the first ones warm up
    ticks = itertools.accumulate(took)
    assert HALF_TIMED(lambda: next(ticks)) is is_faster
    assert bool(products) == (fp32_by == "onednn")  # it is compared with what float32 would take


def test_bfloat16_is_not_taken_where_onednn_is_disabled(monkeypatch):
    monkeypatch.setattr(kernels, "_half_timed", lambda: True)
    assert kernels.bf16_is_faster()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not kernels.bf16_is_faster()


def test_a_model_is_afterwards_as_it_was():
    model = models.build("llama")
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ZeroDivisionError), fast_kernels(model), fast_kernels(model, None):
        assert is_exchanged(model)
        printed = repr(model)
        copied = copy.deepcopy(model)
        unpickled = pickle.loads(pickle.dumps(model.lm_head))
        _ = 1 / 0
    assert [type(m) for m in model.modules()] == kinds == [type(m) for m in copied.modules()]
    assert type(unpickled) is torch.nn.Linear
    assert printed == repr(model)


LISTENERS = {
    "pre-hook": lambda layer, told: layer.register_forward_pre_hook(told),
    "hook": lambda layer, told: layer.register_forward_hook(told),
    "all": lambda layer, told: torch.nn.modules.module.register_module_forward_pre_hook(told),
    "backward": lambda layer, told: layer.register_full_backward_hook(told),
    "backward-pre": lambda layer, told: layer.register_full_backward_pre_hook(told),
    "instance": lambda layer, told: setattr(layer, "forward", lambda states: told() or states),
}


@pytest.mark.parametrize("listener", LISTENERS)
def test_whoever_listens_to_a_layer_is_told(listener):
    layer, told = torch.nn.Linear(24, 24), []
    with fast_kernels(layer):
        handle = LISTENERS[listener](layer, lambda *_: told.append(listener))
        layer(torch.randn(2, 24, requires_grad=True)).sum().backward()
    if handle is not None:
        handle.remove()
    assert told == [listener]


def test_a_layer_whose_weight_is_no_parameter_any_more():
    layer, states = torch.nn.Linear(24, 16), torch.randn(2, 24)
    with fast_kernels(layer), torch.inference_mode():
        alone = layer(states)
        weight = layer.weight.detach()
        del layer.weight
        layer.weight = weight
        assert torch.equal(layer(states), alone)
        assert torch.equal(layer(input=states), alone)


def test_a_small_layer_is_called_at_once(monkeypatch):
    monkeypatch.setattr(kernels, "LEAST_WEIGHTS", 24 * 16 + 1)
    monkeypatch.setattr(kernels, "LEAST_PRODUCTS", 2 * 24 * 16 + 1)
    layer, states = torch.nn.Linear(24, 16), torch.randn(2, 24)

    def steps():
        calls = []
        sys.setprofile(lambda frame, event, _: calls.append(frame) if event == "call" else None)
        try:
            product = layer(states)
        finally:
            sys.setprofile(None)
        return product, len(calls)

    alone, usual = steps()
    with fast_kernels(layer):
        ours, fewer = steps()
    assert torch.equal(ours, alone)
    assert fewer < usual


def test_whoever_leaves_first_takes_nothing_from_the_other():
    model, inside, leave = models.build("llama"), threading.Event(), threading.Event()
    left = threading.Event()

    def other():
        with fast_kernels(model):
            inside.set()
            assert leave.wait(60)
        left.set()

    thread = threading.Thread(target=other)
    with fast_kernels(model):
        thread.start()
        assert inside.wait(60)
    assert is_exchanged(model)
    leave.set()
    thread.join(60)
    assert left.is_set()
    assert not is_exchanged(model)


def test_blocks_meet():
    model = models.build("llama")
    with fast_kernels(model):
        with fast_kernels(model.lm_head):
            pass
        assert type(model.lm_head) is kernels.Linear
        torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    assert not is_exchanged(model)
    model(torch.ones(1, 2, dtype=torch.long))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_has_the_blocks_of_the_thread_that_forks_alone():
    ours, others, inside, leave = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), threading.Event(), threading.Event()

    def other():
        with fast_kernels(others):
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    with fast_kernels(ours), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        if (child := os.fork()) == 0:
            os._exit(0 if is_exchanged(ours) and not is_exchanged(others) else 1)
    leave.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not is_exchanged(ours)
    assert not is_exchanged(others)


def test_a_layer_is_known_for_one_inside_too():
    head = torch.nn.Linear(8, 8)
    assert is_linear(head)
    with fast_kernels(head):
        assert is_linear(head)
    assert not is_linear(torch.nn.Bilinear(8, 8, 8))


def forwards(model, ids, mask, fast):
    """The logits of a prompt, and of the tokens after it, three at a time."""
    cache, found = DynamicCache(config=model.config), []
    with torch.inference_mode():
        for begin, end in itertools.pairwise([0, 6, 9, 12]):
            with fast_kernels(model if fast else None):
                output = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
            found.append(output.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("padding", [0, 2])
def test_attention_over_shared_keys_is_that_of_copies(family, padding, monkeypatch):
    model = models.build(family).eval()
    ids, mask = torch.randint(3, models.VOCAB, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :padding] = 0
    copies, own = [], attention._SDPA

    def noted(module, query, key, value, attention_mask, **kwargs):
        copies.append(query.shape[2])
        return own(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setattr(attention._folded, "over", noted)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attention._folded)
    alone = forwards(model, ids, mask, fast=False)
    assert 3 in copies
    copies.clear()
    ours = forwards(model, ids, mask, fast=True)
    seen = mask[:, :, None].bool()
    torch.testing.assert_close(ours * seen, alone * seen, rtol=1e-4, atol=1e-5)
    assert (3 in copies) == (family == "gpt2")  # whose heads share nothing


def test_an_answer_is_the_targets_own_and_the_target_as_it_was(products):
    target, draft = models.build("llama"), models.build("llama", num_hidden_layers=1)
    ids = torch.randint(3, models.VOCAB, (1, 9))
    alone = target.generate(ids, max_new_tokens=24, do_sample=False)
    assert products == []
    config = OnlineConfig(num_assistant_tokens=3, update_strategy="manual")
    with OnlineAssistant(target, draft, config=config) as assistant:
        answer = assistant.generate(ids, max_new_tokens=24, do_sample=False)
        assert products
        assert torch.equal(answer, alone)
        assert not is_exchanged(target)
        assert not is_exchanged(draft)
        products.clear()
        assistant.update(1)
        assert products
        products.clear()
        assert torch.equal(assistant.generate(ids, max_new_tokens=24, do_sample=False), alone)
    products.clear()
    target.generate(ids, max_new_tokens=4, do_sample=False, assistant_model=draft)
    assert products == []


def test_a_head_of_few_tokens_has_them_too(products):
    draft = models.build("llama")
    few = vocabulary.RestrictedDraft(draft, np.arange(32)).model
    assert type(few.get_output_embeddings()) is kernels.Linear
    assert not is_exchanged(draft)


@pytest.mark.parametrize(("theirs", "ours", "is_faster"), [(1.3, 1.0, True), (1.1, 1.0, False), (1.0, 2.0, False)])
def test_timing_tells_the_faster_one(theirs, ours, is_faster):
    steps = itertools.accumulate(itertools.cycle([0.0, theirs, 0.0, ours]))
    assert TIMED.__wrapped__(lambda: next(steps)) == is_faster


def test_a_mask_for_all_tokens_at_once_is_transformers_own():
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    module, mask = torch.nn.Module(), torch.tensor([0, 1, 1, 1, 1]).bool()[None, None, None]
    module.num_key_value_groups = 2
    with fast_kernels(torch.nn.Linear(2, 2)), torch.inference_mode():
        ours, _ = attention._folded(module, query, key, key, mask)
        assert torch.equal(ours, attention._SDPA(module, query, key, key, mask)[0])


def test_two_copies_of_the_module_fold_side_by_side(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attention._SDPA)
    monkeypatch.setattr(attention._folded, "over", attention._SDPA)

    def copied():
        monkeypatch.setattr(torch.library, "Library", mock.MagicMock())  # has one definition of each name
        with monkeypatch.context() as patched:
            for module in (attention, kernels):
                spec = importlib.util.spec_from_file_location("copied", module.__file__)
                found = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(found)
                patched.setitem(sys.modules, module.__name__, found)
        assert found.fold is not attention.fold
        return found

    model, products = torch.nn.Linear(2, 2), []
    early = copied()
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, *_, **__: products.append(q) or q
    )
    query, key, mask = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.ones(1, 1, 3, 5).bool()
    module = torch.nn.Module()
    module.num_key_value_groups = 2

    def folds(one):
        with one.fast_kernels(model), torch.inference_mode():
            ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, key, mask)
        return products.pop().shape[1] == 2

    with kernels.fast_kernels(model):
        pass
    late = copied()  # when the package's is asked already
    for one in (early, late, kernels, early, late):
        assert folds(one)
    with torch.inference_mode():
        ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, key, mask)
    assert products.pop().shape[1] == 4
    others = lambda *args, **kwargs: (query, None)  # noqa: E731
    ALL_ATTENTION_FUNCTIONS.register("sdpa", others)
    with kernels.fast_kernels(model):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is others


# --- packed weights -------------------------------------------------------------------------------------------------


@pytest.fixture
def used(monkeypatch):
    """Whether the weight of each product without gradients was packed."""
    seen, own = [], kernels._onednn

    def noted(states, weight, bias=None):
        seen.append(weight.layout != torch.strided)
        return own(states, weight, bias)

    monkeypatch.setattr(kernels, "_onednn", noted)
    return seen


def asked(layer, states):
    """A product of a layer while it serves a request."""
    with torch.inference_mode(), fast_kernels(layer, is_request=True):
        return layer(states)


def test_weights_that_stand_still_are_packed_for_the_second_request(used):
    layer, states = torch.nn.Linear(24, 16), torch.randn(2, 5, 24)
    products = [asked(layer, states) for _ in range(3)]
    assert used == [False, True, True]
    assert torch.equal(products[0], products[1])
    assert torch.equal(products[0], products[2])
    with fast_kernels(layer), torch.inference_mode():
        layer(states)
    assert used[3:] == [True]
    layer(states)
    assert len(used) == 4


CHANGES = {
    "step": lambda layer: torch.optim.SGD(layer.parameters(), lr=1.0).step(),
    "dense": lambda layer: layer.weight.data.add_(1.0),
    "row": lambda layer: layer.weight.data[7].zero_(),
    "storage": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1.0),
    "parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight.detach() + 1.0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_packed_is_never_older_than_the_weights(change, used):
    layer, states = torch.nn.Linear(24, 16), torch.randn(2, 24)
    layer.weight.grad = torch.ones_like(layer.weight)
    for _ in range(2):
        asked(layer, states)
    with torch.no_grad():
        CHANGES[change](layer)
    now = copy.deepcopy(layer)
    for _ in range(3):
        torch.testing.assert_close(asked(layer, states), linear(states, now.weight, now.bias).detach())
    assert used == [False, True, False, True, True]


@pytest.mark.parametrize("state", ["transposed", "inference"])
def test_a_weight_that_is_packed_no_more_is_taken_as_it_is(state, used):
    layer, states = torch.nn.Linear(24, 24), torch.randn(2, 24)
    for _ in range(2):
        asked(layer, states)
    with torch.inference_mode():
        # At the same address, with the same count of changes; and without any count.
        layer.weight.data = layer.weight.data.t() if state == "transposed" else layer.weight.data + 1.0
    with torch.inference_mode():
        alone = linear(states, layer.weight, layer.bias)
    torch.testing.assert_close(asked(layer, states), alone)
    assert used == [False, True, False]
    assert id(layer.weight) not in kernels._packs


def test_a_weight_exchanged_in_a_request_for_one_without_a_count(used):
    layer, states = torch.nn.Linear(24, 16), torch.randn(2, 24)
    asked(layer, states)
    with torch.inference_mode(), fast_kernels(layer, is_request=True):
        layer.weight.data = layer.weight.data + 1.0
        torch.testing.assert_close(layer(states), linear(states, layer.weight, layer.bias))
    assert not any(used)


def test_nor_is_it_where_nothing_is_requested(used):
    layer, states = torch.nn.Linear(24, 16), torch.randn(2, 24)
    for _ in range(2):
        asked(layer, states)
    layer.weight.data.mul_(2.0)
    with torch.inference_mode(), fast_kernels(layer):
        torch.testing.assert_close(layer(states), linear(states, layer.weight, layer.bias))
    assert used == [False, True, False]


def test_a_weight_that_is_written_to_in_a_request(used):
    layer, states = torch.nn.Linear(24, 16), torch.randn(2, 24)
    asked(layer, states)
    with torch.inference_mode(), fast_kernels(layer, is_request=True):
        layer.weight.mul_(2.0)
        torch.testing.assert_close(layer(states), linear(states, layer.weight, layer.bias))
    assert not any(used)


def test_weights_that_are_trained_between_requests_are_never_packed(used):
    layer = torch.nn.Linear(24, 16)
    for _ in range(4):
        asked(layer, torch.randn(2, 24))
        with torch.no_grad():
            layer.weight.add_(1.0)
    assert used == [False] * 4


def test_weights_are_packed_where_there_is_memory(used, monkeypatch):
    layer, states, size = torch.nn.Linear(24, 16), torch.randn(2, 24), 24 * 16 * 4
    memory = SimpleNamespace(available=size / kernels.MOST_PACKED - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    for _ in range(3):
        asked(layer, states)
    assert not any(used)
    assert kernels.packed_bytes(layer) == 0
    memory.available += 1
    monkeypatch.setitem(sys.modules, "psutil", None)  # nobody says how much there is
    assert kernels._available() == 0
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    asked(layer, states)
    assert used[3:] == [True]
    assert kernels.packed_bytes(torch.nn.Sequential(layer.to("meta"))) == size


def test_a_container_may_have_less_memory_than_its_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    assert kernels._available() == 5000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\nslab 7\n")
    assert kernels._available() == 5000
    (tmp_path / "memory.max").write_text("1000\n")
    assert kernels._available() == 400
    assert kernels.packed_bytes(torch.nn.Linear(24, 16, device="meta")) == 0


def test_no_answer_is_lost_where_memory_does_not_suffice_in_the_end(used, monkeypatch):
    model, states = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Linear(16, 8)), torch.randn(2, 24)
    own, packed = kernels._Pack, []

    def pack(weight):
        packed.append(weight.shape)
        if len(packed) % 2 == 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return own(weight)

    monkeypatch.setattr(kernels, "_Pack", pack)
    for _ in range(4):
        torch.testing.assert_close(asked(model, states), model(states).detach())
    assert len(packed) == 2
    assert not any(used)
    assert not any(id(p) in kernels._packs for p in model.parameters())
    kernels.unpack(model)
    asked(model, states)
    asked(model, states)
    assert len(packed) == 4


def test_packed_weights_go_where_the_model_is_cast():
    layer = torch.nn.Linear(24, 16)
    for _ in range(2):
        asked(layer, torch.randn(2, 24))
    assert id(layer.bfloat16().weight) in kernels._packs
    kernels.unpack(layer)
    assert id(layer.weight) not in kernels._packs


def test_packed_weights_go_with_the_model_and_when_told():
    gc.collect()
    before = len(kernels._packs)
    layer, other = torch.nn.Linear(24, 16), torch.nn.Linear(24, 16)
    for _ in range(2):
        asked(layer, torch.randn(2, 24))
        asked(other, torch.randn(2, 24))
    assert len(kernels._packs) == before + 2
    kernels.unpack(other)
    assert len(kernels._packs) == before + 1
    del layer
    gc.collect()
    assert len(kernels._packs) == before


def test_a_plan_counts_the_packed_weights_of_all_that_serves():
    target, draft = models.pair()
    plan = memory_plan(target.config, draft.config, drafts=2, device_type="cpu")
    (packed,) = (part.bytes for part in plan.parts if "packed" in part.name)
    assert packed == kernels.packed_bytes(target) + 3 * kernels.packed_bytes(draft) > 0


def test_costs_are_those_of_packed_weights_which_are_let_go_of(used):
    (target, draft), before = models.pair(), len(kernels._packs)
    measured_costs(target, [draft], [3, 4, 5], itertools.count().__next__)
    assert used[-1]
    assert len(kernels._packs) == before


def test_a_compiled_forward_computes_with_packed_weights(used):
    layer, states = torch.nn.Linear(24, 16), torch.randn(2, 24)
    forward = torch.compile(lambda states: layer(states), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        with torch.inference_mode(), fast_kernels(layer, is_request=True):
            product = forward(states)
    torch.testing.assert_close(product, layer(states))
    assert used == [False, True, True]


def test_an_assistant_serves_with_packed_weights_until_it_is_closed(used):
    target, draft = models.build("llama"), models.build("llama", num_hidden_layers=1)
    ids, before = torch.randint(3, models.VOCAB, (1, 9)), len(kernels._packs)
    alone = target.generate(ids, max_new_tokens=12, do_sample=False)
    with OnlineAssistant(target, draft, config=OnlineConfig(update_strategy="manual")) as assistant:
        for _ in range(2):
            assert torch.equal(assistant.generate(ids, max_new_tokens=12, do_sample=False), alone)
        assert any(used)
        assert len(kernels._packs) > before
        drafted = [*assistant.draft.parameters()]
        assert any(id(p) in kernels._packs for p in drafted)
    assert not any(id(p) in kernels._packs for p in (*target.parameters(), *drafted))


class Attention(torch.nn.Module):
    """Three products of the same states, as attention has them; `between` is called before the second."""

    def __init__(self, width=24, between=None, is_encoder_decoder=False):
        super().__init__()
        self.q_proj, self.k_proj = torch.nn.Linear(width, 16), torch.nn.Linear(width, 8)
        self.v_proj, self.between = torch.nn.Linear(width, 8, bias=False), between or (lambda states: states)
        self.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)

    def forward(self, states):
        query = self.q_proj(states)
        states = self.between(states)
        return query, self.k_proj(states), self.v_proj(states)

    def alone(self, states):
        """The products one by one, by torch."""
        query = linear(states, self.q_proj.weight, self.q_proj.bias).detach()
        states = self.between(states)
        key = linear(states, self.k_proj.weight, self.k_proj.bias).detach()
        return query, key, linear(states, self.v_proj.weight).detach()


@pytest.fixture
def widths(monkeypatch):
    """Outputs of each product that oneDNN computes."""
    seen, own = [], kernels._onednn

    def noted(states, weight, bias=None):
        product = own(states, weight, bias)
        seen.append(product.shape[-1])
        return product

    monkeypatch.setattr(kernels, "_onednn", noted)
    return seen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 5, 24), (2, 3, 24), (1, 40, 24), (7, 24)], ids=str)
def test_products_of_the_same_states_are_computed_as_one(shape, mode, widths):
    attention = Attention()
    asked(attention, torch.randn(1, 1, 24))
    asked(attention, torch.randn(1, 1, 24))
    states, before = torch.randn(shape), len(widths)
    with mode(), fast_kernels(attention, is_request=True):
        products = attention(states)
    assert widths[before:] == [32]
    for ours, alone in zip(products, attention.alone(states), strict=True):
        torch.testing.assert_close(ours, alone)
        assert ours.is_contiguous()


def test_nothing_is_packed_in_the_middle_of_a_request(monkeypatch, widths):
    """Rounds are timed, and packing takes long: what is asked for by itself is packed before the next request."""
    attention, states, packed = Attention(), torch.randn(1, 2, 24), []
    own, is_inside = kernels._reordered, threading.Event()
    monkeypatch.setattr(kernels, "_reordered", lambda w: packed.append((len(w), is_inside.is_set())) or own(w))

    def request(names):
        with torch.no_grad(), fast_kernels(attention, is_request=True):
            is_inside.set()
            for name in names:
                layer = getattr(attention, name)
                alone = linear(states, layer.weight, layer.bias)
                torch.testing.assert_close(layer(states), alone)
            is_inside.clear()

    for names in (["q_proj"], ["k_proj"], ["k_proj"], ["k_proj"]):
        request(names)
    assert packed == [(32, False), (8, False)]
    monkeypatch.setattr(kernels, "_available", lambda: 0)
    request(["v_proj"])
    request(["v_proj"])
    assert packed == [(32, False), (8, False)]


def test_learning_computes_each_product_by_itself(widths):
    attention, states = Attention(), torch.randn(1, 5, 24)
    for _ in range(2):
        asked(attention, states)
    with fast_kernels(attention):
        products = attention(states)
    assert widths[-3:] == [16, 8, 8]
    assert all(product.requires_grad for product in products)
    torch.testing.assert_close([product.detach() for product in products], [*attention.alone(states)])


WRITES = {
    "others": lambda states: states.clone(),
    "written to": lambda states: states.mul_(2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_states_that_are_others_by_then_are_not_taken_for_the_same(write, widths):
    attention = Attention(between=WRITES[write])
    for _ in range(kernels.MOST_UNTAKEN + 3):
        with torch.no_grad(), fast_kernels(attention, is_request=True):
            states = torch.randn(1, 2, 24)
            torch.testing.assert_close(attention(states.clone()), attention.alone(states.clone()))
    # Some are in vain, until it is known that they are.
    assert widths == [16, 8, 8] + [32, 8, 8] * kernels.MOST_UNTAKEN + [16, 8, 8] * 2


@pytest.mark.parametrize("write", WRITES)
def test_states_of_inference_mode_are_multiplied_one_by_one_as_nobody_counts_their_changes(write, widths):
    attention = Attention(between=WRITES[write])
    for _ in range(4):
        with torch.inference_mode(), fast_kernels(attention, is_request=True):
            states = torch.randn(1, 2, 24)
            torch.testing.assert_close(attention(states.clone()), attention.alone(states.clone()))
    assert widths == [16, 8, 8] * 4


def test_a_weight_that_is_written_to_between_products_of_the_same_states():
    attention, states = Attention(), torch.randn(1, 2, 24)
    for _ in range(2):
        asked(attention, states)
    with torch.no_grad(), fast_kernels(attention, is_request=True):
        attention.between = lambda states: attention.k_proj.weight.mul_(2.0) is None or states
        _, key, value = attention(states)
    torch.testing.assert_close(key, linear(states, attention.k_proj.weight, attention.k_proj.bias).detach())
    torch.testing.assert_close(value, linear(states, attention.v_proj.weight).detach())


def test_products_that_nobody_took_keep_nothing_alive():
    attention, states = Attention(), torch.randn(1, 2, 24)
    for _ in range(2):
        asked(attention, states)
    gone = weakref.ref(attention.k_proj.weight)
    with torch.no_grad(), fast_kernels(attention, is_request=True):
        attention.q_proj(states)
    del attention
    gc.collect()
    assert gone() is None


def test_autocast_is_asked_for_at_each_product():
    attention, states = Attention(), torch.randn(1, 2, 24)
    for _ in range(2):
        asked(attention, states)
    with torch.no_grad(), fast_kernels(attention, is_request=True):
        attention.q_proj(states)
        with torch.autocast("cpu"):
            assert attention.k_proj(states).dtype is torch.bfloat16


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("listens", ["before the second", "after the first"])
def test_whoever_listens_to_a_layer_may_write_into_its_states(listens, mode):
    attention, states = Attention(), torch.randn(1, 2, 24)
    for _ in range(2):
        asked(attention, states)
    if listens == "after the first":
        attention.q_proj.register_forward_hook(lambda module, args, output: args[0].mul_(2.0) is None or None)
    else:
        attention.k_proj.register_forward_pre_hook(lambda module, args: (args[0].mul_(2.0),))
    with mode(), fast_kernels(attention, is_request=True):
        _, key, value = attention(states.clone())
    torch.testing.assert_close(key, linear(2 * states, attention.k_proj.weight, attention.k_proj.bias).detach())
    torch.testing.assert_close(value, linear(2 * states, attention.v_proj.weight).detach())


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("change", ["dense", "row", "storage", "parameter"])
def test_what_was_packed_together_is_never_older_than_a_weight(change, name, widths):
    attention, states = Attention(), torch.randn(1, 2, 24)
    for _ in range(2):
        asked(attention, states)
    with torch.no_grad():
        CHANGES[change](getattr(attention, name))
    for _ in range(3):
        torch.testing.assert_close(asked(attention, states), attention.alone(states))
    assert widths == [16, 8, 8, 32, 16, 8, 8, 32, 32]


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_sibling_that_is_written_to_in_a_request(name):
    attention, states = Attention(), torch.randn(1, 2, 24)
    for _ in range(2):
        asked(attention, states)
    with torch.no_grad(), fast_kernels(attention, is_request=True):
        getattr(attention, name).weight.mul_(2.0)
        torch.testing.assert_close(attention(states), attention.alone(states))


def test_siblings_may_be_asked_in_another_order():
    attention, states = Attention(), torch.randn(1, 2, 24)
    for _ in range(2):
        asked(attention, states)
    names = ["q_proj", "v_proj", "k_proj"]
    with torch.inference_mode(), fast_kernels(attention, is_request=True):
        products = [getattr(attention, name)(states) for name in names]
    alone = [linear(states, getattr(attention, name).weight, getattr(attention, name).bias).detach() for name in names]
    torch.testing.assert_close(products, alone)


def test_a_sibling_that_learns_beside_a_frozen_one_has_a_gradient():
    attention, states = Attention(), torch.randn(1, 2, 24)
    attention.q_proj.requires_grad_(False)
    for _ in range(2):
        asked(attention, states)
    with fast_kernels(attention):
        query, key, value = attention(states)
    assert not query.requires_grad
    assert key.requires_grad and value.requires_grad


def test_a_bias_may_change_at_any_time():
    attention, states = Attention(), torch.randn(1, 2, 24)
    for _ in range(3):
        with torch.no_grad():
            attention.k_proj.bias.add_(1.0)
        torch.testing.assert_close(asked(attention, states), attention.alone(states))


def test_layers_of_a_model_with_an_encoder_are_packed_one_by_one(widths):
    attention, states = Attention(is_encoder_decoder=True), torch.randn(1, 2, 24)
    for _ in range(3):
        torch.testing.assert_close(asked(attention, states), attention.alone(states))
    assert widths == [16, 8, 8] * 3


def test_no_answer_is_lost_where_memory_does_not_suffice_for_weights_together(widths, monkeypatch):
    attention, states, own = Attention(), torch.randn(1, 2, 24), kernels._reordered

    def reordered(weight):
        if len(weight) == 32:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return own(weight)

    monkeypatch.setattr(kernels, "_reordered", reordered)
    for _ in range(3):
        torch.testing.assert_close(asked(attention, states), attention.alone(states))
    assert widths == [16, 8, 8] * 3
    monkeypatch.setattr(kernels, "_reordered", mock.Mock(side_effect=MemoryError))
    again = Attention()
    for _ in range(3):
        torch.testing.assert_close(asked(again, states), again.alone(states))


def test_threads_take_their_own_products():
    attention, failures = Attention(), []
    for _ in range(2):
        asked(attention, torch.randn(1, 2, 24))

    def ask(seed):
        states = torch.randn(1, 2, 24, generator=torch.Generator().manual_seed(seed))
        for _ in range(50):
            with torch.no_grad(), fast_kernels(attention, is_request=True):
                if not all(map(torch.allclose, attention(states), attention.alone(states))):
                    failures.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_compiled_forward_computes_each_product_by_itself(widths):
    attention, states = Attention(), torch.randn(1, 2, 24)
    forward = torch.compile(lambda states: attention(states), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        with torch.inference_mode(), fast_kernels(attention, is_request=True):
            products = forward(states)
    torch.testing.assert_close(products, attention.alone(states))
    assert widths == [16, 8, 8] * 3


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "mixtral", "opt"])
def test_answers_are_the_targets_where_products_are_computed_as_one(family, widths):
    target, ids = models.build(family), torch.randint(3, models.VOCAB, (1, 9))
    alone = target.generate(ids, max_new_tokens=16, do_sample=False)
    groups = kernels._siblings(target, {m for m in target.modules() if is_linear(m)})
    together = {sum(layer.out_features for layer in group) for group in groups}
    config = OnlineConfig(num_assistant_tokens=3, update_strategy="manual")
    with OnlineAssistant(target, models.build(family, seed=1), config=config) as assistant:
        for _ in range(3):
            assert torch.equal(assistant.generate(ids, max_new_tokens=16, do_sample=False), alone)
    assert together and together <= set(widths)


def test_a_call_whose_layer_is_put_back_meanwhile_is_answered() -> None:
    layer, states = torch.nn.Linear(4, 3), torch.ones(2, 4)
    assert torch.equal(kernels.Linear.__call__(layer, states), layer(states))
