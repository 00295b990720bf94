"""The polar factor of many matrices at once, by matrix products only (Jordan et al. 2024; Amsel et al. 2025).

The polar factor of a matrix ``X = U S V^T`` is ``U V^T``, the nearest matrix whose singular values are all one. An odd
polynomial of ``X`` acts on its singular values. So a few steps ``X := a X + b (X X^T) X + c (X X^T)^2 X`` bring them close to
one. Matrices of one shape are stacked, so that a step needs three batched products for any number of matrices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]
_SLOPE = 50.0  # of the steps of one stage


@dataclass(frozen=True)
class Iteration:
    """One kind of iteration.

    Attributes:
        steps: ``(a, b, c)`` of each step; further steps repeat the last one.
        safety: factor of the Frobenius norm, so that rounding cannot lift a singular value above one.
        eps: added to the norm, or its least value if ``clamped``.
        clamped: see ``eps``.
    """

    steps: tuple[Coefficients, ...]
    safety: float
    eps: float
    clamped: bool

    def coefficients(self, num_iterations: int) -> tuple[Coefficients, ...]:
        """Return the coefficients of ``num_iterations`` steps."""
        missing = num_iterations - len(self.steps)
        return (*self.steps[:num_iterations], *[self.steps[-1]] * max(missing, 0))


ITERATIONS = {
    # Jordan et al. 2024: one quintic whose slope at 0 is steep; singular values end in about [0.7, 1.2]
    "newton_schulz": Iteration(((3.4445, -4.775, 2.0315),), safety=1.0, eps=1e-7, clamped=True),
    # Amsel et al. 2025, arXiv:2505.16932: the best quintic after the steps before, for singular values in [1e-3, 1]; the
    # coefficients are those of their implementation, with a margin for bfloat16
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


@dataclass(slots=True)
class Stack:
    """Matrices of one shape.

    Attributes:
        blocks: indices of the given blocks in it, in order.
        x: shape (k, out, in).
    """

    blocks: list[int]
    x: Tensor


def orthogonalize(
    matrices: Sequence[Tensor],
    *,
    method: str = "polar_express",
    num_iterations: int = 5,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Return the approximate polar factors of ``matrices``: singular values become about one, singular vectors stay.

    Args:
        matrices: matrices (m, n) of any shapes on one device. They do not change.
        method: "polar_express" or "newton_schulz".
        num_iterations: number of steps, >= 1.
        dtype: type of the products. None uses bfloat16 on CUDA and float32 elsewhere.

    Returns:
        The factors in the order and shapes of ``matrices``, in ``dtype``. They are views of a few large tensors.
    """
    found = list(matrices)
    blocks = [matrix[None] for matrix in matrices]
    for stack in polar_stacks(blocks, method=method, num_iterations=num_iterations, dtype=dtype):
        for index, one in zip(stack.blocks, stack.x.unbind(0), strict=True):
            found[index] = one
    return found


def polar_stacks(
    blocks: Sequence[Tensor],
    *,
    method: str = "polar_express",
    num_iterations: int = 5,
    dtype: torch.dtype | None = None,
) -> list[Stack]:
    """Orthogonalize blocks of matrices (j, out, in) like :func:`orthogonalize`, and return the stacks."""
    if not blocks:
        return []
    how = ITERATIONS[method]
    if dtype is None:
        dtype = torch.bfloat16 if blocks[0].is_cuda else torch.float32
    steps = how.coefficients(num_iterations)
    stacks = stacked(blocks)
    on_gram: dict[int, list[Stack]] = {}  # by the size of the Gram matrices, whose products are then made together
    for stack in stacks:
        stack.x = _normalized(stack.x.to(dtype), how)
        m, n = sorted(stack.x.shape[1:])
        # by the shape only, so that the result does not depend on other matrices or on the rank
        if dtype == torch.float32 and gram_is_cheaper(m, n, steps):
            on_gram.setdefault(m, []).append(stack)
        else:
            stack.x = _iterate(stack.x, steps)
    for some in on_gram.values():
        for stack, x in zip(some, _iterate_gram([stack.x for stack in some], steps), strict=True):
            stack.x = x
    return stacks


