"""The optimizers of a learner: Muon for the matrices inside the layers, AdamW for everything else."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

from osd_hf.config import OnlineConfig
from osd_hf.utils.yielding import give_way, in_pieces

__all__ = ["AdamW", "Muon", "hidden_matrices", "make_optimizers"]

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, as published with Muon
NS_STEPS = 5
AT_ONCE = 1 << 23  # elements of the matrices that are iterated together: some copies of them are made
EMBEDDING_RATE = 0.5  # of Muon's, for what AdamW steps beside it


class Muon(torch.optim.Optimizer):
    """
    Muon (arXiv 2502.16982), its steps scaled to the size of AdamW's: momentum, made orthogonal by Newton-Schulz
    iterations. Matrices of one shape are iterated together, in bfloat16 as by `torch.optim.Muon`. In float32 are small
    matrices on a CPU, and all of them on one that is not faster in bfloat16.

    Args:
        params (`Iterable[torch.nn.Parameter]`): Matrices.
        lr (`float`): The learning rate.
        may_round (`bool`, *optional*, defaults to `True`): Whether a CPU may iterate in bfloat16.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, *, may_round: bool = True) -> None:
        super().__init__(params, {"lr": lr})
        self.may_round = may_round

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of all matrices that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[tuple[Any, ...], list[torch.nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[(*sorted(p.shape), p.device)].append(p)
            for alike in by_shape.values():
                size = max(AT_ONCE // alike[0].numel(), 1)
                for matrices in (alike[first : first + size] for first in range(0, len(alike), size)):
                    give_way()
                    directions = orthogonal(
                        torch.stack([_wide(self._momentum(p)) for p in matrices]), may_round=self.may_round
                    )
                    for p, direction in zip(matrices, directions, strict=True):
                        p.add_(_wide(direction, like=p), alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))

    def _momentum(self, p: torch.nn.Parameter) -> torch.Tensor:
        """Nesterov's direction of a parameter."""
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"].lerp_(p.grad, 1 - MOMENTUM)
        return p.grad.lerp(buffer, MOMENTUM)


class AdamW(torch.optim.AdamW):
    """torch's own, fused, which goes through its parameters in pieces and gives way between them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            fresh = []
            for p, state in zip(params, states, strict=True):
                if not state:
                    fresh += [torch.empty_like(p), torch.empty_like(p)]
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                    state["exp_avg"], state["exp_avg_sq"] = fresh[-2:]
            for (some,) in in_pieces(fresh):
                torch._foreach_zero_(some)
            averages = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
            # Repeated for the pieces of one parameter, each of which counts its own.
            steps = [state["step"].expand_as(p) for p, state in zip(params, states, strict=True)]
            beta1, beta2 = group["betas"]
            for some, grads, first, second, counts in in_pieces(params, [p.grad for p in params], *averages, steps):
                adamw(
                    some, grads, first, second, [], [count[(0,) * count.ndim].clone() for count in counts],
                    fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
                    weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                )  # fmt: skip
            torch._foreach_add_([state["step"] for state in states], 1)


def _wide(matrix: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """A matrix with no more rows than columns: itself or its transpose; with `like`, back in that one's shape."""
    is_tall = matrix.shape[0] > matrix.shape[1] if like is None else like.shape != matrix.shape
    return matrix.T if is_tall else matrix


def orthogonal(matrices: torch.Tensor, *, may_round: bool = True) -> torch.Tensor:
    """Matrices of shape `(n, rows, columns)`, no more rows than columns, with their singular values moved close to 1;
    the dtype given. A matrix of zeros stays one."""
    a, b, c = COEFFICIENTS
    rounds = matrices.device.type != "cpu"
    x = matrices.bfloat16() if rounds else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(NS_STEPS):
        give_way()
        gram = x @ x.mT
        give_way()
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        give_way()
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(matrices)


def hidden_matrices(
    model: Any, parameters: dict[str, torch.nn.Parameter], config: OnlineConfig
) -> list[torch.nn.Parameter]:
    """Those of the parameters that Muon steps; none where AdamW steps all."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    if (head := model.get_output_embeddings()) is not None:
        embeddings.add(id(head.weight))
    is_muon = config.optimizer == "muon"
    return [p for p in parameters.values() if is_muon and p.ndim == 2 and id(p) not in embeddings]


def make_optimizers(
    model: Any, parameters: dict[str, torch.nn.Parameter], config: OnlineConfig
) -> list[torch.optim.Optimizer]:
    """Muon is for matrices that map hidden states; embeddings, the head and vectors go to AdamW."""
    matrices = hidden_matrices(model, parameters, config)
    hidden = {id(p) for p in matrices}
    rest = [p for p in parameters.values() if id(p) not in hidden]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(matrices, config.learning_rate))
    if rest:
        rate = config.learning_rate * (EMBEDDING_RATE if matrices else 1)
        made.append(AdamW(rest, rate, weight_decay=0.0, fused=True))
    return made
