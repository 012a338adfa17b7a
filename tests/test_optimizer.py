"""Muon beside torch's own, and which parameters it steps."""

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osd_hf import OnlineConfig
from osd_hf.learning.optimizer import EMBEDDING_RATE, Muon, make_optimizers, orthogonal


@given(
    st.integers(1, 24),
    st.integers(1, 24),
    st.integers(0, 2**16),
)
def test_singular_values_come_close_to_one(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(2, min(rows, columns), max(rows, columns), generator=generator)
    matrices = torch.linalg.qr(matrices.mT)[0].mT * (0.5 + torch.rand(2, 1, 1, generator=generator))
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert bool(((values > 0.6) & (values < 1.3)).all())


def test_zeros_stay_zeros() -> None:
    assert not orthogonal(torch.zeros(1, 3, 5)).any()


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_steps_are_those_of_torch_s_own(shape: tuple[int, int]) -> None:
    ours, theirs = torch.nn.Parameter(torch.randn(shape)), torch.nn.Parameter(torch.zeros(shape))
    theirs.data.copy_(ours.data)
    optimizers = [
        Muon([ours], 0.01),
        torch.optim.Muon([theirs], 0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    ]
    start = ours.detach().clone()
    for _ in range(4):
        gradient = torch.randn(shape)
        for p, stepping in zip((ours, theirs), optimizers, strict=True):
            p.grad = gradient.clone()
            stepping.step()
    moved = (ours.detach() - start).norm()
    assert float((ours - theirs).detach().norm()) < 0.03 * float(moved)  # theirs goes through bfloat16


def test_muon_steps_matrices_inside_the_layers_alone() -> None:
    model = models.build()
    muon, adamw = make_optimizers(model, dict(model.named_parameters()), OnlineConfig(learning_rate=1e-2))
    ids = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in ids}
    assert names and all(".layers." in name and "norm" not in name for name in names)
    assert muon.param_groups[0]["lr"] == 1e-2
    assert adamw.param_groups[0]["lr"] == 1e-2 * EMBEDDING_RATE
    (alone,) = make_optimizers(model, dict(model.named_parameters()), OnlineConfig(optimizer="adamw"))
    assert alone.param_groups[0]["lr"] == OnlineConfig().learning_rate
