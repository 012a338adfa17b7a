"""On an accelerator, where kernels, memory and compilers are others: answers and versions are as elsewhere.

Set `DEVICE` to `"cpu"` to run the same bodies there."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from packaging.version import Version
from test_batches import divergences, padded
from test_lossless import transitions_fit

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.decoding.static import capture
from osd_hf.errors import LearnerError
from osd_hf.evaluation.benchmark import compare_outputs
from osd_hf.learning.updater import Updater

DEVICE = "cuda"
IS_CUDA = DEVICE == "cuda"
MIB = 1 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        IS_CUDA and not torch.cuda.is_available(),
        reason="needs an accelerator: torch.cuda.is_available() is false (DEVICE of this file says where it runs)",
    ),
    # The compilers' own: of what they import, and of settings that would be quicker and less exact.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning"),
    # Of the graph without kernels by which torch reserves memory for those to come.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

LEARNS: dict[str, Any] = {
    "num_assistant_tokens": 5, "update_strategy": "interval", "update_interval": 2, "steps_per_update": 2,
    "optimizer": "adamw", "learning_rate": 3e-3, "weight_average": 0.0, "gate": False,
}  # fmt: skip


def pair(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Any]:
    return tuple(model.to(DEVICE, dtype) for model in models.pair(**{"noise": 0.3, **changes}))  # type: ignore[return-value]


def assistant_of(target: Any, draft: Any, **settings: Any) -> OnlineAssistant:
    return OnlineAssistant(target, draft, config=OnlineConfig(**{**LEARNS, **settings}))


def answer(generate: Any, ids: torch.Tensor, length: int = 20, **settings: Any) -> list[int]:
    ids = ids.to(DEVICE)
    settings = {"do_sample": False, "attention_mask": torch.ones_like(ids), "max_new_tokens": length, **settings}
    tokens: list[int] = generate(ids, **settings)[0, ids.shape[1] :].tolist()
    return tokens


def same(target: Any, ids: torch.Tensor, ours: list[int]) -> bool:
    """Whether an answer is the target's own, but for a tie."""
    return compare_outputs(target, ids[0].tolist(), answer(target.generate, ids), ours) != "differing"


def test_greedy_answers_are_the_targets_while_the_draft_learns() -> None:
    target, draft = pair()
    with assistant_of(target, draft, gate=True) as gated, assistant_of(target, draft) as assistant:
        for ids in models.prompts(8):
            for one in (assistant, gated):
                assert same(target, ids, answer(one.generate, ids))
        assert assistant.version == 4
        assert len(gated.decisions) > 0
        assert 0 < assistant.stats.alpha < 1


def test_rows_of_a_batch_go_on_independently() -> None:
    target, draft = pair(noise=0.08)
    batch = {name: part.to(DEVICE) for name, part in padded((3, 11, 6, 8)).items()}
    with assistant_of(target, draft) as assistant:
        for settings in ({}, {"repetition_penalty": 1.3}, {"eos_token_id": [5, 9, 17]}):
            settings = {"do_sample": False, "max_new_tokens": 24, **settings}
            assert divergences(target, assistant.generate(**batch, **settings), batch, settings) == []
        answers = assistant.generate(**batch, do_sample=True, max_new_tokens=24)
        assert answers.shape == (4, 11 + 24)
        assert assistant.stats.drafted > 0


def test_sampled_answers_have_the_targets_distribution_while_the_draft_learns() -> None:
    """Of a model whose next token depends on the last one alone."""
    target, draft = pair(vocab_size=8, num_hidden_layers=1, max_position_embeddings=512)
    for model in (target, draft):
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight.zero_()
            model.lm_head.weight.mul_(0.3)
    with torch.no_grad():
        table = target(torch.arange(8, device=DEVICE)[:, None]).logits[:, 0].double().softmax(-1).cpu().numpy()
    answers = []
    with assistant_of(target, draft, num_logprobs=None) as assistant:
        for start in range(3):
            tokens = answer(assistant.generate, torch.tensor([[start]]), 250, do_sample=True, top_k=0)
            answers.append([start, *tokens])
        assert assistant.version > 0
        assert 0.1 < assistant.stats.alpha < 1
    assert transitions_fit(answers, table) > 1e-3