def stacked(blocks: Sequence[Tensor]) -> list[Stack]:
    """Stack blocks of matrices (j, out, in), with all matrices of one shape in one new tensor."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, block in enumerate(blocks):
        by_shape.setdefault(block.shape[1:], []).append(index)
    return [Stack(indices, torch.cat([blocks[i] for i in indices])) for indices in by_shape.values()]


def gram_is_cheaper(m: int, n: int, steps: Sequence[Coefficients]) -> bool:
    """Whether ``steps`` take fewer multiplications on Gram matrices than on ``X`` of shape (m, n), ``m <= n``.

    On ``X``, each step needs ``2 m^2 n + m^3``. On the Gram matrix it needs four products of ``m^3``, but three in the first
    and two in the last step of a stage. Each stage needs ``m^2 n`` twice.
    """
    return sum(2 * n + (4 * len(stage) - 3) * m for stage in stages(steps)) < len(steps) * (2 * n + m)


def stages(steps: Sequence[Coefficients]) -> list[list[Coefficients]]:
    """Split the steps into stages, which compute the Gram matrix again, before the product of slopes at zero exceeds 50.

    Rounding errors of a Gram matrix are as large as those of its largest eigenvalue, so squares of small singular values are
    lost. Stages enlarge these first. With stages, the result differs from the steps on ``X`` itself by about 1e-5 for any
    condition number, and without them by 1e-3.
    """
    found: list[list[Coefficients]] = []
    slope = math.inf
    for step in steps:
        slope *= step[0]
        if slope > _SLOPE:
            found.append([])
            slope = step[0]
        found[-1].append(step)
    return found


def _normalized(x: Tensor, how: Iteration) -> Tensor:
    """``x`` of shape (k, m, n), in place, with singular values of at most one."""
    norm = torch.linalg.vector_norm(x.flatten(1), dim=1).mul_(how.safety)
    return x.div_((norm.clamp_(min=how.eps) if how.clamped else norm.add_(how.eps))[:, None, None])


def _iterate(x: Tensor, steps: Sequence[Coefficients]) -> Tensor:
    """Do the steps on ``x`` (k, out, in), multiplied from its shorter side."""
    for a, b, c in steps:
        gram = _gram(x)
        # X := a X + (b A + c A^2) X,  A = X X^T
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, p, beta=a) if _is_tall(x) else torch.baddbmm(x, p, x, beta=a)
    return x


def _iterate_gram(stacks: Sequence[Tensor], steps: Sequence[Coefficients]) -> Sequence[Tensor]:
    """Do the steps on the Gram matrices of stacks (k, out, in) with equal shorter sides, in float32.

    With ``P = a I + b G + c G^2``, each step is ``X := P X``, ``G := P G P``. All ``P`` are polynomials in one matrix, so they
    commute. The code computes their product ``Q`` over each of the :func:`stages`.
    """
    for stage in stages(steps):
        gram = torch.cat([_gram(x) for x in stacks])
        q: Tensor | None = None
        for k, (a, b, c) in enumerate(stage):
            # P = a I + b G + c G^2
            p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            p.diagonal(dim1=1, dim2=2).add_(a)
            q = p if q is None else torch.bmm(p, q)
            if k + 1 < len(stage):
                gram = torch.bmm(torch.bmm(p, gram), p)
        assert q is not None
        parts = q.split([len(x) for x in stacks])
        # with rounding they do not commute: P_k ... P_1 X, or X P_1 ... P_k for a tall matrix
        stacks = [torch.bmm(x, q.mT) if _is_tall(x) else torch.bmm(q, x) for x, q in zip(stacks, parts, strict=True)]
    return stacks


def _is_tall(x: Tensor) -> bool:
    return x.shape[1] > x.shape[2]


def _gram(x: Tensor) -> Tensor:
    """Return the smaller Gram matrix of each: ``X X^T``, or ``X^T X`` for a tall one."""
    return torch.bmm(x.mT, x) if _is_tall(x) else torch.bmm(x, x.mT)
