"""The factors' sums and inverses, the rows of maps, and the labels drawn from the model, against plain references."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff._core.losses import SeeLosses
from lightning_eff.optim.preconditioning._kronecker_factors import (
    Moments,
    clipping_factor,
    divided_damping,
    inverses,
    moments,
    precondition,
)
from lightning_eff.optim.preconditioning._maps import CONVOLUTIONS, maps_of, patches, rows_of
from lightning_eff.optim.preconditioning._sampled_labels import (
    balanced_noise,
    draw_classes,
    sampled_gradients,
    weights_of,
)


def spd(groups: int, n: int) -> Tensor:
    x = torch.randn(groups, n + 2, n, dtype=torch.float64)
    return x.mT @ x


# -- factors


@pytest.mark.parametrize("damping", [0.3, 0.0])
def test_the_step_is_the_inverse_of_the_kronecker_product(damping: float) -> None:
    """Of each group, explicitly, with the damping that both factors together hold."""
    A, S, G = spd(2, 4), spd(2, 3), torch.randn(2, 3, 4, dtype=torch.float64)
    rows = torch.tensor([5.0, 7.0], dtype=torch.float64)
    found = precondition(G, *inverses(Moments(A, rows, S), damping))
    for k in range(2):
        a, s = A[k] / rows[k], S[k]
        pi = ((a.trace() / 4) / (s.trace() / 3)).sqrt()
        a, s = a + pi * damping**0.5 * torch.eye(4), s + damping**0.5 / pi * torch.eye(3)
        expected = torch.linalg.solve(torch.kron(s, a), G[k].flatten()).view(3, 4)
        torch.testing.assert_close(found[k], expected)


def test_it_does_not_matter_which_factor_a_constant_stands_in() -> None:
    A, S, G = spd(1, 4), spd(1, 3), torch.randn(1, 3, 4, dtype=torch.float64)
    rows = torch.ones(1, dtype=torch.float64)
    found = [precondition(G, *inverses(Moments(c * A, rows, S / c), 0.2)) for c in (1.0, 1e3)]
    torch.testing.assert_close(*found)


def test_a_diagonal_is_the_inverse_of_what_it_is_kept_of() -> None:
    A, S, G = spd(2, 4), spd(2, 3), torch.randn(2, 3, 4, dtype=torch.float64)
    diagonal_a, diagonal_s = (x.diagonal(dim1=1, dim2=2) for x in (A, S))
    rows = torch.ones(2, dtype=torch.float64)
    whole = Moments(torch.diag_embed(diagonal_a), rows, torch.diag_embed(diagonal_s))
    kept = Moments(diagonal_a, rows, diagonal_s)
    torch.testing.assert_close(precondition(G, *inverses(kept, 0.1)), precondition(G, *inverses(whole, 0.1)))


def test_what_was_never_seen_has_a_pseudo_inverse() -> None:
    a = torch.randn(1, 3, 5)  # three rows of five inputs
    A = a.mT @ a
    inverse, _ = inverses(Moments(A, torch.ones(1), spd(1, 2).float()), 0.0)
    torch.testing.assert_close(inverse, torch.linalg.pinv(A), rtol=1e-3, atol=1e-4)
    nothing, _ = inverses(Moments(torch.zeros(1, 4), torch.zeros(1), torch.ones(1, 2)), 0.0)
    assert torch.equal(nothing, torch.zeros(1, 4))


def test_factors_near_the_largest_number_have_inverses() -> None:
    """As of networks whose gradients grow from block to block."""
    A, S = torch.eye(4).unsqueeze(0), 1e36 * spd(1, 32).float() + 1e38 * torch.eye(32)
    inverse_a, inverse_s = inverses(Moments(A, torch.ones(1), S), 1e-3)
    assert inverse_a.isfinite().all() and inverse_s.isfinite().all()
    _, added = divided_damping(A, S, 1e-3)
    assert added.isfinite().all()
    torch.testing.assert_close(inverse_s @ (S + added * torch.eye(32)), torch.eye(32).unsqueeze(0), rtol=0, atol=1e-3)


def test_rows_without_a_gradient_do_not_count() -> None:
    a, g = torch.randn(2, 6, 3), torch.randn(2, 6, 4)
    g[0, 2:4] = 0.0
    found = moments(a, g, max_size=3)
    kept = torch.tensor([True, True, False, False, True, True])
    assert found.rows.tolist() == [4.0, 6.0]
    torch.testing.assert_close(found.A[0], a[0, kept].T @ a[0, kept])
    torch.testing.assert_close(found.A[1], a[1].T @ a[1])
    torch.testing.assert_close(found.S, g.square().sum(1))  # four outputs are more than three: the diagonal


def test_clipping_is_of_the_estimated_divergence() -> None:
    assert float(clipping_factor(torch.tensor(4.0), 1.0)) == pytest.approx(0.5)
    assert float(clipping_factor(torch.tensor(0.5), 1.0)) == 1.0
    assert float(clipping_factor(torch.tensor(0.0), 1.0)) == 1.0


# -- rows


CONVS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    "1d_same": (lambda: nn.Conv1d(4, 6, 4, dilation=2, padding="same"), (2, 4, 9)),
    "2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)), (2, 4, 7, 6)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 6)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding="same"), (2, 4, 5, 6)),
    "circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 5, 6)),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"), (2, 4, 5, 6)),
    "3d": (lambda: nn.Conv3d(2, 4, (1, 2, 3), stride=(1, 1, 2), padding="valid"), (2, 2, 3, 4, 5)),
    "alone": (lambda: nn.Conv2d(4, 6, 3), (4, 5, 6)),
}


@pytest.mark.parametrize("name", CONVS)
def test_a_convolution_is_a_linear_map_of_its_patches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows' products are the gradients of weight and bias, and the weight takes patches to outputs."""
    build, shape = CONVS[name]
    conv, x = build().double(), torch.randn(shape, dtype=torch.float64)
    assert isinstance(conv, CONVOLUTIONS) and conv.bias is not None
    y = conv(x)
    g = torch.randn_like(y)
    y.backward(g)
    batch = x if name != "alone" else x.unsqueeze(0)
    weight = conv.weight.detach().view(conv.groups, conv.out_channels // conv.groups, -1)
    outputs = patches(batch, conv) @ weight.mT + conv.bias.detach().view(conv.groups, 1, -1)
    monkeypatch.setattr("lightning_eff.optim.preconditioning._maps._PATCHES", 1)  # sample by sample
    rows = list(rows_of(conv, x, y.detach(), bias=True))
    assert len(rows) == len(batch)
    torch.testing.assert_close(outputs, torch.cat([out for _, out in rows], dim=1))
    products = torch.stack([gradient.mT @ a for a, gradient in rows_of(conv, x, g, bias=True)]).sum(0)
    (m,), left = maps_of(nn.Sequential(conv), {id(p) for p in conv.parameters()})
    grads = {name: p.grad for name, p in nn.Sequential(conv).named_parameters() if p.grad is not None}
    gradient, with_bias = m.gradient(grads) or (torch.zeros(()), False)
    assert with_bias and not left
    assert all(torch.equal(grads[name], part) for name, part in m.parts(gradient, with_bias=True).items())
    torch.testing.assert_close(products, gradient)


def test_patches_are_those_of_unfold() -> None:
    conv, x = nn.Conv2d(3, 5, (3, 2), stride=2, padding=1, dilation=(1, 2)), torch.randn(2, 3, 8, 9)
    expected = F.unfold(x, (3, 2), dilation=(1, 2), padding=1, stride=2).transpose(1, 2).reshape(1, -1, 18)
    assert torch.equal(patches(x, conv), expected)


# -- labels drawn from the model

T = torch.tensor
Z = T([[0.5, -1.0, 0.3], [1.2, 0.1, -0.4], [0.0, 0.7, 0.2], [-0.3, 0.4, 0.9]], dtype=torch.float64)
Y = T([0, 2, -100, 1])
OMEGA = T([0.5, 1.0, 3.0], dtype=torch.float64)
SOFT = Z.flip(0).softmax(1)
BITS = (Z > 0.25).double()
MASK = T([1.0, 0.0, 2.0, 0.5], dtype=torch.float64)
LOSSES: dict[str, Any] = {
    "mean": lambda z: F.cross_entropy(z, Y),
    "sum": lambda z: F.cross_entropy(z, Y, reduction="sum"),
    "by_hand": lambda z: (F.cross_entropy(z, Y.clamp(min=0), reduction="none") * MASK).sum() / MASK.sum(),
    "weight": lambda z: F.cross_entropy(z, Y, weight=OMEGA),
    "smoothing": lambda z: F.cross_entropy(z, Y, weight=OMEGA, label_smoothing=0.2),
    "soft": lambda z: F.cross_entropy(z, SOFT, label_smoothing=0.1),
    "soft_weight": lambda z: F.cross_entropy(z, SOFT, weight=OMEGA, reduction="sum"),
    "places": lambda z: F.cross_entropy(z.T.unsqueeze(0), Y.unsqueeze(0)),
    "log_probabilities": lambda z: 3 * F.nll_loss(z.log_softmax(1), Y, weight=OMEGA),
    "coins": lambda z: F.binary_cross_entropy_with_logits(z, BITS, weight=OMEGA, pos_weight=T([2.0, 1.0, 0.5])),
    "probabilities": lambda z: F.binary_cross_entropy(z.sigmoid(), BITS),
    "squares": lambda z: F.mse_loss(z, BITS),
    "squares_of_targets": lambda z: F.mse_loss(BITS, z, reduction="sum"),
    "huber": lambda z: F.huber_loss(z, Z + 0.1, delta=5.0),
    "smooth_l1": lambda z: F.smooth_l1_loss(z, Z + 0.1, beta=4.0),
    "two": lambda z: F.cross_entropy(z, Y) * 0.3 + F.mse_loss(z[:, :2], BITS[:, :2]) / 2,
    "taken_away": lambda z: F.cross_entropy(z, Y) - F.mse_loss(z.detach(), BITS) - 0.0 * F.l1_loss(z, BITS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_their_gradients_have_the_curvature_of_the_loss(name: str) -> None:
    """The mean of ``d d^T`` over many draws is the Gauss-Newton matrix, whatever reduces and weighs the loss."""
    z = Z.clone().requires_grad_()
    with SeeLosses() as seen:
        loss = LOSSES[name](z)
    assert len(seen.calls) >= 1
    upstream = torch.autograd.grad(loss, [call.output for call in seen.calls], retain_graph=True)
    calls = [(call, weights_of(call, g)) for call, g in zip(seen.calls, upstream, strict=True)]
    generator, draws = torch.Generator().manual_seed(0), 800
    drawn = [[pair for call, w in calls for pair in sampled_gradients(call, w, generator)] for _ in range(draws)]
    at = [x for x, _ in drawn[0]]
    gradients = [torch.stack([pairs[i][1] for pairs in drawn]) for i in range(len(at))]
    (d,) = torch.autograd.grad(at, z, gradients, is_grads_batched=True)
    found = d.flatten(1).T @ d.flatten(1) / draws
    expected = torch.autograd.functional.hessian(LOSSES[name], Z).view(12, 12)
    size = float(expected.abs().max())
    assert size > 0.01
    assert float((found - expected).abs().max()) < 0.15 * size


def test_a_loss_of_absolute_errors_is_one_of_signs() -> None:
    z = Z.clone().requires_grad_()
    with SeeLosses() as seen:
        loss = F.l1_loss(z, BITS)
    (upstream,) = torch.autograd.grad(loss, [seen.calls[0].output])
    ((x, g),) = sampled_gradients(seen.calls[0], weights_of(seen.calls[0], upstream), torch.Generator())
    assert x is z
    torch.testing.assert_close(g.square(), torch.full_like(g, 1 / 12))


def test_noise_has_no_noise_in_its_second_moment() -> None:
    g = torch.Generator().manual_seed(0)
    e = balanced_noise(torch.Size((2, 10, 3)), g).reshape(-1, 3)
    torch.testing.assert_close(e.T @ e, 20 * torch.eye(3, dtype=e.dtype))
    wide = balanced_noise(torch.Size((3, 8)), g)
    torch.testing.assert_close(wide @ wide.T, 8 * torch.eye(3, dtype=e.dtype))
    assert set(balanced_noise(torch.Size((50,)), g).tolist()) == {1.0, -1.0}
    many = torch.stack([balanced_noise(torch.Size((4, 2)), g).flatten() for _ in range(4000)])
    torch.testing.assert_close(many.T @ many / 4000, torch.eye(8, dtype=e.dtype), rtol=0, atol=0.08)


def test_classes_are_drawn_as_often_as_they_are_likely() -> None:
    p = T([[0.1, 0.0, 0.9], [1.0, 0.0, 0.0]])
    drawn = draw_classes(p.expand(5000, 2, 3), torch.Generator().manual_seed(0))
    assert drawn.shape == (5000, 2)
    assert float((drawn[:, 0] == 2).float().mean()) == pytest.approx(0.9, abs=0.02)
    assert not (drawn[:, 0] == 1).any() and (drawn[:, 1] == 0).all()