@pytest.mark.parametrize("what", [{"compile_target": False}, {"compile_draft": False}, {}], ids=str)
def test_what_is_compiled_answers_and_counts_as_the_eager_one(
    what: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = pair(noise=0.1, max_position_embeddings=512)
    prompts, learned = [*models.prompts(3), models.prompt(300)], None
    with assistant_of(target, draft, update_strategy="manual", **what) as compiled:
        for _ in range(2):  # the second time with weights that were written where the first ones lay
            with assistant_of(
                target,
                draft if learned is None else learned,
                update_strategy="manual",
                compile_draft=False,
                compile_target=False,
            ) as eager:
                compiled.reset_stats()
                for ids in prompts:
                    assert answer(compiled.generate, ids) == answer(eager.generate, ids)
                assert compiled.stats.accepted_length_histogram == eager.stats.accepted_length_histogram
            compiled.update()
            learned = copy.deepcopy(compiled.draft)
    assert "eagerly" not in caplog.text


def test_a_default_target_is_captured_where_there_is_an_accelerator() -> None:
    with assistant_of(*pair()) as assistant:
        assert (assistant.static_target is not None) == IS_CUDA


def test_graphs_follow_weights_that_move(caplog: pytest.LogCaptureFixture) -> None:
    target, draft = pair()
    other = models.pair(noise=0.6)[1].to(DEVICE)
    ids, counts = models.prompt(), []
    with assistant_of(target, draft, update_strategy="manual") as assistant:
        for weights in (draft, other):
            moved = {name: weight.detach().clone() for name, weight in weights.named_parameters()}
            for name, weight in assistant.draft.named_parameters():
                weight.data = moved[name]
            assistant.reset_stats()
            assert same(target, ids, answer(assistant.generate, ids))
            with assistant_of(target, weights, update_strategy="manual", compile_draft=False) as eager:
                answer(eager.generate, ids)
                assert assistant.stats.accepted_length_histogram == eager.stats.accepted_length_histogram
            counts.append(assistant.stats.accepted_length_histogram)
    assert counts[0] != counts[1]
    assert "eagerly" not in caplog.text


# Before, one capture that failed broke all to come, and one thread's capture another one's sampling.
CAPTURES = pytest.mark.skipif(
    not IS_CUDA or Version(torch.__version__) < Version("2.13"),
    reason="nothing is captured on a CPU; needs torch 2.13",
)


@CAPTURES
def test_a_capture_that_fails_leaves_the_stream_and_other_captures_as_they_were() -> None:
    some = torch.ones(4, device=DEVICE)
    stream, doubled = torch.cuda.current_stream(), capture(lambda given: (given * 2,), (some,))
    for number in range(2, 5):
        with pytest.raises(RuntimeError, match="captur"):
            capture(lambda given: (given * float(given.sum()),), (some,))  # reads what is not computed yet
        assert torch.cuda.current_stream() == stream
        later = capture(lambda given, number=number: (given * number,), (some,))
        assert later(some + 1)[0].tolist() == [2.0 * number] * 4
        assert doubled(some + number)[0].tolist() == [2.0 * (1 + number)] * 4


@CAPTURES
def test_others_sample_while_a_thread_captures() -> None:
    some, stop, errors = torch.ones(64, device=DEVICE), threading.Event(), list[Exception]()

    def sample() -> None:
        while not stop.is_set():
            try:
                torch.multinomial(some, 1)
            except Exception as error:  # noqa: BLE001 - told below
                errors.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        found = [capture(lambda x: (x.softmax(0),), (some,))(some)[0].sum().item() for _ in range(50)]
    finally:
        stop.set()
        thread.join(60)
    assert found == pytest.approx([1.0] * 50)
    assert errors == []


@contextlib.contextmanager
def too_little_memory() -> Iterator[None]:
    """Learning has too little, serving enough."""
    if not IS_CUDA:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Updater, "_loss", fail)
            yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 48 * MIB) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def fail(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_learning_without_memory_costs_no_answer_and_goes_on_when_there_is_some() -> None:
    # On a device, gradients and what an optimizer keeps of such a draft take 480 MB.
    size = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 8192} if IS_CUDA else {}
    target, draft = pair(**size)
    assistant = assistant_of(target, draft, compile_draft=False)
    prompts = models.prompts(6)
    assert same(target, prompts[0], answer(assistant.generate, prompts[0]))
    with too_little_memory():
        for ids in prompts[1:4]:
            assert same(target, ids, answer(assistant.generate, ids))
        assert isinstance(assistant.learning_error, MemoryError | torch.OutOfMemoryError)
        assert assistant.version == 0
        with pytest.raises(LearnerError, match="emory"):
            assistant.update()
    for ids in prompts[4:]:
        assert same(target, ids, answer(assistant.generate, ids))
    assert assistant.update().steps > 0
    assert assistant.version > 0
    assert assistant.learning_error is None
    assistant.close()
