"""The polar factor of many matrices at once, by matrix products alone (Jordan et al. 2024; Amsel et al. 2025).

Of a matrix ``X = U S V^T`` the polar factor is ``U V^T``: the nearest matrix whose singular values are all one. An odd
polynomial of ``X`` acts on its singular values, so a few steps ``X := a X + b (X X^T) X + c (X X^T)^2 X`` bring them
near one. Matrices of one shape are stacked, so that a step is three batched products however many there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]


@dataclass(frozen=True)
class Iteration:
    """One way to iterate.

    Attributes:
        steps: ``(a, b, c)`` of each step; where more are asked for, the last one is repeated.
        safety: the Frobenius norm is multiplied by it, so that rounding cannot lift a singular value above one.
        eps: added to the norm, or (``clamped``) its least value.
        clamped: see ``eps``.
    """

    steps: tuple[Coefficients, ...]
    safety: float
    eps: float
    clamped: bool

    def coefficients(self, num_iterations: int) -> tuple[Coefficients, ...]:
        """Those of ``num_iterations`` steps."""
        missing = num_iterations - len(self.steps)
        return (*self.steps[:num_iterations], *[self.steps[-1]] * max(missing, 0))


ITERATIONS = {
    # Jordan et al. 2024: one quintic whose slope at 0 is steep; singular values end in about [0.7, 1.2]
    "newton_schulz": Iteration(((3.4445, -4.775, 2.0315),), safety=1.0, eps=1e-7, clamped=True),
    # Amsel et al. 2025, arXiv:2505.16932: the best quintic for what the steps before have left, of singular values in
    # [1e-3, 1]; the figures are those of their implementation, with a cushion for bfloat16
    "polar_express": Iteration(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        safety=1.02,
        eps=1e-6,
        clamped=False,
    ),
}


def orthogonalize(
    matrices: Sequence[Tensor],
    *,
    method: str = "polar_express",
    num_iterations: int = 5,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The polar factors of ``matrices``, approximately: singular values go to about one, singular vectors stay.

    Args:
        matrices: of shape (m, n) each, any mixture of shapes, on one device; not changed.
        method: "polar_express" or "newton_schulz".
        num_iterations: steps, >= 1.
        dtype: in which products are computed; None takes bfloat16 on CUDA and float32 elsewhere.

    Returns:
        In the order of ``matrices``, of their shapes, in ``dtype``; views of a few large tensors.
    """
    if not matrices:
        return []
    how = ITERATIONS[method]
    if dtype is None:
        dtype = torch.bfloat16 if matrices[0].is_cuda else torch.float32
    # rows are the shorter side from here on: X X^T is then the smaller of the two Gram matrices
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        m, n = sorted(matrix.shape)
        by_shape.setdefault((m, n), []).append(index)
    steps = how.coefficients(num_iterations)
    found: list[Tensor] = list(matrices)
    for (m, n), indices in by_shape.items():
        x = _stacked([matrices[i] for i in indices], dtype, how)
        # by the shape alone, so that what a matrix becomes does not depend on the others, or on who computes it
        gram = dtype == torch.float32 and gram_is_cheaper(m, n, num_iterations)
        x = _iterate_gram(x, steps) if gram else _iterate(x, steps)
        for index, one in zip(indices, x.unbind(0), strict=True):
            found[index] = one.T if matrices[index].shape[0] > matrices[index].shape[1] else one
    return found


def gram_is_cheaper(m: int, n: int, num_iterations: int) -> bool:
    """Whether iterating on ``X X^T`` takes fewer multiplications than on ``X`` of shape (m, n), ``m <= n``.

    On ``X``, a step takes ``2 m^2 n + m^3``. On the Gram matrix, four products of ``m^3``, but three in the first and two
    in the last step, and twice ``m^2 n`` in all.
    """
    k = num_iterations
    return 2 * n + (4 * k - 3) * m < k * (2 * n + m)


def _stacked(matrices: Sequence[Tensor], dtype: torch.dtype, how: Iteration) -> Tensor:
    """A new (k, m, n) tensor with ``m <= n`` whose matrices have singular values of at most one."""
    x = torch.stack([matrix.T if matrix.shape[0] > matrix.shape[1] else matrix for matrix in matrices]).to(dtype)
    norm = torch.linalg.matrix_norm(x, keepdim=True).mul_(how.safety)
    return x.div_(norm.clamp_(min=how.eps) if how.clamped else norm.add_(how.eps))


def _iterate(x: Tensor, steps: Sequence[Coefficients]) -> Tensor:
    """The steps on ``x`` of shape (k, m, n) itself."""
    for a, b, c in steps:
        gram = x @ x.mT
        # X := a X + (b A + c A^2) X,  A = X X^T
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _iterate_gram(x: Tensor, steps: Sequence[Coefficients]) -> Tensor:
    """The same on the Gram matrices of ``x`` of shape (k, m, n).

    With ``P = a I + b G + c G^2``, a step is ``X := P X``, ``G := P G P``; all ``P`` are polynomials in one matrix, so they
    commute. What is kept is their product ``Q``. Squaring the singular values loses those below the root of the dtype's
    epsilon, which is why this is for float32.
    """
    gram = x @ x.mT
    q: Tensor | None = None
    for k, (a, b, c) in enumerate(steps):
        # P = a I + b G + c G^2
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        p.diagonal(dim1=1, dim2=2).add_(a)
        q = p if q is None else p @ q
        if k + 1 < len(steps):
            gram = p @ gram @ p
    return x if q is None else q @ x
