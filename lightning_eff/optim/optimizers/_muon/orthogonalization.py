"""The polar factor of many matrices at once, by matrix products alone (Jordan et al. 2024; Amsel et al. 2025).

Of a matrix ``X = U S V^T`` the polar factor is ``U V^T``: the nearest matrix whose singular values are all one. An odd
polynomial of ``X`` acts on its singular values, so a few steps ``X := a X + b (X X^T) X + c (X X^T)^2 X`` bring them
near one. Matrices of one shape are stacked, so that a step is three batched products however many there are.
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


@dataclass(slots=True)
class Stack:
    """Matrices of one shape.

    Attributes:
        blocks: which of the blocks that were given it is made of, in their order.
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
    """The polar factors of ``matrices``, approximately: singular values go to about one, singular vectors stay.

    Args:
        matrices: of shape (m, n) each, any mixture of shapes, on one device; not changed.
        method: "polar_express" or "newton_schulz".
        num_iterations: steps, >= 1.
        dtype: in which products are computed; None takes bfloat16 on CUDA and float32 elsewhere.

    Returns:
        In the order of ``matrices``, of their shapes, in ``dtype``; views of a few large tensors.
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
    """As :func:`orthogonalize`, of blocks of several matrices of one shape, (j, out, in): as they come out, stacked."""
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
        # by the shape alone, so that what a matrix becomes does not depend on the others, or on who computes it
        if dtype == torch.float32 and gram_is_cheaper(m, n, steps):
            on_gram.setdefault(m, []).append(stack)
        else:
            stack.x = _iterate(stack.x, steps)
    for some in on_gram.values():
        for stack, x in zip(some, _iterate_gram([stack.x for stack in some], steps), strict=True):
            stack.x = x
    return stacks


def stacked(blocks: Sequence[Tensor]) -> list[Stack]:
    """Blocks of matrices, (j, out, in), with all of one shape in one new tensor."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, block in enumerate(blocks):
        by_shape.setdefault(block.shape[1:], []).append(index)
    return [Stack(indices, torch.cat([blocks[i] for i in indices])) for indices in by_shape.values()]


def gram_is_cheaper(m: int, n: int, steps: Sequence[Coefficients]) -> bool:
    """Whether ``steps`` take fewer multiplications on Gram matrices than on ``X`` of shape (m, n), ``m <= n``.

    On ``X``, a step takes ``2 m^2 n + m^3``. On the Gram matrix, four products of ``m^3``, but three in the first and two in
    the last step of a stage, and each stage twice ``m^2 n`` in all.
    """
    return sum(2 * n + (4 * len(stage) - 3) * m for stage in stages(steps)) < len(steps) * (2 * n + m)


def stages(steps: Sequence[Coefficients]) -> list[list[Coefficients]]:
    """The steps, parted where the Gram matrix is made anew of ``X``: before slopes at zero, together, are above 50.

    Rounding errors of a Gram matrix are as large as those of its largest eigenvalue, beside which small singular values are
    squared away. Stages lift these first: so parted, matrices of any condition come out within some 1e-5 of what the steps
    make of ``X`` itself, and without, 1e-3 away.
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
    """The steps on ``x`` of shape (k, out, in) itself; a tall one is multiplied from its shorter side."""
    for a, b, c in steps:
        gram = _gram(x)
        # X := a X + (b A + c A^2) X,  A = X X^T
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, p, beta=a) if _is_tall(x) else torch.baddbmm(x, p, x, beta=a)
    return x


def _iterate_gram(stacks: Sequence[Tensor], steps: Sequence[Coefficients]) -> Sequence[Tensor]:
    """The same on the Gram matrices of stacks (k, out, in) whose shorter sides are as long.

    With ``P = a I + b G + c G^2``, a step is ``X := P X``, ``G := P G P``; all ``P`` are polynomials in one matrix, so they
    commute. What is kept is their product ``Q`` over each of the :func:`stages`. It is for float32.
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
        # rounded, they commute no more: P_k ... P_1 X, of a tall one X P_1 ... P_k
        stacks = [torch.bmm(x, q.mT) if _is_tall(x) else torch.bmm(q, x) for x, q in zip(stacks, parts, strict=True)]
    return stacks


def _is_tall(x: Tensor) -> bool:
    return x.shape[1] > x.shape[2]


def _gram(x: Tensor) -> Tensor:
    """The smaller of the two Gram matrices of each: ``X X^T``, of a tall one ``X^T X``."""
    return torch.bmm(x.mT, x) if _is_tall(x) else torch.bmm(x, x.mT)
