"""Kronecker factors of a layer's curvature, their damped inverses, and the resulting step.

Let ``y = W a`` be a layer, and ``g`` the loss's gradient at ``y``. The curvature along ``W`` is approximated by ``A (x) S``.
``A`` is the mean of ``a a^T``, and ``S`` the sum of ``g g^T``, over rows. Rows are all uses of ``W`` in a batch: samples,
tokens, positions of a convolution, and several calls of one layer (K-FAC-expand, Eschenhagen et al. 2023, arXiv:2311.00636).

The first dimension ``G`` is the number of groups of a convolution, otherwise 1. A factor that would be too large is replaced
by its diagonal, of shape (G, n).

References:
    Martens & Grosse 2015, arXiv:1503.05671. Grosse & Martens 2016, arXiv:1602.01407.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Sums over the rows of a layer, or running means of such sums.

    Attributes:
        A: the sum of ``a a^T``, shape (G, n, n), or its diagonal (G, n).
        rows: number of rows with a gradient, shape (G,).
        S: the sum of ``g g^T``, shape (G, m, m), or its diagonal (G, m).
    """

    A: Tensor
    rows: Tensor
    S: Tensor

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.A + other.A, self.rows + other.rows, self.S + other.S)

    def moved_towards(self, other: "Moments", weight: float) -> "Moments":
        """Return ``(1 - weight) * self + weight * other``."""
        pairs = ((self.A, other.A), (self.rows, other.rows), (self.S, other.S))
        return Moments(*(torch.lerp(mine, theirs, weight) for mine, theirs in pairs))

    def to(self, device: torch.device) -> "Moments":
        """Return a copy on ``device``."""
        return Moments(self.A.to(device), self.rows.to(device), self.S.to(device))

    def without_bias(self) -> "Moments":
        """Remove the last entry of ``a``, the constant 1 for the bias."""
        return replace(self, A=self.A[..., :-1] if self.A.ndim == 2 else self.A[..., :-1, :-1])

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite."""
        return bool(self.A.isfinite().all() & self.S.isfinite().all())


def second_moment(rows: Tensor, *, diagonal: bool) -> Tensor:
    """Return ``sum_r x_r x_r^T`` of rows (G, R, n), shape (G, n, n), or its diagonal (G, n)."""
    return rows.square().sum(dim=1) if diagonal else rows.mT @ rows


def moments(a: Tensor, g: Tensor, *, max_size: int) -> Moments:
    """Return the sums over rows with a gradient. The loss does not depend on others, such as padding or unrouted tokens.

    Args:
        a: inputs, shape (G, R, n).
        g: gradients at the outputs, shape (G, R, m).
        max_size: largest size of a full factor.
    """
    with_gradient = (g != 0).any(dim=-1, keepdim=True)  # (G, R, 1)
    a = torch.where(with_gradient, a, 0.0)
    return Moments(
        second_moment(a, diagonal=a.shape[-1] > max_size),
        with_gradient.sum(dim=(1, 2), dtype=a.dtype),
        second_moment(g, diagonal=g.shape[-1] > max_size),
    )


def mean_of_diagonal(factor: Tensor) -> Tensor:
    """Return ``tr(F) / n``, shape (G,)."""
    diagonal = factor if factor.ndim == 2 else factor.diagonal(dim1=-2, dim2=-1)
    return (diagonal / diagonal.shape[-1]).sum(dim=-1)  # divide before the sum, which can overflow


def divided_damping(A: Tensor, S: Tensor, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the damping of ``A`` and ``S``: ``pi sqrt(lambda)`` and ``sqrt(lambda) / pi``, each (G,).

    Their product is ``lambda``. ``pi^2 = (tr(A) / n) / (tr(S) / m)`` divides it by the factors' sizes, so the step does not
    change if a constant moves from one factor to the other.
    """
    mean_a, mean_s = mean_of_diagonal(A), mean_of_diagonal(S)
    # pi = sqrt(tr(A) / n * m / tr(S))
    pi = torch.where((mean_a > 0) & (mean_s > 0), mean_a / mean_s.clamp(min=torch.finfo(S.dtype).tiny), 1.0).sqrt()
    root = torch.as_tensor(damping, dtype=pi.dtype, device=pi.device).sqrt()
    return pi * root, root / pi


def inverse(factor: Tensor, added: Tensor) -> Tensor:
    """Return ``(F + added I)^-1``, or the pseudo-inverse of a singular matrix, such as an undamped factor from few rows.

    Args:
        factor: symmetric, positive semi-definite, (G, n, n), or a diagonal (G, n).
        added: shape (G,), >= 0.

    Returns:
        The inverse in the factor's shape and dtype.
    """
    if factor.ndim == 2:
        diagonal = factor + added.unsqueeze(-1)
        return torch.where(diagonal > 0, 1 / diagonal, 0.0)
    n = factor.shape[-1]
    damped = factor + added.view(-1, 1, 1) * torch.eye(n, dtype=factor.dtype, device=factor.device)
    size = damped.diagonal(dim1=-2, dim2=-1).amax(dim=-1).clamp(min=torch.finfo(factor.dtype).tiny).view(-1, 1, 1)
    cholesky, failed = torch.linalg.cholesky_ex(damped / size)  # scaled so that squares do not overflow
    if bool((added > 0).all()) and not bool(failed.any()):
        return torch.cholesky_inverse(cholesky) / size
    values, vectors = torch.linalg.eigh(damped.double())
    smallest = values.amax(dim=-1, keepdim=True) * n * torch.finfo(factor.dtype).eps
    inverted = torch.where(values > smallest.clamp(min=0), 1 / values, 0.0)
    return ((vectors * inverted.unsqueeze(-2)) @ vectors.mT).to(factor.dtype)


def inverses(factors: Moments, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(A + pi sqrt(lambda) I)^-1`` and ``(S + sqrt(lambda) / pi I)^-1`` from running means of sums.

    Args:
        factors: ``A`` is their sum of ``a a^T`` divided by their rows.
        damping: ``lambda``, >= 0.
    """
    rows = factors.rows.clamp(min=torch.finfo(factors.A.dtype).tiny)
    A = factors.A / rows.view(-1, *(1,) * (factors.A.ndim - 1))
    to_a, to_s = divided_damping(A, factors.S, damping)
    return inverse(A, to_a), inverse(factors.S, to_s)


def precondition(gradient: Tensor, inverse_a: Tensor, inverse_s: Tensor) -> Tensor:
    """Return ``V = S^-1 G A^-1`` for a gradient (G, m, n), in its shape."""
    left = inverse_s.unsqueeze(-1) * gradient if inverse_s.ndim == 2 else inverse_s @ gradient
    return left * inverse_a.unsqueeze(-2) if inverse_a.ndim == 2 else left @ inverse_a


def clipping_factor(square: Tensor, kl_clip: float) -> Tensor:
    """Return ``nu = min(1, sqrt(kappa / |lr^2 V . G|))``, which limits the step's estimated KL divergence to ``kappa``.

    Args:
        square: ``lr^2 V . G`` summed over all maps, shape ().
        kl_clip: ``kappa``, > 0.
    """
    return (kl_clip / square.abs().clamp(min=torch.finfo(square.dtype).tiny)).sqrt().clamp(max=1.0)
