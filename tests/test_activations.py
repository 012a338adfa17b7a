from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import models
import numpy as np
import pytest
import torch

from osd_hf import OnlineConfig, Trace
from osd_hf.learning import loss as module
from osd_hf.learning.loss import ActivationMemory, recomputed_layers, shortened
from osd_hf.learning.updater import Updater
from osd_hf.replay import completion_states
from osd_hf.trace import DraftRound, bare_trace

CONFIG = OnlineConfig(update_strategy="interval", steps_per_update=1, batch_size=4, num_logprobs=4, optimizer="adamw",
    weight_average=0.0,
)  # fmt: skip


def request(prompt: int, answer: int, model: Any = None, vocab_size: int = models.VOCAB) -> Trace:
    """One with rows of the target, each drafted in rounds of three, of which one is accepted."""
    is_encoder_decoder = model is not None and model.config.is_encoder_decoder
    bare = bare_trace(
        3 + np.arange(prompt) % 60, 3 + np.arange(answer) % 60, vocab_size,
        np.zeros(1, np.int32) if is_encoder_decoder else None,
    )  # fmt: skip
    emitted = [2] * (answer // 2) + [1] * (answer % 2)
    rounds = tuple(DraftRound(np.full(3, 9, np.int32), 1, n) for n in emitted)
    ids = np.tile(np.arange(4, dtype=np.uint16), (answer, 1)).astype(bare.top_ids.dtype)
    logits = np.tile(np.array([0, -1, -2, -3], np.float16), (answer, 1))
    tail = np.full(answer, -1.0, np.float32)
    return replace(bare, rounds=rounds, top_ids=ids, top_logits=logits, tail_logprob=tail)


def kept_bytes(model: Any, run: Callable[[], object]) -> int:
    """What a backward would need of what runs, weights left out."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert output is not None  # the graph is there until now, and no storage was used twice
    return sum(size for place, size in seen.items() if place not in weights)


@pytest.mark.parametrize("tokens", [40, 200])
@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_what_a_forward_keeps_is_known_before(architecture: str, tokens: int) -> None:
    model = models.build(architecture)
    activations = ActivationMemory.of(model)
    for rows in (1, 3):
        traces = [request(tokens // 2 - i, tokens // 2, model) for i in range(rows)]
        kept = kept_bytes(model, lambda those=traces: completion_states(model, those))
        estimate = rows * tokens * (activations.per_token + tokens * activations.per_pair)
        assert 3 / 4 * kept <= estimate <= 8 * kept


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "t5", "bart"])
def test_layers_computed_again_give_the_same_gradients_and_keep_less(architecture: str) -> None:
    model = models.double(models.build(architecture))
    traces, found = [request(60, 60, model)], []
    kept = []
    for again in (False, True):
        model.zero_grad()

        def run(again: bool = again) -> torch.Tensor:
            if not again:
                return completion_states(model, traces).square().sum()
            with recomputed_layers(model):
                return completion_states(model, traces).square().sum()

        kept.append(kept_bytes(model, run))
        run().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert kept[1] < kept[0] / 3
    assert not any("forward" in vars(layer) for layer in model.modules())


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_what_is_over_the_budget_is_learned_in_parts_that_are_not(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = models.build(architecture)
    monkeypatch.setattr(torch.nn.Module, "float", lambda module: module)
    draft = models.double(draft)
    traces = [request(n, 24, draft) for n in (40, 50, 60, 100)]
    traces = [replace(trace, created_at_seconds=float(i)) for i, trace in enumerate(traces)]

    def gradients() -> tuple[dict[str, torch.Tensor], list[int], list[int]]:
        updater, sizes, kept = Updater(draft, CONFIG), [], []
        loss = updater._loss

        def counted(those: Sequence[Trace]) -> Any:
            sizes.append(len(those))
            kept.append(kept_bytes(updater.master, lambda: loss(those)[0]))
            return loss(those)

        monkeypatch.setattr(updater, "_loss", counted)
        monkeypatch.setattr(updater, "_zero_grad", lambda: None)
        for trace in traces:
            models.observe(updater, trace)
        assert updater.update().set_aside == {}
        return {n: p.grad.clone() for n, p in updater.parameters.items() if p.grad is not None}, sizes, kept

    whole, sizes, _ = gradients()
    assert sizes == [4]
    activations = ActivationMemory.of(draft)
    budget = int(84 * 1.5 * (activations.per_token + 84 * activations.per_pair))  # one of 84 tokens, not two, nor 124
    monkeypatch.setattr(module, "ACTIVATION_BYTES", budget)
    parts, sizes, kept = gradients()
    assert sizes == [1, 1, 1, 1]
    assert max(kept) <= 2 * budget  # these weights are in double precision
    assert kept[-1] < kept[0]  # the largest, its layers computed again
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "prompt, answer, most, expected",
    [
        (20, 10, 30, (20, 10)), (20, 10, 25, (15, 10)), (200, 24, 25, (1, 24)), (200, 25, 25, (6, 19)),
        (2, 100, 25, (2, 23)), (1, 9, 2, (1, 1)), (8000, 200, 2048, (1848, 200)), (200, 8000, 2048, (200, 1848)),
        (8000, 8000, 2048, (512, 1536)),
    ],
)  # fmt: skip
def test_a_long_request_keeps_its_answer_and_the_end_of_its_prompt(
    prompt: int, answer: int, most: int, expected: tuple[int, int]
) -> None:
    trace = request(prompt, answer)
    short = shortened(trace, most)
    assert (len(short.prompt_ids), len(short)) == expected
    assert np.array_equal(short.prompt_ids, trace.prompt_ids[prompt - expected[0] :])
    assert np.array_equal(short.completion_ids, trace.completion_ids[: expected[1]])
    assert np.array_equal(short.correction_mask, trace.correction_mask[: expected[1]])
    assert sum(r.num_emitted for r in short.rounds) == len(short) == len(short.top_logits) == len(short.tail_logprob)
    assert (short is trace) == (prompt + answer <= most)


def test_the_input_of_an_encoder_keeps_its_beginning() -> None:
    trace = request(100, 20, models.build("t5"))
    short = shortened(trace, 50)
    assert np.array_equal(short.prompt_ids, trace.prompt_ids[:30])
    assert np.array_equal(short.decoder_prompt_ids, trace.decoder_prompt_ids)
