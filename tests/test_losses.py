import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osd_hf.errors import ConfigError
from osd_hf.losses import DIVERGENCES, generalized_jsd, outcome_logprobs, overlap

repeatable = settings(deadline=None, derandomize=True, max_examples=60)
ALL = list(DIVERGENCES)
PROPER = [name for name in ALL if name != "hard_label"]
JSD = DIVERGENCES["jsd"]
f64 = partial(torch.tensor, dtype=torch.float64)


def random_logits(rows, vocab, seed, scale=3.0, dtype=torch.float64):
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense_reference(logits, top_ids):
    """What `outcome_logprobs` means, with a second dense tensor and nothing clever."""
    logprobs = logits.log_softmax(-1)
    tail = logprobs.scatter(-1, top_ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, top_ids), tail], -1)


def stored_rows(target_logits, k):
    """The top-k of a target's rows, as arguments of `divergence_loss`."""
    top_ids = target_logits.topk(k, -1).indices
    p = dense_reference(target_logits, top_ids)
    return {"top_ids": top_ids, "top_logprobs": p[:, :-1], "tail_logprob": p[:, -1]}


def whole_rows(target_logits):
    tail = torch.full(target_logits.shape[:1], -torch.inf)
    return {"top_ids": None, "top_logprobs": target_logits.log_softmax(-1), "tail_logprob": tail}


def divergence_loss(draft_logits, *, top_ids, top_logprobs, tail_logprob, divergence="forward_kl", weights=None):
    """The mean over positions of a divergence between stored rows and the draft."""
    q = outcome_logprobs(draft_logits, top_ids)
    p = torch.cat([top_logprobs.to(q), tail_logprob[:, None].to(q)], -1)
    losses = DIVERGENCES[divergence](p, q)
    return losses.mean() if weights is None else (weights * losses).sum()


def value_and_grad(logits, **kwargs):
    logits = logits.clone().requires_grad_()
    loss = divergence_loss(logits, **kwargs)
    (grad,) = torch.autograd.grad(loss, logits)
    return loss.detach(), grad


@pytest.mark.parametrize("k", [1, 7, 50])
def test_outcomes_and_their_gradient_are_those_of_the_dense_reference(k):
    logits = random_logits(6, 50, seed=0)
    ids = random_logits(6, 50, seed=1).topk(k).indices
    cotangent = random_logits(6, k + 1, seed=2)
    if k == 50:
        cotangent[:, -1] = 0  # nothing was cut: no loss reads the tail
    grads = []
    for f in (outcome_logprobs, dense_reference):
        x = logits.clone().requires_grad_()
        y = f(x, ids)
        y.masked_fill(y == -torch.inf, 0).backward(cotangent)
        grads.append((y.detach(), x.grad))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


def test_half_precision_logits_get_a_gradient_of_their_own_type():
    logits = random_logits(4, 30, seed=3).bfloat16()
    loss, grad = value_and_grad(logits, **stored_rows(random_logits(4, 30, seed=4), 5))
    _, exact = value_and_grad(logits.double(), **stored_rows(random_logits(4, 30, seed=4), 5))
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.double(), exact, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("drop", [10, 20, 60, 200])
def test_a_vanishing_tail_is_exact_in_float32(drop):
    """The kept tokens hold all but `e^-drop` of the mass: `1 - sum(kept)` would have no digit left."""
    logits = random_logits(8, 40, seed=5, scale=1.0, dtype=torch.float32) + 30
    ids = torch.arange(10).expand(8, 10)
    logits[:, 10:] -= drop
    x, y = logits.clone().requires_grad_(), logits.double().requires_grad_()
    q, expected = outcome_logprobs(x, ids), dense_reference(y, ids)
    torch.testing.assert_close(q.double(), expected, rtol=1e-6, atol=1e-5)
    q[:, -1].sum().backward()
    expected[:, -1].sum().backward()
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-6)


def test_nothing_cut_gives_an_empty_tail_and_the_loss_of_whole_rows():
    target, draft = random_logits(5, 12, seed=6), random_logits(5, 12, seed=7)
    kept = stored_rows(target, 12)
    assert (kept["tail_logprob"] == -torch.inf).all()
    assert (outcome_logprobs(draft, kept["top_ids"])[:, -1] == -torch.inf).all()
    for name in ALL:
        torch.testing.assert_close(
            value_and_grad(draft, divergence=name, **kept),
            value_and_grad(draft, divergence=name, **whole_rows(target)),
        )


@st.composite
def pairs(draw):
    """Log-probs of two distributions, flat to nearly one-hot, some outcomes impossible for p."""
    outcomes = draw(st.integers(2, 12))
    seed = draw(st.integers(0, 2**31))
    p, q = (random_logits(3, outcomes, seed + i, draw(st.floats(0.01, 15))) for i in range(2))
    impossible = draw(st.integers(0, outcomes - 1))
    p[:, :impossible] = -torch.inf
    return p.log_softmax(-1), q.log_softmax(-1)


@repeatable
@given(pairs())
def test_bounds_and_relations(pair):
    p, q = pair
    kl, reverse, jsd, tv, nlo, hard = (DIVERGENCES[name](p, q) for name in ALL)
    eps = 1e-9
    assert torch.isfinite(torch.stack([kl, reverse, jsd, tv, nlo, hard])).all()
    assert min(x.min() for x in (kl, reverse, jsd, tv, nlo, hard)) >= -eps
    assert (tv <= 1 + eps).all() and (jsd <= math.log(2) + eps).all()
    assert (tv <= (kl / 2).sqrt() + eps).all() and (tv <= (reverse / 2).sqrt() + eps).all()  # Pinsker
    assert (tv**2 / 2 <= jsd + eps).all() and (jsd <= math.log(2) * tv + eps).all()  # Lin 1991
    torch.testing.assert_close(overlap(p, q), 1 - tv)
    torch.testing.assert_close((-nlo).exp(), 1 - tv)
    torch.testing.assert_close(JSD(p, q), JSD(q, p))
    torch.testing.assert_close(DIVERGENCES["forward_kl"](q, p), reverse)


@repeatable
@given(pairs())
def test_identical_distributions_are_at_zero_and_at_rest(pair):
    p, _ = pair
    for name in PROPER:
        torch.testing.assert_close(DIVERGENCES[name](p, p), torch.zeros(3, dtype=p.dtype), rtol=0, atol=1e-12)
        loss, grad = value_and_grad(p, divergence=name, **whole_rows(p))
        assert abs(loss) < 1e-12 and grad.abs().max() < 1e-12


@repeatable
@given(st.integers(0, 2**31), st.integers(1, 29), st.floats(0.1, 8))
def test_cutting_never_raises_a_divergence(seed, k, scale):
    target, draft = (random_logits(4, 30, seed + i, scale) for i in range(2))
    for name in PROPER:
        less, more = (divergence_loss(draft, divergence=name, **stored_rows(target, n)) for n in (k, k + 1))
        assert less <= more + 1e-9
    labels = {float(divergence_loss(draft, divergence="hard_label", **stored_rows(target, n))) for n in (1, k, 30)}
    assert max(labels) - min(labels) < 1e-9


def test_values_of_a_small_case():
    p, q = f64([0.5, 0.5, 0.0]).log(), f64([0.25, 0.5, 0.25]).log()
    m = [0.375, 0.5, 0.125]
    expected = {
        "forward_kl": 0.5 * math.log(2),
        "jsd": 0.25 * math.log(0.5 / m[0]) + 0.125 * math.log(0.25 / m[0]) + 0.125 * math.log(0.25 / m[2]),
        "total_variation": 0.25,
        "neg_log_overlap": -math.log(0.75),
        "hard_label": math.log(4),
        "reverse_kl": 0.25 * math.log(0.5) + 0.25 * (math.log(0.25) + 100),
    }
    for name, value in expected.items():
        assert DIVERGENCES[name](p, q).item() == pytest.approx(value, abs=1e-12), name
    assert overlap(p, q).item() == pytest.approx(0.75)


def test_the_hard_label_is_never_the_tail():
    p, q = f64([0.2, 0.3, 0.5]).log(), f64([0.1, 0.6, 0.3]).log()
    assert DIVERGENCES["hard_label"](p, q).item() == pytest.approx(-math.log(0.6))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("k", [4, None])
def test_gradients_in_float64(name, k):
    target, draft = random_logits(3, 9, seed=10), random_logits(3, 9, seed=11)
    rows = stored_rows(target, k) if k else whole_rows(target)
    weights = torch.tensor([1.0, 0.0, 2.5])
    f = partial(divergence_loss, divergence=name, weights=weights, **rows)
    assert torch.autograd.gradcheck(f, draft.requires_grad_())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("where", ["target", "both", "draft"])
def test_impossible_tokens_leave_value_and_gradient_finite(name, whole, where):
    target, draft = (random_logits(4, 20, seed=i, dtype=torch.float32) for i in (14, 15))
    if where != "draft":
        target[:, 3:15] = -torch.inf  # as top-k sampling leaves it
    if where != "target":
        draft[:, 3:15] = -torch.inf
    rows = whole_rows(target) if whole else stored_rows(target, 10)
    loss, grad = value_and_grad(draft, divergence=name, **rows)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()
    if where == "both":
        possible = [i for i in range(20) if not 3 <= i < 15]
        expected = value_and_grad(draft[:, possible], divergence=name, **whole_rows(target[:, possible]))
        torch.testing.assert_close((loss, grad[:, possible]), expected)
        assert (grad[:, 3:15] == 0).all()


@pytest.mark.parametrize("k", [5, None])
def test_a_draft_that_is_very_wrong_still_gets_a_gradient(k):
    target = torch.zeros(1, 10)
    draft = torch.zeros(1, 10)
    target[0, 0], draft[0, 1] = 300, 300
    loss, grad = value_and_grad(draft, **(stored_rows(target, k) if k else whole_rows(target)))
    torch.testing.assert_close(loss, torch.tensor(300.0))
    torch.testing.assert_close(grad[0, :2], torch.tensor([-1.0, 1.0]))


@pytest.mark.parametrize("beta", [-0.1, 1.5, math.nan])
def test_beta_outside_its_range_is_refused(beta):
    with pytest.raises(ConfigError, match="beta must be between 0 and 1"):
        generalized_jsd(torch.zeros(1, 1), torch.zeros(1, 1), beta)
